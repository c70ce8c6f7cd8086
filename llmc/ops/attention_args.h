// The operands of attention_forward and attention_backward, the same for every device.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>
#include "attention_mask.h"
#include "device_memory.h"
#include "dropout.h"
#include "precision.h"
#include "rows.h"
#include "llmc/base/error.h"

// One K/V head, wherever its k and its v were projected. Row (b, t) of k is the HS elements at `k + (b * T + t) *
// k_stride`, or with `sequences` row first_row + t (KeyRows). The rows of v, dk and dv are found in the same way by
// their own strides.
struct KVHead {
  floatX *k, *v;
  int64_t k_stride, v_stride;
  floatX *dk, *dv;
  int64_t dk_stride, dv_stride;
  bool dk_accumulate, dv_accumulate;  // dk, dv are +=; else =
  // The query heads of this K/V head are query_heads[first_query_head, first_query_head + num_query_heads).
  int first_query_head, num_query_heads;
};

// Relative positions, as in Transformer-XL (Dai et al. 2019). The score of query t and key j has a second product, of
// another query and of a vector for their distance: score = (q_t . k_j + q'_t . r_(t - j)) / sqrt(HS). The
// rows of r are in the order of keys, with the largest distance first: the distance d has row distances - 1 - d.
// Keys that are `distances` or more before a query must be hidden by its mask.
struct RelativePositions {
  const floatX* q = nullptr;  // (B, Q, NH * HS): q'. Null: attention has no relative positions.
  const floatX* r = nullptr;  // (distances, NH * HS)
  int64_t distances = 0;

  // These are used by the backward pass alone.
  floatX* dq = nullptr;              // (B, Q, NH * HS) =
  floatX* dr = nullptr;              // (distances, NH * HS) =
  float* dr_of_sequences = nullptr;  // (B, distances, NH * HS): the part of each sequence in dr
};

// Attention sinks, as in gpt-oss: the softmax of query head i has one more score, sinks[i], whose probability goes to
// no value. lse includes it, and with it the backward pass of q, k and v is that without sinks.
struct AttentionSinks {
  const floatX* scores = nullptr;  // (NH), as scaled scores are. Null: there are none.
  float* gradients = nullptr;      // (NH) +=, by the backward pass: - the sum of exp(score - lse) delta over queries
};

// Up to so many queries at the end of a sequence are few, as when generation draws tokens: their attention is bound by
// reading k and v, and each device has a way of its own for it. A prompt's part has more.
constexpr int most_few_queries = 4;

struct AttentionArgs {
  // Shape. Queries are the positions [first_query, T), keys the positions [0, T).
  int64_t B = 0, T = 0;    // sequences and their length
  int64_t NH = 0, HS = 0;  // query heads and their size
  int64_t first_query = 0;
  // Sequences of different lengths in a K/V cache, where takes_sequences allows them: (B), on the device. T is the
  // longest then, and each sequence's last T - first_query positions are queries. Null: sequence b has T keys, from row
  // b * T on.
  const KeyRows* sequences = nullptr;
  // How many positions of each sequence are queries.
  SLA_HOST_DEVICE int64_t queries() const { return T - first_query; }

  // The K/V heads, on the device: DeviceAttention sets them. A query head attends to all its K/V heads at once: one
  // softmax over the keys of all of them.
  const KVHead* kv_heads = nullptr;  // (num_kv_heads)
  int num_kv_heads = 0;
  const int* query_heads = nullptr;  // query heads, grouped by K/V head
  const int* kv_of_head = nullptr;   // (NH, kv_per_head): the K/V heads of each query head; -1 after the last
  int kv_per_head = 1;               // the largest number of K/V heads of a query head
  // (2, NH): the mask of each query head, then the mask of each of the sequences that its stride() makes (mask_of).
  // Their slopes are in units of scores before these are scaled by 1 / sqrt(HS).
  const AttentionMask* masks = nullptr;
  // The first key of each query's document, and the last query of each key's document. Neither falls from one
  // to the next. Null: all of a sequence is one document.
  const int* first_keys = nullptr;    // (B, Q), on the device
  const int* last_queries = nullptr;  // (B, T), used by the backward pass alone
  bool has_general_heads = false;     // more than one K/V head a query head, a mask, or another stride for v than for k
  int largest_stride = 1;             // the largest stride() of the masks

  // With topk > 0, a query attends only to the `topk` visible keys with the highest scores; among equal scores those
  // come first whose K/V head, and then whose position, is lower. With topk = 0 it attends to all visible keys. The
  // forward pass writes topk_score and topk_last, from which the backward pass finds the same keys again.
  int topk = 0;
  // (B, NH, Q): the lowest raw score among the chosen keys, as this device computes scores.
  float* topk_score = nullptr;
  // (B, NH, Q): the last chosen key with that score, as T * (index of the K/V head among the query head's) +
  // position.
  int* topk_last = nullptr;

  // q, out and their gradients have rows for the queries alone: with Q = T - first_query, row (b, t) is row b * Q + t -
  // first_query. Head i has HS elements of it, from i * HS on.
  const floatX* q = nullptr;  // (B, Q, NH * HS), rows q_stride apart
  int64_t q_stride = 0;
  floatX* out = nullptr;  // (B, Q, NH * HS)
  // (B, Q, NH * HS): out before it is rounded to floatX, from probabilities with twice the digits of bf16. Null if it
  // is not needed. Where floatX is float, out itself is exact.
  float* exact_out = nullptr;
  // (B, NH, Q): the natural log of the sum of the exponentials of a query's scaled scores. A query that sees no key has
  // out 0 and lse +inf, so that exp(score - lse) is 0; with a sink, lse is that.
  float* lse = nullptr;

  // Relative positions go with several K/V heads and with masks that show intervals of keys, but not with other masks
  // nor with topk.
  RelativePositions relative;

  // Partial results over parts of the keys, in the attention of a few queries: attention_partials(...) floats, or null.
  float* partials = nullptr;

  // These are used by the backward pass alone. dk and dv of the K/V heads have rows for all keys [0, T): the gradient
  // of a key that no query sees is 0.
  const floatX* dout = nullptr;  // (B, Q, NH * HS)
  floatX* dq = nullptr;          // (B, Q, NH * HS), rows dq_stride apart
  int64_t dq_stride = 0;
  bool dq_accumulate = false;  // dq is +=; else =
  float* delta = nullptr;      // (B, NH, Q) =: rowsum(dout * out)
  // Partial sums of dk and dv per query head, which are added up in a fixed order, or on a GPU dS where it goes through
  // memory: attention_backward_scratch(...) floats, or null for 0.
  float* scratch = nullptr;

  // Dropout of probabilities, in training passes whose queries and keys are the positions [0, T); not with topk, and on
  // a GPU not with relative positions.
  Dropout dropout;

  AttentionSinks sinks;
};

SLA_HOST_DEVICE inline KeyRows key_rows_of(const AttentionArgs& a, int64_t b) {
  return a.sequences != nullptr ? a.sequences[b] : KeyRows{int(b * a.T), int(a.T)};
}

// The mask of a query head, over all positions; with stride > 1, over the positions of one of the mask's stride()
// sequences.
SLA_HOST_DEVICE inline const AttentionMask& mask_of(const AttentionArgs& a, int64_t head, int64_t stride = 1) {
  return a.masks[stride > 1 ? a.NH + head : head];
}

// Whether each query head of a K/V head with `query_heads` query heads needs a part of `scratch`. Each device folder
// defines it.
bool needs_scratch(int64_t query_heads);

// The size of `scratch`, in floats, for `parts` parts: one for each query head and each of its K/V heads that
// needs_scratch holds for. T is AttentionArgs::T, the keys of a sequence, however many of them are queries. Each device
// folder defines it.
int64_t attention_backward_scratch(int64_t B, int64_t T, int64_t HS, int64_t parts);

// Whether attention_forward takes several sequences with `queries` queries each that lie in a K/V cache. Each device
// folder defines it.
bool takes_sequences(int64_t queries, int topk);

// The size of `partials`, in floats, for B sequences of up to T positions; 0: the device has no use for them. Each
// device folder defines it.
int64_t attention_partials(int64_t B, int64_t NH, int64_t HS, int64_t T, int64_t kv_per_head);

// Aborts if the device's attention cannot use a K/V head with these strides. Each device folder defines it.
void check_kv_head(const KVHead& kv_head);

// The K/V heads of a layer's attention, on the device, and the arguments that say which they are. The owner must
// outlive what uses these.
struct DeviceAttention {
  AttentionArgs args;  // NH and the K/V heads; the rest is to be set

  DeviceAttention() = default;
  // `query_heads`: each K/V head's, one after the other. `masks`: (NH), or none if all heads are causal.
  DeviceAttention(const std::vector<KVHead>& kv_heads, const std::vector<int>& query_heads,
                  std::vector<AttentionMask> masks = {}) {
    for (int head : query_heads) args.NH = std::max<int64_t>(args.NH, head + 1);
    auto of_head = std::vector<std::vector<int>>(size_t(args.NH));
    args.has_general_heads = !masks.empty();
    allow(kv_heads);
    for (size_t i = 0; i < kv_heads.size(); i++) {
      const KVHead& kv = kv_heads[i];
      for (int r = 0; r < kv.num_query_heads; r++) of_head[query_heads[kv.first_query_head + r]].push_back(int(i));
    }
    for (const std::vector<int>& kv : of_head) args.kv_per_head = std::max(args.kv_per_head, int(kv.size()));
    args.has_general_heads |= args.kv_per_head > 1;
    std::vector<int> kv_of_head;
    for (std::vector<int>& kv : of_head) {
      CHECK(!kv.empty());
      kv.resize(size_t(args.kv_per_head), -1);
      kv_of_head.insert(kv_of_head.end(), kv.begin(), kv.end());
    }
    CHECK(masks.empty() || int64_t(masks.size()) == args.NH);
    masks.resize(size_t(args.NH));
    for (int64_t i = 0; i < args.NH; i++) {
      args.largest_stride = std::max(args.largest_stride, masks[i].stride());
      masks.push_back(mask_of_each_residue(masks[i]));
    }
    kv_heads_ = DeviceArray<KVHead>(kv_heads);
    query_heads_ = DeviceArray<int>(query_heads);
    kv_of_head_ = DeviceArray<int>(kv_of_head);
    masks_ = DeviceArray<AttentionMask>(masks);
    args.kv_heads = kv_heads_.data, args.num_kv_heads = int(kv_heads.size());
    args.query_heads = query_heads_.data, args.kv_of_head = kv_of_head_.data, args.masks = masks_.data;
  }

  // Other K/V heads take the place of these, one for one. They must have been allowed before `args` was copied.
  void replace(const std::vector<KVHead>& kv_heads) {
    CHECK(int(kv_heads.size()) == args.num_kv_heads);
    copy_to_device(kv_heads_.data, kv_heads);
  }
  void allow(const std::vector<KVHead>& kv_heads) {
    for (const KVHead& kv : kv_heads) {
      check_kv_head(kv);
      args.has_general_heads |= kv.k_stride != kv.v_stride;
    }
  }

 private:
  DeviceArray<KVHead> kv_heads_;
  DeviceArray<int> query_heads_, kv_of_head_;
  DeviceArray<AttentionMask> masks_;
};

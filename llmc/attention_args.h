// The operands of attention_forward and attention_backward, the same for every device.
#pragma once
#include <cstdint>          // int64_t
#include <utility>          // std::move
#include <vector>           // std::vector
#include "device_memory.h"  // DeviceArray

// One K/V head, wherever it was projected. Row (b, t) of k is at `k + (b * T + t) * stride` and has HS elements, v likewise; dk and dv
// likewise with dstride.
template <class Element>
struct KVHead {
  Element *k, *v;
  int64_t stride;
  Element *dk, *dv;
  int64_t dstride;
  bool accumulate;                        // dk and dv are +=; else =
  int first_query_head, num_query_heads;  // its query heads are query_heads[first_query_head, first_query_head + num_query_heads)
};

template <class Element>
struct AttentionArgs {
  // Shape. Queries are the positions [first_query, T), keys the positions [0, T).
  int64_t B = 0, T = 0;    // sequences and their length
  int64_t NH = 0, HS = 0;  // query heads and their size
  int64_t first_query = 0;

  // The K/V heads, on the device: what KVHeads::set_args sets.
  const KVHead<Element>* kv_heads = nullptr;  // (num_kv_heads)
  int num_kv_heads = 0;
  const int* query_heads = nullptr;  // (NH): the query heads, grouped by K/V head
  const int* kv_of_head = nullptr;   // (NH): the K/V head of each query head

  // q, out and their gradients have rows for the queries alone: with Q = T - first_query, row (b, t) is row b * Q + t - first_query.
  // Head i has HS elements of it, from i * HS on.
  const Element* q = nullptr;  // (B, Q, NH * HS), rows q_stride apart
  int64_t q_stride = 0;
  Element* out = nullptr;  // (B, Q, NH * HS)
  float* lse = nullptr;    // (B, NH, Q): the log of the sum of the exponentials of a query's scaled scores, natural

  // Backward only, which needs first_query = 0.
  const Element* dout = nullptr;  // (B, T, NH * HS)
  Element* dq = nullptr;          // (B, T, NH * HS), rows dq_stride apart
  int64_t dq_stride = 0;
  bool dq_accumulate = false;  // dq is +=; else =
  float* delta = nullptr;      // (B, NH, T) =: rowsum(dout * out)
};

// Aborts if the device's attention cannot use a K/V head with these strides. Each device folder defines it.
template <class Element>
void check_kv_head(const KVHead<Element>& kv_head);

// The K/V heads of a layer's attention, on the host and on the device.
template <class Element>
struct KVHeads {
  std::vector<KVHead<Element>> kv_heads;
  std::vector<int> query_heads;  // (NH): the layer's query heads, grouped by K/V head
  std::vector<int> kv_of_head;   // (NH): the K/V head of each query head
  DeviceArray<KVHead<Element>> device_kv_heads;
  DeviceArray<int> device_query_heads, device_kv_of_head;

  KVHeads() = default;
  KVHeads(std::vector<KVHead<Element>> the_kv_heads, std::vector<int> the_query_heads)
      : kv_heads(std::move(the_kv_heads)), query_heads(std::move(the_query_heads)), kv_of_head(query_heads.size()) {
    for (size_t i = 0; i < kv_heads.size(); i++) {
      check_kv_head(kv_heads[i]);
      for (int r = 0; r < kv_heads[i].num_query_heads; r++) kv_of_head[query_heads[kv_heads[i].first_query_head + r]] = int(i);
    }
    device_kv_heads = DeviceArray<KVHead<Element>>(kv_heads);
    device_query_heads = DeviceArray<int>(query_heads);
    device_kv_of_head = DeviceArray<int>(kv_of_head);
  }

  // Lets args point to these K/V heads, and sets NH. They must outlive its use.
  void set_args(AttentionArgs<Element>& args) const {
    args.NH = int64_t(query_heads.size());
    args.kv_heads = device_kv_heads.data, args.num_kv_heads = int(kv_heads.size());
    args.query_heads = device_query_heads.data, args.kv_of_head = device_kv_of_head.data;
  }
};

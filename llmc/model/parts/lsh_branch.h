// Attention by locality-sensitive hashing as a branch (terms/lsh.h, llmc/ops/lsh.h): q and v of all heads, the
// buckets of q, attention to keys of the same buckets, and the output projection. No other layer uses any of it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>
#include "llmc/model/binding.h"
#include "llmc/model/attention_pairs.h"
#include "llmc/ops/lsh.h"
#include "norm.h"

// In generation: what the cache keeps of a layer.
struct LshCache {
  int64_t capacity = 0;
  floatX* qv = nullptr;                // (slots, capacity, 2C)
  int* buckets = nullptr;              // (slots, capacity, h, rounds)
  const int* rows = nullptr;           // (N, groups), from this layer's group on: where the rows of a pass go
  int64_t rows_stride = 0;             // groups
  const KeyRows* sequences = nullptr;  // (slots): where the keys of each span's sequence lie
};

struct LshBranch {
  int layer = 0;
  AttentionParams<floatX> w;
  AttentionParams<float> g;
  LshShape shape;                                          // without B and T
  const floatX* in = nullptr;                              // (N, C)
  floatX* qv = nullptr;                                    // (N, 2C)
  LshOrder of;                                             // in training, the buckets of N rows
  floatX* att = nullptr;                                   // (N, C): the heads' outputs
  float* lse = nullptr;                                    // (N, h)
  float* scratch = nullptr;                                // (lsh_scratch(...)): in training
  floatX* out = nullptr;                                   // (N, C)
  floatX *din = nullptr, *datt = nullptr, *dqv = nullptr;  // (N, C), (N, C), (N, 2C)
  std::optional<LshCache> cache;                           // in generation

  int64_t C() const { return shape.C(); }
};

inline LshShape lsh_shape(const ModelConfig& c, const WiringTable& table, int64_t B, int64_t T) {
  return {B, T, c.num_heads, c.head_size(), table.lsh_buckets, table.lsh_rounds};
}

inline LshBranch make_lsh(int layer, bool is_generation) {
  LshBranch b;
  b.layer = layer;
  if (is_generation) b.cache.emplace();
  return b;
}

inline void declare(LshBranch& b, ActivationList& list) {
  const ModelShape& shape = list.shape;
  const WiringTable& table = shape.attention_plan.table;
  const int64_t N = shape.rows, C = shape.config.channels, h = shape.config.num_heads, rounds = table.lsh_rounds;
  list.of_sublayer(Recompute::block, "qv", b.qv, {N, 2 * C});
  list.of_sublayer(Recompute::block, "att", b.att, {N, C});
  list.in_buffer(buffers::branch_out, b.out, {N, C});
  if (b.cache) {
    const int64_t slots = shape.generation->slots, capacity = shape.generation->capacity(b.layer);
    list.add(MemoryGroup::kv_cache, "qv", b.cache->qv, {slots, capacity, 2 * C});
    list.add(MemoryGroup::kv_cache, "buckets", b.cache->buckets, {slots, capacity, h, rounds});
    return;
  }
  const int64_t B = shape.training->B, T = shape.training->T;
  list.of_sublayer(Recompute::block, "lse", b.lse, {N, h});
  list.of_sublayer(Recompute::block, "buckets", b.of.buckets, {N, h, rounds});
  list.of_sublayer(Recompute::block, "inverse_norms", b.of.inverse_norms, {N, h});
  list.of_sublayer(Recompute::block, "bucket_order", b.of.order, {B, h, rounds, T});
  list.of_sublayer(Recompute::block, "bucket_starts", b.of.starts, {B, h, rounds, table.lsh_buckets + 1});
  list.in_buffer(buffers::dnorm, b.datt, {N, C});
  list.in_buffer(buffers::dnorm, b.din, {N, C});
  list.in_buffer(buffers::dqkv, b.dqv, {N, 2 * C});
  const LshShape lsh = lsh_shape(shape.config, table, B, T);
  list.in_buffer({"lsh_scratch"}, b.scratch, {lsh_scratch(lsh)});
}

inline void bind_cache(LshCache& cache, const LshBranch& b, const Binding& binding) {
  const KVCachePlan& plan = *binding.shape.generation;
  const int group = plan.group_of_layer[b.layer];
  cache.capacity = plan.capacity(b.layer);
  cache.rows = binding.acts.cache_rows + group, cache.rows_stride = int64_t(plan.groups.size());
  cache.sequences = binding.acts.sequences + group * plan.slots;
}

inline void bind_branch(LshBranch& b, const LayerParams<floatX>& w, const LayerParams<float>& g, const Norm& norm,
                        const Binding& binding) {
  b.w = w.attention, b.g = g.attention, b.in = norm.out;
  b.shape = lsh_shape(binding.shape.config, binding.plan().table, 0, 0);
  if (b.cache) bind_cache(*b.cache, b, binding);
}

// ----------------------------------------------------------------------------
// The passes

// The hashes of the rows of qv, whose buckets go to `buckets`.
inline LshHash hash_args(const LshBranch& b, int* buckets, int64_t rows) {
  LshHash args;
  args.q = b.qv, args.q_stride = 2 * b.C(), args.rotations = b.w.rotations, args.buckets = buckets;
  args.N = rows, args.NH = b.shape.NH, args.HS = b.shape.HS;
  args.num_buckets = b.shape.buckets, args.rounds = b.shape.rounds;
  return args;
}

// The attention of a training batch; `dout`: null in the forward pass.
inline LshAttention attention_args(const LshBranch& b, const Batch& batch, const floatX* dout) {
  LshAttention args;
  args.shape = b.shape, args.shape.B = batch.B, args.shape.T = batch.T;
  args.qv = b.qv, args.of = b.of, args.out = b.att, args.lse = b.lse, args.scratch = b.scratch;
  args.dout = dout, args.dqv = b.dqv;
  return args;
}

// Attention of a training batch: buckets, order and att =, from qv.
inline void attend(const LshBranch& b, const Batch& batch) {
  LshHash hash = hash_args(b, b.of.buckets, batch.rows());
  hash.inverse_norms = b.of.inverse_norms;
  const LshAttention args = attention_args(b, batch, /*dout=*/nullptr);
  lsh_hash(hash);
  lsh_sort(args.shape, b.of);
  lsh_forward(args);
}

// Attention of spans of sequences, whose q, v and buckets go into the cache. Neighbouring spans that have the same
// number of queries are computed at once.
inline void attend(const LshBranch& b, const LshCache& cache, const Batch& batch) {
  const std::vector<SequenceSpan>& spans = batch.spans;
  copy_rows({cache.qv, 2 * b.C(), b.qv, 2 * b.C(), 2 * b.C(), cache.rows, cache.rows_stride}, batch.rows());
  LshHash hash = hash_args(b, cache.buckets, batch.rows());
  hash.dst_rows = cache.rows, hash.dst_rows_stride = cache.rows_stride;
  lsh_hash(hash);
  int64_t row = 0;
  for (size_t first = 0, end; first < spans.size(); first = end) {
    int64_t longest = 0;
    for (end = first; end < spans.size() && spans[end].count == spans[first].count; end++)
      longest = std::max(longest, spans[end].first + spans[end].count);
    LshDecode args;
    args.shape = b.shape, args.shape.B = int64_t(end - first), args.shape.T = longest;
    args.first_query = longest - spans[first].count, args.sequences = cache.sequences + first;
    args.qv = cache.qv, args.buckets = cache.buckets, args.out = b.att + row * b.C();
    lsh_decode(args);
    row += args.shape.B * spans[first].count;
  }
}

// out (N, C) = the output projection of the heads' outputs.
inline void project_out(const LshBranch& b, const Batch& batch) {
  matmul_forward(b.out, b.att, b.w.projw, b.w.projb, batch.rows(), b.C(), b.C());
}

// out (N, C) = the output of the branch for its input `in` (N, C).
inline void branch_forward(const LshBranch& b, const Batch& batch) {
  matmul_forward(b.qv, b.in, b.w.qkvw, b.w.qkvb, batch.rows(), b.C(), 2 * b.C());
  if (b.cache) attend(b, *b.cache, batch);
  else attend(b, batch);
  project_out(b, batch);
}
// Computes everything again in the backward pass: the same q has the same buckets.
inline void branch_again(const LshBranch& b, const Batch& batch) { branch_forward(b, batch); }

// From dout (N, C), the gradient of out: din (N, C) =, and g +=.
inline void branch_backward(const LshBranch& b, const floatX* dout, const Batch& batch) {
  const int64_t N = batch.rows(), C = b.C();
  matmul_backward(b.datt, b.g.projw, b.g.projb, dout, b.att, b.w.projw, N, C, C);
  lsh_backward(attention_args(b, batch, b.datt));
  matmul_backward(b.din, b.g.qkvw, b.g.qkvb, b.dqv, b.in, b.w.qkvw, N, C, 2 * C);
}

// ----------------------------------------------------------------------------
// Cost

// Elements of the weights that a token is multiplied with.
inline double matmul_elements(const LshBranch&, const ModelConfig& c) { return 3.0 * c.channels * c.channels; }

// The pairs of a query and a key of a layer that see each other in a sequence of T tokens, if buckets are as large as
// each other: each round has one in `buckets` of all pairs, but no more than all.
inline double lsh_pairs(const AttentionPlan& plan, int l, int64_t T) {
  const double share = double(plan.table.lsh_rounds) / plan.table.lsh_buckets;
  return attention_pairs(plan, l, T).scored * std::min(1.0, share);
}

// The FLOPs of hashing, 2 for each channel of a head and each of its rotations, and of attention, forward and backward:
// 7 matrix products, as in attention to all keys (attention_branch.h).
inline double attention_flops(const LshBranch& b, const ModelConfig& c, const AttentionPlan& plan, int64_t T) {
  const double rotations = double(plan.table.lsh_rounds) * plan.table.lsh_buckets / 2;
  return 2 * double(T) * c.channels * rotations + 2 * c.head_size() * 7 * lsh_pairs(plan, b.layer, T);
}

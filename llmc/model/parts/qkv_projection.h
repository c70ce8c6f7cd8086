// The projection of a layer: q, k and v of the heads that the layer projects (attention_plan.h), of its norm's output.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>
#include "llmc/model/binding.h"
#include "head_places.h"
#include "segment_memory.h"

// Whether layer l's q, k and v are one tensor in training: if q is kept, because the level of recomputation keeps it
// or because other layers' attention uses it. With `memory` k and v have more rows than q.
inline bool keeps_qkv(const TrainingShape& training, const AttentionPlan& plan, int l) {
  return (training.recompute < Recompute::block || !plan.shared[Qkv::q][l].empty()) && plan.table.memory == 0;
}

// Whether layer l's k and v are kept for the backward pass: always, unless the layer is reversible and no other layer's
// attention uses them.
inline bool keeps_kv(const AttentionPlan& plan, int l) {
  return !plan.table.reversible || !plan.shared[Qkv::k][l].empty() || !plan.shared[Qkv::v][l].empty();
}

// Whether q, k and v of layer l are one tensor.
inline bool has_one_qkv(const ModelShape& shape, int l) {
  return shape.generation || keeps_qkv(*shape.training, shape.attention_plan, l);
}

// A matmul to q, k and v, or to some of them: out (N, OC) = in weight^T + bias.
struct Projection {
  const floatX *in, *weight, *bias;  // (N, C), (OC, C), (OC)
  floatX* out;
  int64_t OC;
  bool is_kept;          // the backward pass finds `out` as the forward pass left it
  bool has_memory_rows;  // N is Batch::key_rows, otherwise Batch::rows
};

// The rows of an operation on q, or on k and v.
template <class Operation>
int64_t rows_of(const Operation& operation, const Batch& batch) {
  return operation.has_memory_rows ? batch.key_rows() : batch.rows();
}

struct QkvProjection {
  int layer = 0;
  bool is_read_by_others = false;  // stages of other layers read what was projected
  int64_t C = 0, QKV = 0;
  AttentionParams<floatX> w;
  AttentionParams<float> g;
  const floatX* in = nullptr;              // (N, C)
  floatX* qkv = nullptr;                   // (N, QKV): q | k | v; or, if this is null, two tensors:
  floatX *q = nullptr, *kv = nullptr;      //   (N, C), (key_rows, QKV - C)
  floatX *dqkv = nullptr, *din = nullptr;  // (N, QKV), with `memory` (N, C), of q alone; (N, C)
  floatX* dkv = nullptr;                   // with `memory` (key_rows, QKV - C); else null
  floatX* accumulator = nullptr;           // (key_rows, accumulator_heads hs): gradients of shared heads, q | k | v
  std::optional<SegmentMemory> memory;     // in training with `memory`, if the layer projects any k or v
  std::vector<Projection> projections;
  // The gradients that the layer's own attention adds to, before it does: of shared heads those that other layers'
  // attention has left; zeros of those that begin with zero.
  std::vector<RowCopy> load_dqkv;
};

inline void declare(QkvProjection& p, ActivationList& list) {
  const ModelShape& shape = list.shape;
  const AttentionPlan& plan = shape.attention_plan;
  const int64_t N = shape.rows, hs = shape.config.head_size();
  const int64_t q = shape.width(Qkv::q, p.layer), kv = shape.kv_width(p.layer);
  constexpr Recompute kept = Recompute::above_all_levels;
  p.C = shape.config.channels, p.QKV = q + kv;
  if (shape.generation) {
    if (p.is_read_by_others) list.add(MemoryGroup::activations, "qkv that other layers use", p.qkv, {N, p.QKV});
    else list.in_buffer({"qkv"}, p.qkv, {N, p.QKV});
    return;
  }
  const int64_t key_rows = shape.key_rows();
  if (has_one_qkv(shape, p.layer)) {
    list.of_sublayer(kept, "qkv", p.qkv, {N, p.QKV});
  } else {
    if (q > 0) list.of_sublayer(Recompute::block, "q", p.q, {N, q});
    list.of_sublayer(keeps_kv(plan, p.layer) ? kept : Recompute::nothing, "kv", p.kv, {key_rows, kv});
  }
  const bool has_memory = plan.table.memory > 0;
  list.in_buffer(buffers::dnorm, p.din, {N, p.C});
  list.in_buffer(buffers::dqkv, p.dqkv, {N, has_memory ? p.C : p.QKV});
  if (has_memory) list.in_buffer({"dkv", MemoryGroup::backward}, p.dkv, {key_rows, p.QKV - p.C});
  if (p.memory) declare(*p.memory, list);
  if (const int accumulator = plan.accumulator[p.layer]; accumulator >= 0)
    list.in_buffer({"accumulator " + std::to_string(accumulator), MemoryGroup::dkv_accumulators}, p.accumulator,
                   {key_rows, plan.accumulator_heads * hs});
}

// Sets the pointers and sizes but for `in` and the memory, and where the layer's heads are.
inline void bind_projection(QkvProjection& p, HeadPlaces& places, const Binding& binding) {
  const AttentionPlan& plan = binding.plan();
  const int64_t hs = binding.head_size(), q_width = binding.shape.width(Qkv::q, p.layer);
  p.w = binding.weights(p.layer), p.g = binding.gradients(p.layer);
  auto project = [&](floatX* to, int64_t first_row, int64_t rows, bool is_kept, const SegmentMemory* memory = nullptr) {
    const floatX* bias = p.w.qkvb != nullptr ? p.w.qkvb + first_row : nullptr;
    const floatX* in = memory != nullptr ? memory->extended : p.in;
    if (rows > 0) p.projections.push_back({in, p.w.qkvw + first_row * p.C, bias, to, rows, is_kept, memory != nullptr});
  };
  if (p.qkv != nullptr) {
    project(p.qkv, 0, p.QKV, /*is_kept=*/true);
  } else {
    project(p.q, 0, q_width, /*is_kept=*/false);
    project(p.kv, q_width, p.QKV - q_width, keeps_kv(plan, p.layer), p.memory ? &*p.memory : nullptr);
  }
  // A head of q | k | v that are one tensor, or two.
  auto place = [&](Qkv which, int64_t column, floatX* one, floatX* of_q, floatX* of_kv) {
    if (one != nullptr) return HeadPlace{one + column, p.QKV};
    return which == Qkv::q ? HeadPlace{of_q + column, q_width} : HeadPlace{of_kv + column - q_width, p.QKV - q_width};
  };
  for (Qkv which : all_qkv)
    for (int i : plan.projected[which][p.layer]) {
      const ProjectedHead h = {p.layer, i};
      const int64_t column = qkv_column(binding, which, h);
      PlacedHead& head = places(which, h);
      head.x = place(which, column, p.qkv, p.q, p.kv);
      if (binding.shape.generation) continue;
      head.dx = place(which, column, p.dkv == nullptr ? p.dqkv : nullptr, p.dqkv, p.dkv);
      if (const int shared = plan.shared_index(which, h); shared >= 0)
        head.dx_of_others = {p.accumulator + shared * hs, plan.accumulator_heads * hs};
    }
}

// `places`: those that attention asks for.
inline void bind_load_dqkv(QkvProjection& p, const HeadPlaces& places, const Binding& binding) {
  const AttentionPlan& plan = binding.plan();
  const int l = p.layer;
  for (Qkv which : all_qkv)
    for (int head : plan.shared[which][l]) {
      const HeadPlace to = places(which, {l, head}).dx, from = places(which, {l, head}).dx_of_others;
      add_copy(p.load_dqkv, {to.x, to.stride, from.x, from.stride, binding.head_size()});
    }
  for (Qkv which : all_qkv)
    for (int head : plan.begin_with_zero(which, l)) {
      const HeadPlace to = places(which, {l, head}).dx;
      add_copy(p.load_dqkv, {to.x, to.stride, nullptr, 0, binding.head_size()});
    }
}

// q, k and v =. `again`: in the backward pass, which computes again what has not been kept.
inline void projection_forward(const QkvProjection& p, const Batch& batch, bool again) {
  if (p.memory && !again) extend_by_memory(*p.memory, p.in, batch);
  for (const Projection& to : p.projections)
    if (!(again && to.is_kept)) matmul_forward(to.out, to.in, to.weight, to.bias, rows_of(to, batch), p.C, to.OC);
}

// From dqkv (N, C) and dkv (key_rows, QKV - C), of a layer with a memory: din (N, C) =, and g +=.
inline void projection_backward(const QkvProjection& p, const SegmentMemory& memory, const Batch& batch) {
  const int64_t N = batch.rows(), C = p.C, kv = p.QKV - C;
  float* kv_bias = p.g.qkvb != nullptr ? p.g.qkvb + C : nullptr;
  extend_by_memory(memory, p.in, batch);
  matmul_backward(memory.dextended, p.g.qkvw + C * C, kv_bias, p.dkv, memory.extended, p.w.qkvw + C * C,
                  batch.key_rows(), C, kv);
  extend_by_memory_backward(memory, p.din, batch);
  gemm('N', 'N', N, C, C, p.dqkv, C, p.w.qkvw, C, true, p.din, C);
  matmul_backward_weight(p.g.qkvw, p.g.qkvb, p.dqkv, p.in, N, C, C);
}

// From dqkv (N, QKV): din (N, C) =, and g +=.
inline void projection_backward(const QkvProjection& p, const Batch& batch) {
  if (p.memory) return projection_backward(p, *p.memory, batch);
  matmul_backward(p.din, p.g.qkvw, p.g.qkvb, p.dqkv, p.in, p.w.qkvw, batch.rows(), p.C, p.QKV);
}

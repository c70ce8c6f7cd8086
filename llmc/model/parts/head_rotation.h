// Norms and rotary positions of q and k (`qknorm`, `rope`; llmc/ops/qknorm.h, rotary.h), in place, right after the
// projection.
#pragma once
#include <vector>
#include "head_stage.h"
#include "llmc/ops/qknorm.h"
#include "qkv_projection.h"

// q or k of the projected heads, or both, to be normed and rotated; or their gradients, on the way back.
struct Rotation {
  RotaryHeads heads;     // without `rope` their table is null
  HeadNorm norm;         // without `qknorm` unused
  bool is_kept;          // the backward pass finds them so
  bool has_memory_rows;  // as in Projection
};

struct HeadRotation : HeadStage {
  bool has_norm = false;
  // For `qknorm`, in training: (N, projected heads of q, or of q and k that are one tensor), (rows of k, heads of k).
  float *q_rstd = nullptr, *k_rstd = nullptr;
  std::vector<Rotation> forward, backward;

  static bool is_in(const AttentionPlan& plan, int, bool) { return plan.table.rope > 0 || plan.table.qknorm; }
};

// Each rstd is kept as the q and k that it belongs to are.
inline void declare(HeadRotation& r, ActivationList& list) {
  const ModelShape& shape = list.shape;
  const AttentionPlan& plan = shape.attention_plan;
  r.has_norm = plan.table.qknorm;
  if (!r.has_norm || shape.generation) return;
  const int64_t N = shape.rows, q = int64_t(plan.projected[Qkv::q][r.layer].size()),
                k = int64_t(plan.projected[Qkv::k][r.layer].size());
  constexpr Recompute kept = Recompute::above_all_levels;
  if (has_one_qkv(shape, r.layer)) {
    if (q + k > 0) list.of_sublayer(kept, "qk_rstd", r.q_rstd, {N, q + k});
    return;
  }
  if (q > 0) list.of_sublayer(Recompute::block, "q_rstd", r.q_rstd, {N, q});
  const Recompute dropped_from = keeps_kv(plan, r.layer) ? kept : Recompute::nothing;
  if (k > 0) list.of_sublayer(dropped_from, "k_rstd", r.k_rstd, {shape.key_rows(), k});
}

// A norm's backward pass needs what the norm has made of the heads, which may be two tensors where the gradient is one.
inline void bind_stage(HeadRotation& r, const StageOfLayers<HeadRotation>&, const HeadPlaces& in, HeadPlaces&,
                       const Binding& binding) {
  const AttentionPlan& plan = binding.plan();
  const int hs = int(binding.head_size());
  auto first = [&](Qkv which) {
    const std::vector<int>& heads = plan.projected[which][r.layer];
    return heads.empty() ? PlacedHead() : in(which, {r.layer, heads[0]});
  };
  const PlacedHead q = first(Qkv::q), k = first(Qkv::k);
  const int q_heads = int(plan.projected[Qkv::q][r.layer].size()),
            k_heads = int(plan.projected[Qkv::k][r.layer].size());
  const bool has_memory = binding.shape.training && plan.table.memory > 0;
  const bool is_one = has_one_qkv(binding.shape, r.layer);
  auto add = [&](std::vector<Rotation>& rotations, HeadPlace x, int heads, bool is_kept, bool has_memory_rows,
                 float* rstd, HeadPlace normed) {
    if (heads == 0) return;
    rotations.push_back({{x.x, x.stride, heads, hs, binding.acts.rotary_table},
                         {rstd, normed.x, normed.stride},
                         is_kept,
                         has_memory_rows});
  };
  if (is_one) {
    add(r.forward, q_heads > 0 ? q.x : k.x, q_heads + k_heads, /*is_kept=*/true, false, r.q_rstd, {});
  } else {
    add(r.forward, q.x, q_heads, /*is_kept=*/false, false, r.q_rstd, {});
    add(r.forward, k.x, k_heads, keeps_kv(plan, r.layer), has_memory, r.k_rstd, {});
  }
  if (!binding.shape.training) return;
  if (is_one || (!has_memory && !r.has_norm)) {
    add(r.backward, q_heads > 0 ? q.dx : k.dx, q_heads + k_heads, false, false, r.q_rstd, q_heads > 0 ? q.x : k.x);
  } else {
    add(r.backward, q.dx, q_heads, false, false, r.q_rstd, q.x);
    add(r.backward, k.dx, k_heads, false, has_memory, r.k_rstd, k.x);
  }
}

inline RowPositions positions_of(const Rotation& r, const Batch& batch) {
  return r.has_memory_rows ? batch.key_positions() : batch.positions();
}

// q and k of the layer become normed and rotated.
inline void stage_forward(const HeadRotation& stage, const Batch& batch, bool again) {
  for (const Rotation& r : stage.forward) {
    if (again && r.is_kept) continue;
    if (stage.has_norm) norm_heads(r.heads, r.norm.rstd, positions_of(r, batch), rows_of(r, batch));
    else rotate(r.heads, positions_of(r, batch), rows_of(r, batch));
  }
}

// Their gradients become the gradients of what was projected.
inline void stage_backward(const HeadRotation& stage, const Batch& batch) {
  for (const Rotation& r : stage.backward)
    if (stage.has_norm) norm_heads_backward(r.heads, r.norm, positions_of(r, batch), rows_of(r, batch));
    else rotate(r.heads, positions_of(r, batch), rows_of(r, batch), /*sign=*/-1);
}

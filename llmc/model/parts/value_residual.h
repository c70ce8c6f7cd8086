// The stage of `vres`, from layer 1 on: the layer's values are a v + b v_0 of what it has projected and what layer 0
// has. In training both are kept as they were projected; in generation the sum takes the place of v.
#pragma once
#include <vector>
#include "head_stage.h"
#include "llmc/ops/value_mix.h"

struct ValueResidual : HeadStage {
  floatX* values = nullptr;         // (N, the projected heads of v): in training, the sum
  const floatX* weights = nullptr;  // (2): a and b
  float *dweights = nullptr, *scratch = nullptr;
  std::vector<ValueMix<floatX>> mixes;  // of heads that are neighbours in all of their tensors
  bool is_kept = false;                 // the backward pass finds the sum as the forward pass left it

  static bool is_in(const AttentionPlan& plan, int l, bool) { return !plan.first_values(l).empty(); }
  static bool reads_other_layers(const AttentionPlan& plan, int l) { return plan.table.value_residual && l == 0; }
};

// Declares the mixed values of a layer. They are kept for the backward pass always where other layers attend to them.
// Returns whether they are.
inline bool declare_values(floatX*& values, int l, ActivationList& list) {
  const bool is_shared = !list.shape.attention_plan.shared[Qkv::v][l].empty();
  return list.of_sublayer(is_shared ? Recompute::above_all_levels : Recompute::block, "values", values,
                          {list.shape.rows, list.shape.width(Qkv::v, l)});
}

inline void declare(ValueResidual& r, ActivationList& list) {
  if (!list.shape.training) return;
  r.is_kept = declare_values(r.values, r.layer, list);
  list.in_buffer({"value_mix_scratch", MemoryGroup::backward}, r.scratch, {value_mix_scratch(list.shape.rows)});
}

// The place of a head in the mixed values of its layer.
inline HeadPlace values_place(const Binding& binding, const ProjectedHead& h, floatX* values) {
  const int64_t width = binding.shape.width(Qkv::v, h.layer);
  return {values + kv_column(binding, Qkv::v, h) - (binding.shape.kv_width(h.layer) - width), width};
}

inline void bind_stage(ValueResidual& r, const StageOfLayers<ValueResidual>&, const HeadPlaces& in, HeadPlaces& out,
                       const Binding& binding) {
  const AttentionPlan& plan = binding.plan();
  const std::vector<int> heads = plan.first_values(r.layer);
  const int64_t hs = binding.head_size();
  r.weights = binding.weights(r.layer).value_mix, r.dweights = binding.gradients(r.layer).value_mix;
  for (size_t i = 0; i < heads.size(); i++) {
    const ProjectedHead own = {r.layer, heads[i]}, first_head = {0, heads[i]};
    const HeadPlace v = in(Qkv::v, own).x, first = in(Qkv::v, first_head).x;
    if (r.values != nullptr) out(Qkv::v, own).x = values_place(binding, own, r.values);
    const HeadPlace sum = out(Qkv::v, own).x, d = in.gradient(r.layer, Qkv::v, own),
                    dfirst = in.gradient(r.layer, Qkv::v, first_head);
    const bool accumulate = plan.first_values_accumulate[r.layer][i] != 0;
    // A layer's heads are neighbours, and so are all heads of layer 0, in its accumulator as well.
    if (i > 0 && heads[i - 1] == heads[i] - 1 && r.mixes.back().accumulate == accumulate) r.mixes.back().width += hs;
    else
      r.mixes.push_back({v.x, first.x, sum.x, v.stride, first.stride, sum.stride, hs, d.x, dfirst.x, d.stride,
                         dfirst.stride, accumulate});
  }
}

inline void stage_forward(const ValueResidual& r, const Batch& batch, bool again) {
  if (again && r.is_kept) return;
  for (const ValueMix<floatX>& mix : r.mixes) mix_values(mix, r.weights, batch.rows());
}

// From the gradient of the sum: the gradients of a, b and what layer 0 projected, = or += as the plan says. The sum's
// gradient becomes the gradient of what the layer projected.
inline void stage_backward(const ValueResidual& r, const Batch& batch) {
  for (const ValueMix<floatX>& mix : r.mixes) mix_values_backward(mix, r.dweights, r.weights, r.scratch, batch.rows());
}

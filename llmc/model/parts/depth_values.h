// The stage of `depth`: from layer 1 on the layer's values are what its queries find, at each token, in what the layers
// up to it have projected there. They are kept as they were projected; generation keeps new tokens' alone, and the
// cache has the mixed values. Each layer gives its gradients to all below, where they wait in `dprojected`.
#pragma once
#include <vector>
#include "head_stage.h"
#include "llmc/ops/depth_attention.h"
#include "llmc/ops/device_memory.h"
#include "value_residual.h"

struct DepthValues : HeadStage {
  struct Run {
    DeviceArray<LayerKV<floatX>> layers;
    DepthAttention<floatX> args;
  };
  floatX* values = nullptr;      // (N, the projected heads of v): from layer 1 on
  floatX* dprojected = nullptr;  // (N, QKV - C): what layers above have given to the gradients of k | v
  std::vector<Run> runs;         // of heads that are neighbours in all of their tensors
  bool is_kept = false;          // the backward pass finds the values as the forward pass left them

  static bool is_in(const AttentionPlan& plan, int l, bool) {
    return plan.table.depth && !plan.projected[Qkv::v][l].empty();
  }
  static bool reads_other_layers(const AttentionPlan& plan, int) { return plan.table.depth; }
  // A token has a pair with itself in each layer up to its own.
  double flops(const ModelConfig& c, const AttentionPlan& plan, int64_t T) const {
    const double heads = double(plan.projected[Qkv::v][layer].size());
    return layer > 0 ? 2 * c.head_size() * 7.0 * heads * (layer + 1) * double(T) : 0;
  }
};

inline void declare(DepthValues& d, ActivationList& list) {
  const ModelShape& shape = list.shape;
  const AttentionPlan& plan = shape.attention_plan;
  if (d.layer > 0) d.is_kept = declare_values(d.values, d.layer, list);
  if (!shape.training || d.layer + 1 == plan.num_layers || plan.projected[Qkv::v][d.layer + 1].empty()) return;
  list.add(MemoryGroup::dkv_accumulators, "dprojected", d.dprojected, {shape.rows, shape.kv_width(d.layer)});
}

// A head that the layer projects is there in all layers below.
inline void bind_stage(DepthValues& d, const StageOfLayers<DepthValues>& of_layers, const HeadPlaces& in,
                       HeadPlaces& out, const Binding& binding) {
  const AttentionPlan& plan = binding.plan();
  const bool is_training = binding.shape.training.has_value();
  const std::vector<int>& heads = plan.projected[Qkv::v][d.layer];
  // Where the gradient of a head waits that its layer projected.
  auto waiting = [&](Qkv which, const ProjectedHead& h) {
    return kv_place(binding, which, h, of_layers[size_t(h.layer)]->dprojected);
  };
  for (size_t i = 0; i < heads.size(); i++) {
    const ProjectedHead own = {d.layer, heads[i]};
    if (d.layer > 0) out(Qkv::v, own).x = values_place(binding, own, d.values);
    const bool is_above = is_training && plan.is_mixed_above(d.layer, heads[i]);
    if (i > 0 && heads[i - 1] == heads[i] - 1 && (d.runs.back().args.dk_of_above != nullptr) == is_above) {
      d.runs.back().args.heads++;
      continue;
    }
    std::vector<LayerKV<floatX>> layers;
    for (int j = 0; j <= d.layer; j++) {
      const ProjectedHead head = {j, heads[i]};
      const PlacedHead &k = in(Qkv::k, head), &v = in(Qkv::v, head);
      const bool waits = is_training && j < d.layer;
      const HeadPlace dk = waits ? waiting(Qkv::k, head) : k.dx, dv = waits ? waiting(Qkv::v, head) : v.dx;
      layers.push_back({k.x.x, v.x.x, k.x.stride, dk.x, dv.x, dk.stride});
    }
    d.runs.push_back({DeviceArray<LayerKV<floatX>>(layers), {}});
    DepthAttention<floatX>& args = d.runs.back().args;
    const PlacedHead& q = in(Qkv::q, own);
    const HeadPlace mixed = out(Qkv::v, own).x;
    args.q = q.x.x, args.q_stride = q.x.stride, args.heads = 1, args.HS = int(binding.head_size());
    args.layers = d.runs.back().layers.data, args.num_layers = int(layers.size());
    if (d.layer > 0) args.out = mixed.x, args.out_stride = mixed.stride;
    if (!is_training) continue;
    args.dq = q.dx.x, args.dq_stride = q.dx.stride;
    if (!is_above) continue;
    const HeadPlace dk = waiting(Qkv::k, own);
    args.dk_of_above = dk.x, args.dv_of_above = waiting(Qkv::v, own).x, args.of_above_stride = dk.stride;
  }
}

// The values of layer 0 are what it projected.
inline void stage_forward(const DepthValues& depth, const Batch& batch, bool again) {
  if (again && depth.is_kept) return;
  for (const DepthValues::Run& run : depth.runs)
    if (run.args.num_layers > 1) depth_attention_forward(run.args, batch.rows());
}

// In layer 0 it adds what layers above have given to the gradients.
inline void stage_backward(const DepthValues& depth, const Batch& batch) {
  for (const DepthValues::Run& run : depth.runs) depth_attention_backward(run.args, batch.rows());
}

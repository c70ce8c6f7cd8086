// The stage of `router`: from layer 1 on the K/V that attention uses are sums of what this layer and those below have
// projected, with the weights R_l[g, j, i] of head i of layer j in head g. In training both are kept. The gradient of
// what layer j projected is the sum, over layers l >= j, of R_l transposed times the gradient of layer l's sums, so
// that these gradients stay until the backward pass has come down to layer j.
#pragma once
#include <algorithm>
#include <vector>
#include "head_stage.h"
#include "llmc/ops/device_memory.h"
#include "llmc/ops/head_mix.h"

// A HeadMix with its sources, and the gradient of what it computes.
struct OwnedHeadMix {
  DeviceArray<MixedHeads<floatX>> sources;
  HeadMix<floatX> mix;
  const floatX* dout = nullptr;  // rows as far apart as the rows of mix.out
};

struct KVRouter : HeadStage {
  floatX *routed = nullptr, *drouted = nullptr;  // (N, QKV - C): the sums k | v, and their gradient; null in layer 0
  std::vector<OwnedHeadMix> sums;        // k, v: what attention uses, of what has been projected; none in layer 0
  std::vector<OwnedHeadMix> dprojected;  // k, v: the gradient of what the layer projected, from the sums' gradients
  float *dweights = nullptr, *scratch = nullptr;
  bool is_kept = false;  // the backward pass finds the sums as the forward pass left them

  static bool is_in(const AttentionPlan& plan, int l, bool) {
    return plan.table.router && !(plan.projected[Qkv::k][l].empty() && plan.projected[Qkv::v][l].empty());
  }
  static bool reads_other_layers(const AttentionPlan& plan, int) { return plan.table.router; }
  double matmul_elements(const ModelConfig& c, const AttentionPlan& plan) const {
    const int projected = int(plan.projected[Qkv::k][layer].size() + plan.projected[Qkv::v][layer].size());
    return layer > 0 ? double(projected) * c.head_size() * (layer + 1) * plan.table.num_kv_heads : 0;
  }
};

// The sums are always kept where other layers attend to them.
inline void declare(KVRouter& r, ActivationList& list) {
  const ModelShape& shape = list.shape;
  const AttentionPlan& plan = shape.attention_plan;
  const int64_t N = shape.rows, kv = plan.table.num_kv_heads;
  const int64_t width = shape.kv_width(r.layer);
  const bool is_shared = !plan.shared[Qkv::k][r.layer].empty() || !plan.shared[Qkv::v][r.layer].empty();
  if (shape.training)
    list.in_buffer({"router_scratch", MemoryGroup::backward}, r.scratch,
                   {head_mix_partial_sums(N), kv * kv * (r.layer + 1)});
  if (r.layer == 0) return;
  r.is_kept =
      list.of_sublayer(is_shared ? Recompute::above_all_levels : Recompute::block, "routed K/V", r.routed, {N, width});
  if (shape.training) list.add(MemoryGroup::dkv_accumulators, "drouted", r.drouted, {N, width});
}

// The heads of a layer that projects any of k, or of v, are all there, side by side.
inline void bind_stage(KVRouter& r, const StageOfLayers<KVRouter>& layers, const HeadPlaces& in, HeadPlaces& out,
                       const Binding& binding) {
  const AttentionPlan& plan = binding.plan();
  const int l = r.layer, L = plan.num_layers, kv = plan.table.num_kv_heads;
  r.dweights = binding.gradients(l).router;
  // The weights of layer j's heads in the sums of layer l, (kv, kv).
  auto weights = [&](int l, int j) { return binding.weights(l).router + j * kv; };
  auto add = [&](std::vector<OwnedHeadMix>& mixes, HeadPlace to, bool accumulate, const floatX* dout,
                 const std::vector<MixedHeads<floatX>>& sources) {
    mixes.push_back({DeviceArray<MixedHeads<floatX>>(sources), {}, dout});
    mixes.back()
        .mix = {to.x, to.stride, binding.head_size(), kv, accumulate, mixes.back().sources.data, int(sources.size())};
  };
  for (Qkv which : {Qkv::k, Qkv::v}) {
    const ProjectedHead own = {l, 0};
    if (plan.projected[which][l].empty()) continue;
    for (int i = 0; i < kv && l > 0; i++) {
      PlacedHead& head = out(which, {l, i});
      head.x = kv_place(binding, which, {l, i}, r.routed);
      if (binding.shape.training) head.dx = kv_place(binding, which, {l, i}, r.drouted);
    }
    std::vector<MixedHeads<floatX>> below, above;
    for (int j = 0; j <= l; j++) {
      const HeadPlace x = in(which, {j, 0}).x;
      below.push_back({x.x, x.stride, weights(l, j), int64_t(l + 1) * kv, 1});
    }
    if (l > 0) add(r.sums, out(which, own).x, /*accumulate=*/false, out(which, own).dx.x, below);
    if (!binding.shape.training) continue;
    for (int j = std::max(l, 1); j < L && !plan.projected[which][j].empty(); j++) {
      const HeadPlace d = kv_place(binding, which, {j, 0}, layers[size_t(j)]->drouted);
      above.push_back({d.x, d.stride, weights(j, l), 1, int64_t(j + 1) * kv});
    }
    // Layer 0's attention uses what it projected, so that its gradient is there.
    add(r.dprojected, in(which, own).dx, /*accumulate=*/l == 0, nullptr, above);
  }
}

inline void stage_forward(const KVRouter& r, const Batch& batch, bool again) {
  if (again && r.is_kept) return;
  for (const OwnedHeadMix& sum : r.sums) mix_heads(sum.mix, batch.rows());
}

// From the gradients of the sums of this layer and of the layers above: the weights' gradient +=, and the gradient of
// what this layer projected = or +=.
inline void stage_backward(const KVRouter& r, const Batch& batch) {
  const int64_t N = batch.rows();
  for (const OwnedHeadMix& sum : r.sums)
    mix_heads_backward(sum.mix, r.dweights, sum.dout, sum.mix.out_stride, r.scratch, N);
  for (const OwnedHeadMix& d : r.dprojected) mix_heads(d.mix, N);
}

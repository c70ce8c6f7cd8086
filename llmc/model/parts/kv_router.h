// What attention with `router` has: from layer 1 on the K/V that attention uses are sums of what this layer and those
// below have projected, with the weights R_l[g, j, i] of head i of layer j in head g. In training both are kept. The
// gradient of what layer j projected is the sum, over layers l >= j, of R_l transposed times the gradient of layer l's
// sums, so that those stay until the backward pass has come down to layer j.
#pragma once
#include <utility>
#include <vector>
#include "llmc/model/binding.h"
#include "llmc/ops/device_memory.h"
#include "llmc/ops/head_mix.h"

// A HeadMix with its sources, and the gradient of what it computes.
struct OwnedHeadMix {
  DeviceArray<MixedHeads<floatX>> sources;
  HeadMix<floatX> mix;
  const floatX* dout = nullptr;  // rows as far apart as those of mix.out
};

struct KVRouter {
  std::vector<OwnedHeadMix> sums;        // k, v: what attention uses, of what has been projected; none in layer 0
  std::vector<OwnedHeadMix> dprojected;  // k, v: the gradient of what the layer projected, from those of sums
  float *dweights = nullptr, *scratch = nullptr;
  bool is_kept = false;  // the backward pass finds the sums as the forward pass left them
};

// Whether the sums of layer l are kept for the backward pass: always where other layers attend to them.
inline bool keeps_routed(const TrainingShape& training, const AttentionPlan& plan, int l) {
  return training.recompute < Recompute::block || !plan.shared[Part::k][l].empty() || !plan.shared[Part::v][l].empty();
}

inline void router_forward(const KVRouter& r, int64_t N) {
  for (const OwnedHeadMix& sum : r.sums) mix_heads(sum.mix, N);
}

// From the gradients of the sums of this layer and of those above: that of the weights +=, and of what this layer
// projected = or +=.
inline void router_backward(const KVRouter& r, int64_t N) {
  for (const OwnedHeadMix& sum : r.sums)
    mix_heads_backward(sum.mix, r.dweights, sum.dout, sum.mix.out_stride, r.scratch, N);
  for (const OwnedHeadMix& d : r.dprojected) mix_heads(d.mix, N);
}

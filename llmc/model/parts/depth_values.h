// What attention with `depth` has: from layer 1 on the layer's values are what its queries find, at each token, in what
// the layers up to it have projected there. These are kept as they were projected; in generation those of new tokens,
// and the cache has the mixed values. Each layer gives its gradients to all below, where they wait in `dprojected`.
#pragma once
#include <vector>
#include "llmc/model/binding.h"
#include "llmc/ops/depth_attention.h"
#include "llmc/ops/device_memory.h"
#include "value_residual.h"

struct DepthValues {
  struct Run {
    DeviceArray<LayerKV<floatX>> layers;
    DepthAttention<floatX> args;
  };
  std::vector<Run> runs;  // of heads that are neighbours in all of their tensors
  bool is_kept = false;   // the backward pass finds the values as the forward pass left them
};

// The values of layer 0 are what it projected.
inline void depth_values_forward(const DepthValues& depth, int64_t N) {
  for (const DepthValues::Run& run : depth.runs)
    if (run.args.num_layers > 1) depth_attention_forward(run.args, N);
}

// In layer 0 it adds what layers above have given to the gradients.
inline void depth_values_backward(const DepthValues& depth, int64_t N) {
  for (const DepthValues::Run& run : depth.runs) depth_attention_backward(run.args, N);
}

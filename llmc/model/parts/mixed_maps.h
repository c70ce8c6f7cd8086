// What attention with `blend` and `gate` has beside other attention: the outputs of several attention maps, the layer's
// own and the layers' below, on its own v, are summed with weights (llmc/ops/map_weights.h). A model of L layers
// computes L (L + 1) / 2 attentions.
#pragma once
#include <cstdint>
#include <optional>
#include "llmc/model/binding.h"
#include "llmc/ops/map_weights.h"

// With `gate`, from layer 1 on: for each token the weight of the attention map of the layer below, and its gradient.
struct MapGate {
  float *gate, *dgate;  // (N)
};

struct MixedMaps {
  MapWeights weights;
  floatX *map_out = nullptr, *dmap_out = nullptr;  // (N, C): the output of one map, and its gradient, while it runs
  float* map_sum = nullptr;                        // (N, C): the weighted sum of the maps' outputs
  // (N, C): a map's output before it is rounded, for `gate`, whose gradient is a difference of two such outputs. Null
  // where map_out is as exact, or is exact enough.
  float* exact_map_out = nullptr;
  float* map_gates = nullptr;  // (L, N): of `gate`
  std::optional<MapGate> gate;
  // (L, N): gradients of the gates, and of the weights of each map in one layer.
  float *dmap_gates = nullptr, *dmap_weights = nullptr;
};

inline void declare(MixedMaps& mixed, ActivationList& list) {
  const int64_t N = list.shape.rows, C = list.shape.config.channels, L = list.shape.config.num_layers;
  const bool has_gate = list.shape.attention_plan.table.mix == WiringTable::Mix::gate;
  constexpr MemoryGroup backward = MemoryGroup::backward;
  list.in_buffer(buffers::branch_out, mixed.map_out, {N, C});
  list.in_buffer({"map_sum"}, mixed.map_sum, {N, C});
  if (has_gate) list.in_buffer({"map_gates"}, mixed.map_gates, {L, N});
  if (!list.shape.training) return;
  list.in_buffer(buffers::dhidden, mixed.dmap_out, {N, C});
  list.in_buffer({"dmap_weights", backward}, mixed.dmap_weights, {L, N});
  if (has_gate) list.in_buffer({"dmap_gates", backward}, mixed.dmap_gates, {L, N});
  if (has_gate && is_16_bit) list.in_buffer({"exact_map_out", backward}, mixed.exact_map_out, {N, C});
}

// Sets the gates of layer `layer`.
inline void bind_mixed_maps(MixedMaps& mixed, int layer, const Binding& binding) {
  const int64_t N = binding.shape.rows;
  mixed.weights = {mixed.map_gates, float(binding.plan().table.blend), N, layer};
  if (!has_map_gate(binding.plan(), layer)) return;
  const bool is_training = binding.shape.training.has_value();
  mixed.gate = MapGate{mixed.map_gates + layer * N, is_training ? mixed.dmap_gates + layer * N : nullptr};
}

// What attention with `blend` and `gate` has beside other attention: the outputs of several attention maps, the layer's
// own and those of the layers below on its own v, are summed with weights (llmc/ops/map_weights.h). A model of L layers
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
  float* map_sum = nullptr;                        // (N, C)
  float* exact_map_out = nullptr;                  // (N, C): null where map_out is as exact, or is exact enough
  std::optional<MapGate> gate;
  float *dmap_gates = nullptr, *dmap_weights = nullptr;  // (L, N)
};

// Sets the pointers of layer `layer`. One map's output and its gradient are in tensors that are free while it runs.
inline void bind_mixed_maps(MixedMaps& mixed, int layer, const Binding& binding) {
  const Activations& acts = binding.acts;
  const int64_t N = binding.shape.rows;
  mixed.map_out = acts.branch_out, mixed.dmap_out = acts.dhidden, mixed.map_sum = acts.map_sum;
  mixed.weights = {acts.map_gates, float(binding.plan().table.blend), N, layer};
  mixed.exact_map_out = acts.exact_map_out, mixed.dmap_gates = acts.dmap_gates, mixed.dmap_weights = acts.dmap_weights;
  if (!has_map_gate(binding.plan(), layer)) return;
  mixed.gate = MapGate{acts.map_gates + layer * N, acts.dmap_gates == nullptr ? nullptr : acts.dmap_gates + layer * N};
}

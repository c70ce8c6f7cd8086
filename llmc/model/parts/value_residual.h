// What attention with `vres` has from layer 1 on: the layer's values are a v + b v_0 of what it has projected and what
// layer 0 has. In training both are kept as they were projected; in generation the cache has the sum alone.
#pragma once
#include <vector>
#include "llmc/model/binding.h"
#include "llmc/ops/value_mix.h"

struct ValueResidual {
  const floatX* weights = nullptr;  // (2): a and b
  float *dweights = nullptr, *scratch = nullptr;
  std::vector<ValueMix<floatX>> mixes;  // of heads that are neighbours in all of their tensors
  bool is_kept = false;                 // the backward pass finds the sum as the forward pass left it
};

// Whether the sums of layer l are kept for the backward pass: always where other layers attend to them.
inline bool keeps_values(const TrainingShape& training, const AttentionPlan& plan, int l) {
  return training.recompute < Recompute::block || !plan.shared[Part::v][l].empty();
}

inline void value_residual_forward(const ValueResidual& r, int64_t N) {
  for (const ValueMix<floatX>& mix : r.mixes) mix_values(mix, r.weights, N);
}

// From the gradient of the sum: those of a, b and what layer 0 projected, = or += as the plan says; it becomes that of
// what the layer projected.
inline void value_residual_backward(const ValueResidual& r, int64_t N) {
  for (const ValueMix<floatX>& mix : r.mixes) mix_values_backward(mix, r.dweights, r.weights, r.scratch, N);
}

// Sums of the outputs of several attention maps in a layer (`blend` and `gate`; llmc/ops/map_weights.h).
#pragma once
#include <cstdint>
#include "llmc/ops/map_weights.h"
#include "llmc/ops/precision.h"
#include "threads.h"
#include "vec.h"

// sum (N, C) = or, unless `first`, += weight(map) map_out (N, C); if `last`, that is out (N, C) instead.
inline void mix_map_forward(float* sum, floatX* out, const floatX* map_out, const MapWeights& weights, int map,
                            bool first, bool last, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static) if (is_worth_threads(N * C * 8))
  for (int64_t n = 0; n < N; n++) {
    const float w = weights.weight(map, n);
    for (int64_t i = n * C; i < (n + 1) * C; i++) {
      const float x = (first ? 0.0f : sum[i]) + w * to_float(map_out[i]);
      if (last) from_float(out[i], x);
      else sum[i] = x;
    }
  }
}

// The backward pass of a map's term in the sum: dmap_out (N, C) = weight(map) dout (N, C); dmap_weight (N) =
// rowsum(dout * map_out).
template <class Element>
inline void mix_map_backward(floatX* dmap_out, float* dmap_weight, const floatX* dout, const Element* map_out,
                             const MapWeights& weights, int map, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static) if (is_worth_threads(N * C * 12))
  for (int64_t n = 0; n < N; n++) {
    const float w = weights.weight(map, n);
    double sum = 0;  // a gate's gradient is the difference of two of these
#pragma omp simd reduction(+ : sum)
    for (int64_t i = n * C; i < (n + 1) * C; i++) {
      sum += double(to_float(dout[i])) * to_float(map_out[i]);
      from_float(dmap_out[i], w * to_float(dout[i]));
    }
    dmap_weight[n] = float(sum);
  }
}

// dgates (layer + 1, N) += from dweights (layer + 1, N), the gradients of the weights of each map in that layer.
inline void mix_gates_backward(float* dgates, const float* dweights, const MapWeights& weights, int64_t N) {
#pragma omp parallel for schedule(static) if (is_worth_threads(N * (weights.layer + 1) * 8))
  for (int64_t n = 0; n < N; n++) add_gate_gradients(dgates, dweights, weights, n);
}

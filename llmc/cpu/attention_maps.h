// Sums of the outputs of several attention maps in a layer, and the gates that weigh them (`blend` and `gate`;
// llmc/map_weights.h).
//
//   map_gate_forward:   gate =
//   map_gate_backward:  dx, dweight, dbias +=
//   mix_map_forward:    sum = or +=, out =
//   mix_map_backward:   dmap_out, dmap_weight =
//   mix_gates_backward: dgates +=
#pragma once
#include <cmath>               // std::exp
#include <cstdint>             // int64_t
#include "llmc/map_weights.h"  // MapWeights, add_gate_gradients
#include "threads.h"           // is_worth_threads
#include "vec.h"               // to_float, from_float

// gate (N) = sigmoid(x . weight + bias); x (N, C), weight (C), bias (1) or null.
inline void map_gate_forward(float* gate, const floatX* x, const floatX* weight, const floatX* bias, int64_t N,
                             int64_t C) {
#pragma omp parallel for schedule(static) if (is_worth_threads(N * C * 4))
  for (int64_t n = 0; n < N; n++) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < C; c++) sum += to_float(x[n * C + c]) * to_float(weight[c]);
    gate[n] = 1 / (1 + std::exp(-(sum + (bias != nullptr ? to_float(bias[0]) : 0.0f))));
  }
}

// dgate (N) becomes the gradient of x . weight + bias; dx (N, C), dweight (C), dbias (1) or null +=.
inline void map_gate_backward(floatX* dx, float* dweight, float* dbias, float* dgate, const float* gate,
                              const floatX* x, const floatX* weight, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static) if (is_worth_threads(N * C * 8))
  for (int64_t n = 0; n < N; n++) {
    const float d = dgate[n] *= gate[n] * (1 - gate[n]);
#pragma omp simd
    for (int64_t c = 0; c < C; c++) from_float(dx[n * C + c], to_float(dx[n * C + c]) + d * to_float(weight[c]));
  }
  // A thread owns columns, so that no sum depends on the number of threads.
  constexpr int64_t columns = 64;
#pragma omp parallel for schedule(static) if (is_worth_threads(N * C * 4))
  for (int64_t first = 0; first < C; first += columns)
    for (int64_t n = 0; n < N; n++)
      for (int64_t c = first; c < C && c < first + columns; c++) dweight[c] += dgate[n] * to_float(x[n * C + c]);
  if (dbias == nullptr) return;
  double sum = 0;  // a single number, in which large terms may cancel
  for (int64_t n = 0; n < N; n++) sum += dgate[n];
  dbias[0] += float(sum);
}

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

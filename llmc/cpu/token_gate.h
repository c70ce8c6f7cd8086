// Gates: for each token a number between 0 and 1, by a linear layer of its channels.
#pragma once
#include <cmath>
#include <cstdint>
#include "llmc/ops/precision.h"
#include "threads.h"
#include "vec.h"

// gate (N) = sigmoid(x . weight + bias); x (N, C), weight (C), bias (1) or null.
inline void token_gate_forward(float* gate, const floatX* x, const floatX* weight, const floatX* bias, int64_t N,
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
inline void token_gate_backward(floatX* dx, float* dweight, float* dbias, float* dgate, const float* gate,
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
  if (dbias != nullptr) add_column_sums(dbias, dgate, N, 1);
}

// Linear layers of a few tokens, as generation computes them: bound by reading the weight, which a thread reads a row at a time, once.
#pragma once
#include <cstdint>           // int64_t
#include <vector>            // std::vector
#include "llmc/precision.h"  // floatX
#include "threads.h"         // is_worth_threads
#include "vec.h"             // to_float, from_float

// Beyond as many rows a matmul by blocks is faster: it uses each weight that it loads more often.
constexpr int64_t most_few_rows = 16;

// So many texts are sampled in a pass: with more, their bits would not be those that each has alone.
constexpr size_t most_texts_of_a_pass = size_t(most_few_rows);

// The sum over x y, in an order that depends on `count` alone.
template <class Element>
inline float dot_product(const float* x, const Element* y, int64_t count) {
  constexpr int lanes = 64;  // four vectors of 16, so that additions need not wait for each other
  float sums[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
#pragma omp simd
    for (int j = 0; j < lanes; j++) sums[j] += x[i + j] * to_float(y[i + j]);
  }
  for (int j = 0; i + j < count; j++) sums[j] += x[i + j] * to_float(y[i + j]);
  for (int half = lanes / 2; half > 0; half /= 2) {
#pragma omp simd
    for (int j = 0; j < half; j++) sums[j] += sums[j + half];
  }
  return sums[0];
}

// out (N, OC) = inp (N, C) weight (OC, C)^T + bias (OC); without bias if null. A row of out has the same bits whatever N is, so that a text
// is the same whatever is sampled beside it.
inline void few_rows_forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int64_t N, int64_t C, int64_t OC) {
  std::vector<float> floats(size_t(N * C));
  for (int64_t i = 0; i < N * C; i++) floats[i] = to_float(inp[i]);
  const float* x = floats.data();
#pragma omp parallel for schedule(static) if (is_worth_threads(int64_t(sizeof(floatX)) * OC * C))
  for (int64_t o = 0; o < OC; o++) {
    const float shift = bias != nullptr ? to_float(bias[o]) : 0.0f;
    for (int64_t n = 0; n < N; n++) from_float(out[n * OC + o], dot_product(x + n * C, weight + o * C, C) + shift);
  }
}

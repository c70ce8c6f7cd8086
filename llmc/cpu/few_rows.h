// Linear layers of a few tokens, as generation computes them: bound by reading the weight, which a thread reads a row
// at a time, once.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>
#include "llmc/ops/precision.h"
#include "threads.h"
#include "vec.h"

// Beyond this many rows a matmul by blocks is faster: it uses each weight that it loads more often.
constexpr int64_t most_few_rows = 16;

// The number of texts that are sampled in one pass. With more, a text's bits would differ from its bits alone.
constexpr size_t most_texts_of_a_pass = size_t(most_few_rows);

// How far ahead of what it multiplies a thread asks for a weight: rows follow each other in memory, and the next ones
// are under way when they are needed. Measured on Zen 5, two threads: 52 GB/s instead of 40 in fp32, 60 instead of 54
// in bf16.
constexpr size_t weight_prefetch_bytes = 4096;

// The sum of n numbers: the second half is added to the first one until one number is left.
template <int n>
inline float sum_by_halves(float* x) {
  if constexpr (n == 1) return x[0];
  else {
#pragma omp simd
    for (int j = 0; j < n / 2; j++) x[j] += x[j + n / 2];
    return sum_by_halves<n / 2>(x);
  }
}

// The sum over x y, in an order that depends on `count` alone. Prefetches what is `prefetch_bytes` after y.
template <class Element>
inline float dot_product(const float* x, const Element* y, int64_t count, size_t prefetch_bytes) {
  constexpr int lanes = 64;  // four vectors of 16, so that additions need not wait for each other
  float sums[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    for (size_t line = 0; line < lanes * sizeof(Element); line += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(y + i) + line + prefetch_bytes);
#pragma omp simd
    for (int j = 0; j < lanes; j++) sums[j] += x[i + j] * to_float(y[i + j]);
  }
#pragma omp simd
  for (int j = 0; j < int(count - i); j++) sums[j] += x[i + j] * to_float(y[i + j]);
  return sum_by_halves<lanes>(sums);
}

// out (N, OC) = inp (N, C) weight (OC, C)^T + bias (OC); without bias if null. A row of out has the same bits whatever
// N is, so that a text is the same whatever is sampled beside it.
inline void few_rows_forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int64_t N,
                             int64_t C, int64_t OC) {
  std::vector<float> floats(size_t(N * C));
  for (int64_t i = 0; i < N * C; i++) floats[i] = to_float(inp[i]);
  const float* x = floats.data();
  // A quarter of the bytes that other operations need is worth threads: several cores together read memory faster than
  // one. Measured on Zen 5, two threads, GPT-2 124M in bf16: 195 tokens per second instead of 190.
#pragma omp parallel for schedule(static) if (is_worth_threads(4 * int64_t(sizeof(floatX)) * OC * C))
  for (int64_t o = 0; o < OC; o++) {
    const float shift = bias != nullptr ? to_float(bias[o]) : 0.0f;
    for (int64_t n = 0; n < N; n++)
      from_float(out[n * OC + o], dot_product(x + n * C, weight + o * C, C, weight_prefetch_bytes) + shift);
  }
}

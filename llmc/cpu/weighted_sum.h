// Weighted sums (llmc/ops/weighted_sum.h), each in one pass over its terms.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>
#include "llmc/ops/weighted_sum.h"
#include "threads.h"
#include "vec.h"

// out (n) = or, with `accumulate`, += the sum of weight x over the terms.
inline void weighted_sum(floatX* out, const std::vector<WeightedTensor>& terms, int64_t n, bool accumulate) {
  constexpr int64_t width = 1024;
#pragma omp parallel for schedule(static) if (is_worth_threads(int64_t(sizeof(floatX)) * n * int64_t(terms.size() + 1)))
  for (int64_t first = 0; first < n; first += width) {
    const int64_t count = std::min(width, n - first);
    float sum[width];
    for (int64_t i = 0; i < count; i++) sum[i] = accumulate ? to_float(out[first + i]) : 0.0f;
    for (const WeightedTensor& term : terms) {
      const floatX* x = term.x + first;
      const float weight = to_float(*term.weight);
#pragma omp simd
      for (int64_t i = 0; i < count; i++) sum[i] += weight * to_float(x[i]);
    }
#pragma omp simd
    for (int64_t i = 0; i < count; i++) from_float(out[first + i], sum[i]);
  }
}

// From dout (n), the gradient of the sum: dweights (terms) += the weights' gradients, the sums of dout x. scratch
// (weighted_sum_pieces(n), terms).
inline void weighted_sum_backward(float* dweights, const floatX* dout, const std::vector<WeightedTensor>& terms,
                                  float* scratch, int64_t n) {
  const int64_t pieces = weighted_sum_pieces(n), columns = int64_t(terms.size());
#pragma omp parallel for schedule(static) if (is_worth_threads(int64_t(sizeof(floatX)) * n * (columns + 1)))
  for (int64_t piece = 0; piece < pieces; piece++) {
    const int64_t first = piece * weighted_sum_piece, count = std::min(weighted_sum_piece, n - first);
    for (int64_t t = 0; t < columns; t++) {
      const floatX *x = terms[size_t(t)].x + first, *d = dout + first;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < count; i++) sum += to_float(d[i]) * to_float(x[i]);
      scratch[piece * columns + t] = sum;
    }
  }
  add_column_sums(dweights, scratch, pieces, columns);
}

// The operations of Muon beside the matmuls of its iteration; llmc/muon.h has the formulas.
#pragma once
#include <algorithm>         // std::max, std::min
#include <cmath>             // std::sqrt
#include <cstdint>           // int64_t
#include "llmc/muon.h"       // MuonStep
#include "llmc/precision.h"  // floatX, has_master_weights
#include "optimizer.h"       // ParameterChunk, StepStats, is_finite, clip_factor, full_precision_weights
#include "threads.h"         // is_worth_threads
#include "vec.h"             // to_float, from_float

// grads = u and m = the new momentum, over the chunks. Nothing changes if the loss or the norm is not finite.
inline void muon_momentum(float* grads, float* m, const ParameterChunk* chunks, int64_t num_chunks, const MuonStep& s,
                          const StepStats* sums) {
  if (!is_finite(*sums)) return;
  const float scale = clip_factor(*sums, s.grad_clip), rest = 1.0f - s.momentum;
#pragma omp parallel for schedule(static) if (is_worth_threads(16 * num_elements(chunks, num_chunks)))
  for (int64_t c = 0; c < num_chunks; c++) {
    const int64_t end = chunks[c].begin + chunks[c].count, to_state = chunks[c].state - chunks[c].begin;
#pragma omp simd
    for (int64_t i = chunks[c].begin; i < end; i++) {
      const float g = grads[i] * scale, m_new = s.momentum * m[i + to_state] + rest * g;
      m[i + to_state] = m_new;
      grads[i] = s.momentum * m_new + rest * g;
    }
  }
}

// Calls f(i, j) for all rows i and columns j, in blocks, so that a matrix and its transpose are both read a cache line
// at a time.
template <class F>
void for_each_element(int64_t rows, int64_t columns, F f) {
  constexpr int64_t block = 16;
#pragma omp parallel for schedule(static) if (is_worth_threads(8 * rows * columns))
  for (int64_t row = 0; row < rows; row += block)
    for (int64_t column = 0; column < columns; column += block)
      for (int64_t i = row; i < std::min(row + block, rows); i++)
        for (int64_t j = column; j < std::min(column + block, columns); j++) f(i, j);
}

// x = u (rows, columns) / ||u||, transposed if there are more rows than columns. squares (1): ||u||^2.
inline void muon_normalize(floatX* x, const float* u, const double* squares, int64_t rows, int64_t columns) {
  const float scale = float(1.0 / std::max(std::sqrt(*squares), muon_least_norm));
  const bool transposed = rows > columns;
  for_each_element(rows, columns, [=](int64_t i, int64_t j) {
    from_float(x[transposed ? j * rows + i : i * columns + j], u[i * columns + j] * scale);
  });
}

// p (n, n) = muon_a I + muon_b a + muon_c a_squared
inline void muon_polynomial(floatX* p, const floatX* a, const floatX* a_squared, int64_t n) {
#pragma omp parallel for schedule(static) if (is_worth_threads(12 * n * n))
  for (int64_t i = 0; i < n; i++) {
#pragma omp simd
    for (int64_t j = 0; j < n; j++)
      from_float(p[i * n + j],
                 muon_b * to_float(a[i * n + j]) + muon_c * to_float(a_squared[i * n + j]) + (i == j ? muon_a : 0.0f));
  }
}

// Moves a matrix by x, the result of the iteration, transposed if there are more rows than columns. params and master
// point to the matrix in the arenas of that name; master is not used if floatX is float. Nothing changes if the loss or
// the norm is not finite.
inline void muon_update(floatX* params, float* master, const floatX* x, int64_t rows, int64_t columns,
                        const MuonStep& s, const StepStats* sums) {
  if (!is_finite(*sums)) return;
  const float keep = 1.0f - s.learning_rate * s.weight_decay,
              step = s.learning_rate * 0.2f * std::sqrt(float(std::max(rows, columns)));
  const bool transposed = rows > columns;
  float* const weights = full_precision_weights(params, master, 0);
  for_each_element(rows, columns, [=](int64_t i, int64_t j) {
    float& w = weights[i * columns + j];
    w = w * keep - step * to_float(x[transposed ? j * rows + i : i * columns + j]);
    if constexpr (has_master_weights) from_float(params[i * columns + j], w);
  });
}

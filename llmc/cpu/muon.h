// The operations of Muon beside the matmuls of its iteration; llmc/ops/muon.h has the formulas.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>
#include "llmc/ops/muon_args.h"
#include "llmc/ops/precision.h"
#include "optimizer.h"
#include "threads.h"
#include "vec.h"

// What the iteration's workspaces may take, in elements, if that is enough for a matrix: room for twelve (256, 256).
constexpr int64_t muon_workspace_elements = int64_t(4) << 20;

// Calls f(part) for parts of a batch, which are a matrix each. Where there are enough of them a thread takes one from
// the first to the last operation, so that it stays in the thread's caches; else all threads take one after the other.
template <class F>
void for_each_part(const MuonBatch& batch, F f) {
#pragma omp parallel for schedule(dynamic, 1) if (batch.count >= omp_get_max_threads())
  for (int64_t i = batch.first; i < batch.first + batch.count; i++) f(MuonBatch{i, 1, batch.n, batch.length});
}

// *place = s, which the operations after it read.
inline void muon_set_step(MuonStep* place, const MuonStep& s) { *place = s; }

// grads = u, m = the new momentum and squares = ||u||^2 of all matrices. grads and m stay as they are if the loss or
// the norm is not finite.
inline void muon_momentum(const MuonArgs& args) {
  if (!is_finite(*args.sums)) return;
  const MuonStep s = *args.step;
  const ParameterChunk* const chunks = args.chunks;
  float *const grads = args.grads, *const m = args.m;
  const float scale = grad_factor(*args.sums, s.grad_clip), momentum = s.momentum, rest = 1.0f - s.momentum;
  std::vector<double> chunk_squares(size_t(args.num_chunks));  // added up in order: the same bits on any threads
#pragma omp parallel for schedule(static) if (is_worth_threads(16 * num_elements(chunks, args.num_chunks)))
  for (int64_t c = 0; c < args.num_chunks; c++) {
    const int64_t end = chunks[c].begin + chunks[c].count, to_state = chunks[c].state - chunks[c].begin;
    double squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = chunks[c].begin; i < end; i++) {
      const float g = grads[i] * scale, m_new = momentum * m[i + to_state] + rest * g, u = momentum * m_new + rest * g;
      m[i + to_state] = m_new;
      grads[i] = u;
      squares += double(u) * double(u);
    }
    chunk_squares[size_t(c)] = squares;
  }
  for (int64_t i = 0; i < args.num_matrices; i++) {
    const double* const first = chunk_squares.data() + args.matrices[i].first_chunk;
    args.squares[i] = std::accumulate(first, first + args.matrices[i].num_chunks, 0.0);
  }
}

// Calls f(place in the matrix, place in x) for each element; x is the transpose of a matrix with more rows than
// columns. Then it goes in blocks, so that both are read a cache line at a time.
template <class F>
void for_each_element(const MuonMatrix& matrix, F f) {
  const int64_t rows = matrix.rows, columns = matrix.columns;
  const bool transposed = rows > columns;
  const int64_t block_rows = transposed ? 16 : 1, block_columns = transposed ? 16 : columns;
#pragma omp parallel for schedule(static) if (is_worth_threads(8 * rows * columns))
  for (int64_t row = 0; row < rows; row += block_rows)
    for (int64_t column = 0; column < columns; column += block_columns) {
      const int64_t last = std::min(column + block_columns, columns);
      if (!transposed) {
#pragma omp simd
        for (int64_t j = row * columns; j < (row + 1) * columns; j++) f(j, j);
      } else {
        for (int64_t j = column; j < last; j++)
          for (int64_t i = row; i < std::min(row + block_rows, rows); i++) f(i * columns + j, j * rows + i);
      }
    }
}

// x (count, n, length) = u / ||u|| of a batch's matrices, transposed if there are more rows than columns.
inline void muon_normalize(floatX* x, const MuonArgs& args, const MuonBatch& batch) {
  for (int64_t k = 0; k < batch.count; k++, x += batch.n * batch.length) {
    const MuonMatrix& matrix = args.matrices[batch.first + k];
    const float* const u = args.grads + matrix.begin;
    const float scale = float(1.0 / std::max(std::sqrt(args.squares[batch.first + k]), muon_least_norm));
    for_each_element(matrix, [=](int64_t i, int64_t in_x) { from_float(x[in_x], u[i] * scale); });
  }
}

// p (count, n, n) = muon_a I + muon_b a + muon_c a_squared
inline void muon_polynomial(floatX* p, const floatX* a, const floatX* a_squared, const MuonBatch& batch) {
  const int64_t n = batch.n;
  for (int64_t k = 0; k < batch.count; k++, p += n * n, a += n * n, a_squared += n * n) {
#pragma omp parallel for schedule(static) if (is_worth_threads(12 * n * n))
    for (int64_t i = 0; i < n; i++) {
#pragma omp simd
      for (int64_t j = 0; j < n; j++)
        from_float(p[i * n + j], muon_b * to_float(a[i * n + j]) + muon_c * to_float(a_squared[i * n + j]) +
                                     (i == j ? muon_a : 0.0f));
    }
  }
}

// Moves a batch's matrices by x (count, n, length), the result of the iteration. Nothing changes if the loss or the
// norm is not finite.
inline void muon_update(const MuonArgs& args, const floatX* x, const MuonBatch& batch) {
  if (!is_finite(*args.sums)) return;
  const MuonStep s = *args.step;
  const float keep = 1.0f - s.learning_rate * s.weight_decay,
              step = s.learning_rate * 0.2f * std::sqrt(float(batch.length));
  for (int64_t k = 0; k < batch.count; k++, x += batch.n * batch.length) {
    const MuonMatrix& matrix = args.matrices[batch.first + k];
    floatX* const params = args.params + matrix.begin;
    float* const weights = full_precision_weights(params, args.master, matrix.state);
    for_each_element(matrix, [=](int64_t i, int64_t in_x) {
      float& w = weights[i];
      w = w * keep - step * to_float(x[in_x]);
      if constexpr (has_master_weights) from_float(params[i], w);
    });
  }
}

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
  for (int64_t i = batch.first; i < batch.first + batch.count; i++) f(MuonBatch{i, 1, batch.rows, batch.columns});
}

// *place = s, which the operations after it read.
inline void muon_set_step(MuonStep* place, const MuonStep& s) { *place = s; }

// grads = u, m = the new momentum and squares = ||u||^2 of all matrices. grads and m stay as they are if the loss or
// the norm is not finite.
inline void muon_momentum(const MuonArgs& args) {
  if (!args.sums->is_finite()) return;
  const MuonStep s = *args.step;
  const ParameterChunk* const chunks = args.chunks;
  float *const grads = args.grads, *const m = args.m;
  const float scale = args.sums->grad_factor(s.grad_clip), momentum = s.momentum, rest = 1.0f - s.momentum;
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

// x (count, rows, columns) = u / ||u|| of a batch's matrices
inline void muon_normalize(floatX* x, const MuonArgs& args, const MuonBatch& batch) {
  const int64_t n = batch.elements();
  for (int64_t k = batch.first; k < batch.first + batch.count; k++, x += n) {
    const float* const u = args.grads + args.matrices[k].begin;
    const float scale = float(1.0 / std::max(std::sqrt(args.squares[k]), muon_least_norm));
#pragma omp parallel for simd schedule(static) if (parallel : is_worth_threads(8 * n))
    for (int64_t i = 0; i < n; i++) from_float(x[i], u[i] * scale);
  }
}

// p (count, n, n) = muon_a I + muon_b a + muon_c a_squared
inline void muon_polynomial(floatX* p, const floatX* a, const floatX* a_squared, const MuonBatch& batch) {
  const int64_t n = batch.n();
  for (int64_t k = 0; k < batch.count; k++, p += n * n, a += n * n, a_squared += n * n) {
#pragma omp parallel for schedule(static) if (is_worth_threads(12 * n * n))
    for (int64_t i = 0; i < n; i++) {
      for_each_vector(n, [=](int64_t j, int64_t count) {
        store_vector(p + i * n + j,
                     muon_b * load_vector(a + i * n + j, count) + muon_c * load_vector(a_squared + i * n + j, count),
                     count);
      });
      from_float(p[i * n + i], muon_b * to_float(a[i * n + i]) + muon_c * to_float(a_squared[i * n + i]) + muon_a);
    }
  }
}

// Moves a batch's matrices by x (count, rows, columns), the result of the iteration. Nothing changes if the loss or the
// norm is not finite.
inline void muon_update(const MuonArgs& args, const floatX* x, const MuonBatch& batch) {
  if (!args.sums->is_finite()) return;
  const MuonStep s = *args.step;
  const float keep = 1.0f - s.learning_rate * s.weight_decay,
              step = s.learning_rate * 0.2f * std::sqrt(float(batch.length()));
  const int64_t n = batch.elements();
  for (int64_t k = batch.first; k < batch.first + batch.count; k++, x += n) {
    floatX* const params = args.params + args.matrices[k].begin;
    float* const weights = full_precision_weights(params, args.master, args.matrices[k].state);
#pragma omp parallel for simd schedule(static) if (parallel : is_worth_threads(12 * n))
    for (int64_t i = 0; i < n; i++) {
      weights[i] = weights[i] * keep - step * to_float(x[i]);
      if constexpr (has_master_weights) from_float(params[i], weights[i]);
    }
  }
}

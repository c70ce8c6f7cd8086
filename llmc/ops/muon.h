// Muon (Jordan et al. 2024) for the matrices of the layers, as torch.optim.Muon computes it with nesterov and
// adjust_lr_fn="match_rms_adamw" (Liu et al. 2025), by which elements move about as far as AdamW's at the same learning
// rate. For each matrix W (rows, columns):
//
//   g = gradient, clipped as for AdamW
//   m = momentum m + (1 - momentum) g
//   u = momentum m + (1 - momentum) g, of the new m
//   O = about the matrix nearest to u of those whose singular values are all 1
//   W = W (1 - learning_rate weight_decay) - learning_rate 0.2 sqrt(max(rows, columns)) O
//
// O comes from five Newton-Schulz iterations: X = u / ||u||; then five times, in floatX,
//
//   A = X X^T,   X = P X   with   P = a I + b A + c A A,
//
// or, if X has more rows than columns, A = X^T X and X = X P.
//
// Where one side is at least twice as long as the other, several iterations at once need fewer FLOPs (Gram
// Newton-Schulz, Zhang et al. 2026): A of the next one is P A P, and X is multiplied by the product of the P alone,
// which are polynomials of the first A: symmetric, and in any order. A has the squares of singular values, so that the
// digits of small ones are lost in it, and each iteration enlarges the loss by up to a^2 = 12: after two of them A is
// computed anew.
//
// q, k and v are a matrix each. AdamW updates all other parameters; the matrices keep a moment v, too, which nothing
// uses, so that a checkpoint's files are the same for either optimizer.
//
// In bf16 the iteration is as exact as PyTorch's: it is off by 0.01 to 0.5 of a direction's norm, for gradients of a
// few tokens.
#pragma once
#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>
#include "llmc/base/host_device.h"

// A matrix that Muon updates: rows of a tensor, one after the other.
struct MuonMatrix {
  int64_t begin;  // in the arenas of weights and gradients
  int64_t state;  // in the arenas of master weights and moments; differs where they hold only this process's shard
  int64_t rows, columns;
  int64_t first_chunk = 0, num_chunks = 0;  // of the matrices' chunks, which the momentum and the norm walk over

  int64_t count() const { return rows * columns; }
  int64_t shorter() const { return std::min(rows, columns); }
  int64_t longer() const { return std::max(rows, columns); }
};

// Neighbours in a list of matrices of one shape: each operation of the iteration is launched once for all of them.
struct MuonBatch {
  int64_t first, count;   // of the matrices
  int64_t rows, columns;  // of each

  SLA_HOST_DEVICE int64_t n() const { return rows < columns ? rows : columns; }
  SLA_HOST_DEVICE int64_t length() const { return rows < columns ? columns : rows; }
  SLA_HOST_DEVICE int64_t elements() const { return rows * columns; }  // of each
};

// The elements that the iteration needs beside u for a matrix: X twice, A, A A and a I + b A + c A A.
inline int64_t muon_elements(const MuonMatrix& matrix) {
  return 2 * matrix.count() + 3 * matrix.shorter() * matrix.shorter();
}

// Orders the matrices by their shapes, and returns them in batches of at most most_elements, but at least one matrix,
// of about equal size.
inline std::vector<MuonBatch> make_muon_batches(std::vector<MuonMatrix>& matrices, int64_t most_elements) {
  const auto shape = [](const MuonMatrix& m) { return std::tuple(m.rows, m.columns); };
  std::stable_sort(matrices.begin(), matrices.end(),
                   [&](const MuonMatrix& a, const MuonMatrix& b) { return shape(a) < shape(b); });
  std::vector<MuonBatch> batches;
  for (size_t first = 0, end = 0; first < matrices.size(); first = end) {
    while (end < matrices.size() && shape(matrices[end]) == shape(matrices[first])) end++;
    const auto [rows, columns] = shape(matrices[first]);
    const int64_t count = int64_t(end - first);  // a GPU's grid has up to 65,535
    const int64_t most = std::clamp<int64_t>(most_elements / muon_elements(matrices[first]), 1, 65535);
    const int64_t parts = (count + most - 1) / most;
    for (int64_t i = 0; i < parts; i++) {
      const int64_t begin = i * count / parts;
      batches.push_back({int64_t(first) + begin, (i + 1) * count / parts - begin, rows, columns});
    }
  }
  return batches;
}

// The numbers of one step. The norm by which gradients are clipped is in StepStats.
struct MuonStep {
  float learning_rate, momentum, weight_decay;
  double grad_clip;  // largest norm; 0: none
};

// In five iterations x (a + b x^2 + c x^4) takes singular values of 0.002 and more to between 0.68 and 1.21.
constexpr int muon_iterations = 5;
constexpr float muon_a = 3.4445f, muon_b = -4.7750f, muon_c = 2.0315f;
constexpr double muon_least_norm = 1e-7;  // by which u is divided at least

// How many iterations are computed from one A, after so many.
constexpr int muon_iterations_at_once(int64_t n, int64_t length, int done) {
  return length < 2 * n ? 1 : done == 0 ? 2 : muon_iterations - done;
}

// The FLOPs of the iteration for a matrix: products of (n, n) are symmetric, and half of them is computed.
inline double muon_flops(const MuonMatrix& matrix) {
  const double n = double(matrix.shorter()), length = double(matrix.longer());
  double flops = 0;
  for (int done = 0, iterations; done < muon_iterations; done += iterations) {
    iterations = muon_iterations_at_once(matrix.shorter(), matrix.longer(), done);
    flops += n * n * length + (4 * iterations - 3) * n * n * n + 2 * n * n * length;
  }
  return flops;
}

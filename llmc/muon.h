// Muon (Jordan et al. 2024) for the matrices of the layers, as torch.optim.Muon computes it with nesterov and
// adjust_lr_fn="match_rms_adamw" (Liu et al. 2025), by which elements move about as far as AdamW's at the same learning
// rate. For each matrix W (rows, columns):
//
//   g = gradient, clipped as for AdamW
//   m = momentum m + (1 - momentum) g
//   u = momentum m + (1 - momentum) g, of the new m
//   O = the matrix nearest to u of those whose singular values are all 1, about: five steps of a Newton-Schulz
//   iteration W = W (1 - learning_rate weight_decay) - learning_rate 0.2 sqrt(max(rows, columns)) O
//
// The iteration: X = u / ||u||, of which the longer side is its columns (else it is transposed); then five times, in
// floatX,
//
//   A = X X^T,   X = (a I + b A + c A A) X
//
// q, k and v are a matrix each. AdamW updates all other parameters; their moment v is kept of the matrices too, and not
// used.
#pragma once
#include <algorithm>  // std::min
#include <cstdint>    // int64_t

// A matrix that Muon updates: rows of a tensor, one after the other.
struct MuonMatrix {
  int64_t begin;  // in the arenas of weights and gradients
  int64_t state;  // in those of master weights and moments, which differs where they hold only this process's shard
  int64_t rows, columns;
  int64_t first_chunk = 0, num_chunks = 0;  // of the list that the momentum and the norm walk over

  int64_t count() const { return rows * columns; }
  int64_t shorter() const { return std::min(rows, columns); }
};

// The numbers of one step. The norm by which gradients are clipped is in StepStats (adamw.h).
struct MuonStep {
  float learning_rate, momentum, weight_decay;
  double grad_clip;  // largest norm; 0: none
};

// In five steps x (a + b x^2 + c x^4) takes singular values of 0.002 and more to between 0.68 and 1.21.
constexpr int muon_iterations = 5;
constexpr float muon_a = 3.4445f, muon_b = -4.7750f, muon_c = 2.0315f;
constexpr double muon_least_norm = 1e-7;  // by which u is divided at least

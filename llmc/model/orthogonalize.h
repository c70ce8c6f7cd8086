// The iteration of Muon (llmc/muon.h), of matmuls and operations that every device has.
#pragma once
#include <utility>            // std::swap
#include "activations.h"      // Activations
#include "llmc/operations.h"  // gemm, muon_normalize, muon_polynomial

// Returns the workspace that has O of u (rows, columns), in floatX; transposed if there are more rows than columns.
// squares (1): ||u||^2.
inline const floatX* orthogonalize(const Activations& a, const float* u, const double* squares,
                                   const MuonMatrix& matrix) {
  const int64_t n = matrix.shorter(), length = matrix.count() / n;
  floatX *x = a.muon_x, *next = a.muon_next;
  muon_normalize(x, u, squares, matrix.rows, matrix.columns);
  for (int i = 0; i < muon_iterations; i++) {
    gemm('N', 'T', n, n, length, x, length, x, length, false, a.muon_gram, n);
    gemm('N', 'N', n, n, n, a.muon_gram, n, a.muon_gram, n, false, a.muon_gram_squared, n);
    muon_polynomial(a.muon_polynomial, a.muon_gram, a.muon_gram_squared, n);
    gemm('N', 'N', n, length, n, a.muon_polynomial, n, x, length, false, next, length);
    std::swap(x, next);
  }
  return x;
}

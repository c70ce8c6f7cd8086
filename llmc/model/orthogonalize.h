// The iteration of Muon (llmc/ops/muon.h), of matmuls and operations that every device has.
#pragma once
#include <utility>
#include "activations.h"
#include "llmc/ops/muon_args.h"
#include "llmc/operations.h"

// Returns the workspace that has O of each matrix of the batch, (batch.count, n, length), in floatX; transposed if a
// matrix has more rows than columns. args.grads has u, args.squares their norms' squares.
inline const floatX* orthogonalize(const Activations& a, const MuonArgs& args, const MuonBatch& batch) {
  const int64_t n = batch.n, length = batch.length, count = batch.count;
  floatX *x = a.muon_x, *next = a.muon_next;
  muon_normalize(x, args, batch);
  for (int i = 0; i < muon_iterations; i++) {
    gemm({count, 'N', 'T', n, n, length}, x, x, a.muon_gram);
    gemm({count, 'N', 'N', n, n, n}, a.muon_gram, a.muon_gram, a.muon_gram_squared);
    muon_polynomial(a.muon_polynomial, a.muon_gram, a.muon_gram_squared, batch);
    gemm({count, 'N', 'N', n, length, n}, a.muon_polynomial, x, next);
    std::swap(x, next);
  }
  return x;
}

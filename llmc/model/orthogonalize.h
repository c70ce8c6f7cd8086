// The update by Muon (llmc/ops/muon.h) of a batch, of matmuls and operations that every device has.
#pragma once
#include <utility>
#include "activations.h"
#include "llmc/ops/muon_args.h"
#include "llmc/operations.h"

// Moves a batch's matrices. args.grads has u, args.squares their norms' squares. Of each matrix the workspaces have O,
// (n, length), in floatX; transposed if the matrix has more rows than columns.
inline void update_by_muon(const Activations& a, const MuonArgs& args, const MuonBatch& batch) {
  for_each_part(batch, [&](const MuonBatch& part) {
    const int64_t n = batch.n, length = batch.length, count = part.count, first = part.first - batch.first;
    floatX *x = a.muon_x + first * n * length, *next = a.muon_next + first * n * length,
           *gram = a.muon_gram + first * n * n, *gram_squared = a.muon_gram_squared + first * n * n,
           *polynomial = a.muon_polynomial + first * n * n;
    muon_normalize(x, args, part);
    for (int i = 0; i < muon_iterations; i++) {
      gemm({count, 'N', 'T', n, n, length, /*is_symmetric=*/true}, x, x, gram);
      gemm({count, 'N', 'N', n, n, n, /*is_symmetric=*/true}, gram, gram, gram_squared);
      muon_polynomial(polynomial, gram, gram_squared, part);
      gemm({count, 'N', 'N', n, length, n}, polynomial, x, next);
      std::swap(x, next);
    }
    muon_update(args, x, part);
  });
}

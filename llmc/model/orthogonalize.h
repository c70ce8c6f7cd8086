// The update by Muon (llmc/ops/muon.h) of a batch, of matmuls and operations that every device has.
#pragma once
#include <algorithm>
#include <utility>
#include "activation_list.h"
#include "llmc/ops/muon_args.h"
#include "llmc/operations.h"

// What Muon needs for one batch of matrices of sides n and length after the other.
struct MuonWorkspace {
  floatX *x = nullptr, *next = nullptr;  // (batch, n, length): X before and after an iteration
  // (batch, n, n): A, A A and a I + b A + c A A.
  floatX *gram = nullptr, *gram_squared = nullptr, *polynomial = nullptr;
  double* squares = nullptr;  // (matrices): the square of each one's norm
  MuonStep* step = nullptr;   // (1)
};

// Declares nothing where AdamW updates all parameters.
inline void declare(MuonWorkspace& w, ActivationList& list) {
  if (!list.shape.training || list.shape.training->matrices.empty()) return;
  constexpr MemoryGroup muon = MemoryGroup::muon;
  int64_t wide = 0, square = 0;  // the most elements of a batch
  for (const MuonBatch& batch : list.shape.training->batches) {
    wide = std::max(wide, batch.count * batch.elements());
    square = std::max(square, batch.count * batch.n() * batch.n());
  }
  for (floatX** x : {&w.x, &w.next}) list.add(muon, "muon_x", *x, {wide});
  for (floatX** a : {&w.gram, &w.gram_squared, &w.polynomial}) list.add(muon, "muon_gram", *a, {square});
  list.add(muon, "muon_squares", w.squares, {int64_t(list.shape.training->matrices.size())});
  list.add(muon, "muon_step", w.step, {1});
}

// Moves a batch's matrices. args.grads has u, args.squares their norms' squares. The workspaces have each matrix's O
// in floatX.
inline void update_by_muon(const MuonWorkspace& w, const MuonArgs& args, const MuonBatch& batch) {
  for_each_part(batch, [&](const MuonBatch& part) {
    const int64_t n = batch.n(), length = batch.length(), count = part.count, first = part.first - batch.first;
    const bool is_tall = batch.rows > batch.columns;
    floatX *x = w.x + first * batch.elements(), *next = w.next + first * batch.elements(),
           *gram = w.gram + first * n * n;
    const auto product = [&](const floatX* left, const floatX* right, floatX* of_both) {  // (n, n), symmetric
      gemm({count, 'N', 'N', n, n, n, /*is_symmetric=*/true}, left, right, of_both);
    };
    muon_normalize(x, args, part);
    for (int done = 0, iterations; done < muon_iterations; done += iterations) {
      iterations = muon_iterations_at_once(n, length, done);
      // q becomes the product of the iterations' polynomials p. Its memory is the next X's, which is not computed yet:
      // at least two (n, n) where there are several iterations.
      floatX *p = w.polynomial + first * n * n, *q = next, *half = next + count * n * n,
             *square = w.gram_squared + first * n * n;
      gemm({count, is_tall ? 'T' : 'N', is_tall ? 'N' : 'T', n, n, length, /*is_symmetric=*/true}, x, x, gram);
      for (int i = 0; i < iterations; i++) {
        product(gram, gram, square);
        muon_polynomial(p, gram, square, part);
        if (i + 1 < iterations) product(p, gram, half), product(half, p, gram);
        if (i == 0) {
          std::swap(p, q);
        } else {
          product(p, q, square);
          std::swap(q, square);
        }
      }
      gemm({count, 'N', 'N', batch.rows, batch.columns, n}, is_tall ? x : q, is_tall ? q : x, next);
      std::swap(x, next);
    }
    muon_update(args, x, part);
  });
}

// Weighted sums of tensors of the same size (`dense`).
#pragma once
#include <cstdint>
#include "precision.h"

// A term of a sum: x (n) times a weight of the model.
struct WeightedTensor {
  const floatX* x;
  const floatX* weight;  // (1)
};

constexpr int64_t weighted_sum_piece = 8192;  // elements whose products are a partial sum of a weight's gradient

inline int64_t weighted_sum_pieces(int64_t n) { return (n + weighted_sum_piece - 1) / weighted_sum_piece; }

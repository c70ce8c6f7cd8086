#pragma once
#include <cstdint>

// A block of a product, which one thread computes: c (m, n) = alpha op(a) op(b), or += if `accumulate`, in fp32.
struct GemmBlock {
  int64_t m, n, k, lda, ldb, ldc;
  float alpha;
  char op_a, op_b;
  bool accumulate;
};

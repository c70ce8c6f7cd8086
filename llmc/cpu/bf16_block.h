// What multiplies bf16 is told: a block of a product, which one thread computes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <initializer_list>

// A block of a product, which one thread computes: c (m, n) = alpha op(a) op(b), or += if `accumulate`, in fp32.
struct Bf16Block {
  int64_t m, n, k, lda, ldb, ldc;
  float alpha;
  char op_a, op_b;
  bool accumulate;

  bool operator==(const Bf16Block& o) const {
    return m == o.m && n == o.n && k == o.k && lda == o.lda && ldb == o.ldb && ldc == o.ldc && alpha == o.alpha &&
           op_a == o.op_a && op_b == o.op_b && accumulate == o.accumulate;
  }
};
struct Bf16BlockHash {
  size_t operator()(const Bf16Block& s) const {
    size_t hash = size_t(s.op_a == 'T') + 2 * size_t(s.op_b == 'T') + 4 * size_t(s.accumulate);
    for (int64_t x : {s.m, s.n, s.k, s.lda, s.ldb, s.ldc})
      hash = (hash ^ size_t(x)) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29;
    return hash;
  }
};

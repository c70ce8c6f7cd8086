// A product of many pairs of matrices at once, for every device.
#pragma once
#include <cstdint>

// c_i (m, n) = op(a_i) op(b_i) for i < batch; op: 'N' as it is, 'T' transposed. Matrices are row-major without gaps,
// and an operand's matrices lie one after the other.
struct BatchedGemm {
  int64_t batch;
  char op_a, op_b;
  int64_t m, n, k;
  bool is_symmetric = false;  // each c_i is, by what a_i and b_i are: a device may compute half of it
};

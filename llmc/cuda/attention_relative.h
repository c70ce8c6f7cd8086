// What attention with relative positions needs beside its own kernels, in every precision: the gradient of r, from the
// parts of the sequences in it.
#pragma once
#include <cstdint>
#include "llmc/ops/attention_args.h"
#include "vec.h"

// dr (n) = the sum over the sequences of dr_of_sequences (B, n), in their order. A thread owns eight neighbouring
// elements, so that loads are coalesced and, unrolled, several are in flight.
__global__ void __launch_bounds__(element_threads)
    sum_of_sequences_kernel(floatX* dr, const float* dr_of_sequences, int B, int64_t n) {
  const int64_t i = first_element();
  if (i >= n) return;
  float sum[8] = {};
#pragma unroll 4
  for (int b = 0; b < B; b++) {
    float x[8];
    load8(x, dr_of_sequences + b * n + i);
    for (int j = 0; j < 8; j++) sum[j] += x[j];
  }
  store8(dr + i, sum);
}

// relative.dr = the sum of relative.dr_of_sequences over the sequences.
inline void launch_sum_of_sequences(const AttentionArgs& a) {
  const int64_t n = a.relative.distances * a.NH * a.HS;  // a multiple of 8, as HS is
  launch_elements(sum_of_sequences_kernel, n, a.relative.dr, a.relative.dr_of_sequences, int(a.B), n);
}

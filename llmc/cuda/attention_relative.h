// What attention with relative positions needs beside its own kernels, in every precision: the gradient of r, from the
// parts of the sequences in it.
#pragma once
#include <cstdint>
#include "column_sums.h"
#include "llmc/ops/attention_args.h"

// relative.dr = the sum of relative.dr_of_sequences over the sequences.
inline void launch_sum_of_sequences(const AttentionArgs& a) {
  const int64_t n = a.relative.distances * a.NH * a.HS;  // a multiple of 8, as HS is
  launch_elements(sum_of_sequences_kernel<false, floatX, float>, n, a.relative.dr, a.relative.dr_of_sequences, a.B, n);
}

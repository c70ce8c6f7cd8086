// What attention with relative positions needs beside its own kernels, for both precisions: the gradient of r, from the
// parts of the sequences in it.
#pragma once
#include <cstdint>
#include "device.h"
#include "launch.h"
#include "llmc/ops/attention_args.h"
#include "vec.h"

constexpr int relative_threads = 256;

// dr (n) = the sum over the sequences of dr_of_sequences (B, n), in their order. A thread owns eight neighbouring
// elements, so that loads are coalesced and, unrolled, several are in flight.
template <class Element>
__global__ void __launch_bounds__(relative_threads)
    sum_of_sequences_kernel(Element* dr, const float* dr_of_sequences, int B, int64_t n) {
  const int64_t i = (int64_t(blockIdx.x) * relative_threads + threadIdx.x) * 8;
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
template <class Element>
void launch_sum_of_sequences(const AttentionArgs<Element>& a) {
  const int64_t n = a.relative.distances * a.NH * a.HS;  // a multiple of 8, as HS is
  launch(sum_of_sequences_kernel<Element>, dim3(unsigned(ceil_div(n, relative_threads * 8))), relative_threads, 0,
         gpu().stream, a.relative.dr, a.relative.dr_of_sequences, int(a.B), n);
}

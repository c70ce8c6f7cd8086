// The queries of relative positions: the operations of llmc/cpu/relative.h. C and the strides are multiples of 8.
#pragma once
#include <cstdint>
#include "llmc/ops/relative.h"
#include "vec.h"

// In both kernels a thread owns eight neighbouring channels of a row, and neighbouring threads have neighbouring ones.
__global__ void __launch_bounds__(element_threads)
    relative_queries_forward_kernel(RelativeQueries r, int64_t N, int64_t C) {
  const int64_t at = first_element(), n = at / C, c = at % C;
  if (n >= N) return;
  float q[8], u[8], v[8];
  load8(q, r.q + n * r.q_stride + c);
  load8(u, r.u + c);
  load8(v, r.v + c);
  for (int i = 0; i < 8; i++) u[i] += q[i], v[i] += q[i];
  store8(r.of_keys + at, u);
  store8(r.of_distances + at, v);
}

__global__ void __launch_bounds__(element_threads)
    relative_queries_backward_kernel(RelativeQueryGradients r, int64_t N, int64_t C) {
  const int64_t at = first_element(), n = at / C, c = at % C;
  if (n >= N) return;
  float x[8], y[8];
  load8(x, r.of_keys + at);
  load8(y, r.of_distances + at);
  for (int i = 0; i < 8; i++) x[i] += y[i];
  store8(r.dq + n * r.dq_stride + c, x);
}

inline void relative_queries_forward(const RelativeQueries& r, int64_t N, int64_t C) {
  launch_elements(relative_queries_forward_kernel, N * C, r, N, C);
}

inline void relative_queries_backward(const RelativeQueryGradients& r, int64_t N, int64_t C) {
  launch_elements(relative_queries_backward_kernel, N * C, r, N, C);
}

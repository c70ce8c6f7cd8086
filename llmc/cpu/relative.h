// The queries of relative positions (llmc/ops/relative.h).
#pragma once
#include <cstdint>
#include "llmc/ops/precision.h"
#include "llmc/ops/relative.h"
#include "threads.h"
#include "vec.h"

// of_keys (N, C) = q + u, of_distances (N, C) = q + v.
inline void relative_queries_forward(const RelativeQueries& r, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static) if (is_worth_threads(3 * int64_t(sizeof(floatX)) * N * C))
  for (int64_t n = 0; n < N; n++) {
    const floatX* q = r.q + n * r.q_stride;
    floatX *of_keys = r.of_keys + n * C, *of_distances = r.of_distances + n * C;
#pragma omp simd
    for (int64_t c = 0; c < C; c++) {
      from_float(of_keys[c], to_float(q[c]) + to_float(r.u[c]));
      from_float(of_distances[c], to_float(q[c]) + to_float(r.v[c]));
    }
  }
}

// dq (N, C) = the sum of the gradients of q + u and q + v.
inline void relative_queries_backward(const RelativeQueryGradients& r, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static) if (is_worth_threads(3 * int64_t(sizeof(floatX)) * N * C))
  for (int64_t n = 0; n < N; n++) {
    const floatX *of_keys = r.of_keys + n * C, *of_distances = r.of_distances + n * C;
    floatX* dq = r.dq + n * r.dq_stride;
#pragma omp simd
    for (int64_t c = 0; c < C; c++) from_float(dq[c], to_float(of_keys[c]) + to_float(of_distances[c]));
  }
}

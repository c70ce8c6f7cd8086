// Linear layers on oneDNN's sgemm. Matrices are row-major; a weight is (OC, C): out = inp weight^T + bias.
//
//   matmul_forward, matmul_gelu_forward:   out (N, OC) =, pre_gelu (N, OC) =
//   matmul_backward, matmul_gelu_backward: dinp (N, C) =, dweight (OC, C) +=, dbias (OC) +=
#pragma once
#include <dnnl.h>              // dnnl_sgemm
#include <omp.h>               // omp_get_max_threads, omp_set_num_threads
#include <algorithm>           // std::min
#include <cstdint>             // int64_t
#include <cstring>             // memcpy
#include <vector>              // std::vector
#include "llmc/utils/clock.h"  // seconds_now
#include "llmc/utils/error.h"  // CHECK, user_error
#include "gelu.h"              // gelu_forward, gelu_backward
#include "threads.h"           // is_worth_threads

// c (m, n) = alpha op(a) op(b) + beta c, op: 'N' as it is, 'T' transposed; ld: elements from one row to the next.
inline void gemm(char op_a, char op_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
                 const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  const int threads = omp_get_max_threads();
  const bool alone = threads > 1 && !is_worth_threads(0, 2 * m * n * k);
  if (alone) omp_set_num_threads(1);  // of this thread's teams, oneDNN's among them
  CHECK(dnnl_sgemm(op_a, op_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc) == dnnl_success);
  if (alone) omp_set_num_threads(threads);
}

// c (m, n) = op(a) op(b), or c += with `accumulate`.
inline void gemm(char op_a, char op_b, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
                 int64_t ldb, bool accumulate, float* c, int64_t ldc) {
  gemm(op_a, op_b, m, n, k, 1.0f, a, lda, b, ldb, accumulate ? 1.0f : 0.0f, c, ldc);
}

// Throws UserError: oneDNN's sgemm computes in fp32 only.
inline void gemm_allow_tf32() { user_error("--tf32: matmuls on a CPU have no TF32"); }

// out (N, OC) = inp (N, C) weight (OC, C)^T + bias (OC); without bias if null.
inline void matmul_forward(float* out, const float* inp, const float* weight, const float* bias, int64_t N, int64_t C,
                           int64_t OC) {
  if (bias != nullptr) {
#pragma omp parallel for schedule(static) if (is_worth_threads(4 * N * OC))
    for (int64_t i = 0; i < N; i++) memcpy(out + i * OC, bias, size_t(OC) * sizeof(float));
  }
  gemm('N', 'T', N, OC, C, 1.0f, inp, C, weight, C, bias != nullptr ? 1.0f : 0.0f, out, OC);
}

// pre_gelu (N, OC) = inp weight^T + bias; out (N, OC) = gelu(pre_gelu).
inline void matmul_gelu_forward(float* out, float* pre_gelu, const float* inp, const float* weight, const float* bias, int64_t N,
                                int64_t C, int64_t OC) {
  matmul_forward(pre_gelu, inp, weight, bias, N, C, OC);
  gelu_forward(out, pre_gelu, N * OC);
}

// dbias (OC) += the column sums of dout (N, OC). A thread owns columns, so the order of the sum is always the same.
inline void bias_backward(float* dbias, const float* dout, int64_t N, int64_t OC) {
  const int64_t width = 64;
#pragma omp parallel for schedule(static) if (is_worth_threads(4 * N * OC))
  for (int64_t first = 0; first < OC; first += width) {
    float sum[width] = {};
    const int64_t n = std::min(width, OC - first);
    for (int64_t i = 0; i < N; i++) {
#pragma omp simd
      for (int64_t j = 0; j < n; j++) sum[j] += dout[i * OC + first + j];
    }
    for (int64_t j = 0; j < n; j++) dbias[first + j] += sum[j];
  }
}

// dinp (N, C) = dout weight; dweight (OC, C) += dout^T inp; dbias (OC) += column sums of dout. dbias may be null.
inline void matmul_backward(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                            const float* weight, int64_t N, int64_t C, int64_t OC) {
  gemm('N', 'N', N, C, OC, 1.0f, dout, OC, weight, C, 0.0f, dinp, C);
  gemm('T', 'N', OC, C, N, 1.0f, dout, OC, inp, C, 1.0f, dweight, C);
  if (dbias != nullptr) bias_backward(dbias, dout, N, OC);
}

// The same for an input that is gelu(pre_gelu): dinp (N, C) = (dout weight) * gelu'(pre_gelu).
inline void matmul_gelu_backward(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                                 const float* pre_gelu, const float* weight, int64_t N, int64_t C, int64_t OC) {
  matmul_backward(dinp, dweight, dbias, dout, inp, weight, N, C, OC);
  gelu_backward(dinp, pre_gelu, N * C);
}

// The rate of a matmul of n x n matrices, in FLOP/s: the best of `seconds` seconds of runs. Takes 3 n^2 floats while it runs.
inline double gemm_rate(int64_t n, double seconds) {
  std::vector<float> a(n * n, 0.5f), b(n * n, 0.25f), c(n * n);
  const double start = seconds_now();
  double best = 1e30;
  for (int i = 0; i < 3 || seconds_now() - start < seconds; i++) {
    const double begin = seconds_now();
    gemm('N', 'N', n, n, n, 1.0f, a.data(), n, b.data(), n, 0.0f, c.data(), n);
    best = std::min(best, seconds_now() - begin);
  }
  return 2.0 * double(n) * double(n) * double(n) / best;
}

// The machine's highest rate of matmuls, in FLOP/s, which a step's speed is reported as a share of: the sum of what each thread reaches alone in
// `seconds` seconds, with matrices that stay in its cache. Its best run is shorter than a time slice, and waits for no other thread: a matmul
// of all threads is as slow as the one that another process delays, and steps were faster than a peak measured so on a busy machine.
inline double gemm_peak(double seconds) {
  constexpr int64_t n = 384;
  double peak = 0;
#pragma omp parallel reduction(+ : peak)
  peak += gemm_rate(n, seconds);  // oneDNN takes one thread in a parallel region
  return peak;
}

// Linear layers, by gemm.h. Matrices are row-major; a weight is (OC, C): out = inp weight^T + bias.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>
#include "llmc/ops/precision.h"
#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "activation.h"
#include "few_rows.h"
#include "gemm.h"
#include "threads.h"
#include "vec.h"

// Throws UserError: matmuls compute in fp32 or bf16.
inline void gemm_allow_tf32() { user_error("--tf32: matmuls on a CPU have no TF32"); }

// out (N, OC) = inp (N, C) weight (OC, C)^T + bias (OC); without bias if null.
inline void matmul_forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int64_t N,
                           int64_t C, int64_t OC) {
  if (N <= most_few_rows) few_rows_forward(out, inp, weight, bias, N, C, OC);
  else if (bias != nullptr) gemm_with_bias('N', 'T', N, OC, C, inp, C, weight, C, bias, out, OC);
  else gemm('N', 'T', N, OC, C, inp, C, weight, C, false, out, OC);
}

// pre (N, H) = inp weight^T + bias; out (N, H) = f(pre) of the rounded pre, as where it is computed again, while it is
// in the cache. bias may be null, and f is not gated.
inline void activation_of_gemm(Activation f, bfloat16* out, bfloat16* pre, const bfloat16* inp, const bfloat16* weight,
                               const bfloat16* bias, int64_t N, int64_t C, int64_t H) {
  with_activation(f, [=](auto function) {
    gemm_and_store('N', 'T', N, H, C, inp, C, weight, C,
                   [=](int64_t row, int64_t column, const float* sums, int64_t count) {
                     bfloat16 *to = out + row * H + column, *before = pre + row * H + column;
                     for_each_vector(count, [=](int64_t j, int64_t n) {
                       FloatVector x = load_vector(sums + j, n);
                       if (bias != nullptr) x += load_vector(bias + column + j, n);
                       store_vector(before + j, x, n);
                       store_vector(to + j, function.value(load_vector(before + j, n)), n);
                     });
                   });
  });
}

// pre (N, F) = inp (N, C) weight (F, C)^T + bias (F); out (N, H) = f(pre). bias may be null.
template <class T>
void matmul_activation_forward(Activation f, T* out, T* pre, const T* inp, const T* weight, const T* bias, int64_t N,
                               int64_t C, int64_t H) {
  if constexpr (is_bf16)
    if (N > most_few_rows && !is_gated(f)) return activation_of_gemm(f, out, pre, inp, weight, bias, N, C, H);
  matmul_forward(pre, inp, weight, bias, N, C, num_products(f, H));
  activation_forward(f, out, pre, N, H);
}

// dbias (OC) += factor * the column sums of dout (N, OC), whose rows are `stride` apart. A thread owns columns, so the
// order of the sum is always the same.
inline void bias_backward(float* dbias, const floatX* dout, int64_t N, int64_t OC, int64_t stride, float factor = 1) {
  const int64_t width = 64;
#pragma omp parallel for schedule(static) if (is_worth_threads(int64_t(sizeof(floatX)) * N * OC))
  for (int64_t first = 0; first < OC; first += width) {
    float sum[width] = {};
    const int64_t n = std::min(width, OC - first);
    for (int64_t i = 0; i < N; i++) {
#pragma omp simd
      for (int64_t j = 0; j < n; j++) sum[j] += to_float(dout[i * stride + first + j]);
    }
    for (int64_t j = 0; j < n; j++) dbias[first + j] += factor * sum[j];
  }
}
inline void bias_backward(float* dbias, const floatX* dout, int64_t N, int64_t OC) {
  bias_backward(dbias, dout, N, OC, OC);
}

// dweight (OC, C) += dout^T inp; dbias (OC) += column sums of dout (N, OC). dbias may be null.
inline void matmul_backward_weight(float* dweight, float* dbias, const floatX* dout, const floatX* inp, int64_t N,
                                   int64_t C, int64_t OC) {
  gemm('T', 'N', OC, C, N, dout, OC, inp, C, true, dweight, C);
  if (dbias != nullptr) bias_backward(dbias, dout, N, OC);
}

// dinp (N, C) = dout weight; dweight (OC, C) += dout^T inp; dbias (OC) += column sums of dout. dbias may be null.
inline void matmul_backward(floatX* dinp, float* dweight, float* dbias, const floatX* dout, const floatX* inp,
                            const floatX* weight, int64_t N, int64_t C, int64_t OC) {
  gemm('N', 'N', N, C, OC, dout, OC, weight, C, false, dinp, C);
  matmul_backward_weight(dweight, dbias, dout, inp, N, C, OC);
}

// dpre (N, F) = the gradient of pre, from dout (N, OC) and weight (OC, H): in bf16 rounded once, while the product is
// in the cache.
inline void matmul_activation_backward_input(Activation f, float* dpre, const float* dout, const float* pre,
                                             const float* weight, int64_t N, int64_t H, int64_t OC) {
  gemm('N', 'N', N, H, OC, dout, OC, weight, H, false, dpre, num_products(f, H));
  activation_backward(f, dpre, pre, N, H);
}
inline void matmul_activation_backward_input(Activation f, bfloat16* dpre, const bfloat16* dout, const bfloat16* pre,
                                             const bfloat16* weight, int64_t N, int64_t H, int64_t OC) {
  if (is_gated(f)) {
    gemm_and_store('N', 'N', N, H, OC, dout, OC, weight, H,
                   [=](int64_t row, int64_t column, const float* sums, int64_t count) {
                     const int64_t first = row * 2 * H + column;
#pragma omp simd
                     for (int64_t j = 0; j < count; j++) {
                       float x = to_float(pre[first + j]), y = to_float(pre[first + H + j]);
                       swiglu_backward(sums[j], x, y);
                       from_float(dpre[first + j], x), from_float(dpre[first + H + j], y);
                     }
                   });
    return;
  }
  with_activation(f, [=](auto function) {
    gemm_and_store('N', 'N', N, H, OC, dout, OC, weight, H,
                   [=](int64_t row, int64_t column, const float* sums, int64_t count) {
                     bfloat16* to = dpre + row * H + column;
                     const bfloat16* x = pre + row * H + column;
                     for_each_vector(count, [=](int64_t j, int64_t n) {
                       store_vector(to + j, load_vector(sums + j, n) * function.slope(load_vector(x + j, n)), n);
                     });
                   });
  });
}

// The backward pass of a linear layer whose input is inp (N, H) = f(pre (N, F)): dpre (N, F) = the gradient of pre,
// from dout (N, OC) and weight (OC, H); dweight (OC, H) += dout^T inp; dbias (OC) += column sums of dout. dbias may be
// null.
inline void matmul_activation_backward(Activation f, floatX* dpre, float* dweight, float* dbias, const floatX* dout,
                                       const floatX* inp, const floatX* pre, const floatX* weight, int64_t N, int64_t H,
                                       int64_t OC) {
  matmul_activation_backward_input(f, dpre, dout, pre, weight, N, H, OC);
  matmul_backward_weight(dweight, dbias, dout, inp, N, H, OC);
}

// What matmuls compute in, for people.
inline const char* matmul_precision() {
  if (is_bf16 && multiplies_as_floats())
    return "fp32, to which bf16 is converted: this CPU has no faster instructions, or oneDNN finds none";
  return precision_name;
}

// The rate of a matmul of n x n matrices, in FLOP/s: the best of `seconds` seconds of runs. Takes 3 n^2 numbers while
// it runs.
inline double gemm_rate(int64_t n, double seconds) {
  const std::vector<floatX> a(size_t(n * n), floatX(0.5f)), b(size_t(n * n), floatX(0.25f));
  std::vector<floatX> c(size_t(n * n), floatX(0.0f));
  const double start = seconds_now();
  double best = 1e30;
  for (int i = 0; i < 3 || seconds_now() - start < seconds; i++) {
    const double begin = seconds_now();
    gemm('N', 'N', n, n, n, a.data(), n, b.data(), n, false, c.data(), n);
    best = std::min(best, seconds_now() - begin);
  }
  return 2.0 * double(n) * double(n) * double(n) / best;
}

// The machine's highest rate of matmuls, in FLOP/s, which a step's speed is reported as a share of: the sum of what
// each thread reaches alone in `seconds` seconds, with matrices that stay in its cache. Its best run is shorter than a
// time slice, and waits for no other thread: a matmul of all threads is as slow as the one that another process delays,
// and steps were faster than a peak measured so on a busy machine.
inline double gemm_peak(double seconds) {
  constexpr int64_t n = 384;
  double peak = 0;
#pragma omp parallel reduction(+ : peak)
  peak += gemm_rate(n, seconds);  // oneDNN takes one thread in a parallel region
  return peak;
}

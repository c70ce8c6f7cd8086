// LayerNorm over the channels of each of N rows: out = (inp - mean) * rstd * weight + bias, rstd = 1 / sqrt(var + eps).
// RMSNorm (Zhang & Sennrich 2019) is the same with 0 in place of the mean, so that var is the mean of squares.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include "llmc/ops/layernorm_args.h"
#include "threads.h"
#include "vec.h"

// out, mean and rstd = of row n, which is x (C).
inline void layernorm_row(const LayerNormForward& norm, int64_t n, const floatX* x) {
  const int64_t C = norm.C;
  const floatX *weight = norm.weight, *bias = norm.bias;
  floatX* out = norm.out + n * C;
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < C; i++) sum += to_float(x[i]);
  const float m = norm.centers ? sum / float(C) : 0;
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < C; i++) squares += (to_float(x[i]) - m) * (to_float(x[i]) - m);
  const float s = 1.0f / std::sqrt(squares / float(C) + norm.eps);
  if (bias != nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < C; i++)
      from_float(out[i], (to_float(x[i]) - m) * s * to_float(weight[i]) + to_float(bias[i]));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < C; i++) from_float(out[i], (to_float(x[i]) - m) * s * to_float(weight[i]));
  }
  norm.mean[n] = m;
  norm.rstd[n] = s;
}

// out, mean, rstd = the LayerNorm of inp (N, C).
inline void layernorm_forward(const LayerNormForward& norm, const floatX* inp) {
#pragma omp parallel for schedule(static) if (is_worth_threads(2 * int64_t(sizeof(floatX)) * norm.N * norm.C))
  for (int64_t n = 0; n < norm.N; n++) layernorm_row(norm, n, inp + n * norm.C);
}

// residual (N, C) = a + b, and out, mean, rstd = its LayerNorm: one pass over memory instead of two.
inline void residual_layernorm_forward(const LayerNormForward& norm, floatX* residual, const floatX* a,
                                       const floatX* b) {
  const int64_t C = norm.C;
#pragma omp parallel for schedule(static) if (is_worth_threads(4 * int64_t(sizeof(floatX)) * norm.N * C))
  for (int64_t n = 0; n < norm.N; n++) {
    floatX* row = residual + n * C;
#pragma omp simd
    for (int64_t i = 0; i < C; i++) from_float(row[i], to_float(a[n * C + i]) + to_float(b[n * C + i]));
    layernorm_row(norm, n, row);
  }
}

// residual (n) = a + b, for a stream that another operation changes before its LayerNorm.
inline void residual_sum(floatX* residual, const floatX* a, const floatX* b, int64_t n) {
#pragma omp parallel for simd schedule(static) if (parallel : is_worth_threads(3 * int64_t(sizeof(floatX)) * n))
  for (int64_t i = 0; i < n; i++) from_float(residual[i], to_float(a[i]) + to_float(b[i]));
}

// Rows whose share of dweight and dbias is summed by itself in the backward pass, whatever the number of threads.
constexpr int64_t layernorm_block_rows = 64;
inline int64_t layernorm_blocks(int64_t N) { return (N + layernorm_block_rows - 1) / layernorm_block_rows; }

// How many floats of scratch layernorm_backward needs: (blocks, 2, C), dweight and dbias of each block of rows.
inline int64_t layernorm_backward_scratch(int64_t N, int64_t C) { return layernorm_blocks(N) * 2 * C; }

// With xhat = (inp - mean) rstd and g = dout * weight: dinp += rstd * (g - mean(g) - xhat * mean(g * xhat)), for
// RMSNorm without mean(g). The sums over rows, dweight and dbias, go through partial sums of fixed blocks of rows, so
// that the result does not depend on the number of threads.
inline void layernorm_backward(const LayerNormBackward& norm) {
  const int64_t N = norm.N, C = norm.C;
  floatX* dinp = norm.dinp;
  const floatX* weight = norm.weight;
  const int64_t rows = layernorm_block_rows, blocks = layernorm_blocks(N);
#pragma omp parallel for schedule(static) if (is_worth_threads(4 * int64_t(sizeof(floatX)) * N * C))
  for (int64_t block = 0; block < blocks; block++) {
    float* dw = norm.scratch + block * 2 * C;
    float* db = dw + C;
    std::fill_n(dw, 2 * C, 0.0f);
    for (int64_t n = block * rows; n < std::min(N, (block + 1) * rows); n++) {
      const floatX *d = norm.dout + n * C, *x = norm.inp + n * C;
      const float m = norm.mean[n], s = norm.rstd[n];
      float sum_g = 0, sum_gx = 0;
#pragma omp simd reduction(+ : sum_g, sum_gx)
      for (int64_t i = 0; i < C; i++) {
        const float g = to_float(d[i]) * to_float(weight[i]);
        sum_g += g;
        sum_gx += g * (to_float(x[i]) - m) * s;
      }
      const float mean_g = norm.centers ? sum_g / float(C) : 0, mean_gx = sum_gx / float(C);
#pragma omp simd
      for (int64_t i = 0; i < C; i++) {
        const float xhat = (to_float(x[i]) - m) * s, di = to_float(d[i]);
        dw[i] += di * xhat;
        db[i] += di;
        from_float(dinp[n * C + i],
                   to_float(dinp[n * C + i]) + s * (di * to_float(weight[i]) - mean_g - xhat * mean_gx));
      }
    }
  }
  const int64_t width = 64;
#pragma omp parallel for schedule(static) if (is_worth_threads(8 * blocks * C))
  for (int64_t first = 0; first < C; first += width) {
    for (int64_t block = 0; block < blocks; block++) {
      const float* dw = norm.scratch + block * 2 * C;
      for (int64_t i = first; i < std::min(C, first + width); i++) {
        norm.dweight[i] += dw[i];
        if (norm.dbias != nullptr) norm.dbias[i] += dw[C + i];
      }
    }
  }
}

// Causal attention without a T*T buffer, in the manner of FlashAttention-2 (Dao 2023): blocks of queries against blocks of
// keys with an online softmax, so that memory is linear in T. k and v are read where they were projected, and never copied.
// Shapes and strides: llmc/attention_args.h; any head size and stride will do.
//
//   attention_forward:  out =, lse =
//   attention_backward: delta =, dq = or +=, dk and dv of each K/V head = or +=
#pragma once
#include <algorithm>              // std::max, std::min
#include <cmath>                  // log, sqrt
#include <cstring>                // memcpy, memset
#include <limits>                 // std::numeric_limits
#include <vector>                 // std::vector
#include "llmc/attention_args.h"  // AttentionArgs, KVHead
#include "matmul.h"               // gemm
#include "threads.h"              // is_worth_threads
#include "vec.h"                  // vec_exp

template <class Element>
void check_kv_head(const KVHead<Element>&) {}  // any strides will do

// Tile sizes of the CPU kernels: a score tile of 64 x 256 floats stays in a core's L2 beside its rows of k and v, and oneDNN's
// sgemm runs such tiles near its full rate (measured: 210 of 250 GFLOP/s). Each thread keeps one or two tiles, 64 KB each,
// whatever the model's size.
constexpr int64_t query_block = 64, key_block = 256;

// out =, lse = of the query positions [q0, q1) of one head in sequence b. They do not cross a multiple of query_block, so that
// each query sees at least one key of every key block.
inline void attention_forward_block(const AttentionArgs<float>& a, int64_t b, int64_t head, int64_t q0, int64_t q1) {
  thread_local std::vector<float> scores(query_block * key_block);
  float row_max[query_block], row_sum[query_block];
  const KVHead<float>& kv = a.kv_heads[a.kv_of_head[head]];
  const float *k = kv.k + b * a.T * kv.stride, *v = kv.v + b * a.T * kv.stride;
  const int64_t queries = a.T - a.first_query, first_row = b * queries + q0 - a.first_query, out_stride = a.NH * a.HS;
  const float* q = a.q + first_row * a.q_stride + head * a.HS;
  float* out = a.out + first_row * out_stride + head * a.HS;
  float* lse = a.lse + (b * a.NH + head) * queries + q0 - a.first_query;
  const int64_t rows = q1 - q0, HS = a.HS;
  const float scale = 1.0f / std::sqrt(float(HS));
  float* s = scores.data();
  for (int64_t k0 = 0; k0 < q1; k0 += key_block) {
    const int64_t keys = std::min(key_block, q1 - k0);
    gemm('N', 'T', rows, keys, HS, scale, q, a.q_stride, k + k0 * kv.stride, kv.stride, 0.0f, s, key_block);
    for (int64_t r = 0; r < rows; r++) {
      float* p = s + r * key_block;
      float* o = out + r * out_stride;
      const int64_t visible = std::min(keys, q0 + r + 1 - k0);
      float max = k0 == 0 ? -std::numeric_limits<float>::infinity() : row_max[r];
#pragma omp simd reduction(max : max)
      for (int64_t j = 0; j < visible; j++) max = p[j] > max ? p[j] : max;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < visible; j++) {
        p[j] = vec_exp(p[j] - max);
        sum += p[j];
      }
      std::fill(p + visible, p + keys, 0.0f);
      if (k0 > 0) {
        const float rescale = vec_exp(row_max[r] - max);
        sum += row_sum[r] * rescale;
#pragma omp simd
        for (int64_t i = 0; i < HS; i++) o[i] *= rescale;
      }
      row_max[r] = max;
      row_sum[r] = sum;
    }
    gemm('N', 'N', rows, HS, keys, 1.0f, s, key_block, v + k0 * kv.stride, kv.stride, k0 == 0 ? 0.0f : 1.0f, out, out_stride);
  }
  for (int64_t r = 0; r < rows; r++) {
    float* o = out + r * out_stride;
    const float inverse = 1.0f / row_sum[r];
#pragma omp simd
    for (int64_t i = 0; i < HS; i++) o[i] *= inverse;
    lse[r] = row_max[r] + std::log(row_sum[r]);
  }
}

// out = softmax(q k^T / sqrt(HS) + causal mask) v; lse =. A thread owns a block of queries of one head in one sequence; blocks
// with the most keys are started first.
inline void attention_forward(const AttentionArgs<float>& a) {
  const int64_t first_block = a.first_query / query_block, blocks = (a.T + query_block - 1) / query_block - first_block;
#pragma omp parallel for schedule(dynamic, 1) if (is_worth_threads(0, 2 * a.B * a.NH * a.HS * a.T * (a.T - a.first_query)))
  for (int64_t task = 0; task < blocks * a.B * a.NH; task++) {
    const int64_t block = first_block + blocks - 1 - task / (a.B * a.NH);
    const int64_t q0 = std::max(a.first_query, block * query_block), q1 = std::min(a.T, (block + 1) * query_block);
    attention_forward_block(a, task / a.NH % a.B, task % a.NH, q0, q1);
  }
}

// One row of a tile of scores, of which the first `visible` keys are not masked: p (visible) holds the scaled scores and becomes the
// probabilities; ds (visible) holds dout v^T and becomes p (ds - delta) scale.
inline void attention_score_gradients(float* p, float* ds, int64_t visible, float lse, float delta, float scale) {
#pragma omp simd
  for (int64_t j = 0; j < visible; j++) {
    p[j] = vec_exp(p[j] - lse);
    ds[j] = p[j] * (ds[j] - delta) * scale;
  }
}

// One query head and its K/V head in sequence b: delta =, dq = or +=, dk and dv +=. With p = exp(s - lse): dv += p^T dout;
// dp = dout v^T; ds = p (dp - delta) / sqrt(HS); dq += ds k; dk += ds^T q.
inline void attention_backward_head(const AttentionArgs<float>& a, int64_t b, const KVHead<float>& kv, int64_t head) {
  thread_local std::vector<float> probabilities(query_block * key_block), dscores(query_block * key_block);
  const int64_t T = a.T, HS = a.HS, first_row = b * T, column = head * HS, out_stride = a.NH * HS;
  const float *q = a.q + first_row * a.q_stride + column, *dout = a.dout + first_row * out_stride + column;
  const float *out = a.out + first_row * out_stride + column, *lse = a.lse + first_row * a.NH + head * T;
  const float *k = kv.k + first_row * kv.stride, *v = kv.v + first_row * kv.stride;
  float *dk = kv.dk + first_row * kv.dstride, *dv = kv.dv + first_row * kv.dstride;
  float *dq = a.dq + first_row * a.dq_stride + column, *delta = a.delta + first_row * a.NH + head * T;
  const float scale = 1.0f / std::sqrt(float(HS));
  float *p = probabilities.data(), *ds = dscores.data();
  for (int64_t q0 = 0; q0 < T; q0 += query_block) {
    const int64_t q1 = std::min(T, q0 + query_block), rows = q1 - q0;
    const float *q_rows = q + q0 * a.q_stride, *dout_rows = dout + q0 * out_stride, *out_rows = out + q0 * out_stride;
    for (int64_t r = 0; r < rows; r++) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < HS; i++) sum += dout_rows[r * out_stride + i] * out_rows[r * out_stride + i];
      delta[q0 + r] = sum;
    }
    for (int64_t k0 = 0; k0 < q1; k0 += key_block) {
      const int64_t keys = std::min(key_block, q1 - k0);
      const float *k_rows = k + k0 * kv.stride, *v_rows = v + k0 * kv.stride;
      gemm('N', 'T', rows, keys, HS, scale, q_rows, a.q_stride, k_rows, kv.stride, 0.0f, p, key_block);
      gemm('N', 'T', rows, keys, HS, 1.0f, dout_rows, out_stride, v_rows, kv.stride, 0.0f, ds, key_block);
      for (int64_t r = 0; r < rows; r++) {
        float *p_row = p + r * key_block, *ds_row = ds + r * key_block;
        const int64_t visible = std::min(keys, q0 + r + 1 - k0);
        attention_score_gradients(p_row, ds_row, visible, lse[q0 + r], delta[q0 + r], scale);
        std::fill(p_row + visible, p_row + keys, 0.0f);
        std::fill(ds_row + visible, ds_row + keys, 0.0f);
      }
      gemm('T', 'N', keys, HS, rows, 1.0f, p, key_block, dout_rows, out_stride, 1.0f, dv + k0 * kv.dstride, kv.dstride);
      gemm('T', 'N', keys, HS, rows, 1.0f, ds, key_block, q_rows, a.q_stride, 1.0f, dk + k0 * kv.dstride, kv.dstride);
      gemm('N', 'N', rows, HS, keys, 1.0f, ds, key_block, k_rows, kv.stride, k0 > 0 || a.dq_accumulate ? 1.0f : 0.0f,
           dq + q0 * a.dq_stride, a.dq_stride);
    }
  }
}

// delta =; dq, dk and dv = or += as the arguments say. A thread owns a K/V head of one sequence with all its query heads, so no
// two threads write to the same address, and the order of the sums does not depend on the number of threads.
inline void attention_backward(const AttentionArgs<float>& a) {
  CHECK(a.first_query == 0);
#pragma omp parallel for schedule(dynamic, 1) if (is_worth_threads(0, 5 * a.B * a.NH * a.HS * a.T * a.T))
  for (int64_t task = 0; task < a.B * a.num_kv_heads; task++) {
    const int64_t b = task / a.num_kv_heads;
    const KVHead<float>& kv = a.kv_heads[task % a.num_kv_heads];
    for (int64_t row = b * a.T; row < (b + 1) * a.T && !kv.accumulate; row++) {
      std::fill_n(kv.dk + row * kv.dstride, a.HS, 0.0f);
      std::fill_n(kv.dv + row * kv.dstride, a.HS, 0.0f);
    }
    for (int r = 0; r < kv.num_query_heads; r++) attention_backward_head(a, b, kv, a.query_heads[kv.first_query_head + r]);
  }
}

// dst (rows, width) = src (rows, width), or zeros if src is null.
inline void copy_rows(float* dst, int64_t dst_stride, const float* src, int64_t src_stride, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static) if (is_worth_threads(8 * rows * width))
  for (int64_t i = 0; i < rows; i++) {
    if (src != nullptr) memcpy(dst + i * dst_stride, src + i * src_stride, size_t(width) * sizeof(float));
    else memset(dst + i * dst_stride, 0, size_t(width) * sizeof(float));
  }
}

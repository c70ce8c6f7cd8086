// Causal attention without a T*T buffer, in the manner of FlashAttention-2 (Dao 2023): blocks of queries against blocks of
// keys with an online softmax, so that memory is linear in T. k and v are read where they were projected, through the table.
//
// Shapes: q, out and their gradients have row (b, t) of head i at `(b * T + t) * stride + i * HS`, k, v and theirs as KVHead
// says. lse and delta are (B, NH, T): the log of the sum of the exponentials of a row's scaled scores, which is all that the
// backward pass needs to rebuild its probabilities, and rowsum(dout * out).
#pragma once
#include <algorithm>               // std::max, std::min
#include <cmath>                   // log, sqrt
#include <cstring>                 // memcpy, memset
#include <limits>                  // std::numeric_limits
#include <vector>                  // std::vector
#include "llmc/attention_table.h"  // AttentionTable, AttentionShape, KVHead
#include "matmul.h"                // gemm
#include "vec.h"                   // vec_exp

// Tile sizes of the CPU kernels: a score tile of 64 x 256 floats stays in a core's L2 beside the k and v rows it meets, and
// oneDNN's sgemm runs such tiles near its full rate (measured: 210 of 250 GFLOP/s).
constexpr int64_t query_block = 64, key_block = 256;

// One block of queries [q0, q1) of one head: out =, lse =. The block does not cross a multiple of query_block, so that every
// key block it meets holds at least one key of each of its rows.
inline void attention_forward_block(float* out, int64_t out_stride, float* lse, const float* q, int64_t q_stride,
                                    const float* k, const float* v, int64_t kv_stride, int64_t q0, int64_t q1, int64_t HS) {
  thread_local std::vector<float> scores(query_block * key_block);
  float row_max[query_block], row_sum[query_block];
  const int64_t rows = q1 - q0;
  const float scale = 1.0f / std::sqrt(float(HS));
  float* s = scores.data();
  for (int64_t k0 = 0; k0 < q1; k0 += key_block) {
    const int64_t keys = std::min(key_block, q1 - k0);
    gemm('N', 'T', rows, keys, HS, scale, q, q_stride, k + k0 * kv_stride, kv_stride, 0.0f, s, key_block);
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
    gemm('N', 'N', rows, HS, keys, 1.0f, s, key_block, v + k0 * kv_stride, kv_stride, k0 == 0 ? 0.0f : 1.0f, out,
         out_stride);
  }
  for (int64_t r = 0; r < rows; r++) {
    float* o = out + r * out_stride;
    const float inverse = 1.0f / row_sum[r];
#pragma omp simd
    for (int64_t i = 0; i < HS; i++) o[i] *= inverse;
    lse[r] = row_max[r] + std::log(row_sum[r]);
  }
}

// out = softmax(q k^T / sqrt(HS) + causal mask) v; lse =. Of the positions before a.first_query neither is touched. Threads
// take blocks of queries; those with the most keys go first.
inline void attention_forward(float* out, float* lse, const float* q, int64_t q_stride,
                              const AttentionTable<float>& table, const AttentionShape& a) {
  const int64_t out_stride = a.NH * a.HS;
  const int64_t first_block = a.first_query / query_block, blocks = (a.T + query_block - 1) / query_block - first_block;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t task = 0; task < blocks * a.B * a.NH; task++) {
    const int64_t block = first_block + blocks - 1 - task / (a.B * a.NH);
    const int64_t b = task / a.NH % a.B, head = task % a.NH;
    const int64_t q0 = std::max(a.first_query, block * query_block), q1 = std::min(a.T, (block + 1) * query_block);
    const KVHead<float>& view = table.views[size_t(table.kv_of_head[size_t(head)])];
    attention_forward_block(out + (b * a.T + q0) * out_stride + head * a.HS, out_stride, lse + (b * a.NH + head) * a.T + q0,
                            q + (b * a.T + q0) * q_stride + head * a.HS, q_stride, view.k + b * a.T * view.stride,
                            view.v + b * a.T * view.stride, view.stride, q0, q1, a.HS);
  }
}

// The backward of one head that reads one pair in one sequence: dq =, delta =, dk and dv +=. Pointers are to the sequence's
// first row. With p = exp(s - lse): dv += p^T dout; dp = dout v^T; ds = p (dp - delta) / sqrt(HS); dq = ds k; dk += ds^T q.
inline void attention_backward_head(float* dq, int64_t dq_stride, float* dk, float* dv, int64_t dkv_stride,
                                    float* delta, const float* dout, const float* out, int64_t out_stride, const float* lse,
                                    const float* q, int64_t q_stride, const float* k, const float* v, int64_t kv_stride,
                                    int64_t T, int64_t HS) {
  thread_local std::vector<float> probabilities(query_block * key_block), dscores(query_block * key_block);
  const float scale = 1.0f / std::sqrt(float(HS));
  float *p = probabilities.data(), *ds = dscores.data();
  for (int64_t q0 = 0; q0 < T; q0 += query_block) {
    const int64_t q1 = std::min(T, q0 + query_block), rows = q1 - q0;
    const float *q_rows = q + q0 * q_stride, *dout_rows = dout + q0 * out_stride, *out_rows = out + q0 * out_stride;
    for (int64_t r = 0; r < rows; r++) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < HS; i++) sum += dout_rows[r * out_stride + i] * out_rows[r * out_stride + i];
      delta[q0 + r] = sum;
    }
    for (int64_t k0 = 0; k0 < q1; k0 += key_block) {
      const int64_t keys = std::min(key_block, q1 - k0);
      const float *k_rows = k + k0 * kv_stride, *v_rows = v + k0 * kv_stride;
      gemm('N', 'T', rows, keys, HS, scale, q_rows, q_stride, k_rows, kv_stride, 0.0f, p, key_block);
      gemm('N', 'T', rows, keys, HS, 1.0f, dout_rows, out_stride, v_rows, kv_stride, 0.0f, ds, key_block);
      for (int64_t r = 0; r < rows; r++) {
        float *pr = p + r * key_block, *dsr = ds + r * key_block;
        const int64_t visible = std::min(keys, q0 + r + 1 - k0);
        const float row_lse = lse[q0 + r], row_delta = delta[q0 + r];
#pragma omp simd
        for (int64_t j = 0; j < visible; j++) {
          pr[j] = vec_exp(pr[j] - row_lse);
          dsr[j] = pr[j] * (dsr[j] - row_delta) * scale;
        }
        std::fill(pr + visible, pr + keys, 0.0f);
        std::fill(dsr + visible, dsr + keys, 0.0f);
      }
      gemm('T', 'N', keys, HS, rows, 1.0f, p, key_block, dout_rows, out_stride, 1.0f, dv + k0 * dkv_stride, dkv_stride);
      gemm('T', 'N', keys, HS, rows, 1.0f, ds, key_block, q_rows, q_stride, 1.0f, dk + k0 * dkv_stride, dkv_stride);
      gemm('N', 'N', rows, HS, keys, 1.0f, ds, key_block, k_rows, kv_stride, k0 == 0 ? 0.0f : 1.0f, dq + q0 * dq_stride,
           dq_stride);
    }
  }
}

// dq =, delta =; dk, dv = or += as the table says. A thread owns a pair of a sequence with all heads that read it, so no two
// threads write to the same place and the sums have one order.
inline void attention_backward(float* dq, int64_t dq_stride, float* delta, const float* dout, const float* out,
                               const float* lse, const float* q, int64_t q_stride, const AttentionTable<float>& table,
                               const AttentionShape& a) {
  const int64_t out_stride = a.NH * a.HS, num_views = int64_t(table.views.size());
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t task = 0; task < a.B * num_views; task++) {
    const int64_t first_row = task / num_views * a.T;
    const KVHead<float>& view = table.views[size_t(task % num_views)];
    float *dk = view.dk + first_row * view.dstride, *dv = view.dv + first_row * view.dstride;
    if (!view.accumulate) {
      for (int64_t t = 0; t < a.T; t++) {
        memset(dk + t * view.dstride, 0, size_t(a.HS) * sizeof(float));
        memset(dv + t * view.dstride, 0, size_t(a.HS) * sizeof(float));
      }
    }
    for (int r = 0; r < view.num_query_heads; r++) {
      const int64_t head = table.readers[size_t(view.first_query_head + r)], column = head * a.HS;
      attention_backward_head(dq + first_row * dq_stride + column, dq_stride, dk, dv, view.dstride,
                              delta + first_row * a.NH + head * a.T, dout + first_row * out_stride + column,
                              out + first_row * out_stride + column, out_stride, lse + first_row * a.NH + head * a.T,
                              q + first_row * q_stride + column, q_stride, view.k + first_row * view.stride,
                              view.v + first_row * view.stride, view.stride, a.T, a.HS);
    }
  }
}

// dst (rows, width) = src (rows, width), or zeros if src is null.
inline void copy_rows(float* dst, int64_t dst_stride, const float* src, int64_t src_stride, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows; i++) {
    if (src != nullptr) memcpy(dst + i * dst_stride, src + i * src_stride, size_t(width) * sizeof(float));
    else memset(dst + i * dst_stride, 0, size_t(width) * sizeof(float));
  }
}

// Attention over depth (llmc/ops/depth_attention.h).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>
#include "llmc/ops/depth_attention.h"
#include "llmc/ops/precision.h"
#include "threads.h"
#include "vec.h"

inline float dot_of_head(const float* x, const floatX* y, int HS) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int c = 0; c < HS; c++) sum += x[c] * to_float(y[c]);
  return sum;
}

// q (HS) = the q of a token and head, p (num_layers) = the weights of its layers. `column`: the head's first.
inline void depth_weights(const DepthAttention<floatX>& a, int64_t n, int64_t column, float* q, float* p) {
  const float scale = 1 / std::sqrt(float(a.HS));
  for (int c = 0; c < a.HS; c++) q[c] = to_float(a.q[n * a.q_stride + column + c]);
  for (int j = 0; j < a.num_layers; j++)
    p[j] = scale * dot_of_head(q, a.layers[j].k + n * a.layers[j].stride + column, a.HS);
  const float highest = *std::max_element(p, p + a.num_layers);
  float sum = 0;
  for (int j = 0; j < a.num_layers; j++) sum += p[j] = vec_exp(p[j] - highest);
  for (int j = 0; j < a.num_layers; j++) p[j] /= sum;
}

inline bool is_worth_threads(const DepthAttention<floatX>& a, int64_t N) {
  return is_worth_threads(0, 4 * N * a.heads * a.HS * a.num_layers);
}

// out (N, heads * HS) =.
inline void depth_attention_forward(const DepthAttention<floatX>& a, int64_t N) {
#pragma omp parallel if (is_worth_threads(a, N))
  {
    std::vector<float> q = std::vector<float>(size_t(a.HS)), sum = q, p = std::vector<float>(size_t(a.num_layers));
#pragma omp for schedule(static)
    for (int64_t n = 0; n < N; n++)
      for (int64_t column = 0; column < a.heads * a.HS; column += a.HS) {
        depth_weights(a, n, column, q.data(), p.data());
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int j = 0; j < a.num_layers; j++) {
          const floatX* v = a.layers[j].v + n * a.layers[j].stride + column;
#pragma omp simd
          for (int c = 0; c < a.HS; c++) sum[c] += p[j] * to_float(v[c]);
        }
        for (int c = 0; c < a.HS; c++) from_float(a.out[n * a.out_stride + column + c], sum[c]);
      }
  }
}

// dq, and dk and dv of all layers.
inline void depth_attention_backward(const DepthAttention<floatX>& a, int64_t N) {
  const float scale = 1 / std::sqrt(float(a.HS));
  const int own = a.num_layers - 1;
#pragma omp parallel if (is_worth_threads(a, 2 * N))
  {
    std::vector<float> q = std::vector<float>(size_t(a.HS)), d = q, dq = q;
    std::vector<float> p = std::vector<float>(size_t(a.num_layers)), ds = p;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < N; n++)
      for (int64_t column = 0; column < a.heads * a.HS; column += a.HS) {
        depth_weights(a, n, column, q.data(), p.data());
        for (int c = 0; c < a.HS; c++) {
          d[c] = to_float(a.layers[own].dv[n * a.layers[own].d_stride + column + c]);
          dq[c] = to_float(a.dq[n * a.dq_stride + column + c]);
        }
        float mean = 0;
        for (int j = 0; j < a.num_layers; j++) {
          ds[j] = dot_of_head(d.data(), a.layers[j].v + n * a.layers[j].stride + column, a.HS);
          mean += p[j] * ds[j];
        }
        for (int j = 0; j < a.num_layers; j++) {
          const LayerKV<floatX>& layer = a.layers[j];
          const floatX* k = layer.k + n * layer.stride + column;
          floatX *dk = layer.dk + n * layer.d_stride + column, *dv = layer.dv + n * layer.d_stride + column;
          // What is there already.
          const int64_t above = n * a.of_above_stride + column;
          const bool is_own = j == own, has_above = a.dk_of_above != nullptr;
          const floatX* k_above = !has_above ? nullptr : is_own ? a.dk_of_above + above : dk;
          const floatX* v_above = !has_above ? nullptr : is_own ? a.dv_of_above + above : dv;
          ds[j] = scale * p[j] * (ds[j] - mean);
#pragma omp simd
          for (int c = 0; c < a.HS; c++) {
            dq[c] += ds[j] * to_float(k[c]);
            const float of_k = (has_above ? to_float(k_above[c]) : 0.0f) + (is_own ? to_float(dk[c]) : 0.0f);
            from_float(dk[c], of_k + ds[j] * q[c]);
            from_float(dv[c], (has_above ? to_float(v_above[c]) : 0.0f) + p[j] * d[c]);
          }
        }
        for (int c = 0; c < a.HS; c++) from_float(a.dq[n * a.dq_stride + column + c], dq[c]);
      }
  }
}

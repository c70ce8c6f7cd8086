// Sums of heads of several layers (llmc/ops/head_mix.h).
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>
#include "llmc/ops/head_mix.h"
#include "llmc/ops/precision.h"
#include "threads.h"
#include "vec.h"

// out (N, heads * HS) = or += the sums.
inline void mix_heads(const HeadMix<floatX>& m, int64_t N) {
  const int64_t width = m.heads * m.HS;
#pragma omp parallel if (is_worth_threads(0, 2 * N * m.num_weights() * m.HS))
  {
    std::vector<float> sums = std::vector<float>(size_t(width)), x = std::vector<float>(size_t(m.HS));
#pragma omp for schedule(static)
    for (int64_t n = 0; n < N; n++) {
      floatX* out = m.out + n * m.out_stride;
      for (int64_t c = 0; c < width; c++) sums[c] = m.accumulate ? to_float(out[c]) : 0.0f;
      for (int s = 0; s < m.num_sources; s++) {
        const MixedHeads<floatX>& source = m.sources[s];
        for (int i = 0; i < m.heads; i++) {
          const floatX* head = source.x + n * source.stride + i * m.HS;
          for (int64_t c = 0; c < m.HS; c++) x[c] = to_float(head[c]);
          for (int o = 0; o < m.heads; o++) {
            const float weight = to_float(source.weight[o * source.of_sum + i * source.of_head]);
            float* sum = &sums[o * m.HS];
#pragma omp simd
            for (int64_t c = 0; c < m.HS; c++) sum[c] += weight * x[c];
          }
        }
      }
      for (int64_t c = 0; c < width; c++) from_float(out[c], sums[c]);
    }
  }
}

// dweights (heads, num_sources, heads) += the gradients of the weights, from dout (N, heads * HS), whose rows are
// dout_stride apart. scratch (head_mix_partial_sums(N) * num_weights).
inline void mix_heads_backward(const HeadMix<floatX>& m, float* dweights, const floatX* dout, int64_t dout_stride,
                               float* scratch, int64_t N) {
  const int64_t blocks = head_mix_partial_sums(N), rows = head_mix_rows(N), weights = m.num_weights();
#pragma omp parallel for schedule(static) if (is_worth_threads(0, 2 * N * weights * m.HS))
  for (int64_t block = 0; block < blocks; block++) {
    float* sums = scratch + block * weights;
    std::fill_n(sums, weights, 0.0f);
    for (int64_t n = block * rows; n < std::min(N, (block + 1) * rows); n++)
      for (int o = 0; o < m.heads; o++) {
        const floatX* d = dout + n * dout_stride + o * m.HS;
        for (int s = 0; s < m.num_sources; s++)
          for (int i = 0; i < m.heads; i++) {
            const floatX* x = m.sources[s].x + n * m.sources[s].stride + i * m.HS;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t c = 0; c < m.HS; c++) sum += to_float(d[c]) * to_float(x[c]);
            sums[(o * m.num_sources + s) * m.heads + i] += sum;
          }
      }
  }
  for (int64_t w = 0; w < weights; w++) {
    double sum = 0;  // large terms may cancel
    for (int64_t block = 0; block < blocks; block++) sum += scratch[block * weights + w];
    dweights[w] += float(sum);
  }
}

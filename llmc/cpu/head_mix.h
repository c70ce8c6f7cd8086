// Sums of heads of several layers (llmc/ops/head_mix.h). The sums of four heads at a time are in registers.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>
#include "llmc/ops/head_mix.h"
#include "llmc/ops/precision.h"
#include "threads.h"
#include "vec.h"

constexpr int head_mix_group = 4;

// out (N, heads * HS) = or += the sums.
inline void mix_heads(const HeadMix<floatX>& m, int64_t N) {
  // What each head of each source weighs in each sum, with zeros up to a multiple of head_mix_group.
  const int sums = (m.heads + head_mix_group - 1) / head_mix_group * head_mix_group, rows = m.num_sources * m.heads;
  std::vector<float> weights(size_t(rows * sums));
  for (int row = 0; row < rows; row++)
    for (int o = 0; o < m.heads; o++) {
      const MixedHeads<floatX>& source = m.sources[row / m.heads];
      weights[row * sums + o] = to_float(source.weight[o * source.of_sum + row % m.heads * source.of_head]);
    }
#pragma omp parallel for schedule(static) if (is_worth_threads(0, 2 * N * m.num_weights() * m.HS))
  for (int64_t n = 0; n < N; n++) {
    for (int first = 0; first < m.heads; first += head_mix_group) {
      const int count = std::min(head_mix_group, m.heads - first);
      for (int64_t c = 0; c < m.HS; c += 2 * vector_width) {
        const int64_t left = m.HS - c, right = left - vector_width;  // channels of each half
        floatX* out = m.out + n * m.out_stride + first * m.HS + c;
        FloatVector sum[head_mix_group][2] = {};
        for (int o = 0; o < count && m.accumulate; o++)
          sum[o][0] = load_vector(out + o * m.HS, left), sum[o][1] = load_vector(out + o * m.HS + vector_width, right);
        const float* weight = &weights[first];
        for (int s = 0; s < m.num_sources; s++) {
          const floatX* x = m.sources[s].x + n * m.sources[s].stride + c;
          for (int i = 0; i < m.heads; i++, x += m.HS, weight += sums) {
            const FloatVector x_left = load_vector(x, left), x_right = load_vector(x + vector_width, right);
#pragma GCC unroll 4
            for (int o = 0; o < head_mix_group; o++) sum[o][0] += weight[o] * x_left, sum[o][1] += weight[o] * x_right;
          }
        }
        for (int o = 0; o < count; o++) {
          store_vector(out + o * m.HS, sum[o][0], left);
          store_vector(out + o * m.HS + vector_width, sum[o][1], right);
        }
      }
    }
  }
}

// sums (heads, num_sources, heads) = the gradients of the weights of source s, of the rows [begin, end) alone.
inline void head_products(const HeadMix<floatX>& m, int s, const floatX* dout, int64_t dout_stride, int64_t begin,
                          int64_t end, float* sums) {
  for (int o = 0; o < m.heads; o += head_mix_group) {
    for (int i = 0; i < m.heads; i += head_mix_group) {
      const int last_o = std::min(head_mix_group, m.heads - o) - 1, last_i = std::min(head_mix_group, m.heads - i) - 1;
      FloatVector sum[head_mix_group][head_mix_group] = {};
      for (int64_t n = begin; n < end; n++) {
        const floatX *d = dout + n * dout_stride + o * m.HS, *x = m.sources[s].x + n * m.sources[s].stride + i * m.HS;
        for (int64_t c = 0; c < m.HS; c += vector_width) {
          FloatVector of_head[head_mix_group];
#pragma GCC unroll 4
          for (int h = 0; h < head_mix_group; h++)
            of_head[h] = load_vector(x + std::min(h, last_i) * m.HS + c, m.HS - c);
#pragma GCC unroll 4
          for (int g = 0; g < head_mix_group; g++) {
            const FloatVector of_sum = load_vector(d + std::min(g, last_o) * m.HS + c, m.HS - c);
#pragma GCC unroll 4
            for (int h = 0; h < head_mix_group; h++) sum[g][h] += of_sum * of_head[h];
          }
        }
      }
      for (int g = 0; g <= last_o; g++) {
        for (int h = 0; h <= last_i; h++) { sums[((o + g) * m.num_sources + s) * m.heads + i + h] = sum_of(sum[g][h]); }
      }
    }
  }
}

// dweights (heads, num_sources, heads) += the gradients of the weights, from dout (N, heads * HS), whose rows are
// dout_stride apart. scratch (head_mix_partial_sums(N) * num_weights).
inline void mix_heads_backward(const HeadMix<floatX>& m, float* dweights, const floatX* dout, int64_t dout_stride,
                               float* scratch, int64_t N) {
  const int64_t blocks = head_mix_partial_sums(N), rows = head_mix_rows(N), weights = m.num_weights();
#pragma omp parallel for schedule(static) if (is_worth_threads(0, 2 * N * weights * m.HS))
  for (int64_t block = 0; block < blocks; block++)
    for (int s = 0; s < m.num_sources; s++)
      head_products(m, s, dout, dout_stride, block * rows, std::min(N, (block + 1) * rows), scratch + block * weights);
  add_column_sums(dweights, scratch, blocks, weights);
}

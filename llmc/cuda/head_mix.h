// Sums of heads of several layers: the operations of llmc/cpu/head_mix.h. HS is a multiple of 8.
#pragma once
#include <cstdint>
#include "column_sums.h"
#include "llmc/ops/head_mix.h"
#include "vec.h"

constexpr int head_mix_threads = 256, head_mix_group = 8;  // sums of a thread

// A thread owns eight channels of a token, of up to head_mix_group sums; blockIdx.y says which.
__global__ void __launch_bounds__(head_mix_threads) mix_heads_kernel(HeadMix<floatX> m, int64_t eights) {
  const int64_t thread = int64_t(blockIdx.x) * head_mix_threads + threadIdx.x, of_head = m.HS / 8;
  if (thread >= eights) return;
  const int64_t n = thread / of_head, c = thread % of_head * 8;
  const int first = int(blockIdx.y) * head_mix_group, count = min(head_mix_group, m.heads - first);
  floatX* out = m.out + n * m.out_stride + first * m.HS + c;
  float sums[head_mix_group][8] = {};
#pragma unroll
  for (int o = 0; o < head_mix_group; o++)
    if (m.accumulate && o < count) load8(sums[o], out + o * m.HS);
  for (int s = 0; s < m.num_sources; s++) {
    const MixedHeads<floatX> source = m.sources[s];
    const floatX* weight = source.weight + first * source.of_sum;
    for (int i = 0; i < m.heads; i++) {
      float x[8];
      load8(x, source.x + n * source.stride + i * m.HS + c);
#pragma unroll
      for (int o = 0; o < head_mix_group; o++) {
        if (o >= count) break;
        const float w = to_float(weight[o * source.of_sum + i * source.of_head]);
        for (int j = 0; j < 8; j++) sums[o][j] += w * x[j];
      }
    }
  }
#pragma unroll
  for (int o = 0; o < head_mix_group; o++)
    if (o < count) store8(out + o * m.HS, sums[o]);
}

// A block owns `rows` tokens, the source blockIdx.y, and 256 of the pairs of a sum and a head, blockIdx.z says which; a
// thread one pair. The tokens' dout and heads pass through shared memory, where rows of HS + 1 numbers let the threads
// of a warp, whose heads are neighbours, read different banks. partial: (blocks, heads, num_sources, heads).
__global__ void __launch_bounds__(head_mix_threads)
    mix_heads_backward_kernel(HeadMix<floatX> m, float* partial, const floatX* dout, int64_t dout_stride, int64_t N,
                              int64_t rows) {
  const int HS = int(m.HS), width = m.heads * HS, pair = int(blockIdx.z) * head_mix_threads + int(threadIdx.x);
  float *d = reinterpret_cast<float*>(shared_memory), *x = d + width;
  const MixedHeads<floatX> source = m.sources[blockIdx.y];
  const int o = pair / m.heads, i = pair % m.heads;
  const bool has_pair = o < m.heads;
  float sum = 0;
  const int64_t first = int64_t(blockIdx.x) * rows, end = first + rows < N ? first + rows : N;
  for (int64_t n = first; n < end; n++) {
    __syncthreads();  // all threads have read the token before
    for (int at = int(threadIdx.x); at < width; at += head_mix_threads) {
      d[at] = to_float(dout[n * dout_stride + at]);
      x[at / HS * (HS + 1) + at % HS] = to_float(source.x[n * source.stride + at]);
    }
    __syncthreads();
    if (has_pair)
      for (int c = 0; c < HS; c++) sum += d[o * HS + c] * x[i * (HS + 1) + c];
  }
  if (has_pair)
    partial[blockIdx.x * m.num_weights() + (int64_t(o) * m.num_sources + int(blockIdx.y)) * m.heads + i] = sum;
}

inline void mix_heads(const HeadMix<floatX>& m, int64_t N) {
  const int64_t eights = N * m.HS / 8;
  const dim3 grid(unsigned(ceil_div(eights, head_mix_threads)), unsigned(ceil_div(m.heads, head_mix_group)));
  launch(mix_heads_kernel, grid, dim3(head_mix_threads), 0, gpu().stream, m, eights);
}

inline void mix_heads_backward(const HeadMix<floatX>& m, float* dweights, const floatX* dout, int64_t dout_stride,
                               float* scratch, int64_t N) {
  const int64_t blocks = head_mix_partial_sums(N), pairs = int64_t(m.heads) * m.heads;
  const dim3 grid(unsigned(blocks), unsigned(m.num_sources), unsigned(ceil_div(pairs, head_mix_threads)));
  launch(mix_heads_backward_kernel, grid, dim3(head_mix_threads),
         size_t(m.heads) * size_t(2 * m.HS + 1) * sizeof(float), gpu().stream, m, scratch, dout, dout_stride, N,
         head_mix_rows(N));
  add_column_sums(dweights, nullptr, scratch, blocks, /*stride=*/m.num_weights(), /*columns=*/m.num_weights());
}

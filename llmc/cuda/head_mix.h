// Sums of heads of several layers: the operations of llmc/cpu/head_mix.h. HS is a multiple of 8. Where attention is on
// tensor cores, the weights' gradients are products of theirs, too.
#pragma once
#include <cstdint>
#include "column_sums.h"
#include "llmc/ops/head_mix.h"
#include "tile.h"
#include "vec.h"

constexpr int head_mix_threads = 256, head_mix_group = 8;  // sums of a thread

// A thread owns eight channels of a token, in up to head_mix_group sums. `groups` neighbouring blocks have the sums of
// the same tokens, whose heads the L2 cache has after the first of them.
__global__ void __launch_bounds__(head_mix_threads) mix_heads_kernel(HeadMix<floatX> m, int64_t eights, int groups) {
  const int64_t thread = int64_t(blockIdx.x) / groups * head_mix_threads + threadIdx.x, of_head = m.HS / 8;
  if (thread >= eights) return;
  const int64_t n = thread / of_head, c = thread % of_head * 8;
  const int first = int(blockIdx.x) % groups * head_mix_group, count = min(head_mix_group, m.heads - first);
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

constexpr int head_mix_warps = head_mix_threads / warp_size;

// A tile of the weights of one source, 16 sums by 32 heads, that a warp adds up: acc += d x^T, where d (16, HS) and x
// (32, HS) are heads of a token as they lie in memory, `HS` numbers apart. Rows from `sums` and `heads` on are zeros.
struct HeadMixTile {
  static constexpr int rows = 16, columns = 32;
  float acc[columns / 8][4] = {};

#ifndef PRECISION_FP32
  // Two neighbouring channels of a head; zeros where there are none.
  static __device__ unsigned two_of(const floatX* x, int head, int heads, int c, int HS) {
    return head < heads && c < HS ? *reinterpret_cast<const unsigned*>(x + head * HS + c) : 0u;
  }
  __device__ void add(const floatX* d, int sums, const floatX* x, int heads, int HS) {
    const int group = int(threadIdx.x) % warp_size / 4, pair = int(threadIdx.x) % 4 * 2;
#pragma unroll 4
    for (int c = 0; c < HS; c += 16) {
      const unsigned a[4] = {two_of(d, group, sums, c + pair, HS), two_of(d, group + 8, sums, c + pair, HS),
                             two_of(d, group, sums, c + pair + 8, HS), two_of(d, group + 8, sums, c + pair + 8, HS)};
#pragma unroll
      for (int n = 0; n < columns / 8; n++) {
        if (8 * n >= heads) break;
        const unsigned b[2] = {two_of(x, 8 * n + group, heads, c + pair, HS),
                               two_of(x, 8 * n + group, heads, c + pair + 8, HS)};
        mma_16x8x16(acc[n], a, b);
      }
    }
  }
#else
  __device__ void add(const floatX* d, int sums, const floatX* x, int heads, int HS) {
    const int group = int(threadIdx.x) % warp_size / 4, pair = int(threadIdx.x) % 4 * 2;
    for (int c = 0; c < HS; c += 4)
#pragma unroll
      for (int at = 0; at < columns / 2; at++) {
        const int n = at / 4, i = at % 4, o = group + i / 2 * 8, head = 8 * n + pair + i % 2;
        if (o >= sums || head >= heads) continue;
        float y[4], z[4];
        load4(y, d + o * HS + c), load4(z, x + head * HS + c);
        for (int k = 0; k < 4; k++) acc[n][i] += y[k] * z[k];
      }
  }
#endif
};

// A block owns a source, `rows` tokens, and a HeadMixTile of its weights, blockIdx.x, y and z, so that neighbouring
// blocks find dout in the L2 cache; a warp every eighth of the tokens. Warps' sums are added up in their order.
// partial: (blocks, heads, num_sources, heads).
__global__ void __launch_bounds__(head_mix_threads)
    mix_heads_backward_kernel(HeadMix<floatX> m, float* partial, const floatX* dout, int64_t dout_stride, int64_t N,
                              int64_t rows) {
  constexpr int rows_of_tile = HeadMixTile::rows, columns = HeadMixTile::columns;
  float* sums = reinterpret_cast<float*>(shared_memory);  // (warps, 16, 32)
  const int HS = int(m.HS), tiles = (m.heads + columns - 1) / columns, warp = int(threadIdx.x) / warp_size,
            lane = int(threadIdx.x) % warp_size;
  const int first_sum = int(blockIdx.z) / tiles * rows_of_tile, first_head = int(blockIdx.z) % tiles * columns;
  const MixedHeads<floatX> source = m.sources[blockIdx.x];
  HeadMixTile tile;
  const int64_t first = int64_t(blockIdx.y) * rows, end = first + rows < N ? first + rows : N;
  for (int64_t n = first + warp; n < end; n += head_mix_warps)
    tile.add(dout + n * dout_stride + first_sum * HS, m.heads - first_sum,
             source.x + n * source.stride + first_head * HS, m.heads - first_head, HS);
#pragma unroll
  for (int n = 0; n < columns / 8; n++)
    for (int i = 0; i < 4; i++)
      sums[(warp * rows_of_tile + lane / 4 + 8 * (i / 2)) * columns + 8 * n + lane % 4 * 2 + i % 2] = tile.acc[n][i];
  __syncthreads();
  for (int at = int(threadIdx.x); at < rows_of_tile * columns; at += head_mix_threads) {
    const int o = first_sum + at / columns, i = first_head + at % columns;
    if (o >= m.heads || i >= m.heads) continue;
    float sum = 0;
    for (int w = 0; w < head_mix_warps; w++) sum += sums[w * rows_of_tile * columns + at];
    partial[blockIdx.y * m.num_weights() + (int64_t(o) * m.num_sources + int(blockIdx.x)) * m.heads + i] = sum;
  }
}

inline void launch_mix_heads_backward(const HeadMix<floatX>& m, float* partial, const floatX* dout, int64_t dout_stride,
                                      int64_t N) {
  const int64_t tiles = ceil_div(m.heads, HeadMixTile::rows) * ceil_div(m.heads, HeadMixTile::columns);
  const dim3 grid(unsigned(m.num_sources), unsigned(head_mix_partial_sums(N)), unsigned(tiles));
  launch(mix_heads_backward_kernel, grid, head_mix_threads,
         head_mix_warps * HeadMixTile::rows * HeadMixTile::columns * sizeof(float), m, partial, dout, dout_stride, N,
         head_mix_rows(N));
}

inline void mix_heads(const HeadMix<floatX>& m, int64_t N) {
  const int64_t eights = N * m.HS / 8;
  const int groups = int(ceil_div(m.heads, head_mix_group));
  launch(mix_heads_kernel, unsigned(ceil_div(eights, head_mix_threads) * groups), head_mix_threads, 0, m, eights,
         groups);
}

inline void mix_heads_backward(const HeadMix<floatX>& m, float* dweights, const floatX* dout, int64_t dout_stride,
                               float* scratch, int64_t N) {
  launch_mix_heads_backward(m, scratch, dout, dout_stride, N);
  add_column_sums(dweights, nullptr, scratch, head_mix_partial_sums(N), /*stride=*/m.num_weights(),
                  /*columns=*/m.num_weights());
}

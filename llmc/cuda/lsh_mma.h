// Attention by locality-sensitive hashing on tensor cores, in bf16 or fp16: one round. The loops are as in
// attention_mma.h, with rows that are gathered: a warp owns 16 rows of a block's 64, and tiles of columns are
// double-buffered. q is multiplied as it is stored, and 1 / |q| of the keys in fp32. No two blocks write to the same
// address, and no sum depends on the order in which blocks run.
#pragma once
#include <cmath>
#include "attention_mma.h"
#include "device.h"
#include "llmc/ops/lsh.h"
#include "lsh_tiles.h"
#include "tile.h"

constexpr int lsh_rows = 16 * attention_warps;

// tile = the rows of some places of the order, up to Rows of them, and zeros after them and for the channels from HS
// on. Called by the whole block.
template <int Rows, int D>
__device__ inline void load_places_async(Tile<D> tile, const LshRound& at, const LshRows& rows, LshInterval places) {
  constexpr int threads_per_row = D % 64 == 0 ? D / 8 : 4, rows_at_once = attention_threads / threads_per_row;
  const int column = int(threadIdx.x) % threads_per_row;
#pragma unroll
  for (int row = int(threadIdx.x) / threads_per_row; row < Rows; row += rows_at_once) {
    const bool exists = places.begin + row < places.end;
    const floatX* from = rows.src + (exists ? at.row(places.begin + row) * rows.stride : 0);
#pragma unroll
    for (int chunk = column; chunk < tile.chunks; chunk += threads_per_row)
      copy_async<16>(tile.at(row, chunk), from + (chunk * 8 < int(at.a.shape.HS) ? chunk * 8 : 0),
                     exists && chunk * 8 < int(at.a.shape.HS));
  }
}

// The block's rows, Own tiles of 64, and tiles of Columns columns, two of them double-buffered. In shared memory they
// come first, then the rows' buckets in earlier rounds, and then of each buffer the columns' buckets and two floats.
template <int D, int Own, int Columns>
struct LshBlock {
  LshRound at;
  LshInterval own;

  __device__ LshBlock(const LshAttention& a, int round, int tile)
      : at(a, blockIdx.y, blockIdx.x, round), own{tile * lsh_rows, min(int(a.shape.T), (tile + 1) * lsh_rows)} {}

  static constexpr int tile_rows = Own * lsh_rows + 4 * Columns;
  static size_t bytes(int round) {
    return size_t(tile_rows) * D * sizeof(floatX) +
           size_t(round * (lsh_rows + 2 * Columns) + 4 * Columns) * sizeof(int);
  }
  __device__ static Tile<D> own_tile(int n) { return Tile<D>{0}.from_row(n * lsh_rows); }
  __device__ static Tile<D> warp_tile(int n) { return own_tile(n).from_row(warp_index() * 16); }
  __device__ static Tile<D> column_tile(int n, int stage) { return own_tile(Own).from_row((2 * n + stage) * Columns); }
  // Offsets in shared memory: the warp's rows' buckets, from round 0 on; the columns' buckets; the columns' floats n.
  __device__ static int own_buckets() { return Tile<D>{0}.from_row(tile_rows).offset; }
  __device__ int column_buckets(int stage) const {
    return own_buckets() + at.round * (lsh_rows + stage * Columns) * int(sizeof(int));
  }
  __device__ int column_floats(int n, int stage) const {
    return column_buckets(2) + (2 * n + stage) * Columns * int(sizeof(float));
  }

  // Starts loading the rows' buckets in earlier rounds.
  __device__ void load_own_buckets() const { load_buckets_async<lsh_rows>(own_buckets(), own); }
  // Starts loading columns: rows of q and of `second`, their buckets, and floats number 0.
  __device__ void load_columns(int stage, LshInterval places, const LshRows& second, const float* floats) const {
    load_places_async<Columns>(column_tile(0, stage), at, lsh_q(at), places);
    load_places_async<Columns>(column_tile(1, stage), at, second, places);
    load_buckets_async<Columns>(column_buckets(stage), places);
    load_column_floats(0, stage, floats, places);
  }
  // The columns' floats number n = x of their places: x has one for each row and head.
  __device__ void load_column_floats(int n, int stage, const float* x, LshInterval places) const {
    const int i = int(threadIdx.x);
    const bool exists = places.begin + i < places.end;
    if (i < Columns)
      copy_async<4>(column_floats(n, stage) + i * int(sizeof(float)), x + (exists ? at.statistic(places.begin + i) : 0),
                    exists);
  }

 private:
  template <int Count>
  __device__ void load_buckets_async(int offset, LshInterval places) const {
    const int i = int(threadIdx.x);
    if (i >= Count || at.round == 0) return;
    const bool exists = places.begin + i < places.end;
    const int* buckets = at.buckets(exists ? places.begin + i : places.begin);
    for (int n = 0; n < at.round; n++) copy_async<4>(offset + (n * Count + i) * int(sizeof(int)), buckets + n, exists);
  }
};

__device__ inline int shared_int(int offset) { return *reinterpret_cast<const int*>(shared_memory + offset); }

// Which columns the lane's two rows see, and which some of the warp's rows do.
template <class Block>
struct LshMask {
  const Block& block;
  LshInterval seen[2], of_warp;

  // `interval`: keys_of_query or queries_of_key.
  template <class Interval>
  __device__ LshMask(const Block& block, Interval interval) : block(block) {
    const int first = block.own.begin + warp_index() * 16, end = block.own.end;
    for (int h = 0; h < 2; h++) seen[h] = interval(block.at, first + Accumulator<1, 2>::row(0, 2 * h), end);
    if (first < end)
      of_warp = {interval(block.at, first, end).begin, interval(block.at, min(first + 16, end) - 1, end).end};
  }
  // Whether a row of the warp may see one of the tile's columns.
  __device__ bool sees_some(int column, int columns) const {
    return column < of_warp.end && of_warp.begin < column + columns;
  }

  // Scores that are hidden become -inf. `column`: the place of the tile's first.
  template <int N>
  __device__ void apply(Accumulator<1, N>& s, int column, int stage) const {
    mask_elements(s, [&](int, int n, int i) { return !seen[i / 2].contains(column + s.column(n, i)); });
    constexpr int bytes = int(sizeof(int));
    int rows = block.own_buckets() + (warp_index() * 16 + s.row(0, 0)) * bytes,
        columns = block.column_buckets(stage) + s.column(0, 0) * bytes;
#pragma unroll 1
    for (int round = 0; round < block.at.round; round++) {
      const int own[2] = {shared_int(rows), shared_int(rows + 8 * bytes)};
#pragma unroll
      for (int n = 0; n < N; n++)
        for (int c = 0; c < 2; c++) {
          const int bucket = shared_int(columns + (8 * n + c) * bytes);
          for (int h = 0; h < 2; h++)
            if (own[h] == bucket) s.x[0][n][2 * h + c] = -INFINITY;
        }
      rows += lsh_rows * bytes, columns += 8 * N * bytes;
    }
  }
};

// Each column of x times its float at `factors` in shared memory.
template <int N>
__device__ inline void scale_columns(Accumulator<1, N>& x, int factors) {
#pragma unroll
  for (int n = 0; n < N; n++)
    for (int c = 0; c < 2; c++) {
      const float factor = shared_float(factors + x.column(n, c) * int(sizeof(float)));
      x.x[0][n][c] *= factor, x.x[0][n][2 + c] *= factor;
    }
}

// f(columns, stage, is_first) for each tile of Columns columns of [begin, end) that the block's rows may not have seen,
// which load(columns, stage) starts to load. Called by the whole block.
template <int Columns, class Load, class F>
__device__ inline void for_each_tile(const LshRound& at, LshInterval own, LshInterval all, const Load& load,
                                     const F& f) {
  auto columns = [&](int first) { return LshInterval{first, min(first + Columns, all.end)}; };
  int first = next_columns<Columns>(at, own, all.begin, all.end), stage = 0;
  const int start = first;
  if (first < all.end) load(columns(first), stage);
#pragma unroll 1
  for (int next = first; first < all.end; first = next, stage = 1 - stage) {
    commit_copies();
    wait_for_copies();
    __syncthreads();  // all threads' copies of this tile have arrived, and all warps have read the one before it
    next = next_columns<Columns>(at, own, first + Columns, all.end);
    if (next < all.end) load(columns(next), 1 - stage);
    f(columns(first), stage, first == start);
  }
  finish_copies();
}

// out =, lse =, or what the rounds so far give of them. A block owns 64 queries of the order of one head in
// one sequence, a warp 16 of them, a thread its elements of the warp's fragments (tile.h). q, the softmax and the rows
// of out stay in registers over the whole loop over keys.
template <int D>
using LshForwardBlock = LshBlock<D, 1, 64>;
template <int D>
__global__ void __launch_bounds__(attention_threads, 2) lsh_forward_kernel(LshAttention a, int round, float scale) {
  constexpr int columns = 64;
  using Block = LshForwardBlock<D>;
  const Block block(a, round, int(gridDim.z - 1 - blockIdx.z));
  const LshRound& at = block.at;
  load_places_async<lsh_rows>(block.own_tile(0), at, lsh_q(at), block.own);
  block.load_own_buckets();
  const LshMask<Block> mask(block, keys_of_query);

  RegisterTile<1, D / 16> q_rows;
  Accumulator<1, D / 8> acc = {};
  OnlineSoftmax<1, true> softmax;
  auto load = [&](LshInterval keys, int stage) { block.load_columns(stage, keys, lsh_v(at), a.of.inverse_norms); };
  const LshInterval all = {at.bucket_start(block.own.begin), block.own.end - 1};  // the last query is no one's key
  for_each_tile<columns>(at, block.own, all, load, [&](LshInterval keys, int stage, bool is_first) {
    if (is_first) load_register_tile(q_rows, block.warp_tile(0));
    if (!mask.sees_some(keys.begin, columns)) return;
    Accumulator<1, columns / 8> s = {};
    mma_ABt(s, q_rows, block.column_tile(0, stage));
    scale_columns(s, block.column_floats(0, stage));
    mask.apply(s, keys.begin, stage);
    softmax.update(s, acc, scale * log2_e);
    mma_AB(acc, to_floatX(s), block.column_tile(1, stage));
  });
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float sum = warp_sum<4>(softmax.sum.x[0][h]), inverse = sum == 0 ? 0.0f : 1.0f / sum;
    const int place = block.own.begin + warp_index() * 16 + acc.row(0, 2 * h);
    const bool exists = place < block.own.end;
    const LshResult result(at, place, exists, first_of_row(),
                           sum == 0 ? -INFINITY : softmax.max.x[0][h] * scale + logf(sum));
    for (int n = 0; n < D / 8; n++) {
      float x[2] = {acc.x[0][n][2 * h] * inverse, acc.x[0][n][2 * h + 1] * inverse};
      if (exists && acc.column(n, 0) < int(a.shape.HS)) result.store(acc.column(n, 0), x);
    }
  }
}

// ----------------------------------------------------------------------------
// Backward

// The warp's rows of the gradients dq (part 0), dk (1) or dv (2).
template <class Block, int N>
__device__ inline void add_gradients(const Block& block, int part, const Accumulator<1, N>& acc) {
#pragma unroll
  for (int n = 0; n < N; n++)
    for (int h = 0; h < 2; h++) {
      const int place = block.own.begin + warp_index() * 16 + acc.row(0, 2 * h), channel = acc.column(n, 0);
      const float x[2] = {acc.x[0][n][2 * h], acc.x[0][n][2 * h + 1]};
      if (place < block.own.end && channel < int(block.at.a.shape.HS)) add_gradient(block.at, place, part, channel, x);
    }
}

// With many channels tiles have fewer columns, so that their products fit into the registers beside the results.
template <int D>
constexpr int lsh_backward_columns = D > 64 ? 32 : 64;
template <int D>
using LshBackwardBlock = LshBlock<D, 2, lsh_backward_columns<D>>;  // D = 64: 48 KB, 96: 48 KB, 128: 64 KB

// dq of one round. A block owns 64 queries, as in the forward pass, and keeps q and dout in shared memory; dq stays in
// registers and is written once.
template <int D>
__global__ void __launch_bounds__(attention_threads, 2) lsh_dq_kernel(LshAttention a, int round, float scale) {
  constexpr int columns = lsh_backward_columns<D>;
  using Block = LshBackwardBlock<D>;
  const Block block(a, round, int(gridDim.z - 1 - blockIdx.z));
  const LshRound& at = block.at;
  load_places_async<lsh_rows>(block.own_tile(0), at, lsh_q(at), block.own);
  load_places_async<lsh_rows>(block.own_tile(1), at, lsh_dout(at), block.own);
  block.load_own_buckets();
  const LshMask<Block> mask(block, keys_of_query);

  Accumulator<1, D / 8> dq = {};
  float log2_sum[2], delta[2];
  for (int h = 0; h < 2; h++) {
    const int place = block.own.begin + warp_index() * 16 + dq.row(0, 2 * h);
    const bool exists = place < block.own.end;
    log2_sum[h] = exists ? a.lse[at.statistic(place)] * log2_e : INFINITY;
    delta[h] = exists ? LshGradients(a).delta[at.statistic(place)] : 0.0f;
  }
  auto load = [&](LshInterval keys, int stage) { block.load_columns(stage, keys, lsh_v(at), a.of.inverse_norms); };
  const LshInterval all = {at.bucket_start(block.own.begin), block.own.end - 1};
  for_each_tile<columns>(at, block.own, all, load, [&](LshInterval keys, int stage, bool) {
    if (!mask.sees_some(keys.begin, columns)) return;
    Accumulator<1, columns / 8> s = {}, dp = {};
    mma_ABt(s, block.warp_tile(0), block.column_tile(0, stage));
    mma_ABt(dp, block.warp_tile(1), block.column_tile(1, stage));
    scale_columns(s, block.column_floats(0, stage));
    mask.apply(s, keys.begin, stage);
    for (auto n = 0; n < columns / 8; n++)
      for (int i = 0; i < 4; i++)
        s.x[0][n][i] = exp2_approx(s.x[0][n][i] * scale * log2_e - log2_sum[i / 2]) * (dp.x[0][n][i] - delta[i / 2]);
    scale_columns(s, block.column_floats(0, stage));  // k = q / |q|
    mma_AB(dq, to_floatX(s), block.column_tile(0, stage));
  });
  add_gradients(block, 0, dq);
}

// dk and dv of one round. A block owns 64 keys of the order, and loops over the queries after them, up to the end of
// the last one's bucket. Scores are transposed, with a key per row, so that they are A operands of the products for dk
// and dv in the registers where they were computed.
template <int D>
__global__ void __launch_bounds__(attention_threads, 2) lsh_dkdv_kernel(LshAttention a, int round, float scale) {
  constexpr int columns = lsh_backward_columns<D>;
  using Block = LshBackwardBlock<D>;
  const Block block(a, round, int(blockIdx.z));
  const LshRound& at = block.at;
  load_places_async<lsh_rows>(block.own_tile(0), at, lsh_q(at), block.own);
  load_places_async<lsh_rows>(block.own_tile(1), at, lsh_v(at), block.own);
  block.load_own_buckets();
  const LshMask<Block> mask(block, queries_of_key);

  Accumulator<1, D / 8> dk = {}, dv = {};
  float to_exp2[2];  // scale / |q| of the lane's two keys, in powers of 2
  for (int h = 0; h < 2; h++) {
    const int place = block.own.begin + warp_index() * 16 + dk.row(0, 2 * h);
    to_exp2[h] = place < block.own.end ? a.of.inverse_norms[at.statistic(place)] * scale * log2_e : 0.0f;
  }
  auto load = [&](LshInterval queries, int stage) {
    block.load_columns(stage, queries, lsh_dout(at), a.lse);
    block.load_column_floats(1, stage, LshGradients(a).delta, queries);
  };
  const LshInterval all = {block.own.begin + 1, at.bucket_end(block.own.end - 1)};
  for_each_tile<columns>(at, block.own, all, load, [&](LshInterval queries, int stage, bool) {
    if (!mask.sees_some(queries.begin, columns)) return;
    Accumulator<1, columns / 8> p = {}, dp = {};
    mma_ABt(p, block.warp_tile(0), block.column_tile(0, stage));
    mma_ABt(dp, block.warp_tile(1), block.column_tile(1, stage));
    for (int n = 0; n < columns / 8; n++)
      for (int i = 0; i < 4; i++) p.x[0][n][i] *= to_exp2[i / 2];
    mask.apply(p, queries.begin, stage);
    for (int n = 0; n < columns / 8; n++)
      for (int c = 0; c < 2; c++) {
        const int column = p.column(n, c) * int(sizeof(float));
        const float log2_sum = shared_float(block.column_floats(0, stage) + column) * log2_e,
                    delta = shared_float(block.column_floats(1, stage) + column);
        for (int i = c; i < 4; i += 2) {
          p.x[0][n][i] = exp2_approx(p.x[0][n][i] - log2_sum);
          dp.x[0][n][i] = p.x[0][n][i] * (dp.x[0][n][i] - delta);  // ds
        }
      }
    mma_AB(dv, to_floatX(p), block.column_tile(1, stage));
    mma_AB(dk, to_floatX(dp), block.column_tile(0, stage));
  });
  add_gradients(block, 1, dk);
  add_gradients(block, 2, dv);
}

// ----------------------------------------------------------------------------
// Launchers

template <class Block>
void launch_lsh_round(void (*kernel)(LshAttention, int, float), const LshAttention& a, int round) {
  const dim3 grid(unsigned(a.shape.NH), unsigned(a.shape.B), unsigned(ceil_div(a.shape.T, lsh_rows)));
  launch(kernel, grid, attention_threads, Block::bytes(round), a, round, a.shape.score_scale());
}

inline void launch_lsh_forward(const LshAttention& a, int round) {
  for_head_size(a.shape.HS, [&](auto D) { launch_lsh_round<LshForwardBlock<D>>(lsh_forward_kernel<D>, a, round); });
}
inline void launch_lsh_backward(const LshAttention& a, int round) {
  for_head_size(a.shape.HS, [&](auto D) {
    launch_lsh_round<LshBackwardBlock<D>>(lsh_dq_kernel<D>, a, round);
    launch_lsh_round<LshBackwardBlock<D>>(lsh_dkdv_kernel<D>, a, round);
  });
}

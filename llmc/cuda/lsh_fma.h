// Attention by locality-sensitive hashing with plain FMAs: one round. Tiles and products are as in
// attention_fma.h, with rows that are gathered; k is normalized where it is loaded. No two blocks write to the same
// address, and no sum depends on the order in which blocks run.
#pragma once
#include <cmath>
#include "attention_fma.h"
#include "device.h"
#include "llmc/ops/lsh.h"
#include "lsh_tiles.h"

// A block has as many rows as columns, fewer if it can have little shared memory (attention_fma_tiles.h). `tiles`: how
// many tiles of channels a kernel has beside its scores and the buckets of rows and columns in earlier rounds.
template <int G, bool Small>
struct LshTiles {
  static constexpr int groups = G, rows = (Small ? 32 : 64) / G, threads = rows / rows_per_thread * half_warp;
  static constexpr int stride = tile_stride<G>, blocks_per_sm = Small ? 1 : 2;
  static constexpr size_t bytes(int tiles, int round) {
    return sizeof(float) * size_t(rows * (tiles * stride + scores_stride<rows> + 2 * round));
  }
};

__device__ inline LshRows lsh_k(const LshRound& at) {
  return {at.a.qv + at.head * at.a.shape.HS, 2 * at.a.shape.C(), true};
}

// tile = the rows of some places of the order, and zeros after them. Called by the whole block.
template <class Tiles>
__device__ inline void load_places(float* tile, const LshRound& at, const LshRows& rows, LshInterval places) {
  constexpr int threads_per_row = 64 * Tiles::groups / 8, rows_at_once = Tiles::threads / threads_per_row;
  const int channel = int(threadIdx.x) % threads_per_row * 8;
  if (channel >= int(at.a.shape.HS)) return;
  for (int row = int(threadIdx.x) / threads_per_row; row < Tiles::rows; row += rows_at_once) {
    float x[8] = {};
    const int place = places.begin + row;
    if (place < places.end) {
      load8(x, rows.src + at.row(place) * rows.stride + channel);
      const float factor = rows.normalized ? at.a.of.inverse_norms[at.statistic(place)] : 1.0f;
      for (float& y : x) y *= factor;
    }
    store8(tile + row * Tiles::stride + channel, x);
  }
}

// buckets (round, rows) = the buckets of some places in earlier rounds. Called by the whole block.
template <class Tiles>
__device__ inline void load_buckets(int* buckets, const LshRound& at, LshInterval places) {
  const int i = int(threadIdx.x);
  for (int n = 0; i < Tiles::rows && n < at.round; n++)
    buckets[n * Tiles::rows + i] = places.begin + i < places.end ? at.buckets(places.begin + i)[n] : 0;
}

// Which columns the thread's rows see.
template <class Tiles>
struct LshMask {
  LshInterval seen[rows_per_thread];
  const int *row_buckets, *column_buckets;  // (round, rows), in shared memory

  // Scores that are hidden become -inf. `column`: the place of the tile's first.
  template <int N>
  __device__ void apply(float (&s)[rows_per_thread][N], int column, int round) const {
    const Thread thread = this_thread();
    for (int i = 0; i < rows_per_thread; i++)
      for (int j = 0; j < N; j++)
        if (!seen[i].contains(column + thread.lane + j * half_warp)) s[i][j] = -INFINITY;
#pragma unroll 1
    for (int n = 0; n < round; n++)
      for (int j = 0; j < N; j++) {
        const int bucket = column_buckets[n * Tiles::rows + thread.lane + j * half_warp];
        for (int i = 0; i < rows_per_thread; i++)
          if (row_buckets[n * Tiles::rows + thread.row + i] == bucket) s[i][j] = -INFINITY;
      }
  }
};

// The block's tile of the order, and its shared memory: tiles of channels, then scores, then buckets.
template <class Tiles>
struct LshBlock {
  LshRound at;
  LshInterval own;
  int num_tiles;

  __device__ LshBlock(const LshAttention& a, int round, int tile, int num_tiles)
      : at(a, blockIdx.z, blockIdx.y, round), own{tile * Tiles::rows, min(int(a.shape.T), (tile + 1) * Tiles::rows)},
        num_tiles(num_tiles) {}

  __device__ float* tile(int n) const {
    return reinterpret_cast<float*>(shared_memory) + n * Tiles::rows * Tiles::stride;
  }
  // The thread's rows of tile n.
  __device__ float* rows(int n) const { return tile(n) + this_thread().row * Tiles::stride; }
  __device__ float* scores() const { return tile(num_tiles) + this_thread().row * scores_stride<Tiles::rows>; }
  __device__ int* row_buckets() const {
    return reinterpret_cast<int*>(tile(num_tiles) + Tiles::rows * scores_stride<Tiles::rows>);
  }
  __device__ int* column_buckets() const { return row_buckets() + at.round * Tiles::rows; }
  // Tiles n and n + 1 = rows a and b of the places of the columns, with their buckets. Called by the whole block.
  __device__ void load_columns(LshInterval places, int n, const LshRows& a, const LshRows& b) const {
    __syncthreads();  // all warps have read the tiles before these
    load_places<Tiles>(tile(n), at, a, places);
    load_places<Tiles>(tile(n + 1), at, b, places);
    load_buckets<Tiles>(column_buckets(), at, places);
    __syncthreads();
  }
  __device__ int channels() const { return this_thread().channels(int(at.a.shape.HS), own.begin, own.end); }

  // What the thread's rows see: `interval` is keys_of_query or queries_of_key. Loads the rows' buckets, which the
  // first load_columns makes visible; called by the whole block.
  template <class Interval>
  __device__ LshMask<Tiles> mask(Interval interval) const {
    load_buckets<Tiles>(row_buckets(), at, own);
    LshMask<Tiles> mask = {{}, row_buckets(), column_buckets()};
    for (int i = 0; i < rows_per_thread; i++) mask.seen[i] = interval(at, own.begin + this_thread().row + i, own.end);
    return mask;
  }
};

// out =, lse =, or what the rounds so far give of them. A block owns a tile of queries of the order of one
// head in one sequence, a warp eight of them, a thread the elements of the layouts of attention_fma_tiles.h.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::threads, Tiles::blocks_per_sm)
    lsh_forward_kernel(LshAttention a, int round, float scale) {
  constexpr int G = Tiles::groups;
  const LshBlock<Tiles> block(a, round, int(gridDim.x - 1 - blockIdx.x), 3);
  const LshRound& at = block.at;
  const Thread thread = this_thread();
  float *q_tile = block.tile(0), *k_tile = block.tile(1), *v_tile = block.tile(2), *p = block.scores();
  load_places<Tiles>(q_tile, at, lsh_q(at), block.own);
  const LshMask<Tiles> mask = block.mask(keys_of_query);
  const int end = block.own.end - 1, channels = block.channels();  // the last query is no other one's key

  const float to_exp2 = scale * log2_e;
  float row_max[rows_per_thread], row_sum[rows_per_thread] = {}, acc[rows_per_thread][G][4] = {};
  for (float& max : row_max) max = -INFINITY;
  int k0 = next_columns<Tiles::rows>(at, block.own, at.bucket_start(block.own.begin), end);
  for (; k0 < end; k0 = next_columns<Tiles::rows>(at, block.own, k0 + Tiles::rows, end)) {
    const LshInterval keys = {k0, min(k0 + Tiles::rows, end)};
    block.load_columns(keys, 1, lsh_k(at), lsh_v(at));
    float s[rows_per_thread][Tiles::rows / half_warp];
    mul_ABt<G>(s, block.rows(0), k_tile, channels);
    mask.apply(s, k0, round);
    update_softmax<true>(s, acc, row_max, row_sum, to_exp2);
    mul_add_scores<G, Tiles::rows>(acc, s, p, v_tile, channels, keys.end - keys.begin);
  }
  for (int i = 0; i < rows_per_thread; i++) {
    const float sum = warp_sum<half_warp>(row_sum[i]);
    const int place = block.own.begin + thread.row + i;
    const bool exists = place < block.own.end;
    const LshResult result(at, place, exists, thread.lane == 0, sum == 0 ? -INFINITY : row_max[i] * scale + logf(sum));
    scale_row(acc[i], sum == 0 ? 0.0f : 1.0f / sum);
    for (int g = 0; g < G; g++)
      if (const int channel = 64 * g + thread.lane * 4; exists && channel < int(a.shape.HS))
        result.store(channel, acc[i][g]);
  }
}

// The thread's rows of the gradients dq (part 0), dk (1) or dv (2).
template <class Tiles, int G>
__device__ inline void add_gradients(const LshBlock<Tiles>& block, int part,
                                     const float (&acc)[rows_per_thread][G][4]) {
  const Thread thread = this_thread();
  for (int i = 0; i < rows_per_thread; i++)
    for (int g = 0; g < G; g++) {
      const int place = block.own.begin + thread.row + i, channel = 64 * g + thread.lane * 4;
      if (place < block.own.end && channel < int(block.at.a.shape.HS))
        add_gradient(block.at, place, part, channel, acc[i][g]);
    }
}

// The lse and delta of the query at a place of the order: +inf, so that probabilities are 0, from `end` on.
struct LshQuery {
  float lse = INFINITY, delta = 0;

  __device__ LshQuery(const LshRound& at, int place, int end) {
    if (place >= end) return;
    lse = at.a.lse[at.statistic(place)], delta = LshGradients(at.a).delta[at.statistic(place)];
  }
};

// dq of one round. A block owns a tile of queries, as in the forward pass, and keeps q and dout in shared memory; dq
// stays in registers and is written once.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::threads, Tiles::blocks_per_sm)
    lsh_dq_kernel(LshAttention a, int round, float scale) {
  constexpr int G = Tiles::groups;
  const LshBlock<Tiles> block(a, round, int(gridDim.x - 1 - blockIdx.x), 4);
  const LshRound& at = block.at;
  float *k_tile = block.tile(2), *v_tile = block.tile(3), *ds = block.scores();
  load_places<Tiles>(block.tile(0), at, lsh_q(at), block.own);
  load_places<Tiles>(block.tile(1), at, lsh_dout(at), block.own);
  const LshMask<Tiles> mask = block.mask(keys_of_query);
  const int end = block.own.end - 1, channels = block.channels();

  float dq[rows_per_thread][G][4] = {};
  int k0 = next_columns<Tiles::rows>(at, block.own, at.bucket_start(block.own.begin), end);
  for (; k0 < end; k0 = next_columns<Tiles::rows>(at, block.own, k0 + Tiles::rows, end)) {
    const LshInterval keys = {k0, min(k0 + Tiles::rows, end)};
    block.load_columns(keys, 2, lsh_k(at), lsh_v(at));
    float s[rows_per_thread][Tiles::rows / half_warp], dp[rows_per_thread][Tiles::rows / half_warp];
    mul_ABt<G>(s, block.rows(0), k_tile, channels);
    mul_ABt<G>(dp, block.rows(1), v_tile, channels);
    mask.apply(s, k0, round);
    for (int i = 0; i < rows_per_thread; i++) {
      const LshQuery query(at, block.own.begin + this_thread().row + i, block.own.end);
      for (int j = 0; j < Tiles::rows / half_warp; j++)
        s[i][j] = probability(s[i][j], scale, query.lse) * (dp[i][j] - query.delta);
    }
    mul_add_scores<G, Tiles::rows>(dq, s, ds, k_tile, channels, keys.end - keys.begin);
  }
  add_gradients(block, 0, dq);
}

// dk and dv of one round. A block owns a tile of keys of the order, and loops over the queries after them, up to the
// end of the last one's bucket. Scores are transposed, with a key per row.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::threads, Tiles::blocks_per_sm)
    lsh_dkdv_kernel(LshAttention a, int round, float scale) {
  constexpr int G = Tiles::groups;
  const LshBlock<Tiles> block(a, round, int(blockIdx.x), 4);
  const LshRound& at = block.at;
  float *q_tile = block.tile(2), *dout_tile = block.tile(3), *p = block.scores();
  load_places<Tiles>(block.tile(0), at, lsh_k(at), block.own);
  load_places<Tiles>(block.tile(1), at, lsh_v(at), block.own);
  const LshMask<Tiles> mask = block.mask(queries_of_key);
  const int end = at.bucket_end(block.own.end - 1), channels = block.channels();

  float dk[rows_per_thread][G][4] = {}, dv[rows_per_thread][G][4] = {};
  int q0 = next_columns<Tiles::rows>(at, block.own, block.own.begin + 1, end);
  for (; q0 < end; q0 = next_columns<Tiles::rows>(at, block.own, q0 + Tiles::rows, end)) {
    const LshInterval queries = {q0, min(q0 + Tiles::rows, end)};
    const int columns = queries.end - queries.begin;
    block.load_columns(queries, 2, lsh_q(at), lsh_dout(at));
    float s[rows_per_thread][Tiles::rows / half_warp], dp[rows_per_thread][Tiles::rows / half_warp];
    mul_ABt<G>(s, block.rows(0), q_tile, channels);
    mul_ABt<G>(dp, block.rows(1), dout_tile, channels);
    mask.apply(s, q0, round);
    for (int j = 0; j < Tiles::rows / half_warp; j++) {
      const LshQuery query(at, q0 + this_thread().lane + j * half_warp, queries.end);
      for (int i = 0; i < rows_per_thread; i++) {
        s[i][j] = probability(s[i][j], scale, query.lse);
        dp[i][j] = s[i][j] * (dp[i][j] - query.delta);  // ds
      }
    }
    mul_add_scores<G, Tiles::rows>(dv, s, p, dout_tile, channels, columns);
    __syncwarp();  // all lanes have read p, and ds may overwrite it
    mul_add_scores<G, Tiles::rows>(dk, dp, p, q_tile, channels, columns);
  }
  add_gradients(block, 1, dk);
  add_gradients(block, 2, dv);
}

// ----------------------------------------------------------------------------
// Launchers

// f(tiles) with tiles for a head's channels that are small enough for a kernel's `num_tiles` of them to fit.
template <class F>
void for_lsh_tiles(const LshAttention& a, int round, int num_tiles, F f) {
  for_groups(a.shape.HS, [&](auto G) {
    for_tiles_that_fit(LshTiles<G, false>::bytes(num_tiles, round), [&](auto small) { f(LshTiles<G, small>()); });
  });
}

template <class Tiles>
void launch_lsh_round(void (*kernel)(LshAttention, int, float), const LshAttention& a, int round, int num_tiles) {
  const dim3 grid(unsigned(ceil_div(a.shape.T, Tiles::rows)), unsigned(a.shape.NH), unsigned(a.shape.B));
  launch(kernel, grid, Tiles::threads, Tiles::bytes(num_tiles, round), a, round, a.shape.score_scale());
}

inline void launch_lsh_forward(const LshAttention& a, int round) {
  for_lsh_tiles(a, round, 3, [&](auto tiles) {
    using Tiles = decltype(tiles);
    launch_lsh_round<Tiles>(lsh_forward_kernel<Tiles>, a, round, 3);
  });
}
inline void launch_lsh_backward(const LshAttention& a, int round) {
  for_lsh_tiles(a, round, 4, [&](auto tiles) {
    using Tiles = decltype(tiles);
    launch_lsh_round<Tiles>(lsh_dq_kernel<Tiles>, a, round, 4);
    launch_lsh_round<Tiles>(lsh_dkdv_kernel<Tiles>, a, round, 4);
  });
}

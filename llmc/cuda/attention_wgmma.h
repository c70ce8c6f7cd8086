// Plain attention in bf16 or fp16 with wgmma (tile_wgmma.h), for heads of 33 to 64 and of 97 to 128 channels: the
// kernels of attention_mma.h and attention_mma_backward.h for the H100. What is loaded, in which order it is summed,
// and what a block owns are as there; another instruction multiplies, so the last bits differ. mma.sync reaches at most
// about 60 % of what an H100's tensor cores can do. attention_launch.h says for which lengths they are used; with
// dropout they are not. Two things are new:
//
// A block has two warpgroups with 64 rows each, and an SM has one block. All products are asynchronous: a warp starts
// the scores of the next tile before it takes the exponentials of this one, and continues while the products of its
// probabilities are under way. So there are two accumulators of scores, which change places from tile to tile, and the
// loops' bodies are functions that are called with the one and the other.
//
// All warps wait at one barrier a tile, the first warpgroup where it starts a tile, the second in the middle of one: so
// one multiplies while the other takes exponentials. What a warp reads before a barrier has arrived by the barrier
// before that. A tile's buffer is loaded again when no product that reads it can be under way.
#pragma once
#include <cmath>
#include "attention_mma_backward.h"
#include "attention_tiles.h"
#include "attention_wgmma_ds.h"
#include "device.h"
#include "llmc/ops/attention_args.h"
#include "tile_wgmma.h"

constexpr int num_warpgroups = 2, wgmma_threads = num_warpgroups * warpgroup_size,
              wgmma_rows = num_warpgroups * warpgroup_rows;

// Which of the block's warpgroups the warp belongs to. By a shuffle the compiler sees that all lanes have the same, and
// computes what depends on it once for a warp.
__device__ inline int warpgroup_index() { return __shfl_sync(full_warp, warp_index() / 4, 0); }

// This thread's copies have arrived, but for the last `pending` groups; after the barrier, all threads' copies have,
// for wgmma, and all warps have done what they did before it.
template <int pending = 0>
__device__ inline void copy_barrier() {
  wait_for_copies<pending>();
  copies_for_wgmma();
  sync_threads<wgmma_threads>(1);
}

// The barrier, and then the start of loading the tile after the next two, if there is one.
template <class Tiles, class Tile, class StartLoading>
__device__ inline void barrier_and_load(const Tiles& tiles, Tile tile, const StartLoading& start_loading) {
  copy_barrier();
  const Tile third = tiles.after(tiles.after(tiles.after(tile)));
  if (tiles.contains(third)) start_loading(third);
}

// Calls add_tile(tile, s, next_s) for `tile` and all after it, where next_s of a call is s of the next one.
template <class Tiles, class Tile, class Scores, class AddTile>
__device__ inline void add_tiles(const Tiles& tiles, Tile tile, Scores& s, Scores& other_s, AddTile add_tile) {
#pragma unroll 1
  while (true) {
    add_tile(tile, s, other_s);
    tile = tiles.after(tile);
    if (!tiles.contains(tile)) return;
    add_tile(tile, other_s, s);
    tile = tiles.after(tile);
    if (!tiles.contains(tile)) return;
  }
}

// ----------------------------------------------------------------------------
// Forward

// With the scores of 128 keys and more channels, two accumulators would need more registers than there are.
template <int D>
struct WgmmaForwardTiles {
  static constexpr int keys = D <= 64 ? 128 : 64;
  using Q = SplitTile<D, wgmma_rows>;
  using KV = SplitTile<D, keys>;
  static constexpr int buffers = 5;
  static constexpr size_t bytes = Q::bytes + 2 * buffers * KV::bytes;  // D = 64: 176 KB, 128: 192 KB
};

// out =, lse =, of a warp's 16 queries from `query` on, as far as they are before `end`. `stage`: as in store_rows.
template <int N, class Stage>
__device__ inline void store_outputs(const AttentionArgs& a, float scale, int head, int sequence, int query, int end,
                                     const OnlineSoftmax<1, false>& softmax, Accumulator<1, N>& acc, Stage stage) {
  const int queries = int(a.queries()), first_query = int(a.first_query), HS = int(a.HS);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float sum = warp_sum<4>(softmax.sum.x[0][h]), inverse = 1.0f / sum;
    for (int n = 0; n < N; n++)
      for (int i = 2 * h; i < 2 * h + 2; i++) acc.x[0][n][i] *= inverse;
    const int row = query + acc.row(0, 2 * h);
    if (first_of_row() && row < end)
      a.lse[(sequence * a.NH + head) * queries + row - first_query] = softmax.max.x[0][h] * scale + logf(sum);
  }
  store_rows({a.out + (sequence * queries * a.NH + head) * HS, a.NH * HS, query - first_query, end - first_query, HS,
              false},
             acc, stage);
}

// out =, lse =. A block owns 128 queries of one head in one sequence, a warp 16 of them, a thread its elements of the
// warp's fragments.
template <int D>
__global__ void __launch_bounds__(wgmma_threads, 1) attention_forward_wgmma_kernel(AttentionArgs a, float scale) {
  if (!compiled_for_wgmma) return trap();
  using Tiles = WgmmaForwardTiles<D>;
  using Scores = Accumulator<1, Tiles::keys / 8>;
  const int HS = int(a.HS), head = int(blockIdx.x), first_query = int(a.first_query), queries = int(a.T) - first_query;
  const int first_key_row = int(blockIdx.y) * int(a.T), first_row = int(blockIdx.y) * queries;
  // As in attention_mma.h: the rows [q0, q0 + 128) of q and out; `query` and `end` are positions.
  const int q0 = int(gridDim.z - 1 - blockIdx.z) * wgmma_rows;
  const int query = first_query + q0 + warp_index() * 16, end = first_query + min(queries, q0 + wgmma_rows);

  const typename Tiles::Q q_tile = {0}, warp_q = q_tile.from_row(warp_index() * 16);
  const typename Tiles::KV k_tiles = {q_tile.bytes}, v_tiles = k_tiles.next(Tiles::buffers);
  const KeyTiles<Tiles::keys, plain_attention> tiles(a, head, first_key_row, {}, first_query + q0, end);
  using KeyTile = decltype(tiles.first());
  auto buffer = [](KeyTile tile) { return tile.k0 / Tiles::keys % Tiles::buffers; };
  auto start_loading = [&](KeyTile tile) {
    const KVRows kv = tiles.rows(tile);
    load_tile_async<wgmma_threads>(k_tiles.next(buffer(tile)), kv.k, kv.k_stride, tile.k0, end, HS);
    load_tile_async<wgmma_threads>(v_tiles.next(buffer(tile)), kv.v, kv.v_stride, tile.k0, end, HS);
    commit_copies();
  };

  RegisterTile<1, D / 16> q_rows;
  Accumulator<1, D / 8> acc = {};
  OnlineSoftmax<1, false> softmax;
  const int warpgroup = warpgroup_index();
  // Adds a tile, whose scores are s, to the results, and computes the next tile's scores.
  auto add_tile = [&](KeyTile tile, Scores& s, Scores& next_s) {
    const KeyTile next = tiles.after(tile);
    if (warpgroup == 0) barrier_and_load(tiles, tile, start_loading);
    start_ABt(next_s, q_rows, k_tiles.next(buffer(tiles.contains(next) ? next : tile)));
    commit_products();
    if (!tiles.keeps_all(query, query + 16, tile.k0, tile.k0 + Tiles::keys))
      mask(s, [&](int row, int column) { return tile.k0 + column > query + row; });
    const ColumnVector<1> before = softmax.max;
    const bool grew = softmax.raise_max(s);
    if (grew) softmax.rescale_sums(before, scale * log2_e);
    if (warpgroup == 1) barrier_and_load(tiles, tile, start_loading);
    softmax.exponentials(s, scale * log2_e);
    keep_here(s);
    // ptxas would let no products overlap if acc were rescaled beside the next scores. They are done: they take less
    // time than the exponentials.
    wait_for_products<0>(acc, next_s);
    if (grew) softmax.rescale_rows(acc, before, scale * log2_e);
    start_AB(acc, to_floatX(s), v_tiles.next(buffer(tile)));
    commit_products();
  };

  KeyTile tile = tiles.first();
  const KeyTile second = tiles.after(tile), third = tiles.after(second);
  load_tile_async<wgmma_threads>(q_tile, a.q + first_row * a.q_stride + head * HS, a.q_stride, q0, queries, HS);
  start_loading(tile);
  if (tiles.contains(second)) start_loading(second);
  if (tiles.contains(third)) start_loading(third), copy_barrier<1>();
  else copy_barrier();
  load_register_tile(q_rows, warp_q);
  Scores s, other_s;
  start_ABt(s, q_rows, k_tiles.next(buffer(tile)));
  commit_products();
  wait_for_products<0>(s);
  add_tiles(tiles, tile, s, other_s, add_tile);
  wait_for_products<0>(acc);

  store_outputs(a, scale, head, int(blockIdx.y), query, end, softmax, acc, warp_q);
}

// ----------------------------------------------------------------------------
// Backward

// dq's products read the block's own rows from registers, with more than 64 channels from shared memory; dk's and dv's
// products from shared memory, or with `InRegisters` from registers.
template <int D>
struct WgmmaDqTiles {
  static constexpr int keys = 64;
  using Q = SplitTile<D, wgmma_rows>;
  using KV = SplitTile<D, keys>;
  static constexpr int buffers = 5;
  static constexpr size_t bytes = 2 * Q::bytes + 2 * buffers * KV::bytes;  // D = 64: 112 KB, 128: 224 KB
};

// What the block's own rows are as an A operand: a register tile that this loads, or the tile.
template <bool InRegisters, int D, int Rows>
__device__ inline auto own_rows(SplitTile<D, Rows> tile) {
  if constexpr (InRegisters) {
    RegisterTile<1, D / 16> rows;
    load_register_tile(rows, tile.from_row(warp_index() * 16));
    return rows;
  } else {
    return tile.from_row(warpgroup_index() * warpgroup_rows);
  }
}

// delta =, dq = or +=. A block owns 128 queries of one head in one sequence, a warp 16 of them, a thread its elements
// of the warp's fragments.
template <int D>
__global__ void __launch_bounds__(wgmma_threads, 1) attention_dq_wgmma_kernel(AttentionArgs a, float scale) {
  if (!compiled_for_wgmma) return trap();
  using Tiles = WgmmaDqTiles<D>;
  using Scores = Accumulator<1, Tiles::keys / 8>;
  const int HS = int(a.HS), head = int(blockIdx.x), T = int(a.T), first_row = int(blockIdx.y) * T;
  const int64_t C = a.NH * HS;
  const int q0 = int(gridDim.z - 1 - blockIdx.z) * wgmma_rows, end = min(T, q0 + wgmma_rows);
  const int query = q0 + warp_index() * 16;
  const floatX *dout = a.dout + first_row * C + head * HS, *out = a.out + first_row * C + head * HS;
  const int64_t first_lse = (blockIdx.y * a.NH + head) * T;

  const typename Tiles::Q q_tile = {0}, dout_tile = q_tile.next(1);
  const typename Tiles::KV k_tiles = {2 * q_tile.bytes}, v_tiles = k_tiles.next(Tiles::buffers);
  const KeyTiles<Tiles::keys, plain_attention> tiles(a, head, first_row, {}, q0, end);
  using KeyTile = decltype(tiles.first());
  auto buffer = [](KeyTile tile) { return tile.k0 / Tiles::keys % Tiles::buffers; };
  auto start_loading = [&](KeyTile tile) {
    const KVRows kv = tiles.rows(tile);
    load_tile_async<wgmma_threads>(k_tiles.next(buffer(tile)), kv.k, kv.k_stride, tile.k0, end, HS);
    load_tile_async<wgmma_threads>(v_tiles.next(buffer(tile)), kv.v, kv.v_stride, tile.k0, end, HS);
    commit_copies();
  };
  KeyTile tile = tiles.first();
  const KeyTile second = tiles.after(tile), third = tiles.after(second);
  load_tile_async<wgmma_threads>(q_tile, a.q + first_row * a.q_stride + head * HS, a.q_stride, q0, end, HS);
  load_tile_async<wgmma_threads>(dout_tile, dout, C, q0, end, HS);
  start_loading(tile);
  if (tiles.contains(second)) start_loading(second);
  if (tiles.contains(third)) start_loading(third);

  ColumnVector<1> log2_sum, row_sum;  // lse in powers of 2; delta
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = query + Scores::row(0, 2 * h);
    const bool exists = row < end;
    log2_sum.x[0][h] = exists ? a.lse[first_lse + row] * log2_e : INFINITY;  // no probability beyond the end
    row_sum.x[0][h] = warp_sum<4>(exists ? row_delta(dout + row * C, out + row * C, HS) : 0.0f);
    if (exists && first_of_row()) a.delta[first_lse + row] = row_sum.x[0][h];
  }
  if (tiles.contains(third)) copy_barrier<1>();
  else copy_barrier();
  const auto q_rows = own_rows<(D <= 64)>(q_tile), dout_rows = own_rows<(D <= 64)>(dout_tile);
  Accumulator<1, D / 8> acc = {};

  const int warpgroup = warpgroup_index();
  // Adds a tile, whose scores are s, to dq, and computes the next tile's scores.
  auto add_tile = [&](KeyTile tile, Scores& s, Scores& next_s) {
    const KeyTile next = tiles.after(tile);
    if (warpgroup == 0) barrier_and_load(tiles, tile, start_loading);
    Scores dp;
    start_ABt(dp, dout_rows, v_tiles.next(buffer(tile)));
    commit_products();
    start_ABt(next_s, q_rows, k_tiles.next(buffer(tiles.contains(next) ? next : tile)));
    commit_products();
    if (!tiles.keeps_all(query, query + 16, tile.k0, tile.k0 + Tiles::keys))
      mask(s, [&](int row, int column) { return tile.k0 + column > query + row; });
    for (int n = 0; n < Tiles::keys / 8; n++)
      for (int i = 0; i < 4; i++) s.x[0][n][i] = exp2_approx(s.x[0][n][i] * (scale * log2_e) - log2_sum.x[0][i / 2]);
    keep_here(s);
    if (warpgroup == 1) barrier_and_load(tiles, tile, start_loading);
    wait_for_products<1>(dp, acc);  // all but the next scores
    for (int n = 0; n < Tiles::keys / 8; n++)
      for (int i = 0; i < 4; i++) s.x[0][n][i] *= dp.x[0][n][i] - row_sum.x[0][i / 2];  // ds
    start_AB(acc, to_floatX(s), k_tiles.next(buffer(tile)));
    commit_products();
    wait_for_products<1>(next_s);  // all but what has just been started
  };
  Scores s, other_s;
  start_ABt(s, q_rows, k_tiles.next(buffer(tile)));
  commit_products();
  wait_for_products<0>(s);
  add_tiles(tiles, tile, s, other_s, add_tile);
  wait_for_products<0>(acc);
  __syncthreads();  // all products have read q, in whose place the results go to memory
  ::scale(acc, scale);
  store_rows({a.dq + first_row * a.dq_stride + head * HS, a.dq_stride, query, end, HS, a.dq_accumulate}, acc,
             q_tile.from_row(warp_index() * 16));
}

template <int D>
struct WgmmaDkdvTiles {
  static constexpr int queries = 64, buffers = 4;
  using KV = SplitTile<D, wgmma_rows>;
  using Q = SplitTile<D, queries>;
  static constexpr int vector_bytes = queries * int(sizeof(float));  // of lse and of delta
  static constexpr int ds_bytes = 16 * Tile<64>::row_bytes;          // of a warp, with StoresDs
  // D = 64: 98 KB, 128: 194 KB; with StoresDs 16 KB more.
  static constexpr size_t bytes = 2 * KV::bytes + 2 * buffers * (Q::bytes + vector_bytes),
                          bytes_with_ds = bytes + size_t(wgmma_threads / warp_size * ds_bytes);
};

// The warp's 16 rows of dS^T, which lie in `tile`, to rows `stride` apart.
__device__ inline void store_ds(floatX* to, int64_t stride, Tile<64> tile) {
  const int row = int(threadIdx.x) % warp_size / tile.chunks, chunk = int(threadIdx.x) % tile.chunks;
  __syncwarp();  // all lanes have stored; before they store the next tile's rows there is a barrier of the block
#pragma unroll
  for (int i = row; i < 16; i += warp_size / tile.chunks)
    *reinterpret_cast<uint4*>(to + i * stride + chunk * 8) =
        *reinterpret_cast<const uint4*>(shared_memory + tile.at(i, chunk));
}

// dk, dv = or +=. A block owns 128 keys of one K/V head in one sequence, a warp 16 of them, a thread its elements of
// the warp's fragments. With StoresDs dS^T goes to memory, too. The scores are transposed, with a key per row. For two
// accumulators of scores and two of dp there are not enough registers beside dk and dv: here the products of one tile
// run beside the start of the next one, and one warpgroup's beside the other's exponentials.
template <int D, bool InRegisters, bool StoresDs>
__global__ void __launch_bounds__(wgmma_threads, 1)
    attention_dkdv_wgmma_kernel(AttentionArgs a, float scale, DsMatrices ds) {
  if (!compiled_for_wgmma) return trap();
  using Tiles = WgmmaDkdvTiles<D>;
  constexpr int N = Tiles::queries / 8;
  const KVHead& kv = a.kv_heads[blockIdx.x];
  const int sequence = int(blockIdx.y) + (StoresDs ? ds.first_sequence : 0);
  const int HS = int(a.HS), T = int(a.T), first_row = sequence * T;
  const int64_t C = a.NH * HS;
  const int k0 = int(blockIdx.z) * wgmma_rows, end = min(T, k0 + wgmma_rows), key = k0 + warp_index() * 16;

  const typename Tiles::KV k_tile = {0}, v_tile = k_tile.next(1);
  const typename Tiles::Q q_tiles = {2 * k_tile.bytes}, dout_tiles = q_tiles.next(Tiles::buffers);
  const int lse_tiles = dout_tiles.next(Tiles::buffers).offset,
            delta_tiles = lse_tiles + Tiles::buffers * Tiles::vector_bytes;
  const Tile<64> ds_tile = {delta_tiles + Tiles::buffers * Tiles::vector_bytes + warp_index() * Tiles::ds_bytes};
  const QueryTiles<Tiles::queries, plain_attention> tiles(a, kv, {}, k0, end, sequence);
  using QueryTile = decltype(tiles.first());
  auto buffer = [](QueryTile tile) { return int(tile.left % Tiles::buffers); };
  auto start_loading = [&](QueryTile tile) {
    const int head = tiles.head(tile), q0 = tiles.q0(tile), b = buffer(tile);
    const int64_t first_lse = (sequence * a.NH + head) * T;
    load_tile_async<wgmma_threads>(q_tiles.next(b), a.q + first_row * a.q_stride + head * HS, a.q_stride, q0, T, HS);
    load_tile_async<wgmma_threads>(dout_tiles.next(b), a.dout + first_row * C + head * HS, C, q0, T, HS);
    load_vector_async<Tiles::queries>(lse_tiles + b * Tiles::vector_bytes, a.lse + first_lse, q0, T);
    load_vector_async<Tiles::queries>(delta_tiles + b * Tiles::vector_bytes, a.delta + first_lse, q0, T);
    commit_copies();
  };
  QueryTile tile = tiles.first();
  load_tile_async<wgmma_threads>(k_tile, kv.k + first_row * kv.k_stride, kv.k_stride, k0, end, HS);
  load_tile_async<wgmma_threads>(v_tile, kv.v + first_row * kv.k_stride, kv.k_stride, k0, end, HS);
  start_loading(tile);
  if (tiles.contains(tiles.after(tile))) start_loading(tiles.after(tile)), copy_barrier<1>();
  else copy_barrier();

  const int warpgroup = warpgroup_index();
  auto k_rows = own_rows<InRegisters>(k_tile), v_rows = own_rows<InRegisters>(v_tile);
  // The barrier, and then the start of loading the tile after the next one, if there is one.
  auto barrier_and_load_second = [&](QueryTile tile) {
    copy_barrier();
    const QueryTile next = tiles.after(tile), second = tiles.after(next);
    if (tiles.contains(next) && tiles.contains(second)) start_loading(second);
  };
  Accumulator<1, D / 8> dk = {}, dv = {};
#pragma unroll 1
  do {
    if (warpgroup == 0) barrier_and_load_second(tile);
    const int q0 = tiles.q0(tile), b = buffer(tile);
    Accumulator<1, N> s, dp;
    if constexpr (InRegisters) {
      const unsigned zero = unsigned(T) >> 31;
      define_anew(k_rows, zero), define_anew(v_rows, zero);
    }
    start_ABt(s, k_rows, q_tiles.next(b));
    commit_products();
    start_ABt(dp, v_rows, dout_tiles.next(b));
    commit_products();
    wait_for_products<1>(s, dv, dk);  // all but dp
    if (q0 < key + 15) mask(s, [&](int row, int column) { return key + row > q0 + column; });
    // From T on the tiles of q, dout, lse and delta are zeros, as in attention_mma_backward.h.
    for (int n = 0; n < N; n++)
      for (int i = 0; i < 4; i++) {
        const int column = s.column(n, i) * int(sizeof(float));
        const float log2_sum = shared_float(lse_tiles + b * Tiles::vector_bytes + column) * log2_e;
        s.x[0][n][i] = exp2_approx(s.x[0][n][i] * (scale * log2_e) - log2_sum);
      }
    if (warpgroup == 1) barrier_and_load_second(tile);
    start_AB(dv, to_floatX(s), dout_tiles.next(b));
    commit_products();
    wait_for_products<1>(dp);  // all but dv
    for (int n = 0; n < N; n++)
      for (int i = 0; i < 4; i++) {
        const int column = s.column(n, i) * int(sizeof(float));
        const float column_delta = shared_float(delta_tiles + b * Tiles::vector_bytes + column);
        dp.x[0][n][i] = s.x[0][n][i] * (dp.x[0][n][i] - column_delta);  // ds
      }
    const RegisterTile<1, N / 2> ds_rows = to_floatX(dp);
    if constexpr (StoresDs) store_register_tile(ds_tile, 0, ds_rows);
    start_AB(dk, ds_rows, q_tiles.next(b));
    commit_products();
    if constexpr (StoresDs) store_ds(ds.row(int(blockIdx.y), tiles.head(tile), key) + q0, ds.rows, ds_tile);
    tile = tiles.after(tile);
  } while (tiles.contains(tile));
  wait_for_products<0>(dk, dv);
  __syncthreads();  // all products have read k and v, in whose places the results go to memory
  ::scale(dk, scale);
  const int row = warp_index() * 16;
  store_rows({kv.dk + first_row * kv.dk_stride, kv.dk_stride, key, end, HS, kv.dk_accumulate}, dk,
             k_tile.from_row(row));
  store_rows({kv.dv + first_row * kv.dv_stride, kv.dv_stride, key, end, HS, kv.dv_accumulate}, dv,
             v_tile.from_row(row));
}

// Attention on tensor cores, in bf16 (sm_80 and up) or fp16 (sm_75 and up). Formulas, shapes, limits and which
// gradients are = or += are in attention.h; the types and functions that the kernels are written with, in tile.h. This
// file has the forward kernel, attention_mma_backward.h those for dq, dk and dv.
//
// A block has four or eight warps, and each warp owns 16 M rows of the block's tile. They stay in registers or shared
// memory while the block loops over tiles of columns, which are double-buffered: one is multiplied while the next is
// copied. Scores and probabilities never leave the registers of their warp, except in the one kernel whose warps share
// rows in pairs (DkdvTiles).
//
// The backward pass is two kernels, one with a block per tile of queries (dq) and one with a block per tile of keys (dk
// and dv). Each computes the scores and dp itself: seven matmuls, 1.4 times the five of a single kernel. A single
// kernel would have to add each tile's part of dq to memory with atomics, whose order differs from run to run, or in
// turn, or into a buffer for each part of the keys. Here every result is written once, by the one block that owns it:
// the bits are always the same, and delta is the only buffer.
//
// With relative positions (RelativePositions in attention_args.h: other queries q', and a row of r for each distance),
// a tile of queries and keys multiplies q' with the rows of r for the distances in it. The product has a column for
// each distance; it gets one for each key by moving each row by one element against the row before it, in registers
// (skew in tile.h). ds goes the other way for the gradient of q'. For dr there is a third kernel, with a block per tile
// of distances, which computes the scores and dp once more; its parts of the sequences are added up in their order
// (attention_relative.h). Nothing of size T * T is in memory, and what is loaded grows as k and v do. With
// heads of 64 channels a tile of queries and keys costs 3.25 products forward in place of 2, and 18 backward in place
// of 7.
//
// Measured errors are bf16's own: at most 1.02 times the errors of a computation in double that rounds where
// tensor cores must. What nvcc makes of these kernels decides how fast they are: dev/test/test_machine_code.cpp
// compares their registers, spills and instructions with recorded ones, for a spill changes no result.
#pragma once
#include "attention_mma_scores.h"

// In all kernels D is HS rounded up to 32, 64, 96 or 128, and Large says that a block can have 162 KB of shared memory,
// as on an A100 or H100, and not 99 KB as on the GPUs of compute capability 8.6, 8.9 and 12.0. Plain attention has
// tiles for either, with the same bits, and so has the backward pass of general attention with 64 channels. In fp16 the
// smaller ones fit in the 64 KB of a T4, but for topk's and relative positions' with more than 64 channels.
//
// A tile's columns are multiplied in chunks, so that only the scores of a chunk must be in registers beside the
// results: with 128 channels the scores of 48 keys, for more of them spill. A warp has 32 rows, so that each fragment
// of k and v that it loads from shared memory serves two rows of fragments. With more than 64 channels, its registers
// hold out but not q.
template <int D, bool Large>
struct ForwardTiles {
  static constexpr bool q_in_registers = D <= 64;
  static constexpr int M = 2,
                       keys = is_fp16 && D > 64  ? 32
                              : D > 96           ? 48
                              : D <= 64 && Large ? 128
                                                 : 64,
                       chunk = keys < 64 ? keys : 64;
  static constexpr int warp_queries = 16 * M, queries = warp_queries * attention_warps, blocks_per_sm = 2;
  static constexpr size_t bytes = (queries + 4 * keys) * D * sizeof(floatX);  // D = 64: 48 or 80 KB, 128: 80 KB
};

// With relative positions, a tile of queries and keys needs the rows of r for queries + keys distances.
// They are double-buffered, too, so there is room for 16 queries a warp: one fragment, whose rows need 16 rows of r
// more than there are keys. q' is a register tile, which comes through the second buffer of r.
template <int D>
struct RelativeForwardTiles {
  static constexpr bool q_in_registers = true;
  static constexpr int M = 1, keys = D <= 64 && !is_fp16 ? 64 : 32, chunk = keys;
  static constexpr int warp_queries = 16 * M, queries = warp_queries * attention_warps, blocks_per_sm = 2;
  static constexpr size_t bytes = (3 * queries + 6 * keys) * D * sizeof(floatX);  // D = 64: 72 KB, 128: 96 KB
};

template <int D, int Kind, bool Large>
using ForwardTilesOf = std::conditional_t<is_relative(Kind), RelativeForwardTiles<D>, ForwardTiles<D, Large>>;

// What a block that owns queries has of relative positions: the rows of r for the distances of its queries and a tile
// of keys, and q' of each warp.
template <class Tiles, int D>
struct RelativeRows {
  // Rows of r for a tile of keys: there is one distance less, but tiles have whole eights of rows.
  static constexpr int rows = Tiles::queries + Tiles::keys;
  Tile<D> r_tiles;  // double-buffered
  RegisterTile<1, D / 16> q_rows;

  // Starts loading q' of the block's queries, in the place of r's second tile. `first_row`: the row of q' that
  // q0 counts from.
  template <int Threads>
  __device__ void start_loading_q(const AttentionArgs& a, int head, int first_row, int q0, int end) const {
    const int64_t C = a.NH * a.HS;
    load_tile_async<Tiles::queries, Threads>(r_tiles.from_row(rows), a.relative.q + first_row * C + head * a.HS, C, q0,
                                             end, int(a.HS));
  }
  // Moves q', which has arrived, to registers. Ends with a barrier, after which r's second tile may be loaded.
  __device__ void take_q() {
    load_register_tile(q_rows, r_tiles.from_row(rows + warp_index() * Tiles::warp_queries));
    __syncthreads();
  }

  // r's tile number `stage` = its rows for the queries [q0, q0 + Tiles::queries) and the keys [k0, k0 + Tiles::keys).
  template <int Threads>
  __device__ void start_loading_r(const AttentionArgs& a, int head, int stage, int q0, int k0) const {
    load_band_async<rows, Threads>(r_tiles.from_row(stage * rows), a.relative.r + head * a.HS, a.NH * a.HS,
                                   relative_row(a, q0 + Tiles::queries - 1, k0), int(a.relative.distances), int(a.HS));
  }

  // The rows of the tile number `stage` for the warp's queries and the keys from the tile's `column` on. The first row
  // belongs to the last query and the first key.
  __device__ Tile<D> of_warp(int stage, int column) const {
    return r_tiles.from_row(stage * rows + column + Tiles::queries - 16 - warp_index() * Tiles::warp_queries);
  }

  // q' r^T of the warp's queries and 8 N keys, from the tile's `column` on.
  template <int N>
  __device__ Accumulator<1, N> scores(int stage, int column) const {
    static_assert(Tiles::M == 1, "a fragment of queries has its own rows of r");
    Accumulator<1, N + 2> g = {};
    mma_ABt(g, q_rows, of_warp(stage, column));
    return skew(g);
  }
};

// x = what is lost where x is rounded to floatX.
template <int M, int N>
__device__ inline void keep_rounding_errors(Accumulator<M, N>& s) {
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++)
      for (float& x : s.x[m][n]) x -= rounded(x);
}

// The warp's rows of dst (fp32), from `first` on, = acc: those before `end`, and the channels below HS. dst points to
// the sequence's row 0.
template <int M, int N>
__device__ inline void store_exact(float* dst, int64_t stride, int first, int end, int HS,
                                   const Accumulator<M, N>& acc) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
      for (int i = 0; i < 4; i += 2) {
        const int row = first + acc.row(m, i), column = acc.column(n, 0);
        if (row < end && column < HS)
          *reinterpret_cast<float2*>(dst + row * stride + column) = make_float2(acc.x[m][n][i], acc.x[m][n][i + 1]);
      }
}

// The online softmax of a warp's queries: maxima and sums over the keys so far (Milakov and Gimelshein 2018).
template <int M, bool General>
struct OnlineSoftmax {
  ColumnVector<M> max, sum;  // of the scores; of exp((score - max) / sqrt(HS)) over the lane's own columns

  __device__ OnlineSoftmax() {
    for (int m = 0; m < M; m++)
      for (int h = 0; h < 2; h++) max.x[m][h] = -INFINITY, sum.x[m][h] = 0;
  }

  // Begins with a score that no value goes with.
  __device__ void begin(float sink) {
    for (int m = 0; m < M; m++)
      for (int h = 0; h < 2; h++) max.x[m][h] = sink, sum.x[m][h] = first_of_row() ? 1.0f : 0.0f;
  }

  // s = exp((s - max) * scale), with the maximum over all columns up to these, and acc, which has the maximum before
  // these, is rescaled. to_exp2 = scale * log2_e. In plain attention every query sees key 0, so the maximum is finite
  // from the first tile on; in general it may be -inf; then all of s is, and the differences would be NaN.
  template <int N, int O>
  __device__ void update(Accumulator<M, N>& s, Accumulator<M, O>& acc, float to_exp2) {
    const ColumnVector<M> before = max;
    if (raise_max(s)) rescale_sums(before, to_exp2), rescale_rows(acc, before, to_exp2);  // else all factors are 1
    exponentials(s, to_exp2);
  }

  // The parts of update(), for a kernel in which acc may be rescaled only later.

  // Raises the maxima to include s. Returns whether one of the warp's maxima has changed.
  template <int N>
  __device__ bool raise_max(const Accumulator<M, N>& s) {
    bool grew = false;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float largest = max.x[m][h];
        for (int n = 0; n < N; n++) largest = fmaxf(largest, fmaxf(s.x[m][n][2 * h], s.x[m][n][2 * h + 1]));
        largest = warp_max<4>(largest);
        grew |= largest > max.x[m][h];
        max.x[m][h] = largest;
      }
    return __any_sync(0xffffffff, grew);
  }

  // The sums, or acc, scaled by the maxima `before`, are rescaled by the maxima now.
  __device__ void rescale_sums(const ColumnVector<M>& before, float to_exp2) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) sum.x[m][h] *= factor(before.x[m][h], max.x[m][h], to_exp2);
  }
  template <int O>
  __device__ void rescale_rows(Accumulator<M, O>& acc, const ColumnVector<M>& before, float to_exp2) const {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float f = factor(before.x[m][h], max.x[m][h], to_exp2);
        for (int n = 0; n < O; n++)
          for (int i = 2 * h; i < 2 * h + 2; i++) acc.x[m][n][i] *= f;
      }
  }

  // s = exp((s - max) * scale), which the sums get.
  template <int N>
  __device__ void exponentials(Accumulator<M, N>& s, float to_exp2) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float shift = base(max.x[m][h]) * to_exp2;
        for (int n = 0; n < N; n++)
          for (int i = 2 * h; i < 2 * h + 2; i++) {
            s.x[m][n][i] = exp2_approx(s.x[m][n][i] * to_exp2 - shift);
            sum.x[m][h] += s.x[m][n][i];
          }
      }
  }

 private:
  // What is subtracted from a row's scores.
  __device__ static float base(float largest) { return General && largest == -INFINITY ? 0.0f : largest; }
  __device__ static float factor(float before, float largest, float to_exp2) {
    return exp2_approx((before - base(largest)) * to_exp2);
  }
};

// out =, lse =. A block owns a tile of queries of one head in one sequence, a warp 16 M of them, a thread its elements
// of the warp's fragments (tile.h). q, the maxima, the sums and the rows of out stay in registers over the whole loop
// over keys, so memory is read once per tile and written once; the copy of the next k and v runs beside the
// multiplications.
template <int D, int Kind, bool Large>
__global__ void __launch_bounds__(attention_threads, ForwardTilesOf<D, Kind, Large>::blocks_per_sm)
    attention_forward_kernel(AttentionArgs a, float scale) {
  using Tiles = ForwardTilesOf<D, Kind, Large>;
  constexpr bool General = Kind != plain_attention, Relative = is_relative(Kind);
  constexpr int M = Tiles::M;
  const int HS = int(a.HS), head = int(blockIdx.x);
  const OwnTile own = own_tile(General ? stride_of(a, head) : 1, int(gridDim.z - 1 - blockIdx.z));
  const Positions positions = own.positions;  // everything below is in terms of these
  const int first_query = positions.count(int(a.first_query)), queries = positions.count(int(a.T)) - first_query,
            stride = positions.stride;
  const int all_queries = int(a.T) - int(a.first_query),
            first_row_of_q = positions.at(first_query) - int(a.first_query);
  const int first_key_row = int(blockIdx.y) * int(a.T), first_row = int(blockIdx.y) * all_queries + first_row_of_q;
  if (General && own.tile * Tiles::queries >= queries) return;

  const Tile<D> q_tile = {0};
  const Tile<D> k_tiles = q_tile.from_row(Tiles::queries), v_tiles = k_tiles.from_row(2 * Tiles::keys);
  const Tile<D> warp_q = q_tile.from_row(warp_index() * Tiles::warp_queries);
  // The block's queries are the rows [q0, q0 + Tiles::queries) of q and out; `query` and `end` are positions: of the
  // warp's first query, and after the block's last query, which is also the end of the keys that they see.
  const int q0 = own.tile * Tiles::queries;
  const int first_of_warp = first_query + q0 + warp_index() * Tiles::warp_queries;
  const int end = first_query + min(queries, q0 + Tiles::queries);

  const KeyTiles<Tiles::keys, Kind> tiles(a, head, first_key_row, positions, first_query + q0, end);
  [[maybe_unused]] RelativeRows<Tiles, D> relative = {v_tiles.from_row(2 * Tiles::keys), {}};  // if there are any
  auto start_loading = [&](auto tile) {
    const int stage = tile.stage() * Tiles::keys;
    const KVRows kv = tiles.rows(tile);
    load_tile_async<Tiles::keys, attention_threads>(k_tiles.from_row(stage), kv.k, kv.k_stride, tile.k0, end, HS);
    load_tile_async<Tiles::keys, attention_threads>(v_tiles.from_row(stage), kv.v, kv.v_stride, tile.k0, end, HS);
    if constexpr (Relative)
      relative.template start_loading_r<attention_threads>(a, head, tile.stage(), first_query + q0, tile.k0);
    commit_copies();
  };
  load_tile_async<Tiles::queries, attention_threads>(q_tile, a.q + first_row * a.q_stride + head * a.HS,
                                                     stride * a.q_stride, q0, queries, HS);
  if constexpr (Relative) relative.template start_loading_q<attention_threads>(a, head, first_row, q0, queries);
  auto tile = tiles.first();
  if (!General || tiles.contains(tile)) start_loading(tile);

  RegisterTile<M, D / 16> q_rows;
  Accumulator<M, D / 8> acc = {};
  OnlineSoftmax<M, General> softmax;
  if constexpr (General)
    if (a.sinks.scores != nullptr) softmax.begin(sink_of(a, head, scale));
#pragma unroll 1
  for (auto next = tile; tiles.contains(tile); tile = next) {
    wait_for_copies();
    __syncthreads();  // all threads' copies of this tile have arrived, and all warps have read the one before it
    if constexpr (Relative)
      if (tile.is_first()) relative.take_q();
    next = tiles.after(tile);
    if (tiles.contains(next)) start_loading(next);
    if (Tiles::q_in_registers && tile.is_first()) load_register_tile(q_rows, warp_q);
    const int query = General ? not_hoisted(first_of_warp) : first_of_warp;
    if (query >= end) continue;
    const int k0 = tile.k0;
#pragma unroll 1
    for (int first = k0; first < k0 + Tiles::keys; first += Tiles::chunk) {
      if (!tiles.sees_some(query, query + Tiles::warp_queries, first, first + Tiles::chunk)) continue;
      const int row = first - k0 + tile.stage() * Tiles::keys;
      [[maybe_unused]] KeptElements<M, Tiles::chunk / 8> kept;
      if constexpr (has_dropout(Kind))
        kept = kept_elements<false, M, Tiles::chunk / 8>(a.dropout, int(blockIdx.y), head, tile.source, positions,
                                                         query, first);
      Accumulator<M, Tiles::chunk / 8> s = {};
      if constexpr (Relative) s = relative.template scores<Tiles::chunk / 8>(tile.stage(), first - k0);
      if constexpr (Tiles::q_in_registers) mma_ABt(s, q_rows, k_tiles.from_row(row));
      else mma_ABt(s, warp_q, k_tiles.from_row(row));
      if (!tiles.keeps_all(query, query + Tiles::warp_queries, first, first + Tiles::chunk)) {
        if constexpr (General) apply_mask<false>(s, tiles.mask, query, first);
        else mask(s, [&](int row, int column) { return first + column > query + row; });
      }
      if constexpr (has_topk(Kind))
        if (a.topk > 0)
          select_topk<false>(s, chosen_from(a, blockIdx.y, head, positions.at(query)), end - query,
                             tile.source * int(a.T) + positions.at(first), stride);
      softmax.update(s, acc, scale * log2_e);
      if constexpr (has_dropout(Kind))
        for (int m = 0; m < M; m++)
          for (int n = 0; n < Tiles::chunk / 8; n++)
            for (int i = 0; i < 4; i++)
              if (!kept.contains(m, n, i)) s.x[m][n][i] = 0;
      mma_AB(acc, to_floatX(s), v_tiles.from_row(row));
      if constexpr (General)
        if (a.exact_out != nullptr) {  // what rounding has left of the probabilities
          keep_rounding_errors(s);
          mma_AB(acc, to_floatX(s), v_tiles.from_row(row));
        }
    }
  }
  if constexpr (General) finish_copies();

  const int query = first_of_warp;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float sum = warp_sum<4>(softmax.sum.x[m][h]);
      const bool sees_none = General && sum == 0;
      const float inverse = sees_none ? 0.0f : (has_dropout(Kind) ? a.dropout.scale : 1.0f) / sum;
      const int row = acc.row(m, 2 * h);
      for (int n = 0; n < D / 8; n++)
        for (int i = 2 * h; i < 2 * h + 2; i++) acc.x[m][n][i] *= inverse;
      if (first_of_row() && query + row < end)
        a.lse[int64_t(blockIdx.y) * all_queries * a.NH + int64_t(head) * all_queries + positions.at(query + row) -
              int(a.first_query)] = sees_none ? INFINITY : softmax.max.x[m][h] * scale + logf(sum);
    }
  if constexpr (General)
    if (a.exact_out != nullptr)
      store_exact(a.exact_out + (first_row * a.NH + head) * a.HS, stride * a.NH * a.HS, query - first_query,
                  end - first_query, HS, acc);
  const RowsOut rows = {a.out + (first_row * a.NH + head) * a.HS,
                        stride * a.NH * a.HS,
                        query - first_query,
                        end - first_query,
                        HS,
                        false};
  store_rows(rows, acc, warp_q);
}

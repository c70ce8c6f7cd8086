// The backward pass of attention on tensor cores, with what attention_mma.h says: a kernel for delta and dq, with a
// block per tile of queries, and one for dk and dv, with a block per tile of keys.
#pragma once
#include "attention_mma.h"

// With more than 64 channels, a warp's registers hold 32 rows of results if q and dout stay in shared memory. An SM has
// room for one block then: of eight warps, as two blocks of four have. Without that much shared memory a warp
// has 16 rows, and with 64 channels tiles have half as many columns, so that an SM that has 100 KB has room for two
// blocks.
template <int D, bool Large>
struct DqTiles {
  static constexpr bool rows_in_registers = D <= 64 || !Large;  // q and dout
  static constexpr int M = D <= 64 || Large ? 2 : 1, keys = D == 32 || (D == 64 && Large) ? 64 : 32, chunk = 32;
  static constexpr int warps = D > 64 && Large ? 8 : 4, threads = warps * warp_size, blocks_per_sm = 8 / warps;
  static constexpr int warp_queries = 16 * M, queries = warp_queries * warps;
  // D = 64: 48 or 64 KB, 128: 64 or 160 KB.
  static constexpr size_t bytes = (2 * queries + 4 * keys) * D * sizeof(floatX);
};

// With relative positions a warp has two results, dq and the gradient of q', which is in registers.
template <int D>
struct RelativeDqTiles {
  static constexpr bool rows_in_registers = D <= 64;
  static constexpr int M = 1, keys = D <= 64 && !is_fp16 ? 64 : D <= 96 ? 32 : 16, chunk = keys < 32 ? keys : 32;
  static constexpr int warps = attention_warps, threads = attention_threads, blocks_per_sm = 2;
  static constexpr int warp_queries = 16 * M, queries = warp_queries * warps;
  static constexpr size_t bytes = (4 * queries + 6 * keys) * D * sizeof(floatX);  // D = 64: 80 KB, 128: 88 KB
};

template <int D, int Kind, bool Large>
using DqTilesOf = std::conditional_t<is_relative(Kind), RelativeDqTiles<D>, DqTiles<D, Large>>;

// dk and dv are twice the results of dq. Of more than 64 channels, two warps share 32 keys: of each chunk, each
// computes the scores and dp of half of the queries, they exchange p and ds through shared memory, and each adds up
// half of the channels of dk and dv, as in FlashAttention-2. So each fragment that is loaded serves 32 rows here, too.
// Without that much shared memory a warp has 16 keys.
template <int D, bool Large>
struct DkdvTiles {
  // Warps that share their keys; how many such groups a block has.
  static constexpr int share = D > 64 && Large ? 2 : 1, groups = 4;
  static constexpr int M = D <= 64 || Large ? 2 : 1,
                       queries = D == 32 || Large    ? 64
                                 : is_fp16 && D > 96 ? 16
                                                     : 32,
                       columns = queries < 32 ? queries : 32, chunk = columns * share;
  static_assert(share == 1 || chunk == queries, "p and ds are read before the barrier of the next tile");
  static constexpr int threads = groups * share * warp_size, blocks_per_sm = 2 / share;
  static constexpr int group_keys = 16 * M, keys = group_keys * groups, channels = D / share;
  static constexpr size_t exchanged = share > 1 ? 2 * keys* chunk * sizeof(floatX) : 0;
  static constexpr size_t floats = 4 * queries * sizeof(float);  // lse and delta
  // D = 64: 48 or 65 KB, 128: 65 or 161 KB.
  static constexpr size_t bytes = (2 * keys + 4 * queries) * D * sizeof(floatX) + floats + exchanged;
};

// With relative positions there is a tile of q' beside q's, and the rows of r for the distances of the block's
// keys and the tile's queries.
template <int D>
struct RelativeDkdvTiles {
  static constexpr int share = 1, groups = attention_warps;
  static constexpr int M = 1, queries = D > 96 || (is_fp16 && D == 64) ? 16 : 32, columns = queries, chunk = columns;
  static constexpr int threads = attention_threads, blocks_per_sm = 2;
  static constexpr int group_keys = 16 * M, keys = group_keys * groups, channels = D;
  static constexpr int distances = keys + queries;  // rows of a tile of r, as in RelativeRows
  static constexpr size_t floats = 4 * queries * sizeof(float);
  // D = 64: 65 KB, 96 and 128: 97 KB.
  static constexpr size_t bytes = (2 * keys + 6 * queries + 2 * distances) * D * sizeof(floatX) + floats;
};

template <int D, int Kind, bool Large>
using DkdvTilesOf = std::conditional_t<is_relative(Kind), RelativeDkdvTiles<D>, DkdvTiles<D, Large>>;

// The sum over dout * out of a row, for the four lanes that hold it. Both pointers are to the row's first channel.
__device__ inline float row_delta(const floatX* dout, const floatX* out, int HS) {
  float sum = 0;
  for (int channel = int(threadIdx.x) % 4 * 8; channel < HS; channel += 32) {
    float x[8], y[8];
    load8(x, dout + channel);
    load8(y, out + channel);
    for (int i = 0; i < 8; i++) sum += x[i] * y[i];
  }
  return sum;
}

// delta =, dq = or +=. A block owns a tile of queries of one head in one sequence, a warp 16 M of them, a thread its
// elements of the warp's fragments. dq, and of few channels q and dout, of the warp's rows stay in registers over the
// whole loop over k and v, as in the forward pass. delta is summed first, straight from memory.
template <int D, int Kind, bool Large>
__global__ void __launch_bounds__(DqTilesOf<D, Kind, Large>::threads, DqTilesOf<D, Kind, Large>::blocks_per_sm)
    attention_dq_kernel(AttentionArgs a, float scale) {
  using Tiles = DqTilesOf<D, Kind, Large>;
  constexpr bool General = Kind != plain_attention, Relative = is_relative(Kind);
  constexpr int M = Tiles::M, N = Tiles::chunk / 8;
  const int HS = int(a.HS), head = int(blockIdx.x);
  const OwnTile own = own_tile(General ? stride_of(a, head) : 1, int(gridDim.z - 1 - blockIdx.z));
  const Positions positions = own.positions;  // everything below is in terms of these
  const int T = positions.count(int(a.T)), stride = positions.stride;
  const int q0 = first_query<General>(a, positions) + own.tile * Tiles::queries, end = min(T, q0 + Tiles::queries);
  const int first_key_row = int(blockIdx.y) * int(a.T),
            first_row = int(blockIdx.y) * int(num_queries<General>(a)) + query_row_0<General>(a, positions);
  const int64_t C = a.NH * a.HS, out_stride = stride * C;
  if (General && q0 >= T) return;
  const floatX *dout = a.dout + first_row * C + head * a.HS, *out = a.out + first_row * C + head * a.HS;
  // One number in two forms, from which nvcc makes different code: test_machine_code has the spills.
  const int64_t first_lse = General ? (blockIdx.y * a.NH + head) * a.queries() + query_row_0<General>(a, positions)
                                    : first_key_row * a.NH + head * a.T + positions.first;
  const float* lse = a.lse + first_lse;
  float* delta = a.delta + first_lse;

  const Tile<D> q_tile = {0};
  const Tile<D> dout_tile = q_tile.from_row(Tiles::queries), k_tiles = dout_tile.from_row(Tiles::queries);
  const Tile<D> v_tiles = k_tiles.from_row(2 * Tiles::keys);
  const Tile<D> warp_q = q_tile.from_row(warp_index() * Tiles::warp_queries);
  const Tile<D> warp_dout = dout_tile.from_row(warp_index() * Tiles::warp_queries);
  const int query = q0 + warp_index() * Tiles::warp_queries;

  const KeyTiles<Tiles::keys, Kind> tiles(a, head, first_key_row, positions, q0, end);
  [[maybe_unused]] RelativeRows<Tiles, D> relative = {v_tiles.from_row(2 * Tiles::keys), {}};  // if there are any
  auto start_loading = [&](auto tile) {
    const int stage = tile.stage() * Tiles::keys;
    const KVRows kv = tiles.rows(tile);
    load_tile_async<Tiles::keys, Tiles::threads>(k_tiles.from_row(stage), kv.k, kv.k_stride, tile.k0, end, HS);
    load_tile_async<Tiles::keys, Tiles::threads>(v_tiles.from_row(stage), kv.v, kv.v_stride, tile.k0, end, HS);
    if constexpr (Relative) relative.template start_loading_r<Tiles::threads>(a, head, tile.stage(), q0, tile.k0);
    commit_copies();
  };
  load_tile_async<Tiles::queries, Tiles::threads>(q_tile, a.q + first_row * a.q_stride + head * a.HS,
                                                  stride * a.q_stride, q0, end, HS);
  load_tile_async<Tiles::queries, Tiles::threads>(dout_tile, dout, out_stride, q0, end, HS);
  if constexpr (Relative) relative.template start_loading_q<Tiles::threads>(a, head, first_row, q0, end);
  auto tile = tiles.first();
  if (!General || tiles.contains(tile)) start_loading(tile);

  RegisterTile<M, D / 16> q_rows, dout_rows;
  Accumulator<M, D / 8> acc = {};
  [[maybe_unused]] Accumulator<M, D / 8> relative_dq = {};
  ColumnVector<M> log2_sum, row_sum;  // lse in powers of 2; delta
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = query + acc.row(m, 2 * h);
      const bool exists = row < end;
      log2_sum.x[m][h] = exists ? lse[row * stride] * log2_e : INFINITY;  // no probability beyond the end
      row_sum.x[m][h] = warp_sum<4>(exists ? row_delta(dout + row * out_stride, out + row * out_stride, HS) : 0.0f);
      if (exists && first_of_row()) delta[row * stride] = row_sum.x[m][h];
    }

  const float to_exp2 = scale * log2_e;
#pragma unroll 1
  for (auto next = tile; tiles.contains(tile); tile = next) {
    wait_for_copies();
    __syncthreads();  // all threads' copies of this tile have arrived, and all warps have read the one before it
    if constexpr (Relative)
      if (tile.is_first()) relative.take_q();
    next = tiles.after(tile);
    if (tiles.contains(next)) start_loading(next);
    if (Tiles::rows_in_registers && tile.is_first())
      load_register_tile(q_rows, warp_q), load_register_tile(dout_rows, warp_dout);
    if (query >= end) continue;
    const int k0 = tile.k0;
#pragma unroll 1
    for (int first = k0; first < k0 + Tiles::keys && first < query + Tiles::warp_queries; first += Tiles::chunk) {
      if (General && !tiles.sees_some(query, query + Tiles::warp_queries, first, first + Tiles::chunk)) continue;
      const int row = first - k0 + tile.stage() * Tiles::keys;
      [[maybe_unused]] KeptElements<M, N> kept;
      if constexpr (has_dropout(Kind))
        kept = kept_elements<false, M, N>(a.dropout, int(blockIdx.y), head, tile.source, positions, query, first);
      Accumulator<M, N> s = {}, dp = {};
      if constexpr (Relative) s = relative.template scores<N>(tile.stage(), first - k0);
      if constexpr (Tiles::rows_in_registers) {
        mma_ABt(s, q_rows, k_tiles.from_row(row));
        mma_ABt(dp, dout_rows, v_tiles.from_row(row));
      } else {
        mma_ABt(s, warp_q, k_tiles.from_row(row));
        mma_ABt(dp, warp_dout, v_tiles.from_row(row));
      }
      if (!tiles.keeps_all(query, query + Tiles::warp_queries, first, first + Tiles::chunk)) {
        if constexpr (General) apply_mask<false>(s, tiles.mask, query, first);
        else mask(s, [&](int row, int column) { return first + column > query + row; });
      }
      if constexpr (has_topk(Kind))
        if (a.topk > 0)
          select_topk<false>(s, chosen_from(a, blockIdx.y, head, positions.at(query)), end - query,
                             tile.source * int(a.T) + positions.at(first), stride);
      for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++)
          for (int i = 0; i < 4; i++) {
            if constexpr (has_dropout(Kind)) dp.x[m][n][i] *= kept.contains(m, n, i) ? a.dropout.scale : 0.0f;
            const float p = exp2_approx(s.x[m][n][i] * to_exp2 - log2_sum.x[m][i / 2]);
            s.x[m][n][i] = p * (dp.x[m][n][i] - row_sum.x[m][i / 2]);  // ds
          }
      mma_AB(acc, to_floatX(s), k_tiles.from_row(row));
      if constexpr (Relative) mma_AB(relative_dq, to_floatX(unskew(s)), relative.of_warp(tile.stage(), first - k0));
    }
  }
  if constexpr (General) finish_copies();
  ::scale(acc, scale);
  // Computed again, or it would be kept in registers over the loop, and spill.
  const int first_of_block = General ? first_query<General>(a, positions) + not_hoisted(own.tile) * Tiles::queries : q0;
  store_rows({a.dq + first_row * a.dq_stride + head * a.HS, stride * a.dq_stride,
              first_of_block + warp_index() * Tiles::warp_queries, min(T, first_of_block + Tiles::queries), HS,
              a.dq_accumulate},
             acc, warp_q);
  if constexpr (Relative) {
    ::scale(relative_dq, scale);
    store_rows({a.relative.dq + (first_row * a.NH + head) * a.HS, a.NH * a.HS,
                first_of_block + warp_index() * Tiles::warp_queries, min(T, first_of_block + Tiles::queries), HS,
                false},
               relative_dq, warp_dout);
  }
}

// dk, dv = or +=. A block owns a tile of keys of one K/V head in one sequence, a group of one or two warps 16 M of
// them, a warp its part of their channels, a thread its elements of the warp's fragments. It loops over the tiles of q
// and dout of every query head of the K/V head, from the block's first key or the first query on, whichever is later.
// dk and dv stay in registers throughout, and are written once. The scores are transposed, with a key per row, so that
// they are A operands of the products for dk and dv, in the registers where they were computed or in shared memory.
template <int D, int Kind, bool Large>
__global__ void __launch_bounds__(DkdvTilesOf<D, Kind, Large>::threads, DkdvTilesOf<D, Kind, Large>::blocks_per_sm)
    attention_dkdv_kernel(AttentionArgs a, float scale) {
  using Tiles = DkdvTilesOf<D, Kind, Large>;
  constexpr bool General = Kind != plain_attention, Relative = is_relative(Kind);
  constexpr int M = Tiles::M, N = Tiles::columns / 8;
  const int HS = int(a.HS), group = warp_index() / Tiles::share,
            part = Tiles::share == 1 ? 0 : warp_index() % Tiles::share;
  // Not a copy: dk, dv and their strides are loaded at the end, not kept in registers.
  const KVHead& kv = a.kv_heads[blockIdx.x];
  const OwnTile own = own_tile(General ? stride_of(a, kv) : 1, int(blockIdx.z));
  const Positions positions = own.positions;  // everything below is in terms of these
  const int T = positions.count(int(a.T)), stride = positions.stride;
  const int first_row = int(blockIdx.y) * int(a.T) + positions.first;
  const int64_t q_stride = stride * a.q_stride, out_stride = stride * a.NH * a.HS;
  const int first_query_row = int(blockIdx.y) * int(num_queries<General>(a)) + query_row_0<General>(a, positions);
  const floatX *q = a.q + first_query_row * a.q_stride, *dout = a.dout + first_query_row * a.NH * a.HS;
  if (General && own.tile * Tiles::keys >= T) return;

  const Tile<D> k_tile = {0};
  const Tile<D> v_tile = k_tile.from_row(Tiles::keys), q_tiles = v_tile.from_row(Tiles::keys);
  const Tile<D> dout_tiles = q_tiles.from_row(2 * Tiles::queries);
  const int lse_tiles = dout_tiles.from_row(2 * Tiles::queries).offset,
            delta_tiles = lse_tiles + 2 * Tiles::queries * int(sizeof(float));
  const Tile<D> group_k = k_tile.from_row(group * Tiles::group_keys);
  const Tile<D> group_v = v_tile.from_row(group * Tiles::group_keys);
  const int after_floats = delta_tiles + 2 * Tiles::queries * int(sizeof(float));
  // What the warps of a group exchange, if they share keys.
  using Exchanged = Tile<Tiles::share == 1 ? 32 : Tiles::chunk>;
  const Exchanged p_tile = {after_floats}, ds_tile = p_tile.from_row(Tiles::keys);
  const Exchanged group_p = p_tile.from_row(group * Tiles::group_keys);
  const Exchanged group_ds = ds_tile.from_row(group * Tiles::group_keys);
  // q' and r, if there are relative positions.
  [[maybe_unused]] const Tile<D> relative_q_tiles = {after_floats},
                                 r_tiles = relative_q_tiles.from_row(2 * Tiles::queries);
  const int k0 = own.tile * Tiles::keys, end = min(T, k0 + Tiles::keys);
  const int key = k0 + group * Tiles::group_keys;
  // Where the warp's part begins: of a chunk; of dk and dv.
  const int part_column = part * Tiles::columns, channel = part * Tiles::channels;

  const QueryTiles<Tiles::queries, Kind> tiles(a, kv, positions, k0, end, int(blockIdx.y));
  auto start_loading = [&](auto tile) {
    const int head = tiles.head(tile), q0 = tiles.q0(tile), stage = tile.stage() * Tiles::queries;
    // Computed here, or its 64 bits would be kept in registers and spill.
    const int64_t first_lse = (blockIdx.y * a.NH + head) * num_queries<General>(a) + query_row_0<General>(a, positions);
    load_tile_async<Tiles::queries, Tiles::threads>(q_tiles.from_row(stage), q + head * HS, q_stride, q0, T, HS);
    load_tile_async<Tiles::queries, Tiles::threads>(dout_tiles.from_row(stage), dout + head * HS, out_stride, q0, T,
                                                    HS);
    if constexpr (Relative) {
      const int64_t C = a.NH * a.HS;
      constexpr int rows = Tiles::distances;
      load_tile_async<Tiles::queries, Tiles::threads>(relative_q_tiles.from_row(stage),
                                                      a.relative.q + first_query_row * C + head * HS, C, q0, T, HS);
      load_band_async<rows, Tiles::threads>(r_tiles.from_row(tile.stage() * rows), a.relative.r + head * HS, C,
                                            relative_row(a, q0 + Tiles::queries - 1, k0), int(a.relative.distances),
                                            HS);
    }
    load_vector_async<Tiles::queries>(lse_tiles + stage * int(sizeof(float)), a.lse + first_lse, q0, T, stride);
    load_vector_async<Tiles::queries>(delta_tiles + stage * int(sizeof(float)), a.delta + first_lse, q0, T, stride);
    commit_copies();
  };
  load_tile_async<Tiles::keys, Tiles::threads>(k_tile, kv.k + first_row * kv.k_stride, stride * kv.k_stride, k0, end,
                                               HS);
  const int64_t v_stride = General ? kv.v_stride : kv.k_stride;
  load_tile_async<Tiles::keys, Tiles::threads>(v_tile, kv.v + first_row * v_stride, stride * v_stride, k0, end, HS);
  auto tile = tiles.first();
  if (!General || tiles.contains(tile)) start_loading(tile);

  const float to_exp2 = scale * log2_e;
  Accumulator<M, Tiles::channels / 8> dk = {}, dv = {};
#pragma unroll 1
  for (auto next = tile; tiles.contains(tile); tile = next) {
    wait_for_copies();
    __syncthreads();  // all threads' copies of this tile have arrived, and all warps have read the one before it
    next = tiles.after(tile);
    if (tiles.contains(next)) start_loading(next);
    if (key >= end) continue;
    const int q0 = tiles.q0(tile);
    const auto& head_mask = mask_of_block<has_documents(Kind)>(a, blockIdx.y, tiles.head(tile), positions);
#pragma unroll 1
    for (int first = q0; first < q0 + Tiles::queries; first += Tiles::chunk) {
      if (first + Tiles::chunk <= key) continue;  // none of these queries sees the warp's keys
      if (General && !head_mask.sees_some(first, first + Tiles::chunk, key, key + Tiles::group_keys)) continue;
      const int row = first - q0 + tile.stage() * Tiles::queries, query = first + part_column;
      [[maybe_unused]] KeptElements<M, N> kept;
      if constexpr (has_dropout(Kind)) {
        const int head = tiles.head(tile);
        kept = kept_elements<true, M, N>(a.dropout, int(blockIdx.y), head, source_of(a, head, int(blockIdx.x)),
                                         positions, query, key);
      }
      Accumulator<M, N> s = {}, dp = {};
      if constexpr (Relative)  // r q'^T; the first of r's rows belongs to the first key and the last query
#pragma unroll
        for (int n = 0; n < N; n += 2) {
          Accumulator<M + 1, 2> g = {};
          mma_ABt(g,
                  r_tiles.from_row(tile.stage() * Tiles::distances + key - k0 + q0 + Tiles::queries - 16 - first -
                                   8 * n),
                  relative_q_tiles.from_row(row + 8 * n));
          skew_columns<false>(s, n, g);
        }
      mma_ABt(s, group_k, q_tiles.from_row(row + part_column));
      mma_ABt(dp, group_v, dout_tiles.from_row(row + part_column));
      if constexpr (General) {
        if (!head_mask.keeps_all(query, query + Tiles::columns, key, key + Tiles::group_keys))
          apply_mask<true>(s, head_mask, query, key);
        if constexpr (has_topk(Kind)) {
          const int head = tiles.head(tile);
          if (a.topk > 0)
            select_topk<true>(s, chosen_from(a, blockIdx.y, head, positions.at(query)), T - query,
                              first_index(a, head, int(blockIdx.x)) + positions.at(key), stride);
        }
      } else if (query < key + Tiles::group_keys - 1) {
        mask(s, [&](int row, int column) { return key + row > query + column; });
      }
      // From T on the tiles of q, dout, lse and delta are zeros: p is 1 there, and adds p * dout = 0 to dv and ds * q =
      // 0 to dk.
      for (int n = 0; n < N; n++)
        for (int c = 0; c < 2; c++) {
          const int column = (row + part_column + s.column(n, c)) * int(sizeof(float));
          const float log2_sum = shared_float(lse_tiles + column) * log2_e,
                      column_delta = shared_float(delta_tiles + column);
          for (int m = 0; m < M; m++)
            for (int h = 0; h < 2; h++) {
              float &x = s.x[m][n][2 * h + c], &y = dp.x[m][n][2 * h + c];
              x = exp2_approx(x * to_exp2 - log2_sum);
              if constexpr (has_dropout(Kind)) y *= kept.contains(m, n, 2 * h + c) ? a.dropout.scale : 0.0f;
              y = x * (y - column_delta);  // ds
              if constexpr (has_dropout(Kind)) x = kept.contains(m, n, 2 * h + c) ? x : 0.0f;
            }
        }
      if constexpr (Tiles::share == 1) {
        mma_AB(dv, to_floatX(s), dout_tiles.from_row(row));
        mma_AB(dk, to_floatX(dp), q_tiles.from_row(row));
      } else {
        store_register_tile(group_p, part_column, to_floatX(s));
        store_register_tile(group_ds, part_column, to_floatX(dp));
        sync_threads<Tiles::share * warp_size>(1 + group);  // both warps of the group have stored
        mma_AB(dv, group_p, dout_tiles.from_row(row), channel);
        mma_AB(dk, group_ds, q_tiles.from_row(row), channel);
      }
    }
  }
  if constexpr (General) finish_copies();
  ::scale(dk, scale);
  if constexpr (has_dropout(Kind)) ::scale(dv, a.dropout.scale);
  // Through the place of k and v, which all warps of the group had read before they last exchanged p and ds.
  store_rows({kv.dk + first_row * kv.dk_stride, stride * kv.dk_stride, key, end, HS, kv.dk_accumulate}, dk, group_k,
             channel);
  store_rows({kv.dv + first_row * kv.dv_stride, stride * kv.dv_stride, key, end, HS, kv.dv_accumulate}, dv, group_v,
             channel);
}

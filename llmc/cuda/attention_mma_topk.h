// The kernel that finds the topk keys of each query on tensor cores. attention_topk.h has the selection,
// attention_mma.h what the kernels are written with.
#pragma once
#include "llmc/ops/attention_args.h"
#include "attention_mma.h"
#include "attention_tiles.h"
#include "attention_topk.h"
#include "tile.h"

template <int D>
struct TopKTiles {
  static constexpr int queries = 16 * attention_warps, keys = 32;
  static constexpr size_t bytes = (queries + 2 * keys) * D * sizeof(floatX) +
                                  queries * (sizeof(RadixSearch) + histogram_stride * sizeof(int));  // D = 128: 97 KB
};

// topk_score =, topk_last =. A block owns 64 queries of one head in one sequence and their histograms, a warp 16 of
// them, a thread its elements of the warp's fragments. A pass is the forward kernel's loop over keys up to the scores,
// whose bits are the same.
template <int D, bool Documents>
__global__ void __launch_bounds__(attention_threads, 2) attention_topk_kernel(AttentionArgs a) {
  using Tiles = TopKTiles<D>;
  const int HS = int(a.HS), head = int(blockIdx.x);
  const OwnTile own = own_tile(stride_of(a, head), int(gridDim.z - 1 - blockIdx.z));
  const Positions positions = own.positions;
  const int first_query = positions.count(int(a.first_query)), queries = positions.count(int(a.T)) - first_query,
            stride = positions.stride;
  const int all_queries = int(a.T) - int(a.first_query),
            first_row_of_q = positions.at(first_query) - int(a.first_query);
  const int first_key_row = int(blockIdx.y) * int(a.T), first_row = int(blockIdx.y) * all_queries + first_row_of_q;
  const int q0 = own.tile * Tiles::queries, row = int(threadIdx.x);
  if (q0 >= queries) return;
  const int query = first_query + q0 + warp_index() * 16, end = first_query + min(queries, q0 + Tiles::queries);
  const bool owns_query = row < Tiles::queries && first_query + q0 + row < end;  // whose search it makes
  const TopK chosen = chosen_from(a, blockIdx.y, head, positions.at(first_query + q0 + row));

  const Tile<D> q_tile = {0};
  const Tile<D> k_tiles = q_tile.from_row(Tiles::queries), warp_q = q_tile.from_row(warp_index() * 16);
  RadixSearch* searches = reinterpret_cast<RadixSearch*>(shared_memory + k_tiles.from_row(2 * Tiles::keys).offset);
  int* histograms = reinterpret_cast<int*>(searches + Tiles::queries);

  const VisibleKeyTiles<Tiles::keys, Documents> tiles(a, head, first_key_row, positions, first_query + q0, end);
  auto start_loading = [&](auto tile) {
    const KVRows kv = tiles.rows(tile);
    load_tile_async<Tiles::keys, attention_threads>(k_tiles.from_row(tile.stage() * Tiles::keys), kv.k, kv.k_stride,
                                                    tile.k0, end, HS);
    commit_copies();
  };
  load_tile_async<Tiles::queries, attention_threads>(q_tile, a.q + first_row * a.q_stride + head * a.HS,
                                                     stride * a.q_stride, q0, queries, HS);
  if (row < Tiles::queries) searches[row] = {0, owns_query ? a.topk : 0};

  RegisterTile<1, D / 16> q_rows;
  bool unfinished = true;
  for (int pass = 0; unfinished; pass = next_pass(pass, a.kv_per_head * int(a.T))) {
    for (int i = row; i < Tiles::queries * histogram_stride; i += attention_threads) histograms[i] = 0;
    auto tile = tiles.first();
    if (tiles.contains(tile)) start_loading(tile);
#pragma unroll 1
    for (auto next = tile; tiles.contains(tile); tile = next) {
      wait_for_copies();
      __syncthreads();  // the tile has arrived, histograms are zero, and all warps have read the tile before this one
      next = tiles.after(tile);
      if (tiles.contains(next)) start_loading(next);
      if (pass == 0 && tile.is_first()) load_register_tile(q_rows, warp_q);
      if (!tiles.sees_some(query, query + 16, tile.k0, tile.k0 + Tiles::keys)) continue;

      Accumulator<1, Tiles::keys / 8> s = {};
      mma_ABt(s, q_rows, k_tiles.from_row(tile.stage() * Tiles::keys));
      if (!tiles.keeps_all(query, query + 16, tile.k0, tile.k0 + Tiles::keys))
        apply_mask<false>(s, tiles.mask, query, tile.k0);
      for (int h = 0; h < 2; h++) {
        const int query_row = warp_index() * 16 + s.row(0, 2 * h);
        const RadixSearch search = searches[query_row];
        for (int n = 0; n < Tiles::keys / 8; n++)
          for (int i = 0; i < 2; i++) {
            const float x = s.x[0][n][2 * h + i];
            const int index = tile.source * int(a.T) + positions.at(tile.k0 + s.column(n, i));
            if (x != -INFINITY) count_key(histograms + query_row * histogram_stride, search, pass, x, index);
          }
      }
    }
    __syncthreads();  // all keys are counted
    unfinished =
        owns_query && choose_digit(histograms + row * histogram_stride, searches[row], pass, chosen.score, chosen.last);
    unfinished = __syncthreads_or(unfinished);
  }
  finish_copies();
}

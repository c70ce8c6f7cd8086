// The kernel for dr, the gradient of relative positions' r, on tensor cores. Those for q' are attention's own
// (attention_mma.h).
#pragma once
#include "llmc/ops/attention_args.h"
#include "attention_mma.h"
#include "attention_tiles.h"
#include "tile.h"

// With relative positions, dr. k and v have bands of as many rows as a tile of distances and one of queries need: they
// and q and dout have no second buffer, but are loaded after their last use, the scores and dp.
template <int D>
struct DrTiles {
  static constexpr int queries = D <= 96 ? 32 : 16, warp_distances = 16, distances = warp_distances * attention_warps;
  static constexpr int keys = distances + queries;               // rows of k and v, as in RelativeRows
  static constexpr size_t floats = 4 * queries * sizeof(float);  // lse and delta
  // D = 64: 49 KB, 96 and 128: 73 KB.
  static constexpr size_t bytes = (distances + 2 * keys + 4 * queries) * D * sizeof(floatX) + floats;
};

// Elements of s without sees(row, column) become -inf.
template <int M, int N, class Sees>
__device__ inline void hide_unseen(Accumulator<M, N>& s, Sees sees) {
  static_assert(4 * M * N <= 32, "a bit for each element of a lane");
  unsigned seen = 0;
#pragma unroll 1
  for (int e = 0; e < 4 * M * N; e++)
    seen |= unsigned(sees(s.row(e / (4 * N), e % 4), s.column(e / 4 % N, e % 4))) << e;
  mask_elements(s, [&](int m, int n, int i) { return !(seen >> (4 * (N * m + n) + i) & 1); });
}

// dr_of_sequences =. A block owns a tile of rows of r, which are distances, for one head in one sequence, a warp 16 of
// them, a thread its elements of the warp's fragments. It is the kernel for dk and dv with distances in the place of
// keys: it loops over the tiles of queries that have such distances to some key, for every K/V head of the query head,
// and what is skewed is k q^T and v dout^T. dr stays in registers throughout, and is written once.
template <int D, bool Documents>
__global__ void __launch_bounds__(attention_threads, 2) attention_dr_kernel(AttentionArgs a, float scale) {
  using Tiles = DrTiles<D>;
  constexpr int N = Tiles::queries / 8;
  const int HS = int(a.HS), head = int(blockIdx.x), T = int(a.T), distances = int(a.relative.distances);
  const int64_t C = a.NH * a.HS;
  const int first_key_row = int(blockIdx.y) * T;
  const int first_query_row = int(blockIdx.y) * int(a.queries()) - int(a.first_query);  // of position 0
  const int64_t first_lse = (blockIdx.y * a.NH + head) * a.queries() - a.first_query;
  // The last tile first: it has the smallest distances, which the most queries have to some key.
  const int row0 = int(gridDim.z - 1 - blockIdx.z) * Tiles::distances, end = min(distances, row0 + Tiles::distances);
  const int warp_row = row0 + warp_index() * Tiles::warp_distances;
  const auto& mask = mask_of_block<Documents>(a, blockIdx.y, head, {});

  const Tile<D> r_tile = {0};
  const Tile<D> k_tile = r_tile.from_row(Tiles::distances), v_tile = k_tile.from_row(Tiles::keys);
  const Tile<D> q_tile = v_tile.from_row(Tiles::keys), dout_tile = q_tile.from_row(Tiles::queries);
  const Tile<D> relative_q_tiles = dout_tile.from_row(Tiles::queries);  // double-buffered, as lse and delta are
  const int lse_tiles = relative_q_tiles.from_row(2 * Tiles::queries).offset,
            delta_tiles = lse_tiles + 2 * Tiles::queries * int(sizeof(float));
  const Tile<D> warp_r = r_tile.from_row(warp_index() * Tiles::warp_distances);

  const DistanceTiles<Tiles::queries> tiles(a, head, mask, distances - end);
  auto start_loading = [&](auto tile) {
    const int q0 = tile.q0, stage = tile.stage() * Tiles::queries, k0 = q0 + row0 - (distances - 1);
    const KVHead& kv = tiles.kv(tile);
    load_band_async<Tiles::keys, attention_threads>(k_tile, kv.k + first_key_row * kv.k_stride, kv.k_stride, k0, T, HS);
    load_band_async<Tiles::keys, attention_threads>(v_tile, kv.v + first_key_row * kv.v_stride, kv.v_stride, k0, T, HS);
    load_tile_async<Tiles::queries, attention_threads>(q_tile, a.q + first_query_row * a.q_stride + head * HS,
                                                       a.q_stride, q0, T, HS);
    load_tile_async<Tiles::queries, attention_threads>(dout_tile, a.dout + first_query_row * C + head * HS, C, q0, T,
                                                       HS);
    load_tile_async<Tiles::queries, attention_threads>(relative_q_tiles.from_row(stage),
                                                       a.relative.q + first_query_row * C + head * HS, C, q0, T, HS);
    load_vector_async<Tiles::queries>(lse_tiles + stage * int(sizeof(float)), a.lse + first_lse, q0, T);
    load_vector_async<Tiles::queries>(delta_tiles + stage * int(sizeof(float)), a.delta + first_lse, q0, T);
    commit_copies();
  };
  load_tile_async<Tiles::distances, attention_threads>(r_tile, a.relative.r + head * HS, C, row0, end, HS);
  // The first tile from this one on with a query that may see a key. It takes this tile's buffers.
  auto visible = [&](auto tile) {
    const int parity = tile.parity;
    if constexpr (Documents)
      while (tiles.contains(tile) && !mask.sees_some(tile.q0, min(T, tile.q0 + Tiles::queries), 0,
                                                     tile.q0 + row0 - (distances - 1) + Tiles::keys - 1))
        tile = tiles.after(tile);
    tile.parity = parity;
    return tile;
  };
  auto tile = visible(tiles.first());
  if (tiles.contains(tile)) start_loading(tile);

  const float to_exp2 = scale * log2_e;
  Accumulator<1, D / 8> dr = {};
#pragma unroll 1
  for (auto next = tile; tiles.contains(tile); tile = next) {
    const int stage = tile.stage() * Tiles::queries;
    const Tile<D> relative_q = relative_q_tiles.from_row(stage);
    wait_for_copies();
    __syncthreads();  // all threads' copies of this tile have arrived
    Accumulator<1, N> s = {}, dp = {};
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      // The key of the first distance and query.
      const int key = not_hoisted(warp_index()) * Tiles::warp_distances + 8 * n;
      Accumulator<2, 2> g = {};
      mma_ABt(g, k_tile.from_row(key), q_tile.from_row(8 * n));
      skew_columns<true>(s, n, g);
      g = {};
      mma_ABt(g, v_tile.from_row(key), dout_tile.from_row(8 * n));
      skew_columns<true>(dp, n, g);
    }
    mma_ABt(s, warp_r, relative_q);
    __syncthreads();  // all warps have read k, v, q and dout
    next = visible(tiles.after(tile));
    if (tiles.contains(next)) start_loading(next);

    const int first_distance = distances - 1 - warp_row, key = tile.q0 - first_distance;
    ::mask(s, [&](int row, int column) {
      return unsigned(first_distance - row) >= unsigned(mask.window) || key + row + column < 0;
    });
    if (Documents || mask.num_clauses > 0)
      hide_unseen(s, [&](int row, int column) { return mask.sees(tile.q0 + column, max(0, key + row + column)); });
    // Queries from T on have ds * q' = 0, as q' is.
    for (int n = 0; n < N; n++)
      for (int c = 0; c < 2; c++) {
        const int column = (stage + s.column(n, c)) * int(sizeof(float));
        const float log2_sum = shared_float(lse_tiles + column) * log2_e,
                    column_delta = shared_float(delta_tiles + column);
        for (int h = 0; h < 2; h++) {
          float& x = s.x[0][n][2 * h + c];
          x = exp2_approx(x * to_exp2 - log2_sum) * (dp.x[0][n][2 * h + c] - column_delta);  // ds
        }
      }
    mma_AB(dr, to_floatX(s), relative_q);
  }
  ::scale(dr, scale);
  store_exact(a.relative.dr_of_sequences + blockIdx.y * distances * C + head * HS, C, warp_row, end, HS, dr);
}

// Attention with plain FMAs, in fp32: for exact checks, and for training in fp32. Formulas, shapes, limits and which
// gradients are = or += are in attention.h. This file has the forward kernels and the launchers.
//
// No sum depends on the order in which blocks run, and no two blocks write to the same address, so the results' bits
// are always the same. The backward pass is two kernels, and each computes the scores itself: seven matmuls
// instead of five, but neither atomics nor a buffer.
//
// With relative positions a tile of queries and keys needs as many rows of r as it has queries and keys, one for each
// distance that occurs in it. They lie in shared memory beside k, and a product with them reads the row of each pair's
// distance: no scores by distance are stored. A third kernel of the backward pass, whose blocks own distances, computes
// the gradient of r.
#pragma once
#include "attention_fma_backward.h"
#include "attention_fma_tiles.h"

// With relative positions they are smaller, because q' and r must fit, too.
template <int G, int Kind, bool Small>
struct ForwardTiles {
  static constexpr bool relative = is_relative(Kind);
  static constexpr int queries = relative ? (Small ? 32 : 64) / G : 64, keys = (relative || Small ? 32 : 64) / G,
                       threads = queries / rows_per_thread * half_warp;
  static constexpr int blocks_per_sm = Small ? 1 : G == 1 && !relative ? 3 : 2;
  static constexpr int relative_rows = relative ? queries + (queries + keys) : 0;  // of q' and r
  static constexpr size_t bytes =  // 70 and 77 KB, with relative positions 87 and 79 KB; small ones 44 to 57 KB
      sizeof(float) * ((queries + 2 * keys + relative_rows) * tile_stride<G> + queries * scores_stride<keys>);
  static_assert(!Small || bytes <= Gpu::least_shared_bytes);
};

// s = exp((s - max) * scale), with the maximum over all columns up to these, and the thread's rows of acc and of the
// sums, which have the maximum before these, are rescaled. In plain attention every query sees key 0, so that from the
// first tile on `row_max` is finite. In general it may be -inf; then all of s is, and the differences would be NaN.
template <bool General, int G, int N>
__device__ inline void update_softmax(float (&s)[rows_per_thread][N], float (&acc)[rows_per_thread][G][4],
                                      float (&row_max)[rows_per_thread], float (&row_sum)[rows_per_thread],
                                      float to_exp2) {
  for (int i = 0; i < rows_per_thread; i++) {
    float new_max = s[i][0];
    for (float x : s[i]) new_max = fmaxf(new_max, x);
    new_max = fmaxf(row_max[i], warp_max<half_warp>(new_max));
    const float base = General && new_max == -INFINITY ? 0.0f : new_max;
    const float rescale = exp2f((row_max[i] - base) * to_exp2);
    row_max[i] = new_max;
    row_sum[i] *= rescale;
    scale_row(acc[i], rescale);
    for (float& x : s[i]) {
      x = exp2f((x - base) * to_exp2);
      row_sum[i] += x;
    }
  }
}

// out =, lse =. A block owns a tile of queries of one head in one sequence; blocks with the most keys are started
// first. A warp owns eight queries, a thread the elements of the layouts of attention_fma_tiles.h. Maxima, sums and
// rows of out stay in registers over the whole loop over keys, so memory is read once per tile and written once. Each
// lane sums the probabilities that it computed; the sixteen sums of a row are added at the end.
template <int G, int Kind, bool Small>
__global__ void __launch_bounds__(ForwardTiles<G, Kind, Small>::threads, ForwardTiles<G, Kind, Small>::blocks_per_sm)
    attention_forward_kernel(AttentionArgs a, float scale) {
  using Tiles = ForwardTiles<G, Kind, Small>;
  constexpr bool General = Kind != plain_attention, Relative = is_relative(Kind);
  const int HS = int(a.HS), head = int(blockIdx.y);
  const OwnTile own = own_tile(General ? stride_of(a, head) : 1, int(gridDim.x - 1 - blockIdx.x));
  const Positions positions = own.positions;  // everything below is in terms of these
  const int first_query = positions.count(int(a.first_query)), queries = positions.count(int(a.T)) - first_query,
            stride = positions.stride;
  const int all_queries = int(a.T) - int(a.first_query),
            first_row_of_q = positions.at(first_query) - int(a.first_query);
  const int first_key_row = int(blockIdx.z) * int(a.T), first_row = int(blockIdx.z) * all_queries + first_row_of_q;
  if (General && own.tile * Tiles::queries >= queries) return;

  float* q_tile = reinterpret_cast<float*>(shared_memory);
  float* k_tile = q_tile + Tiles::queries * tile_stride<G>;
  float* v_tile = k_tile + Tiles::keys * tile_stride<G>;
  const Thread thread = this_thread();
  float* p = v_tile + Tiles::keys * tile_stride<G> + thread.row * scores_stride<Tiles::keys>;
  float* relative_q_tile = v_tile + Tiles::keys * tile_stride<G> + Tiles::queries * scores_stride<Tiles::keys>;
  float* r_tile = relative_q_tile + Tiles::queries * tile_stride<G>;

  // The block's queries are the rows [first, first + Tiles::queries) of q and out; q0, `query` and `end` are positions:
  // of the block's and of the thread's first query, and after the block's last query, which is also the end of the keys
  // that they see.
  const int first = own.tile * Tiles::queries, q0 = first_query + first, query = q0 + thread.row;
  const int end = first_query + min(queries, first + Tiles::queries);
  const int channels = thread.channels(HS, q0, end);
  load_tile<G, Tiles::queries, Tiles::threads>(q_tile, a.q + first_row * a.q_stride + head * a.HS, stride * a.q_stride,
                                               first, queries, HS);
  if constexpr (Relative)
    load_tile<G, Tiles::queries, Tiles::threads>(relative_q_tile, a.relative.q + (first_row * a.NH + head) * a.HS,
                                                 stride * a.NH * a.HS, first, queries, HS);

  const float to_exp2 = scale * log2_e;
  float row_max[rows_per_thread], row_sum[rows_per_thread], acc[rows_per_thread][G][4] = {};
  const float sink = General ? sink_of(a, head, scale) : -INFINITY;
  for (int i = 0; i < rows_per_thread; i++)
    row_max[i] = sink, row_sum[i] = sink > -INFINITY && thread.lane == 0 ? 1.0f : 0.0f;
  const KeyTiles<Tiles::keys, Kind> tiles(a, head, first_key_row, positions, q0, end);
  for (auto tile = tiles.first(); tiles.contains(tile); tile = tiles.after(tile)) {
    const int k0 = tile.k0;
    const KVRows kv = tiles.rows(tile);
    __syncthreads();  // all warps have read the tiles before these
    load_tile<G, Tiles::keys, Tiles::threads>(k_tile, kv.k, kv.k_stride, k0, end, HS);
    load_tile<G, Tiles::keys, Tiles::threads>(v_tile, kv.v, kv.v_stride, k0, end, HS);
    if constexpr (Relative)
      load_distances<G, Tiles::queries + Tiles::keys, Tiles::threads>(r_tile, a, head, q0 + Tiles::queries - 1, k0);
    __syncthreads();
    if (General && !tiles.sees_some(warp_first(q0), warp_first(q0) + warp_rows, k0, k0 + Tiles::keys)) continue;

    float s[rows_per_thread][Tiles::keys / half_warp];
    mul_ABt<G>(s, q_tile + thread.row * tile_stride<G>, k_tile, channels);
    if constexpr (Relative)
      add_shifted_ABt<G, false, -1, 1>(s, relative_q_tile + thread.row * tile_stride<G>,
                                       r_tile + (thread.lane - thread.row + Tiles::queries - 1) * tile_stride<G>,
                                       channels);
    if constexpr (General) {
      if (!tiles.keeps_all(warp_first(q0), warp_first(q0) + warp_rows, k0, k0 + Tiles::keys))
        apply_mask<false>(s, tiles.mask, query, k0 + thread.lane);
      if (has_topk(Kind) && a.topk > 0)
        select_topk<false>(s, chosen_from(a, blockIdx.z, head, positions.at(query)), end - query,
                           tile.source * int(a.T) + positions.at(k0 + thread.lane), stride);
    } else if (k0 + Tiles::keys > q0 + 1) {
      mask_later_keys<false>(s, query, k0 + thread.lane);  // only on the diagonal
    }
    update_softmax<General>(s, acc, row_max, row_sum, to_exp2);
    if constexpr (has_dropout(Kind))
      for (int i = 0; i < rows_per_thread; i++)
        for (int j = 0; j < Tiles::keys / half_warp; j++)
          s[i][j] *= dropout_factor(a, head, tile.source, positions, query + i, k0 + thread.lane + j * half_warp);
    mul_add_scores<G, Tiles::keys>(acc, s, p, v_tile, channels, min(Tiles::keys, end - k0));
  }

  for (int i = 0; i < rows_per_thread; i++) {
    row_sum[i] = warp_sum<half_warp>(row_sum[i]);
    const bool sees_none = General && row_sum[i] == 0;
    scale_row(acc[i], sees_none ? 0.0f : 1.0f / row_sum[i]);
    if (thread.lane == 0 && query + i < end)
      a.lse[(blockIdx.z * a.NH + head) * all_queries + first_row_of_q + (query - first_query + i) * stride] =
          sees_none ? INFINITY : row_max[i] * scale + logf(row_sum[i]);
  }
  const int64_t first_out = (first_row * a.NH + head) * a.HS;
  store_rows<G>(a.out + first_out, stride * a.NH * a.HS, query - first_query, end - first_query, HS,
                /*accumulate=*/false, acc);
}

// ----------------------------------------------------------------------------
// The topk keys of each query

template <int G, bool Small>
struct TopKTiles {
  static constexpr int queries = (Small ? 32 : 64) / G, keys = 32, threads = queries / rows_per_thread * half_warp;
  static constexpr int blocks_per_sm = Small ? 1 : 2;
  static constexpr size_t bytes =  // 91 and 66 KB, small ones 50 and 41 KB
      (queries + keys) * tile_stride<G> * sizeof(float) +
      queries * (sizeof(RadixSearch) + histogram_stride * sizeof(int));
  static_assert(!Small || bytes <= Gpu::least_shared_bytes);
};

// topk_score =, topk_last =. A block owns a tile of queries of one head in one sequence and their histograms, a warp
// eight of them, a thread its elements of the scores' layout. A pass is the forward kernel's loop over keys up to the
// scores, whose bits are the same.
template <int G, bool Documents, bool Small>
__global__ void __launch_bounds__(TopKTiles<G, Small>::threads, TopKTiles<G, Small>::blocks_per_sm)
    attention_topk_kernel(AttentionArgs a) {
  using Tiles = TopKTiles<G, Small>;
  const int HS = int(a.HS), head = int(blockIdx.y);
  const OwnTile own = own_tile(stride_of(a, head), int(gridDim.x - 1 - blockIdx.x));
  const Positions positions = own.positions;
  const int first_query = positions.count(int(a.first_query)), queries = positions.count(int(a.T)) - first_query,
            stride = positions.stride;
  const int all_queries = int(a.T) - int(a.first_query),
            first_row_of_q = positions.at(first_query) - int(a.first_query);
  const int first_key_row = int(blockIdx.z) * int(a.T), first_row = int(blockIdx.z) * all_queries + first_row_of_q;
  if (own.tile * Tiles::queries >= queries) return;
  float* q_tile = reinterpret_cast<float*>(shared_memory);
  float* k_tile = q_tile + Tiles::queries * tile_stride<G>;
  RadixSearch* searches = reinterpret_cast<RadixSearch*>(k_tile + Tiles::keys * tile_stride<G>);
  int* histograms = reinterpret_cast<int*>(searches + Tiles::queries);

  const Thread thread = this_thread();
  const int first = own.tile * Tiles::queries, q0 = first_query + first, query = q0 + thread.row;
  const int end = first_query + min(queries, first + Tiles::queries), row = int(threadIdx.x);
  const bool owns_query = row < Tiles::queries && q0 + row < end;  // whose search it makes
  const TopK chosen = chosen_from(a, blockIdx.z, head, positions.at(q0 + row));
  load_tile<G, Tiles::queries, Tiles::threads>(q_tile, a.q + first_row * a.q_stride + head * a.HS, stride * a.q_stride,
                                               first, queries, HS);
  if (row < Tiles::queries) searches[row] = {0, owns_query ? a.topk : 0};

  const VisibleKeyTiles<Tiles::keys, Documents> tiles(a, head, first_key_row, positions, q0, end);
  bool unfinished = true;
  for (int pass = 0; unfinished; pass = next_pass(pass, a.kv_per_head * int(a.T))) {
    for (int i = row; i < Tiles::queries * histogram_stride; i += Tiles::threads) histograms[i] = 0;
    for (auto tile = tiles.first(); tiles.contains(tile); tile = tiles.after(tile)) {
      const KVRows kv = tiles.rows(tile);
      __syncthreads();  // all warps have read the tile before this one
      load_tile<G, Tiles::keys, Tiles::threads>(k_tile, kv.k, kv.k_stride, tile.k0, end, HS);
      __syncthreads();
      if (!tiles.sees_some(warp_first(q0), warp_first(q0) + warp_rows, tile.k0, tile.k0 + Tiles::keys)) continue;

      float s[rows_per_thread][Tiles::keys / half_warp];
      mul_ABt<G>(s, q_tile + thread.row * tile_stride<G>, k_tile, thread.channels(HS, q0, end));
      if (!tiles.keeps_all(warp_first(q0), warp_first(q0) + warp_rows, tile.k0, tile.k0 + Tiles::keys))
        apply_mask<false>(s, tiles.mask, query, tile.k0 + thread.lane);
      for (int i = 0; i < rows_per_thread; i++) {
        const RadixSearch search = searches[thread.row + i];
        for (int j = 0; j < Tiles::keys / half_warp; j++) {
          const int index = tile.source * int(a.T) + positions.at(tile.k0 + thread.lane + j * half_warp);
          if (s[i][j] != -INFINITY)
            count_key(histograms + (thread.row + i) * histogram_stride, search, pass, s[i][j], index);
        }
      }
    }
    __syncthreads();  // all keys are counted
    unfinished =
        owns_query && choose_digit(histograms + row * histogram_stride, searches[row], pass, chosen.score, chosen.last);
    unfinished = __syncthreads_or(unfinished);
  }
}

// ----------------------------------------------------------------------------
// Launchers

// A block for each tile of `rows` rows of each head in each sequence.
inline dim3 attention_grid(const AttentionArgs& a, int64_t heads, int64_t rows, int64_t tile_rows) {
  return dim3(unsigned(most_tiles(rows, tile_rows, a.T, a.largest_stride)), unsigned(heads), unsigned(a.B));
}

// Runs f(G, Kind), constants.
template <class F>
void for_groups_and_kind(const AttentionArgs& a, bool general, F f) {
  for_kind(a, general, [&](auto kind) { for_groups(a.HS, [&](auto groups) { f(groups, kind); }); });
}

template <int G, int Kind>
void launch_forward(const AttentionArgs& a) {
  if (a.topk > 0)
    for_tiles_that_fit(TopKTiles<G, false>::bytes, [&](auto small) {
      using Tiles = TopKTiles<G, small>;
      launch(attention_topk_kernel<G, has_documents(Kind), small>, attention_grid(a, a.NH, a.queries(), Tiles::queries),
             Tiles::threads, Tiles::bytes, a);
    });
  for_tiles_that_fit(ForwardTiles<G, Kind, false>::bytes, [&](auto small) {
    using Tiles = ForwardTiles<G, Kind, small>;
    launch(attention_forward_kernel<G, Kind, small>, attention_grid(a, a.NH, a.queries(), Tiles::queries),
           Tiles::threads, Tiles::bytes, a, score_scale(a));
  });
}

template <int G, int Kind>
void launch_backward(const AttentionArgs& a) {
  const float scale = score_scale(a);
  for_tiles_that_fit(BackwardTiles<G, Kind, false>::bytes, [&](auto small) {
    using Tiles = BackwardTiles<G, Kind, small>;
    launch(attention_dq_kernel<G, Kind, small>, attention_grid(a, a.NH, a.queries(), Tiles::rows), Tiles::threads,
           Tiles::bytes, a, scale);
    launch(attention_dkdv_kernel<G, Kind, small>, attention_grid(a, a.num_kv_heads, a.T, Tiles::rows), Tiles::threads,
           Tiles::bytes, a, scale);
    if constexpr (is_relative(Kind)) {
      const dim3 grid(unsigned(ceil_div(a.relative.distances, Tiles::rows)), unsigned(a.NH), unsigned(a.B));
      launch(attention_dr_kernel<G, has_documents(Kind), small>, grid, Tiles::threads, Tiles::bytes, a, scale);
      launch_sum_of_sequences(a);
    }
  });
}

inline void launch_attention_forward(const AttentionArgs& a) {
  for_groups_and_kind(a, is_general_forward(a), [&](auto G, auto Kind) { launch_forward<G, Kind>(a); });
}

inline void launch_attention_backward(const AttentionArgs& a) {
  for_groups_and_kind(a, is_general_backward(a), [&](auto G, auto Kind) { launch_backward<G, Kind>(a); });
}

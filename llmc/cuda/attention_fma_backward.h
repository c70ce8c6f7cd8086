// The backward pass of attention with plain FMAs, with what attention_fma.h says: a kernel for delta and dq, with a
// block per tile of queries, one for dk and dv, with a block per tile of keys, and one for r's gradient, with a block
// per tile of distances.
#pragma once
#include "attention_fma_tiles.h"
#include "attention_relative.h"

// For heads of more than 64 channels smaller than the forward pass's, because four tiles must fit: 32 rows and half as
// many warps. With relative positions half of that again, because as many rows must fit as eight tiles have: most of
// all in the kernel of the gradient of r, whose tiles of k and v are twice as large. Small tiles have half as many
// columns, and `least` ones, which still have sixteen, a single warp's rows.
template <int G, int Kind, bool Small>
struct BackwardTiles {
  static constexpr bool relative = is_relative(Kind), least = relative && Small && G == 2;
  static constexpr int rows = (relative ? 32 : 64) / G / (least ? 2 : 1),
                       columns = least ? half_warp : rows / (Small ? 2 : 1),
                       threads = rows / rows_per_thread * half_warp;
  static constexpr int blocks_per_sm = Small ? 1 : G == 1 && !relative ? 2 : 3;
  static constexpr size_t bytes =  // 87 and 72 KB, with relative positions 74 and 69 KB; small ones 50 to 61 KB
      sizeof(float) *
      ((relative ? 3 * rows + 5 * columns : 2 * (rows + columns)) * tile_stride<G> + rows * scores_stride<columns>);
  static_assert(!Small || bytes <= Gpu::least_shared_bytes);
};

// exp(s * scale - lse) for raw scores; 0 where s is -inf or lse is +inf.
__device__ inline float probability(float s, float scale, float lse) { return exp2f((s * scale - lse) * log2_e); }

// delta =, dq = or +=, relative.dq =. A block owns a tile of queries of one head in one sequence, those with the most
// keys first, and keeps their q and dout in shared memory over the loop over k and v. A warp owns eight queries, a
// thread the elements of the layouts of attention_fma_tiles.h; dq stays in registers and is written once. delta is
// summed first, straight from memory.
template <int G, int Kind, bool Small>
__global__ void __launch_bounds__(BackwardTiles<G, Kind, Small>::threads, BackwardTiles<G, Kind, Small>::blocks_per_sm)
    attention_dq_kernel(AttentionArgs a, float scale) {
  using Tiles = BackwardTiles<G, Kind, Small>;
  constexpr bool General = Kind != plain_attention, Relative = is_relative(Kind);
  const int HS = int(a.HS), head = int(blockIdx.y);
  const OwnTile own = own_tile(General ? stride_of(a, head) : 1, int(gridDim.x - 1 - blockIdx.x));
  const Positions positions = own.positions;  // everything below is in terms of these
  const int T = positions.count(int(a.T)), stride = positions.stride;
  const int q0 = first_query<General>(a, positions) + own.tile * Tiles::rows, end = min(T, q0 + Tiles::rows);
  const int first_key_row = int(blockIdx.z) * int(a.T),
            first_row = int(blockIdx.z) * int(num_queries<General>(a)) + query_row_0<General>(a, positions);
  const int64_t first_lse = (blockIdx.z * a.NH + head) * num_queries<General>(a) + query_row_0<General>(a, positions);
  const int64_t C = a.NH * a.HS, out_stride = stride * C;
  if (General && q0 >= T) return;
  const floatX *dout = a.dout + first_row * C + head * a.HS, *out = a.out + first_row * C + head * a.HS;
  const float* lse = a.lse + first_lse;
  float* delta = a.delta + first_lse;

  float* q_tile = reinterpret_cast<float*>(shared_memory);
  float* dout_tile = q_tile + Tiles::rows * tile_stride<G>;
  float* k_tile = dout_tile + Tiles::rows * tile_stride<G>;
  float* v_tile = k_tile + Tiles::columns * tile_stride<G>;
  const Thread thread = this_thread();
  float* p = v_tile + Tiles::columns * tile_stride<G> + thread.row * scores_stride<Tiles::columns>;
  float* relative_q_tile = v_tile + Tiles::columns * tile_stride<G> + Tiles::rows * scores_stride<Tiles::columns>;
  float* r_tile = relative_q_tile + Tiles::rows * tile_stride<G>;

  const int query = q0 + thread.row;
  const int channels = thread.channels(HS, q0, end);
  load_tile<G, Tiles::rows, Tiles::threads>(q_tile, a.q + first_row * a.q_stride + head * a.HS, stride * a.q_stride, q0,
                                            end, HS);
  load_tile<G, Tiles::rows, Tiles::threads>(dout_tile, dout, out_stride, q0, end, HS);
  if constexpr (Relative)
    load_tile<G, Tiles::rows, Tiles::threads>(relative_q_tile, a.relative.q + first_row * C + head * HS, out_stride, q0,
                                              end, HS);

  float row_lse[rows_per_thread], row_delta[rows_per_thread], acc[rows_per_thread][G][4] = {};
  [[maybe_unused]] float relative_acc[rows_per_thread][G][4] = {};
  for (int i = 0; i < rows_per_thread; i++) {
    const bool exists = query + i < end;
    float sum = 0;
    for (int g = 0; g < G; g++) {
      const int channel = 64 * g + thread.lane * 4;
      if (!exists || channel >= HS) continue;
      float x[4], y[4];
      load4(x, dout + (query + i) * out_stride + channel);
      load4(y, out + (query + i) * out_stride + channel);
      for (int c = 0; c < 4; c++) sum += x[c] * y[c];
    }
    row_delta[i] = warp_sum<half_warp>(sum);
    row_lse[i] = exists ? lse[(query + i) * stride] : INFINITY;
    if (thread.lane == 0 && exists) delta[(query + i) * stride] = row_delta[i];
  }

  const KeyTiles<Tiles::columns, Kind> tiles(a, head, first_key_row, positions, q0, end);
  for (auto tile = tiles.first(); tiles.contains(tile); tile = tiles.after(tile)) {
    const int k0 = tile.k0;
    const KVRows kv = tiles.rows(tile);
    __syncthreads();  // all warps have read the tiles before these
    load_tile<G, Tiles::columns, Tiles::threads>(k_tile, kv.k, kv.k_stride, k0, end, HS);
    load_tile<G, Tiles::columns, Tiles::threads>(v_tile, kv.v, kv.v_stride, k0, end, HS);
    if constexpr (Relative)
      load_distances<G, Tiles::rows + Tiles::columns, Tiles::threads>(r_tile, a, head, q0 + Tiles::rows - 1, k0);
    __syncthreads();
    if (General && !tiles.sees_some(warp_first(q0), warp_first(q0) + warp_rows, k0, k0 + Tiles::columns)) continue;

    float s[rows_per_thread][Tiles::columns / half_warp], dp[rows_per_thread][Tiles::columns / half_warp];
    mul_ABt<G>(s, q_tile + thread.row * tile_stride<G>, k_tile, channels);
    mul_ABt<G>(dp, dout_tile + thread.row * tile_stride<G>, v_tile, channels);
    if constexpr (Relative)
      add_shifted_ABt<G, false, -1, 1>(s, relative_q_tile + thread.row * tile_stride<G>,
                                       r_tile + (thread.lane - thread.row + Tiles::rows - 1) * tile_stride<G>,
                                       channels);
    if constexpr (General) {
      if (!tiles.keeps_all(warp_first(q0), warp_first(q0) + warp_rows, k0, k0 + Tiles::columns))
        apply_mask<false>(s, tiles.mask, query, k0 + thread.lane);
      if (has_topk(Kind) && a.topk > 0)
        select_topk<false>(s, chosen_from(a, blockIdx.z, head, positions.at(query)), end - query,
                           tile.source * int(a.T) + positions.at(k0 + thread.lane), stride);
    } else if (k0 + Tiles::columns > q0 + 1) {
      mask_later_keys<false>(s, query, k0 + thread.lane);
    }
    for (int i = 0; i < rows_per_thread; i++)
      for (int j = 0; j < Tiles::columns / half_warp; j++) {
        if constexpr (has_dropout(Kind))
          dp[i][j] *= dropout_factor(a, head, tile.source, positions, query + i, k0 + thread.lane + j * half_warp);
        s[i][j] = probability(s[i][j], scale, row_lse[i]) * (dp[i][j] - row_delta[i]);  // ds
      }
    mul_add_scores<G, Tiles::columns>(acc, s, p, k_tile, channels, min(Tiles::columns, end - k0));
    if constexpr (Relative) {
      __syncwarp();  // the shifted ds overwrites p, which all lanes have read
      store_shifted_scores<Tiles::columns>(p, s);
      __syncwarp();
      mul_add_AB<G, Tiles::columns>(relative_acc, p,
                                    r_tile + (Tiles::rows - rows_per_thread - thread.row) * tile_stride<G>, channels,
                                    Tiles::columns + rows_per_thread);
    }
  }
  for (auto& row : acc) scale_row(row, scale);
  store_rows<G>(a.dq + first_row * a.dq_stride + head * a.HS, stride * a.dq_stride, query, end, HS, a.dq_accumulate,
                acc);
  if constexpr (Relative) {
    for (auto& row : relative_acc) scale_row(row, scale);
    store_rows<G>(a.relative.dq + first_row * C + head * HS, out_stride, query, end, HS, /*accumulate=*/false,
                  relative_acc);
  }
}

// dk, dv = or +=. A block owns a tile of keys of one K/V head in one sequence and keeps their k and v in shared memory
// over the loop over q and dout: of every query head of the K/V head, the tiles of queries from the block's first key
// or the first query on, whichever is later. A warp owns eight keys, a thread the elements of the layouts of
// attention_fma_tiles.h, of the transposed scores too; dk and dv stay in registers and are written once.
template <int G, int Kind, bool Small>
__global__ void __launch_bounds__(BackwardTiles<G, Kind, Small>::threads, BackwardTiles<G, Kind, Small>::blocks_per_sm)
    attention_dkdv_kernel(AttentionArgs a, float scale) {
  using Tiles = BackwardTiles<G, Kind, Small>;
  constexpr bool General = Kind != plain_attention, Relative = is_relative(Kind);
  const int HS = int(a.HS);
  const KVHead& kv = a.kv_heads[blockIdx.y];
  const OwnTile own = own_tile(General ? stride_of(a, kv) : 1, int(blockIdx.x));
  const Positions positions = own.positions;  // everything below is in terms of these
  const int T = positions.count(int(a.T)), stride = positions.stride;
  const int first_row = int(blockIdx.z) * int(a.T) + positions.first;
  const int64_t first_query_row = int64_t(blockIdx.z) * num_queries<General>(a) + query_row_0<General>(a, positions);
  const int64_t out_stride = stride * a.NH * a.HS;
  if (General && own.tile * Tiles::rows >= T) return;

  float* k_tile = reinterpret_cast<float*>(shared_memory);
  float* v_tile = k_tile + Tiles::rows * tile_stride<G>;
  float* q_tile = v_tile + Tiles::rows * tile_stride<G>;
  float* dout_tile = q_tile + Tiles::columns * tile_stride<G>;
  const Thread thread = this_thread();
  float* p = dout_tile + Tiles::columns * tile_stride<G> + thread.row * scores_stride<Tiles::columns>;
  float* relative_q_tile = dout_tile + Tiles::columns * tile_stride<G> + Tiles::rows * scores_stride<Tiles::columns>;
  float* r_tile = relative_q_tile + Tiles::columns * tile_stride<G>;

  const int k0 = own.tile * Tiles::rows, key = k0 + thread.row, end = min(T, k0 + Tiles::rows);
  const int channels = thread.channels(HS, k0, end);
  load_tile<G, Tiles::rows, Tiles::threads>(k_tile, kv.k + first_row * kv.k_stride, stride * kv.k_stride, k0, end, HS);
  const int64_t v_stride = General ? kv.v_stride : kv.k_stride;
  load_tile<G, Tiles::rows, Tiles::threads>(v_tile, kv.v + first_row * v_stride, stride * v_stride, k0, end, HS);

  float dk[rows_per_thread][G][4] = {}, dv[rows_per_thread][G][4] = {};
  for (int n = 0; n < kv.num_query_heads; n++) {
    const int head = a.query_heads[kv.first_query_head + n];
    const floatX* head_q = a.q + first_query_row * a.q_stride + head * a.HS;
    const floatX* head_dout = a.dout + (first_query_row * a.NH + head) * a.HS;
    const int64_t first_lse = (blockIdx.z * a.NH + head) * num_queries<General>(a) + query_row_0<General>(a, positions);
    const auto& mask = mask_of_block<has_documents(Kind)>(a, blockIdx.z, head, positions);
    const int q_first = General ? first_query_of_keys(a, positions, k0) : k0;
    auto visible_tile = [&](int q0) {
      return General ? visible_query_tile<Tiles::columns>(mask, k0, end, q_first, q0, T) : q0;
    };
    for (int q0 = visible_tile(q_first); q0 < T; q0 = visible_tile(q0 + Tiles::columns)) {
      const int columns = min(Tiles::columns, T - q0);
      __syncthreads();  // all warps have read the tiles before these
      load_tile<G, Tiles::columns, Tiles::threads>(q_tile, head_q, stride * a.q_stride, q0, T, HS);
      load_tile<G, Tiles::columns, Tiles::threads>(dout_tile, head_dout, out_stride, q0, T, HS);
      if constexpr (Relative) {
        load_tile<G, Tiles::columns, Tiles::threads>(relative_q_tile,
                                                     a.relative.q + (first_query_row * a.NH + head) * a.HS, out_stride,
                                                     q0, T, HS);
        load_distances<G, Tiles::rows + Tiles::columns, Tiles::threads>(r_tile, a, head, q0 + Tiles::columns - 1, k0);
      }
      __syncthreads();
      if (General && !mask.sees_some(q0, q0 + Tiles::columns, warp_first(k0), warp_first(k0) + warp_rows)) continue;

      float s[rows_per_thread][Tiles::columns / half_warp], dp[rows_per_thread][Tiles::columns / half_warp];
      mul_ABt<G>(s, k_tile + thread.row * tile_stride<G>, q_tile, channels);
      mul_ABt<G>(dp, v_tile + thread.row * tile_stride<G>, dout_tile, channels);
      if constexpr (Relative)
        add_shifted_ABt<G, true, 1, -1>(s, relative_q_tile + thread.lane * tile_stride<G>,
                                        r_tile + (thread.row - thread.lane + Tiles::columns - 1) * tile_stride<G>,
                                        channels);
      if constexpr (General) {
        if (!mask.keeps_all(q0, q0 + Tiles::columns, warp_first(k0), warp_first(k0) + warp_rows))
          apply_mask<true>(s, mask, q0 + thread.lane, key);
        if (has_topk(Kind) && a.topk > 0)
          select_topk<true>(s, chosen_from(a, blockIdx.z, head, positions.at(q0 + thread.lane)), T - q0 - thread.lane,
                            first_index(a, head, int(blockIdx.y)) + positions.at(key), stride);
      } else if (k0 + Tiles::rows > q0 + 1) {
        mask_later_keys<true>(s, q0 + thread.lane, key);
      }
      for (int j = 0; j < Tiles::columns / half_warp; j++) {
        const int query = q0 + thread.lane + j * half_warp;
        const float column_lse = query < T ? a.lse[first_lse + query * stride] : INFINITY;  // p is 0 from T on
        const float column_delta = query < T ? a.delta[first_lse + query * stride] : 0.0f;
        for (int i = 0; i < rows_per_thread; i++) {
          s[i][j] = probability(s[i][j], scale, column_lse);
          if constexpr (has_dropout(Kind)) {
            const float factor =
                dropout_factor(a, head, source_of(a, head, int(blockIdx.y)), positions, query, key + i);
            dp[i][j] = s[i][j] * (dp[i][j] * factor - column_delta);
            s[i][j] *= factor;
          } else {
            dp[i][j] = s[i][j] * (dp[i][j] - column_delta);  // ds
          }
        }
      }
      mul_add_scores<G, Tiles::columns>(dv, s, p, dout_tile, channels, columns);
      __syncwarp();  // all lanes have read p, and ds may overwrite it
      mul_add_scores<G, Tiles::columns>(dk, dp, p, q_tile, channels, columns);
    }
  }
  for (auto& row : dk) scale_row(row, scale);
  store_rows<G>(kv.dk + first_row * kv.dk_stride, stride * kv.dk_stride, key, end, HS, kv.dk_accumulate, dk);
  store_rows<G>(kv.dv + first_row * kv.dv_stride, stride * kv.dv_stride, key, end, HS, kv.dv_accumulate, dv);
}

// relative.dr_of_sequences =. A block owns a tile of rows of r, which are distances, for one head in one sequence,
// those with the most pairs first, and loops over the head's K/V heads and tiles of queries with their q, q' and dout:
// the keys at the block's distances from a tile's queries are as many as the rows of both. A warp owns eight distances,
// a thread the elements of the layouts of attention_fma_tiles.h, where the rows of the scores are distances and the
// columns are queries, so that row + column says which key; the gradient stays in registers and is written once. Keys
// before position 0 do not exist and are hidden.
template <int G, bool Documents, bool Small>
__global__ void __launch_bounds__(BackwardTiles<G, relative_attention, Small>::threads,
                                  BackwardTiles<G, relative_attention, Small>::blocks_per_sm)
    attention_dr_kernel(AttentionArgs a, float scale) {
  using Tiles = BackwardTiles<G, relative_attention, Small>;
  constexpr int keys = Tiles::rows + Tiles::columns;
  const int HS = int(a.HS), T = int(a.T), distances = int(a.relative.distances), head = int(blockIdx.y);
  const int r0 = int(gridDim.x - 1 - blockIdx.x) * Tiles::rows, end = min(distances, r0 + Tiles::rows);
  const int64_t C = a.NH * a.HS, first_row = int64_t(blockIdx.z) * a.queries() - a.first_query;  // of position 0
  const int64_t first_lse = (blockIdx.z * a.NH + head) * a.queries() - a.first_query;

  float* r_tile = reinterpret_cast<float*>(shared_memory);
  float* relative_q_tile = r_tile + Tiles::rows * tile_stride<G>;
  float* q_tile = relative_q_tile + Tiles::columns * tile_stride<G>;
  float* dout_tile = q_tile + Tiles::columns * tile_stride<G>;
  float* k_tile = dout_tile + Tiles::columns * tile_stride<G>;
  float* v_tile = k_tile + keys * tile_stride<G>;
  const Thread thread = this_thread();
  float* p = v_tile + keys * tile_stride<G> + thread.row * scores_stride<Tiles::columns>;
  const int channels = thread.channels(HS, r0, end);
  load_tile<G, Tiles::rows, Tiles::threads>(r_tile, a.relative.r + head * HS, C, r0, end, HS);

  const auto& mask = mask_of_block<Documents>(a, blockIdx.z, head, {});
  const DistanceTiles<Tiles::columns> tiles(a, head, mask, distances - end);
  float acc[rows_per_thread][G][4] = {};
  for (auto tile = tiles.first(); tiles.contains(tile); tile = tiles.after(tile)) {
    const int q0 = tile.q0, q1 = min(T, q0 + Tiles::columns), k0 = q0 + r0 - (distances - 1), k1 = k0 + keys - 1;
    if (!mask.sees_some(q0, q1, k0, k1)) continue;
    const KVHead& kv = tiles.kv(tile);
    __syncthreads();  // all warps have read the tiles before these
    auto load = [&](float* to, const floatX* x, int64_t stride) {
      load_tile<G, Tiles::columns, Tiles::threads>(to, x + first_row * stride + head * HS, stride, q0, T, HS);
    };
    load(relative_q_tile, a.relative.q, C), load(q_tile, a.q, a.q_stride), load(dout_tile, a.dout, C);
    auto load_keys = [&](float* to, const floatX* x, int64_t stride) {
      load_tile<G, keys, Tiles::threads, /*BeforeRow0=*/true>(to, x + blockIdx.z * a.T * stride, stride, k0, T, HS);
    };
    load_keys(k_tile, kv.k, kv.k_stride), load_keys(v_tile, kv.v, kv.v_stride);
    __syncthreads();

    float s[rows_per_thread][Tiles::columns / half_warp], dp[rows_per_thread][Tiles::columns / half_warp] = {};
    const int key_row = thread.row + thread.lane;  // of the thread's first row and column
    mul_ABt<G>(s, r_tile + thread.row * tile_stride<G>, relative_q_tile, channels);
    add_shifted_ABt<G, true, 1, 1>(s, q_tile + thread.lane * tile_stride<G>, k_tile + key_row * tile_stride<G>,
                                   channels);
    add_shifted_ABt<G, true, 1, 1>(dp, dout_tile + thread.lane * tile_stride<G>, v_tile + key_row * tile_stride<G>,
                                   channels);
    const bool keeps_all = k0 >= 0 && mask.keeps_all(q0, q1, k0, k1);
#pragma unroll
    for (int j = 0; j < Tiles::columns / half_warp; j++) {
      const int column = thread.lane + j * half_warp, query = q0 + column;
      const float column_lse = query < T ? a.lse[first_lse + query] : INFINITY;  // p is 0 from T on
      const float column_delta = query < T ? a.delta[first_lse + query] : 0.0f;
#pragma unroll
      for (int i = 0; i < rows_per_thread; i++) {
        const int key = k0 + thread.row + i + column;
        if (!keeps_all && (key < 0 || !mask.sees(query, key))) s[i][j] = -INFINITY;
        s[i][j] = probability(s[i][j], scale, column_lse) * (dp[i][j] - column_delta);  // ds
      }
    }
    mul_add_scores<G, Tiles::columns>(acc, s, p, relative_q_tile, channels, q1 - q0);
  }
  for (auto& row : acc) scale_row(row, scale);
  store_rows<G>(a.relative.dr_of_sequences + blockIdx.z * distances * C + head * HS, C, r0 + thread.row, end, HS,
                /*accumulate=*/false, acc);
}

// Attention with plain FMAs, in fp32: for exact checks, and for training in fp32. Formulas, shapes, limits and which
// gradients are = or += are in attention.h.
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
#include <cmath>
#include <type_traits>
#include "llmc/ops/attention_args.h"
#include "attention_relative.h"
#include "attention_tiles.h"
#include "attention_topk.h"
#include "vec.h"

// ----------------------------------------------------------------------------
// Tiles and products
//
// A tile is rows of up to 64 G channels as floats in shared memory, G = 1 or 2, at a stride that is known to the
// compiler. A half-warp owns four rows of the block's tile, so a warp owns eight. Only it reads what it computes for
// them, so that the block has barriers only when it loads tiles. In a product, a thread owns of its half-warp's four
// rows
//
//   scores (4 x columns):    the columns lane, lane + 16, ...
//   results (4 x 64 G):      the channels 4 lane .. 4 lane + 3, and with G = 2 the same plus 64
//
// in registers: it reads 4 + 4 vectors of four floats for 64 FMAs, which is what keeps shared memory from being the
// bottleneck.
//
// A block takes up to 91 KB of shared memory. Each kernel has Small tiles, too, for GPUs where that is too much: on a
// T4 a block can have 64 KB.

constexpr int half_warp = warp_size / 2, rows_per_thread = 4;

// 16 bytes more than the channels: eight lanes that each read a vector of consecutive rows access all 32 banks once.
template <int G>
constexpr int tile_stride = 64 * G + 4;
// The distance between the rows of a tile of probabilities: the gap puts the two half-warps on different banks.
template <int Columns>
constexpr int scores_stride = Columns + 4;

struct Thread {
  int lane;  // in its half-warp
  int row;   // the first of its rows in the block's tile

  // How many channels the thread multiplies: none if its rows are past the end.
  __device__ int channels(int HS, int first_row, int end) const { return first_row + row < end ? HS : 0; }
};
__device__ inline Thread this_thread() {
  return {int(threadIdx.x) % half_warp, int(threadIdx.x) / half_warp * rows_per_thread};
}

// The warp's rows of the block's tile, which begins at the position `first`, begin here.
constexpr int warp_rows = 2 * rows_per_thread;
__device__ inline int warp_first(int first) { return first + int(threadIdx.x) / warp_size * warp_rows; }

// tile = rows [first, first + Rows) of one head in one sequence, whose row 0 is at src; zeros for the rows from `end`
// on, and with `BeforeRow0` for those before row 0, which are not read. Called by the whole block: neighbouring threads
// load neighbouring groups of eight channels.
template <int G, int Rows, int Threads, bool BeforeRow0 = false>
__device__ inline void load_tile(float* tile, const floatX* src, int64_t stride, int first, int end, int HS) {
  constexpr int threads_per_row = 64 * G / 8, rows_at_once = Threads / threads_per_row;
  static_assert(Rows % rows_at_once == 0, "every thread has as many rows");
  const int channel = int(threadIdx.x) % threads_per_row * 8;
  if (channel >= HS) return;
#pragma unroll
  for (int i = 0; i < Rows / rows_at_once; i++) {
    const int row = i * rows_at_once + int(threadIdx.x) / threads_per_row;
    float x[8] = {};
    if (first + row < end && (!BeforeRow0 || first + row >= 0)) load8(x, src + (first + row) * stride + channel);
    store8(tile + row * tile_stride<G> + channel, x);
  }
}

// s (4 x columns) = a b^T over HS channels. `a` points to the thread's first row, `b` to the tile's first. Here and in
// mul_add_AB a step of the loop is 64 FMAs. Longer steps would take more registers, and fewer blocks, which hide the
// latency of the loads, would fit on a multiprocessor.
template <int G, int N>
__device__ inline void mul_ABt(float (&s)[rows_per_thread][N], const float* a, const float* b, int HS) {
  b += int(threadIdx.x) % half_warp * tile_stride<G>;
  for (auto& row : s)
    for (float& x : row) x = 0;
#pragma unroll 1
  for (int channel = 0; channel < HS; channel += 4) {
    float x[rows_per_thread][4], y[N][4];
    for (int i = 0; i < rows_per_thread; i++) load4(x[i], a + i * tile_stride<G> + channel);
    for (int j = 0; j < N; j++) load4(y[j], b + j * half_warp * tile_stride<G> + channel);
    for (int i = 0; i < rows_per_thread; i++)
      for (int j = 0; j < N; j++)
        for (int c = 0; c < 4; c++) s[i][j] += x[i][c] * y[j][c];
  }
}

// s (4 x columns) += products of rows of `a` and b over HS channels that depend on how far row and column are apart, as
// products with the vectors of relative positions do. The element (i, j) gets the product of row i of `a`, or with
// OfColumns row j, and of row RowStep i + ColumnStep j of b. `a` and b point to the rows of the thread's first element.
template <int G, bool OfColumns, int RowStep, int ColumnStep, int N>
__device__ inline void add_shifted_ABt(float (&s)[rows_per_thread][N], const float* a, const float* b, int HS) {
  constexpr int rows_of_a = OfColumns ? N : rows_per_thread, a_step = OfColumns ? half_warp : 1;
#pragma unroll 1
  for (int channel = 0; channel < HS; channel += 4) {
    float x[rows_of_a][4];
    for (int r = 0; r < rows_of_a; r++) load4(x[r], a + r * a_step * tile_stride<G> + channel);
    for (int j = 0; j < N; j++)
      for (int i = 0; i < rows_per_thread; i++) {
        float y[4];
        load4(y, b + (RowStep * i + ColumnStep * j * half_warp) * tile_stride<G> + channel);
        for (int c = 0; c < 4; c++) s[i][j] += x[OfColumns ? j : i][c] * y[c];
      }
  }
}

// acc (4 x 64 G) += p b with p (4 x columns) at the thread's first row. A thread without channels does nothing. A
// thread with a first group of channels but no second computes the second from the head's last four channels, and
// store_rows drops it.
template <int G, int Columns>
__device__ inline void mul_add_AB(float (&acc)[rows_per_thread][G][4], const float* p, const float* b, int HS,
                                  int columns) {
  int channel[G];
  for (int g = 0; g < G; g++) channel[g] = min(64 * g + int(threadIdx.x) % half_warp * 4, HS - 4);
  if (int(threadIdx.x) % half_warp * 4 >= HS) return;
#pragma unroll 1
  for (int column = 0; column < columns; column += 4) {
    float x[rows_per_thread][4];
    for (int i = 0; i < rows_per_thread; i++) load4(x[i], p + i * scores_stride<Columns> + column);
    for (int c = 0; c < 4; c++)
      for (int g = 0; g < G; g++) {
        float y[4];
        load4(y, b + (column + c) * tile_stride<G> + channel[g]);
        for (int i = 0; i < rows_per_thread; i++)
          for (int k = 0; k < 4; k++) acc[i][g][k] += x[i][c] * y[k];
      }
  }
}

// Scores of keys that come after the query become -inf. Rows of s are queries and columns are keys, or `transposed`;
// `query` and `key` are the positions of the thread's first ones.
template <bool transposed, int N>
__device__ inline void mask_later_keys(float (&s)[rows_per_thread][N], int query, int key) {
  for (int i = 0; i < rows_per_thread; i++)
    for (int j = 0; j < N; j++)
      if (transposed ? key + i > query + j * half_warp : key + j * half_warp > query + i) s[i][j] = -INFINITY;
}

// Scores become what the mask makes of them, -inf where it hides the key from the query. t and j are the positions of
// the thread's first query and key.
template <bool transposed, int N, class Mask>
__device__ inline void apply_mask(float (&s)[rows_per_thread][N], const Mask& mask, int t, int j) {
  const float slope = mask.slope();
  for (int r = 0; r < rows_per_thread; r++)
    for (int n = 0; n < N; n++) {
      const int distance = t - j + (transposed ? n * half_warp - r : r - n * half_warp);
      s[r][n] = unsigned(distance) >= unsigned(mask.window) ? -INFINITY : lowered(s[r][n], slope, distance);
    }
#pragma unroll 1
  for (int c = 0; c < mask.num_clauses; c++) {
    const MaskClause& clause = mask.clauses[c];
    int row_mods[rows_per_thread];
    for (int r = 0; r < rows_per_thread; r++) row_mods[r] = ((transposed ? j : t) + r) % clause.s;
    for (int n = 0; n < N; n++) {
      const int column = n * half_warp, column_mod = ((transposed ? t : j) + column) % clause.s;
      for (int r = 0; r < rows_per_thread; r++)
        if (!(transposed ? clause.sees(t + column, j + r, column_mod, row_mods[r])
                         : clause.sees(t + r, j + column, row_mods[r], column_mod)))
          s[r][n] = -INFINITY;
    }
  }
}

// With documents scores of keys of others become -inf, too. The bound of each row, a query or a key, is loaded once.
template <bool transposed, int N>
__device__ inline void apply_mask(float (&s)[rows_per_thread][N], const DocumentMask& mask, int t, int j) {
  apply_mask<transposed>(s, static_cast<const MaskView&>(mask), t, j);
  for (int r = 0; r < rows_per_thread; r++) {
    const int bound = transposed ? mask.last_query(j + r) - t : mask.first_key(t + r) - j;
    for (int n = 0; n < N; n++)
      if (transposed ? n * half_warp > bound : n * half_warp < bound) s[r][n] = -INFINITY;
  }
}

// Scores of keys that are not among the topk of their query become -inf. `chosen` begins at the thread's first query,
// of whose tile `queries` are left from there on; `j` is the index of the thread's first key. Queries and keys are
// `stride` apart.
template <bool transposed, int N>
__device__ inline void select_topk(float (&s)[rows_per_thread][N], TopK chosen, int queries, int j, int stride) {
  for (int i = 0; i < (transposed ? N : rows_per_thread); i++) {
    const int query = transposed ? i * half_warp : i;
    if (query >= queries) continue;
    const float score = chosen.score[query * stride];
    const int last = chosen.last[query * stride];
    for (int k = 0; k < (transposed ? rows_per_thread : N); k++) {
      float& x = transposed ? s[k][i] : s[i][k];
      if (x < score || (x == score && j + (transposed ? k : k * half_warp) * stride > last)) x = -INFINITY;
    }
  }
}

// What dropout multiplies the probability of a block's positions `query` and `key` by: 0 or 1 / (1 - p).
__device__ inline float dropout_factor(const AttentionArgs<floatX>& a, int head, int source, Positions positions,
                                       int query, int key) {
  return keeps_probability(a.dropout, blockIdx.z, head, source, positions.at(query), positions.at(key))
             ? a.dropout.scale
             : 0.0f;
}

// acc (4 x 64 G) += s b. Each lane of a half-warp has some columns of the rows of the scores s. They are exchanged in
// `p`, shared memory that no lane of the warp still reads.
template <int G, int Columns, int N>
__device__ inline void mul_add_scores(float (&acc)[rows_per_thread][G][4], const float (&s)[rows_per_thread][N],
                                      float* p, const float* b, int HS, int columns) {
  static_assert(N * half_warp == Columns, "a half-warp owns whole rows");
  for (int i = 0; i < rows_per_thread; i++)
    for (int j = 0; j < N; j++) p[i * scores_stride<Columns> + j * half_warp + int(threadIdx.x) % half_warp] = s[i][j];
  __syncwarp();
  mul_add_AB<G, Columns>(acc, p, b, HS, columns);
}

// Stores scores with row i of the thread shifted by 3 - i columns and zeros around them, so that mul_add_AB over
// Columns + 4 columns multiplies the element (i, j) by row j - i + 3 of its b.
template <int Columns, int N>
__device__ inline void store_shifted_scores(float* p, const float (&s)[rows_per_thread][N]) {
  static_assert(scores_stride<Columns> == Columns + rows_per_thread, "a row has room for the zeros");
  const int lane = int(threadIdx.x) % half_warp;
  for (int i = 0; i < rows_per_thread; i++) {
    const int shift = rows_per_thread - 1 - i;
    float* row = p + i * scores_stride<Columns>;
    for (int j = 0; j < N; j++) row[j * half_warp + lane + shift] = s[i][j];
    if (lane < rows_per_thread) row[lane < shift ? lane : Columns + lane] = 0;
  }
}

// The thread's part of one row of results times `factor`.
template <int G>
__device__ inline void scale_row(float (&row)[G][4], float factor) {
  for (auto& vector : row)
    for (float& x : vector) x *= factor;
}

// The thread's rows of dst, from `first` on, = or += acc: those before `end`, and the channels below HS. dst points to
// the sequence's row 0.
template <int G, class Element>
__device__ inline void store_rows(Element* dst, int64_t stride, int first, int end, int HS, bool accumulate,
                                  const float (&acc)[rows_per_thread][G][4]) {
  for (int i = 0; i < rows_per_thread; i++)
    for (int g = 0; g < G; g++) {
      const int channel = 64 * g + int(threadIdx.x) % half_warp * 4;
      if (first + i >= end || channel >= HS) continue;
      Element* p = dst + (first + i) * stride + channel;
      float x[4] = {};
      if (accumulate) load4(x, p);
      for (int c = 0; c < 4; c++) x[c] += acc[i][g][c];
      store4(p, x);
    }
}

// ----------------------------------------------------------------------------
// Forward

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

// r_tile = the rows of r for the distances in a tile of queries and keys, which are `Rows` together: from the
// block's last query and its first key on, which are the furthest apart. The distance of query q0 + i and key k0 + j
// has row j - i + (the tile's queries) - 1.
template <int G, int Rows, int Threads>
__device__ inline void load_distances(float* r_tile, const AttentionArgs<floatX>& a, int head, int last_query, int k0) {
  load_tile<G, Rows, Threads, /*BeforeRow0=*/true>(r_tile, a.relative.r + head * a.HS, a.NH * a.HS,
                                                   relative_row(a, last_query, k0), int(a.relative.distances),
                                                   int(a.HS));
}

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
// first. A warp owns eight queries, a thread the elements of the layouts above. Maxima, sums and rows of out stay in
// registers over the whole loop over keys, so memory is read once per tile and written once. Each lane sums the
// probabilities that it computed; the sixteen sums of a row are added at the end.
template <int G, int Kind, bool Small>
__global__ void __launch_bounds__(ForwardTiles<G, Kind, Small>::threads, ForwardTiles<G, Kind, Small>::blocks_per_sm)
    attention_forward_kernel(AttentionArgs<floatX> a, float scale) {
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
  const KeyTiles<Tiles::keys, floatX, Kind> tiles(a, head, first_key_row, positions, q0, end);
  for (auto tile = tiles.first(); tiles.contains(tile); tile = tiles.after(tile)) {
    const int k0 = tile.k0;
    const KVRows<floatX> kv = tiles.rows(tile);
    __syncthreads();  // all warps have read the tiles before these
    load_tile<G, Tiles::keys, Tiles::threads>(k_tile, kv.k, kv.k_stride, k0, end, HS);
    load_tile<G, Tiles::keys, Tiles::threads>(v_tile, kv.v, kv.v_stride, k0, end, HS);
    if constexpr (Relative)
      load_distances<G, Tiles::queries + Tiles::keys, Tiles::threads>(r_tile, a, head, q0 + Tiles::queries - 1, k0);
    __syncthreads();
    if (General && tiles.hides_all(warp_first(q0), warp_rows, k0, k0 + Tiles::keys)) continue;

    float s[rows_per_thread][Tiles::keys / half_warp];
    mul_ABt<G>(s, q_tile + thread.row * tile_stride<G>, k_tile, channels);
    if constexpr (Relative)
      add_shifted_ABt<G, false, -1, 1>(s, relative_q_tile + thread.row * tile_stride<G>,
                                       r_tile + (thread.lane - thread.row + Tiles::queries - 1) * tile_stride<G>,
                                       channels);
    if constexpr (General) {
      if (tiles.changes_some(warp_first(q0), warp_rows, k0, k0 + Tiles::keys))
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
  auto store = [&](auto* out) {
    store_rows<G>(out + first_out, stride * a.NH * a.HS, query - first_query, end - first_query, HS,
                  /*accumulate=*/false, acc);
  };
  store(a.out);
  if constexpr (General && is_16_bit)
    if (a.exact_out != nullptr) store(a.exact_out);
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
    attention_topk_kernel(AttentionArgs<floatX> a) {
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

  const VisibleKeyTiles<Tiles::keys, floatX, Documents> tiles(a, head, first_key_row, positions, q0, end);
  bool unfinished = true;
  for (int pass = 0; unfinished; pass = next_pass(pass, a.kv_per_head * int(a.T))) {
    for (int i = row; i < Tiles::queries * histogram_stride; i += Tiles::threads) histograms[i] = 0;
    for (auto tile = tiles.first(); tiles.contains(tile); tile = tiles.after(tile)) {
      const KVRows<floatX> kv = tiles.rows(tile);
      __syncthreads();  // all warps have read the tile before this one
      load_tile<G, Tiles::keys, Tiles::threads>(k_tile, kv.k, kv.k_stride, tile.k0, end, HS);
      __syncthreads();
      if (tiles.hides_all(warp_first(q0), warp_rows, tile.k0, tile.k0 + Tiles::keys)) continue;

      float s[rows_per_thread][Tiles::keys / half_warp];
      mul_ABt<G>(s, q_tile + thread.row * tile_stride<G>, k_tile, thread.channels(HS, q0, end));
      if (tiles.changes_some(warp_first(q0), warp_rows, tile.k0, tile.k0 + Tiles::keys))
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
// Backward

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
// thread the elements of the layouts above; dq stays in registers and is written once. delta is summed first, straight
// from memory.
template <int G, int Kind, bool Small>
__global__ void __launch_bounds__(BackwardTiles<G, Kind, Small>::threads, BackwardTiles<G, Kind, Small>::blocks_per_sm)
    attention_dq_kernel(AttentionArgs<floatX> a, float scale) {
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

  const KeyTiles<Tiles::columns, floatX, Kind> tiles(a, head, first_key_row, positions, q0, end);
  for (auto tile = tiles.first(); tiles.contains(tile); tile = tiles.after(tile)) {
    const int k0 = tile.k0;
    const KVRows<floatX> kv = tiles.rows(tile);
    __syncthreads();  // all warps have read the tiles before these
    load_tile<G, Tiles::columns, Tiles::threads>(k_tile, kv.k, kv.k_stride, k0, end, HS);
    load_tile<G, Tiles::columns, Tiles::threads>(v_tile, kv.v, kv.v_stride, k0, end, HS);
    if constexpr (Relative)
      load_distances<G, Tiles::rows + Tiles::columns, Tiles::threads>(r_tile, a, head, q0 + Tiles::rows - 1, k0);
    __syncthreads();
    if (General && tiles.hides_all(warp_first(q0), warp_rows, k0, k0 + Tiles::columns)) continue;

    float s[rows_per_thread][Tiles::columns / half_warp], dp[rows_per_thread][Tiles::columns / half_warp];
    mul_ABt<G>(s, q_tile + thread.row * tile_stride<G>, k_tile, channels);
    mul_ABt<G>(dp, dout_tile + thread.row * tile_stride<G>, v_tile, channels);
    if constexpr (Relative)
      add_shifted_ABt<G, false, -1, 1>(s, relative_q_tile + thread.row * tile_stride<G>,
                                       r_tile + (thread.lane - thread.row + Tiles::rows - 1) * tile_stride<G>,
                                       channels);
    if constexpr (General) {
      if (tiles.changes_some(warp_first(q0), warp_rows, k0, k0 + Tiles::columns))
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
// or the first query on, whichever is later. A warp owns eight keys, a thread the elements of the layouts above, of the
// transposed scores too; dk and dv stay in registers and are written once.
template <int G, int Kind, bool Small>
__global__ void __launch_bounds__(BackwardTiles<G, Kind, Small>::threads, BackwardTiles<G, Kind, Small>::blocks_per_sm)
    attention_dkdv_kernel(AttentionArgs<floatX> a, float scale) {
  using Tiles = BackwardTiles<G, Kind, Small>;
  constexpr bool General = Kind != plain_attention, Relative = is_relative(Kind);
  const int HS = int(a.HS);
  const KVHead<floatX>& kv = a.kv_heads[blockIdx.y];
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
// a thread the elements of the layouts above, where the rows of the scores are distances and the columns are queries,
// so that row + column says which key; the gradient stays in registers and is written once. Keys before position 0 do
// not exist and are hidden.
template <int G, bool Documents, bool Small>
__global__ void __launch_bounds__(BackwardTiles<G, relative_attention, Small>::threads,
                                  BackwardTiles<G, relative_attention, Small>::blocks_per_sm)
    attention_dr_kernel(AttentionArgs<floatX> a, float scale) {
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
  const DistanceTiles<Tiles::columns, floatX> tiles(a, head, mask, distances - end);
  float acc[rows_per_thread][G][4] = {};
  for (auto tile = tiles.first(); tiles.contains(tile); tile = tiles.after(tile)) {
    const int q0 = tile.q0, q1 = min(T, q0 + Tiles::columns), k0 = q0 + r0 - (distances - 1), k1 = k0 + keys - 1;
    if (!mask.sees_some(q0, q1, k0, k1)) continue;
    const KVHead<floatX>& kv = tiles.kv(tile);
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

// ----------------------------------------------------------------------------
// Launchers

// A block for each tile of `rows` rows of each head in each sequence.
inline dim3 attention_grid(const AttentionArgs<floatX>& a, int64_t heads, int64_t rows, int64_t tile_rows) {
  return dim3(unsigned(most_tiles(rows, tile_rows, a.T, a.largest_stride)), unsigned(heads), unsigned(a.B));
}

template <int G, int Kind>
void launch_forward(const AttentionArgs<floatX>& a) {
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
void launch_backward(const AttentionArgs<floatX>& a) {
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

template <int G>
void launch_forward(const AttentionArgs<floatX>& a) {
  if (is_general_forward(a)) for_kind(a, [&](auto Kind) { launch_forward<G, Kind>(a); });
  else launch_forward<G, plain_attention>(a);
}

template <int G>
void launch_backward(const AttentionArgs<floatX>& a) {
  if (is_general_backward(a)) for_kind(a, [&](auto Kind) { launch_backward<G, Kind>(a); });
  else launch_backward<G, plain_attention>(a);
}

inline void launch_attention_forward(const AttentionArgs<floatX>& a) {
  if (a.HS <= 64) launch_forward<1>(a);
  else launch_forward<2>(a);
}

inline void launch_attention_backward(const AttentionArgs<floatX>& a) {
  if (a.HS <= 64) launch_backward<1>(a);
  else launch_backward<2>(a);
}

// What attention's kernels with plain FMAs (attention_fma.h) are written with: tiles in shared memory and their
// products; masks, the topk keys and dropout on a thread's scores.
#pragma once
#include <cmath>
#include <type_traits>
#include "llmc/ops/attention_args.h"
#include "attention_tiles.h"
#include "attention_topk.h"
#include "vec.h"

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

// f(G), a constant, for heads of HS channels.
template <class F>
void for_groups(int64_t HS, F f) {
  if (HS <= 64) f(std::integral_constant<int, 1>());
  else f(std::integral_constant<int, 2>());
}

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
__device__ inline float dropout_factor(const AttentionArgs& a, int head, int source, Positions positions, int query,
                                       int key) {
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

// r_tile = the rows of r for the distances in a tile of queries and keys, which are `Rows` together: from the
// block's last query and its first key on, which are the furthest apart. The distance of query q0 + i and key k0 + j
// has row j - i + (the tile's queries) - 1.
template <int G, int Rows, int Threads>
__device__ inline void load_distances(float* r_tile, const AttentionArgs& a, int head, int last_query, int k0) {
  load_tile<G, Rows, Threads, /*BeforeRow0=*/true>(r_tile, a.relative.r + head * a.HS, a.NH * a.HS,
                                                   relative_row(a, last_query, k0), int(a.relative.distances),
                                                   int(a.HS));
}

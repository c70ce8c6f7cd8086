// Attention on tensor cores, in bf16 (sm_80 and up) or fp16 (sm_75 and up). Formulas, shapes, limits and which
// gradients are = or += are in attention.h; the types and functions that the kernels are written with, in tile.h.
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
#include <cmath>
#include <type_traits>
#include "llmc/ops/attention_args.h"
#include "attention_tiles.h"
#include "attention_topk.h"
#include "tile.h"
#include "vec.h"

constexpr int attention_warps = 4, attention_threads = attention_warps * warp_size;

// In every grid here x is a head (a query head or a K/V head), y a sequence and z a tile of rows. z changes slowest, so
// the tiles with the most columns, which come first in z, are started first for all heads: the short ones fill the GPU
// at the end.
__device__ inline int warp_index() { return int(threadIdx.x) / warp_size; }
__device__ inline bool first_of_row() { return threadIdx.x % 4 == 0; }  // one of the four lanes that hold a row

// x, without the compiler's knowing that it stays the same in a loop: what follows from it is computed in the loop, and
// not kept in registers from before it. These kernels have none to spare.
__device__ inline int not_hoisted(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Where a loop may have had no tile: the block's own tiles, which are overwritten next, may still be under way.
__device__ inline void finish_copies() {
  commit_copies();
  wait_for_copies();
  __syncthreads();
}

// Scores of keys that a clause hides become -inf. `t` and `j`: as in apply_mask.
template <bool transposed, int M, int N>
__device__ inline void mask_by_clause(Accumulator<M, N>& s, const MaskClause& clause, int t, int j) {
  // A bit for each element, row by row, by loops: unrolled, they would be thousands of instructions.
  using Bits = std::conditional_t<4 * M * N <= 32, unsigned, uint64_t>;
  Bits seen = 0;
#pragma unroll 1
  for (int r = 0; r < 2 * M; r++) {
    const int row = (transposed ? j : t) + s.row(r / 2, r % 2 * 2), row_mod = row % clause.s;
    int column = (transposed ? t : j) + s.column(0, 0), column_mod = column % clause.s;
#pragma unroll 1
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const bool sees =
            transposed ? clause.sees(column, row, column_mod, row_mod) : clause.sees(row, column, row_mod, column_mod);
        seen = seen << 1 | Bits(sees);
        const int to_next = i == 0 ? s.column(0, 1) - s.column(0, 0) : s.column(1, 0) - s.column(0, 1);
        column += to_next, column_mod += to_next;
        while (column_mod >= clause.s) column_mod -= clause.s;
      }
  }
  mask_elements(s, [&](int m, int n, int i) {
    return !(seen >> (4 * M * N - 1 - (2 * N * (2 * m + i / 2) + 2 * n + i % 2)) & 1);
  });
}

// Scores s become what the mask makes of them, -inf where it hides the key from the query. `t` is the query of s's
// first row and `j` the key of its first column; with `transposed`, t is the first column's and j the first row's.
template <bool transposed, int M, int N, class Mask>
__device__ inline void apply_mask(Accumulator<M, N>& s, const Mask& mask, int t, int j) {
  const unsigned window = unsigned(mask.window);
  if (const float slope = mask.slope(); slope != 0)
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int row = s.row(m, i), column = s.column(n, i);
          s.x[m][n][i] = lowered(s.x[m][n][i], slope, t - j + (transposed ? column - row : row - column));
        }
  ::mask(s,
         [&](int row, int column) { return unsigned(t - j + (transposed ? column - row : row - column)) >= window; });
#pragma unroll 1
  for (int c = 0; c < mask.num_clauses; c++) mask_by_clause<transposed>(s, mask.clauses[c], t, j);
}

// With documents scores of keys of others become -inf, too. The bound of each row, a query or a key, is loaded once.
template <bool transposed, int M, int N>
__device__ inline void apply_mask(Accumulator<M, N>& s, const DocumentMask& mask, int t, int j) {
  apply_mask<transposed>(s, static_cast<const MaskView&>(mask), t, j);
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = s.row(m, 2 * h), bound = transposed ? mask.last_query(j + row) - t : mask.first_key(t + row) - j;
      for (int n = 0; n < N; n++)
        for (int i = 0; i < 2; i++)
          if (transposed ? s.column(n, i) > bound : s.column(n, i) < bound) s.x[m][n][2 * h + i] = -INFINITY;
    }
}

// Scores of keys that are not among the topk of their query become -inf. `chosen` begins at the query of s's first row
// (with `transposed`: column), and `queries` of them exist; `j` is the index of the key of its first column (row).
// Queries and keys are `stride` apart.
template <bool transposed, int M, int N>
__device__ inline void select_topk(Accumulator<M, N>& s, TopK chosen, int queries, int j, int stride) {
#pragma unroll
  for (int q = 0; q < (transposed ? 2 * N : 2 * M); q++) {
    const int query = transposed ? s.column(q / 2, q % 2) : s.row(q / 2, q % 2 * 2);
    if (query >= queries) continue;
    const float score = chosen.score[query * stride];
    const int last = chosen.last[query * stride];
#pragma unroll
    for (int k = 0; k < (transposed ? 2 * M : 2 * N); k++) {
      const int key = transposed ? s.row(k / 2, k % 2 * 2) : s.column(k / 2, k % 2);
      float& x = transposed ? s.x[k / 2][q / 2][k % 2 * 2 + q % 2] : s.x[q / 2][k / 2][q % 2 * 2 + k % 2];
      if (x < score || (x == score && j + key * stride > last)) x = -INFINITY;
    }
  }
}

// Which of 16 M x 8 N probabilities dropout keeps.
template <int M, int N>
struct KeptElements {
  // Bit 4 (N m + n) + i belongs to an accumulator's x[m][n][i].
  using Bits = std::conditional_t<4 * M * N <= 32, unsigned, uint64_t>;
  Bits bits;

  __device__ bool contains(int m, int n, int i) const { return bits >> (4 * (N * m + n) + i) & 1; }
};

// The elements kept of a head's source in sequence b. `t` and `j`, multiples of 16: as in apply_mask. A thread owns
// all eight elements of a Philox call, whose bits are moved together, or half of them where it has but 16 keys.
template <bool transposed, int M, int N>
__device__ inline KeptElements<M, N> kept_elements(const Dropout& d, int b, int head, int source, Positions positions,
                                                   int t, int j) {
  using S = Accumulator<M, N>;
  using Bits = typename KeptElements<M, N>::Bits;
  Bits kept = 0;
  if (positions.stride > 1) {  // there are no neighbours
#pragma unroll 1
    for (int e = 0; e < 4 * M * N; e++) {
      const int row = S::row(e / (4 * N), e % 4), column = S::column(e / 4 % N, e % 4);
      const int query = t + (transposed ? column : row), key = j + (transposed ? row : column);
      kept |= Bits(keeps_probability(d, b, head, source, positions.at(query), positions.at(key))) << e;
    }
    return {kept};
  }
  // The bits of the eight elements at this query and key, bit at(which query of two, which key of four).
  auto bits_of_call = [&](int query, int key, auto at) {
    const Philox bits =
        dropout_bits(d.keys[b], d.place, part_of_head(head, source), query_group(query), key_group(key));
    unsigned of_call = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) of_call |= unsigned(element_bits(bits, i) >= d.threshold) << at(i / 4, i % 4);
    return of_call;
  };
  const int first_key = j / 32 * 32;  // of a call's
  if constexpr (transposed) {
    static_assert(N % 2 == 0 && N <= 4 && M <= 2, "32 keys have 8 N bits");
#pragma unroll 1
    for (int n = 0; n < N; n += 2)
#pragma unroll 1
      for (int c = 0; c < 2; c++)
        kept |= bits_of_call(t + S::column(n, c), first_key + S::row(0, 0),
                             [](int q, int k) { return 4 * (N * (k / 2) + q) + k % 2 * 2; })
                << (4 * n + c);
    return {M == 1 && j > first_key ? kept >> 4 * N : kept};
  } else {
#pragma unroll 1
    for (int m = 0; m < M; m++) {
      uint64_t of_rows = 0;  // from first_key on
#pragma unroll 1
      for (int n = 0; first_key + 8 * n < j + 8 * N; n += 4)
#pragma unroll 1
        for (int c = 0; c < 2; c++)
          of_rows |= uint64_t(bits_of_call(t + S::row(m, 0), first_key + S::column(n, c),
                                           [](int q, int k) { return 4 * k + 2 * q; }))
                     << (4 * n + c);
      constexpr uint64_t all = (uint64_t(1) << 4 * N) - 1;
      kept |= Bits(of_rows >> (j - first_key) / 2 & all) << 4 * N * m;
    }
    return {kept};
  }
}

// Runs f(D) with D, the head size rounded up, as a constant.
template <class F>
void for_head_size(int64_t HS, F f) {
  if (HS <= 32) f(std::integral_constant<int, 32>());
  else if (HS <= 64) f(std::integral_constant<int, 64>());
  else if (HS <= 96) f(std::integral_constant<int, 96>());
  else f(std::integral_constant<int, 128>());
}

// A block for each tile of `rows` rows of each head in each sequence.
inline dim3 attention_grid(const AttentionArgs<floatX>& a, int64_t heads, int64_t rows, int64_t tile_rows) {
  return dim3(unsigned(heads), unsigned(a.B), unsigned(most_tiles(rows, tile_rows, a.T, a.largest_stride)));
}

// ----------------------------------------------------------------------------
// Forward

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
  __device__ void start_loading_q(const AttentionArgs<floatX>& a, int head, int first_row, int q0, int end) const {
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
  __device__ void start_loading_r(const AttentionArgs<floatX>& a, int head, int stage, int q0, int k0) const {
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
    if (raise_max(s)) rescale(acc, before, to_exp2);  // else all factors are 1, as for most tiles
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

  // The sums and acc, scaled by the maxima `before`, are rescaled by the maxima now.
  template <int O>
  __device__ void rescale(Accumulator<M, O>& acc, const ColumnVector<M>& before, float to_exp2) {
    rescale_sums(before, to_exp2);
    rescale_rows(acc, before, to_exp2);
  }
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
    attention_forward_kernel(AttentionArgs<floatX> a, float scale) {
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

  const KeyTiles<Tiles::keys, floatX, Kind> tiles(a, head, first_key_row, positions, first_query + q0, end);
  [[maybe_unused]] RelativeRows<Tiles, D> relative = {v_tiles.from_row(2 * Tiles::keys), {}};  // if there are any
  auto start_loading = [&](auto tile) {
    const int stage = tile.stage() * Tiles::keys;
    const KVRows<floatX> kv = tiles.rows(tile);
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
      if (tiles.hides_all(query, Tiles::warp_queries, first, first + Tiles::chunk)) continue;
      const int row = first - k0 + tile.stage() * Tiles::keys;
      [[maybe_unused]] KeptElements<M, Tiles::chunk / 8> kept;
      if constexpr (has_dropout(Kind))
        kept = kept_elements<false, M, Tiles::chunk / 8>(a.dropout, int(blockIdx.y), head, tile.source, positions,
                                                         query, first);
      Accumulator<M, Tiles::chunk / 8> s = {};
      if constexpr (Relative) s = relative.template scores<Tiles::chunk / 8>(tile.stage(), first - k0);
      if constexpr (Tiles::q_in_registers) mma_ABt(s, q_rows, k_tiles.from_row(row));
      else mma_ABt(s, warp_q, k_tiles.from_row(row));
      if (tiles.changes_some(query, Tiles::warp_queries, first, first + Tiles::chunk)) {
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

// ----------------------------------------------------------------------------
// Backward

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
    attention_dq_kernel(AttentionArgs<floatX> a, float scale) {
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
  // One number in two forms, from which nvcc makes different code: test_machine_code knows the spills.
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

  const KeyTiles<Tiles::keys, floatX, Kind> tiles(a, head, first_key_row, positions, q0, end);
  [[maybe_unused]] RelativeRows<Tiles, D> relative = {v_tiles.from_row(2 * Tiles::keys), {}};  // if there are any
  auto start_loading = [&](auto tile) {
    const int stage = tile.stage() * Tiles::keys;
    const KVRows<floatX> kv = tiles.rows(tile);
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
      if (General && tiles.hides_all(query, Tiles::warp_queries, first, first + Tiles::chunk)) continue;
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
      if (tiles.changes_some(query, Tiles::warp_queries, first, first + Tiles::chunk)) {
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
    attention_dkdv_kernel(AttentionArgs<floatX> a, float scale) {
  using Tiles = DkdvTilesOf<D, Kind, Large>;
  constexpr bool General = Kind != plain_attention, Relative = is_relative(Kind);
  constexpr int M = Tiles::M, N = Tiles::columns / 8;
  const int HS = int(a.HS), group = warp_index() / Tiles::share,
            part = Tiles::share == 1 ? 0 : warp_index() % Tiles::share;
  // Not a copy: dk, dv and their strides are loaded at the end, not kept in registers.
  const KVHead<floatX>& kv = a.kv_heads[blockIdx.x];
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

  const QueryTiles<Tiles::queries, floatX, Kind> tiles(a, kv, positions, k0, end, int(blockIdx.y));
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

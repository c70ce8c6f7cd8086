// Scores in attention's kernels on tensor cores (attention_mma.h): masks, the topk keys and dropout, on the elements
// that a thread holds of its warp's fragments (tile.h); and what the kernels' blocks have in common.
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
inline dim3 attention_grid(const AttentionArgs& a, int64_t heads, int64_t rows, int64_t tile_rows) {
  return dim3(unsigned(heads), unsigned(a.B), unsigned(most_tiles(rows, tile_rows, a.T, a.largest_stride)));
}

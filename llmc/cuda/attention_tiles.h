// Which tiles of keys, or of queries, the loops of attention's kernels go through. Plain attention has one K/V head for
// a query head, and each query sees all keys up to its own. General attention has several, and masks; tiles that a
// mask hides are neither loaded nor multiplied, nor are other documents' tiles.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>
#include "llmc/ops/attention_args.h"
#include "vec.h"

// What a kernel is compiled for, as a parameter of its template: the attention of GPT-2 and of skip-layer attention;
// general attention, which has masks, slopes, several K/V heads for a query head, v in rows of another stride, topk, in
// the forward pass sinks or exact outputs, in the backward pass keys before the first query; that with relative
// positions; either of these within documents; and general attention with dropout, without documents or within them.
constexpr int plain_attention = 0, general_attention = 1, relative_attention = 2, document_attention = 3,
              relative_document_attention = 4, dropout_attention = 5, dropout_document_attention = 6;
SLA_HOST_DEVICE constexpr bool is_relative(int kind) {
  return kind == relative_attention || kind == relative_document_attention;
}
SLA_HOST_DEVICE constexpr bool has_documents(int kind) {
  return kind == document_attention || kind == relative_document_attention || kind == dropout_document_attention;
}
SLA_HOST_DEVICE constexpr bool has_dropout(int kind) { return kind >= dropout_attention; }
SLA_HOST_DEVICE constexpr bool has_topk(int kind) { return kind == general_attention || kind == document_attention; }

// Whether attention is not plain, and whether its forward and backward passes are not: with sinks the forward pass is
// general.
inline bool is_general(const AttentionArgs& a) {
  return a.has_general_heads || a.topk > 0 || a.exact_out != nullptr || a.first_keys != nullptr ||
         a.dropout.keys != nullptr || a.relative.q != nullptr;
}
inline bool is_general_forward(const AttentionArgs& a) { return is_general(a) || a.sinks.scores != nullptr; }
inline bool is_general_backward(const AttentionArgs& a) { return is_general(a) || a.first_query > 0; }

// Runs f(Kind), a constant: plain_attention unless the pass is general.
template <class F>
void for_kind(const AttentionArgs& a, bool general, F f) {
  const bool relative = a.relative.q != nullptr, documents = a.first_keys != nullptr;
  if (!general) f(std::integral_constant<int, plain_attention>());
  else if (a.dropout.keys != nullptr && documents) f(std::integral_constant<int, dropout_document_attention>());
  else if (a.dropout.keys != nullptr) f(std::integral_constant<int, dropout_attention>());
  else if (!documents && relative) f(std::integral_constant<int, relative_attention>());
  else if (!documents) f(std::integral_constant<int, general_attention>());
  else if (relative) f(std::integral_constant<int, relative_document_attention>());
  else f(std::integral_constant<int, document_attention>());
}

constexpr float log2_e = 1.44269504f;  // exp(x) = exp2(x * log2_e), and exp2 is an instruction

// What scores are multiplied by, 1 / sqrt(HS).
inline float score_scale(const AttentionArgs& a) { return float(1 / std::sqrt(double(a.HS))); }

// The sink of a query head as a score before it is scaled; -inf if there is none.
__device__ inline float sink_of(const AttentionArgs& a, int head, float scale) {
  return a.sinks.scores != nullptr ? to_float(a.sinks.scores[head]) / scale : -INFINITY;
}

// What is added to the score of a query and a key that are `distance` positions apart: once rounded, so that each
// kernel gets the same bits.
__device__ inline float lowered(float score, float slope, int distance) { return fmaf(-slope, float(distance), score); }

// Which of a query head's K/V heads this one is.
__device__ inline int source_of(const AttentionArgs& a, int head, int kv_head) {
  int source = 0;
  while (a.kv_of_head[head * a.kv_per_head + source] != kv_head) source++;
  return source;
}

// With relative positions: the row of r of a query and a key, which are positions of a sequence. It is negative, or
// `distances` or more, where no row is theirs: a mask hides the key.
__device__ inline int relative_row(const AttentionArgs& a, int query, int key) {
  return key - query + int(a.relative.distances) - 1;
}

// ----------------------------------------------------------------------------
// Positions

// The positions that a block works on: all of a sequence, or those with one remainder by `stride`. The latter serves
// masks with a stride(): a query sees some keys of every tile of neighbouring positions, but the T / stride positions
// with one remainder see only each other, as a plain sequence does: that costs T * T / stride in place of T * T, as a
// window of w keys costs T * w. The i-th of them is position first + i * stride.
struct Positions {
  int first = 0, stride = 1;

  __device__ int at(int i) const { return first + i * stride; }
  __device__ int count(int end) const { return (end - first + stride - 1) / stride; }  // how many are below `end`
};

// Whether a mask with remainders by s is worth blocks of one remainder each: of few positions, their tiles would be
// nearly empty, and with a small s as much of a tile of neighbours is visible.
constexpr int smallest_stride = 8, fewest_positions = 16;
__device__ inline bool has_stride(int s, int64_t T) { return s >= smallest_stride && s <= T / fewest_positions; }

// The most tiles of Size rows that a head has of `rows` rows of a sequence of T, if the masks' strides are
// `largest_stride` or less.
inline int64_t most_tiles(int64_t rows, int64_t size, int64_t T, int largest_stride) {
  const int64_t stride = std::min<int64_t>(largest_stride, T / fewest_positions);
  return stride < smallest_stride ? ceil_div(rows, size) : ceil_div(rows + stride, size) + stride;
}

// By how much the positions differ that a block of a query head works on.
__device__ inline int stride_of(const AttentionArgs& a, int head) {
  const int stride = mask_of(a, head).stride();
  return has_stride(stride, a.T) ? stride : 1;
}

// By how much the positions differ that a block of a K/V head works on: stride_of its query heads if they agree,
// else 1.
__device__ inline int stride_of(const AttentionArgs& a, const KVHead& kv) {
  int stride = 0;
  for (int i = 0; i < kv.num_query_heads; i++) {
    const int of_head = stride_of(a, a.query_heads[kv.first_query_head + i]);
    if (stride > 0 && of_head != stride) return 1;
    stride = of_head;
  }
  return stride;
}

// The positions, and the tile of them, of the block-th of the blocks that share a head's rows in one sequence.
struct OwnTile {
  Positions positions;
  int tile;
};
__device__ inline OwnTile own_tile(int stride, int block) { return {{block % stride, stride}, block / stride}; }

// ----------------------------------------------------------------------------
// Masks

// A mask within documents: a query sees only keys of its own document. Positions are a block's. As the bounds do not
// fall from a position to the next, the bound of the first query, or of the last key, is the tile's. Positions after
// the sequence's last one have its bounds.
struct DocumentMask : MaskView {
  Positions positions;
  const int *first_keys, *last_queries;  // of the sequence's position 0
  int last;                              // the sequence's last position

  __device__ int first_key(int t) const { return positions.count(first_keys[min(positions.at(t), last)]); }
  __device__ int last_query(int j) const { return positions.count(last_queries[min(positions.at(j), last)] + 1) - 1; }
  __device__ bool sees(int t, int j) const { return MaskView::sees(t, j) && j >= first_key(t); }
  __device__ int next_key(int q0, int q1, int from) const {
    const int first = first_key(q0);
    return MaskView::next_key(q0, q1, from < first ? first : from);
  }
  __device__ int next_query(int k0, int k1, int from, int T) const {
    const int query = MaskView::next_query(k0, k1, from, T);
    return query <= last_query(k1 - 1) ? query : INT_MAX;
  }
  __device__ bool sees_some(int q0, int q1, int k0, int k1) const { return next_key(q0, q1, k0) < (k1 < q1 ? k1 : q1); }
  __device__ bool keeps_all(int q0, int q1, int k0, int k1) const {
    return MaskView::keeps_all(q0, q1, k0, k1) && first_key(q1 - 1) <= k0;
  }
};

// The mask of a query head in sequence b.
template <bool Documents>
__device__ inline decltype(auto) mask_of_block(const AttentionArgs& a, int64_t b, int head, Positions positions) {
  const AttentionMask& mask = mask_of(a, head, positions.stride);
  if constexpr (Documents)
    return DocumentMask{view_of(mask), positions, a.first_keys + b * a.queries() - a.first_query,
                        a.last_queries + b * a.T, int(a.T) - 1};
  else return mask;
}

// The first tile of Size keys, from the one at k0 on, that a query of [q0, q1) sees; q1 or more if there is none.
template <int Size, class Mask>
__device__ inline int visible_key_tile(const Mask& mask, int q0, int q1, int k0) {
  return mask.next_key(q0, q1, k0) / Size * Size;
}

// The first of the tiles of Size queries at `first`, first + Size, ..., from the one at q0 on, that sees a key of
// [k0, k1), where first >= k0; T or more if there is none.
template <int Size, class Mask>
__device__ inline int visible_query_tile(const Mask& mask, int k0, int k1, int first, int q0, int T) {
  return first + (mask.next_query(k0, k1, q0, T) - first) / Size * Size;
}

// ----------------------------------------------------------------------------
// Keys

// The K/V of one sequence: row t of k is at k + t * k_stride.
struct KVRows {
  const floatX *k, *v;
  int64_t k_stride, v_stride;
};

// The tiles of keys of plain attention: Size keys each, from 0 to the end of the queries [q0, q1).
template <int Size>
struct CausalKeyTiles {
  struct Tile {
    int k0;
    __device__ int stage() const { return k0 / Size % 2; }  // of a double buffer
    __device__ bool is_first() const { return k0 == 0; }
  };
  KVRows kv;
  int q1;

  // first_row: the sequence's first row in k and v.
  __device__ CausalKeyTiles(const AttentionArgs& a, int head, int first_row, Positions, int, int q1) : q1(q1) {
    const KVHead of_head = a.kv_heads[a.kv_of_head[head]];
    const int64_t stride = of_head.k_stride;  // which is v's
    kv = {of_head.k + first_row * stride, of_head.v + first_row * stride, stride, stride};
  }
  __device__ Tile first() const { return {0}; }
  __device__ Tile after(Tile tile) const { return {tile.k0 + Size}; }
  __device__ bool contains(Tile tile) const { return tile.k0 < q1; }
  __device__ KVRows rows(Tile) const { return kv; }

  // Whether one of the queries [q0, q1) sees one of the tile's keys [k0, k1); and whether the mask leaves all their
  // scores as they are.
  __device__ static bool sees_some(int, int q1, int k0, int) { return k0 < q1; }
  __device__ static bool keeps_all(int q0, int, int, int k1) { return k1 <= q0 + 1; }
};

// The tiles of keys of general attention: those that one of the queries [q0, q1) sees, of the head's first K/V head,
// then of its next.
template <int Size, bool Documents>
struct VisibleKeyTiles {
  struct Tile {
    int k0;
    int source;  // which of the query head's K/V heads
    int parity;  // 0 for the loop's first tile, 1 for its second, 0 for its third, ...
    bool first;  // whether it is the loop's first tile
    __device__ int stage() const { return parity; }
    __device__ bool is_first() const { return first; }
  };
  const KVHead* kv_heads;
  const int* sources;  // the query head's K/V heads
  int num_sources;
  int first_row;  // the row of the first position in k and v
  int stride, q0, q1;
  std::conditional_t<Documents, DocumentMask, MaskView> mask;

  __device__ VisibleKeyTiles(const AttentionArgs& a, int head, int first_row, Positions positions, int q0, int q1)
      : kv_heads(a.kv_heads), sources(a.kv_of_head + head * a.kv_per_head), num_sources(a.kv_per_head),
        first_row(first_row + positions.first), stride(positions.stride), q0(q0), q1(q1),
        mask(mask_in_registers(a, head, first_row, positions)) {}
  __device__ Tile first() const { return {visible_key_tile<Size>(mask, q0, q1, 0), 0, 0, true}; }
  __device__ Tile after(Tile tile) const {
    int k0 = tile.k0 + Size, source = tile.source;
#pragma unroll 1
    while ((k0 = visible_key_tile<Size>(mask, q0, q1, k0)) >= q1) k0 = 0, source++;
    return {k0, source, 1 - tile.parity, false};
  }
  __device__ bool contains(Tile tile) const {
    return tile.k0 < q1 && tile.source < num_sources && sources[tile.source] >= 0;
  }
  __device__ KVRows rows(Tile tile) const {
    const KVHead& kv = kv_heads[sources[tile.source]];
    return {kv.k + first_row * kv.k_stride, kv.v + first_row * kv.v_stride, stride * kv.k_stride, stride * kv.v_stride};
  }
  __device__ bool sees_some(int q0, int q1, int k0, int k1) const { return mask.sees_some(q0, q1, k0, k1); }
  __device__ bool keeps_all(int q0, int q1, int k0, int k1) const { return mask.keeps_all(q0, q1, k0, k1); }

 private:
  // first_row: the sequence's.
  __device__ static auto mask_in_registers(const AttentionArgs& a, int head, int first_row, Positions positions) {
    if constexpr (Documents) return mask_of_block<true>(a, first_row / int(a.T), head, positions);
    else return view_of(mask_of(a, head, positions.stride));
  }
};

template <int Size, int Kind>
using KeyTiles =
    std::conditional_t<Kind == plain_attention, CausalKeyTiles<Size>, VisibleKeyTiles<Size, has_documents(Kind)>>;

// ----------------------------------------------------------------------------
// Queries

// The queries of the backward pass, which leaves keys before the first query to general attention: how many rows of
// queries a sequence has.
template <bool General>
__device__ inline int64_t num_queries(const AttentionArgs& a) {
  return General ? a.queries() : a.T;
}

// The first of a block's positions that is a query.
template <bool General>
__device__ inline int first_query(const AttentionArgs& a, Positions positions) {
  return General ? positions.count(int(a.first_query)) : 0;
}

// The row of a block's position 0 in what has rows for the queries alone; negative if it is before them, so that
// pointers to it may only be added to.
template <bool General>
__device__ inline int query_row_0(const AttentionArgs& a, Positions positions) {
  return positions.first - (General ? int(a.first_query) : 0);
}

// The first query of a loop over those that may see keys from k0 on.
__device__ inline int first_query_of_keys(const AttentionArgs& a, Positions positions, int k0) {
  const int first = first_query<true>(a, positions);
  return first < k0 ? k0 : first;
}

// The tiles of queries of plain attention: for each query head of a K/V head, Size queries each, from k0 to T.
template <int Size>
struct CausalQueryTiles {
  struct Tile {
    int start;       // its first query
    int query_head;  // an index of a.query_heads
    unsigned left;   // how many tiles of the loop are left, with this one
    __device__ int stage() const { return int(left % 2); }
  };
  const AttentionArgs& a;
  const KVHead& kv;
  int k0;

  __device__ CausalQueryTiles(const AttentionArgs& a, const KVHead& kv, Positions, int k0, int, int)
      : a(a), kv(kv), k0(k0) {}
  __device__ Tile first() const {
    return {k0, kv.first_query_head, unsigned((int(a.T) - k0 + Size - 1) / Size * kv.num_query_heads)};
  }
  __device__ Tile after(Tile tile) const {
    if (tile.start + Size < int(a.T)) return {tile.start + Size, tile.query_head, tile.left - 1};
    return {k0, tile.query_head + 1, tile.left - 1};
  }
  __device__ bool contains(Tile tile) const { return tile.left > 0; }
  __device__ int head(Tile tile) const { return a.query_heads[tile.query_head]; }
  __device__ int q0(Tile tile) const { return tile.start; }
};

// The tiles of queries of general attention: for each query head of a K/V head, those that see a key of [k0, k1). They
// begin at multiples of Size after k0, or after the first query if that comes later.
template <int Size, bool Documents>
struct VisibleQueryTiles {
  struct Tile {
    int start;       // its first query
    int head_of_kv;  // which of the K/V head's query heads
    int index;       // which tile of the loop
    __device__ int stage() const { return index % 2; }
  };
  const AttentionArgs& a;
  int first_query_head, num_query_heads;
  Positions positions;
  int k0, k1, b;  // b: the sequence

  __device__ VisibleQueryTiles(const AttentionArgs& a, const KVHead& kv, Positions positions, int k0, int k1, int b)
      : a(a), first_query_head(kv.first_query_head), num_query_heads(kv.num_query_heads), positions(positions), k0(k0),
        k1(k1), b(b) {}
  __device__ Tile first() const { return from({first_query_of_keys(a, positions, k0), 0, 0}); }
  __device__ Tile after(Tile tile) const { return from({tile.start + Size, tile.head_of_kv, tile.index + 1}); }
  __device__ bool contains(Tile tile) const { return tile.head_of_kv < num_query_heads; }
  __device__ int head(Tile tile) const { return a.query_heads[first_query_head + tile.head_of_kv]; }
  __device__ int q0(Tile tile) const { return tile.start; }

 private:
  __device__ Tile from(Tile tile) const {
    const int T = positions.count(int(a.T));
    const int q_first = first_query_of_keys(a, positions, k0);
    for (; contains(tile); tile.head_of_kv++, tile.start = q_first) {
      tile.start = visible_query_tile<Size>(mask_of_block<Documents>(a, b, head(tile), positions), k0, k1, q_first,
                                            tile.start, T);
      if (tile.start < T) break;
    }
    return tile;
  }
};

template <int Size, int Kind>
using QueryTiles =
    std::conditional_t<Kind == plain_attention, CausalQueryTiles<Size>, VisibleQueryTiles<Size, has_documents(Kind)>>;

// ----------------------------------------------------------------------------
// Distances

// The tiles of queries of a block that owns distances of relative positions, from `nearest` on: for each K/V head of a
// query head, Size queries each, from the first one that has a key so far away to T.
template <int Size>
struct DistanceTiles {
  struct Tile {
    int q0;      // its first query
    int source;  // which of the query head's K/V heads
    int parity;  // 0 for the loop's first tile, 1 for its second, 0 for its third, ...
    __device__ int stage() const { return parity; }
  };
  const KVHead* kv_heads;
  const int* sources;  // the query head's K/V heads
  int num_sources;
  int first_query, T;

  template <class Mask>
  __device__ DistanceTiles(const AttentionArgs& a, int head, const Mask& mask, int nearest)
      : kv_heads(a.kv_heads), sources(a.kv_of_head + head * a.kv_per_head), num_sources(a.kv_per_head),
        first_query(max(int(a.first_query), nearest)), T(nearest < mask.window ? int(a.T) : 0) {}
  __device__ Tile first() const { return {first_query, 0, 0}; }
  __device__ Tile after(Tile tile) const {
    if (tile.q0 + Size < T) return {tile.q0 + Size, tile.source, 1 - tile.parity};
    return {first_query, tile.source + 1, 1 - tile.parity};
  }
  __device__ bool contains(Tile tile) const {
    return tile.q0 < T && tile.source < num_sources && sources[tile.source] >= 0;
  }
  __device__ const KVHead& kv(Tile tile) const { return kv_heads[sources[tile.source]]; }
};

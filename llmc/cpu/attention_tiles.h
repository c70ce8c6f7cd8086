// What attention on the CPU is made of: a head's queries, tiles of the keys that they see, and tiles of scores.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>
#include "llmc/ops/attention_args.h"
#include "llmc/ops/precision.h"
#include "gemm.h"
#include "vec.h"

// Tile sizes of the CPU kernels: a score tile of 64 x 256 floats stays in a core's L2 beside its rows of k and v, and
// oneDNN's sgemm runs such tiles near its full rate (measured: 180 to 220 of 223 GFLOP/s). In bf16 products take half
// as long, and starting one does not: with twice the queries attention takes 5 % (T 256) to 13 % (T 2,048) less. Each
// thread keeps up to three tiles, 64 KB each in fp32, 192 KB in bf16, whatever the model's size.
constexpr int64_t query_block = is_bf16 ? 128 : 64, key_block = 256;

constexpr float infinity = std::numeric_limits<float>::infinity();

// The positions first, first + stride, ... of a query head in one sequence, numbered from 0. The stride is 1, unless
// the mask's stride() is larger: then the positions of each remainder by it are a sequence of their own, with rows
// `stride` apart.
struct HeadPositions {
  const AttentionArgs& a;
  int64_t b, head, first, stride;
  KeyRows keys;
  int64_t queries, length;  // the last `queries` positions of the sequence are queries; `length` positions are numbered
  const AttentionMask& mask;  // in which a position is its number

  HeadPositions(const AttentionArgs& a, int64_t b, int64_t head, int64_t first)
      : a(a), b(b), head(head), first(first), stride(stride_of(a, head)), keys(key_rows_of(a, b)), queries(a.queries()),
        length((keys.T - first + stride - 1) / stride), mask(mask_of(a, head, stride)) {}
  static int64_t stride_of(const AttentionArgs& a, int64_t head) {
    return std::min<int64_t>(mask_of(a, head).stride(), a.T);
  }
  int64_t position(int64_t i) const { return first + i * stride; }
  int64_t first_query() const { return keys.T - queries; }
  // The number of the first position that is a query; `length` or more if there is none.
  int64_t first_query_number() const { return std::max<int64_t>((first_query() - first + stride - 1) / stride, 0); }
  // Rows of q, out and their gradients; places in lse, topk_score and topk_last; rows of k, v and their gradients.
  int64_t query_row(int64_t i) const { return b * queries + position(i) - first_query(); }
  int64_t statistic(int64_t i) const { return (b * a.NH + head) * queries + position(i) - first_query(); }
  int64_t key_row(int64_t i) const { return keys.first_row + position(i); }
  // The first key of a query's document.
  int64_t first_key(int64_t i) const {
    return a.first_keys == nullptr ? 0 : (a.first_keys[query_row(i)] - first + stride - 1) / stride;
  }
};

// Runs f(begin, end) for each document's part of the queries [q0, q1).
template <class F>
void for_each_document(const HeadPositions& at, int64_t q0, int64_t q1, F f) {
  for (int64_t begin = q0, end; begin < q1; begin = end) {
    end = at.a.first_keys == nullptr ? q1 : begin + 1;
    while (end < q1 && at.first_key(end) <= begin) end++;
    f(begin, end);
  }
}

// Some of the keys that queries of a block see, in one of the query head's K/V heads.
struct KeyTile {
  int source, kv_head;                  // it is the query head's K/V head number `source`, and a.kv_heads[kv_head]
  int64_t keys, first;                  // how many, at most key_block, and the number of the first
  const int* numbers;                   // (keys): of each; null if they are first, first + 1, ...
  const int* remainders[most_clauses];  // (keys), for each clause of the mask: the number of each key modulo its s

  bool is_contiguous() const { return numbers == nullptr || numbers[keys - 1] - numbers[0] == keys - 1; }
};

// The keys that some query of a block sees, by a mask whose keys are not neighbours. `remainders`: the keys' remainders
// by the s of each clause.
struct SelectedKeys {
  std::vector<int> numbers, remainders[most_clauses];

  // Selects among the keys from `from` on.
  void select(const AttentionMask& mask, int q0, int q1, int from) {
    SeenKeys seen[most_clauses];
    int mods[most_clauses];
    const int first = std::max(mask.first_key(q0), from);
    for (int c = 0; c < mask.num_clauses; c++) {
      seen[c] = mask.clauses[c].seen_by(q0, q1), mods[c] = first % seen[c].s;
      remainders[c].resize(size_t(q1 - first));
    }
    numbers.resize(size_t(q1 - first));
    int keys = 0;
    for (int j = first; j < q1; j++) {
      bool is_seen = true;
      numbers[keys] = j;
      for (int c = 0; c < mask.num_clauses; c++) {
        is_seen = is_seen && seen[c].includes(j, mods[c]);
        remainders[c][keys] = mods[c];
        mods[c] = mods[c] + 1 < seen[c].s ? mods[c] + 1 : 0;
      }
      keys += is_seen;
    }
    numbers.resize(size_t(keys));
  }
};

// The tiles of the keys that the queries [q0, q1), all of one document, see, ascending by K/V head and position. They
// are valid until the thread's next call.
inline const std::vector<KeyTile>& key_tiles(const HeadPositions& at, int64_t q0, int64_t q1) {
  thread_local std::vector<KeyTile> tiles;
  thread_local SelectedKeys selected;
  const bool is_interval = at.mask.is_interval();
  const int from = int(at.first_key(q0));
  const int64_t first = is_interval ? at.mask.next_key(int(q0), int(q1), from) : 0;
  if (!is_interval) selected.select(at.mask, int(q0), int(q1), from);
  const int64_t keys = is_interval ? q1 - first : int64_t(selected.numbers.size());
  tiles.clear();
  for (int source = 0; source < at.a.kv_per_head; source++) {
    const int kv_head = at.a.kv_of_head[at.head * at.a.kv_per_head + source];
    if (kv_head < 0) break;
    for (int64_t i = 0; i < keys; i += key_block) {
      KeyTile tile = {source, kv_head, std::min(key_block, keys - i), first + i, nullptr, {}};
      if (!is_interval) {
        tile.first = selected.numbers[i], tile.numbers = &selected.numbers[i];
        for (int c = 0; c < at.mask.num_clauses; c++) tile.remainders[c] = &selected.remainders[c][i];
      }
      tiles.push_back(tile);
    }
  }
  return tiles;
}

template <class Element>
struct Rows {
  Element* data;
  int64_t stride;
};

// The tile's rows of x, which is k or v: where they are if they are neighbours, else copied.
inline Rows<const floatX> key_rows(const HeadPositions& at, const KeyTile& tile, const floatX* x, int64_t stride,
                                   std::vector<floatX>& copies) {
  if (tile.is_contiguous()) return {x + at.key_row(tile.first) * stride, at.stride * stride};
  const int64_t HS = at.a.HS;
  copies.resize(size_t(key_block * HS));
  for (int64_t i = 0; i < tile.keys; i++)
    memcpy(&copies[i * HS], x + at.key_row(tile.numbers[i]) * stride, size_t(HS) * sizeof(floatX));
  return {copies.data(), HS};
}

// The tile's rows of dx, which is dk or dv, += weights^T x, of weights (rows, key_block) and x (rows, HS).
inline void add_to_key_gradients(const HeadPositions& at, const KeyTile& tile, float* dx, int64_t stride,
                                 const floatX* weights, const Rows<const floatX>& x, int64_t rows) {
  const int64_t HS = at.a.HS;
  if (tile.is_contiguous()) {
    gemm('T', 'N', tile.keys, HS, rows, 1.0f, weights, key_block, x.data, x.stride, true,
         dx + at.key_row(tile.first) * stride, at.stride * stride);
    return;
  }
  thread_local std::vector<float> sums;
  sums.resize(size_t(key_block * HS));
  gemm('T', 'N', tile.keys, HS, rows, 1.0f, weights, key_block, x.data, x.stride, false, sums.data(), HS);
  for (int64_t i = 0; i < tile.keys; i++) {
    float* row = dx + at.key_row(tile.numbers[i]) * stride;
#pragma omp simd
    for (int64_t j = 0; j < HS; j++) row[j] += sums[i * HS + j];
  }
}

// A tile of scores, probabilities or their gradients (query_block, key_block). `operand` is the tile as the next matmul
// reads it: rounded, in memory of its own, if Element is not float.
template <class Element>
struct ScoreTile {
  static constexpr bool is_rounded = !std::is_same_v<Element, float>;
  std::vector<float> values = std::vector<float>(query_block * key_block);
  std::vector<Element> rounded = std::vector<Element>(is_rounded ? query_block * key_block : 0);

  float* row(int64_t r) { return values.data() + r * key_block; }
  Element* operand(int64_t r = 0) {
    if constexpr (is_rounded) return rounded.data() + r * key_block;
    else return row(r);
  }
};

// Where a block's rows of x (HS) are summed up in fp32: in x itself if it is float, else in `memory` until store_sums
// rounds them.
inline Rows<float> sums_of(const Rows<float>& x, std::vector<float>&, int64_t) { return x; }
inline Rows<float> sums_of(const Rows<bfloat16>&, std::vector<float>& memory, int64_t HS) {
  memory.resize(size_t(query_block * HS));
  return {memory.data(), HS};
}

// x (rows, HS) = or += factor sums; nothing where they are in x.
inline void store_sums(const Rows<float>&, const Rows<float>&, int64_t, int64_t, float, bool) {}
inline void store_sums(const Rows<bfloat16>& x, const Rows<float>& sums, int64_t rows, int64_t HS, float factor,
                       bool accumulate) {
  for (int64_t r = 0; r < rows; r++) {
    bfloat16* row = x.data + r * x.stride;
    const float* sum = sums.data + r * sums.stride;
#pragma omp simd
    for (int64_t i = 0; i < HS; i++) from_float(row[i], (accumulate ? to_float(row[i]) : 0.0f) + factor * sum[i]);
  }
}

inline float score_scale(const AttentionArgs& a) { return 1.0f / std::sqrt(float(a.HS)); }

// The factor of the sums of ds k and ds^T q that is not in ds: all of 1 / sqrt(HS) where ds is rounded, so that a head
// size whose root is no power of two costs no second rounding.
inline float score_gradient_scale(const AttentionArgs& a) { return is_bf16 ? score_scale(a) : 1.0f; }

// Attention without a T*T buffer, in the manner of FlashAttention-2 (Dao 2023): blocks of queries against tiles of the
// keys that they see with an online softmax, so that memory is linear in T. k and v are read where they were projected;
// of a tile whose keys are not neighbours they are copied. Shapes and strides: llmc/ops/attention_args.h; any head size
// and stride will do.
//
//   attention_forward:  out =, lse =, topk_score =, topk_last =
//   attention_backward: delta =, dq = or +=, dk and dv of each K/V head = or +=; dq and dr of relative positions =
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>
#include "llmc/ops/attention_args.h"
#include "few_rows.h"
#include "gemm.h"
#include "llmc/ops/precision.h"
#include "llmc/ops/rows.h"
#include "threads.h"
#include "vec.h"

template <class Element>
void check_kv_head(const KVHead<Element>&) {}  // any strides will do

// A thread owns a query head. Where a K/V head has several, or where dk and dv are bf16, which would round each
// addition, it leaves a partial sum of them in the scratch memory.
inline bool has_partial_sums(int64_t query_heads) { return has_master_weights || query_heads > 1; }
inline int64_t attention_backward_scratch(int64_t B, int64_t T, int64_t HS, int64_t partial_sums) {
  return 2 * B * T * HS * partial_sums;
}
inline int64_t attention_partials(int64_t, int64_t, int64_t, int64_t, int64_t) { return 0; }
inline bool takes_sequences(int64_t, int) { return true; }

// Tile sizes of the CPU kernels: a score tile of 64 x 256 floats stays in a core's L2 beside its rows of k and v, and
// oneDNN's sgemm runs such tiles near its full rate (measured: 180 to 220 of 223 GFLOP/s). In bf16 products take half
// as long, and starting one does not: with twice the queries attention takes 5 % (T 256) to 13 % (T 2,048) less. Each
// thread keeps one or two tiles, 64 KB each in fp32, 192 KB in bf16, whatever the model's size.
constexpr int64_t query_block = has_master_weights ? 128 : 64, key_block = 256;

constexpr float infinity = std::numeric_limits<float>::infinity();

// ----------------------------------------------------------------------------
// Queries, and tiles of the keys that they see

// The positions first, first + step, ... of a query head in one sequence, numbered from 0. The step is 1, unless the
// mask's step() is larger: then the positions of each remainder by it are a sequence of their own, with rows `step`
// apart.
struct HeadPositions {
  const AttentionArgs<floatX>& a;
  int64_t b, head, first, step;
  KeyRows keys;
  int64_t queries, length;  // the last `queries` positions of the sequence are queries; `length` positions are numbered
  const AttentionMask& mask;  // in which a position is its number

  HeadPositions(const AttentionArgs<floatX>& a, int64_t b, int64_t head, int64_t first)
      : a(a), b(b), head(head), first(first), step(step_of(a, head)), keys(key_rows_of(a, b)), queries(a.queries()),
        length((keys.T - first + step - 1) / step), mask(mask_of(a, head, step)) {}
  static int64_t step_of(const AttentionArgs<floatX>& a, int64_t head) {
    return std::min<int64_t>(mask_of(a, head).step(), a.T);
  }
  int64_t position(int64_t i) const { return first + i * step; }
  int64_t first_query() const { return keys.T - queries; }
  // The number of the first position that is a query; `length` or more if there is none.
  int64_t first_query_number() const { return std::max<int64_t>((first_query() - first + step - 1) / step, 0); }
  // Rows of q, out and their gradients; places in lse, topk_score and topk_last; rows of k, v and their gradients.
  int64_t query_row(int64_t i) const { return b * queries + position(i) - first_query(); }
  int64_t statistic(int64_t i) const { return (b * a.NH + head) * queries + position(i) - first_query(); }
  int64_t key_row(int64_t i) const { return keys.first_row + position(i); }
};

// Some of the keys that queries of a block see, in one of the query head's K/V heads.
struct KeyTile {
  int source, kv_head;                  // it is the query head's K/V head number `source`, and a.kv_heads[kv_head]
  int64_t keys, first;                  // how many, at most key_block, and the number of the first
  const int* numbers;                   // (keys): of each; null if they are first, first + 1, ...
  const int* remainders[most_clauses];  // (keys), for each clause of the mask: the number of each key modulo its s

  bool is_contiguous() const { return numbers == nullptr || numbers[keys - 1] - numbers[0] == keys - 1; }
};

// The keys that some query of a block sees, by a mask whose keys are not neighbours. `remainders` are those of the keys
// by the s of each clause.
struct SelectedKeys {
  std::vector<int> numbers, remainders[most_clauses];

  void select(const AttentionMask& mask, int q0, int q1) {
    SeenKeys seen[most_clauses];
    int mods[most_clauses];
    const int first = mask.first_key(q0);
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

// The tiles of the keys that the queries [q0, q1) see, ascending by K/V head and position. They are valid until the
// thread's next call.
inline const std::vector<KeyTile>& key_tiles(const HeadPositions& at, int64_t q0, int64_t q1) {
  thread_local std::vector<KeyTile> tiles;
  thread_local SelectedKeys selected;
  const bool is_interval = at.mask.is_interval();
  const int64_t first = is_interval ? at.mask.next_key(int(q0), int(q1), 0) : 0;
  if (!is_interval) selected.select(at.mask, int(q0), int(q1));
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
  if (tile.is_contiguous()) return {x + at.key_row(tile.first) * stride, at.step * stride};
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
    gemm('T', 'N', tile.keys, HS, rows, 1.0f, weights, key_block, x.data, x.stride, 1.0f,
         dx + at.key_row(tile.first) * stride, at.step * stride);
    return;
  }
  thread_local std::vector<float> sums;
  sums.resize(size_t(key_block * HS));
  gemm('T', 'N', tile.keys, HS, rows, 1.0f, weights, key_block, x.data, x.stride, 0.0f, sums.data(), HS);
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

inline float score_scale(const AttentionArgs<floatX>& a) { return 1.0f / std::sqrt(float(a.HS)); }

// Whether attention is that of a few queries, for which a matmul of so few rows takes longer than reading k and v.
inline bool has_few_queries(const AttentionArgs<floatX>& a) { return a.queries() <= most_few_queries; }

// How many rows ahead k and v are prefetched. The rows of a head are far apart, with those of other heads between them.
constexpr int64_t prefetch_rows = 16;

// products (rows, stride), of them the first `columns`, = scale q x^T; q (rows, HS) is of few queries, x (columns, HS).
inline void multiply_few_queries(const Rows<const floatX>& q, const Rows<const floatX>& x, int64_t rows,
                                 int64_t columns, int64_t HS, float scale, const Rows<float>& products) {
  thread_local std::vector<float> query;
  query.resize(size_t(HS));
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t i = 0; i < HS; i++) query[i] = to_float(q.data[r * q.stride + i]);
    for (int64_t j = 0; j < columns; j++)
      products.data[r * products.stride + j] = scale * dot_product(query.data(), x.data + j * x.stride, HS,
                                                                   size_t(prefetch_rows * x.stride) * sizeof(floatX));
  }
}

// products (rows, stride), of them the first `columns`, = scale q x^T, of the block's queries q (rows, HS) and
// x (columns, HS).
inline void multiply_queries(const AttentionArgs<floatX>& a, const Rows<const floatX>& q, const Rows<const floatX>& x,
                             int64_t rows, int64_t columns, float scale, const Rows<float>& products) {
  if (has_few_queries(a)) return multiply_few_queries(q, x, rows, columns, a.HS, scale, products);
  gemm('N', 'T', rows, columns, a.HS, scale, q.data, q.stride, x.data, x.stride, 0.0f, products.data, products.stride);
}

// ----------------------------------------------------------------------------
// Relative positions

// The rows of r for some queries and the keys of a tile. That of the first key and the last query is row `first`, which
// may be negative; those that exist are [begin, end). The row of query q and key j, as numbers in the block and in the
// tile, is first + j + (queries - 1 - q).
struct DistanceRows {
  int64_t first, begin, end;

  int64_t count() const { return end - begin; }
};
inline DistanceRows distance_rows(const HeadPositions& at, const KeyTile& tile, int64_t q0, int64_t rows) {
  const int64_t distances = at.a.relative.distances, first = tile.first - (q0 + rows - 1) + distances - 1;
  const DistanceRows found = {first, std::max<int64_t>(first, 0), std::min(first + tile.keys + rows - 1, distances)};
  CHECK(at.step == 1 && tile.numbers == nullptr && found.begin < found.end);
  return found;
}

// The head's part of a row of r, of its gradient, of q' or of that one's gradient.
template <class Element>
Rows<Element> head_rows(const HeadPositions& at, Element* x, int64_t row) {
  const int64_t C = at.a.NH * at.a.HS;
  return {x + row * C + at.head * at.a.HS, C};
}

// Products of a block's queries and rows of r, or gradients of them (query_block, query_block + key_block): column i
// belongs to the row DistanceRows::first + i.
constexpr int64_t distance_block = query_block + key_block;

// scores (rows, key_block) += q' r^T, scaled, of the queries from q0 on and a tile's keys. Keys that are hidden may
// have anything added.
inline void add_relative_scores(const HeadPositions& at, const KeyTile& tile, int64_t q0, int64_t rows, float* scores) {
  thread_local std::vector<float> products(query_block * distance_block);
  const AttentionArgs<floatX>& a = at.a;
  const DistanceRows distances = distance_rows(at, tile, q0, rows);
  const Rows<const floatX> q = head_rows(at, a.relative.q, at.query_row(q0)),
                           r = head_rows(at, a.relative.r, distances.begin);
  float* existing = products.data() + distances.begin - distances.first;
  multiply_queries(a, q, r, rows, distances.count(), score_scale(a), {existing, distance_block});
  for (int64_t i = 0; i < rows; i++) {
    const int64_t shift = distances.first + rows - 1 - i;  // the row of r of the tile's first key
    const int64_t begin = std::max<int64_t>(0, distances.begin - shift),
                  end = std::min(tile.keys, distances.end - shift);
    const float* products_of_row = products.data() + i * distance_block + rows - 1 - i;
    float* scores_of_row = scores + i * key_block;
#pragma omp simd
    for (int64_t j = begin; j < end; j++) scores_of_row[j] += products_of_row[j];
  }
}

// From the gradients of a tile's scores, dscores (rows, key_block), which are 0 for keys that are hidden: dq (rows, HS)
// = or +=, that of q', and the rows of dr of the head +=.
inline void relative_backward(const HeadPositions& at, const KeyTile& tile, int64_t q0, int64_t rows,
                              const floatX* dscores, const Rows<float>& dq, bool accumulate) {
  thread_local std::vector<floatX> dproducts(query_block * distance_block);
  const AttentionArgs<floatX>& a = at.a;
  const DistanceRows distances = distance_rows(at, tile, q0, rows);
  const int64_t columns = rows - 1 + tile.keys;
  for (int64_t i = 0; i < rows; i++) {
    floatX* row = dproducts.data() + i * distance_block;
    const int64_t first = rows - 1 - i;
    std::fill(row, row + first, floatX(0.0f));
    std::copy_n(dscores + i * key_block, tile.keys, row + first);
    std::fill(row + first + tile.keys, row + columns, floatX(0.0f));
  }
  const Rows<const floatX> q = head_rows(at, a.relative.q, at.query_row(q0)),
                           r = head_rows(at, a.relative.r, distances.begin);
  const Rows<float> dr = head_rows(at, a.relative.dr_of_sequences, at.b * a.relative.distances + distances.begin);
  const floatX* existing = dproducts.data() + distances.begin - distances.first;
  gemm('N', 'N', rows, a.HS, distances.count(), existing, distance_block, r.data, r.stride, accumulate, dq.data,
       dq.stride);
  gemm('T', 'N', distances.count(), a.HS, rows, 1.0f, existing, distance_block, q.data, q.stride, 1.0f, dr.data,
       dr.stride);
}

// ----------------------------------------------------------------------------
// Scores

// Scores (rows, key_block) of the queries from q0 on and a tile's keys: the same bits whenever it is called. They are
// scaled, but for topk, where scores that are equal must stay equal.
inline void compute_scores(const HeadPositions& at, const KeyTile& tile, int64_t q0, int64_t rows,
                           const Rows<const floatX>& k, float* scores) {
  const AttentionArgs<floatX>& a = at.a;
  const Rows<const floatX> q = {a.q + at.query_row(q0) * a.q_stride + at.head * a.HS, at.step * a.q_stride};
  multiply_queries(a, q, k, rows, tile.keys, a.topk > 0 ? 1.0f : score_scale(a), {scores, key_block});
  if (a.relative.q != nullptr) add_relative_scores(at, tile, q0, rows, scores);
}

struct KeyRange {
  int64_t begin, end;
};

// The range of a tile's keys that query t may see. Scores (keys) of this range become -inf where the mask hides the
// key.
inline KeyRange mask_scores(const HeadPositions& at, const KeyTile& tile, int64_t t, float* scores) {
  const int q0 = int(t), q1 = q0 + 1;
  if (tile.numbers == nullptr) {
    const int64_t begin = at.mask.next_key(q0, q1, 0) - tile.first, end = q1 - tile.first;
    return {std::min(std::max<int64_t>(begin, 0), tile.keys), std::min(std::max<int64_t>(end, 0), tile.keys)};
  }
  const int first = at.mask.first_key(q0), *numbers = tile.numbers;
  for (int c = 0; c < at.mask.num_clauses; c++) {
    const SeenKeys seen = at.mask.clauses[c].seen_by(q0, q1);
    const int* remainders = tile.remainders[c];
#pragma omp simd
    for (int64_t i = 0; i < tile.keys; i++) {
      const int j = numbers[i];
      scores[i] = first <= j && j < q1 && seen.includes(j, remainders[i]) ? scores[i] : -infinity;
    }
  }
  return {0, tile.keys};
}

// The place of a tile's key among all keys of the query head, as topk_last counts.
inline int key_index(const HeadPositions& at, const KeyTile& tile, int64_t j) {
  return int(at.a.T * tile.source + at.position(tile.numbers == nullptr ? tile.first + j : tile.numbers[j]));
}

// With topk, scores of keys that are not among the topk of query t become -inf. The other scores are scaled, which
// compute_scores leaves undone for topk. NaN is kept, so that it reaches the loss. Without topk it does nothing.
inline void select_topk(const HeadPositions& at, const KeyTile& tile, int64_t t, const KeyRange& keys, float* scores) {
  if (at.a.topk == 0) return;
  const float lowest = at.a.topk_score[at.statistic(t)], scale = score_scale(at.a);
  const int last = at.a.topk_last[at.statistic(t)];
  auto select = [=](float score, int index) {
    return score < lowest || (score == lowest && index > last) ? -infinity : score * scale;
  };
  if (tile.numbers != nullptr) {
    for (int64_t j = keys.begin; j < keys.end; j++) scores[j] = select(scores[j], key_index(at, tile, j));
    return;
  }
  const int first = key_index(at, tile, 0), step = int(at.step);
#pragma omp simd
  for (int j = int(keys.begin); j < int(keys.end); j++) scores[j] = select(scores[j], first + j * step);
}

// ----------------------------------------------------------------------------
// Forward

// The highest scores of one query, from keys that come in order. Of equal scores the first are taken.
struct HighestScores {
  // The highest so far, and others that have come since the last call of drop_others, in their order. NaN, which has no
  // order, is infinity.
  std::vector<float> scores;
  std::vector<int> indices;
  int64_t keys = 0;
  float lowest = -infinity;  // the lowest wanted score, and the last key that has it; once there are more than wanted
  int last = std::numeric_limits<int>::max();

  void clear() { keys = 0, lowest = HighestScores().lowest, last = HighestScores().last; }

  // The keys [begin, end) of a tile. Those that are no higher than the lowest wanted score come too late.
  void add(const HeadPositions& at, const KeyTile& tile, const KeyRange& seen, const float* of_tile) {
    int places[key_block + 16];
    const float* x = of_tile + seen.begin;
    const int64_t count = places_above(x, seen.end - seen.begin, lowest, places);
    if (int64_t(scores.size()) < keys + count) scores.resize(size_t(keys + count)), indices.resize(scores.size());
    float* scores_to = scores.data() + keys;
    int* indices_to = indices.data() + keys;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) scores_to[i] = std::isnan(x[places[i]]) ? infinity : x[places[i]];
    if (tile.numbers == nullptr) {
      const int first = key_index(at, tile, seen.begin), step = int(at.step);
#pragma omp simd
      for (int64_t i = 0; i < count; i++) indices_to[i] = first + step * places[i];
    } else {
      for (int64_t i = 0; i < count; i++) indices_to[i] = key_index(at, tile, seen.begin + places[i]);
    }
    keys += count;
  }

  // Keeps the `wanted` highest, if there are more.
  void drop_others(int64_t wanted) {
    if (keys <= wanted) return;
    thread_local std::vector<int> places;
    places.resize(size_t(keys + 15));
    const float below = just_below(wanted);
    int64_t reach = places_above(scores.data(), keys, below, places.data());
    float least = infinity;
#pragma omp simd reduction(min : least)
    for (int64_t i = 0; i < reach; i++) least = std::min(least, scores[places[i]]);
    lowest = least;
    for (int64_t i = reach; reach > wanted;) {  // of equal ones the first are kept
      if (scores[places[--i]] == lowest) places.erase(places.begin() + i), reach--;
    }
    for (int64_t i = 0; i < wanted; i++) scores[i] = scores[places[i]], indices[i] = indices[places[i]];
    keys = wanted;
    int64_t i = wanted - 1;
    while (scores[i] != lowest) i--;
    last = indices[i];
  }

 private:
  // A number that the `wanted` highest scores are above, and of the others only those that are equal to the lowest of
  // them. It is found bit by bit, from the highest one on: vector instructions count the scores that reach a number.
  float just_below(int64_t wanted) const {
    thread_local std::vector<uint32_t> ranks;
    ranks.resize(size_t(keys));
    uint32_t *const rank = ranks.data(), ones = 0, zeros = 0;
#pragma omp simd reduction(| : ones, zeros)
    for (int64_t i = 0; i < keys; i++) rank[i] = rank_of(scores[i]), ones |= rank[i], zeros |= ~rank[i];
    const uint32_t differing = ones & zeros;  // bits that are not the same in all
    uint32_t threshold = rank[0] & ~differing;
    for (uint32_t bit = uint32_t(1) << 31; bit > 0; bit >>= 1) {
      if ((differing & bit) == 0) continue;
      const uint32_t higher = (threshold & ~(bit - 1)) | bit;
      int reach = 0;
#pragma omp simd reduction(+ : reach)
      for (int64_t i = 0; i < keys; i++) reach += rank[i] >= higher;
      if (reach < wanted) continue;
      threshold |= bit;
      if (reach == wanted) break;
    }
    return std::nextafter(float_of_rank(threshold), -infinity);
  }
};

// The highest scores of each of the queries [q0, q1), valid until the thread's next call; topk_score =, topk_last =.
// They are -inf and the largest int for queries that see no more than `topk` keys. NaN ranks as the highest score.
// `tiles`: those of the queries' keys.
inline const std::vector<HighestScores>& find_topk(const HeadPositions& at, int64_t q0, int64_t q1,
                                                   const std::vector<KeyTile>& tiles) {
  thread_local std::vector<float> score_tile(query_block * key_block);
  thread_local std::vector<floatX> copies;
  thread_local std::vector<HighestScores> highest(query_block);
  const AttentionArgs<floatX>& a = at.a;
  for (HighestScores& of_query : highest) of_query.clear();
  for (const KeyTile& tile : tiles) {
    const KVHead<floatX>& kv = a.kv_heads[tile.kv_head];
    compute_scores(at, tile, q0, q1 - q0, key_rows(at, tile, kv.k, kv.k_stride, copies), score_tile.data());
    for (int64_t r = 0; r < q1 - q0; r++) {
      float* scores = score_tile.data() + r * key_block;
      const KeyRange seen = mask_scores(at, tile, q0 + r, scores);
      HighestScores& of_query = highest[r];
      of_query.add(at, tile, seen, scores);
      if (of_query.keys > 2 * a.topk) of_query.drop_others(a.topk);
    }
  }
  for (int64_t r = 0; r < q1 - q0; r++) {
    highest[r].drop_others(a.topk);
    a.topk_score[at.statistic(q0 + r)] = highest[r].lowest;
    a.topk_last[at.statistic(q0 + r)] = highest[r].last;
  }
  return highest;
}

// The online softmax of one query: the maximum of its scores so far, and the sum of exp(score - max).
struct RowSoftmax {
  float max = -infinity, sum = 0;

  // No key yet: exp(-inf - 0) is 0, exp(-inf + inf) would be NaN.
  float shift() const { return max == -infinity ? 0.0f : max; }
  // The log of the sum of the exponentials of the scores; -inf of none.
  float lse() const { return sum == 0 ? -infinity : max + std::log(sum); }

  // Goes on with `keys` scores: p = exp(scores - max), rounded; p may be scores. Returns the factor that what was
  // summed up with the maximum so far has with the new one.
  template <class Element>
  float update(const float* scores, Element* p, int64_t keys) {
    float largest = max, added = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t j = 0; j < keys; j++) largest = scores[j] > largest ? scores[j] : largest;
    const float before = max;
    max = largest;
    const float base = shift(), rescale = vec_exp(before - base);
#pragma omp simd reduction(+ : added)
    for (int64_t j = 0; j < keys; j++) {
      const float e = vec_exp(scores[j] - base);
      from_float(p[j], e);
      added += e;
    }
    sum = added + sum * rescale;
    return rescale;
  }
};

// For a tile of probabilities exp(scores - shift), rounded as they are the operand of a matmul: the operand becomes
// what rounding has left.
inline void keep_rounding_errors(ScoreTile<floatX>& tile, const RowSoftmax* softmax, int64_t rows, int64_t keys) {
  for (int64_t r = 0; r < rows; r++) {
    const float *scores = tile.row(r), shift = softmax[r].shift();
    floatX* p = tile.operand(r);
#pragma omp simd
    for (int64_t j = 0; j < keys; j++) {
      const float rounded = to_float(p[j]), error = vec_exp(scores[j] - shift) - rounded;
      from_float(p[j], rounded == 0 ? 0.0f : error);  // of hidden keys it is 0, and so it stays
    }
  }
}

// sum (HS) = or += the sum of weights[j] times row(j) (HS), for each j < rows.
template <class Element, class Row>
void add_weighted_rows(float* sum, const Element* weights, const Row& row, int64_t rows, int64_t HS, bool accumulate) {
  constexpr int64_t width = 64;  // channels whose sums stay in registers
  for (int64_t first = 0; first < HS; first += width) {
    float sums[width] = {};
    const int64_t n = std::min(width, HS - first);
    for (int64_t j = 0; j < rows; j++) {
      const floatX *x = row(j) + first, *later = row(std::min(j + prefetch_rows, rows - 1)) + first;
      for (size_t line = 0; line < size_t(n) * sizeof(floatX); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(later) + line);
      const float weight = to_float(weights[j]);
#pragma omp simd
      for (int64_t i = 0; i < n; i++) sums[i] += weight * to_float(x[i]);
    }
    for (int64_t i = 0; i < n; i++) sum[first + i] = (accumulate ? sum[first + i] : 0.0f) + sums[i];
  }
}

// sums (rows, HS) = or += p v, of p (rows, key_block) and a tile's v (keys, HS).
inline void add_values(const Rows<float>& sums, const floatX* p, const Rows<const floatX>& v, int64_t rows,
                       int64_t keys, int64_t HS, bool few_queries, bool accumulate) {
  if (!few_queries)
    return gemm('N', 'N', rows, HS, keys, p, key_block, v.data, v.stride, accumulate, sums.data, sums.stride);
  for (int64_t r = 0; r < rows; r++)
    add_weighted_rows(
        sums.data + r * sums.stride, p + r * key_block, [=](int64_t j) { return v.data + j * v.stride; }, keys, HS,
        accumulate);
}

// Whether topk leaves so few keys of those in `tiles` that what follows the choice is computed for each of them alone:
// a pair of a query and a key costs several times as much as in matmuls.
inline bool is_sparse(const HeadPositions& at, const std::vector<KeyTile>& tiles) {
  constexpr int64_t least_keys = 8;  // for each that is chosen
  int64_t keys = 0;
  for (const KeyTile& tile : tiles) keys += tile.keys;
  return at.a.topk > 0 && at.a.relative.q == nullptr && keys > least_keys * at.a.topk;
}

// sum (HS) = softmax(scores) v, unrounded, of the keys that topk has chosen for query t; lse =.
inline void attend_to_topk(const HeadPositions& at, int64_t t, const HighestScores& chosen, float* sum) {
  thread_local std::vector<float> p;
  thread_local std::vector<const floatX*> rows;
  const AttentionArgs<floatX>& a = at.a;
  const float scale = score_scale(a);
  p.resize(size_t(chosen.keys)), rows.resize(size_t(chosen.keys));
  int64_t source = 0;
  for (int64_t i = 0; i < chosen.keys; i++) {
    while (chosen.indices[i] >= (source + 1) * a.T) source++;
    const KVHead<floatX>& kv = a.kv_heads[a.kv_of_head[at.head * a.kv_per_head + source]];
    rows[i] = kv.v + (at.keys.first_row + chosen.indices[i] - source * a.T) * kv.v_stride;
    p[i] = chosen.scores[i] * scale;
  }
  RowSoftmax softmax;
  softmax.update(p.data(), p.data(), chosen.keys);
  a.lse[at.statistic(t)] = softmax.sum == 0 ? infinity : softmax.lse();
  const float inverse = softmax.sum == 0 ? 0.0f : 1.0f / softmax.sum;
  for (float& weight : p) weight *= inverse;
  add_weighted_rows(
      sum, p.data(), [](int64_t i) { return rows[i]; }, chosen.keys, a.HS, /*accumulate=*/false);
}

// out =, exact_out = of a block's queries, whose rows of a.out are `out`.
inline void store_out(const HeadPositions& at, const Rows<floatX>& out, const Rows<float>& sums, int64_t rows) {
  const AttentionArgs<floatX>& a = at.a;
  store_sums(out, sums, rows, a.HS, 1.0f, /*accumulate=*/false);
  if (!has_master_weights || a.exact_out == nullptr) return;
  for (int64_t r = 0; r < rows; r++)
    std::copy_n(sums.data + r * sums.stride, a.HS, a.exact_out + (out.data - a.out) + r * out.stride);
}

// out =, exact_out =, lse = of the queries [q0, q1), from the keys that topk has chosen for each.
inline void topk_forward_block(const HeadPositions& at, int64_t q0, int64_t q1,
                               const std::vector<HighestScores>& chosen) {
  thread_local std::vector<float> out_sums;
  const AttentionArgs<floatX>& a = at.a;
  const int64_t C = a.NH * a.HS;
  const Rows<floatX> out = {a.out + at.query_row(q0) * C + at.head * a.HS, at.step * C};
  const Rows<float> sums = sums_of(out, out_sums, a.HS);
  for (int64_t t = q0; t < q1; t++) attend_to_topk(at, t, chosen[t - q0], sums.data + (t - q0) * sums.stride);
  store_out(at, out, sums, q1 - q0);
}

// out =, exact_out =, lse = of the queries [q0, q1).
inline void attention_forward_block(const HeadPositions& at, int64_t q0, int64_t q1) {
  thread_local ScoreTile<floatX> tile_of_scores;
  thread_local std::vector<floatX> k_copies, v_copies;
  thread_local std::vector<float> out_sums;
  RowSoftmax softmax[query_block];
  const AttentionArgs<floatX>& a = at.a;
  const int64_t rows = q1 - q0, HS = a.HS, first = at.query_row(q0) * a.NH * HS + at.head * HS;
  const Rows<floatX> out = {a.out + first, at.step * a.NH * HS};
  const Rows<float> sums = sums_of(out, out_sums, HS);
  bool is_first = true;
  for (const KeyTile& tile : key_tiles(at, q0, q1)) {
    const KVHead<floatX>& kv = a.kv_heads[tile.kv_head];
    compute_scores(at, tile, q0, rows, key_rows(at, tile, kv.k, kv.k_stride, k_copies), tile_of_scores.row(0));
    for (int64_t r = 0; r < rows; r++) {
      float *scores = tile_of_scores.row(r), *o = sums.data + r * sums.stride;
      floatX* p = tile_of_scores.operand(r);
      const KeyRange keys = mask_scores(at, tile, q0 + r, scores);
      select_topk(at, tile, q0 + r, keys, scores);
      const float rescale = softmax[r].update(scores + keys.begin, p + keys.begin, keys.end - keys.begin);
      std::fill(p, p + keys.begin, floatX(0.0f));
      std::fill(p + keys.end, p + tile.keys, floatX(0.0f));
      if (is_first) continue;
#pragma omp simd
      for (int64_t i = 0; i < HS; i++) o[i] *= rescale;
    }
    const Rows<const floatX> v = key_rows(at, tile, kv.v, kv.v_stride, v_copies);
    auto add = [&](bool accumulate) {
      add_values(sums, tile_of_scores.operand(), v, rows, tile.keys, HS, has_few_queries(a), accumulate);
    };
    add(!is_first);
    is_first = false;
    if (has_master_weights && a.exact_out != nullptr) {
      keep_rounding_errors(tile_of_scores, softmax, rows, tile.keys);
      add(true);
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    float *o = sums.data + r * sums.stride, *lse = a.lse + at.statistic(q0 + r);
    if (softmax[r].sum == 0) {  // it sees no key
      std::fill(o, o + HS, 0.0f);
      *lse = infinity;
      continue;
    }
    const float inverse = 1.0f / softmax[r].sum;
#pragma omp simd
    for (int64_t i = 0; i < HS; i++) o[i] *= inverse;
    *lse = softmax[r].lse();
  }
  store_out(at, out, sums, rows);
}

// out = softmax(q k^T / sqrt(HS) + mask) v over the keys of all K/V heads of a query head; lse =. A thread owns a block
// of queries of one head in one sequence; blocks with the most keys are started first.
inline void attention_forward(const AttentionArgs<floatX>& a) {
  // The keys and values that few queries read. A head's rows are far from each other: a byte takes four times as long
  // as in sequence.
  const int64_t bytes = has_few_queries(a) ? 4 * 2 * int64_t(sizeof(floatX)) * a.B * a.NH * a.HS * a.T : 0;
  int64_t units = 0;  // the most blocks that a head has
  for (int64_t head = 0; head < a.NH; head++) {
    const int64_t step = HeadPositions::step_of(a, head);
    units = std::max(units, step * (((a.T + step - 1) / step + query_block - 1) / query_block));
  }
#pragma omp parallel for schedule(dynamic, 1) if (is_worth_threads(bytes, 2 * a.B * a.NH * a.HS * a.T * a.queries()))
  for (int64_t task = 0; task < units * a.B * a.NH; task++) {
    const int64_t head = task % a.NH, unit = units - 1 - task / (a.B * a.NH), step = HeadPositions::step_of(a, head);
    const HeadPositions at(a, task / a.NH % a.B, head, unit % step);
    const int64_t block = unit / step, q0 = std::max(at.first_query_number(), block * query_block),
                  q1 = std::min(at.length, (block + 1) * query_block);
    if (q0 >= q1) continue;
    if (a.topk > 0) {
      const std::vector<KeyTile>& tiles = key_tiles(at, q0, q1);
      const std::vector<HighestScores>& chosen = find_topk(at, q0, q1, tiles);
      if (is_sparse(at, tiles)) {
        topk_forward_block(at, q0, q1, chosen);
        continue;
      }
    }
    attention_forward_block(at, q0, q1);
  }
}

// ----------------------------------------------------------------------------
// Backward

// Where a query head adds to the gradients of one of its K/V heads: dk and dv themselves, or partial sums of them. Rows
// (b, t).
struct KeyGradients {
  float *dk, *dv;
  int64_t dk_stride, dv_stride;
};

// The factor of the sums of ds k and ds^T q that is not in ds: all of 1 / sqrt(HS) where ds is rounded, so that a head
// size whose root is no power of two costs no second rounding.
inline float score_gradient_scale(const AttentionArgs<floatX>& a) { return has_master_weights ? score_scale(a) : 1.0f; }

// One row of a tile: of `scores` (visible), which are scaled, p = exp(scores - lse), and of `dp` (visible), which is
// dout v^T, ds = p (dp - delta) factor. If Element is float, p may be scores and ds may be dp.
template <class Element>
inline void attention_score_gradients(Element* p, Element* ds, const float* scores, const float* dp, int64_t visible,
                                      float lse, float delta, float factor) {
#pragma omp simd
  for (int64_t j = 0; j < visible; j++) {
    const float probability = vec_exp(scores[j] - lse), gradient = dp[j];
    from_float(p[j], probability);
    from_float(ds[j], probability * (gradient - delta) * factor);
  }
}

// x (rows, HS) in fp32, in `memory`.
inline Rows<const float> rows_as_floats(const Rows<const floatX>& x, int64_t rows, int64_t HS,
                                        std::vector<float>& memory) {
  memory.resize(size_t(rows * HS));
  for (int64_t r = 0; r < rows; r++) {
#pragma omp simd
    for (int64_t i = 0; i < HS; i++) memory[r * HS + i] = to_float(x.data[r * x.stride + i]);
  }
  return {memory.data(), HS};
}

// What topk_backward reads of one query, and where it adds to: q, dout and dq (HS).
struct TopkQuery {
  const float *q, *dout;
  float *dq, lse, delta, factor;  // factor: of ds
};

// Of query t and the keys of a tile that topk has chosen for it: dq, dk and dv +=. scores (keys): as compute_scores
// computes them, and mask_scores leaves them.
inline void topk_backward(const HeadPositions& at, const KeyTile& tile, int64_t t, const KeyRange& keys,
                          const float* scores, const TopkQuery& query, const Rows<const floatX>& k,
                          const Rows<const floatX>& v, const KeyGradients& to) {
  int places[key_block + 16];
  float p[key_block], ds[key_block];
  const AttentionArgs<floatX>& a = at.a;
  const int64_t HS = a.HS;
  const float lowest = a.topk_score[at.statistic(t)], scale = score_scale(a);
  const int last = a.topk_last[at.statistic(t)];
  const int64_t reach =
      places_above(scores + keys.begin, keys.end - keys.begin, std::nextafter(lowest, -infinity), places);
  auto row_of = [&](int64_t j) { return at.key_row(tile.numbers == nullptr ? tile.first + j : tile.numbers[j]); };
  auto prefetch = [HS](const auto* row) {
    for (int64_t i = 0; i < HS; i += int64_t(64 / sizeof *row)) __builtin_prefetch(row + i);
  };
  int64_t chosen = 0;
  for (int64_t i = 0; i < reach; i++) {
    const int64_t j = keys.begin + places[i], row = row_of(j);
    if (scores[j] == lowest && key_index(at, tile, j) > last) continue;
    prefetch(v.data + j * v.stride), prefetch(to.dk + row * to.dk_stride), prefetch(to.dv + row * to.dv_stride);
    places[chosen] = int(j), p[chosen++] = scores[j] * scale;
  }
  for (int64_t i = 0; i < chosen; i++) ds[i] = dot_product(query.dout, v.data + places[i] * v.stride, HS, 0);
  attention_score_gradients(p, ds, p, ds, chosen, query.lse, query.delta, query.factor);
  for (int64_t i = 0; i < chosen; i++) {
    const int64_t row = row_of(places[i]);
    float *dk = to.dk + row * to.dk_stride, *dv = to.dv + row * to.dv_stride;
#pragma omp simd
    for (int64_t c = 0; c < HS; c++) dv[c] += p[i] * query.dout[c], dk[c] += ds[i] * query.q[c];
  }
  add_weighted_rows(
      query.dq, ds, [&](int64_t i) { return k.data + places[i] * k.stride; }, chosen, HS,
      /*accumulate=*/true);
}

// The queries [q0, q1): delta =, dq = or +=, dk and dv +=. With p = exp(s - lse): dv += p^T dout; dp = dout v^T;
// ds = p (dp - delta) / sqrt(HS); dq += ds k; dk += ds^T q. `gradients`: of each K/V head of the query head.
inline void attention_backward_block(const HeadPositions& at, const KeyGradients* gradients, int64_t q0, int64_t q1) {
  thread_local ScoreTile<floatX> probabilities, dscores;
  thread_local std::vector<floatX> k_copies, v_copies;
  thread_local std::vector<float> dq_sums, relative_dq_sums, floats_of_q, floats_of_dout;
  const AttentionArgs<floatX>& a = at.a;
  const int64_t rows = q1 - q0, HS = a.HS, C = a.NH * HS, row = at.query_row(q0), column = at.head * HS;
  const Rows<const floatX> q = {a.q + row * a.q_stride + column, at.step * a.q_stride},
                           dout = {a.dout + row * C + column, at.step * C};
  const floatX* out = a.out + row * C + column;
  const float* lse = a.lse + at.statistic(q0);
  float* delta = a.delta + at.statistic(q0);
  const Rows<floatX> dq = {a.dq + row * a.dq_stride + column, at.step * a.dq_stride};
  const Rows<float> sums = sums_of(dq, dq_sums, HS);
  const bool is_relative = a.relative.q != nullptr;
  const Rows<floatX> relative_dq = head_rows(at, a.relative.dq, is_relative ? row : 0);
  const Rows<float> relative_sums = sums_of(relative_dq, relative_dq_sums, HS);
  const float scale = score_scale(a) / score_gradient_scale(a);
  for (int64_t r = 0; r < rows; r++) {
    const floatX *dout_row = dout.data + r * dout.stride, *out_row = out + r * dout.stride;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < HS; i++) sum += to_float(dout_row[i]) * to_float(out_row[i]);
    delta[r * at.step] = sum;
  }
  bool has_sums = !has_master_weights && a.dq_accumulate, has_relative_sums = false;
  const std::vector<KeyTile>& tiles = key_tiles(at, q0, q1);
  const bool sparse = is_sparse(at, tiles);
  const Rows<const float> q_floats = rows_as_floats(q, sparse ? rows : 0, HS, floats_of_q),
                          dout_floats = rows_as_floats(dout, sparse ? rows : 0, HS, floats_of_dout);
  if (sparse && !has_sums) {
    for (int64_t r = 0; r < rows; r++) std::fill_n(sums.data + r * sums.stride, HS, 0.0f);
    has_sums = true;
  }
  for (const KeyTile& tile : tiles) {
    const KVHead<floatX>& kv = a.kv_heads[tile.kv_head];
    const Rows<const floatX> k = key_rows(at, tile, kv.k, kv.k_stride, k_copies),
                             v = key_rows(at, tile, kv.v, kv.v_stride, v_copies);
    compute_scores(at, tile, q0, rows, k, probabilities.row(0));
    if (sparse) {
      for (int64_t r = 0; r < rows; r++) {
        float* scores = probabilities.row(r);
        const KeyRange keys = mask_scores(at, tile, q0 + r, scores);
        topk_backward(at, tile, q0 + r, keys, scores,
                      {q_floats.data + r * HS, dout_floats.data + r * HS, sums.data + r * sums.stride, lse[r * at.step],
                       delta[r * at.step], scale},
                      k, v, gradients[tile.source]);
      }
      continue;
    }
    gemm('N', 'T', rows, tile.keys, HS, dout.data, dout.stride, v.data, v.stride, false, dscores.row(0), key_block);
    for (int64_t r = 0; r < rows; r++) {
      float *scores = probabilities.row(r), *dp = dscores.row(r);
      floatX *p = probabilities.operand(r), *ds = dscores.operand(r);
      const KeyRange keys = mask_scores(at, tile, q0 + r, scores);
      select_topk(at, tile, q0 + r, keys, scores);
      attention_score_gradients(p + keys.begin, ds + keys.begin, scores + keys.begin, dp + keys.begin,
                                keys.end - keys.begin, lse[r * at.step], delta[r * at.step], scale);
      for (floatX* x : {p, ds}) {
        std::fill(x, x + keys.begin, floatX(0.0f));
        std::fill(x + keys.end, x + tile.keys, floatX(0.0f));
      }
    }
    const KeyGradients& to = gradients[tile.source];
    add_to_key_gradients(at, tile, to.dv, to.dv_stride, probabilities.operand(), dout, rows);
    add_to_key_gradients(at, tile, to.dk, to.dk_stride, dscores.operand(), q, rows);
    gemm('N', 'N', rows, HS, tile.keys, dscores.operand(), key_block, k.data, k.stride, has_sums, sums.data,
         sums.stride);
    has_sums = true;
    if (!is_relative) continue;
    relative_backward(at, tile, q0, rows, dscores.operand(), relative_sums, has_relative_sums);
    has_relative_sums = true;
  }
  if (!has_sums)  // they see no key
    for (int64_t r = 0; r < rows; r++) std::fill_n(sums.data + r * sums.stride, HS, 0.0f);
  store_sums(dq, sums, rows, HS, score_gradient_scale(a), a.dq_accumulate);
  if (is_relative) store_sums(relative_dq, relative_sums, rows, HS, score_gradient_scale(a), /*accumulate=*/false);
}

// For each query head of each K/V head, in the order of a.query_heads: its place in the scratch memory; -1 if it adds
// to dk and dv themselves.
inline std::vector<int> partial_sum_indices(const AttentionArgs<floatX>& a) {
  std::vector<int> partials;
  int n = 0;
  for (int i = 0; i < a.num_kv_heads; i++) {
    CHECK(a.kv_heads[i].first_query_head == int(partials.size()));
    for (int r = 0; r < a.kv_heads[i].num_query_heads; r++)
      partials.push_back(has_partial_sums(a.kv_heads[i].num_query_heads) ? n++ : -1);
  }
  CHECK(n == 0 || a.scratch != nullptr);
  return partials;
}
inline KeyGradients partial_sum(const AttentionArgs<floatX>& a, int partial) {
  float* dk = a.scratch + 2 * a.B * a.T * a.HS * partial;
  return {dk, dk + a.HS, 2 * a.HS, 2 * a.HS};
}

// Where a query head adds to the gradients of its K/V head: to the partial sum number `partial`; if that is -1, to dk
// and dv.
template <class Element>
KeyGradients key_gradients(const AttentionArgs<Element>& a, const KVHead<Element>& kv, int partial) {
  if constexpr (std::is_same_v<Element, float>)
    if (partial < 0) return {kv.dk, kv.dv, kv.dk_stride, kv.dv_stride};
  return partial_sum(a, partial);
}

// The rows of sequence b in x, which has `rows` rows (HS) of each sequence, `stride` apart, become 0.
inline void clear_rows(float* x, int64_t stride, int64_t b, int64_t rows, int64_t HS) {
  for (int64_t row = b * rows; row < (b + 1) * rows; row++) std::fill_n(x + row * stride, HS, 0.0f);
}

// The backward pass of one query head in sequence b: delta =, dq = or +=, and its part of dk and dv.
inline void attention_backward_head(const AttentionArgs<floatX>& a, int64_t b, int64_t head,
                                    const std::vector<int>& partials) {
  std::vector<KeyGradients> gradients;
  for (int source = 0; source < a.kv_per_head; source++) {
    const int n = a.kv_of_head[head * a.kv_per_head + source];
    if (n < 0) break;
    const KVHead<floatX>& kv = a.kv_heads[n];
    const int* query_heads = a.query_heads + kv.first_query_head;
    const int partial = partials[std::find(query_heads, query_heads + kv.num_query_heads, int(head)) - a.query_heads];
    const KeyGradients to = key_gradients(a, kv, partial);
    if (partial >= 0 || !kv.dk_accumulate) clear_rows(to.dk, to.dk_stride, b, a.T, a.HS);
    if (partial >= 0 || !kv.dv_accumulate) clear_rows(to.dv, to.dv_stride, b, a.T, a.HS);
    gradients.push_back(to);
  }
  if (a.relative.q != nullptr)
    clear_rows(a.relative.dr_of_sequences + head * a.HS, a.NH * a.HS, b, a.relative.distances, a.HS);
  for (int64_t first = 0; first < HeadPositions::step_of(a, head); first++) {
    const HeadPositions at(a, b, head, first);
    for (int64_t q0 = at.first_query_number(); q0 < at.length; q0 += query_block)
      attention_backward_block(at, gradients.data(), q0, std::min(at.length, q0 + query_block));
  }
}

// A K/V head's dk and dv = or += the sum of its query heads' partial sums, in their order.
inline void add_partial_sums(const AttentionArgs<floatX>& a, const KVHead<floatX>& kv, const std::vector<int>& partials,
                             int64_t row) {
  floatX *dk = kv.dk + row * kv.dk_stride, *dv = kv.dv + row * kv.dv_stride;
  thread_local std::vector<float> sums;  // (2, HS): dk, dv
  sums.assign(size_t(2 * a.HS), 0.0f);
  if (kv.dk_accumulate) std::transform(dk, dk + a.HS, sums.begin(), [](floatX x) { return to_float(x); });
  if (kv.dv_accumulate) std::transform(dv, dv + a.HS, sums.begin() + a.HS, [](floatX x) { return to_float(x); });
  const float dk_scale = score_gradient_scale(a);
  for (int r = 0; r < kv.num_query_heads; r++) {
    const float* partial = partial_sum(a, partials[kv.first_query_head + r]).dk + row * 2 * a.HS;  // dk, dv
#pragma omp simd
    for (int64_t i = 0; i < a.HS; i++) sums[i] += dk_scale * partial[i], sums[a.HS + i] += partial[a.HS + i];
  }
#pragma omp simd
  for (int64_t i = 0; i < a.HS; i++) from_float(dk[i], sums[i]), from_float(dv[i], sums[a.HS + i]);
}

// dr (distances, NH * HS) = the sum of the sequences' parts, in their order.
inline void sum_distance_gradients(const AttentionArgs<floatX>& a) {
  const int64_t C = a.NH * a.HS, D = a.relative.distances;
  const float scale = score_gradient_scale(a);
#pragma omp parallel for schedule(static) if (is_worth_threads(int64_t(sizeof(float)) * (a.B + 1) * D * C))
  for (int64_t row = 0; row < D; row++) {
    thread_local std::vector<float> sums;
    sums.assign(size_t(C), 0.0f);
    for (int64_t b = 0; b < a.B; b++) {
      const float* part = a.relative.dr_of_sequences + (b * D + row) * C;
#pragma omp simd
      for (int64_t c = 0; c < C; c++) sums[c] += part[c];
    }
    for (int64_t c = 0; c < C; c++) from_float(a.relative.dr[row * C + c], scale * sums[c]);
  }
}

// delta =; dq, dk and dv = or += as the arguments say. A thread owns a query head of one sequence, and its partial sums
// of dk and dv, so no two threads write to the same address, and the order of the sums does not depend on the number of
// threads.
inline void attention_backward(const AttentionArgs<floatX>& a) {
  CHECK(a.sequences == nullptr);
  const std::vector<int> partials = partial_sum_indices(a);
#pragma omp parallel for schedule(dynamic, 1) if (is_worth_threads(0, 5 * a.B * a.NH * a.HS * a.T * a.queries()))
  for (int64_t task = 0; task < a.B * a.NH; task++) attention_backward_head(a, task / a.NH, task % a.NH, partials);
  for (int n = 0; n < a.num_kv_heads; n++) {
    const KVHead<floatX>& kv = a.kv_heads[n];
    if (!has_partial_sums(kv.num_query_heads)) continue;
#pragma omp parallel for schedule( \
    static) if (is_worth_threads(2 * a.B * a.T * a.HS * (kv.num_query_heads + 1) * int64_t(sizeof(float))))
    for (int64_t row = 0; row < a.B * a.T; row++) add_partial_sums(a, kv, partials, row);
  }
  if (a.relative.q != nullptr) sum_distance_gradients(a);
}

inline void copy_rows(const RowCopy& copy, int64_t rows) {
  const size_t bytes = size_t(copy.width) * sizeof(floatX);
#pragma omp parallel for schedule(static) if (is_worth_threads(2 * int64_t(bytes) * rows))
  for (int64_t i = 0; i < rows; i++) {
    if (copy.src != nullptr) memcpy(copy.to(i), copy.src + i * copy.src_stride, bytes);
    else memset(copy.to(i), 0, bytes);
  }
}

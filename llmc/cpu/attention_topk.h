// topk of attention on the CPU: of the keys that a query sees, those with the highest scores. Where they are few,
// the scores alone are a matmul, computed once in each pass; all else is computed pair by pair, in fp32, for the chosen
// keys.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>
#include "llmc/ops/attention_args.h"
#include "attention_decode.h"
#include "attention_scores.h"
#include "attention_tiles.h"
#include "few_rows.h"
#include "vec.h"

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
      const int first = key_index(at, tile, seen.begin), stride = int(at.stride);
#pragma omp simd
      for (int64_t i = 0; i < count; i++) indices_to[i] = first + stride * places[i];
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
// `tiles`: the tiles of the queries' keys.
inline const std::vector<HighestScores>& find_topk(const HeadPositions& at, int64_t q0, int64_t q1,
                                                   const std::vector<KeyTile>& tiles) {
  thread_local std::vector<float> score_tile(query_block * key_block);
  thread_local std::vector<floatX> copies;
  thread_local std::vector<HighestScores> highest(query_block);
  const AttentionArgs& a = at.a;
  for (HighestScores& of_query : highest) of_query.clear();
  for (const KeyTile& tile : tiles) {
    const KVHead& kv = a.kv_heads[tile.kv_head];
    compute_scores(at, tile, q0, q1 - q0, key_rows(at, tile, kv.k, kv.k_stride, copies), score_tile.data());
    for (int64_t r = 0; r < q1 - q0; r++) {
      float* scores = score_tile.data() + r * key_block;
      const KeyRange seen = apply_mask(at, tile, q0 + r, scores);
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
  const AttentionArgs& a = at.a;
  const float scale = score_scale(a);
  p.resize(size_t(chosen.keys)), rows.resize(size_t(chosen.keys));
  int64_t source = 0;
  for (int64_t i = 0; i < chosen.keys; i++) {
    while (chosen.indices[i] >= (source + 1) * a.T) source++;
    const KVHead& kv = a.kv_heads[a.kv_of_head[at.head * a.kv_per_head + source]];
    rows[i] = kv.v + (at.keys.first_row + chosen.indices[i] - source * a.T) * kv.v_stride;
    p[i] = chosen.scores[i] * scale;
  }
  RowSoftmax softmax = softmax_of_sink(at);
  softmax.update(p.data(), p.data(), chosen.keys);
  a.lse[at.statistic(t)] = softmax.sum == 0 ? infinity : softmax.lse();
  const float inverse = softmax.sum == 0 ? 0.0f : 1.0f / softmax.sum;
  for (float& weight : p) weight *= inverse;
  add_weighted_rows(
      sum, p.data(), [](int64_t i) { return rows[i]; }, chosen.keys, a.HS, /*accumulate=*/false);
}

// out =, exact_out =, lse = of the queries [q0, q1), from the keys that topk has chosen for each.
inline void topk_forward_block(const HeadPositions& at, int64_t q0, int64_t q1,
                               const std::vector<HighestScores>& chosen) {
  thread_local std::vector<float> out_sums;
  const AttentionArgs& a = at.a;
  const int64_t C = a.NH * a.HS;
  const Rows<floatX> out = {a.out + at.query_row(q0) * C + at.head * a.HS, at.stride * C};
  const Rows<float> sums = sums_of(out, out_sums, a.HS);
  for (int64_t t = q0; t < q1; t++) attend_to_topk(at, t, chosen[t - q0], sums.data + (t - q0) * sums.stride);
  store_out(at, out, sums, q1 - q0);
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

// For query t and the keys of a tile that topk has chosen for it: dq, dk and dv +=. scores (keys): as compute_scores
// computes them, and apply_mask leaves them.
inline void topk_backward(const HeadPositions& at, const KeyTile& tile, int64_t t, const KeyRange& keys,
                          const float* scores, const TopkQuery& query, const Rows<const floatX>& k,
                          const Rows<const floatX>& v, const KeyGradients& to) {
  int places[key_block + 16];
  float p[key_block], ds[key_block];
  const AttentionArgs& a = at.a;
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
  if (chosen == 0) return;
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

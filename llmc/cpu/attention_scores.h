// Scores of attention on the CPU, which keys count, and what becomes of them: probabilities, and their gradients.
#pragma once
#include <algorithm>
#include <cmath>
#include "llmc/ops/attention_args.h"
#include "llmc/ops/dropout.h"
#include "attention_decode.h"
#include "attention_relative.h"
#include "attention_tiles.h"
#include "vec.h"

// Scores (rows, key_block) of the queries from q0 on and a tile's keys: the same bits whenever it is called. They are
// scaled, but for topk, where scores that are equal must stay equal.
inline void compute_scores(const HeadPositions& at, const KeyTile& tile, int64_t q0, int64_t rows,
                           const Rows<const floatX>& k, float* scores) {
  const AttentionArgs& a = at.a;
  const Rows<const floatX> q = {a.q + at.query_row(q0) * a.q_stride + at.head * a.HS, at.stride * a.q_stride};
  multiply_queries(a, q, k, rows, tile.keys, a.topk > 0 ? 1.0f : score_scale(a), {scores, key_block});
  if (a.relative.q != nullptr) add_relative_scores(at, tile, q0, rows, scores);
}

struct KeyRange {
  int64_t begin, end;
};

// The elements of a row (count) outside of a range become 0.
inline void clear_others(floatX* row, const KeyRange& range, int64_t count) {
  std::fill(row, row + range.begin, floatX(0.0f));
  std::fill(row + range.end, row + count, floatX(0.0f));
}

// Scores (keys) of query t get - slope (t - j), if its mask has a slope, which is scaled as they are.
inline void lower_by_distance(const HeadPositions& at, const KeyTile& tile, int64_t t, float* scores) {
  if (at.mask.slope() == 0) return;
  const float slope = at.mask.slope() * (at.a.topk > 0 ? 1.0f : score_scale(at.a));
  const int distance = int(t - tile.first), q = int(t), *numbers = tile.numbers;
  if (numbers == nullptr) {
#pragma omp simd
    for (int i = 0; i < int(tile.keys); i++) scores[i] -= slope * float(distance - i);
    return;
  }
#pragma omp simd
  for (int i = 0; i < int(tile.keys); i++) scores[i] -= slope * float(q - numbers[i]);
}

// The range of a tile's keys that query t may see. Scores (keys) of this range become what the mask makes of them: -inf
// where it hides the key.
inline KeyRange apply_mask(const HeadPositions& at, const KeyTile& tile, int64_t t, float* scores) {
  const int q0 = int(t), q1 = q0 + 1;
  lower_by_distance(at, tile, t, scores);
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
  const int first = key_index(at, tile, 0), stride = int(at.stride);
#pragma omp simd
  for (int j = int(keys.begin); j < int(keys.end); j++) scores[j] = select(scores[j], first + j * stride);
}

// The online softmax of one query: the maximum of its scores so far, and the sum of exp(score - max).
struct RowSoftmax {
  float max = -infinity, sum = 0;

  // No key yet: exp(-inf - 0) is 0, exp(-inf + inf) would be NaN.
  float shift() const { return max == -infinity ? 0.0f : max; }
  // The log of the sum of the exponentials of the scores; -inf of none.
  float lse() const { return sum == 0 ? -infinity : max + std::log(sum); }

  // Continues with `keys` scores: p = exp(scores - max), rounded; p may be scores. Returns the factor that what was
  // summed up with the maximum so far has with the new one.
  template <class Element>
  float update(const float* scores, Element* p, int64_t keys) {
    FloatVector largest = FloatVector{} + max, added = {};
    for (int64_t j = 0; j < keys; j += vector_width) {
      const FloatVector score = load_vector(scores + j, keys - j, -infinity);
      largest = score > largest ? score : largest;
    }
    const float before = max;
    max = highest_of(largest);
    const float base = shift(), rescale = vec_exp(before - base);
    for (int64_t j = 0; j < keys; j += vector_width) {
      const FloatVector e = vec_exp(load_vector(scores + j, keys - j, -infinity) - base);
      store_vector(p + j, e, keys - j);
      added += e;
    }
    sum = sum_of(added) + sum * rescale;
    return rescale;
  }
};

// The softmax of a query before its first key: of its head's sink, if there is one.
inline RowSoftmax softmax_of_sink(const HeadPositions& at) {
  const floatX* sinks = at.a.sinks.scores;
  return sinks == nullptr ? RowSoftmax{} : RowSoftmax{to_float(sinks[at.head]), 1};
}

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

// out =, exact_out = of a block's queries, whose rows of a.out are `out`.
inline void store_out(const HeadPositions& at, const Rows<floatX>& out, const Rows<float>& sums, int64_t rows) {
  const AttentionArgs& a = at.a;
  store_sums(out, sums, rows, a.HS, 1.0f, /*accumulate=*/false);
  if (!is_bf16 || a.exact_out == nullptr) return;
  for (int64_t r = 0; r < rows; r++)
    std::copy_n(sums.data + r * sums.stride, a.HS, a.exact_out + (out.data - a.out) + r * out.stride);
}

// Which probabilities of a query t and of a tile's keys are kept by dropout.
struct KeptKeys {
  const uint8_t* keep;  // (keys of the tile): 0 or 1

  // They are valid until the thread's next call.
  KeptKeys(const HeadPositions& at, const KeyTile& tile, int64_t t) {
    thread_local std::vector<uint8_t> kept(size_t(key_block + 64));
    const Dropout& d = at.a.dropout;
    keep = kept.data();
    const int64_t q = at.position(t);
    if (at.stride > 1 || tile.numbers != nullptr) {
      for (int64_t j = 0; j < tile.keys; j++) {
        const int64_t k = at.position(tile.numbers == nullptr ? tile.first + j : tile.numbers[j]);
        kept[j] = keeps_probability(d, at.b, at.head, tile.source, q, k);
      }
      return;
    }
    const int64_t begin = tile.first / 32 * 32, half = q >> 3 & 1;
    const uint64_t key = d.keys[at.b];
    const uint32_t part = part_of_head(at.head, tile.source), row = query_group(q), place = d.place,
                   threshold = d.threshold;
    for (int64_t k = begin; k < tile.first + tile.keys; k += 32) {
      uint8_t* of_strip = kept.data() + (k - begin);
      const uint32_t first = key_group(k);
#pragma omp simd
      for (int i = 0; i < 8; i++) {
        const Philox bits = dropout_bits(key, place, part, row, first + uint32_t(i));
        const uint32_t low = half != 0 ? bits.word[2] : bits.word[0], high = half != 0 ? bits.word[3] : bits.word[1];
        of_strip[i] = (low & 0xffff) >= threshold, of_strip[8 + i] = low >> 16 >= threshold;
        of_strip[16 + i] = (high & 0xffff) >= threshold, of_strip[24 + i] = high >> 16 >= threshold;
      }
    }
    keep += tile.first - begin;
  }
};

// The probabilities p (keys) that dropout does not keep become 0.
template <class Element>
void drop_probabilities(const HeadPositions& at, const KeyTile& tile, int64_t t, Element* p) {
  const KeptKeys kept(at, tile, t);
  for (int64_t j = 0; j < tile.keys; j++) p[j] = kept.keep[j] ? p[j] : Element(0.0f);
}

// The sum of dout * out over a row of a head.
inline float row_delta(const floatX* dout, const floatX* out, int64_t HS) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < HS; i++) sum += to_float(dout[i]) * to_float(out[i]);
  return sum;
}

// Where a query head adds to the gradients of one of its K/V heads: dk and dv themselves, or partial sums of them. Rows
// (b, t).
struct KeyGradients {
  float *dk, *dv;
  int64_t dk_stride, dv_stride;
};

// One row of a tile: of `scores` (visible), which are scaled, p = exp(scores - lse), and of `dp` (visible), which is
// dout v^T, ds = p (dp - delta) factor. If Element is float, p may be scores and ds may be dp. With dropout p becomes
// what is multiplied with v, and ds is the gradient of a score through it: it multiplies the probabilities by
// keep_scale where `keep` (visible) is not 0, and by 0 elsewhere; null: there is none.
template <class Element>
void attention_score_gradients(Element* p, Element* ds, const float* scores, const float* dp, int64_t visible,
                               float lse, float delta, float factor, const uint8_t* keep = nullptr,
                               float keep_scale = 1) {
  for (int64_t j = 0; j < visible; j += vector_width) {
    const FloatVector probability = vec_exp(load_vector(scores + j, visible - j, -infinity) - lse);
    FloatVector used = probability, gradient = load_vector(dp + j, visible - j);
    if (keep != nullptr) {
      FloatVector kept = {};
      for (int64_t i = 0; i < std::min(vector_width, visible - j); i++) kept[i] = keep[j + i] ? keep_scale : 0.0f;
      used *= kept, gradient *= kept;
    }
    store_vector(p + j, used, visible - j);
    store_vector(ds + j, probability * (gradient - delta) * factor, visible - j);
  }
}

// Attention without a T*T buffer, in the manner of FlashAttention-2 (Dao 2023): blocks of queries against tiles of the
// keys that they see with an online softmax, so that memory is linear in T. k and v are read where they were projected;
// of a tile whose keys are not neighbours they are copied. A block has queries of one document. In bf16 scores and
// softmax are fp32; probabilities and ds are rounded where they are the operand of a matmul, as on a GPU. Shapes and
// strides: llmc/ops/attention_args.h; any head size and stride will do.
//
//   attention_forward:  out =, lse =, topk_score =, topk_last =
//   attention_backward: delta =, dq = or +=, dk and dv of each K/V head = or +=; dq and dr of relative positions =
#pragma once
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>
#include "llmc/ops/attention_args.h"
#include "llmc/ops/precision.h"
#include "llmc/ops/rows.h"
#include "attention_decode.h"
#include "attention_relative.h"
#include "attention_scores.h"
#include "attention_tiles.h"
#include "attention_topk.h"
#include "gemm.h"
#include "threads.h"
#include "vec.h"

inline void check_kv_head(const KVHead&) {}  // any strides will do

// What of a wiring has no kernels here: nothing.
inline const char* without_kernels(bool, bool, bool, int64_t) { return nullptr; }

// A thread owns a query head. Where a K/V head has several, or where dk and dv are bf16, which would round each
// addition, it leaves a partial sum of them in the scratch memory.
inline bool needs_scratch(int64_t query_heads) { return is_bf16 || query_heads > 1; }
inline int64_t attention_backward_scratch(int64_t B, int64_t T, int64_t HS, int64_t parts) {
  return 2 * B * T * HS * parts;
}
inline int64_t attention_partials(int64_t, int64_t, int64_t, int64_t, int64_t) { return 0; }
inline bool takes_sequences(int64_t, int) { return true; }

// ----------------------------------------------------------------------------
// Forward

// out =, exact_out =, lse = of the queries [q0, q1).
inline void attention_forward_block(const HeadPositions& at, int64_t q0, int64_t q1) {
  thread_local ScoreTile<floatX> tile_of_scores;
  thread_local std::vector<floatX> k_copies, v_copies;
  thread_local std::vector<float> out_sums;
  RowSoftmax softmax[query_block];
  const AttentionArgs& a = at.a;
  const int64_t rows = q1 - q0, HS = a.HS, first = at.query_row(q0) * a.NH * HS + at.head * HS;
  const Rows<floatX> out = {a.out + first, at.stride * a.NH * HS};
  const Rows<float> sums = sums_of(out, out_sums, HS);
  std::fill_n(softmax, rows, softmax_of_sink(at));
  bool is_first = true;
  for (const KeyTile& tile : key_tiles(at, q0, q1)) {
    const KVHead& kv = a.kv_heads[tile.kv_head];
    compute_scores(at, tile, q0, rows, key_rows(at, tile, kv.k, kv.k_stride, k_copies), tile_of_scores.row(0));
    for (int64_t r = 0; r < rows; r++) {
      float *scores = tile_of_scores.row(r), *o = sums.data + r * sums.stride;
      floatX* p = tile_of_scores.operand(r);
      const KeyRange keys = apply_mask(at, tile, q0 + r, scores);
      select_topk(at, tile, q0 + r, keys, scores);
      const float rescale = softmax[r].update(scores + keys.begin, p + keys.begin, keys.end - keys.begin);
      clear_others(p, keys, tile.keys);
      if (a.dropout.keys != nullptr) drop_probabilities(at, tile, q0 + r, p);
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
    if (is_bf16 && a.exact_out != nullptr) {
      keep_rounding_errors(tile_of_scores, softmax, rows, tile.keys);
      add(true);
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    float *o = sums.data + r * sums.stride, *lse = a.lse + at.statistic(q0 + r);
    if (is_first || softmax[r].sum == 0) {  // it sees no key
      std::fill(o, o + HS, 0.0f);
      *lse = softmax[r].sum == 0 ? infinity : softmax[r].lse();
      continue;
    }
    const float inverse = a.dropout.scale / softmax[r].sum;
#pragma omp simd
    for (int64_t i = 0; i < HS; i++) o[i] *= inverse;
    *lse = softmax[r].lse();
  }
  store_out(at, out, sums, rows);
}

// out =, exact_out =, lse =, topk_score =, topk_last = of the queries [q0, q1).
inline void attention_forward_queries(const HeadPositions& at, int64_t q0, int64_t q1) {
  if (at.a.topk > 0) {
    const std::vector<KeyTile>& tiles = key_tiles(at, q0, q1);
    const std::vector<HighestScores>& chosen = find_topk(at, q0, q1, tiles);
    if (is_sparse(at, tiles)) return topk_forward_block(at, q0, q1, chosen);
  }
  attention_forward_block(at, q0, q1);
}

// out = softmax(q k^T / sqrt(HS) + mask) v over the keys of all K/V heads of a query head; lse =. A thread owns a block
// of queries of one head in one sequence; blocks with the most keys are started first.
inline void attention_forward(const AttentionArgs& a) {
  // The keys and values that few queries read. A head's rows are far from each other: a byte takes four times as long
  // as in sequence.
  const int64_t bytes = has_few_queries(a) ? 4 * 2 * int64_t(sizeof(floatX)) * a.B * a.NH * a.HS * a.T : 0;
  int64_t units = 0;  // the most blocks that a head has
  for (int64_t head = 0; head < a.NH; head++) {
    const int64_t stride = HeadPositions::stride_of(a, head);
    units = std::max(units, stride * (((a.T + stride - 1) / stride + query_block - 1) / query_block));
  }
#pragma omp parallel for schedule(dynamic, 1) if (is_worth_threads(bytes, 2 * a.B * a.NH * a.HS * a.T * a.queries()))
  for (int64_t task = 0; task < units * a.B * a.NH; task++) {
    const int64_t head = task % a.NH, unit = units - 1 - task / (a.B * a.NH),
                  stride = HeadPositions::stride_of(a, head);
    const HeadPositions at(a, task / a.NH % a.B, head, unit % stride);
    const int64_t block = unit / stride, q0 = std::max(at.first_query_number(), block * query_block),
                  q1 = std::min(at.length, (block + 1) * query_block);
    if (q0 >= q1) continue;
    for_each_document(at, q0, q1, [&](int64_t begin, int64_t end) { attention_forward_queries(at, begin, end); });
  }
}

// ----------------------------------------------------------------------------
// Backward

// The queries [q0, q1): delta =, dq = or +=, dk and dv +=. With p = exp(s - lse): dv += p^T dout; dp = dout v^T;
// ds = p (dp - delta) / sqrt(HS); dq += ds k; dk += ds^T q. `gradients`: of each K/V head of the query head.
inline void attention_backward_block(const HeadPositions& at, const KeyGradients* gradients, int64_t q0, int64_t q1) {
  thread_local ScoreTile<floatX> probabilities, dscores;
  thread_local std::vector<floatX> k_copies, v_copies;
  thread_local std::vector<float> dq_sums, relative_dq_sums, floats_of_q, floats_of_dout;
  const AttentionArgs& a = at.a;
  const int64_t rows = q1 - q0, HS = a.HS, C = a.NH * HS, row = at.query_row(q0), column = at.head * HS;
  const Rows<const floatX> q = {a.q + row * a.q_stride + column, at.stride * a.q_stride},
                           dout = {a.dout + row * C + column, at.stride * C};
  const floatX* out = a.out + row * C + column;
  const float* lse = a.lse + at.statistic(q0);
  float* delta = a.delta + at.statistic(q0);
  const Rows<floatX> dq = {a.dq + row * a.dq_stride + column, at.stride * a.dq_stride};
  const Rows<float> sums = sums_of(dq, dq_sums, HS);
  const bool is_relative = a.relative.q != nullptr;
  const Rows<floatX> relative_dq = head_rows(at, a.relative.dq, is_relative ? row : 0);
  const Rows<float> relative_sums = sums_of(relative_dq, relative_dq_sums, HS);
  const float scale = score_scale(a) / score_gradient_scale(a);
  for (int64_t r = 0; r < rows; r++)
    delta[r * at.stride] = row_delta(dout.data + r * dout.stride, out + r * dout.stride, HS);
  bool has_sums = !is_bf16 && a.dq_accumulate, has_relative_sums = false;
  const std::vector<KeyTile>& tiles = key_tiles(at, q0, q1);
  const bool sparse = is_sparse(at, tiles);
  const Rows<const float> q_floats = rows_as_floats(q, sparse ? rows : 0, HS, floats_of_q),
                          dout_floats = rows_as_floats(dout, sparse ? rows : 0, HS, floats_of_dout);
  if (sparse && !has_sums) {
    for (int64_t r = 0; r < rows; r++) std::fill_n(sums.data + r * sums.stride, HS, 0.0f);
    has_sums = true;
  }
  for (const KeyTile& tile : tiles) {
    const KVHead& kv = a.kv_heads[tile.kv_head];
    const Rows<const floatX> k = key_rows(at, tile, kv.k, kv.k_stride, k_copies),
                             v = key_rows(at, tile, kv.v, kv.v_stride, v_copies);
    compute_scores(at, tile, q0, rows, k, probabilities.row(0));
    if (sparse) {
      for (int64_t r = 0; r < rows; r++) {
        float* scores = probabilities.row(r);
        const KeyRange keys = apply_mask(at, tile, q0 + r, scores);
        topk_backward(at, tile, q0 + r, keys, scores,
                      {q_floats.data + r * HS, dout_floats.data + r * HS, sums.data + r * sums.stride,
                       lse[r * at.stride], delta[r * at.stride], scale},
                      k, v, gradients[tile.source]);
      }
      continue;
    }
    gemm('N', 'T', rows, tile.keys, HS, dout.data, dout.stride, v.data, v.stride, false, dscores.row(0), key_block);
    for (int64_t r = 0; r < rows; r++) {
      float *scores = probabilities.row(r), *dp = dscores.row(r);
      floatX *p = probabilities.operand(r), *ds = dscores.operand(r);
      const KeyRange keys = apply_mask(at, tile, q0 + r, scores);
      select_topk(at, tile, q0 + r, keys, scores);
      const uint8_t* keep = a.dropout.keys != nullptr ? KeptKeys(at, tile, q0 + r).keep + keys.begin : nullptr;
      attention_score_gradients(p + keys.begin, ds + keys.begin, scores + keys.begin, dp + keys.begin,
                                keys.end - keys.begin, lse[r * at.stride], delta[r * at.stride], scale, keep,
                                a.dropout.scale);
      clear_others(p, keys, tile.keys);
      clear_others(ds, keys, tile.keys);
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
inline std::vector<int> partial_sum_indices(const AttentionArgs& a) {
  std::vector<int> partials;
  int n = 0;
  for (int i = 0; i < a.num_kv_heads; i++) {
    CHECK(a.kv_heads[i].first_query_head == int(partials.size()));
    for (int r = 0; r < a.kv_heads[i].num_query_heads; r++)
      partials.push_back(needs_scratch(a.kv_heads[i].num_query_heads) ? n++ : -1);
  }
  CHECK(n == 0 || a.scratch != nullptr);
  return partials;
}
inline KeyGradients partial_sum(const AttentionArgs& a, int partial) {
  float* dk = a.scratch + 2 * a.B * a.T * a.HS * partial;
  return {dk, dk + a.HS, 2 * a.HS, 2 * a.HS};
}

// Where a query head adds to the gradients of its K/V head: to the partial sum number `partial`; if that is -1, to dk
// and dv.
template <class Head>  // KVHead, whose dk and dv are not floats in bf16
KeyGradients key_gradients(const AttentionArgs& a, const Head& kv, int partial) {
  if constexpr (!is_bf16)
    if (partial < 0) return {kv.dk, kv.dv, kv.dk_stride, kv.dv_stride};
  return partial_sum(a, partial);
}

// The rows of sequence b in x, which has `rows` rows (HS) of each sequence, `stride` apart, become 0.
inline void clear_rows(float* x, int64_t stride, int64_t b, int64_t rows, int64_t HS) {
  for (int64_t row = b * rows; row < (b + 1) * rows; row++) std::fill_n(x + row * stride, HS, 0.0f);
}

// The backward pass of one query head in sequence b: delta =, dq = or +=, and its part of dk and dv.
inline void attention_backward_head(const AttentionArgs& a, int64_t b, int64_t head, const std::vector<int>& partials) {
  std::vector<KeyGradients> gradients;
  for (int source = 0; source < a.kv_per_head; source++) {
    const int n = a.kv_of_head[head * a.kv_per_head + source];
    if (n < 0) break;
    const KVHead& kv = a.kv_heads[n];
    const int* query_heads = a.query_heads + kv.first_query_head;
    const int partial = partials[std::find(query_heads, query_heads + kv.num_query_heads, int(head)) - a.query_heads];
    const KeyGradients to = key_gradients(a, kv, partial);
    if (partial >= 0 || !kv.dk_accumulate) clear_rows(to.dk, to.dk_stride, b, a.T, a.HS);
    if (partial >= 0 || !kv.dv_accumulate) clear_rows(to.dv, to.dv_stride, b, a.T, a.HS);
    gradients.push_back(to);
  }
  if (a.relative.q != nullptr)
    clear_rows(a.relative.dr_of_sequences + head * a.HS, a.NH * a.HS, b, a.relative.distances, a.HS);
  for (int64_t first = 0; first < HeadPositions::stride_of(a, head); first++) {
    const HeadPositions at(a, b, head, first);
    for (int64_t q0 = at.first_query_number(); q0 < at.length; q0 += query_block)
      for_each_document(at, q0, std::min(at.length, q0 + query_block), [&](int64_t begin, int64_t end) {
        attention_backward_block(at, gradients.data(), begin, end);
      });
  }
}

// A K/V head's dk and dv = or += the sum of its query heads' partial sums, in their order.
inline void add_partial_sums(const AttentionArgs& a, const KVHead& kv, const std::vector<int>& partials, int64_t row) {
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

// The gradients of the sinks +=, from lse and delta. A thread owns a query head.
inline void sinks_backward(const AttentionArgs& a) {
  const int64_t Q = a.queries();
#pragma omp parallel for schedule(static) if (is_worth_threads(2 * a.B * a.NH * Q * int64_t(sizeof(float))))
  for (int64_t head = 0; head < a.NH; head++) {
    const float sink = to_float(a.sinks.scores[head]);
    double sum = 0;
    for (int64_t b = 0; b < a.B; b++) {
      const int64_t first = (b * a.NH + head) * Q;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = first; i < first + Q; i++) sum += double(vec_exp(sink - a.lse[i]) * a.delta[i]);
    }
    a.sinks.gradients[head] -= float(sum);
  }
}

// delta =; dq, dk and dv = or += as the arguments say. A thread owns a query head of one sequence, and its partial sums
// of dk and dv, so no two threads write to the same address, and the order of the sums does not depend on the number of
// threads.
inline void attention_backward(const AttentionArgs& a) {
  CHECK(a.sequences == nullptr);
  const std::vector<int> partials = partial_sum_indices(a);
#pragma omp parallel for schedule(dynamic, 1) if (is_worth_threads(0, 5 * a.B * a.NH * a.HS * a.T * a.queries()))
  for (int64_t task = 0; task < a.B * a.NH; task++) attention_backward_head(a, task / a.NH, task % a.NH, partials);
  for (int n = 0; n < a.num_kv_heads; n++) {
    const KVHead& kv = a.kv_heads[n];
    if (!needs_scratch(kv.num_query_heads)) continue;
#pragma omp parallel for schedule( \
    static) if (is_worth_threads(2 * a.B * a.T * a.HS * (kv.num_query_heads + 1) * int64_t(sizeof(float))))
    for (int64_t row = 0; row < a.B * a.T; row++) add_partial_sums(a, kv, partials, row);
  }
  if (a.relative.q != nullptr) sum_distance_gradients(a);
  if (a.sinks.scores != nullptr) sinks_backward(a);
}

inline void copy_rows(const RowCopy& copy, int64_t rows) {
  const size_t bytes = size_t(copy.width) * sizeof(floatX);
#pragma omp parallel for schedule(static) if (is_worth_threads(2 * int64_t(bytes) * rows))
  for (int64_t i = 0; i < rows; i++) {
    if (copy.src != nullptr) memcpy(copy.to(i), copy.src + i * copy.src_stride, bytes);
    else memset(copy.to(i), 0, bytes);
  }
}

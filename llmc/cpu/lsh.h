// Attention by locality-sensitive hashing (llmc/ops/lsh.h has the formula, the shapes, and which outputs are = and
// which +=). Positions are taken in the order of their buckets, round by round: what a block of queries sees lies
// before it in that order, from the start of its first bucket on. Rows of queries and of tiles of keys are copied, and
// then multiplied as in cpu/attention.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#include "attention.h"
#include "gemm.h"
#include "llmc/ops/lsh.h"
#include "llmc/base/error.h"
#include "threads.h"
#include "vec.h"

// ----------------------------------------------------------------------------
// Buckets

// So many rows, and columns of R, whose products stay in registers.
constexpr int64_t hash_rows = 4, hash_columns = 64;

// Products of hash_rows rows x (HS, hash_rows) with `columns` columns of R (HS, stride). Each is summed up in the order
// of channels, by the same instructions whatever the rows are.
inline void multiply_by_rotations(float (&sums)[hash_rows][hash_columns], const float* x, const float* R,
                                  int64_t stride, int64_t columns, int64_t HS) {
  for (auto& row : sums) std::fill_n(row, hash_columns, 0.0f);
  for (int64_t c = 0; c < HS; c++) {
    float of_channel[hash_columns] = {};
    memcpy(of_channel, R + c * stride, size_t(columns) * sizeof(float));
    for (int64_t i = 0; i < hash_rows; i++) {
#pragma omp simd
      for (int64_t j = 0; j < hash_columns; j++) sums[i][j] += x[c * hash_rows + i] * of_channel[j];
    }
  }
}

// The rows [first, first + hash_rows) of one head, as far as they are before N.
inline void hash_head(const LshHash& a, int64_t first, int64_t head, std::vector<float>& x) {
  const int64_t rows = std::min(hash_rows, a.N - first), columns = a.num_buckets / 2;
  x.assign(size_t(hash_rows * a.HS), 0.0f);
  for (int64_t i = 0; i < rows; i++) {
    const floatX* q = a.q + (first + i) * a.q_stride + head * a.HS;
    float square = 0;
    for (int64_t c = 0; c < a.HS; c++) {
      const float q_c = to_float(q[c]);
      x[c * hash_rows + i] = q_c, square += q_c * q_c;
    }
    if (a.inverse_norms != nullptr)
      a.inverse_norms[a.to(first + i) * a.NH + head] = square > 0 ? 1.0f / std::sqrt(square) : 0.0f;
  }
  float sums[hash_rows][hash_columns];
  for (int64_t round = 0; round < a.rounds; round++) {
    LshBucket best[hash_rows];
    const float* R = a.rotations + (head * a.rounds + round) * a.HS * columns;
    for (int64_t j0 = 0; j0 < columns; j0 += hash_columns) {
      const int64_t some = std::min(hash_columns, columns - j0);
      multiply_by_rotations(sums, x.data(), R + j0, columns, some, a.HS);
      for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < some; j++) best[i].consider(sums[i][j], int(j0 + j), int(columns));
    }
    for (int64_t i = 0; i < rows; i++) a.buckets[(a.to(first + i) * a.NH + head) * a.rounds + round] = best[i].bucket;
  }
}

// buckets =, inverse_norms =. A thread owns some rows.
inline void lsh_hash(const LshHash& a) {
  CHECK(a.num_buckets >= 2 && a.num_buckets % 2 == 0 && a.num_buckets <= lsh_most_buckets);
#pragma omp parallel for schedule(static) if (is_worth_threads(0, a.N * a.NH * a.HS * a.rounds * a.num_buckets))
  for (int64_t first = 0; first < a.N; first += hash_rows) {
    thread_local std::vector<float> x;
    for (int64_t head = 0; head < a.NH; head++) hash_head(a, first, head, x);
  }
}

// order =, starts =, of whole sequences, from the buckets. A thread owns a round of a head of a sequence.
inline void lsh_sort(const LshShape& s, const LshOrder& o) {
#pragma omp parallel for schedule(static) if (is_worth_threads(16 * s.rows() * s.NH * s.rounds))
  for (int64_t task = 0; task < s.B * s.NH * s.rounds; task++) {
    const int64_t b = task / (s.NH * s.rounds), stride = s.NH * s.rounds;
    const int* buckets = o.buckets + b * s.T * stride + task % stride;
    int *starts = o.starts + task * (s.buckets + 1), *order = o.order + task * s.T;
    std::fill_n(starts, s.buckets + 1, 0);
    for (int64_t t = 0; t < s.T; t++) starts[buckets[t * stride] + 1]++;
    for (int i = 0; i < s.buckets; i++) starts[i + 1] += starts[i];
    thread_local std::vector<int> next;  // where the next position of each bucket goes
    next.assign(starts, starts + s.buckets);
    for (int64_t t = 0; t < s.T; t++) order[next[buckets[t * stride]]++] = int(t);
  }
}

// ----------------------------------------------------------------------------
// Tiles

// Copies have whole groups of so many rows, the last of them zeros: oneDNN's products in bf16 are compiled for each
// shape, and so there are few shapes.
constexpr int64_t copied_rows = 64;
inline int64_t with_padding(int64_t rows) { return (rows + copied_rows - 1) / copied_rows * copied_rows; }

// copies (with_padding(end - begin), HS) = rows of x, which has `stride` channels, from `channel` on: the rows of the
// positions [begin, end) in the round's order.
inline void copy_positions(const LshRound& at, std::vector<floatX>& copies, const floatX* x, int64_t stride,
                           KeyRange positions) {
  const int64_t HS = at.a.shape.HS, rows = positions.end - positions.begin;
  copies.resize(size_t(query_block > key_block ? query_block : key_block) * size_t(HS));
  for (int64_t i = 0; i < rows; i++)
    memcpy(&copies[i * HS], x + at.row(positions.begin + i) * stride + at.head * HS, size_t(HS) * sizeof(floatX));
  std::fill(copies.begin() + rows * HS, copies.begin() + with_padding(rows) * HS, floatX(0.0f));
}

// A tile of keys for a block of queries: positions in the round's order.
struct LshTile {
  KeyRange queries, keys;
  std::vector<floatX> k, v;                                               // (with_padding(keys), HS)
  std::vector<int> key_buckets;                                           // (round, key_block): in each earlier round
  std::vector<char> hidden = std::vector<char>(query_block * key_block);  // whether an earlier round showed the pair

  int64_t num_queries() const { return queries.end - queries.begin; }
  int64_t num_keys() const { return keys.end - keys.begin; }

  // The tile's keys that share the bucket of query r of the block and come before it, as numbers in the tile.
  KeyRange range(const LshRound& at, int64_t r) const {
    if (r >= num_queries()) return {0, 0};
    const int64_t i = queries.begin + r, first = std::max<int64_t>(at.bucket_start(i), keys.begin) - keys.begin,
                  end = std::min(i, keys.end) - keys.begin;
    return {std::min(first, std::max<int64_t>(end, 0)), std::max<int64_t>(end, 0)};
  }

  // Finds the pairs that share a bucket in an earlier round. Returns whether there is another pair.
  bool find_hidden(const LshRound& at) {
    key_buckets.resize(size_t(at.round * key_block));
    for (int64_t j = 0; j < num_keys(); j++)
      for (int n = 0; n < at.round; n++) key_buckets[n * key_block + j] = at.buckets(keys.begin + j)[n];
    bool has_visible = false;
    for (int64_t r = 0; r < num_queries(); r++) {
      const KeyRange seen = range(at, r);
      char* row = hidden.data() + r * key_block;
      std::fill(row + seen.begin, row + seen.end, char(0));
      const int* own = at.buckets(queries.begin + r);
      for (int n = 0; n < at.round; n++) {
        const int *others = key_buckets.data() + n * key_block, bucket = own[n];
#pragma omp simd
        for (int64_t j = seen.begin; j < seen.end; j++) row[j] |= char(others[j] == bucket);
      }
      has_visible |= std::find(row + seen.begin, row + seen.end, char(0)) != row + seen.end;
    }
    return has_visible;
  }

  // Copies the tile's rows; k's rows are normalized.
  void load(const LshRound& at) {
    const LshShape& s = at.a.shape;
    copy_positions(at, k, at.a.qv, 2 * s.C(), keys);
    copy_positions(at, v, at.a.qv + s.C(), 2 * s.C(), keys);
    for (int64_t j = 0; j < num_keys(); j++) {
      const float factor = at.a.of.inverse_norms[at.statistic(keys.begin + j)];
      floatX* row = &k[j * s.HS];
#pragma omp simd
      for (int64_t c = 0; c < s.HS; c++) from_float(row[c], to_float(row[c]) * factor);
    }
  }

  // scores (with_padding(queries), key_block) = q k^T / sqrt(HS), and -inf for hidden pairs in a query's range.
  void compute_scores(const LshRound& at, const std::vector<floatX>& q, float* scores) const {
    const int64_t HS = at.a.shape.HS;
    gemm('N', 'T', with_padding(num_queries()), with_padding(num_keys()), HS, at.a.shape.score_scale(), q.data(), HS,
         k.data(), HS, false, scores, key_block);
    for (int64_t r = 0; at.round > 0 && r < num_queries(); r++) {
      const KeyRange seen = range(at, r);
      const char* row = hidden.data() + r * key_block;
      float* of_query = scores + r * key_block;
#pragma omp simd
      for (int64_t j = seen.begin; j < seen.end; j++) of_query[j] = row[j] ? -infinity : of_query[j];
    }
  }
};

// f(tile) for each tile of keys where a query in [q0, q1) sees a key in this round; tiles are loaded.
template <class F>
void for_each_tile(const LshRound& at, int64_t q0, int64_t q1, const F& f) {
  thread_local LshTile tile;
  tile.queries = {q0, q1};
  for (int64_t j0 = at.bucket_start(q0); j0 + 1 < q1; j0 += key_block) {
    tile.keys = {j0, std::min(j0 + key_block, q1 - 1)};
    if (!tile.find_hidden(at)) continue;
    tile.load(at);
    f(tile);
  }
}

// ----------------------------------------------------------------------------
// Forward

// Adds what a query saw in this round, sums (HS) with their softmax, to what it saw in those before: in the scratch
// memory, or after the last round out = and lse =.
inline void finish_query(const LshRound& at, int64_t i, const RowSoftmax& softmax, const float* sums) {
  const LshShape& s = at.a.shape;
  const bool first = at.round == 0, last = at.round + 1 == s.rounds;
  const int64_t column = at.row(i) * s.C() + at.head * s.HS;
  float& lse = at.a.lse[at.statistic(i)];
  const LshMerge merged = merge_rounds(first ? -infinity : lse, softmax.lse());
  float* before = at.a.scratch + column;
  const float factor = softmax.sum == 0 ? 0.0f : merged.now / softmax.sum;
  lse = merged.lse;
  if (last && lse == -infinity) {
    lse = infinity;
    std::copy_n(at.a.qv + at.row(i) * 2 * s.C() + s.C() + at.head * s.HS, s.HS, at.a.out + column);
    return;
  }
#pragma omp simd
  for (int64_t c = 0; c < s.HS; c++) {
    const float x = (first ? 0.0f : merged.before * before[c]) + factor * sums[c];
    if (last) from_float(at.a.out[column + c], x);
    else before[c] = x;
  }
}

// The queries [q0, q1) of a round's order.
inline void lsh_forward_block(const LshRound& at, int64_t q0, int64_t q1) {
  thread_local ScoreTile<floatX> tile_of_scores;
  thread_local std::vector<floatX> q;
  thread_local std::vector<float> sums;
  RowSoftmax softmax[query_block];
  const int64_t HS = at.a.shape.HS, rows = with_padding(q1 - q0);
  copy_positions(at, q, at.a.qv, 2 * at.a.shape.C(), {q0, q1});
  sums.assign(size_t(query_block * HS), 0.0f);
  for_each_tile(at, q0, q1, [&](const LshTile& tile) {
    const int64_t keys = with_padding(tile.num_keys());
    tile.compute_scores(at, q, tile_of_scores.row(0));
    for (int64_t r = 0; r < rows; r++) {
      const KeyRange seen = tile.range(at, r);
      floatX* p = tile_of_scores.operand(r);
      const float rescale =
          softmax[r].update(tile_of_scores.row(r) + seen.begin, p + seen.begin, seen.end - seen.begin);
      clear_others(p, seen, keys);
      float* o = &sums[r * HS];
#pragma omp simd
      for (int64_t c = 0; c < HS; c++) o[c] *= rescale;
    }
    gemm('N', 'N', rows, HS, keys, tile_of_scores.operand(), key_block, tile.v.data(), HS, true, sums.data(), HS);
  });
  for (int64_t r = 0; r < q1 - q0; r++) finish_query(at, q0 + r, softmax[r], &sums[r * HS]);
}

// out =, lse =. In each round a thread owns blocks of queries.
inline void lsh_forward(const LshAttention& a) {
  const LshShape& s = a.shape;
  const int64_t blocks = (s.T + query_block - 1) / query_block;
  for (int round = 0; round < s.rounds; round++)
#pragma omp parallel for schedule(dynamic, 1) if (is_worth_threads(0, 4 * s.rows() * s.T * s.C() / s.buckets))
    for (int64_t task = 0; task < s.B * s.NH * blocks; task++) {
      const int64_t q0 = (blocks - 1 - task / (s.B * s.NH)) * query_block;
      lsh_forward_block(LshRound(a, task / s.NH % s.B, task % s.NH, round), q0, std::min(s.T, q0 + query_block));
    }
}

// ----------------------------------------------------------------------------
// Backward

// Rows of the positions [begin, end) in the round's order += sums (end - begin, HS): dq (part 0), dk (1) or dv (2).
inline void add_to_rows(const LshRound& at, int part, KeyRange positions, const std::vector<float>& sums) {
  const int64_t HS = at.a.shape.HS, C = at.a.shape.C();
  for (int64_t i = positions.begin; i < positions.end; i++) {
    float* row = LshGradients(at.a).rows + at.row(i) * 3 * C + part * C + at.head * HS;
    const float* sum = &sums[(i - positions.begin) * HS];
#pragma omp simd
    for (int64_t c = 0; c < HS; c++) row[c] += sum[c];
  }
}

// The queries [q0, q1) of a round's order: dq, dk and dv += their parts. With p = exp(s - lse): dv += p^T dout;
// dp = dout v^T; ds = p (dp - delta); dq += ds k; dk += ds^T q.
inline void lsh_backward_block(const LshRound& at, int64_t q0, int64_t q1) {
  thread_local ScoreTile<floatX> probabilities, dscores;
  thread_local std::vector<floatX> q, dout;
  thread_local std::vector<float> dq, of_keys(size_t(0));
  const LshAttention& a = at.a;
  const int64_t HS = a.shape.HS, C = a.shape.C(), rows = with_padding(q1 - q0);
  copy_positions(at, q, a.qv, 2 * C, {q0, q1});
  copy_positions(at, dout, a.dout, C, {q0, q1});
  dq.assign(size_t(query_block * HS), 0.0f), of_keys.resize(size_t(key_block * HS));
  for_each_tile(at, q0, q1, [&](const LshTile& tile) {
    const int64_t keys = with_padding(tile.num_keys());
    tile.compute_scores(at, q, probabilities.row(0));
    gemm('N', 'T', rows, keys, HS, dout.data(), HS, tile.v.data(), HS, false, dscores.row(0), key_block);
    for (int64_t r = 0; r < rows; r++) {
      const KeyRange seen = tile.range(at, r);
      floatX *p = probabilities.operand(r), *ds = dscores.operand(r);
      if (seen.begin < seen.end)
        attention_score_gradients(p + seen.begin, ds + seen.begin, probabilities.row(r) + seen.begin,
                                  dscores.row(r) + seen.begin, seen.end - seen.begin, a.lse[at.statistic(q0 + r)],
                                  LshGradients(a).delta[at.statistic(q0 + r)], 1.0f);
      clear_others(p, seen, keys);
      clear_others(ds, seen, keys);
    }
    auto add_of_keys = [&](int part, const floatX* weights, const std::vector<floatX>& x) {
      gemm('T', 'N', keys, HS, rows, weights, key_block, x.data(), HS, false, of_keys.data(), HS);
      add_to_rows(at, part, tile.keys, of_keys);
    };
    add_of_keys(2, probabilities.operand(), dout);
    add_of_keys(1, dscores.operand(), q);
    gemm('N', 'N', rows, HS, keys, dscores.operand(), key_block, tile.k.data(), HS, true, dq.data(), HS);
  });
  add_to_rows(at, 0, {q0, q1}, dq);
}

// A head in a sequence, before the rounds: delta =, and zeros for the sums of dq, dk and dv.
inline void start_backward(const LshAttention& a, int64_t b, int64_t head) {
  const int64_t HS = a.shape.HS, C = a.shape.C();
  const LshGradients gradients(a);
  for (int64_t row = b * a.shape.T; row < (b + 1) * a.shape.T; row++) {
    const int64_t column = head * HS;
    gradients.delta[row * a.shape.NH + head] = row_delta(a.dout + row * C + column, a.out + row * C + column, HS);
    for (int64_t part = 0; part < 3; part++) std::fill_n(gradients.rows + row * 3 * C + part * C + head * HS, HS, 0.0f);
  }
}

// A head in a sequence, after the rounds: dqv =. With n = 1 / |q|, k = n q adds n (dk - k (k . dk)) to q's gradient. A
// query that sees itself alone adds its gradient to its v's.
inline void finish_backward(const LshAttention& a, int64_t b, int64_t head) {
  const LshShape& s = a.shape;
  const int64_t HS = s.HS, C = s.C();
  const float scale = s.score_scale();
  for (int64_t row = b * s.T; row < (b + 1) * s.T; row++) {
    const int64_t column = head * HS;
    const floatX *q = a.qv + row * 2 * C + column, *dout = a.dout + row * C + column;
    const float *dq = LshGradients(a).rows + row * 3 * C + column, *dk = dq + C, *dv = dk + C;
    floatX *to_q = a.dqv + row * 2 * C + column, *to_v = to_q + C;
    const float n = a.of.inverse_norms[row * s.NH + head];
    const float own = a.lse[row * s.NH + head] == infinity ? 1.0f : 0.0f;
    float along = 0;  // k . dk
#pragma omp simd reduction(+ : along)
    for (int64_t c = 0; c < HS; c++) along += n * to_float(q[c]) * dk[c];
#pragma omp simd
    for (int64_t c = 0; c < HS; c++) {
      from_float(to_q[c], scale * (dq[c] + n * (dk[c] - n * to_float(q[c]) * along)));
      from_float(to_v[c], dv[c] + own * to_float(dout[c]));
    }
  }
}

// dqv =. A thread owns a head of a sequence, so that no two threads write to the same address.
inline void lsh_backward(const LshAttention& a) {
  const LshShape& s = a.shape;
#pragma omp parallel for schedule(dynamic, \
                                  1) if (is_worth_threads(0, 10 * s.rows() * s.T * s.C() * s.rounds / s.buckets))
  for (int64_t task = 0; task < s.B * s.NH; task++) {
    const int64_t b = task / s.NH, head = task % s.NH;
    start_backward(a, b, head);
    for (int round = 0; round < s.rounds; round++)
      for (int64_t q0 = 0; q0 < s.T; q0 += query_block)
        lsh_backward_block(LshRound(a, b, head, round), q0, std::min(s.T, q0 + query_block));
    finish_backward(a, b, head);
  }
}

// ----------------------------------------------------------------------------
// Generation

// One query of one head: position t of a sequence whose first row in the cache is first_row.
inline void lsh_decode_query(const LshDecode& a, int64_t first_row, int64_t t, int64_t head, floatX* out) {
  thread_local std::vector<float> query, scores, sums;
  thread_local std::vector<int64_t> seen;
  const int64_t NH = a.shape.NH, HS = a.shape.HS, C = a.shape.C();
  auto row = [&](int64_t j) { return a.qv + (first_row + j) * 2 * C + head * HS; };
  auto buckets = [&](int64_t j) { return a.buckets + ((first_row + j) * NH + head) * a.shape.rounds; };
  query.resize(size_t(HS)), sums.assign(size_t(HS), 0.0f), scores.clear(), seen.clear();
  for (int64_t c = 0; c < HS; c++) query[c] = to_float(row(t)[c]);
  for (int64_t j = 0; j < t; j++) {
    if (!share_earlier_bucket(buckets(t), buckets(j), a.shape.rounds)) continue;
    const floatX* q = row(j);
    float product = 0, square = 0;
#pragma omp simd reduction(+ : product, square)
    for (int64_t c = 0; c < HS; c++) {
      const float q_c = to_float(q[c]);
      product += query[c] * q_c, square += q_c * q_c;
    }
    seen.push_back(j);
    scores.push_back(square > 0 ? product / std::sqrt(square) * a.shape.score_scale() : 0.0f);
  }
  if (seen.empty()) seen.push_back(t), scores.push_back(0.0f);
  const float max = *std::max_element(scores.begin(), scores.end());
  float sum = 0;
  for (size_t i = 0; i < seen.size(); i++) {
    const float p = vec_exp(scores[i] - max);
    const floatX* v = row(seen[i]) + C;
    sum += p;
#pragma omp simd
    for (int64_t c = 0; c < HS; c++) sums[c] += p * to_float(v[c]);
  }
  for (int64_t c = 0; c < HS; c++) from_float(out[c], sums[c] / sum);
}

// out =. A thread owns some queries of a head.
inline void lsh_decode(const LshDecode& a) {
  const int64_t NH = a.shape.NH, HS = a.shape.HS, Q = a.queries();
  const int64_t bytes = 4 * a.shape.B * Q * NH * a.shape.rounds * a.shape.T;  // of buckets, the larger part
#pragma omp parallel for schedule(dynamic, 1) if (is_worth_threads(bytes))
  for (int64_t task = 0; task < a.shape.B * Q * NH; task++) {
    const int64_t head = task % NH, query = task / NH, b = query / Q;
    const KeyRows keys = a.keys_of(b);
    lsh_decode_query(a, keys.first_row, keys.T - Q + query % Q, head, a.out + (query * NH + head) * HS);
  }
}

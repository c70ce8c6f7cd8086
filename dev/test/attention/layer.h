// A layer's attention as the model lays it out, and its formula in double.
#pragma once
#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>
#include <ostream>
#include <vector>
#include "dev/test/mask_case.h"
#include "dev/test/values.h"
#include "llmc/ops/attention_args.h"
#include "llmc/ops/device_memory.h"
#include "llmc/operations.h"
#include "llmc/ops/precision.h"

// Relative to a tensor's norm. In 16 bits the error is also at most 1.5 times the error of the formula in double with
// floatX only where the kernels must have it.
constexpr double tolerance = is_fp16 ? 1e-3 : is_bf16 ? 8e-3 : 1e-5;

// The emulated GPU is so slow that it checks only every 11th case.
#ifdef SLA_EMU
constexpr size_t every = 11;
#else
constexpr size_t every = 1;
#endif

// (rows, columns) in a buffer, from `offset` on, rows `stride` apart.
struct Matrix {
  int64_t rows, columns, stride, offset;
  int64_t at(int64_t row, int64_t column) const { return offset + row * stride + column; }
};
inline std::vector<double> pick(const std::vector<floatX>& buffer, const Matrix& m) {
  std::vector<double> x;
  for (int64_t row = 0; row < m.rows; row++)
    for (int64_t i = 0; i < m.columns; i++) x.push_back(double(float(buffer[m.at(row, i)])));
  return x;
}
// The matrix's elements, which become 0 in the buffer: the rest of the buffer must be unchanged in the end.
inline std::vector<floatX> take(std::vector<floatX>& buffer, const Matrix& m) {
  std::vector<floatX> x;
  for (int64_t row = 0; row < m.rows; row++)
    for (int64_t i = 0; i < m.columns; i++) {
      x.push_back(buffer[m.at(row, i)]);
      buffer[m.at(row, i)] = floatX(0.0f);
    }
  return x;
}

// Returns random_values<floatX>(n, tag), which is drawn once per tag: to draw them anew would take longer than most
// tests do otherwise.
inline std::vector<floatX> drawn_values(int64_t n, uint32_t tag) {
  static std::map<uint32_t, std::vector<floatX>> drawn;
  std::vector<floatX>& values = drawn[tag];
  if (int64_t(values.size()) < n) values = random_values<floatX>(n, tag);
  return {values.begin(), values.begin() + n};
}

// The K/V heads of a query head.
struct Sources : std::vector<int> {
  Sources(int kv_head) : std::vector<int>{kv_head} {}
  Sources(std::initializer_list<int> kv_heads) : std::vector<int>(kv_heads) {}
};

struct Case {
  int64_t B, T, HS;
  std::vector<Sources> kv_of_head;  // (NH): the K/V heads of each query head, ascending
  int own_kv_heads;                 // the first ones are in the layer's own qkv, the others in a source layer's
  double q_scale = 1, k_scale = 1;
  bool dq_accumulate = false;
  std::vector<MaskCase> masks = {};  // (NH), or none
  int topk = 0;
  bool v_apart = false;        // v, dv of all K/V heads are in buffers of their own, and where dk is =, dv is +=
  bool whole_numbers = false;  // q and k are, so that scores are exact, and many of them equal
  int64_t first_query = 0;     // the positions [first_query, T) are queries, and [0, T) are keys
  int64_t distances = 0;       // rows of r, of relative positions; 0: there are none
  // Where documents begin, in sequence b 3 b positions later; none: all of a sequence is one.
  std::vector<int64_t> documents = {};
  double dropout = 0;                           // the share of probabilities that become 0
  std::vector<double> slopes = {}, sinks = {};  // (NH) each, or none

  int64_t NH() const { return int64_t(kv_of_head.size()); }
  int num_kv_heads() const {
    int last = 0;
    for (const Sources& sources : kv_of_head) last = std::max(last, *std::max_element(sources.begin(), sources.end()));
    return last + 1;
  }
  MaskCase mask(int64_t head) const { return masks.empty() ? MaskCase() : masks[head]; }
  int64_t queries() const { return T - first_query; }
  // Where the document of position t in sequence b begins.
  int64_t document(int64_t b, int64_t t) const {
    int64_t begin = 0;
    for (int64_t first : documents)
      if (first + 3 * b <= t) begin = std::max(begin, first + 3 * b);
    return begin;
  }
  int64_t rows() const { return B * T; }
  int64_t query_rows() const { return B * queries(); }
};

// Sets one mask for all query heads.
inline Case with_mask(Case c, const MaskCase& mask) {
  c.masks.assign(size_t(c.NH()), mask);
  return c;
}

inline std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << "B = " << c.B << ", T = " << c.T << ", HS = " << c.HS << ", K/V heads " << testing::PrintToString(c.kv_of_head)
      << ", " << c.own_kv_heads << " own, dq " << (c.dq_accumulate ? "+=" : "=") << (c.v_apart ? ", v apart" : "");
  for (const MaskCase& m : c.masks) out << ", mask (" << m << ")";
  return out << ", topk " << c.topk << ", first query " << c.first_query << ", distances " << c.distances
             << ", documents at " << testing::PrintToString(c.documents) << ", dropout " << c.dropout << ", slopes "
             << testing::PrintToString(c.slopes) << ", sinks " << testing::PrintToString(c.sinks);
}

// qkv (B*T, q | k of own K/V heads | v of own K/V heads | 8 unused columns), and source_kv, the same without q, for
// shared K/V; their gradients dqkv and shared_dkv have the same columns and other strides. Odd K/V heads have a
// gradient already, which is added to; so has q with dq_accumulate. In the columns of q and its gradient the queries
// have the first B * queries rows; q is NaN in the others.
struct Layer {
  Case c;
  int64_t own, shared, q_stride, source_stride, shared_dkv_stride, apart_stride;
  std::vector<floatX> qkv, source_kv, dqkv, shared_dkv, dout;  // as they are before
  std::vector<floatX> apart_v, apart_dv;                       // with v_apart
  std::vector<floatX> relative_q, relative_r;                  // with relative positions
  std::vector<floatX> sinks;
  DeviceArray<floatX> d_qkv, d_source_kv, d_dqkv, d_shared_dkv, d_apart_v, d_apart_dv, d_dout, d_out;
  DeviceArray<floatX> d_relative_q, d_relative_r, d_relative_dq, d_relative_dr;
  DeviceArray<floatX> d_sinks;
  DeviceArray<float> d_dsinks;
  DeviceArray<float> d_lse, d_delta, d_topk_score, d_scratch, d_dr_of_sequences;
  DeviceArray<int> d_topk_last, d_first_keys, d_last_queries;
  std::vector<uint64_t> dropout_keys;
  DeviceArray<uint64_t> d_dropout_keys;
  DeviceAttention kv_heads;
  AttentionArgs args;

  explicit Layer(const Case& c)
      : c(c), own(c.own_kv_heads), shared(c.num_kv_heads() - own), q_stride((c.NH() + 2 * own) * c.HS + 8),
        source_stride(2 * shared * c.HS + 16), shared_dkv_stride(2 * shared * c.HS + 24),
        apart_stride((own + shared) * c.HS + 32) {
    qkv = drawn_values(c.rows() * q_stride, 1);
    source_kv = drawn_values(c.rows() * source_stride, 2);
    dout = drawn_values(c.query_rows() * C(), 3);
    dqkv = nans<floatX>(c.rows() * q_stride);
    shared_dkv = nans<floatX>(c.rows() * shared_dkv_stride);
    if (c.v_apart) apart_v = drawn_values(c.rows() * apart_stride, 5), apart_dv = nans<floatX>(c.rows() * apart_stride);
    if (c.distances > 0) {
      relative_q = drawn_values(c.query_rows() * C(), 6), relative_r = drawn_values(c.distances * C(), 7);
      scale(relative_q, {c.query_rows(), C(), C(), 0}, c.q_scale);
    }
    scale(qkv, q(), c.q_scale);
    for (int64_t row = c.query_rows(); row < c.rows(); row++)
      std::fill_n(&qkv[row * q_stride], C(), nans<floatX>(1)[0]);
    if (c.dq_accumulate) fill(dqkv, q(), 4);
    for (int n = 0; n < c.num_kv_heads(); n++) {
      scale(k_buffer(n), k(n), c.k_scale);
      if (dk_accumulates(n)) fill(dk_buffer(n), dk(n), uint32_t(10 + 2 * n));
      if (dv_accumulates(n)) fill(dv_buffer(n), dv(n), uint32_t(11 + 2 * n));
    }
    upload();
  }

  static constexpr float sinks_before = 0.5f;  // their gradients, which are added to
  int64_t C() const { return c.NH() * c.HS; }
  static bool dk_accumulates(int kv_head) { return kv_head % 2 == 1; }
  bool dv_accumulates(int kv_head) const { return dk_accumulates(kv_head) != c.v_apart; }
  Matrix q() const { return {c.query_rows(), C(), q_stride, 0}; }
  Matrix k(int n) const {
    if (n < own) return {c.rows(), c.HS, q_stride, C() + n * c.HS};
    return {c.rows(), c.HS, source_stride, (n - own) * c.HS};
  }
  Matrix dk(int n) const {
    if (n < own) return k(n);
    return {c.rows(), c.HS, shared_dkv_stride, (n - own) * c.HS};
  }
  Matrix v(int n) const { return from_k_to_v(k(n), n); }
  Matrix dv(int n) const { return from_k_to_v(dk(n), n); }

  // Where k, v, dk and dv of a K/V head are, before.
  std::vector<floatX>& k_buffer(int n) { return n < own ? qkv : source_kv; }
  std::vector<floatX>& v_buffer(int n) { return c.v_apart ? apart_v : k_buffer(n); }
  std::vector<floatX>& dk_buffer(int n) { return n < own ? dqkv : shared_dkv; }
  std::vector<floatX>& dv_buffer(int n) { return c.v_apart ? apart_dv : dk_buffer(n); }

  void upload() {
    d_qkv = DeviceArray<floatX>(qkv), d_source_kv = DeviceArray<floatX>(source_kv), d_dqkv = DeviceArray<floatX>(dqkv);
    d_shared_dkv = DeviceArray<floatX>(shared_dkv), d_dout = DeviceArray<floatX>(dout);
    d_apart_v = DeviceArray<floatX>(apart_v), d_apart_dv = DeviceArray<floatX>(apart_dv);
    d_out = DeviceArray<floatX>(nans<floatX>(c.query_rows() * C()));
    d_lse = DeviceArray<float>(nans<float>(c.query_rows() * c.NH()));
    d_delta = DeviceArray<float>(nans<float>(c.query_rows() * c.NH()));
    d_topk_score = DeviceArray<float>(nans<float>(c.topk > 0 ? c.query_rows() * c.NH() : 0));
    d_topk_last = DeviceArray<int>(std::vector<int>(size_t(c.topk > 0 ? c.query_rows() * c.NH() : 0), -7));
    std::vector<KVHead> heads;
    std::vector<int> query_heads;
    int64_t partial_sums = 0;
    for (int n = 0; n < c.num_kv_heads(); n++) {
      floatX *k_from = n < own ? d_qkv.data : d_source_kv.data, *v_from = c.v_apart ? d_apart_v.data : k_from;
      floatX *k_to = n < own ? d_dqkv.data : d_shared_dkv.data, *v_to = c.v_apart ? d_apart_dv.data : k_to;
      KVHead head = {k_from + k(n).offset,
                     v_from + v(n).offset,
                     k(n).stride,
                     v(n).stride,
                     k_to + dk(n).offset,
                     v_to + dv(n).offset,
                     dk(n).stride,
                     dv(n).stride,
                     dk_accumulates(n),
                     dv_accumulates(n),
                     int(query_heads.size()),
                     0};
      for (int i = 0; i < int(c.NH()); i++)
        for (int source : c.kv_of_head[i])
          if (source == n) query_heads.push_back(i), head.num_query_heads++;
      if (needs_scratch(head.num_query_heads)) partial_sums += head.num_query_heads;
      heads.push_back(head);
    }
    std::vector<AttentionMask> masks;
    for (const MaskCase& mask : c.masks) masks.push_back(attention_mask(mask));
    if (!c.slopes.empty()) masks.resize(size_t(c.NH()));
    for (size_t i = 0; i < c.slopes.size(); i++) masks[i].clauses.slope = float(c.slopes[i] * std::sqrt(double(c.HS)));
    kv_heads = DeviceAttention(heads, query_heads, masks);
    d_scratch = DeviceArray<float>(nans<float>(attention_backward_scratch(c.B, c.T, c.HS, partial_sums)));
    args = kv_heads.args;
    args.B = c.B, args.T = c.T, args.HS = c.HS, args.first_query = c.first_query;
    args.q = d_qkv.data, args.q_stride = q_stride, args.out = d_out.data, args.lse = d_lse.data,
    args.dout = d_dout.data;
    args.dq = d_dqkv.data, args.dq_stride = q_stride, args.dq_accumulate = c.dq_accumulate, args.delta = d_delta.data;
    args.topk = c.topk, args.topk_score = d_topk_score.data, args.topk_last = d_topk_last.data,
    args.scratch = d_scratch.data;
    for (double sink : c.sinks) sinks.push_back(floatX(float(sink)));
    d_sinks = DeviceArray<floatX>(sinks), d_dsinks = DeviceArray<float>(std::vector<float>(sinks.size(), sinks_before));
    if (!c.sinks.empty()) args.sinks = {d_sinks.data, d_dsinks.data};
    if (c.distances > 0) upload_relative();
    if (!c.documents.empty()) upload_documents();
    for (int64_t b = 0; b < c.B; b++) dropout_keys.push_back(dropout_key(1337, 3, b));
    d_dropout_keys = DeviceArray<uint64_t>(dropout_keys);
    if (c.dropout > 0) args.dropout = dropout_of(d_dropout_keys.data);
  }
  // Dropout of the third layer's probabilities.
  Dropout dropout_of(const uint64_t* keys) const {
    return make_dropout(keys, c.dropout, DropoutSite::probabilities, 2);
  }

  void forward() { attention_forward(args); }
  void backward() { attention_backward(args); }

  // Rows of q' one after the other; empty without relative positions.
  std::vector<floatX> relative_q_of(const std::vector<int64_t>& rows) const {
    std::vector<floatX> of_rows;
    for (int64_t row : rows)
      if (c.distances > 0) of_rows.insert(of_rows.end(), &relative_q[row * C()], &relative_q[row * C()] + C());
    return of_rows;
  }

  // out, dqkv, shared_dkv, apart_dv, and the gradients of relative positions.
  std::vector<std::vector<floatX>> results() const {
    return {d_out.to_host(),      d_dqkv.to_host(),        d_shared_dkv.to_host(),
            d_apart_dv.to_host(), d_relative_dq.to_host(), d_relative_dr.to_host()};
  }

  // The first key of each sequence's queries from this position on.
  std::vector<int> first_keys_from(int64_t first_query, int64_t T) const {
    std::vector<int> keys;
    for (int64_t b = 0; b < c.B; b++)
      for (int64_t t = first_query; t < T; t++) keys.push_back(int(c.document(b, t)));
    return keys;
  }

 private:
  void upload_documents() {
    std::vector<int> last_queries;
    for (int64_t b = 0; b < c.B; b++)
      for (int64_t j = 0; j < c.T; j++) {
        int64_t last = j;
        while (last + 1 < c.T && c.document(b, last + 1) == c.document(b, j)) last++;
        last_queries.push_back(int(last));
      }
    d_first_keys = DeviceArray<int>(first_keys_from(c.first_query, c.T));
    d_last_queries = DeviceArray<int>(last_queries);
    args.first_keys = d_first_keys.data, args.last_queries = d_last_queries.data;
  }
  void upload_relative() {
    d_relative_q = DeviceArray<floatX>(relative_q), d_relative_r = DeviceArray<floatX>(relative_r);
    d_relative_dq = DeviceArray<floatX>(nans<floatX>(c.query_rows() * C()));
    d_relative_dr = DeviceArray<floatX>(nans<floatX>(c.distances * C()));
    d_dr_of_sequences = DeviceArray<float>(nans<float>(c.B * c.distances * C()));
    args.relative = {d_relative_q.data,  d_relative_r.data,  c.distances,
                     d_relative_dq.data, d_relative_dr.data, d_dr_of_sequences.data};
  }
  Matrix from_k_to_v(Matrix m, int kv_head) const {
    if (c.v_apart) return {m.rows, m.columns, apart_stride, kv_head * c.HS};
    m.offset += (kv_head < own ? own : shared) * c.HS;
    return m;
  }
  void scale(std::vector<floatX>& buffer, const Matrix& m, double factor) const {
    for (int64_t row = 0; row < m.rows; row++)
      for (int64_t i = 0; i < m.columns; i++) {
        floatX& x = buffer[m.at(row, i)];
        const double value = double(float(x)) * factor;
        x = floatX(float(c.whole_numbers ? std::nearbyint(value) : value));
      }
  }
  static void fill(std::vector<floatX>& buffer, const Matrix& m, uint32_t tag) {
    const std::vector<floatX> x = drawn_values(m.rows * m.columns, tag);
    for (int64_t row = 0; row < m.rows; row++)
      for (int64_t i = 0; i < m.columns; i++) buffer[m.at(row, i)] = x[row * m.columns + i];
  }
};

// The formula's results, each (B*Q, ...) or, of dk and dv, (B*T, ...) without gaps, where Q is c.queries(). With
// `grid`, results are in floatX times grid, and so are the probabilities and ds where they are an operand of a tensor
// core, and nothing else: for grid = 1 that is the error that any kernel in floatX has, and for another one it is as
// large, but other values are rounded up.
struct Expected {
  const double grid;  // 0: without rounding
  // ||p dp k|| / sqrt(HS) and ||p dp q|| / sqrt(HS) over the queries that see one key, whose ds is the difference of
  // two equal terms
  double lone_dq_terms = 0, lone_dk_terms = 0;
  std::vector<double> out, lse, delta, dq;
  std::vector<double> relative_dq, relative_dr;  // (B*Q, C), (distances, C)
  std::vector<std::vector<double>> dk, dv;
  std::vector<double> dsinks;  // (NH), without what was there before

  explicit Expected(Layer& layer, double grid = 0) : grid(grid), topk(layer.c.topk) {
    const Case& c = layer.c;
    const int64_t NH = c.NH(), HS = c.HS, C = NH * HS;
    const std::vector<double> q = pick(layer.qkv, layer.q()), dout = pick(layer.dout, {c.query_rows(), C, C, 0});
    out.resize(c.query_rows() * C), lse.resize(c.query_rows() * NH), delta = lse;
    dq = c.dq_accumulate ? pick(layer.dqkv, layer.q()) : out;
    const std::vector<double> relative_q = pick(layer.relative_q, {c.distances > 0 ? c.query_rows() : 0, C, C, 0}),
                              r = pick(layer.relative_r, {c.distances, C, C, 0});
    relative_dq.resize(relative_q.size()), relative_dr.resize(r.size());
    const Dropout dropout = layer.dropout_of(layer.dropout_keys.data());
    dsinks.resize(c.sinks.size());
    std::vector<std::vector<double>> k, v;
    for (int n = 0; n < c.num_kv_heads(); n++) {
      k.push_back(pick(layer.k_buffer(n), layer.k(n)));
      v.push_back(pick(layer.v_buffer(n), layer.v(n)));
      const std::vector<double> zeros(k.back().size(), 0.0);
      dk.push_back(layer.dk_accumulates(n) ? pick(layer.dk_buffer(n), layer.dk(n)) : zeros);
      dv.push_back(layer.dv_accumulates(n) ? pick(layer.dv_buffer(n), layer.dv(n)) : zeros);
    }
    for (int64_t b = 0; b < c.B; b++)
      for (int64_t head = 0; head < NH; head++)
        for (int64_t t = c.first_query; t < c.T; t++) {
          const int64_t query = t - c.first_query, at = (b * c.queries() + query) * C + head * HS,
                        statistic = (b * NH + head) * c.queries() + query, first_key = b * c.T * HS;
          keys.clear();
          sink = c.sinks.empty() ? -INFINITY : double(float(layer.sinks[head]));
          relative = c.distances == 0 ? RelativeQuery{} : RelativeQuery{&relative_q[at], &relative_dq[at]};
          for (size_t source = 0; source < c.kv_of_head[head].size(); source++)
            for (int64_t j = 0; j <= t; j++) {
              const int64_t key = first_key + j * HS;
              if (!sees(c.mask(head), t, j) || j < c.document(b, t)) continue;
              const int n = c.kv_of_head[head][source];
              keys.push_back({&k[n][key], &v[n][key], &dk[n][key], &dv[n][key], nullptr, nullptr, 0, 1, 0, 0});
              if (!c.slopes.empty()) keys.back().lowered = c.slopes[head] * double(t - j);
              if (c.dropout > 0)
                keys.back().kept = keeps_probability(dropout, b, head, int64_t(source), t, j) / (1 - c.dropout);
              if (c.distances == 0) continue;
              CHECK(t - j < c.distances);
              const int64_t of_distance = (c.distances - 1 - (t - j)) * C + head * HS;
              keys.back().r = &r[of_distance], keys.back().dr = &relative_dr[of_distance];
            }
          attend(&out[at], lse[statistic], delta[statistic], &dq[at], &q[at], &dout[at], HS);
          if (!c.sinks.empty()) dsinks[head] -= std::exp(sink - lse[statistic]) * delta[statistic];
        }
    lone_dq_terms = std::sqrt(lone_dq_terms), lone_dk_terms = std::sqrt(lone_dk_terms);
    round_all(dq), round_all(relative_dq), round_all(relative_dr);
    for (int n = 0; n < c.num_kv_heads(); n++) round_all(dk[n]), round_all(dv[n]);
  }

 private:
  struct Key {
    const double *k, *v;
    double *dk, *dv;
    const double* r;  // null without relative positions
    double* dr;
    double lowered;  // by how much the distance lowers the score
    double kept;     // 0 or 1 / (1 - p) with dropout, 1 without
    double prob, dprob;
  };
  struct RelativeQuery {
    const double* q = nullptr;
    double* dq = nullptr;
  };
  const int topk;
  double sink = -INFINITY;  // of the head
  RelativeQuery relative;   // of the query
  std::vector<Key> keys;    // those that a query sees

  __attribute__((no_sanitize("address"))) double round(double x) const {
    return grid > 0 ? double(float(floatX(float(x / grid)))) * grid : x;
  }
  __attribute__((no_sanitize("address"))) double as_operand(double x) const { return is_16_bit ? round(x) : x; }
  void round_all(std::vector<double>& values) const {
    for (double& x : values) x = round(x);
  }

  // One query and the keys that it sees. Without AddressSanitizer, or it would take longer than the emulated kernels.
  __attribute__((no_sanitize("address"))) void attend(double* out, double& lse, double& delta, double* dq,
                                                      const double* q, const double* dout, int64_t HS) {
    const double scale = 1 / std::sqrt(double(HS));
    for (Key& key : keys) {
      double score = 0, dprob = 0;
#pragma omp simd reduction(+ : score, dprob)
      for (int64_t i = 0; i < HS; i++) score += q[i] * key.k[i], dprob += dout[i] * key.v[i];
      if (key.r != nullptr)
        for (int64_t i = 0; i < HS; i++) score += relative.q[i] * key.r[i];
      key.prob = score * scale - key.lowered, key.dprob = dprob * key.kept;
    }
    if (topk > 0 && topk < int(keys.size())) {
      std::stable_sort(keys.begin(), keys.end(), [](const Key& a, const Key& b) { return a.prob > b.prob; });
      keys.resize(size_t(topk));
    }
    if (keys.empty()) {
      lse = sink > -INFINITY ? sink : INFINITY;
      return;
    }
    double max = std::max(sink, -1e300), sum = 0;
    for (const Key& key : keys) max = std::max(max, key.prob);
    sum = std::exp(sink - max);
    for (Key& key : keys) sum += key.prob = std::exp(key.prob - max);
    lse = max + std::log(sum);
    for (Key& key : keys) {
      const double p = as_operand(key.prob) * key.kept;
#pragma omp simd
      for (int64_t i = 0; i < HS; i++) out[i] += p * key.v[i];
      key.prob /= sum;
    }
    for (int64_t i = 0; i < HS; i++) out[i] = round(out[i] / sum), delta += dout[i] * out[i];
    for (const Key& key : keys) {
      const double p = as_operand(key.prob) * key.kept, ds = as_operand(key.prob * (key.dprob - delta)) * scale;
      for (int64_t i = 0; keys.size() == 1 && i < HS; i++) {
        lone_dq_terms += std::pow(key.prob * key.dprob * scale * key.k[i], 2);
        lone_dk_terms += std::pow(key.prob * key.dprob * scale * q[i], 2);
      }
#pragma omp simd
      for (int64_t i = 0; i < HS; i++) {
        dq[i] += ds * key.k[i];
        key.dk[i] += ds * q[i];
        key.dv[i] += p * dout[i];
      }
      if (key.r == nullptr) continue;
#pragma omp simd
      for (int64_t i = 0; i < HS; i++) relative.dq[i] += ds * key.r[i], key.dr[i] += ds * relative.q[i];
    }
  }
};

// Whether the device has no kernels for it: models with it are refused by name (test_loss_scaling).
inline bool is_refused(const Case& c) {
  return without_kernels(c.topk > 0, /*has_lsh=*/false, c.distances > 0, c.HS) != nullptr;
}

// `slack`: a factor for the tolerances.
inline void check(const Case& c, double slack = 1) {
  if (is_refused(c)) return;
  SCOPED_TRACE(testing::Message() << c);
  Layer layer(c);
  const Expected exact(layer);
  std::vector<Expected> rounded;
  const double num_grids = c.T < 16 ? 16 : 3;
  for (int i = 0; is_16_bit && i < num_grids; i++) rounded.emplace_back(layer, std::exp2(i / num_grids));
  // `of`: which of the results.
  auto compare = [&](const char* what, const auto& values, auto of, double cancelled = 0) {
    const std::vector<double> expected = of(exact);
    // For queries that see one key, as with T = 1, the terms of dq and dk cancel: where these terms are larger than the
    // sum of all others, errors are relative to their size.
    double norm = 0;
    for (double x : expected) norm += x * x;
    norm = std::sqrt(norm);
    const double factor = norm > 0 && cancelled > norm ? norm / cancelled : 1,
                 norm_if_zero = cancelled > 0 ? cancelled : 1;
    const double error = factor * relative_error(values, expected, norm_if_zero);
    // Where a query sees two or three keys, rounding alone may cost more than the tolerance, and by chance little: one
    // element that is rounded the other way then changes much.
    double of_the_format = 0;
    for (const Expected& x : rounded)
      of_the_format = std::max(of_the_format, factor * relative_error(of(x), expected, norm_if_zero));
    if (of_the_format <= tolerance * slack) { EXPECT_LE(error, tolerance * slack) << what; }
    EXPECT_LE(error, is_16_bit ? 1.5 * of_the_format + 1e-5 : INFINITY) << what;
  };
  layer.forward();
  layer.backward();
  std::vector<double> lse, exact_lse;  // where it is finite
  const std::vector<float> all_lse = layer.d_lse.to_host();
  for (size_t i = 0; i < all_lse.size(); i++) {
    if (std::isinf(exact.lse[i])) EXPECT_EQ(all_lse[i], INFINITY) << "lse of a query that sees no key";
    else lse.push_back(all_lse[i]), exact_lse.push_back(exact.lse[i]);
  }
  EXPECT_LE(relative_error(lse, exact_lse), 1e-5) << "lse";
  compare("out", layer.d_out.to_host(), [](const Expected& x) { return x.out; });
  compare("delta", layer.d_delta.to_host(), [](const Expected& x) { return x.delta; });
  if (!c.sinks.empty()) {
    std::vector<float> dsinks = layer.d_dsinks.to_host();
    for (float& x : dsinks) x -= Layer::sinks_before;
    compare("dsinks", dsinks, [](const Expected& x) { return x.dsinks; });
  }
  std::vector<floatX> dqkv = layer.d_dqkv.to_host(), shared_dkv = layer.d_shared_dkv.to_host(),
                      apart_dv = layer.d_apart_dv.to_host();
  const double of_dq = exact.lone_dq_terms, of_dk = exact.lone_dk_terms;
  compare(
      "dq", take(dqkv, layer.q()), [](const Expected& x) { return x.dq; }, of_dq);
  take(layer.dqkv, layer.q());
  if (c.distances > 0) {
    compare(
        "relative dq", layer.d_relative_dq.to_host(), [](const Expected& x) { return x.relative_dq; }, of_dq);
    compare(
        "dr", layer.d_relative_dr.to_host(), [](const Expected& x) { return x.relative_dr; }, of_dk);
  }
  for (int n = 0; n < c.num_kv_heads(); n++) {
    std::vector<floatX>&dk = n < layer.own ? dqkv : shared_dkv, &dv = c.v_apart ? apart_dv : dk;
    compare(
        "dk", take(dk, layer.dk(n)), [n](const Expected& x) { return x.dk[n]; }, of_dk);
    compare("dv", take(dv, layer.dv(n)), [n](const Expected& x) { return x.dv[n]; });
    take(layer.dk_buffer(n), layer.dk(n)), take(layer.dv_buffer(n), layer.dv(n));
  }
  EXPECT_TRUE(same_bits(dqkv, layer.dqkv) && same_bits(shared_dkv, layer.shared_dkv) &&
              same_bits(apart_dv, layer.apart_dv))
      << "wrote to unused columns";
}

// Results for the queries [first_query, T) of `layer`, whose keys are the positions [0, T) of each sequence. q, out and
// lse are compact, between elements that must not be read (NaN) or written (7): the first of q, the last of out and
// lse.
struct PartialForward {
  int64_t rows, C, NH, queries;
  std::vector<floatX> out;  // (B, Q, C)
  std::vector<float> lse;   // (B, NH, Q)

  PartialForward(const Layer& layer, int64_t first_query, int64_t T)
      : rows(layer.c.B * (T - first_query)), C(layer.C()), NH(layer.c.NH()), queries(T - first_query) {
    const int64_t q_stride = C + 16, gap = 64;
    std::vector<floatX> q = nans<floatX>(gap + rows * q_stride);
    std::vector<int64_t> layer_rows;
    for (int64_t row = 0; row < rows; row++) {
      layer_rows.push_back(row / queries * layer.args.T + first_query + row % queries);
      for (int64_t i = 0; i < C; i++) q[gap + row * q_stride + i] = layer.qkv[layer.q().at(layer_rows.back(), i)];
    }
    const DeviceArray<floatX> d_q(q), d_relative_q(layer.relative_q_of(layer_rows)),
        d_out(std::vector<floatX>(rows * C + gap, floatX(7.0f)));
    const DeviceArray<float> d_lse(std::vector<float>(rows * NH + gap, 7.0f));
    const DeviceArray<float> d_partials(
        nans<float>(attention_partials(layer.c.B, NH, layer.c.HS, T, layer.args.kv_per_head)));
    AttentionArgs args = layer.args;
    args.partials = d_partials.data;
    const DeviceArray<int> d_first_keys(layer.first_keys_from(first_query, T));
    if (args.first_keys != nullptr) args.first_keys = d_first_keys.data;
    args.T = T, args.first_query = first_query;
    args.q = d_q.data + gap, args.q_stride = q_stride, args.out = d_out.data, args.lse = d_lse.data;
    if (layer.c.distances > 0) args.relative.q = d_relative_q.data;
    attention_forward(args);
    out = d_out.to_host(), lse = d_lse.to_host();
    for (int64_t i = 0; i < gap; i++) {
      EXPECT_EQ(float(out[rows * C + i]), 7.0f) << "wrote after out";
      EXPECT_EQ(lse[rows * NH + i], 7.0f) << "wrote after lse";
    }
    out.resize(rows * C), lse.resize(rows * NH);
  }
};

inline double finite(float lse) { return std::isinf(lse) ? 1e3 : double(lse); }

// Compares with the same rows of a forward pass of all positions: out (B, T, C) and lse (B, NH, T).
inline void check_partial(const PartialForward& part, int64_t T, const std::vector<floatX>& out,
                          const std::vector<float>& lse) {
  const int64_t first_query = T - part.queries;
  std::vector<double> expected, expected_lse, lse_of_part;
  for (int64_t row = 0; row < part.rows; row++)
    for (int64_t i = 0; i < part.C; i++)
      expected.push_back(real(float(out[(row / part.queries * T + first_query + row % part.queries) * part.C + i])));
  for (int64_t i = 0; i < part.rows * part.NH; i++)
    expected_lse.push_back(finite(lse[i / part.queries * T + first_query + i % part.queries])),
        lse_of_part.push_back(finite(part.lse[i]));
  EXPECT_LE(relative_error(part.out, expected), tolerance);
  EXPECT_LE(relative_error(lse_of_part, expected_lse), 1e-6);
}

// All have masks and sources of their own.
inline Case general_case(int64_t B, int64_t T, int64_t HS) {
  Case c = {B, T, HS, {0, {0, 1}, {1, 2}, 2, 0, 1, {0, 2}}, 1};
  c.masks = {{0},
             {37},
             {0, MaskPattern::stride, 6},
             {0, MaskPattern::local_or_stride, 20},
             {50, MaskPattern::block, 33},
             {0, MaskPattern::column, 70, 3},
             {0, MaskPattern::block_or_column, 12, 2, {MaskPattern::local_or_stride, 5}}};
  return c;
}

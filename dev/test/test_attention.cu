// Attention and its gradients against the formula in double, on the device that this is compiled for: the CPU, the
// emulated GPU or a real one. The inputs are rounded to floatX first, so that what is compared is the kernels'
// arithmetic alone.
#include <gtest/gtest.h>  // TEST
#ifdef SLA_CPU
#include <omp.h>  // omp_set_num_threads
#endif
#include <algorithm>              // std::max, std::max_element, std::sort
#include <climits>                // INT_MAX
#include <cmath>                  // exp, log, pow, sqrt, isfinite, isinf, nearbyint
#include <initializer_list>       // std::initializer_list
#include <map>                    // std::map
#include <ostream>                // std::ostream
#include <vector>                 // std::vector
#include "dev/test/values.h"      // random_values, nans, relative_error, same_bits
#include "llmc/attention_args.h"  // AttentionArgs, KVHead, KVHeads
#include "llmc/device_memory.h"   // DeviceArray
#include "llmc/operations.h"      // attention_forward, attention_backward, copy_rows
#include "llmc/precision.h"       // floatX

// Relative, of a tensor's norm. In bf16 the limit is also 1.5 times the error of the formula in double with bf16 only
// where the kernels must have it.
constexpr bool is_bf16 = sizeof(floatX) == 2;
constexpr double tolerance = is_bf16 ? 8e-3 : 1e-5;

// ----------------------------------------------------------------------------
// A layer's attention as the model lays it out

// (rows, columns) in a buffer, from `offset` on, rows `stride` apart.
struct Matrix {
  int64_t rows, columns, stride, offset;
  int64_t at(int64_t row, int64_t column) const { return offset + row * stride + column; }
};
static std::vector<double> pick(const std::vector<floatX>& buffer, const Matrix& m) {
  std::vector<double> x;
  for (int64_t row = 0; row < m.rows; row++)
    for (int64_t i = 0; i < m.columns; i++) x.push_back(double(float(buffer[m.at(row, i)])));
  return x;
}
// The matrix's elements, which become 0 in the buffer: the rest of the buffer must be unchanged in the end.
static std::vector<floatX> take(std::vector<floatX>& buffer, const Matrix& m) {
  std::vector<floatX> x;
  for (int64_t row = 0; row < m.rows; row++)
    for (int64_t i = 0; i < m.columns; i++) {
      x.push_back(buffer[m.at(row, i)]);
      buffer[m.at(row, i)] = floatX(0.0f);
    }
  return x;
}

// The same values as random_values. To draw them would take longer than most tests do otherwise.
static std::vector<floatX> drawn_values(int64_t n, uint32_t tag) {
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
  std::vector<AttentionMask> masks = {};  // (NH), or none
  int topk = 0;
  bool v_apart = false;        // v, dv of all K/V heads are in buffers of their own, and where dk is =, dv is +=
  bool whole_numbers = false;  // q and k are, so that scores are exact, and many of them equal

  int64_t NH() const { return int64_t(kv_of_head.size()); }
  int num_kv_heads() const {
    int last = 0;
    for (const Sources& sources : kv_of_head) last = std::max(last, *std::max_element(sources.begin(), sources.end()));
    return last + 1;
  }
  AttentionMask mask(int64_t head) const { return masks.empty() ? AttentionMask() : masks[head]; }
  int64_t rows() const { return B * T; }
};

// Sets one mask for all query heads.
static Case with_mask(Case c, const AttentionMask& mask) {
  c.masks.assign(size_t(c.NH()), mask);
  return c;
}

static std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << "B = " << c.B << ", T = " << c.T << ", HS = " << c.HS << ", K/V heads " << testing::PrintToString(c.kv_of_head)
      << ", " << c.own_kv_heads << " own, dq " << (c.dq_accumulate ? "+=" : "=") << (c.v_apart ? ", v apart" : "");
  for (const AttentionMask& m : c.masks)
    out << ", mask (window " << m.window << ", pattern " << int(m.pattern) << ", s " << m.s << ", c " << m.c << ")";
  return out << ", topk " << c.topk;
}

// qkv (B*T, q | k of own K/V heads | v of own K/V heads | 8 unused columns), and source_kv, the same without q, for
// shared K/V; their gradients dqkv and shared_dkv likewise, with other strides. Odd K/V heads have a gradient already,
// which is added to; so has q with dq_accumulate.
struct Layer {
  Case c;
  int64_t own, shared, q_stride, source_stride, shared_dkv_stride, apart_stride;
  std::vector<floatX> qkv, source_kv, dqkv, shared_dkv, dout;  // as they are before
  std::vector<floatX> apart_v, apart_dv;                       // with v_apart
  DeviceArray<floatX> d_qkv, d_source_kv, d_dqkv, d_shared_dkv, d_apart_v, d_apart_dv, d_dout, d_out;
  DeviceArray<float> d_lse, d_delta, d_topk_score, d_scratch;
  DeviceArray<int> d_topk_last;
  KVHeads<floatX> kv_heads;
  AttentionArgs<floatX> args;

  explicit Layer(const Case& c)
      : c(c), own(c.own_kv_heads), shared(c.num_kv_heads() - own), q_stride((c.NH() + 2 * own) * c.HS + 8),
        source_stride(2 * shared * c.HS + 16), shared_dkv_stride(2 * shared * c.HS + 24),
        apart_stride((own + shared) * c.HS + 32) {
    qkv = drawn_values(c.rows() * q_stride, 1);
    source_kv = drawn_values(c.rows() * source_stride, 2);
    dout = drawn_values(c.rows() * C(), 3);
    dqkv = nans<floatX>(c.rows() * q_stride);
    shared_dkv = nans<floatX>(c.rows() * shared_dkv_stride);
    if (c.v_apart) apart_v = drawn_values(c.rows() * apart_stride, 5), apart_dv = nans<floatX>(c.rows() * apart_stride);
    scale(qkv, q(), c.q_scale);
    if (c.dq_accumulate) fill(dqkv, q(), 4);
    for (int n = 0; n < c.num_kv_heads(); n++) {
      scale(k_buffer(n), k(n), c.k_scale);
      if (dk_accumulates(n)) fill(dk_buffer(n), dk(n), uint32_t(10 + 2 * n));
      if (dv_accumulates(n)) fill(dv_buffer(n), dv(n), uint32_t(11 + 2 * n));
    }
    upload();
  }

  int64_t C() const { return c.NH() * c.HS; }
  static bool dk_accumulates(int kv_head) { return kv_head % 2 == 1; }
  bool dv_accumulates(int kv_head) const { return dk_accumulates(kv_head) != c.v_apart; }
  Matrix q() const { return {c.rows(), C(), q_stride, 0}; }
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
    d_out = DeviceArray<floatX>(nans<floatX>(c.rows() * C()));
    d_lse = DeviceArray<float>(nans<float>(c.rows() * c.NH()));
    d_delta = DeviceArray<float>(nans<float>(c.rows() * c.NH()));
    d_topk_score = DeviceArray<float>(nans<float>(c.topk > 0 ? c.rows() * c.NH() : 0));
    d_topk_last = DeviceArray<int>(std::vector<int>(size_t(c.topk > 0 ? c.rows() * c.NH() : 0), -7));
    std::vector<KVHead<floatX>> heads;
    std::vector<int> query_heads;
    int64_t partial_sums = 0;
    for (int n = 0; n < c.num_kv_heads(); n++) {
      floatX *k_from = n < own ? d_qkv.data : d_source_kv.data, *v_from = c.v_apart ? d_apart_v.data : k_from;
      floatX *k_to = n < own ? d_dqkv.data : d_shared_dkv.data, *v_to = c.v_apart ? d_apart_dv.data : k_to;
      KVHead<floatX> head = {k_from + k(n).offset,
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
      if (has_partial_sums(head.num_query_heads)) partial_sums += head.num_query_heads;
      heads.push_back(head);
    }
    kv_heads = KVHeads<floatX>(std::move(heads), std::move(query_heads), c.masks);
    d_scratch = DeviceArray<float>(nans<float>(attention_backward_scratch(c.B, c.T, c.HS, partial_sums)));
    args.B = c.B, args.T = c.T, args.HS = c.HS;
    kv_heads.set_args(args);
    args.q = d_qkv.data, args.q_stride = q_stride, args.out = d_out.data, args.lse = d_lse.data,
    args.dout = d_dout.data;
    args.dq = d_dqkv.data, args.dq_stride = q_stride, args.dq_accumulate = c.dq_accumulate, args.delta = d_delta.data;
    args.topk = c.topk, args.topk_score = d_topk_score.data, args.topk_last = d_topk_last.data,
    args.scratch = d_scratch.data;
  }

  void forward() { attention_forward(args); }
  void backward() { attention_backward(args); }

  // out, dqkv, shared_dkv and apart_dv.
  std::vector<std::vector<floatX>> results() const {
    return {d_out.to_host(), d_dqkv.to_host(), d_shared_dkv.to_host(), d_apart_dv.to_host()};
  }

 private:
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

// What the patterns say, as they are written in the paper (Child et al. 2019), of a query and a key with j <= t.
static bool sees(const AttentionMask& m, int64_t t, int64_t j) {
  const bool local = t - j <= m.s, stride = (t - j) % m.s == 0, block = j / m.s == t / m.s,
             column = j % m.s >= m.s - m.c;
  if (m.window > 0 && t - j >= m.window) return false;
  switch (m.pattern) {
    case MaskPattern::all: return true;
    case MaskPattern::stride: return stride;
    case MaskPattern::local_or_stride: return local || stride;
    case MaskPattern::block: return block;
    case MaskPattern::column: return column;
    case MaskPattern::block_or_column: return block || column;
  }
  return false;
}

// The formula's results, each (B*T, ...) without gaps. `rounded`: with results in floatX, and the probabilities and ds
// in floatX where they are an operand of a matmul, and nothing else: the error that any kernel in floatX has.
struct Expected {
  const bool rounded;
  // ||p dp k|| / sqrt(HS) and ||p dp q|| / sqrt(HS) over the queries that see one key, whose ds is the difference of
  // two equal terms
  double lone_dq_terms = 0, lone_dk_terms = 0;
  std::vector<double> out, lse, delta, dq;
  std::vector<std::vector<double>> dk, dv;

  explicit Expected(Layer& layer, bool rounded = false) : rounded(rounded), topk(layer.c.topk) {
    const Case& c = layer.c;
    const int64_t NH = c.NH(), HS = c.HS, C = NH * HS;
    const std::vector<double> q = pick(layer.qkv, layer.q()), dout = pick(layer.dout, {c.rows(), C, C, 0});
    out.resize(c.rows() * C), lse.resize(c.rows() * NH), delta = lse;
    dq = c.dq_accumulate ? pick(layer.dqkv, layer.q()) : out;
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
        for (int64_t t = 0; t < c.T; t++) {
          const int64_t at = (b * c.T + t) * C + head * HS, first_key = b * c.T * HS;
          keys.clear();
          for (int n : c.kv_of_head[head])
            for (int64_t j = 0; j <= t; j++) {
              const int64_t key = first_key + j * HS;
              if (sees(c.mask(head), t, j)) keys.push_back({&k[n][key], &v[n][key], &dk[n][key], &dv[n][key], 0, 0});
            }
          attend(&out[at], lse[(b * NH + head) * c.T + t], delta[(b * NH + head) * c.T + t], &dq[at], &q[at], &dout[at],
                 HS);
        }
    lone_dq_terms = std::sqrt(lone_dq_terms), lone_dk_terms = std::sqrt(lone_dk_terms);
    round_all(dq);
    for (int n = 0; n < c.num_kv_heads(); n++) round_all(dk[n]), round_all(dv[n]);
  }

 private:
  struct Key {
    const double *k, *v;
    double *dk, *dv;
    double prob, dprob;
  };
  const int topk;
  std::vector<Key> keys;  // those that a query sees

  __attribute__((no_sanitize("address"))) double round(double x) const {
    return rounded ? double(float(floatX(float(x)))) : x;
  }
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
      key.prob = score * scale, key.dprob = dprob;
    }
    if (topk > 0 && topk < int(keys.size())) {
      std::stable_sort(keys.begin(), keys.end(), [](const Key& a, const Key& b) { return a.prob > b.prob; });
      keys.resize(size_t(topk));
    }
    if (keys.empty()) {
      lse = INFINITY;
      return;
    }
    double max = -1e300, sum = 0;
    for (const Key& key : keys) max = std::max(max, key.prob);
    for (Key& key : keys) sum += key.prob = std::exp(key.prob - max);
    lse = max + std::log(sum);
    for (Key& key : keys) {
      const double p = round(key.prob);
#pragma omp simd
      for (int64_t i = 0; i < HS; i++) out[i] += p * key.v[i];
      key.prob /= sum;
    }
    for (int64_t i = 0; i < HS; i++) out[i] = round(out[i] / sum), delta += dout[i] * out[i];
    for (const Key& key : keys) {
      const double p = round(key.prob), ds = round(key.prob * (key.dprob - delta)) * scale;
      for (int64_t i = 0; keys.size() == 1 && i < HS; i++) {
        lone_dq_terms += std::pow(p * key.dprob * scale * key.k[i], 2);
        lone_dk_terms += std::pow(p * key.dprob * scale * q[i], 2);
      }
#pragma omp simd
      for (int64_t i = 0; i < HS; i++) {
        dq[i] += ds * key.k[i];
        key.dk[i] += ds * q[i];
        key.dv[i] += p * dout[i];
      }
    }
  }
};

// `slack`: a factor for the tolerances.
static void check(const Case& c, double slack = 1) {
  SCOPED_TRACE(testing::Message() << c);
  Layer layer(c);
  const Expected exact(layer), rounded = is_bf16 ? Expected(layer, /*rounded=*/true) : exact;
  auto compare = [&](const char* what, const auto& values, const std::vector<double>& expected,
                     const std::vector<double>& best, double cancelled = 0) {
    // Of queries that see one key, as for T = 1, the terms of dq and dk cancel: where these terms are larger than the
    // sum of all others, errors are relative to their size.
    double norm = 0;
    for (double x : expected) norm += x * x;
    norm = std::sqrt(norm);
    const double factor = norm > 0 && cancelled > norm ? norm / cancelled : 1,
                 norm_if_zero = cancelled > 0 ? cancelled : 1;
    // Where a query sees two or three keys, rounding to bf16 alone may cost more than the tolerance.
    const double error = factor * relative_error(values, expected, norm_if_zero);
    const double of_the_format = is_bf16 ? factor * relative_error(best, expected, norm_if_zero) : 0;
    if (of_the_format <= tolerance * slack) { EXPECT_LE(error, tolerance * slack) << what; }
    EXPECT_LE(error, is_bf16 ? 1.5 * of_the_format + 1e-5 : INFINITY) << what;
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
  compare("out", layer.d_out.to_host(), exact.out, rounded.out);
  compare("delta", layer.d_delta.to_host(), exact.delta, rounded.delta);
  std::vector<floatX> dqkv = layer.d_dqkv.to_host(), shared_dkv = layer.d_shared_dkv.to_host(),
                      apart_dv = layer.d_apart_dv.to_host();
  compare("dq", take(dqkv, layer.q()), exact.dq, rounded.dq, exact.lone_dq_terms);
  take(layer.dqkv, layer.q());
  for (int n = 0; n < c.num_kv_heads(); n++) {
    std::vector<floatX>&dk = n < layer.own ? dqkv : shared_dkv, &dv = c.v_apart ? apart_dv : dk;
    compare("dk", take(dk, layer.dk(n)), exact.dk[n], rounded.dk[n], exact.lone_dk_terms);
    compare("dv", take(dv, layer.dv(n)), exact.dv[n], rounded.dv[n]);
    take(layer.dk_buffer(n), layer.dk(n)), take(layer.dv_buffer(n), layer.dv(n));
  }
  EXPECT_TRUE(same_bits(dqkv, layer.dqkv) && same_bits(shared_dkv, layer.shared_dkv) &&
              same_bits(apart_dv, layer.apart_dv))
      << "wrote to unused columns";
}

// ----------------------------------------------------------------------------

TEST(Attention, MatchesTheFormulaForSeveralLengths) {
  for (int64_t T : {1, 7, 63, 64, 65, 127, 128, 129, 300}) check({2, T, 16, {0, 1}, 2});
}

TEST(Attention, MatchesTheFormulaForEveryLengthHeadSizeAndWiring) {
  const std::vector<Case> wirings = {{0, 0, 0, {0, 1}, 2},     // plain: dk and dv of the first K/V head are =, of the
                                                               // second +=
                                     {0, 0, 0, {0, 1}, 0},     // all K/V from the source layer
                                     {0, 0, 0, {0, 1, 2}, 1},  // as with SLA: that of the last heads
                                     {0, 0, 0, {0, 0, 1, 1}, 1},  // grouped-query attention
                                     {0, 0, 0, {1, 0, 1}, 2}};    // in no order
  size_t i = 0;
  for (int64_t T : {1, 7, 64, 127, 128, 129, 300})
    for (int64_t HS : {32, 64, 80, 96, 128})
      for (size_t n = 0; n < (T < 300 && is_bf16 ? wirings.size() : 2); n++, i++) {  // two in turn where all would take
                                                                                     // minutes
        Case c = wirings[i % wirings.size()];
        c.B = 1 + int64_t(i) % 3, c.T = T, c.HS = HS, c.dq_accumulate = i % 2 == 1;
        check(c);
      }
}

TEST(Attention, WorksForHeadSizesThatAreMultiplesOfEight) {
  for (int64_t HS : {8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 104, 128}) check({1, 70, HS, {0, 1}, 1});
  check({3, 33, 80, {0, 1}, 2});
}

TEST(Attention, ReadsSharedKVAndAddsToItsGradients) {
  check({2, 70, 8, {0, 1, 2, 3}, 4});  // plain: dk and dv of even K/V heads are =, of odd ones +=
  check({2, 70, 8, {0, 1, 2, 3}, 0});  // all K/V from the source layer
  check({2, 70, 24, {1, 0, 3, 2}, 2});
  check({3, 129, 72, {1, 0}, 1});
}

// BUG (build/bf16/test_attention_emu) llmc/cuda/attention_tiles.h: `a.query_heads[tile.query_head]` ->
//   `a.query_heads[kv.first_query_head]`
TEST(Attention, SetsDqOrAddsToIt) {
  for (bool accumulate : {false, true})
    for (int64_t HS : {16, 96})
      for (int64_t T : {1, 130}) {  // the latter: several tiles
        Case c = {2, T, HS, {0, 1, 0}, 1};
        c.dq_accumulate = accumulate;
        check(c);
      }
}

TEST(Attention, SumsAKVHeadsGradientsOverItsQueryHeads) {
  check({2, 70, 8, {0, 0, 1, 1}, 1});
  check({2, 70, 8, {0, 0, 0}, 1});  // multi-query
  check({1, 70, 8, {2, 0, 1, 0}, 1});
  check({1, 129, 96, {1, 0, 1}, 1});
}

// BUG (build/bf16/test_attention_emu) llmc/cuda/attention_bf16.h: `exp2_approx(s.x[m][n][i] * to_exp2 - shift)` ->
//   `exp2_approx(s.x[m][n][i] * to_exp2)`
// |q k| is up to 1e4. A score that large has an absolute error near 1e-3 in float, and so has log p; and where p is
// almost 1, dp - delta is a difference of almost equal numbers, one of which was rounded to floatX with out, which
// costs as many digits in an otherwise exact computation.
TEST(Attention, StaysFiniteAndRightForHugeScores) {
  const double slack = is_bf16 ? 15 : 30;
  check({1, 130, 16, {0, 1}, 1, 30, 30}, slack);
  check({1, 300, 64, {0, 1}, 1, 18, 18}, slack);
  check({1, 70, 128, {0, 1}, 1, 16, 16}, slack);
}

TEST(Attention, OfEqualScoresIsTheMeanOfTheValues) {
  check({1, 130, 16, {0, 1}, 1, /*q_scale=*/0});
  check({1, 70, 72, {0, 1}, 1, 1, /*k_scale=*/0});
}

TEST(Attention, OfASinglePositionIsItsValue) {
  for (int64_t HS : {8, 128}) {
    Layer layer({3, 1, HS, {0, 1}, 1});
    layer.forward();
    layer.backward();
    const std::vector<floatX> out = layer.d_out.to_host(), dqkv = layer.d_dqkv.to_host();
    for (int64_t b = 0; b < 3; b++)
      for (int64_t i = 0; i < HS; i++) {
        EXPECT_EQ(float(out[b * 2 * HS + i]), float(layer.qkv[layer.v(0).at(b, i)]));
        EXPECT_EQ(float(dqkv[layer.dv(0).at(b, i)]), float(layer.dout[b * 2 * HS + i]));
      }
  }
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
    for (int64_t row = 0; row < rows; row++)
      for (int64_t i = 0; i < C; i++) {
        const int64_t layer_row = row / queries * layer.args.T + first_query + row % queries;
        q[gap + row * q_stride + i] = layer.qkv[layer.q().at(layer_row, i)];
      }
    const DeviceArray<floatX> d_q(q), d_out(std::vector<floatX>(rows * C + gap, floatX(7.0f)));
    const DeviceArray<float> d_lse(std::vector<float>(rows * NH + gap, 7.0f));
    const DeviceArray<float> d_partials(
        nans<float>(attention_partials(layer.c.B, NH, layer.c.HS, T, layer.args.kv_per_head)));
    AttentionArgs<floatX> args = layer.args;
    args.partials = d_partials.data;
    args.T = T, args.first_query = first_query;
    args.q = d_q.data + gap, args.q_stride = q_stride, args.out = d_out.data, args.lse = d_lse.data;
    attention_forward(args);
    out = d_out.to_host(), lse = d_lse.to_host();
    for (int64_t i = 0; i < gap; i++) {
      EXPECT_EQ(float(out[rows * C + i]), 7.0f) << "wrote after out";
      EXPECT_EQ(lse[rows * NH + i], 7.0f) << "wrote after lse";
    }
    out.resize(rows * C), lse.resize(rows * NH);
  }
};

static double finite(float lse) { return std::isinf(lse) ? 1e3 : double(lse); }

// Compares with the same rows of a forward pass of all positions: out (B, T, C) and lse (B, NH, T).
static void check_partial(const PartialForward& part, int64_t T, const std::vector<floatX>& out,
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

TEST(Attention, OfTheLastQueriesIsThatOfTheWhole) {
  for (int64_t HS : {24, 64, 96})
    for (int64_t B : {2, 3}) {
      Layer layer({B, 140, HS, {0, 1, 0}, 1});
      layer.forward();
      const std::vector<floatX> out = layer.d_out.to_host();
      const std::vector<float> lse = layer.d_lse.to_host();
      for (int64_t first_query : {1, 63, 64, 65, 128, 139}) {
        SCOPED_TRACE(testing::Message() << "HS = " << HS << ", B = " << B << ", first query " << first_query);
        check_partial(PartialForward(layer, first_query, 140), 140, out, lse);
      }
    }
}

// As generation does: a prompt at once, then position by position, then several together. The cache grows with each,
// and beside multiples of 64, the keys of a tile, by one: a mask that is off by one shows there alone.
TEST(Attention, OfAGrowingSequenceIsThatOfTheWhole) {
  Layer layer({1, 140, 24, {0, 1, 0}, 1});
  layer.forward();
  const std::vector<floatX> out = layer.d_out.to_host();
  const std::vector<float> lse = layer.d_lse.to_host();
  int64_t first = 0;
  for (int64_t end : {5, 6, 7, 60, 61, 62, 63, 64, 65, 66, 70, 126, 127, 128, 129, 140}) {
    SCOPED_TRACE(testing::Message() << "positions " << first << " to " << end);
    std::vector<float> lse_of_keys;  // (NH, end)
    for (int64_t head = 0; head < 3; head++)
      lse_of_keys.insert(lse_of_keys.end(), &lse[head * 140], &lse[head * 140] + end);
    check_partial(PartialForward(layer, first, end), end, out, lse_of_keys);
    first = end;
  }
}

TEST(Attention, DoesNotReadPositionsAfterTheEnd) {
  Layer layer({1, 100, 16, {0, 1}, 1});
  for (int n = 0; n < 2; n++)
    for (int64_t t = 77; t < 100; t++)
      for (int64_t i = 0; i < 16; i++) {
        auto& buffer = n < layer.own ? layer.qkv : layer.source_kv;
        buffer[layer.k(n).at(t, i)] = buffer[layer.v(n).at(t, i)] = floatX(NAN);
      }
  layer.upload();
  layer.args.T = 77;
  layer.forward();
  const std::vector<floatX> out = layer.d_out.to_host();
  for (int64_t i = 0; i < 100 * layer.C(); i++)
    ASSERT_EQ(std::isfinite(float(out[i])), i < 77 * layer.C()) << "position " << i / layer.C();
}

// ----------------------------------------------------------------------------
// Masks, several K/V heads a query head, and the keys with the highest scores

// The emulated GPU takes so many times as long that it checks only every so many of the cases.
#ifdef SLA_EMU
constexpr size_t every = 11;
#else
constexpr size_t every = 1;
#endif

static std::vector<AttentionMask> many_masks() {
  std::vector<AttentionMask> masks;
  for (int window : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000})
    masks.push_back({window});
  for (int window : {0, 40})
    for (int s : {1, 7, 16, 63, 64, 65, 100, 400}) {
      for (MaskPattern pattern : {MaskPattern::stride, MaskPattern::local_or_stride, MaskPattern::block})
        masks.push_back({window, pattern, s});
      for (MaskPattern pattern : {MaskPattern::column, MaskPattern::block_or_column})
        for (int c : {1, s / 3, s})
          if (c > 0) masks.push_back({window, pattern, s, c});
    }
  return masks;
}

TEST(AttentionMasks, MatchTheFormulaForEveryPatternAndLength) {
  const std::vector<int64_t> lengths = {1, 2, 63, 64, 65, 127, 130, 257, 299}, head_sizes = {8, 16, 40};
  const std::vector<Case> wirings = {{0, 0, 0, {0, 1}, 2},
                                     {0, 0, 0, {0, 0}, 1},
                                     {0, 0, 0, {0, {0, 1}}, 1},
                                     {0, 0, 0, {0}, 0}};
  size_t i = 0;
  for (const AttentionMask& mask : many_masks())
    for (bool longest : {false, true}) {
      if (i++ % every > 0) continue;
      const int64_t T = longest ? 300 : lengths[i % lengths.size()];
      Case c = with_mask(wirings[i / 2 % wirings.size()], mask);
      c.B = 1 + int64_t(i) % (T < 300 ? 3 : 2), c.T = T, c.HS = head_sizes[i % head_sizes.size()];
      c.dq_accumulate = i / 3 % 2 == 1, c.v_apart = i % 5 == 0;
      check(c);
    }
}

TEST(AttentionMasks, NameTheNextKeyAndQueryThatCount) {
  for (int pattern = 0; pattern < 6; pattern++)
    for (int window : {0, 5, 16})
      for (int s : {1, 5, 8, 33})
        for (int c : {1, 4}) {
          if (c > s) continue;
          const AttentionMask mask = {window, MaskPattern(pattern), s, c};
          SCOPED_TRACE(testing::Message()
                       << "pattern " << pattern << ", window " << window << ", s " << s << ", c " << c);
          for (int first = 0; first < 40; first += 3)
            for (int end : {first + 1, first + 8})
              for (int from = 0; from < 48; from++) {
                auto seen = [&](int t, int j) { return t >= j && sees(mask, t, j); };
                auto key_is_seen = [&](int j) {
                  for (int t = first; t < end; t++)
                    if (seen(t, j)) return true;
                  return false;
                };
                auto query_sees = [&](int t) {
                  for (int j = first; j < end; j++)
                    if (seen(t, j)) return true;
                  return false;
                };
                const int key = mask.next_key(first, end, from), query = mask.next_query(first, end, from);
                ASSERT_GE(key, from);
                ASSERT_GE(query, from);
                for (int j = from; j < std::min(key, end); j++)
                  ASSERT_FALSE(key_is_seen(j)) << first << " " << end << " " << j;
                for (int t = from; t < std::min(query, 100); t++)
                  ASSERT_FALSE(query_sees(t)) << first << " " << end << " " << t;
                // Windows beside a pattern may hide what either of them shows; a tile's columns may come after its
                // first query.
                if (window > 0 && mask.pattern != MaskPattern::all) continue;
                const bool columns =
                    mask.pattern == MaskPattern::column || mask.pattern == MaskPattern::block_or_column;
                ASSERT_TRUE(key >= end || key_is_seen(key)) << first << " " << end << " " << from;
                ASSERT_TRUE(columns || query == INT_MAX || query_sees(query)) << first << " " << end << " " << from;
              }
        }
}

// Of at least 8 and at most T / 16: GPUs work on the positions with one remainder at a time, where all query heads of a
// K/V head have the same.
TEST(AttentionMasks, WithStridesMatchTheFormula) {
  const std::vector<AttentionMask> masks = {{0, MaskPattern::stride, 8},
                                            {40, MaskPattern::stride, 12},
                                            {0, MaskPattern::stride, 16},
                                            {100, MaskPattern::local_or_stride, 12}};
  for (int64_t T : {131, 300})
    for (int topk : {0, 3}) {
      Case c = {2, T, 24, {0, 0, {0, 1}, 2, {2, 3}, 4}, 2};
      c.masks = {masks[0], masks[0], masks[0], masks[2], masks[2], masks[1]};  // K/V heads 0 to 4 with one stride each
      c.topk = topk, c.whole_numbers = topk > 0, c.dq_accumulate = topk == 0, c.v_apart = T == 300;
      check(c);
      c.masks = {masks[0], masks[1], masks[2], masks[3], masks[0], masks[3]};  // 0 and 2 with several
      check(c);
    }
}

TEST(AttentionMasks, DifferByQueryHead) {
  for (int64_t T : {70, 300}) {
    Case c = {2, T, 32, {0, 0, 1, {0, 1}, 2, 2}, 1};
    c.masks = {{0},
               {1},
               {100},
               {0, MaskPattern::stride, 10},
               {0, MaskPattern::column, 9, 2},
               {64, MaskPattern::block_or_column, 40, 3}};
    check(c);
  }
}

// Here those before position 60, but for head 2.
TEST(AttentionMasks, LetQueriesSeeNoKey) {
  Case c = {2, 140, 16, {0, {0, 1}, 1}, 1};
  c.masks = {{0, MaskPattern::column, 64, 4}, {0, MaskPattern::column, 64, 4}, {0}};
  check(c);
  Layer layer(c);
  layer.forward();
  layer.backward();
  const std::vector<floatX> out = layer.d_out.to_host(), dqkv = layer.d_dqkv.to_host();
  const std::vector<float> lse = layer.d_lse.to_host(), delta = layer.d_delta.to_host();
  for (int64_t b = 0; b < c.B; b++)
    for (int64_t head = 0; head < 2; head++)
      for (int64_t t = 0; t < c.T; t++) {
        EXPECT_EQ(lse[(b * 3 + head) * c.T + t] == INFINITY, t < 60);
        if (t >= 60) continue;
        EXPECT_EQ(delta[(b * 3 + head) * c.T + t], 0.0f);
        for (int64_t i = head * c.HS; i < (head + 1) * c.HS; i++) {
          EXPECT_EQ(float(out[(b * c.T + t) * layer.C() + i]), 0.0f);
          EXPECT_EQ(float(dqkv[layer.q().at(b * c.T + t, i)]), 0.0f);
        }
      }
  c.T = 50, c.masks.pop_back(), c.kv_of_head.pop_back();  // nobody sees a key
  check(c);
}

TEST(AttentionSources, HaveOneSoftmaxOverAllTheirKeys) {
  const std::vector<Case> wirings = {{0, 0, 0, {{0, 1}, {1, 2}}, 1},           // each own and another layer's
                                     {0, 0, 0, {{0, 1, 2}, 2, {0, 2}, 1}, 1},  // as many as it likes
                                     {0, 0, 0, {{0, 1}, {0, 1}, {0, 1}}, 2},
                                     {0, 0, 0, {{0, 1}}, 0}};
  size_t i = 0;
  for (int64_t T : {1, 7, 64, 127, 128, 129, 257, 300})
    for (int64_t HS : {16, 64, 80, 128})
      for (int of_shape = 0; of_shape < 2; of_shape++) {
        if (i++ % every > 0) continue;
        Case c = wirings[i % wirings.size()];
        c.B = 1 + int64_t(i) % 3, c.T = T, c.HS = HS, c.dq_accumulate = i % 2 == 1, c.v_apart = i % 3 == 0;
        check(c);
      }
  check({1, 130, 16, {{0, 1}, 2}, 1, /*q_scale=*/0});
  check({1, 130, 16, {{0, 1}, 2}, 1, 30, 30}, is_bf16 ? 15 : 30);  // huge scores, as above
}

TEST(AttentionSources, HaveSeparateStridesForKAndV) {
  for (int64_t T : {1, 70, 130})
    for (int64_t HS : {24, 64}) {
      Case c = {2, T, HS, {0, 1, 0}, 1};
      c.v_apart = true;
      check(c);
    }
}

// All have masks and sources of their own.
static Case general_case(int64_t B, int64_t T, int64_t HS) {
  Case c = {B, T, HS, {0, {0, 1}, {1, 2}, 2, 0, 1, {0, 2}}, 1};
  c.masks = {{0},
             {37},
             {0, MaskPattern::stride, 6},
             {0, MaskPattern::local_or_stride, 20},
             {50, MaskPattern::block, 33},
             {0, MaskPattern::column, 70, 3},
             {0, MaskPattern::block_or_column, 12, 2}};
  return c;
}

TEST(AttentionMasks, OfTheLastQueriesAreThoseOfTheWhole) {
  for (int topk : {0, 9})
    for (int64_t B : {1, 2}) {
      Case c = general_case(B, 140, 24);
      c.masks[0] = {0, MaskPattern::stride, 8};
      c.topk = topk, c.whole_numbers = topk > 0;
      Layer layer(c);
      layer.forward();
      const std::vector<floatX> out = layer.d_out.to_host();
      const std::vector<float> lse = layer.d_lse.to_host();
      for (int64_t first_query : {1, 5, 63, 64, 65, 128, 139}) {
        SCOPED_TRACE(testing::Message() << "topk " << topk << ", B = " << B << ", first query " << first_query);
        check_partial(PartialForward(layer, first_query, 140), 140, out, lse);
      }
    }
}

#ifndef SLA_CPU  // which has no kernels of its own for it
// As generation does, of up to four queries.
TEST(AttentionDecode, IsThatOfTheWhole) {
  size_t i = 0;
  for (int64_t HS : {8, 24, 64, 80, 128})
    for (int64_t T : {1, 2, 64, 65, 127, 200}) {
      Case grouped = {1, T, HS, std::vector<Sources>(11, 0), 0}, masked = general_case(2, T, HS),
           apart = general_case(1, T, HS);
      apart.v_apart = true;
      apart.masks[2] = {0, MaskPattern::column, 300, 1};  // no query sees a key
      for (const Case& c : {Case{2, T, HS, {0, 1, 0}, 1}, grouped, masked, apart}) {
        if (i++ % (every > 1 ? 5 : 1) > 0) continue;
        Layer layer(c);
        layer.forward();
        const std::vector<floatX> out = layer.d_out.to_host();
        const std::vector<float> lse = layer.d_lse.to_host();
        for (int64_t first_query : {T - 1, T - 3, T - 4}) {
          if (first_query < 0) continue;
          SCOPED_TRACE(testing::Message() << c << ", first query " << first_query);
          check_partial(PartialForward(layer, first_query, T), T, out, lse);
        }
      }
    }
}

// A sequence's results do not depend on those beside it.
TEST(AttentionDecode, HasTheSameBitsAloneAndBesideOthers) {
  Layer alone(general_case(1, 140, 24)), beside(general_case(2, 140, 24));  // the first sequence of both has the same
                                                                            // values
  const PartialForward a(alone, 139, 140), b(beside, 139, 140);
  EXPECT_TRUE(same_bits(a.out, {b.out.begin(), b.out.begin() + a.C}));
}
#endif

TEST(AttentionTopK, MatchesTheFormulaWhereScoresAreExact) {
  size_t i = 0;
  for (int topk : {1, 2, 5, 63, 64, 65, 128, 300, 1000})
    for (int64_t T : {1, 7, 64, 130, 300})
      for (int64_t HS : {8, 64}) {
        // With a single query, the error of dk would be that of one or two roundings: too few to compare with the error
        // of `rounded`.
        Case c = i % 2 == 0 ? Case{2, T, HS, {0, {0, 1}, 1}, 1} : general_case(1, std::max<int64_t>(T, 3), HS);
        if (i++ % every > 0) continue;
        c.topk = topk, c.whole_numbers = true, c.dq_accumulate = i % 4 == 1, c.v_apart = i % 3 == 0;
        check(c);
      }
}

// The lowest score that is taken is compared with itself, so that one rounded otherwise in any kernel, the one with the
// transposed product included, loses or wins a key.
TEST(AttentionTopK, ComparesTheSameBitsInEveryKernel) {
  for (int topk : {1, 2, 20})
    for (int64_t HS : {40, 64, 96}) {
      Case c = {1, 150, HS, {0, {0, 1}, 1}, 1};
      c.topk = topk;
      check(c);
    }
}

TEST(AttentionTopK, OfEqualScoresTakesTheFirstKeys) {
  for (int topk : {1, 5, 64, 100, 150}) {  // the last: some of the second K/V head's keys
    Case c = {1, 130, 16, {{0, 1}, 1}, 1, 1, /*k_scale=*/0};
    c.topk = topk;
    check(c);
  }
}

// With v and dout of rows of the identity matrix, HS of them at a time, out and dv are the probabilities that the
// forward and the backward pass use.
TEST(AttentionTopK, UsesTheSameKKeysInBothPasses) {
  const int64_t T = 140, HS = 64;
  for (int topk : {1, 5, 63}) {
    Case c = {1, T, HS, {0}, 1};
    c.topk = topk;
    std::vector<std::vector<int>> used(size_t(T), std::vector<int>(size_t(T), 0));  // of each query and key: 1 in
                                                                                    // forward, 2 in backward
    for (int64_t part = 0; part < T; part += HS) {
      Layer layer(c);
      for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < HS; i++) {
          layer.qkv[layer.v(0).at(t, i)] = layer.dout[t * HS + i] = floatX(t == part + i ? 1.0f : 0.0f);
        }
      layer.upload();
      layer.forward();
      layer.backward();
      const std::vector<floatX> out = layer.d_out.to_host(), dqkv = layer.d_dqkv.to_host();
      for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < HS && part + i < T; i++) {
          if (float(out[t * HS + i]) != 0) used[t][part + i] |= 1;
          if (float(dqkv[layer.dv(0).at(t, i)]) != 0) used[part + i][t] |= 2;
        }
    }
    for (int64_t t = 0; t < T; t++) {
      int64_t keys = 0;
      for (int64_t j = 0; j < T; j++) {
        EXPECT_TRUE(used[t][j] == 0 || used[t][j] == 3)
            << "topk " << topk << ", query " << t << ", key " << j << ": " << used[t][j];
        keys += used[t][j] != 0;
      }
      EXPECT_EQ(keys, std::min<int64_t>(topk, t + 1)) << "topk " << topk << ", query " << t;
    }
  }
}

// The same function in other words. Other kernels may compute it, or the same in another order.
TEST(AttentionMasks, ThatHideNothingChangeNothing) {
  const Case plain = {2, 300, 32, {0, 1, 0}, 1};
  Layer expected(plain);
  expected.forward();
  expected.backward();
  for (int i = 0; i < 5; i++) {
    Case c = plain;
    if (i == 0) c = with_mask(c, {300});
    if (i == 1) c = with_mask(c, {0, MaskPattern::block, 300});
    if (i == 2) c = with_mask(c, {0, MaskPattern::stride, 1});
    if (i == 3) c = with_mask(c, {0, MaskPattern::block_or_column, 7, 7});
    if (i == 4) c.topk = 300;
    SCOPED_TRACE(testing::Message() << c);
    Layer layer(c);
    layer.forward();
    layer.backward();
    const auto results = layer.results(), expected_results = expected.results();
    for (size_t r = 0; r < results.size(); r++) {
#ifdef SLA_CPU
      const bool same_order = i < 3;
#else
      const bool same_order = true;
#endif
      EXPECT_TRUE(!same_order || same_bits(results[r], expected_results[r])) << "result " << r;
      std::vector<double> values, expected_values;  // without the NaN of unused columns
      for (size_t j = 0; j < results[r].size(); j++) {
        ASSERT_EQ(std::isnan(float(results[r][j])), std::isnan(float(expected_results[r][j])));
        if (!std::isnan(float(results[r][j])))
          values.push_back(float(results[r][j])), expected_values.push_back(float(expected_results[r][j]));
      }
      EXPECT_LE(relative_error(values, expected_values), tolerance) << "result " << r;
    }
  }
}

#if defined(PRECISION_BF16) && !defined(SLA_CPU)
// Each sum has the same order in the tiles for GPUs with large shared memory and in those for others.
// BUG (build/bf16/test_attention_emu) llmc/cuda/attention_bf16.h: `group_ds, q_tiles.from_row(row), channel` ->
//   `group_ds, q_tiles.from_row(row)`
TEST(Attention, IsTheSameInLargeAndSmallSharedMemory) {
  const bool large = gpu().has_large_shared_memory;
  for (int64_t HS : {64, 72, 128})
    for (int64_t T : {1, 150, 300}) {
      std::vector<std::vector<floatX>> results[2];
      for (int i = 0; i < 2; i++) {
        gpu().has_large_shared_memory = large && i == 0;
        Layer layer({1, T, HS, {0, 0, 1}, 1});
        layer.forward();
        layer.backward();
        results[i] = layer.results();
      }
      for (size_t r = 0; r < results[0].size(); r++)
        EXPECT_TRUE(same_bits(results[0][r], results[1][r])) << "HS = " << HS << ", T = " << T << ", result " << r;
    }
  gpu().has_large_shared_memory = large;
}
#endif

#ifdef SLA_CPU
TEST(Attention, HasTheSameBitsForAnyNumberOfThreads) {
  const int all = omp_get_max_threads();
  Case top = general_case(2, 300, 24);
  top.topk = 20;
  for (const Case& c : {Case{2, 300, 64, {0, 0, 0, 0}, 1}, general_case(2, 300, 24), top}) {
    std::vector<std::vector<floatX>> expected;
    std::vector<std::vector<float>> expected_statistics;
    for (int threads : {1, 2, 3, 7}) {
      omp_set_num_threads(threads);
      Layer layer(c);
      layer.forward();
      layer.backward();
      const std::vector<std::vector<floatX>> results = layer.results();
      const std::vector<std::vector<float>> statistics = {layer.d_lse.to_host(), layer.d_delta.to_host()};
      if (expected.empty()) expected = results, expected_statistics = statistics;
      for (size_t i = 0; i < 2; i++)
        EXPECT_TRUE(same_bits(statistics[i], expected_statistics[i])) << threads << " threads, statistic " << i;
      for (size_t i = 0; i < results.size(); i++)
        EXPECT_TRUE(same_bits(results[i], expected[i])) << threads << " threads, result " << i;
    }
  }
  omp_set_num_threads(all);
}
#endif

#ifdef SLA_EMU
// A copy of shared K/V would take more launches, or more reads. The kernels load each tile of queries once, with the k
// and v of the keys that it sees, and in the backward pass also each tile of keys with the q and dout of the queries
// that see it.
TEST(Attention, ReadsSharedKVInPlace) {
  const Case own = {2, 300, 64, {0, 1, 2, 3}, 4}, shared = {2, 300, 64, {0, 1, 2, 3}, 1};
  std::vector<emu::Counters> counts;
  for (const Case& c : {own, shared}) {
    Layer layer(c);
    layer.d_qkv.to_host();  // waits for everything queued so far
    const emu::Counters before = emu::counters();
    layer.forward();
    layer.backward();
    layer.d_out.to_host();
    emu::Counters after = emu::counters();
    EXPECT_EQ(after.kernels - before.kernels, 3u) << "a forward, a dq and a dkdv kernel";
    EXPECT_EQ(after.bytes_on_device, before.bytes_on_device) << "no copy";
    EXPECT_EQ(after.memsets, before.memsets);
    after.bytes_read_async -= before.bytes_read_async;
    counts.push_back(after);
  }
  EXPECT_EQ(counts[0].bytes_read_async, counts[1].bytes_read_async);
#ifdef PRECISION_BF16
  uint64_t rows = 0, floats = 0;  // of one head in one sequence
  for (int64_t q0 = 0; q0 < own.T; q0 += ForwardTiles<64, false>::queries) {
    const int64_t end = std::min<int64_t>(own.T, q0 + ForwardTiles<64, false>::queries);
    rows += uint64_t(end - q0 + 2 * end);
  }
  for (int64_t q0 = 0; q0 < own.T; q0 += DqTiles<64, false>::queries) {
    const int64_t end = std::min<int64_t>(own.T, q0 + DqTiles<64, false>::queries);
    rows += uint64_t(2 * (end - q0) + 2 * end);
  }
  for (int64_t k0 = 0; k0 < own.T; k0 += DkdvTiles<64, false>::keys) {
    const int64_t end = std::min<int64_t>(own.T, k0 + DkdvTiles<64, false>::keys);
    rows += uint64_t(2 * (end - k0) + 2 * (own.T - k0));
    floats += uint64_t(2 * (own.T - k0));
  }
  EXPECT_EQ(counts[0].bytes_read_async,
            uint64_t(own.B * own.NH()) * (rows * 64 * sizeof(bf16) + floats * sizeof(float)));
#endif
}

#ifdef PRECISION_BF16
TEST(Attention, HasNoBankConflicts) {
  const emu::Counters before = emu::counters();
  for (int64_t HS : {32, 64, 80, 96, 128}) {
    Layer layer({1, 300, HS, {0, 1}, 1});
    layer.forward();
    layer.backward();
  }
  DeviceArray<float>(std::vector<float>(1)).to_host();  // waits
  EXPECT_GT(emu::counters().matrices_loaded, before.matrices_loaded);
  EXPECT_EQ(emu::counters().bank_conflicts, before.bank_conflicts);
}
#endif

// Of each K/V head the keys that one of its query heads sees, once.
TEST(AttentionDecode, ReadsWhatIsSeenOnce) {
  const int64_t T = 300, HS = 64, B = 2;
  Case c = {B, T, HS, {0, 0, 0, {0, 1}, 1, 2}, 1};
  for (bool has_masks : {false, true}) {
    if (has_masks) c.masks = {{5}, {70}, {0, MaskPattern::stride, 9}, {5}, {0, MaskPattern::column, 100, 3}, {2}};
    Layer layer(c);
    layer.d_qkv.to_host();  // waits
    const uint64_t before = emu::counters().bytes_read_async;
    const PartialForward part(layer, T - 1, T);
    int64_t rows = 0;
    for (int n = 0; n < c.num_kv_heads(); n++)
      for (int64_t j = 0; j < T; j++) {
        bool seen = false;
        for (int64_t head = 0; head < c.NH(); head++)
          for (int source : c.kv_of_head[head]) seen |= source == n && sees(c.mask(head), T - 1, j);
        rows += seen;
      }
    EXPECT_EQ(has_masks, rows < 3 * T);
    EXPECT_EQ(emu::counters().bytes_read_async - before, uint64_t(B * rows * 2 * HS) * sizeof(floatX));
  }
}

#ifdef PRECISION_BF16
// With a window of w the kernels read, for each tile of queries, the keys from the tile that the first query's window
// begins in; and for each tile of keys, the queries up to the end of the tile that the last key's window ends in.
TEST(AttentionMasks, ReadTheWindowsTilesAlone) {
  const int64_t T = 600, HS = 64;
  for (int w : {1, 60, 64, 65, 200}) {
    Layer layer(with_mask({2, T, HS, {0, 0}, 1}, {w}));
    layer.d_qkv.to_host();  // waits
    std::vector<uint64_t> read = {emu::counters().bytes_read_async};
    for (bool forward : {true, false}) {
      if (forward) layer.forward();
      else layer.backward();
      layer.d_out.to_host();
      read.push_back(emu::counters().bytes_read_async);
    }
    // Of a head in a sequence, with tiles of `queries` queries and `keys` keys.
    auto key_rows = [&](int64_t queries, int64_t keys) {
      int64_t rows = 0;
      for (int64_t q0 = 0; q0 < T; q0 += queries)
        rows += std::min(T, q0 + queries) - std::max<int64_t>(0, q0 - w + 1) / keys * keys;
      return rows;
    };
    int64_t query_rows = 0;
    for (int64_t k0 = 0; k0 < T; k0 += DkdvTiles<64, false>::keys) {
      const int64_t last_query = std::min<int64_t>(T, k0 + DkdvTiles<64, false>::keys) - 1 + w - 1;
      query_rows +=
          std::min<int64_t>(T, (last_query / DkdvTiles<64, false>::queries + 1) * DkdvTiles<64, false>::queries) - k0;
    }
    const int64_t heads = 2 * 2, kv_heads = 2, row = HS * int64_t(sizeof(bf16));
    const int64_t forward =
        heads * (T + 2 * key_rows(ForwardTiles<64, false>::queries, ForwardTiles<64, false>::keys)) * row;
    const int64_t dq = heads * (2 * T + 2 * key_rows(DqTiles<64, false>::queries, DqTiles<64, false>::keys)) * row;
    const int64_t dkdv = kv_heads * 2 * T * row + heads * 2 * query_rows * (row + int64_t(sizeof(float)));
    EXPECT_EQ(read[1] - read[0], uint64_t(forward)) << "window " << w;
    EXPECT_EQ(read[2] - read[1], uint64_t(dq + dkdv)) << "window " << w;
  }
}

TEST(AttentionMasks, ReadTheColumnsTilesAlone) {
  const int64_t T = 1024, HS = 64;
  Case c = with_mask({1, T, HS, {0}, 1}, {0, MaskPattern::column, 256, 32});  // keys 224 to 255, 480 to 511 and so on
  Layer layer(c);
  layer.d_qkv.to_host();
  const uint64_t before = emu::counters().bytes_read_async;
  layer.forward();
  layer.d_out.to_host();
  int64_t rows = T;
  using Tiles = ForwardTiles<64, false>;
  for (int64_t end = Tiles::queries; end <= T; end += Tiles::queries) rows += 2 * Tiles::keys * (end / 256);
  EXPECT_EQ(emu::counters().bytes_read_async - before, uint64_t(rows * HS) * sizeof(bf16));
}

// All positions with one remainder fit into one tile: each row is read once.
TEST(AttentionMasks, WithStridesReadEachRowOnce) {
  const int64_t T = 512, HS = 64;
  Layer layer(with_mask({1, T, HS, {0}, 1}, {0, MaskPattern::stride, 16}));
  layer.d_qkv.to_host();
  uint64_t before = emu::counters().bytes_read_async;
  layer.forward();
  layer.d_out.to_host();
  EXPECT_EQ(emu::counters().bytes_read_async - before, uint64_t(3 * T * HS) * sizeof(bf16));  // q, k, v
  before = emu::counters().bytes_read_async;
  layer.backward();
  layer.d_out.to_host();
  EXPECT_EQ(emu::counters().bytes_read_async - before,
            uint64_t(T) * (8 * HS * sizeof(bf16) + 2 * sizeof(float)));  // q, k, v, dout by two kernels
}

TEST(AttentionMasks, HaveNoBankConflicts) {
  const emu::Counters before = emu::counters();
  for (int64_t HS : {32, 64, 80, 96, 128})
    for (int topk : {0, 9}) {
      Case c = general_case(1, 200, HS);
      c.topk = topk;
      Layer layer(c);
      layer.forward();
      layer.backward();
      layer.d_out.to_host();
    }
  EXPECT_GT(emu::counters().matrices_loaded, before.matrices_loaded);
  EXPECT_EQ(emu::counters().bank_conflicts, before.bank_conflicts);
}
#endif

// The selection alone, of any scores and indices: the reference sorts.
TEST(AttentionTopK, FindsTheKeyOfEveryRank) {
  const std::vector<float> values = {0.0f,  -0.0f,  1.0f,     -1.0f,      1e-40f,      -1e-40f,
                                     3e38f, -3e38f, INFINITY, 1.0000001f, -1.0000001f, 5.5f};
  for (int indices : {100, 256, 257, 500, 65536, 130000, INT_MAX})
    for (int count : {1, 40, 100})
      for (int topk : {1, 2, 22, 39, 40, 41, 55, 100}) {  // 22 of 40 and 55 of 100: amid zeros of both signs
        std::vector<std::pair<float, int>> keys;          // minus the score, and the index, of keys in no order
        for (int i = 0; i < count; i++)
          keys.push_back({-values[size_t(i * 7 % 12)] * float(i % 3 == 0 ? 0.5 : 1),
                          int((int64_t(i) * 37 % count + 1) * indices / count - 1)});
        RadixSearch search = {0, topk};
        float score = NAN;
        int last = -7;
        bool unfinished = true;
        for (int pass = 0; unfinished; pass = next_pass(pass, indices)) {
          ASSERT_LT(pass, passes);
          std::vector<int> histogram(digits);
          for (const auto& [minus, index] : keys) count_key(histogram.data(), search, pass, -minus, index);
          unfinished = choose_digit(histogram.data(), search, pass, &score, &last);
        }
        std::sort(keys.begin(), keys.end());
        for (int i = 0; i < count; i++) {
          const float x = -keys[size_t(i)].first;
          EXPECT_EQ(x > score || (x == score && keys[size_t(i)].second <= last), i < topk)
              << "rank " << i << " of " << count << ", topk " << topk << ", " << indices << " indices";
        }
      }
}

TEST(Attention, HasTheSameBitsInAnyOrderOfThreads) {
  Case top = general_case(1, 70, 24);
  top.topk = 7;
  for (const Case& c : {Case{2, 70, 24, {0, 0, 1}, 1}, Case{1, 70, 72, {0, 0, 1}, 1}, Case{1, 200, 64, {0, 1}, 1},
                        general_case(1, 140, 24), top}) {
    std::vector<std::vector<floatX>> first;
    std::vector<float> first_lse;
    for (uint64_t seed : {1, 2, 3, 4, 5, 6}) {
      emu::set_seed(seed);
      Layer layer(c);
      layer.forward();
      layer.backward();
      std::vector<std::vector<floatX>> results = layer.results();
      results.push_back(PartialForward(layer, c.T - 2, c.T).out);
      if (first.empty()) first = results, first_lse = layer.d_lse.to_host();
      for (size_t i = 0; i < results.size(); i++) EXPECT_TRUE(same_bits(results[i], first[i])) << "seed " << seed;
      EXPECT_TRUE(same_bits(layer.d_lse.to_host(), first_lse)) << "seed " << seed;
    }
  }
  emu::set_seed(1);
}
#endif

static void check_copy_rows(int64_t rows, int64_t width) {
  for (bool zeros : {false, true}) {
    const int64_t dst_stride = width + 8, src_stride = width + 16;
    const auto src = random_values<floatX>(rows * src_stride, 1);
    auto expected = random_values<floatX>(rows * dst_stride, 2);
    const DeviceArray<floatX> d_src(src), d_dst(expected);
    copy_rows(d_dst.data, dst_stride, zeros ? nullptr : d_src.data, src_stride, rows, width);
    for (int64_t row = 0; row < rows; row++)
      for (int64_t i = 0; i < width; i++)
        expected[row * dst_stride + i] = zeros ? floatX(0.0f) : src[row * src_stride + i];
    EXPECT_TRUE(same_bits(d_dst.to_host(), expected)) << rows << " x " << width;
  }
}

TEST(CopyRows, CopiesRowsOrSetsThemToZero) {
  for (int64_t rows : {1, 37, 300})
    for (int64_t width : {8, 24, 768, 3072}) check_copy_rows(rows, width);
  // Beside and on the rows of a block, and the width for which it has a single row: of float, and of bf16.
  for (int64_t rows : {127, 128, 129, 255, 256, 257}) check_copy_rows(rows, 8);
  for (int64_t width : {1016, 1024, 1032, 2040, 2048, 2056}) check_copy_rows(3, width);
}

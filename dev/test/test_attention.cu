// Attention and its gradients against the formula in double, on the device that this is compiled for: the CPU, the emulated
// GPU or a real one. The inputs are rounded to floatX first, so that what is compared is the kernels' arithmetic alone.
#include <gtest/gtest.h>        // TEST
#include <algorithm>            // std::all_of, std::max, std::max_element
#include <cmath>                // exp, log, pow, sqrt, isfinite, isnan
#include <vector>               // std::vector
#include "dev/test/values.h"    // random_values, nans, relative_error, same_bits
#include "llmc/device_array.h"  // DeviceArray
#include "llmc/operations.h"    // attention_forward, attention_backward, copy_rows
#include "llmc/precision.h"     // floatX

// Relative, of a tensor's norm. In bf16 moreover 1.5 times the error of the formula in double with everything in bf16 that must be.
constexpr bool is_bf16 = sizeof(floatX) == 2;
constexpr double tolerance = is_bf16 ? 8e-3 : 1e-5;

// ----------------------------------------------------------------------------
// A layer's attention as the model lays it out

// (rows, columns) at a stride, somewhere in a buffer.
struct Matrix {
  int64_t rows, columns, stride, offset;
  int64_t at(int64_t row, int64_t column) const { return offset + row * stride + column; }
};
static std::vector<double> pick(const std::vector<floatX>& buffer, const Matrix& m) {
  std::vector<double> x;
  for (int64_t row = 0; row < m.rows; row++)
    for (int64_t i = 0; i < m.columns; i++) x.push_back(double(float(buffer[size_t(m.at(row, i))])));
  return x;
}
// Takes a matrix out of what is checked in the end: what is then left in the buffer is nobody's and must be as it was.
static std::vector<floatX> take(std::vector<floatX>& buffer, const Matrix& m) {
  std::vector<floatX> x;
  for (int64_t row = 0; row < m.rows; row++)
    for (int64_t i = 0; i < m.columns; i++) {
      x.push_back(buffer[size_t(m.at(row, i))]);
      buffer[size_t(m.at(row, i))] = floatX(0.0f);
    }
  return x;
}

struct Case {
  int64_t B, T, HS;
  std::vector<int> pair_of;   // (NH): which pair each head reads
  int own_pairs;              // pairs before this one lie in the layer's own qkv, the others in a lender's
  double q_scale = 1, k_scale = 1;

  int64_t NH() const { return int64_t(pair_of.size()); }
  int64_t pairs() const { return 1 + *std::max_element(pair_of.begin(), pair_of.end()); }
  int64_t rows() const { return B * T; }
};

// qkv (B*T, q | k of own pairs | v of own pairs | 8 columns that are nobody's), and the same without q for what is borrowed;
// the gradients likewise, with a stride of their own for those borrowed. Odd pairs have a gradient already; it is added to.
struct Layer {
  Case c;
  int64_t own, borrowed, q_stride, lender_stride, slab_stride;
  std::vector<floatX> qkv, lender, dqkv, slab, dout;  // as they are before
  DeviceArray<floatX> d_qkv, d_lender, d_dqkv, d_slab, d_dout, d_out;
  DeviceArray<float> d_lse, d_delta;
  AttentionTable<floatX> table;
  AttentionShape shape;

  explicit Layer(const Case& c)
      : c(c), own(c.own_pairs), borrowed(c.pairs() - own), q_stride((c.NH() + 2 * own) * c.HS + 8),
        lender_stride(2 * borrowed * c.HS + 16), slab_stride(2 * borrowed * c.HS + 24) {
    qkv = random_values<floatX>(c.rows() * q_stride, 1);
    lender = random_values<floatX>(c.rows() * lender_stride, 2);
    dout = random_values<floatX>(c.rows() * C(), 3);
    dqkv = nans<floatX>(c.rows() * q_stride);
    slab = nans<floatX>(c.rows() * slab_stride);
    scale(qkv, q(), c.q_scale);
    for (int p = 0; p < c.pairs(); p++) {
      scale(p < own ? qkv : lender, k(p), c.k_scale);
      if (accumulates(p)) {
        fill(p < own ? dqkv : slab, dk(p), uint32_t(10 + 2 * p));
        fill(p < own ? dqkv : slab, dv(p), uint32_t(11 + 2 * p));
      }
    }
    upload();
  }

  int64_t C() const { return c.NH() * c.HS; }
  static bool accumulates(int pair) { return pair % 2 == 1; }
  Matrix q() const { return {c.rows(), C(), q_stride, 0}; }
  Matrix k(int p) const {
    if (p < own) return {c.rows(), c.HS, q_stride, C() + p * c.HS};
    return {c.rows(), c.HS, lender_stride, (p - own) * c.HS};
  }
  Matrix dk(int p) const {
    if (p < own) return k(p);
    return {c.rows(), c.HS, slab_stride, (p - own) * c.HS};
  }
  Matrix v(int p) const { return shifted(k(p), p); }
  Matrix dv(int p) const { return shifted(dk(p), p); }

  void upload() {
    d_qkv = DeviceArray<floatX>(qkv), d_lender = DeviceArray<floatX>(lender), d_dqkv = DeviceArray<floatX>(dqkv);
    d_slab = DeviceArray<floatX>(slab), d_dout = DeviceArray<floatX>(dout);
    d_out = DeviceArray<floatX>(nans<floatX>(c.rows() * C()));
    d_lse = DeviceArray<float>(nans<float>(c.rows() * c.NH()));
    d_delta = DeviceArray<float>(nans<float>(c.rows() * c.NH()));
    std::vector<KVHead<floatX>> views;
    std::vector<int> readers;
    for (int p = 0; p < c.pairs(); p++) {
      floatX *from = p < own ? d_qkv.data : d_lender.data, *to = p < own ? d_dqkv.data : d_slab.data;
      KVHead<floatX> view = {from + k(p).offset, from + v(p).offset, k(p).stride, to + dk(p).offset, to + dv(p).offset,
                             dk(p).stride, accumulates(p), int(readers.size()), 0};
      for (int i = 0; i < int(c.NH()); i++)
        if (c.pair_of[size_t(i)] == p) readers.push_back(i), view.num_query_heads++;
      views.push_back(view);
    }
    table = AttentionTable<floatX>(std::move(views), std::move(readers));
    shape = {c.B, c.T, c.NH(), c.HS, 0};
  }

  void forward() { attention_forward(d_out.data, d_lse.data, d_qkv.data, q_stride, table, shape); }
  void backward() {
    attention_backward(d_dqkv.data, q_stride, d_delta.data, d_dout.data, d_out.data, d_lse.data, d_qkv.data, q_stride, table,
                       shape);
  }

 private:
  Matrix shifted(Matrix m, int p) const {  // from a pair's k to its v
    m.offset += (p < own ? own : borrowed) * c.HS;
    return m;
  }
  static void scale(std::vector<floatX>& buffer, const Matrix& m, double factor) {
    for (int64_t row = 0; row < m.rows; row++)
      for (int64_t i = 0; i < m.columns; i++) {
        floatX& x = buffer[size_t(m.at(row, i))];
        x = floatX(float(double(float(x)) * factor));
      }
  }
  static void fill(std::vector<floatX>& buffer, const Matrix& m, uint32_t tag) {
    const std::vector<floatX> x = random_values<floatX>(m.rows * m.columns, tag);
    for (int64_t row = 0; row < m.rows; row++)
      for (int64_t i = 0; i < m.columns; i++) buffer[size_t(m.at(row, i))] = x[size_t(row * m.columns + i)];
  }
};

// What the formula says, each (B*T, ...) without gaps. `rounded`: with results in floatX, and with the probabilities and ds in floatX where
// they are an operand of a matmul, and nothing else: what even an exact computation loses.
struct Expected {
  const bool rounded;
  double lone_terms = 0;  // ||p dp k|| / sqrt(HS) over the queries that see one key, whose ds is the difference of two equal terms
  std::vector<double> out, lse, delta, dq;
  std::vector<std::vector<double>> dk, dv;

  explicit Expected(const Layer& layer, bool rounded = false) : rounded(rounded) {
    const Case& c = layer.c;
    const int64_t NH = c.NH(), HS = c.HS, C = NH * HS;
    const std::vector<double> q = pick(layer.qkv, layer.q()), dout = pick(layer.dout, {c.rows(), C, C, 0});
    out.resize(size_t(c.rows() * C)), dq = out, lse.resize(size_t(c.rows() * NH)), delta = lse;
    std::vector<std::vector<double>> k, v;
    for (int p = 0; p < c.pairs(); p++) {
      k.push_back(pick(p < layer.own ? layer.qkv : layer.lender, layer.k(p)));
      v.push_back(pick(p < layer.own ? layer.qkv : layer.lender, layer.v(p)));
      const std::vector<double> zeros(k.back().size(), 0.0);
      dk.push_back(layer.accumulates(p) ? pick(p < layer.own ? layer.dqkv : layer.slab, layer.dk(p)) : zeros);
      dv.push_back(layer.accumulates(p) ? pick(p < layer.own ? layer.dqkv : layer.slab, layer.dv(p)) : zeros);
    }
    std::vector<double> prob(size_t(c.T), 0.0), dprob(size_t(c.T), 0.0);
    for (int64_t b = 0; b < c.B; b++)
      for (int64_t head = 0; head < NH; head++)
        for (int64_t t = 0; t < c.T; t++) {
          const size_t p = size_t(c.pair_of[size_t(head)]);
          const int64_t at = (b * c.T + t) * C + head * HS, first_key = b * c.T * HS;
          attend(&out[size_t(at)], lse[size_t((b * NH + head) * c.T + t)], delta[size_t((b * NH + head) * c.T + t)],
                 &dq[size_t(at)], &dk[p][size_t(first_key)], &dv[p][size_t(first_key)], &q[size_t(at)],
                 &k[p][size_t(first_key)], &v[p][size_t(first_key)], &dout[size_t(at)], t + 1, HS, prob.data(),
                 dprob.data());
        }
    lone_terms = std::sqrt(lone_terms);
    round_all(dq);
    for (int p = 0; p < c.pairs(); p++) round_all(dk[size_t(p)]), round_all(dv[size_t(p)]);
  }

 private:
  __attribute__((no_sanitize("address")))
  double round(double x) const { return rounded ? double(float(floatX(float(x)))) : x; }
  void round_all(std::vector<double>& values) const {
    for (double& x : values) x = round(x);
  }

  // One query and the keys that it sees. Unchecked, or it would take longer than the emulated kernels.
  __attribute__((no_sanitize("address")))
  void attend(double* out, double& lse, double& delta, double* dq, double* dk, double* dv, const double* q, const double* k,
              const double* v, const double* dout, int64_t keys, int64_t HS, double* prob, double* dprob) {
    const double scale = 1 / std::sqrt(double(HS));
    double max = -1e300, sum = 0;
    for (int64_t j = 0; j < keys; j++) {
      prob[j] = dprob[j] = 0;
      for (int64_t i = 0; i < HS; i++) prob[j] += q[i] * k[j * HS + i] * scale, dprob[j] += dout[i] * v[j * HS + i];
      max = std::max(max, prob[j]);
    }
    for (int64_t j = 0; j < keys; j++) sum += prob[j] = std::exp(prob[j] - max);
    lse = max + std::log(sum);
    for (int64_t j = 0; j < keys; j++) {
      const double p = round(prob[j]);
      for (int64_t i = 0; i < HS; i++) out[i] += p * v[j * HS + i];
      prob[j] /= sum;
    }
    for (int64_t i = 0; i < HS; i++) out[i] = round(out[i] / sum), delta += dout[i] * out[i];
    for (int64_t j = 0; j < keys; j++) {
      const double p = round(prob[j]), ds = round(prob[j] * (dprob[j] - delta)) * scale;
      for (int64_t i = 0; i < HS; i++) {
        if (keys == 1) lone_terms += std::pow(p * dprob[j] * scale * k[i], 2);
        dq[i] += ds * k[j * HS + i];
        dk[j * HS + i] += ds * q[i];
        dv[j * HS + i] += p * dout[i];
      }
    }
  }
};

// `slack`: how many times the usual error is allowed.
static void check(const Case& c, double slack = 1) {
  SCOPED_TRACE(testing::Message() << "B = " << c.B << ", T = " << c.T << ", HS = " << c.HS << ", heads read "
                                  << testing::PrintToString(c.pair_of) << ", " << c.own_pairs << " own");
  Layer layer(c);
  const Expected exact(layer), rounded(layer, /*rounded=*/true);
  auto compare = [&](const char* what, const auto& values, const std::vector<double>& expected, const std::vector<double>& at_best) {
    // dq and dk for T = 1 are zero: what they are compared with is the size of the terms that cancel.
    const bool is_zero = std::all_of(expected.begin(), expected.end(), [](double x) { return x == 0; });
    const double error = relative_error(values, expected) / (is_zero && exact.lone_terms > 0 ? exact.lone_terms : 1);
    EXPECT_LE(error, tolerance * slack) << what;
    EXPECT_LE(error, is_bf16 ? 1.5 * relative_error(at_best, expected) + 1e-5 : INFINITY) << what;
  };
  layer.forward();
  layer.backward();
  EXPECT_LE(relative_error(layer.d_lse.to_host(), exact.lse), 1e-5) << "lse";
  compare("out", layer.d_out.to_host(), exact.out, rounded.out);
  compare("delta", layer.d_delta.to_host(), exact.delta, rounded.delta);
  std::vector<floatX> dqkv = layer.d_dqkv.to_host(), slab = layer.d_slab.to_host();
  compare("dq", take(dqkv, layer.q()), exact.dq, rounded.dq);
  take(layer.dqkv, layer.q());
  for (int p = 0; p < c.pairs(); p++) {
    std::vector<floatX>&after = p < layer.own ? dqkv : slab, &before = p < layer.own ? layer.dqkv : layer.slab;
    compare("dk", take(after, layer.dk(p)), exact.dk[size_t(p)], rounded.dk[size_t(p)]);
    compare("dv", take(after, layer.dv(p)), exact.dv[size_t(p)], rounded.dv[size_t(p)]);
    take(before, layer.dk(p)), take(before, layer.dv(p));
  }
  EXPECT_TRUE(same_bits(dqkv, layer.dqkv) && same_bits(slab, layer.slab)) << "wrote to what is nobody's";
}

// ----------------------------------------------------------------------------

TEST(Attention, OfSeveralLengthsIsTheSoftmaxFormulaWithItsGradients) {
  for (int64_t T : {1, 7, 63, 64, 65, 127, 128, 129, 300}) check({2, T, 16, {0, 1}, 2});
}

TEST(Attention, IsTheSoftmaxFormulaWithItsGradientsForEveryLengthHeadSizeAndWiring) {
  const std::vector<Case> wirings = {{0, 0, 0, {0, 1}, 2},         // its own: the first pair's gradient is =, the second's +=
                                     {0, 0, 0, {0, 1}, 0},         // all borrowed
                                     {0, 0, 0, {0, 1, 2}, 1},      // as with SLA: the last heads borrow
                                     {0, 0, 0, {0, 0, 1, 1}, 1},   // grouped queries
                                     {0, 0, 0, {1, 0, 1}, 2}};     // in no order
  size_t i = 0;
  for (int64_t T : {1, 7, 64, 127, 128, 129, 300})
    for (int64_t HS : {32, 64, 80, 96, 128})
      for (size_t n = 0; n < (T < 300 && is_bf16 ? wirings.size() : 2); n++, i++) {  // two in turn, where all would take minutes
        Case c = wirings[i % wirings.size()];
        c.B = 1 + int64_t(i) % 3, c.T = T, c.HS = HS;
        check(c);
      }
}

TEST(Attention, TakesAnyHeadSizeThatIsAMultipleOfEight) {
  for (int64_t HS : {8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 104, 128}) check({1, 70, HS, {0, 1}, 1});
  check({3, 33, 80, {0, 1}, 2});
}

TEST(Attention, ReadsPairsWhereverTheyLieAndAddsToTheirGradients) {
  check({2, 70, 8, {0, 1, 2, 3}, 4});  // all its own: the first pair's gradient is =, the second's += and so on
  check({2, 70, 8, {0, 1, 2, 3}, 0});  // all borrowed
  check({2, 70, 24, {1, 0, 3, 2}, 2});
  check({3, 129, 72, {1, 0}, 1});
}

// BUG (build/bf16/test_attention_emu) llmc/cuda/attention_bf16.h: `const int head = heads[pass / tiles]` -> `const int head = heads[0]`
TEST(Attention, SumsAPairsGradientsOverTheHeadsThatReadIt) {
  check({2, 70, 8, {0, 0, 1, 1}, 1});
  check({2, 70, 8, {0, 0, 0}, 1});     // multi-query
  check({1, 70, 8, {2, 0, 1, 0}, 1});
  check({1, 129, 96, {1, 0, 1}, 1});
}

// |q k| is up to 1e4. A score that large has an absolute error near 1e-3 in float, so has log p; and where p is almost 1,
// dp - delta is a difference of almost equal numbers, one of which was rounded to floatX with out: in bf16 an exact computation
// loses as much.
// BUG (build/bf16/test_attention_emu) llmc/cuda/attention_bf16.h: `exp2_approx(s.x[m][n][i] * to_exp2 - shift)` ->
//   `exp2_approx(s.x[m][n][i] * to_exp2)`
TEST(Attention, StaysFiniteAndRightForHugeScores) {
  const double slack = is_bf16 ? 15 : 30;
  check({1, 130, 16, {0, 1}, 1, 30, 30}, slack);
  check({1, 300, 64, {0, 1}, 1, 18, 18}, slack);
  check({1, 70, 128, {0, 1}, 1, 16, 16}, slack);
}

TEST(Attention, OfEqualScoresIsTheMeanOfWhatCameBefore) {
  check({1, 130, 16, {0, 1}, 1, /*q_scale=*/0});
  check({1, 70, 72, {0, 1}, 1, 1, /*k_scale=*/0});
}

TEST(Attention, OfALonePositionIsItsValue) {
  for (int64_t HS : {8, 128}) {
    Layer layer({3, 1, HS, {0, 1}, 1});
    layer.forward();
    layer.backward();
    const std::vector<floatX> out = layer.d_out.to_host(), dqkv = layer.d_dqkv.to_host();
    for (int64_t b = 0; b < 3; b++)
      for (int64_t i = 0; i < HS; i++) {
        EXPECT_EQ(float(out[size_t(b * 2 * HS + i)]), float(layer.qkv[size_t(layer.v(0).at(b, i))]));
        EXPECT_EQ(float(dqkv[size_t(layer.dv(0).at(b, i))]), float(layer.dout[size_t(b * 2 * HS + i)]));
      }
  }
}

// As generation does: a prompt at once, then position by position, then some together.
TEST(Attention, OfAFewNewPositionsIsThatOfTheWhole) {
  Layer whole({1, 140, 24, {0, 1, 0}, 1}), pieces(whole.c);
  whole.forward();
  int64_t first = 0;
  for (int64_t end : {5, 6, 7, 70, 71, 128, 129, 140}) {
    const std::vector<float> before = pieces.d_lse.to_host();
    pieces.shape.first_query = first, pieces.shape.T = end;
    // lse is (B, NH, T) of this call's T: to compare it below, calls get arrays of their own.
    DeviceArray<float> lse(nans<float>(3 * end));
    attention_forward(pieces.d_out.data, lse.data, pieces.d_qkv.data, pieces.q_stride, pieces.table, pieces.shape);
    const std::vector<float> piece = lse.to_host(), all = whole.d_lse.to_host();
    for (int64_t head = 0; head < 3; head++)
      for (int64_t t = 0; t < end; t++) {
        const float x = piece[size_t(head * end + t)];
        if (t < first) EXPECT_TRUE(std::isnan(x)) << "head " << head << ", position " << t;
        else EXPECT_NEAR(x, all[size_t(head * 140 + t)], 1e-5) << "head " << head << ", position " << t;
      }
    const std::vector<floatX> out = pieces.d_out.to_host();
    for (size_t i = 0; i < out.size(); i++)
      ASSERT_EQ(std::isnan(float(out[i])), int64_t(i) >= end * whole.C()) << "position " << int64_t(i) / whole.C();
    first = end;
  }
  const std::vector<floatX> out = whole.d_out.to_host();
  std::vector<double> expected;
  for (floatX x : out) expected.push_back(double(float(x)));
  EXPECT_LE(relative_error(pieces.d_out.to_host(), expected), tolerance);
}

TEST(Attention, NeverReadsWhatLiesAfterTheEnd) {
  Layer layer({1, 100, 16, {0, 1}, 1});
  for (int p = 0; p < 2; p++)
    for (int64_t t = 77; t < 100; t++)
      for (int64_t i = 0; i < 16; i++) {
        auto& buffer = p < layer.own ? layer.qkv : layer.lender;
        buffer[size_t(layer.k(p).at(t, i))] = buffer[size_t(layer.v(p).at(t, i))] = floatX(NAN);
      }
  layer.upload();
  layer.shape.T = 77;
  layer.forward();
  const std::vector<floatX> out = layer.d_out.to_host();
  for (int64_t i = 0; i < 100 * layer.C(); i++)
    ASSERT_EQ(std::isfinite(float(out[size_t(i)])), i < 77 * layer.C()) << "position " << i / layer.C();
}

#ifdef SLA_EMU
// Whoever copied borrowed k and v would launch more, or read more: what the kernels load is each tile of queries once and, for each, its
// keys' k and v, and in the backward pass the same the other way around, wherever they lie.
TEST(Attention, ReadsBorrowedHeadsInPlace) {
  const Case own = {2, 300, 64, {0, 1, 2, 3}, 4}, borrowed = {2, 300, 64, {0, 1, 2, 3}, 1};
  std::vector<emu::Counters> counts;
  for (const Case& c : {own, borrowed}) {
    Layer layer(c);
    layer.d_qkv.to_host();  // everything queued so far is done
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
  for (int64_t q0 = 0; q0 < own.T; q0 += ForwardTiles<64>::queries) {
    const int64_t end = std::min<int64_t>(own.T, q0 + ForwardTiles<64>::queries);
    rows += uint64_t(end - q0 + 2 * end);
  }
  for (int64_t q0 = 0; q0 < own.T; q0 += DqTiles<64>::queries) {
    const int64_t end = std::min<int64_t>(own.T, q0 + DqTiles<64>::queries);
    rows += uint64_t(2 * (end - q0) + 2 * end);
  }
  for (int64_t k0 = 0; k0 < own.T; k0 += DkdvTiles<64>::keys) {
    const int64_t end = std::min<int64_t>(own.T, k0 + DkdvTiles<64>::keys);
    rows += uint64_t(2 * (end - k0) + 2 * (own.T - k0));
    floats += uint64_t(2 * (own.T - k0));
  }
  EXPECT_EQ(counts[0].bytes_read_async, uint64_t(own.B * own.NH()) * (rows * 64 * sizeof(bf16) + floats * sizeof(float)));
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

TEST(Attention, HasTheSameBitsInWhateverOrderThreadsRun) {
  for (const Case& c : {Case{2, 70, 24, {0, 0, 1}, 1}, Case{1, 70, 72, {0, 0, 1}, 1}, Case{1, 200, 64, {0, 1}, 1}}) {
    std::vector<std::vector<floatX>> first;
    std::vector<float> first_lse;
    for (uint64_t seed : {1, 2, 3, 4, 5, 6}) {
      emu::set_seed(seed);
      Layer layer(c);
      layer.forward();
      layer.backward();
      std::vector<std::vector<floatX>> results = {layer.d_out.to_host(), layer.d_dqkv.to_host(), layer.d_slab.to_host()};
      if (first.empty()) first = results, first_lse = layer.d_lse.to_host();
      for (size_t i = 0; i < results.size(); i++) EXPECT_TRUE(same_bits(results[i], first[i])) << "seed " << seed;
      EXPECT_TRUE(same_bits(layer.d_lse.to_host(), first_lse)) << "seed " << seed;
    }
  }
  emu::set_seed(1);
}
#endif

TEST(CopyRows, CopiesRowsOrSetsThemToZeroAndTouchesNothingElse) {
  for (int64_t rows : {1, 37, 300})
    for (int64_t width : {8, 24, 768, 3072})
      for (bool zeros : {false, true}) {
        const int64_t dst_stride = width + 8, src_stride = width + 16;
        const auto src = random_values<floatX>(rows * src_stride, 1);
        auto expected = random_values<floatX>(rows * dst_stride, 2);
        const DeviceArray<floatX> d_src(src), d_dst(expected);
        copy_rows(d_dst.data, dst_stride, zeros ? nullptr : d_src.data, src_stride, rows, width);
        for (int64_t row = 0; row < rows; row++)
          for (int64_t i = 0; i < width; i++)
            expected[size_t(row * dst_stride + i)] = zeros ? floatX(0.0f) : src[size_t(row * src_stride + i)];
        EXPECT_TRUE(same_bits(d_dst.to_host(), expected)) << rows << " x " << width;
      }
}

// Attention by locality-sensitive hashing against its definition in double, which knows neither rounds nor orders: a
// query's set of keys is found pair by pair.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include "dev/test/operations/operation.h"
#include "llmc/ops/lsh.h"

// ----------------------------------------------------------------------------
// The definition

struct NaiveLsh {
  LshShape s;
  const std::vector<int>& buckets;  // (B * T, NH, rounds)
  std::vector<double> out, lse, dqv;

  bool shares_bucket(int64_t row, int64_t other, int64_t head) const {
    for (int64_t n = 0; n < s.rounds; n++)
      if (buckets[(row * s.NH + head) * s.rounds + n] == buckets[(other * s.NH + head) * s.rounds + n]) return true;
    return false;
  }
  // The keys of the query in `row`, which is position t.
  std::vector<int64_t> keys(int64_t row, int64_t t, int64_t head) const {
    std::vector<int64_t> keys;
    for (int64_t j = row - t; j < row; j++)
      if (shares_bucket(row, j, head)) keys.push_back(j);
    return keys;
  }
  static double norm(const double* x, int64_t n) { return std::sqrt(dot(x, x, n)); }
  static double dot(const double* x, const double* y, int64_t n) { return std::inner_product(x, x + n, y, 0.0); }

  void forward(const std::vector<double>& qv) {
    out.assign(size_t(s.rows() * s.C()), 0), lse.assign(size_t(s.rows() * s.NH), 0);
    for_each_query(qv, [&](int64_t row, int64_t head, const std::vector<int64_t>& seen, const std::vector<double>& p) {
      for (size_t n = 0; n < seen.size(); n++)
        for (int64_t c = head * s.HS; c < (head + 1) * s.HS; c++)
          out[row * s.C() + c] += p[n] * qv[seen[n] * 2 * s.C() + s.C() + c];
    });
  }

  void backward(const std::vector<double>& qv, const std::vector<double>& dout) {
    dqv.assign(qv.size(), 0);
    const int64_t C = s.C(), HS = s.HS;
    for_each_query(qv, [&](int64_t row, int64_t head, const std::vector<int64_t>& seen, const std::vector<double>& p) {
      const int64_t column = head * HS;
      const double *q = &qv[row * 2 * C + column], *d = &dout[row * C + column];
      const double delta = dot(d, &out[row * C + column], HS);
      for (size_t n = 0; n < seen.size(); n++) {
        const double *k = &qv[seen[n] * 2 * C + column], *v = k + C, size = norm(k, HS);
        for (int64_t c = 0; c < HS; c++) dqv[seen[n] * 2 * C + C + column + c] += p[n] * d[c];
        if (seen[n] == row || size == 0) continue;
        const double ds = p[n] * (dot(d, v, HS) - delta) / std::sqrt(double(HS)), cosine = dot(q, k, HS) / size;
        for (int64_t c = 0; c < HS; c++) {
          dqv[row * 2 * C + column + c] += ds * k[c] / size;
          dqv[seen[n] * 2 * C + column + c] += ds * (q[c] - cosine * k[c] / size) / size;
        }
      }
    });
  }

 private:
  // f(row, head, keys, their probabilities), lse =.
  template <class F>
  void for_each_query(const std::vector<double>& qv, const F& f) {
    for (int64_t row = 0; row < s.rows(); row++)
      for (int64_t head = 0; head < s.NH; head++) {
        std::vector<int64_t> seen = keys(row, row % s.T, head);
        const double* q = &qv[row * 2 * s.C() + head * s.HS];
        std::vector<double> p;
        double sum = 0;
        for (int64_t j : seen) {
          const double *k = &qv[j * 2 * s.C() + head * s.HS], size = norm(k, s.HS);
          p.push_back(std::exp(size > 0 ? dot(q, k, s.HS) / size / std::sqrt(double(s.HS)) : 0)), sum += p.back();
        }
        lse[row * s.NH + head] = seen.empty() ? INFINITY : std::log(sum);
        if (seen.empty()) seen.push_back(row), p.push_back(1), sum = 1;
        for (double& x : p) x /= sum;
        f(row, head, seen, p);
      }
  }
};

// ----------------------------------------------------------------------------
// Cases

struct LshCase {
  LshShape shape;
  std::vector<floatX> qv, dout;
  std::vector<int> buckets;

  // Random rows; one has q = 0. Heads and sequences differ in their rows, heads also in their buckets.
  LshCase(const LshShape& s, const std::function<int(int64_t t, int round)>& bucket_of) : shape(s) {
    qv = random_values<floatX>(s.rows() * 2 * s.C(), 1, 1.5), dout = random_values<floatX>(s.rows() * s.C(), 2);
    std::fill_n(qv.begin() + (s.rows() / 2) * 2 * s.C() + s.HS * (s.NH - 1), s.HS, floatX(0.0f));
    for (int64_t row = 0; row < s.rows(); row++)
      for (int64_t i = 0; i < s.NH * s.rounds; i++)
        buckets.push_back(bucket_of(row % s.T + i / s.rounds * 7, int(i % s.rounds)));
  }
};

// A pseudorandom bucket for a position and a round, the same in each run.
inline int random_bucket(int64_t t, int round, int buckets) {
  return int((uint64_t(t * 2654435761 + round * 40503 + 12345) * 1103515245 >> 16) % uint64_t(buckets));
}

inline void for_each_lsh_case(void (*f)(const LshCase&)) {
  struct Case {
    int64_t T, HS;
    int buckets, rounds;
  };
  for (const Case& c : {Case{1, 8, 2, 1}, Case{2, 16, 4, 2}, Case{63, 64, 2, 2}, Case{64, 8, 4, 4}, Case{65, 40, 64, 4},
                        Case{200, 16, 4, 2}, Case{70, 128, 2, 1}}) {
    SCOPED_TRACE(testing::Message() << "T " << c.T << ", " << c.HS << " channels, " << c.buckets << " buckets, "
                                    << c.rounds << " rounds");
    f(LshCase({c.T < 100 ? 2 : 1, c.T, c.T < 100 ? 3 : 1, c.HS, c.buckets, c.rounds},
              [&](int64_t t, int round) { return random_bucket(t, round, c.buckets); }));
  }
#ifdef SLA_CPU
  const LshShape shape = {1, 600, 1, 16, 1024, 3};  // more keys than a tile has
#else
  const LshShape shape = {1, 140, 1, 16, 1024, 3};
#endif
  SCOPED_TRACE("buckets of three rounds");
  {
    SCOPED_TRACE("in one bucket");
    f(LshCase(shape, [](int64_t, int) { return 7; }));
  }
  {
    SCOPED_TRACE("each alone");
    f(LshCase(shape, [](int64_t t, int round) { return int(t + round) % 1024; }));
  }
  {
    SCOPED_TRACE("in the same buckets in each round");
    f(LshCase(shape, [](int64_t t, int) { return random_bucket(t, 0, 3); }));
  }
  {
    SCOPED_TRACE("in one bucket in the last round alone");
    f(LshCase(shape, [](int64_t t, int round) { return round == 2 ? 1023 : int(t) % 100; }));
  }
}

// A case's tensors on the device.
struct LshTensors {
  const LshCase& c;
  DeviceArray<floatX> qv, dout, out, dqv;
  DeviceArray<int> buckets, order, starts;
  DeviceArray<float> inverse_norms, lse, scratch;

  explicit LshTensors(const LshCase& c)
      : c(c), qv(c.qv), dout(c.dout), out(nans<floatX>(c.shape.rows() * c.shape.C())),
        dqv(nans<floatX>(int64_t(c.qv.size()))), buckets(c.buckets), order(ints(c.shape.T)),
        starts(ints(c.shape.buckets + 1)), inverse_norms(nans<float>(c.shape.rows() * c.shape.NH)),
        lse(nans<float>(c.shape.rows() * c.shape.NH)), scratch(nans<float>(lsh_scratch(c.shape))) {}
  std::vector<int> ints(int64_t n) const {
    return std::vector<int>(size_t(c.shape.B * c.shape.NH * c.shape.rounds * n), -1);
  }

  LshOrder of() const { return {buckets.data, inverse_norms.data, order.data, starts.data}; }
  LshAttention attention() const {
    return {c.shape, qv.data, of(), out.data, lse.data, scratch.data, dout.data, dqv.data};
  }
  // The norms of the queries; the buckets stay the case's.
  void find_norms() {
    const LshShape& s = c.shape;
    const DeviceArray<float> rotations(random_values<float>(s.NH * s.rounds * s.HS * s.buckets / 2, 3));
    const DeviceArray<int> others(c.buckets);
    LshHash hash = {qv.data, 2 * s.C(), rotations.data, others.data, inverse_norms.data};
    hash.N = s.rows(), hash.NH = s.NH, hash.HS = s.HS, hash.num_buckets = s.buckets, hash.rounds = s.rounds;
    lsh_hash(hash);
  }
};

// ----------------------------------------------------------------------------
// Buckets

// x R of one row, head and round.
inline std::vector<double> products(const LshHash& a, const std::vector<floatX>& q, const std::vector<float>& rotations,
                                    int64_t row, int64_t head, int64_t round) {
  const int64_t columns = a.num_buckets / 2;
  std::vector<double> sums(size_t(columns), 0.0);
  for (int64_t c = 0; c < a.HS; c++)
    for (int64_t j = 0; j < columns; j++)
      sums[j] += real(q[row * a.q_stride + head * a.HS + c]) *
                 real(rotations[((head * a.rounds + round) * a.HS + c) * columns + j]);
  return sums;
}

TEST(LshHash, FindsTheLargestProductOfEachRound) {
  struct Case {
    int64_t N, NH, HS;
    int buckets, rounds;
  };
  for (const Case& c : {Case{1, 1, 8, 2, 1}, Case{67, 3, 16, 4, 4}, Case{130, 2, 64, 64, 2}, Case{9, 2, 128, 300, 3}}) {
    SCOPED_TRACE(testing::Message() << c.N << " rows, " << c.HS << " channels, " << c.buckets << " buckets");
    LshHash a;
    a.N = c.N, a.NH = c.NH, a.HS = c.HS, a.num_buckets = c.buckets, a.rounds = c.rounds;
    a.q_stride = 2 * c.NH * c.HS, a.dst_rows_stride = 2;
    const auto q = random_values<floatX>(c.N * a.q_stride, 1);
    const auto rotations = random_values<float>(c.NH * c.rounds * c.HS * c.buckets / 2, 2);
    std::vector<int> rows;  // in reverse order, with a row before the first
    for (int64_t i = 0; i < c.N; i++) rows.push_back(int(c.N - i)), rows.push_back(-1);
    const DeviceArray<floatX> d_q(q);
    const DeviceArray<float> d_rotations(rotations);
    const DeviceArray<int> d_rows(rows);
    a.q = d_q.data, a.rotations = d_rotations.data, a.dst_rows = d_rows.data;
    const auto [buckets, norms] = in_any_order(
        [&] {
          const DeviceArray<int> buckets(std::vector<int>(size_t((c.N + 1) * c.NH * c.rounds), -1));
          const DeviceArray<float> norms(nans<float>((c.N + 1) * c.NH));
          LshHash hash = a;
          hash.buckets = buckets.data, hash.inverse_norms = norms.data;
          lsh_hash(hash);
          return std::make_tuple(buckets.to_host(), norms.to_host());
        },
        2);
    int flips = 0;  // of products that in fp32 are as large as the largest
    for (int64_t row = 0; row < c.N; row++)
      for (int64_t head = 0; head < c.NH; head++) {
        const int64_t to = (c.N - row) * c.NH + head;
        double square = 0;
        for (int64_t i = 0; i < c.HS; i++) square += std::pow(real(q[row * a.q_stride + head * c.HS + i]), 2);
        EXPECT_NEAR(norms[to] * std::sqrt(square), 1, 1e-6);
        for (int64_t round = 0; round < c.rounds; round++) {
          std::vector<double> x = products(a, q, rotations, row, head, round);
          for (int i = 0; i < c.buckets / 2; i++) x.push_back(-x[i]);
          const int bucket = buckets[to * c.rounds + round];
          ASSERT_TRUE(0 <= bucket && bucket < c.buckets) << bucket;
          const double largest = *std::max_element(x.begin(), x.end());
          flips += x[bucket] < largest;
          EXPECT_GE(x[bucket], largest - 1e-5);
        }
      }
    EXPECT_EQ(flips, 0);
    for (int64_t i = 0; i < c.NH * c.rounds; i++) EXPECT_EQ(buckets[i], -1);
  }
}

TEST(LshHash, TakesTheFirstOfEqualProducts) {
  // Columns 1 and 2 are equal, and column 3 is their negative. All products of q = 0 are equal.
  const std::vector<float> R = {0.5f, 1, 1, -1};
  std::vector<float> rotations(32, 0.0f);
  std::copy(R.begin(), R.end(), rotations.begin());
  std::vector<floatX> q(3 * 8, floatX(0.0f));
  q[0] = floatX(2.0f), q[8] = floatX(-2.0f);
  const DeviceArray<floatX> d_q(q);
  const DeviceArray<float> d_rotations(rotations), norms(nans<float>(3));
  const DeviceArray<int> buckets(std::vector<int>(3, -1));
  LshHash a = {d_q.data, 8, d_rotations.data, buckets.data, norms.data};
  a.N = 3, a.NH = 1, a.HS = 8, a.num_buckets = 8, a.rounds = 1;
  lsh_hash(a);
  EXPECT_EQ(buckets.to_host(), (std::vector<int>{1, 3, 0}));
  EXPECT_EQ(norms.to_host(), (std::vector<float>{0.5f, 0.5f, 0.0f}));
}

TEST(LshSort, IsAStableSortByBucket) {
  for (const LshShape& s : {LshShape{2, 1, 3, 8, 2, 1}, LshShape{1, 33, 2, 8, 2, 3}, LshShape{2, 200, 1, 8, 6, 2},
                            LshShape{1, 500, 1, 8, 4000, 2}, LshShape{1, 64, 1, 8, 64, 1}}) {
    SCOPED_TRACE(testing::Message() << s.T << " positions, " << s.buckets << " buckets");
    const LshCase c(s, [&](int64_t t, int round) { return random_bucket(t, round, s.buckets); });
    const auto [order, starts] = in_any_order([&] {
      const LshTensors tensors(c);
      lsh_sort(s, tensors.of());
      return std::make_tuple(tensors.order.to_host(), tensors.starts.to_host());
    });
    std::vector<int> e_order, e_starts;
    for (int64_t i = 0; i < s.B * s.NH * s.rounds; i++) {
      const int64_t b = i / (s.NH * s.rounds);
      auto bucket = [&](int t) { return c.buckets[(b * s.T + t) * s.NH * s.rounds + i % (s.NH * s.rounds)]; };
      std::vector<int> positions(size_t(s.T));
      std::iota(positions.begin(), positions.end(), 0);
      std::stable_sort(positions.begin(), positions.end(), [&](int x, int y) { return bucket(x) < bucket(y); });
      e_order.insert(e_order.end(), positions.begin(), positions.end());
      for (int k = 0; k <= s.buckets; k++)
        e_starts.push_back(
            int(std::count_if(positions.begin(), positions.end(), [&](int t) { return bucket(t) < k; })));
    }
    EXPECT_EQ(order, e_order);
    EXPECT_EQ(starts, e_starts);
  }
}

// ----------------------------------------------------------------------------
// Attention

// Probabilities, scores' gradients and, on the CPU, keys are rounded to bf16 before they are multiplied.
constexpr double of_lsh = is_16_bit ? 6e-3 * coarseness : 2e-6;

TEST(LshDefinition, HasTheGradientsOfFiniteDifferences) {
  const LshCase c({1, 9, 2, 4, 4, 2}, [](int64_t t, int round) { return random_bucket(t, round, 4); });
  NaiveLsh naive = {c.shape, c.buckets, {}, {}, {}};
  const std::vector<double> qv = doubles(c.qv), dout = doubles(c.dout);
  naive.forward(qv);
  naive.backward(qv, dout);
  std::vector<double> slopes, of_zero = naive.dqv;
  for (size_t i = 0; i < qv.size(); i++) {
    double sides[2];
    for (int side = 0; side < 2; side++) {
      std::vector<double> moved = qv;
      moved[i] += side == 0 ? 1e-5 : -1e-5;
      NaiveLsh there = {c.shape, c.buckets, {}, {}, {}};
      there.forward(moved);
      sides[side] = std::inner_product(dout.begin(), dout.end(), there.out.begin(), 0.0);
    }
    slopes.push_back((sides[0] - sides[1]) / 2e-5);
  }
  for (size_t i = 0; i < qv.size(); i++)  // through k = q / |q|, q = 0 has no gradient
    if (qv[i] == 0) slopes[i] = of_zero[i] = 0;
  EXPECT_LE(relative_error(of_zero, slopes), 1e-8);
}

TEST(LshAttention, IsThatOfTheDefinitionAndSoAreItsGradients) {
  for_each_lsh_case([](const LshCase& c) {
    NaiveLsh naive = {c.shape, c.buckets, {}, {}, {}};
    const std::vector<double> qv = doubles(c.qv);
    naive.forward(qv);
    naive.backward(qv, doubles(c.dout));
    const auto [out, lse, all_gradients] = in_any_order(
        [&] {
          LshTensors tensors(c);
          tensors.find_norms();
          lsh_sort(c.shape, tensors.of());
          lsh_forward(tensors.attention());
          copy_to_device(tensors.scratch.data, nans<float>(int64_t(tensors.scratch.size)));
          lsh_backward(tensors.attention());
          return std::make_tuple(tensors.out.to_host(), tensors.lse.to_host(), tensors.dqv.to_host());
        },
        2);
    EXPECT_LE(relative_error(out, naive.out), of_lsh);
    for (size_t i = 0; i < lse.size(); i++)
      if (std::isinf(naive.lse[i])) EXPECT_EQ(lse[i], INFINITY);
      else EXPECT_NEAR(lse[i], naive.lse[i], is_16_bit ? 1e-2 * coarseness : 1e-5);
    std::vector<floatX> gradients[2];  // of q and v
    std::vector<double> expected[2];
    for (size_t i = 0; i < all_gradients.size(); i++) {
      const bool is_v = int64_t(i) / c.shape.C() % 2 == 1;
      gradients[is_v].push_back(all_gradients[i]), expected[is_v].push_back(naive.dqv[i]);
    }
    const double size = std::sqrt(double(c.dout.size()));  // where no query sees two keys, the gradient of q is 0
    EXPECT_LE(relative_error(gradients[0], expected[0], size), 2 * of_lsh) << "of q";
    EXPECT_LE(relative_error(gradients[1], expected[1]), of_lsh) << "of v";
  });
}

// The last positions of sequences of different lengths, which lie in a cache in reverse order with NaN between them,
// and whole sequences that lie side by side.
TEST(LshDecode, IsTheAttentionOfTheLastPositions) {
  const LshCase c({3, 300, 2, 24, 64, 2}, [](int64_t t, int round) { return random_bucket(t, round, 64); });
  NaiveLsh naive = {c.shape, c.buckets, {}, {}, {}};
  naive.forward(doubles(c.qv));
  const int64_t C = c.shape.C(), of_row = c.shape.NH * c.shape.rounds, capacity = c.shape.T + 5;
  const int lengths[] = {40, 300, 3};
  std::vector<floatX> cache = nans<floatX>(3 * capacity * 2 * C);
  std::vector<int> buckets(size_t(3 * capacity * of_row), 0);
  std::vector<KeyRows> sequences;
  for (int64_t b = 0; b < 3; b++) {
    sequences.push_back({int((2 - b) * capacity), lengths[b]});
    std::copy_n(c.qv.begin() + b * c.shape.T * 2 * C, lengths[b] * 2 * C,
                cache.begin() + sequences[b].first_row * 2 * C);
    std::copy_n(c.buckets.begin() + b * c.shape.T * of_row, lengths[b] * of_row,
                buckets.begin() + sequences[b].first_row * of_row);
  }
  const DeviceArray<floatX> d_cache(cache), d_qv(c.qv);
  const DeviceArray<int> d_buckets(buckets), d_all_buckets(c.buckets);
  const DeviceArray<KeyRows> d_sequences(sequences);
  auto decode = [&](LshDecode a) {
    const auto [out] = in_any_order(
        [&] {
          const DeviceArray<floatX> out(nans<floatX>(a.shape.B * a.queries() * C));
          a.out = out.data;
          lsh_decode(a);
          return std::make_tuple(out.to_host());
        },
        2);
    return out;
  };
  auto expected = [&](int64_t row, int64_t rows) {
    return std::vector<double>(naive.out.begin() + row * C, naive.out.begin() + (row + rows) * C);
  };
  LshDecode a = {c.shape, c.shape.T - 3, d_sequences.data, d_cache.data, d_buckets.data};
  std::vector<double> e_out;
  for (int64_t b = 0; b < 3; b++)
    for (double x : expected(b * c.shape.T + lengths[b] - 3, 3)) e_out.push_back(x);
  EXPECT_LE(relative_error(decode(a), e_out), one_rounding);
  a = {c.shape, 280, nullptr, d_qv.data, d_all_buckets.data};
  e_out.clear();
  for (int64_t b = 0; b < 3; b++)
    for (double x : expected(b * c.shape.T + 280, 20)) e_out.push_back(x);
  EXPECT_LE(relative_error(decode(a), e_out), one_rounding);
}

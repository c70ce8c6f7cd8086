// The queries of relative positions, and the sines and cosines of distances.
#pragma once
#include <cmath>
#include "dev/test/operations/operation.h"
#include "llmc/ops/relative.h"

TEST(RelativeQueries, AreTheSumsWithUAndV) {
  struct Case {
    int64_t N, C, q_stride;
  };
  for (const Case& c : {Case{9, 8, 8}, Case{7, 40, 120}, Case{65, 264, 272}, Case{300, 32, 96}}) {
    const int64_t N = c.N, C = c.C, q_stride = c.q_stride;
    SCOPED_TRACE(testing::Message() << N << " x " << C << ", rows " << q_stride << " apart");
    const auto q = random_values<floatX>(N * q_stride, 1), u = random_values<floatX>(C, 2);
    const auto v = random_values<floatX>(C, 3);
    const auto of_keys = random_values<floatX>(N * C, 4), of_distances = random_values<floatX>(N * C, 5);
    std::vector<double> e_keys, e_distances, e_dq;
    for (int64_t n = 0; n < N; n++)
      for (int64_t i = 0; i < C; i++) {
        e_keys.push_back(real(q[n * q_stride + i]) + real(u[i]));
        e_distances.push_back(real(q[n * q_stride + i]) + real(v[i]));
        e_dq.push_back(real(of_keys[n * C + i]) + real(of_distances[n * C + i]));
      }
    const DeviceArray<floatX> d_q(q), d_u(u), d_v(v), d_of_keys(of_keys), d_of_distances(of_distances);
    const auto [keys, distances, all_of_dq] = in_any_order([&] {
      DeviceArray<floatX> keys(nans<floatX>(N * C)), distances(nans<floatX>(N * C)), dq(q);
      relative_queries_forward({d_q.data, q_stride, d_u.data, d_v.data, keys.data, distances.data}, N, C);
      relative_queries_backward({dq.data, q_stride, d_of_keys.data, d_of_distances.data}, N, C);
      return std::make_tuple(keys.to_host(), distances.to_host(), dq.to_host());
    });
    std::vector<floatX> dq, between, untouched;
    for (int64_t i = 0; i < N * q_stride; i++) {
      const bool is_dq = i % q_stride < C;
      (is_dq ? dq : between).push_back(all_of_dq[i]);
      if (!is_dq) untouched.push_back(q[i]);
    }
    EXPECT_LE(relative_error(keys, e_keys), one_rounding);
    EXPECT_LE(relative_error(distances, e_distances), one_rounding);
    EXPECT_LE(relative_error(dq, e_dq), one_rounding);
    EXPECT_TRUE(same_bits(between, untouched)) << "wrote between the rows of dq";
  }
}

TEST(SinesOfDistances, BeginWithTheLargestDistanceAndHaveCosinesLast) {
  const std::vector<float> table = sines_of_distances(5, 6);
  ASSERT_EQ(table.size(), 30u);
  for (int row = 0; row < 5; row++)
    for (int i = 0; i < 3; i++) {
      const double angle = (4 - row) * std::pow(10000.0, -2.0 * i / 6);
      EXPECT_NEAR(table[row * 6 + i], std::sin(angle), 1e-7) << row << " " << i;
      EXPECT_NEAR(table[row * 6 + 3 + i], std::cos(angle), 1e-7) << row << " " << i;
    }
}

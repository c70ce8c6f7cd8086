// Rotary positions.
#pragma once
#include <cmath>
#include "dev/test/operations/operation.h"
#include "llmc/ops/rotary.h"

TEST(Rotary, TurnsPairsByTheAngleOfTheirPosition) {
  struct Case {
    int64_t B, T;
    int heads, HS;
    int64_t stride, first_position;
  };
  // All of a row, a part of it, one position, heads whose half is no multiple of eight, more than a block of threads.
  for (const Case& c :
       {Case{2, 5, 3, 16, 48, 0}, Case{1, 7, 2, 8, 64, 3}, Case{3, 1, 1, 24, 40, 9}, Case{1, 70, 4, 64, 256, 0}}) {
    SCOPED_TRACE(testing::Message() << c.B << " x " << c.T << ", " << c.heads << " heads of " << c.HS);
    const double base = 100;
    const auto x = random_values<floatX>(c.B * c.T * c.stride, 1);
    std::vector<double> expected = doubles(x);
    for (int64_t n = 0; n < c.B * c.T; n++)
      for (int head = 0; head < c.heads; head++)
        for (int i = 0; i < c.HS / 2; i++) {
          const double angle = double(n % c.T + c.first_position) * std::pow(base, -2.0 * i / c.HS);
          double &a = expected[n * c.stride + head * c.HS + i], &b = (&a)[c.HS / 2];
          const double rotated = a * std::cos(angle) - b * std::sin(angle);
          b = b * std::cos(angle) + a * std::sin(angle), a = rotated;
        }
    const int64_t N = c.B * c.T;
    std::vector<int> all_positions(size_t(c.T + c.first_position));
    std::iota(all_positions.begin(), all_positions.end(), 0);
    const DeviceArray<float> table(rotary_table(all_positions, c.HS, base));
    std::vector<int> positions;
    for (int64_t n = 0; n < N; n++) positions.push_back(int(n % c.T + c.first_position));
    const DeviceArray<int> d_positions(positions);
    const auto [result, counted, back] = in_any_order([&] {
      DeviceArray<floatX> d(x), d_back(x);
      rotate({d.data, c.stride, c.heads, c.HS, table.data}, {c.T, d_positions.data}, N);
      rotate({d_back.data, c.stride, c.heads, c.HS, table.data}, {c.T, nullptr, c.first_position}, N);
      const std::vector<floatX> counted = d_back.to_host();
      rotate({d_back.data, c.stride, c.heads, c.HS, table.data}, {c.T, nullptr, c.first_position}, N, /*sign=*/-1);
      return std::make_tuple(d.to_host(), counted, d_back.to_host());
    });
    EXPECT_LE(relative_error(result, expected), one_rounding);
    EXPECT_LE(relative_error(counted, expected), one_rounding);
    EXPECT_LE(relative_error(back, doubles(x)), two_roundings);
    for (int64_t n = 0; n < N; n++)
      for (int64_t i = c.heads * c.HS; i < c.stride; i++)
        ASSERT_EQ(real(result[n * c.stride + i]), real(x[n * c.stride + i])) << "beside the heads";
  }
}

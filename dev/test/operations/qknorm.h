// QK-norm, alone and with rotary positions.
#pragma once
#include <cmath>
#include "dev/test/operations/operation.h"
#include "llmc/ops/qknorm.h"
#include "llmc/ops/rotary.h"

TEST(Qknorm, DividesHeadsByTheirRootMeanSquare) {
  struct Case {
    int64_t N;
    int heads, HS;
    int64_t stride;
  };
  // All of a row, a part of it, heads of as many lanes as a warp has and of no power of two, several blocks.
  for (const Case& c : {Case{10, 3, 16, 48}, Case{7, 2, 8, 64}, Case{3, 1, 24, 40}, Case{70, 4, 64, 256},
                        Case{5, 2, 128, 264}, Case{9, 3, 40, 128}})
    for (bool rotates : {false, true}) {
      SCOPED_TRACE(testing::Message() << c.N << " rows, " << c.heads << " heads of " << c.HS
                                      << (rotates ? ", turned" : ""));
      const int64_t N = c.N, elements = N * c.stride, y_stride = c.stride + 8;
      // One head is as small as eps.
      auto x = random_values<floatX>(elements, 1, 2);
      for (int64_t i = 0; i < c.HS; i++) x[i] = floatX(1e-3f * float(real(x[i])));
      const auto dy = random_values<floatX>(elements, 2);
      const std::vector<double> inputs = doubles(x), d_out = doubles(dy);
      std::vector<double> e_y = inputs, e_dx = d_out, e_rstd;
      std::vector<int> positions(static_cast<size_t>(N));
      std::iota(positions.begin(), positions.end(), 0);
      const std::vector<float> angles = rotary_table(positions, c.HS, 100);
      auto turned = [&](const double* z, int64_t n, int i, int sign) {
        const int half = c.HS / 2;
        if (!rotates) return z[i];
        const double a = z[i % half], b = z[i % half + half];
        const double co = real(angles[(n * half + i % half) * 2]),
                     s = sign * real(angles[(n * half + i % half) * 2 + 1]);
        return i < half ? a * co - b * s : b * co + a * s;
      };
      for (int64_t n = 0; n < N; n++)
        for (int head = 0; head < c.heads; head++) {
          const int64_t first = n * c.stride + head * c.HS;
          double squares = 0, dot = 0;
          for (int i = 0; i < c.HS; i++) squares += inputs[first + i] * inputs[first + i];
          const double r = 1 / std::sqrt(squares / c.HS + 1e-6);
          e_rstd.push_back(r);
          std::vector<double> y(size_t(c.HS)), back(size_t(c.HS));
          for (int i = 0; i < c.HS; i++) y[i] = r * inputs[first + i], back[i] = turned(&d_out[first], n, i, -1);
          for (int i = 0; i < c.HS; i++) dot += y[i] * back[i];
          for (int i = 0; i < c.HS; i++) {
            e_y[first + i] = turned(y.data(), n, i, 1);
            e_dx[first + i] = r * (back[i] - y[i] * dot / c.HS);
          }
        }
      const DeviceArray<float> table(angles);
      const float* const of_rotation = rotates ? table.data : nullptr;
      std::vector<floatX> exact_y(size_t(N * y_stride), floatX(0.0f));
      for (int64_t n = 0; n < N; n++)
        for (int64_t i = 0; i < c.heads * c.HS; i++) exact_y[n * y_stride + i] = floatX(float(e_y[n * c.stride + i]));
      const DeviceArray<floatX> kept(exact_y);
      const auto [y, rstd, dx] = in_any_order([&] {
        DeviceArray<floatX> d_x(x), d_unkept(x), d_dy(dy);
        DeviceArray<float> rstd(nans<float>(N * c.heads));
        norm_heads({d_x.data, c.stride, c.heads, c.HS, of_rotation}, rstd.data, {N}, N);
        norm_heads({d_unkept.data, c.stride, c.heads, c.HS, of_rotation}, nullptr, {N}, N);
        EXPECT_TRUE(same_bits(d_x.to_host(), d_unkept.to_host()));
        norm_heads_backward({d_dy.data, c.stride, c.heads, c.HS, of_rotation}, {rstd.data, kept.data, y_stride}, {N},
                            N);
        return std::make_tuple(d_x.to_host(), rstd.to_host(), d_dy.to_host());
      });
      EXPECT_LE(relative_error(rstd, e_rstd), of_fp32);
      EXPECT_LE(relative_error(y, e_y), one_rounding);  // what is beside the heads stays
      EXPECT_LE(relative_error(dx, e_dx), 2 * two_roundings);
    }
}

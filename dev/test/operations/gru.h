// The gate of `gru`, without its matmuls.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include "dev/test/operations/operation.h"
#include "llmc/ops/gru.h"

inline double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }

TEST(Relu, AndItsGradientAreZeroForNegativeNumbers) {
  for (int64_t n : {8, 2040, 2048, 2056, 70000}) {
    SCOPED_TRACE(n);
    const auto x = random_values<floatX>(n, 1);
    auto dy = random_values<floatX>(n, 2);
    for (int64_t i = 0; i < n; i += 5)  // too large a gradient of a unit that is off is none
      if (real(x[i]) <= 0) dy[i] = floatX(INFINITY);
    std::vector<double> e_y, e_dx;
    for (int64_t i = 0; i < n; i++)
      e_y.push_back(std::max(0.0, real(x[i]))), e_dx.push_back(real(x[i]) > 0 ? real(dy[i]) : 0);
    const DeviceArray<floatX> d_x(x);
    const auto [y, dx] = in_any_order([&] {
      DeviceArray<floatX> y(nans<floatX>(n)), dx(dy);
      relu_forward(y.data, d_x.data, n);
      relu_backward(dx.data, y.data, n);
      return std::make_tuple(y.to_host(), dx.to_host());
    });
    EXPECT_EQ(relative_error(y, e_y), 0);
    EXPECT_EQ(relative_error(dx, e_dx), 0);
  }
}

// A NaN in a branch's output, or in the residual stream, is one in the stream after the gate: a run that diverges must
// be seen to. One element of 4 rows of 8 channels has it.
TEST(Gru, PassesOnNan) {
  const int64_t N = 4, C = 8;
  for (int64_t at = 0; at < N * C; at++) {
    auto x = random_values<floatX>(N * C, 1);
    x[size_t(at)] = nans<floatX>(1)[0];
    const DeviceArray<floatX> d_x(x), bias(random_values<floatX>(C, 3)), sums(random_values<floatX>(N * 2 * C, 4));
    DeviceArray<floatX> y(random_values<floatX>(N * C, 5)), gates(random_values<floatX>(N * 3 * C, 6));
    DeviceArray<floatX> reset_in(x), after(x);
    relu_forward(y.data, d_x.data, N * C);
    const GruGates<floatX> gru = {gates.data, d_x.data, reset_in.data, bias.data, after.data, nullptr, nullptr};
    gru_gates_forward(gru, sums.data, N, C);
    gru_output_forward(gru, sums.data, N, C);
    for (const auto& result : {y.to_host(), reset_in.to_host(), after.to_host()})
      for (int64_t i = 0; i < N * C; i++) EXPECT_EQ(std::isnan(real(result[size_t(i)])), i == at) << i;
  }
}

// The forward pass and the backward pass of one gate; both continue with what they wrote before, rounded to floatX.
TEST(Gru, HasTheFormulasGatesOutputAndGradients) {
  // With fewer numbers roundings do not average out.
  for (const RowsAndChannels& s :
       {RowsAndChannels{65, 8}, RowsAndChannels{33, 40}, RowsAndChannels{65, 264}, RowsAndChannels{300, 32}}) {
    const int64_t N = s.N, C = s.C;
    SCOPED_TRACE(testing::Message() << N << " x " << C);
    const auto terms = random_values<floatX>(N * 3 * C, 1, 2), x = random_values<floatX>(N * C, 2),
               bias = random_values<floatX>(C, 3);
    const auto sums = random_values<floatX>(N * 2 * C, 4), more = random_values<floatX>(N * C, 5);
    const auto dout = random_values<floatX>(N * C, 6), dreset_in = random_values<floatX>(N * C, 7);
    const DeviceArray<floatX> d_x(x), d_bias(bias), d_sums(sums), d_more(more), d_dreset_in(dreset_in);
    const auto [gates, reset_in, after, out, dupdate, kept, dgates, reset_again, dx] = in_any_order([&] {
      DeviceArray<floatX> gates(terms), reset_in(nans<floatX>(N * C)), out(nans<floatX>(N * C)), d(dout);
      const GruGates<floatX> gru = {gates.data, d_x.data, reset_in.data,   d_bias.data,
                                    out.data,   d.data,   d_dreset_in.data};
      gru_gates_forward(gru, d_sums.data, N, C);
      const auto gates_before = gates.to_host(), reset_before = reset_in.to_host();
      gru_output_forward(gru, d_more.data, N, C);
      const auto after = gates.to_host();
      gru_output_backward(gru, N, C);
      const auto dupdate = gates.to_host(), kept = d.to_host();
      copy_to_device(reset_in.data, nans<floatX>(N * C));
      gru_gates_backward(gru, N, C);
      return std::make_tuple(gates_before, reset_before, after, out.to_host(), dupdate, kept, gates.to_host(),
                             reset_in.to_host(), d.to_host());
    });
    std::vector<double> e_gates, e_reset, e_after, e_out, e_dupdate, e_kept, e_dgates, e_dx;
    for (int64_t n = 0; n < N; n++)
      for (int64_t part = 0; part < 3; part++)
        for (int64_t c = 0; c < C; c++) {
          const int64_t at = n * 3 * C + part * C + c, i = n * C + c;
          // Each operation's inputs are what the one before it has written.
          const double r = real(gates[n * 3 * C + c]), z = real(after[n * 3 * C + C + c]),
                       g = real(after[n * 3 * C + 2 * C + c]), in = real(x[i]), d = real(dout[i]),
                       dr = real(dreset_in[i]);
          const double shift = part < 2 ? real(sums[n * 2 * C + part * C + c]) - (part == 1 ? real(bias[c]) : 0) : 0;
          e_gates.push_back(part < 2 ? sigmoid_of(real(terms[at]) + shift) : real(terms[at]));
          e_after.push_back(part < 2 ? real(gates[at]) : std::tanh(real(terms[at]) + real(more[i])));
          e_dupdate.push_back(part == 0   ? real(after[at])
                              : part == 1 ? d * (g - in) * z * (1 - z)
                                          : d * z * (1 - g * g));
          e_dgates.push_back(part == 0 ? dr * in * r * (1 - r) : real(dupdate[at]));
          if (part > 0) continue;
          e_reset.push_back(r * in);
          e_out.push_back((1 - z) * in + z * g);
          e_kept.push_back(d * (1 - z));
          e_dx.push_back(real(kept[i]) + dr * r);
        }
    EXPECT_LE(relative_error(gates, e_gates), one_rounding);
    EXPECT_LE(relative_error(reset_in, e_reset), two_roundings);
    EXPECT_LE(relative_error(after, e_after), one_rounding);
    EXPECT_LE(relative_error(out, e_out), two_roundings);
    EXPECT_LE(relative_error(dupdate, e_dupdate), two_roundings);
    EXPECT_LE(relative_error(kept, e_kept), one_rounding);
    EXPECT_LE(relative_error(dgates, e_dgates), one_rounding);
    EXPECT_LE(relative_error(reset_again, e_reset), one_rounding);
    EXPECT_LE(relative_error(dx, e_dx), one_rounding);
  }
}

#ifdef SLA_CPU
TEST(Tanh, IsWithinAFewRoundingErrorsAndKeepsItsLimits) {
  double worst = 0;
  for (double x = -20; x < 20; x += 0.000917)
    worst = std::max(worst, std::abs(real(vec_tanh(float(x))) / std::tanh(real(float(x))) - 1));
  EXPECT_LE(worst, 4e-7);
  EXPECT_EQ(vec_tanh(0.0f), 0.0f);
  EXPECT_EQ(vec_tanh(1e-20f), 1e-20f);
  EXPECT_EQ(vec_tanh(200.0f), 1.0f);
  EXPECT_EQ(vec_tanh(-std::numeric_limits<float>::infinity()), -1.0f);
  EXPECT_TRUE(std::isnan(vec_tanh(std::numeric_limits<float>::quiet_NaN())));
}
#endif

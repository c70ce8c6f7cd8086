// The activations of MLPs.
#pragma once
#include "dev/test/operations/operation.h"

constexpr Activation activations_of_one[] = {Activation::gelu, Activation::relu2, Activation::silu};

inline const char* name_of(Activation f) {
  switch (f) {
    case Activation::gelu: return "GELU";
    case Activation::relu2: return "ReLU squared";
    case Activation::silu: return "SiLU";
    case Activation::swiglu: return "SwiGLU's gate";
  }
  return "";
}
inline double value_of(Activation f, double x) {
  switch (f) {
    case Activation::gelu: return gelu_of(x);
    case Activation::relu2: return x > 0 ? x * x : 0;
    case Activation::silu:
    case Activation::swiglu: return x / (1 + std::exp(-x));
  }
  return NAN;
}
inline double slope_of(Activation f, double x) {
  const double s = 1 / (1 + std::exp(-x));
  switch (f) {
    case Activation::gelu: return gelu_slope(x);
    case Activation::relu2: return x > 0 ? 2 * x : 0;
    case Activation::silu:
    case Activation::swiglu: return s * (1 + x * (1 - s));
  }
  return NAN;
}

TEST(Activation, AndItsDerivativeAreTheFormulas) {
  for (Activation f : activations_of_one) {
    SCOPED_TRACE(name_of(f));
    std::vector<floatX> x, d;
    for (float v = -12; v < 12; v += 0.01f) x.push_back(floatX(v));
    for (float v : {0.0f, 1e4f, 1e9f, 1e15f, 3e38f})
      if (std::isfinite(real(floatX(v))) && (f != Activation::relu2 || v < 1e10f))
        x.push_back(floatX(v)), x.push_back(floatX(-v));
    while (x.size() % 8 != 0) x.push_back(floatX(0.5f));
    d.resize(x.size(), floatX(1.5f));

    const DeviceArray<floatX> d_x(x);
    const auto [y, slope] = in_any_order([&] {
      DeviceArray<floatX> y(nans<floatX>(int64_t(x.size()))), slope(d);
      activation_forward(f, y.data, d_x.data, 1, int64_t(x.size()));
      activation_backward(f, slope.data, d_x.data, 1, int64_t(x.size()));
      return std::make_tuple(y.to_host(), slope.to_host());
    });
    for (size_t i = 0; i < x.size(); i++) {
      const double v = real(x[i]);
      const bool overflows = f == Activation::gelu && std::abs(v) > 1e3;  // as gelu_slope's own squares do
      const double e_y = value_of(f, v), e_slope = 1.5 * (overflows ? double(v > 0) : slope_of(f, v));
      if (is_fp16 && e_y > 65504) {
        EXPECT_EQ(real(y[i]), INFINITY) << v;
      } else EXPECT_NEAR(real(y[i]), e_y, 2 * one_rounding * std::max(1.0, std::abs(e_y))) << v;
      EXPECT_NEAR(real(slope[i]), e_slope, 3 * one_rounding * std::max(1.0, std::abs(e_slope))) << v;
    }
  }
}

// Elements beside and on the 2,048 of a block.
TEST(Activation, IsThatOfEveryElement) {
  for (Activation f : activations_of_one)
    for (int64_t n : {2040, 2048, 2056}) {
      SCOPED_TRACE(testing::Message() << name_of(f) << ", " << n);
      const auto x = random_values<floatX>(n, 1), d = random_values<floatX>(n, 2);
      const DeviceArray<floatX> d_x(x), y(nans<floatX>(n)), slope(d);
      activation_forward(f, y.data, d_x.data, n / 8, 8);
      activation_backward(f, slope.data, d_x.data, n / 8, 8);
      std::vector<double> e_y, e_slope;
      for (int64_t i = 0; i < n; i++)
        e_y.push_back(value_of(f, real(x[i]))), e_slope.push_back(real(d[i]) * slope_of(f, real(x[i])));
      EXPECT_LE(relative_error(y.to_host(), e_y), one_rounding);
      EXPECT_LE(relative_error(slope.to_host(), e_slope), one_rounding);
    }
}

TEST(Activation, LetsNaNThrough) {
  for (Activation f : activations_of_one) {
    const std::vector<floatX> ones(8, floatX(1.0f));
    const DeviceArray<floatX> x(nans<floatX>(8)), y(ones), d(ones);
    activation_forward(f, y.data, x.data, 1, 8);
    activation_backward(f, d.data, x.data, 1, 8);
    EXPECT_TRUE(std::isnan(float(y.to_host()[0])));
    EXPECT_TRUE(std::isnan(float(d.to_host()[0])));
  }
}

// Rows beside and on the 2,048 units of a block, of more and of fewer units.
TEST(Activation, OfTwoProductsIsAGatedOne) {
  for (auto [N, H] : {std::pair(51, 40), std::pair(64, 32), std::pair(1, 2056), std::pair(3, 8)}) {
    SCOPED_TRACE(testing::Message() << N << " x " << H);
    const int64_t rows = N, units = H;
    const auto x = random_values<floatX>(rows * 2 * units, 1, 4);
    auto d = random_values<floatX>(rows * 2 * units, 2);
    std::vector<double> e_y, e_d(x.size());
    for (int64_t i = 0; i < rows * units; i++) {
      const int64_t at = i / units * 2 * units + i % units;
      const double g = real(x[at]), up = real(x[at + units]), s = 1 / (1 + std::exp(-g));
      e_y.push_back(g * s * up);
      e_d[at] = real(d[at]) * up * (s + g * s * (1 - s)), e_d[at + units] = real(d[at]) * g * s;
      d[at + units] = nans<floatX>(1)[0];
    }
    const DeviceArray<floatX> d_x(x);
    const auto [y, slope] = in_any_order([&] {
      DeviceArray<floatX> y(nans<floatX>(rows * units)), slope(d);
      activation_forward(Activation::swiglu, y.data, d_x.data, rows, units);
      activation_backward(Activation::swiglu, slope.data, d_x.data, rows, units);
      return std::make_tuple(y.to_host(), slope.to_host());
    });
    EXPECT_LE(relative_error(y, e_y), one_rounding);
    EXPECT_LE(relative_error(slope, e_d), one_rounding);
  }
}

// Random values and comparisons for tests of operations and of the model.
#pragma once
#include <gtest/gtest.h>
#include <cmath>
#include <cstring>
#include <vector>
#include "llmc/ops/precision.h"
#include "llmc/base/random.h"

// The errors of rounding to floatX, as a multiple of bf16's: fp16 has three more bits.
constexpr double coarseness = is_fp16 ? 1.0 / 8 : 1;

// Normally distributed, rounded to T.
template <class T>
std::vector<T> random_values(int64_t n, uint32_t tag, double scale = 1) {
  std::vector<T> x(size_t(n), T(0.0f));
  for (size_t i = 0; i < x.size(); i++) x[i] = T(float(scale * random_normal(1, RandomStream::test, tag, i)));
  return x;
}

template <class T>
std::vector<T> nans(int64_t n) {
  return std::vector<T>(size_t(n), T(NAN));
}

// A floatX, float or double as a double.
inline double real(float x) { return double(x); }
inline double real(double x) { return x; }

// ||a - expected|| / ||expected||; where the expected values are all zero, ||a|| / norm_if_zero, which is infinite by
// default unless a is zero as well. NaN if a has one.
template <class A, class B>
double relative_error(const A& a, const B& expected, double norm_if_zero = 0) {
  EXPECT_EQ(a.size(), expected.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); i++) {
    const double d = real(a[i]) - real(expected[i]);
    difference += d * d;
    norm += real(expected[i]) * real(expected[i]);
  }
  if (difference == 0) return 0;
  return norm == 0 ? std::sqrt(difference) / norm_if_zero : std::sqrt(difference / norm);
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

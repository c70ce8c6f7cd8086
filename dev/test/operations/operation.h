// What the tests of the operations share: their tolerances, and runs under several orders of threads.
#pragma once
#include <gtest/gtest.h>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>
#include "dev/test/values.h"
#include "llmc/ops/device_memory.h"
#include "llmc/operations.h"
#include "llmc/ops/precision.h"

// The tolerances, relative to the results' 2-norm. Rounding to bf16 costs at most 2^-8 of a value, 1.7e-3 in the mean
// square, to fp16 an eighth of that; sums are in fp32 whatever floatX is.
constexpr double one_rounding = is_fp16   ? 3e-4
                                : is_bf16 ? 2e-3
                                          : 1e-6,
                 two_roundings = 2 * one_rounding, of_fp32 = 1e-6;

template <class T>
inline std::vector<double> doubles(const std::vector<T>& x) {
  std::vector<double> y;
  for (const T& v : x) y.push_back(real(v));
  return y;
}

// The results of `op`, a std::tuple of vectors on the host. The emulated GPU runs it under several orders of its
// threads and blocks, and the bits must be the same: a missing barrier, or a sum whose order varies, changes them.
template <class Op>
inline auto in_any_order(Op op, int orders = 8) {
  const auto results = op();
#ifdef SLA_EMU
  for (int seed = 2; seed <= orders; seed++) {
    emu::set_seed(uint64_t(seed));
    const auto others = op();
    const bool same = std::apply(
        [&](const auto&... a) {
          return std::apply([&](const auto&... b) { return (same_bits(a, b) && ...); }, others);
        },
        results);
    EXPECT_TRUE(same) << "other bits in the order of seed " << seed;
  }
#else
  (void)orders;
#endif
  return results;
}

inline double gelu_of(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
inline double gelu_slope(double x) {
  const double k = std::sqrt(2 / M_PI), t = std::tanh(k * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x);
}

struct RowsAndChannels {
  int64_t N, C;
};

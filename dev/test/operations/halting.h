// Weighted sums of the states after each cycle, with weights by which tokens halt.
#pragma once
#include "dev/test/operations/maps.h"
#include "dev/test/operations/operation.h"

// Four cycles, or as many as a case says: each token's p, in rows further apart than there are tokens and NaN where
// nothing may be read; its states, and how it halts, by the definition.
struct HaltingCase {
  int64_t N, C, stride = N + 3;
  int cycles;
  float threshold = 0.9f;
  std::vector<float> p;
  DeviceArray<float> d_p;
  std::vector<std::vector<floatX>> x;  // (cycles, N * C)
  std::vector<DeviceArray<floatX>> d_x;
  std::vector<int> last;                     // (N): the cycle in which a token halts, from 0
  std::vector<std::vector<double>> weights;  // (N, cycles)

  HaltingCase(const RowsAndChannels& s, int cycles) : N(s.N), C(s.C), cycles(cycles) {
    p = random_gates(cycles * stride, 1);
    for (int64_t n = 0; n < N; n++) {
      if (n % 5 == 1) p[n] = 0.95f;                                            // halts in the first cycle
      for (int c = 0; n % 5 == 2 && c < cycles; c++) p[c * stride + n] /= 16;  // runs until the last
      last.push_back(cycles - 1), weights.emplace_back(size_t(cycles), 0.0);
      double sum = 0;
      for (int c = 0; c < cycles - 1 && last[n] == cycles - 1; c++) {
        if (sum + p[c * stride + n] >= threshold) last[n] = c;
        else weights[n][c] = p[c * stride + n], sum += p[c * stride + n];
      }
      weights[n][last[n]] = 1 - sum;
    }
    for (int64_t i = 0; i < int64_t(p.size()); i++)
      if (i >= (cycles - 1) * stride || i % stride >= N) p[i] = NAN;
    d_p = DeviceArray<float>(p);
    for (int c = 0; c < cycles; c++) x.push_back(random_values<floatX>(N * C, uint32_t(2 + c))), d_x.emplace_back(x[c]);
  }
  HaltingWeights args() const { return {d_p.data, stride, cycles, threshold}; }
};

inline void for_each_halting_case(void (*f)(const HaltingCase&)) {
  for (const RowsAndChannels& s : map_shapes)
    for (int cycles : {1, 4}) {
      SCOPED_TRACE(testing::Message() << s.N << " x " << s.C << ", " << cycles << " cycles");
      f(HaltingCase(s, cycles));
    }
}

TEST(Halting, SumsWhatEachTokenWasUntilItHalted) {
  for_each_halting_case([](const HaltingCase& c) {
    std::vector<double> e_out(size_t(c.N * c.C)), e_ponder;
    for (int64_t n = 0; n < c.N; n++) {
      for (int cycle = 0; cycle < c.cycles; cycle++)
        for (int64_t i = n * c.C; i < (n + 1) * c.C; i++) e_out[i] += c.weights[n][cycle] * real(c.x[cycle][i]);
      e_ponder.push_back(c.last[n] + 1 + c.weights[n][c.last[n]]);
    }
    const auto [out, ponder] = in_any_order(
        [&] {
          const DeviceArray<float> sum(nans<float>(c.N * c.C)), ponder(nans<float>(c.N));
          const DeviceArray<floatX> out(nans<floatX>(c.N * c.C));
          for (int cycle = 0; cycle < c.cycles; cycle++)
            halting_forward({sum.data, out.data, ponder.data, c.d_x[cycle].data, c.args(), cycle, c.N, c.C});
          return std::make_tuple(out.to_host(), ponder.to_host());
        },
        2);
    EXPECT_LE(relative_error(out, e_out), one_rounding);
    EXPECT_LE(relative_error(ponder, e_ponder), of_fp32);
  });
}

// Each cycle's gradients follow from the gradients of the next cycle's beginning, `before`.
TEST(Halting, GivesStatesAndProbabilitiesTheirGradients) {
  for_each_halting_case([](const HaltingCase& c) {
    const float dponder = 0.375f;
    const auto dout = random_values<floatX>(c.N * c.C, 20), before = random_values<floatX>(c.N * c.C, 21);
    const DeviceArray<floatX> d_dout(dout);
    std::vector<double> e_dx, e_dp;  // (cycles, N * C), (cycles - 1, N)
    std::vector<int> targets(size_t(c.N), 4);
    for (int64_t n = 0; n < c.N; n += 3) targets[n] = not_scored;
    const DeviceArray<int> d_targets(targets);
    auto dweight = [&](int cycle, int64_t n) {
      double sum = 0;
      for (int64_t i = n * c.C; i < (n + 1) * c.C; i++) sum += real(dout[i]) * real(c.x[cycle][i]);
      return sum;
    };
    for (int cycle = 0; cycle < c.cycles; cycle++)
      for (int64_t n = 0; n < c.N; n++) {
        for (int64_t i = n * c.C; i < (n + 1) * c.C; i++)
          e_dx.push_back((cycle + 1 < c.cycles ? real(before[i]) : 0) + c.weights[n][cycle] * real(dout[i]));
        // The weight of a cycle before the last is p, and R is 1 minus all of these.
        if (cycle + 1 == c.cycles) continue;
        const bool runs = cycle < c.last[n];
        e_dp.push_back(runs ? dweight(cycle, n) - dweight(c.last[n], n) - (targets[n] == not_scored ? 0 : dponder) : 0);
      }
    const auto [dx, dp] = in_any_order(
        [&] {
          std::vector<floatX> dx(size_t(c.cycles * c.N * c.C));
          std::vector<float> dp;
          const DeviceArray<float> d_dp(nans<float>(c.N * c.cycles)), d_dremainder(nans<float>(c.N));
          for (int cycle = c.cycles - 1; cycle >= 0; cycle--) {
            const DeviceArray<floatX> d_dx(cycle + 1 < c.cycles ? before : nans<floatX>(c.N * c.C));
            halting_backward({d_dx.data, d_dp.data + cycle * c.N, d_dremainder.data, d_dout.data, c.d_x[cycle].data,
                              dponder, d_targets.data, c.args(), cycle, c.N, c.C});
            const std::vector<floatX> of_cycle = d_dx.to_host();
            std::copy(of_cycle.begin(), of_cycle.end(), dx.begin() + cycle * c.N * c.C);
          }
          dp = d_dp.to_host();
          dp.resize(size_t((c.cycles - 1) * c.N));
          return std::make_tuple(dx, dp);
        },
        2);
    EXPECT_LE(relative_error(dx, e_dx), one_rounding);
    if (c.cycles > 1) { EXPECT_LE(relative_error(dp, e_dp), of_fp32); }
  });
}

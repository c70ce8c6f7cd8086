// The matmul of a linear layer, with bias and activation, its gradients, and sums of columns.
#pragma once
#include <utility>
#include "dev/test/operations/activation.h"
#include "dev/test/operations/operation.h"

// A linear layer with random values, and what it computes in double.
struct Linear {
  int64_t N, C, OC;
  std::vector<floatX> inp = random_values<floatX>(N * C, 1), weight = random_values<floatX>(OC * C, 2);
  std::vector<floatX> bias = random_values<floatX>(OC, 3), dout = random_values<floatX>(N * OC, 4);
  // The values that the gradients are added to.
  std::vector<float> dweight = random_values<float>(OC * C, 5), dbias = random_values<float>(OC, 6);

  DeviceArray<floatX> d_inp{inp}, d_weight{weight}, d_bias{bias}, d_dout{dout};

  std::vector<double> out(bool with_bias) const {
    std::vector<double> y;
    for (int64_t n = 0; n < N; n++)
      for (int64_t o = 0; o < OC; o++) {
        double sum = with_bias ? real(bias[o]) : 0;
        for (int64_t i = 0; i < C; i++) sum += real(inp[n * C + i]) * real(weight[o * C + i]);
        y.push_back(sum);
      }
    return y;
  }
  struct Gradients {
    std::vector<double> dinp, dweight, dbias;
  };
  Gradients gradients() const {
    Gradients g = {std::vector<double>(size_t(N * C)), doubles(dweight), doubles(dbias)};
    for (int64_t n = 0; n < N; n++)
      for (int64_t o = 0; o < OC; o++) {
        const double d = real(dout[n * OC + o]);
        g.dbias[o] += d;
        for (int64_t i = 0; i < C; i++) {
          g.dinp[n * C + i] += d * real(weight[o * C + i]);
          g.dweight[o * C + i] += d * real(inp[n * C + i]);
        }
      }
    return g;
  }
};

// Calls f(fused) for GELU as an operation of its own and in the matmul's epilogue, and f() on the CPU, where there is
// no such choice.
template <class F>
inline void fused_and_not(F f) {
#ifndef SLA_CPU
  f(false);
  if (has_master_weights) f(true);
#else
  f();
#endif
}

TEST(Matmul, ForwardIsInpTimesWeightTransposedPlusBias) {
  const Linear l = {37, 24, 40};
  for (bool with_bias : {false, true}) {
    const auto [out] = in_any_order([&] {
      DeviceArray<floatX> out(nans<floatX>(l.N * l.OC));
      matmul_forward(out.data, l.d_inp.data, l.d_weight.data, with_bias ? l.d_bias.data : nullptr, l.N, l.C, l.OC);
      return std::make_tuple(out.to_host());
    });
    EXPECT_LE(relative_error(out, l.out(with_bias)), one_rounding);
  }
}

TEST(Matmul, WithAnActivationGivesItsInputToo) {
  const Linear l = {37, 24, 40};
  for (Activation f : activations_of_one)
    fused_and_not([&, f](auto... fused) {
      for (bool with_bias : {false, true}) {
        const auto [out, pre] = in_any_order([&] {
          DeviceArray<floatX> out(nans<floatX>(l.N * l.OC)), pre(nans<floatX>(l.N * l.OC));
          matmul_activation_forward(f, out.data, pre.data, l.d_inp.data, l.d_weight.data,
                                    with_bias ? l.d_bias.data : nullptr, l.N, l.C, l.OC, fused...);
          return std::make_tuple(out.to_host(), pre.to_host());
        });
        std::vector<double> expected = l.out(with_bias);
        EXPECT_LE(relative_error(pre, expected), one_rounding);
        for (double& x : expected) x = value_of(f, x);
        EXPECT_LE(relative_error(out, expected), two_roundings);
        if (sizeof...(fused) > 0 && (fused || ...)) continue;
        const DeviceArray<floatX> d_pre(pre), again(nans<floatX>(l.N * l.OC));
        activation_forward(f, again.data, d_pre.data, l.N, l.OC);
        EXPECT_TRUE(same_bits(again.to_host(), out)) << "where the backward pass computes it again";
      }
    });
}

#ifdef SLA_EMU
// The emulated heuristic refuses an epilogue whose pointers it is not told, and chooses for their alignment.
TEST(Matmul, ChoosesAnAlgorithmForTheAlignmentOfBiasAndGelu) {
  const Linear l = {8, 16, 24};
  // The second pass is 16 bytes further, so that pointers are aligned to 16 bytes and no more.
  const int64_t offset = 16 / int64_t(sizeof(floatX));
  for (int64_t at : {int64_t(0), offset}) {
    std::vector<floatX> values(size_t(at), floatX(0.0f));
    values.insert(values.end(), l.bias.begin(), l.bias.end());
    const DeviceArray<floatX> bias(values), out(nans<floatX>(l.N * l.OC)), pre_gelu(nans<floatX>(at + l.N * l.OC));
    matmul_forward(out.data, l.d_inp.data, l.d_weight.data, bias.data + at, l.N, l.C, l.OC);
    EXPECT_LE(relative_error(out.to_host(), l.out(true)), one_rounding);
    matmul_activation_forward(Activation::gelu, out.data, pre_gelu.data + at, l.d_inp.data, l.d_weight.data,
                              l.d_bias.data, l.N, l.C, l.OC,
                              /*fused=*/true);
    std::vector<double> expected = l.out(true);
    for (double& x : expected) x = gelu_of(x);
    EXPECT_LE(relative_error(out.to_host(), expected), two_roundings);
  }
}

// The emulated heuristic's first algorithm adds up k products in one sequence, the second in two.
TEST(Matmul, TakesTheAlgorithmThatIsChosenForAShape) {
  const int64_t m = 16, n = 24, k = 64;
  const DeviceArray<floatX> a(random_values<floatX>(size_t(m * k), 1)), b(random_values<floatX>(size_t(k * n), 2));
  const auto run = [&](const std::vector<GemmChoice>& choices, int64_t gap = 0) {
    gemm_plans().clear(), gemm_choices() = choices;
    const DeviceArray<float> c(nans<float>(size_t(m * (n + gap))));
    gemm('N', 'N', m, n, k, a.data, k, b.data, n, false, c.data, n + gap);
    gemm_choices().clear();
    return c.to_host();
  };
  const std::vector<float> first = run({});
  const GemmChoice second = gemm_choice(gemm_plans().begin()->first, 1),
                   missing = gemm_choice(gemm_plans().begin()->first, 7);
  EXPECT_FALSE(same_bits(run({second}), first));
  EXPECT_TRUE(same_bits(run({missing}), first)) << "an algorithm that there is no more";
  EXPECT_TRUE(same_bits(run({second}, 8), run({}, 8))) << "rows that are apart";
  for (auto change :
       std::vector<void (*)(GemmChoice&)>{[](GemmChoice& c) { c.gpu += "x"; }, [](GemmChoice& c) { c.cublaslt++; },
                                          [](GemmChoice& c) { c.k++; },
                                          [](GemmChoice& c) { c.op_a = c.op_a == 'N' ? 'T' : 'N'; },
                                          [](GemmChoice& c) { c.accumulate = true; },
                                          [](GemmChoice& c) { c.epilogue++; }, [](GemmChoice& c) { c.out_type++; }}) {
    GemmChoice other = second;
    change(other);
    EXPECT_TRUE(same_bits(run({other}), first)) << "another GPU, version or shape";
  }
}
#endif

// Calls f() with the gradients of biases as sums of their own and, on a GPU, from the matmul.
template <class F>
inline void with_bias_gradients_of_both_kinds(F f) {
  f();
#ifndef SLA_CPU
  gpu().candidates.bias_gradients = true;
  f();
  gpu().candidates.bias_gradients = false;
#endif
}

TEST(Matmul, BackwardSetsTheInputsGradientAndAddsToTheWeights) {
  const Linear layers[] = {{37, 24, 136}, {203, 8, 520}};  // the second: several blocks of bias_backward
  with_bias_gradients_of_both_kinds([&] {
    for (const Linear& l : layers) {
      const auto [dinp, dweight, dbias] = in_any_order([&] {
        DeviceArray<floatX> dinp(nans<floatX>(l.N * l.C));
        DeviceArray<float> dweight(l.dweight), dbias(l.dbias);
        matmul_backward(dinp.data, dweight.data, dbias.data, l.d_dout.data, l.d_inp.data, l.d_weight.data, l.N, l.C,
                        l.OC);
        return std::make_tuple(dinp.to_host(), dweight.to_host(), dbias.to_host());
      });
      const Linear::Gradients expected = l.gradients();
      EXPECT_LE(relative_error(dinp, expected.dinp), one_rounding);
      EXPECT_LE(relative_error(dweight, expected.dweight), of_fp32);
      EXPECT_LE(relative_error(dbias, expected.dbias), of_fp32);
    }
  });
}

TEST(Matmul, BackwardThroughAnActivationMultipliesWithItsDerivative) {
  const Linear l = {37, 24, 40};
  const std::vector<floatX> pre = random_values<floatX>(l.N * l.C, 7);
  const DeviceArray<floatX> d_pre(pre);
  for (Activation f : activations_of_one) {
    Linear::Gradients expected = l.gradients();
    for (size_t i = 0; i < pre.size(); i++) expected.dinp[i] *= slope_of(f, real(pre[i]));
    fused_and_not([&](auto... fused) {
      const auto [dinp, dweight] = in_any_order([&] {
        DeviceArray<floatX> dinp(nans<floatX>(l.N * l.C));
        DeviceArray<float> dweight(l.dweight);
        matmul_activation_backward(f, dinp.data, dweight.data, nullptr, l.d_dout.data, l.d_inp.data, d_pre.data,
                                   l.d_weight.data, l.N, l.C, l.OC, fused...);
        return std::make_tuple(dinp.to_host(), dweight.to_host());
      });
      EXPECT_LE(relative_error(dinp, expected.dinp), two_roundings);
      EXPECT_LE(relative_error(dweight, expected.dweight), of_fp32);
    });
  }
}

// A unit has a gate and a product: the gradients of both follow from the unit's.
TEST(Matmul, BackwardThroughAGateHasBothGradients) {
  const Linear l = {37, 24, 40};
  const std::vector<floatX> pre = random_values<floatX>(l.N * 2 * l.C, 7);
  const DeviceArray<floatX> d_pre(pre);
  std::vector<double> expected(pre.size());
  const Linear::Gradients of_units = l.gradients();
  for (int64_t i = 0; i < l.N * l.C; i++) {
    const int64_t at = i / l.C * 2 * l.C + i % l.C;
    const double x = real(pre[at]), s = 1 / (1 + std::exp(-x));
    expected[at] = of_units.dinp[i] * real(pre[at + l.C]) * (s + x * s * (1 - s));
    expected[at + l.C] = of_units.dinp[i] * x * s;
  }
  const auto [dpre, dweight] = in_any_order([&] {
    DeviceArray<floatX> dpre(nans<floatX>(l.N * 2 * l.C));
    DeviceArray<float> dweight(l.dweight);
    matmul_activation_backward(Activation::swiglu, dpre.data, dweight.data, nullptr, l.d_dout.data, l.d_inp.data,
                               d_pre.data, l.d_weight.data, l.N, l.C, l.OC);
    return std::make_tuple(dpre.to_host(), dweight.to_host());
  });
  EXPECT_LE(relative_error(dpre, expected), two_roundings);
  EXPECT_LE(relative_error(dweight, of_units.dweight), of_fp32);
}

// Rows beside and on the 8 warps and 64 rows of a block; columns beside and on a block's 256. Columns of a wider
// matrix, subtracted, too.
TEST(Matmul, BiasGradientIsTheSumOfRows) {
  std::vector<std::pair<int, int>> shapes = {{1403, 264}, {7, 8}, {8, 8}, {9, 8}, {63, 248}, {64, 256}, {65, 264}};
#ifndef SLA_CPU
  shapes.push_back({16385, 8});  // more than 256 blocks of 64 rows
#endif
  for (auto [N, OC] : shapes) {
    SCOPED_TRACE(testing::Message() << N << " x " << OC);
    const std::vector<floatX> dout = random_values<floatX>(int64_t(N) * OC, 1);
    const std::vector<float> dbias = random_values<float>(OC, 2);
    std::vector<double> expected = doubles(dbias), e_part = doubles(dbias);
    for (size_t i = 0; i < dout.size(); i++) {
      const size_t column = i % size_t(OC);
      expected[column] += real(dout[i]);
      if (column >= 8) e_part[column - 8] -= real(dout[i]);
    }
    const DeviceArray<floatX> d_dout(dout);
    const int64_t rows = N, columns = OC;  // a structured binding cannot be captured
    const auto [result, part] = in_any_order(
        [&] {
          DeviceArray<float> result(dbias), part(dbias);
          bias_backward(result.data, d_dout.data, rows, columns);
          if (columns > 8) bias_backward(part.data, d_dout.data + 8, rows, columns - 8, columns, -1);
          return std::make_tuple(result.to_host(), part.to_host());
        },
        N > 1000 ? 2 : 8);
    EXPECT_LE(relative_error(result, expected), of_fp32);
    EXPECT_LE(relative_error(part, e_part), of_fp32);
  }
}

#ifndef SLA_CPU
// The blocks write no more partial sums than the GPU's scratch has room for.
TEST(RowsOfBlock, AreForAtMostTheBlocksThatHaveRoom) {
  for (int64_t most : {1, 7, 256, 1024})
    for (int64_t least : {16, 64})
      for (int64_t N :
           {int64_t(1), least * most - 1, least * most, least * most + 1, 3 * least * most - 1, 3 * least * most + 1}) {
        const int64_t rows = rows_of_block(N, least, most), blocks = ceil_div(N, rows);
        EXPECT_TRUE(rows >= least && blocks <= most)
            << N << " rows in " << blocks << " of " << rows << ", most " << most;
        EXPECT_TRUE(rows == least || ceil_div(N, rows - 1) > most) << N << " rows: no more in a block than needed";
      }
}

// Rows beside and on the 32 warps of a block, columns beside and on its 32, NaN between the rows; with one range of
// columns, and with two.
TEST(ColumnSums, AreThoseOfAllRowsAndColumns) {
  for (auto [rows, columns] :
       {std::pair(1, 1), std::pair(31, 31), std::pair(32, 32), std::pair(33, 33), std::pair(257, 65)}) {
    SCOPED_TRACE(testing::Message() << rows << " x " << columns);
    for (int64_t ranges : {1, 2}) {
      const int64_t R = rows, C = columns, width = ranges * C, stride = width + 5;
      const auto values = random_values<float>(R * width, 1), dst = random_values<float>(2 * C, 2);
      std::vector<float> partial = nans<float>(R * stride);
      std::vector<double> expected = doubles(dst);
      for (int64_t i = 0; i < R * width; i++)
        partial[i / width * stride + i % width] = values[i], expected[i % width] += real(values[i]);
      const DeviceArray<float> d_partial(partial);
      const auto [result] = in_any_order(
          [&] {
            DeviceArray<float> result(dst);
            add_column_sums(result.data, ranges == 2 ? result.data + C : nullptr, d_partial.data, R, stride, C);
            return std::make_tuple(result.to_host());
          },
          3);
      EXPECT_LE(relative_error(result, expected), of_fp32);
    }
  }
}
#endif

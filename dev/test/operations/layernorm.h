// LayerNorm and RMSNorm, alone and of a sum.
#pragma once
#include <cmath>
#include "dev/test/operations/operation.h"

// One lane's channels; several lanes'; GPT-2's; a row that ends within a warp; the most for which a block has two rows
// in flight, and one lane more; nearly as many as there may be, and as many. Rows beside and on multiples of the 16 and
// 64 that a block has.
static const RowsAndChannels layernorm_shapes[] = {{131, 8},   {127, 8},  {128, 16}, {129, 24},  {37, 40}, {35, 768},
                                                   {18, 1288}, {3, 5120}, {3, 5128}, {17, 8184}, {2, 8192}};

struct LayerNormValues {
  std::vector<double> out, mean, rstd, dinp, dweight, dbias;
};
inline LayerNormValues layernorm_in_double(const std::vector<floatX>& inp, const std::vector<floatX>& weight,
                                           const std::vector<floatX>* bias, const std::vector<floatX>& dout,
                                           const RowsAndChannels& s, bool centers = true) {
  const int64_t N = s.N, C = s.C;
  LayerNormValues v;
  v.out.resize(N * C), v.dinp.resize(N * C), v.dweight.resize(C), v.dbias.resize(C);
  for (int64_t n = 0; n < N; n++) {
    double mean = 0, var = 0, g_mean = 0, gx_mean = 0;
    for (int64_t i = 0; i < C && centers; i++) mean += real(inp[n * C + i]) / C;
    for (int64_t i = 0; i < C; i++) var += std::pow(real(inp[n * C + i]) - mean, 2) / C;
    const double rstd = 1 / std::sqrt(var + 1e-5);
    std::vector<double> xhat(C), g(C);
    for (int64_t i = 0; i < C; i++) {
      const double d = real(dout[n * C + i]), w = real(weight[i]);
      xhat[i] = (real(inp[n * C + i]) - mean) * rstd;
      v.out[n * C + i] = xhat[i] * w + (bias != nullptr ? real((*bias)[i]) : 0);
      g[i] = d * w;
      g_mean += centers ? g[i] / C : 0, gx_mean += g[i] * xhat[i] / C;
      v.dweight[i] += d * xhat[i];
      v.dbias[i] += d;
    }
    for (int64_t i = 0; i < C; i++) v.dinp[n * C + i] = rstd * (g[i] - g_mean - xhat[i] * gx_mean);
    v.mean.push_back(mean), v.rstd.push_back(rstd);
  }
  return v;
}

TEST(LayerNorm, OfASumIsThatOfTheStoredSum) {
  for (const RowsAndChannels& s : layernorm_shapes) {
    SCOPED_TRACE(testing::Message() << s.N << " x " << s.C);
    const int64_t N = s.N, C = s.C;
    const auto a = random_values<floatX>(N * C, 1, 3), b = random_values<floatX>(N * C, 2);
    const auto weight = random_values<floatX>(C, 3), bias = random_values<floatX>(C, 4);
    const DeviceArray<floatX> d_a(a), d_b(b), d_weight(weight), d_bias(bias);
    for (bool with_bias : {false, true}) {
      const floatX* bias_pointer = with_bias ? d_bias.data : nullptr;
      const auto [residual, out, mean, rstd] = in_any_order(
          [&] {
            DeviceArray<floatX> residual(nans<floatX>(N * C)), out(nans<floatX>(N * C));
            DeviceArray<float> mean(nans<float>(N)), rstd(nans<float>(N));
            residual_layernorm_forward({out.data, mean.data, rstd.data, d_weight.data, bias_pointer, N, C, 1e-5f},
                                       residual.data, d_a.data, d_b.data);
            return std::make_tuple(residual.to_host(), out.to_host(), mean.to_host(), rstd.to_host());
          },
          2);
      for (size_t i = 0; i < a.size(); i++)
        ASSERT_EQ(float(residual[i]), float(floatX(float(a[i]) + float(b[i])))) << i;
      const LayerNormValues expected = layernorm_in_double(residual, weight, with_bias ? &bias : nullptr, residual, s);
      EXPECT_LE(relative_error(out, expected.out), one_rounding);
      EXPECT_LE(relative_error(mean, expected.mean), of_fp32);
      EXPECT_LE(relative_error(rstd, expected.rstd), of_fp32);

      const DeviceArray<floatX> d_residual(residual), again(nans<floatX>(N * C));
      const DeviceArray<float> mean_again(nans<float>(N)), rstd_again(nans<float>(N));
      layernorm_forward({again.data, mean_again.data, rstd_again.data, d_weight.data, bias_pointer, N, C, 1e-5f},
                        d_residual.data);
      const DeviceArray<floatX> sum(nans<floatX>(N * C));
      residual_sum(sum.data, d_a.data, d_b.data, N * C);
      EXPECT_TRUE(same_bits(sum.to_host(), residual)) << "without the LayerNorm";
      EXPECT_TRUE(same_bits(again.to_host(), out)) << "computed again from the residual stream";
      EXPECT_TRUE(same_bits(mean_again.to_host(), mean) && same_bits(rstd_again.to_host(), rstd));
    }
  }
}

TEST(LayerNorm, KeepsItsDigitsWhereTheMeanIsLarge) {
  const int64_t N = 5, C = 256;
  std::vector<floatX> inp = random_values<floatX>(N * C, 1), one(size_t(C), floatX(1.0f));
  for (floatX& x : inp) x = floatX(float(x) + 1000.0f);
  const LayerNormValues expected = layernorm_in_double(inp, one, nullptr, inp, {N, C});
  const DeviceArray<floatX> d_inp(inp), d_one(one), out(nans<floatX>(N * C));
  const DeviceArray<float> mean(nans<float>(N)), rstd(nans<float>(N));
  layernorm_forward({out.data, mean.data, rstd.data, d_one.data, nullptr, N, C, 1e-5f}, d_inp.data);
  EXPECT_LE(relative_error(out.to_host(), expected.out), std::max(one_rounding, 1e-4));  // 1000's last place is 6e-5
  EXPECT_LE(relative_error(rstd.to_host(), expected.rstd), of_fp32);
}

#ifdef SLA_EMU
// Four rows of so many channels do not fit, as on GPUs of compute capability 8.6, 8.9 and 12.0.
TEST(LayerNorm, FitsInBlocksOf99KilobytesOfSharedMemory) {
  const size_t shared_bytes = gpu().shared_bytes;
  emu::set_compute_capability(8, 6);
  gpu().shared_bytes = 99 << 10;
  for (const RowsAndChannels& s : {RowsAndChannels{7, 6400}, RowsAndChannels{5, 8192}}) {
    const int64_t N = s.N, C = s.C;
    const auto inp = random_values<floatX>(N * C, 1), one = std::vector<floatX>(size_t(C), floatX(1.0f));
    const DeviceArray<floatX> d_inp(inp), d_one(one), out(nans<floatX>(N * C));
    const DeviceArray<float> mean(nans<float>(N)), rstd(nans<float>(N));
    layernorm_forward({out.data, mean.data, rstd.data, d_one.data, nullptr, N, C, 1e-5f}, d_inp.data);
    EXPECT_LE(relative_error(out.to_host(), layernorm_in_double(inp, one, nullptr, inp, s).out), one_rounding) << C;
  }
  gpu().shared_bytes = shared_bytes;
  emu::set_compute_capability(9, 0);
}
#endif

TEST(LayerNorm, BackwardAddsTheFormulasGradients) {
  std::vector<RowsAndChannels> shapes(std::begin(layernorm_shapes), std::end(layernorm_shapes));
  shapes.push_back({2003, 8});  // on the emulated GPU more than 16 rows a block
  for (const RowsAndChannels& s : shapes) {
    SCOPED_TRACE(testing::Message() << s.N << " x " << s.C);
    const int64_t N = s.N, C = s.C;
    const auto inp = random_values<floatX>(N * C, 1, 3), weight = random_values<floatX>(C, 2);
    const auto dout = random_values<floatX>(N * C, 3), dinp = random_values<floatX>(N * C, 4);
    const auto dweight = random_values<float>(C, 5), dbias = random_values<float>(C, 6);
    LayerNormValues expected = layernorm_in_double(inp, weight, nullptr, dout, s);
    for (size_t i = 0; i < dinp.size(); i++) expected.dinp[i] += real(dinp[i]);
    for (size_t i = 0; i < size_t(C); i++)
      expected.dweight[i] += double(dweight[i]), expected.dbias[i] += double(dbias[i]);

    const DeviceArray<floatX> d_inp(inp), d_weight(weight), d_dout(dout);
    const DeviceArray<float> mean(std::vector<float>(expected.mean.begin(), expected.mean.end()));
    const DeviceArray<float> rstd(std::vector<float>(expected.rstd.begin(), expected.rstd.end()));
    for (bool with_bias : {true, false}) {
      if (!with_bias && N * C > 10000) continue;
      const auto [dinp_result, dweight_result, dbias_result] = in_any_order(
          [&] {
            DeviceArray<floatX> d_dinp(dinp);
            DeviceArray<float> d_dweight(dweight), d_dbias(dbias),
                scratch(nans<float>(layernorm_backward_scratch(N, C)));
            layernorm_backward({d_dinp.data, d_dweight.data, with_bias ? d_dbias.data : nullptr, d_dout.data,
                                d_inp.data, mean.data, rstd.data, d_weight.data, scratch.data, N, C});
            return std::make_tuple(d_dinp.to_host(), d_dweight.to_host(), d_dbias.to_host());
          },
          N * C > 20000   ? 2
          : N * C > 10000 ? 1
                          : 8);
      EXPECT_LE(relative_error(dinp_result, expected.dinp), one_rounding);
      EXPECT_LE(relative_error(dweight_result, expected.dweight), of_fp32);
      EXPECT_LE(relative_error(dbias_result, with_bias ? expected.dbias : doubles(dbias)), of_fp32);
    }
  }
}

// Values around 1, so that the mean that is not taken shows.
TEST(RmsNorm, TakesNoMeanForwardAndBackward) {
  for (const RowsAndChannels& s : {RowsAndChannels{131, 8}, RowsAndChannels{35, 768}, RowsAndChannels{3, 5128}}) {
    SCOPED_TRACE(testing::Message() << s.N << " x " << s.C);
    const int64_t N = s.N, C = s.C;
    auto a = random_values<floatX>(N * C, 1, 0.5);
    for (floatX& x : a) x = floatX(float(x) + 1.0f);
    const auto b = random_values<floatX>(N * C, 2, 0.5), weight = random_values<floatX>(C, 3);
    const auto dout = random_values<floatX>(N * C, 4);
    const DeviceArray<floatX> d_a(a), d_b(b), d_weight(weight), d_dout(dout);
    const std::vector<floatX> no_dinp(size_t(N * C), floatX(0.0f));
    const std::vector<float> no_dweight(size_t(C), 0.0f);
    const auto [residual, out, rstd, dinp, dweight] = in_any_order(
        [&] {
          DeviceArray<floatX> residual(nans<floatX>(N * C)), out(nans<floatX>(N * C)), dinp(no_dinp);
          DeviceArray<float> mean(nans<float>(N)), rstd(nans<float>(N)), dweight(no_dweight);
          DeviceArray<float> scratch(nans<float>(layernorm_backward_scratch(N, C)));
          residual_layernorm_forward({out.data, mean.data, rstd.data, d_weight.data, nullptr, N, C, 1e-5f,
                                      /*centers=*/false},
                                     residual.data, d_a.data, d_b.data);
          layernorm_backward({dinp.data, dweight.data, nullptr, d_dout.data, residual.data, mean.data, rstd.data,
                              d_weight.data, scratch.data, N, C, /*centers=*/false});
          return std::make_tuple(residual.to_host(), out.to_host(), rstd.to_host(), dinp.to_host(), dweight.to_host());
        },
        2);
    const LayerNormValues expected = layernorm_in_double(residual, weight, nullptr, dout, s, /*centers=*/false);
    EXPECT_LE(relative_error(out, expected.out), one_rounding);
    EXPECT_LE(relative_error(rstd, expected.rstd), of_fp32);
    EXPECT_LE(relative_error(dinp, expected.dinp), one_rounding);
    EXPECT_LE(relative_error(dweight, expected.dweight), of_fp32);
  }
}

#ifndef SLA_CPU
// Groups of two rows that are copied beforehand: fewer than there are buffers, as many, more, and a last one of one
// row.
TEST(LayerNorm, BackwardHasTheSameBitsFromCopiesOfItsRows) {
  for (const RowsAndChannels& s : {RowsAndChannels{1, 64}, RowsAndChannels{131, 8}, RowsAndChannels{35, 768},
                                   RowsAndChannels{2003, 24}, RowsAndChannels{5, 1280}}) {
    const DeviceArray<floatX> inp(random_values<floatX>(s.N * s.C, 1)), dout(random_values<floatX>(s.N * s.C, 2)),
        weight(random_values<floatX>(s.C, 3));
    const DeviceArray<float> mean(random_values<float>(s.N, 4)), rstd(random_values<float>(s.N, 5));
    const auto run = [&](bool copies) {
      gpu().candidates.norm = copies;
      DeviceArray<floatX> dinp(random_values<floatX>(s.N * s.C, 6));
      DeviceArray<float> dweight(random_values<float>(s.C, 7)), dbias(random_values<float>(s.C, 8));
      layernorm_backward({dinp.data, dweight.data, dbias.data, dout.data, inp.data, mean.data, rstd.data, weight.data,
                          nullptr, s.N, s.C});
      gpu().candidates.norm = false;
      return std::make_tuple(dinp.to_host(), dweight.to_host(), dbias.to_host());
    };
    const auto [dinp, dweight, dbias] = run(false);
    const auto [dinp_2, dweight_2, dbias_2] = run(true);
    EXPECT_TRUE(same_bits(dinp, dinp_2) && same_bits(dweight, dweight_2) && same_bits(dbias, dbias_2))
        << s.N << " x " << s.C;
  }
}

// A thread of the kernel may use 65,536 / 640 registers, so that 640 threads fit on a multiprocessor, or the 1,024 of a
// wide row's block.
TEST(LayerNorm, BackwardRunsAllItsBlocksAtOnce) {
  const RowsAndChannels shapes[] = {{16384, 768}, {32768, 1024}, {16384, 1280}, {16384, 1600},
                                    {8192, 5120}, {8192, 8192},  {40, 768}};
  for (int64_t multiprocessors : {1, 6, 108, 132})
    for (const RowsAndChannels& s : shapes) {
      SCOPED_TRACE(testing::Message() << s.N << " x " << s.C << " on " << multiprocessors);
      const int64_t rows = layernorm_backward_rows(s.N, s.C, multiprocessors), blocks = ceil_div(s.N, rows);
      const int64_t threads = ceil_div(s.C, 256) * 32, at_once = multiprocessors * std::max<int64_t>(1, 640 / threads);
      EXPECT_LE(blocks, at_once);
      EXPECT_GE(rows, 16);
      EXPECT_LE(blocks * 2 * s.C * int64_t(sizeof(float)), int64_t(Gpu::scratch_bytes));
      const int64_t with_fewer = rows > 16 ? ceil_div(s.N, rows - 1) : blocks;
      EXPECT_TRUE(rows == 16 || with_fewer > at_once || with_fewer * 8 * s.C > int64_t(Gpu::scratch_bytes))
          << "no more rows than needed";
    }
}
#endif

#ifdef SLA_EMU
TEST(LayerNorm, BackwardIsTwoKernels) {
  const int64_t N = 40, C = 64;
  const DeviceArray<floatX> x(random_values<floatX>(N * C, 1)), dinp(random_values<floatX>(N * C, 2)),
      weight(random_values<floatX>(C, 3));
  const DeviceArray<float> statistics(random_values<float>(N, 4)), dweight(random_values<float>(C, 5)),
      dbias(random_values<float>(C, 6));
  for (float* bias : {dbias.data, static_cast<float*>(nullptr)}) {
    const uint64_t before = emu::counters().launches;
    layernorm_backward(
        {dinp.data, dweight.data, bias, x.data, x.data, statistics.data, statistics.data, weight.data, nullptr, N, C});
    EXPECT_EQ(emu::counters().launches, before + 2);
  }
}
#endif

// Value residuals.
#pragma once
#include "dev/test/operations/operation.h"
#include "llmc/ops/value_mix.h"

TEST(ValueMix, AddsFirstValuesAndHasTheirGradients) {
  for (const auto& shape : {std::pair<int64_t, int64_t>(1, 8), {31, 24}, {33, 64}, {100, 40}})
    for (bool accumulate : {false, true}) {
      const int64_t N = shape.first, width = shape.second;
      SCOPED_TRACE(testing::Message() << N << " rows of " << width << (accumulate ? ", +=" : ", ="));
      const int64_t stride = width + 8, first_stride = width + 16;
      const auto v = random_values<floatX>(N * stride, 1), first = random_values<floatX>(N * first_stride, 2),
                 dout = random_values<floatX>(N * first_stride, 3), before = random_values<floatX>(N * stride, 4),
                 ab = random_values<floatX>(2, 5);
      const std::vector<double> x = doubles(v), y = doubles(first), d = doubles(dout), w = doubles(ab);
      std::vector<double> e_out = x, e_d = d, e_dfirst = doubles(before), e_dab = {2, -1};
      for (int64_t n = 0; n < N; n++)
        for (int64_t i = 0; i < width; i++) {
          const int64_t at = n * stride + i, at_first = n * first_stride + i;
          e_out[at] = w[0] * x[at] + w[1] * y[at_first];
          e_dab[0] += d[at_first] * x[at], e_dab[1] += d[at_first] * y[at_first];
          e_dfirst[at] = (accumulate ? e_dfirst[at] : 0) + w[1] * d[at_first];
          e_d[at_first] = w[0] * d[at_first];
        }
      const auto [out, in_place, dv, dfirst, dab] = in_any_order([&] {
        DeviceArray<floatX> d_v(v), d_first(first), d_out(v), d_d(dout), d_dfirst(before), d_ab(ab);
        DeviceArray<float> d_dab(std::vector<float>{2, -1}), scratch(nans<float>(value_mix_scratch(N)));
        const ValueMix<floatX> mix = {d_v.data, d_first.data, d_out.data,    stride,       first_stride, stride,
                                      width,    d_d.data,     d_dfirst.data, first_stride, stride,       accumulate};
        mix_values(mix, d_ab.data, N);
        mix_values_backward(mix, d_dab.data, d_ab.data, scratch.data, N);
        ValueMix<floatX> replacing = mix;
        replacing.out = d_v.data;
        mix_values(replacing, d_ab.data, N);
        return std::make_tuple(d_out.to_host(), d_v.to_host(), d_d.to_host(), d_dfirst.to_host(), d_dab.to_host());
      });
      EXPECT_LE(relative_error(out, e_out), one_rounding);  // what is beside them stays
      EXPECT_TRUE(same_bits(out, in_place));
      EXPECT_LE(relative_error(dv, e_d), one_rounding);
      EXPECT_LE(relative_error(dfirst, e_dfirst), one_rounding);
      EXPECT_LE(relative_error(dab, e_dab), of_fp32);
    }
}

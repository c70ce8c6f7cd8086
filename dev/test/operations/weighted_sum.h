// Weighted sums of tensors.
#pragma once
#include "dev/test/operations/operation.h"
#include "llmc/ops/weighted_sum.h"

// More terms than a launch on a GPU takes, and sizes of several pieces, too.
TEST(WeightedSum, HasTheSumAndTheGradientsOfItsWeights) {
  for (const std::pair<int64_t, int64_t>& shape :
       {std::pair<int64_t, int64_t>(8, 2), {1000, 3}, {8192, 1}, {16392, 13}, {2056, 67}})
    for (bool accumulate : {false, true}) {
      const int64_t n = shape.first, count = shape.second;
      SCOPED_TRACE(testing::Message() << count << " terms of " << n << (accumulate ? ", +=" : ", ="));
      const auto x = random_values<floatX>(count * n, 1), weights = random_values<floatX>(count, 2),
                 before = random_values<floatX>(n, 3), dout = random_values<floatX>(n, 4);
      const auto dweights_before = random_values<float>(count, 5);
      const std::vector<double> values = doubles(x), w = doubles(weights), d = doubles(dout);
      std::vector<double> e_out = accumulate ? doubles(before) : std::vector<double>(size_t(n));
      std::vector<double> e_dweights = doubles(dweights_before);
      for (int64_t t = 0; t < count; t++)
        for (int64_t i = 0; i < n; i++) e_out[i] += w[t] * values[t * n + i], e_dweights[t] += d[i] * values[t * n + i];
      const DeviceArray<floatX> d_x(x), d_weights(weights), d_dout(dout);
      std::vector<WeightedTensor> terms;
      for (int64_t t = 0; t < count; t++) terms.push_back({d_x.data + t * n, d_weights.data + t});
      const auto [out, dweights] = in_any_order([&] {
        DeviceArray<floatX> out(before);
        DeviceArray<float> dweights(dweights_before), scratch(nans<float>(weighted_sum_pieces(n) * count));
        weighted_sum(out.data, terms, n, accumulate);
        weighted_sum_backward(dweights.data, d_dout.data, terms, scratch.data, n);
        return std::make_tuple(out.to_host(), dweights.to_host());
      });
      // In bf16 what more terms than a launch takes come to is rounded twice.
      EXPECT_LE(relative_error(out, e_out), two_roundings);
      EXPECT_LE(relative_error(dweights, e_dweights), of_fp32);
    }
}

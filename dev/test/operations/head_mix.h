// Sums of heads of several layers.
#pragma once
#include "dev/test/operations/operation.h"
#include "llmc/ops/head_mix.h"

TEST(HeadMix, SumsHeadsOfSeveralLayersAndHasTheWeightsGradients) {
  struct Shape {
    int64_t N, HS;
    int heads, sources;
    bool accumulate, transposed;  // transposed: of_sum is 1
  };
  for (const Shape& s : {Shape{1, 8, 1, 1, false, false},
                         {33, 16, 3, 2, true, false},
                         {70, 8, 9, 3, false, true},
                         {5, 24, 17, 1, true, true},
                         {9, 8, 40, 2, false, false},
                         {6, 72, 5, 2, true, false}}) {
    SCOPED_TRACE(testing::Message() << s.N << " rows of " << s.heads << " heads of " << s.HS);
    const int64_t width = s.heads * s.HS, stride = width + 8, out_stride = width + 16, pairs = s.heads * s.heads;
    std::vector<std::vector<floatX>> x;
    for (int i = 0; i < s.sources; i++) x.push_back(random_values<floatX>(s.N * stride, uint32_t(10 + i)));
    const auto weights = random_values<floatX>(s.sources * pairs, 1),
               before = random_values<floatX>(s.N * out_stride, 2), dout = random_values<floatX>(s.N * out_stride, 3);
    const std::vector<float> dbefore = random_values<float>(s.sources * pairs, 4);
    // The weight of head i of a source in sum o.
    auto weight_at = [&](int source, int o, int i) {
      return s.transposed ? source * pairs + i * s.heads + o : (o * s.sources + source) * s.heads + i;
    };
    std::vector<double> e_out = doubles(before), e_dweights = doubles(dbefore);
    for (int64_t n = 0; n < s.N; n++)
      for (int o = 0; o < s.heads; o++)
        for (int64_t c = 0; c < s.HS; c++) {
          const int64_t at = n * out_stride + o * s.HS + c;
          double sum = s.accumulate ? e_out[at] : 0;
          for (int source = 0; source < s.sources; source++)
            for (int i = 0; i < s.heads; i++) {
              const double value = real(x[source][n * stride + i * s.HS + c]);
              sum += real(weights[weight_at(source, o, i)]) * value;
              e_dweights[(o * s.sources + source) * s.heads + i] += real(dout[at]) * value;
            }
          e_out[at] = sum;
        }
    const auto [out, dweights] = in_any_order([&] {
      const DeviceArray<floatX> d_weights(weights), d_dout(dout);
      std::vector<DeviceArray<floatX>> d_x;
      std::vector<MixedHeads<floatX>> sources;
      for (int i = 0; i < s.sources; i++) {
        d_x.emplace_back(x[i]);
        const int64_t of_sum = weight_at(0, 1, 0), of_head = weight_at(0, 0, 1);
        sources.push_back({d_x.back().data, stride, d_weights.data + weight_at(i, 0, 0), of_sum, of_head});
      }
      const DeviceArray<MixedHeads<floatX>> d_sources(sources);
      DeviceArray<floatX> d_out(before);
      DeviceArray<float> d_dweights(dbefore), scratch(nans<float>(head_mix_partial_sums(s.N) * s.sources * pairs));
      const HeadMix<floatX> mix = {d_out.data, out_stride, s.HS, s.heads, s.accumulate, d_sources.data, s.sources};
      mix_heads(mix, s.N);
      mix_heads_backward(mix, d_dweights.data, d_dout.data, out_stride, scratch.data, s.N);
      return std::make_tuple(d_out.to_host(), d_dweights.to_host());
    });
    EXPECT_LE(relative_error(out, e_out), one_rounding);  // what is beside them stays
    EXPECT_LE(relative_error(dweights, e_dweights), of_fp32);
  }
}

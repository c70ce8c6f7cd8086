// Attention over depth.
#pragma once
#include "dev/test/operations/operation.h"
#include "llmc/ops/depth_attention.h"

TEST(DepthAttention, IsASoftmaxOverTheLayersOfATokenAndHasTheirGradients) {
  struct Shape {
    int64_t N;
    int heads, HS, layers;
    bool has_above;
  };
  for (const Shape& s : {Shape{1, 1, 8, 1, false},
                         {33, 3, 16, 2, false},
                         {70, 2, 24, 5, true},
                         {5, 1, 128, 12, true},
                         {40, 4, 8, 1, true}}) {
    SCOPED_TRACE(testing::Message() << s.N << " rows of " << s.heads << " heads of " << s.HS << ", " << s.layers);
    const int64_t width = s.heads * s.HS, stride = 2 * width + 16, d_stride = 2 * width + 8, q_stride = width + 8;
    std::vector<std::vector<floatX>> kv, dkv;  // (layers): rows of k | v and what is beside them, and their gradients
    for (int j = 0; j < s.layers; j++) {
      kv.push_back(random_values<floatX>(s.N * stride, uint32_t(10 + j)));
      dkv.push_back(random_values<floatX>(s.N * d_stride, uint32_t(30 + j)));
    }
    auto q = random_values<floatX>(s.N * q_stride, 1), before = random_values<floatX>(s.N * q_stride, 2),
         dq = random_values<floatX>(s.N * q_stride, 3), above = random_values<floatX>(s.N * d_stride, 4);
    for (floatX& x : q) from_float(x, float(3 * real(x)));  // weights that differ
    std::vector<double> e_out = doubles(before), e_dq = doubles(dq);
    std::vector<std::vector<double>> e_dkv;
    for (const std::vector<floatX>& d : dkv) e_dkv.push_back(doubles(d));
    const double scale = 1 / std::sqrt(double(s.HS));
    for (int64_t n = 0; n < s.N; n++)
      for (int64_t column = 0; column < width; column += s.HS) {
        const int64_t at = n * stride + column, d_at = n * d_stride + column, q_at = n * q_stride + column;
        const int own = s.layers - 1;
        std::vector<double> p(size_t(s.layers)), dp = p, d;
        for (int64_t c = 0; c < s.HS; c++) d.push_back(real(dkv[own][d_at + width + c]));
        double sum = 0, mean = 0;
        for (int j = 0; j < s.layers; j++) {
          for (int64_t c = 0; c < s.HS; c++) p[j] += scale * real(q[q_at + c]) * real(kv[j][at + c]);
          sum += p[j] = std::exp(p[j]);
          for (int64_t c = 0; c < s.HS; c++) dp[j] += d[c] * real(kv[j][at + width + c]);
        }
        for (int j = 0; j < s.layers; j++) p[j] /= sum, mean += p[j] * dp[j];
        for (int64_t c = 0; c < s.HS; c++) e_out[q_at + c] = 0;
        for (int j = 0; j < s.layers; j++)
          for (int64_t c = 0; c < s.HS; c++) {
            const double ds = scale * p[j] * (dp[j] - mean);
            double &dk = e_dkv[j][d_at + c], &dv = e_dkv[j][d_at + width + c];
            e_out[q_at + c] += p[j] * real(kv[j][at + width + c]);
            e_dq[q_at + c] += ds * real(kv[j][at + c]);
            if (j == own) dv = 0;
            else if (!s.has_above) dk = dv = 0;
            if (j == own && s.has_above) dk += real(above[d_at + c]), dv += real(above[d_at + width + c]);
            dk += ds * real(q[q_at + c]), dv += p[j] * d[c];
          }
      }
    const auto [out, dq_after, dkv_after] = in_any_order([&] {
      const DeviceArray<floatX> d_q(q), d_above(above);
      DeviceArray<floatX> d_out(before), d_dq(dq);
      std::vector<DeviceArray<floatX>> d_kv, d_dkv;
      std::vector<LayerKV<floatX>> layers;
      for (int j = 0; j < s.layers; j++) {
        d_kv.emplace_back(kv[j]), d_dkv.emplace_back(dkv[j]);
        floatX *k = d_kv.back().data, *dk = d_dkv.back().data;
        layers.push_back({k, k + width, stride, dk, dk + width, d_stride});
      }
      const DeviceArray<LayerKV<floatX>> d_layers(layers);
      DepthAttention<floatX> a = {d_q.data, d_out.data, q_stride, q_stride, s.heads, s.HS, s.layers, d_layers.data};
      a.dq = d_dq.data, a.dq_stride = q_stride;
      if (s.has_above) a.dk_of_above = d_above.data, a.dv_of_above = d_above.data + width, a.of_above_stride = d_stride;
      depth_attention_forward(a, s.N);
      depth_attention_backward(a, s.N);
      std::vector<floatX> of_layers;
      for (const DeviceArray<floatX>& d : d_dkv)
        for (floatX x : d.to_host()) of_layers.push_back(x);
      return std::make_tuple(d_out.to_host(), d_dq.to_host(), of_layers);
    });
    std::vector<double> e_of_layers;
    for (const std::vector<double>& d : e_dkv) e_of_layers.insert(e_of_layers.end(), d.begin(), d.end());
    EXPECT_LE(relative_error(out, e_out), one_rounding);  // what is beside them stays
    EXPECT_LE(relative_error(dq_after, e_dq), one_rounding);
    EXPECT_LE(relative_error(dkv_after, e_of_layers), one_rounding);
  }
}

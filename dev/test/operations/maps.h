// Gates, and sums of attention maps.
#pragma once
#include <cmath>
#include "dev/test/operations/operation.h"

// Rows beside and on the 8 and 256 of a block and the 32 of a sum over rows; channels beside and on the 256 of a warp
// and the 64 that a CPU's thread owns. Where C is a multiple of 32, the gradient of the bias is in a block of its own.
static const RowsAndChannels map_shapes[] = {{1, 264}, {7, 248},  {8, 256}, {9, 264}, {31, 56}, {32, 64},
                                             {33, 72}, {33, 264}, {255, 8}, {256, 8}, {257, 8}};

TEST(TokenGate, IsTheSigmoidOfALinearLayer) {
  for (const RowsAndChannels& s : map_shapes) {
    SCOPED_TRACE(testing::Message() << s.N << " x " << s.C);
    const int64_t N = s.N, C = s.C;
    const auto x = random_values<floatX>(N * C, 1), weight = random_values<floatX>(C, 2, 1 / std::sqrt(double(C)));
    const auto bias = random_values<floatX>(1, 3);
    const DeviceArray<floatX> d_x(x), d_weight(weight), d_bias(bias);
    for (bool with_bias : {false, true}) {
      std::vector<double> expected;
      for (int64_t n = 0; n < N; n++) {
        double sum = with_bias ? real(bias[0]) : 0;
        for (int64_t i = 0; i < C; i++) sum += real(x[n * C + i]) * real(weight[i]);
        expected.push_back(1 / (1 + std::exp(-sum)));
      }
      const auto [gate] = in_any_order(
          [&] {
            DeviceArray<float> gate(nans<float>(N));
            token_gate_forward(gate.data, d_x.data, d_weight.data, with_bias ? d_bias.data : nullptr, N, C);
            return std::make_tuple(gate.to_host());
          },
          2);
      EXPECT_LE(relative_error(gate, expected), of_fp32);
    }
  }
}

// Numbers between 0 and 1.
inline std::vector<float> random_gates(int64_t n, uint32_t tag) {
  std::vector<float> gates = random_values<float>(n, tag);
  for (float& g : gates) g = 1 / (1 + std::exp(-g));
  return gates;
}

TEST(TokenGate, BackwardAddsTheFormulasGradients) {
  for (const RowsAndChannels& s : map_shapes) {
    SCOPED_TRACE(testing::Message() << s.N << " x " << s.C);
    const int64_t N = s.N, C = s.C;
    const auto x = random_values<floatX>(N * C, 1), weight = random_values<floatX>(C, 2),
               dx = random_values<floatX>(N * C, 3);
    const auto gate = random_gates(N, 4), dgate = random_values<float>(N, 5);
    const auto dweight = random_values<float>(C, 6), dbias = random_values<float>(1, 7);
    std::vector<double> e_dgate, e_dx = doubles(dx), e_dweight = doubles(dweight), e_dbias = doubles(dbias);
    for (int64_t n = 0; n < N; n++) {
      const double d = real(dgate[n]) * real(gate[n]) * (1 - real(gate[n]));
      e_dgate.push_back(d);
      e_dbias[0] += d;
      for (int64_t i = 0; i < C; i++) e_dx[n * C + i] += d * real(weight[i]), e_dweight[i] += d * real(x[n * C + i]);
    }
    const DeviceArray<floatX> d_x(x), d_weight(weight);
    const DeviceArray<float> d_gate(gate);
    for (bool with_bias : {false, true}) {
      const auto [dx_result, dgate_result, dweight_result, dbias_result] = in_any_order(
          [&] {
            DeviceArray<floatX> d_dx(dx);
            DeviceArray<float> d_dgate(dgate), d_dweight(dweight), d_dbias(dbias);
            token_gate_backward(d_dx.data, d_dweight.data, with_bias ? d_dbias.data : nullptr, d_dgate.data,
                                d_gate.data, d_x.data, d_weight.data, N, C);
            return std::make_tuple(d_dx.to_host(), d_dgate.to_host(), d_dweight.to_host(), d_dbias.to_host());
          },
          3);
      EXPECT_LE(relative_error(dx_result, e_dx), one_rounding);
      EXPECT_LE(relative_error(dgate_result, e_dgate), of_fp32);
      EXPECT_LE(relative_error(dweight_result, e_dweight), of_fp32);
      EXPECT_LE(relative_error(dbias_result, with_bias ? e_dbias : doubles(dbias)), of_fp32);
    }
  }
}

// The gates of layers 0 to `layer`, their rows further apart than there are tokens, with NaN where nothing may be read;
// or `blend`.
struct MixedMaps {
  int64_t N, C, stride = N + 3;
  bool gated;
  int layer;
  std::vector<float> gates = random_gates((layer + 1) * stride, 1);
  DeviceArray<float> d_gates;

  MixedMaps(const RowsAndChannels& s, bool gated, int layer) : N(s.N), C(s.C), gated(gated), layer(layer) {
    for (int m = 0; m <= layer; m++)
      for (int64_t n = m == 0 ? 0 : N; n < stride; n++) gates[m * stride + n] = NAN;
    d_gates = DeviceArray<float>(gates);
  }
  MapWeights weights() const { return {gated ? d_gates.data : nullptr, 0.375f, stride, layer}; }
  // The weights of the maps for a token, by P_l = g_l P_(l-1) + (1 - g_l) S_l. Another gate of one layer: `g` of layer
  // `other`.
  std::vector<double> weights_in_double(int64_t row, int other = 0, double g = 0) const {
    std::vector<double> w = {1};
    for (int m = 1; m <= layer; m++) {
      const double gate = m == other ? g : gated ? real(gates[m * stride + row]) : 0.375;
      for (double& below : w) below *= gate;
      w.push_back(1 - gate);
    }
    return w;
  }
};

// Calls f with each shape, with gates and with `blend`, for one map and for three.
inline void for_each_mixed_maps(void (*f)(const MixedMaps&)) {
  for (const RowsAndChannels& s : map_shapes)
    for (bool gated : {true, false})
      for (int layer : {0, 2}) {
        SCOPED_TRACE(testing::Message() << s.N << " x " << s.C << (gated ? ", gates" : ", blend") << ", layer "
                                        << layer);
        f(MixedMaps(s, gated, layer));
      }
}

TEST(MixedMaps, AreTheWeightedSum) {
  for_each_mixed_maps([](const MixedMaps& mix) {
    const int64_t size = mix.N * mix.C;
    const int num_maps = mix.layer + 1;
    std::vector<DeviceArray<floatX>> d_maps;
    std::vector<double> e_sum(static_cast<size_t>(size)), e_out(static_cast<size_t>(size));
    for (int call = 0; call < num_maps; call++) {  // the layer's own map is the first
      const int m = (call + mix.layer) % num_maps;
      const auto map = random_values<floatX>(size, uint32_t(2 + m));
      d_maps.emplace_back(map);
      for (int64_t n = 0; n < mix.N; n++) {
        const double weight = mix.weights_in_double(n)[m];
        for (int64_t i = n * mix.C; i < (n + 1) * mix.C; i++) {
          e_out[i] += weight * real(map[i]);
          if (call < mix.layer) e_sum[i] += weight * real(map[i]);
        }
      }
    }
    const auto [sum, out] = in_any_order(
        [&] {
          const DeviceArray<float> sum(nans<float>(size));
          const DeviceArray<floatX> out(nans<floatX>(size));
          for (int call = 0; call < num_maps; call++)
            mix_map_forward(sum.data, out.data, d_maps[call].data, mix.weights(), (call + mix.layer) % num_maps,
                            call == 0, call == mix.layer, mix.N, mix.C);
          return std::make_tuple(sum.to_host(), out.to_host());
        },
        1);
    EXPECT_LE(relative_error(out, e_out), one_rounding);
    if (mix.layer > 0) EXPECT_LE(relative_error(sum, e_sum), of_fp32);
    else EXPECT_TRUE(same_bits(sum, nans<float>(size))) << "a single map needs no sum";
  });
}

// Element: the type of the maps' outputs in the backward pass.
template <class Element>
inline void check_gradients_of_mixed_maps(const MixedMaps& mix) {
  const int64_t N = mix.N, C = mix.C, stride = mix.stride;
  const int num_maps = mix.layer + 1;
  const auto dout = random_values<floatX>(N * C, 2);
  const auto dweights = random_values<float>(num_maps * stride, 3),
             dgates = random_values<float>(num_maps * stride, 4);  // before
  const DeviceArray<floatX> d_dout(dout);
  std::vector<DeviceArray<Element>> d_maps;
  std::vector<double> e_dmaps, e_dweights = doubles(dweights), e_dgates = doubles(dgates);
  for (int m = 0; m < num_maps; m++) {
    const auto map = random_values<Element>(N * C, uint32_t(5 + m));
    d_maps.emplace_back(map);
    for (int64_t n = 0; n < N; n++) {
      const double weight = mix.weights_in_double(n)[m];
      double sum = 0;
      for (int64_t i = n * C; i < (n + 1) * C; i++)
        e_dmaps.push_back(weight * real(dout[i])), sum += real(dout[i]) * real(map[i]);
      e_dweights[m * stride + n] = sum;
    }
  }
  // A weight is linear in each gate: its derivative is the difference between a gate of 1 and one of 0.
  for (int m = 1; m < num_maps; m++)
    for (int64_t n = 0; n < N; n++) {
      const auto at_1 = mix.weights_in_double(n, m, 1), at_0 = mix.weights_in_double(n, m, 0);
      for (int i = 0; i < num_maps; i++) e_dgates[m * stride + n] += e_dweights[i * stride + n] * (at_1[i] - at_0[i]);
    }
  const auto [dmaps, dweights_result, dgates_result] = in_any_order(
      [&] {
        const DeviceArray<floatX> d_dmaps(nans<floatX>(num_maps * N * C));
        const DeviceArray<float> d_dweights(dweights), d_dgates(dgates);
        for (int m = 0; m < num_maps; m++)
          mix_map_backward(d_dmaps.data + m * N * C, d_dweights.data + m * stride, d_dout.data, d_maps[m].data,
                           mix.weights(), m, N, C);
        mix_gates_backward(d_dgates.data, d_dweights.data, mix.weights(), N);
        return std::make_tuple(d_dmaps.to_host(), d_dweights.to_host(), d_dgates.to_host());
      },
      2);
  EXPECT_LE(relative_error(dmaps, e_dmaps), one_rounding);
  EXPECT_LE(relative_error(dweights_result, e_dweights), of_fp32);
  EXPECT_LE(relative_error(dgates_result, e_dgates), of_fp32);
}

TEST(MixedMaps, GiveEachMapAndGateItsGradient) {
  for_each_mixed_maps([](const MixedMaps& mix) {
    check_gradients_of_mixed_maps<float>(mix);
    if (has_master_weights) check_gradients_of_mixed_maps<floatX>(mix);
  });
}

// The update by AdamW, and the norm of the gradients.
#pragma once
#include <cmath>
#include <utility>
#include "dev/test/operations/operation.h"
#include "llmc/ops/adamw.h"
#include "llmc/ops/step_stats.h"

// ----------------------------------------------------------------------------
// Optimizer

// Chunks of tensors of these sizes, laid out as in an arena with at least one element between two of them.
struct Arena {
  std::vector<ParameterChunk> chunks;
  int64_t size = 64;

  explicit Arena(const std::vector<int64_t>& sizes) {
    for (size_t tensor = 0; tensor < sizes.size(); tensor++) {
      for (int64_t i = 0; i < sizes[tensor]; i += parameter_chunk_size)
        chunks.push_back(
            {size + i, size + i, int(std::min<int64_t>(parameter_chunk_size, sizes[tensor] - i)), tensor % 2 == 0});
      size += sizes[tensor] / 64 * 64 + 64;
    }
  }
  // Calls f(i, the chunk that contains i, or null).
  template <class F>
  void for_each(F f) const {
    int64_t i = 0;
    for (const ParameterChunk& chunk : chunks) {
      for (; i < chunk.begin; i++) f(size_t(i), nullptr);
      for (; i < chunk.begin + chunk.count; i++) f(size_t(i), &chunk);
    }
    for (; i < size; i++) f(size_t(i), nullptr);
  }
};

// BUG (build/fp32/test_ops_cpu) llmc/cpu/optimizer.h: `chunks[c].decays ? s.weight_decay : 0.0f` -> `s.weight_decay`
TEST(AdamW, MovesTheParametersAsPyTorchDoes) {
  // Beside and on a thread's 4 or 8, a block's 1,024 or 2,048 and a chunk; several chunks.
  const Arena arena({100,
                     7,
                     2 * parameter_chunk_size + 3,
                     768,
                     2056,
                     3,
                     4,
                     5,
                     6,
                     8,
                     9,
                     1023,
                     1024,
                     1025,
                     2047,
                     2048,
                     2049,
                     parameter_chunk_size - 1,
                     parameter_chunk_size,
                     parameter_chunk_size + 1});
  const double lr = 0.01, b1 = 0.9, b2 = 0.95, eps = 1e-3, decay = 0.1, scale = 0.5;  // an eps that makes a difference
  const StepStats sums = {16, 2.5};
  const AdamWStep step =
      {float(lr),          float(b1),   float(b2), float(eps), float(1 - std::pow(b1, 3)), float(1 - std::pow(b2, 3)),
       scale * (4 + 1e-6), float(decay)};
  const auto weights = random_values<float>(arena.size, 1), m = random_values<float>(arena.size, 2, 0.1);
  const auto grads = random_values<float>(arena.size, 3);
  auto v = random_values<float>(arena.size, 4);
  for (float& x : v) x = 0.01f * x * x;
  std::vector<floatX> params;
  for (float x : weights) params.push_back(floatX(x));

  std::vector<double> e_weights =
      doubles(has_master_weights ? weights : std::vector<float>(params.begin(), params.end()));
  std::vector<double> e_m = doubles(m), e_v = doubles(v);
  arena.for_each([&](size_t i, const ParameterChunk* chunk) {
    if (chunk == nullptr) return;
    const double g = scale * double(grads[i]);
    e_m[i] = b1 * e_m[i] + (1 - b1) * g;
    e_v[i] = b2 * e_v[i] + (1 - b2) * g * g;
    e_weights[i] -= lr * (chunk->decays ? decay : 0) * e_weights[i];
    e_weights[i] -= lr * (e_m[i] / (1 - std::pow(b1, 3))) / (std::sqrt(e_v[i] / (1 - std::pow(b2, 3))) + eps);
  });

  const DeviceArray<ParameterChunk> d_chunks(arena.chunks);
  const DeviceArray<StepStats> d_sums(std::vector<StepStats>{sums});
  const DeviceArray<float> d_grads(grads);
  const auto [new_params, new_weights, new_m, new_v] = in_any_order([&] {
    DeviceArray<floatX> d_params(params);
    DeviceArray<float> d_weights(weights), d_m(m), d_v(v);
    adamw_update(d_params.data, has_master_weights ? d_weights.data : nullptr, d_m.data, d_v.data, d_grads.data,
                 d_chunks.data, int64_t(d_chunks.size), step, d_sums.data);
    return std::make_tuple(d_params.to_host(), d_weights.to_host(), d_m.to_host(), d_v.to_host());
  });
  const std::vector<float> updated =
      has_master_weights ? new_weights : std::vector<float>(new_params.begin(), new_params.end());
  EXPECT_LE(relative_error(updated, e_weights), 5e-7);
  EXPECT_LE(relative_error(new_m, e_m), 5e-7);
  EXPECT_LE(relative_error(new_v, e_v), 5e-7);
  EXPECT_TRUE(same_bits(d_grads.to_host(), grads)) << "the gradient is unchanged";
  const std::vector<floatX>& p = new_params;  // a structured binding cannot be captured
  const std::vector<float>& w = new_weights;
  arena.for_each([&](size_t i, const ParameterChunk* chunk) {
    if (chunk == nullptr) {
      EXPECT_EQ(float(p[i]), float(params[i])) << "between the tensors";
    } else if (has_master_weights) {
      EXPECT_EQ(float(p[i]), float(floatX(w[i]))) << "rounded masters";
    }
  });
}

// How far one step moves a parameter of 1 whose gradient is `grad`, in units of the learning rate.
inline double adamw_move(float grad, float eps, float weight_decay) {
  const DeviceArray<ParameterChunk> chunks(std::vector<ParameterChunk>{{0, 0, 1, 1}});
  const DeviceArray<StepStats> sums(std::vector<StepStats>{{1, 0}});
  const DeviceArray<floatX> params(std::vector<floatX>(64, floatX(1.0f)));
  const std::vector<float> zeros(64, 0.0f), ones(64, 1.0f), gradients(64, grad);
  const DeviceArray<float> weights(ones), m(zeros), v(zeros), grads(gradients);
  adamw_update(params.data, has_master_weights ? weights.data : nullptr, m.data, v.data, grads.data, chunks.data, 1,
               {0.125f, 0.9f, 0.95f, eps, 0.1f, 0.05f, /*grad_clip=*/0, weight_decay}, sums.data);
  return (1 - double(has_master_weights ? weights.to_host()[0] : float(params.to_host()[0]))) / 0.125;
}

TEST(AdamW, MovesByTheLearningRateInTheFirstStep) {
  EXPECT_NEAR(adamw_move(0.3f, 1e-8f, 0), 1, 1e-5);
  EXPECT_NEAR(adamw_move(-1e-4f, 1e-8f, 0), -1, 2e-4);
  EXPECT_EQ(adamw_move(0, 1e-8f, 0), 0);
  EXPECT_NEAR(adamw_move(0.5f, 0.5f, 0), 0.5, 1e-5) << "eps stands beside the root";
  EXPECT_NEAR(adamw_move(0, 1e-8f, 0.1f), 0.1, 1e-5) << "decay by itself";
}

// The factor that clips a gradient of 1: with beta1 = 0 it becomes the first moment, which stays 7 without an update.
inline float grad_scale_of(const StepStats& sums, double grad_clip) {
  const DeviceArray<ParameterChunk> chunks(std::vector<ParameterChunk>{{0, 0, 11, 1}});
  const DeviceArray<StepStats> d_sums(std::vector<StepStats>{sums});
  const std::vector<float> ones(64, 1.0f), sevens(64, 7.0f);
  const DeviceArray<floatX> params(std::vector<floatX>(64, floatX(1.0f)));
  const DeviceArray<float> weights(ones), m(sevens), v(sevens), grads(ones);
  adamw_update(params.data, has_master_weights ? weights.data : nullptr, m.data, v.data, grads.data, chunks.data, 1,
               {0.125f, 0.0f, 0.95f, 1e-8f, 1.0f, 0.05f, grad_clip, 0.1f}, d_sums.data);
  const std::vector<float> new_m = m.to_host(), new_v = v.to_host(), new_weights = weights.to_host();
  const std::vector<floatX> new_params = params.to_host();
  for (size_t i = 0; i < 11; i++) {
    EXPECT_EQ(new_m[i], new_m[0]);
    EXPECT_EQ(new_m[i] == 7, new_v[i] == 7);
    EXPECT_EQ(new_m[i] == 7, float(new_params[i]) == 1);
    EXPECT_EQ(has_master_weights && new_m[i] != 7, new_weights[i] != 1);
  }
  return new_m[0];
}

// BUG (build/fp32/test_ops_cpu) llmc/ops/step_stats.h: `(grad_clip > 0 && clip < 1 ? clip : 1.0)` ->
//   `(grad_clip > 0 ? clip : 1.0)`
TEST(AdamW, ClipsTheGradientByItsNormAsPyTorchDoes) {
  EXPECT_EQ(grad_scale_of({16, 3}, 1), float(1 / (4 + 1e-6)));
  EXPECT_EQ(grad_scale_of({2, 3}, 0.1), float(0.1 / (std::sqrt(2.0) + 1e-6)));
  EXPECT_EQ(grad_scale_of({16, 3}, 4.1), 1) << "shorter than the limit";
  EXPECT_EQ(grad_scale_of({16, 3}, 0), 1) << "no limit";
  EXPECT_EQ(grad_scale_of({0, 3}, 1), 1);
}

// BUG (build/fp32/test_ops_cpu) llmc/ops/step_stats.h: `return sqrt(grad_squares) * grad_weight();` ->
//   `return sqrt(grad_squares);`
// BUG (build/fp32/test_ops_cpu) llmc/ops/step_stats.h: `clip : 1.0) * grad_weight());` -> `clip : 1.0));`
TEST(AdamW, TakesTheGradientOfTheMeanOverScoredTokens) {
  auto stats = [](double scored, double tokens) { return StepStats{16, 3, 0, scored, tokens}; };
  EXPECT_EQ(grad_scale_of(stats(5, 20), 1), float(4 * (1 / (16 + 1e-6))));
  EXPECT_EQ(grad_scale_of(stats(5, 20), 16.1), 4) << "shorter than the limit";
  EXPECT_EQ(grad_scale_of(stats(5, 20), 0), 4) << "no limit";
  EXPECT_EQ(grad_scale_of(stats(20, 20), 1), float(1 / (4 + 1e-6)));
  EXPECT_EQ(grad_scale_of(stats(0, 20), 0), 1) << "no gradient";
}

TEST(AdamW, ChangesNothingIfLossOrNormIsNotFinite) {
  for (double bad : {double(INFINITY), double(NAN)}) {
    for (double grad_clip : {0.0, 1.0}) {
      EXPECT_EQ(grad_scale_of({16, bad}, grad_clip), 7) << bad;
      EXPECT_EQ(grad_scale_of({bad, 3}, grad_clip), 7) << bad;
    }
  }
}

TEST(SumOfSquares, IsExactWhereFloatIsNotAndSkipsGaps) {
  for (size_t num_chunks : {1024, 1025}) {  // as many as the threads that add up the chunks' sums, and one more
    std::vector<int64_t> sizes = {30000, 3, 64, 8189, 7, 9, 2047, 2048, 2049, 8191, 8192, 8193};
    sizes.resize(num_chunks - Arena(sizes).chunks.size() + sizes.size(), 8);
    const Arena arena(sizes);
    ASSERT_EQ(arena.chunks.size(), num_chunks);
    std::vector<float> x = nans<float>(arena.size);
    double expected = 0;
    arena.for_each([&](size_t i, const ParameterChunk* chunk) {
      if (chunk != nullptr) x[i] = 1.0f, expected += 1;
    });
    x[size_t(arena.chunks[0].begin) + 77] = 30000.0f;
    expected += 9e8 - 1;
    const DeviceArray<ParameterChunk> d_chunks(arena.chunks);
    const DeviceArray<float> d_x(x);
    const auto [sum] = in_any_order(
        [&] {
          const DeviceArray<double> d_sum(nans<double>(1));
          sum_of_squares(d_sum.data, d_x.data, d_chunks.data, int64_t(d_chunks.size));
          return std::make_tuple(d_sum.to_host());
        },
        num_chunks == 1025 ? 2 : 1);
    EXPECT_EQ(sum[0], expected) << num_chunks << " chunks";
  }
}

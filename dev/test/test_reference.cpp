// Is the reference right? Its gradients against central finite differences, everything against the golden cases.
// Run from the repository's root.
#include <algorithm>               // std::max
#include <cmath>                   // std::sqrt, std::fabs
#include <cstdio>                  // printf
#include <gtest/gtest.h>           // TEST_P, EXPECT_LE
#include <numeric>                 // std::iota, std::inner_product
#include <random>                  // std::mt19937_64
#include <utility>                 // std::swap
#include "dev/test/golden_case.h"  // GoldenCase, read_golden_case
#include "dev/test/values.h"       // relative_error
#include "llmc/model/reference.h"  // the reference

using reference::AdamWOptions;
using reference::Array;
using reference::Cache;
using reference::Result;
using reference::Tensor;
using reference::Tensors;

// ----------------------------------------------------------------------------
// Small models with random weights

// Uniform in [-1, 1).
double uniform(std::mt19937_64& random) { return double(random() >> 11) * 0x1p-52 - 1; }

struct WiringCase {
  const char* name;
  int num_layers, num_heads, num_skip_layer, num_skip_head;
  bool bias;
};

const WiringCase wirings[] = {
    {"plain_gpt2", 3, 4, 0, 0, true},
    {"three_quarters", 4, 4, 3, 3, true},
    {"adjacent", 4, 4, 1, 2, true},
    {"chains", 6, 4, 2, 3, true},
    {"all_heads", 4, 4, 2, 4, true},
    {"furthest_layer", 3, 2, 2, 1, true},
    {"without_biases", 4, 4, 3, 3, false},
    {"plain_without_biases", 2, 4, 0, 0, false},
};

// Shapes that are multiples of nothing; T < max_seq_len, so that the last positions go unused.
struct Problem {
  ModelConfig config;
  int B = 2, T = 6;
  std::vector<int> inputs, targets;
  Tensors<double> params;

  explicit Problem(const WiringCase& wiring) {
    config.num_layers = wiring.num_layers;
    config.num_heads = wiring.num_heads;
    config.channels = 16;
    config.vocab_size = 13;
    config.max_seq_len = 7;
    config.bias = wiring.bias;
    config.wiring.num_skip_layer = wiring.num_skip_layer;
    config.wiring.num_skip_head = wiring.num_skip_head;
    validate(config);
    std::mt19937_64 random(1234);
    for (int n = 0; n < B * T; n++) {
      inputs.push_back(random() % config.vocab_size);
      targets.push_back(random() % config.vocab_size);
    }
    // Much larger than GPT-2's 0.02: attention is far from uniform, GELU far from linear, no gradient near zero.
    params = reference::make_parameters<double>(config);
    for (auto& [name, param] : params) {
      const bool norm_weight = name.find("ln_") != std::string::npos && name.find(".weight") != std::string::npos;
      for (double& w : param.data) w = 0.5 * uniform(random) + (norm_weight ? 1 : 0);
    }
  }

  double loss() const { return reference::forward(config, params, inputs, targets, B, T).loss; }

  Tensors<double> grads() const {
    Tensors<double> grads = reference::make_parameters<double>(config);
    Cache<double> cache;
    reference::forward(config, params, inputs, targets, B, T, &cache);
    reference::backward(config, params, cache, grads);
    return grads;
  }

  // The columns of layer l's c_attn that project the key (third = 1) or value (2) of one head.
  std::vector<int> columns(int third, int head) const {
    std::vector<int> columns(config.head_size());
    std::iota(columns.begin(), columns.end(), third * config.channels + head * config.head_size());
    return columns;
  }
};

struct ReferenceWiring : testing::TestWithParam<WiringCase> {};

std::string wiring_name(const testing::TestParamInfo<WiringCase>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(All, ReferenceWiring, testing::ValuesIn(wirings), wiring_name);

// d loss / d (the tensor along `direction`), by central difference. Its error is about h^2/6 times the third
// derivative, plus 1e-16 / h from rounding: the two meet near h = 1e-5.
double directional_derivative(Problem& problem, Tensor<double>& tensor, const std::vector<double>& direction) {
  const double h = 1e-5;
  const std::vector<double> saved = tensor.data;
  double loss[2];
  for (int side = 0; side < 2; side++) {
    for (size_t i = 0; i < saved.size(); i++) tensor.data[i] = saved[i] + (side == 0 ? h : -h) * direction[i];
    loss[side] = problem.loss();
  }
  tensor.data = saved;
  return (loss[0] - loss[1]) / (2 * h);
}

// Each tensor's derivatives are compared as one vector: those of all its elements where they are few, else of 24
// drawn ones; and one along a random direction that moves all elements at once, so that no element goes unseen. As a
// vector, because a single true derivative may be zero, like that of every key bias, to which softmax is blind.
TEST_P(ReferenceWiring, GradientsAreCentralDifferencesOfTheLoss) {
  Problem problem(GetParam());
  const Tensors<double> grads = problem.grads();
  std::mt19937_64 random(99);
  double worst = 0;
  for (auto& [name, param] : problem.params) {
    const size_t size = param.data.size();
    std::vector<size_t> elements(size);
    std::iota(elements.begin(), elements.end(), 0);
    for (size_t i = 0; i < size; i++) std::swap(elements[i], elements[i + random() % (size - i)]);
    if (size > 48) elements.resize(24);

    const std::vector<double>& grad = grads.at(name).data;
    std::vector<double> expected, actual;
    for (size_t i : elements) {
      std::vector<double> direction(size);
      direction[i] = 1;
      expected.push_back(directional_derivative(problem, param, direction));
      actual.push_back(grad[i]);
    }
    std::vector<double> direction(size);
    for (double& d : direction) d = uniform(random) / std::sqrt(double(size));
    expected.push_back(directional_derivative(problem, param, direction));
    actual.push_back(std::inner_product(grad.begin(), grad.end(), direction.begin(), 0.0));

    const double error = relative_error(actual, expected);
    worst = std::max(worst, error);
    EXPECT_LE(error, 1e-6) << name;
    double norm = 0;
    for (double g : actual) norm = std::max(norm, std::fabs(g));
    EXPECT_GT(norm, 1e-4) << name << ": too small a gradient to prove anything";
  }
  printf("%s: worst relative error of a tensor's gradient %.1e\n", GetParam().name, worst);
}

// Who reads K/V head i of layer l, straight from the definition: a head >= h - n_h of a layer m >= n_l reads layer
// m - n_l, every other one its own layer.
TEST_P(ReferenceWiring, DeadKeysAndValuesHaveNoGradientAndNoEffect) {
  Problem problem(GetParam());
  const ModelConfig& config = problem.config;
  const Tensors<double> grads = problem.grads();
  const double loss = problem.loss();
  for (int l = 0; l < config.num_layers; l++) {
    for (int head = 0; head < config.num_heads; head++) {
      const bool skips = head >= config.num_heads - config.wiring.num_skip_head;
      const bool read_here = !skips || l < config.wiring.num_skip_layer;
      const bool read_above = skips && l + config.wiring.num_skip_layer < config.num_layers;
      for (int third = 1; third <= 2; third++) {
        double largest = 0;
        Problem changed = problem;
        for (auto& [name, param] : changed.params) {
          if (name.find("h." + std::to_string(l) + ".attn.c_attn") == std::string::npos) continue;
          const int64_t width = 3 * config.channels;
          for (size_t row = 0; row < param.data.size() / width; row++) {
            for (int column : problem.columns(third, head)) {
              largest = std::max(largest, std::fabs(grads.at(name).data[row * width + column]));
              param.data[row * width + column] += 0.3;
            }
          }
        }
        const std::string where = "layer " + std::to_string(l) + " head " + std::to_string(head);
        if (read_here || read_above) {
          EXPECT_GT(largest, 1e-5) << where;
          EXPECT_GT(std::fabs(changed.loss() - loss), 1e-7) << where;
        } else {
          EXPECT_EQ(largest, 0) << where;
          EXPECT_EQ(changed.loss(), loss) << where;
        }
      }
    }
  }
}

TEST(Reference, BackwardAddsScaleTimesTheGradient) {
  Problem problem(wirings[1]);
  const Tensors<double> once = problem.grads();
  Tensors<double> twice = reference::make_parameters<double>(problem.config);
  Cache<double> cache;
  reference::forward(problem.config, problem.params, problem.inputs, problem.targets, problem.B, problem.T, &cache);
  reference::backward(problem.config, problem.params, cache, twice, 0.25);
  reference::backward(problem.config, problem.params, cache, twice, 1.5);
  for (const auto& [name, grad] : once) {
    std::vector<double> expected = grad.data;
    for (double& g : expected) g *= 1.75;
    EXPECT_LE(relative_error(twice.at(name).data, expected), 1e-14) << name;
  }
}

// ----------------------------------------------------------------------------
// AdamW, against its closed form: after steps 1 and 2, m / (1 - beta^t) is a weighted mean of the two gradients.

TEST(Reference, AdamWTakesPyTorchsSteps) {
  Tensors<double> params = {{"matrix", {{1, 2}, {1, -2}}}, {"vector", {{2}, {3, 0.5}}}};
  const Tensors<double> zeros = {{"matrix", {{1, 2}, {0, 0}}}, {"vector", {{2}, {0, 0}}}};
  const Tensors<double> g1 = {{"matrix", {{1, 2}, {0.3, -1.2}}}, {"vector", {{2}, {0.4, 0.0}}}};   // norm 1.3
  const Tensors<double> g2 = {{"matrix", {{1, 2}, {-0.1, 0.2}}}, {"vector", {{2}, {0.2, -0.4}}}};  // norm 0.5
  // The clip factors, 0.75 / (1.3 + 1e-6) and 1. An eps this large makes the size of a gradient matter.
  const AdamWOptions options = {0.1, 0.9, 0.8, 0.05, 0.25, 0.75};
  const double factor1 = 0.75 / 1.300001;

  Tensors<double> m = zeros, v = zeros;
  const Tensors<double> start = params;
  EXPECT_NEAR(reference::adamw(params, g1, m, v, 1, options), 1.3, 1e-15);
  const Tensors<double> middle = params;
  EXPECT_NEAR(reference::adamw(params, g2, m, v, 2, options), 0.5, 1e-15);
  for (const auto& [name, param] : params) {
    const double keep = name == "matrix" ? 1 - 0.1 * 0.25 : 1;
    for (int i = 0; i < 2; i++) {
      const double a = g1.at(name).data[i] * factor1, b = g2.at(name).data[i];
      EXPECT_NEAR(middle.at(name).data[i], start.at(name).data[i] * keep - 0.1 * a / (std::fabs(a) + 0.05), 1e-14);
      const double m_hat = (0.9 * a + b) / 1.9, v_hat = (0.8 * a * a + b * b) / 1.8;
      EXPECT_NEAR(param.data[i], middle.at(name).data[i] * keep - 0.1 * m_hat / (std::sqrt(v_hat) + 0.05), 1e-14);
    }
  }
}

// Where the norm is as small as the 1e-6 beside it, that shows: clip 1e-6 / (3e-6 + 1e-6) is a quarter, not a third.
TEST(Reference, ClippingAddsPyTorchsEpsilonToTheNorm) {
  Tensors<double> params = {{"vector", {{1}, {1}}}}, m = {{"vector", {{1}, {0}}}}, v = m;
  const Tensors<double> grads = {{"vector", {{1}, {3e-6}}}};
  reference::adamw(params, grads, m, v, 1, AdamWOptions{1, 0.9, 0.95, 1e-6, 0, 1e-6});
  EXPECT_NEAR(params.at("vector").data[0], 1 - 0.75 / 1.75, 1e-12);
}

// ----------------------------------------------------------------------------
// The golden cases

// The case's parameters as the reference holds them; without the bias tensors of a model without biases.
template <class Real>
Tensors<Real> golden_parameters(const GoldenCase& golden) {
  Tensors<Real> params = reference::make_parameters<Real>(golden.config);
  for (auto& [name, param] : params) {
    const GoldenTensor& tensor = golden.model.at(name);
    EXPECT_EQ(param.shape, tensor.shape) << name;
    param.data.assign(tensor.data.begin(), tensor.data.end());
  }
  return params;
}

template <class Real>
struct GoldenRun {
  std::vector<double> losses, grad_norms;  // (steps)
  Array<Real> token_losses;                // (B, T)  of the first micro-batch
  Tensors<Real> grads;                     // of step 1
  double val_loss = 0;                     // before training
};

// The case's training run, computed by the reference.
template <class Real>
GoldenRun<Real> run_golden(const GoldenCase& golden) {
  const ModelConfig& config = golden.config;
  const int B = golden.batch_size, T = golden.seq_len, accum = golden.grad_accum_steps;
  const AdamWOptions options = {golden.learning_rate, golden.beta1,        golden.beta2,
                                golden.eps,           golden.weight_decay, golden.grad_clip};
  GoldenRun<Real> run;
  Tensors<Real> params = golden_parameters<Real>(golden);
  std::vector<int> inputs, targets;
  for (int s = 0; s < golden.num_micro_batches(); s++) {
    golden_micro_batch(golden, s, inputs, targets);
    run.val_loss += reference::forward(config, params, inputs, targets, B, T).loss / golden.num_micro_batches();
  }
  Tensors<Real> m = reference::make_parameters<Real>(config), v = m;
  for (int step = 1; step <= golden.steps; step++) {
    Tensors<Real> grads = reference::make_parameters<Real>(config);
    double loss = 0;
    for (int s = 0; s < accum; s++) {
      golden_micro_batch(golden, (step - 1) * accum + s, inputs, targets);
      Cache<Real> cache;
      const Result<Real> result = reference::forward(config, params, inputs, targets, B, T, &cache);
      reference::backward(config, params, cache, grads, 1.0 / accum);
      loss += result.loss / accum;
      if (step == 1 && s == 0) run.token_losses = result.token_losses;
    }
    if (step == 1) run.grads = grads;
    run.losses.push_back(loss);
    run.grad_norms.push_back(reference::adamw(params, grads, m, v, step, options));
  }
  return run;
}

struct ReferenceGolden : testing::TestWithParam<std::string> {};

std::string case_name(const testing::TestParamInfo<std::string>& info) { return info.param; }

INSTANTIATE_TEST_SUITE_P(All, ReferenceGolden, testing::ValuesIn(golden_case_names()), case_name);

TEST_P(ReferenceGolden, InDoubleItComputesWhatTheIndependentImplementationDid) {
  const GoldenCase golden = read_golden_case(GetParam());
  const GoldenRun<double> run = run_golden<double>(golden);
  // expected.json has all digits of what float64 gave on the same weights: 2e-14 is what was seen to differ.
  const double tolerance = 2e-13;
  double loss_error = 0, norm_error = 0, grad_error = 0;
  ASSERT_EQ(run.losses.size(), golden.losses.size());
  for (size_t i = 0; i < golden.losses.size(); i++) {
    EXPECT_NEAR(run.losses[i], golden.losses[i], tolerance) << "step " << i + 1;
    EXPECT_NEAR(run.grad_norms[i] / golden.grad_norms[i], 1, tolerance) << "step " << i + 1;
    loss_error = std::max(loss_error, std::fabs(run.losses[i] - golden.losses[i]));
    norm_error = std::max(norm_error, std::fabs(run.grad_norms[i] / golden.grad_norms[i] - 1));
  }
  EXPECT_NEAR(run.val_loss, golden.val_loss, tolerance);

  const double float_rounding = 0x1.01p-24;  // the files are float32: each number within 2^-24 of itself
  EXPECT_LE(relative_error(run.token_losses, golden.token_losses), float_rounding);
  ASSERT_EQ(run.grads.size(), golden.grads.size());
  for (const auto& [name, grad] : run.grads) {
    const double error = relative_error(grad.data, golden.grads.at(name).data);
    EXPECT_LE(error, float_rounding) << name;
    grad_error = std::max(grad_error, error);
  }
  printf("%s: off by %.1e in a loss, %.1e in a norm, %.1e in a gradient\n", GetParam().c_str(), loss_error,
         norm_error, grad_error);
}

TEST_P(ReferenceGolden, InFloatItsLossesAreThoseOfDouble) {
  const GoldenCase golden = read_golden_case(GetParam());
  const GoldenRun<float> run = run_golden<float>(golden);
  EXPECT_NEAR(run.val_loss, golden.val_loss, 2e-6);
  for (size_t i = 0; i < golden.losses.size(); i++)
    EXPECT_NEAR(run.losses[i], golden.losses[i], 2e-6) << "step " << i + 1;
}

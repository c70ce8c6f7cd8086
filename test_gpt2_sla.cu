// The trainer's model against the reference, which shares no code with it: losses, every gradient, updates, for every kind of
// wiring; and what the trainer promises beside that: no read of unwritten memory, the same bits again, generation that continues
// what training computes.
#define SLA_NO_MAIN
#include "train_gpt2_sla.cu"

#include <gtest/gtest.h>          // TEST
#include "dev/test/golden_case.h" // GoldenCase, read_golden_case
#include "llmc/reference.h"       // reference::forward, reference::backward

using DoubleTensors = reference::Tensors<double>;

// ----------------------------------------------------------------------------
// Between the two

std::unique_ptr<GPT2> make_model(const ModelConfig& config, int B, int T, bool keep_dead_kv = false) {
  auto model = std::make_unique<GPT2>();
  gpt2_plan(*model, config, B, T, keep_dead_kv);
  gpt2_allocate(*model);
  return model;
}

// Weights several times larger than GPT-2's initial ones, so that no term of the model is too small to matter.
DoubleTensors random_parameters(const ModelConfig& config, uint64_t seed) {
  DoubleTensors params = reference::make_parameters<double>(config);
  uint32_t tag = 0;
  for (auto& [name, tensor] : params) {
    const bool is_scale = name.find("ln_") != std::string::npos && name.find(".weight") != std::string::npos;
    for (size_t i = 0; i < tensor.data.size(); i++)  // float values: both sides start from the same numbers
      tensor.data[i] = double(float((is_scale ? 1 : 0) + 0.15 * random_normal(seed, RandomStream::test, tag, i)));
    tag++;
  }
  return params;
}

template <class Tensors>
void set_weights(GPT2& model, const Tensors& params) {
  std::vector<float> values;
  for (int i = 0; i < model.num_tensors(); i++) {
    const auto& source = params.at(model.tensor(i).name).data;
    std::vector<float> full(source.begin(), source.end());
    values.resize(size_t(model.tensor(i).num_elements()));
    from_file_layout(model.layout(), i, full.data(), values.data());
    store_to(model, model.weight_memory)(i, values.data());
  }
}

// One tensor of an arena, full-size, as files hold it.
std::vector<float> full_tensor(const GPT2& model, const floatX* arena, int i) {
  std::vector<float> values(size_t(model.tensor(i).num_elements()));
  std::vector<float> full(size_t(num_elements(model.parameters.specs[size_t(i)].file_shape)), 0.0f);
  fetch_from(model, arena)(i, values.data());
  to_file_layout(model.layout(), i, values.data(), full.data());
  return full;
}

template <class A, class B>
double relative_error(const A& a, const B& expected) {
  EXPECT_EQ(a.size(), expected.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); i++) {
    difference += (double(a[i]) - double(expected[i])) * (double(a[i]) - double(expected[i]));
    norm += double(expected[i]) * double(expected[i]);
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

std::vector<int> random_tokens(int64_t n, int vocab_size, uint32_t tag) {
  std::vector<int> tokens(size_t(n), 0);
  for (size_t i = 0; i < tokens.size(); i++)
    tokens[i] = int(random_words(7, RandomStream::test, 1000 + tag, i).word[0] % uint32_t(vocab_size));
  return tokens;
}

// ----------------------------------------------------------------------------
// Losses and gradients

struct GraphCase {
  const char* name;
  int L, h, C, V, positions, n_l, n_h;
  bool bias;
  int B, T, accumulation;
};

class Graph : public testing::TestWithParam<GraphCase> {};

ModelConfig config_of(const GraphCase& c) {
  ModelConfig config;
  config.num_layers = c.L, config.num_heads = c.h, config.channels = c.C, config.vocab_size = c.V;
  config.max_seq_len = c.positions, config.bias = c.bias;
  config.num_skip_layer = c.n_l, config.num_skip_head = c.n_h;
  return config;
}

// Runs `accumulation` micro-batches through both and compares losses and gradients.
void expect_equal_to_reference(const GraphCase& c, bool keep_dead_kv) {
  const ModelConfig config = config_of(c);
  const DoubleTensors params = random_parameters(config, 42);
  auto model = make_model(config, c.B, c.T, keep_dead_kv);
  set_weights(*model, params);
  gpt2_zero_grad(*model);
  DoubleTensors grads = reference::make_parameters<double>(config);
  for (int s = 0; s < c.accumulation; s++) {
    const auto inputs = random_tokens(int64_t(c.B) * c.T, c.V, uint32_t(2 * s));
    const auto targets = random_tokens(int64_t(c.B) * c.T, c.V, uint32_t(2 * s + 1));
    reference::Cache<double> cache;
    const auto expected = reference::forward(config, params, inputs, targets, c.B, c.T, &cache);
    reference::backward(config, params, cache, grads, 1.0 / c.accumulation);
    const double loss = gpt2_micro_step(*model, inputs.data(), targets.data(), c.B, c.T, c.accumulation);
    EXPECT_NEAR(loss, expected.loss, 1e-5);
    std::vector<float> losses(inputs.size());
    copy_to_host(losses.data(), model->acts.losses, losses.size() * sizeof(float));
    EXPECT_LE(relative_error(losses, expected.token_losses), 1e-5);
  }
  for (int i = 0; i < model->num_tensors(); i++) {
    const std::string& name = model->tensor(i).name;
    EXPECT_LE(relative_error(full_tensor(*model, model->grad_memory, i), grads.at(name).data), 1e-5) << name;
  }
  EXPECT_NEAR(gpt2_grad_norm(*model) / reference::global_norm(grads), 1, 1e-5);
}

TEST_P(Graph, HasTheLossesAndGradientsOfTheReference) { expect_equal_to_reference(GetParam(), false); }
TEST_P(Graph, HasThemWhenDeadRowsAreKept) { expect_equal_to_reference(GetParam(), true); }

INSTANTIATE_TEST_SUITE_P(
    Wiring, Graph,
    testing::Values(GraphCase{"plain", 3, 4, 32, 61, 40, 0, 0, true, 2, 33, 1},
                    GraphCase{"nine_of_twelve", 4, 4, 32, 61, 40, 3, 3, true, 2, 33, 3},
                    GraphCase{"adjacent", 4, 4, 32, 61, 40, 1, 2, true, 3, 17, 1},
                    GraphCase{"chains", 6, 4, 32, 61, 40, 2, 3, true, 2, 33, 3},
                    GraphCase{"all_heads", 4, 4, 32, 61, 40, 2, 4, true, 2, 33, 1},
                    GraphCase{"skip_all_but_one_layer", 5, 3, 48, 61, 40, 4, 2, true, 2, 33, 1},
                    GraphCase{"no_bias", 4, 4, 32, 61, 40, 3, 3, false, 2, 33, 3},
                    GraphCase{"no_bias_adjacent_all_heads", 3, 2, 20, 7, 9, 1, 2, false, 1, 9, 1},
                    GraphCase{"one_position", 4, 4, 32, 61, 40, 3, 3, true, 3, 1, 1},
                    GraphCase{"one_layer", 1, 2, 16, 5, 8, 0, 0, true, 1, 8, 1},
                    GraphCase{"several_query_and_key_blocks", 2, 2, 16, 31, 600, 1, 1, true, 1, 523, 1},
                    GraphCase{"several_logit_chunks", 2, 2, 16, 70001, 300, 1, 1, true, 1, 299, 1}),
    [](const auto& info) { return info.param.name; });

class Golden : public testing::TestWithParam<std::string> {};

// The bounds are the golden cases' README's, with room for another order of summation.
TEST_P(Golden, TrainingHasTheLossesNormsAndGradientsOfTheIndependentImplementation) {
  const GoldenCase golden = read_golden_case(GetParam());
  const int B = golden.batch_size, T = golden.seq_len;
  auto model = make_model(golden.config, B, T);
  set_weights(*model, golden.model);
  std::vector<int> inputs, targets;

  double val_loss = 0;
  for (int s = 0; s < golden.num_micro_batches(); s++) {
    golden_micro_batch(golden, s, inputs, targets);
    gpt2_forward(*model, inputs.data(), B, T);
    val_loss += gpt2_loss(*model, targets.data(), B, T, false) / golden.num_micro_batches();
  }
  EXPECT_NEAR(val_loss, golden.val_loss, 1e-5);

  for (int step = 0; step < golden.steps; step++) {
    gpt2_zero_grad(*model);
    double loss = 0;
    for (int i = 0; i < golden.grad_accum_steps; i++) {
      golden_micro_batch(golden, step * golden.grad_accum_steps + i, inputs, targets);
      loss += gpt2_micro_step(*model, inputs.data(), targets.data(), B, T, golden.grad_accum_steps) / golden.grad_accum_steps;
      if (step > 0 || i > 0) continue;
      std::vector<float> losses(inputs.size());
      copy_to_host(losses.data(), model->acts.losses, losses.size() * sizeof(float));
      EXPECT_LE(relative_error(losses, golden.token_losses), 1e-5);
    }
    const double norm = gpt2_grad_norm(*model);
    EXPECT_NEAR(loss, golden.losses[size_t(step)], 1e-5) << "step " << step + 1;
    EXPECT_NEAR(norm / golden.grad_norms[size_t(step)], 1, 2e-5) << "step " << step + 1;
    if (step == 0) {
      for (int i = 0; i < model->num_tensors(); i++) {
        const std::string& name = model->tensor(i).name;
        EXPECT_LE(relative_error(full_tensor(*model, model->grad_memory, i), golden.grads.at(name).data), 1e-5) << name;
      }
    }
    gpt2_update(*model, step + 1, norm, {golden.learning_rate, golden.beta1, golden.beta2, golden.eps, golden.weight_decay,
                                         golden.grad_clip});
  }
}

INSTANTIATE_TEST_SUITE_P(Case, Golden, testing::ValuesIn(golden_case_names()), [](const auto& info) { return info.param; });

// ----------------------------------------------------------------------------
// Dead rows

// The losses of `steps` updates from a seed's initial weights on random tokens.
std::vector<double> loss_curve(GPT2& model, int steps, uint64_t seed) {
  gpt2_init_weights(model, seed);
  std::vector<double> losses;
  for (int step = 1; step <= steps; step++) {
    const auto inputs = random_tokens(int64_t(model.B) * model.T, model.config.vocab_size, uint32_t(step));
    gpt2_zero_grad(model);
    losses.push_back(gpt2_micro_step(model, inputs.data(), inputs.data(), model.B, model.T, 1));
    gpt2_update(model, step, gpt2_grad_norm(model), {1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0});
  }
  return losses;
}

TEST(DeadRows, AreExactlyWhatTwelveLayersWithNineOfTwelveHeadsSave) {
  ModelConfig d12;
  ASSERT_TRUE(config_from_preset("d12", d12));
  GPT2 lean, full;  // planned, not allocated
  gpt2_plan(lean, d12, 1, 1024);
  gpt2_plan(full, d12, 1, 1024, /*keep_dead_kv=*/true);
  const int64_t dead_rows = 3 * 2 * 9 * 64;  // layers 9 to 11, k and v, heads 3 to 11, head size
  EXPECT_EQ(full.parameters.num_parameters, 124439808);
  EXPECT_EQ(full.parameters.num_parameters - lean.parameters.num_parameters, dead_rows * (768 + 1));
  EXPECT_EQ(lean.parameters.num_parameters_full, full.parameters.num_parameters);
  EXPECT_DOUBLE_EQ(flops_per_token(full.config, full.plan, 1024) - flops_per_token(lean.config, lean.plan, 1024),
                   6.0 * double(dead_rows) * 768);
}

TEST(DeadRows, DoNotChangeTheLossCurve) {
  ModelConfig config;
  config.num_layers = 12, config.num_heads = 12, config.channels = 48, config.vocab_size = 97, config.max_seq_len = 32;
  set_default_skips(config);
  ASSERT_EQ(config.num_skip_layer, 9);
  ASSERT_EQ(config.num_skip_head, 9);
  auto lean = make_model(config, 2, 32), full = make_model(config, 2, 32, /*keep_dead_kv=*/true);
  const auto a = loss_curve(*lean, 10, 3), b = loss_curve(*full, 10, 3);
  EXPECT_LT(a.back(), a.front() - 0.1);  // it learns
  for (size_t i = 0; i < a.size(); i++) EXPECT_NEAR(a[i], b[i], 2e-6) << "step " << i + 1;
}

// ----------------------------------------------------------------------------
// Memory, bits, generation

ModelConfig small_config() {
  ModelConfig config;
  config.num_layers = 6, config.num_heads = 4, config.channels = 32, config.vocab_size = 101, config.max_seq_len = 96;
  config.num_skip_layer = 2, config.num_skip_head = 3;
  return config;
}

TEST(Memory, NoActivationIsReadBeforeItIsWritten) {
  std::vector<std::vector<double>> curves;
  for (int fill : {0x00, 0xff}) {  // zeros, NaN
    auto model = make_model(small_config(), 2, 67);
    device_memset(model->activation_memory, fill, model->activation_layout.bytes);
    curves.push_back(loss_curve(*model, 3, 5));
  }
  EXPECT_TRUE(std::isfinite(curves[1].back()));
  EXPECT_EQ(curves[0], curves[1]);
}

TEST(Memory, ActivationsGrowLinearlyWithLength) {
  ModelConfig config = small_config();
  config.max_seq_len = 65536;
  auto bytes = [&](int T) {
    GPT2 model;
    gpt2_plan(model, config, 1, T);
    return double(model.activation_layout.bytes);
  };
  EXPECT_NEAR((bytes(65536) - bytes(32768)) / (bytes(32768) - bytes(16384)), 2, 1e-3);
}

TEST(Memory, OverlappingBorrowsNeedAsManySlabsAsLayersAreSkipped) {
  GPT2 model;
  gpt2_plan(model, small_config(), 1, 32);
  EXPECT_EQ(model.plan.num_slabs, 2);
}

TEST(Bits, AreTheSameInASecondRun) {
  auto a = make_model(small_config(), 2, 67), b = make_model(small_config(), 2, 67);
  EXPECT_EQ(loss_curve(*a, 5, 11), loss_curve(*b, 5, 11));
  EXPECT_EQ(memcmp(a->weight_memory, b->weight_memory, a->parameters.layout.bytes), 0);
  EXPECT_EQ(memcmp(a->m_memory, b->m_memory, a->parameters.layout.bytes), 0);
}

TEST(Bits, DifferWithAnotherSeed) {
  auto a = make_model(small_config(), 2, 67), b = make_model(small_config(), 2, 67);
  EXPECT_NE(loss_curve(*a, 1, 11), loss_curve(*b, 1, 12));
}

TEST(Generation, ContinuesFromCachedKeysAndValuesAsIfFromTheStart) {
  auto model = make_model(small_config(), 2, 80);
  set_weights(*model, random_parameters(model->config, 9));
  const auto tokens = random_tokens(80, model->config.vocab_size, 77);
  const size_t hidden = 80 * size_t(model->config.channels);
  std::vector<float> whole(hidden), piecewise(hidden);
  gpt2_forward(*model, tokens.data(), 1, 80);
  copy_to_host(whole.data(), model->acts.lnf, hidden * sizeof(float));
  device_memset(model->activation_memory, 0xff, model->activation_layout.bytes);
  const int ends[] = {1, 2, 30, 64, 65, 79, 80};
  int first = 0;
  for (int end : ends) {
    gpt2_forward(*model, tokens.data(), 1, end, first);
    first = end;
  }
  copy_to_host(piecewise.data(), model->acts.lnf, hidden * sizeof(float));
  EXPECT_LE(relative_error(piecewise, whole), 1e-6);
}

TEST(Generation, IsAFunctionOfSeedAndStep) {
  auto model = make_model(small_config(), 1, 64);
  gpt2_init_weights(*model, 1);
  auto generate = [&](uint64_t seed, int64_t step) {
    std::vector<int> tokens = {3};
    gpt2_generate(*model, tokens, 64, 1.0, seed, step);
    return tokens;
  };
  EXPECT_EQ(generate(1, 5).size(), 64u);
  EXPECT_EQ(generate(1, 5), generate(1, 5));
  EXPECT_NE(generate(1, 5), generate(1, 6));
  EXPECT_NE(generate(1, 5), generate(2, 5));
}

TEST(Initialisation, HasGpt2sStandardDeviations) {
  ModelConfig config = small_config();
  config.channels = 128;
  auto model = make_model(config, 1, 8);
  gpt2_init_weights(*model, 1);
  for (int i = 0; i < model->num_tensors(); i++) {
    const TensorSpec& tensor = model->tensor(i);
    std::vector<float> x(size_t(tensor.num_elements()));
    fetch_from(*model, model->weight_memory)(i, x.data());
    double sum = 0, squares = 0;
    for (float v : x) sum += v, squares += double(v) * v;
    const double mean = sum / double(x.size()), deviation = std::sqrt(squares / double(x.size()) - mean * mean);
    const bool residual = tensor.name.find("c_proj.weight") != std::string::npos;
    if (tensor.shape.size() == 2) EXPECT_NEAR(deviation / (residual ? 0.02 / std::sqrt(12.0) : 0.02), 1, 0.03) << tensor.name;
    else EXPECT_EQ(deviation, 0) << tensor.name;
    EXPECT_NEAR(mean, tensor.shape.size() == 1 && tensor.name.find(".weight") != std::string::npos ? 1 : 0, 1e-3) << tensor.name;
  }
}

// Targets that are not scored: the loss is the mean over the others, and the gradients follow from it.
#pragma once
#include <gtest/gtest.h>
#include <algorithm>
#include <string>
#include <vector>
#include "dev/test/long.h"
#include "dev/test/model/losses.h"
#include "dev/test/model/model.h"
#include "dev/test/reference/reference.h"

// Inputs and targets of B sequences of T tokens; about the share `scored` of them is scored.
struct MaskedTokens {
  std::vector<int> inputs, targets;

  MaskedTokens(int64_t count, int vocab_size, double scored, uint32_t tag)
      : inputs(random_tokens(count, vocab_size, 2 * tag)), targets(random_tokens(count, vocab_size, 2 * tag + 1)) {
    const std::vector<int> random = random_tokens(count, 1000, 500 + tag);
    for (size_t i = 0; i < targets.size(); i++)
      if (random[i] >= 1000 * scored) targets[i] = not_scored;
  }
  double num_scored() const {
    return double(targets.size()) - double(std::count(targets.begin(), targets.end(), not_scored));
  }
};

// The gradients of one step, in as many micro-batches of B sequences as there are tokens for.
inline StepStats step_of_micro_batches(GPT2& model, const MaskedTokens& tokens, int B, int T) {
  gpt2_zero_grad(model);
  gpt2_zero_loss(model);
  const int64_t rows = int64_t(B) * T, count = int64_t(tokens.inputs.size()) / rows;
  model.remembered = 0;
  for (int64_t i = 0; i < count; i++)
    gpt2_micro_step(model, tokens.inputs.data() + i * rows, tokens.targets.data() + i * rows, B, T, count);
  gpt2_square_grads(model);
  return gpt2_read_stats(model);
}

class MaskedLoss : public testing::TestWithParam<std::string> {};

// The second of three micro-batches has no token that is scored.
TEST_P(MaskedLoss, HasTheLossAndGradientsOfTheReference) {
  const int B = 2, T = 33, V = 61;
  ModelConfig config = four_layers(GetParam());
  config.channels = 64;  // in bf16 the error of gradients of 32 numbers is too large
  auto model = make_model(config, B, T);
  const DoubleTensors params = random_parameters(model->config, 42);
  set_weights(*model, params);
  MaskedTokens all(3 * B * T, V, 0.4, 1);
  std::fill_n(all.targets.begin() + B * T, B * T, not_scored);

  DoubleTensors grads = reference::make_parameters<double>(model->config);
  reference::Memory<double> memory;
  double loss = 0, ponder = 0;
  for (int s = 0; s < 3; s++) {
    MaskedTokens part = all;
    part.inputs.assign(all.inputs.begin() + s * B * T, all.inputs.begin() + (s + 1) * B * T);
    part.targets.assign(all.targets.begin() + s * B * T, all.targets.begin() + (s + 1) * B * T);
    const double share = part.num_scored() / all.num_scored();
    reference::Cache<double> cache;
    const auto result = reference::forward(model->config, params, part.inputs, part.targets, B, T, &cache, &memory);
    reference::backward(model->config, params, cache, grads, share);
    loss += share * result.loss, ponder += share * result.ponder;
  }

  const StepStats stats = step_of_micro_batches(*model, all, B, T);
  EXPECT_EQ(stats.scored, all.num_scored());
  EXPECT_EQ(stats.tokens, 3.0 * B * T);
  EXPECT_NEAR(stats.mean(stats.loss, B * T) / loss, 1, loss_tolerance);
  EXPECT_NEAR(stats.mean(stats.ponder, B * T), ponder, loss_tolerance);
  EXPECT_NEAR(stats.grad_norm() / reference::global_norm(grads), 1, norm_tolerance);
  expect_gradients(*model, grads, stats.grad_weight());
}

INSTANTIATE_TEST_SUITE_P(Wiring, MaskedLoss, testing::Values("sla(2,3)", "universal(1) act(0.3,0.5)"));
INSTANTIATE(LONG_ON_EMU(OtherWiring), MaskedLoss,
            testing::Values("plain", "rope memory(20)", "reversible", "also(1,2) gqa(2)"));

TEST(LONG_ON_EMU(MaskedStep), HasTheSameLossInAnyMicroBatches) {
  const int T = 24;
  auto model = make_model(four_layers("sla(2,3)"), 8, T);
  init_weights(*model, 1);
  const MaskedTokens tokens(8 * T, 61, 0.1, 3);
  const StepStats whole = step_of_micro_batches(*model, tokens, 8, T);
  for (int B : {1, 2, 4}) {
    const StepStats parts = step_of_micro_batches(*model, tokens, B, T);
    EXPECT_NEAR(parts.mean(parts.loss, B * T) / whole.mean(whole.loss, 8 * T), 1, is_16_bit ? loss_tolerance : 1e-6);
    EXPECT_NEAR(parts.grad_norm() / whole.grad_norm(), 1, norm_tolerance);
  }
}

TEST(MaskedStep, HasNoGradientWhereNoTokenIsScored) {
  const int B = 2, T = 24;
  auto model = make_model(four_layers("universal(1) act(0.3,0.5)"), B, T);
  init_weights(*model, 1);
  const StepStats stats = step_of_micro_batches(*model, MaskedTokens(2 * B * T, 61, 0, 3), B, T);
  EXPECT_TRUE(std::isnan(stats.mean(stats.loss, B * T))) << "there is no loss";
  EXPECT_EQ(stats.ponder, 0);
  EXPECT_EQ(stats.grad_norm(), 0);
  gpt2_update(*model, 1, {1e-3, 0.9, 0.95, 1e-8, 0, 1.0});
  EXPECT_EQ(gpt2_read_stats(*model).grad_squares, 0);
  auto unchanged = make_model(model->config, B, T);
  init_weights(*unchanged, 1);
  expect_the_same_weights_and_moments(*model, *unchanged);
}

TEST(Accuracy, IsThatOfTheLargestLogits) {
  const int B = 2, T = 33, V = 61;
  PlanOptions plan = {B, T};
  GPT2 model;
  plan.logit_bytes = 10 * 64 * int64_t(sizeof(floatX));  // ten rows at a time on the CPU
  gpt2_declare(model, four_layers("sla(2,3)"), plan);
  gpt2_allocate(model);
  init_weights(model, 1);
  MaskedTokens tokens(B * T, V, 0.6, 4);
  gpt2_zero_loss(model);
  gpt2_forward_segments(model, tokens.inputs.data(), B, T);
  int64_t expected = 0;
  for (int64_t row = 0; row < B * T; row++) {
    const std::vector<float> logits = gpt2_fetch_logits(model, row, 1);
    const int largest = int(std::max_element(logits.begin(), logits.end()) - logits.begin());
    int& target = tokens.targets[size_t(row)];
    if (row % 3 == 0 && target != not_scored) target = largest;
    expected += target == largest;
  }
  gpt2_loss(model, tokens.targets.data(), {B, T}, 1);
  EXPECT_GT(expected, 10);
  EXPECT_EQ(gpt2_read_stats(model).correct, double(expected));
}

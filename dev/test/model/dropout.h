// Dropout in training passes: the reference's losses and gradients with the same elements dropped, for any cut into
// micro-batches and at each level of recomputation.
#pragma once
#include <gtest/gtest.h>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>
#include "dev/test/long.h"
#include "dev/test/model/losses.h"
#include "dev/test/model/model.h"
#include "dev/test/values.h"

constexpr double dropped_share = 0.2;
constexpr int64_t dropout_update = 5;
constexpr uint64_t dropout_seed = 0x123456789a;

inline std::unique_ptr<GPT2> make_dropout_model(const ModelConfig& config, int B, int T, int recompute) {
  return make_model(config, B, T, recompute, /*keep_dead_kv=*/false, dropped_share);
}

// The mean loss of an update's tokens (sequences, T), in micro-batches of the model's size; gradients =.
inline double update_with_dropout(GPT2& model, const std::vector<int>& inputs, const std::vector<int>& targets,
                                  int64_t update) {
  const int B = model.training->B, T = model.training->T;
  const int64_t count = int64_t(inputs.size()) / (B * T);
  gpt2_zero_grad(model);
  gpt2_zero_loss(model);
  for (int64_t i = 0; i < count; i++) {
    model.draw = {dropout_seed, update, i * B};
    gpt2_micro_step(model, inputs.data() + i * B * T, targets.data() + i * B * T, B, T, count);
  }
  return gpt2_read_stats(model).loss / double(count);
}

// Wirings whose attention takes other paths: K/V of other layers, several of them, values alone, masks whose keys are
// not neighbours, maps of other layers, documents; and wirings that change what the outputs are added to. In sequences
// of 136 positions strides make sequences of their own, and there are several tiles of keys.
struct DropoutCase {
  const char* wiring;
  int T = 40;
};
const DropoutCase dropout_cases[] = {{"sla(2,3)", 136},
                                     {"also(1,2) also(2,1:3) gqa(2)"},
                                     {"sla(2,2,v) share(3,k)"},
                                     {"router"},
                                     {"route(0.6) sla(2,3)"},
                                     {"depth sla(2,3)"},
                                     {"dense vres sla(2,3)"},
                                     {"window(9,SL) rope"},
                                     {"strided(8)", 136},
                                     {"fixed(6,2,union) qknorm", 72},
                                     {"reuse(2)"},
                                     {"blend(0.4)"},
                                     {"gate"},
                                     {"documents sla(2,3)"},
                                     {"relative documents"},
                                     {"universal(2) sla(3,2)"},
                                     {"universal(2) act(0.3)"},
                                     {"gru swiglu"},
                                     {"modern sla(2,3)"}};

TEST(LONG_ON_EMU(Dropout), HasTheReferencesLossesAndGradients) {
  constexpr int B = 2, count = 2;
  int recompute = 0;
  for (const auto& [wiring, T] : dropout_cases) {
    SCOPED_TRACE(wiring);
    ModelConfig config = four_layers(wiring);
    if (config.wiring_table().relative && !relative_attention_has_dropout) continue;
    config.max_seq_len = T;
    const DoubleTensors params = random_parameters(config, 42);
    auto model = make_dropout_model(config, B, T, recompute++ % 5);
    set_weights(*model, params);
    const auto inputs = random_tokens(count * B * T, config, 1), targets = random_tokens(count * B * T, config, 2);
    DoubleTensors grads = reference::make_parameters<double>(config);
    double expected = 0;
    for (int s = 0; s < count; s++) {
      auto part = [rows = B * T, s](const std::vector<int>& x) {
        return std::vector<int>(x.begin() + s * rows, x.begin() + (s + 1) * rows);
      };
      reference::Cache<double> cache;
      reference::Memory<double> none;
      expected += reference::forward(config, params, part(inputs), part(targets), B, T, &cache, &none, nullptr,
                                     {dropped_share, dropout_seed, dropout_update, s * B, /*routes=*/true})
                      .loss /
                  count;
      reference::backward(config, params, cache, grads, 1.0 / count);
    }
    EXPECT_NEAR(update_with_dropout(*model, inputs, targets, dropout_update) / expected, 1, loss_tolerance);
    expect_gradients(*model, grads);
  }
}

// Expects an update of `sequences` to have the same loss and the same norm of the gradients however it is cut and
// whatever is computed again. `plans`: sequences of a micro-batch, and levels of recomputation.
inline void expect_the_same_update(const DropoutCase& c, int sequences, const std::vector<std::pair<int, int>>& plans) {
  ModelConfig config = four_layers(c.wiring);
  config.max_seq_len = c.T;
  const auto inputs = random_tokens(sequences * c.T, config, 1), targets = random_tokens(sequences * c.T, config, 2);
  std::vector<double> losses, norms;
  for (const auto& [B, recompute] : plans) {
    SCOPED_TRACE(testing::Message() << c.wiring << ", B " << B << ", level " << recompute);
    auto model = make_dropout_model(config, B, c.T, recompute);
    set_weights(*model, random_parameters(config, 42));
    losses.push_back(update_with_dropout(*model, inputs, targets, dropout_update));
    norms.push_back(grad_norm(*model));
    EXPECT_NEAR(losses.back() / losses[0], 1, is_16_bit ? 1e-3 * coarseness : 1e-6);
    EXPECT_NEAR(norms.back() / norms[0], 1, is_16_bit ? 1e-2 * coarseness : 1e-5);
    EXPECT_GT(std::abs(update_with_dropout(*model, inputs, targets, dropout_update + 1) / losses[0] - 1), 1e-4);
  }
}

TEST(LONG_ON_EMU(Dropout), IsTheSameForAnyMicroBatchAndRecomputation) {
  expect_the_same_update({"sla(2,3)", 24}, 8, {{8, 0}, {8, 1}, {8, 2}, {8, 3}, {8, 4}, {2, 0}, {1, 3}});
}

// Branches' outputs are computed again for the gates of `gru` alone, and layers' inputs for `dense`.
TEST(LongDropout, IsTheSameAtAnyLevelOfRecomputationOfEveryWiring) {
  const bool takes_seconds = head_size_multiple > 1;  // on the emulated GPU, which has every third one
  for (size_t i = takes_seconds ? 1 + is_bf16 : 0; i < std::size(dropout_cases); i += takes_seconds ? 3 : 1) {
    const DropoutCase& c = dropout_cases[i];
    if (!four_layers(c.wiring).wiring_table().relative || relative_attention_has_dropout)
      expect_the_same_update(c, 2, {{2, 0}, {2, 1}, {2, 2}, {2, 3}, {2, 4}});
  }
}

TEST(Dropout, IsOffWhereNothingIsTrained) {
  const ModelConfig config = four_layers("sla(2,3)");
  const auto tokens = random_tokens(2 * 24, config, 1);
  std::vector<std::vector<float>> losses;
  for (const bool drops : {false, true}) {
    auto model = drops ? make_dropout_model(config, 2, 24, 0) : make_model(config, 2, 24);
    set_weights(*model, random_parameters(config, 42));
    if (drops) update_with_dropout(*model, tokens, tokens, 1);
    gpt2_forward_segments(*model, tokens.data(), 2, 24);
    gpt2_loss(*model, tokens.data(), {2, 24}, 1);
    losses.push_back(to_floats(model->acts.losses, tokens.size()));
  }
  EXPECT_EQ(losses[0], losses[1]);
}

TEST(Dropout, IsRefusedWithTermsThatHaveNone) {
  std::map<std::string, std::string> wirings = {{"topk(4)", "topk"},
                                                {"rope memory(8)", "memory"},
                                                {"lsh(4,2)", "lsh"},
                                                {"reversible sla(2,3)", "reversible"}};
  if (!relative_attention_has_dropout) wirings["relative documents"] = "relative on a GPU";
  for (const auto& [wiring, term] : wirings) {
    try {
      make_dropout_model(four_layers(wiring), 1, 8, 0);
      FAIL() << wiring;
    } catch (const UserError& e) {
      EXPECT_EQ(e.what(), "--dropout 0.2: it does not go with " + term + "; wiring \"" + wiring +
                              "\" has that; leave one of them out");
    }
  }
}

// Models that continue with another wiring than they were trained with.
#pragma once
#ifndef SLA_EMU  // what changes is host code, which takes long with the checks of the emulated GPU
#include <gtest/gtest.h>
#include "dev/test/files.h"
#include "dev/test/model/model.h"
#include "dev/test/values.h"
#include "dev/test/reference/reference.h"

// A model with random weights, also in its dead rows, and what it becomes with another wiring.
struct Rewired {
  static constexpr int T = 17;
  ModelConfig before, config;
  bool keep_dead_kv;             // now
  DoubleTensors trained, fresh;  // the weights before, and a new model's with the new wiring
  DoubleTensors expected;        // the weights now: trained ones for tensors of the same shape, else a new model's
  std::unique_ptr<GPT2> model;

  Rewired(const ModelConfig& trained_config, const std::string& wiring, bool keep_dead_kv = false)
      : before(trained_config), config(before), keep_dead_kv(keep_dead_kv) {
    constexpr uint64_t seed = 7;
    config.wiring = parse_wiring(wiring);
    trained = random_parameters(before, 9);
    auto source = make_model(before, 1, 9, 0, /*keep_dead_kv=*/true);
    set_weights(*source, trained);
    const TemporaryFolder folder;
    write_weight_file(folder.path + "/model.safetensors", source->parameters,
                      fetch_from(*source, source->master_memory));
    model = make_model(config, 1, T, 0, keep_dead_kv);
    read_weights_of(*model, *model, folder.path, before, seed);

    fresh = reference::make_parameters<double>(config);
    auto initial = make_model(config, 1, 9, 0, /*keep_dead_kv=*/true);
    init_weights(*initial, seed);
    for (int i = 0; i < initial->num_tensors(); i++) {
      const std::vector<float> values = full_tensor(*initial, initial->master_memory, i);
      fresh.at(initial->tensor(i).name).data.assign(values.begin(), values.end());
    }
    for (int i = initial->num_tensors(); i < initial->parameters.file_tensors(); i++) {
      const std::vector<float> values = constant(*initial, i);
      fresh.at(initial->parameters.constant(i).name).data.assign(values.begin(), values.end());
    }
    expected = fresh;
    for (auto& [name, tensor] : expected)
      if (const auto it = trained.find(name); it != trained.end() && it->second.shape == tensor.shape)
        tensor = it->second;
  }

  // A constant of a model, as its operations read it.
  static std::vector<float> constant(const GPT2& model, int index) {
    const ConstantTensor& constant = model.parameters.constant(index);
    return to_floats(model.constant_memory + constant.offset, size_t(num_elements(constant.shape)));
  }
  void expect_constants() const {
    for (int i = model->num_tensors(); i < model->parameters.file_tensors(); i++) {
      const std::vector<double>& values = expected.at(model->parameters.constant(i).name).data;
      EXPECT_EQ(constant(*model, i), std::vector<float>(values.begin(), values.end()));
    }
  }

  // Layer l's c_attn: what q (part 0), k (1) or v (2) of a head has for row `row` of its input, or with row C for the
  // bias, at the head's channel i.
  static double& qkv_at(DoubleTensors& params, const ModelConfig& c, int l, int part, int head, int row, int i) {
    const int C = c.channels, hs = c.head_size(), kv = reference::num_kv_heads(c) * hs;
    const int column = (part == 0 ? 0 : C + (part - 1) * kv) + head * hs + i;
    const std::string name = "h." + std::to_string(l) + ".attn.c_attn";
    return row == C ? params.at(name + ".bias").data[size_t(column)]
                    : params.at(name + ".weight").data[size_t(row * (C + 2 * kv) + column)];
  }
  // Expects a head's weights to be the mean over the heads `sources` in `params`, a model with the wiring of `c`.
  void expect_head(int l, int part, int head, DoubleTensors& params, const ModelConfig& c,
                   const std::vector<int>& sources) {
    for (int row = 0; row <= config.channels; row++)
      for (int i = 0; i < config.head_size(); i++) {
        double sum = 0;
        for (int source : sources) sum += qkv_at(params, c, l, part, source, row, i);
        qkv_at(expected, config, l, part, head, row, i) = sum / double(sources.size());
      }
  }

  // Every weight to the bit, and the losses of the reference.
  void check() {
    auto same = make_model(config, 1, 9, 0, keep_dead_kv);
    set_weights(*same, expected);
    ASSERT_EQ(model->num_tensors(), same->num_tensors());
    for (int i = 0; i < model->num_tensors(); i++)
      EXPECT_EQ(full_tensor(*model, model->master_memory, i), full_tensor(*same, same->master_memory, i))
          << model->tensor(i).name;
    const auto inputs = random_tokens(T, config.vocab_size, 1), targets = random_tokens(T, config.vocab_size, 2);
    gpt2_zero_loss(*model);
    gpt2_forward(*model, inputs.data(), {1, T});
    gpt2_loss(*model, targets.data(), {1, T}, T);
    const auto result = reference::forward(config, expected, inputs, targets, 1, T);
    EXPECT_NEAR(gpt2_read_stats(*model).loss / result.loss, 1, loss_tolerance);
    EXPECT_LE(relative_error(to_floats(model->acts.losses, inputs.size()), result.token_losses), tensor_tolerance);
  }
};

inline ModelConfig six_heads(const char* wiring) {
  ModelConfig config = four_layers(wiring);
  config.num_heads = 6, config.channels = 48;
  return config;
}

TEST(AnotherWiring, OfGroupedQueriesHasMeansOfKvHeads) {
  Rewired r(six_heads("plain"), "gqa(2)");
  for (int l = 0; l < 4; l++) {
    for (int head = 0; head < 6; head++) r.expect_head(l, 0, head, r.trained, r.before, {head});
    for (int part : {1, 2})
      for (int head : {0, 1}) r.expect_head(l, part, head, r.trained, r.before, {3 * head, 3 * head + 1, 3 * head + 2});
  }
  r.check();
}

TEST(AnotherWiring, OfSkippedLayersHasTheRowsAsTheyWere) { Rewired(four_layers("plain"), "sla(2,3)").check(); }
TEST(AnotherWiring, OfMasksHasTheRowsAsTheyWere) { Rewired(four_layers("gqa(2)"), "gqa(2) window(9,SL)").check(); }

TEST(AnotherWiring, HasNewValuesInRowsThatWereDead) {
  Rewired r(four_layers("sla(2,3)"), "plain");
  for (int l : {2, 3})
    for (int part : {1, 2})
      for (int head : {1, 2, 3}) r.expect_head(l, part, head, r.fresh, r.config, {head});
  r.check();
}

TEST(AnotherWiring, OfMoreKvHeadsRepeatsThemAndKeepsTheFunction) {
  Rewired r(six_heads("gqa(2)"), "plain");
  for (int l = 0; l < 4; l++)
    for (int part : {0, 1, 2})
      for (int head = 0; head < 6; head++)
        r.expect_head(l, part, head, r.trained, r.before, {part == 0 ? head : head / 3});
  r.check();
  const auto tokens = random_tokens(r.T, 61, 1);
  const double plain = reference::forward(r.config, r.expected, tokens, tokens, 1, r.T).loss;
  EXPECT_NEAR(plain, reference::forward(r.before, r.trained, tokens, tokens, 1, r.T).loss, 1e-12);
}

TEST(AnotherWiring, TakesMeansOfLivingHeadsAlone) {
  Rewired r(four_layers("sla(2,3)"), "gqa(2)");
  for (int l = 0; l < 4; l++)
    for (int part : {0, 1, 2})
      for (int head = 0; head < (part == 0 ? 4 : 2); head++) {
        if (part == 0) r.expect_head(l, part, head, r.trained, r.before, {head});
        else if (l < 2) r.expect_head(l, part, head, r.trained, r.before, {2 * head, 2 * head + 1});
        else if (head == 0) r.expect_head(l, part, head, r.trained, r.before, {0});
        else r.expect_head(l, part, head, r.fresh, r.config, {head});
      }
  r.check();
}

TEST(AnotherWiring, HasNewGatesAndDropsOldOnes) {
  Rewired gated(four_layers("plain"), "gate");
  gated.check();
  EXPECT_EQ(gated.expected.at("h.1.attn.map_gate.weight").data, gated.fresh.at("h.1.attn.map_gate.weight").data);
  Rewired(four_layers("gate"), "plain").check();
}

// Layers that used another layer's attention map had no rows of q and k; the rewired model initialises theirs.
TEST(AnotherWiring, HasNewQueriesAndKeysWhereMapsWereReused) {
  Rewired r(four_layers("reuse(2)"), "plain");
  for (int l : {1, 3})
    for (int part : {0, 1})
      for (int head = 0; head < 4; head++) r.expect_head(l, part, head, r.fresh, r.config, {head});
  r.check();
}

TEST(AnotherWiring, DropsLearnedPositionsAndHasNewOnes) {
  Rewired(four_layers("plain"), "rope").check();
  Rewired learned(four_layers("rope"), "plain");
  learned.check();
  EXPECT_EQ(learned.expected.at("wpe.weight").data, learned.fresh.at("wpe.weight").data);
  Rewired relative(four_layers("plain"), "relative");
  relative.check();
  for (const char* name : {"h.3.attn.relative.weight", "h.3.attn.relative.u", "h.0.attn.relative.v"})
    EXPECT_EQ(relative.expected.at(name).data, relative.fresh.at(name).data) << name;
  Rewired(four_layers("relative"), "plain").check();
}

TEST(AnotherWiring, OfRepeatedLayersTakesTheLayersThatRan) {
  Rewired fewer(four_layers("plain"), "universal(2)");
  EXPECT_EQ(fewer.expected.at("wse.weight").data, fewer.fresh.at("wse.weight").data);
  EXPECT_EQ(fewer.expected.count("h.2.ln_1.weight"), 0u);
  fewer.check();
  Rewired more(four_layers("universal(2)"), "sla(3,2)");
  for (auto& [name, tensor] : more.expected)
    if (name.compare(0, 4, "h.2.") == 0 || name.compare(0, 4, "h.3.") == 0)
      tensor = more.trained.at(format("h.%d.", name[2] - '2') + name.substr(4));
  more.check();
}

TEST(AnotherWiring, HasNoBiasesOfNormsThatTakeNoMean) {
  Rewired dropped(four_layers("plain"), "rmsnorm");
  EXPECT_EQ(dropped.expected.count("h.0.ln_1.bias"), 0u);
  dropped.check();
  Rewired fresh(four_layers("rmsnorm"), "plain");
  EXPECT_EQ(fresh.expected.at("ln_f.bias").data, std::vector<double>(32, 0));
  fresh.check();
}

TEST(AnotherWiring, BeginsAHeadOfItsOwnAsTheEmbeddings) {
  Rewired untied(four_layers("plain"), "untied");
  untied.expected.at("lm_head.weight") = untied.trained.at("wte.weight");
  untied.check();
  Rewired(four_layers("untied"), "plain").check();
  Rewired(four_layers("untied"), "untied gru").check();
}

TEST(AnotherWiring, HasNewMlpsOfAnotherForm) {
  for (const auto& [before, now] : {std::pair("plain", "swiglu"), {"swiglu(80)", "plain"}, {"swiglu", "swiglu(56)"}}) {
    Rewired other(four_layers(before), now);
    EXPECT_EQ(other.expected.at("h.3.mlp.c_fc.weight").data, other.fresh.at("h.3.mlp.c_fc.weight").data);
    other.check();
  }
  Rewired(four_layers("plain"), "relu2").check();
  Rewired(four_layers("plain"), "silu").check();
  Rewired(four_layers("plain"), "alibi").check();
  Rewired(four_layers("alibi"), "plain").check();
  Rewired(four_layers("plain"), "sinks").check();
}

TEST(AnotherWiring, HasNewGatesOfTheResidualStream) {
  Rewired gated(four_layers("plain"), "gru");
  for (const char* name : {"h.0.gru_1.y.weight", "h.3.gru_2.x.weight", "h.2.gru_1.rx.weight", "h.3.gru_2.bias"})
    EXPECT_EQ(gated.expected.at(name).data, gated.fresh.at(name).data) << name;
  EXPECT_EQ(gated.expected.at("h.1.gru_2.bias").data, std::vector<double>(32, 2));
  gated.check();
  Rewired(four_layers("gru"), "plain").check();
}

TEST(AnotherWiring, BeginsWithTheValuesThatLayersHad) {
  const std::vector<double> router = {0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0,  // of layer 1: (4, 2, 4)
                                      0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  for (const auto& [before, now] : {std::pair("plain", "vres"), {"sla(2,3)", "vres sla(2,3)"}, {"plain", "router"}}) {
    Rewired mixing(four_layers(before), now);
    if (now == std::string("router")) EXPECT_EQ(mixing.expected.at("h.1.attn.router").data, router);
    else EXPECT_EQ(mixing.expected.at("h.1.attn.value_mix").data, (std::vector<double>{1, 0}));
    mixing.check();
    auto trained = make_model(mixing.before, 1, mixing.T);
    set_weights(*trained, mixing.trained);
    const auto inputs = random_tokens(mixing.T, 61, 1), targets = random_tokens(mixing.T, 61, 2);
    gpt2_forward(*trained, inputs.data(), {1, Rewired::T});
    gpt2_loss(*trained, targets.data(), {1, Rewired::T}, mixing.T);
    EXPECT_TRUE(
        same_bits(to_floats(mixing.model->acts.losses, inputs.size()), to_floats(trained->acts.losses, inputs.size())));
  }
  Rewired(four_layers("vres"), "plain").check();
  Rewired(four_layers("router"), "plain").check();
  Rewired(four_layers("plain"), "depth").check();
}

TEST(AnotherWiring, BeginsWithTheInputsThatLayersHad) {
  for (const auto& [before, now] : {std::pair("plain", "dense"), {"sla(2,3)", "sla(2,3) dense"}}) {
    Rewired summing(four_layers(before), now);
    EXPECT_EQ(summing.expected.at("h.2.dense").data, (std::vector<double>{0, 0, 0, 1}));
    summing.check();
    auto trained = make_model(summing.before, 1, summing.T);
    set_weights(*trained, summing.trained);
    const auto inputs = random_tokens(summing.T, 61, 1), targets = random_tokens(summing.T, 61, 2);
    auto losses_of = [&](GPT2& model) {
      gpt2_forward(model, inputs.data(), {1, Rewired::T});
      gpt2_loss(model, targets.data(), {1, Rewired::T}, summing.T);
      return to_floats(model.acts.losses, inputs.size());
    };
    EXPECT_TRUE(same_bits(losses_of(*summing.model), losses_of(*trained)));
  }
  Rewired(four_layers("dense"), "plain").check();
}

TEST(AnotherWiring, KeepsRotationsOfTheSameBuckets) {
  for (const char* wiring : {"lsh(4,2) reversible", "lsh(8,1)"}) {
    Rewired hashing(four_layers("lsh(4,2)"), wiring);
    ASSERT_EQ(hashing.model->parameters.constants.size(), 4u);
    hashing.expect_constants();
  }
  Rewired(four_layers("plain"), "lsh(4,2)").expect_constants();
}

TEST(AnotherWiring, HasNewHaltingProbabilitiesAndDropsOldOnes) {
  Rewired halting(four_layers("universal(1)"), "universal(1) act(0.3)");
  for (const char* name : {"halt.weight", "halt.bias"})
    EXPECT_EQ(halting.expected.at(name).data, halting.fresh.at(name).data) << name;
  halting.check();
  Rewired(four_layers("universal(1) act(0.3)"), "universal(1) act(0.2,1)").check();
  Rewired(four_layers("universal(1) act(0.3)"), "universal(1)").check();
}

TEST(AnotherWiring, WrittenOtherwiseIsTheSameFile) {
  Rewired(four_layers("sla(2,3)"), " sla( 2, 3 )", /*keep_dead_kv=*/true).check();
}
#endif

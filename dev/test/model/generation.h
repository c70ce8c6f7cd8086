// Generation from cached K/V, and the weights that a run starts with.
#pragma once
#include <gtest/gtest.h>
#include "dev/test/long.h"
#include "dev/test/model/model.h"
#include "dev/test/values.h"

// A model with random weights, and its hidden states of a text that it has computed as a whole.
struct WholeText {
  std::unique_ptr<GPT2> model;
  std::vector<int> tokens;
  size_t C;
  std::vector<float> hidden_states;  // (80, C)

  explicit WholeText(const ModelConfig& config)
      : model(make_model(config, 1, 80)), tokens(random_tokens(80, config.vocab_size, 77)), C(size_t(config.channels)) {
    set_weights(*model, random_parameters(config, 9));
    gpt2_forward(*model, tokens.data(), {1, 80});
    hidden_states = to_floats(model->hidden_states(), 80 * C);
  }
};

TEST(Generation, ContinuesFromCachedKvAsIfFromTheStart) {
  const WholeText text(small_config());
  const auto& [model, tokens, C, whole] = text;
  auto generator = make_generator(*model, 1, 80, 30);
  const int ends[] = {1, 2, 30, 60, 61, 62, 63, 64, 65, 66, 79, 80};
  std::vector<float> pieces;
  int first = 0;
  for (int end : ends) {
    gpt2_extend(*generator, {tokens.begin() + first, tokens.begin() + end}, {{0, end - first}});
    for (float x : to_floats(generator->hidden_states(), size_t(end - first) * C)) pieces.push_back(x);
    first = end;
  }
  EXPECT_LE(relative_error(pieces, whole), generation_tolerance);
}

TEST(Generation, DrawsByTheReferencesLogits) {
  for (const char* wiring : {"plain", "softcap(0.3)", "untied"}) {
    auto model = make_model(four_layers(wiring), 1, 20);
    const DoubleTensors params = random_parameters(model->config, 9);
    set_weights(*model, params);
    const std::vector<int> tokens = random_tokens(20, model->config.vocab_size, 1);
    reference::Cache<double> cache;
    reference::forward(model->config, params, tokens, tokens, 1, 20, &cache);
    auto generator = make_generator(*model, 1, 20, 20);
    EXPECT_LE(relative_error(gpt2_read_prompt(*generator, 0, tokens),
                             std::vector<double>(cache.logits.end() - model->config.vocab_size, cache.logits.end())),
              tensor_tolerance)
        << wiring;
  }
}

// Weights change between two samples of a run. What generation keeps of them for a text, r of relative positions, must
// not outlive it.
TEST(Generation, BeginsATextWithTodaysWeights) {
  ModelConfig config = small_config();
  config.wiring = parse_wiring("relative");
  const std::vector<int> tokens = random_tokens(20, config.vocab_size, 1);
  auto model = make_model(config, 1, 20);
  auto generator = make_generator(*model, 1, 20, 20);
  const size_t elements = 20 * size_t(config.channels);
  for (int seed : {1, 2}) {
    set_weights(*model, random_parameters(config, seed));
    gpt2_forward(*model, tokens.data(), {1, 20});
    const std::vector<float> whole = to_floats(model->hidden_states(), elements);
    gpt2_read_prompt(*generator, 0, tokens);
    EXPECT_LE(relative_error(to_floats(generator->hidden_states(), elements), whole), generation_tolerance) << seed;
  }
}

// Texts of different lengths lie beside each other, not in the order of the cache, and their caches begin at different
// positions. A GPU takes as many launches for them as for a single text.
TEST(LONG_ON_EMU(Generation), OfSeveralTextsIsThatOfEach) {
  for (const char* wiring : {"sla(1,1)", "rope window(9,SL)", "relative", "universal(1)", "universal(2) act(0.3)",
                             "gru", "topk(5)", "lsh(4,2)", "reversible sla(2,2)"}) {
    SCOPED_TRACE(wiring);
    const bool rounding_changes_the_choice = is_16_bit && std::string(wiring).find("topk") != std::string::npos;
    if (rounding_changes_the_choice) continue;
    ModelConfig config = small_config();
    config.wiring = parse_wiring(wiring);
    const WholeText text(config);
    const auto& [model, tokens, C, whole] = text;
    auto generator = make_generator(*model, 4, 80, 20);
    const std::vector<int> lengths = {66, 1, 20, 41};
    for (int slot = 0; slot < 4; slot++)
      gpt2_read_prompt(*generator, slot, {tokens.begin(), tokens.begin() + lengths[slot]});
    std::vector<size_t> launches;
    for (const std::vector<int>& slots : {std::vector<int>{3}, {2, 0, 3, 1}}) {
      std::vector<int> next;
      std::vector<std::pair<int, int64_t>> counts;
      std::vector<float> expected;
      for (int slot : slots) {
        const int64_t position = generator->cache.lengths[slot];
        next.push_back(tokens[position]), counts.push_back({slot, 1});
        expected.insert(expected.end(), whole.begin() + position * C, whole.begin() + (position + 1) * C);
      }
#ifdef SLA_EMU
      const size_t before = emu::counters().launches;
#endif
      gpt2_extend(*generator, next, counts);
#ifdef SLA_EMU
      launches.push_back(emu::counters().launches - before);
#endif
      EXPECT_LE(relative_error(to_floats(generator->hidden_states(), slots.size() * C), expected),
                generation_tolerance);
    }
#ifdef SLA_EMU
    if (generator->attention_plan.table.topk == 0) { EXPECT_EQ(launches[0], launches[1]); }
#endif
  }
}

// Parts of several tokens, whose neighbours have as many or others, as the evaluator computes them in a pass.
TEST(LONG_ON_EMU(Generation), OfPartsOfDifferentLengthsIsThatOfEach) {
  for (const char* wiring : {"sla(1,1)", "rope window(9,SL)", "relative", "universal(2) act(0.3)", "gru", "lsh(4,2)"}) {
    SCOPED_TRACE(wiring);
    ModelConfig config = small_config();
    config.wiring = parse_wiring(wiring);
    const WholeText text(config);
    const auto& [model, tokens, C, whole] = text;
    auto generator = make_generator(*model, 4, 80, 30);
    for (int slot = 0; slot < 4; slot++)
      gpt2_read_prompt(*generator, slot, {tokens.begin(), tokens.begin() + 7 * slot + 1});
    for (const std::vector<int64_t>& lengths :
         std::vector<std::vector<int64_t>>{{1, 1, 1, 1}, {3, 3, 5, 5}, {2, 1, 1, 4}, {9, 2, 2, 2}}) {
      std::vector<int> next;
      std::vector<std::pair<int, int64_t>> counts;
      std::vector<float> expected;
      for (int slot : {2, 0, 3, 1}) {
        const int64_t position = generator->cache.lengths[slot], count = lengths[counts.size()];
        next.insert(next.end(), tokens.begin() + position, tokens.begin() + position + count);
        expected.insert(expected.end(), whole.begin() + position * C, whole.begin() + (position + count) * C);
        counts.push_back({slot, count});
      }
      gpt2_extend(*generator, next, counts);
      EXPECT_LE(relative_error(to_floats(generator->hidden_states(), expected.size()), expected), generation_tolerance);
    }
  }
}

TEST(LONG_ON_EMU(Generation), IsAFunctionOfSeedAndStep) {
  auto model = make_model(small_config(), 1, 16);
  init_weights(*model, 1);
  auto generator = make_generator(*model, 1, 16, 4);
  auto generate = [&](uint64_t seed, int64_t step) {
    std::vector<int> tokens = {3};
    gpt2_generate(*generator, tokens, 16, {}, seed, step);
    return tokens;
  };
  EXPECT_EQ(generate(1, 5).size(), 16u);
  EXPECT_EQ(generate(1, 5), generate(1, 5));
  EXPECT_NE(generate(1, 5), generate(1, 6));
  EXPECT_NE(generate(1, 5), generate(2, 5));
}

// A prompt is computed in two passes, and then one token at a time.
TEST(LONG_ON_EMU(Generation), HasThePonderOfEveryTokenThatItComputes) {
  ModelConfig config = small_config();
  config.wiring = parse_wiring("universal(1) act(0.3)");
  auto model = make_model(config, 1, 16);
  DoubleTensors params = random_parameters(config, 9);
  // Probabilities between 0.4 and 0.6, which differ from token to token, and after no cycle add up to about 0.7.
  for (double& x : params.at("halt.weight").data) x *= is_16_bit ? 50 : 1;
  set_weights(*model, params);
  auto generator = make_generator(*model, 1, 16, 4);
  std::vector<int> tokens = random_tokens(6, config.vocab_size, 77);
  const std::vector<float> ponder = gpt2_generate(*generator, tokens, 16, {}, 1, 5);
  gpt2_forward(*model, tokens.data(), {1, 15});
  const std::vector<float> whole = to_floats(model->sublayers.ponder, 15);
  ASSERT_EQ(ponder.size(), 15u) << "the last token is drawn, and not computed on";
  EXPECT_LE(relative_error(ponder, whole), generation_tolerance);
  EXPECT_GT(*std::max_element(whole.begin(), whole.end()), *std::min_element(whole.begin(), whole.end()) + 0.1f)
      << "tokens differ";
  auto plain_model = make_model(small_config(), 1, 16);
  init_weights(*plain_model, 1);
  EXPECT_TRUE(gpt2_generate(*make_generator(*plain_model, 1, 16, 4), tokens = {3}, 16, {}, 1, 5).empty());
}

// What a position further back needs is gone, but for its K/V: the plan has room for so many tokens only.
TEST(Generation, ComputesEachPositionOnce) {
  auto model = make_model(small_config(), 1, 16);
  init_weights(*model, 1);
  auto generator = make_generator(*model, 1, 16, 1);
  std::vector<int> tokens = {3};
  gpt2_generate(*generator, tokens, 16, {}, 1, 5);
  EXPECT_EQ(generator->cache.lengths[0], 15);  // the last token is drawn, and not computed on
  int computed = -1;
  copy_to_host(&computed, generator->acts.tokens, sizeof computed);
  EXPECT_EQ(computed, tokens[14]);
}

TEST(LONG_ON_EMU(Initialisation), HasGpt2sStandardDeviations) {
  ModelConfig config = small_config();
  config.channels = 128;
  auto model = make_model(config, 1, 8);
  init_weights(*model, 1);
  for (int i = 0; i < model->num_tensors(); i++) {
    const TensorSpec& tensor = model->tensor(i);
    std::vector<float> x(size_t(tensor.num_elements()));
    fetch_from(*model, model->master_memory)(i, x.data());
    double sum = 0, squares = 0;
    for (float v : x) sum += v, squares += double(v) * v;
    const double mean = sum / double(x.size()), deviation = std::sqrt(squares / double(x.size()) - mean * mean);
    const bool residual = tensor.name.find("c_proj.weight") != std::string::npos;
    if (tensor.shape.size() == 2)
      EXPECT_NEAR(deviation / (residual ? 0.02 / std::sqrt(12.0) : 0.02), 1, 0.03) << tensor.name;
    else EXPECT_EQ(deviation, 0) << tensor.name;
    EXPECT_NEAR(mean, tensor.shape.size() == 1 && tensor.name.find(".weight") != std::string::npos ? 1 : 0, 1e-3)
        << tensor.name;
  }
}

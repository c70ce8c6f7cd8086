// Attention within documents: one that is alone, what generation forgets, and how texts before a document do not change
// it.
#pragma once
#include <gtest/gtest.h>
#include "dev/test/long.h"
#include "dev/test/model/model.h"
#include "dev/test/values.h"

// The loss of each token of a row.
inline std::vector<float> losses_of_row(GPT2& model, const std::vector<int>& tokens, const std::vector<int>& targets) {
  const int64_t T = int64_t(tokens.size());
  gpt2_zero_loss(model);
  gpt2_forward(model, tokens.data(), {1, T});
  gpt2_loss(model, targets.data(), {1, T}, double(T));
  return to_floats(model.acts.losses, tokens.size());
}

// Where positions are relative, a document does not know where it stands.
TEST(LONG_ON_EMU(Documents), HaveTheLossesAloneThatTheyHavePacked) {
  const std::vector<int> lengths = {5, 1, 17, 40, 2, 8};
  for (const char* wiring : {"documents rope", "documents rope sla(2,3) gqa(2) window(11,SL)", "relative documents",
                             "documents rope strided(6) also(1,2)", "documents rope blend(0.4)"}) {
    SCOPED_TRACE(wiring);
    ModelConfig config = four_layers(wiring);
    config.max_seq_len = 73;
    auto model = make_model(config, 1, config.max_seq_len);
    set_weights(*model, random_parameters(config, 9));
    std::vector<int> tokens = random_tokens(73, 61, 3);
    for (int& token : tokens) token += token == config.end_of_text;
    int begin = 0;
    for (int length : lengths) tokens[size_t(begin)] = config.end_of_text, begin += length;
    std::vector<int> targets(tokens.begin() + 1, tokens.end());
    targets.push_back(0);
    const std::vector<float> packed = losses_of_row(*model, tokens, targets);
    begin = 0;
    for (int length : lengths) {
      auto part = [&](const auto& of_all) {
        return std::decay_t<decltype(of_all)>(of_all.begin() + begin, of_all.begin() + begin + length);
      };
      EXPECT_LE(relative_error(part(packed), losses_of_row(*model, part(tokens), part(targets))),
                is_16_bit ? 5e-3 * coarseness : 1e-6)
          << "a document of " << length;
      begin += length;
    }
  }
}

// What comes before a document changes nothing in it, though positions go on: in training, where a prompt is read, and
// where a text is drawn.
TEST(LONG_ON_EMU(Documents), ForgetWhatWasBeforeThem) {
  for (const char* wiring : {"documents sla(2,2)", "documents window(6,SL) fixed(5,2)", "documents relative"}) {
    SCOPED_TRACE(wiring);
    const ModelConfig config = four_layers(wiring);
    auto model = make_model(config, 1, 40);
    set_weights(*model, random_parameters(config, 9));
    std::unique_ptr<GPT2> generator;
    std::vector<int> tokens = random_tokens(40, 61, 3), others = random_tokens(40, 61, 4);
    for (int t : {4, 13, 30}) tokens[size_t(t)] = config.end_of_text;
    std::copy(tokens.begin() + 13, tokens.end(), others.begin() + 13);
    std::vector<std::vector<int64_t>> passes = {{9, 7}, {9, 11}, {9, 9}};  // of both slots, their next tokens
    passes.resize(16, {1, 1});
    std::vector<std::vector<float>> training, generation;
    for (const std::vector<int>& text : {tokens, others}) {
      gpt2_forward(*model, text.data(), {1, 40});
      training.push_back(to_floats(model->hidden_states(), 40 * 32));
      // Both texts in slot 0: what a matmul computes of a row may depend, by rounding, on where the row is.
      generator = make_generator(*model, 2, 40, /*rows=*/20);
      std::vector<float> drawn[2];
      for (const std::vector<int64_t>& counts : passes) {
        std::vector<int> parts;
        for (size_t i : {0, 1}) {
          const auto first = (i == 0 ? text : tokens).begin() + generator->cache.lengths[i];
          parts.insert(parts.end(), first, first + counts[i]);
        }
        gpt2_extend(*generator, parts, {{0, counts[0]}, {1, counts[1]}});
        const std::vector<float> rows = to_floats(generator->hidden_states(), parts.size() * 32);
        drawn[0].insert(drawn[0].end(), rows.begin(), rows.begin() + counts[0] * 32);
        drawn[1].insert(drawn[1].end(), rows.begin() + counts[0] * 32, rows.end());
      }
      EXPECT_LE(relative_error(drawn[0], training.back()), generation_tolerance);
      EXPECT_LE(relative_error(drawn[1], training[0]), generation_tolerance);
      generation.push_back(drawn[0]);
    }
    auto after = [](const std::vector<float>& x) { return std::vector<float>(x.begin() + 13 * 32, x.end()); };
    EXPECT_EQ(after(training[0]), after(training[1]));
    EXPECT_EQ(after(generation[0]), after(generation[1]));
    EXPECT_NE(training[0], training[1]);
    gpt2_read_prompt(*generator, 0, {5});  // of a slot that had a text with documents
    EXPECT_EQ(generator->cache.first_keys({{0, 0, 1}}, tokens.data(), config.end_of_text, 9)[0], 0);
  }
}

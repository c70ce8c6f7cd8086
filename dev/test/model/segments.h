// Streams that are read in segments, with a memory of earlier ones.
#pragma once
#include <gtest/gtest.h>
#include "dev/test/long.h"
#include "dev/test/model/model.h"
#include "dev/test/values.h"

inline ModelConfig with_segments(const std::string& wiring, int positions) {
  ModelConfig config = four_layers(wiring);
  config.max_seq_len = positions;
  return config;
}

// The hidden states of B streams of `length` tokens each, (B, length, C), that are read in segments of the context
// length.
inline std::vector<float> hidden_states_of_streams(const ModelConfig& config, const std::vector<int>& tokens, int B,
                                                   int recompute = 0) {
  const int T = config.max_seq_len, length = int(tokens.size()) / B, C = config.channels;
  auto model = make_model(config, B, T, recompute);
  set_weights(*model, random_parameters(config, 9));
  std::vector<float> hidden(size_t(B) * size_t(length) * size_t(C));
  for (int first = 0; first < length; first += T) {
    std::vector<int> inputs;
    for (int b = 0; b < B; b++) {
      const auto begin = tokens.begin() + b * length + first;
      inputs.insert(inputs.end(), begin, begin + T);
    }
    gpt2_forward_segments(*model, inputs.data(), B, T);
    const std::vector<float> rows = to_floats(model->hidden_states(), size_t(B * T * C));
    for (int b = 0; b < B; b++)
      std::copy_n(rows.begin() + long(b) * T * C, T * C, hidden.begin() + (long(b) * length + first) * C);
  }
  return hidden;
}

// With a window that the memory covers a query sees the same keys wherever the stream is cut, and the layers below have
// computed these alike.
TEST(LONG_ON_EMU(Segments), MayBeCutAnywhere) {
  for (const char* wiring : {"rope window(16) memory(16)", "rope memory(15) window(16) sla(1,2) gqa(2)",
                             "relative window(16) memory(16) sla(1,2)"}) {
    SCOPED_TRACE(wiring);
    const std::vector<int> tokens = random_tokens(2 * 192, 61, 5);
    const std::vector<float> by_64 = hidden_states_of_streams(with_segments(wiring, 64), tokens, 2);
    for (int T : {16, 12, 4})
      EXPECT_LE(relative_error(hidden_states_of_streams(with_segments(wiring, T), tokens, 2), by_64),
                generation_tolerance)
          << "segments of " << T;
  }
}

// A text that is five times as long as the context: read at once, in parts that cross the segments' ends, and token by
// token, with a cache that is shorter than the text.
TEST(LONG_ON_EMU(Segments), AreWhatGenerationComputes) {
  constexpr int T = 24, length = 5 * T, C = 32;
  for (const char* wiring :
       {"rope memory(24)", "rope memory(7) sla(1,2)", "rope memory(60) gqa(2) also(1,2)", "rope memory(10) window(11)",
        "rope memory(10) window(30,SL) share(2)", "relative memory(24) sla(1,2)", "relative memory(7) gqa(2) also(1,2)",
        "relative memory(60) window(11,SL)"}) {
    SCOPED_TRACE(wiring);
    const ModelConfig config = with_segments(wiring, T);
    const std::vector<int> tokens = random_tokens(length, 61, 6);
    const std::vector<float> whole = hidden_states_of_streams(config, tokens, 1);
    auto model = make_model(config, 1, T);
    set_weights(*model, random_parameters(config, 9));
    for (int rows : {1, 7, 50}) {
      auto generator = make_generator(*model, 2, length, std::max(2, rows));
      std::vector<float> pieces;
      for (int first = 0; first < length; first += rows) {
        const int count = std::min(rows, length - first);
        gpt2_extend(*generator, {tokens.begin() + first, tokens.begin() + first + count}, {{1, count}});
        for (float x : to_floats(generator->hidden_states(), size_t(count * C))) pieces.push_back(x);
      }
      EXPECT_LE(relative_error(pieces, whole), generation_tolerance) << rows << " at a time";
    }
  }
}

// The cache's memory does not depend on the text's length.
TEST(Segments, LetGenerationGoOnInConstantMemory) {
  for (const char* wiring : {"rope memory(24) sla(1,2)", "relative memory(24)"}) {
    auto bytes = [&](int64_t length) {
      GPT2 model;
      gpt2_declare_generation(model, with_segments(wiring, 24), generation_options(1, length));
      return model.memory_plan.total();
    };
    EXPECT_EQ(bytes(100'000), bytes(INT_MAX)) << wiring;
  }
}

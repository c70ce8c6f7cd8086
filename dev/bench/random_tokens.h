// Tokens for benchmarks: the same ones each time.
#pragma once
#include <cstdint>
#include <vector>
#include "llmc/base/random.h"

inline std::vector<int> random_tokens(int64_t n, int vocab_size) {
  std::vector<int> tokens(size_t(n), 0);
  for (size_t i = 0; i < tokens.size(); i++)
    tokens[i] = int(random_words(1, RandomStream::test, 0, i).word[0] % uint32_t(vocab_size));
  return tokens;
}

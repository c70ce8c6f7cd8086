// Random numbers as a pure function of (seed, stream, index), so that the same run draws the same numbers on any number
// of threads or ranks and after a resume. Philox4x32-10: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
// 3".
#pragma once
#include <cmath>
#include <cstdint>
#include "host_device.h"

// What the numbers are used for. It is part of the function's argument, so that no two uses share numbers.
enum class RandomStream : uint32_t {
  init = 1,
  shuffle = 2,
  sample = 3,
  test = 4,
  split = 5,
  probe = 6,
  dropout = 7,
  route = 8
};

struct Philox {
  uint32_t word[4];
};

// Philox4x32: 128 random bits of a 64-bit key and a 128-bit counter.
template <int rounds = 10>
SLA_HOST_DEVICE inline Philox philox(uint64_t seed, uint64_t counter_high, uint64_t counter_low) {
  Philox x = {
      {uint32_t(counter_low), uint32_t(counter_low >> 32), uint32_t(counter_high), uint32_t(counter_high >> 32)}};
  uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
  for (int round = 0; round < rounds; round++) {
    uint64_t a = 0xD2511F53ull * x.word[0], b = 0xCD9E8D57ull * x.word[2];
    x = {{uint32_t(b >> 32) ^ x.word[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ x.word[3] ^ key1, uint32_t(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return x;
}

// 128 random bits. `tag` separates the draws of one stream: a tensor, a step.
SLA_HOST_DEVICE inline Philox random_words(uint64_t seed, RandomStream stream, uint32_t tag, uint64_t index) {
  return philox(seed, uint64_t(stream) << 32 | tag, index);
}

// Uniform in [0, 1), 53 bits.
inline double random_uniform(uint64_t seed, RandomStream stream, uint32_t tag, uint64_t index) {
  Philox x = random_words(seed, stream, tag, index);
  return double((uint64_t(x.word[0]) << 32 | x.word[1]) >> 11) * 0x1p-53;
}

// Standard normal (Box-Muller).
inline double random_normal(uint64_t seed, RandomStream stream, uint32_t tag, uint64_t index) {
  Philox x = random_words(seed, stream, tag, index);
  double u = (double(x.word[0]) + 1.0) * 0x1p-32;  // in (0, 1]
  double v = double(x.word[1]) * 0x1p-32;
  return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * v);
}

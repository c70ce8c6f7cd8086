// Dropout of rows of channels: the operations of llmc/cpu/dropout.h.
#pragma once
#include <cstdint>
#include "llmc/ops/dropout.h"
#include "vec.h"

constexpr bool relative_attention_has_dropout = false;

static __global__ void __launch_bounds__(element_threads)
    set_dropout_keys_kernel(uint64_t* keys, int64_t B, uint64_t seed, int64_t update, int64_t first) {
  const int64_t b = int64_t(blockIdx.x) * element_threads + threadIdx.x;
  if (b < B) keys[b] = dropout_key(seed, update, first + b);
}

inline void set_dropout_keys(uint64_t* keys, int64_t B, uint64_t seed, int64_t update, int64_t first) {
  launch(set_dropout_keys_kernel, blocks_of(B, element_threads), element_threads, 0, keys, B, seed, update, first);
}

// A thread owns eight channels of a row, which are one call of Philox.
static __global__ void __launch_bounds__(element_threads)
    drop_elements_kernel(floatX* out, const floatX* x, Dropout d, int64_t N, int64_t T, int64_t C) {
  const int64_t i = first_element(), n = i / C;
  if (n >= N) return;
  const Philox bits = channel_bits(d, n / T, n % T, i % C / 8);
  float values[8];
  load8(values, x + i);
  for (int j = 0; j < 8; j++) values[j] = element_bits(bits, j) < d.threshold ? 0.0f : values[j] * d.scale;
  store8(out + i, values);
}

inline void drop_elements(floatX* out, const floatX* x, const Dropout& d, int64_t B, int64_t T, int64_t C) {
  CHECK(C % 8 == 0);
  launch_elements(drop_elements_kernel, B * T * C, out, x, d, B * T, T, C);
}

// Dropout of rows of channels (llmc/ops/dropout.h).
//
//   set_dropout_keys:  keys (B) = dropout_key of the sequences from number `first` on in the update
//   drop_elements:     out (B, T, C) =, which may be x
#pragma once
#include <algorithm>
#include <cstdint>
#include "llmc/ops/dropout.h"
#include "llmc/ops/precision.h"
#include "threads.h"
#include "vec.h"

constexpr bool relative_attention_has_dropout = true;

inline void set_dropout_keys(uint64_t* keys, int64_t B, uint64_t seed, int64_t update, int64_t first) {
  for (int64_t b = 0; b < B; b++) keys[b] = dropout_key(seed, update, first + b);
}

inline void drop_elements(floatX* out, const floatX* x, const Dropout& d, int64_t B, int64_t T, int64_t C) {
#pragma omp parallel for schedule(static) if (is_worth_threads(8 * int64_t(sizeof(floatX)) * B * T * C))
  for (int64_t n = 0; n < B * T; n++)
    for (int64_t group = 0; 8 * group < C; group++) {
      const Philox bits = channel_bits(d, n / T, n % T, group);
      const int64_t first = n * C + 8 * group, count = std::min<int64_t>(8, C - 8 * group);
      for (int i = 0; i < count; i++)
        from_float(out[first + i], element_bits(bits, i) < d.threshold ? 0.0f : to_float(x[first + i]) * d.scale);
    }
}

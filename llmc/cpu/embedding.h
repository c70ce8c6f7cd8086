// Token and position embeddings.
#pragma once
#include <algorithm>
#include <cstdint>
#include "llmc/ops/rows.h"
#include "threads.h"
#include "vec.h"

// out (N, C) = wte[tokens (N)] + wpe[positions (N)]; without the second term if wpe is null.
inline void embedding_forward(floatX* out, const int* tokens, const RowPositions& positions, const floatX* wte,
                              const floatX* wpe, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static) if (is_worth_threads(3 * int64_t(sizeof(floatX)) * N * C))
  for (int64_t n = 0; n < N; n++) {
    const floatX* token = wte + tokens[n] * C;
    floatX* row = out + n * C;
    if (wpe == nullptr) {
      std::copy_n(token, C, row);
      continue;
    }
    const floatX* position = wpe + positions[n] * C;
#pragma omp simd
    for (int64_t i = 0; i < C; i++) from_float(row[i], to_float(token[i]) + to_float(position[i]));
  }
}

// out (N, C) = x (N, C) + wse (C) + wpe[positions (N)]; without the last term if wpe is null. x may be out.
inline void add_coordinates(floatX* out, const floatX* x, const floatX* wse, const floatX* wpe,
                            const RowPositions& positions, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static) if (is_worth_threads(3 * int64_t(sizeof(floatX)) * N * C))
  for (int64_t n = 0; n < N; n++) {
    const floatX* position = wpe != nullptr ? wpe + positions[n] * C : nullptr;
#pragma omp simd
    for (int64_t i = 0; i < C; i++)
      from_float(out[n * C + i],
                 to_float(x[n * C + i]) + to_float(wse[i]) + (position != nullptr ? to_float(position[i]) : 0.0f));
  }
}

// dwpe[t] += dout (B, T, C). A thread owns positions.
inline void position_backward(float* dwpe, const floatX* dout, int64_t B, int64_t T, int64_t C) {
#pragma omp parallel for schedule(static) if (is_worth_threads((8 + int64_t(sizeof(floatX))) * B * T * C))
  for (int64_t t = 0; t < T; t++)
    for (int64_t b = 0; b < B; b++) {
      const floatX* row = dout + (b * T + t) * C;
      float* position = dwpe + t * C;
#pragma omp simd
      for (int64_t i = 0; i < C; i++) position[i] += to_float(row[i]);
    }
}

// dwte[tokens] += dout (B, T, C); dwpe[t] += dout, unless dwpe is null. A thread owns channels: tokens repeat, so rows
// of dwte have no other owner.
inline void embedding_backward(float* dwte, float* dwpe, const floatX* dout, const int* tokens, int64_t B, int64_t T,
                               int64_t C) {
  const int64_t width = 64;
  if (dwpe != nullptr) position_backward(dwpe, dout, B, T, C);
#pragma omp parallel for schedule(static) if (is_worth_threads((8 + int64_t(sizeof(floatX))) * B * T * C))
  for (int64_t first = 0; first < C; first += width) {
    const int64_t last = std::min(C, first + width);
    for (int64_t n = 0; n < B * T; n++) {
      const floatX* row = dout + n * C;
      float* token = dwte + tokens[n] * C;
#pragma omp simd
      for (int64_t i = first; i < last; i++) token[i] += to_float(row[i]);
    }
  }
}

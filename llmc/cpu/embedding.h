// Token and position embeddings.
#pragma once
#include <algorithm>  // std::min
#include <cstdint>    // int64_t
#include "threads.h"  // is_worth_threads

// out (B, T, C) = wte[tokens (B, T)] + wpe[first_position + t]
inline void embedding_forward(float* out, const int* tokens, const float* wte, const float* wpe, int64_t B, int64_t T,
                              int64_t C, int64_t first_position) {
#pragma omp parallel for collapse(2) schedule(static) if (is_worth_threads(12 * B * T * C))
  for (int64_t b = 0; b < B; b++) {
    for (int64_t t = 0; t < T; t++) {
      const float* token = wte + tokens[b * T + t] * C;
      const float* position = wpe + (first_position + t) * C;
      float* row = out + (b * T + t) * C;
#pragma omp simd
      for (int64_t i = 0; i < C; i++) row[i] = token[i] + position[i];
    }
  }
}

// dwte[tokens] += dout (B, T, C); dwpe[t] += dout. A thread owns channels: tokens repeat, so rows of dwte have no other owner.
inline void embedding_backward(float* dwte, float* dwpe, const float* dout, const int* tokens, int64_t B, int64_t T,
                               int64_t C) {
  const int64_t width = 64;
#pragma omp parallel for schedule(static) if (is_worth_threads(20 * B * T * C))
  for (int64_t first = 0; first < C; first += width) {
    const int64_t last = std::min(C, first + width);
    for (int64_t b = 0; b < B; b++) {
      for (int64_t t = 0; t < T; t++) {
        const float* row = dout + (b * T + t) * C;
        float* token = dwte + tokens[b * T + t] * C;
        float* position = dwpe + t * C;
#pragma omp simd
        for (int64_t i = first; i < last; i++) {
          token[i] += row[i];
          position[i] += row[i];
        }
      }
    }
  }
}

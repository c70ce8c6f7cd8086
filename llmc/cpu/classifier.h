// Softmax and cross-entropy over the vocabulary, for a chunk of rows.
#pragma once
#include <algorithm>  // std::fill
#include <cmath>      // log
#include <cstdint>    // int64_t
#include "threads.h"  // is_worth_threads
#include "vec.h"      // vec_exp

// What a chunk of logits may take, in bytes: 333 rows of GPT-2's vocabulary.
inline int64_t logit_chunk_bytes() { return 64 << 20; }
constexpr int64_t logit_row_multiple = 1;

// sum (1) += the sum of losses (count) / divisor, in double.
inline void add_losses(double* sum, const float* losses, int64_t count, double divisor) {
  double total = 0;
  for (int64_t i = 0; i < count; i++) total += double(losses[i]);
  *sum += total / divisor;
}

// losses (rows) = logsumexp(logits) - logits[target], in nats, for logits (rows, ld) of which the columns [0, V) are the
// vocabulary. With `write_gradient` the logits become their gradient, (softmax(logits) - onehot(target)) * dloss, and 0 in the columns
// [V, ld).
inline void classifier(float* losses, float* logits, const int* targets, int64_t rows, int64_t V, int64_t ld, float dloss,
                       bool write_gradient) {
#pragma omp parallel for schedule(static) if (is_worth_threads(8 * rows * V))
  for (int64_t n = 0; n < rows; n++) {
    float* row = logits + n * ld;
    float max = row[0];
#pragma omp simd reduction(max : max)
    for (int64_t i = 0; i < V; i++) max = row[i] > max ? row[i] : max;
    const float target_logit = row[targets[n]];
    float sum = 0;
    if (write_gradient) {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < V; i++) {
        float e = vec_exp(row[i] - max);
        row[i] = e;
        sum += e;
      }
      const float scale = dloss / sum;
#pragma omp simd
      for (int64_t i = 0; i < V; i++) row[i] *= scale;
      row[targets[n]] -= dloss;
      std::fill(row + V, row + ld, 0.0f);
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < V; i++) sum += vec_exp(row[i] - max);
    }
    losses[n] = std::log(sum) + (max - target_logit);
  }
}

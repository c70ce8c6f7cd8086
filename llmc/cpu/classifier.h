// Softmax and cross-entropy over the vocabulary, for a chunk of rows.
#pragma once
#include <algorithm>  // std::fill
#include <cmath>      // log
#include <cstdint>    // int64_t
#include <vector>     // std::vector
#include "threads.h"  // is_worth_threads
#include "vec.h"      // vec_exp, to_float, from_float

// What a chunk of logits may take, in bytes: 333 rows of GPT-2's vocabulary.
inline int64_t logit_chunk_bytes() { return 64 << 20; }
constexpr int64_t logit_row_multiple = 1;

// sum (1) += the sum of losses (count) / divisor, in double.
inline void add_losses(double* sum, const float* losses, int64_t count, double divisor) {
  double total = 0;
  for (int64_t i = 0; i < count; i++) total += double(losses[i]);
  *sum += total / divisor;
}

// The memory in which a thread keeps the exponentials of a row of n logits: the row itself if it is float, else memory
// of the thread's own.
inline float* exponentials_of(float* row, int64_t) { return row; }
inline float* exponentials_of(bfloat16*, int64_t n) {
  thread_local std::vector<float> exponentials;
  exponentials.resize(size_t(n));
  return exponentials.data();
}

// losses (rows) = logsumexp(logits) - logits[target], in nats, for logits (rows, ld) of which the columns [0, V) are
// the vocabulary. With `write_gradient` the logits become their gradient, (softmax(logits) - onehot(target)) * dloss,
// and 0 in the columns [V, ld).
inline void classifier(float* losses, floatX* logits, const int* targets, int64_t rows, int64_t V, int64_t ld,
                       float dloss, bool write_gradient) {
#pragma omp parallel for schedule(static) if (is_worth_threads(2 * int64_t(sizeof(floatX)) * rows * V))
  for (int64_t n = 0; n < rows; n++) {
    floatX* row = logits + n * ld;
    float max = to_float(row[0]);
#pragma omp simd reduction(max : max)
    for (int64_t i = 0; i < V; i++) max = to_float(row[i]) > max ? to_float(row[i]) : max;
    const float target_logit = to_float(row[targets[n]]);
    float sum = 0;
    if (write_gradient) {
      float* exponentials = exponentials_of(row, V);
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < V; i++) {
        const float e = vec_exp(to_float(row[i]) - max);
        exponentials[i] = e;
        sum += e;
      }
      const float scale = dloss / sum;
#pragma omp simd
      for (int64_t i = 0; i < V; i++) {
        exponentials[i] *= scale;
        from_float(row[i], exponentials[i]);
      }
      from_float(row[targets[n]], exponentials[targets[n]] - dloss);
      std::fill(row + V, row + ld, floatX(0.0f));
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < V; i++) sum += vec_exp(to_float(row[i]) - max);
    }
    losses[n] = std::log(sum) + (max - target_logit);
  }
}

// Softmax and cross-entropy over the vocabulary, for a chunk of rows.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>
#include "llmc/ops/step_stats.h"
#include "llmc/ops/classifier_args.h"
#include "llmc/ops/not_scored.h"
#include "threads.h"
#include "vec.h"

// What a chunk of logits may take, in bytes: 333 rows of GPT-2's vocabulary.
inline int64_t logit_chunk_bytes() { return 64 << 20; }
constexpr int64_t logit_row_multiple = 1;

// stats (1) += what the rows have of loss, ponder, scored, tokens and correct. Sums are in double.
inline void add_losses(StepStats* stats, const LossRows& r) {
  double loss = 0, ponder = 0;
  for (int64_t i = 0; i < r.count; i++) {
    if (r.targets[i] == not_scored) continue;
    loss += double(r.losses[i]), stats->scored++;
    if (r.ponder != nullptr) ponder += double(r.ponder[i]);
    if (r.correct != nullptr) stats->correct += r.correct[i];
  }
  stats->loss += loss / r.divisor, stats->ponder += ponder / r.divisor, stats->tokens += double(r.count);
}

// The memory in which a thread keeps the exponentials of a row of n logits: the row itself if it is float, else memory
// of the thread's own.
inline float* exponentials_of(float* row, int64_t) { return row; }
inline float* exponentials_of(bfloat16*, int64_t n) {
  thread_local std::vector<float> exponentials;
  exponentials.resize(size_t(n));
  return exponentials.data();
}

// Whether no other of the V logits is larger than the target's, and none before it as large.
inline bool is_first_of_the_largest(const floatX* row, int target, int64_t V) {
  const float logit = to_float(row[target]);
  bool is_beaten = false;
#pragma omp simd reduction(|| : is_beaten)
  for (int64_t i = 0; i < V; i++) is_beaten = is_beaten || to_float(row[i]) > logit;
  for (int i = 0; i < target && !is_beaten; i++) is_beaten = to_float(row[i]) == logit;
  return !is_beaten;
}

// losses and correct = as ClassifierArgs says. With `write_gradient` the logits become their gradient,
// (softmax(logits) - onehot(target)) * dloss, and 0 in the columns [V, ld) and where the target is not scored.
inline void classifier(const ClassifierArgs& args) {
  const int* targets = args.targets;
  const int64_t rows = args.rows, V = args.V, ld = args.ld;
  const float dloss = args.dloss;
#pragma omp parallel for schedule(static) if (is_worth_threads(2 * int64_t(sizeof(floatX)) * rows * V))
  for (int64_t n = 0; n < rows; n++) {
    floatX* row = args.logits + n * ld;
    if (args.correct != nullptr)
      args.correct[n] = targets[n] != not_scored && is_first_of_the_largest(row, targets[n], V);
    if (targets[n] == not_scored) {
      args.losses[n] = 0;
      if (args.write_gradient) std::fill(row, row + ld, floatX(0.0f));
      continue;
    }
    float max = to_float(row[0]);
#pragma omp simd reduction(max : max)
    for (int64_t i = 0; i < V; i++) max = to_float(row[i]) > max ? to_float(row[i]) : max;
    const float target_logit = to_float(row[targets[n]]);
    float sum = 0;
    if (args.write_gradient) {
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
    args.losses[n] = std::log(sum) + (max - target_logit);
  }
}

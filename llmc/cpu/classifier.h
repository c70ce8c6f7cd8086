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

// logits (n) = cap tanh(logits / cap)
inline void cap_logits(floatX* logits, int64_t n, float cap) {
#pragma omp parallel for simd schedule(static) if (parallel : is_worth_threads(2 * int64_t(sizeof(floatX)) * n))
  for (int64_t i = 0; i < n; i++) from_float(logits[i], cap * vec_tanh(to_float(logits[i]) / cap));
}

// losses and correct = as ClassifierArgs says. With `write_gradient` the logits become their gradient,
// (softmax(logits) - onehot(target)) * dloss, and 0 in the columns [V, ld) and where the target is not scored. With a
// cap the softmax is taken of the capped logits, and the gradient is multiplied by the cap's slope. `correct` compares
// logits before they are capped.
template <bool capped>
void classifier_of(const ClassifierArgs& args) {
  const int* targets = args.targets;
  const int64_t rows = args.rows, V = args.V, ld = args.ld;
  const float dloss = args.dloss, cap = args.cap, over_cap = 1.0f / cap;
  const auto slope = [=](float logit) { return capped ? 1.0f - (logit * over_cap) * (logit * over_cap) : 1.0f; };
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
    thread_local std::vector<float> capped_row;  // of one row, which stays in the cache
    if (capped) {
      capped_row.resize(size_t(V));
#pragma omp simd
      for (int64_t i = 0; i < V; i++) capped_row[i] = cap * vec_tanh(to_float(row[i]) * over_cap);
    }
    const float* capped_logits = capped_row.data();
    const auto logit = [=](int64_t i) { return capped ? capped_logits[i] : to_float(row[i]); };
    float max = logit(0);
#pragma omp simd reduction(max : max)
    for (int64_t i = 0; i < V; i++) max = logit(i) > max ? logit(i) : max;
    const float target_logit = logit(targets[n]);
    float sum = 0;
    if (args.write_gradient) {
      float* exponentials = exponentials_of(row, V);
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < V; i++) {
        const float e = vec_exp(logit(i) - max);
        exponentials[i] = e;
        sum += e;
      }
      const float scale = dloss / sum;
#pragma omp simd
      for (int64_t i = 0; i < V; i++) {
        exponentials[i] *= capped ? scale * slope(capped_logits[i]) : scale;
        from_float(row[i], exponentials[i]);
      }
      from_float(row[targets[n]], exponentials[targets[n]] - dloss * slope(target_logit));
      std::fill(row + V, row + ld, floatX(0.0f));
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < V; i++) sum += vec_exp(logit(i) - max);
    }
    args.losses[n] = std::log(sum) + (max - target_logit);
  }
}

inline void classifier(const ClassifierArgs& args) {
  args.cap > 0 ? classifier_of<true>(args) : classifier_of<false>(args);
}

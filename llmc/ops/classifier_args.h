// What the classifier and the sums of its losses take, on each kind of device.
#pragma once
#include <cstdint>
#include "llmc/ops/not_scored.h"
#include "llmc/ops/precision.h"
#include "llmc/ops/step_stats.h"

// A chunk of rows of logits, (rows, ld): columns [0, V) are the vocabulary. 0 <= target < V, or not_scored. With a cap
// c the loss is computed from c tanh(logits / c), and the gradient is with respect to the logits themselves.
struct ClassifierArgs {
  float* losses;       // (rows) = logsumexp(logits) - logits[target], in nats; 0 where the target is not scored
  floatX* logits;      // with write_gradient they become their gradient, else they are left as they are
  const int* targets;  // (rows)
  int64_t rows, V, ld;
  float dloss;  // in the gradient: what the loss of a token weighs
  bool write_gradient;
  // (rows) = the target is scored, and the first of the largest logits. Null: not wanted, as with write_gradient.
  uint8_t* correct = nullptr;
  float cap = 0;                  // c; 0: none
  LossScaleView loss_scale = {};  // dloss is multiplied by it
};

// What `count` positions add to a step's sums.
struct LossRows {
  const float* losses;     // (count)
  const float* ponder;     // (count): N + R of each position, or null
  const uint8_t* correct;  // (count), or null
  const int* targets;      // (count)
  int64_t count;
  double divisor;  // of the sums of `losses` and `ponder`
};

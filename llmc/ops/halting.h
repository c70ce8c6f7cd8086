// Adaptive computation time (Graves 2016; llmc/wiring/terms/act.h), the same for every device. After each cycle of
// layers a token halts with probability p. It runs until the first cycle, N, after which the probabilities add up to
// `threshold`, or until the last one. What follows the cycles gets the weighted sum of the tokens' states after each of
// them: cycles before N have their p as weight, N has what is left, R = 1 - the sum of these p.
// All cycles are computed for all tokens: once a token has halted, its later states have weight 0.
#pragma once
#include <cstdint>
#include "llmc/ops/attention_mask.h"
#include "llmc/ops/not_scored.h"
#include "llmc/ops/precision.h"
#include "llmc/ops/step_stats.h"

struct HaltingWeights {
  const float* p = nullptr;  // (cycles - 1, rows): of the last cycle none is needed
  int64_t stride = 0;        // from one cycle's p to the next one's
  int cycles = 0;
  float threshold = 0;  // 1 - eps

  // A token at the end of a cycle: whether it continues, halts, or has halted before; and the cycle's weight.
  enum class State { runs, halts, has_halted };
  struct AtEnd {
    State state;
    float weight;
  };
  // Looks at the p of this cycle and of those before it alone. Cycles count from 0.
  SLA_HOST_DEVICE AtEnd at_end(int cycle, int64_t row) const {
    float before = 0;  // the sum of p
    for (int c = 0; c < cycle; c++) {
      before += p[c * stride + row];
      if (before >= threshold) return {State::has_halted, 0};
    }
    if (cycle + 1 == cycles) return {State::halts, 1 - before};
    const float own = p[cycle * stride + row];
    if (before + own >= threshold) return {State::halts, 1 - before};
    return {State::runs, own};
  }
};

struct HaltingForward {
  float* sum = nullptr;       // (N, C) = in the first cycle, += in others; not used in the last
  floatX* out = nullptr;      // (N, C) = the whole sum, in the last cycle
  float* ponder = nullptr;    // (N) = N + R of the tokens that halt in this cycle, where N counts from 1
  const floatX* x = nullptr;  // (N, C): the residual stream after this cycle
  HaltingWeights weights;
  int cycle = 0;
  int64_t N = 0, C = 0;
};

// Cycles are walked from the last to the first.
struct HaltingBackward {
  floatX* dx = nullptr;         // (N, C) = in the last cycle, += in others
  float* dp = nullptr;          // (N) = the gradient of this cycle's p; not written in the last, which has none
  float* dremainder = nullptr;  // (N) = R's gradient for tokens that halt in this cycle; for others it is read
  floatX* dout = nullptr;       // (N, C): the gradient of the weighted sum, which is not written to
  const floatX* x = nullptr;    // (N, C)
  // The gradient of N + R, in which N is a constant, of each token whose target is scored. Others ponder at no cost, so
  // that what is minimised is a mean over the same tokens as the loss.
  float dponder = 0;
  const int* targets = nullptr;  // (N)
  HaltingWeights weights;
  int cycle = 0;
  int64_t N = 0, C = 0;
  LossScaleView loss_scale = {};  // dponder is multiplied by it
};

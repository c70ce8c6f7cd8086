// Weighted sums of the residual stream after each cycle of layers, with weights by which tokens halt (`act`;
// llmc/ops/halting.h says what is = and what is +=).
#pragma once
#include <cstdint>
#include "llmc/ops/halting.h"
#include "threads.h"
#include "vec.h"

inline void halting_forward(const HaltingForward& h) {
  const bool first = h.cycle == 0, last = h.cycle + 1 == h.weights.cycles;
#pragma omp parallel for schedule(static) if (is_worth_threads(h.N * h.C * 8))
  for (int64_t n = 0; n < h.N; n++) {
    const auto [state, weight] = h.weights.at_end(h.cycle, n);
    if (state == HaltingWeights::State::halts) h.ponder[n] = float(h.cycle + 1) + weight;
    for (int64_t i = n * h.C; i < (n + 1) * h.C; i++) {
      const float x = (first ? 0.0f : h.sum[i]) + weight * to_float(h.x[i]);
      if (last) from_float(h.out[i], x);
      else h.sum[i] = x;
    }
  }
}

inline void halting_backward(const HaltingBackward& h) {
  using State = HaltingWeights::State;
  const bool last = h.cycle + 1 == h.weights.cycles;
#pragma omp parallel for schedule(static) if (is_worth_threads(h.N * h.C * 12))
  for (int64_t n = 0; n < h.N; n++) {
    const HaltingWeights::AtEnd end = h.weights.at_end(h.cycle, n);
    double dweight = 0;  // p's gradient is the difference of two of these
#pragma omp simd reduction(+ : dweight)
    for (int64_t i = n * h.C; i < (n + 1) * h.C; i++) {
      const float d = to_float(h.dout[i]);
      dweight += double(d) * to_float(h.x[i]);
      from_float(h.dx[i], (last ? 0.0f : to_float(h.dx[i])) + end.weight * d);
    }
    if (end.state == State::halts) h.dremainder[n] = float(dweight + (h.targets[n] == not_scored ? 0.0f : h.dponder));
    if (!last) h.dp[n] = end.state == State::runs ? float(dweight - h.dremainder[n]) : 0.0f;
  }
}

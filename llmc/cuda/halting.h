// Weighted sums of the residual stream after each cycle of layers, with weights by which tokens halt (`act`;
// llmc/ops/halting.h says what is = and what is +=). Memory bounds them.
//
// C is a multiple of 8, and rows are 16-byte aligned.
#pragma once
#include <cstdint>
#include "llmc/ops/halting.h"
#include "token_gate.h"
#include "vec.h"

// A warp owns a row, a lane eight of its channels at a time.
__global__ void __launch_bounds__(token_threads) halting_forward_kernel(HaltingForward h) {
  const int64_t row = warp_row();
  const int lane = int(threadIdx.x) % warp_size;
  if (row >= h.N) return;
  const bool first = h.cycle == 0, last = h.cycle + 1 == h.weights.cycles;
  const HaltingWeights::AtEnd end = h.weights.at_end(h.cycle, row);
  if (lane == 0 && end.state == HaltingWeights::State::halts) h.ponder[row] = float(h.cycle + 1) + end.weight;
  for (int64_t i = row * h.C + lane * 8; i < (row + 1) * h.C; i += warp_size * 8) {
    float x[8], y[8] = {};
    load8(x, h.x + i);
    if (!first) load8(y, h.sum + i);
    for (int j = 0; j < 8; j++) y[j] += end.weight * x[j];
    if (last) store8(h.out + i, y);
    else store8(h.sum + i, y);
  }
}

// A warp owns a row, a lane eight of its channels at a time.
__global__ void __launch_bounds__(token_threads) halting_backward_kernel(HaltingBackward h) {
  using State = HaltingWeights::State;
  const int64_t row = warp_row();
  const int lane = int(threadIdx.x) % warp_size;
  if (row >= h.N) return;
  const bool last = h.cycle + 1 == h.weights.cycles;
  const HaltingWeights::AtEnd end = h.weights.at_end(h.cycle, row);
  double dweight = 0;  // p's gradient is the difference of two of these
  for (int64_t i = row * h.C + lane * 8; i < (row + 1) * h.C; i += warp_size * 8) {
    float d[8], x[8], sum[8] = {};
    load8(d, h.dout + i);
    load8(x, h.x + i);
    if (!last) load8(sum, h.dx + i);
    for (int j = 0; j < 8; j++) dweight += double(d[j]) * x[j], sum[j] += end.weight * d[j];
    store8(h.dx + i, sum);
  }
  dweight = warp_sum(dweight);
  if (lane != 0) return;
  h.dponder = h.loss_scale.times(h.dponder);
  if (end.state == State::halts) h.dremainder[row] = float(dweight + (h.targets[row] == not_scored ? 0.0f : h.dponder));
  if (!last) h.dp[row] = end.state == State::runs ? float(dweight - h.dremainder[row]) : 0.0f;
}

inline void halting_forward(const HaltingForward& h) {
  launch(halting_forward_kernel, warp_row_grid(h.N), token_threads, 0, h);
}

inline void halting_backward(const HaltingBackward& h) {
  launch(halting_backward_kernel, warp_row_grid(h.N), token_threads, 0, h);
}

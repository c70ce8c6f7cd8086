// What the residual stream gets before each cycle of layers that repeat (terms/universal.h): + wse[c] and, with
// learned positions, + wpe[position].
#pragma once
#include <cstdint>
#include "llmc/model/binding.h"

struct CycleStart {
  int64_t C = 0;
  const floatX* in = nullptr;                   // (N, C): what they are added to,
  floatX* out = nullptr;                        // (N, C): and the sum, which may take its place
  const floatX* dout = nullptr;                 // (N, C): the gradient of the stream, and so of out
  const floatX *wse = nullptr, *wpe = nullptr;  // (C): the cycle's row; (max_seq_len, C) or null
  float *dwse = nullptr, *dwpe = nullptr;
};

// The start of cycle `cycle`, without `in` and `out`. In generation `grads` has null pointers.
inline CycleStart bind_cycle_start(int cycle, int64_t C, const Params<floatX>& params, const Params<float>& grads,
                                   const Activations& acts) {
  CycleStart start;
  start.C = C, start.dout = acts.dresidual;
  start.wse = params.wse + cycle * C, start.wpe = params.wpe, start.dwpe = grads.wpe;
  if (grads.wse != nullptr) start.dwse = grads.wse + cycle * C;
  return start;
}

// out (N, C) = in + the coordinates.
inline void cycle_start_forward(const CycleStart& start, const Batch& batch) {
  add_coordinates(start.out, start.in, start.wse, start.wpe, batch.positions(), batch.rows(), start.C);
}

// The gradients of wse's row and of wpe +=.
inline void cycle_start_backward(const CycleStart& start, const Batch& batch) {
  bias_backward(start.dwse, start.dout, batch.rows(), start.C);
  if (start.wpe != nullptr) position_backward(start.dwpe, start.dout, batch.B, batch.T, start.C);
}

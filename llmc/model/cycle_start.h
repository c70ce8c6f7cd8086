// What the residual stream gets before each cycle of layers that repeat (`universal` in wiring.h): + wse[c] and, with
// learned positions, + wpe[position].
#pragma once
#include <cstdint>            // int64_t
#include "batch.h"            // Batch
#include "llmc/operations.h"  // add_coordinates, bias_backward, position_backward
#include "llmc/precision.h"   // floatX
#include "activations.h"      // Activations
#include "parameters.h"       // Params

struct CycleStart {
  int64_t C = 0;
  floatX* x = nullptr;                          // (N, C): what they are added to, on its way into the stream
  const floatX* dx = nullptr;                   // (N, C): the gradient of the stream
  const floatX *wse = nullptr, *wpe = nullptr;  // (C): the cycle's row; (max_seq_len, C) or null
  float *dwse = nullptr, *dwpe = nullptr;
};

// The start of cycle `cycle`, which is added to x. In generation `grads` has null pointers.
inline CycleStart plan_cycle_start(int cycle, int64_t C, floatX* x, const Params<floatX>& params,
                                   const Params<float>& grads, const Activations& acts) {
  CycleStart start = {C, x, acts.dresidual, params.wse + cycle * C, params.wpe, nullptr, grads.wpe};
  if (grads.wse != nullptr) start.dwse = grads.wse + cycle * C;
  return start;
}

// x (N, C) +=.
inline void cycle_start_forward(const CycleStart& start, const Batch& batch) {
  add_coordinates(start.x, start.wse, start.wpe, batch.positions(), batch.rows(), start.C);
}

// The gradients of wse's row and of wpe +=.
inline void cycle_start_backward(const CycleStart& start, const Batch& batch) {
  bias_backward(start.dwse, start.dx, batch.rows(), start.C);
  if (start.wpe != nullptr) position_backward(start.dwpe, start.dx, batch.B, batch.T, start.C);
}

// What a cycle of layers that repeat ends with where tokens halt (terms/act.h): the probability with which each
// halts now, and this cycle's term of the sum that the final LayerNorm gets.
#pragma once
#include <cstdint>
#include "llmc/model/binding.h"
#include "llmc/ops/halting.h"

struct CycleEnd {
  int cycle = 0, cycles = 0;
  int64_t C = 0;
  const floatX* in = nullptr;               // (N, C): the residual stream after the cycle
  floatX* out = nullptr;                    // (N, C): what the next cycle begins with, or after the last the sum
  floatX* din = nullptr;                    // (N, C): the gradient of the stream, here and in the next cycle
  const floatX *w = nullptr, *b = nullptr;  // (C), (1) or null
  float *dw = nullptr, *db = nullptr;
  float* halting = nullptr;  // (cycles, N): with which probability a token halts; of the last cycle not used
  float* p = nullptr;        // (N): of this cycle
  HaltingForward forward;
  HaltingBackward backward;
  float ponder_cost = 0;

  bool is_last() const { return cycle + 1 == cycles; }
};

// The end of cycle `cycle` of `cycles`.
inline CycleEnd make_cycle_end(int cycle, int cycles, int64_t C) {
  CycleEnd end;
  end.cycle = cycle, end.cycles = cycles, end.C = C;
  return end;
}

inline void declare(CycleEnd& end, ActivationList& list) {
  const int64_t N = list.shape.rows, C = end.C;
  constexpr MemoryGroup backward = MemoryGroup::backward;
  list.of_sublayer(Recompute::above_all_levels, "cycle_end", end.out, {N, C});
  list.in_buffer({"halting"}, end.halting, {end.cycles, N});
  list.in_buffer({"halting_sum"}, end.forward.sum, {N, C});
  list.in_buffer({"ponder"}, end.forward.ponder, {N});
  if (!list.shape.training) return;
  list.in_buffer({"dhalted", backward}, end.backward.dout, {N, C});
  list.in_buffer({"dhalting", backward}, end.backward.dp, {N});
  list.in_buffer({"dremainder", backward}, end.backward.dremainder, {N});
}

// Sets the pointers. `in`: the residual stream after the cycle. Returns what the next sublayer gets. In generation
// `grads` has null pointers.
inline const floatX* bind_cycle_end(CycleEnd& end, const floatX* in, const ModelShape& shape,
                                    const Params<floatX>& params, const Params<float>& grads, const Activations& acts) {
  const WiringTable& table = shape.attention_plan.table;
  const HaltingWeights weights = {end.halting, shape.rows, end.cycles, float(1 - table.halting)};
  end.in = in, end.din = acts.dresidual, end.ponder_cost = float(table.ponder_cost);
  end.p = end.halting + end.cycle * shape.rows;
  end.w = params.haltw, end.b = params.haltb, end.dw = grads.haltw, end.db = grads.haltb;
  HaltingForward& f = end.forward;
  f.out = end.out, f.x = in, f.weights = weights, f.cycle = end.cycle, f.C = end.C;
  HaltingBackward& b = end.backward;
  b.dx = acts.dresidual, b.targets = acts.targets, b.loss_scale = LossScaleView(acts.stats);
  b.x = in, b.weights = weights, b.cycle = end.cycle, b.C = end.C;
  return end.out;
}

// out (N, C) =, and this cycle's p, of `in`.
inline void cycle_end_forward(const CycleEnd& end, const Batch& batch) {
  HaltingForward args = end.forward;
  args.N = batch.rows();
  if (!end.is_last()) token_gate_forward(end.p, end.in, end.w, end.b, args.N, end.C);
  halting_forward(args);
}

// Takes the gradient of the weighted sum: din (N, C) becomes the gradient of `in`, and the parameters' gradients +=.
// After the last cycle the stream has no other gradient.
inline void cycle_end_backward(const CycleEnd& end, const Batch& batch) {
  HaltingBackward args = end.backward;
  args.N = batch.rows(), args.dponder = end.ponder_cost * batch.dloss;
  halting_backward(args);
  if (!end.is_last()) token_gate_backward(end.din, end.dw, end.db, args.dp, end.p, end.in, end.w, args.N, end.C);
}

// Elements of the weights that a token is multiplied with.
inline double matmul_elements(const CycleEnd& end) { return end.is_last() ? 0 : double(end.C); }

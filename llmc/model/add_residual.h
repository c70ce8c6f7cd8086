// How a branch's output joins the residual stream in GPT-2: it is added.
#pragma once
#include <vector>
#include "activation_list.h"
#include "llmc/operations.h"
#include "llmc/ops/precision.h"
#include "activations.h"
#include "batch.h"
#include "cycle_start.h"
#include "norm.h"
#include "parameters.h"

struct AddResidual {
  const char* name;  // of its tensor
  int64_t C = 0;
  const floatX* in = nullptr;               // (N, C): the residual stream before
  floatX* out = nullptr;                    // (N, C): and after
  floatX* branch_out = nullptr;             // (N, C)
  floatX* dresidual = nullptr;              // (N, C)
  std::vector<CycleStart> next_cycle = {};  // of the cycle of layers that begins after it: one or none
};

template <class Declare>
void for_each_activation(AddResidual& r, Recompute dropped_from, ActivationList<Declare>& list) {
  list.of_step(dropped_from, r.name, r.out, {list.shape.rows, list.shape.config.channels});
}

// Plans the pointers. `in`: the residual stream before. Returns the stream after, r.out. A sum has no parameters.
inline const floatX* plan_residual(AddResidual& r, const GruParams<floatX>&, const GruParams<float>&, const floatX* in,
                                   const Activations& acts) {
  r.in = in, r.branch_out = acts.branch_out, r.dresidual = acts.dresidual;
  return r.out;
}

// Plans the start of a cycle after the step: it is added to the branch's output, before that joins the stream.
inline void plan_next_cycle(AddResidual& r, const CycleStart& start) {
  r.next_cycle = {start};
  r.next_cycle[0].in = r.next_cycle[0].out = r.branch_out;
}

// out (N, C) = in + branch_out.
inline void residual_forward(const AddResidual& r, const Batch& batch) {
  residual_sum(r.out, r.in, r.branch_out, batch.rows() * r.C);
}

// out (N, C) = in + branch_out, and the LayerNorm that follows, in one pass over the residual stream.
inline void residual_forward(const AddResidual& r, const Norm& next, const Batch& batch) {
  for (const CycleStart& start : r.next_cycle) cycle_start_forward(start, batch);
  residual_layernorm_forward(layernorm_args(next, batch.rows()), r.out, r.in, r.branch_out);
}

// Returns the gradient of branch_out (N, C), which is that of the stream, because the stream is a sum. The gradient of
// `in` is the same tensor.
inline const floatX* residual_backward(const AddResidual& r, const Batch& batch) {
  for (const CycleStart& start : r.next_cycle) cycle_start_backward(start, batch);
  return r.dresidual;
}

// Elements of the weights that a token is multiplied with: none.
inline double matmul_elements(const AddResidual&, const ModelConfig&) { return 0; }

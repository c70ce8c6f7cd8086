// How a branch's output joins the residual stream in GPT-2: it is added.
#pragma once
#include "llmc/model/binding.h"
#include "norm.h"

struct AddResidual {
  const char* name;  // of its tensor
  int64_t C = 0;
  const floatX* in = nullptr;    // (N, C): the residual stream before
  floatX* out = nullptr;         // (N, C): and after
  floatX* branch_out = nullptr;  // (N, C)
  floatX* dresidual = nullptr;   // (N, C)
};

inline void declare(AddResidual& r, Recompute dropped_from, ActivationList& list) {
  const int64_t N = list.shape.rows, C = list.shape.config.channels;
  list.of_sublayer(dropped_from, r.name, r.out, {N, C});
  list.in_buffer(buffers::branch_out, r.branch_out, {N, C});
}

// Sets the pointers. `in`: the residual stream before. Returns the stream after, r.out.
inline const floatX* bind_residual(AddResidual& r, const floatX* in, const Activations& acts) {
  r.in = in, r.dresidual = acts.dresidual;
  return r.out;
}

// out (N, C) = in + branch_out.
inline void residual_forward(const AddResidual& r, const Batch& batch) {
  residual_sum(r.out, r.in, r.branch_out, batch.rows() * r.C);
}

// out (N, C) = in + branch_out, and the LayerNorm that follows, in one pass over the residual stream.
inline void residual_forward(const AddResidual& r, const Norm& next, const Batch& batch) {
  residual_layernorm_forward(layernorm_args(next, batch.rows()), r.out, r.in, r.branch_out);
}

// Returns the gradient of branch_out (N, C), which equals the stream's gradient, because the stream is a sum. The
// gradient of `in` is the same tensor.
inline const floatX* residual_backward(const AddResidual& r, const Batch&) { return r.dresidual; }

// How a branch's output joins the residual stream with `gru` (terms/gru.h): in a gate in place of the sum. It takes
// three matmuls forward and six backward.
#pragma once
#include "llmc/model/binding.h"
#include "llmc/ops/gru.h"
#include "norm.h"

struct GruResidual {
  const char* name;  // of the tensor of the stream after it
  int64_t C = 0;
  GruParams<floatX> w = {};
  GruParams<float> g = {};
  floatX* branch_out = nullptr;  // (N, C): the branch's output, in the backward pass its gradient
  floatX* y = nullptr;           // (N, C): relu of the branch's output
  GruGates<floatX> gates = {};   // of (N, 3C), and the residual stream before and after
  floatX* sums = nullptr;        // (N, 2C), and then (N, C): the matmuls of x and of r x
};

inline void declare(GruResidual& r, Recompute dropped_from, ActivationList& list) {
  const int64_t N = list.shape.rows, C = list.shape.config.channels;
  list.of_sublayer(dropped_from, r.name, r.gates.out, {N, C});
  list.of_sublayer(Recompute::block, "gru_y", r.y, {N, C});
  list.of_sublayer(Recompute::activation, "gru_gates", r.gates.gates, {N, 3 * C});
  list.in_buffer(buffers::branch_out, r.branch_out, {N, C});
  list.in_buffer(buffers::branch_out, r.gates.reset_in, {N, C});
  list.in_buffer({"gru_sums"}, r.sums, {N, 2 * C});
  if (list.shape.training) list.in_buffer(buffers::dnorm, r.gates.dreset_in, {N, C});
}

// Sets all pointers but the parameters', which are set already. `in`: the stream before. Returns the stream after.
inline const floatX* bind_residual(GruResidual& r, const floatX* in, const Activations& acts) {
  r.gates.in = in, r.gates.bias = r.w.bias, r.gates.dresidual = acts.dresidual;
  return r.gates.out;
}

// y (N, C) = relu(branch_out).
inline void branch_relu(const GruResidual& r, const Batch& batch) {
  relu_forward(r.y, r.branch_out, batch.rows() * r.C);
}

// From y: r, z, g (N, 3C) and out (N, C) =.
inline void gates_forward(const GruResidual& r, const Batch& batch) {
  const int64_t N = batch.rows(), C = r.C;
  matmul_forward(r.gates.gates, r.y, r.w.y, nullptr, N, C, 3 * C);
  matmul_forward(r.sums, r.gates.in, r.w.x, nullptr, N, C, 2 * C);
  gru_gates_forward(r.gates, r.sums, N, C);
  matmul_forward(r.sums, r.gates.reset_in, r.w.rx, nullptr, N, C, C);
  gru_output_forward(r.gates, r.sums, N, C);
}

// out (N, C) = the gate of `in` and branch_out.
inline void residual_forward(const GruResidual& r, const Batch& batch) {
  branch_relu(r, batch);
  gates_forward(r, batch);
}

// From dresidual (N, C), the gradient of out: dresidual = the gradient of `in`, g +=. Returns branch_out's gradient.
inline const floatX* residual_backward(const GruResidual& r, const Batch& batch) {
  const int64_t N = batch.rows(), C = r.C;
  const floatX *dr = r.gates.gates, *dz = dr + C, *dg = dz + C;  // of their arguments, in rows of 3C
  gru_output_backward(r.gates, N, C);
  gemm('N', 'N', N, C, C, dg, 3 * C, r.w.rx, C, false, r.gates.dreset_in, C);
  gru_gates_backward(r.gates, N, C);
  gemm('T', 'N', C, C, N, dg, 3 * C, r.gates.reset_in, C, true, r.g.rx, C);
  bias_backward(r.g.bias, dz, N, C, 3 * C, /*factor=*/-1);
  gemm('T', 'N', 2 * C, C, N, dr, 3 * C, r.gates.in, C, true, r.g.x, C);
  gemm('N', 'N', N, C, 2 * C, dr, 3 * C, r.w.x, C, true, r.gates.dresidual, C);
  matmul_backward(r.branch_out, r.g.y, nullptr, dr, r.y, r.w.y, N, C, 3 * C);
  relu_backward(r.branch_out, r.y, N * C);
  return r.branch_out;
}

// Elements of the weights that a token is multiplied with.
inline double matmul_elements(const GruResidual&, const ModelConfig& c) { return 6.0 * c.channels * c.channels; }

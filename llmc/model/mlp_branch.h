// The MLP: a linear layer to 4 C hidden units, GELU, a linear layer back.
#pragma once
#include <cstdint>            // int64_t
#include "activation_list.h"  // ActivationList
#include "llmc/operations.h"  // matmul_gelu_forward, matmul_forward, matmul_backward, ...
#include "llmc/precision.h"   // floatX
#include "batch.h"            // Batch
#include "norm.h"             // Norm
#include "parameters.h"       // MlpParams, LayerParams
#include "planner.h"          // Planner

struct MlpBranch {
  MlpParams<floatX> w;
  MlpParams<float> g;
  int64_t C = 0;
  const floatX* in = nullptr;                  // (N, C)
  floatX *fch = nullptr, *fch_gelu = nullptr;  // (N, 4C): before and after GELU
  floatX* out = nullptr;                       // (N, C)
  floatX *din = nullptr, *dfch = nullptr;      // (N, C), (N, 4C)
};

template <class Declare>
void for_each_activation(MlpBranch& b, ActivationList<Declare>& list) {
  const int64_t N = list.shape.rows, C = list.shape.config.channels;
  list.of_step(Recompute::block, "fch", b.fch, {N, 4 * C});
  list.of_step(Recompute::gelu, "fch_gelu", b.fch_gelu, {N, 4 * C});
}

inline void plan_branch(MlpBranch& b, const LayerParams<floatX>& w, const LayerParams<float>& g, const Norm& norm,
                        const Planner& p) {
  b.w = w.mlp, b.g = g.mlp, b.in = norm.out, b.out = p.acts.branch_out;
  b.din = p.acts.dnorm, b.dfch = p.acts.dhidden;
}

// The parameters of the LayerNorm before the MLP.
template <class T>
const NormParams<T>& norm_params(const MlpBranch&, const LayerParams<T>& p) {
  return p.ln2;
}

// The parameters of the gate in which the MLP's output joins the residual stream.
template <class T>
const GruParams<T>& gru_params(const MlpBranch&, const LayerParams<T>& p) {
  return p.gru2;
}

// fch (N, 4C) = in (N, C) fcw^T + fcb; fch_gelu (N, 4C) = gelu(fch).
inline void hidden_forward(const MlpBranch& b, const Batch& batch) {
  matmul_gelu_forward(b.fch_gelu, b.fch, b.in, b.w.fcw, b.w.fcb, batch.rows(), b.C, 4 * b.C);
}

// Computes the hidden units, fch and fch_gelu (N, 4C), again in the backward pass.
inline void branch_again(const MlpBranch& b, const Batch& batch) { hidden_forward(b, batch); }

// fch_gelu (N, 4C) = gelu(fch), again in the backward pass.
inline void gelu_again(const MlpBranch& b, const Batch& batch) {
  gelu_forward(b.fch_gelu, b.fch, batch.rows() * 4 * b.C);
}

// out (N, C) = fch_gelu (N, 4C) projw^T + projb.
inline void project_out(const MlpBranch& b, const Batch& batch) {
  matmul_forward(b.out, b.fch_gelu, b.w.projw, b.w.projb, batch.rows(), 4 * b.C, b.C);
}

// out (N, C) = gelu(in (N, C) fcw^T + fcb) projw^T + projb; also fch, fch_gelu (N, 4C) =.
inline void branch_forward(const MlpBranch& b, const Batch& batch) {
  hidden_forward(b, batch);
  project_out(b, batch);
}

// From dout (N, C), the gradient of out: din (N, C) =, dfch (N, 4C) =, and g +=.
inline void branch_backward(const MlpBranch& b, const floatX* dout, const Batch& batch) {
  const int64_t N = batch.rows();
  matmul_gelu_backward(b.dfch, b.g.projw, b.g.projb, dout, b.fch_gelu, b.fch, b.w.projw, N, 4 * b.C, b.C);
  matmul_backward(b.din, b.g.fcw, b.g.fcb, b.dfch, b.in, b.w.fcw, N, b.C, 4 * b.C);
}

// Elements of the weights that a token is multiplied with.
inline double matmul_elements(const MlpBranch&, const ModelConfig& c, const AttentionPlan&) {
  return 8.0 * c.channels * c.channels;
}

// The FLOPs of attention in an MLP: none.
inline double attention_flops(const MlpBranch&, const ModelConfig&, const AttentionPlan&, int64_t) { return 0; }

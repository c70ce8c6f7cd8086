// The norm before a sublayer's branch, and the one before the output head: LayerNorm, or with `rmsnorm` RMSNorm, which
// has no mean and no bias.
#pragma once
#include <cstdint>
#include "llmc/model/activation_list.h"
#include "llmc/model/activations.h"
#include "llmc/operations.h"
#include "llmc/ops/precision.h"
#include "llmc/model/parameters.h"

struct Norm {
  const char* name;  // of its tensors
  int bucket = 0;    // of its parameters
  NormParams<floatX> w;
  NormParams<float> g;
  const floatX* in = nullptr;              // (N, C): the residual stream
  floatX* out = nullptr;                   // (N, C)
  float *mean = nullptr, *rstd = nullptr;  // (N)
  floatX* dresidual = nullptr;             // (N, C): the gradient of `in`, which the whole stream shares
  floatX* dout = nullptr;                  // (N, C), in buffers::dnorm: the din of the branch, or of the head
  float* scratch = nullptr;                // (layernorm_backward_scratch(N, C))
  int64_t C = 0;
  float eps = 0;
  bool centers = true;  // LayerNorm
};

// Declares what the backward pass of `rows` rows uses meanwhile.
inline void declare_scratch(Norm& norm, ActivationList& list, int64_t rows) {
  const int64_t C = list.shape.config.channels;
  list.in_buffer({"layernorm_scratch", MemoryGroup::backward}, norm.scratch, {layernorm_backward_scratch(rows, C)});
}

inline void declare(Norm& norm, Recompute dropped_from, ActivationList& list) {
  const int64_t N = list.shape.rows;
  list.of_sublayer(dropped_from, std::string(norm.name), norm.out, {N, norm.C});
  list.of_sublayer(list.shape.dropped_from(), std::string(norm.name) + "_mean", norm.mean, {N});
  list.of_sublayer(list.shape.dropped_from(), std::string(norm.name) + "_rstd", norm.rstd, {N});
  if (!list.shape.training) return;
  list.in_buffer(buffers::dnorm, norm.dout, {N, norm.C});
  declare_scratch(norm, list, N);
}

inline void bind_norm(Norm& norm, const NormParams<floatX>& w, const NormParams<float>& g, int bucket, const floatX* in,
                      const Activations& acts) {
  norm.w = w, norm.g = g, norm.bucket = bucket, norm.in = in;
  norm.dresidual = acts.dresidual;
}

inline LayerNormForward layernorm_args(const Norm& n, int64_t rows) {
  return {n.out, n.mean, n.rstd, n.w.weight, n.w.bias, rows, n.C, n.eps, n.centers};
}

// out (N, C), mean (N), rstd (N) = the norm of `in` (N, C), where N is `rows`.
inline void norm_forward(const Norm& n, int64_t rows) { layernorm_forward(layernorm_args(n, rows), n.in); }

// From dout (N, C), the gradient of out: dresidual (N, C) += the gradient of `in`; g +=.
inline void norm_backward(const Norm& n, int64_t rows) {
  LayerNormBackward args;
  args.dinp = n.dresidual, args.dweight = n.g.weight, args.dbias = n.g.bias, args.dout = n.dout, args.inp = n.in;
  args.mean = n.mean, args.rstd = n.rstd, args.weight = n.w.weight, args.scratch = n.scratch;
  args.N = rows, args.C = n.C, args.centers = n.centers;
  layernorm_backward(args);
}

// The arithmetic of a model, in floating-point operations: what a perfect implementation would have to do, no recomputation
// counted but the flash backward's, no dead K/V rows.
#pragma once
#include "config.h"      // ModelConfig
#include "kv_plan.h"     // KVPlan
#include "parameters.h"  // qkv_rows

// Elements of the weights that a token is multiplied with: the linear layers and the tied head.
inline double matmul_parameters(const ModelConfig& c, const KVPlan& plan) {
  const double C = c.channels;
  double n = double(c.vocab_size) * C;
  for (int l = 0; l < c.num_layers; l++) n += double(qkv_rows(c, plan, l)) * C + C * C + 8 * C * C;
  return n;
}

// A token of a sequence of T, forward and backward: 2 and 4 operations a weight; causal attention multiplies 2 matrices
// forward and 5 backward (of which one rebuilds the scores), each 2 * C * (T + 1) / 2 operations a token and layer.
inline double flops_per_token(const ModelConfig& c, const KVPlan& plan, int64_t T) {
  return 6 * matmul_parameters(c, plan) + 7.0 * c.num_layers * c.channels * double(T + 1);
}

// AdamW (Loshchilov & Hutter 2019), as PyTorch computes it. For each parameter, at step t = 1, 2, ...:
//
//   g = gradient * min(1, grad_clip / (norm + 1e-6))
//   m = beta1 m + (1 - beta1) g
//   v = beta2 v + (1 - beta2) g^2
//   parameter = parameter (1 - learning_rate weight_decay)
//             - learning_rate * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
//
// norm is taken over all parameters' gradients together, as in clip_grad_norm_. weight_decay is 0 for biases
// and LayerNorm's parameters. If the loss or the norm is not finite, nothing changes.
#pragma once
#include <cstdint>

// A run of parameters of one tensor that one block of threads updates: what AdamW and the gradient's norm walk over.
// Indices count elements of the float arenas.
struct ParameterChunk {
  int64_t begin;  // index into weights and gradients, a multiple of 64
  // Index into master weights and moments, a multiple of 64. It differs from `begin` where their arenas hold only this
  // process's shard.
  int64_t state;
  int count;   // at most parameter_chunk_size
  int decays;  // weight decay applies
};
constexpr int parameter_chunk_size = 8192;

// The numbers of one step.
struct AdamWStep {
  float learning_rate, beta1, beta2, eps;
  float bias_correction1, bias_correction2;  // 1 - beta1^t, 1 - beta2^t
  double grad_clip;                          // largest norm; 0: none
  float weight_decay;                        // for the tensors that decay
};

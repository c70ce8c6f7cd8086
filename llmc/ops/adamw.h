// AdamW (Loshchilov & Hutter 2019), as PyTorch computes it. For each parameter, at step t = 1, 2, ...:
//
//   g = gradient * min(1, grad_clip / (norm + 1e-6))
//   m = beta1 m + (1 - beta1) g
//   v = beta2 v + (1 - beta2) g^2
//   parameter = parameter (1 - learning_rate weight_decay)
//             - learning_rate * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
//
// norm is that of all parameters' gradients together, by which clip_grad_norm_ clips too. weight_decay is 0 for biases
// and LayerNorm's parameters. If the loss or the norm is not finite, nothing changes.
#pragma once
#include <cmath>
#include <cstdint>
#include "host_device.h"

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

// Sums over a step, in the device's memory, where the operations add them up and the update reads them. Ranks sum them
// up in one collective, from the first or the second on. Gradients are those of a mean over all tokens in which the
// loss of a token that is not scored counts as 0: how many are scored is known only with them.
struct StepStats {
  double grad_squares;       // the sum of the squares of all these gradients
  double loss;               // over micro-batches: the sum of the losses of scored tokens, in nats, / B T
  double ponder = 0;         // over micro-batches: the sum of N + R (halting.h) of the same tokens / B T
  double scored = 0;         // how many tokens are scored,
  double tokens = 0;         //   of how many,
  double correct = 0;        //   and of how many scored ones the logit is the largest; not counted in training
  double stop_requests = 0;  // positive if a rank asks to stop after this step; not used by the update

  // What makes the gradients those of the mean over scored tokens. They are zero where none is scored.
  SLA_HOST_DEVICE double grad_weight() const { return 0 < scored && scored < tokens ? tokens / scored : 1; }
  // The 2-norm of the gradients of the mean over scored tokens.
  SLA_HOST_DEVICE double grad_norm() const { return sqrt(grad_squares) * grad_weight(); }
  // The mean over scored tokens of `loss` or `ponder`; NaN where none is scored. `rows`: the divisor, B T.
  double mean(double sum, double rows) const { return scored > 0 ? sum / (scored / rows) : NAN; }
};
static_assert(sizeof(StepStats) == 7 * sizeof(double));

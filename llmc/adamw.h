// AdamW (Loshchilov & Hutter 2019), as PyTorch computes it. For each parameter, at step t = 1, 2, ...:
//
//   g = grad_scale * gradient
//   m = beta1 m + (1 - beta1) g
//   v = beta2 v + (1 - beta2) g^2
//   parameter = parameter (1 - learning_rate weight_decay)
//             - learning_rate * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
//
// weight_decay is 0 for biases and LayerNorm's parameters.
#pragma once

// The numbers of one step.
struct AdamWStep {
  float learning_rate, beta1, beta2, eps;
  float bias_correction1, bias_correction2;  // 1 - beta1^t, 1 - beta2^t
  float grad_scale;                          // from clipping by the global norm
  float weight_decay;                        // of the tensors that decay
};

// The gate in which a branch's output joins the residual stream with `gru` (llmc/model/terms/gru.h): what its
// operations read and write, the same for every device. Of each token the tensors have rows of C channels, one beside
// the other:
//
//   gates (N, 3C)   r | z | g, which the backward pass makes the gradients of what r, z and g are functions of
//   sums (N, 2C)    what the residual stream x adds to the arguments of r and z; then, (N, C), what r x adds to g's
#pragma once

template <class T>
struct GruGates {
  T* gates = nullptr;       // (N, 3C): the arguments' terms of y before r, z and g are computed
  const T* in = nullptr;    // (N, C): x, the residual stream before
  T* reset_in = nullptr;    // (N, C): r x
  const T* bias = nullptr;  // (C): b
  T* out = nullptr;         // (N, C): the residual stream after
  T* dresidual = nullptr;   // (N, C): its gradient, which becomes that of x
  T* dreset_in = nullptr;   // (N, C): the gradient of reset_in
};

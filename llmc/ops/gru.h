// The gate in which a branch's output joins the residual stream with `gru` (llmc/wiring/terms/gru.h): what its
// operations read and write, the same for every device. The tensors have rows of C channels for each token, one beside
// the other:
//
//   gates (N, 3C)   r | z | g, which the backward pass makes the gradients of what r, z and g are functions of
//   sums (N, 2C)    what the residual stream x adds to the arguments of r and z; then, (N, C), what r x adds to g's
//
// The operations, between which matmuls are:
//
//   relu_forward:         y (n) = max(x, 0); NaN stays NaN
//   gru_gates_forward:    r = sigmoid(gates + sums), z = sigmoid(gates + sums - bias), reset_in = r x
//   gru_output_forward:   g = tanh(gates + sums), out = (1 - z) x + z g
//   gru_output_backward:  from dresidual, the gradient of out: z and g become the gradients of their arguments, and
//                         dresidual becomes the gradient of x through the term (1 - z) x alone
//   gru_gates_backward:   from dreset_in, the gradient of r x: reset_in = r x again, r becomes the gradient of its
//                         argument, dresidual += the gradient of x
//   relu_backward:        dy (n) = 0 where y = relu(x) is 0, in place: the gradient of x
#pragma once

template <class T>
struct GruGates {
  T* gates = nullptr;       // (N, 3C): the arguments' terms of y before r, z and g are computed
  const T* in = nullptr;    // (N, C): x, the residual stream before
  T* reset_in = nullptr;    // (N, C): r x
  const T* bias = nullptr;  // (C): b
  T* out = nullptr;         // (N, C): the residual stream after
  T* dresidual = nullptr;   // (N, C): its gradient, which becomes the gradient of x
  T* dreset_in = nullptr;   // (N, C): the gradient of reset_in
};

// The gate of `gru`: the operations of llmc/ops/gru.h. C and n are multiples of 8, pointers are 16-byte aligned. Memory
// bounds all kernels: a thread owns eight neighbouring channels of a token, and neighbouring threads have neighbouring
// ones.
#pragma once
#include <cmath>
#include <cstdint>
#include "llmc/ops/gru.h"
#include "activation.h"

// relu_backward reads what the forward pass has made of x, so that the slope is by y = value(x).
struct Relu {
  __device__ static float value(float x) { return x < 0.0f ? 0.0f : x; }
  __device__ static float slope(float y) { return y > 0.0f ? 1.0f : 0.0f; }
};

__global__ void __launch_bounds__(element_threads)
    gru_gates_forward_kernel(GruGates<floatX> gru, const floatX* sums, int64_t N, int64_t C) {
  const int64_t at = first_element(), n = at / C, c = at % C;
  if (n >= N) return;
  floatX *r_place = gru.gates + n * 3 * C + c, *z_place = r_place + C;
  float r[8], z[8], x[8], sum[8], bias[8];
  load8(r, r_place);
  load8(z, z_place);
  load8(x, gru.in + at);
  load8(bias, gru.bias + c);
  load8(sum, sums + n * 2 * C + c);
  for (int j = 0; j < 8; j++) r[j] = sigmoid(r[j] + sum[j]), x[j] *= r[j];
  load8(sum, sums + n * 2 * C + C + c);
  for (int j = 0; j < 8; j++) z[j] = sigmoid(z[j] + sum[j] - bias[j]);
  store8(r_place, r);
  store8(z_place, z);
  store8(gru.reset_in + at, x);
}

__global__ void __launch_bounds__(element_threads)
    gru_output_forward_kernel(GruGates<floatX> gru, const floatX* sums, int64_t N, int64_t C) {
  const int64_t at = first_element(), n = at / C, c = at % C;
  if (n >= N) return;
  floatX *z_place = gru.gates + n * 3 * C + C + c, *g_place = z_place + C;
  float z[8], g[8], x[8], sum[8];
  load8(z, z_place);
  load8(g, g_place);
  load8(x, gru.in + at);
  load8(sum, sums + at);
  for (int j = 0; j < 8; j++) g[j] = tanhf(g[j] + sum[j]), x[j] = (1.0f - z[j]) * x[j] + z[j] * g[j];
  store8(g_place, g);
  store8(gru.out + at, x);
}

__global__ void __launch_bounds__(element_threads)
    gru_output_backward_kernel(GruGates<floatX> gru, int64_t N, int64_t C) {
  const int64_t at = first_element(), n = at / C, c = at % C;
  if (n >= N) return;
  floatX *z_place = gru.gates + n * 3 * C + C + c, *g_place = z_place + C;
  float z[8], g[8], x[8], d[8];
  load8(z, z_place);
  load8(g, g_place);
  load8(x, gru.in + at);
  load8(d, gru.dresidual + at);
  for (int j = 0; j < 8; j++) {
    x[j] = d[j] * (g[j] - x[j]) * z[j] * (1.0f - z[j]);
    g[j] = d[j] * z[j] * (1.0f - g[j] * g[j]);
    d[j] *= 1.0f - z[j];
  }
  store8(z_place, x);
  store8(g_place, g);
  store8(gru.dresidual + at, d);
}

__global__ void __launch_bounds__(element_threads)
    gru_gates_backward_kernel(GruGates<floatX> gru, int64_t N, int64_t C) {
  const int64_t at = first_element(), n = at / C, c = at % C;
  if (n >= N) return;
  floatX* r_place = gru.gates + n * 3 * C + c;
  float r[8], x[8], d[8], dresidual[8];
  load8(r, r_place);
  load8(x, gru.in + at);
  load8(d, gru.dreset_in + at);
  load8(dresidual, gru.dresidual + at);
  for (int j = 0; j < 8; j++) {
    const float reset_in = r[j] * x[j];
    dresidual[j] += d[j] * r[j];
    r[j] = d[j] * x[j] * r[j] * (1.0f - r[j]);
    x[j] = reset_in;
  }
  store8(r_place, r);
  store8(gru.reset_in + at, x);
  store8(gru.dresidual + at, dresidual);
}

inline void relu_forward(floatX* y, const floatX* x, int64_t n) {
  launch_elements(activation_forward_kernel<Relu>, n, y, x, n);
}

inline void relu_backward(floatX* dy, const floatX* y, int64_t n) {
  launch_elements(activation_backward_kernel<Relu>, n, dy, y, n);
}

inline void gru_gates_forward(const GruGates<floatX>& gru, const floatX* sums, int64_t N, int64_t C) {
  launch_elements(gru_gates_forward_kernel, N * C, gru, sums, N, C);
}

inline void gru_output_forward(const GruGates<floatX>& gru, const floatX* sums, int64_t N, int64_t C) {
  launch_elements(gru_output_forward_kernel, N * C, gru, sums, N, C);
}

inline void gru_output_backward(const GruGates<floatX>& gru, int64_t N, int64_t C) {
  launch_elements(gru_output_backward_kernel, N * C, gru, N, C);
}

inline void gru_gates_backward(const GruGates<floatX>& gru, int64_t N, int64_t C) {
  launch_elements(gru_gates_backward_kernel, N * C, gru, N, C);
}

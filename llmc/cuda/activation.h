// The activations of MLPs: the operations of llmc/cpu/activation.h. H is a multiple of 8, pointers are 16-byte aligned.
#pragma once
#include <cstdint>
#include "llmc/ops/activation.h"
#include "vec.h"

// Each activation's value and slope.
struct Gelu {
  // Where exp(-2u) overflows, the result is x / inf = 0, which is gelu's limit.
  __device__ static float value(float x) {
    const float two_u = 2.0f * gelu_scale * x * (1.0f + 0.044715f * x * x);
    return __fdividef(x, 1.0f + __expf(-two_u));
  }
  // By the formula of llmc/cpu/activation.h.
  __device__ static float slope(float x) {
    x = x > 9.0f ? 9.0f : x < -9.0f ? -9.0f : x;
    const float e = __expf(-2.0f * gelu_scale * x * (1.0f + 0.044715f * x * x));
    const float s = __fdividef(1.0f, 1.0f + e);
    const float du = gelu_scale * (1.0f + 3.0f * 0.044715f * x * x);
    return s + 2.0f * x * s * (e * s) * du;
  }
};
struct Relu2 {
  __device__ static float value(float x) { return x < 0.0f ? 0.0f : x * x; }
  __device__ static float slope(float x) { return x < 0.0f ? 0.0f : 2.0f * x; }
};
struct Silu {
  __device__ static float value(float x) { return x * sigmoid(x); }
  __device__ static float slope(float x) {
    const float s = sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
  }
};

// A thread owns eight elements, 16 bytes of bf16, so that a warp's accesses are coalesced. Memory bounds it: exp and
// the division of GELU are the hardware's approximations, good to a few units in the last place of a float.
template <class F>
__global__ void __launch_bounds__(element_threads)
    activation_forward_kernel(floatX* out, const floatX* inp, int64_t n) {
  const int64_t i = first_element();
  if (i >= n) return;
  float x[8];
  load8(x, inp + i);
  for (int j = 0; j < 8; j++) x[j] = F::value(x[j]);
  store8(out + i, x);
}

// d *= the slope, in place; where that is 0, d is 0, however large it was. A thread owns eight elements, as in the
// forward pass.
template <class F>
__global__ void __launch_bounds__(element_threads) activation_backward_kernel(floatX* d, const floatX* inp, int64_t n) {
  const int64_t i = first_element();
  if (i >= n) return;
  float x[8], g[8];
  load8(x, inp + i);
  load8(g, d + i);
  for (int j = 0; j < 8; j++) g[j] = F::slope(x[j]) == 0.0f ? 0.0f : g[j] * F::slope(x[j]);
  store8(d + i, g);
}

// The first of a thread's eight units among H, and of its row's 2 H products.
struct GatedUnits {
  int64_t row, unit;
  __device__ GatedUnits(int64_t H) {
    const int64_t i = first_element();
    row = i / H, unit = i % H;
  }
};

// A thread owns eight units, and their 16 products.
__global__ void __launch_bounds__(element_threads)
    swiglu_forward_kernel(floatX* out, const floatX* inp, int64_t N, int64_t H) {
  const GatedUnits at(H);
  if (at.row >= N) return;
  const floatX* gates = inp + at.row * 2 * H + at.unit;
  float x[8], y[8];
  load8(x, gates);
  load8(y, gates + H);
  for (int j = 0; j < 8; j++) x[j] *= sigmoid(x[j]) * y[j];
  store8(out + at.row * H + at.unit, x);
}

// With s = sigmoid(x): the gradient of y is d s x, that of x is d y s (1 + x (1 - s)).
__global__ void __launch_bounds__(element_threads)
    swiglu_backward_kernel(floatX* d, const floatX* inp, int64_t N, int64_t H) {
  const GatedUnits at(H);
  if (at.row >= N) return;
  const int64_t first = at.row * 2 * H + at.unit;
  float x[8], y[8], g[8];
  load8(x, inp + first);
  load8(y, inp + first + H);
  load8(g, d + first);
  for (int j = 0; j < 8; j++) {
    const float s = sigmoid(x[j]), dx = g[j] * y[j] * s * (1.0f + x[j] * (1.0f - s));
    y[j] = g[j] * s * x[j], x[j] = dx;
  }
  store8(d + first, x);
  store8(d + first + H, y);
}

inline void activation_forward(Activation f, floatX* out, const floatX* inp, int64_t N, int64_t H) {
  CHECK(H % 8 == 0);
  if (is_gated(f)) return launch_elements(swiglu_forward_kernel, N * H, out, inp, N, H);
  with_activation<Gelu, Relu2, Silu>(f, [=](auto function) {
    launch_elements(activation_forward_kernel<decltype(function)>, N * H, out, inp, N * H);
  });
}

inline void activation_backward(Activation f, floatX* d, const floatX* inp, int64_t N, int64_t H) {
  CHECK(H % 8 == 0);
  if (is_gated(f)) return launch_elements(swiglu_backward_kernel, N * H, d, inp, N, H);
  with_activation<Gelu, Relu2, Silu>(f, [=](auto function) {
    launch_elements(activation_backward_kernel<decltype(function)>, N * H, d, inp, N * H);
  });
}

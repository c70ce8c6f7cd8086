// The activations of MLPs (llmc/ops/activation.h).
#pragma once
#include <cstdint>
#include "llmc/ops/activation.h"
#include "threads.h"
#include "vec.h"

inline float gelu(float x) { return x * vec_sigmoid(2.0f * gelu_scale * (x + 0.044715f * x * x * x)); }

// gelu'(x). With s = sigmoid(2u): s + 2 x s (1 - s) du/dx. 1 - s is e s with e = exp(-2u), which loses no digits where
// s is near 1. Beyond +-9 gelu' is 0 or 1 to within 1e-26, and e would overflow further out: x is clamped. (Comparisons
// with NaN are false: it remains NaN.)
inline float gelu_slope(float x) {
  x = x > 9.0f ? 9.0f : x;
  x = x < -9.0f ? -9.0f : x;
  const float e = vec_exp(-2.0f * gelu_scale * (x + 0.044715f * x * x * x));
  const float s = 1.0f / (1.0f + e);
  const float du = gelu_scale * (1.0f + 3.0f * 0.044715f * x * x);
  return s + 2.0f * x * s * (e * s) * du;
}

// Each activation's value and slope.
struct Gelu {
  static float value(float x) { return gelu(x); }
  static float slope(float x) { return gelu_slope(x); }
};
struct Relu2 {
  static float value(float x) { return x < 0.0f ? 0.0f : x * x; }
  static float slope(float x) { return x < 0.0f ? 0.0f : 2.0f * x; }
};

// run(Gelu()) or run(Relu2()).
template <class Run>
void with_activation(Activation f, Run run) {
  f == Activation::gelu ? run(Gelu()) : run(Relu2());
}

// out (n) = f(inp (n))
template <class Element>
void activation_forward(Activation f, Element* out, const Element* inp, int64_t n) {
  with_activation(f, [=](auto function) {
#pragma omp parallel for simd schedule(static) if (parallel : is_worth_threads(2 * int64_t(sizeof(Element)) * n))
    for (int64_t i = 0; i < n; i++) from_float(out[i], function.value(to_float(inp[i])));
  });
}

// d (n) *= f'(inp (n)), in place.
template <class Element>
void activation_backward(Activation f, Element* d, const Element* inp, int64_t n) {
  with_activation(f, [=](auto function) {
#pragma omp parallel for simd schedule(static) if (parallel : is_worth_threads(3 * int64_t(sizeof(Element)) * n))
    for (int64_t i = 0; i < n; i++) from_float(d[i], to_float(d[i]) * function.slope(to_float(inp[i])));
  });
}

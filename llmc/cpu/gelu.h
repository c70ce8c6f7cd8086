// GPT-2's GELU, the tanh form: 0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3), which is x sigmoid(2u).
#pragma once
#include <cstdint>
#include "threads.h"
#include "vec.h"

constexpr float gelu_scale = 0.7978845608f;  // sqrt(2 / pi)

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

// out (n) = gelu(inp (n))
template <class Element>
void gelu_forward(Element* out, const Element* inp, int64_t n) {
#pragma omp parallel for simd schedule(static) if (parallel : is_worth_threads(2 * int64_t(sizeof(Element)) * n))
  for (int64_t i = 0; i < n; i++) from_float(out[i], gelu(to_float(inp[i])));
}

// d (n) *= gelu'(inp (n)), in place.
template <class Element>
void gelu_backward(Element* d, const Element* inp, int64_t n) {
#pragma omp parallel for simd schedule(static) if (parallel : is_worth_threads(3 * int64_t(sizeof(Element)) * n))
  for (int64_t i = 0; i < n; i++) from_float(d[i], to_float(d[i]) * gelu_slope(to_float(inp[i])));
}

// The activations of MLPs (llmc/ops/activation.h).
#pragma once
#include <cstdint>
#include "llmc/ops/activation.h"
#include "threads.h"
#include "vec.h"

// Each activation's value and slope, of a float or of a register of them (vec.h).
struct Gelu {
  template <class Floats>
  static SLA_INLINE Floats value(Floats x) {
    return x * vec_sigmoid(2.0f * gelu_scale * (x + 0.044715f * x * x * x));
  }
  // With s = sigmoid(2u): s + 2 x s (1 - s) du/dx. 1 - s is e s with e = exp(-2u), which loses no digits of a small
  // 1 - s. Beyond +-9 the slope is 0 or 1 to within 1e-26, and e would overflow further out: x is clamped. (Comparisons
  // with NaN are false: it remains NaN.)
  template <class Floats>
  static SLA_INLINE Floats slope(Floats x) {
    x = x > 9.0f ? Floats{} + 9.0f : x;
    x = x < -9.0f ? Floats{} - 9.0f : x;
    const Floats e = vec_exp(-2.0f * gelu_scale * (x + 0.044715f * x * x * x));
    const Floats s = 1.0f / (1.0f + e);
    const Floats du = gelu_scale * (1.0f + 3.0f * 0.044715f * x * x);
    return s + 2.0f * x * s * (e * s) * du;
  }
};

struct Relu2 {
  template <class Floats>
  static SLA_INLINE Floats value(Floats x) {
    return x < 0.0f ? Floats{} : x * x;
  }
  template <class Floats>
  static SLA_INLINE Floats slope(Floats x) {
    return x < 0.0f ? Floats{} : 2.0f * x;
  }
};

struct Silu {
  template <class Floats>
  static SLA_INLINE Floats value(Floats x) {
    return x * vec_sigmoid(x);
  }
  template <class Floats>
  static SLA_INLINE Floats slope(Floats x) {
    const Floats s = vec_sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
  }
};

// Runs run(f) with the struct of `f`, an activation of one product.
template <class Run>
void with_activation(Activation f, Run run) {
  with_activation<Gelu, Relu2, Silu>(f, run);
}

// Both gradients of silu(x) y from d, that of it: x and y become them.
inline void swiglu_backward(float d, float& x, float& y) {
  const float s = vec_sigmoid(x), dx = d * y * s * (1.0f + x * (1.0f - s));
  y = d * s * x, x = dx;
}

// out (N, H) = f(inp (N, F))
template <class Element>
void activation_forward(Activation f, Element* out, const Element* inp, int64_t N, int64_t H) {
  const int64_t n = N * H;
  if (is_gated(f)) {
#pragma omp parallel for schedule(static) if (is_worth_threads(3 * int64_t(sizeof(Element)) * n))
    for (int64_t row = 0; row < N; row++) {
      const Element *gates = inp + row * 2 * H, *ups = gates + H;
#pragma omp simd
      for (int64_t i = 0; i < H; i++) {
        from_float(out[row * H + i], Silu::value(to_float(gates[i])) * to_float(ups[i]));
      }
    }
    return;
  }
  with_activation(f, [=](auto function) {
#pragma omp parallel for simd schedule(static) if (parallel : is_worth_threads(2 * int64_t(sizeof(Element)) * n))
    for (int64_t i = 0; i < n; i++) from_float(out[i], function.value(to_float(inp[i])));
  });
}

// d (N, F) = the gradient of inp, from that of f(inp), which is in the first H columns of d.
template <class Element>
void activation_backward(Activation f, Element* d, const Element* inp, int64_t N, int64_t H) {
  const int64_t n = N * H;
  if (is_gated(f)) {
#pragma omp parallel for schedule(static) if (is_worth_threads(5 * int64_t(sizeof(Element)) * n))
    for (int64_t row = 0; row < N; row++) {
      const Element* products = inp + row * 2 * H;
      Element* to = d + row * 2 * H;
#pragma omp simd
      for (int64_t i = 0; i < H; i++) {
        float x = to_float(products[i]), y = to_float(products[H + i]);
        swiglu_backward(to_float(to[i]), x, y);
        from_float(to[i], x), from_float(to[H + i], y);
      }
    }
    return;
  }
  with_activation(f, [=](auto function) {
#pragma omp parallel for simd schedule(static) if (parallel : is_worth_threads(3 * int64_t(sizeof(Element)) * n))
    for (int64_t i = 0; i < n; i++) from_float(d[i], to_float(d[i]) * function.slope(to_float(inp[i])));
  });
}

// The activations of MLPs, what they make of H hidden units:
//
//   gelu    GPT-2's, the tanh form: 0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3), which is x sigmoid(2u)
//   relu2   relu(x)^2 (So et al. 2021)
//   silu    x sigmoid(x) (Elfwing et al. 2017)
//   swiglu  silu(x) y, of two products x and y for each unit (Shazeer 2020)
//
// They are functions of F products a token: F = H, or of swiglu 2 H, first all x and then all y.
#pragma once
#include <cstdint>
#include "llmc/base/error.h"

enum class Activation { gelu, relu2, silu, swiglu };

constexpr bool is_gated(Activation f) { return f == Activation::swiglu; }
constexpr int64_t num_products(Activation f, int64_t H) { return is_gated(f) ? 2 * H : H; }

// Runs run(f) with a device's struct of `f`, an activation of one product.
template <class Gelu, class Relu2, class Silu, class Run>
void with_activation(Activation f, Run run) {
  switch (f) {
    case Activation::gelu: return run(Gelu());
    case Activation::relu2: return run(Relu2());
    case Activation::silu: return run(Silu());
    case Activation::swiglu: CHECK(!is_gated(f));
  }
}

constexpr float gelu_scale = 0.7978845608f;  // sqrt(2 / pi)

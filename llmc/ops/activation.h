// The activations of MLPs, what they make of each hidden unit:
//
//   gelu    GPT-2's, the tanh form: 0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3), which is x sigmoid(2u)
//   relu2   relu(x)^2 (So et al. 2021)
#pragma once

enum class Activation { gelu, relu2 };

constexpr float gelu_scale = 0.7978845608f;  // sqrt(2 / pi)

inline const char* activation_name(Activation a) { return a == Activation::gelu ? "GELU" : "ReLU squared"; }

// So et al. 2021: the activation of MLPs is relu(x)^2.
#pragma once
#include "term.h"

struct Relu2Term : SettingTerm<Relu2Term, &WiringTable::activation, Activation::relu2> {
  static constexpr TermSyntax syntax = {"relu2"};
  static constexpr const char* help = "the activation of MLPs is the square of ReLU, in place of GELU";
  static constexpr TermFeatures features = {activations, activations};
  static constexpr const char* note = "MLPs: ReLU squared in place of GELU";
};

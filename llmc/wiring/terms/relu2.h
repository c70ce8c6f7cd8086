// So et al. 2021: the activation of MLPs is relu(x)^2.
#pragma once
#include "term.h"

struct Relu2Term : Term {
  static constexpr TermSyntax syntax = {"relu2"};
  static constexpr const char* help = "the activation of MLPs is the square of ReLU, in place of GELU";
  static constexpr TermFeatures features = {activations, activations};
  void apply(WiringTable& t) const {
    t.activation = Activation::relu2;
    t.notes.push_back("MLPs: ReLU squared in place of GELU");
  }
};

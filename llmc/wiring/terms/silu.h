// Elfwing et al. 2017: the activation of MLPs is silu(x) = x sigmoid(x), also called swish.
#pragma once
#include "term.h"

struct SiluTerm : Term {
  static constexpr TermSyntax syntax = {"silu"};
  static constexpr const char* help = "the activation of MLPs is x sigmoid(x), in place of GELU";
  static constexpr TermFeatures features = {activations, activations};
  void apply(WiringTable& t) const {
    t.activation = Activation::silu;
    t.notes.push_back("MLPs: SiLU in place of GELU");
  }
};

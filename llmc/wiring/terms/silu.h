// Elfwing et al. 2017: the activation of MLPs is silu(x) = x sigmoid(x), also called swish.
#pragma once
#include "term.h"

struct SiluTerm : SettingTerm<SiluTerm, &WiringTable::activation, Activation::silu> {
  static constexpr TermSyntax syntax = {"silu"};
  static constexpr const char* help = "the activation of MLPs is x sigmoid(x), in place of GELU";
  static constexpr TermFeatures features = {activations, activations};
  static constexpr const char* note = "MLPs: SiLU in place of GELU";
};

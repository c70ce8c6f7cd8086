// Zhang & Sennrich 2019: x / sqrt(mean(x^2) + eps) * weight, with LayerNorm's eps.
#pragma once
#include "term.h"

struct RmsnormTerm : SettingTerm<RmsnormTerm, &WiringTable::rmsnorm> {
  static constexpr TermSyntax syntax = {"rmsnorm"};
  static constexpr const char* help = "norms without mean and bias, in place of LayerNorm";
  static constexpr TermFeatures features = {norms};
  static constexpr const char* note = "norms: RMSNorm, without mean and bias";
};

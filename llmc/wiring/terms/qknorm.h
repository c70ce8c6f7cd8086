// QK-norm (Henry et al. 2020), without parameters: q and k of each head are divided by sqrt(mean(x^2) + 1e-6) over the
// head's channels. It commutes with `rope`. A head that attends to another layer's k does so as that layer normed it.
#pragma once
#include "term.h"

struct QknormTerm : SettingTerm<QknormTerm, &WiringTable::qknorm> {
  static constexpr TermSyntax syntax = {"qknorm"};
  static constexpr const char* help = "q and k of each head are divided by their root mean square";
  static constexpr TermFeatures features = {head_norms};
  static constexpr const char* note = "q and k: divided by their root mean square, of each head";
};

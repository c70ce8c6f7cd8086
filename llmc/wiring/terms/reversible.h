// RevNet (Gomez et al. 2017), as in Reformer: the streams are fp32, both the embeddings at first: x1 +=
// attention(ln_1(x2)), x2 += mlp(ln_2(x1)). ln_f gets their mean. The backward pass recovers a layer's
// streams from those after it.
#pragma once
#include "term.h"

struct ReversibleTerm : SettingTerm<ReversibleTerm, &WiringTable::reversible> {
  static constexpr TermSyntax syntax = {"reversible"};
  static constexpr const char* help = "two residual streams, which the backward pass recovers and need not keep";
  static constexpr TermFeatures features = {joins, joins | top_keys | maps | distances | segments | cycles | halting};
  static constexpr const char* note = "reversible: two residual streams, which the backward pass recovers";
};

// The output head has a weight of its own, lm_head.weight (V, C), and not the embeddings'.
#pragma once
#include "term.h"

struct UntiedTerm : SettingTerm<UntiedTerm, &WiringTable::untied> {
  static constexpr TermSyntax syntax = {"untied"};
  static constexpr const char* help = "the output head has a weight of its own, and not the embeddings'";
  static constexpr TermFeatures features = {heads};
  static constexpr const char* note = "output head: a weight of its own";
};

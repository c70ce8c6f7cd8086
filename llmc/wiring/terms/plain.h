// GPT-2 (Radford et al. 2019): head i of layer l attends to the K/V that its own layer projected for head i.
#pragma once
#include "term.h"

struct PlainTerm : Term {
  static constexpr TermSyntax syntax = {"plain"};
  static constexpr const char* help = "GPT-2: head i of a layer attends to what its layer projected for head i";
  void apply(WiringTable&) const {}
};

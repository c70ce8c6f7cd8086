#pragma once
#include "term.h"

struct PlainTerm : Term {
  static constexpr TermSyntax syntax = {"plain"};
  static constexpr const char* help = "GPT-2: head i of a layer attends to what its layer projected for head i";
  void apply(WiringTable&) const {}
};

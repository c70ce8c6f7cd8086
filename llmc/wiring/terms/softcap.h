// Gemma 2 (2024): logits are c tanh(x / c) of what the output head computes, and lie between -c and c.
#pragma once
#include "term.h"

struct SoftcapTerm : Term {
  static constexpr TermSyntax syntax = {"softcap(c)", "softcap(15)", 1, 1};
  static constexpr const char* help = "logits are c tanh(logits / c), between -c and c";
  static constexpr TermFeatures features = {caps};
  double cap = 1;

  void read(const TermReader& a) {
    cap = a.number(a[0], 0, 1e9);
    if (cap < 1e-3) a.error("c, " + a[0] + ", must be at least 0.001");
  }
  std::string arguments() const { return shortest(cap); }
  void apply(WiringTable& t) const {
    t.softcap = cap;
    t.notes.push_back(format("logits: capped at %.12g", cap));
  }
};

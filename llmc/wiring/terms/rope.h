// RoFormer (Su et al. 2021): channels i and i + hs/2 of q and k are rotated by position * base^(-2i/hs). A head that
// attends to another layer's k does so as that layer rotated it.
#pragma once
#include "term.h"

struct RopeTerm : Term {
  static constexpr TermSyntax syntax = {"rope or rope(base)", "rope(10000)", 0, 1};
  static constexpr const char* help = "rotary positions in place of learned ones; base 10000";
  static constexpr TermFeatures features = {positions};
  static constexpr double default_base = 10000;
  double base = default_base;

  void read(const TermReader& a) {
    if (a.count() > 0) base = a.number(a[0], 1, 1e9);
  }
  std::string arguments() const { return base == default_base ? "" : shortest(base); }
  void apply(WiringTable& t) const {
    t.rope = base;
    t.notes.push_back(format("positions: q and k are rotated, base %.12g", base));
  }
};

// The query at t sees the key at j if t - j < keys. The pattern repeats over the layers: S has the window, L has none.
#pragma once
#include "term.h"

struct WindowTerm : Term {
  static constexpr TermSyntax syntax = {"window(keys) or window(keys, pattern of S and L)", "window(512, SSSL)", 1, 2};
  static constexpr const char* help = "the last keys, the query's own among them; with a pattern, only in layers S";
  static constexpr TermFeatures features = {windows};
  int keys = 1;
  std::string pattern;  // empty: S for all layers

  void read(const TermReader& a) {
    keys = a.whole(a[0], 1);
    if (a.count() < 2) return;
    pattern = a[1];
    if (pattern.empty() || pattern.find_first_not_of("SL") != std::string::npos)
      a.error("the pattern \"" + pattern + "\" must be of the letters S (window) and L (no window)");
  }
  std::string arguments() const { return std::to_string(keys) + (pattern.empty() ? "" : "," + pattern); }
  void apply(WiringTable& t) const {
    MaskClause clause;
    clause.last = keys;
    for (int l = 0; l < t.num_layers; l++)
      for (int i = 0; i < t.num_heads && (pattern.empty() || pattern[size_t(l) % pattern.size()] == 'S'); i++)
        t.mask(l, i).add(clause);
  }
};

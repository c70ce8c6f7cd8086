// Of the keys that a query sees, its softmax has the `keys` with the highest scores, of equal ones the first.
#pragma once
#include "term.h"

struct TopkTerm : Term {
  static constexpr TermSyntax syntax = {"topk(keys)", "topk(64)", 1, 1};
  static constexpr const char* help = "of the keys that a query sees, those with the highest scores";
  static constexpr TermFeatures features = {top_keys};
  int keys = 1;

  void read(const TermReader& a) { keys = a.whole(a[0], 1); }
  std::string arguments() const { return std::to_string(keys); }
  void apply(WiringTable& t) const {
    t.topk = keys;
    t.notes.push_back(format("keys: of those that a query sees, the %d with the highest scores", keys));
  }
};

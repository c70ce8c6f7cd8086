// A query's softmax has only the n keys with the highest scores that the query sees, of equal ones the first.
#pragma once
#include "term.h"

struct TopkTerm : NumberTerm {
  static constexpr TermSyntax syntax = {"topk(keys)", "topk(64)", 1, 1};
  static constexpr const char* help = "of the keys that a query sees, those with the highest scores";
  static constexpr TermFeatures features = {top_keys};
  void apply(WiringTable& t) const {
    t.topk = n;
    t.notes.push_back(format("keys: of those that a query sees, the %d with the highest scores", n));
  }
};

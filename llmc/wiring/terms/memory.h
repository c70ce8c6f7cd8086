// Transformer-XL (Dai et al. 2019): a stream of text is computed in segments of n_positions, S; a query of segment n
// also attends to the positions before it from n S - memory on. Each layer keeps its input at these as a constant.
#pragma once
#include "term.h"

struct MemoryTerm : NumberTerm {
  static constexpr TermSyntax syntax = {"memory(positions)", "memory(512)", 1, 1};
  static constexpr const char* help = "queries see so many positions of their text's earlier segments";
  static constexpr TermFeatures features = {segments, patterns | top_keys | maps | cycles | halting, Feature::positions,
                                            "", "learned positions say nothing of those before a segment"};
  void apply(WiringTable& t) const {
    t.memory = n;
    t.notes.push_back(format("memory: of earlier segments, the %d positions before each", n));
  }
};

// As sla (sla.h), but head i of layer l attends to the K/V of head i of layer l - distance beside what it attends to
// already: one softmax over the keys of all its sources.
#pragma once
#include "source_below.h"

struct AlsoTerm : SourceBelow {
  static constexpr TermSyntax syntax = {"also(distance, heads)", "also(2, 4) or also(2, 0:4)", 2, 2};
  static constexpr const char* help = "as sla, but beside what the heads attend to already: one softmax over all keys";
  static constexpr TermFeatures features = {sources | unroutable};

  double more_attentions(int) const { return 1; }
  void apply(WiringTable& t) const {
    for_each_head(t, [](std::vector<KVSource>& sources, int layer) {
      const auto it = std::lower_bound(sources.begin(), sources.end(), layer);
      if (it == sources.end() || *it != layer) sources.insert(it, layer);
    });
  }
};

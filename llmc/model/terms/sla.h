// "Skip-Layer Attention: Bridging Abstract and Detailed Dependencies in Transformers": head i of layer l attends to the
// K/V of head i of layer l - distance if l >= distance and it is one of the last `heads`, or a <= i < b for a range
// a:b. Other heads stay as they were, so several such terms make several distances.
#pragma once
#include "source_below.h"

struct SlaTerm : SourceBelow {
  static constexpr TermSyntax syntax = {"sla(distance, heads)", "sla(9, 9) or sla(9, 3:12)", 2, 2};
  static constexpr const char* help = "so many last heads, or heads a:b, attend to the K/V of the layer that far below";
  static constexpr TermFeatures features = {sources};
  void apply(WiringTable& t) const {
    for_each_head(t, [](std::vector<int>& sources, int layer) { sources = {layer}; });
  }
};

// Cross-layer attention (Brandon et al. 2024): all heads attend to the K/V of the first layer of their group of n
// layers.
#pragma once
#include "layer_groups.h"

struct ShareTerm : LayerGroups {
  static constexpr TermSyntax syntax = {"share(layers in a group)", "share(2)", 1, 1};
  static constexpr const char* help = "all heads attend to the K/V of the first layer of their group";
  static constexpr TermFeatures features = {sources};
  void apply(WiringTable& t) const {
    for (int l = 0; l < t.num_layers; l++)
      for (int i = 0; i < t.num_heads; i++) t.sources(l, i) = {first_of_group(l)};
  }
};

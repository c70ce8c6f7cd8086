// In groups of n layers all use the attention map (q, k, mask) of the group's first layer on their own v.
#pragma once
#include "layer_groups.h"
#include "maps_below.h"

struct ReuseTerm : LayerGroups {
  static constexpr TermSyntax syntax = {"reuse(layers in a group)", "reuse(2)", 1, 1};
  static constexpr const char* help = "layers of a group use the attention map (q, k, mask) of its first on their v";
  static constexpr TermFeatures features = features_of_maps;
  void apply(WiringTable& t) const {
    for (int l = 0; l < t.num_layers; l++) t.map_layer[size_t(l)] = first_of_group(l);
  }
};

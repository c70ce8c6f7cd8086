// Cross-layer attention (Brandon et al. 2024): all heads attend to the K/V of the first layer of their group of n
// layers; with k or v its keys or its values alone.
#pragma once
#include "kv_part.h"
#include "layer_groups.h"

struct ShareTerm : LayerGroups {
  static constexpr TermSyntax syntax = {"share(layers in a group[, k|v])", "share(2) or share(2, k) or share(2, v)", 1,
                                        2};
  static constexpr const char* help = "all heads use K/V, k or v of their group's first layer";
  static constexpr TermFeatures features = {sources};
  KVPart part;

  void read(const TermReader& a) { LayerGroups::read(a), part.read(a, 1); }
  std::string arguments() const { return LayerGroups::arguments() + part.text(); }
  bool moves_one_part() const { return part.is_one(); }
  void apply(WiringTable& t) const {
    for (int l = 0; l < t.num_layers; l++)
      for (int i = 0; i < t.num_heads; i++) part.move(t.sources(l, i), first_of_group(l));
  }
};

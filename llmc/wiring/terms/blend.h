// The attention map of layer l, which it uses on its own v, is P_l = a P_(l-1) + (1 - a) S_l, where S_l is the layer's
// own, and P_0 = S_0.
#pragma once
#include "maps_below.h"

struct BlendTerm : MapsBelow {
  static constexpr TermSyntax syntax = {"blend(share of the layer below)", "blend(0.3)", 1, 1};
  static constexpr const char* help = "the layer's own attention map and, by that share, the one of the layer below";
  static constexpr TermFeatures features = features_of_maps;
  double share = 0;

  void read(const TermReader& a) { share = a.number(a[0], 0, 1); }
  std::string arguments() const { return shortest(share); }
  void apply(WiringTable& t) const {
    t.mix = WiringTable::Mix::blend, t.blend = share;
    t.notes.push_back(format("attention maps: each is mixed with %.12g of the one below", share));
  }
};

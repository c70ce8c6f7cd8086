// P_l of blend.h with a share of each query: a = sigmoid(x . w + b), where x is the layer's LayerNorm'd input.
#pragma once
#include "maps_below.h"

struct GateTerm : MapsBelow {
  static constexpr TermSyntax syntax = {"gate"};
  static constexpr const char* help = "as blend, with a share that is learned, of each query";
  static constexpr TermFeatures features = features_of_maps;
  void apply(WiringTable& t) const {
    t.mix = WiringTable::Mix::gate;
    t.notes.push_back("attention maps: each is mixed with the one below, in a share that is learned");
  }
};

// With layers(0_0_2_2) all heads of layer l attend to the K/V of the layer named for it, which is l or below.
#pragma once
#include "term.h"

struct LayersTerm : Term {
  static constexpr TermSyntax syntax = {"layers(the layer for each layer)", "layers(0_0_2_2)", 1, 1};
  static constexpr const char* help = "all heads attend to the K/V of the layer named for theirs: itself or one below";
  static constexpr TermFeatures features = {sources | unroutable};
  std::vector<int> layers;

  void read(const TermReader& a) {
    for (const std::string& name : split(a[0], '_')) {
      const int layer = a.whole(name, 0), l = int(layers.size());
      if (layer > l)
        a.error(format("layer %d cannot attend to layer %d, which is above it; it can to layers 0 to %d", l, layer, l));
      layers.push_back(layer);
    }
  }
  std::string arguments() const {
    std::string text;
    for (int layer : layers) text += (text.empty() ? "" : "_") + std::to_string(layer);
    return text;
  }
  std::string misfit(int L, int) const {
    return int(layers.size()) != L ? format("it names %zu layers; the model has %d", layers.size(), L) : "";
  }
  void apply(WiringTable& t) const {
    for (int l = 0; l < t.num_layers; l++)
      for (int i = 0; i < t.num_heads; i++) t.sources(l, i) = {layers[size_t(l)]};
  }
};

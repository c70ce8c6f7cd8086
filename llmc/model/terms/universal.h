// Universal Transformer (Dehghani et al. 2018): layer l has the parameters of layer l mod `layers`. Before each cycle c
// the residual stream gets + wse[c] and, with learned positions, + wpe[position], which the embeddings do not have.
// Sources count layers as they run.
#pragma once
#include "term.h"

struct UniversalTerm : Term {
  static constexpr TermSyntax syntax = {"universal(layers in a cycle)", "universal(2)", 1, 1};
  static constexpr const char* help = "layers repeat in cycles with the same weights, each begun with a learned vector";
  static constexpr TermFeatures features = {cycles, patterns | top_keys | maps};
  int layers = 1;

  void read(const TermReader& a) { layers = a.whole(a[0], 1); }
  std::string arguments() const { return std::to_string(layers); }
  std::string misfit(int L, int) const {
    return L % layers != 0 ? format("cycles of %d layers do not divide the %d layers", layers, L) : "";
  }
  void apply(WiringTable& t) const {
    t.stored_layers = layers, t.has_cycles = true;
    if (layers < t.num_layers)
      t.notes.push_back(format("layers repeat: layer l has the parameters of layer l mod %d", layers));
  }
};

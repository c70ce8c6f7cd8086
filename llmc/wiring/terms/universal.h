// Universal Transformer (Dehghani et al. 2018): layer l has the parameters of layer l mod n. Before each cycle c
// the residual stream gets + wse[c] and, with learned positions, + wpe[position], which the embeddings do not have.
// Sources count layers as they run.
#pragma once
#include "term.h"

struct UniversalTerm : NumberTerm {
  static constexpr TermSyntax syntax = {"universal(layers in a cycle)", "universal(2)", 1, 1};
  static constexpr const char* help = "layers repeat in cycles with the same weights, each begun with a learned vector";
  static constexpr TermFeatures features = {cycles, patterns | top_keys | maps};
  std::string misfit(int L, int) const {
    return L % n != 0 ? format("cycles of %d layers do not divide the %d layers", n, L) : "";
  }
  void apply(WiringTable& t) const {
    t.stored_layers = n, t.has_cycles = true;
    if (n < t.num_layers) t.notes.push_back(format("layers repeat: layer l has the parameters of layer l mod %d", n));
  }
};

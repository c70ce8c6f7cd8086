// Shazeer 2020: an MLP is (silu(x W_g + b_g) * (x W_u + b_u)) W_o + b_o, where silu(x) = x sigmoid(x); mlp.c_fc has W_g
// and W_u beside each other.
#pragma once
#include "term.h"

struct SwigluTerm : Term {
  static constexpr TermSyntax syntax = {"swiglu or swiglu(hidden units)", "swiglu or swiglu(1024)", 0, 1};
  static constexpr const char* help = "MLPs have two products, one of them a gate; by default of 8/3 hidden units a "
                                      "channel";
  static constexpr TermFeatures features = {activations, activations};
  int hidden_units = 0;  // 0: the default

  void read(const TermReader& a) {
    if (a.count() > 0) hidden_units = a.whole(a[0], 1);
  }
  std::string arguments() const { return hidden_units == 0 ? "" : std::to_string(hidden_units); }
  void apply(WiringTable& t) const {
    t.activation = Activation::swiglu, t.hidden_units = hidden_units;
    t.notes.push_back("MLPs: SwiGLU" + (hidden_units > 0 ? format(" of %d hidden units", hidden_units) : ""));
  }
};

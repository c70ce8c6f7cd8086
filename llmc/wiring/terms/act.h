// Adaptive computation time (Graves 2016): after cycle c a token halts with probability p_c = sigmoid(x_c . w + b). N
// is the first c with p_1 + ... + p_c >= 1 - eps, or the last. The final LayerNorm gets p_1 x_1 + ... + p_(N-1) x_(N-1)
// + R x_N, where the weights add up to 1. What is minimised is the loss + cost * the mean of N + R.
#pragma once
#include "term.h"

struct ActTerm : Term {
  static constexpr TermSyntax syntax = {"act(eps) or act(eps, cost)", "act(0.01)", 1, 2};
  static constexpr const char* help = "each token halts after a cycle of its own, at a cost a cycle";
  static constexpr TermFeatures features = {halting, patterns | top_keys | maps, cycles, "",
                                            "a token halts after a cycle of layers that repeat"};
  static constexpr double default_cost = 0.01;
  double eps = 0, cost = default_cost;

  void read(const TermReader& a) {
    eps = a.number(a[0], 0, 1);
    const float threshold = float(1 - eps);  // as it is used
    if (threshold == 0 || threshold == 1)
      a.error("eps, " + a[0] + ", must lie between 0 and 1, and be neither, 1 - eps as a float too");
    if (a.count() > 1) cost = a.number(a[1], 0, 1e9);
  }
  std::string arguments() const { return shortest(eps) + (cost == default_cost ? "" : "," + shortest(cost)); }
  void apply(WiringTable& t) const {
    t.halting = eps, t.ponder_cost = cost;
    t.notes.push_back(format("halting: after the cycle in which a token's probabilities reach 1 - %.12g, at a cost of "
                             "%.12g",
                             eps, cost));
  }
};

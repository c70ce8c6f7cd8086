// ALiBi (Press et al. 2022): the score of query t and key j gets - m_i (t - j), the slope m_i of head i being fixed:
// with n the largest power of two up to h, m_i = 2^(-8 (i + 1) / n) for i < n; the other heads take every second slope
// of 2n heads, from the first on.
#pragma once
#include <cmath>
#include "term.h"

struct AlibiTerm : Term {
  static constexpr TermSyntax syntax = {"alibi"};
  static constexpr const char* help = "no positions: scores fall with the distance of a key, in each head at a rate of "
                                      "its own";
  static constexpr TermFeatures features = {positions, positions | segments | maps};

  static double slope(int head, int heads) {
    int n = 1;
    while (2 * n <= heads) n *= 2;
    return head < n ? std::exp2(-8.0 * (head + 1) / n) : std::exp2(-8.0 * (2 * (head - n) + 1) / (2 * n));
  }
  void apply(WiringTable& t) const {
    t.alibi = true;
    for (int l = 0; l < t.num_layers; l++)
      for (int i = 0; i < t.num_heads; i++) t.mask(l, i).clauses.slope = float(slope(i, t.num_heads));
    t.notes.push_back("positions: scores fall with the distance of query and key");
  }
};

// Grouped-query attention (Ainslie et al. 2023): of `heads` K/V heads query head i attends to number i * heads / h.
#pragma once
#include "term.h"

struct GqaTerm : Term {
  static constexpr TermSyntax syntax = {"gqa(K/V heads)", "gqa(4)", 1, 1};
  static constexpr const char* help = "grouped-query attention: neighbouring query heads attend to the same K/V head";
  static constexpr TermFeatures features = {kv_heads};
  int heads = 1;

  void read(const TermReader& a) { heads = a.whole(a[0], 1); }
  std::string arguments() const { return std::to_string(heads); }
  std::string misfit(int, int h) const {
    if (h % heads == 0) return "";
    std::string divisors;
    for (int k = 1; k <= h; k++)
      if (h % k == 0) divisors += (divisors.empty() ? "" : ", ") + std::to_string(k);
    return format("%d K/V heads do not divide %d heads; these do: %s", heads, h, divisors.c_str());
  }
  void apply(WiringTable& t) const { t.num_kv_heads = heads; }
};

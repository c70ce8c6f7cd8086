// Grouped-query attention (Ainslie et al. 2023): query head i attends to number i n / h of n K/V heads.
#pragma once
#include "term.h"

struct GqaTerm : NumberTerm {
  static constexpr TermSyntax syntax = {"gqa(K/V heads)", "gqa(4)", 1, 1};
  static constexpr const char* help = "grouped-query attention: neighbouring query heads attend to the same K/V head";
  static constexpr TermFeatures features = {kv_heads};
  std::string misfit(int, int h) const {
    if (h % n == 0) return "";
    std::string divisors;
    for (int k = 1; k <= h; k++)
      if (h % k == 0) divisors += (divisors.empty() ? "" : ", ") + std::to_string(k);
    return format("%d K/V heads do not divide %d heads; these do: %s", n, h, divisors.c_str());
  }
  void apply(WiringTable& t) const { t.num_kv_heads = n; }
};

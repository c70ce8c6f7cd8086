// Sparse Transformer (Child et al. 2019): the query at t sees the key at j by one mask, A1: t - stride <= j, or by the
// other, A2: (t - j) % stride == 0. Who has which: sparse_pattern.h.
#pragma once
#include "sparse_pattern.h"

struct StridedTerm : SparsePattern {
  static constexpr TermSyntax syntax = {"strided(stride) or strided(stride, heads|layers|union)", "strided(64)", 1, 2};
  static constexpr const char* help = "half of the heads see keys up to a stride back, the others every stride-th";
  static constexpr TermFeatures features = {patterns};
  int stride = 1;

  void read(const TermReader& a) { stride = a.whole(a[0], 1), read_how(a, 1); }
  std::string arguments() const { return std::to_string(stride) + how_text(); }
  void apply(WiringTable& t) const {
    add_clauses(t, [this](bool a1, bool a2) {
      MaskClause clause;
      clause.s = stride, clause.last = a1 ? stride + 1 : 0, clause.residue = a2;
      return clause;
    });
  }
};

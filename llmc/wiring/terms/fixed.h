// Sparse Transformer (Child et al. 2019): the query at t sees the key at j by one mask, A1: j / block == t / block, or
// by the other, A2: j % block >= block - columns. Who has which: sparse_pattern.h.
#pragma once
#include "sparse_pattern.h"

struct FixedTerm : SparsePattern {
  static constexpr TermSyntax syntax = {"fixed(block, columns) or fixed(block, columns, heads|layers|union)",
                                        "fixed(64, 8)", 2, 3};
  static constexpr const char* help = "half of the heads see the query's block, the others the last columns of all";
  static constexpr TermFeatures features = {patterns};
  int block = 1, columns = 1;

  void read(const TermReader& a) {
    block = a.whole(a[0], 1), columns = a.whole(a[1], 1);
    if (columns > block) a.error(format("%d columns of blocks of %d; it must be 1 to %d", columns, block, block));
    read_how(a, 2);
  }
  std::string arguments() const { return format("%d,%d", block, columns) + how_text(); }
  void apply(WiringTable& t) const {
    add_clauses(t, [this](bool a1, bool a2) {
      MaskClause clause;
      clause.s = block, clause.block = a1, clause.columns = a2 ? columns : 0;
      return clause;
    });
  }
};

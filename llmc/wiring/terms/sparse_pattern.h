// What `strided` and `fixed` have in common: the Sparse Transformer (Child et al. 2019) has two masks, A1 and A2.
#pragma once
#include "term.h"

struct SparsePattern : Term {
  // By heads: the first ceil(h/2) have A1, the others A2; by layers: even layers A1, odd ones A2; union: all both.
  enum class How { heads, layers, both };
  static constexpr const char* names[] = {"heads", "layers", "union"};
  How how = How::heads;

  void read_how(const TermReader& a, int argument) {
    if (a.count() <= argument) return;
    const auto name = std::find(std::begin(names), std::end(names), a[argument]);
    if (name == std::end(names)) a.error("\"" + a[argument] + "\" must be heads, layers or union");
    how = How(name - std::begin(names));
  }
  std::string how_text() const { return how == How::heads ? "" : std::string(",") + names[int(how)]; }

 protected:
  // Adds clause_of(has A1, has A2) to each head's mask.
  template <class Clause>
  void add_clauses(WiringTable& t, Clause clause_of) const {
    for (int l = 0; l < t.num_layers; l++)
      for (int i = 0; i < t.num_heads; i++) {
        const bool is_first = how == How::heads ? i < (t.num_heads + 1) / 2 : l % 2 == 0;
        t.mask(l, i).add(clause_of(how == How::both || is_first, how == How::both || !is_first));
      }
  }
};

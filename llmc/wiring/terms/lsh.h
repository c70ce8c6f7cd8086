// Reformer (Kitaev et al. 2020): k_j = q_j / |q_j|. In each round x falls into bucket argmax([x R, -x R]), where R (hs,
// buckets / 2) is a constant of the head and the round. A query sees the earlier positions that share its bucket in
// some round, and itself only if there are none.
#pragma once
#include "llmc/ops/lsh.h"
#include "term.h"

struct LshTerm : Term {
  static constexpr TermSyntax syntax = {"lsh(buckets, rounds)", "lsh(32, 2)", 2, 2};
  static constexpr const char* help = "keys are queries, which see those of their hash bucket in some round (Reformer)";
  static constexpr TermFeatures features = {hashing, sources | kv_heads | windows | patterns | top_keys | maps |
                                                         positions | segments | cycles | halting | head_norms};
  int buckets = 2, rounds = 1;

  void read(const TermReader& a) {
    buckets = a.whole(a[0], 1), rounds = a.whole(a[1], 1);
    if (buckets > lsh_most_buckets) a.error(format("%d buckets must be at most %d", buckets, lsh_most_buckets));
    if (rounds > lsh_most_rounds) a.error(format("%d rounds must be at most %d", rounds, lsh_most_rounds));
    if (buckets % 2 != 0) a.error(format("%d buckets; they are pairs, so it must be an even number", buckets));
  }
  std::string arguments() const { return format("%d,%d", buckets, rounds); }
  void apply(WiringTable& t) const {
    t.lsh_buckets = buckets, t.lsh_rounds = rounds;
    t.notes.push_back(format("keys are queries: a query sees those of its hash bucket (%d buckets, %d round%s)",
                             buckets, rounds, rounds == 1 ? "" : "s"));
  }
};

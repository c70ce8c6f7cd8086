// Which keys a query sees, the same for every device. A mask is a conjunction: of the keys up to the query's own, those
// that its window and each of its clauses show. A clause is a union of primitives, which are the Sparse Transformer's
// (Child et al. 2019) and written once, in MaskClause:
//
//   last n          t - j < n            the last n keys, the query's own among them
//   block s         j / s == t / s       those of the query's block of s (whole numbers)
//   residue s       (t - j) % s == 0     every s-th
//   columns s, c    j % s >= s - c       the last c of each block
//
// The first two are an interval that ends at the query, the last two recur with period s. All else follows from that:
// what it means for tiles of queries and keys, so that kernels neither load nor multiply tiles that a mask hides; how
// far back a query sees; and how many keys.
#pragma once
#include <algorithm>           // std::min, std::max, std::swap, std::clamp
#include <climits>             // INT_MAX
#include <cstdint>             // int64_t
#include <numeric>             // std::lcm
#include <string>              // std::string
#include "llmc/utils/error.h"  // CHECK, format

#ifdef __CUDACC__
#define SLA_HOST_DEVICE __host__ __device__
#define SLA_NO_UNROLL _Pragma("unroll 1")
#else
#define SLA_HOST_DEVICE
#define SLA_NO_UNROLL
#endif

// What some neighbouring queries see by a clause, as comparisons of a key's position and of its remainder by s, for
// loops that must neither branch nor divide: the keys from `near` on, and those whose remainder is one of `count`, from
// `rest` on (after s - 1 comes 0).
struct SeenKeys {
  int near, rest, count, s;

  SLA_HOST_DEVICE bool includes(int j, int j_rest) const {
    const int after = j_rest - rest + (j_rest < rest ? s : 0);
    return j >= near || after < count;
  }

  // The first of them from `from` on; INT_MAX if there is none.
  SLA_HOST_DEVICE int next(int from) const {
    if (from >= near) return from;
    if (count == 0) return near;
    const int from_rest = from % s, after = from_rest - rest + (from_rest < rest ? s : 0);
    const int recurring = after < count ? from : from - after + s;
    return recurring < near ? recurring : near;
  }

  // How many of those that recur are in [begin, end), where the remainders do not go past s - 1.
  int recurring(int begin, int end) const {
    auto before = [&](int j) { return j / s * count + std::clamp(j % s - rest, 0, count); };
    return before(end) - before(begin);
  }
};

// A union of primitives: an interval, or keys that recur, or both.
struct MaskClause {
  int s = 1;                            // of block, residue and columns
  int last = 0;                         // n; 0: not this primitive
  int columns = 0;                      // c; 0: not this primitive
  bool block = false, residue = false;  // in place of `last`, and of `columns`

  SLA_HOST_DEVICE bool recurs() const { return residue || columns > 0; }
  SLA_HOST_DEVICE bool is_residue() const { return residue && last == 0 && !block; }

  // The first key of the interval of the query at t, whose remainder by s is t_rest; INT_MAX if there is none.
  SLA_HOST_DEVICE int near(int t, int t_rest) const { return block ? t - t_rest : last > 0 ? t - last + 1 : INT_MAX; }
  SLA_HOST_DEVICE int near(int t) const { return near(t, t % s); }

  // Whether the query at t sees the key at j <= t. The remainders by s are arguments, because a tile has one of them
  // for each row and column.
  SLA_HOST_DEVICE bool sees(int t, int j, int t_rest, int j_rest) const {
    return j >= near(t, t_rest) || (residue ? j_rest == t_rest : j_rest >= s - columns);
  }

  // For one query the keys that it sees; for several those that some of them may see.
  SLA_HOST_DEVICE SeenKeys seen_by(int q0, int q1) const {
    const int q0_rest = q0 % s;
    return {near(q0, q0_rest), residue ? q0_rest : s - columns, residue ? q1 - q0 : columns, s};
  }

  // The first query from `from` on that sees a key of [k0, k1), where from >= k0; INT_MAX if there is none.
  SLA_HOST_DEVICE int next_query(int k0, int k1, int from) const {
    if (near(from) <= (from < k1 ? from : k1 - 1)) return from;
    if (residue) return SeenKeys{INT_MAX, k0 % s, k1 - k0, s}.next(from);
    const int column = SeenKeys{INT_MAX, s - columns, columns, s}.next(k0);
    return column >= k1 ? INT_MAX : column > from ? column : from;
  }

  // The query at t sees no key before t - reach + 1; INT_MAX: it may see all.
  int reach() const { return recurs() ? INT_MAX : block ? s : last; }

  std::string text() const {
    const std::string interval = block ? format("block of %d", s) : last > 0 ? format("last %d", last) : "";
    const std::string recurring = residue       ? format("every %d", s)
                                  : columns > 0 ? format("last %d of each %d", columns, s)
                                                : "";
    return interval + (interval.empty() || recurring.empty() ? "" : " or ") + recurring;
  }
};

constexpr int most_clauses = 2;  // a wiring's `strided` and its `fixed`

// A mask, whose `Clauses` are an array or a pointer to one.
template <class Clauses>
struct MaskOf {
  int window = INT_MAX;  // t - j < window
  int num_clauses = 0;
  Clauses clauses = {};

  // From now on the mask hides what this hides, too.
  void add(const MaskClause& clause) {
    if (clause.is_residue() && clause.s == 1) return;  // all keys
    if (clause.recurs() || clause.block) {
      CHECK(num_clauses < most_clauses);
      clauses[num_clauses++] = clause;
      if (num_clauses == 2 && clauses[1].text() < clauses[0].text()) std::swap(clauses[0], clauses[1]);
    } else {
      window = std::min(window, clause.last);
    }
  }

  bool is_causal() const { return window == INT_MAX && num_clauses == 0; }

  // Whether the keys that a query sees are neighbours.
  bool is_interval() const {
    for (int c = 0; c < num_clauses; c++)
      if (clauses[c].recurs()) return false;
    return true;
  }

  // By how much positions differ that see each other, where the mask is a residue and no more than a window beside it:
  // s sequences, each of positions with the same remainder by s, that are nothing to one another. Otherwise 1.
  SLA_HOST_DEVICE int step() const {
    return num_clauses == 1 && clauses[0].is_residue() ? clauses[0].s : 1;
  }

  // Whether the query at position t sees the key at position j.
  SLA_HOST_DEVICE bool sees(int t, int j) const {
    bool sees = j <= t && t - j < window;
    for (int c = 0; c < num_clauses; c++) sees = sees && clauses[c].sees(t, j, t % clauses[c].s, j % clauses[c].s);
    return sees;
  }

  // The first key that the window leaves to the query at t.
  SLA_HOST_DEVICE int first_key(int t) const {
    const int first = t + 1 - window;
    return first > 0 ? first : 0;
  }

  // No query of [q0, q1) sees a key of [from, next_key): a loop over keys goes on from there. With two clauses it may
  // be a key that nobody sees.
  SLA_HOST_DEVICE int next_key(int q0, int q1, int from) const {
    const int first = first_key(q0);
    if (from < first) from = first;
    SLA_NO_UNROLL
    for (int c = 0; c < num_clauses && from < q1; c++) from = clauses[c].seen_by(q0, q1).next(from);
    return from;
  }

  // No query of [from, next_query) sees a key of [k0, k1); T or more if none of T queries does. With two conditions it
  // may be a query that sees none.
  SLA_HOST_DEVICE int next_query(int k0, int k1, int from, int T) const {
    if (from < k0) from = k0;
    SLA_NO_UNROLL
    for (int c = 0; c < num_clauses && from < T; c++) from = clauses[c].next_query(k0, k1, from);
    return from - (k1 - 1) < window ? from : INT_MAX;
  }

  // False if no query of [q0, q1) sees a key of [k0, k1); true may be wrong only where two conditions hold for
  // different pairs.
  SLA_HOST_DEVICE bool sees_some(int q0, int q1, int k0, int k1) const {
    return next_key(q0, q1, k0) < (k1 < q1 ? k1 : q1);
  }

  // True only if each query of [q0, q1) sees each key of [k0, k1): nothing of the tile is masked.
  SLA_HOST_DEVICE bool sees_all(int q0, int q1, int k0, int k1) const {
    bool all = k1 <= q0 + 1 && q1 - k0 <= window;
    SLA_NO_UNROLL
    for (int c = 0; c < num_clauses; c++) all = all && clauses[c].near(q1 - 1) <= k0;
    return all;
  }

  // How many keys the query at t sees.
  int64_t visible_keys(int t) const {
    const int first = first_key(t), end = t + 1;
    SeenKeys seen[] = {{0, 0, 0, 1}, {0, 0, 0, 1}};  // all keys
    static_assert(std::size(seen) == most_clauses);
    for (int c = 0; c < num_clauses; c++) seen[c] = clauses[c].seen_by(t, end);
    if (seen[0].near > seen[1].near) std::swap(seen[0], seen[1]);
    const auto& [low, high] = seen;
    const int low_near = std::clamp(low.near, first, end), high_near = std::clamp(high.near, first, end);
    int64_t keys = end - high_near + high.recurring(low_near, high_near);
    for (int j = low.next(first); j < low_near; j = low.next(j + 1)) keys += high.next(j) == j;  // both recur
    return keys;
  }

  // How many pairs (query, key) of T positions see each other.
  int64_t visible_pairs(int T) const {
    int64_t pairs = 0;
    for (int t = 0; t < T; t++) pairs += visible_keys(t);
    return pairs;
  }

  // The query at t sees no key before t - reach + 1; INT_MAX: it may see all.
  int reach() const {
    int reach = window;
    for (int c = 0; c < num_clauses; c++) reach = std::min(reach, clauses[c].reach());
    return reach;
  }

  // Positions may be counted from any multiple of it.
  int64_t period() const {
    int64_t period = 1;
    for (int c = 0; c < num_clauses; c++) period = std::lcm<int64_t>(period, clauses[c].s);
    return period;
  }

  // As it is written in a drawing; no two masks have the same text.
  std::string text() const {
    std::string text = window < INT_MAX ? format("last %d", window) : "";
    for (int c = 0; c < num_clauses; c++) text += (text.empty() ? "" : ", ") + clauses[c].text();
    return text.empty() ? "all" : text;
  }
};

using AttentionMask = MaskOf<MaskClause[most_clauses]>;

// A mask whose clauses are elsewhere: the numbers that a kernel keeps.
using MaskView = MaskOf<const MaskClause*>;
SLA_HOST_DEVICE inline MaskView view_of(const AttentionMask& mask) {
  return {mask.window, mask.num_clauses, mask.clauses};
}

// The mask among the positions with one remainder by its step(), numbered from 0.
inline AttentionMask of_one_remainder(const AttentionMask& mask) {
  AttentionMask of_numbers;
  of_numbers.window = (mask.window - 1) / mask.step() + 1;
  return of_numbers;
}

// Which keys a query sees, the same for every device. The query at position t sees the key at position j <= t if the
// mask's window and each of its clauses show it. A clause is a union of primitives, as in the Sparse Transformer
// (Child et al. 2019), in whole numbers:
//
//   last n          t - j < n            the last n keys, the query's own among them
//   block s         j / s == t / s       the keys of the query's block of s; with `before` n, the n keys before that
//                                        block as well
//   residue s       (t - j) % s == 0     every s-th key, counted back from the query
//   columns s, c    j % s >= s - c       the last c keys of each block of s
//
// `last` and `block` show an interval of keys that ends at the query; `residue` and `columns` show keys that recur with
// period s. MaskClause says for each primitive which keys it shows, where the next of them is, how many there are, how
// far back they go, and how they are described. The rest of the program asks the mask: kernels for tiles of keys and
// queries that they need not load, the K/V cache for the reach, FLOPs for the counts, and drawings for the text.
//
// Where `x` is a position, `x_mod` is x % s.
#pragma once
#include <algorithm>
#include <climits>
#include <cstdint>
#include <numeric>
#include <string>
#include "llmc/base/host_device.h"
#include "llmc/base/error.h"

#ifdef __CUDA_ARCH__  // the host's compiler does not know it
#define SLA_NO_UNROLL _Pragma("unroll 1")
#else
#define SLA_NO_UNROLL
#endif

// The keys that a clause shows to some neighbouring queries: those from `near` on, and those whose j % s is one of the
// `count` remainders first_mod, first_mod + 1, ... (0 comes after s - 1).
struct SeenKeys {
  int near, first_mod, count, s;

  // Loops over keys call it. It neither branches nor divides.
  SLA_HOST_DEVICE bool includes(int j, int j_mod) const {
    const int after = j_mod - first_mod + (j_mod < first_mod ? s : 0);
    return j >= near || after < count;
  }

  // The first of these keys from `from` on; INT_MAX if there is none.
  SLA_HOST_DEVICE int next(int from) const {
    if (from >= near) return from;
    if (count == 0) return near;
    const int from_mod = from % s, after = from_mod - first_mod + (from_mod < first_mod ? s : 0);
    const int recurring = after < count ? from : from - after + s;
    return recurring < near ? recurring : near;
  }

  // How many of the recurring keys are in [begin, end). The remainders must not go past s - 1.
  int recurring(int begin, int end) const {
    auto before = [&](int j) { return j / s * count + std::clamp(j % s - first_mod, 0, count); };
    return before(end) - before(begin);
  }
};

// A union of primitives: an interval (last or block), recurring keys (residue or columns), or both.
struct MaskClause {
  int s = 1;             // the period of block, residue and columns
  int last = 0;          // n of the primitive `last`; 0: the clause has none
  bool block = false;    // excludes `last`
  int before = 0;        // n of the primitive `block`
  bool residue = false;  // excludes `columns`
  int columns = 0;       // c of the primitive `columns`; 0: the clause has none

  SLA_HOST_DEVICE bool has_interval() const { return last > 0 || block; }
  SLA_HOST_DEVICE bool recurs() const { return residue || columns > 0; }
  SLA_HOST_DEVICE bool is_residue() const { return residue && !has_interval(); }

  // The first key of the interval that the query at t sees; INT_MAX if the clause has no interval.
  SLA_HOST_DEVICE int near(int t, int t_mod) const {
    return block ? t - t_mod - before : last > 0 ? t - last + 1 : INT_MAX;
  }
  SLA_HOST_DEVICE int near(int t) const { return near(t, t % s); }

  // Whether the query at t sees the key at j <= t. Kernels compute t_mod and j_mod once for each row and column of a
  // tile.
  SLA_HOST_DEVICE bool sees(int t, int j, int t_mod, int j_mod) const {
    return j >= near(t, t_mod) || (residue ? j_mod == t_mod : j_mod >= s - columns);
  }

  // The keys that the query q0 sees, if q1 = q0 + 1. For more queries [q0, q1) it may also include keys that none of
  // them sees.
  SLA_HOST_DEVICE SeenKeys seen_by(int q0, int q1) const {
    const int q0_mod = q0 % s;
    return {near(q0, q0_mod), residue ? q0_mod : s - columns, residue ? q1 - q0 : columns, s};
  }

  // The first query from `from` on that sees a key of [k0, k1), where from >= k0; INT_MAX if there is none.
  SLA_HOST_DEVICE int next_query(int k0, int k1, int from) const {
    if (near(from) <= (from < k1 ? from : k1 - 1)) return from;
    if (residue) return SeenKeys{INT_MAX, k0 % s, k1 - k0, s}.next(from);
    const int column = SeenKeys{INT_MAX, s - columns, columns, s}.next(k0);
    return column >= k1 ? INT_MAX : column > from ? column : from;
  }

  // The query at t sees no key before t - reach + 1; INT_MAX: it may see all.
  int reach() const { return recurs() ? INT_MAX : block ? int(std::min<int64_t>(INT_MAX, int64_t(s) + before)) : last; }

  std::string text() const {
    const std::string interval =
        block      ? format("block of %d%s", s, before > 0 ? format(" and %d before", before).c_str() : "")
        : last > 0 ? format("last %d", last)
                   : "";
    const std::string recurring = residue       ? format("every %d", s)
                                  : columns > 0 ? format("last %d of each %d", columns, s)
                                                : "";
    return interval + (interval.empty() || recurring.empty() ? "" : " or ") + recurring;
  }
};

constexpr int most_clauses = 2;  // a wiring's `strided` and its `fixed`

// The clauses of a mask and its slope; or where they are.
struct MaskClauses {
  MaskClause clauses[most_clauses];
  float slope = 0;
  SLA_HOST_DEVICE const MaskClause& operator[](int c) const { return clauses[c]; }
  SLA_HOST_DEVICE MaskClause& operator[](int c) { return clauses[c]; }
  SLA_HOST_DEVICE const MaskClauses& all() const { return *this; }
};
struct MaskClausesView {
  const MaskClauses* clauses = nullptr;
  SLA_HOST_DEVICE const MaskClause& operator[](int c) const { return (*clauses)[c]; }
  SLA_HOST_DEVICE const MaskClauses& all() const { return *clauses; }
};

// A mask: the conjunction of a window and of clauses. AttentionMask holds its clauses, MaskView points to them. With a
// slope (`alibi`) it also lowers the scores of the keys that it shows, the further from the query the more: they get
// - slope (t - j). keeps_all says which tiles of scores neither changes.
//
// next_key, next_query and sees_some test each condition (the window, a clause) by itself. Where different pairs of a
// query and a key satisfy them, they name a tile in which no query sees a key. Kernels load it and mask all its scores.
template <class Clauses>
struct MaskOf {
  int window = INT_MAX;  // t - j < window
  int num_clauses = 0;
  Clauses clauses = {};

  // From now on the mask hides what this clause hides, too. A clause that is `last` alone narrows the window. The order
  // of clauses is the order of their texts, so that masks that show the same keys in the same words are equal.
  void add(const MaskClause& clause) {
    CHECK(clause.has_interval() || clause.recurs());
    if (clause.is_residue() && clause.s == 1) return;  // all keys
    if (clause.recurs() || clause.block) {
      CHECK(num_clauses < most_clauses);
      clauses[num_clauses++] = clause;
      if (num_clauses == 2 && clauses[1].text() < clauses[0].text()) std::swap(clauses[0], clauses[1]);
    } else {
      window = std::min(window, clause.last);
    }
  }

  // By how much a score falls with each position between query and key.
  SLA_HOST_DEVICE float slope() const { return clauses.all().slope; }

  bool is_causal() const { return window == INT_MAX && num_clauses == 0; }

  // Whether the keys that a query sees are neighbours.
  bool is_interval() const {
    for (int c = 0; c < num_clauses; c++)
      if (clauses[c].recurs()) return false;
    return true;
  }

  // The s of a mask that is a residue, with or without a window; otherwise 1. Positions with different remainders by s
  // never see each other, so that attention falls apart into s sequences of positions that are s apart.
  SLA_HOST_DEVICE int stride() const { return num_clauses == 1 && clauses[0].is_residue() ? clauses[0].s : 1; }

  // Whether the query at position t sees the key at position j.
  SLA_HOST_DEVICE bool sees(int t, int j) const {
    bool sees = j <= t && t - j < window;
    for (int c = 0; c < num_clauses; c++) sees = sees && clauses[c].sees(t, j, t % clauses[c].s, j % clauses[c].s);
    return sees;
  }

  // The first key that the window shows to the query at t.
  SLA_HOST_DEVICE int first_key(int t) const {
    const int first = t + 1 - window;
    return first > 0 ? first : 0;
  }

  // The key at which a loop over the keys of the queries [q0, q1) continues: none of them sees a key of [from,
  // next_key). It is q1 or more if they see no key from `from` on.
  SLA_HOST_DEVICE int next_key(int q0, int q1, int from) const {
    const int first = first_key(q0);
    if (from < first) from = first;
    SLA_NO_UNROLL
    for (int c = 0; c < num_clauses && from < q1; c++) from = clauses[c].seen_by(q0, q1).next(from);
    return from;
  }

  // The query at which a loop over the queries of the keys [k0, k1) continues: none of [from, next_query) sees one of
  // them. It is T or more if none of the queries [from, T) does.
  SLA_HOST_DEVICE int next_query(int k0, int k1, int from, int T) const {
    if (from < k0) from = k0;
    SLA_NO_UNROLL
    for (int c = 0; c < num_clauses && from < T; c++) from = clauses[c].next_query(k0, k1, from);
    return from - (k1 - 1) < window ? from : INT_MAX;
  }

  // False only if no query of [q0, q1) sees a key of [k0, k1).
  SLA_HOST_DEVICE bool sees_some(int q0, int q1, int k0, int k1) const {
    return next_key(q0, q1, k0) < (k1 < q1 ? k1 : q1);
  }

  // True only if each query of [q0, q1) sees each key of [k0, k1), and there is no slope: the scores stay as they are.
  SLA_HOST_DEVICE bool keeps_all(int q0, int q1, int k0, int k1) const {
    bool all = k1 <= q0 + 1 && q1 - k0 <= window;
    SLA_NO_UNROLL
    for (int c = 0; c < num_clauses; c++) all = all && clauses[c].near(q1 - 1) <= k0;
    return all && slope() == 0;
  }

  // How many keys the query at t sees.
  int64_t visible_keys(int t) const {
    const int first = first_key(t), end = t + 1;
    SeenKeys seen[] = {{0, 0, 0, 1}, {0, 0, 0, 1}};  // all keys
    static_assert(std::size(seen) == most_clauses);
    for (int c = 0; c < num_clauses; c++) seen[c] = clauses[c].seen_by(t, end);
    if (seen[0].near > seen[1].near) std::swap(seen[0], seen[1]);
    const SeenKeys low = seen[0], high = seen[1];
    const int low_near = std::clamp(low.near, first, end), high_near = std::clamp(high.near, first, end);
    // Both show all keys from high_near on. Between low_near and high_near `low` shows all keys and `high` those that
    // recur. Before low_near both show only keys that recur: from `first` on, whole periods have equally many.
    auto recurring_in_both = [&](int64_t from, int64_t to) {
      int64_t keys = 0;
      for (int j = low.next(int(from)); j < to; j = low.next(j + 1)) keys += high.next(j) == j;
      return keys;
    };
    const int64_t periods = (low_near - first) / period(), tail = first + periods * period();
    return end - high_near + high.recurring(low_near, high_near) +
           (periods > 0 ? periods * recurring_in_both(first, first + period()) : 0) + recurring_in_both(tail, low_near);
  }

  // How many pairs (query, key) of T positions see each other.
  int64_t visible_pairs(int64_t T) const {
    const int64_t first = std::min<int64_t>(T, window);  // queries that the window hides nothing from
    if (num_clauses == 0) return first * (first + 1) / 2 + (T - first) * first;
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

  // The mask in words, for drawings. Masks with the same text show the same keys.
  std::string text() const {
    std::string text = window < INT_MAX ? format("last %d", window) : "";
    for (int c = 0; c < num_clauses; c++) text += (text.empty() ? "" : ", ") + clauses[c].text();
    return text.empty() ? "all" : text;
  }
};

using AttentionMask = MaskOf<MaskClauses>;

// A mask whose clauses and slope stay in memory. A kernel keeps the other two numbers and the pointer in registers.
using MaskView = MaskOf<MaskClausesView>;
SLA_HOST_DEVICE inline MaskView view_of(const AttentionMask& mask) {
  return {mask.window, mask.num_clauses, {&mask.clauses}};
}

// The mask of each of the stride() sequences into which attention with this mask falls apart, if stride() > 1. Its
// positions are numbered from 0.
inline AttentionMask mask_of_each_residue(const AttentionMask& mask) {
  AttentionMask of_each;
  of_each.clauses.slope = mask.slope() * float(mask.stride());
  if (mask.window < INT_MAX) of_each.window = (mask.window - 1) / mask.stride() + 1;
  return of_each;
}

// Which keys a query sees: a predicate, and what it means for tiles of queries and keys, so that kernels neither load
// nor multiply tiles that it hides. The same for every device.
#pragma once
#include <climits>  // INT_MAX
#include <cstdint>  // int64_t

#ifdef __CUDACC__
#define SLA_HOST_DEVICE __host__ __device__
#else
#define SLA_HOST_DEVICE
#endif

// Besides being causal (key j <= query t). Sparse Transformer's terms (Child et al. 2019).
enum class MaskPattern : int {
  all,
  stride,           // (t - j) % s == 0
  local_or_stride,  // t - j <= s, or stride
  block,            // j / s == t / s
  column,           // j % s >= s - c
  block_or_column
};

// What some neighbouring queries see, as comparisons of a key's position and of its remainder by s, for loops that must
// neither branch nor divide: of the keys in [first, end) those from `near` on, and those whose remainder is one of the
// `residues` from `residue` on (after s - 1 comes 0) or at least `column`.
struct SeenKeys {
  int first, end, near;
  int residue, residues, column, s;

  SLA_HOST_DEVICE bool includes(int j, int remainder) const {
    const int after = remainder - residue + (remainder < residue ? s : 0);
    return first <= j && j < end && (j >= near || after < residues || remainder >= column);
  }
};

struct AttentionMask {
  int window = 0;  // t - j < window; 0: no such limit
  MaskPattern pattern = MaskPattern::all;
  int s = 1, c = 0;

  SLA_HOST_DEVICE bool is_causal() const { return window == 0 && pattern == MaskPattern::all; }

  // Whether the query at position t sees the key at position j.
  SLA_HOST_DEVICE bool sees(int t, int j) const {
    if (pattern == MaskPattern::all) return j <= t && (window == 0 || t - j < window);
    return sees(t, j, t % s, j % s);
  }

  // The same with the remainders t % s and j % s, which a tile has one of for each row and column.
  SLA_HOST_DEVICE bool sees(int t, int j, int t_rest, int j_rest) const {
    if (j > t) return false;
    const bool near = window == 0 || t - j < window;
    switch (pattern) {
      case MaskPattern::all: return near;
      case MaskPattern::stride: return near && t_rest == j_rest;
      case MaskPattern::local_or_stride: return near && (t - j <= s || t_rest == j_rest);
      case MaskPattern::block: return near && j >= t - t_rest;
      case MaskPattern::column: return near && j_rest >= s - c;
      case MaskPattern::block_or_column: return near && (j >= t - t_rest || j_rest >= s - c);
    }
    return false;
  }

  // For one query the keys that it sees; for several those that some of them may see.
  SLA_HOST_DEVICE SeenKeys seen_by(int q0, int q1) const {
    SeenKeys keys = {window > 0 && q0 >= window ? q0 - window + 1 : 0, q1, q1, 0, 0, s, s};
    if (pattern == MaskPattern::all) keys.near = 0;
    if (pattern == MaskPattern::local_or_stride) keys.near = q0 - s;
    if (pattern == MaskPattern::block || pattern == MaskPattern::block_or_column) keys.near = q0 / s * s;
    if (pattern == MaskPattern::stride || pattern == MaskPattern::local_or_stride)
      keys.residue = q0 % s, keys.residues = q1 - q0;
    if (pattern == MaskPattern::column || pattern == MaskPattern::block_or_column) keys.column = s - c;
    return keys;
  }

  // Whether the keys that a query sees are neighbours.
  SLA_HOST_DEVICE bool is_interval() const { return pattern == MaskPattern::all || pattern == MaskPattern::block; }

  // False if no query of [q0, q1) sees a key of [k0, k1); true may be wrong only where two conditions hold for
  // different pairs.
  SLA_HOST_DEVICE bool sees_some(int q0, int q1, int k0, int k1) const {
    if (k0 >= q1) return false;
    if (k1 > q1) k1 = q1;
    const int nearest = k1 - 1 < q0 ? q0 - (k1 - 1) : 0, farthest = q1 - 1 - k0;  // t - j, of those with j <= t
    const bool near = window == 0 || nearest < window;
    const bool stride = farthest / s * s >= nearest;
    const bool block = k1 > q0 / s * s;
    const bool column = k1 - k0 >= s || k0 % s >= s - c || (k1 - 1) % s >= s - c || (k1 - 1) / s > k0 / s;
    switch (pattern) {
      case MaskPattern::all: return near;
      case MaskPattern::stride: return near && stride;
      case MaskPattern::local_or_stride: return near && (nearest <= s || stride);
      case MaskPattern::block: return near && block;
      case MaskPattern::column: return near && column;
      case MaskPattern::block_or_column: return near && (block || column);
    }
    return true;
  }

  // True only if each query of [q0, q1) sees each key of [k0, k1): nothing of the tile is masked.
  SLA_HOST_DEVICE bool sees_all(int q0, int q1, int k0, int k1) const {
    const bool near = window == 0 || q1 - 1 - k0 < window;
    if (k1 - 1 > q0) return false;
    if (pattern == MaskPattern::all) return near;
    return pattern == MaskPattern::local_or_stride && near && q1 - 1 - k0 <= s;
  }

  // No query of [q0, q1) sees a key of [from, next_key): a loop over keys goes on from there.
  SLA_HOST_DEVICE int next_key(int q0, int q1, int from) const {
    if (window > 0 && from < q0 - window + 1) from = q0 - window + 1;
    const int block = q0 / s * s, column = next_column(from), stride = next_of_residues(from, q0, q1 - q0);
    switch (pattern) {
      case MaskPattern::all: return from;
      case MaskPattern::stride: return stride;
      case MaskPattern::local_or_stride: return from >= q0 - s ? from : stride < q0 - s ? stride : q0 - s;
      case MaskPattern::block: return from >= block ? from : block;
      case MaskPattern::column: return column;
      case MaskPattern::block_or_column: return from >= block ? from : column < block ? column : block;
    }
    return from;
  }

  // No query of [from, next_query) sees a key of [k0, k1), and with INT_MAX none from `from` on does.
  SLA_HOST_DEVICE int next_query(int k0, int k1, int from) const {
    if (from < k0) from = k0;
    if (window > 0 && from - (k1 - 1) >= window) return INT_MAX;
    const bool block = from / s <= (k1 - 1) / s, column = next_column(k0) < k1;
    const int stride = next_of_residues(from, k0, k1 - k0);
    switch (pattern) {
      case MaskPattern::all: return from;
      case MaskPattern::stride: return stride;
      case MaskPattern::local_or_stride: return from - (k1 - 1) <= s ? from : stride;
      case MaskPattern::block: return block ? from : INT_MAX;
      case MaskPattern::column: return column ? from : INT_MAX;
      case MaskPattern::block_or_column: return block || column ? from : INT_MAX;
    }
    return from;
  }

  // How many pairs (query, key) of T positions see each other.
  int64_t visible_pairs(int64_t T) const {
    int64_t pairs = 0;
    for (int64_t t = 0; t < T; t++) pairs += visible_keys(t);
    return pairs;
  }

  // How many keys the query at t sees.
  int64_t visible_keys(int64_t t) const {
    const int64_t first = window > 0 && t >= window ? t - window + 1 : 0;  // the lowest key of the window
    auto columns_before = [&](int64_t j) { return j / s * c + (j % s > s - c ? j % s - (s - c) : 0); };  // of [0, j)
    const int64_t local = t - s > first ? t - s : first;          // the lowest that is at most s away
    const int64_t block = t / s * s > first ? t / s * s : first;  // the block's lowest key in the window
    switch (pattern) {
      case MaskPattern::all: return t - first + 1;
      case MaskPattern::stride: return (t - first) / s + 1;
      case MaskPattern::local_or_stride: return t - local + 1 + (t - first) / s - (t - local) / s;
      case MaskPattern::block: return t - block + 1;
      case MaskPattern::column: return columns_before(t + 1) - columns_before(first);
      case MaskPattern::block_or_column: return t - block + 1 + columns_before(block) - columns_before(first);
    }
    return 0;
  }

 private:
  // The lowest key from `from` on that is in a column.
  SLA_HOST_DEVICE int next_column(int from) const { return from % s >= s - c ? from : from - from % s + s - c; }

  // The lowest position from `from` on with the remainder by s of one of [first, first + count).
  SLA_HOST_DEVICE int next_of_residues(int from, int first, int count) const {
    const int rest = ((from - first) % s + s) % s;
    return rest < count ? from : from - rest + s;
  }
};

// Attention by locality-sensitive hashing (Reformer, Kitaev et al. 2020; llmc/wiring/terms/lsh.h), the same for every
// device. A head's keys are its queries on the unit sphere, k_j = q_j / |q_j|, or 0 where q_j = 0. In round n the
// position with the query x falls into bucket argmax([x R, -x R]), of equal ones the first. The query at t sees the
// positions j < t that share its bucket in some round, each of them once, by score = q_t . k_j / sqrt(HS), and has one
// softmax over all of them. If there are none it sees itself alone.
//
//   lsh_hash      the hash buckets of queries, and 1 / |q|
//   lsh_sort      from the buckets of whole sequences the order in which positions of the same bucket are neighbours
//   lsh_forward   attention in whole sequences, lsh_backward its gradients
//   lsh_decode    attention of the last positions of sequences that lie in a cache, which needs no order
//
// A token's row of qv has 2 C channels, C = NH HS: q, then v, in each of them one head after the other. Row (b,
// t) of qv, buckets, inverse_norms, out and lse is row b * T + t. The set that a query sees is exact: no chunk ends it.
// Memory is linear in T, and so is time, but for T * T / `buckets` pairs a round where buckets are as large as each
// other; where one holds everything, the first round costs what causal attention costs, and the others skip its pairs.
#pragma once
#include <cmath>
#include <cstdint>
#include "llmc/ops/rows.h"
#include "llmc/base/host_device.h"
#include "llmc/ops/precision.h"

// The most buckets a round, which lsh_sort counts in 64 KB of shared memory on a GPU; and rounds, whose buckets of some
// hundred rows attention has there.
constexpr int lsh_most_buckets = 16384, lsh_most_rounds = 16;

struct LshShape {
  int64_t B = 0, T = 0;         // sequences and their length
  int64_t NH = 0, HS = 0;       // heads and their size; HS is a multiple of 8 up to 128
  int buckets = 0, rounds = 0;  // buckets a round: even, from 2 to lsh_most_buckets

  SLA_HOST_DEVICE int64_t rows() const { return B * T; }
  SLA_HOST_DEVICE int64_t C() const { return NH * HS; }
  float score_scale() const { return 1.0f / std::sqrt(float(HS)); }
};

// lsh_hash: buckets =, inverse_norms =. A bucket depends on q's row and on the rotations alone, to the bit: it is the
// same whatever other rows there are, so that a text has the same buckets however much of it is computed at a time.
struct LshHash {
  const floatX* q = nullptr;  // (N, NH * HS), rows q_stride apart
  int64_t q_stride = 0;
  const float* rotations = nullptr;  // (NH, rounds, HS, buckets / 2): R
  int* buckets = nullptr;            // (N, NH, rounds)
  float* inverse_norms = nullptr;    // (N, NH): 1 / |q|, or 0 where |q|^2 is 0 in fp32; null if it is not needed
  // Row i of q goes to row i of `buckets` and inverse_norms; if this is not null, to row dst_rows[i * dst_rows_stride],
  // as of RowCopy. It is on the device.
  const int* dst_rows = nullptr;
  int64_t dst_rows_stride = 1;
  int64_t N = 0, NH = 0, HS = 0;
  int num_buckets = 0, rounds = 0;

  SLA_HOST_DEVICE int64_t to(int64_t row) const { return dst_rows != nullptr ? dst_rows[row * dst_rows_stride] : row; }
};

// What lsh_hash and lsh_sort say of whole sequences, for each head and round.
struct LshOrder {
  int* buckets = nullptr;          // (B * T, NH, rounds)
  float* inverse_norms = nullptr;  // (B * T, NH)
  int* order = nullptr;            // (B, NH, rounds, T): the positions by (bucket, position)
  int* starts = nullptr;           // (B, NH, rounds, buckets + 1): where each bucket begins in `order`, and T
};

// lsh_forward and lsh_backward. The gradient of k_j goes on into q_j's, but adds 0 to it where q_j = 0.
struct LshAttention {
  LshShape shape;
  const floatX* qv = nullptr;  // (B * T, 2 C)
  LshOrder of;
  floatX* out = nullptr;     // (B * T, C) =
  float* lse = nullptr;      // (B * T, NH) =: the natural log of the sum of the exponentials of a query's scores, and
                             // +inf of a query that sees itself alone, which has out = v
  float* scratch = nullptr;  // lsh_scratch(...) floats

  // These are used by the backward pass alone.
  const floatX* dout = nullptr;  // (B * T, C)
  floatX* dqv = nullptr;         // (B * T, 2 C) =
};

// One round of a head in a sequence: its positions in the order of their buckets.
struct LshRound {
  const LshAttention& a;
  int64_t b, head;
  int round;
  const int *order, *starts;

  SLA_HOST_DEVICE LshRound(const LshAttention& a, int64_t b, int64_t head, int round)
      : a(a), b(b), head(head), round(round) {
    const int64_t index = (b * a.shape.NH + head) * a.shape.rounds + round;
    order = a.of.order + index * a.shape.T, starts = a.of.starts + index * (a.shape.buckets + 1);
  }
  // For the i-th position in the order: its row; its place in lse and inverse_norms; its buckets in each round; where
  // its bucket begins and ends in the order.
  SLA_HOST_DEVICE int64_t row(int64_t i) const { return b * a.shape.T + order[i]; }
  SLA_HOST_DEVICE int64_t statistic(int64_t i) const { return row(i) * a.shape.NH + head; }
  SLA_HOST_DEVICE const int* buckets(int64_t i) const { return a.of.buckets + statistic(i) * a.shape.rounds; }
  SLA_HOST_DEVICE int bucket_start(int64_t i) const { return starts[buckets(i)[round]]; }
  SLA_HOST_DEVICE int bucket_end(int64_t i) const { return starts[buckets(i)[round] + 1]; }
};

// The scratch memory of the backward pass: rows of dq | dk | dv, each of C channels, without the factor 1 / sqrt(HS) of
// dq and dk; and rowsum(dout * out) of each head.
struct LshGradients {
  float* rows;   // (B * T, 3 C)
  float* delta;  // (B * T, NH)
  SLA_HOST_DEVICE explicit LshGradients(const LshAttention& a)
      : rows(a.scratch), delta(a.scratch + a.shape.rows() * 3 * a.shape.C()) {}
};

// The size of LshAttention::scratch, in floats: in the backward pass dq, dk and dv, (B * T, 3 C), and the sums of
// dout * out, (B * T, NH); in the forward pass the sums of the rounds so far, (B * T, C), take less.
inline int64_t lsh_scratch(const LshShape& s) { return s.rows() * (3 * s.C() + s.NH); }

// lsh_decode: out =. The last T - first_query positions of each sequence are queries; their rows of qv and `buckets`
// are in the cache already, as are the positions before them.
struct LshDecode {
  LshShape shape;  // T is the length of the longest sequence
  int64_t first_query = 0;
  const KeyRows* sequences = nullptr;  // (B), on the device; null: sequence b has T positions, from row b * T on
  const floatX* qv = nullptr;          // (rows of the cache, 2 C)
  const int* buckets = nullptr;        // (rows of the cache, NH, rounds)
  floatX* out = nullptr;               // (B * queries(), C)

  SLA_HOST_DEVICE int64_t queries() const { return shape.T - first_query; }
  SLA_HOST_DEVICE KeyRows keys_of(int64_t b) const {
    return sequences != nullptr ? sequences[b] : KeyRows{int(b * shape.T), int(shape.T)};
  }
};

// argmax([x R, -x R]) over columns of x R that come in order.
struct LshBucket {
  float largest = -INFINITY;
  int bucket = 0;

  SLA_HOST_DEVICE void consider(float product, int column, int columns) {
    const bool negative = product < 0;
    take(negative ? -product : product, negative ? column + columns : column);
  }
  // Between equal values the lower bucket wins.
  SLA_HOST_DEVICE void take(float value, int of) {
    if (value > largest || (value == largest && of < bucket)) largest = value, bucket = of;
  }
};

// How one round's result joins the result of the rounds before it: their outputs, each a weighted mean of values, get
// these factors. -inf is the lse of no key.
struct LshMerge {
  float before, now, lse;
};
SLA_HOST_DEVICE inline LshMerge merge_rounds(float before, float now) {
  const bool earlier = before > now;
  const float high = earlier ? before : now, low = earlier ? now : before;
  if (low == -INFINITY) return {earlier ? 1.0f : 0.0f, earlier ? 0.0f : 1.0f, high};
  const float e = expf(low - high), larger = 1.0f / (1.0f + e), smaller = e * larger;
  return {earlier ? larger : smaller, earlier ? smaller : larger, high + log1pf(e)};
}

// Whether two positions share a bucket in one of the rounds before `round`. a and b: the buckets of each, by round.
SLA_HOST_DEVICE inline bool share_earlier_bucket(const int* a, const int* b, int round) {
  for (int n = 0; n < round; n++)
    if (a[n] == b[n]) return true;
  return false;
}

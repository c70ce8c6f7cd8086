// What the kernels of attention by locality-sensitive hashing share in every precision. A block owns a tile of
// positions in the order of a round, queries or keys, which are rows of scores, and loops over tiles of others, which
// are their columns. Row i sees the columns of an interval: a query the keys from the start of its bucket to itself,
// and a key the queries after it to the end of its bucket. Of these it sees the ones with which it shares no bucket in
// an earlier round.
#pragma once
#include <cmath>
#include "llmc/ops/lsh.h"
#include "vec.h"

// N neighbouring channels, four or two, as floats.
template <int N, class Element>
__device__ inline void load_channels(float (&x)[N], const Element* p) {
  if constexpr (N == 4) load4(x, p);
  else load2(x, p);
}
template <int N, class Element>
__device__ inline void store_channels(Element* p, const float (&x)[N]) {
  if constexpr (N == 4) store4(p, x);
  else store2(p, x);
}

// Rows of one head, by position. In lsh_fma.h k's rows are normalized where they are loaded.
struct LshRows {
  const floatX* src;
  int64_t stride;
  bool normalized = false;
};
__device__ inline LshRows lsh_q(const LshRound& at) { return {at.a.qv + at.head * at.a.shape.HS, 2 * at.a.shape.C()}; }
__device__ inline LshRows lsh_v(const LshRound& at) {
  return {at.a.qv + at.a.shape.C() + at.head * at.a.shape.HS, 2 * at.a.shape.C()};
}
__device__ inline LshRows lsh_dout(const LshRound& at) { return {at.a.dout + at.head * at.a.shape.HS, at.a.shape.C()}; }

struct LshInterval {
  int begin = 0, end = 0;

  __device__ bool contains(int i) const { return begin <= i && i < end; }
};

// The keys that the query at place i of the order sees, and the queries that see the key; none from `end` on.
__device__ inline LshInterval keys_of_query(const LshRound& at, int i, int end) {
  return i < end ? LshInterval{at.bucket_start(i), i} : LshInterval{};
}
__device__ inline LshInterval queries_of_key(const LshRound& at, int i, int end) {
  return i < end ? LshInterval{i + 1, at.bucket_end(i)} : LshInterval{};
}

// Whether all rows and all columns share one bucket in an earlier round, so that there is nothing to compute. Called by
// a whole warp.
__device__ inline bool is_seen_before(const LshRound& at, LshInterval rows, LshInterval columns) {
  const int lane = int(threadIdx.x) % warp_size;
  for (int n = 0; n < at.round; n++) {
    const int bucket = at.buckets(rows.begin)[n];
    if (at.buckets(columns.begin)[n] != bucket) continue;
    bool same = true;
    for (int i = rows.begin + lane; i < rows.end; i += warp_size) same = same && at.buckets(i)[n] == bucket;
    for (int i = columns.begin + lane; i < columns.end; i += warp_size) same = same && at.buckets(i)[n] == bucket;
    if (__all_sync(full_warp, same)) return true;
  }
  return false;
}

// The first tile of Size columns, from the one at `column` on, with a column that a row may not have seen yet; `end` or
// more if there is none.
template <int Size>
__device__ inline int next_columns(const LshRound& at, LshInterval rows, int column, int end) {
  while (column < end && is_seen_before(at, rows, {column, min(column + Size, end)})) column += Size;
  return column;
}

// How the result of this round of a query joins those before it.
struct LshResult {
  const LshRound& at;
  int64_t row;
  LshMerge merged;

  // `lse`: the log of the sum of the exponentials of this round's scores, -inf of none. All lanes of the warp call it,
  // and those with `writes` write the new lse.
  __device__ LshResult(const LshRound& at, int i, bool exists, bool writes, float lse)
      : at(at), row(exists ? at.row(i) : 0), merged{} {
    float* of_query = at.a.lse + row * at.a.shape.NH + at.head;
    if (exists) merged = merge_rounds(at.round == 0 ? -INFINITY : *of_query, lse);
    __syncwarp();  // all lanes have read it
    if (exists && writes) *of_query = is_last() && merged.lse == -INFINITY ? INFINITY : merged.lse;
  }
  __device__ bool is_last() const { return at.round + 1 == at.a.shape.rounds; }

  // Channels [channel, channel + N) of the head, of the mean of values of this round x: into the scratch memory, or
  // after the last round into out.
  template <int N>
  __device__ void store(int channel, float (&x)[N]) const {
    const LshShape& s = at.a.shape;
    const int64_t C = s.C(), column = at.head * s.HS + channel;
    float before[N] = {};
    if (at.round > 0) load_channels(before, at.a.scratch + row * C + column);
    for (int c = 0; c < N; c++) x[c] = merged.before * before[c] + merged.now * x[c];
    if (!is_last()) return store_channels(at.a.scratch + row * C + column, x);
    if (merged.lse == -INFINITY) load_channels(x, at.a.qv + row * 2 * C + C + column);  // it sees itself alone
    store_channels(at.a.out + row * C + column, x);
  }
};

// x, of channels [channel, channel + N) of one head: part `part` of the gradients at a place of the order, dq (0), dk
// (1) or dv (2), which is = in the first round, and then +=.
template <int N>
__device__ inline void add_gradient(const LshRound& at, int place, int part, int channel, const float (&x)[N]) {
  const int64_t C = at.a.shape.C();
  float* to = LshGradients(at.a).rows + at.row(place) * 3 * C + part * C + at.head * at.a.shape.HS + channel;
  float sum[N] = {};
  if (at.round > 0) load_channels(sum, to);
  for (int c = 0; c < N; c++) sum[c] += x[c];
  store_channels(to, sum);
}

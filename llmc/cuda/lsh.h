// Attention by locality-sensitive hashing (llmc/ops/lsh.h has the formula, the shapes, and which outputs are =). Rounds
// are computed one after the other: in each of them positions are taken in the order of their buckets, a tile of them
// belongs to one block, and what it sees is an interval of the order (lsh_tiles.h). A round's result joins the earlier
// rounds', so that no sum depends on the order in which blocks run: the bits are always the same.
//
// HS is a multiple of 8 up to 128, and pointers are aligned to 16 bytes.
#pragma once
#include <climits>
#include <cmath>
#include "attention.h"
#include "lsh_decode.h"
#include "llmc/ops/lsh.h"
#include "llmc/base/error.h"
#include "vec.h"
#ifdef PRECISION_FP32
#include "lsh_fma.h"
#else
#include "lsh_mma.h"
#endif

inline void check_lsh(const LshShape& s) {
  CHECK(0 < s.HS && s.HS <= largest_head_size && s.HS % head_size_multiple == 0);
  CHECK(2 <= s.buckets && s.buckets <= lsh_most_buckets && s.buckets % 2 == 0 && 1 <= s.rounds &&
        s.rounds <= lsh_most_rounds);
  CHECK(0 < s.T && s.rows() <= largest_rows && s.B <= largest_batch && s.NH <= 65535);
}

// ----------------------------------------------------------------------------
// Buckets

// A block has 64 rows, a thread the products of four of them with four columns of R at a time.
constexpr int hash_rows = 64, hash_columns = 64, hash_lanes = 16, hash_threads = hash_rows / 4 * hash_lanes;
constexpr size_t hash_bytes = (hash_rows + hash_columns) * largest_head_size * sizeof(float);  // 64 KB, all of a T4's

// Where four channels from c on are in a row of x: neighbouring fours change places in every other four rows, so that
// the rows that a warp reads at once are on different banks.
__device__ inline int hash_place(int row, int c) { return row * largest_head_size + (c ^ (row & 4)); }

// sums (4 x 4) = four rows of x (rows, HS), from `first` on, times the thread's four columns of R (HS, hash_columns),
// in the order of channels.
__device__ inline void multiply_by_rotations(float (&sums)[4][4], const float* x, int first, const float* R, int HS) {
#pragma unroll 1
  for (int c = 0; c < HS; c += 4) {
    float q[4][4];
    for (int i = 0; i < 4; i++) load4(q[i], x + hash_place(first + i, c));
    for (int k = 0; k < 4; k++) {
      float r[4];
      load4(r, R + (c + k) * hash_columns);
      for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) sums[i][j] += q[i][k] * r[j];
    }
  }
}

// buckets =, inverse_norms =. A block owns 64 rows in one head and round, sixteen lanes four of them, a lane every
// sixteenth group of four columns of R: a row's bits depend on nothing else.
__global__ void __launch_bounds__(hash_threads, 2) lsh_hash_kernel(LshHash a) {
  const int HS = int(a.HS), head = int(blockIdx.y), round = int(blockIdx.z), columns = a.num_buckets / 2;
  const int lane = int(threadIdx.x) % hash_lanes, first = int(threadIdx.x) / hash_lanes * 4;
  const int64_t row0 = int64_t(blockIdx.x) * hash_rows;
  float *x = reinterpret_cast<float*>(shared_memory), *R_tile = x + hash_rows * largest_head_size;
  for (int i = int(threadIdx.x); i < hash_rows * HS / 8; i += hash_threads) {
    const int row = i / (HS / 8), channel = i % (HS / 8) * 8;
    float q[8] = {};
    if (row0 + row < a.N) load8(q, a.q + (row0 + row) * a.q_stride + head * a.HS + channel);
    store4(x + hash_place(row, channel), {q[0], q[1], q[2], q[3]});
    store4(x + hash_place(row, channel + 4), {q[4], q[5], q[6], q[7]});
  }
  const float* R = a.rotations + (int64_t(head) * a.rounds + round) * HS * columns;
  LshBucket best[4];
  for (int j0 = 0; j0 < columns; j0 += hash_columns) {
    __syncthreads();  // x has arrived, and all threads have read the tile of R before this one
    for (int i = int(threadIdx.x); i < HS * hash_columns; i += hash_threads) {
      const int column = j0 + i % hash_columns;
      R_tile[i] = column < columns ? R[i / hash_columns * columns + column] : 0.0f;
    }
    __syncthreads();
    float sums[4][4] = {};
    multiply_by_rotations(sums, x, first, R_tile + lane * 4, HS);
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 4; j++)
        if (const int column = j0 + lane * 4 + j; column < columns) best[i].consider(sums[i][j], column, columns);
  }
  for (int i = 0; i < 4; i++) {
    for (int offset = hash_lanes / 2; offset > 0; offset /= 2) {
      const float value = __shfl_xor_sync(full_warp, best[i].largest, offset);
      best[i].take(value, __shfl_xor_sync(full_warp, best[i].bucket, offset));
    }
    float square = 0;
    for (int c = lane; c < HS; c += hash_lanes) square += x[hash_place(first + i, c)] * x[hash_place(first + i, c)];
    square = warp_sum<hash_lanes>(square);
    if (lane != 0 || row0 + first + i >= a.N) continue;
    const int64_t to = a.to(row0 + first + i) * a.NH + head;
    a.buckets[to * a.rounds + round] = best[i].bucket;
    if (round == 0 && a.inverse_norms != nullptr) a.inverse_norms[to] = square > 0 ? 1.0f / sqrtf(square) : 0.0f;
  }
}

inline void lsh_hash(const LshHash& a) {
  CHECK(0 < a.HS && a.HS <= largest_head_size && a.HS % head_size_multiple == 0 && a.q_stride % 8 == 0);
  CHECK(2 <= a.num_buckets && a.num_buckets <= lsh_most_buckets && a.num_buckets % 2 == 0);
  CHECK(a.NH <= 65535 && 1 <= a.rounds && a.rounds <= lsh_most_rounds);
  if (a.N == 0) return;
  const dim3 grid(unsigned(ceil_div(a.N, hash_rows)), unsigned(a.NH), unsigned(a.rounds));
  launch(lsh_hash_kernel, grid, hash_threads, hash_bytes, a);
}

// ----------------------------------------------------------------------------
// Order

// How many groups of 32 positions a warp takes at a time. Each lane loads its buckets in all of them together, because
// the latency of these loads is what sorting takes.
constexpr int sort_depth = 8;

// The lanes whose bucket is this lane's, of `buckets` buckets; -1 is none.
__device__ inline unsigned lanes_of_bucket(int bucket, int buckets) {
  unsigned lanes = __ballot_sync(full_warp, bucket >= 0);
  for (int bit = 1; bit < buckets; bit *= 2) {
    const unsigned with_bit = __ballot_sync(full_warp, (bucket & bit) != 0);
    lanes &= (bucket & bit) != 0 ? with_bit : ~with_bit;
  }
  return lanes;
}

// f(position, bucket, the lanes that have the bucket) for every position, 32 neighbours at a time; bucket is -1 from T
// on. Called by a whole warp.
template <class F>
__device__ inline void for_each_bucket(const LshShape& s, const int* buckets, const F& f) {
  const int T = int(s.T), lane = int(threadIdx.x);
  const int64_t stride = s.NH * s.rounds;
  for (int t0 = 0; t0 < T; t0 += warp_size * sort_depth) {
    int loaded[sort_depth];
    for (int i = 0; i < sort_depth; i++) {
      const int t = t0 + i * warp_size + lane;
      loaded[i] = t < T ? buckets[t * stride] : -1;
    }
    for (int i = 0; i < sort_depth; i++) {
      f(t0 + i * warp_size + lane, loaded[i], lanes_of_bucket(loaded[i], s.buckets));
      __syncwarp();
    }
  }
}

// starts =, and next (buckets) = where the first position of each bucket goes, of how many there are in each.
__device__ inline void sum_counts(int* next, int* starts, const LshShape& s) {
  const int lane = int(threadIdx.x);
  int before = 0;
  for (int i0 = 0; i0 < s.buckets; i0 += warp_size) {
    const int i = i0 + lane, count = i < s.buckets ? next[i] : 0;
    int sum = count;  // of the lanes up to this one
    for (int offset = 1; offset < warp_size; offset *= 2) {
      const int other = __shfl_up_sync(full_warp, sum, unsigned(offset));
      if (lane >= offset) sum += other;
    }
    if (i < s.buckets) next[i] = starts[i] = before + sum - count;
    before += __shfl_sync(full_warp, sum, warp_size - 1);
  }
  if (lane == 0) starts[s.buckets] = before;
}

// order =, starts =. A warp owns a round of a head in a sequence: it counts the positions of each bucket, in shared
// memory, and gives each of them its place, in their order. Lanes with the same bucket count together.
__global__ void __launch_bounds__(warp_size) lsh_sort_kernel(LshShape s, LshOrder o) {
  const int lane = int(threadIdx.x);
  const int64_t index = (int64_t(blockIdx.z) * s.NH + blockIdx.y) * s.rounds + blockIdx.x;
  const int* buckets = o.buckets + (int64_t(blockIdx.z) * s.T * s.NH + blockIdx.y) * s.rounds + blockIdx.x;
  int *order = o.order + index * s.T, *next = reinterpret_cast<int*>(shared_memory);
  for (int i = lane; i < s.buckets; i += warp_size) next[i] = 0;
  __syncwarp();
  for_each_bucket(s, buckets, [&](int, int bucket, unsigned lanes) {
    if (bucket >= 0 && __ffs(int(lanes)) - 1 == lane) next[bucket] += __popc(lanes);
  });
  sum_counts(next, o.starts + index * (s.buckets + 1), s);
  __syncwarp();
  for_each_bucket(s, buckets, [&](int position, int bucket, unsigned lanes) {
    const int first = bucket >= 0 ? next[bucket] : 0;
    __syncwarp();  // all lanes have read it
    if (bucket < 0) return;
    order[first + __popc(lanes & ((1u << lane) - 1))] = position;
    if (__ffs(int(lanes)) - 1 == lane) next[bucket] = first + __popc(lanes);
  });
}

// order =, starts =, of whole sequences, from the buckets.
inline void lsh_sort(const LshShape& s, const LshOrder& o) {
  check_lsh(s);
  const dim3 grid(unsigned(s.rounds), unsigned(s.NH), unsigned(s.B));
  launch(lsh_sort_kernel, grid, warp_size, size_t(s.buckets) * sizeof(int), s, o);
}

// ----------------------------------------------------------------------------
// Attention

// out =, lse =.
inline void lsh_forward(const LshAttention& a) {
  check_lsh(a.shape);
  for (int round = 0; round < a.shape.rounds; round++) launch_lsh_forward(a, round);
}

// A warp owns a head of a row, a lane four of its channels.
constexpr int lsh_row_threads = 256;
struct LshRow {
  int64_t index, row, head;  // index: row * NH + head
  int channel;
  bool has_channels;

  __device__ explicit LshRow(const LshShape& s)
      : index((int64_t(blockIdx.x) * lsh_row_threads + threadIdx.x) / warp_size), row(index / s.NH), head(index % s.NH),
        channel(int(threadIdx.x) % warp_size * 4), has_channels(channel < int(s.HS)) {}
};

// delta =, before the rounds.
__global__ void __launch_bounds__(lsh_row_threads) lsh_delta_kernel(LshAttention a) {
  const LshRow at(a.shape);
  if (at.index >= a.shape.rows() * a.shape.NH) return;
  const int64_t first = at.index * a.shape.HS + at.channel;
  float dout[4] = {}, out[4] = {}, sum = 0;
  if (at.has_channels) load4(dout, a.dout + first), load4(out, a.out + first);
  for (int c = 0; c < 4; c++) sum += dout[c] * out[c];
  sum = warp_sum(sum);
  if (at.channel == 0) LshGradients(a).delta[at.index] = sum;
}

// dqv =, after the rounds. With n = 1 / |q|, k = n q adds n (dk - k (k . dk)) to q's gradient. A query
// that sees itself alone adds its gradient to its v's.
__global__ void __launch_bounds__(lsh_row_threads) lsh_dqv_kernel(LshAttention a, float scale) {
  const LshRow at(a.shape);
  const int64_t C = a.shape.C(), column = at.head * a.shape.HS + at.channel;
  if (at.index >= a.shape.rows() * a.shape.NH) return;
  const float n = a.of.inverse_norms[at.index];
  float k[4] = {}, dq[4], dk[4] = {}, dv[4], dout[4], along = 0;  // along: k . dk
  const float* gradients = LshGradients(a).rows + at.row * 3 * C + column;
  if (at.has_channels) load4(k, a.qv + at.row * 2 * C + column), load4(dk, gradients + C);
  for (int c = 0; c < 4; c++) k[c] *= n, along += k[c] * dk[c];
  along = warp_sum(along);
  if (!at.has_channels) return;
  load4(dq, gradients), load4(dv, gradients + 2 * C), load4(dout, a.dout + at.row * C + column);
  const bool alone = a.lse[at.index] == INFINITY;
  for (int c = 0; c < 4; c++) {
    dq[c] = scale * (dq[c] + n * (dk[c] - k[c] * along));
    if (alone) dv[c] += dout[c];
  }
  store4(a.dqv + at.row * 2 * C + column, dq);
  store4(a.dqv + at.row * 2 * C + C + column, dv);
}

// dqv =.
inline void lsh_backward(const LshAttention& a) {
  check_lsh(a.shape);
  const dim3 grid(unsigned(ceil_div(a.shape.rows() * a.shape.NH, lsh_row_threads / warp_size))), block(lsh_row_threads);
  launch(lsh_delta_kernel, grid, block, 0, a);
  for (int round = 0; round < a.shape.rounds; round++) launch_lsh_backward(a, round);
  launch(lsh_dqv_kernel, grid, block, 0, a, a.shape.score_scale());
}

// out =.
inline void lsh_decode(const LshDecode& a) {
  check_lsh(a.shape);
  CHECK(0 <= a.first_query && a.first_query < a.shape.T);
  const dim3 grid(unsigned(a.shape.B * a.queries()), unsigned(a.shape.NH));
  const size_t bytes = lsh_decode_warps * size_t(a.shape.HS + 2) * sizeof(float);
  launch(lsh_decode_kernel, grid, lsh_decode_threads, bytes, a, a.shape.score_scale());
}

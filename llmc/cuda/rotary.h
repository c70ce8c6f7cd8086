// Rotary positions: the operation of llmc/cpu/rotary.h; and the kernel of heads in place, which qknorm.h shares.
#pragma once
#include <cstdint>
#include "llmc/ops/qknorm.h"
#include "llmc/ops/rotary.h"
#include "llmc/ops/rows.h"
#include "vec.h"

constexpr int rotary_threads = 256;

// How many neighbouring lanes have a head, with eight channels each: a power of two, at most 16 for the 128 channels
// that a head has at most.
inline int lanes_of_head(int HS) {
  int lanes = 1;
  while (lanes * 8 < HS) lanes *= 2;
  return lanes;
}

// A lane has channels [i, i + 4) and [i + HS/2, i + HS/2 + 4) of a head of a row: both of each pair that is rotated.
struct LaneOfHead {
  int64_t group, row;  // of the heads of all rows
  int head, i;
  bool has_channels;

  __device__ LaneOfHead(const RotaryHeads& r, int64_t groups, int lanes) {
    const int64_t thread = int64_t(blockIdx.x) * rotary_threads + threadIdx.x;
    group = thread / lanes, i = int(thread % lanes) * 4;
    row = group / r.heads, head = int(group % r.heads);
    has_channels = group < groups && i < r.HS / 2;
  }
  __device__ int64_t place(int64_t stride, int HS) const { return row * stride + head * HS + i; }
};

__device__ inline float sum_of_lanes(float x, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(full_warp, x, offset);
  return x;
}

__device__ inline const float* angles_of(const RotaryHeads& r, const RowPositions& positions, const LaneOfHead& lane) {
  return r.table == nullptr ? nullptr : r.table + (positions[lane.row] * (r.HS / 2) + lane.i) * 2;
}

// Rotates the pairs (a_j, b_j) by the angles times `sign`.
__device__ inline void turn_pairs(float (&a)[4], float (&b)[4], const float* angles, float sign) {
  for (int j = 0; j < 4; j++) {
    const float x = a[j], c = angles[2 * j], s = angles[2 * j + 1] * sign;
    a[j] = x * c - b[j] * s;
    b[j] = b[j] * c + x * s;
  }
}

// Rotates heads in place, by the angles of r.table (null: not at all). With `norms` (qknorm.h) each is first divided by
// its root mean square, whose inverse is rstd (rows, heads), unless that is null.
template <bool norms>
__global__ void __launch_bounds__(rotary_threads)
    turn_heads_kernel(RotaryHeads r, float* rstd, RowPositions positions, int64_t groups, int lanes, float sign) {
  const LaneOfHead lane(r, groups, lanes);
  floatX* first = r.x + lane.place(r.stride, r.HS);
  float a[4] = {}, b[4] = {}, squares = 0, scale = 1;
  if (lane.has_channels) load4(a, first), load4(b, first + r.HS / 2);
  for (int j = 0; j < 4; j++) squares += a[j] * a[j] + b[j] * b[j];
  if (norms) scale = rsqrtf(sum_of_lanes(squares, lanes) / float(r.HS) + qknorm_eps);
  if (!lane.has_channels) return;
  if (rstd != nullptr && lane.i == 0) rstd[lane.group] = scale;
  for (int j = 0; j < 4; j++) a[j] *= scale, b[j] *= scale;
  if (const float* angles = angles_of(r, positions, lane)) turn_pairs(a, b, angles, sign);
  store4(first, a);
  store4(first + r.HS / 2, b);
}

template <class Kernel, class Kept, class... Sign>
void launch_by_heads(Kernel kernel, const RotaryHeads& r, const Kept& kept, const RowPositions& positions, int64_t N,
                     Sign... sign) {
  const int lanes = lanes_of_head(r.HS);
  const int64_t groups = N * r.heads;
  launch(kernel, blocks_of(groups * lanes, rotary_threads), rotary_threads, 0, r, kept, positions, groups, lanes,
         sign...);
}

inline void rotate(const RotaryHeads& r, const RowPositions& positions, int64_t N, float sign = 1) {
  launch_by_heads(turn_heads_kernel<false>, r, static_cast<float*>(nullptr), positions, N, sign);
}

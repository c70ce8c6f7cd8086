// Rotary positions: the operation of llmc/cpu/rotary.h.
#pragma once
#include <cstdint>
#include "llmc/ops/rotary.h"
#include "llmc/ops/rows.h"
#include "vec.h"

constexpr int rotary_threads = 256;

// Rotates the pairs (a_j, b_j) by the angles times `sign`.
__device__ inline void turn_pairs(float (&a)[4], float (&b)[4], const float* angles, float sign) {
  for (int j = 0; j < 4; j++) {
    const float x = a[j], c = angles[2 * j], s = angles[2 * j + 1] * sign;
    a[j] = x * c - b[j] * s;
    b[j] = b[j] * c + x * s;
  }
}

// A thread owns four pairs of elements of a head in one row: neighbouring threads read and write neighbouring elements.
// Angles are multiplied by `sign`.
__global__ void __launch_bounds__(rotary_threads)
    rotate_kernel(RotaryHeads r, RowPositions positions, int64_t groups, float sign) {
  const int64_t group = int64_t(blockIdx.x) * rotary_threads + threadIdx.x;
  if (group >= groups) return;
  const int half = r.HS / 2, of_head = half / 4, of_row = r.heads * of_head;
  const int64_t n = group / of_row;
  const int in_row = int(group % of_row), head = in_row / of_head, i = in_row % of_head * 4;
  const float* angles = r.table + (positions[n] * half + i) * 2;
  floatX* first = r.x + n * r.stride + head * r.HS + i;
  float a[4], b[4];
  load4(a, first);
  load4(b, first + half);
  turn_pairs(a, b, angles, sign);
  store4(first, a);
  store4(first + half, b);
}

inline void rotate(const RotaryHeads& r, const RowPositions& positions, int64_t N, float sign = 1) {
  const int64_t groups = N * r.heads * (r.HS / 8);  // head sizes are multiples of 8
  launch(rotate_kernel, blocks_of(groups, rotary_threads), rotary_threads, 0, r, positions, groups, sign);
}

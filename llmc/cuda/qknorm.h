// QK-norm: the operations of llmc/cpu/qknorm.h.
#pragma once
#include <cstdint>
#include "llmc/ops/qknorm.h"
#include "llmc/ops/rotary.h"
#include "llmc/ops/rows.h"
#include "rotary.h"
#include "vec.h"

__global__ void __launch_bounds__(rotary_threads)
    norm_heads_backward_kernel(RotaryHeads d, HeadNorm norm, RowPositions positions, int64_t groups, int lanes) {
  const LaneOfHead lane(d, groups, lanes);
  const int half = d.HS / 2;
  floatX* first = d.x + lane.place(d.stride, d.HS);
  const floatX* out = norm.out + lane.place(norm.stride, d.HS);
  float a[4] = {}, b[4] = {}, ya[4] = {}, yb[4] = {}, dot = 0;
  if (lane.has_channels) load4(a, first), load4(b, first + half), load4(ya, out), load4(yb, out + half);
  for (int j = 0; j < 4; j++) dot += a[j] * ya[j] + b[j] * yb[j];
  const float mean = sum_of_lanes(dot, lanes) / float(d.HS);
  if (!lane.has_channels) return;
  const float scale = norm.rstd[lane.group];
  for (int j = 0; j < 4; j++) a[j] = scale * (a[j] - ya[j] * mean), b[j] = scale * (b[j] - yb[j] * mean);
  if (const float* angles = angles_of(d, positions, lane)) turn_pairs(a, b, angles, -1.0f);
  store4(first, a);
  store4(first + half, b);
}

inline void norm_heads(const RotaryHeads& r, float* rstd, const RowPositions& positions, int64_t N) {
  launch_by_heads(turn_heads_kernel<true>, r, rstd, positions, N, 1.0f);
}

inline void norm_heads_backward(const RotaryHeads& d, const HeadNorm& norm, const RowPositions& positions, int64_t N) {
  launch_by_heads(norm_heads_backward_kernel, d, norm, positions, N);
}

// QK-norm (Henry et al. 2020): with r = 1 / sqrt(mean(x^2) + eps) over a head's channels
//
//   norm_heads:           y = r x
//   norm_heads_backward:  dx = r (dy - y mean(dy y))
//
// in place. Where there is a table of angles, the pass of rotary positions (rotary.h) is part of both: y is rotated,
// and dx is rotated back, for which the mean of the rotated dy y is the same.
#pragma once
#include <cstdint>
#include "llmc/ops/precision.h"

constexpr float qknorm_eps = 1e-6f;

// What is kept of heads that have been normed.
struct HeadNorm {
  float* rstd = nullptr;        // (rows, heads): r; null in generation, which has no backward pass
  const floatX* out = nullptr;  // (rows, heads, HS), rows `stride` apart: y
  int64_t stride = 0;
};

// Rotary positions: the operation of llmc/cpu/rotary.h.
#pragma once
#include <cstdint>
#include "llmc/ops/rotary.h"
#include "llmc/ops/rows.h"
#include "qknorm.h"

inline void rotate(const RotaryHeads& r, const RowPositions& positions, int64_t N, float sign = 1) {
  launch_by_heads(turn_heads_kernel<false>, r, static_cast<float*>(nullptr), positions, N, sign);
}

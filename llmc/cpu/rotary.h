// Rotary positions (llmc/ops/rotary.h).
#pragma once
#include <cstdint>
#include "llmc/ops/precision.h"
#include "llmc/ops/rotary.h"
#include "llmc/ops/rows.h"
#include "threads.h"
#include "vec.h"

// For each head of N rows, whose channels begin at x: x_i = value_of(row, head)(i), rotated by the angles of the row's
// position, times `sign`, where the table is not null.
template <class ValueOf>
void set_rotated_heads(const RotaryHeads& r, const RowPositions& positions, int64_t N, float sign, ValueOf value_of) {
#pragma omp parallel for schedule(static) if (is_worth_threads(2 * int64_t(sizeof(floatX)) * N * r.heads * r.HS))
  for (int64_t n = 0; n < N; n++) {
    for (int head = 0; head < r.heads; head++) {
      floatX* x = r.x + n * r.stride + head * r.HS;
      const auto value = value_of(n, head);
      const int half = r.HS / 2;
      if (r.table == nullptr) {
#pragma omp simd
        for (int i = 0; i < r.HS; i++) from_float(x[i], value(i));
        continue;
      }
      const float* angles = r.table + positions[n] * r.HS;
#pragma omp simd
      for (int i = 0; i < half; i++) {
        const float a = value(i), b = value(i + half), c = angles[2 * i], s = angles[2 * i + 1] * sign;
        from_float(x[i], a * c - b * s);
        from_float(x[i + half], b * c + a * s);
      }
    }
  }
}

// Rotates each head of N rows in place. With a_i the i-th angle of the row's position, times `sign`:
// (x_i, x_(i+HS/2)) = (x_i cos a_i - x_(i+HS/2) sin a_i,  x_(i+HS/2) cos a_i + x_i sin a_i). The sign -1 turns the
// gradient of the rotated heads into the gradient of the heads before.
inline void rotate(const RotaryHeads& r, const RowPositions& positions, int64_t N, float sign = 1) {
  set_rotated_heads(r, positions, N, sign, [=](int64_t n, int head) {
    const floatX* x = r.x + n * r.stride + head * r.HS;
    return [=](int i) { return to_float(x[i]); };
  });
}

// Rotary positions (llmc/rotary.h).
#pragma once
#include <cstdint>           // int64_t
#include "llmc/precision.h"  // floatX
#include "llmc/rotary.h"     // RotaryHeads
#include "threads.h"         // is_worth_threads
#include "vec.h"             // to_float, from_float

// Rotates each head of B sequences of T rows in place. With a_i the i-th angle of the row's position, times `sign`:
// (x_i, x_(i+HS/2)) = (x_i cos a_i - x_(i+HS/2) sin a_i,  x_(i+HS/2) cos a_i + x_i sin a_i).
inline void rotate_rows(const RotaryHeads<floatX>& r, int64_t B, int64_t T, int64_t first_position, float sign) {
  const int half = r.HS / 2;
#pragma omp parallel for schedule(static) if (is_worth_threads(2 * int64_t(sizeof(floatX)) * B * T * r.heads * r.HS))
  for (int64_t n = 0; n < B * T; n++) {
    const float* angles = r.table + (first_position + n % T) * r.HS;
    for (int head = 0; head < r.heads; head++) {
      floatX* x = r.x + n * r.stride + head * r.HS;
#pragma omp simd
      for (int i = 0; i < half; i++) {
        const float a = to_float(x[i]), b = to_float(x[i + half]), c = angles[2 * i], s = angles[2 * i + 1] * sign;
        from_float(x[i], a * c - b * s);
        from_float(x[i + half], b * c + a * s);
      }
    }
  }
}

// x (B T, heads, HS), in place: row (b, t) is rotated as position first_position + t.
inline void rotate(const RotaryHeads<floatX>& r, int64_t B, int64_t T, int64_t first_position) {
  rotate_rows(r, B, T, first_position, 1.0f);
}

// x (B T, heads, HS), in place: from the gradient of rotate's output, with first_position 0, that of its input.
inline void rotate_back(const RotaryHeads<floatX>& r, int64_t B, int64_t T) { rotate_rows(r, B, T, 0, -1.0f); }

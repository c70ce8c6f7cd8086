// QK-norm (llmc/ops/qknorm.h).
#pragma once
#include <cmath>
#include <cstdint>
#include "llmc/ops/qknorm.h"
#include "llmc/ops/rotary.h"
#include "llmc/ops/rows.h"
#include "rotary.h"
#include "vec.h"

// x (N, heads, HS), in place; rstd (N, heads) = unless it is null.
inline void norm_heads(const RotaryHeads& r, float* rstd, const RowPositions& positions, int64_t N) {
  set_rotated_heads(r, positions, N, 1.0f, [=](int64_t n, int head) {
    const floatX* x = r.x + n * r.stride + head * r.HS;
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < r.HS; i++) squares += to_float(x[i]) * to_float(x[i]);
    const float scale = 1.0f / std::sqrt(squares / float(r.HS) + qknorm_eps);
    if (rstd != nullptr) rstd[n * r.heads + head] = scale;
    return [=](int i) { return to_float(x[i]) * scale; };
  });
}

// d (N, heads, HS), in place: the gradient of norm_heads' output becomes the gradient of its input.
inline void norm_heads_backward(const RotaryHeads& d, const HeadNorm& norm, const RowPositions& positions, int64_t N) {
  set_rotated_heads(d, positions, N, -1.0f, [=](int64_t n, int head) {
    const floatX *dy = d.x + n * d.stride + head * d.HS, *y = norm.out + n * norm.stride + head * d.HS;
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int i = 0; i < d.HS; i++) dot += to_float(dy[i]) * to_float(y[i]);
    const float mean = dot / float(d.HS), rstd = norm.rstd[n * d.heads + head];
    return [=](int i) { return rstd * (to_float(dy[i]) - to_float(y[i]) * mean); };
  });
}

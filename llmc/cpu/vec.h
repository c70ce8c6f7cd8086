// Conversions and elementary functions as straight-line code that the compiler turns into vector instructions inside `omp simd` loops.
#pragma once
#include <cstdint>  // int32_t
#include <cstring>  // memcpy
#include "bf16.h"   // to_float and from_float of bf16

// For code that is written over float and bf16: nothing to convert.
inline float to_float(float x) { return x; }
inline void from_float(float& y, float x) { y = x; }

// exp(x), relative error below 3e-7; 0 below -87.3, inf above 88.7; NaN stays NaN. x = n ln 2 + r, |r| <= ln 2 / 2, with ln 2
// in two parts so that r is exact, and a degree-6 Taylor polynomial for exp(r).
inline float vec_exp(float x) {
  float clamped = x > 88.72f ? 88.72f : x;
  clamped = clamped < -87.33f ? -87.33f : clamped;
  float shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the addition rounds to an integer
  float n = shifted - 12582912.0f;
  float r = clamped - n * 0.693145751953125f;           // the upper 16 bits of ln 2
  r = r - n * 1.42860677e-6f;
  float p = 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // 2^n in two factors: n = 128 has no exponent of its own.
  int32_t k = int32_t(n), half = k >> 1;
  int32_t bits0 = (half + 127) << 23, bits1 = (k - half + 127) << 23;
  float scale0, scale1;
  memcpy(&scale0, &bits0, 4);
  memcpy(&scale1, &bits1, 4);
  float y = p * scale0 * scale1;
  y = x < -87.33f ? 0.0f : y;
  return x > 88.72f ? x * 3e38f : y;  // +inf
}

// 1 / (1 + exp(-x)).
inline float vec_sigmoid(float x) { return 1.0f / (1.0f + vec_exp(-x)); }

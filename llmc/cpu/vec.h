// Conversions and elementary functions as straight-line code that the compiler turns into vector instructions inside
// `omp simd` loops.
#pragma once
#include <cstdint>  // uint32_t
#include <cstring>  // memcpy
#include "bf16.h"   // to_float and from_float of bf16

// Code that is written for both float and bf16 calls these; for float there is nothing to convert.
inline float to_float(float x) { return x; }
inline void from_float(float& y, float x) { y = x; }

// exp(x), relative error below 3e-7; 0 below -87.33, inf above 88.72; NaN stays NaN. x = n ln 2 + r, |r| <= ln 2 / 2,
// with ln 2 in two parts so that r is exact, and a degree-6 Taylor polynomial for exp(r). Outside those limits what is
// computed means nothing, and is not what is returned.
inline float vec_exp(float x) {
  // Adding 1.5 * 2^23 rounds to an integer, which is in the lowest bits.
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  float r = x - n * 0.693145751953125f;  // the upper 16 bits of ln 2
  r = r - n * 1.42860677e-6f;
  float p = 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // p 2^n, by adding n to the exponent. n = 128, whose power of two is no float, comes with p < 1.
  uint32_t n_bits, bits;
  memcpy(&n_bits, &shifted, 4);
  memcpy(&bits, &p, 4);
  bits += n_bits << 23;
  float y;
  memcpy(&y, &bits, 4);
  y = x < -87.33f ? 0.0f : y;
  return x <= 88.72f ? y : x * 3e38f;  // +inf, or NaN
}

// 1 / (1 + exp(-x)).
inline float vec_sigmoid(float x) { return 1.0f / (1.0f + vec_exp(-x)); }

// tanh(x), relative error below 4e-7: for |x| < 0.5 the first terms of its series, beyond (1 - e) / (1 + e) with
// e = exp(-2 |x|), which near 0 would lose digits.
inline float vec_tanh(float x) {
  const float square = x * x, e = vec_exp(-2.0f * (x < 0.0f ? -x : x)), far = (1.0f - e) / (1.0f + e);
  float p = 21844.0f / 6081075;
  p = p * square - 1382.0f / 155925;
  p = p * square + 62.0f / 2835;
  p = p * square - 17.0f / 315;
  p = p * square + 2.0f / 15;
  p = p * square - 1.0f / 3;
  const float near = x + x * square * p;
  return square < 0.25f ? near : x < 0.0f ? -far : far;
}

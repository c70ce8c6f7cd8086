// Conversions and elementary functions as straight-line code that the compiler turns into vector instructions inside
// `omp simd` loops.
#pragma once
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#include <cstdint>
#include <cstring>
#include "bf16.h"

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

// places = the i, ascending, of those of n floats x that are not <= limit: that are higher, or NaN. Returns how many.
// `places` has room for n + 15.
inline int64_t places_above(const float* x, int64_t n, float limit, int* places) {
  int64_t count = 0;
#ifdef __AVX512F__
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 exist = n - i >= 16 ? __mmask16(0xffff) : __mmask16((1 << (n - i)) - 1);
    const __mmask16 found =
        _mm512_mask_cmp_ps_mask(exist, _mm512_maskz_loadu_ps(exist, x + i), _mm512_set1_ps(limit), _CMP_NLE_UQ);
    if (found == 0) continue;  // most vectors have none
    _mm512_storeu_si512(places + count,
                        _mm512_maskz_compress_epi32(found, _mm512_add_epi32(lanes, _mm512_set1_epi32(int(i)))));
    count += __builtin_popcount(found);
  }
#else
  for (int64_t i = 0; i < n; i++) places[count] = int(i), count += !(x[i] <= limit);
#endif
  return count;
}

// A whole number for each float: higher for higher ones, and the same for 0 and -0.
inline uint32_t rank_of(float x) {
  uint32_t bits;
  x += 0.0f;  // -0 + 0 is 0
  memcpy(&bits, &x, 4);
  return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}
inline float float_of_rank(uint32_t rank) {
  const uint32_t bits = rank ^ (rank >> 31 != 0 ? 0x80000000u : 0xffffffffu);
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Conversions and elementary functions as straight-line code that the compiler turns into vector instructions inside
// `omp simd` loops; and registers of floats, for loops that are written out.
#pragma once
#ifdef __AVX2__
#include <immintrin.h>
#endif
#include <cstdint>
#include <cstring>
#include "llmc/ops/bf16.h"

// Code that is written for both float and bf16 calls these; for float there is nothing to convert.
inline float to_float(float x) { return x; }
inline void from_float(float& y, float x) { y = x; }

// A register of floats. Loops over them are written out where the compiler's own are slow: it keeps the sums of a loop
// over several of them in memory, and computes the elements after the last whole register one by one, which in rows of
// a hundred are most of the time. Loads and stores take a count of the elements that there are, which may be more than
// a register has, or negative. What has registers as arguments is always inlined: files of a program that are compiled
// for different CPUs have registers of different widths.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define SLA_AVX512
constexpr int64_t vector_width = 16;
#else
constexpr int64_t vector_width = 8;
#endif
#define SLA_INLINE __attribute__((always_inline)) inline
typedef float FloatVector __attribute__((vector_size(4 * vector_width)));
typedef uint32_t WordVector __attribute__((vector_size(4 * vector_width)));
typedef uint16_t HalfVector __attribute__((vector_size(2 * vector_width)));

SLA_INLINE FloatVector load_vector(const float* x) {
  FloatVector floats;
  memcpy(&floats, x, sizeof floats);
  return floats;
}
SLA_INLINE FloatVector load_vector(const bfloat16* x) {
  HalfVector halves;
  memcpy(&halves, x, sizeof halves);
  return FloatVector(__builtin_convertvector(halves, WordVector) << 16);
}
SLA_INLINE void store_vector(float* x, FloatVector floats) { memcpy(x, &floats, sizeof floats); }
SLA_INLINE void store_vector(bfloat16* x, FloatVector floats) {
#ifdef __AVX512BF16__
  const __m256bh halves = _mm512_cvtneps_pbh(__m512(floats));
#else
  const WordVector bits = WordVector(floats), rounded = bits + 0x7fff + (bits >> 16 & 1), quiet_nan = bits | 0x400000;
  const HalfVector halves = __builtin_convertvector((floats != floats ? quiet_nan : rounded) >> 16, HalfVector);
#endif
  memcpy(x, &halves, sizeof halves);
}

// The lanes of so many elements.
#ifdef SLA_AVX512
SLA_INLINE __mmask16 first_lanes(int64_t count) {
  return __mmask16(count >= 16 ? 0xffff : (1 << (count > 0 ? count : 0)) - 1);
}
#elif defined(__AVX2__)
SLA_INLINE __m256i first_lanes(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif
// The elements from x on, and `rest` where there is none.
template <class T>
SLA_INLINE FloatVector load_vector(const T* x, int64_t count, float rest = 0) {
  if (count >= vector_width) return load_vector(x);
  FloatVector floats = FloatVector{} + rest;
  if constexpr (sizeof(T) == 4) {
#ifdef SLA_AVX512
    return FloatVector(_mm512_mask_loadu_ps(__m512(floats), first_lanes(count), x));
#elif defined(__AVX2__)
    const __m256i lanes = first_lanes(count);
    return FloatVector(_mm256_blendv_ps(__m256(floats), _mm256_maskload_ps(x, lanes), __m256(lanes)));
#endif
  }
  for (int64_t i = 0; i < count; i++) floats[i] = to_float(x[i]);
  return floats;
}
template <class T>
SLA_INLINE void store_vector(T* x, FloatVector floats, int64_t count) {
  if (count >= vector_width) return store_vector(x, floats);
  T all[vector_width];
  store_vector(all, floats);
#ifdef SLA_AVX512
  if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_ps(x, first_lanes(count), __m512(floats));
  else return _mm256_mask_storeu_epi16(x, first_lanes(count), _mm256_loadu_si256(reinterpret_cast<__m256i*>(all)));
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return _mm256_maskstore_ps(x, first_lanes(count), __m256(floats));
#endif
  for (int64_t i = 0; i < count; i++) x[i] = all[i];
}

// Calls f(j, how many) for each register of `count` elements.
template <class F>
SLA_INLINE void for_each_vector(int64_t count, const F& f) {
  int64_t j = 0;
  for (; j + vector_width <= count; j += vector_width) f(j, vector_width);
  if (j < count) f(j, count - j);
}

// Joins all of a register's floats by combine(a, b): neighbours first, then the neighbouring results.
template <class Combine>
SLA_INLINE float reduce(FloatVector x, const Combine& combine) {
  float lanes[vector_width];
  store_vector(lanes, x);
  for (int64_t half = vector_width / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; i++) lanes[i] = combine(lanes[2 * i], lanes[2 * i + 1]);
  return lanes[0];
}
SLA_INLINE float sum_of(FloatVector x) {
  return reduce(x, [](float a, float b) { return a + b; });
}
SLA_INLINE float highest_of(FloatVector x) {
  return reduce(x, [](float a, float b) { return b > a ? b : a; });
}

// exp(x), relative error below 3e-7; 0 below -87.33, inf above 88.72; NaN stays NaN. x = n ln 2 + r, |r| <= ln 2 / 2,
// with ln 2 in two parts so that r is exact, and a degree-6 Taylor polynomial for exp(r). Outside those limits the
// polynomial means nothing, and is not returned.
template <class Floats, class Words>
SLA_INLINE Floats exp_of(Floats x) {
  // Adding 1.5 * 2^23 rounds to an integer, which is in the lowest bits.
  const Floats shifted = x * 1.44269504f + 12582912.0f;
  const Floats n = shifted - 12582912.0f;
  Floats r = x - n * 0.693145751953125f;  // the upper 16 bits of ln 2
  r = r - n * 1.42860677e-6f;
  Floats p = r * (1.0f / 720) + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // p 2^n, by adding n to the exponent. n = 128, whose power of two is no float, comes with p < 1.
  Words n_bits, bits;
  memcpy(&n_bits, &shifted, sizeof n_bits);
  memcpy(&bits, &p, sizeof bits);
  bits += n_bits << 23;
  Floats y;
  memcpy(&y, &bits, sizeof y);
  y = x < -87.33f ? Floats{} : y;
  return x <= 88.72f ? y : x * 3e38f;  // +inf, or NaN
}
inline float vec_exp(float x) { return exp_of<float, uint32_t>(x); }
SLA_INLINE FloatVector vec_exp(FloatVector x) { return exp_of<FloatVector, WordVector>(x); }

// 1 / (1 + exp(-x)).
template <class Floats>
SLA_INLINE Floats vec_sigmoid(Floats x) {
  return 1.0f / (1.0f + vec_exp(-x));
}

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

// places = the indices i, ascending, where x (n floats) is not <= limit: is higher, or NaN. Returns how many there are.
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

// sums (columns) += the sums over `rows` of partial (rows, columns), in double: large terms may cancel.
inline void add_column_sums(float* sums, const float* partial, int64_t rows, int64_t columns) {
  for (int64_t column = 0; column < columns; column++) {
    double sum = 0;
    for (int64_t row = 0; row < rows; row++) sum += partial[row * columns + column];
    sums[column] += float(sum);
  }
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

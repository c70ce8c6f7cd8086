// bfloat16 on the CPU, where there is no cuda_bf16.h. Shifts and integer additions, which the compiler turns into vector instructions of any
// CPU: conversions need no instruction for bf16.
#pragma once
#include <cstdint>  // uint16_t, uint32_t
#include <cstring>  // memcpy

// The upper half of a float: 1 sign bit, 8 of exponent, 7 of mantissa. Uninitialised by default, like a float.
struct bfloat16 {
  uint16_t bits;

  bfloat16() = default;
  inline bfloat16(float x);
  inline operator float() const;
};

inline float to_float(bfloat16 x) {
  const uint32_t u = uint32_t(x.bits) << 16;
  float y;
  memcpy(&y, &u, sizeof y);
  return y;
}

// y = x, rounded to the nearest, ties to even. NaN becomes the one that GPUs write; to round it like a number could make it infinite.
// To be used in loops: the compiler does not vectorise copies of structs, such as y = bfloat16(x).
inline void from_float(bfloat16& y, float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  u += 0x7fff + (u >> 16 & 1);
  u = x != x ? 0x7fff0000 : u;
  y.bits = uint16_t(u >> 16);
}

inline bfloat16::bfloat16(float x) { from_float(*this, x); }
inline bfloat16::operator float() const { return to_float(*this); }

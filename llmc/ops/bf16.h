// bfloat16 on the CPU, where there is no cuda_bf16.h. Conversions are shifts and integer additions, which the compiler
// turns into vector instructions of any CPU: they need no instruction for bf16.
#pragma once
#include <cstdint>
#include "llmc/base/bf16_bits.h"

// The upper half of a float: 1 sign bit, 8 of exponent, 7 of mantissa. Uninitialised by default, like a float.
struct bfloat16 {
  uint16_t bits;

  bfloat16() = default;
  bfloat16(float x) : bits(bf16_from_float(x)) {}
  operator float() const { return float_from_bf16(bits); }
};

// Conversions for vectorised loops, in place of x and y = bfloat16(x): the compiler does not vectorise copies of
// structs.
inline float to_float(bfloat16 x) { return float_from_bf16(x.bits); }
inline void from_float(bfloat16& y, float x) { y.bits = bf16_from_float(x); }

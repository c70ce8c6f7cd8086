// A stand-in for CUDA's cuda_fp16.h: the type and its conversions.
#pragma once
#include "../ptx/floats.h"
#include "emu_device.h"

// IEEE's binary16: 1 sign bit, 5 of exponent, 10 of mantissa; 65504 is the largest. Uninitialised by default, as the
// real one. Rounded to the nearest, ties to even; NaN becomes the GPU's canonical one.
struct alignas(2) __half {
  unsigned short bits;

  __half() = default;
  __half(float x) : bits(emu::ptx::f16_of_float(x)) {}
  operator float() const { return emu::ptx::float_of_f16(bits); }
};

inline __half __float2half_rn(float x) { return __half(x); }
inline float __half2float(__half x) { return float(x); }

// Two of them in one register, the first in its lower half.
struct alignas(4) __half2 {
  __half x, y;
};
inline __half2 __floats2half2_rn(float a, float b) { return {a, b}; }
inline float2 __half22float2(__half2 two) { return make_float2(two.x, two.y); }

// A stand-in for CUDA's cuda_bf16.h: the type and its conversions.
#pragma once
#include "emu_device.h"

// The upper half of a float: 1 sign bit, 8 of exponent, 7 of mantissa. Uninitialised by default, as the real one.
struct alignas(2) __nv_bfloat16 {
  unsigned short bits;

  __nv_bfloat16() = default;

  // Rounds to the nearest, ties to even. Rounding is an integer addition, which would carry a NaN's mantissa into
  // infinity: a NaN becomes the GPU's canonical one.
  __nv_bfloat16(float x) {
    const uint32_t u = emu::bit_cast<uint32_t>(x);
    bits = std::isnan(x) ? 0x7fff : static_cast<unsigned short>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }

  operator float() const { return emu::bit_cast<float>(uint32_t(bits) << 16); }
};

inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return float(x); }

// Two of them in one register, the first in its lower half.
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {a, b}; }

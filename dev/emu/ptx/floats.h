// Floats of 16 bits, and the bits of floats.
#pragma once
#include <cstdint>
#include <cstring>

namespace emu::ptx {

template <class To, class From>
inline To as(From bits) {
  static_assert(sizeof(To) == sizeof(From), "the same bits in another type");
  To to;
  memcpy(&to, &bits, sizeof to);
  return to;
}

inline float float_of_bf16(uint16_t x) { return as<float>(uint32_t(x) << 16); }

// Rounded to the nearest, ties to even; NaN is 0x7fff.
inline uint16_t bf16_of_float(float x) {
  const uint32_t bits = as<uint32_t>(x);
  return x != x ? uint16_t(0x7fff) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// With the exponent moved by a multiplication, which makes subnormal numbers right, too; infinities and NaNs are beyond
// its range.
inline float float_of_f16(uint16_t x) {
  const float magnitude = as<float>(uint32_t(x & 0x7fff) << 13) * 0x1p112f;
  const uint32_t special = (x & 0x7c00) == 0x7c00 ? 0x7f800000u : 0;
  return as<float>(as<uint32_t>(magnitude) | special | uint32_t(x & 0x8000) << 16);
}

// Rounded to the nearest, ties to even; NaN is 0x7fff.
inline uint16_t f16_of_float(float x) {
  const uint32_t bits = as<uint32_t>(x), sign = bits >> 16 & 0x8000;
  const float magnitude = as<float>(bits & 0x7fffffff);
  uint32_t f16;
  if (magnitude != magnitude) return 0x7fff;
  if (magnitude >= 0x1.ffep15f) f16 = 0x7c00;                                         // 65520 and more
  else if (magnitude < 0x1p-14f) f16 = as<uint32_t>(magnitude + 0.5f) - 0x3f000000u;  // the sum rounds to 2^-24
  else f16 = (as<uint32_t>(magnitude) - 0x38000000u + 0xfff + (bits >> 13 & 1)) >> 13;
  return uint16_t(sign | f16);
}

}  // namespace emu::ptx

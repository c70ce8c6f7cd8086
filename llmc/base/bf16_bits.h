// bf16 as 16 bits: the upper half of a float.
#pragma once
#include <cstdint>
#include <cstring>

inline float float_from_bf16(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

// The nearest bf16; ties go to the even one. NaN stays NaN. Without a branch, so that compilers vectorise
// loops of it.
inline uint16_t bf16_from_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1), quiet_nan = bits | 0x400000;
  return uint16_t((value != value ? quiet_nan : rounded) >> 16);
}

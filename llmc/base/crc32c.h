// CRC-32C (Castagnoli; RFC 3720, as in iSCSI), the checksum of checkpoints, shards and vocabularies. It detects every
// error that is confined to 32 neighbouring bits, and misses one in 2^32 of the others. x86 (SSE 4.2)
// and Arm have an instruction for it, so that checking a file takes less time than reading it; zlib's CRC-32, for which
// x86 has none, would be one more package besides.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#if defined(__SSE4_2__)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif
#include "error.h"

// A CRC is a polynomial over GF(2), the lowest power in the highest bit. Times x, modulo the CRC's polynomial:
inline constexpr uint32_t crc32c_times_x(uint32_t crc) { return crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0u); }

// table[k][b]: what the byte b, followed by k zero bytes, does to a CRC.
inline constexpr std::array<std::array<uint32_t, 256>, 8> make_crc32c_table() {
  std::array<std::array<uint32_t, 256>, 8> table = {};
  for (uint32_t b = 0; b < 256; b++) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; bit++) crc = crc32c_times_x(crc);
    table[0][b] = crc;
  }
  for (size_t k = 1; k < 8; k++)
    for (size_t b = 0; b < 256; b++) table[k][b] = table[k - 1][b] >> 8 ^ table[0][table[k - 1][b] & 255];
  return table;
}
inline constexpr std::array<std::array<uint32_t, 256>, 8> crc32c_table = make_crc32c_table();

// The CRC of a text that ends in these `count` bytes and whose first part has the CRC `before` (0: it is empty).
// Portable, eight bytes at a time.
inline uint32_t crc32c_by_table(const void* bytes, size_t count, uint32_t before = 0) {
  const uint8_t* next = static_cast<const uint8_t*>(bytes);
  uint32_t crc = ~before;
  for (; count >= 8; count -= 8, next += 8) {
    uint64_t word;
    memcpy(&word, next, 8);
    word ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; k++) crc ^= crc32c_table[7 - k][word >> 8 * k & 255];
  }
  for (; count > 0; count--) crc = crc >> 8 ^ crc32c_table[0][(crc ^ *next++) & 255];
  return ~crc;
}

// By the processor's instruction: the CRC after eight more bytes, and after one.
#if defined(__SSE4_2__)
#define SLA_HAS_CRC32C
inline uint32_t crc32c_of_eight(uint32_t crc, uint64_t word) { return uint32_t(_mm_crc32_u64(crc, word)); }
inline uint32_t crc32c_of_one(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }
#elif defined(__ARM_FEATURE_CRC32)
#define SLA_HAS_CRC32C
inline uint32_t crc32c_of_eight(uint32_t crc, uint64_t word) { return __crc32cd(crc, word); }
inline uint32_t crc32c_of_one(uint32_t crc, uint8_t byte) { return __crc32cb(crc, byte); }
#endif

// The CRC of a text that ends in these `count` bytes and whose first part has the CRC `before` (0: it is empty), by the
// processor's instruction if it has one.
inline uint32_t crc32c(const void* bytes, size_t count, uint32_t before = 0) {
#ifdef SLA_HAS_CRC32C
  const uint8_t* next = static_cast<const uint8_t*>(bytes);
  uint32_t crc = ~before;
  for (; count >= 8; count -= 8, next += 8) {
    uint64_t word;
    memcpy(&word, next, 8);
    crc = crc32c_of_eight(crc, word);
  }
  for (; count > 0; count--) crc = crc32c_of_one(crc, *next++);
  return ~crc;
#else
  return crc32c_by_table(bytes, count, before);
#endif
}

// The CRC of A followed by B, from the CRCs of A and B; B is `bytes_of_b` long: each byte that follows A multiplies
// A's by x^8, and B's is added. The ~ at the beginning and the end of each cancel out.
inline uint32_t crc32c_combine(uint32_t a, uint32_t b, uint64_t bytes_of_b) {
  auto times = [](uint32_t p, uint32_t q) {
    uint32_t product = 0;
    for (; p != 0; p <<= 1, q = crc32c_times_x(q)) product ^= p >> 31 ? q : 0u;
    return product;
  };
  uint32_t square = 1u << 23;  // x^8, then its powers 2, 4, 8, ...
  for (; bytes_of_b > 0; bytes_of_b >>= 1, square = times(square, square))
    if (bytes_of_b & 1) a = times(square, a);
  return a ^ b;
}

// A CRC as files and messages write it: eight hexadecimal digits.
inline std::string crc32c_hex(uint32_t crc) { return format("%08x", unsigned(crc)); }

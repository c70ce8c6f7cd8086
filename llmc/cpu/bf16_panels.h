// Matmuls of bf16 by AVX512-BF16 or by AMX, the matrix unit of Intel's server CPUs since Sapphire Rapids, for programs
// that are compiled for AVX512-BF16. oneDNN 2.6 reaches, measured on a core, in GFLOP/s:
//
//   Zen 5 (AVX512-BF16), matmuls of GPT-2 124M: 410 to 530, this 425 to 545; in attention's products of 128 queries and
//   256 keys 330 to 430, this 330 to 490, and 490 to 545 where an operand has been packed before.
//   Sapphire Rapids (AMX), matmuls of GPT-2 124M but the classifier's: 590 to 850, this 840 to 1,050; in attention's
//   products 170 to 510, and 600 to 760.
//
// A tile is 16 rows of 64 bytes. TDPBF16PS adds to a tile of sums (16, 16) the product of a tile of a, 16 rows of 32
// elements along k, and of a tile of b, 16 pairs of k: row p has for each of 16 columns the elements 2p and 2p + 1 of
// k. Both operands are packed into such tiles, padded with zeros. VDPBF16PS adds to 16 sums the products of a row of a
// tile of b and a pair of a row of a: it takes the same tiles, or rows of a where they are.
#pragma once
#ifdef __AVX512BF16__
#include <immintrin.h>
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#include "llmc/ops/bf16.h"
#include "gemm_block.h"

// g++ 12 takes what its own headers leave undefined for a mistake of the caller's.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace bf16_panels {

constexpr int64_t tile_rows = 16, tile_depth = 32, tile_size = tile_rows * tile_depth;
constexpr int64_t panel = 2 * tile_rows;  // rows of a, or columns of b, that are multiplied at once
// The most of k at once. A panel of that depth takes 32 KB: a's panel stays in the L1 cache while b's pass by.
constexpr int64_t most_depth = 512;

// A tile as the registers of its rows.
struct Tile {
  __m512i rows[tile_rows];
};

// The tile as a matrix (16, 16) of 32 bits: rows and columns change places, in groups of 1, 2, 4 and 8 lanes.
inline void transpose(Tile& tile) {
  __m512i *x = tile.rows, y[tile_rows];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; j++) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  }
  // x[4 g + c] has of the rows 4 g to 4 g + 3 the columns c, 4 + c, 8 + c and 12 + c.
  for (int c = 0; c < 4; c++) {
    for (int half = 0; half < 2; half++) {
      const __m512i low = x[8 * half + c], high = x[8 * half + 4 + c];
      y[8 * half + c] = _mm512_shuffle_i32x4(low, high, 0x88);      // the columns c and 8 + c
      y[8 * half + 4 + c] = _mm512_shuffle_i32x4(low, high, 0xdd);  // the columns 4 + c and 12 + c
    }
  }
  for (int c = 0; c < 8; c++) {
    x[c] = _mm512_shuffle_i32x4(y[c], y[8 + c], 0x88);
    x[8 + c] = _mm512_shuffle_i32x4(y[c], y[8 + c], 0xdd);
  }
}

// Rows of a, or columns of b, and k: element (i, k) is at x[i * ld + k], or x[k * ld + i] if k_is_down.
struct Operand {
  const bfloat16* x;
  int64_t ld;
  bool k_is_down;

  Operand from(int64_t i, int64_t k) const { return {x + (k_is_down ? k * ld + i : i * ld + k), ld, k_is_down}; }
};

// Rows (count, depth) with k along them, padded with zeros to a tile.
inline Tile load_rows(const Operand& of, int64_t count, int64_t depth) {
  const __mmask32 mask = depth >= tile_depth ? ~__mmask32(0) : (__mmask32(1) << depth) - 1;
  Tile tile;
  for (int64_t i = 0; i < tile_rows; i++) {
    _mm_prefetch(of.x + (i + panel) * of.ld, _MM_HINT_T1);
    tile.rows[i] = i < count ? _mm512_maskz_loadu_epi16(mask, of.x + i * of.ld) : _mm512_setzero_si512();
  }
  return tile;
}

// Columns (depth, count) with k down them, padded with zeros to pairs of k.
inline Tile load_pairs(const Operand& of, int64_t count, int64_t depth) {
  const __mmask16 mask = count >= tile_rows ? __mmask16(~0) : __mmask16((1 << std::max<int64_t>(count, 0)) - 1);
  auto load = [&](int64_t k) {
    _mm_prefetch(of.x + (k + tile_depth) * of.ld, _MM_HINT_T1);
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(k < depth ? mask : __mmask16(0), of.x + k * of.ld));
  };
  Tile tile;
  for (int64_t p = 0; p < tile_rows; p++)
    tile.rows[p] = _mm512_or_si512(load(2 * p), _mm512_slli_epi32(load(2 * p + 1), 16));
  return tile;
}

// to = the two tiles of a whole panel of columns, 32 of k down them: row p of a tile has rows 2p and 2p + 1 of k, an
// element of each in turn. `places` says where these are among the 32 columns of the one row and the 32 of the other.
inline void pack_whole_pairs(bfloat16* to, const Operand& of) {
  struct Places {
    uint16_t of_half[2][tile_depth];

    constexpr Places() : of_half() {
      for (int half = 0; half < 2; half++)
        for (int i = 0; i < tile_depth; i++)
          of_half[half][i] = uint16_t(tile_rows * half + i / 2 + tile_depth * (i % 2));
    }
  };
  static constexpr Places places;
  const __m512i left = _mm512_loadu_si512(places.of_half[0]), right = _mm512_loadu_si512(places.of_half[1]);
  for (int64_t p = 0; p < tile_rows; p++) {
    const bfloat16 *row = of.x + 2 * p * of.ld, *next = row + of.ld;
    _mm_prefetch(row + tile_depth * of.ld, _MM_HINT_T1);
    _mm_prefetch(next + tile_depth * of.ld, _MM_HINT_T1);
    const __m512i first = _mm512_loadu_si512(row), second = _mm512_loadu_si512(next);
    _mm512_store_si512(to + p * tile_depth, _mm512_permutex2var_epi16(first, left, second));
    _mm512_store_si512(to + tile_size + p * tile_depth, _mm512_permutex2var_epi16(first, right, second));
  }
}

// to = the tiles of `count` rows or columns and at most most_depth of k, panel by panel. A panel has two for each
// tile_depth of k: as pairs for b, else as rows. It reads along the operand's rows, and asks for what is next ahead.
inline void pack(bfloat16* to, const Operand& of, int64_t count, int64_t depth, bool as_pairs) {
  const int64_t panels = (count + panel - 1) / panel, steps = (depth + tile_depth - 1) / tile_depth;
  for (int64_t n = 0; n < panels * steps; n++) {
    const int64_t p = of.k_is_down ? n % panels : n / steps, step = of.k_is_down ? n / panels : n % steps;
    const int64_t k = step * tile_depth;
    if (as_pairs && of.k_is_down && count - p * panel >= panel && depth - k >= tile_depth) {
      pack_whole_pairs(to + (p * steps + step) * 2 * tile_size, of.from(p * panel, k));
      continue;
    }
    for (int64_t t = 0; t < 2; t++) {
      const int64_t i = p * panel + t * tile_rows;
      Tile tile = of.k_is_down ? load_pairs(of.from(i, k), count - i, depth - k)
                               : load_rows(of.from(i, k), count - i, depth - k);
      if (of.k_is_down != as_pairs) transpose(tile);
      bfloat16* tile_to = to + ((p * steps + step) * 2 + t) * tile_size;
      for (int64_t r = 0; r < tile_rows; r++) _mm512_store_si512(tile_to + r * tile_depth, tile.rows[r]);
    }
  }
}

// c (panel, panel), rows ldc apart, = or += the product of two packed panels with `steps` pairs of tiles.
inline void multiply_panels(const bfloat16* a, const bfloat16* b, int64_t steps, float* c, int64_t ldc,
                            bool accumulate) {
  const int64_t row = 64, c_row = ldc * int64_t(sizeof(float));  // in bytes
  float* const below = c + tile_rows * ldc;
  asm volatile("" ::: "memory");  // the compiler does not know that these instructions read memory
  if (accumulate) {
    _tile_loadd(0, c, c_row);
    _tile_loadd(1, c + tile_rows, c_row);
    _tile_loadd(2, below, c_row);
    _tile_loadd(3, below + tile_rows, c_row);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < steps; i++, a += 2 * tile_size, b += 2 * tile_size) {
    _tile_loadd(4, a, row);
    _tile_loadd(6, b, row);
    _tile_loadd(7, b + tile_size, row);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + tile_size, row);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, c_row);
  _tile_stored(1, c + tile_rows, c_row);
  _tile_stored(2, below, c_row);
  _tile_stored(3, below + tile_rows, c_row);
  asm volatile("" ::: "memory");
}

// Tiles of 16 rows of 64 bytes in the registers of this thread while it exists, if AMX is used.
class TileRegisters {
 public:
  explicit TileRegisters(bool by_amx) : by_amx_(by_amx) {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static const Config config;
    if (by_amx_) asm volatile("ldtilecfg (%0)" ::"r"(&config) : "memory");
  }
  ~TileRegisters() {
    if (by_amx_) asm volatile("tilerelease");
  }
  TileRegisters(const TileRegisters&) = delete;

 private:
  const bool by_amx_;
};

// Eight rows of a: pair p of k of row r is at x[r * row + p / 16 * step + p % 16 * pair].
struct RowsOfPairs {
  const bfloat16* x;
  int64_t row, pair, step;
};

// c (8, tiles * tile_rows), rows ldc apart, = or += the product of eight rows and the first `tiles` tiles, 1 or 2, of a
// packed panel of columns with so many pairs of k, by VDPBF16PS: the sums are in 8 or 16 registers. Where nothing is
// added to, it is alpha times the product.
template <int64_t tiles>
inline void multiply_rows(const RowsOfPairs& a, const bfloat16* b, int64_t pairs, float* c, int64_t ldc,
                          bool accumulate, float alpha) {
  constexpr int64_t rows = 8;
  __m512 sums[rows][tiles];
  for (int64_t r = 0; r < rows; r++)
    for (int64_t half = 0; half < tiles; half++)
      sums[r][half] = accumulate ? _mm512_loadu_ps(c + r * ldc + half * tile_rows) : _mm512_setzero_ps();
  const bfloat16* x = a.x;
  auto add_pairs = [&](int64_t count) {
    for (int64_t p = 0; p < count; p++) {
      __m512bh columns[tiles];
      for (int64_t half = 0; half < tiles; half++)
        columns[half] = __m512bh(_mm512_load_si512(b + half * tile_size + p * tile_depth));
#pragma GCC unroll 8
      for (int64_t r = 0; r < rows; r++) {
        int pair;
        memcpy(&pair, x + r * a.row + p * a.pair, sizeof pair);
        const __m512bh both = __m512bh(_mm512_set1_epi32(pair));
        for (int64_t half = 0; half < tiles; half++)
          sums[r][half] = _mm512_dpbf16_ps(sums[r][half], both, columns[half]);
      }
    }
  };
  for (; pairs >= tile_rows; pairs -= tile_rows, x += a.step, b += 2 * tile_size) add_pairs(tile_rows);
  add_pairs(pairs);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t half = 0; half < tiles; half++)
      _mm512_storeu_ps(c + r * ldc + half * tile_rows, accumulate ? sums[r][half] : sums[r][half] * alpha);
}

// The largest k at which an operand is kept after a block: 6 MB for 1,024 rows or columns.
constexpr int64_t most_kept_depth = 3072;

// An operand of a block, in a thread's memory. The next block of a matmul often has the same, which then is not packed
// again.
class PackedOperand {
 public:
  // of (count, depth). `matmul`: a number that each matmul has for itself, or 0: nothing is kept after the block.
  void set(const Operand& of, int64_t count, int64_t depth, uint64_t matmul) {
    is_packed_ = matmul != 0 && matmul == matmul_ && of.x == of_.x && is_kept_;
    of_ = of, count_ = count, matmul_ = matmul, is_kept_ = depth <= most_kept_depth;
    const size_t depth_of_memory = size_t(is_kept_ ? depth + tile_depth : most_depth);
    memory_.resize(std::max(memory_.size(), size_t(padded()) * depth_of_memory + tile_depth));
  }

  // The tiles of [k, k + depth), at an address that is a multiple of 64 bytes.
  const bfloat16* tiles(int64_t k, int64_t depth, bool as_pairs) {
    bfloat16* const memory = reinterpret_cast<bfloat16*>((reinterpret_cast<uintptr_t>(memory_.data()) + 63) / 64 * 64);
    bfloat16* const to = memory + (is_kept_ ? padded() * k : 0);
    if (!is_packed_) pack(to, of_.from(0, k), count_, depth, as_pairs);
    return to;
  }

 private:
  std::vector<bfloat16> memory_;
  Operand of_ = {};
  int64_t count_ = 0;
  uint64_t matmul_ = 0;
  bool is_kept_ = false, is_packed_ = false;

  int64_t padded() const { return (count_ + panel - 1) / panel * panel; }
};

// c (m, n) = or += alpha op(a) op(b) of a block of the matmul that has the number `matmul`; 0: of none. Sums run over k
// in order; in a panel that is not whole, or with alpha, each most_depth of k is summed by itself and then added to c.
// `by_amx`: by AMX, else by AVX512-BF16. a is read in place, or packed: as rows, or without AMX, if it is transposed,
// as pairs.
inline void multiply(const GemmBlock& s, const bfloat16* a, const bfloat16* b, float* c, uint64_t matmul, bool by_amx) {
  thread_local PackedOperand a_packed, b_packed;
  const bool packs_a = by_amx || s.op_a == 'T' || s.k % 2 != 0 || s.m % 8 != 0, as_pairs = !by_amx && s.op_a == 'T';
  if (packs_a) a_packed.set({a, s.lda, s.op_a == 'T'}, s.m, s.k, matmul);
  b_packed.set({b, s.ldb, s.op_b == 'N'}, s.n, s.k, matmul);
  const TileRegisters registers(by_amx);
  for (int64_t k = 0; k < s.k; k += most_depth) {
    const int64_t depth = std::min(most_depth, s.k - k), steps = (depth + tile_depth - 1) / tile_depth;
    const bool accumulate = s.accumulate || k > 0;
    const bfloat16* const b_tiles = b_packed.tiles(k, depth, /*as_pairs=*/true);
    const bfloat16* const a_tiles = packs_a ? a_packed.tiles(k, depth, as_pairs) : a + k;
    // to (rows, panel) = or += the product of row i and those that follow it in its panel, and of a panel of columns.
    auto multiply_panel = [&](int64_t i, int64_t rows, int64_t j, int64_t columns, float* to, int64_t ld, bool adds,
                              float alpha) {
      const bfloat16 *const b_panel = b_tiles + j * steps * tile_depth, *const a_panel =
                                                                            a_tiles + i * steps * tile_depth;
      if (by_amx) return multiply_panels(a_panel, b_panel, steps, to, ld, adds);
      const auto multiply_eight_rows = columns > tile_rows ? multiply_rows<2> : multiply_rows<1>;
      for (int64_t r = 0; r < rows; r += 8) {
        const bfloat16* const tile = a_panel + r / tile_rows * tile_size;
        const RowsOfPairs x = !packs_a   ? RowsOfPairs{a_tiles + (i + r) * s.lda, s.lda, 2, tile_depth}
                              : as_pairs ? RowsOfPairs{tile + r % tile_rows * 2, 2, tile_depth, 2 * tile_size}
                                         : RowsOfPairs{tile + r % tile_rows * tile_depth, tile_depth, 2, 2 * tile_size};
        multiply_eight_rows(x, b_panel, (depth + 1) / 2, to + r * ld, ld, adds, alpha);
      }
    };
    for (int64_t i = 0; i < s.m; i += panel) {
      for (int64_t j = 0; j < s.n; j += panel) {
        const int64_t rows = std::min(panel, s.m - i), columns = std::min(panel, s.n - j);
        float* const to = c + i * s.ldc + j;
        const bool is_whole = by_amx ? rows == panel && columns == panel : rows % 8 == 0 && columns % tile_rows == 0;
        if (is_whole && (s.alpha == 1 || (!by_amx && !accumulate))) {
          multiply_panel(i, rows, j, columns, to, s.ldc, accumulate, s.alpha);
          continue;
        }
        alignas(64) float product[panel * panel];
        multiply_panel(i, rows, j, columns, product, panel, false, 1);
        for (int64_t r = 0; r < rows; r++) {
          float* row = to + r * s.ldc;
#pragma omp simd
          for (int64_t x = 0; x < columns; x++)
            row[x] = (accumulate ? row[x] : 0.0f) + s.alpha * product[r * panel + x];
        }
      }
    }
  }
}

}  // namespace bf16_panels
#pragma GCC diagnostic pop
#endif

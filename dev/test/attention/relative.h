// Relative positions, forward and backward, against the formula: shapes at the edges of tiles, keys before the first
// query, K/V heads of other layers and several for a query head, windows.
#pragma once
#include <gtest/gtest.h>               // TEST
#include "dev/test/attention/layer.h"  // Case, PartialForward, with_mask, every, check
#include "dev/test/long.h"             // LONG_ON_EMU

// `c` with relative positions for as many distances as there are, and for `more` that no query and key have.
inline Case with_relative(Case c, int64_t more = 0) {
  c.distances = c.T + more;
  return c;
}

TEST(AttentionRelative, MatchesTheFormulaForAFewShapes) {
  check(with_relative({2, 70, 32, {0, 1}, 2}));
  check(with_relative({1, 137, 80, {0, 0, 1}, 1}, 11));
  Case later = {2, 150, 64, {0, {0, 1}}, 1};
  later.first_query = 70;
  check(with_relative(later));
}

TEST(AttentionRelative, MatchesTheFormulaForSeveralLengths) {
  for (int64_t T : {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300}) check(with_relative({2, T, 16, {0, 1}, 2}));
}

// Of a window the distances beyond it have no row, as in a text of many segments.
// BUG (build/bf16/test_attention_emu) llmc/cuda/tile.h: `return unsigned(row) < unsigned(end);` -> `return row < end;`
TEST(AttentionRelative, NeedsRowsOnlyForDistancesThatAMaskShows) {
  Case c = with_mask({2, 200, 24, {0, {0, 1}}, 1}, {20});
  for (int64_t distances : {20, 64, 77}) {
    c.distances = distances;
    check(c);
  }
}

// BUG (build/bf16/test_attention_emu) llmc/cuda/attention_bf16.h: ` || key + row + column < 0;` -> `;`
//
// Keys that a mask hides amid those that it shows; gradients that are added to; and v in a buffer of its own.
TEST(AttentionRelative, MatchesTheFormulaWithOtherMasks) {
  for (const MaskCase& mask : {MaskCase{0, MaskPattern::block, 33}, MaskCase{50, MaskPattern::column, 24, 3},
                               MaskCase{0, MaskPattern::local_or_stride, 20}}) {
    Case c = with_relative(with_mask({2, 140, 40, {0, {0, 1}, 1}, 1}, mask), 3);
    c.dq_accumulate = c.v_apart = true;
    check(c);
  }
}

TEST(LONG_ON_EMU(AttentionRelative), MatchesTheFormulaForEveryLengthHeadSizeAndWiring) {
  const std::vector<Case> wirings = {{0, 0, 0, {0, 1}, 2},          // plain
                                     {0, 0, 0, {0, 1, 2}, 1},       // skip-layer attention
                                     {0, 0, 0, {0, 0, 1, 1}, 1},    // grouped-query attention
                                     {0, 0, 0, {{0, 1}, 2, 1}, 2},  // several K/V heads a query head
                                     with_mask({0, 0, 0, {0, 1, 0}, 1}, {20}),
                                     with_mask({0, 0, 0, {0, {0, 1}}, 1}, {110})};
  size_t i = 0;
  for (int64_t first_query : {0, 1, 37, 64, 100})
    for (int64_t T : {first_query + 5, first_query + 64, int64_t(200)})
      for (int64_t HS : {8, 32, 64, 80, 96, 128})
        for (const Case& wiring : wirings) {
          if (i++ % every > 0) continue;
          Case c = wiring;
          c.B = 1 + int64_t(i) % 3, c.T = T, c.HS = HS, c.first_query = first_query;
          check(with_relative(c, int64_t(i) % 4 * 5));
        }
}

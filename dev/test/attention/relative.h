// Relative positions, forward and backward, against the formula: shapes at the edges of tiles, keys before the first
// query, K/V heads of other layers and several for a query head, windows.
#pragma once
#include <gtest/gtest.h>
#include <algorithm>
#include "dev/test/attention/layer.h"
#include "dev/test/attention/memory.h"
#include "dev/test/long.h"

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

TEST(LONG_ON_EMU(AttentionRelative), MatchesTheFormulaForSeveralLengths) {
  for (int64_t T : {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300}) check(with_relative({2, T, 16, {0, 1}, 2}));
}

// Distances beyond a window have no row, as in a text of many segments.
TEST(LONG_ON_EMU(AttentionRelative), NeedsRowsOnlyForDistancesThatAMaskShows) {
  Case c = with_mask({2, 200, 24, {0, {0, 1}}, 1}, {20});
  for (int64_t distances : {20, 64, 77}) {
    c.distances = distances;
    check(c);
  }
}

// The last queries alone: one to four of them, as generation computes them, and more.
TEST(LONG_ON_EMU(AttentionRelative), OfTheLastQueriesIsThatOfTheWhole) {
  Case window = with_mask({2, 140, 24, {0, {0, 1}, 0}, 1}, {50});
  window.distances = 50;
  for (const Case& c :
       {with_relative({2, 140, 64, {0, 1, 0}, 1}), with_relative({1, 65, 80, {{0, 1}, 0}, 1}, 3),
        with_relative({1, 66, 128, {0, 0, 0}, 1}), with_relative({1, 70, 8, std::vector<Sources>(11, 0), 0}), window}) {
    if (is_refused(c)) continue;
    Layer layer(c);
    const Expected whole(layer);
    const std::vector<floatX> out(whole.out.begin(), whole.out.end());
    const std::vector<float> lse(whole.lse.begin(), whole.lse.end());
    for (int64_t queries : {1, 3, 4, 5, 65}) {
      SCOPED_TRACE(testing::Message() << c << ", queries " << queries);
      check_partial(PartialForward(layer, c.T - queries, c.T), c.T, out, lse);
    }
  }
}

//
// A query sees its block of positions. Gradients are added to, and v is in a buffer of its own.
TEST(LONG_ON_EMU(AttentionRelative), MatchesTheFormulaWithOtherMasks) {
  for (const MaskCase& mask : {MaskCase{0, MaskPattern::block, 33}, MaskCase{50, MaskPattern::block, 24}}) {
    Case c = with_relative(with_mask({2, 140, 40, {0, {0, 1}, 1}, 1}, mask), 3);
    c.dq_accumulate = c.v_apart = true;
    check(c);
  }
}

TEST(LONG_ON_EMU(AttentionRelative), MatchesTheFormulaForEveryLengthHeadSizeAndWiring) {
  std::vector<Case> wirings = wirings_with_first_query();
  wirings.push_back(with_mask({0, 0, 0, {0, {0, 1}}, 1}, {0, MaskPattern::block, 30}));
  size_t i = 0;
  const size_t some = std::max<size_t>(every, 7);
  for (int64_t first_query : {0, 1, 37, 64, 100})
    for (int64_t T : {first_query + 5, first_query + 64, int64_t(200)})
      for (int64_t HS : {8, 32, 64, 80, 96, 128})
        for (const Case& wiring : wirings) {
          if (i++ % some > 0) continue;
          Case c = wiring;
          c.B = 1 + int64_t(i) % 3, c.T = T, c.HS = HS, c.first_query = first_query;
          check(with_relative(c, int64_t(i) % 4 * 5));
        }
}

// Both passes with keys before the first query, as of an earlier segment that a memory keeps.
#pragma once
#include <gtest/gtest.h>
#include <cmath>
#include "dev/test/attention/layer.h"
#include "dev/test/long.h"

// Wirings without a shape: K/V heads of other layers and several for a query head, windows.
inline std::vector<Case> wirings_with_first_query() {
  return {{0, 0, 0, {0, 1}, 2},          // plain
          {0, 0, 0, {0, 1, 2}, 1},       // skip-layer attention
          {0, 0, 0, {0, 0, 1, 1}, 1},    // grouped-query attention
          {0, 0, 0, {{0, 1}, 2, 1}, 2},  // several K/V heads a query head
          with_mask({0, 0, 0, {0, 1, 0}, 1}, {20}),
          with_mask({0, 0, 0, {0, {0, 1}}, 1}, {110})};
}

TEST(AttentionMemory, MatchesTheFormulaForAFewShapes) {
  Case shorter = {2, 70, 32, {0, 0, 1}, 1}, longer = {1, 137, 80, {0, {0, 1}}, 1};
  shorter.first_query = 37, shorter.dq_accumulate = true;
  longer.first_query = 100, longer.v_apart = true;
  check(shorter);
  check(longer);
  check(with_mask(longer, {20}));
}

TEST(LONG_ON_EMU(AttentionMemory), MatchesTheFormulaForEveryLengthHeadSizeAndWiring) {
  const std::vector<Case> wirings = wirings_with_first_query();
  size_t i = 0;
  for (int64_t first_query : {1, 37, 64, 100})
    for (int64_t T : {first_query + 5, first_query + 64, int64_t(200)})
      for (int64_t HS : {32, 64, 80, 128})
        for (const Case& wiring : wirings) {
          if (i++ % every > 0) continue;
          Case c = wiring;
          c.B = 2, c.T = T, c.HS = HS, c.first_query = first_query, c.dq_accumulate = i % 2 == 1;
          check(c);
        }
}

// At the stride of 8 a GPU's kernels work on the positions that have the same remainder together.
TEST(LONG_ON_EMU(AttentionMemory), MatchesTheFormulaForEveryMask) {
  for (int64_t first_query : {3, 77, 128}) {
    Case c = general_case(2, 150, 24);
    c.masks[0] = c.masks[4] = {0, MaskPattern::stride, 8};
    c.first_query = first_query;
    check(c);
    c.topk = 9, c.whole_numbers = true;
    check(c);
  }
}

// The keys [0, first_query - window] of plain windows.
TEST(AttentionMemory, OfKeysThatNoQuerySeesHasNoGradient) {
  Case c = with_mask({2, 150, 24, {0, 1}, 2}, {9});
  c.first_query = 140;
  Layer layer(c);
  layer.forward();
  layer.backward();
  const std::vector<floatX> dqkv = layer.d_dqkv.to_host();
  for (int64_t b = 0; b < c.B; b++)
    for (int64_t t = 0; t < c.T; t++) {
      double dk = 0, dv = 0;  // of K/V head 0, whose gradients are =
      for (int64_t i = 0; i < c.HS; i++) {
        dk += std::abs(double(float(dqkv[layer.dk(0).at(b * c.T + t, i)])));
        dv += std::abs(double(float(dqkv[layer.dv(0).at(b * c.T + t, i)])));
      }
      EXPECT_EQ(dk == 0, t <= 131) << "position " << t;
      EXPECT_EQ(dv == 0, t <= 131) << "position " << t;
    }
}

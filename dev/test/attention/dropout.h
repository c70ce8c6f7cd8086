// Dropout of attention's probabilities: which ones, and all gradients through those that are kept, against the formula.
#pragma once
#include <gtest/gtest.h>
#include <vector>
#include "dev/test/attention/documents.h"
#include "dev/test/attention/layer.h"
#include "dev/test/long.h"

inline Case with_dropout(Case c, double share = 0.3) {
  c.dropout = share;
  return c;
}

// Bugs: the backward pass drops others than the forward pass, all heads or sources drop the same, 1 / (1 - p) is
// forgotten, an element gets another's bits.
TEST(AttentionDropout, MatchesTheFormulaForAFewShapes) {
  check(with_dropout({2, 70, 32, {0, 1}, 2}));
  check(with_dropout({2, 140, 64, {0, {0, 1}, 0}, 1}));
  check(with_dropout({1, 150, 128, {{0, 1}, 1}, 1}));
  check(with_dropout(with_mask({1, 140, 80, {0, 0}, 1}, {50})));
  check(with_dropout(with_mask({2, 140, 32, {0, 0}, 1}, {0, MaskPattern::stride, 8})));  // its keys are no neighbours
  check(with_dropout(with_documents({2, 140, 64, {0, {0, 1}}, 1})));
}

TEST(AttentionDropout, MatchesTheFormulaInShortSequences) {
  for (int64_t T : {1, 4, 5}) check(with_dropout({3, T, 16, {0, {0, 1}, 0}, 1}, 0.5));
}

TEST(LONG_ON_EMU(AttentionDropout), MatchesTheFormulaForEveryLengthAndHeadSize) {
  size_t i = 0;
  for (int64_t T : {2, 31, 64, 65, 128, 193, 300})
    for (int64_t HS : {8, 32, 64, 96, 128})
      for (double share : {0.1, 0.6})
        if (i++ % every == 0) check(with_dropout({2, T, HS, {0, {0, 1}, 0}, 1}, share));
}

TEST(LONG_ON_EMU(AttentionDropout), MatchesTheFormulaWithEveryMask) {
  const std::vector<MaskCase> masks = {{37},
                                       {40, MaskPattern::stride, 12},
                                       {0, MaskPattern::local_or_stride, 20},
                                       {0, MaskPattern::block_and_before, 33, 5},
                                       {0, MaskPattern::column, 30, 3}};
  for (const MaskCase& mask : masks) {
    check(with_dropout(with_mask({2, 210, 24, {0, 0, {0, 1}, 1}, 1}, mask)));
    check(with_dropout(with_documents(with_mask({2, 210, 72, {0, 0, {0, 1}, 1}, 1}, mask))));
  }
  check(with_dropout(general_case(2, 200, 32)));
}

#if defined(SLA_EMU) && defined(PRECISION_BF16)
// The emulated GPU has no kernels by wgmma: they would end the program.
TEST(AttentionDropout, IsByMmaWhereWgmmaIsAskedFor) {
  gpu().attention_by = AttentionBy::wgmma;
  check(with_dropout({1, 70, 64, {0, 1}, 2}));
  gpu().attention_by = AttentionBy::mma;
}
#endif

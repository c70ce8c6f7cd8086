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
// BUG (build/fp32/test_attention_emu) llmc/cuda/attention_fma.h: `positions, query, key + i)` ->
// `positions, query, key + i + 1)`
// BUG (build/fp32/test_attention_emu) llmc/cuda/attention_fma.h: `dp[i][j] * factor - column_delta` ->
// `dp[i][j] - column_delta`
// BUG (build/fp32/test_attention_emu) llmc/cuda/attention_fma.h: `blockIdx.z, head, source, positions` ->
// `blockIdx.z, 0, source, positions`
// BUG (build/fp32/test_attention_emu) llmc/cuda/attention_fma.h: `source_of(a, head, int(blockIdx.y)), positions` ->
// `0, positions`
// BUG (build/bf16/test_attention_emu) llmc/cuda/attention_mma.h: `part_of_head(head, source), query_group` ->
// `part_of_head(0, source), query_group`
// BUG (build/bf16/test_attention_emu) llmc/cuda/attention_mma.h: `source_of(a, head, int(blockIdx.x))` -> `0`
// BUG (build/bf16/test_attention_emu) llmc/cuda/attention_mma.h: `if (positions.stride > 1) {` -> `if (false) {`
// BUG (build/bf16/test_attention_emu) llmc/cuda/attention_mma.h: `M == 1 && j > first_key ?` -> `false ?`
// BUG (build/bf16/test_attention_emu) llmc/cuda/attention_mma.h: `of_rows >> (j - first_key) / 2 & all` ->
// `of_rows & all`
// BUG (build/bf16/test_attention_emu) llmc/cuda/attention_mma.h: `return 4 * (N * (k / 2) + q) + k % 2 * 2;` ->
// `return 4 * (N * q + k / 2) + k % 2 * 2;`
// BUG (build/bf16/test_attention_emu) llmc/cuda/attention_mma.h: `y *= kept.contains(m, n, 2 * h + c) ?` ->
// `y *= true ?`
// BUG (build/bf16/test_attention_emu) llmc/cuda/attention_mma.h: `dp.x[m][n][i] *= kept.contains(m, n, i) ?
// a.dropout.scale` -> `dp.x[m][n][i] *= kept.contains(m, n, i) ? 1.0f`
// BUG (build/bf16/test_attention_emu) llmc/cuda/attention_mma.h: `x = kept.contains(m, n, 2 * h + c) ? x : 0.0f` -> ``
// BUG (build/bf16/test_attention_emu) llmc/cuda/attention_mma.h: `::scale(dv, a.dropout.scale)` -> `::scale(dv, 1.0f)`
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
// BUG (build/bf16/test_attention_emu) llmc/cuda/attention_tiles.h: `|| a.dropout.keys != nullptr` -> ``
TEST(AttentionDropout, IsByMmaWhereWgmmaIsAskedFor) {
  gpu().attention_by = AttentionBy::wgmma;
  check(with_dropout({1, 70, 64, {0, 1}, 2}));
  gpu().attention_by = AttentionBy::mma;
}
#endif

// Attention within documents of each kind, against the formula; a document that is alone; and what is read.
#pragma once
#include <gtest/gtest.h>
#include <algorithm>
#include <array>
#include <random>
#include <vector>
#include "dev/test/attention/layer.h"
#include "dev/test/long.h"

// Documents of one token, of as many as tiles have, and of more and fewer.
inline Case with_documents(Case c, std::vector<int64_t> begins = {1, 2, 16, 17, 63, 64, 128, 129, 200}) {
  c.documents = std::move(begins);
  return c;
}

TEST(AttentionDocuments, MatchTheFormulaForAFewShapes) {
  check(with_documents({2, 70, 32, {0, 1}, 2}));
  check(with_documents({1, 70, 32, {0, 1}, 2}, {20, 65}));  // whose last query is the first of a tile
  check(with_documents({2, 230, 64, {0, {0, 1}, 0}, 1}));
  check(with_documents(with_mask({1, 140, 80, {0, 0}, 1}, {20})));
  Case topk = with_documents({1, 150, 16, {{0, 1}, 1}, 1});
  topk.topk = 4, topk.whole_numbers = true;
  check(topk);
}

TEST(LONG_ON_EMU(AttentionDocuments), MatchTheFormulaWithEveryMask) {
  const std::vector<MaskCase> masks = {{37},
                                       {0, MaskPattern::stride, 8},
                                       {40, MaskPattern::stride, 12},
                                       {0, MaskPattern::local_or_stride, 20},
                                       {0, MaskPattern::block_and_before, 33, 5},
                                       {0, MaskPattern::column, 30, 3},
                                       {50, MaskPattern::block_or_column, 12, 2, {MaskPattern::stride, 5}}};
  for (size_t i = 0; i < masks.size(); i++)
    for (int topk : {0, 3}) {
      Case c = with_documents(with_mask({2, 260, 24, {0, 0, {0, 1}, 1}, 1}, masks[i]), {5, 70, 71, 150, 222});
      c.topk = topk, c.whole_numbers = topk > 0, c.v_apart = i % 2 == 0, c.dq_accumulate = i % 3 == 0;
      check(c);
    }
  Case general = with_documents(general_case(2, 200, 32));
  check(general);
}

TEST(LONG_ON_EMU(AttentionDocuments), MatchTheFormulaForEveryLengthAndHeadSize) {
  std::mt19937_64 random(3);
  size_t i = 0;
  for (int64_t T : {1, 2, 31, 64, 65, 128, 193, 300})
    for (int64_t HS : {8, 32, 64, 96, 128})
      for (int mean : {1, 9, 90}) {
        std::vector<int64_t> begins;
        for (int64_t t = 0; t < T; t++)
          if (random() % mean == 0) begins.push_back(t);
        if (begins.empty() || i++ % every > 0) continue;
        check(with_documents({2, T, HS, {0, {0, 1}, 0}, 1}, begins));
      }
}

TEST(LONG_ON_EMU(AttentionDocuments), MatchTheFormulaWithRelativePositions) {
  for (int64_t HS : {64, 80}) {
    Case c = with_documents({2, 180, HS, {0, {0, 1}}, 1}, {1, 20, 64, 100, 131});
    c.distances = c.T;
    check(c);
    if (HS == 64) check(with_mask(c, {30}));
  }
}

TEST(AttentionDocuments, OfTheLastQueriesIsThatOfTheWhole) {
  Case relative = with_documents({2, 140, 24, {0, {0, 1}, 0}, 1}, {100, 132});
  relative.distances = 140;
  for (const Case& c : {with_documents({2, 140, 64, {0, 1, 0}, 1}, {64, 133}),
                        with_documents(with_mask({2, 140, 64, {0, 1, 0}, 1}, {50}), {20, 132}), relative}) {
    Layer layer(c);
    const Expected whole(layer);
    const std::vector<floatX> out(whole.out.begin(), whole.out.end());
    const std::vector<float> lse(whole.lse.begin(), whole.lse.end());
    for (int64_t queries : {1, 4, 5, 65}) {
      SCOPED_TRACE(testing::Message() << c << ", queries " << queries);
      check_partial(PartialForward(layer, c.T - queries, c.T), c.T, out, lse);
    }
  }
}

#if defined(SLA_EMU) && defined(PRECISION_BF16)
// For each tile of queries the keys from the tile with its first query's document on, and for each tile of keys the
// queries up to the end of the tile with the last of its last key's document.
TEST(LONG_ON_EMU(AttentionDocuments), ReadNoTilesOfOthers) {
  const int64_t T = 1024, HS = 64;
  for (const std::vector<int64_t>& begins : {std::vector<int64_t>{256, 512, 768}, {130, 420, 1000}}) {
    const Case c = with_documents({1, T, HS, {0, 0}, 1}, begins);
    Layer layer(c);
    layer.d_qkv.to_host();  // waits
    const uint64_t before = emu::counters().bytes_read_async;
    layer.forward();
    layer.backward();
    layer.d_out.to_host();
    auto key_rows = [&](int64_t queries, int64_t keys) {
      int64_t rows = 0;
      for (int64_t q0 = 0; q0 < T; q0 += queries) rows += std::min(T, q0 + queries) - c.document(0, q0) / keys * keys;
      return rows;
    };
    int64_t query_rows = 0;
    using Dkdv = DkdvTiles<64, true>;  // of a GPU with large shared memory
    for (int64_t k0 = 0; k0 < T; k0 += Dkdv::keys) {
      int64_t last = k0 + Dkdv::keys - 1;
      while (last + 1 < T && c.document(0, last + 1) == c.document(0, k0 + Dkdv::keys - 1)) last++;
      query_rows += std::min(T, (last / Dkdv::queries + 1) * Dkdv::queries) - k0;
    }
    const int64_t row = HS * int64_t(sizeof(floatX));
    const int64_t forward =
        2 * (T + 2 * key_rows(ForwardTiles<64, false>::queries, ForwardTiles<64, false>::keys)) * row;
    const int64_t dq = 2 * (2 * T + 2 * key_rows(DqTiles<64, true>::queries, DqTiles<64, true>::keys)) * row;
    const int64_t dkdv = 2 * T * row + 2 * 2 * query_rows * (row + int64_t(sizeof(float)));
    EXPECT_EQ(emu::counters().bytes_read_async - before, uint64_t(forward + dq + dkdv));
  }
}

// What an attention's passes read and multiply, by the emulated GPU's counters: bytes that come from memory, and 8 x 8
// matrices that warps take from their tiles to multiply them.
struct AttentionCounts {
  double bytes, matrices;
};
inline std::array<AttentionCounts, 2> count_passes(const Case& c) {
  Layer layer(c);
  layer.d_qkv.to_host();  // waits
  std::array<AttentionCounts, 2> counts;
  for (int pass = 0; pass < 2; pass++) {
    const emu::Counters before = emu::counters();
    if (pass == 0) layer.forward();
    else layer.backward();
    layer.d_out.to_host();
    counts[pass] = {double(emu::counters().bytes_read_async - before.bytes_read_async),
                    double(emu::counters().matrices_loaded - before.matrices_loaded)};
  }
  return counts;
}

// Beside plain attention's, the products are as many as the sum of squares of the documents' lengths says, in tiles of
// 64 tokens: a document of L takes L (L + 64), within 1.2 of it wherever documents begin. Tiles of 128 queries or keys
// come from memory as a whole, so only documents of several tiles read as few bytes; documents that begin with a tile
// read and multiply no more than as many sequences of their own.
TEST(LONG_ON_EMU(AttentionDocuments), CostTheSumOfSquaresOfTheirLengths) {
  const int64_t T = 2048;
  const Case plain = {1, T, 64, {0}, 1}, alone = {8, 256, 64, {0}, 1};
  const std::array<AttentionCounts, 2> of_plain = count_passes(plain), of_alone = count_passes(alone);
  const auto squares = [](int64_t length) { return double(length) * double(length + 64); };
  const std::vector<int64_t> of_256 = {256, 512, 768, 1024, 1280, 1536, 1792}, of_1024 = {1024};
  for (const std::vector<int64_t>& begins : {of_256, of_1024, {700, 1500}, {90, 130, 1141}}) {
    SCOPED_TRACE(testing::PrintToString(begins));
    double share = squares(T - begins.back()) / squares(T);
    for (size_t i = 0; i < begins.size(); i++) share += squares(begins[i] - (i > 0 ? begins[i - 1] : 0)) / squares(T);
    const std::array<AttentionCounts, 2> counts = count_passes(with_documents(plain, begins));
    for (int pass = 0; pass < 2; pass++) {
      EXPECT_LE(counts[pass].matrices / of_plain[pass].matrices, 1.2 * share) << "pass " << pass;
      EXPECT_GE(counts[pass].matrices / of_plain[pass].matrices, share / 1.2) << "pass " << pass;
      if (begins == of_1024) { EXPECT_LE(counts[pass].bytes / of_plain[pass].bytes, 1.2 * share) << "pass " << pass; }
      if (begins != of_256) continue;
      EXPECT_EQ(counts[pass].bytes, of_alone[pass].bytes) << "pass " << pass;
      EXPECT_LE(counts[pass].matrices, of_alone[pass].matrices) << "pass " << pass;
    }
  }
}
#endif

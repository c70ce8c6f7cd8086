// Causal attention against its formula: lengths, head sizes, shared K/V, and queries at the end of a cache. Copies of
// rows.
#pragma once
#include <gtest/gtest.h>
#include <cmath>
#include "dev/test/attention/layer.h"
#include "dev/test/long.h"

TEST(Attention, MatchesTheFormulaForSeveralLengths) {
  for (int64_t T : {1, 7, 63, 64, 65, 127, 128, 129, 300}) check({2, T, 16, {0, 1}, 2});
}

TEST(LONG_ON_EMU(Attention), MatchesTheFormulaForEveryLengthHeadSizeAndWiring) {
  const std::vector<Case> wirings = {{0, 0, 0, {0, 1}, 2},        // plain: dk and dv of head 0 are =, of head 1 +=
                                     {0, 0, 0, {0, 1}, 0},        // all K/V from the source layer
                                     {0, 0, 0, {0, 1, 2}, 1},     // as with SLA: the last heads'
                                     {0, 0, 0, {0, 0, 1, 1}, 1},  // grouped-query attention
                                     {0, 0, 0, {1, 0, 1}, 2}};    // in no order
  size_t i = 0;
  for (int64_t T : {1, 7, 64, 127, 128, 129, 300})
    for (int64_t HS : {32, 64, 80, 96, 128})
      // Two wirings, alternating, where all would take minutes.
      for (size_t n = 0; n < (T < 300 && is_16_bit ? wirings.size() : 2); n++, i++) {
        Case c = wirings[i % wirings.size()];
        c.B = 1 + int64_t(i) % 3, c.T = T, c.HS = HS, c.dq_accumulate = i % 2 == 1;
        check(c);
      }
}

TEST(Attention, WorksForHeadSizesThatAreMultiplesOfEight) {
  for (int64_t HS : {8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 104, 128}) check({1, 70, HS, {0, 1}, 1});
  check({3, 33, 80, {0, 1}, 2});
}

// A vote is no barrier: the results are right, as the emulated lanes wait in it, and the race is found.
TEST(Attention, ReadsSharedKVAndAddsToItsGradients) {
  check({2, 70, 8, {0, 1, 2, 3}, 4});  // plain: dk and dv of even K/V heads are =, of odd ones +=
  check({2, 70, 8, {0, 1, 2, 3}, 0});  // all K/V from the source layer
  check({2, 70, 24, {1, 0, 3, 2}, 2});
  check({3, 129, 72, {1, 0}, 1});
}

TEST(Attention, SetsDqOrAddsToIt) {
  for (bool accumulate : {false, true})
    for (int64_t HS : {16, 96})
      for (int64_t T : {1, 130}) {  // the latter: several tiles
        Case c = {2, T, HS, {0, 1, 0}, 1};
        c.dq_accumulate = accumulate;
        check(c);
      }
}

TEST(Attention, SumsAKVHeadsGradientsOverItsQueryHeads) {
  check({2, 70, 8, {0, 0, 1, 1}, 1});
  check({2, 70, 8, {0, 0, 0}, 1});  // multi-query
  check({1, 70, 8, {2, 0, 1, 0}, 1});
  check({1, 129, 96, {1, 0, 1}, 1});
}

// |q k| is up to 1e4. A score that large has an absolute error near 1e-3 in float, and so has log p; and where p is
// almost 1, dp - delta is a difference of almost equal numbers. One of them was rounded to floatX with out, which
// costs as many digits in an otherwise exact computation.
TEST(Attention, StaysFiniteAndRightForHugeScores) {
  const double slack = is_16_bit ? 15 : 30;
  check({1, 130, 16, {0, 1}, 1, 30, 30}, slack);
  check({1, 300, 64, {0, 1}, 1, 18, 18}, slack);
  check({1, 70, 128, {0, 1}, 1, 16, 16}, slack);
}

TEST(Attention, OfEqualScoresIsTheMeanOfTheValues) {
  check({1, 130, 16, {0, 1}, 1, /*q_scale=*/0});
  check({1, 70, 72, {0, 1}, 1, 1, /*k_scale=*/0});
}

TEST(Attention, OfASinglePositionIsItsValue) {
  for (int64_t HS : {8, 128}) {
    Layer layer({3, 1, HS, {0, 1}, 1});
    layer.forward();
    layer.backward();
    const std::vector<floatX> out = layer.d_out.to_host(), dqkv = layer.d_dqkv.to_host();
    for (int64_t b = 0; b < 3; b++)
      for (int64_t i = 0; i < HS; i++) {
        EXPECT_EQ(float(out[b * 2 * HS + i]), float(layer.qkv[layer.v(0).at(b, i)]));
        EXPECT_EQ(float(dqkv[layer.dv(0).at(b, i)]), float(layer.dout[b * 2 * HS + i]));
      }
  }
}

TEST(LONG_ON_EMU(Attention), OfTheLastQueriesIsThatOfTheWhole) {
  for (int64_t HS : {24, 64, 128})
    for (int64_t B : {2, 3}) {
      Layer layer({B, 140, HS, {0, 1, 0, 0}, 1});
      layer.forward();
      const std::vector<floatX> out = layer.d_out.to_host();
      const std::vector<float> lse = layer.d_lse.to_host();
      for (int64_t first_query : {1, 63, 64, 65, 128, 137, 139}) {
        SCOPED_TRACE(testing::Message() << "HS = " << HS << ", B = " << B << ", first query " << first_query);
        check_partial(PartialForward(layer, first_query, 140), 140, out, lse);
      }
    }
}

// Computes a sequence as generation does: a prompt at once, then position by position, then several together. The cache
// grows with each, and near multiples of 64, the keys of a tile, by one: a mask that is off by one shows there alone.
TEST(Attention, OfAGrowingSequenceIsThatOfTheWhole) {
  Layer layer({1, 140, 24, {0, 1, 0}, 1});
  layer.forward();
  const std::vector<floatX> out = layer.d_out.to_host();
  const std::vector<float> lse = layer.d_lse.to_host();
  int64_t first = 0;
  for (int64_t end : {5, 6, 7, 60, 61, 62, 63, 64, 65, 66, 70, 126, 127, 128, 129, 140}) {
    SCOPED_TRACE(testing::Message() << "positions " << first << " to " << end);
    std::vector<float> lse_of_keys;  // (NH, end)
    for (int64_t head = 0; head < 3; head++)
      lse_of_keys.insert(lse_of_keys.end(), &lse[head * 140], &lse[head * 140] + end);
    check_partial(PartialForward(layer, first, end), end, out, lse_of_keys);
    first = end;
  }
}

TEST(Attention, DoesNotReadPositionsAfterTheEnd) {
  Layer layer({1, 100, 16, {0, 1}, 1});
  for (int n = 0; n < 2; n++)
    for (int64_t t = 77; t < 100; t++)
      for (int64_t i = 0; i < 16; i++) {
        auto& buffer = n < layer.own ? layer.qkv : layer.source_kv;
        buffer[layer.k(n).at(t, i)] = buffer[layer.v(n).at(t, i)] = floatX(NAN);
      }
  layer.upload();
  layer.args.T = 77;
  layer.forward();
  const std::vector<floatX> out = layer.d_out.to_host();
  for (int64_t i = 0; i < 100 * layer.C(); i++)
    ASSERT_EQ(std::isfinite(float(out[i])), i < 77 * layer.C()) << "position " << i / layer.C();
}

inline void check_copy_rows(int64_t rows, int64_t width) {
  for (bool zeros : {false, true}) {
    const int64_t dst_stride = width + 8, src_stride = width + 16;
    const auto src = random_values<floatX>(rows * src_stride, 1);
    auto expected = random_values<floatX>(rows * dst_stride, 2);
    const DeviceArray<floatX> d_src(src), d_dst(expected);
    copy_rows({d_dst.data, dst_stride, zeros ? nullptr : d_src.data, src_stride, width}, rows);
    for (int64_t row = 0; row < rows; row++)
      for (int64_t i = 0; i < width; i++)
        expected[row * dst_stride + i] = zeros ? floatX(0.0f) : src[row * src_stride + i];
    EXPECT_TRUE(same_bits(d_dst.to_host(), expected)) << rows << " x " << width;
  }
}

TEST(CopyRows, CopiesRowsOrSetsThemToZero) {
  for (int64_t rows : {1, 37, 300})
    for (int64_t width : {8, 24, 768, 3072}) check_copy_rows(rows, width);
  // Rows beside and on a block's; widths beside and on the one at which a block has a single row, in fp32 and in bf16.
  for (int64_t rows : {127, 128, 129, 255, 256, 257}) check_copy_rows(rows, 8);
  for (int64_t width : {1016, 1024, 1032, 2040, 2048, 2056, 40'000}) check_copy_rows(3, width);
}

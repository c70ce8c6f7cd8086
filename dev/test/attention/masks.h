// Masks, several K/V heads a query head, and the keys with the highest scores.
#pragma once
#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <functional>
#include "dev/test/attention/layer.h"
#include "dev/test/long.h"

inline std::vector<MaskCase> many_masks() {
  std::vector<MaskCase> masks;
  for (int window : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000})
    masks.push_back({window});
  for (int window : {0, 40})
    for (int s : {1, 7, 16, 63, 64, 65, 100, 400}) {
      for (MaskPattern pattern : {MaskPattern::stride, MaskPattern::local_or_stride, MaskPattern::block})
        masks.push_back({window, pattern, s});
      for (MaskPattern pattern : {MaskPattern::column, MaskPattern::block_or_column})
        for (int c : {1, s / 3, s})
          if (c > 0) masks.push_back({window, pattern, s, c});
    }
  for (const MaskTerm& strided : {MaskTerm{MaskPattern::stride, 7}, MaskTerm{MaskPattern::local_or_stride, 12}})
    for (const MaskTerm& fixed : {MaskTerm{MaskPattern::block, 40}, MaskTerm{MaskPattern::column, 16, 3},
                                  MaskTerm{MaskPattern::column, 7, 2}, MaskTerm{MaskPattern::block_or_column, 65, 9}})
      for (int window : {0, 90}) masks.push_back({window, strided.pattern, strided.s, strided.c, fixed});
  return masks;
}

TEST(LONG_ON_EMU(AttentionMasks), MatchTheFormulaForEveryPatternAndLength) {
  const std::vector<int64_t> lengths = {1, 2, 63, 64, 65, 127, 130, 257, 299}, head_sizes = {8, 16, 40};
  const std::vector<Case> wirings = {{0, 0, 0, {0, 1}, 2},
                                     {0, 0, 0, {0, 0}, 1},
                                     {0, 0, 0, {0, {0, 1}}, 1},
                                     {0, 0, 0, {0}, 0}};
  size_t i = 0;
  for (const MaskCase& mask : many_masks())
    for (bool longest : {false, true}) {
      if (i++ % every > 0) continue;
      const int64_t T = longest ? 300 : lengths[i % lengths.size()];
      Case c = with_mask(wirings[i / 2 % wirings.size()], mask);
      c.B = 1 + int64_t(i) % (T < 300 ? 3 : 2), c.T = T, c.HS = head_sizes[i % head_sizes.size()];
      c.dq_accumulate = i / 3 % 2 == 1, c.v_apart = i % 5 == 0;
      check(c);
    }
}

// Strides of at least 8 and at most T / 16: there GPUs work on the positions with one remainder at a time, if all query
// heads of a K/V head have the same stride.
TEST(LONG_ON_EMU(AttentionMasks), WithStridesMatchTheFormula) {
  const std::vector<MaskCase> masks = {{0, MaskPattern::stride, 8},
                                       {40, MaskPattern::stride, 12},
                                       {0, MaskPattern::stride, 16},
                                       {100, MaskPattern::local_or_stride, 12}};
  for (int64_t T : {131, 300})
    for (int topk : {0, 3}) {
      Case c = {2, T, 24, {0, 0, {0, 1}, 2, {2, 3}, 4}, 2};
      c.masks = {masks[0], masks[0], masks[0], masks[2], masks[2], masks[1]};  // K/V heads 0 to 4 with one stride each
      c.topk = topk, c.whole_numbers = topk > 0, c.dq_accumulate = topk == 0, c.v_apart = T == 300;
      check(c);
      c.masks = {masks[0], masks[1], masks[2], masks[3], masks[0], masks[3]};  // 0 and 2 with several
      check(c);
    }
}

TEST(AttentionMasks, DifferByQueryHead) {
  for (int64_t T : {70, 300}) {
    Case c = {2, T, 32, {0, 0, 1, {0, 1}, 2, 2}, 1};
    c.masks = {{0},
               {1},
               {100},
               {0, MaskPattern::stride, 10},
               {0, MaskPattern::column, 9, 2},
               {64, MaskPattern::block_or_column, 40, 3}};
    check(c);
  }
}

// Here those before position 60, but for head 2.
TEST(AttentionMasks, LetQueriesSeeNoKey) {
  Case c = {2, 140, 16, {0, {0, 1}, 1}, 1};
  c.masks = {{0, MaskPattern::column, 64, 4}, {0, MaskPattern::column, 64, 4}, {0}};
  check(c);
  Layer layer(c);
  layer.forward();
  layer.backward();
  const std::vector<floatX> out = layer.d_out.to_host(), dqkv = layer.d_dqkv.to_host();
  const std::vector<float> lse = layer.d_lse.to_host(), delta = layer.d_delta.to_host();
  for (int64_t b = 0; b < c.B; b++)
    for (int64_t head = 0; head < 2; head++)
      for (int64_t t = 0; t < c.T; t++) {
        EXPECT_EQ(lse[(b * 3 + head) * c.T + t] == INFINITY, t < 60);
        if (t >= 60) continue;
        EXPECT_EQ(delta[(b * 3 + head) * c.T + t], 0.0f);
        for (int64_t i = head * c.HS; i < (head + 1) * c.HS; i++) {
          EXPECT_EQ(float(out[(b * c.T + t) * layer.C() + i]), 0.0f);
          EXPECT_EQ(float(dqkv[layer.q().at(b * c.T + t, i)]), 0.0f);
        }
      }
  c.T = 50, c.masks.pop_back(), c.kv_of_head.pop_back();  // nobody sees a key
  check(c);
}

TEST(LONG_ON_EMU(AttentionSources), HaveOneSoftmaxOverAllTheirKeys) {
  const std::vector<Case> wirings = {{0, 0, 0, {{0, 1}, {1, 2}}, 1},           // each own and another layer's
                                     {0, 0, 0, {{0, 1, 2}, 2, {0, 2}, 1}, 1},  // as many as it likes
                                     {0, 0, 0, {{0, 1}, {0, 1}, {0, 1}}, 2},
                                     {0, 0, 0, {{0, 1}}, 0}};
  size_t i = 0;
  for (int64_t T : {1, 7, 64, 127, 128, 129, 257, 300})
    for (int64_t HS : {16, 64, 80, 128})
      for (int of_shape = 0; of_shape < 2; of_shape++) {
        if (i++ % every > 0) continue;
        Case c = wirings[i % wirings.size()];
        c.B = 1 + int64_t(i) % 3, c.T = T, c.HS = HS, c.dq_accumulate = i % 2 == 1, c.v_apart = i % 3 == 0;
        check(c);
      }
  check({1, 130, 16, {{0, 1}, 2}, 1, /*q_scale=*/0});
  check({1, 130, 16, {{0, 1}, 2}, 1, 30, 30}, is_16_bit ? 15 : 30);  // huge scores, as above
}

TEST(AttentionSources, HaveSeparateStridesForKAndV) {
  for (int64_t T : {1, 70, 130})
    for (int64_t HS : {24, 64}) {
      Case c = {2, T, HS, {0, 1, 0}, 1};
      c.v_apart = true;
      check(c);
    }
}

TEST(LONG_ON_EMU(AttentionMasks), OfTheLastQueriesAreThoseOfTheWhole) {
  for (int topk : {0, 9})
    for (int64_t B : {1, 2}) {
      Case c = general_case(B, 140, 24);
      c.masks[0] = {0, MaskPattern::stride, 8};
      c.topk = topk, c.whole_numbers = topk > 0;
      if (is_refused(c)) continue;
      Layer layer(c);
      layer.forward();
      const std::vector<floatX> out = layer.d_out.to_host();
      const std::vector<float> lse = layer.d_lse.to_host();
      for (int64_t first_query : {1, 5, 63, 64, 65, 128, 139}) {
        SCOPED_TRACE(testing::Message() << "topk " << topk << ", B = " << B << ", first query " << first_query);
        check_partial(PartialForward(layer, first_query, 140), 140, out, lse);
      }
    }
}

#ifndef SLA_CPU  // the CPU has no decode kernels
// The attention of the last one to four queries, as generation computes it, has the values of the whole sequence's.
TEST(LONG_ON_EMU(AttentionDecode), IsThatOfTheWhole) {
  size_t i = 0;
  for (int64_t HS : {8, 24, 64, 80, 128})
    for (int64_t T : {1, 2, 64, 65, 127, 200}) {
      Case grouped = {1, T, HS, std::vector<Sources>(11, 0), 0}, masked = general_case(2, T, HS),
           apart = general_case(1, T, HS);
      apart.v_apart = true;
      apart.masks[2] = {0, MaskPattern::column, 300, 1};  // no query sees a key
      for (const Case& c : {Case{2, T, HS, {0, 1, 0}, 1}, grouped, masked, apart}) {
        if (i++ % (every > 1 ? 5 : 1) > 0) continue;
        Layer layer(c);
        layer.forward();
        const std::vector<floatX> out = layer.d_out.to_host();
        const std::vector<float> lse = layer.d_lse.to_host();
        for (int64_t first_query : {T - 1, T - 3, T - 4}) {
          if (first_query < 0) continue;
          SCOPED_TRACE(testing::Message() << c << ", first query " << first_query);
          check_partial(PartialForward(layer, first_query, T), T, out, lse);
        }
      }
    }
}

// A sequence's results do not depend on those beside it.
TEST(AttentionDecode, HasTheSameBitsAloneAndBesideOthers) {
  // The first sequence of both has the same values.
  Layer alone(general_case(1, 140, 24)), beside(general_case(2, 140, 24));
  const PartialForward a(alone, 139, 140), b(beside, 139, 140);
  EXPECT_TRUE(same_bits(a.out, {b.out.begin(), b.out.begin() + a.C}));
}
#endif

TEST(LONG_ON_EMU(AttentionTopK), MatchesTheFormulaWhereScoresAreExact) {
  size_t i = 0;
  for (int topk : {1, 2, 5, 20, 33, 63, 64, 65, 128, 300, 1000})
    for (int64_t T : {1, 7, 64, 130, 300})
      for (int64_t HS : {8, 64}) {
        // With a single query, dk would have the error of one or two roundings: too few to compare with the error
        // of `rounded`.
        Case c = i % 2 == 0 ? Case{2, T, HS, {0, {0, 1}, 1}, 1} : general_case(1, std::max<int64_t>(T, 3), HS);
        if (i++ % every > 0) continue;
        c.topk = topk, c.whole_numbers = true, c.dq_accumulate = i % 4 == 1, c.v_apart = i % 3 == 0;
        check(c);
      }
}

// The lowest score that is taken is compared with itself, so that one rounded otherwise in any kernel, the one with the
// transposed product included, loses or wins a key.
TEST(LONG_ON_EMU(AttentionTopK), ComparesTheSameBitsInEveryKernel) {
  for (int topk : {1, 2, 20})
    for (int64_t HS : {40, 64, 96}) {
      Case c = {1, 150, HS, {0, {0, 1}, 1}, 1};
      c.topk = topk;
      check(c);
    }
}

TEST(AttentionTopK, OfEqualScoresTakesTheFirstKeys) {
  for (int topk : {1, 5, 20, 31, 64, 100, 150}) {  // the last: some of the second K/V head's keys
    Case c = {1, 130, 16, {{0, 1}, 1}, 1, 1, /*k_scale=*/0};
    c.topk = topk;
    check(c);
  }
}

// With v and dout of rows of the identity matrix, HS of them at a time, out and dv are the probabilities that the
// forward and the backward pass use.
TEST(AttentionTopK, UsesTheSameKKeysInBothPasses) {
  const int64_t T = 140, HS = 64;
  for (int topk : {1, 5, 16, 63}) {
    Case c = {1, T, HS, {0}, 1};
    c.topk = topk;
    // For each query and key: 1 if the forward pass uses it, 2 if the backward pass does.
    std::vector<std::vector<int>> used(size_t(T), std::vector<int>(size_t(T), 0));
    for (int64_t part = 0; part < T; part += HS) {
      Layer layer(c);
      for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < HS; i++) {
          layer.qkv[layer.v(0).at(t, i)] = layer.dout[t * HS + i] = floatX(t == part + i ? 1.0f : 0.0f);
        }
      layer.upload();
      layer.forward();
      layer.backward();
      const std::vector<floatX> out = layer.d_out.to_host(), dqkv = layer.d_dqkv.to_host();
      for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < HS && part + i < T; i++) {
          if (float(out[t * HS + i]) != 0) used[t][part + i] |= 1;
          if (float(dqkv[layer.dv(0).at(t, i)]) != 0) used[part + i][t] |= 2;
        }
    }
    for (int64_t t = 0; t < T; t++) {
      int64_t keys = 0;
      for (int64_t j = 0; j < T; j++) {
        EXPECT_TRUE(used[t][j] == 0 || used[t][j] == 3)
            << "topk " << topk << ", query " << t << ", key " << j << ": " << used[t][j];
        keys += used[t][j] != 0;
      }
      EXPECT_EQ(keys, std::min<int64_t>(topk, t + 1)) << "topk " << topk << ", query " << t;
    }
  }
}

// A NaN key is chosen before all others, so that NaN reaches the loss, also where all scores beside it are too low.
// Scores of whole numbers are exact.
TEST(AttentionTopK, RanksNaNAsTheHighestScore) {
  const int64_t T = 320, HS = 16;
  const std::vector<int64_t> nan_keys = {100, 140, 141, 300};
  for (int topk : {1, 4, 6}) {
    SCOPED_TRACE(testing::Message() << "topk " << topk);
    Case c = {1, T, HS, {0}, 1, /*q_scale=*/4, /*k_scale=*/4};
    c.topk = topk, c.whole_numbers = true;
    Layer layer(c);
    for (int64_t key : nan_keys)
      for (int64_t i = 0; i < HS; i++) layer.qkv[layer.k(0).at(key, i)] = nans<floatX>(1)[0];
    layer.upload();
    layer.forward();
    const std::vector<floatX> out = layer.d_out.to_host();
    const std::vector<float> lowest = layer.d_topk_score.to_host();
    for (int64_t t = 0; t < T; t++) {
      std::vector<double> scores(size_t(t + 1));
      for (int64_t j = 0; j <= t; j++)
        for (int64_t i = 0; i < HS; i++)
          scores[j] += double(float(layer.qkv[layer.q().at(t, i)])) * double(float(layer.qkv[layer.k(0).at(j, i)]));
      for (double& score : scores) score = std::isnan(score) ? INFINITY : score;
      std::sort(scores.begin(), scores.end(), std::greater<double>());
      EXPECT_EQ(std::isnan(float(out[t * HS])), scores[0] == INFINITY) << t;
      if (t + 1 == topk) continue;  // all keys are chosen, and how that is written differs
      const double expected = t < topk ? -INFINITY : scores[topk - 1];
      EXPECT_EQ(std::isnan(lowest[t]) ? INFINITY : double(lowest[t]), expected) << t;
    }
  }
}

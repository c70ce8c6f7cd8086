// Results that must be the same to the bit: by other kernels, in other tiles, with any number of threads in any order.
#pragma once
#include <gtest/gtest.h>
#include <random>
#ifdef SLA_CPU
#include <omp.h>
#endif
#include <cmath>
#include "dev/test/attention/documents.h"
#include "dev/test/attention/dropout.h"
#include "dev/test/attention/layer.h"
#include "dev/test/attention/relative.h"
#include "dev/test/long.h"

// Masks that hide nothing define the same function as no mask. Other kernels may compute it, or sums may be in another
// order.
TEST(LONG_ON_EMU(AttentionMasks), ThatHideNothingChangeNothing) {
  const Case plain = {2, 300, 32, {0, 1, 0}, 1};
  Layer expected(plain);
  expected.forward();
  expected.backward();
  for (int i = 0; i < 5; i++) {
    Case c = plain;
    if (i == 0) c = with_mask(c, {300});
    if (i == 1) c = with_mask(c, {0, MaskPattern::block, 300});
    if (i == 2) c = with_mask(c, {0, MaskPattern::stride, 1});
    if (i == 3) c = with_mask(c, {0, MaskPattern::block_or_column, 7, 7});
    if (i == 4) c.topk = 300;
    if (is_refused(c)) continue;
    SCOPED_TRACE(testing::Message() << c);
    Layer layer(c);
    layer.forward();
    layer.backward();
    const auto results = layer.results(), expected_results = expected.results();
    for (size_t r = 0; r < results.size(); r++) {
#ifdef SLA_CPU
      const bool same_order = i < 3;
#else
      const bool same_order = true;
#endif
      EXPECT_TRUE(!same_order || same_bits(results[r], expected_results[r])) << "result " << r;
      std::vector<double> values, expected_values;  // without the NaN of unused columns
      for (size_t j = 0; j < results[r].size(); j++) {
        ASSERT_EQ(std::isnan(float(results[r][j])), std::isnan(float(expected_results[r][j])));
        if (!std::isnan(float(results[r][j])))
          values.push_back(float(results[r][j])), expected_values.push_back(float(expected_results[r][j]));
      }
      EXPECT_LE(relative_error(values, expected_values), tolerance) << "result " << r;
    }
  }
}

#if defined(PRECISION_BF16) && !defined(SLA_CPU)
// Each sum has the same order in the tiles for GPUs with large shared memory and in those for others.
TEST(LONG_ON_EMU(Attention), IsTheSameInLargeAndSmallSharedMemory) {
  const bool large = gpu().has_large_shared_memory;
  std::vector<Case> cases = {general_case(1, 150, 64)};
  for (int64_t HS : {64, 72, 128})
    for (int64_t T : {1, 150, 300}) cases.push_back({1, T, HS, {0, 0, 1}, 1});
  for (const Case& c : cases) {
    std::vector<std::vector<floatX>> results[2];
    for (int i = 0; i < 2; i++) {
      gpu().has_large_shared_memory = large && i == 0;
      Layer layer(c);
      layer.forward();
      layer.backward();
      results[i] = layer.results();
    }
    for (size_t r = 0; r < results[0].size(); r++)
      EXPECT_TRUE(same_bits(results[0][r], results[1][r])) << c << ", result " << r;
  }
  gpu().has_large_shared_memory = large;
}

// On a GPU `make gpu-check` sets SLA_ATTENTION, and on the emulated one test_ptx.
TEST(Attention, ByWgmmaIsThatByMma) {
  const AttentionBy by_wgmma = gpu().attention_by;
  if (!wgmma_is_asked_for()) GTEST_SKIP() << "SLA_ATTENTION=wgmma is not set";
  // They are so long that every buffer of tiles is used again: five of 128 keys, five of 64, four of 64 queries.
  for (const Case& c : {Case{1, 900, 64, {0}, 1}, Case{1, 480, 128, {0}, 1}}) {
    check(c);
    std::vector<std::vector<double>> results[2];
    for (int i = 0; i < 2; i++) {
      gpu().attention_by = i == 1 ? by_wgmma : AttentionBy::mma;
      Layer layer(c);
      layer.forward();
      layer.backward();
      for (const std::vector<floatX>& of_layer : layer.results()) {
        results[i].emplace_back();
        for (floatX x : of_layer)
          if (!std::isnan(float(x))) results[i].back().push_back(float(x));
      }
    }
    gpu().attention_by = by_wgmma;
    for (size_t r = 0; r < results[0].size(); r++)
      EXPECT_LE(relative_error(results[1][r], results[0][r]), tolerance) << c << ", result " << r;
  }
}

// Of every length, with head sizes and uses of keys and values drawn at random.
TEST(Attention, ByWgmmaMatchesTheFormulaForEveryLength) {
  if (!wgmma_is_asked_for()) GTEST_SKIP() << "SLA_ATTENTION=wgmma is not set";
  std::mt19937 random(7);
  for (int64_t T = 1; T <= 300; T++) {
    const int64_t HS = (T % 2 == 0 ? 40 : 104) + 8 * (random() % 4);  // tiles of 64 channels, of 128
    const int heads = 1 + random() % (T < 150 ? 3 : 2), kv_heads = 1 + random() % heads;
    Case c = {1 + (T < 100 && random() % 2), T, HS, {}, int(random() % (kv_heads + 1))};
    for (int i = 0; i < heads; i++) c.kv_of_head.push_back(int(i < kv_heads ? i : random() % kv_heads));
    std::shuffle(c.kv_of_head.begin(), c.kv_of_head.end(), random);
    c.dq_accumulate = random() % 2;
    check(c);
    if (testing::Test::HasFailure()) return;
  }
}

// The candidates' forward pass has as many blocks as the GPU has multiprocessors, and a block takes any number of tiles
// of queries; the backward pass with dS in memory takes any number of sequences at once.
TEST(Attention, HasTheSameBitsInAnyNumberOfBlocksAndChunks) {
  if (gpu().attention_by < AttentionBy::candidates) GTEST_SKIP() << "SLA_ATTENTION=candidates is not set";
  const int multiprocessors = gpu().multiprocessors;
  const int64_t most_bytes = DsMatrices::most_bytes;
  for (const Case& c : {Case{3, 300, 64, {0, 1, 0}, 1}, Case{2, 90, 128, {0, 1}, 2}}) {
    std::vector<std::vector<floatX>> first;
    for (int blocks : {1, 7, 132}) {
      gpu().multiprocessors = blocks;
      if (blocks == 7) DsMatrices::most_bytes = 1;  // one sequence at a time
      if (blocks == 132) DsMatrices::most_bytes = 2 * DsMatrices::elements_of_sequence(c.T, c.NH()) * sizeof(floatX);
      Layer layer(c);
      layer.forward();
      layer.backward();
      const std::vector<std::vector<floatX>> results = layer.results();
      if (first.empty()) first = results;
      for (size_t i = 0; i < results.size(); i++) EXPECT_TRUE(same_bits(results[i], first[i])) << c << ", " << blocks;
      DsMatrices::most_bytes = most_bytes;
    }
  }
  gpu().multiprocessors = multiprocessors;
}
#endif

#ifdef SLA_CPU
TEST(Attention, HasTheSameBitsForAnyNumberOfThreads) {
  const int all = omp_get_max_threads();
  Case top = general_case(2, 300, 24);
  top.topk = 20;
  for (const Case& c : {Case{2, 300, 64, {0, 0, 0, 0}, 1}, general_case(2, 300, 24), top,
                        with_dropout(with_documents(general_case(2, 300, 24)))}) {
    std::vector<std::vector<floatX>> expected;
    std::vector<std::vector<float>> expected_statistics;
    for (int threads : {1, 2, 3, 7}) {
      omp_set_num_threads(threads);
      Layer layer(c);
      layer.forward();
      layer.backward();
      const std::vector<std::vector<floatX>> results = layer.results();
      const std::vector<std::vector<float>> statistics = {layer.d_lse.to_host(), layer.d_delta.to_host()};
      if (expected.empty()) expected = results, expected_statistics = statistics;
      for (size_t i = 0; i < 2; i++)
        EXPECT_TRUE(same_bits(statistics[i], expected_statistics[i])) << threads << " threads, statistic " << i;
      for (size_t i = 0; i < results.size(); i++)
        EXPECT_TRUE(same_bits(results[i], expected[i])) << threads << " threads, result " << i;
    }
  }
  omp_set_num_threads(all);
}
#endif

#ifdef SLA_EMU
TEST(LONG_ON_EMU(Attention), HasTheSameBitsInAnyOrderOfThreads) {
  Case top = general_case(1, 70, 24);
  top.topk = 7;
  for (const Case& c :
       {Case{2, 70, 24, {0, 0, 1}, 1}, Case{1, 70, 72, {0, 0, 1}, 1}, Case{1, 200, 64, {0, 1}, 1},
        Case{1, 140, 128, {0, 0}, 1}, general_case(1, 140, 24), top, with_relative({2, 80, 24, {0, {0, 1}}, 1}),
        with_relative({1, 70, 72, {0, 0}, 1}, 5), with_dropout(with_documents({2, 140, 64, {0, {0, 1}}, 1}))}) {
    if (is_refused(c)) continue;
    std::vector<std::vector<floatX>> first;
    std::vector<float> first_lse;
    for (uint64_t seed : {1, 2, 3, 4, 5, 6}) {
      emu::set_seed(seed);
      Layer layer(c);
      layer.forward();
      layer.backward();
      std::vector<std::vector<floatX>> results = layer.results();
      if (c.dropout == 0) results.push_back(PartialForward(layer, c.T - 2, c.T).out);
      if (first.empty()) first = results, first_lse = layer.d_lse.to_host();
      for (size_t i = 0; i < results.size(); i++) EXPECT_TRUE(same_bits(results[i], first[i])) << "seed " << seed;
      EXPECT_TRUE(same_bits(layer.d_lse.to_host(), first_lse)) << "seed " << seed;
    }
  }
  emu::set_seed(1);
}
#endif

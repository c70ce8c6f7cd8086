// What is pure arithmetic: shapes, wiring, layout, random numbers, schedules, sampling.
#include <gtest/gtest.h>            // TEST
#include <cmath>                    // std::sqrt
#include <set>                      // std::set
#include "helpers.h"                // make_config, EXPECT_ERROR
#include "llmc/utils/arena.h"       // ArenaLayout
#include "llmc/model/config.h"      // ModelConfig
#include "llmc/model/kv_plan.h"     // make_kv_plan
#include "llmc/model/parameters.h"  // make_parameter_table
#include "llmc/utils/random.h"      // philox
#include "llmc/text/sampler.h"      // sample_token
#include "llmc/run/print.h"         // count_text, bytes_text, time_text
#include "llmc/run/schedule.h"      // Schedule

// ----------------------------------------------------------------------------
// Config

TEST(Config, PresetsAreGpt2AndGpt3) {
  ModelConfig c;
  ASSERT_TRUE(config_from_preset("d36", c));
  EXPECT_EQ(c.num_layers, 36);
  EXPECT_EQ(c.num_heads, 20);
  EXPECT_EQ(c.channels, 1280);
  EXPECT_EQ(c.max_seq_len, 1024);
  EXPECT_EQ(c.wiring.num_skip_layer, 27);
  EXPECT_EQ(c.wiring.num_skip_head, 15);
  for (const char* name : {"d12", "d24", "d36", "d48", "gpt3:384", "gpt3:768", "gpt3:1024", "gpt3:1536", "gpt3:2048", "gpt3:2560",
                           "gpt3:4096", "gpt3:5120", "gpt3:12288"}) {
    ASSERT_TRUE(config_from_preset(name, c)) << name;
    EXPECT_EQ(error_of([&] { validate(c); }), "") << name;
    EXPECT_EQ(c.wiring.num_skip_layer, c.num_layers * 3 / 4) << name;
  }
  EXPECT_FALSE(config_from_preset("d13", c));
  EXPECT_FALSE(config_from_preset("gpt3:", c));
}

TEST(Config, RefusesImpossibleModels) {
  EXPECT_ERROR(validate(make_config(12, 12, 770, 9, 9)), "12 heads do not divide 770 channels");
  EXPECT_ERROR(validate(make_config(12, 12, 768, 0, 9)), "--skip-layers 0");
  EXPECT_ERROR(validate(make_config(12, 12, 768, 12, 9)), "--skip-layers 12");
  EXPECT_ERROR(validate(make_config(12, 12, 768, -1, 9)), "--skip-layers -1");
  EXPECT_ERROR(validate(make_config(12, 12, 768, 9, 13)), "--skip-heads 13");
  EXPECT_ERROR(validate(make_config(12, 12, 768, 9, -1)), "--skip-heads -1");
  EXPECT_ERROR(validate(make_config(0, 12, 768, 0, 0)), "--layers");
  EXPECT_ERROR(validate(make_config(1, 12, 768, 1, 1)), "--skip-layers 1");
  EXPECT_EQ(error_of([] { validate(make_config(12, 12, 768, 99, 0)); }), "") << "without skip heads any n_l is plain GPT-2";
  EXPECT_EQ(error_of([] { validate(make_config(12, 12, 768, 11, 12)); }), "");
}

// ----------------------------------------------------------------------------
// The K/V plan, against the design's sentences, one by one

static void check_plan(int L, int h, int n_l, int n_h) {
  SCOPED_TRACE(format("L %d, h %d, n_l %d, n_h %d", L, h, n_l, n_h));
  const KVPlan plan = make_kv_plan(make_config(L, h, h, n_l, n_h));
  for (int l = 0; l < L; l++) {
    std::set<int> heads_seen;
    for (int i = 0; i < h; i++) {
      const bool shares = i >= h - n_h && l >= n_l;
      EXPECT_EQ(plan.source_of(l, i).layer, shares ? l - n_l : l);
      EXPECT_EQ(plan.source_of(l, i).head, i);
      const bool dead = i >= h - n_h && l >= n_l && l + n_l >= L;
      EXPECT_EQ(plan.projected_index({l, i}) < 0, n_h > 0 && dead);
      EXPECT_EQ(plan.shared_index({l, i}) >= 0, n_h > 0 && i >= h - n_h && l + n_l < L);
    }
    for (const KVUse& use : plan.uses[l]) {
      for (int head : use.query_heads) {
        EXPECT_TRUE(heads_seen.insert(head).second) << "a head attends to one K/V head";
        EXPECT_EQ(plan.source_of(l, head).layer, use.source.layer);
        EXPECT_EQ(plan.source_of(l, head).head, use.source.head);
      }
      const bool a_higher_layer_uses_it = use.source.layer == l && plan.shared_index(use.source) >= 0;
      EXPECT_EQ(use.accumulate, a_higher_layer_uses_it);
      EXPECT_GE(plan.projected_index(use.source), 0) << "what is used is projected";
    }
    EXPECT_EQ(int(heads_seen.size()), h);
    EXPECT_TRUE(plan.unused(l).empty());
  }
  // A layer that shares K/V has an accumulator, which no other layer has while it is in use.
  for (int s = 0; s < L; s++) {
    const bool is_source = n_h > 0 && s + n_l < L;
    EXPECT_EQ(plan.accumulator[s] >= 0, is_source);
    for (int other = s + 1; is_source && other < std::min(L, s + n_l); other++)
      EXPECT_NE(plan.accumulator[other], plan.accumulator[s]) << "in use from layer s + n_l down to s";
  }
  EXPECT_EQ(plan.num_accumulators, n_h > 0 ? std::min(n_l, L - n_l) : 0);
}

// BUG llmc/model/wiring.h: `i >= num_heads - w.num_skip_head` -> `i >= num_heads - w.num_skip_layer`
TEST(KVPlan, IsTheDesignsForEveryWiringOfSmallModels) {
  for (int L = 1; L <= 8; L++)
    for (int h = 1; h <= 4; h++)
      for (int n_h = 0; n_h <= h; n_h++)
        for (int n_l = n_h > 0 ? 1 : 0; n_l < L; n_l++) check_plan(L, h, n_l, n_h);
}

TEST(Parameters, AreAtLeastAsManyAsTheBoundOfAnyModel) {
  for (int L : {1, 2, 12})
    for (int C : {4, 32, 768})
      for (bool bias : {false, true}) {
        ModelConfig c = make_config(L, 4, C, L > 1 ? 1 : 0, L > 1 ? 4 : 0);
        c.bias = bias;
        const double bytes = double(make_parameter_table(c, make_kv_plan(c)).layout.bytes);
        EXPECT_LE(least_parameters(c) * sizeof(float), bytes) << L << " " << C;
        EXPECT_GE(least_parameters(c) * sizeof(float), bytes / 3) << L << " " << C;
      }
}

TEST(KVPlan, KeepsDeadHeadsWhenAsked) {
  const KVPlan plan = make_kv_plan(make_config(12, 12, 768, 9, 9), /*keep_dead=*/true);
  EXPECT_EQ(plan.projected[11].size(), 12u);
  EXPECT_EQ(plan.unused(11).size(), 9u);
  EXPECT_EQ(plan.unused(2).size(), 0u);
}

TEST(KVPlan, TakesAnyTableSuchAsMultiQueryOverSharedLayers) {
  // Four layers, four heads: all heads of layers 2k and 2k + 1 attend to head 0 of layer 2k, but the top layer's last to layer 0's.
  std::vector<KVSource> table;
  for (int l = 0; l < 4; l++)
    for (int i = 0; i < 4; i++) table.push_back({l == 3 && i == 3 ? 0 : l / 2 * 2, 0});
  const KVPlan plan = make_kv_plan(4, 4, table);
  EXPECT_EQ(plan.projected[0], std::vector<int>{0});
  EXPECT_TRUE(plan.projected[1].empty());
  ASSERT_EQ(plan.uses[3].size(), 2u);
  EXPECT_EQ(plan.uses[3][0].source.layer, 0);
  EXPECT_EQ(plan.uses[3][0].query_heads, std::vector<int>{3});
  EXPECT_FALSE(plan.uses[3][0].accumulate);
  EXPECT_TRUE(plan.uses[1][0].accumulate) << "layer 3 has written its gradient already";
  EXPECT_TRUE(plan.uses[0][0].accumulate);
  EXPECT_EQ(plan.num_accumulators, 2);
}

TEST(KVPlan, IsDrawnWithItsSourceLayers) {
  const std::string text = draw(make_kv_plan(make_config(4, 4, 8, 3, 3)));
  EXPECT_NE(text.find("3 |  .  0  0  0 | projects 1 of 4\n"), std::string::npos) << text;
  EXPECT_NE(text.find("0 |  .  .  .  . | projects 4 of 4, shares 3\n"), std::string::npos) << text;
}

// ----------------------------------------------------------------------------
// Layout

TEST(Arena, TensorsAreAlignedAndDoNotOverlap) {
  const ModelConfig config = make_config(3, 4, 20, 2, 3);
  const ParameterTable table = make_parameter_table(config, make_kv_plan(config));
  size_t end = 0;
  for (const TensorSpec& tensor : table.layout.tensors) {
    EXPECT_EQ(tensor.offset % 256, 0u) << tensor.name;
    EXPECT_GE(tensor.offset, end) << tensor.name;
    EXPECT_LT(tensor.offset, end + 256) << tensor.name;
    end = tensor.offset + tensor.bytes() + size_t(tensor.tail_elements) * tensor.element_bytes;
  }
  EXPECT_GE(table.layout.bytes, end);
}

TEST(Shard, HoldEveryParameterOnceInEqualShares) {
  for (bool bias : {false, true}) {
    ModelConfig config = make_config(3, 4, 20, 2, 3);
    config.vocab_size = 101, config.max_seq_len = 7, config.bias = bias;
    for (int ranks = 1; ranks <= 9; ranks++) {
      std::vector<int> owners;  // of each element of the full arenas
      int64_t num_owned = 0;
      for (int rank = 0; rank < ranks; rank++) {
        const ParameterTable table = make_parameter_table(config, make_kv_plan(config), {rank, ranks});
        owners.resize(table.layout.bytes / sizeof(float));
        EXPECT_EQ(table.buckets.size(), 3u + 2);
        EXPECT_EQ(table.layout.bytes % (256 * size_t(ranks)), 0u);
        int64_t end = 0;
        for (const ParameterChunk& chunk : parameter_chunks(table)) {
          EXPECT_EQ(chunk.begin % 64, 0);
          EXPECT_EQ(chunk.state % 64, 0);
          EXPECT_GE(chunk.state, end) << "rank " << rank << " of " << ranks;
          end = chunk.state + chunk.count;
          for (int i = 0; i < chunk.count; i++) owners[chunk.begin + i]++;
          num_owned += chunk.count;
        }
        EXPECT_LE(end, int64_t(table.layout.bytes / sizeof(float)) / ranks);
      }
      const ParameterTable table = make_parameter_table(config, make_kv_plan(config), {0, ranks});
      EXPECT_EQ(num_owned, table.num_parameters);
      for (const TensorSpec& tensor : table.layout.tensors)
        for (int64_t i = 0; i < tensor.num_elements(); i++) EXPECT_EQ(owners[tensor.element_offset() + i], 1) << tensor.name;
    }
  }
}

// Tensors of a bucket are neighbours, and a collective on a bucket touches no other's.
TEST(Buckets, AreTheEmbeddingsEachLayerAndTheFinalLayerNorm) {
  const ModelConfig config = make_config(3, 4, 20, 2, 3);
  const ParameterTable table = make_parameter_table(config, make_kv_plan(config), {0, 4});
  for (const ParameterSpec& spec : table.specs) {
    const TensorSpec& tensor = table.layout.tensors[spec.tensor];
    const int expected = tensor.name[0] == 'w' ? 0 : tensor.name[0] == 'h' ? tensor.name[2] - '0' + 1 : 4;
    const ParameterBucket& bucket = table.buckets[spec.bucket];
    EXPECT_EQ(spec.bucket, expected) << tensor.name;
    EXPECT_GE(tensor.element_offset(), bucket.begin) << tensor.name;
    EXPECT_LE(tensor.element_offset() + tensor.num_elements(), bucket.begin + bucket.count) << tensor.name;
  }
}

// ----------------------------------------------------------------------------
// Random numbers, schedules, sampling

// BUG llmc/utils/random.h: `key1 += 0xBB67AE85u;` -> `key1 += 0x9E3779B9u;`
TEST(Random, IsPhilox4x32WithItsPublishedKnownAnswers) {
  // From Random123's kat_vectors, philox4x32-10: zeros, ones, and digits of pi.
  auto expect = [](Philox x, std::vector<uint32_t> words) {
    EXPECT_EQ(std::vector<uint32_t>(x.word, x.word + 4), words);
  };
  expect(philox(0, 0, 0), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  expect(philox(~0ull, ~0ull, ~0ull), {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  expect(philox(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88), {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST(Random, NormalsHaveMeanZeroAndVarianceOne) {
  double sum = 0, squares = 0, fourth = 0;
  const int n = 200000;
  for (int i = 0; i < n; i++) {
    double x = random_normal(3, RandomStream::test, 0, uint64_t(i));
    sum += x, squares += x * x, fourth += x * x * x * x;
  }
  EXPECT_NEAR(sum / n, 0, 0.01);
  EXPECT_NEAR(squares / n, 1, 0.02);
  EXPECT_NEAR(fourth / n, 3, 0.1);
}

// BUG llmc/run/schedule.h: `double(step) / double(warmup_steps)` -> `double(step - 1) / double(warmup_steps)`
TEST(Schedule, WarmsUpThenFollowsItsShape) {
  Schedule s = {"cosine", 1.0, 0.1, 10, 110};
  EXPECT_DOUBLE_EQ(s(1), 0.1);
  EXPECT_DOUBLE_EQ(s(10), 1.0);
  EXPECT_DOUBLE_EQ(s(11), 1.0);
  EXPECT_NEAR(s(61), 0.55, 1e-12);
  EXPECT_NEAR(s(111), 0.1, 1e-12);
  s.kind = "linear";
  EXPECT_NEAR(s(36), 0.1 + 0.9 * 0.75, 1e-12);
  s.kind = "constant";
  EXPECT_DOUBLE_EQ(s(1), 0.1);
  EXPECT_DOUBLE_EQ(s(110), 1.0);
  s.kind = "wsd";  // decays over the last 22 of 110 steps
  EXPECT_DOUBLE_EQ(s(89), 1.0);
  EXPECT_NEAR(s(100), 0.1 + 0.9 * (1 - std::sqrt(0.5)), 1e-12);
  EXPECT_NEAR(s(111), 0.1, 1e-12);
}

TEST(Sampler, DrawsByTheCumulativeDistribution) {
  const float logits[] = {std::log(0.2f), std::log(0.5f), std::log(0.3f)};
  EXPECT_EQ(sample_token(logits, 3, 0.0), 0);
  EXPECT_EQ(sample_token(logits, 3, 0.19), 0);
  EXPECT_EQ(sample_token(logits, 3, 0.21), 1);
  EXPECT_EQ(sample_token(logits, 3, 0.69), 1);
  EXPECT_EQ(sample_token(logits, 3, 0.71), 2);
  EXPECT_EQ(sample_token(logits, 3, 0.9999999999999999), 2);
}

TEST(Sampler, NeverDrawsATokenOfProbabilityZero) {
  const float none = -INFINITY, logits[] = {none, 0, none};
  for (double uniform : {0.0, 0.5, 0.9999999999999999}) EXPECT_EQ(sample_token(logits, 3, uniform), 1) << uniform;
}

TEST(Sampler, RefusesLogitsThatMakeNoDistribution) {
  for (float bad : {NAN, INFINITY})
    for (int place : {0, 1, 2}) {
      float logits[] = {0, 1, 2};
      logits[place] = bad;
      EXPECT_ERROR(sample_token(logits, 3, 0.5), "the model's logits are not finite");
    }
  const float none[] = {-INFINITY, -INFINITY};
  EXPECT_ERROR(sample_token(none, 2, 0.5), "the model's logits are not finite");
}

// BUG llmc/text/sampler.h: `sum += std::exp(double(logits[i] - max) / temperature);` -> `sum += std::exp(double(logits[i] - max));`
TEST(Sampler, SharpensTheDistributionBelowTemperatureOne) {
  const float logits[] = {std::log(0.2f), std::log(0.5f), std::log(0.3f)};  // squared: 0.04, 0.25, 0.09 of 0.38
  EXPECT_EQ(sample_token(logits, 3, 0.10, 0.5), 0);
  EXPECT_EQ(sample_token(logits, 3, 0.11, 0.5), 1);
  EXPECT_EQ(sample_token(logits, 3, 0.76, 0.5), 1);
  EXPECT_EQ(sample_token(logits, 3, 0.77, 0.5), 2);
}

// ----------------------------------------------------------------------------
// Numbers for people

TEST(Print, NumbersHaveTheUnitThatFits) {
  EXPECT_EQ(count_text(9999), "9999");
  EXPECT_EQ(count_text(1e4), "10.0 k");
  EXPECT_EQ(count_text(1e6), "1.00 M");
  EXPECT_EQ(count_text(1e9), "1.00 B");
  EXPECT_EQ(bytes_text(500), "0.5 kB");
  EXPECT_EQ(bytes_text(1e6), "1.0 MB");
  EXPECT_EQ(bytes_text(1e9), "1.00 GB");
  EXPECT_EQ(time_text(59.4), "59s");
  EXPECT_EQ(time_text(60), "1m00s");
  EXPECT_EQ(time_text(3599), "59m59s");
  EXPECT_EQ(time_text(3600), "1h00m");
}

// What the model keeps and what it may not read, and the bits of a second and of a resumed run.
#pragma once
#include <gtest/gtest.h>
#include "dev/test/files.h"
#include "dev/test/long.h"
#include "dev/test/model/model.h"

TEST(LONG_ON_EMU(Memory), NoActivationIsReadBeforeItIsWritten) {
  for (int recompute = 0; recompute <= 4; recompute++) {
    std::vector<std::vector<double>> curves;
    for (int fill : {0x00, 0xff}) {  // zeros, NaN
      auto model = make_model(small_config(), 2, 35, recompute);
      gpt2_fill_activations(*model, fill);
      curves.push_back(loss_curve(*model, 2, 5));
    }
    EXPECT_TRUE(std::isfinite(curves[1].back()));
    EXPECT_EQ(curves[0], curves[1]) << "recompute level " << recompute;
  }
}

TEST(Memory, EachLevelOfRecomputationKeepsLess) {
  ModelConfig d12;
  ASSERT_TRUE(config_from_preset("d12", d12));
  const int64_t T = 1024, C = 768, L = 12, x = sizeof(floatX);
  std::vector<int64_t> bytes;
  for (int recompute = 0; recompute <= 4; recompute++) {
    GPT2 model;
    gpt2_declare(model, d12, {1, int(T), Recompute(recompute)});
    bytes.push_back(int64_t(model.activations.layout.bytes));
  }
  const int64_t lse = 12 * T * int64_t(sizeof(float));
  EXPECT_NEAR(double(bytes[0] - bytes[1]), double((L - 1) * T * 4 * C * x), 1e5);  // fch_act
  EXPECT_NEAR(double(bytes[1] - bytes[2]), double((L - 1) * T * 2 * C * x), 1e5);  // ln1, ln2
  // Level 3 also computes q, att, residual2, fch and lse again.
  EXPECT_NEAR(double(bytes[2] - bytes[3]), double((L - 1) * (T * (1 + 1 + 1 + 4) * C * x + lse)), 1e5);
  // Level 4 has an eighth of fch, fch_act and their gradient.
  EXPECT_NEAR(double(bytes[3] - bytes[4]), double(T * 7 / 8 * 3 * 4 * C * x), 1e5);
}

TEST(Memory, OverlappingSkipsNeedAsManyAccumulatorsAsLayersAreSkipped) {
  GPT2 model;
  gpt2_declare(model, small_config(), {1, 32});
  EXPECT_EQ(model.attention_plan.num_accumulators, 2);
}

TEST(LONG_ON_EMU(Bits), AreTheSameInASecondRun) {
  auto a = make_model(small_config(), 2, 35), b = make_model(small_config(), 2, 35);
  EXPECT_EQ(loss_curve(*a, 3, 11), loss_curve(*b, 3, 11));
  expect_the_same_weights_and_moments(*a, *b);
}

#ifdef SLA_EMU
// On the emulated GPU a seed picks the order in which threads and blocks run. Whatever depends on it depends on a race.
TEST(LONG_ON_EMU(Bits), DoNotDependOnTheOrderOfThreads) {
  const struct {
    const char* wiring;
    int T, recompute;
    double dropout;
  } cases[] = {{"sla(2,3)", 35, 0, 0},
               {"sla(2,3)", 35, 4, 0},
               {"documents rope sla(2,3) gqa(2) window(50,SL)", 70, 3, 0.2},
               {"documents relative also(1,2)", 70, 0, 0}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.wiring);
    ModelConfig config = small_config();
    config.wiring = parse_wiring(c.wiring), config.end_of_text = 1;
    emu::set_seed(1);
    auto a = make_model(config, 2, c.T, c.recompute, /*keep_dead_kv=*/false, c.dropout);
    const auto expected = loss_curve(*a, 2, 11);
    for (uint64_t seed = 2; seed <= 4; seed++) {
      emu::set_seed(seed);
      auto b = make_model(config, 2, c.T, c.recompute, /*keep_dead_kv=*/false, c.dropout);
      EXPECT_EQ(loss_curve(*b, 2, 11), expected) << "seed " << seed;
      expect_the_same_weights_and_moments(*a, *b);
    }
  }
}
#endif

TEST(LONG_ON_EMU(Bits), AreThoseOfAnUninterruptedRunAfterAResume) {
  const TemporaryFolder folder;
  auto update = [&](GPT2& model, int step) {
    const auto inputs =
        random_tokens(int64_t(model.training->B) * model.training->T, model.config.vocab_size, uint32_t(step));
    gpt2_zero_grad(model);
    micro_step(model, inputs, inputs, model.training->B, model.training->T, 1);
    gpt2_update(model, step, {1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0});
  };
  auto whole = make_model(small_config(), 2, 35), resumed = make_model(small_config(), 2, 35);
  init_weights(*whole, 5);
  for (int step = 1; step <= 3; step++) update(*whole, step);
  std::vector<float> m(whole->state_bytes() / sizeof(float)), v(m.size());
  fetch_shard(*whole, whole->m_memory, m.data());
  fetch_shard(*whole, whole->v_memory, v.data());
  const std::string checkpoint = write_checkpoint(folder.path, whole->parameters,
                                                  {{3, 0, 1},
                                                   model_text_files(whole->config),
                                                   fetch_from(*whole, whole->master_memory),
                                                   m.data(),
                                                   v.data()});
  read_weights(checkpoint, resumed->parameters, store_weights(*resumed));
  read_moments(checkpoint, resumed->parameters, store_shard(*resumed, resumed->m_memory),
               store_shard(*resumed, resumed->v_memory));
  for (int step = 4; step <= 6; step++) update(*whole, step), update(*resumed, step);
  expect_the_same_weights_and_moments(*whole, *resumed);
}

TEST(LONG_ON_EMU(Bits), DifferWithAnotherSeed) {
  auto a = make_model(small_config(), 2, 35), b = make_model(small_config(), 2, 35);
  EXPECT_NE(loss_curve(*a, 1, 11), loss_curve(*b, 1, 12));
}

// `route`: what an update draws, and where nothing is drawn. losses.h and dropout.h compare with the reference, and
// over micro-batches and levels of recomputation.
#pragma once
#include <gtest/gtest.h>
#include <cmath>
#include <set>
#include <string>
#include <utility>
#include <vector>
#include "dev/test/long.h"
#include "dev/test/model/model.h"

// Five standard deviations of a mean of `count` draws that are 1 with probability p.
inline double five_sigma(double p, double count) { return 5 * std::sqrt(p * (1 - p) / count); }

TEST(Route, DrawsEachSourceAsOftenAsItSaysAndIndependently) {
  constexpr int L = 6, updates = 100000;
  constexpr double p = 0.3;
  for (const uint64_t seed : {uint64_t(1), uint64_t(0x123456789a)}) {
    std::vector<std::vector<double>> share(L, std::vector<double>(L));  // (L, source)
    // Of pairs of layers of one update, and of a layer in two updates, how often both use another layer.
    std::vector<std::vector<double>> both(L, std::vector<double>(L));
    std::vector<double> twice(L);
    std::vector<bool> before(L);
    for (int64_t update = 1; update <= updates; update++) {
      std::vector<bool> moved;
      for (int l = 0; l < L; l++) {
        const int source = drawn_source(p, seed, update, l);
        ASSERT_TRUE(0 <= source && source <= l);
        share[l][source] += 1.0 / updates;
        moved.push_back(source != l);
        for (int below = 0; below < l; below++) both[l][below] += moved[l] && moved[below] ? 1.0 / updates : 0;
        twice[l] += moved[l] && before[l] ? 1.0 / updates : 0;
      }
      before = moved;
    }
    for (int l = 1; l < L; l++) {
      SCOPED_TRACE(l);
      EXPECT_NEAR(share[l][l], 1 - p, five_sigma(p, updates));
      for (int source = 0; source < l; source++)
        EXPECT_NEAR(share[l][source], p / l, five_sigma(p / l, updates)) << source;
      for (int below = 1; below < l; below++) EXPECT_NEAR(both[l][below], p * p, five_sigma(p * p, updates)) << below;
      EXPECT_NEAR(twice[l], p * p, 2 * five_sigma(p * p, updates));
    }
  }
}

// Also where a graph is replayed whose first update drew other layers.
TEST(LONG_ON_EMU(Route), FollowsTheUpdatesNumberAlone) {
  const ModelConfig config = four_layers("route(0.6) rope");
  const auto tokens = random_tokens(2 * 24, config, 1);
  auto gradients_of = [&](GPT2& model, int64_t update) {
    model.draw = {3, update, 0};
    gpt2_zero_grad(model);
    const double loss = micro_step(model, tokens, tokens, 2, 24, 1);
    return std::pair(loss, full_gradient(model, 3));
  };
  auto make = [&] {
    auto model = make_model(config, 2, 24);
    set_weights(*model, random_parameters(config, 42));
    return model;
  };
  auto several = make();
  std::vector<double> losses;
  for (int64_t update = 1; update <= 6; update++) {
    const auto [loss, gradient] = gradients_of(*several, update);
    losses.push_back(loss);
    const auto alone = gradients_of(*make(), update);
    EXPECT_EQ(loss, alone.first) << "update " << update;
    EXPECT_EQ(gradient, alone.second) << "update " << update;
  }
  EXPECT_GE(std::set<double>(losses.begin(), losses.end()).size(), 4u) << "updates draw different layers";
}

TEST(LONG_ON_EMU(Route), IsOffWhereNothingIsTrained) {
  const auto tokens = random_tokens(2 * 24, four_layers("plain"), 1);
  std::vector<std::vector<float>> losses;
  for (const char* wiring : {"sla(2,3)", "route(1) sla(2,3)"}) {
    const ModelConfig config = four_layers(wiring);
    auto model = make_model(config, 2, 24);
    set_weights(*model, random_parameters(config, 42));
    micro_step(*model, tokens, tokens, 2, 24, 1);
    gpt2_forward_segments(*model, tokens.data(), 2, 24);
    gpt2_loss(*model, tokens.data(), {2, 24}, 1);
    losses.push_back(to_floats(model->acts.losses, tokens.size()));
  }
  EXPECT_EQ(losses[0], losses[1]);
}

// With a probability at which no layer is drawn gradients begin with zeros, and are the same.
TEST(LONG_ON_EMU(Route), ThatDrawsNothingHasTheBitsOfNone) {
  for (const std::string others : {"", "sla(2,3) gqa(4)", "vres rope"}) {
    auto none = make_model(four_layers(others.empty() ? "plain" : others), 2, 24, 1, /*keep_dead_kv=*/true);
    const std::vector<double> losses = loss_curve(*none, 3, 5);
    for (const std::string route : {"route(0) ", "route(1e-9) "}) {
      SCOPED_TRACE(route + others);
      auto model = make_model(four_layers(route + others), 2, 24, 1, /*keep_dead_kv=*/true);
      EXPECT_EQ(loss_curve(*model, 3, 5), losses);
      expect_the_same_weights_and_moments(*model, *none);
    }
  }
}

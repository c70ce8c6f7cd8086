// Random numbers, schedules, how a token is drawn from logits, and text that comes token by token.
#include <gtest/gtest.h>
#include <cmath>
#include "helpers.h"
#include "llmc/base/random.h"
#include "llmc/text/sampler.h"
#include "llmc/text/text_stream.h"
#include "llmc/train/schedule.h"

TEST(Random, IsPhilox4x32WithItsPublishedKnownAnswers) {
  // From Random123's kat_vectors, philox4x32-10: zeros, ones, and digits of pi.
  auto expect = [](Philox x, std::vector<uint32_t> words) {
    EXPECT_EQ(std::vector<uint32_t>(x.word, x.word + 4), words);
  };
  expect(philox(0, 0, 0), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  expect(philox(~0ull, ~0ull, ~0ull), {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  expect(philox(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88),
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
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
  const std::vector<float> logits = {std::log(0.2f), std::log(0.5f), std::log(0.3f)};
  const struct {
    double uniform;
    int token;
  } cases[] = {{0.0, 0}, {0.19, 0}, {0.21, 1}, {0.69, 1}, {0.71, 2}, {0.9999999999999999, 2}};
  for (const auto& c : cases) EXPECT_EQ(sample_token(logits, c.uniform, {}), c.token) << c.uniform;
}

TEST(Sampler, NeverDrawsATokenOfProbabilityZero) {
  const float none = -INFINITY;
  for (double uniform : {0.0, 0.5, 0.9999999999999999})
    EXPECT_EQ(sample_token({none, 0, none}, uniform, {}), 1) << uniform;
}

TEST(Sampler, RefusesLogitsThatMakeNoDistribution) {
  for (float bad : {NAN, INFINITY})
    for (int place : {0, 1, 2})
      for (double temperature : {0.0, 1.0}) {
        std::vector<float> logits = {0, 1, 2};
        logits[place] = bad;
        EXPECT_ERROR(sample_token(logits, 0.5, {1, temperature}), "the model's logits are not finite");
      }
  EXPECT_ERROR(sample_token({-INFINITY, -INFINITY}, 0.5, {}), "the model's logits are not finite");
}

TEST(Sampler, SharpensTheDistributionBelowTemperatureOne) {
  // Squared, these probabilities are 0.04, 0.25 and 0.09 of 0.38.
  const std::vector<float> logits = {std::log(0.2f), std::log(0.5f), std::log(0.3f)};
  const struct {
    double uniform;
    int token;
  } cases[] = {{0.10, 0}, {0.11, 1}, {0.76, 1}, {0.77, 2}};
  for (const auto& c : cases) EXPECT_EQ(sample_token(logits, c.uniform, {1, 0.5}), c.token) << c.uniform;
}

TEST(Sampler, TakesTheLikeliestTokenAtTemperatureZero) {
  for (double uniform : {0.0, 0.5, 0.9999999999999999})
    EXPECT_EQ(sample_token({-2, 3, -1, 3, 2.9f}, uniform, {1, 0}), 1) << uniform;
}

// The share of a fine grid of uniform numbers that each token gets.
static std::vector<double> shares(const std::vector<float>& logits, const SamplingOptions& o,
                                  const std::vector<int>& tokens = {}) {
  std::vector<double> counts(logits.size());
  for (int i = 0; i < 10000; i++) counts[sample_token(logits, (i + 0.5) / 10000, o, tokens)] += 1e-4;
  return counts;
}
static void expect_shares(const std::vector<double>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); i++) EXPECT_NEAR(found[i], expected[i], 2e-4) << i;
}

TEST(Sampler, LeavesTheTokensThatTopKAndTopPAllow) {
  const std::vector<float> logits = {std::log(0.1f), std::log(0.4f), std::log(0.3f), std::log(0.1f), std::log(0.1f)};
  SamplingOptions o;
  o.top_k = 2;
  expect_shares(shares(logits, o), {0, 4 / 7.0, 3 / 7.0, 0, 0});
  o.top_k = 3;  // of three with the same logit the first
  expect_shares(shares(logits, o), {1 / 8.0, 4 / 8.0, 3 / 8.0, 0, 0});
  o.top_k = 9;
  expect_shares(shares(logits, o), {0.1, 0.4, 0.3, 0.1, 0.1});
  o.top_k = 0, o.top_p = 0.65;
  expect_shares(shares(logits, o), {0, 4 / 7.0, 3 / 7.0, 0, 0});
  o.top_p = 0.75;
  expect_shares(shares(logits, o), {1 / 8.0, 4 / 8.0, 3 / 8.0, 0, 0});
  o.top_p = 0;  // one token always
  expect_shares(shares(logits, o), {0, 1, 0, 0, 0});
  o.top_k = 3, o.top_p = 0.5;  // of what top_k has left: 0.4 of 0.8
  expect_shares(shares(logits, o), {0, 1, 0, 0, 0});
}

TEST(Sampler, PenalizesTokensThatOccurAlready) {
  SamplingOptions o;
  o.repetition_penalty = 2;
  const std::vector<float> logits = {2, -1, 2};
  const double a = std::exp(1), b = std::exp(-2), c = std::exp(2);
  expect_shares(shares(logits, o, {0, 1, 0}), {a / (a + b + c), b / (a + b + c), c / (a + b + c)});
}

// ----------------------------------------------------------------------------
// Text that comes token by token

TEST(TextStream, HoldsBackBrokenCharactersUntilTheyAreWhole) {
  TextStream stream;
  EXPECT_EQ(stream.add("a\xE2"), "a");  // the beginning of a euro sign
  EXPECT_EQ(stream.add("\x82"), "");
  EXPECT_EQ(stream.add("\xAC!"), "\xE2\x82\xAC!");
  EXPECT_EQ(stream.add("\xF0\x9F\x98"), "");                              // three of four bytes
  EXPECT_EQ(stream.add("x"), "\xF0\x9F\x98x");                            // which never come
  EXPECT_EQ(stream.add("\xFF\x80\x80\x80\x80"), "\xFF\x80\x80\x80\x80");  // no character begins so
  EXPECT_EQ(stream.add("\xC3"), "");
  EXPECT_EQ(stream.finish(), "\xC3");
  EXPECT_EQ(stream.text(), "a\xE2\x82\xAC!\xF0\x9F\x98x\xFF\x80\x80\x80\x80\xC3");
}

TEST(TextStream, EndsBeforeTheTextToStopAt) {
  TextStream stream({"END."});
  EXPECT_EQ(stream.add("one E"), "one ");
  EXPECT_EQ(stream.add("N, E"), "EN, ");
  EXPECT_EQ(stream.add("N"), "");
  EXPECT_EQ(stream.add("D"), "");
  EXPECT_FALSE(stream.stopped());
  EXPECT_EQ(stream.add(". two"), "");
  EXPECT_TRUE(stream.stopped());
  EXPECT_EQ(stream.text(), "one EN, ");
  TextStream at_once({"b"});
  EXPECT_EQ(at_once.add("abc"), "a");
  EXPECT_TRUE(at_once.stopped());
  TextStream unfinished({"END"});
  EXPECT_EQ(unfinished.add("the EN"), "the ");
  EXPECT_EQ(unfinished.finish(), "EN");
  TextStream several({"yz", "", "xyz!", "no"});
  EXPECT_EQ(several.add("n, xy"), "n, ");  // the longest beginning of one is held back
  EXPECT_EQ(several.add("zn"), "x");
  EXPECT_EQ(several.text(), "n, x");  // and the first place that one stands at is the end
}

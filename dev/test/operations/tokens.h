// What is done per token: the embedding, and the classifier and its losses.
#pragma once
#include <cmath>
#include <utility>
#include "dev/test/operations/operation.h"

// ----------------------------------------------------------------------------
// Documents

TEST(DocumentBounds, BeginAtEachEndOfText) {
  for (int64_t T : {1, 2, 255, 257, 1000})
    for (int one_in : {1, 3, 100, 5000}) {
      const int64_t B = 3;
      const int end_of_text = 7;
      std::vector<int> tokens, first_keys, last_queries;
      for (int64_t i = 0; i < B * T; i++)
        tokens.push_back(random_words(1, RandomStream::test, 9, uint64_t(i)).word[0] % one_in == 0 ? end_of_text : 8);
      for (int64_t b = 0; b < B; b++)
        for (int64_t t = 0; t < T; t++) {
          int64_t first = t, last = t;
          while (first > 0 && tokens[b * T + first] != end_of_text) first--;
          while (last + 1 < T && tokens[b * T + last + 1] != end_of_text) last++;
          first_keys.push_back(int(first)), last_queries.push_back(int(last));
        }
      const DeviceArray<int> d_tokens(tokens), d_first(std::vector<int>(tokens.size(), -1)),
          d_last(std::vector<int>(tokens.size(), -1));
      document_bounds(d_first.data, d_last.data, d_tokens.data, end_of_text, B, T);
      EXPECT_EQ(d_first.to_host(), first_keys) << T << ", one in " << one_in;
      EXPECT_EQ(d_last.to_host(), last_queries) << T << ", one in " << one_in;
    }
}

// ----------------------------------------------------------------------------
// Classifier

inline std::vector<double> doubles_of(const DeviceArray<StepStats>& stats) {
  const StepStats s = stats.to_host()[0];
  return {s.grad_squares, s.loss, s.ponder, s.scored, s.tokens, s.correct, s.text_nats, s.text_bytes, s.stop_requests};
}

// With a cap, losses are of capped logits; gradients are with respect to the logits before.
TEST(Classifier, GivesCrossEntropyAndItsGradientForHugeLogits) {
  // Less than a group of eight; whole groups and a part of one; beside and on a warp's 256; more than a warp; beside
  // and on the 8,192 of a block; more than a group per thread.
  for (int64_t V : {3, 37, 255, 256, 257, 5003, 8191, 8192, 8193, 20011})
    for (auto [scale, shift, cap] : {std::tuple(1.0, 0.0, 0.0), {1e4, 0.0, 0.0}, {1.0, -3e4, 0.0}, {1.0, 0.0, 0.7}}) {
      if (std::abs(V - 8192) <= 1 && (scale > 1 || shift < 0)) continue;
      SCOPED_TRACE(testing::Message() << V << " columns, logits of " << scale << " around " << shift << ", cap "
                                      << cap);
      const int64_t rows = 6, ld = (V + 63) / 64 * 64;
      const float dloss = 0.25f;
      const int last = int(V - 1), targets[] = {not_scored, 0, last, 2, 2, last / 2};
      std::vector<floatX> logits = random_values<floatX>(rows * ld, 1, scale);
      for (floatX& x : logits) x = floatX(float(real(x) + shift));
      std::fill_n(logits.begin(), ld, nans<floatX>(1)[0]);  // what is not scored is not read
      std::vector<double> e_losses, e_gradient;
      for (int64_t n = 0; n < rows; n++) {
        for (int64_t i = V; i < ld; i++) logits[n * ld + i] = nans<floatX>(1)[0];
        if (targets[n] == not_scored) {
          e_losses.push_back(0), e_gradient.insert(e_gradient.end(), size_t(V), 0.0);
          continue;
        }
        const double c = cap;
        auto logit = [&](int64_t i) {
          const double x = real(logits[n * ld + i]);
          return c > 0 ? c * std::tanh(x / c) : x;
        };
        auto slope = [&](int64_t i) { return c > 0 ? 1 - logit(i) / c * logit(i) / c : 1; };
        double max = logit(0), sum = 0;
        for (int64_t i = 0; i < V; i++) max = std::max(max, logit(i));
        for (int64_t i = 0; i < V; i++) sum += std::exp(logit(i) - max);
        e_losses.push_back(std::log(sum) + max - logit(targets[n]));
        for (int64_t i = 0; i < V; i++)
          e_gradient.push_back(dloss * slope(i) * (std::exp(logit(i) - max) / sum - (i == targets[n])));
      }
      const DeviceArray<int> d_targets(std::vector<int>(targets, targets + rows));
      const float c = float(cap);
      const auto [losses, result, losses_only, untouched] = in_any_order(
          [&] {
            DeviceArray<floatX> result(logits), untouched(logits);
            DeviceArray<float> losses(nans<float>(rows)), losses_only(nans<float>(rows));
            classifier({losses.data, result.data, d_targets.data, rows, V, ld, dloss, true, nullptr, c});
            classifier({losses_only.data, untouched.data, d_targets.data, rows, V, ld, dloss, false, nullptr, c});
            return std::make_tuple(losses.to_host(), result.to_host(), losses_only.to_host(), untouched.to_host());
          },
          V > 1000 || scale > 1 || shift < 0 ? 2 : 8);
      EXPECT_TRUE(same_bits(losses, losses_only));
      EXPECT_TRUE(same_bits(untouched, logits)) << "without a gradient the logits are unchanged";
      std::vector<floatX> gradient;
      for (int64_t n = 0; n < rows; n++) {
        gradient.insert(gradient.end(), &result[n * ld], &result[n * ld] + V);
        for (int64_t i = V; i < ld; i++) ASSERT_EQ(float(result[n * ld + i]), 0.0f) << "row " << n << " column " << i;
      }
      EXPECT_LE(relative_error(losses, e_losses), of_fp32);
      // The targets' gradients outweigh the others, and capped logits' are no multiples of dloss.
      const double of_roundings = cap > 0 ? two_roundings : one_rounding;
      EXPECT_LE(relative_error(gradient, e_gradient), has_master_weights ? of_roundings : 2e-6);
    }
}

#ifndef SLA_CPU
TEST(Classifier, HasTheSameBitsFromACopyOfItsRow) {
  for (int64_t V : {37, 257, 8195})
    for (float cap : {0.0f, 0.7f}) {
      const int64_t rows = 3, ld = (V + 63) / 64 * 64;
      const DeviceArray<int> targets(std::vector<int>{int(V - 1), not_scored, 5});
      const auto run = [&](bool copies) {
        gpu().candidates.classifier = copies;
        DeviceArray<floatX> logits(random_values<floatX>(rows * ld, 1));
        DeviceArray<float> losses(nans<float>(rows));
        DeviceArray<uint8_t> correct(std::vector<uint8_t>(size_t(rows), 2));
        classifier({losses.data, logits.data, targets.data, rows, V, ld, 0.25f, true, correct.data, cap});
        gpu().candidates.classifier = false;
        return std::make_tuple(losses.to_host(), logits.to_host(), correct.to_host());
      };
      const auto [losses, gradient, correct] = run(false);
      const auto [losses_2, gradient_2, correct_2] = run(true);
      EXPECT_TRUE(same_bits(losses, losses_2) && same_bits(gradient, gradient_2) && correct == correct_2) << V;
    }
}
#endif

TEST(Classifier, TakesTheFirstOfTheLargestLogitsForTheAnswer) {
  for (int64_t V : {3, 257, 8195}) {
    const int last = int(V - 1);
    const std::vector<int> targets = {last, 1, 0, 2, not_scored, last};
    const int64_t rows = int64_t(targets.size()), ld = (V + 63) / 64 * 64;
    std::vector<floatX> logits = random_values<floatX>(rows * ld, 1);
    for (int64_t n = 0; n < rows; n++) {
      logits[n * ld + 1] = floatX(8.0f), logits[n * ld + last] = floatX(8.0f);  // two are equal
      for (int64_t i = V; i < ld; i++) logits[n * ld + i] = floatX(9.0f);       // beyond the vocabulary
    }
    logits[5 * ld + last] = floatX(8.5f);
    const DeviceArray<int> d_targets(targets);
    const auto [correct] = in_any_order([&] {
      const DeviceArray<floatX> d_logits(logits);
      const DeviceArray<float> losses(nans<float>(rows));
      const DeviceArray<uint8_t> correct(std::vector<uint8_t>(size_t(rows), 7));
      classifier({losses.data, d_logits.data, d_targets.data, rows, V, ld, 0, false, correct.data});
      return std::make_tuple(correct.to_host());
    });
    EXPECT_EQ(correct, std::vector<uint8_t>({0, 1, 0, 0, 0, 1})) << V << " columns";
  }
}

// ----------------------------------------------------------------------------
// Embedding

TEST(Embedding, AddsTokensAndPositionsAndCollectsRepeatedTokens) {
  struct Case {
    int64_t B, T, C, V, apart = 1;  // V different tokens
  };
  // Few tokens; positions beyond a round of 1,024, of few tokens, and beside and on the round, of many; channels beside
  // and on the 2,048 that a block's threads own, and the 256 of a warp; three tokens of one slot.
  for (const Case& c : {Case{2, 5, 40, 4}, Case{3, 401, 8, 7}, Case{1, 1023, 8, 5000}, Case{1, 1024, 8, 5000},
                        Case{1, 1025, 8, 5000}, Case{1, 33, 2056, 9}, Case{1, 8, 2048, 3}, Case{1, 7, 2040, 3},
                        Case{1, 9, 264, 3}, Case{1, 8, 256, 3}, Case{1, 7, 248, 3}, Case{1, 2100, 8, 3, 65536}}) {
    SCOPED_TRACE(testing::Message() << c.B << " x " << c.T << " x " << c.C << " of " << c.V);
    const int64_t N = c.B * c.T, C = c.C, rows = (c.V - 1) * c.apart + 1, first_position = 2;
    std::vector<int> tokens, positions;
    for (int64_t n = 0; n < N; n++) {
      tokens.push_back(int(random_uniform(1, RandomStream::test, 7, uint64_t(n)) * double(c.V)) * int(c.apart));
      positions.push_back(int(n % c.T + first_position));
    }
    const auto wte = random_values<floatX>(rows * C, 1), wpe = random_values<floatX>((c.T + first_position) * C, 2);
    const auto dout = random_values<floatX>(N * C, 3);
    const auto dwte = random_values<float>(rows * C, 4), dwpe = random_values<float>((c.T + first_position) * C, 5);
    std::vector<double> e_out, e_out_of_whole, e_dwte = doubles(dwte), e_dwpe = doubles(dwpe);
    for (int64_t n = 0; n < N; n++)
      for (int64_t i = 0; i < C; i++) {
        e_out.push_back(real(wte[tokens[n] * C + i]) + double(float(wpe[positions[n] * C + i])));
        e_out_of_whole.push_back(real(wte[tokens[n] * C + i]) + double(float(wpe[n % c.T * C + i])));
        e_dwte[tokens[n] * C + i] += real(dout[n * C + i]);
        e_dwpe[n % c.T * C + i] += real(dout[n * C + i]);
      }
    const DeviceArray<int> d_tokens(tokens), d_positions(positions);
    const DeviceArray<floatX> d_wte(wte), d_wpe(wpe), d_dout(dout);
    const auto [out, out_of_whole, dwte_result, dwpe_result] = in_any_order(
        [&] {
          DeviceArray<floatX> d_out(nans<floatX>(N * C)), d_out_of_whole(nans<floatX>(N * C));
          DeviceArray<float> d_dwte(dwte), d_dwpe(dwpe);
          embedding_forward(d_out.data, d_tokens.data, {c.T, d_positions.data}, d_wte.data, d_wpe.data, N, C);
          embedding_forward(d_out_of_whole.data, d_tokens.data, {c.T}, d_wte.data, d_wpe.data, N, C);
          embedding_backward(d_dwte.data, d_dwpe.data, d_dout.data, d_tokens.data, c.B, c.T, C);
          return std::make_tuple(d_out.to_host(), d_out_of_whole.to_host(), d_dwte.to_host(), d_dwpe.to_host());
        },
        N > 1000 ? 2 : 8);
    EXPECT_LE(relative_error(out, e_out), one_rounding);
    EXPECT_LE(relative_error(out_of_whole, e_out_of_whole), one_rounding);
    EXPECT_LE(relative_error(dwte_result, e_dwte), of_fp32);
    EXPECT_LE(relative_error(dwpe_result, e_dwpe), of_fp32);
  }
}

// What a cycle of layers that repeat begins with.
TEST(Coordinates, AreAddedToEachRow) {
  struct Case {
    int64_t B, T, C;
  };
  for (const Case& c : {Case{2, 5, 40}, Case{1, 33, 2056}, Case{3, 70, 8}}) {
    const int64_t B = c.B, T = c.T, C = c.C;
    SCOPED_TRACE(testing::Message() << B << " x " << T << " x " << C);
    const int64_t N = B * T;
    const auto x = random_values<floatX>(N * C, 1), wse = random_values<floatX>(C, 2);
    const auto wpe = random_values<floatX>(T * C, 3);
    const auto dwpe = random_values<float>(T * C, 4);
    std::vector<double> e_alone, e_both, e_dwpe = doubles(dwpe);
    for (int64_t n = 0; n < N; n++)
      for (int64_t i = 0; i < C; i++) {
        e_alone.push_back(real(x[n * C + i]) + real(wse[i]));
        e_both.push_back(e_alone.back() + real(wpe[n % T * C + i]));
        e_dwpe[n % T * C + i] += real(x[n * C + i]);
      }
    const DeviceArray<floatX> d_wse(wse), d_wpe(wpe), d_x(x);
    const auto [alone, both, dwpe_result] = in_any_order([&] {
      DeviceArray<floatX> alone(nans<floatX>(N * C)), both(x);  // the latter in place
      DeviceArray<float> d_dwpe(dwpe);
      add_coordinates(alone.data, d_x.data, d_wse.data, nullptr, {T}, N, C);
      add_coordinates(both.data, both.data, d_wse.data, d_wpe.data, {T}, N, C);
      position_backward(d_dwpe.data, d_x.data, B, T, C);
      return std::make_tuple(alone.to_host(), both.to_host(), d_dwpe.to_host());
    });
    EXPECT_LE(relative_error(alone, e_alone), one_rounding);
    EXPECT_LE(relative_error(both, e_both), one_rounding);
    EXPECT_LE(relative_error(dwpe_result, e_dwpe), of_fp32);
  }
}

TEST(MeanLoss, IsAddedToTheSumInDouble) {
  for (int64_t n : {1023, 1024, 1025, 3 * 1024 + 5}) {  // beside and on the threads of a block
    std::vector<float> losses(size_t(n), 1.0f);
    losses[7] = 67108864.0f;  // 2^26: a sum in float would lose the ones
    losses[size_t(n) - 1] = 0.5f;
    std::vector<int> targets(size_t(n), 3);
    std::vector<uint8_t> correct(size_t(n), 0);
    targets[9] = targets[1000] = not_scored, correct[3] = correct[9] = correct[size_t(n) - 1] = 1;
    const DeviceArray<float> d_losses(losses);
    const DeviceArray<int> d_targets(targets);
    const DeviceArray<uint8_t> d_correct(correct);
    const StepStats before = {1, 0.25, 0.5, 10, 20, 30, 40, 50, 60};
    const auto [stats, without] = in_any_order([&] {
      const DeviceArray<StepStats> d_stats(std::vector<StepStats>{before}), d_without(std::vector<StepStats>{before});
      add_losses(d_stats.data, {d_losses.data, d_losses.data, d_correct.data, d_targets.data, n, 7.0});
      add_losses(d_without.data, {d_losses.data, nullptr, nullptr, d_targets.data, n, 7.0});
      return std::make_tuple(doubles_of(d_stats), doubles_of(d_without));
    });
    const double sum = (67108864.0 + double(n - 4) + 0.5) / 7.0, scored = 10 + double(n - 2), tokens = 20 + double(n);
    EXPECT_EQ(stats, std::vector<double>({1, 0.25 + sum, 0.5 + sum, scored, tokens, 32, 40, 50, 60})) << n;
    EXPECT_EQ(without, std::vector<double>({1, 0.25 + sum, 0.5, scored, tokens, 30, 40, 50, 60})) << n;
  }
}

// What changes scores beside masks, and what a softmax has beside keys: slopes (`alibi`) and sinks, against the
// formula.
#pragma once
#include <gtest/gtest.h>
#include <vector>
#include "dev/test/attention/documents.h"
#include "dev/test/attention/layer.h"
#include "dev/test/attention/relative.h"
#include "dev/test/attention/sequences.h"
#include "dev/test/long.h"

// The slopes are such that scores of whole numbers remain whole with heads of 16 or 64 channels.
inline Case with_slopes(Case c) {
  for (int64_t i = 0; i < c.NH(); i++) c.slopes.push_back(0.5 / double(1 << i));
  return c;
}
// One that takes nearly all of a softmax, one that takes nearly nothing, and others.
inline Case with_sinks(Case c) {
  for (int64_t i = 0; i < c.NH(); i++) c.sinks.push_back(i == 1 ? 9 : i == 2 ? -30 : 0.5 * double(i));
  return c;
}

// Bugs: a tile that no mask cuts keeps its scores; the distance is counted from the tile; residues lie closer.
TEST(AttentionSlopes, MatchTheFormula) {
  check(with_slopes({2, 70, 32, {0, 1}, 2}));
  check(with_slopes({2, 140, 64, {0, {0, 1}, 0}, 1}));
  check(with_slopes(with_mask({1, 140, 80, {0, 0}, 1}, {50})));
  check(with_slopes(with_mask({1, 140, 16, {0, 0}, 1}, {0, MaskPattern::stride, 8})));
  check(with_slopes(with_mask({1, 140, 16, {0, 0}, 1}, {0, MaskPattern::column, 9, 2})));
  check(with_slopes(with_documents({1, 140, 64, {0, {0, 1}}, 1})));
  Case topk = with_slopes({1, 150, 16, {{0, 1}, 1}, 1});
  topk.topk = 4, topk.whole_numbers = true;
  check(topk);
}

// Bugs: the sum begins with a sink in each lane; the sink is not scaled as scores are; lse has no sink; the gradient
// is =, or that of another head.
TEST(AttentionSinks, MatchTheFormula) {
  check(with_sinks({2, 70, 32, {0, 1}, 2}));
  check(with_sinks({2, 140, 64, {0, {0, 1}, 0}, 1}));
  check(with_sinks(with_mask({2, 140, 16, {0, {0, 1}, 1}, 1}, {0, MaskPattern::column, 64, 4})));  // queries see no key
  check(with_sinks(with_mask({2, 50, 16, {0, 1}, 1}, {0, MaskPattern::column, 64, 4})));           // and here none does
  check(with_sinks(with_relative({1, 140, 32, {0, 1}, 1}, 0)));
  check(with_sinks(with_documents({1, 140, 128, {0, {0, 1}}, 1})));
  check(with_slopes(with_sinks({1, 140, 64, {0, 1, 1}, 2})));
  Case dropped = with_sinks({2, 70, 64, {0, {0, 1}, 0}, 1}), topk = with_sinks({1, 150, 16, {{0, 1}, 1, 0}, 1});
  dropped.dropout = 0.3;
  check(dropped);
  topk.topk = 4, topk.whole_numbers = true;
  check(topk);
}

TEST(AttentionSlopes, AndSinksAreThoseOfTheWholeInACache) {
  const Case c = with_slopes(with_sinks(general_case(3, 200, 24)));
  Layer layer(c);
  layer.forward();
  const std::vector<floatX> out = layer.d_out.to_host();
  const std::vector<float> lse = layer.d_lse.to_host();
  for (int64_t first_query : {0, 77, 196, 199}) check_partial(PartialForward(layer, first_query, 200), 200, out, lse);
  for (int64_t queries : {1, 4}) check_sequences(layer, queries, out, lse);
}

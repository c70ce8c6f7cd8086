// Which elements dropout drops: as many as it should, independently of each other.
#include <gtest/gtest.h>
#include <cmath>
#include <vector>
#include "llmc/ops/dropout.h"

namespace {

// Whether each of a million elements is kept, in the order in which for_each visits them.
struct Draws {
  double p = 0.1;
  std::vector<char> kept;

  double share_dropped() const {
    double dropped = 0;
    for (char k : kept) dropped += k == 0;
    return dropped / double(kept.size());
  }
  // The correlation with those `distance` elements on, or with other draws.
  double correlation(const Draws& other, size_t distance = 0) const {
    const double mean = 1 - p, variance = p * (1 - p);
    double sum = 0;
    for (size_t i = 0; i + distance < kept.size(); i++) sum += (kept[i] - mean) * (other.kept[i + distance] - mean);
    return sum / variance / double(kept.size() - distance);
  }
};

constexpr int64_t rows = 1000, columns = 1000;

// Draws for a site of channels, which are rounded up to groups of eight.
Draws draw_channels(double p, int64_t update, int64_t sequence, DropoutSite site, int layer) {
  const uint64_t key = dropout_key(1337, update, sequence);
  const Dropout d = make_dropout(&key, p, site, layer);
  Draws draws = {p, {}};
  for (int64_t t = 0; t < rows; t++)
    for (int64_t c = 0; c < columns; c++)
      draws.kept.push_back(element_bits(channel_bits(d, 0, t, c / 8), int(c % 8)) >= d.threshold);
  return draws;
}

Draws draw_probabilities(double p, int64_t update, int64_t sequence, int layer, int64_t head, int64_t source) {
  const uint64_t key = dropout_key(1337, update, sequence);
  const Dropout d = make_dropout(&key, p, DropoutSite::probabilities, layer);
  Draws draws = {p, {}};
  for (int64_t q = 0; q < rows; q++)
    for (int64_t k = 0; k < columns; k++) draws.kept.push_back(keeps_probability(d, 0, head, source, q, k));
  return draws;
}

void expect_independent(const std::vector<Draws>& all) {
  const double five_sigma = 5 / std::sqrt(double(rows * columns));
  for (size_t i = 0; i < all.size(); i++) {
    EXPECT_NEAR(all[i].share_dropped(), all[i].p, five_sigma * std::sqrt(all[i].p * (1 - all[i].p))) << i;
    for (size_t distance : {1, 2, 4, 8, 16, 32, 1000, 8000, 16000})
      EXPECT_LE(std::abs(all[i].correlation(all[i], distance)), five_sigma) << i << ", " << distance << " on";
    for (size_t j = 0; j < i; j++) EXPECT_LE(std::abs(all[i].correlation(all[j])), five_sigma) << i << " " << j;
  }
}

}  // namespace

TEST(Dropout, OfChannelsIsIndependentAndAsOftenAsAsked) {
  const DropoutSite sites[] = {DropoutSite::embeddings, DropoutSite::attention_output, DropoutSite::mlp_output};
  for (double p : {0.1, 0.5}) {
    std::vector<Draws> all;
    for (DropoutSite site : sites) all.push_back(draw_channels(p, 1, 0, site, 0));
    all.push_back(draw_channels(p, 1, 0, DropoutSite::mlp_output, 1));
    all.push_back(draw_channels(p, 2, 0, DropoutSite::mlp_output, 0));
    all.push_back(draw_channels(p, 1, 1, DropoutSite::mlp_output, 0));
    expect_independent(all);
  }
}

TEST(Dropout, OfProbabilitiesIsIndependentAndAsOftenAsAsked) {
  for (double p : {0.1, 0.5})
    expect_independent({draw_probabilities(p, 1, 0, 0, 0, 0), draw_probabilities(p, 1, 0, 0, 1, 0),
                        draw_probabilities(p, 1, 0, 0, 0, 1), draw_probabilities(p, 1, 0, 1, 0, 0),
                        draw_probabilities(p, 2, 0, 0, 0, 0), draw_probabilities(p, 1, 1, 0, 0, 0)});
}

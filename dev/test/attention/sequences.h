// Sequences of different lengths in a K/V cache, whose last positions are computed by one call.
#pragma once
#include <vector>
#include "layer.h"
#include "relative.h"

// The forward pass of the last `queries` positions of sequences that lie in the rows of a layer's k and v.
struct SequencesForward {
  std::vector<floatX> out;  // (sequences, queries, C)
  std::vector<float> lse;   // (sequences, NH, queries)

  SequencesForward(const Layer& layer, const std::vector<KeyRows>& sequences, int64_t queries) {
    const int64_t C = layer.C(), NH = layer.c.NH(), B = int64_t(sequences.size());
    std::vector<floatX> q;
    std::vector<int64_t> layer_rows;
    int longest = 0;
    for (const KeyRows& keys : sequences) {
      longest = std::max(longest, keys.T);
      for (int64_t row = keys.first_row + keys.T - queries; row < keys.first_row + keys.T; row++) {
        layer_rows.push_back(row);
        for (int64_t i = 0; i < C; i++) q.push_back(layer.qkv[layer.q().at(row, i)]);
      }
    }
    const DeviceArray<floatX> d_q(q), d_relative_q(layer.relative_q_of(layer_rows)),
        d_out(nans<floatX>(B * queries * C));
    const DeviceArray<float> d_lse(nans<float>(B * queries * NH));
    const DeviceArray<float> d_partials(
        nans<float>(attention_partials(B, NH, layer.c.HS, longest, layer.args.kv_per_head)));
    const DeviceArray<KeyRows> d_sequences(sequences);
    AttentionArgs args = layer.args;
    args.partials = d_partials.data, args.sequences = d_sequences.data;
    args.B = B, args.T = longest, args.first_query = longest - queries;
    args.q = d_q.data, args.q_stride = C, args.out = d_out.data, args.lse = d_lse.data;
    if (layer.c.distances > 0) args.relative.q = d_relative_q.data;
    attention_forward(args);
    out = d_out.to_host(), lse = d_lse.to_host();
  }
};

// Compares the last `queries` positions of sequences in a cache with those of a forward pass over all: whole (3, 200,
// C) and whole_lse (3, NH, 200).
inline void check_sequences(const Layer& layer, int64_t queries, const std::vector<floatX>& whole,
                            const std::vector<float>& whole_lse) {
  // In another order than in the cache, of one position more than a tile of keys, of one, and of the longest.
  const std::vector<KeyRows> sequences = {{400, 65}, {0, int(queries)}, {200, 200}, {400, 65}};
  const int64_t C = layer.C(), NH = layer.c.NH();
  const SequencesForward all(layer, sequences, queries);
  for (size_t b = 0; b < sequences.size(); b++) {
    const KeyRows& keys = sequences[b];
    std::vector<double> expected, expected_lse, lse;
    for (int64_t i = 0; i < queries * C; i++)
      expected.push_back(real(float(whole[(keys.first_row + keys.T - queries) * C + i])));
    for (int64_t head = 0; head < NH; head++)
      for (int64_t i = 0; i < queries; i++) {
        const int64_t of_whole = (keys.first_row / 200 * NH + head) * 200 + keys.T - queries + i;
        expected_lse.push_back(finite(whole_lse[of_whole]));
        lse.push_back(finite(all.lse[(int64_t(b) * NH + head) * queries + i]));
      }
    const auto begin = all.out.begin() + int64_t(b) * queries * C;
    EXPECT_LE(relative_error(std::vector<floatX>(begin, begin + queries * C), expected), tolerance) << b;
    EXPECT_LE(relative_error(lse, expected_lse), 1e-6) << b;
    const SequencesForward alone(layer, {keys}, queries);
    EXPECT_TRUE(same_bits(alone.out, {begin, begin + queries * C})) << b << ": other bits beside others";
  }
}

TEST(AttentionSequences, AreThoseOfTheWhole) {
  Case window = with_mask({3, 200, 24, {0, {0, 1}}, 1}, {70});
  window.distances = 70;
  for (const Case& c :
       {Case{3, 200, 24, {0, 1, 0}, 1}, general_case(3, 200, 24), with_relative({3, 200, 24, {0, 1, 0}, 1}, 3), window})
    for (int64_t queries : {1, 4}) {
      SCOPED_TRACE(testing::Message() << c << ", queries " << queries);
      Layer layer(c);
      layer.forward();
      check_sequences(layer, queries, layer.d_out.to_host(), layer.d_lse.to_host());
    }
}

// How many pairs of a query and a key see each other, by which the cost of attention is counted.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>
#include "attention_plan.h"

// With `memory` sequences are segments of a stream, whose memory of m positions is empty at the first one and grows:
// segment n has min(m, n T) positions. Counts are the mean over segments first ... end - 1; by default the memory is
// full.
struct Segments {
  int64_t first = INT64_MAX - 1, end = INT64_MAX;
  // With `documents` the share of the data's tokens that are at each place of their document, or of its part in their
  // sequence. Null: all of a sequence is one. Blocks and columns of a mask are counted from where a document begins,
  // which of fixed(64,8) and documents of 1,100 tokens is 1 % too many pairs and 3 % too few.
  const std::vector<double>* places = nullptr;

  // The segments of them that find the memory growing are first ... growing_end(m, T) - 1.
  int64_t growing_end(int64_t m, int64_t T) const { return std::max(first, std::min(end, m / T + 1)); }
  double count() const { return double(end - first); }

  // The positions that the memory has.
  double mean_memory(int64_t m, int64_t T) const {
    const int64_t growing = growing_end(m, T) - first;
    const double sum = growing > 0 ? double(T) * double(2 * first + growing - 1) * double(growing) / 2 : 0;
    return (sum + double(m) * (count() - double(growing))) / count();
  }
};

// Pairs of a query and a key that see each other, in a sequence of T.
struct AttentionPairs {
  double scored = 0;      // pairs whose scores are computed
  double multiplied = 0;  // pairs whose values are used: fewer with topk
};

// The counts for a query head with this mask and `kv_heads` K/V heads in a sequence of T tokens, after up to `memory`
// keys of positions before it. topk, if not 0, is the largest number of keys that a query chooses among all of them.
inline AttentionPairs pairs_of_head(const AttentionMask& mask, int64_t kv_heads, int64_t topk, int64_t T,
                                    int64_t memory, const Segments& segments) {
  if (segments.places != nullptr) {
    AttentionPairs pairs;
    for (size_t place = 0; place < segments.places->size(); place++) {
      const int64_t keys = kv_heads * mask.visible_keys(int(place));
      const double tokens = double(T) * (*segments.places)[place];
      pairs.scored += tokens * double(keys);
      pairs.multiplied += tokens * double(topk > 0 ? std::min(topk, keys) : keys);
    }
    return pairs;
  }
  auto pairs_from = [&](int64_t begin, int64_t end) {
    return double(mask.visible_pairs(end) - mask.visible_pairs(begin));
  };
  // While the memory grows it holds all that has been, and segments together are one sequence.
  const int64_t growing_end = segments.growing_end(memory, T), growing = growing_end - segments.first;
  const double pairs = (growing > 0 ? pairs_from(segments.first * T, growing_end * T) : 0) +
                       (segments.count() - double(growing)) * pairs_from(memory, memory + T);
  const double visible = double(kv_heads) * pairs / segments.count();
  if (topk == 0) return {visible, visible};
  int64_t taken = 0;
  for (int t = 0; t < T; t++) taken += std::min(topk, kv_heads * mask.visible_keys(t));
  return {visible, double(taken)};
}

// The counts of layer l in a sequence of T tokens, summed over its attentions and query heads.
inline AttentionPairs attention_pairs(const AttentionPlan& plan, int l, int64_t T, const Segments& segments = {}) {
  std::map<std::string, AttentionPairs> known;  // layers have few different heads
  AttentionPairs sum;
  for (const PlannedAttention& attention : plan.attentions[l])
    for (int head = 0; head < plan.num_heads; head++) {
      const AttentionMask& mask = plan.table.mask(attention.map_layer, head);
      const int64_t kv_heads = int64_t(plan.table.sources(l, head).size());
      const auto [it, is_new] = known.try_emplace(mask.text() + " " + std::to_string(kv_heads));
      if (is_new) it->second = pairs_of_head(mask, kv_heads, plan.table.topk, T, plan.table.memory, segments);
      sum.scored += it->second.scored, sum.multiplied += it->second.multiplied;
    }
  return sum;
}

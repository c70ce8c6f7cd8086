// How many pairs of a query and a key see each other, by which the cost of attention is counted.
#pragma once
#include <algorithm>         // std::min
#include <map>               // std::map
#include <string>            // std::string
#include "attention_plan.h"  // AttentionPlan

// Pairs of a query and a key that see each other, in a sequence of T.
struct AttentionPairs {
  double scored = 0;      // pairs whose scores are computed
  double multiplied = 0;  // pairs whose values are used: fewer with topk
};

// The counts for a query head with this mask and `kv_heads` K/V heads in a sequence of T tokens, after `memory` keys
// of positions before it. topk, if not 0, is the largest number of keys that a query chooses among all of them.
inline AttentionPairs pairs_of_head(const AttentionMask& mask, int64_t kv_heads, int64_t topk, int64_t T,
                                    int64_t memory) {
  const int64_t pairs = mask.visible_pairs(int(memory + T)) - mask.visible_pairs(int(memory));
  const double visible = double(kv_heads * pairs);
  if (topk == 0) return {visible, visible};
  int64_t taken = 0;
  for (int t = 0; t < T; t++) taken += std::min(topk, kv_heads * mask.visible_keys(t));
  return {visible, double(taken)};
}

// The counts of layer l in a sequence of T tokens, summed over its attentions and query heads.
inline AttentionPairs attention_pairs(const AttentionPlan& plan, int l, int64_t T) {
  std::map<std::string, AttentionPairs> known;  // layers have few different heads
  AttentionPairs sum;
  for (const PlannedAttention& attention : plan.attentions[l])
    for (int head = 0; head < plan.num_heads; head++) {
      const AttentionMask& mask = plan.table.mask(attention.map_layer, head);
      const int64_t kv_heads = int64_t(plan.table.sources(l, head).size());
      const auto [it, is_new] = known.try_emplace(mask.text() + " " + std::to_string(kv_heads));
      if (is_new) it->second = pairs_of_head(mask, kv_heads, plan.table.topk, T, plan.table.memory);
      sum.scored += it->second.scored, sum.multiplied += it->second.multiplied;
    }
  return sum;
}

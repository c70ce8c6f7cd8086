// The arithmetic of a model, in floating-point operations: what a perfect implementation would have to do, no recomputation
// counted but the flash backward's, no dead K/V rows.
#pragma once
#include <algorithm>         // std::min
#include <map>               // std::map
#include <string>            // std::string
#include "attention_plan.h"  // AttentionPlan, mask_text
#include "config.h"          // ModelConfig
#include "parameters.h"      // qkv_rows

// Elements of the weights that a token is multiplied with: the linear layers and the tied head.
inline double matmul_parameters(const ModelConfig& c, const AttentionPlan& plan) {
  const double C = c.channels;
  double n = double(c.vocab_size) * C;
  for (int l = 0; l < c.num_layers; l++)
    n += double(qkv_rows(c, plan, l)) * C + C * C + 8 * C * C + (has_map_gate(plan, l) ? C : 0);
  return n;
}

// The pairs of a query and a key that see each other, in a sequence of T, summed over layers, attentions, heads and their sources.
struct AttentionPairs {
  double scored = 0;      // whose scores are computed
  double multiplied = 0;  // whose values are used: with topk fewer
};
inline AttentionPairs attention_pairs(const AttentionPlan& plan, int64_t T) {
  AttentionPairs pairs;
  std::map<std::string, int64_t> visible;  // by mask: plans have few different ones
  for (const std::vector<PlannedAttention>& layer : plan.attentions)
    for (const PlannedAttention& attention : layer)
      for (const KVUse& use : attention.uses)
        for (int head : use.query_heads) {
          const AttentionMask& mask = plan.table.masks[attention.map_layer * plan.num_heads + head];
          const auto [it, is_new] = visible.insert({mask_text(mask), 0});
          if (is_new) it->second = mask.visible_pairs(T);
          pairs.scored += double(it->second);
        }
  pairs.multiplied = pairs.scored;
  if (plan.table.topk > 0) {
    // Of a query's keys, over all its sources, at most k.
    pairs.multiplied = 0;
    std::map<std::string, double> taken;
    for (int l = 0; l < plan.num_layers; l++)
      for (const PlannedAttention& attention : plan.attentions[l])
        for (int head = 0; head < plan.num_heads; head++) {
          const AttentionMask& mask = plan.table.masks[attention.map_layer * plan.num_heads + head];
          const int64_t sources = int64_t(plan.table.source_layers[l * plan.num_heads + head].size());
          const auto [it, is_new] = taken.insert({mask_text(mask) + std::to_string(sources), 0});
          if (is_new)
            for (int64_t t = 0; t < T; t++) it->second += double(std::min<int64_t>(plan.table.topk, sources * mask.visible_keys(t)));
          pairs.multiplied += it->second;
        }
  }
  return pairs;
}

// A token of a sequence of T, forward and backward: 2 and 4 operations a weight; attention multiplies 2 matrices forward and 5 backward (of
// which one rebuilds the scores), each 2 operations a channel of a head for each pair of a query and a key that it sees: C * (T + 1) a
// token and layer where all are causal. topk scores all of them once, and multiplies the chosen ones.
inline double flops_per_token(const ModelConfig& c, const AttentionPlan& plan, int64_t T) {
  const AttentionPairs pairs = attention_pairs(plan, T);
  const double chosen = plan.table.topk > 0 ? 6 * pairs.multiplied + pairs.scored : 7 * pairs.scored;
  return 6 * matmul_parameters(c, plan) + 2 * c.head_size() * chosen / double(T);
}

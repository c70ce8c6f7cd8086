// The arithmetic of a model, in floating-point operations: what a perfect implementation would have to do, no
// recomputation counted but the flash backward's, no dead K/V rows.
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

// Pairs of a query and a key that see each other, in a sequence of T.
struct AttentionPairs {
  double scored = 0;      // whose scores are computed
  double multiplied = 0;  // whose values are used: with topk fewer
};

// Of a query head with such a mask and so many K/V heads: topk, if not 0, is the most keys that a query takes of all of
// them.
inline AttentionPairs pairs_of_head(const AttentionMask& mask, int64_t kv_heads, int64_t topk, int64_t T) {
  const double visible = double(kv_heads * mask.visible_pairs(T));
  if (topk == 0) return {visible, visible};
  int64_t taken = 0;
  for (int64_t t = 0; t < T; t++) taken += std::min(topk, kv_heads * mask.visible_keys(t));
  return {visible, double(taken)};
}

// Summed over the attentions and heads of layer l.
inline AttentionPairs attention_pairs(const AttentionPlan& plan, int l, int64_t T) {
  std::map<std::string, AttentionPairs> known;  // layers have few different heads
  AttentionPairs sum;
  for (const PlannedAttention& attention : plan.attentions[l])
    for (int head = 0; head < plan.num_heads; head++) {
      const AttentionMask& mask = plan.table.mask(attention.map_layer, head);
      const int64_t kv_heads = int64_t(plan.table.sources(l, head).size());
      const auto [it, is_new] = known.try_emplace(mask_text(mask) + " " + std::to_string(kv_heads));
      if (is_new) it->second = pairs_of_head(mask, kv_heads, plan.table.topk, T);
      sum.scored += it->second.scored, sum.multiplied += it->second.multiplied;
    }
  return sum;
}

// And over the layers.
inline AttentionPairs attention_pairs(const AttentionPlan& plan, int64_t T) {
  AttentionPairs sum;
  for (int l = 0; l < plan.num_layers; l++) {
    const AttentionPairs of_layer = attention_pairs(plan, l, T);
    sum.scored += of_layer.scored, sum.multiplied += of_layer.multiplied;
  }
  return sum;
}

// A token of a sequence of T, forward and backward: 2 and 4 operations a weight; attention multiplies 2 matrices
// forward and 5 backward (of which one rebuilds the scores), each 2 operations a channel of a head for each pair of a
// query and a key that it sees: C * (T + 1) a token and layer where all are causal. topk scores all of them once, and
// multiplies the chosen ones.
inline double flops_per_token(const ModelConfig& c, const AttentionPlan& plan, int64_t T) {
  const AttentionPairs pairs = attention_pairs(plan, T);
  const double chosen = plan.table.topk > 0 ? 6 * pairs.multiplied + pairs.scored : 7 * pairs.scored;
  return 6 * matmul_parameters(c, plan) + 2 * c.head_size() * chosen / double(T);
}

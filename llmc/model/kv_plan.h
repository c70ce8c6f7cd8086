// What follows from a wiring for keys and values: which K/V heads each layer projects, which of them other layers use, and where the
// gradients of those wait in the backward pass. Whole numbers only; pointers are the model's (train_gpt2_sla.cu).
//
// A *K/V head* (layer, head) is the k and v that a layer projected for a head of its own. One that no query head attends to is dead: it is
// not projected, so its rows exist in no weight, gradient, optimizer state, GEMM or cache. Its gradient would be zero, so the function,
// the loss curve and the gradient norm are those of the full model.
#pragma once
#include <algorithm>           // std::find, std::max
#include <map>                 // std::map
#include <string>              // std::string
#include <utility>             // std::pair, std::move
#include <vector>              // std::vector
#include "config.h"            // ModelConfig
#include "llmc/utils/error.h"  // CHECK, format
#include "wiring.h"            // KVSource, kv_sources

// One K/V head as a layer's query heads use it.
struct KVUse {
  KVSource source;
  std::vector<int> query_heads;  // those of the layer that attend to it, ascending
  bool accumulate;               // dk and dv are +=, for a higher layer has written there earlier in the backward pass; else =
};

struct KVPlan {
  int num_layers = 0, num_heads = 0;
  std::vector<KVSource> sources;            // (L, h)
  std::vector<std::vector<int>> projected;  // (L): heads whose k and v the layer projects, ascending
  std::vector<std::vector<int>> shared;     // (L): those of them that other layers attend to, ascending
  std::vector<std::vector<KVUse>> uses;     // (L): the K/V heads that the layer's query heads attend to, by layer, then head

  // dK/dV of shared K/V heads are summed in accumulators, from the backward of the highest layer that uses them down to that of the
  // source layer, which loads the sum before it writes to any accumulator: one that it frees can serve the next in the same layer.
  std::vector<int> accumulator;  // (L): that of the layer's shared K/V heads; -1 if it shares none
  int num_accumulators = 0;
  int accumulator_heads = 0;     // K/V heads in an accumulator: the most that any layer shares

  const KVSource& source_of(int layer, int head) const { return sources[layer * num_heads + head]; }
  // Where a K/V head stands in its layer's cached k (and v), or in its accumulator: counted in heads; -1 if it is not there.
  int projected_index(const KVSource& s) const { return index_in(projected[s.layer], s.head); }
  int shared_index(const KVSource& s) const { return index_in(shared[s.layer], s.head); }
  // K/V heads that are projected although no query head attends to them; empty unless the plan was told to keep them.
  std::vector<int> unused(int layer) const;

 private:
  static int index_in(const std::vector<int>& heads, int head) {
    auto it = std::find(heads.begin(), heads.end(), head);
    return it == heads.end() ? -1 : int(it - heads.begin());
  }
};

inline std::vector<int> KVPlan::unused(int layer) const {
  std::vector<int> heads;
  for (int head : projected[layer]) {
    auto is_it = [&](const KVUse& use) { return use.source.layer == layer && use.source.head == head; };
    const std::vector<KVUse>& own = uses[layer];
    if (std::none_of(own.begin(), own.end(), is_it) && shared_index({layer, head}) < 0) heads.push_back(head);
  }
  return heads;
}

// An accumulator for each layer that shares K/V heads, as few as possible, in the order of the backward pass.
inline void assign_accumulators(KVPlan& plan) {
  plan.accumulator.assign(size_t(plan.num_layers), -1);
  std::vector<char> busy;
  for (int l = plan.num_layers - 1; l >= 0; l--) {
    if (plan.accumulator[l] >= 0) busy[plan.accumulator[l]] = 0;
    for (const KVUse& use : plan.uses[l]) {
      int& accumulator = plan.accumulator[use.source.layer];
      if (use.source.layer == l || accumulator >= 0) continue;
      accumulator = int(std::find(busy.begin(), busy.end(), 0) - busy.begin());
      if (accumulator == int(busy.size())) busy.push_back(0);
      busy[accumulator] = 1;
    }
  }
  plan.num_accumulators = int(busy.size());
  for (const std::vector<int>& heads : plan.shared) plan.accumulator_heads = std::max(plan.accumulator_heads, int(heads.size()));
}

// From a table (L, h) whose entries name the same layer or a lower one. With keep_dead, every layer projects all K/V heads, as the paper's
// code does.
inline KVPlan make_kv_plan(int num_layers, int num_heads, std::vector<KVSource> sources, bool keep_dead = false) {
  CHECK(int(sources.size()) == num_layers * num_heads);
  KVPlan plan;
  plan.num_layers = num_layers;
  plan.num_heads = num_heads;
  plan.sources = std::move(sources);
  plan.projected.resize(size_t(num_layers));
  plan.shared.resize(size_t(num_layers));
  plan.uses.resize(size_t(num_layers));

  auto index = [&](const KVSource& s) { return size_t(s.layer * num_heads + s.head); };
  std::vector<int> highest_use(plan.sources.size(), -1);  // the highest layer that attends to each K/V head; -1: dead
  for (int l = 0; l < num_layers; l++) {
    for (int i = 0; i < num_heads; i++) {
      const KVSource& s = plan.source_of(l, i);
      CHECK(0 <= s.layer && s.layer <= l && 0 <= s.head && s.head < num_heads);
      highest_use[index(s)] = l;
    }
  }
  for (int l = 0; l < num_layers; l++) {
    for (int i = 0; i < num_heads; i++) {
      if (keep_dead || highest_use[index({l, i})] >= 0) plan.projected[l].push_back(i);
      if (highest_use[index({l, i})] > l) plan.shared[l].push_back(i);
    }
    std::map<std::pair<int, int>, std::vector<int>> query_heads;  // by the K/V head's layer and head
    for (int i = 0; i < num_heads; i++) query_heads[{plan.source_of(l, i).layer, plan.source_of(l, i).head}].push_back(i);
    for (auto& [source, heads] : query_heads) {
      const KVSource s = {source.first, source.second};
      plan.uses[l].push_back({s, std::move(heads), highest_use[index(s)] > l});
    }
  }
  assign_accumulators(plan);
  return plan;
}

inline KVPlan make_kv_plan(const ModelConfig& c, bool keep_dead = false) {
  return make_kv_plan(c.num_layers, c.num_heads, kv_sources(c.wiring, c.num_layers, c.num_heads), keep_dead);
}

// The plan as text: a row a layer, top layer first, a column a head; after the bar, how many K/V heads the layer projects and how many of
// them other layers use.
inline std::string draw(const KVPlan& plan) {
  std::string text = "whose K/V each head attends to (rows: layers; columns: heads; \".\": its own layer's; a number: that layer's)\n";
  for (int l = plan.num_layers - 1; l >= 0; l--) {
    text += format("  %3d |", l);
    for (int i = 0; i < plan.num_heads; i++) {
      const KVSource& s = plan.source_of(l, i);
      text += s.layer == l ? "  ." : format(" %2d", s.layer);
    }
    const size_t projected = plan.projected[l].size(), shared = plan.shared[l].size();
    text += format(" | projects %zu of %d", projected, plan.num_heads);
    if (shared > 0) text += format(", shares %zu", shared);
    text += "\n";
  }
  return text;
}

// Who reads whose keys and values: the one table that the forward, the backward, the memory plan, generation and the
// FLOP count ask. No other place decides it.
//
// Layers and heads count from 0. A *pair* (layer, head) is the k and v that a layer projected for a head of its own.
// Head i of layer l attends, with its own q, to the pair source(l, i). Skip-layer attention (SLA) is the table
//
//   source(l, i) = (l - n_l, i)   if i >= h - n_h and l >= n_l,      else (l, i)
//
// ("Skip-Layer Attention: Bridging Abstract and Detailed Dependencies in Transformers"; its equation prints h - n_l where its
// listing, rightly, splits at h - n_h.) A layer lends what it projected itself, never what it borrowed. Everything below
// follows from the table alone, so that another wiring (several skip distances, K/V shared between layers, grouped or
// multi-query heads) is another table and nothing else.
//
// A pair that nobody reads is dead: it is not projected, so its rows exist in no weight, gradient, optimizer state, GEMM or
// cache. Its gradient would be zero, so the function, the loss curve and the gradient norm are those of the full model.
#pragma once
#include <algorithm>           // std::find, std::max
#include <string>              // std::string
#include <vector>              // std::vector
#include "config.h"            // ModelConfig
#include "llmc/utils/error.h"  // CHECK, format

struct KVSource {
  int layer, head;
};

// One pair as a layer reads it.
struct KVUse {
  KVSource pair;
  std::vector<int> heads;  // the layer's heads that read it, ascending
  bool accumulate;         // a higher layer reads it too, and in the backward pass was there first: its gradient is +=
};

struct KVPlan {
  int num_layers = 0, num_heads = 0;
  std::vector<KVSource> source;               // (L, h)
  std::vector<std::vector<int>> projected;  // (L): heads whose k and v the layer projects, ascending
  std::vector<std::vector<int>> lent;       // (L): those of them that other layers read, ascending
  std::vector<std::vector<KVUse>> reads;   // (L): the pairs the layer's heads attend to, by layer, then head

  // The gradients of lent pairs wait in slabs, from the backward of their highest reader down to that of their lender, which
  // folds them into its own before it writes to any slab: a slab freed by a lender can serve the next in the same layer.
  std::vector<int> slab;  // (L): the slab for the pairs this layer lends; -1 if it lends none
  int num_accumulators = 0;
  int accumulator_heads = 0;     // pairs in a slab: the most that any layer lends

  const KVSource& source_of(int layer, int head) const { return source[layer * num_heads + head]; }
  // Where a head stands in a layer's cached k (and v), or in its slab: counted in heads; -1 if it is not there.
  int projected_index(const KVSource& pair) const { return index_in(projected[pair.layer], pair.head); }
  int shared_index(const KVSource& pair) const { return index_in(lent[pair.layer], pair.head); }
  // Pairs that are projected although nobody reads them; empty unless the plan was told to keep them.
  std::vector<int> unread(int layer) const;

 private:
  static int index_in(const std::vector<int>& heads, int head) {
    auto it = std::find(heads.begin(), heads.end(), head);
    return it == heads.end() ? -1 : int(it - heads.begin());
  }
};

inline std::vector<int> KVPlan::unread(int layer) const {
  std::vector<int> heads;
  for (int head : projected[layer]) {
    auto reads_it = [&](const KVUse& read) { return read.pair.layer == layer && read.pair.head == head; };
    bool own = std::any_of(reads[layer].begin(), reads[layer].end(), reads_it);
    if (!own && shared_index({layer, head}) < 0) heads.push_back(head);
  }
  return heads;
}

// From a table (L, h) whose entries point to the same layer or a lower one. With keep_dead, every layer projects all pairs,
// as the paper's code does.
inline KVPlan kv_plan_from_table(int num_layers, int num_heads, std::vector<KVSource> source, bool keep_dead = false) {
  CHECK(int(source.size()) == num_layers * num_heads);
  KVPlan plan;
  plan.num_layers = num_layers;
  plan.num_heads = num_heads;
  plan.source = std::move(source);
  plan.projected.resize(num_layers);
  plan.lent.resize(num_layers);
  plan.reads.resize(num_layers);
  plan.slab.assign(num_layers, -1);

  std::vector<int> highest_reader(num_layers * num_heads, -1);  // of each pair; -1: dead
  std::vector<char> is_lent(num_layers * num_heads, 0);
  for (int l = 0; l < num_layers; l++) {
    for (int i = 0; i < num_heads; i++) {
      const KVSource& pair = plan.source_of(l, i);
      CHECK(0 <= pair.layer && pair.layer <= l && 0 <= pair.head && pair.head < num_heads);
      highest_reader[pair.layer * num_heads + pair.head] = l;
      if (pair.layer != l) is_lent[pair.layer * num_heads + pair.head] = 1;
    }
  }
  for (int l = 0; l < num_layers; l++) {
    for (int i = 0; i < num_heads; i++) {
      if (keep_dead || highest_reader[l * num_heads + i] >= 0) plan.projected[l].push_back(i);
      if (is_lent[l * num_heads + i]) plan.lent[l].push_back(i);
    }
    plan.accumulator_heads = std::max(plan.accumulator_heads, int(plan.lent[l].size()));
    for (int layer = 0; layer <= l; layer++) {
      for (int head = 0; head < num_heads; head++) {
        KVUse read{{layer, head}, {}, highest_reader[layer * num_heads + head] > l};
        for (int i = 0; i < num_heads; i++)
          if (plan.source_of(l, i).layer == layer && plan.source_of(l, i).head == head) read.heads.push_back(i);
        if (!read.heads.empty()) plan.reads[l].push_back(read);
      }
    }
  }
  std::vector<char> busy;
  for (int l = num_layers - 1; l >= 0; l--) {  // the order of the backward pass
    if (plan.slab[l] >= 0) busy[plan.slab[l]] = 0;
    for (const KVUse& read : plan.reads[l]) {
      int& slab = plan.slab[read.pair.layer];
      if (read.pair.layer == l || slab >= 0) continue;
      slab = int(std::find(busy.begin(), busy.end(), 0) - busy.begin());
      if (slab == int(busy.size())) busy.push_back(0);
      busy[slab] = 1;
    }
  }
  plan.num_accumulators = int(busy.size());
  return plan;
}

inline KVPlan make_kv_plan(const ModelConfig& c, bool keep_dead = false) {
  std::vector<KVSource> source;
  for (int l = 0; l < c.num_layers; l++) {
    for (int i = 0; i < c.num_heads; i++) {
      bool borrows = i >= c.num_heads - c.num_skip_head && l >= c.num_skip_layer;
      source.push_back({borrows ? l - c.num_skip_layer : l, i});
    }
  }
  return kv_plan_from_table(c.num_layers, c.num_heads, std::move(source), keep_dead);
}

// The wiring as text: a row a layer, top layer first, a column a head; behind the bar, how many heads' k and v the layer
// projects and how many of them it lends.
inline std::string draw(const KVPlan& plan) {
  std::string text = "whose K/V each head reads (rows: layers; columns: heads; \".\": its own layer's; a number: that layer's)\n";
  for (int l = plan.num_layers - 1; l >= 0; l--) {
    text += format("  %3d |", l);
    for (int i = 0; i < plan.num_heads; i++) {
      const KVSource& pair = plan.source_of(l, i);
      text += pair.layer == l ? "  ." : format(" %2d", pair.layer);
    }
    int projected = int(plan.projected[l].size()), lent = int(plan.lent[l].size());
    text += format(" | projects %d of %d", projected, plan.num_heads);
    if (lent > 0) text += format(", lends %d", lent);
    text += "\n";
  }
  return text;
}

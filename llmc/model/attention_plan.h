// What follows from a wiring: which q, k and v heads each layer projects, which of them other layers use, which
// attentions a layer computes, and where the gradients of shared heads wait in the backward pass. Whole numbers only;
// binding.h and parts/ derive pointers from them.
//
// A *head* (layer, head) of q, k or v is what a layer projected for it. One that no attention uses is not
// projected: its rows exist in no weight, gradient, optimizer state, GEMM or cache. Its gradient would be zero, so the
// function, the loss curve and the gradient norm equal the full model's.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <string>
#include <utility>
#include <vector>
#include "llmc/wiring/config.h"
#include "llmc/base/error.h"
#include "llmc/wiring/wiring.h"

enum class Qkv { q, k, v };
constexpr Qkv all_qkv[] = {Qkv::q, Qkv::k, Qkv::v};
template <class T>
struct PerQkv {
  std::array<T, 3> of;
  T& operator[](Qkv which) { return of[size_t(which)]; }
  const T& operator[](Qkv which) const { return of[size_t(which)]; }
};

struct ProjectedHead {
  int layer, head;
};

// One K/V head as an attention uses it.
struct KVUse {
  ProjectedHead k, v;
  std::vector<int> query_heads;       // the query heads that attend to it, ascending
  bool dk_accumulate, dv_accumulate;  // +=, for what ran earlier in the backward pass has written there; else =
};

// One softmax for each query head of a layer. A layer has one such attention; with `blend` and `gate` also one for each
// attention map of the layers below, and their outputs are summed with weights.
struct PlannedAttention {
  int map_layer;            // the layer whose q and masks are used
  std::vector<KVUse> uses;  // sorted by the layers of k and of v, then by head
  bool dq_accumulate;
};

struct AttentionPlan {
  int num_layers = 0, num_heads = 0;
  WiringTable table;
  std::vector<std::vector<PlannedAttention>> attentions;  // (L): in the order in which they run, forward and backward
  PerQkv<std::vector<std::vector<int>>> projected;        // (L): heads that the layer projects, ascending
  PerQkv<std::vector<std::vector<int>>> shared;           // (L): projected heads that other layers use, ascending

  // Gradients of shared heads are summed in accumulators, from the highest layer that uses them down to the layer that
  // projected them. That layer's backward pass loads the sum before it writes to any accumulator, so one that it frees
  // can serve the next in the same layer.
  std::vector<int> accumulator;  // (L): the accumulator of the layer's shared heads; -1 if it shares none
  int num_accumulators = 0;
  int accumulator_heads = 0;  // q, k and v heads in an accumulator: the most that any layer shares

  // (L): for each v head of layer 0 that the layer uses in a value residual, whether its gradient is +=.
  std::vector<std::vector<char>> first_values_accumulate;

  // The heads of a full-size layer: with `lsh` keys are queries, and there is no k.
  int heads_of(Qkv which) const {
    return which == Qkv::q ? num_heads : which == Qkv::k && table.lsh_buckets > 0 ? 0 : table.num_kv_heads;
  }
  int num_projected(int layer) const { return count(projected, layer); }  // q, k and v heads
  int num_shared(int layer) const { return count(shared, layer); }
  // The index of a head among the layer's projected heads, or in its accumulator; -1 if it is not there. Heads of q
  // come first, then heads of k, then heads of v.
  int projected_index(Qkv which, const ProjectedHead& h) const { return index_in(projected, which, h); }
  int shared_index(Qkv which, const ProjectedHead& h) const { return index_in(shared, which, h); }
  // The v heads of layer 0 that layer l adds to its own with `vres`: the heads that layer l projects itself.
  std::vector<int> first_values(int l) const {
    return table.value_residual && l > 0 ? projected[Qkv::v][l] : std::vector<int>();
  }
  // Whether `depth` mixes this head of a layer above with those below it.
  bool is_mixed_above(int layer, int head) const {
    return layer + 1 < num_layers && projected_index(Qkv::v, {layer + 1, head}) >= 0;
  }
  // Heads that are projected although no attention uses them: where the plan was told to keep them, or where another
  // layer with the same parameters, a router or `depth` has a use for them.
  std::vector<int> unused_but_projected(Qkv which, int layer) const;
  // Projected heads whose gradient begins with zero, to which all that use them add: unused ones, and with `route` k
  // and v that no other layer can use, because in some updates the layer itself does not.
  std::vector<int> begin_with_zero(Qkv which, int layer) const;

 private:
  static int count(const PerQkv<std::vector<std::vector<int>>>& heads, int layer) {
    int n = 0;
    for (Qkv which : all_qkv) n += int(heads[which][layer].size());
    return n;
  }
  static int index_in(const PerQkv<std::vector<std::vector<int>>>& heads, Qkv which, const ProjectedHead& h) {
    int before = 0;
    for (Qkv lower : all_qkv)
      if (lower < which) before += int(heads[lower][h.layer].size());
    const std::vector<int>& list = heads[which][h.layer];
    const auto it = std::lower_bound(list.begin(), list.end(), h.head);
    return it == list.end() || *it != h.head ? -1 : before + int(it - list.begin());
  }
};

// Calls visit(q, k or v, head) for each head that an attention uses.
template <class Visit>
void for_each_head(const PlannedAttention& attention, Visit visit) {
  for (const KVUse& use : attention.uses) {
    visit(Qkv::k, use.k);
    visit(Qkv::v, use.v);
    for (int head : use.query_heads) visit(Qkv::q, ProjectedHead{attention.map_layer, head});
  }
}

// Calls visit(q, k or v, head) for each head that layer l's attentions use, or with `route` may use in some update.
template <class Visit>
void for_each_head(const AttentionPlan& plan, int l, Visit visit) {
  for (const PlannedAttention& attention : plan.attentions[l])
    for_each_head(attention, [&](Qkv which, const ProjectedHead& h) {
      visit(which, h);
      const bool is_routed = plan.table.route > 0 && which != Qkv::q && h.layer == l;
      for (int source = 0; is_routed && source < l; source++) visit(which, ProjectedHead{source, h.head});
    });
}

inline std::vector<int> AttentionPlan::unused_but_projected(Qkv which, int layer) const {
  std::set<int> used(shared[which][layer].begin(), shared[which][layer].end());
  for (const PlannedAttention& attention : attentions[layer])
    for_each_head(attention, [&](Qkv of, const ProjectedHead& h) {
      if (of == which && h.layer == layer) used.insert(h.head);
    });
  std::vector<int> heads;
  for (int head : projected[which][layer])
    if (used.count(head) == 0) heads.push_back(head);
  return heads;
}

inline std::vector<int> AttentionPlan::begin_with_zero(Qkv which, int layer) const {
  if (table.route == 0 || which == Qkv::q) return unused_but_projected(which, layer);
  std::vector<int> heads;
  for (int head : projected[which][layer])
    if (shared_index(which, {layer, head}) < 0) heads.push_back(head);
  return heads;
}

// The weight of layer `map`'s attention map in layer l's output with blend(a), where a is the same in all layers.
inline double blend_coefficient(double a, int map, int l) { return std::pow(a, l - map) * (map > 0 ? 1 - a : 1); }

// The attentions of layer l.
inline std::vector<PlannedAttention> plan_attentions(const WiringTable& table, int l) {
  const int num_heads = table.num_heads;
  std::set<KVSource> of_layer;
  for (int i = 0; i < num_heads; i++)
    for (const KVSource& source : table.sources(l, i)) of_layer.insert(source);
  std::vector<PlannedAttention> attentions;
  auto add = [&](int map_layer) {
    PlannedAttention attention = {map_layer, {}, false};
    for (const KVSource& source : of_layer) {
      // With another layer's attention map, k belongs to that layer and v to layer l.
      const int k_layer = map_layer == l ? source.k : map_layer;
      const size_t first = attention.uses.size();
      for (int i = 0; i < num_heads; i++) {
        const std::vector<KVSource>& sources = table.sources(l, i);
        if (!std::binary_search(sources.begin(), sources.end(), source)) continue;
        const int kv_head = table.kv_head(i);  // its query heads are neighbours
        if (attention.uses.size() == first || attention.uses.back().k.head != kv_head)
          attention.uses.push_back({{k_layer, kv_head}, {source.v, kv_head}, {}, false, false});
        attention.uses.back().query_heads.push_back(i);
      }
    }
    attentions.push_back(std::move(attention));
  };
  if (table.mix == WiringTable::Mix::none) add(table.map_layer[l]);
  for (int map = 0; map <= l && table.mix != WiringTable::Mix::none; map++)
    if (table.mix == WiringTable::Mix::gate || blend_coefficient(table.blend, map, l) != 0) add(map);
  return attentions;
}

// An accumulator for each layer that shares heads, as few as possible, in the order of the backward pass. With `route`
// none serves twice: all are zero when it begins.
inline void assign_accumulators(AttentionPlan& plan) {
  plan.accumulator.assign(size_t(plan.num_layers), -1);
  std::vector<char> busy;
  for (int l = plan.num_layers - 1; l >= 0; l--) {
    if (plan.accumulator[l] >= 0 && plan.table.route == 0) busy[plan.accumulator[l]] = 0;
    auto take = [&](int layer) {
      int& accumulator = plan.accumulator[layer];
      if (layer == l || accumulator >= 0) return;
      accumulator = int(std::find(busy.begin(), busy.end(), 0) - busy.begin());
      if (accumulator == int(busy.size())) busy.push_back(0);
      busy[accumulator] = 1;
    };
    for_each_head(plan, l, [&](Qkv, const ProjectedHead& h) { take(h.layer); });
    if (!plan.first_values(l).empty()) take(0);
    plan.accumulator_heads = std::max(plan.accumulator_heads, plan.num_shared(l));
  }
  plan.num_accumulators = int(busy.size());
}

// Which gradients begin with = and which continue with +=, in the order of the backward pass: layers downwards, then
// attentions and value residuals. With `route` gradients of k and v begin with zero, whoever comes first in an update.
inline void plan_accumulation(AttentionPlan& plan) {
  const bool is_routed = plan.table.route > 0;
  PerQkv<std::vector<char>> written;
  for (Qkv which : all_qkv) written[which].resize(size_t(plan.num_layers * plan.num_heads));
  auto write = [&](Qkv which, const ProjectedHead& h) {
    char& is_written = written[which][h.layer * plan.num_heads + h.head];
    return std::exchange(is_written, char(1)) != 0;
  };
  plan.first_values_accumulate.resize(size_t(plan.num_layers));
  for (int l = plan.num_layers - 1; l >= 0; l--) {
    for (PlannedAttention& attention : plan.attentions[l]) {
      for (int head = 0; head < plan.num_heads; head++)
        attention.dq_accumulate = write(Qkv::q, {attention.map_layer, head});
      for (KVUse& use : attention.uses) {
        use.dk_accumulate = write(Qkv::k, use.k) || is_routed;
        use.dv_accumulate = write(Qkv::v, use.v) || is_routed;
      }
    }
    for (int head : plan.first_values(l))
      plan.first_values_accumulate[l].push_back(write(Qkv::v, {0, head}) || is_routed);
  }
}

// With keep_dead, every layer projects all heads, as the paper's code does. Layers that share parameters project the
// same heads, those that an attention of any of them uses.
inline AttentionPlan make_attention_plan(const ModelConfig& c, bool keep_dead = false) {
  AttentionPlan plan;
  plan.num_layers = c.num_layers;
  plan.num_heads = c.num_heads;
  plan.table = c.wiring_table();
  const int L = c.num_layers, h = c.num_heads;
  PerQkv<std::vector<int>> highest_use;  // (L, h): the highest layer that uses each head; -1: unused
  for (Qkv which : all_qkv) highest_use[which].assign(size_t(L * h), -1);
  for (int l = 0; l < L; l++) {
    plan.attentions.push_back(plan_attentions(plan.table, l));
    for_each_head(plan, l,
                  [&](Qkv which, const ProjectedHead& head) { highest_use[which][head.layer * h + head.head] = l; });
  }
  for (int l = 1; l < L && plan.table.value_residual; l++)
    for (int i = 0; i < plan.table.num_kv_heads; i++)
      if (int& use = highest_use[Qkv::v][i]; keep_dead || highest_use[Qkv::v][l * h + i] >= 0) use = std::max(use, l);
  // (h): the layer up to which each head is projected for layers above. Routers mix all heads of k, and of v, up to the
  // highest layer whose own heads are used; `depth` mixes a head's k and v up to the highest layer whose v is used.
  PerQkv<std::vector<int>> highest_mixed;
  for (Qkv which : all_qkv) highest_mixed[which].assign(size_t(h), -1);
  for (Qkv which : {Qkv::k, Qkv::v})
    for (int i = 0; i < L * h; i++) {
      if (highest_use[which][i] < 0) continue;
      if (plan.table.router) highest_mixed[which].assign(size_t(h), i / h);
      if (plan.table.depth && which == Qkv::v) highest_mixed[Qkv::k][i % h] = highest_mixed[Qkv::v][i % h] = i / h;
    }
  for (Qkv which : all_qkv) {
    const int stored = plan.table.stored_layers;
    std::vector<char> is_used(size_t(stored * h), 0);  // in any of the layers with the same parameters
    for (int l = 0; l < L; l++)
      for (int i = 0; i < h; i++) is_used[l % stored * h + i] |= highest_use[which][l * h + i] >= 0;
    plan.projected[which].resize(size_t(L)), plan.shared[which].resize(size_t(L));
    for (int l = 0; l < L; l++)
      for (int i = 0; i < plan.heads_of(which); i++) {
        if (keep_dead || is_used[l % stored * h + i] || l <= highest_mixed[which][i])
          plan.projected[which][l].push_back(i);
        if (highest_use[which][l * h + i] > l) plan.shared[which][l].push_back(i);
      }
  }
  plan_accumulation(plan);
  assign_accumulators(plan);
  return plan;
}

// In generation and evaluation a text is computed as one sequence, of `length` positions at most. With memory, masks
// hide from a query the positions before its segment's memory. In training keys before the memory do not exist.
inline void mask_beyond_segment_memory(AttentionPlan& plan, int segment, int64_t length) {
  if (plan.table.memory == 0 || length <= segment) return;
  MaskClause clause;
  clause.s = segment, clause.block = true, clause.before = plan.table.memory;
  for (AttentionMask& mask : plan.table.masks)
    if (mask.window - 1 > plan.table.memory) mask.add(clause);  // a shorter window hides those keys
}

// The layer's masks: one for each run of heads that have the same.
inline std::string masks_text(const AttentionPlan& plan, int layer) {
  std::string text;
  for (int i = 0, end; i < plan.num_heads; i = end) {
    const std::string mask = plan.table.mask(layer, i).text();
    for (end = i + 1; end < plan.num_heads && plan.table.mask(layer, end).text() == mask;) end++;
    if (i == 0 && end == plan.num_heads) return mask == "all" ? "" : "keys: " + mask;
    text += format("%sheads %d to %d: %s", text.empty() ? "keys: " : "; ", i, end - 1, mask.c_str());
  }
  return text;
}

// What generation keeps of a token in a layer: k and v, whose elements have so many bytes, or with `lsh` q, v and the
// numbers of buckets.
inline int64_t kv_bytes_of_layer(const ModelConfig& c, const AttentionPlan& plan, int l, size_t element_bytes) {
  int64_t heads = 0;
  for (Qkv which : {plan.table.lsh_buckets > 0 ? Qkv::q : Qkv::k, Qkv::v})
    heads += int64_t(plan.projected[which][l].size());
  const int64_t buckets = int64_t(plan.num_heads) * (plan.table.lsh_buckets > 0 ? plan.table.lsh_rounds : 0);
  return heads * c.head_size() * int64_t(element_bytes) + buckets * int64_t(sizeof(int));
}

inline int64_t kv_bytes_per_token(const ModelConfig& c, const AttentionPlan& plan, size_t element_bytes) {
  int64_t bytes = 0;
  for (int l = 0; l < plan.num_layers; l++) bytes += kv_bytes_of_layer(c, plan, l, element_bytes);
  return bytes;
}

// How the drawing of layer l names a source: "." is the layer itself.
inline std::string source_text(const KVSource& source, int l) {
  auto name = [&](int layer) { return layer == l ? "." : std::to_string(layer); };
  if (source.k == source.v) return name(source.k);
  return (source.k == l ? "" : "k" + name(source.k)) + (source.v == l ? "" : "v" + name(source.v));
}

// The plan as text: a row a layer, top layer first, a column a head; after the bar, what the layer projects of each,
// how many K/V heads of it other layers use, and its masks and attention maps; then what the terms note.
inline std::string draw(const AttentionPlan& plan) {
  std::string text = "whose K/V each head attends to (rows: layers; columns: heads; \".\": its own layer's; a number: "
                     "that layer's";
  int width = 2;
  bool any_apart = false;
  for (int l = 0; l < plan.num_layers; l++)
    for (int i = 0; i < plan.num_heads; i++)
      for (const KVSource& source : plan.table.sources(l, i)) {
        if (source.k == source.v) continue;
        any_apart = true, width = std::max(width, int(source_text(source, l).size()));
      }
  text += any_apart ? "; after k or v: keys or values alone)\n" : ")\n";
  for (int l = plan.num_layers - 1; l >= 0; l--) {
    text += format("  %3d |", l);
    for (int i = 0; i < plan.num_heads; i++) {
      std::string sources;
      for (const KVSource& source : plan.table.sources(l, i))
        sources += (sources.empty() ? "" : "+") + source_text(source, l);
      text += format(" %*s", width, sources.c_str());
    }
    auto projects = [&](Qkv which) { return plan.projected[which][l].size(); };
    const int kv_heads = plan.table.num_kv_heads;
    if (plan.table.lsh_buckets > 0) text += format(" | projects q, v of %d", kv_heads);
    else if (projects(Qkv::k) == projects(Qkv::v)) text += format(" | projects %zu of %d", projects(Qkv::k), kv_heads);
    else text += format(" | projects k %zu, v %zu of %d", projects(Qkv::k), projects(Qkv::v), kv_heads);
    if (projects(Qkv::q) == 0) text += ", no q";
    const size_t shared_k = plan.shared[Qkv::k][l].size(), shared_v = plan.shared[Qkv::v][l].size();
    if (any_apart && shared_k != shared_v) text += format(", shares k %zu, v %zu", shared_k, shared_v);
    else if (shared_k + shared_v > 0) text += format(", shares %zu", std::max(shared_k, shared_v));
    const int map = plan.attentions[l][0].map_layer;
    if (plan.attentions[l].size() > 1) text += format(", %zu attention maps", plan.attentions[l].size());
    else if (map != l) text += format(", attention map of layer %d", map);
    const std::string masks = masks_text(plan, map);
    if (!masks.empty()) text += ", " + masks;
    text += "\n";
  }
  for (const std::string& note : plan.table.notes) text += note + "\n";
  return text;
}

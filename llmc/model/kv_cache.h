// The K/V cache of generation: how many positions each layer keeps of a sequence, and which. A layer whose keys only
// windows see keeps no more than those reach: its rows are moved to the front when they have filled it, which costs
// less than a copied row for each new one. Such a layer has room for about two windows. With a memory of earlier
// segments a text is one sequence, and masks hide what its segment's memory no longer has: the cache needs no more than
// two segments and their memories, however long the text is.
#pragma once
#include <algorithm>
#include <climits>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>
#include "attention_plan.h"
#include "batch.h"
#include "llmc/ops/rows.h"
#include "llmc/base/error.h"

// Layers whose K/V is used together: an attention numbers the keys of all of them alike, so these begin at the same
// position.
struct KVCacheGroup {
  std::vector<int> layers;
  int64_t reach = 1;      // the query at t sees no key before t - reach + 1; 0: it may see all
  int64_t alignment = 1;  // the first position kept is a multiple, for masks that count positions in blocks
  int64_t capacity = 0;   // positions that a sequence has room for
};

// Rows to move within the cache of a layer's sequence: `count` of them, from row `from` to the first.
struct KVCacheMove {
  int layer, slot;
  int64_t from, count;
};

// What generation keeps room for.
struct KVCachePlan {
  int slots = 0;           // sequences
  int64_t max_length = 0;  // of a sequence
  std::vector<KVCacheGroup> groups;
  std::vector<int> group_of_layer;  // (L)

  int64_t capacity(int layer) const { return groups[group_of_layer[layer]].capacity; }
  // The most positions that are kept of a sequence.
  int64_t longest() const {
    int64_t longest = 0;
    for (const KVCacheGroup& group : groups) longest = std::max(longest, group.capacity);
    return longest;
  }
};

// Which positions the cache holds at the moment.
struct KVCache {
  KVCachePlan plan;
  std::vector<int64_t> lengths;             // (slots): positions whose K/V has been computed
  std::vector<std::vector<int64_t>> first;  // (slots, groups): the position in the first row
  std::vector<int64_t> documents;           // (slots): with `documents`, where the last one begins

  KVCache() = default;
  explicit KVCache(KVCachePlan the_plan)
      : plan(std::move(the_plan)), lengths(size_t(plan.slots)),
        first(size_t(plan.slots), std::vector<int64_t>(plan.groups.size(), 0)), documents(size_t(plan.slots)) {}

  int64_t first_position(int slot, int layer) const { return first[slot][plan.group_of_layer[layer]]; }

  void clear(int slot) {
    lengths[slot] = documents[slot] = 0;
    std::fill(first[slot].begin(), first[slot].end(), 0);
  }

  // Makes room for the next `count` positions of a sequence and counts them. The moves are to be made before anything
  // is written.
  SequenceSpan append(int slot, int64_t count, std::vector<KVCacheMove>& moves) {
    const int64_t length = lengths[slot];
    CHECK(length + count <= plan.max_length);
    for (size_t g = 0; g < plan.groups.size(); g++) {
      const KVCacheGroup& group = plan.groups[g];
      int64_t& begin = first[slot][g];
      if (length + count - begin <= group.capacity) continue;
      const int64_t needed = std::max<int64_t>(0, length - group.reach + 1) / group.alignment * group.alignment;
      CHECK(group.reach > 0 && length + count - needed <= group.capacity &&
            needed - begin >= length - needed);  // they do not overlap
      for (int layer : group.layers) moves.push_back({layer, slot, needed - begin, length - needed});
      begin = needed;
    }
    lengths[slot] = length + count;
    return {slot, length, count};
  }

  // (groups, `rows`): the first key of each token's document, as a row of its sequence in the cache. `tokens`: the
  // spans' tokens, which have been appended; a document begins at each that is `end_of_text`.
  std::vector<int> first_keys(const std::vector<SequenceSpan>& spans, const int* tokens, int end_of_text,
                              int64_t rows) {
    std::vector<int> keys(plan.groups.size() * size_t(rows));
    int64_t row = 0;
    for (const SequenceSpan& span : spans)
      for (int64_t position = span.first; position < span.first + span.count; position++, row++) {
        if (tokens[row] == end_of_text) documents[span.slot] = position;
        for (size_t g = 0; g < plan.groups.size(); g++)
          keys[g * rows + row] = int(std::max<int64_t>(0, documents[span.slot] - first[span.slot][g]));
      }
    return keys;
  }
};

// Where the rows of a pass over spans of sequences lie: their positions, their rows in the cache of each group, and
// where each span's sequence lies there, with them.
struct CachedRows {
  std::vector<int> positions;      // (N)
  std::vector<int> rows;           // (N, groups)
  std::vector<KeyRows> sequences;  // (groups, slots): of each span

  CachedRows(const KVCache& cache, const std::vector<SequenceSpan>& spans) {
    const size_t slots = size_t(cache.plan.slots), groups = cache.plan.groups.size();
    CHECK(spans.size() <= slots);
    sequences.resize(groups * slots);
    for (size_t n = 0; n < spans.size(); n++) {
      const SequenceSpan& span = spans[n];
      auto row = [&](size_t g, int64_t position) {
        return int(span.slot * cache.plan.groups[g].capacity + position - cache.first[span.slot][g]);
      };
      for (int64_t position = span.first; position < span.first + span.count; position++) {
        positions.push_back(int(position));
        for (size_t g = 0; g < groups; g++) rows.push_back(row(g, position));
      }
      for (size_t g = 0; g < groups; g++) {
        const int first_row = row(g, cache.first[span.slot][g]);
        sequences[g * slots + n] = {first_row, row(g, span.first + span.count) - first_row};
      }
    }
  }
};

// The groups: a layer is in one with the layers whose K/V its attention uses, with theirs, and so on.
inline std::vector<KVCacheGroup> group_layers(const AttentionPlan& plan) {
  std::vector<int> lower(size_t(plan.num_layers));  // a lower layer of the same group; of the lowest, itself
  for (int l = 0; l < plan.num_layers; l++) lower[l] = l;
  auto lowest = [&](int l) {
    while (lower[l] != l) l = lower[l] = lower[lower[l]];
    return l;
  };
  for (int l = 0; l < plan.num_layers; l++)
    for (const PlannedAttention& attention : plan.attentions[l])
      for (const KVUse& use : attention.uses)
        for (int layer : {use.k.layer, use.v.layer}) {
          const int a = lowest(layer), b = lowest(l);
          lower[std::max(a, b)] = std::min(a, b);
        }
  std::vector<KVCacheGroup> groups;
  std::vector<size_t> index(size_t(plan.num_layers));  // of the group, by its lowest layer
  for (int l = 0; l < plan.num_layers; l++) {
    if (lowest(l) == l) index[l] = groups.size(), groups.emplace_back();
    groups[index[lowest(l)]].layers.push_back(l);
  }
  return groups;
}

// A cache for `slots` sequences of at most `max_length` tokens each; up to `rows` tokens are computed at a time.
inline KVCachePlan plan_kv_cache(const AttentionPlan& plan, int slots, int64_t max_length, int64_t rows) {
  KVCachePlan cache;
  cache.slots = slots, cache.max_length = max_length;
  cache.groups = group_layers(plan);
  cache.group_of_layer.resize(size_t(plan.num_layers));
  for (size_t g = 0; g < cache.groups.size(); g++)
    for (int layer : cache.groups[g].layers) cache.group_of_layer[layer] = int(g);
  for (int l = 0; l < plan.num_layers; l++)
    for (const PlannedAttention& attention : plan.attentions[l]) {
      KVCacheGroup& group = cache.groups[cache.group_of_layer[l]];
      for (int head = 0; head < plan.num_heads; head++) {
        const AttentionMask& mask = plan.table.mask(attention.map_layer, head);
        const bool sees_all = group.reach == 0 || mask.reach() == INT_MAX;
        group.reach = sees_all ? 0 : std::max<int64_t>(group.reach, mask.reach());
        group.alignment = std::min(std::lcm(group.alignment, std::min(mask.period(), max_length)), max_length);
      }
    }
  for (KVCacheGroup& group : cache.groups) {
    group.capacity = 2 * (group.reach - 1 + group.alignment) + rows;
    if (group.reach == 0 || group.capacity >= max_length) group.reach = 0, group.capacity = max_length;
  }
  return cache;
}

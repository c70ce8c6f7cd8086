// The activations that all sublayers share: tokens and where they stand, the embedded tokens, losses, the gradient of
// the residual stream. A tensor of one part of a sublayer, scratch included, is declared in that part's file.
#pragma once
#include <array>
#include <numeric>
#include <vector>
#include "activation_list.h"
#include "llmc/ops/dropout.h"
#include "llmc/operations.h"
#include "llmc/ops/precision.h"
#include "llmc/ops/relative.h"
#include "llmc/ops/rotary.h"
#include "shape.h"

// N: rows, C: channels, hs: head size.
struct Activations {
  int *tokens = nullptr, *targets = nullptr;  // (N)
  // Each (N): uploaded while others are computed on.
  std::array<int*, num_staging_buffers> staged_tokens = {}, staged_targets = {};
  uint64_t* dropout_keys = nullptr;  // with --dropout: (B), dropout_key of each sequence
  // With `documents`: (N), of each query the first key, of each key the last query of its document (attention_args.h);
  // in generation the former is (groups of layers, N), in numbers of the keys that the cache has, and the latter null.
  int *first_keys = nullptr, *last_queries = nullptr;
  floatX* embedded = nullptr;     // (N, C)
  float* losses = nullptr;        // (N)
  uint8_t* correct = nullptr;     // (N): the target's logit is the first of the largest; not written in training steps
  StepStats* stats = nullptr;     // (1)
  floatX* logits = nullptr;       // (logit_rows, logit_stride): a chunk of rows at a time
  floatX* dresidual = nullptr;    // (N, C): in training, the gradient of the residual stream
  float* rotary_table = nullptr;  // (rotary_positions(...), hs): a constant, rotary_table of rotary.h
  floatX* sines = nullptr;        // (relative_distances(...), C): a constant, sines_of_distances of relative.h
  // In generation, where the rows of a pass lie (kv_cache.h).
  int* positions = nullptr;      // (N)
  int* cache_rows = nullptr;     // (N, groups of layers)
  KeyRows* sequences = nullptr;  // (groups of layers, slots)
};

// How many positions the table of rotary positions has. In training with `memory` they are counted from the memory's
// first. In generation with `memory` they have no end: each pass has a table of its own rows.
inline int64_t rotary_positions(const ModelShape& shape) {
  const int memory = shape.attention_plan.table.memory;
  return shape.generation && memory > 0 ? shape.rows : shape.config.max_seq_len + memory;
}

// How many distances of query and key relative positions have a row for: all that are seen.
inline int64_t relative_distances(const ModelShape& shape) {
  const int64_t memory = shape.attention_plan.table.memory;
  if (shape.training) return shape.training->T + memory;
  return std::min(shape.generation->max_length, shape.config.max_seq_len + memory);
}

inline void declare(Activations& acts, ActivationList& list) {
  const WiringTable& table = list.shape.attention_plan.table;
  const std::optional<TrainingShape>& training = list.shape.training;
  const int64_t N = list.shape.rows, C = list.shape.config.channels;
  constexpr MemoryGroup activations = MemoryGroup::activations;
  list.add(activations, "tokens", acts.tokens, {N});
  list.add(activations, "targets", acts.targets, {N});
  for (int*& buffer : acts.staged_tokens) list.add(activations, "staged_tokens", buffer, {N});
  for (int*& buffer : acts.staged_targets) list.add(activations, "staged_targets", buffer, {N});
  if (training && training->dropout > 0) list.add(activations, "dropout_keys", acts.dropout_keys, {training->B});
  const int64_t groups = training ? 1 : int64_t(list.shape.generation->groups.size());
  if (table.documents) list.add(activations, "first_keys", acts.first_keys, {groups, N});
  if (table.documents && training) list.add(activations, "last_queries", acts.last_queries, {N});
  list.add(activations, "embedded", acts.embedded, {N, C});
  list.add(activations, "losses", acts.losses, {N});
  list.add(activations, "correct", acts.correct, {N});
  list.add(activations, "stats", acts.stats, {1});
  list.add(MemoryGroup::logits, "logits", acts.logits, {list.shape.logit_rows, list.shape.logit_stride});
  if (table.rope > 0)
    list.add(activations, "rotary_table", acts.rotary_table,
             {rotary_positions(list.shape), list.shape.config.head_size()});
  if (table.relative) list.add(activations, "sines", acts.sines, {relative_distances(list.shape), C});
  if (training) return list.add(MemoryGroup::backward, "dresidual", acts.dresidual, {N, C});
  list.add(activations, "positions", acts.positions, {N});
  list.add(activations, "cache_rows", acts.cache_rows, {N, groups});
  list.add(activations, "sequences", acts.sequences, {groups, list.shape.generation->slots});
}

// What training passes drop at a site of a layer; nothing without --dropout.
inline Dropout dropout_of(const Activations& acts, const ModelShape& shape, DropoutSite site, int layer) {
  if (!shape.training || shape.training->dropout == 0) return {};
  return make_dropout(acts.dropout_keys, shape.training->dropout, site, layer);
}

// acts.rotary_table = the angles of these positions.
inline void set_rotary_table(const Activations& acts, const ModelShape& shape, const std::vector<int>& positions) {
  copy_to_device(acts.rotary_table, rotary_table(positions, shape.config.head_size(), shape.attention_plan.table.rope));
}

// In generation: acts.positions = the positions of a pass's rows, by which they are embedded or rotated. With `memory`
// the table has the angles of these rows.
inline void set_positions(const Activations& acts, const ModelShape& shape, std::vector<int> positions) {
  if (shape.attention_plan.table.memory > 0 && shape.attention_plan.table.rope > 0) {
    set_rotary_table(acts, shape, positions);
    std::iota(positions.begin(), positions.end(), 0);
  }
  copy_to_device(acts.positions, positions);
}

// Sets the activations that are constants: the sines of relative positions, the angles of rotary ones.
inline void set_constants(const Activations& acts, const ModelShape& shape) {
  if (acts.sines != nullptr) {
    const std::vector<float> sines = sines_of_distances(relative_distances(shape), shape.config.channels);
    copy_to_device(acts.sines, std::vector<floatX>(sines.begin(), sines.end()));
  }
  if (acts.rotary_table == nullptr) return;
  std::vector<int> positions(size_t(rotary_positions(shape)));
  std::iota(positions.begin(), positions.end(), 0);
  set_rotary_table(acts, shape, positions);
}

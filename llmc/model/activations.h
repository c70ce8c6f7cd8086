// The activations that all sublayers share: tokens, the embedded tokens, what is in memory only while a sublayer runs,
// and what the backward pass needs beside. What a sublayer leaves of its own is declared in its file.
#pragma once
#include <algorithm>
#include <array>
#include <numeric>
#include <vector>
#include "activation_list.h"
#include "llmc/ops/dropout.h"
#include "llmc/ops/lsh.h"
#include "llmc/operations.h"
#include "llmc/ops/precision.h"
#include "llmc/ops/relative.h"
#include "llmc/ops/rotary.h"
#include "parameters.h"
#include "shape.h"

// N: rows, C: channels, L: layers, h: heads, hs: head size.
struct Activations {
  int *tokens, *targets;  // (N)
  // Each (N): uploaded while others are computed on.
  std::array<int*, num_staging_buffers> staged_tokens, staged_targets;
  // With --dropout: (B, 2), dropout_key of each sequence, whose 64 bits are uploaded as two numbers.
  int* dropout_keys = nullptr;
  std::array<int*, num_staging_buffers> staged_dropout_keys = {};
  // With `documents`: (N), of each query the first key, of each key the last query of its document (attention_args.h);
  // in generation the former is (groups of layers, N), in numbers of the keys that the cache has, and the latter null.
  int *first_keys = nullptr, *last_queries = nullptr;
  floatX* embedded;               // (N, C)
  float* losses;                  // (N)
  uint8_t* correct;               // (N): the target's logit is the first of the largest; not written in training steps
  StepStats* stats;               // (1)
  floatX* branch_out;             // (N, C): the output of a sublayer's branch, before it joins the residual stream
  floatX* logits;                 // (logit_rows, logit_stride): a chunk of rows at a time
  float* rotary_table = nullptr;  // (rotary_positions(...), hs): rotary_table of rotary.h
  // Tensors of relative positions (llmc/ops/relative.h).
  floatX* sines = nullptr;                                             // (relative_distances(...), C)
  floatX *queries_of_keys = nullptr, *queries_of_distances = nullptr;  // (N, C)
  floatX* gru_sums = nullptr;                                          // (N, 2C): of `gru` (llmc/ops/gru.h)
  std::array<float*, 2> streams = {};                                  // (N, C): of `reversible`
  float* lsh_scratch = nullptr;                                        // (lsh_scratch(...)): of `lsh`, of either pass
  // Tensors of generation, of which the first three say where the rows of a pass lie (kv_cache.h).
  int* positions = nullptr;             // (N)
  int* cache_rows = nullptr;            // (N, groups of layers)
  KeyRows* sequences = nullptr;         // (groups of layers, slots)
  float* attention_partials = nullptr;  // (attention_partials(...))
  // Tensors of the backward pass: gradients, unless said otherwise.
  floatX* dresidual = nullptr;  // (N, C): of the residual stream
  floatX* dstream = nullptr;    // (N, C): of the second stream of `reversible`
  // Of `dense`: (L) of (N, C), of the inputs of all layers but the first and of the last norm.
  std::vector<floatX*> dlayer_inputs;
  float* dense_scratch = nullptr;      // (weighted_sum_pieces(N C), L + 1)
  floatX* dnorm = nullptr;             // (N, C): of a norm's output, and before that of the heads' outputs
  floatX* dhidden = nullptr;           // (hidden_rows, F): of the MLP's products, and before that of its hidden units
  floatX* dqkv = nullptr;              // (N, the largest QKV); with `memory` (N, C): of q alone, and beside it
  floatX* dkv = nullptr;               //   (B (M + T), the largest QKV - C)
  float* delta = nullptr;              // (B, h, T): rowsum(dout * out) of attention
  float* layernorm_scratch = nullptr;  // (layernorm_backward_scratch(key_rows(...), C))
  float* attention_scratch = nullptr;  // (attention_backward_scratch(...))
  float* value_mix_scratch = nullptr;  // (value_mix_scratch(N)): of `vres`
  float* router_scratch = nullptr;     // (head_mix_partial_sums(N), the most weights of a layer): of `router`
  // num_accumulators of them, each (N, accumulator_heads * hs), with `memory` (B (M + T), ...): dq | dk | dv of a
  // layer's shared heads.
  std::vector<floatX*> accumulators;
  // Of relative positions: (N, C) each, (relative_distances(...), C), and that of each sequence.
  floatX *dqueries_of_keys = nullptr, *dqueries_of_distances = nullptr, *relative_dr = nullptr;
  float* relative_dr_of_sequences = nullptr;
  // Tensors of layers that sum the outputs of several attention maps (`blend` and `gate`).
  float* map_sum = nullptr;  // (N, C): the weighted sum of the maps' outputs
  // (N, C): a map's output before it is rounded, for `gate`, whose gradient is a difference of two such outputs.
  float* exact_map_out = nullptr;
  float *map_gates = nullptr, *dmap_gates = nullptr;  // (L, N): of gate
  float* dmap_weights = nullptr;                      // (L, N): gradients of the weights of each map in one layer
  // Tensors of cycles after which tokens halt (`act`; llmc/ops/halting.h).
  float* halting = nullptr;                          // (cycles, N): with which probability; of the last cycle not used
  float* halting_sum = nullptr;                      // (N, C): of the residual stream after each cycle
  float* ponder = nullptr;                           // (N): N + R
  floatX* dhalted = nullptr;                         // (N, C): of the sum when it is rounded
  float *dhalting = nullptr, *dremainder = nullptr;  // (N): of one cycle's probabilities; of R
  // Tensors of Muon, which takes one batch of matrices of sides n and length after the other.
  floatX *muon_x = nullptr, *muon_next = nullptr;  // (batch, n, length): X before and after an iteration
  // (batch, n, n): A, A A and a I + b A + c A A.
  floatX *muon_gram = nullptr, *muon_gram_squared = nullptr, *muon_polynomial = nullptr;
  double* muon_squares = nullptr;  // (matrices): the square of each one's norm
  MuonStep* muon_step = nullptr;   // (1)
};

// How many of `rows` rows of logits, each of row_bytes, are computed, differentiated and dropped at a time: chunks of
// about equal size, as few as chunk_bytes allows, in multiples of the device's logit_row_multiple; but at least 64 if
// there are so many.
inline int64_t logit_chunk_rows(int64_t rows, int64_t row_bytes, int64_t chunk_bytes) {
  const auto in_multiples = [](int64_t n) { return n / logit_row_multiple * logit_row_multiple; };
  const int64_t most = std::max(std::max<int64_t>(64, logit_row_multiple), in_multiples(chunk_bytes / row_bytes));
  const int64_t chunks = (rows + most - 1) / most;
  return std::min(rows, in_multiples((rows + chunks - 1) / chunks + logit_row_multiple - 1));
}

// The most partial sums of dk and dv that the backward pass of an attention of the plan leaves.
inline int64_t most_partial_sums(const AttentionPlan& plan) {
  size_t most = 0;
  for (const std::vector<PlannedAttention>& layer : plan.attentions)
    for (const PlannedAttention& attention : layer) {
      size_t partial_sums = 0;
      for (const KVUse& use : attention.uses)
        if (has_partial_sums(int64_t(use.query_heads.size()))) partial_sums += use.query_heads.size();
      most = std::max(most, partial_sums);
    }
  return int64_t(most);
}

inline LshShape lsh_shape(const ModelConfig& c, const WiringTable& table, int64_t B, int64_t T) {
  return {B, T, c.num_heads, c.head_size(), table.lsh_buckets, table.lsh_rounds};
}

// How many floats of scratch `lsh` takes in either pass of training; 0 without it.
inline int64_t lsh_scratch_of(const ModelShape& shape) {
  if (!shape.training || shape.attention_plan.table.lsh_buckets == 0) return 0;
  const LshShape lsh = lsh_shape(shape.config, shape.attention_plan.table, shape.training->B, shape.training->T);
  return std::max(lsh_scratch(lsh, /*backward=*/false), lsh_scratch(lsh, /*backward=*/true));
}

// The most K/V heads that a query head attends to in one softmax.
inline int64_t most_kv_per_head(const AttentionPlan& plan) {
  size_t most = 0;
  for (int l = 0; l < plan.num_layers; l++)
    for (int i = 0; i < plan.num_heads; i++) most = std::max(most, plan.table.sources(l, i).size());
  return int64_t(most);
}

// The rows of k and v in training: those of the memory are before those of the tokens.
inline int64_t key_rows(const ModelShape& shape) {
  return shape.rows + int64_t(shape.training->B) * shape.attention_plan.table.memory;
}

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

inline void declare_muon_activations(Activations& acts, ActivationList& list) {
  const TrainingShape& training = *list.shape.training;
  if (training.matrices.empty()) return;
  constexpr MemoryGroup muon = MemoryGroup::muon;
  int64_t wide = 0, square = 0;  // the most elements of a batch
  for (const MuonBatch& batch : training.batches) {
    wide = std::max(wide, batch.count * batch.elements());
    square = std::max(square, batch.count * batch.n() * batch.n());
  }
  for (floatX** x : {&acts.muon_x, &acts.muon_next}) list.add(muon, "muon_x", *x, {wide});
  for (floatX** a : {&acts.muon_gram, &acts.muon_gram_squared, &acts.muon_polynomial})
    list.add(muon, "muon_gram", *a, {square});
  list.add(muon, "muon_squares", acts.muon_squares, {int64_t(training.matrices.size())});
  list.add(muon, "muon_step", acts.muon_step, {1});
}

inline void declare_backward_activations(Activations& acts, ActivationList& list) {
  const ModelConfig& c = list.shape.config;
  const AttentionPlan& plan = list.shape.attention_plan;
  const TrainingShape& training = *list.shape.training;
  const int64_t N = list.shape.rows, C = c.channels, h = c.num_heads, hs = c.head_size();
  constexpr MemoryGroup backward = MemoryGroup::backward;
  int64_t largest_qkv = 0;
  for (int l = 0; l < c.num_layers; l++) largest_qkv = std::max(largest_qkv, qkv_rows(c, plan, l));
  list.add(backward, "dresidual", acts.dresidual, {N, C});
  if (plan.table.reversible) list.add(backward, "dstream", acts.dstream, {N, C});
  if (plan.table.dense) {
    acts.dlayer_inputs.resize(size_t(c.num_layers));
    for (floatX*& d : acts.dlayer_inputs) list.add(backward, "dlayer_input", d, {N, C});
    list.add(backward, "dense_scratch", acts.dense_scratch, {weighted_sum_pieces(N * C), c.num_layers + 1});
  }
  list.add(backward, "dnorm", acts.dnorm, {N, C});
  // The gradient of one map's output (N, C) is there, too (parts/mixed_maps.h).
  const int64_t hidden_rows = list.shape.hidden_rows(), F = plan.table.fc_size(c.channels);
  list.add(backward, "dhidden", acts.dhidden,
           {plan.table.mix == WiringTable::Mix::none ? hidden_rows : std::max(hidden_rows, (N * C + F - 1) / F), F});
  if (plan.table.memory > 0) {
    list.add(backward, "dq", acts.dqkv, {N, C});
    list.add(backward, "dkv", acts.dkv, {key_rows(list.shape), largest_qkv - C});
  } else {
    list.add(backward, "dqkv", acts.dqkv, {N, largest_qkv});
  }
  if (plan.table.lsh_buckets == 0) list.add(backward, "delta", acts.delta, {N, h});
  list.add(backward, "layernorm_scratch", acts.layernorm_scratch,
           {layernorm_backward_scratch(key_rows(list.shape), C)});
  const int64_t attention_scratch =
      attention_backward_scratch(training.B, plan.table.memory + training.T, hs, most_partial_sums(plan));
  if (attention_scratch > 0 && plan.table.lsh_buckets == 0)
    list.add(backward, "attention_scratch", acts.attention_scratch, {attention_scratch});
  if (plan.table.value_residual)
    list.add(backward, "value_mix_scratch", acts.value_mix_scratch, {value_mix_scratch(N)});
  if (plan.table.router)
    list.add(backward, "router_scratch", acts.router_scratch,
             {head_mix_partial_sums(N), int64_t(plan.table.num_kv_heads) * plan.table.num_kv_heads * c.num_layers});
  acts.accumulators.resize(size_t(plan.num_accumulators));
  for (floatX*& accumulator : acts.accumulators)
    list.add(MemoryGroup::dkv_accumulators, "accumulator", accumulator,
             {key_rows(list.shape), plan.accumulator_heads * hs});
  if (plan.table.relative) {
    const int64_t D = relative_distances(list.shape);
    list.add(backward, "dqueries_of_keys", acts.dqueries_of_keys, {N, C});
    list.add(backward, "dqueries_of_distances", acts.dqueries_of_distances, {N, C});
    list.add(backward, "relative_dr", acts.relative_dr, {D, C});
    list.add(backward, "relative_dr_of_sequences", acts.relative_dr_of_sequences, {training.B, D, C});
  }
  if (plan.table.mix == WiringTable::Mix::gate) {
    list.add(backward, "dmap_gates", acts.dmap_gates, {c.num_layers, N});
    if (is_16_bit) list.add(backward, "exact_map_out", acts.exact_map_out, {N, C});
  }
  if (plan.table.mix != WiringTable::Mix::none)
    list.add(backward, "dmap_weights", acts.dmap_weights, {c.num_layers, N});
  if (plan.table.halting > 0) {
    list.add(backward, "dhalted", acts.dhalted, {N, C});
    list.add(backward, "dhalting", acts.dhalting, {N});
    list.add(backward, "dremainder", acts.dremainder, {N});
  }
  declare_muon_activations(acts, list);
}

inline void declare(Activations& acts, ActivationList& list) {
  const ModelConfig& c = list.shape.config;
  const AttentionPlan& plan = list.shape.attention_plan;
  const int64_t N = list.shape.rows, C = c.channels;
  constexpr MemoryGroup activations = MemoryGroup::activations;
  list.add(activations, "tokens", acts.tokens, {N});
  list.add(activations, "targets", acts.targets, {N});
  for (int*& buffer : acts.staged_tokens) list.add(activations, "staged_tokens", buffer, {N});
  for (int*& buffer : acts.staged_targets) list.add(activations, "staged_targets", buffer, {N});
  if (list.shape.training && list.shape.training->dropout > 0) {
    list.add(activations, "dropout_keys", acts.dropout_keys, {list.shape.training->B, 2});
    for (int*& buffer : acts.staged_dropout_keys)
      list.add(activations, "staged_dropout_keys", buffer, {list.shape.training->B, 2});
  }
  const int64_t groups = list.shape.generation ? int64_t(list.shape.generation->groups.size()) : 1;
  if (plan.table.documents) list.add(activations, "first_keys", acts.first_keys, {groups, N});
  if (plan.table.documents && list.shape.training) list.add(activations, "last_queries", acts.last_queries, {N});
  list.add(activations, "embedded", acts.embedded, {N, C});
  list.add(activations, "losses", acts.losses, {N});
  list.add(activations, "correct", acts.correct, {N});
  list.add(activations, "stats", acts.stats, {1});
  list.add(activations, "branch_out", acts.branch_out, {N, C});
  if (plan.table.mix != WiringTable::Mix::none) list.add(activations, "map_sum", acts.map_sum, {N, C});
  if (plan.table.mix == WiringTable::Mix::gate) list.add(activations, "map_gates", acts.map_gates, {c.num_layers, N});
  if (plan.table.halting > 0) {
    list.add(activations, "halting", acts.halting, {c.num_layers / plan.table.stored_layers, N});
    list.add(activations, "halting_sum", acts.halting_sum, {N, C});
    list.add(activations, "ponder", acts.ponder, {N});
  }
  if (plan.table.rope > 0)
    list.add(activations, "rotary_table", acts.rotary_table, {rotary_positions(list.shape), c.head_size()});
  if (plan.table.relative) {
    list.add(activations, "sines", acts.sines, {relative_distances(list.shape), C});
    list.add(activations, "queries_of_keys", acts.queries_of_keys, {N, C});
    list.add(activations, "queries_of_distances", acts.queries_of_distances, {N, C});
  }
  for (float*& stream : acts.streams)
    if (plan.table.reversible) list.add(activations, "stream", stream, {N, C});
  if (plan.table.gru) list.add(activations, "gru_sums", acts.gru_sums, {N, 2 * C});
  if (const int64_t scratch = lsh_scratch_of(list.shape); scratch > 0)
    list.add(activations, "lsh_scratch", acts.lsh_scratch, {scratch});
  list.add(MemoryGroup::logits, "logits", acts.logits, {list.shape.logit_rows, list.shape.logit_stride});
  if (list.shape.training) return declare_backward_activations(acts, list);
  const KVCachePlan& cache = *list.shape.generation;
  list.add(activations, "positions", acts.positions, {N});
  list.add(activations, "cache_rows", acts.cache_rows, {N, groups});
  list.add(activations, "sequences", acts.sequences, {groups, cache.slots});
  const int64_t partials =
      attention_partials(cache.slots, c.num_heads, c.head_size(), cache.longest(), most_kv_per_head(plan));
  if (partials > 0) list.add(activations, "attention_partials", acts.attention_partials, {partials});
}

// What training passes drop at a site of a layer; nothing without --dropout.
inline Dropout dropout_of(const Activations& acts, const ModelShape& shape, DropoutSite site, int layer) {
  if (!shape.training || shape.training->dropout == 0) return {};
  return make_dropout(reinterpret_cast<const uint64_t*>(acts.dropout_keys), shape.training->dropout, site, layer);
}

// acts.rotary_table = the angles of these positions.
inline void set_rotary_table(const Activations& acts, const ModelShape& shape, const std::vector<int>& positions) {
  copy_to_device(acts.rotary_table, rotary_table(positions, shape.config.head_size(), shape.attention_plan.table.rope));
}

// In generation: acts.positions = the positions of a pass's rows, by which they are embedded or rotated. With `memory`
// the table of angles is that of these rows.
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

// The activations of GPT-2: which there are, their shapes, what they are for, and which of them each level of
// recomputation keeps.
//
// B: sequences in a micro-batch, T: their length, C: channels, L: layers, h: heads, hs: head size, QKV: what a layer
// projects of q, k and v for a token. In generation B is 1 and T the most tokens that are computed at a time, of
// whatever sequences; only K/V is kept for longer.
#pragma once
#include <algorithm>                 // std::max, std::min
#include <array>                     // std::array
#include <map>                       // std::map
#include <string>                    // std::string
#include <vector>                    // std::vector
#include "attention_plan.h"          // AttentionPlan
#include "config.h"                  // ModelConfig
#include "kv_cache.h"                // KVCache
#include "llmc/operations.h"         // num_staging_buffers, layernorm_backward_scratch, logit_row_multiple
#include "llmc/precision.h"          // floatX
#include "llmc/utils/memory_plan.h"  // MemoryGroup
#include "parameters.h"              // qkv_rows

// What the backward pass computes again instead of keeping it (-r). Each level includes those before it.
enum class Recompute {
  nothing,
  gelu,
  layernorm,
  block,  // everything in a block but its K/V and the residual stream
  above_all_levels
};

// What layer l's forward pass leaves for its backward pass, and for the layers that attend to its k and v.
struct LayerActs {
  floatX* ln1 = nullptr;                           // (B, T, C)
  float *ln1_mean = nullptr, *ln1_rstd = nullptr;  // (B, T)
  floatX* qkv = nullptr;  // (B, T, QKV): q | k | v of the projected heads; null with Recompute::block, unless
                          //   other layers use q, where
  floatX *q = nullptr, *kv = nullptr;  //   q (B, T, C) and kv (B, T, QKV - C) are tensors of their own. In generation
                                       //   qkv holds the new tokens', and kv (slots, capacity, QKV - C) is the cache
  floatX* att = nullptr;               // (B, T, C)
  float* lse = nullptr;                // (B, h, T)
  float* topk_score = nullptr;         // (B, h, T): of topk
  int* topk_last = nullptr;            // (B, h, T)
  floatX* residual2 = nullptr;         // (B, T, C): after attention
  floatX* ln2 = nullptr;               // (B, T, C)
  float *ln2_mean = nullptr, *ln2_rstd = nullptr;  // (B, T)
  floatX* fch = nullptr;                           // (B, T, 4C)
  floatX* fch_gelu = nullptr;                      // (B, T, 4C)
  floatX* residual3 = nullptr;                     // (B, T, C): after the MLP
};

struct Activations {
  int *tokens, *targets;                                                // (B, T)
  std::array<int*, num_staging_buffers> staged_tokens, staged_targets;  // each (B, T): uploaded while others are
                                                                        // computed on
  floatX* embedded;                                                     // (B, T, C)
  std::vector<LayerActs> layers;                                        // (L)
  floatX* lnf;                                                          // (B, T, C)
  float *lnf_mean, *lnf_rstd;                                           // (B, T)
  float* losses;                                                        // (B, T)
  StepStats* stats;                                                     // (1)
  floatX* sublayer;  // (B, T, C): the output of attention or the MLP, before it is added to the residual stream
  floatX* logits;    // (logit_rows, logit_stride): a chunk of rows at a time
  float* attention_partials = nullptr;  // (attention_partials(...)): in generation
  // backward only
  floatX* dresidual = nullptr;         // (B, T, C): gradient of the residual stream
  floatX* dsublayer = nullptr;         // (B, T, C)
  floatX* dfch = nullptr;              // (B, T, 4C)
  floatX* dqkv = nullptr;              // (B, T, the largest QKV)
  float* delta = nullptr;              // (B, h, T): attention's rowsum(dout * out)
  float* layernorm_scratch = nullptr;  // (layernorm_backward_scratch(B T, C))
  float* attention_scratch = nullptr;  // (attention_backward_scratch(...))
  std::vector<floatX*> accumulators;   // (num_accumulators), each (B, T, accumulator_heads * hs): dq | dk | dv of a
                                       // layer's shared heads
  // only with several attention maps a layer
  float* map_sum = nullptr;        // (B, T, C): of the maps' outputs, weighted
  float* exact_map_out = nullptr;  // (B, T, C): a map's output before it is rounded; of gate, whose gradient is the
                                   // difference of two
  float *map_gates = nullptr, *dmap_gates = nullptr;  // (L, B, T): of gate
  float* dmap_weights = nullptr;                      // (L, B, T): gradients of the weights of each map in one layer
  // only with Muon, for one matrix after the other; n: the largest of their shorter sides
  floatX *muon_x = nullptr, *muon_next = nullptr;  // (elements of the largest matrix): X before and after a step of the
                                                   // iteration
  floatX *muon_gram = nullptr, *muon_gram_squared = nullptr, *muon_polynomial = nullptr;  // (n, n): A, A A, a I + b A +
                                                                                          // c A A
  double* muon_squares = nullptr;  // (matrices): the square of each one's norm
};

// A model's shape: what it computes, and what its activations have room for.
struct ModelShape {
  ModelConfig config;
  AttentionPlan attention_plan;
  int B = 0, T = 0;
  Recompute recompute = Recompute::nothing;
  KVCache cache;                             // of generation
  int64_t logit_rows = 0, logit_stride = 0;  // of the chunk in which logits are computed
  std::vector<MuonMatrix> matrices;          // that Muon updates; none: AdamW updates all parameters
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

// Whether layer l's q, k and v are one tensor, which is kept: other layers' attention may need q.
inline bool keeps_qkv(const ModelShape& model, int l) {
  return model.recompute < Recompute::block || !model.attention_plan.shared[Part::q][l].empty();
}

inline bool generates(const ModelShape& model) { return model.cache.slots > 0; }

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

// The most K/V heads that a query head attends to in one softmax.
inline int64_t most_kv_per_head(const AttentionPlan& plan) {
  size_t most = 0;
  for (int l = 0; l < plan.num_layers; l++)
    for (int i = 0; i < plan.num_heads; i++) most = std::max(most, plan.table.sources(l, i).size());
  return int64_t(most);
}

// The one list of activations: calls declare(group of the memory plan, name, pointer to set, shape) for each. gpt2_plan
// walks it to lay them out, gpt2_allocate to set the pointers.
template <class Declare>
void for_each_activation(const ModelShape& model, Activations& a, Declare declare) {
  const ModelConfig& c = model.config;
  const int64_t B = model.B, T = model.T, C = c.channels, h = c.num_heads, hs = c.head_size();
  constexpr MemoryGroup activations = MemoryGroup::activations, backward = MemoryGroup::backward;
  constexpr Recompute kept = Recompute::above_all_levels;
  const AttentionPlan& plan = model.attention_plan;
  const bool mixes_maps = plan.table.mix != WiringTable::Mix::none;
  int64_t largest_qkv = 0;
  std::map<std::string, int> first_layer;  // that declared a tensor, by name
  a.layers.resize(c.num_layers);
  a.accumulators.resize(plan.num_accumulators);

  declare(activations, "tokens", a.tokens, {B, T});
  declare(activations, "targets", a.targets, {B, T});
  for (int*& buffer : a.staged_tokens) declare(activations, "staged_tokens", buffer, {B, T});
  for (int*& buffer : a.staged_targets) declare(activations, "staged_targets", buffer, {B, T});
  declare(activations, "embedded", a.embedded, {B, T, C});
  for (int l = 0; l < c.num_layers; l++) {
    LayerActs& layer = a.layers[l];
    const int64_t QKV = qkv_rows(c, plan, l);
    largest_qkv = std::max(largest_qkv, QKV);
    // A tensor that is not kept from a level of recomputation on: all layers then use that of the first layer that has
    // one.
    auto declare_layer = [&](Recompute dropped_from, const char* name, auto LayerActs::*tensor,
                             std::vector<int64_t> shape) {
      const auto [first, is_first] = first_layer.insert({name, l});
      if (!is_first && model.recompute >= dropped_from) layer.*tensor = a.layers[first->second].*tensor;
      else declare(activations, name, layer.*tensor, std::move(shape));
    };
    const int64_t q = int64_t(plan.projected[Part::q][l].size()) * hs;
    const bool q_is_shared = !plan.shared[Part::q][l].empty();
    // What the backward pass of attention needs of the forward pass. With several attention maps it runs that again,
    // one by one.
    const Recompute attention_dropped_from = mixes_maps ? Recompute::nothing : Recompute::block;
    declare_layer(Recompute::layernorm, "ln1", &LayerActs::ln1, {B, T, C});
    declare_layer(kept, "ln1_mean", &LayerActs::ln1_mean, {B, T});
    declare_layer(kept, "ln1_rstd", &LayerActs::ln1_rstd, {B, T});
    if (generates(model)) {
      if (q_is_shared) declare_layer(kept, "qkv of shared q", &LayerActs::qkv, {B, T, QKV});
      else declare_layer(Recompute::block, "qkv", &LayerActs::qkv, {B, T, full_qkv_size(c, plan)});
      declare(MemoryGroup::kv_cache, "kv", layer.kv, {model.cache.slots, model.cache.capacity(l), QKV - q});
    } else if (keeps_qkv(model, l)) {
      declare_layer(kept, "qkv", &LayerActs::qkv, {B, T, QKV});
    } else {
      if (q > 0) declare_layer(Recompute::block, "q", &LayerActs::q, {B, T, q});
      declare_layer(kept, "kv", &LayerActs::kv, {B, T, QKV - q});
    }
    declare_layer(Recompute::block, "att", &LayerActs::att, {B, T, C});
    declare_layer(attention_dropped_from, "lse", &LayerActs::lse, {B, h, T});
    if (plan.table.topk > 0) {
      declare_layer(attention_dropped_from, "topk_score", &LayerActs::topk_score, {B, h, T});
      declare_layer(attention_dropped_from, "topk_last", &LayerActs::topk_last, {B, h, T});
    }
    declare_layer(Recompute::block, "residual2", &LayerActs::residual2, {B, T, C});
    declare_layer(Recompute::layernorm, "ln2", &LayerActs::ln2, {B, T, C});
    declare_layer(kept, "ln2_mean", &LayerActs::ln2_mean, {B, T});
    declare_layer(kept, "ln2_rstd", &LayerActs::ln2_rstd, {B, T});
    declare_layer(Recompute::block, "fch", &LayerActs::fch, {B, T, 4 * C});
    declare_layer(Recompute::gelu, "fch_gelu", &LayerActs::fch_gelu, {B, T, 4 * C});
    declare_layer(kept, "residual3", &LayerActs::residual3, {B, T, C});
  }
  declare(activations, "lnf", a.lnf, {B, T, C});
  declare(activations, "lnf_mean", a.lnf_mean, {B, T});
  declare(activations, "lnf_rstd", a.lnf_rstd, {B, T});
  declare(activations, "losses", a.losses, {B, T});
  declare(activations, "stats", a.stats, {1});
  declare(activations, "sublayer", a.sublayer, {B, T, C});
  if (mixes_maps) declare(activations, "map_sum", a.map_sum, {B, T, C});
  if (plan.table.mix == WiringTable::Mix::gate) declare(activations, "map_gates", a.map_gates, {c.num_layers, B, T});
  declare(MemoryGroup::logits, "logits", a.logits, {model.logit_rows, model.logit_stride});
  if (generates(model)) {
    const int64_t partials = attention_partials(B, h, hs, model.cache.max_length, most_kv_per_head(plan));
    if (partials > 0) declare(activations, "attention_partials", a.attention_partials, {partials});
    return;
  }

  declare(backward, "dresidual", a.dresidual, {B, T, C});
  declare(backward, "dsublayer", a.dsublayer, {B, T, C});
  declare(backward, "dfch", a.dfch, {B, T, 4 * C});
  declare(backward, "dqkv", a.dqkv, {B, T, largest_qkv});
  declare(backward, "delta", a.delta, {B, h, T});
  declare(backward, "layernorm_scratch", a.layernorm_scratch, {layernorm_backward_scratch(B * T, C)});
  const int64_t attention_scratch = attention_backward_scratch(B, T, hs, most_partial_sums(plan));
  if (attention_scratch > 0) declare(backward, "attention_scratch", a.attention_scratch, {attention_scratch});
  for (floatX*& accumulator : a.accumulators)
    declare(MemoryGroup::dkv_accumulators, "accumulator", accumulator, {B, T, plan.accumulator_heads * hs});
  if (plan.table.mix == WiringTable::Mix::gate) {
    declare(backward, "dmap_gates", a.dmap_gates, {c.num_layers, B, T});
    if (has_master_weights) declare(backward, "exact_map_out", a.exact_map_out, {B, T, C});
  }
  if (mixes_maps) declare(backward, "dmap_weights", a.dmap_weights, {c.num_layers, B, T});
  if (model.matrices.empty()) return;
  int64_t count = 0, n = 0;
  for (const MuonMatrix& matrix : model.matrices)
    count = std::max(count, matrix.count()), n = std::max(n, matrix.shorter());
  declare(backward, "muon_x", a.muon_x, {count});
  declare(backward, "muon_next", a.muon_next, {count});
  declare(backward, "muon_gram", a.muon_gram, {n, n});
  declare(backward, "muon_gram_squared", a.muon_gram_squared, {n, n});
  declare(backward, "muon_polynomial", a.muon_polynomial, {n, n});
  declare(backward, "muon_squares", a.muon_squares, {int64_t(model.matrices.size())});
}

// The activations of GPT-2: which there are, their shapes, what they are for, and which of them each level of recomputation keeps.
//
// B: sequences in a micro-batch, T: their length, C: channels, L: layers, h: heads, hs: head size, QKV: q, k and v of one token in one
// layer, C + 2 * hs * (heads whose k and v the layer projects).
#pragma once
#include <algorithm>                 // std::max
#include <array>                     // std::array
#include <vector>                    // std::vector
#include "config.h"                  // ModelConfig
#include "kv_plan.h"                 // KVPlan
#include "llmc/operations.h"         // num_staging_buffers, layernorm_backward_scratch
#include "llmc/precision.h"          // floatX
#include "llmc/utils/memory_plan.h"  // MemoryGroup
#include "parameters.h"              // qkv_rows

// What the backward pass computes again instead of keeping it (-r). Each level includes those before it.
enum class Recompute {
  nothing,
  gelu,
  layernorm,
  block,           // everything in a block but its K/V and the residual stream
  above_all_levels
};

// What layer l's forward pass leaves for its backward pass, and for the layers that attend to its k and v.
struct LayerActs {
  floatX* ln1 = nullptr;                           // (B, T, C)
  float *ln1_mean = nullptr, *ln1_rstd = nullptr;  // (B, T)
  floatX* qkv = nullptr;                           // (B, T, QKV): q | k | v of the projected heads; null with Recompute::block, where
  floatX *q = nullptr, *kv = nullptr;              //   q (B, T, C) and kv (B, T, QKV - C) are tensors of their own
  floatX* att = nullptr;                           // (B, T, C)
  float* lse = nullptr;                            // (B, h, T)
  floatX* residual2 = nullptr;                     // (B, T, C): after attention
  floatX* ln2 = nullptr;                           // (B, T, C)
  float *ln2_mean = nullptr, *ln2_rstd = nullptr;  // (B, T)
  floatX* fch = nullptr;                           // (B, T, 4C)
  floatX* fch_gelu = nullptr;                      // (B, T, 4C)
  floatX* residual3 = nullptr;                     // (B, T, C): after the MLP
};

struct Activations {
  int *tokens, *targets;                   // (B, T)
  std::array<int*, num_staging_buffers> staged_tokens, staged_targets;  // each (B, T): uploaded while others are computed on
  floatX* embedded;                        // (B, T, C)
  std::vector<LayerActs> layers;           // (L)
  floatX* lnf;                             // (B, T, C)
  float *lnf_mean, *lnf_rstd;              // (B, T)
  float* losses;                           // (B, T)
  StepStats* stats;                        // (1)
  floatX* sublayer;                        // (B, T, C): the output of attention or the MLP, before it is added to the residual stream
  floatX* logits;                          // (logit_rows, logit_stride): a chunk of rows at a time
  // backward only
  floatX* dresidual;                       // (B, T, C): gradient of the residual stream
  floatX* dsublayer;                       // (B, T, C)
  floatX* dfch;                            // (B, T, 4C)
  floatX* dqkv;                            // (B, T, the largest QKV)
  float* delta;                            // (B, h, T): attention's rowsum(dout * out)
  float* layernorm_scratch;                // (layernorm_backward_scratch(B T, C))
  std::vector<floatX*> dkv_accumulators;   // (num_accumulators), each (B, T, 2 * accumulator_heads * hs): dK | dV of shared K/V heads
};

// A model's shape: what it computes, and what its activations have room for.
struct ModelShape {
  ModelConfig config;
  KVPlan kv_plan;
  int B = 0, T = 0;
  Recompute recompute = Recompute::nothing;
  int64_t logit_rows = 0, logit_stride = 0;  // of the chunk in which logits are computed
};

// The one list of activations: calls declare(group of the memory plan, name, pointer to set, shape) for each. gpt2_plan walks it to
// lay them out, gpt2_allocate to set the pointers.
template <class Declare>
void for_each_activation(const ModelShape& model, Activations& a, Declare declare) {
  const ModelConfig& c = model.config;
  const int64_t B = model.B, T = model.T, C = c.channels, h = c.num_heads, hs = c.head_size();
  constexpr MemoryGroup activations = MemoryGroup::activations, backward = MemoryGroup::backward;
  constexpr Recompute kept = Recompute::above_all_levels;
  const bool qkv_is_kept = model.recompute < Recompute::block;
  int64_t largest_qkv = 0;
  a.layers.resize(c.num_layers);
  a.dkv_accumulators.resize(model.kv_plan.num_accumulators);

  declare(activations, "tokens", a.tokens, {B, T});
  declare(activations, "targets", a.targets, {B, T});
  for (int*& buffer : a.staged_tokens) declare(activations, "staged_tokens", buffer, {B, T});
  for (int*& buffer : a.staged_targets) declare(activations, "staged_targets", buffer, {B, T});
  declare(activations, "embedded", a.embedded, {B, T, C});
  for (int l = 0; l < c.num_layers; l++) {
    LayerActs& layer = a.layers[l];
    const int64_t QKV = qkv_rows(c, model.kv_plan, l);
    largest_qkv = std::max(largest_qkv, QKV);
    // A tensor that is not kept from a level of recomputation on: all layers then use layer 0's.
    auto declare_layer = [&](Recompute dropped_from, const char* name, auto LayerActs::*tensor, std::vector<int64_t> shape) {
      if (l > 0 && model.recompute >= dropped_from) layer.*tensor = a.layers[0].*tensor;
      else declare(activations, name, layer.*tensor, std::move(shape));
    };
    declare_layer(Recompute::layernorm, "ln1", &LayerActs::ln1, {B, T, C});
    declare_layer(kept, "ln1_mean", &LayerActs::ln1_mean, {B, T});
    declare_layer(kept, "ln1_rstd", &LayerActs::ln1_rstd, {B, T});
    if (qkv_is_kept) declare_layer(kept, "qkv", &LayerActs::qkv, {B, T, QKV});
    else declare_layer(Recompute::block, "q", &LayerActs::q, {B, T, C}), declare_layer(kept, "kv", &LayerActs::kv, {B, T, QKV - C});
    declare_layer(Recompute::block, "att", &LayerActs::att, {B, T, C});
    declare_layer(Recompute::block, "lse", &LayerActs::lse, {B, h, T});
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
  declare(backward, "dresidual", a.dresidual, {B, T, C});
  declare(backward, "dsublayer", a.dsublayer, {B, T, C});
  declare(backward, "dfch", a.dfch, {B, T, 4 * C});
  declare(backward, "dqkv", a.dqkv, {B, T, largest_qkv});
  declare(backward, "delta", a.delta, {B, h, T});
  declare(backward, "layernorm_scratch", a.layernorm_scratch, {layernorm_backward_scratch(B * T, C)});
  for (floatX*& accumulator : a.dkv_accumulators)
    declare(MemoryGroup::dkv_accumulators, "dkv_accumulator", accumulator, {B, T, 2 * model.kv_plan.accumulator_heads * hs});
  declare(MemoryGroup::logits, "logits", a.logits, {model.logit_rows, model.logit_stride});
}

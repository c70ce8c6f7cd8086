// A model's shape: what it computes, and what its activations have room for. Training and generation are two plans of
// the same model: what only one of them has is in a struct of its own.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>
#include "attention_plan.h"
#include "llmc/wiring/config.h"
#include "kv_cache.h"
#include "llmc/ops/muon.h"

// What the backward pass computes again instead of keeping it (-r). Each level includes those before it. With the
// highest ones three to four times as many sequences fit (dev/bench/results/memory.md). Chunks change last bits, of the
// gradients of MLPs' weights: these are sums over rows, which are added up chunk by chunk.
enum class Recompute {
  nothing,
  activation,
  norm,
  block,   // everything in a layer but its K/V and the residual stream that enters it
  chunks,  // MLPs compute the hidden units of some rows at a time, in the forward pass too, and keep none
  above_all_levels
};

// The level of a model for which `wanted` is asked. Reversible layers keep less than any level, and compute everything
// in a block again.
inline Recompute recompute_level(const AttentionPlan& plan, Recompute wanted) {
  return plan.table.reversible ? std::max(wanted, Recompute::block) : wanted;
}

struct TrainingShape {
  int B = 0, T = 0;  // sequences in a micro-batch, and their length
  Recompute recompute = Recompute::nothing;
  std::vector<MuonMatrix> matrices = {};  // that Muon updates; none: AdamW updates all parameters
  std::vector<MuonBatch> batches = {};    // of them
  double dropout = 0;                     // the share of elements that training passes drop
};

// The rows of N whose hidden units an MLP computes at a time, of `chunks`: an eighth, in whole tiles of 64.
inline int64_t rows_of_chunk(int64_t N) { return (N + 511) / 512 * 64; }

struct ModelShape {
  ModelConfig config;
  AttentionPlan attention_plan;
  int64_t rows = 0;                          // N: the most tokens that are computed at a time; B T in training
  int64_t logit_rows = 0, logit_stride = 0;  // of the chunk in which logits are computed
  // One of the two.
  std::optional<TrainingShape> training;
  std::optional<KVCachePlan> generation;

  // Channels of the q, k or v that layer l projects, and of k and v together.
  int64_t width(Qkv which, int l) const {
    return int64_t(attention_plan.projected[which][l].size()) * config.head_size();
  }
  int64_t kv_width(int l) const { return width(Qkv::k, l) + width(Qkv::v, l); }
  // The rows of k and v in training: the memory's rows come before the tokens'.
  int64_t key_rows() const { return rows + int64_t(training->B) * attention_plan.table.memory; }
  // The level of recomputation from which on a tensor that no level drops is not kept: reversible layers keep none.
  Recompute dropped_from() const {
    return attention_plan.table.reversible ? Recompute::nothing : Recompute::above_all_levels;
  }
  // How many rows an MLP has hidden units of at a time.
  int64_t hidden_rows() const {
    const bool in_chunks = training && training->recompute >= Recompute::chunks;
    return in_chunks ? std::min(rows, rows_of_chunk(rows)) : rows;
  }
};

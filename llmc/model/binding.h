// What the parts of the model are made from (parts/): operations, lists of activations and parameters, a batch; and
// what a branch gets to set its pointers and sizes.
#pragma once
#include <vector>
#include "activation_list.h"
#include "activations.h"
#include "attention_plan.h"
#include "batch.h"
#include "llmc/operations.h"
#include "llmc/ops/precision.h"
#include "parameters.h"
#include "shape.h"

// What the forward pass of a layer's attention keeps for the backward pass, and for the layers that attend to its k and
// v. N: rows, h: heads, QKV: the width of the layer's projected q, k and v for one token.
struct AttentionActs {
  floatX* qkv = nullptr;  // (N, QKV): q | k | v of the projected heads. Null where k and v are kept but q is not:
  floatX *q = nullptr, *kv = nullptr;  //   then q (N, C) and kv (N, QKV - C) are tensors of their own
  floatX* kv_cache = nullptr;          // (slots, capacity, QKV - C): in generation
  floatX* values = nullptr;      // (N, their width): of `depth`, and of `vres` in training, the mixed values; else null
  floatX* dprojected = nullptr;  // (N, QKV - C): of `depth`, what layers above have given to the gradients of k | v
  // (N, QKV - C): of `router`, from layer 1 on, the sums k | v that attention uses, and their gradient; else null
  floatX *routed = nullptr, *drouted = nullptr;
  floatX* att = nullptr;  // (N, C): the heads' outputs
  // Of `qknorm`, in training: (N, projected heads of q, or of q and k that are one tensor), (rows of k, those of k).
  float *q_rstd = nullptr, *k_rstd = nullptr;
  float* lse = nullptr;         // (B, h, T)
  float* topk_score = nullptr;  // (B, h, T): of topk
  int* topk_last = nullptr;     // (B, h, T)
};

// The model's shape and shared activations, and what the attention of each layer leaves, by its number as layers run.
struct Binding {
  const ModelShape& shape;
  const Activations& acts;
  const KVCache* cache;  // of generation
  const Params<floatX>& params;
  std::vector<const AttentionActs*> attention_acts;

  const AttentionPlan& plan() const { return shape.attention_plan; }
  int64_t head_size() const { return shape.config.head_size(); }
  int64_t q_width(int l) const { return int64_t(plan().projected[Part::q][l].size()) * head_size(); }
  int64_t v_width(int l) const { return int64_t(plan().projected[Part::v][l].size()) * head_size(); }
  int64_t QKV(int l) const { return qkv_rows(shape.config, plan(), l); }
};

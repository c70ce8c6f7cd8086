// The plan of each layer: everything that follows from the wiring and the level of recomputation, as pointers and
// sizes, computed once. The forward and the backward pass look nothing else up.
#pragma once
#include <utility>                // std::move
#include <vector>                 // std::vector
#include "activations.h"          // ModelShape, Activations, LayerActs
#include "attention_plan.h"       // AttentionPlan, PlannedAttention, KVUse
#include "llmc/attention_args.h"  // AttentionArgs, KVHead, KVHeads
#include "llmc/map_weights.h"     // MapWeights
#include "llmc/precision.h"       // floatX
#include "parameters.h"           // Params, LayerParams, qkv_rows

// A matmul from ln1 to q, k and v, or to a part of them: out (B, T, OC) = ln1 weight^T + bias.
struct Projection {
  const floatX *weight, *bias;  // (OC, C), (OC)
  floatX* out;
  int64_t OC;
  bool is_kept;  // the backward pass finds out as the forward pass left it
};

// In generation: k and v of the new tokens, which lie beside their q in rows `src_stride` apart, and where they are
// kept.
struct StoreKV {
  const floatX* src = nullptr;  // (B T, width)
  floatX* cache = nullptr;      // (slots, capacity, width)
  int64_t src_stride = 0, capacity = 0;
  int64_t width = 0;  // 0: the layer projects no k and v, or the plan is for training

  floatX* row(int slot, int64_t i) const { return cache + (slot * capacity + i) * width; }
};

// A LayerNorm of the graph: its weights, and what its forward pass leaves.
struct Norm {
  const floatX *weight, *bias;  // (C)
  floatX* out;                  // (B, T, C)
  float *mean, *rstd;           // (B, T)
};

// A copy in the backward pass: dst (B T, width) = src (B T, width), or zeros if src is null.
struct RowCopy {
  floatX* dst;
  int64_t dst_stride;
  const floatX* src;
  int64_t src_stride, width;
};

// One softmax for each query head of a layer.
struct LayerAttention {
  int map_layer;               // whose q and masks: its own, or one below
  KVHeads<floatX> kv_heads;    // that the layer's query heads attend to, wherever they were projected
  AttentionArgs<floatX> args;  // of B sequences of T tokens
};

// What layer l needs beside its parameters and activations. Everything that follows from the wiring and the level of
// recomputation is here, as pointers and sizes; the passes below look nothing else up.
struct LayerPlan {
  int64_t QKV = 0;
  const floatX* residual = nullptr;     // (B, T, C): the residual stream that enters the layer
  std::vector<Projection> projections;  // of q, and of k and v of the projected heads
  StoreKV store_kv;
  // One, or one for each attention map whose output is summed; in generation for each slot of the cache.
  std::vector<std::vector<LayerAttention>> attentions_of_slot;
  bool mixes_maps = false;                  // their outputs are summed with weights:
  MapWeights map_weights;                   //   which
  floatX *map_out, *dmap_out;               //   (B, T, C): the output of one of them, and its gradient, while it runs
  float *gate = nullptr, *dgate = nullptr;  // (B, T): of the map of the layer below and the layer's own, where they are
                                            // learned
  std::vector<RowCopy> load_dqkv;  // the part of dqkv that other layers' attention has computed, or that is zero
};

// Where a projected head lies: `x` is its first element, of the sequence in the slot if it is k or v of the cache.
struct HeadPlace {
  floatX* x;
  int64_t stride;
};
inline HeadPlace head_place(const ModelShape& model, const Activations& acts, Part part, const ProjectedHead& h,
                            int slot) {
  const LayerActs& a = acts.layers[h.layer];
  const int64_t hs = model.config.head_size(), QKV = qkv_rows(model.config, model.attention_plan, h.layer);
  const int64_t q = int64_t(model.attention_plan.projected[Part::q][h.layer].size()) * hs;
  const int64_t column = model.attention_plan.projected_index(part, h) * hs;
  if (a.qkv != nullptr && (a.kv == nullptr || part == Part::q)) return {a.qkv + column, QKV};
  if (part == Part::q) return {a.q + column, q};
  const int64_t first_row = generates(model) ? slot * model.cache.capacity(h.layer) : 0;
  return {a.kv + first_row * (QKV - q) + column - q, QKV - q};
}

// Where layer l's attention writes the gradient of a head: in l's own dqkv if it projected the head, else in the
// accumulator of the layer that did.
inline HeadPlace gradient_place(const ModelShape& model, const Activations& acts, int l, Part part,
                                const ProjectedHead& h) {
  const AttentionPlan& plan = model.attention_plan;
  const int64_t hs = model.config.head_size();
  if (generates(model)) return {nullptr, 0};
  if (h.layer == l) return {acts.dqkv + plan.projected_index(part, h) * hs, qkv_rows(model.config, plan, l)};
  return {acts.accumulators[plan.accumulator[h.layer]] + plan.shared_index(part, h) * hs, plan.accumulator_heads * hs};
}

// How layer l's attention finds each K/V head that it uses.
inline KVHeads<floatX> plan_kv_heads(const ModelShape& model, const Activations& acts, int l,
                                     const PlannedAttention& attention, int slot) {
  const AttentionPlan& plan = model.attention_plan;
  std::vector<KVHead<floatX>> kv_heads;
  std::vector<int> query_heads;
  for (const KVUse& use : attention.uses) {
    const HeadPlace k = head_place(model, acts, Part::k, use.k, slot),
                    v = head_place(model, acts, Part::v, use.v, slot);
    const HeadPlace dk = gradient_place(model, acts, l, Part::k, use.k),
                    dv = gradient_place(model, acts, l, Part::v, use.v);
    kv_heads.push_back({k.x, v.x, k.stride, v.stride, dk.x, dv.x, dk.stride, dv.stride, use.dk_accumulate,
                        use.dv_accumulate, int(query_heads.size()), int(use.query_heads.size())});
    query_heads.insert(query_heads.end(), use.query_heads.begin(), use.query_heads.end());
  }
  const auto first_mask = plan.table.masks.begin() + attention.map_layer * plan.num_heads;
  std::vector<AttentionMask> masks(first_mask, first_mask + plan.num_heads);
  if (std::all_of(masks.begin(), masks.end(), [](const AttentionMask& m) { return m.is_causal(); })) masks.clear();
  return KVHeads<floatX>(std::move(kv_heads), std::move(query_heads), masks);
}

// Where the output of one of several attention maps and its gradient lie, while it runs: in tensors that are free then.
inline floatX* map_out(const Activations& acts) { return acts.sublayer; }
inline floatX* dmap_out(const Activations& acts) { return acts.dfch; }

inline LayerAttention plan_attention(const ModelShape& model, const Activations& acts, int l,
                                     const PlannedAttention& planned, int slot) {
  const LayerActs& a = acts.layers[l];
  const ProjectedHead first_q = {planned.map_layer, 0};
  const HeadPlace q = head_place(model, acts, Part::q, first_q, slot),
                  dq = gradient_place(model, acts, l, Part::q, first_q);
  const bool mixes_maps = model.attention_plan.table.mix != WiringTable::Mix::none;
  LayerAttention attention;
  attention.map_layer = planned.map_layer;
  attention.kv_heads = plan_kv_heads(model, acts, l, planned, slot);
  AttentionArgs<floatX>& args = attention.args;
  args.HS = model.config.head_size();
  attention.kv_heads.set_args(args);
  args.q = q.x, args.q_stride = q.stride;
  args.topk = model.attention_plan.table.topk, args.topk_score = a.topk_score, args.topk_last = a.topk_last;
  args.partials = acts.attention_partials;
  args.out = mixes_maps ? map_out(acts) : a.att, args.lse = a.lse;
  args.dout = mixes_maps ? dmap_out(acts) : acts.dsublayer, args.delta = acts.delta,
  args.scratch = acts.attention_scratch;
  args.dq = dq.x, args.dq_stride = dq.stride, args.dq_accumulate = planned.dq_accumulate;
  return attention;
}

// What dqkv holds of layer l's heads before its own attention adds to it: of shared heads what an accumulator has
// summed, of unused ones zeros. Heads that are neighbours in both are one copy.
inline std::vector<RowCopy> plan_load_dqkv(const ModelShape& model, const Activations& acts, int l) {
  const AttentionPlan& plan = model.attention_plan;
  const int64_t hs = model.config.head_size(), QKV = qkv_rows(model.config, plan, l),
                accumulator_stride = plan.accumulator_heads * hs;
  std::vector<RowCopy> copies;
  for (Part part : all_parts) {
    auto dst = [&](int head) { return acts.dqkv + plan.projected_index(part, {l, head}) * hs; };
    for (int head : plan.shared[part][l]) {
      const floatX* src = acts.accumulators[plan.accumulator[l]] + plan.shared_index(part, {l, head}) * hs;
      const bool continues = !copies.empty() && dst(head) == copies.back().dst + copies.back().width &&
                             src == copies.back().src + copies.back().width;
      if (continues) copies.back().width += hs;
      else copies.push_back({dst(head), QKV, src, accumulator_stride, hs});
    }
  }
  for (Part part : all_parts)
    for (int head : plan.unused(part, l))
      copies.push_back({acts.dqkv + plan.projected_index(part, {l, head}) * hs, QKV, nullptr, 0, hs});
  return copies;
}

inline LayerPlan plan_layer(const ModelShape& model, const LayerParams<floatX>& w, const Activations& acts, int l) {
  const ModelConfig& c = model.config;
  const AttentionPlan& plan = model.attention_plan;
  const LayerActs& a = acts.layers[l];
  const int64_t C = c.channels, q = int64_t(plan.projected[Part::q][l].size()) * c.head_size();
  LayerPlan layer;
  layer.QKV = qkv_rows(c, plan, l);
  layer.residual = l == 0 ? acts.embedded : acts.layers[l - 1].residual3;
  auto project = [&](floatX* out, int64_t first_row, int64_t rows, bool is_kept) {
    if (rows > 0)
      layer.projections.push_back({w.qkvw + first_row * C, c.bias ? w.qkvb + first_row : nullptr, out, rows, is_kept});
  };
  if (a.qkv != nullptr) project(a.qkv, 0, layer.QKV, /*is_kept=*/true);
  else project(a.q, 0, q, /*is_kept=*/false), project(a.kv, q, layer.QKV - q, /*is_kept=*/true);
  if (generates(model) && q < layer.QKV)
    layer.store_kv = {a.qkv + q, a.kv, layer.QKV, model.cache.capacity(l), layer.QKV - q};
  for (int slot = 0; slot < std::max(1, model.cache.slots); slot++) {
    layer.attentions_of_slot.emplace_back();
    for (const PlannedAttention& planned : plan.attentions[l])
      layer.attentions_of_slot[slot].push_back(plan_attention(model, acts, l, planned, slot));
  }
  layer.mixes_maps = plan.table.mix != WiringTable::Mix::none;
  const int64_t rows = int64_t(model.B) * model.T;
  if (has_map_gate(plan, l)) layer.gate = acts.map_gates + l * rows, layer.dgate = acts.dmap_gates + l * rows;
  layer.map_weights = {acts.map_gates, float(plan.table.blend), rows, l};
  layer.map_out = map_out(acts), layer.dmap_out = dmap_out(acts);
  if (!generates(model)) layer.load_dqkv = plan_load_dqkv(model, acts, l);
  return layer;
}

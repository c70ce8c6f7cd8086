// Attention as a branch: q, k and v of the heads that the layer projects, attention of its query heads to K/V heads
// wherever they were projected, and the output projection. Everything that follows from the wiring and the level of
// recomputation is bound here once, as pointers and sizes; the passes look nothing else up.
#pragma once
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>
#include "llmc/model/binding.h"
#include "llmc/model/attention_pairs.h"
#include "llmc/ops/attention_args.h"
#include "depth_values.h"
#include "kv_router.h"
#include "mixed_maps.h"
#include "norm.h"
#include "relative_attention.h"
#include "segment_memory.h"
#include "value_residual.h"

// A matmul from the norm to q, k and v, or to a part of them: out (N, OC) = in weight^T + bias. With `memory` k
// and v have rows for that too.
struct Projection {
  const floatX *in, *weight, *bias;  // (N, C), (OC, C), (OC)
  floatX* out;
  int64_t OC;
  bool is_kept;          // the backward pass finds `out` as the forward pass left it
  bool has_memory_rows;  // N is Batch::key_rows, otherwise Batch::rows
};

// q or k of the projected heads, or both, which `qknorm` norms and rotary positions rotate where they have been
// projected to; or their gradients, on the way back.
struct Rotation {
  RotaryHeads<floatX> heads;  // without `rope` their table is null
  bool is_kept;               // the backward pass finds them so
  bool has_memory_rows;       // as in Projection
  std::optional<HeadNorm> norm = {};
};

// In generation k and v of the new tokens, which lie beside their q, go to their rows of the K/V cache.
struct StoreKV {
  floatX* cache;  // (slots, capacity, width)
  int64_t capacity, width;
  std::vector<RowCopy> copies;  // of the new rows

  floatX* row(int slot, int64_t i) const { return cache + (slot * capacity + i) * width; }
};

// One softmax for each query head of a layer.
struct LayerAttention {
  int map_layer = 0;         // the layer whose q and masks are used: its own, or one below
  KVHeads<floatX> kv_heads;  // where the K/V heads are that its query heads attend to, and the other arguments
};

struct AttentionBranch {
  int layer = 0;  // counted from 0 in the order in which layers run
  AttentionActs acts;
  AttentionParams<floatX> w;
  AttentionParams<float> g;
  int64_t C = 0, QKV = 0;
  const floatX* in = nullptr;           // (N, C)
  std::optional<SegmentMemory> memory;  // in training with `memory`, if the layer projects any k or v
  std::vector<Projection> projections;  // the matmuls to q, and to k and v, of the projected heads
  std::vector<Rotation> rotations;      // rotary positions and norms of q and k; without either none
  std::optional<RelativeAttention> relative;
  std::optional<MixedMaps> mixed_maps;  // of `blend` and `gate`
  std::optional<ValueResidual> value_residual;
  std::optional<KVRouter> router;
  std::optional<DepthValues> depth;
  std::optional<StoreKV> store_kv;     // in generation, if the layer projects any k or v
  const KVCache* cache = nullptr;      // in generation; else null
  const KeyRows* sequences = nullptr;  // (slots): in generation, where the keys of each part's sequence lie
  // attentions_of_slot[slot of the cache] in generation, attentions_of_slot[0] for all sequences in training: one
  // attention, or one for each attention map whose output is summed.
  std::vector<std::vector<LayerAttention>> attentions_of_slot;
  floatX* out = nullptr;             // (N, C)
  Dropout dropout, output_dropout;   // of the probabilities, and of out
  std::vector<RowCopy> load_dqkv;    // the part of dqkv that other layers' attention has computed, or that is zero
  std::vector<Rotation> drotations;  // the part of dqkv that goes back through them
  floatX *din = nullptr, *datt = nullptr, *dqkv = nullptr;  // (N, C), (N, C), (N, QKV)
  // With a segment memory dqkv is (N, C), of q alone, and this (key_rows, QKV - C) of k and v.
  floatX* dkv = nullptr;
};

inline AttentionBranch make_attention(const AttentionPlan& plan, int l, bool is_generation) {
  AttentionBranch b;
  b.layer = l;
  const bool projects_kv = !plan.projected[Part::k][l].empty() || !plan.projected[Part::v][l].empty();
  if (plan.table.memory > 0 && projects_kv && !is_generation) b.memory.emplace();
  if (plan.table.relative) b.relative.emplace();
  if (plan.table.mix != WiringTable::Mix::none) b.mixed_maps.emplace();
  if (!plan.first_values(l).empty()) b.value_residual.emplace();
  if (plan.table.router && projects_kv) b.router.emplace();
  if (plan.table.depth && !plan.projected[Part::v][l].empty()) b.depth.emplace();
  return b;
}

// ----------------------------------------------------------------------------
// Memory

// Whether layer l's q, k and v are one tensor, which is kept: other layers' attention may need q. With `memory` k and v
// have more rows than q.
inline bool keeps_qkv(const TrainingShape& training, const AttentionPlan& plan, int l) {
  return (training.recompute < Recompute::block || !plan.shared[Part::q][l].empty()) && plan.table.memory == 0;
}

// Whether layer l's k and v are kept for the backward pass: always, but for those of reversible layers that no other
// layer's attention uses.
inline bool keeps_kv(const AttentionPlan& plan, int l) {
  return !plan.table.reversible || !plan.shared[Part::k][l].empty() || !plan.shared[Part::v][l].empty();
}

// Each rstd is kept as the q and k that it belongs to are.
inline void declare_head_norms(AttentionBranch& b, ActivationList& list) {
  const ModelShape& shape = list.shape;
  const AttentionPlan& plan = shape.attention_plan;
  const int64_t N = shape.rows, q = int64_t(plan.projected[Part::q][b.layer].size()),
                k = int64_t(plan.projected[Part::k][b.layer].size());
  constexpr Recompute kept = Recompute::above_all_levels;
  if (keeps_qkv(*shape.training, plan, b.layer)) {
    if (q + k > 0) list.of_sublayer(kept, "qk_rstd", b.acts.q_rstd, {N, q + k});
    return;
  }
  if (q > 0) list.of_sublayer(Recompute::block, "q_rstd", b.acts.q_rstd, {N, q});
  if (k == 0) return;
  if (keeps_kv(plan, b.layer)) list.of_sublayer(kept, "k_rstd", b.acts.k_rstd, {key_rows(shape), k});
  else list.of_all_sublayers("k_rstd of one layer", b.acts.k_rstd, {N, plan.table.num_kv_heads});
}

inline void declare(AttentionBranch& b, ActivationList& list) {
  const ModelShape& shape = list.shape;
  const AttentionPlan& plan = shape.attention_plan;
  AttentionActs& acts = b.acts;
  const int64_t N = shape.rows, C = shape.config.channels, h = shape.config.num_heads;
  const int64_t QKV = qkv_rows(shape.config, plan, b.layer);
  const int64_t q = int64_t(plan.projected[Part::q][b.layer].size()) * shape.config.head_size();
  // By other layers, of the tokens that are computed.
  const bool qkv_is_used = !plan.shared[Part::q][b.layer].empty() || plan.table.router || plan.table.depth ||
                           (plan.table.value_residual && b.layer == 0);
  constexpr Recompute kept = Recompute::above_all_levels;
  if (shape.generation) {
    if (qkv_is_used) list.add(MemoryGroup::activations, "qkv that other layers use", acts.qkv, {N, QKV});
    else list.of_sublayer(Recompute::block, "qkv", acts.qkv, {N, full_qkv_size(shape.config, plan)});
    list.add(MemoryGroup::kv_cache, "kv", acts.kv_cache,
             {shape.generation->slots, shape.generation->capacity(b.layer), QKV - q});
  } else if (keeps_qkv(*shape.training, plan, b.layer)) {
    list.of_sublayer(kept, "qkv", acts.qkv, {N, QKV});
  } else {
    if (q > 0) list.of_sublayer(Recompute::block, "q", acts.q, {N, q});
    if (keeps_kv(plan, b.layer)) list.of_sublayer(kept, "kv", acts.kv, {key_rows(shape), QKV - q});
    else list.of_all_sublayers("kv of one layer", acts.kv, {N, full_qkv_size(shape.config, plan) - C});
  }
  if (b.router && b.layer > 0) {
    const bool is_kept = shape.training && keeps_routed(*shape.training, plan, b.layer);
    if (is_kept) list.of_sublayer(kept, "routed K/V", acts.routed, {N, QKV - q});
    else list.of_all_sublayers("routed K/V of one layer", acts.routed, {N, full_qkv_size(shape.config, plan) - C});
    if (shape.training) list.add(MemoryGroup::dkv_accumulators, "drouted", acts.drouted, {N, QKV - q});
  }
  if ((b.value_residual && shape.training) || (b.depth && b.layer > 0)) {
    const int64_t hs = shape.config.head_size(), width = int64_t(plan.projected[Part::v][b.layer].size()) * hs;
    if (shape.training && keeps_values(*shape.training, plan, b.layer))
      list.of_sublayer(kept, "values", acts.values, {N, width});
    else list.of_all_sublayers("values of one layer", acts.values, {N, plan.table.num_kv_heads * hs});
  }
  if (b.depth && shape.training && b.layer + 1 < plan.num_layers && !plan.projected[Part::v][b.layer + 1].empty())
    list.add(MemoryGroup::dkv_accumulators, "dprojected", acts.dprojected, {N, QKV - q});
  if (plan.table.qknorm && shape.training) declare_head_norms(b, list);
  if (b.memory) declare(*b.memory, list);
  if (b.relative) declare(*b.relative, list);
  // With several attention maps the backward pass runs each attention again, and needs nothing of it to be kept.
  const Recompute attention_dropped_from = b.mixed_maps ? Recompute::nothing : Recompute::block;
  list.of_sublayer(Recompute::block, "att", acts.att, {N, C});
  list.of_sublayer(attention_dropped_from, "lse", acts.lse, {N, h});
  if (plan.table.topk > 0) {
    list.of_sublayer(attention_dropped_from, "topk_score", acts.topk_score, {N, h});
    list.of_sublayer(attention_dropped_from, "topk_last", acts.topk_last, {N, h});
  }
}

// ----------------------------------------------------------------------------
// Pointers

// Where a head of q, k or v, or its gradient, is: `x` points to its first element, rows are `stride` apart.
struct HeadPlace {
  floatX* x;
  int64_t stride;
};
// Where a head is in the tensor q | k | v of its layer (rows, QKV), or if that is null in those of q and of k | v.
inline HeadPlace place_in(const Binding& binding, Part part, const ProjectedHead& h, floatX* qkv, floatX* q,
                          floatX* kv) {
  const int64_t column = binding.plan().projected_index(part, h) * binding.head_size();
  const int64_t QKV = binding.QKV(h.layer), q_width = binding.q_width(h.layer);
  if (qkv != nullptr) return {qkv + column, QKV};
  return part == Part::q ? HeadPlace{q + column, q_width} : HeadPlace{kv + column - q_width, QKV - q_width};
}
// Where a head of k or v is in a tensor k | v of its layer.
inline HeadPlace kv_place(const Binding& binding, Part part, const ProjectedHead& h, floatX* kv) {
  return place_in(binding, part, h, nullptr, nullptr, kv);
}
// Where a head's layer has projected it to; in generation that of the new tokens.
inline HeadPlace projected_place(const Binding& binding, Part part, const ProjectedHead& h) {
  const AttentionActs& acts = *binding.attention_acts[h.layer];
  return place_in(binding, part, h, acts.qkv, acts.q, acts.kv);
}
// A head of mixed values.
inline HeadPlace values_place(const Binding& binding, const ProjectedHead& h) {
  const int64_t width = binding.v_width(h.layer), QKV = binding.QKV(h.layer);
  const int64_t column = binding.plan().projected_index(Part::v, h) * binding.head_size();
  return {binding.attention_acts[h.layer]->values + column - (QKV - width), width};
}
// Where attention finds a head. For k and v in the cache that is the first row of the sequence in `slot`.
inline HeadPlace head_place(const Binding& binding, Part part, const ProjectedHead& h, int slot) {
  const AttentionActs& acts = *binding.attention_acts[h.layer];
  const int64_t QKV = binding.QKV(h.layer), q = binding.q_width(h.layer);
  if (acts.kv_cache != nullptr && part != Part::q)
    return kv_place(binding, part, h, acts.kv_cache + slot * binding.shape.generation->capacity(h.layer) * (QKV - q));
  if (acts.routed != nullptr && part != Part::q) return kv_place(binding, part, h, acts.routed);
  if (acts.values != nullptr && part == Part::v) return values_place(binding, h);
  return projected_place(binding, part, h);
}

// The place of the gradient of what a layer projected for a head.
inline HeadPlace projected_gradient_place(const Binding& binding, Part part, const ProjectedHead& h) {
  floatX *const dqkv = binding.acts.dqkv, *const dkv = binding.acts.dkv;
  return place_in(binding, part, h, dkv == nullptr ? dqkv : nullptr, dqkv, dkv);
}
// The place of the gradient of what attention finds of a head that its own layer projected.
inline HeadPlace own_gradient_place(const Binding& binding, Part part, const ProjectedHead& h) {
  floatX* const drouted = binding.attention_acts[h.layer]->drouted;
  return drouted != nullptr && part != Part::q ? kv_place(binding, part, h, drouted)
                                               : projected_gradient_place(binding, part, h);
}

// The place of a shared head's gradient in the accumulator of its layer.
inline HeadPlace accumulator_place(const Binding& binding, Part part, const ProjectedHead& h) {
  const AttentionPlan& plan = binding.plan();
  const int64_t hs = binding.head_size();
  return {binding.acts.accumulators[plan.accumulator[h.layer]] + plan.shared_index(part, h) * hs,
          plan.accumulator_heads * hs};
}

// Where layer l's attention writes the gradient of a head: in the dqkv of layer l if it projected the head, else in the
// accumulator of the layer that projected it.
inline HeadPlace gradient_place(const Binding& binding, int l, Part part, const ProjectedHead& h) {
  if (binding.shape.generation) return {nullptr, 0};
  return h.layer == l ? own_gradient_place(binding, part, h) : accumulator_place(binding, part, h);
}

// How layer l's attention finds each K/V head that it uses.
inline KVHeads<floatX> bind_kv_heads(const Binding& binding, int l, const PlannedAttention& attention, int slot) {
  const AttentionPlan& plan = binding.plan();
  std::vector<KVHead<floatX>> kv_heads;
  std::vector<int> query_heads;
  for (const KVUse& use : attention.uses) {
    const HeadPlace k = head_place(binding, Part::k, use.k, slot), v = head_place(binding, Part::v, use.v, slot);
    const HeadPlace dk = gradient_place(binding, l, Part::k, use.k), dv = gradient_place(binding, l, Part::v, use.v);
    kv_heads.push_back({k.x, v.x, k.stride, v.stride, dk.x, dv.x, dk.stride, dv.stride, use.dk_accumulate,
                        use.dv_accumulate, int(query_heads.size()), int(use.query_heads.size())});
    query_heads.insert(query_heads.end(), use.query_heads.begin(), use.query_heads.end());
  }
  const auto first_mask = plan.table.masks.begin() + attention.map_layer * plan.num_heads;
  std::vector<AttentionMask> masks(first_mask, first_mask + plan.num_heads);
  if (std::all_of(masks.begin(), masks.end(), [](const AttentionMask& m) { return m.is_causal(); })) masks.clear();
  return KVHeads<floatX>(kv_heads, query_heads, masks);
}

// `out` and `dout`: (N, C), what the attention writes and the gradient that it is given.
inline LayerAttention bind_attention_args(const Binding& binding, int l, const PlannedAttention& planned, int slot,
                                          floatX* out, const floatX* dout) {
  const AttentionActs& acts = *binding.attention_acts[l];
  const ProjectedHead first_q = {planned.map_layer, 0};
  const HeadPlace q = head_place(binding, Part::q, first_q, slot), dq = gradient_place(binding, l, Part::q, first_q);
  LayerAttention attention;
  attention.map_layer = planned.map_layer;
  attention.kv_heads = bind_kv_heads(binding, l, planned, slot);
  AttentionArgs<floatX>& args = attention.kv_heads.args;
  args.HS = binding.head_size();
  args.q = q.x, args.q_stride = q.stride;
  args.topk = binding.plan().table.topk, args.topk_score = acts.topk_score, args.topk_last = acts.topk_last;
  args.partials = binding.acts.attention_partials;
  args.out = out, args.lse = acts.lse;
  args.dout = dout, args.delta = binding.acts.delta, args.scratch = binding.acts.attention_scratch;
  args.dq = dq.x, args.dq_stride = dq.stride, args.dq_accumulate = planned.dq_accumulate;
  const int group = binding.shape.generation ? binding.shape.generation->group_of_layer[l] : 0;
  if (binding.plan().table.documents) args.first_keys = binding.acts.first_keys + group * binding.shape.rows;
  args.last_queries = binding.acts.last_queries;
  return attention;
}

// The copies that fill layer l's dqkv before its own attention adds to it: the sum in the accumulator for shared heads,
// zeros for unused ones. Heads that are neighbours in both are one copy.
inline std::vector<RowCopy> bind_load_dqkv(const Binding& binding, int l) {
  const AttentionPlan& plan = binding.plan();
  const int64_t hs = binding.head_size();
  std::vector<RowCopy> copies;
  for (Part part : all_parts)
    for (int head : plan.shared[part][l]) {
      const HeadPlace to = own_gradient_place(binding, part, {l, head}),
                      from = accumulator_place(binding, part, {l, head});
      const bool continues = !copies.empty() && to.x == copies.back().dst + copies.back().width &&
                             from.x == copies.back().src + copies.back().width;
      if (continues) copies.back().width += hs;
      else copies.push_back({to.x, to.stride, from.x, from.stride, hs});
    }
  for (Part part : all_parts)
    for (int head : plan.unused(part, l)) {
      const HeadPlace to = own_gradient_place(binding, part, {l, head});
      copies.push_back({to.x, to.stride, nullptr, 0, hs});
    }
  return copies;
}

// Binds what is done to the layer's projected heads of q and of k, which lie beside them, and the way back of their
// gradients: a norm's needs what it has made of them, which may be two tensors where the gradient is one.
inline void bind_rotations(AttentionBranch& b, const Binding& binding) {
  const bool is_normed = binding.plan().table.qknorm;
  if (binding.plan().table.rope == 0 && !is_normed) return;
  const int hs = int(binding.head_size());
  const int q = int(binding.plan().projected[Part::q][b.layer].size()),
            k = int(binding.plan().projected[Part::k][b.layer].size());
  const int64_t kv_width = b.QKV - q * hs;
  const bool has_memory = b.memory.has_value(), is_one = b.acts.qkv != nullptr, has_dkv = binding.acts.dkv != nullptr;
  auto add = [&](std::vector<Rotation>& rotations, floatX* x, int64_t stride, int heads, bool is_kept,
                 bool has_memory_rows, const HeadNorm& norm) {
    if (heads == 0) return;
    rotations.push_back({{x, stride, heads, hs, binding.acts.rotary_table}, is_kept, has_memory_rows});
    if (is_normed) rotations.back().norm = norm;
  };
  const HeadNorm q_norm = {b.acts.q_rstd, is_one ? b.acts.qkv : b.acts.q, is_one ? b.QKV : q * hs},
                 k_norm = {b.acts.k_rstd, b.acts.kv, kv_width};
  if (is_one) {
    add(b.rotations, b.acts.qkv, b.QKV, q + k, /*is_kept=*/true, false, q_norm);
  } else {
    add(b.rotations, b.acts.q, q * hs, q, /*is_kept=*/false, false, q_norm);
    add(b.rotations, b.acts.kv, kv_width, k, keeps_kv(binding.plan(), b.layer), has_memory, k_norm);
  }
  if (!binding.shape.training) return;
  if (!has_dkv && (is_one || !is_normed)) {
    add(b.drotations, binding.acts.dqkv, b.QKV, q + k, /*is_kept=*/false, false, q_norm);
  } else {
    add(b.drotations, binding.acts.dqkv, has_dkv ? q * hs : b.QKV, q, /*is_kept=*/false, false, q_norm);
    add(b.drotations, has_dkv ? binding.acts.dkv : binding.acts.dqkv + q * hs, has_dkv ? kv_width : b.QKV, k,
        /*is_kept=*/false, has_memory, k_norm);
  }
}

// Binds the value residual of b's layer. In generation its sum takes the place of what was projected.
inline void bind_value_residual(AttentionBranch& b, const Binding& binding) {
  const AttentionPlan& plan = binding.plan();
  ValueResidual& r = *b.value_residual;
  const std::vector<int> heads = plan.first_values(b.layer);
  const int64_t hs = binding.head_size();
  r.weights = b.w.value_mix, r.dweights = b.g.value_mix, r.scratch = binding.acts.value_mix_scratch;
  r.is_kept = binding.shape.training && keeps_values(*binding.shape.training, plan, b.layer);
  for (size_t i = 0; i < heads.size(); i++) {
    const ProjectedHead own = {b.layer, heads[i]}, first_head = {0, heads[i]};
    const HeadPlace v = projected_place(binding, Part::v, own), first = projected_place(binding, Part::v, first_head);
    const HeadPlace out = b.acts.values != nullptr ? head_place(binding, Part::v, own, 0) : v;
    const HeadPlace d = gradient_place(binding, b.layer, Part::v, own),
                    dfirst = gradient_place(binding, b.layer, Part::v, first_head);
    const bool accumulate = plan.first_values_accumulate[b.layer][i] != 0;
    // A layer's heads are neighbours, and so are all heads of layer 0, in its accumulator as well.
    if (i > 0 && heads[i - 1] == heads[i] - 1 && r.mixes.back().accumulate == accumulate) r.mixes.back().width += hs;
    else
      r.mixes.push_back({v.x, first.x, out.x, v.stride, first.stride, out.stride, hs, d.x, dfirst.x, d.stride,
                         dfirst.stride, accumulate});
  }
}

// Binds the router of b's layer. The heads of a layer that projects any of k, or of v, are all there, side by side.
inline void bind_router(AttentionBranch& b, const Binding& binding) {
  const AttentionPlan& plan = binding.plan();
  KVRouter& r = *b.router;
  const int l = b.layer, L = plan.num_layers, kv = plan.table.num_kv_heads;
  r.dweights = b.g.router, r.scratch = binding.acts.router_scratch;
  r.is_kept = binding.shape.training && keeps_routed(*binding.shape.training, plan, l);
  // The weights of layer j's heads in the sums of layer l, (kv, kv).
  auto weights = [&](int l, int j) { return binding.params.layers[size_t(l)].attention.router + j * kv; };
  auto add = [&](std::vector<OwnedHeadMix>& mixes, HeadPlace out, bool accumulate, const floatX* dout,
                 const std::vector<MixedHeads<floatX>>& sources) {
    mixes.push_back({DeviceArray<MixedHeads<floatX>>(sources), {}, dout});
    mixes.back()
        .mix = {out.x, out.stride, binding.head_size(), kv, accumulate, mixes.back().sources.data, int(sources.size())};
  };
  for (Part part : {Part::k, Part::v}) {
    const ProjectedHead own = {l, 0};
    if (plan.projected[part][l].empty()) continue;
    std::vector<MixedHeads<floatX>> below, above;
    for (int j = 0; j <= l; j++) {
      const HeadPlace x = projected_place(binding, part, {j, 0});
      below.push_back({x.x, x.stride, weights(l, j), int64_t(l + 1) * kv, 1});
    }
    if (l > 0)
      add(r.sums, kv_place(binding, part, own, b.acts.routed), /*accumulate=*/false,
          b.acts.drouted != nullptr ? own_gradient_place(binding, part, own).x : nullptr, below);
    if (!binding.shape.training) continue;
    for (int j = std::max(l, 1); j < L && !plan.projected[part][j].empty(); j++) {
      const HeadPlace d = own_gradient_place(binding, part, {j, 0});
      above.push_back({d.x, d.stride, weights(j, l), 1, int64_t(j + 1) * kv});
    }
    // Layer 0's attention uses what it projected, so that its gradient is there.
    add(r.dprojected, projected_gradient_place(binding, part, own), /*accumulate=*/l == 0, nullptr, above);
  }
}

// Binds what mixes the values of b's layer with those of the layers below. A head that the layer projects is there in
// all of them.
inline void bind_depth(AttentionBranch& b, const Binding& binding) {
  const AttentionPlan& plan = binding.plan();
  const bool is_training = binding.shape.training.has_value();
  const std::vector<int>& heads = plan.projected[Part::v][b.layer];
  b.depth->is_kept = is_training && keeps_values(*binding.shape.training, plan, b.layer);
  for (size_t i = 0; i < heads.size(); i++) {
    const ProjectedHead own = {b.layer, heads[i]};
    const bool is_above = is_training && plan.is_mixed_above(b.layer, heads[i]);
    if (i > 0 && heads[i - 1] == heads[i] - 1 && (b.depth->runs.back().args.dk_of_above != nullptr) == is_above) {
      b.depth->runs.back().args.heads++;
      continue;
    }
    std::vector<LayerKV<floatX>> layers;
    for (int j = 0; j <= b.layer; j++) {
      const ProjectedHead head = {j, heads[i]};
      const HeadPlace k = projected_place(binding, Part::k, head), v = projected_place(binding, Part::v, head);
      auto gradient = [&](Part part) {
        if (!is_training) return HeadPlace{nullptr, 0};
        return j == b.layer ? projected_gradient_place(binding, part, head)
                            : kv_place(binding, part, head, binding.attention_acts[j]->dprojected);
      };
      layers.push_back({k.x, v.x, k.stride, gradient(Part::k).x, gradient(Part::v).x, gradient(Part::k).stride});
    }
    b.depth->runs.push_back({DeviceArray<LayerKV<floatX>>(layers), {}});
    DepthAttention<floatX>& args = b.depth->runs.back().args;
    const HeadPlace q = projected_place(binding, Part::q, own);
    args.q = q.x, args.q_stride = q.stride, args.heads = 1, args.HS = int(binding.head_size());
    args.layers = b.depth->runs.back().layers.data, args.num_layers = int(layers.size());
    if (b.layer > 0) args.out = values_place(binding, own).x, args.out_stride = binding.v_width(b.layer);
    if (!is_training) continue;
    const HeadPlace dq = projected_gradient_place(binding, Part::q, own);
    args.dq = dq.x, args.dq_stride = dq.stride;
    if (!is_above) continue;
    const HeadPlace dk = kv_place(binding, Part::k, own, b.acts.dprojected);
    args.dk_of_above = dk.x, args.dv_of_above = kv_place(binding, Part::v, own, b.acts.dprojected).x;
    args.of_above_stride = dk.stride;
  }
}

// Binds how k and v come into the cache, and where attention finds them.
inline void bind_cache(AttentionBranch& b, const Binding& binding) {
  const KVCachePlan& cache = *binding.shape.generation;
  const int64_t q = binding.q_width(b.layer), width = b.QKV - q;
  const int group = cache.group_of_layer[b.layer];
  b.sequences = binding.acts.sequences + group * cache.slots;
  std::vector<RowCopy> copies;
  auto copy = [&](int64_t column, const floatX* x, int64_t stride, int64_t columns) {
    copies.push_back({b.acts.kv_cache + column, width, x, stride, columns, binding.acts.cache_rows + group,
                      int64_t(cache.groups.size())});
  };
  const int64_t mixed = b.acts.values != nullptr ? binding.v_width(b.layer) : 0;
  if (b.acts.routed != nullptr) copy(0, b.acts.routed, width, width);
  else copy(0, b.acts.qkv + q, b.QKV, width - mixed);
  if (mixed > 0) copy(width - mixed, b.acts.values, mixed, mixed);
  if (width > 0) b.store_kv = {b.acts.kv_cache, cache.capacity(b.layer), width, copies};
}

// Sets the branch's pointers and sizes.
inline void bind_branch(AttentionBranch& b, const LayerParams<floatX>& w, const LayerParams<float>& g, const Norm& norm,
                        const Binding& binding) {
  const int64_t C = binding.shape.config.channels, q = binding.q_width(b.layer);
  b.w = w.attention, b.g = g.attention, b.in = norm.out;
  b.C = C, b.QKV = binding.QKV(b.layer), b.cache = binding.cache;
  if (b.memory) bind_memory(*b.memory, norm);
  if (b.mixed_maps) bind_mixed_maps(*b.mixed_maps, b.layer, binding);
  // Where each attention writes, and the gradient of that.
  floatX* out = b.mixed_maps ? b.mixed_maps->map_out : b.acts.att;
  const floatX* dout = b.mixed_maps ? b.mixed_maps->dmap_out : binding.acts.dnorm;
  auto project = [&](floatX* to, int64_t first_row, int64_t rows, bool is_kept, const SegmentMemory* memory = nullptr) {
    const floatX* bias = b.w.qkvb != nullptr ? b.w.qkvb + first_row : nullptr;
    const floatX* in = memory != nullptr ? memory->extended : b.in;
    if (rows > 0) b.projections.push_back({in, b.w.qkvw + first_row * C, bias, to, rows, is_kept, memory != nullptr});
  };
  if (b.acts.qkv != nullptr) {
    project(b.acts.qkv, 0, b.QKV, /*is_kept=*/true);
  } else {
    project(b.acts.q, 0, q, /*is_kept=*/false);
    project(b.acts.kv, q, b.QKV - q, keeps_kv(binding.plan(), b.layer), b.memory ? &*b.memory : nullptr);
  }
  bind_rotations(b, binding);
  if (b.value_residual) bind_value_residual(b, binding);
  if (b.router) bind_router(b, binding);
  if (b.depth) bind_depth(b, binding);
  if (binding.shape.generation) bind_cache(b, binding);
  for (int slot = 0; slot < (binding.shape.generation ? binding.shape.generation->slots : 1); slot++) {
    b.attentions_of_slot.emplace_back();
    for (const PlannedAttention& planned : binding.plan().attentions[b.layer])
      b.attentions_of_slot[slot].push_back(bind_attention_args(binding, b.layer, planned, slot, out, dout));
    if (b.relative)
      bind_relative(*b.relative, w.attention, g.attention, binding.acts, b.attentions_of_slot[slot][0].kv_heads.args);
  }
  b.out = binding.acts.branch_out;
  b.dropout = dropout_of(binding.acts, binding.shape, DropoutSite::probabilities, b.layer);
  b.output_dropout = dropout_of(binding.acts, binding.shape, DropoutSite::attention_output, b.layer);
  if (binding.shape.generation) return;
  b.load_dqkv = bind_load_dqkv(binding, b.layer);
  b.din = b.datt = binding.acts.dnorm;  // datt is no longer needed when din is written
  b.dqkv = binding.acts.dqkv, b.dkv = binding.acts.dkv;
}

// ----------------------------------------------------------------------------
// The passes

// The position of the first key that the cache holds of a part's sequence; 0 in training.
inline int64_t first_key(const AttentionBranch& b, const SequencePart& part) {
  return b.cache == nullptr ? 0 : b.cache->first_position(part.slot, b.layer);
}

// The i-th attention of a part's queries: B sequences, whose first row is `row` of the batch.
inline AttentionArgs<floatX> attention_args(const AttentionBranch& b, size_t i, const SequencePart& part, int64_t B,
                                            int64_t row) {
  AttentionArgs<floatX> args = b.attentions_of_slot[part.slot][i].kv_heads.args;
  args.B = B, args.first_query = part.first - first_key(b, part), args.T = args.first_query + part.count;
  args.q += row * args.q_stride, args.out += row * args.NH * args.HS, args.lse += row * args.NH;
  if (args.first_keys != nullptr) args.first_keys += row;
  if (args.topk > 0) args.topk_score += row * args.NH, args.topk_last += row * args.NH;
  if (args.relative.q != nullptr) args.relative.q += row * args.NH * args.HS;
  return args;
}

// The i-th attention of a training batch.
inline AttentionArgs<floatX> attention_args(const AttentionBranch& b, size_t i, const Batch& batch) {
  AttentionArgs<floatX> args = attention_args(b, i, {0, batch.remembered, batch.T}, batch.B, /*row=*/0);
  if (b.relative) args.relative = positions_of(*b.relative, args.relative, batch);
  if (batch.drops) args.dropout = b.dropout;
  return args;
}

// The rows of a Projection or Rotation.
template <class Operation>
int64_t rows_of(const Operation& operation, const Batch& batch) {
  return operation.has_memory_rows ? batch.key_rows() : batch.rows();
}
inline RowPositions positions_of(const Rotation& r, const Batch& batch) {
  return r.has_memory_rows ? batch.key_positions() : batch.positions();
}

// q, k and v =; k and v of the new tokens go into the cache. When the backward pass computes a layer again, K/V has
// been kept.
inline void project_qkv(const AttentionBranch& b, const Batch& batch, bool kv_is_kept) {
  auto is_done = [&](const auto& operation) { return operation.is_kept && kv_is_kept; };
  if (b.memory && !kv_is_kept) extend_by_memory(*b.memory, b.in, batch);
  for (const Projection& p : b.projections)
    if (!is_done(p)) matmul_forward(p.out, p.in, p.weight, p.bias, rows_of(p, batch), b.C, p.OC);
  for (const Rotation& r : b.rotations) {
    if (is_done(r)) continue;
    if (r.norm) norm_heads(r.heads, r.norm->rstd, positions_of(r, batch), rows_of(r, batch));
    else rotate(r.heads, positions_of(r, batch), rows_of(r, batch));
  }
  if (b.value_residual && !is_done(*b.value_residual)) value_residual_forward(*b.value_residual, batch.rows());
  if (b.router && !is_done(*b.router)) router_forward(*b.router, batch.rows());
  if (b.depth && !is_done(*b.depth)) depth_values_forward(*b.depth, batch.rows());
  if (b.relative) relative_forward(*b.relative, batch);
  if (!b.store_kv) return;
  for (const RowCopy& copy : b.store_kv->copies) copy_rows(copy, batch.rows());
}

// The i-th attention of parts [first, end), which have as many queries each, the first from `row` on.
inline AttentionArgs<floatX> attention_args(const AttentionBranch& b, size_t i, const std::vector<SequencePart>& parts,
                                            size_t first, size_t end, int64_t row) {
  int64_t longest = 0;
  for (size_t n = first; n < end; n++)
    longest = std::max(longest, parts[n].first + parts[n].count - first_key(b, parts[n]));
  SequencePart part = parts[first];
  part.slot = 0;  // its K/V heads begin with the cache's first row, from which b.sequences counts
  AttentionArgs<floatX> args = attention_args(b, i, part, int64_t(end - first), row);
  args.T = longest, args.first_query = longest - part.count;
  args.sequences = b.sequences + first;
  return args;
}

// The i-th attention, of every part: of neighbours at once where they have as many queries and the device can.
inline void attend(const AttentionBranch& b, size_t i, const Batch& batch) {
  const std::vector<SequencePart>& parts = batch.parts;
  if (parts.empty()) return attention_forward(attention_args(b, i, batch));
  int64_t row = 0;
  for (size_t first = 0, end; first < parts.size(); first = end) {
    const int64_t queries = parts[first].count;
    end = first + 1;
    if (takes_sequences(queries, b.attentions_of_slot[0][i].kv_heads.args.topk))
      while (end < parts.size() && parts[end].count == queries) end++;
    attention_forward(end == first + 1 ? attention_args(b, i, parts[first], 1, row)
                                       : attention_args(b, i, parts, first, end, row));
    row += int64_t(end - first) * queries;
  }
}

// out (N, C) = the output projection of the heads' outputs, after dropout.
inline void project_out(const AttentionBranch& b, const Batch& batch) {
  matmul_forward(b.out, b.acts.att, b.w.projw, b.w.projb, batch.rows(), b.C, b.C);
  if (batch.drops) drop_elements(b.out, b.out, b.output_dropout, batch.B, batch.T, b.C);
}

// att (N, C) = the outputs of several attention maps, summed with their weights.
inline void attend_by_maps(const AttentionBranch& b, const MixedMaps& mixed, const Batch& batch) {
  const int64_t N = batch.rows();
  if (mixed.gate) token_gate_forward(mixed.gate->gate, b.in, b.w.gatew, b.w.gateb, N, b.C);
  const std::vector<LayerAttention>& attentions = b.attentions_of_slot[0];
  for (size_t i = 0; i < attentions.size(); i++) {
    attend(b, i, batch);
    mix_map_forward(mixed.map_sum, b.acts.att, mixed.map_out, mixed.weights, attentions[i].map_layer, i == 0,
                    i + 1 == attentions.size(), N, b.C);
  }
}

// out (N, C) = the output of the attention branch for its input `in` (N, C). kv_is_kept: in the backward pass, which
// computes a layer again, k and v are there.
inline void branch_forward(const AttentionBranch& b, const Batch& batch, bool kv_is_kept = false) {
  project_qkv(b, batch, kv_is_kept);
  if (b.mixed_maps) attend_by_maps(b, *b.mixed_maps, batch);
  else attend(b, 0, batch);
  project_out(b, batch);
}

// Computes the branch's activations again in the backward pass; those of K/V have been kept.
inline void branch_again(const AttentionBranch& b, const Batch& batch) {
  branch_forward(b, batch, /*kv_is_kept=*/true);
}

// The backward pass of the output projection. From dout (N, C), the gradient of out: datt (N, C) =, and g +=. Also sets
// dqkv (N, QKV) to what it holds before this layer's attention adds to it: the sums of other layers for shared heads,
// zeros for unused ones.
inline void project_out_backward(const AttentionBranch& b, const floatX* dout, const Batch& batch) {
  matmul_backward(b.datt, b.g.projw, b.g.projb, dout, b.acts.att, b.w.projw, batch.rows(), b.C, b.C);
  for (const RowCopy& copy : b.load_dqkv) copy_rows(copy, batch.key_rows());
}

// The backward pass of the projection to q, k and v of a layer with a memory. From dqkv (N, C) and dkv (key_rows, QKV -
// C): din (N, C) =, and g +=.
inline void project_qkv_backward(const AttentionBranch& b, const SegmentMemory& memory, const Batch& batch) {
  const int64_t N = batch.rows(), C = b.C, kv = b.QKV - C;
  float* kv_bias = b.g.qkvb != nullptr ? b.g.qkvb + C : nullptr;
  extend_by_memory(memory, b.in, batch);
  matmul_backward(memory.dextended, b.g.qkvw + C * C, kv_bias, b.dkv, memory.extended, b.w.qkvw + C * C,
                  batch.key_rows(), C, kv);
  extend_by_memory_backward(memory, b.din, batch);
  gemm('N', 'N', N, C, C, b.dqkv, C, b.w.qkvw, C, true, b.din, C);
  matmul_backward_weight(b.g.qkvw, b.g.qkvb, b.dqkv, b.in, N, C, C);
}

// The backward pass of the projection to q, k and v. From dqkv (N, QKV): din (N, C) =, and g +=.
inline void project_qkv_backward(const AttentionBranch& b, const Batch& batch) {
  for (const Rotation& r : b.drotations)
    if (r.norm) norm_heads_backward(r.heads, *r.norm, positions_of(r, batch), rows_of(r, batch));
    else rotate(r.heads, positions_of(r, batch), rows_of(r, batch), /*sign=*/-1);
  if (b.memory) return project_qkv_backward(b, *b.memory, batch);
  matmul_backward(b.din, b.g.qkvw, b.g.qkvb, b.dqkv, b.in, b.w.qkvw, batch.rows(), b.C, b.QKV);
}

// From datt, the gradient of att: those of q, k, v and of the gates, of this layer and of those below.
inline void attend_by_maps_backward(const AttentionBranch& b, const MixedMaps& mixed, const Batch& batch) {
  const int64_t N = batch.rows();
  for (size_t i = 0; i < b.attentions_of_slot[0].size(); i++) {
    const int map_layer = b.attentions_of_slot[0][i].map_layer;
    AttentionArgs<floatX> args = attention_args(b, i, batch);
    args.exact_out = mixed.exact_map_out;
    attention_forward(args);  // the output of this map alone, and its lse
    float* dmap_weight = mixed.dmap_weights + map_layer * mixed.weights.gates_stride;
    auto mix_backward = [&](const auto* map_out) {
      mix_map_backward(mixed.dmap_out, dmap_weight, b.datt, map_out, mixed.weights, map_layer, N, b.C);
    };
    mixed.exact_map_out != nullptr ? mix_backward(mixed.exact_map_out) : mix_backward(mixed.map_out);
    attention_backward(args);
  }
  if (mixed.dmap_gates != nullptr) mix_gates_backward(mixed.dmap_gates, mixed.dmap_weights, mixed.weights, N);
}

// din (N, C) += what comes through the layer's gate, whose own gradients +=.
inline void map_gate_backward(const AttentionBranch& b, const MixedMaps& mixed, const Batch& batch) {
  if (mixed.gate)
    token_gate_backward(b.din, b.g.gatew, b.g.gateb, mixed.gate->dgate, mixed.gate->gate, b.in, b.w.gatew, batch.rows(),
                        b.C);
}

// From dout (N, C), the gradient of out: din (N, C) =, g +=, and the gradients of other layers' K/V, = or += as the
// plan says.
inline void branch_backward(const AttentionBranch& b, const floatX* dout, const Batch& batch) {
  if (batch.drops) drop_elements(b.out, dout, b.output_dropout, batch.B, batch.T, b.C);
  project_out_backward(b, batch.drops ? b.out : dout, batch);
  if (b.relative) queries_forward(*b.relative, batch);
  if (b.mixed_maps) attend_by_maps_backward(b, *b.mixed_maps, batch);
  else attention_backward(attention_args(b, 0, batch));
  if (b.relative) relative_backward(*b.relative, batch);
  if (b.value_residual) value_residual_backward(*b.value_residual, batch.rows());
  if (b.router) router_backward(*b.router, batch.rows());
  if (b.depth) depth_values_backward(*b.depth, batch.rows());
  project_qkv_backward(b, batch);
  if (b.mixed_maps) map_gate_backward(b, *b.mixed_maps, batch);
}

// ----------------------------------------------------------------------------
// Cost

// Elements of the weights that a token is multiplied with. k and v of the memory's positions are counted with those of
// the segment's tokens.
inline double matmul_elements(const AttentionBranch& b, const ModelConfig& c, const AttentionPlan& plan,
                              const Segments& segments) {
  const double C = c.channels, qkv = double(qkv_rows(c, plan, b.layer));
  const double of_memory = (qkv - C) * segments.mean_memory(plan.table.memory, c.max_seq_len) / c.max_seq_len;
  const double of_router = has_router(plan, b.layer) ? (qkv - C) * (b.layer + 1) * plan.table.num_kv_heads : 0;
  return (qkv + of_memory) * C + of_router + C * C + (has_map_gate(plan, b.layer) ? C : 0);
}

// The FLOPs of a layer's attention for a sequence of T tokens, forward and backward: 2 matrix products forward and 5
// backward (one of which rebuilds the scores), each with 2 operations per channel of a head for each query and key that
// it sees: C * (T + 1) a token where all heads are causal. With topk all scores are computed once, and only the chosen
// keys are multiplied. Relative positions have 1 product more forward and 3 backward, and r, which does not depend on
// the batch and is not counted. With `depth` a token has a pair with itself in each layer up to its own.
inline double attention_flops(const AttentionBranch& b, const ModelConfig& c, const AttentionPlan& plan, int64_t T,
                              const Segments& segments) {
  const AttentionPairs pairs = attention_pairs(plan, b.layer, T, segments);
  const double products =
      plan.table.topk > 0 ? 6 * pairs.multiplied + pairs.scored : (plan.table.relative ? 11 : 7) * pairs.scored;
  const double over_depth =
      b.depth && b.layer > 0 ? 7.0 * plan.projected[Part::v][b.layer].size() * (b.layer + 1) * T : 0;
  return 2 * c.head_size() * (products + over_depth);
}

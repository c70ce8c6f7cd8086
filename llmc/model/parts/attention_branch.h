// Attention as a branch: q, k and v of the heads that the layer projects (qkv_projection.h), their way to attention
// (head_stages.h), attention of the layer's query heads to K/V heads wherever they were projected, and the output
// projection. Everything that follows from the wiring and the level of recomputation is bound here once, as pointers
// and sizes; the passes look nothing else up.
#pragma once
#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>
#include "llmc/model/attention_pairs.h"
#include "llmc/model/binding.h"
#include "llmc/ops/attention_args.h"
#include "head_stages.h"
#include "mixed_maps.h"
#include "norm.h"
#include "qkv_projection.h"
#include "relative_attention.h"

// One softmax for each query head of a layer.
struct LayerAttention : DeviceAttention {
  int map_layer = 0;  // the layer whose q and masks are used: its own, or one below
};

// N: rows, C: channels, h: heads.
struct AttentionBranch {
  int layer = 0;      // counted from 0 in the order in which layers run
  int kv_source = 0;  // the layer whose K/V its heads use where they use their own: itself, or one that `route` draws
  int64_t C = 0;
  AttentionParams<floatX> w;
  AttentionParams<float> g;
  QkvProjection projection;
  HeadStages stages;
  std::optional<RelativeAttention> relative;
  std::optional<MixedMaps> mixed_maps;  // of `blend` and `gate`
  // attentions_of_slot[slot of the cache] in generation, attentions_of_slot[0] for all sequences in training: one
  // attention, or one for each attention map whose output is summed.
  std::vector<std::vector<LayerAttention>> attentions_of_slot;
  const KVCache* cache = nullptr;          // in generation; else null
  const KeyRows* sequences = nullptr;      // (slots): in generation, where the keys of each span's sequence lie
  floatX *att = nullptr, *datt = nullptr;  // (N, C): the heads' outputs, and their gradient
  float* lse = nullptr;                    // (B, h, T)
  float* topk_score = nullptr;             // (B, h, T): of topk
  int* topk_last = nullptr;                // (B, h, T): of topk
  float* delta = nullptr;                  // (B, h, T): rowsum(dout * out), in the backward pass
  float* scratch = nullptr;                // (attention_backward_scratch(...)), or null
  float* partials = nullptr;               // (attention_partials(...)): in generation, or null
  floatX* out = nullptr;                   // (N, C)
  Dropout dropout, output_dropout;         // of the probabilities, and of out
};

inline AttentionBranch make_attention(const AttentionPlan& plan, int l, bool is_generation) {
  AttentionBranch b;
  b.layer = b.projection.layer = b.kv_source = l;
  b.stages = make_stages(plan, l, is_generation);
  b.projection.is_read_by_others = !plan.shared[Qkv::q][l].empty() || is_read_by_stages(b.stages, plan, l);
  const bool projects_kv = !plan.projected[Qkv::k][l].empty() || !plan.projected[Qkv::v][l].empty();
  if (plan.table.memory > 0 && projects_kv && !is_generation) b.projection.memory.emplace();
  if (plan.table.relative) b.relative.emplace();
  if (plan.table.mix != WiringTable::Mix::none) b.mixed_maps.emplace();
  return b;
}

// ----------------------------------------------------------------------------
// Memory

// The most parts of the scratch memory that one of the layer's attentions needs in the backward pass.
inline int64_t most_scratch_parts(const AttentionPlan& plan, int l) {
  int64_t most = 0;
  for (const PlannedAttention& attention : plan.attentions[l]) {
    int64_t parts = 0;
    for (const KVUse& use : attention.uses)
      if (const int64_t heads = int64_t(use.query_heads.size()); needs_scratch(heads)) parts += heads;
    most = std::max(most, parts);
  }
  return most;
}

inline void declare(AttentionBranch& b, ActivationList& list) {
  const ModelShape& shape = list.shape;
  const AttentionPlan& plan = shape.attention_plan;
  const int64_t N = shape.rows, C = shape.config.channels, h = shape.config.num_heads, hs = shape.config.head_size();
  declare(b.projection, list);
  declare(b.stages, list);
  if (b.relative) declare(*b.relative, list);
  if (b.mixed_maps) declare(*b.mixed_maps, list);
  // With several attention maps the backward pass runs each attention again, and needs nothing of it to be kept.
  const Recompute dropped_from = b.mixed_maps ? Recompute::nothing : Recompute::block;
  list.of_sublayer(Recompute::block, "att", b.att, {N, C});
  list.of_sublayer(dropped_from, "lse", b.lse, {N, h});
  if (plan.table.topk > 0) {
    list.of_sublayer(dropped_from, "topk_score", b.topk_score, {N, h});
    list.of_sublayer(dropped_from, "topk_last", b.topk_last, {N, h});
  }
  list.in_buffer(buffers::branch_out, b.out, {N, C});
  if (const auto& generation = shape.generation) {
    int64_t kv_per_head = 0;  // the most K/V heads that a query head attends to in one softmax
    for (int i = 0; i < plan.num_heads; i++)
      kv_per_head = std::max(kv_per_head, int64_t(plan.table.sources(b.layer, i).size()));
    const int64_t partials = attention_partials(generation->slots, h, hs, generation->longest(), kv_per_head);
    if (partials > 0) list.in_buffer({"attention_partials"}, b.partials, {partials});
    return;
  }
  list.in_buffer(buffers::dnorm, b.datt, {N, C});
  list.in_buffer({"delta", MemoryGroup::backward}, b.delta, {N, h});
  const auto scratch_for = [&](int64_t keys) {
    return attention_backward_scratch(shape.training->B, keys, hs, most_scratch_parts(plan, b.layer));
  };
  const int64_t T = shape.training->T, first_segment = scratch_for(T);  // which has no memory before it
  const int64_t scratch = std::max(first_segment, scratch_for(plan.table.memory + T));
  if (scratch > 0) list.in_buffer({"attention_scratch", MemoryGroup::backward}, b.scratch, {scratch});
}

// ----------------------------------------------------------------------------
// Pointers

// Each K/V head that layer l's attention uses, its own replaced by layer `source`'s.
inline std::vector<KVHead> kv_heads_of(const HeadPlaces& places, int l, const PlannedAttention& attention, int slot,
                                       int source) {
  std::vector<KVHead> kv_heads;
  int first_query_head = 0;
  auto of_source = [&](ProjectedHead h) { return ProjectedHead{h.layer == l ? source : h.layer, h.head}; };
  for (const KVUse& use : attention.uses) {
    const ProjectedHead of_k = of_source(use.k), of_v = of_source(use.v);
    const HeadPlace k = places(Qkv::k, of_k).in_slot(slot), v = places(Qkv::v, of_v).in_slot(slot);
    const HeadPlace dk = places.gradient(l, Qkv::k, of_k), dv = places.gradient(l, Qkv::v, of_v);
    const int query_heads = int(use.query_heads.size());
    kv_heads.push_back({k.x, v.x, k.stride, v.stride, dk.x, dv.x, dk.stride, dv.stride, use.dk_accumulate,
                        use.dv_accumulate, first_query_head, query_heads});
    first_query_head += query_heads;
  }
  return kv_heads;
}

// How layer l's attention finds each K/V head that it uses.
inline DeviceAttention bind_kv_heads(const HeadPlaces& places, const Binding& binding, int l,
                                     const PlannedAttention& attention, int slot) {
  const AttentionPlan& plan = binding.plan();
  std::vector<int> query_heads;
  for (const KVUse& use : attention.uses)
    query_heads.insert(query_heads.end(), use.query_heads.begin(), use.query_heads.end());
  const auto first_mask = plan.table.masks.begin() + attention.map_layer * plan.num_heads;
  std::vector<AttentionMask> masks(first_mask, first_mask + plan.num_heads);
  const auto is_plain = [](const AttentionMask& m) { return m.is_causal() && m.slope() == 0; };
  if (std::all_of(masks.begin(), masks.end(), is_plain)) masks.clear();
  // Attention scales scores after the mask has lowered them.
  for (AttentionMask& mask : masks) mask.clauses.slope *= std::sqrt(float(binding.head_size()));
  DeviceAttention bound(kv_heads_of(places, l, attention, slot, l), query_heads, masks);
  for (int source = 0; source < l && plan.table.route > 0 && binding.shape.training; source++)
    bound.allow(kv_heads_of(places, l, attention, slot, source));
  return bound;
}

inline LayerAttention bind_attention_args(const AttentionBranch& b, const PlannedAttention& planned, int slot,
                                          const HeadPlaces& places, const Binding& binding) {
  const ProjectedHead first_q = {planned.map_layer, 0};
  const HeadPlace q = places(Qkv::q, first_q).x, dq = places.gradient(b.layer, Qkv::q, first_q);
  LayerAttention attention = {bind_kv_heads(places, binding, b.layer, planned, slot), planned.map_layer};
  AttentionArgs& args = attention.args;
  args.HS = binding.head_size();
  args.q = q.x, args.q_stride = q.stride;
  args.topk = binding.plan().table.topk, args.topk_score = b.topk_score, args.topk_last = b.topk_last;
  args.partials = b.partials, args.scratch = b.scratch, args.lse = b.lse, args.delta = b.delta;
  args.out = b.mixed_maps ? b.mixed_maps->map_out : b.att;
  args.dout = b.mixed_maps ? b.mixed_maps->dmap_out : b.datt;
  args.dq = dq.x, args.dq_stride = dq.stride, args.dq_accumulate = planned.dq_accumulate;
  const int group = binding.shape.generation ? binding.shape.generation->group_of_layer[b.layer] : 0;
  if (binding.plan().table.documents) args.first_keys = binding.acts.first_keys + group * binding.shape.rows;
  args.last_queries = binding.acts.last_queries, args.sinks = {b.w.sinks, b.g.sinks};
  return attention;
}

// Sets the pointers that do not depend on other layers.
inline void bind_branch(AttentionBranch& b, const LayerParams<floatX>& w, const LayerParams<float>& g, const Norm& norm,
                        const Binding& binding) {
  b.w = w.attention, b.g = g.attention, b.C = binding.shape.config.channels, b.cache = binding.cache;
  b.projection.in = norm.out;
  if (b.projection.memory) bind_memory(*b.projection.memory, norm);
  if (b.mixed_maps) bind_mixed_maps(*b.mixed_maps, b.layer, binding);
  b.dropout = dropout_of(binding.acts, binding.shape, DropoutSite::probabilities, b.layer);
  b.output_dropout = dropout_of(binding.acts, binding.shape, DropoutSite::attention_output, b.layer);
}

// Sets a layer's attentions. `places`: where the last stages of all layers have left their heads.
inline void bind_attentions(AttentionBranch& b, const HeadPlaces& places, const Binding& binding) {
  const std::optional<KVCachePlan>& generation = binding.shape.generation;
  for (int slot = 0; slot < (generation ? generation->slots : 1); slot++) {
    b.attentions_of_slot.emplace_back();
    for (const PlannedAttention& planned : binding.plan().attentions[b.layer])
      b.attentions_of_slot[slot].push_back(bind_attention_args(b, planned, slot, places, binding));
    if (b.relative) bind_relative(*b.relative, b.w, b.g, binding.acts, b.attentions_of_slot[slot][0].args);
  }
  if (generation) b.sequences = binding.acts.sequences + generation->group_of_layer[b.layer] * generation->slots;
  else bind_load_dqkv(b.projection, places, binding);
}

// After bind_branch of all layers: binds the path of their heads. A layer's attention uses what lower layers have
// projected, and its gradients reach them. Returns where attention finds all heads.
inline HeadPlaces bind_heads(const std::vector<AttentionBranch*>& layers, const Binding& binding) {
  HeadPlaces places(binding.plan());
  std::vector<HeadStages*> stages;
  for (AttentionBranch* b : layers) {
    bind_projection(b->projection, places, binding);
    stages.push_back(&b->stages);
  }
  bind_stages(stages, places, binding);
  for (AttentionBranch* b : layers) bind_attentions(*b, places, binding);
  return places;
}

// From the next pass on the layer's heads use the K/V of layer `source` where they use their own.
inline void use_kv_of(AttentionBranch& b, int source, const HeadPlaces& places, const AttentionPlan& plan) {
  if (std::exchange(b.kv_source, source) == source) return;
  b.attentions_of_slot[0][0].replace(kv_heads_of(places, b.layer, plan.attentions[b.layer][0], 0, source));
}

// ----------------------------------------------------------------------------
// The passes

// The position of the first key that the cache holds of a span's sequence; 0 in training.
inline int64_t first_key(const AttentionBranch& b, const SequenceSpan& span) {
  return b.cache == nullptr ? 0 : b.cache->first_position(span.slot, b.layer);
}

// The i-th attention of a span's queries: B sequences, whose first row is `row` of the batch.
inline AttentionArgs args_of_span(const AttentionBranch& b, size_t i, const SequenceSpan& span, int64_t B,
                                  int64_t row) {
  AttentionArgs args = b.attentions_of_slot[span.slot][i].args;
  args.B = B, args.first_query = span.first - first_key(b, span), args.T = args.first_query + span.count;
  args.q += row * args.q_stride, args.out += row * args.NH * args.HS, args.lse += row * args.NH;
  if (args.first_keys != nullptr) args.first_keys += row;
  if (args.topk > 0) args.topk_score += row * args.NH, args.topk_last += row * args.NH;
  if (args.relative.q != nullptr) args.relative.q += row * args.NH * args.HS;
  return args;
}

// The i-th attention of a training batch.
inline AttentionArgs attention_args(const AttentionBranch& b, size_t i, const Batch& batch) {
  AttentionArgs args = args_of_span(b, i, {0, batch.remembered, batch.T}, batch.B, /*row=*/0);
  if (b.relative) args.relative = positions_of(*b.relative, args.relative, batch);
  if (batch.drops) args.dropout = b.dropout;
  return args;
}

// The i-th attention of spans [first, end), which have as many queries each, the first from `row` on.
inline AttentionArgs args_of_spans(const AttentionBranch& b, size_t i, const std::vector<SequenceSpan>& spans,
                                   size_t first, size_t end, int64_t row) {
  int64_t longest = 0;
  for (size_t n = first; n < end; n++)
    longest = std::max(longest, spans[n].first + spans[n].count - first_key(b, spans[n]));
  SequenceSpan span = spans[first];
  span.slot = 0;  // its K/V heads begin with the cache's first row, from which b.sequences counts
  AttentionArgs args = args_of_span(b, i, span, int64_t(end - first), row);
  args.T = longest, args.first_query = longest - span.count;
  args.sequences = b.sequences + first;
  return args;
}

// The i-th attention, of every span: of neighbours at once where they have as many queries and the device can.
inline void attend(const AttentionBranch& b, size_t i, const Batch& batch) {
  const std::vector<SequenceSpan>& spans = batch.spans;
  if (spans.empty()) return attention_forward(attention_args(b, i, batch));
  int64_t row = 0;
  for (size_t first = 0, end; first < spans.size(); first = end) {
    const int64_t queries = spans[first].count;
    end = first + 1;
    if (takes_sequences(queries, b.attentions_of_slot[0][i].args.topk))
      while (end < spans.size() && spans[end].count == queries) end++;
    attention_forward(end == first + 1 ? args_of_span(b, i, spans[first], 1, row)
                                       : args_of_spans(b, i, spans, first, end, row));
    row += int64_t(end - first) * queries;
  }
}

// out (N, C) = the output projection of the heads' outputs, after dropout.
inline void project_out(const AttentionBranch& b, const Batch& batch) {
  matmul_forward(b.out, b.att, b.w.projw, b.w.projb, batch.rows(), b.C, b.C);
  if (batch.drops) drop_elements(b.out, b.out, b.output_dropout, batch.B, batch.T, b.C);
}

// att (N, C) = the outputs of several attention maps, summed with their weights.
inline void attend_by_maps(const AttentionBranch& b, const MixedMaps& mixed, const Batch& batch) {
  const int64_t N = batch.rows();
  if (mixed.gate) token_gate_forward(mixed.gate->gate, b.projection.in, b.w.gatew, b.w.gateb, N, b.C);
  const std::vector<LayerAttention>& attentions = b.attentions_of_slot[0];
  for (size_t i = 0; i < attentions.size(); i++) {
    attend(b, i, batch);
    mix_map_forward(mixed.map_sum, b.att, mixed.map_out, mixed.weights, attentions[i].map_layer, i == 0,
                    i + 1 == attentions.size(), N, b.C);
  }
}

// out (N, C) = the output of the attention branch for its input projection.in (N, C). `again`: in the backward pass,
// which computes a layer again; its k and v are there.
inline void branch_forward(const AttentionBranch& b, const Batch& batch, bool again = false) {
  projection_forward(b.projection, batch, again);
  stages_forward(b.stages, batch, again);
  if (b.relative) {
    distances_forward(*b.relative, batch);
    relative_queries_forward(b.relative->queries, batch.rows(), b.C);
  }
  if (b.mixed_maps) attend_by_maps(b, *b.mixed_maps, batch);
  else attend(b, 0, batch);
  project_out(b, batch);
}

// Computes the branch's activations again in the backward pass, but not K/V, which has been kept.
inline void branch_again(const AttentionBranch& b, const Batch& batch) { branch_forward(b, batch, /*again=*/true); }

// From datt, the gradient of att: the gradients of q, k, v and of the gates, of this layer and of the layers below.
inline void attend_by_maps_backward(const AttentionBranch& b, const MixedMaps& mixed, const Batch& batch) {
  const int64_t N = batch.rows();
  for (size_t i = 0; i < b.attentions_of_slot[0].size(); i++) {
    const int map_layer = b.attentions_of_slot[0][i].map_layer;
    AttentionArgs args = attention_args(b, i, batch);
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
    token_gate_backward(b.projection.din, b.g.gatew, b.g.gateb, mixed.gate->dgate, mixed.gate->gate, b.projection.in,
                        b.w.gatew, batch.rows(), b.C);
}

// From dout (N, C), the gradient of out: din (N, C) =, g +=, and the gradients of other layers' K/V, = or += as the
// plan says.
inline void branch_backward(const AttentionBranch& b, const floatX* dout, const Batch& batch) {
  if (batch.drops) drop_elements(b.out, dout, b.output_dropout, batch.B, batch.T, b.C), dout = b.out;
  matmul_backward(b.datt, b.g.projw, b.g.projb, dout, b.att, b.w.projw, batch.rows(), b.C, b.C);
  // Shared heads: dqkv = what layers above left in the accumulators, to which attention adds; 0 where no attention
  // does.
  for (const RowCopy& copy : b.projection.load_dqkv) copy_rows(copy, batch.key_rows());
  if (b.relative)  // again, because other layers have overwritten them
    relative_queries_forward(b.relative->queries, batch.rows(), b.C);
  if (b.mixed_maps) attend_by_maps_backward(b, *b.mixed_maps, batch);
  else attention_backward(attention_args(b, 0, batch));
  if (b.relative) relative_backward(*b.relative, batch);
  stages_backward(b.stages, batch);
  projection_backward(b.projection, batch);
  if (b.mixed_maps) map_gate_backward(b, *b.mixed_maps, batch);
}

// ----------------------------------------------------------------------------
// Cost

// Elements of the weights that a token is multiplied with. Products for k and v of the memory's positions are counted
// with the segment's tokens.
inline double matmul_elements(const AttentionBranch& b, const ModelConfig& c, const AttentionPlan& plan,
                              const Segments& segments) {
  const double C = c.channels, qkv = double(qkv_rows(c, plan, b.layer));
  const double of_memory = (qkv - C) * segments.mean_memory(plan.table.memory, c.max_seq_len) / c.max_seq_len;
  double of_stages = 0;
  for_each_stage(b.stages, [&](const auto& stage) { of_stages += stage.matmul_elements(c, plan); });
  return (qkv + of_memory) * C + of_stages + C * C + (has_map_gate(plan, b.layer) ? C : 0);
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
  double flops = 2 * c.head_size() * products;
  for_each_stage(b.stages, [&](const auto& stage) { flops += stage.flops(c, plan, T); });
  return flops;
}

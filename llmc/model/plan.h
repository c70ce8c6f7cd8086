// The plan of each layer: everything that follows from the wiring and the level of recomputation, as pointers and sizes, computed once. The
// forward and the backward pass look nothing else up.
#pragma once
#include <utility>                // std::move
#include <vector>                 // std::vector
#include "activations.h"          // ModelShape, Activations, LayerActs
#include "kv_plan.h"              // KVPlan, KVUse, KVSource
#include "llmc/attention_args.h"  // AttentionArgs, KVHead, KVHeads
#include "llmc/precision.h"       // floatX
#include "parameters.h"           // Params, LayerParams, qkv_rows

// A matmul from ln1 to q, k and v, or to a part of them: out (B, T, OC) = ln1 weight^T + bias.
struct Projection {
  const floatX *weight, *bias;  // (OC, C), (OC)
  floatX* out;
  int64_t OC;
  bool holds_kv;                // out is a K/V cache: its rows are the sequence's positions, in generation too
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

// What layer l needs beside its parameters and activations. Everything that follows from the wiring and the level of recomputation is here,
// as pointers and sizes; the passes below look nothing else up.
struct LayerPlan {
  int64_t QKV = 0;
  const floatX* residual = nullptr;     // (B, T, C): the residual stream that enters the layer
  std::vector<Projection> projections;  // of q, and of k and v of the projected heads
  bool q_has_cache_rows = false;        // q lies in a projection that holds K/V, and has its rows
  KVHeads<floatX> kv_heads;             // that the layer's query heads attend to, wherever they were projected
  AttentionArgs<floatX> attention;      // of B sequences of T tokens
  std::vector<RowCopy> load_dkv;        // the part of dqkv that other layers' attention has computed, or that is zero
};

// Where the cached k of a projected head lies; v lies projected * hs elements after it.
struct CachedKV {
  floatX* k;
  int64_t stride, projected;
};
inline CachedKV cached_kv(const ModelShape& model, const Activations& acts, const KVSource& s) {
  const LayerActs& a = acts.layers[s.layer];
  const int64_t C = model.config.channels, hs = model.config.head_size(), QKV = qkv_rows(model.config, model.kv_plan, s.layer);
  const int64_t column = model.kv_plan.projected_index(s) * hs, projected = int64_t(model.kv_plan.projected[s.layer].size());
  if (a.qkv != nullptr) return {a.qkv + C + column, QKV, projected};
  return {a.kv + column, QKV - C, projected};
}

// How layer l's attention finds each K/V head that it uses: k and v in the cache of the source layer, dk and dv in l's own dqkv if l is
// the source layer, else in that layer's accumulator.
inline KVHeads<floatX> plan_kv_heads(const ModelShape& model, const Activations& acts, int l) {
  const KVPlan& plan = model.kv_plan;
  const int64_t C = model.config.channels, hs = model.config.head_size();
  std::vector<KVHead<floatX>> kv_heads;
  std::vector<int> query_heads;
  for (const KVUse& use : plan.uses[l]) {
    const CachedKV cached = cached_kv(model, acts, use.source);
    KVHead<floatX> kv;
    kv.k = cached.k, kv.v = cached.k + cached.projected * hs, kv.k_stride = kv.v_stride = cached.stride;
    if (use.source.layer == l) {
      kv.dk_stride = kv.dv_stride = qkv_rows(model.config, plan, l);
      kv.dk = acts.dqkv + C + plan.projected_index(use.source) * hs;
      kv.dv = kv.dk + cached.projected * hs;
    } else {
      kv.dk_stride = kv.dv_stride = 2 * plan.accumulator_heads * hs;
      kv.dk = acts.dkv_accumulators[plan.accumulator[use.source.layer]] + plan.shared_index(use.source) * hs;
      kv.dv = kv.dk + plan.accumulator_heads * hs;
    }
    kv.dk_accumulate = kv.dv_accumulate = use.accumulate;
    kv.first_query_head = int(query_heads.size()), kv.num_query_heads = int(use.query_heads.size());
    query_heads.insert(query_heads.end(), use.query_heads.begin(), use.query_heads.end());
    kv_heads.push_back(kv);
  }
  return KVHeads<floatX>(std::move(kv_heads), std::move(query_heads));
}

// What dqkv holds of layer l's K/V heads before its own attention adds to it: of shared heads what an accumulator has summed, of unused
// ones zeros.
inline std::vector<RowCopy> plan_load_dkv(const ModelShape& model, const Activations& acts, int l) {
  const KVPlan& plan = model.kv_plan;
  const int64_t C = model.config.channels, hs = model.config.head_size(), QKV = qkv_rows(model.config, plan, l);
  const int64_t kv = int64_t(plan.projected[l].size()) * hs, accumulator_kv = plan.accumulator_heads * hs;
  std::vector<RowCopy> copies;
  auto add = [&](int head, int heads, const floatX* src) {  // of `heads` neighbours at once
    floatX* dk = acts.dqkv + C + plan.projected_index({l, head}) * hs;
    copies.push_back({dk, QKV, src, 2 * accumulator_kv, heads * hs});
    copies.push_back({dk + kv, QKV, src != nullptr ? src + accumulator_kv : nullptr, 2 * accumulator_kv, heads * hs});
  };
  const std::vector<int>& shared = plan.shared[l];
  for (size_t i = 0, n; i < shared.size(); i += n) {
    auto place = [&](size_t j) { return plan.projected_index({l, shared[j]}); };
    for (n = 1; i + n < shared.size() && place(i + n) == place(i) + int(n);) n++;
    add(shared[i], int(n), acts.dkv_accumulators[plan.accumulator[l]] + int64_t(i) * hs);
  }
  for (int head : plan.unused(l)) add(head, 1, nullptr);
  return copies;
}

inline LayerPlan plan_layer(const ModelShape& model, const LayerParams<floatX>& w, const Activations& acts, int l) {
  const ModelConfig& c = model.config;
  const LayerActs& a = acts.layers[l];
  const int64_t C = c.channels;
  LayerPlan layer;
  layer.QKV = qkv_rows(c, model.kv_plan, l);
  layer.residual = l == 0 ? acts.embedded : acts.layers[l - 1].residual3;
  layer.q_has_cache_rows = a.qkv != nullptr;
  if (a.qkv != nullptr) {
    layer.projections = {{w.qkvw, w.qkvb, a.qkv, layer.QKV, /*holds_kv=*/true}};
  } else {
    layer.projections = {{w.qkvw, w.qkvb, a.q, C, /*holds_kv=*/false}};
    if (layer.QKV > C)
      layer.projections.push_back({w.qkvw + C * C, c.bias ? w.qkvb + C : nullptr, a.kv, layer.QKV - C, /*holds_kv=*/true});
  }
  layer.kv_heads = plan_kv_heads(model, acts, l);
  AttentionArgs<floatX>& attention = layer.attention;
  attention.HS = c.head_size();
  layer.kv_heads.set_args(attention);
  attention.q = layer.projections[0].out, attention.q_stride = layer.projections[0].OC;
  attention.out = a.att, attention.lse = a.lse;
  attention.dout = acts.dsublayer, attention.delta = acts.delta;
  attention.dq = acts.dqkv, attention.dq_stride = layer.QKV, attention.dq_accumulate = false;
  layer.load_dkv = plan_load_dkv(model, acts, l);
  return layer;
}

// Attention with `blend` and `gate`: the outputs of several attention maps, the layer's own and those of the layers
// below on its own v, summed with weights (map_weights.h). L (L + 1) / 2 attentions in all.
#pragma once
#include <vector>
#include "attention_branch.h"
#include "llmc/ops/map_weights.h"
#include "llmc/operations.h"

// With `gate`, from layer 1 on: for each token the weight of the attention map of the layer below, and its gradient.
struct MapGate {
  float *gate, *dgate;  // (N)
};

struct MixedAttentionBranch : AttentionBranch {
  MapWeights map_weights;
  floatX *map_out = nullptr, *dmap_out = nullptr;  // (N, C): the output of one map, and its gradient, while it runs
  float* map_sum = nullptr;                        // (N, C)
  float* exact_map_out = nullptr;                  // (N, C): null where map_out is as exact, or is exact enough
  std::vector<MapGate> gates;                      // one or none
  float *dmap_gates = nullptr, *dmap_weights = nullptr;  // (L, N)
};

inline void plan_branch(MixedAttentionBranch& b, const LayerParams<floatX>& w, const LayerParams<float>& g,
                        const Norm& norm, const Planner& p) {
  const Activations& acts = p.acts;
  // One map's output and its gradient are in tensors that are free while it runs.
  b.map_out = acts.branch_out, b.dmap_out = acts.dhidden, b.map_sum = acts.map_sum;
  plan_attention_branch(b, w, g, norm, p, b.map_out, b.dmap_out);
  const int64_t N = p.shape.rows;
  b.map_weights = {acts.map_gates, float(p.plan().table.blend), N, b.layer};
  b.exact_map_out = acts.exact_map_out, b.dmap_gates = acts.dmap_gates, b.dmap_weights = acts.dmap_weights;
  if (!has_map_gate(p.plan(), b.layer)) return;
  float* dgate = p.shape.generation ? nullptr : acts.dmap_gates + b.layer * N;
  b.gates = {{acts.map_gates + b.layer * N, dgate}};
}

inline void branch_forward(const MixedAttentionBranch& b, const Batch& batch, bool kv_is_kept) {
  const int64_t N = batch.rows();
  project_qkv(b, batch, kv_is_kept);
  for (const MapGate& gate : b.gates) token_gate_forward(gate.gate, b.in, b.w.gatew, b.w.gateb, N, b.C);
  const std::vector<LayerAttention>& attentions = b.attentions_of_slot[0];
  for (size_t i = 0; i < attentions.size(); i++) {
    attend(b, i, batch);
    mix_map_forward(b.map_sum, b.acts.att, b.map_out, b.map_weights, attentions[i].map_layer, i == 0,
                    i + 1 == attentions.size(), N, b.C);
  }
  project_out(b, batch);
}

// din =, g += and the gradients of q, k, v and gates of other layers, from dout, the gradient of out.
inline void branch_backward(const MixedAttentionBranch& b, const floatX* dout, const Batch& batch) {
  const int64_t N = batch.rows();
  project_out_backward(b, dout, batch);
  for (size_t i = 0; i < b.attentions_of_slot[0].size(); i++) {
    const int map_layer = b.attentions_of_slot[0][i].map_layer;
    AttentionArgs<floatX> args = attention_args(b, i, batch);
    args.exact_out = b.exact_map_out;
    attention_forward(args);  // the output of this map alone, and its lse
    float* dmap_weight = b.dmap_weights + map_layer * b.map_weights.gates_stride;
    auto mix_backward = [&](const auto* map_out) {
      mix_map_backward(b.dmap_out, dmap_weight, b.datt, map_out, b.map_weights, map_layer, N, b.C);
    };
    b.exact_map_out != nullptr ? mix_backward(b.exact_map_out) : mix_backward(b.map_out);
    attention_backward(args);
  }
  if (b.dmap_gates != nullptr) mix_gates_backward(b.dmap_gates, b.dmap_weights, b.map_weights, N);
  project_qkv_backward(b, batch);
  for (const MapGate& gate : b.gates)
    token_gate_backward(b.din, b.g.gatew, b.g.gateb, gate.dgate, gate.gate, b.in, b.w.gatew, N, b.C);
}

inline double matmul_elements(const MixedAttentionBranch& b, const ModelConfig& c, const AttentionPlan& plan,
                              const Segments& segments) {
  const double gate = has_map_gate(plan, b.layer) ? c.channels : 0;
  return matmul_elements(static_cast<const AttentionBranch&>(b), c, plan, segments) + gate;
}

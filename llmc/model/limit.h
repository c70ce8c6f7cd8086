// The least time that an update takes: its FLOPs at the rate of matmuls, and its bytes of weights, gradients and
// moments at the bandwidth of copies. They are added: matmuls do not run while an optimizer waits for memory.
#pragma once
#include <algorithm>
#include <cstdint>
#include "flops.h"
#include "gpt2.h"

// What a rank's device reaches, measured.
struct Ceilings {
  double gemm, copy;  // FLOP/s; bytes/s, read and written
};

// Copies as many bytes as weights, gradients and moments take, but at most 512 MB: small ones stay in caches.
inline Ceilings measure_ceilings(const GPT2& model, double seconds) {
  const size_t bytes = (model.weight_bytes() + model.parameters.layout.bytes + 2 * model.state_bytes()) / 2;
  return {gemm_peak(seconds), copy_bandwidth(std::clamp<size_t>(bytes, 1 << 20, 256 << 20), seconds / 2)};
}

struct UpdateCost {
  double flops, bytes;  // of a rank
  double seconds(const Ceilings& c) const { return flops / c.gemm + bytes / c.copy; }
};

// FLOPs of a token that the backward pass computes again: 2 of attention's 7 products, and no K/V; an MLP's first
// matmul or its second one.
inline double recomputed_flops_per_token(const Sublayers& sublayers, const ModelConfig& c, const AttentionPlan& plan,
                                         int64_t T) {
  using What = Recomputation::What;
  const double square = double(c.channels) * c.channels;
  double flops = 0;
  for (const Sublayer& before : sublayers.list)
    for (const Recomputation& again : before.again) {
      const Sublayer& s = sublayers.list[size_t(again.sublayer)];
      const bool is_branch = again.what == What::branch;
      if (again.what == What::gates) flops += 2 * matmul_elements(std::get<GruResidual>(s.residual), c);
      if (again.what == What::input) flops += 2 * matmul_elements(*s.dense);
      if (!is_branch && again.what != What::output) continue;
      if (const auto* mlp = std::get_if<MlpBranch>(&s.branch))
        flops += 2 * double(mlp->C) * double(is_branch ? mlp->F : mlp->H);
      else if (!is_branch) flops += 2 * square;
      else if (const auto* lsh = std::get_if<LshBranch>(&s.branch))
        flops += 2 * matmul_elements(*lsh, c) + attention_flops(*lsh, c, plan, T) * 2 / 7 / double(T);
      else flops += 4 * square + attention_flops(*attention_of(s), c, plan, T, {}) * 2 / 7 / double(T);
    }
  return flops;
}

// What an update of so many micro-batches costs beside flops_per_token: recomputation and Muon; and bytes. Each
// micro-batch reads the weights in both passes and adds to the gradients; these are zeroed, read for their norm, and
// read by the optimizer, which moves masters and moments.
inline UpdateCost cost_beside_model(const GPT2& model, int64_t micro_batches) {
  UpdateCost cost = {};
  const TrainingShape& shape = *model.training;
  cost.flops = double(model.rows * micro_batches) *
               recomputed_flops_per_token(model.sublayers, model.config, model.attention_plan, shape.T);
  for (const MuonMatrix& matrix : shape.matrices) cost.flops += muon_flops(matrix);
  const double optimizer = 4 + 3 * 2 * 4 + 4 + (has_master_weights ? sizeof(floatX) : 0);
  cost.bytes = double(model.parameters.num_parameters) *
               (double(micro_batches) * (2 * sizeof(floatX) + 2 * 4) + 4 + optimizer / model.parameters.shard.count);
  return cost;
}

// The arithmetic of a model, in floating-point operations, as a perfect implementation would have it: without
// recomputation, but for the flash backward's, and without rows of unused heads.
#pragma once
#include <variant>
#include "attention_pairs.h"
#include "attention_plan.h"
#include "llmc/wiring/config.h"
#include "sublayers.h"

// Elements of the weights that a token is multiplied with: the sublayers' and the head's.
inline double matmul_parameters(const ModelConfig& c, const AttentionPlan& plan, const Segments& segments = {}) {
  double n = double(c.vocab_size) * c.channels;
  for (const Sublayer& s : make_sublayers(c, plan).list) {
    if (const AttentionBranch* b = attention_of(s)) n += matmul_elements(*b, c, plan, segments);
    if (const auto* lsh = std::get_if<LshBranch>(&s.branch)) n += matmul_elements(*lsh, c);
    if (is_mlp(s)) n += matmul_elements(std::get<MlpBranch>(s.branch));
    if (const auto* gru = std::get_if<GruResidual>(&s.residual)) n += matmul_elements(*gru, c);
    if (s.cycle_end) n += matmul_elements(*s.cycle_end);
    if (s.dense) n += matmul_elements(*s.dense);
  }
  return n;
}

// FLOPs of a token in a sequence of T, forward and backward: 2 and 4 for each weight, and attention's.
inline double flops_per_token(const ModelConfig& c, const AttentionPlan& plan, int64_t T,
                              const Segments& segments = {}) {
  double attention = 0;  // of a sequence
  for (const Sublayer& s : make_sublayers(c, plan).list)
    if (const auto* lsh = std::get_if<LshBranch>(&s.branch)) attention += attention_flops(*lsh, c, plan, T);
    else if (const AttentionBranch* b = attention_of(s)) attention += attention_flops(*b, c, plan, T, segments);
  return 6 * matmul_parameters(c, plan, segments) + attention / double(T);
}

// The arithmetic of a model, in floating-point operations: what a perfect implementation would have to do, no
// recomputation counted but the flash backward's, no dead K/V rows.
#pragma once
#include <variant>
#include "attention_pairs.h"
#include "attention_plan.h"
#include "config.h"
#include "steps.h"

// Elements of the weights that a token is multiplied with: those of the steps, and the tied head.
inline double matmul_parameters(const ModelConfig& c, const AttentionPlan& plan, const Segments& segments = {}) {
  double n = double(c.vocab_size) * c.channels;
  for (const Step& step : make_steps(c, plan).steps) {
    n += std::visit([&](const auto& branch) { return matmul_elements(branch, c, plan, segments); }, step.branch) +
         std::visit([&](const auto& residual) { return matmul_elements(residual, c); }, step.residual);
    for (const CycleEnd& end : step.cycle_end) n += matmul_elements(end);
  }
  return n;
}

// A token of a sequence of T, forward and backward: 2 and 4 operations a weight, and those of attention.
inline double flops_per_token(const ModelConfig& c, const AttentionPlan& plan, int64_t T,
                              const Segments& segments = {}) {
  double attention = 0;  // of a sequence
  for (const Step& step : make_steps(c, plan).steps)
    attention +=
        std::visit([&](const auto& branch) { return attention_flops(branch, c, plan, T, segments); }, step.branch);
  return 6 * matmul_parameters(c, plan, segments) + attention / double(T);
}

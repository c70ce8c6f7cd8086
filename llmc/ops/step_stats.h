#pragma once
#include <cmath>
#include <cstddef>
#include "llmc/base/host_device.h"
#include "precision.h"

// Sums over a step, in the device's memory, where the operations add them up and the update reads them. Ranks sum them
// up in one collective, from grad_squares (ZeRO-1) or loss on. Gradients are computed for the mean over all tokens, to
// which a token that is not scored adds a loss of 0: how many are scored is known only with them. In fp16 they are
// multiplied by the loss scale.
struct StepStats {
  double grad_squares;    // the sum of the squares of all these gradients
  double loss;            // over micro-batches: the sum of the losses of scored tokens, in nats, / B T
  double ponder = 0;      // over micro-batches: the sum of N + R (halting.h) of the same tokens / B T
  double scored = 0;      // how many tokens are scored,
  double tokens = 0;      //   of how many,
  double correct = 0;     //   and of how many scored ones the logit is the largest; not counted in training
  double text_nats = 0;   // over the scored tokens that stand for text: the sum of their losses,
  double text_bytes = 0;  //   and how many bytes they stand for; only in validation
  // What ranks tell each other, not used by the update: positive if one asks to stop after this step, and if one has
  // not written its shard of a checkpoint yet.
  double stop_requests = 0, unwritten_shards = 0;
  double loss_scale = 1;  // in fp16: what losses are multiplied by in the backward pass; no sum

  // Gradients times this are gradients of the mean over scored tokens. They are zero where none is scored.
  SLA_HOST_DEVICE double grad_weight() const {
    const double weight = 0 < scored && scored < tokens ? tokens / scored : 1;
    return is_fp16 ? weight / loss_scale : weight;
  }
  // The 2-norm of the gradients of the mean over scored tokens.
  SLA_HOST_DEVICE double grad_norm() const { return sqrt(grad_squares) * grad_weight(); }
  // The loss and the gradients' norm are finite; else an update changes nothing.
  SLA_HOST_DEVICE bool is_finite() const { return std::isfinite(loss) && std::isfinite(grad_squares); }
  // What an update multiplies gradients by: the weight of scored tokens, and the factor that clips gradients of that
  // norm (grad_clip: the largest; 0: none); NaN if nothing is to be updated.
  SLA_HOST_DEVICE float grad_factor(double grad_clip) const {
    if (!is_finite()) return NAN;
    const double clip = grad_clip / (grad_norm() + 1e-6);
    return float((grad_clip > 0 && clip < 1 ? clip : 1.0) * grad_weight());
  }
  // The mean over scored tokens of `loss` or `ponder`; NaN where none is scored. `rows`: the divisor, B T.
  double mean(double sum, double rows) const { return scored > 0 ? sum / (scored / rows) : NAN; }
};
static_assert(sizeof(StepStats) == 11 * sizeof(double));

// How many sums `loss` begins, and flags `stop_requests` begins: what gpt2_update sums over the ranks.
constexpr int num_loss_sums = int((offsetof(StepStats, stop_requests) - offsetof(StepStats, loss)) / sizeof(double)),
              num_flags = int((offsetof(StepStats, loss_scale) - offsetof(StepStats, stop_requests)) / sizeof(double));

// The loss scale of these sums, which the backward pass multiplies the weights of losses by. It is read in the memory
// of the device, so that a CUDA graph is not captured again when it changes. Only fp16 has one.
struct LossScaleView {
  const double* scale = nullptr;  // null: 1

  LossScaleView() = default;
  explicit LossScaleView(const StepStats* stats) : scale(&stats->loss_scale) {}
  SLA_HOST_DEVICE float times(float weight) const {
    return is_fp16 && scale != nullptr ? float(weight * *scale) : weight;
  }
};

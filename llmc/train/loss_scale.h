// Dynamic loss scaling (Micikevicius et al. 2018), for training in fp16, whose smallest number is 6e-8: losses are
// multiplied by the scale before the backward pass, so that gradients of activations are not rounded to zero, and
// gradients of parameters, which are fp32, are divided by it.
#pragma once
#include <cstdint>

struct LossScale {
  static constexpr int64_t first = 1 << 16, largest = 1 << 24, doubled_after = 1000;

  int64_t scale = first;     // a power of two: to multiply or divide by it rounds nothing
  int64_t good_updates = 0;  // since the scale was last changed

  // Whether the scale explains gradients that are infinite or NaN. Where it is 1 they are so by themselves, and where
  // the loss is not finite the forward pass has failed.
  bool explains(bool loss_is_finite, bool norm_is_finite) const {
    return loss_is_finite && !norm_is_finite && scale > 1;
  }
  void count_overflow() { scale /= 2, good_updates = 0; }
  void count_good_update() {
    if (++good_updates < doubled_after) return;
    good_updates = 0;
    if (scale < largest) scale *= 2;
  }
};

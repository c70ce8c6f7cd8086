// How many sequences fit into memory.
#pragma once
#include <cstddef>
#include "llmc/base/memory_plan.h"

// The largest micro-batch whose plan takes at most `available` bytes; 0 if one sequence is too many. plan_of(B) is the
// plan of B sequences, in which everything but the logits grows with B: chunks of logits are of equal size, so their
// bytes go up and down from one B to the next.
template <class PlanOf>
int largest_micro_batch(size_t available, const PlanOf& plan_of) {
  auto fits = [&](int B, bool with_logits) {
    const MemoryPlan plan = plan_of(B);
    return plan.total() - (with_logits ? 0 : plan[MemoryGroup::logits]) <= available;
  };
  constexpr int most = 1 << 30;
  int fitting = 0, too_many = 1;  // micro-batches that fit, and do not fit, without the logits
  while (too_many < most && fits(too_many, false)) fitting = too_many, too_many *= 2;
  while (too_many - fitting > 1) {
    const int middle = fitting + (too_many - fitting) / 2;
    (fits(middle, false) ? fitting : too_many) = middle;
  }
  while (fitting > 0 && !fits(fitting, true)) fitting--;
  return fitting;
}

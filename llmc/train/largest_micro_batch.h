// How many sequences fit into memory.
#pragma once
#include <cstddef>
#include "llmc/base/memory_plan.h"

// The largest micro-batch whose plan takes at most `available` bytes; 0 if one sequence is too many. plan_of(B) is the
// plan of B sequences, in which everything but the logits grows with B: chunks of logits are of equal size,
// logit_rows_of(B), which goes up and down from one B to the next, and is the same for many B if sequences are short.
template <class PlanOf, class LogitRowsOf>
int largest_micro_batch(size_t available, const PlanOf& plan_of, const LogitRowsOf& logit_rows_of) {
  auto fits = [&](int B, bool with_logits) {
    const MemoryPlan plan = plan_of(B);
    return plan.total() - (with_logits ? 0 : plan[MemoryGroup::logits]) <= available;
  };
  auto bisect = [&](int fitting, int too_many, bool with_logits) {
    while (too_many - fitting > 1) {
      const int middle = fitting + (too_many - fitting) / 2;
      (fits(middle, with_logits) ? fitting : too_many) = middle;
    }
    return fitting;
  };
  constexpr int most = 1 << 30;
  int fitting = 0, too_many = 1;
  while (too_many < most && fits(too_many, false)) fitting = too_many, too_many *= 2;
  for (int last = bisect(fitting, too_many, false); last > 0;) {
    int first = last;  // the smallest micro-batch with as many rows of logits
    while (first > 1 && logit_rows_of(first - 1) == logit_rows_of(last)) first--;
    if (fits(first, true)) return bisect(first, last + 1, true);
    last = first - 1;
  }
  return 0;
}

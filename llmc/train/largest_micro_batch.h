// How many sequences fit into memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include "llmc/model/gpt2.h"

// The largest micro-batch of sequences of o.T tokens that a device takes, and whose plan takes at most `available`
// bytes; 0 if one sequence is too many. Everything but the logits grows with it: chunks of logits are of equal size,
// which goes up and down from one micro-batch to the next, and is the same for many if sequences are short.
inline int largest_micro_batch(size_t available, const ModelConfig& config, const PlanOptions& o) {
  auto fits = [&](int B, bool with_logits) {
    const MemoryPlan plan = gpt2_memory_plan(config, B, o);
    return plan.total() - (with_logits ? 0 : plan[MemoryGroup::logits]) <= available;
  };
  auto bisect = [&](int fitting, int too_many, bool with_logits) {
    while (too_many - fitting > 1) {
      const int middle = fitting + (too_many - fitting) / 2;
      (fits(middle, with_logits) ? fitting : too_many) = middle;
    }
    return fitting;
  };
  auto logit_rows_of = [&](int B) { return planned_logit_rows(config, int64_t(B) * o.T, o.logit_bytes); };
  const int most = most_sequences(config, o.T);
  int fitting = 0, too_many = 1;
  while (too_many <= most && fits(too_many, false))
    fitting = too_many, too_many = too_many > most / 2 ? most + 1 : 2 * too_many;
  for (int last = bisect(fitting, too_many, false); last > 0;) {
    int first = last;  // the smallest micro-batch with as many rows of logits
    while (first > 1 && logit_rows_of(first - 1) == logit_rows_of(last)) first--;
    if (fits(first, true)) return bisect(first, last + 1, true);
    last = first - 1;
  }
  return 0;
}

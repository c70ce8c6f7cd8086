// The memory plan as a run uses it: printed before anything is allocated, compared with what is free.
#pragma once
#include <cstdio>
#include "llmc/utils/error.h"
#include "llmc/utils/memory_plan.h"
#include "logger.h"
#include "print.h"

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

// What the plan is compared with.
struct MemoryLimits {
  size_t available;     // on the device, its workspaces included
  size_t host_bytes;    // to be allocated in host memory for checkpoints
  bool device_is_host;  // the device's memory is the host's: host_bytes count too
  size_t reserve;       // of the device's memory, to be kept free
  const char* device_name;
  int largest_micro_batch;    // the largest one that fits
  double bytes_per_sequence;  // without the logits
};

// Throws UserError if the plan does not fit. `recompute_more`: a level of recomputation that takes less exists.
inline void print_memory_plan(const MemoryPlan& plan, const MemoryLimits& limits, bool recompute_more) {
  const size_t beside = limits.device_is_host ? limits.host_bytes : 0, total = plan.total() + beside + limits.reserve;
  for (int group = 0; group < int(MemoryGroup::count); group++)
    if (plan.bytes[group] > 0)
      printf("  %-26s %10s\n", group_name(MemoryGroup(group)), bytes_text(double(plan.bytes[group])).c_str());
  if (limits.host_bytes > 0)
    printf("  %-26s %10s%s\n", "copy for checkpoints", bytes_text(double(limits.host_bytes)).c_str(),
           beside > 0 ? "" : " of host memory, beside the total");
  if (limits.reserve > 0)
    printf("  %-26s %10s to be kept free\n", "CUDA, its graphs and NCCL", bytes_text(double(limits.reserve)).c_str());
  printf("  %-26s %10s of %s free on the %s\n", "total", bytes_text(double(total)).c_str(),
         bytes_text(double(limits.available)).c_str(), limits.device_name);
  printf("  each sequence takes %s beside the logits; the largest micro-batch that fits is %d\n",
         bytes_text(limits.bytes_per_sequence).c_str(), limits.largest_micro_batch);
  if (total > limits.available)
    user_error("the plan exceeds the free memory by %s; take a smaller -b or -t%s",
               bytes_text(double(total - limits.available)).c_str(),
               recompute_more ? ", or recompute more (-r 4)" : "");
}

// The plan as the log has it: bytes by group.
inline LogFields memory_fields(const MemoryPlan& plan) {
  LogFields fields;
  for (int group = 0; group < int(MemoryGroup::count); group++)
    if (plan.bytes[group] > 0) fields.push_back({group_name(MemoryGroup(group)), int64_t(plan.bytes[group])});
  return fields;
}

// What memory_table.cu and gpu_model.cu have in common.
#pragma once
#include <cstdint>
#include <string>
#include "llmc/model/gpt2.h"
#include "llmc/train/largest_micro_batch.h"

// "1,024"
inline std::string thousands(int64_t n) {
  return n < 1000 ? format("%d", int(n)) : thousands(n / 1000) + format(",%03d", int(n % 1000));
}

// The largest micro-batch of sequences of T tokens that fits on a GPU with `memory` bytes, by the trainer's own plan; 0
// if not one sequence fits.
inline int largest_batch_on(size_t memory, const ModelConfig& config, int T, Recompute recompute) {
  PlanOptions plan = {1, T, recompute};
  plan.logit_bytes = logit_chunk_bytes(memory);
  return largest_micro_batch(memory - device_reserve_bytes(), config, plan);
}

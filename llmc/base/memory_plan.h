// The memory that a model takes, by what it is for.
#pragma once
#include <array>
#include <cstddef>
#include <numeric>

enum class MemoryGroup {
  weights,
  master_weights,
  gradients,
  moments,
  workspaces,
  activations,
  backward,
  dkv_accumulators,
  muon,
  segment_memory,
  logits,
  kv_cache,
  sampling,
  count
};

inline const char* group_name(MemoryGroup group) {
  static const char* names[] = {"weights",          "master weights",     "gradients",        "AdamW moments",
                                "workspaces",       "activations",        "backward buffers", "gradients of shared K/V",
                                "Muon's iteration", "memory of segments", "logits",           "K/V cache",
                                "samples"};
  return names[int(group)];
}

// The bytes that a model takes in each group.
struct MemoryPlan {
  std::array<size_t, size_t(MemoryGroup::count)> bytes = {};

  size_t& operator[](MemoryGroup group) { return bytes[size_t(group)]; }
  size_t operator[](MemoryGroup group) const { return bytes[size_t(group)]; }
  size_t total() const { return std::accumulate(bytes.begin(), bytes.end(), size_t(0)); }
};

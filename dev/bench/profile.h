// The time of each operation of a training step on the CPU, where it runs: included before the trainer, whose calls of
// the operations below it wraps. The operations' headers come first, so calls from one operation to another are part of
// the first.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>
#include "llmc/ops/device_memory.h"
#include "llmc/model/orthogonalize.h"
#include "llmc/operations.h"
#include "llmc/base/clock.h"

struct Profile {
  struct Operation {
    std::string name;
    double seconds = 0;
    int64_t calls = 0;
  };
  std::vector<Operation> operations;
  double (*clock)() = seconds_now;

  // Adds its lifetime to the operation called `name`.
  struct Scope {
    const char* name;
    Profile& profile;
    const double begin;

    Scope(const char* name, Profile& profile) : name(name), profile(profile), begin(profile.clock()) {}
    Scope(const Scope&) = delete;
    ~Scope() { profile.add(name, profile.clock() - begin); }
  };

  void add(const char* name, double seconds) {
    auto it = std::find_if(operations.begin(), operations.end(), [&](const Operation& o) { return o.name == name; });
    if (it == operations.end()) it = operations.insert(it, {name});
    it->seconds += seconds, it->calls++;
  }

  // The seconds that the operations with these names take.
  double seconds_of(const std::vector<std::string>& names) const {
    double sum = 0;
    for (const Operation& o : operations)
      if (std::find(names.begin(), names.end(), o.name) != names.end()) sum += o.seconds;
    return sum;
  }

  // The operations, sorted by time, longest first.
  std::vector<Operation> sorted() const {
    std::vector<Operation> result = operations;
    std::sort(result.begin(), result.end(),
              [](const Operation& a, const Operation& b) { return a.seconds > b.seconds; });
    return result;
  }
};
inline Profile profile;

// The scope lives until the end of the expression in which the operation is called.
#define PROFILED(operation, ...) (Profile::Scope(#operation, profile), operation(__VA_ARGS__))
#define embedding_forward(...) PROFILED(embedding_forward, __VA_ARGS__)
#define layernorm_forward(...) PROFILED(layernorm_forward, __VA_ARGS__)
#define residual_layernorm_forward(...) PROFILED(residual_layernorm_forward, __VA_ARGS__)
#define matmul_forward(...) PROFILED(matmul_forward, __VA_ARGS__)
#define matmul_activation_forward(...) PROFILED(matmul_activation_forward, __VA_ARGS__)
#define norm_heads(...) PROFILED(norm_heads, __VA_ARGS__)
#define norm_heads_backward(...) PROFILED(norm_heads_backward, __VA_ARGS__)
#define attention_forward(...) PROFILED(attention_forward, __VA_ARGS__)
#define mix_values(...) PROFILED(mix_values, __VA_ARGS__)
#define mix_values_backward(...) PROFILED(mix_values_backward, __VA_ARGS__)
#define mix_heads(...) PROFILED(mix_heads, __VA_ARGS__)
#define mix_heads_backward(...) PROFILED(mix_heads_backward, __VA_ARGS__)
#define depth_attention_forward(...) PROFILED(depth_attention_forward, __VA_ARGS__)
#define depth_attention_backward(...) PROFILED(depth_attention_backward, __VA_ARGS__)
#define weighted_sum(...) PROFILED(weighted_sum, __VA_ARGS__)
#define weighted_sum_backward(...) PROFILED(weighted_sum_backward, __VA_ARGS__)
#define lsh_hash(...) PROFILED(lsh_hash, __VA_ARGS__)
#define lsh_sort(...) PROFILED(lsh_sort, __VA_ARGS__)
#define lsh_forward(...) PROFILED(lsh_forward, __VA_ARGS__)
#define lsh_backward(...) PROFILED(lsh_backward, __VA_ARGS__)
#define stream_add(...) PROFILED(stream_add, __VA_ARGS__)
#define copy_rows(...) PROFILED(copy_rows, __VA_ARGS__)
#define classifier(...) PROFILED(classifier, __VA_ARGS__)
#define cap_logits(...) PROFILED(cap_logits, __VA_ARGS__)
#define gemm(...) PROFILED(gemm, __VA_ARGS__)
#define matmul_backward(...) PROFILED(matmul_backward, __VA_ARGS__)
#define matmul_activation_backward(...) PROFILED(matmul_activation_backward, __VA_ARGS__)
#define attention_backward(...) PROFILED(attention_backward, __VA_ARGS__)
#define layernorm_backward(...) PROFILED(layernorm_backward, __VA_ARGS__)
#define embedding_backward(...) PROFILED(embedding_backward, __VA_ARGS__)
#define activation_forward(...) PROFILED(activation_forward, __VA_ARGS__)
#define device_memset(...) PROFILED(device_memset, __VA_ARGS__)
#define sum_of_squares(...) PROFILED(sum_of_squares, __VA_ARGS__)
#define adamw_update(...) PROFILED(adamw_update, __VA_ARGS__)
#define muon_momentum(...) PROFILED(muon_momentum, __VA_ARGS__)
#define update_by_muon(...) PROFILED(update_by_muon, __VA_ARGS__)

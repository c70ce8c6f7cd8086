// Collectives of a build without NCCL, in place of collectives.h: for a single process, in which they do nothing.
#pragma once
#include <cstddef>
#include <cstdint>
#include "ranks.h"
#include "llmc/utils/error.h"

struct RankChannel;
struct ParameterBucket;

struct Collectives {
  Collectives() = default;
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  // Throws UserError if there are several ranks.
  static void check_supported(const Ranks& ranks) {
    if (ranks.size > 1)
      user_error("one of %d ranks, but this program was built without NCCL and trains in a single process; start it "
                 "alone, or with --ranks 1",
                 ranks.size);
  }
  void init(const Ranks&, RankChannel&) {}
  constexpr int rank() const { return 0; }
  constexpr int size() const { return 1; }
  void comm_waits_for_compute() {}
  void compute_waits_for_comm() {}
  void mark(size_t) {}
  void await(size_t) {}
  template <class Event>
  void record(Event&) {}
  void wait() const {}
  template <class T>
  void all_reduce(T*, int64_t) {}
  void reduce_to_owners(float*, const ParameterBucket&) {}
  template <class T>
  void gather_from_owners(T*, const ParameterBucket&, const T* = nullptr) {}
  void finalize() {}
};

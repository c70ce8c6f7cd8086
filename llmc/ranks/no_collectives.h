// Collectives of a build without NCCL, in place of collectives.h: for a single process, in which they do nothing.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include "ranks.h"
#include "llmc/base/error.h"

struct Watchdog;
struct ParameterBucket;

struct Collectives {
  // Throws UserError if there are several ranks.
  void init(const Ranks& ranks, Watchdog&, double) {
    if (ranks.size > 1)
      user_error("one of %d ranks, but this program was built without NCCL and trains in a single process; start it "
                 "alone",
                 ranks.size);
  }
  constexpr int rank() const { return 0; }
  constexpr int size() const { return 1; }
  void broadcast(void*, size_t, int = 0) {}
  std::string broadcast(std::string text) { return text; }
  template <class F>
  void together(const F& what) {
    what();
  }
  template <class F>
  void all_equal(const char*, const F&) {}
  void comm_waits_for_compute() {}
  void compute_waits_for_comm() {}
  void mark(size_t) {}
  void await(size_t) {}
  template <class Event>
  void record(Event&) {}
  void wait() const {}
  void all_reduce(void*, int64_t) {}
  void reduce_to_owners(float*, const ParameterBucket&) {}
  void gather_from_owners(void*, const ParameterBucket&, const void* = nullptr) {}
  void finalize() {}
};

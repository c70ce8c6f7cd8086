// The memory that operations work on, here the host's: the functions of llmc/ops/device_memory.h, and what copies,
// events and graphs are where every operation is done when its call returns.
#pragma once
#include <sys/mman.h>
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include "llmc/ops/device_memory.h"
#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/base/meminfo.h"
#include "threads.h"

constexpr int head_size_multiple = 1, largest_head_size = 1 << 20, largest_channels = 1 << 20;  // any will do
constexpr int largest_batch = 1 << 30;
constexpr int64_t largest_rows = int64_t(1) << 40;

// How many tokens of a prompt, and of texts that are scored, are computed at a time: enough for matmuls to run at their
// full rate.
constexpr int64_t prompt_rows = 256, scoring_rows = 1024;

inline const char* device_name() { return "CPU"; }
inline bool wgmma_is_asked_for() { return false; }

inline size_t device_workspace_bytes() { return 0; }
inline size_t device_reserve_bytes() { return 0; }

inline void* device_malloc(size_t bytes) {
  if (bytes == 0) return nullptr;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) user_error("out of memory: could not allocate %zu bytes", bytes);
  madvise(p, bytes, MADV_HUGEPAGE);  // fewer page faults and TLB misses; advice, which may fail
  return p;
}

inline void device_free(void* p, size_t bytes) {
  if (p != nullptr) munmap(p, bytes);
}

inline void device_memset(void* p, int value, size_t bytes) {
  const int64_t block = 1 << 20;
#pragma omp parallel for schedule(static) if (is_worth_threads(int64_t(bytes)))
  for (int64_t i = 0; i < int64_t(bytes); i += block)
    memset(static_cast<char*>(p) + i, value, std::min(block, int64_t(bytes) - i));
}

// Bytes a second, read and written, of a copy of so many bytes by all threads: the best of `seconds` seconds of runs.
inline double copy_bandwidth(size_t bytes, double seconds) {
  const int64_t block = 1 << 18;
  char* const memory = static_cast<char*>(device_malloc(2 * bytes));
  device_memset(memory, 1, 2 * bytes);
  double best = 1e30;
  const double start = seconds_now();
  for (int run = 0; run < 3 || seconds_now() - start < seconds; run++) {
    const double begin = seconds_now();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < int64_t(bytes); i += block)
      memcpy(memory + bytes + i, memory + i, size_t(std::min(block, int64_t(bytes) - i)));
    best = std::min(best, seconds_now() - begin);
  }
  device_free(memory, 2 * bytes);
  return 2.0 * double(bytes) / best;
}

inline void copy_to_device(void* device, const void* host, size_t bytes) { memcpy(device, host, bytes); }
inline void copy_to_host(void* host, const void* device, size_t bytes) { memcpy(host, device, bytes); }

// Nothing is copied beside computation here.
inline void* pinned_malloc(size_t bytes) { return device_malloc(bytes); }
inline void pinned_free(void* p, size_t bytes) { device_free(p, bytes); }

// Tokens to upload: `device` (count) = `host`. No operation runs during a copy, so there are no staging buffers.
constexpr int num_staging_buffers = 0;
struct Upload {
  int* device;
  std::array<int*, num_staging_buffers> staging;
  const int* host;
  size_t count;
};

// Copies the uploads; operations that are called from here on read them.
inline void upload(std::initializer_list<Upload> uploads) {
  for (const Upload& u : uploads) copy_to_device(u.device, u.host, u.count * sizeof(int));
}

inline void uploads_wait_for_compute() {}  // every operation is done when its call returns

// Work that is queued repeatedly with the same arguments (Key...) on the same memory. On a GPU it becomes a CUDA graph;
// here it is eager.
template <class... Key>
struct CudaGraph {
  template <class Enqueue>
  void run(const Enqueue& enqueue, const Key&... key) {
    enqueue(key...);
  }
};

// The time at which the operations called before record() are done: the time of record() itself.
struct GpuEvent {
  std::chrono::steady_clock::time_point time;
  void record() { time = std::chrono::steady_clock::now(); }
  double ms_since(const GpuEvent& earlier) const {
    return std::chrono::duration<double, std::milli>(time - earlier.time).count();
  }
};

constexpr bool device_memory_is_host_memory = true;

// What the machine and the control groups of this process have left.
inline size_t device_memory_available() { return host_memory_available(); }

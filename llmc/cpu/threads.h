// How many threads an operation runs on, and how they wait for each other.
#pragma once
#include <omp.h>
#include <unistd.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include "llmc/base/cgroup.h"

// To wake threads and to wait for the last of them takes 10 us to 100 us, and a time slice where the machine has other
// work. What a core does in less runs on the thread that calls it: operations of fewer bytes read and written, or FLOPs
// in matmuls. It is all threads or one, because libgomp ends those that a smaller team does not need and starts new
// ones for the next.
constexpr int64_t least_parallel_bytes = 2 << 20, least_parallel_flops = 16 << 20;

// For OpenMP's `if`. No result depends on it: the order of each sum depends on the shape alone.
inline bool is_worth_threads(int64_t bytes, int64_t flops = 0) {
  return bytes >= least_parallel_bytes || flops >= least_parallel_flops;
}

// Sets how many threads there are and how they wait, where the program's user has not. libgomp counts the processors
// that the process may run on, but not how much of their time it may have: with more threads than that all of them are
// stopped for most of the time. And libgomp's threads spin for milliseconds while they wait, where other programs run
// on the core of the very thread that they wait for. So many looks for work, about 10 us, bridge the time between two
// operations: on an idle machine steps take 5 % longer than with threads that never sleep, and 20 % longer with threads
// that sleep at once. Threads are not bound to cores: where other programs took their turns on two cores, steps of
// bound threads took 1.5 to 4 times as long. libgomp reads the environment when it is loaded: this starts the program
// anew, as the same process, unless nothing is to be changed. `argv`: main's. `spins`: how many looks; generation,
// whose operations are as short as the time in between, takes ten times as many: it draws up to a tenth more tokens a
// second then.
inline void configure_threads(char** argv, const char* spins = "2000") {
  bool changed = false;
  const double allowed = std::max(1.0, std::ceil(processors_allowed()));
  if (getenv("OMP_NUM_THREADS") == nullptr && allowed < omp_get_max_threads())
    changed = setenv("OMP_NUM_THREADS", std::to_string(int(allowed)).c_str(), 1) == 0;
  const bool has_several = omp_get_max_threads() > 1 && !(changed && allowed == 1);
  if (has_several && getenv("OMP_WAIT_POLICY") == nullptr && getenv("GOMP_SPINCOUNT") == nullptr)
    changed |= setenv("GOMP_SPINCOUNT", spins, 1) == 0;
  if (!changed) return;
  std::error_code error;
  // The program is started by its own name, which `ps` shows.
  const std::string program = std::filesystem::read_symlink("/proc/self/exe", error);
  execv(program.c_str(), argv);  // it returns if that cannot be done: slower on a busy machine, and otherwise the same
}

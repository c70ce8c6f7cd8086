// How many threads an operation runs on, and how they wait for each other.
#pragma once
#include <omp.h>       // omp_get_max_threads
#include <unistd.h>    // execv
#include <cstdint>     // int64_t
#include <cstdlib>     // getenv, setenv
#include <filesystem>  // std::filesystem::read_symlink
#include <string>      // std::string

// To wake threads and to wait for the last of them takes 10 us to 100 us, and a time slice where the machine has other work. What a core
// does in less runs on the thread that calls it: operations of fewer bytes read and written, or FLOPs in matmuls. It is all threads or
// one, because libgomp ends those that a smaller team does not need and starts new ones for the next.
constexpr int64_t least_parallel_bytes = 2 << 20, least_parallel_flops = 16 << 20;

// For OpenMP's `if`. No result depends on it: the order of each sum depends on the shape alone.
inline bool is_worth_threads(int64_t bytes, int64_t flops = 0) {
  return bytes >= least_parallel_bytes || flops >= least_parallel_flops;
}

// Makes threads sleep soon while they wait for each other. libgomp's spin for milliseconds otherwise, and where other programs run, on the
// core of the very thread that they wait for. So many looks for work, about 10 us, bridge the time between two operations: on an idle
// machine steps take 5 % longer than with threads that never sleep, and 20 % longer with threads that sleep at once. libgomp reads the
// environment when it is loaded: this starts the program anew, as the same process, unless it has one thread or its user chose otherwise.
// `argv`: main's.
inline void sleep_while_idle(char** argv) {
  if (omp_get_max_threads() == 1 || getenv("OMP_WAIT_POLICY") != nullptr || getenv("GOMP_SPINCOUNT") != nullptr) return;
  std::error_code error;
  const std::string program = std::filesystem::read_symlink("/proc/self/exe", error);  // by its own name, which `ps` shows
  setenv("GOMP_SPINCOUNT", "2000", 1);
  execv(program.c_str(), argv);  // it returns if that cannot be done: slower on a busy machine, and otherwise the same
}

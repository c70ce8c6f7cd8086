// Declarations that the emulator's own files share. The emulated program includes only include/.
//
//   report.cpp         reports the kernel, block and thread in which something went wrong, and aborts
//   memory.cpp         device memory: allocation, poison, range checks, and closing it while host code runs
//   block.cpp          runs one kernel: blocks, fibers, barriers, warp collectives
//   shared_memory.cpp  what threads do with shared memory, in kernels that g++ has compiled
//   races.cpp          which accesses to shared memory no barrier orders
//   tensor_core.cpp    what an mma, an ldmatrix and a cp.async do
//   runtime.cpp        the runtime API: streams, events, copies, launches
//   cublaslt.cpp       cuBLASLt on oneDNN's sgemm
//   nccl.cpp           NCCL on a file that the ranks of a machine share
//   symbols.cpp        the names of functions
//   ptx/               executes nvcc's PTX in place of the kernels that g++ has compiled
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>
#include "cuda_runtime.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emu {

// ----------------------------------------------------------------------------
// AddressSanitizer, or nothing. Without it the program runs faster and unchecked.

#if defined(__SANITIZE_ADDRESS__)
inline void poison(const void* p, size_t bytes) { __asan_poison_memory_region(p, bytes); }
inline void unpoison(const void* p, size_t bytes) { __asan_unpoison_memory_region(p, bytes); }
inline const void* first_poisoned(const void* p, size_t bytes) {
  return __asan_region_is_poisoned(const_cast<void*>(p), bytes);
}
#else
inline void poison(const void*, size_t) {}
inline void unpoison(const void*, size_t) {}
inline const void* first_poisoned(const void*, size_t) { return nullptr; }
#endif

// Sets bytes without ASan's checks: newly allocated memory, shared memory, and gaps that a memset may overwrite.
// Volatile, or the compiler would make it a call of memset, which ASan intercepts.
__attribute__((no_sanitize("address"))) inline void fill(void* p, int value, size_t bytes) {
  auto* at = static_cast<volatile unsigned char*>(p);
  auto* const end = at + bytes;
  for (; at < end && reinterpret_cast<uintptr_t>(at) % 8 != 0; at++) *at = static_cast<unsigned char>(value);
  const uint64_t word = 0x0101010101010101u * static_cast<unsigned char>(value);
  for (; end - at >= 8; at += 8) *reinterpret_cast<volatile uint64_t*>(at) = word;
  for (; at < end; at++) *at = static_cast<unsigned char>(value);
}

// ----------------------------------------------------------------------------
// Random orders

// splitmix64: two multiplications a draw, and every seed is a good one.
struct Random {
  uint64_t state;

  uint32_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return uint32_t(z >> 32);
  }
  uint32_t below(uint32_t n) { return uint32_t(uint64_t(next()) * n >> 32); }
  template <class T>
  void shuffle(T* items, uint32_t n) {
    for (uint32_t i = n; i > 1; i--) std::swap(items[i - 1], items[below(i)]);
  }
};
extern Random rng;  // of everything

// ----------------------------------------------------------------------------
// report.cpp

// What is running, for messages. In a kernel, threadIdx and blockIdx are the thread's.
struct Running {
  const char* operation = nullptr;  // "cudaMemcpyAsync", ...: null while host code runs
  const char* kernel = nullptr;     // demangled: null unless a kernel runs
  bool in_thread = false;           // a CUDA thread runs, rather than the emulator between two of them
};
Running& running();

// Prints one line, `emulated GPU: in <where>: <what>`, and the stack, and aborts.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fatal(const char* format, ...);

void install_signal_handler();  // for SIGSEGV: host code on device memory, stack overflow in a kernel

// ----------------------------------------------------------------------------
// memory.cpp

// Device memory is closed to host code: pages have no access rights unless one of these lives.
struct OpenMemory {
  OpenMemory();
  ~OpenMemory();
  OpenMemory(const OpenMemory&) = delete;
};

// Device and pinned host memory. The first two return nullptr if not enough memory is left, the others false if p was
// not allocated here.
void* allocate(size_t bytes);
void* allocate_pinned(size_t bytes);
bool release(void* p);
bool release_pinned(void* p);

size_t memory_available();  // bytes: of SLA_EMU_MEMORY, or of the machine
size_t memory_total();

// What the real libraries allocate on the device when they are first used: a kernel's code is loaded at the first
// launch, NCCL connects in init or at the first collective. False if not enough memory is left.
enum class Library { modules, graphs, nccl };
bool take_for(Library library);

bool is_device_memory(const void* p);             // in the reserved range, allocated or not
bool is_accessible(const void* p, size_t bytes);  // device memory, allocated and not poisoned
bool is_pinned(const void* p, size_t bytes);

// Aborts, naming `what`, unless the bytes are within one device allocation and, with Gaps::refuse, none of them is
// poisoned.
enum class Gaps { refuse, allow };
void check_device_range(const char* what, const void* p, size_t bytes, Gaps gaps = Gaps::refuse);

// "byte 4096 of a device allocation of 4096 bytes", into `text`, without allocating; false if p is nowhere near one.
bool describe_device_address(const void* p, char* text, size_t size);

// ----------------------------------------------------------------------------
// block.cpp

struct Launch {
  dim3 grid, block;
  size_t shared_bytes;
  std::function<void()> thread;  // runs the kernel for one thread
};
void run_kernel(const Launch& launch);
void open_shared_memory(size_t bytes);    // while a kernel runs
void close_shared_memory();               // for all code
bool in_fiber_guard_page(const void* p);  // p is where a fiber's stack overflows to

constexpr size_t max_shared_bytes = 227 * 1024;   // of a block, on compute capability 9.0
constexpr size_t fiber_stack_bytes = 256 * 1024;  // ASan's red zones make frames several times as large as they are

// ----------------------------------------------------------------------------
// tensor_core.cpp

// A thread's asynchronous copies that it has not waited for yet, oldest first.
struct AsyncCopy {
  void* to;
  const void* from;
  int bytes, bytes_read;
  const void* code;  // where it was started
};
struct AsyncCopies {
  std::vector<AsyncCopy> pending;
  std::vector<size_t> groups;  // how many of them are in each committed group; the rest are in none

  void clear() { pending.clear(), groups.clear(); }
};
AsyncCopies& copies_of_thread();  // in block.cpp: of the thread that runs
bool copies_are_late();           // in block.cpp: in this block they run when they are waited for, not at once
bool has_async_copies();          // in runtime.cpp: before compute capability 8.0 threads copy themselves
uint32_t number_of_thread();      // in block.cpp: of the thread that runs, in its block

// Called when all 32 lanes have reached the instruction, with a pointer to each lane's operands.
void run_mma(void* const (&operands)[32]);
void run_ldmatrix(uint32_t warp, void* const (&operands)[32], bool transposed);

// ----------------------------------------------------------------------------
// shared_memory.cpp: accesses to shared memory, and races between them (races.h), in kernels that g++ has compiled.
// `code` is an address in the program.

bool looks_for_races();
void begin_accesses(size_t shared_bytes);  // of a launch
void end_all_accesses();
void begin_block_accesses(uint32_t num_warps);
void end_accesses();                                          // the thread that runs waits for others, or ends
void order_accesses_of_warps(uint32_t warps);                 // bits: a barrier of all their threads
void order_accesses_of_lanes(uint32_t warp, uint32_t lanes);  // bits: a __syncwarp; of all lanes: 0xffffffff
void matrix_row_is_read(uint32_t warp, const void* row, const void* code);  // by all lanes
void copy_starts(const AsyncCopy& copy);                                    // of the thread that runs
void copy_ends(uint32_t thread, const AsyncCopy& copy);                     // it has been waited for

// ----------------------------------------------------------------------------
// symbols.cpp

// The mangled name of the function that begins here; "" if the program's file does not say.
std::string symbol_at(const void* function);

// ----------------------------------------------------------------------------
// runtime.cpp

// Queues an operation on a stream, or makes it a node of the graph that is being captured there: then it runs as often
// as the graph is launched. `name` is a string constant. Fails if the capture has been lost.
cudaError_t enqueue(const char* name, cudaStream_t stream, std::function<void()> run);
cudaError_t enqueue_launch(const char* name, cudaStream_t stream, std::function<void()> run);  // a kernel or a matmul:
                                                                                               // counted
Counters& mutable_counters();

}  // namespace emu

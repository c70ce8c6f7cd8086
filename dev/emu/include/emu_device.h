// What a kernel may use, for g++: the keywords of the CUDA language, vector types, indices, barriers, warp collectives,
// atomics and intrinsics, with the names and the overloads of the real headers. Included by this folder's
// cuda_runtime.h only.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

// ----------------------------------------------------------------------------
// The language

#define __global__ inline  // not compiled where nothing launches it; several objects of a program may have it
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))

// Shared memory is dynamic: `extern __shared__ __align__(1024) unsigned char shared_memory[];`, and the emulator
// defines it. A `__shared__` array inside a function would silently become a private array of each thread. "weak"
// changes nothing for the extern declaration and makes the compiler refuse the other.
#define __shared__ __attribute__((weak))

// Vector types, aligned as on the GPU: -fsanitize=alignment then sees every vector load and store that a GPU faults on.
struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) double2 {
  double x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

// Set by the emulator each time that a thread continues. One OS thread runs every CUDA thread, so these are plain
// globals.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
extern const int warpSize;  // not a constant expression for nvcc either

// ----------------------------------------------------------------------------
// Barriers and warp collectives. Threads of a block are fibers; each of these runs other threads until all that
// take part have reached it.

namespace emu {

// The line of the kernel's source that a thread is in: for messages, and because threads must synchronize in the same
// statement.
struct Site {
  const char* file;
  int line;
  static Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

enum class SyncPoint {
  syncthreads,
  syncthreads_or,
  syncthreads_and,
  syncthreads_count,  // of a block
  bar_sync,           // of some warps of a block
  syncwarp,
  shfl,
  shfl_up,
  shfl_down,
  shfl_xor,
  ballot,
  any,
  all,  // of the lanes of a mask
  reduce_add,
  reduce_min_signed,
  reduce_max_signed,
  reduce_min_unsigned,
  reduce_max_unsigned,
  mma,
  ldmatrix,
  ldmatrix_trans  // of a whole warp
};

// All threads of the block. Returns how many of them have a predicate other than 0.
int meet_block(SyncPoint sync_point, int predicate, Site site);

// PTX's bar.sync: `threads` threads of the block, at its barrier 1 to 15. __syncthreads is barrier 0.
void bar_sync(int barrier, int threads, Site site = Site::here());

// All lanes of `mask`. `value`: this lane's bits; `operand`: source lane, delta or xor mask of a shuffle;
// `width`: lanes of a shuffle's segment. Returns the bits that this lane gets.
uint64_t meet_warp(SyncPoint sync_point, unsigned mask, uint64_t value, int operand, int width, Site site);

template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits in another type");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <class T>
T shuffle(SyncPoint sync_point, unsigned mask, T value, int operand, int width, Site site) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = meet_warp(sync_point, mask, bits, operand, width, site);
  memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace emu

#define EMU_SITE emu::Site site = emu::Site::here()

inline void __syncthreads(EMU_SITE) { emu::meet_block(emu::SyncPoint::syncthreads, 0, site); }
inline int __syncthreads_or(int predicate, EMU_SITE) {
  return emu::meet_block(emu::SyncPoint::syncthreads_or, predicate, site) > 0;
}
inline int __syncthreads_and(int predicate, EMU_SITE) {
  return emu::meet_block(emu::SyncPoint::syncthreads_and, predicate, site) == int(blockDim.x * blockDim.y * blockDim.z);
}
inline int __syncthreads_count(int predicate, EMU_SITE) {
  return emu::meet_block(emu::SyncPoint::syncthreads_count, predicate, site);
}

inline void __syncwarp(unsigned mask = 0xffffffff, EMU_SITE) {
  emu::meet_warp(emu::SyncPoint::syncwarp, mask, 0, 0, 32, site);
}

// The overloads of the real header: a short is shuffled as an int, a bool too.
#define EMU_SHUFFLES(T)                                                                         \
  inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMU_SITE) {            \
    return emu::shuffle(emu::SyncPoint::shfl, mask, value, lane, width, site);                  \
  }                                                                                             \
  inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_SITE) {   \
    return emu::shuffle(emu::SyncPoint::shfl_up, mask, value, int(delta), width, site);         \
  }                                                                                             \
  inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_SITE) { \
    return emu::shuffle(emu::SyncPoint::shfl_down, mask, value, int(delta), width, site);       \
  }                                                                                             \
  inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMU_SITE) {   \
    return emu::shuffle(emu::SyncPoint::shfl_xor, mask, value, lane_mask, width, site);         \
  }
EMU_SHUFFLES(int)
EMU_SHUFFLES(unsigned)
EMU_SHUFFLES(long)
EMU_SHUFFLES(unsigned long)
EMU_SHUFFLES(long long)
EMU_SHUFFLES(unsigned long long)
EMU_SHUFFLES(float)
EMU_SHUFFLES(double)
#undef EMU_SHUFFLES

inline unsigned __ballot_sync(unsigned mask, int predicate, EMU_SITE) {
  return unsigned(emu::meet_warp(emu::SyncPoint::ballot, mask, predicate != 0, 0, 32, site));
}
inline int __any_sync(unsigned mask, int predicate, EMU_SITE) {
  return int(emu::meet_warp(emu::SyncPoint::any, mask, predicate != 0, 0, 32, site));
}
inline int __all_sync(unsigned mask, int predicate, EMU_SITE) {
  return int(emu::meet_warp(emu::SyncPoint::all, mask, predicate != 0, 0, 32, site));
}

inline unsigned __reduce_add_sync(unsigned mask, unsigned value, EMU_SITE) {
  return unsigned(emu::meet_warp(emu::SyncPoint::reduce_add, mask, value, 0, 32, site));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value, EMU_SITE) {
  return unsigned(emu::meet_warp(emu::SyncPoint::reduce_min_unsigned, mask, value, 0, 32, site));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, EMU_SITE) {
  return unsigned(emu::meet_warp(emu::SyncPoint::reduce_max_unsigned, mask, value, 0, 32, site));
}
inline int __reduce_add_sync(unsigned mask, int value, EMU_SITE) {
  return int(emu::meet_warp(emu::SyncPoint::reduce_add, mask, unsigned(value), 0, 32, site));
}
inline int __reduce_min_sync(unsigned mask, int value, EMU_SITE) {
  return int(emu::meet_warp(emu::SyncPoint::reduce_min_signed, mask, unsigned(value), 0, 32, site));
}
inline int __reduce_max_sync(unsigned mask, int value, EMU_SITE) {
  return int(emu::meet_warp(emu::SyncPoint::reduce_max_signed, mask, unsigned(value), 0, 32, site));
}

#undef EMU_SITE

// ----------------------------------------------------------------------------
// What a kernel reaches through PTX alone: tensor cores and asynchronous copies. Names and operands are the
// instructions'.

namespace emu {

// mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 with C = D: d (16 x 8) += a (16 x 16) b (16 x 8), in fragments.
enum class MmaType { bf16, f16 };
void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], MmaType type,
                  Site site = Site::here());

// ldmatrix.sync.aligned.m8n8.x4[.trans].shared.b16. `row`: the 16 bytes in shared memory whose address this lane
// passes.
void ldmatrix_x4(unsigned (&d)[4], const void* row, bool transposed, Site site = Site::here());

// cp.async of 4, 8 or 16 bytes into shared memory: the first `bytes_read` are read, and the rest are zeros; its
// commit_group; and its wait_group, which leaves the youngest `groups` in flight.
void cp_async(void* shared, const void* global, int bytes, int bytes_read);
void cp_async_commit_group();
void cp_async_wait_group(int groups);

// wgmma is executed in nvcc's code only: ends the program, and says so.
[[noreturn]] void no_wgmma();

}  // namespace emu

// ----------------------------------------------------------------------------
// Memory. A thread runs alone until it blocks: an ordinary read-modify-write is atomic, and fences have nothing to do.
// The *order* of atomics is the random order of the threads, so a float sum over atomicAdd changes its bits with the
// seed.

inline void __threadfence() {}
inline void __threadfence_block() {}

namespace emu {
void begin_atomic();  // what the thread accesses until end_atomic races with no other atomic operation
void end_atomic();

// *address = next(*address). Returns what it was.
template <class T, class Next>
T atomically(T* address, Next next) {
  begin_atomic();
  const T old = *address;
  *address = next(old);
  end_atomic();
  return old;
}
}  // namespace emu

#define EMU_ATOMIC(T, name, next)                                    \
  inline T name(T* p, T value) {                                     \
    return emu::atomically(p, [value](T old) -> T { return next; }); \
  }
EMU_ATOMIC(int, atomicAdd, int(unsigned(old) + unsigned(value)))  // wraps around
EMU_ATOMIC(unsigned, atomicAdd, old + value)
EMU_ATOMIC(unsigned long long, atomicAdd, old + value)
EMU_ATOMIC(float, atomicAdd, old + value)
EMU_ATOMIC(int, atomicMin, value < old ? value : old)
EMU_ATOMIC(unsigned, atomicMin, value < old ? value : old)
EMU_ATOMIC(int, atomicMax, value > old ? value : old)
EMU_ATOMIC(unsigned, atomicMax, value > old ? value : old)
#undef EMU_ATOMIC

inline int atomicExch(int* p, int value) {
  return emu::atomically(p, [value](int) { return value; });
}
inline unsigned atomicExch(unsigned* p, unsigned value) {
  return emu::atomically(p, [value](unsigned) { return value; });
}
inline int atomicCAS(int* p, int expected, int value) {
  return emu::atomically(p, [=](int old) { return old == expected ? value : old; });
}
inline unsigned atomicCAS(unsigned* p, unsigned expected, unsigned value) {
  return emu::atomically(p, [=](unsigned old) { return old == expected ? value : old; });
}

// Loads and stores with a cache hint. The hint is ignored; the size must be one that the hardware has.
#define EMU_LOAD(name)                                                                                 \
  template <class T>                                                                                   \
  T name(const T* address) {                                                                           \
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 16, "at most 16 bytes in one load"); \
    return *address;                                                                                   \
  }
#define EMU_STORE(name)                                                                                 \
  template <class T>                                                                                    \
  void name(T* address, std::common_type_t<T> value) {                                                  \
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 16, "at most 16 bytes in one store"); \
    *address = value;                                                                                   \
  }
EMU_LOAD(__ldg)   // through the read-only cache
EMU_LOAD(__ldcs)  // streaming: read once
EMU_LOAD(__ldcg)  // cached in L2 only
EMU_STORE(__stcs)
EMU_STORE(__stcg)
#undef EMU_LOAD
#undef EMU_STORE

// ----------------------------------------------------------------------------
// Numbers

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }

inline unsigned __float_as_uint(float x) { return emu::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emu::bit_cast<float>(x); }
inline int __float_as_int(float x) { return emu::bit_cast<int>(x); }
inline float __int_as_float(int x) { return emu::bit_cast<float>(x); }

// Rounds to the nearest, ties to even. As on the GPU, what does not fit is clamped and NaN becomes 0.
inline int __float2int_rn(float x) {
  if (std::isnan(x)) return 0;
  if (x >= 2147483648.0f) return 2147483647;
  if (x < -2147483648.0f) return -2147483647 - 1;
  return int(lrintf(x));
}

// The fast, less exact functions of the GPU are exact here. glibc declares __expf and __logf as noexcept.
inline float __expf(float x) noexcept { return expf(x); }
inline float __logf(float x) noexcept { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

#define EMU_MIN_MAX(T)                             \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }  // of NaN and a number: the number, as on the GPU
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

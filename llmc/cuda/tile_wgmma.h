// What tile.h is for mma.sync, for wgmma: the products of Hopper (sm_90a), whose tensor cores read tiles from shared
// memory themselves, while the warps do other things. Four warps, a warpgroup, own 64 rows of a product together, and
// each of them 16 as before: accumulators, register tiles and column vectors are tile.h's with M = 1.
//
//   SplitTile<D, Rows>         Rows rows of D bf16s in shared memory, 64 channels beside each other
//   start_ABt(acc, a, b)       acc = a b^T,    a: RegisterTile or SplitTile, b: the SplitTile's first 8 N rows
//   start_AB(acc, a, b)        acc += a b,     a: RegisterTile, b: the SplitTile's first 16 K rows
//   commit_products()          a group of all products that the warp has started since the last call
//   wait_for_products<n>(...)  all groups but the last n are done, and the accumulators named may be read and written
//
// Between its start and the wait, a product's accumulator and register tile must not be touched, nor what it reads in
// shared memory. All products are 64 x 64 x 16, by one instruction: the tensor cores of an SM need 32 cycles for it, in
// which shared memory can deliver two of its operands, and it needs one, or two with `a` in shared memory. A tile of 64
// columns of bf16 has rows of 128 bytes, and its order of chunks is Tile<64>'s; so b can be read by rows or by
// columns.
#pragma once
#include <cstdint>
#include "tile.h"

// wgmma exists in code for sm_90a alone. Kernels with it are empty in code for other GPUs, where none is launched.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool compiled_for_wgmma = true;
#else
constexpr bool compiled_for_wgmma = false;
#endif

constexpr int warpgroup_size = 4 * warp_size, warpgroup_rows = 64, mbarrier_bytes = 8;

// ----------------------------------------------------------------------------
// Instructions

#ifdef SLA_EMU
// The emulated GPU executes wgmma in nvcc's code only.
__device__ inline void trap() { emu::no_wgmma(); }
__device__ inline void wgmma_fence() {}
__device__ inline void commit_products() {}
template <int pending>
__device__ inline void wait_for_groups() {}
__device__ inline void copies_for_wgmma() {}
__device__ inline void keep_here(float&) {}
__device__ inline void keep_here(unsigned&) {}
__device__ inline void mbarrier_init(int, int) {}
__device__ inline void arrive(int) {}
__device__ inline void wait_for_phase(int, unsigned) {}
template <int threads>
__device__ inline void arrive_threads(int) {}
template <int registers>
__device__ inline void give_back_registers() {}
template <int registers>
__device__ inline void take_registers() {}
template <bool by_columns, bool added>
__device__ inline void wgmma(float (&)[8][4], const unsigned (&)[4], uint64_t) {}
template <bool added>
__device__ inline void wgmma(float (&)[8][4], uint64_t, uint64_t) {}
__device__ inline unsigned wgmma_address(int offset) { return unsigned(offset); }
#else

__device__ inline void trap() { __trap(); }

// To be called before a warpgroup's first product, and whenever it has touched registers of the next one since.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ inline void wait_for_groups() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// After this thread's copies have arrived, and before the barrier after which wgmma reads them: it reads shared memory
// by another way than the copies, which were ordinary writes, and the two ways are not in order by themselves.
__device__ inline void copies_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The compiler keeps what it computes x from before this, and what it computes from x after this.
__device__ inline void keep_here(float& x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ inline void keep_here(unsigned& x) { asm volatile("" : "+r"(x)::"memory"); }

// A barrier in shared memory at `offset` (mbarrier, 8 bytes), whose phases each end with so many arrivals. One thread
// calls this, and others use the barrier after __syncthreads.
__device__ inline void mbarrier_init(int offset, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(offset)), "r"(arrivals) : "memory");
}
// One arrival of a warp, after what all its lanes have done.
__device__ inline void arrive(int offset) {
  __syncwarp();
  if (threadIdx.x % warp_size == 0)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(offset)) : "memory");
}
// Waits until the phase with this parity has ended: 0 is the first one's, and 1 has ended at the start.
__device__ inline void wait_for_phase(int offset, unsigned parity) {
  unsigned has_ended = 0;
  while (has_ended == 0)
    asm volatile("{ .reg .pred ended; mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2; "
                 "selp.u32 %0, 1, 0, ended; }"
                 : "=r"(has_ended)
                 : "r"(shared_address(offset)), "r"(parity)
                 : "memory");
}

// An arrival at the barrier of sync_threads<threads>, without waiting for the others.
template <int threads>
__device__ inline void arrive_threads(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(threads) : "memory");
}

// From here on each thread of a warpgroup has so many registers: fewer than before, or more, as soon as they are free.
template <int registers>
__device__ inline void give_back_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

__device__ inline unsigned wgmma_address(int offset) { return shared_address(offset); }

#define SLA_FOUR(use, n) use(d[n][0]), use(d[n][1]), use(d[n][2]), use(d[n][3])
#define SLA_ACCUMULATOR(use)                                                                                  \
  SLA_FOUR(use, 0), SLA_FOUR(use, 1), SLA_FOUR(use, 2), SLA_FOUR(use, 3), SLA_FOUR(use, 4), SLA_FOUR(use, 5), \
      SLA_FOUR(use, 6), SLA_FOUR(use, 7)
#define SLA_WGMMA(a_and_b, added, columns)                                                                          \
  "wgmma.mma_async.sync.aligned.m64n64k16.f32" MMA_OPERANDS " "                                                     \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31}, " a_and_b ", " added ", 1, 1, " columns ";"

// d (64 x 64) = or += a (64 x 16) b (16 x 64), by a whole warpgroup. b's descriptor is for 64 rows of 16 columns of a
// tile, or with by_columns for 16 rows of 64 columns. For a product that is not `added`, d's registers are no inputs:
// else ptxas would see what was last computed in them as a part of the product, and let no products overlap.
template <bool by_columns, bool added>
__device__ inline void wgmma(float (&d)[8][4], const unsigned (&a)[4], uint64_t b) {
  if constexpr (added)
    asm volatile(SLA_WGMMA("{%32, %33, %34, %35}, %36", "1", "%37")
                 : SLA_ACCUMULATOR("+f")
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(by_columns))
                 : "memory");
  else
    asm volatile(SLA_WGMMA("{%32, %33, %34, %35}, %36", "0", "%37")
                 : SLA_ACCUMULATOR("=f")
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(by_columns))
                 : "memory");
}

// The product with a, too, from shared memory, and both by rows.
template <bool added>
__device__ inline void wgmma(float (&d)[8][4], uint64_t a, uint64_t b) {
  if constexpr (added)
    asm volatile(SLA_WGMMA("%32, %33", "1", "0, 0") : SLA_ACCUMULATOR("+f") : "l"(a), "l"(b) : "memory");
  else asm volatile(SLA_WGMMA("%32, %33", "0", "0, 0") : SLA_ACCUMULATOR("=f") : "l"(a), "l"(b) : "memory");
}
#undef SLA_WGMMA
#undef SLA_ACCUMULATOR
#undef SLA_FOUR
#endif

// ----------------------------------------------------------------------------
// Shared memory

// Rows of D channels; each 64 channels are a Tile<64> of their own, one after the other. `offset` is a multiple of
// 1,024: the instructions take a chunk's place in its row from the address.
template <int D, int Rows>
struct SplitTile {
  static_assert(D % 64 == 0 && Rows % 8 == 0, "whole swizzled rows, and eights of them");
  static constexpr int parts = D / 64, part_bytes = Rows * Tile<64>::row_bytes, bytes = parts * part_bytes;
  int offset;

  __device__ Tile<64> part(int i) const { return {offset + i * part_bytes}; }
  __device__ int at(int row, int chunk) const { return part(chunk / 8).at(row, chunk % 8); }
  __device__ SplitTile from_row(int row) const { return {offset + row * Tile<64>::row_bytes}; }  // row: as Tile's
  __device__ SplitTile next(int n) const { return {offset + n * bytes}; }  // the n-th of several tiles in a row
};

// load_tile_async of tile.h.
template <int Threads, int D, int Rows>
__device__ inline void load_tile_async(SplitTile<D, Rows> tile, const floatX* src, int64_t stride, int first, int end,
                                       int HS) {
#pragma unroll
  for (int i = 0; i < tile.parts; i++)
    load_tile_async<Rows, Threads>(tile.part(i), src + 64 * i, stride, first, end, HS - 64 * i);
}

// The warp's 16 rows, the first of `tile`, into registers.
template <int K, int D, int Rows>
__device__ inline void load_register_tile(RegisterTile<1, K>& a, SplitTile<D, Rows> tile) {
  static_assert(16 * K == D, "whole rows");
#pragma unroll
  for (int k = 0; k < K; k++) a_fragment(a.x[0][k], tile.part(k / 4), 0, k % 4);
}

// The descriptor of an operand in shared memory ("Matrix Descriptor Format" in the PTX manual), whose first element is
// the tile's: bits 0-13 have its address, 32-45 the distance of eights of rows, both in 16 bytes, and 62-63 the order
// of chunks, for rows of 128 bytes. Bits 16-29 have the distance between groups of 64 columns, which no product here
// uses.
__device__ inline uint64_t wgmma_descriptor(Tile<64> tile) {
  constexpr uint64_t swizzle_of_128_bytes = 1, eight_rows = 8 * Tile<64>::row_bytes / 16, unused = 1;
  return swizzle_of_128_bytes << 62 | eight_rows << 32 | unused << 16 | (wgmma_address(tile.offset) & 0x3ffff) >> 4;
}
// What is added to a descriptor to move on by 16 columns or by 16 rows.
constexpr uint64_t sixteen_columns = 16 * sizeof(floatX) / 16, sixteen_rows = 16 * Tile<64>::row_bytes / 16;

// ----------------------------------------------------------------------------
// Products

template <class Fragments>  // Accumulator, RegisterTile
__device__ inline void keep_here(Fragments& fragments) {
#pragma unroll
  for (auto& m : fragments.x)
    for (auto& n : m)
      for (auto& x : n) keep_here(x);
}

// The same rows, as something that is computed here: `zero` is 0, which the compiler must not know. Of rows that come
// from before a loop, and which its products read from registers in each round, ptxas (12.9, 13.0) may use the
// registers for other values, and multiply those from the second round on; not so if each round defines them anew. The
// forward kernels and dq, which have no registers left for it, are right without: test_machine_code follows their rows
// through ptxas's code.
template <int M, int K>
__device__ inline void define_anew(RegisterTile<M, K>& a, unsigned zero) {
#pragma unroll
  for (auto& m : a.x)
    for (auto& k : m)
      for (unsigned& x : k) x ^= zero;
}

// Columns [64 i, 64 i + 64) of an accumulator.
template <int N>
__device__ inline float (&columns_from(Accumulator<1, N>& acc, int i))[8][4] {
  return *reinterpret_cast<float(*)[8][4]>(&acc.x[0][8 * i]);
}

template <bool by_columns, bool added, int K>
__device__ inline void wgmma_of(float (&d)[8][4], const RegisterTile<1, K>& a, int k, uint64_t b) {
  wgmma<by_columns, added>(d, a.x[0][k], b);
}
template <bool by_columns, bool added, int D, int Rows>
__device__ inline void wgmma_of(float (&d)[8][4], SplitTile<D, Rows> a, int k, uint64_t b) {
  static_assert(!by_columns, "a of scores");
  wgmma<added>(d, wgmma_descriptor(a.part(k / 4)) + k % 4 * sixteen_columns, b);
}

// Starts acc (64 x 8 N) = a (64 x D) b^T, b: rows [0, 8 N) of the tile.
template <class A, int N, int D, int Rows>
__device__ inline void start_ABt(Accumulator<1, N>& acc, const A& a, SplitTile<D, Rows> b) {
  static_assert(N % 8 == 0, "whole instructions");
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < N / 8; n++) {
    const SplitTile<D, Rows> rows = b.from_row(64 * n);
    wgmma_of<false, false>(columns_from(acc, n), a, 0, wgmma_descriptor(rows.part(0)));
#pragma unroll
    for (int k = 1; k < D / 16; k++)
      wgmma_of<false, true>(columns_from(acc, n), a, k, wgmma_descriptor(rows.part(k / 4)) + k % 4 * sixteen_columns);
  }
}

// Starts acc (64 x D) += a (64 x 16 K) b, b: rows [0, 16 K) of the tile.
template <int K, int N, int D, int Rows>
__device__ inline void start_AB(Accumulator<1, N>& acc, RegisterTile<1, K> a, SplitTile<D, Rows> b) {
  static_assert(8 * N == D, "all channels");
  keep_here(acc);
  keep_here(a);  // what packs them stays before the fence
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < N / 8; n++)
#pragma unroll
    for (int k = 0; k < K; k++)
      wgmma_of<true, true>(columns_from(acc, n), a, k, wgmma_descriptor(b.part(n)) + k * sixteen_rows);
}

// Waits until all groups of the warp's products but the last `pending` are done, and names accumulators that may be
// touched from here on.
template <int pending, class... Accumulators>
__device__ inline void wait_for_products(Accumulators&... accs) {
  wait_for_groups<pending>();
  (keep_here(accs), ...);
}

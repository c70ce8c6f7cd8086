// The vocabulary of kernels that multiply on tensor cores (sm_80 and up), and all the PTX there is. A warp owns 16 M rows of a
// product; the tiles it multiplies them with lie in shared memory, where asynchronous copies bring them while it computes.
//
//   Accumulator<M, N>    16 M x 8 N floats in a warp's registers
//   RegisterTile<M, K>    16 M x 16 K bf16s in a warp's registers
//   ColumnVector<M>         a float for each of its 16 M rows
//   Tile<D>              rows of D bf16s in shared memory
//
//   mma_ABt(acc, a, b)   acc += a b^T,    a: RegisterTile or Tile, b: the Tile's first 8 N rows
//   mma_AB(acc, a, b)    acc += a b,      a: RegisterTile, b: the Tile's first 16 K rows
//
// Which element of a matrix lies in which register of which lane is fixed by the instructions ("Matrix Fragments for mma.m16n8k16" in
// the PTX manual): lane = 4 group + pair has, of each 16 x 8 accumulator, rows group and group + 8, columns 2 pair and 2 pair + 1.
// Two neighbouring accumulators, rounded, are a 16 x 16 left operand in place: the probabilities go from one product into the
// next without leaving the registers.
#pragma once
#include <cuda_bf16.h>  // __nv_bfloat16
#include <cstdint>      // int64_t
#include "launch.h"     // shared_memory
#include "vec.h"        // pack2, unpack2, warp_size

typedef __nv_bfloat16 bf16;

// ----------------------------------------------------------------------------
// Instructions. A place in shared memory is a number of bytes from its start: arithmetic in 32 bits, and constants that become part of
// the instruction, where a pointer would have to be converted each time.

#ifdef SLA_EMU
__device__ inline void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { emu::mma_m16n8k16(d, a, b); }
template <bool transposed>
__device__ inline void ldmatrix(unsigned (&d)[4], int row) { emu::ldmatrix_x4(d, shared_memory + row, transposed); }
template <int bytes>
__device__ inline void copy_async(int to, const void* from, bool exists) {
  emu::cp_async(shared_memory + to, from, bytes, exists ? bytes : 0);
}
__device__ inline void commit_copies() { emu::cp_async_commit_group(); }
__device__ inline void wait_for_copies() { emu::cp_async_wait_group(0); }
__device__ inline float exp2_approx(float x) { return exp2f(x); }
#else

__device__ inline unsigned shared_address(int place) { return unsigned(__cvta_generic_to_shared(shared_memory)) + unsigned(place); }

// d (16 x 8) += a (16 x 16) b (16 x 8), by a whole warp.
__device__ inline void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices from shared memory, one a register, by a whole warp: lane i says where row i % 8 of matrix i / 8 is.
template <bool transposed>
__device__ inline void ldmatrix(unsigned (&d)[4], int row) {
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(shared_address(row)) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(shared_address(row)) : "memory");
}

// Starts a copy of 4 or 16 bytes from global to shared memory; zeros arrive, and nothing is read, if the source does not exist.
template <int bytes>
__device__ inline void copy_async(int to, const void* from, bool exists) {
  static_assert(bytes == 4 || bytes == 16, "what the instruction has a form for here");
  const unsigned address = shared_address(to), size = exists ? bytes : 0;
  if constexpr (bytes == 16)  // past L1, where nobody would find it again
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(size) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(size) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// This thread's committed copies are there when this returns; those of others after a barrier.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// 2^x with a relative error of 2^-22; 0 for -inf.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

// ----------------------------------------------------------------------------
// Registers

template <int M, int N>
struct Accumulator {
  float x[M][N][4];

  // Where x[m][n][i] stands.
  static __device__ int row(int m, int i) { return 16 * m + int(threadIdx.x) % warp_size / 4 + 8 * (i / 2); }
  static __device__ int column(int n, int i) { return 8 * n + int(threadIdx.x) % 4 * 2 + i % 2; }
};

template <int M, int K>
struct RegisterTile {
  unsigned x[M][K][4];
};

// x[m][i / 2] belongs to the row of an accumulator's x[m][...][i]; the four lanes of a row have the same.
template <int M>
struct ColumnVector {
  float x[M][2];
};

// acc rounded to bf16.
template <int M, int N>
__device__ inline RegisterTile<M, N / 2> to_bf16(const Accumulator<M, N>& acc) {
  static_assert(N % 2 == 0, "two accumulators are 16 columns");
  RegisterTile<M, N / 2> left;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        left.x[m][n / 2][n % 2 * 2 + half] = pack2(acc.x[m][n][2 * half], acc.x[m][n][2 * half + 1]);
  return left;
}

template <int M, int N>
__device__ inline void scale(Accumulator<M, N>& acc, float factor) {
#pragma unroll
  for (auto& m : acc.x)
    for (auto& n : m)
      for (float& x : n) x *= factor;
}

// What hidden(row, column) names becomes -inf.
template <int M, int N, class Hidden>
__device__ inline void mask(Accumulator<M, N>& acc, Hidden hidden) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
      for (int i = 0; i < 4; i++)
        if (hidden(acc.row(m, i), acc.column(n, i))) acc.x[m][n][i] = -INFINITY;
}

// ----------------------------------------------------------------------------
// Shared memory

// Rows of D channels without gaps. A row is made of chunks of eight channels, 16 bytes, in an order that depends on the row: the same
// chunk of eight consecutive rows lies in eight different eighths of the banks, and ldmatrix reads them at once. Rows whose
// distance is a multiple of 8 have the same order.
template <int D>
struct Tile {
  static_assert(D % 32 == 0, "rows are whole quarters of the banks");
  static constexpr int chunks = D / 8, row_bytes = D * int(sizeof(bf16));
  int place;  // of row 0

  __device__ int at(int row, int chunk) const {
    const int order = D % 64 == 0 ? row % 8 : row / 2 % 4;  // two rows of 64 bytes fill the banks together
    return place + row * row_bytes + (chunk ^ order) * 16;
  }
  __device__ Tile from_row(int row) const { return {place + row * row_bytes}; }  // a multiple of 8
};

// tile = rows [first, first + Rows) of one head in one sequence, whose row 0 is at src; zeros for the rows from `end` on and the channels
// from HS on, which are not read. Started by the whole block, neighbouring threads on neighbouring chunks.
template <int Rows, int Threads, int D>
__device__ inline void load_tile_async(Tile<D> tile, const bf16* src, int64_t stride, int first, int end, int HS) {
  constexpr int threads_per_row = D % 64 == 0 ? D / 8 : 4, rows_at_once = Threads / threads_per_row;
  static_assert(Rows % rows_at_once == 0 && rows_at_once % 8 == 0, "every thread has as many rows");
  const int column = int(threadIdx.x) % threads_per_row;
  int row = int(threadIdx.x) / threads_per_row;
  const bf16* from = src + (first + row) * stride;
#pragma unroll
  for (int i = 0; i < Rows / rows_at_once; i++, row += rows_at_once, from += rows_at_once * stride)
#pragma unroll
    for (int chunk = column; chunk < tile.chunks; chunk += threads_per_row)
      copy_async<16>(tile.at(row, chunk), from + chunk * 8, first + row < end && chunk * 8 < HS);
}

// The floats at `place` = elements [first, first + Count) of src, and zeros for those from `end` on. Started by the first threads of the
// block.
template <int Count>
__device__ inline void load_vector_async(int place, const float* src, int first, int end) {
  const int i = int(threadIdx.x);
  if (i < Count) copy_async<4>(place + i * int(sizeof(float)), src + first + i, first + i < end);
}

__device__ inline float shared_float(int place) { return *reinterpret_cast<const float*>(shared_memory + place); }

// Rows 16 m .. 16 m + 15, channels 16 k .. 16 k + 15 of a left operand, wherever it is.
template <int M, int K>
__device__ inline void left_fragment(unsigned (&x)[4], const RegisterTile<M, K>& a, int m, int k) {
  for (int i = 0; i < 4; i++) x[i] = a.x[m][k][i];
}
template <int D>
__device__ inline void left_fragment(unsigned (&x)[4], Tile<D> a, int m, int k) {
  const int lane = int(threadIdx.x) % warp_size;
  ldmatrix<false>(x, a.at(lane % 16, 2 * k + lane / 16) + 16 * m * a.row_bytes);
}

// Rows [0, 16 M) of `tile` into registers.
template <int M, int K, int D>
__device__ inline void load_left(RegisterTile<M, K>& left, Tile<D> tile) {
  static_assert(16 * K == D, "whole rows");
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int k = 0; k < K; k++) left_fragment(left.x[m][k], tile, m, k);
}

// Rows [first, end) of dst = or += the warp's rows of acc: those that exist, and the channels that the head has. dst is at the sequence's
// row 0. `stage`: 16 M rows that are this warp's alone, through which the rows become pieces of 16 bytes.
template <int M, int N, int D>
__device__ inline void store_rows(bf16* dst, int64_t stride, int first, int end, int HS, bool accumulate, Accumulator<M, N>& acc,
                                  Tile<D> stage) {
  static_assert(8 * N == D, "whole rows");
  const int lane = int(threadIdx.x) % warp_size;
  __syncwarp();  // everybody has read what `stage` held
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
      for (int i = 0; i < 4; i += 2) {
        const int row = acc.row(m, i), column = acc.column(n, i);
        if (accumulate && first + row < end && column < HS) {
          float a, b;
          unpack2(a, b, *reinterpret_cast<const unsigned*>(dst + (first + row) * stride + column));
          acc.x[m][n][i] += a, acc.x[m][n][i + 1] += b;
        }
        *reinterpret_cast<unsigned*>(shared_memory + stage.at(row, n) + column % 8 * 2) = pack2(acc.x[m][n][i], acc.x[m][n][i + 1]);
      }
  __syncwarp();
  for (int index = lane; index < 16 * M * stage.chunks; index += warp_size) {
    const int row = index / stage.chunks, chunk = index % stage.chunks;
    if (first + row < end && chunk * 8 < HS)
      *reinterpret_cast<uint4*>(dst + (first + row) * stride + chunk * 8) = *reinterpret_cast<const uint4*>(shared_memory + stage.at(row, chunk));
  }
}

// ----------------------------------------------------------------------------
// Products

// acc (16 M x 8 N) += a (16 M x D) b^T, b: rows [0, 8 N) of the tile. Each fragment of b that is loaded serves 16 M rows.
template <class Left, int M, int N, int D>
__device__ inline void mma_ABt(Accumulator<M, N>& acc, const Left& a, Tile<D> b) {
  static_assert(N % 2 == 0, "a load brings 16 rows of b");
  const int lane = int(threadIdx.x) % warp_size;
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    const int right_place = b.at(lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2);
    unsigned left[M][4];
#pragma unroll
    for (int m = 0; m < M; m++) left_fragment(left[m], a, m, k);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      unsigned right[4];
      ldmatrix<false>(right, right_place + 8 * n * b.row_bytes);
#pragma unroll
      for (int m = 0; m < M; m++) {
        mma_16x8x16(acc.x[m][n], left[m], {right[0], right[1]});
        mma_16x8x16(acc.x[m][n + 1], left[m], {right[2], right[3]});
      }
    }
  }
}

// acc (16 M x D) += a (16 M x 16 K) b, b: rows [0, 16 K) of the tile, which are columns of the instruction's right operand: hence the
// transposition.
template <int M, int N, int K, int D>
__device__ inline void mma_AB(Accumulator<M, N>& acc, const RegisterTile<M, K>& a, Tile<D> b) {
  static_assert(8 * N == D, "whole rows");
  const int lane = int(threadIdx.x) % warp_size;
#pragma unroll
  for (int k = 0; k < K; k++)
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      unsigned right[4];
      ldmatrix<true>(right, b.at(lane % 16, n + lane / 16) + 16 * k * b.row_bytes);
#pragma unroll
      for (int m = 0; m < M; m++) {
        mma_16x8x16(acc.x[m][n], a.x[m][k], {right[0], right[1]});
        mma_16x8x16(acc.x[m][n + 1], a.x[m][k], {right[2], right[3]});
      }
    }
}

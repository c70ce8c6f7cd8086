// What kernels that multiply on tensor cores (sm_80 and up; in fp16 sm_75) are written with, and all the PTX of the
// program but Hopper's products (tile_wgmma.h). A warp owns 16 M rows of a product; the tiles that it
// multiplies them with are in shared memory, filled by asynchronous copies while it computes.
//
//   Accumulator<M, N>    16 M x 8 N floats in a warp's registers
//   RegisterTile<M, K>   16 M x 16 K floatXs in a warp's registers, an A operand
//   ColumnVector<M>      a float for each of the warp's 16 M rows
//   Tile<D>              rows of D floatXs in shared memory
//
//   mma_ABt(acc, a, b)   acc += a b^T,    a: RegisterTile or Tile, b: the Tile's first 8 N rows
//   mma_AB(acc, a, b)    acc += a b,      a: RegisterTile or Tile, b: the Tile's first 16 K rows, all columns or some
//   skew, unskew         between a matrix by distance and one by column, of relative positions
//
// The instructions fix which element of a matrix is in which register of which lane ("Matrix Fragments for
// mma.m16n8k16" in the PTX manual): lane = 4 group + i holds, of each 16 x 8 accumulator, rows group and group + 8,
// columns 2 i and 2 i + 1. Two neighbouring accumulators, rounded, are a 16 x 16 A operand as they are: the
// probabilities go from one product into the next without leaving the registers.
//
// On the emulated GPU each instruction has a twin (dev/emu/tensor_core.cpp), which dev/test/test_tile.cu compares with
// the manual.
//
// floatX is bf16, or in a build for it fp16: what differs is the type that the instructions of products name.
#pragma once
#include <cstdint>
#include <type_traits>
#include "llmc/base/host_device.h"
#include "vec.h"

// ----------------------------------------------------------------------------
// Instructions. Shared memory is addressed by an offset in bytes from its start: arithmetic in 32 bits, with constants
// that become part of the instruction, where a pointer would have to be converted each time.

#ifdef PRECISION_FP16
#define MMA_OPERANDS ".f16.f16"
#else
#define MMA_OPERANDS ".bf16.bf16"
#endif

#ifdef SLA_EMU
__device__ inline void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  emu::mma_m16n8k16(d, a, b, is_fp16 ? emu::MmaType::f16 : emu::MmaType::bf16);
}
template <bool transposed>
__device__ inline void ldmatrix(unsigned (&d)[4], int row) {
  emu::ldmatrix_x4(d, shared_memory + row, transposed);
}
template <int bytes>
__device__ inline void copy_async(int to, const void* from, bool exists) {
  emu::cp_async(shared_memory + to, from, bytes, exists ? bytes : 0);
}
__device__ inline void commit_copies() { emu::cp_async_commit_group(); }
template <int pending = 0>
__device__ inline void wait_for_copies() {
  emu::cp_async_wait_group(pending);
}
__device__ inline float exp2_approx(float x) { return exp2f(x); }
template <int threads>
__device__ inline void sync_threads(int barrier) {
  emu::bar_sync(barrier, threads);
}
#else

__device__ inline unsigned shared_address(int offset) {
  return unsigned(__cvta_generic_to_shared(shared_memory)) + unsigned(offset);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
// sum (16 x 8) += a (16 x 8) b (8 x 8), by a whole warp.
__device__ inline void mma_16x8x8(float (&sum)[4], unsigned a0, unsigned a1, unsigned b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32" MMA_OPERANDS ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
               "{%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a0), "r"(a1), "r"(b));
}
#endif

// d (16 x 8) += a (16 x 16) b (16 x 8), by a whole warp.
__device__ inline void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  mma_16x8x8(d, a[0], a[1], b[0]);
  mma_16x8x8(d, a[2], a[3], b[1]);
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32" MMA_OPERANDS ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
               "{%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Four 8 x 8 matrices from shared memory, one per register, by a whole warp: lane i passes the offset of row i % 8 of
// matrix i / 8.
template <bool transposed>
__device__ inline void ldmatrix(unsigned (&d)[4], int row) {
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared_address(row))
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Starts a copy of 4 or 16 bytes from global to shared memory; if not `exists`, nothing is read and zeros are written.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800  // which has no such instruction: the thread itself copies
template <int bytes>
__device__ inline void copy_async(int to, const void* from, bool exists) {
  using Piece = std::conditional_t<bytes == 16, uint4, unsigned>;
  Piece x = {};
  if (exists) x = *static_cast<const Piece*>(from);
  *reinterpret_cast<Piece*>(shared_memory + to) = x;
}
__device__ inline void commit_copies() {}
template <int pending = 0>
__device__ inline void wait_for_copies() {}
#else
template <int bytes>
__device__ inline void copy_async(int to, const void* from, bool exists) {
  static_assert(bytes == 4 || bytes == 16, "the sizes that the instruction is used with");
  const unsigned address = shared_address(to), size = exists ? bytes : 0;
  if constexpr (bytes == 16)  // not through L1: a block reads each row once
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(size) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(size) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// When this returns, this thread's committed copies have arrived, but for the last `pending` groups; other threads'
// copies, after a barrier.
template <int pending = 0>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
#endif

// 2^x with a relative error of 2^-22; 0 for -inf.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A barrier for some of a block's warps: waits until `threads` threads have come to the one with this number, 1 to 15.
template <int threads>
__device__ inline void sync_threads(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(threads) : "memory");
}
#endif

// The elements from `offset` on.
__device__ inline const floatX* shared_elements(int offset) {
  return reinterpret_cast<const floatX*>(shared_memory + offset);
}

// Starts a copy of eight elements to shared memory.
__device__ inline void copy8_async(int to, const floatX* from) {
#pragma unroll
  for (int i = 0; i < int(sizeof(floatX)) / 2; i++)
    copy_async<16>(to + 16 * i, reinterpret_cast<const uint4*>(from) + i, true);
}

// ----------------------------------------------------------------------------
// Registers

template <int M, int N>
struct Accumulator {
  float x[M][N][4];

  // The row and column of x[m][n][i].
  static __device__ int row(int m, int i) { return 16 * m + int(threadIdx.x) % warp_size / 4 + 8 * (i / 2); }
  static __device__ int column(int n, int i) { return 8 * n + int(threadIdx.x) % 4 * 2 + i % 2; }
};

template <int M, int K>
struct RegisterTile {
  static constexpr int columns = 16 * K;
  unsigned x[M][K][4];
};

// x[m][i / 2] belongs to the row of an accumulator's x[m][...][i]; the four lanes that hold a row have the same value.
template <int M>
struct ColumnVector {
  float x[M][2];
};

// acc rounded to floatX.
template <int M, int N>
__device__ inline RegisterTile<M, N / 2> to_floatX(const Accumulator<M, N>& acc) {
  static_assert(N % 2 == 0, "two accumulators are 16 columns");
  RegisterTile<M, N / 2> a;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        a.x[m][n / 2][n % 2 * 2 + half] = pack2(acc.x[m][n][2 * half], acc.x[m][n][2 * half + 1]);
  return a;
}

template <int M, int N>
__device__ inline void scale(Accumulator<M, N>& acc, float factor) {
#pragma unroll
  for (auto& m : acc.x)
    for (auto& n : m)
      for (float& x : n) x *= factor;
}

// The elements x[m][n][i] with hidden(m, n, i) become -inf.
template <int M, int N, class Hidden>
__device__ inline void mask_elements(Accumulator<M, N>& acc, Hidden hidden) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (hidden(m, n, i)) acc.x[m][n][i] = -INFINITY;
}

// The elements with hidden(row, column) become -inf.
template <int M, int N, class Hidden>
__device__ inline void mask(Accumulator<M, N>& acc, Hidden hidden) {
  mask_elements(acc, [&](int m, int n, int i) { return hidden(acc.row(m, i), acc.column(n, i)); });
}

// ----------------------------------------------------------------------------
// Shared memory

// Rows of D channels without gaps. A row is made of chunks of eight channels, 16 bytes, in an order that depends on the
// row (a swizzle): the same chunk of eight consecutive rows is in eight different eighths of the banks, so that
// ldmatrix reads them without bank conflicts. Rows whose distance is a multiple of 8 have the same order.
template <int D>
struct Tile {
  static_assert(D % 32 == 0, "rows are whole quarters of the banks");
  static constexpr int columns = D, chunks = D / 8, row_bytes = D * int(sizeof(floatX));
  static constexpr int ordered = D % 64 == 0 ? 8 : 4;  // neighbouring chunks that change places
  int offset;                                          // of row 0, in bytes

  SLA_HOST_DEVICE int at(int row, int chunk) const {
    const int order = D % 64 == 0 ? row % 8 : row / 2 % 4;  // two rows of 64 bytes fill the banks together
    return offset + row * row_bytes + (chunk ^ order) * 16;
  }
  // at(row, chunk + n) from address = at(row, chunk), for chunk 0 or 1 and an even n. Loops over chunks go through
  // this: where n is a constant it is an instruction, while of at() the compiler would keep a register for each n.
  static SLA_HOST_DEVICE int further(int address, int n) {
    return (address ^ n % ordered * 16) + n / ordered * ordered * 16;
  }
  SLA_HOST_DEVICE Tile from_row(int row) const { return {offset + row * row_bytes}; }  // row: a multiple of 8
};

// tile = rows [first, first + Rows) of one head in one sequence, whose row 0 is at src; zeros for the rows without
// exists(row) and the channels from HS on, which are not read. Called by the whole block: neighbouring threads copy
// neighbouring chunks.
template <int Rows, int Threads, int D, class Exists>
__device__ inline void load_rows_async(Tile<D> tile, const floatX* src, int64_t stride, int first, int HS,
                                       Exists exists) {
  constexpr int threads_per_row = D % 64 == 0 ? D / 8 : 4, rows_at_once = Threads / threads_per_row;
  static_assert(Rows % rows_at_once == 0 || rows_at_once % Rows == 0);  // as many rows per thread, or one for some
  static_assert(rows_at_once % 8 == 0, "a thread's rows have the same order of chunks");
  const int row = int(threadIdx.x) / threads_per_row, column = int(threadIdx.x) % threads_per_row;
  if (rows_at_once > Rows && row >= Rows) return;
  const int to = tile.at(row, column);
  const floatX* from = src + (first + row) * stride + column * 8;
#pragma unroll
  for (int i = 0; i < Rows; i += rows_at_once, from += rows_at_once * stride)
#pragma unroll
    for (int chunk = 0; chunk < tile.chunks; chunk += threads_per_row)
      copy_async<16>(to + i * tile.row_bytes + chunk * 16, from + chunk * 8,
                     exists(first + row + i) && (column + chunk) * 8 < HS);
}

// load_rows_async of rows that exist before `end`.
template <int Rows, int Threads, int D>
__device__ inline void load_tile_async(Tile<D> tile, const floatX* src, int64_t stride, int first, int end, int HS) {
  load_rows_async<Rows, Threads>(tile, src, stride, first, HS, [&](int row) { return row < end; });
}

// load_rows_async of rows that exist from 0 on and before `end`: `first` may be negative.
template <int Rows, int Threads, int D>
__device__ inline void load_band_async(Tile<D> tile, const floatX* src, int64_t stride, int first, int end, int HS) {
  load_rows_async<Rows, Threads>(tile, src, stride, first, HS, [&](int row) { return unsigned(row) < unsigned(end); });
}

// The floats at `offset` = elements [first, first + Count) of src, which are `stride` apart, and zeros for those from
// `end` on. Called by the whole block; its first Count threads copy.
template <int Count>
__device__ inline void load_vector_async(int offset, const float* src, int first, int end, int stride = 1) {
  const int i = int(threadIdx.x);
  if (i < Count) copy_async<4>(offset + i * int(sizeof(float)), src + (first + i) * stride, first + i < end);
}

__device__ inline float shared_float(int offset) { return *reinterpret_cast<const float*>(shared_memory + offset); }

// Rows 16 m .. 16 m + 15, channels 16 k .. 16 k + 15 of an A operand, in registers or in shared memory.
template <int M, int K>
__device__ inline void a_fragment(unsigned (&x)[4], const RegisterTile<M, K>& a, int m, int k) {
  for (int i = 0; i < 4; i++) x[i] = a.x[m][k][i];
}
template <int D>
__device__ inline void a_fragment(unsigned (&x)[4], Tile<D> a, int m, int k) {
  const int lane = int(threadIdx.x) % warp_size;
  ldmatrix<false>(x, a.further(a.at(lane % 16, lane / 16), 2 * k) + 16 * m * a.row_bytes);
}

// Rows [0, 16 M) of `tile` into registers.
template <int M, int K, int D>
__device__ inline void load_register_tile(RegisterTile<M, K>& a, Tile<D> tile) {
  static_assert(16 * K == D, "whole rows");
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int k = 0; k < K; k++) a_fragment(a.x[m][k], tile, m, k);
}

// Columns [first, first + 16 K) of rows [0, 16 M) of `tile` = a.
template <int M, int K, int D>
__device__ inline void store_register_tile(Tile<D> tile, int first, const RegisterTile<M, K>& a) {
  const int lane = int(threadIdx.x) % warp_size;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int k = 0; k < K; k++)
      for (int r = 0; r < 4; r++) {
        const int row = 16 * m + lane / 4 + r % 2 * 8, chunk = first / 8 + 2 * k + r / 2;
        *reinterpret_cast<unsigned*>(shared_memory + tile.at(row, chunk) + lane % 4 * 4) = a.x[m][k][r];
      }
}

// The destination of a product's rows: rows [first, end) of dst, which points to the sequence's row 0, and of these the
// channels below HS.
struct RowsOut {
  floatX* dst;
  int64_t stride;
  int first, end, HS;
  bool accumulate;  // +=; else =
};

// Channels [channel, channel + 8 N) of `out` = or += the warp's rows of acc, as far as they exist. `stage`: 16 M rows
// of shared memory, where no other warp uses these channels; through it the stores become 16 bytes wide.
template <int M, int N, class Stage>
__device__ inline void store_rows(const RowsOut& out, Accumulator<M, N>& acc, Stage stage, int channel = 0) {
  const int lane = int(threadIdx.x) % warp_size;
  __syncwarp();  // all lanes have read what `stage` held
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
      for (int i = 0; i < 4; i += 2) {
        const int row = acc.row(m, i), column = channel + acc.column(n, i);
        if (out.accumulate && out.first + row < out.end && column < out.HS) {
          float a, b;
          unpack2(a, b, *reinterpret_cast<const unsigned*>(out.dst + (out.first + row) * out.stride + column));
          acc.x[m][n][i] += a, acc.x[m][n][i + 1] += b;
        }
        *reinterpret_cast<unsigned*>(shared_memory + stage.at(row, column / 8) + column % 8 * 2) =
            pack2(acc.x[m][n][i], acc.x[m][n][i + 1]);
      }
  __syncwarp();
  for (int index = lane; index < 16 * M * N; index += warp_size) {
    const int row = index / N, chunk = channel / 8 + index % N;
    if (out.first + row < out.end && chunk * 8 < out.HS)
      *reinterpret_cast<uint4*>(out.dst + (out.first + row) * out.stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(shared_memory + stage.at(row, chunk));
  }
}

// ----------------------------------------------------------------------------
// Products

// acc (16 M x 8 N) += a (16 M x D) b^T, b: rows [0, 8 N) of the tile. Each fragment of b that is loaded serves 16 M
// rows.
template <class A, int M, int N, int D>
__device__ inline void mma_ABt(Accumulator<M, N>& acc, const A& a, Tile<D> b) {
  static_assert(N % 2 == 0, "an ldmatrix loads 16 rows of b");
  const int lane = int(threadIdx.x) % warp_size;
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    const int b_offset = b.further(b.at(lane / 16 * 8 + lane % 8, lane / 8 % 2), 2 * k);
    unsigned a_regs[M][4];
#pragma unroll
    for (int m = 0; m < M; m++) a_fragment(a_regs[m], a, m, k);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      unsigned b_regs[4];
      ldmatrix<false>(b_regs, b_offset + 8 * n * b.row_bytes);
#pragma unroll
      for (int m = 0; m < M; m++) {
        mma_16x8x16(acc.x[m][n], a_regs[m], {b_regs[0], b_regs[1]});
        mma_16x8x16(acc.x[m][n + 1], a_regs[m], {b_regs[2], b_regs[3]});
      }
    }
  }
}

// acc (16 M x 8 N) += a (16 M x 16 K) b, b: rows [0, 16 K) of the tile, channels [channel, channel + 8 N), which are
// columns of the instruction's B operand: hence the transposition.
template <class A, int M, int N, int D>
__device__ inline void mma_AB(Accumulator<M, N>& acc, const A& a, Tile<D> b, int channel = 0) {
  static_assert(N % 2 == 0, "an ldmatrix loads 16 channels of b");
  const int lane = int(threadIdx.x) % warp_size;
#pragma unroll
  for (int k = 0; k < A::columns / 16; k++) {
    unsigned a_regs[M][4];
#pragma unroll
    for (int m = 0; m < M; m++) a_fragment(a_regs[m], a, m, k);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      unsigned b_regs[4];
      ldmatrix<true>(b_regs, b.further(b.at(lane % 16, lane / 16), channel / 8 + n) + 16 * k * b.row_bytes);
#pragma unroll
      for (int m = 0; m < M; m++) {
        mma_16x8x16(acc.x[m][n], a_regs[m], {b_regs[0], b_regs[1]});
        mma_16x8x16(acc.x[m][n + 1], a_regs[m], {b_regs[2], b_regs[3]});
      }
    }
  }
}

// ----------------------------------------------------------------------------
// Skewed matrices: where an element belongs to a row and a distance, each row of a product is moved by one element
// against the row before it. A lane's elements come from lanes that hold the same row (or column), by one shuffle each:
// the lane that has the element knows which of two neighbouring registers it is that the other one wants.

// Each fragment of 16 rows of the result: its (row, column) = g(row, column - row + 15).
template <int M, int N>
__device__ inline Accumulator<M, N - 2> skew(const Accumulator<M, N>& g) {
  const int lane = int(threadIdx.x) % warp_size, i = lane % 4;
  const int shift = 7 - lane / 4;  // of rows 0 to 7; rows 8 to 15 shift by 8 less, which is a fragment
  Accumulator<M, N - 2> s;
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const bool odd = (c + shift) % 2 == 1, near = 2 * i + odd >= c + shift;  // of the element that this lane sends
    const int source = lane - i + (2 * i + c + shift) % 8 / 2;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < N - 2; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float(&a)[4] = g.x[m][n + 1 - h], (&b)[4] = g.x[m][n + 2 - h];
          const float x = odd ? a[2 * h + 1] : a[2 * h], y = odd ? b[2 * h + 1] : b[2 * h];
          s.x[m][n][2 * h + c] = __shfl_sync(full_warp, near ? x : y, source);
        }
  }
  return s;
}

// What skew undoes: each fragment of 16 rows of the result has (row, column) = s(row, column + row - 15), and zeros
// where s has no such column.
template <int M, int N>
__device__ inline Accumulator<M, N + 2> unskew(const Accumulator<M, N>& s) {
  const int lane = int(threadIdx.x) % warp_size, i = lane % 4, shift = 7 - lane / 4;
  Accumulator<M, N + 2> g;
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const bool odd = (c + shift) % 2 == 1, near = 2 * i + odd + shift - c < 8;
    const int source = lane - i + (2 * i + c + 8 - shift) % 8 / 2;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < N + 2; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int of_near = n - 1 + h, of_far = n - 2 + h;
          float x = 0, y = 0;
          if (0 <= of_near && of_near < N) x = odd ? s.x[m][of_near][2 * h + 1] : s.x[m][of_near][2 * h];
          if (0 <= of_far && of_far < N) y = odd ? s.x[m][of_far][2 * h + 1] : s.x[m][of_far][2 * h];
          g.x[m][n][2 * h + c] = __shfl_sync(full_warp, near ? x : y, source);
        }
  }
  return g;
}

// Columns [8 n, 8 n + 16) of s: s(row, 8 n + column) = g(row + column, column) with `down`, and else g(row - column +
// 15, column).
template <bool down, int M, int N>
__device__ inline void skew_columns(Accumulator<M, N>& s, int n, const Accumulator<M + 1, 2>& g) {
  const int lane = int(threadIdx.x) % warp_size, row = lane / 4;
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const int column = lane % 4 * 2 + c, shift = down ? column : 7 - column;
    const bool near = row >= shift;
    const int source = (row + shift) % 8 * 4 + lane % 4;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int e = 0; e < 2; e++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int a = 2 * m + h + (down ? e : 1 - e), b = a + 1;  // eight rows of g each
          s.x[m][n + e][2 * h + c] =
              __shfl_sync(full_warp, near ? g.x[a / 2][e][a % 2 * 2 + c] : g.x[b / 2][e][b % 2 * 2 + c], source);
        }
  }
}

// llmc/cuda/tile.h against what the PTX manual says of the instructions, and against products in double. Runs on the
// emulated GPU, whose instructions it compares with the manual, and on a real one.
#include <gtest/gtest.h>
#include <set>
#include <vector>
#include "dev/test/values.h"
#include "llmc/cuda/device.h"
#include "llmc/cuda/tile.h"
#include "llmc/ops/device_memory.h"

// ----------------------------------------------------------------------------
// Instructions

// d (16, 8) = a (16, 16) b (16, 8) + c (16, 8). Elements go into registers and out of them as "Matrix Fragments for
// mma.m16n8k16 with floating point type" has it: a lane has a0 .. a7 and b0 .. b3, two in a register, and c0 .. c3.
static __global__ void mma_kernel(float* d, const floatX* a, const floatX* b, const float* c) {
  const int group = int(threadIdx.x) >> 2, thread_in_group = int(threadIdx.x) % 4;
  unsigned a_regs[4] = {}, b_regs[2] = {};
  float acc[4];
  for (int i = 0; i < 8; i++) {
    const int row = (0 <= i && i < 2) || (4 <= i && i < 6) ? group : group + 8;
    const int column = i < 4 ? thread_in_group * 2 + (i & 1) : thread_in_group * 2 + (i & 1) + 8;
    a_regs[i / 2] |= unsigned(reinterpret_cast<const unsigned short*>(a)[row * 16 + column]) << i % 2 * 16;
  }
  for (int i = 0; i < 4; i++) {
    const int row = i < 2 ? thread_in_group * 2 + (i & 1) : thread_in_group * 2 + (i & 1) + 8;
    b_regs[i / 2] |= unsigned(reinterpret_cast<const unsigned short*>(b)[row * 8 + group]) << i % 2 * 16;
  }
  for (int i = 0; i < 4; i++) acc[i] = c[(i < 2 ? group : group + 8) * 8 + thread_in_group * 2 + (i & 1)];
  mma_16x8x16(acc, a_regs, b_regs);
  for (int i = 0; i < 4; i++) d[(i < 2 ? group : group + 8) * 8 + thread_in_group * 2 + (i & 1)] = acc[i];
}

// Integers, so that every sum is exact whatever the order.
template <class T>
static std::vector<T> integers(int n, int factor) {
  std::vector<T> x;
  for (int i = 0; i < n; i++) x.push_back(T(float(i * factor % 31 - 15)));
  return x;
}

TEST(Mma, HasItsFragmentsWhereTheManualSays) {
  const auto a = integers<floatX>(16 * 16, 7), b = integers<floatX>(16 * 8, 11);
  const auto c = integers<float>(16 * 8, 13);
  const DeviceArray<floatX> d_a(a), d_b(b);
  const DeviceArray<float> d_c(c), d_d(nans<float>(16 * 8));
  launch(mma_kernel, 1, warp_size, 0, d_d.data, d_a.data, d_b.data, d_c.data);
  const std::vector<float> d = d_d.to_host();
  for (int row = 0; row < 16; row++)
    for (int column = 0; column < 8; column++) {
      float sum = c[row * 8 + column];
      for (int k = 0; k < 16; k++) sum += float(a[row * 16 + k]) * float(b[k * 8 + column]);
      EXPECT_EQ(d[row * 8 + column], sum) << row << ", " << column;
    }
}

// registers (32, 4): what each lane gets of four 8 x 8 matrices with numbered elements.
template <bool transposed>
static __global__ void ldmatrix_kernel(unsigned* registers) {
  auto* elements = reinterpret_cast<unsigned short*>(shared_memory);
  for (int i = int(threadIdx.x); i < 256; i += warp_size) elements[i] = static_cast<unsigned short>(i);
  __syncwarp();
  unsigned x[4];
  ldmatrix<transposed>(x, int(threadIdx.x) * 16);
  for (int r = 0; r < 4; r++) registers[int(threadIdx.x) * 4 + r] = x[r];
}

// "Each thread holds a fragment of a row": thread 4 r + p has elements 2 p and 2 p + 1 of row r; with .trans, of column
// r.
TEST(Ldmatrix, GivesEachLaneItsFragmentOfARowOrColumn) {
  for (bool transposed : {false, true}) {
    const DeviceArray<unsigned> d_registers(std::vector<unsigned>(128));
    launch(transposed ? ldmatrix_kernel<true> : ldmatrix_kernel<false>, 1, warp_size, 512, d_registers.data);
    const std::vector<unsigned> registers = d_registers.to_host();
    for (unsigned lane = 0; lane < 32; lane++)
      for (unsigned matrix = 0; matrix < 4; matrix++) {
        const unsigned r = lane / 4, p = lane % 4;
        const unsigned low = transposed ? 2 * p * 8 + r : r * 8 + 2 * p, high = transposed ? low + 8 : low + 1;
        EXPECT_EQ(registers[lane * 4 + matrix], (matrix * 64 + low) | (matrix * 64 + high) << 16)
            << lane << ", " << matrix;
      }
  }
}

// to (32, 4) = from (32, 4) for the lanes below `end`, zeros for the others.
static __global__ void copy_kernel(float* to, const float* from, int end) {
  const int lane = int(threadIdx.x);
  copy_async<16>(lane * 16, from + lane * 4, lane < end);
  load_vector_async<8>(512, from, 2, 7);
  commit_copies();
  wait_for_copies();
  __syncwarp();
  for (int i = 0; i < 4; i++) to[i * 32 + lane] = shared_float((i * 32 + lane) * 4);
  if (lane < 8) to[128 + lane] = shared_float(512 + lane * 4);
}

TEST(CopyAsync, CopiesWhatExistsAndZerosOtherwise) {
  const auto from = random_values<float>(21 * 4, 1);  // the array ends where the copies that must not read begin
  const DeviceArray<float> d_from(from), d_to(nans<float>(136));
  launch(copy_kernel, 1, warp_size, 512 + 32, d_to.data, d_from.data, 21);
  const std::vector<float> to = d_to.to_host();
  for (size_t i = 0; i < 128; i++) EXPECT_EQ(to[i], i < 84 ? from[i] : 0.0f) << i;
  for (size_t i = 0; i < 8; i++) EXPECT_EQ(to[128 + i], i < 5 ? from[2 + i] : 0.0f) << i;
}

// Two groups of two warps; the second group meets more often than the first: in each round a thread adds what the
// other warp of its group has stored. sums (128).
static __global__ void sync_kernel(int* sums) {
  int* stored = reinterpret_cast<int*>(shared_memory);  // (2, 128): in turn
  const int i = int(threadIdx.x), group = i / 64, partner = i ^ 32;
  int sum = 0;
  for (int round = 0; round < 3 + group; round++) {
    stored[round % 2 * 128 + i] = 100 * round + i;
    sync_threads<64>(1 + group);
    sum += stored[round % 2 * 128 + partner];
  }
  sums[i] = sum;
}

// "bar.sync a, b": the barrier a is for b threads, and their accesses to memory before it are seen after it.
TEST(SyncThreads, LetsSomeWarpsOfABlockExchangeValues) {
  for (int launch_number = 0; launch_number < 8; launch_number++) {  // in other orders of threads
    const DeviceArray<int> d_sums(std::vector<int>(128, -1));
    launch(sync_kernel, 1, 128, 2 * 128 * sizeof(int), d_sums.data);
    const std::vector<int> sums = d_sums.to_host();
    for (int i = 0; i < 128; i++) EXPECT_EQ(sums[i], i < 64 ? 300 + 3 * (i ^ 32) : 600 + 4 * (i ^ 32)) << i;
  }
}

// ----------------------------------------------------------------------------
// Tiles and products

template <int D>
static void check_offsets() {
  const Tile<D> tile = {1024};
  std::set<int> offsets;
  for (int row = 0; row < 64; row++)
    for (int chunk = 0; chunk < tile.chunks; chunk++) {
      const int offset = tile.at(row, chunk);
      EXPECT_TRUE(offset % 16 == 0 && 1024 + row * D * 2 <= offset && offset < 1024 + (row + 1) * D * 2) << "outside "
                                                                                                            "its row";
      EXPECT_TRUE(offsets.insert(offset).second) << "two chunks at one offset";
      EXPECT_EQ(tile.from_row(row / 8 * 8).at(row % 8, chunk), offset);
      EXPECT_EQ(tile.further(tile.at(row, chunk % 2), chunk / 2 * 2), offset);
    }
  // What ldmatrix reads at once is in different banks.
  for (int row = 0; row < 64; row += 8)
    for (int chunk = 0; chunk < tile.chunks; chunk++) {
      std::set<int> eighths;
      for (int i = 0; i < 8; i++) eighths.insert(tile.at(row + i, chunk) / 16 % 8);
      EXPECT_EQ(eighths.size(), 8u) << "rows from " << row << ", chunk " << chunk;
    }
}
TEST(Tile, GivesEveryChunkAnOffsetWithoutBankConflicts) {
  check_offsets<32>(), check_offsets<64>(), check_offsets<96>(), check_offsets<128>();
}

// One warp: ab (16 M, D) = or += round(2 a b^T masked to column <= row + 3) c, with a (16 M, D), b and c (32, D), of
// which only HS channels and `rows` rows exist. Each form of the A operand, registers and shared memory, computes half
// of the scores. The result's channels are the halves of two products if they can be; the first has its A operand in
// registers, the second in shared memory.
template <int M, int D>
static __global__ void product_kernel(floatX* result, const floatX* a, const floatX* b, const floatX* c, int64_t stride,
                                      int rows, int HS, bool accumulate) {
  const Tile<D> a_tile = {0}, b_tile = a_tile.from_row(32), c_tile = b_tile.from_row(32);
  load_tile_async<32, 128>(a_tile, a, stride, 0, rows, HS);
  load_tile_async<32, 128>(b_tile, b, stride, 0, 32, HS);
  load_tile_async<32, 128>(c_tile, c, stride, 0, 32, HS);
  commit_copies();
  wait_for_copies();
  __syncthreads();
  if (threadIdx.x >= warp_size) return;
  RegisterTile<M, D / 16> a_rows;
  load_register_tile(a_rows, a_tile);
  Accumulator<M, 4> s = {};
  mma_ABt(s, a_rows, b_tile);
  mma_ABt(s, a_tile, b_tile);
  mask(s, [](int row, int column) { return column > row + 3; });
  for (auto& m : s.x)
    for (auto& n : m)
      for (float& x : n) x = x == -INFINITY ? 0.0f : x;
  constexpr int parts = D > 32 ? 2 : 1;  // a part has pairs of 8 channels
  Accumulator<M, D / 8 / parts> acc = {};
  mma_AB(acc, to_floatX(s), c_tile);
  scale(acc, 0.5f);
  store_rows({result, stride, 0, rows, HS, accumulate}, acc, a_tile);
  if (parts == 1) return;
  const Tile<32> s_tile = {b_tile.offset};
  __syncwarp();
  store_register_tile(s_tile, 0, to_floatX(s));
  __syncwarp();
  acc = {};
  mma_AB(acc, s_tile, c_tile, D / 2);
  scale(acc, 0.5f);
  store_rows({result, stride, 0, rows, HS, accumulate}, acc, a_tile, D / 2);
}

template <int M, int D>
static void check_product(int rows, int HS) {
  SCOPED_TRACE(testing::Message() << "M = " << M << ", D = " << D << ", HS = " << HS << ", rows = " << rows);
  const int64_t stride = HS + 8;
  const auto a = random_values<floatX>(rows * stride, 1), b = random_values<floatX>(32 * stride, 2),
             c = random_values<floatX>(32 * stride, 3);
  for (bool accumulate : {false, true}) {
    const auto before = random_values<floatX>(rows * stride, 4);
    const DeviceArray<floatX> d_a(a), d_b(b), d_c(c), d_result(before);
    launch(product_kernel<M, D>, 1, 128, size_t(3 * 32) * D * 2, d_result.data, d_a.data, d_b.data, d_c.data, stride,
           rows, HS, accumulate);
    std::vector<double> expected(before.size());
    for (size_t i = 0; i < before.size(); i++) expected[i] = double(float(before[i]));
    for (int row = 0; row < rows; row++)
      for (int64_t i = 0; i < HS; i++) {
        double sum = 0;
        for (int column = 0; column < 32 && column <= row + 3; column++) {
          double s = 0;
          for (int64_t j = 0; j < HS; j++)
            s += 2 * double(float(a[row * stride + j])) * double(float(b[column * stride + j]));
          sum += s * double(float(c[column * stride + i]));
        }
        double& x = expected[row * stride + i];
        x = 0.5 * sum + (accumulate ? x : 0);
      }
    EXPECT_LE(relative_error(d_result.to_host(), expected), is_fp16 ? 5e-4 : 4e-3);  // two roundings to 11 or 8 bits
  }
}
TEST(Products, OfTilesAndRegistersAreThoseOfMatrices) {
  check_product<2, 32>(32, 32), check_product<2, 64>(32, 64), check_product<2, 96>(32, 96),
      check_product<2, 128>(32, 128);
  check_product<2, 32>(29, 8), check_product<2, 64>(17, 40), check_product<2, 96>(32, 80),
      check_product<2, 128>(5, 104);
  check_product<1, 96>(16, 96), check_product<1, 128>(11, 128);
}

// ----------------------------------------------------------------------------
// Skewed matrices

// (16 M, 8 N) in memory from and to a warp's registers.
template <int M, int N>
static __device__ Accumulator<M, N> load_accumulator(const float* x) {
  Accumulator<M, N> acc;
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++)
      for (int i = 0; i < 4; i++) acc.x[m][n][i] = x[acc.row(m, i) * 8 * N + acc.column(n, i)];
  return acc;
}
template <int M, int N>
static __device__ void store_accumulator(float* x, const Accumulator<M, N>& acc) {
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++)
      for (int i = 0; i < 4; i++) x[acc.row(m, i) * 8 * N + acc.column(n, i)] = acc.x[m][n][i];
}

// s (32, 32) = the skewed g (32, 48), back (32, 48) = s unskewed; down, up (16, 32): the columns [16, 32) of them are
// the first (32, 16) elements of g with its columns skewed in either direction.
static __global__ void skew_kernel(float* s, float* back, float* down, float* up, const float* g) {
  const Accumulator<2, 4> skewed = skew(load_accumulator<2, 6>(g));
  store_accumulator(s, skewed);
  store_accumulator(back, unskew(skewed));
  Accumulator<1, 4> columns = {};
  skew_columns<true>(columns, 2, load_accumulator<2, 2>(g));
  store_accumulator(down, columns);
  skew_columns<false>(columns, 2, load_accumulator<2, 2>(g));
  store_accumulator(up, columns);
}

TEST(Skewed, ElementsAreThoseOfRowAndDistance) {
  std::vector<float> g(32 * 48);
  for (size_t i = 0; i < g.size(); i++) g[i] = float(i + 1);
  const DeviceArray<float> d_g(g), d_s(nans<float>(32 * 32)), d_back(nans<float>(32 * 48)),
      d_down(nans<float>(16 * 32)), d_up(nans<float>(16 * 32));
  launch(skew_kernel, 1, warp_size, 0, d_s.data, d_back.data, d_down.data, d_up.data, d_g.data);
  const std::vector<float> s = d_s.to_host(), back = d_back.to_host(), down = d_down.to_host(), up = d_up.to_host();
  for (int row = 0; row < 32; row++) {
    for (int column = 0; column < 32; column++)
      EXPECT_EQ(s[row * 32 + column], g[row * 48 + column - row % 16 + 15]) << row << ", " << column;
    for (int column = 0; column < 48; column++) {
      const int of_s = column + row % 16 - 15;
      EXPECT_EQ(back[row * 48 + column], 0 <= of_s && of_s < 32 ? g[row * 48 + column] : 0) << row << ", " << column;
    }
  }
  for (int row = 0; row < 16; row++)
    for (int column = 0; column < 16; column++) {
      EXPECT_EQ(down[row * 32 + 16 + column], g[(row + column) * 16 + column]) << row << ", " << column;
      EXPECT_EQ(up[row * 32 + 16 + column], g[(row - column + 15) * 16 + column]) << row << ", " << column;
    }
}

#ifdef SLA_EMU
TEST(Products, HaveNoBankConflicts) {
  const emu::Counters before = emu::counters();
  check_product<2, 32>(32, 32), check_product<2, 64>(32, 64), check_product<2, 96>(32, 96),
      check_product<2, 128>(32, 128);
  EXPECT_GT(emu::counters().matrices_loaded, before.matrices_loaded);
  EXPECT_EQ(emu::counters().bank_conflicts, before.bank_conflicts);
}
#endif

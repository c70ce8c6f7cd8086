// Races in shared memory that the emulated GPU finds in kernels that g++ has compiled, each beside the same code
// without it. (Those in nvcc's code: test_emu_ptx.cpp.)
//
// COVERS dev/emu/shared_memory.cpp dev/emu/races. dev/emu/block.cpp dev/emu/tensor_core.cpp
#include <gtest/gtest.h>
#include <cstdint>
#include <string>
#include "dev/test/emu_test.h"

struct EmuRacesDeathTest : EmuDeathTest {};

static const std::string line = " it at [^ ]+(test_emu_races.cpp|emu_device.h):[0-9]+";
static const std::string race =
    "emulated GPU: in kernel .*block \\(0,0,0\\), thread \\(.*: race: byte .* of shared memory, no barrier "
    "between: (reads" +
    line + "; thread .* has written" + line + "|writes" + line + "; thread .* has (read|written)" + line + ")";

// ----------------------------------------------------------------------------
// Threads that exchange values

enum class Between { nothing, syncwarp, syncwarp_of_half, syncthreads, shuffle, vote, reduction, mma };

__device__ static void come_between(Between what) {
  float d[4] = {};
  const unsigned a[4] = {}, b[2] = {};
  if (what == Between::syncwarp) __syncwarp();
  if (what == Between::syncwarp_of_half) __syncwarp(threadIdx.x % 32 < 16 ? 0xffffu : 0xffff0000u);
  if (what == Between::syncthreads) __syncthreads();
  if (what == Between::shuffle) __shfl_sync(all_lanes, 1, 0);
  if (what == Between::vote) __any_sync(all_lanes, 1);
  if (what == Between::reduction) __reduce_add_sync(all_lanes, 1);
  if (what == Between::mma) emu::mma_m16n8k16(d, a, b, emu::MmaType::bf16);
}

// In shared memory it is loaded and stored at once.
struct alignas(16) Four {
  float x, y, z, w;
  Four() = default;
  explicit Four(unsigned i) : x(float(i)), y(x), z(x), w(x) {}
};

// Each thread gets the value of the thread whose number is its own xor `partner`.
template <class T>
__global__ void exchange_values(T* out, unsigned partner, Between between) {
  T* values = reinterpret_cast<T*>(shared_memory);
  values[threadIdx.x] = T(threadIdx.x);
  come_between(between);
  out[threadIdx.x] = values[threadIdx.x ^ partner];
}

template <class T = float>
static void exchange(unsigned partner, Between between) {
  Array<T> out(64);
  run(exchange_values<T>, 1, 64, 64 * sizeof(T), out.data, partner, between);
}

TEST_F(EmuRacesDeathTest, OnlyABarrierOrdersAnExchangeOfLanes) {
  exchange(1, Between::syncwarp);
  exchange(1, Between::syncthreads);
  EXPECT_DEATH(exchange(1, Between::nothing), race);
  EXPECT_DEATH(exchange(1, Between::shuffle), race);
  EXPECT_DEATH(exchange(1, Between::vote), race);
  EXPECT_DEATH(exchange(1, Between::reduction), race);
  EXPECT_DEATH(exchange(1, Between::mma), race);
}

TEST_F(EmuRacesDeathTest, ASyncwarpOrdersItsLanesOnly) {
  exchange(8, Between::syncwarp_of_half);
  EXPECT_DEATH(exchange(16, Between::syncwarp_of_half), race);
  exchange(32, Between::syncthreads);
  EXPECT_DEATH(exchange(32, Between::syncwarp), race);
}

TEST_F(EmuRacesDeathTest, NeighboursOfAnySizeAreToldApart) {
  exchange<uint8_t>(0, Between::nothing);
  exchange<uint16_t>(0, Between::nothing);
  exchange<double>(0, Between::nothing);
  exchange<Four>(0, Between::nothing);
  EXPECT_DEATH(exchange<uint8_t>(1, Between::nothing), race);
  EXPECT_DEATH(exchange<uint16_t>(1, Between::nothing), race);
  EXPECT_DEATH(exchange<double>(1, Between::nothing), race);
  EXPECT_DEATH(exchange<Four>(1, Between::nothing), race);
}

// The word is read before any byte has been accessed alone.
__global__ void read_word_write_byte(int* out, bool with_barrier) {
  if (threadIdx.x == 30) *out = reinterpret_cast<int*>(shared_memory)[31];
  __any_sync(all_lanes, 1);
  if (with_barrier) __syncwarp();
  if (threadIdx.x == 31) shared_memory[4 * 31 + 3] = 1;
}

TEST_F(EmuRacesDeathTest, ABytesWriteMeetsTheReadOfItsWord) {
  Array<int> out(1);
  run(read_word_write_byte, 1, 32, 128, out.data, true);
  EXPECT_DEATH(run(read_word_write_byte, 1, 32, 128, out.data, false), race);
}

// ----------------------------------------------------------------------------
// Several threads, one cell

enum class Cell { same_value, other_value, added_to, atomically_added_to, atomically_added_to_and_read };

__global__ void change_cell(int* out, Cell what) {
  int* cell = reinterpret_cast<int*>(shared_memory);
  if (threadIdx.x == 0) *cell = 0;
  __syncthreads();
  if (what == Cell::same_value) *cell = 7;
  if (what == Cell::other_value) *cell = int(threadIdx.x);
  if (what == Cell::added_to) *cell += 1;
  if (what == Cell::atomically_added_to || what == Cell::atomically_added_to_and_read) atomicAdd(cell, 1);
  if (what != Cell::atomically_added_to_and_read) __syncthreads();
  out[threadIdx.x] = *cell;
}

static void change(Cell what) {
  Array<int> out(64);
  run(change_cell, 1, 64, sizeof(int), out.data, what);
}

TEST_F(EmuRacesDeathTest, ThreadsMayStoreTheSameOrAddAtomically) {
  change(Cell::same_value);
  change(Cell::atomically_added_to);
  EXPECT_DEATH(change(Cell::other_value), race);
  EXPECT_DEATH(change(Cell::atomically_added_to_and_read), race);
}

// g++ announces to AddressSanitizer that the cell is read, and not that it is written.
__global__ void add_to_own_cell_of(unsigned distance) {
  int* cells = reinterpret_cast<int*>(shared_memory);
  cells[threadIdx.x] = 0;
  __syncthreads();
  cells[threadIdx.x / distance * distance] += 1;
}

TEST_F(EmuRacesDeathTest, AReadModifyWriteIsAWrite) {
  EXPECT_DEATH(change(Cell::added_to), race);
  run(add_to_own_cell_of, 1, 64, 64 * sizeof(int), 1);
  EXPECT_DEATH(run(add_to_own_cell_of, 1, 64, 64 * sizeof(int), 64), race);
}

// ----------------------------------------------------------------------------
// Tensor cores and asynchronous copies

__global__ void load_matrices(bool with_barrier) {
  reinterpret_cast<int*>(shared_memory)[threadIdx.x] = 0;
  if (with_barrier) __syncwarp();
  unsigned d[4];
  emu::ldmatrix_x4(d, shared_memory + threadIdx.x % 8 * 16, false);
}

TEST_F(EmuRacesDeathTest, LdmatrixReadsWhatOtherLanesWrite) {
  run(load_matrices, 1, 32, 128, true);
  EXPECT_DEATH(run(load_matrices, 1, 32, 128, false), race);
}

enum class Mistake { none, no_wait, no_barrier, waits_before_the_commit, no_second_barrier };
__global__ void copy_twice(float* out, const float* x, Mistake mistake) {
  float* buffer = reinterpret_cast<float*>(shared_memory);
  const unsigned i = threadIdx.x;
  for (int round = 0; round < 2; round++) {
    emu::cp_async(buffer + i, x + i, 4, 4);
    if (mistake == Mistake::waits_before_the_commit) emu::cp_async_wait_group(0);
    emu::cp_async_commit_group();
    if (mistake == Mistake::none || mistake == Mistake::no_barrier || mistake == Mistake::no_second_barrier)
      emu::cp_async_wait_group(0);
    if (mistake != Mistake::no_barrier) __syncthreads();
    out[i] = buffer[i ^ 1];
    if (mistake != Mistake::no_second_barrier) __syncthreads();
  }
}

static void copy_with(Mistake mistake) {
  Stream stream;
  Array<float> x(ramp(64), stream), out(64);
  check(launch(copy_twice, 1, 64, 64 * sizeof(float), stream, out.data, x.data, mistake));
  check(cudaStreamSynchronize(stream));
}

TEST_F(EmuRacesDeathTest, AnAsynchronousCopyNeedsAWaitAndABarrier) {
  copy_with(Mistake::none);
  copy_with(Mistake::none);
  EXPECT_DEATH(copy_with(Mistake::no_wait), race);
  EXPECT_DEATH(copy_with(Mistake::waits_before_the_commit), race);
  EXPECT_DEATH(copy_with(Mistake::no_barrier), race);
  EXPECT_DEATH(copy_with(Mistake::no_second_barrier), race);
}

// A copy that nobody waits for is no race in the next block.
__global__ void start_copy_and_end(const float* x) { emu::cp_async(shared_memory + threadIdx.x * 4, x, 4, 4); }

TEST_F(EmuRacesDeathTest, EachBlockBeginsAnew) {
  Array<float> x(ramp(1), Stream());
  run(start_copy_and_end, 20, 32, 128, x.data);
  for (int i = 0; i < 5; i++) exchange(1, Between::syncwarp);
}

TEST_F(EmuRacesDeathTest, AreNotLookedForWhereTheyAreAllowed) {
  const RacesAllowed allowed;
  exchange(1, Between::nothing);
  emu::look_for_races(true);
  EXPECT_DEATH(exchange(1, Between::nothing), race);
}

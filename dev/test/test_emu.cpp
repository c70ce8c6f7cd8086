// The emulated GPU itself: every mistake that it should find is planted once, beside the same code without the mistake.
//
// COVERS dev/emu/
#include <gtest/gtest.h>
#include <sanitizer/asan_interface.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "dev/test/emu_test.h"
#include "dev/test/values.h"

// ----------------------------------------------------------------------------
// Orders

// out[block] = the sum of the block's 256 elements. WithBarrier: whether the tree waits between its levels.
template <bool WithBarrier>
__global__ void block_sum(float* out, const float* x) {
  float* partial = reinterpret_cast<float*>(shared_memory);
  partial[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
  for (unsigned stride = blockDim.x / 2; stride > 0; stride /= 2) {
    if (WithBarrier || stride != blockDim.x / 8) __syncthreads();
    if (threadIdx.x < stride) partial[threadIdx.x] += partial[threadIdx.x + stride];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = partial[0];
}

template <bool WithBarrier>
static std::vector<float> block_sum_under(int seed) {
  emu::set_seed(uint64_t(seed));
  Stream stream;
  Array<float> x(ramp(1024), stream), out(4);
  check(launch(block_sum<WithBarrier>, 4, 256, 256 * sizeof(float), stream, out.data, x.data));
  return out.to_host(stream);
}

TEST(EmuOrder, AReductionWithBarriersHasTheSameBits) {
  const std::vector<float> first = block_sum_under<true>(1);
  double sum = 0;
  for (int i = 0; i < 256; i++) sum += ramp(256)[i];
  EXPECT_NEAR(first[0], sum, 1e-3);
  for (int seed = 2; seed <= num_seeds; seed++)
    EXPECT_TRUE(same_bits(block_sum_under<true>(seed), first)) << "seed " << seed;
}

TEST(EmuOrder, AReductionThatLacksOneBarrierDiffersUnderSomeSeed) {
  const RacesAllowed allowed;
  const std::vector<float> right = block_sum_under<true>(1);
  int wrong = 0;
  for (int seed = 1; seed <= num_seeds; seed++) wrong += !same_bits(block_sum_under<false>(seed), right);
  EXPECT_GT(wrong, 0);
}

// Two rounds through one buffer: a thread that runs ahead overwrites what another has still to read, unless a barrier
// follows the reading too.
template <bool WithSecondBarrier>
__global__ void rotate_twice(int* out) {
  int* buffer = reinterpret_cast<int*>(shared_memory);
  int value = int(threadIdx.x);
  for (int round = 0; round < 2; round++) {
    buffer[threadIdx.x] = value;
    __syncthreads();
    value = buffer[(threadIdx.x + 1) % blockDim.x];
    if (WithSecondBarrier) __syncthreads();
  }
  out[threadIdx.x] = value;
}

template <bool WithSecondBarrier>
static int num_seeds_with_wrong_rotation() {
  int wrong = 0;
  for (int seed = 1; seed <= num_seeds; seed++) {
    emu::set_seed(uint64_t(seed));
    Stream stream;
    Array<int> out(96);
    check(launch(rotate_twice<WithSecondBarrier>, 1, 96, 96 * sizeof(int), stream, out.data));
    bool right = true;
    const std::vector<int> values = out.to_host(stream);
    for (int i = 0; i < 96; i++) right = right && values[i] == (i + 2) % 96;
    wrong += !right;
  }
  return wrong;
}

TEST(EmuOrder, ABufferReusedWithoutABarrierIsOverwritten) {
  const RacesAllowed allowed;
  EXPECT_EQ(num_seeds_with_wrong_rotation<true>(), 0);
  EXPECT_GT(num_seeds_with_wrong_rotation<false>(), 0);
}

template <bool WithSyncwarp>
__global__ void exchange_in_warp(int* out) {
  int* buffer = reinterpret_cast<int*>(shared_memory);
  buffer[threadIdx.x] = int(threadIdx.x);
  if (WithSyncwarp) __syncwarp();
  out[threadIdx.x] = buffer[threadIdx.x ^ 1];
}

template <bool WithSyncwarp>
static int num_seeds_with_wrong_exchange() {
  int wrong = 0;
  for (int seed = 1; seed <= num_seeds; seed++) {
    emu::set_seed(uint64_t(seed));
    Stream stream;
    Array<int> out(32);
    check(launch(exchange_in_warp<WithSyncwarp>, 1, 32, 32 * sizeof(int), stream, out.data));
    bool right = true;
    const std::vector<int> values = out.to_host(stream);
    for (int i = 0; i < 32; i++) right = right && values[i] == (i ^ 1);
    wrong += !right;
  }
  return wrong;
}

TEST(EmuOrder, LanesThatExchangeThroughSharedMemoryNeedSyncwarp) {
  const RacesAllowed allowed;
  EXPECT_EQ(num_seeds_with_wrong_exchange<true>(), 0);
  EXPECT_GT(num_seeds_with_wrong_exchange<false>(), 0);
}

TEST(EmuOrder, AFloatSumByAtomicsHasTheSeedsBits) {
  std::vector<float> first;
  int different = 0;
  for (int seed = 1; seed <= num_seeds; seed++) {
    emu::set_seed(uint64_t(seed));
    Stream stream;
    Array<float> x(ramp(1024), stream), sum(std::vector<float>{0.0f}, stream);
    check(launch(sum_by_atomics, 4, 256, 0, stream, sum.data, x.data));
    const std::vector<float> result = sum.to_host(stream);
    if (seed == 1) first = result;
    different += !same_bits(result, first);
  }
  EXPECT_GT(different, 0);
}

__global__ void draw_order(int* out, int* count) {
  out[atomicAdd(count, 1)] = int(blockIdx.x * blockDim.x + threadIdx.x);
}

static std::vector<int> order_under(int seed) {
  emu::set_seed(uint64_t(seed));
  Stream stream;
  Array<int> out(64), count(std::vector<int>{0}, stream);
  check(launch(draw_order, 4, 16, 0, stream, out.data, count.data));
  return out.to_host(stream);
}

TEST(EmuOrder, OneSeedIsOneOrder) {
  EXPECT_EQ(order_under(7), order_under(7));
  EXPECT_NE(order_under(7), order_under(8));
}

TEST(EmuOrder, BlocksAndThreadsWithoutBarriersRunInRandomOrder) {
  int blocks_in_order = 0, threads_in_order = 0;
  for (int seed = 1; seed <= num_seeds; seed++) {
    const std::vector<int> order = order_under(seed);
    threads_in_order += std::is_sorted(order.begin(), order.begin() + 16);
    blocks_in_order +=
        order[0] / 16 < order[16] / 16 && order[16] / 16 < order[32] / 16 && order[32] / 16 < order[48] / 16;
  }
  EXPECT_EQ(threads_in_order, 0);
  EXPECT_LT(blocks_in_order, 5);  // by chance, one of 24
}

__global__ void write_indices(uint3* thread, uint3* block) {
  const unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  __syncthreads();  // indices must survive a switch
  const unsigned i = b * blockDim.x * blockDim.y * blockDim.z + t;
  thread[i] = threadIdx;
  block[i] = blockIdx;
}

TEST(EmuOrder, EveryThreadOfEveryBlockRunsOnceWithItsIndices) {
  Stream stream;
  Array<uint3> thread(24 * 30), block(24 * 30);
  check(launch(write_indices, dim3(2, 3, 4), dim3(5, 3, 2), 0, stream, thread.data, block.data));
  const std::vector<uint3> t = thread.to_host(stream), b = block.to_host(stream);
  for (unsigned i = 0; i < 24 * 30; i++) {
    EXPECT_EQ(t[i].x + 5 * (t[i].y + 3 * t[i].z), i % 30);
    EXPECT_EQ(b[i].x + 2 * (b[i].y + 3 * b[i].z), i / 30);
  }
}

// ----------------------------------------------------------------------------
// Memory

// Thread `culprit` of the grid reads x[index], the others x[0].
template <class T>
__global__ void read_at(float* out, const T* x, int index, int culprit) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  const T value = x[i == culprit ? index : 0];
  float first;
  memcpy(&first, &value, sizeof first);
  out[i] = first;
}

TEST(EmuMemory, IsCountedWhileItIsAllocated) {
  const uint64_t before = emu::counters().bytes_allocated;
  {
    Array<float> x(100);
    EXPECT_EQ(emu::counters().bytes_allocated, before + 400);
    emu::forget_most_bytes_allocated();
    { Array<float> y(50); }
    Array<float> z(10);
    EXPECT_EQ(emu::counters().bytes_allocated, before + 440);
    EXPECT_EQ(emu::counters().most_bytes_allocated, before + 600);
  }
  EXPECT_EQ(emu::counters().bytes_allocated, before);
  EXPECT_EQ(emu::counters().most_bytes_allocated, before + 600);
  emu::forget_most_bytes_allocated();
  EXPECT_EQ(emu::counters().most_bytes_allocated, before);
}

struct EmuMemoryDeathTest : EmuDeathTest {};

TEST_F(EmuMemoryDeathTest, AReadPastTheEndNamesKernelBlockAndThread) {
  Array<float> x(100), out(128);
  run(read_at<float>, 4, 32, 0, out.data, x.data, 99, 69);
  EXPECT_DEATH(run(read_at<float>, 4, 32, 0, out.data, x.data, 100, 69), "emulated GPU: in kernel void "
                                                                         "read_at<float>.*, block \\(2,0,0\\), thread "
                                                                         "\\(5,0,0\\): reads 4 byte\\(s\\).* 0 bytes "
                                                                         "past the end of a device allocation of 400 "
                                                                         "bytes");
  EXPECT_DEATH(run(read_at<float>, 4, 32, 0, out.data, x.data, -1, 69), "4 bytes before a device allocation of 400 "
                                                                        "bytes");
}

TEST_F(EmuMemoryDeathTest, AReadFarFromAnyAllocationDies) {
  Array<float> x(100), out(128);
  EXPECT_DEATH(run(read_at<float>, 4, 32, 0, out.data, x.data, 1 << 30, 69), "in kernel void read_at<float>.*nothing "
                                                                             "has been");
}

TEST_F(EmuMemoryDeathTest, AReadInAGapThatTheProgramPoisonedDies) {
  Array<float> x(128), out(128);
  ASAN_POISON_MEMORY_REGION(x.data + 100, 28 * sizeof(float));
  run(read_at<float>, 4, 32, 0, out.data, x.data, 99, 69);
  EXPECT_DEATH(run(read_at<float>, 4, 32, 0, out.data, x.data, 100, 69), "thread \\(5,0,0\\): reads .*byte 400 of a "
                                                                         "device allocation of 512 bytes, which the "
                                                                         "program itself has poisoned");
}

TEST_F(EmuMemoryDeathTest, AUseAfterFreeDies) {
  Array<float> out(128);
  float* x;
  check(cudaMalloc(&x, 400));
  check(cudaFree(x));
  EXPECT_DEATH(run(read_at<float>, 4, 32, 0, out.data, x, 99, 69), "in kernel void read_at<float>.*not allocated, or "
                                                                   "no longer");
}

TEST_F(EmuMemoryDeathTest, AMisalignedVectorLoadDies) {
  Array<float> x(128), out(128);
  const auto* vectors = reinterpret_cast<const float4*>(x.data);
  run(read_at<float4>, 4, 32, 0, out.data, vectors, 1, 69);
  const auto* misaligned = reinterpret_cast<const float4*>(x.data + 2);
  EXPECT_DEATH(run(read_at<float4>, 4, 32, 0, out.data, misaligned, 1, 69), "in kernel void "
                                                                            "read_at<float4>.*misaligned");
}

__global__ void read_shared(float* out, int index) {
  shared_memory[threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x == 3) out[0] = float(shared_memory[index]);
}

TEST_F(EmuMemoryDeathTest, AReadPastTheLaunchsSharedMemoryDies) {
  Array<float> out(1);
  run(read_shared, 1, 100, 100, out.data, 99);
  EXPECT_DEATH(run(read_shared, 1, 100, 100, out.data, 100), "in kernel read_shared.*, thread \\(3,0,0\\): reads 1 "
                                                             "byte");
}

TEST_F(EmuMemoryDeathTest, HostCodeThatTouchesDeviceMemoryDies) {
  Array<float> x(100);
  EXPECT_DEATH(printf("%f", double(x.data[25])), "emulated GPU: in host code: host code accesses device memory at "
                                                 ".*byte 100 of a device allocation of 400 bytes");
  EXPECT_DEATH(shared_memory[0] = 1, "emulated GPU: in host code: writes 1 byte");
}

__attribute__((noinline)) __device__ float recurse(int depth, float x) {
  volatile float array[64] = {x};
  return depth == 0 ? array[0] : recurse(depth - 1, array[depth % 64]) + array[0];
}
__global__ void overflow_stack(float* out, int depth) { out[0] = recurse(depth, 1.0f); }

TEST_F(EmuMemoryDeathTest, AStackOverflowDies) {
  Array<float> out(1);
  run(overflow_stack, 1, 1, 0, out.data, 10);
  EXPECT_DEATH(run(overflow_stack, 1, 1, 0, out.data, 1 << 20), "in kernel overflow_stack.*: stack overflow");
}

TEST_F(EmuMemoryDeathTest, ACopyOrMemsetThatLeavesItsAllocationDies) {
  Stream stream;
  Array<float> x(100), y(100);
  std::vector<float> host(200);
  const auto copy = [&](void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    cudaMemcpyAsync(to, from, bytes, kind, stream);
  };
  EXPECT_DEATH(copy(x, host.data(), 404, cudaMemcpyHostToDevice), "in host code: cudaMemcpyAsync: destination .* has "
                                                                  "404 bytes, 4 more than are left");
  EXPECT_DEATH(copy(x, y + 1, 400, cudaMemcpyDeviceToDevice), "cudaMemcpyAsync: source .* has 400 bytes, 4 more than "
                                                              "are left");
  EXPECT_DEATH(copy(x, host.data(), 400, cudaMemcpyDeviceToDevice), "cudaMemcpyAsync: source .* is not device memory");
  EXPECT_DEATH(copy(host.data(), x, 400, cudaMemcpyHostToDevice), "cudaMemcpyAsync: destination .* is not device "
                                                                  "memory");
  EXPECT_DEATH(copy(host.data(), host.data() + 100, 404, cudaMemcpyHostToDevice), "is not device memory");
  EXPECT_DEATH(cudaMemsetAsync(x, 0, 404, stream), "cudaMemsetAsync: destination .* has 404 bytes, 4 more than are "
                                                   "left");
}

TEST_F(EmuMemoryDeathTest, AMemsetMayCrossAGapAndACopyNot) {
  Stream stream;
  Array<float> x(128), y(128);
  ASAN_POISON_MEMORY_REGION(x.data + 50, 10 * sizeof(float));
  check(cudaMemsetAsync(x, 0, 512, stream));
  check(cudaStreamSynchronize(stream));
  EXPECT_DEATH(cudaMemcpyAsync(y, x, 512, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync: source .* among them "
                                                                             "byte 200 of a device allocation of 512 "
                                                                             "bytes, which the program itself");
  check(cudaMemcpyAsync(y, x, 200, cudaMemcpyDeviceToDevice, stream));
  EXPECT_EQ(y.to_host(stream)[49], 0.0f);
}

TEST(EmuMemory, FreshMemoryReadsAsNaN) {
  Stream stream;
  Array<float> x(1000);
  for (float value : x.to_host(stream)) EXPECT_TRUE(std::isnan(value));
  Array<__nv_bfloat16> y(1000);
  for (__nv_bfloat16 value : y.to_host(stream)) EXPECT_TRUE(std::isnan(float(value)));
}

__global__ void copy_shared(float* out) {
  float* shared = reinterpret_cast<float*>(shared_memory);
  out[blockIdx.x] = shared[7];
  shared[7] = 1.0f;
}

TEST(EmuMemory, SharedMemoryIsNanAtEveryBlocksBeginning) {
  Stream stream;
  Array<float> out(10);
  check(launch(copy_shared, 10, 1, 32, stream, out.data));
  for (float value : out.to_host(stream)) EXPECT_TRUE(std::isnan(value));
}

TEST(EmuMemory, AllocationsAreAlignedAndTooLargeOnesFail) {
  for (size_t bytes : {1, 255, 4096, 100000}) {
    Array<char> x(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(x.data) % 256, 0u);
    EXPECT_NE(reinterpret_cast<uintptr_t>(x.data) % 512, 0u) << "more than cudaMalloc promises would hide mistakes";
  }
  char* p;
  EXPECT_EQ(cudaMalloc(&p, size_t(1) << 45), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  size_t available, total;
  check(cudaMemGetInfo(&available, &total));
  EXPECT_LT(available, total);
}

// ----------------------------------------------------------------------------
// Threads that do not synchronize as they should

struct EmuDivergenceDeathTest : EmuDeathTest {};

__global__ void leave_before_barrier(int leaver) {
  if (int(threadIdx.x) == leaver) return;
  __syncthreads();
}

TEST_F(EmuDivergenceDeathTest, AThreadThatEndsBeforeABarrierOfOthersDies) {
  run(leave_before_barrier, 1, 64, 0, -1);
  EXPECT_DEATH(run(leave_before_barrier, 2, 64, 0, 33), "in kernel leave_before_barrier.*, block .*, thread .*: "
                                                        "deadlock: waits in __syncthreads at .*test_emu.cpp:.*, where "
                                                        "63 of 64 threads are, for thread \\(33,0,0\\), which has "
                                                        "ended");
}

__global__ void two_barriers() {
  if (threadIdx.x < 32) __syncthreads();
  else __syncthreads();
}

TEST_F(EmuDivergenceDeathTest, ABarrierInBothBranchesOfAnIfDies) {
  run(two_barriers, 1, 32, 0);
  EXPECT_DEATH(run(two_barriers, 1, 64, 0), "divergence: is in __syncthreads at .* and should synchronize with thread");
}

__global__ void some_warps(int barrier, int threads, int come) {
  if (int(threadIdx.x) < come) emu::bar_sync(barrier, threads);
}

TEST_F(EmuDivergenceDeathTest, ABarrierOfSomeWarpsDiesWithoutOneOrWithAnother) {
  run(some_warps, 1, 96, 0, 15, 64, 64);
  EXPECT_DEATH(run(some_warps, 1, 96, 0, 3, 64, 63), "deadlock: waits in bar.sync at .*, where 63 of 64 threads are, "
                                                     "for thread \\(63,0,0\\)");
  EXPECT_DEATH(run(some_warps, 1, 96, 0, 3, 64, 96), "deadlock: waits in bar.sync at .*, where 32 of 64 threads are");
  EXPECT_DEATH(run(some_warps, 1, 96, 0, 0, 64, 64), "bar.sync at .*: barrier 0 of 64 threads");
  EXPECT_DEATH(run(some_warps, 1, 96, 0, 16, 64, 64), "bar.sync at .*: barrier 16 of 64 threads");
  EXPECT_DEATH(run(some_warps, 1, 96, 0, 1, 40, 40), "bar.sync at .*: barrier 1 of 40 threads");
  EXPECT_DEATH(run(some_warps, 1, 96, 0, 1, 128, 96), "bar.sync at .*: barrier 1 of 128 threads, in a block of 96");
}

__global__ void shuffle_without(int absent, bool waits_at_barrier) {
  if (int(threadIdx.x) != absent) __shfl_xor_sync(all_lanes, 1, 16);
  else if (waits_at_barrier) __syncthreads();
}

TEST_F(EmuDivergenceDeathTest, AShuffleDiesWithoutALaneOfItsMask) {
  run(shuffle_without, 1, 32, 0, -1, false);
  EXPECT_DEATH(run(shuffle_without, 1, 32, 0, 5, false), "deadlock: waits in __shfl_xor_sync at .*, mask 0xffffffff, "
                                                         "for lanes 0x00000020, among them thread \\(5,0,0\\), "
                                                         "which has ended");
  EXPECT_DEATH(run(shuffle_without, 1, 32, 0, 5, true), "thread \\(5,0,0\\), which waits in __syncthreads at "
                                                        ".*test_emu.cpp");
  EXPECT_DEATH(run(shuffle_without, 1, 48, 0, -1, false), "thread number 48, which the block of 48 does not have");
}

__global__ void different_collectives() {
  if (threadIdx.x == 7) __any_sync(all_lanes, 1);
  else __all_sync(all_lanes, 1);
}

__global__ void different_masks() { __syncwarp(threadIdx.x == 7 ? 0xff : all_lanes); }
__global__ void foreign_mask() { __syncwarp(0xf0); }

TEST_F(EmuDivergenceDeathTest, LanesInDifferentCollectivesOrWithDifferentMasksDie) {
  EXPECT_DEATH(run(different_collectives, 1, 32, 0), "divergence: is in __a.._sync at .* and should synchronize with "
                                                     "thread");
  EXPECT_DEATH(run(different_masks, 1, 32, 0), "deadlock: waits in __syncwarp at .*, mask 0x");
  EXPECT_DEATH(run(foreign_mask, 1, 4, 0), "with mask 0x000000f0, which is without that lane");
}

// ----------------------------------------------------------------------------
// Warp collectives and intrinsics: the values

struct Shuffled {
  int all, masked, up, down, exchanged, narrow, narrow_down, narrow_exchanged;
  double wide;
  long long long_one;
};

__global__ void shuffle_all_kinds(Shuffled* out) {
  const int lane = int(threadIdx.x % 32);
  const unsigned half = lane < 16 ? 0x0000ffff : 0xffff0000;
  const int value = int(threadIdx.x);
  Shuffled s;
  s.all = __shfl_sync(all_lanes, value, 5);
  s.masked = __shfl_xor_sync(half, value, 8);
  s.up = __shfl_up_sync(all_lanes, value, 3);
  s.down = __shfl_down_sync(all_lanes, value, 3);
  s.exchanged = __shfl_xor_sync(all_lanes, value, 17);
  s.narrow = __shfl_sync(all_lanes, value, 9, 8);
  s.narrow_down = __shfl_down_sync(all_lanes, value, 2, 4);
  s.narrow_exchanged = __shfl_xor_sync(all_lanes, value, 12, 8);
  s.wide = __shfl_xor_sync(all_lanes, 1.0 / (1 + value), 1);
  s.long_one = __shfl_up_sync(all_lanes, (1ll << 40) + value, 1, 16);
  out[threadIdx.x] = s;
}

TEST(EmuWarp, ShufflesFollowTheirDefinitions) {
  for (int seed = 1; seed <= num_seeds; seed++) {
    emu::set_seed(uint64_t(seed));
    Stream stream;
    Array<Shuffled> out(64);
    check(launch(shuffle_all_kinds, 1, 64, 0, stream, out.data));
    const std::vector<Shuffled> s = out.to_host(stream);
    for (int i = 0; i < 64; i++) {
      const int lane = i % 32, warp = i - lane;
      EXPECT_EQ(s[i].all, warp + 5);
      EXPECT_EQ(s[i].masked, i ^ 8);
      EXPECT_EQ(s[i].up, lane >= 3 ? i - 3 : i);
      EXPECT_EQ(s[i].down, lane + 3 < 32 ? i + 3 : i);
      EXPECT_EQ(s[i].exchanged, i ^ 17);
      EXPECT_EQ(s[i].narrow, i / 8 * 8 + 1);
      EXPECT_EQ(s[i].narrow_down, i % 4 < 2 ? i + 2 : i);
      EXPECT_EQ(s[i].narrow_exchanged, lane / 8 % 2 != 0 ? i ^ 12 : i) << "an earlier segment may be read, no later "
                                                                          "one";
      EXPECT_EQ(s[i].wide, 1.0 / (1 + (i ^ 1)));
      EXPECT_EQ(s[i].long_one, (1ll << 40) + (i % 16 == 0 ? i : i - 1));
    }
  }
}

__global__ void shuffle_from_outside(float* out) {
  out[threadIdx.x] = threadIdx.x < 16 ? __shfl_sync(0xffff, 1.0f, 20) : 0.0f;
}

TEST(EmuWarp, AValueOfALaneOutsideTheMaskIsNan) {
  Stream stream;
  Array<float> out(32);
  check(launch(shuffle_from_outside, 1, 32, 0, stream, out.data));
  EXPECT_TRUE(std::isnan(out.to_host(stream)[3]));
}

struct Voted {
  unsigned ballot, sum, smallest, largest;
  int any, all, sum_signed, smallest_signed, largest_signed, count, either, both;
};

__global__ void vote_and_reduce(Voted* out) {
  const int i = int(threadIdx.x), lane = i % 32;
  const unsigned mask = lane % 2 != 0 ? 0xaaaaaaaa : 0x55555555;  // odd lanes, even lanes
  Voted v;
  v.ballot = __ballot_sync(mask, lane >= 16);
  v.any = __any_sync(mask, lane == 3);
  v.all = __all_sync(mask, lane != 3);
  v.sum = __reduce_add_sync(mask, unsigned(lane));
  v.smallest = __reduce_min_sync(mask, unsigned(lane) - 3);
  v.largest = __reduce_max_sync(mask, unsigned(lane) - 3);
  v.sum_signed = __reduce_add_sync(mask, -lane);
  v.smallest_signed = __reduce_min_sync(mask, lane - 3);
  v.largest_signed = __reduce_max_sync(mask, lane - 3);
  v.count = __syncthreads_count(i % 3 == 0);
  v.either = __syncthreads_or(i == 40);
  v.both = __syncthreads_and(i != 40);
  out[i] = v;
}

TEST(EmuWarp, VotesAndReductionsAreOfTheMasksLanesOnly) {
  for (int seed = 1; seed <= num_seeds; seed++) {
    emu::set_seed(uint64_t(seed));
    Stream stream;
    Array<Voted> out(64);
    check(launch(vote_and_reduce, 1, 64, 0, stream, out.data));
    const std::vector<Voted> all = out.to_host(stream);
    for (int i = 0; i < 64; i++) {
      const Voted& v = all[i];
      const bool odd = i % 2 != 0;
      EXPECT_EQ(v.ballot, odd ? 0xaaaa0000 : 0x55550000);
      EXPECT_EQ(v.any, odd);
      EXPECT_EQ(v.all, !odd);
      EXPECT_EQ(v.sum, odd ? 256u : 240u);
      EXPECT_EQ(v.sum_signed, odd ? -256 : -240);
      EXPECT_EQ(v.smallest, odd ? 0u : 1u);
      EXPECT_EQ(v.largest, odd ? 0xfffffffe : 0xffffffff);
      EXPECT_EQ(v.smallest_signed, odd ? -2 : -3);
      EXPECT_EQ(v.largest_signed, odd ? 28 : 27);
      EXPECT_EQ(v.count, 22);
      EXPECT_GT(v.either, 0);
      EXPECT_EQ(v.both, 0);
    }
  }
}

__global__ void use_atomics(int* i, unsigned* u, unsigned long long* wide, float* f, int* slots) {
  const int t = int(threadIdx.x);
  slots[atomicAdd(&i[0], 1)] = t;
  atomicMax(&i[1], t - 100);
  atomicMin(&i[2], t - 100);
  if (atomicCAS(&i[3], 0, t + 1) == 0) atomicExch(&i[4], t + 1);
  atomicAdd(&u[0], 2u);
  atomicMax(&u[1], unsigned(t));
  atomicAdd(wide, 1ull << 33);
  atomicAdd(f, 0.5f);
}

TEST(EmuWarp, AtomicsLoseNothing) {
  Stream stream;
  Array<int> i(std::vector<int>{0, -1000, 1000, 0, 0}, stream), slots(256);
  Array<unsigned> u(std::vector<unsigned>{0, 0}, stream);
  Array<unsigned long long> wide(std::vector<unsigned long long>{0}, stream);
  Array<float> f(std::vector<float>{0}, stream);
  check(launch(use_atomics, 1, 256, 0, stream, i.data, u.data, wide.data, f.data, slots.data));
  const std::vector<int> ints = i.to_host(stream), used = slots.to_host(stream);
  EXPECT_EQ(ints[0], 256);
  EXPECT_EQ(ints[1], 155);
  EXPECT_EQ(ints[2], -100);
  EXPECT_EQ(ints[3], ints[4]) << "one thread alone won";
  EXPECT_EQ(u.to_host(stream), (std::vector<unsigned>{512, 255}));
  EXPECT_EQ(wide.to_host(stream)[0], 256ull << 33);
  EXPECT_EQ(f.to_host(stream)[0], 128.0f);
  std::vector<int> seen(256);
  for (int t : used) seen[t]++;
  EXPECT_EQ(seen, std::vector<int>(256, 1));
}

TEST(EmuIntrinsics, AreWhatTheirNamesSay) {
  EXPECT_EQ(__popc(0xf0f0), 8);
  EXPECT_EQ(__popcll(~0ull), 64);
  EXPECT_EQ(__ffs(0), 0);
  EXPECT_EQ(__ffs(8), 4);
  EXPECT_EQ(__clz(0), 32);
  EXPECT_EQ(__clz(1), 31);
  EXPECT_EQ(__float_as_uint(1.0f), 0x3f800000u);
  EXPECT_EQ(__uint_as_float(0x3f800000u), 1.0f);
  EXPECT_EQ(__int_as_float(__float_as_int(-2.5f)), -2.5f);
  EXPECT_EQ(__float2int_rn(2.5f), 2);
  EXPECT_EQ(__float2int_rn(3.5f), 4);
  EXPECT_EQ(__float2int_rn(-1e20f), std::numeric_limits<int>::min());
  EXPECT_EQ(__float2int_rn(NAN), 0);
  EXPECT_FLOAT_EQ(__expf(1.0f), 2.7182818f);
  EXPECT_FLOAT_EQ(rsqrtf(4.0f), 0.5f);
  EXPECT_EQ(max(NAN, 1.0f), 1.0f);
  const int64_t a = 3, b = -4;
  EXPECT_EQ(min(a, b), -4);
  EXPECT_EQ(max(size_t(3), size_t(4)), 4u);
  float x[2] = {1.0f, 2.0f};
  __stcs(&x[1], __ldcs(&x[0]));
  EXPECT_EQ(x[1], 1.0f);
}

// ----------------------------------------------------------------------------
// Tensor cores and asynchronous copies. What the instructions compute is compared with the manual in test_tile.cu.

// The tiles of `x` (tiles, 32) pass through two buffers while their sum grows. A thread copies a column, and another
// thread reads it.
enum class Mistake { none, no_wait, no_barrier, waits_for_the_older };
template <Mistake mistake>
__global__ void sum_tiles(float* sum, const float* x, int tiles) {
  float* buffers = reinterpret_cast<float*>(shared_memory);
  const int i = int(threadIdx.x), n = int(blockDim.x);
  auto start_loading = [&](int tile) {
    emu::cp_async(buffers + tile % 2 * n + i, x + tile * n + i, 4, 4);
    emu::cp_async_commit_group();
  };
  float total = 0;
  start_loading(0);
  for (int tile = 0; tile < tiles; tile++) {
    if (mistake == Mistake::waits_for_the_older) emu::cp_async_wait_group(1);
    else if (mistake != Mistake::no_wait) emu::cp_async_wait_group(0);
    if (mistake != Mistake::no_barrier) __syncthreads();
    if (tile + 1 < tiles) start_loading(tile + 1);
    total += buffers[tile % 2 * n + (i + 33) % n];
  }
  sum[i] = total;
}

template <Mistake mistake>
static int num_seeds_with_wrong_sums() {
  int wrong = 0;
  for (int seed = 1; seed <= num_seeds; seed++) {
    emu::set_seed(uint64_t(seed));
    Stream stream;
    const std::vector<float> values = ramp(5 * 64);
    Array<float> x(values, stream), sums(64);
    check(launch(sum_tiles<mistake>, 1, 64, 2 * 64 * sizeof(float), stream, sums.data, x.data, 5));
    const std::vector<float> result = sums.to_host(stream);
    bool right = true;
    for (size_t i = 0; i < 64; i++) {
      float sum = 0;
      for (size_t tile = 0; tile < 5; tile++) sum += values[tile * 64 + (i + 33) % 64];
      right = right && result[i] == sum;
    }
    wrong += !right;
  }
  return wrong;
}

TEST(EmuAsyncCopy, ArrivesAfterAWaitAndABarrierOnly) {
  const RacesAllowed allowed;
  EXPECT_EQ(num_seeds_with_wrong_sums<Mistake::none>(), 0);
  EXPECT_GT(num_seeds_with_wrong_sums<Mistake::no_wait>(), 0);
  EXPECT_GT(num_seeds_with_wrong_sums<Mistake::no_barrier>(), 0);
  EXPECT_GT(num_seeds_with_wrong_sums<Mistake::waits_for_the_older>(), 0);
}

__global__ void load_rows(int first_byte, int lanes) {
  unsigned d[4];
  if (int(threadIdx.x) < lanes) emu::ldmatrix_x4(d, shared_memory + first_byte + 16 * threadIdx.x, false);
}

__global__ void load_strided_rows(int bytes_between) {
  unsigned d[4];
  emu::ldmatrix_x4(d, shared_memory + bytes_between * int(threadIdx.x), false);
}

__global__ void copy_to(int first_byte, const float* from, int bytes) {
  emu::cp_async(shared_memory + first_byte, from, bytes, bytes);
  emu::cp_async_commit_group();
  emu::cp_async_wait_group(0);
}

__global__ void multiply(int lanes) {
  float d[4] = {};
  const unsigned a[4] = {}, b[2] = {};
  if (int(threadIdx.x) < lanes) emu::mma_m16n8k16(d, a, b, emu::MmaType::bf16);
}

struct EmuTensorCoreDeathTest : EmuDeathTest {};

TEST_F(EmuTensorCoreDeathTest, AWrongAddressDies) {
  run(load_rows, 1, 32, 512, 0, 32);
  EXPECT_DEATH(run(load_rows, 1, 32, 512, 16, 32), "in kernel load_rows.*: reads 16 byte") << "past the launch's bytes";
  EXPECT_DEATH(run(load_rows, 1, 32, 1024, 8, 32), "in kernel load_rows.*: ldmatrix at .* is not 16 aligned bytes");
  EXPECT_DEATH(run(load_rows, 1, 32, 512, -512, 32), "in kernel load_rows.*: ldmatrix at .* of shared memory");
  Array<float> x(100);
  run(copy_to, 1, 1, 64, 48, x.data + 96, 16);
  EXPECT_DEATH(run(copy_to, 1, 1, 64, 64, x.data, 16), "in kernel copy_to.*: writes 16 byte");
  EXPECT_DEATH(run(copy_to, 1, 1, 64, 8, x.data, 16), "cp.async to .* is not 16 aligned bytes of shared memory");
  EXPECT_DEATH(run(copy_to, 1, 1, 64, 0, x.data + 1, 16), "cp.async of 16 bytes from .* is not aligned");
  EXPECT_DEATH(run(copy_to, 1, 1, 64, 0, x.data + 100, 16), "in kernel copy_to.*: reads 16 byte");
  EXPECT_DEATH(run(copy_to, 1, 1, 64, 0, x.data, 12), "cp.async of 12 bytes");
}

TEST_F(EmuTensorCoreDeathTest, AnInstructionOfAWarpDiesWithoutAllItsLanes) {
  run(multiply, 1, 32, 0, 32);
  EXPECT_DEATH(run(multiply, 1, 32, 0, 31), "deadlock: waits in mma at .*, for lanes 0x80000000");
  EXPECT_DEATH(run(load_rows, 1, 32, 512, 0, 5), "deadlock: waits in ldmatrix at .*, for lanes 0xffffffe0");
}

TEST(EmuTensorCore, RowsThatShareBanksAreCounted) {
  const auto conflicts = [](int bytes_between) {
    const emu::Counters before = emu::counters();
    run(load_strided_rows, 1, 32, 32 * 128, bytes_between);
    EXPECT_EQ(emu::counters().matrices_loaded - before.matrices_loaded, 4u);
    return emu::counters().bank_conflicts - before.bank_conflicts;
  };
  EXPECT_EQ(conflicts(16), 0u);
  EXPECT_EQ(conflicts(48), 0u) << "an odd number of pieces";
  EXPECT_EQ(conflicts(32), 4u);
  EXPECT_EQ(conflicts(128), 4u);
}

// ----------------------------------------------------------------------------
// bf16 and fp16

static unsigned short fp16_bits_of(float x) {
  const __half y = __float2half_rn(x);
  unsigned short bits;
  memcpy(&bits, &y, sizeof bits);
  return bits;
}

TEST(EmuFp16, RoundsToTheNearestAndTiesToEven) {
  EXPECT_EQ(fp16_bits_of(1.0f), 0x3c00);
  EXPECT_EQ(fp16_bits_of(0x1.002p0f), 0x3c00) << "a tie, down to even";
  EXPECT_EQ(fp16_bits_of(0x1.006p0f), 0x3c02) << "a tie, up to even";
  EXPECT_EQ(fp16_bits_of(0x1.002002p0f), 0x3c01);
  EXPECT_EQ(fp16_bits_of(-65504.0f), 0xfbff);
  EXPECT_EQ(fp16_bits_of(65519.0f), 0x7bff);
  EXPECT_EQ(fp16_bits_of(65520.0f), 0x7c00) << "a tie, to infinity";
  EXPECT_EQ(fp16_bits_of(-INFINITY), 0xfc00);
  EXPECT_EQ(fp16_bits_of(0x1p-24f), 0x0001);
  EXPECT_EQ(fp16_bits_of(0x1p-25f), 0x0000) << "a tie, down to 0";
  EXPECT_EQ(fp16_bits_of(0x1.8p-24f), 0x0002) << "a tie of subnormal numbers";
  EXPECT_TRUE(std::isnan(__half2float(__float2half_rn(NAN))));
}

TEST(EmuFp16, EveryValueSurvivesTheWayToFloatAndBack) {
  for (uint32_t bits = 0; bits < 0x10000; bits++) {
    __half y;
    y.bits = static_cast<unsigned short>(bits);
    if (std::isnan(__half2float(y))) continue;
    ASSERT_EQ(fp16_bits_of(__half2float(y)), bits);
  }
  const __half2 two = __floats2half2_rn(1.5f, -2.0f);
  EXPECT_EQ(__half22float2(two).x, 1.5f);
  EXPECT_EQ(__half22float2(two).y, -2.0f);
}

static unsigned short bits_of(float x) {
  const __nv_bfloat16 y = __float2bfloat16_rn(x);
  unsigned short bits;
  memcpy(&bits, &y, sizeof bits);
  return bits;
}

TEST(EmuBf16, RoundsToTheNearestAndTiesToEven) {
  EXPECT_EQ(bits_of(1.0f), 0x3f80);
  EXPECT_EQ(bits_of(__uint_as_float(0x3f808000)), 0x3f80) << "a tie, down to even";
  EXPECT_EQ(bits_of(__uint_as_float(0x3f818000)), 0x3f82) << "a tie, up to even";
  EXPECT_EQ(bits_of(__uint_as_float(0x3f808001)), 0x3f81);
  EXPECT_EQ(bits_of(__uint_as_float(0x3f817fff)), 0x3f81);
  EXPECT_EQ(bits_of(__uint_as_float(0x3fffffff)), 0x4000) << "a carry into the exponent";
  EXPECT_EQ(bits_of(-0.0f), 0x8000);
  EXPECT_EQ(bits_of(INFINITY), 0x7f80);
  EXPECT_EQ(bits_of(-INFINITY), 0xff80);
  EXPECT_EQ(bits_of(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(bits_of(std::numeric_limits<float>::denorm_min()), 0x0000);
  for (uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xffffffffu, 0xff800001u})
    EXPECT_TRUE(std::isnan(__bfloat162float(__float2bfloat16(__uint_as_float(bits))))) << std::hex << bits;
}

TEST(EmuBf16, EveryValueSurvivesTheWayToFloatAndBack) {
  for (uint32_t bits = 0; bits < 0x10000; bits++) {
    const float x = __uint_as_float(bits << 16);
    if (std::isnan(x)) continue;
    ASSERT_EQ(bits_of(x), bits);
  }
}

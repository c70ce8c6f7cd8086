// The emulated GPU itself: every mistake that it should find is planted once, beside the same code without the mistake.
#include <gtest/gtest.h>               // TEST, EXPECT_DEATH
#include <sanitizer/asan_interface.h>  // ASAN_POISON_MEMORY_REGION
#include <algorithm>                   // std::is_sorted, std::max, std::replace_if
#include <cmath>                       // tanh, NAN
#include <cstring>                     // memcmp, memcpy
#include <limits>                      // std::numeric_limits
#include <set>                         // std::set
#include <string>                      // std::string
#include <vector>                      // std::vector
#include "cublasLt.h"                  // cublasLtMatmul
#include "cuda_bf16.h"                 // __nv_bfloat16
#include "cuda_runtime.h"              // cudaMalloc, cudaLaunchKernelEx, threadIdx, emu::set_seed
#include "dev/test/values.h"           // same_bits

extern __shared__ __align__(1024) unsigned char shared_memory[];

constexpr int num_seeds = 20;
constexpr unsigned all_lanes = 0xffffffff;

static void check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

// A stream, freed at the end of the test.
struct Stream {
  cudaStream_t stream;
  Stream() { check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~Stream() { check(cudaStreamDestroy(stream)); }
  operator cudaStream_t() const { return stream; }
};

struct Event {
  cudaEvent_t event;
  explicit Event(unsigned flags = cudaEventDisableTiming) { check(cudaEventCreateWithFlags(&event, flags)); }
  ~Event() { check(cudaEventDestroy(event)); }
  operator cudaEvent_t() const { return event; }
};

// `size` elements on the device.
template <class T>
struct Array {
  T* data;
  size_t size;
  explicit Array(size_t size) : size(size) { check(cudaMalloc(&data, size * sizeof(T))); }
  Array(const std::vector<T>& values, cudaStream_t stream) : Array(values.size()) {
    check(cudaMemcpyAsync(data, values.data(), size * sizeof(T), cudaMemcpyHostToDevice, stream));
    check(cudaStreamSynchronize(stream));
  }
  Array(const Array&) = delete;
  ~Array() { check(cudaFree(data)); }
  operator T*() const { return data; }

  std::vector<T> to_host(cudaStream_t stream) const {
    std::vector<T> values(size);
    check(cudaMemcpyAsync(values.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost, stream));
    return values;
  }
};

template <class... Parameters, class... Args>
static cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                          cudaStream_t stream, Args... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Launches and waits.
template <class... Parameters, class... Args>
static void run(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, Args... args) {
  Stream stream;
  check(launch(kernel, grid, block, shared_bytes, stream, args...));
  check(cudaStreamSynchronize(stream));
}

static std::vector<float> ramp(size_t n) {
  std::vector<float> x(n);
  for (size_t i = 0; i < n; i++) x[i] = 0.1f * float(i % 97) - 3.0f;
  return x;
}

// The child of a death test must not inherit the emulator's state: it starts the test from the beginning.
struct EmuDeathTest : testing::Test {
  void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

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
  EXPECT_EQ(num_seeds_with_wrong_exchange<true>(), 0);
  EXPECT_GT(num_seeds_with_wrong_exchange<false>(), 0);
}

__global__ void sum_by_atomics(float* sum, const float* x) { atomicAdd(sum, x[blockIdx.x * blockDim.x + threadIdx.x]); }

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
// Streams

__global__ void set_to(float* x, float value) { *x = value; }
__global__ void copy_one(float* y, const float* x) { *y = *x; }

enum class Order { none, event, event_recorded_too_early };

// One stream sets x from 1 to 2 and another one copies x to y: is what arrives there 2?
static int num_seeds_with_stale_data(Order order) {
  int stale = 0;
  for (int seed = 1; seed <= num_seeds; seed++) {
    emu::set_seed(uint64_t(seed));
    Stream writer, reader;
    Event written;
    Array<float> x(std::vector<float>{1.0f}, writer), y(1);
    check(cudaStreamSynchronize(writer));
    if (order == Order::event_recorded_too_early) check(cudaEventRecord(written, writer));
    check(launch(set_to, 1, 1, 0, writer, x.data, 2.0f));
    if (order == Order::event) check(cudaEventRecord(written, writer));
    if (order != Order::none) check(cudaStreamWaitEvent(reader, written));
    check(launch(copy_one, 1, 1, 0, reader, y.data, x.data));
    const float result = y.to_host(reader)[0];
    EXPECT_TRUE(result == 1.0f || result == 2.0f);
    stale += result != 2.0f;
  }
  return stale;
}

TEST(EmuStreams, WithoutAWaitAnotherStreamsDataIsStale) {
  EXPECT_GT(num_seeds_with_stale_data(Order::none), 0);
  EXPECT_GT(num_seeds_with_stale_data(Order::event_recorded_too_early), 0);
  EXPECT_EQ(num_seeds_with_stale_data(Order::event), 0);
}

TEST(EmuStreams, AWaitIsForTheLatestRecordBeforeIt) {
  for (int seed = 1; seed <= num_seeds; seed++) {
    emu::set_seed(uint64_t(seed));
    Stream writer, reader;
    Event event, never;
    Array<float> x(1), y(1);
    check(cudaStreamWaitEvent(reader, never));  // does nothing
    check(launch(set_to, 1, 1, 0, writer, x.data, 1.0f));
    check(cudaEventRecord(event, writer));
    check(launch(set_to, 1, 1, 0, writer, x.data, 2.0f));
    check(cudaEventRecord(event, writer));
    check(cudaStreamWaitEvent(reader, event));
    check(cudaEventRecord(event, reader));  // a new record: the wait above must not wait for it
    check(launch(copy_one, 1, 1, 0, reader, y.data, x.data));
    EXPECT_EQ(y.to_host(reader)[0], 2.0f);
  }
}

TEST(EmuStreams, WhoStillReadsIsOverwrittenUnderSomeSeed) {
  int overwritten = 0;
  for (int seed = 1; seed <= num_seeds; seed++) {
    emu::set_seed(uint64_t(seed));
    Stream writer, reader;
    Array<float> x(std::vector<float>{1.0f}, writer), y(1);
    check(cudaStreamSynchronize(writer));
    check(launch(copy_one, 1, 1, 0, reader, y.data, x.data));
    check(launch(set_to, 1, 1, 0, writer, x.data, 2.0f));  // should wait for the reader
    overwritten += y.to_host(reader)[0] == 2.0f;
  }
  EXPECT_GT(overwritten, 0);
}

TEST(EmuStreams, PinnedMemoryIsReadLaterPageableMemoryUnderSomeSeed) {
  Stream stream;
  Array<float> x(1), y(1);
  float* pinned;
  check(cudaMallocHost(&pinned, sizeof(float)));
  int late = 0;
  for (int seed = 1; seed <= num_seeds; seed++) {
    emu::set_seed(uint64_t(seed));
    float pageable = *pinned = 1.0f;
    check(cudaMemcpyAsync(x, &pageable, sizeof(float), cudaMemcpyHostToDevice, stream));
    check(cudaMemcpyAsync(y, pinned, sizeof(float), cudaMemcpyHostToDevice, stream));
    pageable = *pinned = 2.0f;
    late += x.to_host(stream)[0] == 2.0f;
    EXPECT_EQ(y.to_host(stream)[0], 2.0f);
  }
  EXPECT_GT(late, 0);
  EXPECT_LT(late, num_seeds);

  check(launch(set_to, 1, 1, 0, stream, x.data, 3.0f));
  check(cudaMemcpyAsync(pinned, x, sizeof(float), cudaMemcpyDeviceToHost, stream));
  EXPECT_EQ(*pinned, 2.0f) << "a copy to pinned memory does not wait";
  check(cudaStreamSynchronize(stream));
  EXPECT_EQ(*pinned, 3.0f);
  check(cudaFreeHost(pinned));
}

// As a GPU writes to mapped host memory.
TEST(EmuStreams, AKernelWritesToPinnedMemoryWhenItsTurnComes) {
  Stream stream;
  float* pinned;
  check(cudaMallocHost(&pinned, 2 * sizeof(float)));
  pinned[0] = pinned[1] = 1.0f;
  check(launch(set_to, 1, 1, 0, stream, pinned + 1, 2.0f));
  EXPECT_EQ(pinned[1], 1.0f);
  check(cudaStreamSynchronize(stream));
  EXPECT_EQ(pinned[0], 1.0f);
  EXPECT_EQ(pinned[1], 2.0f);
  check(cudaFreeHost(pinned));
}

TEST(EmuStreams, EventsTellTimeAndWhetherTheyHaveHappened) {
  Stream stream;
  Event start(cudaEventDefault), end(cudaEventDefault), untimed;
  Array<float> x(1024), sum(1);
  float milliseconds = -1;
  check(cudaEventRecord(start, stream));
  check(launch(sum_by_atomics, 4, 256, 0, stream, sum.data, x.data));
  check(cudaEventRecord(end, stream));
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, end), cudaErrorNotReady);
  int asked = 0;
  while (cudaEventQuery(end) == cudaErrorNotReady) asked++;
  EXPECT_LT(asked, 1000);
  check(cudaEventSynchronize(end));
  check(cudaEventElapsedTime(&milliseconds, start, end));
  EXPECT_GT(milliseconds, 0.0f);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, untimed), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
}

TEST(EmuStreams, WhatHasRunIsCounted) {
  const emu::Counters before = emu::counters();
  Stream stream;
  Array<float> x(std::vector<float>(10), stream), y(10);
  check(cudaMemsetAsync(y, 0, 40, stream));
  check(cudaMemcpyAsync(y, x, 20, cudaMemcpyDeviceToDevice, stream));
  check(launch(set_to, 1, 1, 0, stream, x.data, 3.0f));
  EXPECT_EQ(emu::counters().kernels, before.kernels);
  check(cudaDeviceSynchronize());
  EXPECT_EQ(emu::counters().kernels, before.kernels + 1);
  EXPECT_EQ(emu::counters().memsets, before.memsets + 1);
  EXPECT_EQ(emu::counters().bytes_to_device, before.bytes_to_device + 40);
  EXPECT_EQ(emu::counters().bytes_on_device, before.bytes_on_device + 20);
}

TEST(EmuStreams, WhatTheHostWaitsForIsCounted) {
  Stream stream;
  Event event;
  Array<float> x(std::vector<float>(10), stream);
  float* pinned;
  check(cudaMallocHost(&pinned, 40));
  const auto waits = [&](auto&& call) {
    const uint64_t before = emu::counters().host_waits;
    call();
    return emu::counters().host_waits - before;
  };
  EXPECT_EQ(waits([&] { check(cudaStreamSynchronize(stream)); }), 1u);
  EXPECT_EQ(waits([&] { check(cudaDeviceSynchronize()); }), 1u);
  EXPECT_EQ(waits([&] { x.to_host(stream); }), 1u) << "to pageable memory";
  EXPECT_EQ(waits([&] {
              check(cudaMemcpyAsync(pinned, x, 40, cudaMemcpyDeviceToHost, stream));
              check(cudaMemcpyAsync(x, pinned, 40, cudaMemcpyHostToDevice, stream));
              check(cudaEventRecord(event, stream));
              check(cudaStreamWaitEvent(stream, event));
              check(launch(set_to, 1, 1, 0, stream, x.data, 3.0f));
            }),
            0u);
  EXPECT_EQ(waits([&] { check(cudaEventSynchronize(event)); }), 1u);
  EXPECT_EQ(waits([&] { check(cudaFreeHost(pinned)); }), 1u);
}

TEST(EmuStreams, WaitsSpinUnlessTheDeviceIsToldToBlock) {
  Stream stream;
  const auto spinning_waits = [&] {
    const uint64_t before = emu::counters().spinning_waits;
    check(cudaStreamSynchronize(stream));
    return emu::counters().spinning_waits - before;
  };
  EXPECT_EQ(spinning_waits(), 1u);
  check(cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync));
  EXPECT_EQ(spinning_waits(), 0u);
  check(cudaSetDeviceFlags(cudaDeviceScheduleAuto));
  EXPECT_EQ(spinning_waits(), 1u);
}

struct EmuStreamsDeathTest : EmuDeathTest {};

TEST_F(EmuStreamsDeathTest, PageableMemoryFreedBeforeItsCopyRunsDiesUnderSomeSeed) {
  const auto copy_and_free = [] {
    for (int seed = 1; seed <= num_seeds; seed++) {
      emu::set_seed(uint64_t(seed));
      Stream stream;
      Array<float> x(8);
      {
        const std::vector<float> values(8, 1.0f);
        check(cudaMemcpyAsync(x, values.data(), 8 * sizeof(float), cudaMemcpyHostToDevice, stream));
      }
      check(cudaStreamSynchronize(stream));
    }
  };
  EXPECT_DEATH(copy_and_free(), "cudaMemcpyAsync: the source at .*, pageable memory of the host, is no longer there");
}

TEST_F(EmuStreamsDeathTest, TheNullStreamDies) {
  Array<float> x(1);
  EXPECT_DEATH(launch(set_to, 1, 1, 0, nullptr, x.data, 1.0f), "cudaLaunchKernelEx on the null stream.*name a stream");
  EXPECT_DEATH(cudaMemsetAsync(x, 0, 4, nullptr), "cudaMemsetAsync on the null stream");
}

// ----------------------------------------------------------------------------
// Graphs

// What is queued on a stream between two calls, as a graph; freed at the end of the test.
struct Graph {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  template <class Queue>
  Graph(cudaStream_t stream, Queue queue) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    queue();
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&exec, graph));
    check(cudaGraphDestroy(graph));
  }
  ~Graph() { check(cudaGraphExecDestroy(exec)); }
};

__global__ void add_to(float* x, float value) { *x += value; }

TEST(EmuGraphs, LaunchesRunTheCapturedNodesInOrderWithTheirArguments) {
  Stream stream;
  Array<float> x(std::vector<float>{0.0f}, stream), y(std::vector<float>{0.0f}, stream);
  float value = 2.0f;
  float* pinned;
  check(cudaMallocHost(&pinned, sizeof(float)));
  *pinned = 5.0f;
  const emu::Counters before = emu::counters();
  Graph graph(stream, [&] {
    check(cudaMemsetAsync(y, 0, sizeof(float), stream));
    check(launch(add_to, 1, 1, 0, stream, x.data, value));
    check(launch(copy_one, 1, 1, 0, stream, y.data, x.data));
    check(cudaMemcpyAsync(pinned, y, sizeof(float), cudaMemcpyDeviceToHost, stream));
  });
  value = 100.0f;
  EXPECT_EQ(x.to_host(stream)[0], 0.0f);
  EXPECT_EQ(*pinned, 5.0f);
  for (float expected : {2.0f, 4.0f, 6.0f}) {
    check(cudaGraphLaunch(graph.exec, stream));
    EXPECT_NE(*pinned, expected) << "a launch does not wait";
    check(cudaStreamSynchronize(stream));
    EXPECT_EQ(*pinned, expected);
  }
  EXPECT_EQ(emu::counters().graph_launches, before.graph_launches + 3);
  EXPECT_EQ(emu::counters().launches, before.launches) << "captured, not launched";
  EXPECT_EQ(emu::counters().kernels, before.kernels + 6);
  check(launch(add_to, 1, 1, 0, stream, x.data, value));
  EXPECT_EQ(emu::counters().launches, before.launches + 1);
  EXPECT_EQ(x.to_host(stream)[0], 106.0f);
  check(cudaFreeHost(pinned));
}

// One stream launches a graph that sets x to 2, another one copies x: what arrives there?
template <bool WithEvent>
static int num_seeds_with_stale_graph() {
  int stale = 0;
  for (int seed = 1; seed <= num_seeds; seed++) {
    emu::set_seed(uint64_t(seed));
    Stream writer, reader;
    Event written;
    Array<float> x(std::vector<float>{1.0f}, writer), y(1);
    Graph graph(writer, [&] { check(launch(set_to, 1, 1, 0, writer, x.data, 2.0f)); });
    check(cudaStreamSynchronize(writer));
    check(cudaGraphLaunch(graph.exec, writer));
    if (WithEvent) {
      check(cudaEventRecord(written, writer));
      check(cudaStreamWaitEvent(reader, written));
    }
    check(launch(copy_one, 1, 1, 0, reader, y.data, x.data));
    stale += y.to_host(reader)[0] != 2.0f;
    check(cudaStreamSynchronize(writer));
  }
  return stale;
}

TEST(EmuGraphs, AGraphIsOrderedWithOtherStreamsByEventsAlone) {
  EXPECT_GT(num_seeds_with_stale_graph<false>(), 0);
  EXPECT_EQ(num_seeds_with_stale_graph<true>(), 0);
}

TEST(EmuGraphs, WhatCannotBeCapturedIsRefusedAndEndsTheCapture) {
  Stream stream, other;
  Event event;
  Array<float> x(std::vector<float>{0.0f}, stream), to_free(1);
  check(cudaEventRecord(event, other));
  float *pinned, *p, pageable = 1.0f;
  check(cudaMallocHost(&pinned, sizeof(float)));
  // What cudaStreamEndCapture returns after `call`, which should return `expected`.
  const auto end_after = [&](auto&& call, cudaError_t expected) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    check(launch(add_to, 1, 1, 0, stream, x.data, 1.0f));
    EXPECT_EQ(call(), expected);
    if (expected != cudaSuccess) {
      EXPECT_EQ(cudaGetLastError(), expected);
      EXPECT_EQ(launch(add_to, 1, 1, 0, stream, x.data, 1.0f), cudaErrorStreamCaptureInvalidated);
    }
    cudaGraph_t graph;
    const cudaError_t result = cudaStreamEndCapture(stream, &graph);
    EXPECT_EQ(cudaGetLastError(), result);
    EXPECT_EQ(graph == nullptr, result != cudaSuccess);
    check(cudaGraphDestroy(graph));
    return result;
  };
  const auto refused = [&](auto&& call) {
    return end_after(call, cudaErrorStreamCaptureUnsupported) == cudaErrorStreamCaptureInvalidated;
  };
  EXPECT_TRUE(refused([&] { return cudaStreamSynchronize(stream); }));
  EXPECT_TRUE(refused([&] { return cudaStreamSynchronize(other); }));
  EXPECT_TRUE(refused([&] { return cudaDeviceSynchronize(); }));
  EXPECT_TRUE(refused([&] { return cudaEventSynchronize(event); }));
  EXPECT_TRUE(refused([&] { return cudaEventQuery(event); }));
  EXPECT_TRUE(refused([&] { return cudaMalloc(&p, 4); }));
  EXPECT_TRUE(refused([&] { return cudaFree(to_free); }));
  EXPECT_TRUE(refused([&] { return cudaMallocHost(&p, 4); }));
  EXPECT_TRUE(refused([&] { return cudaFreeHost(pinned); }));
  EXPECT_TRUE(refused([&] { return cudaMemcpyAsync(x, &pageable, 4, cudaMemcpyHostToDevice, stream); }));
  EXPECT_TRUE(refused([&] { return cudaMemcpyAsync(&pageable, x, 4, cudaMemcpyDeviceToHost, stream); }));
  EXPECT_EQ(end_after([&] { return cudaMemcpyAsync(x, pinned, 4, cudaMemcpyHostToDevice, stream); }, cudaSuccess),
            cudaSuccess);
  EXPECT_EQ(end_after([&] { return cudaMemcpyAsync(to_free, &pageable, 4, cudaMemcpyHostToDevice, other); },
                      cudaSuccess),
            cudaSuccess);
  EXPECT_EQ(end_after([&] { return cudaEventRecord(event, other); }, cudaSuccess), cudaSuccess);

  EXPECT_EQ(x.to_host(stream)[0], 0.0f) << "and afterwards the stream works as before";
  cudaGraph_t graph;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorIllegalState);
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaErrorIllegalState);
  EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalState);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphDestroy(graph));
  check(cudaFreeHost(pinned));
}

struct EmuGraphsDeathTest : EmuDeathTest {};

TEST_F(EmuGraphsDeathTest, ALaunchAfterCapturedMemoryWasFreedDies) {
  Stream stream;
  const auto launch_after_free = [&](bool free_first, auto queue) {
    float* x;
    check(cudaMalloc(&x, 400));
    Graph graph(stream, [&] { queue(x); });
    if (free_first) check(cudaFree(x));
    check(cudaGraphLaunch(graph.exec, stream));
    check(cudaStreamSynchronize(stream));
  };
  Array<float> y(100);
  const auto kernel = [&](float* x) { check(launch(set_to, 1, 1, 0, stream, x, 1.0f)); };
  const auto memset = [&](float* x) { check(cudaMemsetAsync(x, 0, 400, stream)); };
  const auto copy = [&](float* x) { check(cudaMemcpyAsync(x, y, 400, cudaMemcpyDeviceToDevice, stream)); };
  launch_after_free(false, kernel);
  launch_after_free(false, memset);
  launch_after_free(false, copy);
  EXPECT_DEATH(launch_after_free(true, kernel), "in kernel set_to.*not allocated, or no longer");
  EXPECT_DEATH(launch_after_free(true, memset), "in cudaMemsetAsync: destination .*not allocated, or no longer");
  EXPECT_DEATH(launch_after_free(true, copy), "in cudaMemcpyAsync: destination .*not allocated, or no longer");
}

TEST_F(EmuGraphsDeathTest, WhatIsNotEmulatedDies) {
  Stream stream, other;
  Event event;
  Array<float> x(std::vector<float>{0.0f}, stream);
  check(cudaEventRecord(event, other));
  Graph graph(stream, [&] { check(launch(add_to, 1, 1, 0, stream, x.data, 1.0f)); });
  const auto capture = [&](auto queue) { Graph captured(stream, queue); };
  EXPECT_DEATH(capture([&] { cudaEventRecord(event, stream); }), "cudaEventRecord in a capture: one of several "
                                                                 "streams");
  EXPECT_DEATH(capture([&] { cudaStreamWaitEvent(stream, event); }), "cudaStreamWaitEvent in a capture: one of several "
                                                                     "streams");
  EXPECT_DEATH(capture([&] { cudaGraphLaunch(graph.exec, stream); }), "cudaGraphLaunch in a capture: graphs within "
                                                                      "graphs");
  EXPECT_DEATH(capture([&] { cudaStreamDestroy(stream); }), "cudaStreamDestroy on a stream that is being captured");
  EXPECT_DEATH(
      {
        cudaGraphLaunch(graph.exec, stream);
        cudaGraphLaunch(graph.exec, other);
      },
      "cudaGraphLaunch while the graph runs on another stream");
  EXPECT_DEATH(
      {
        cudaGraphLaunch(graph.exec, stream);
        cudaGraphExecDestroy(graph.exec);
      },
      "cudaGraphExecDestroy on a graph that has not run to its end");
}

// ----------------------------------------------------------------------------
// Launches

TEST(EmuLaunch, BeyondTheLimitsReturnsTheRightError) {
  Stream stream;
  Array<float> x(1);
  const auto try_launch = [&](dim3 grid, dim3 block, size_t shared_bytes) {
    const cudaError_t error = launch(set_to, grid, block, shared_bytes, stream, x.data, 1.0f);
    EXPECT_EQ(cudaGetLastError(), error);
    return error;
  };
  EXPECT_EQ(try_launch(1, 1024, 0), cudaSuccess);
  EXPECT_EQ(try_launch(1, 1025, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(try_launch(1, dim3(64, 32), 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(try_launch(1, dim3(1, 1, 65), 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(try_launch(1, 0, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(try_launch(0, 1, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(try_launch(dim3(1, 65536), 1, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(try_launch(dim3(1, 1, 65536), 1, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(try_launch(1, 1, 48 * 1024), cudaSuccess);
  EXPECT_EQ(try_launch(1, 1, 48 * 1024 + 1), cudaErrorInvalidValue);
  check(cudaFuncSetAttribute(set_to, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024));
  EXPECT_EQ(try_launch(1, 1, 227 * 1024), cudaSuccess);
  EXPECT_EQ(try_launch(1, 1, 227 * 1024 + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFuncSetAttribute(set_to, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024 + 1),
            cudaErrorInvalidValue);
}

TEST(EmuLaunch, TheDeviceIsWhatItIsToldToBe) {
  cudaDeviceProp properties;
  emu::set_compute_capability(8, 0);
  check(cudaGetDeviceProperties(&properties, 0));
  EXPECT_EQ(properties.major, 8);
  EXPECT_EQ(properties.sharedMemPerBlockOptin, 163u * 1024);
  EXPECT_EQ(cudaFuncSetAttribute(set_to, cudaFuncAttributeMaxDynamicSharedMemorySize, 164 * 1024),
            cudaErrorInvalidValue);
  emu::set_compute_capability(9, 0);
  int value;
  check(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  EXPECT_EQ(value, 227 * 1024);
  EXPECT_EQ(cudaSetDevice(1), cudaErrorInvalidDevice);
}

TEST(EmuLaunch, AKernelsNameIsItsMangledOne) {
  const char* name;
  check(cudaFuncGetName(&name, reinterpret_cast<const void*>(&set_to)));
  EXPECT_STREQ(name, "_Z6set_toPff");
}

struct Table {
  float values[64];
};
__global__ void add_table(float* out, const __grid_constant__ Table table) {
  out[threadIdx.x] = table.values[threadIdx.x];
}

TEST(EmuLaunch, ParametersAreCopiedAtTheLaunch) {
  Stream stream;
  Array<float> out(64);
  Table table;
  for (int i = 0; i < 64; i++) table.values[i] = float(i);
  check(launch(add_table, 1, 64, 0, stream, out.data, table));
  for (float& value : table.values) value = -1.0f;
  for (int i = 0; i < 64; i++) EXPECT_EQ(out.to_host(stream)[i], float(i));
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

// The tiles of `x` (tiles, 32) pass through two buffers while their sum grows, a thread a column, each of which another
// thread reads.
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
  if (int(threadIdx.x) < lanes) emu::mma_m16n8k16(d, a, b);
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
// bf16

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

// ----------------------------------------------------------------------------
// cuBLASLt

// A column-major matrix on the host, in double.
struct Matrix {
  int rows, cols, ld;
  std::vector<double> values;

  // Numbers that `type` has.
  Matrix(int rows, int cols, int ld, cudaDataType type, double tag)
      : rows(rows), cols(cols), ld(ld), values(size_t(ld * cols), NAN) {
    for (int j = 0; j < cols; j++) {
      for (int i = 0; i < rows; i++) {
        const float x = float(std::sin(tag + 1.7 * i + 0.9 * j));
        at(i, j) = type == CUDA_R_16BF ? float(__nv_bfloat16(x)) : x;
      }
    }
  }
  double& at(int i, int j) { return values[j * ld + i]; }
};

static size_t bytes_of(cudaDataType type) { return type == CUDA_R_16BF ? 2 : 4; }

// On the device as `type`; the gaps between columns are NaN.
static void* upload(const std::vector<double>& values, cudaDataType type, cudaStream_t stream) {
  std::vector<float> floats(values.begin(), values.end());
  std::vector<__nv_bfloat16> halves(floats.begin(), floats.end());
  void* p;
  check(cudaMalloc(&p, values.size() * bytes_of(type)));
  const void* from = type == CUDA_R_16BF ? static_cast<const void*>(halves.data()) : floats.data();
  check(cudaMemcpyAsync(p, from, values.size() * bytes_of(type), cudaMemcpyHostToDevice, stream));
  check(cudaStreamSynchronize(stream));
  return p;
}

static std::vector<double> download(const void* p, size_t n, cudaDataType type, cudaStream_t stream) {
  std::vector<float> floats(n);
  std::vector<__nv_bfloat16> halves(n);
  void* to = type == CUDA_R_16BF ? static_cast<void*>(halves.data()) : floats.data();
  check(cudaMemcpyAsync(to, p, n * bytes_of(type), cudaMemcpyDeviceToHost, stream));
  return type == CUDA_R_16BF ? std::vector<double>(halves.begin(), halves.end())
                             : std::vector<double>(floats.begin(), floats.end());
}

static void check(cublasStatus_t status) {
  ASSERT_EQ(status, CUBLAS_STATUS_SUCCESS) << cublasLtGetStatusString(status);
}

struct Problem {
  cudaDataType in = CUDA_R_32F, out = CUDA_R_32F;
  bool transpose_a = false, transpose_b = false;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  float alpha = 1.0f, beta = 0.0f;
  uint32_t alignment = 16;  // promised, of A
  int offset_a = 0;         // elements by which A is not where it should be
  bool poison_b = false;    // poisons B's last element (fp32), and the 4 bytes after it: ASan marks units of 8
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;  // allowed
  size_t algorithm = 0;                                          // of those that the heuristic offers
  int offset_bias = 0, offset_aux = 0;       // bytes by which they move once the algorithm is chosen
  bool null_bias = false, null_aux = false;  // until then
};

static double gelu(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }

// Runs the problem for D (9, 7) and compares D, aux and the gaps between D's columns with the same in double. Returns
// what the heuristic said, raises *worst_error to the largest error, and sets *result to D.
static cublasStatus_t run_matmul(const Problem& p, double* worst_error = nullptr,
                                 std::vector<double>* result_d = nullptr) {
  const int m = 9, n = 7, k = 11;
  const bool with_bias = p.epilogue & CUBLASLT_EPILOGUE_BIAS, with_aux = p.epilogue & 128;
  const bool dgelu = p.epilogue == CUBLASLT_EPILOGUE_DGELU;
  Matrix a = p.transpose_a ? Matrix(k, m, 12, p.in, 0.1) : Matrix(m, k, 10, p.in, 0.1);
  Matrix b = p.transpose_b ? Matrix(n, k, 8, p.in, 0.2) : Matrix(k, n, 16, p.in, 0.2);
  Matrix c(m, n, 11, p.out, 0.3), aux(m, n, 16, p.out, 0.4), bias(m, 1, m, p.out, 0.5);

  Stream stream;
  void *da = upload(a.values, p.in, stream), *db = upload(b.values, p.in, stream),
       *dc = upload(c.values, p.out, stream);
  void *daux = upload(aux.values, p.out, stream), *dbias = upload(bias.values, p.out, stream), *workspace;
  check(cudaMalloc(&workspace, 4096));
  if (p.beta == 0.0f)
    check(cudaMemsetAsync(dc, 0xff, c.values.size() * bytes_of(p.out), stream));  // NaN must not be read

  cublasLtHandle_t handle;
  cublasLtMatmulDesc_t desc;
  cublasLtMatrixLayout_t layout_a, layout_b, layout_d;
  cublasLtMatmulPreference_t preference;
  check(cublasLtCreate(&handle));
  check(cublasLtMatmulDescCreate(&desc, p.compute, CUDA_R_32F));
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
    check(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof value));
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_EPILOGUE, p.epilogue);
  const auto set_bias = [&](int offset) { set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<char*>(dbias) + offset); };
  const auto set_aux = [&](int offset) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<char*>(daux) + offset);
  };
  if (with_bias && !p.null_bias) set_bias(0);
  if (with_bias) set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, p.out);
  if (with_aux && !p.null_aux) set_aux(0);
  if (with_aux) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t(aux.ld));
  if (with_aux) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, p.out);
  check(cublasLtMatrixLayoutCreate(&layout_a, p.in, uint64_t(a.rows), uint64_t(a.cols), a.ld));
  check(cublasLtMatrixLayoutCreate(&layout_b, p.in, uint64_t(b.rows), uint64_t(b.cols), b.ld));
  check(cublasLtMatrixLayoutCreate(&layout_d, p.out, m, n, c.ld));
  check(cublasLtMatmulPreferenceCreate(&preference));
  const uint64_t workspace_bytes = 4096;
  check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                             sizeof workspace_bytes));
  check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &p.alignment,
                                             sizeof p.alignment));
  check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &p.reductions,
                                             sizeof p.reductions));

  cublasLtMatmulHeuristicResult_t results[8];
  int returned;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, desc, layout_a, layout_b, layout_d, layout_d,
                                                               preference, 8, results, &returned);
  if (status == CUBLAS_STATUS_SUCCESS) {
    EXPECT_LT(int(p.algorithm), returned);
    if (with_bias) set_bias(p.offset_bias);
    if (with_aux) set_aux(p.offset_aux);
    void* moved_a = static_cast<char*>(da) + p.offset_a * ptrdiff_t(bytes_of(p.in));
    if (p.poison_b) ASAN_POISON_MEMORY_REGION(static_cast<float*>(db) + b.ld * (b.cols - 1) + b.rows - 1, 8);
    check(cublasLtMatmul(handle, desc, &p.alpha, moved_a, layout_a, db, layout_b, &p.beta, dc, layout_d, dc, layout_d,
                         &results[p.algorithm].algo, workspace, 4096, stream));
    const std::vector<double> d = download(dc, c.values.size(), p.out, stream);
    if (result_d != nullptr) *result_d = d;
    const std::vector<double> aux_after = download(daux, aux.values.size(), p.out, stream);
    const double of_result = p.out == CUDA_R_16BF ? 1.0 / 256 : 0;  // half a unit in bf16's last place, at most
    const double of_sum = p.compute == CUBLAS_COMPUTE_32F ? 1e-5 : k * 2.0 / 2048;
    for (int j = 0; j < n; j++) {
      for (int i = 0; i < m; i++) {
        double x = 0;
        for (int l = 0; l < k; l++)
          x += (p.transpose_a ? a.at(l, i) : a.at(i, l)) * (p.transpose_b ? b.at(j, l) : b.at(l, j));
        x = p.alpha * x + (p.beta != 0 ? p.beta * c.at(i, j) : 0) + (with_bias ? bias.at(i, 0) : 0);
        const double saved = aux_after[j * aux.ld + i];
        if (dgelu) {
          x *= (gelu(saved + 1e-5) - gelu(saved - 1e-5)) / 2e-5;
        } else if (with_aux) {
          EXPECT_NEAR(saved, x, std::abs(x) * of_result + of_sum);
          x = gelu(x);
        }
        if (worst_error != nullptr) *worst_error = std::max(*worst_error, std::abs(d[j * c.ld + i] - x));
        EXPECT_NEAR(d[j * c.ld + i], x, std::abs(x) * of_result + of_sum) << i << ", " << j;
      }
      for (int i = m; i < c.ld; i++) EXPECT_TRUE(std::isnan(d[j * c.ld + i])) << "wrote between two columns";
    }
  }
  for (void* pointer : {da, db, dc, daux, dbias, workspace}) check(cudaFree(pointer));
  for (cublasLtMatrixLayout_t layout : {layout_a, layout_b, layout_d}) check(cublasLtMatrixLayoutDestroy(layout));
  check(cublasLtMatmulPreferenceDestroy(preference));
  check(cublasLtMatmulDescDestroy(desc));
  check(cublasLtDestroy(handle));
  return status;
}

TEST(EmuCublasLt, EveryCombinationOfTypesOperationsAndEpiloguesIsTheFormula) {
  for (const auto& [in, out] :
       {std::pair(CUDA_R_32F, CUDA_R_32F), {CUDA_R_16BF, CUDA_R_16BF}, {CUDA_R_16BF, CUDA_R_32F}}) {
    for (bool transpose_a : {false, true}) {
      for (bool transpose_b : {false, true}) {
        for (cublasLtEpilogue_t epilogue :
             {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU_AUX,
              CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU}) {
          for (float beta : {0.0f, 1.0f, -0.5f}) {
            SCOPED_TRACE(testing::Message() << "types " << in << " " << out << ", operations " << transpose_a
                                            << transpose_b << ", epilogue " << epilogue << ", beta " << beta);
            Problem p;
            p.in = in, p.out = out, p.transpose_a = transpose_a, p.transpose_b = transpose_b;
            p.epilogue = epilogue, p.alpha = 0.75f, p.beta = beta;
            for (p.algorithm = 0; p.algorithm < 3; p.algorithm++) EXPECT_EQ(run_matmul(p), CUBLAS_STATUS_SUCCESS);
          }
        }
      }
    }
  }
}

TEST(EmuCublasLt, Tf32IsLessExactThanFp32) {
  Problem p;
  p.compute = CUBLAS_COMPUTE_32F_FAST_TF32;
  double worst_error = 0;
  EXPECT_EQ(run_matmul(p, &worst_error), CUBLAS_STATUS_SUCCESS);
  EXPECT_GT(worst_error, 1e-4);
  p.in = p.out = CUDA_R_16BF;
  EXPECT_EQ(run_matmul(p), CUBLAS_STATUS_NOT_SUPPORTED);
}

TEST(EmuCublasLt, TheHeuristicRefusesWhatIsNotSupported) {
  Problem p;
  p.out = CUDA_R_16BF;  // from fp32 inputs
  EXPECT_EQ(run_matmul(p), CUBLAS_STATUS_NOT_SUPPORTED);
  p = {};
  p.epilogue = cublasLtEpilogue_t(2);  // RELU
  EXPECT_EQ(run_matmul(p), CUBLAS_STATUS_NOT_SUPPORTED);
  p.epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  EXPECT_EQ(run_matmul(p), CUBLAS_STATUS_SUCCESS);
  p.null_bias = true;
  EXPECT_EQ(run_matmul(p), CUBLAS_STATUS_INVALID_VALUE);
  p.null_bias = false, p.null_aux = true;
  EXPECT_EQ(run_matmul(p), CUBLAS_STATUS_INVALID_VALUE);
}

// Of each number of splits, in one order; in place, which the heuristic puts first if it may, in any.
TEST(EmuCublasLt, ASumInPlaceHasNoFixedOrder) {
  const auto distinct_results = [](uint32_t reductions, size_t algorithm) {
    Problem p;
    p.reductions = reductions, p.algorithm = algorithm;
    std::set<std::vector<double>> results;
    for (uint64_t seed = 1; seed <= 8; seed++) {
      emu::set_seed(seed);
      std::vector<double> d;
      EXPECT_EQ(run_matmul(p, nullptr, &d), CUBLAS_STATUS_SUCCESS);
      std::replace_if(
          d.begin(), d.end(), [](double x) { return std::isnan(x); }, 0.0);  // between columns
      results.insert(d);
    }
    return results.size();
  };
  EXPECT_GT(distinct_results(CUBLASLT_REDUCTION_SCHEME_MASK, 0), 1u);
  for (size_t algorithm : {0, 1, 2})
    EXPECT_EQ(distinct_results(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, algorithm), 1u) << algorithm;
}

struct EmuCublasLtDeathTest : EmuDeathTest {};

TEST_F(EmuCublasLtDeathTest, APointerThatIsLessAlignedThanPromisedDies) {
  Problem p;
  p.offset_a = -1;
  EXPECT_DEATH(run_matmul(p), "cublasLtMatmul: A at .* is not aligned to the 16 bytes that were promised");
  p.alignment = 256;
  p.offset_a = -4;
  EXPECT_DEATH(run_matmul(p), "cublasLtMatmul: A at .* is not aligned to the 256 bytes that were promised");
}

// Whose alignments the heuristic takes from the pointers that it is asked with.
TEST_F(EmuCublasLtDeathTest, ABiasOrAuxThatIsLessAlignedThanBeforeDies) {
  Problem p;
  p.epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  p.offset_bias = 16;
  EXPECT_DEATH(run_matmul(p), "cublasLtMatmul: bias at .* is not aligned to the .* bytes that were promised");
  p.offset_bias = 0, p.offset_aux = 16;
  EXPECT_DEATH(run_matmul(p), "cublasLtMatmul: the epilogue's aux at .* is not aligned to the .* bytes that were "
                              "promised");
}

TEST_F(EmuCublasLtDeathTest, AnOperandThatLeavesItsMemoryDiesByName) {
  Problem p;
  p.offset_a = 12;
  EXPECT_DEATH(run_matmul(p), "in host code: cublasLtMatmul: A at .* more than are left");
  p = {};
  p.poison_b = true;
  EXPECT_DEATH(run_matmul(p), "in host code: cublasLtMatmul: B at .* among them byte .* which the program itself has "
                              "poisoned");
}

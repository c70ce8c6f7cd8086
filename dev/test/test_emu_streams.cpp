// What the emulated GPU is given to do: launches, streams, events and graphs. Every mistake that it should find is
// planted once, beside the same code without the mistake.
//
// COVERS dev/emu/
#include <gtest/gtest.h>
#include <string>
#include <vector>
#include "dev/test/emu_test.h"

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

// A kernel writes to pinned host memory, as a GPU does to mapped host memory.
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
  for (const auto& [major, minor] : {std::pair(8, 6), std::pair(8, 9), std::pair(12, 0)}) {
    emu::set_compute_capability(major, minor);
    check(cudaGetDeviceProperties(&properties, 0));
    EXPECT_EQ(properties.sharedMemPerBlockOptin, 99u * 1024) << major << "." << minor;
  }
  emu::set_compute_capability(7, 5);
  EXPECT_EQ(cudaFuncSetAttribute(set_to, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 * 1024 + 1),
            cudaErrorInvalidValue);
  emu::set_compute_capability(9, 0);
  int value;
  check(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  EXPECT_EQ(value, 227 * 1024);
  EXPECT_EQ(cudaSetDevice(64), cudaErrorInvalidDevice);
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

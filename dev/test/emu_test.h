// What the tests of the emulated GPU share: streams, events and arrays that are freed at a test's end, and launches.
#pragma once
#include <gtest/gtest.h>
#include <string>
#include <vector>
#include "cuda_runtime.h"

extern __shared__ __align__(1024) unsigned char shared_memory[];

constexpr int num_seeds = 20;
constexpr unsigned all_lanes = 0xffffffff;

inline void check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

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
inline cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
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
inline void run(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, Args... args) {
  Stream stream;
  check(launch(kernel, grid, block, shared_bytes, stream, args...));
  check(cudaStreamSynchronize(stream));
}

// Races do not end the program, for tests of what else shows them.
struct RacesAllowed {
  RacesAllowed() { emu::look_for_races(false); }
  RacesAllowed(const RacesAllowed&) = delete;
  ~RacesAllowed() { emu::look_for_races(true); }
};

inline std::vector<float> ramp(size_t n) {
  std::vector<float> x(n);
  for (size_t i = 0; i < n; i++) x[i] = 0.1f * float(i % 97) - 3.0f;
  return x;
}

__global__ void sum_by_atomics(float* sum, const float* x) { atomicAdd(sum, x[blockIdx.x * blockDim.x + threadIdx.x]); }

// The child of a death test must not inherit the emulator's state: it starts the test from the beginning.
struct EmuDeathTest : testing::Test {
  void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

// The memory that operations work on, and the stream that they run in. Here they are a GPU's.
//
// Its attention takes heads of up to 128 elements, in multiples of 8: rows are then made of 16-byte pieces in both precisions. Its
// LayerNorm takes up to 8,192 channels.
//
// Operations are queued in one stream, in the order in which they are called, and return at once. copy_to_host waits for
// everything before it; nothing else does.
#pragma once
#include <cuda_runtime.h> // cudaMalloc, cudaMemcpyAsync, ...
#include <string>         // std::string
#include "../error.h"     // CHECK, user_error
#include "launch.h"       // CUDA_CHECK

constexpr int head_size_multiple = 8, largest_head_size = 128, largest_channels = 8192;

// The GPU that this process uses. Workspaces are allocated once, so that the memory plan knows them.
struct Gpu {
  static constexpr size_t gemm_workspace_bytes = 32 << 20;  // what NVIDIA recommends for cuBLASLt on Hopper
  static constexpr size_t scratch_bytes = 16 << 20;         // partial sums of reductions
  std::string name;
  bool is_hopper_or_later = false;
  cudaStream_t stream = nullptr;
  void *gemm_workspace = nullptr, *scratch = nullptr;

  Gpu() {
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0)
      user_error("no GPU can be used (%s); train_gpt2_sla_cpu trains without one", cudaGetErrorString(status));
    CUDA_CHECK(cudaSetDevice(0));
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    name = properties.name;
    is_hopper_or_later = properties.major >= 9;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaMalloc(&gemm_workspace, gemm_workspace_bytes));
    CUDA_CHECK(cudaMalloc(&scratch, scratch_bytes));
  }
};

// Made at the first use, kept to the end.
inline Gpu& gpu() {
  static Gpu* the_gpu = new Gpu();  // never destroyed: the driver may be gone before static objects are
  return *the_gpu;
}

inline const char* device_name() { return gpu().name.c_str(); }

// What the program holds beside the arenas, in bytes.
inline size_t device_workspace_bytes() { return Gpu::gemm_workspace_bytes + Gpu::scratch_bytes; }

// Scratch for `count` elements until the next operation that asks for some: they run one after the other.
template <class T>
T* device_scratch(size_t count) {
  CHECK(count * sizeof(T) <= Gpu::scratch_bytes);
  return static_cast<T*>(gpu().scratch);
}

inline void device_memset(void* p, int value, size_t bytes) { CUDA_CHECK(cudaMemsetAsync(p, value, bytes, gpu().stream)); }

// Zero-filled. Throws UserError if the GPU has not enough memory left.
inline void* device_malloc(size_t bytes) {
  if (bytes == 0) return nullptr;
  gpu();  // chooses the device
  void* p = nullptr;
  cudaError_t status = cudaMalloc(&p, bytes);
  if (status != cudaSuccess)
    user_error("out of memory: could not allocate %zu bytes on the GPU (%s)", bytes, cudaGetErrorString(status));
  device_memset(p, 0, bytes);
  return p;
}

inline void device_free(void* p, size_t) { cudaFree(p); }

inline void copy_to_device(void* device, const void* host, size_t bytes) {
  CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, gpu().stream));
}

// Waits for the operations queued before it, then for itself.
inline void copy_to_host(void* host, const void* device, size_t bytes) {
  CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, gpu().stream));
  CUDA_CHECK(cudaStreamSynchronize(gpu().stream));
}

// The time that the GPU takes from start() to seconds(), which waits for the work queued in between.
struct GpuTimer {
  cudaEvent_t begin, end;
  GpuTimer() {
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
  }
  GpuTimer(const GpuTimer&) = delete;
  GpuTimer& operator=(const GpuTimer&) = delete;
  ~GpuTimer() {
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
  }
  void start() { CUDA_CHECK(cudaEventRecord(begin, gpu().stream)); }
  double seconds() {
    CUDA_CHECK(cudaEventRecord(end, gpu().stream));
    CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    return double(ms) * 1e-3;
  }
};

// What could be allocated now, in bytes.
inline size_t device_memory_available() {
  gpu();
  size_t free_bytes = 0, total_bytes = 0;
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  return free_bytes;
}

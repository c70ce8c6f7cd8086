// The memory that operations work on, and the stream that they run in. Here they are a GPU's.
//
// Its attention takes heads of up to 128 elements, in multiples of 8: rows are then made of 16-byte pieces in both precisions. Its
// LayerNorm takes up to 8,192 channels.
//
// Operations are queued in one stream, in the order in which they are called, and return at once. copy_to_host waits for
// everything before it; nothing else that a training step calls does.
#pragma once
#include <cuda_runtime.h>      // cudaMalloc, cudaMemcpyAsync, ...
#include <array>               // std::array
#include <initializer_list>    // std::initializer_list
#include <optional>            // std::optional
#include <string>              // std::string
#include <tuple>               // std::tuple
#include <utility>             // std::exchange, std::swap
#include "llmc/utils/error.h"  // CHECK, user_error
#include "launch.h"            // CUDA_CHECK

constexpr int head_size_multiple = 8, largest_head_size = 128, largest_channels = 8192;

constexpr int num_staging_buffers = 2;  // what is uploaded has so many places on the device, by turns

// Which of the machine's GPUs this process uses. Chosen, if at all, before the first use.
inline int& gpu_index() {
  static int index = 0;
  return index;
}

// The GPU that this process uses. Workspaces are allocated once, so that the memory plan knows them.
struct Gpu {
  static constexpr size_t gemm_workspace_bytes = 32 << 20;  // what NVIDIA recommends for cuBLASLt on Hopper
  static constexpr size_t scratch_bytes = 16 << 20;         // partial sums of reductions
  std::string name;
  bool is_hopper_or_later = false;
  cudaStream_t stream = nullptr;
  void *gemm_workspace = nullptr, *scratch = nullptr;
  cudaStream_t upload_stream = nullptr;
  cudaEvent_t uploaded[num_staging_buffers], consumed[num_staging_buffers];  // the latest turn of each slot
  int next_slot = 0;

  Gpu() {
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0)
      user_error("no GPU can be used (%s); train_gpt2_sla_cpu trains without one", cudaGetErrorString(status));
    const int index = gpu_index() % count;  // Slurm may show each of its tasks a single GPU, the first
    CUDA_CHECK(cudaSetDevice(index));
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
    name = properties.name;
    is_hopper_or_later = properties.major >= 9;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaMalloc(&gemm_workspace, gemm_workspace_bytes));
    CUDA_CHECK(cudaMalloc(&scratch, scratch_bytes));
    CUDA_CHECK(cudaStreamCreateWithFlags(&upload_stream, cudaStreamNonBlocking));
    for (int slot = 0; slot < num_staging_buffers; slot++) {
      CUDA_CHECK(cudaEventCreateWithFlags(&uploaded[slot], cudaEventDisableTiming));
      CUDA_CHECK(cudaEventCreateWithFlags(&consumed[slot], cudaEventDisableTiming));
    }
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

// `size` elements of host memory that the GPU reads and writes by itself, when a copy's turn comes. The host may change what it has
// given to upload only after a copy_to_host that was called later has returned, and reads what copy_to_host has put here.
template <class T>
struct PinnedBuffer {
  T* data = nullptr;
  size_t size = 0;

  PinnedBuffer() = default;
  explicit PinnedBuffer(size_t count) : size(count) {
    gpu();  // chooses the device
    const cudaError_t status = cudaMallocHost(&data, size * sizeof(T));
    if (status != cudaSuccess)
      user_error("out of memory: could not allocate %zu bytes of pinned host memory (%s)", size * sizeof(T),
                 cudaGetErrorString(status));
  }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
    std::swap(data, other.data);
    std::swap(size, other.size);
    return *this;
  }
  ~PinnedBuffer() { cudaFreeHost(data); }
};

// Tokens to upload: `device` (count) = `host`, by way of one of the slots, each (count) too.
struct Upload {
  int* device;
  std::array<int*, num_staging_buffers> slots;
  const int* host;
  size_t count;
};

// Operations that are called from here on find `uploads` on the device. The copies out of host memory have a stream of their own
// and run while earlier operations compute: they wait for nothing but for their slot, until what it held two turns ago has been
// moved on. What takes place between operations is a small copy from the slot. From a PinnedBuffer this returns at once.
inline void upload(std::initializer_list<Upload> uploads) {
  Gpu& g = gpu();
  const int slot = g.next_slot;
  g.next_slot = (slot + 1) % num_staging_buffers;
  CUDA_CHECK(cudaStreamWaitEvent(g.upload_stream, g.consumed[slot], 0));
  for (const Upload& u : uploads)
    CUDA_CHECK(cudaMemcpyAsync(u.slots[size_t(slot)], u.host, u.count * sizeof(int), cudaMemcpyHostToDevice, g.upload_stream));
  CUDA_CHECK(cudaEventRecord(g.uploaded[slot], g.upload_stream));
  CUDA_CHECK(cudaStreamWaitEvent(g.stream, g.uploaded[slot], 0));
  for (const Upload& u : uploads)
    CUDA_CHECK(cudaMemcpyAsync(u.device, u.slots[size_t(slot)], u.count * sizeof(int), cudaMemcpyDeviceToDevice, g.stream));
  CUDA_CHECK(cudaEventRecord(g.consumed[slot], g.stream));
}

// Uploads that are called from here on wait for the operations before: for when those write to memory that slots lie in.
inline void uploads_wait_for_compute() {
  for (cudaEvent_t event : gpu().consumed) CUDA_CHECK(cudaEventRecord(event, gpu().stream));
}

// Work that is queued again and again with the same arguments (Key...) on the same memory, as one CUDA graph: a model of small kernels
// then has no gaps between them. The first run calls enqueue(key...), so that libraries set themselves up and modules are loaded;
// the second records what it queues; from then on it is launched as it was recorded. Another key starts anew. enqueue depends on
// nothing else that changes, and neither waits nor copies from or to pageable memory.
template <class... Key>
struct CudaGraph {
  CudaGraph() = default;
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;
  ~CudaGraph() { forget(); }

  template <class Enqueue>
  void run(const Enqueue& enqueue, const Key&... key) {
#ifdef SLA_DEBUG
    enqueue(key...);  // launch() waits for every kernel, and nobody can wait for what is only recorded
#else
    if (known_ != std::tuple<Key...>(key...)) {
      forget();
      enqueue(key...);
      known_ = std::tuple<Key...>(key...);
      return;
    }
    if (graph_ == nullptr) record([&] { enqueue(key...); });
    CUDA_CHECK(cudaGraphLaunch(graph_, gpu().stream));
#endif
  }

 private:
  std::optional<std::tuple<Key...>> known_;  // what the last run was of
  cudaGraphExec_t graph_ = nullptr;          // null until the second run of it

  void forget() {
    known_.reset();
    if (graph_ == nullptr) return;
    cudaStreamSynchronize(gpu().stream);  // it may be under way
    cudaGraphExecDestroy(graph_);
    graph_ = nullptr;
  }

  template <class Queue>
  void record(const Queue& queue) {
    cudaGraph_t recording = nullptr;
    CUDA_CHECK(cudaStreamBeginCapture(gpu().stream, cudaStreamCaptureModeThreadLocal));
    try {
      queue();
    } catch (...) {  // the stream must not be left recording
      cudaStreamEndCapture(gpu().stream, &recording);
      if (recording != nullptr) cudaGraphDestroy(recording);
      throw;
    }
    CUDA_CHECK(cudaStreamEndCapture(gpu().stream, &recording));
    const cudaError_t status = cudaGraphInstantiate(&graph_, recording, 0);
    cudaGraphDestroy(recording);
    CUDA_CHECK(status);
  }
};

// A moment on the GPU: when what was queued on a stream before record() is done.
struct GpuEvent {
  cudaEvent_t event = nullptr;

  GpuEvent() { CUDA_CHECK(cudaEventCreate(&event)); }
  GpuEvent(GpuEvent&& other) noexcept : event(std::exchange(other.event, nullptr)) {}
  GpuEvent& operator=(GpuEvent&& other) noexcept {
    std::swap(event, other.event);
    return *this;
  }
  ~GpuEvent() {
    if (event != nullptr) cudaEventDestroy(event);
  }
  void record(cudaStream_t stream = gpu().stream) { CUDA_CHECK(cudaEventRecord(event, stream)); }
  // Of two moments that have passed.
  double ms_since(const GpuEvent& earlier) const {
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, earlier.event, event));
    return double(ms);
  }
};

// The time that the GPU takes from start() to seconds(), which waits for the work queued in between.
struct GpuTimer {
  GpuEvent begin, end;
  void start() { begin.record(); }
  double seconds() {
    end.record();
    CUDA_CHECK(cudaEventSynchronize(end.event));
    return end.ms_since(begin) * 1e-3;
  }
};

constexpr bool device_memory_is_host_memory = false;

// What could be allocated now, in bytes.
inline size_t device_memory_available() {
  gpu();
  size_t free_bytes = 0, total_bytes = 0;
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  return free_bytes;
}

// The memory that operations work on, here a GPU's (the functions of llmc/ops/device_memory.h), and the stream that
// they run in.
//
// Attention takes heads of up to 128 elements, in multiples of 8, so that rows are whole 16-byte vectors in
// every precision. LayerNorm takes up to 8,192 channels.
//
// Operations are queued in one stream, in the order in which they are called, and return at once. copy_to_host waits
// for everything before it, as does copy_to_device from pageable memory; nothing else that a training step calls does.
#pragma once
#include <cuda_runtime.h>
#include <algorithm>
#include <array>
#include <climits>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include "llmc/ops/device_memory.h"
#include "llmc/ops/precision.h"
#include "llmc/base/error.h"
#include "llmc/base/host_name.h"
#include "llmc/base/message.h"
#include "gpu_code.h"
#include "launch.h"

constexpr int head_size_multiple = 8, largest_head_size = 128, largest_channels = 8192;
// Sequences, which are the y or z of a grid; rows of all of them with what segment memory keeps, to the end of a tile.
constexpr int largest_batch = 65535, largest_rows = INT_MAX - 128;

// How many tokens of a prompt, and of texts that are scored, are computed at a time: with 2,048 of GPT-2 124M an H100
// computes for longer than the host needs to launch the kernels. More rows would need longer K/V caches of windows.
constexpr int64_t prompt_rows = 2048, scoring_rows = 8192;

constexpr int num_staging_buffers = 2;  // uploads are double-buffered

// Which of the machine's GPUs this process uses. To be set before the first call of gpu().
inline int& gpu_index() {
  static int index = 0;
  return index;
}

// A program has wgmma's code if it was compiled for sm_90a (SLA_SM_90A), and GPUs of compute capability 9.0 execute it.
inline bool can_use_wgmma(const cudaDeviceProp& gpu) {
#ifdef SLA_SM_90A
  return gpu.major == 9 && gpu.minor == 0;
#else
  return (void)gpu, false;
#endif
}

// The instructions that multiply in attention: mma.sync, or where there are kernels with it wgmma, or for each shape
// those that are faster. The candidates are wgmma kernels that have not been timed on a GPU yet: the forward pass with
// a warpgroup that loads; and dk and dv of 64 channels with K and V in registers, or with candidates_ds dS once through
// memory.
enum class AttentionBy { fastest, mma, wgmma, candidates, candidates_ds };
constexpr std::pair<const char*, AttentionBy> attention_ways[] = {{"mma", AttentionBy::mma},
                                                                  {"wgmma", AttentionBy::wgmma},
                                                                  {"candidates", AttentionBy::candidates},
                                                                  {"candidates-ds", AttentionBy::candidates_ds}};

// What SLA_ATTENTION asks for. The emulated GPU is believed to have wgmma's code if that is asked for: it executes
// nvcc's.
inline AttentionBy attention_asked_for(const cudaDeviceProp& gpu) {
  const char* const text = getenv("SLA_ATTENTION");
  if (text == nullptr) return can_use_wgmma(gpu) ? AttentionBy::fastest : AttentionBy::mma;
  const std::string by = text;
  const auto way = std::find_if(std::begin(attention_ways), std::end(attention_ways),
                                [&](const auto& way) { return by == way.first; });
  if (way == std::end(attention_ways))
    user_error("SLA_ATTENTION=%s: it must be mma, wgmma, candidates or candidates-ds", by.c_str());
  if (way->second == AttentionBy::mma) return way->second;
  if (gpu.major != 9 || gpu.minor != 0)
    user_error("SLA_ATTENTION=%s: it needs a GPU of compute capability 9.0 (H100, H200), and this one has %d.%d",
               by.c_str(), gpu.major, gpu.minor);
#ifndef SLA_EMU
  if (!can_use_wgmma(gpu))
    user_error("SLA_ATTENTION=%s: this program has no code for sm_90a; build it with GPU_ARCH=sm_90", by.c_str());
#endif
  return way->second;
}

// Ways beside attention's that no GPU has been measured with: SLA_CANDIDATES has the names of those that are taken,
// with commas between them.
struct Candidates {
  bool bias_gradients = false;  // as the epilogue of the matmul for the weight's gradient
  bool norm = false;            // its backward pass copies rows to shared memory while it computes others
  bool classifier = false;      // copies its row to shared memory, and reads it from there
};

inline Candidates candidates_asked_for() {
  Candidates candidates;
  const char* const text = getenv("SLA_CANDIDATES");
  std::istringstream names(text != nullptr ? text : "");
  for (std::string name; std::getline(names, name, ',');)
    if (name == "bias-gradients") candidates.bias_gradients = true;
    else if (name == "norm") candidates.norm = true;
    else if (name == "classifier") candidates.classifier = true;
    else user_error("SLA_CANDIDATES=%s: there are bias-gradients, norm and classifier", text);
  return candidates;
}

// Says so, before the first kernel is launched, if the driver will compile this program for the GPU, or cannot.
inline void warn_of_gpu_code(const cudaDeviceProp& gpu) {
#ifdef __CUDA_ARCH_LIST__
#ifdef SLA_PTX
  constexpr bool has_ptx = true;
#else
  constexpr bool has_ptx = false;
#endif
  const std::string remark = remark_on_gpu_code(gpu.name, gpu.major, gpu.minor, {__CUDA_ARCH_LIST__}, has_ptx);
  if (!remark.empty()) print_warning(remark);
#else
  (void)gpu;
#endif
}

// The GPU that this process uses, its streams, and workspaces of fixed sizes, which the memory plan counts.
struct Gpu {
  static constexpr size_t gemm_workspace_bytes = 32 << 20;  // what NVIDIA recommends for cuBLASLt on Hopper
  static constexpr size_t scratch_bytes = 16 << 20;         // partial sums of reductions
  // A block can have 163 KB of shared memory on an A100, 227 KB on an H100, 99 KB with compute capability 8.6, 8.9 or
  // 12.0, 96 KB on a V100, 64 KB on a T4.
  static constexpr size_t large_shared_bytes = 162 << 10, least_shared_bytes = 64 << 10;
  std::string name;
  std::string id;  // "GPU-8a3c...-...", as nvidia-smi shows it, " on " and the host
  int multiprocessors = 0;
  size_t shared_bytes = 0;               // the most that a block can have
  bool has_large_shared_memory = false;  // a block can have large_shared_bytes
  bool has_tf32 = false;                 // matmuls may round to it
  bool has_wgmma = false;                // Hopper's products can be used: attention_wgmma.h
  AttentionBy attention_by = AttentionBy::mma;
  bool fuses_gelu_backward = false;  // as the epilogue of the matmul before it, which is faster on an H100
  Candidates candidates;
  cudaStream_t stream = nullptr;
  void *gemm_workspace = nullptr, *scratch = nullptr;
  cudaStream_t upload_stream = nullptr;
  // When each staging buffer was last filled, and last copied from.
  cudaEvent_t uploaded[num_staging_buffers], consumed[num_staging_buffers];
  int next_staging_buffer = 0;

  Gpu() {
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0)
      user_error("no GPU can be used (%s); train_gpt2_sla_cpu trains without one; see scripts/TROUBLES.md",
                 cudaGetErrorString(status));
    const int index = gpu_index() % count;  // Slurm may show each of its tasks a single GPU, the first
    CUDA_CHECK(cudaSetDevice(index));
    // The host sleeps while it waits, so that other threads can use its core.
    CUDA_CHECK(cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync));
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
    name = properties.name;
    const auto [least, needed] = is_fp16   ? std::pair(75, "fp16 needs 7.5 (Turing) or later")
                                 : is_bf16 ? std::pair(80, "bf16 needs 8.0 (Ampere) or later")
                                           : std::pair(70, "7.0 (Volta) or later is needed");
    if (10 * properties.major + properties.minor < least)
      user_error("%s has compute capability %d.%d, and %s%s", properties.name, properties.major, properties.minor,
                 needed, least > 70 ? "; build with PRECISION=FP32, for 7.0 and later" : "");
    warn_of_gpu_code(properties);
    id = "GPU-";
    for (int i = 0; i < 16; i++)
      id += format(i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", (unsigned char)properties.uuid.bytes[i]);
    id += " on " + host_name();
    multiprocessors = properties.multiProcessorCount;
    shared_bytes = properties.sharedMemPerBlockOptin;
    has_large_shared_memory = shared_bytes >= large_shared_bytes;
    has_tf32 = properties.major >= 8;
    attention_by = attention_asked_for(properties);
    has_wgmma = attention_by != AttentionBy::mma || can_use_wgmma(properties);
    fuses_gelu_backward = is_16_bit && properties.major == 9;
    candidates = candidates_asked_for();
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaMalloc(&gemm_workspace, gemm_workspace_bytes));
    CUDA_CHECK(cudaMalloc(&scratch, scratch_bytes));
    CUDA_CHECK(cudaStreamCreateWithFlags(&upload_stream, cudaStreamNonBlocking));
    for (int i = 0; i < num_staging_buffers; i++) {
      CUDA_CHECK(cudaEventCreateWithFlags(&uploaded[i], cudaEventDisableTiming));
      CUDA_CHECK(cudaEventCreateWithFlags(&consumed[i], cudaEventDisableTiming));
    }
  }
};

// Created at the first call. Throws UserError if no GPU can be used.
inline Gpu& gpu() {
  static Gpu* the_gpu = new Gpu();  // never destroyed: the driver may shut down before static objects are destroyed
  return *the_gpu;
}

// Launches an operation's kernel (launch.h), which runs after the kernels of the operations before.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, Args... args) {
  launch_on(gpu().stream, kernel, grid, block, shared_bytes, args...);
}

// f(small): whether a kernel must have its smaller tiles, because a block cannot have `bytes` of shared memory.
template <class F>
void for_tiles_that_fit(size_t bytes, F f) {
  if (bytes <= gpu().shared_bytes) f(std::false_type());
  else f(std::true_type());
}

inline const char* device_name() { return gpu().name.c_str(); }
inline bool wgmma_is_asked_for() {
  return gpu().attention_by != AttentionBy::mma && gpu().attention_by != AttentionBy::fastest;
}

inline void configure_threads(char**, const char* = nullptr) {}  // the host's threads have little to do

inline size_t device_workspace_bytes() { return Gpu::gemm_workspace_bytes + Gpu::scratch_bytes; }

inline size_t device_reserve_bytes() { return 1000000000; }  // an estimate, to be replaced by what a GPU shows

// Scratch for `count` elements. Operations run one after the other, so each may use all of it until it is done.
template <class T>
T* device_scratch(size_t count) {
  CHECK(count * sizeof(T) <= Gpu::scratch_bytes);
  return static_cast<T*>(gpu().scratch);
}

inline void device_memset(void* p, int value, size_t bytes) {
  CUDA_CHECK(cudaMemsetAsync(p, value, bytes, gpu().stream));
}

inline void* device_malloc(size_t bytes) {
  if (bytes == 0) return nullptr;
  gpu();  // selects the device
  void* p = nullptr;
  cudaError_t status = cudaMalloc(&p, bytes);
  if (status != cudaSuccess)
    user_error("out of memory: could not allocate %zu bytes on the GPU (%s)", bytes, cudaGetErrorString(status));
  device_memset(p, 0, bytes);
  return p;
}

inline void device_free(void* p, size_t) { cudaFree(p); }

// Queues device = host. Pageable memory has been read when this returns, which waits for it: CUDA may read it later.
// Pinned memory is read when the stream comes to it.
inline void copy_from_host(void* device, const void* host, size_t bytes, cudaStream_t stream) {
  CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream));
  cudaPointerAttributes source;
  CUDA_CHECK(cudaPointerGetAttributes(&source, host));
  if (source.type != cudaMemoryTypeHost) CUDA_CHECK(cudaStreamSynchronize(stream));
}

inline void copy_to_device(void* device, const void* host, size_t bytes) {
  copy_from_host(device, host, bytes, gpu().stream);
}

inline void copy_to_host(void* host, const void* device, size_t bytes) {
  CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, gpu().stream));
  CUDA_CHECK(cudaStreamSynchronize(gpu().stream));
}

inline void* pinned_malloc(size_t bytes) {
  gpu();  // selects the device
  void* p = nullptr;
  const cudaError_t status = cudaMallocHost(&p, bytes);
  if (status != cudaSuccess)
    user_error("out of memory: could not allocate %zu bytes of pinned host memory (%s)", bytes,
               cudaGetErrorString(status));
  return p;
}
inline void pinned_free(void* p, size_t) { cudaFreeHost(p); }

// Tokens to upload: `device` (count) = `host`, by way of one of the staging buffers, each (count) on the device.
struct Upload {
  int* device;
  std::array<int*, num_staging_buffers> staging;
  const int* host;
  size_t count;
};

// A double-buffered upload: operations that are called from here on read `uploads` on the device. The copies from the
// host run in a stream of their own, beside earlier operations, alternately into one of two staging buffers; they wait
// only for the upload before the last one to be copied out of theirs. In the operations' stream there is only a small
// copy from the staging buffer. From a PinnedBuffer this returns at once.
inline void upload(std::initializer_list<Upload> uploads) {
  Gpu& g = gpu();
  const int i = g.next_staging_buffer;
  g.next_staging_buffer = (i + 1) % num_staging_buffers;
  CUDA_CHECK(cudaStreamWaitEvent(g.upload_stream, g.consumed[i], 0));
  for (const Upload& u : uploads) copy_from_host(u.staging[i], u.host, u.count * sizeof(int), g.upload_stream);
  CUDA_CHECK(cudaEventRecord(g.uploaded[i], g.upload_stream));
  CUDA_CHECK(cudaStreamWaitEvent(g.stream, g.uploaded[i], 0));
  for (const Upload& u : uploads)
    CUDA_CHECK(cudaMemcpyAsync(u.device, u.staging[i], u.count * sizeof(int), cudaMemcpyDeviceToDevice, g.stream));
  CUDA_CHECK(cudaEventRecord(g.consumed[i], g.stream));
}

// Uploads that are called from here on wait for the operations before: needed if those write to the memory of the
// staging buffers.
inline void uploads_wait_for_compute() {
  for (cudaEvent_t event : gpu().consumed) CUDA_CHECK(cudaEventRecord(event, gpu().stream));
}

// Work that is queued repeatedly with the same arguments (Key...) on the same memory, as one CUDA graph, so that small
// kernels run without gaps. The first run is eager: it calls enqueue(key...), which lets libraries initialise and
// modules load. The second captures what enqueue queues, and this and all later runs replay the graph. Another key
// starts over. enqueue must depend on nothing else that changes, and must neither wait nor copy from or to pageable
// memory.
template <class... Key>
struct CudaGraph {
  CudaGraph() = default;
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;
  ~CudaGraph() { reset(); }

  template <class Enqueue>
  void run(const Enqueue& enqueue, const Key&... key) {
#ifdef SLA_DEBUG
    enqueue(key...);  // launch() waits for every kernel, which a capture does not allow
#else
    if (key_ != std::tuple<Key...>(key...)) {
      reset();
      enqueue(key...);
      key_ = std::tuple<Key...>(key...);
      return;
    }
    if (graph_ == nullptr) capture([&] { enqueue(key...); });
    CUDA_CHECK(cudaGraphLaunch(graph_, gpu().stream));
#endif
  }

 private:
  std::optional<std::tuple<Key...>> key_;  // of the last run
  cudaGraphExec_t graph_ = nullptr;        // null until the second run with the same key

  void reset() {
    key_.reset();
    if (graph_ == nullptr) return;
    cudaStreamSynchronize(gpu().stream);  // the graph may be running
    cudaGraphExecDestroy(graph_);
    graph_ = nullptr;
  }

  template <class Queue>
  void capture(const Queue& queue) {
    cudaGraph_t captured = nullptr;
    CUDA_CHECK(cudaStreamBeginCapture(gpu().stream, cudaStreamCaptureModeThreadLocal));
    try {
      queue();
    } catch (...) {  // the stream must not stay in capture mode
      cudaStreamEndCapture(gpu().stream, &captured);
      if (captured != nullptr) cudaGraphDestroy(captured);
      throw;
    }
    CUDA_CHECK(cudaStreamEndCapture(gpu().stream, &captured));
    const cudaError_t status = cudaGraphInstantiate(&graph_, captured, 0);
    cudaGraphDestroy(captured);
    CUDA_CHECK(status);
  }
};

// The time on the GPU at which everything queued on a stream before record() is done.
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
  // Milliseconds between two events, both of which have been reached.
  double ms_since(const GpuEvent& earlier) const {
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, earlier.event, event));
    return double(ms);
  }
};

// The time that the GPU takes for the work queued between start() and seconds(), which waits for it.
struct GpuTimer {
  GpuEvent begin, end;
  void start() { begin.record(); }
  double seconds() {
    end.record();
    CUDA_CHECK(cudaEventSynchronize(end.event));
    return end.ms_since(begin) * 1e-3;
  }
};

// Bytes a second, read and written, of a copy of so many bytes: the best of `seconds` seconds of runs.
inline double copy_bandwidth(size_t bytes, double seconds) {
  char* const memory = static_cast<char*>(device_malloc(2 * bytes));
  device_memset(memory, 1, 2 * bytes);
  GpuTimer timer;
  double best = 1e30, spent = 0;
  for (int run = 0; run < 3 || spent < seconds; run++) {
    timer.start();
    CUDA_CHECK(cudaMemcpyAsync(memory + bytes, memory, bytes, cudaMemcpyDeviceToDevice, gpu().stream));
    const double time = timer.seconds();
    best = std::min(best, time), spent += time;
  }
  device_free(memory, 2 * bytes);
  return 2.0 * double(bytes) / best;
}

constexpr bool device_memory_is_host_memory = false;

struct DeviceMemoryInfo {
  size_t free, total;  // bytes
};
inline DeviceMemoryInfo device_memory_info() {
  gpu();  // selects the device
  DeviceMemoryInfo info;
  CUDA_CHECK(cudaMemGetInfo(&info.free, &info.total));
  return info;
}

inline size_t device_memory_available() { return device_memory_info().free; }

// How much the GPU has, in bytes, whoever uses it.
inline size_t device_memory_total() { return device_memory_info().total; }

// A stand-in for CUDA's cuda_runtime.h that lets g++ compile the project's CUDA sources and run them on a CPU: the part
// of the runtime API that the project uses, with the real names, values and signatures. What is missing does not
// compile, which is better than something that compiles and behaves differently. ../README.md says what is checked.
//
// Stricter than the real API in two ways: every operation names its stream, because the null stream's implicit
// synchronisation hides missing events; and kernels are launched by cudaLaunchKernelEx alone.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include "emu_device.h"

typedef enum cudaError {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidMemcpyDirection = 21,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorIllegalState = 401,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorNotSupported = 801,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
} cudaError_t;

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();     // and resets it
cudaError_t cudaPeekAtLastError();  // and keeps it

// ----------------------------------------------------------------------------
// Device. A process uses one; there are as many as mpirun started processes on this machine.

struct cudaUUID_t {
  char bytes[16];
};

struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;  // of an emulated GPU: its number on this machine, in the last byte
  int major, minor;
  int multiProcessorCount;
  int warpSize;
  int l2CacheSize;                // bytes
  size_t totalGlobalMem;          // bytes
  size_t sharedMemPerBlock;       // bytes, without cudaFuncSetAttribute
  size_t sharedMemPerBlockOptin;  // bytes, with it
};

enum cudaDeviceAttr {
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();

// How the host waits: it spins, or with cudaDeviceScheduleBlockingSync sleeps. Without a flag the real driver chooses,
// mostly the former.
#define cudaDeviceScheduleAuto 0x00
#define cudaDeviceScheduleBlockingSync 0x04
cudaError_t cudaSetDeviceFlags(unsigned flags);

// ----------------------------------------------------------------------------
// Streams and events. Nothing runs until the host waits for it; then the order of streams is drawn from the seed.

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;

#define cudaStreamNonBlocking 0x01
#define cudaEventDefault 0x00
#define cudaEventDisableTiming 0x02

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);  // greatest is the smaller number
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);

cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);

// ----------------------------------------------------------------------------
// Graphs, made by capturing a stream. What is queued on it meanwhile becomes the graph's nodes, with the arguments that
// it has then, and does not run. A capture holds one stream: events cannot draw others into it.

typedef struct CUgraph_st* cudaGraph_t;
typedef struct CUgraphExec_st* cudaGraphExec_t;

enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeThreadLocal = 1 };

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);

// ----------------------------------------------------------------------------
// Memory

enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };

cudaError_t cudaMalloc(void** pointer, size_t bytes);
cudaError_t cudaFree(void* pointer);
cudaError_t cudaMallocHost(void** pointer, size_t bytes);
cudaError_t cudaFreeHost(void* pointer);
cudaError_t cudaMemGetInfo(size_t* available, size_t* total);

enum cudaMemoryType {
  cudaMemoryTypeUnregistered = 0,
  cudaMemoryTypeHost = 1,
  cudaMemoryTypeDevice = 2
};  // the first: pageable

struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void *devicePointer, *hostPointer;
};

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer);
cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* destination, int value, size_t bytes, cudaStream_t stream);

template <class T>
cudaError_t cudaMalloc(T** pointer, size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(pointer), bytes);
}
template <class T>
cudaError_t cudaMallocHost(T** pointer, size_t bytes) {
  return cudaMallocHost(reinterpret_cast<void**>(pointer), bytes);
}

// ----------------------------------------------------------------------------
// Kernels

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value);
cudaError_t cudaFuncGetName(const char** name, const void* function);  // the mangled name; CUDA 12.3 and later have it

template <class T>
cudaError_t cudaFuncSetAttribute(T* function, cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(function), attribute, value);
}

struct cudaLaunchAttribute;  // clusters, priorities, ...: not emulated

typedef struct cudaLaunchConfig_st {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
} cudaLaunchConfig_t;

namespace emu {

// A kernel's parameters as a GPU gets them: one after the other, each aligned as its type asks for.
class Parameters {
 public:
  template <class... T>
  explicit Parameters(const T&... values) {
    (append(&values, sizeof(T), alignof(T)), ...);
  }
  size_t size() const { return places_.size(); }
  size_t offset(size_t i) const { return places_[i].offset; }
  size_t bytes(size_t i) const { return places_[i].bytes; }
  const unsigned char* data() const { return data_.data(); }

 private:
  struct Place {
    size_t offset, bytes;
  };
  void append(const void* value, size_t bytes, size_t alignment) {
    const size_t offset = (data_.size() + alignment - 1) / alignment * alignment;
    places_.push_back({offset, bytes});
    data_.resize(offset + bytes);
    memcpy(data_.data() + offset, value, bytes);
  }
  std::vector<Place> places_;
  std::vector<unsigned char> data_;
};

// Queues a kernel. `thread` runs one CUDA thread: calls the kernel with its parameters.
cudaError_t launch(const cudaLaunchConfig_t& config, const void* function, std::function<void()> thread,
                   Parameters parameters);

}  // namespace emu

template <class... ExpTypes, class... ActTypes>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(ExpTypes...), ActTypes&&... args) {
  static_assert((!std::is_reference_v<ExpTypes> && ...), "a kernel takes its parameters by value");
  static_assert((std::is_trivially_copyable_v<ExpTypes> && ...), "kernel parameters are copied byte by byte");
  static_assert((sizeof(ExpTypes) + ... + 0) <= 4096, "a kernel's parameters have 4,096 bytes");
  // As in the real header, arguments convert implicitly, at the time of the launch.
  return [&](ExpTypes... converted) {
    return emu::launch(
        *config, reinterpret_cast<const void*>(kernel),
        [kernel, parameters = std::tuple<ExpTypes...>(converted...)] { std::apply(kernel, parameters); },
        emu::Parameters(converted...));
  }(std::forward<ActTypes>(args)...);
}

// ----------------------------------------------------------------------------
// The emulator's own controls

namespace emu {

// The orders of threads, blocks and streams are drawn from this seed. The first is the environment's SLA_EMU_SEED,
// or 1.
void set_seed(uint64_t seed);

// Whether kernels that are launched from now on are searched for races in shared memory, which end the program. The
// environment's SLA_EMU_RACES=0 sets it to false.
void look_for_races(bool yes);

// The device's compute capability, and with it the limit of shared memory: 7.0 (96 KB per block), 7.5 (64 KB), 8.0 (163
// KB), 8.6, 8.9 or 12.0 (99 KB), or 9.0 (227 KB). The environment's SLA_EMU_CC=70, 75, 80, 86, 89, 90 or 120 sets it
// from outside; the default is 9.0.
void set_compute_capability(int major, int minor);

// Since the program began.
struct Counters {
  // What has been executed, not just queued.
  uint64_t kernels, matmuls, memsets;
  uint64_t bytes_to_device, bytes_to_host, bytes_on_device;  // copied by cudaMemcpyAsync
  uint64_t bytes_read_async;                                 // by cp.async
  uint64_t matrices_loaded, bank_conflicts;        // 8 x 8 matrices by ldmatrix, and those whose rows share banks
  uint64_t bytes_allocated, most_bytes_allocated;  // by cudaMalloc and not freed: now, and the most at any time
  // What the host has called.
  uint64_t host_waits;      // synchronizations, copies to pageable memory, and cudaFree: each stops the host
  uint64_t spinning_waits;  // how many of them the host spins in
  uint64_t launches;        // kernels and matmuls queued one by one: neither captured nor from a graph
  uint64_t graph_launches;
};
const Counters& counters();

// counters().most_bytes_allocated counts from now on.
void forget_most_bytes_allocated();

}  // namespace emu

// The runtime API: streams, events, graphs, copies, launches.
//
// An operation is a closure in its stream's queue. Nothing runs until the host waits for something; then streams whose
// first operation is not held up by an event are run in an order drawn from the seed, so that an operation that lacks
// an event wait meets stale data under some seed.
//
// A graph is what one stream captured: no events inside, no graph within a graph, no nodes made by hand, no updates. It
// is destroyed only after its launches have been waited for. During a capture no stream or event at all may be waited
// for, which CUDA would allow for others.
#include <cxxabi.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>
#include "emu.h"
#include "llmc/base/error.h"
#include "ptx/launch.h"

namespace {

// One cudaEventRecord. An event that is recorded again gets a new one; what waits for the old one still does.
struct Recording {
  cudaStream_t stream;
  uint64_t number;  // it is the stream's number-th operation, from 1
  bool done;
  std::chrono::steady_clock::time_point time;
};

struct Operation {
  const char* name;
  std::function<void()> run;
  std::shared_ptr<Recording> wait_for;  // null, or what holds the stream up
};

// What has been queued on a stream since cudaStreamBeginCapture.
struct Capture {
  std::vector<Operation> nodes;
  bool lost = false;  // a call was made that a capture does not allow, and cudaStreamEndCapture has no graph to return
};

// The shared memory that a block can have, in KB, by compute capability: 80 is 8.0. 0 if it is not emulated.
size_t shared_kilobytes(int capability) {
  switch (capability) {
    case 70: return 96;
    case 75: return 64;
    case 80: return 163;
    case 86:
    case 89:
    case 120: return 99;
    case 90: return 227;
    default: return 0;
  }
}

struct Kernel {
  std::string mangled, demangled;
  size_t shared_bytes_allowed = 48 * 1024;  // without cudaFuncSetAttribute
};

}  // namespace

struct CUstream_st {
  std::deque<Operation> queue;
  uint64_t num_queued = 0, num_done = 0;
  int priority = 0;
  std::unique_ptr<Capture> capture;  // null: what is queued runs
};

struct CUevent_st {
  bool timed;
  std::shared_ptr<Recording> last;  // null: never recorded
};

struct CUgraph_st {
  std::shared_ptr<const std::vector<Operation>> nodes;
};

struct CUgraphExec_st {
  std::shared_ptr<const std::vector<Operation>> nodes;
  cudaStream_t stream = nullptr;                                            // of the last launch
  std::shared_ptr<uint64_t> launches_left = std::make_shared<uint64_t>(0);  // which have not run yet
};

namespace emu {
namespace {

constexpr int greatest_priority = -5;  // of a stream; the least is 0

struct Runtime {
  std::vector<cudaStream_t> streams;
  std::unordered_map<const void*, Kernel> kernels;
  cudaError_t last_error = cudaSuccess;
  int major = 9, minor = 0;
  int device = 0;  // which of the machine's this process uses
  unsigned flags = cudaDeviceScheduleAuto;
  Counters counters = {};
  std::thread::id host_thread = std::this_thread::get_id();

  Runtime() {
    if (const char* seed = getenv("SLA_EMU_SEED")) rng.state = strtoull(seed, nullptr, 10);
    const char* capability = getenv("SLA_EMU_CC");
    if (capability != nullptr) {
      const int number = atoi(capability);
      major = number / 10, minor = number % 10;
      if (shared_kilobytes(number) == 0)
        fatal("SLA_EMU_CC is \"%s\"; it should be 70, 75, 80, 86, 89, 90 or 120", capability);
    }
    read_ptx();
    is_device_memory(nullptr);  // reserves the range before the handler uses it
    install_signal_handler();
    close_shared_memory();
  }

  // The file of PTX, if there is one. The first CUDA call of all may be in a destructor, which cannot throw.
  static void read_ptx() {
    try {
      ptx::is_used();
    } catch (const UserError& e) {
      fprintf(stderr, "error: %s\n", e.what());
      _exit(1);
    }
  }
};

Runtime& runtime() {
  static Runtime& runtime = *new Runtime;  // never destroyed
  if (std::this_thread::get_id() != runtime.host_thread)
    fatal("CUDA is used by a second host thread, which is not emulated");
  return runtime;
}

cudaError_t failed(cudaError_t error) { return runtime().last_error = error; }

size_t shared_bytes_limit() { return shared_kilobytes(runtime().major * 10 + runtime().minor) * 1024; }

// Called at every use of a stream.
CUstream_st& checked(cudaStream_t stream, const char* name) {
  if (running().operation != nullptr) fatal("%s from inside an operation of the device", name);
  if (stream == nullptr) {
    fatal("%s on the null stream, which is not emulated because its implicit waits hide missing events; name a stream",
          name);
  }
  const auto& streams = runtime().streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end())
    fatal("%s on a stream that does not exist", name);
  return *stream;
}

// For calls that are not allowed while any stream is captured: true if one is, and its capture is lost.
bool loses_a_capture() {
  bool any = false;
  for (cudaStream_t stream : runtime().streams)
    if (stream->capture != nullptr) any = stream->capture->lost = true;
  return any;
}

void count_wait() {
  runtime().counters.host_waits++;
  runtime().counters.spinning_waits += (runtime().flags & cudaDeviceScheduleBlockingSync) == 0;
}

void push(CUstream_st& stream, Operation operation) {
  stream.queue.push_back(std::move(operation));
  stream.num_queued++;
}

// ----------------------------------------------------------------------------
// Running what is queued

bool held_up(const CUstream_st& stream) {
  const Operation& first = stream.queue.front();
  return first.wait_for != nullptr && !first.wait_for->done;
}

// The stream that must advance for `stream` to advance: itself, or the one that records the event it waits for. This
// ends, as an operation waits only for what was queued before it.
cudaStream_t needed_for(cudaStream_t stream) {
  while (held_up(*stream)) stream = stream->queue.front().wait_for->stream;
  return stream;
}

void run_one(CUstream_st& stream) {
  Operation operation = std::move(stream.queue.front());
  stream.queue.pop_front();
  running().operation = operation.name;
  operation.run();
  running() = {};
  stream.num_done++;
}

// A stream that can advance, drawn from all but `avoided`; nullptr if none can.
cudaStream_t draw_stream(cudaStream_t avoided) {
  std::vector<cudaStream_t> able;
  for (cudaStream_t s : runtime().streams)
    if (s != avoided && !s->queue.empty() && !held_up(*s)) able.push_back(s);
  return able.empty() ? nullptr : able[rng.below(uint32_t(able.size()))];
}

// Runs operations until `stream` has done its first `count` ones. Draws how eager the device is: as lazy as it may be,
// as eager on other streams as it can be, or anything between.
void run_until(CUstream_st& stream, uint64_t count) {
  if (stream.num_done >= count) return;
  OpenMemory open;
  const uint32_t eagerness = rng.below(3);
  while (stream.num_done < count) {
    cudaStream_t next = nullptr;
    if (eagerness == 1) next = draw_stream(nullptr);
    if (eagerness == 2) next = draw_stream(&stream);
    run_one(next != nullptr ? *next : *needed_for(&stream));
  }
}

void run_all() {
  OpenMemory open;
  while (cudaStream_t next = draw_stream(nullptr)) run_one(*next);
}

// ----------------------------------------------------------------------------
// Kernels

Kernel& kernel_of(const void* function) {
  const auto [it, is_new] = runtime().kernels.try_emplace(function);
  Kernel& kernel = it->second;
  if (!is_new) return kernel;
  kernel.mangled = symbol_at(function);
  if (kernel.mangled.empty()) kernel.mangled = "with an unknown name (the program has been stripped)";
  char* demangled = abi::__cxa_demangle(kernel.mangled.c_str(), nullptr, nullptr, nullptr);
  kernel.demangled = demangled != nullptr ? demangled : kernel.mangled;
  free(demangled);
  return kernel;
}

bool has_valid_shape(dim3 grid, dim3 block) {
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
  return threads >= 1 && block.x <= 1024 && block.y <= 1024 && block.z <= 64 && threads <= 1024 &&  //
         blocks >= 1 && grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535;
}

}  // namespace

Random rng = {1};

void set_seed(uint64_t seed) {
  runtime();  // which reads the environment's seed the first time
  rng.state = seed;
}
void set_compute_capability(int major, int minor) {
  if (shared_kilobytes(major * 10 + minor) == 0) fatal("compute capability %d.%d is not emulated", major, minor);
  runtime().major = major;
  runtime().minor = minor;
}
bool has_async_copies() { return runtime().major >= 8; }
const Counters& counters() { return runtime().counters; }
Counters& mutable_counters() { return runtime().counters; }
void forget_most_bytes_allocated() { runtime().counters.most_bytes_allocated = runtime().counters.bytes_allocated; }

cudaError_t enqueue(const char* name, cudaStream_t stream, std::function<void()> run) {
  CUstream_st& s = checked(stream, name);
  Operation operation = {name, std::move(run), nullptr};
  if (s.capture == nullptr) push(s, std::move(operation));
  else if (s.capture->lost) return failed(cudaErrorStreamCaptureInvalidated);
  else s.capture->nodes.push_back(std::move(operation));
  return cudaSuccess;
}

cudaError_t enqueue_launch(const char* name, cudaStream_t stream, std::function<void()> run) {
  if (checked(stream, name).capture == nullptr) runtime().counters.launches++;
  if (!take_for(Library::modules)) return failed(cudaErrorMemoryAllocation);
  return enqueue(name, stream, std::move(run));
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* function, std::function<void()> thread,
                   Parameters parameters) {
  checked(config.stream, "cudaLaunchKernelEx");
  Kernel& kernel = kernel_of(function);
  if (config.numAttrs != 0) return failed(cudaErrorNotSupported);
  if (!has_valid_shape(config.gridDim, config.blockDim)) return failed(cudaErrorInvalidConfiguration);
  if (config.dynamicSmemBytes > kernel.shared_bytes_allowed) return failed(cudaErrorInvalidValue);
  const Launch launch = {config.gridDim, config.blockDim, config.dynamicSmemBytes, std::move(thread)};
  const bool from_ptx = ptx::is_used();
  if (from_ptx) ptx::check_launch(kernel.mangled, parameters);
  return enqueue_launch("cudaLaunchKernelEx", config.stream,
                        [launch, from_ptx, &kernel, parameters = std::move(parameters)] {
                          running().kernel = kernel.demangled.c_str();
                          runtime().counters.kernels++;
                          if (from_ptx)
                            ptx::run_kernel(kernel.mangled, launch.grid, launch.block, launch.shared_bytes, parameters);
                          else run_kernel(launch);
                        });
}

}  // namespace emu

using namespace emu;

// ----------------------------------------------------------------------------
// Errors

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidMemcpyDirection: return "cudaErrorInvalidMemcpyDirection";
    case cudaErrorInvalidDeviceFunction: return "cudaErrorInvalidDeviceFunction";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorIllegalState: return "cudaErrorIllegalState";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidMemcpyDirection: return "invalid copy direction for memcpy";
    case cudaErrorInvalidDeviceFunction: return "invalid device function";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorIllegalState: return "the operation cannot be performed in the present state";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
  }
  return "unrecognized error code";
}

cudaError_t cudaPeekAtLastError() { return runtime().last_error; }

cudaError_t cudaGetLastError() {
  const cudaError_t error = runtime().last_error;
  runtime().last_error = cudaSuccess;
  return error;
}

// ----------------------------------------------------------------------------
// Device

// The numbers of the GPUs that a process sees: those in CUDA_VISIBLE_DEVICES, or all 64 of the emulated machine.
static std::vector<int> visible_devices() {
  std::vector<int> devices;
  const char* const visible = getenv("CUDA_VISIBLE_DEVICES");
  std::istringstream list(visible != nullptr ? visible : "");
  for (std::string device; std::getline(list, device, ',');) devices.push_back(atoi(device.c_str()));
  for (int device = 0; visible == nullptr && device < 64; device++) devices.push_back(device);
  return devices;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = int(visible_devices().size());
  return *count > 0 ? cudaSuccess : failed(cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) {
  int count = 0;
  cudaGetDeviceCount(&count);
  if (device < 0 || device >= count) return failed(cudaErrorInvalidDevice);
  if (device != runtime().device && (!runtime().streams.empty() || runtime().counters.bytes_allocated > 0))
    fatal("cudaSetDevice(%d) after device %d was used; a process has one emulated GPU", device, runtime().device);
  runtime().device = device;
  return cudaSuccess;
}

cudaError_t cudaSetDeviceFlags(unsigned flags) {
  if (flags != cudaDeviceScheduleAuto && flags != cudaDeviceScheduleBlockingSync) return failed(cudaErrorInvalidValue);
  runtime().flags = flags;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = runtime().device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device != runtime().device) return failed(cudaErrorInvalidDevice);
  *properties = {};
  snprintf(properties->name, sizeof properties->name, "emulated GPU");
  properties->uuid.bytes[15] = char(visible_devices()[size_t(device)]);
  properties->major = runtime().major;
  properties->minor = runtime().minor;
  properties->multiProcessorCount = 6;  // few: a kernel that launches blocks per multiprocessor should not take long
                                        // here
  properties->warpSize = warpSize;
  properties->l2CacheSize = (runtime().major >= 9 ? 50 : 40) << 20;
  properties->totalGlobalMem = memory_total();
  properties->sharedMemPerBlock = 48 * 1024;
  properties->sharedMemPerBlockOptin = shared_bytes_limit();
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device)) return error;
  switch (attribute) {
    case cudaDevAttrWarpSize: *value = properties.warpSize; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; return cudaSuccess;
    case cudaDevAttrL2CacheSize: *value = properties.l2CacheSize; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(properties.sharedMemPerBlockOptin); return cudaSuccess;
  }
  return failed(cudaErrorInvalidValue);
}

cudaError_t cudaDeviceSynchronize() {
  if (loses_a_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  count_wait();
  run_all();
  return cudaSuccess;
}

// ----------------------------------------------------------------------------
// Streams and events

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

// Streams advance in random order whatever their priorities are: a GPU promises none.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  *stream = new CUstream_st;
  (*stream)->priority = max(greatest_priority, min(0, priority));
  runtime().streams.push_back(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = checked(stream, "cudaStreamGetPriority").priority;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = greatest_priority;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  CUstream_st& s = checked(stream, "cudaStreamDestroy");
  if (s.capture != nullptr) fatal("cudaStreamDestroy on a stream that is being captured; end the capture first");
  run_until(s, s.num_queued);  // other streams may wait for events that it records
  auto& streams = runtime().streams;
  streams.erase(std::find(streams.begin(), streams.end(), stream));
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  CUstream_st& s = checked(stream, "cudaStreamSynchronize");
  if (loses_a_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  count_wait();
  run_until(s, s.num_queued);
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  CUstream_st& s = checked(stream, "cudaStreamWaitEvent");
  if (s.capture != nullptr) fatal("cudaStreamWaitEvent in a capture: one of several streams is not emulated");
  if (event->last != nullptr) push(s, {"cudaStreamWaitEvent", [] {}, event->last});
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = new CUevent_st{(flags & cudaEventDisableTiming) == 0, nullptr};
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (checked(stream, "cudaEventRecord").capture != nullptr)
    fatal("cudaEventRecord in a capture: one of several streams is not emulated");
  auto recording = std::make_shared<Recording>(Recording{stream, 0, false, {}});
  enqueue("cudaEventRecord", stream, [recording] {
    recording->time = std::chrono::steady_clock::now();
    recording->done = true;
  });
  recording->number = stream->num_queued;
  event->last = std::move(recording);
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (loses_a_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  count_wait();
  if (event->last == nullptr || event->last->done) return cudaSuccess;
  run_until(checked(event->last->stream, "cudaEventSynchronize"), event->last->number);
  return cudaSuccess;
}

// Every second call, on average, lets the device advance, so that a host that polls gets its answer.
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (loses_a_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  if (event->last == nullptr || event->last->done) return cudaSuccess;
  CUstream_st& stream = checked(event->last->stream, "cudaEventQuery");
  if (rng.next() % 2 != 0) run_until(stream, stream.num_done + 1);
  return event->last->done ? cudaSuccess : cudaErrorNotReady;  // not an error that cudaGetLastError keeps
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  for (cudaEvent_t event : {start, end}) {
    if (!event->timed || event->last == nullptr) return failed(cudaErrorInvalidResourceHandle);
    if (!event->last->done) return cudaErrorNotReady;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(end->last->time - start->last->time).count();
  return cudaSuccess;
}

// ----------------------------------------------------------------------------
// Graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  CUstream_st& s = checked(stream, "cudaStreamBeginCapture");
  if (mode != cudaStreamCaptureModeGlobal && mode != cudaStreamCaptureModeThreadLocal)
    return failed(cudaErrorInvalidValue);
  if (s.capture != nullptr) return failed(cudaErrorIllegalState);
  s.capture = std::make_unique<Capture>();
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  CUstream_st& s = checked(stream, "cudaStreamEndCapture");
  *graph = nullptr;
  if (s.capture == nullptr) return failed(cudaErrorIllegalState);
  const std::unique_ptr<Capture> capture = std::move(s.capture);
  if (capture->lost) return failed(cudaErrorStreamCaptureInvalidated);
  *graph = new CUgraph_st{std::make_shared<const std::vector<Operation>>(std::move(capture->nodes))};
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
  if (flags != 0) return failed(cudaErrorInvalidValue);
  if (!take_for(Library::graphs)) return failed(cudaErrorMemoryAllocation);
  *exec = new CUgraphExec_st{graph->nodes};
  return cudaSuccess;
}

// The nodes are operations like any other: other streams' operations may run between them.
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  CUstream_st& s = checked(stream, "cudaGraphLaunch");
  if (s.capture != nullptr) fatal("cudaGraphLaunch in a capture: graphs within graphs are not emulated");
  if (*exec->launches_left > 0 && exec->stream != stream)
    fatal("cudaGraphLaunch while the graph runs on another stream, which is not emulated");
  exec->stream = stream;
  ++*exec->launches_left;
  runtime().counters.graph_launches++;
  for (size_t i = 0; i < exec->nodes->size(); i++)
    push(s, {(*exec->nodes)[i].name, [nodes = exec->nodes, i] { (*nodes)[i].run(); }, nullptr});
  push(s, {"cudaGraphLaunch", [left = exec->launches_left] { --*left; }, nullptr});
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  if (*exec->launches_left > 0) fatal("cudaGraphExecDestroy on a graph that has not run to its end; synchronize first");
  delete exec;
  return cudaSuccess;
}

// ----------------------------------------------------------------------------
// Memory

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  runtime();  // before the first device pointer exists, so that its misuse is reported
  *pointer = nullptr;
  if (loses_a_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  if (bytes == 0) return cudaSuccess;
  *pointer = allocate(bytes);
  return *pointer != nullptr ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void* pointer) {
  if (loses_a_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  if (pointer == nullptr) return cudaSuccess;
  count_wait();
  run_all();
  return release(pointer) ? cudaSuccess : failed(cudaErrorInvalidValue);
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  *pointer = nullptr;
  if (loses_a_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  if (bytes == 0) return cudaSuccess;
  *pointer = allocate_pinned(bytes);
  return *pointer != nullptr ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void* pointer) {
  if (loses_a_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  if (pointer == nullptr) return cudaSuccess;
  count_wait();
  run_all();
  return release_pinned(pointer) ? cudaSuccess : failed(cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  *available = memory_available();
  *total = memory_total();
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  void* const p = const_cast<void*>(pointer);
  *attributes = {cudaMemoryTypeUnregistered, -1, nullptr, nullptr};
  if (is_device_memory(pointer)) *attributes = {cudaMemoryTypeDevice, runtime().device, p, nullptr};
  else if (is_pinned(pointer, 1)) *attributes = {cudaMemoryTypeHost, runtime().device, p, p};
  return cudaSuccess;
}

// Pageable host memory is written before the call returns, and read before it returns or when the copy runs, as the
// seed has it: CUDA promises neither. Pinned memory is read and written when the copy runs; a capture refuses pageable
// memory. Ranges are checked now, while the caller is on the stack, and again when the copy runs, which in a graph may
// be after they were freed.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  static const char* const name = "cudaMemcpyAsync";
  CUstream_st& s = checked(stream, name);
  if (kind < cudaMemcpyHostToDevice || kind > cudaMemcpyDeviceToDevice) return failed(cudaErrorInvalidMemcpyDirection);
  if (kind != cudaMemcpyDeviceToHost) check_device_range("cudaMemcpyAsync: destination", to, bytes);
  else if (is_device_memory(to)) fatal("%s to host: the destination at %p is device memory", name, to);
  if (kind != cudaMemcpyHostToDevice) check_device_range("cudaMemcpyAsync: source", from, bytes);
  else if (is_device_memory(from)) fatal("%s from host: the source at %p is device memory", name, from);

  Counters& counters = mutable_counters();
  uint64_t& count = kind == cudaMemcpyHostToDevice   ? counters.bytes_to_device
                    : kind == cudaMemcpyDeviceToHost ? counters.bytes_to_host
                                                     : counters.bytes_on_device;
  const void* host = kind == cudaMemcpyHostToDevice ? from : kind == cudaMemcpyDeviceToHost ? to : nullptr;
  const bool pageable = host != nullptr && !is_pinned(host, bytes);
  if (pageable && s.capture != nullptr) {
    s.capture->lost = true;
    return failed(cudaErrorStreamCaptureUnsupported);
  }
  const bool read_late = kind == cudaMemcpyHostToDevice && pageable && rng.below(2) != 0;
  if (kind == cudaMemcpyHostToDevice && pageable && !read_late) {
    const auto* first = static_cast<const unsigned char*>(from);
    std::vector<unsigned char> staged(first, first + bytes);
    return enqueue(name, stream, [to, staged = std::move(staged), &count] {
      memcpy(to, staged.data(), staged.size());
      count += staged.size();
    });
  }
  const cudaError_t error = enqueue(name, stream, [to, from, bytes, kind, read_late, &count] {
    if (kind != cudaMemcpyDeviceToHost) check_device_range("destination", to, bytes);
    if (read_late && first_poisoned(from, bytes) != nullptr)
      fatal("the source at %p, pageable memory of the host, is no longer there; synchronize before it is freed", from);
    if (kind != cudaMemcpyHostToDevice) check_device_range("source", from, bytes);
    memcpy(to, from, bytes);
    count += bytes;
  });
  if (pageable && kind == cudaMemcpyDeviceToHost) {
    count_wait();
    run_until(s, s.num_queued);
  }
  return error;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  checked(stream, "cudaMemsetAsync");
  check_device_range("cudaMemsetAsync: destination", to, bytes, Gaps::allow);
  return enqueue("cudaMemsetAsync", stream, [to, value, bytes] {
    check_device_range("destination", to, bytes, Gaps::allow);
    fill(to, value, bytes);
    mutable_counters().memsets++;
  });
}

// ----------------------------------------------------------------------------
// Kernels

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute, int value) {
  if (value < 0 || size_t(value) > shared_bytes_limit()) return failed(cudaErrorInvalidValue);
  kernel_of(function).shared_bytes_allowed = max(size_t(48 * 1024), size_t(value));
  return cudaSuccess;
}

cudaError_t cudaFuncGetName(const char** name, const void* function) {
  *name = kernel_of(function).mangled.c_str();
  return cudaSuccess;
}

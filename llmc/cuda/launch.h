// The one way to launch kernels, and the checks of CUDA's errors.
//
// CUDA 12.3 or later. What the trainer calls has the same signatures in 12.3, 12.8, 13.0 and 13.5, and nothing is
// compiled by version; older versions have these otherwise, or lack them:
//   cudaFuncGetName           is new in 12.3
//   cudaGraphInstantiate      has three parameters since 12.0
//   cudaGetDeviceProperties   is a macro in 12; clockRate and others, which are not used, are gone from 13
// dev/cuda_versions.sh compiles with versions that a machine has not.
#pragma once
#include <cuda_runtime.h>
#include <cxxabi.h>
#include <cstdlib>
#include <string>
#include "llmc/base/error.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#error "a GPU of compute capability 7.0 (Volta) or later is needed"
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 750 && defined(PRECISION_FP16)
#error "in fp16 a GPU of compute capability 7.5 (Turing) or later is needed; PRECISION=FP32 is for 7.0 and later"
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800 && defined(PRECISION_BF16)
#error "in bf16 a GPU of compute capability 8.0 (Ampere) or later is needed; PRECISION=FP32 is for 7.0 and later"
#endif

inline void cuda_check(cudaError_t status, const char* what, const char* file, int line) {
  if (status != cudaSuccess)
    user_error("CUDA: %s (%s) from %s at %s:%d", cudaGetErrorString(status), cudaGetErrorName(status), what, file,
               line);
}
#define CUDA_CHECK(call) cuda_check(call, #call, __FILE__, __LINE__)

// Every kernel's shared memory, in the size that its launch gives. No kernel declares a __shared__ array of its own:
// dev/emu checks the bounds of dynamic shared memory only. This, and no launch by <<<...>>>, is what lets dev/emu run
// the same source.
extern __shared__ __align__(1024) unsigned char shared_memory[];

// A kernel's name as in the source.
template <class... Params>
std::string kernel_name(void (*kernel)(Params...)) {
  const char* mangled = nullptr;
  if (cudaFuncGetName(&mangled, reinterpret_cast<const void*>(kernel)) != cudaSuccess) return "a kernel";
  int status = 0;
  char* readable = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 ? readable : mangled;
  free(readable);
  return name;
}

// Runs kernel(args...) on `stream`, with blocks of `block` threads and `shared_bytes` bytes of shared memory. Returns
// at once. A launch that CUDA refuses throws UserError with the kernel's name; an error while it runs is returned by a
// later call, so a debug build (make DEBUG=1) waits for the kernel here.
template <class... Params, class... Args>
void launch_on(cudaStream_t stream, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
               Args... args) {
  constexpr size_t without_asking = 48 << 10;  // shared memory that a kernel has without cudaFuncSetAttribute
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaError_t status = cudaSuccess;
  if (shared_bytes > without_asking)
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
  if (status == cudaSuccess) status = cudaLaunchKernelEx(&config, kernel, Params(args)...);
#ifdef SLA_DEBUG
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
#endif
  if (status != cudaSuccess)
    user_error("CUDA: %s (%s) from the kernel %s with %u x %u x %u blocks of %u x %u x %u threads and %zu bytes of "
               "shared memory",
               cudaGetErrorString(status), cudaGetErrorName(status), kernel_name(kernel).c_str(), grid.x, grid.y,
               grid.z, block.x, block.y, block.z, shared_bytes);
}

// Memory of the device that the program is compiled for: what llmc/cpu/device.h and llmc/cuda/device.h each define, and
// an array that owns some. "Device" is a GPU, or the host itself in a build for the CPU. This header includes neither
// folder, so that both can include it.
#pragma once
#include <cstddef>
#include <utility>
#include <vector>

// `bytes` of device memory, zero-filled; null for 0. Throws UserError if there is not enough left.
inline void* device_malloc(size_t bytes);

// Frees what device_malloc(bytes) returned; null is allowed.
inline void device_free(void* p, size_t bytes);

// Sets each of `bytes` bytes at p to `value`, in order with the operations.
inline void device_memset(void* p, int value, size_t bytes);

// device = host, in order with the operations. Returns once the host's pageable memory may be changed again.
inline void copy_to_device(void* device, const void* host, size_t bytes);

template <class T>
void copy_to_device(T* device, const std::vector<T>& host) {
  if (!host.empty()) copy_to_device(device, host.data(), host.size() * sizeof(T));
}

// host = device, after the operations that were called before. Waits for them and for the copy.
inline void copy_to_host(void* host, const void* device, size_t bytes);

// `bytes` of host memory, on a GPU pinned: asynchronous copies read and write it when the stream reaches them. Throws
// UserError if there is not enough left.
inline void* pinned_malloc(size_t bytes);
inline void pinned_free(void* p, size_t bytes);

// How much could be allocated now, in bytes.
inline size_t device_memory_available();

// What the operations' own workspaces take, in bytes, beside what device_malloc returns to the model.
inline size_t device_workspace_bytes();

// What is to be kept free beside the plan, in bytes, for what others allocate when they first need it: the kernels'
// code, which is loaded when one is launched, CUDA graphs, and NCCL.
inline size_t device_reserve_bytes();

// An array on the device, copied from the host and freed with its owner. Not copyable.
template <class T>
struct DeviceArray {
  T* data = nullptr;
  size_t size = 0;

  DeviceArray() = default;
  explicit DeviceArray(const std::vector<T>& host)
      : data(static_cast<T*>(device_malloc(host.size() * sizeof(T)))), size(host.size()) {
    copy_to_device(data, host);
  }
  DeviceArray(DeviceArray&& other) noexcept { swap(other); }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceArray() { device_free(data, size * sizeof(T)); }

  std::vector<T> to_host() const {
    std::vector<T> host(size);
    if (size > 0) copy_to_host(host.data(), data, size * sizeof(T));
    return host;
  }

 private:
  void swap(DeviceArray& other) {
    std::swap(data, other.data);
    std::swap(size, other.size);
  }
};

// `size` elements of pinned host memory. After upload(), the host may change the source only when a later copy_to_host
// has returned.
template <class T>
struct PinnedBuffer {
  T* data = nullptr;
  size_t size = 0;

  PinnedBuffer() = default;
  explicit PinnedBuffer(size_t count) : data(static_cast<T*>(pinned_malloc(count * sizeof(T)))), size(count) {}
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
    std::swap(data, other.data);
    std::swap(size, other.size);
    return *this;
  }
  ~PinnedBuffer() { pinned_free(data, size * sizeof(T)); }
};

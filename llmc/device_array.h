// A host vector's copy on the device, freed with its owner.
#pragma once
#include <cstddef>  // size_t
#include <utility>  // std::swap
#include <vector>   // std::vector
#ifdef SLA_CPU
#include "llmc/cpu/device.h"  // device_malloc, copy_to_device, copy_to_host
#else
#include "llmc/cuda/device.h"  // the same
#endif

template <class T>
struct DeviceArray {
  T* data = nullptr;
  size_t size = 0;

  DeviceArray() = default;
  explicit DeviceArray(const std::vector<T>& host)
      : data(static_cast<T*>(device_malloc(host.size() * sizeof(T)))), size(host.size()) {
    if (size > 0) copy_to_device(data, host.data(), size * sizeof(T));
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

// Named tensors in one flat allocation: a tensor is a name, a shape, an element size and an offset, declared in a table.
#pragma once
#include <cstddef>   // size_t
#include <cstdint>   // int64_t
#include <string>    // std::string
#include <vector>    // std::vector

// The product of a shape: 1 for a scalar.
inline int64_t num_elements(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;
  size_t element_bytes;
  size_t offset;  // bytes from the arena's beginning

  int64_t num_elements() const { return ::num_elements(shape); }
  size_t bytes() const { return size_t(num_elements()) * element_bytes; }
};

// Offsets are multiples of 256 bytes: what cudaMalloc itself guarantees, and enough for every vector load.
struct ArenaLayout {
  static constexpr size_t alignment = 256;
  std::vector<TensorSpec> tensors;
  size_t bytes = 0;

  // Declares a tensor behind the last one and returns its index.
  int add(std::string name, std::vector<int64_t> shape, size_t element_bytes) {
    tensors.push_back({std::move(name), std::move(shape), element_bytes, bytes});
    bytes += (tensors.back().bytes() + alignment - 1) / alignment * alignment;
    return int(tensors.size()) - 1;
  }
};

// Named tensors in one flat allocation: a tensor is a name, a shape, an element size and an offset, declared in a
// table.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>
#include "guard.h"

// The product of a shape: 1 for a scalar.
inline int64_t num_elements(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

// "(768, 2304)"
inline std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); i++) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;
  size_t element_bytes = 0;
  size_t offset = 0;          // bytes from the arena's beginning
  int64_t tail_elements = 0;  // zeros after the tensor, which matmuls on whole tiles may read and write

  int64_t num_elements() const { return ::num_elements(shape); }
  size_t bytes() const { return size_t(num_elements()) * element_bytes; }
  int64_t element_offset() const { return int64_t(offset / element_bytes); }
};

// Offsets are multiples of 256 bytes: what cudaMalloc itself guarantees, and enough for every vector load.
struct ArenaLayout {
  static constexpr size_t alignment = 256;
  std::vector<TensorSpec> tensors;
  size_t bytes = 0;

  // Declares a tensor after the last one and returns its index.
  int add(std::string name, std::vector<int64_t> shape, size_t element_bytes, int64_t tail_elements = 0) {
    tensors.push_back({std::move(name), std::move(shape), element_bytes, bytes, tail_elements});
    bytes += (tensors.back().bytes() + size_t(tail_elements) * element_bytes + guard_bytes + alignment - 1) /
             alignment * alignment;
    return int(tensors.size()) - 1;
  }

  // The next tensor begins, or the arena ends, at a multiple of `multiple` bytes, itself one of `alignment`.
  void pad_to(size_t multiple) { bytes = (bytes + multiple - 1) / multiple * multiple; }

  // In a build with AddressSanitizer, makes any access to the bytes between the tensors of `arena`, which has this
  // layout, an error. `shrink` is 2 for an arena of bf16 whose tensors begin at the same elements as in a layout of
  // floats.
  void forbid_gaps(const void* arena, size_t shrink = 1) const {
    for (size_t i = 0; guard_bytes > 0 && i < tensors.size(); i++) {
      const TensorSpec& t = tensors[i];
      const size_t end = t.offset + t.bytes() + size_t(t.tail_elements) * t.element_bytes;
      const size_t next = i + 1 < tensors.size() ? tensors[i + 1].offset : bytes;
      forbid(static_cast<const char*>(arena) + end / shrink, (next - end) / shrink);
    }
  }
};

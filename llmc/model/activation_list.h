// How activations are declared: by name, shape, group of the memory plan, and the pointer that is to point to them.
// When all are declared, they have places in the model's arena; when that has been allocated, `bind` sets all pointers.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>
#include "llmc/base/arena.h"
#include "llmc/base/memory_plan.h"
#include "shape.h"

struct ActivationArena {
  ArenaLayout layout;
  std::vector<std::function<void(char*)>> set_pointers;

  // Sets the pointers of all activations, which lie in an arena of layout.bytes that begins at `buffer`. What holds the
  // pointers must still be where it was when they were declared.
  void bind(char* buffer) const {
    for (const auto& set_pointer : set_pointers) set_pointer(buffer);
  }
};

// Memory that tensors of several sublayers or operations use, one after the other. It is as large as the largest.
struct Buffer {
  std::string name;
  MemoryGroup group = MemoryGroup::activations;
};

// Buffers whose tensors have different names in different parts.
namespace buffers {
// A branch's output, until the residual has added it to the stream. Before that one attention map's output, with
// `blend` and `gate`. With `gru` then r x, and in the backward pass the gradient of the branch's output; with
// --dropout that gradient after dropout.
inline const Buffer branch_out = {"branch_out"};
// In the backward pass of a sublayer: `gru`'s dreset_in; attention's datt, which is no longer needed when din is
// written; a branch's din, which is the dout of the norm. Before all sublayers the head's din, dout of the last norm.
inline const Buffer dnorm = {"dnorm", MemoryGroup::backward};
// The gradient of the MLP's products. In attention with `blend` and `gate` the gradient of one map's output.
inline const Buffer dhidden = {"dhidden", MemoryGroup::backward};
// The gradients of what attention projects: q | k | v, with `lsh` q | v.
inline const Buffer dqkv = {"dqkv", MemoryGroup::backward};
}  // namespace buffers

struct ActivationList {
  const ModelShape& shape;
  ActivationArena& arena;
  MemoryPlan& memory_plan;  // counts bytes by group

  ActivationList(const ModelShape& s, ActivationArena& a, MemoryPlan& m) : shape(s), arena(a), memory_plan(m) {}

  // Declares a tensor with memory of its own.
  template <class T>
  void add(MemoryGroup group, const std::string& name, T*& pointer, std::vector<int64_t> tensor_shape) {
    place(group, {name, std::move(tensor_shape), sizeof(T)}, {setter(pointer)});
  }

  // Declares a tensor that lies in a buffer.
  template <class T>
  void in_buffer(const Buffer& buffer, T*& pointer, std::vector<int64_t> tensor_shape) {
    SharedMemory& memory = shared_[buffer.name];
    const TensorSpec tensor = {buffer.name, std::move(tensor_shape), sizeof(T)};
    memory.group = buffer.group;
    memory.pointers.push_back(setter(pointer));
    if (memory.largest.bytes() < tensor.bytes()) memory.largest = tensor;
  }

  // Declares a tensor of one sublayer. Training keeps it for the sublayer's backward pass, unless the level of
  // recomputation is `dropped_from` or above: then all sublayers use one buffer, as they do in generation. Returns
  // whether training keeps it.
  template <class T>
  bool of_sublayer(Recompute dropped_from, const std::string& name, T*& pointer, std::vector<int64_t> tensor_shape) {
    const bool is_kept = shape.training && shape.training->recompute < dropped_from;
    if (is_kept) add(MemoryGroup::activations, name, pointer, std::move(tensor_shape));
    else in_buffer({name}, pointer, std::move(tensor_shape));
    return is_kept;
  }

  // Gives the buffers their places, when all tensors are declared.
  void place_buffers() {
    for (auto& [name, memory] : shared_) place(memory.group, memory.largest, std::move(memory.pointers));
    shared_.clear();
  }

 private:
  using Setters = std::vector<std::function<void(char*)>>;  // each sets a pointer to a tensor that begins there
  struct SharedMemory {
    MemoryGroup group;
    TensorSpec largest;
    Setters pointers;
  };
  std::map<std::string, SharedMemory> shared_;

  template <class T>
  static std::function<void(char*)> setter(T*& pointer) {
    return [&pointer](char* tensor) { pointer = reinterpret_cast<T*>(tensor); };
  }

  void place(MemoryGroup group, TensorSpec tensor, Setters pointers) {
    const size_t before = arena.layout.bytes;
    arena.layout.add(std::move(tensor.name), std::move(tensor.shape), tensor.element_bytes);
    memory_plan[group] += arena.layout.bytes - before;
    const size_t offset = arena.layout.tensors.back().offset;
    arena.set_pointers.push_back([pointers = std::move(pointers), offset](char* buffer) {
      for (const auto& set : pointers) set(buffer + offset);
    });
  }
};

// How activations are declared: by name, shape, group of the memory plan, and the pointer that is to point to them. A
// declaration lays the tensor out in the model's arena; when that has been allocated, `bind` sets all pointers.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>
#include "llmc/utils/arena.h"
#include "llmc/utils/memory_plan.h"
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

struct ActivationList {
  const ModelShape& shape;
  ActivationArena& arena;
  MemoryPlan& memory_plan;                    // counts bytes by group
  std::map<std::string, size_t> shared = {};  // where each tensor that all sublayers share begins, by name

  // Declares a tensor that no other sublayer shares.
  template <class T>
  void add(MemoryGroup group, const std::string& name, T*& pointer, std::vector<int64_t> tensor_shape) {
    const size_t before = arena.layout.bytes;
    arena.layout.add(name, std::move(tensor_shape), sizeof(T));
    memory_plan[group] += arena.layout.bytes - before;
    bind_to(pointer, arena.layout.tensors.back().offset);
  }

  // Declares a tensor of one sublayer. Training keeps it for the sublayer's backward pass, unless the level of
  // recomputation is `dropped_from` or above: then all sublayers use the first one's, as they do in generation.
  template <class T>
  void of_sublayer(Recompute dropped_from, const std::string& name, T*& pointer, std::vector<int64_t> tensor_shape) {
    const bool is_kept = shape.training && shape.training->recompute < dropped_from;
    if (is_kept) add(MemoryGroup::activations, name, pointer, std::move(tensor_shape));
    else of_all_sublayers(name, pointer, std::move(tensor_shape));
  }

  // Declares a tensor that all sublayers share, in training too.
  template <class T>
  void of_all_sublayers(const std::string& name, T*& pointer, std::vector<int64_t> tensor_shape) {
    const auto found = shared.find(name);
    if (found != shared.end()) return bind_to(pointer, found->second);
    add(MemoryGroup::activations, name, pointer, std::move(tensor_shape));
    shared[name] = arena.layout.tensors.back().offset;
  }

 private:
  template <class T>
  void bind_to(T*& pointer, size_t offset) {
    arena.set_pointers.push_back([&pointer, offset](char* buffer) { pointer = reinterpret_cast<T*>(buffer + offset); });
  }
};

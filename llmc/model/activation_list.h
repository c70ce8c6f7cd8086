// How activations are declared, so that one list lays them out, counts them by group, and sets their pointers.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>
#include "llmc/utils/memory_plan.h"
#include "shape.h"

template <class Declare>
struct ActivationList {
  const ModelShape& shape;
  Declare declare;                           // declare(group, name, pointer to set, shape)
  std::map<std::string, void*> shared = {};  // tensors that all steps share, by name

  // Declares a tensor that no other step shares.
  template <class T>
  void add(MemoryGroup group, const std::string& name, T*& pointer, std::vector<int64_t> tensor_shape) {
    declare(group, name, pointer, std::move(tensor_shape));
  }

  // Declares a tensor of one step. Training keeps it for the step's backward pass, unless the level of recomputation is
  // `dropped_from` or above: then all steps use the first one's, as they do in generation.
  template <class T>
  void of_step(Recompute dropped_from, const std::string& name, T*& pointer, std::vector<int64_t> tensor_shape) {
    const bool is_kept = shape.training && shape.training->recompute < dropped_from;
    declare_shared(name, pointer, std::move(tensor_shape), is_kept);
  }

  // Declares a tensor that all steps share, in training too.
  template <class T>
  void of_all_steps(const std::string& name, T*& pointer, std::vector<int64_t> tensor_shape) {
    declare_shared(name, pointer, std::move(tensor_shape), /*is_kept=*/false);
  }

 private:
  template <class T>
  void declare_shared(const std::string& name, T*& pointer, std::vector<int64_t> tensor_shape, bool is_kept) {
    const auto found = shared.find(name);
    if (is_kept || found == shared.end()) {
      declare(MemoryGroup::activations, name, pointer, std::move(tensor_shape));
      if (!is_kept) shared[name] = pointer;
    } else {
      pointer = static_cast<T*>(found->second);
    }
  }
};

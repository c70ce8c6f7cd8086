// The flat arenas of a model's parameters, what they hold in a new model, and the way between them and files.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>
#include "change_wiring.h"
#include "llmc/formats/config_json.h"
#include "llmc/formats/checkpoint.h"
#include "llmc/operations.h"
#include "llmc/ops/precision.h"
#include "llmc/ops/parameter_table.h"
#include "llmc/base/random.h"
#include "shape.h"

struct ModelMemory {
  ParameterTable parameters;
  floatX* weight_memory = nullptr;                 // (parameters)
  bool owns_weights = true;                        // else another model owns them, and must outlive this one
  float* constant_memory = nullptr;                // (constants): owned as the weights are
  std::vector<float> constants;                    // on the host
  float* master_memory = nullptr;                  // (state): weights in full precision; weight_memory if that is float
  float* grad_memory = nullptr;                    // (parameters)
  float *m_memory = nullptr, *v_memory = nullptr;  // (state): AdamW's moments

  ModelMemory() = default;
  ModelMemory(const ModelMemory&) = delete;
  ModelMemory& operator=(const ModelMemory&) = delete;
  ~ModelMemory() {
    if (owns_weights) {
      device_free(weight_memory, weight_bytes());
      device_free(constant_memory, constant_bytes());
    }
    device_free(grad_memory, parameters.layout.bytes);
    if (has_master_weights) device_free(master_memory, state_bytes());
    for (float* arena : {m_memory, v_memory}) device_free(arena, state_bytes());
  }

  size_t weight_bytes() const { return parameters.layout.bytes / sizeof(float) * sizeof(floatX); }
  size_t constant_bytes() const { return size_t(parameters.constant_count) * sizeof(float); }
  // The bytes of the arena of master weights, and of each arena of moments: of all parameters, or as many as a
  // rank's shard has at most.
  size_t state_bytes() const { return size_t(parameters.state_count) * sizeof(float); }
  const TensorSpec& tensor(int index) const { return parameters.tensor(index); }
  int num_tensors() const { return parameters.size(); }

  // Allocates the weights, all zero, and constants.
  void allocate_weights() {
    constants.resize(size_t(parameters.constant_count));
    if (!constants.empty()) constant_memory = static_cast<float*>(device_malloc(constant_bytes()));
    weight_memory = static_cast<floatX*>(device_malloc(weight_bytes()));
    parameters.layout.forbid_gaps(weight_memory, sizeof(float) / sizeof(floatX));
  }
  void use_weights_of(const ModelMemory& other) {
    owns_weights = false;
    weight_memory = other.weight_memory, constant_memory = other.constant_memory;
  }
  // Allocates what training needs beside the weights: master weights, gradients and moments, all zero.
  void allocate_training_state() {
    auto state_arena = [&] {
      float* arena = static_cast<float*>(device_malloc(state_bytes()));
      forbid_gaps_of_state(parameters, arena);
      return arena;
    };
    if constexpr (has_master_weights) master_memory = state_arena();
    else master_memory = reinterpret_cast<float*>(weight_memory);  // they are floats
    grad_memory = static_cast<float*>(device_malloc(parameters.layout.bytes));
    parameters.layout.forbid_gaps(grad_memory);
    m_memory = state_arena();
    v_memory = state_arena();
  }
};

// values = a constant.
inline void fetch_constant(const ModelMemory& model, int index, float* values) {
  const ConstantTensor& constant = model.parameters.constant(index);
  std::copy_n(model.constants.begin() + constant.offset, num_elements(constant.shape), values);
}

// Returns a function for writers of files, which copies a tensor of a float arena of all parameters, in the device's
// memory or in the host's, to host memory.
inline FetchTensor fetch_from(const ModelMemory& model, const float* arena, bool is_on_host = false) {
  return [&model, arena, is_on_host](int index, float* values) {
    if (model.parameters.is_constant(index)) return fetch_constant(model, index, values);
    const float* from = arena + model.tensor(index).element_offset();
    if (is_on_host) memcpy(values, from, model.tensor(index).bytes());
    else copy_to_host(values, from, model.tensor(index).bytes());
  };
}

// Sets a constant.
inline void store_constant(ModelMemory& model, int index, const float* values) {
  const ConstantTensor& constant = model.parameters.constant(index);
  const size_t count = size_t(num_elements(constant.shape));
  std::copy_n(values, count, model.constants.begin() + constant.offset);
  copy_to_device(model.constant_memory + constant.offset, values, count * sizeof(float));
}

// host (state) = all of an arena of masters or moments.
inline void fetch_shard(const ModelMemory& model, const float* arena, float* host) {
  for (const ParameterSpec& spec : model.parameters.specs) {
    const ShardRange part = shard_range(model.parameters, spec);
    if (part.count > 0) copy_to_host(host + part.state, arena + part.state, size_t(part.count) * sizeof(float));
  }
}

// Returns a function for readers of files, which copies this process's shard of a tensor into an arena of master
// weights or moments.
inline StoreTensor store_shard(const ModelMemory& model, float* arena) {
  return [&model, arena](int index, const float* values) {
    const ShardRange part = shard_range(model.parameters, model.parameters.specs[index]);
    copy_to_device(arena + part.state, values, size_t(part.count) * sizeof(float));
  };
}

// Returns a function for readers of files, which stores all of a tensor in the weights that operations read, rounded to
// floatX, and this process's shard of it in the master weights.
inline StoreTensor store_weights(ModelMemory& model) {
  return [&model](int index, const float* values) {
    if (model.parameters.is_constant(index)) return store_constant(model, index, values);
    const TensorSpec& tensor = model.tensor(index);
    const std::vector<floatX> rounded(values, values + tensor.num_elements());
    copy_to_device(model.weight_memory + tensor.element_offset(), rounded.data(), rounded.size() * sizeof(floatX));
    const ShardRange part = shard_range(model.parameters, model.parameters.specs[index]);
    if (has_master_weights && model.master_memory != nullptr && part.count > 0)
      store_shard(model, model.master_memory)(index, values + (part.begin - tensor.element_offset()));
  };
}

// A tensor's values in a new model. Each depends on the seed, its tensor and its place in the full-size tensor alone:
// models with and without rows of unused heads begin as the same function.
inline std::vector<float> initial_values(const ModelMemory& model, int index, uint64_t seed) {
  if (model.parameters.is_constant(index)) {
    const ConstantTensor& constant = model.parameters.constant(index);
    std::vector<float> values(size_t(num_elements(constant.shape)));
    for (size_t i = 0; i < values.size(); i++)
      values[i] = float(constant.init_std * random_normal(seed, RandomStream::init, uint32_t(index), i));
    return values;
  }
  const ParameterSpec& spec = model.parameters.specs[index];
  const TensorSpec& tensor = model.tensor(index);
  const int64_t rows = tensor.shape[0], columns = tensor.num_elements() / rows;
  std::vector<float> host(size_t(tensor.num_elements()), float(spec.init_mean));
  for (int64_t i : spec.ones) host[size_t(i)] = 1;
  if (spec.init_std == 0) return host;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < columns; i++)
      host[row * columns + i] =
          float(spec.init_mean + spec.init_std * random_normal(seed, RandomStream::init, uint32_t(index),
                                                               uint64_t(spec.full_row(row) * columns + i)));
  return host;
}

inline void init_weights(ModelMemory& model, uint64_t seed) {
  for (int index = 0; index < model.parameters.file_tensors(); index++)
    store_weights(model)(index, initial_values(model, index, seed).data());
}

// Reads the weights of `in_folder`, the model in that folder, for a model of this shape, which may have another wiring.
// Weights that have no trained values in the new wiring are initialised.
inline void read_weights_of(ModelMemory& model, const ModelShape& shape, const std::string& folder,
                            const ModelConfig& in_folder, uint64_t seed) {
  if (same_model(in_folder, shape.config)) return read_weights(folder, model.parameters, store_weights(model));
  read_weights_for_new_wiring(
      folder, plan_wiring_change(in_folder, shape.attention_plan), model.parameters,
      [&](int index) { return initial_values(model, index, seed); }, store_weights(model));
}

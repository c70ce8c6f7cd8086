// The tensors of models on disk: safetensors with GPT-2's names, linear weights as Conv1D (in, out), lm_head tied to wte. Files
// are full-size: dead K/V rows and the biases of a model without any are there, as zeros, so that any implementation of GPT-2
// loads them.
#pragma once
#include <functional>    // std::function
#include <string>        // std::string
#include "config.h"      // ModelConfig
#include "kv_plan.h"     // KVPlan
#include "parameters.h"  // ParameterTable
#include "safetensors.h" // SafetensorsChecksums

// What reading and writing needs to know of a model.
struct ModelLayout {
  const ModelConfig& config;
  const KVPlan& plan;
  const ParameterTable& table;
};

// full (file_shape) = the parameter `index` of the table as a file holds it, from `values` as the arena does; and back.
void to_file_layout(const ModelLayout& model, int index, const float* values, float* full);
void from_file_layout(const ModelLayout& model, int index, const float* full, float* values);

// Copies a parameter to or from host memory: (index into the table, its elements in the arena's layout).
using FetchTensor = std::function<void(int index, float* values)>;
using StoreTensor = std::function<void(int index, const float* values)>;

// Writes the tensors as float32, each name with `suffix` behind it; with `zero_biases`, those of a model without biases too. Returns
// the checksums of what was handed to the system, which a disk that does its work gives back.
struct TensorGroup {
  std::string suffix;
  FetchTensor fetch;
};
SafetensorsChecksums write_tensors(const std::string& path, const ModelLayout& model, const std::vector<TensorGroup>& groups,
                                   bool zero_biases);

// Reads F32, F16 or BF16. Throws UserError, naming file and tensor, if one is missing or has another shape, if the file
// holds a tensor that is no part of GPT-2, an untied lm_head, or non-zero biases for a model without any.
struct TensorSink {
  std::string suffix;
  StoreTensor store;
};
void read_tensors(const std::string& path, const ModelLayout& model, const std::vector<TensorSink>& sinks);

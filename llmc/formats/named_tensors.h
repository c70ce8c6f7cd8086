// The tensors of a plain GPT-2 by their names, for the file formats of other programs. Those formats always have
// biases: a model without any has zeros there.
#pragma once
#include <map>
#include <string>
#include <vector>
#include "llmc/wiring/config.h"
#include "llmc/formats/model_file.h"
#include "llmc/ops/parameter_table.h"

struct NamedTensors {
  const ParameterTable& table;
  std::map<std::string, int> index;           // into the table
  std::map<std::string, int64_t> zero_sizes;  // sizes of the biases that the model does not have

  // Throws UserError, with the format's name, for a model that is not what Hugging Face calls GPT-2.
  NamedTensors(const ModelConfig& config, const ParameterTable& table, const char* format_name) : NamedTensors(table) {
    if (!is_hugging_face_gpt2(config))
      user_error("the model's wiring is %s; %s knows plain GPT-2 only", config.wiring.text.c_str(), format_name);
    for (const ZeroTensor& zero : table.zero_tensors) zero_sizes[zero.name] = zero.size;
  }

  explicit NamedTensors(const ParameterTable& table) : table(table) {
    for (int i = 0; i < table.size(); i++) index[table.tensor(i).name] = i;
  }

  // The shape of a tensor in the arena, where a linear weight is (out, in).
  std::vector<int64_t> shape(const std::string& name) const {
    const auto it = index.find(name);
    return it != index.end() ? table.tensor(it->second).shape : std::vector<int64_t>{zero_sizes.at(name)};
  }
  int64_t size(const std::string& name) const { return num_elements(shape(name)); }

  std::vector<float> fetch(const std::string& name, const FetchTensor& fetch_tensor) const {
    std::vector<float> values(size_t(size(name)), 0.0f);
    if (const auto it = index.find(name); it != index.end()) fetch_tensor(it->second, values.data());
    return values;
  }
};

// A layer's linear and LayerNorm layers, in llm.c's order. Each has .weight and .bias after the name.
inline const std::string sublayer_names[] = {"ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"};

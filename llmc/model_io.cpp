#include "model_io.h"
#include <algorithm>            // std::all_of, std::fill
#include <map>                  // std::map
#include "crc32c.h"             // crc32c
#include "error.h"              // user_error

// One walk over the rows for both directions: visit(place in the arena, place in the file, length, stride in the file).
template <class Visit>
static void walk_rows(const ModelLayout& model, int index, Visit visit) {
  const ParameterSpec& spec = model.table.specs[size_t(index)];
  const TensorSpec& tensor = model.table.layout.tensors[size_t(spec.tensor)];
  const int64_t rows = tensor.shape[0], columns = tensor.shape.size() == 2 ? tensor.shape[1] : 1;
  const int64_t file_rows = spec.file_shape.back();  // of a transposed tensor: the file's columns
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    int64_t full = spec.qkv_layer < 0 ? row : full_qkv_row(model.config, model.plan, spec.qkv_layer, row);
    if (spec.transposed) visit(row * columns, full, columns, file_rows);
    else visit(row * columns, full * columns, columns, int64_t(1));
  }
}

void to_file_layout(const ModelLayout& model, int index, const float* values, float* full) {
  std::fill(full, full + num_elements(model.table.specs[size_t(index)].file_shape), 0.0f);
  walk_rows(model, index, [&](int64_t from, int64_t to, int64_t n, int64_t stride) {
    for (int64_t i = 0; i < n; i++) full[to + i * stride] = values[from + i];
  });
}

void from_file_layout(const ModelLayout& model, int index, const float* full, float* values) {
  walk_rows(model, index, [&](int64_t to, int64_t from, int64_t n, int64_t stride) {
    for (int64_t i = 0; i < n; i++) values[to + i] = full[from + i * stride];
  });
}

// The names and shapes of the biases that a file of a model without biases holds, as zeros.
static std::vector<SafetensorsSpec> absent_biases(const ModelLayout& model) {
  std::vector<SafetensorsSpec> specs;
  if (model.config.bias) return specs;
  for (const ParameterSpec& spec : model.table.specs) {
    std::string name = model.table.layout.tensors[size_t(spec.tensor)].name;
    if (name == "wte.weight" || name == "wpe.weight") continue;
    name.replace(name.rfind(".weight"), 7, ".bias");
    specs.push_back({name, {spec.file_shape.back()}});
  }
  return specs;
}

SafetensorsChecksums write_tensors(const std::string& path, const ModelLayout& model, const std::vector<TensorGroup>& groups,
                                   bool zero_biases) {
  std::vector<SafetensorsSpec> specs;
  const auto& tensors = model.table.layout.tensors;
  for (const TensorGroup& group : groups)
    for (const ParameterSpec& spec : model.table.specs)
      specs.push_back({tensors[size_t(spec.tensor)].name + group.suffix, spec.file_shape});
  if (zero_biases)
    for (SafetensorsSpec& spec : absent_biases(model)) specs.push_back(std::move(spec));

  SafetensorsWriter writer(path, specs);  // a tensor that nobody writes is zeros
  SafetensorsChecksums sums;
  sums.header = writer.header_checksum();
  std::vector<float> values, full;
  size_t next = 0;
  for (const TensorGroup& group : groups) {
    for (size_t i = 0; i < model.table.specs.size(); i++) {
      const ParameterSpec& spec = model.table.specs[i];
      values.resize(size_t(tensors[size_t(spec.tensor)].num_elements()));
      full.resize(size_t(num_elements(spec.file_shape)));
      group.fetch(int(i), values.data());
      to_file_layout(model, int(i), values.data(), full.data());
      sums.tensors.push_back({specs[next].name, crc32c(full.data(), full.size() * sizeof(float))});
      writer.write_f32(next++, full.data(), 0, int64_t(full.size()));
    }
  }
  for (; next < specs.size(); next++) {
    full.assign(size_t(num_elements(specs[next].shape)), 0.0f);
    sums.tensors.push_back({specs[next].name, crc32c(full.data(), full.size() * sizeof(float))});
  }
  writer.finish();
  return sums;
}

// The name GPT-2 files on the hub give a tensor: some begin with "transformer.".
static std::string plain_name(const std::string& name) {
  const std::string prefix = "transformer.";
  return name.compare(0, prefix.size(), prefix) == 0 ? name.substr(prefix.size()) : name;
}

// Old exports carry each layer's causal mask, h.N.attn.bias and h.N.attn.masked_bias.
static bool is_mask(const std::string& name) {
  auto ends_with = [&](const std::string& end) {
    return name.size() >= end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
  };
  return ends_with(".attn.bias") || ends_with(".attn.masked_bias");
}

static std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); i++) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

void read_tensors(const std::string& path, const ModelLayout& model, const std::vector<TensorSink>& sinks) {
  SafetensorsFile file(path);
  std::map<std::string, const SafetensorsTensor*> by_name;
  for (const SafetensorsTensor& tensor : file.tensors()) by_name[plain_name(tensor.name)] = &tensor;
  auto take = [&](const std::string& name, const std::vector<int64_t>& shape) {
    auto it = by_name.find(name);
    if (it == by_name.end()) user_error("%s: tensor %s is missing", path.c_str(), name.c_str());
    const SafetensorsTensor* tensor = it->second;
    if (tensor->shape != shape)
      user_error("%s: tensor %s has shape %s; by its config.json it is %s", path.c_str(), name.c_str(),
                 shape_text(tensor->shape).c_str(), shape_text(shape).c_str());
    by_name.erase(it);
    return tensor;
  };

  // Everything is found and has its shape before anything is stored.
  const auto& tensors = model.table.layout.tensors;
  std::vector<const SafetensorsTensor*> sources;
  for (const TensorSink& sink : sinks)
    for (const ParameterSpec& spec : model.table.specs)
      sources.push_back(take(tensors[size_t(spec.tensor)].name + sink.suffix, spec.file_shape));
  std::vector<float> full, values;
  for (const SafetensorsSpec& bias : absent_biases(model)) {
    if (by_name.count(bias.name) == 0) continue;
    full.resize(size_t(bias.shape[0]));
    file.read_f32(*take(bias.name, bias.shape), full.data());
    if (!std::all_of(full.begin(), full.end(), [](float x) { return x == 0.0f; }))
      user_error("%s: tensor %s is not zero, but config.json says \"bias\": false", path.c_str(), bias.name.c_str());
  }
  if (by_name.count("lm_head.weight") != 0) {
    const int64_t V = model.config.vocab_size, C = model.config.channels;
    const SafetensorsTensor* head = take("lm_head.weight", {V, C});
    std::vector<float> row(model.config.channels), wte_row(model.config.channels);
    for (int64_t v = 0; v < V; v++) {
      file.read_f32(*head, row.data(), v * C, C);
      file.read_f32(*sources[0], wte_row.data(), v * C, C);
      if (row != wte_row) user_error("%s: lm_head.weight is not wte.weight; only a tied head is known", path.c_str());
    }
  }
  for (const auto& [name, tensor] : by_name)
    if (!is_mask(name)) user_error("%s: tensor %s is no part of this model", path.c_str(), name.c_str());

  size_t next = 0;
  for (const TensorSink& sink : sinks) {
    for (size_t i = 0; i < model.table.specs.size(); i++) {
      const SafetensorsTensor* source = sources[next++];
      full.resize(size_t(source->num_elements()));
      values.resize(size_t(tensors[size_t(model.table.specs[i].tensor)].num_elements()));
      file.read_f32(*source, full.data());
      from_file_layout(model, int(i), full.data(), values.data());
      sink.store(int(i), values.data());
    }
  }
}

#include "model_file.h"
#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include "llmc/base/crc32c.h"
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/base/json.h"
#include "llmc/base/text.h"

// ----------------------------------------------------------------------------
// A parameter's place in a file

static int64_t columns_of(const TensorSpec& tensor) { return tensor.shape.size() == 2 ? tensor.shape[1] : 1; }

FilePart whole_weight(const ParameterTable& table, int index) {
  const ParameterSpec& spec = table.specs[index];
  return {spec.transposed, 0, table.tensor(index).num_elements(), 0, num_elements(spec.file_shape)};
}

FilePart own_moment(const ParameterTable& table, int index) {
  const ParameterSpec& spec = table.specs[index];
  const TensorSpec& tensor = table.tensor(index);
  const ShardRange part = shard_range(table, spec);
  if (part.count == 0) return {};
  // The index of an element in the file's tensor. The first element begins, and the last ends, with that tensor.
  auto place = [&](int64_t element) {
    if (element == 0) return int64_t(0);
    if (element == tensor.num_elements()) return num_elements(spec.file_shape);
    const int64_t columns = columns_of(tensor);
    return spec.full_row(element / columns) * columns + element % columns;
  };
  const int64_t begin = part.begin - tensor.element_offset(), end = begin + part.count;
  return {false, begin, end, place(begin), place(end) - place(begin)};
}

// Walks over the part's rows, whole or not, for both directions: visit(place among its elements in the arena, place
// among its elements in the file, length, stride in the file).
template <class Visit>
static void walk_rows(const ParameterTable& table, int index, const FilePart& part, Visit visit) {
  const ParameterSpec& spec = table.specs[index];
  const int64_t columns = columns_of(table.tensor(index)), end_row = (part.end + columns - 1) / columns;
  const int64_t file_rows = spec.file_shape.back();  // of a transposed tensor: the file's columns
#pragma omp parallel for schedule(static)
  for (int64_t row = part.begin / columns; row < end_row; row++) {
    const int64_t begin = std::max(part.begin, row * columns), end = std::min(part.end, (row + 1) * columns);
    const int64_t full = spec.full_row(row), column = begin - row * columns;
    if (part.transposed) visit(begin - part.begin, column * file_rows + full - part.first, end - begin, file_rows);
    else visit(begin - part.begin, full * columns + column - part.first, end - begin, int64_t(1));
  }
}

void to_file_layout(const ParameterTable& table, int index, const FilePart& part, const float* values, float* full) {
  std::fill(full, full + part.count, 0.0f);
  walk_rows(table, index, part, [&](int64_t from, int64_t to, int64_t n, int64_t stride) {
    for (int64_t i = 0; i < n; i++) full[to + i * stride] = values[from + i];
  });
}

void from_file_layout(const ParameterTable& table, int index, const FilePart& part, const float* full, float* values) {
  walk_rows(table, index, part, [&](int64_t to, int64_t from, int64_t n, int64_t stride) {
    for (int64_t i = 0; i < n; i++) values[to + i] = full[from + i * stride];
  });
}

// ----------------------------------------------------------------------------
// Writing

// The tensors that a file holds beside the parameters, as zeros: the biases of a model without any.
static std::vector<SafetensorsSpec> zero_specs(const ParameterTable& table) {
  std::vector<SafetensorsSpec> specs;
  for (const ZeroTensor& tensor : table.zero_tensors) specs.push_back({tensor.name, {tensor.size}});
  return specs;
}

static std::vector<SafetensorsSpec> weight_specs(const ParameterTable& table) {
  std::vector<SafetensorsSpec> specs;
  for (const ParameterSpec& spec : table.specs)
    specs.push_back({table.layout.tensors[spec.tensor].name, spec.file_shape});
  for (const ConstantTensor& constant : table.constants) specs.push_back({constant.name, constant.shape});
  return specs;
}

SafetensorsChecksums write_weight_file(const std::string& path, const ParameterTable& table, const FetchTensor& fetch) {
  std::vector<SafetensorsSpec> specs = weight_specs(table);
  for (SafetensorsSpec& spec : zero_specs(table)) specs.push_back(std::move(spec));
  SafetensorsWriter writer(path, specs);  // a tensor that is not written is zeros
  SafetensorsChecksums sums;
  sums.header = writer.header_checksum();
  std::vector<float> values, full;
  for (size_t i = 0; i < specs.size(); i++) {
    full.assign(size_t(num_elements(specs[i].shape)), 0.0f);
    if (int(i) < table.file_tensors() && table.is_constant(int(i))) {
      fetch(int(i), full.data());
      writer.write_f32(i, full.data(), 0, int64_t(full.size()));
    } else if (i < table.specs.size()) {
      values.resize(size_t(table.tensor(int(i)).num_elements()));
      fetch(int(i), values.data());
      to_file_layout(table, int(i), whole_weight(table, int(i)), values.data(), full.data());
      writer.write_f32(i, full.data(), 0, int64_t(full.size()));
    }
    sums.tensors.push_back({specs[i].name, crc32c(full.data(), full.size() * sizeof(float))});
  }
  writer.finish();
  return sums;
}

std::vector<SafetensorsSpec> moment_specs(const ParameterTable& table) {
  std::vector<SafetensorsSpec> specs;
  for (const char* moment : {".m", ".v"}) {
    for (const ParameterSpec& spec : table.specs) {
      std::vector<int64_t> shape = spec.file_shape;
      if (spec.transposed) std::reverse(shape.begin(), shape.end());
      specs.push_back({table.layout.tensors[spec.tensor].name + moment, std::move(shape)});
    }
  }
  return specs;
}

uint32_t lay_out_moment_file(const std::string& path, const ParameterTable& table) {
  SafetensorsWriter writer(path, moment_specs(table));
  writer.finish();
  return writer.header_checksum();
}

std::vector<MomentPiece> write_moment_shard(const std::string& path, const ParameterTable& table, const float* m,
                                            const float* v) {
  SafetensorsWriter writer = SafetensorsWriter::attach(path);
  std::vector<MomentPiece> pieces;
  std::vector<float> full;
  for (const float* state : {m, v}) {
    for (size_t i = 0; i < table.specs.size(); i++) {
      const FilePart part = own_moment(table, int(i));
      if (part.count == 0) {
        pieces.push_back({0, 0});
        continue;
      }
      full.resize(size_t(part.count));
      to_file_layout(table, int(i), part, state + shard_range(table, table.specs[i]).state, full.data());
      writer.write_f32(pieces.size(), full.data(), part.first, part.count);
      pieces.push_back({part.count, crc32c(full.data(), full.size() * sizeof(float))});
    }
  }
  writer.finish();
  return pieces;
}

// ----------------------------------------------------------------------------
// Reading

// The name of a tensor without what others put before it: GPT-2 files on the hub "transformer.", PyTorch's wrappers
// "module.", and torch.compile "_orig_mod." wherever a part of the model was compiled.
static std::string plain_name(std::string name) {
  const std::string compiled = "_orig_mod.";
  for (size_t at; (at = name.find(compiled)) != std::string::npos;) name.erase(at, compiled.size());
  for (const std::string prefix : {"module.", "transformer."})
    while (begins_with(name, prefix)) name.erase(0, prefix.size());
  return name;
}

// What old exports carry beside parameters: each layer's causal mask, h.N.attn.bias and h.N.attn.masked_bias, and the
// frequencies of Llama's rotations.
static bool is_buffer(const std::string& name) {
  return ends_with(name, ".attn.bias") || ends_with(name, ".attn.masked_bias") ||
         ends_with(name, "rotary_emb.inv_freq");
}

// The tensors of one file, or of several that together are one. Each tensor is taken once.
struct OpenFiles {
  struct Tensor {
    const SafetensorsFile* file;
    const SafetensorsTensor* tensor;
    const std::vector<int64_t>& shape() const { return tensor->shape; }
    void read(float* out, int64_t first = 0, int64_t count = -1) const { file->read_f32(*tensor, out, first, count); }
  };
  const std::string name;  // for messages
  std::vector<std::unique_ptr<SafetensorsFile>> files;
  std::map<std::string, Tensor> by_name;

  explicit OpenFiles(const std::vector<std::string>& paths)
      : name(paths.size() == 1 ? paths[0] : parent_folder(paths[0])) {
    for (const std::string& path : paths) {
      files.push_back(std::make_unique<SafetensorsFile>(path));
      for (const SafetensorsTensor& tensor : files.back()->tensors())
        if (!by_name.insert({plain_name(tensor.name), {files.back().get(), &tensor}}).second)
          user_error("%s: tensor %s is in this file twice, or in another one too", path, tensor.name);
    }
  }
  bool has(const std::string& tensor) const { return by_name.count(tensor) != 0; }

  Tensor take(const SafetensorsSpec& spec) {
    auto it = by_name.find(spec.name);
    if (it == by_name.end())
      user_error("%s: tensor %s is missing%s", name, spec.name,
                 by_name.empty() ? "" : "; one that is left is " + by_name.begin()->first);
    const Tensor tensor = it->second;
    if (tensor.shape() != spec.shape)
      user_error("%s: tensor %s has shape %s; by its config.json it is %s", name, spec.name, shape_text(tensor.shape()),
                 shape_text(spec.shape));
    by_name.erase(it);
    return tensor;
  }
  std::vector<Tensor> take_all(const std::vector<SafetensorsSpec>& specs) {
    std::vector<Tensor> tensors;
    for (const SafetensorsSpec& spec : specs) tensors.push_back(take(spec));
    return tensors;
  }
  void check_no_others() const {
    for (const auto& [tensor, source] : by_name)
      if (!is_buffer(tensor)) user_error("%s: tensor %s is no part of this model", name, tensor);
  }
};

// Hands the part of a tensor to `store`.
static void read_part(const OpenFiles::Tensor& source, const ParameterTable& table, int index, const FilePart& part,
                      const StoreTensor& store) {
  std::vector<float> full(size_t(part.count)), values(size_t(part.end - part.begin));
  source.read(full.data(), part.first, part.count);
  from_file_layout(table, index, part, full.data(), values.data());
  store(index, values.data());
}

static void check_zero_biases(OpenFiles& in, const ParameterTable& table) {
  std::vector<float> values;
  for (const SafetensorsSpec& bias : zero_specs(table)) {
    if (!in.has(bias.name)) continue;
    values.resize(size_t(bias.shape[0]));
    in.take(bias).read(values.data());
    if (!std::all_of(values.begin(), values.end(), [](float x) { return x == 0.0f; }))
      user_error("%s: tensor %s is not zero, but config.json says \"bias\": false", in.name, bias.name);
  }
}

static void check_tied_head(OpenFiles& in, const ParameterTable& table, const OpenFiles::Tensor& wte) {
  for (int i = 0; i < table.size(); i++)
    if (table.tensor(i).name == "lm_head.weight") return;  // it is not tied
  if (!in.has("lm_head.weight")) return;
  const int64_t V = wte.shape()[0], C = wte.shape()[1];
  const OpenFiles::Tensor head = in.take({"lm_head.weight", {V, C}});
  std::vector<float> row(static_cast<size_t>(C)), wte_row(row.size());
  for (int64_t v = 0; v < V; v++) {
    head.read(row.data(), v * C, C);
    wte.read(wte_row.data(), v * C, C);
    if (row != wte_row) user_error("%s: lm_head.weight is not wte.weight, but the wiring has no `untied`", in.name);
  }
}

void read_weight_files(const std::vector<std::string>& paths, const ParameterTable& table, const StoreTensor& store) {
  OpenFiles in(paths);
  // Everything is found and has its shape before anything is stored.
  const std::vector<OpenFiles::Tensor> sources = in.take_all(weight_specs(table));
  check_zero_biases(in, table);
  check_tied_head(in, table, sources[0]);
  in.check_no_others();
  for (size_t i = 0; i < table.specs.size(); i++)
    read_part(sources[i], table, int(i), whole_weight(table, int(i)), store);
  for (size_t i = table.specs.size(); i < sources.size(); i++) {
    std::vector<float> values(size_t(num_elements(sources[i].shape())));
    sources[i].read(values.data());
    store(int(i), values.data());
  }
}

std::vector<std::vector<float>> read_tensors(const std::vector<std::string>& paths,
                                             const std::vector<SafetensorsSpec>& specs) {
  OpenFiles in(paths);
  std::vector<std::vector<float>> values;
  for (const OpenFiles::Tensor& tensor : in.take_all(specs)) {
    values.emplace_back(size_t(num_elements(tensor.shape())));
    tensor.read(values.back().data());
  }
  return values;
}

void read_moment_shard(const std::string& path, const ParameterTable& table, const StoreTensor& store_m,
                       const StoreTensor& store_v) {
  OpenFiles in({path});
  const std::vector<OpenFiles::Tensor> sources = in.take_all(moment_specs(table));
  in.check_no_others();
  const size_t n = table.specs.size();
  for (size_t i = 0; i < sources.size(); i++) {
    const FilePart part = own_moment(table, int(i % n));
    if (part.count > 0) read_part(sources[i], table, int(i % n), part, i < n ? store_m : store_v);
  }
}

// Throws UserError if a model's folder, which has no safetensors, has weights in another format.
static void refuse_other_weights(const std::string& folder) {
  for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack"})
    if (path_exists(folder + "/" + name))
      user_error("%s/%s: has the weights in another format than model.safetensors; fetch that file of the model, or "
                 "let transformers write it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)",
                 folder, name);
}

std::vector<std::string> weight_files(const std::string& folder) {
  const std::string whole = folder + "/model.safetensors", index = whole + ".index.json";
  if (path_exists(whole)) return {whole};
  const std::optional<std::string> text = try_read_file(index);
  if (!text) refuse_other_weights(folder);
  if (!text) return {whole};  // whose absence is then the error
  const nlohmann::json json = parse_json_or_throw<nlohmann::json>(*text, index + ":");
  std::set<std::string> names;
  if (json.is_object() && json.contains("weight_map") && json["weight_map"].is_object())
    for (const nlohmann::json& name : json["weight_map"])
      names.insert(name.is_string() && name.get<std::string>().find('/') == std::string::npos ? name.get<std::string>()
                                                                                              : "");
  if (names.empty() || names.count("")) user_error("%s: has no weight_map of tensors and files beside it", index);
  std::vector<std::string> paths;
  for (const std::string& name : names) paths.push_back(folder + "/" + name);
  for (const std::string& path : paths)
    if (!path_exists(path))
      user_error("%s: is not there; %s names %zu files of weights, and all of them are needed: fetch it, too", path,
                 index, paths.size());
  return paths;
}

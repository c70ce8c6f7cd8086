#include "model_io.h"
#include <algorithm>           // std::all_of, std::fill, std::reverse, std::max, std::min
#include <map>                 // std::map
#include "llmc/utils/crc32c.h"  // crc32c
#include "llmc/utils/error.h"  // user_error

// ----------------------------------------------------------------------------
// A parameter's place in a file

static const TensorSpec& tensor_of(const ModelLayout& model, int index) {
  return model.table.layout.tensors[size_t(model.table.specs[size_t(index)].tensor)];
}

static int64_t columns_of(const TensorSpec& tensor) { return tensor.shape.size() == 2 ? tensor.shape[1] : 1; }

// The row of the full-size tensor, (out, in), that row `row` of the arena's is.
static int64_t full_row(const ModelLayout& model, int index, int64_t row) {
  const int layer = model.table.specs[size_t(index)].qkv_layer;
  return layer < 0 ? row : full_qkv_row(model.config, model.plan, layer, row);
}

FilePart whole_weight(const ModelLayout& model, int index) {
  const ParameterSpec& spec = model.table.specs[size_t(index)];
  return {spec.transposed, 0, tensor_of(model, index).num_elements(), 0, num_elements(spec.file_shape)};
}

FilePart own_moment(const ModelLayout& model, int index) {
  const ParameterSpec& spec = model.table.specs[size_t(index)];
  const TensorSpec& tensor = tensor_of(model, index);
  const ShardRange part = shard_range(model.table, spec);
  if (part.count == 0) return {};
  auto place = [&](int64_t element) {  // in the file; behind the last element: its end
    if (element == tensor.num_elements()) return num_elements(spec.file_shape);
    const int64_t columns = columns_of(tensor);
    return full_row(model, index, element / columns) * columns + element % columns;
  };
  const int64_t begin = part.begin - tensor.element_offset(), end = begin + part.count;
  return {false, begin, end, place(begin), place(end) - place(begin)};
}

// One walk over the part's rows, or what it has of them, for both directions: visit(place among its elements in the arena, place among
// those in the file, length, stride in the file).
template <class Visit>
static void walk_rows(const ModelLayout& model, int index, const FilePart& part, Visit visit) {
  const int64_t columns = columns_of(tensor_of(model, index)), end_row = (part.end + columns - 1) / columns;
  const int64_t file_rows = model.table.specs[size_t(index)].file_shape.back();  // of a transposed tensor: the file's columns
#pragma omp parallel for schedule(static)
  for (int64_t row = part.begin / columns; row < end_row; row++) {
    const int64_t begin = std::max(part.begin, row * columns), end = std::min(part.end, (row + 1) * columns);
    const int64_t full = full_row(model, index, row), column = begin - row * columns;
    if (part.transposed) visit(begin - part.begin, column * file_rows + full - part.first, end - begin, file_rows);
    else visit(begin - part.begin, full * columns + column - part.first, end - begin, int64_t(1));
  }
}

void to_file_layout(const ModelLayout& model, int index, const FilePart& part, const float* values, float* full) {
  std::fill(full, full + part.count, 0.0f);
  walk_rows(model, index, part, [&](int64_t from, int64_t to, int64_t n, int64_t stride) {
    for (int64_t i = 0; i < n; i++) full[to + i * stride] = values[from + i];
  });
}

void from_file_layout(const ModelLayout& model, int index, const FilePart& part, const float* full, float* values) {
  walk_rows(model, index, part, [&](int64_t to, int64_t from, int64_t n, int64_t stride) {
    for (int64_t i = 0; i < n; i++) values[to + i] = full[from + i * stride];
  });
}

// ----------------------------------------------------------------------------
// Writing

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

static std::vector<SafetensorsSpec> weight_specs(const ModelLayout& model) {
  std::vector<SafetensorsSpec> specs;
  for (const ParameterSpec& spec : model.table.specs)
    specs.push_back({model.table.layout.tensors[size_t(spec.tensor)].name, spec.file_shape});
  return specs;
}

SafetensorsChecksums write_weight_file(const std::string& path, const ModelLayout& model, const FetchTensor& fetch) {
  std::vector<SafetensorsSpec> specs = weight_specs(model);
  for (SafetensorsSpec& spec : absent_biases(model)) specs.push_back(std::move(spec));
  SafetensorsWriter writer(path, specs);  // a tensor that nobody writes is zeros
  SafetensorsChecksums sums;
  sums.header = writer.header_checksum();
  std::vector<float> values, full;
  for (size_t i = 0; i < specs.size(); i++) {
    full.assign(size_t(num_elements(specs[i].shape)), 0.0f);
    if (i < model.table.specs.size()) {
      values.resize(size_t(tensor_of(model, int(i)).num_elements()));
      fetch(int(i), values.data());
      to_file_layout(model, int(i), whole_weight(model, int(i)), values.data(), full.data());
      writer.write_f32(i, full.data(), 0, int64_t(full.size()));
    }
    sums.tensors.push_back({specs[i].name, crc32c(full.data(), full.size() * sizeof(float))});
  }
  writer.finish();
  return sums;
}

std::vector<SafetensorsSpec> moment_specs(const ModelLayout& model) {
  std::vector<SafetensorsSpec> specs;
  for (const char* moment : {".m", ".v"}) {
    for (const ParameterSpec& spec : model.table.specs) {
      std::vector<int64_t> shape = spec.file_shape;
      if (spec.transposed) std::reverse(shape.begin(), shape.end());
      specs.push_back({model.table.layout.tensors[size_t(spec.tensor)].name + moment, std::move(shape)});
    }
  }
  return specs;
}

uint32_t lay_out_moment_file(const std::string& path, const ModelLayout& model) {
  SafetensorsWriter writer(path, moment_specs(model));
  writer.finish();
  return writer.header_checksum();
}

std::vector<MomentPiece> write_moment_shard(const std::string& path, const ModelLayout& model, const float* m, const float* v) {
  SafetensorsWriter writer = SafetensorsWriter::attach(path);
  std::vector<MomentPiece> pieces;
  std::vector<float> full;
  for (const float* state : {m, v}) {
    for (size_t i = 0; i < model.table.specs.size(); i++) {
      const FilePart part = own_moment(model, int(i));
      if (part.count == 0) {
        pieces.push_back({0, 0});
        continue;
      }
      full.resize(size_t(part.count));
      to_file_layout(model, int(i), part, state + shard_range(model.table, model.table.specs[i]).state, full.data());
      writer.write_f32(pieces.size(), full.data(), part.first, part.count);
      pieces.push_back({part.count, crc32c(full.data(), full.size() * sizeof(float))});
    }
  }
  writer.finish();
  return pieces;
}

// ----------------------------------------------------------------------------
// Reading

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

// The tensors of a file, of which each is taken once.
struct OpenFile {
  const std::string& path;
  SafetensorsFile file;
  std::map<std::string, const SafetensorsTensor*> by_name;

  explicit OpenFile(const std::string& path) : path(path), file(path) {
    for (const SafetensorsTensor& tensor : file.tensors()) by_name[plain_name(tensor.name)] = &tensor;
  }
  bool has(const std::string& name) const { return by_name.count(name) != 0; }

  const SafetensorsTensor* take(const SafetensorsSpec& spec) {
    auto it = by_name.find(spec.name);
    if (it == by_name.end()) user_error("%s: tensor %s is missing", path.c_str(), spec.name.c_str());
    const SafetensorsTensor* tensor = it->second;
    if (tensor->shape != spec.shape)
      user_error("%s: tensor %s has shape %s; by its config.json it is %s", path.c_str(), spec.name.c_str(),
                 shape_text(tensor->shape).c_str(), shape_text(spec.shape).c_str());
    by_name.erase(it);
    return tensor;
  }
  std::vector<const SafetensorsTensor*> take_all(const std::vector<SafetensorsSpec>& specs) {
    std::vector<const SafetensorsTensor*> tensors;
    for (const SafetensorsSpec& spec : specs) tensors.push_back(take(spec));
    return tensors;
  }
  void demand_no_others() const {
    for (const auto& [name, tensor] : by_name)
      if (!is_mask(name)) user_error("%s: tensor %s is no part of this model", path.c_str(), name.c_str());
  }

  // Hands on what `part` says of a tensor.
  void read(const SafetensorsTensor& source, const ModelLayout& model, int index, const FilePart& part, const StoreTensor& store) const {
    std::vector<float> full(size_t(part.count)), values(size_t(part.end - part.begin));
    file.read_f32(source, full.data(), part.first, part.count);
    from_file_layout(model, index, part, full.data(), values.data());
    store(index, values.data());
  }
};

static void demand_zero_biases(OpenFile& in, const ModelLayout& model) {
  std::vector<float> values;
  for (const SafetensorsSpec& bias : absent_biases(model)) {
    if (!in.has(bias.name)) continue;
    values.resize(size_t(bias.shape[0]));
    in.file.read_f32(*in.take(bias), values.data());
    if (!std::all_of(values.begin(), values.end(), [](float x) { return x == 0.0f; }))
      user_error("%s: tensor %s is not zero, but config.json says \"bias\": false", in.path.c_str(), bias.name.c_str());
  }
}

static void demand_tied_head(OpenFile& in, const ModelLayout& model, const SafetensorsTensor& wte) {
  if (!in.has("lm_head.weight")) return;
  const int64_t V = model.config.vocab_size, C = model.config.channels;
  const SafetensorsTensor* head = in.take({"lm_head.weight", {V, C}});
  std::vector<float> row(model.config.channels), wte_row(model.config.channels);
  for (int64_t v = 0; v < V; v++) {
    in.file.read_f32(*head, row.data(), v * C, C);
    in.file.read_f32(wte, wte_row.data(), v * C, C);
    if (row != wte_row) user_error("%s: lm_head.weight is not wte.weight; only a tied head is known", in.path.c_str());
  }
}

void read_weight_file(const std::string& path, const ModelLayout& model, const StoreTensor& store) {
  OpenFile in(path);
  // Everything is found and has its shape before anything is stored.
  const std::vector<const SafetensorsTensor*> sources = in.take_all(weight_specs(model));
  demand_zero_biases(in, model);
  demand_tied_head(in, model, *sources[0]);
  in.demand_no_others();
  for (size_t i = 0; i < sources.size(); i++) in.read(*sources[i], model, int(i), whole_weight(model, int(i)), store);
}

void read_moment_shard(const std::string& path, const ModelLayout& model, const StoreTensor& store_m, const StoreTensor& store_v) {
  OpenFile in(path);
  const std::vector<const SafetensorsTensor*> sources = in.take_all(moment_specs(model));
  in.demand_no_others();
  const size_t n = model.table.specs.size();
  for (size_t i = 0; i < sources.size(); i++) {
    const FilePart part = own_moment(model, int(i % n));
    if (part.count > 0) in.read(*sources[i], model, int(i % n), part, i < n ? store_m : store_v);
  }
}

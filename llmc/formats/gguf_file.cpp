#include "gguf_file.h"
#include <map>
#include <nlohmann/json.hpp>
#include "config_json.h"
#include "llmc/base/bf16_bits.h"
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/base/text.h"
#include "llmc/formats/named_tensors.h"

using nlohmann::json;

// ----------------------------------------------------------------------------
// Metadata

// GGUF's numbers for types of values, of tensors, and of tokens.
enum ValueType : uint32_t {
  value_uint32 = 4,
  value_int32 = 5,
  value_float32 = 6,
  value_bool = 7,
  value_string = 8,
  value_array = 9
};
enum TensorType : uint32_t { tensor_f32 = 0, tensor_bf16 = 30 };
enum TokenType : int32_t { token_normal = 1, token_control = 3, token_user_defined = 4, token_unused = 5 };
static constexpr uint32_t file_all_f32 = 0, file_mostly_bf16 = 32;
static constexpr uint64_t alignment = 32;

template <class T>
static void append(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}
static void append(std::string& bytes, const std::string& text) {
  append(bytes, uint64_t(text.size()));
  bytes += text;
}

struct Metadata {
  std::string bytes;
  uint64_t count = 0;

  template <class T>
  void add(const std::string& key, ValueType type, const T& value) {
    begin(key, type);
    append(bytes, value);
  }
  template <class T>
  void add_array(const std::string& key, ValueType type, const std::vector<T>& values) {
    begin(key, value_array);
    append(bytes, uint32_t(type));
    append(bytes, uint64_t(values.size()));
    for (const T& value : values) append(bytes, value);
  }

 private:
  void begin(const std::string& key, ValueType type) {
    append(bytes, key);
    append(bytes, uint32_t(type));
    count++;
  }
};

static void add_vocabulary(Metadata& metadata, const ModelConfig& c, const std::string& tokenizer_json) {
  if (tokenizer_json.empty()) {
    metadata.add("tokenizer.ggml.model", value_string, std::string("none"));
    return;
  }
  const json tokenizer = json::parse(tokenizer_json), &model = tokenizer.at("model");
  std::vector<std::string> tokens(static_cast<size_t>(c.vocab_size));
  std::vector<int32_t> types(tokens.size(), token_unused);
  auto set = [&](const std::string& token, size_t id, TokenType type) {
    if (id < tokens.size()) tokens[id] = token, types[id] = type;
  };
  for (const auto& [token, id] : model.at("vocab").items()) set(token, id.get<size_t>(), token_normal);
  for (const json& token : tokenizer.at("added_tokens"))
    set(token.at("content"), token.at("id"), token.at("special") ? token_control : token_user_defined);
  for (size_t id = 0; id < tokens.size(); id++)
    if (types[id] == token_unused) tokens[id] = "<unused" + std::to_string(id) + ">";  // names must differ
  metadata.add("tokenizer.ggml.model", value_string, std::string("gpt2"));
  metadata.add("tokenizer.ggml.pre", value_string, std::string("gpt-2"));
  metadata.add_array("tokenizer.ggml.tokens", value_string, tokens);
  metadata.add_array("tokenizer.ggml.token_type", value_int32, types);
  metadata.add_array("tokenizer.ggml.merges", value_string, model.at("merges").get<std::vector<std::string>>());
  // Generation ends at the last three.
  const auto ids = special_tokens_json(c, /*is_generation=*/true);
  const auto ends = ids.value("eos_token_id", nlohmann::ordered_json::array());
  const auto nth_end = [&](size_t n) {
    return ends.is_array() ? ends.size() > n ? ends[n].get<int>() : -1 : n == 0 ? ends.get<int>() : -1;
  };
  for (const auto& [key, id] : {std::pair("bos", ids.value("bos_token_id", -1)),
                                {"padding", ids.value("pad_token_id", -1)},
                                {"eos", nth_end(0)},
                                {"eot", nth_end(1)},
                                {"eom", nth_end(2)}})
    if (id >= 0) metadata.add(format("tokenizer.ggml.%s_token_id", key), value_uint32, uint32_t(id));
  metadata.add("tokenizer.ggml.add_bos_token", value_bool, char(0));
}

static Metadata metadata_of(const ModelConfig& c, const std::string& tokenizer_json, GgufType type) {
  Metadata m;
  const bool is_gpt2 = is_hugging_face_gpt2(c);
  const std::string architecture = is_gpt2 ? "gpt2" : "llama", a = architecture + ".";
  m.add("general.architecture", value_string, architecture);
  m.add("general.alignment", value_uint32, uint32_t(alignment));
  m.add("general.file_type", value_uint32, type == GgufType::fp32 ? file_all_f32 : file_mostly_bf16);
  m.add(a + "vocab_size", value_uint32, uint32_t(c.vocab_size));
  m.add(a + "context_length", value_uint32, uint32_t(c.max_seq_len));
  m.add(a + "embedding_length", value_uint32, uint32_t(c.channels));
  m.add(a + "block_count", value_uint32, uint32_t(c.num_layers));
  m.add(a + "feed_forward_length", value_uint32, uint32_t(c.hidden_size()));
  m.add(a + "attention.head_count", value_uint32, uint32_t(c.num_heads));
  m.add(a + (is_gpt2 ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon"), value_float32,
        float(c.layer_norm_eps));
  if (!is_gpt2) {
    const WiringTable table = c.wiring_table();
    m.add(a + "attention.head_count_kv", value_uint32, uint32_t(table.num_kv_heads));
    m.add(a + "rope.dimension_count", value_uint32, uint32_t(c.head_size()));
    m.add(a + "rope.freq_base", value_float32, float(table.rope));
  }
  add_vocabulary(m, c, tokenizer_json);
  return m;
}

// ----------------------------------------------------------------------------
// Tensors

struct GgufTensor {
  std::string name, source;  // llama.cpp's and GPT-2's
  std::vector<int64_t> shape;
  TensorType type;
  uint64_t bytes() const { return uint64_t(num_elements(shape)) * (type == tensor_f32 ? 4 : 2); }
};

static uint64_t padded(uint64_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

// The tensors of a model whose table has Llama's names (llama_file.h).
static std::vector<GgufTensor> llama_tensors_of(const NamedTensors& source, GgufType type) {
  static const std::map<std::string, std::string> names = {{"model.embed_tokens", "token_embd"},
                                                           {"model.norm", "output_norm"},
                                                           {"lm_head", "output"},
                                                           {"input_layernorm", "attn_norm"},
                                                           {"self_attn.q_proj", "attn_q"},
                                                           {"self_attn.k_proj", "attn_k"},
                                                           {"self_attn.v_proj", "attn_v"},
                                                           {"mlp.gate_proj", "ffn_gate"},
                                                           {"self_attn.o_proj", "attn_output"},
                                                           {"mlp.up_proj", "ffn_up"},
                                                           {"mlp.down_proj", "ffn_down"},
                                                           {"post_attention_layernorm", "ffn_norm"}};
  const std::string of_layer = "model.layers.", end = ".weight";
  std::vector<GgufTensor> tensors;
  for (int i = 0; i < source.table.size(); i++) {
    const std::string& from = source.table.tensor(i).name;
    std::string name = from.substr(0, from.size() - end.size()), layer;
    if (begins_with(name, of_layer)) {
      const size_t dot = name.find('.', of_layer.size());
      layer = "blk." + name.substr(of_layer.size(), dot + 1 - of_layer.size()), name = name.substr(dot + 1);
    }
    const std::vector<int64_t> shape = source.shape(from);
    const bool is_fp32 = type == GgufType::fp32 || shape.size() == 1;
    tensors.push_back({layer + names.at(name) + end, from, shape, is_fp32 ? tensor_f32 : tensor_bf16});
  }
  return tensors;
}

// llama.cpp rotates neighbouring channels of its architecture "llama": rows i and i + hs/2 of a head of q or k lie
// beside each other.
static std::vector<float> with_pairs_together(const GgufTensor& tensor, std::vector<float> values, int64_t hs) {
  if (!ends_with(tensor.source, "q_proj.weight") && !ends_with(tensor.source, "k_proj.weight")) return values;
  const int64_t C = tensor.shape[1];
  std::vector<float> rows;
  for (int64_t row = 0; row < tensor.shape[0]; row++) {
    const int64_t i = row % hs, from = row - i + i % 2 * (hs / 2) + i / 2;
    rows.insert(rows.end(), values.begin() + from * C, values.begin() + (from + 1) * C);
  }
  return rows;
}

static std::vector<GgufTensor> tensors_of(const ModelConfig& c, const NamedTensors& source, GgufType type) {
  static const std::map<std::string, std::string> names = {{"ln_1", "attn_norm"},  {"attn.c_attn", "attn_qkv"},
                                                           {"mlp.c_fc", "ffn_up"}, {"attn.c_proj", "attn_output"},
                                                           {"ln_2", "ffn_norm"},   {"mlp.c_proj", "ffn_down"}};
  std::vector<GgufTensor> tensors;
  auto add = [&](const std::string& name, const std::string& from, bool always_fp32 = false) {
    const std::vector<int64_t> shape = source.shape(from);
    const bool is_fp32 = type == GgufType::fp32 || shape.size() == 1 || always_fp32;
    tensors.push_back({name, from, shape, is_fp32 ? tensor_f32 : tensor_bf16});
  };
  add("token_embd.weight", "wte.weight");
  add("position_embd.weight", "wpe.weight", /*always_fp32=*/true);
  for (int l = 0; l < c.num_layers; l++)
    for (const std::string& sublayer : sublayer_names)
      for (const char* part : {".weight", ".bias"})
        add("blk." + std::to_string(l) + "." + names.at(sublayer) + part,
            "h." + std::to_string(l) + "." + sublayer + part);
  for (const char* part : {".weight", ".bias"}) add(std::string("output_norm") + part, std::string("ln_f") + part);
  return tensors;
}

void write_gguf_file(const std::string& path, const ModelConfig& config, const ParameterTable& table,
                     const FetchTensor& fetch, const std::string& tokenizer_json, GgufType type) {
  const bool is_gpt2 = is_hugging_face_gpt2(config);
  const NamedTensors source = is_gpt2 ? NamedTensors(config, table, "llama.cpp") : NamedTensors(table);
  const std::vector<GgufTensor> tensors = is_gpt2 ? tensors_of(config, source, type) : llama_tensors_of(source, type);
  const Metadata metadata = metadata_of(config, tokenizer_json, type);
  std::string head = "GGUF";
  append(head, uint32_t(3));
  append(head, uint64_t(tensors.size()));
  append(head, metadata.count);
  head += metadata.bytes;
  uint64_t offset = 0;
  for (const GgufTensor& tensor : tensors) {
    append(head, tensor.name);
    append(head, uint32_t(tensor.shape.size()));
    for (size_t i = tensor.shape.size(); i-- > 0;)
      append(head, uint64_t(tensor.shape[i]));  // the fastest dimension first
    append(head, uint32_t(tensor.type));
    append(head, offset);
    offset += padded(tensor.bytes());
  }
  head.resize(padded(head.size()), '\0');

  check_free_name(path);
  OutputFile file(path);
  file.write(head.data(), head.size());
  std::string bytes;
  for (const GgufTensor& tensor : tensors) {
    bytes.clear();
    for (float value : with_pairs_together(tensor, source.fetch(tensor.source, fetch), config.head_size())) {
      if (tensor.type == tensor_f32) append(bytes, value);
      else append(bytes, bf16_from_float(value));
    }
    bytes.resize(padded(bytes.size()), '\0');
    file.write(bytes.data(), bytes.size());
  }
  file.finish();
}

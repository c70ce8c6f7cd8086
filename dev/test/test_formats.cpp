// Models in the files of other programs: llm.c's and GGUF, and data/convert.
#include <gtest/gtest.h>
#include <algorithm>
#include <cstring>
#include <map>
#include "command_line.h"
#include "golden_case.h"
#include "helpers.h"
#include "llmc/formats/checkpoint.h"
#include "llmc/formats/model_file.h"
#include "llmc/formats/safetensors.h"
#include "llmc/formats/config_json.h"
#include "llmc/formats/gguf_file.h"
#include "llmc/formats/llama_file.h"
#include "llmc/formats/llmc_file.h"
#include "llmc/model/parameters.h"
#include "llmc/text/tokenizer.h"
#include "llmc/base/bf16_bits.h"

static const std::string plain = "dev/test/golden/baseline", no_bias = "dev/test/golden/no_bias_accum";

// The weights of a folder's model, full-size, in the arena's layout.
struct FolderModel {
  ModelConfig config;
  ParameterTable table;
  std::vector<std::vector<float>> values;

  explicit FolderModel(const std::string& folder) : config(read_config_json(folder)) {
    table = make_parameter_table(config, make_attention_plan(config, /*keep_dead=*/true));
    values.resize(size_t(table.size()));
    read_weights(folder, table,
                 [&](int i, const float* v) { values[i].assign(v, v + table.tensor(i).num_elements()); });
  }
  FetchTensor fetch() const {
    return [this](int i, float* to) { std::copy(values[i].begin(), values[i].end(), to); };
  }
  const std::vector<float>& named(const std::string& name) const {
    int i = 0;
    while (table.tensor(i).name != name) i++;
    return values[i];
  }
};

// The model of a folder as plain GPT-2, whatever its wiring: the same shapes.
static FolderModel as_plain(const std::string& folder) {
  FolderModel model(folder);
  model.config.wiring = Wiring();
  return model;
}

template <class T>
static T at(const std::string& bytes, size_t offset) {
  T value{};
  if (offset + sizeof value <= bytes.size()) memcpy(&value, &bytes[offset], sizeof value);
  return value;
}

// llm.c's train_gpt2.c, fill_in_parameter_sizes: the sixteen tensors in its file's order, each for all layers.
TEST(LlmcFile, HasTheTensorsInLlmcsOrder) {
  TemporaryFolder folder;
  const FolderModel model(plain);
  const std::string path = folder.path + "/model.bin";
  write_llmc_file(path, model.config, model.table, model.fetch(), LlmcType::fp32);
  const std::string bytes = read_file(path);
  const int64_t L = 4, C = 64, T = 32, Vp = 384;
  const int32_t header[] = {20240326, 3, 32, 257, 4, 4, 64, 384, 0};
  for (int i = 0; i < 9; i++) EXPECT_EQ(at<int32_t>(bytes, i * 4), header[i]) << i;

  const struct {
    const char* name;
    int64_t layers, out, in;
  } sizes[] = {{"wte.weight", 0, Vp, C},
               {"wpe.weight", 0, T, C},
               {"ln_1.weight", L, C, 1},
               {"ln_1.bias", L, C, 1},
               {"attn.c_attn.weight", L, 3 * C, C},
               {"attn.c_attn.bias", L, 3 * C, 1},
               {"attn.c_proj.weight", L, C, C},
               {"attn.c_proj.bias", L, C, 1},
               {"ln_2.weight", L, C, 1},
               {"ln_2.bias", L, C, 1},
               {"mlp.c_fc.weight", L, 4 * C, C},
               {"mlp.c_fc.bias", L, 4 * C, 1},
               {"mlp.c_proj.weight", L, C, 4 * C},
               {"mlp.c_proj.bias", L, C, 1},
               {"ln_f.weight", 0, C, 1},
               {"ln_f.bias", 0, C, 1}};
  const GoldenTensors golden = read_golden_tensors(plain + "/model.safetensors");  // (in, out)
  size_t offset = 1024;
  for (const auto& s : sizes) {
    for (int64_t l = 0; l < std::max<int64_t>(s.layers, 1); l++) {
      const std::string name = (s.layers > 0 ? "h." + std::to_string(l) + "." : "") + s.name;
      const std::vector<float>& values = golden.at(name).data;
      const bool is_embedding = name == "wte.weight" || name == "wpe.weight";
      int64_t wrong = 0;
      for (int64_t o = 0; o < s.out; o++)
        for (int64_t i = 0; i < s.in; i++, offset += 4) {
          const size_t element = size_t(is_embedding ? o * s.in + i : i * s.out + o);
          wrong += at<float>(bytes, offset) != (name == "wte.weight" && o >= 257 ? 0.0f : values[element]);
        }
      EXPECT_EQ(wrong, 0) << name;
    }
  }
  EXPECT_EQ(offset, bytes.size());
}

TEST(LlmcFile, ComesBackInBothTypes) {
  for (const std::string& source : {plain, no_bias}) {
    TemporaryFolder folder;
    const FolderModel model = as_plain(source);
    for (const LlmcType type : {LlmcType::fp32, LlmcType::bf16}) {
      const std::string path = folder.path + (type == LlmcType::fp32 ? "/fp32.bin" : "/bf16.bin");
      write_llmc_file(path, model.config, model.table, model.fetch(), type);
      ASSERT_TRUE(is_llmc_file(path));
      const ModelConfig c = read_llmc_config(path);
      EXPECT_EQ(c.channels, model.config.channels);
      EXPECT_TRUE(c.bias);  // llm.c's models have them: zeros here
      EXPECT_TRUE(c.wiring.is_plain());
      const ParameterTable table = make_parameter_table(c, make_attention_plan(c));
      std::map<std::string, std::vector<float>> read;
      read_llmc_weights(path, c, table, [&](int i, const float* v) {
        read[table.tensor(i).name].assign(v, v + table.tensor(i).num_elements());
      });
      EXPECT_EQ(int(read.size()), table.size());
      for (int i = 0; i < model.table.size(); i++) {
        std::vector<float> expected = model.values[i];
        if (type == LlmcType::bf16)
          for (float& x : expected) x = float_from_bf16(bf16_from_float(x));
        EXPECT_EQ(read.at(model.table.tensor(i).name), expected) << model.table.tensor(i).name;
      }
      if (!model.config.bias) { EXPECT_EQ(read.at("ln_f.bias"), std::vector<float>(size_t(c.channels), 0.0f)); }
    }
  }
}

TEST(LlmcFile, RefusesWhatIsNone) {
  TemporaryFolder folder;
  const FolderModel model(plain);
  const std::string path = folder.path + "/model.bin", broken = folder.path + "/broken.bin";
  write_llmc_file(path, model.config, model.table, model.fetch(), LlmcType::bf16);
  const std::string bytes = read_file(path);
  auto with = [&](int place, int32_t value) {
    std::string changed = bytes;
    memcpy(&changed[place * 4], &value, 4);
    write_file(broken, changed);
    return error_of([&] { read_llmc_config(broken); });
  };
  EXPECT_NE(with(0, 1).find("does not begin with 20240326"), std::string::npos);
  EXPECT_NE(with(1, 1).find("version 1; known are 3 (fp32) and 5 (bf16)"), std::string::npos);
  EXPECT_NE(with(4, 5).find("but its header describes a model of"), std::string::npos);
  EXPECT_NE(with(4, INT32_MAX).find("but its header describes a model of"), std::string::npos);
  EXPECT_NE(with(5, 5).find("5 heads do not divide 64 channels"), std::string::npos);
  EXPECT_NE(with(6, -64).find("make no model"), std::string::npos);
  EXPECT_NE(with(7, 256).find("smaller than the vocabulary"), std::string::npos);
  for (const std::string& other : {bytes.substr(0, bytes.size() - 2), bytes + "x", bytes.substr(0, 1000)}) {
    write_file(broken, other);
    EXPECT_NE(error_of([&] { read_llmc_config(broken); }), "");
  }
  FolderModel wired(plain);
  wired.config.wiring = parse_wiring("sla(2,2)");
  EXPECT_ERROR(write_llmc_file(broken + "2", wired.config, wired.table, wired.fetch(), LlmcType::fp32), "llm.c knows "
                                                                                                        "plain GPT-2 "
                                                                                                        "only");
  EXPECT_ERROR(write_llmc_file(path, model.config, model.table, model.fetch(), LlmcType::fp32), "exists already");
  EXPECT_EQ(names_in(folder.path), (std::set<std::string>{"model.bin", "broken.bin"}));
}

// Reads what docs/gguf.md defines, of the types that occur here.
struct GgufReader {
  std::string bytes;
  size_t next = 0;
  std::map<std::string, json> metadata;
  struct Tensor {
    std::vector<uint64_t> shape;
    uint32_t type;
    uint64_t offset;
  };
  std::map<std::string, Tensor> tensors;
  size_t data = 0;

  template <class T>
  T take() {
    const T value = at<T>(bytes, next);
    next += sizeof(T);
    return value;
  }
  std::string text() {
    const uint64_t length = take<uint64_t>();
    next += length;
    return bytes.substr(next - length, length);
  }
  json value(uint32_t type) {
    switch (type) {
      case 4: return take<uint32_t>();
      case 5: return take<int32_t>();
      case 6: return take<float>();
      case 7: return take<uint8_t>() != 0;
      case 8: return text();
      case 9: {
        json array = json::array();
        const uint32_t of = take<uint32_t>();
        for (uint64_t n = take<uint64_t>(); n > 0; n--) array.push_back(value(of));
        return array;
      }
    }
    ADD_FAILURE() << "type " << type;
    return nullptr;
  }
  explicit GgufReader(const std::string& path) : bytes(read_file(path)) {
    EXPECT_EQ(bytes.substr(0, 4), "GGUF");
    next = 4;
    EXPECT_EQ(take<uint32_t>(), 3u);
    const uint64_t num_tensors = take<uint64_t>();
    for (uint64_t n = take<uint64_t>(); n > 0; n--) {
      const std::string key = text();
      metadata[key] = value(take<uint32_t>());
    }
    for (uint64_t n = num_tensors; n > 0; n--) {
      Tensor& tensor = tensors[text()];
      tensor.shape.resize(take<uint32_t>());
      for (uint64_t& size : tensor.shape) size = take<uint64_t>();
      tensor.type = take<uint32_t>();
      tensor.offset = take<uint64_t>();
      EXPECT_EQ(tensor.offset % 32, 0u);
    }
    data = (next + 31) / 32 * 32;
  }
  float element(const Tensor& tensor, size_t i) const {
    const size_t begin = data + tensor.offset;
    return tensor.type == 0 ? at<float>(bytes, begin + 4 * i) : float_from_bf16(at<uint16_t>(bytes, begin + 2 * i));
  }
};

TEST(GgufFile, HasLlamaCppsKeysAndTensors) {
  TemporaryFolder folder;
  FolderModel model(plain);
  model.config.special.eos = {256};
  const GoldenTensors golden = read_golden_tensors(plain + "/model.safetensors");
  nlohmann::json bytes = nlohmann::json::parse(Tokenizer::bytes().to_json());
  bytes["added_tokens"].push_back({{"id", 255}, {"content", "<another>"}, {"special", true}});
  const std::string vocabulary = bytes.dump();
  for (const GgufType type : {GgufType::fp32, GgufType::bf16}) {
    const std::string path = folder.path + (type == GgufType::fp32 ? "/fp32.gguf" : "/bf16.gguf");
    write_gguf_file(path, model.config, model.table, model.fetch(), vocabulary, type);
    const GgufReader file(path);
    EXPECT_EQ(file.metadata.at("general.architecture"), "gpt2");
    EXPECT_EQ(file.metadata.at("general.file_type"), type == GgufType::fp32 ? 0 : 32) << "ALL_F32, MOSTLY_BF16";
    EXPECT_EQ(file.metadata.at("gpt2.block_count"), 4);
    EXPECT_EQ(file.metadata.at("gpt2.context_length"), 32);
    EXPECT_EQ(file.metadata.at("gpt2.feed_forward_length"), 256);
    EXPECT_EQ(file.metadata.at("gpt2.attention.head_count"), 4);
    EXPECT_EQ(file.metadata.at("tokenizer.ggml.tokens").size(), 257u);
    EXPECT_EQ(file.metadata.at("tokenizer.ggml.tokens").at(65), "A");
    EXPECT_EQ(file.metadata.at("tokenizer.ggml.token_type").at(256), 3);
    EXPECT_EQ(file.metadata.at("tokenizer.ggml.eos_token_id"), 256);
    EXPECT_EQ(file.metadata.at("tokenizer.ggml.add_bos_token"), false);
    EXPECT_EQ(file.tensors.size(), golden.size() - golden.count("lm_head.weight"));
    const struct {
      const char *name, *source;
      size_t in, out;
      bool transposed;
    } tensors[] = {{"token_embd.weight", "wte.weight", 64, 257, false},
                   {"position_embd.weight", "wpe.weight", 64, 32, false},
                   {"blk.3.attn_qkv.weight", "h.3.attn.c_attn.weight", 64, 192, true},
                   {"blk.0.attn_output.weight", "h.0.attn.c_proj.weight", 64, 64, true},
                   {"blk.1.ffn_up.weight", "h.1.mlp.c_fc.weight", 64, 256, true},
                   {"blk.2.ffn_down.weight", "h.2.mlp.c_proj.weight", 256, 64, true},
                   {"blk.2.attn_norm.bias", "h.2.ln_1.bias", 64, 1, false},
                   {"blk.2.ffn_norm.weight", "h.2.ln_2.weight", 64, 1, false},
                   {"output_norm.weight", "ln_f.weight", 64, 1, false}};
    for (const auto& t : tensors) {
      const GgufReader::Tensor& tensor = file.tensors.at(t.name);
      EXPECT_EQ(tensor.shape, t.out == 1 ? std::vector<uint64_t>{t.in} : std::vector<uint64_t>({t.in, t.out}))
          << t.name;
      const bool is_bf16 = type == GgufType::bf16 && t.out > 1 && t.source != std::string("wpe.weight");
      EXPECT_EQ(tensor.type, is_bf16 ? 30u : 0u) << t.name;
      int64_t wrong = 0;
      for (size_t o = 0; o < t.out; o++)
        for (size_t i = 0; i < t.in; i++) {
          const float value = golden.at(t.source).data[t.transposed ? i * t.out + o : o * t.in + i];
          wrong += file.element(tensor, o * t.in + i) != (is_bf16 ? float_from_bf16(bf16_from_float(value)) : value);
        }
      EXPECT_EQ(wrong, 0) << t.name;
    }
  }
}

// A model in `folder`, whose weights are all different from their neighbours.
static void write_model(const std::string& folder, int heads, int channels, int vocab_size,
                        const std::string& wiring = "plain") {
  ModelConfig config;
  config.num_layers = 2, config.num_heads = heads, config.channels = channels, config.max_seq_len = 7,
  config.vocab_size = vocab_size, config.wiring = parse_wiring(wiring);
  config.bias = wiring == "plain" || ends_with(wiring, " gate");
  fs::create_directory(folder);
  write_file(folder + "/config.json", config_json(config));
  const ParameterTable table = make_parameter_table(config, make_attention_plan(config, /*keep_dead=*/true));
  write_weight_file(folder + "/model.safetensors", table, [&](int i, float* values) {
    for (int64_t n = 0; n < table.tensor(i).num_elements(); n++) values[n] = float((n * 37 + i) % 101);
  });
}

// 36 channels are 144 bytes, and 257 tokens of them in bf16 18,504: neither is a multiple of 32.
TEST(GgufFile, BeginsEachTensorAtAMultipleOfTheAlignment) {
  TemporaryFolder folder;
  write_model(folder.path + "/odd", /*heads=*/3, /*channels=*/36, /*vocab_size=*/257);
  const FolderModel model(folder.path + "/odd");
  for (const GgufType type : {GgufType::fp32, GgufType::bf16}) {
    const std::string path = folder.path + (type == GgufType::fp32 ? "/fp32.gguf" : "/bf16.gguf");
    write_gguf_file(path, model.config, model.table, model.fetch(), "", type);
    const GgufReader file(path);  // expects multiples
    EXPECT_EQ(file.metadata.at("tokenizer.ggml.model"), "none");
    for (const auto& [name, source] : {std::pair("token_embd.weight", "wte.weight"),
                                       {"position_embd.weight", "wpe.weight"},
                                       {"blk.1.ffn_norm.bias", "h.1.ln_2.bias"},
                                       {"output_norm.bias", "ln_f.bias"}}) {
      const std::vector<float>& values = model.named(source);
      const GgufReader::Tensor& tensor = file.tensors.at(name);
      int64_t wrong = 0;
      for (size_t i = 0; i < values.size(); i++) wrong += file.element(tensor, i) != values[i];
      EXPECT_EQ(wrong, 0) << name;
    }
    const GgufReader::Tensor& last = file.tensors.at("output_norm.bias");
    EXPECT_EQ(file.bytes.size(), file.data + last.offset + 160) << "144 bytes, padded like those of every tensor";
  }
}

// ----------------------------------------------------------------------------
// Llama

using LlamaFolder = CommandLine;

TEST_F(LlamaFolder, HasLlamasTensorsAndComesBack) {
  for (const char* wiring : {"rmsnorm rope swiglu untied", "gqa(2) rope(500) rmsnorm swiglu(40)"}) {
    SCOPED_TRACE(wiring);
    for (const char* name : {"own", "llama", "back", "model.gguf"}) fs::remove_all(in(name));
    write_model(in("own"), 4, 32, 61, wiring);
    ASSERT_EQ(run("data/convert --llama " + in("own") + " " + in("llama")).exit_status, 0);
    ASSERT_EQ(run("data/convert " + in("llama") + " " + in("back")).exit_status, 0);
    const FolderModel own(in("own")), back(in("back"));
    EXPECT_EQ(own.values, back.values);
    const WiringTable before = own.config.wiring_table(), after = back.config.wiring_table();
    EXPECT_EQ(after.rope, before.rope);
    EXPECT_EQ(after.num_kv_heads, before.num_kv_heads);
    EXPECT_EQ(back.config.hidden_size(), own.config.hidden_size());
    EXPECT_EQ(after.untied, before.untied);

    const size_t C = 32, H = size_t(own.config.hidden_size()), KV = 8 * size_t(before.num_kv_heads);
    const GoldenTensors tensors = read_golden_tensors(in("llama/model.safetensors"));
    const Outcome to_gguf = run("data/convert " + in("own") + " " + in("model.gguf"));
    ASSERT_EQ(to_gguf.exit_status, 0);
    EXPECT_EQ(to_gguf.out.find("is its output head") == std::string::npos, before.untied) << to_gguf.out;
    const GgufReader gguf(in("model.gguf"));
    EXPECT_EQ(gguf.metadata.at("general.architecture"), "llama");
    EXPECT_EQ(gguf.metadata.at("llama.attention.head_count_kv"), before.num_kv_heads);
    EXPECT_EQ(gguf.tensors.size(), tensors.size());
    const struct {
      const char *name, *gguf, *source;
      size_t first, rows, in;
    } parts[] = {{"self_attn.q_proj", "attn_q", "attn.c_attn", 0, C, C},
                 {"self_attn.k_proj", "attn_k", "attn.c_attn", C, KV, C},
                 {"self_attn.v_proj", "attn_v", "attn.c_attn", C + KV, KV, C},
                 {"self_attn.o_proj", "attn_output", "attn.c_proj", 0, C, C},
                 {"mlp.gate_proj", "ffn_gate", "mlp.c_fc", 0, H, C},
                 {"mlp.up_proj", "ffn_up", "mlp.c_fc", H, H, C},
                 {"mlp.down_proj", "ffn_down", "mlp.c_proj", 0, C, H}};
    for (const auto& part : parts) {
      const GoldenTensor& tensor = tensors.at(format("model.layers.1.%s.weight", part.name));
      const GgufReader::Tensor& of_gguf = gguf.tensors.at(format("blk.1.%s.weight", part.gguf));
      const std::vector<float>& whole = own.named(format("h.1.%s.weight", part.source));  // (out, in)
      EXPECT_EQ(tensor.shape, std::vector<int64_t>({int64_t(part.rows), int64_t(part.in)})) << part.name;
      const bool has_pairs = part.gguf == std::string("attn_q") || part.gguf == std::string("attn_k");
      for (size_t row = 0; row < part.rows; row++) {
        const size_t i = row % 8, of_pair = row - i + (i < 4 ? 2 * i : 2 * (i - 4) + 1);  // heads of 8
        for (size_t n = 0; n < part.in; n++) {
          const float value = whole[(part.first + row) * part.in + n];
          ASSERT_EQ(tensor.data[row * part.in + n], value) << part.name << " " << row;
          ASSERT_EQ(gguf.element(of_gguf, (has_pairs ? of_pair : row) * part.in + n), value) << part.gguf << " " << row;
        }
      }
    }
  }
}

TEST_F(LlamaFolder, IsRefusedForWhatLlamaHasNot) {
  for (const auto& [wiring, what] : {std::pair("plain", "has no plain"),
                                     {"rmsnorm rope swiglu qknorm", "has no qknorm"},
                                     {"rmsnorm rope swiglu softcap(15)", "has no softcap"},
                                     {"rmsnorm rope swiglu sla(1,2)", "has no sla"},
                                     {"dense rmsnorm rope swiglu", "has no dense"},
                                     {"rmsnorm rope untied", "Llama's architecture is rmsnorm rope swiglu"},
                                     {"modern", "has no qknorm"}}) {
    fs::remove_all(in("own"));
    write_model(in("own"), 4, 32, 61, wiring);
    const Outcome o = run("data/convert --llama " + in("own") + " " + in("llama"));
    EXPECT_EQ(o.exit_status, 1) << wiring;
    EXPECT_NE(o.err.find(what), std::string::npos) << wiring << ": " << o.err;
    EXPECT_FALSE(fs::exists(in("llama")));
  }
  fs::remove_all(in("own"));
  write_model(in("own"), 4, 32, 61, "rmsnorm rope swiglu untied");
  nlohmann::json config = nlohmann::json::parse(read_file(in("own/config.json")));
  config["bias"] = true;
  write("own/config.json", config.dump());
  EXPECT_NE(run("data/convert --llama " + in("own") + " " + in("llama")).exit_status, 0);

  config = nlohmann::json::parse(read_file(in("own/config.json")));
  config["bias"] = false;
  write("own/config.json", config.dump());
  ASSERT_EQ(run("data/convert --llama " + in("own") + " " + in("llama")).exit_status, 0);
  const nlohmann::json llama = nlohmann::json::parse(read_file(in("llama/config.json")));
  const std::vector<std::pair<const char*, nlohmann::json>> unknown =
      {{"attention_bias", true},   {"mlp_bias", true},       {"hidden_act", "gelu"},
       {"head_dim", 16},           {"hidden_size", "x"},     {"rope_scaling", {{"type", "linear"}, {"factor", 2}}},
       {"num_key_value_heads", 3}, {"num_hidden_layers", 0}, {"rope_parameters", {{"rope_type", "llama3"}}}};
  for (const auto& [key, value] : unknown) {
    nlohmann::json other = llama;
    other[key] = value;
    write("llama/config.json", other.dump());
    const Outcome o = run("data/convert " + in("llama") + " " + in("back"));
    EXPECT_EQ(o.exit_status, 1) << key << ": " << o.err;
    EXPECT_FALSE(fs::exists(in("back"))) << key;
  }
}

// Keys of either schema of transformers, beside which a file may lack others.
TEST_F(LlamaFolder, HasEveryKeyThatChangesTheFunctionUsedOrRefused) {
  write_model(in("own"), 4, 32, 61, "rmsnorm rope swiglu untied");
  ASSERT_EQ(run("data/convert --llama " + in("own") + " " + in("llama")).exit_status, 0);
  nlohmann::json llama = nlohmann::json::parse(read_file(in("llama/config.json")));
  for (const char* key : {"tie_word_embeddings", "rms_norm_eps", "rope_theta", "rope_parameters"}) llama.erase(key);
  auto with = [&](const nlohmann::json& keys) {
    nlohmann::json config = llama;
    config.update(keys);
    write("llama/config.json", config.dump());
    return read_llama_config(in("llama"));
  };
  const ModelConfig by_default = with(nlohmann::json::object());
  EXPECT_TRUE(by_default.whole_model().untied);
  EXPECT_EQ(by_default.layer_norm_eps, 1e-6);
  EXPECT_EQ(by_default.whole_model().rope, 1e4);
  using Json = nlohmann::json;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    for (const Json& none : {Json(), Json{{"type", "default"}}, Json{{"rope_type", "default"}, {"factor", 8}},
                             Json{{"type", "linear"}, {"factor", 1.0}}, Json{{"partial_rotary_factor", 1.0}}})
      EXPECT_EQ(with({{key, none}}).whole_model().rope, 1e4) << key << none;
    for (const Json& other : {Json{{"type", "linear"}, {"factor", 2}}, Json{{"rope_type", "llama3"}},
                              Json{{"type", "dynamic"}, {"rope_type", "default"}}, Json{{"partial_rotary_factor", 0.5}},
                              Json{{"full_attention", Json::object()}}, Json{{"rope_theta", "x"}}})
      EXPECT_ERROR(with({{key, other}}), key);
    EXPECT_EQ(with({{"rope_theta", 7}, {key, {{"rope_theta", 500}}}}).whole_model().rope, 500) << key;
  }
  for (const Json& other : {Json{{"partial_rotary_factor", 0.5}}, Json{{"quantization_config", {{"bits", 4}}}}})
    EXPECT_ERROR(with(other), other.begin().key());
  with({{"hidden_act", "swish"},
        {"pretraining_tp", 2},
        {"attention_dropout", 0.1},
        {"use_cache", false},
        {"head_dim", nullptr}});
}

// Old exports hold each layer's frequencies, and torch.compile and PyTorch's wrappers have prefixes of their own.
TEST_F(LlamaFolder, MayHaveBuffersAndNamesOfWrappers) {
  write_model(in("own"), 4, 32, 61, "rmsnorm rope swiglu untied");
  ASSERT_EQ(run("data/convert --llama " + in("own") + " " + in("llama")).exit_status, 0);
  const GoldenTensors tensors = read_golden_tensors(in("llama/model.safetensors"));
  for (const char* prefix : {"", "_orig_mod.", "module.", "_orig_mod.module."}) {
    std::vector<SafetensorsSpec> specs = {{"model.layers.0.self_attn.rotary_emb.inv_freq", {4}}};
    for (const auto& [name, tensor] : tensors) specs.push_back({prefix + name, tensor.shape});
    fs::remove(in("llama/model.safetensors")), fs::remove_all(in("back"));
    SafetensorsWriter writer(in("llama/model.safetensors"), specs);
    size_t i = 1;
    for (const auto& [name, tensor] : tensors)
      writer.write_f32(i++, tensor.data.data(), 0, int64_t(tensor.data.size()));
    writer.finish();
    const Outcome o = run("data/convert " + in("llama") + " " + in("back"));
    ASSERT_EQ(o.exit_status, 0) << o.err;
    EXPECT_EQ(FolderModel(in("back")).values, FolderModel(in("own")).values);
  }
}

TEST(Bf16Bits, RoundToTheNearestEven) {
  const struct {
    uint32_t bits;
    uint16_t expected;
  } cases[] = {{0x3f800000, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f808001, 0x3f81}, {0x3f818000, 0x3f82},
               {0x3f817fff, 0x3f81}, {0x7f7fffff, 0x7f80}, {0xff800000, 0xff80}, {0x80000000, 0x8000},
               {0x7f800001, 0x7fc0}, {0xffc12345, 0xffc1}};
  for (const auto& c : cases) {
    float value;
    memcpy(&value, &c.bits, 4);
    EXPECT_EQ(bf16_from_float(value), c.expected) << std::hex << c.bits;
  }
}

TEST_F(CommandLine, ConvertKeepsWhatIsNotTrained) {
  const std::string golden = "dev/test/golden/f_lsh";
  const Outcome there = run("data/convert " + golden + " " + in("there"));
  ASSERT_EQ(there.exit_status, 0) << there.err;
  SafetensorsFile before(golden + "/model.safetensors"), after(in("there") + "/model.safetensors");
  ASSERT_EQ(after.tensors().size(), before.tensors().size());
  for (const SafetensorsTensor& tensor : after.tensors()) {
    const auto same = std::find_if(before.tensors().begin(), before.tensors().end(),
                                   [&](const SafetensorsTensor& other) { return other.name == tensor.name; });
    ASSERT_NE(same, before.tensors().end()) << tensor.name;
    std::vector<float> values(size_t(tensor.num_elements())), expected(values.size());
    after.read_f32(tensor, values.data());
    before.read_f32(*same, expected.data());
    EXPECT_EQ(values, expected) << tensor.name;
  }
}

TEST_F(CommandLine, ConvertCountsParametersAsTheTrainer) {
  write_model(in("llama"), 4, 32, 61, "rmsnorm rope swiglu gqa(2)");
  for (const auto& [model, option] :
       {std::pair(std::string("dev/test/golden/paper_default"), ""), {in("llama"), "--llama "}}) {
    const Outcome told = run(trainer + "-e " + model + " -t 4 -b 1 --dry-run"),
                  converted = run("data/convert " + std::string(option) + model + " " + in("out"));
    ASSERT_EQ(told.exit_status + converted.exit_status, 0) << told.err << converted.err;
    const std::string key = "parameters: ";
    const size_t at = told.out.find(key) + key.size();
    const std::string count = told.out.substr(at, told.out.find_first_not_of("0123456789", at) - at);
    EXPECT_NE(converted.out.find(": " + count + " parameters, "), std::string::npos) << count << "\n" << converted.out;
    fs::remove_all(in("out"));
  }
}

TEST_F(CommandLine, ConvertGoesThereAndBack) {
  const std::string golden = plain + " ";
  ASSERT_EQ(run("data/convert " + golden + in("model.bin")).exit_status, 0);
  const Outcome back = run("data/convert " + in("model.bin") + " " + in("back"));
  ASSERT_EQ(back.exit_status, 0) << back.err;
  EXPECT_NE(back.out.find("has no vocabulary; as a model of 257 tokens it is written with that of bytes"),
            std::string::npos)
      << back.out;
  EXPECT_NE(back.out.find("218560 parameters, 4 layers, 4 heads, 64 channels, vocabulary 257 (written with it)"),
            std::string::npos)
      << back.out;
  EXPECT_EQ(names_in(in("back")), (std::set<std::string>{"config.json", "generation_config.json", "model.safetensors",
                                                         "tokenizer.json", "tokenizer_config.json"}));
  for (const char* name : {"back/config.json", "back/generation_config.json"})
    EXPECT_EQ(nlohmann::json::parse(read_file(in(name))).at("eos_token_id"), 256) << name;
  EXPECT_EQ(FolderModel(in("back")).values, FolderModel(plain).values);
  const Outcome gguf = run("data/convert " + in("back/") + " " + in("model.gguf") + " --type bf16");
  ASSERT_EQ(gguf.exit_status, 0) << gguf.err;
  EXPECT_NE(gguf.out.find("llama.cpp of March 2025 or later"), std::string::npos) << gguf.out;
  EXPECT_EQ(back.out.find("llama.cpp"), std::string::npos) << back.out;
  EXPECT_EQ(GgufReader(in("model.gguf")).metadata.at("tokenizer.ggml.model"), "gpt2");
}

// 43 tokens more than the vocabulary of bytes has.
TEST_F(CommandLine, ConvertTakesPaddedVocabularies) {
  write_model(in("padded"), /*heads=*/2, /*channels=*/16, /*vocab_size=*/300);
  const std::string command = "data/convert " + in("padded") + " ";
  for (const char* out : {"model.gguf", "folder"}) {
    const Outcome o = run(command + in(out) + " --tokenizer bytes");
    EXPECT_EQ(o.exit_status, 0) << o.err;
    EXPECT_NE(o.out.find("vocabulary 300 (written with it)"), std::string::npos) << o.out;
  }
  const GgufReader file(in("model.gguf"));
  const std::vector<std::string> tokens = file.metadata.at("tokenizer.ggml.tokens");
  EXPECT_EQ(tokens.size(), 300u);
  EXPECT_EQ(std::set<std::string>(tokens.begin(), tokens.end()).size(), 300u) << "llama.cpp takes no name twice";
  const std::vector<int> types = file.metadata.at("tokenizer.ggml.token_type");
  EXPECT_EQ(types.at(255), 1);
  EXPECT_EQ(types.at(256), 3) << "the end of a text";
  EXPECT_EQ(std::vector<int>(types.begin() + 257, types.end()), std::vector<int>(43, 5)) << "unused";
}

TEST_F(CommandLine, ConvertRefusesAndLeavesNothing) {
  write("text.bin", "no model"), write("q.jsonl", "");
  fs::copy(plain, in("eps"));
  json config = json::parse(read_file(in("eps/config.json")));
  config["layer_norm_epsilon"] = 0.01;
  write("eps/config.json", config.dump());
  const struct {
    std::string arguments, message;
  } cases[] = {{in("text.bin") + " " + in("out"), "neither a model's folder nor a model of llm.c"},
               {in("nowhere") + " " + in("out"), "neither a model's folder nor a model of llm.c"},
               {plain + " " + in("text.bin"), "exists already"},
               {plain + " " + in("out") + " --type bf16", "a folder has float32 weights"},
               {plain + " " + in("out") + " --type int8", "--type"},
               {"dev/test/golden/w_gate " + in("out.bin"), "the model's wiring is gate; llm.c knows plain GPT-2 only"},
               {"dev/test/golden/w_gate " + in("out.gguf"), "the model's wiring is gate; Llama's architecture has no "
                                                            "gate"},
               {"dev/test/golden/f_relative " + in("out.bin"), "wiring is relative sla(2,2); llm.c knows plain"},
               {"dev/test/golden/f_memory " + in("out.gguf"), "wiring is memory(24) relative; Llama's architecture has "
                                                              "no memory"},
               {"dev/test/golden/a_alibi " + in("out.gguf"), "Llama's architecture has no alibi"},
               {"dev/test/golden/a_sinks " + in("out.gguf"), "Llama's architecture has no sinks"},
               {"dev/test/golden/a_silu " + in("out.gguf"), "Llama's architecture has no silu"},
               {plain + " " + in("missing/out.gguf"), "cannot be written"},
               {plain + " /dev/full/out", ""},
               {in("eps") + " " + in("out.bin"), "layer_norm_epsilon is 0.01; a model of llm.c has 1e-5"},
               {in("q.jsonl") + " " + in("q.bin") + " --tokenizer bytes --llama", "questions have no weights"},
               {in("q.jsonl") + " " + in("q.bin") + " --tokenizer bytes --type bf16", "questions have no weights"},
               {plain, "OUT"}};
  for (const auto& c : cases) {
    const Outcome o = run("data/convert " + c.arguments);
    EXPECT_EQ(o.exit_status, 1) << c.arguments;
    EXPECT_EQ(o.err.rfind("error: ", 0), 0u) << o.err;
    EXPECT_NE(o.err.find(c.message), std::string::npos) << o.err;
  }
  for (const char* out : {"out", "out.bin", "out.gguf"}) {  // a disk that fills up
    const Outcome o = run("ulimit -f 64; data/convert " + plain + " " + in(out));
    EXPECT_EQ(o.exit_status, 1) << out;
    EXPECT_EQ(o.err.rfind("error: ", 0), 0u) << o.err;
  }
  EXPECT_EQ(names_in(folder), (std::set<std::string>{"text.bin", "q.jsonl", "eps", "stdout", "stderr"}));
}

TEST_F(CommandLine, ConvertTakesNoVocabularyWhereNoneIsNamed) {
  ASSERT_EQ(run("data/convert " + plain + " " + in("out") + " --tokenizer none").exit_status, 0);
  EXPECT_FALSE(fs::exists(in("out/tokenizer.json")));
}

#include "llmc_file.h"
#include <cstring>
#include <filesystem>
#include <fstream>
#include "llmc/base/bf16_bits.h"
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/formats/named_tensors.h"

static constexpr int32_t model_magic = 20240326;
static constexpr int64_t vocab_multiple = 128;

struct Header {
  int32_t magic, version, max_seq_len, vocab_size, num_layers, num_heads, channels, padded_vocab_size;
  int32_t zeros[248];
};
static_assert(sizeof(Header) == 1024, "256 int32");

static int64_t element_bytes(LlmcType type) { return type == LlmcType::fp32 ? 4 : 2; }
static int version_of(LlmcType type) { return type == LlmcType::fp32 ? 3 : 5; }

static std::vector<std::string> tensor_order(int num_layers) {
  std::vector<std::string> names = {"wte.weight", "wpe.weight"};
  for (const std::string& sublayer : sublayer_names)
    for (const char* part : {".weight", ".bias"})
      for (int l = 0; l < num_layers; l++) names.push_back("h." + std::to_string(l) + "." + sublayer + part);
  names.insert(names.end(), {"ln_f.weight", "ln_f.bias"});
  return names;
}

static bool read_header(const std::string& path, Header& header) {
  if (magic_number_of(path) != model_magic) return false;  // to open a pipe would block
  std::ifstream file(path, std::ios::binary);
  return bool(file.read(reinterpret_cast<char*>(&header), sizeof header));
}

bool is_llmc_file(const std::string& path) {
  Header header;
  return read_header(path, header);
}

// The number of bytes that a file with this header has; in double, which no header can overflow.
static double expected_bytes(const Header& h, LlmcType type) {
  const double C = h.channels, parameters = (double(h.padded_vocab_size) + h.max_seq_len + 2) * C +
                                            h.num_layers * (12 * C * C + 13 * C);
  return sizeof(Header) + parameters * double(element_bytes(type));
}

static LlmcType type_of(const std::string& path, const Header& header) {
  if (header.version == version_of(LlmcType::fp32)) return LlmcType::fp32;
  if (header.version == version_of(LlmcType::bf16)) return LlmcType::bf16;
  user_error("%s: a model of llm.c of version %d; known are 3 (fp32) and 5 (bf16)", path.c_str(), header.version);
}

static Header checked_header(const std::string& path) {
  Header h;
  if (!read_header(path, h))
    user_error("%s: is no model of llm.c: it does not begin with %d", path.c_str(), model_magic);
  const LlmcType type = type_of(path, h);
  for (int32_t value : {h.max_seq_len, h.vocab_size, h.num_layers, h.num_heads, h.channels})
    if (value < 1) user_error("%s: the header's numbers make no model; copy the file again", path.c_str());
  if (h.padded_vocab_size < h.vocab_size)
    user_error("%s: the padded vocabulary is smaller than the vocabulary", path.c_str());
  std::error_code error;
  const double bytes = double(std::filesystem::file_size(path, error)), expected = expected_bytes(h, type);
  if (bytes != expected)
    user_error("%s: has %.0f bytes, but its header describes a model of %.0f; copy the file again", path.c_str(), bytes,
               expected);
  return h;
}

ModelConfig read_llmc_config(const std::string& path) {
  const Header h = checked_header(path);
  ModelConfig c;
  c.num_layers = h.num_layers, c.num_heads = h.num_heads, c.channels = h.channels;
  c.vocab_size = h.vocab_size, c.max_seq_len = h.max_seq_len;
  try {
    validate(c);
  } catch (const UserError& e) { user_error("%s: %s", path.c_str(), e.what()); }
  return c;
}

void read_llmc_weights(const std::string& path, const ModelConfig& config, const ParameterTable& table,
                       const StoreTensor& store) {
  const Header header = checked_header(path);
  const LlmcType type = type_of(path, header);
  const NamedTensors tensors(config, table, "llm.c");
  std::ifstream file(path, std::ios::binary);
  file.seekg(sizeof(Header));
  std::vector<char> bytes;
  std::vector<float> values;
  for (const std::string& name : tensor_order(config.num_layers)) {
    const int64_t count =
        name == "wte.weight" ? int64_t(header.padded_vocab_size) * config.channels : tensors.size(name);
    bytes.resize(size_t(count * element_bytes(type)));
    if (!file.read(bytes.data(), std::streamsize(bytes.size()))) user_error("%s: cannot be read", path.c_str());
    values.resize(size_t(count));
    for (int64_t i = 0; i < count; i++) {
      uint16_t half;
      if (type == LlmcType::fp32) memcpy(&values[i], &bytes[i * 4], 4);
      else memcpy(&half, &bytes[i * 2], 2), values[i] = float_from_bf16(half);
    }
    store(tensors.index.at(name), values.data());  // of wte the first rows
  }
}

void write_llmc_file(const std::string& path, const ModelConfig& c, const ParameterTable& table,
                     const FetchTensor& fetch, LlmcType type) {
  const NamedTensors tensors(c, table, "llm.c");
  const int64_t padded = (c.vocab_size + vocab_multiple - 1) / vocab_multiple * vocab_multiple;
  if (float(c.layer_norm_eps) != 1e-5f)
    user_error("layer_norm_epsilon is %g; a model of llm.c has 1e-5", double(c.layer_norm_eps));
  check_free_name(path);
  OutputFile file(path);
  const Header header = {model_magic,  version_of(type), c.max_seq_len,
                         c.vocab_size, c.num_layers,     c.num_heads,
                         c.channels,   int32_t(padded),  {}};
  file.write(&header, sizeof header);
  std::vector<uint16_t> halves;
  for (const std::string& name : tensor_order(c.num_layers)) {
    std::vector<float> values = tensors.fetch(name, fetch);
    if (name == "wte.weight") values.resize(size_t(padded * c.channels), 0.0f);
    if (type == LlmcType::fp32) {
      file.write(values.data(), values.size() * sizeof(float));
      continue;
    }
    halves.resize(values.size());
    for (size_t i = 0; i < values.size(); i++) halves[i] = bf16_from_float(values[i]);
    file.write(halves.data(), halves.size() * sizeof(uint16_t));
  }
  file.finish();
}

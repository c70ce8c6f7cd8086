#include "config_json.h"
#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include "llmc/io/model_file.h"
#include "llmc/utils/embed.h"
#include "llmc/utils/files.h"
#include "llmc/utils/json.h"
#include "llmc/utils/error.h"
#include "parameters.h"

using json = nlohmann::ordered_json;

// config[key], or the fallback where there is no such key and a fallback is given.
template <class T>
static T config_value(const json& config, const std::string& path, const char* key, const T* fallback) {
  auto it = config.find(key);
  if (it == config.end() || it->is_null()) {
    if (fallback != nullptr) return *fallback;
    user_error("%s: no \"%s\"; a GPT-2 config has one", path.c_str(), key);
  }
  bool fits = std::is_same_v<T, bool> ? it->is_boolean()
              : std::is_same_v<T, int>
                  ? it->is_number_integer() && it->get<double>() >= 0 && it->get<double>() < 1 << 30
              : std::is_same_v<T, std::string> ? it->is_string()
                                               : it->is_number();
  if (!fits)
    user_error("%s: \"%s\" is %s, which is not a value for it", path.c_str(), key, it->dump().substr(0, 80).c_str());
  return it->get<T>();
}

// Keys of Hugging Face's GPT-2 that would make it another function.
static void check_known_function(const json& config, const std::string& path, const ModelConfig& c) {
  auto optional = [&](const char* key, auto fallback) { return config_value(config, path, key, &fallback); };
  const std::string type = optional("model_type", std::string("gpt2"));
  if (type != "gpt2" && type != "gpt2_sla")
    user_error("%s: model_type is \"%s\"; only gpt2 and gpt2_sla are known", path.c_str(), type.c_str());
  const std::string act = optional("activation_function", std::string("gelu_new"));
  if (act != "gelu_new" && act != "gelu_pytorch_tanh")
    user_error("%s: activation_function is \"%s\"; only gelu_new is known", path.c_str(), act.c_str());
  const int hidden = int(std::min<int64_t>(c.hidden_size(), INT_MAX));
  if (optional("n_inner", hidden) != hidden)
    user_error("%s: n_inner is not %d, as the wiring %s has it", path.c_str(), hidden, c.wiring.text.c_str());
  if (!optional("scale_attn_weights", true))
    user_error("%s: scale_attn_weights is false; scores are scaled by 1/sqrt(head size) here", path.c_str());
  for (const char* key : {"scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"})
    if (optional(key, false)) user_error("%s: %s is true; it is not known", path.c_str(), key);
  const bool untied = c.whole_model().untied, tied = optional("tie_word_embeddings", !untied);
  if (tied == untied)
    user_error("%s: tie_word_embeddings is %s, but the wiring is %s", path.c_str(), tied ? "true" : "false",
               c.wiring.text.c_str());
  if (optional("add_cross_attention", false))
    user_error("%s: add_cross_attention is true; it is not known", path.c_str());
}

// The wiring in a config.json: the text "wiring", or the paper's two numbers num_skip_layer and num_skip_head. A config
// with neither is plain GPT-2.
static Wiring config_wiring(const json& config, const std::string& path) {
  const int none = 0;
  const std::string no_text;
  const int n_l = config_value(config, path, "num_skip_layer", &none),
            n_h = config_value(config, path, "num_skip_head", &none);
  const std::string text = config_value(config, path, "wiring", &no_text);
  const Wiring numbers = skip_layer_wiring(n_l, n_h);
  if (!config.contains("wiring")) return numbers;
  const Wiring wiring = parse_wiring(text);
  if (n_h > 0 && canonical_text(numbers) != canonical_text(wiring))
    user_error("\"wiring\" is \"%s\", but num_skip_layer and num_skip_head mean %s", text.c_str(),
               numbers.text.c_str());
  return wiring;
}

// Throws UserError if the files of weights beside a config.json are too small for what it describes, of which each
// parameter takes two bytes or more: before memory is planned and filled for the weights. Files that are missing are
// the error of who reads them.
static void check_size_of_weights(const std::string& folder, const std::string& path, const ModelConfig& c) {
  double bytes = 0;
  const std::vector<std::string> files = weight_files(folder);
  for (const std::string& file : files) {
    std::error_code error;
    bytes += double(std::filesystem::file_size(file, error));
    if (error) return;
  }
  const double least = least_parameters(c, 0);
  if (!files.empty() && 2 * least > bytes)
    user_error("%s: %d layers of %d channels and a vocabulary of %d have at least %.0f parameters, which %s%s, of %.0f "
               "bytes, cannot hold; fetch both again, of the same model",
               path.c_str(), c.num_layers, c.channels, c.vocab_size, least, files.front().c_str(),
               files.size() > 1 ? " and those beside it" : "", bytes);
}

ModelConfig read_config_json(const std::string& folder) {
  const std::string path = folder + "/config.json";
  const std::optional<std::string> text = try_read_file(path);
  if (!text)
    user_error("%s: cannot be read: %s; a model is a folder with config.json and model.safetensors", path.c_str(),
               strerror(errno));
  const json config = parse_json(*text);
  if (!config.is_object()) user_error("%s: not a JSON object, or nested deeper than a config is", path.c_str());

  ModelConfig c;
  visit_fields(c, [&](const ConfigField& field, auto& value) {
    const auto fallback = value;
    value = config_value(config, path, field.json, field.required ? nullptr : &fallback);
  });
  visit_dropout(c, [&](const char* key, double& p) {
    const double none = 0;
    p = config_value(config, path, key, &none);
    if (!(0 <= p && p < 1)) user_error("%s: \"%s\" is %g; it must be a share, from 0 to below 1", path.c_str(), key, p);
  });
  if (const auto end = config.find("eos_token_id"); end != config.end() && end->is_number_integer())
    c.end_of_text = config_value<int>(config, path, "eos_token_id", nullptr);
  try {
    c.wiring = config_wiring(config, path);
    validate(c);
    if (c.whole_model().documents && (c.end_of_text < 0 || c.end_of_text >= c.vocab_size))
      user_error("wiring \"%s\": documents begin at the token \"eos_token_id\", which must be one of the vocabulary's",
                 c.wiring.text.c_str());
  } catch (const UserError& e) { user_error("%s: %s", path.c_str(), e.what()); }
  check_known_function(config, path, c);
  check_size_of_weights(folder, path, c);
  return c;
}

std::string config_json(const ModelConfig& c, std::optional<int> end_of_text) {
  const bool is_gpt2 = is_hugging_face_gpt2(c);
  json config = {{"architectures", {is_gpt2 ? "GPT2LMHeadModel" : "GPT2SLAForCausalLM"}},
                 {"model_type", is_gpt2 ? "gpt2" : "gpt2_sla"},
                 {"activation_function", "gelu_new"},
                 {"tie_word_embeddings", !c.whole_model().untied}};
  if (!is_gpt2)
    config["auto_map"] = {{"AutoConfig", "configuration_gpt2_sla.GPT2SLAConfig"},
                          {"AutoModelForCausalLM", "modeling_gpt2_sla.GPT2SLAForCausalLM"}};
  visit_fields(c, [&](const ConfigField& field, const auto& value) { config[field.json] = value; });
  visit_dropout(c, [&](const char* key, double p) { config[key] = p; });
  config["wiring"] = c.wiring.text;
  const int of_gpt2 = 50256;  // what transformers takes for the end of text where a config of the type "gpt2" has none
  if (c.whole_model().documents) end_of_text = c.end_of_text;
  for (const char* key : {"bos_token_id", "eos_token_id"}) {
    if (end_of_text) config[key] = *end_of_text;
    else if (c.vocab_size <= of_gpt2) config[key] = nullptr;
  }
  return config.dump(1) + "\n";
}

// The files of model/huggingface.
EMBED(sla_gpt2_py, "llmc/model/huggingface/gpt2_sla.py");
EMBED(sla_configuration_py, "llmc/model/huggingface/configuration_gpt2_sla.py");
EMBED(sla_modeling_py, "llmc/model/huggingface/modeling_gpt2_sla.py");

std::vector<TextFile> model_text_files(const ModelConfig& c, std::optional<int> end_of_text) {
  std::vector<TextFile> files = {{"config.json", config_json(c, end_of_text)}};
  if (end_of_text) {
    const json generation = {{"bos_token_id", *end_of_text}, {"eos_token_id", *end_of_text}};
    files.push_back({"generation_config.json", generation.dump(1) + "\n"});
  }
  if (is_hugging_face_gpt2(c)) return files;
  files.push_back({"gpt2_sla.py", {sla_gpt2_py, sla_gpt2_py_end}});
  files.push_back({"configuration_gpt2_sla.py", {sla_configuration_py, sla_configuration_py_end}});
  files.push_back({"modeling_gpt2_sla.py", {sla_modeling_py, sla_modeling_py_end}});
  return files;
}

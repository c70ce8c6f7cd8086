#include "config_json.h"
#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include "llmc/formats/model_file.h"
#include "llmc/base/embed.h"
#include "llmc/base/files.h"
#include "llmc/base/json.h"
#include "llmc/base/error.h"
#include "llama_file.h"

using json = nlohmann::ordered_json;

static const char document_token[] = "document_token_id";  // the key of ModelConfig::end_of_text

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

// Throws UserError unless config.json, FOLDER's, is of the model_type gpt2 or gpt2_sla.
static void check_model_type(const std::string& folder, const nlohmann::ordered_json& config) {
  const std::string path = folder + "/config.json", gpt2 = "gpt2",
                    type = config_value(config, path, "model_type", &gpt2);
  if (type == "llama")
    user_error("%s: model_type is \"llama\"; convert it first: data/convert %s NEW_FOLDER", path, folder);
  if (type != "gpt2" && type != "gpt2_sla")
    user_error("%s: model_type is \"%s\"; only gpt2 and gpt2_sla are known, and llama to data/convert", path, type);
}

void refuse_other_function(const std::string& path, const nlohmann::ordered_json& config) {
  for (const char* key : {"quantization_config", "pruned_heads"})
    if (const auto it = config.find(key); it != config.end() && !it->empty() && *it != json(false))
      user_error("%s: %s is %s; it is not known", path, key, it->dump().substr(0, 80));
}

// Keys of Hugging Face's GPT-2 that would make it another function.
static void check_known_function(const json& config, const std::string& path, const ModelConfig& c) {
  auto optional = [&](const char* key, auto fallback) { return config_value(config, path, key, &fallback); };
  const std::string act = optional("activation_function", std::string("gelu_new"));
  if (act != "gelu_new" && act != "gelu_pytorch_tanh")
    user_error("%s: activation_function is \"%s\"; only gelu_new is known", path.c_str(), act.c_str());
  const int hidden = int(std::min<int64_t>(c.hidden_size(), INT_MAX));
  if (optional("n_inner", hidden) != hidden)
    user_error("%s: n_inner is not %d, as the wiring %s has it", path.c_str(), hidden, c.wiring.text.c_str());
  if (!optional("scale_attn_weights", true))
    user_error("%s: scale_attn_weights is false; scores are scaled by 1/sqrt(head size) here", path.c_str());
  for (const char* key : {"scale_attn_by_inverse_layer_idx", "add_cross_attention"})
    if (optional(key, false)) user_error("%s: %s is true; it is not known", path.c_str(), key);
  refuse_other_function(path, config);
  const bool untied = c.whole_model().untied, tied = optional("tie_word_embeddings", !untied);
  if (tied == untied)
    user_error("%s: tie_word_embeddings is %s, but the wiring is %s", path.c_str(), tied ? "true" : "false",
               c.wiring.text.c_str());
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

// Throws UserError if the files of weights beside a config.json are too small for the parameters that it describes, at
// two bytes each: before memory is planned and filled for the weights. A missing file is left to the reader of the
// weights to report.
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
  const json config = parse_json_or_throw(*text, path + ":");
  if (!config.is_object()) user_error("%s: not a JSON object", path.c_str());

  check_model_type(folder, config);
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
  read_special_tokens(folder, c);
  try {
    c.wiring = config_wiring(config, path);
    validate(c);
    if (c.whole_model().documents) {
      const int end = c.special.eos.empty() ? -1 : c.special.eos[0];
      c.end_of_text = config_value(config, path, document_token, &end);
      if (c.end_of_text < 0 || c.end_of_text >= c.vocab_size)
        user_error("wiring \"%s\": documents begin at the token \"%s\" or, without it, \"eos_token_id\", which must "
                   "be one of the vocabulary's",
                   c.wiring.text, document_token);
    }
  } catch (const UserError& e) { user_error("%s: %s", path.c_str(), e.what()); }
  check_known_function(config, path, c);
  check_size_of_weights(folder, path, c);
  return c;
}

// {"bos": 1, ...} without what is none; several ends are a list, as in files.
static void read_ids(const json& config, const std::string& path, int vocab_size, SpecialTokens& tokens) {
  auto ids_of = [&](const char* key) {
    std::vector<int> ids;
    const json found = config.value(key, json()), list = found.is_array() ? found : json::array({found});
    for (const json& id : list) {
      if (!id.is_number_integer() && !id.is_null())
        user_error("%s: \"%s\" is %s, which is no token's id", path, key, found.dump().substr(0, 80));
      if (!id.is_null() && id >= 0 && id < vocab_size) ids.push_back(id);
    }
    return ids;
  };
  auto one_of = [&](const char* key) {
    const std::vector<int> ids = ids_of(key);
    return ids.empty() ? -1 : ids[0];
  };
  tokens = {one_of("bos_token_id"), one_of("pad_token_id"), ids_of("eos_token_id")};
}

void read_special_tokens(const std::string& folder, ModelConfig& c) {
  for (SpecialTokens* tokens : {&c.special, &c.generation}) {
    const std::string path = folder + (tokens == &c.special ? "/config.json" : "/generation_config.json");
    const json config = parse_json(try_read_file(path).value_or("{}"));
    if (config.is_object()) read_ids(config, path, c.vocab_size, *tokens);
  }
}

std::string take_end_of_text(ModelConfig& c, int end_of_text, bool is_new) {
  std::string said;
  if (is_new && !c.special.eos.empty() && !c.ends_text(end_of_text)) {
    said = format("the model's texts ended at token %d (eos_token_id); the vocabulary is new to it, and they end at %d "
                  "from now on; with --tokenizer none the model's own stays",
                  c.special.eos[0], end_of_text);
    c.special = c.generation = {};
  }
  if (c.special.eos.empty()) c.special.eos = c.generation.eos;
  if (c.special.eos.empty()) c.special = {end_of_text, c.special.pad, {end_of_text}};
  return said;
}

json special_tokens_json(const ModelConfig& c, bool is_generation) {
  SpecialTokens tokens = is_generation ? c.generation : c.special;
  if (is_generation) {  // generate() looks no further where there is this file
    if (tokens.bos < 0) tokens.bos = c.special.bos;
    if (tokens.eos.empty()) tokens.eos = c.special.eos;
    if (tokens.pad < 0) tokens.pad = c.special.pad;
    if (tokens.pad < 0 && !tokens.eos.empty()) tokens.pad = tokens.eos[0];
  }
  json ids = json::object();
  if (tokens.bos >= 0) ids["bos_token_id"] = tokens.bos;
  if (tokens.eos.size() > 1) ids["eos_token_id"] = tokens.eos;
  else if (!tokens.eos.empty()) ids["eos_token_id"] = tokens.eos[0];
  if (tokens.pad >= 0) ids["pad_token_id"] = tokens.pad;
  return ids;
}

std::string config_json(const ModelConfig& c) {
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
  if (c.vocab_size <= of_gpt2) config["bos_token_id"] = config["eos_token_id"] = nullptr;
  config.update(special_tokens_json(c, /*is_generation=*/false));
  if (c.whole_model().documents) config[document_token] = c.end_of_text;
  return config.dump(1) + "\n";
}

// The files of formats/huggingface.
EMBED(sla_gpt2_py, "llmc/formats/huggingface/gpt2_sla.py");
EMBED(sla_configuration_py, "llmc/formats/huggingface/configuration_gpt2_sla.py");
EMBED(sla_modeling_py, "llmc/formats/huggingface/modeling_gpt2_sla.py");

std::vector<TextFile> model_text_files(const ModelConfig& c, bool is_llama) {
  std::vector<TextFile> files = {{"config.json", is_llama ? llama_config_json(c) : config_json(c)}};
  if (const json tokens = special_tokens_json(c, /*is_generation=*/true); !tokens.empty())
    files.push_back({"generation_config.json", tokens.dump(1) + "\n"});
  if (is_llama || is_hugging_face_gpt2(c)) return files;
  files.push_back({"gpt2_sla.py", {sla_gpt2_py, sla_gpt2_py_end}});
  files.push_back({"configuration_gpt2_sla.py", {sla_configuration_py, sla_configuration_py_end}});
  files.push_back({"modeling_gpt2_sla.py", {sla_modeling_py, sla_modeling_py_end}});
  return files;
}

std::vector<TextFile> tokenizer_text_files(const ModelConfig& c, const std::string& tokenizer_json) {
  if (tokenizer_json.empty()) return {};
  json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                 {"model_max_length", c.max_seq_len},
                 {"clean_up_tokenization_spaces", false},
                 {"model_input_names", {"input_ids", "attention_mask"}}};  // there are no token_type_ids
  const json tokenizer = json::parse(tokenizer_json), tokens = special_tokens_json(c, /*is_generation=*/true);
  for (const json& token : tokenizer.at("added_tokens"))
    for (const auto& [key, id] : tokens.items())
      if ((id.is_array() ? id[0] : id) == token.at("id"))
        config[key.substr(0, key.size() - strlen("_id"))] = token.at("content");
  return {{"tokenizer.json", tokenizer_json}, {"tokenizer_config.json", config.dump(1) + "\n"}};
}

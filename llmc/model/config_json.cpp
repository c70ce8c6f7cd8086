#include "config_json.h"
#include <fstream>                 // std::ifstream
#include <nlohmann/json.hpp>       // nlohmann::ordered_json
#include "llmc/utils/files.h"  // write_file_durably
#include "llmc/utils/error.h"      // user_error

using json = nlohmann::ordered_json;

// config[key], or the fallback where there is no such key and a fallback is given.
template <class T>
static T config_value(const json& config, const std::string& path, const char* key, const T* fallback) {
  auto it = config.find(key);
  if (it == config.end() || it->is_null()) {
    if (fallback != nullptr) return *fallback;
    user_error("%s: no \"%s\"; a GPT-2 config has one", path.c_str(), key);
  }
  bool fits = std::is_same_v<T, bool>  ? it->is_boolean()
              : std::is_same_v<T, int> ? it->is_number_integer() && it->get<double>() >= 0 && it->get<double>() < 1 << 30
              : std::is_same_v<T, std::string> ? it->is_string()
                                               : it->is_number();
  if (!fits) user_error("%s: \"%s\" is %s, which is not a value for it", path.c_str(), key, it->dump().substr(0, 80).c_str());
  return it->get<T>();
}

ModelConfig read_config_json(const std::string& folder) {
  const std::string path = folder + "/config.json";
  std::ifstream file(path);
  if (!file) user_error("%s: cannot be read; a model is a folder with config.json and model.safetensors", path.c_str());
  json config = json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) user_error("%s: not a JSON object", path.c_str());

  auto required = [&](const char* key) { return config_value<int>(config, path, key, nullptr); };
  auto optional = [&](const char* key, auto fallback) { return config_value(config, path, key, &fallback); };
  ModelConfig c;
  c.num_layers = required("n_layer");
  c.num_heads = required("n_head");
  c.channels = required("n_embd");
  c.max_seq_len = required("n_positions");
  c.vocab_size = required("vocab_size");
  c.layer_norm_eps = optional("layer_norm_epsilon", 1e-5);
  c.bias = optional("bias", true);
  c.num_skip_layer = optional("num_skip_layer", 0);
  c.num_skip_head = optional("num_skip_head", 0);

  // Keys of Hugging Face's GPT-2 that would make it another function. (Dropout is none: it is off here.)
  std::string type = optional("model_type", std::string("gpt2"));
  if (type != "gpt2") user_error("%s: model_type is \"%s\"; only gpt2 is known", path.c_str(), type.c_str());
  std::string act = optional("activation_function", std::string("gelu_new"));
  if (act != "gelu_new" && act != "gelu_pytorch_tanh")
    user_error("%s: activation_function is \"%s\"; only gelu_new is known", path.c_str(), act.c_str());
  if (optional("n_inner", 4 * c.channels) != 4 * c.channels)
    user_error("%s: n_inner is not 4 * n_embd; only that is known", path.c_str());
  if (!optional("scale_attn_weights", true) || optional("scale_attn_by_inverse_layer_idx", false))
    user_error("%s: attention scores are scaled otherwise than by 1/sqrt(head size); only that is known", path.c_str());
  if (!optional("tie_word_embeddings", true))
    user_error("%s: tie_word_embeddings is false; only a tied lm_head is known", path.c_str());
  if (optional("add_cross_attention", false)) user_error("%s: add_cross_attention is true; it is not known", path.c_str());
  try {
    validate(c);
  } catch (const UserError& e) {
    user_error("%s: %s", path.c_str(), e.what());
  }
  return c;
}

std::string write_config_json(const std::string& path, const ModelConfig& c) {
  json config = {{"architectures", {"GPT2LMHeadModel"}},
                 {"model_type", "gpt2"},
                 {"n_layer", c.num_layers},
                 {"n_head", c.num_heads},
                 {"n_embd", c.channels},
                 {"n_positions", c.max_seq_len},
                 {"vocab_size", c.vocab_size},
                 {"layer_norm_epsilon", c.layer_norm_eps},
                 {"activation_function", "gelu_new"},
                 {"tie_word_embeddings", true},
                 {"bias", c.bias},
                 {"num_skip_layer", c.num_skip_layer},
                 {"num_skip_head", c.num_skip_head}};
  const std::string text = config.dump(1) + "\n";
  write_file_durably(path, text);
  return text;
}

#include "llama_file.h"
#include <nlohmann/json.hpp>
#include "config_json.h"
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/base/json.h"
#include "llmc/formats/named_tensors.h"

using json = nlohmann::ordered_json;

void check_is_llama(const ModelConfig& c) {
  for (const WiringTerm& term : c.wiring.terms) {
    const std::string name = info_of(term).syntax.name();
    bool is_known = false;
    for (const char* known : {"rmsnorm", "rope", "swiglu", "gqa", "untied"}) is_known = is_known || name == known;
    if (!is_known)
      user_error("the model's wiring is %s; Llama's architecture has no %s", c.wiring.text.c_str(), name.c_str());
  }
  const WiringTable table = c.whole_model();
  if (!table.rmsnorm || table.rope == 0 || table.activation != Activation::swiglu)
    user_error("the model's wiring is %s; Llama's architecture is rmsnorm rope swiglu", c.wiring.text.c_str());
  if (c.bias) user_error("the model has biases, and Llama's architecture has none; train it with --no-bias");
}

bool is_llama_folder(const std::string& folder) {
  const std::optional<std::string> text = try_read_file(folder + "/config.json");
  const json config = text ? parse_json(*text) : json();
  return config.is_object() && config.value("model_type", json()) == "llama";
}

ModelConfig read_llama_config(const std::string& folder) {
  const std::string path = folder + "/config.json";
  const json config = parse_json_or_throw(read_whole_file(path), path + ":");
  if (!config.is_object()) user_error("%s: is not a JSON object", path.c_str());
  auto value = [&](const char* key, const json& fallback) {
    const auto it = config.find(key);
    const json found = it == config.end() || it->is_null() ? fallback : *it;
    const bool fits = fallback.is_number_integer() ? found.is_number_integer() && found >= 0 && found < 1 << 30
                      : fallback.is_number()       ? found.is_number()
                                                   : found.type() == fallback.type();
    if (!fits) user_error("%s: \"%s\" is %s, which is not a value for it", path.c_str(), key, found.dump().c_str());
    return found;
  };
  ModelConfig c;
  c.num_layers = value("num_hidden_layers", 0), c.num_heads = value("num_attention_heads", 0);
  c.channels = value("hidden_size", 0), c.vocab_size = value("vocab_size", 0);
  c.max_seq_len = value("max_position_embeddings", 2048), c.layer_norm_eps = value("rms_norm_eps", 1e-6);
  c.bias = false;
  read_special_tokens(folder, c);
  refuse_other_function(path, config);
  auto refuse_unless = [&](bool holds, const char* key) {
    if (!holds)
      user_error("%s: %s is %s, which is not known", path.c_str(), key, config.value(key, json()).dump().c_str());
  };
  const json act = value("hidden_act", "silu");
  refuse_unless(act == "silu" || act == "swish", "hidden_act");
  for (const char* key : {"attention_bias", "mlp_bias"}) refuse_unless(!value(key, false).get<bool>(), key);
  refuse_unless(value("partial_rotary_factor", 1.0) == 1, "partial_rotary_factor");
  json theta = value("rope_theta", 1e4);
  // Two names of one object, the older one of transformers 4; so are "type" and "rope_type" in it.
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json rope = value(key, json::object());
    for (const char* type : {"type", "rope_type"}) {
      const json found = rope.value(type, json());
      refuse_unless(found.is_null() || found == "default" || (found == "linear" && rope.value("factor", json()) == 1),
                    key);
    }
    for (const auto& [name, of_rope] : rope.items()) {
      refuse_unless(!of_rope.is_object(), key);  // rotations of several kinds
      refuse_unless(name != "partial_rotary_factor" || of_rope.is_null() || of_rope == 1, key);
      if (name == "rope_theta" && !of_rope.is_null()) theta = of_rope;
    }
    refuse_unless(theta.is_number(), key);
  }
  refuse_unless(c.num_heads == 0 || value("head_dim", c.head_size()) == c.head_size(), "head_dim");
  const int kv_heads = value("num_key_value_heads", c.num_heads), hidden = value("intermediate_size", 11008);
  std::string wiring = format("rmsnorm rope(%.12g) swiglu(%d)", theta.get<double>(), hidden);
  if (!value("tie_word_embeddings", false).get<bool>()) wiring += " untied";
  if (kv_heads != c.num_heads) wiring += format(" gqa(%d)", kv_heads);
  try {
    c.wiring = parse_wiring(wiring);
    validate(c);
  } catch (const UserError& e) { user_error("%s: %s", path.c_str(), e.what()); }
  return c;
}

std::string llama_config_json(const ModelConfig& c) {
  const WiringTable table = c.wiring_table();
  json config = {{"architectures", {"LlamaForCausalLM"}},
                 {"model_type", "llama"},
                 {"hidden_act", "silu"},
                 {"vocab_size", c.vocab_size},
                 {"hidden_size", c.channels},
                 {"intermediate_size", c.hidden_size()},
                 {"num_hidden_layers", c.num_layers},
                 {"num_attention_heads", c.num_heads},
                 {"num_key_value_heads", table.num_kv_heads},
                 {"head_dim", c.head_size()},
                 {"max_position_embeddings", c.max_seq_len},
                 {"rms_norm_eps", c.layer_norm_eps},
                 {"rope_theta", table.rope},
                 {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", table.rope}}},
                 {"attention_bias", false},
                 {"mlp_bias", false},
                 {"tie_word_embeddings", !table.untied},
                 {"torch_dtype", "float32"}};
  config["bos_token_id"] = config["eos_token_id"] = nullptr;
  config.update(special_tokens_json(c, /*is_generation=*/false));
  return config.dump(1) + "\n";
}

ParameterTable llama_table(const ModelConfig& c, const ParameterTable& table) {
  ParameterTable view;
  const NamedTensors source(table);
  const auto add = [&](const std::string& name, const std::string& from, int64_t first_row = 0, int64_t rows = 0) {
    TensorSpec tensor = table.tensor(source.index.at(from));
    const int64_t row_elements = tensor.shape.size() == 2 ? tensor.shape[1] : 1;
    tensor.name = name, tensor.offset += size_t(first_row * row_elements) * tensor.element_bytes;
    if (rows > 0) tensor.shape[0] = rows;
    ParameterSpec spec;
    spec.tensor = int(view.layout.tensors.size()), spec.file_shape = tensor.shape;
    view.layout.tensors.push_back(tensor);
    view.specs.push_back(spec);
  };
  const int64_t C = c.channels, KV = int64_t(c.wiring_table().num_kv_heads) * c.head_size(), H = c.hidden_size();
  add("model.embed_tokens.weight", "wte.weight");
  for (int l = 0; l < c.num_layers; l++) {
    const std::string to = "model.layers." + std::to_string(l) + ".", from = "h." + std::to_string(l) + ".";
    add(to + "input_layernorm.weight", from + "ln_1.weight");
    add(to + "self_attn.q_proj.weight", from + "attn.c_attn.weight", 0, C);
    add(to + "self_attn.k_proj.weight", from + "attn.c_attn.weight", C, KV);
    add(to + "self_attn.v_proj.weight", from + "attn.c_attn.weight", C + KV, KV);
    add(to + "self_attn.o_proj.weight", from + "attn.c_proj.weight");
    add(to + "post_attention_layernorm.weight", from + "ln_2.weight");
    add(to + "mlp.gate_proj.weight", from + "mlp.c_fc.weight", 0, H);
    add(to + "mlp.up_proj.weight", from + "mlp.c_fc.weight", H, H);
    add(to + "mlp.down_proj.weight", from + "mlp.c_proj.weight");
  }
  add("model.norm.weight", "ln_f.weight");
  if (c.whole_model().untied) add("lm_head.weight", "lm_head.weight");
  return view;
}

// The description of a model: GPT-2's numbers and the wiring of its attention.
#pragma once
#include <algorithm>
#include <climits>
#include <string>
#include <type_traits>
#include <vector>
#include "llmc/base/arena.h"
#include "llmc/base/error.h"
#include "llmc/base/scalar.h"
#include "llmc/wiring/wiring.h"

// The tokens that begin, end and pad texts, as Hugging Face's config.json and generation_config.json name them.
struct SpecialTokens {
  int bos = -1, pad = -1;  // -1: none
  std::vector<int> eos;    // a text ends at each of them
};

struct ModelConfig {
  int num_layers = 12;     // L
  int num_heads = 12;      // h
  int channels = 768;      // C = h * hs
  int vocab_size = 50257;  // V
  int max_seq_len = 1024;  // the context length: rows of wpe; T may be shorter
  bool bias = true;        // biases in the linear and LayerNorm layers, as nanoGPT's switch
  double layer_norm_eps = 1e-5;
  int end_of_text = -1;               // with `documents` the token that begins each of them; -1: it is not known
  SpecialTokens special, generation;  // config.json's, and the ones that generate() takes instead
  Wiring wiring;
  // Dropout of attention's probabilities, the embeddings and the branches' outputs in the run that trained the model.
  // The model's function does not depend on it.
  double attn_pdrop = 0, embd_pdrop = 0, resid_pdrop = 0;

  int head_size() const { return channels / num_heads; }
  WiringTable wiring_table() const { return ::wiring_table(wiring, num_layers, num_heads); }
  // The wiring's table without layers and heads, for what it says of the model as a whole.
  WiringTable whole_model() const { return ::wiring_table(wiring, 0, 0); }
  bool ends_text(int token) const {
    return std::count(special.eos.begin(), special.eos.end(), token) +
               std::count(generation.eos.begin(), generation.eos.end(), token) >
           0;
  }
  int64_t hidden_size() const { return whole_model().hidden_size(channels); }  // H, of an MLP
  // The most positions of a text that the model can be given: without end where it has a memory.
  int longest_text() const { return whole_model().memory > 0 ? INT_MAX : max_seq_len; }
};

// What there is to say of a field of a model's description, beside its value.
struct ConfigField {
  const char* json;  // its key in config.json: Hugging Face's, where GPT-2 there has the field
  const char* name;  // its key in log.jsonl
  bool required;     // config.json must have it
};

// Calls visit(ConfigField, a reference to the value) for each number of a model's shape: the one list by which configs
// are read, written, compared and logged. `c` may be const. The wiring is not among them.
template <class Config, class Visit>
void visit_fields(Config& c, Visit visit) {
  visit(ConfigField{"n_layer", "num_layers", true}, c.num_layers);
  visit(ConfigField{"n_head", "num_heads", true}, c.num_heads);
  visit(ConfigField{"n_embd", "channels", true}, c.channels);
  visit(ConfigField{"vocab_size", "vocab_size", true}, c.vocab_size);
  visit(ConfigField{"n_positions", "max_seq_len", true}, c.max_seq_len);
  visit(ConfigField{"layer_norm_epsilon", "layer_norm_eps", false}, c.layer_norm_eps);
  visit(ConfigField{"bias", "bias", false}, c.bias);
}

// Calls visit(key in config.json, a reference to the value) for each site's dropout. `c` may be const.
template <class Config, class Visit>
void visit_dropout(Config& c, Visit visit) {
  visit("attn_pdrop", c.attn_pdrop), visit("embd_pdrop", c.embd_pdrop), visit("resid_pdrop", c.resid_pdrop);
}

// Whether transformers' GPT2LMHeadModel computes the model, and so does other code that reads GPT-2's files: then its
// files need no code of ours, and other programs' formats can hold it.
inline bool is_hugging_face_gpt2(const ModelConfig& c) { return c.wiring.is_plain(); }

// A field in which two models differ, by its key in config.json, and both values.
struct FieldDifference {
  const char* json;
  std::string first, second;
};

// The fields, and the wiring, in which two models differ: none for the same model. How a wiring is written makes no
// difference.
inline std::vector<FieldDifference> differences(const ModelConfig& a, const ModelConfig& b) {
  std::vector<FieldDifference> found;
  visit_fields(a, [&](const ConfigField& field, const auto& value) {
    found.push_back({field.json, text_of(Scalar(value)), ""});
  });
  size_t next = 0;
  visit_fields(b, [&](const ConfigField&, const auto& value) { found[next++].second = text_of(Scalar(value)); });
  found.erase(std::remove_if(found.begin(), found.end(), [](const auto& d) { return d.first == d.second; }),
              found.end());
  if (canonical_text(a.wiring) != canonical_text(b.wiring)) found.push_back({"wiring", a.wiring.text, b.wiring.text});
  return found;
}

inline bool same_model(const ModelConfig& a, const ModelConfig& b) { return differences(a, b).empty(); }

// `d12`, `d24`, `d36`, `d48`: GPT-2 by depth (Radford et al. 2019), context length 1,024. `gpt3:768` and so on: the
// GPT-3 series by channels (Brown et al. 2020, table 2.1, and a 384-channel one below it), context length 2,048; that
// table's heads and head size do not multiply to its channels for 1.3B and 13B: here both have heads of 128. Returns
// false for a name that is neither. The wiring is the default.
inline bool config_from_preset(const std::string& name, ModelConfig& config) {
  struct Shape {
    int layers, heads, channels;
  };
  static const Shape gpt2[] = {{12, 12, 768}, {24, 16, 1024}, {36, 20, 1280}, {48, 25, 1600}};
  static const Shape gpt3[] = {{6, 6, 384},    {12, 12, 768},  {24, 16, 1024}, {24, 16, 1536}, {24, 16, 2048},
                               {32, 32, 2560}, {32, 32, 4096}, {40, 40, 5120}, {96, 96, 12288}};
  config = ModelConfig();
  auto take = [&](const Shape& shape, int context_length) {
    config.num_layers = shape.layers;
    config.num_heads = shape.heads;
    config.channels = shape.channels;
    config.max_seq_len = context_length;
    config.wiring = default_wiring(shape.layers, shape.heads);
    return true;
  };
  for (const Shape& shape : gpt2)
    if (name == "d" + std::to_string(shape.layers)) return take(shape, 1024);
  for (const Shape& shape : gpt3)
    if (name == "gpt3:" + std::to_string(shape.channels)) return take(shape, 2048);
  return false;
}

// Throws UserError if the plan of the attentions, which names every head of each, would fill memory and take minutes.
// Trained models have had a thousand layers (DeepNet); with blend and gate a layer has the maps of all below it.
inline void check_plan_size(const ModelConfig& c) {
  constexpr int most_layers = 10000;
  constexpr double most_heads = 1 << 20;
  if (c.num_layers > most_layers)
    user_error("%d layers are more than a model can have, %d; take fewer", c.num_layers, most_layers);
  const double heads = most_attentions(c.wiring, c.num_layers, c.num_heads);
  if (heads > most_heads)
    user_error("%d layers of %d heads with this wiring have %.0f heads of attention, and a model can have %.0f; take "
               "fewer layers or heads",
               c.num_layers, c.num_heads, heads, most_heads);
}

// Throws UserError, with what to do about it, unless the numbers make a model.
inline void validate(const ModelConfig& c) {
  visit_fields(c, [](const ConfigField& field, const auto& value) {
    if constexpr (std::is_same_v<decltype(value), const int&>)
      if (value < 1) user_error("%s is %d; it must be at least 1", field.json, value);
  });
  if (c.vocab_size < 2) user_error("vocab_size is %d; it must be at least 2", c.vocab_size);
  if (c.channels % c.num_heads != 0)
    user_error("%d heads do not divide %d channels; take channels that are a multiple of the heads", c.num_heads,
               c.channels);
  if (!(float(c.layer_norm_eps) > 0 && c.layer_norm_eps <= 1))
    user_error("layer_norm_epsilon is %g; it must be greater than 0, in fp32, and at most 1", c.layer_norm_eps);
  check_plan_size(c);
  validate(c.wiring, c.num_layers, c.num_heads);
  const WiringTable table = c.whole_model();
  if (table.rope > 0 && c.head_size() % 2 != 0)
    user_error("wiring \"%s\": rope rotates pairs of channels, but a head has %d; --channels must be an even multiple "
               "of --heads",
               c.wiring.given, c.head_size());
  if (table.relative && c.channels % 2 != 0)
    user_error("wiring \"%s\": relative has a sine and a cosine for each frequency, but there are %d channels; "
               "--channels must be even",
               c.wiring.given, c.channels);
}

// A lower bound on the number of parameters for any wiring: embeddings, and each layer's projection and MLP, at
// least `least` elements per layer: by default what its tensors take in an arena, at least the alignment each.
inline double least_parameters(const ModelConfig& c,
                               double least = 6 * double(ArenaLayout::alignment) / sizeof(float)) {
  const double C = c.channels;
  const WiringTable table = c.whole_model();
  const double positions = table.learns_positions() ? c.max_seq_len : 0;
  const double of_mlp = C * (double(table.hidden_size(c.channels)) + table.fc_size(c.channels));
  return ((table.untied ? 2.0 : 1.0) * c.vocab_size + positions) * C +
         (table.has_cycles ? table.stored_layers : c.num_layers) * std::max(C * C + of_mlp, least);
}

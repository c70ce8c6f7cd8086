// The model that a command line describes.
#pragma once
#include <optional>
#include <string>
#include "llmc/wiring/config.h"

struct ModelOptions {
  std::string model = "d12";                                            // a preset or a folder
  std::optional<int> layers, heads, channels, vocab_size, max_seq_len;  // in place of the preset's
  std::optional<std::string> wiring;                                    // none: the model's
  bool no_bias = false;
};

// A pointer to a member, by a name of its own because of what nvcc makes of the usual form: parentheses that g++ warns
// of.
template <class T, class Struct>
using Member = T Struct::*;

// The options that change a preset's shape.
struct ShapeOption {
  const char* flag;
  Member<std::optional<int>, ModelOptions> value;
  Member<int, ModelConfig> field;
  const char* help;
};
inline constexpr ShapeOption shape_options[] = {
    {"--layers", &ModelOptions::layers, &ModelConfig::num_layers, "layers, in place of the preset's"},
    {"--heads", &ModelOptions::heads, &ModelConfig::num_heads, "attention heads per layer, in place of the preset's"},
    {"--channels", &ModelOptions::channels, &ModelConfig::channels,
     "channels, a multiple of the heads, in place of the preset's"},
    {"--vocab-size", &ModelOptions::vocab_size, &ModelConfig::vocab_size,
     "tokens in the vocabulary, in place of the preset's 50257"},
    {"--max-seq-len", &ModelOptions::max_seq_len, &ModelConfig::max_seq_len,
     "context length in tokens, at least T, in place of the preset's 1024 or 2048"},
};

// A preset, changed by the options above, or a folder's config.json, whose shape cannot be changed but whose wiring
// can. `in_folder`: what a folder's config.json says, whose weights are then read; none: they are initialised. Throws
// UserError.
ModelConfig model_config(const ModelOptions& options, std::optional<ModelConfig>& in_folder);

// Throws UserError, which names what differs, unless the model in the folder `checkpoint`, from which a run is resumed,
// is the one that the options describe, `config`.
void check_resumed_model(const std::string& checkpoint, const ModelConfig& config);

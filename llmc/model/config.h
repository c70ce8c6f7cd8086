// The shape of a model: GPT-2's numbers and the two of skip-layer attention (SLA).
#pragma once
#include <cstdio>              // sscanf
#include <string>              // std::string
#include "llmc/utils/error.h"  // user_error

struct ModelConfig {
  int num_layers = 12;      // L
  int num_heads = 12;       // h
  int channels = 768;       // C = h * hs
  int vocab_size = 50257;   // V
  int max_seq_len = 1024;   // positions that wpe holds; T may be shorter
  bool bias = true;         // biases in the linear and LayerNorm layers, as nanoGPT's switch
  int num_skip_layer = 0;   // n_l: how many layers below a borrowing head's lender lies
  int num_skip_head = 0;    // n_h: how many heads, the last ones, borrow; 0 is plain GPT-2
  double layer_norm_eps = 1e-5;

  int head_size() const { return channels / num_heads; }
};

// The paper's recommendation, n_l = 3/4 L and n_h = 3/4 h, rounded down. A model of a single layer or a single head
// has nothing to borrow and stays plain.
inline void set_default_skips(ModelConfig& config) {
  config.num_skip_layer = config.num_layers * 3 / 4;
  config.num_skip_head = config.num_layers >= 2 ? config.num_heads * 3 / 4 : 0;
}

// `d12`, `d24`, `d36`, `d48`: GPT-2 by depth (Radford et al. 2019), 1,024 positions. `gpt3:768` and so on: the GPT-3 series by
// channels (Brown et al. 2020, table 2.1, and a 384-channel one below it), 2,048 positions; that table's heads and head size
// do not multiply to its channels for 1.3B and 13B: here both have heads of 128. Returns false for a name that is neither. Skips are the paper's default.
inline bool config_from_preset(const std::string& name, ModelConfig& config) {
  struct Shape { int layers, heads, channels; };
  static const Shape gpt2[] = {{12, 12, 768}, {24, 16, 1024}, {36, 20, 1280}, {48, 25, 1600}};
  static const Shape gpt3[] = {{6, 6, 384},    {12, 12, 768},  {24, 16, 1024}, {24, 16, 1536}, {24, 16, 2048},
                               {32, 32, 2560}, {32, 32, 4096}, {40, 40, 5120}, {96, 96, 12288}};
  config = ModelConfig();
  auto take = [&](const Shape& shape, int positions) {
    config.num_layers = shape.layers;
    config.num_heads = shape.heads;
    config.channels = shape.channels;
    config.max_seq_len = positions;
    set_default_skips(config);
    return true;
  };
  for (const Shape& shape : gpt2)
    if (name == "d" + std::to_string(shape.layers)) return take(shape, 1024);
  for (const Shape& shape : gpt3)
    if (name == "gpt3:" + std::to_string(shape.channels)) return take(shape, 2048);
  return false;
}

// Throws UserError, with what to do about it, unless the numbers make a model.
inline void validate(const ModelConfig& c) {
  auto positive = [](int value, const char* what) {
    if (value < 1) user_error("%s is %d; it must be at least 1", what, value);
  };
  positive(c.num_layers, "the number of layers (--layers)");
  positive(c.num_heads, "the number of heads (--heads)");
  positive(c.channels, "the number of channels (--channels)");
  positive(c.max_seq_len, "the number of positions (--max-seq-len)");
  if (c.vocab_size < 2) user_error("the vocabulary (--vocab-size) is %d; it must be at least 2", c.vocab_size);
  if (c.channels % c.num_heads != 0)
    user_error("%d heads do not divide %d channels; --channels must be a multiple of --heads", c.num_heads, c.channels);
  if (!(c.layer_norm_eps > 0)) user_error("layer_norm_epsilon is %g; it must be greater than 0", c.layer_norm_eps);
  if (c.num_skip_head < 0 || c.num_skip_head > c.num_heads)
    user_error("--skip-heads %d, but the model has %d heads; it must lie between 0 (plain GPT-2) and %d",
               c.num_skip_head, c.num_heads, c.num_heads);
  if (c.num_skip_head > 0 && (c.num_skip_layer < 1 || c.num_skip_layer > c.num_layers - 1))
    user_error("--skip-layers %d with --skip-heads %d: in a model of %d layers a head can borrow from 1 to %d layers "
               "below; --skip-heads 0 makes it plain GPT-2",
               c.num_skip_layer, c.num_skip_head, c.num_layers, c.num_layers - 1);
}

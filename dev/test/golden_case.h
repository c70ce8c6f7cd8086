// Reads the golden cases of dev/test/golden (its README.md describes the files): what an independent float64
// implementation computed from float32 weights, which the reference and the trainer are compared with. Tests run from
// the repository's root.
#pragma once
#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>
#include "llmc/wiring/config.h"
#include "llmc/base/error.h"
#include "llmc/formats/safetensors.h"

struct GoldenTensor {
  std::vector<int64_t> shape;
  std::vector<float> data;
};

using GoldenTensors = std::map<std::string, GoldenTensor>;  // by Hugging Face name

struct GoldenCase {
  std::string folder;
  ModelConfig config;
  int batch_size, seq_len, grad_accum_steps, steps;  // B, T; one step is grad_accum_steps micro-batches
  double learning_rate, weight_decay, beta1, beta2, eps, grad_clip, dropout;
  uint64_t seed;  // of what updates draw
  std::vector<int> tokens;
  GoldenTensors model;              // before training; may contain zero biases where config.bias is false
  double val_loss;                  // of that model, over all micro-batches of the file
  std::vector<double> losses;       // (steps)  before each update, mean over the step's micro-batches
  std::vector<double> grad_norms;   // (steps)  of the averaged gradient, before clipping
  GoldenTensors grads;              // of step 1, averaged over its micro-batches, before clipping
  std::vector<float> token_losses;  // (B, T)  of micro-batch 0

  int num_micro_batches() const { return steps * grad_accum_steps; }
};

inline const std::vector<std::string>& golden_case_names() {
  static const std::vector<std::string> names = {"baseline",        "paper_default",  "adjacent",      "overlap",
                                                 "all_heads",       "odd_shapes",     "no_bias_accum", "w_also",
                                                 "w_blend",         "w_fixed",        "w_gate",        "w_gqa_sla",
                                                 "w_reuse",         "w_share_window", "w_strided",     "w_topk",
                                                 "w_two_distances", "f_rope",         "f_memory_rope", "f_relative",
                                                 "f_memory",        "f_universal",    "f_gru",         "f_act",
                                                 "f_gtrxl",         "f_lsh",          "f_reversible",  "f_reformer",
                                                 "m_strided_fixed", "n_rmsnorm",      "n_relu2",       "n_untied",
                                                 "n_swiglu",        "n_qknorm",       "n_documents",   "n_modern",
                                                 "n_keys",          "n_values",       "n_vres",        "n_router",
                                                 "n_dense",         "n_route",        "n_depth",       "n_softcap",
                                                 "n_layers",        "m_dropout",      "a_silu",        "a_alibi",
                                                 "a_sinks",         "a_both"};
  return names;
}

inline nlohmann::json read_golden_json(const std::string& path) {
  std::ifstream file(path);
  if (!file) user_error("%s: cannot open it; run the test from the repository's root", path.c_str());
  return nlohmann::json::parse(file);
}

inline GoldenTensors read_golden_tensors(const std::string& path) {
  SafetensorsFile file(path);
  GoldenTensors tensors;
  for (const SafetensorsTensor& t : file.tensors()) {
    GoldenTensor& tensor = tensors[t.name];
    tensor.shape = t.shape;
    tensor.data.resize(t.num_elements());
    file.read_f32(t, tensor.data.data());
  }
  return tensors;
}

// An llm.c shard: int32[256] header (20240520, version 1, number of tokens), then the tokens as uint16.
inline std::vector<int> read_golden_tokens(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  int32_t header[256] = {};
  file.read(reinterpret_cast<char*>(header), sizeof(header));
  if (!file || header[0] != 20240520 || header[1] != 1) user_error("%s: not a token shard", path.c_str());
  std::vector<uint16_t> tokens(header[2]);
  file.read(reinterpret_cast<char*>(tokens.data()), tokens.size() * sizeof(uint16_t));
  if (!file) user_error("%s: ends before its %d tokens", path.c_str(), header[2]);
  return std::vector<int>(tokens.begin(), tokens.end());
}

inline GoldenCase read_golden_case(const std::string& name) {
  GoldenCase golden;
  golden.folder = "dev/test/golden/" + name;

  const nlohmann::json config = read_golden_json(golden.folder + "/config.json");
  golden.config.num_layers = config.at("n_layer");
  golden.config.num_heads = config.at("n_head");
  golden.config.channels = config.at("n_embd");
  golden.config.vocab_size = config.at("vocab_size");
  golden.config.max_seq_len = config.at("n_positions");
  golden.config.bias = config.at("bias");
  golden.config.wiring = config.contains("wiring") ? parse_wiring(config.at("wiring"))
                                                   : skip_layer_wiring(config.at("num_skip_layer"), config.at("num_"
                                                                                                              "skip_"
                                                                                                              "head"));
  golden.config.layer_norm_eps = config.at("layer_norm_epsilon");
  golden.config.end_of_text = config.value("eos_token_id", -1);
  validate(golden.config);

  const nlohmann::json expected = read_golden_json(golden.folder + "/expected.json");
  golden.batch_size = expected.at("batch_size");
  golden.seq_len = expected.at("seq_len");
  golden.grad_accum_steps = expected.at("grad_accum_steps");
  golden.steps = expected.at("steps");
  golden.learning_rate = expected.at("learning_rate");
  golden.weight_decay = expected.at("weight_decay");
  golden.beta1 = expected.at("beta1");
  golden.beta2 = expected.at("beta2");
  golden.eps = expected.at("eps");
  golden.grad_clip = expected.at("grad_clip");
  golden.dropout = expected.value("dropout", 0.0);
  golden.seed = expected.value("seed", uint64_t(1337));
  golden.val_loss = expected.at("val_loss");
  golden.losses = expected.at("losses").get<std::vector<double>>();
  golden.grad_norms = expected.at("grad_norms").get<std::vector<double>>();

  golden.tokens = read_golden_tokens(golden.folder + "/tokens.bin");
  golden.model = read_golden_tensors(golden.folder + "/model.safetensors");
  golden.grads = read_golden_tensors(golden.folder + "/grads.safetensors");
  golden.token_losses = read_golden_tensors(golden.folder + "/token_losses.safetensors").at("losses").data;
  return golden;
}

// Micro-batch s of the file: row b is tokens[(s*B + b)*T + 0 ... T - 1], or with memory, where rows are streams of n
// micro-batches, tokens[(b*n + s)*T + 0 ... T - 1]; its targets are the tokens that follow each of them. inputs,
// targets (B, T) are `=`.
inline void golden_micro_batch(const GoldenCase& golden, int s, std::vector<int>& inputs, std::vector<int>& targets) {
  const bool has_memory = golden.config.wiring_table().memory > 0;
  inputs.clear(), targets.clear();
  for (int b = 0; b < golden.batch_size; b++) {
    const int64_t sequence = has_memory ? b * golden.num_micro_batches() + s : s * golden.batch_size + b;
    const auto first = golden.tokens.begin() + sequence * golden.seq_len;
    inputs.insert(inputs.end(), first, first + golden.seq_len);
    targets.insert(targets.end(), first + 1, first + 1 + golden.seq_len);
  }
}

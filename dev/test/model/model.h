// What the tests of the model share: the model itself, models of small sizes with random weights, and their tensors.
#pragma once
#define SLA_NO_MAIN
#include "train_gpt2_sla.cu"

#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>
#include "dev/test/reference/reference.h"
#include "dev/test/values.h"

using DoubleTensors = reference::Tensors<double>;

// Bounds of ||x - reference|| / ||reference||. A rounding to bf16 is 1.6e-3 of a value (root mean square), to fp16 an
// eighth of it, and every activation of every layer is rounded.
constexpr double tensor_tolerance = is_fp16 ? 2.5e-3 : is_bf16 ? 1.5e-2 : 1e-5;
constexpr double loss_tolerance = is_16_bit ? 5e-3 * coarseness : 2e-6;  // relative
constexpr double norm_tolerance = is_16_bit ? 1.5e-2 * coarseness : 1e-5;
// For hidden states that are computed a few rows at a time: the order in which a matmul adds up depends on its rows.
constexpr double generation_tolerance = is_fp16 ? 1.2e-3 : is_bf16 ? 8e-3 : 3e-6;

// In fp16 gradients of activations are multiplied by this, so that none of them is rounded to zero.
constexpr double test_loss_scale = is_fp16 ? 4096 : 1;

inline std::unique_ptr<GPT2> make_model(const ModelConfig& config, int B, int T, int recompute = 0,
                                        bool keep_dead_kv = false, double dropout = 0) {
  auto model = std::make_unique<GPT2>();
  PlanOptions plan = {B, T, Recompute(recompute), keep_dead_kv};
  plan.dropout = dropout;
  plan.logit_bytes = 1;  // chunks of logits as small as they may be, so that longer cases have several
  gpt2_declare(*model, config, plan);
  model->loss_scale = test_loss_scale;
  gpt2_allocate(*model);
  return model;
}

// A plan for generation, with the weights of `model`.
inline std::unique_ptr<GPT2> make_generator(const GPT2& model, int slots, int64_t max_length, int rows) {
  auto generator = std::make_unique<GPT2>();
  GenerationOptions options = generation_options(slots, max_length);
  options.rows = std::max(rows, slots);
  gpt2_declare_generation(*generator, model.config, options);
  gpt2_allocate(*generator, &model);
  return generator;
}

// Weights five times larger than GPT-2's initial ones, so that no term of the model is too small to matter; in 16 bits
// as large as GPT-2's: the larger the weights, the more a layer multiplies the rounding errors of the layers before it.
// floatX has the values exactly, so that both sides start from the same numbers.
constexpr double weights_std = is_16_bit ? 0.02 : 0.1;
inline DoubleTensors random_parameters(const ModelConfig& config, uint64_t seed) {
  DoubleTensors params = reference::make_parameters<double>(config);
  uint32_t tag = 0;
  for (auto& [name, tensor] : params) {
    const bool is_scale = (name.find("ln_") != std::string::npos && name.find(".weight") != std::string::npos) ||
                          name.find("value_mix") != std::string::npos || name.find(".dense") != std::string::npos;
    // The derivative of relu, through which a gate of `gru` takes a branch, is a step. In 16 bits the outputs of
    // branches are kept some standard deviations away from it, so that rounding does not decide on which side they are.
    const bool is_rectified = is_16_bit && config.wiring_table().gru && name.find("c_proj.bias") != std::string::npos;
    for (size_t i = 0; i < tensor.data.size(); i++) {
      double x = weights_std * random_normal(seed, RandomStream::test, tag, i);
      if (name.find("attn.router") != std::string::npos) x = 0.4 * x / weights_std;
      if (is_rectified) x += x < 0 ? -0.08 : 0.08;
      tensor.data[i] = double(float(floatX(float((is_scale ? 1 : 0) + x))));
    }
    tag++;
  }
  return params;
}

template <class Tensors>
void set_weights(GPT2& model, const Tensors& params) {
  std::vector<float> values;
  for (int i = 0; i < model.num_tensors(); i++) {
    const auto& source = params.at(model.tensor(i).name).data;
    std::vector<float> full(source.begin(), source.end());
    values.resize(size_t(model.tensor(i).num_elements()));
    from_file_layout(model.parameters, i, whole_weight(model.parameters, i), full.data(), values.data());
    store_weights(model)(i, values.data());
  }
  for (int i = model.num_tensors(); i < model.parameters.file_tensors(); i++) {
    const auto& source = params.at(model.parameters.constant(i).name).data;
    store_weights(model)(i, std::vector<float>(source.begin(), source.end()).data());
  }
}

// The buckets that the model's forward pass decides on in each layer with `lsh`; none without it.
inline std::vector<reference::HeadBuckets> buckets_of_pass(GPT2& model, const std::vector<int>& tokens, int B, int T) {
  std::vector<reference::HeadBuckets> layers;
  if (model.attention_plan.table.lsh_buckets == 0) return layers;
  const Batch batch = batch_of_segments(B, T, 0);
  const int64_t N = batch.rows(), h = model.config.num_heads, rounds = model.attention_plan.table.lsh_rounds;
  copy_to_device(model.acts.tokens, tokens);
  embed(model.sublayers, model.embeddings(), model.acts, batch);
  norm_forward(model.norm(0), N);
  for (int i = 0; i < model.sublayers.size(); i++) {
    gpt2_forward_sublayer(model, i, batch);
    const auto* branch = std::get_if<LshBranch>(&model.sublayer(i).branch);
    if (branch == nullptr) continue;
    std::vector<int> buckets(size_t(N * h * rounds));  // (N, h, rounds)
    copy_to_host(buckets.data(), branch->of.buckets, buckets.size() * sizeof(int));
    reference::HeadBuckets& heads = layers.emplace_back(size_t(h));
    for (int64_t head = 0; head < h; head++)
      for (int64_t round = 0; round < rounds; round++)
        for (int64_t n = 0; n < N; n++) heads[head].push_back(buckets[(n * h + head) * rounds + round]);
  }
  return layers;
}

// One tensor of a float arena, full-size, as files hold it.
inline std::vector<float> full_tensor(const GPT2& model, const float* arena, int i) {
  std::vector<float> values(size_t(model.tensor(i).num_elements()));
  std::vector<float> full(size_t(num_elements(model.parameters.specs[i].file_shape)), 0.0f);
  fetch_from(model, arena)(i, values.data());
  to_file_layout(model.parameters, i, whole_weight(model.parameters, i), values.data(), full.data());
  return full;
}

// The gradient of a tensor, without the loss scale.
inline std::vector<float> full_gradient(const GPT2& model, int i, double weight = 1 / test_loss_scale) {
  std::vector<float> gradient = full_tensor(model, model.grad_memory, i);
  for (float& x : gradient) x = float(x * weight);
  return gradient;
}

template <class T>
std::vector<float> to_floats(const T* device, size_t n) {
  std::vector<T> host(n);
  copy_to_host(host.data(), device, n * sizeof(T));
  return {host.begin(), host.end()};
}

// The mean loss of one micro-batch, whose gradients are added to those before.
inline double micro_step(GPT2& model, const std::vector<int>& inputs, const std::vector<int>& targets, int B, int T,
                         int64_t accumulation) {
  gpt2_zero_loss(model);
  gpt2_micro_step(model, inputs.data(), targets.data(), B, T, accumulation);
  return gpt2_read_stats(model).loss;
}

inline double grad_norm(GPT2& model) {
  gpt2_square_grads(model);
  return gpt2_read_stats(model).grad_norm();
}

inline std::vector<int> random_tokens(int64_t n, int vocab_size, uint32_t tag) {
  std::vector<int> tokens(size_t(n), 0);
  for (size_t i = 0; i < tokens.size(); i++)
    tokens[i] = int(random_words(7, RandomStream::test, 1000 + tag, i).word[0] % uint32_t(vocab_size));
  return tokens;
}

// With `documents` about one token in ten begins one.
inline std::vector<int> random_tokens(int64_t n, const ModelConfig& config, uint32_t tag) {
  std::vector<int> tokens = random_tokens(n, config.vocab_size, tag);
  if (config.wiring_table().documents)
    for (size_t i = 0; i < tokens.size(); i++)
      if (random_words(8, RandomStream::test, 1000 + tag, i).word[0] % 10 == 0) tokens[i] = config.end_of_text;
  return tokens;
}

inline ModelConfig four_layers(const std::string& wiring) {
  ModelConfig config;
  config.num_layers = 4, config.num_heads = 4, config.channels = 32, config.vocab_size = 61, config.max_seq_len = 40;
  config.end_of_text = 1;
  config.wiring = parse_wiring(wiring);
  return config;
}

inline ModelConfig small_config() {
  ModelConfig config;
  config.num_layers = 6, config.num_heads = 4, config.channels = 32, config.vocab_size = 101, config.max_seq_len = 96;
  config.wiring = skip_layer_wiring(2, 3);
  return config;
}

// The losses of `steps` updates from a seed's initial weights on random tokens.
inline std::vector<double> loss_curve(GPT2& model, int steps, uint64_t seed) {
  init_weights(model, seed);
  std::vector<double> losses;
  for (int step = 1; step <= steps; step++) {
    const auto inputs = random_tokens(int64_t(model.training->B) * model.training->T, model.config, uint32_t(step));
    model.draw = {seed, step, 0};
    gpt2_zero_grad(model);
    losses.push_back(micro_step(model, inputs, inputs, model.training->B, model.training->T, 1));
    gpt2_update(model, step, {1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0});
  }
  return losses;
}

inline void expect_the_same_weights_and_moments(const GPT2& a, const GPT2& b) {
  for (int i = 0; i < a.num_tensors(); i++) {
    const std::string& name = a.tensor(i).name;
    const size_t n = size_t(a.tensor(i).num_elements());
    const int64_t offset = a.tensor(i).element_offset();
    EXPECT_EQ(to_floats(a.weight_memory + offset, n), to_floats(b.weight_memory + offset, n)) << name;
    EXPECT_EQ(full_tensor(a, a.master_memory, i), full_tensor(b, b.master_memory, i)) << name;
    EXPECT_EQ(full_tensor(a, a.m_memory, i), full_tensor(b, b.m_memory, i)) << name;
    EXPECT_EQ(full_tensor(a, a.v_memory, i), full_tensor(b, b.v_memory, i)) << name;
  }
}

// GPT-2 with skip-layer attention (SLA): the model, its forward and backward pass, the optimizer, generation, the
// training loop and the command line. Read from top to bottom it is: the model's memory; the forward pass; the backward
// pass; the update; generation; training; main. Which activations there are, and what each layer needs of them, is in
// llmc/model/ (activations.h, plan.h).
//
// The graph is written once. What it calls (matmul_forward, attention_backward, ...) is a set of operations of the same
// names and signatures for each kind of device: llmc/cuda/ for a GPU (and for dev/emu, which runs the same kernels
// without one), llmc/cpu/ for the host. What a job needs and a model does not know (options, data, log, checkpoints,
// what is printed) is in llmc/run/.
//
// B: sequences in a micro-batch, T: their length, C: channels, L: layers, h: heads, hs: head size, V: vocabulary,
// QKV: q, k and v of one token in one layer, C + 2 * hs * (heads whose k and v the layer projects).
#include <algorithm>                    // std::min
#include <cmath>                        // std::isfinite, std::sqrt
#include <cstdio>                       // printf
#include <cstring>                      // memcpy
#include <optional>                     // std::optional
#include <string>                       // std::string
#include <vector>                       // std::vector
#include "llmc/io/checkpoint.h"         // read_weights, read_moments, checkpoint_checksum
#include "llmc/model/activations.h"     // ModelShape, Activations, Recompute, for_each_activation, logit_chunk_rows
#include "llmc/model/attention_plan.h"  // AttentionPlan, make_attention_plan
#include "llmc/model/change_wiring.h"   // plan_wiring_change, describe, read_weights_for_new_wiring
#include "llmc/model/config_json.h"     // read_config_json, model_text_files
#include "llmc/model/flops.h"           // flops_per_token
#include "llmc/model/orthogonalize.h"   // orthogonalize
#include "llmc/model/parameters.h"      // make_parameter_table, muon_matrices, Params, LayerParams
#include "llmc/operations.h"         // matmul_forward, attention_forward, adamw_update, device_malloc, Collectives, ...
#include "llmc/model/plan.h"         // LayerPlan, Norm, Projection
#include "llmc/model/print_model.h"  // print_model
#include "llmc/precision.h"          // floatX
#include "llmc/run/memory_plan.h"    // print_memory_plan, largest_micro_batch
#include "llmc/run/model_options.h"  // model_config, check_resumed_model
#include "llmc/run/print.h"          // print_line, time_text
#include "llmc/run/run.h"            // Run
#include "llmc/run/stop_signal.h"    // handle_stop_signals, stop_signal
#include "llmc/run/timeline.h"       // Timeline
#include "llmc/text/sampler.h"       // sample_token
#include "llmc/text/step_loader.h"   // StepLoader, StepTokens
#include "llmc/utils/arena.h"        // ArenaLayout
#include "llmc/utils/clock.h"        // seconds_now
#include "llmc/utils/error.h"        // UserError, user_error, CHECK
#include "llmc/utils/memory_plan.h"  // MemoryPlan, MemoryGroup
#include "llmc/utils/random.h"       // random_normal, random_uniform

// ----------------------------------------------------------------------------
// The model's memory

struct PlanOptions {
  int B = 1, T = 1;  // what the activations have room for; in generation 1, and the tokens computed at a time
  Recompute recompute = Recompute::nothing;
  bool keep_dead_kv = false;                  // project K/V heads that no query head attends to
  Shard shard = {};                           // what of the optimizer state is in this process
  int64_t logit_bytes = logit_chunk_bytes();  // what a chunk of logits may take
  int slots = 0;                              // generation: sequences in the K/V cache,
  int64_t max_length = 0;                     //   and their length;
  bool losses = false;        //   logits are computed of every token, in chunks, not only of each sequence's last one
  size_t sampling_bytes = 0;  // training: what the plan that draws samples takes
  bool muon = false;          //   Muon updates the layers' matrices; not with a shard
};

// Generation with the weights of a plan for training; {} for those of one that has none. It computes so many tokens of
// a prompt at a time: enough for matmuls to run at their full rate.
constexpr int64_t prompt_chunk = 256;
PlanOptions generation_plan(int slots, int64_t max_length, PlanOptions o = {}) {
  o.B = 1, o.T = int(std::max<int64_t>(slots, std::min(max_length, prompt_chunk)));
  o.slots = slots, o.max_length = max_length;
  return o;
}

struct GPT2 : ModelShape {
  ParameterTable parameters;
  floatX* weight_memory = nullptr;  // (parameters)
  bool owns_weights = true;         // else they are those of another GPT2, which must outlive this one
  float* master_memory = nullptr;   // (state): the weights in full precision; weight_memory if that is float
  float* grad_memory = nullptr;     // (parameters)
  float *m_memory = nullptr, *v_memory = nullptr;  // (state): AdamW's moments
  Params<floatX> params;                           // operations read them through weights(l), norm(l), embeddings()
  Params<float> grads;
  DeviceArray<ParameterChunk> chunks;  // AdamW's, then those of the matrices that Muon updates
  int64_t num_adamw_chunks = 0;

  ArenaLayout activation_layout;
  char* activation_memory = nullptr;
  Activations acts;
  MemoryPlan memory;
  std::vector<LayerPlan> layers;                // (L)
  std::vector<Norm> norms;                      // (L + 1): the first LayerNorm of each layer, and the final one
  CudaGraph<int, int, float> forward_backward;  // of gpt2_forward_backward with B, T, dloss
  PinnedBuffer<StepStats> host_stats;           // (1): where gpt2_read_stats reads them to
  Collectives collectives;                      // of the ranks that train together
  size_t buckets_awaited = 0;  // of weights that ranks gather after an update: 0 right after it; all, where none
                               // gathers
  Timeline timeline;

  GPT2() = default;
  GPT2(const GPT2&) = delete;
  GPT2& operator=(const GPT2&) = delete;
  ~GPT2() {
    if (owns_weights) device_free(weight_memory, weight_bytes());
    device_free(grad_memory, parameters.layout.bytes);
    if (has_master_weights) device_free(master_memory, state_bytes());
    for (float* arena : {m_memory, v_memory}) device_free(arena, state_bytes());
    device_free(activation_memory, activation_layout.bytes);
  }

  size_t weight_bytes() const { return parameters.layout.bytes / sizeof(float) * sizeof(floatX); }
  // Of masters, and of each of the moments: of all parameters, or of this rank's shard.
  size_t state_bytes() const { return parameters.layout.bytes / size_t(parameters.shard.count); }
  const TensorSpec& tensor(int index) const { return parameters.tensor(index); }
  int num_tensors() const { return parameters.size(); }

  // The weights to compute with. With ZeRO-1 they may still be arriving from other ranks: each accessor makes the
  // operations that are called after it wait for its bucket, which costs nothing once that has been awaited.
  const Params<floatX>& embeddings() { return await_weights(0), params; }
  const LayerParams<floatX>& weights(int l) { return await_weights(l + 1), params.layers[l]; }
  const Norm& norm(int l) { return await_weights(l + 1), norms[l]; }  // before layer l; l = L: the final one
  void await_all_weights() { await_weights(parameters.buckets.size() - 1); }

 private:
  void await_weights(size_t bucket) {
    for (; buckets_awaited <= bucket && buckets_awaited < parameters.buckets.size(); buckets_awaited++)
      collectives.await(buckets_awaited);
  }
};

// Fixes the model's shape and lays out its memory, without allocating any of it. Throws UserError for a shape that the
// device's kernels don't take.
void gpt2_plan(GPT2& model, const ModelConfig& config, const PlanOptions& o) {
  validate(config);
  CHECK(1 <= o.B && 1 <= o.T && o.recompute < Recompute::above_all_levels);
  CHECK(o.slots == 0 ? o.T <= config.max_seq_len : o.B == 1 && 1 <= o.max_length && o.max_length <= config.max_seq_len);
  if (config.head_size() % head_size_multiple != 0 || config.head_size() > largest_head_size)
    user_error("%d channels in %d heads: a head has %d, but must have a multiple of %d and at most %d here",
               config.channels, config.num_heads, config.head_size(), head_size_multiple, largest_head_size);
  if (config.channels > largest_channels) user_error("%d channels: at most %d here", config.channels, largest_channels);
  model.config = config;
  model.attention_plan = make_attention_plan(config, o.keep_dead_kv);
  model.B = o.B, model.T = o.T, model.recompute = o.slots > 0 ? Recompute::block : o.recompute;  // which shares what it
                                                                                                 // does not keep
  model.cache = o.slots > 0 ? plan_kv_cache(model.attention_plan, o.slots, o.max_length, o.T) : KVCache();
  model.parameters = make_parameter_table(config, model.attention_plan, o.shard);
  model.buckets_awaited = model.parameters.buckets.size();
  CHECK(!o.muon || o.shard.count == 1);
  model.matrices = o.muon ? muon_matrices(model.parameters) : std::vector<MuonMatrix>();

  model.logit_stride = padded_vocab_size(config);  // columns are whole tiles, with zeros where the vocabulary ends
  const int64_t most_logit_rows = o.slots > 0 && !o.losses ? o.slots : int64_t(o.B) * o.T;
  model.logit_rows = logit_chunk_rows(most_logit_rows, model.logit_stride * int64_t(sizeof(floatX)), o.logit_bytes);
  if (o.slots > 0)
    model.logit_rows = std::max<int64_t>(model.logit_rows, o.slots);  // those of a pass that draws are fetched at once

  model.memory = {};
  model.memory[MemoryGroup::weights] = model.weight_bytes();
  if (!generates(model)) {
    model.memory[MemoryGroup::master_weights] = has_master_weights ? model.state_bytes() : 0;
    model.memory[MemoryGroup::gradients] = model.parameters.layout.bytes;
    model.memory[MemoryGroup::moments] = 2 * model.state_bytes();
    model.memory[MemoryGroup::sampling] = o.sampling_bytes;
  }
  model.memory[MemoryGroup::workspaces] = device_workspace_bytes();
  model.activation_layout = ArenaLayout();
  for_each_activation(model, model.acts,
                      [&](MemoryGroup group, const char* name, auto*& pointer, std::vector<int64_t> shape) {
                        const size_t before = model.activation_layout.bytes;
                        model.activation_layout.add(name, std::move(shape), sizeof *pointer);
                        model.memory[group] += model.activation_layout.bytes - before;
                      });
}

// What B sequences would take, without allocating any of it.
MemoryPlan gpt2_memory(const ModelConfig& config, int B, PlanOptions o) {
  GPT2 model;
  o.B = B;
  gpt2_plan(model, config, o);
  return model.memory;
}

// Sets every byte of the activations, whose staging buffers are then written to.
void gpt2_fill_activations(GPT2& model, int value) {
  device_memset(model.activation_memory, value, model.activation_layout.bytes);
  uploads_wait_for_compute();
}

// Each layer's pointers, and the LayerNorms.
void plan_layers(GPT2& model) {
  const Activations& a = model.acts;
  model.layers.clear();
  model.norms.clear();
  for (int l = 0; l < model.config.num_layers; l++) {
    const LayerParams<floatX>& w = model.params.layers[l];
    model.layers.push_back(plan_layer(model, w, a, l));
    model.norms.push_back({w.ln1w, w.ln1b, a.layers[l].ln1, a.layers[l].ln1_mean, a.layers[l].ln1_rstd});
  }
  model.norms.push_back({model.params.lnfw, model.params.lnfb, a.lnf, a.lnf_mean, a.lnf_rstd});
}

// The weights, all zero: for training with masters, gradients and moments, for generation alone.
void allocate_parameters(GPT2& model) {
  const ArenaLayout& layout = model.parameters.layout;
  auto float_arena = [&] {
    float* arena = static_cast<float*>(device_malloc(layout.bytes));
    layout.forbid_gaps(arena);
    return arena;
  };
  auto state_arena = [&] {
    float* arena = static_cast<float*>(device_malloc(model.state_bytes()));
    forbid_gaps_of_state(model.parameters, arena);
    return arena;
  };
  model.weight_memory = static_cast<floatX*>(device_malloc(model.weight_bytes()));
  layout.forbid_gaps(model.weight_memory, sizeof(float) / sizeof(floatX));
  if (generates(model)) return;
  if constexpr (has_master_weights) model.master_memory = state_arena();
  else model.master_memory = reinterpret_cast<float*>(model.weight_memory);  // they are floats
  model.grad_memory = float_arena();
  model.m_memory = state_arena();
  model.v_memory = state_arena();
  model.grads = parameter_pointers(model.config, model.attention_plan, model.parameters, model.grad_memory);
  std::vector<ParameterChunk> chunks = parameter_chunks(model.parameters, /*muon=*/!model.matrices.empty());
  model.num_adamw_chunks = int64_t(chunks.size());
  append_chunks(chunks, model.matrices);
  model.chunks = DeviceArray<ParameterChunk>(chunks);
}

// Allocates what gpt2_plan laid out, and sets all pointers. Weights, gradients and moments are zero; but the weights
// are those of `weights_of`, if that is given. A build that checks (make DEBUG=1, dev/emu) fills the activations with
// NaN, so that one that is read before it is written shows.
void gpt2_allocate(GPT2& model, const GPT2* weights_of = nullptr) {
  model.owns_weights = weights_of == nullptr;
  if (model.owns_weights) allocate_parameters(model);
  else model.weight_memory = weights_of->weight_memory;
  model.params = parameter_pointers(model.config, model.attention_plan, model.parameters, model.weight_memory);
  model.activation_memory = static_cast<char*>(device_malloc(model.activation_layout.bytes));
  uploads_wait_for_compute();
#if defined(SLA_DEBUG) || defined(SLA_EMU)
  gpt2_fill_activations(model, 0xff);  // all ones: NaN as float and as bf16
#endif
  model.activation_layout.forbid_gaps(model.activation_memory);
  size_t next = 0;
  for_each_activation(model, model.acts, [&](MemoryGroup, const char*, auto*& pointer, std::vector<int64_t>) {
    void* place = model.activation_memory + model.activation_layout.tensors[next++].offset;
    pointer = static_cast<std::decay_t<decltype(pointer)>>(place);
  });
  model.host_stats = PinnedBuffer<StepStats>(1);
  plan_layers(model);
}

// For the readers and writers of files: a tensor of a float arena of all parameters, to host memory.
FetchTensor fetch_from(const GPT2& model, const float* arena) {
  return [&model, arena](int index, float* values) {
    copy_to_host(values, arena + model.tensor(index).element_offset(), model.tensor(index).bytes());
  };
}
// Likewise all of an arena of masters or moments: host (state).
void fetch_shard(const GPT2& model, const float* arena, float* host) {
  for (const ParameterSpec& spec : model.parameters.specs) {
    const ShardRange part = shard_range(model.parameters, spec);
    if (part.count > 0) copy_to_host(host + part.state, arena + part.state, size_t(part.count) * sizeof(float));
  }
}
// And back into such an arena: what of a tensor lies in this process's shard.
StoreTensor store_shard(const GPT2& model, float* arena) {
  return [&model, arena](int index, const float* values) {
    const ShardRange part = shard_range(model.parameters, model.parameters.specs[index]);
    copy_to_device(arena + part.state, values, size_t(part.count) * sizeof(float));
  };
}
// For the weights: all of what the kernels read, which is rounded from the masters, and this process's shard of those.
StoreTensor store_weights(GPT2& model) {
  return [&model](int index, const float* values) {
    const TensorSpec& tensor = model.tensor(index);
    const std::vector<floatX> rounded(values, values + tensor.num_elements());
    copy_to_device(model.weight_memory + tensor.element_offset(), rounded.data(), rounded.size() * sizeof(floatX));
    const ShardRange part = shard_range(model.parameters, model.parameters.specs[index]);
    if (has_master_weights && model.master_memory != nullptr && part.count > 0)
      store_shard(model, model.master_memory)(index, values + (part.begin - tensor.element_offset()));
  };
}

// A tensor's values in GPT-2's initialisation. Each weight depends on the seed, its tensor and its place in the
// full-size tensor alone: models with and without dead rows begin as the same function.
std::vector<float> initial_values(const GPT2& model, int index, uint64_t seed) {
  const ParameterSpec& spec = model.parameters.specs[index];
  const TensorSpec& tensor = model.tensor(index);
  const int64_t rows = tensor.shape[0], columns = tensor.num_elements() / rows;
  const bool is_layernorm_weight = !spec.is_weight && tensor.name.find(".weight") != std::string::npos;
  std::vector<float> host(size_t(tensor.num_elements()), is_layernorm_weight ? 1.0f : 0.0f);
  if (!spec.is_weight) return host;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < columns; i++)
      host[row * columns + i] = float(spec.init_std * random_normal(seed, RandomStream::init, uint32_t(index),
                                                                    uint64_t(spec.full_row(row) * columns + i)));
  return host;
}

void gpt2_init_weights(GPT2& model, uint64_t seed) {
  for (int index = 0; index < model.num_tensors(); index++)
    store_weights(model)(index, initial_values(model, index, seed).data());
}

// The weights of `in_folder`, the model in that folder, which may have been trained with another wiring: what that
// leaves without trained values is initialised.
void gpt2_read_weights(GPT2& model, const std::string& folder, const ModelConfig& in_folder, uint64_t seed) {
  if (same_model(in_folder, model.config)) return read_weights(folder, model.parameters, store_weights(model));
  read_weights_for_new_wiring(
      folder, plan_wiring_change(in_folder, model.attention_plan), model.parameters,
      [&](int index) { return initial_values(model, index, seed); }, store_weights(model));
}

// ----------------------------------------------------------------------------
// Forward

// What is computed at once: in training B sequences of T tokens, in generation parts of sequences in the K/V cache. Its
// tokens are the rows of every activation, in this order.
struct Batch {
  int64_t B = 0, T = 0;
  std::vector<SequencePart> parts = {};  // in generation

  int64_t rows() const {
    int64_t rows = B * T;
    for (const SequencePart& part : parts) rows += part.count;
    return rows;
  }
};

// Calls visit(part, its sequences, its first row): a training batch is one part, of B sequences from their beginnings.
template <class Visit>
void for_each_part(const Batch& s, Visit visit) {
  if (s.parts.empty()) visit(SequencePart{0, 0, s.T}, s.B, int64_t(0));
  int64_t row = 0;
  for (const SequencePart& part : s.parts) {
    visit(part, int64_t(1), row);
    row += part.count;
  }
}

// A part's queries, and the keys from position first_key on, which is the first that layers keep.
AttentionArgs<floatX> attention_args(const LayerAttention& attention, const SequencePart& part, int64_t B, int64_t row,
                                     int64_t first_key) {
  AttentionArgs<floatX> args = attention.args;
  args.B = B, args.first_query = part.first - first_key, args.T = args.first_query + part.count;
  args.q += row * args.q_stride, args.out += row * args.NH * args.HS, args.lse += row * args.NH;
  if (args.topk > 0) args.topk_score += row * args.NH, args.topk_last += row * args.NH;
  return args;
}

// Of the layer's i-th attention in training.
AttentionArgs<floatX> attention_args(const LayerPlan& layer, size_t i, const Batch& s) {
  return attention_args(layer.attentions_of_slot[0][i], {0, 0, s.T}, s.B, /*row=*/0, /*first_key=*/0);
}

// Layer l from ln1 to ln2: q, k and v, attention, one or the weighted sum of several, its projection, and the residual
// stream with the next LayerNorm. When the backward pass computes a block again, K/V has been kept.
void attention_block_forward(GPT2& model, int l, const Batch& s, bool is_recomputed = false) {
  const LayerParams<floatX>& w = model.weights(l);
  const LayerPlan& layer = model.layers[l];
  const LayerActs& a = model.acts.layers[l];
  const int64_t C = model.config.channels, N = s.rows();
  for (const Projection& p : layer.projections)
    if (!(p.is_kept && is_recomputed)) matmul_forward(p.out, a.ln1, p.weight, p.bias, N, C, p.OC);
  const StoreKV& kv = layer.store_kv;
  auto first_key = [&](const SequencePart& part) {
    return generates(model) ? model.cache.first_position(part.slot, l) : 0;
  };
  for_each_part(s, [&](const SequencePart& part, int64_t, int64_t row) {
    if (kv.width > 0)
      copy_rows(kv.row(part.slot, part.first - first_key(part)), kv.width, kv.src + row * kv.src_stride, kv.src_stride,
                part.count, kv.width);
  });
  if (layer.gate != nullptr) map_gate_forward(layer.gate, a.ln1, w.gatew, w.gateb, N, C);
  const size_t attentions = layer.attentions_of_slot[0].size();
  for (size_t i = 0; i < attentions; i++) {
    for_each_part(s, [&](const SequencePart& part, int64_t B, int64_t row) {
      attention_forward(attention_args(layer.attentions_of_slot[part.slot][i], part, B, row, first_key(part)));
    });
    const int map_layer = layer.attentions_of_slot[0][i].map_layer;
    if (layer.mixes_maps)
      mix_map_forward(model.acts.map_sum, a.att, layer.map_out, layer.map_weights, map_layer, i == 0,
                      i + 1 == attentions, N, C);
  }
  matmul_forward(model.acts.sublayer, a.att, w.attprojw, w.attprojb, N, C, C);
  residual_layernorm_forward(a.residual2, a.ln2, a.ln2_mean, a.ln2_rstd, layer.residual, model.acts.sublayer, w.ln2w,
                             w.ln2b, N, C, float(model.config.layer_norm_eps));
}

// Layer l from ln2 to the MLP's hidden units.
void mlp_hidden_forward(GPT2& model, int l, const Batch& s) {
  const LayerParams<floatX>& w = model.weights(l);
  const LayerActs& a = model.acts.layers[l];
  const int64_t C = model.config.channels;
  matmul_gelu_forward(a.fch_gelu, a.fch, a.ln2, w.fcw, w.fcb, s.rows(), C, 4 * C);
}

// The final hidden states (acts.lnf) of acts.tokens, a row each.
void gpt2_forward(GPT2& model, const Batch& s) {
  const ModelConfig& c = model.config;
  CHECK(1 <= s.rows() && s.rows() <= int64_t(model.B) * model.T && s.T <= c.max_seq_len &&
        s.parts.empty() != generates(model));
  const int64_t C = c.channels, N = s.rows();
  const float eps = float(c.layer_norm_eps);
  const Activations& a = model.acts;

  const Params<floatX>& p = model.embeddings();
  for_each_part(s, [&](const SequencePart& part, int64_t B, int64_t row) {
    embedding_forward(a.embedded + row * C, a.tokens + row, p.wte, p.wpe, B, part.count, C, part.first);
  });
  const Norm& ln1 = model.norm(0);
  layernorm_forward(ln1.out, ln1.mean, ln1.rstd, a.embedded, ln1.weight, ln1.bias, N, C, eps);

  for (int l = 0; l < c.num_layers; l++) {
    const LayerParams<floatX>& w = model.weights(l);
    const LayerActs& layer = a.layers[l];
    const Timeline::Scope span = model.timeline.span("forward", l + 1);
    attention_block_forward(model, l, s);
    mlp_hidden_forward(model, l, s);
    matmul_forward(a.sublayer, layer.fch_gelu, w.fcprojw, w.fcprojb, N, 4 * C, C);
    const Norm& next = model.norm(l + 1);  // the next layer's first LayerNorm, or the final one
    residual_layernorm_forward(layer.residual3, next.out, next.mean, next.rstd, layer.residual2, a.sublayer,
                               next.weight, next.bias, N, C, eps);
  }
}

// The same of `tokens`, on the host.
void gpt2_forward(GPT2& model, const int* tokens, const Batch& s) {
  CHECK(s.rows() <= int64_t(model.B) * model.T);
  copy_to_device(model.acts.tokens, tokens, size_t(s.rows()) * sizeof(int));
  gpt2_forward(model, s);
}

// The logits of `count` rows of acts.lnf, from `first_row` on, into acts.logits.
void gpt2_logits(GPT2& model, int64_t first_row, int64_t count) {
  const int64_t C = model.config.channels, Vp = model.logit_stride;
  matmul_forward(model.acts.logits, model.acts.lnf + first_row * C, model.params.wte, nullptr, count, C, Vp);
}

// From the gradients of those logits, in acts.logits, those of the rows of acts.lnf, in acts.dsublayer =, and grads.wte
// +=.
void gpt2_logits_backward(GPT2& model, int64_t first_row, int64_t count) {
  const int64_t C = model.config.channels, Vp = model.logit_stride;
  const Activations& a = model.acts;
  gemm('N', 'N', count, C, Vp, a.logits, Vp, model.params.wte, C, false, a.dsublayer + first_row * C, C);
  gemm('T', 'N', Vp, C, count, a.logits, Vp, a.lnf + first_row * C, C, true, model.grads.wte, C);
}

// acts.losses (B, T) = cross-entropy of acts.targets, in nats; acts.stats->loss += their sum / divisor. With `backward`
// also the head's gradients of dloss * sum(losses): acts.dsublayer = that of lnf, grads.wte +=.
void gpt2_loss(GPT2& model, const Batch& s, double divisor, bool backward, float dloss = 0) {
  const int64_t N = s.rows();
  Activations& a = model.acts;
  for (int64_t row = 0; row < N; row += model.logit_rows) {
    const int64_t count = std::min(model.logit_rows, N - row);
    gpt2_logits(model, row, count);
    classifier(a.losses + row, a.logits, a.targets + row, count, model.config.vocab_size, model.logit_stride, dloss,
               backward);
    if (backward) gpt2_logits_backward(model, row, count);
  }
  add_losses(&a.stats->loss, a.losses, N, divisor);
}

// The same of `targets` (B, T), on the host, without gradients.
void gpt2_loss(GPT2& model, const int* targets, const Batch& s, double divisor) {
  copy_to_device(model.acts.targets, targets, size_t(s.rows()) * sizeof(int));
  gpt2_loss(model, s, divisor, /*backward=*/false);
}

void gpt2_zero_loss(GPT2& model) { device_memset(&model.acts.stats->loss, 0, sizeof(double)); }

// What gpt2_loss has added up since gpt2_zero_loss, and what gpt2_update found. Waits for the device.
StepStats gpt2_read_stats(GPT2& model) {
  copy_to_host(model.host_stats.data, model.acts.stats, sizeof(StepStats));
  return *model.host_stats.data;
}

// ----------------------------------------------------------------------------
// Backward

// What the recompute level has not kept of layer l, from its residual streams and the K/V that it attends to.
void recompute_layer(GPT2& model, int l, const Batch& s) {
  const LayerParams<floatX>& w = model.weights(l);
  const LayerActs& a = model.acts.layers[l];
  const int64_t C = model.config.channels, N = s.rows();
  const float eps = float(model.config.layer_norm_eps);
  if (model.recompute >= Recompute::layernorm)
    layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, model.layers[l].residual, w.ln1w, w.ln1b, N, C, eps);
  if (model.recompute >= Recompute::block) {
    attention_block_forward(model, l, s, /*is_recomputed=*/true);
    mlp_hidden_forward(model, l, s);
    return;
  }
  if (model.recompute >= Recompute::layernorm)
    layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, w.ln2w, w.ln2b, N, C, eps);
  if (model.recompute >= Recompute::gelu) gelu_forward(a.fch_gelu, a.fch, N * 4 * C);
}

// Begins the sum of a bucket's gradients over the ranks, beside the operations that follow: each rank will have that of
// its shard, or with one shard of all.
void gpt2_reduce_bucket(GPT2& model, size_t index) {
  const ParameterBucket& bucket = model.parameters.buckets[index];
  Collectives& c = model.collectives;
  c.comm_waits_for_compute();
  const Timeline::Scope span = model.timeline.span("reduce", index, &c);
  if (model.parameters.shard.count > 1) c.reduce_scatter(model.grad_memory + bucket.begin, bucket.count);
  else c.all_reduce(model.grad_memory + bucket.begin, bucket.count);
}

// The gradients of what layer l's attention has used, from that of its output, acts.dsublayer.
void attention_block_backward(GPT2& model, int l, const Batch& s) {
  const LayerPlan& layer = model.layers[l];
  const Activations& d = model.acts;
  const int64_t C = model.config.channels, N = s.rows();
  for (const RowCopy& copy : layer.load_dqkv)
    copy_rows(copy.dst, copy.dst_stride, copy.src, copy.src_stride, N, copy.width);
  for (size_t i = 0; i < layer.attentions_of_slot[0].size(); i++) {
    const int map_layer = layer.attentions_of_slot[0][i].map_layer;
    AttentionArgs<floatX> args = attention_args(layer, i, s);
    if (layer.mixes_maps) {
      args.exact_out = d.exact_map_out;
      attention_forward(args);  // the output of this map alone, and its lse
      float* dmap_weight = d.dmap_weights + map_layer * layer.map_weights.gates_stride;
      auto mix_backward = [&](const auto* map_out) {
        mix_map_backward(layer.dmap_out, dmap_weight, d.dsublayer, map_out, layer.map_weights, map_layer, N, C);
      };
      d.exact_map_out != nullptr ? mix_backward(d.exact_map_out) : mix_backward(layer.map_out);
    }
    attention_backward(args);
  }
  if (d.dmap_gates != nullptr) mix_gates_backward(d.dmap_gates, d.dmap_weights, layer.map_weights, N);
}

// Layer l: acts.dresidual, the gradient of the residual stream after the layer, becomes that before it; grads +=.
void layer_backward(GPT2& model, int l, const Batch& s) {
  const LayerParams<floatX>& w = model.weights(l);
  const LayerParams<float>& g = model.grads.layers[l];
  const LayerPlan& layer = model.layers[l];
  const LayerActs& a = model.acts.layers[l];
  const Activations& d = model.acts;
  const int64_t C = model.config.channels, N = s.rows();

  matmul_gelu_backward(d.dfch, g.fcprojw, g.fcprojb, d.dresidual, a.fch_gelu, a.fch, w.fcprojw, N, 4 * C, C);
  matmul_backward(d.dsublayer, g.fcw, g.fcb, d.dfch, a.ln2, w.fcw, N, C, 4 * C);
  layernorm_backward(d.dresidual, g.ln2w, g.ln2b, d.dsublayer, a.residual2, a.ln2_mean, a.ln2_rstd, w.ln2w,
                     d.layernorm_scratch, N, C);

  matmul_backward(d.dsublayer, g.attprojw, g.attprojb, d.dresidual, a.att, w.attprojw, N, C, C);
  attention_block_backward(model, l, s);
  matmul_backward(d.dsublayer, g.qkvw, g.qkvb, d.dqkv, a.ln1, w.qkvw, N, C, layer.QKV);
  if (layer.gate != nullptr)
    map_gate_backward(d.dsublayer, g.gatew, g.gateb, layer.dgate, layer.gate, a.ln1, w.gatew, N, C);
  layernorm_backward(d.dresidual, g.ln1w, g.ln1b, d.dsublayer, layer.residual, a.ln1_mean, a.ln1_rstd, w.ln1w,
                     d.layernorm_scratch, N, C);
}

// grads += the gradients of what gpt2_forward and gpt2_loss computed last. acts.dsublayer holds the gradient of lnf.
// With `sum_over_ranks` a bucket's gradients are summed as soon as they are complete.
void gpt2_backward(GPT2& model, const Batch& s, bool sum_over_ranks = false) {
  const ModelConfig& c = model.config;
  const int64_t C = c.channels, N = s.rows();
  const Activations& a = model.acts;

  device_memset(a.dresidual, 0, size_t(N * C) * sizeof(floatX));
  if (a.dmap_gates != nullptr)
    device_memset(a.dmap_gates, 0, size_t(c.num_layers * model.layers[0].map_weights.gates_stride) * sizeof(float));
  layernorm_backward(a.dresidual, model.grads.lnfw, model.grads.lnfb, a.dsublayer, a.layers.back().residual3,
                     a.lnf_mean, a.lnf_rstd, model.params.lnfw, a.layernorm_scratch, N, C);
  if (sum_over_ranks) gpt2_reduce_bucket(model, c.num_layers + 1);
  for (int l = c.num_layers - 1; l >= 0; l--) {
    const Timeline::Scope span = model.timeline.span("backward", l + 1);
    if (l + 1 < c.num_layers) recompute_layer(model, l, s);  // the last layer's tensors are still there
    layer_backward(model, l, s);
    if (sum_over_ranks) gpt2_reduce_bucket(model, l + 1);
  }
  embedding_backward(model.grads.wte, model.grads.wpe, a.dresidual, a.tokens, s.B, s.T, C);
  if (sum_over_ranks) gpt2_reduce_bucket(model, 0);
}

void gpt2_zero_grad(GPT2& model) { device_memset(model.grad_memory, 0, model.parameters.layout.bytes); }

// What is computed on the micro-batch in acts.tokens and acts.targets: acts.stats->loss += its mean loss, grads += the
// gradients of dloss * sum(losses).
void gpt2_forward_backward(GPT2& model, const Batch& s, float dloss, bool sum_over_ranks = false) {
  gpt2_forward(model, s);
  gpt2_loss(model, s, double(s.rows()), /*backward=*/true, dloss);
  gpt2_backward(model, s, sum_over_ranks);
}

// One micro-batch of an update that averages `num_micro_batches` of them, over all ranks: acts.stats->loss and grads +=
// as above. Waits for nothing: inputs and targets (B, T) lie in host memory, and if it is a PinnedBuffer's they stay as
// they are until gpt2_read_stats has returned. After a rank's last one gradients are summed over the ranks, and before
// its first one weights come from them; these two run eagerly, because they take two streams; the others are captured
// and replayed as a CUDA graph.
void gpt2_micro_step(GPT2& model, const int* inputs, const int* targets, int B, int T, int64_t num_micro_batches,
                     bool last = true) {
  Activations& a = model.acts;
  CHECK(1 <= B && 1 <= T && int64_t(B) * T <= int64_t(model.B) * model.T);
  const size_t count = size_t(B) * size_t(T);
  upload({{a.tokens, a.staged_tokens, inputs, count}, {a.targets, a.staged_targets, targets, count}});
  const float dloss = float(1.0 / (double(B) * T * double(num_micro_batches)));
  const bool sum_over_ranks = last && model.collectives.size() > 1, weights_are_coming = model.buckets_awaited == 0;
  if (sum_over_ranks || weights_are_coming || model.timeline.on)
    gpt2_forward_backward(model, {B, T}, dloss, sum_over_ranks);
  else model.forward_backward.run([&](int b, int t, float d) { gpt2_forward_backward(model, {b, t}, d); }, B, T, dloss);
}

// x (count) = its sum over ranks: of acts.stats, whose doubles lie side by side.
void gpt2_sum_over_ranks(GPT2& model, double* x, int64_t count) {
  model.collectives.comm_waits_for_compute();
  model.collectives.all_reduce(x, count);
  model.collectives.compute_waits_for_comm();
}

// After gpt2_update acts.stats->stop_requests > 0 if this rank or another one asks for it: ranks stop after the same
// step.
void gpt2_request_stop(GPT2& model, bool asks) {
  double& requests = model.acts.stats->stop_requests;
  device_memset(&requests, asks ? 0x3f : 0, sizeof requests);  // eight bytes 0x3f are a small positive number
}

// ----------------------------------------------------------------------------
// Update

struct UpdateOptions {
  double learning_rate, beta1, beta2, eps, weight_decay;
  double grad_clip;        // 0: none
  double momentum = 0.95;  // of Muon
};

// acts.stats->grad_squares = the square of the gradients' 2-norm, of those in this rank's shard.
void gpt2_square_grads(GPT2& model) {
  sum_of_squares(&model.acts.stats->grad_squares, model.grad_memory, model.chunks.data, int64_t(model.chunks.size));
}

// Sends this rank's shard of the new weights to the others, bucket by bucket in the order in which the next forward
// pass awaits them.
void gpt2_gather_weights(GPT2& model) {
  const ParameterTable& table = model.parameters;
  Collectives& c = model.collectives;
  c.comm_waits_for_compute();
  for (size_t i = 0; i < table.buckets.size(); i++) {
    const ParameterBucket& bucket = table.buckets[i];
    floatX* weights = model.weight_memory + bucket.begin;
    {
      const Timeline::Scope span = model.timeline.span("gather", i, &c);
      c.all_gather<floatX>(weights, weights + table.shard.index * (bucket.count / table.shard.count), bucket.count);
    }
    c.mark(i);
  }
  model.buckets_awaited = 0;
}

// Muon's part of an update. What it makes of a matrix's gradient before the iteration takes that gradient's place.
void gpt2_update_matrices(GPT2& model, const MuonStep& s) {
  const Activations& a = model.acts;
  const ParameterChunk* chunks = model.chunks.data;
  muon_momentum(model.grad_memory, model.m_memory, chunks + model.num_adamw_chunks,
                int64_t(model.chunks.size) - model.num_adamw_chunks, s, a.stats);
  for (size_t i = 0; i < model.matrices.size(); i++) {
    const MuonMatrix& matrix = model.matrices[i];
    sum_of_squares(a.muon_squares + i, model.grad_memory, chunks + matrix.first_chunk, matrix.num_chunks);
    const floatX* direction = orthogonalize(a, model.grad_memory + matrix.begin, a.muon_squares + i, matrix);
    muon_update(model.weight_memory + matrix.begin, model.master_memory + matrix.begin, direction, matrix.rows,
                matrix.columns, s, a.stats);
  }
}

// Update number `step`, from 1, by AdamW and, of the matrices that are planned so, by Muon, with gradients clipped by
// their norm, but left as AdamW found them; weights of two or more dimensions decay. Changes nothing if the loss or the
// norm is not finite: gpt2_read_stats tells. Waits for nothing. Every rank takes the same decision and has the same
// weights afterwards: acts.stats becomes the sum over ranks before anything depends on it.
void gpt2_update(GPT2& model, int64_t step, const UpdateOptions& o) {
  AdamWStep s;
  s.learning_rate = float(o.learning_rate), s.beta1 = float(o.beta1), s.beta2 = float(o.beta2), s.eps = float(o.eps);
  s.bias_correction1 = float(1 - std::pow(o.beta1, double(step)));
  s.bias_correction2 = float(1 - std::pow(o.beta2, double(step)));
  s.grad_clip = o.grad_clip, s.weight_decay = float(o.weight_decay);
  Collectives& c = model.collectives;
  const bool is_sharded = model.parameters.shard.count > 1;
  c.compute_waits_for_comm();  // the sums of the gradients
  gpt2_square_grads(model);
  if (is_sharded) gpt2_sum_over_ranks(model, &model.acts.stats->grad_squares, 3);
  else gpt2_sum_over_ranks(model, &model.acts.stats->loss, 2);  // each rank has all gradients
  adamw_update(model.weight_memory, has_master_weights ? model.master_memory : nullptr, model.m_memory, model.v_memory,
               model.grad_memory, model.chunks.data, model.num_adamw_chunks, s, model.acts.stats);
  if (!model.matrices.empty())
    gpt2_update_matrices(model, {s.learning_rate, float(o.momentum), s.weight_decay, s.grad_clip});
  if (is_sharded) gpt2_gather_weights(model);
}

// host (parameters) = the masters, on rank 0, for a checkpoint. Every rank that has a shard calls it. They go by way of
// the gradients' arena, whose contents are not needed between two updates.
void gpt2_gather_masters(GPT2& model, float* host) {
  const ParameterTable& table = model.parameters;
  const float* arena = model.master_memory;
  Collectives& c = model.collectives;
  c.compute_waits_for_comm();  // weights that are coming
  if (table.shard.count > 1 && has_master_weights) {
    c.comm_waits_for_compute();
    for (const ParameterBucket& bucket : table.buckets)
      c.all_gather<float>(model.grad_memory + bucket.begin, arena + bucket.begin / table.shard.count, bucket.count);
    c.compute_waits_for_comm();
    arena = model.grad_memory;
  }
  if (c.rank() != 0) return;
  for (int i = 0; i < model.num_tensors(); i++) fetch_from(model, arena)(i, host + model.tensor(i).element_offset());
}

// ----------------------------------------------------------------------------
// Generation

// Computes the next `tokens` of sequences in the K/V cache, one part after the other: acts.lnf (tokens, C) = their
// final hidden states. `counts`: how many tokens of which slots; model.T in all at most.
void gpt2_extend(GPT2& model, const std::vector<int>& tokens, const std::vector<std::pair<int, int64_t>>& counts) {
  Batch batch;
  std::vector<KVCacheMove> moves;
  for (const auto& [slot, count] : counts) batch.parts.push_back(model.cache.append(slot, count, moves));
  CHECK(int64_t(tokens.size()) == batch.rows());
  for (const KVCacheMove& move : moves) {
    const StoreKV& kv = model.layers[move.layer].store_kv;
    if (kv.width > 0)
      copy_rows(kv.row(move.slot, 0), kv.width, kv.row(move.slot, move.from), kv.width, move.count, kv.width);
  }
  gpt2_forward(model, tokens.data(), batch);
}

// The logits of `count` rows of acts.lnf, (count, V), on the host.
std::vector<float> gpt2_fetch_logits(GPT2& model, int64_t first_row, int64_t count) {
  gpt2_logits(model, first_row, count);
  const int64_t V = model.config.vocab_size, Vp = model.logit_stride;
  std::vector<floatX> padded(size_t(count * Vp));
  copy_to_host(padded.data(), model.acts.logits, padded.size() * sizeof(floatX));
  std::vector<float> logits;
  for (int64_t row = 0; row < count; row++)
    logits.insert(logits.end(), padded.begin() + row * Vp, padded.begin() + row * Vp + V);
  return logits;
}

// Puts a prompt into an empty slot, model.T tokens at a time. Returns the logits (V) of its last token.
std::vector<float> gpt2_read_prompt(GPT2& model, int slot, const std::vector<int>& prompt) {
  model.cache.clear(slot);
  int64_t count = 0;
  for (size_t begin = 0; begin < prompt.size(); begin += size_t(count)) {
    count = std::min<int64_t>(model.T, int64_t(prompt.size() - begin));
    gpt2_extend(model, {prompt.begin() + long(begin), prompt.begin() + long(begin) + count}, {{slot, count}});
  }
  return gpt2_fetch_logits(model, count - 1, 1);
}

// Continues `tokens` until there are `length` of them, in the cache's first slot. Every token goes through the model
// once. The n-th token is drawn with the n-th random number of (seed, step).
void gpt2_generate(GPT2& model, std::vector<int>& tokens, int length, const SamplingOptions& options, uint64_t seed,
                   int64_t step) {
  CHECK(!tokens.empty());
  std::vector<float> logits = gpt2_read_prompt(model, 0, tokens);
  while (int(tokens.size()) < length) {
    const double uniform = random_uniform(seed, RandomStream::sample, uint32_t(step), uint64_t(tokens.size()));
    tokens.push_back(sample_token(std::move(logits), uniform, options));
    if (int(tokens.size()) == length) return;
    gpt2_extend(model, {tokens.back()}, {{0, 1}});
    logits = gpt2_fetch_logits(model, 0, 1);
  }
}

// ----------------------------------------------------------------------------
// Training

// A run of this model. What is declared later is destroyed first, while what it uses still exists.
struct Trainer {
  GPT2 model;
  std::optional<GPT2> sampler;          // on rank 0, if samples are asked for: the same weights, planned for generation
  PinnedBuffer<int> step_tokens;        // (2, 2, grad_accum_steps, B, T): inputs and targets of this step and the next
  PinnedBuffer<float> checkpoint_copy;  // m and v (state), and rank 0's weights (parameters): the writer's while it
                                        // writes a checkpoint
  Run run;
  std::optional<StepLoader> step_loader;  // from the first step on
};

// What save_checkpoint copies to host memory for the writer: m and v of each rank that has a shard of them, or of rank
// 0, which also has all weights.
size_t checkpoint_copy_bytes(const GPT2& model, int rank) {
  if (rank > 0 && model.parameters.shard.count == 1) return 0;
  return (rank == 0 ? model.parameters.layout.bytes : 0) + 2 * model.state_bytes();
}

// Throws UserError for a model whose parameters alone are too many, before anything is built of it: a list of its
// tensors may already take all of the memory, or minutes.
void check_parameters_fit(const ModelConfig& c, const Shard& shard) {
  const double state = (has_master_weights ? 3.0 : 2.0) * sizeof(float) / shard.count;  // masters, m and v
  const double least = least_parameters(c) * (sizeof(floatX) + sizeof(float) + state);
  const size_t available = device_memory_available() + device_workspace_bytes();
  if (least > double(available))
    user_error("%d layers of %d channels and a vocabulary of %d take at least %s for weights, gradients and moments, "
               "but %s are free on the "
               "%s; take a smaller model",
               c.num_layers, c.channels, c.vocab_size, bytes_text(least).c_str(), bytes_text(double(available)).c_str(),
               device_name());
}

// `host_bytes`: what will be allocated in host memory for checkpoints. Throws UserError if the plan does not fit into
// what is free.
void print_memory(const GPT2& model, const PlanOptions& o, size_t host_bytes = 0) {
  const size_t available = device_memory_available() + device_workspace_bytes();  // the workspaces have been taken
                                                                                  // already
  const size_t reserve = device_reserve_bytes(), beside = reserve + (device_memory_is_host_memory ? host_bytes : 0);
  auto plan_of = [&](int B) { return gpt2_memory(model.config, B, o); };
  printf("memory plan for B %d, T %d, recompute level %d:\n", model.B, model.T, int(model.recompute));
  const double bytes_per_sequence = double(model.activation_layout.bytes - model.memory[MemoryGroup::logits]) / model.B;
  print_memory_plan(model.memory,
                    {available, host_bytes, device_memory_is_host_memory, reserve, device_name(),
                     largest_micro_batch(available - std::min(available, beside), plan_of), bytes_per_sequence},
                    model.recompute < Recompute::block);
}

// The mean loss over the tokens of -m micro-batches at even distances in the validation data (a corpus in the order of
// its documents may begin with another kind of text than the rest), or with -m 0 of all of it: the incomplete
// micro-batch at the end and what full sequences leave of each file too. Ranks deal the batches out among themselves.
void validate_model(Trainer& t) {
  Run& run = t.run;
  const double start = seconds_now();
  const DataLoader& data = *run.val;
  const bool all = run.options.val_batches == 0;
  const int64_t full_batches = data.num_sequences / run.B;
  const int64_t sequences = all ? data.num_sequences : std::min(run.options.val_batches, full_batches) * run.B;
  const int64_t batches = (sequences + run.B - 1) / run.B;
  const std::vector<SequenceRest> rests = all ? data.rests() : std::vector<SequenceRest>();
  int64_t tokens = sequences * run.T;
  for (const SequenceRest& rest : rests) tokens += rest.length;
  const double full_batch = double(run.B) * run.T;
  std::vector<int> inputs(size_t(run.B) * size_t(run.T)), targets(inputs.size());
  gpt2_zero_loss(t.model);
  for (int64_t i = run.ranks.rank; i < batches + int64_t(rests.size()); i += run.ranks.size) {
    Batch s = {std::min<int64_t>(run.B, sequences - i * run.B), run.T};
    const int64_t batch = all ? i : i * full_batches / batches;
    if (i < batches) data.load_sequences(batch * run.B, s.B, inputs.data(), targets.data());
    else s = {1, rests[i - batches].load(inputs.data(), targets.data())};
    gpt2_forward(t.model, inputs.data(), s);
    gpt2_loss(t.model, targets.data(), s, full_batch);
  }
  gpt2_sum_over_ranks(t.model, &t.model.acts.stats->loss, 1);
  const double loss = gpt2_read_stats(t.model).loss / (double(tokens) / full_batch);
  report_validation(run, loss, tokens, seconds_now() - start);
}

void sample(Trainer& t) {
  Run& run = t.run;
  const WatchdogPause pause(run.channel);
  std::vector<int> tokens = run.prompt;
  t.model.await_all_weights();
  gpt2_generate(*t.sampler, tokens, int(run.options.sample_length), {1, run.options.temperature},
                uint64_t(run.options.seed), run.step);
  print_sample(run, tokens);
}

// Begins to write a checkpoint. Waits for the one before, and for a copy to host memory; the rest happens while
// training continues. Every rank that has a shard writes its own; the rest, and with --zero 0 all of it, is rank 0's.
void save_checkpoint(Trainer& t) {
  const double start = seconds_now();
  report_saved(t.run, /*wait=*/true);
  GPT2& model = t.model;
  if (t.checkpoint_copy.size == 0) return;
  const size_t state_size = model.state_bytes() / sizeof(float);
  float *m = t.checkpoint_copy.data, *v = m + state_size, *weights = v + state_size;
  gpt2_gather_masters(model, weights);
  fetch_shard(model, model.m_memory, m);
  fetch_shard(model, model.v_memory, v);
  t.run.stall_seconds = seconds_now() - start;
  auto fetch_copied = [&model, weights](int i, float* values) {
    memcpy(values, weights + model.tensor(i).element_offset(), model.tensor(i).bytes());
  };
  start_checkpoint(t.run, model.parameters, {{}, model_text_files(model.config), fetch_copied, m, v});
}

// This rank's tokens of the next step.
StepTokens next_tokens(Trainer& t) {
  Run& run = t.run;
  if (!t.step_loader) {
    const int64_t n = run.grad_accum_steps * run.B * run.T;
    int* memory = t.step_tokens.data;
    t.step_loader.emplace(*run.train, run.grad_accum_steps, run.B, run.ranks.rank, run.ranks.size,
                          std::array<StepTokens, 2>{{{memory, memory + n}, {memory + 2 * n, memory + 3 * n}}});
  }
  return t.step_loader->next();
}

// One update: grad_accum_steps micro-batches forward and backward, then AdamW. The host waits once, when all of it is
// queued. If the loss or the norm is not finite, the device has changed nothing. The step is skipped then: it counts
// for the data and the learning rate, which continue as if it had been a good one, but not as one of AdamW's updates,
// whose moments don't include it.
StepResult train_step(Trainer& t) {
  const double start = seconds_now();
  Run& run = t.run;
  GPT2& model = t.model;
  const TrainOptions& o = run.options;
  StepResult result = {};
  result.learning_rate = run.schedule(run.step + 1);
  model.timeline.start_step(run.step + 1);
  gpt2_zero_grad(model);
  gpt2_zero_loss(model);
  const double asked = seconds_now();
  const StepTokens tokens = next_tokens(t);
  result.data_seconds = seconds_now() - asked;
  for (int64_t i = 0; i < run.grad_accum_steps; i++) {
    const int64_t first = i * run.B * run.T;
    gpt2_micro_step(model, tokens.inputs + first, tokens.targets + first, run.B, run.T, run.num_micro_batches(),
                    i + 1 == run.grad_accum_steps);
  }
  gpt2_request_stop(model, stop_signal() != 0);
  gpt2_update(model, run.step + 1 - run.skipped_steps,
              {result.learning_rate, o.beta1, o.beta2, o.eps, o.weight_decay, o.grad_clip, o.momentum});
  const StepStats stats = gpt2_read_stats(model);
  model.timeline.end_step();
  result.loss = stats.loss / double(run.num_micro_batches());
  result.grad_norm = std::sqrt(stats.grad_squares);
  result.stop_requested = stats.stop_requests > 0;
  result.skipped = !std::isfinite(result.loss) || !std::isfinite(result.grad_norm);
  count_step(run, result);
  result.seconds = seconds_now() - start;
  return result;
}

// The spans of the step before the last one: by now collectives are done that run beside the step after theirs.
void log_timeline(Trainer& t) {
  const Timeline& timeline = t.model.timeline;
  if (timeline.previous_step() < 0) return;
  for (const TimelineSpan& span : timeline.previous_spans())
    t.run.log.write({{"step", timeline.previous_step()},
                     {"span", std::string(span.what)},
                     {"of", bucket_name(t.model.parameters, span.bucket)},
                     {"begin_ms", span.begin_ms},
                     {"end_ms", span.end_ms}});
}

void train(Trainer& t) {
  Run& run = t.run;
  const TrainOptions& o = run.options;
  run.first_step = run.step;
  if (run.step == 0 && run.val && o.val_every > 0) validate_model(t);
  if (t.sampler && run.step == run.steps) sample(t);  // nothing to train: -x 0, or a finished run resumed
  for (bool stopping = run.ranks.size == 1 && stop_signal() != 0; run.step < run.steps && !stopping;) {
    const StepResult result = train_step(t);
    report_step(run, result);
    log_timeline(t);
    check_progress(run, result);
    stopping = must_stop(run, result);
    if (run.val && due(run, o.val_every) && !stopping) validate_model(t);
    if (t.sampler && due(run, o.sample_every) && !stopping) sample(t);
    stopping = must_stop(run, result);
    if (checkpoint_due(run, result, stopping)) save_checkpoint(t);
    report_saved(run, /*wait=*/false);
  }
  // The last step's weights are awaited by no forward pass.
  t.model.timeline.start_step(run.step + 1);
  t.model.collectives.wait();
  log_timeline(t);
}

// ----------------------------------------------------------------------------
// main

// Everything that can be wrong is found here, before anything is written. Returns the checkpoint to resume from, or "".
// `in_folder`: the model in the folder that -e names.
std::string check_and_plan(Trainer& t, std::optional<ModelConfig>& in_folder) {
  Run& run = t.run;
  const TrainOptions& o = run.options;
  run.channel.check_same_on_all_ranks("options", o.as_toml);
  const std::string checkpoint = run.channel.broadcast(run.ranks.rank == 0 ? checkpoint_to_resume(run) : "");
  if (!checkpoint.empty())
    run.channel.check_same_on_all_ranks("the checkpoint's checksum", checkpoint_checksum(checkpoint));
  const ModelConfig config = model_config(o.model, in_folder);
  if (!checkpoint.empty()) check_resumed_model(checkpoint, config);
  plan_batches(run, config.max_seq_len, in_folder.has_value());
  open_data(run, !checkpoint.empty() ? checkpoint : in_folder ? o.model.model : "", config.vocab_size);
  t.model.collectives.init(run.ranks, run.channel);  // selects the GPU; and no rank writes before all have looked
  PlanOptions plan = {run.B, run.T, Recompute(o.recompute), o.keep_dead_kv};  // asks the GPU for its memory
  plan.muon = o.optimizer == "muon";
  if (plan.muon && o.zero == 1 && run.ranks.size > 1)
    user_error("--optimizer muon: takes whole matrices, but with %d ranks each keeps a part of every layer; add --zero "
               "0",
               run.ranks.size);
  if (o.zero == 1) plan.shard = {run.ranks.rank, run.ranks.size};
  check_parameters_fit(config, plan.shard);
  if (o.sample_every > 0 && run.ranks.rank == 0) {  // all ranks have the same weights
    gpt2_plan(t.sampler.emplace(), config, generation_plan(1, o.sample_length, plan));
    plan.sampling_bytes =
        t.sampler->memory.total() - t.sampler->memory[MemoryGroup::weights] - device_workspace_bytes();
  }
  gpt2_plan(t.model, config, plan);
  if (o.tf32) gemm_allow_tf32();
  t.model.timeline.on = o.log_level == "debug";
  run.flops_per_token = flops_per_token(config, t.model.attention_plan, run.T);
  print_model(t.model, t.model.parameters);
  if (checkpoint.empty() && in_folder && !same_model(*in_folder, config))
    printf("%s was trained with the wiring %s and continues with %s; what changes:\n%s", o.model.model.c_str(),
           in_folder->wiring.text.c_str(), config.wiring.text.c_str(),
           describe(plan_wiring_change(*in_folder, t.model.attention_plan)).c_str());
  print_memory(t.model, plan, o.out.empty() ? 0 : checkpoint_copy_bytes(t.model, run.ranks.rank));
  return checkpoint;
}

void allocate(Trainer& t) {
  const Run& run = t.run;
  gpt2_allocate(t.model);
  if (t.sampler) gpt2_allocate(*t.sampler, &t.model);
  t.step_tokens = PinnedBuffer<int>(4 * size_t(run.grad_accum_steps * run.B * run.T));
  const size_t copy_bytes = run.options.out.empty() ? 0 : checkpoint_copy_bytes(t.model, run.ranks.rank);
  if (copy_bytes > 0) t.checkpoint_copy = PinnedBuffer<float>(copy_bytes / sizeof(float));
}

// Weights, moments and progress: as a checkpoint left them, or a model's folder, or new ones.
void load_or_init_weights(Trainer& t, const std::optional<ModelConfig>& in_folder, const std::string& checkpoint) {
  GPT2& model = t.model;
  if (!checkpoint.empty()) {
    resume_progress(t.run, checkpoint);
    read_weights(checkpoint, model.parameters, store_weights(model));
    read_moments(checkpoint, model.parameters, store_shard(model, model.m_memory), store_shard(model, model.v_memory));
  } else if (in_folder) {
    gpt2_read_weights(model, t.run.options.model.model, *in_folder, uint64_t(t.run.options.seed));
  } else {
    gpt2_init_weights(model, uint64_t(t.run.options.seed));
  }
}

// The first line of the log.
LogFields describe(const Trainer& t) {
  LogFields fields;
  visit_fields(t.model.config, [&](const ConfigField& field, const auto& value) {
    if constexpr (std::is_same_v<decltype(value), const int&>) fields.push_back({field.name, int64_t(value)});
    else fields.push_back({field.name, value});
  });
  fields.push_back({"wiring", t.model.config.wiring.text});
  fields.push_back({"num_parameters", t.model.parameters.num_parameters});
  for (LogField& field : describe_run(t.run)) fields.push_back(std::move(field));
  fields.push_back({"precision", std::string(precision_name)});
  fields.push_back({"device", std::string(device_name())});
  const int64_t kv_bytes = kv_elements_per_token(t.model.config, t.model.attention_plan) * int64_t(sizeof(floatX));
  fields.push_back({"kv_bytes_per_token", kv_bytes});
  fields.push_back({"memory", memory_fields(t.model.memory)});
  return fields;
}

void finalize(Trainer& t) {
  t.model.collectives.finalize();
  t.run.channel.finalize();
  finalize_ranks(t.run.ranks);
}

int run_trainer(int argc, char** argv, Trainer& t) {
  Run& run = t.run;
  if (!parse_options(argc, argv, run.options)) return 0;
  handle_stop_signals();  // before MPI and others have threads, which would be given the signals
  run.ranks = init_ranks(run.options.ranks);
  Collectives::check_supported(run.ranks);
  if (run.ranks.rank > 0 && freopen("/dev/null", "w", stdout) == nullptr)
    user_error("cannot open /dev/null");  // only rank 0 prints
  run.channel.open(run.ranks, run.options.hang_timeout);
  std::optional<ModelConfig> in_folder;
  const std::string checkpoint = check_and_plan(t, in_folder);
  if (run.options.dry_run) return finalize(t), 0;
  if (run.ranks.rank == 0)
    run.gemm_peak = gemm_peak(0.3);  // before the plan is allocated: its matrices take 400 MB on a large GPU
  allocate(t);
  load_or_init_weights(t, in_folder, checkpoint);
  open_output(run, checkpoint, describe(t));
  check_same_data(run);  // also so that no rank waits in a collective for one that still loads
  print_start(run, checkpoint, matmul_precision());

  const double start = seconds_now();
  try {
    train(t);
  } catch (const UserError&) {
    try {
      finish_output(run);
    } catch (const UserError& e) {
      fprintf(stderr, "error: %s\n", e.what());  // the first error is the one that the run ends with
    }
    throw;
  }
  finish_output(run);
  finalize(t);
  return finish_run(run, seconds_now() - start);
}

#ifndef SLA_NO_MAIN
int main(int argc, char** argv) {
  configure_threads(argv);
  Trainer t;  // stays while the error is told: to free a GPU's memory waits for collectives, which may never end
  try {
    return run_trainer(argc, argv, t);
  } catch (const UserError& e) {
    fflush(stdout);
    if (t.run.channel.is_open()) t.run.channel.end_run(e.what());
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
#endif

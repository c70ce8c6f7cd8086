// GPT-2 with skip-layer attention (SLA): the model, its forward and backward pass, the optimizer, the training loop and the
// command line. Read from top to bottom it is: the model's memory; the forward pass; the backward pass; the update;
// generation; what the program says before it starts; the training loop.
//
// The graph is written once. What it calls (matmul_forward, attention_backward, ...) is a set of operations of the same names and
// signatures for each kind of device: llmc/cuda/ for a GPU (and for dev/emu, which runs the same kernels without one), llmc/cpu/
// for the host.
//
// B: sequences in a micro-batch, T: positions, C: channels, L: layers, h: heads, hs: head size, V: vocabulary,
// QKV: q, k and v of one token in one layer, C + 2 * hs * (heads whose k and v the layer projects).
#include <unistd.h>                      // isatty
#include <algorithm>                     // std::copy_n, std::max, std::min
#include <array>                         // std::array
#include <cmath>                         // std::isfinite
#include <cstdio>                        // printf
#include <cstring>                       // memcpy
#include <memory>                        // std::unique_ptr
#include <optional>                      // std::optional
#include <string>                        // std::string
#include <vector>                        // std::vector
#include "llmc/utils/arena.h"            // ArenaLayout
#include "llmc/attention_table.h"        // AttentionTable, KVHead
#include "llmc/run/background_writer.h"  // BackgroundWriter, SaveResult
#include "llmc/io/checkpoint.h"          // write_checkpoint, write_checkpoint_part, newest_checkpoint, RunState, OtherRanks
#include "llmc/utils/clock.h"            // seconds_now
#include "llmc/model/config.h"           // ModelConfig
#include "llmc/model/config_json.h"      // read_config_json
#include "llmc/text/dataloader.h"        // DataLoader
#include "llmc/dist/ranks.h"             // Ranks, init_ranks, finalize_ranks
#include "llmc/utils/files.h"  // make_folders, parent_folder, write_file_durably
#include "llmc/utils/error.h"            // UserError, user_error, CHECK
#include "llmc/model/flops.h"            // flops_per_token
#include "llmc/model/kv_plan.h"          // KVPlan, make_kv_plan, draw
#include "llmc/run/logger.h"             // RunLog
#include "llmc/io/model_io.h"            // ModelLayout
#include "llmc/operations.h"             // matmul_forward, attention_forward, adamw_update, device_malloc, ...
#include "llmc/run/options.h"            // TrainOptions, parse_options
#include "llmc/model/parameters.h"       // ParameterTable, ParameterBucket, ParameterChunk, Shard, Params, LayerParams
#include "llmc/precision.h"              // floatX
#include "llmc/utils/random.h"           // random_normal, random_uniform
#include "llmc/dist/rank_channel.h"      // RankChannel, WatchdogPause
#include "llmc/text/sampler.h"           // sample_token
#include "llmc/run/schedule.h"           // Schedule
#include "llmc/text/step_loader.h"       // StepLoader, StepTokens
#include "llmc/run/stop_signal.h"        // handle_stop_signals, stop_signal
#include "llmc/run/timeline.h"           // Timeline, TimelineSpan
#include "llmc/text/tokenizer.h"         // Tokenizer, Encoder, replace_invalid_utf8, printable

// ----------------------------------------------------------------------------
// The model's memory

// What layer l's forward pass leaves for its backward pass, and for the layers that read its k and v. The number behind a shape: from
// that level of recomputation on the tensor is not kept, but lies where every layer's does.
struct LayerActs {
  floatX* ln1 = nullptr;                           // (B, T, C) 2
  float *ln1_mean = nullptr, *ln1_rstd = nullptr;  // (B, T)
  floatX* q = nullptr;                             // (B, T, C) 3: rows are q_stride apart
  floatX* kv = nullptr;                            // (B, T, QKV - C): k | v of the projected heads; rows are kv_stride apart
  int64_t q_stride = 0, kv_stride = 0;             // QKV, kv lies behind q; at level 3 C and QKV - C
  floatX* att = nullptr;                           // (B, T, C) 3
  float* lse = nullptr;                            // (B, h, T) 3
  floatX* residual2 = nullptr;                     // (B, T, C) 3: after attention
  floatX* ln2 = nullptr;                           // (B, T, C) 2
  float *ln2_mean = nullptr, *ln2_rstd = nullptr;  // (B, T)
  floatX* fch = nullptr;                           // (B, T, 4C) 3
  floatX* fch_gelu = nullptr;                      // (B, T, 4C) 1
  floatX* residual3 = nullptr;                     // (B, T, C): after the MLP
};

struct Activations {
  int* tokens;                 // (B, T)
  int* targets;                // (B, T)
  std::array<int*, num_staging_buffers> staged_tokens, staged_targets;  // each (B, T): uploaded while others are computed on
  floatX* embedded;            // (B, T, C)
  std::vector<LayerActs> layers;
  floatX* lnf;                 // (B, T, C)
  float *lnf_mean, *lnf_rstd;  // (B, T)
  float* losses;               // (B, T)
  StepStats* stats;             // (1)
  floatX* branch;              // (B, T, C): what a block is about to add to the residual stream
  floatX* logits;              // (logit_rows, logit_stride): a chunk of rows at a time
  // backward only
  floatX* dresidual;           // (B, T, C): gradient of the residual stream
  floatX* dsublayer;             // (B, T, C)
  floatX* dfch;                // (B, T, 4C)
  floatX* dqkv;                // (B, T, the largest QKV)
  float* delta;                // (B, h, T): attention's rowsum(dout * out)
  std::vector<floatX*> slabs;  // (num_accumulators), each (B, T, 2 * accumulator_heads * hs): gradients of lent k | v
};

// A part of the plan as it is printed.
struct MemoryGroup {
  const char* name;
  size_t bytes;
};

struct GPT2 {
  ModelConfig config;
  KVPlan plan;
  int B = 0, T = 0;   // what the activations have room for
  int recompute = 0;  // what the backward pass computes again: 0 nothing, 1 GELU, 2 and LayerNorm, 3 all of a block but its K/V

  ParameterTable parameters;
  floatX* weight_memory = nullptr;                 // (parameters)
  float* master_memory = nullptr;                  // (state): the weights in full precision; weight_memory if that is float
  float* grad_memory = nullptr;                    // (parameters)
  float *m_memory = nullptr, *v_memory = nullptr;  // (state): AdamW's moments
  Params<floatX> weights;
  Params<float> grads;
  DeviceArray<ParameterChunk> chunks;

  ArenaLayout activation_layout;
  char* activation_memory = nullptr;
  Activations acts;
  int64_t logit_rows = 0, logit_stride = 0;
  std::vector<MemoryGroup> memory_groups;
  std::vector<AttentionTable<floatX>> attention_tables;  // (L)
  CudaGraph<int, int, float> forward_backward;        // of gpt2_forward_backward with B, T, dloss
  PinnedBuffer<StepStats> host_stats;                         // (1): where gpt2_read_stats reads them to
  Collectives collectives;                               // of the ranks that train together
  bool weights_are_coming = false;                       // from other ranks, bucket by bucket: who reads a bucket awaits it
  Timeline timeline;

  GPT2() = default;
  GPT2(const GPT2&) = delete;
  GPT2& operator=(const GPT2&) = delete;
  ~GPT2() {
    device_free(weight_memory, weight_bytes());
    device_free(grad_memory, parameters.layout.bytes);
    if (has_master_weights) device_free(master_memory, state_bytes());
    for (float* arena : {m_memory, v_memory}) device_free(arena, state_bytes());
    device_free(activation_memory, activation_layout.bytes);
  }

  ModelLayout layout() const { return {config, plan, parameters}; }
  size_t weight_bytes() const { return parameters.layout.bytes / sizeof(float) * sizeof(floatX); }
  // Of masters, and of each of the moments: of all parameters, or of this rank's slices.
  size_t state_bytes() const { return parameters.layout.bytes / size_t(parameters.shard.count); }
  const TensorSpec& tensor(int index) const { return parameters.layout.tensors[size_t(index)]; }
  int num_tensors() const { return int(parameters.layout.tensors.size()); }
};

// Logits are produced, differentiated and dropped in chunks of about this many bytes.
constexpr int64_t logit_chunk_bytes = 64 << 20;

// The one list of activations: calls declare(group of the memory plan, name, pointer to set, shape) for each. gpt2_plan walks it to
// lay them out, gpt2_allocate to set the pointers.
template <class Declare>
void for_each_activation(const GPT2& model, Activations& a, Declare declare) {
  const ModelConfig& c = model.config;
  const int64_t B = model.B, T = model.T, C = c.channels, h = c.num_heads, hs = c.head_size();
  int64_t largest_qkv = 0;
  a.layers.resize(size_t(c.num_layers));
  a.slabs.resize(size_t(model.plan.num_accumulators));
  // A tensor of layer l, or from a level of recomputation on the one that layer 0 has for all.
  auto declare_layer = [&](int l, int dropped_at, const char* name, auto LayerActs::*tensor, std::vector<int64_t> shape) {
    if (l > 0 && model.recompute >= dropped_at) a.layers[size_t(l)].*tensor = a.layers[0].*tensor;
    else declare("activations", name, a.layers[size_t(l)].*tensor, std::move(shape));
  };
  constexpr int never = 4;

  declare("activations", "tokens", a.tokens, {B, T});
  declare("activations", "targets", a.targets, {B, T});
  for (int*& slot : a.staged_tokens) declare("activations", "staged_tokens", slot, {B, T});
  for (int*& slot : a.staged_targets) declare("activations", "staged_targets", slot, {B, T});
  declare("activations", "embedded", a.embedded, {B, T, C});
  for (int l = 0; l < c.num_layers; l++) {
    LayerActs& layer = a.layers[size_t(l)];
    const int64_t QKV = qkv_rows(c, model.plan, l);
    largest_qkv = std::max(largest_qkv, QKV);
    declare_layer(l, 2, "ln1", &LayerActs::ln1, {B, T, C});
    declare_layer(l, never, "ln1_mean", &LayerActs::ln1_mean, {B, T});
    declare_layer(l, never, "ln1_rstd", &LayerActs::ln1_rstd, {B, T});
    if (model.recompute < 3) {
      declare("activations", "qkv", layer.q, {B, T, QKV});
      layer.kv = layer.q == nullptr ? nullptr : layer.q + C;
      layer.q_stride = layer.kv_stride = QKV;
    } else {
      declare_layer(l, 3, "q", &LayerActs::q, {B, T, C});
      declare("activations", "kv", layer.kv, {B, T, QKV - C});
      layer.q_stride = C, layer.kv_stride = QKV - C;
    }
    declare_layer(l, 3, "att", &LayerActs::att, {B, T, C});
    declare_layer(l, 3, "lse", &LayerActs::lse, {B, h, T});
    declare_layer(l, 3, "residual2", &LayerActs::residual2, {B, T, C});
    declare_layer(l, 2, "ln2", &LayerActs::ln2, {B, T, C});
    declare_layer(l, never, "ln2_mean", &LayerActs::ln2_mean, {B, T});
    declare_layer(l, never, "ln2_rstd", &LayerActs::ln2_rstd, {B, T});
    declare_layer(l, 3, "fch", &LayerActs::fch, {B, T, 4 * C});
    declare_layer(l, 1, "fch_gelu", &LayerActs::fch_gelu, {B, T, 4 * C});
    declare_layer(l, never, "residual3", &LayerActs::residual3, {B, T, C});
  }
  declare("activations", "lnf", a.lnf, {B, T, C});
  declare("activations", "lnf_mean", a.lnf_mean, {B, T});
  declare("activations", "lnf_rstd", a.lnf_rstd, {B, T});
  declare("activations", "losses", a.losses, {B, T});
  declare("activations", "stats", a.stats, {1});
  declare("activations", "branch", a.branch, {B, T, C});
  declare("backward buffers", "dresidual", a.dresidual, {B, T, C});
  declare("backward buffers", "dsublayer", a.dsublayer, {B, T, C});
  declare("backward buffers", "dfch", a.dfch, {B, T, 4 * C});
  declare("backward buffers", "dqkv", a.dqkv, {B, T, largest_qkv});
  declare("backward buffers", "delta", a.delta, {B, h, T});
  for (floatX*& slab : a.slabs) declare("gradients of borrowed K/V", "slab", slab, {B, T, 2 * model.plan.accumulator_heads * hs});
  declare("logits", "logits", a.logits, {model.logit_rows, model.logit_stride});
}

// Fixes the model's shape and lays out its memory, without allocating any of it. Throws UserError for a shape that the device's
// kernels don't take. `shard`: what of the optimizer state is here.
void gpt2_plan(GPT2& model, const ModelConfig& config, int B, int T, int recompute = 0, bool keep_dead_kv = false,
               Shard shard = {}) {
  validate(config);
  CHECK(1 <= B && 1 <= T && T <= config.max_seq_len && 0 <= recompute && recompute <= 3);
  if (config.head_size() % head_size_multiple != 0 || config.head_size() > largest_head_size)
    user_error("%d channels in %d heads: a head has %d, but must have a multiple of %d and at most %d here", config.channels,
               config.num_heads, config.head_size(), head_size_multiple, largest_head_size);
  if (config.channels > largest_channels) user_error("%d channels: at most %d here", config.channels, largest_channels);
  model.config = config;
  model.plan = make_kv_plan(config, keep_dead_kv);
  model.B = B, model.T = T, model.recompute = recompute;
  model.parameters = make_parameter_table(config, model.plan, shard);

  // Chunks of equal size; rows are whole tiles, with zeros where the vocabulary ends.
  const int64_t rows = int64_t(B) * T;
  model.logit_stride = padded_vocab_size(config);
  const int64_t most = std::max<int64_t>(64, logit_chunk_bytes / (model.logit_stride * int64_t(sizeof(floatX))));
  const int64_t chunks = (rows + most - 1) / most;
  model.logit_rows = (rows + chunks - 1) / chunks;

  model.memory_groups = {{"weights", model.weight_bytes()}};
  if (has_master_weights) model.memory_groups.push_back({"master weights", model.state_bytes()});
  model.memory_groups.push_back({"gradients", model.parameters.layout.bytes});
  model.memory_groups.push_back({"AdamW moments", 2 * model.state_bytes()});
  if (device_workspace_bytes() > 0) model.memory_groups.push_back({"workspaces", device_workspace_bytes()});
  model.activation_layout = ArenaLayout();
  for_each_activation(model, model.acts, [&](const char* group, const char* name, auto*& pointer,
                                             std::vector<int64_t> shape) {
    const size_t before = model.activation_layout.bytes;
    model.activation_layout.add(name, std::move(shape), sizeof *pointer);
    if (model.memory_groups.back().name != std::string(group)) model.memory_groups.push_back({group, 0});
    model.memory_groups.back().bytes += model.activation_layout.bytes - before;
  });
}

size_t gpt2_bytes(const GPT2& model) {
  size_t bytes = 0;
  for (const MemoryGroup& group : model.memory_groups) bytes += group.bytes;
  return bytes;
}

// How layer l's attention finds each pair that it reads: k and v in the cache of the layer that projected them, their gradients
// in its own dqkv if that is l itself, else in the lender's slab.
AttentionTable<floatX> make_attention_table(const GPT2& model, int l) {
  const ModelConfig& c = model.config;
  const KVPlan& plan = model.plan;
  const int64_t C = c.channels, hs = c.head_size();
  std::vector<KVHead<floatX>> views;
  std::vector<int> readers;
  for (const KVUse& read : plan.reads[size_t(l)]) {
    const int lender = read.pair.layer;
    const int64_t projected = int64_t(plan.projected[size_t(lender)].size()), column = plan.projected_index(read.pair) * hs;
    KVHead<floatX> view;
    view.stride = model.acts.layers[size_t(lender)].kv_stride;
    view.k = model.acts.layers[size_t(lender)].kv + column;
    view.v = view.k + projected * hs;
    if (lender == l) {
      view.dstride = qkv_rows(c, plan, l);
      view.dk = model.acts.dqkv + C + column;
      view.dv = view.dk + projected * hs;
    } else {
      view.dstride = 2 * plan.accumulator_heads * hs;
      view.dk = model.acts.slabs[size_t(plan.slab[size_t(lender)])] + plan.shared_index(read.pair) * hs;
      view.dv = view.dk + plan.accumulator_heads * hs;
    }
    view.accumulate = read.accumulate;
    view.first_query_head = int(readers.size());
    view.num_query_heads = int(read.heads.size());
    readers.insert(readers.end(), read.heads.begin(), read.heads.end());
    views.push_back(view);
  }
  return AttentionTable<floatX>(std::move(views), std::move(readers));
}

// Sets every byte of the activations, whose slots for uploads are then written to.
void gpt2_fill_activations(GPT2& model, int value) {
  device_memset(model.activation_memory, value, model.activation_layout.bytes);
  uploads_wait_for_compute();
}

// Allocates what gpt2_plan laid out. Weights, gradients and moments are zero. A build that checks (make DEBUG=1, dev/emu) fills the
// activations with NaN, so that nothing can be read before it is written.
void gpt2_allocate(GPT2& model) {
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
  if constexpr (has_master_weights) {
    model.weight_memory = static_cast<floatX*>(device_malloc(model.weight_bytes()));
    layout.forbid_gaps(model.weight_memory, sizeof(float) / sizeof(floatX));
    model.master_memory = state_arena();
  } else {
    model.master_memory = float_arena();
    model.weight_memory = reinterpret_cast<floatX*>(model.master_memory);  // they are floats
  }
  model.grad_memory = float_arena();
  model.m_memory = state_arena();
  model.v_memory = state_arena();
  model.weights = parameter_pointers(model.config, model.parameters, model.weight_memory);
  model.grads = parameter_pointers(model.config, model.parameters, model.grad_memory);
  model.chunks = DeviceArray<ParameterChunk>(parameter_chunks(model.parameters));

  model.activation_memory = static_cast<char*>(device_malloc(model.activation_layout.bytes));
  uploads_wait_for_compute();
#if defined(SLA_DEBUG) || defined(SLA_EMU)
  gpt2_fill_activations(model, 0xff);  // all ones: NaN as float and as bf16
#endif
  model.activation_layout.forbid_gaps(model.activation_memory);
  size_t next = 0;
  for_each_activation(model, model.acts, [&](const char*, const char*, auto*& pointer, std::vector<int64_t>) {
    void* place = model.activation_memory + model.activation_layout.tensors[next++].offset;
    pointer = static_cast<std::decay_t<decltype(pointer)>>(place);
  });
  model.host_stats = PinnedBuffer<StepStats>(1);
  model.attention_tables.clear();
  for (int l = 0; l < model.config.num_layers; l++) model.attention_tables.push_back(make_attention_table(model, l));
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
// And back into such an arena: what of a tensor lies in this process's slices.
StoreTensor store_shard(const GPT2& model, float* arena) {
  return [&model, arena](int index, const float* values) {
    const ShardRange part = shard_range(model.parameters, model.parameters.specs[size_t(index)]);
    copy_to_device(arena + part.state, values, size_t(part.count) * sizeof(float));
  };
}

// For the weights: all of what the kernels read, which is rounded from the masters, and this process's slices of those.
StoreTensor store_weights(GPT2& model) {
  return [&model](int index, const float* values) {
    const TensorSpec& tensor = model.tensor(index);
    const std::vector<floatX> rounded(values, values + tensor.num_elements());
    copy_to_device(model.weight_memory + tensor.element_offset(), rounded.data(), rounded.size() * sizeof(floatX));
    const ShardRange part = shard_range(model.parameters, model.parameters.specs[size_t(index)]);
    if (has_master_weights && part.count > 0)
      store_shard(model, model.master_memory)(index, values + (part.begin - tensor.element_offset()));
  };
}

// GPT-2's initialisation. Each weight depends on the seed, its tensor and its place in the full-size tensor alone: models
// with and without dead rows begin as the same function.
void gpt2_init_weights(GPT2& model, uint64_t seed) {
  std::vector<float> host;
  for (int index = 0; index < model.num_tensors(); index++) {
    const ParameterSpec& spec = model.parameters.specs[size_t(index)];
    const TensorSpec& tensor = model.tensor(index);
    const int64_t rows = tensor.shape[0], columns = tensor.num_elements() / rows;
    const bool is_layernorm_weight = !spec.is_weight && tensor.name.find(".weight") != std::string::npos;
    host.assign(size_t(tensor.num_elements()), is_layernorm_weight ? 1.0f : 0.0f);
    if (spec.is_weight) {
#pragma omp parallel for schedule(static)
      for (int64_t row = 0; row < rows; row++) {
        int64_t full = spec.qkv_layer < 0 ? row : full_qkv_row(model.config, model.plan, spec.qkv_layer, row);
        for (int64_t i = 0; i < columns; i++)
          host[size_t(row * columns + i)] =
              float(spec.init_std * random_normal(seed, RandomStream::init, uint32_t(index), uint64_t(full * columns + i)));
      }
    }
    store_weights(model)(index, host.data());
  }
}

// ----------------------------------------------------------------------------
// Forward

// The rows of a (B, T, width) tensor from the first position on that is computed.
template <class T>
T* rows(T* tensor, int64_t width, const AttentionShape& shape) { return tensor + shape.first_query * width; }

// Layer l from ln1 to ln2: q, k and v, attention, its projection, and the residual stream with the next LayerNorm.
// When the backward pass computes a block again, k and v are still there.
void attention_block_forward(GPT2& model, int l, const AttentionShape& s, bool kv_is_there = false) {
  const LayerParams<floatX>& p = model.weights.layers[size_t(l)];
  const LayerActs& a = model.acts.layers[size_t(l)];
  const int64_t C = model.config.channels, N = s.B * (s.T - s.first_query), QKV = qkv_rows(model.config, model.plan, l);
  const floatX* residual = rows(l == 0 ? model.acts.embedded : model.acts.layers[size_t(l - 1)].residual3, C, s);
  floatX *ln1 = rows(a.ln1, C, s), *q = rows(a.q, a.q_stride, s), *branch = rows(model.acts.branch, C, s);

  if (model.recompute < 3) {
    matmul_forward(q, ln1, p.qkvw, p.qkvb, N, C, QKV);
  } else {
    matmul_forward(q, ln1, p.qkvw, p.qkvb, N, C, C);
    if (!kv_is_there && QKV > C)
      matmul_forward(rows(a.kv, a.kv_stride, s), ln1, p.qkvw + C * C, p.qkvb != nullptr ? p.qkvb + C : nullptr, N, C, QKV - C);
  }
  attention_forward(a.att, a.lse, a.q, a.q_stride, model.attention_tables[size_t(l)], s);  // who reads whose k and v: in the table
  matmul_forward(branch, rows(a.att, C, s), p.attprojw, p.attprojb, N, C, C);
  residual_layernorm_forward(rows(a.residual2, C, s), rows(a.ln2, C, s), rows(a.ln2_mean, 1, s), rows(a.ln2_rstd, 1, s), residual,
                             branch, p.ln2w, p.ln2b, N, C, float(model.config.layer_norm_eps));
}

// Layer l from ln2 to the MLP's hidden units.
void mlp_hidden_forward(GPT2& model, int l, const AttentionShape& s) {
  const LayerParams<floatX>& p = model.weights.layers[size_t(l)];
  const LayerActs& a = model.acts.layers[size_t(l)];
  const int64_t C = model.config.channels, N = s.B * (s.T - s.first_query);
  matmul_gelu_forward(rows(a.fch_gelu, 4 * C, s), rows(a.fch, 4 * C, s), rows(a.ln2, C, s), p.fcw, p.fcb, N, C, 4 * C);
}

// The number of tokens in B sequences of T, for which there is room.
size_t num_tokens(const GPT2& model, int B, int T) {
  CHECK(1 <= B && 1 <= T && int64_t(B) * T <= int64_t(model.B) * model.T);
  return size_t(B) * size_t(T);
}

// Operations that are called from here on find the bucket's weights as the last update has left them on all ranks.
void await_weights(GPT2& model, size_t bucket) {
  if (model.weights_are_coming) model.collectives.await(bucket);
}

// The final hidden states (acts.lnf) of B sequences of T tokens, those in acts.tokens. With first > 0, of one sequence, positions
// [first, T) only: those before have been through here, and the later ones attend to the k and v that they left behind.
void gpt2_forward(GPT2& model, int B, int T, int first = 0) {
  const ModelConfig& c = model.config;
  CHECK(T <= c.max_seq_len && (first == 0 || B == 1) && first < T);
  const int64_t C = c.channels, N = int64_t(B) * (T - first);
  const float eps = float(c.layer_norm_eps);
  const AttentionShape s = {B, T, c.num_heads, c.head_size(), first};
  Activations& a = model.acts;

  await_weights(model, 0);
  embedding_forward(rows(a.embedded, C, s), rows(a.tokens, 1, s), model.weights.wte, model.weights.wpe, B, T - first, C, first);
  const LayerActs& bottom = a.layers[0];
  await_weights(model, 1);
  layernorm_forward(rows(bottom.ln1, C, s), rows(bottom.ln1_mean, 1, s), rows(bottom.ln1_rstd, 1, s), rows(a.embedded, C, s),
                    model.weights.layers[0].ln1w, model.weights.layers[0].ln1b, N, C, eps);

  for (int l = 0; l < c.num_layers; l++) {
    const LayerParams<floatX>& p = model.weights.layers[size_t(l)];
    const LayerActs& layer = a.layers[size_t(l)];
    const Timeline::Scope span = model.timeline.span("forward", size_t(l) + 1);
    attention_block_forward(model, l, s);
    mlp_hidden_forward(model, l, s);
    matmul_forward(rows(a.branch, C, s), rows(layer.fch_gelu, 4 * C, s), p.fcprojw, p.fcprojb, N, 4 * C, C);

    // The sum goes into the next LayerNorm, which is the next layer's first or the final one.
    const bool last = l + 1 == c.num_layers;
    const LayerActs* next = last ? nullptr : &a.layers[size_t(l + 1)];
    const LayerParams<floatX>* next_p = last ? nullptr : &model.weights.layers[size_t(l + 1)];
    await_weights(model, size_t(l) + 2);
    residual_layernorm_forward(rows(layer.residual3, C, s), rows(last ? a.lnf : next->ln1, C, s),
                               rows(last ? a.lnf_mean : next->ln1_mean, 1, s), rows(last ? a.lnf_rstd : next->ln1_rstd, 1, s),
                               rows(layer.residual2, C, s), rows(a.branch, C, s), last ? model.weights.lnfw : next_p->ln1w,
                               last ? model.weights.lnfb : next_p->ln1b, N, C, eps);
  }
  model.weights_are_coming = false;
}

// The same of `tokens` (B, T), on the host.
void gpt2_forward(GPT2& model, const int* tokens, int B, int T, int first = 0) {
  copy_to_device(model.acts.tokens, tokens, num_tokens(model, B, T) * sizeof(int));
  gpt2_forward(model, B, T, first);
}

// The logits of `count` rows of acts.lnf, from `first_row` on, into acts.logits.
void gpt2_logits(GPT2& model, int64_t first_row, int64_t count) {
  const int64_t C = model.config.channels, Vp = model.logit_stride;
  gemm('N', 'T', count, Vp, C, model.acts.lnf + first_row * C, C, model.weights.wte, C, false, model.acts.logits, Vp);
}

// acts.losses (B, T) = cross-entropy of acts.targets, in nats; acts.stats->loss += their mean. With `backward` also the head's
// gradients of dloss * sum(losses): acts.dsublayer = that of lnf, grads.wte +=.
void gpt2_loss(GPT2& model, int B, int T, bool backward, float dloss = 0) {
  const int64_t C = model.config.channels, V = model.config.vocab_size, Vp = model.logit_stride, N = int64_t(B) * T;
  Activations& a = model.acts;
  for (int64_t row = 0; row < N; row += model.logit_rows) {
    const int64_t count = std::min(model.logit_rows, N - row);
    gpt2_logits(model, row, count);
    classifier(a.losses + row, a.logits, a.targets + row, count, V, Vp, dloss, backward);
    if (!backward) continue;
    gemm('N', 'N', count, C, Vp, a.logits, Vp, model.weights.wte, C, false, a.dsublayer + row * C, C);
    gemm('T', 'N', Vp, C, count, a.logits, Vp, a.lnf + row * C, C, true, model.grads.wte, C);
  }
  add_mean_loss(&a.stats->loss, a.losses, N);
}

// The same of `targets` (B, T), on the host, without gradients.
void gpt2_loss(GPT2& model, const int* targets, int B, int T) {
  copy_to_device(model.acts.targets, targets, num_tokens(model, B, T) * sizeof(int));
  gpt2_loss(model, B, T, /*backward=*/false);
}

void gpt2_zero_loss(GPT2& model) { device_memset(&model.acts.stats->loss, 0, sizeof(double)); }

// What gpt2_loss has added up since gpt2_zero_loss, and what gpt2_update found. Waits for the device.
StepStats gpt2_read_stats(GPT2& model) {
  copy_to_host(model.host_stats.data, model.acts.stats, sizeof(StepStats));
  return *model.host_stats.data;
}

// ----------------------------------------------------------------------------
// Backward

// Layer l's part of dqkv for its k and v that come from elsewhere: the lent pairs have their readers' gradients waiting in a slab
// (= here, before the layer's own attention adds to them or reuses the slab); a pair that nobody reads has none.
void load_dkv_accumulator(GPT2& model, int l, int64_t N) {
  const KVPlan& plan = model.plan;
  const int64_t C = model.config.channels, hs = model.config.head_size(), QKV = qkv_rows(model.config, plan, l);
  const int64_t kv = int64_t(plan.projected[size_t(l)].size()) * hs, slab_kv = plan.accumulator_heads * hs;
  auto fold = [&](int head, int heads, const floatX* slab) {  // `heads` neighbours at once
    floatX* dk = model.acts.dqkv + C + plan.projected_index({l, head}) * hs;
    copy_rows(dk, QKV, slab, 2 * slab_kv, N, heads * hs);
    copy_rows(dk + kv, QKV, slab != nullptr ? slab + slab_kv : nullptr, 2 * slab_kv, N, heads * hs);
  };
  const std::vector<int>& lent = plan.lent[size_t(l)];
  for (size_t i = 0, n; i < lent.size(); i += n) {
    for (n = 1; i + n < lent.size() && plan.projected_index({l, lent[i + n]}) == plan.projected_index({l, lent[i]}) + int(n);) n++;
    fold(lent[i], int(n), model.acts.slabs[size_t(plan.slab[size_t(l)])] + int64_t(i) * hs);
  }
  for (int head : plan.unread(l)) fold(head, 1, nullptr);
}

// What the recompute level has not kept of layer l, from its residual streams, its k and v, and those it borrows.
void recompute_layer(GPT2& model, int l, const AttentionShape& s) {
  const LayerParams<floatX>& p = model.weights.layers[size_t(l)];
  const LayerActs& a = model.acts.layers[size_t(l)];
  const int64_t C = model.config.channels, N = s.B * s.T;
  const float eps = float(model.config.layer_norm_eps);
  const floatX* residual = l == 0 ? model.acts.embedded : model.acts.layers[size_t(l - 1)].residual3;
  if (model.recompute >= 2) layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b, N, C, eps);
  if (model.recompute >= 3) {
    attention_block_forward(model, l, s, /*kv_is_there=*/true);
    mlp_hidden_forward(model, l, s);
    return;
  }
  if (model.recompute >= 2) layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, N, C, eps);
  if (model.recompute >= 1) gelu_forward(a.fch_gelu, a.fch, N * 4 * C);
}

// Begins the sum of a bucket's gradients over the ranks, beside the operations that follow: each rank will have that of its slice, or
// with one slice of all.
void gpt2_sum_over_ranks(GPT2& model, size_t index) {
  const ParameterBucket& bucket = model.parameters.buckets[index];
  Collectives& c = model.collectives;
  c.comm_waits_for_compute();
  const Timeline::Scope span = model.timeline.span("reduce", index, &c);
  if (model.parameters.shard.count > 1) c.reduce_scatter(model.grad_memory + bucket.begin, bucket.count);
  else c.all_reduce(model.grad_memory + bucket.begin, bucket.count);
}

// grads += the gradients of what gpt2_forward and gpt2_loss computed last. acts.dsublayer holds the gradient of lnf. With `sum_over_ranks`
// a bucket's gradients are summed as soon as they are complete.
void gpt2_backward(GPT2& model, int B, int T, bool sum_over_ranks = false) {
  const ModelConfig& c = model.config;
  const int64_t C = c.channels, N = int64_t(B) * T;
  const AttentionShape shape = {B, T, c.num_heads, c.head_size(), 0};
  Activations& a = model.acts;

  device_memset(a.dresidual, 0, size_t(N * C) * sizeof(floatX));
  layernorm_backward(a.dresidual, model.grads.lnfw, model.grads.lnfb, a.dsublayer, a.layers.back().residual3, a.lnf_mean,
                     a.lnf_rstd, model.weights.lnfw, N, C);
  const size_t final_bucket = model.parameters.buckets.size() - 1;
  if (sum_over_ranks) gpt2_sum_over_ranks(model, final_bucket);

  for (int l = c.num_layers - 1; l >= 0; l--) {
    const LayerParams<floatX>& p = model.weights.layers[size_t(l)];
    const LayerParams<float>& g = model.grads.layers[size_t(l)];
    const LayerActs& s = a.layers[size_t(l)];
    const int64_t QKV = qkv_rows(c, model.plan, l);
    const floatX* residual = l == 0 ? a.embedded : a.layers[size_t(l - 1)].residual3;
    const Timeline::Scope span = model.timeline.span("backward", size_t(l) + 1);

    if (l + 1 < c.num_layers) recompute_layer(model, l, shape);  // the last layer's tensors are still there
    matmul_gelu_backward(a.dfch, g.fcprojw, g.fcprojb, a.dresidual, s.fch_gelu, s.fch, p.fcprojw, N, 4 * C, C);
    matmul_backward(a.dsublayer, g.fcw, g.fcb, a.dfch, s.ln2, p.fcw, N, C, 4 * C);
    layernorm_backward(a.dresidual, g.ln2w, g.ln2b, a.dsublayer, s.residual2, s.ln2_mean, s.ln2_rstd, p.ln2w, N, C);

    matmul_backward(a.dsublayer, g.attprojw, g.attprojb, a.dresidual, s.att, p.attprojw, N, C, C);
    load_dkv_accumulator(model, l, N);
    attention_backward(a.dqkv, QKV, a.delta, a.dsublayer, s.att, s.lse, s.q, s.q_stride, model.attention_tables[size_t(l)], shape);
    matmul_backward(a.dsublayer, g.qkvw, g.qkvb, a.dqkv, s.ln1, p.qkvw, N, C, QKV);
    layernorm_backward(a.dresidual, g.ln1w, g.ln1b, a.dsublayer, residual, s.ln1_mean, s.ln1_rstd, p.ln1w, N, C);
    if (sum_over_ranks) gpt2_sum_over_ranks(model, size_t(l) + 1);
  }
  embedding_backward(model.grads.wte, model.grads.wpe, a.dresidual, a.tokens, B, T, C);
  if (sum_over_ranks) gpt2_sum_over_ranks(model, 0);
}

void gpt2_zero_grad(GPT2& model) { device_memset(model.grad_memory, 0, model.parameters.layout.bytes); }

// What is computed on the micro-batch in acts.tokens and acts.targets: acts.stats->loss += its mean loss, grads += the gradients of
// dloss * sum(losses).
void gpt2_forward_backward(GPT2& model, int B, int T, float dloss, bool sum_over_ranks = false) {
  gpt2_forward(model, B, T);
  gpt2_loss(model, B, T, /*backward=*/true, dloss);
  gpt2_backward(model, B, T, sum_over_ranks);
}

// One micro-batch of an update that averages `num_micro_batches` of them, over all ranks: acts.stats->loss and grads += as above. Waits
// for nothing: inputs and targets (B, T) lie in host memory, and if it is a PinnedBuffer's they stay as they are until gpt2_read_stats has
// returned. After a rank's last one gradients are summed over the ranks, and before its first one weights come from them; these two
// are not recorded, because they take two streams.
void gpt2_micro_step(GPT2& model, const int* inputs, const int* targets, int B, int T, int64_t num_micro_batches, bool last = true) {
  Activations& a = model.acts;
  const size_t count = num_tokens(model, B, T);
  upload({{a.tokens, a.staged_tokens, inputs, count}, {a.targets, a.staged_targets, targets, count}});
  const float dloss = float(1.0 / (double(B) * T * double(num_micro_batches)));
  const bool sum_over_ranks = last && model.collectives.size() > 1;
  if (sum_over_ranks || model.weights_are_coming || model.timeline.on) gpt2_forward_backward(model, B, T, dloss, sum_over_ranks);
  else model.forward_backward.run([&](int b, int t, float d) { gpt2_forward_backward(model, b, t, d); }, B, T, dloss);
}

// acts.stats->loss = its sum over ranks.
void gpt2_sum_loss_over_ranks(GPT2& model) {
  model.collectives.comm_waits_for_compute();
  model.collectives.all_reduce(&model.acts.stats->loss, 1);
  model.collectives.compute_waits_for_comm();
}

// acts.stats->stop_requests > 0 if this rank or another one asks for it: ranks stop after the same step.
void gpt2_share_stop_request(GPT2& model, bool asks) {
  double& requests = model.acts.stats->stop_requests;
  device_memset(&requests, asks ? 0x3f : 0, sizeof requests);  // eight bytes 0x3f are a small positive number
  model.collectives.comm_waits_for_compute();
  model.collectives.all_reduce(&requests, 1);
  model.collectives.compute_waits_for_comm();
}

// ----------------------------------------------------------------------------
// Update

struct AdamWOptions {
  double learning_rate, beta1, beta2, eps, weight_decay;
  double grad_clip;  // 0: none
};

// acts.stats->grad_squares = the square of the gradients' 2-norm, of those in this rank's slices.
void gpt2_square_grads(GPT2& model) {
  sum_of_squares(&model.acts.stats->grad_squares, model.grad_memory, model.chunks.data, int64_t(model.chunks.size));
}

// AdamW's update number `step`, from 1, with gradients clipped by their norm, but left as they are; weights of two or more
// dimensions decay. Changes nothing if the loss or the norm is not finite: gpt2_read_stats tells. Waits for nothing. Every rank takes the
// same decision and has the same weights afterwards: acts.stats->loss becomes the sum over ranks before anything depends on it. Each
// rank's weights are still on their way to the others when the next forward pass begins, which awaits them layer by layer.
void gpt2_update(GPT2& model, int64_t step, const AdamWOptions& o) {
  AdamWStep s;
  s.learning_rate = float(o.learning_rate), s.beta1 = float(o.beta1), s.beta2 = float(o.beta2), s.eps = float(o.eps);
  s.bias_correction1 = float(1 - std::pow(o.beta1, double(step)));
  s.bias_correction2 = float(1 - std::pow(o.beta2, double(step)));
  s.grad_clip = o.grad_clip, s.weight_decay = float(o.weight_decay);
  Collectives& c = model.collectives;
  const ParameterTable& table = model.parameters;
  const bool is_sharded = table.shard.count > 1;
  c.compute_waits_for_comm();  // the sums of the gradients
  gpt2_square_grads(model);
  gpt2_sum_loss_over_ranks(model);
  if (is_sharded) {
    c.comm_waits_for_compute();
    c.all_reduce(&model.acts.stats->grad_squares, 1);
    c.compute_waits_for_comm();
  }
  adamw_update(model.weight_memory, has_master_weights ? model.master_memory : nullptr, model.m_memory, model.v_memory,
               model.grad_memory, model.chunks.data, int64_t(model.chunks.size), s, model.acts.stats);
  if (!is_sharded) return;
  c.comm_waits_for_compute();
  for (size_t i = 0; i < table.buckets.size(); i++) {  // in the order in which the next forward pass reads them
    const ParameterBucket& bucket = table.buckets[i];
    floatX* weights = model.weight_memory + bucket.begin;
    {
      const Timeline::Scope span = model.timeline.span("gather", i, &c);
      c.all_gather<floatX>(weights, weights + table.shard.index * (bucket.count / table.shard.count), bucket.count);
    }
    c.mark(i);
  }
  model.weights_are_coming = true;
}

// host (parameters) = the masters, on rank 0, for a checkpoint. Every rank that has slices calls it. They go by way of the gradients'
// arena, whose contents nobody needs between two updates.
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
  if (model.collectives.rank() != 0) return;
  for (int i = 0; i < model.num_tensors(); i++) fetch_from(model, arena)(i, host + model.tensor(i).element_offset());
}

// ----------------------------------------------------------------------------
// Generation

// Continues `tokens` until there are `length` of them, which is at most model.T. Every token goes through the model once; the cached
// k and v are the activations that training uses. The n-th token is drawn with the n-th random number of (seed, step).
void gpt2_generate(GPT2& model, std::vector<int>& tokens, int length, double temperature, uint64_t seed, int64_t step) {
  CHECK(!tokens.empty() && length <= model.T);
  std::vector<floatX> logits(size_t(model.config.vocab_size));
  int done = 0;
  while (int(tokens.size()) < length) {
    const int n = int(tokens.size());
    gpt2_forward(model, tokens.data(), 1, n, done);
    gpt2_logits(model, n - 1, 1);
    copy_to_host(logits.data(), model.acts.logits, logits.size() * sizeof(floatX));
    const std::vector<float> values(logits.begin(), logits.end());
    double uniform = random_uniform(seed, RandomStream::sample, uint32_t(step), uint64_t(n));
    tokens.push_back(sample_token(values.data(), model.config.vocab_size, uniform, temperature));
    done = n;
  }
}

// ----------------------------------------------------------------------------
// What the program says before it starts

std::string count_text(double n) {
  if (n >= 1e9) return format("%.2f B", n * 1e-9);
  return n >= 1e6 ? format("%.2f M", n * 1e-6) : n >= 1e4 ? format("%.1f k", n * 1e-3) : format("%.0f", n);
}

std::string bytes_text(double n) {
  return n >= 1e9 ? format("%.2f GB", n * 1e-9) : n >= 1e6 ? format("%.1f MB", n * 1e-6) : format("%.1f kB", n * 1e-3);
}

std::string time_text(double seconds) {
  const long s = long(seconds + 0.5);
  if (s < 60) return format("%lds", s);
  if (s < 3600) return format("%ldm%02lds", s / 60, s % 60);
  return format("%ldh%02ldm", s / 3600, s / 60 % 60);
}

void print_model(const GPT2& model) {
  const ModelConfig& c = model.config;
  printf("model: %d layers, %d heads of %d, %d channels, vocabulary %d, %d positions, %s\n", c.num_layers, c.num_heads,
         c.head_size(), c.channels, c.vocab_size, c.max_seq_len, c.bias ? "biases" : "no biases");
  if (c.num_skip_head == 0)
    printf("attention: plain, each head reads its own layer's K/V\n");
  else
    printf("skip-layer attention: from layer %d on, the last %d heads read the K/V of the layer %d below\n%s",
           c.num_skip_layer, c.num_skip_head, c.num_skip_layer, draw(model.plan).c_str());
  const ParameterTable& p = model.parameters;
  const int64_t dead = p.num_parameters_full - p.num_parameters;
  printf("parameters: %lld", (long long)p.num_parameters);
  if (dead > 0)
    printf(" (%lld less %lld, %.2f %%, of K/V rows that no head reads)", (long long)p.num_parameters_full, (long long)dead,
           100.0 * double(dead) / double(p.num_parameters_full));
  printf("\n");
}

// The chunk of logits, which is planned last: the only tensor of the activations that does not grow with every sequence.
size_t logits_bytes(const GPT2& model) { return model.memory_groups.back().bytes; }

// The largest micro-batch of T tokens a sequence whose plan takes at most `available` bytes; 0 if one sequence is too many. Asks
// gpt2_plan, not an estimate: chunks of logits are of equal size, so their bytes go up and down from one B to the next.
int largest_micro_batch(const ModelConfig& config, int T, int recompute, bool keep_dead_kv, size_t available, Shard shard = {}) {
  auto fits = [&](int B, bool with_logits) {
    GPT2 model;
    gpt2_plan(model, config, B, T, recompute, keep_dead_kv, shard);
    return gpt2_bytes(model) - (with_logits ? 0 : logits_bytes(model)) <= available;
  };
  constexpr int most = 1 << 30;
  int fitting = 0, too_many = 1;  // by what only grows with B
  while (too_many < most && fits(too_many, false)) fitting = too_many, too_many *= 2;
  while (too_many - fitting > 1) {
    const int middle = fitting + (too_many - fitting) / 2;
    (fits(middle, false) ? fitting : too_many) = middle;
  }
  while (fitting > 0 && !fits(fitting, true)) fitting--;
  return fitting;
}

// What save_checkpoint copies to host memory for the writer: m and v of each rank that has slices of them, or of rank 0, whose are
// all weights, too.
size_t checkpoint_copy_bytes(const GPT2& model, int rank) {
  if (rank > 0 && model.parameters.shard.count == 1) return 0;
  return (rank == 0 ? model.parameters.layout.bytes : 0) + 2 * model.state_bytes();
}

// `host_bytes`: what will be allocated in host memory for checkpoints. Throws UserError if the plan does not fit into what is free.
void print_memory_plan(const GPT2& model, size_t host_bytes = 0) {
  const size_t beside = device_memory_is_host_memory ? host_bytes : 0, total = gpt2_bytes(model) + beside;
  const size_t available = device_memory_available() + device_workspace_bytes();  // the workspaces have been taken already
  printf("memory plan for B %d, T %d, recompute level %d:\n", model.B, model.T, model.recompute);
  for (const MemoryGroup& group : model.memory_groups)
    printf("  %-26s %10s\n", group.name, bytes_text(double(group.bytes)).c_str());
  if (host_bytes > 0)
    printf("  %-26s %10s%s\n", "copy for checkpoints", bytes_text(double(host_bytes)).c_str(),
           beside > 0 ? "" : " of host memory, beside the total");
  printf("  %-26s %10s of %s free on the %s\n", "total", bytes_text(double(total)).c_str(),
         bytes_text(double(available)).c_str(), device_name());

  const bool keeps_dead_kv = model.parameters.num_parameters == model.parameters.num_parameters_full;
  printf("  each sequence takes %s beside the logits; the largest micro-batch that fits is %d\n",
         bytes_text(double(model.activation_layout.bytes - logits_bytes(model)) / model.B).c_str(),
         largest_micro_batch(model.config, model.T, model.recompute, keeps_dead_kv, available - std::min(available, beside),
                             model.parameters.shard));
  if (total > available)
    user_error("the plan exceeds the free memory by %s; take a smaller -b or -t%s", bytes_text(double(total - available)).c_str(),
               model.recompute < 3 ? ", or recompute more (-r 3)" : "");
}

// ----------------------------------------------------------------------------
// Training

// A run: what the options describe, loaded and ready.
struct Run {
  TrainOptions options;
  Ranks ranks;
  GPT2 model;
  std::unique_ptr<DataLoader> train, val;
  std::optional<Tokenizer> tokenizer;                 // what the model's tokens stand for, if that is known
  std::string tokenizer_json;                         // as checkpoints carry it, on rank 0; "" without one
  std::vector<int> prompt;                            // with which samples begin
  Schedule schedule;
  RunLog log;
  int B = 0, T = 0;
  int64_t grad_accum_steps = 1;                     // micro-batches of each rank in an update
  int64_t step = 0, steps = 0;                      // done, and to do in all
  int64_t skipped_steps = 0, bad_steps_in_row = 0;  // of those done: without an update, and the last ones without
  double gemm_peak = 0;                               // FLOP/s
  PinnedBuffer<int> step_tokens;                         // (2, 2, grad_accum_steps, B, T): inputs and targets of this step and the next
  std::optional<StepLoader> step_loader;              // into them; there from the first step on
  // progress
  double training_seconds = 0;
  int64_t first_step = 0;
  double last_line = 0;  // when a line of progress last stayed on the terminal
  // checkpoints
  double stall_seconds = 0;          // for which training waited for it
  bool save_failed = false;          // the last one told of
  PinnedBuffer<float> checkpoint_copy;  // m and v (state), and rank 0's weights (parameters); while a checkpoint is written, the writer's
  RankChannel channel;               // gone before the model, whose collectives it watches
  BackgroundWriter writer;           // gone before anything that it uses

  int64_t num_micro_batches() const { return grad_accum_steps * ranks.size; }  // in an update
};

// The checkpoint that the options ask to go on from, every byte of which has been verified; "" for a run that starts anew.
std::string checkpoint_to_resume(const TrainOptions& o) {
  const std::string newest = o.out.empty() ? "" : newest_checkpoint(o.out);
  if (!o.resume && !newest.empty())
    user_error("-o %s: holds the checkpoints of an earlier run; go on with it (-y), or name another folder", o.out.c_str());
  const std::string checkpoint = o.resume_from.empty() ? newest : o.resume_from;
  if (checkpoint.empty()) return "";
  auto damage = [](const std::string& folder) -> std::string {
    try {
      verify_checkpoint(folder);
      return "";
    } catch (const UserError& e) {
      return e.what();
    }
  };
  const int64_t step = checkpoint_step(o.out, checkpoint);
  const std::string what = damage(checkpoint);
  if (what.empty()) return checkpoint;
  std::string older = newest_checkpoint(o.out, step);
  while (!older.empty() && !damage(older).empty()) older = newest_checkpoint(o.out, checkpoint_step(o.out, older));
  if (older.empty()) user_error("%s; there is no older checkpoint in %s to go on from", what.c_str(), o.out.c_str());
  user_error("%s; an older checkpoint is whole: go on from it with --resume-from %s", what.c_str(), older.c_str());
}

// The tokenizer that --tokenizer names, or the model's folder has (a checkpoint to go on from, if there is one), or the data's. Those of
// them that there are must have the same tokens. If there is none, a model of 257 tokens is one of bytes, and what others' stand for is
// not known.
std::optional<Tokenizer> choose_tokenizer(const Run& run, const std::string& model_folder, int vocab_size) {
  const TrainOptions& o = run.options;
  if (o.tokenizer == "none") return std::nullopt;
  auto folder_of = [](const DataLoader& data) { return parent_folder(data.shards.files[0].path); };
  std::vector<std::string> folders = {folder_of(*run.train)}, paths = {o.tokenizer};
  if (!model_folder.empty()) folders.insert(folders.begin(), model_folder);
  if (run.val && folder_of(*run.val) != folders.back()) folders.push_back(folder_of(*run.val));
  for (const std::string& folder : folders) paths.push_back(Tokenizer::file_in(folder));
  std::optional<Tokenizer> chosen;
  std::string from;
  for (const std::string& path : paths) {
    if (path.empty()) continue;
    Tokenizer tokenizer = Tokenizer::load(path);
    if (chosen && !chosen->agrees_with(tokenizer))
      user_error("%s and %s are different vocabularies, but data and model must have the same; with --tokenizer none they are not compared, "
                 "and samples are numbers", from.c_str(), path.c_str());
    if (!chosen) chosen = std::move(tokenizer), from = path;
  }
  if (!chosen && vocab_size == byte_vocab_size) return Tokenizer::bytes();
  if (chosen && chosen->vocab_size() > vocab_size)
    user_error("%s: has %d tokens, the model %d; give the model as many (--vocab-size), or name its own vocabulary (--tokenizer)",
               from.c_str(), chosen->vocab_size(), vocab_size);
  return chosen;
}

// What samples begin with: an end of text, which without a tokenizer is the last token, as in GPT-2's vocabulary, and --prompt.
std::vector<int> prompt_tokens(const Run& run, int vocab_size) {
  const TrainOptions& o = run.options;
  if (!run.tokenizer && !o.prompt.empty())
    user_error("--prompt: neither model nor data have a vocabulary with them; name it with --tokenizer");
  if (!run.tokenizer) return {vocab_size - 1};
  std::string text = o.prompt;
  if (!run.tokenizer->is_bytes()) replace_invalid_utf8(o.prompt, text);
  std::vector<uint16_t> tokens = {run.tokenizer->end_of_text()};
  Encoder(*run.tokenizer).encode_special(text, tokens);
  if (!o.prompt.empty() && int64_t(tokens.size()) >= o.sample_length)
    user_error("--prompt: makes %zu tokens with the end of text before it, and a sample has %lld; take a longer one (-g)", tokens.size(),
               (long long)o.sample_length);
  return {tokens.begin(), tokens.end()};
}

// Everything that can be wrong is found here, before anything is written.
void check_and_plan(Run& run, bool& from_folder, std::string& checkpoint) {
  const TrainOptions& o = run.options;
  run.channel.check_same_on_all_ranks("options", o.as_toml);
  checkpoint = run.channel.broadcast(run.ranks.rank == 0 ? checkpoint_to_resume(o) : "");
  if (!checkpoint.empty()) run.channel.check_same_on_all_ranks("the checkpoint's checksum", checkpoint_checksum(checkpoint));
  ModelConfig config = model_config(o, from_folder);
  if (!checkpoint.empty()) {
    ModelConfig saved = read_config_json(checkpoint);
    auto same = [](const ModelConfig& a, const ModelConfig& b) {
      return a.num_layers == b.num_layers && a.num_heads == b.num_heads && a.channels == b.channels && a.bias == b.bias &&
             a.vocab_size == b.vocab_size && a.max_seq_len == b.max_seq_len && a.num_skip_head == b.num_skip_head &&
             (a.num_skip_head == 0 || a.num_skip_layer == b.num_skip_layer);
    };
    if (!same(config, saved)) user_error("-y: %s is of another model than the options describe", checkpoint.c_str());
    config = saved;
  }
  run.B = o.micro_batch;
  run.T = o.seq_len.value_or(std::min(1024, config.max_seq_len));
  if (run.T > config.max_seq_len)
    user_error("-t %d, but the model has %d positions; take a shorter length%s", run.T, config.max_seq_len,
               from_folder ? "" : ", or more positions (--max-seq-len)");
  const int64_t micro_tokens = int64_t(run.B) * run.T * run.ranks.size, total_batch = o.total_batch.value_or(micro_tokens);
  if (total_batch % micro_tokens != 0)
    user_error("-d %lld is not a multiple of B * T%s = %d * %d%s = %lld tokens; take one that is", (long long)total_batch,
               run.ranks.size > 1 ? " * ranks" : "", run.B, run.T,
               run.ranks.size > 1 ? format(" * %d", run.ranks.size).c_str() : "", (long long)micro_tokens);
  if (o.sample_every > 0 && o.sample_length > run.T)
    user_error("-g %lld: a sample can be at most T = %d tokens long", (long long)o.sample_length, run.T);
  run.grad_accum_steps = total_batch / micro_tokens;

  run.train = std::make_unique<DataLoader>(o.train_data, config.vocab_size, run.T, o.shuffle, uint64_t(o.seed));
  if (!o.val_data.empty()) {
    run.val = std::make_unique<DataLoader>(o.val_data, config.vocab_size, run.T);
    if (run.val->num_sequences < run.B)
      user_error("-j %s: has %lld windows of T = %d tokens, a micro-batch needs %d; take a smaller -b or more text",
                 o.val_data.c_str(), (long long)run.val->num_sequences, run.T, run.B);
  }
  run.tokenizer = choose_tokenizer(run, !checkpoint.empty() ? checkpoint : from_folder ? o.model : "", config.vocab_size);
  if (run.tokenizer && !o.out.empty() && run.ranks.rank == 0) run.tokenizer_json = run.tokenizer->to_json();
  run.prompt = prompt_tokens(run, config.vocab_size);
  run.steps = o.steps.value_or(std::max<int64_t>(1, run.train->num_sequences / (run.B * run.num_micro_batches())));
  run.schedule = {o.schedule, o.learning_rate, o.final_fraction, o.warmup_steps, run.steps};
  const Shard shard = o.zero == 1 ? Shard{run.ranks.rank, run.ranks.size} : Shard{};
  gpt2_plan(run.model, config, run.B, run.T, o.recompute, o.keep_dead_kv, shard);
  if (o.tf32) gemm_allow_tf32();
  run.model.timeline.on = o.log_level == "debug";
}

void allocate(Run& run) {
  gpt2_allocate(run.model);
  run.step_tokens = PinnedBuffer<int>(4 * size_t(run.grad_accum_steps) * size_t(run.B) * size_t(run.T));
  const size_t copy_bytes = run.options.out.empty() ? 0 : checkpoint_copy_bytes(run.model, run.ranks.rank);
  if (copy_bytes > 0) run.checkpoint_copy = PinnedBuffer<float>(copy_bytes / sizeof(float));
}

RunState run_state(const Run& run) {
  return {run.step, run.train->next_sequence, run.train->num_sequences, run.T, run.options.shuffle, uint64_t(run.options.seed),
          run.skipped_steps, run.bad_steps_in_row};
}

// Weights, moments, position: as a checkpoint left them.
void resume_from(Run& run, const std::string& checkpoint) {
  const RunState saved = read_run_state(checkpoint), now = run_state(run);
  auto demand = [&](bool same, const char* what) {
    if (!same) user_error("-y: %s was written with another %s; give the same, or start anew in another folder",
                          checkpoint.c_str(), what);
  };
  demand(saved.seq_len == now.seq_len, "sequence length (-t)");
  demand(saved.seed == now.seed, "seed (--seed)");
  demand(saved.shuffle == now.shuffle, "order of the data (--shuffle)");
  demand(saved.num_sequences == now.num_sequences, "training data (-i)");
  if (saved.step > run.steps)
    user_error("-y: %s is past step %lld, the last one by -x; ask for more steps", checkpoint.c_str(), (long long)run.steps);
  read_weights(checkpoint, run.model.layout(), store_weights(run.model));
  read_moments(checkpoint, run.model.layout(), store_shard(run.model, run.model.m_memory), store_shard(run.model, run.model.v_memory));
  run.step = saved.step;
  run.skipped_steps = saved.skipped_steps;
  run.bad_steps_in_row = saved.bad_steps_in_row;
  run.train->next_sequence = saved.next_sequence;
}

void load_or_init_weights(Run& run, bool from_folder, const std::string& checkpoint) {
  GPT2& model = run.model;
  if (!checkpoint.empty()) resume_from(run, checkpoint);
  else if (from_folder) read_weights(run.options.model, model.layout(), store_weights(model));
  else gpt2_init_weights(model, uint64_t(run.options.seed));
}

void open_output(Run& run, const std::string& checkpoint) {
  const TrainOptions& o = run.options;
  if (o.out.empty() || run.ranks.rank > 0) return;
  make_folders(o.out);
  remove_unfinished_checkpoints(o.out);
  if (!checkpoint.empty()) {
    for (const std::string& name : set_aside_checkpoints_after(o.out, run.step)) printf("set aside: %s\n", name.c_str());
    run.log.resume(o.out, run.step);
    return;
  }
  write_file_durably(o.out + "/config.toml", o.as_toml);
  run.log.create(o.out);
  const ModelConfig& c = run.model.config;
  run.log.write("run", {{"model", o.model},
                        {"num_layers", int64_t(c.num_layers)},
                        {"num_heads", int64_t(c.num_heads)},
                        {"channels", int64_t(c.channels)},
                        {"vocab_size", int64_t(c.vocab_size)},
                        {"max_seq_len", int64_t(c.max_seq_len)},
                        {"bias", c.bias},
                        {"num_skip_layer", int64_t(c.num_skip_layer)},
                        {"num_skip_head", int64_t(c.num_skip_head)},
                        {"num_parameters", run.model.parameters.num_parameters},
                        {"micro_batch", int64_t(run.B)},
                        {"seq_len", int64_t(run.T)},
                        {"grad_accum_steps", run.grad_accum_steps},
                        {"ranks", int64_t(run.ranks.size)},
                        {"zero", int64_t(o.zero)},
                        {"steps", run.steps},
                        {"schedule", o.schedule},
                        {"learning_rate", o.learning_rate},
                        {"final_fraction", o.final_fraction},
                        {"warmup_steps", o.warmup_steps},
                        {"weight_decay", o.weight_decay},
                        {"beta1", o.beta1},
                        {"beta2", o.beta2},
                        {"eps", o.eps},
                        {"grad_clip", o.grad_clip},
                        {"seed", o.seed},
                        {"shuffle", o.shuffle},
                        {"train_data", o.train_data},
                        {"val_data", o.val_data},
                        {"recompute", int64_t(o.recompute)},
                        {"precision", std::string(precision_name)},
                        {"device", std::string(device_name())}});
}

// A line that stays.
template <class... Args>
void print_line(const char* fmt, Args... args) {
  if (isatty(STDOUT_FILENO)) printf("\r\033[K");  // over the step that is being shown
  if constexpr (sizeof...(args) == 0) fputs(fmt, stdout);
  else printf(fmt, args...);
  fflush(stdout);
}

// The mean loss of the first -m micro-batches of the validation data, always the same ones, which ranks deal out among themselves.
void validate_model(Run& run) {
  const double start = seconds_now();
  const int64_t all = run.val->num_sequences / run.B;
  const int64_t batches = run.options.val_batches > 0 ? std::min(run.options.val_batches, all) : all;
  std::vector<int> inputs(size_t(run.B) * size_t(run.T)), targets(inputs.size());
  gpt2_zero_loss(run.model);
  for (int64_t i = run.ranks.rank; i < batches; i += run.ranks.size) {
    run.val->load_sequences(i * run.B, run.B, inputs.data(), targets.data());
    gpt2_forward(run.model, inputs.data(), run.B, run.T);
    gpt2_loss(run.model, targets.data(), run.B, run.T);
  }
  gpt2_sum_loss_over_ranks(run.model);
  const double loss = gpt2_read_stats(run.model).loss / double(batches);
  run.log.write({{"step", run.step}, {"val_loss", loss}});
  print_line("val loss %.5f after step %lld (%lld tokens, %s)\n", loss, (long long)run.step,
             (long long)(batches * run.B * run.T), time_text(seconds_now() - start).c_str());
}

// The prompt and what the model goes on with; numbers, if nobody knows what its tokens stand for.
void print_sample(Run& run) {
  const WatchdogPause pause(run.channel);
  std::vector<int> tokens = run.prompt;
  gpt2_generate(run.model, tokens, int(run.options.sample_length), run.options.temperature, uint64_t(run.options.seed), run.step);
  std::string text;
  for (size_t i = 1; i < tokens.size(); i++) {  // without the end of text that they begin with
    if (run.tokenizer && tokens[i] < run.tokenizer->vocab_size()) text += run.tokenizer->token(tokens[i]);
    else text += format("%d ", tokens[i]);
  }
  print_line("--- sample after step %lld\n%s\n---\n", (long long)run.step, printable(text).c_str());
}

// Says what became of the last checkpoint, if that is new; with `wait`, once it is. Throws UserError if it could not be written and
// the options say to stop then.
void report_saved(Run& run, bool wait) {
  const WatchdogPause pause(run.channel);
  const std::optional<SaveResult> saved = run.writer.result(wait);
  if (!saved) return;
  run.save_failed = !saved->error.empty();
  if (!saved->folder.empty()) {
    run.log.write({{"step", saved->step},
                   {"checkpoint", saved->folder},
                   {"stall_ms", run.stall_seconds * 1e3},
                   {"write_ms", saved->seconds * 1e3}});
    print_line("saved %s (training waited %.3f s, written in %.3f s beside it)\n", saved->folder.c_str(), run.stall_seconds,
               saved->seconds);
  }
  if (!run.save_failed) return;
  run.log.write({{"step", saved->step}, {"save_error", saved->error}});
  if (run.options.stop_on_save_error)
    user_error("%s; training stops, earlier checkpoints are as they were (--stop-on-save-error)", saved->error.c_str());
  print_line("");
  fprintf(stderr, "error: %s; earlier checkpoints are as they were\n", saved->error.c_str());
}

// Rank 0's way to those that write slices of a checkpoint beside it.
OtherRanks other_ranks(Run& run) {
  RankChannel& channel = run.channel;
  const int ranks = run.model.parameters.shard.count;  // 1: rank 0 has all of it
  if (ranks == 1) return {};
  OtherRanks others;
  others.tell = [&channel, ranks](bool begin) {
    for (int rank = 1; rank < ranks; rank++) channel.send(rank, Topic::checkpoint, begin ? "begin" : "");
  };
  others.reports = [&channel, ranks] {
    std::vector<std::string> reports;
    for (int rank = 1; rank < ranks; rank++) reports.push_back(channel.receive(rank, Topic::checkpoint));
    return reports;
  };
  return others;
}

// Begins to write a checkpoint. Waits for the one before, and for a copy to host memory; the rest goes on beside training. Every rank
// that has slices writes its own; the rest, and with --zero 0 all of it, is rank 0's.
void save_checkpoint(Run& run) {
  const double start = seconds_now();
  report_saved(run, /*wait=*/true);
  GPT2& model = run.model;
  if (run.checkpoint_copy.size == 0) return;
  const size_t state_size = model.state_bytes() / sizeof(float);
  float *m = run.checkpoint_copy.data, *v = m + state_size, *weights = v + state_size;
  gpt2_gather_masters(model, weights);
  fetch_shard(model, model.m_memory, m);
  fetch_shard(model, model.v_memory, v);
  run.stall_seconds = seconds_now() - start;

  const TrainOptions& o = run.options;
  if (run.ranks.rank > 0) {  // what becomes of it, rank 0 tells
    run.writer.start(run.step, [=, &model, &o, &channel = run.channel, step = run.step](SaveResult&) {
      if (channel.receive(0, Topic::checkpoint) == "begin")
        channel.send(0, Topic::checkpoint, write_checkpoint_part(o.out, step, model.layout(), m, v));
    });
    return;
  }
  auto fetch_copied = [&model, weights](int i, float* values) {
    memcpy(values, weights + model.tensor(i).element_offset(), model.tensor(i).bytes());
  };
  const int64_t keep = run.bad_steps_in_row > 0 ? 0 : o.keep;  // who knows which one will be needed
  run.writer.start(run.step, [=, &model, &o, &tokenizer_json = run.tokenizer_json, others = other_ranks(run),
                              state = run_state(run)](SaveResult& result) {
    result.folder = write_checkpoint(o.out, state, model.layout(), fetch_copied, m, v, others, tokenizer_json);
    remove_old_checkpoints(o.out, keep, o.keep_every);
  });
}

struct StepResult {
  double loss, grad_norm, learning_rate, seconds;
  double data_seconds;  // of them waited for tokens
  bool skipped;
  bool stop_requested;  // of some rank, when it queued the step's update
};

// This rank's tokens of the next step.
StepTokens next_tokens(Run& run) {
  if (!run.step_loader) {
    const int64_t n = run.grad_accum_steps * run.B * run.T;
    int* memory = run.step_tokens.data;
    run.step_loader.emplace(*run.train, run.grad_accum_steps, run.B, run.ranks.rank, run.ranks.size,
                            std::array<StepTokens, 2>{{{memory, memory + n}, {memory + 2 * n, memory + 3 * n}}});
  }
  return run.step_loader->next();
}

// One update: grad_accum_steps micro-batches forward and backward, then AdamW. The host waits once, when all of it is queued.
// If the loss or the norm is not finite, the device has changed nothing. The step is skipped then: it counts for the data and the
// learning rate, which go on as if it had been a good one, but not as one of AdamW's updates, whose moments don't know of it.
StepResult train_step(Run& run) {
  const double start = seconds_now();
  const TrainOptions& o = run.options;
  StepResult result = {};
  result.learning_rate = run.schedule(run.step + 1);
  run.model.timeline.start_step(run.step + 1);
  gpt2_zero_grad(run.model);
  gpt2_zero_loss(run.model);
  const double asked = seconds_now();
  const StepTokens tokens = next_tokens(run);
  result.data_seconds = seconds_now() - asked;
  for (int64_t i = 0; i < run.grad_accum_steps; i++) {
    const int64_t first = i * run.B * run.T;
    gpt2_micro_step(run.model, tokens.inputs + first, tokens.targets + first, run.B, run.T, run.num_micro_batches(),
                    i + 1 == run.grad_accum_steps);
  }
  gpt2_share_stop_request(run.model, stop_signal() != 0);
  gpt2_update(run.model, run.step + 1 - run.skipped_steps, {result.learning_rate, o.beta1, o.beta2, o.eps, o.weight_decay, o.grad_clip});
  const StepStats sums = gpt2_read_stats(run.model);
  run.model.timeline.end_step();
  result.loss = sums.loss / double(run.num_micro_batches());
  result.grad_norm = std::sqrt(sums.grad_squares);
  result.stop_requested = sums.stop_requests > 0;
  result.skipped = !std::isfinite(result.loss) || !std::isfinite(result.grad_norm);
  run.step++;
  run.skipped_steps += result.skipped;
  run.bad_steps_in_row = result.skipped ? run.bad_steps_in_row + 1 : 0;
  result.seconds = seconds_now() - start;
  return result;
}

// The spans of the step before the last one: by now collectives are done that run beside the step after theirs.
void log_timeline(Run& run) {
  const Timeline& timeline = run.model.timeline;
  if (timeline.previous_step() < 0) return;
  for (const TimelineSpan& span : timeline.previous_spans())
    run.log.write({{"step", timeline.previous_step()},
                   {"span", std::string(span.what)},
                   {"of", bucket_name(run.model.parameters, span.bucket)},
                   {"begin_ms", span.begin_ms},
                   {"end_ms", span.end_ms}});
}

// On a terminal steps overwrite each other, and one stays every few seconds; elsewhere each has its line.
void report_step(Run& run, const StepResult& r) {
  const double tokens = double(run.B) * run.T * double(run.num_micro_batches()), rate = tokens / r.seconds;
  run.log.write({{"step", run.step},
                 {"loss", r.loss},
                 {"grad_norm", r.grad_norm},
                 {"lr", r.learning_rate},
                 {"ms", r.seconds * 1e3},
                 {"data_ms", r.data_seconds * 1e3},
                 {"tokens_per_second", rate}});
  if (r.skipped) run.log.write({{"step", run.step}, {"skipped_steps", run.skipped_steps}, {"in_a_row", run.bad_steps_in_row}});
  log_timeline(run);
  run.training_seconds += r.seconds;
  const double share = rate * flops_per_token(run.model.config, run.model.plan, run.T) / (run.gemm_peak * run.ranks.size);
  const double left = run.training_seconds / double(run.step - run.first_step) * double(run.steps - run.step);
  std::string line = format("step %lld/%lld | loss %.5f | norm %.3f | lr %.2e | %.0f ms | %s tok/s | %.0f%% of GEMM peak | "
                            "%.0f%%, %s left", (long long)run.step, (long long)run.steps, r.loss, r.grad_norm,
                            r.learning_rate, r.seconds * 1e3, count_text(rate).c_str(), 100 * share,
                            100.0 * double(run.step) / double(run.steps), time_text(left).c_str());
  if (r.skipped)
    line += format(" | skipped, nothing was updated: %lld in a row, %lld in all", (long long)run.bad_steps_in_row,
                   (long long)run.skipped_steps);
  const bool terminal = isatty(STDOUT_FILENO);
  const bool stays = !terminal || seconds_now() - run.last_line > 10 || run.step == run.steps || r.skipped;
  if (stays) run.last_line = seconds_now();
  print_line("%s%s", line.c_str(), stays ? "\n" : "");
}

// True after every `every`-th step and after the last one; never if `every` is 0.
bool due(const Run& run, int64_t every) {
  return every > 0 && (run.step % every == 0 || run.step == run.steps);
}

// A process alone hears of a signal at any time; ranks go by what they told each other in the step.
bool must_stop(const Run& run, const StepResult& step) {
  return step.stop_requested || (run.ranks.size == 1 && stop_signal() != 0);
}

void train(Run& run) {
  const TrainOptions& o = run.options;
  run.first_step = run.step;
  if (run.step == 0 && run.val && o.val_every > 0) validate_model(run);
  const bool samples = run.ranks.rank == 0;  // all ranks have the same weights
  if (samples && run.step == run.steps && o.sample_every > 0) print_sample(run);  // nothing to train: -x 0, or a finished run resumed
  for (bool stopping = run.ranks.size == 1 && stop_signal() != 0; run.step < run.steps && !stopping;) {
    const StepResult result = train_step(run);
    report_step(run, result);
    if (run.bad_steps_in_row >= o.max_bad_steps)
      user_error("step %lld: the loss is %g and the gradient's norm %g; %lld such steps in a row were skipped, and training stops before "
                 "the weights take harm (--max-bad-steps); go on from an earlier checkpoint (--resume-from), or try a lower learning "
                 "rate (-l) or more warm-up (-u)", (long long)run.step, result.loss, result.grad_norm, (long long)run.bad_steps_in_row);
    stopping = must_stop(run, result);
    if (run.val && due(run, o.val_every) && !stopping) validate_model(run);
    if (samples && due(run, o.sample_every) && !stopping) print_sample(run);
    stopping = must_stop(run, result);
    // Amid bad steps only what is left behind is saved: these weights may be what is wrong, and the older ones needed.
    const bool due_now = due(run, o.checkpoint_every) && !result.skipped;
    if (!o.out.empty() && (run.step == run.steps || stopping || due_now)) save_checkpoint(run);
    report_saved(run, /*wait=*/false);
  }
}

// Waits for the last checkpoint and the log, whatever ended the training.
void finish_output(Run& run) {
  report_saved(run, /*wait=*/true);
  run.log.finish();
}

// The last step's weights have nobody that awaits them.
void finish_timeline(Run& run) {
  run.model.timeline.start_step(run.step + 1);
  run.model.collectives.wait();
  log_timeline(run);
}

int run_trainer(int argc, char** argv, Run& run) {
  if (!parse_options(argc, argv, run.options)) return 0;
  handle_stop_signals();  // before MPI and others have threads, which would be given the signals
  const Ranks ranks = run.ranks = init_ranks(run.options.ranks);
  Collectives::check_supported(ranks);
  if (ranks.rank > 0 && freopen("/dev/null", "w", stdout) == nullptr) user_error("cannot open /dev/null");  // rank 0 speaks for all
  run.channel.open(ranks, run.options.hang_timeout);
  bool from_folder = false;
  std::string checkpoint;
  check_and_plan(run, from_folder, checkpoint);
  run.model.collectives.init(ranks, run.channel);  // so that nobody writes before everybody has looked
  print_model(run.model);
  print_memory_plan(run.model, run.options.out.empty() ? 0 : checkpoint_copy_bytes(run.model, ranks.rank));
  allocate(run);
  load_or_init_weights(run, from_folder, checkpoint);
  open_output(run, checkpoint);
  // Also so that nobody waits in a collective for one that still loads.
  run.channel.check_same_on_all_ranks("data", format("%lld training tokens and %lld to validate with", (long long)run.train->shards.num_tokens,
                                         run.val ? (long long)run.val->shards.num_tokens : 0));

  if (ranks.rank == 0) run.gemm_peak = gemm_peak(0.3);
  printf("data: %lld training tokens", (long long)run.train->shards.num_tokens);
  if (run.val) printf(", %lld validation tokens", (long long)run.val->shards.num_tokens);
  printf("; each update: %lld micro-batches of %d x %d tokens%s\n", (long long)run.grad_accum_steps, run.B, run.T,
         ranks.size > 1 ? format(" on each of %d ranks", ranks.size).c_str() : "");
  printf("GEMM peak measured: %.0f GFLOP/s in %s\n", run.gemm_peak * 1e-9, precision_name);
  if (!checkpoint.empty()) printf("resumed from %s, at step %lld of %lld\n", checkpoint.c_str(), (long long)run.step, (long long)run.steps);

  const double start = seconds_now();
  try {
    train(run);
  } catch (const UserError&) {
    try {
      finish_output(run);
    } catch (const UserError& e) {
      fprintf(stderr, "error: %s\n", e.what());  // the first error is the one that the run ends with
    }
    throw;
  }
  finish_timeline(run);
  finish_output(run);
  run.model.collectives.finalize();
  run.channel.finalize();
  finalize_ranks(ranks);
  if (run.save_failed) user_error("the last checkpoint of the run could not be written");
  if (run.step < run.steps) {
    print_line("stopped by %s after step %lld of %lld; -y goes on\n", signal_name(stop_signal()), (long long)run.step,
               (long long)run.steps);
    if (ranks.rank > 0) return 0;  // rank 0 speaks for all: mpirun would end it in mid-sentence if another failed first
    return 128 + (stop_signal() != 0 ? stop_signal() : SIGTERM);  // where only another rank had one
  }
  print_line("done: %lld steps, %s in all, %s of it training\n", (long long)(run.step - run.first_step),
             time_text(seconds_now() - start).c_str(), time_text(run.training_seconds).c_str());
  return 0;
}

#ifndef SLA_NO_MAIN
int main(int argc, char** argv) {
  Run run;  // stays while the error is told: to free a GPU's memory waits for collectives, which may never end
  try {
    return run_trainer(argc, argv, run);
  } catch (const UserError& e) {
    fflush(stdout);
    if (run.channel.is_open()) run.channel.end_run(e.what());
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
#endif

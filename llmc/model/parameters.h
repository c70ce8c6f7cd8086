// GPT-2's parameters: which there are, in the arena's order, and pointers to them by name.
#pragma once
#include <cmath>
#include <string>
#include <vector>
#include "llmc/wiring/config.h"
#include "attention_plan.h"
#include "llmc/ops/parameter_table.h"

// Pointers into an arena of parameters (weights, gradients or optimizer state alike). Linear weights are (out, in),
// row-major. Biases are null without --bias.
template <class T>
struct NormParams {
  T *weight = nullptr, *bias = nullptr;  // (C); with `rmsnorm` there is no bias
};

template <class T>
struct AttentionParams {
  T *qkvw = nullptr, *qkvb = nullptr;    // (QKV, C), (QKV): the rows are q | k | v of the heads that the layer projects
  T *gatew = nullptr, *gateb = nullptr;  // (C), (1): of `gate`, from layer 1 on; else null
  T* relativew = nullptr;                // (C, C): W of `relative`; else null, and so are:
  T *relativeu = nullptr, *relativev = nullptr;  // (h, hs): u and v
  T* value_mix = nullptr;                        // (2): a and b of `vres`, from layer 1 on; else null
  T* router = nullptr;                           // (kv, l + 1, kv): R of `router`, from layer 1 on; else null
  T* sinks = nullptr;                            // (h): of `sinks`; else null
  T *projw = nullptr, *projb = nullptr;          // (C, C), (C)
  const float* rotations = nullptr;              // (h, rounds, hs, buckets / 2): of `lsh`, a constant; else null
};

template <class T>
struct MlpParams {
  T *fcw = nullptr, *fcb = nullptr;      // (F, C), (F)
  T *projw = nullptr, *projb = nullptr;  // (C, H), (C)
};

// The weights of `gru`; null without it.
template <class T>
struct GruParams {
  T *y = nullptr, *x = nullptr, *rx = nullptr;  // (3C, C): Wr, Wz, Wg; (2C, C): Ur, Uz; (C, C): Ug
  T* bias = nullptr;                            // (C): b, also in models without biases
};

template <class T>
struct LayerParams {
  NormParams<T> ln1;
  AttentionParams<T> attention;
  GruParams<T> gru1;  // of attention's output
  NormParams<T> ln2;
  MlpParams<T> mlp;
  GruParams<T> gru2;   // of the MLP's output
  T* dense = nullptr;  // (l + 2): of `dense`, the weights of the sum that follows; else null
  int bucket = 0;
};

template <class T>
struct Params {
  T* wte = nullptr;                      // (V, C), also the output head without `untied`
  T* wpe = nullptr;                      // (max_seq_len, C); null without learned positions
  T* wse = nullptr;                      // (cycles, C): what cycles of layers begin with; null without `universal`
  T *haltw = nullptr, *haltb = nullptr;  // (C), (1): of `act`; else null
  int embedding_bucket = 0;
  std::vector<LayerParams<T>> layers;  // (L), or as many as a cycle has
  NormParams<T> lnf;
  T* lm_head = nullptr;  // (V, C): of `untied`; else null
  int lnf_bucket = 0;    // of these two
};

// The vocabulary in whole tiles of a matmul. wte and lm_head have zeros in the rows beyond V, and so have their
// gradients and the logits'.
inline int64_t padded_vocab_size(const ModelConfig& c) { return (int64_t(c.vocab_size) + 63) / 64 * 64; }

// QKV of a layer: the rows of its c_attn.
inline int64_t qkv_rows(const ModelConfig& c, const AttentionPlan& plan, int layer) {
  return int64_t(c.head_size()) * plan.num_projected(layer);
}

// The field that most of the model's size comes from: "model", if no other is more than half of it.
inline std::string what_takes_most(const ModelConfig& c) {
  const double half = least_parameters(c) / 2 / c.channels;
  const WiringTable table = c.whole_model();
  return table.learns_positions() && c.max_seq_len > half   ? "context length (--max-seq-len)"
         : (table.untied ? 2.0 : 1.0) * c.vocab_size > half ? "vocabulary (--vocab-size)"
                                                            : "model";
}

// Throws UserError if the parameters alone, of so many bytes each, take more than what is `available` on a device (or
// machine), before anything is built of the model: a list of its tensors may already take all of the memory, or
// minutes. `what`: what these bytes are for.
inline void check_parameters_fit(const ModelConfig& c, double bytes_each, const char* what, size_t available,
                                 const char* device) {
  const double least = least_parameters(c) * bytes_each;
  if (least > double(available))
    user_error("%d layers of %d channels, a vocabulary of %d and a context length of %d take at least %.1f GB for %s, "
               "but %.1f GB are free on the %s; take a smaller %s",
               c.num_layers, c.channels, c.vocab_size, c.max_seq_len, least * 1e-9, what, double(available) * 1e-9,
               device, what_takes_most(c));
}

// The rows of q, k or v in the full-size c_attn, which is q | k | v, and with `lsh` q | v.
inline int64_t full_qkv_rows_of(const ModelConfig& c, const AttentionPlan& plan, Qkv which) {
  return int64_t(plan.heads_of(which)) * c.head_size();
}
inline int64_t full_qkv_size(const ModelConfig& c, const AttentionPlan& plan) {
  int64_t rows = 0;
  for (Qkv which : all_qkv) rows += full_qkv_rows_of(c, plan, which);
  return rows;
}

// For each row of a layer's qkvw, its row in the full-size c_attn.
inline std::vector<int> full_qkv_rows(const ModelConfig& c, const AttentionPlan& plan, int layer) {
  std::vector<int> rows;
  int first = 0;  // row of the full-size c_attn where q, k or v begins
  for (Qkv which : all_qkv) {
    for (int head : plan.projected[which][layer])
      for (int i = 0; i < c.head_size(); i++) rows.push_back(first + head * c.head_size() + i);
    first += int(full_qkv_rows_of(c, plan, which));
  }
  return rows;
}

// Whether layer l has the parameters of `gate`.
inline bool has_map_gate(const AttentionPlan& plan, int l) { return plan.table.mix == WiringTable::Mix::gate && l > 0; }

// Whether the K/V of layer l is a sum of what the layers up to it have projected.
inline bool has_router(const AttentionPlan& plan, int l) { return plan.table.router && l > 0; }

// Declares parameters one after the other: each call adds a tensor to the table and sets its pointer into an arena of
// T that starts at `base`, so that neither can be without the other.
template <class T>
struct ParameterBuilder {
  ParameterTable table;
  T* base;
  const float* constants;  // the arena of constants
  bool has_biases;
  int layer = -1;  // the layer of the parameters that are declared next

  // `spec.file_shape` is `shape` unless it says otherwise; after the tensor there is room for `tail_elements` more.
  void add(T*& pointer, std::string name, std::vector<int64_t> shape, ParameterSpec spec, int64_t tail_elements = 0) {
    spec.tensor = table.layout.add(std::move(name), shape, sizeof(float), tail_elements);
    spec.decay = shape.size() >= 2;
    spec.bucket = int(table.buckets.size()) - 1, spec.layer = layer;
    if (spec.file_shape.empty()) spec.file_shape = std::move(shape);
    const TensorSpec& tensor = table.layout.tensors.back();
    table.num_parameters += tensor.num_elements();
    table.num_parameters_full += num_elements(spec.file_shape);
    pointer = base == nullptr ? nullptr : base + tensor.element_offset();
    table.specs.push_back(std::move(spec));
  }
  // A model without biases has none, and files hold zeros in their place.
  void bias(T*& pointer, const std::string& name, int64_t size, ParameterSpec spec) {
    pointer = nullptr;
    if (has_biases) add(pointer, name + ".bias", {size}, std::move(spec));
    else table.zero_tensors.push_back({name + ".bias", num_elements(spec.file_shape)});
  }

  void constant(const float*& pointer, std::string name, std::vector<int64_t> shape, double std) {
    pointer = constants == nullptr ? nullptr : constants + table.constant_count;
    const int64_t count = num_elements(shape);
    table.constants.push_back({std::move(name), std::move(shape), table.constant_count, std});
    table.constant_count += count;
  }
  void embedding(T*& weight, const std::string& name, int64_t rows, int64_t channels, int64_t tail_rows, double std) {
    ParameterSpec spec;
    spec.init_std = std;
    add(weight, name, {rows, channels}, std::move(spec), tail_rows * channels);
  }
  void norm(NormParams<T>& p, const std::string& name, int64_t channels, bool rmsnorm) {
    ParameterSpec weight, bias_spec;
    weight.init_mean = 1;
    bias_spec.file_shape = {channels};
    add(p.weight, name + ".weight", {channels}, std::move(weight));
    if (!rmsnorm) bias(p.bias, name, channels, std::move(bias_spec));
  }
  // `count`: as for matrix.
  void linear(T*& weight, T*& bias_pointer, const std::string& name, int64_t in, int64_t out, double std,
              int count = 1) {
    ParameterSpec bias_spec;
    bias_spec.file_shape = {out};
    matrix(weight, name + ".weight", in, out, std, count);
    bias(bias_pointer, name, out, std::move(bias_spec));
  }
  // A linear layer that has no bias; it has `count` matrices, one below the other.
  void matrix(T*& weight, const std::string& name, int64_t in, int64_t out, double std, int count = 1) {
    add(weight, name, {out, in},
        linear_spec(in, out, std, std::vector<int64_t>(size_t(out > 1 ? count : 0), out / count)));
  }
  void gru(GruParams<T>& p, const std::string& name, int64_t channels, double std) {
    matrix(p.y, name + ".y.weight", channels, 3 * channels, std, 3);
    matrix(p.x, name + ".x.weight", channels, 2 * channels, std, 2);
    matrix(p.rx, name + ".rx.weight", channels, channels, std);
    ParameterSpec bias_spec;
    bias_spec.init_mean = 2;
    add(p.bias, name + ".bias", {channels}, std::move(bias_spec));
  }
  // A linear layer with only `rows` of the full-size weight's `file_out` rows; matrix_rows: the rows of each of its
  // matrices, one below the other.
  void linear_of_rows(T*& weight, T*& bias_pointer, const std::string& name, int64_t in, const std::vector<int>& rows,
                      std::vector<int64_t> matrix_rows, int64_t file_out, double std) {
    ParameterSpec spec = linear_spec(in, file_out, std, std::move(matrix_rows)), bias_spec;
    spec.full_rows = bias_spec.full_rows = rows;
    bias_spec.file_shape = {file_out};
    add(weight, name + ".weight", {int64_t(rows.size()), in}, std::move(spec));
    bias(bias_pointer, name, int64_t(rows.size()), std::move(bias_spec));
  }

  // Begins a bucket of all parameters that are declared until end_bucket; returns its index.
  int begin_bucket(std::string name) {
    const int64_t begin = int64_t(table.layout.bytes / sizeof(float));
    table.buckets.push_back({std::move(name), begin, 0});
    return int(table.buckets.size()) - 1;
  }
  void end_bucket() {
    ParameterBucket& bucket = table.buckets.back();
    table.layout.pad_to(size_t(table.shard.count) * ArenaLayout::alignment);
    bucket.count = int64_t(table.layout.bytes / sizeof(float)) - bucket.begin;
  }

 private:
  static ParameterSpec linear_spec(int64_t in, int64_t file_out, double std, std::vector<int64_t> matrix_rows) {
    ParameterSpec spec;
    spec.file_shape = {in, file_out}, spec.transposed = true, spec.init_std = std;
    spec.matrix_rows = std::move(matrix_rows);
    return spec;
  }
};

// Declares GPT-2's parameters, in the arena's order: name, shape, initial values, bucket and pointer of each. Bucket
// after bucket is complete in the backward pass, from the last to the first. Returns the table; p = pointers into an
// arena of T that starts at `base` and into the arena `constants`, null pointers where these are null.
template <class T>
ParameterTable declare_parameters(const ModelConfig& c, const AttentionPlan& plan, Shard shard, T* base,
                                  const float* constants, Params<T>& p) {
  ParameterBuilder<T> b = {{}, base, constants, c.bias};
  b.table.shard = shard;
  const int64_t C = c.channels, H = plan.table.hidden_size(c.channels), F = plan.table.fc_size(c.channels);
  // GPT-2's initialisation: normal(0, 0.02), the projections into the residual stream scaled by 1/sqrt(2L).
  const double weight_std = 0.02, residual_std = 0.02 / std::sqrt(2.0 * c.num_layers);

  p.embedding_bucket = b.begin_bucket("embeddings");
  const int64_t padding = padded_vocab_size(c) - c.vocab_size;
  b.embedding(p.wte, "wte.weight", c.vocab_size, C, padding, weight_std);
  if (plan.table.learns_positions()) b.embedding(p.wpe, "wpe.weight", c.max_seq_len, C, 0, weight_std);
  const int layers = plan.table.stored_layers;
  if (plan.table.has_cycles) b.embedding(p.wse, "wse.weight", c.num_layers / layers, C, 0, weight_std);
  if (plan.table.halting > 0) {
    ParameterSpec bias_spec;
    bias_spec.init_mean = 1, bias_spec.file_shape = {1};  // tokens of a new model halt early
    b.matrix(p.haltw, "halt.weight", C, 1, weight_std);
    b.bias(p.haltb, "halt", 1, std::move(bias_spec));
  }
  b.end_bucket();
  p.layers.resize(size_t(layers));
  for (int l = 0; l < layers; l++) {
    LayerParams<T>& layer = p.layers[l];
    const std::string h = "h." + std::to_string(l) + ".";
    layer.bucket = b.begin_bucket("layer " + std::to_string(l)), b.layer = l;
    b.norm(layer.ln1, h + "ln_1", C, plan.table.rmsnorm);
    AttentionParams<T>& attention = layer.attention;
    std::vector<int64_t> matrix_rows;
    for (Qkv which : all_qkv) matrix_rows.push_back(int64_t(plan.projected[which][l].size()) * c.head_size());
    b.linear_of_rows(attention.qkvw, attention.qkvb, h + "attn.c_attn", C, full_qkv_rows(c, plan, l), matrix_rows,
                     full_qkv_size(c, plan), weight_std);
    if (has_map_gate(plan, l)) b.linear(attention.gatew, attention.gateb, h + "attn.map_gate", C, 1, weight_std);
    if (plan.table.value_residual && l > 0) {
      ParameterSpec spec;
      spec.ones = {0};
      b.add(attention.value_mix, h + "attn.value_mix", {2}, std::move(spec));
    }
    if (has_router(plan, l)) {
      const int64_t kv = plan.table.num_kv_heads, sources = l + 1;
      ParameterSpec spec;
      for (int64_t g = 0; g < kv; g++) spec.ones.push_back((g * sources + l) * kv + g);
      b.add(attention.router, h + "attn.router", {kv * sources * kv}, std::move(spec));
    }
    if (plan.table.sinks) b.add(attention.sinks, h + "attn.sinks", {c.num_heads}, {});
    if (plan.table.relative) {
      b.matrix(attention.relativew, h + "attn.relative.weight", C, C, weight_std);
      b.embedding(attention.relativeu, h + "attn.relative.u", c.num_heads, c.head_size(), 0, weight_std);
      b.embedding(attention.relativev, h + "attn.relative.v", c.num_heads, c.head_size(), 0, weight_std);
    }
    if (const WiringTable& table = plan.table; table.lsh_buckets > 0)
      b.constant(attention.rotations, h + "attn.rotations",
                 {c.num_heads, table.lsh_rounds, c.head_size(), table.lsh_buckets / 2}, /*std=*/1);
    b.linear(attention.projw, attention.projb, h + "attn.c_proj", C, C, residual_std);
    if (plan.table.gru) b.gru(layer.gru1, h + "gru_1", C, weight_std);
    b.norm(layer.ln2, h + "ln_2", C, plan.table.rmsnorm);
    b.linear(layer.mlp.fcw, layer.mlp.fcb, h + "mlp.c_fc", C, F, weight_std, int(F / H));
    b.linear(layer.mlp.projw, layer.mlp.projb, h + "mlp.c_proj", H, C, residual_std);
    if (plan.table.gru) b.gru(layer.gru2, h + "gru_2", C, weight_std);
    if (plan.table.dense) {
      ParameterSpec spec;
      spec.ones = {l + 1};
      b.add(layer.dense, h + "dense", {l + 2}, std::move(spec));
    }
    b.end_bucket(), b.layer = -1;
  }
  p.lnf_bucket = b.begin_bucket("final layernorm");
  b.norm(p.lnf, "ln_f", C, plan.table.rmsnorm);
  if (plan.table.untied) b.embedding(p.lm_head, "lm_head.weight", c.vocab_size, C, padding, weight_std);
  b.end_bucket();
  cut_into_parts(b.table);
  return std::move(b.table);
}

inline ParameterTable make_parameter_table(const ModelConfig& c, const AttentionPlan& plan, Shard shard = {}) {
  Params<float> none;
  return declare_parameters<float>(c, plan, shard, nullptr, nullptr, none);
}

// The parameters of a table that make_parameter_table made, as pointers into an arena that starts at `base` and into
// the arena `constants`.
template <class T>
Params<T> parameter_pointers(const ModelConfig& c, const AttentionPlan& plan, const ParameterTable& table, T* base,
                             const float* constants) {
  Params<T> pointers;
  declare_parameters(c, plan, table.shard, base, constants, pointers);
  return pointers;
}

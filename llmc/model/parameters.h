// GPT-2's parameters: which there are, in the arena's order, and pointers to them by name.
#pragma once
#include <algorithm>                     // std::max
#include <cmath>                         // std::sqrt
#include <string>                        // std::string
#include <vector>                        // std::vector
#include "config.h"                      // ModelConfig
#include "attention_plan.h"              // AttentionPlan
#include "llmc/utils/parameter_table.h"  // ParameterTable, ParameterSpec, Shard

// Pointers into an arena of parameters (weights, gradients or optimizer state alike). Linear weights are (out, in),
// row-major. The rows of qkvw are q | k | v of the heads that the layer projects, QKV in all. Biases are null without
// --bias.
template <class T>
struct LayerParams {
  T *ln1w, *ln1b;          // (C)
  T *qkvw, *qkvb;          // (QKV, C), (QKV)
  T *gatew, *gateb;        // (C), (1): of `gate`, from layer 1 on; else null
  T *attprojw, *attprojb;  // (C, C), (C)
  T *ln2w, *ln2b;          // (C)
  T *fcw, *fcb;            // (4C, C), (4C)
  T *fcprojw, *fcprojb;    // (C, 4C), (C)
};

template <class T>
struct Params {
  T* wte;                              // (V, C), also the output head
  T* wpe;                              // (max_seq_len, C)
  std::vector<LayerParams<T>> layers;  // (L)
  T *lnfw, *lnfb;                      // (C)
};

// The vocabulary in whole tiles of a matmul. wte has zeros in the rows beyond V, and so have its gradient and the
// logits'.
inline int64_t padded_vocab_size(const ModelConfig& c) { return (c.vocab_size + 63) / 64 * 64; }

// QKV of a layer: the rows of its c_attn.
inline int64_t qkv_rows(const ModelConfig& c, const AttentionPlan& plan, int layer) {
  return int64_t(c.head_size()) * plan.num_projected(layer);
}

// At least so many parameters does a model have, whatever its wiring: embeddings, and each layer's projection and MLP,
// of which each tensor takes at least its alignment.
inline double least_parameters(const ModelConfig& c) {
  const double C = c.channels, least = 6 * double(ArenaLayout::alignment) / sizeof(float);
  return (double(c.vocab_size) + c.max_seq_len) * C + c.num_layers * std::max(9 * C * C, least);
}

// The rows of the full-size c_attn: q (C) | k | v (K/V heads times head size each).
inline int64_t full_qkv_size(const ModelConfig& c, const AttentionPlan& plan) {
  return c.channels + 2 * int64_t(plan.table.num_kv_heads) * c.head_size();
}

// Those of them that the rows of a layer's qkvw are.
inline std::vector<int> full_qkv_rows(const ModelConfig& c, const AttentionPlan& plan, int layer) {
  std::vector<int> rows;
  int first = 0;  // of the part
  for (Part part : all_parts) {
    for (int head : plan.projected[part][layer])
      for (int i = 0; i < c.head_size(); i++) rows.push_back(first + head * c.head_size() + i);
    first += (part == Part::q ? c.num_heads : plan.table.num_kv_heads) * c.head_size();
  }
  return rows;
}

// Whether layer l has the parameters of `gate`.
inline bool has_map_gate(const AttentionPlan& plan, int l) { return plan.table.mix == WiringTable::Mix::gate && l > 0; }

// Adds GPT-2's parameters to a table, in the order in which the calls come.
struct ParameterTableBuilder {
  ParameterTable table;
  bool bias;

  void add(std::string name, std::vector<int64_t> shape, ParameterSpec spec, int64_t tail_elements = 0) {
    spec.tensor = table.layout.add(std::move(name), shape, sizeof(float), tail_elements);
    spec.decay = shape.size() >= 2;
    spec.bucket = int(table.buckets.size());
    if (spec.file_shape.empty()) spec.file_shape = std::move(shape);
    table.num_parameters += table.layout.tensors.back().num_elements();
    table.num_parameters_full += num_elements(spec.file_shape);
    table.specs.push_back(std::move(spec));
  }
  void add_bias(const std::string& name, int64_t size, int64_t file_size, const std::vector<int>& full_rows) {
    if (bias) add(name + ".bias", {size}, {0, {file_size}, false, false, false, 0, full_rows});
    else table.zero_tensors.push_back({name + ".bias", file_size});
  }
  void embedding(const char* name, int64_t rows, int64_t channels, int64_t tail_rows, double std) {
    add(name, {rows, channels}, {0, {}, false, true, true, std, {}}, tail_rows * channels);
  }
  void layernorm(const std::string& name, int64_t channels) {
    add(name + ".weight", {channels}, {0, {}, false, false, false, 0, {}});
    add_bias(name, channels, channels, {});
  }
  void linear(const std::string& name, int64_t in, int64_t out, double std) {
    add(name + ".weight", {out, in},
        {0, {in, out}, true, true, true, std, {}, 0, out > 1 ? std::vector<int64_t>{out} : std::vector<int64_t>()});
    add_bias(name, out, out, {});
  }
  // A linear weight of which only `rows` of the full-size one exist; matrix_rows: those of its matrices, one below the
  // other.
  void linear_of_rows(const std::string& name, int64_t in, const std::vector<int>& rows,
                      std::vector<int64_t> matrix_rows, int64_t file_out, double std) {
    add(name + ".weight", {int64_t(rows.size()), in},
        {0, {in, file_out}, true, true, true, std, rows, 0, std::move(matrix_rows)});
    add_bias(name, int64_t(rows.size()), file_out, rows);
  }
  void end_bucket() {
    const int64_t begin = table.buckets.empty() ? 0 : table.buckets.back().begin + table.buckets.back().count;
    table.layout.pad_to(size_t(table.shard.count) * ArenaLayout::alignment);
    table.buckets.push_back({begin, int64_t(table.layout.bytes / sizeof(float)) - begin});
  }
};

// GPT-2's parameters, in the arena's order.
inline ParameterTable make_parameter_table(const ModelConfig& c, const AttentionPlan& plan, Shard shard = {}) {
  ParameterTableBuilder b;
  b.table.shard = shard;
  b.bias = c.bias;
  const int64_t C = c.channels;
  // GPT-2's initialisation: normal(0, 0.02), the projections into the residual stream scaled by 1/sqrt(2L).
  const double weight_std = 0.02, residual_std = 0.02 / std::sqrt(2.0 * c.num_layers);

  b.embedding("wte.weight", c.vocab_size, C, padded_vocab_size(c) - c.vocab_size, weight_std);
  b.embedding("wpe.weight", c.max_seq_len, C, 0, weight_std);
  b.end_bucket();
  for (int l = 0; l < c.num_layers; l++) {
    const std::string h = "h." + std::to_string(l) + ".";
    b.layernorm(h + "ln_1", C);
    std::vector<int64_t> matrix_rows;
    for (Part part : all_parts) matrix_rows.push_back(int64_t(plan.projected[part][l].size()) * c.head_size());
    b.linear_of_rows(h + "attn.c_attn", C, full_qkv_rows(c, plan, l), matrix_rows, full_qkv_size(c, plan), weight_std);
    if (has_map_gate(plan, l)) b.linear(h + "attn.map_gate", C, 1, weight_std);
    b.linear(h + "attn.c_proj", C, C, residual_std);
    b.layernorm(h + "ln_2", C);
    b.linear(h + "mlp.c_fc", C, 4 * C, weight_std);
    b.linear(h + "mlp.c_proj", 4 * C, C, residual_std);
    b.end_bucket();
  }
  b.layernorm("ln_f", C);
  b.end_bucket();
  return std::move(b.table);
}

// The table's tensors as pointers into an arena that starts at `base`.
template <class T>
Params<T> parameter_pointers(const ModelConfig& c, const AttentionPlan& plan, const ParameterTable& table, T* base) {
  size_t next = 0;
  auto weight = [&] { return base + table.layout.tensors[next++].element_offset(); };
  auto bias = [&] { return c.bias ? weight() : nullptr; };
  Params<T> p;
  p.wte = weight();
  p.wpe = weight();
  p.layers.resize(size_t(c.num_layers));
  for (LayerParams<T>& layer : p.layers) {
    layer.ln1w = weight(), layer.ln1b = bias();
    layer.qkvw = weight(), layer.qkvb = bias();
    const bool has_gate = has_map_gate(plan, int(&layer - p.layers.data()));
    layer.gatew = has_gate ? weight() : nullptr, layer.gateb = has_gate ? bias() : nullptr;
    layer.attprojw = weight(), layer.attprojb = bias();
    layer.ln2w = weight(), layer.ln2b = bias();
    layer.fcw = weight(), layer.fcb = bias();
    layer.fcprojw = weight(), layer.fcprojb = bias();
  }
  p.lnfw = weight(), p.lnfb = bias();
  CHECK(next == table.layout.tensors.size());
  return p;
}

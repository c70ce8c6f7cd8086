// Which parameters a model has, where they lie in the arena, and how they map to the tensors of a GPT-2 file.
#pragma once
#include <algorithm>  // std::min
#include <cmath>      // std::sqrt
#include <string>     // std::string
#include <vector>     // std::vector
#include "arena.h"    // ArenaLayout
#include "config.h"   // ModelConfig
#include "kv_plan.h"  // KVPlan

// Pointers into an arena of parameters (weights, gradients or optimizer state alike). Linear weights are (out, in), row-major.
// The rows of qkvw are q (C) | k (projected heads) | v (projected heads): QKV = C + 2 * hs * projected. Biases are null
// without --bias.
template <class T>
struct LayerParams {
  T *ln1w, *ln1b;            // (C)
  T *qkvw, *qkvb;            // (QKV, C), (QKV)
  T *attprojw, *attprojb;    // (C, C), (C)
  T *ln2w, *ln2b;            // (C)
  T *fcw, *fcb;              // (4C, C), (4C)
  T *fcprojw, *fcprojb;      // (C, 4C), (C)
};

template <class T>
struct Params {
  T* wte;         // (V, C), also the output head
  T* wpe;         // (max_seq_len, C)
  std::vector<LayerParams<T>> layers;
  T *lnfw, *lnfb; // (C)
};

// One parameter: its place in the arena and its face in a file, which is full-size GPT-2 in Conv1D layout (in, out).
struct ParameterSpec {
  int tensor;                       // index into ParameterTable::layout.tensors, whose name is the file's
  std::vector<int64_t> file_shape;  // as Hugging Face's GPT-2 stores it, dead K/V included
  int qkv_layer;                    // the layer whose projected heads pick the rows, for c_attn; else -1
  bool transposed;                  // a linear weight: (out, in) here, (in, out) there
  bool decay;                       // weight decay applies: two or more dimensions
  bool is_weight;                   // drawn from a normal at initialisation; else LayerNorm weights (1) and biases (0)
  double init_std;
};

struct ParameterTable {
  ArenaLayout layout;
  std::vector<ParameterSpec> specs;   // in the order of the layout: layer by layer, so that a layer is one contiguous bucket
  int64_t num_parameters = 0;         // what is trained
  int64_t num_parameters_full = 0;    // what the model would have with dead K/V rows
};

// A run of parameters of one tensor that one block of threads updates: what AdamW and the gradient's norm walk over. Indices
// count elements of the float arenas.
struct ParameterChunk {
  int64_t begin;  // a multiple of 64
  int count;      // at most parameter_chunk_size
  int decays;     // weight decay applies
};
constexpr int parameter_chunk_size = 8192;

// The vocabulary in whole tiles of a matmul. wte has zeros in the rows beyond V, and so have its gradient and the logits'.
inline int64_t padded_vocab_size(const ModelConfig& c) { return (c.vocab_size + 63) / 64 * 64; }

inline int64_t qkv_rows(const ModelConfig& c, const KVPlan& plan, int layer) {
  return c.channels + 2 * int64_t(c.head_size()) * int64_t(plan.projected[layer].size());
}

// GPT-2's parameters, in the arena's order. The layout is that of float arenas; in one of another type a tensor begins at the same
// element.
inline ParameterTable make_parameter_table(const ModelConfig& c, const KVPlan& plan) {
  ParameterTable table;
  const int64_t C = c.channels;
  // GPT-2's initialisation: normal(0, 0.02), the projections into the residual stream scaled by 1/sqrt(2L).
  const double weight_std = 0.02, residual_std = 0.02 / std::sqrt(2.0 * c.num_layers);

  auto add = [&](std::string name, std::vector<int64_t> shape, ParameterSpec spec, int64_t tail_elements = 0) {
    spec.tensor = table.layout.add(std::move(name), shape, sizeof(float), tail_elements);
    spec.decay = shape.size() >= 2;
    if (spec.file_shape.empty()) spec.file_shape = std::move(shape);
    table.specs.push_back(spec);
    table.num_parameters += table.layout.tensors.back().num_elements();
    table.num_parameters_full += num_elements(spec.file_shape);
  };
  auto embedding = [&](const char* name, int64_t rows, int64_t tail_rows) {
    add(name, {rows, C}, {0, {}, -1, false, true, true, weight_std}, tail_rows * C);
  };
  auto layernorm = [&](const std::string& name) {
    add(name + ".weight", {C}, {0, {}, -1, false, false, false, 0});
    if (c.bias) add(name + ".bias", {C}, {0, {}, -1, false, false, false, 0});
  };
  auto linear = [&](const std::string& name, int64_t out, int64_t in, int64_t file_out, int qkv_layer, double std) {
    add(name + ".weight", {out, in}, {0, {in, file_out}, qkv_layer, true, true, true, std});
    if (c.bias) add(name + ".bias", {out}, {0, {file_out}, qkv_layer, false, false, false, 0});
  };

  embedding("wte.weight", c.vocab_size, padded_vocab_size(c) - c.vocab_size);
  embedding("wpe.weight", c.max_seq_len, 0);
  for (int l = 0; l < c.num_layers; l++) {
    std::string h = "h." + std::to_string(l) + ".";
    layernorm(h + "ln_1");
    linear(h + "attn.c_attn", qkv_rows(c, plan, l), C, 3 * C, l, weight_std);
    linear(h + "attn.c_proj", C, C, C, -1, residual_std);
    layernorm(h + "ln_2");
    linear(h + "mlp.c_fc", 4 * C, C, 4 * C, -1, weight_std);
    linear(h + "mlp.c_proj", C, 4 * C, C, -1, residual_std);
  }
  layernorm("ln_f");
  return table;
}

inline std::vector<ParameterChunk> parameter_chunks(const ParameterTable& table) {
  std::vector<ParameterChunk> chunks;
  for (const ParameterSpec& spec : table.specs) {
    const TensorSpec& tensor = table.layout.tensors[size_t(spec.tensor)];
    for (int64_t i = 0; i < tensor.num_elements(); i += parameter_chunk_size)
      chunks.push_back({tensor.element_offset() + i, int(std::min<int64_t>(parameter_chunk_size, tensor.num_elements() - i)), spec.decay});
  }
  return chunks;
}

// The table's tensors as pointers into an arena that starts at `base`.
template <class T>
Params<T> parameter_pointers(const ModelConfig& c, const ParameterTable& table, T* base) {
  size_t next = 0;
  auto weight = [&] { return base + table.layout.tensors[next++].element_offset(); };
  auto bias = [&] { return c.bias ? weight() : nullptr; };
  Params<T> p;
  p.wte = weight();
  p.wpe = weight();
  p.layers.resize(c.num_layers);
  for (LayerParams<T>& layer : p.layers) {
    layer.ln1w = weight(), layer.ln1b = bias();
    layer.qkvw = weight(), layer.qkvb = bias();
    layer.attprojw = weight(), layer.attprojb = bias();
    layer.ln2w = weight(), layer.ln2b = bias();
    layer.fcw = weight(), layer.fcb = bias();
    layer.fcprojw = weight(), layer.fcprojb = bias();
  }
  p.lnfw = weight(), p.lnfb = bias();
  CHECK(next == table.layout.tensors.size());
  return p;
}

// The output row of the full-size c_attn (q | k | v, each C rows) that row `row` of a layer's qkv is.
inline int64_t full_qkv_row(const ModelConfig& c, const KVPlan& plan, int layer, int64_t row) {
  const int64_t C = c.channels, hs = c.head_size(), kv = hs * int64_t(plan.projected[layer].size());
  if (row < C) return row;
  int64_t part = (row - C) / kv, in_part = (row - C) % kv;  // 0: k, 1: v
  return C + part * C + plan.projected[layer][in_part / hs] * hs + in_part % hs;
}

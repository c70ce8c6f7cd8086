// Which parameters a model has, where they lie in the arena, and how they map to the tensors of a GPT-2 file.
#pragma once
#include <algorithm>           // std::max, std::min
#include <cmath>               // std::sqrt
#include <string>              // std::string
#include <vector>              // std::vector
#include "llmc/adamw.h"        // ParameterChunk, parameter_chunk_size
#include "llmc/utils/arena.h"  // ArenaLayout
#include "config.h"            // ModelConfig
#include "kv_plan.h"           // KVPlan

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
  int bucket = 0;                   // index into ParameterTable::buckets
};

// Neighbours in the arena whose gradients are complete at the same moment: the embeddings, each layer, the final LayerNorm. What ranks
// sum and share in one piece, gaps between tensors included. In elements of the float arenas.
struct ParameterBucket {
  int64_t begin, count;
};

// Which of `count` equal parts of every bucket has its optimizer state in this process: part `index`. With one part, all of it.
struct Shard {
  int index = 0, count = 1;
};

struct ParameterTable {
  ArenaLayout layout;
  std::vector<ParameterBucket> buckets;  // embeddings, layer 0, layer 1, ..., final LayerNorm
  Shard shard;                         // buckets end where they can be cut into that many slices of whole 256 bytes
  std::vector<ParameterSpec> specs;   // in the order of the layout: layer by layer, so that a layer is one contiguous bucket
  int64_t num_parameters = 0;         // what is trained
  int64_t num_parameters_full = 0;    // what the model would have with dead K/V rows
};

// The vocabulary in whole tiles of a matmul. wte has zeros in the rows beyond V, and so have its gradient and the logits'.
inline int64_t padded_vocab_size(const ModelConfig& c) { return (c.vocab_size + 63) / 64 * 64; }

inline int64_t qkv_rows(const ModelConfig& c, const KVPlan& plan, int layer) {
  return c.channels + 2 * int64_t(c.head_size()) * int64_t(plan.projected[layer].size());
}

// GPT-2's parameters, in the arena's order. The layout is that of float arenas; in one of another type a tensor begins at the same
// element.
inline ParameterTable make_parameter_table(const ModelConfig& c, const KVPlan& plan, Shard shard = {}) {
  ParameterTable table;
  table.shard = shard;
  const int64_t C = c.channels;
  // GPT-2's initialisation: normal(0, 0.02), the projections into the residual stream scaled by 1/sqrt(2L).
  const double weight_std = 0.02, residual_std = 0.02 / std::sqrt(2.0 * c.num_layers);

  auto add = [&](std::string name, std::vector<int64_t> shape, ParameterSpec spec, int64_t tail_elements = 0) {
    spec.tensor = table.layout.add(std::move(name), shape, sizeof(float), tail_elements);
    spec.decay = shape.size() >= 2;
    spec.bucket = int(table.buckets.size());
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

  auto end_bucket = [&] {
    const int64_t begin = table.buckets.empty() ? 0 : table.buckets.back().begin + table.buckets.back().count;
    table.layout.pad_to(size_t(shard.count) * ArenaLayout::alignment);
    table.buckets.push_back({begin, int64_t(table.layout.bytes / sizeof(float)) - begin});
  };

  embedding("wte.weight", c.vocab_size, padded_vocab_size(c) - c.vocab_size);
  embedding("wpe.weight", c.max_seq_len, 0);
  end_bucket();
  for (int l = 0; l < c.num_layers; l++) {
    std::string h = "h." + std::to_string(l) + ".";
    layernorm(h + "ln_1");
    linear(h + "attn.c_attn", qkv_rows(c, plan, l), C, 3 * C, l, weight_std);
    linear(h + "attn.c_proj", C, C, C, -1, residual_std);
    layernorm(h + "ln_2");
    linear(h + "mlp.c_fc", 4 * C, C, 4 * C, -1, weight_std);
    linear(h + "mlp.c_proj", C, 4 * C, C, -1, residual_std);
    end_bucket();
  }
  layernorm("ln_f");
  end_bucket();
  return table;
}

// What a log calls a bucket.
inline std::string bucket_name(const ParameterTable& table, size_t bucket) {
  if (bucket == 0) return "embeddings";
  return bucket + 1 == table.buckets.size() ? "final layernorm" : "layer " + std::to_string(bucket - 1);
}

// What of a parameter lies in this process's slice of its bucket: `count` elements, 0 if none, from `begin` of the full arenas and from
// `state` of those that hold slices alone, one bucket's after the other.
struct ShardRange {
  int64_t begin, state, count;
};
inline ShardRange shard_range(const ParameterTable& table, const ParameterSpec& spec) {
  const TensorSpec& tensor = table.layout.tensors[size_t(spec.tensor)];
  const ParameterBucket& bucket = table.buckets[size_t(spec.bucket)];
  const int64_t slice = bucket.count / table.shard.count, first = bucket.begin + table.shard.index * slice;
  const int64_t begin = std::max(first, tensor.element_offset());
  const int64_t end = std::min(first + slice, tensor.element_offset() + tensor.num_elements());
  return {begin, bucket.begin / table.shard.count + (begin - first), std::max<int64_t>(0, end - begin)};
}

inline std::vector<ParameterChunk> parameter_chunks(const ParameterTable& table) {
  std::vector<ParameterChunk> chunks;
  for (const ParameterSpec& spec : table.specs) {
    const ShardRange part = shard_range(table, spec);
    for (int64_t i = 0; i < part.count; i += parameter_chunk_size)
      chunks.push_back({part.begin + i, part.state + i, int(std::min<int64_t>(parameter_chunk_size, part.count - i)), spec.decay});
  }
  return chunks;
}

// In a build that checks bounds: nothing may touch what belongs to no parameter in an arena of masters or moments.
inline void forbid_gaps_of_state(const ParameterTable& table, const float* arena) {
  int64_t end = 0;
  for (const ParameterSpec& spec : table.specs) {
    const ShardRange part = shard_range(table, spec);
    if (guard_bytes == 0 || part.count == 0) continue;
    forbid(arena + end, size_t(part.state - end) * sizeof(float));
    end = part.state + part.count;
  }
  const int64_t all = int64_t(table.layout.bytes / sizeof(float)) / table.shard.count;
  if (guard_bytes > 0) forbid(arena + end, size_t(all - end) * sizeof(float));
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

// Parameters in flat arenas: where each lies, which ranks keep the optimizer state of which part (ZeRO-1), and how it
// maps to the tensor of a file. Which parameters there are is the model's to say (model/parameters.h).
#pragma once
#include <algorithm>     // std::max, std::min
#include <string>        // std::string
#include <vector>        // std::vector
#include "arena.h"       // ArenaLayout
#include "llmc/adamw.h"  // ParameterChunk
#include "llmc/muon.h"   // MuonMatrix

// One parameter: its place in the arena, its form in a file, which is full-size GPT-2 in Conv1D layout (in, out), and
// what it is in a new model: normal(init_mean, init_std).
struct ParameterSpec {
  int tensor = 0;                        // index into ParameterTable::layout.tensors, whose name is the file's
  int bucket = 0;                        // index into ParameterTable::buckets
  int layer = -1;                        // of the names in files, h.<layer>; -1: it belongs to no layer
  std::vector<int64_t> file_shape = {};  // as Hugging Face's GPT-2 stores it, dead K/V included
  bool transposed = false;               // a linear weight: (out, in) here, (in, out) there
  bool decay = false;                    // weight decay applies: two or more dimensions
  double init_mean = 0, init_std = 0;
  // For each row of this tensor, its row in the full-size tensor (out, in). Empty if they are the same.
  std::vector<int> full_rows = {};
  // Rows of each of the matrices in this tensor, one below the other, that Muon updates (llmc/muon.h). Empty if it
  // updates none.
  std::vector<int64_t> matrix_rows = {};

  int64_t full_row(int64_t row) const { return full_rows.empty() ? row : full_rows[row]; }
};

// Neighbours in the arena whose gradients are complete at the same moment: the embeddings, each layer, the final
// LayerNorm. What ranks reduce and gather in one piece, gaps between tensors included. In elements of the float arenas.
struct ParameterBucket {
  std::string name;  // in logs
  int64_t begin = 0, count = 0;
};

// Every bucket has `count` equal parts, and this process has the optimizer state of part `index`. With one part it has
// all of it.
struct Shard {
  int index = 0, count = 1;
};

// A tensor that files hold beside the parameters, as zeros.
struct ZeroTensor {
  std::string name;
  int64_t size;
};

struct ParameterTable {
  ArenaLayout layout;                    // of float arenas; in one of another type a tensor begins at the same element
  std::vector<ParameterBucket> buckets;  // embeddings, layer 0, layer 1, ..., final LayerNorm
  Shard shard;                           // buckets end where they can be cut into that many shards of whole 256 bytes
  // In the order of the layout: layer by layer, so that a layer is one contiguous bucket.
  std::vector<ParameterSpec> specs;
  std::vector<ZeroTensor> zero_tensors;  // biases, in a model without any
  int64_t num_parameters = 0;            // what is trained
  int64_t num_parameters_full = 0;       // what the model would have with dead K/V rows

  const TensorSpec& tensor(int index) const { return layout.tensors[specs[index].tensor]; }
  int size() const { return int(specs.size()); }
};

// The part of a parameter that lies in this process's shard of its bucket: `count` elements, 0 if none, from `begin` of
// the full arenas and from `state` of the arenas that hold the shard alone, one bucket's after the other.
struct ShardRange {
  int64_t begin, state, count;
};
inline ShardRange shard_range(const ParameterTable& table, const ParameterSpec& spec) {
  const TensorSpec& tensor = table.layout.tensors[spec.tensor];
  const ParameterBucket& bucket = table.buckets[spec.bucket];
  const int64_t size = bucket.count / table.shard.count, first = bucket.begin + table.shard.index * size;
  const int64_t begin = std::max(first, tensor.element_offset());
  const int64_t end = std::min(first + size, tensor.element_offset() + tensor.num_elements());
  return {begin, bucket.begin / table.shard.count + (begin - first), std::max<int64_t>(0, end - begin)};
}

// Parameters in pieces that one block of threads updates each.
inline void append_chunks(std::vector<ParameterChunk>& chunks, const ShardRange& part, bool decays) {
  for (int64_t i = 0; i < part.count; i += parameter_chunk_size)
    chunks.push_back(
        {part.begin + i, part.state + i, int(std::min<int64_t>(parameter_chunk_size, part.count - i)), decays});
}

// The chunks of this process's shard; with `muon` without the matrices that Muon updates.
inline std::vector<ParameterChunk> parameter_chunks(const ParameterTable& table, bool muon = false) {
  std::vector<ParameterChunk> chunks;
  for (const ParameterSpec& spec : table.specs)
    if (!muon || spec.matrix_rows.empty()) append_chunks(chunks, shard_range(table, spec), spec.decay);
  return chunks;
}

// The matrices that Muon updates, without their chunks.
inline std::vector<MuonMatrix> muon_matrices(const ParameterTable& table) {
  std::vector<MuonMatrix> matrices;
  for (const ParameterSpec& spec : table.specs) {
    const TensorSpec& tensor = table.layout.tensors[spec.tensor];
    int64_t begin = tensor.element_offset();
    for (int64_t rows : spec.matrix_rows) {
      if (rows > 0) matrices.push_back({begin, rows, tensor.shape[1]});
      begin += rows * tensor.shape[1];
    }
  }
  return matrices;
}

// Appends the matrices' chunks, of arenas that are not sharded, and tells each matrix which they are.
inline void append_chunks(std::vector<ParameterChunk>& chunks, std::vector<MuonMatrix>& matrices) {
  for (MuonMatrix& matrix : matrices) {
    matrix.first_chunk = int64_t(chunks.size());
    append_chunks(chunks, {matrix.begin, matrix.begin, matrix.count()}, /*decays=*/true);
    matrix.num_chunks = int64_t(chunks.size()) - matrix.first_chunk;
  }
}

// In a build that checks bounds: no access to what belongs to no parameter in an arena of masters or moments.
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

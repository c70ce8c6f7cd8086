// Parameters in flat arenas: where each lies, which rank keeps which share's optimizer state (ZeRO-1), and how it maps
// to the tensor of a file. parameters.h says which parameters there are.
#pragma once
#include <algorithm>
#include <string>
#include <vector>
#include "llmc/ops/adamw.h"
#include "llmc/ops/muon.h"
#include "llmc/base/arena.h"
#include "llmc/base/error.h"

// One parameter: its place in the arena, its form in a file, which is full-size GPT-2 in Conv1D layout (in, out), and
// what it is in a new model: normal(init_mean, init_std).
struct ParameterSpec {
  int tensor = 0;                        // index into ParameterTable::layout.tensors, whose name is the file's
  int bucket = 0;                        // index into ParameterTable::buckets
  int layer = -1;                        // of the names in files, h.<layer>; -1: it belongs to no layer
  std::vector<int64_t> file_shape = {};  // as Hugging Face's GPT-2 stores it, unused heads' K/V included
  bool transposed = false;               // a linear weight: (out, in) here, (in, out) there
  bool decay = false;                    // weight decay applies: two or more dimensions
  double init_mean = 0, init_std = 0;
  std::vector<int64_t> ones = {};  // elements that are 1 in a new model, whatever the others are
  // For each row of this tensor, its row in the full-size tensor (out, in). Empty if they are the same.
  std::vector<int> full_rows = {};
  // Rows of each of the matrices in this tensor, one below the other, that Muon updates (llmc/ops/muon.h). Empty if it
  // updates none.
  std::vector<int64_t> matrix_rows = {};

  int64_t full_row(int64_t row) const { return full_rows.empty() ? row : full_rows[row]; }
};

// A contiguous part of a bucket, whose optimizer state rank `owner` keeps. In elements: in the float arenas from
// `begin`, in the owner's arenas of state from `state`.
struct ShardPart {
  int owner;
  int64_t begin, count, state = 0;
};

// Neighbours in the arena whose gradients are complete at the same moment: the embeddings, each layer, the final
// LayerNorm. What ranks reduce and gather in one piece, gaps between tensors included. In elements of the float arenas.
struct ParameterBucket {
  std::string name;  // in logs
  int64_t begin = 0, count = 0;
  std::vector<ShardPart> parts = {};  // one after the other, all of the bucket
  bool has_equal_parts = true;        // one for each rank, in the order of ranks
};

// This process is rank `index` of `count`, and has the optimizer state of its parts of every bucket (ZeRO-1). With one
// rank it has all of it.
struct Shard {
  int index = 0, count = 1;
  bool whole_matrices = false;  // the matrices that Muon updates are not cut; parts of layers are then not equal
};

// A tensor that files hold beside the parameters, as zeros.
struct ZeroTensor {
  std::string name;
  int64_t size;
};

// A tensor of float that files hold and nothing trains: no optimizer, gradient or rank but all of it. In a new model
// normal(0, init_std).
struct ConstantTensor {
  std::string name;  // in files
  std::vector<int64_t> shape;
  int64_t offset;  // in elements of an arena of all constants
  double init_std;
};

struct ParameterTable {
  ArenaLayout layout;                    // of float arenas; in one of another type a tensor begins at the same element
  std::vector<ParameterBucket> buckets;  // embeddings, layer 0, layer 1, ..., final LayerNorm
  Shard shard;                           // buckets end where they can be cut into that many parts of whole 256 bytes
  int64_t state_count = 0;               // elements of an arena of masters or moments: the most that a rank keeps
  // In the order of the layout: layer by layer, so that a layer is one contiguous bucket.
  std::vector<ParameterSpec> specs;
  std::vector<ZeroTensor> zero_tensors;  // biases, in a model without any
  // Functions that read and write files number them after the parameters, from size() on.
  std::vector<ConstantTensor> constants;
  int64_t constant_count = 0;       // elements of all of them
  int64_t num_parameters = 0;       // what is trained
  int64_t num_parameters_full = 0;  // what the model would have with unused heads' K/V

  const TensorSpec& tensor(int index) const { return layout.tensors[specs[index].tensor]; }
  int size() const { return int(specs.size()); }
  int file_tensors() const { return size() + int(constants.size()); }
  bool is_constant(int index) const { return index >= size(); }
  const ConstantTensor& constant(int index) const { return constants[size_t(index - size())]; }
  // The elements of a parameter or constant in its arena.
  int64_t elements(int index) const {
    return is_constant(index) ? num_elements(constant(index).shape) : tensor(index).num_elements();
  }
};

// What an update by Muon of a tensor's matrices costs, relative to others; 0 if it has none.
inline double muon_cost(const ParameterTable& table, const ParameterSpec& spec) {
  double cost = 0;
  for (int64_t rows : spec.matrix_rows) {
    const int64_t columns = table.layout.tensors[spec.tensor].shape[1];
    cost += double(rows) * double(columns) * double(std::min(rows, columns));
  }
  return cost;
}

// Cuts a bucket into one equal part for each rank.
inline void cut_equally(ParameterBucket& bucket, int ranks) {
  const int64_t size = bucket.count / ranks;
  for (int rank = 0; rank < ranks; rank++) bucket.parts.push_back({rank, bucket.begin + rank * size, size});
}

// Cuts the buckets that have matrices before each tensor of matrices but a bucket's first, and deals the parts out to
// the ranks by what their updates cost: the most expensive first, always to the rank that has the least.
inline void cut_between_matrices(ParameterTable& table) {
  struct Costly {
    ShardPart* part;
    double cost;
  };
  std::vector<Costly> parts;
  size_t next = 0;  // of the parameters, which lie bucket by bucket
  for (size_t b = 0; b < table.buckets.size(); b++) {
    ParameterBucket& bucket = table.buckets[b];
    std::vector<double> costs;
    for (; next < table.specs.size() && table.specs[next].bucket == int(b); next++) {
      const ParameterSpec& spec = table.specs[next];
      const double cost = muon_cost(table, spec);
      if (cost == 0) continue;
      bucket.parts.push_back({0, costs.empty() ? bucket.begin : table.layout.tensors[spec.tensor].element_offset(), 0});
      costs.push_back(cost);
    }
    bucket.has_equal_parts = costs.empty();
    for (size_t i = 0; i < costs.size(); i++) {
      ShardPart& part = bucket.parts[i];
      part.count = (i + 1 < costs.size() ? bucket.parts[i + 1].begin : bucket.begin + bucket.count) - part.begin;
      parts.push_back({&part, costs[i]});
    }
  }
  std::stable_sort(parts.begin(), parts.end(), [](const Costly& a, const Costly& b) { return a.cost > b.cost; });
  std::vector<double> costs(size_t(table.shard.count), 0.0);
  for (const Costly& costly : parts) {
    const auto least = std::min_element(costs.begin(), costs.end());
    costly.part->owner = int(least - costs.begin());
    *least += costly.cost;
  }
}

// Decides which rank keeps which parts of the buckets' optimizer state, and where in its arenas of state.
inline void cut_into_parts(ParameterTable& table) {
  if (table.shard.whole_matrices && table.shard.count > 1) cut_between_matrices(table);
  std::vector<int64_t> state(size_t(table.shard.count), 0);
  for (ParameterBucket& bucket : table.buckets) {
    if (bucket.has_equal_parts) cut_equally(bucket, table.shard.count);
    for (ShardPart& part : bucket.parts) {
      part.state = state[size_t(part.owner)];
      state[size_t(part.owner)] += part.count;
    }
  }
  table.state_count = *std::max_element(state.begin(), state.end());
}

// The elements of a parameter in this process's shard: `count` contiguous elements, 0 if none, from `begin` of the full
// arenas and from `state` of the arenas that hold the shard alone.
struct ShardRange {
  int64_t begin, state, count;
};
inline ShardRange shard_range(const ParameterTable& table, const ParameterSpec& spec) {
  const TensorSpec& tensor = table.layout.tensors[spec.tensor];
  for (const ShardPart& part : table.buckets[spec.bucket].parts) {
    const int64_t begin = std::max(part.begin, tensor.element_offset());
    const int64_t end = std::min(part.begin + part.count, tensor.element_offset() + tensor.num_elements());
    if (part.owner == table.shard.index && begin < end) return {begin, part.state + (begin - part.begin), end - begin};
  }
  return {tensor.element_offset(), 0, 0};
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

// The matrices in this process's shard that Muon updates, without their chunks.
inline std::vector<MuonMatrix> muon_matrices(const ParameterTable& table) {
  std::vector<MuonMatrix> matrices;
  for (const ParameterSpec& spec : table.specs) {
    const ShardRange range = shard_range(table, spec);
    if (spec.matrix_rows.empty() || range.count == 0) continue;
    const TensorSpec& tensor = table.layout.tensors[spec.tensor];
    CHECK(range.count == tensor.num_elements());
    int64_t first = 0;
    for (int64_t rows : spec.matrix_rows) {
      if (rows > 0) matrices.push_back({range.begin + first, range.state + first, rows, tensor.shape[1]});
      first += rows * tensor.shape[1];
    }
  }
  return matrices;
}

// Appends the matrices' chunks, and tells each matrix which of these they are.
inline void append_chunks(std::vector<ParameterChunk>& chunks, std::vector<MuonMatrix>& matrices) {
  const size_t before = chunks.size();
  for (MuonMatrix& matrix : matrices) {
    matrix.first_chunk = int64_t(chunks.size() - before);
    append_chunks(chunks, {matrix.begin, matrix.state, matrix.count()}, /*decays=*/true);
    matrix.num_chunks = int64_t(chunks.size() - before) - matrix.first_chunk;
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
  if (guard_bytes > 0) forbid(arena + end, size_t(table.state_count - end) * sizeof(float));
}

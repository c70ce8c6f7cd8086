// The memory of a model's layers (segment_memory.h) between two passes, on its way to and from checkpoints, and what
// several ranks have of it: the rows of a rank are streams of their own, B after the B of the rank before.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>
#include "llmc/formats/checkpoint.h"
#include "llmc/operations.h"
#include "llmc/base/error.h"
#include "sublayers.h"

// Calls f(layer, memory) of each layer that has one.
template <class F>
void for_each_memory(const Sublayers& sublayers, F f) {
  for (const Sublayer& sublayer : sublayers.list)
    if (const AttentionBranch* attention = attention_of(sublayer))
      if (attention->projection.memory) f(sublayer.layer, *attention->projection.memory);
}

// The batch's rows are the next segments of their streams: the memory moves on to the last positions of these segments.
inline void remember(const Sublayers& sublayers, const Batch& batch) {
  for_each_memory(sublayers, [&](int, const SegmentMemory& memory) { remember(memory, batch); });
}

// The memory of B streams, m positions each: a tensor (B, m, C) for each layer; no tensors where m is 0.
inline std::vector<CheckpointTensor> fetch_memory(const Sublayers& sublayers, int64_t B, int64_t m) {
  std::vector<CheckpointTensor> tensors;
  for_each_memory(sublayers, [&](int layer, const SegmentMemory& memory) {
    if (m == 0) return;
    std::vector<floatX> values(size_t(B * m * memory.C));
    copy_to_host(values.data(), memory.rows, values.size() * sizeof(floatX));
    tensors.push_back({format("h.%d.memory", layer), {B, m, memory.C}, {values.begin(), values.end()}});
  });
  return tensors;
}

// The reverse of fetch_memory. Returns m.
inline int64_t store_memory(const Sublayers& sublayers, const std::vector<CheckpointTensor>& tensors) {
  if (tensors.empty()) return 0;
  size_t next = 0;
  for_each_memory(sublayers, [&](int, const SegmentMemory& memory) {
    const std::vector<float>& values = tensors[next++].values;
    copy_to_device(memory.rows, std::vector<floatX>(values.begin(), values.end()));
  });
  CHECK(next == tensors.size());
  return tensors[0].shape[1];
}

// On rank 0: the memory of all ranks' streams, each tensor (ranks * B, m, C), from `own` of each rank; on others
// nothing. Every rank calls it.
inline std::vector<CheckpointTensor> gather_memory(Collectives& collectives, std::vector<CheckpointTensor> own) {
  const size_t rank = size_t(collectives.rank()), size = size_t(collectives.size());
  for (CheckpointTensor& tensor : own) {
    const size_t count = tensor.values.size();
    std::vector<float> all(size * count);
    std::copy(tensor.values.begin(), tensor.values.end(), all.begin() + int64_t(rank * count));
    for (size_t root = 0; root < size; root++)
      collectives.broadcast(all.data() + root * count, count * sizeof(float), int(root));
    tensor.values = std::move(all), tensor.shape[0] *= int64_t(size);
  }
  return rank > 0 ? std::vector<CheckpointTensor>() : own;
}

// The memory of a rank's B streams, of a checkpoint's memory of all streams.
inline std::vector<CheckpointTensor> memory_of_rank(std::vector<CheckpointTensor> all, int rank, int64_t B) {
  for (CheckpointTensor& tensor : all) {
    const int64_t of_stream = tensor.shape[1] * tensor.shape[2];
    const auto begin = tensor.values.begin() + rank * B * of_stream;
    tensor.values = std::vector<float>(begin, begin + B * of_stream);
    tensor.shape[0] = B;
  }
  return all;
}

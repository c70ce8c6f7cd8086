// The memory of a model's layers (segment_memory.h) between two passes, on its way to and from checkpoints, and what
// several ranks have of it: the rows of a rank are streams of their own, B after those of the rank before.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>
#include "llmc/dist/rank_channel.h"
#include "llmc/dist/ranks.h"
#include "llmc/io/checkpoint.h"
#include "llmc/operations.h"
#include "llmc/utils/error.h"
#include "sublayers.h"

// Calls f(layer, memory) of each layer that has one.
template <class F>
void for_each_memory(const Sublayers& sublayers, F f) {
  for (const Sublayer& sublayer : sublayers.list)
    if (const AttentionBranch* attention = attention_of(sublayer))
      if (attention->memory) f(sublayer.layer, *attention->memory);
}

// The batch's rows are the next segments of their streams: the memory becomes that of its last positions.
inline void remember(const Sublayers& sublayers, const Batch& batch) {
  for_each_memory(sublayers, [&](int, const SegmentMemory& memory) { remember(memory, batch); });
}

// The memory of B streams, of which it holds m positions: a tensor (B, m, C) for each layer; none where m is 0.
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
inline std::vector<CheckpointTensor> gather_memory(const Collectives& collectives, RankChannel& channel,
                                                   const Ranks& ranks, std::vector<CheckpointTensor> own) {
  if (own.empty()) return own;  // as on every other rank
  collectives.wait();  // rank 0, which waits for the others' memory, must not be what their collectives wait for
  for (CheckpointTensor& tensor : own) {
    const size_t count = tensor.values.size(), bytes = count * sizeof(float);
    if (ranks.rank > 0) {
      channel.send(0, Topic::memory, std::string(reinterpret_cast<const char*>(tensor.values.data()), bytes));
      continue;
    }
    for (int rank = 1; rank < ranks.size; rank++) {
      const std::string received = channel.receive(rank, Topic::memory);
      if (received.size() != bytes)
        user_error("rank %d has sent a memory of %zu bytes in place of %zu; start the same program on all machines",
                   rank, received.size(), bytes);
      tensor.values.resize(size_t(rank + 1) * count);
      memcpy(tensor.values.data() + size_t(rank) * count, received.data(), bytes);
    }
    tensor.shape[0] *= ranks.size;
  }
  return ranks.rank > 0 ? std::vector<CheckpointTensor>() : own;
}

// What a rank's B streams have of a checkpoint's memory.
inline std::vector<CheckpointTensor> memory_of_rank(std::vector<CheckpointTensor> all, int rank, int64_t B) {
  for (CheckpointTensor& tensor : all) {
    const int64_t of_stream = tensor.shape[1] * tensor.shape[2];
    const auto begin = tensor.values.begin() + rank * B * of_stream;
    tensor.values = std::vector<float>(begin, begin + B * of_stream);
    tensor.shape[0] = B;
  }
  return all;
}

// The memory of a layer's attention in training (terms/memory.h): its input, the residual stream before its
// LayerNorm, at the last positions of each stream, as earlier segments left it. It is a constant, but the LayerNorm,
// k and v of it are computed with today's weights, which get gradients from them. A layer's k and v have rows for the
// memory before the rows of the segment, so that queries begin at key m; layers that share K/V read those rows too.
//
// B: streams, T: tokens of a segment, M: positions that the memory has room for, m: those that it holds
// (Batch::remembered).
#pragma once
#include <algorithm>
#include <cstdint>
#include "llmc/model/binding.h"
#include "norm.h"

struct SegmentMemory {
  int64_t M = 0, C = 0;
  floatX* rows = nullptr;          // (B, m, C), in room for (B, M, C)
  Norm norm;                       // the layer's LayerNorm, of `rows`
  const floatX* stream = nullptr;  // (B, T, C): the layer's input
  // (B, m + T, C): the LayerNorm's output for the memory and for the segment, while the layer runs, and its gradient.
  floatX *extended = nullptr, *dextended = nullptr;
};

// Declares what a layer's memory is, and what all layers share. `list.shape` is the training's.
inline void declare(SegmentMemory& memory, ActivationList& list) {
  const int64_t B = list.shape.training->B, T = list.shape.training->T, C = list.shape.config.channels;
  const int64_t M = list.shape.attention_plan.table.memory, N = B * (M + T);
  memory.M = M, memory.C = C;
  list.add(MemoryGroup::segment_memory, "memory", memory.rows, {B, M, C});
  list.in_buffer({"memory_norm"}, memory.norm.out, {B * M, C});
  list.in_buffer({"memory_norm_mean"}, memory.norm.mean, {B * M});
  list.in_buffer({"memory_norm_rstd"}, memory.norm.rstd, {B * M});
  list.in_buffer({"extended_norm"}, memory.extended, {N, C});
  list.in_buffer({"dextended_norm"}, memory.dextended, {N, C});
  declare_scratch(memory.norm, list, N);
}

// Sets the pointers. `norm`: the layer's LayerNorm.
inline void bind_memory(SegmentMemory& memory, const Norm& norm) {
  const Norm of_memory = memory.norm;
  memory.norm = norm;
  memory.norm.in = memory.rows, memory.norm.out = of_memory.out;
  memory.norm.mean = of_memory.mean, memory.norm.rstd = of_memory.rstd;
  memory.norm.dout = of_memory.out;
  memory.norm.dresidual = memory.dextended;  // the memory is a constant: nobody reads its gradient
  memory.stream = norm.in;
}

// Rows of C channels, from row `first` of each sequence on, in a tensor that has `rows` rows of each.
template <class Element>
struct RowsOfSequences {
  Element* x;
  int64_t rows, first;
};
// Copies `count` rows of each of B sequences.
inline void copy_rows_of_sequences(const RowsOfSequences<floatX>& to, const RowsOfSequences<const floatX>& from,
                                   int64_t B, int64_t count, int64_t C) {
  if (count == 0) return;
  copy_rows({to.x + to.first * C, to.rows * C, from.x + from.first * C, from.rows * C, count * C}, B);
}

// extended (B, m + T, C) = the LayerNorm's outputs for the memory and for the segment, which are `in` (B, T, C).
inline void extend_by_memory(const SegmentMemory& memory, const floatX* in, const Batch& batch) {
  const int64_t B = batch.B, T = batch.T, m = batch.remembered, C = memory.C;
  if (m > 0) norm_forward(memory.norm, B * m);
  copy_rows_of_sequences({memory.extended, m + T, 0}, {memory.norm.out, m, 0}, B, m, C);
  copy_rows_of_sequences({memory.extended, m + T, m}, {in, T, 0}, B, T, C);
}

// From dextended: din (B, T, C) = the gradient of the segment's LayerNorm; the LayerNorm's own gradients +=, as far as
// they come from the memory.
inline void extend_by_memory_backward(const SegmentMemory& memory, floatX* din, const Batch& batch) {
  const int64_t B = batch.B, T = batch.T, m = batch.remembered, C = memory.C;
  copy_rows_of_sequences({din, T, 0}, {memory.dextended, m + T, m}, B, T, C);
  copy_rows_of_sequences({memory.norm.out, m, 0}, {memory.dextended, m + T, 0}, B, m, C);
  if (m > 0) norm_backward(memory.norm, B * m);
}

// How many positions of each stream are remembered after the batch.
inline int64_t remembered_after(int64_t M, const Batch& batch) { return std::min(M, batch.remembered + batch.T); }

// The memory moves on to the last positions of the memory and the segment.
inline void remember(const SegmentMemory& memory, const Batch& batch) {
  const int64_t B = batch.B, T = batch.T, m = batch.remembered, C = memory.C;
  const int64_t kept = remembered_after(memory.M, batch), old = std::max<int64_t>(0, kept - T), taken = kept - old;
  // The old rows that stay move by way of another tensor, because their places overlap.
  copy_rows_of_sequences({memory.extended, old, 0}, {memory.rows, m, m - old}, B, old, C);
  copy_rows_of_sequences({memory.rows, kept, 0}, {memory.extended, old, 0}, B, old, C);
  copy_rows_of_sequences({memory.rows, kept, old}, {memory.stream, T, T - taken}, B, taken, C);
}

// What the model computes at once.
#pragma once
#include <cstdint>  // int64_t
#include <vector>   // std::vector

// The positions [first, first + count) of a sequence, to be computed.
struct SequencePart {
  int slot;  // a slot of the K/V cache
  int64_t first, count;
};

// The tokens that one pass computes: in training B sequences of T tokens, in generation parts of sequences in the K/V
// cache. They are the rows of every activation, in this order.
struct Batch {
  int64_t B = 0, T = 0;
  std::vector<SequencePart> parts = {};  // empty in training

  int64_t rows() const {
    int64_t rows = B * T;
    for (const SequencePart& part : parts) rows += part.count;
    return rows;
  }
};

// Calls visit(part, its sequences, its first row): a training batch is one part, of B sequences from their beginnings.
template <class Visit>
void for_each_part(const Batch& batch, Visit visit) {
  if (batch.parts.empty()) visit(SequencePart{0, 0, batch.T}, batch.B, int64_t(0));
  int64_t row = 0;
  for (const SequencePart& part : batch.parts) {
    visit(part, int64_t(1), row);
    row += part.count;
  }
}

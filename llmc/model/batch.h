// What the model computes at once.
#pragma once
#include <cstdint>
#include <vector>
#include "llmc/ops/rows.h"

// The positions [first, first + count) of a sequence, to be computed.
struct SequenceSpan {
  int slot;  // a slot of the K/V cache
  int64_t first, count;
};

// What the random draws of a micro-batch of an update follow from: which elements dropout drops, besides their place in
// it, and with `route` whose K/V layers use.
struct UpdateDraw {
  uint64_t seed = 0;
  int64_t update = 0, first_sequence = 0;  // the number of the update, and in it of the micro-batch's first sequence
};

// The tokens that one pass computes: in training B sequences of T tokens, in generation spans of sequences in the K/V
// cache. They are the rows of every activation, in this order.
struct Batch {
  int64_t B = 0, T = 0;
  std::vector<SequenceSpan> spans = {};     // empty in training
  const int* positions_of_spans = nullptr;  // (rows), on the device; null in training
  // In training with `memory`: how many positions before the T tokens each sequence remembers. They have keys, too, and
  // positions are counted from the first of them.
  int64_t remembered = 0;
  bool drops = false;  // with --dropout, in a training pass
  float dloss = 0;     // in the backward pass: what the loss of a token weighs in what is minimised

  int64_t rows() const {
    int64_t rows = B * T;
    for (const SequenceSpan& span : spans) rows += span.count;
    return rows;
  }
  RowPositions positions() const { return {T, positions_of_spans, remembered}; }
  // The rows of k and v, and their positions.
  int64_t key_rows() const { return rows() + B * remembered; }
  RowPositions key_positions() const { return {remembered + T, positions_of_spans}; }
};

// B segments of T tokens; of each one's stream the `remembered` positions before it are remembered.
inline Batch batch_of_segments(int64_t B, int64_t T, int64_t remembered, float dloss = 0) {
  Batch batch = {B, T};
  batch.remembered = remembered, batch.dloss = dloss;
  return batch;
}

// The micro-batches of a validation: `wanted` of them, over all ranks, at even distances in the data (a corpus in the
// order of its documents may begin with another kind of text than the rest), or, if that is 0, all of the data: the
// incomplete micro-batch at the end and what full sequences leave of each file too. Ranks deal them out among
// themselves. Where data are cut into streams, they are the first segments of each stream, or all of them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>
#include "dataloader.h"

class ValidationBatches {
 public:
  // B: sequences in a micro-batch. `data` must outlive it.
  ValidationBatches(const DataLoader& data, int B, int64_t wanted, int rank, int ranks)
      : data_(data), B_(B), rank_(rank), ranks_(ranks), in_data_(data.num_sequences / B) {
    if (data.streams > 0) {
      const int64_t segments = data.num_sequences / data.streams;
      in_data_ = full_ = ranks * (wanted == 0 ? segments : std::min(segments, (wanted + ranks - 1) / ranks));
    } else if (wanted == 0) {
      in_data_ = full_ = (data.num_sequences + B - 1) / B;
      rests_ = data.rests();
    } else {
      full_ = std::min(wanted, in_data_);
    }
    sequences_ = std::min(full_ * B, data.num_sequences);
  }

  // How many micro-batches this rank has.
  int64_t count() const { return (full_ + int64_t(rests_.size()) - rank_ + ranks_ - 1) / ranks_; }

  struct Shape {
    int64_t B, T;
  };
  // inputs, targets (B, T) = this rank's i-th micro-batch.
  Shape load(int64_t i, int* inputs, int* targets) const {
    const int64_t batch = i * ranks_ + rank_;
    if (batch >= full_) return {1, rests_[size_t(batch - full_)].load(inputs, targets)};
    const int64_t B = std::min<int64_t>(B_, sequences_ - batch * B_);
    data_.load_sequences(batch * in_data_ / full_ * B_, B, inputs, targets);
    return {B, data_.T};
  }

 private:
  const DataLoader& data_;
  const int B_, rank_, ranks_;
  int64_t in_data_;                   // micro-batches of the data among which these are at even distances
  int64_t full_ = 0, sequences_ = 0;  // micro-batches of sequences, over all ranks, and their sequences
  std::vector<TokenSpan> rests_ = {};
};

// The tokens of one training step after another. While the device computes one step, a thread of its own loads the next: what the pages of a
// shard take to come from a disk or over a network is waited for there. The data's position counts what was handed out alone, so a run
// that goes on from it reads what this one had loaded ahead.
#pragma once
#include <array>         // std::array
#include <future>        // std::async, std::future
#include <utility>       // std::move
#include "dataloader.h"  // DataLoader

struct StepTokens {
  int *inputs = nullptr, *targets = nullptr;  // (micro_batches, B, T) each
};

class StepLoader {
 public:
  // Of rank `rank` of `ranks`, each of which has `micro_batches` of B windows in a step. `data` and the two `slots`, whose memory is the
  // caller's, outlive it, and nobody else moves the data's position meanwhile.
  StepLoader(DataLoader& data, int64_t micro_batches, int B, int rank, int ranks, std::array<StepTokens, 2> slots)
      : data_(data), micro_batches_(micro_batches), B_(B), rank_(rank), ranks_(ranks), slots_(slots) {
    load_ahead();
  }

  // The tokens of the step at the data's position, which moves behind them; they stay until the next call.
  StepTokens next() {
    loaded_.get();
    const StepTokens tokens = slots_[slot_];
    data_.next_sequence += micro_batches_ * B_ * ranks_;
    slot_ = 1 - slot_;
    load_ahead();
    return tokens;
  }

 private:
  DataLoader& data_;
  const int64_t micro_batches_;
  const int B_, rank_, ranks_;
  const std::array<StepTokens, 2> slots_;
  size_t slot_ = 0;           // that is being loaded; the other one's tokens were handed out
  std::future<void> loaded_;  // is waited for where it is destroyed, too

  void load_ahead() {
    loaded_ = std::async(std::launch::async, [this, to = slots_[slot_], first = data_.next_sequence] {
      data_.load_batches(first, micro_batches_, to.inputs, to.targets, B_, rank_, ranks_);
    });
  }
};

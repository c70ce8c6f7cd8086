// The tokens of one training step after another. While the device computes one step, another thread loads the next, so
// that reading pages of a shard from a disk or over a network does not delay training. The data's position counts only
// what next() has returned: a run that resumes from it reads again what was loaded ahead.
#pragma once
#include <array>
#include <future>
#include <string>
#include "dataloader.h"

struct StepTokens {
  int *inputs = nullptr, *targets = nullptr;  // (micro_batches, B, T) each
};

class StepLoader {
 public:
  // For rank `rank` of `ranks`. A step has `micro_batches` micro-batches of B sequences on each rank. `data` and the
  // buffers of the two `slots`, which the caller owns, must outlive it; only this object may change
  // data.next_sequence meanwhile.
  StepLoader(DataLoader& data, int64_t micro_batches, int B, int rank, int ranks, std::array<StepTokens, 2> slots)
      : data_(data), micro_batches_(micro_batches), B_(B), rank_(rank), ranks_(ranks), slots_(slots) {
    load_ahead();
  }

  // Why the step at data.next_sequence cannot be loaded; "" if it can. Waits until it is loaded.
  const std::string& error() {
    loaded_.wait();
    return error_;
  }

  // The tokens of the step at data.next_sequence, which is advanced past them. They are valid until the next call.
  // Throws UserError if they cannot be loaded.
  StepTokens next() {
    if (!error().empty()) throw UserError(error_);
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
  std::string error_;         // of the last load
  size_t slot_ = 0;           // the one that is being loaded; the other one has the tokens that next() returned
  std::future<void> loaded_;  // its destructor waits, too

  void load_ahead() {
    loaded_ = std::async(std::launch::async, [this, to = slots_[slot_], first = data_.next_sequence] {
      try {
        data_.load_batches(first, micro_batches_, to.inputs, to.targets, B_, rank_, ranks_);
      } catch (const std::exception& e) { error_ = e.what(); }
    });
  }
};

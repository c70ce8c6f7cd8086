// A thread that writes checkpoints while training continues. It uses host memory and files only: the
// device belongs to the training thread.
#pragma once
#include <omp.h>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <utility>
#include "llmc/base/clock.h"
#include "llmc/base/error.h"

struct SaveResult {
  int64_t step = 0;     // of the checkpoint
  std::string folder;   // the complete checkpoint; "" if writing failed
  std::string error;    // what went wrong; "" if nothing did
  std::string warning;  // what went wrong after that
  double seconds = 0;   // from the start of writing to its end
};

// Runs one job at a time. The destructor waits for it.
struct BackgroundWriter {
  // Calls write(result) on another thread; write sets result.folder, and what it throws becomes result.error. What it
  // reads must not change until result() has returned its result. No other job may be running, or finished but not yet
  // returned by result().
  void start(int64_t step, std::function<void(SaveResult&)> write) {
    CHECK(!result_.valid());
    result_ = std::async(std::launch::async, [step, write = std::move(write)] {
      omp_set_num_threads(1);  // for this thread only: training uses the others
      const double start = seconds_now();
      SaveResult result;
      result.step = step;
      try {
        write(result);
      } catch (const std::exception& e) {  // includes std::bad_alloc: a failed checkpoint does not end the run
        result.error = e.what();
      }
      result.seconds = seconds_now() - start;
      return result;
    });
  }

  // Whether a job is running.
  bool is_busy() const {
    return result_.valid() && result_.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
  }

  // The result of the last start(), once; nullopt if there is none, or if it is still running and `wait` is false.
  std::optional<SaveResult> result(bool wait) {
    if (!result_.valid() || (!wait && is_busy())) return std::nullopt;
    return result_.get();
  }

 private:
  std::future<SaveResult> result_;  // its destructor waits
};

// A thread that writes checkpoints, or the report, while training continues. It uses host memory and files only: the
// device belongs to the training thread.
#pragma once
#include <omp.h>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include "llmc/utils/clock.h"
#include "llmc/utils/error.h"

struct SaveResult {
  int64_t step = 0;    // of the checkpoint
  std::string folder;  // the complete checkpoint; "" if writing failed
  std::string error;   // what went wrong; "" if nothing did
  double seconds = 0;  // from the start of writing to its end
};

// Runs one job at a time. The destructor waits for it.
struct BackgroundWriter {
  BackgroundWriter() = default;
  ~BackgroundWriter() {
    if (thread_.joinable()) thread_.join();
  }
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  // Calls write(result) on another thread; write sets result.folder, and what it throws becomes result.error. What it
  // reads must not change until result() has returned its result. No other job may be running, or finished but not yet
  // returned by result().
  void start(int64_t step, std::function<void(SaveResult&)> write) {
    CHECK(!thread_.joinable());
    result_ = SaveResult();
    result_.step = step;
    done_ = false;
    thread_ = std::thread([this, write = std::move(write)] {
      omp_set_num_threads(1);  // for this thread only: training uses the others
      const double start = seconds_now();
      try {
        write(result_);
      } catch (const std::exception& e) {  // includes std::bad_alloc: a failed checkpoint does not end the run
        result_.error = e.what();
      }
      result_.seconds = seconds_now() - start;
      done_ = true;
    });
  }

  // Whether a job is running.
  bool is_busy() const { return thread_.joinable() && !done_; }

  // The result of the last start(), once; nullopt if there is none, or if it is still running and `wait` is false.
  std::optional<SaveResult> result(bool wait) {
    if (!thread_.joinable() || (!wait && !done_)) return std::nullopt;
    thread_.join();
    return std::move(result_);
  }

 private:
  std::thread thread_;
  std::atomic<bool> done_ = false;  // the thread no longer accesses result_
  SaveResult result_;
};

// A thread that writes checkpoints, or the report, while training continues. It uses host memory and files only: the
// device belongs to the training thread.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>

struct SaveResult {
  int64_t step = 0;    // of the checkpoint
  std::string folder;  // the complete checkpoint; "" if writing failed
  std::string error;   // what went wrong; "" if nothing did
  double seconds = 0;  // from the start of writing to its end
};

// Runs one job at a time. The destructor waits for it.
struct BackgroundWriter {
  BackgroundWriter() = default;
  ~BackgroundWriter();
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  // Calls write(result) on another thread; write sets result.folder, and what it throws becomes result.error. What it
  // reads must not change until result() has returned its result. No other job may be running, or finished but not yet
  // returned by result().
  void start(int64_t step, std::function<void(SaveResult&)> write);

  // Whether a job is running.
  bool is_busy() const { return thread_.joinable() && !done_; }

  // The result of the last start(), once; nullopt if there is none, or if it is still running and `wait` is false.
  std::optional<SaveResult> result(bool wait);

 private:
  std::thread thread_;
  std::atomic<bool> done_ = false;  // the thread no longer accesses result_
  SaveResult result_;
};

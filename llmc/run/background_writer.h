// A thread that writes checkpoints while training goes on. It touches host memory and files alone: a device is the training thread's.
#pragma once
#include <atomic>      // std::atomic
#include <cstdint>     // int64_t
#include <functional>  // std::function
#include <optional>    // std::optional
#include <string>      // std::string
#include <thread>      // std::thread

struct SaveResult {
  int64_t step = 0;     // of the checkpoint
  std::string folder;   // the complete checkpoint; "" if there is none
  std::string error;    // what went wrong; "" if nothing did
  double seconds = 0;   // from the start of writing to its end
};

// One piece of work at a time. Whatever is under way is done before the object is gone.
struct BackgroundWriter {
  BackgroundWriter() = default;
  ~BackgroundWriter();
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  // Begins to call write(result) on another thread, which sets result.folder; what it throws becomes result.error. What it reads
  // stays as it is until result() has told of it. Nothing else may be under way, or done without having been told of.
  void start(int64_t step, std::function<void(SaveResult&)> write);

  // What became of the last start(), once; nothing if it is still under way, which `wait` waits for, or there was none.
  std::optional<SaveResult> result(bool wait);

 private:
  std::thread thread_;
  std::atomic<bool> done_ = false;  // the thread does not touch result_ any more
  SaveResult result_;
};

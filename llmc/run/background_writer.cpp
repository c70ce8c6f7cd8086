#include "background_writer.h"
#include <omp.h>
#include <exception>
#include <utility>
#include "llmc/utils/clock.h"
#include "llmc/utils/error.h"

BackgroundWriter::~BackgroundWriter() {
  if (thread_.joinable()) thread_.join();
}

void BackgroundWriter::start(int64_t step, std::function<void(SaveResult&)> write) {
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

std::optional<SaveResult> BackgroundWriter::result(bool wait) {
  if (!thread_.joinable() || (!wait && !done_)) return std::nullopt;
  thread_.join();
  return std::move(result_);
}

// How long the GPU takes for a piece of work, without the host's time to queue it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>
#include "llmc/report/statistics.h"

// A launch takes the host 3 to 8 us, which is noise in so much work.
constexpr double least_queued_seconds = 1e-3;
constexpr int64_t most_queued_runs = 4096;

// Seconds that `run` takes on the device: the median of batches that fill about `seconds`, at least `least_batches`,
// after some that are not counted. A batch is as many runs, queued one after the other, as take least_queued_seconds.
// timer.start() and timer.seconds() are GpuTimer's.
template <class Timer, class Run>
double time_of(Timer&& timer, const Run& run, double seconds, size_t least_batches) {
  int64_t runs = 1;
  const auto time_batch = [&] {
    timer.start();
    for (int64_t i = 0; i < runs; i++) run();
    return timer.seconds();
  };
  run();  // libraries initialise, modules load
  while (time_batch() < least_queued_seconds && runs < most_queued_runs) runs *= 2;
  std::vector<double> times;
  for (double spent = 0; times.size() < least_batches || spent < seconds;) {
    const double batch = time_batch();
    times.push_back(batch / double(runs));
    spent += batch;
  }
  return median(times);
}

// The benchmark of a GPU, on a clock that the test advances.
//
// COVERS ONLY dev/bench/gpu_time.h
#include <gtest/gtest.h>
#include "dev/bench/gpu_time.h"

// A GPU that does what is queued after the host has needed `latency` seconds for the first launch.
struct FakeGpu {
  double latency, seconds_a_run;
  int64_t runs = 0, queued = 0, most_queued = 0;

  void start() { queued = 0; }
  double seconds() {
    most_queued = std::max(most_queued, queued);
    return latency + double(queued) * seconds_a_run;
  }
  double time(double seconds, size_t least_batches) {
    return time_of(
        *this, [&] { runs++, queued++; }, seconds, least_batches);
  }
};

TEST(TimeOf, QueuesEnoughThatALaunchsLatencyDoesNotCount) {
  FakeGpu gpu = {8e-6, 2e-6};
  EXPECT_NEAR(gpu.time(0.05, 3), 2e-6, 0.01 * 2e-6);
  EXPECT_GE(double(gpu.most_queued) * 2e-6, 0.99 * least_queued_seconds);
}

TEST(TimeOf, RunsLongWorkOnceAtATime) {
  FakeGpu gpu = {8e-6, 0.3};
  EXPECT_NEAR(gpu.time(4, 3), 0.3, 1e-4);
  EXPECT_EQ(gpu.most_queued, 1);
  EXPECT_EQ(gpu.runs, 1 + 1 + 14) << "a warm-up, a trial, and as many as fill four seconds";
}

TEST(TimeOf, EndsWhereNothingTakesTime) {
  FakeGpu gpu = {0, 0};
  EXPECT_EQ(gpu.time(0, 1), 0);
  EXPECT_EQ(gpu.most_queued, most_queued_runs);
}

// The benchmark of a GPU, on a clock that the test advances; and how the CPU's compares itself with PyTorch.
//
// COVERS ONLY dev/bench/gpu_time.h
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <regex>
#include "command_line.h"
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

// Workers that answer at once take the place of both precisions' programs and of PyTorch, which takes 1.2 s to compile
// a model.
using LongBenchCpu = CommandLine;

TEST_F(LongBenchCpu, TellsWhatItHasMeasuredAndHowLongPyTorchCompiles) {
  const std::string worker = "#!/bin/sh\ncase \"$*\" in -c*) exit ;; *--compile*) sleep 1.2 ;; esac\n"
                             "while read -r seconds; do echo 0.020 1e9; done\n";
  for (const char* name : {"bf16/bench_cpu", "fp32/bench_cpu", "earlier/fp32/bench_cpu", "python"}) {
    fs::create_directories(fs::path(in(name)).parent_path());
    write_file(in(name), worker);
    chmod(in(name).c_str(), 0755);
  }
  const auto compare = [&](const std::string& option, const std::string& earlier = "", const char* isa = "AVX2") {
    return run(std::string("ONEDNN_MAX_CPU_ISA=") + isa + " build/fp32/bench_cpu compare '" + in("") + earlier + "' '" +
               in("python") + "' 2 0.1 " + option);
  };
  const auto expect_in = [](const std::string& part, const std::string& text) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  };
  const Outcome all = compare("");
  EXPECT_EQ(all.exit_status, 0) << all.err;
  expect_in("124M, B 4, T 64\n  bf16: ready after 0 s\n  fp32: ready after 0 s\n  PyTorch, ", all.err);
  expect_in("  PyTorch, fp32: ready after 0 s\n  PyTorch, fp32, compiled: ready after 1 s\n", all.err);
  expect_in("  2 of 2, PyTorch, fp32, compiled: 20.0 ms\n", all.err);
  expect_in("| 124M, B 4, T 64 | PyTorch, fp32, compiled | 20.0 | 12800 | 1.00 | 100 % | 1 |\n",
            std::regex_replace(all.out, std::regex("[0-9]+ %"), "100 %"));
  const auto has = [](const Outcome& outcome, const char* part) {
    return (outcome.out + outcome.err).find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(all, "PyTorch in bf16 is left out")) << all.err;
  EXPECT_FALSE(has(all, "PyTorch, bf16")) << all.err;
  const Outcome any = compare("--quick", "", "DEFAULT");
  EXPECT_NE(has(any, "PyTorch, bf16"), has(any, "PyTorch in bf16 is left out")) << any.err;
  const Outcome quick = compare("--quick");
  EXPECT_EQ(quick.exit_status, 0) << quick.err;
  EXPECT_FALSE(has(quick, "compiled")) << quick.out << quick.err;
  expect_in("  2 of 2, PyTorch, fp32: 20.0 ms\n", quick.err);
  const Outcome both = compare("--quick", "," + in("earlier"));
  EXPECT_EQ(both.exit_status, 0) << both.err;
  expect_in("  2 of 2, fp32, " + in("earlier") + ": 20.0 ms\n", both.err);
  EXPECT_EQ(both.err.find("bf16, " + in("earlier")), std::string::npos) << "it has none";
  EXPECT_EQ(compare("", "nowhere").exit_status, 1) << "a folder without programs";
}

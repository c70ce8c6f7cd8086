// The scripts that print the numbers of experiments from their logs: dev/bench/results/*/*.py. Runs from the
// repository's root. COVERS dev/bench/results/sla/differences.py dev/bench/results/probe/solved.py
#include <gtest/gtest.h>
#include "command_line.h"

class Results : public CommandLine {
 protected:
  void SetUp() override {
    CommandLine::SetUp();
    if (run("python3 --version").exit_status != 0) GTEST_SKIP() << "no python3";
  }
  // What Python prints of expressions, a line each, with the scripts as `d` and `s`.
  std::string values_of(const std::string& expressions) const {
    const Outcome o = run("PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=dev/bench/results/sla:dev/bench/results/probe python3 "
                          "-c "
                          "'import math, differences as d, solved as s\nprint(" +
                          expressions + ", sep=\"\\n\")'");
    EXPECT_EQ(o.exit_status, 0) << o.err;
    return o.out;
  }
};

// The intervals of the second and third differences are partly beyond 0.01. By tables of Student's t, 2.3060 * 0.006 /
// sqrt(9) is the first below 0.005, and 2.4469 * 0.0097 / sqrt(7) the first below 0.009.
TEST_F(Results, DifferencesAreCalledTheSameWithinTheirInterval) {
  EXPECT_EQ(values_of("d.said(-0.002, 0.007, 0.3, 0.008, 5), d.said(-0.005, 0.006, 0.1, 0.006, 7), "
                      "d.said(0.001, 0.0097, 0.1, 0.0097, 5), d.said(-0.03, 0.02, 0.01, 0.02, 5), "
                      "d.said(0.03, 0.02, 0.01, 0.02, 5), d.said(0.03, math.nan, math.nan, math.nan, 1)"),
            "the same within 0.01\nnot decided: 9 such pairs would\nnot decided: 7 such pairs would\nlower\nhigher\n"
            "one pair\n");
}

TEST_F(Results, TimesUntilSolvedAreCalledTheSameWithinTheirInterval) {
  EXPECT_EQ(values_of("s.said(-50, 40, 0.1, 3, 5), s.said(-50, 60, 0.1, 8, 5), s.said(-50, 60, 0.01, 3, 5), "
                      "s.said(50, 60, 0.01, 3, 5), s.said(50, 60, 0.1, 2000, 5)"),
            "the same within 100 updates\nnot decided: 3 seeds more would, if it is as large as it looks\nearlier\n"
            "later\nnot decided: over 1,000 seeds more\n");
}

// Three seeds each: plain solves the task at 400, 500 and 600, sla at 100, 200 and 300. Two of the 20 ways to draw
// three of six runs are as far apart, so that p is 0.1. Welch's half interval is 2.7764 sqrt(2 * 10000 / 3) = 226.7.
TEST_F(Results, UpdatesUntilSolvedAreTestedByPermutations) {
  const std::string task = "noisy_recall_pairs_8_noise_4_symbols_16_t_36_x_1200";
  for (const auto& [wiring, name, first] : {std::tuple("plain", "plain", 400), {"sla(2,2)", "sla_2_2", 100}})
    for (int seed = 1; seed <= 3; seed++) {
      std::string log = format("{\"run\":{\"wiring\":\"%s\",\"steps\":1200}}\n", wiring);
      for (int step = 50; step <= 1200; step += 50)
        log += format("{\"step\":%d,\"val_loss\":1,\"val_accuracy\":%g}\n", step,
                      step >= first + 100 * (seed - 1) ? 0.995 : 0.95);
      const std::string folder = "head-start/" + task + "/" + name + format("-%d", seed);
      fs::create_directories(in(folder));
      write_file(in(folder + "/log.jsonl"), log);
    }
  const Outcome o = run("python3 dev/bench/results/probe/solved.py " + folder);
  ASSERT_EQ(o.exit_status, 0) << o.err;
  for (const char* line :
       {"| `plain` | 3 | 3 | 500 | 500 | 400, 500, 600 |", "| `sla(2,2)` | 3 | 3 | 200 | 200 | 100, 200, 300 |",
        "| among noise | `sla(2,2)` | -300 | +- 227 | 0.1000 | 0.1000 | not decided: 1 seeds more would, "
        "if it is as large as it looks |"})
    EXPECT_NE(o.out.find(line), std::string::npos) << line << "\n" << o.out;
}

// The scripts that print the numbers of experiments from their logs: dev/bench/results/*/*.py. Runs from the
// repository's root. COVERS dev/bench/results/sla/differences.py dev/bench/results/probe/solved.py
// COVERS dev/bench/results/frontier/frontier.py
#include <gtest/gtest.h>
#include <regex>
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

// The parabola of gqa(1), 1.10, 1.08 and 1.12 over three rates, has its vertex a sixth of a step below the middle,
// 0.0008 lower. A window of 64 of 256 bytes keeps a quarter, in three layers of four 7 sixteenths.
TEST_F(Results, AFrontierIsOfTheBestRatesAndOfWhatACacheKeeps) {
  auto add = [&](const std::string& group, const std::string& wiring, int kv, const std::vector<double>& bits) {
    for (size_t seed = 0; seed < bits.size(); seed++) {
      const std::string name = std::regex_replace(wiring, std::regex("\\W+"), "_");
      const std::string run = in("runs/" + group + "/" + name + format("-%zu", seed + 1));
      fs::create_directories(run);
      write_file(run + "/log.jsonl", format("{\"run\":{\"wiring\":\"%s\",\"steps\":9,\"num_layers\":8,\"seq_len\":256,"
                                            "\"kv_bytes_per_token\":%d}}\n"
                                            "{\"step\":9,\"val_bits_per_byte\":%.17g}\n",
                                            wiring.c_str(), kv, bits[seed]));
    }
  };
  for (const auto& [rate, plain, gqa] : {std::tuple("3e-3", 1.02, 1.10), {"6e-3", 1.00, 1.08}, {"12e-3", 1.04, 1.12}}) {
    add(std::string("rates/") + rate, "plain", 1536, {plain, plain + 0.001, plain + 0.002});
    add(std::string("rates/") + rate, "gqa(1)", 256, {gqa, gqa + 0.001, gqa + 0.0025});
  }
  add("decay", "plain", 1536, {1.01, 0.991});
  add("points/6e-3", "window(64)", 1536, {1.001, 1.0011, 1.0031});
  add("points/6e-3", "gqa(1) window(64,SSSL)", 256, {1.081, 1.0805, 1.0840});
  add("points/6e-3", "route(0.3)", 1536, {1.01, 1.01, 1.01});
  for (int seed = 1; seed <= 3; seed++)
    for (const auto& [file, bits] :
         {std::tuple("points/6e-3/route_0_3_-%d/read-2.json", 1.2), {"rates/6e-3/gqa_1_-%d/own.json", 1.08}})
      write_file(in("runs/" + format(file, seed)),
                 format("{\"wiring\":\"gqa(1)\",\"all_texts\":{\"bits_per_byte\":%g}}", bits + 0.001 * seed * seed));
  // 0.1 bits up to 63 bytes, then 0.2, 0.3 and 0.4 of the three seeds; but 0.7 at 20, which counts for 23 positions.
  for (const auto& [wiring, bits] : {std::pair("plain", 0.0), {"gqa_1_", 0.1}})
    for (int seed = 1; seed <= 3; seed++) {
      std::string csv = "position,tokens,loss\n";
      for (int at = 1; at <= 256; at++) {
        const int times = at >= 64 ? 1 + seed : at == 20 ? 7 : 1;
        csv += format("%d,%d,%.17g\n", at, at == 20 ? 230 : 10, log(2) * (1 + 0.01 * seed + bits * times));
      }
      write_file(in(format("runs/rates/6e-3/%s-%d/positions.csv", wiring, seed)), csv);
    }
  // The difference doubles when the text does, from 0.01 and 0.02 on, to the points': slopes of 0.023 and 0.046.
  add("points/6e-3", "sla(6,6)", 1152, {1.08, 1.081, 1.162});
  for (const auto& [steps, plain, difference] : {std::tuple("177", 1.4, 0.01), {"354", 1.2, 0.02}, {"708", 1.1, 0.04}})
    for (const auto& [wiring, bits] : {std::tuple("plain", 0.0), {"sla(6,6)", difference}})
      for (const char* rate : {"6e-3", "12e-3"})
        add(std::string("text/") + steps + "/" + rate, wiring, 1536,
            rate[0] == '6' ? std::vector<double>{plain, plain + bits, plain + 0.01 + 2 * bits}
                           : std::vector<double>{2});
  add("frontier-linux/rates/12e-3", "plain", 1536, {1.5});
  add("frontier-linux/rates/24e-3", "plain", 1536, {1, 1, 1});
  add("frontier-linux/rates/24e-3", "gqa(1)", 256, {1.2, 1.21, 1.22});
  add("larger/12e-3", "plain", 3072, {1, 1, 1, 1});
  add("larger/12e-3", "gqa(1)", 512, {1.3, 1.31, 1.32, 1.31});
  for (const char* name : {"plain", "gqa_1_"})  // positions of another model
    fs::copy(in("runs/rates/6e-3/plain-1/positions.csv"), in(format("runs/larger/12e-3/%s-4/positions.csv", name)));
  add("larger/12e-3", "sla(6,6)", 2304, {1.1, 1.1});
  fs::remove_all(in("runs/larger/12e-3/sla_6_6_-1"));  // has not run
  add("larger/24e-3", "plain", 3072, {1.5});
  // A task that all solve, at 400 to 600 and 100 to 300, and one that none does.
  for (const auto& [task, first, last] : {std::tuple("hops_12", 400, 0.995), {"hops_2", 9999, 0.8}}) {
    fs::create_directories(in(format("runs/frontier-probe/data/%s", task)));
    write_file(in(format("runs/frontier-probe/data/%s/MANIFEST.json", task)), "{\"chance_in_context\":0.1}");
    for (const auto& [wiring, name, less] : {std::tuple("plain", "plain", 0), {"sla(4,6)", "sla_4_6_", 1}})
      for (int seed = 1; seed <= 3; seed++) {
        const std::string run = in(format("runs/frontier-probe/%s/%s-%d", task, name, seed));
        fs::create_directories(run);
        std::string log = format("{\"run\":{\"wiring\":\"%s\",\"steps\":900}}\n", wiring);
        for (int step = 100; step <= 900; step += 100)
          log += format("{\"step\":%d,\"val_accuracy\":%g}\n", step,
                        first < 9999 ? (step >= first + 100 * (seed - 1) - 300 * less ? last : 0.5)
                                     : last - less * (0.11 - 0.01 * seed));
        write_file(run + "/log.jsonl", log);
      }
  }
  const Outcome o = run("PYTHONDONTWRITEBYTECODE=1 python3 dev/bench/results/frontier/frontier.py " + in("runs") + " " +
                        in("points.csv"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  for (const char* line : {"| `gqa(1)` | 3 | 1.1012 | 1.0812 | 1.1212 | 0.006 | 0.0053 | 0.0008 |",
                           "Weight decay 0.02 less 0.1, `plain`: +0.0100, -0.0100",
                           "| `window(64)` | 384 | 25.0 % | 3 | +0.0007 | +- 0.0014 | the same within 0.01 |",
                           "| `gqa(1) window(64,SSSL)` | 112 | 7.3 % | 3 | +0.0808 |",
                           "| 50 % | `window(64)` | +0.0007 |  |",
                           "| `gqa(1)` | 3 | +0.100 +- 0.000 | +0.297 +- 0.000 | +0.300 +- 0.248 | +0.300 +- 0.248 |",
                           "| 10 % | `gqa(1) window(64,SSSL)` | +0.0808 |  |",
                           "| `gqa(1)` | 256 | 16.7 % | 3 | +0.1200 |",
                           "| `0.72` | 2 | +0.0300 |",
                           "A doubling of the text adds +0.0345 +- 0.1461 to the difference (2 pairs)",
                           "| `gqa(1)` | 256 | 16.7 % | 3 | +0.0802 | +- 0.0007 | higher | 58 % |",
                           "| pairs | minus it trained | 95 % |",
                           "`plain`: 1.0000 bits per byte; seed 1 at each rate: `plain` 12e-3: 1.5000, 24e-3: 1.0000",
                           "| `gqa(1)` | 256 | 16.7 % | 3 | +0.2100 | +- 0.0248 | higher |",
                           "| `gqa(1)` | +0.1298 +- 0.0248 |",
                           "`plain`: 1.0000 bits per byte; seed 1 at each rate: `plain` 12e-3: 1.0000, 24e-3: 1.5000",
                           "| `gqa(1)` | 512 | 16.7 % | 4 | +0.3100 | +- 0.0130 | higher |",
                           "| `gqa(1)` | +0.2298 +- 0.0130 |",
                           "hops 12, a guess: 10.0 %",
                           "| `sla(4,6)` | 100, 200, 300 | -300 | +- 227 | 0.100 |",
                           "| `sla(4,6)` | 70.0, 71.0, 72.0 | -9 | +- 2 | 0.004 |"})
    EXPECT_NE(o.out.find(line), std::string::npos) << line << "\n" << o.out;
  EXPECT_EQ(o.out.find("higher and the same"), std::string::npos) << o.out;
  EXPECT_NE(read_file(in("points.csv")).find("\nwindow(64),0.2500,0.0007,0.0014\n"), std::string::npos);
}

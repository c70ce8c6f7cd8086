// Reports: what is read of a run's log, the pages, and how a browser shows them. Runs from the repository's root, where
// the trainer and `report` are. Comparisons over seeds are in test_comparison.cpp.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <chrono>
#include <limits>
#include <numeric>
#include "helpers.h"
#include "llmc/report/parts.h"
#include "llmc/report/wiring_picture.h"
#include "llmc/train/print.h"
#include "llmc/base/files.h"
#include "report_test.h"

// ----------------------------------------------------------------------------
// Thinning

TEST(Thinning, KeepsEachExtremeAndWhatIsNotFinite) {
  std::vector<double> values(18000);
  for (size_t i = 0; i < values.size(); i++) values[i] = 3 - 1e-4 * double(i) + 0.01 * double(i * 37 % 11);
  values[7777] = 99, values[12345] = -99, values[4000] = NAN, values[17000] = std::numeric_limits<double>::infinity();
  const std::vector<size_t> kept = report::thin(values, 500);
  EXPECT_LE(kept.size(), 1504u);
  EXPECT_TRUE(std::is_sorted(kept.begin(), kept.end()));
  for (size_t i : {0, 4000, 7777, 12345, 17000, 17999}) EXPECT_EQ(std::count(kept.begin(), kept.end(), i), 1) << i;
  size_t longest = 0;
  for (size_t i = 1; i < kept.size(); i++) longest = std::max(longest, kept[i] - kept[i - 1]);
  EXPECT_LE(longest, 2 * 36u) << "two points in each bucket of 36";
  EXPECT_EQ(report::thin({1, NAN, 3}, 2), (std::vector<size_t>{0, 1, 2}));
  EXPECT_TRUE(report::thin({}, 2).empty());
}

// ----------------------------------------------------------------------------
// Logs

TEST_F(Report, OfALogHasItsStepsTimeAndTokens) {
  const RunHistory run = read(LogOf().head() + LogOf::val(0, "4.5") + LogOf::steps(1, 10) + LogOf::val(10, "2.5") +
                              "{\"step\":10,\"sample\":\"text\"}\n");
  ASSERT_EQ(run.steps.size(), 10u);
  EXPECT_DOUBLE_EQ(run.seconds(), 0.2);
  EXPECT_EQ(run.tokens(), 160);
  EXPECT_DOUBLE_EQ(run.steps[4].limit_share, 0.8) << "16 of 20 ms";
  ASSERT_EQ(run.validations.size(), 2u);
  EXPECT_EQ(run.validations[0].tokens, 0);
  EXPECT_EQ(run.validations[1].tokens, 160);
  EXPECT_EQ(run.final_loss(), 2.5);
  EXPECT_TRUE(run.is_finished());
  EXPECT_FALSE(has(report_page(run), "class=\"warn\"")) << "nothing is wrong";
}

TEST_F(Report, TheLossOfAnEarlierStepIsNotTheFinalOne) {
  const RunHistory cut = read(LogOf().head() + LogOf::val(5, "4.5") + LogOf::steps(6, 10));
  EXPECT_TRUE(std::isnan(cut.final_loss()));
  EXPECT_TRUE(has(report_page(cut), "the validation after its last step is missing, and with it the final loss"));
  const RunHistory begun = read(LogOf().head() + LogOf::steps(1, 5) + LogOf::val(5, "4.5") + LogOf::steps(6, 9));
  EXPECT_EQ(begun.final_loss(), 4.5) << "it goes on";
  LogOf untrained;
  untrained.planned = 0;
  const RunHistory none = read(untrained.head() + LogOf::val(0, "5"));
  EXPECT_EQ(none.final_loss(), 5);
  EXPECT_FALSE(has(report_page(none), "not finished"));
}

TEST_F(Report, ATornLastLineIsLeftOutAndSaid) {
  const RunHistory run = read(LogOf().head() + LogOf::steps(1, 4) + "{\"step\":5,\"loss\":2.9");
  EXPECT_EQ(run.last_step(), 4);
  EXPECT_TRUE(run.ends_in_mid_line);
  EXPECT_EQ(run.num_unreadable, 0);
  const std::string page = report_page(run);
  EXPECT_TRUE(has(page, "the log ends in the middle of a line"));
  EXPECT_TRUE(has(page, "not finished: 4 of 10 steps"));
  const RunHistory damaged = read(LogOf().head() + "\x80 no JSON\n[1]\n{\"step\":\"x\"}\n" + LogOf::steps(1, 2));
  EXPECT_EQ(damaged.num_unreadable, 3);
  EXPECT_EQ(damaged.last_step(), 2);
  EXPECT_TRUE(has(report_page(damaged), "3 lines of the log cannot be read"));
  EXPECT_ERROR(read_run(in("nowhere")), "nowhere/log.jsonl: cannot be read");
}

// Each value of a log in turn is something else, beside a checkpoint with a router.
TEST_F(Report, ValuesOfAnyKindInALogDoNoHarm) {
  LogOf of;
  of.wiring = "gqa(2) router", of.more = R"(,"val_checksum":"1","vocab_size":257,"val_batches":0)";
  const std::string good = of.head() + LogOf::steps(1, 2) +
                           "{\"step\":2,\"val_loss\":2.5,\"val_bits_per_byte\":1,\"val_accuracy\":1,\"val_ponder\":1}\n"
                           "{\"step\":2,\"sample\":\"ab\",\"tokens\":[\"a\",\"b\"],\"ponder\":[1.5]}\n";
  const RunHistory first = read_run(write_run("good", good));
  fs::create_directory_symlink(fs::absolute("dev/test/golden/n_router"), write_run("bad", good) + "/step_00000002");
  EXPECT_TRUE(has(report_page(read_run(in("bad"))), "wiring without router"));
  std::vector<json> lines;
  for (size_t begin = 0, end; (end = good.find('\n', begin)) != std::string::npos; begin = end + 1)
    lines.push_back(json::parse(good.substr(begin, end - begin)));
  const json values = {nullptr,
                       true,
                       "NaN",
                       "",
                       0,
                       -1,
                       0.5,
                       100000,
                       4294967297,
                       18446744073709551615u,
                       1e18,
                       -1e300,
                       1e300,
                       5e-324,
                       json::array({1}),
                       json::array(),
                       {{"a", 1}},
                       std::string(5000, '(')};
  const auto try_all = [&](json& value) {
    const json before = value;
    for (const json& other : values) {
      value = other;
      std::string log;
      for (const json& line : lines) log += line.dump() + "\n";
      const RunHistory run = read_run(write_run("bad", log));
      EXPECT_LT(report_page(run).size() + comparison_page({first, run}).size(), 1000000u) << log;
    }
    value = before;
  };
  const auto begin = std::chrono::steady_clock::now();
  for (json& line : lines)
    for (auto& [key, value] : line.items()) {
      try_all(value);
      for (json& inner : value)
        if (value.is_object()) try_all(inner);
    }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(seconds.count(), 60) << "of some 800 logs";
}

// A run that was killed after step 8 and resumed after step 5.
TEST_F(Report, OfStepsTrainedTwiceTheLaterCount) {
  const RunHistory run =
      read(LogOf().head() + LogOf::steps(1, 5) + LogOf::sample(5, "kept") + LogOf::steps(6, 6) + LogOf::val(6, "7.5") +
           LogOf::sample(6, "dropped") + LogOf::steps(7, 8) +
           "{\"step\":5,\"process\":{\"host\":\"node2\",\"ranks\":2,\"gemm_peak\":2000000}}\n" + LogOf::steps(6, 7, 9));
  ASSERT_EQ(run.steps.size(), 7u);
  EXPECT_NEAR(run.steps[4].loss, 2.95, 1e-9);
  EXPECT_NEAR(run.steps[5].loss, 8.94, 1e-9);
  EXPECT_EQ(run.last_step(), 7) << "step 8 was not trained again";
  EXPECT_EQ(run.num_repeated, 3);
  EXPECT_TRUE(run.validations.empty()) << "that after step 6 was of other weights";
  ASSERT_EQ(run.samples.size(), 1u) << "that after step 6 likewise";
  EXPECT_EQ(run.samples[0].text, "kept");
  EXPECT_EQ(run.tokens(), 7 * 16);
  const std::string page = report_page(run);
  EXPECT_TRUE(has(page, "3 steps are in the log twice")) << page.substr(0, 300);
  EXPECT_TRUE(has(page, "node2"));
}

TEST_F(Report, LossesThatAreNotFiniteAreGapsAndSaid) {
  const RunHistory run = read(LogOf().head() + LogOf::steps(1, 3) + LogOf::step(4, "null", "null") +
                              LogOf::step(5, "2.9", "null") + LogOf::steps(6, 10) + LogOf::val(10, "null"));
  EXPECT_EQ(run.steps_not_finite(), (std::vector<int64_t>{4, 5}));
  const std::string page = report_page(run);
  EXPECT_TRUE(has(page, "2 of 10 steps had a loss or a norm that was not finite and were skipped; curves have gaps "
                        "there: 4, 5."));
  EXPECT_TRUE(has(page, "the validation loss after step 10 is not finite"));
  const json loss = charts(page).at(0).at("series").at(0), norm = charts(page).at(1).at("series").at(0);
  for (int step = 1; step <= 10; step++) {
    EXPECT_EQ(loss.at("y").at(step - 1).is_null(), step == 4) << step;
    EXPECT_EQ(norm.at("y").at(step - 1).is_null(), step == 4 || step == 5) << step;
  }
  EXPECT_EQ(charts(page).at(0).at("series").size(), 1u) << "no curve of validations: none was finite";
}

TEST_F(Report, HasABoundedNumberOfNotices) {
  std::string log = LogOf().head() + LogOf::steps(1, 10);
  for (int64_t step = 1; step <= 1000; step++) log += LogOf::val(step, "null");
  const std::string page = report_page(read(log));
  EXPECT_TRUE(has(page, "the validation loss after step 20 is not finite"));
  EXPECT_EQ(count(page, "is not finite"), 20u);
  EXPECT_TRUE(has(page, "980 lines more"));
}

TEST_F(Report, OfTokensThatHaltHasACurveOfTheirCycles) {
  std::string log = LogOf().head();
  for (int n = 1; n <= 3; n++) log += format("{\"step\":%d,\"loss\":3,\"grad_norm\":1,\"ponder\":%d.5}\n", n, 5 - n);
  const json curve = charts(report_page(read(log))).at(1);
  EXPECT_EQ(curve.at("title"), "Cycles that tokens run: N + R");
  EXPECT_EQ(curve.at("series").at(0).at("y"), json({4.5, 3.5, 2.5}));
}

// The last of two samples is shaded: from its least to its largest number.
TEST_F(Report, ShadesTheLastSamplesTokensByTheirCycles) {
  const auto sample = [](int64_t step, const json& ponder) {
    const json tokens = {"<|endoftext|>", "<b>&\n", "", "\u00fc"};
    return json({{"step", step}, {"sample", "<b>&\n\u00fc"}, {"tokens", tokens}, {"ponder", ponder}}).dump() + "\n";
  };
  const std::string before = LogOf().head() + LogOf::steps(1, 10) + sample(5, {1.5, 1.5, 1.5});
  const std::string page = report_page(read(before + sample(10, {2.25, 1.25, 3.25})));
  EXPECT_TRUE(has(page, "from <span style=\"--share:0.000\" title=\"the fewest\">1.250</span> to "
                        "<span style=\"--share:1.000\" title=\"the most\">3.250</span>;"));
  EXPECT_TRUE(has(page, "<pre class=\"shaded\"><span style=\"--share:0.500\" title=\"N + R 2.250\">&lt;|endoftext|&gt;"
                        "</span><span style=\"--share:0.000\" title=\"N + R 1.250\">&lt;b&gt;&amp;\n</span>"
                        "<span style=\"--share:1.000\" title=\"N + R 3.250\"></span>\u00fc</pre>"));
  EXPECT_TRUE(has(page, "after step 5</p>\n<pre>&lt;b&gt;&amp;\n\u00fc</pre>"));
  EXPECT_EQ(count(page, "--share:"), 5u) << "two in the line that says what shades mean";
  EXPECT_EQ(count(report_page(read(before)), "--share:0.000"), 4u) << "equal numbers, and that line's least one";
  for (const json& ponder : {json({1.5, 1.5}), json::array(), json("1"), json({1.5, 1.5, "1"}), json()})
    EXPECT_FALSE(has(report_page(read(before + sample(10, ponder))), "--share:")) << ponder;
}

TEST_F(Report, OfSeveralRunsHasTheCyclesOfThoseThatHalt) {
  const std::string log = LogOf().head() + LogOf::steps(1, 10);
  const RunHistory halts = read(log + "{\"step\":10,\"val_loss\":2.5,\"val_ponder\":3.25}\n"),
                   plain = read(log + LogOf::val(10, "2.5"));
  const std::string page = comparison_page({plain, halts});
  EXPECT_TRUE(has(page, "<th>cycles of a token, N + R</th>"));
  EXPECT_TRUE(has(page, "<td>+0.00000</td><td>3.25000</td>")) << page.substr(page.find("Final losses"), 3000);
  EXPECT_TRUE(has(page, "<td>2.50000</td><td></td><td>-</td>")) << "the first has nothing to be compared with";
  EXPECT_FALSE(has(comparison_page({plain, plain}), "N + R</th>"));
}

TEST_F(Report, HasBitsPerByteWhereTheyAreKnown) {
  const std::string log = LogOf().head() + LogOf::steps(1, 10);
  const RunHistory known = read(log + "{\"step\":10,\"val_loss\":2.5,\"val_bits_per_byte\":1.125}\n"),
                   unknown = read(log + LogOf::val(10, "2.5"));
  EXPECT_TRUE(has(report_page(known), "bits per byte</span><b>1.12500</b>"));
  const std::string page = comparison_page({known, unknown});
  EXPECT_TRUE(has(page, "same seed</th><th>bits per byte</th>")) << "beside the losses, where no narrow window cuts it "
                                                                    "off";
  EXPECT_TRUE(has(page, "<td></td><td>1.12500</td>")) << page.substr(page.find("Final losses"), 3000);
  EXPECT_FALSE(has(comparison_page({unknown, unknown}), "bits per byte"));
}

TEST_F(Report, TextFromOutsideIsShownAndNotRun) {
  const std::string evil = "</script><script>alert(1)</script><b title=\"x\" & 'y'>";
  const std::string sample = json(evil + " \u00fc\u4e2d\U0001F600").dump();
  const std::string log =
      LogOf().head() + LogOf::steps(1, 10) + LogOf::val(10, "2.5") + "{\"step\":10,\"sample\":" + sample + "}\n";
  const std::string folder = write_run("<b>run&amp", log);
  write_file(folder + "/config.toml", "prompt = \"" + evil + "\xff\"\n");
  const RunHistory run = read_run(folder);
  LogOf named;
  named.wiring = evil.substr(0, evil.find('"'));
  const std::string page = report_page(run), two = comparison_page({finished_with("evil", named, "2.5"), run});
  for (const std::string& text : {page, two}) {
    EXPECT_EQ(count(text, "</script"), 3u) << "of the data, of Chart.js and of report.js";
    EXPECT_FALSE(has(text, "<b>run"));
    EXPECT_TRUE(has(text, "&lt;b&gt;run&amp;amp"));
  }
  EXPECT_EQ(count(page, "alert(1)"), 2u);
  EXPECT_EQ(count(page, "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;&lt;b title=&quot;x&quot; &amp; 'y'&gt;"),
            2u);
  EXPECT_TRUE(has(page, "\u00fc\u4e2d\U0001F600"));
  EXPECT_FALSE(has(page, "\xff"));
  EXPECT_EQ(charts(two).at(0).at("series").at(0).at("name"), named.wiring);
}

// The paper's runs.
TEST_F(Report, Of18000StepsIsSmallAndLosesNoSpike) {
  LogOf of;
  of.planned = 18000;
  std::string log = of.head();
  for (int64_t n = 1; n <= 18000; n++) {
    log += n == 9001 ? LogOf::step(n, "77.5", "88.5")
                     : LogOf::step(n, std::to_string(3 + 8 / double(n) + 1e-3 * double(n % 7)), "1.2345678");
    if (n % 250 == 0) log += LogOf::val(n, std::to_string(3 + 8 / double(n)));
  }
  const RunHistory run = read(log);
  const std::string page = report_page(run), many = comparison_page(std::vector<RunHistory>(12, run));
  EXPECT_LT(page.size(), 1000000u);
  EXPECT_LT(many.size(), 2000000u) << "12 such runs";
  const json all = charts(page);
  for (const auto& [chart, value] : {std::pair(0, 77.5), {1, 88.5}}) {
    const json& y = all.at(chart).at("series").at(0).at("y");
    EXPECT_EQ(std::count(y.begin(), y.end(), json(value)), 1) << chart;
  }
  EXPECT_EQ(all.at(0).at("series").at(0).at("k").back(), 288000) << "tokens";
}

// ----------------------------------------------------------------------------
// Sections

// Two wirings, and rope takes half of the FLOPs; two sections, and the second has plain runs only.
TEST_F(Report, MapsOfAccuraciesAreOverWiringsAndSections) {
  const auto run = [&](const std::string& name, const std::string& wiring, int64_t seed, double last) {
    LogOf of;
    of.wiring = wiring, of.seed = seed, of.flops = wiring == "plain" ? 2000 : 1000;
    std::string log = of.head();
    for (int step = 1; step <= 10; step++)
      log += LogOf::steps(step, step) +
             format("{\"step\":%d,\"val_loss\":1,\"val_accuracy\":%g}\n", step, step < 10 ? 0.11 * step : last);
    return write_run(name, log);
  };
  const std::vector<ReportSection> sections = {{"recall",
                                                {},
                                                {run("a", "plain", 1, 1), run("b", "plain", 2, 0.98),
                                                 run("c", "rope", 1, 1), run("d", "rope", 2, 1)}},
                                               {"copy", {}, {run("e", "plain", 1, 0.5)}, {}, "", 0, 0.25}};
  const std::string page = sections_page("probe", sections);
  const auto map = [&](const char* title) {
    const size_t at = page.find(title);
    return page.substr(at, page.find("</table>", at) - at);
  };
  EXPECT_TRUE(has(map("Accuracy after the last update"), "<th>wiring</th><th>recall</th><th>copy</th>"));
  EXPECT_TRUE(has(map("Accuracy after the last update"), "<td>plain</td><td style=\"--share:0.990\">99.0 &#177; "
                                                         "12.7</td><td style=\"--share:0.500\">50.0</td>"))
      << map("Accuracy after the last update");
  EXPECT_TRUE(has(map("Accuracy after the last update"), "<td>rope</td><td style=\"--share:1.000\">100.0 &#177; "
                                                         "0.0</td><td>-</td>"));
  EXPECT_TRUE(has(map("Accuracy at equal FLOPs"), "<td>plain</td><td style=\"--share:0.550\">55.0 &#177; 0.0</td>"))
      << "after 5 of 10 updates " << map("Accuracy at equal FLOPs");
  EXPECT_TRUE(has(map("Accuracy at equal FLOPs"), "<td>chance</td><td>-</td><td style=\"--share:0.250\">25.0</td>"));
  const std::string updates = map("Updates until solved");
  EXPECT_TRUE(has(updates, "<td>plain</td><td>10 (1 of 2)</td><td>&gt; 10 (0 of 1)</td>")) << updates;
  EXPECT_TRUE(has(updates, "<td>rope</td><td>10</td><td>-</td>")) << updates;
  EXPECT_FALSE(has(updates, "<td>chance</td>")) << updates;
  EXPECT_FALSE(has(sections_page("none", {{"recall", {}, {}}}), "Accuracy after the last update"));
  EXPECT_FALSE(has(page, "Hardest level solved"));
}

// Three seeds each: plain solves the task after 2, 6 and 4 updates; rope after 8, one seed of three; gru never.
TEST_F(Report, MedianOfTheUpdatesUntilSolved) {
  std::vector<std::string> folders;
  const auto add = [&](const std::string& wiring, std::vector<int> solved_at) {
    for (int64_t seed = 1; seed <= 3; seed++) {
      LogOf of;
      of.wiring = wiring, of.seed = seed;
      std::string log = of.head();
      for (int step = 2; step <= 10; step += 2)
        log += LogOf::steps(step - 1, step) + format("{\"step\":%d,\"val_loss\":1,\"val_accuracy\":%g}\n", step,
                                                     step == solved_at[size_t(seed - 1)] ? 1 : 0.5);
      folders.push_back(write_run(wiring + std::to_string(seed), log));
    }
  };
  add("plain", {2, 6, 4}), add("rope", {0, 0, 8}), add("vres", {4, 0, 8}), add("gru", {0, 0, 0});
  const std::string page = sections_page("probe", {{"recall", {}, folders}});
  const size_t at = page.find("Updates until solved");
  const std::string map = page.substr(at, page.find("</table>", at) - at);
  EXPECT_TRUE(has(map, "<td>plain</td><td>4</td>")) << map;
  EXPECT_TRUE(has(map, "<td>rope</td><td>&gt; 10 (1 of 3)</td>")) << map;
  EXPECT_TRUE(has(map, "<td>vres</td><td>8 (2 of 3)</td>")) << map;
  EXPECT_TRUE(has(map, "<td>gru</td><td>&gt; 10 (0 of 3)</td>")) << map;
}

// Two seeds each: plain solves level 4 with both and 8 with one; rope solves 8 with one alone; gru solves none.
TEST_F(Report, HardestLevelThatIsSolved) {
  int runs = 0;
  const auto run = [&](const std::string& wiring, int64_t seed, double accuracy) {
    LogOf of;
    of.wiring = wiring, of.seed = seed;
    return write_run(format("run%d", runs++),
                     of.head() + LogOf::steps(1, 10) +
                         format("{\"step\":10,\"val_loss\":1,\"val_accuracy\":%g}\n", accuracy));
  };
  const auto level = [&](int64_t number, std::vector<std::string> folders) {
    return ReportSection{format("recall %d", int(number)), {}, std::move(folders), {}, "recall --pairs", number};
  };
  const std::string page =
      sections_page("probe",
                    {level(8, {run("plain", 1, 1), run("plain", 2, 0.99), run("rope", 1, 1), run("rope", 2, 0.5)}),
                     level(4, {run("plain", 1, 1), run("plain", 2, 1)}),
                     level(2, {run("plain", 1, 1), run("plain", 2, 1), run("gru", 1, 0.5)}),
                     {"copy", {}, {run("gru", 1, 1)}, {}, "copy --length", 16}});
  const size_t at = page.find("Hardest level solved");
  ASSERT_NE(at, std::string::npos);
  const std::string map = page.substr(at, page.find("</table>", at) - at);
  EXPECT_TRUE(has(map, "<th>recall --pairs 8, 4, 2</th><th>copy --length 16</th>")) << map;
  EXPECT_TRUE(has(map, "<td>plain</td><td>4, 8 (1 of 2)</td><td>none</td>")) << map;
  EXPECT_TRUE(has(map, "<td>rope</td><td>8 (1 of 2)</td><td>none</td>")) << map;
  EXPECT_TRUE(has(map, "<td>gru</td><td>none</td><td>16</td>")) << map;
}

// With the line ends and the byte order mark of some editors.
TEST_F(Report, OutlinesMayNameLevels) {
  write_file(in("outline"), "\xEF\xBB\xBF# one\r\nlevel 8 of recall --pairs\r\nrun x\r\n# two\r\nrun y\n");
  const std::vector<ReportSection> sections = read_outline(in("outline"));
  ASSERT_EQ(sections.size(), 2u);
  EXPECT_EQ(sections[0].task, "recall --pairs");
  EXPECT_EQ(sections[0].level, 8);
  EXPECT_EQ(sections[1].task, "");
  write_file(in("outline"), "# one\nlevel of recall\n");
  EXPECT_EQ(error_of([&] { read_outline(in("outline")); }), in("outline") + ":2: `level of recall`: it is `level "
                                                                            "NUMBER of TASK`");
}

TEST_F(Report, OutlinesMaySayWhatAGuessGetsRight) {
  write_file(in("outline"), "# one\nchance 0.125\n# two\n");
  const std::vector<ReportSection> sections = read_outline(in("outline"));
  EXPECT_EQ(sections[0].chance, 0.125);
  EXPECT_TRUE(std::isnan(sections[1].chance));
  for (const char* wrong : {"chance 1.5", "chance -0.1", "chance high", "chance 0.5 %", "chance nan"}) {
    write_file(in("outline"), format("# one\n%s\n", wrong));
    EXPECT_EQ(error_of([&] { read_outline(in("outline")); }),
              in("outline") + ":2: `" + wrong + "`: it is `chance SHARE`, a number from 0 to 1");
  }
}

// 10 steps are not smoothed: the mean is the last loss. 200 and 300 steps have the mean of the last two and three.
TEST_F(Report, SmoothedLossesAreMeansOfAHundredthOfTheRun) {
  for (int64_t steps : {10, 200, 300}) {
    const RunHistory run = read(LogOf().head() + LogOf::steps(1, steps, 9));
    const double mean = 9 - 0.01 * (double(steps) - double(std::max<int64_t>(steps / 100, 1) - 1) / 2);
    const std::string page = report_page(run);
    EXPECT_TRUE(has(page, format("training loss, mean</span><b>%.5f</b>", mean)))
        << steps << "\n"
        << page.substr(page.find("training loss, mean"), 60);
  }
  const std::string huge = LogOf::steps(1, 9) + LogOf::step(10, "1e20", "1e20");
  const std::string page = report_page(read(LogOf().head() + huge + LogOf::steps(11, 300, 9)));
  EXPECT_TRUE(has(page, "training loss, mean</span><b>6.01000</b>")) << "a huge one is left behind";
}

// Two seeds of two wirings, whose losses have been measured by position but for one, and a file that is torn.
TEST_F(Report, LossesByPositionAreMeansOverSeedsAndDifferencesOfPairs) {
  std::vector<std::string> folders;
  for (const char* wiring : {"plain", "sla(3,3)"})
    for (int64_t seed : {1, 2, 3}) {
      LogOf of;
      of.wiring = wiring, of.seed = seed;
      folders.push_back(
          write_run(wiring + std::to_string(seed), of.head() + LogOf::steps(1, 10) + LogOf::val(10, "2.5")));
      // Positions 2 and 3 are one range; position 4 is there for plain alone.
      PositionLosses positions(folders.size() <= 3 ? 4 : 3);
      const double loss = double(seed) * (folders.size() <= 3 ? 1 : 1.5);
      positions.add(1, 4 * loss), positions.add(2, 2 * loss), positions.add(2, 2 * loss), positions.add(3, loss);
      if (positions.counts.size() > 4) positions.add(4, 0.5);
      if (folders.size() != 6) write_file(folders.back() + "/positions.csv", positions_csv(positions));
    }
  const auto at = [](const json& chart, size_t series, const char* xy) { return chart.at("series").at(series).at(xy); };
  const json single = charts(report_page(read_run(folders[0]))).back();
  EXPECT_EQ(single.at("title"), "Loss by position");
  EXPECT_EQ(single.at("logX"), true);
  EXPECT_EQ(at(single, 0, "x"), json({1, 2, 4})) << "the middle of 2 and 3, rounded";
  EXPECT_EQ(at(single, 0, "y"), json({4.0, 1.66667, 0.5}));
  std::vector<RunHistory> runs;
  for (const std::string& folder : folders) runs.push_back(read_run(folder));
  const json all = charts(comparison_page(runs));
  ASSERT_EQ(all.size(), 5u);
  EXPECT_EQ(at(all[3], 0, "y"), json({8.0, 3.33333, 0.5})) << "means of seeds 1, 2 and 3";
  EXPECT_EQ(at(all[3], 1, "y"), json({9.0, 3.75})) << "of seeds 1 and 2, times 1.5";
  ASSERT_EQ(all[4].at("series").size(), 1u);
  EXPECT_EQ(at(all[4], 0, "y"), json({3.0, 1.25})) << "halves of plain's, of seeds 1 and 2";
  EXPECT_EQ(charts(comparison_page({runs[0], runs[5]})).size(), 4u) << "no differences where one has not been measured";
  const std::string path = folders[5] + "/positions.csv", head = "position,tokens,loss\n";
  for (const auto& [csv, line] : {std::pair(head + "1,2,3.5\n2,", 3),
                                  {head + "2,1,3\n2,1,3\n", 3},
                                  {head + "0,1,3\n", 2},
                                  {head + "1,0,3\n", 2},
                                  {head + "1,1,3 4\n", 2},
                                  {std::string("1,1,3\n"), 1},
                                  {head + "99999999,1,3\n", 2}}) {
    write_file(path, csv);
    EXPECT_ERROR(read_run(folders[5]), format("positions.csv:%d: is not a line of losses by position", line).c_str());
  }
}

TEST_F(Report, ShowsCyclesByPositionWhereTheyWereMeasured) {
  const std::string run = write_run("halts", LogOf().head() + LogOf::steps(1, 10));
  PositionLosses positions(3);
  positions.add(1, 4, 2.5), positions.add(2, 3, 2), positions.add(2, 3, 3), positions.add(3, 3, 4);
  const std::string csv = positions_csv(positions);
  EXPECT_EQ(csv, "position,tokens,loss,ponder\n1,1,4,2.5\n2,2,3,2.5\n3,1,3,4\n");
  write_file(run + "/positions.csv", csv);
  json all = charts(report_page(read_run(run)));
  EXPECT_EQ(all.back().at("title"), "Cycles that tokens run, by position");
  EXPECT_EQ(all.back().at("series").at(0).at("y"), json({2.5, 3})) << "of position 1, and of 2 to 3";
  EXPECT_ERROR(parse_positions("p.csv", "position,tokens,loss,ponder\n1,2,3\n"), "it has not four numbers");
  EXPECT_ERROR(parse_positions("p.csv", "position,tokens,loss\n1,2,3,4\n"), "it has not three numbers");
  positions = PositionLosses(3);
  positions.add(1, 4);
  write_file(run + "/positions.csv", positions_csv(positions));
  EXPECT_EQ(read_file(run + "/positions.csv"), "position,tokens,loss\n1,1,4\n");
  all = charts(report_page(read_run(run)));
  EXPECT_EQ(all.back().at("title"), "Loss by position");
}

// Positions 4 to 7 are a range; in a run with a context of 6, positions 4 to 6.
TEST_F(Report, LossesOfDifferentPositionsAreNotCompared) {
  std::vector<RunHistory> runs;
  for (const auto& [wiring, context] : {std::pair("plain", 7), {"rope", 6}}) {
    PositionLosses positions(context);
    for (int64_t position = 1; position <= context; position++) positions.add(position, double(context));
    read_finished(wiring, 1, "2.5");
    const std::string run = in(wiring + std::string("1"));
    write_file(run + "/positions.csv", positions_csv(positions));
    runs.push_back(read_run(run));
  }
  const json differences = charts(comparison_page(runs)).back().at("series").at(0);
  EXPECT_EQ(differences.at("x"), json({1, 2}));
  EXPECT_EQ(differences.at("y"), json({-1.0, -1.0}));
}

// Sections of one page; no run of the second has begun.
TEST_F(Report, SectionsHaveTheirOwnTablesAndCharts) {
  LogOf second;
  second.seed = 2;
  const std::string rest = LogOf::steps(1, 10) + LogOf::val(10, "2.5"), a = write_run("a", LogOf().head() + rest),
                    b = write_run("b", second.head() + rest);
  write_file(in("outline"), "# First <table>\n\nWhat it is.\nrun " + a + "\nrun " + b + "\n# Second\nrun " +
                                in("none") + "\n# Third\nrun " + b + "\nrun " + in("none") + "\n");
  const Outcome o = run("./report --outline " + in("outline") + " -o " + in("paper.html"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const std::string page = read_file(in("paper.html"));
  EXPECT_TRUE(has(page, "<h2>First &lt;table&gt;</h2>\n<p>What it is.</p>\n<p>Means"));
  EXPECT_TRUE(has(page, "<h2>Second</h2>\n<p class=\"warn\">None of these runs has begun.</p>\n<h2>Third</h2>\n<p "
                        "class=\"warn\">" +
                            in("none") + " has not begun, and is left out.</p>\n<div class=\"wide\">"));
  EXPECT_TRUE(has(o.err, "warning: Third: " + in("none") + " has not begun")) << o.err;
  std::vector<std::string> places;
  for (const json& chart : charts(page)) places.push_back(chart.at("place"));
  EXPECT_EQ(places, (std::vector<std::string>{"charts-0", "charts-0", "charts-0", "charts-2", "charts-2", "charts-2"}));
  write_file(in("outline"), "\nrun " + a + "\n");
  EXPECT_ERROR(read_outline(in("outline")), "outline:2: a title, `# TITLE`, must come first");
}

// What a publication found stands in the row of the runs that differ by seed alone, in the section that says so.
TEST_F(Report, PublishedDifferencesStandBesideOurs) {
  std::string runs_of[2];
  for (int wiring = 0; wiring < 2; wiring++)
    for (int seed = 1; seed <= 2; seed++) {
      LogOf log;
      log.seed = seed, log.wiring = wiring == 0 ? "plain" : "sla(1,1)";
      const std::string rest = LogOf::steps(1, 10) + LogOf::val(10, wiring == 0 ? "2.5" : "2.4");
      runs_of[wiring] += "run " + write_run(format("%d-%d", wiring, seed), log.head() + rest) + "\n";
    }
  write_file(in("outline"), "# One\n" + runs_of[0] + runs_of[1] + "published -0.1329 <a run>\n# Two\n" + runs_of[0]);
  const Outcome o = run("./report --outline " + in("outline") + " -o " + in("page.html"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const std::string page = read_file(in("page.html"));
  const size_t second = page.find("<h2>Two"), row = page.find("sla(1,1)", page.find("difference, published"));
  EXPECT_LT(row, page.find("-0.1329 &lt;a run&gt;</td></tr>", row));
  EXPECT_LT(page.find("-0.1329 &lt;a run&gt;</td></tr>", row), page.find("</tr>", row)) << "in the same row";
  EXPECT_EQ(page.find("published", second), std::string::npos);
  write_file(in("outline"), "# One\npublished 1\n");
  EXPECT_ERROR(read_outline(in("outline")), "outline:2: `published` says something of the run before it");
}

// ----------------------------------------------------------------------------
// The picture of a wiring

TEST(WiringPicture, ShowsEachKindOfHeadAndExplainsIt) {
  struct Case {
    const char* wiring;
    std::vector<const char*> words;
  };
  const auto cells = [](const std::string& svg) {  // the texts of the cells, rows from the top
    std::string texts;
    for (size_t at = 0; (at = svg.find("text-anchor=\"middle\"", at)) != std::string::npos;) {
      at = svg.find('>', at) + 1;
      texts += svg.substr(at, svg.find('<', at) - at) + " ";
    }
    return texts;
  };
  for (const Case& c : {Case{"plain", {"that its own layer projects"}},
                        {"sla(2,1)", {"layers above use it too", "projects none"}},
                        {"also(2,1)", {"in one softmax"}},
                        {"sla(2,1,v)", {"layers above use it too", "projects none", "keys above, values below"}},
                        {"gqa(1) window(8)", {"1 K/V heads per layer", "does not see all", "keys: last 8"}},
                        {"reuse(2)", {"attention map of the layer named"}},
                        {"topk(3)", {"the 3 with the highest scores"}},
                        {"blend(0.25)", {"mixed with 0.25 of the one below"}},
                        {"gate", {"a share that is learned"}},
                        {"rope", {"q and k are rotated"}},
                        {"relative", {"by the distance of query and key"}},
                        {"universal(1)", {"layer l has the parameters of layer l mod 1"}},
                        {"documents", {"only keys of its own document"}},
                        {"rmsnorm", {"without mean and bias"}},
                        {"qknorm", {"divided by their root mean square"}},
                        {"vres", {"its own and the first layer's"}},
                        {"route(0.3)", {"of a lower layer with probability 0.3"}},
                        {"router", {"with weights that are learned, of all K/V heads"}},
                        {"depth", {"by the attention of the token's query"}},
                        {"dense", {"the outputs of all layers below, in learned shares"}},
                        {"relu2", {"MLPs: ReLU squared"}},
                        {"silu", {"MLPs: SiLU"}},
                        {"alibi", {"scores fall with the distance"}},
                        {"sinks", {"a learned score for none of them"}},
                        {"softcap(15)", {"logits: capped at 15"}},
                        {"swiglu(80)", {"MLPs: SwiGLU of 80 hidden units"}},
                        {"untied", {"output head: a weight of its own"}},
                        {"gru", {"branches join it in gates"}},
                        {"universal(1) act(0.1)", {"probabilities reach 1 - 0.1"}}}) {
    const std::string svg = wiring_picture(parse_wiring(c.wiring), 3, 2, "w");
    for (const char* words : c.words)
      EXPECT_NE(svg.find(words), std::string::npos) << c.wiring << ": " << words << "\n" << svg;
  }
  EXPECT_EQ(cells(wiring_picture(parse_wiring("sla(2,1)"), 3, 2, "w")), "2 0 1 1 0 0 ");
  EXPECT_EQ(cells(wiring_picture(parse_wiring("sla(2,1,v)"), 3, 2, "w")), "2 2 0 1 1 0 0 ");
  EXPECT_EQ(cells(wiring_picture(parse_wiring("sla(1,1,k)"), 3, 2, "w")), "2 1 2 1 0 1 0 0 ");
  EXPECT_EQ(cells(wiring_picture(parse_wiring("also(1,1)"), 3, 2, "w")), "2 1+2 1 0+1 0 0 ");
  EXPECT_EQ(cells(wiring_picture(parse_wiring("reuse(2)"), 3, 2, "w")), "2 2 0 0 0 0 ");
  EXPECT_EQ(wiring_picture(parse_wiring("plain"), 3, 2, "w").find("projects none"), std::string::npos) << "only what "
                                                                                                          "occurs";
}

// ----------------------------------------------------------------------------
// Writing

// A process that rewrites a page all the time, with one text and another, is killed at random moments.
TEST_F(Report, KilledWhileItIsWrittenIsTheOldOneOrTheNew) {
  const std::string path = in("report.html"), a(300000, 'a'), b(500000, 'b');
  write_file_durably(path, a);
  int old_ones = 0, new_ones = 0;
  for (int i = 0; i < 60; i++) {
    const pid_t child = fork();
    if (child == 0)
      for (bool next = true;; next = !next) write_file_durably(path, next ? b : a);
    usleep(useconds_t(500 + i * 733 % 9000));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const std::string found = read_file(path);
    ASSERT_TRUE(found == a || found == b) << "kill " << i << ": " << found.size() << " bytes";
    (found == a ? old_ones : new_ones)++;
  }
  EXPECT_GT(old_ones, 0);
  EXPECT_GT(new_ones, 0);
  write_file_durably(path, a);
  EXPECT_EQ(names_in(folder), std::set<std::string>{"report.html"}) << "nothing is left of those that were killed";
}

// ----------------------------------------------------------------------------
// Pages of trained runs, and the program

class TrainedReport : public BrowserTest {
 protected:
  const std::string options = trainer + "-i " + in("tokens.bin") + " -j " + in("tokens.bin") +
                              " --layers 4 --heads 4 --channels 32 --vocab-size 257 --max-seq-len 32 -t 32 -b 2 -l "
                              "1e-3 -v 10 -m 2 -s 20 -g 24 ";

  void SetUp() override {
    BrowserTest::SetUp();
    write_file(in("tokens.bin"), shard_bytes(20000));
  }
  void train(const std::string& out, const std::string& more) const {
    const Outcome o = run(options + more + " -o " + in(out));
    ASSERT_EQ(o.exit_status, 0) << o.err;
    EXPECT_EQ(o.err, "");
    page_of(in(out));
  }
};
using LongTrainedReport = TrainedReport;

// The other tests read a page as report.cpp writes it; here a browser runs its scripts and draws.
TEST_F(LongTrainedReport, IsDrawnByABrowserWithoutAnError) {
  ASSERT_NO_FATAL_FAILURE(train("sla", "-x 240 --seed 5"));
  const OpenedPage page = open(in("sla/report.html"));
  EXPECT_EQ(page.console, "");
  EXPECT_EQ(attribute(page, "data-charts"), "5");
  EXPECT_EQ(attribute(page, "data-series"), "10") << "three losses, the learning rate, and norm, speed and share with "
                                                     "their means";
  for (const char* part :
       {"<h2>Wiring</h2>", "sla(3,3)", "<h2>Memory</h2>", "activations", "after step 240", "<h2>Machine</h2>",
        "GFLOP/s a rank", "seed = 5", "Permission is hereby granted", "240 of 240"})
    EXPECT_NE(page.dom.find(part), std::string::npos) << part;
  // The page, and the curves of the gradient's norm and of the learning rate, in the colours of report.css.
  const std::vector<int> light = pixels(in("sla/report.html"), false, {"#ffffff", "#8250df", "#1a7f37"});
  const std::vector<int> dark = pixels(in("sla/report.html"), true, {"#0d1117", "#ab7df8", "#3fb950"});
  for (const std::vector<int>& found : {light, dark}) {
    EXPECT_GT(found[0], 100000);
    EXPECT_GT(found[1], 100);
    EXPECT_GT(found[2], 100);
  }
}

TEST_F(TrainedReport, OfSeveralRunsIsDrawnWithAllSeries) {
  ASSERT_NO_FATAL_FAILURE(train("plain", "--wiring plain -x 20"));
  train("short", "--wiring 'gqa(2)' -x 10 --seed 2");
  train("long", "--wiring 'gqa(2)' -x 40 -y");
  for (const char* measured : {"plain", "long"})
    write_file(in(measured) + std::string("/positions.csv"), "position,tokens,loss\n1,2,5\n2,2,4.5\n32,1,4\n");
  const Outcome o =
      run("./report " + in("plain") + " " + in("short") + " " + in("long") + "/ -o " + in("compare.html"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const OpenedPage page = open(in("compare.html"));
  EXPECT_EQ(page.console, "");
  EXPECT_EQ(attribute(page, "data-charts"), "5");
  EXPECT_EQ(attribute(page, "data-series"), "12") << "three runs in each of two charts, three kinds in the third, two "
                                                     "of them by position, and a difference";
  EXPECT_NE(page.dom.find("different lengths"), std::string::npos);
  write_file(in("outline"), "# One\nrun " + in("plain") + "\nrun " + in("long") + "\n# Two\nrun " + in("short") + "\n");
  ASSERT_EQ(run("./report --outline " + in("outline") + " -o " + in("sections.html")).exit_status, 0);
  const OpenedPage sections = open(in("sections.html"));
  EXPECT_EQ(sections.console, "");
  EXPECT_EQ(attribute(sections, "data-series"), "12") << "nine of two runs, and three of one";
  ASSERT_NO_FATAL_FAILURE(train("other", "--wiring plain -x 20 --seed 2"));
  ASSERT_EQ(run("./report " + in("plain") + " " + in("other") + " -o " + in("seeds.html")).exit_status, 0);
  const OpenedPage seeds = open(in("seeds.html"));
  EXPECT_EQ(seeds.console, "");
  EXPECT_EQ(attribute(seeds, "data-series"), "4") << "a mean in each of two charts, beside its band; K/V; positions";
  // The band, as 40/255 of the first colour on the panel's, however that is rounded.
  const std::vector<int> band = pixels(in("seeds.html"), false, {"#d0e1f4", "#d0e1f5", "#d1e1f5", "#d1e2f5"});
  EXPECT_GT(std::accumulate(band.begin(), band.end(), 0), 500);
}

// Until the run has ended by a signal.
TEST_F(Report, IsWrittenAgainWhileARunTrains) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string page = in("out/report.html");
  const Outcome o = run(trainer + "-i " + in("tokens.bin") +
                        " --layers 2 --heads 2 --channels 16 --vocab-size 257 --max-seq-len 16 "
                        "-t 16 -b 1 -k constant -x 1000000 -o " +
                        in("out") + " >" + in("trained") + " & run=$!\n" + "until [ -e " + in("out/log.jsonl") +
                        " ]; do sleep 0.01; done\n" + "timeout 60 ./report --watch " + in("out") + " & watch=$!\n" +
                        "until grep -qs '[2-9][0-9] of 1000000' " + page +
                        "; do kill -0 $run $watch || exit 9; sleep 0.01; done\nkill -TERM $run; wait $run; wait "
                        "$watch");
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_GE(count(o.out, "wrote " + page + "\n"), 2u) << o.out;
  const int64_t last = steps_of(read_log(in("out"))).back().at("step");
  EXPECT_TRUE(has(read_file(page), format("<b>%lld of 1000000</b>", (long long)last))) << "the page of the end";
  for (const std::string& name : names_in(in("out"))) EXPECT_FALSE(is_unfinished_output(name)) << name;
  const json description = read_log(in("out")).at(0).at("run");
  const double copy = description.at("memory").at("copy for checkpoints");
  EXPECT_TRUE(has(read_file(in("trained")), "copy for checkpoints " + format("%16s", bytes_text(copy).c_str())))
      << copy;
  EXPECT_EQ(description.at("memory").at("tokens of two updates"), 4 * 4 * 16);
}

TEST_F(Report, TheProgramRefusesWhatItCannotDo) {
  const std::string a = write_run("a", LogOf().head());
  const auto expect_error = [&](const std::string& arguments, const char* part) {
    const Outcome o = run("./report " + arguments);
    EXPECT_EQ(o.exit_status, 1) << arguments;
    EXPECT_EQ(o.err.compare(0, 7, "error: "), 0) << o.err;
    EXPECT_TRUE(has(o.err, part)) << o.err;
  };
  expect_error(a + " " + a, "2 runs: name the page that compares them, with -o");
  expect_error(in("nothing"), "nothing/log.jsonl: cannot be read: No such file or directory; name the folder of a run");
  expect_error("", "name the folders of runs, or an --outline");
  expect_error(a + " --outline x", "name the folders of runs, or an --outline");
  expect_error("--outline x", "--outline: name the page, with -o");
  expect_error(a + " -o " + in("nowhere/page.html"), "nowhere/page.html: cannot be written");
  expect_error(a + " --watch --tensorboard", "exclude each other");
  expect_error(a + " --suggest-wiring -o x", "--suggest-wiring: prints, and writes no file");
  for (const char* option : {" --tensorboard", " --suggest-wiring"})
    expect_error(a + " " + a + option, "are of one run; name one folder");
  EXPECT_EQ(names_in(folder).count("nowhere"), 0u);
  const Outcome o = run("./report " + a);
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_TRUE(has(read_file(a + "/report.html"), "not finished: 0 of 10 steps"));
}

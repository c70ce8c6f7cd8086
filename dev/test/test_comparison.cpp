// Runs side by side: the statistics over seeds, the page, and what is said of runs that cannot be compared. Runs from
// the repository's root, where the trainer and `report` are.
#include <gtest/gtest.h>
#include "helpers.h"
#include "llmc/report/statistics.h"
#include "report_test.h"

// ----------------------------------------------------------------------------
// Statistics

// Percentiles of Student's t, as in every table.
TEST(Statistics, HaveThePercentilesOfStudentsTables) {
  const std::pair<double, double> table[] = {{1, 12.7062}, {2, 4.30265},  {4, 2.77645},
                                             {9, 2.26216}, {30, 2.04227}, {1000, 1.96234}};
  for (const auto& [freedom, t] : table) {
    EXPECT_NEAR(t_of(0.05, freedom), t, 1e-5 * t) << freedom;
    EXPECT_NEAR(two_sided_p(t, freedom), 0.05, 1e-6) << freedom;
  }
  EXPECT_DOUBLE_EQ(two_sided_p(0, 5), 1);
  EXPECT_NEAR(two_sided_p(-4.0621277, 9), 0.002832890, 1e-8);
}

// Student's own example (1908), the hours of sleep that two drugs give ten patients: t = -4.0621, p = 0.002833, 95 %
// interval -2.4599 to -0.7001.
TEST(Statistics, OfPairsAreThoseOfStudentsSleepData) {
  const Estimate e = estimate({-1.2, -2.4, -1.3, -1.3, 0.0, -1.0, -1.8, -0.8, -4.6, -1.4});
  EXPECT_NEAR(e.mean, -1.58, 1e-12);
  EXPECT_NEAR(e.mean - e.interval, -2.4598858, 1e-6);
  EXPECT_NEAR(e.mean + e.interval, -0.7001142, 1e-6);
  EXPECT_NEAR(e.p, 0.002833, 1e-6);
  EXPECT_TRUE(std::isnan(estimate({1.5}).interval)) << "one value says nothing of the spread";
  EXPECT_EQ(estimate({1.5}).mean, 1.5);
  EXPECT_TRUE(std::isnan(estimate({}).mean));
}

// If values do not vary, any mean but 0 is certain.
TEST(Statistics, OfEqualValuesAreCertain) {
  EXPECT_EQ(estimate({0.5, 0.5}).p, 0);
  EXPECT_EQ(estimate({0, 0, 0}).p, 1);
  EXPECT_EQ(estimate({0.5, 0.5}).interval, 0);
}

// Sample sizes of paired t-tests at a power of 0.8, as programs for them and tables have, for effects of 0.5, 0.8, 1
// and 2 deviations.
TEST(Statistics, PairsNeededAreThoseOfPowerTables) {
  for (const auto& [effect, pairs] : {std::pair(0.5, 34), {0.8, 15}, {1.0, 10}, {2.0, 5}})
    EXPECT_EQ(pairs_needed(effect * 0.03, 0.03), pairs) << effect;
  EXPECT_EQ(pairs_needed(-0.03, 0.03), 10) << "the sign does not matter";
  EXPECT_EQ(pairs_needed(1e-6, 1), 0);
  EXPECT_EQ(pairs_needed(0, 1), 0);
  EXPECT_EQ(pairs_needed(1, 0), 2);
}

TEST(Statistics, MediansAreMiddleValues) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 2, 3}), 2.5);
  EXPECT_TRUE(std::isnan(median({})));
  EXPECT_TRUE(std::isnan(median({1, NAN, 2})));
}

// The example of Kaplan and Meier (1958): deaths at 0.8, 3.1, 5.4 and 9.2, losses at 1.0, 2.7, 7.0 and 12.1.
// The shares that survive are 7/8, 7/8 * 4/5 = 0.7, 0.7 * 3/4 = 0.525, 0.525 / 2 = 0.2625.
TEST(Statistics, KaplanMeierMediansCountThoseWatchedInVain) {
  std::vector<Watched> watched = {{0.8, true},  {3.1, true},  {5.4, true},  {9.2, true},
                                  {1.0, false}, {2.7, false}, {7.0, false}, {12.1, false}};
  EXPECT_EQ(kaplan_meier_median(watched), 9.2);
  watched[3].happened = false;
  EXPECT_EQ(kaplan_meier_median(watched), INFINITY);
  EXPECT_EQ(kaplan_meier_median({{2, false}, {2, true}, {3, false}}), INFINITY) << "what is lost at a time was watched "
                                                                                   "until then";
  EXPECT_EQ(kaplan_meier_median({{1, true}, {2, true}, {3, false}, {3, false}}), 2);
  EXPECT_EQ(kaplan_meier_median({}), INFINITY);
}

// Holm's own rule: the smallest of three times 3, the next times 2.
TEST(Statistics, HolmsPsCountTheTestsThatAreLeft) {
  EXPECT_EQ(holm({0.04, 0.01, 0.5}), (std::vector<double>{0.08, 0.03, 0.5}));
  EXPECT_EQ(holm({0.03, 0.02, 0.02}), (std::vector<double>{0.06, 0.06, 0.06})) << "none is below that of a smaller one";
  EXPECT_EQ(holm({0.7, 0.6}), (std::vector<double>{1, 1}));
  EXPECT_TRUE(holm({}).empty());
}

// ----------------------------------------------------------------------------
// Pages

// Three seeds of two wirings. The paired differences are -0.1, -0.2 and -0.3, whose mean is -0.2 with an interval of
// 4.30265 * 0.1 / sqrt(3) = 0.24842, t = -3.4641 and p = 0.0742; the means of the kinds are 2.5 and 2.3, each
// +- 4.30265 * s / sqrt(3).
TEST_F(Report, OverSeedsHasMeansIntervalsAndAPairedTest) {
  std::vector<RunHistory> runs;
  auto add = [&](const std::string& wiring, int64_t seed, const char* loss, int64_t steps = 10) {
    LogOf of;
    of.wiring = wiring, of.seed = seed, of.kv_bytes = wiring == "plain" ? 512 : 256;
    runs.push_back(read_run(
        write_run(wiring + std::to_string(seed), of.head() + LogOf::steps(1, steps) + LogOf::val(steps, loss))));
  };
  add("plain", 1, "2.4"), add("plain", 2, "2.5"), add("plain", 3, "2.6");
  add("sla(3,3)", 3, "2.3"), add("sla(3,3)", 1, "2.3"), add("sla(3,3)", 2, "2.3");
  add("sla(3,3)", 4, "1.1", 5);
  const std::string page = comparison_page(runs);
  EXPECT_TRUE(has(page, "<tr><td>plain</td><td>3</td><td>2.50000 &#177; 0.24841</td><td></td>"))
      << page.substr(page.find("Over seeds"), 1200);
  EXPECT_TRUE(has(page, "<tr><td>sla(3,3)</td><td>3</td><td>2.30000 &#177; 0.00000</td><td>-0.20000 &#177; "
                        "0.24841</td><td>3</td><td>0.0742</td>"
                        "<td>1.00</td><td>50.0 %</td><td>no difference is shown: 0 lies in the interval; if it is as "
                        "large as it looks, it takes 5 "
                        "seeds</td>"))
      << page.substr(page.find("Over seeds"), 1200);
  EXPECT_TRUE(has(page, "a standard deviation of 0.1000 nats (of all rows together). To find a true difference with p "
                        "&lt; 0.05 in four of five "
                        "experiments takes 787 pairs for 0.01 nats, 34 pairs for 0.05, 7 pairs for 0.133, the largest"))
      << page.substr(page.find("From seed"), 400);
  EXPECT_TRUE(has(page, "<td>3</td><td>2.30000</td><td>-0.30000</td>")) << "less plain's of the same seed";
  EXPECT_TRUE(has(page, "<td>4</td><td>1.10000</td><td>-</td>")) << "plain has no seed 4";
  EXPECT_TRUE(has(page, "<td>5 of 10</td>"));
  EXPECT_TRUE(has(page, "not finished: 5 of 10 steps"));
  runs.erase(runs.begin() + 1, runs.begin() + 3);
  EXPECT_TRUE(has(comparison_page(runs), "<td>-0.10000</td><td>1</td><td>-</td><td>1.00</td><td>50.0 %</td><td>one "
                                         "pair shows nothing about other seeds</td>"));
  EXPECT_FALSE(has(comparison_page({runs[0], runs[1]}), "Over seeds"));
}

// The differences of gqa(2) are -0.1 and -0.1, of rope 0.1 and -0.1, and of gate 0.1 alone: from seed to seed they vary
// with a deviation of 0 and of 0.1414, together sqrt(0.02 / 2).
TEST_F(Report, OverSeedsSaysWhatAnySpreadShows) {
  const std::string page = comparison_page({read_finished("plain", 1, "2.5"), read_finished("plain", 2, "2.5"),
                                            read_finished("gqa(2)", 1, "2.4", "2000"),
                                            read_finished("gqa(2)", 2, "2.4", "2000"), read_finished("rope", 1, "2.6"),
                                            read_finished("rope", 2, "2.4"), read_finished("gate", 1, "2.6", "400")});
  EXPECT_TRUE(has(page, "<td>-0.10000 &#177; 0.00000</td><td>2</td><td>0</td><td>2.50</td><td>100.0 %</td>"
                        "<td>lower</td>"))
      << page.substr(page.find("Over seeds"), 1200);
  EXPECT_TRUE(has(page, "<td>no difference is shown: 0 lies in the interval</td>")) << "no number of seeds will do";
  EXPECT_TRUE(has(page, "<td>+0.10000</td><td>1</td><td>-</td><td>0.50</td><td>100.0 %</td>"));
  EXPECT_TRUE(has(page, "vary with a standard deviation of 0.1000 nats")) << page.substr(page.find("From seed"), 400);
}

// Another learning rate is another kind of run, and the label says it.
TEST_F(Report, RunsThatDifferByMoreThanTheirSeedAreNotAveraged) {
  std::string other = LogOf().head();
  other.replace(other.find("0.001"), 5, "0.002");
  const std::string rest = LogOf::steps(1, 10) + LogOf::val(10, "2.5");
  LogOf second;
  second.seed = 2;
  const std::string page =
      comparison_page({read_run(write_run("a", LogOf().head() + rest)), read_run(write_run("b", second.head() + rest)),
                       read_run(write_run("c", other + rest))});
  EXPECT_TRUE(has(page, "<tr><td>plain, learning_rate 0.001</td><td>2</td>"))
      << page.substr(page.find("Over seeds"), 1200);
  EXPECT_TRUE(has(page, "<tr><td>plain, learning_rate 0.002</td><td>1</td>"));
}

// The names of the files are two; the checksums say whether what is in them is.
TEST_F(Report, TheSameDataByAnotherNameAreTheSame) {
  std::vector<RunHistory> runs;
  for (int64_t seed : {1, 2, 3}) {
    LogOf of;
    of.seed = seed;
    of.more = format(R"(,"train_data":"%s","val_data":"b","train_checksum":"%s","val_checksum":"0b")",
                     seed == 1 ? "a_*" : "a_0", seed == 3 ? "0c" : "0a");
    runs.push_back(finished_with(format("run%lld", (long long)seed), of, "2.5"));
  }
  const std::string page = comparison_page(runs);
  EXPECT_TRUE(has(page, "<tr><td>plain, train_checksum 0a, train_data a_*</td><td>2</td>"))
      << page.substr(page.find("Over seeds"), 1200);
  EXPECT_TRUE(has(page, "<tr><td>plain, train_checksum 0c, train_data a_0</td><td>1</td>"));
}

TEST_F(Report, ASeedThatOccursTwiceIsSaid) {
  const RunHistory first = read_finished("plain", 1, "2.5"), second = read_finished("plain", 2, "2.6");
  const RunHistory again = finished_with("again", LogOf(), "9");
  std::vector<std::string> warnings;
  EXPECT_TRUE(has(comparison_page({first, again, second}, &warnings), "<td>2</td><td>2.55000 &#177; "));
  EXPECT_EQ(warnings, std::vector<std::string>{"again: another run of seed 1 differs in nothing; means over seeds have "
                                               "the first of them that is finished."});
  warnings.clear();
  comparison_page({first, second}, &warnings);
  EXPECT_TRUE(warnings.empty());
}

TEST_F(Report, OfRunsOfDifferentLengthsHasEachToItsEnd) {
  LogOf longer;
  longer.planned = 40;
  const RunHistory a = read_run(write_run("x/run", LogOf().head() + LogOf::steps(1, 10) + LogOf::val(10, "2.5"))),
                   b = read_run(write_run("y/run", longer.head() + LogOf::steps(1, 40) + LogOf::val(40, "2.25")));
  const std::string page = comparison_page({a, b});
  EXPECT_TRUE(has(page, "The runs have different lengths"));
  EXPECT_TRUE(has(page, "<td>2.25000</td><td>-0.25000</td>"));
  const json train = charts(page).at(1).at("series");
  EXPECT_EQ(train.at(0).at("s").back(), 10);
  EXPECT_EQ(train.at(1).at("s").back(), 40);
  EXPECT_EQ(train.at(0).at("name"), "plain, steps 10");
  EXPECT_TRUE(has(page, "</span>" + in("x/run") + "</td>")) << "both folders are called run";
  EXPECT_TRUE(has(page, "</span>" + in("y/run") + "</td>"));
  EXPECT_EQ(charts(page).at(0).at("lastHalf"), false) << "the shorter one is not in it";
  EXPECT_EQ(charts(comparison_page({a, a})).at(0).at("lastHalf"), true);
}

// What the second run's description has in place of the first one's, and whether validation reads the same.
TEST_F(Report, LossesOnOtherValidationDataAreNotCompared) {
  const std::string before = R"(,"val_checksum":"aa","val_batches":20,"micro_batch":2,"seq_len":8,"ranks":1)";
  const auto page_of = [&](const std::string& wiring, std::string now, const std::string& old,
                           std::vector<std::string>* warnings) {
    std::vector<RunHistory> runs;
    for (bool other : {false, true})
      for (int64_t seed : {1, 2}) {
        LogOf of;
        of.seed = seed, of.wiring = other ? wiring : "plain", of.more = other ? now : old;
        runs.push_back(finished_with(format("%d-%d", int(other), int(seed)), of, other ? "2.4" : "2.5"));
      }
    return comparison_page(runs, warnings);
  };
  const auto with = [](std::string text, const std::string& from, const std::string& to) {
    return text.replace(text.find(from), from.size(), to);
  };
  const std::string all = with(before, "20", "0");
  struct Case {
    std::string wiring, now, old, said;  // said: "" if they can be compared
  };
  for (const Case& c : {Case{"rope", before, before, ""},
                        {"rope", with(before, "aa", "bb"), before, "other data (-j)"},
                        {"rope", with(before, "aa", ""), before, ""},
                        {"rope", with(before, "20", "4"), before, "-m 4 in place of 20"},
                        {"rope", all, before, "-m 0 in place of 20"},
                        {"rope", with(before, ":2,", ":4,"), before, "-b 4 in place of 2"},
                        {"rope", with(all, ":2,", ":4,"), all, ""},
                        {"rope", with(before, ":8,", ":16,"), before, "-t 16 in place of 8"},
                        {"rope", with(before, "ranks\":1", "ranks\":2"), before, ""},
                        {"memory(8) rope", before, before, "other places, for `memory` reads streams"},
                        {"memory(8) rope", all, all, ""}}) {
    std::vector<std::string> warnings;
    const std::string page = page_of(c.wiring, c.now, c.old, &warnings);
    const std::string what = c.wiring + c.now + " after " + c.old;
    EXPECT_EQ(warnings.size(), c.said.empty() ? 0u : 1u) << what;
    EXPECT_EQ(has(page, "class=\"warn\">" + c.wiring), !c.said.empty()) << what;
    EXPECT_TRUE(has(page, c.said.empty() ? "<td>-0.10000 &#177; 0.00000</td><td>2</td>"
                                         : "validation does not read what that of the first runs does (" + c.said +
                                               "): losses cannot be compared, and no difference is tested."))
        << what;
    EXPECT_EQ(has(page, "<td>not compared: other validation data</td>"), !c.said.empty()) << what;
    EXPECT_EQ(has(page, "-0.10000"), c.said.empty()) << what << ": neither by pairs nor by runs";
  }
}

TEST_F(Report, WhatCannotBeComparedIsSaidOnTheTerminal) {
  LogOf a, b;
  a.more = R"(,"val_checksum":"aa")", b.more = R"(,"val_checksum":"bb")";
  finished_with("a", a, "2.5"), finished_with("b", b, "2.5");
  write_file(in("outline"), "# One\nrun " + in("a") + "\nrun " + in("b") + "\n");
  for (const std::string& arguments : {in("a") + " " + in("b"), "--outline " + in("outline")}) {
    const Outcome o = run("./report " + arguments + " -o " + in("page.html"));
    EXPECT_EQ(o.exit_status, 0);
    EXPECT_TRUE(begins_with(o.err, "warning: ") && has(o.err, "validation does not read")) << o.err;
    EXPECT_EQ(count(read_file(in("page.html")), "<p class=\"warn\">"), 1u);
  }
}

TEST_F(Report, OtherVocabulariesAndTrainingDataAreSaid) {
  const auto warnings_of = [&](const std::string& now) {
    LogOf a, b;
    a.more = R"(,"val_checksum":"aa","vocab_size":257,"train_checksum":"cc")", b.more = now;
    std::vector<std::string> warnings;
    const std::vector<RunHistory> runs = {finished_with("a", a, "2.5"), finished_with("b", b, "2.4")};
    EXPECT_TRUE(has(comparison_page(runs, &warnings), "wiring"));
    std::string all;
    for (const std::string& line : warnings) all += line + "\n";
    return all;
  };
  const std::string vocabulary = "losses in nats per token cannot be compared; bits per byte can";
  EXPECT_TRUE(has(warnings_of(R"(,"val_checksum":"bb","vocab_size":50257,"train_checksum":"cc")"), vocabulary));
  EXPECT_TRUE(has(warnings_of(R"(,"vocab_size":50257)"), vocabulary)) << "nothing says that the tokens are the same";
  EXPECT_EQ(warnings_of(R"(,"val_checksum":"aa","vocab_size":320,"train_checksum":"cc")"), "") << "a padded vocabulary";
  EXPECT_TRUE(has(warnings_of(R"(,"val_checksum":"aa","vocab_size":257,"train_checksum":"dd")"), "trained on other "
                                                                                                 "data (-i) than the "
                                                                                                 "first runs: training "
                                                                                                 "losses cannot be "
                                                                                                 "compared"));
}

// A log from before there was dropout is of a run without it.
TEST_F(Report, OptionsThatAnOlderLogDoesNotKnowHadTheirDefaults) {
  std::vector<RunHistory> runs;
  for (const char* more : {"", R"(,"dropout":0.3)", R"(,"dropout":0.0)"}) {
    LogOf of;
    of.seed = int64_t(runs.size()) + 1, of.more = more;
    runs.push_back(finished_with(format("%zu", runs.size()), of, "2.5"));
  }
  const std::string page = comparison_page(runs);
  EXPECT_TRUE(has(page, "<tr><td>plain, dropout 0.0</td><td>2</td>")) << page.substr(page.find("Over seeds"), 1200);
  EXPECT_TRUE(has(page, "<tr><td>plain, dropout 0.3</td><td>1</td>"));
}

// The p of rope is 0.0314, of gqa(2) 0.423.
TEST_F(Report, SeveralWiringsAreTestedByHolm) {
  std::vector<RunHistory> runs;
  for (const auto& [wiring, losses] :
       {std::pair("plain", std::vector<const char*>{"2.5", "2.5", "2.5"}), {"rope", {"2.4", "2.36", "2.31"}}})
    for (int64_t seed : {1, 2, 3}) runs.push_back(read_finished(wiring, seed, losses[size_t(seed - 1)]));
  std::string page = comparison_page(runs);
  EXPECT_TRUE(has(page, "<th>p</th>") && has(page, "<td>3</td><td>0.0314</td><td>1.00</td><td>100.0 %</td><td>lower"));
  EXPECT_FALSE(has(page, "Holm"));
  EXPECT_TRUE(has(page, "All wirings have one learning rate, 0.001, which need not be the best of each."));
  EXPECT_FALSE(has(page, "the largest in the paper")) << "which has no rope";
  for (int64_t seed : {1, 2, 3}) runs.push_back(read_finished("gqa(2)", seed, seed == 1 ? "2.4" : "2.5"));
  page = comparison_page(runs);
  EXPECT_TRUE(has(page, "by Holm's correction for 2 tests.") && has(page, "<th>p, by Holm</th>"));
  EXPECT_TRUE(has(page, "<td>0.0629</td><td>1.00</td><td>100.0 %</td><td>no difference is shown: among so many, one "
                        "may "
                        "look like this by chance</td>"))
      << page.substr(page.find("Over seeds"), 2000);
  EXPECT_TRUE(has(page, "<td>0.423</td>"));
}

// Differences of 0.001, -0.001 and 0.002: mean 0.00067, deviation 0.00153, t of what is left of 0.01 10.583, p 0.0044;
// that of the second arm, 1.6e-5, is the smaller of two.
TEST_F(Report, EqualLossesAreShownByTwoOneSidedTests) {
  EXPECT_NEAR(equivalence_p({0.001, -0.001, 0.002}, 0.01), 0.0044049, 1e-6);
  EXPECT_NEAR(equivalence_p({-0.001, 0.001, -0.002}, 0.01), 0.0044049, 1e-6);
  EXPECT_NEAR(equivalence_p({0.012, 0.014, 0.016}, 0.01), 0.9629100, 1e-6) << "1 - p of t = 3.4641";
  EXPECT_EQ(equivalence_p({0.02, 0.02}, 0.01), 1);
  EXPECT_EQ(equivalence_p({0.002, 0.002}, 0.01), 0);
  EXPECT_TRUE(std::isnan(equivalence_p({0.002}, 0.01)));
  std::vector<RunHistory> runs;
  for (const auto& [wiring, losses] : {std::pair("plain", std::vector<const char*>{"2.5", "2.5", "2.5"}),
                                       {"rope", {"2.501", "2.499", "2.502"}},
                                       {"gqa(2)", {"2.504", "2.504", "2.5041"}}})
    for (int64_t seed : {1, 2, 3}) runs.push_back(read_finished(wiring, seed, losses[size_t(seed - 1)]));
  const std::string page = comparison_page(runs);
  EXPECT_TRUE(has(page, "<td>the same within 0.01 nats (p 0.0044)</td>")) << page.substr(page.find("Over seeds"), 2000);
  EXPECT_TRUE(has(page, "<td>higher, but the same within 0.01 nats (p 3.1e-05)</td>"));
  EXPECT_TRUE(has(page, "two one-sided tests, each of 0.01 nats. Speeds"));
}

TEST_F(Report, ModernHasOneName) {
  const std::string terms = "rmsnorm qknorm rope relu2 untied softcap(15)";
  std::vector<RunHistory> runs;
  for (const std::string& wiring : {terms, terms + " sla(2,2)", std::string("rmsnorm")}) {
    LogOf of;
    of.wiring = wiring;
    runs.push_back(finished_with(format("%zu", runs.size()), of, "2.5"));
  }
  const std::string page = comparison_page(runs);
  for (const char* name : {"<td>modern</td>", "<td>modern sla(2,2)</td>", "<td>rmsnorm</td>", "<code>modern</code>"})
    EXPECT_TRUE(has(page, name)) << name;
  EXPECT_EQ(charts(page).at(0).at("series").at(1).at("name"), "modern sla(2,2)");
  EXPECT_FALSE(has(page, "qknorm rope"));
}

// The mean of seeds 1 and 2, in the band between them; seed 3 is not finished.
TEST_F(Report, CurvesAreMeansOverSeedsInABand) {
  std::vector<RunHistory> runs;
  for (int64_t seed : {1, 2, 3}) {
    LogOf of;
    of.seed = seed;
    const std::string extra = seed == 1 ? LogOf::val(5, "9") : "";  // the second has not validated there
    runs.push_back(read_run(
        write_run(format("plain-%d", int(seed)), of.head() + LogOf::steps(1, 5, 2.0 + double(seed)) + extra +
                                                     LogOf::steps(6, seed < 3 ? 10 : 7, 2.0 + double(seed)) +
                                                     (seed < 3 ? LogOf::val(10, seed == 1 ? "2" : "2.5") : ""))));
  }
  const json all = charts(comparison_page(runs)), val = all.at(0), train = all.at(1);
  EXPECT_EQ(val.at("title"), "Validation loss: mean over seeds, from the lowest to the highest");
  ASSERT_EQ(val.at("series").size(), 1u);
  const json curve = val.at("series").at(0);
  EXPECT_EQ(curve.at("s"), json({10}));
  EXPECT_EQ(curve.at("y"), json({2.25}));
  EXPECT_EQ(curve.at("low"), json({2.0}));
  EXPECT_EQ(curve.at("high"), json({2.5}));
  EXPECT_EQ(train.at("series").at(0).at("y").at(9), 3.4) << "of 2.9 and 3.9";
  EXPECT_EQ(train.at("series").at(0).at("k").back(), 160);
  EXPECT_FALSE(charts(comparison_page({runs[0]})).at(0).at("series").at(0).contains("low"));
}

TEST_F(Report, OfSeveralRunsSaysWhatTheyShare) {
  LogOf a, b;
  a.more = R"(,"vocab_size":257,"train_data":"a/train.bin","val_data":"a/val.bin","val_batches":4,"total_batch":64,)"
           R"("schedule":"cosine","optimizer":"adamw")";
  b = a, b.wiring = "rope", b.planned = 20;
  const std::string page = comparison_page({finished_with("a", a, "2.5"), finished_with("b", b, "2.5")});
  for (const char* fact :
       {"model</span><b>4 layers, 4 heads, 32 channels, a vocabulary of 257<", "parameters</span><b>10.0 k<",
        "training data</span><b>a/train.bin<", "validation data</span><b>a/val.bin, -m 4<",
        "an update</span><b>64 tokens, -t 8, -b 2<", "peak learning rate</span><b>0.001, cosine, adamw<",
        "precision, device</span><b>fp32, CPU<"})
    EXPECT_TRUE(has(page, fact)) << fact;
  EXPECT_FALSE(has(page, "updates</span>")) << "which differ";
}

// What a run writes down of itself, which of it is compared at a resume, and what it says while it trains. The
// trainer and scripts run from the repository's root, with a tiny model.
//
// COVERS llmc/train/run. llmc/train/resuming llmc/train/settings llmc/train/run_history llmc/train/schedule.h
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <regex>
#include "command_line.h"
#include "helpers.h"
#include "llmc/model/stream_memory.h"
#include "llmc/train/print.h"
#include "llmc/report/report.h"
#include "llmc/train/run.h"
#include "llmc/train/settings.h"

// ----------------------------------------------------------------------------
// Learning rates

TEST(Schedule, OfWsdHoldsTheRateToTheEndOfTheWarmUp) {
  const Schedule s = {"wsd", 1.0, 0.0, 9, 10};
  EXPECT_EQ(s(9), 1);
  EXPECT_EQ(s(10), 1) << "the decay begins where the warm-up ends";
}

TEST(Schedule, OfWsdDecaysInShortRunsToo) {
  EXPECT_EQ((Schedule{"wsd", 1.0, 0.0, 0, 1}(1)), 1) << "a single step has the whole rate, as of every schedule";
  for (int64_t steps = 2; steps <= 20; steps++) {
    const Schedule s = {"wsd", 1.0, 0.0, 0, steps};
    EXPECT_EQ(s(1), 1) << steps;
    EXPECT_LT(s(steps), 0.9) << steps;
    EXPECT_GT(s(steps), 0) << steps;
  }
}

// ----------------------------------------------------------------------------
// Logs, as reports read them

class Records : public CommandLine {
 protected:
  RunHistory history(const std::string& log) const {
    fs::create_directories(in("run"));
    write_file(in("run/log.jsonl"), log);
    return read_run(in("run"));
  }
  static std::string steps(int64_t from, int64_t to, const char* more = R"(,"ms":20,"tokens_per_second":800)") {
    std::string text;
    for (int64_t step = from; step <= to; step++)
      text += format(R"({"step":%lld,"loss":3%s})", (long long)step, more) + "\n";
    return text;
  }
  static bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
  const std::string head = R"({"run":{"micro_batch":2,"seq_len":8,"ranks":1,"steps":8,"learning_rate":0.1}})"
                           "\n";
};

// The run was killed after step 8, and resumed after step 5.
TEST_F(Records, OfStepsTrainedAgainEarlierValidationsAndSamplesDoNotCount) {
  std::string log = head + steps(1, 4) +
                    R"({"step":4,"val_loss":4})"
                    "\n"
                    R"({"step":4,"sample":"4"})"
                    "\n" +
                    steps(5, 8);
  for (const char* line : {R"({"step":6,"val_loss":6})", R"({"step":8,"val_loss":8})", R"({"step":8,"sample":"8"})"})
    log += std::string(line) + "\n";
  const RunHistory run = history(log + steps(6, 7));
  ASSERT_EQ(run.validations.size(), 1u);
  EXPECT_EQ(run.final_loss(), 4);
  ASSERT_EQ(run.samples.size(), 1u);
  EXPECT_EQ(run.samples[0].text, "4");
  EXPECT_EQ(run.num_repeated, 3);
}

TEST_F(Records, CountTheTokensOfAllSteps) {
  const std::string val = R"({"step":3,"val_loss":4})"
                          "\n";
  for (const char* times : {R"(,"ms":20,"tokens_per_second":800)", ""}) {
    const RunHistory run = history(head + steps(1, 3, times) + val + steps(4, 5, times));
    EXPECT_EQ(run.steps[0].tokens, 16) << times;
    EXPECT_EQ(run.validations[0].tokens, 48) << times;
    EXPECT_EQ(run.tokens(), 80) << times;
  }
}

TEST_F(Records, OfAResumedRunSayByWhatEachStepWasDone) {
  const RunHistory run =
      history(head + steps(1, 8) +
              R"({"step":8,"run":{"micro_batch":2,"seq_len":8,"ranks":1,"steps":12,"learning_rate":0.2}})"
              "\n" +
              steps(9, 12));
  EXPECT_EQ(run.planned_steps(), 12);
  EXPECT_TRUE(run.is_finished());
  EXPECT_EQ(run.description_of(8).at("learning_rate"), 0.1);
  EXPECT_EQ(run.description_of(9).at("learning_rate"), 0.2);
  EXPECT_EQ(run.description_of(0).at("steps"), 8);
  EXPECT_TRUE(has(report_page(run), "resumed after step 8 with other options: steps 12, before 8; learning_rate 0.2, "
                                    "before 0.1."))
      << report_page(run).substr(0, 3000);
}

TEST_F(Records, ThatAnOlderVersionWroteAreAveragedWithNewerOnes) {
  std::vector<RunHistory> runs;
  for (const char* run : {R"("seed":1)", R"("seed":2,"val_every":5)"})
    runs.push_back(history(R"({"run":{"wiring":"plain","steps":2,)" + std::string(run) + "}}\n" + steps(1, 2) +
                           R"({"step":2,"val_loss":4})" + "\n"));
  EXPECT_TRUE(has(comparison_page(runs), "<tr><td>plain</td><td>2</td>"));
}

// ----------------------------------------------------------------------------
// What a run says and keeps

TEST_F(Records, TellTheTimeThatIsLeft) {
  ::Run run;
  run.options.learning_rate = 1;
  run.B = run.T = 1, run.gemm_peak = 1, run.steps = 20, run.first_step = 5, run.step = 10, run.training_seconds = 40;
  testing::internal::CaptureStdout();
  report_step(run, {3, 1, 0.1, 10, 0, 0, /*flops_per_token=*/1, /*limit_seconds=*/7, 1, false, false, true});
  const std::string line = testing::internal::GetCapturedStdout();
  EXPECT_TRUE(has(line, "50%, " + time_text(100) + " left")) << line << "five steps took 50 s; ten are left";
  EXPECT_TRUE(has(line, "| 70% of the limit |")) << line;
}

TEST_F(Records, HaveTheAccuracyAsAShare) {
  ::Run run;
  run.log.create(folder);
  testing::internal::CaptureStdout();
  report_validation(run, {2, 0, 10, 20, 4, 0, 0, 1});
  const std::string line = testing::internal::GetCapturedStdout();
  EXPECT_TRUE(has(line, "accuracy 40.0 %")) << line;
  EXPECT_EQ(read_log(folder).at(0).at("val_accuracy"), 0.4);
}

// The last two bytes of three are missing.
TEST_F(Records, OfASampleHaveTheCharacterThatItsEndCuts) {
  ::Run run;
  run.tokenizer = Tokenizer::bytes();
  run.log.create(folder);
  testing::internal::CaptureStdout();
  print_sample(run, {256, 'a', 0xE2}, {1, 1});
  testing::internal::GetCapturedStdout();
  const auto tokens = read_log(folder).at(0).at("tokens").get<std::vector<std::string>>();
  ASSERT_EQ(tokens.size(), 3u);
  EXPECT_EQ(tokens[1], "a");
  EXPECT_EQ(tokens[2], "\xEF\xBF\xBD") << "U+FFFD for a byte that is no character";
}

TEST_F(Records, AmidSkippedStepsNoCheckpointIsRemoved) {
  for (const int64_t bad_steps : {1, 0}) {
    ::Run run;
    run.options.out = in("out"), run.options.keep = 1, run.step = 3, run.bad_steps_in_row = bad_steps;
    for (const char* name : {"out/step_00000001", "out/step_00000002", "out/step_00000003"}) {
      fs::create_directories(in(name));
      write_file(in(name) + std::string("/state.json"), "{}");
    }
    open_output(run, in("out/step_00000003"), {});
    EXPECT_EQ(names_in(in("out")).count("step_00000001"), bad_steps > 0 ? 1u : 0u);
    EXPECT_EQ(names_in(in("out")).count("step_00000003"), 1u);
  }
}

TEST_F(Records, WarnOfWhatIsMaybeNotMeant) {
  fs::create_directories(in("data"));
  for (const char* name : {"data/a.bin", "data/b.bin"}) write_file(in(name), shard_bytes(name[5] == 'a' ? 100 : 32));
  auto warnings = [&](auto change) {
    ::Run run;
    run.options.learning_rate = 0.1, run.T = 32, run.B = 1, run.steps = 10, run.schedule.total_steps = 10;
    change(run);
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    print_start(run, "", "fp32");
    testing::internal::GetCapturedStdout();
    return testing::internal::GetCapturedStderr();
  };
  const std::string with_memory = "warning: --shuffle: with memory";
  EXPECT_TRUE(has(warnings([](::Run& run) { run.options.shuffle = run.has_memory = true; }), with_memory));
  EXPECT_EQ(warnings([](::Run& run) { run.options.shuffle = true; }), "");
  EXPECT_EQ(warnings([](::Run& run) { run.options.warmup_steps = 10; }), "");
  EXPECT_TRUE(has(warnings([](::Run& run) { run.options.warmup_steps = 11; }), "warning: -u 11: the warm-up is "
                                                                               "longer"));
  auto open = [&](const char* pattern) { return std::make_unique<DataLoader>(in(pattern), 257, 32); };
  const std::string unused = " of 2 files are not used, for they have fewer than ";
  EXPECT_TRUE(has(warnings([&](::Run& run) { run.train = open("data/*.bin"); }), "1" + unused + "33 tokens: "));
  EXPECT_EQ(warnings([&](::Run& run) { run.train = open("data/a.bin"); }), "");
  auto validate = [&](int64_t batches) {
    return warnings([&](::Run& run) {
      run.train = open("data/a.bin"), run.val = open("data/*.bin"), run.options.val_batches = batches;
    });
  };
  EXPECT_TRUE(has(validate(1), "1" + unused + "33 tokens: "));
  EXPECT_EQ(validate(0), "") << "-m 0 takes the rest of each file";
}

TEST_F(Records, RowsOfAnotherLengthAreWarnedOf) {
  const std::string model = "--layers 1 --heads 2 --channels 16 --vocab-size 258 --max-seq-len 64 -b 2 -x 1 -v 0 ";
  std::string text;
  for (int i = 0; i < 300; i++) text += "text " + std::to_string(i) + '\0';
  write_file(in("in"), text);
  ASSERT_EQ(run("data/tokenize --separator nul --pack 32 --out " + in("packed") + " " + in("in")).exit_status, 0);
  ASSERT_EQ(run("data/tokenize --separator nul --out " + in("loose") + " " + in("in")).exit_status, 0);
  ASSERT_EQ(run("data/probe recall -t 32 --pairs 4 --examples 50 --val-examples 4 -o " + in("probe")).exit_status, 0);
  auto train = [&](const std::string& options) { return run(alone + trainer + model + options).err; };
  for (const char* data : {"packed", "probe"}) {
    const std::string files = in(data) + "/train_*.bin";
    EXPECT_TRUE(has(train("-t 24 -i '" + files + "'"), "warning: -i " + files +
                                                           ": the texts lie in rows of 32 tokens, "
                                                           "and -t 24 cuts them elsewhere; train with -t 32"));
    EXPECT_EQ(train("-t 32 -i '" + files + "'"), "");
  }
  EXPECT_TRUE(has(train("-t 24 -i '" + in("loose/train_*.bin") + "' -j '" + in("packed/val_*.bin") + "'"), "warning: "
                                                                                                           "-j "));
  EXPECT_EQ(train("-t 24 -i '" + in("loose/train_*.bin") + "'"), "");
}

TEST(StreamMemory, OfARankIsThatOfItsRows) {
  const std::vector<CheckpointTensor> all = {{"h.0.memory", {4, 1, 2}, {0, 1, 10, 11, 20, 21, 30, 31}}};
  EXPECT_EQ(memory_of_rank(all, 0, 2)[0].values, (std::vector<float>{0, 1, 10, 11}));
  EXPECT_EQ(memory_of_rank(all, 1, 2)[0].values, (std::vector<float>{20, 21, 30, 31}));
  EXPECT_EQ(memory_of_rank(all, 1, 2)[0].shape, (std::vector<int64_t>{2, 1, 2}));
}

TEST(Settings, ThatDifferAreNamedAsTheOptionsAre) {
  TrainOptions options;
  const OptionTable table = train_options(options);
  const Settings before = {{"learning_rate", 0.1},  {"weight_decay", 0.1}, {"wiring", "sla(3,3) rope"},
                           {"steps", int64_t(3)},   {"train_data", "a"},   {"num_layers", int64_t(4)},
                           {"train_checksum", "0a"}};
  const Settings now = {{"learning_rate", 0.1},   {"weight_decay", 0.5}, {"wiring", " sla( 3,3)  rope"},
                        {"steps", int64_t(4)},    {"train_data", "b"},   {"num_layers", int64_t(5)},
                        {"train_checksum", "0b"}, {"new", true}};
  std::string text;
  for (const SettingDifference& d : differences(table, before, now))
    text += d.name + ": " + d.before + " " + d.now + "\n";
  EXPECT_EQ(text, "num layers: 4 5\nsteps (-x): 3 4\ntraining data (-i), by their checksum: 0a 0b\n"
                  "weight decay (-c): 0.1 0.5\n");
}

// ----------------------------------------------------------------------------
// Runs that are resumed

class Resumed : public Records {
 protected:
  const std::string common = alone + trainer + "-i " + in("tokens.bin") +
                             " --layers 1 --heads 2 --channels 16 --vocab-size 257 --max-seq-len 32 -b 2 -v 0 -y -o " +
                             in("out") + " ";
  void SetUp() override {
    Records::SetUp();
    write_file(in("tokens.bin"), shard_bytes(2000));
  }
  // Expects an error, and that nothing is written.
  void expect_refused(const std::string& options, const std::vector<std::string>& parts) const {
    const std::string log = read_file(in("out/log.jsonl")), config = read_file(in("out/config.toml"));
    const Outcome o = run(common + options);
    EXPECT_EQ(o.exit_status, 1) << options << o.out;
    for (const std::string& part : parts) EXPECT_TRUE(has(o.err, part)) << part << "\n" << o.err;
    EXPECT_EQ(read_file(in("out/log.jsonl")), log);
    EXPECT_EQ(read_file(in("out/config.toml")), config);
  }
};

TEST_F(Resumed, AfterItsLastStepNothingMayDiffer) {
  ASSERT_EQ(run(common + "-x 2 -l 1e-3").exit_status, 0);
  expect_refused("-x 2 -l 1e-2 -c 0.5 -k constant",
                 {"has done all of its steps, and none is left for what has changed: ",
                  "peak learning rate (-l): 0.001, and now 0.01", "weight decay (-c): 0.1, and now 0.5",
                  "schedule (-k): cosine, and now constant"});
  expect_refused("-x 2 -l 1e-3 -v 1", {"val every (-v): 0, and now 1"});
  expect_refused("-x 2 -l 1e-3 -j " + in("tokens.bin"), {"validation data (-j), by their checksum: none, and now"});
  expect_refused("-x 2 -l 1e-3 -b 1 -d 64", {"micro batch (-b): 2, and now 1"});
  const Outcome same = run(common + "-x 2 -l 1e-3");
  EXPECT_EQ(same.exit_status, 0) << same.err;
  EXPECT_EQ(same.err, "");
}

TEST_F(Resumed, WithSameOptionsNothingMayDifferBefore) {
  ASSERT_EQ(run(common + "-x 4 -n 2 -l 1e-3").exit_status, 0);
  fs::remove_all(in("out/step_00000004"));
  expect_refused("-x 4 -n 2 -l 1e-2 --same-options", {"--same-options: ", "peak learning rate (-l): 0.001, and now "
                                                                          "0.01"});
  expect_refused("-x 6 -l 1e-3 --same-options", {"steps (-x): 4, and now 6"});
  expect_refused("-x 6 -l 1e-3 --same-options --dry-run", {"steps (-x): 4, and now 6"});
  EXPECT_EQ(run(common + "-x 4 -l 1e-3 --same-options").exit_status, 0);
  // A log alone stands for its run.
  fs::remove_all(in("out/step_00000002")), fs::remove_all(in("out/step_00000004"));
  expect_refused("-x 4 -l 1e-2 --same-options", {"log.jsonl is of a run with other ones: peak learning rate (-l)"});
  expect_refused("-x 4 -l 1e-3 --same-options --layers 2", {"num layers: 1, and now 2"});
  EXPECT_EQ(run(common + "-x 4 -l 1e-3 --same-options --dry-run").exit_status, 0);
}

TEST_F(Resumed, WhatAnOlderVersionDidNotRecordWasTheDefault) {
  ASSERT_EQ(run(common + "-x 4 -n 2 -l 1e-3").exit_status, 0);
  fs::remove_all(in("out/step_00000004"));
  const std::string state_path = in("out/step_00000002/state.json");
  std::string log = read_file(in("out/log.jsonl")), state = read_file(state_path);
  state.resize(state.rfind(",\n \"checksum\""));
  for (const char* field : {"dropout", "weight_decay", "total_batch"})
    for (std::string* text : {&log, &state}) {
      const size_t at = text->find("\"" + std::string(field) + "\":");
      ASSERT_NE(at, std::string::npos) << field;
      text->erase(at, text->find(',', at) + 1 - at);
    }
  write_state(state_path, state), write_file(in("out/log.jsonl"), log);
  expect_refused("-x 4 -l 1e-3 --dropout 0.3 --same-options", {"dropout (--dropout): 0, and now 0.3"});
  expect_refused("-x 4 -l 1e-3 -d 128 --same-options", {"if it is not given (-d): 64, and now 128"});
  EXPECT_EQ(run(common + "-x 4 -l 1e-3 --same-options --dry-run").err, "");
  write_file(in("out/log.jsonl"), "");
  expect_refused("-x 4 -l 1e-3 -c 0.5 --same-options", {"weight decay (-c): 0.1, and now 0.5"});
  write_file(in("out/log.jsonl"), log);
  fs::remove_all(in("out/step_00000002"));
  expect_refused("-x 4 -l 1e-3 --dropout 0.3 --same-options", {"log.jsonl is of a run with other ones: dropout "});
  expect_refused("-x 4 -l 1e-3 -d 128 --same-options", {"(-d): 64, and now 128"});
  EXPECT_EQ(run(common + "-x 4 -l 1e-3 --same-options --dry-run").err, "");
}

TEST_F(Resumed, WithOtherOptionsTheRecordsSaySo) {
  ASSERT_EQ(run(common + "-x 2 -l 1e-3").exit_status, 0);
  const Outcome o = run(common + "-x 4 -l 1e-4 -c 0");
  ASSERT_EQ(o.exit_status, 0) << o.err;
  EXPECT_TRUE(has(o.err, "another weight decay (-c): 0.1; training continues with 0")) << o.err;
  EXPECT_TRUE(has(read_file(in("out/config.toml")), "\nsteps = 4\n")) << read_file(in("out/config.toml"));
  EXPECT_TRUE(has(read_file(in("out/config.toml")), "\nlearning-rate = 0.0001\n"));
  std::vector<json> parts;
  for (const json& line : read_log(in("out")))
    if (line.contains("run")) parts.push_back(line);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].at("run").at("steps"), 2);
  EXPECT_EQ(parts[1].at("step"), 2);
  EXPECT_EQ(parts[1].at("run").at("steps"), 4);
  EXPECT_EQ(parts[1].at("run").at("learning_rate"), 1e-4);
  EXPECT_TRUE(parts[1].at("run").at("process").contains("host"));
  const std::string page = page_of(in("out"));
  EXPECT_TRUE(has(page, ">4 of 4<"));
  EXPECT_FALSE(has(page, "not finished"));
  EXPECT_TRUE(has(page, "resumed after step 2 with other options: ")) << page.substr(0, 3000);
  EXPECT_EQ(run(alone + trainer + "--config " + in("out/config.toml") + " -y -x 6").err.find("weight decay"),
            std::string::npos)
      << "config.toml has the options of the last process";
}

TEST_F(Resumed, AJumpOfTheLearningRateIsSaid) {
  ASSERT_EQ(run(common + "-x 10 -l 1e-3").exit_status, 0);
  const Outcome o = run(common + "-x 20 -l 1e-3");
  EXPECT_EQ(o.exit_status, 0);
  EXPECT_TRUE(has(o.err, "warning: -y: the learning rate jumps: by the schedule of " + in("out/step_00000010") +
                             " (cosine, -x 10) step 11 would have 0, and by this one (cosine, -x 20) it has 0.0005; "))
      << o.err;
  fs::remove_all(in("out"));
  ASSERT_EQ(run(common + "-x 10 -l 1e-3 -k constant").exit_status, 0);
  EXPECT_EQ(run(common + "-x 20 -l 1e-3 -k constant").err, "");
}

TEST_F(Resumed, OtherDataOfTheSameSizeIsRefused) {
  ASSERT_EQ(run(common + "-x 2 -k constant").exit_status, 0);
  std::string bytes = shard_bytes(2000);
  write_file(in("copy.bin"), bytes.substr(1024));
  EXPECT_EQ(run(common + "-x 3 -k constant -i " + in("copy.bin")).err, "") << "the same tokens in another file";
  write_file(in("tokens.mask"), mask_of_shard(bytes, [](int i) { return i % 3 != 0; }));
  expect_refused("-x 4 -k constant", {"was written with other training data (-i), of as many sequences: their "
                                      "checksum "});
  fs::remove(in("tokens.mask"));
  bytes[1024 + 2 * 1500] ^= 1;
  write_file(in("tokens.bin"), bytes);
  expect_refused("-x 4 -k constant", {"was written with other training data (-i), of as many sequences: their "
                                      "checksum "});
  write_file(in("tokens.bin"), shard_bytes(2000));
  EXPECT_EQ(run(common + "-x 4 -k constant").err, "");
}

TEST_F(Resumed, OtherValidationDataAreSaid) {
  write_file(in("val.bin"), shard_bytes(1000));
  ASSERT_EQ(run(common + "-x 2 -k constant -m 2 -j " + in("val.bin")).exit_status, 0);
  write_file(in("val.bin"), shard_bytes(1000, 100));
  const Outcome o = run(common + "-x 3 -k constant -m 2 -j " + in("val.bin"));
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_TRUE(has(o.err, "what validation reads is not the same as before: validation data (-j)")) << o.err;
  EXPECT_TRUE(has(run(common + "-x 4 -k constant -m 3 -j " + in("val.bin")).err, "val batches (-m): 2, and now 3"));
  const std::string other_batch = "what validation reads is not the same as before: micro batch (-b): 2, and now 1; ";
  EXPECT_TRUE(has(run(common + "-x 5 -k constant -b 1 -d 64 -m 3 -j " + in("val.bin")).err, other_batch));
  ASSERT_EQ(run(common + "-x 6 -k constant -m 0 -j " + in("val.bin")).exit_status, 0);
  EXPECT_EQ(run(common + "-x 7 -k constant -b 1 -d 64 -m 0 -j " + in("val.bin")).err, "") << "it reads all";
}

TEST_F(Resumed, TheFolderOfTheFirstModelMayBeGone) {
  const std::string first = alone + trainer + "-i " + in("tokens.bin") + " -v 0 -k constant -b 2 ";
  ASSERT_EQ(run(common + "-x 1 -k constant").exit_status, 0);
  fs::rename(in("out"), in("base"));
  const std::string tuned = first + "-e " + in("base/step_00000001") + " --wiring rope -y -o " + in("out");
  ASSERT_EQ(run(tuned + " -x 1").exit_status, 0);
  // The same folder with other weights: nothing is left to be trained with them.
  fs::remove_all(in("base"));
  ASSERT_EQ(run(first + " --layers 1 --heads 2 --channels 16 --vocab-size 257 --max-seq-len 32 --seed 2 -x 1 -o " +
                in("base"))
                .exit_status,
            0);
  EXPECT_TRUE(has(run(tuned + " -x 1").err, "weights to start from (-e), by their checksum: "));
  fs::remove_all(in("base"));
  const Outcome o = run(tuned + " -x 2");
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_TRUE(has(o.err, "base/step_00000001: is not there; the model is ")) << o.err;
  EXPECT_TRUE(has(o.out, "at step 1 of 2")) << o.out;
}

// After five steps of two streams sequence 10 is next; four streams begin at a multiple of four.
TEST_F(Resumed, OfOtherStreamsTheSegmentsBeginTogether) {
  const std::string memory = "--wiring 'relative memory(32)' -k constant ";
  ASSERT_EQ(run(common + memory + "-x 5").exit_status, 0);
  const Outcome o = run(common + memory + "-x 6 -b 4 --reset-memory");
  ASSERT_EQ(o.exit_status, 0) << o.err;
  EXPECT_EQ(json::parse(read_file(in("out/step_00000006/state.json"))).at("next_window"), 8 + 4);
}

// ----------------------------------------------------------------------------
// Scripts, in a tree of their own

class ScriptRecords : public Resumed {
 protected:
  void SetUp() override {
    Resumed::SetUp();
    for (const char* folder : {"tree/scripts", "tree/data"}) fs::create_directories(in(folder));
    for (const char* name : {"train.sh", "ladder.sh", "gpu.sh", "stoppable.sh", "runs.sh"})
      fs::copy_file(std::string("scripts/") + name, in("tree/scripts/") + name);
    write_program("report", "touch \"${@: -1}\"");
    setenv("TRAINER", fs::absolute("build/fp32/train_gpt2_sla_cpu").c_str(), 1);
    unsetenv("JOBS");
    unsetenv("OUT");
  }
  void write_program(const std::string& name, const std::string& text) const {
    write_file(in("tree/") + name, "#!/usr/bin/env bash\n" + text + "\n");
    chmod((in("tree/") + name).c_str(), 0755);
  }
};

// `make train` where nothing is to be built, installed or tokenized, on a trainer that takes its word for how long a
// weight takes for a token, in ps. It makes a checkpoint where a run has an output folder.
class MakeTrain : public ScriptRecords {
 protected:
  void SetUp() override {
    ScriptRecords::SetUp();
    for (const char* name : {"make", "scripts/setup.sh", "nvidia-smi"}) write_program(name, ":");
    write_program("data/text.sh", "mkdir -p data/text-a; echo data/text-a");
    write_program("train_gpt2_sla_cpu", R"sh(
      while [ $# -gt 0 ]; do
        case $1 in --config) config=$2 ;; -o) out=$2 ;; esac
        shift
      done
      if grep -q "^channels = ${broken:-none}" "$config"; then echo 'error: no memory' >&2; exit 1; fi
      if grep -q "^channels = ${interrupted:-none}" "$config"; then kill -INT $PPID; exit 130; fi
      number() { sed -n "s/^$1 = //p" "$config"; }
      if [ "$(number dropout)" != 0 ]; then ps=$((2 * ps)); fi
      weights=$((12 * $(number layers) * $(number channels) ** 2))
      if [ "${disturbed:-}" = "$(number channels)" ] &&
        { mkdir was-disturbed || mkdir ${twice:+was-disturbed/twice}; } 2>/dev/null; then
        ps=$((9 * ps))
      fi
      mkdir -p "$out/step_1"
      echo '{"run":{"num_parameters":7,"flops_per_token":'$((6 * weights))'}}' >"$out/log.jsonl"
      for step in 1 2 3; do
        us=$((weights * $(number total-batch) * (ps + 2 / step) / 1000000))
        printf '{"step":%d,"loss":5,"ms":%d.%03d,"data_ms":0}\n' $step $((us / 1000)) $((us % 1000))
      done >>"$out/log.jsonl"
      if [ -n "${late:-}" ] && [ -n "$(number steps)" ]; then
        trap '' USR1
        mkdir "$out/step_$(number steps)" && touch "$out/step_$(number steps)0.gguf"
        kill -INT $PPID
        sleep 0.3
      fi)sh");
    fs::create_directories(in("tree/data/text-a"));
    write_file(in("a"), "");
  }
  Outcome try_train(const char* checksum, int ps, const std::string& environment, int64_t tokens) const {
    write_file(in("tree/data/text-a/MANIFEST.json"),
               format("\"vocab_size\": 257,\n\"bytes_of_text\": %lld,\n\"train_tokens\": %lld,\n\"val_tokens\": %lld,\n"
                      "\"sources\": [\n\"crc32c\": \"x\"\n],\n\"shards\": [\n  \"crc32c\": \"%s\"\n]\n",
                      (long long)tokens, (long long)(tokens - tokens / 10), (long long)(tokens / 10), checksum));
    return run("env --default-signal=INT -u MINUTES -u HOURS -u DATA PATH='" + in("tree") + "':\"$PATH\" TEXT='" +
               in("a") + "' ps=" + std::to_string(ps) + " " + environment + in("tree/scripts/train.sh"));
  }
  Outcome train(const char* checksum, int ps, const std::string& environment = "", int64_t tokens = 1000000000) const {
    const Outcome o = try_train(checksum, ps, environment, tokens);
    EXPECT_EQ(o.exit_status, 0) << o.out << o.err;
    return o;
  }
  // What was chosen for the run in this folder.
  double chosen(const std::string& name, const std::string& run = "mine") const {
    std::smatch number;
    const std::string text = read_file(in(run + ".toml"));
    EXPECT_TRUE(std::regex_search(text, number, std::regex("\n" + name + " = ([0-9.e-]+)\n"))) << name << "\n" << text;
    return number.empty() ? 0 : std::stod(number[1]);
  }
  // The folders of runs.
  size_t runs() const {
    size_t count = 0;
    for (const auto& entry : fs::directory_iterator(in("tree/runs"))) count += entry.is_directory();
    return count;
  }
};

TEST_F(MakeTrain, AnEditedTextIsTrainedOnAnew) {
  train("0a", 100);
  EXPECT_EQ(runs(), 1u);
  train("0a", 100);
  EXPECT_EQ(runs(), 1u) << "the same text: the same run";
  train("0b", 100);
  EXPECT_EQ(runs(), 2u);
}

TEST_F(MakeTrain, ChoosesTheModelThatTheTimeIsEnoughForOnce) {
  const std::string out = "OUT='" + in("mine") + "' ";
  const auto minutes = [&] {  // of the chosen updates
    return chosen("steps") * chosen("layers") * chosen("channels") * chosen("channels") * 12 * chosen("total-batch");
  };
  double channels = 0;
  for (const int ps : {500, 50, 5}) {
    const Outcome o = train("0a", ps, out);
    EXPECT_TRUE(has(o.out, "5 minutes on this machine are ")) << o.out;
    EXPECT_NEAR(minutes() * ps * 1e-12 / 285, 1, 0.02) << "19 of 20 parts of the time";
    EXPECT_GT(chosen("channels"), channels) << "a faster machine trains a larger model";
    channels = chosen("channels");
    EXPECT_EQ(chosen("dropout"), 0);
    EXPECT_FALSE(has(train("0a", 70, out).out, "tokens/s")) << "it is chosen once";
    EXPECT_EQ(chosen("channels"), channels);
    fs::remove(in("mine.toml"));
  }
  train("0a", 50, out + "MINUTES=20 ");
  EXPECT_NEAR(minutes() * 50e-12 / 1140, 1, 0.02);
  channels = chosen("channels");
  fs::remove(in("mine.toml"));
  train("0a", 50, out + "HOURS=.5 ");
  EXPECT_NEAR(minutes() * 50e-12 / 1710, 1, 0.02);
  EXPECT_GE(chosen("channels"), channels);
  EXPECT_TRUE(fs::exists(in("mine/step_1")));
  train("0a", 50, "MINUTES=2 "), train("0a", 50, "HOURS=2 "), train("0a", 50);
  EXPECT_EQ(runs(), 3u) << "a run is of one time";
}

// Four updates take a second: others may have had the machine.
TEST_F(MakeTrain, MeasuresTwiceAndAgainWhereALargerModelSeemsToMakeLessOfTheMachine) {
  const std::string out = "OUT='" + in("mine") + "' ";
  const std::string undisturbed = train("0a", 20, out).out;
  EXPECT_GT(chosen("channels"), 96);
  for (const char* disturbed : {"disturbed=64", "disturbed=96 twice=1", "disturbed=128 twice=1"}) {
    fs::remove(in("mine.toml"));
    EXPECT_EQ(train("0a", 20, out + disturbed + " ").out, undisturbed) << disturbed;
    EXPECT_GT(fs::remove_all(in("tree/was-disturbed")), 0u);
  }
}

TEST_F(MakeTrain, TakesAModelThatFits) {
  const std::string out = "OUT='" + in("mine") + "/' ";
  train("0a", 5, out + "broken=128 ");
  EXPECT_EQ(chosen("channels"), 96) << "though the time is enough for more";
  fs::remove(in("mine.toml"));
  const Outcome none = try_train("0a", 5, out + "broken=64 ", 1000000000);
  EXPECT_EQ(none.exit_status, 1);
  EXPECT_EQ(none.err, "error: no memory\n");
  EXPECT_FALSE(fs::exists(in("mine.toml")));
  for (const std::string other : {"steps = 30000\ntotal-batch = 128\n", "# 5 minutes on this machine: \nsteps = 5\n"}) {
    write_file(in("mine.toml"), other);
    EXPECT_TRUE(has(try_train("0a", 5, out, 1000000000).err, "mine.toml: is none of make train's, and stays as it is"));
    EXPECT_EQ(read_file(in("mine.toml")), other);
  }
}

// By Ctrl-C a trainer ends with a status, as it does where its model has no room.
TEST_F(MakeTrain, EndsWhenItIsInterrupted) {
  const std::string out = "OUT='" + in("mine") + "' ";
  EXPECT_EQ(try_train("0a", 5, out + "interrupted=128 ", 1000000000).exit_status, 130);
  EXPECT_FALSE(fs::exists(in("mine.toml"))) << "nothing is chosen";
  fs::create_directory(in("elsewhere"));
  fs::create_directory_symlink(in("elsewhere"), in("mine"));
  const Outcome late = train("0a", 50, out + "late=1 ");
  EXPECT_FALSE(has(late.out, "at this speed")) << "all updates are done";
  EXPECT_TRUE(has(late.out, format("%s/step_%.0f ", in("mine").c_str(), chosen("steps")))) << late.out;
}

TEST_F(MakeTrain, SaysThatTheTextIsTheLimit) {
  const std::string out = "OUT='" + in("mine") + "' ";
  EXPECT_TRUE(has(train("0a", 1, out, 600000).out, "the text is the limit: it is read 16 times")) << "540,000 for "
                                                                                                     "training";
  EXPECT_EQ(chosen("steps"), int64_t(16 * 540000 / chosen("total-batch")));
  EXPECT_EQ(chosen("dropout"), 0.1);
  EXPECT_LE(12 * chosen("layers") * chosen("channels") * chosen("channels"), 10 * 600000);
  fs::remove(in("mine.toml"));
  for (const auto& [ps, tokens, dropout] : {std::tuple(50, 1000000, 0.0), {50, 450000, 0.1}, {8000, 100000, 0.0}}) {
    const Outcome o = train("0a", ps, out, tokens);  // of 442,368 weights twice, and of 147,456 read 2.7 times
    EXPECT_TRUE(has(o.out, dropout > 0 ? " times the text; so with dropout\n" : " times the text\n")) << o.out;
    EXPECT_EQ(chosen("dropout"), dropout);
    const double weights = 12 * chosen("layers") * chosen("channels") * chosen("channels"),
                 ms = weights * chosen("total-batch") * (dropout > 0 ? 2 : 1) * ps / 1e9;  // it takes twice as long
    EXPECT_NEAR(chosen("steps") * ms / (0.95 * 300000), 1, 0.01);
    fs::remove(in("mine.toml"));
  }
  const Outcome little = try_train("0a", 50, out, 10240);
  EXPECT_EQ(little.exit_status, 1);
  EXPECT_TRUE(has(little.err, "is too little text: 1024 tokens to validate with")) << little.err;
}

TEST_F(MakeTrain, RefusesWhatIsNoTime) {
  for (const char* time :
       {"MINUTES=0", "MINUTES=-1", "HOURS=1e3", "HOURS=0.0", "MINUTES=many", "MINUTES=.", "MINUTES=123456"}) {
    const Outcome o = try_train("0a", 50, std::string(time) + " ", 1000000);
    EXPECT_EQ(o.exit_status, 1);
    EXPECT_EQ(o.err, "error: " + std::string(time) + ": it must be a time, such as 20 or 0.5\n");
    EXPECT_EQ(o.out, "") << "nothing is installed or built";
  }
  EXPECT_EQ(try_train("0a", 50, "MINUTES=5 HOURS=1 ", 1000000).err, "error: MINUTES=5 and HOURS=1: give one of them\n");
  const Outcome both = try_train("0a", 50, "TEXT=a DATA=tinyshakespeare ", 1000000);
  EXPECT_EQ(both.err, "error: TEXT and DATA each say what to train on; give one of them\n");
  EXPECT_EQ(both.out, "");
  const Outcome none = try_train("0a", 50, "TEXT=none/of/mine ", 1000000);
  EXPECT_EQ(none.err, "error: " + fs::current_path().string() + "/none/of/mine: no such file or folder\n");
  EXPECT_EQ(none.out, "");
}

// What belongs to a run beside its model and its options: its log, and the thread that writes checkpoints.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <fstream>
#include <future>
#include <new>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>
#include "files.h"
#include "helpers.h"
#include "llmc/train/background_writer.h"
#include "llmc/train/logger.h"

// ----------------------------------------------------------------------------
// Writing beside training

TEST(BackgroundWriter, WorksBesideItsCallerAndReportsOnce) {
  BackgroundWriter writer;
  EXPECT_FALSE(writer.result(true).has_value()) << "there was nothing to write";
  std::promise<void> go_on;
  writer.start(12, [&](SaveResult& result) {
    go_on.get_future().wait();
    result.folder = "step_12";
  });
  EXPECT_FALSE(writer.result(false).has_value()) << "it is still under way";
  go_on.set_value();
  const std::optional<SaveResult> saved = writer.result(true);
  ASSERT_TRUE(saved.has_value());
  EXPECT_EQ(saved->step, 12);
  EXPECT_EQ(saved->folder, "step_12");
  EXPECT_EQ(saved->error, "");
  EXPECT_FALSE(writer.result(true).has_value());
}

TEST(BackgroundWriter, TellsOfErrorsAndIsDoneBeforeItIsGone) {
  bool written = false;
  {
    BackgroundWriter writer;
    writer.start(1, [](SaveResult&) { user_error("the disk is full"); });
    EXPECT_EQ(writer.result(true)->error, "the disk is full");
    writer.start(2, [](SaveResult&) { throw std::bad_alloc(); });
    EXPECT_EQ(writer.result(true)->error, "std::bad_alloc");
    writer.start(3, [&](SaveResult&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      written = true;
    });
  }
  EXPECT_TRUE(written);
}

// ----------------------------------------------------------------------------
// The log

TEST(Log, WritesNumbersWithAllTheirDigits) {
  TemporaryFolder folder;
  const double loss = 0.1 + 0.2;
  {
    RunLog log;
    log.create(folder.path);
    log.write(
        {{"run", LogFields{{"model", std::string("a \"quoted\" name")}, {"bias", true}, {"steps", int64_t(1) << 40}}}});
    log.write({{"step", int64_t(1)}, {"loss", loss}});
  }
  std::ifstream file(folder.path + "/log.jsonl");
  std::string line;
  std::getline(file, line);
  const auto run = nlohmann::json::parse(line);
  EXPECT_EQ(run["run"]["model"], "a \"quoted\" name");
  EXPECT_EQ(run["run"]["steps"], int64_t(1) << 40);
  std::getline(file, line);
  EXPECT_EQ(nlohmann::json::parse(line)["loss"].get<double>(), loss);
}

TEST(Log, OfAnEarlierRunIsKeptOrContinued) {
  TemporaryFolder folder;
  {
    RunLog log;
    log.create(folder.path);
    log.write({{"run", LogFields{{"n", int64_t(1)}}}});
  }
  {
    RunLog log;
    log.create(folder.path);
    log.write({{"run", LogFields{{"n", int64_t(2)}}}});
    for (int64_t step = 1; step <= 4; step++) {
      log.write({{"step", step}});
      if (step % 2 == 0) log.write({{"step", step}, {"checkpoint", std::string("c")}});
    }
  }
  EXPECT_EQ(read_file(folder.path + "/log.1.jsonl"), "{\"run\":{\"n\":1}}\n");
  std::ofstream(folder.path + "/log.jsonl", std::ios::app) << "{\"step\":5,\"lo";  // killed in mid-line
  {
    RunLog log;
    EXPECT_EQ(log.resume(folder.path, 2).checkpoints, std::set<int64_t>({2})) << "not that of step 4, whose line is "
                                                                                 "dropped";
    log.write({{"step", int64_t(3)}, {"again", true}});
  }
  EXPECT_EQ(read_file(folder.path + "/log.jsonl"), "{\"run\":{\"n\":2}}\n{\"step\":1}\n{\"step\":2}\n{\"step\":2,"
                                                   "\"checkpoint\":\"c\"}\n{\"step\":3,\"again\":true}\n");
}

// As with --resume-from, whose later checkpoints stay, too.
TEST(Log, LosesNoLaterLineThatIsAskedFor) {
  TemporaryFolder folder;
  const std::string path = folder.path + "/log.jsonl", later = folder.path + "/log.set_aside.jsonl";
  for (const char* all : {"", "{\"step\":2,\"val_loss\":1.5}\n{\"step\":3}\n"}) {
    write_file(path, "{\"step\":1}\n{\"step\":2,\"val_loss\":1.5}\n{\"step\":3}\n");
    RunLog().resume(folder.path, 1, /*keeps_later=*/true);
    EXPECT_EQ(read_file(path), "{\"step\":1}\n");
    EXPECT_EQ(read_file(later), all + std::string("{\"step\":2,\"val_loss\":1.5}\n{\"step\":3}\n"));
  }
}

TEST(Log, ThatCannotBeReadIsNotReplaced) {
  TemporaryFolder folder;
  std::filesystem::create_directory(folder.path + "/log.damaged.jsonl");
  write_file(folder.path + "/log.jsonl", "{\"step\":1}\n{\"st\n");
  EXPECT_ERROR(RunLog().resume(folder.path, 1), "log.damaged.jsonl: cannot be read");
  EXPECT_EQ(read_file(folder.path + "/log.jsonl"), "{\"step\":1}\n{\"st\n");
}

TEST(Log, KeepsValidLinesAfterDamagedOnes) {
  TemporaryFolder folder;
  const std::string path = folder.path + "/log.jsonl", damaged = folder.path + "/log.damaged.jsonl";
  const std::string zeros(20, '\0');  // as a machine that lost power leaves them
  auto resume = [&](const std::string& text, int64_t step) {
    write_file(path, text);
    RunLog log;
    return log.resume(folder.path, step).num_damaged;
  };
  EXPECT_EQ(resume("{\"run\":{}}\n{\"step\":1}\n{\"st\n" + zeros + "\n{\"step\":2}\n{\"step\":3}\n", 2), 2);
  EXPECT_EQ(read_file(path), "{\"run\":{}}\n{\"step\":1}\n{\"step\":2}\n");
  EXPECT_EQ(read_file(damaged), "{\"st\n" + zeros + "\n");
  EXPECT_EQ(resume("{\"step\":\"one\"}\n[1]\n{\"step\":-1}\n\n{\"step\":2}\n", 9), 4);
  EXPECT_EQ(read_file(path), "{\"step\":2}\n");
  EXPECT_EQ(read_file(damaged), "{\"st\n" + zeros + "\n{\"step\":\"one\"}\n[1]\n{\"step\":-1}\n\n");
  EXPECT_EQ(resume("{\"step\":1}\n{\"step\":2,\"lo", 9), 0) << "an incomplete last line is what a kill leaves";
  EXPECT_EQ(read_file(path), "{\"step\":1}\n");
}

TEST(Log, OnAFullDiskWaitsForRoomAndLosesNothing) {
  TemporaryFolder folder;
  signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  RunLog log;
  log.create(folder.path);
  auto set_limit = [&](rlim_t bytes) {
    const rlimit limit = {bytes, before.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  };
  std::string expected;
  for (int64_t step = 1; step <= 9; step++) {
    set_limit(step < 3 ? before.rlim_cur : step < 7 ? 30 : before.rlim_cur);
    log.write({{"step", step}});
    expected += format("{\"step\":%lld}\n", (long long)step);
    if (step == 6) {
      EXPECT_EQ(read_file(folder.path + "/log.jsonl"), expected.substr(0, 30));
      EXPECT_ERROR(log.finish(), "its last lines could not be written");
    }
  }
  EXPECT_EQ(read_file(folder.path + "/log.jsonl"), expected);
  EXPECT_EQ(error_of([&] { log.finish(); }), "");
}

TEST(Log, ThatCannotBeWrittenIsAnError) {
  TemporaryFolder folder;
  EXPECT_ERROR(RunLog().create(folder.path + "/nowhere"), "nowhere/log.jsonl: cannot be written");
}

// What belongs to a run beside its model: its options and their TOML, its log, and the thread that writes checkpoints.
#include <gtest/gtest.h>                 // TEST
#include <signal.h>                      // signal, SIGXFSZ
#include <sys/resource.h>                // setrlimit
#include <fstream>                       // std::ifstream, std::ofstream
#include <future>                        // std::promise, std::async
#include <new>                           // std::bad_alloc
#include <nlohmann/json.hpp>             // nlohmann::json
#include <random>                        // std::mt19937
#include "files.h"                       // TemporaryFolder, read_file, write_file
#include "helpers.h"                     // EXPECT_ERROR
#include "llmc/run/background_writer.h"  // BackgroundWriter
#include "llmc/run/config_toml.h"        // read_config_toml, ConfigEntry
#include "llmc/run/logger.h"             // RunLog
#include "llmc/run/options.h"            // parse_options

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

// BUG llmc/run/background_writer.cpp: `catch (const std::exception& e)` -> `catch (const UserError& e)`
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
    log.write("run", {{"model", std::string("a \"quoted\" name")}, {"bias", true}, {"steps", int64_t(1) << 40}});
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
    log.write("run", {{"n", int64_t(1)}});
  }
  {
    RunLog log;
    log.create(folder.path);
    log.write("run", {{"n", int64_t(2)}});
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

// BUG llmc/run/logger.cpp: `damaged += line + "\n", found.num_damaged++;` -> `break;`
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

// BUG llmc/run/logger.cpp: `waiting_.erase(0, write_all(fd_, waiting_.data(), waiting_.size()));` ->
//   `write_all(fd_, waiting_.data(), waiting_.size()), waiting_.clear();`
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

// ----------------------------------------------------------------------------
// Options

static TrainOptions parse(std::vector<std::string> words) {
  std::vector<char*> argv = {const_cast<char*>("train_gpt2_sla")};
  for (std::string& word : words) argv.push_back(word.data());
  TrainOptions options;
  parse_options(int(argv.size()), argv.data(), options);
  return options;
}

TEST(Options, WrittenAsTomlReadBackTheSame) {
  TemporaryFolder folder;
  const TrainOptions first =
      parse({"-i", "data/*.bin", "-e",           "d24", "--layers", "8",   "--shuffle", "-l", "0.00015", "-t", "77",
             "-k", "wsd",        "--skip-heads", "0",   "-d",       "154", "-b",        "2",  "--seed",  "9"});
  EXPECT_EQ(first.as_toml.find("=\"\""), std::string::npos) << "options that were not given are not there";
  std::ofstream(folder.path + "/config.toml") << first.as_toml;
  const TrainOptions second = parse({"--config", folder.path + "/config.toml"});
  EXPECT_EQ(second.as_toml, first.as_toml);
  EXPECT_EQ(second.train_data, "data/*.bin");
  EXPECT_EQ(second.learning_rate, 0.00015);
  EXPECT_EQ(second.model.overrides.at("--layers"), 8);
  EXPECT_FALSE(second.model.overrides.at("--heads").has_value());
  EXPECT_EQ(second.model.skip_heads, 0);
  EXPECT_TRUE(second.shuffle);
  EXPECT_FALSE(second.model.no_bias);
  EXPECT_EQ(parse({"--config", folder.path + "/config.toml", "-l", "0.5"}).learning_rate, 0.5) << "the command line "
                                                                                                  "wins";
}

// BUG llmc/run/config_toml.cpp: `line << toml::value<std::string>(value);` -> `line << '"' << value << '"';`
TEST(Options, AnyTextComesBackFromToml) {
  TemporaryFolder folder;
  const std::string path = folder.path + "/config.toml";
  for (const char* text : {"a # b", "two\nlines", "say \"so\"", "it's", "back\\slash", "tab\t", "'''", "\"\"\"", "[x]",
                           " = ", "12", "true", "-x", "gr\xc3\xbc\xc3\x9f", "\x01", "\r\n"}) {
    const TrainOptions first = parse({"-i", text, "-s", "1", "--prompt", text, "-l", ".5", "--tokenizer", "a b"});
    write_file(path, first.as_toml);
    const TrainOptions second = parse({"--config", path});
    EXPECT_EQ(second.prompt, text) << first.as_toml;
    EXPECT_EQ(second.train_data, text);
    EXPECT_EQ(second.learning_rate, 0.5);
    EXPECT_EQ(second.as_toml, first.as_toml);
  }
}

TEST(Options, AConfigFileThatIsNotUnderstoodIsRefused) {
  TemporaryFolder folder;
  const std::string path = folder.path + "/c.toml";
  auto expect_error = [&](const std::string& text, const std::string& part) {
    write_file(path, text);
    EXPECT_ERROR(parse({"-i", "x", "--config", path}), path + part);
  };
  expect_error("steps = 3\nlearning_rate = 0.05\n", ":2: learning_rate: no such option: is it learning-rate?");
  expect_error("steps = 3\nsteps = 4\n", ":2: is not TOML");
  expect_error("this is not toml at all\n", ":1: is not TOML");
  expect_error("[ranks]\nlayers = 3\n", ":1: ranks: is a section");
  expect_error("steps = [1, 2]\n", ":1: steps: is a section, a list or a date");
  expect_error("prompt = \"open\n", ":1: is not TOML");
  expect_error("help = true\n", ":1: help: no such option");
  expect_error("config = \"x\"\n", ":1: config: no such option");
  expect_error("quetzalcoatl = 1\n", ":1: quetzalcoatl: no such option; --help");
  write_file(path, "steps = \"many\"\n");
  EXPECT_ERROR(parse({"-i", "x", "--config", path}), "many");
  EXPECT_ERROR(parse({"-i", "x", "--config", folder.path + "/nowhere"}), "nowhere");
}

// A byte, a name or a value of a config file is changed: it is an error, or every entry means what it says and all
// others are as they were.
TEST(Options, AChangedConfigFileIsRefusedOrMeansWhatItSays) {
  TemporaryFolder folder;
  const std::string path = folder.path + "/c.toml", other = folder.path + "/other.toml";
  const std::string whole =
      parse({"-i", "data/*.bin", "-x", "7", "-s", "1", "--prompt", "a # b", "--layers", "3", "-o", "out"}).as_toml;
  std::mt19937 random(5);
  auto drawn = [&](size_t below) { return size_t(random() % below); };
  auto entries_of = [](const std::string& file) {
    std::map<std::string, std::string> entries;
    for (const ConfigEntry& entry : read_config_toml(file)) entries[entry.name] = entry.value;
    return entries;
  };
  auto same = [](const std::string& a, const std::string& b) {  // as text, or as numbers
    char *end_a, *end_b;
    const double x = strtod(a.c_str(), &end_a), y = strtod(b.c_str(), &end_b);
    return a == b || (*end_a == '\0' && *end_b == '\0' && x == y);
  };
  write_file(path, whole);
  const auto before = entries_of(path);
  int refused = 0, taken = 0;
  for (int i = 0; i < 1000; i++) {
    std::string text = whole;
    const size_t at = drawn(text.size());
    if (i % 3 == 0) text[at] = char(drawn(256));
    else if (i % 3 == 1) text.erase(at, 1 + drawn(3));
    else text.insert(at, std::string(1 + drawn(2), " =\"#-_.0179ex\n"[drawn(14)]));
    write_file(path, text);
    TrainOptions options;
    if (!error_of([&] { options = parse({"--config", path}); }).empty()) {
      refused++;
      continue;
    }
    taken++;
    write_file(other, options.as_toml);
    const auto said = entries_of(path), meant = entries_of(other);
    for (const auto& [name, value] : said) {
      const auto it = meant.find(name);
      EXPECT_TRUE(value.empty() || (it != meant.end() && same(it->second, value))) << name << " = " << value << " in\n"
                                                                                   << text;
    }
    for (const auto& entry : meant) {
      if (said.count(entry.first) == 0) { EXPECT_NE(before.find(entry.first), before.end()) << entry.first; }
    }
  }
  printf("%d of 1000 changed files were refused, %d were taken as they are\n", refused, taken);
  EXPECT_GT(refused, 300);
  EXPECT_GT(taken, 50);
}

TEST(Options, ANumberThatIsTooLargeIsRefused) {
  for (const char* option : {"--seed", "-x", "-d"}) {
    EXPECT_ERROR(parse({"-i", "x", option, "99999999999999999999"}), "99999999999999999999: is out of range");
    EXPECT_ERROR(parse({"-i", "x", option, "-99999999999999999999"}), "is out of range");
  }
  EXPECT_EQ(parse({"-i", "x", "--seed", "9223372036854775807"}).seed, INT64_MAX);
}

TEST(Options, ResumeIsAFlagOrLlmcsNumber) {
  EXPECT_FALSE(parse({"-i", "x"}).resume);
  EXPECT_TRUE(parse({"-i", "x", "-o", "out", "-y"}).resume);
  EXPECT_TRUE(parse({"-i", "x", "-y", "1", "-o", "out"}).resume);
  EXPECT_FALSE(parse({"-i", "x", "-y", "0"}).resume);
  EXPECT_ERROR(parse({"-i", "x", "-o", "out", "-y", "2"}), "-y 2");
  EXPECT_TRUE(parse({"-i", "x", "-o", "out", "--resume-from", "out/step_00000001"}).resume);
}

TEST(Options, WithoutAStepNeedNoTrainingData) {
  EXPECT_TRUE(parse({"-x", "0", "-s", "1"}).train_data.empty());
  EXPECT_ERROR(parse({"-x", "0", "-o", "out", "-y"}), "-y: resumes training; name its data with -i");
  EXPECT_ERROR(parse({"-x", "1"}), "no training data");
}

TEST(Options, ThatMakeNoSenseAreRefused) {
  EXPECT_ERROR(parse({}), "no training data");
  EXPECT_ERROR(parse({"-i", "x", "--colour"}), "--colour");
  EXPECT_ERROR(parse({"-i", "x", "-b", "many"}), "many");
  EXPECT_ERROR(parse({"-i", "x", "-b", "4.5"}), "4.5");
  EXPECT_ERROR(parse({"-i", "x", "-b", "0"}), "-b 0");
  EXPECT_ERROR(parse({"-i", "x", "-l", "1e-4x"}), "1e-4x");
  EXPECT_ERROR(parse({"-i", "x", "-l", "nan"}), "-l nan");
  EXPECT_ERROR(parse({"-i", "x", "-k", "cosin"}), "-k cosin");
  EXPECT_ERROR(parse({"-i", "x", "-x", "-1"}), "-x -1");
  EXPECT_ERROR(parse({"-i", "x", "--beta1", "1"}), "--beta1 1");
  EXPECT_ERROR(parse({"-i", "x", "--optimizer", "sgd"}), "--optimizer sgd: it must be adamw or muon");
  EXPECT_ERROR(parse({"-i", "x", "--momentum", "1"}), "--momentum 1");
  EXPECT_ERROR(parse({"-i", "x", "--temperature", "-1"}), "--temperature -1");
  EXPECT_ERROR(parse({"-i", "x", "-n", "5"}), "-n: checkpoints need a folder");
  EXPECT_ERROR(parse({"-i", "x", "--keep", "2"}), "--keep: checkpoints need a folder");
  EXPECT_ERROR(parse({"-i", "x", "-o", "out", "--keep", "-1"}), "--keep -1");
  EXPECT_ERROR(parse({"-i", "x", "-o", "out", "--keep-every", "100"}), "--keep-every: says which of those that --keep "
                                                                       "removes are kept");
  EXPECT_ERROR(parse({"-i", "x", "--resume-from", "out/step_00000001"}), "--resume-from: names a checkpoint in a "
                                                                         "folder");
  EXPECT_ERROR(parse({"-i", "x", "--max-bad-steps", "0"}), "--max-bad-steps 0");
  EXPECT_ERROR(parse({"-i", "x", "--config", "/nowhere.toml"}), "nowhere.toml");
}

// The trainer as its users meet it: a process with arguments, files and an exit status. Runs from the repository's root, where
// train_gpt2_sla_cpu, build/fp32/train_gpt2_sla_emu and build/fuzz_safetensors lie.
#include <gtest/gtest.h>          // TEST
#include <signal.h>               // kill, SIGKILL
#include <sys/wait.h>             // waitpid, WIFEXITED
#include <unistd.h>               // fork, execl, usleep, pipe
#include <cmath>                  // std::abs
#include <cstring>                // memcpy
#include <filesystem>             // create_directories, remove_all, directory_iterator
#include <fstream>                // std::ifstream, std::ofstream
#include <set>                    // std::set
#include <tuple>                  // std::tuple
#include "command_line.h"         // CommandLine, read_log, steps_of, shard_bytes
#include "golden_case.h"          // GoldenCase, read_golden_case
#include "llmc/random.h"          // random_words

static const std::string emulated_trainer = "build/fp32/train_gpt2_sla_emu ";

static const char small_model[] =
    " --layers 4 --heads 4 --channels 32 --vocab-size 257 --max-seq-len 32 -t 32 -b 2 -l 1e-3 ";

// ----------------------------------------------------------------------------
// Golden cases

class GoldenCommandLine : public CommandLine, public testing::WithParamInterface<std::tuple<std::string, std::string>> {};

TEST_P(GoldenCommandLine, TrainsAsTheIndependentImplementationDid) {
  const auto& [trainer, name] = GetParam();
  const GoldenCase g = read_golden_case(name);
  const int per_step = g.batch_size * g.seq_len * g.grad_accum_steps;
  const Outcome o = run(trainer + "-e " + g.folder + " -i " + g.folder + "/tokens.bin -j " + g.folder + "/tokens.bin -k constant " +
                        format("-b %d -t %d -d %d -x %d -l 1e-4 -c 0.1 -v %d -m %d -o %s", g.batch_size, g.seq_len, per_step,
                               g.steps, g.steps, g.num_micro_batches(), in("out").c_str()));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const std::vector<json> log = read_log(in("out"));
  ASSERT_TRUE(log.at(0).contains("run"));
  EXPECT_EQ(log.at(1).at("step"), 0);
  EXPECT_NEAR(log.at(1).at("val_loss").get<double>(), g.val_loss, 1e-5);
  const std::vector<json> steps = steps_of(log);
  ASSERT_EQ(int(steps.size()), g.steps);
  for (int i = 0; i < g.steps; i++) {
    EXPECT_EQ(steps[i].at("step"), i + 1);
    EXPECT_NEAR(steps[i].at("loss").get<double>(), g.losses[i], 1e-5);
    EXPECT_NEAR(steps[i].at("grad_norm").get<double>() / g.grad_norms[i], 1, 2e-5);
    EXPECT_DOUBLE_EQ(steps[i].at("lr").get<double>(), 1e-4);
  }
}

INSTANTIATE_TEST_SUITE_P(Case, GoldenCommandLine,
                         testing::Combine(testing::Values(trainer, emulated_trainer), testing::ValuesIn(golden_case_names())),
                         [](const auto& info) {
                           const bool emulated = std::get<0>(info.param) == emulated_trainer;
                           return std::get<1>(info.param) + (emulated ? "_on_the_emulated_gpu" : "_on_the_cpu");
                         });

// ----------------------------------------------------------------------------
// One graph, two sets of operations

TEST_F(CommandLine, TheCpuAndTheEmulatedGpuTrainAlike) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string arguments = "-i " + in("tokens.bin") + small_model + "-d 128 -u 3 --shuffle -x 20 -o ";
  ASSERT_EQ(run(trainer + arguments + in("cpu")).exit_status, 0);
  const Outcome o = run(emulated_trainer + arguments + in("emulated"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const std::vector<json> cpu = steps_of(read_log(in("cpu"))), emulated = steps_of(read_log(in("emulated")));
  ASSERT_EQ(cpu.size(), 20u);
  ASSERT_EQ(emulated.size(), 20u);
  EXPECT_LT(cpu.back().at("loss").get<double>(), cpu.front().at("loss").get<double>() - 0.03);  // it learns
  for (size_t i = 0; i < cpu.size(); i++)
    EXPECT_NEAR(cpu[i].at("loss").get<double>(), emulated[i].at("loss").get<double>(), 1e-5) << "step " << i + 1;
}

TEST_F(CommandLine, HeadsThatTheGpusAttentionDoesNotTakeAreRefused) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  for (const char* shape : {"--channels 20 --heads 4", "--channels 272 --heads 2"}) {
    const Outcome o = run(emulated_trainer + "-i " + in("tokens.bin") + " -t 32 --layers 2 --vocab-size 257 " + shape);
    EXPECT_EQ(o.exit_status, 1);
    EXPECT_NE(o.err.find("multiple of 8 and at most 128"), std::string::npos) << o.err;
  }
}

TEST_F(CommandLine, Tf32IsRefusedWhereThereIsNone) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  expect_error("-i " + in("tokens.bin") + small_model + "--tf32", {"--tf32", "CPU"});
}

// ----------------------------------------------------------------------------
// Resuming

TEST_F(CommandLine, AResumedRunHasTheBitsOfAnUninterruptedOne) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string common = trainer + "-i " + in("tokens.bin") + small_model + "-d 128 -u 3 --shuffle -x 10 -n 5 ";
  ASSERT_EQ(run(common + "-o " + in("whole")).exit_status, 0);
  fs::create_directories(in("half"));
  fs::copy(in("whole/step_00000005"), in("half/step_00000005"), fs::copy_options::recursive);
  fs::copy(in("whole/log.jsonl"), in("half/log.jsonl"));  // with steps that the resumed run will take again
  const Outcome o = run(common + "-y -o " + in("half"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  EXPECT_NE(o.out.find("at step 5 of 10"), std::string::npos) << o.out;
  for (const char* file : {"model.safetensors", "optimizer.safetensors", "state.json", "config.json"})
    EXPECT_EQ(read_file(in("whole/step_00000010/") + file), read_file(in("half/step_00000010/") + file)) << file;
  EXPECT_EQ(steps_of(read_log(in("whole"))), steps_of(read_log(in("half"))));
  EXPECT_EQ(steps_of(read_log(in("half"))).size(), 10u);
}

TEST_F(CommandLine, KilledAtAnyMomentOfWritingItResumesFromTheLastCompleteCheckpoint) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const int steps = 1000000, kills = 50;
  const std::string common = trainer + "-i " + in("tokens.bin") + small_model + "-k constant -n 1 ";
  int64_t last = 0;
  int unfinished = 0;
  for (int i = 0; i < kills; i++) {
    int out[2];
    ASSERT_EQ(pipe(out), 0);
    const pid_t child = fork();
    if (child == 0) {
      dup2(out[1], STDOUT_FILENO);
      close(out[0]), close(out[1]);
      execl("/bin/sh", "sh", "-c", ("exec " + common + format("-x %d -y -o ", steps) + in("out")).c_str(), (char*)nullptr);
      _exit(127);
    }
    close(out[1]);
    FILE* lines = fdopen(out[0], "r");
    char line[1024];
    std::string text;
    // The first step done, its checkpoint begins; with a checkpoint a step most of the time goes into writing them.
    while (fgets(line, sizeof line, lines)) {
      text += line;
      if (strncmp(line, "step ", 5) == 0) break;
    }
    ASSERT_NE(text.find("step "), std::string::npos) << text;
    const std::string resumed = last > 0 ? format("at step %lld of", (long long)last) : "";
    EXPECT_NE(text.find(resumed), std::string::npos) << text;
    usleep(random_words(5, RandomStream::test, 0, uint64_t(i)).word[0] % 40000);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    fclose(lines);
    last = 0;
    for (const auto& entry : fs::directory_iterator(in("out"))) {
      const std::string name = entry.path().filename();
      if (name.rfind("step_", 0) == 0) last = std::max<int64_t>(last, std::stoll(name.substr(5)));
      unfinished += name.rfind("unfinished_", 0) == 0;
    }
  }
  EXPECT_GE(unfinished, kills / 5) << "too few kills fell into the writing of a checkpoint for this to mean much";
  ASSERT_GT(last, 0);
  // What survived 50 kills is what an undisturbed run computes.
  const std::string end = format("-x %lld ", (long long)last + 3);
  ASSERT_EQ(run(common + end + "-y -o " + in("out")).exit_status, 0);
  ASSERT_EQ(run(common + end + "-o " + in("undisturbed")).exit_status, 0);
  const std::string final_folder = format("/step_%08lld/", (long long)last + 3);
  for (const char* file : {"model.safetensors", "optimizer.safetensors", "state.json"})
    EXPECT_EQ(read_file(in("out") + final_folder + file), read_file(in("undisturbed") + final_folder + file)) << file;
  EXPECT_EQ(steps_of(read_log(in("out"))), steps_of(read_log(in("undisturbed"))));
}

TEST_F(CommandLine, ResumingAsAnotherRunIsRefused) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  write_file(in("other.bin"), shard_bytes(10000));
  const std::string same = small_model + std::string("-x 4 -o ") + in("out");
  ASSERT_EQ(run(trainer + "-i " + in("tokens.bin") + same).exit_status, 0);
  const std::string before = read_file(in("out/log.jsonl"));
  auto refused = [&](const std::string& arguments, const char* part) {
    const Outcome o = run(trainer + arguments);
    EXPECT_EQ(o.exit_status, 1) << arguments;
    EXPECT_NE(o.err.find(part), std::string::npos) << o.err;
    EXPECT_EQ(read_file(in("out/log.jsonl")), before);
  };
  refused("-i " + in("tokens.bin") + same, "holds the checkpoints of an earlier run");
  refused("-y -i " + in("other.bin") + same, "training data (-i)");
  refused("-y --seed 8 -i " + in("tokens.bin") + same, "seed (--seed)");
  refused("-y --shuffle -i " + in("tokens.bin") + same, "--shuffle");
  refused("-y --skip-heads 1 -i " + in("tokens.bin") + same, "of another model");
  refused("-y -i " + in("tokens.bin") + same + " -x 3", "-x");
  refused("-y -i " + in("tokens.bin") + same + " -t 16", "-t");
}

// ----------------------------------------------------------------------------
// Options and outputs

TEST_F(CommandLine, ARunFromItsOwnConfigTomlIsTheSameRun) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  ASSERT_EQ(run(trainer + "-i " + in("tokens.bin") + small_model + "-k linear -q 0.1 -x 5 -o " + in("a")).exit_status, 0);
  ASSERT_EQ(run(trainer + "--config " + in("a/config.toml") + " -o " + in("b")).exit_status, 0);
  EXPECT_EQ(steps_of(read_log(in("a"))), steps_of(read_log(in("b"))));
  EXPECT_EQ(read_file(in("a/step_00000005/model.safetensors")), read_file(in("b/step_00000005/model.safetensors")));
}

TEST_F(CommandLine, HelpListsEveryOptionAndSucceeds) {
  const Outcome o = run(trainer + "--help");
  EXPECT_EQ(o.exit_status, 0);
  for (const char* option :
       {"-i,", "-j,", "-e,", "-o,", "-b,", "-t,", "-d,", "-x,", "-k,", "-l,", "-u,", "-q,", "-c,", "-v,", "-m,", "-s,", "-g,", "-n,",
        "-y,", "--config", "--skip-layers", "--skip-heads", "--no-bias", "--layers", "--heads", "--channels", "--vocab-size",
        "--max-seq-len", "--seed", "--shuffle", "--grad-clip", "--beta1", "--beta2", "--eps"})
    EXPECT_NE(o.out.find(option), std::string::npos) << option;
}

TEST_F(CommandLine, ShowsShapeWiringParametersAndMemoryBeforeItTrains) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  const Outcome o = run(trainer + "-i " + in("tokens.bin") + small_model + "-x 1");
  ASSERT_EQ(o.exit_status, 0) << o.err;
  size_t at = 0;
  for (const char* part : {"model: 4 layers, 4 heads of 8, 32 channels", "3 |  .  0  0  0 | projects 1 of 4", "parameters: ",
                           "memory plan for B 2, T 32", "weights", "total", "the largest micro-batch that fits", "step 1/1 | loss "}) {
    at = o.out.find(part, at);
    ASSERT_NE(at, std::string::npos) << part << "\n" << o.out;
  }
}

TEST_F(CommandLine, ACheckpointIsAModelToStartFromAndNoStepsOnlyValidate) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string data = "-i " + in("tokens.bin") + " -j " + in("tokens.bin") + " -b 2 -t 32 -m 5 ";
  ASSERT_EQ(run(trainer + data + small_model + "--no-bias -x 4 -v 4 -o " + in("a")).exit_status, 0);
  const Outcome o = run(trainer + data + "-e " + in("a/step_00000004") + " -x 0 -o " + in("b"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const auto a = read_log(in("a")), b = read_log(in("b"));
  EXPECT_EQ(a.back().at("step"), 4);
  EXPECT_EQ(b.back().at("step"), 0);
  EXPECT_EQ(a.back().at("val_loss"), b.back().at("val_loss"));
}

TEST_F(CommandLine, SamplesAreTextAndTheSameAgain) {
  write_file(in("tokens.bin"), shard_bytes(20000, 90));
  const std::string command = trainer + "-i " + in("tokens.bin") + small_model + "-x 2 -s 2 -g 32";
  const Outcome a = run(command), b = run(command);
  const size_t at = a.out.find("--- sample after step 2\n");
  ASSERT_NE(at, std::string::npos) << a.out;
  EXPECT_EQ(a.out.substr(at, 60), b.out.substr(b.out.find("--- sample"), 60));
}

// ----------------------------------------------------------------------------
// Bad input

TEST_F(CommandLine, BadDataIsRefusedWithItsName) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  const std::string model = small_model;
  expect_error("-i " + in("nothing.bin") + model, {"nothing.bin: no such file"});
  expect_error("-i '" + in("none_*.bin") + "'" + model, {"none_*.bin: no file matches"});
  expect_error("-i " + folder + model, {"is a folder"});
  std::string bad = shard_bytes(2000);
  bad[0] ^= 1;
  write_file(in("magic.bin"), bad);
  expect_error("-i " + in("magic.bin") + model, {"magic.bin", "bad magic"});
  write_file(in("short.bin"), shard_bytes(2000).substr(0, 3000));
  expect_error("-i " + in("short.bin") + model, {"short.bin: truncated"});
  write_file(in("few.bin"), shard_bytes(32));
  expect_error("-i " + in("few.bin") + model, {"few.bin", "a window needs T + 1 = 33"});
  write_file(in("large.bin"), shard_bytes(2000, 300));
  expect_error("-i " + in("large.bin") + model, {"large.bin: token", "outside the vocabulary of 257"});
  expect_error("-i " + in("tokens.bin") + " -j " + in("nothing.bin") + model, {"nothing.bin: no such file"});
  write_file(in("one.bin"), shard_bytes(40));
  expect_error("-i " + in("tokens.bin") + " -j " + in("one.bin") + model, {"one.bin: has 1 windows"});
}

TEST_F(CommandLine, BadModelsAreRefusedWithTheTensorsName) {
  const std::string golden = "dev/test/golden/adjacent", data = "-i " + golden + "/tokens.bin -b 2 -t 32 -e ";
  expect_error(data + in("nowhere"), {"neither a preset", "nor a folder"});
  fs::create_directories(in("model"));
  expect_error(data + in("model"), {"config.json: cannot be read"});
  const std::string config = read_file(golden + "/config.json"), weights = read_file(golden + "/model.safetensors");
  write_file(in("model/config.json"), config);
  expect_error(data + in("model"), {"model.safetensors"});
  write_file(in("model/model.safetensors"), weights.substr(0, weights.size() - 10));
  expect_error(data + in("model"), {"model.safetensors"});
  write_file(in("model/model.safetensors"), weights.substr(0, 100));
  expect_error(data + in("model"), {"model.safetensors", "header"});
  std::string lie = weights;
  const uint64_t length = ~0ull;
  memcpy(lie.data(), &length, 8);
  write_file(in("model/model.safetensors"), lie);
  expect_error(data + in("model"), {"model.safetensors", "header"});
  write_file(in("model/model.safetensors"), weights);
  json other = json::parse(config);
  other["n_positions"] = 33;
  write_file(in("model/config.json"), other.dump());
  expect_error(data + in("model"), {"wpe.weight has shape (32, 64); by its config.json it is (33, 64)"});
  write_file(in("model/config.json"), config.substr(0, 50));
  expect_error(data + in("model"), {"config.json: not a JSON object"});
}

TEST_F(CommandLine, ImpossibleRunsAreRefused) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  const std::string with = "-i " + in("tokens.bin") + small_model;
  expect_error(with + "-t 33", {"-t 33", "32 positions"});
  expect_error(with + "-d 100", {"-d 100 is not a multiple of B * T = 2 * 32"});
  expect_error(with + "--skip-layers 0", {"--skip-layers 0"});
  expect_error(with + "--skip-heads 5", {"--skip-heads 5", "4 heads"});
  expect_error(with + "--channels 33", {"4 heads do not divide 33 channels"});
  expect_error(with + "--colour red", {"--colour"});
  expect_error(with + "-x many", {"many"});
  expect_error(with + "-l 1e-3e", {"1e-3e"});
  expect_error(with + "-s 1 -g 33", {"-g 33"});
  expect_error(with + "-b 100000000", {"exceeds the free memory by"});
  expect_error(with + "-y 7", {"-y 7"});
  expect_error(with + "-r 4", {"-r 4", "between 0 and 3"});
}

TEST_F(CommandLine, AnOutputThatCannotBeWrittenIsAnError) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  write_file(in("file"), "");
  const std::string with = trainer + "-i " + in("tokens.bin") + small_model + "-x 2 -o ";
  for (const std::string& out : {in("file"), in("file/below"), std::string("/proc/nowhere")}) {
    const Outcome o = run(with + out);
    EXPECT_EQ(o.exit_status, 1);
    EXPECT_NE(o.err.find("error: " + out), std::string::npos) << o.err;
  }
}

TEST_F(CommandLine, AFullOutputLosesNothingThatWasComplete) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string with = trainer + "-i " + in("tokens.bin") + small_model + "-k constant -n 2 -y -o " + in("out");
  ASSERT_EQ(run(with + " -x 2").exit_status, 0);
  const std::string complete = read_file(in("out/step_00000002/optimizer.safetensors"));
  // No file may grow beyond 64 blocks of 1 KiB: to the program, a full disk.
  const Outcome o = run("bash -c \"trap '' XFSZ; ulimit -f 64; exec " + with + " -x 4\"");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("error: " + in("out")), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("File too large"), std::string::npos) << o.err;
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(in("out"))) names.insert(entry.path().filename());
  EXPECT_EQ(names, (std::set<std::string>{"config.toml", "log.jsonl", "step_00000002"}));
  EXPECT_EQ(read_file(in("out/step_00000002/optimizer.safetensors")), complete);
  EXPECT_EQ(run(with + " -x 4").exit_status, 0) << "and goes on when there is room";
}

TEST_F(CommandLine, ARunThatDivergesStopsAndKeepsItsLastCheckpoint) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string with = trainer + "-i " + in("tokens.bin") + small_model + "-k constant -y -o " + in("out");
  ASSERT_EQ(run(with + " -x 2").exit_status, 0);
  const Outcome o = run(with + " -x 200 -n 1000 -l 1000 --grad-clip 0 -c 1000");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("training stops before the weights take harm"), std::string::npos) << o.err;
  EXPECT_TRUE(fs::exists(in("out/step_00000002/state.json")));
  EXPECT_FALSE(fs::exists(in("out/step_00000200")));
}

TEST(Fuzzer, FindsNothingInAFewSeconds) {
  EXPECT_EQ(system("build/fuzz_safetensors 5 1 >/dev/null"), 0);
}

// The trainer as its users meet it: a process with arguments, files and an exit status. Runs from the repository's
// root, where build/fp32/train_gpt2_sla_cpu, build/fp32/train_gpt2_sla_emu and build/fuzz_safetensors lie.
#include <gtest/gtest.h>           // TEST
#include <signal.h>                // kill, SIGKILL
#include <sys/wait.h>              // waitpid, WIFEXITED
#include <unistd.h>                // fork, usleep, pipe
#include <cmath>                   // std::abs
#include <cstring>                 // memcpy
#include <filesystem>              // create_directories, remove_all, directory_iterator
#include <fstream>                 // std::ifstream, std::ofstream
#include <set>                     // std::set
#include <sstream>                 // std::istringstream
#include <tuple>                   // std::tuple
#include "child.h"                 // become
#include "command_line.h"          // CommandLine, read_log, steps_of, shard_bytes
#include "golden_case.h"           // GoldenCase, read_golden_case
#include "llmc/run/stop_signal.h"  // signal_name
#include "llmc/utils/random.h"     // random_words
#include "llmc/io/safetensors.h"   // SafetensorsFile
#include "llmc/text/tokenizer.h"   // Tokenizer, printable

static const std::string alone = "env OMP_NUM_THREADS=1 ";  // threads that wait for each other are slow where others
                                                            // run too
static const std::string emulated_trainer = "build/fp32/train_gpt2_sla_emu ";

static const char small_model[] = " --layers 4 --heads 4 --channels 32 --vocab-size 257 --max-seq-len 32 -t 32 -b 2 -l "
                                  "1e-3 ";

// ----------------------------------------------------------------------------
// Golden cases

class GoldenCommandLine :
    public CommandLine,
    public testing::WithParamInterface<std::tuple<std::string, std::string>> {};

TEST_P(GoldenCommandLine, TrainsAsTheIndependentImplementationDid) {
  const auto& [trainer, name] = GetParam();
  const GoldenCase g = read_golden_case(name);
  const int per_step = g.batch_size * g.seq_len * g.grad_accum_steps;
  const Outcome o =
      run(trainer + "-e " + g.folder + " -i " + g.folder + "/tokens.bin -j " + g.folder + "/tokens.bin -k constant " +
          format("-b %d -t %d -d %d -x %d -l 1e-4 -c 0.1 -v %d -m %d -o %s", g.batch_size, g.seq_len, per_step, g.steps,
                 g.steps, g.num_micro_batches(), in("out").c_str()));
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
                         testing::Combine(testing::Values(trainer, emulated_trainer),
                                          testing::ValuesIn(golden_case_names())),
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

// BUG train_gpt2_sla.cu: `run.schedule(run.step + 1)` -> `run.schedule(run.step + 1 - run.first_step)`
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
  expect_the_same_checkpoint(in("whole"), in("half"), 10);
  EXPECT_EQ(steps_of(read_log(in("whole"))), steps_of(read_log(in("half"))));
  EXPECT_EQ(steps_of(read_log(in("half"))).size(), 10u);
}

// Runs `command` until it has printed a line that begins with `line`; *text is what it printed until then. Returns its
// process.
static pid_t start_until(const std::string& command, const char* line, const std::string& err, std::string* text,
                         FILE** out) {
  int ends[2];
  if (pipe(ends) != 0) abort();
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    close(ends[0]), close(ends[1]);
    become(command + " 2>'" + err + "'");
  }
  close(ends[1]);
  *out = fdopen(ends[0], "r");
  char buffer[1024];
  text->clear();
  while (fgets(buffer, sizeof buffer, *out)) {
    *text += buffer;
    if (strncmp(buffer, line, strlen(line)) == 0) break;
  }
  return child;
}

// The rest of what it prints; *status as waitpid has it.
static std::string finish(pid_t child, FILE* out, int* status) {
  std::string text;
  for (int c; (c = fgetc(out)) != EOF;) text += char(c);
  fclose(out);
  waitpid(child, status, 0);
  return text;
}

// BUG llmc/io/checkpoint.cpp: `folder_in(out, unfinished_prefix, step), folder` -> `folder_in(out, "step_", step),
// folder`
TEST_F(CommandLine, KilledWhileWritingItResumesFromTheLastCompleteCheckpoint) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const int steps = 1000000, kills = 50;
  const std::string common = alone + trainer + "-i " + in("tokens.bin") + small_model + "-k constant -n 1 ";
  int64_t last = 0;
  int unfinished = 0;
  for (int i = 0; i < kills; i++) {
    std::string text;
    FILE* lines;
    // The first step done, its checkpoint begins; with a checkpoint a step most of the time goes into writing them.
    const pid_t child =
        start_until(common + format("-x %d -y -o ", steps) + in("out"), "step ", in("err"), &text, &lines);
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
  expect_the_end_of_an_undisturbed_run(common, last + 3);
  EXPECT_EQ(logged_checkpoints(read_log(in("out"))), logged_checkpoints(read_log(in("undisturbed")))) << "one line "
                                                                                                         "each";
}

// A step takes a second, and a checkpoint is complete long before its end, when its line is written.
TEST_F(CommandLine, KilledBeforeItsLogLineACheckpointHasOneAfterResuming) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string common = alone + trainer + "-i " + in("tokens.bin") + small_model + "-k constant -n 1 ";
  ASSERT_EQ(run(common + "-x 2 -o " + in("out")).exit_status, 0);
  const pid_t child = fork();
  if (child == 0) become(common + "-d 128000 -x 1000000 -y -o " + in("out") + " >'" + in("stdout") + "' 2>&1");
  while (!fs::exists(in("out/step_00000003")) && waitpid(child, nullptr, WNOHANG) == 0) usleep(1000);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  ASSERT_TRUE(fs::exists(in("out/step_00000003"))) << read_file(in("stdout"));
  EXPECT_EQ(logged_checkpoints(read_log(in("out"))), (std::multiset<int64_t>{1, 2})) << "the kill came between the two";
  // The line of another one that lies beside it is missing too.
  std::string log = read_file(in("out/log.jsonl"));
  const size_t line = log.find("{\"step\":1,\"checkpoint\"");
  log.erase(line, log.find('\n', line) + 1 - line);
  write_file(in("out/log.jsonl"), log);
  const Outcome o = run(common + "-x 4 -y -o " + in("out"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  EXPECT_EQ(logged_checkpoints(read_log(in("out"))), (std::multiset<int64_t>{1, 2, 3, 4}));
  for (const json& saved : read_log(in("out"))) {
    if (!saved.contains("checkpoint")) continue;
    EXPECT_TRUE(fs::equivalent(saved.at("checkpoint").get<std::string>(),
                               in(format("out/step_%08d", saved.at("step").get<int>()))));
  }
}

TEST_F(CommandLine, StoppedOrKilledARunEndsWithTheSameBits) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string common = alone + trainer + "-i " + in("tokens.bin") + small_model +
                             "-k constant --shuffle -d 128 -n 3 --keep 2 --keep-every 50 ";
  const int signals[] = {SIGTERM, SIGKILL, SIGINT, SIGHUP, SIGUSR1};
  int64_t last = 0;
  for (int i = 0; i < 30; i++) {
    std::string text;
    FILE* out;
    const pid_t child = start_until(common + "-x 1000000 -y -o " + in("out"), "step ", in("err"), &text, &out);
    EXPECT_NE(text.find(last > 0 ? format("at step %lld of", (long long)last) : ""), std::string::npos) << text;
    const auto random = random_words(7, RandomStream::test, 1, uint64_t(i));
    usleep(random.word[0] % 30000);
    const int signal = signals[i % 5];
    kill(child, signal);
    usleep(random.word[1] % 2000);
    if (i % 2 == 0) kill(child, signal);  // the same one, as it comes from who signals a process and its group
    int status;
    text += finish(child, out, &status);
    last = 0;
    for (const std::string& name : names_in(in("out")))
      if (name.rfind("step_", 0) == 0) last = std::max<int64_t>(last, std::stoll(name.substr(5)));
    if (signal == SIGKILL) {
      EXPECT_TRUE(WIFSIGNALED(status));
      continue;
    }
    ASSERT_TRUE(WIFEXITED(status)) << "died of signal " << WTERMSIG(status) << "\n" << text << read_file(in("err"));
    EXPECT_EQ(WEXITSTATUS(status), 128 + signal) << text << read_file(in("err"));
    const char* name = signal_name(signal);
    EXPECT_NE(text.find(format("stopped by %s after step %lld of 1000000; -y resumes\n", name, (long long)last)),
              std::string::npos)
        << text.substr(text.size() - std::min<size_t>(text.size(), 400)) << " but the last checkpoint is of step "
        << last;
    const std::vector<json> steps = steps_of(read_log(in("out")));
    ASSERT_FALSE(steps.empty());
    EXPECT_EQ(steps.back()["step"], last) << "the step that was saved is the last one";
  }
  expect_the_end_of_an_undisturbed_run(common, last + 4);
  for (const std::string& name : names_in(in("out")))
    EXPECT_TRUE(name.rfind("step_", 0) == 0 || name == "config.toml" || name == "lock" || name == "log.jsonl" ||
                name == "report.html")
        << name;
}

// BUG llmc/run/stop_signal.h: `for (int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1}) {` -> `for (int signal : {SIGTERM,
// SIGINT, SIGUSR1}) {` Pairs of processes that resume in the same folder, started up to 0.3 s apart; the one that
// trains is then killed.
TEST_F(CommandLine, OneProcessTrainsInAFolderAndOthersAreRefused) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string common = alone + trainer + "-i " + in("tokens.bin") + small_model + "-k constant -n 3 --keep 2 ";
  const std::string to_a_kill = "timeout -s KILL 2 " + common + "-x 1000000 -y -o " + in("out");
  int64_t last = 0;
  for (int i = 0; i < 8; i++) {
    const unsigned delay = random_words(11, RandomStream::test, 1, uint64_t(i)).word[0] % 300;
    auto started = [&](const char* name, unsigned ms) {
      return format("(sleep 0.%03u; %s >%s 2>%s; echo $? >%s) & ", ms, to_a_kill.c_str(),
                    in(std::string(name) + ".out").c_str(), in(std::string(name) + ".err").c_str(),
                    in(std::string(name) + ".status").c_str());
    };
    run(started("a", 0) + started("b", i == 0 ? 0 : delay) + "wait");
    const bool a_trained = read_file(in("a.status")) == "137\n";
    const std::string refused = a_trained ? "b" : "a", trained = a_trained ? "a" : "b";
    EXPECT_EQ(read_file(in(trained + ".status")), "137\n") << read_file(in(trained + ".err"));
    EXPECT_EQ(read_file(in(refused + ".status")), "1\n");
    const std::string message = read_file(in(refused + ".err"));
    EXPECT_EQ(message.find("error: -o " + in("out") + ": is in use by process "), 0u) << message;
    EXPECT_EQ(read_file(in(refused + ".out")).find("step "), std::string::npos) << "it trained";
    const int64_t before = last;
    for (const std::string& name : names_in(in("out")))
      if (name.rfind("step_", 0) == 0) last = std::max<int64_t>(last, std::stoll(name.substr(5)));
    EXPECT_GT(last, before);
  }
  expect_the_end_of_an_undisturbed_run(common, last + 4);
}

TEST_F(CommandLine, ASecondSignalLeavesAtOnce) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  // A step of twenty thousand micro-batches, many seconds long.
  const std::string command = trainer + "-i " + in("tokens.bin") + " -j " + in("tokens.bin") + small_model +
                              "-m 1 -x 2 -d 1280000 -o " + in("out");
  std::string text;
  FILE* out;
  const pid_t child = start_until(command, "val loss", in("err"), &text, &out);
  usleep(300000);  // it has begun the step, which a signal before it would have kept from beginning
  kill(child, SIGUSR1);
  for (int i = 0; i < 1000 && read_file(in("err")).empty(); i++) usleep(1000);
  EXPECT_EQ(read_file(in("err")), "\nstopping after this step; a second signal stops at once\n");
  usleep(1100000);
  kill(child, SIGTERM);
  int status;
  text += finish(child, out, &status);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGTERM);
  EXPECT_EQ(text.find("step 1/2"), std::string::npos) << text;
  EXPECT_EQ(names_in(in("out")), (std::set<std::string>{"config.toml", "lock", "log.jsonl", "report.html"}));
}

TEST_F(CommandLine, SignalsStopARunWithoutAFolderUnlessIgnored) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string command = trainer + "-i " + in("tokens.bin") + small_model + "-k constant -x 1000000";
  std::string text;
  FILE* out;
  const pid_t child = start_until("env --ignore-signal=INT " + command, "step ", in("err"), &text, &out);
  kill(child, SIGINT);
  usleep(50000);
  kill(child, SIGTERM);
  int status;
  text += finish(child, out, &status);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGTERM);
  EXPECT_NE(text.find("stopped by SIGTERM after step "), std::string::npos);
}

TEST_F(CommandLine, CheckpointsAreKeptAsAskedAndTimed) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const Outcome o =
      run(trainer + "-i " + in("tokens.bin") + small_model + "-x 23 -n 2 --keep 2 --keep-every 8 -o " + in("out"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  EXPECT_EQ(names_in(in("out")),
            (std::set<std::string>{"config.toml", "lock", "log.jsonl", "report.html", "step_00000008", "step_00000016",
                                   "step_00000022", "step_00000023"}));
  EXPECT_NE(o.out.find("copy for checkpoints"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("saved " + in("out/step_00000002") + " (training waited 0."), std::string::npos) << o.out;
  std::vector<int64_t> saved;
  for (const json& line : read_log(in("out"))) {
    if (!line.contains("checkpoint")) continue;
    saved.push_back(line.at("step"));
    EXPECT_GT(line.at("stall_ms").get<double>(), 0);
    EXPECT_GT(line.at("write_ms").get<double>(), 0);
  }
  EXPECT_EQ(saved, (std::vector<int64_t>{2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 23}));
}

TEST_F(CommandLine, AFlippedByteIsRefusedAndAnOlderCheckpointTaken) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string common = trainer + "-i " + in("tokens.bin") + small_model + "-k constant -x 8 ",
                    with = common + "-o " + in("out");
  ASSERT_EQ(run(common + "-n 2 -o " + in("whole")).exit_status, 0);
  auto begin_anew = [&] {
    fs::remove_all(in("out"));
    fs::create_directories(in("out"));
    for (const char* name : {"/step_00000002", "/step_00000004", "/step_00000006", "/log.jsonl"})
      fs::copy(in("whole") + name, in("out") + name, fs::copy_options::recursive);
  };
  auto flip = [&](const std::string& path, uint64_t at) {
    std::string bytes = read_file(path);
    bytes[at % bytes.size()] ^= 16;
    write_file(path, bytes);
  };
  for (const char* file :
       {"config.json", "model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json"}) {
    for (int i = 0; i < 6; i++) {
      begin_anew();
      const std::string path = in("out/step_00000006/") + file;
      const auto random = random_words(3, RandomStream::test, 2, uint64_t(i));
      flip(path, i == 0 ? 0 : i == 1 ? fs::file_size(path) - 1 : random.word[0]);
      const Outcome o = run(with + " -y");
      EXPECT_EQ(o.exit_status, 1);
      EXPECT_EQ(o.err.compare(0, 7 + path.size(), "error: " + path), 0) << o.err;
      EXPECT_NE(o.err.find("resume from it with --resume-from " + in("out/step_00000004\n")), std::string::npos)
          << o.err;
      EXPECT_EQ(names_in(in("out")).size(), 5u) << "nothing was changed";
      const bool in_a_tensor = i == 1 && path.find(".safetensors") != std::string::npos;
      EXPECT_NE(o.err.find(in_a_tensor ? "tensor ln_f.bias" : ""), std::string::npos) << o.err;
    }
  }
  flip(in("out/step_00000004/model.safetensors"), 5000);
  Outcome o = run(with + " -y");
  EXPECT_NE(o.err.find("--resume-from " + in("out/step_00000002")), std::string::npos)
      << "that is the newest whole one: " << o.err;
  o = run(with + " --resume-from " + in("out/step_00000004"));
  EXPECT_EQ(o.exit_status, 1) << "it is not taken blindly";
  EXPECT_NE(run(with + " --resume-from " + in("whole/step_00000004")).err.find("is not a checkpoint in " + in("out")),
            std::string::npos);

  o = run(with + " -n 2 --resume-from " + in("out/step_00000002"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  EXPECT_NE(o.out.find("set aside: " + in("out/set_aside_step_00000006")), std::string::npos) << o.out;
  for (const char* file : {"/step_00000008/model.safetensors", "/step_00000006/optimizer.safetensors"})
    EXPECT_EQ(read_file(in("out") + file), read_file(in("whole") + file)) << file;
  EXPECT_EQ(steps_of(read_log(in("out"))), steps_of(read_log(in("whole"))));

  for (int step = 2; step <= 8; step += 2) flip(in("out") + format("/step_%08d/state.json", step), 77);
  EXPECT_NE(run(with + " -y").err.find("there is no older checkpoint in " + in("out")), std::string::npos);
}

TEST_F(CommandLine, ResumingWithAnotherRateOrBatchIsSaid) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string with = alone + trainer + "-i " + in("tokens.bin") + small_model + "-y -o " + in("out"),
                    warning = "warning: -y: " + in("out");
  EXPECT_EQ(run(with + " -x 2").err, "");
  EXPECT_EQ(run(with + " -x 3").err, "");
  EXPECT_EQ(run(with + " -x 4 -l 2e-3 -b 4 -d 128").err, warning +
                                                             "/step_00000003 was trained with a peak learning rate of "
                                                             "0.001 (-l); training continues with 0.002\n" +
                                                             warning +
                                                             "/step_00000003 was trained with 64 tokens in an update "
                                                             "(-d, or -b * -t); training continues with 128\n");
  EXPECT_EQ(run(with + " -x 5 -l 2e-3 -d 128").err, "") << "another micro-batch is the same update";
  EXPECT_EQ(run(with + " -x 6 -d 128").err, warning + "/step_00000005 was trained with a peak learning rate of 0.002 "
                                                      "(-l); training continues "
                                                      "with 0.001\n");
}

TEST_F(CommandLine, WhatIsNotUsedIsSaid) {
  write_file(in("train_a.bin"), shard_bytes(20000));
  write_file(in("train_b.bin"), shard_bytes(33));  // one sequence of T + 1
  const std::string with =
      alone + trainer + "-i '" + in("train_*.bin") + "' -j '" + in("val_*.bin") + "'" + small_model;
  write_file(in("val_a.bin"), shard_bytes(2000));
  EXPECT_EQ(run(with + "-x 10 -u 10").err, "");
  write_file(in("train_c.bin"), shard_bytes(32));
  write_file(in("train_d.bin"), shard_bytes(2));
  write_file(in("val_b.bin"), shard_bytes(32));
  const std::string unused = "warning: -i " + in("train_*.bin") +
                             ": 2 of 4 files are not used, for they have fewer than 33 tokens: " + in("train_c.bin") +
                             ", ...\n";
  EXPECT_EQ(run(with + "-x 2").err,
            unused + "warning: -j " + in("val_*.bin") +
                ": 1 of 2 files are not used, for they have fewer than 33 tokens: " + in("val_b.bin") + "\n");
  EXPECT_EQ(run(with + "-x 2 -m 0").err, unused) << "-m 0 takes all of the data";
  write_file(in("val_b.bin"), shard_bytes(1));
  EXPECT_EQ(run(with + "-x 2 -m 0").err,
            unused + "warning: -j " + in("val_*.bin") +
                ": 1 of 2 files are not used, for they have fewer than 2 tokens: " + in("val_b.bin") + "\n");
  fs::remove(in("train_c.bin")), fs::remove(in("train_d.bin")), fs::remove(in("val_b.bin"));
  EXPECT_EQ(run(with + "-x 10 -u 11").err, "warning: -u 11: the warm-up is longer than the run, which has 10 steps; "
                                           "the learning rate only reaches 0.000909091 of -l 0.001\n");
}

// BUG llmc/run/run.cpp: `saved.muon == now.muon` -> `true`
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
  refused("-y --optimizer muon -i " + in("tokens.bin") + same, "optimizer (--optimizer)");
  refused("-y --skip-heads 1 -i " + in("tokens.bin") + same, "of another model");
  refused("-y --wiring 'window(5)' -i " + in("tokens.bin") + same, "its wiring is sla(3,3), the options' is window(5)");
  refused("-y -i " + in("tokens.bin") + same + " -x 3", "-x");
  refused("-y -i " + in("tokens.bin") + same + " -t 16", "-t");
}

// ----------------------------------------------------------------------------
// Options and outputs

TEST_F(CommandLine, ARunFromItsConfigTomlIsTheSame) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  ASSERT_EQ(run(trainer + "-i " + in("tokens.bin") + small_model + "-k linear -q 0.1 -x 5 -o " + in("a")).exit_status,
            0);
  ASSERT_EQ(run(trainer + "--config " + in("a/config.toml") + " -o " + in("b")).exit_status, 0);
  EXPECT_EQ(steps_of(read_log(in("a"))), steps_of(read_log(in("b"))));
  EXPECT_EQ(read_file(in("a/step_00000005/model.safetensors")), read_file(in("b/step_00000005/model.safetensors")));
}

// Rows that no attention uses are dead at the beginning, in the middle and at the end of c_attn.
TEST_F(CommandLine, RunsOfEveryWiringResumeWithTheirBits) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  for (const char* wiring :
       {"sla(2,2:3)", "share(2) gqa(2)", "layers(0_0_1_3)", "reuse(2)", "reuse(3) window(9)", "gate topk(5)"}) {
    SCOPED_TRACE(wiring);
    const std::string command =
        trainer + "-i " + in("tokens.bin") + small_model + format("--wiring '%s' -n 2 -k constant ", wiring);
    for (const char* out : {"a", "b"}) fs::remove_all(in(out));
    ASSERT_EQ(run(command + "-x 4 -o " + in("a")).exit_status, 0);
    ASSERT_EQ(run(command + "-x 2 -o " + in("b")).exit_status, 0);
    const Outcome resumed = run(command + "-x 4 -y -o " + in("b"));
    ASSERT_EQ(resumed.exit_status, 0) << resumed.err;
    for (const char* file : {"/step_00000004/model.safetensors", "/step_00000004/optimizer.safetensors"})
      EXPECT_EQ(read_file(in("a") + file), read_file(in("b") + file)) << file;
  }
}

TEST_F(CommandLine, HelpListsEveryOptionAndSucceeds) {
  const Outcome o = run(trainer + "--help");
  EXPECT_EQ(o.exit_status, 0);
  for (const char* option : {"-i,",
                             "-j,",
                             "-e,",
                             "-o,",
                             "-b,",
                             "-t,",
                             "-d,",
                             "-x,",
                             "-k,",
                             "-l,",
                             "-u,",
                             "-q,",
                             "-c,",
                             "-v,",
                             "-m,",
                             "-s,",
                             "-g,",
                             "-n,",
                             "-y,",
                             "--config",
                             "--wiring",
                             "--skip-layers",
                             "--skip-heads",
                             "--dry-run",
                             "--no-bias",
                             "--layers",
                             "--heads",
                             "--channels",
                             "--vocab-size",
                             "--max-seq-len",
                             "--seed",
                             "--shuffle",
                             "--grad-clip",
                             "--optimizer",
                             "--momentum",
                             "--beta1",
                             "--beta2",
                             "--eps",
                             "--max-bad-steps",
                             "--resume-from",
                             "--keep ",
                             "--keep-every",
                             "--stop-on-save-error",
                             "--tensorboard"})
    EXPECT_NE(o.out.find(option), std::string::npos) << option;
}

TEST_F(CommandLine, ShowsShapeWiringParametersAndMemoryBeforeItTrains) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  const Outcome o = run(trainer + "-i " + in("tokens.bin") + small_model + "-x 1");
  ASSERT_EQ(o.exit_status, 0) << o.err;
  size_t at = 0;
  for (const char* part : {"model: 4 layers, 4 heads of 8, 32 channels", "3 |  .  0  0  0 | projects 1 of 4",
                           "parameters: ", "memory plan for B 2, T 32", "weights", "total",
                           "the largest micro-batch that fits", "step 1/1 | loss "}) {
    at = o.out.find(part, at);
    ASSERT_NE(at, std::string::npos) << part << "\n" << o.out;
  }
}

TEST_F(CommandLine, ACheckpointIsAModelToStartFromOrValidate) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string data = "-i " + in("tokens.bin") + " -j " + in("tokens.bin") + " -b 2 -t 32 -m 5 ";
  ASSERT_EQ(run(trainer + data + small_model + "--no-bias -x 4 -v 4 -o " + in("a")).exit_status, 0);
  const Outcome o = run(trainer + data + "-e " + in("a/step_00000004") + " -x 0 -o " + in("b"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const auto a = read_log(in("a")), b = read_log(in("b"));
  const json& last = a.at(a.size() - 2);  // before the line of the checkpoint
  EXPECT_EQ(last.at("step"), 4);
  EXPECT_EQ(b.back().at("step"), 0);
  EXPECT_EQ(last.at("val_loss"), b.back().at("val_loss"));
}

TEST_F(CommandLine, AModelContinuesWithAnotherWiringAndSaysWhatChanges) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string data = "-i " + in("tokens.bin") + " -j " + in("tokens.bin") + " -b 2 -t 32 -m 5 -v 4 ";
  ASSERT_EQ(run(trainer + data + small_model + "--wiring plain -x 24 -l 3e-3 -o " + in("plain")).exit_status, 0);
  const std::string changed =
      data + "-e " + in("plain/step_00000024") + " --wiring 'sla(3,3)' -k constant -l 3e-3 -x 8 ";
  const std::string what = "plain and continues with sla(3,3); what changes:\n  layer 3: 3 heads attend to K/V of "
                           "other layers";
  auto says = [&](const std::string& arguments) {
    const Outcome o = run(trainer + arguments);
    EXPECT_EQ(o.exit_status, 0) << o.err;
    return o.out.find(what) != std::string::npos;
  };
  EXPECT_TRUE(says(changed + "--dry-run"));
  EXPECT_TRUE(says(changed + "-n 4 -o " + in("sla")));
  auto val_loss = [&](const char* out, int64_t step) {
    for (const json& line : read_log(in(out)))
      if (line.contains("val_loss") && line.at("step") == step) return line.at("val_loss").get<double>();
    return 0.0;
  };
  EXPECT_LT(val_loss("sla", 0), val_loss("plain", 4));
  EXPECT_LT(val_loss("sla", 8), val_loss("sla", 0));
  fs::remove_all(in("sla/step_00000008"));
  EXPECT_FALSE(says(changed + "-y -n 4 -o " + in("sla"))) << "a run that resumes has the wiring already";
  EXPECT_FALSE(says(data + "-e " + in("sla/step_00000008") + " --wiring 'sla( 3, 3 )' -x 1"));
}

// Of 12 micro-batches 3 are taken, the first, the fifth and the ninth: those of the sequences that a file of these
// alone has.
// BUG train_gpt2_sla.cu: `all ? i : i * full_batches / batches` -> `i`
TEST_F(CommandLine, ValidationTakesMicroBatchesAtEvenDistances) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  ASSERT_EQ(run(trainer + "-i " + in("tokens.bin") + small_model + "-x 20 -o " + in("out")).exit_status, 0);
  const std::string whole = shard_bytes(24 * 32 + 1);
  write_file(in("all.bin"), whole);
  fs::create_directory(in("some"));
  for (int batch : {0, 4, 8})  // of two sequences and the token after them
    write_file(in(format("some/%d.bin", batch)),
               shard_bytes(65).substr(0, 1024) + whole.substr(1024 + size_t(batch) * 128, 130));
  auto val_loss = [&](const std::string& data) {
    const Outcome o = run(trainer + "-e " + in("out/step_00000020") + " -x 0 -t 32 -b 2 -m 3 -o " + in("v") + " -i " +
                          in("tokens.bin") + " -j '" + in(data) + "'");
    EXPECT_EQ(o.exit_status, 0) << o.err;
    return read_log(in("v")).back().at("val_loss").get<double>();
  };
  EXPECT_NEAR(val_loss("all.bin") / val_loss("some/*.bin"), 1, 1e-6);
}

// BUG llmc/text/dataloader.h: `file.tokens + file.num_tokens - 1 - length` -> `file.tokens`
TEST_F(CommandLine, ValidationOfAllDataIsTheSameForEveryBatch) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  ASSERT_EQ(run(trainer + "-i " + in("tokens.bin") + small_model + "-x 20 -o " + in("out")).exit_status, 0);
  fs::create_directory(in("val"));
  write_file(in("val/a.bin"), shard_bytes(32 * 7 + 1));       // full sequences alone
  write_file(in("val/b.bin"), shard_bytes(32 * 3 + 17, 90));  // and 16 tokens more
  write_file(in("val/c.bin"), shard_bytes(5, 20));            // four tokens and their targets
  auto val_loss = [&](const std::string& options) {
    const Outcome o = run(trainer + "-e " + in("out/step_00000020") + " -x 0 -t 32 -o " + in("v") + " -i " +
                          in("tokens.bin") + " -j '" + in("val/*.bin") + "' " + options);
    EXPECT_EQ(o.exit_status, 0) << o.err;
    return read_log(in("v")).back().at("val_loss").get<double>();
  };
  // The same from files of one sequence each, weighted by their lengths.
  double sum = 0;
  int64_t tokens = 0;
  for (const auto& [name, length] : std::map<std::string, int>{{"a", 32 * 7}, {"b", 32 * 3 + 16}, {"c", 4}}) {
    const std::string whole = read_file(in("val/" + name + ".bin")).substr(1024);
    for (int at = 0; at < length; at += 32) {
      const int n = std::min(32, length - at);
      write_file(in("one.bin"), whole.substr(size_t(at) * 2, size_t(n + 1) * 2));
      const Outcome o = run(trainer + "-e " + in("out/step_00000020") + " -x 0 -b 1 -m 0 -t " + std::to_string(n) +
                            " -o " + in("v") + " -j " + in("one.bin"));
      ASSERT_EQ(o.exit_status, 0) << o.err;
      sum += n * read_log(in("v")).back().at("val_loss").get<double>();
      tokens += n;
    }
  }
  const double expected = sum / double(tokens);
  for (int b : {1, 2, 3, 7}) EXPECT_NEAR(val_loss(format("-b %d -m 0", b)) / expected, 1, 1e-6) << b;
  EXPECT_GT(std::abs(val_loss("-b 1 -m 10") / expected - 1), 1e-4) << "full sequences alone";
}

TEST_F(CommandLine, ARunWhoseOutputIsClosedTrainsToItsEnd) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const Outcome o = run(trainer + "-i " + in("tokens.bin") + small_model + "-x 30 -o " + in("out") + " | head -1");
  EXPECT_NE(o.out.find("model: "), std::string::npos) << o.out;
  EXPECT_TRUE(fs::exists(in("out/step_00000030/state.json"))) << o.err;
}

// What a run logs, without times, and its sample.
static std::string results_of(const Outcome& o, const std::string& out) {
  std::string results;
  for (json line : read_log(out)) {
    for (const char* time : {"ms", "data_ms", "tokens_per_second", "stall_ms", "write_ms", "checkpoint"})
      line.erase(time);
    if (!line.contains("run")) results += line.dump() + "\n";
  }
  const size_t sample = o.out.find("--- sample");
  return results + o.out.substr(sample, o.out.find("\n---\n", sample) - sample);
}

// Each with a value that is not the default.
TEST_F(CommandLine, EveryOptionOfARunChangesItsResults) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  write_file(in("val.bin"), shard_bytes(4000, 100));
  write_file(in("other.bin"), shard_bytes(20000, 99));
  const std::string base =
      trainer + "-i " + in("tokens.bin") + " -j " + in("val.bin") + small_model + "-d 128 -x 8 -u 2 -v 4 -s 8 -g 24 ";
  auto results = [&](const std::string& options) {
    const std::string out = in("out");
    fs::remove_all(out);
    const Outcome o = run(base + options + " -o " + out);
    EXPECT_EQ(o.exit_status, 0) << options << "\n" << o.err;
    return results_of(o, out);
  };
  const std::string as_it_is = results("");
  EXPECT_EQ(results(""), as_it_is);
  for (const char* same : {"--wiring 'sla(3,3)'", "--wiring ' sla(3 , 1:4)'", "--skip-layers 3 --skip-heads 3"})
    EXPECT_EQ(results(same), as_it_is) << same;
  for (const char* options : {"-l 5e-3",
                              "-u 4",
                              "-q 0.5",
                              "-c 0.9",
                              "--grad-clip 0.01",
                              "--beta1 0.5",
                              "--beta2 0.5",
                              "--eps 0.1",
                              "--seed 5",
                              "-k linear",
                              "-k constant",
                              "-k wsd",
                              "--temperature 0.2",
                              "-g 10",
                              "-m 1",
                              "-m 0",
                              "-v 8",
                              "-s 4",
                              "--shuffle",
                              "-t 16 -b 4 -g 16",
                              "-d 64",
                              "--no-bias",
                              "--skip-heads 0",
                              "--skip-layers 1",
                              "--skip-heads 1",
                              "--layers 5",
                              "--channels 64",
                              "--heads 2",
                              "--prompt a",
                              "-x 9",
                              "-b 1",
                              "--vocab-size 300",
                              "--wiring 'sla(2,2:3)'",
                              "--wiring 'sla(3,3) also(1,1)'",
                              "--wiring 'share(2)'",
                              "--wiring 'layers(0_0_1_3)'",
                              "--wiring 'gqa(2)'",
                              "--wiring 'window(9)'",
                              "--wiring 'window(9,LLSL)'",
                              "--wiring 'strided(5)'",
                              "--wiring 'strided(5,layers)'",
                              "--wiring 'strided(5,union)'",
                              "--wiring 'fixed(6,2)'",
                              "--wiring 'fixed(6,1)'",
                              "--wiring 'topk(4)'",
                              "--wiring 'reuse(2)'",
                              "--wiring 'blend(0.3)'",
                              "--wiring gate"})
    EXPECT_NE(results(options), as_it_is) << options;
  const std::string by_muon = results("--optimizer muon");
  EXPECT_NE(by_muon, as_it_is);
  EXPECT_EQ(results("--optimizer muon --momentum 0.95"), by_muon);
  EXPECT_NE(results("--optimizer muon --momentum 0.5"), by_muon);
  for (const char* data : {"-i ", "-j "}) EXPECT_NE(results(data + in("other.bin")), as_it_is) << data;
}

TEST_F(CommandLine, ARunByMuonResumesWithTheSameBits) {
  write_file(in("tokens.bin"), shard_bytes(4000));
  const std::string common =
      trainer + "-i " + in("tokens.bin") + small_model + "-k constant -n 3 --optimizer muon -l 1e-2 ";
  ASSERT_EQ(run(common + "-x 3 -o " + in("out")).exit_status, 0);
  expect_the_end_of_an_undisturbed_run(common, 6);
}

// Those that trade memory for time: another plan and the same losses.
TEST_F(CommandLine, OptionsOfMemoryChangeThePlanAndNoLoss) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  std::set<std::string> plans, losses;
  for (const char* options : {"", "-r 1", "-r 2", "-r 3", "--keep-dead-kv"}) {
    const Outcome o = run(alone + trainer + "-i " + in("tokens.bin") + small_model + "-x 2 " + options);
    ASSERT_EQ(o.exit_status, 0) << o.err;
    const size_t plan = o.out.find("\n  activations "), loss = o.out.find("step 2/2 | loss ");
    ASSERT_TRUE(plan != std::string::npos && loss != std::string::npos) << o.out;
    plans.insert(o.out.substr(plan, o.out.find('\n', plan + 1) - plan));
    losses.insert(o.out.substr(loss, 23));
  }
  EXPECT_EQ(plans.size(), 5u);
  EXPECT_EQ(losses.size(), 1u);
}

TEST_F(CommandLine, ASampleNeedsAModelAndNoData) {
  write_file(in("tokens.bin"), shard_bytes(20000, 90));
  ASSERT_EQ(run(trainer + "-i " + in("tokens.bin") + small_model + "-x 2 -o " + in("out")).exit_status, 0);
  const std::string sample = trainer + "-e " + in("out/step_00000002") + " -s 1 -x 0 -g 16 ";
  const Outcome without = run(sample), with = run(sample + "-i " + in("tokens.bin"));
  ASSERT_EQ(without.exit_status, 0) << without.err;
  const size_t at = without.out.find("--- sample after step 0\n");
  ASSERT_NE(at, std::string::npos) << without.out;
  EXPECT_EQ(without.out.substr(at, 40), with.out.substr(with.out.find("--- sample"), 40));
}

TEST_F(CommandLine, SamplesAreTextAndTheSameAgain) {
  write_file(in("tokens.bin"), shard_bytes(20000, 90));
  const std::string command = trainer + "-i " + in("tokens.bin") + small_model + "-x 2 -s 2 -g 32";
  const Outcome a = run(command), b = run(command);
  const size_t at = a.out.find("--- sample after step 2\n");
  ASSERT_NE(at, std::string::npos) << a.out;
  EXPECT_EQ(a.out.substr(at, 60), b.out.substr(b.out.find("--- sample"), 60));
}

// A folder of data in the tests' small vocabulary of 657 tokens, which is with it unless `carried` is false.
static void write_data(const std::string& folder, bool carried = true) {
  fs::create_directories(folder);
  write_file(folder + "/tokens.bin", shard_bytes(20000, 655));
  if (carried) fs::copy_file("dev/test/tokenizer/tokenizer.json", folder + "/tokenizer.json");
}

static const std::string model_of_657 = " --layers 2 --heads 2 --channels 32 --vocab-size 657 --max-seq-len 32 -t 32 "
                                        "-b 2 -v 0 -l 1e-3 -g 32 ";

// The text between "--- sample" and "---".
static std::string sample_of(const Outcome& o) {
  EXPECT_EQ(o.exit_status, 0) << o.err;
  const size_t at = o.out.find("--- sample after step"), begin = o.out.find('\n', at) + 1,
               end = o.out.find("\n---\n", begin);
  EXPECT_TRUE(at != std::string::npos && end != std::string::npos) << o.out;
  return o.out.substr(begin, end - begin);
}

TEST_F(CommandLine, SamplesAreDecodedByTheVocabularyFound) {
  write_data(in("with")), write_data(in("without"), /*carried=*/false);
  const std::string with = trainer + "-i " + in("with/tokens.bin"),
                    without = trainer + "-i " + in("without/tokens.bin");
  const std::string numbers = sample_of(run(without + model_of_657 + "-x 2 -s 2"));
  ASSERT_EQ(numbers.find_first_not_of("0123456789 "), std::string::npos) << numbers;
  const Tokenizer tokenizer = Tokenizer::load("dev/test/tokenizer/small.tiktoken");
  std::istringstream ids(numbers);
  std::string text;
  int count = 0;
  for (int id; ids >> id; count++) text += tokenizer.token(id);
  EXPECT_EQ(count, 31) << "the first of 32 is the end of text that it begins at";
  EXPECT_EQ(sample_of(run(with + model_of_657 + "-x 2 -s 2 -o " + in("out"))), printable(text));
  EXPECT_EQ(sample_of(run(without + model_of_657 + "-x 2 -s 2 --tokenizer dev/test/tokenizer/vocab.bpe")),
            printable(text));
  EXPECT_EQ(sample_of(run(with + model_of_657 + "-x 2 -s 2 --tokenizer none")), numbers);
  sample_of(run(with + model_of_657 + "--vocab-size 2000 -x 0 -s 1"));  // most of its tokens stand for nothing

  // The checkpoint carries it, on to a run that is resumed with data that does not, and to one that begins with it.
  const std::string carried = read_file(in("out/step_00000002/tokenizer.json"));
  EXPECT_EQ(carried, tokenizer.to_json());
  fs::remove(in("with/tokenizer.json"));
  ASSERT_EQ(run(with + model_of_657 + "-x 4 -y -o " + in("out")).exit_status, 0);
  EXPECT_EQ(read_file(in("out/step_00000004/tokenizer.json")), carried);
  const std::string start = without + " -e " + in("out/step_00000004") + " -t 32 -b 2 -v 0 -x 0 -s 1 -g 32 ";
  EXPECT_EQ(sample_of(run(start + "--prompt 'it has'")).substr(0, 6), "it has");
}

TEST_F(CommandLine, SamplesBeginWithThePromptAndDependOnIt) {
  write_data(in("data"));
  const std::string command = trainer + "-i " + in("data/tokens.bin") + model_of_657 + "-x 0 -s 1 ";
  const std::string a = sample_of(run(command + "--prompt 'it has'")), b = sample_of(run(command + "--prompt 'it "
                                                                                                   "hat'"));
  EXPECT_EQ(a.substr(0, 6), "it has");
  EXPECT_EQ(b.substr(0, 6), "it hat");
  EXPECT_NE(a.substr(6), b.substr(6));
  // An end of text in it is that token, as the one that every sample begins with.
  const std::string twice = sample_of(run(command + "--prompt '<|endoftext|>it has'"));
  EXPECT_EQ(twice.substr(0, 19), "<|endoftext|>it has");
  const std::string broken = sample_of(run(command + "--prompt \"$(printf 'a\\377b')\""));
  EXPECT_EQ(broken.substr(0, 5), "a\ufffdb");
  const std::string lines = sample_of(run(command + "--prompt \"$(printf 'a \"#\\tb\\nc')\""));
  EXPECT_EQ(lines.substr(0, 8), "a \"#\tb\nc");
}

TEST_F(CommandLine, TheNumberOfThreadsChangesNoBit) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  // Large enough for threads to be used in most operations, with rows and channels that no number of threads divides.
  const std::string options = "-i " + in("tokens.bin") +
                              " --layers 2 --heads 3 --channels 264 --vocab-size 259 --max-seq-len 331 -t 331 -b 3 -x "
                              "2 -l 1e-3 -o ";
  for (const std::string& program : {trainer, bf16_trainer}) {
    SCOPED_TRACE(program);
    const std::string out = in(program == trainer ? "fp32_" : "bf16_");
    ASSERT_EQ(run("env OMP_NUM_THREADS=1 " + program + options + out + "1").exit_status, 0);
    for (const char* threads : {"2", "3"}) {
      ASSERT_EQ(run("env OMP_NUM_THREADS=" + std::string(threads) + " " + program + options + out + threads)
                    .exit_status,
                0);
      expect_the_same_checkpoint(out + threads, out + "1", 2);
      EXPECT_EQ(steps_of(read_log(out + threads)), steps_of(read_log(out + "1"))) << threads;
    }
  }
}

// With and without instructions for bf16, which oneDNN can be told to leave: the products are exact in both, the order
// of sums differs.
TEST_F(CommandLine, Bf16TrainsAlikeWhereTheCpuHasNoInstructionsForIt) {
  write_file(in("tokens.bin"), shard_bytes(4000));
  const std::string with = bf16_trainer + "-i " + in("tokens.bin") + small_model + "-d 128 -x 20 -l 1e-3 -o ";
  const Outcome emulated = run("env ONEDNN_MAX_CPU_ISA=AVX2 " + with + in("emulated"));
  EXPECT_NE(emulated.out.find("GFLOP/s in fp32, to which bf16 is converted"), std::string::npos) << emulated.out;
  ASSERT_EQ(run(with + in("native")).exit_status, 0);
  ASSERT_EQ(run(trainer + "-i " + in("tokens.bin") + small_model + "-d 128 -x 20 -l 1e-3 -o " + in("fp32")).exit_status,
            0);
  const auto steps = steps_of(read_log(in("emulated"))), native = steps_of(read_log(in("native"))),
             fp32 = steps_of(read_log(in("fp32")));
  ASSERT_EQ(steps.size(), 20u);
  for (size_t i = 0; i < steps.size(); i++) {
    const double loss = steps[i].at("loss");
    EXPECT_NEAR(loss / native[i].at("loss").get<double>(), 1, 2e-3) << i;
    EXPECT_NEAR(loss / fp32[i].at("loss").get<double>(), 1, 5e-3) << i;
  }
}

TEST_F(CommandLine, IdleThreadsSleepUnlessAskedOtherwise) {
  // How often threads look for work before they sleep, as libgomp says it last.
  auto spins = [&](const std::string& variables) {
    const std::string told =
        run("env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT OMP_DISPLAY_ENV=verbose " + variables + " " + trainer + "--help")
            .err;
    const size_t at = told.rfind("GOMP_SPINCOUNT = '");
    return at == std::string::npos ? told : told.substr(at + 18, told.find('\'', at + 18) - at - 18);
  };
  EXPECT_EQ(spins("OMP_NUM_THREADS=2"), "2000");
  EXPECT_EQ(spins("OMP_NUM_THREADS=2 GOMP_SPINCOUNT=9"), "9");
  EXPECT_EQ(spins("OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive"), "0");
}

// ----------------------------------------------------------------------------
// Bad input

TEST_F(CommandLine, VocabulariesThatDoNotFitAreRefused) {
  write_data(in("data"));
  const std::string data = "-i " + in("data/tokens.bin") + model_of_657 + "-x 1 ",
                    bytes = "-i " + in("tokens.bin") + small_model + "-x 1 ";
  write_file(in("tokens.bin"), shard_bytes(2000));
  expect_error(data + "--tokenizer bytes",
               {"bytes and " + in("data") + "/tokenizer.json are different vocabularies", "--tokenizer none"});
  expect_error(data + "--tokenizer " + in("nowhere"), {in("nowhere") + ": cannot be read"});
  expect_error(data + "--tokenizer " + in("data/tokens.bin"), {"tokens.bin: line 1 is not a token"});
  expect_error(bytes + "--tokenizer dev/test/tokenizer/small.tiktoken",
               {"small.tiktoken: has 657 tokens, the model 257", "--vocab-size"});
  expect_error(data + "--prompt it", {"--prompt", "-s"});
  expect_error(data + "--tokenizer none -s 1 --prompt it", {"--prompt: neither model nor data have a vocabulary"});
  expect_error(bytes + "-s 1 -g 8 --prompt '1234567'", {"--prompt: makes 8 tokens", "a sample has 8"});
  ASSERT_EQ(run(trainer + bytes + "-s 1 -g 8 --prompt '123456'").exit_status, 0);
  ASSERT_EQ(run(trainer + bytes + "-s 1 -g 8 --prompt '<|endoftext|>12345'").exit_status, 0) << "that is one token";
  // A model's against the data's.
  ASSERT_EQ(run(trainer + data + "-o " + in("out")).exit_status, 0);
  const std::string model = "-i " + in("data/tokens.bin") + " -e " + in("out/step_00000001") + " -t 32 -b 2 -x 1 -v 0 ";
  ASSERT_EQ(run(trainer + model).exit_status, 0);
  std::string swapped = read_file("dev/test/tokenizer/small.tiktoken");
  swapped.replace(swapped.find("IQ== 0\nIg== 1\n"), 14, "IQ== 1\nIg== 0\n");
  fs::remove(in("data/tokenizer.json"));
  write_file(in("data/gpt2.tiktoken"), swapped);
  expect_error(model, {in("out/step_00000001/tokenizer.json") + " and " + in("data") +
                       "/gpt2.tiktoken are different vocabularies"});
  ASSERT_EQ(run(trainer + model + "--tokenizer none").exit_status, 0);
}

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
  expect_error("-i " + in("few.bin") + model, {"few.bin", "a sequence needs T + 1 = 33"});
  write_file(in("large.bin"), shard_bytes(2000, 300));
  expect_error("-i " + in("large.bin") + model, {"large.bin: token", "outside the vocabulary of 257"});
  expect_error("-i " + in("tokens.bin") + " -j " + in("nothing.bin") + model, {"nothing.bin: no such file"});
  write_file(in("one.bin"), shard_bytes(40));
  expect_error("-i " + in("tokens.bin") + " -j " + in("one.bin") + model, {"one.bin: has 1 sequences"});
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
  expect_error(with + "-t 33", {"-t 33", "context length is 32"});
  expect_error(with + "-d 100", {"-d 100 is not a multiple of B * T = 2 * 32"});
  expect_error(with + "--skip-layers 0", {"--skip-layers 0"});
  expect_error(with + "--skip-heads 5", {"--skip-heads 5", "4 heads"});
  expect_error(with + "--channels 33", {"4 heads do not divide 33 channels"});
  expect_error(with + "--colour red", {"--colour"});
  expect_error(with + "-x many", {"many"});
  expect_error(with + "-l 1e-3e", {"1e-3e"});
  expect_error(with + "-s 1 -g 33", {"-g 33"});
  expect_error(with + "-b 100000000", {"exceeds the free memory by"});
  expect_error(with + "--layers 2000000000",
               {"2000000000 layers of 32 channels", "take at least", "take a smaller model"});  // at once
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
  // No file may grow beyond 64 blocks of 1 KiB: to the program, a full disk, and not a reason to die of SIGXFSZ.
  const Outcome o = run("bash -c \"ulimit -f 64; exec " + with + " -x 4\"");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("error: " + in("out")), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("File too large"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("error: the last checkpoint of the run could not be written"), std::string::npos) << o.err;
  EXPECT_EQ(names_in(in("out")),
            (std::set<std::string>{"config.toml", "lock", "log.jsonl", "report.html", "step_00000002"}));
  EXPECT_EQ(read_file(in("out/step_00000002/optimizer.safetensors")), complete);
  EXPECT_EQ(run(with + " -x 4").exit_status, 0) << "and resumes when there is room";
}

// A disk of 20 MB: there is room for three checkpoints, not for four.
class SmallDisk : public CommandLine {
 protected:
  std::string command;

  void SetUp() override {
    CommandLine::SetUp();
    write_file(in("tokens.bin"), shard_bytes(20000));
    fs::create_directories(in("disk"));
    command = alone + trainer + "-i " + in("tokens.bin") +
              " --layers 4 --heads 4 --channels 96 --vocab-size 257 --max-seq-len 32 -t 32 -b 2 -l 1e-3 ";
    const Outcome o = with_disk("true");
    if (o.exit_status != 0) GTEST_SKIP() << "no right to mount a tmpfs: " << o.err;
  }

  // Runs a script that sees the disk at in("disk"), empty; it is gone when the script is done.
  Outcome with_disk(const std::string& script) const {
    write_file(in("script"), "mount -t tmpfs -o size=20m tmpfs " + in("disk") + " || exit\n" + script + "\n");
    return run((geteuid() == 0 ? "unshare -m" : "unshare -rm") + std::string(" bash ") + in("script"));
  }
};

TEST_F(SmallDisk, ThatIsFullEndsNoTrainingAndLosesNothingComplete) {
  const std::string with = command + "-n 2 -x 9 -o ", out = in("disk/out"), save = "; status=$?; cp -a " + out + " ";
  const Outcome o = with_disk(with + out + save + in("full") + "; exit $status");
  ASSERT_EQ(run(with + in("undisturbed")).exit_status, 0);
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("No space left on device; earlier checkpoints are as they were"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("error: the last checkpoint of the run could not be written"), std::string::npos) << o.err;
  EXPECT_EQ(names_in(in("full")), (std::set<std::string>{"config.toml", "lock", "log.jsonl", "report.html",
                                                         "step_00000002", "step_00000004", "step_00000006"}));
  for (int64_t step : {2, 4, 6}) expect_the_same_checkpoint(in("full"), in("undisturbed"), step);
  EXPECT_EQ(steps_of(read_log(in("full"))), steps_of(read_log(in("undisturbed")))) << "it was trained to the end";
  int errors = 0;
  for (const json& line : read_log(in("full"))) errors += line.contains("save_error");
  EXPECT_EQ(errors, 2) << "after steps 8 and 9";

  // Three fit, so a run that keeps two and needs room for another has enough.
  const Outcome kept = with_disk(with + out + " --keep 2" + save + in("kept") + "; exit $status");
  EXPECT_EQ(kept.exit_status, 0) << kept.err;
  EXPECT_EQ(names_in(in("kept")), (std::set<std::string>{"config.toml", "lock", "log.jsonl", "report.html",
                                                         "step_00000008", "step_00000009"}));

  const Outcome stopped = with_disk(with + out + " -x 60 --stop-on-save-error");
  EXPECT_EQ(stopped.exit_status, 1);
  EXPECT_NE(stopped.err.find("training stops, earlier checkpoints are as they were (--stop-on-save-error)"),
            std::string::npos)
      << stopped.err;
}

// Not a byte is left, for the log neither, from the first checkpoint on: for a while, or until the run is over, which
// is then resumed.
TEST_F(SmallDisk, WithRoomAgainHasAllOfTheRun) {
  const std::string with = command + "-k constant -n 30 --keep 1 -x 300 -o ", out = in("disk/out"),
                    err = in("run's stderr");
  const std::string fill_up = with + out + " 2>\"" + err +
                              "\" & pid=$!\n"
                              "until [ -e " +
                              out +
                              "/step_00000030 ]; do kill -0 $pid || exit; sleep 0.01; done\n"
                              "cat /dev/zero >" +
                              in("disk/filler") + " 2>/dev/null\n";
  const std::string make_room = "cp -a " + out + " " + in("full") + "; rm " + in("disk/filler") + "\n";
  const std::string finish = "status=$?; cp -a " + out + " " + in("done") + "; exit $status";
  ASSERT_EQ(run(with + in("undisturbed")).exit_status, 0);
  auto expect_all = [&](const Outcome& o) {
    ASSERT_EQ(o.exit_status, 0) << o.err << read_file(err);
    for (const char* part : {"log.jsonl: cannot be written: No space left on device; its lines wait for room",
                             "No space left on device; earlier checkpoints are as they were"})
      EXPECT_NE(read_file(err).find(part), std::string::npos) << read_file(err);
    EXPECT_EQ(names_in(in("full")), (std::set<std::string>{"config.toml", "lock", "log.jsonl", "step_00000030"}));
    EXPECT_EQ(names_in(in("done")),
              (std::set<std::string>{"config.toml", "lock", "log.jsonl", "report.html", "step_00000300"}));
    expect_the_same_checkpoint(in("done"), in("undisturbed"), 300);
    EXPECT_EQ(steps_of(read_log(in("done"))), steps_of(read_log(in("undisturbed"))));
    fs::remove_all(in("full"));
    fs::remove_all(in("done"));
  };
  expect_all(with_disk(fill_up +
                       "for part in wait.for.room as.they.were; do\n"
                       "  until grep -q $part \"" +
                       err +
                       "\"; do kill -0 $pid || exit; sleep 0.01; done\n"
                       "done\n" +
                       make_room + "wait $pid\n" + finish));
  expect_all(with_disk(fill_up + "wait $pid; [ $? = 1 ] || exit 2\n" + make_room + with + out + " -y\n" + finish));
  EXPECT_NE(read_file(err).find("its last lines could not be written: the disk is full"), std::string::npos)
      << read_file(err);
}

// Three checkpoints and the folder of a fourth are there, and not a byte is left, not for the log either, when the run
// is resumed with
// --keep 1.
TEST_F(SmallDisk, ThatObsoleteCheckpointsFillIsResumedWithFewer) {
  const std::string with = command + "-k constant -o ", out = in("disk/out");
  ASSERT_EQ(run(with + in("undisturbed") + " -x 9").exit_status, 0);
  const Outcome o = with_disk(with + out + " -n 2 -x 6 || exit 2\nmkdir " + out + "/unfinished_step_00000008\n" +
                              "cat /dev/zero >" + in("disk/filler") + " 2>/dev/null\n" + with + out +
                              " -n 2 -x 9 -y --keep 1; status=$?; cp -a " + out + " " + in("done") + "; exit $status");
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_EQ(o.err, "");
  EXPECT_EQ(names_in(in("done")),
            (std::set<std::string>{"config.toml", "lock", "log.jsonl", "report.html", "step_00000009"}));
  expect_the_same_checkpoint(in("done"), in("undisturbed"), 9);
}

TEST_F(CommandLine, ARunThatDivergesStopsAndKeepsItsLastCheckpoint) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string with = trainer + "-i " + in("tokens.bin") + small_model + "-k constant -y -o " + in("out");
  ASSERT_EQ(run(with + " -x 2").exit_status, 0);
  const std::string complete = read_file(in("out/step_00000002/state.json"));
  const Outcome o = run(with + " -x 200 -n 1 --keep 1 -l 1000 --grad-clip 0 -c 1000 --max-bad-steps 4");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("4 such steps in a row were skipped, and training stops before the weights take harm"),
            std::string::npos)
      << o.err;
  const std::vector<json> log = read_log(in("out"));
  const int64_t last = steps_of(log).back().at("step");
  ASSERT_LT(last, 200);
  EXPECT_TRUE(steps_of(log).back().at("loss").is_null() || steps_of(log).back().at("grad_norm").is_null());
  EXPECT_NE(o.out.find(format("step %lld/200", (long long)last - 1)), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("skipped, nothing was updated: 3 in a row, 3 in all"), std::string::npos) << o.out;
  // The last good step was saved, none of the bad ones, and nothing was removed for them.
  std::set<std::string> expected = {"config.toml", "lock", "log.jsonl", "report.html",
                                    format("step_%08lld", (long long)last - 4)};
  EXPECT_EQ(names_in(in("out")), expected);
}

// A trained model in `in("model")`, of which a test sets single weights.
class ChangedModel : public CommandLine {
 protected:
  struct Weight {
    const char* tensor;
    int64_t element;
    float value;
  };

  void SetUp() override {
    CommandLine::SetUp();
    write_file(in("tokens.bin"), shard_bytes(4000));
    ASSERT_EQ(run(trainer + "-i " + in("tokens.bin") + small_model + "-x 1 -o " + in("first")).exit_status, 0);
    fs::copy(in("first/step_00000001"), in("model"), fs::copy_options::recursive);
  }
  void set_weights(const std::vector<Weight>& weights) const {
    const SafetensorsFile file(in("model/model.safetensors"));
    std::string bytes = read_file(in("model/model.safetensors"));
    for (const Weight& w : weights)
      memcpy(bytes.data() + file.data_offset() + file.find(w.tensor)->begin + size_t(w.element) * sizeof w.value,
             &w.value, sizeof w.value);
    write_file(in("new"), bytes);
    fs::rename(in("new"), in("model/model.safetensors"));
  }
};

// Data in which a token must be foreseen that the model finds infinitely improbable: the loss is infinite there.
class ImprobableToken : public ChangedModel {
 protected:
  static constexpr uint16_t improbable = 256;

  void SetUp() override {
    ChangedModel::SetUp();
    // Its logit is -1e38 times a channel that is always about 100.
    set_weights({{"wte.weight", int64_t(improbable) * 32, -1e38f}, {"ln_f.bias", 0, 100.0f}});
  }

  // The tokens of steps 1, 2, ... of 64 tokens each, with the improbable one in those of `bad_steps`.
  std::string data(int first_step, int steps, const std::set<int>& bad_steps) const {
    std::string bytes = shard_bytes(steps * 64 + 1);
    for (int i = 0; i < steps * 64 + 1; i++) {
      const int step = first_step + i / 64, place = i % 64;
      const uint16_t token =
          bad_steps.count(step) && place == 20 ? improbable : uint16_t((step * step + place * 7) % 200);
      memcpy(bytes.data() + 1024 + 2 * i, &token, 2);
    }
    return bytes;
  }
  std::string command() const { return trainer + "-e " + in("model") + " -b 2 -t 32 -k constant -l 1e-3 -v 0 "; }
};

// BUG train_gpt2_sla.cu: `run.step + 1 - run.skipped_steps, {` -> `run.step + 1, {`
TEST_F(ImprobableToken, MakesAStepThatAdamWDoesNotCount) {
  write_file(in("with.bin"), data(1, 12, {1, 2}));
  write_file(in("without.bin"), data(3, 10, {}));
  const Outcome o = run(command() + "-i " + in("with.bin") + " -x 8 -o " + in("with"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  EXPECT_NE(o.out.find("skipped, nothing was updated: 2 in a row, 2 in all"), std::string::npos) << o.out;
  ASSERT_EQ(run(command() + "-i " + in("without.bin") + " -x 6 -o " + in("without")).exit_status, 0);
  for (const char* file : {"/model.safetensors", "/optimizer.safetensors"})
    EXPECT_EQ(read_file(in("with/step_00000008") + file), read_file(in("without/step_00000006") + file)) << file;
}

TEST_F(ImprobableToken, ChangesNothingAboutAResumedRun) {
  write_file(in("with.bin"), data(1, 20, {2, 5, 6, 9, 10}));
  const std::string with = command() + "-i " + in("with.bin") + " --max-bad-steps 3 -n 1 -x 12 ";
  ASSERT_EQ(run(with + "-o " + in("whole")).exit_status, 0);
  std::set<std::string> expected = {"config.toml", "lock", "log.jsonl", "report.html"};
  for (int step : {1, 3, 4, 7, 8, 11, 12}) expected.insert(format("step_%08d", step));
  EXPECT_EQ(names_in(in("whole")), expected) << "no checkpoints of skipped steps";
  fs::create_directories(in("half"));
  fs::copy(in("whole/step_00000008"), in("half/step_00000008"), fs::copy_options::recursive);
  ASSERT_EQ(run(with + "-y -o " + in("half")).exit_status, 0);
  expect_the_same_checkpoint(in("whole"), in("half"), 12);
  // The last step of a run is saved even if it is a bad one; and a run that is resumed from there knows how many there
  // were in a row.
  ASSERT_EQ(run(with + "-x 6 -o " + in("bad_end")).exit_status, 0);
  write_file(in("with.bin"), data(1, 20, {2, 5, 6, 7}));
  const Outcome o = run(with + "-y -o " + in("bad_end"));
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("error: step 7: "), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("3 such steps in a row"), std::string::npos) << o.err;
}

// A model with a bias of NaN in its last LayerNorm.
class NanModel : public ChangedModel {
 protected:
  void SetUp() override {
    ChangedModel::SetUp();
    set_weights({{"ln_f.bias", 0, NAN}});
  }
};

TEST_F(NanModel, IsAnErrorInValidationAndSamples) {
  const std::string with = trainer + "-e " + in("model") + " -b 2 -t 32 -x 0 ";
  const Outcome sampled = run(with + "-s 1 -g 8");
  EXPECT_EQ(sampled.exit_status, 1);
  EXPECT_EQ(sampled.err.find("error: no sample can be drawn: the model's logits are not finite"), 0u) << sampled.err;
  EXPECT_EQ(sampled.out.find("--- sample"), std::string::npos) << sampled.out;
  const Outcome validated = run(with + "-o " + in("out") + " -j " + in("tokens.bin"));
  EXPECT_EQ(validated.exit_status, 1);
  EXPECT_EQ(validated.err.find("error: the validation loss after step 0 is "), 0u) << validated.err;
  EXPECT_NE(validated.err.find("take another model (-e)"), std::string::npos) << validated.err;
  EXPECT_TRUE(read_log(in("out")).back().at("val_loss").is_null());
}

// Training is fine, and so is its checkpoint of step 3; that of step 4, after which the validation finds an infinite
// loss, is not written.
TEST_F(ImprobableToken, InTheValidationEndsTheRunWithoutACheckpoint) {
  write_file(in("train.bin"), data(1, 12, {}));
  write_file(in("val.bin"), data(1, 4, {2}));
  const std::string with =
      alone + command() + "-i " + in("train.bin") + " -j " + in("val.bin") + " -n 1 --keep 1 -x 8 -o " + in("out");
  ASSERT_EQ(run(with + " -x 2").exit_status, 0);
  const Outcome o = run(with + " -y -v 4");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("error: the validation loss after step 4 is inf"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("no checkpoint of this step is written"), std::string::npos) << o.err;
  EXPECT_EQ(names_in(in("out")),
            (std::set<std::string>{"config.toml", "lock", "log.jsonl", "report.html", "step_00000003"}));
  EXPECT_EQ(run(with + " -y -v 0").exit_status, 0);
}

TEST(Fuzzer, FindsNothingInAFewSeconds) { EXPECT_EQ(system("build/fuzz_safetensors 5 1 >/dev/null"), 0); }

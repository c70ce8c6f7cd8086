// Runs of the trainer that end before their last step, by a signal or a kill, and those that resume them: a process
// with arguments, files and an exit status. Runs from the repository's root.
//
// COVERS train_gpt2_sla.cu llmc/train/training.h llmc/formats/checkpoint llmc/train/run. llmc/train/resuming
// llmc/train/stop_signal.h
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cstring>
#include <filesystem>
#include <set>
#include "child.h"
#include "command_line.h"
#include "llmc/train/stop_signal.h"
#include "llmc/base/crc32c.h"
#include "llmc/base/random.h"

TEST_F(CommandLine, AResumedRunHasTheBitsOfAnUninterruptedOne) {
  write_file(in("tokens.bin"), shard_of_documents(20000));
  for (const char* wiring : {"sla(3,3)", "documents sla(1,2)"}) {
    SCOPED_TRACE(wiring);
    const std::string common = trainer + "-i " + in("tokens.bin") + small_model + "--wiring '" + wiring +
                               "' -d 128 -u 3 --shuffle --dropout 0.1 -x 10 -n 5 ";
    for (const char* out : {"whole", "half"}) fs::remove_all(in(out));
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
}

// Rows are streams of 14 segments, which end amid step 8 of 10; each has a memory that is longer than a segment. To
// validate, with a memory of its own, changes nothing. With other streams the memory belongs to nobody.
TEST_F(CommandLine, AResumedRunOfStreamsHasTheBitsOfAnUninterruptedOne) {
  write_file(in("tokens.bin"), shard_bytes(30 * 32 + 1));
  const std::string common = trainer + "-i " + in("tokens.bin") + small_model +
                             "--wiring 'relative memory(40) sla(1,2)' -d 128 -x 10 -n 5 -o ";
  ASSERT_EQ(run(common + in("whole")).exit_status, 0);
  for (const auto& [out, more] : {std::pair("half", " -y"), std::pair("fewer", " -y -b 1")}) {
    fs::create_directories(in(out));
    fs::copy(in("whole/step_00000005"), in(out) + "/step_00000005", fs::copy_options::recursive);
    fs::copy(in("whole/log.jsonl"), in(out) + "/log.jsonl");
    const Outcome o = run(common + in(out) + more + " -v 2 -m 3 -j " + in("tokens.bin"));
    if (std::string(out) == "half") {
      ASSERT_EQ(o.exit_status, 0) << o.err;
      expect_the_same_checkpoint(in("whole"), in("half"), 10);
    } else {
      EXPECT_EQ(o.exit_status, 1);
      EXPECT_NE(o.err.find("is of 2 streams of text (ranks * -b), and now there are 1; give as many, or "
                           "--reset-memory"),
                std::string::npos)
          << o.err;
    }
  }
  write_file(in("tokens.bin"), shard_bytes(40 * 32 + 1));
  const Outcome others = run(common + in("fewer") + " -y -b 1 --reset-memory");
  EXPECT_EQ(others.exit_status, 1);
  EXPECT_NE(others.err.find("other training data (-i): of 30 sequences, and now there are 40"), std::string::npos)
      << others.err;
  write_file(in("tokens.bin"), shard_bytes(30 * 32 + 1));
  const Outcome reset = run(common + in("fewer") + " -y -b 1 --reset-memory");
  EXPECT_EQ(reset.exit_status, 0) << reset.err;
  EXPECT_EQ(steps_of(read_log(in("fewer"))).size(), 10u);
  const Outcome shorter = run(common + in("shorter") + " -t 16");
  EXPECT_EQ(shorter.exit_status, 1);
  EXPECT_NE(shorter.err.find("-t 16: a model with memory is trained in segments of its context length, 32"),
            std::string::npos)
      << shorter.err;
  const Outcome shuffled = run(common + in("shuffled") + " --shuffle --dry-run");
  EXPECT_EQ(shuffled.exit_status, 0) << shuffled.err;
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

// The steps of a log's lines that have a key.
static std::vector<int64_t> steps_with(const char* key, const std::vector<json>& log) {
  std::vector<int64_t> steps;
  for (const json& line : log)
    if (line.contains(key)) steps.push_back(line.at("step"));
  return steps;
}

// A signal amid the last step, whose validation and sample are left out then.
TEST_F(CommandLine, WhatAStopLeavesOutTheNextProcessDoes) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string common = trainer + "-i " + in("tokens.bin") + " -j " + in("tokens.bin") + small_model +
                             "-d 65536 -x 2 -v 9 -s 9 -g 8 -m 2 -y -o ";
  std::string text;
  FILE* out;
  const pid_t child = start_until(common + in("out"), "step 1/2", in("err"), &text, &out);
  usleep(100000);
  kill(child, SIGTERM);
  int status;
  text += finish(child, out, &status);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGTERM) << text;
  EXPECT_NE(text.find("stopped by SIGTERM after step 2 of 2, before the validation or sample that is due then; -y "
                      "resumes\n"),
            std::string::npos)
      << text;
  EXPECT_EQ(steps_with("val_loss", read_log(in("out"))), std::vector<int64_t>{0});
  EXPECT_NE(page_of(in("out")).find("the validation after its last step is missing"), std::string::npos);
  ASSERT_EQ(run(common + in("out")).exit_status, 0);
  ASSERT_EQ(run(common + in("whole")).exit_status, 0);
  const std::vector<json> log = read_log(in("out")), whole = read_log(in("whole"));
  EXPECT_EQ(steps_with("val_loss", log), (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(steps_with("sample", log), std::vector<int64_t>{2});
  for (const char* key : {"val_loss", "sample"}) {
    const auto last = [key](const std::vector<json>& of) {
      return std::find_if(of.rbegin(), of.rend(), [key](const json& j) { return j.contains(key); })->at(key);
    };
    EXPECT_EQ(last(log), last(whole));
  }
  EXPECT_EQ(run(common + in("out")).out.find("val loss"), std::string::npos) << "once";
}

// The run of a log that lacks what was due after step 2 of 4, as one has that was stopped there.
TEST_F(CommandLine, WhatAStopLeavesOutAmidARunTheNextProcessDoes) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string common = trainer + "-i " + in("tokens.bin") + " -j " + in("tokens.bin") + small_model +
                             "-x 4 -n 2 -v 2 -s 2 -g 8 -m 2 -y -o ";
  ASSERT_EQ(run(common + in("out")).exit_status, 0);
  fs::remove_all(in("out/step_00000004"));
  const std::vector<json> whole = read_log(in("out"));
  for (const char* missing : {"val_loss", "sample", "neither"}) {
    std::string text;
    for (const json& line : whole)
      if (line.value("step", 0) != 2 || !line.contains(missing)) text += line.dump() + "\n";
    write_file(in("out/log.jsonl"), text);
    const Outcome o = run(common + in("out"));
    ASSERT_EQ(o.exit_status, 0) << o.err;
    fs::remove_all(in("out/step_00000004"));
    EXPECT_EQ(steps_with("val_loss", read_log(in("out"))), (std::vector<int64_t>{0, 2, 4})) << missing;
    EXPECT_EQ(steps_with("sample", read_log(in("out"))), (std::vector<int64_t>{2, 4})) << missing;
  }
}

TEST_F(LongCommandLine, KilledWhileWritingItResumesFromTheLastCompleteCheckpoint) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const int steps = 1000000, kills = 50;
  const std::string common = alone + trainer + "-i " + in("tokens.bin") + small_model + "-k constant -n 1 ";
  int64_t last = 0;
  int unfinished = 0;
  uint32_t most_us = 40000;  // to wait before a kill: more where no checkpoint is complete in that time
  for (int i = 0; i < kills; i++) {
    std::string text;
    FILE* lines;
    // The first step done, its checkpoint begins; with a checkpoint a step most of the time goes into writing them.
    const pid_t child =
        start_until(common + format("-x %d -y -o ", steps) + in("out"), "step ", in("err"), &text, &lines);
    ASSERT_NE(text.find("step "), std::string::npos) << text;
    const std::string resumed = last > 0 ? format("at step %lld of", (long long)last) : "";
    EXPECT_NE(text.find(resumed), std::string::npos) << text;
    usleep(random_words(5, RandomStream::test, 0, uint64_t(i)).word[0] % most_us);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    fclose(lines);
    last = 0;
    for (const auto& entry : fs::directory_iterator(in("out"))) {
      const std::string name = entry.path().filename();
      if (name.rfind("step_", 0) == 0) last = std::max<int64_t>(last, std::stoll(name.substr(5)));
      unfinished += name.rfind("unfinished_", 0) == 0;
    }
    if (last == 0 && i % 5 == 4) most_us *= 2;
  }
  EXPECT_GE(unfinished, kills / 5) << "too few kills fell into the writing of a checkpoint for this to mean much";
  ASSERT_GT(last, 0);
  // What survived 50 kills is what an undisturbed run computes.
  expect_the_end_of_an_undisturbed_run(common, last + 3);
  EXPECT_EQ(logged_checkpoints(read_log(in("out"))), logged_checkpoints(read_log(in("undisturbed")))) << "one line "
                                                                                                         "each";
}

// A step takes a second, and a checkpoint is complete long before its end, when its line is written.
TEST_F(LongCommandLine, KilledBeforeItsLogLineACheckpointHasOneAfterResuming) {
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

TEST_F(LongCommandLine, StoppedOrKilledARunEndsWithTheSameBits) {
  write_file(in("tokens.bin"), shard_of_documents(20000));
  const std::string common = alone + trainer + "-i " + in("tokens.bin") + small_model +
                             "--wiring 'documents sla(1,2)' --dropout 0.1 -k constant --shuffle -d 128 -n 3 --keep 2 "
                             "--keep-every 50 ";
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
    if (i % 2 == 0) kill(child, signal);  // a second time, as when somebody signals a process and its group
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
    EXPECT_TRUE(name.rfind("step_", 0) == 0 || name == "config.toml" || name == "lock" || name == "log.jsonl") << name;
}

// trains is then killed.
TEST_F(LongCommandLine, OneProcessTrainsInAFolderAndOthersAreRefused) {
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

TEST_F(LongCommandLine, ASecondSignalLeavesAtOnce) {
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
  EXPECT_EQ(names_in(in("out")), (std::set<std::string>{"config.toml", "lock", "log.jsonl"}));
}

TEST_F(LongCommandLine, SignalsStopARunWithoutAFolderUnlessIgnored) {
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

TEST_F(LongCommandLine, CheckpointsAreKeptAsAskedAndTimed) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const Outcome o =
      run(trainer + "-i " + in("tokens.bin") + small_model + "-x 23 -n 2 --keep 2 --keep-every 8 -o " + in("out"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  EXPECT_EQ(names_in(in("out")), (std::set<std::string>{"config.toml", "lock", "log.jsonl", "step_00000008",
                                                        "step_00000016", "step_00000022", "step_00000023"}));
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
  for (const char* file : {"config.json", "generation_config.json", "model.safetensors", "optimizer.safetensors",
                           "state.json", "tokenizer.json"}) {
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
      EXPECT_EQ(names_in(in("out")).size(), 4u) << "nothing was changed";
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

TEST_F(LongCommandLine, ResumingWithAnotherRateBatchOrDropoutIsSaid) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string with = alone + trainer + "-i " + in("tokens.bin") + small_model + "-k constant -y -o " + in("out"),
                    warning = "warning: -y: " + in("out");
  EXPECT_EQ(run(with + " -x 2").err, "");
  EXPECT_EQ(run(with + " -x 3").err, "");
  const std::string rate = " was written with another peak learning rate (-l): ";
  EXPECT_EQ(run(with + " -x 4 -l 2e-3 -b 4 -d 128").err,
            warning + "/step_00000003" + rate + "0.001; training continues with 0.002\n" + warning +
                "/step_00000003 was written with another number of tokens in an update, B * T if it is not given "
                "(-d): 64; training continues with 128\n");
  EXPECT_EQ(run(with + " -x 5 -l 2e-3 -d 128").err, "") << "another micro-batch is the same update";
  EXPECT_EQ(run(with + " -x 6 -d 128").err,
            warning + "/step_00000005" + rate + "0.002; training continues with 0.001\n");
  EXPECT_EQ(run(with + " -x 7 -d 128 --dropout 0.1").err, warning + "/step_00000006 was written with another dropout "
                                                                    "(--dropout): 0; training continues with "
                                                                    "0.1\n");
}

TEST_F(LongCommandLine, WhatIsNotUsedIsSaid) {
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

TEST_F(CommandLine, ResumingAsAnotherRunIsRefused) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  write_file(in("other.bin"), shard_bytes(10000));
  const std::string same = small_model + std::string("-x 4 -o ") + in("out");
  ASSERT_EQ(run(trainer + "-i " + in("tokens.bin") + same).exit_status, 0);
  const std::string before = read_file(in("out/log.jsonl"));
  auto refused = [&](const std::string& arguments, const std::string& part) {
    const Outcome o = run(trainer + arguments);
    EXPECT_EQ(o.exit_status, 1) << arguments;
    EXPECT_NE(o.err.find(part), std::string::npos) << o.err;
    EXPECT_EQ(read_file(in("out/log.jsonl")), before);
  };
  refused("-i " + in("tokens.bin") + same, "holds the checkpoints of an earlier run");
  auto refused_by = [&](const std::string& options, const std::string& part) {
    refused("-y -i " + in("tokens.bin") + same + " " + options, part);
  };
  refused("-y -i " + in("other.bin") + same, "training data (-i): of 624 sequences, and now there are 312");
  refused_by("--seed 8", "seed (--seed): 1337; now it is 8; give the same");
  refused_by("--shuffle", "order of the data (--shuffle): false; now it is true");
  refused_by("--optimizer muon", "optimizer (--optimizer): adamw; now it is muon");
  refused_by("-t 16", "sequence length (-t): 32; now it is 16");
  refused_by("-x 3", "is past step 3, the last one by -x");
}

// Files of the user in the folder of -o, which are no run's, stay; and what makes a run another one than it was.
TEST_F(CommandLine, AFolderThatIsNoRunsKeepsWhatItHas) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string command = trainer + "-i " + in("tokens.bin") + small_model + "-x 2 -n 1 -l 1e-3 -o ";
  const auto expect_error = [&](const std::string& arguments, const std::string& part) {
    const Outcome o = run(command + arguments);
    EXPECT_EQ(o.exit_status, 1) << arguments;
    EXPECT_NE(o.err.find(part), std::string::npos) << o.err;
  };
  expect_error(in("tokens.bin"), "error: -o " + in("tokens.bin") + ": is no folder");
  fs::create_directory(in("out"));
  EXPECT_EQ(run(command + in("out") + " --dry-run").exit_status, 0);
  write_file(in("out/lock"), "as it was");
  EXPECT_EQ(run(command + in("out") + " --dry-run").exit_status, 0);
  EXPECT_EQ(read_file(in("out/lock")), "as it was");
  fs::remove(in("out/lock"));
  expect_error(in("out") + " -d 7", "-d 7 is not a multiple");
  EXPECT_EQ(names_in(in("out")), std::set<std::string>());
  write_file(in("notes"), "mine");
  fs::create_symlink("../notes", in("out/lock"));
  expect_error(in("out"), "out/lock: cannot be written: ");
  fs::rename(in("notes"), in("out/lock"));
  expect_error(in("out"), "out/lock: is another program's file");
  EXPECT_EQ(read_file(in("out/lock")), "mine");
  fs::remove(in("out/lock"));
  write_file(in("out/config.toml"), "# mine\nlearning-rate = 0.5\n");
  write_file(in("out/removed_step_00000001"), "mine");
  const Outcome o = run(command + in("out") + " --keep 1");
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_NE(o.err.find("warning: " + in("out/removed_step_00000001") + ": cannot be put in place"), std::string::npos)
      << o.err;
  EXPECT_EQ(read_file(in("out/removed_step_00000001")), "mine");
  EXPECT_EQ(read_file(in("out/config.1.toml")), "# mine\nlearning-rate = 0.5\n");

  fs::rename(in("out/step_00000002"), in("out/step_00000007"));
  expect_error(in("out") + " -y -x 9", "step_00000007 is of step 2, by its state.json");
  for (const char* name : {"step_00000001", "step_00000007"}) fs::remove_all(in("out/") + name);
  write_file(in("out/positions.csv"), "damaged");
  expect_error(in("out") + " -y -c 0.5 --same-options", "weight decay (-c): 0.1, and now 0.5");
}

// What differs is named, with both values.
TEST_F(CommandLine, ResumingAnotherModelIsRefused) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string same = "-i " + in("tokens.bin") + small_model + "-x 1 -y -o " + in("out");
  ASSERT_EQ(run(trainer + same).exit_status, 0);
  auto refused_by = [&](const std::string& options, const std::string& differences) {
    const Outcome o = run(trainer + same + " " + options);
    EXPECT_EQ(o.exit_status, 1) << options;
    EXPECT_EQ(o.err, "error: -y: " + in("out/step_00000001") + " is of another model than the options describe: " +
                         differences + "; give the same, or start anew in another folder\n");
  };
  refused_by("--layers 5", "its n_layer is 4, the options' is 5 (-e, --layers)");
  refused_by("--heads 2 --wiring 'sla(3,1)'", "its n_head is 4, the options' is 2 (-e, --heads); its wiring is "
                                              "sla(3,3), the options' is sla(3,1) (-e, "
                                              "--wiring)");
  refused_by("--channels 64", "its n_embd is 32, the options' is 64 (-e, --channels)");
  refused_by("--vocab-size 258", "its vocab_size is 257, the options' is 258 (-e, --vocab-size)");
  refused_by("--max-seq-len 33", "its n_positions is 32, the options' is 33 (-e, --max-seq-len)");
  refused_by("--no-bias", "its bias is true, the options' is false (-e, --no-bias)");
  refused_by("--wiring 'gqa(2)'", "its wiring is sla(3,3), the options' is gqa(2) (-e, --wiring)");
  EXPECT_EQ(run(trainer + same + " --wiring ' sla(3 , 3)'").exit_status, 0) << "the same wiring";
}

// 2,000 tokens are 31 updates of 2 * 32.
TEST_F(CommandLine, OptionsThatAreNotGivenAreLoggedAndComparedAsWell) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  const std::string with = alone + trainer + "-i " + in("tokens.bin") +
                           " --layers 1 --heads 2 --channels 16 --vocab-size 257 --max-seq-len 32 -b 2 -o " + in("out");
  const Outcome o = run(with);
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const json logged = read_log(in("out")).at(0).at("run");
  const json expected = {{"model", "d12"},       {"seq_len", 32},    {"total_batch", 64},     {"steps", 31},
                         {"optimizer", "adamw"}, {"shuffle", false}, {"learning_rate", 3e-4}, {"grad_accum_steps", 1},
                         {"seed", 1337},         {"micro_batch", 2}, {"val_data", ""},        {"zero", 1},
                         {"schedule", "cosine"}, {"wiring", "plain"}};
  for (const auto& [key, value] : expected.items()) EXPECT_EQ(logged.value(key, json()), value) << key;
  EXPECT_EQ(run(with + " -y -t 32 -d 64 -x 31").err, "");
  EXPECT_NE(run(with + " -y -t 16").err.find("sequence length (-t): 32; now it is 16"), std::string::npos);
  EXPECT_NE(run(with + " -y -x 32 -d 128").err.find("64; training continues with 128"), std::string::npos);
}

// An older version of this program had no --optimizer and did not write the learning rate down.
TEST_F(CommandLine, WhatAnOlderCheckpointDoesNotSayWasAsByDefault) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string with = alone + trainer + "-i " + in("tokens.bin") + small_model + "-x 2 -y -o " + in("out");
  ASSERT_EQ(run(with + " -x 1").exit_status, 0);
  const std::string path = in("out/step_00000001/state.json");
  std::string text = read_file(path);
  for (const char* line : {",\n \"learning_rate\": 0.001", ",\n \"optimizer\": \"adamw\""}) {
    ASSERT_NE(text.find(line), std::string::npos) << text;
    text.erase(text.find(line), strlen(line));
  }
  text.erase(text.rfind(",\n \"checksum\""));
  write_state(path, text);
  fs::remove(in("out/log.jsonl"));  // which says it, too
  EXPECT_NE(run(with + " --optimizer muon").err.find("optimizer (--optimizer): adamw; now it is muon"),
            std::string::npos);
  const Outcome o = run(with + " -l 2e-3");
  EXPECT_EQ(o.exit_status, 0);
  EXPECT_EQ(o.err, "");
}

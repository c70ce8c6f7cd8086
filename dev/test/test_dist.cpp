// Several ranks, each a process that mpirun starts with its own emulated GPU: tests of the emulated NCCL and of the
// trainer on it. Runs from the repository's root, where build/emu_ranks and build/*/train_gpt2_sla_emu are.
//
// COVERS train_gpt2_sla.cu llmc/ranks/ llmc/model/timeline.h llmc/train/training.h dev/emu/nccl.cpp
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <map>
#include <thread>
#include <tuple>
#include "command_line.h"
#include "values.h"
#include "llmc/formats/safetensors.h"
#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/base/random.h"

class Ranks : public CommandLine {
 protected:
  TemporaryFiles temporary{folder};

  static void SetUpTestSuite() {
    allow_mpirun();
    setenv("SLA_EMU_NCCL_TIMEOUT", "60", 1);
  }
  Outcome run_ranks(int ranks, const std::string& command, const std::string& environment = "") const {
    return run(
        format("env %s timeout 300 mpirun --oversubscribe -np %d %s", environment.c_str(), ranks, command.c_str()));
  }
  void expect_death(int ranks, const std::string& name, const std::vector<std::string>& parts,
                    const std::string& environment = "") const {
    const Outcome o = run_ranks(ranks, "build/emu_ranks " + name, environment);
    EXPECT_NE(o.exit_status, 0) << name;
    for (const std::string& part : parts) EXPECT_NE(o.err.find(part), std::string::npos) << part << "\n" << o.err;
  }
};

// ----------------------------------------------------------------------------
// The emulated NCCL

using LongEmulatedNccl = Ranks;

TEST_F(LongEmulatedNccl, SumsInTheOrderOfRanksWithoutNvls) {
  for (int ranks : {1, 2, 3}) {
    const Outcome o = run_ranks(ranks, "build/emu_ranks collectives", "NCCL_NVLS_ENABLE=0");
    EXPECT_EQ(o.exit_status, 0) << ranks << "\n" << o.err;
  }
}

TEST_F(LongEmulatedNccl, SumsInTheSeedsOrderWithNvls) {
  for (const char* nvls : {"-u NCCL_NVLS_ENABLE", "NCCL_NVLS_ENABLE=2"}) {
    const Outcome o = run_ranks(3, "build/emu_ranks orders", nvls);
    EXPECT_EQ(o.exit_status, 0) << nvls << "\n" << o.err;
  }
}

TEST_F(LongEmulatedNccl, MovesWhatLiesBetweenTensorsToo) {
  const Outcome o = run_ranks(2, "build/emu_ranks gaps");
  EXPECT_EQ(o.exit_status, 0) << o.err;
}

TEST_F(LongEmulatedNccl, ReadsOldDataUnderSomeSeedWithoutAnEvent) {
  const Outcome o = run_ranks(2, "build/emu_ranks events");
  EXPECT_EQ(o.exit_status, 0) << o.err;
}

TEST_F(LongEmulatedNccl, NamesRanksThatCallDifferentCollectives) {
  expect_death(2, "other_count",
               {"ncclAllReduce of 64 elements of type 7 on rank 0", "ncclAllReduce of 32 elements of type 7 on rank "
                                                                    "1"});
  expect_death(2, "other_collective", {"ncclAllReduce of 1 elements", "ncclAllGather of 1 elements"});
  expect_death(2, "other_root", {"ncclBroadcast of 1 elements of type 7 with root 0", "with root 1 on rank 1"});
  expect_death(2, "one_more", {"ncclAllReduce of 64 elements", "ncclCommDestroy"});
}

TEST_F(LongEmulatedNccl, NamesARankThatWaitsTooLong) {
  expect_death(2, "not_called",
               {"rank 0 of 2 has waited 1 s for rank 1 with collective number 1, ncclAllReduce of 64 elements"},
               "SLA_EMU_NCCL_TIMEOUT=1");
}

TEST_F(LongEmulatedNccl, ChecksRangesAndOverlaps) {
  expect_death(2, "overrun", {"what is sent", "has 260 bytes, 4 more than are left"});
  expect_death(2, "overlap", {"overlaps what is sent"});
  expect_death(2, "wrong_part", {"overlaps what is sent"});
  expect_death(2, "overlap_in_group", {"ncclBroadcast: overlaps the memory of ncclReduce of the same group"});
  expect_death(2, "pending", {"1 collectives that have not run"});
}

TEST_F(LongEmulatedNccl, RefusesACommunicatorOfInconsistentRanks) {
  expect_death(2, "wrong_size", {" of 3 has waited 1 s for rank 2 with ncclCommInitRank"}, "SLA_EMU_NCCL_TIMEOUT=1");
  expect_death(2, "same_rank", {"two processes are rank 0 of 2"});
  expect_death(2, "other_size", {"for 2 ranks on rank 0, but for 3 on rank 1"});
  expect_death(2, "other_id", {" of 2 has waited 1 s for rank "}, "SLA_EMU_NCCL_TIMEOUT=1");
  EXPECT_EQ(run_ranks(2, "build/emu_ranks same_gpu").exit_status, 0);
}

TEST_F(LongEmulatedNccl, TakesSeveralRanksOnOneGpuIfAsked) {
  const std::string shared = "NCCL_MULTI_RANK_GPU_ENABLE=1";
  EXPECT_EQ(run_ranks(2, "build/emu_ranks shared_gpu", shared).exit_status, 0);
  EXPECT_EQ(run_ranks(3, "build/emu_ranks same_gpu", shared).exit_status, 0) << "of as many blocks as are usual";
  EXPECT_EQ(run_ranks(3, "build/emu_ranks shared_gpu", shared + " NCCL_MAX_CTAS=8").exit_status, 0);
}

using LongWatchdog = Ranks;

TEST_F(LongWatchdog, EndsARunInWhichARankDoesNotCome) {
  expect_death(3, "one_reduce_is_missing",
               {"error: rank 0 of 3 (pid ", "): at step 4 collective number 5 has not ended for 2 s: rank 2 of 3 (pid ",
                " is at step 4, before it; the run ends"},
               "SLA_EMU_NCCL_TIMEOUT=30");
}

TEST_F(LongWatchdog, WaitsForARankThatComputesAfterAPause) {
  const Outcome o = run_ranks(3, "build/emu_ranks a_rank_is_slow", "SLA_EMU_NCCL_TIMEOUT=30");
  EXPECT_EQ(o.exit_status, 0) << o.err;
}

// ----------------------------------------------------------------------------
// Training

// A small model, for which the emulated GPU is fast. An update has 4 micro-batches, which are divided among the ranks.
class Training : public Ranks {
 protected:
  void SetUp() override {
    Ranks::SetUp();
    write_file(in("tokens.bin"), shard_bytes(2000, 60));
  }
  std::string arguments(const std::string& more) const {
    return " -i " + in("tokens.bin") + " -j " + in("tokens.bin") +
           " --layers 2 --heads 2 --channels 16 --vocab-size 64 --max-seq-len 8" +
           " -t 8 -b 1 -d 32 -l 1e-2 --wiring \"sla(1,1)\" -k constant -m 5 -v 20 " + more;
  }
  // A run's log; the fp32 trainer's unless `program` says otherwise.
  std::vector<json> train(int ranks, const std::string& out, const std::string& more,
                          const std::string& environment = "",
                          const std::string& program = "build/fp32/train_gpt2_sla_emu") const {
    const Outcome o = run_ranks(ranks, program + arguments(more + " -o " + in(out)), environment);
    EXPECT_EQ(o.exit_status, 0) << o.err << o.out;
    return read_log(in(out));
  }
  // Two ranks train, and `signal` is sent to one of them once there is a checkpoint, or the ninth step. One that is
  // stopped by SIGSTOP is killed by the launcher.
  Outcome run_and_signal(int rank, const char* signal, const std::string& more) const {
    return run(format("(until grep -qsE '\"checkpoint\"|\"step\":9,' %s; do sleep 0.02; done; kill -%s $(cat %s)) & "
                      "timeout 100 "
                      "scripts/launch.sh 2 bash -c 'echo $$ >%s.$RANK; exec \"$@\"' rank "
                      "build/fp32/train_gpt2_sla_emu%s",
                      in("out/log.jsonl").c_str(), signal, in(format("pid.%d", rank)).c_str(), in("pid").c_str(),
                      arguments("-x 100000 -d 16 -v 0 -o " + in("out") + " " + more).c_str()));
  }
  pid_t pid_of(int rank) const { return atoi(read_file(in(format("pid.%d", rank))).c_str()); }
  // Expects one line `error: `, which has `what`, and that no rank lives.
  void expect_one_error(const Outcome& o, const std::string& what) const {
    EXPECT_NE(o.exit_status, 124) << "timeout's";
    EXPECT_NE(o.exit_status, 0);
    const size_t at = o.err.find("error: ");
    ASSERT_NE(at, std::string::npos) << o.err;
    EXPECT_LT(o.err.find(what, at), o.err.find('\n', at)) << o.err;
    EXPECT_EQ(o.err.find("error:", at + 1), std::string::npos) << o.err;
    for (int rank : {0, 1}) EXPECT_NE(kill(pid_of(rank), 0), 0) << rank;
  }
  // The last step in the log of the folder "out"; 0 if there is none.
  int newest_logged_step() const {
    const std::string log = read_file(in("out") + "/log.jsonl"), key = "{\"step\":";
    int step = 0;
    for (size_t at = log.find(key); at != std::string::npos; at = log.find(key, at + 1))
      step = atoi(log.c_str() + at + key.size());
    return step;
  }
  // The step of the newest checkpoint in the folder "out"; 0 if there is none.
  int newest_step() const {
    int step = 0;
    for (const fs::directory_entry& entry : fs::directory_iterator(in("out"))) {
      const std::string name = entry.path().filename().string();
      if (name.rfind("step_", 0) == 0) step = std::max(step, atoi(name.c_str() + 5));
    }
    return step;
  }
  static double last_val_loss(const std::vector<json>& log) { return last(log, "val_loss", NAN); }
  static double last(const std::vector<json>& log, const char* key, double otherwise) {
    double value = otherwise;
    for (const json& line : log) value = line.value(key, value);
    return value;
  }
  // Losses, norms and validation losses agree up to the order of fp32 sums.
  static void expect_the_same_curve(const std::vector<json>& log, const std::vector<json>& expected, size_t num_steps) {
    const std::vector<json> a = steps_of(log), b = steps_of(expected);
    ASSERT_EQ(a.size(), num_steps);
    for (size_t i = 0; i < a.size(); i++) {
      const json& e = b[b.size() - a.size() + i];
      EXPECT_EQ(a[i].at("step"), e.at("step"));
      EXPECT_NEAR(a[i].at("loss").get<double>() / e.at("loss").get<double>(), 1, 1e-6) << a[i];
      EXPECT_NEAR(a[i].at("grad_norm").get<double>() / e.at("grad_norm").get<double>(), 1, 1e-5) << a[i];
    }
    EXPECT_NEAR(last_val_loss(log) / last_val_loss(expected), 1, 1e-6);
    for (const char* key : {"ponder", "val_ponder"})
      EXPECT_NEAR(last(log, key, 0), last(expected, key, 0), 1e-5) << key;
  }
  // The losses in full precision. (The norm's last digit depends on how it is split into chunks.)
  static std::vector<double> losses_of(const std::vector<json>& log) {
    std::vector<double> losses;
    for (const json& step : steps_of(log)) losses.push_back(step.at("loss"));
    return losses;
  }
};
using LongTraining = Training;

TEST_F(LongTraining, HasTheSameLossesWithAnyNumberOfRanks) {
  const std::vector<json> alone = train(1, "1", "-x 20");
  for (int ranks : {2, 4}) {
    const std::string name = std::to_string(ranks);
    const std::vector<json> with_zero = train(ranks, name, "-x 20 --zero 1", "SLA_EMU_SEED=1");
    const std::vector<json> without_zero = train(ranks, name + "_whole", "-x 20 --zero 0", "SLA_EMU_SEED=2");
    expect_the_same_curve(with_zero, alone, 20);
    expect_the_same_curve(without_zero, alone, 20);
    EXPECT_EQ(losses_of(with_zero), losses_of(without_zero)) << "both sum in rank order";
    expect_the_same_checkpoint(in(name), in(name + "_whole"), 20);
  }
}

// In some steps a rank has no token that is scored.
TEST_F(LongTraining, HasTheSameLossesOfScoredTokensWithAnyNumberOfRanks) {
  write_file(in("tokens.mask"),
             mask_of_shard(shard_bytes(2000, 60), [](int i) { return i % 48 < 8 || (i / 96 % 2 == 0 && i % 3 == 0); }));
  const std::vector<json> alone = train(1, "1", "-x 10");
  EXPECT_GT(last(alone, "scored_tokens", 0), 0);
  EXPECT_GE(last(alone, "val_accuracy", -1), 0);
  expect_the_same_curve(train(2, "2", "-x 10 --zero 0"), alone, 10);
  expect_the_same_curve(train(4, "4", "-x 10 --zero 1"), alone, 10);
}

TEST_F(LongTraining, HasTheSameBitsPerByteWithTwoRanks) {
  const std::string bytes = "-x 0 -m 8 --vocab-size 257";
  const double alone = last(train(1, "1", bytes), "val_bits_per_byte", NAN);
  EXPECT_NEAR(last(train(2, "2", bytes), "val_bits_per_byte", NAN) / alone, 1, 1e-6);
}

// A gate's parameters, K/V heads of groups, gradients of shared q, masks, sums of outputs and of K/V of several layers,
// layers whose gradients add up, and tokens that halt.
TEST_F(LongTraining, HasTheSameLossesWithAnyNumberOfRanksAndWiring) {
  const std::string own = " -i " + in("tokens.bin") + " -j " + in("tokens.bin") +
                          " --layers 3 --heads 2 --channels 16 --vocab-size 64 " +
                          "--max-seq-len 8 -t 8 -b 1 -d 48 -l 1e-2 -k constant -m 5 -v 3 ";
  for (const auto& [wiring, most_ranks] : {std::pair("gate gqa(1) window(5,SL)", 2),
                                           {"reuse(2) fixed(4,1)", 2},
                                           {"dense modern", 2},
                                           {"router", 3},
                                           {"route(0.6) sla(1,1)", 3},
                                           {"depth sla(1,1)", 3},
                                           {"universal(1) relative gru act(0.1)", 3}}) {
    SCOPED_TRACE(wiring);
    const auto train_on = [&, wiring = wiring](int ranks, const std::string& out, const std::string& more) {
      const Outcome o =
          run_ranks(ranks, "build/fp32/train_gpt2_sla_emu" + own + format("--wiring '%s' -o ", wiring) + in(out) + more,
                    "");
      EXPECT_EQ(o.exit_status, 0) << o.err << o.out;
      return read_log(in(out));
    };
    for (const char* out : {"1", "2", "3", "4"}) fs::remove_all(in(out));
    const std::vector<json> alone = train_on(1, "1", " -x 6 -n 3");
    expect_the_same_curve(train_on(2, "2", " -x 6 --zero 1"), alone, 6);
    fs::create_directories(in("3"));
    fs::copy(in("1/step_00000003"), in("3/step_00000003"), fs::copy_options::recursive);
    fs::copy(in("1/log.jsonl"), in("3/log.jsonl"));  // by which both ranks have validated after step 3
    expect_the_same_curve(train_on(2, "3", " -x 6 -n 3 -y"), alone, 6);  // resumed by two ranks
    if (most_ranks == 3) expect_the_same_curve(train_on(3, "4", " -x 6 --zero 1"), alone, 6);
  }
}

// Six rows of 16 tokens in an update, one or more a micro-batch, on one to three ranks, on the CPU and on the emulated
// GPU: documents begin and end anywhere in them, and dropout draws by the row's number in the update.
TEST_F(LongTraining, HasTheSameLossesOfDocumentsAndDropoutOnAnyRanks) {
  write_file(in("documents.bin"), shard_of_documents(2000, 60));
  write_file(in("val.bin"), shard_bytes(200, 60));
  const std::string own = " -i " + in("documents.bin") + " -j " + in("val.bin") +
                          " --layers 2 --heads 2 --channels 16 --vocab-size 257 --max-seq-len 16 -t 16 -d 96 " +
                          "-l 1e-2 -k constant -m 0 -v 3 -x 3 ";
  int runs = 0;
  const auto train_on = [&](int ranks, int rows, const std::string& program, const std::string& options) {
    const std::string out = std::to_string(runs++);
    const Outcome o = run_ranks(ranks, program + own + options + format(" -b %d -o ", rows) + in(out));
    EXPECT_EQ(o.exit_status, 0) << o.err << o.out;
    return read_log(in(out));
  };
  const std::string on_gpu = "build/fp32/train_gpt2_sla_emu", on_cpu = "build/fp32/train_gpt2_sla_cpu";
  const std::vector<json> neither = train_on(1, 1, on_cpu, "--wiring 'rope sla(1,1)'");
  for (const char* options : {"--wiring 'documents rope sla(1,1)'", "--wiring 'rope sla(1,1)' --dropout 0.2"}) {
    SCOPED_TRACE(options);
    const std::vector<json> alone = train_on(1, 1, on_cpu, options);
    for (int rows : {2, 6}) expect_the_same_curve(train_on(1, rows, on_cpu, options), alone, 3);
    for (const auto& [ranks, rows] : {std::pair(2, 1), {2, 3}, {3, 2}})
      expect_the_same_curve(train_on(ranks, rows, on_gpu, options), alone, 3);
    EXPECT_GT(std::fabs(last_val_loss(alone) / last_val_loss(neither) - 1), 1e-4) << "they matter";
  }
}

// Norms without biases, a head of its own and capped logits: whichever rank keeps what, and whatever is computed again.
TEST_F(LongTraining, OfTodaysBlockHasTheSameLossesOnTwoRanks) {
  const struct {
    int ranks;
    const char *optimizer, *plan;
  } runs[] = {{1, "adamw", "--zero 0 -r 4"},
              {2, "adamw", "--zero 0 -r 4"},
              {2, "adamw", "--zero 1 -r 0"},
              {2, "adamw", "--zero 1 -r 4"},
              {2, "muon", "--zero 1 -r 4"}};
  std::map<std::string, std::vector<json>> alone;
  for (const auto& r : runs) {
    SCOPED_TRACE(testing::Message() << r.optimizer << ", " << r.ranks << " ranks, " << r.plan);
    const std::string options = format("--wiring modern -x 2 -v 2 --optimizer %s ", r.optimizer);
    if (alone.count(r.optimizer) == 0) alone[r.optimizer] = train(1, r.optimizer, options);
    const std::string out = format("%s_%d_%c_%c", r.optimizer, r.ranks, r.plan[7], r.plan[12]);
    expect_the_same_curve(train(r.ranks, out, options + r.plan), alone[r.optimizer], 2);
  }
}

// The same four streams, as rows of one rank, of two ranks and of four. The data end after 15 segments, amid the
// fourth update.
TEST_F(LongTraining, HasTheSameLossesWithTheSameStreamsOnAnyNumberOfRanks) {
  write_file(in("streams.bin"), shard_bytes(4 * 15 * 8 + 1, 60));
  const std::string own = " -i " + in("streams.bin") + " -j " + in("streams.bin") +
                          " --layers 3 --heads 2 --channels 16 --vocab-size 64 --max-seq-len 8 -d 128 -l 1e-2 " +
                          "-k constant -m 0 -v 6 -x 6 --wiring 'rope memory(12) sla(1,1)' -o ";
  const auto train_on = [&](int ranks, const std::string& out, const std::string& more) {
    const Outcome o =
        run_ranks(ranks, "build/fp32/train_gpt2_sla_emu" + own + in(out) + format(" -b %d ", 4 / ranks) + more);
    EXPECT_EQ(o.exit_status, 0) << o.err << o.out;
    return read_log(in(out));
  };
  const std::vector<json> alone = train_on(1, "1", "-n 3");
  expect_the_same_curve(train_on(2, "2", "-n 3 --zero 1"), alone, 6);
  expect_the_same_curve(train_on(4, "4", "--zero 0"), alone, 6);
  for (const auto& [ranks, from] : {std::pair(2, "1"), std::pair(4, "2"), std::pair(1, "2")}) {
    const std::string out = format("%d_from_", ranks) + from;
    fs::create_directories(in(out));
    fs::copy(in(from) + "/step_00000003", in(out) + "/step_00000003", fs::copy_options::recursive);
    expect_the_same_curve(train_on(ranks, out, "-y"), alone, 3);
  }
}

// The data are 29 sequences, the rest of the first file and two short files: no number of ranks or of sequences in a
// micro-batch divides them. What one rank computes of them one after the other is the loss of all.
TEST_F(LongTraining, ValidatesOnAllDataAlikeWithAnyNumberOfRanks) {
  fs::create_directory(in("val"));
  write_file(in("val/a.bin"), shard_bytes(8 * 29 + 6, 60));
  write_file(in("val/b.bin"), shard_bytes(4, 20));
  write_file(in("val/c.bin"), shard_bytes(7, 40));
  ASSERT_EQ(run("env OMP_NUM_THREADS=1 " + trainer + arguments("-x 20 -v 0 -o " + in("trained"))).exit_status, 0);
  const std::string from = " -e " + in("trained/step_00000020");
  double expected = NAN;
  for (auto [ranks, b] : {std::pair(1, 1), std::pair(1, 3), std::pair(2, 1), std::pair(2, 3), std::pair(3, 2)}) {
    const std::string out = format("%d_%d", ranks, b);
    const Outcome o = run_ranks(ranks, "build/fp32/train_gpt2_sla_emu" + from + " -j '" + in("val/*.bin") +
                                           format("' -t 8 -b %d -x 0 -v 1 -m 0 -o ", b) + in(out));
    ASSERT_EQ(o.exit_status, 0) << o.err;
    EXPECT_NE(o.out.find("(246 tokens"), std::string::npos) << o.out;
    const double loss = last_val_loss(read_log(in(out)));
    if (ranks * b == 1) expected = loss;
    EXPECT_NEAR(loss / expected, 1, 1e-6) << ranks << " ranks, -b " << b;
  }
}

// A checkpoint that 4 ranks wrote after 6 updates resumes on 4, 1, 2 and 3 ranks, and the last three's checkpoints on 4
// again: with the same bits on the same number of ranks, with the same curve on any. An update has 12 micro-batches.
TEST_F(LongTraining, ResumesOnAnyNumberOfRanks) {
  const auto resume = [&](int ranks, const std::string& from, int step) {
    const std::string out = format("%s_then_%d", from.c_str(), ranks), checkpoint = format("/step_%08d", step);
    fs::create_directories(in(out));
    fs::copy(in(from) + checkpoint, in(out) + checkpoint, fs::copy_options::recursive);
    return train(ranks, out, "-x 10 -n 2 -d 96 -y");
  };
  const std::vector<json> all = train(4, "4", "-x 10 -n 2 -d 96");
  for (int ranks : {4, 1, 2, 3}) expect_the_same_curve(resume(ranks, "4", 6), all, 4);
  expect_the_same_checkpoint(in("4_then_4"), in("4"), 10);
  for (int ranks : {1, 2, 3}) expect_the_same_curve(resume(4, format("4_then_%d", ranks), 8), all, 2);
}

// The seed determines when collectives run relative to operations. A missing wait for an event would show in the
// losses.
TEST_F(LongTraining, DoesNotDependOnWhenCollectivesRun) {
  for (const char* zero : {"0", "1"}) {
    std::vector<json> expected;
    for (int seed = 1; seed <= 5; seed++) {
      const std::string name = format("%s_%d", zero, seed);
      const std::vector<json> steps =
          steps_of(train(2, name, format("-x 2 -d 16 -j '' --zero %s", zero), format("SLA_EMU_SEED=%d", seed)));
      if (seed == 1) expected = steps;
      EXPECT_EQ(steps, expected) << "seed " << seed << ", --zero " << zero;
    }
  }
}

// Two ranks' sums have one order only.
TEST_F(LongTraining, HasTheSameBitsUnlessNvlsIsOn) {
  const auto outcome_of = [&](const char* nvls, int seed) {
    fs::remove_all(in("out"));
    Outcome o = run_ranks(3, "build/fp32/train_gpt2_sla_emu" + arguments("-x 3 -d 24 -v 0 -o " + in("out")),
                          format("%s SLA_EMU_SEED=%d", nvls, seed));
    EXPECT_EQ(o.exit_status, 0) << o.err;
    return o;
  };
  const std::string note = "NCCL_NVLS_ENABLE=1: NCCL may add up in another order in each run, so that the bits of two "
                           "runs may differ\n";
  std::vector<double> expected;
  int differ = 0;
  for (int seed = 1; seed <= 3; seed++) {
    EXPECT_EQ(outcome_of("-u NCCL_NVLS_ENABLE", seed).out.find("NVLS"), std::string::npos);
    const std::vector<double> losses = losses_of(read_log(in("out")));
    if (seed == 1) expected = losses;
    EXPECT_EQ(losses, expected) << "seed " << seed;
    const Outcome with_nvls = outcome_of("NCCL_NVLS_ENABLE=1", seed);
    const size_t at = with_nvls.out.find(note);
    ASSERT_NE(at, std::string::npos) << with_nvls.out;
    EXPECT_EQ(with_nvls.out.find(note, at + 1), std::string::npos) << "one line";
    differ += losses_of(read_log(in("out"))) != expected;
  }
  EXPECT_GT(differ, 0);
}

// Libraries take all but 1 MB of the GPU memory that the plan keeps free, after the plan has been checked; NCCL takes
// its memory before. Three micro-batches: the first is eager, the second captured, the third summed over ranks.
TEST_F(LongTraining, HasRoomForTheMicroBatchThatItRecommends) {
  write_file(in("tokens.bin"), shard_bytes(30000, 60));
  for (int ranks : {1, 2}) {
    const std::string memory = ranks == 1 ? "SLA_EMU_MEMORY=1052,998,1" : "SLA_EMU_MEMORY=1055,998,1,3";
    const auto outcome_of = [&](int b, const char* more) {
      return run_ranks(ranks,
                       "build/fp32/train_gpt2_sla_emu" +
                           arguments(format("-v 0 -b %d -d %d -x 2 %s", b, b * 8 * ranks * 3, more)),
                       memory);
    };
    const Outcome plan = outcome_of(1, "--dry-run");
    ASSERT_EQ(plan.exit_status, 0) << plan.err;
    EXPECT_NE(plan.out.find("CUDA, its graphs and NCCL     1.00 GB to be kept free"), std::string::npos) << plan.out;
    const std::string before = "the largest micro-batch that fits is ";
    const size_t at = plan.out.find(before);
    ASSERT_NE(at, std::string::npos) << plan.out;
    const int largest = atoi(plan.out.c_str() + at + before.size());
    EXPECT_GT(largest, 10);
    const Outcome fits = outcome_of(largest, "");
    EXPECT_EQ(fits.exit_status, 0) << largest << fits.err;
    EXPECT_NE(fits.out.find("done: 2 steps"), std::string::npos) << fits.out;
    EXPECT_NE(outcome_of(largest + 1, "").err.find("error: the plan exceeds the free memory by "), std::string::npos);
  }
}

// 8,000 rows of 201,216 bytes on each rank, in chunks of a 32nd of 8 GB, also where NCCL has taken 3 GB before the plan
// is made: the gradients are summed in the same order, however much is free.
TEST_F(LongTraining, ChunksLogitsByTheGpusMemoryNotByWhatIsFree) {
  write_file(in("tokens.bin"), shard_bytes(30000, 60));
  for (const auto& [memory, free] : {std::pair("8000", "of 8.00 GB free"), {"8000,0,0,3000", "of 5.00 GB free"}}) {
    const Outcome o =
        run_ranks(2, "build/fp32/train_gpt2_sla_emu" + arguments("-v 0 -b 1000 -d 16000 --vocab-size 50257 --dry-run"),
                  std::string("SLA_EMU_MEMORY=") + memory);
    ASSERT_EQ(o.exit_status, 0) << o.err;
    EXPECT_NE(o.out.find(free), std::string::npos) << o.out;
    EXPECT_NE(o.out.find("  logits                       206.0 MB\n"), std::string::npos) << "chunks of 1,024 rows\n"
                                                                                          << o.out;
  }
}

// Loss and what is counted with it, N + R and two flags, with shards the gradients' squares as well; doubles are
// reduced for nothing else.
TEST_F(LongTraining, SumsAnUpdatesNumbersInOneReduceOfHighPriority) {
  for (const char* zero : {"0", "1"}) {
    const Outcome o =
        run_ranks(2, "build/fp32/train_gpt2_sla_emu" + arguments(format("-x 3 -d 16 -v 0 --zero %s", zero)),
                  "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=COLL");
    EXPECT_EQ(o.exit_status, 0) << o.err;
    const auto count = [&](const std::string& text) {
      int n = 0;
      for (size_t at = 0; (at = o.out.find(text, at)) != std::string::npos; at++) n++;
      return n;
    };
    EXPECT_EQ(count("datatype 8 "), 3) << o.out;
    EXPECT_EQ(count(format("AllReduce: count %d datatype 8 ", atoi(zero) == 1 ? 10 : 9)), 3) << o.out;
    EXPECT_GT(count("NCCL INFO "), 10);
    EXPECT_EQ(count("stream priority -5\n"), count("NCCL INFO "));
  }
}

// From the timeline in the debug log. A layer's gradients are reduced while the layers below run backward, and its
// weights are gathered while the layers before it run forward, as often as the seed allows; a reduce begins after its
// gradients exist, a gather ends before its weights are used.
TEST_F(LongTraining, OverlapsReduceAndGatherWithTheComputationOfOtherLayers) {
  const std::vector<json> log = train(2, "out", "-x 20 -d 16 -v 0 --layers 4 --log-level debug");
  struct Span {
    double begin, end;
  };
  std::map<std::tuple<int, std::string, std::string>, Span> spans;  // by step, span, and what the span is of
  for (const json& line : log)
    if (line.contains("span"))
      spans[{line.at("step"), line.at("span"), line.at("of")}] = {line.at("begin_ms"), line.at("end_ms")};
  int sums_beside = 0, gathers_beside = 0;
  for (int step = 1; step <= 20; step++) {
    for (int layer = 1; layer < 4; layer++) {
      const std::string here = format("layer %d", layer), below = format("layer %d", layer - 1);
      const Span reduce = spans.at({step, "reduce", here}), gather = spans.at({step, "gather", here});
      const Span backward_below = spans.at({step, "backward", below});
      EXPECT_GE(reduce.begin, spans.at({step, "backward", here}).begin);
      EXPECT_GE(gather.begin, reduce.end);
      sums_beside += reduce.begin < backward_below.end && backward_below.begin < reduce.end;
      if (step == 20) continue;  // the last step
      const Span forward_below = spans.at({step + 1, "forward", below});
      EXPECT_LE(gather.end, forward_below.end);  // whose last operation is the layer's own first LayerNorm
      gathers_beside += gather.end > spans.at({step + 1, "forward", "layer 0"}).begin;
    }
  }
  EXPECT_GT(sums_beside, 0);  // 0 if they never overlapped
  EXPECT_GT(gathers_beside, 0);
}

TEST_F(LongTraining, InBf16HasTheSameBitsWithoutZero) {
  const std::string bf16 = "build/bf16/train_gpt2_sla_emu";
  const std::vector<json> with_zero = train(3, "with_zero", "-x 5 -d 24 -v 0 --zero 1", "", bf16);
  EXPECT_EQ(losses_of(with_zero), losses_of(train(3, "whole", "-x 5 -d 24 -v 0 --zero 0", "", bf16)));
  expect_the_same_checkpoint(in("with_zero"), in("whole"), 5);
}

// Each rank keeps, and updates, its share of whole matrices. An update has 6 micro-batches.
TEST_F(LongTraining, ByMuonHasTheSameLossesWithAnyNumberOfRanks) {
  const std::string muon = "-x 4 -n 2 -d 48 --optimizer muon ";
  const std::vector<json> alone = train(1, "1", muon);
  const auto expect_as_alone = [&](const std::string& out, size_t steps) {
    expect_the_same_curve(read_log(in(out)), alone, steps);
    const std::string file = "/step_00000004/optimizer.safetensors";
    const SafetensorsFile found(in(out) + file), expected(in("1") + file);
    EXPECT_EQ(fs::file_size(in(out) + file), fs::file_size(in("1") + file));
    ASSERT_EQ(found.tensors().size(), expected.tensors().size());
    for (size_t i = 0; i < expected.tensors().size(); i++) {
      const SafetensorsTensor &tensor = expected.tensors()[i], &same = found.tensors()[i];
      ASSERT_TRUE(same.name == tensor.name && same.begin == tensor.begin && same.shape == tensor.shape) << tensor.name;
      std::vector<float> a(size_t(tensor.num_elements())), b(a.size());
      found.read_f32(same, a.data()), expected.read_f32(tensor, b.data());
      EXPECT_LE(relative_error(a, b), 1e-5) << tensor.name;
    }
  };
  for (int ranks : {2, 3}) {
    train(ranks, std::to_string(ranks), muon, "SLA_EMU_SEED=1");
    expect_as_alone(std::to_string(ranks), 4);
  }
  train(3, "3_again", muon, "SLA_EMU_SEED=2");
  expect_the_same_checkpoint(in("3_again"), in("3"), 4);
  for (const auto& [from, ranks] : {std::pair("2", 3), {"3", 1}, {"1", 2}}) {
    const std::string out = format("%s_then_%d", from, ranks), checkpoint = "/step_00000002";
    fs::create_directories(in(out));
    fs::copy(in(from) + checkpoint, in(out) + checkpoint, fs::copy_options::recursive);
    train(ranks, out, muon + "-y");
    expect_as_alone(out, 2);
  }
  train(2, "2_whole", muon + "--zero 0");
  expect_as_alone("2_whole", 4);
}

TEST_F(LongTraining, ByMuonContinuesOnOneRankWhenOneOfTwoIsKilled) {
  expect_one_error(run_and_signal(1, "KILL", "-n 2 --optimizer muon"), "rank 1 of 2 was ended by SIGKILL");
  const std::vector<json> alone = steps_of(train(1, "alone", "-x 9 -d 16 -v 0 --optimizer muon"));
  const int step = newest_step();
  ASSERT_TRUE(2 <= step);
  const std::vector<json> resumed = steps_of(train(1, "out", format("-x %d -d 16 -v 0 -y --optimizer muon", step + 2)));
  for (const json& line : resumed) {
    const size_t i = line.at("step").get<size_t>() - 1;
    if (i >= alone.size()) break;
    EXPECT_NEAR(line.at("loss").get<double>() / alone[i].at("loss").get<double>(), 1, 1e-6);
  }
  EXPECT_EQ(resumed.back().at("step"), step + 2);
}

// The variables are of an MPI that this process is not connected to: to its own it is alone.
TEST_F(LongTraining, RefusesRanksOfAnotherMpi) {
  const Outcome o = run("OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1 timeout 60 "
                        "build/fp32/train_gpt2_sla_emu -e d12 -i none.bin");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("mpirun has started 2 processes, and MPI knows of 1: "), std::string::npos) << o.err;
}

// A launcher sets each rank's variables, with the rank's number for $r; MPI tells the ranks of `mpirun` their number.
TEST_F(LongTraining, ByEveryLauncherTwoRanksHaveTheSameLosses) {
  const std::vector<json> expected = steps_of(train(2, "mpirun", "-x 2 -j ''"));
  ASSERT_EQ(expected.size(), 2u);
  fs::create_directory(in("tmp"));
  setenv("TMPDIR", in("tmp").c_str(), 1);
  const auto command = [&](const std::string& out) {
    return "build/fp32/train_gpt2_sla_emu" + arguments("-x 2 -j '' -o " + in(out));
  };
  const auto expect_same = [&](const std::string& out, const std::string& ranks) {
    const Outcome o = run(ranks);
    EXPECT_EQ(o.exit_status, 0) << out << o.err;
    EXPECT_EQ(steps_of(read_log(in(out))), expected) << out;
    EXPECT_EQ(names_in(in("tmp")), std::set<std::string>()) << out << " leaves no files";
    for (const std::string& name : names_in(in(out))) EXPECT_NE(name.find("ranks-"), 0u) << out;
  };
  const std::string srun = "SLURM_PROCID=$r SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=$r SLURM_JOB_ID=7 SLURM_STEP_ID=0 ";
  struct Launcher {
    const char* name;
    std::string variables, options;
  };
  for (const Launcher& l : {
           Launcher{"torchrun", "RANK=$r WORLD_SIZE=2 LOCAL_RANK=$r LOCAL_WORLD_SIZE=2 MASTER_PORT=1", ""},
           {"srun", srun + "SLURM_STEP_TASKS_PER_NODE=2", ""},
           {"srun_with_a_gpu_each", srun + "SLURM_STEP_TASKS_PER_NODE=2 CUDA_VISIBLE_DEVICES=$r", ""},
           {"srun_on_two_machines", srun + "SLURM_STEP_TASKS_PER_NODE=1,1", ""},
           {"in_a_folder", srun, " --rendezvous '" + in("a \"b\"") + "'"},
       })
    expect_same(l.name, "for r in 0 1; do timeout 100 env " + l.variables + " " + command(l.name) + l.options +
                            " & pids=\"$pids $!\"; done; for p in $pids; do wait $p || exit; done");
  expect_same("launch", "timeout 100 scripts/launch.sh 2 " + command("launch"));
  unsetenv("TMPDIR");
}

TEST_F(LongTraining, TwoRanksOnOneGpuAreRefusedInOurWords) {
  const std::string command =
      "timeout 60 scripts/launch.sh 2 env CUDA_VISIBLE_DEVICES=5 build/fp32/train_gpt2_sla_emu" + arguments("-x 1 -d "
                                                                                                            "16 -v 0");
  const Outcome o = run(command);
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_EQ(o.err.find("error: NCCL takes one rank on a GPU, and two of these may have the same, GPU-"), 0u) << o.err;
  EXPECT_LT(o.err.find("CUDA_VISIBLE_DEVICES must show"), o.err.find('\n')) << o.err;
  EXPECT_LT(o.err.find("LOCAL_RANK=0 takes its own"), o.err.find('\n')) << o.err;
  EXPECT_EQ(o.err.find("error:", 1), std::string::npos) << "one error\n" << o.err;
  EXPECT_EQ(run("NCCL_MULTI_RANK_GPU_ENABLE=1 " + command).exit_status, 0);
}

TEST_F(LongTraining, ARankThatIsKilledEndsTheRun) {
  for (int rank : {0, 1}) {
    expect_one_error(run_and_signal(rank, "KILL", "-n 2"), format("rank %d of 2 was ended by SIGKILL", rank));
    if (rank == 0) fs::remove_all(in("out"));
  }
  const int step = newest_step();
  EXPECT_EQ(steps_of(train(2, "out", format("-x %d -d 16 -v 0 -y", step + 2))).back().at("step"), step + 2);
}

TEST_F(LongTraining, NamesARankThatIsStopped) {
  const Outcome o = run_and_signal(1, "STOP", "--hang-timeout 3");
  expect_one_error(o, format(" s: rank 1 of 2 (pid %d on ", int(pid_of(1))));
  EXPECT_NE(o.err.find(" does not answer since its step "), std::string::npos) << o.err;
}

// One of two processes is killed at any time, while it loads, amid a step or while a checkpoint is written: the other
// one ends, no checkpoint is half-written, and the newest whole one resumes with the bits of an undisturbed run.
TEST_F(LongTraining, KilledAtAnyTimeResumesWithTheSameBits) {
  const std::string trainer_of_ranks = "build/fp32/train_gpt2_sla_emu" + arguments("-x 40 -n 3 -d 16 -v 0 -o ");
  const double start = seconds_now();
  ASSERT_EQ(run("scripts/launch.sh 2 " + trainer_of_ranks + in("undisturbed")).exit_status, 0);
  const double seconds = seconds_now() - start;
  int with_checkpoints = 0;
  const char* const kills = getenv("FAULTS_KILLS");
  for (int kill = 0; kill < (kills != nullptr ? atoi(kills) : 20); kill++) {
    SCOPED_TRACE(kill);
    fs::remove_all(in("out"));
    const Outcome o = run(format("timeout 100 scripts/launch.sh 2 bash -c '[ $RANK != %d ] || (sleep %.3f; kill -9 $$) "
                                 "& "
                                 "exec \"$@\"' rank %s",
                                 kill % 2, random_uniform(12, RandomStream::sample, 0, uint64_t(kill)) * seconds,
                                 (trainer_of_ranks + in("out")).c_str()));
    EXPECT_TRUE(o.exit_status == 137 || o.out.find("done: 40 steps") != std::string::npos) << o.exit_status << o.err;
    if (!fs::exists(in("out/config.toml"))) continue;
    with_checkpoints += newest_step() > 0;
    const Outcome resumed = run("scripts/launch.sh 2 " + trainer_of_ranks + in("out") + " -y");
    EXPECT_EQ(resumed.exit_status, 0) << resumed.err;
    expect_the_same_checkpoint(in("out"), in("undisturbed"), 40);
    for (const std::string& name : names_in(in("out"))) EXPECT_NE(name.find("unfinished_"), 0u) << name;
  }
  EXPECT_GE(with_checkpoints, 3);
}

// A rank that finds its tokens gone tells the others by the request to stop that they all see.
TEST_F(LongTraining, OfATokenFileThatIsCutAllRanksSaveAndEnd) {
  std::thread cutter([&] {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (newest_logged_step() < 3 && std::chrono::steady_clock::now() < end) usleep(10000);
    truncate(in("tokens.bin").c_str(), 1024);
  });
  const Outcome o =
      run_ranks(2, "timeout 100 build/fp32/train_gpt2_sla_emu" + arguments("-x 100000 -d 16 -v 0 -o " + in("out")));
  cutter.join();
  EXPECT_EQ(o.exit_status, 1) << o.out;
  const size_t at = o.err.find("error: ");
  ASSERT_NE(at, std::string::npos) << o.err;
  EXPECT_LT(o.err.find("tokens.bin: has become shorter", at), o.err.find('\n', at)) << o.err;
  EXPECT_EQ(o.err.find("error: ", at + 1), std::string::npos) << o.err;
  EXPECT_EQ(newest_step(), newest_logged_step());
}

// Ranks in different folders, in which the same names are other files.
TEST_F(LongTraining, NamesARankThatSeesOtherFiles) {
  const auto run_in_folders = [&](const std::string& more, const std::string& more_of_second) {
    const std::string program = fs::absolute("build/fp32/train_gpt2_sla_emu").string() + arguments("-d 16 -v 0 ");
    return run("timeout 100 mpirun --oversubscribe -np 1 -wdir " + in("a") + " " + program + more + " : -np 1 -wdir " +
               in("b") + " " + program + more + more_of_second);
  };
  const auto expect_names = [&](const Outcome& o, const std::string& what) {
    EXPECT_EQ(o.exit_status, 1);
    const size_t at = o.err.find("error:");
    ASSERT_NE(at, std::string::npos) << o.err;
    EXPECT_LT(o.err.find("rank 1 of 2 (pid ", at), o.err.find('\n', at)) << o.err;
    EXPECT_LT(o.err.find(what, at), o.err.find('\n', at)) << what << "\n" << o.err;
    EXPECT_EQ(o.err.find("error:", at + 1), std::string::npos) << o.err;
  };
  for (const char* name : {"a", "b"}) {
    fs::create_directories(in(name));
    write_file(in(name) + "/here.bin", shard_bytes(name[0] == 'a' ? 2000 : 1000, 60));
    write_file(in(name) + "/same.bin", shard_bytes(2000, 60));
  }
  write_file(in("a") + "/only_here.bin", shard_bytes(2000, 60));
  expect_names(run_in_folders("-i same.bin -x 2 ", "-l 2e-2"), "differ: this rank has \"learning-rate = 0.02\", where "
                                                               "rank 0 has \"learning-rate = 0.01\"");
  expect_names(run_in_folders("-i here.bin -x 2 ", ""), "this rank has \"1000 training tokens");
  expect_names(run_in_folders("-i only_here.bin -x 2 ", ""), "only_here.bin");
  const Outcome unsaved = run_in_folders("-i same.bin -x 2 -o unsaved ", "");
  EXPECT_EQ(unsaved.exit_status, 1);
  EXPECT_NE(unsaved.err.find("error: rank 1 could not write its shard of unsaved/unfinished_step_00000002"),
            std::string::npos)
      << unsaved.err;
  EXPECT_NE(unsaved.err.find("): unsaved/unfinished_step_00000002/optimizer.safetensors: no such file"),
            std::string::npos)
      << unsaved.err;
  EXPECT_FALSE(fs::exists(in("a") + "/unsaved/step_00000002") || fs::exists(in("a") + "/unsaved/"
                                                                                      "unfinished_step_00000002"));
  for (const char* name : {"a", "b"})  // a run of one process in each, with other initial weights
    ASSERT_EQ(run("cd " + in(name) + " && " + fs::absolute("build/fp32/train_gpt2_sla_emu").string() +
                  arguments("-d 16 -v 0 -i same.bin -x 2 -o out --seed " + std::string(name[0] == 'a' ? "1337" : "5")))
                  .exit_status,
              0);
  expect_names(run_in_folders("-i same.bin -x 3 -o out -y ", ""), "the checkpoint's checksum");
  fs::remove_all(in("b") + "/out");
  expect_names(run_in_folders("-i same.bin -x 3 -o out -y ", ""), "out/step_00000002/state.json: cannot be read");
}

TEST_F(LongTraining, ABatchThatRanksCannotDivideIsOneError) {
  const Outcome o = run_ranks(4, "build/fp32/train_gpt2_sla_emu" + arguments("-d 48 -o " + in("never")));
  EXPECT_EQ(o.exit_status, 1);
  const std::string message = "error: -d 48 is not a multiple of B * T * ranks = 1 * 8 * 4 = 32 tokens; take one that "
                              "is\n";
  const size_t at = o.err.find(message);
  EXPECT_NE(at, std::string::npos) << o.err;
  EXPECT_EQ(o.err.find("error:", at + 1), std::string::npos) << o.err;
  EXPECT_FALSE(fs::exists(in("never")));
}

TEST_F(LongTraining, OnlyRankZeroPrints) {
  const Outcome o = run_ranks(2, "build/fp32/train_gpt2_sla_emu" + arguments("-x 1 -d 16 -j '' -s 1 -g 4"));
  EXPECT_EQ(o.exit_status, 0) << o.err;
  for (const char* line : {"memory plan", "1 micro-batches of 1 x 8 tokens on each of 2 ranks", "step 1/1 |",
                           "--- sample", "done: 1 steps"}) {
    const size_t at = o.out.find(line);
    EXPECT_NE(at, std::string::npos) << line << "\n" << o.out;
    EXPECT_EQ(o.out.find(line, at + 1), std::string::npos) << line << "\n" << o.out;
  }
  EXPECT_EQ(o.out.find('\033'), std::string::npos) << "escape sequences of a terminal";
}

class LongStallingDisk : public Training {
 protected:
  void SetUp() override {
    Training::SetUp();
    write_file(in("stall.c"), R"c(
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <fcntl.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <unistd.h>
    // Once there is the file $AFTER, the next call for the file $STALLS takes twelve seconds.
    static void stall(int fd) {
      static int has_stalled;
      char link[64], path[4096] = "";
      snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
      if (has_stalled || access(getenv("AFTER"), F_OK) != 0 || readlink(link, path, sizeof path - 1) < 0) return;
      if (strcmp(path, getenv("STALLS")) == 0) has_stalled = 1, sleep(12), close(creat(getenv("STALLED"), 0600));
    }
    ssize_t pread(int fd, void* to, size_t n, off_t at) {
      stall(fd);
      return ((ssize_t(*)(int, void*, size_t, off_t))dlsym(RTLD_NEXT, "pread"))(fd, to, n, at);
    }
    ssize_t pread64(int fd, void* to, size_t n, off_t at) { return pread(fd, to, n, at); }
    ssize_t pwrite(int fd, const void* from, size_t n, off_t at) {
      stall(fd);
      return ((ssize_t(*)(int, const void*, size_t, off_t))dlsym(RTLD_NEXT, "pwrite"))(fd, from, n, at);
    }
    ssize_t pwrite64(int fd, const void* from, size_t n, off_t at) { return pwrite(fd, from, n, at); }
    ssize_t write(int fd, const void* from, size_t n) {
      stall(fd);
      return ((ssize_t(*)(int, const void*, size_t))dlsym(RTLD_NEXT, "write"))(fd, from, n);
    })c");
    ASSERT_EQ(run("gcc -shared -fPIC -o " + in("stall.so") + " " + in("stall.c") + " -ldl").exit_status, 0);
  }
  // Trains with two ranks. For one of them the file `name` stalls, once there is the file `after`.
  Outcome train_stalled(int rank, const char* name, const char* after, const std::string& more) const {
    fs::remove_all(in("out"));
    fs::remove(in("stalled"));
    return run(format("timeout 100 scripts/launch.sh 2 bash -c '[ $RANK != %d ] || export ASAN_OPTIONS="
                      "verify_asan_link_order=0 AFTER=%s STALLS=%s STALLED=%s LD_PRELOAD=%s; exec \"$@\"' rank "
                      "build/fp32/train_gpt2_sla_emu%s %s -o %s",
                      rank, in(after).c_str(), fs::absolute(in(name)).c_str(), in("stalled").c_str(),
                      in("stall.so").c_str(), arguments("").c_str(), more.c_str(), in("out").c_str()));
  }
};

// A rank's read of a token file, or rank 0's line of the log or first bytes of a checkpoint, takes longer than a rank
// may hang: a disk is no rank.
TEST_F(LongStallingDisk, IsNoRankThatHangs) {
  write_file(in("val.bin"), shard_bytes(2000, 60));
  const char *const at_first = "out/log.jsonl", *const later = "out/step_00000003";
  for (const auto& [rank, name, after] : {std::tuple(1, "tokens.bin", at_first),
                                          {1, "tokens.bin", later},
                                          {1, "val.bin", later},
                                          {0, "out/log.jsonl", later},
                                          {0, "out/unfinished_step_00000003/optimizer.safetensors", at_first}}) {
    const Outcome o = train_stalled(rank, name, after, "-j " + in("val.bin") + " -v 2 -m 2 -x 8 -n 3 --hang-timeout 4");
    EXPECT_EQ(o.exit_status, 0) << name << o.err;
    EXPECT_EQ(steps_of(read_log(in("out"))).size(), 8u) << name;
    EXPECT_TRUE(fs::exists(in("stalled"))) << name;
  }
}

// Rank 0 still writes the third step's checkpoint when both ranks find, after the fourth, that the weights are lost.
TEST_F(LongStallingDisk, LosesNoCheckpointToAnErrorOfAllRanks) {
  for (const char* found_by : {"-v 0 --max-bad-steps 1", "-v 4"}) {
    const Outcome o = train_stalled(0, "out/unfinished_step_00000003/state.json", "out/log.jsonl",
                                    std::string("-x 9 -u 0 -l 1000 -c 1000 -n 3 ") + found_by);
    EXPECT_EQ(o.exit_status, 1) << found_by;
    EXPECT_NE(o.err.find("training stops"), std::string::npos) << o.err;
    EXPECT_TRUE(fs::exists(in("stalled")) && fs::exists(in("out/step_00000003"))) << found_by << o.err;
  }
}

// A cluster's signal may reach only one rank. All stop after the same step and write a checkpoint, from which the run
// resumes.
TEST_F(LongTraining, ASignalToOneRankStopsAllRanks) {
  const std::string trainer_command = "build/fp32/train_gpt2_sla_emu" + arguments("-x 100000 -d 16 -v 0 -o " + in("ou"
                                                                                                                  "t"));
  const Outcome o =
      run_ranks(2, "sh -c 'if [ $OMPI_COMM_WORLD_RANK = 1 ]; then (until grep -qs loss " + in("out/log.jsonl") +
                       "; do sleep 0.05; done; kill -USR1 $$) & fi; exec " + trainer_command + "'");
  EXPECT_NE(o.exit_status, 0);
  const size_t at = o.out.find("stopped by a signal after step ");
  ASSERT_NE(at, std::string::npos) << o.out.substr(o.out.size() - std::min<size_t>(o.out.size(), 400)) << o.err;
  const int step = atoi(o.out.c_str() + at + strlen("stopped by a signal after step "));
  EXPECT_GT(step, 0);
  EXPECT_TRUE(fs::exists(in("out") + format("/step_%08d/state.json", step)));
  const std::vector<json> log = train(2, "out", format("-x %d -d 16 -v 0 -y", step + 2));
  EXPECT_EQ(steps_of(log).size(), size_t(step) + 2);
}

TEST_F(LongTraining, WithoutNcclSeveralRanksAreAnError) {
  const Outcome o = run_ranks(2, trainer + arguments("-x 1"));
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("error: one of 2 ranks, but this program was built without NCCL"), std::string::npos) << o.err;
}

TEST_F(LongTraining, WithoutNcclNoRankWaitsForOthers) {
  const Outcome alone = run("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 timeout -s KILL 20 " + trainer +
                            arguments("-x 1 --rendezvous " + in("rendezvous")));
  EXPECT_EQ(alone.exit_status, 1);
  EXPECT_NE(alone.err.find("one of 2 ranks, but this program was built without NCCL"), std::string::npos) << alone.err;
}

TEST_F(LongTraining, RefusesInvalidOptionsOfRanks) {
  const std::string data = "-i " + in("tokens.bin");
  expect_error(data + " --hang-timeout 1", {"--hang-timeout 1", "0, or at least 2 seconds"});
  expect_error(data + " --hang-timeout nan", {"--hang-timeout nan"});
  expect_error(data + " --zero 2", {"--zero 2", "between 0 and 1"});
}

// A run of several ranks that is killed 60 times and stopped by a signal 12 times, at random moments, and resumed each
// time, ends with the bits of an undisturbed run. FAULTS_SEED=n is the seed, FAULTS_KILLS=n the number of kills; there
// are a fifth as many stops. Runs from the repository's root, where the trainer on an emulated GPU is.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include "command_line.h"
#include "llmc/base/error.h"

class Faults : public CommandLine {
 protected:
  static constexpr int ranks = 2;
  TemporaryFiles temporary{folder};
  std::mt19937 random;

  void SetUp() override {
    CommandLine::SetUp();
    allow_mpirun();
    write_file(in("tokens.bin"), shard_bytes(20000, 60));
    const int seed = number("FAULTS_SEED", 1);
    printf("FAULTS_SEED=%d\n", seed);
    random.seed(unsigned(seed));
  }
  static int number(const char* variable, int otherwise) {
    const char* text = getenv(variable);
    return text != nullptr ? atoi(text) : otherwise;
  }
  int below(int n) { return int(random() % unsigned(n)); }

  // With a checkpoint after every step, so that one is nearly always being written and another one removed. Rows are
  // streams with a memory, which grows between the two micro-batches of a step and is in the checkpoint.
  // The disturbed runs have no end of their own.
  std::string command(const std::string& out, int64_t steps = 1000000) const {
    return format("timeout -k 5 120 mpirun --oversubscribe -np %d sh -c 'echo $$ >\"%s.$OMPI_COMM_WORLD_RANK\"; "
                  "exec \"$@\"' rank "
                  "build/fp32/train_gpt2_sla_emu -i %s --layers 2 --heads 2 --channels 16 --vocab-size 64 "
                  "--max-seq-len 8 -t 8 -b 1 -d 32 "
                  "-l 1e-2 -k constant --wiring 'relative memory(12) sla(1,1)' -v 0 -n 1 --keep 2 -x %lld -o %s -y",
                  ranks, in("pid").c_str(), in("tokens.bin").c_str(), (long long)steps, in(out).c_str());
  }
  std::string pid_file(int rank) const { return in("pid") + "." + std::to_string(rank); }

  struct Fault {
    int signal, rank;
    Outcome outcome;
    double time;  // of the signal, seconds since 1970; 0: the process had ended before
  };
  // Resumes the run, and signals a rank at a random moment: after its start, after the next step in the log, or while a
  // checkpoint is written.
  Fault disturb(int signal) {
    Fault f = {signal, below(ranks), {}, 0};
    const int moment = below(3);
    const std::string runs = "kill -0 $run";
    const std::string lines = format("$(cat '%s/log.jsonl' 2>&1 | wc -l)", in("out").c_str());
    const std::string until_steps = format("lines=%s; while %s && [ %s -le $lines ]; do sleep 0.01; done; ",
                                           lines.c_str(), runs.c_str(), lines.c_str());
    const std::string until_saving =
        format("while %s && ! ls -d '%s'/unfinished_* 2>&1; do sleep 0.001; done; ", runs.c_str(), in("out").c_str());
    std::string until = moment == 0 ? "" : until_steps;
    if (moment == 2) until += until_saving;
    for (int rank = 0; rank < ranks; rank++) fs::remove(pid_file(rank));
    const std::string file = pid_file(f.rank);
    f.outcome =
        run(format("%s & run=$!; while %s && ! [ -s '%s' ]; do sleep 0.01; done; %s sleep %.3f; "
                   "kill -%d $(cat '%s') && date +%%s.%%N >'%s'; wait $run",
                   command("out").c_str(), runs.c_str(), file.c_str(), until.c_str(),
                   moment == 2 ? below(20) * 1e-3 : below(1000) * 1e-3, signal, file.c_str(), in("struck").c_str()));
    f.time = atof(read_file(in("struck")).c_str());
    fs::remove(in("struck"));
    return f;
  }
  // Expects all ranks to end within a minute after the signal. Returns after how many seconds they had. Where OpenMPI's
  // mpirun loses a rank that dies while it connects, it says so and waits for the other until its time limit.
  double expect_all_gone(const Fault& f) const {
    const double most_seconds = f.outcome.err.find("PMIX ERROR: UNREACHABLE") == std::string::npos ? 60 : 130;
    const auto seconds = [&] {
      return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count() - f.time;
    };
    for (int rank = 0; rank < ranks; rank++) {
      const int pid = atoi(read_file(pid_file(rank)).c_str());
      bool is_gone = false;
      while (!(is_gone = pid == 0 || (kill(pid, 0) != 0 && errno == ESRCH)) && seconds() < most_seconds) usleep(10000);
      EXPECT_TRUE(is_gone) << "rank " << rank << " has not ended after rank " << f.rank;
    }
    return seconds();
  }
};

TEST_F(Faults, DoNotChangeABitOfTheFinalCheckpoint) {
  const int num_kills = number("FAULTS_KILLS", 60), num_stops = num_kills / 5;
  int kills = 0, stops = 0;
  double longest = 0;
  while ((kills < num_kills || stops < num_stops) && !HasFailure()) {
    const bool stop = kills == num_kills || (stops < num_stops && below(num_kills + num_stops) < num_stops);
    const Fault f = disturb(stop ? SIGTERM : SIGKILL);
    SCOPED_TRACE(format("%s of rank %d, number %d\n", stop ? "SIGTERM" : "SIGKILL", f.rank, kills + stops + 1) +
                 f.outcome.err);
    const double seconds = expect_all_gone(f);
    ASSERT_NE(f.time, 0) << "the run ended by itself";
    longest = std::max(longest, seconds);
    (stop ? stops : kills)++;
    if (stop) continue;
    EXPECT_NE(f.outcome.exit_status, 0);
    // mpirun ends the others, and says so in one of two ways.
    const std::string named = format("rank %d", f.rank), aborted = "the job has been aborted";
    EXPECT_TRUE(f.outcome.err.find(named) != std::string::npos || f.outcome.err.find(aborted) != std::string::npos);
  }
  const int64_t steps_disturbed = int64_t(steps_of(read_log(in("out"))).size()), steps = steps_disturbed + 3;
  const Outcome last = run(command("out", steps));
  EXPECT_EQ(last.exit_status, 0) << last.err;
  const Outcome undisturbed = run(command("undisturbed", steps));
  EXPECT_EQ(undisturbed.exit_status, 0) << undisturbed.err;
  expect_the_same_checkpoint(in("out"), in("undisturbed"), steps);
  EXPECT_EQ(steps_of(read_log(in("out"))), steps_of(read_log(in("undisturbed"))));
  EXPECT_EQ(logged_checkpoints(read_log(in("out"))), logged_checkpoints(read_log(in("undisturbed"))));
  printf("%d kills; %d stops; %lld of %lld steps; the longest took %.1f s until all had ended\n", kills, stops,
         (long long)steps_disturbed, (long long)steps, longest);
}

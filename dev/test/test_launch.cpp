// How a process finds out which of how many it is, by the variables of torchrun, mpirun, srun and mpiexec; and
// scripts/launch.sh, with a few lines of shell in place of the trainer. Runs from the repository's root.
//
// COVERS ONLY llmc/dist/ranks.cpp scripts/launch.sh
#include <sys/stat.h>
#include <unistd.h>
#include <map>
#include "command_line.h"
#include "llmc/dist/ranks.h"
#include "llmc/utils/error.h"

using Variables = std::map<std::string, std::string>;

class Launchers : public testing::Test {
 protected:
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }
  static void clear() {
    for (const char* name : {"RANK",
                             "WORLD_SIZE",
                             "LOCAL_RANK",
                             "LOCAL_WORLD_SIZE",
                             "MASTER_PORT",
                             "TORCHELASTIC_RUN_ID",
                             "PMIX_RANK",
                             "OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_SIZE",
                             "SLURM_PROCID",
                             "SLURM_NTASKS",
                             "SLURM_LOCALID",
                             "SLURM_STEP_NUM_TASKS",
                             "SLURM_STEP_TASKS_PER_NODE",
                             "SLURM_JOB_ID",
                             "SLURM_STEP_ID",
                             "SLURM_TASK_PID",
                             "SLURM_PTY_PORT",
                             "PMI_RANK",
                             "PMI_SIZE",
                             "MPI_LOCALRANKID",
                             "MPI_LOCALNRANKS",
                             "TMPDIR"})
      unsetenv(name);
  }
  static Ranks ranks_with(const Variables& variables, const RankOptions& options = {}) {
    clear();
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    return init_ranks(options);
  }
  static void expect_ranks(const Ranks& r, int rank, int size, int local_rank, const std::string& rendezvous) {
    EXPECT_EQ(r.rank, rank);
    EXPECT_EQ(r.size, size);
    EXPECT_EQ(r.local_rank, local_rank);
    EXPECT_EQ(r.rendezvous, rendezvous);
    EXPECT_FALSE(r.by_mpi);
  }
  static void expect_alone(const Ranks& r) { expect_ranks(r, 0, 1, 0, ""); }
  static void expect_error(const Variables& variables, const std::string& text, const RankOptions& options = {}) {
    try {
      const Ranks r = ranks_with(variables, options);
      FAIL() << "is rank " << r.rank << " of " << r.size << ", not: " << text;
    } catch (const UserError& e) { EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what(); }
  }
  static Variables with(Variables variables, const Variables& more) {
    for (const auto& [name, value] : more) variables[name] = value;
    return variables;
  }

  const Variables torchrun = {{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "3"}},
                  srun = {{"SLURM_PROCID", "5"},  {"SLURM_STEP_NUM_TASKS", "8"},          {"SLURM_NTASKS", "8"},
                          {"SLURM_LOCALID", "1"}, {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"}, {"SLURM_JOB_ID", "77"},
                          {"SLURM_STEP_ID", "0"}},
                  mpiexec = {{"PMI_RANK", "3"}, {"PMI_SIZE", "8"}, {"MPI_LOCALRANKID", "3"}};
};

// BUG llmc/dist/ranks.cpp: `"SLURM_STEP_NUM_TASKS",` -> `"SLURM_NTASKS",`
// BUG llmc/dist/ranks.cpp: `= launcher_of(2);` -> `= launcher_of(1);`
TEST_F(Launchers, ASingleTaskOrAShellInAnAllocationRunsAlone) {
  expect_alone(ranks_with({}));
  expect_alone(ranks_with({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}}));
  expect_alone(ranks_with({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}));
  expect_alone(ranks_with({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}, {"PMIX_RANK", "0"}}));
  const Variables batch_script = {{"SLURM_JOB_ID", "77"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}};
  expect_alone(ranks_with(batch_script));
  expect_alone(ranks_with(with(batch_script, {{"SLURM_STEP_NUM_TASKS", "1"}, {"PMIX_RANK", "0"}})));
}

// Its shell is the first of the tasks; the others have no terminal. Programs that are typed there are its children.
// BUG llmc/dist/ranks.cpp: `!= int(getpid());` -> `== int(getpid());`
// BUG llmc/dist/ranks.cpp: `number_of("SLURM_PROCID", 0) == 0 &&` -> ``
TEST_F(Launchers, AProgramTypedInTheShellOfSrunRunsAlone) {
  const Variables shell = with(srun, {{"SLURM_PROCID", "0"}, {"SLURM_PTY_PORT", "4242"}, {"SLURM_TASK_PID", "1"}});
  expect_alone(ranks_with(shell));
  expect_error(with(shell, {{"SLURM_TASK_PID", std::to_string(getpid())}}), "process 0 of 8, which srun has started");
  expect_error(with(shell, {{"SLURM_PROCID", "1"}}), "process 1 of 8, which srun has started");
}

// BUG llmc/dist/ranks.cpp: `if (l != nullptr) r.rendezvous = rendezvous_of(*l);` -> ``
// BUG llmc/dist/ranks.cpp: `strcmp(size, local_size) == 0` -> `true`
TEST_F(Launchers, OneOfSeveralWithoutARendezvousIsToldWhatToType) {
  const std::string folder = fs::current_path().string(), program = program_invocation_name;
  expect_error(torchrun, "process 3 of 8, which torchrun has started, does not know where the others are; type "
                         "torchrun "
                         "... " +
                             program + " ... --rendezvous file:" + folder + "/rendezvous (a path");
  expect_error(mpiexec, "type mpiexec ... " + program + " ... --rendezvous file:" + folder + "/rendezvous (a path");
  expect_error(mpiexec, "on a single machine scripts/launch.sh 8 " + program + " ..., or --ranks 1 ");
  expect_error(srun, "--rendezvous file:" + folder + "/rendezvous-srun-77-0 (a path that all machines share)");
  RankOptions alone;
  alone.ranks = 1;
  for (const Variables& variables : {torchrun, srun, mpiexec}) expect_alone(ranks_with(variables, alone));
  alone.rank = 1;
  expect_error(torchrun, "belong to --rendezvous", alone);
}

// BUG llmc/dist/ranks.cpp: `if (!o.rank && !o.ranks) check_both(launchers[0]);` -> ``
// BUG llmc/dist/ranks.cpp: `if (has_rank == has_size) return;` -> `if (has_rank || !has_size) return;`
TEST_F(Launchers, HalfASetOfVariablesIsAnError) {
  expect_error({{"WORLD_SIZE", "2"}}, "the environment has WORLD_SIZE=2 and not RANK, which torchrun sets beside it");
  expect_error({{"WORLD_SIZE", "1"}}, "Unset WORLD_SIZE for a run of this process alone");
  expect_error({{"RANK", "0"}, {"LOCAL_RANK", "0"}}, "the environment has RANK=0 and not WORLD_SIZE");
  RankOptions alone;
  alone.ranks = 1;
  expect_alone(ranks_with({{"WORLD_SIZE", "2"}}, alone));
}

TEST_F(Launchers, OnOneMachineTheyMeetAtAFileOfTheirRun) {
  const std::string prefix = "file:/tmp/gpt2-sla-" + std::to_string(geteuid());
  const Variables all_here = {{"LOCAL_WORLD_SIZE", "8"}, {"MASTER_PORT", "29500"}, {"TORCHELASTIC_RUN_ID", "../a b"}};
  expect_ranks(ranks_with(with(torchrun, all_here)), 3, 8, 3, prefix + "-torchrun-29500----a-b");
  expect_ranks(ranks_with(with(srun, {{"SLURM_STEP_TASKS_PER_NODE", "8"}})), 5, 8, 1, prefix + "-srun-77-0");
  expect_ranks(ranks_with(with(srun, {{"SLURM_STEP_TASKS_PER_NODE", "8"}, {"TMPDIR", "/var/tmp"}})), 5, 8, 1,
               "file:/var/tmp/gpt2-sla-" + std::to_string(geteuid()) + "-srun-77-0");
}

TEST_F(Launchers, OptionsGoBeforeVariablesAndInnerLaunchersBeforeOuter) {
  RankOptions options;
  options.rendezvous = "file:x";
  expect_ranks(ranks_with(torchrun, options), 3, 8, 3, "file:x");
  expect_ranks(ranks_with(srun, options), 5, 8, 1, "file:x");
  expect_ranks(ranks_with(mpiexec, options), 3, 8, 3, "file:x");
  expect_ranks(ranks_with(with(srun, torchrun), options), 3, 8, 3, "file:x");
  expect_ranks(ranks_with(with(srun, {{"RANK", "0"}, {"WORLD_SIZE", "1"}}), options), 5, 8, 1, "file:x");
  expect_ranks(ranks_with({{"RANK", "0"}, {"WORLD_SIZE", "1"}}, options), 0, 1, 0, "file:x");
  options.rank = 6, options.local_rank = 2;
  expect_ranks(ranks_with(srun, options), 6, 8, 2, "file:x");
  options.rank = 8;
  expect_error(srun, "--rank 8: with --ranks 8 it must be below that", options);
  expect_error({}, "Give --rank and --ranks", options);
}

// ----------------------------------------------------------------------------
// scripts/launch.sh

class LaunchScript : public CommandLine {
 protected:
  void SetUp() override {
    CommandLine::SetUp();
    unsetenv("CUDA_VISIBLE_DEVICES");
    setenv("TMPDIR", folder.c_str(), 1);
  }
  void TearDown() override {
    unsetenv("CUDA_VISIBLE_DEVICES");
    unsetenv("TMPDIR");
    CommandLine::TearDown();
  }
  // Runs a program of so many lines of shell, in which $out is this test's folder.
  Outcome launch(const std::string& ranks, const std::string& program, const std::string& before = "") const {
    write_file(in("program"), "#!/usr/bin/env bash\nout='" + folder + "'\n" + program + "\n");
    chmod(in("program").c_str(), 0755);
    return run(before + "timeout 60 scripts/launch.sh " + ranks + " '" + in("program") + "' 'an argument'");
  }
};

TEST_F(LaunchScript, GivesEachRankItsNumberAndOneRendezvous) {
  const Outcome o = launch("3", "echo \"$RANK $LOCAL_RANK $WORLD_SIZE $#, $1, $2\" >>$out/ranks; echo \"$3\" "
                                ">>$out/at");
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_EQ(o.err, "");
  EXPECT_EQ(run("sort " + in("ranks")).out, "0 0 3 3, an argument, --rendezvous\n1 1 3 3, an argument, --rendezvous\n"
                                            "2 2 3 3, an argument, --rendezvous\n");
  const std::string place = run("sort -u " + in("at")).out;
  EXPECT_EQ(place.find("file:" + folder + "/"), 0u) << place;
  EXPECT_EQ(place.find('\n'), place.size() - 1) << place;
  EXPECT_FALSE(fs::exists(fs::path(place.substr(5)).parent_path())) << "the folder is removed";
  EXPECT_EQ(launch("1", "echo \"$*\"").out, "an argument --ranks 1\n");
}

// BUG scripts/launch.sh: `[ -z "$failed" ] || break` -> `:`
// BUG scripts/launch.sh: `|| exit "$failed"` -> `|| exit 1`
TEST_F(LaunchScript, EndsAllWhenOneFailsWithItsStatus) {
  const Outcome o = launch("3", "if [ $RANK = 1 ]; then sleep 0.5; exit 7; fi; trap 'echo $RANK >>$out/ended; exit 3' "
                                "TERM; sleep 50 & wait");
  EXPECT_EQ(o.exit_status, 7) << o.err;
  EXPECT_EQ(run("sort " + in("ended")).out, "0\n2\n");
  const Outcome killed = launch("2", "echo $$ >$out/pid.$RANK; [ $RANK = 0 ] || kill -9 $$; trap '' TERM; sleep 50; "
                                     "sleep 50");
  EXPECT_EQ(killed.exit_status, 137) << killed.err;
  const std::string lives = "grep -qs '^State:[[:space:]]*[^Z]' /proc/$(cat " + in("pid.0") + ")/status";
  EXPECT_EQ(run("for i in 1 2 3 4 5; do " + lives + " || exit 1; sleep 1; done").exit_status, 1) << "rank 0, which "
                                                                                                    "ignores SIGTERM, "
                                                                                                    "is there";
}

// BUG scripts/launch.sh: `(cd "$folder" && find . -name 'status.*' -printf '%T@ %f\n'` ->
//   `(find "$folder" -name 'status.*' -printf '%T@ %p\n'`
TEST_F(LaunchScript, EndsWhateverTheTemporaryFolderIsCalled) {
  for (const char* name : {"a b", "it's", "back\\slash", "quo\"te", "*"}) {
    const std::string temporary = in(name);
    fs::create_directory(temporary);
    setenv("TMPDIR", temporary.c_str(), 1);
    EXPECT_EQ(run("timeout -s KILL 20 scripts/launch.sh 2 true").exit_status, 0) << name;
    EXPECT_EQ(run("timeout -s KILL 20 scripts/launch.sh 2 bash -c 'exit $((RANK * 6))'").exit_status, 6) << name;
    EXPECT_TRUE(fs::is_empty(temporary)) << name;
  }
}

// BUG scripts/launch.sh: `| sort -n |` -> `| sort -rn |`
TEST_F(LaunchScript, ReturnsTheStatusOfTheFirstThatFailed) {
  // The script is stopped until both have ended.
  const Outcome o = launch("2", "launch=$(ps -o ppid= $PPID); if [ $RANK = 1 ]; then kill -STOP $launch; exit 7; fi; "
                                "sleep 0.5; (sleep 0.5; kill -CONT $launch) & exit 5");
  EXPECT_EQ(o.exit_status, 7) << o.err;
}

// BUG scripts/launch.sh: `|| die "a rank has ended` -> `|| true "a rank has ended`
TEST_F(LaunchScript, ARankWithoutAStatusEndsIt) {
  const Outcome o = launch("2", "[ $RANK = 0 ] || kill -9 $PPID; sleep 0.3");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("a rank has ended and left no status in "), std::string::npos) << o.err;
}

// BUG scripts/launch.sh: `for s in TERM INT HUP USR1; do trap` -> `for s in TERM INT HUP; do trap`
TEST_F(LaunchScript, PassesSignalsToAllRanks) {
  for (const char* signal : {"TERM", "INT", "HUP", "USR1"}) {
    const Outcome o =
        run(format("env --default-signal=INT,HUP scripts/launch.sh 2 bash -c \"trap 'echo got >>%s; exit 5' %s; "
                   "touch %s.\\$RANK; sleep 50 & wait\" & launch=$!; until [ -e %s.0 ] && [ -e %s.1 ]; do "
                   "sleep 0.05; done; kill -%s $launch; wait $launch",
                   in(signal).c_str(), signal, in(signal).c_str(), in(signal).c_str(), in(signal).c_str(), signal));
    EXPECT_EQ(o.exit_status, 5) << signal << o.err;
    EXPECT_EQ(read_file(in(signal)), "got\ngot\n") << signal;
  }
}

TEST_F(LaunchScript, TakesTheGpusOfCudaVisibleDevices) {
  EXPECT_EQ(launch("2", "echo $CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES=5,7 ").out, "5,7\n5,7\n");
  for (const auto& [devices, count] : {std::pair("5", 1), {"", 0}}) {
    const Outcome o = launch("2", "echo started", format("CUDA_VISIBLE_DEVICES=%s ", devices));
    EXPECT_EQ(o.exit_status, 1);
    EXPECT_EQ(o.out, "");
    EXPECT_EQ(o.err, format("error: launch.sh: 2 ranks need a GPU each, and CUDA_VISIBLE_DEVICES=%s has %d; start as "
                            "many\n",
                            devices, count));
  }
  for (const char* wrong : {"0", "two", "2.5", "''"})
    EXPECT_EQ(launch(wrong, "echo started").err, "error: launch.sh: usage: scripts/launch.sh RANKS PROGRAM [ARGUMENT "
                                                 "...]\n");
  EXPECT_EQ(run("scripts/launch.sh 2").exit_status, 1);
}

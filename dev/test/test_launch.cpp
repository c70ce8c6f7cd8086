// How a process finds out which of how many it is, by the variables of torchrun, mpirun, srun and others; how ranks
// meet in a folder; and scripts/launch.sh, with a few lines of shell in place of the trainer. Runs from the
// repository's root.
//
// COVERS ONLY llmc/ranks/ranks.cpp llmc/ranks/rank_folder.cpp scripts/launch.sh
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>
#include <future>
#include <map>
#include "command_line.h"
#include "llmc/ranks/rank_folder.h"
#include "llmc/ranks/ranks.h"
#include "llmc/base/error.h"

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
                             "MASTER_ADDR",
                             "MASTER_PORT",
                             "TORCHELASTIC_RUN_ID",
                             "PMIX_RANK",
                             "OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_RANK",
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
                             "FLUX_TASK_RANK",
                             "TMPDIR"})
      unsetenv(name);
  }
  static Ranks ranks_with(const Variables& variables, const std::string& rendezvous = "", const std::string& out = "") {
    clear();
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    return init_ranks(rendezvous, out);
  }
  static void expect_ranks(const Ranks& r, int rank, int size, int local_rank, const std::string& folder) {
    EXPECT_EQ(r.rank, rank);
    EXPECT_EQ(r.size, size);
    EXPECT_EQ(r.local_rank, local_rank);
    EXPECT_EQ(r.folder, folder);
    EXPECT_FALSE(r.by_mpi);
  }
  static void expect_alone(const Ranks& r) { expect_ranks(r, 0, 1, 0, ""); }
  static void expect_error(const Variables& variables, const std::string& text) {
    try {
      const Ranks r = ranks_with(variables);
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
                          {"SLURM_STEP_ID", "0"}};
};

TEST_F(Launchers, ASingleTaskOrAShellInAnAllocationRunsAlone) {
  expect_alone(ranks_with({}));
  expect_alone(ranks_with({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}}));
  expect_alone(ranks_with({{"OMPI_COMM_WORLD_RANK", "0"},
                           {"OMPI_COMM_WORLD_SIZE", "1"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                           {"PMIX_RANK", "0"}}));
  const Variables batch_script = {{"SLURM_JOB_ID", "77"},
                                  {"SLURM_PROCID", "0"},
                                  {"SLURM_LOCALID", "0"},
                                  {"SLURM_NTASKS", "8"}};
  expect_alone(ranks_with(batch_script));
  expect_alone(ranks_with(with(batch_script, {{"SLURM_STEP_NUM_TASKS", "1"}, {"PMIX_RANK", "0"}})));
}

// Its shell is the first of the tasks; the others have no terminal. Programs that are typed there are its children.
TEST_F(Launchers, AProgramTypedInTheShellOfSrunRunsAlone) {
  const Variables shell = with(srun, {{"SLURM_PROCID", "0"}, {"SLURM_PTY_PORT", "4242"}, {"SLURM_TASK_PID", "1"}});
  expect_alone(ranks_with(shell));
  expect_error(with(shell, {{"SLURM_TASK_PID", std::to_string(getpid())}}), "rank 0 of 8, which srun has started");
  expect_error(with(shell, {{"SLURM_PROCID", "1"}}), "rank 1 of 8, which srun has started");
}

TEST_F(Launchers, RanksOfSeveralMachinesAreToldThatTheyNeedAFolder) {
  for (const char* own : {"8", "4(x2)"})
    expect_error(with(srun, {{"SLURM_STEP_TASKS_PER_NODE", own == std::string("8") ? "4,4" : own}}),
                 "rank 5 of 8, which srun has started, does not know where the others are: give -o or --rendezvous");
  expect_error(torchrun, std::string("on a single machine scripts/launch.sh 8 ") + program_invocation_name);
}

TEST_F(Launchers, HalfASetOfVariablesOrAnotherLaunchersAreAnError) {
  expect_error({{"WORLD_SIZE", "2"}}, "the environment has WORLD_SIZE=2 and not RANK, LOCAL_RANK, which torchrun sets");
  expect_error({{"WORLD_SIZE", "1"}}, "a run of this process alone with scripts/launch.sh 1");
  expect_error({{"RANK", "0"}, {"LOCAL_RANK", "0"}}, "the environment has RANK=0, LOCAL_RANK=0 and not WORLD_SIZE");
  expect_error({{"OMPI_COMM_WORLD_SIZE", "2"}}, "OMPI_COMM_WORLD_SIZE=2 and not OMPI_COMM_WORLD_RANK");
  expect_error({{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "1"}}, "and not SLURM_LOCALID");
  expect_error({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}, "PMI_RANK=1, by a launcher that this program does not know");
  expect_error({{"FLUX_TASK_RANK", "0"}}, "FLUX_TASK_RANK=0, by a launcher");
  expect_error(with(torchrun, {{"RANK", "8"}}), "RANK=8: with WORLD_SIZE=8 it must be below that");
  expect_error(with(torchrun, {{"RANK", "-1"}}), "RANK=-1: it must be at least 0");
}

TEST_F(Launchers, TheFolderIsOneOfTheirRun) {
  const std::string prefix = "/tmp/gpt2-sla-" + std::to_string(geteuid());
  const Variables all_here = {{"LOCAL_WORLD_SIZE", "8"}, {"MASTER_PORT", "29500"}, {"TORCHELASTIC_RUN_ID", "../a b"}};
  expect_ranks(ranks_with(with(torchrun, all_here)), 3, 8, 3, prefix + "-torchrun-29500----a-b");
  expect_ranks(ranks_with(with(torchrun, all_here), "", "out"), 3, 8, 3, prefix + "-torchrun-29500----a-b");
  expect_ranks(ranks_with(with(srun, {{"SLURM_STEP_TASKS_PER_NODE", "8"}, {"TMPDIR", "/var/tmp"}})), 5, 8, 1,
               "/var/tmp/gpt2-sla-" + std::to_string(geteuid()) + "-srun-77-0");
  expect_ranks(ranks_with(srun, "", "out"), 5, 8, 1, "out/ranks-srun-77-0");
  expect_ranks(ranks_with(srun, "a b", "out"), 5, 8, 1, "a b/ranks-srun-77-0");
}

TEST_F(Launchers, AnInnerLauncherGoesBeforeAnOuterOne) {
  expect_ranks(ranks_with(with(srun, torchrun), "x"), 3, 8, 3, "x/ranks-torchrun");
  expect_alone(ranks_with(with(srun, {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}})));
}

// ----------------------------------------------------------------------------
// The folder in which they meet

class Meeting : public FolderTest {
 protected:
  // Each rank of a run is a thread here, which has a folder of its own. Returns what each has got: rank 0's text, or an
  // error.
  static std::string meet(const Ranks& ranks, double seconds = 20) {
    try {
      RankFolder folder(ranks);
      std::string bytes = format("told by %d, %d", ranks.rank, int(getpid()));
      folder.share(bytes.data(), bytes.size(), seconds);
      usleep(300000);  // as long as the others look
      return bytes;
    } catch (const UserError& e) { return e.what(); }
  }
  Ranks rank_of(int rank, int size, const std::string& name = "run") const {
    return {rank, size, rank, false, in(name)};
  }
  std::vector<std::string> meet_all(int size, const std::string& name, double seconds = 20) const {
    std::vector<std::future<std::string>> all;
    for (int rank = 0; rank < size; rank++) {
      all.push_back(std::async(std::launch::async, [=] { return meet(rank_of(rank, size, name), seconds); }));
      usleep(useconds_t(30000 * (rank % 2)));
    }
    std::vector<std::string> told;
    for (auto& one : all) told.push_back(one.get());
    return told;
  }
  static std::string told() { return format("told by 0, %d", int(getpid())); }
};

TEST_F(Meeting, AllHaveWhatRankZeroTellsAndNothingIsLeft) {
  for (const char* name : {"run", "a b 'c' \"d\"", "in/a/new/folder"}) {
    EXPECT_EQ(meet_all(3, name), std::vector<std::string>(3, told())) << name;
    EXPECT_FALSE(fs::exists(in(name)));
  }
}

// Each of the files of a run that was killed has an ID and nonces that nobody has any more; also files of more ranks.
TEST_F(Meeting, StaleFilesMisleadNobody) {
  fs::create_directory(in("run"));
  fs::permissions(in("run"), fs::perms::owner_all);
  for (int rank = 0; rank < 4; rank++) {
    Ranks ranks = rank_of(rank, 4, "of_old");
    RankFolder old(ranks);
    old.own.listed = {"a", "b", "c"}, old.own.heard = "x";
    old.own.shared.assign(told().size(), 'x');
    old.write();
    fs::copy_file(in("of_old") + format("/rank_%d", rank), in("run") + format("/rank_%d", rank));
  }
  std::vector<std::future<std::string>> all;
  for (int rank : {1, 0, 2}) {  // rank 1 finds the old rank 0, and rank 0 lists the old rank 2
    all.push_back(std::async(std::launch::async, [=] { return meet(rank_of(rank, 3)); }));
    usleep(200000);
  }
  for (auto& one : all) EXPECT_EQ(one.get(), told());
  EXPECT_TRUE(fs::exists(in("run/rank_3"))) << "is nobody's of this run";
}

// As mpirun does after an error: the others are killed.
TEST_F(Meeting, RankZeroRemovesTheFilesOfRanksThatAreKilled) {
  const pid_t killed = fork();
  if (killed == 0) {
    const RankFolder folder(rank_of(1, 2));
    pause();
  }
  while (!fs::exists(in("run/rank_1"))) usleep(1000);
  { const RankFolder first(rank_of(0, 2)); }
  kill(killed, SIGKILL);
  waitpid(killed, nullptr, 0);
  EXPECT_FALSE(fs::exists(in("run")));
}

TEST_F(Meeting, ASecondProcessOfTheSameRankIsRefusedWhileTheFirstLives) {
  const RankFolder living(rank_of(1, 2));
  EXPECT_NE(meet(rank_of(1, 2)).find("run/rank_1: another process that lives is rank 1 of this run"),
            std::string::npos);
  EXPECT_TRUE(fs::exists(in("run/rank_1")));
  EXPECT_EQ(meet_all(2, "other_run"), std::vector<std::string>(2, told()));
}

TEST_F(Meeting, ARankThatDoesNotComeIsNamed) {
  std::future<std::string> second = std::async(std::launch::async, [&] { return meet(rank_of(1, 4), /*seconds=*/2); });
  EXPECT_NE(meet(rank_of(0, 4), /*seconds=*/1).find("ranks 2, 3 of 4 have not come to " + in("run") + " in 1 s"),
            std::string::npos);
  EXPECT_NE(second.get().find("some of 4 have not come to "), std::string::npos);
  EXPECT_FALSE(fs::exists(in("run")));
}

TEST_F(Meeting, WhatIsNotTheirsStaysAsItIs) {
  const auto expect_refused = [&](const std::string& name, const std::string& why) {
    const std::string error = meet(rank_of(0, 1, name));
    EXPECT_NE(error.find(why), std::string::npos) << name << ": " << error;
  };
  write_file(in("file"), "mine");
  expect_refused("file", "is no folder of this user alone");
  expect_refused("file/below", "");
  EXPECT_EQ(read_file(in("file")), "mine");
  fs::create_directory(in("open"));
  fs::permissions(in("open"), fs::perms::owner_all | fs::perms::group_all);
  expect_refused("open", "is no folder of this user alone");
  fs::create_symlink(in("open"), in("link"));
  expect_refused("link", "is no folder of this user alone");
  for (const char* name : {"of_link", "of_pipe", "of_folder"}) {
    fs::create_directory(in(name));
    fs::permissions(in(name), fs::perms::owner_all);
  }
  fs::create_symlink(in("file"), in("of_link/rank_0"));
  expect_refused("of_link", "of_link/rank_0: cannot be written: ");
  EXPECT_EQ(read_file(in("file")), "mine");
  ASSERT_EQ(mkfifo(in("of_pipe/rank_0").c_str(), 0600), 0);
  expect_refused("of_pipe", "of_pipe/rank_0: is no file");
  fs::create_directory(in("of_folder/rank_0"));
  expect_refused("of_folder", "of_folder/rank_0: cannot be written: Is a directory");
  for (const char* name : {"of_link", "of_pipe", "of_folder"})
    EXPECT_TRUE(fs::is_symlink(in(name) + std::string("/rank_0")) || fs::exists(in(name) + std::string("/rank_0")));
  expect_refused("/proc/nowhere", "");
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

TEST_F(LaunchScript, GivesEachRankItsNumberAndTheirRunAName) {
  const Outcome o = launch("3", "echo \"$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $#, $1\" >>$out/ranks; "
                                "echo $TORCHELASTIC_RUN_ID >>$out/run; mkdir -p "
                                "$TMPDIR/gpt2-sla-$EUID-torchrun-$TORCHELASTIC_RUN_ID");
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_EQ(o.err, "");
  EXPECT_EQ(run("sort " + in("ranks")).out, "0 0 3 3 1, an argument\n1 1 3 3 1, an argument\n2 2 3 3 1, an argument\n");
  const std::string name = run("sort -u " + in("run")).out;
  EXPECT_EQ(name.find('\n'), name.size() - 1) << name;
  EXPECT_EQ(run("ls " + folder + " | grep -c gpt2-sla").out, "0\n") << "what killed ranks left is removed";
  EXPECT_EQ(launch("1", "echo \"$RANK $WORLD_SIZE $LOCAL_RANK $*\"").out, "0 1 0 an argument\n");
}

TEST_F(LaunchScript, EndsAllWhenOneFailsWithItsStatus) {
  const Outcome o = launch("3", "if [ $RANK = 1 ]; then sleep 0.5; exit 7; fi; trap 'echo $RANK >>$out/ended; exit 3' "
                                "TERM; sleep 50 & wait");
  EXPECT_EQ(o.exit_status, 7) << o.err;
  EXPECT_EQ(run("sort " + in("ended")).out, "0\n2\n");
  const Outcome killed = launch("2", "echo $$ >$out/pid.$RANK; [ $RANK = 0 ] || kill -9 $$; trap '' TERM; sleep 50; "
                                     "sleep 50");
  EXPECT_EQ(killed.exit_status, 137);
  const Outcome other = launch("2", "exit 200");
  EXPECT_EQ(other.exit_status, 200);
  EXPECT_EQ(other.err, "") << "there is no such signal";
  EXPECT_EQ(killed.err, "error: launch.sh: rank 1 of 2 was ended by SIGKILL\n");
  const std::string lives = "grep -qs '^State:[[:space:]]*[^Z]' /proc/$(cat " + in("pid.0") + ")/status";
  EXPECT_EQ(run("for i in 1 2 3 4 5; do " + lives + " || exit 1; sleep 1; done").exit_status, 1) << "rank 0, which "
                                                                                                    "ignores SIGTERM, "
                                                                                                    "is there";
}

TEST_F(LaunchScript, EndsARankThatIsStopped) {
  const Outcome o = launch("2", "echo $$ >$out/pid.$RANK; if [ $RANK = 1 ]; then trap '' TERM HUP; kill -STOP $$; "
                                "sleep 50; fi; sleep 0.5; exit 7");
  EXPECT_EQ(o.exit_status, 7) << o.err;
  EXPECT_NE(kill(atoi(read_file(in("pid.1")).c_str()), 0), 0) << "it is there, stopped";
}

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
  const Outcome ended =
      run("scripts/launch.sh 2 bash -c 'touch " + in("begun") + ".$RANK; exec sleep 50' & launch=$!; until [ -e " +
          in("begun.0") + " ] && [ -e " + in("begun.1") + " ]; do sleep 0.05; done; kill -TERM $launch; wait $launch");
  EXPECT_EQ(ended.exit_status, 143);
  EXPECT_EQ(ended.err, "") << "it was asked to";
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

// The scripts of the paper's runs, with a small model in place of GPT-2 and a few lines of shell in place of Slurm.
// Runs from the repository's root, where the trainers and ./report are.
//
// COVERS ONLY scripts/
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cstdlib>
#include "command_line.h"
#include "llmc/base/error.h"

class Scripts : public CommandLine {
 protected:
  void SetUp() override {
    CommandLine::SetUp();
    allow_mpirun();
    setenv("PAUSE", "1", 1);
    setenv("LAUNCH", "", 1);
    setenv("BATCH", "1", 1);
    setenv("DATA", in("data").c_str(), 1);
    setenv("OUT", in("out").c_str(), 1);
    setenv("TRAINER", trainer.substr(0, trainer.find_last_not_of(' ') + 1).c_str(), 1);
    fs::create_directories(in("data"));
    for (const char* name : {"train_000.bin", "val_000.bin"}) write_file(in("data/") + name, shard_bytes(4000, 63));
  }
  // A model of 12 layers and heads, so that the scripts' wiring fits; 6 updates of 2 micro-batches, a checkpoint after
  // every second.
  const std::string small = " --layers 12 --heads 12 --channels 96 --vocab-size 64 --max-seq-len 8 -t 8 -d 16 -b 1 -x "
                            "6 -n 2 -v 0 -u 0";

  void write_program(const std::string& name, const std::string& text) const {
    write_file(in(name), "#!/usr/bin/env bash\n" + text);
    chmod(in(name).c_str(), 0755);
  }
  // Runs `command`, and sends it `signal` once the run in `out` has done a step.
  // A shell's background jobs ignore SIGINT, unless told otherwise.
  Outcome run_and_signal(const std::string& command, const std::string& out, const char* signal) const {
    return run(format("env --default-signal=INT %s & run=$!; while kill -0 $run && ! grep -qs loss '%s/log.jsonl'; do "
                      "sleep 0.05; done; kill "
                      "-%s $run; wait $run",
                      command.c_str(), out.c_str(), signal));
  }
};
using LongScripts = Scripts;

TEST_F(Scripts, PassThePapersOptionsAndTheUsers) {
  struct Case {
    const char *model, *preset, *wiring;
  };
  write_program("show", "echo \"$*\"");
  setenv("TRAINER", in("show").c_str(), 1);
  for (const Case& c : {Case{"124M sla", "d12", "sla(9,9)"},
                        {"124M plain", "d12", "plain"},
                        {"350M sla", "d24", "sla(18,12)"},
                        {"350M plain", "d24", "plain"},
                        {"774M sla", "d36", "sla(27,15)"},
                        {"774M plain", "d36", "plain"}}) {
    for (int T : {4096, 8192, 16384}) {
      const Outcome o = run(format("scripts/run_gpt2.sh %s %d --seed 5", c.model, T));
      EXPECT_EQ(o.exit_status, 0) << o.err;
      for (const std::string& part :
           {format("-e %s --wiring %s --max-seq-len %d ", c.preset, c.wiring, T),
            format(" -t %d -b 1 -d 524288 -x 18000 -l 1.5e-4 ", T), " -o " + in("out") + " -y --seed 5\n"})
        EXPECT_NE(o.out.find(part), std::string::npos) << part << "\n" << o.out;
    }
  }
  for (const auto& [model, what] : {std::pair("", "'': the paper's models are"),
                                    {"125M sla", "'125M': the"},
                                    {"124M 8192", "'8192': attention is"}}) {
    const Outcome o = run(format("scripts/run_gpt2.sh %s", model));
    EXPECT_EQ(o.exit_status, 1);
    EXPECT_NE(o.err.find(std::string("error: ") + what), std::string::npos) << o.err;
  }
}

TEST_F(Scripts, TakeFoldersOfAnyNameFromAnyFolder) {
  write_program("show", "printf '<%s> ' \"$A\" \"$@\"");
  setenv("TRAINER", in("show").c_str(), 1);
  const std::string root = fs::current_path().string(), odd = in("it \"[x] *");
  fs::create_directories(odd);
  fs::rename(in("data"), odd + "/-d *");
  setenv("DATA", "-d *", 1), setenv("OUT", "-o [x]", 1), setenv("LAUNCH", "env A=\"b *c\"", 1);
  const Outcome o = run("cd '" + odd + "' && '" + root + "/scripts/run_gpt2.sh' 124M sla");
  EXPECT_EQ(o.exit_status, 0) << o.err;
  for (const std::string& part :
       {std::string("<b *c> "), "<-o> <" + odd + "/./-o [x]> ", std::string("it \"[x] */./-d */train_*.bin> ")})
    EXPECT_NE(o.out.find(part), std::string::npos) << part << "\n" << o.out;
}

// A trainer stands in that has memory for five sequences, or what $FITS says. The last time that the script calls it is
// the run itself.
class LongMicroBatch : public Scripts {
 protected:
  void SetUp() override {
    Scripts::SetUp();
    unsetenv("BATCH");
    write_program("of_five", R"(
      echo "$*" >>"$OUT.calls"
      if [ -e "$OUT.fails" ]; then rm "$OUT.fails"; echo "error: the GPU is busy" >&2; exit 1; fi
      [[ "$*" = *"--dry-run --json" ]] || exit 0
      echo "{\"micro_batch\":1,\"ranks\":${RANKS-1},\"largest_micro_batch\":${FITS-5}}"
    )");
    setenv("TRAINER", in("of_five").c_str(), 1);
  }
  void TearDown() override {
    for (const char* name : {"FITS", "RANKS"}) unsetenv(name);
    Scripts::TearDown();
  }
  // The calls that the script makes, and what it prints.
  std::string micro_batches(const std::string& variables = "") const {
    fs::remove(in("out.calls"));
    const Outcome o = run(variables + " scripts/run_gpt2.sh 124M sla 16384 --seed 5");
    EXPECT_EQ(o.exit_status, 0) << o.err;
    return run("sed 's/.* -b \\([0-9]*\\) .* --seed 5/\\1/' '" + in("out.calls") + "'").out + o.out + o.err;
  }
};

TEST_F(LongMicroBatch, IsTheLargestThatFitsByOneDryRun) {
  EXPECT_EQ(micro_batches(), "1 --dry-run --json\n4\n");
  EXPECT_EQ(micro_batches("FITS=100"), "1 --dry-run --json\n32\n") << "as many tokens as a step has";
  EXPECT_EQ(micro_batches("FITS=100 RANKS=8"), "1 --dry-run --json\n4\n");
  fs::create_directory(in("out"));
  write_file(in("out/log.jsonl"), "{\"run\":{\"model\":\"d12\",\"micro_batch\":2,\"seq_len\":16384}}\n{\"step\":1}\n");
  EXPECT_EQ(micro_batches(), "1 --dry-run --json\n2\n") << "resumed";
  EXPECT_EQ(micro_batches("FITS=1"), "1 --dry-run --json\n1\n") << "resumed with less memory";
  EXPECT_EQ(micro_batches("BATCH=3"), "3\n");
}

TEST_F(LongMicroBatch, ADryRunThatFailsIsShownAndRepeated) {
  write_file(in("out.fails"), "");
  EXPECT_EQ(micro_batches(), "1 --dry-run --json\n1 --dry-run --json\n4\nerror: the GPU is busy\nthe run ended with "
                             "status 1; it "
                             "starts again in 1 s\n");
  write_program("of_five", "echo 'error: no such option' >&2; exit 1");
  const Outcome o = run("scripts/run_gpt2.sh 124M sla 16384");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_EQ(o.err.find("error: no such option\n"), 0u) << o.err;
  EXPECT_NE(o.err.find("ended three times in a row without a new checkpoint"), std::string::npos) << o.err;
}

TEST_F(LongScripts, ResumeAfterAKillWithTheSameBits) {
  write_program("killed_once", R"(
    if [ -e "$OUT" ]; then exec build/fp32/train_gpt2_sla_cpu "$@"; fi
    build/fp32/train_gpt2_sla_cpu "$@" & until [ -e "$OUT/step_00000002" ]; do sleep 0.01; done
    kill -9 $!; wait $!
  )");
  setenv("TRAINER", in("killed_once").c_str(), 1);
  const Outcome killed = run("scripts/run_gpt2.sh 124M sla" + small);
  EXPECT_EQ(killed.exit_status, 0) << killed.err;
  EXPECT_NE(killed.err.find("the run ended with status 137; it resumes from " + in("out") + "/step_"),
            std::string::npos)
      << killed.err;
  setenv("TRAINER", "build/fp32/train_gpt2_sla_cpu", 1);
  setenv("OUT", in("undisturbed").c_str(), 1);
  EXPECT_EQ(run("scripts/run_gpt2.sh 124M sla" + small).exit_status, 0);
  expect_the_same_checkpoint(in("out"), in("undisturbed"), 6);
}

TEST_F(LongScripts, StopWhenTheTrainingIsStoppedByASignal) {
  for (const char* signal : {"TERM", "INT", "HUP", "USR1"}) {
    setenv("OUT", in(signal).c_str(), 1);
    const Outcome o = run_and_signal("scripts/run_gpt2.sh 124M sla" + small + " -x 100000", in(signal), signal);
    EXPECT_EQ(o.exit_status, 128 + 10) << o.err;  // the trainer's exit status after SIGUSR1
    EXPECT_NE(o.out.find("stopped by SIGUSR1 after step"), std::string::npos) << o.out;
    EXPECT_NE(o.err.find("stopped; the same command resumes"), std::string::npos) << o.err;
  }
}

TEST_F(LongScripts, GiveUpAfterThreeRunsWithoutACheckpoint) {
  const Outcome o = run("scripts/run_gpt2.sh 350M plain --no-such-option");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("ended three times in a row without a new checkpoint, the last time with status 1"),
            std::string::npos)
      << o.err;
  int restarts = 0;
  for (size_t at = 0; (at = o.err.find("; it starts again in 1 s", at)) != std::string::npos; at++) restarts++;
  EXPECT_EQ(restarts, 2);
  EXPECT_NE(run("scripts/run_gpt2.sh 350M plain 1000").err.find("T = 1000"), std::string::npos);
  setenv("DATA", in("nothing").c_str(), 1);
  EXPECT_NE(run("scripts/run_gpt2.sh 350M plain").err.find("no train_*.bin in it"), std::string::npos);
}

// Slurm is replaced by one machine with two GPUs. Its warning ends the first job, which requeues itself; the second one
// resumes. Ranks agree to stop with the next step that they queue, so that it may take two steps.
TEST_F(LongScripts, UnderSlurmRequeueWhenWarned) {
  // mpirun starts its tasks, which cannot see that MPI has started them.
  write_program("srun", R"(
    echo "srun has $SRUN_CPUS_PER_TASK cores a task" >&2
    while [ "${1#--}" != "$1" ]; do echo "srun $1" >&2; shift; done
    exec mpirun --oversubscribe -np 2 bash -c 'SLURM_PROCID=$OMPI_COMM_WORLD_RANK SLURM_STEP_NUM_TASKS=2 \
       SLURM_LOCALID=$OMPI_COMM_WORLD_RANK \
      exec env -u OMPI_COMM_WORLD_SIZE -u OMPI_COMM_WORLD_RANK -u OMPI_COMM_WORLD_LOCAL_RANK -u PMIX_RANK \
      "$@"' task "$@"
  )");
  write_program("scontrol", "echo \"$*\" >>'" + in("queue") + "'\n");
  setenv("PATH", (folder + ":" + getenv("PATH")).c_str(), 1);
  setenv("SLURM_JOB_ID", "7", 1);
  setenv("SLURM_CPUS_PER_TASK", "8", 1);
  setenv("TRAINER", "build/fp32/train_gpt2_sla_emu", 1);
  setenv("OUT", in("slurm").c_str(), 1);
  const std::string command = "bash scripts/multi_node/slurm.sbatch scripts/run_gpt2.sh 124M sla " + small;
  const Outcome warned = run_and_signal(command, in("slurm"), "USR1");
  EXPECT_NE(warned.exit_status, 0) << warned.err;
  EXPECT_EQ(read_file(in("queue")), "requeue 7\n") << warned.out << warned.err;
  EXPECT_NE(warned.err.find("srun --kill-on-bad-exit=1"), std::string::npos) << warned.err;
  EXPECT_NE(warned.err.find("srun has 8 cores a task"), std::string::npos) << warned.err;
  const Outcome o = run(command);
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_NE(o.out.find("micro-batches of 1 x 8 tokens on each of 2 ranks"), std::string::npos) << o.out;
  EXPECT_EQ(steps_of(read_log(in("slurm"))).size(), 6u);
  EXPECT_EQ(read_file(in("queue")), "requeue 7\n");
}

TEST_F(Scripts, OnOneMachineStartAProcessForEachGpu) {
  write_program("nvidia-smi", "echo 'GPU 0: a'; echo 'GPU 1: b'");
  write_program("rank", "echo \"${RANK-none} of ${WORLD_SIZE-none}: $1 $2\"");
  setenv("PATH", (folder + ":" + getenv("PATH")).c_str(), 1);
  setenv("TRAINER", in("rank").c_str(), 1);
  const auto started = [&](const std::string& variables) {
    const Outcome o = run("unset LAUNCH; " + variables + " scripts/run_gpt2.sh 124M sla | sort");
    EXPECT_EQ(o.exit_status, 0) << o.err;
    return o.out;
  };
  EXPECT_EQ(started(""), "0 of 2: -e d12\n1 of 2: -e d12\n");
  EXPECT_EQ(started("CUDA_VISIBLE_DEVICES=1"), "none of none: -e d12\n");
  EXPECT_EQ(started("CUDA_VISIBLE_DEVICES=1,0,3"), "0 of 3: -e d12\n1 of 3: -e d12\n2 of 3: -e d12\n");
}

TEST_F(Scripts, OnSeveralMachinesPassHostsAndInterfaceToMpirun) {
  write_program("mpirun", "echo \"mpirun $*\"");
  setenv("PATH", (folder + ":" + getenv("PATH")).c_str(), 1);
  const Outcome o = run("INTERFACE=eth7 scripts/multi_node/mpirun.sh node1:8,node2:8 scripts/run_gpt2.sh 774M sla "
                        "16384");
  EXPECT_EQ(o.exit_status, 0) << o.err;
  for (const char* part : {"mpirun --host node1:8,node2:8 ", " --bind-to none ", "--mca btl_tcp_if_include eth7",
                           "-x NCCL_SOCKET_IFNAME=eth7", "build/fp32/train_gpt2_sla_cpu -e d36"})
    EXPECT_NE(o.out.find(part), std::string::npos) << part << "\n" << o.out;
  EXPECT_EQ(run("scripts/multi_node/mpirun.sh node1:8").exit_status, 1);
}

TEST_F(Scripts, OnSeveralMachinesPassNcclsVariablesToMpirun) {
  write_program("mpirun", "echo \"mpirun $*\"");
  setenv("PATH", (folder + ":" + getenv("PATH")).c_str(), 1);
  const Outcome o = run("NCCL_DEBUG=INFO NCCL_IB_HCA=mlx5 OMP_PLACES=cores INTERFACE=eth7 NCCL_SOCKET_IFNAME=eth1 "
                        "OTHER=1 "
                        "scripts/multi_node/mpirun.sh node1:8 scripts/run_gpt2.sh 774M plain");
  EXPECT_EQ(o.exit_status, 0) << o.err;
  for (const char* part : {" -x NCCL_DEBUG ", " -x NCCL_IB_HCA ", " -x OMP_PLACES ", " -x NCCL_SOCKET_IFNAME=eth7 "})
    EXPECT_NE(o.out.find(part), std::string::npos) << part << "\n" << o.out;
  for (const char* part : {"OTHER", "NCCL_SOCKET_IFNAME "})
    EXPECT_EQ(o.out.find(part), std::string::npos) << part << "\n" << o.out;
}

// ----------------------------------------------------------------------------
// make train

// A copy whose `make` builds nothing, where trials take 95 ms an update and the run that is chosen by them a second.
// The time until somebody looks at it does not pass.
class LongTrain : public Scripts {
 protected:
  void SetUp() override {
    Scripts::SetUp();
    for (const char* name : {"OUT", "DATA", "TRAINER", "MINUTES", "HOURS"}) unsetenv(name);
    fs::create_directories(in("r [x]/data/text-my__own-01234567"));
    fs::copy("scripts", in("r [x]/scripts"), fs::copy_options::recursive);
    fs::rename(in("data/train_000.bin"), in("r [x]/data/text-my__own-01234567/train_000000.bin"));
    write_file(in("r [x]/data/text-my__own-01234567/MANIFEST.json"), "\"vocab_size\": 257,\n\"bytes_of_text\": "
                                                                     "2000000000,\n\"train_tokens\": "
                                                                     "1900000000,\n\"val_tokens\": 2000\n");
    for (const char* text : {"a", "a $b'c"}) write_file(in(std::string("r [x]/") + text), "");
    write_program("r [x]/data/text.sh", "echo \"$PWD/data/text-my__own-01234567\"");
    write_program("r [x]/scripts/setup.sh", "");
    write_program("make", "[ \"$1\" = -n ] || echo \"g++ -std=c++17 -c a.cpp -o a.o\"; echo made");
    write_program("sleep", "exec /bin/sleep 0.2");
    write_program("nvidia-smi", "exit 9");
    write_program("r [x]/train_gpt2_sla_cpu", R"(
      trial=
      while [ $# -gt 0 ]; do
        case $1 in --config) config=$2 ;; -x) trial=yes ;; -o) out=$2 ;; esac
        shift
      done
      mkdir -p "$out"
      echo '{"run":{"flops_per_token":9}}' >"$out/log.jsonl"
      for ((i = 1; i <= 20; i++)); do
        printf '{"step":%d,"loss":1,"ms":%d,"data_ms":0}\n' $i $([ -n "$trial" ] && echo 95 || echo 1000)
      done >>"$out/log.jsonl"
      [ -z "$trial" ] || exit 0
      trap 'echo stopped; exit 0' USR1
      steps=$(sed -n 's/^steps = //p' "$config")
      echo "updates: $steps"
      if [ "$steps" = 3000 ]; then for ((i = 0; i < 100; i++)); do /bin/sleep 0.1; done; fi
      mkdir -p "$out/step_00000285"
    )");
    setenv("PATH", (folder + ":" + getenv("PATH")).c_str(), 1);
  }
};

TEST_F(LongTrain, KeepsItsFiveMinutesAndSuggestsWhatToTry) {
  const Outcome o = run("cd '" + in("r [x]") + "' && TEXT='a $b'\\''c' scripts/train.sh");
  EXPECT_EQ(o.exit_status, 0) << o.err;
  size_t at = 0;
  for (const char* part :
       {"compiling a.cpp (1)", "in 3000 updates", "updates: 3000", "at this speed 285 updates take the time, not 3000",
        "updates: 285", "train TEXT=a\\ \\$\\$b\\'c HOURS=1", "--wiring rope -o runs/my_own-"}) {
    at = o.out.find(part, at);
    ASSERT_NE(at, std::string::npos) << part << "\n" << o.out << o.err;
  }
  const Outcome again = run("cd '" + in("r [x]") + "' && TEXT=a scripts/train.sh");
  EXPECT_EQ(again.out.find("updates: 3000"), std::string::npos) << "it is kept" << again.out;
  EXPECT_NE(run("cd '" + in("r [x]") + "' && MINUTES=7 PRECISION=FP32 TEXT=a scripts/train.sh")
                .out.find("-fp32-7min -y"),
            std::string::npos);
  const std::string in_x = "cd '" + in("r [x]") + "' && OUT=x TEXT=a scripts/train.sh";
  EXPECT_EQ(run(in_x).exit_status, 0);
  EXPECT_NE(run("export MINUTES=7; " + in_x).err.find("x.toml: is what was chosen for 5 minutes, not 7; give another "),
            std::string::npos);
}

// experiment: runs of a file or of a command line, with the trainer or with a script in its place. Runs from the
// repository's root, where the programs are.
//
// COVERS scripts/experiments/
#include <sys/stat.h>
#include <algorithm>
#include <sstream>
#include "command_line.h"
#include "llmc/base/error.h"
#include "llmc/train/run_lock.h"

class ExperimentTest : public CommandLine {
 protected:
  // A trainer that trains nothing: its loss follows from rate, seed and wiring, whose best rate is 4e-3, of
  // `sla` 1.3e-2. `sla` has four fifths of the FLOPs. It notes its runs, and the GPU.
  void SetUp() override {
    CommandLine::SetUp();
    fs::create_directories(in("data"));
    for (const char* name : {"train_000.bin", "val_000.bin"}) write_file(in("data/") + name, shard_bytes(4000, 63));
    write_program("trainer", "started='" + in("started") + R"sh('
      all=$*
      while [ $# -gt 0 ]; do
        case $1 in
          -l) rate=$2 ;; -o) run=$2 ;; --wiring) wiring=$2 ;; --seed) seed=$2 ;; -x) steps=$2 ;;
        esac
        shift
      done
      [[ $wiring = *sla* ]] && flops=4 || flops=5
      [[ $all != *--same-options* || -z ${OTHERS-} ]] || { echo "error: others" >&2; exit 1; }
      if [[ $all = *--dry-run* ]]; then
        echo "{\"steps\":$steps,\"flops_per_token\":$flops,\"memory_needed\":10,\"memory_free\":${MEMORY-1000}}"
        exit
      fi
      case "$wiring${rate-}" in
        gate*|rope6e-3) echo "error: no gates here" >&2; exit 3 ;;
        relu22.5e-3) kill -9 $$ ;;
      esac
      [ -z "${TRAP-}" ] || { trap '' USR1; trap "touch $started.int" INT; }
      touch "$started.now.$seed.$wiring"
      echo "${CUDA_VISIBLE_DEVICES-}${run#*/out/} $steps ${OMP_NUM_THREADS-}" >>"$started"
      sleep "${SLEEP-0}"
      echo "at a time: $(ls "$started".now.* | wc -l)" >>"$started.count"
      rm "$started.now.$seed.$wiring"
      mkdir -p "$run"
      awk -v rate="${rate-1e-3}" -v wiring="$wiring" -v seed="$seed" -v steps="$steps" 'BEGIN {
        loss = 1.5 + (log(rate / (wiring ~ /sla/ ? 1.3e-2 : 4e-3)) / 4) ^ 2 + 0.01 * seed
        printf "{\"run\":{\"steps\":%d,\"seed\":%d,\"wiring\":\"%s\"}}\n", steps, seed, wiring
        printf "{\"step\":%d,\"loss\":1}\n", steps
        if (wiring != "alibi") printf "{\"step\":%d,\"val_loss\":%.6f}\n", steps, loss
      }' >"$run/log.jsonl")sh");
  }
  void TearDown() override {
    for (const char* name : {"MEMORY", "SLEEP", "OTHERS", "TRAP"}) unsetenv(name);
    CommandLine::TearDown();
  }
  void write_program(const std::string& name, const std::string& text) const {
    write_file(in(name), "#!/usr/bin/env bash\n" + text);
    chmod(in(name).c_str(), 0755);
  }
  std::string experiment(const std::string& arguments) const {
    return "./experiment --trainer " + in("trainer") + " -o " + in("out") + " " + arguments;
  }
  // The lines of what the trainers have noted since the last time.
  std::vector<std::string> started() const {
    std::vector<std::string> runs;
    std::istringstream lines(fs::exists(in("started")) ? read_file(in("started")) : "");
    for (std::string line; std::getline(lines, line);) runs.push_back(line.substr(0, line.rfind(' ')));
    fs::remove(in("started"));
    return runs;
  }
  // With the trainer, on a small model.
  std::string compare(const std::string& wirings, const std::string& more) const {
    return "./experiment --jobs 1 --trainer build/fp32/train_gpt2_sla_cpu -o " + in("out") + " --wirings '" + wirings +
           "' --seeds 2 -- -i " + in("data/train_000.bin") + " -j " + in("data/val_000.bin") +
           " --layers 4 --heads 4 --channels 32 --vocab-size 64 --max-seq-len 8 -t 8 -b 1 --shuffle -v 10 -m 2 " + more;
  }
};

using LongExperiment = ExperimentTest;  // for the tests that take long

// Stopped in the second run, and resumed with the same command: with the bits of a run alone.
TEST_F(LongExperiment, ResumesWhereItWasStopped) {
  const std::string command = compare("plain; sla(3,3);; gqa(2)  window(4) ", "-x 400 -n 100 -k constant");
  for (const char* signal : {"TERM", "INT"}) {
    const Outcome stopped =
        run("env --default-signal=INT " + command + " & run=$!; while kill -0 $run && ! grep -qs loss '" +
            in(signal == std::string("TERM") ? "out/sla_3_3-1" : "out/gqa_2_window_4-1") +
            "/log.jsonl'; do sleep 0.05; done; kill -" + signal + " $run; wait $run");
    EXPECT_EQ(stopped.exit_status, 128 + (signal == std::string("TERM") ? SIGTERM : SIGINT)) << stopped.err;
    EXPECT_EQ(stopped.err, "stopped; the same command resumes\n");
    EXPECT_TRUE(fs::exists(in("out/compare.html")));
  }
  EXPECT_FALSE(fs::exists(in("out/plain-2"))) << "runs are interleaved";
  const Outcome o = run(command);
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_EQ(o.out.rfind("gqa(2) window(4), seed 1: validation loss ", 0), 0u) << o.out;
  EXPECT_NE(o.out.find(" after step 400; 3 runs are left, about "), std::string::npos) << o.out;
  EXPECT_EQ(o.out.substr(o.out.size() - in("out/compare.html\n").size()), in("out/compare.html\n"));
  const std::string page = read_file(in("out/compare.html")), printed = read_file(in("out/sla_3_3-1.txt"));
  EXPECT_NE(page.find("<h1>6 runs side by side</h1>"), std::string::npos);
  EXPECT_NE(page.find("<tr><td>gqa(2) window(4)</td><td>2</td>"), std::string::npos) << "two seeds";
  EXPECT_EQ(page.find("class=\"warn\""), std::string::npos) << "all are finished";
  EXPECT_LT(printed.find("stopped by SIGUSR1 after step"), printed.find("resumed from"));
  std::set<std::string> checkpoints;
  for (const std::string& file : names_in(in("out/plain-1")))
    if (file.rfind("step_", 0) == 0) checkpoints.insert(file);
  EXPECT_EQ(checkpoints, std::set<std::string>{"step_00000400"}) << "the last of those that -n 100 writes";
  fs::rename(in("out"), in("stopped"));
  EXPECT_EQ(run(compare("sla(3,3)", "-x 400 -n 100 -k constant")).exit_status, 0);
  expect_the_same_checkpoint(in("stopped/sla_3_3-1"), in("out/sla_3_3-1"), 400);
}

TEST_F(ExperimentTest, DoesNotTakeRunsOfOtherOptions) {
  const Outcome first = run(compare("plain; rope", "-x 2 -l 1e-3"));
  ASSERT_EQ(first.exit_status, 0) << first.err;
  fs::remove(in("out/compare.html"));
  const Outcome o = run(compare("plain; rope", "-x 2 -l 1e-2 -c 0.5"));
  EXPECT_EQ(o.exit_status, 2) << o.out << o.err;
  EXPECT_EQ(o.out, "");
  for (const char* name : {"plain", "rope"}) {
    const std::string error = std::string("error: ") + name + ", seed 1: --same-options: ";
    EXPECT_NE(o.err.find(error), std::string::npos) << o.err;
    EXPECT_EQ(o.err.find(error), o.err.rfind(error)) << "once: it is the seed of the search, too";
  }
  EXPECT_NE(o.err.find("peak learning rate (-l): 0.001, and now 0.01; weight decay (-c): 0.1, and now 0.5"),
            std::string::npos)
      << o.err;
  EXPECT_FALSE(fs::exists(in("out/compare.html"))) << "nothing is written";
  EXPECT_EQ(run(compare("plain", "-x 4 -l 1e-3")).exit_status, 2) << "a cosine of two steps, continued, is none of "
                                                                     "four";
  for (const char* name : {"plain-1", "rope-1"}) fs::remove_all(in("out/") + name + "/step_00000002");
  EXPECT_EQ(run(compare("plain", "-x 2 -l 1e-2")).exit_status, 2) << "logs without checkpoints";
  const Outcome again = run(compare("plain; rope", "-x 2 -l 1e-3"));
  EXPECT_EQ(again.exit_status, 0) << again.err;
  EXPECT_EQ(again.out, in("out/compare.html\n")) << "all has been done";
}

// Seeds 2 and 3 follow the rates, which are tried with seed 1.
TEST_F(ExperimentTest, TriesRatesUntilTheBestHasWorseOnesOnBothSides) {
  write_file(in("e.toml"), R"toml(
    about = "What it is."
    rates = ["1.1e-3", "1.7e-3", "2.5e-3", "4e-3", "6e-3", "9e-3", "1.3e-2"]
    seeds = "2:3"
    steps = 4
    equal_flops = "plain"
    [[group]]
    name = "block"
    title = "A title"
    text = "A text."
    arms = ["plain", { wiring = "sla(6,6)", published = "-0.1" }]
    [[group]]
    name = "fixed"
    rates = []
    seeds = "1"
    options = "-l 9e-4"
    equal_flops = ""
    arms = [{ wiring = "plain", options = "-b 3" }, { wiring = "sla(6,6)", from = "block", options = "-l 1" }]
  )toml");
  const std::string command = experiment(in("e.toml") + " --jobs 1");
  EXPECT_EQ(run(command + " --only block --dry-run").out, "block, plain, 4e-3, seed 1: 4 updates\nblock, sla(6,6), "
                                                          "4e-3, "
                                                          "seed 1: 5 updates\n");
  EXPECT_EQ(run(command).exit_status, 1) << "of the same folder with other options";
  write_file(in("e.toml"), run("sed '/^ *arms.*from/s/, { wiring = .sla.*/]/' '" + in("e.toml") + "'").out);
  const Outcome o = run(command);
  ASSERT_EQ(o.exit_status, 0) << o.out << o.err;
  std::vector<std::string> runs = started();
  std::vector<std::string> expected = {"fixed/plain-1 4"};
  for (const char* rate : {"2.5e-3", "4e-3", "6e-3"}) expected.push_back(format("block/%s/plain-1 4", rate));
  for (const char* rate : {"2.5e-3", "4e-3", "6e-3", "9e-3", "1.3e-2"})
    expected.push_back(format("block/%s/sla_6_6-1 5", rate));
  for (const char* seed : {"2", "3"})
    for (const char* arm : {"4e-3/plain-%s 4", "1.3e-2/sla_6_6-%s 5"}) expected.push_back("block/" + format(arm, seed));
  std::sort(runs.begin(), runs.end()), std::sort(expected.begin(), expected.end());
  EXPECT_EQ(runs, expected);
  EXPECT_EQ(run(command).out, in("out/compare.html\n"));
  EXPECT_TRUE(started().empty()) << "all has been done";
  run("sed -i '/\"loss\"/d' '" + in("out/block/4e-3/plain-2/log.jsonl") + "'");
  run(command);
  EXPECT_TRUE(started().empty()) << "an archive has not each update's line";
  const std::string outline = read_file(in("out/outline.txt")), block = in("out/block/");
  EXPECT_EQ(outline.find("# What this is\n What it is.\n# A title\n A text.\nplain: the first is taken; 4e-3: "
                         "1.5100; "),
            0u)
      << outline;
  EXPECT_NE(outline.find("\nrun " + block + "4e-3/plain-2\nrun " + block +
                         "4e-3/plain-3\nsla(6,6): the first is taken"),
            std::string::npos)
      << outline;
  EXPECT_NE(outline.find("run " + block + "1.3e-2/sla_6_6-3\npublished -0.1\n"), std::string::npos) << outline;
  EXPECT_NE(read_file(in("out/compare.html")).find("<h2>A title</h2>"), std::string::npos);
}

// As many as memory has room for, on two GPUs two.
TEST_F(ExperimentTest, RunsAsManyAtATimeAsHaveRoom) {
  setenv("SLEEP", "0.5", 1);
  const std::string runs = "--wirings 'plain; gqa(2); share(2)' --seeds 1 -- -x 2";
  setenv("MEMORY", "19", 1);
  EXPECT_EQ(run(experiment(runs)).exit_status, 0);
  EXPECT_EQ(read_file(in("started.count")).find("2"), std::string::npos) << read_file(in("started.count"));
  started(), fs::remove(in("started.count")), fs::remove_all(in("out"));
  write_program("nvidia-smi", "echo 'GPU 0: a'; echo 'GPU 1: b'");
  const Outcome o = run("export PATH='" + folder + "':$PATH; " + experiment(runs));
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_EQ(read_file(in("started.count")).find("at a time: 2\n"), 0u) << read_file(in("started.count"));
  const std::vector<std::string> noted = started();
  EXPECT_EQ(std::set<std::string>(noted.begin(), noted.begin() + 2), (std::set<std::string>{"0plain-1 2", "1gqa_2-1 "
                                                                                                          "2"}));
  EXPECT_EQ(noted.size(), 3u) << "no run twice";
  fs::remove_all(in("out"));
  EXPECT_EQ(run("export CUDA_VISIBLE_DEVICES=5,GPU-7 PATH='" + folder + "':$PATH; " + experiment(runs)).exit_status, 0);
  const std::vector<std::string> named = started();
  EXPECT_EQ(std::set<std::string>(named.begin(), named.begin() + 2), (std::set<std::string>{"5plain-1 2", "GPU-7gqa_2-"
                                                                                                          "1 2"}));
}

TEST_F(ExperimentTest, SignalsReachItsTrainersThroughItAlone) {
  setenv("SLEEP", "2", 1), setenv("TRAP", "1", 1);
  const std::string one = experiment("--wirings plain --seeds 1 -- -x 2");
  const auto signalled = [&](const std::string& before, const std::string& kill) {
    started(), fs::remove_all(in("out"));
    write_program("signalled", "set -m\n" + before + one + " & run=$!\nuntil [ -e '" + in("started") +
                                   "' ]; do sleep 0.05; done\nkill " + kill + "\nwait $run\n");
    return run(in("signalled"));
  };
  EXPECT_EQ(signalled("env --default-signal=INT ", "-INT -- -$run").exit_status, 128 + SIGINT);
  EXPECT_FALSE(fs::exists(in("started.int"))) << "a terminal's, to all of a group";
  EXPECT_EQ(signalled("nohup ", "-HUP $run").exit_status, 0);
  EXPECT_EQ(signalled("", "-KILL $run").exit_status, 128 + SIGKILL);
  EXPECT_NE(run(one).err.find("is in use by process "), std::string::npos) << "its trainer has not ended";
  EXPECT_EQ(run("timeout 20 bash -c 'until " + one + "; do sleep 0.1; done'").exit_status, 0);
  EXPECT_EQ(started().size(), 1u);
}

TEST_F(ExperimentTest, ARunIsDoneWithItsCheckpoint) {
  const std::string one = experiment("--wirings plain --seeds 1 -- -x 2");
  run(one), started(), run(one);
  EXPECT_TRUE(started().empty()) << "an archive has none";
  write_file(in("out/plain-1/lock"), "");
  run(one);
  EXPECT_EQ(started().size(), 1u) << "killed before it";
  run("echo '{\"step\":2,\"checkpoint\":\"step_2\"}' >>'" + in("out/plain-1/log.jsonl") + "'; " + one);
  EXPECT_TRUE(started().empty()) << "removed since";
}

TEST_F(ExperimentTest, SaysWhichRunsFailedAndDoesTheOthers) {
  const Outcome o = run("timeout 20 " + experiment("--wirings 'plain; gate; rope' --seeds 2 -- -x 2"));
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("error: gate, seed 1: ended with status 3: no gates here\n"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("error: 2 runs failed; the others are in " + in("out/compare.html")), std::string::npos)
      << o.err;
  EXPECT_EQ(started().size(), 4u);
  EXPECT_NE(read_file(in("out/compare.html")).find("<h1>4 runs side by side</h1>"), std::string::npos);
}

// A rate that failed is worse than the others; without validation none can be chosen.
TEST_F(ExperimentTest, ChoosesAmongTheRatesThatDidNotFail) {
  const std::string file = in("e.toml");
  write_file(file, R"toml(
    rates = ["2.5e-3", "4e-3", "6e-3"]
    search_seed = 5
    seeds = "2"
    steps = 4
    [[group]]
    name = "a"
    arms = ["rope"]
  )toml");
  const Outcome o = run("timeout 20 " + experiment(file + " --jobs 1"));
  EXPECT_EQ(o.exit_status, 1) << o.err;
  EXPECT_NE(o.err.find("error: 1 runs failed; "), std::string::npos) << o.err;
  EXPECT_EQ(started(),
            (std::vector<std::string>{"a/4e-3/rope-5 4", "a/2.5e-3/rope-5 4", "a/4e-3/rope-1 4", "a/4e-3/rope-2 4"}));
  EXPECT_NE(read_file(in("out/outline.txt")).find("rope: the first is taken; 4e-3: 1.5500; 2.5e-3: "),
            std::string::npos);
  setenv("OTHERS", "1", 1);
  const Outcome others = run(experiment(file));
  EXPECT_EQ(others.exit_status, 2) << others.err;
  EXPECT_NE(others.err.find("error: a, rope, 4e-3, seed 5: others\n"), std::string::npos) << others.err;
  write_file(file, run("sed 's/rope/alibi/' '" + file + "'").out);
  const Outcome none = run("timeout 20 " + experiment(file + " --jobs 1"));
  EXPECT_EQ(none.exit_status, 1) << none.out;
  EXPECT_NE(none.err.find("error: " + in("out/a/4e-3/alibi-5: has no validation loss")), std::string::npos) << none.err;
  write_file(file, run("sed 's/alibi/relu2/' '" + file + "'").out), started();
  const Outcome killed = run("timeout 20 " + experiment(file + " --jobs 1"));
  EXPECT_NE(killed.err.find("a, relu2, 2.5e-3, seed 5: ended with status 137"), std::string::npos) << killed.err;
  EXPECT_EQ(started(), (std::vector<std::string>{"a/4e-3/relu2-5 4", "a/6e-3/relu2-5 4"})) << "not yet the seeds";
  const Outcome without = run(experiment("--wirings alibi --seeds 1 --steps 4 --data " + in("data")));
  EXPECT_NE(without.out.find("alibi, seed 1: no validation after step 4"), std::string::npos) << without.out;
}

TEST_F(ExperimentTest, WhatIsNotItsOwnStays) {
  const std::string runs = "--wirings plain --seeds 1 -- -x 2";
  fs::create_directories(in("out"));
  write_file(in("out/outline.txt"), "my outline of the paper\n");
  EXPECT_NE(run(experiment(runs)).err.find("out/outline.txt: is no experiment's; name another"), std::string::npos);
  EXPECT_EQ(read_file(in("out/outline.txt")), "my outline of the paper\n");
  fs::remove(in("out/outline.txt"));
  {
    RunLock of_another;
    of_another.take(in("out"));
    EXPECT_NE(run(experiment(runs)).err.find("is in use by process "), std::string::npos);
  }
  EXPECT_TRUE(started().empty());
  fs::create_directories(in("out/compare.html/x"));
  const Outcome no_page = run(experiment(runs));
  EXPECT_EQ(no_page.exit_status, 1) << no_page.out;
  EXPECT_NE(no_page.err.find("out/compare.html: is not of these runs"), std::string::npos) << no_page.err;
}

// Lines of a text are no commands of an outline.
TEST_F(ExperimentTest, TextsAreParagraphs) {
  const std::string text = "# of seeds is one.\\nrun plain GPT-2,\\nlevel of noise";
  write_file(in("e.toml"), "about = \"" + text +
                               "\"\nseeds = '1'\nsteps = 2\n[[group]]\nname = 'a'\narms = ['plain']\n" + "text = \"" +
                               text + "\"\n");
  const Outcome o = run(experiment(in("e.toml")));
  EXPECT_EQ(o.exit_status, 0) << o.err;
  const std::string page = read_file(in("out/compare.html"));
  const std::string paragraphs = "</h2>\n<p># of seeds is one.</p>\n<p>run plain GPT-2,</p>\n<p>level of noise</p>\n";
  EXPECT_NE(page.find("<h2>What this is" + paragraphs), std::string::npos);
  EXPECT_NE(page.find("<h2>a" + paragraphs), std::string::npos);
}

// What is wrong is said before anything is written.
TEST_F(ExperimentTest, ArgumentsAndFilesThatAreWrongAreRefused) {
  const auto expect_error = [&](const std::string& arguments, const std::string& part) {
    const Outcome o = run(experiment(arguments));
    EXPECT_EQ(o.exit_status, 1) << arguments;
    EXPECT_EQ(o.err.rfind("error: ", 0), 0u) << o.err;
    EXPECT_NE(o.err.find(part), std::string::npos) << o.err;
    EXPECT_FALSE(fs::exists(in("out"))) << arguments;
  };
  expect_error("--wirings plain --seeds two -- -x 1", "seeds 'two': must be a number");
  expect_error("--wirings plain --seeds 3:2 -- -x 1", "seeds '3:2': the first is after the last");
  expect_error("--wirings ' ;' --seeds 1 -- -x 1", "no wirings");
  expect_error("--seeds 1 -- -x 1", "no wirings");
  expect_error("--wirings 'gqa(2);gqa 2' --seeds 1 -- -x 1", "two are called gqa_2");
  expect_error("--wirings plain --seeds 1 --trainer none -- -x 1", "./none: is not here; make builds it");
  expect_error("--wirings plain --seed 1", "--seed: no such option; did you mean --seeds?");
  expect_error("--wirings plain --seeds 1 --data " + in("none"), "none: has no train_*.bin");
  expect_error("--wirings plain --seeds 1 --trainer ./none -- -x 1", "./none: is not here; make builds it");
  expect_error("--wirings plain -- -x 1", "no seeds: give --seeds 3");
  expect_error("--wirings plain --seeds 1 --steps 0", "--steps 0: it must be at least 1");
  expect_error("--wirings plain --seeds 1 --jobs 0 -- -x 1", "--jobs 0: it must be at least 1");
  expect_error("--wirings plain --seeds 1 --trainer /bin/true -- -x 1", "/bin/true: its --dry-run --json is no plan");
  expect_error("--wirings plain --seeds 1 --steps 2 -- -x 1", "-x: each run has its own");
  for (const std::string own :
       {"--wiring=gate", "--seed 7", "-o X", "-oX", "--out=X", "-y", "--resume", "--dry-run", "--help", "-h"})
    expect_error("--wirings plain --seeds 1 -- -x 1 " + own, own.substr(0, own.find(' ')) + ": each run has its own");
  const std::string path = in("e.toml");
  for (const auto& [text, part] : {std::pair("seeds = ", ":1: is not TOML: "),
                                   {"sedes = 1", ": sedes: is no key here; the keys are "},
                                   {"seeds = 3\n[[group]]\nname = 'a'\narms = ['plain']", ": seeds: must be a text"},
                                   {"seeds = '1'\n[[group]]\nname = 'a'\ndata = 'b'", ": data: is no key here"},
                                   {"seeds = '1'\n[[group]]\nname = 'a'\narms = [{wirings = 'b'}]", ": wirings: is no"},
                                   {"seeds = '1'\n[[group]]\nname = 'a'", "no wirings"},
                                   {"steps = 5.7", ": steps: must be a whole number from 1 to "},
                                   {"search_seed = 0", ": search_seed: must be a whole number from 1 to "},
                                   {"rates = [1e-3]", ": rates: must be a list of texts"},
                                   {"group = ['a']", ": group: must be a list of tables"},
                                   {"arms = [1]", ": arms: must be a list of texts and tables"},
                                   {"seeds = '1'\n[[group]]\narms = ['plain']\nrates = ['a']", "a: is not a number"},
                                   {"seeds = '1'\n[[group]]\narms = ['plain']\nrates = ['0']", "'0': must be above 0"},
                                   {"seeds = '1'\n[[group]]\narms = ['plain']\noptions = '--seed 7'", "--seed: each "
                                                                                                      "run"},
                                   {"seeds = '1'\n[[group]]\narms = [{wiring = 'plain', options = '-oX'}]", "-oX: "
                                                                                                            "each"},
                                   {"seeds = '1'\n[[group]]\narms = ['plain']\nrates = ['1']\noptions = '-l 2'", "-l:"
                                                                                                                 " "},
                                   {"seeds = '1'\narms = ['plain']", ": has no group or probe"}}) {
    write_file(path, text);
    expect_error(path, part);
  }
  write_file(path, "seeds = '1'\narms = ['plain']\n[[group]]\nname = 'a'\nrates = ['1e-3']\n[[group]]\n"
                   "name = 'a/1e-3'\noptions = '-l 1'");
  expect_error(path + " -- -x 1", "two are called a/1e-3/plain, and have other options");
  write_file(path, "seeds = '1'\nsearch_seed = 1000000000\n[[group]]\nname = 'a'\narms = ['plain']\nrates = ['1']");
  EXPECT_EQ(run("timeout 60 " + experiment(path + " --dry-run -- -x 1")).exit_status, 0);
  write_file(path, "seeds = '1'\n[[group]]\nname = 'a'\narms = ['plain']\nequal_flops = 'plain'");
  expect_error(path + " -- -x 1", "-x: each run has its own");
  expect_error(path + " --only a,b", "--only b: " + path + " has no such group");
  const std::string none = in("none");
  write_file(path, "data = '" + none + "'\nmake_data = 'mkdir " + none +
                       "'\nseeds = '1'\n[[group]]\nname = 'a'\narms = ['plain']");
  expect_error(path + " --dry-run",
               "none: has no train_*.bin; mkdir " + none + " makes them, which --dry-run does not");
  EXPECT_FALSE(fs::exists(none));
}

// Each of the repository's files, with the number of runs that it begins with.
TEST_F(LongExperiment, TheRepositorysFilesAreExperiments) {
  for (const auto& [name, runs] :
       {std::pair("paper", 66), {"night", 12}, {"evidence", 48}, {"frontier", 196}, {"probe", 192}}) {
    const std::string file = format("scripts/experiments/%s.toml", name);
    const Outcome o =
        run(experiment(file + " --dry-run" + (name == std::string("probe") ? "" : " --data " + in("data"))));
    EXPECT_EQ(o.exit_status, 0) << name << o.err;
    EXPECT_EQ(std::count(o.out.begin(), o.out.end(), '\n'), runs) << o.out;
  }
}

TEST_F(ExperimentTest, ProbesHaveAccuraciesByTaskAndWiring) {
  write_file(in("p.toml"), R"(
    options = "--layers 2 --heads 4 --channels 32 -b 8 -l 2e-3 -k constant -m 0 -v 100"
    steps = 5
    seeds = "1"
    arms = ["rope", "plain"]
    probes = ["recall --pairs 2 --symbols 4 -t 16", "copy --length 2 --symbols 4 -t 8"]
  )");
  const Outcome o = run("./experiment --trainer build/fp32/train_gpt2_sla_cpu -o " + in("out") + " " + in("p.toml"));
  ASSERT_EQ(o.exit_status, 0) << o.out << o.err;
  const std::string page = read_file(in("out/compare.html")), outline = read_file(in("out/outline.txt"));
  for (const char* part : {"<h2>Accuracy after the last update</h2>",
                           "<th>recall --pairs 2 --symbols 4 -t 16</th><th>copy --length 2 --symbols 4 -t 8</th>",
                           "<th>recall --symbols 4 --pairs 2</th><th>copy --symbols 4 --length 2</th>"})
    EXPECT_NE(page.find(part), std::string::npos) << part;
  EXPECT_NE(outline.find("\nlevel 2 of recall --symbols 4 --pairs\nchance 0.625\n"), std::string::npos) << outline;
  EXPECT_LT(outline.find("_t_16/rope-1\n"), outline.find("_t_16/plain-1\n")) << "the wirings' order";
}

// Of the runs that the trainer's logs tell of: plain has 1.5 and a hundredth for each seed, `sla` 0.05 less and a
// thousandth for each seed; among other texts it loses what the length adds.
TEST_F(ExperimentTest, DifferencesOfTheEvidenceAreOfPairs) {
  const auto add = [&](const std::string& run, const std::string& wiring, double bits) {
    fs::create_directories(in("out/" + run));
    write_file(in("out/" + run + "/log.jsonl"), format("{\"run\":{\"steps\":4,\"wiring\":\"%s\"}}\n{\"step\":4,\"val_"
                                                       "bits_per_byte\":%.6f}\n",
                                                       wiring.c_str(), bits));
  };
  for (int seed = 1; seed <= 4; seed++) {
    for (const auto& [rate, more] : {std::pair("4e-3", 0.0), {"6e-3", 0.1}}) {
      add(format("block/%s/plain-%d", rate, seed), "plain", 1.5 + 0.01 * seed + more);
      add(format("block/%s/sla_6_6-%d", rate, seed), "sla(6,6)", 1.45 + 0.009 * seed + more);
    }
    for (int T : {256, 1024, 4096})
      for (const std::string documents : {"", " documents"}) {
        const double bits = 1.5 + (documents.empty() ? T / 40960.0 : 0) + 0.001 * seed;
        const char* name = documents.empty() ? "" : "_documents";
        if (seed > 3) continue;
        add(format("documents/T%d/rope%s-%d", T, name, seed), "rope" + documents, bits);
        add(format("documents/T%d/rope_sla_6_3%s-%d", T, name, seed), "rope sla(6,3)" + documents, bits - T / 409600.0);
      }
  }
  const Outcome o = run("python3 dev/bench/results/sla/differences.py " + in("out"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  for (const char* line :
       {"| `sla(6,6)` | 3 | -0.0530 | +- 0.0025 | 0.000 | lower |",
        "| `plain` | 4e-3 | 1.5200 | 1.5300 | 1.5400 | 1.5300 | 0.0100 |",
        "sigma of plain: 0.0100; pairs by the protocol: 10",
        "| 4,096 | 1.6010, 1.6020, 1.6030 | 1.5910, 1.5920, 1.5930 | 1.5010, 1.5020, 1.5030 | 1.4910, 1.4920, 1.4930 |",
        "| `rope` | 3 | +0.0938 | +- 0.0000 | 0.000 | higher |", "| `rope` | 3 | -0.0938 | +- 0.0000 | 0.000 | lower |",
        "| `T 4,096, documents` | 3 | -0.0100 | +- 0.0000 | 0.000 | lower |"})
    EXPECT_NE(o.out.find(line), std::string::npos) << line << "\n" << o.out;
}

// Gosset's data of sleep, as every textbook has them.
TEST_F(ExperimentTest, IntervalsOfTheEvidenceAreStudentsAndPsAreHolms) {
  const Outcome o = run("PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=dev/bench/results/sla python3 -c 'import differences as "
                        "d\n"
                        "print(d.holm([0.01, 0.04, 0.03]), [round(d.t_quantile(n), 3) for n in (1, 4, 9)])\n"
                        "print([round(x, 5) for x in d.interval([1.2, 2.4, 1.3, 1.3, 0, 1, 1.8, 0.8, 4.6, 1.4])])'");
  EXPECT_EQ(o.out, "[0.03, 0.06, 0.06] [12.706, 2.776, 2.262]\n[1.58, 0.87989, 0.00283]\n") << o.err;
}

// What the Makefile finds on a machine, with a few lines of shell in place of its tools; and how dev/run_tests.sh
// runs and counts tests.
//
// COVERS ONLY dev/run_tests.sh scripts/bench.sh scripts/setup.sh scripts/gpu.sh llmc/cuda/gpu_code.h
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <array>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include "command_line.h"
#include "llmc/cuda/gpu_code.h"

// ----------------------------------------------------------------------------
// dev/run_tests.sh

class RunTests : public CommandLine {
 protected:
  // A program in build/, with these tests. Each passes and writes its name to the file "ran".
  void add_program(const std::string& name, const std::string& tests) {
    fs::create_directories(in("build"));
    fs::create_directories(in("dev"));
    fs::copy_file("dev/run_tests.sh", in("dev/run_tests.sh"), fs::copy_options::overwrite_existing);
    write_file(in("build/" + name), "#!/usr/bin/env bash\nfor test in " + tests + R"sh(; do
      case "$*" in
        *--gtest_filter=-Long\*) [[ $test != Long* ]] || continue ;;
        *--gtest_filter=-Long\*:\*.C) [[ $test != Long* && $test != *.C ]] || continue ;;
        *--gtest_filter=Long\*-*) [[ $test = Long* ]] || continue ;;
        *--gtest_filter=\*-\*/arm64_\*:\*/fp32_\*:\*.C) [[ $test != */fp32_* && $test != *.C ]] || continue ;;
        *--gtest_filter=\*-\*.C) [[ $test != *.C ]] || continue ;;
        *--gtest_filter=[A-Z]*) [[ :${*##*=}: = *:$test:* ]] || continue ;;
      esac
      if [ "$1" = --gtest_list_tests ]; then echo "${test%.*}."; echo "  ${test#*.}"; continue; fi
      echo "$test" >>ran
      printf '[ RUN      ] %s\n[       OK ] %s (1 ms)\n' "$test" "$test"
    done)sh");
    chmod(in("build/" + name).c_str(), 0755);
  }
  // The last line that the script prints.
  std::string run_tests(const std::string& arguments, const std::string& environment = "") const {
    const std::string out = run(environment + " '" + in("dev/run_tests.sh") + "' " + arguments).out;
    return out.substr(out.rfind('\n', out.size() - 2) + 1);
  }
  std::multiset<std::string> ran() const {
    std::istringstream lines(read_file(in("ran")));
    return {std::istream_iterator<std::string>(lines), {}};
  }
};

TEST_F(RunTests, RunsTheRestOnceWhatTheQuickTestsLeftOut) {
  add_program("mixed", "A.B LongC.D LongE/F.G/h");
  add_program("quick", "I.J");
  add_program("later", "K.L LongM.N");
  EXPECT_EQ(run_tests("quick build/mixed build/quick"), "2 passed, 0 failed\n");
  EXPECT_EQ(ran(), (std::multiset<std::string>{"A.B", "I.J"}));
  EXPECT_EQ(run_tests("rest build/mixed build/quick build/later"), "6 passed, 0 failed\n");
  EXPECT_EQ(ran(), (std::multiset<std::string>{"A.B", "I.J", "LongC.D", "LongE/F.G/h", "K.L", "LongM.N"}));
  EXPECT_EQ(run_tests("all build/mixed build/quick build/later"), "6 passed, 0 failed\n");
}

// One of two programs is cut into three shares, which together have all of its tests but the ones left out. What is
// skipped is skipped in both programs.
TEST_F(RunTests, RunsEachTestInOneOfThreeParts) {
  add_program("whole", "A.B A.C");
  add_program("sharded", "B.C C.D C.E F.G F.H/fp32_x F.I/bf16_x F.J F.K F.L");
  const std::string counts[] = {"4 passed, 0 failed\n", "3 passed, 0 failed\n", "3 passed, 0 failed\n"};
  std::multiset<std::string> expected = {"A.B", "A.B", "A.B"};
  for (const char* name : {"C.D", "C.E", "F.G", "F.I/bf16_x", "F.J", "F.K", "F.L"}) expected.insert(name);
  for (int part = 1; part <= 3; part++) {
    const std::string environment =
        "PART=" + std::to_string(part) + "/3 LEAVE_OUT='arm64 fp32' SHARDED='build/other build/sharded' SKIP='*.C'";
    EXPECT_EQ(run_tests("all build/whole build/sharded", environment), counts[part - 1]) << part;
  }
  EXPECT_EQ(ran(), expected);
}

TEST_F(RunTests, SkipsQuickTests) {
  add_program("mixed", "A.B A.C LongC.D");
  EXPECT_EQ(run_tests("quick build/mixed", "SKIP='*.C'"), "1 passed, 0 failed\n");
  EXPECT_EQ(ran(), (std::multiset<std::string>{"A.B"}));
}

TEST_F(RunTests, AProgramThatRunsNoTestHasFailed) {
  add_program("none", "");
  add_program("long", "LongA.B");
  EXPECT_EQ(run_tests("quick build/long"), "0 passed, 2 failed\n");
  EXPECT_EQ(run_tests("all build/none build/long"), "1 passed, 1 failed\n");
  EXPECT_EQ(run_tests("quick build/none build/missing"), "0 passed, 3 failed\n");
  EXPECT_EQ(run_tests("all build/missing", "PART=1/2 SHARDED=build/missing"), "0 passed, 2 failed\n");
}

// ----------------------------------------------------------------------------
// The Makefile

using MakefileTest = CommandLine;

// A machine whose g++ finds no headers but the ones in the folder "headers" (-nostdinc), and whose nvcc is a line of
// shell that knows the folder "cuda/lib". That folder has libraries without any function.
class MakefileOffline : public MakefileTest {
 protected:
  void SetUp() override {
    MakefileTest::SetUp();
    for (const char* name : {"cuda", "cuda/bin", "cuda/include", "cuda/lib", "headers"}) fs::create_directory(in(name));
    add_nvcc("12.4", "75 80 89 90");
    add_gpus("", "");
    add_library("cublasLt");
    break_library("nccl");
    for (const char* name : {"nlohmann/json.hpp", "CLI/CLI.hpp", "toml++/toml.h"}) {
      fs::create_directories(fs::path(in(std::string("headers/") + name)).parent_path());
      write_file(in(std::string("headers/") + name), "");
    }
  }
  void add_tool(const std::string& name, const std::string& text) const {
    write_file(in("cuda/bin/" + name), "#!/bin/sh\n" + text + "\n");
    chmod(in("cuda/bin/" + name).c_str(), 0755);
  }
  void add_nvcc(const std::string& release, const std::string& architectures) const {
    add_tool("nvcc", "case \"$*\" in --version) echo 'Cuda compilation tools, release " + release + ", V1' ;;" +
                         "--list-gpu-code) printf 'sm_%s\\n' " + architectures + " ;;" +
                         "*) echo '#$ LIBRARIES=  \"-L" + in("cuda/lib") + "\"' ;; esac");
  }
  // One a line; the driver says their names and their compute capabilities.
  void add_gpus(const std::string& names, const std::string& capabilities) const {
    if (names.empty()) return add_tool("nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9");
    add_tool("nvidia-smi", "case \"$*\" in *=name*) echo '" + names + "' ;; *=compute_cap*) echo '" + capabilities +
                               "' ;; *) exit 1 ;; esac");
  }
  void add_library(const std::string& name) const {
    ASSERT_EQ(run("g++ -shared -x c++ /dev/null -Wl,-soname,libnone.so -o '" + in("cuda/lib/lib" + name + ".so") + "'")
                  .exit_status,
              0);
  }
  // It is found before this machine's, if that has one.
  void break_library(const std::string& name) const { write_file(in("cuda/lib/lib" + name + ".so"), "none"); }
  std::string environment() const {
    return "env -u MAKEFLAGS -u MAKELEVEL -u LIBRARY_PATH -u DATA -u OUT -u MINUTES -u HOURS -u GPU_ARCH -u PRECISION "
           "PATH='" +
           in("cuda/bin") + "':\"$PATH\" ";
  }
  Outcome make(const std::string& arguments) const {
    return run(environment() + "make NVCC=nvcc CXX='g++ -nostdinc' " + arguments);
  }
  static bool has(const Outcome& o, const std::string& text) { return (o.out + o.err).find(text) != std::string::npos; }
};

TEST_F(MakefileOffline, LinksNcclOnlyWhereItsHeaderAndLibraryAre) {
  const auto links = [&] { return make("-n build/bf16/train_gpt2_sla"); };
  const auto has_nccl = [&](const Outcome& o) { return has(o, "-lnccl") || has(o, "-DSLA_NCCL"); };
  const Outcome without = links();
  EXPECT_TRUE(has(without, "-lcublasLt")) << without.out << without.err;
  EXPECT_FALSE(has_nccl(without)) << without.out;
  write_file(in("cuda/include/nccl.h"), "");
  EXPECT_FALSE(has_nccl(links())) << "the header alone";
  add_library("nccl");
  const Outcome with = links();
  EXPECT_TRUE(has(with, "-lnccl") && has(with, "-DSLA_NCCL")) << with.out << with.err;
}

// What the programs for a GPU need is there, and nothing else.
TEST_F(MakefileOffline, LeavesOutOnlyWhatNeedsMissingPackages) {
  const Outcome missing = make("what-is-here");
  EXPECT_NE(missing.exit_status, 0);
  EXPECT_TRUE(has(missing, "nlohmann-json3-dev: JSON")) << missing.err;
  const std::string includes = "INCLUDES='" + in("headers") + "' ";
  const Outcome o = make(includes + "what-is-here");
  EXPECT_EQ(o.exit_status, 0) << o.err;
  for (const char* sentence : {"builds:  report, experiment, data/convert, data/probe, train_gpt2_sla, "
                               "sample_gpt2_sla, evaluate_gpt2",
                               "leaves out: train_gpt2_sla_cpu, sample_gpt2_sla_cpu, evaluate_gpt2_sla_cpu (they need "
                               "oneDNN)",
                               "leaves out: data/tokenize (it needs libarchive and zlib)", "libdnnl-dev: oneDNN"})
    EXPECT_TRUE(has(o, sentence)) << sentence << "\n" << o.out << o.err;
  EXPECT_FALSE(has(o, "nlohmann")) << o.err;
  const Outcome built = make(includes + "-n programs");
  EXPECT_EQ(built.exit_status, 0) << built.err;
  EXPECT_TRUE(has(built, "-I" + in("headers")) && has(built, "data/probe.cpp")) << built.out;
  EXPECT_FALSE(has(built, "-larchive") || has(built, "-ldnnl")) << built.out;
  break_library("cublasLt");
  const Outcome unlinked = make(includes + "what-is-here");
  EXPECT_NE(unlinked.exit_status, 0) << "neither a GPU's programs nor a CPU's";
  EXPECT_TRUE(has(unlinked, "(the linker finds no libcublasLt.so; LIBRARY_PATH=folder)")) << unlinked.out;
}

TEST_F(MakefileOffline, TakesPartsThatExist) {
  EXPECT_EQ(make("-n list-tests PART=3/4").exit_status, 0);
  for (const char* part : {"0/4", "5/4", "3"})
    EXPECT_TRUE(has(make(std::string("-n list-tests PART=") + part), "it must be k/n, such as 2/3")) << part;
  EXPECT_EQ(make("-n help PART=sound/soc/codecs LEAVE_OUT=none").exit_status, 0) << "others' variables";
}

TEST_F(MakefileTest, AddsItsFlagsToTheUsers) {
  const std::string flags = "CPPFLAGS=-DOWN CXXFLAGS=-g3 ", command = "make -n -B report ";
  for (const std::string& line : {flags + command, command + flags}) {
    const std::string out = run(line).out;
    for (const char* part : {"-DOWN -I. ", "-g3 -std=c++17", " -fopenmp -O1 "})
      EXPECT_NE(out.find(part), std::string::npos) << line << ": " << part;
  }
}

// The model's programs are made of what lies outside of llmc/report and scripts/experiments: they are preprocessed in a
// copy without these, and make compiles and links none of them.
TEST_F(MakefileTest, TheTrunkNeedsNeitherPagesNorExperiments) {
  const std::string programs = "train_gpt2_sla sample_gpt2_sla evaluate_gpt2_sla", trunk = in("trunk");
  const Outcome o = run("mkdir '" + trunk + "' && cp -r llmc *.cu '" + trunk + "' && cd '" + trunk +
                        "' && rm -r llmc/report && for p in " + programs +
                        "; do g++ -std=c++17 -I. -DSLA_CPU -x c++ -MM $p.cu >/dev/null || exit; done");
  EXPECT_EQ(o.exit_status, 0) << o.err;
  const Outcome includes = run("grep -rE '#include.*(report|experiment)' llmc data *.cu | grep -v '^llmc/report/'");
  EXPECT_EQ(includes.out, "");
  const Outcome built = run("for p in " + programs + "; do make -n -B build/fp32/${p}_cpu || exit; done");
  EXPECT_EQ(built.exit_status, 0) << built.err;
  EXPECT_NE(built.out.find("llmc/train/run.cpp"), std::string::npos);
  for (const char* other : {"llmc/report", "libreport", "scripts/experiments"})
    EXPECT_EQ(built.out.find(other), std::string::npos) << other;
}

TEST_F(MakefileTest, LeavesOutPrecisionsAndArm) {
  const std::string command = run("make -n test-all LEAVE_OUT='bf16 fp16 arm64' | grep 'dev/run_tests.sh all'").out;
  for (const char* kept :
       {"build/fp32/test_ops_cpu", "build/bf16/test_tile_emu", "build/fp16/test_tile_emu", "build/test_loss_scaling"})
    EXPECT_NE(command.find(kept), std::string::npos) << command;
  for (const char* left_out :
       {"build/bf16/test_ops_cpu", "build/fp16/test_ops_emu", "build/test_amx", "build/test_arm64"})
    EXPECT_EQ(command.find(left_out), std::string::npos) << command;
  EXPECT_NE(run("make -n list-tests LEAVE_OUT='fp32 tests'")
                .err.find("it must be of fp32, bf16, fp16 and what follows test_"),
            std::string::npos);
}

// What tests run is built whatever else is left out.
TEST_F(MakefileTest, BuildsTheProgramsThatATestsSourceNames) {
  const std::set<std::string> with_programs = {"cli", "dist", "evaluate", "gpu_check", "loss_scaling"};
  std::map<std::string, std::string> built;  // for a test of these, or "" for all others
  const std::regex program("build/[a-z0-9]+/(train|sample|evaluate)_gpt2_sla_(cpu|emu)");
  int found = 0;
  for (const auto& file : fs::directory_iterator("dev/test")) {
    std::string test = file.path().stem().string();
    if (file.path().extension() != ".cpp" || test == "test_makefile") continue;
    test = with_programs.count(test.substr(5)) != 0 ? test.substr(5) : "";
    if (built.count(test) == 0) {
      std::string others;
      for (const std::string& other : with_programs) others += other == test ? "" : " " + other;
      built[test] = run("make -s list-tests LEAVE_OUT='fp32 bf16 fp16" + others + "' | tail -n 1 | tr '\n' ' '").out;
    }
    const std::string source = read_file(file.path().string());
    for (std::sregex_iterator at(source.begin(), source.end(), program), end; at != end; ++at, found++)
      EXPECT_NE(built[test].find(at->str() + " "), std::string::npos) << file.path() << ": " << at->str();
  }
  EXPECT_GT(found, 20);
}

TEST_F(MakefileOffline, RefusesFp16OnACpu) {
  for (const char* goal : {"PRECISION=FP16 -n train_gpt2_sla_cpu", "-n build/fp16/train_gpt2_sla_cpu"}) {
    const Outcome o = make(goal);
    EXPECT_NE(o.exit_status, 0);
    EXPECT_TRUE(has(o, "train_gpt2_sla_cpu: fp16 is for GPUs alone; PRECISION=BF16 and FP32 are for CPUs, too"))
        << o.err;
  }
  EXPECT_TRUE(has(make("PRECISION=FP16 what-is-here"), "leaves out: train_gpt2_sla_cpu, sample_gpt2_sla_cpu, "
                                                       "evaluate_gpt2_sla_cpu (they have no fp16)"));
  EXPECT_TRUE(has(make("PRECISION=HALF what-is-here"), "PRECISION=HALF: it must be BF16, FP16 or FP32"));
}

// Nothing can be installed; `make` says what it is to build, and the corpus is a text.
TEST_F(MakefileOffline, TrainsAndComparesOnAGpu) {
  std::string real_make = run("command -v make").out;
  real_make.pop_back();
  add_gpus("NVIDIA L4", "8.9");
  for (const char* name : {"headers/archive.h", "headers/zlib.h"}) write_file(in(name), "");
  add_tool("apt-get", "exit 100"), add_tool("sudo", "exit 1"), add_tool("make", "echo \"make: $*\"; exit 9");
  const Outcome train =
      run(environment() + "CXX='g++ -nostdinc' INCLUDES='" + in("headers") + "' TEXT=README.md scripts/train.sh");
  EXPECT_EQ(train.exit_status, 9) << train.err;
  EXPECT_TRUE(std::regex_search(train.err, std::regex("make: .* train_gpt2_sla data/tokenize report"))) << train.err;
  const Outcome paper = run(environment() + "INCLUDES='" + in("headers") + "' " + real_make +
                            " CXX='g++ -nostdinc' MAKE='" + in("cuda/bin/make") + "' paper");
  EXPECT_TRUE(std::regex_search(paper.out, std::regex("make: .* train_gpt2_sla report experiment ")))
      << paper.out << paper.err;
}

// As where another program's source has lost its key.
TEST_F(MakefileOffline, InstallsThoughASourceOfPackagesIsBroken) {
  add_tool("id", "echo 0");
  add_tool("apt-get", "[ \"$1\" = install ] || exit 100; echo \"$*\" >'" + in("installed") + "'");
  const Outcome o = run(environment() + "CXX='g++ -nostdinc' scripts/setup.sh corpora");
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_NE(read_file(in("installed")).find(" libarchive-dev"), std::string::npos);
  add_tool("apt-get", "exit 100");
  EXPECT_EQ(run(environment() + "CXX='g++ -nostdinc' scripts/setup.sh corpora").exit_status, 1);
}

TEST_F(MakefileTest, TakesDebugFromItsCommandLineAlone) {
  const auto flags = [&](const char* before, const char* after) {
    return run(format("%s make -nB data/probe %s | grep -c -- -DSLA_DEBUG", before, after)).out;
  };
  EXPECT_EQ(flags("DEBUG=0", ""), "0\n");
  EXPECT_NE(flags("", "DEBUG=1"), "0\n");
}

// A copy of the scripts, where nothing is built or waited for. The trainer's stand-in has memory for nine sequences,
// but for none of 774M; its first update is the slowest. With FAIL empty it has no memory for the CPU's first size.
TEST_F(MakefileOffline, BenchTellsTheMedianUpdateAndWhatFits) {
  EXPECT_TRUE(has(make("-n bench"), "scripts/bench.sh"));
  const std::string root = in("r [x]");
  for (const std::string& folder : {root, in("temporary")}) fs::create_directory(folder);
  fs::copy("scripts", root + "/scripts", fs::copy_options::recursive);
  write_file(root + "/scripts/setup.sh", "#!/bin/sh\n");
  add_tool("make", "echo \"$*\" >built"), add_tool("sleep", "");
  const auto bench = [&](const std::string& program) {
    write_file(root + "/" + program, R"sh(#!/usr/bin/env bash
      for ((i = 1; i <= $#; i++)); do
        next=$((i + 1))
        case ${!i} in -b) batch=${!next} ;; -o) out=${!next} ;; -i) [ -s "${!next}" ] || exit ;; esac
      done
      case $* in
        *d36*) echo 'error: the plan exceeds the free memory by 1 GB; take a smaller -b or -t' >&2; exit 1 ;;
        *--dry-run*) echo "{\"memory_needed\":${batch}000000000,\"largest_micro_batch\":9}" ;;
        *--channels*$FAIL) echo 'error: no memory'; exit 1 ;;
        *)
          mkdir -p "$out"
          echo '{"run":{"micro_batch":1}}' >"$out/log.jsonl"
          for ms in 50 100 300 200; do
            echo "{\"step\":1,\"loss\":5,\"ms\":$ms.5,\"data_ms\":0,\"tokens_per_second\":$ms.7,\"limit_ms\":100.25}"
          done >>"$out/log.jsonl"
          exec /bin/sleep 100 ;;
      esac)sh");
    chmod((root + "/" + program).c_str(), 0755);
    return run("cd '" + root + "' && " + environment() + "TMPDIR='" + in("temporary") + "' scripts/bench.sh");
  };
  const auto expect_rows = [&](const Outcome& o, const std::vector<std::string>& rows) {
    EXPECT_EQ(o.exit_status, 0) << o.err;
    for (const std::string& row : rows)
      EXPECT_TRUE(std::regex_search(o.out, std::regex("\n" + row + "\n"))) << row << "\n" << o.out;
    EXPECT_TRUE(fs::is_empty(in("temporary")));
  };
  setenv("FAIL", "never", 1);
  expect_rows(bench("train_gpt2_sla_cpu"), {"8 layers of 256, 6M +4 x 256 +201 +50 % +4.00 GB", "GPT-2 124M +4 x 64 "
                                                                                                "+201 "
                                                                                                "+50 % +4.00 GB"});
  setenv("FAIL", "", 1);
  const Outcome failed = bench("train_gpt2_sla_cpu");
  EXPECT_EQ(failed.exit_status, 1);
  EXPECT_EQ(failed.err, "error: 8 layers of 256, 6M: the trainer ended: error: no memory\n");
  EXPECT_TRUE(fs::is_empty(in("temporary")));
  unsetenv("FAIL");
  add_gpus("NVIDIA L4", "8.9");
  const Outcome on_gpu = bench("train_gpt2_sla");
  expect_rows(on_gpu, {"GPT-2 124M +8 x 1024 +201 +50 % +8.00 GB", "GPT-2 774M +does not fit"});
  EXPECT_EQ(on_gpu.out.find("NVIDIA L4 (8.9)\n"), 0u) << on_gpu.out;
  EXPECT_TRUE(std::regex_search(read_file(root + "/built"), std::regex(" train_gpt2_sla\n")));
}

using LongMakefileOffline = MakefileOffline;  // make reads the Makefile many times

// A GPU that nothing can be compiled for is named by all that would compile, and by what trains on the CPU in its
// place.
TEST_F(LongMakefileOffline, NamesAGpuThatItCannotCompileFor) {
  struct Case {
    const char *gpu, *capability, *cuda, *architectures, *precision, *reason;
  };
  int i = 0;
  for (const Case& c : {
           Case{"Tesla T4", "7.5", "12.4", "75 80", "", "Tesla T4 (7.5) has no bf16; PRECISION=FP16 is for it"},
           {"Tesla V100-SXM2", "7.0", "13.0", "75 80", "FP32",
            "Tesla V100-SXM2 (7.0) needs CUDA 12, nvcc here is 13.0"},
           {"Tesla V100-SXM2", "7.0", "12.4", "70 80", "FP16",
            "Tesla V100-SXM2 (7.0) has no tensor cores for attention in bf16 or fp16; PRECISION=FP32 is for it"},
           {"Tesla P4", "6.1", "12.4", "61 80", "FP32", "Tesla P4 (6.1) is too old; compute capability 8.0 is needed"},
           {"RTX 5090", "12.0", "12.4", "80 90", "", "RTX 5090 (12.0) needs CUDA 12.8, nvcc here is 12.4"},
           {"NVIDIA B300", "10.3", "12.8", "80 100", "", "NVIDIA B300 (10.3) needs CUDA 12.9, nvcc here is 12.8"},
           {"NVIDIA L4", "8.9", "12.2", "80 89", "", "nvcc is of CUDA 12.2; 12.3 or later is needed"},
       }) {
    add_gpus(c.gpu, c.capability);
    add_nvcc(c.cuda, c.architectures);
    const std::string precision = std::string("PRECISION=") + c.precision + " ";
    const Outcome here = make(precision + "what-is-here");
    EXPECT_TRUE(has(here, std::string("leaves out: train_gpt2_sla, sample_gpt2_sla, evaluate_gpt2_sla (") + c.reason))
        << here.out << here.err;
    const char* const program = std::array{"train_gpt2_sla", "build/fp32/test_ops", "gpu-checked"}[i++ % 3];
    const Outcome o = make(precision + "-n " + program);
    EXPECT_NE(o.exit_status, 0);
    EXPECT_TRUE(has(o, std::string(program) + ": " + c.reason)) << o.err;
    EXPECT_EQ(o.out, "") << "nothing is compiled";
    const std::string note =
        std::string("note: ") + c.gpu + " (" + c.capability + ") is not used, and training is on the CPU: " + c.reason;
    if (i % 3 == 1) {
      const Outcome paper = make(precision + "-n paper");
      EXPECT_TRUE(has(paper, note) && has(paper, "./experiment scripts/experiments/paper.toml --trainer "
                                                 "./train_gpt2_sla_cpu"))
          << paper.out << paper.err;
    }
    const Outcome train = run(environment() + precision + "DATA=none scripts/train.sh");  // ends at this error
    EXPECT_TRUE(has(train, "error: DATA=none")) << train.out << train.err;
    EXPECT_TRUE(has(train, note)) << train.out;
  }
}

TEST_F(LongMakefileOffline, CompilesForItsGpusAndForOtherCpus) {
  add_gpus("Tesla T4\nNVIDIA L4\nNVIDIA H100", "7.5\n8.9\n9.0");
  EXPECT_TRUE(has(make("what-is-here"), "note:    Tesla T4 (7.5) has no bf16; PRECISION=FP16 is for it: left out"));
  const Outcome o = make("-n build/bf16/train_gpt2_sla");
  for (const std::string& option :
       {std::string("-gencode arch=compute_89,code=sm_89"), std::string("-gencode arch=compute_90a,code=sm_90a"),
        std::string("-DSLA_SM_90A"), std::string("-ccbin g++ "), "-Xlinker -rpath=" + in("cuda/lib") + " "})
    EXPECT_TRUE(has(o, option)) << option << "\n" << o.out << o.err;
  EXPECT_FALSE(has(o, "compute_75") || has(o, "compute_80") || has(o, "-DSLA_PTX")) << o.out;
  EXPECT_FALSE(std::regex_search(o.out, std::regex("-march=native [^\n]* -c "))) << o.out;
  EXPECT_TRUE(has(make("PRECISION=FP32 -n build/fp32/train_gpt2_sla"), "-gencode arch=compute_75,code=sm_75"));
  EXPECT_TRUE(has(make("PRECISION=FP16 -n build/fp16/train_gpt2_sla"), "-gencode arch=compute_75,code=sm_75"));
  EXPECT_TRUE(has(make("GPU_ARCH='80 sm_90' -n build/bf16/train_gpt2_sla"), "compute_80,code=sm_80 -gencode "));
  EXPECT_TRUE(has(make("GPU_ARCH=hopper -n train_gpt2_sla"), "sm_hopper is no architecture; they are such as sm_90"));
  EXPECT_TRUE(has(make("CXX='ccache g++' -n build/bf16/train_gpt2_sla"), "-ccbin g++ "));
}

TEST_F(LongMakefileOffline, WithoutAGpuCompilesForThoseOfDataCentres) {
  const auto compiled = [&] { return make("-n build/bf16/train_gpt2_sla").out; };
  const std::string ampere_and_hopper = "-gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a ",
                    ptx = "-gencode arch=compute_80,code=compute_80 -DSLA_PTX";
  EXPECT_NE(compiled().find(ampere_and_hopper + ptx), std::string::npos) << compiled();
  add_nvcc("12.8", "75 80 89 90 100 120");
  EXPECT_NE(compiled().find(ampere_and_hopper +
                            "-gencode arch=compute_100,code=sm_100 -gencode arch=compute_120,code=sm_120 " + ptx),
            std::string::npos)
      << compiled();
}

TEST_F(MakefileOffline, CompilesOnceForTwoEqualGpus) {
  add_gpus("NVIDIA H100\nNVIDIA L4\nNVIDIA H100", "9.0\n8.9\n9.0");
  EXPECT_TRUE(has(run(environment() + "scripts/gpu.sh"), "\narchitectures := 89 90a\n"));
}

TEST_F(MakefileOffline, FindsNvccBesideThePathAndGpusWithoutADriver) {
  fs::create_directories(in("cuda-home/bin")), fs::create_directories(in("pci/0"));
  fs::rename(in("cuda/bin/nvcc"), in("cuda-home/bin/nvcc"));
  write_file(in("pci/0/vendor"), "0x10de\n"), write_file(in("pci/0/class"), "0x030200\n");
  if (run("PATH=/usr/bin:/bin command -v nvcc").exit_status == 0) GTEST_SKIP() << "nvcc lies beside the shell";
  const Outcome o = run("PATH='" + in("cuda/bin") + "':/usr/bin:/bin CUDA_HOME='" + in("cuda-home") +
                        "' PCI_DEVICES='" + in("pci") + "' scripts/gpu.sh");
  EXPECT_TRUE(has(o, "gpu_remark := no nvcc on PATH; " + in("cuda-home") +
                         "/bin has one: used; this machine has an "
                         "NVIDIA GPU, but nvidia-smi shows none: is its driver installed?\n"))
      << o.out << o.err;
}

TEST(GpuCode, IsOfTheGpusMajorVersionOrCompiledFromPtx) {
  const auto remark = [](int major, int minor, bool has_ptx) {
    return remark_on_gpu_code("GPU", major, minor, {800, 890, 900}, has_ptx);
  };
  for (const auto& [major, minor] : {std::pair(8, 0), {8, 6}, {8, 9}, {9, 0}})
    EXPECT_EQ(remark(major, minor, false), "");
  EXPECT_EQ(remark(12, 0, true), "this program has no machine code for GPU (12.0): at its first start the driver "
                                 "compiles it, for minutes; make GPU_ARCH=sm_120 makes one that has");
  EXPECT_EQ(remark_on_gpu_code("GPU", 8, 0, {890}, true).find("this program has no machine code for GPU (8.0)"), 0u);
  EXPECT_THROW(remark(12, 0, false), UserError);
  EXPECT_THROW(remark(7, 5, true), UserError);
}

// ----------------------------------------------------------------------------
// dev/test/kernels.txt

TEST(Kernels, HaveTestsThatTheirIndexNames) {
  const std::regex test("TEST(_[FP])?\\((LONG_ON_EMU\\()?(\\w+).*");
  std::string suites;  // of all programs, one a line
  for (const auto& file : fs::recursive_directory_iterator("dev/test")) {
    const std::string extension = file.path().extension();
    if (extension != ".h" && extension != ".cu" && extension != ".cpp") continue;
    std::istringstream lines(read_file(file.path()));
    for (std::string line; std::getline(lines, line);)
      if (std::smatch m; line.compare(0, 4, "TEST") == 0 && std::regex_match(line, m, test))
        suites += m[3].str() + ".\n";
  }
  std::set<std::string> indexed, files;
  std::istringstream lines(read_file("dev/test/kernels.txt"));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string file, program, filter;
    words >> file >> program >> filter;
    if (file == "#") continue;
    EXPECT_TRUE(indexed.insert(file).second) << file;
    EXPECT_TRUE(fs::exists("dev/test/" + program + ".cu") || fs::exists("dev/test/" + program + ".cpp") ||
                fs::exists(program + ".cu"))
        << line;
    std::istringstream patterns(filter);
    for (std::string pattern; std::getline(patterns, pattern, ':');) {
      const std::string suite = pattern.substr(
          pattern.find_first_not_of('*') == std::string::npos ? pattern.size() : pattern.find_first_not_of('*'));
      EXPECT_NE(suites.find(suite.substr(0, suite.find('*'))), std::string::npos) << line;
    }
  }
  for (const char* folder : {"llmc/cuda", "llmc/cpu"})
    for (const auto& file : fs::directory_iterator(folder)) files.insert(file.path().filename());
  EXPECT_EQ(indexed, files);
}

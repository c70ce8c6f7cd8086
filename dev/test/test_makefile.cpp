// What the Makefile finds on a machine, with a few lines of shell in place of its tools; and how dev/run_tests.sh
// runs and counts tests.
//
// COVERS ONLY dev/run_tests.sh scripts/setup.sh
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <iterator>
#include <regex>
#include <set>
#include <sstream>
#include "command_line.h"

// ----------------------------------------------------------------------------
// dev/run_tests.sh

class RunTests : public CommandLine {
 protected:
  // A program in build/, with these tests, each of which passes and writes its name to the file "ran".
  void add_program(const std::string& name, const std::string& tests) {
    fs::create_directories(in("build"));
    fs::create_directories(in("dev"));
    fs::copy_file("dev/run_tests.sh", in("dev/run_tests.sh"), fs::copy_options::overwrite_existing);
    write_file(in("build/" + name), "#!/usr/bin/env bash\nfor test in " + tests + R"sh(; do
      case "$*" in
        *--gtest_filter=-Long\*) [[ $test != Long* ]] || continue ;;
        *--gtest_filter=Long\*-*) [[ $test = Long* ]] || continue ;;
        *--gtest_filter=\*-\*/fp32_\*) [[ $test != */fp32_* ]] || continue ;;
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

// Of two programs one is cut into three parts, whose tests are all of its tests but those of a precision.
TEST_F(RunTests, RunsEachTestInOneOfThreeParts) {
  add_program("whole", "A.B");
  add_program("sharded", "C.D C.E F.G F.H/fp32_x F.I/bf16_x F.J F.K F.L");
  const std::string counts[] = {"4 passed, 0 failed\n", "3 passed, 0 failed\n", "3 passed, 0 failed\n"};
  std::multiset<std::string> expected = {"A.B", "A.B", "A.B"};
  for (const char* name : {"C.D", "C.E", "F.G", "F.I/bf16_x", "F.J", "F.K", "F.L"}) expected.insert(name);
  for (int part = 1; part <= 3; part++) {
    const std::string environment =
        "PART=" + std::to_string(part) + "/3 LEAVE_OUT=fp32 SHARDED='build/other build/sharded'";
    EXPECT_EQ(run_tests("all build/whole build/sharded", environment), counts[part - 1]) << part;
  }
  EXPECT_EQ(ran(), expected);
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

// A machine of which g++ finds no headers but those in the folder "headers" (-nostdinc), and nvcc is a line of shell
// that knows the folder "cuda/lib". In that lie libraries without any function.
class MakefileOffline : public MakefileTest {
 protected:
  void SetUp() override {
    MakefileTest::SetUp();
    for (const char* name : {"cuda", "cuda/bin", "cuda/include", "cuda/lib", "headers"}) fs::create_directory(in(name));
    write_file(in("cuda/bin/nvcc"), "#!/bin/sh\necho '#$ LIBRARIES=  \"-L" + in("cuda/lib") + "\"'\n");
    chmod(in("cuda/bin/nvcc").c_str(), 0755);
    add_library("cublasLt");
    break_library("nccl");
    for (const char* name : {"nlohmann/json.hpp", "CLI/CLI.hpp", "toml++/toml.h"}) {
      fs::create_directories(fs::path(in(std::string("headers/") + name)).parent_path());
      write_file(in(std::string("headers/") + name), "");
    }
  }
  void add_library(const std::string& name) const {
    ASSERT_EQ(run("g++ -shared -x c++ /dev/null -o '" + in("cuda/lib/lib" + name + ".so") + "'").exit_status, 0);
  }
  // It is found before this machine's, if that has one.
  void break_library(const std::string& name) const { write_file(in("cuda/lib/lib" + name + ".so"), "none"); }
  std::string environment() const {
    return "env -u MAKEFLAGS -u MAKELEVEL -u LIBRARY_PATH -u DATA -u OUT -u STEPS PATH='" + in("cuda/bin") +
           "':\"$PATH\" ";
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
  for (const char* sentence :
       {"builds:  report, data/tokenize, data/convert, data/probe, train_gpt2_sla, sample_gpt2_sla, evaluate_gpt2",
        "leaves out: train_gpt2_sla_cpu, sample_gpt2_sla_cpu, evaluate_gpt2_sla_cpu (they need oneDNN)",
        "leaves out: compressed corpora and tar files in data/tokenize (they need libarchive)", "libdnnl-dev: oneDNN"})
    EXPECT_TRUE(has(o, sentence)) << sentence << "\n" << o.out << o.err;
  EXPECT_FALSE(has(o, "nlohmann")) << o.err;
  const Outcome built = make(includes + "-n programs");
  EXPECT_EQ(built.exit_status, 0) << built.err;
  EXPECT_TRUE(has(built, "-I" + in("headers")) && has(built, "data/plain_stream.cpp")) << built.out;
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
}

// Nothing can be installed; `make` says what it is to build, and the corpus is a text.
TEST_F(MakefileOffline, TrainsAndComparesOnAGpu) {
  std::string real_make = run("command -v make").out;
  real_make.pop_back();
  for (const auto& [name, text] : {std::pair("nvidia-smi", "echo 'GPU 0: a'"), std::pair("apt-get", "exit 100"),
                                   std::pair("sudo", "exit 1"), std::pair("make", "echo \"make: $*\"; exit 9")}) {
    write_file(in("cuda/bin/") + name, std::string("#!/bin/sh\n") + text + "\n");
    chmod((in("cuda/bin/") + name).c_str(), 0755);
  }
  const Outcome train =
      run(environment() + "CXX='g++ -nostdinc' INCLUDES='" + in("headers") + "' TEXT=README.md scripts/train.sh");
  EXPECT_EQ(train.exit_status, 9) << train.err;
  EXPECT_TRUE(has(train, "only what needs these packages is left out")) << train.err;
  EXPECT_TRUE(std::regex_search(train.out, std::regex("make: .* train_gpt2_sla data/tokenize"))) << train.out;
  const Outcome paper = run(environment() + "INCLUDES='" + in("headers") + "' " + real_make +
                            " CXX='g++ -nostdinc' MAKE='" + in("cuda/bin/make") + "' paper");
  EXPECT_TRUE(std::regex_search(paper.out, std::regex("make: .* train_gpt2_sla evaluate_gpt2_sla report")))
      << paper.out << paper.err;
}

// `make gpu-check`, with the emulated GPU and a few lines of shell in place of CUDA's tools. Runs from the repository's
// root, where the trainers are.
//
// COVERS ONLY dev/gpu_
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <cstdlib>
#include <regex>
#include <set>
#include "command_line.h"
#include "llmc/base/error.h"

// dev/gpu_check.sh on a machine with a GPU, whose tools are a few lines of shell. What the Makefile's rules
// for a GPU let nvcc build is a script that runs the emulated GPU's program of the same name.
class LongGpuCheck : public CommandLine {
 protected:
  const std::string bin = in("bin"), report = in("results/emulated-gpu-9000.md");
  std::string python;  // this machine's, if it has one

  void SetUp() override {
    CommandLine::SetUp();
    python = run("command -v python3").out;
    python = python.substr(0, python.find('\n'));
    for (const char* name : {"bin", "build"}) fs::create_directory(in(name));
    // All programs share the objects of host code.
    fs::create_directory_symlink(fs::absolute("build/obj"), in("build/obj"));
    setenv("PATH", (bin + ":" + getenv("PATH")).c_str(), 1);
    setenv("BUILD", in("build").c_str(), 1);
    setenv("RESULTS", in("results").c_str(), 1);
    setenv("OMP_NUM_THREADS", "1", 1);  // the matmuls are tiny
    for (const char* option : {"STEPS", "LIMIT", "NCCL_LIB", "CUDA_VISIBLE_DEVICES"}) unsetenv(option);
    write_nvidia_smi();
    // Runs the program as its arguments say, and reports no error. racecheck is limited to the project's kernels.
    write_tool("compute-sanitizer", R"sh(
      summary="ERROR SUMMARY: 0 errors"
      case "$1 $2 $3 $4 $5 $6" in
        "--tool memcheck --error-exitcode 1 "*) shift 4 ;;
        "--tool racecheck --error-exitcode 1 --kernel-name kernel_substring=_kernel")
          shift 6
          summary="RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" ;;
        *) exit 3 ;;
      esac
      [[ "$*" = *--gtest_filter=* ]] || exit 3
      "$@" && echo "========= $summary")sh");
    write_tool("python3", "exit 1");  // no PyTorch
  }

  void write_nvidia_smi(int gpus = 1) const {
    write_tool("nvidia-smi", format("gpus=%d", gpus) + R"sh(
      case "$*" in
        *=name*) for ((i = 0; i < gpus; i++)); do echo 'Emulated GPU 9000'; done ;;
        *=driver_version*) echo 999.9 ;;
        *=compute_cap*) echo 9.0 ;;
        *) exit 1 ;;
      esac)sh");
  }
  void write_tool(const std::string& name, const std::string& text) const {
    write_file(bin + "/" + name, "#!/usr/bin/env bash\n" + text + "\n");
    chmod((bin + "/" + name).c_str(), 0755);
  }
  // In a trainer's stand-in: a tiny model in place of the one that the part nccl trains.
  const std::string tiny = R"sh(
    if [[ "$*" = *' -d 512 '* ]]; then
      shift 2
      set -- --layers 2 --heads 2 --channels 16 --vocab-size 257 --max-seq-len 8 "${@/#512/64}" -t 8
    fi
)sh";
  // NCCL before 2.30.
  const std::string takes_one_rank_on_a_gpu = R"sh(
    [ -z "${NCCL_MULTI_RANK_GPU_ENABLE-}" ] || { echo "error: NCCL takes one rank on a GPU, and ..." >&2; exit 1; }
)sh";
  // A program as packed for another machine, where nothing is built.
  void write_packed(const std::string& path, const std::string& program) const {
    fs::create_directories(fs::path(in("build/" + path)).parent_path());
    write_file(in("build/prebuilt"), "abc, CUDA 99.9, sm_90\n");
    write_file(in("build/" + path), "#!/usr/bin/env bash\n" + program + "\n");
    chmod(in("build/" + path).c_str(), 0755);
  }
  void write_packed_trainer(const std::string& program) const {
    setenv("STEPS", "nccl", 1);
    write_packed("nccl/bf16/train_gpt2_sla", program);
  }
  // Expects the rows of the part nccl, all green, after a run that has just ended.
  void expect_nccl_is_green(const std::string& text) const {
    for (const char* step :
         {"one rank", "2 ranks, --zero 0", "2 ranks, --zero 1", "2 ranks, --zero 0, again: the same bits",
          "2 ranks, --zero 1, again: the same bits", "2 ranks' checkpoint, resumed by one",
          "one rank's checkpoint, resumed by 2", "a rank that is killed", "a rank that is stopped", "4 ranks, --zero 0",
          "4 ranks, --zero 1"})
      EXPECT_NE(text.find(format("| %s | green |", step)), std::string::npos) << step << "\n" << text;
    for (const char* note : {"s \\| losses differ by [0-9]e[+-]0[0-9], norms by [0-9]e-0[4-9] \\|",
                             "s \\| ended after [0-9.]+ s: error: launch.sh: rank 1 of 2 was ended by SIGKILL \\|",
                             "s \\| ended after [2-9][0-9].[0-9] s: error: rank 0 of 2 .* does not answer since its "
                             "step "})
      EXPECT_TRUE(std::regex_search(text, std::regex(note))) << note << "\n" << text;
  }
  // nvcc, which is to compile x.cu with `-o build/bf16/x`: it writes a script that does `program`, where $p is bf16 and
  // $x the program's name. Emulated programs have no code for SLA_ATTENTION=wgmma, and compute by mma.
  void write_nvcc(const std::string& program) const {
    write_file(in("program"), program + "\n");
    write_tool("nvcc", R"sh(
      [ "$*" != --version ] || { echo 'Cuda compilation tools, release 99.9, V99.9.1'; exit; }
      [ "$*" != --list-gpu-code ] || exit
      while [ "$1" != -o ]; do [[ "$1" != *.cu ]] || source=$1; shift; done
      p=$(basename "$(dirname "$2")") x=$(basename "$2")
      [ -e "$source" ] && [ "$(basename "$source" .cu)" = $x ] || exit 3
      printf '%s\n' '#!/usr/bin/env bash' "p=$p x=$x" 'unset SLA_ATTENTION' ". )sh" +
                           in("program") + R"sh(" >"$2"
      chmod +x "$2")sh");
  }
  Outcome check() const { return run("dev/gpu_check.sh"); }
};

// The pages that `make gpu-model` writes.
using LongGpuPages = CommandLine;

TEST_F(LongGpuPages, AreWhatTheProgramPrints) {
  for (const auto& [options, page] : {std::pair("", "gpu-model"), {" --gpus", "gpus"}}) {
    const Outcome o = run(std::string("build/bf16/gpu_model") + options);
    EXPECT_EQ(o.exit_status, 0) << o.err;
    EXPECT_EQ(o.out, read_file(format("dev/bench/%s.md", page))) << "make gpu-model writes it";
  }
}

// For each program that GoogleTest runs, the first test that the script asks for; where it asks for all, a quick one of
// the model's. The trainer has a tiny model in place of 124M, and libraries take all but 1 MB of the GPU memory that
// the plan keeps free. Where a test program is not built, as when CI builds a share of the tests, the program of
// the other precision runs.
TEST_F(LongGpuCheck, RunsEachStepOnTheEmulatedGpu) {
  write_nvcc(takes_one_rank_on_a_gpu + R"sh(export GTEST_TOTAL_SHARDS=1000 GTEST_SHARD_INDEX=0
    case "$x $*" in
      "train_gpt2_sla -e d12"*)
        export SLA_EMU_MEMORY=1052,998,1
        set -- "${@/#1024/8}" --layers 2 --heads 2 --channels 16 --vocab-size 64 --max-seq-len 8 ;;
      bench_gpu*) set -- --tiny "$@" ;;
      test_gpt2_sla*) export GTEST_FILTER="Memory.EachLevel*" ;;
    esac
    for q in $p bf16 fp32; do [ ! -x build/$q/${x}_emu ] || exec build/$q/${x}_emu "$@"; done)sh");
  const Outcome o = check();
  EXPECT_EQ(o.exit_status, 0) << o.out << o.err;
  const std::string text = read_file(report);
  std::vector<std::string> steps = {"build for Emulated GPU 9000", "test_tile, bf16", "train_gpt2_sla, a golden case",
                                    "train_gpt2_sla, the largest micro-batch", "the subset's tests exist"};
  for (const char* p : {"bf16", "fp32"})
    for (const char* t :
         {"test_ops, %s", "test_attention, %s", "test_gpt2_sla, %s, 1 of 3", "test_gpt2_sla, %s, 3 of 3"})
      steps.push_back(format(t, p));
  for (const char* what : {"model, bf16", "model, fp32"})
    steps.push_back(format("compute-sanitizer memcheck, %s", what));
  for (const char* tool : {"memcheck", "racecheck"})
    for (const char* what : {"test_ops, bf16", "test_tile, bf16", "test_attention, bf16"})
      steps.push_back(format("compute-sanitizer %s, %s", tool, what));
  for (const char* by : {"wgmma", "candidates", "candidates-ds"})
    steps.push_back(format("test_attention, bf16, %s", by));
  steps.push_back("test_gpt2_sla, bf16, wgmma, 2 of 3");
  for (const char* tool : {"memcheck", "racecheck"})
    steps.push_back(format("compute-sanitizer %s, test_attention, bf16, wgmma", tool));
  steps.push_back("benchmark");
  for (const std::string& step : steps)
    EXPECT_NE(text.find("| " + step + " | green |"), std::string::npos) << step << "\n" << text;
  EXPECT_NE(text.find("s | ERROR SUMMARY: 0 errors |"), std::string::npos) << text;
  EXPECT_NE(text.find("s | RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings) |"), std::string::npos);
  for (const char* part : {"# Emulated GPU 9000\n", "CUDA 99.9,\ndriver 999.9, ", "| PyTorch | not timed |",
                           "| attention_backward |", "\n| operation | calls a step | measured, ms | modelled, ms |",
                           "\n| matmul_backward, fc | 4 | ", "\n| step, 1 x 128, sla(3,3) | 1 | ", "\nAll green.\n"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  EXPECT_EQ(text.find("RED"), std::string::npos) << text;
  const json figures = json::parse(read_file(in("results/emulated-gpu-9000.json")));
  for (const char* part : {"operations", "attention", "training", "modelled"})
    EXPECT_FALSE(figures.at(part).empty()) << part;
}

// The emulated GPU has no kernels by wgmma, and no ncu: one that runs the trainer and writes a table as ncu does.
TEST_F(LongGpuCheck, SaysWhatIsFastestWhenItIsToTune) {
  setenv("STEPS", "tune", 1);
  const std::string here = fs::current_path().string() + "/build/bf16/";
  write_packed("bf16/bench_gpu", "exec '" + here + "bench_gpu_emu' --tiny \"$@\"");
  write_packed("bf16/train_gpt2_sla", "shift 6\nexec '" + here +
                                          "train_gpt2_sla_cpu' --layers 1 --heads 1 --channels 8 "
                                          "--vocab-size 256 --max-seq-len 8 -b 1 \"$@\"");
  write_tool("python3", "[ \"$1\" != -c ] || exit 1\nexec '" + python + "' \"$@\"");  // without PyTorch
  write_tool("ncu", R"sh(
    options="--clock-control none --cache-control none --csv --metrics gpu__time_duration.sum --log-file"
    [ "$1 $2 $3 $4 $5 $6 $7 $8" = "$options" ] || exit 3
    log=$9
    shift 9
    "$@" || exit
    metric='"gpu__time_duration.sum"' forward='"void attention_forward_kernel<64, 0, 1>(AttentionArgs<a, b>, float)"'
    echo '==PROF== Connected to process 1
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"' >"$log"
    for row in "\"matmul\",$metric,\"ms\",\"9\"" "\"embedding_forward_kernel(float *)\",$metric,\"us\",\"0.5\"" \
      "$forward,$metric,\"us\",\"1,250.0\"" "$forward,$metric,\"ns\",\"500\"" \
      "\"adamw_kernel(float *)\",$metric,\"ms\",\"3.749\""; do
      echo "\"0\",$row" >>"$log"
    done)sh");
  const Outcome o = check();
  EXPECT_EQ(o.exit_status, 0) << o.out << o.err;
  const std::string text = read_file(report);
  for (const char* part :
       {"| tuning | green |", "| an update's kernels | green |", "| PyTorch | not timed |", "\n| matmul: m, n, k |",
        "\n| 8 | 64 | mma | ", "\n| 16 | 128 | mma | ",
        "\n| adamw_kernel | 1 | 3.749 | 75.0 % |\n| attention_forward_kernel | 2 | 1.250 | 25.0 % |\n",
        "\n4 launches, the first update's, 5.00 ms; an update takes ", "; nvidia-smi shows no clock.\n",
        "\nGreen so far; not done: build tests nccl sanitize bench torch.\n"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  EXPECT_EQ(text.find("ms/step"), std::string::npos) << "whole steps are the benchmark's";
}

// What is not under test does nothing here, with success.
TEST_F(LongGpuCheck, SaysRedWhenAStepFails) {
  struct Case {
    const char *step, *failure;
  };
  for (const Case& c : {Case{"test_ops, fp32", "[ $p/$x = fp32/test_ops ] && exit 1"},
                        {"test_tile, bf16", "[ $x = test_tile ] && echo \"[  PASSED  ] 0 tests.\" && exit"},
                        {"compute-sanitizer racecheck, test_tile, bf16", "[ $p/$x = bf16/test_tile ] && [ \"$TOOL\" = "
                                                                         "racecheck ] && exit 1"},
                        {"the subset's tests exist", "[ \"$1\" = --gtest_list_tests ] && exit"},
                        {"train_gpt2_sla, a golden case", "[ $x = train_gpt2_sla ] && [ $4 = "
                                                          "dev/test/golden/paper_default/tokens.bin ] && exit 1"},
                        {"train_gpt2_sla, the largest micro-batch", "[ $x = train_gpt2_sla ] && [ \"${11}\" = -x ] && "
                                                                    "exit 1"},
                        {"train_gpt2_sla, the largest micro-batch", "[[ $x$* = train_gpt2_sla*--dry-run ]] && exit 1"},
                        {"benchmark", "[ $x = bench_gpu ] && exit 1"}}) {
    write_tool("compute-sanitizer", R"sh(export TOOL=$2
      while [ "${1#--}" != "$1" ]; do shift 2; done
      "$@" && echo "========= ERROR SUMMARY: 0 errors")sh");
    write_nvcc(takes_one_rank_on_a_gpu + c.failure + "\necho '  Test'");
    const Outcome o = check();
    EXPECT_EQ(o.exit_status, 1) << c.step;
    const std::string text = read_file(report);
    EXPECT_NE(text.find(format("| %s | RED |", c.step)), std::string::npos) << text;
    EXPECT_NE(text.find("| test_attention, bf16 | green |"), std::string::npos) << text;
    EXPECT_NE(text.find("\nNot all green.\n"), std::string::npos) << text;
    EXPECT_EQ(text.find("All green."), std::string::npos) << text;
  }
}

TEST_F(LongGpuCheck, IsRedWithoutTheSanitizer) {
  fs::remove(bin + "/compute-sanitizer");
  if (run("command -v compute-sanitizer").exit_status == 0) GTEST_SKIP() << "this machine has one";
  write_nvcc(takes_one_rank_on_a_gpu);
  const Outcome o = check();
  EXPECT_EQ(o.exit_status, 1) << o.out << o.err;
  EXPECT_NE(read_file(report).find("| compute-sanitizer | RED |"), std::string::npos) << o.out;
}

TEST_F(LongGpuCheck, EndsWhereItCannotBegin) {
  const auto expect_error = [&](const char* error) {
    const Outcome o = check();
    EXPECT_EQ(o.exit_status, 1) << error;
    EXPECT_NE(o.err.find(std::string("error: gpu-check: ") + error), std::string::npos) << o.err;
  };
  setenv("STEPS", "tests,torc", 1);
  expect_error("STEPS=tests,torc: torc is none of build tests");
  unsetenv("STEPS");
  write_tool("nvidia-smi", "echo Failed to initialize NVML; exit 9");
  expect_error("nvidia-smi shows no GPU");
  EXPECT_FALSE(fs::exists(report));
  write_nvidia_smi();
  write_tool("nvcc", "echo 'Cuda compilation tools, release 12.2, V12.2.1'");
  expect_error("nvcc is of CUDA 12.2; 12.3 or later is needed");
  EXPECT_FALSE(fs::exists(report));
  write_tool("nvcc", "[ \"$*\" != --version ] || { echo 'release 12.4,'; exit; }\n"
                     "echo 'error: no such architecture' >&2; exit 1");
  expect_error("the build failed");
  EXPECT_NE(read_file(report).find("| build for Emulated GPU 9000 | RED |"), std::string::npos);
}

// The kill comes while test_attention runs in bf16, which says so and then does not end.
TEST_F(LongGpuCheck, LeavesItsRowsWhenItIsKilled) {
  write_nvcc("[ $p/$x = bf16/test_attention ] && { touch '" + in("hangs") +
             "'; echo 'so far'; sleep 5; }; echo '  Test'");
  const Outcome o = run("dev/gpu_check.sh & check=$!; until [ -e '" + in("hangs") +
                        "' ]; do sleep 0.1; done; sleep 1; kill -9 $check; wait $check; "
                        "cat '" +
                        report + "'");
  EXPECT_NE(o.out.find("| test_ops, bf16 | green |"), std::string::npos) << o.out << o.err;
  EXPECT_EQ(o.out.find("| test_attention, bf16 |"), std::string::npos) << o.out;
  const std::string text = read_file(report);
  EXPECT_NE(text.find("| test_ops, bf16 | green |"), std::string::npos) << text;
  EXPECT_NE(text.find("Green so far; not done: tests nccl sanitize bench torch."), std::string::npos) << text;
  EXPECT_EQ(read_file(in("build/gpu_check/test_attention__bf16.log")), "so far\n");
}

TEST_F(LongGpuCheck, StopsAStepAtItsTimeLimit) {
  setenv("LIMIT", "2", 1);
  setenv("STEPS", "tests", 1);
  fs::create_directories(in("build/bf16"));
  write_file(in("build/prebuilt"), "abc, CUDA 99.9, sm_90\n");
  write_file(in("build/bf16/test_tile"), "#!/bin/sh\necho begins\nsleep 100\n");
  chmod(in("build/bf16/test_tile").c_str(), 0755);
  const Outcome o = check();
  EXPECT_EQ(o.exit_status, 1) << o.out << o.err;
  for (const char* part : {"| test_tile, bf16 | RED | ", "| stopped after 2 s |\n"})
    EXPECT_NE(read_file(report).find(part), std::string::npos) << o.out;
  EXPECT_EQ(read_file(in("build/gpu_check/test_tile__bf16.log")), "begins\n");
}

// All ranks on the emulated machine's first GPU.
TEST_F(LongGpuCheck, TrainsByNcclOnOneGpu) {
  setenv("CUDA_VISIBLE_DEVICES", "0", 1);
  write_packed_trainer(tiny + "exec build/bf16/train_gpt2_sla_emu \"$@\"");
  const Outcome o = check();
  EXPECT_EQ(o.exit_status, 0) << o.out << o.err;
  expect_nccl_is_green(read_file(report));
}

// A stand-in writes what a trainer would. Two ranks have other norms with --zero 0, other losses with --zero 1, and the
// second time another optimizer state; they begin anew where they are to resume. Two runs are to lose a rank: one
// ends with another status, the other without a message. There are two GPUs.
TEST_F(LongGpuCheck, SaysRedWhenTwoRanksDoNotWhatOneDoes) {
  write_nvidia_smi(/*gpus=*/2);
  write_packed_trainer(takes_one_rank_on_a_gpu + R"sh(
    [ "${RANK-0}" = 0 ] && [[ "$*" != *--dry-run* ]] || exit 0
    out="$* " first=1 loss=5 norm=1 state=same
    out=${out#* -o } out=${out%% *}
    case "$*" in
      *2_zero_0*) norm=1.01 ;;
      *2_zero_1*) loss=5.001 ;;
      *again_0*) state=other ;;
      *resumed_by_1*\ -y*) first=11 ;;
      *KILL*) echo "error: launch.sh: rank 1 of 2 was ended by SIGKILL" >&2 ;;
      *STOP*) trap "exit 1" EXIT ;;
    esac
    mkdir -p "$out"/step_000000{10,20}
    for ((step = first; step <= 20; step++)); do
      echo "{\"step\":$step,\"loss\":$loss,\"grad_norm\":$norm,\"lr\":1}"
    done >"$out/log.jsonl"
    echo same >"$out/step_00000020/model.safetensors"
    echo $state >"$out/step_00000020/optimizer.safetensors")sh");
  const Outcome o = check();
  EXPECT_EQ(o.exit_status, 1);
  const std::string text = read_file(report);
  for (const char* row :
       {"| one rank | green |", "| 2 ranks, --zero 0 | RED |", "| 2 ranks, --zero 1 | RED |",
        "| 2 ranks, --zero 0, again: the same bits | RED |", "| 2 ranks, --zero 1, again: the same bits | green |",
        "| 2 ranks' checkpoint, resumed by one | green |", "| one rank's checkpoint, resumed by 2 | RED |",
        "| a rank that is killed | RED |", "| a rank that is stopped | RED |",
        "| NCCL, 4 ranks | not tested | | NCCL takes one rank on a GPU |"})
    EXPECT_NE(text.find(row), std::string::npos) << row << "\n" << text;
}

TEST_F(LongGpuCheck, SaysWhyNcclIsNotTested) {
  setenv("NCCL_LIB", in("nccl").c_str(), 1);
  write_packed_trainer("[[ $LD_LIBRARY_PATH: = $NCCL_LIB:* ]] && echo 'error: it was built without NCCL' >&2; exit 1");
  const Outcome o = check();
  EXPECT_EQ(o.exit_status, 0) << o.out << o.err;
  EXPECT_NE(read_file(report).find("| NCCL, 2 ranks | not tested | | built without NCCL |"), std::string::npos);
}

// A second run of other steps adds to the report, and builds nothing.
TEST_F(LongGpuCheck, DoesTheStepsThatItIsAskedFor) {
  write_nvcc(takes_one_rank_on_a_gpu + "echo '  Test'; [ $x = bench_gpu ] && echo {} >\"$2\"; exit 0");
  write_tool("compute-sanitizer", "echo '========= ERROR SUMMARY: 0 errors'");
  setenv("STEPS", "build,tests", 1);
  EXPECT_EQ(check().exit_status, 0);
  const std::string first = read_file(report);
  EXPECT_NE(first.find("| test_tile, bf16 | green |"), std::string::npos) << first;
  EXPECT_EQ(first.find("compute-sanitizer"), std::string::npos) << first;
  EXPECT_NE(first.find("Green so far; not done: nccl sanitize bench torch."), std::string::npos) << first;
  const auto built = fs::last_write_time(in("build/bf16/test_tile"));
  setenv("STEPS", "build,nccl,sanitize,bench,torch", 1);
  EXPECT_EQ(check().exit_status, 0);
  const std::string both = read_file(report);
  for (const char* part : {"| NCCL, 2 ranks | not tested | | NCCL takes one rank on a GPU |",
                           "| test_tile, bf16 | green |", "| benchmark | green |", "\nAll green.\n"})
    EXPECT_NE(both.find(part), std::string::npos) << part << both;
  EXPECT_EQ(fs::last_write_time(in("build/bf16/test_tile")), built);
}

// What dev/gpu_bundle.sh has packed, unpacked where there is nothing but a shell's tools. The benchmark needs
// libcublasLt, which lies in PyTorch's wheel; all other programs are lines of shell.
TEST_F(LongGpuCheck, RunsFromABundleWhereNothingIsInstalled) {
  for (const char* name :
       {"programs", "programs/bf16", "programs/fp32", "wheel", "wheel/cu99", "wheel/cu99/lib", "away"})
    fs::create_directory(in(name));
  const std::string library = in("wheel/cu99/lib/libcublasLt.so.99");
  ASSERT_EQ(run("echo 'int answer() { return 42; }' | g++ -shared -fPIC -x c++ - -Wl,-soname,libcublasLt.so.99 -o " +
                library + " && echo 'int answer(); int main() { return answer() - 42; }' | g++ -x c++ - -x none " +
                library + " -o " + in("programs/bf16/bench_gpu"))
                .exit_status,
            0);
  for (const char* name : {"bf16/test_tile", "bf16/train_gpt2_sla", "bf16/test_gpt2_sla", "bf16/test_ops",
                           "bf16/test_attention", "fp32/test_gpt2_sla", "fp32/test_ops", "fp32/test_attention"})
    write_file(in(std::string("programs/") + name), "#!/bin/sh\necho '  Test'\n"),
        chmod(in(std::string("programs/") + name).c_str(), 0755);
  write_tool("strip", "cp \"$3\" \"$2\"");
  write_tool("nvcc", "echo 'Cuda compilation tools, release 99.9, V99.9.1'");
  const Outcome packed = run("dev/gpu_bundle.sh '" + in("programs") + "' 90");
  ASSERT_EQ(packed.exit_status, 0) << packed.err;
  EXPECT_EQ(packed.out.find(in("programs/gpt2-sla-sm_90.sh") + ": "), 0u) << packed.out;
  for (const char* name : {"strip", "nvcc"}) fs::remove(bin + "/" + name);

  const std::string away =
      "cd '" + in("away") + "' && env -i PATH='" + bin + "':/usr/bin:/bin STEPS=build,tests,bench ";
  const Outcome without = run(away + "sh '" + in("programs/gpt2-sla-sm_90.sh") + "'");
  EXPECT_EQ(without.exit_status, 1);
  EXPECT_NE(without.err.find("error: libcublasLt.so.99 is neither in a CUDA toolkit"), std::string::npos)
      << without.err;
  write_tool("python3", "[[ $2 = *nvidia* ]] && echo '" + in("wheel") + "'");
  const Outcome o = run(away + "gpt2-sla-sm_90/run.sh");
  EXPECT_EQ(o.exit_status, 0) << o.out << o.err;
  const std::string text = read_file(in("away/gpt2-sla-sm_90/dev/bench/results/emulated-gpu-9000.md"));
  for (const char* part : {", CUDA 99.9, sm_90,\n", "| build for Emulated GPU 9000 | green |",
                           "| test_tile, bf16 | green |", "| train_gpt2_sla, a golden case | green |",
                           "| benchmark | green |", "Green so far; not done: nccl sanitize torch."})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  for (const char* name : {"CLI/CLI.hpp", "nlohmann/json.hpp", "toml++/toml.h"})
    EXPECT_TRUE(fs::exists(in("away/gpt2-sla-sm_90/include/") + name)) << name;
}

// PyTorch has a GPU here and nothing else: torch_sla.py reads its command line, the wirings and the benchmark's
// figures, and no more.
TEST_F(LongGpuCheck, CallsThePeerInPyTorchWithOptionsThatItHas) {
  if (python.empty()) GTEST_SKIP() << "no python3";
  write_file(in("peer.py"), R"py(
import importlib.util, sys, unittest.mock
for name in "torch", "torch.nn", "torch.nn.functional", "torch.nn.attention":
    sys.modules[name] = unittest.mock.MagicMock()
sys.modules["torch"].nn.Module = object
sys.argv = sys.argv[1:]
spec = importlib.util.spec_from_file_location("torch_sla", sys.argv[0])
sys.modules["torch_sla"] = torch_sla = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torch_sla)
arguments = torch_sla.parse_arguments()
wirings = [torch_sla.Wiring(text, 12, 12).text for text in getattr(arguments, "wiring", [])]
if arguments.command != "check":
    torch_sla.read_ours(arguments.ours, {"attention": "attention", "train": "training"}[arguments.command])
print("peer:", arguments.command, *wirings)
)py");
  write_tool("python3", "[ \"$1\" = -c ] || exec " + python + " '" + in("peer.py") + "' \"$@\"");
  write_nvcc(
      takes_one_rank_on_a_gpu +
      R"sh(if [ $x = bench_gpu ]; then echo '{"attention": [], "training": []}' >"$2"; else echo "  Test"; fi)sh");
  const Outcome o = check();
  EXPECT_EQ(o.exit_status, 0) << o.out << o.err;
  const std::string text = read_file(report);
  for (const char* part :
       {"| PyTorch computes the same function | green |", "| PyTorch, attention | green |",
        "| PyTorch, training | green |", "\npeer: attention\n\npeer: attention\n\npeer: train plain sla(9,9)\n"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
}

// The tests of the model, of attention, of the operations and of tiles, and the golden cases through the command line,
// on the emulated GPU with nvcc's code in place of g++'s: SLA_EMU_PTX. Where nvcc is not found they are skipped.
// COVERS ONLY llmc/cuda/tile.h llmc/cuda/tile_wgmma.h llmc/cuda/attention_wgmma.h
#include <gtest/gtest.h>
#include <cstdlib>
#include <string>
#include <vector>
#include "command_line.h"
#include "llmc/base/error.h"

struct PtxRun {
  std::string name, ptx, program;
  std::string filter;            // of its tests
  std::string environment = {};  // of variables
};

// The model's tests that launch each kernel, in several ways. Attention's and the operations' tests all run.
static const std::string model_tests = "*Graph.HasTheLosses*:*Golden.*:*Updates.*:*Bits.*:*Steps.*:*Generation.*:*"
                                       "Initialisation.*";

static std::vector<PtxRun> ptx_runs() {
  std::vector<PtxRun> runs;
  for (const std::string precision : {"bf16", "fp32"})
    for (const std::string test : {"test_gpt2_sla", "test_attention", "test_ops"}) {
      const std::string program = "build/" + precision + "/" + test;
      runs.push_back(
          {precision + "_" + test, program + ".ptx", program + "_emu", test == "test_gpt2_sla" ? model_tests : "*"});
    }
  const std::string folder = "build/";
  // The plain kind's kernels by wgmma, which only nvcc's code for sm_90a has.
  for (const std::string by : {"wgmma", "candidates", "candidates-ds"})
    runs.push_back({"bf16_attention_by_" + (by == "candidates-ds" ? "candidates_ds" : by),
                    folder + "bf16/test_attention_90a.ptx", folder + "bf16/test_attention_emu",
                    "Attention.*:LongAttention.*", "SLA_EMU_CC=90 SLA_ATTENTION=" + by});
  // The model, with heads that those kernels take, and the other candidates.
  for (const std::string by : {"candidates", "candidates-ds"})
    runs.push_back({"bf16_model_by_" + (by == "candidates-ds" ? "candidates_ds" : by),
                    folder + "bf16/test_gpt2_sla_90a.ptx", folder + "bf16/test_gpt2_sla_emu",
                    "LongRandomWirings.OfLargeHeads*:*Golden.*",
                    "SLA_EMU_CC=90 SLA_CANDIDATES=bias-gradients,norm,classifier SLA_ATTENTION=" + by});
  // A T4, whose blocks have so little shared memory that fp32's kernels have smaller tiles. It has no asynchronous
  // copies, whose bytes one test counts.
  for (const std::string test : {"test_attention", "test_ops"})
    runs.push_back({"fp32_" + test + "_on_a_t4", folder + "fp32/" + test + "_75.ptx", folder + "fp32/" + test + "_emu",
                    "*-AttentionDecode.ReadsWhatIsSeenOnce", "SLA_EMU_CC=75"});
  // A T4 in fp16, and what needs no more shared memory than it has.
  const std::string attention = folder + "fp16/test_attention";
  runs.push_back({"fp16_test_attention", attention + ".ptx", attention + "_emu", "*"});
  runs.push_back({"fp16_test_attention_on_a_t4", attention + "_75.ptx", attention + "_emu",
                  "*-AttentionDecode.ReadsWhatIsSeenOnce:AttentionTopK.UsesThe*:AttentionTopK.RanksNaN*",
                  "SLA_EMU_CC=75"});
  runs.push_back({"fp32_golden_cases", folder + "fp32/train_gpt2_sla.ptx", folder + "test_cli",
                  "*GoldenCommandLine.*_on_the_emulated_gpu"});
  return runs;
}

// Runs emulated programs with nvcc's code.
class PtxProgram : public CommandLine {
 protected:
  // The last lines of a text.
  static std::string end_of(const std::string& text, int lines) {
    size_t at = text.size();
    for (int i = 0; i <= lines && at != 0 && at != std::string::npos; i++) at = text.rfind('\n', at - 1);
    return at == std::string::npos || text.empty() ? text : text.substr(at + 1);
  }

  void expect_to_pass(const PtxRun& r) const {
    const char* const nvcc = getenv("NVCC");
    const bool has_nvcc = run(std::string("command -v ") + (nvcc != nullptr ? nvcc : "nvcc")).exit_status == 0;
    if (!has_nvcc && !fs::exists(r.ptx)) GTEST_SKIP() << "no nvcc, by which " << r.ptx << " is made";
    // Made here, because nvcc takes a minute for each and a share of the long tests runs few of them.
    if (has_nvcc) {
      const Outcome made = run("make --no-print-directory " + r.ptx);
      ASSERT_EQ(made.exit_status, 0) << end_of(made.err, 60);
    }
    const Outcome o = run(r.environment + " SLA_EMU_PTX=" + r.ptx + " OMP_NUM_THREADS=1 " + r.program +
                          " --gtest_filter='" + r.filter + "'");
    EXPECT_EQ(o.exit_status, 0) << end_of(o.out, 30) << end_of(o.err, 60);
    const size_t passed = o.out.find("[  PASSED  ] ");
    ASSERT_NE(passed, std::string::npos) << end_of(o.out, 30);
    EXPECT_GT(atoi(o.out.c_str() + passed + 13), 0);
    printf("%s: %s\n", r.name.c_str(), o.out.substr(passed + 13, o.out.find('\n', passed) - passed - 13).c_str());
  }
};

// Bugs in the inline assembly, which the emulated GPU's own code does not have.
TEST_F(PtxProgram, TilesAreRightWithNvccsCode) {
  expect_to_pass({"tiles", "build/bf16/test_tile.ptx", "build/bf16/test_tile_emu", "*"});
}

// In fp16: for sm_80, and for a T4, whose products take two instructions.
TEST_F(PtxProgram, TilesOfFp16AreRightWithNvccsCode) {
  expect_to_pass({"tiles", "build/fp16/test_tile.ptx", "build/fp16/test_tile_emu", "*"});
  expect_to_pass({"tiles", "build/fp16/test_tile_75.ptx", "build/fp16/test_tile_emu", "*", "SLA_EMU_CC=75"});
}

class PtxPrograms : public PtxProgram, public testing::WithParamInterface<PtxRun> {};

// Bugs that only the run by wgmma can find.
//
// Bugs of a T4's tiles and copies.
TEST_P(PtxPrograms, PassTheirTestsWithNvccsCode) { expect_to_pass(GetParam()); }

INSTANTIATE_TEST_SUITE_P(LongRuns, PtxPrograms, testing::ValuesIn(ptx_runs()),
                         [](const auto& info) { return info.param.name; });

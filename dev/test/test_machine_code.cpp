// The machine code that nvcc makes of attention's kernels: registers, stack frames, spills, and what the main loop
// spends per tensor instruction. A pragma that is lost, or a register too many, changes no result and costs time on a
// GPU. The figures are compared with dev/test/machine_code.txt. Today's are written to build/machine_code.txt,
// from where a change that is wanted is copied.
#include <gtest/gtest.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>
#include "command_line.h"
#include "files.h"
#include "llmc/base/error.h"
#include "sass.h"

static const std::vector<int> architectures = {80, 90};  // compute capability, times ten

// What is recorded of a kernel. A negative number is not known.
struct Figures {
  int registers = -1, stack_bytes = -1, spilled_bytes = -1;  // of a thread; the last stored and loaded
  double instructions = -1, shared_memory_cycles = -1;       // of the main loop, per tensor instruction
};
using Table = std::map<std::string, Figures>;  // by architecture and kernel: "sm_80 forward<64,0,1>"

// ----------------------------------------------------------------------------
// Compiling

static Outcome shell(const std::string& command, const TemporaryFolder& folder) {
  const std::string out = folder.path + "/stdout", err = folder.path + "/stderr";
  const int status = system(("{ " + command + "\n} >'" + out + "' 2>'" + err + "' </dev/null").c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(out), read_file(err)};
}

static std::string nvcc() { return getenv("NVCC") != nullptr ? getenv("NVCC") : "nvcc"; }

// What ptxas says of its kernels.
static void read_registers(const std::string& log, const std::string& prefix, Table& table) {
  std::istringstream lines(log);
  Figures* figures = nullptr;
  for (std::string line; std::getline(lines, line);) {
    if (line.find("Compiling entry function") != std::string::npos) {
      const std::string kernel = kernel_in(line);
      figures = kernel.empty() ? nullptr : &table[prefix + kernel];
    }
    if (figures == nullptr) continue;
    int stack = 0, stores = 0, loads = 0;
    if (sscanf(line.c_str(), " %d bytes stack frame, %d bytes spill stores, %d bytes spill loads", &stack, &stores,
               &loads) == 3) {
      figures->stack_bytes = stack;
      figures->spilled_bytes = stores + loads;
    }
    const size_t used = line.find("Used ");
    if (used != std::string::npos) figures->registers = atoi(line.c_str() + used + 5);
  }
}

// ----------------------------------------------------------------------------
// Machine code

static void read_loops(const std::string& text, const std::string& prefix, Table& table, std::string& faults) {
  for (const auto& [kernel, code] : read_code(text)) {
    const std::vector<Instruction> loop = main_loop(code);
    for (const std::string& fault : faults_of_products(code))
      faults += format("%s%s: %s\n", prefix.c_str(), kernel.c_str(), fault.c_str());
    const auto tensor =
        std::count_if(loop.begin(), loop.end(), [](const Instruction& i) { return i.is("HMMA") || i.is("HGMMA"); });
    int cycles = 0;
    for (const Instruction& i : loop) cycles += shared_memory_cycles(i);
    Figures& figures = table[prefix + kernel];
    figures.instructions = double(loop.size()) / double(std::max<std::ptrdiff_t>(1, tensor));
    figures.shared_memory_cycles = double(cycles) / double(std::max<std::ptrdiff_t>(1, tensor));
  }
}

// ----------------------------------------------------------------------------
// Today's figures

struct Measured {
  std::string reason_to_skip, error;
  int version = 0;          // nvcc's major
  bool serialized = false;  // ptxas says that it lets no products by wgmma overlap
  std::string faults;       // of products by wgmma, of all kernels
  Table table;
};

// Prints where nvdisasm is: on PATH, beside nvcc, or PyPI's, which is 6 MB and reads what earlier versions have made.
static std::string nvdisasm_command() {
  const std::string installed = "ls build/nvdisasm/nvidia/*/bin/nvdisasm";
  return "command -v nvdisasm || ls \"$(dirname \"$(command -v " + nvcc() + ")\")/nvdisasm\" || " + installed +
         " || { python3 -m pip install --quiet --no-deps --retries 1 --target build/nvdisasm "
         "nvidia-cuda-nvdisasm==13.5.37 >&2 && " +
         installed + "; }";
}

static Measured measure() {
  Measured m;
  const TemporaryFolder folder;
  const Outcome version = shell(nvcc() + " --version", folder);
  const size_t release = version.out.find("release ");
  if (version.exit_status != 0 || release == std::string::npos) m.reason_to_skip = "no nvcc";
  if (!m.reason_to_skip.empty()) return m;
  m.version = atoi(version.out.c_str() + release + 8);

  // The launchers instantiate the kernels that the program uses.
  write_file(folder.path + "/kernels.cu", "#include \"llmc/cuda/attention.h\"\n");
  std::string compile;
  for (int arch : architectures) {
    const std::string out = format("%s/%d", folder.path.c_str(), arch);
    compile += format("%s -std=c++17 -O3 -DPRECISION_BF16 -arch=sm_%d%s -cubin -Xptxas -v -I. '%s/kernels.cu' -o "
                      "'%s.cubin' 2>'%s.log' & ",
                      nvcc().c_str(), arch, arch == 90 ? "a" : "", folder.path.c_str(), out.c_str(), out.c_str());
  }
  shell(compile + "wait", folder);
  const Outcome found = shell(nvdisasm_command(), folder);
  if (found.exit_status != 0)
    m.error = "there is no nvdisasm: install cuda-nvdisasm beside nvcc, or nvidia-cuda-nvdisasm by pip: " + found.err;
  for (int arch : architectures) {
    const std::string at = folder.path + "/" + std::to_string(arch), prefix = format("sm_%d ", arch);
    const std::string log = read_file(at + ".log"), nvdisasm = found.out.substr(0, found.out.find('\n'));
    if (!std::filesystem::exists(at + ".cubin")) m.error += "nvcc: " + log;
    read_registers(log, prefix, m.table);
    m.serialized |= log.find("serialized") != std::string::npos;
    if (found.exit_status == 0)
      read_loops(shell(nvdisasm + " -c '" + at + ".cubin'", folder).out, prefix, m.table, m.faults);
    // For other GPUs than Hopper kernels with wgmma are empty.
    for (auto it = m.table.begin(); it != m.table.end();)
      it = arch != 90 && it->first.rfind(prefix, 0) == 0 && it->first.find("_wgmma") != std::string::npos
               ? m.table.erase(it)
               : std::next(it);
  }
  return m;
}

static const Measured& measured() {
  static const Measured m = measure();
  return m;
}

static std::string line_of(const std::string& kernel, const Figures& f) {
  return format("%-24s %9d %5d %7d %12.2f %13.2f\n", kernel.c_str(), f.registers, f.stack_bytes, f.spilled_bytes,
                f.instructions, f.shared_memory_cycles);
}

// The recorded figures, and for which nvcc.
static Table recorded(int& version) {
  Table table;
  std::istringstream lines(read_file("dev/test/machine_code.txt"));
  for (std::string line; std::getline(lines, line);) {
    char arch[16], kernel[64];
    Figures f;
    sscanf(line.c_str(), "# nvcc %d", &version);
    if (sscanf(line.c_str(), "%15s %63s %d %d %d %lf %lf", arch, kernel, &f.registers, &f.stack_bytes, &f.spilled_bytes,
               &f.instructions, &f.shared_memory_cycles) == 7)
      table[std::string(arch) + " " + kernel] = f;
  }
  return table;
}

class MachineCode : public testing::Test {
 protected:
  int version = 0;
  Table table = recorded(version);

  void SetUp() override {
    const Measured& m = measured();
    if (!m.reason_to_skip.empty()) GTEST_SKIP() << m.reason_to_skip;
    ASSERT_EQ(m.error, "");
    if (version != m.version)
      GTEST_SKIP() << "the figures are nvcc " << version << "'s, and this is nvcc " << m.version;
  }
};

// Stack frames, where an array lies whose index is no constant, and spills that are there may stay; none may be added.
TEST_F(MachineCode, OfAttentionTakesNoMoreRegistersSpillsOrStack) {
  for (const auto& [kernel, now] : measured().table) {
    ASSERT_TRUE(table.count(kernel)) << "dev/test/machine_code.txt has no line of it: " << line_of(kernel, now);
    EXPECT_LE(now.stack_bytes, table[kernel].stack_bytes) << line_of(kernel, now);
    EXPECT_LE(now.spilled_bytes, table[kernel].spilled_bytes) << line_of(kernel, now);
    EXPECT_LE(now.registers, table[kernel].registers * 1.05) << line_of(kernel, now);
    EXPECT_GT(now.registers, 0) << line_of(kernel, now);
  }
  EXPECT_EQ(measured().table.size(), table.size()) << "dev/test/machine_code.txt has kernels that do not exist";
}

// A register that is touched beside a product, and ptxas waits for each: right, and half as fast.
TEST_F(MachineCode, LetsProductsOverlap) { EXPECT_FALSE(measured().serialized); }

// ptxas 12.9 and 13.0 gave the rows of K and V that dk's and dv's products by wgmma need for each tile the registers of
// probabilities, where the rows were in registers and the heads had 64 channels. On an H100 gradients were wrong from
// the second tile on; the PTX was right. Any nvcc's code is looked at.
TEST(Products, OfAttentionTouchNoRegisterThatAnotherProductNeeds) {
  if (!measured().reason_to_skip.empty()) GTEST_SKIP() << measured().reason_to_skip;
  ASSERT_EQ(measured().error, "");
  EXPECT_EQ(measured().faults, "");
  int kernels = 0;
  for (const auto& [kernel, figures] : measured().table) kernels += kernel.find("_wgmma") != std::string::npos;
  EXPECT_EQ(kernels, 13);
}

// A kernel whose rows R152 to R155 are loaded before a loop that multiplies them, and scores that it packs; `planted`
// is what the loop does after its first product, before the wait, and `after_wait` what it does then.
static std::string faults_of(const std::string& planted, const std::string& after_wait = "") {
  auto lines = [](const std::string& text) {
    std::string result;
    std::istringstream instructions(text);
    for (std::string i; std::getline(instructions >> std::ws, i, ';');) result += "        /*0000*/ " + i + " ;\n";
    return result;
  };
  const std::string text = ".text._Z24attention_dq_wgmma_kernelILi64EEv16AttentionArgsI:\n" +
                           lines(R"(LDSM.16.M88.4 R152, [R0+UR4]; S2R R40, SR_TID.X; FMUL R5, R6, R7;
      F2FP.BF16.F32.PACK_AB R184, R5, R6; F2FP.BF16.F32.PACK_AB R185, R5, R6;
      F2FP.BF16.F32.PACK_AB R186, R5, R6; F2FP.BF16.F32.PACK_AB R187, R5, R6;)") +
                           ".L_x_1:\n" +
                           lines("WARPGROUP.ARRIVE; HGMMA.64x64x16.F32.BF16 R24, R152, gdesc[UR16], RZ, !UPT, gsb0;" +
                                 planted + "WARPGROUP.DEPBAR.LE gsb0, 0x0;" + after_wait + R"(
      WARPGROUP.ARRIVE; HGMMA.64x64x16.F32.BF16 R88, R184, gdesc[UR8].tnspB, R88, gsb0;
      WARPGROUP.DEPBAR.LE gsb0, 0x0; @!P0 BRA `(.L_x_1); EXIT;)");
  std::string all;
  for (const auto& [kernel, code] : read_code(text))
    for (const std::string& fault : faults_of_products(code)) all += kernel + " " + fault + "\n";
  return all;
}

TEST(Products, AreRightWhereRowsAndResultsAreLeftAlone) {
  EXPECT_EQ(faults_of("FADD R3, R4, R5;", "FMUL R4, R24, R55;F2FP.BF16.F32.PACK_AB R184, R24, R25;"), "");
  EXPECT_EQ(faults_of("", "LOP3.LUT R153, R153, R40, RZ, 0x3c, !PT;MOV R154, R154;"), "") << "defined anew, and copied";
}

// Each of them is wrong from the second round on; the last register that it overwrites.
TEST(Products, AreWrongWhereRowsOfLaterRoundsAreOverwritten) {
  const std::vector<std::pair<const char*, int>> planted = {
      {"FMUL R155, R24, R25;", 155},                                   // by a number,
      {"F2FP.BF16.F32.PACK_AB R154, R24, R25;", 154},                  // by scores,
      {"LDS.128 R152, [R0+0x10];", 155},                               // by all registers of a wide load,
      {"LDS.64 R154, [R0+0x10];", 155},                                //
      {"LDG.E.128 R149, desc[UR4][R2.64];", 152},                      //
      {"IMAD.WIDE R154, R3, R4, R6;", 155},                            // of a wide product,
      {"CS2R R154, SRZ;", 155},                                        //
      {"SHFL.BFLY PT, R155, R24, 0x1, 0x1f;", 155},                    // after a predicate,
      {"MOV R155, R184;", 155},                                        // by a copy of something else,
      {"@P1 FMUL R155, R24, R25;", 155},                               // on one of two paths,
      {"FMUL R155, R24, R25;@P1 LDSM.16.M88.4 R152, [R0+UR4];", 155},  // and loaded again on one alone,
      {"HMMA.16816.F32.BF16 R152, R4, R8, R12;", 155},                 // by a product's results.
      {"HGMMA.64x64x16.F32.BF16 R128, gdesc[UR4], RZ, !UPT, gsb0;WARPGROUP.DEPBAR.LE gsb0, 0x0;", 155},
  };
  for (const auto& [instructions, last] : planted)
    EXPECT_NE(faults_of("", instructions).find(format("overwrites R%d\n", last)), std::string::npos) << instructions;
  EXPECT_EQ(faults_of("", "FMUL R156, R24, R25;LDS.64 R150, [R0];IMAD.WIDE R150, R3, R4, R6;"), "");
}

TEST(Products, AreWrongWhereTheyAreTouchedUnderWay) {
  auto finds = [](const std::string& what, const std::string& planted, const std::string& after_wait = "") {
    EXPECT_NE(faults_of(planted, after_wait).find(what), std::string::npos) << planted << after_wait;
  };
  finds("rows under way: FMUL", "FMUL R152, R4, R5;");
  finds("rows under way: FMUL", "FMUL R155, R4, R5;");
  finds("rows under way: LDSM", "LDSM.16.M88.4 R149, [R0];");
  finds("results under way: FMUL", "FMUL R3, R4, R55;");
  finds("results under way: FMUL", "FMUL R24, R4, R5;");
  finds("results under way: FADD", "FADD R3, -R24, R5;");
  finds("results under way: STS.128", "STS.128 [R0], R21;");
  finds("multiplies unfinished results", "HGMMA.64x64x16.F32.BF16 R56, R24, gdesc[UR4], RZ, !UPT, gsb0;");
  // Where two groups are under way, and only the older one is waited for.
  finds("results under way: FMUL", "WARPGROUP.ARRIVE;HGMMA.64x64x16.F32.BF16 R56, gdesc[UR4], RZ, !UPT, "
                                   "gsb0;WARPGROUP.DEPBAR.LE gsb0, 0x1;"
                                   "FMUL R3, R24, R25;FMUL R3, R56, R57;");
  EXPECT_EQ(faults_of("WARPGROUP.ARRIVE;HGMMA.64x64x16.F32.BF16 R56, gdesc[UR4], RZ, !UPT, gsb0;"
                      "WARPGROUP.DEPBAR.LE gsb0, 0x1;FMUL R3, R24, R25;"),
            "");
  finds("written after the fence", "",
        "WARPGROUP.ARRIVE;F2FP.BF16.F32.PACK_AB R184, R24, R25;HGMMA.64x64x16.F32.BF16 "
        "R88, R184, gdesc[UR8].tnspB, R88, gsb0;");
}

static bool has_nvcc() { return shell(nvcc() + " --version", TemporaryFolder()).exit_status == 0; }

static Outcome compile(const std::string& program, const std::string& flags) {
  const TemporaryFolder folder;
  return shell(nvcc() + " -I. -std=c++17 -Werror all-warnings " + flags + " " + program + ".cu -o '" + folder.path +
                   "/program'",
               folder);
}

// The programs that only a machine with a GPU runs, without optimization and as PTX. nvcc's own front end reads some of
// C++ otherwise than g++, which compiles them for the emulated GPU.
class ProgramForAGpu : public testing::TestWithParam<const char*> {};
TEST_P(ProgramForAGpu, CompilesWithNvcc) {
  if (!has_nvcc()) GTEST_SKIP() << "no nvcc";
  const Outcome o = compile(GetParam(), "-O0 -Xcompiler -fopenmp,-O0 -Xcicc -O0 -DPRECISION_BF16 "
                                        "-gencode arch=compute_80,code=compute_80 -c");
  EXPECT_EQ(o.exit_status, 0) << o.err;
}
INSTANTIATE_TEST_SUITE_P(Each, ProgramForAGpu,
                         testing::Values("test_gpt2_sla", "dev/bench/bench_gpu", "dev/test/test_ops",
                                         "dev/test/test_attention", "dev/test/test_tile"),
                         [](const auto& info) { return std::filesystem::path(info.param).filename().string(); });

// Instructions of later GPUs are ptxas's to refuse.
TEST(GpusBeforeAmpere, HaveTheProgramInFp32) {
  if (!has_nvcc()) GTEST_SKIP() << "no nvcc";
  const Outcome o = compile("train_gpt2_sla", "-arch=sm_75 -cubin -O3");
  EXPECT_EQ(o.exit_status, 0) << o.err;
}

// Turing has no bf16 tensor cores, which is one error and not one for each use of them.
TEST(GpusBeforeAmpere, AreRefusedInBf16InOneSentence) {
  if (!has_nvcc()) GTEST_SKIP() << "no nvcc";
  const Outcome o = compile("train_gpt2_sla", "-arch=sm_75 -cubin -DPRECISION_BF16");
  EXPECT_NE(o.exit_status, 0);
  const size_t error = o.err.find("error: ");
  EXPECT_NE(o.err.find("compute capability 8.0 (Ampere) or later is needed"), std::string::npos) << o.err;
  EXPECT_EQ(o.err.find("error: ", error + 1), std::string::npos) << o.err;
}

// The minor versions of an nvcc differ by a few percent.
TEST_F(MachineCode, OfAttentionSpendsNoMorePerTensorInstruction) {
  std::string lines;
  for (const auto& [kernel, now] : measured().table) {
    lines += line_of(kernel, now);
    EXPECT_LE(now.instructions, table[kernel].instructions * 1.04) << line_of(kernel, now);
    EXPECT_LE(now.shared_memory_cycles, table[kernel].shared_memory_cycles * 1.04) << line_of(kernel, now);
    EXPECT_GT(now.shared_memory_cycles, 0) << line_of(kernel, now);
  }
  write_file("build/machine_code.txt", lines);
}

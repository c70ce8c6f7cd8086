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

// attention_forward_kernel<64, 0, true> of its mangled name as "forward<64,0,1>"; "" if `text` holds none of
// attention's kernels.
static std::string kernel_in(const std::string& text) {
  for (const char* name : {"forward", "topk", "dq", "dkdv", "dr", "forward_wgmma", "dq_wgmma", "dkdv_wgmma"}) {
    const std::string prefix = format("attention_%s_kernelI", name);
    size_t at = text.find(prefix);
    if (at == std::string::npos) continue;
    std::string parameters;
    int value = 0;
    // Li64E is an int, Lb1E a bool.
    for (at += prefix.size(); at + 2 < text.size() && text[at] == 'L'; at = text.find('E', at) + 1) {
      sscanf(text.c_str() + at + 2, "%d", &value);
      parameters += (parameters.empty() ? "" : ",") + std::to_string(value);
    }
    return format("%s<%s>", name, parameters.c_str());
  }
  return "";
}

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

struct Instruction {
  bool is_predicated;
  std::string name, operands, target;  // LDSM.16.M88.4; "R152, [R0+UR4]"; the label that it jumps to, or ""

  bool is(const char* operation) const { return name == operation || name.rfind(std::string(operation) + ".", 0) == 0; }
  bool jumps() const {
    return is("BRA") || (is("CALL") && is_predicated && !target.empty());
  }  // ptxas leaves some loops by such a call
  bool ends() const { return is("EXIT") || is("RET") || is("BRX") || is("JMP"); }
};

// Cycles of the one pipe to an SM's shared memory, which moves 128 bytes in each: a warp's 32 words, or one 8 x 8
// matrix of an ldmatrix.
static int shared_memory_cycles(const Instruction& i) {
  auto has = [&](const char* part) { return i.name.find(part) != std::string::npos; };
  if (i.is("LDSM")) return has(".4") ? 4 : has(".2") ? 2 : 1;
  if (i.is("LDGSTS") || i.is("LDS") || i.is("STS") || i.is("LDL") || i.is("STL"))
    return has(".128") ? 4 : has(".64") ? 2 : 1;
  return i.is("SHFL") || i.is("ATOMS") || i.is("REDS") ? 1 : 0;
}

struct Code {
  std::vector<Instruction> instructions;
  std::map<std::string, size_t> labels;  // the index of the instruction after a label
};

// nvdisasm's text: "/*0d90*/  @P2 BRA `(.L_x_1) ;" after lines ".L_x_1:", and before each kernel ".text.NAME:".
static std::map<std::string, Code> read_code(const std::string& text) {
  std::map<std::string, Code> kernels;
  Code* code = nullptr;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind(".text.", 0) == 0) {
      const std::string kernel = kernel_in(line);
      code = kernel.empty() ? nullptr : &kernels[kernel];
    } else if (code != nullptr && line.rfind(".L_", 0) == 0) {
      code->labels[line.substr(0, line.find(':'))] = code->instructions.size();
    } else if (const size_t comment = line.find("*/");
               code != nullptr && comment != std::string::npos && line.find("/*") < comment) {
      std::istringstream words(line.substr(comment + 2));
      Instruction i = {false, "", "", ""};
      words >> i.name;
      if (i.name[0] == '@') i.is_predicated = true, words >> i.name;
      if (i.name.empty() || i.name[0] == '/') continue;
      std::getline(words >> std::ws, i.operands, ';');
      const size_t target = line.find("`(");
      if (target != std::string::npos) i.target = line.substr(target + 2, line.find(')', target) - target - 2);
      code->instructions.push_back(i);
    }
  }
  return kernels;
}

// Instructions [first, end) that are entered at the first and left after the last, and the blocks that may follow and
// precede.
struct Block {
  size_t first, end;
  std::vector<size_t> next, before;
};

static std::vector<Block> blocks_of(const Code& code) {
  std::set<size_t> starts = {0};
  for (size_t i = 0; i < code.instructions.size(); i++) {
    const Instruction& x = code.instructions[i];
    if (!x.jumps() && !x.ends()) continue;
    starts.insert(i + 1);
    if (code.labels.count(x.target)) starts.insert(code.labels.at(x.target));
  }
  starts.insert(code.instructions.size());
  std::vector<Block> blocks;
  std::map<size_t, size_t> block_at;
  for (auto start = starts.begin(); std::next(start) != starts.end(); ++start) {
    block_at[*start] = blocks.size();
    blocks.push_back({*start, *std::next(start), {}, {}});
  }
  for (size_t b = 0; b < blocks.size(); b++) {
    const Instruction& last = code.instructions[blocks[b].end - 1];
    if (last.jumps() && code.labels.count(last.target))
      blocks[b].next.push_back(block_at.at(code.labels.at(last.target)));
    const bool goes_on = last.is_predicated || !(last.jumps() || last.ends());
    if (goes_on && b + 1 < blocks.size()) blocks[b].next.push_back(b + 1);
  }
  for (size_t b = 0; b < blocks.size(); b++)
    for (size_t next : blocks[b].next) blocks[next].before.push_back(b);
  return blocks;
}

// dominators[b][d]: every path from the beginning to block b goes through block d.
static std::vector<std::vector<bool>> dominators_of(const std::vector<Block>& blocks) {
  std::vector<std::vector<bool>> dominators(blocks.size(), std::vector<bool>(blocks.size(), true));
  dominators[0].assign(blocks.size(), false);
  dominators[0][0] = true;
  for (bool changes = true; changes;) {
    changes = false;
    for (size_t b = 1; b < blocks.size(); b++) {
      std::vector<bool> of_all(blocks.size(), true);
      for (size_t before : blocks[b].before)
        for (size_t d = 0; d < blocks.size(); d++) of_all[d] = of_all[d] && dominators[before][d];
      of_all[b] = true;
      if (of_all != dominators[b]) dominators[b] = of_all, changes = true;
    }
  }
  return dominators;
}

// The blocks of each loop. A jump back to a block that dominates it makes a loop of all blocks that lead to the jump.
// Jumps to the same block are one loop.
static std::vector<std::set<size_t>> loops_of(const std::vector<Block>& blocks) {
  const std::vector<std::vector<bool>> dominators = dominators_of(blocks);
  std::map<size_t, std::set<size_t>> loops;  // by their first block
  for (size_t b = 0; b < blocks.size(); b++)
    for (size_t head : blocks[b].next) {
      if (!dominators[b][head]) continue;
      std::set<size_t>& loop = loops[head];
      loop.insert(head);
      for (std::vector<size_t> todo = {b}; !todo.empty();) {
        const size_t block = todo.back();
        todo.pop_back();
        if (loop.insert(block).second)
          todo.insert(todo.end(), blocks[block].before.begin(), blocks[block].before.end());
      }
    }
  std::vector<std::set<size_t>> result;
  for (const auto& [head, loop] : loops) result.push_back(loop);
  return result;
}

// The main loop's instructions: the shortest of the loops that multiply on tensor cores and start copies of tiles.
static std::vector<Instruction> main_loop(const Code& code) {
  const std::vector<Block> blocks = blocks_of(code);
  std::vector<Instruction> shortest;
  for (const std::set<size_t>& loop : loops_of(blocks)) {
    std::vector<Instruction> instructions;
    for (size_t b : loop)
      instructions.insert(instructions.end(), code.instructions.begin() + std::ptrdiff_t(blocks[b].first),
                          code.instructions.begin() + std::ptrdiff_t(blocks[b].end));
    auto has = [&](const char* name) {
      return std::any_of(instructions.begin(), instructions.end(), [&](auto& i) { return i.is(name); });
    };
    if ((has("HMMA") || has("HGMMA")) && has("LDGSTS") && (shortest.empty() || instructions.size() < shortest.size()))
      shortest = instructions;
  }
  return shortest;
}

// The registers of A operands that a loop's wgmmas expect from before the loop, and which the loop overwrites: in the
// second round the products would be of something else. `loop` has the instructions in their order.
static std::set<int> overwritten_operands(const std::vector<Instruction>& loop) {
  std::set<int> from_before, written, overwritten;
  for (const Instruction& i : loop) {
    int to = -1, a = -1;
    if (i.is("HGMMA") && sscanf(i.operands.c_str(), "R%d, R%d, gdesc", &to, &a) == 2) {
      for (int r = a; r < a + 4; r++)
        if (!written.count(r)) from_before.insert(r);
    } else if (sscanf(i.operands.c_str(), "R%d,", &to) == 1) {
      written.insert(to);
      if (from_before.count(to)) overwritten.insert(to);
    }
  }
  return overwritten;
}

static void read_loops(const std::string& text, const std::string& prefix, Table& table, std::string& faults) {
  for (const auto& [kernel, code] : read_code(text)) {
    const std::vector<Instruction> loop = main_loop(code);
    for (int r : overwritten_operands(loop))
      faults += format("%s%s overwrites R%d\n", prefix.c_str(), kernel.c_str(), r);
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
  std::string reason_to_skip, reason_without_loops, error;
  int version = 0;          // nvcc's major
  bool serialized = false;  // ptxas says that it lets no products by wgmma overlap
  std::string overwritten;  // operands of wgmma, of all kernels
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
  if (found.exit_status != 0) m.reason_without_loops = "no nvdisasm";
  for (int arch : architectures) {
    const std::string at = folder.path + "/" + std::to_string(arch), prefix = format("sm_%d ", arch);
    const std::string log = read_file(at + ".log"), nvdisasm = found.out.substr(0, found.out.find('\n'));
    if (!std::filesystem::exists(at + ".cubin")) m.error += "nvcc: " + log;
    read_registers(log, prefix, m.table);
    m.serialized |= log.find("serialized") != std::string::npos;
    if (found.exit_status == 0)
      read_loops(shell(nvdisasm + " -c '" + at + ".cubin'", folder).out, prefix, m.table, m.overwritten);
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

// ptxas 13.0 gave the rows of K and V that dk's and dv's products by wgmma need for each tile the registers of
// probabilities, where the rows were in registers and the heads had 64 channels. On an H100 gradients were wrong from
// the second tile on; the PTX was right.
TEST_F(MachineCode, KeepsTheOperandsOfProductsThatLoopsRepeat) {
  if (!measured().reason_without_loops.empty()) GTEST_SKIP() << measured().reason_without_loops;
  EXPECT_EQ(measured().overwritten, "");
}

// The minor versions of an nvcc differ by a few percent.
TEST_F(MachineCode, OfAttentionSpendsNoMorePerTensorInstruction) {
  if (!measured().reason_without_loops.empty()) GTEST_SKIP() << measured().reason_without_loops;
  std::string lines;
  for (const auto& [kernel, now] : measured().table) {
    lines += line_of(kernel, now);
    EXPECT_LE(now.instructions, table[kernel].instructions * 1.04) << line_of(kernel, now);
    EXPECT_LE(now.shared_memory_cycles, table[kernel].shared_memory_cycles * 1.04) << line_of(kernel, now);
    EXPECT_GT(now.shared_memory_cycles, 0) << line_of(kernel, now);
  }
  write_file("build/machine_code.txt", lines);
}

#include "launch.h"
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <numeric>
#include <sstream>
#include "../emu.h"
#include "block.h"
#include "llmc/base/error.h"

extern unsigned char shared_memory[];

namespace emu::ptx {
namespace {

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file || text.str().empty())
    user_error("%s: cannot be read; SLA_EMU_PTX names a file of PTX, such as build/fp32/train_gpt2_sla.ptx, which make "
               "builds under this name where nvcc is found",
               path.c_str());
  return text.str();
}

struct File {
  Module module;
  std::map<std::string, uint64_t> addresses;                 // of variables; of "" where shared memory lies
  std::map<std::string, std::vector<unsigned char>> memory;  // the variables'
  std::map<std::string, std::unique_ptr<Code>> kernels;      // those that have been launched

  explicit File(const std::string& path) : module(path, read_text(path)) {
    addresses[""] = reinterpret_cast<uint64_t>(shared_memory);
    for (const auto& [name, variable] : module.variables()) {
      std::vector<unsigned char>& bytes = memory[name];
      bytes.assign(variable.bytes + variable.alignment, 0);
      const uint64_t first = reinterpret_cast<uint64_t>(bytes.data());
      addresses[name] = (first + variable.alignment - 1) / variable.alignment * variable.alignment;
      memcpy(reinterpret_cast<void*>(addresses[name]), variable.initial.data(),
             std::min(variable.initial.size(), variable.bytes));
    }
  }

  Code& kernel(const std::string& name) {
    std::unique_ptr<Code>& code = kernels[name];
    if (code == nullptr) code = std::make_unique<Code>(decode(module, name, addresses));
    return *code;
  }
};

std::string& chosen_path() {
  static std::string& path = *new std::string(getenv("SLA_EMU_PTX") != nullptr ? getenv("SLA_EMU_PTX") : "");
  return path;
}

// Files stay, as kernels that have been queued may be launched later.
File& file() {
  static std::map<std::string, std::unique_ptr<File>>& files = *new std::map<std::string, std::unique_ptr<File>>;
  std::unique_ptr<File>& file = files[chosen_path()];
  if (file == nullptr) file = std::make_unique<File>(chosen_path());
  return *file;
}

// g++ marks a static function that is no template by an L, nvcc does not.
std::string name_in_file(const std::string& mangled) {
  return mangled.compare(0, 3, "_ZL") == 0 ? "_Z" + mangled.substr(3) : mangled;
}

const Code* running_code = nullptr;  // for the message

[[noreturn]] void report_race(uint32_t byte, const Access& now, const Access& before) {
  fatal_race(byte, now, before, [](uint32_t op) { return "in " + running_code->describe(op); });
}

Races* races() {
  static Races* const races = new Races(report_race);
  return looks_for_races() ? races : nullptr;
}

// PTX is for GPUs from its target's compute capability on. wgmma is of 9.0 alone, and ptxas takes it in code for sm_90a
// only.
void check_target(const Code& code) {
  const std::string &path = chosen_path(), &target = code.module->target(), &kernel = code.kernel.name;
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
  if (code.wgmma_registers.empty()) {
    if (atoi(target.c_str() + strlen("sm_")) > 10 * major + minor)
      user_error("%s: it is for %s, and the emulated GPU has compute capability %d.%d", path.c_str(), target.c_str(),
                 major, minor);
    return;
  }
  if (target != "sm_90a")
    user_error("%s: the kernel %s has wgmma, which is for sm_90a, and the file is for %s; compile it with "
               "-arch=compute_90a",
               path.c_str(), kernel.c_str(), target.c_str());
  if (major != 9 || minor != 0)
    user_error("%s: the kernel %s has wgmma, and the emulated GPU has compute capability %d.%d; SLA_EMU_CC=90 sets 9.0",
               path.c_str(), kernel.c_str(), major, minor);
}

}  // namespace

bool is_used() {
  if (chosen_path().empty()) return false;
  file();
  return true;
}

void use_file(const std::string& path) { chosen_path() = path; }

bool is_variable(const void* p, size_t bytes) {
  const auto* const first = static_cast<const unsigned char*>(p);
  for (const auto& [name, memory] : file().memory)
    if (first >= memory.data() && first + bytes <= memory.data() + memory.size()) return true;
  return false;
}

void check_launch(const std::string& mangled, const Parameters& parameters) {
  const std::string name = name_in_file(mangled), &path = chosen_path();
  if (!file().module.has(name))
    user_error("%s: it has no kernel %s; SLA_EMU_PTX must name the PTX of the program that runs", path.c_str(),
               name.c_str());
  check_target(file().kernel(name));
  const std::vector<Variable>& expected = file().kernel(name).kernel.parameters;
  bool same = expected.size() == parameters.size();
  for (size_t i = 0; same && i < expected.size(); i++)
    same = expected[i].offset == parameters.offset(i) && expected[i].bytes == parameters.bytes(i);
  if (!same)
    user_error("%s: the kernel %s has other parameters than the program's; build both from the same source",
               path.c_str(), name.c_str());
}

void run_kernel(const std::string& mangled, dim3 grid, dim3 block, size_t shared_bytes, const Parameters& parameters) {
  Code& code = file().kernel(name_in_file(mangled));
  memcpy(code.parameters.data(), parameters.data(), code.kernel.parameter_bytes);
  gridDim = grid;
  blockDim = block;
  running_code = &code;
  open_shared_memory(shared_bytes + code.static_shared_bytes);
  Block runner(code, grid, block, shared_bytes, races());
  std::vector<uint32_t> order(size_t(grid.x) * grid.y * grid.z);
  std::iota(order.begin(), order.end(), 0);
  rng.shuffle(order.data(), uint32_t(order.size()));
  for (const uint32_t b : order) {
    blockIdx = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
    runner.run(blockIdx);
  }
  close_shared_memory();
}

}  // namespace emu::ptx

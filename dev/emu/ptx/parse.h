// Reads PTX: which kernels a file has, and the instructions of one.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace emu::ptx {

struct Operand {
  enum Kind { reg, number, symbol, address, list };
  Kind kind = number;
  int index = -1;     // reg, and an address's base: which of the kernel's registers; -1: none
  uint64_t bits = 0;  // number: two's complement, or of a float (0f...) or double (0d...); address: what is added
  std::string name;   // symbol, and an address's base: a variable, parameter, label or special register
  std::vector<Operand> parts;  // list: of {a, b}, and of a|b; address: what follows in [a, b], as in a tensor's
};

struct Instruction {
  int guard = -1;              // the predicate under which it is executed; -1: always
  bool guard_negated = false;  // @!%p
  std::string opcode;
  std::vector<Operand> operands;
  int line;    // of the PTX file
  int source;  // of Kernel::sources; -1: not known
};

// A register of each thread. A predicate has 0 bytes.
struct Register {
  std::string name;
  int bytes;
};

// A parameter, or a variable in local, shared, constant or global memory.
struct Variable {
  std::string name;
  size_t offset = 0;  // of a parameter or local variable; of a shared one, in its space
  size_t bytes = 0;   // 0 for `extern .shared x[]`
  size_t alignment = 1;
  std::string initial;  // of a constant or global one: its bytes; what is missing is 0
};

struct Kernel {
  std::string name;
  std::vector<Variable> parameters, locals, shared;
  size_t parameter_bytes = 0, local_bytes = 0, shared_bytes = 0;
  std::vector<Register> registers;
  std::vector<Instruction> instructions;
  std::unordered_map<std::string, uint32_t> labels;  // the index of the instruction
  std::vector<std::string> sources;                  // "llmc/cuda/tile.h:59, inlined at dev/test/test_tile.cu:31"
};

// A file. Its kernels are parsed when they are asked for.
class Module {
 public:
  Module(const std::string& path, std::string text);  // throws UserError

  const std::string& path() const { return path_; }
  bool has(const std::string& kernel) const { return entries_.count(kernel) != 0; }
  std::vector<std::string> kernels() const;
  Kernel parse(const std::string& kernel) const;                                   // throws UserError with the line
  const std::map<std::string, Variable>& variables() const { return variables_; }  // constant and global memory
  const std::vector<Variable>& shared() const { return shared_; }                  // of all kernels
  const std::string& target() const { return target_; }                            // "sm_90a"

 private:
  struct Entry {
    size_t first;  // where `.entry` stands
    int line;
  };
  std::string path_, text_, target_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, Variable> variables_;
  std::vector<Variable> shared_;
  std::map<int, std::string> files_;
};

}  // namespace emu::ptx

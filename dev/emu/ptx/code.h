// A kernel's instructions in the form in which they are executed: decoded once, a warp at a time.
//
// A warp's registers are its frame. A register is 32 neighbouring values, one for each lane, so that an instruction is
// a loop over the lanes that the compiler vectorises. A predicate is 32 times 0 or ~0. A number among the operands is
// a register, too, which is filled when the frame is made.
//
//   parse.cpp       text -> Kernel
//   code.cpp        Kernel -> Code: operands become places in the frame; branches, moves, special registers
//   registers.cpp   which registers share a place
//   arithmetic.cpp  instructions that compute something of each lane's operands alone
//   memory.cpp      loads, stores, atomics, asynchronous copies
//   warp.cpp        what lanes do together: shuffles, votes, barriers, mma, ldmatrix
//   wgmma.cpp       asynchronous products of a warpgroup, and what must come before and after them
//   mbarrier.cpp    barriers in shared memory, and the copies that arrive there
//   block.cpp       runs a block: which warp, which lanes, which instruction next
//   launch.cpp      finds the file and the kernel of a launch
#pragma once
#include <cstdint>
#include <string>
#include <vector>
#include "parse.h"
#include "registers.h"

namespace emu::ptx {

struct Warp;
struct Op;
using Handler = void (*)(Warp&, const Op&);

// What the block does with an instruction before, or instead of, calling its handler.
enum class Control : uint8_t {
  none,
  branch,
  exit,
  lanes,           // the lanes of a mask wait for each other, and then do it at once: shfl, vote
  lanes_anywhere,  // the same, and some may be at another instruction of the kind: bar.warp.sync
  warp,            // all lanes of a warp wait for each other, and then do it at once: mma, ldmatrix
  barrier,         // warps wait for each other: bar.sync
  warpgroup,       // the four warps of a warpgroup wait for each other, and then do it: wgmma
};

// An instruction.
struct Op {
  Handler run = nullptr;
  int32_t at[5] = {};         // where its registers are in the frame, the result first
  int64_t number = 0;         // what an address adds to its base, and the like
  std::vector<int32_t> list;  // registers of an operand in braces
  Control control = Control::none;
  uint32_t target = 0;       // of a branch: an index of Code::ops
  uint32_t straight = 0;     // how many from here can run without a look at other lanes and warps
  uint32_t instruction = 0;  // an index of Kernel::instructions
  int32_t guard = -1;        // the predicate under which it is executed; -1: always
  bool guard_negated = false;
  bool narrow_address = false;  // of 32 bits
  Handler guarded = nullptr;    // if there is a guard: what `run` calls with the lanes for which it holds
  // The registers of wgmma among its own, by number in Code::wgmma_registers; a wgmma's are in the order of its list.
  std::vector<uint32_t> touched;
  Handler untouched = nullptr;  // if there are some, and it is no wgmma: what is called when they have been checked
};

// A register that has the same value in all lanes from the beginning.
struct Constant {
  int32_t at;
  int bytes;  // of a lane
  uint64_t bits;
};

struct Special {
  std::string name;  // "%tid.x"
  int32_t at;
};

struct Code {
  const Module* module;
  Kernel kernel;
  std::vector<Op> ops;
  std::vector<Constant> constants;
  std::vector<Special> specials;
  size_t frame_bytes = 0;
  size_t static_shared_bytes = 0;         // before `extern .shared`
  int smallest_shared_access = 4;         // bytes, at most 4
  bool has_clocks = false;                // it uses wgmma, mbarriers or bar.arrive
  std::vector<int> wgmma_registers;       // accumulators and, in registers, A: indices of Kernel::registers
  std::vector<unsigned char> parameters;  // of the launch that runs; kernels have their address

  // "st.shared.f32 at llmc/cuda/gru.h:20 (build/fp32/x.ptx:1200)", for messages.
  std::string describe(uint32_t op) const;
};

// `addresses`: of the module's variables in constant and global memory. Throws UserError with the first instruction
// that is not known.
Code decode(const Module& module, const std::string& kernel, const std::map<std::string, uint64_t>& addresses);

// Addresses in a block's shared, and in a thread's local memory begin here, so that a forgotten base is an error.
constexpr uint64_t shared_window = 1024, local_window = 4096;

// ----------------------------------------------------------------------------
// Used while decoding, by the files that know instructions

// How an instruction computes that has one result and reads nothing but registers.
struct Arithmetic {
  Handler run;
  std::vector<int> bytes;  // of a lane's value of each operand, the result first; 0: a predicate
};
const Arithmetic* find_arithmetic(const std::string& opcode);  // nullptr: it is no such instruction

// "ld.global.v4.f32" as ld, global, v4, f32.
struct Words {
  explicit Words(const std::string& opcode);
  bool has(const char* word) const;
  const std::string& first() const { return words.front(); }
  const std::string& last() const { return words.back(); }
  std::vector<std::string> words;
};

class Decoder {
 public:
  Decoder(Code& code, const std::map<std::string, uint64_t>& addresses) : code_(code), addresses_(addresses) {}
  void run();

  // Where an operand is whose lanes have `bytes` (0: a predicate). A wider register is read through its low part.
  int32_t source(const Operand& o, int bytes);
  int32_t result(const Operand& o, int bytes);
  int bytes_of(const Operand& o) const;                            // of a register as it is declared
  void address(const Operand& o, Op& op, int index);               // op.at[index] = its base; op.number += the rest
  void list(const Operand& o, Op& op, int bytes, bool is_result);  // of {a, b} or a alone to the end of op.list
  void shared_access(int bytes);
  void needs_clocks();
  void wgmma_register(const Operand& o);  // an accumulator, or of A
  [[noreturn]] void fail(const char* what) const;

 private:
  void decode_all();
  void share_places();
  void find_touched(Op& op) const;
  void instruction(const Instruction& i);
  bool decode_control(const Instruction& i, const Words& words, Op& op);
  bool decode_move(const Instruction& i, const Words& words, Op& op);
  bool decode_arithmetic(const Instruction& i, Op& op);
  void end_straight_runs();
  int32_t constant(uint64_t bits, int bytes);
  uint64_t value_of(const std::string& symbol) const;
  int32_t new_register(int bytes);
  int32_t temporary(int bytes);  // until the end of the instruction
  void emit(Op op);

  Code& code_;
  const std::map<std::string, uint64_t>& addresses_;
  const Instruction* now_ = nullptr;
  std::vector<int32_t> places_;            // of the kernel's registers
  std::vector<RegisterUse> uses_;          // by the instructions
  std::map<int, uint32_t> wgmma_numbers_;  // of a register: its place among Code::wgmma_registers
  int32_t temporaries_ = 0, temporary_bytes_ = 0, most_temporary_bytes_ = 0;  // where they begin; of the instruction,
                                                                              // of all
  std::map<std::pair<uint64_t, int>, int32_t> constants_;
  std::vector<uint32_t> first_op_;  // of each instruction, and the end
};

// False if the instruction is not one of the file's.
bool decode_memory(Decoder& d, const Instruction& i, const Words& words, Op& op);
bool decode_warp(Decoder& d, const Instruction& i, const Words& words, Op& op);
bool decode_wgmma(Decoder& d, const Instruction& i, const Words& words, Op& op);
bool decode_mbarrier(Decoder& d, const Instruction& i, const Words& words, Op& op);

// In wgmma.cpp: ends the program if an asynchronous product still uses a register that the instruction touches.
void run_checked(Warp& w, const Op& op);

}  // namespace emu::ptx

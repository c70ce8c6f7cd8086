// Machine code of attention's kernels (SASS), as nvdisasm prints it: instructions, blocks, loops, and what becomes of
// the registers of products by wgmma. Its words: HMMA and HGMMA are mma.sync and wgmma, which multiply; LDSM is
// ldmatrix, F2FP packs two numbers into 32 bits, LDGSTS is cp.async; "gsb0" at a product commits the group that it
// ends.
#pragma once
#include <algorithm>
#include <array>
#include <bitset>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>
#include "llmc/base/error.h"

// attention_forward_kernel<64, 0, true> of its mangled name as "forward<64,0,1>"; "" if `text` holds none of
// attention's kernels.
inline std::string kernel_in(const std::string& text) {
  for (const char* name : {"forward", "topk", "dq", "dkdv", "dr", "forward_wgmma", "forward_producer_wgmma", "dq_wgmma",
                           "dq_from_ds_wgmma", "dkdv_wgmma"}) {
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

struct Instruction {
  bool is_predicated;
  std::string name, operands, target;  // LDSM.16.M88.4; "R152, [R0+UR4]"; the label that it jumps to, or ""

  bool is(const char* operation) const { return name == operation || name.rfind(std::string(operation) + ".", 0) == 0; }
  // ptxas leaves some loops by a call that has a condition.
  bool jumps() const { return is("BRA") || (is("CALL") && is_predicated && !target.empty()); }
  bool ends() const { return is("EXIT") || is("RET") || is("BRX") || is("JMP"); }
};

// How many registers an operand of 32 bits per thread has in the instruction: LDS.128 loads four.
inline int registers_of(const Instruction& i) {
  auto has = [&](const char* part) { return i.name.find(part) != std::string::npos; };
  if (i.is("LDSM")) return has(".4") ? 4 : has(".2") ? 2 : 1;
  if (has(".128")) return 4;
  return has(".64") || has(".WIDE") || i.name == "CS2R" ? 2 : 1;
}

// Cycles of the one pipe to an SM's shared memory, which moves 128 bytes in each: a warp's 32 words, or one 8 x 8
// matrix of an ldmatrix.
inline int shared_memory_cycles(const Instruction& i) {
  for (const char* name : {"LDSM", "LDGSTS", "LDS", "STS", "LDL", "STL"})
    if (i.is(name)) return registers_of(i);
  return i.is("SHFL") || i.is("ATOMS") || i.is("REDS") ? 1 : 0;
}

struct Code {
  std::vector<Instruction> instructions;
  std::map<std::string, size_t> labels;  // the index of the instruction after a label
};

// nvdisasm's text: "/*0d90*/  @P2 BRA `(.L_x_1) ;" after lines ".L_x_1:", and before each kernel ".text.NAME:".
inline std::map<std::string, Code> read_code(const std::string& text) {
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

inline std::vector<Block> blocks_of(const Code& code) {
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
inline std::vector<std::vector<bool>> dominators_of(const std::vector<Block>& blocks) {
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
inline std::vector<std::set<size_t>> loops_of(const std::vector<Block>& blocks) {
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

// The main loop's instructions: the shortest of the loops that multiply on tensor cores and start copies of tiles, or
// that multiply where other warps start the copies.
inline std::vector<Instruction> main_loop(const Code& code) {
  const std::vector<Block> blocks = blocks_of(code);
  std::vector<Instruction> shortest, shortest_without_copies;
  for (const std::set<size_t>& loop : loops_of(blocks)) {
    std::vector<Instruction> instructions;
    for (size_t b : loop)
      instructions.insert(instructions.end(), code.instructions.begin() + std::ptrdiff_t(blocks[b].first),
                          code.instructions.begin() + std::ptrdiff_t(blocks[b].end));
    auto has = [&](const char* name) {
      return std::any_of(instructions.begin(), instructions.end(), [&](auto& i) { return i.is(name); });
    };
    std::vector<Instruction>& result = has("LDGSTS") ? shortest : shortest_without_copies;
    if ((has("HMMA") || has("HGMMA")) && (result.empty() || instructions.size() < result.size())) result = instructions;
  }
  return shortest.empty() ? shortest_without_copies : shortest;
}

// ----------------------------------------------------------------------------
// Registers of products

// The registers that an instruction writes and reads.
constexpr int num_registers = 256;
using Registers = std::bitset<num_registers>;

struct RegisterUse {
  Registers written, read;
};

inline RegisterUse registers_used(const Instruction& i) {
  RegisterUse use;
  if (i.operands.empty() || i.name[0] == 'U' || i.is("CALL")) return use;  // U..: uniform registers alone
  std::vector<std::string> operands;
  std::istringstream text(i.operands);
  for (std::string o; std::getline(text >> std::ws, o, ',');) operands.push_back(o);
  auto add = [](Registers& to, int first, int count) {
    for (int r = first; r < first + count && r < num_registers; r++) to.set(size_t(r));
  };
  const bool is_product = i.is("HGMMA") || i.is("HMMA");
  const bool stores = i.is("STS") || i.is("STG") || i.is("STL") || i.is("STSM") || i.is("ST");
  // An instruction that has a predicate as its result besides: SHFL.IDX PT, R3, ...
  const bool has_predicate = i.is("SHFL") || i.is("ATOMG") || i.is("ATOMS") || i.is("MATCH");
  const bool has_result = !stores && !i.is("LDGSTS") && !i.is("RED") && !i.is("BAR") && !i.is("R2P");
  const size_t result = has_predicate ? 1 : 0;
  for (size_t o = 0; o < operands.size(); o++) {
    const size_t address = operands[o].find("[R");  // of up to 64 bits
    const bool is_address = address != std::string::npos;
    const char* name = operands[o].c_str() + (is_address ? address + 1 : strspn(operands[o].c_str(), "-~|"));
    int number = 0;
    if (sscanf(name, "R%d", &number) != 1) continue;
    if (is_address) {
      add(use.read, number, operands[o].find(".64") != std::string::npos ? 2 : 1);
    } else if (o == result && has_result) {
      add(use.written, number, i.is("HGMMA") ? 32 : is_product ? 4 : registers_of(i));
    } else {
      const bool is_wide_sum = i.name.find(".WIDE") != std::string::npos && o == 3;
      add(use.read, number,
          i.is("HGMMA") ? (o == 1 ? 4 : 32)
          : is_product  ? 4
          : stores      ? registers_of(i)
          : is_wide_sum ? 2
                        : 1);
    }
  }
  return use;
}

// Follows `state` from the kernel's first instruction on, along every path: `step` takes a state over an instruction,
// and `join` adds a state to the one before a block and says whether that has changed it.
template <class State, class Step, class Join>
void follow_paths(const Code& code, const std::vector<Block>& blocks, State first, Step step, Join join) {
  std::vector<State> before(blocks.size());
  std::set<size_t> todo = {0};
  join(before[0], first);
  while (!todo.empty()) {
    const size_t b = *todo.begin();
    todo.erase(todo.begin());
    State state = before[b];
    for (size_t i = blocks[b].first; i < blocks[b].end; i++) step(state, code.instructions[i]);
    for (size_t next : blocks[b].next)
      if (join(before[next], state)) todo.insert(next);
  }
}

// Where the values that a register may have come from: bits of Origin, none of a block that has not been reached.
enum Origin { from_tile = 1, from_packing = 2, from_elsewhere = 4 };
using Origins = std::array<unsigned char, num_registers>;

// A product's rows that are in registers come from a tile in shared memory, or they are scores that have been packed.
// Rows that may be the one or the other, or something else, have been overwritten: ptxas has taken their registers for
// something else, and the loop's next round multiplies that. A line for each.
inline std::set<std::string> overwritten_rows(const Code& code, const std::vector<Block>& blocks) {
  std::set<std::string> faults;
  Origins unknown;
  unknown.fill(from_elsewhere);
  auto step = [&](Origins& from, const Instruction& i) {
    int to = -1, a = -1;
    if (i.is("HGMMA") && sscanf(i.operands.c_str(), "R%d, R%d, gdesc", &to, &a) == 2)
      for (int r = a; r < a + 4; r++)
        if (from[size_t(r)] != from_tile && from[size_t(r)] != from_packing) faults.insert(format("overwrites R%d", r));
    const RegisterUse use = registers_used(i);
    unsigned char origin = i.is("LDSM") ? from_tile : i.is("F2FP") ? from_packing : from_elsewhere;
    const bool is_copy = i.name == "MOV" || i.is("IMAD.MOV");
    const bool is_xor = i.is("LOP3") && i.operands.find("0x3c") != std::string::npos;  // with a zero: define_anew
    if (is_copy || is_xor) {
      origin = 0;
      for (size_t r = 0; r < num_registers; r++)
        if (use.read[r]) origin |= from[r];
      if (is_xor && origin != from_elsewhere) origin &= ~from_elsewhere;
      if (origin == 0) origin = from_elsewhere;
    }
    for (size_t r = 0; r < num_registers; r++)
      if (use.written[r]) from[r] = i.is_predicated ? from[r] | origin : origin;
  };
  follow_paths(code, blocks, unknown, step, [](Origins& before, const Origins& state) {
    const Origins was = before;
    for (size_t r = 0; r < num_registers; r++) before[r] |= state[r];
    return before != was;
  });
  return faults;
}

// Products that may be under way: a group, with the registers that its products read and write.
struct Products {
  Registers rows, results;
  std::string key() const { return rows.to_string() + results.to_string(); }
  bool operator<(const Products& other) const { return key() < other.key(); }
};

// What is done too early: between a product's start and the wait for it, its rows must not be written, and its results
// neither read nor written; and between a fence and a product neither. A line for each.
inline std::set<std::string> touched_products(const Code& code, const std::vector<Block>& blocks) {
  // The groups on some path to here, the oldest first, the last one not committed; and the registers written since the
  // last WARPGROUP.ARRIVE, which is what becomes of wgmma.fence.
  using Groups = std::vector<Products>;
  using States = std::map<Groups, Registers>;
  std::set<std::string> faults;
  auto step_one = [&](Groups& groups, Registers& touched, const Instruction& i) {
    const RegisterUse use = registers_used(i);
    const Registers rows = use.read & ~use.written;
    int last = 0;
    if (i.is("WARPGROUP.ARRIVE")) {
      touched.reset();
    } else if (i.is("WARPGROUP.DEPBAR.LE") && sscanf(i.operands.c_str(), "gsb0, 0x%x", &last) == 1) {
      groups.erase(groups.begin(), groups.end() - std::min<ptrdiff_t>(last + 1, ptrdiff_t(groups.size())));
    } else if (i.is("HGMMA")) {
      for (const Products& group : groups)
        if ((group.results & rows).any()) faults.insert("multiplies unfinished results: " + i.operands);
      if ((touched & (use.read | use.written)).any()) faults.insert("written after the fence: " + i.operands);
      groups.back().rows |= rows, groups.back().results |= use.written;
      if (i.operands.find("gsb0") != std::string::npos) groups.emplace_back();
    } else {
      for (const Products& group : groups) {
        if ((group.rows & use.written).any()) faults.insert("rows under way: " + i.name + " " + i.operands);
        if ((group.results & (use.read | use.written)).any())
          faults.insert("results under way: " + i.name + " " + i.operands);
      }
      touched |= use.written;
    }
  };
  auto step = [&](States& states, const Instruction& i) {
    States after;
    for (const auto& [before, written] : states) {
      Groups groups = before;
      Registers touched = written;
      step_one(groups, touched, i);
      after[groups] |= touched;
    }
    states = after;
  };
  follow_paths(code, blocks, States{{Groups(1), {}}}, step, [](States& before, const States& states) {
    bool changes = false;
    for (const auto& [groups, touched] : states) {
      const auto [at, is_new] = before.emplace(groups, touched);
      changes |= is_new || (touched & ~at->second).any();
      at->second |= touched;
    }
    return changes;
  });
  return faults;
}

// What is wrong with the registers of a kernel's products by wgmma.
inline std::set<std::string> faults_of_products(const Code& code) {
  const std::vector<Block> blocks = blocks_of(code);
  std::set<std::string> faults = overwritten_rows(code, blocks);
  faults.merge(touched_products(code, blocks));
  return faults;
}

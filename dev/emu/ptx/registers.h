// Which of a kernel's registers can share a place in the frame, because none holds a value while another does.
// Compilers number registers without end; frames that fit into a cache save a sixth of the interpreter's time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emu::ptx {

// What an instruction does to registers, and which instruction may follow.
struct RegisterUse {
  std::vector<int> reads, writes;  // what is written under a condition is also read: the old value may stay
  std::vector<uint32_t> next;
};

// For each register the first and last instruction between which it must keep its place; {1, 0} if it has no use.
struct Lifetime {
  uint32_t first = 1, last = 0;
};
std::vector<Lifetime> lifetimes_of(const std::vector<RegisterUse>& instructions, size_t num_registers);

// Places for registers of `bytes` each, 0 if it has none. Returns the bytes of all places.
size_t assign_places(const std::vector<Lifetime>& lifetimes, const std::vector<int>& bytes,
                     std::vector<int32_t>& places);

}  // namespace emu::ptx

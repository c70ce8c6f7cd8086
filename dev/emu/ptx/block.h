// Runs a kernel's blocks, one after another.
//
// A warp's lanes that are at the same instruction are a group. In most blocks the group with the lowest instruction
// runs, and groups that meet become one, as a GPU does; in every fourth block a random group runs, groups fall apart at
// random, and only what lanes do together joins them. In every other block a warp runs until its lanes wait or have
// ended, in the others it is interrupted after at most 400 instructions.
#pragma once
#include <memory>
#include "../emu.h"
#include "warp.h"

namespace emu::ptx {

struct Group {
  uint32_t pc, lanes;
  bool waits;  // at the instruction, for other lanes or warps
};

struct ScheduledWarp : Warp {
  std::vector<Group> groups;
  bool able = false;               // one of them does not wait
  bool must_change_group = false;  // the one that runs has waited for an mbarrier in vain
};

struct Barrier {
  uint32_t threads = 0, arrived = 0, warps = 0;  // for how many threads it is; how many have come; the warps, as bits
  uint32_t count = 0;                            // of bar.red: threads whose predicate holds
  Races::Clock arrived_before;                   // of those who do not wait
};

class Block {
 public:
  // `races`: where they are looked for, or null.
  Block(Code& code, dim3 grid, dim3 block, size_t shared_bytes, Races* races);
  void run(uint3 index);

 private:
  void make_frame(uint32_t warp);
  void set_specials(uint3 index, bool of_block_alone);
  void start(uint3 index);
  ScheduledWarp* draw();
  void run_warp(ScheduledWarp& w, uint32_t budget);
  bool pick(ScheduledWarp& w);
  void control(ScheduledWarp& w, const Op& op);
  void branch(ScheduledWarp& w, const Op& op, uint32_t taken);
  void exit(ScheduledWarp& w);
  void meet(ScheduledWarp& w, const Op& op);
  void complete(ScheduledWarp& w, uint32_t pc, uint32_t mask, uint32_t asked_by);
  bool has_come(ScheduledWarp& w);
  void reach_barrier(ScheduledWarp& w, const Op& op);
  void reach_warpgroup(ScheduledWarp& w, const Op& op);
  void release(uint32_t number);
  void release_warp(ScheduledWarp& w, const Barrier& barrier);
  [[noreturn]] void explain_deadlock();
  std::string state_of(uint32_t thread) const;

  Code& code_;
  dim3 grid_, block_;
  uint32_t shared_bytes_, num_threads_, num_ended_ = 0;
  Races* races_;
  std::vector<std::unique_ptr<ScheduledWarp>> warps_;
  std::vector<unsigned char> local_;
  ScheduledWarp* runner_ = nullptr;  // the warp that was drawn last
  Barrier barriers_[16];
  SharedState state_;
  bool hurries_ = false, falls_apart_ = false;
};

}  // namespace emu::ptx

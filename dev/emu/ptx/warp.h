// What an instruction's handler sees of the block that runs.
#pragma once
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <vector>
#include "../races.h"
#include "code.h"

namespace emu::ptx {

constexpr int lanes = 32;

// The lanes' asynchronous copies that one instruction has started and that are not complete.
struct PendingCopies {
  uint32_t rest = 0;  // lanes
  unsigned char* to[lanes];
  const unsigned char* from[lanes];
  uint32_t group[lanes];  // of the lane's committed groups
  uint32_t bytes_read[lanes];
  uint32_t bytes;
  uint32_t number;  // of the instructions of this kind that the warp has executed
};

// An mbarrier: a phase is complete when `expected` arrivals and all bytes that are to come have come.
struct Mbarrier {
  uint32_t expected, missing;  // arrivals
  int64_t bytes = 0;           // that are to come
  uint32_t phase = 0;
  Races::Clock arriving, complete;  // of this phase, and of all that are complete
};

// What ends some time after it has been started, and then arrives at an mbarrier: a bulk copy, or all asynchronous
// copies that lanes of a warp have started before.
struct Arrival {
  const Op* op;
  uint32_t warp, lanes, mbarrier;  // lanes: as bits; mbarrier: where in shared memory
  unsigned char* to = nullptr;     // of a bulk copy
  const unsigned char* from = nullptr;
  uint32_t bytes = 0;
  uint32_t copies = 0, time = 0;  // of other copies: those before this number have been started before; when
  Races::Clock clock;             // of the lanes when it was started
};

struct Warp;

// What the warps of a block share.
struct SharedState {
  std::map<uint32_t, Mbarrier> mbarriers;  // by where they are in shared memory
  std::vector<Arrival> arrivals;
  bool late = false;        // these end when somebody waits for them; else at once
  uint32_t vain_waits = 0;  // for mbarriers, since something has changed
  std::vector<Warp*> warps;
};

// The values of an asynchronous product's operands in shared memory.
struct Factors;

// A wgmma of a warp that is not complete.
struct PendingProduct {
  const Op* op;
  uint32_t group;                 // of the warp's committed groups
  uint64_t a, b;                  // descriptors
  bool adds;                      // to what the accumulators hold
  std::shared_ptr<Factors> read;  // what it read at once; null: it reads when it is waited for
};

// A register of a wgmma, to which other instructions have access only at certain times.
struct WgmmaRegister {
  uint32_t accessed = 0;      // since the last wgmma.fence: by which op, plus 1
  uint32_t accumulating = 0;  // how many pending products accumulate into it
  uint32_t factors = 0;       // how many pending products read elements of A in it
  int64_t shape = 0;          // of the product that used it last since the last wgmma.fence
};

struct Warp {
  unsigned char* frame = nullptr;
  alignas(64) uint32_t mask[lanes];  // ~0 for the lanes that execute the instruction, 0 for the others
  uint32_t active = 0;               // the same as bits
  uint32_t existing = 0;             // lanes that have a thread
  uint32_t number = 0;               // of the block's warps
  const Code* code = nullptr;
  Races* races = nullptr;          // null: they are not looked for
  uint32_t shared_bytes = 0;       // of the block
  unsigned char* local = nullptr;  // the lanes' local memory, one behind the other
  std::vector<PendingCopies> copies;
  uint32_t committed[lanes] = {};  // groups of copies
  uint32_t started_copies = 0;     // by how many instructions
  SharedState* block = nullptr;
  bool has_waited_in_vain = false;  // at an mbarrier: other lanes and warps should run now
  bool copies_late = false;         // they are made when they are waited for; else at once
  std::vector<PendingProduct> products;
  uint32_t committed_products = 0;  // groups
  bool products_late = false;       // they read shared memory when they are waited for; else at once
  bool had_wgmma_fence = false;
  std::vector<WgmmaRegister> wgmma_registers;  // of the code's
  int flip = 0;                                // 31: of lanes that write to one place, the first one's value stays

  template <class T>
  T* at(int32_t place) {
    return reinterpret_cast<T*>(frame + place);
  }
  template <class T>
  const T* at(int32_t place) const {
    return reinterpret_cast<const T*>(frame + place);
  }

  void set_active(uint32_t now) {
    if (now == active) return;
    active = now;
    for (int i = 0; i < lanes; i++) mask[i] = uint32_t(0) - (now >> i & 1);
  }

  // In the active lanes, register `place` = values.
  template <class T>
  void set(int32_t place, const T (&values)[lanes]) {
    T* const to = at<T>(place);
    if (active == ~0u) memcpy(to, values, sizeof values);
    else
      for (int i = 0; i < lanes; i++) to[i] = mask[i] != 0 ? values[i] : to[i];
  }

  uint32_t thread(int lane) const { return number * lanes + uint32_t(lane); }
  uint32_t index_of(const Op& op) const { return uint32_t(&op - code->ops.data()); }

  // addresses = op.at[0] + op.number. Where addresses have 32 bits, so has the sum: nvcc lets offsets lie below 0.
  void read_addresses(const Op& op, uint64_t (&addresses)[lanes]) const {
    if (op.narrow_address)
      for (int i = 0; i < lanes; i++) addresses[i] = uint32_t(at<uint32_t>(op.at[0])[i] + uint32_t(op.number));
    else
      for (int i = 0; i < lanes; i++) addresses[i] = at<uint64_t>(op.at[0])[i] + uint64_t(op.number);
  }

  // Bit i: lane i's predicate holds.
  uint32_t bits(int32_t predicate) const {
    const uint32_t* const p = at<uint32_t>(predicate);
    uint32_t b = 0;
    for (int i = 0; i < lanes; i++) b |= (p[i] & 1) << i;
    return b;
  }
};

inline int first_lane(uint32_t lanes_as_bits) { return __builtin_ctz(lanes_as_bits); }

// What bar.red makes of the threads' predicates; or bar.arrive, which does not wait.
enum class Reduction { none, any, all, count, only_arrives };

// Ends, for these lanes, the copies of all groups that have been committed but the last `groups_left`; with -1, all
// copies.
void complete_copies(Warp& w, uint32_t of_lanes, int64_t groups_left);

// Ends, for these lanes, the copies that were started before `number` (PendingCopies), as if at this time.
void complete_copies_before(Warp& w, uint32_t of_lanes, uint32_t number, uint32_t time);

// Where in the block's shared memory an operand's address is; so many bytes from there must be in it.
uint32_t shared_offset(const Warp& w, const Op& op, int lane, uint64_t address, uint32_t bytes);
// Checks that the device may read these bytes.
void check_readable(const Warp& w, const Op& op, int lane, uint64_t address, uint32_t bytes);

// Ends the program with a message about a thread and the instruction that it executes.
[[noreturn]] __attribute__((format(printf, 4, 5))) void fail(const Warp& w, const Op& op, int lane, const char* format,
                                                             ...);
void run_proxy_fence(Warp& w, const Op& op);
void set_thread(const Warp& w, int lane);  // threadIdx, for messages

}  // namespace emu::ptx

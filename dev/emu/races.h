// Which accesses to shared memory no barrier orders.
//
// Time grows with every barrier. An access is stamped with the time. For each warp and lane it is known up to which
// time the accesses of the others are ordered before what it does now: bar.sync orders all accesses of the warps that
// take part, bar.warp.sync (__syncwarp) all accesses of its lanes. Shuffles, votes and mma order nothing. Each cell of
// shared memory has its last write remembered, and each warp's last reads. Two accesses to a cell, one of them a write,
// are a race if neither is ordered before the other, except two writes of the same value, and two atomic operations. In
// which order threads run makes no difference, as long as a barrier is told of before what its threads do after it.
//
// A wgmma reads shared memory from its start until it has been waited for: a write in between is a race, whoever makes
// it. It reads through the async proxy. What threads and cp.async have written before, through the generic proxy, must
// be made visible to it by a fence.proxy.async somewhere between the write and the read: by the writer before a
// barrier, or by the reader after one.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace emu {

struct Access {
  uint32_t thread = 0, op = 0;  // op: where in the code, a number that the caller understands
  bool writes = false;
  bool needs_proxy_fence = false;  // a barrier orders the two, and a fence.proxy.async is missing
};

class Races {
 public:
  // `report` gets the byte, what is done there now, and what was done before.
  using Report = std::function<void(uint32_t byte, const Access& now, const Access& before)>;
  explicit Races(Report report);

  // cell_bytes: 1, 2 or 4, not more than an access has. `has_clocks`: the kernel uses wgmma, mbarriers or bar.arrive.
  void begin_block(uint32_t num_warps, uint32_t cell_bytes, bool has_clocks = false);
  // Smaller cells from now on, in the first `bytes` of shared memory; what has been accessed stays known.
  void split_cells(uint32_t cell_bytes, uint32_t bytes);
  uint32_t cell_bytes() const { return 1u << shift_; }
  void block_barrier(uint32_t warps);                   // bits
  void warp_barrier(uint32_t warp, uint32_t lanes_in);  // bits; of all existing lanes: 0xffffffff

  // Bytes [first, first + bytes) of shared memory.
  void read(uint32_t warp, uint32_t lanes_in, uint32_t first, uint32_t bytes, uint32_t op);
  enum class Kind { plain, same_value, atomic };
  void write(uint32_t thread, uint32_t first, uint32_t bytes, uint32_t op, Kind kind);
  // Whether the last write to this cell is the thread's, since the last barrier of any threads.
  bool has_just_written(uint32_t thread, uint32_t byte) const;
  // An asynchronous copy is a write that nobody may read before the thread has waited for it.
  void start_copy(uint32_t thread, uint32_t first, uint32_t bytes, uint32_t op);
  void end_copy(uint32_t thread, uint32_t first, uint32_t bytes) { end_copy(thread, first, bytes, time_); }
  void end_copy(uint32_t thread, uint32_t first, uint32_t bytes, uint32_t time);
  // An asynchronous read of the async proxy by all lanes of a warp. Other warps may write there only after the end and
  // a barrier, and nobody may before the end.
  void start_async_read(uint32_t warp, uint32_t first, uint32_t bytes, uint32_t op);
  void end_async_read(uint32_t warp, uint32_t first, uint32_t bytes, uint32_t op);
  void proxy_fence(uint32_t warp, uint32_t lanes_in);  // fence.proxy.async; of all existing lanes: 0xffffffff

  // What an mbarrier, or those who have only arrived at a barrier, know: up to which time each thread's accesses are
  // ordered before those who wait, and visible to their asynchronous reads. The last is the async proxy's own.
  struct Clock {
    std::vector<uint32_t> known, fenced;
    void join(const Clock& other);
  };
  uint32_t release(uint32_t warp, uint32_t lanes_in, Clock& clock);  // lanes arrive; returns the time
  void acquire(uint32_t warp, const Clock& clock);                   // lanes have waited: counts for the whole warp
  // A bulk copy is a write of the async proxy, which only those may read whom an mbarrier has told of its end.
  void start_bulk_copy(uint32_t thread, uint32_t first, uint32_t bytes, uint32_t op);
  void end_bulk_copy(uint32_t thread, uint32_t first, uint32_t bytes, Clock& clock);

 private:
  static constexpr uint32_t num_cells = 227 * 1024, lanes = 32, max_warps = 32;
  static constexpr uint32_t pending = ~0u;  // the time of a copy that is not complete

  struct Cell {
    uint32_t written, writer, write_op;  // writer: thread, and whether it was atomic
    uint32_t read;                       // when last, by any warp
  };
  struct Reads {
    uint32_t time, lanes, op;
    uint32_t pending;  // asynchronous reads that have not ended
  };

  void check_reads(uint32_t thread, uint32_t cell, uint32_t op);
  bool is_ordered(uint32_t warp, uint32_t lane, uint32_t other_thread, uint32_t time) const;
  void report(uint32_t cell, uint32_t thread, uint32_t op, bool writes, const Access& before);
  void set_floor(uint32_t warp);
  uint32_t num_clocks() const { return num_warps_ * lanes + 1; }
  uint32_t* known(uint32_t warp) { return known_.data() + warp * num_clocks(); }
  const uint32_t* known(uint32_t warp) const { return known_.data() + warp * num_clocks(); }
  uint32_t* fenced(uint32_t warp) { return fenced_.data() + warp * num_clocks(); }
  void check_proxy(uint32_t warp, uint32_t cell, uint32_t op);

  Report report_;
  uint32_t time_ = 1, num_warps_ = 1, shift_ = 2;
  uint32_t seen_[max_warps][max_warps];     // [w][v]: v's accesses before that time are ordered before w's next
  uint32_t full_[max_warps];                // [w]: the same time for w's lanes among themselves
  uint32_t lane_[max_warps][lanes][lanes];  // [w]: the same time for pairs of w's lanes, if `partial_`
  bool partial_[max_warps];
  uint32_t floor_[max_warps];  // the least of seen_[w] and full_[w]
  // If the kernel has clocks: [warp][thread], up to which time the thread's accesses are ordered before the warp's next
  // by other ways than barriers, and its writes visible to the warp's asynchronous reads; the last is the async proxy.
  bool has_clocks_ = false;
  uint32_t begin_ = 1;  // of the block
  std::vector<uint32_t> known_, fenced_;
  uint32_t fence_lanes_[max_warps];  // that have had a fence.proxy.async since the last barrier
  uint32_t released_[max_warps];     // when lanes of the warp have arrived somewhere last
  uint32_t num_async_reads_ = 0;     // that have not ended
  std::unique_ptr<Cell[]> cells_;
  std::unique_ptr<Reads[]> reads_[max_warps];  // made when the warp first reads
};

// In shared_memory.cpp: ends the program with a message about a race; `describe` says of an op where it is.
[[noreturn]] void fatal_race(uint32_t byte, const Access& now, const Access& before,
                             const std::function<std::string(uint32_t op)>& describe);

}  // namespace emu

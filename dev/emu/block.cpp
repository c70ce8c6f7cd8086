// Runs one kernel: its blocks one after another in a random order, the threads of a block as fibers.
//
// A thread runs until it has to wait for others: at a barrier of the block, or in a collective of its warp. Then a
// thread drawn from those that can continue does so. A fiber whose thread has ended starts the next thread itself: a
// kernel without barriers runs on one fiber and costs a function call per thread.
//
// There is no lockstep and no weak memory: what a fence would order is always ordered. Threads take turns at barriers
// and collectives only, so two accesses to global memory without such a point between them meet in one of the two
// orders of whole runs, never in the middle. A kernel that waits for another block (spinning, grid-wide barriers)
// hangs.
#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>
#include "emu.h"

// The kernels' `extern __shared__` array. The bytes after the launch's shared memory are poisoned.
alignas(1024) unsigned char shared_memory[emu::max_shared_bytes];

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
const int warpSize = 32;

namespace emu {
namespace {

// Functions that run at every switch are compiled without ASan's checks, which would take as long as the work: they
// access only `block`.
#define FAST __attribute__((no_sanitize("address")))

constexpr uint32_t max_threads = 1024;

// A stack on which one CUDA thread after another runs.
struct Fiber {
  boost::context::fiber context;  // where it resumes; empty while it runs
  uint32_t thread = 0;            // which thread it runs
  void* stack_bottom = nullptr;   // for ASan
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;
};

// A CUDA thread of the block that runs.
struct Thread {
  enum State { unstarted, able, at_barrier, in_collective, ended };
  State state;
  uint3 index;
  Fiber* fiber;          // from its start to its end
  SyncPoint sync_point;  // while it waits: where
  uint32_t barrier;      // at a barrier: which
  Site site;
  unsigned mask;  // in a collective: the lanes that take part, and this lane's operands
  int operand, width;
  uint64_t value;  // its operand, then its result
  AsyncCopies copies;
};

// The lanes of a mask that have reached a collective.
struct Group {
  unsigned mask, arrived;
};

// The groups of a warp that are not complete. Masks may overlap: while half a warp is still in a collective of its own,
// the other half may already wait for the whole warp.
struct Warp {
  Group groups[32];
  uint32_t num_groups;
  uint32_t ready[32];  // its threads that can start or continue, in no order
  uint32_t num_ready;
};

// A block has 16; __syncthreads is number 0.
struct Barrier {
  uint32_t threads, arrived;  // how many it is for, as the first says; how many have come
};
constexpr uint32_t num_barriers = 16;

struct Block {
  const std::function<void()>* run_thread;
  uint32_t num_threads, num_ended;
  Thread threads[max_threads];
  uint32_t ready[max_threads / 32];  // warps with threads that are ready, in no order
  uint32_t num_ready;
  bool hurries;      // one warp runs as far as it can before another does
  bool copies_late;  // asynchronous copies run when they are waited for; else at once
  uint32_t runner;   // the warp that was drawn last
  Barrier barriers[num_barriers];
  int predicates;  // at barrier 0: how many are true
  Warp warps[max_threads / 32];
};
Block block;

Fiber main_fiber;  // the OS thread's own stack
Fiber* current = &main_fiber;
Fiber* left = nullptr;  // the fiber that was last switched away from
// Never destroyed: boost would unwind the stack of a fiber that is destroyed.
std::vector<Fiber*>& fibers = *new std::vector<Fiber*>;
std::vector<Fiber*>& idle = *new std::vector<Fiber*>;  // those without a thread

// ----------------------------------------------------------------------------
// Fibers

// ASan must know which stack is in use. `finish` runs on the new stack.
FAST void start_switch(Fiber& from, Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack_bottom, to.stack_bytes);
#endif
  left = &from;
  current = &to;
}

FAST void finish_switch(void* fake_stack, boost::context::fiber&& came_from) {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(fake_stack, &bottom, &bytes);
  left->stack_bottom = const_cast<void*>(bottom);  // how the main stack's bounds become known
  left->stack_bytes = bytes;
#else
  (void)fake_stack;
#endif
  left->context = std::move(came_from);
}

// Switches to another fiber. Returns when a fiber switches back.
FAST void switch_to(Fiber& to) {
  Fiber& self = *current;
  start_switch(self, to);
  boost::context::fiber came_from = std::move(to.context).resume();
  finish_switch(self.fake_stack, std::move(came_from));
}

void run_threads();

Fiber* new_fiber() {
  auto* fiber = new Fiber;
  boost::context::protected_fixedsize_stack allocator(fiber_stack_bytes);
  boost::context::stack_context stack = allocator.allocate();
  // The tops of stacks at the same offset within their pages would share a few cache lines: spread them over a page.
  stack.sp = static_cast<char*>(stack.sp) - fibers.size() % 16 * 256;
  stack.size -= fibers.size() % 16 * 256;
  fiber->stack_bottom = static_cast<char*>(stack.sp) - stack.size;
  fiber->stack_bytes = stack.size;
  fiber->context = boost::context::fiber(std::allocator_arg, boost::context::preallocated(stack.sp, stack.size, stack),
                                         allocator, [](boost::context::fiber&& came_from) {
                                           finish_switch(nullptr, std::move(came_from));
                                           run_threads();
                                           return boost::context::fiber();  // not reached
                                         });
  fibers.push_back(fiber);
  return fiber;
}

FAST Fiber& take_fiber(uint32_t thread) {
  if (idle.empty()) idle.push_back(new_fiber());
  Fiber* fiber = idle.back();
  idle.pop_back();
  fiber->thread = thread;
  return *fiber;
}

// ----------------------------------------------------------------------------
// Scheduling

constexpr uint32_t nobody = ~0u;

// Draws the thread that continues or starts; none if all threads that have not ended wait.
// In every other block the warps advance at about the same rate; in the rest, one runs until its threads wait at a
// barrier or have ended, which shows what a warp that is a phase ahead of the others would overwrite.
FAST uint32_t draw() {
  if (block.num_ready == 0) return nobody;
  if (!block.hurries || block.warps[block.runner].num_ready == 0)
    block.runner = block.ready[rng.below(block.num_ready)];
  Warp& warp = block.warps[block.runner];
  uint32_t& drawn = warp.ready[rng.below(warp.num_ready)];
  const uint32_t thread = drawn;
  drawn = warp.ready[--warp.num_ready];
  if (warp.num_ready == 0) {
    uint32_t i = 0;
    while (block.ready[i] != block.runner) i++;
    block.ready[i] = block.ready[--block.num_ready];
  }
  return thread;
}

FAST void set_ready(uint32_t thread) {
  Warp& warp = block.warps[thread / 32];
  if (warp.num_ready == 0) block.ready[block.num_ready++] = thread / 32;
  warp.ready[warp.num_ready++] = thread;
}

FAST void set_able(uint32_t thread) {
  block.threads[thread].state = Thread::able;
  set_ready(thread);
}

[[noreturn]] void explain_deadlock();

// The body of every fiber: its thread, then the next one, without end.
FAST void run_threads() {
  for (;;) {
    Thread& thread = block.threads[current->thread];
    thread.fiber = current;
    thread.state = Thread::able;
    threadIdx = thread.index;
    (*block.run_thread)();
    end_accesses();
    thread.state = Thread::ended;
    block.num_ended++;

    const uint32_t next = draw();
    if (next != nobody && block.threads[next].state == Thread::unstarted) {
      current->thread = next;
      continue;
    }
    if (next == nobody && block.num_ended < block.num_threads) explain_deadlock();
    idle.push_back(current);
    switch_to(next == nobody ? main_fiber : *block.threads[next].fiber);
  }
}

// The running thread has reached a synchronization; its state says whether it can continue. Runs others until it is
// drawn.
FAST void wait() {
  const uint32_t self = current->thread;
  const uint32_t next = draw();
  if (next == nobody) explain_deadlock();
  if (next != self)
    switch_to(block.threads[next].state == Thread::unstarted ? take_fiber(next) : *block.threads[next].fiber);
  threadIdx = block.threads[self].index;
}

// What all blocks of a launch share.
void prepare_blocks(const Launch& launch) {
  gridDim = launch.grid;
  blockDim = launch.block;
  block.run_thread = &launch.thread;
  block.num_threads = launch.block.x * launch.block.y * launch.block.z;
  uint32_t i = 0;
  for (unsigned z = 0; z < launch.block.z; z++)
    for (unsigned y = 0; y < launch.block.y; y++)
      for (unsigned x = 0; x < launch.block.x; x++) block.threads[i++].index = {x, y, z};
}

// Copies that no thread waits for are forgotten.
void end_copies() {
  for (uint32_t i = 0; i < block.num_threads; i++) {
    for (const AsyncCopy& copy : block.threads[i].copies.pending) copy_ends(i, copy);
    block.threads[i].copies.clear();
  }
}

void run_block(const Launch& launch) {
  fill(shared_memory, 0xff, launch.shared_bytes);
  begin_block_accesses((block.num_threads + 31) / 32);
  block.num_ended = 0;
  for (Barrier& barrier : block.barriers) barrier.arrived = 0;
  block.predicates = 0;
  block.hurries = rng.next() % 2 != 0;
  block.copies_late = rng.next() % 2 != 0;
  block.runner = 0;
  for (uint32_t i = 0; i < block.num_threads; i++) {
    block.threads[i].state = Thread::unstarted;
    set_ready(i);
  }
  running().in_thread = true;
  switch_to(take_fiber(draw()));
  running().in_thread = false;
  end_copies();
}

// The group of this mask; a new one if no lane has reached it yet.
FAST Group& group_of(Warp& warp, unsigned mask) {
  for (uint32_t i = 0; i < warp.num_groups; i++)
    if (warp.groups[i].mask == mask) return warp.groups[i];
  return warp.groups[warp.num_groups++] = {mask, 0};
}

// ----------------------------------------------------------------------------
// Errors between threads

const char* name_of(SyncPoint sync_point) {
  switch (sync_point) {
    case SyncPoint::syncthreads: return "__syncthreads";
    case SyncPoint::syncthreads_or: return "__syncthreads_or";
    case SyncPoint::syncthreads_and: return "__syncthreads_and";
    case SyncPoint::syncthreads_count: return "__syncthreads_count";
    case SyncPoint::bar_sync: return "bar.sync";
    case SyncPoint::syncwarp: return "__syncwarp";
    case SyncPoint::shfl: return "__shfl_sync";
    case SyncPoint::shfl_up: return "__shfl_up_sync";
    case SyncPoint::shfl_down: return "__shfl_down_sync";
    case SyncPoint::shfl_xor: return "__shfl_xor_sync";
    case SyncPoint::ballot: return "__ballot_sync";
    case SyncPoint::any: return "__any_sync";
    case SyncPoint::all: return "__all_sync";
    case SyncPoint::reduce_add: return "__reduce_add_sync";
    case SyncPoint::reduce_min_signed:
    case SyncPoint::reduce_min_unsigned: return "__reduce_min_sync";
    case SyncPoint::reduce_max_signed:
    case SyncPoint::reduce_max_unsigned: return "__reduce_max_sync";
    case SyncPoint::mma: return "mma";
    case SyncPoint::ldmatrix:
    case SyncPoint::ldmatrix_trans: return "ldmatrix";
  }
  return "?";
}

// "thread (3,0,0), which has ended", into `text`.
const char* describe(uint32_t number, char (&text)[512]) {
  if (number >= block.num_threads) {
    snprintf(text, sizeof text, "thread number %u, which the block of %u does not have", number, block.num_threads);
    return text;
  }
  const Thread& t = block.threads[number];
  const int n = snprintf(text, sizeof text, "thread (%u,%u,%u), which ", t.index.x, t.index.y, t.index.z);
  if (t.state == Thread::ended) snprintf(text + n, sizeof text - n, "has ended");
  else if (t.state == Thread::at_barrier)
    snprintf(text + n, sizeof text - n, "waits in %s at %s:%d", name_of(t.sync_point), t.site.file, t.site.line);
  else if (t.state == Thread::in_collective)
    snprintf(text + n, sizeof text - n, "waits in %s at %s:%d, mask 0x%08x", name_of(t.sync_point), t.site.file,
             t.site.line, t.mask);
  else snprintf(text + n, sizeof text - n, "has not come");
  return text;
}

FAST bool is_at_barrier(const Thread& t, uint32_t barrier) {
  return t.state == Thread::at_barrier && t.barrier == barrier;
}

// No thread can continue, and not all have ended. Names a thread that waits, and one that it waits for. Threads in a
// collective are named first: if others wait at a barrier, they are the reason.
[[noreturn]] void explain_deadlock() {
  char other[512];
  for (uint32_t i = 0; i < block.num_threads; i++) {
    const Thread& t = block.threads[i];
    if (t.state != Thread::in_collective) continue;
    threadIdx = t.index;
    const unsigned absent = t.mask & ~group_of(block.warps[i / 32], t.mask).arrived;
    fatal("deadlock: waits in %s at %s:%d, mask 0x%08x, for lanes 0x%08x, among them %s", name_of(t.sync_point),
          t.site.file, t.site.line, t.mask, absent, describe(i / 32 * 32 + uint32_t(__builtin_ctz(absent)), other));
  }
  uint32_t waiting = 0, missing = 0;
  while (block.threads[waiting].state != Thread::at_barrier) waiting++;
  const Thread& t = block.threads[waiting];
  while (missing < block.num_threads && is_at_barrier(block.threads[missing], t.barrier)) missing++;
  threadIdx = t.index;
  fatal("deadlock: waits in %s at %s:%d, where %u of %u threads are, for %s", name_of(t.sync_point), t.site.file,
        t.site.line, block.barriers[t.barrier].arrived, block.barriers[t.barrier].threads, describe(missing, other));
}

FAST bool same_file(Site a, Site b) { return a.file == b.file || strcmp(a.file, b.file) == 0; }

// Threads that synchronize must be in the same statement. `first` reached it before.
FAST void check_same_statement(const Thread& first, SyncPoint sync_point, Site site) {
  if (first.sync_point == sync_point && first.site.line == site.line && same_file(first.site, site)) return;
  char other[512];
  fatal("divergence: is in %s at %s:%d and should synchronize with %s", name_of(sync_point), site.file, site.line,
        describe(uint32_t(&first - block.threads), other));
}

// ----------------------------------------------------------------------------
// Warp collectives

// Lane `lane`'s source in a shuffle. As in PTX's shfl: a segment is `width` lanes; up, down and xor that lead out of it
// (xor: above it) give the lane its own value.
FAST int source_lane(const Thread& t, int lane) {
  const int first = lane & ~(t.width - 1);
  const int last = first + t.width - 1;
  int source = lane;
  if (t.sync_point == SyncPoint::shfl) source = first + (t.operand & (t.width - 1));
  if (t.sync_point == SyncPoint::shfl_up) source = lane - t.operand >= first ? lane - t.operand : lane;
  if (t.sync_point == SyncPoint::shfl_down) source = lane + t.operand <= last ? lane + t.operand : lane;
  if (t.sync_point == SyncPoint::shfl_xor) source = (lane ^ t.operand) <= last ? lane ^ t.operand : lane;
  return source;
}

// The result of a vote or a reduction, the same for every lane of the mask.
uint64_t reduce(SyncPoint sync_point, const Thread* lanes, unsigned mask) {
  const auto value = [&](int lane) { return uint32_t(lanes[lane].value); };
  const int first = __builtin_ctz(mask);
  uint32_t result = sync_point == SyncPoint::ballot ? 0 : value(first);
  for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    const uint32_t v = value(lane);
    switch (sync_point) {
      case SyncPoint::ballot: result |= v << lane; break;
      case SyncPoint::any: result |= v; break;
      case SyncPoint::all: result &= v; break;
      case SyncPoint::reduce_add: result += lane != first ? v : 0; break;
      case SyncPoint::reduce_min_signed: result = uint32_t(min(int(result), int(v))); break;
      case SyncPoint::reduce_max_signed: result = uint32_t(max(int(result), int(v))); break;
      case SyncPoint::reduce_min_unsigned: result = min(result, v); break;
      case SyncPoint::reduce_max_unsigned: result = max(result, v); break;
      default: break;
    }
  }
  return result;
}

// All lanes of the mask have reached the collective: computes all results before any lane continues.
FAST void complete(SyncPoint sync_point, Thread* lanes, unsigned mask) {
  const bool shuffles = sync_point >= SyncPoint::shfl && sync_point <= SyncPoint::shfl_xor;
  if (sync_point >= SyncPoint::mma) {
    void* operands[32];
    for (int lane = 0; lane < 32; lane++) operands[lane] = reinterpret_cast<void*>(lanes[lane].value);
    if (sync_point == SyncPoint::mma) run_mma(operands);
    else run_ldmatrix(uint32_t(lanes - block.threads) / 32, operands, sync_point == SyncPoint::ldmatrix_trans);
  } else if (shuffles) {
    uint64_t brought[32];
    for (unsigned rest = mask; rest != 0; rest &= rest - 1)
      brought[__builtin_ctz(rest)] = lanes[__builtin_ctz(rest)].value;
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      const int source = source_lane(lanes[lane], lane);
      // The value of a lane that does not take part is undefined: NaN here, so that it is not used unnoticed.
      lanes[lane].value = (mask >> (source & 31) & 1) != 0 ? brought[source & 31] : ~uint64_t(0);
    }
  } else if (sync_point == SyncPoint::syncwarp) {
    const uint32_t first = uint32_t(lanes - block.threads), count = min(block.num_threads - first, 32u);
    order_accesses_of_lanes(first / 32, mask == ~0u >> (32 - count) ? ~0u : mask);
  } else {
    const uint64_t result = reduce(sync_point, lanes, mask);
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) lanes[__builtin_ctz(rest)].value = result;
  }
}

// Waits until `threads` threads have come to the barrier. Returns how many of them have a predicate other than 0.
FAST int meet_barrier(uint32_t number, uint32_t threads, SyncPoint sync_point, int predicate, Site site) {
  if (!running().in_thread) fatal("%s at %s:%d: only a kernel can call it", name_of(sync_point), site.file, site.line);
  end_accesses();
  Thread& self = block.threads[current->thread];
  Barrier& barrier = block.barriers[number];
  if (barrier.arrived == 0) {
    barrier.threads = threads;
  } else {
    uint32_t first = 0;
    while (!is_at_barrier(block.threads[first], number)) first++;
    check_same_statement(block.threads[first], sync_point, site);
    if (barrier.threads != threads)
      fatal("%s at %s:%d: %u threads, where the first one said %u", name_of(sync_point), site.file, site.line, threads,
            barrier.threads);
  }
  self.state = Thread::at_barrier;
  self.sync_point = sync_point;
  self.site = site;
  self.barrier = number;
  block.predicates += predicate != 0;
  if (++barrier.arrived == threads) {
    uint32_t warps = 0;
    for (uint32_t i = 0; i < block.num_threads; i++) {
      if (!is_at_barrier(block.threads[i], number)) continue;
      block.threads[i].value = uint64_t(block.predicates);
      set_able(i);
      warps |= 1u << i / 32;
    }
    order_accesses_of_warps(warps);
    barrier.arrived = 0;
    if (number == 0) block.predicates = 0;
  }
  wait();
  return int(self.value);
}

}  // namespace

FAST int meet_block(SyncPoint sync_point, int predicate, Site site) {
  return meet_barrier(0, block.num_threads, sync_point, predicate, site);
}

void bar_sync(int barrier, int threads, Site site) {
  if (barrier < 1 || barrier >= int(num_barriers) || threads < 32 || threads % 32 != 0 ||
      threads > int(block.num_threads))
    fatal("bar.sync at %s:%d: barrier %d of %d threads, in a block of %u", site.file, site.line, barrier, threads,
          block.num_threads);
  meet_barrier(uint32_t(barrier), uint32_t(threads), SyncPoint::bar_sync, 0, site);
}

FAST uint64_t meet_warp(SyncPoint sync_point, unsigned mask, uint64_t value, int operand, int width, Site site) {
  if (!running().in_thread) fatal("%s at %s:%d: only a kernel can call it", name_of(sync_point), site.file, site.line);
  const uint32_t number = current->thread;
  const uint32_t lane = number % 32, first = number - lane;
  Thread& self = block.threads[number];
  if ((mask >> lane & 1) == 0) {
    fatal("%s at %s:%d: lane %u calls it with mask 0x%08x, which is without that lane", name_of(sync_point), site.file,
          site.line, lane, mask);
  }
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
    fatal("%s at %s:%d: width %d is not a power of two up to 32", name_of(sync_point), site.file, site.line, width);
  }
  end_accesses();
  Thread* lanes = block.threads + first;
  Warp& warp = block.warps[number / 32];
  Group& group = group_of(warp, mask);
  if (group.arrived != 0) check_same_statement(lanes[__builtin_ctz(group.arrived)], sync_point, site);
  self.state = Thread::in_collective;
  self.sync_point = sync_point;
  self.site = site;
  self.mask = mask;
  self.value = value;
  self.operand = operand;
  self.width = width;
  group.arrived |= 1u << lane;
  if (group.arrived == mask) {
    group = warp.groups[--warp.num_groups];
    complete(sync_point, lanes, mask);
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) set_able(first + uint32_t(__builtin_ctz(rest)));
  }
  wait();
  return self.value;
}

AsyncCopies& copies_of_thread() { return block.threads[current->thread].copies; }
bool copies_are_late() { return block.copies_late; }
uint32_t number_of_thread() { return current->thread; }

bool in_fiber_guard_page(const void* p) {
  for (const Fiber* fiber : fibers) {
    const auto offset = static_cast<const char*>(p) - static_cast<const char*>(fiber->stack_bottom);
    if (offset >= 0 && offset < 4096) return true;
  }
  return false;
}

void open_shared_memory(size_t bytes) { unpoison(shared_memory, bytes); }
void close_shared_memory() { poison(shared_memory, max_shared_bytes); }

void run_kernel(const Launch& launch) {
  prepare_blocks(launch);
  begin_accesses(launch.shared_bytes);
  std::vector<uint32_t> order(launch.grid.x * size_t(launch.grid.y) * launch.grid.z);
  std::iota(order.begin(), order.end(), 0);
  rng.shuffle(order.data(), uint32_t(order.size()));
  for (const uint32_t b : order) {
    blockIdx = {b % gridDim.x, b / gridDim.x % gridDim.y, b / gridDim.x / gridDim.y};
    run_block(launch);
  }
  end_all_accesses();
}

}  // namespace emu

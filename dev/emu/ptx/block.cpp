#include "block.h"
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <map>
#include "llmc/base/error.h"

extern unsigned char shared_memory[];

namespace emu::ptx {
namespace {

// Frames stay from launch to launch, with the constants of the kernel that used them last.
struct Frame {
  std::vector<unsigned char> bytes;
  const Code* owner = nullptr;
};
std::vector<Frame>& frames() {
  static std::vector<Frame>& frames = *new std::vector<Frame>;
  return frames;
}

unsigned char* aligned(std::vector<unsigned char>& bytes) {
  return reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) / 64 * 64);
}

template <class T>
void fill_lanes(unsigned char* at, T value) {
  std::fill_n(reinterpret_cast<T*>(at), lanes, value);
}

constexpr uint32_t without_end = ~0u;

// Where a thread is.
struct Place {
  uint3 thread, block;
  dim3 block_size, grid_size;
  uint32_t number, num_warps;  // of the thread in its block; of the block
};
using Known = std::map<std::string, uint32_t (*)(const Place&)>;

const Known& specials() {
  static const Known known = {
      {"%tid.x", [](auto& p) { return p.thread.x; }},
      {"%tid.y", [](auto& p) { return p.thread.y; }},
      {"%tid.z", [](auto& p) { return p.thread.z; }},
      {"%ctaid.x", [](auto& p) { return p.block.x; }},
      {"%ctaid.y", [](auto& p) { return p.block.y; }},
      {"%ctaid.z", [](auto& p) { return p.block.z; }},
      {"%ntid.x", [](auto& p) { return p.block_size.x; }},
      {"%ntid.y", [](auto& p) { return p.block_size.y; }},
      {"%ntid.z", [](auto& p) { return p.block_size.z; }},
      {"%nctaid.x", [](auto& p) { return p.grid_size.x; }},
      {"%nctaid.y", [](auto& p) { return p.grid_size.y; }},
      {"%nctaid.z", [](auto& p) { return p.grid_size.z; }},
      {"%laneid", [](auto& p) { return p.number % lanes; }},
      {"%warpid", [](auto& p) { return p.number / lanes; }},
      {"%nwarpid", [](auto& p) { return p.num_warps; }},
      {"%lanemask_eq", [](auto& p) { return 1u << p.number % lanes; }},
      {"%lanemask_lt", [](auto& p) { return (1u << p.number % lanes) - 1; }},
      {"%lanemask_le", [](auto& p) { return (2u << p.number % lanes) - 1; }},
      {"%lanemask_gt", [](auto& p) { return ~((2u << p.number % lanes) - 1); }},
      {"%lanemask_ge", [](auto& p) { return ~((1u << p.number % lanes) - 1); }},
  };
  return known;
}

}  // namespace

void set_thread(const Warp& w, int lane) {
  const uint32_t n = w.thread(lane);
  threadIdx = {n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y};
}

void fail(const Warp& w, const Op& op, int lane, const char* text, ...) {
  char what[512];
  va_list args;
  va_start(args, text);
  vsnprintf(what, sizeof what, text, args);
  va_end(args);
  set_thread(w, lane);
  running().in_thread = true;
  fatal("%s, in %s", what, w.code->describe(w.index_of(op)).c_str());
}

Block::Block(Code& code, dim3 grid, dim3 block, size_t shared_bytes, Races* races)
    : code_(code), grid_(grid), block_(block), shared_bytes_(uint32_t(shared_bytes + code.static_shared_bytes)),
      num_threads_(block.x * block.y * block.z), races_(races),
      local_(code.kernel.local_bytes * ((num_threads_ + lanes - 1) / lanes * lanes)) {
  const uint32_t num_warps = (num_threads_ + lanes - 1) / lanes;
  if (shared_bytes_ > max_shared_bytes)
    user_error("%s: more shared memory than a block can have", code.kernel.name.c_str());
  if (frames().size() < num_warps) frames().resize(num_warps);
  for (uint32_t w = 0; w < num_warps; w++) {
    warps_.push_back(std::make_unique<ScheduledWarp>());
    ScheduledWarp& warp = *warps_.back();
    warp.number = w;
    warp.code = &code;
    warp.races = races;
    warp.shared_bytes = shared_bytes_;
    warp.block = &state_;
    state_.warps.push_back(&warp);
    warp.local = local_.data() + w * lanes * code.kernel.local_bytes;
    warp.existing = w + 1 < num_warps || num_threads_ % lanes == 0 ? ~0u : (1u << num_threads_ % lanes) - 1;
    make_frame(w);
  }
  set_specials({0, 0, 0}, false);
}

// A frame begins with bits that are NaN and huge numbers, so that a register that is read before it is written shows.
void Block::make_frame(uint32_t warp) {
  Frame& frame = frames()[warp];
  if (frame.owner != &code_) {
    frame.owner = &code_;
    frame.bytes.assign(code_.frame_bytes + 64, 0xff);
    for (const Constant& c : code_.constants) {
      unsigned char* const at = aligned(frame.bytes) + c.at;
      if (c.bytes == 2) fill_lanes(at, uint16_t(c.bits));
      else if (c.bytes == 4) fill_lanes(at, uint32_t(c.bits));
      else fill_lanes(at, c.bits);
    }
  }
  warps_[warp]->frame = aligned(frame.bytes);
}

// The registers whose values the block knows; or, of_block_alone, those that differ from block to block.
void Block::set_specials(uint3 index, bool of_block_alone) {
  const dim3& size = block_;
  for (const Special& s : code_.specials) {
    if (of_block_alone && s.name.compare(0, 7, "%ctaid.") != 0) continue;
    const auto known = specials().find(s.name);
    if (known == specials().end())
      user_error("%s: the register %s, of the kernel %s, is not emulated", code_.module->path().c_str(), s.name.c_str(),
                 code_.kernel.name.c_str());
    for (auto& w : warps_)
      for (int i = 0; i < lanes; i++) {
        const uint32_t n = w->thread(i);
        const Place place =
            {{n % size.x, n / size.x % size.y, n / size.x / size.y}, index, size, grid_, n, uint32_t(warps_.size())};
        w->at<uint32_t>(s.at)[i] = known->second(place);
      }
  }
}

void Block::start(uint3 index) {
  fill(shared_memory, 0xff, shared_bytes_);
  std::fill(local_.begin(), local_.end(), 0xff);
  set_specials(index, true);
  hurries_ = rng.next() % 2 != 0;
  falls_apart_ = rng.next() % 4 == 0;
  const bool copies_late = rng.next() % 2 != 0;
  const int flip = rng.next() % 2 != 0 ? 31 : 0;
  const bool products_late = !code_.wgmma_registers.empty() && rng.next() % 2 != 0;
  num_ended_ = 0;
  for (Barrier& b : barriers_) b = Barrier();
  state_.mbarriers.clear();
  state_.arrivals.clear();
  state_.late = copies_late;
  state_.vain_waits = 0;
  for (auto& w : warps_) {
    w->groups.assign(1, {0, w->existing, false});
    w->able = true;
    w->copies.clear();
    w->copies_late = copies_late;
    w->started_copies = 0;
    w->has_waited_in_vain = false;
    w->flip = flip;
    std::fill_n(w->committed, lanes, 0);
    w->products.clear();
    w->committed_products = 0;
    w->products_late = products_late;
    w->had_wgmma_fence = false;
    w->wgmma_registers.assign(code_.wgmma_registers.size(), WgmmaRegister());
  }
  runner_ = warps_[0].get();
  if (races_ != nullptr)
    races_->begin_block(uint32_t(warps_.size()), uint32_t(code_.smallest_shared_access), code_.has_clocks);
}

void Block::run(uint3 index) {
  start(index);
  while (num_ended_ < warps_.size()) {
    ScheduledWarp* const w = draw();
    if (w == nullptr) explain_deadlock();
    w->must_change_group = w->has_waited_in_vain;
    w->has_waited_in_vain = false;
    run_warp(*w, hurries_ ? without_end : 1 + rng.below(400));
  }
  for (auto& w : warps_) complete_copies(*w, ~0u, -1);
}

ScheduledWarp* Block::draw() {
  if (hurries_ && runner_->able && !runner_->has_waited_in_vain) return runner_;
  uint32_t num_able = 0;
  for (const auto& w : warps_) num_able += w->able;
  if (num_able == 0) return nullptr;
  uint32_t drawn = rng.below(num_able);
  for (const auto& w : warps_)
    if (w->able && drawn-- == 0) return runner_ = w.get();
  return nullptr;  // not reached
}

// ----------------------------------------------------------------------------
// Groups of lanes

// Makes the first group the one that runs next. False: all wait, or there is none.
bool Block::pick(ScheduledWarp& w) {
  std::vector<Group>& groups = w.groups;
  if (groups.size() == 1 && !falls_apart_) return !groups[0].waits;
  uint32_t able = 0;
  for (const Group& g : groups) able += !g.waits;
  if (able == 0) return false;
  if (falls_apart_ || w.must_change_group) {
    w.must_change_group = false;
    uint32_t drawn = rng.below(able), i = 0;
    while (groups[i].waits || drawn-- > 0) i++;
    std::swap(groups[0], groups[i]);
    const uint32_t part = groups[0].lanes & (rng.next() | rng.next());
    if (falls_apart_ && groups.size() < 4 && part != 0 && part != groups[0].lanes && rng.below(8) == 0) {
      groups.push_back({groups[0].pc, groups[0].lanes & ~part, false});
      groups[0].lanes = part;
    }
    return true;
  }
  size_t lowest = 0;
  for (size_t i = 0; i < groups.size(); i++)
    if (!groups[i].waits && (groups[lowest].waits || groups[i].pc < groups[lowest].pc)) lowest = i;
  std::swap(groups[0], groups[lowest]);
  for (size_t i = groups.size() - 1; i > 0; i--) {
    if (groups[i].waits || groups[i].pc != groups[0].pc) continue;
    groups[0].lanes |= groups[i].lanes;
    groups[i] = groups.back();
    groups.pop_back();
  }
  return true;
}

// Runs some of the warp's instructions.
void Block::run_warp(ScheduledWarp& w, uint32_t budget) {
  while (budget > 0 && !w.has_waited_in_vain) {
    if (!pick(w)) {
      w.able = false;
      return;
    }
    w.set_active(w.groups[0].lanes);
    const Op* op = &code_.ops[w.groups[0].pc];
    uint32_t n = std::min(op->straight, budget);
    if (falls_apart_) n = std::min(n, 1 + rng.below(32));
    const bool to_the_end = n == op->straight;
    for (const Op* const end = op + n; op < end; op++) op->run(w, *op);
    w.groups[0].pc += n;
    budget -= budget == without_end ? 0 : n;
    if (!to_the_end || op->control == Control::none) continue;
    control(w, *op);
    budget -= budget == without_end || budget == 0 ? 0 : 1;
  }
}

// The first group is at `op`.
void Block::control(ScheduledWarp& w, const Op& op) {
  Group& g = w.groups[0];
  uint32_t takes = g.lanes;
  if (op.guard >= 0) takes &= op.guard_negated ? ~w.bits(op.guard) : w.bits(op.guard);
  if (op.control == Control::branch) return branch(w, op, takes);
  if (takes != g.lanes) {
    w.groups.push_back({g.pc + 1, g.lanes & ~takes, false});
    w.groups[0].lanes = takes;
  }
  if (op.control == Control::exit) return exit(w);
  if (takes == 0) {
    w.groups.erase(w.groups.begin());
    return;
  }
  w.groups[0].waits = true;
  w.set_active(takes);
  if (op.control == Control::barrier) reach_barrier(w, op);
  else if (op.control == Control::warpgroup) reach_warpgroup(w, op);
  else meet(w, op);
}

void Block::branch(ScheduledWarp& w, const Op& op, uint32_t taken) {
  Group& g = w.groups[0];
  const uint32_t rest = g.lanes & ~taken;
  g.pc = taken == 0 ? g.pc + 1 : op.target;
  if (taken == 0 || rest == 0) return;
  g.lanes = taken;
  w.groups.push_back({uint32_t(&op - code_.ops.data()) + 1, rest, false});
}

// The first group ends.
void Block::exit(ScheduledWarp& w) {
  w.groups.erase(w.groups.begin());
  if (!w.groups.empty()) return;
  w.able = false;
  num_ended_++;
}

// ----------------------------------------------------------------------------
// What lanes do together

// The first group has come to `op`: executes it for all lanes of a mask that have come with it.
void Block::meet(ScheduledWarp& w, const Op& op) {
  const uint32_t pc = w.groups[0].pc, come = w.groups[0].lanes;
  if (op.control == Control::warp) return complete(w, pc, w.existing, come);
  const uint32_t* const masks = w.at<uint32_t>(op.at[4]);
  for (uint32_t rest = come; rest != 0;) {
    const int lane = first_lane(rest);
    const uint32_t mask = masks[lane];
    uint32_t same = 0;
    for (int i = 0; i < lanes; i++) same |= uint32_t((rest >> i & 1) != 0 && masks[i] == mask) << i;
    if ((mask & same) != same)
      fail(w, op, first_lane(same & ~mask), "takes part with the mask 0x%08x, which is without its lane", mask);
    complete(w, pc, mask & w.existing, same);
    rest &= ~same;
  }
}

// Executes the instruction at pc if all lanes of `mask` wait there; a bar.warp.sync may be another one. `asked_by`: the
// lanes of `mask` that have just come.
void Block::complete(ScheduledWarp& w, uint32_t pc, uint32_t mask, uint32_t asked_by) {
  const Op& op = code_.ops[pc];
  const auto meets = [&](const Group& g) {
    return g.waits && (g.pc == pc || (op.control == Control::lanes_anywhere && code_.ops[g.pc].control == op.control));
  };
  if (asked_by != mask) {
    uint32_t arrived = 0;
    for (const Group& g : w.groups) {
      if (!meets(g)) continue;
      if (op.control == Control::warp) arrived |= g.lanes;
      else
        for (uint32_t rest = g.lanes & mask; rest != 0; rest &= rest - 1)
          if ((w.at<uint32_t>(code_.ops[g.pc].at[4])[first_lane(rest)] & w.existing) == mask)
            arrived |= 1u << first_lane(rest);
    }
    if ((arrived & mask) != mask) return;
  }
  w.set_active(mask);
  op.run(w, op);
  if (w.groups.size() == 1 && w.groups[0].lanes == mask) {
    w.groups[0] = {pc + 1, mask, false};
    return;
  }
  std::vector<Group> gone_on;
  for (Group& g : w.groups) {
    if (!meets(g) || (g.lanes & mask) == 0) continue;
    const auto same = std::find_if(gone_on.begin(), gone_on.end(), [&](const Group& o) { return o.pc == g.pc + 1; });
    if (same != gone_on.end()) same->lanes |= g.lanes & mask;
    else gone_on.push_back({g.pc + 1, g.lanes & mask, false});
    g.lanes &= ~mask;
  }
  w.groups.erase(std::remove_if(w.groups.begin(), w.groups.end(), [](const Group& g) { return g.lanes == 0; }),
                 w.groups.end());
  w.groups.insert(w.groups.begin(), gone_on.begin(), gone_on.end());
}

// ----------------------------------------------------------------------------
// Barriers of the block. A warp has come when all its lanes have.

// Whether all lanes have come to the instruction of the first group. Then the warp waits there.
bool Block::has_come(ScheduledWarp& w) {
  const uint32_t pc = w.groups[0].pc;
  uint32_t arrived = 0;
  for (const Group& g : w.groups) arrived |= g.waits && g.pc == pc ? g.lanes : 0;
  if (arrived != w.existing) return false;
  w.groups.assign(1, {pc, arrived, true});
  w.able = false;
  return true;
}

// Four warps do it; the first one's number is a multiple of 4.
void Block::reach_warpgroup(ScheduledWarp& w, const Op& op) {
  if (!has_come(w)) return;
  const uint32_t first = w.number / 4 * 4, pc = w.groups[0].pc;
  if ((first + 4) * lanes > num_threads_)
    fail(w, op, 0, "its warpgroup has fewer than 128 threads, as the block has %u", num_threads_);
  const auto waits_there = [&](const ScheduledWarp& o) {
    return o.groups.size() == 1 && o.groups[0].waits && o.groups[0].pc == pc;
  };
  for (uint32_t i = first; i < first + 4; i++)
    if (!waits_there(*warps_[i])) return;
  for (uint32_t i = first; i < first + 4; i++) {
    ScheduledWarp& each = *warps_[i];
    each.set_active(each.existing);
    op.run(each, op);
    each.groups[0] = {pc + 1, each.existing, false};
    each.able = true;
  }
}

void Block::reach_barrier(ScheduledWarp& w, const Op& op) {
  if (!has_come(w)) return;
  const uint32_t number = w.at<uint32_t>(op.at[1])[0], all = uint32_t(warps_.size()) * lanes;
  const uint32_t threads = op.at[2] < 0 ? all : w.at<uint32_t>(op.at[2])[0];
  if (number >= 16 || threads % lanes != 0 || threads == 0 || threads > all)
    fail(w, op, 0, "barrier %u of %u threads, in a block of %u", number, threads, num_threads_);
  Barrier& barrier = barriers_[number];
  if (barrier.arrived == 0) barrier.threads = threads;
  if (barrier.threads != threads)
    fail(w, op, 0, "barrier %u is of %u threads, and the first warp there said %u", number, threads, barrier.threads);
  barrier.arrived += lanes;
  state_.vain_waits = 0;
  if (Reduction(op.number) == Reduction::only_arrives) {
    if (races_ != nullptr) races_->release(w.number, w.existing, barrier.arrived_before);
    w.groups[0] = {w.groups[0].pc + 1, w.existing, false};
    w.able = true;
    if (barrier.arrived == threads) release(number);
    return;
  }
  barrier.warps |= 1u << w.number;
  if (Reduction(op.number) != Reduction::none)
    barrier.count += uint32_t(__builtin_popcount(w.bits(op.at[3]) & w.existing));
  if (barrier.arrived == threads) release(number);
}

void Block::release(uint32_t number) {
  const Barrier barrier = barriers_[number];
  barriers_[number] = Barrier();
  if (races_ != nullptr && barrier.warps != 0) races_->block_barrier(barrier.warps);
  for (auto& w : warps_) {
    if ((barrier.warps >> w->number & 1) == 0) continue;
    if (races_ != nullptr) races_->acquire(w->number, barrier.arrived_before);
    release_warp(*w, barrier);
  }
}

void Block::release_warp(ScheduledWarp& w, const Barrier& barrier) {
  const Op& op = code_.ops[w.groups[0].pc];
  const Reduction reduction = Reduction(op.number);
  const bool holds =
      reduction == Reduction::any ? barrier.count != 0 : barrier.count >= std::min(barrier.threads, num_threads_);
  alignas(64) uint32_t results[lanes];
  std::fill_n(results, lanes, reduction == Reduction::count ? barrier.count : holds ? ~0u : 0);
  w.set_active(w.existing);
  if (reduction != Reduction::none) w.set(op.at[0], results);
  w.groups[0] = {w.groups[0].pc + 1, w.existing, false};
  w.able = true;
}

// ----------------------------------------------------------------------------
// Deadlocks

std::string Block::state_of(uint32_t thread) const {
  const ScheduledWarp& w = *warps_[thread / lanes];
  std::string text = format("thread (%u,%u,%u), which ", thread % block_.x, thread / block_.x % block_.y,
                            thread / block_.x / block_.y);
  for (const Group& g : w.groups)
    if ((g.lanes >> thread % lanes & 1) != 0) return text + "waits in " + code_.describe(g.pc);
  return text + "has ended";
}

// No warp can continue, and not all have ended: names a thread that waits, and one that does not wait there. Lanes that
// wait for lanes are named first: if whole warps wait, they may be the reason.
void Block::explain_deadlock() {
  for (const bool of_lanes : {true, false})
    for (auto& w : warps_)
      for (const Group& g : w->groups) {
        const Op& op = code_.ops[g.pc];
        const bool of_warps = op.control == Control::barrier || op.control == Control::warpgroup;
        if ((!of_warps || g.lanes != w->existing) != of_lanes) continue;
        for (uint32_t other = 0; other < num_threads_; other++) {
          const ScheduledWarp& o = *warps_[other / lanes];
          if (of_lanes && o.number != w->number) continue;
          if (op.control == Control::warpgroup && o.number / 4 != w->number / 4) continue;
          const bool waits_there = std::any_of(o.groups.begin(), o.groups.end(), [&](const Group& x) {
            return (x.lanes >> other % lanes & 1) != 0 && x.pc == g.pc;
          });
          if (!waits_there) fail(*w, op, first_lane(g.lanes), "deadlock: waits for %s", state_of(other).c_str());
        }
        fail(*w, op, first_lane(g.lanes), "deadlock: waits for more threads than come");
      }
  fatal("deadlock");
}

}  // namespace emu::ptx

// Barriers in shared memory (mbarrier), and the copies that arrive there when they end: bulk copies, and cp.async by
// cp.async.mbarrier.arrive. In half of the blocks these end when somebody waits for them, one after another in random
// order; in the others at once. What an mbarrier orders for one lane that has waited counts for its whole warp. A bulk
// copy needs no fence after what threads have read or written there; bulk copies from shared memory are errors.
#include <cstring>
#include "../emu.h"
#include "warp.h"

extern unsigned char shared_memory[];

namespace emu::ptx {
namespace {

// What lies in memory where an mbarrier is. A program may not look at it, and must not write it.
constexpr uint64_t mark = 0xb5297a4d68e31da4u;
constexpr uint32_t most_arrivals = (1u << 20) - 1;

// The place in shared memory of the mbarrier that this lane's address operand names.
uint32_t place_of(Warp& w, const Op& op, int lane, Races::Kind kind = Races::Kind::atomic) {
  alignas(64) uint64_t address[lanes];
  w.read_addresses(op, address);
  if (address[lane] % 8 != 0)
    fail(w, op, lane, "an mbarrier at %#llx, which is misaligned", (unsigned long long)address[lane]);
  const uint32_t at = shared_offset(w, op, lane, address[lane], 8);
  if (w.races != nullptr) w.races->write(w.thread(lane), at, 8, w.index_of(op), kind);
  return at;
}

Mbarrier& mbarrier_at(Warp& w, const Op& op, int lane, uint32_t at) {
  const auto it = w.block->mbarriers.find(at);
  if (it == w.block->mbarriers.end())
    fail(w, op, lane, "no mbarrier has been initialised at byte %u of shared memory", at);
  uint64_t there;
  memcpy(&there, shared_memory + at, 8);
  if (there != mark) fail(w, op, lane, "the mbarrier at byte %u of shared memory has been overwritten", at);
  return it->second;
}

void end_phase_if_complete(Warp& w, Mbarrier& m) {
  w.block->vain_waits = 0;
  if (m.missing != 0 || m.bytes != 0) return;
  m.phase++;
  m.missing = m.expected;
  m.complete.join(m.arriving);
}

void arrive(Warp& w, const Op& op, int lane, Mbarrier& m, uint32_t count) {
  if (count == 0 || count > m.missing)
    fail(w, op, lane, "%u arrivals at an mbarrier that waits for %u more in this phase", count, m.missing);
  m.missing -= count;
  end_phase_if_complete(w, m);
}

template <class F>
void each_lane(const Warp& w, F f) {
  for (uint32_t rest = w.active; rest != 0; rest &= rest - 1) f(first_lane(rest));
}

// at: address; count.
void run_init(Warp& w, const Op& op) {
  each_lane(w, [&](int i) {
    const uint32_t at = place_of(w, op, i, Races::Kind::plain), count = w.at<uint32_t>(op.at[1])[i];
    if (count == 0 || count > most_arrivals) fail(w, op, i, "an mbarrier of %u arrivals", count);
    Mbarrier m;
    m.expected = m.missing = count;
    w.block->mbarriers[at] = m;
    memcpy(shared_memory + at, &mark, 8);
  });
}

void run_inval(Warp& w, const Op& op) {
  each_lane(w, [&](int i) {
    const uint32_t at = place_of(w, op, i);
    mbarrier_at(w, op, i, at);
    w.block->mbarriers.erase(at);
  });
}

// at: address, number of arrivals or of bytes. list[0], if any: the result, the phase.
template <bool arrives, bool expects>
void run_arrive(Warp& w, const Op& op) {
  alignas(64) uint64_t phases[lanes] = {};
  each_lane(w, [&](int i) {
    Mbarrier& m = mbarrier_at(w, op, i, place_of(w, op, i));
    const uint32_t number = w.at<uint32_t>(op.at[1])[i];
    phases[i] = m.phase;
    if (expects) m.bytes += number;
    if (arrives && w.races != nullptr) w.races->release(w.number, 1u << i, m.arriving);
    if (arrives) arrive(w, op, i, m, expects ? 1 : number);
  });
  if (!op.list.empty() && op.list[0] >= 0) w.set(op.list[0], phases);
}

// ----------------------------------------------------------------------------
// Copies

void end(Warp& w, Arrival& a) {
  Warp& owner = *w.block->warps[a.warp];
  const int lane = first_lane(a.lanes);
  Mbarrier& m = mbarrier_at(owner, *a.op, lane, a.mbarrier);
  if (a.to == nullptr) {
    complete_copies_before(owner, a.lanes, a.copies, a.time - 1);
    if (owner.races != nullptr) m.arriving.join(a.clock);
    for (uint32_t rest = a.lanes; rest != 0; rest &= rest - 1) arrive(owner, *a.op, first_lane(rest), m, 1);
    return;
  }
  memcpy(a.to, a.from, a.bytes);
  if (owner.races != nullptr)
    owner.races->end_bulk_copy(owner.thread(lane), uint32_t(a.to - shared_memory), a.bytes, m.arriving);
  m.bytes -= a.bytes;
  end_phase_if_complete(owner, m);
}

void start(Warp& w, Arrival a) {
  w.block->vain_waits = 0;
  if (w.block->late) w.block->arrivals.push_back(std::move(a));
  else end(w, a);
}

// One of those that have been started ends.
void end_some(Warp& w) {
  std::vector<Arrival>& all = w.block->arrivals;
  if (all.empty() || rng.below(4) != 0) return;
  const uint32_t drawn = rng.below(uint32_t(all.size()));
  Arrival a = std::move(all[drawn]);
  all.erase(all.begin() + drawn);
  end(w, a);
}

// cp.async.mbarrier.arrive. Without .noinc the arrivals are further ones, beyond those that are expected.
template <bool counts>
void run_copies_arrive(Warp& w, const Op& op) {
  std::map<uint32_t, uint32_t> lanes_at;  // of each mbarrier, as bits
  each_lane(w, [&](int i) {
    const uint32_t at = place_of(w, op, i);
    mbarrier_at(w, op, i, at);
    lanes_at[at] |= 1u << i;
  });
  for (const auto& [at, lanes_there] : lanes_at) {
    Arrival a;
    a.op = &op, a.warp = w.number, a.lanes = lanes_there, a.mbarrier = at;
    a.copies = w.started_copies;
    if (w.races != nullptr) a.time = w.races->release(w.number, lanes_there, a.clock);
    if (!counts) mbarrier_at(w, op, first_lane(lanes_there), at).missing += uint32_t(__builtin_popcount(lanes_there));
    start(w, std::move(a));
  }
}

// at: shared address, global address, bytes, mbarrier. list: what is added to the addresses.
void run_bulk_copy(Warp& w, const Op& op) {
  each_lane(w, [&](int i) {
    const auto shared_address = [&](int32_t place, bool is_narrow, int32_t more) {
      return is_narrow ? uint64_t(w.at<uint32_t>(place)[i] + uint32_t(more))
                       : w.at<uint64_t>(place)[i] + uint64_t(int64_t(more));
    };
    const uint64_t from = w.at<uint64_t>(op.at[1])[i] + uint64_t(int64_t(op.list[1]));
    const uint64_t to = shared_address(op.at[0], op.list[3] != 0, op.list[0]);
    const uint64_t mbarrier = shared_address(op.at[3], op.list[4] != 0, op.list[2]);
    const uint32_t bytes = w.at<uint32_t>(op.at[2])[i];
    if (bytes % 16 != 0 || to % 16 != 0 || from % 16 != 0)
      fail(w, op, i, "copies %u bytes from %#llx to %#llx: all must be multiples of 16", bytes,
           (unsigned long long)from, (unsigned long long)to);
    if (bytes == 0) return;
    check_readable(w, op, i, from, bytes);
    Arrival a;
    a.op = &op, a.warp = w.number, a.lanes = 1u << i;
    a.mbarrier = shared_offset(w, op, i, mbarrier, 8);
    a.from = reinterpret_cast<const unsigned char*>(from);
    a.to = shared_memory + shared_offset(w, op, i, to, bytes);
    a.bytes = bytes;
    mbarrier_at(w, op, i, a.mbarrier);
    if (w.races != nullptr)
      w.races->start_bulk_copy(w.thread(i), uint32_t(a.to - shared_memory), bytes, w.index_of(op));
    mutable_counters().bytes_read_async += bytes;
    start(w, std::move(a));
  });
}

// ----------------------------------------------------------------------------
// Waiting. at: result, address (as at[0] of the copy in `list`), phase or its parity.

constexpr uint32_t patience = 2000000;  // vain waits of a block until it is taken for dead: less than a second

template <bool by_parity>
void run_wait(Warp& w, const Op& op) {
  alignas(64) uint32_t results[lanes] = {};
  each_lane(w, [&](int i) {
    const uint32_t at = place_of(w, op, i);
    const auto is_complete = [&] {
      const Mbarrier& m = mbarrier_at(w, op, i, at);
      return by_parity ? (m.phase & 1) != (w.at<uint32_t>(op.at[2])[i] & 1)
                       : m.phase != uint32_t(w.at<uint64_t>(op.at[2])[i]);
    };
    if (!is_complete()) end_some(w);
    const Mbarrier& m = mbarrier_at(w, op, i, at);
    results[i] = is_complete() ? ~0u : 0;
    if (results[i] != 0) {
      if (w.races != nullptr) w.races->acquire(w.number, m.complete);
      return;
    }
    w.has_waited_in_vain = true;
    if (w.block->arrivals.empty() && ++w.block->vain_waits > patience)
      fail(w, op, i,
           "deadlock: waits for a phase of the mbarrier at byte %u of shared memory, where %u arrivals and %lld "
           "bytes are missing",
           at, m.missing, (long long)m.bytes);
  });
  w.set(op.at[1], results);
}

bool decode_bulk_copy(Decoder& d, const Instruction& i, const Words& words, Op& op) {
  if (words.has("tensor")) d.fail("tensor maps are not");
  const bool to_shared = words.has("shared::cluster") || words.has("shared::cta");
  if (!to_shared || !words.has("global") || !words.has("mbarrier::complete_tx::bytes") || words.words[3] == "global" ||
      words.has("multicast::cluster"))
    return false;
  Op parts[3];
  d.address(i.operands.at(0), parts[0], 0);
  d.address(i.operands.at(1), parts[1], 0);
  d.address(i.operands.at(3), parts[2], 0);
  if (parts[1].narrow_address) d.fail("an address of global memory has 64 bits");
  op.at[0] = parts[0].at[0], op.at[1] = parts[1].at[0], op.at[3] = parts[2].at[0];
  op.at[2] = d.source(i.operands.at(2), 4);
  op.list = {int32_t(parts[0].number), int32_t(parts[1].number), int32_t(parts[2].number), parts[0].narrow_address,
             parts[2].narrow_address};
  op.run = run_bulk_copy;
  d.shared_access(4);
  d.needs_clocks();
  return true;
}

}  // namespace

bool decode_mbarrier(Decoder& d, const Instruction& i, const Words& words, Op& op) {
  const bool of_copies = words.first() == "cp" && words.has("async") && words.has("mbarrier");
  if (words.first() == "cp" && words.has("bulk")) return decode_bulk_copy(d, i, words, op);
  if (!of_copies && words.first() != "mbarrier") return false;
  if (words.has("shared::cluster") || words.has("cluster")) return false;
  d.needs_clocks();
  d.shared_access(4);
  const std::string& what = words.words.at(1);
  if (of_copies) {
    op.run = words.has("noinc") ? run_copies_arrive<true> : run_copies_arrive<false>;
    d.address(i.operands.at(0), op, 0);
  } else if (what == "init" || what == "inval") {
    op.run = what == "init" ? run_init : run_inval;
    d.address(i.operands.at(0), op, 0);
    if (what == "init") op.at[1] = d.source(i.operands.at(1), 4);
  } else if (what == "expect_tx") {
    op.run = run_arrive<false, true>;
    d.address(i.operands.at(0), op, 0);
    op.at[1] = d.source(i.operands.at(1), 4);
  } else if (what == "arrive" && !words.has("noComplete")) {
    const bool expects = words.has("expect_tx");
    op.run = expects ? run_arrive<true, true> : run_arrive<true, false>;
    const bool has_result = i.operands.at(0).kind != Operand::address;
    const size_t first = has_result ? 1 : 0;
    if (has_result) d.list(i.operands[0], op, 8, true);
    d.address(i.operands.at(first), op, 0);
    Operand one;
    one.bits = 1;
    const bool has_number = i.operands.size() > first + 1;
    if (expects && !has_number) d.fail("it needs a number of bytes");
    op.at[1] = d.source(has_number ? i.operands[first + 1] : one, 4);
  } else if (what == "test_wait" || what == "try_wait") {
    const bool by_parity = words.has("parity");
    op.run = by_parity ? run_wait<true> : run_wait<false>;
    op.at[1] = d.result(i.operands.at(0), 0);
    d.address(i.operands.at(1), op, 0);
    op.at[2] = d.source(i.operands.at(2), by_parity ? 4 : 8);
  } else {
    return false;
  }
  return true;
}

}  // namespace emu::ptx

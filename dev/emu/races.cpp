#include "races.h"
#include <algorithm>
#include <utility>

namespace emu {
namespace {
constexpr uint32_t atomic = 1u << 31, async_proxy = 1u << 30;  // beside a thread's number
constexpr uint32_t thread_of(uint32_t writer) { return writer & ~(atomic | async_proxy); }

uint32_t shift_of(uint32_t cell_bytes) { return cell_bytes == 4 ? 2 : cell_bytes == 2 ? 1 : 0; }

// Each of the first `count` becomes 2^shift of its kind.
template <class T>
void spread(T* items, uint32_t count, uint32_t shift) {
  for (uint32_t i = count << shift; i-- > 0;) items[i] = items[i >> shift];
}
}

Races::Races(Report report) : report_(std::move(report)), cells_(new Cell[num_cells]()) {}

void Races::begin_block(uint32_t num_warps, uint32_t cell_bytes, bool has_clocks) {
  if (time_++ > 1u << 31) {  // long before it overflows
    time_ = 1;
    std::fill_n(cells_.get(), num_cells, Cell());
    for (auto& reads : reads_) reads.reset();
  }
  num_warps_ = num_warps;
  begin_ = time_;
  has_clocks_ = has_clocks;
  if (has_clocks) {
    known_.assign(size_t(num_warps) * num_clocks(), 0);
    fenced_.assign(size_t(num_warps) * num_clocks(), 0);
  }
  if (num_async_reads_ != 0) {  // of a block that has ended without waiting for them
    for (auto& reads : reads_)
      if (reads)
        for (uint32_t c = 0; c < num_cells; c++) reads[c].pending = 0;
    num_async_reads_ = 0;
  }
  std::fill_n(fence_lanes_, num_warps, 0);
  std::fill_n(released_, num_warps, 0);
  shift_ = shift_of(cell_bytes);
  for (uint32_t w = 0; w < num_warps; w++) {
    std::fill_n(seen_[w], num_warps, time_);
    full_[w] = floor_[w] = time_;
    partial_[w] = false;
    if (!reads_[w]) reads_[w].reset(new Reads[num_cells]());
  }
}

void Races::split_cells(uint32_t cell_bytes, uint32_t bytes) {
  const uint32_t count = (bytes + (1u << shift_) - 1) >> shift_, shift = shift_ - shift_of(cell_bytes);
  spread(cells_.get(), count, shift);
  for (uint32_t w = 0; w < num_warps_; w++) spread(reads_[w].get(), count, shift);
  shift_ = shift_of(cell_bytes);
}

void Races::set_floor(uint32_t w) {
  floor_[w] = std::min(full_[w], *std::min_element(seen_[w], seen_[w] + num_warps_));
}

void Races::block_barrier(uint32_t warps) {
  time_++;
  uint32_t joined[max_warps] = {};
  for (uint32_t rest = warps; rest != 0; rest &= rest - 1) {
    const uint32_t w = uint32_t(__builtin_ctz(rest));
    for (uint32_t v = 0; v < num_warps_; v++)
      joined[v] = std::max(joined[v], (warps >> v & 1) != 0 ? time_ : seen_[w][v]);
  }
  for (uint32_t rest = warps; rest != 0; rest &= rest - 1) {
    const uint32_t w = uint32_t(__builtin_ctz(rest));
    std::copy_n(joined, num_warps_, seen_[w]);
    full_[w] = time_;
    partial_[w] = false;
    fence_lanes_[w] = 0;
    set_floor(w);
  }
  if (!has_clocks_) return;
  for (uint32_t t = 0; t < num_clocks(); t++) {
    uint32_t most_known = 0, most_fenced = 0;
    for (uint32_t rest = warps; rest != 0; rest &= rest - 1) {
      const uint32_t w = uint32_t(__builtin_ctz(rest));
      most_known = std::max(most_known, known(w)[t]);
      most_fenced = std::max(most_fenced, fenced(w)[t]);
    }
    for (uint32_t rest = warps; rest != 0; rest &= rest - 1) {
      const uint32_t w = uint32_t(__builtin_ctz(rest));
      known(w)[t] = most_known;
      fenced(w)[t] = most_fenced;
    }
  }
}

void Races::warp_barrier(uint32_t w, uint32_t lanes_in) {
  time_++;
  if (lanes_in == ~0u) {
    full_[w] = seen_[w][w] = time_;
    partial_[w] = false;
    return set_floor(w);
  }
  auto& known = lane_[w];
  if (!partial_[w]) std::fill_n(&known[0][0], lanes * lanes, full_[w]);
  partial_[w] = true;
  uint32_t joined[lanes] = {};
  for (uint32_t a = 0; a < lanes; a++)
    for (uint32_t b = 0; b < lanes && (lanes_in >> a & 1) != 0; b++)
      joined[b] = (lanes_in >> b & 1) != 0 ? time_ : std::max(joined[b], known[a][b]);
  for (uint32_t a = 0; a < lanes; a++)
    if ((lanes_in >> a & 1) != 0) std::copy_n(joined, lanes, known[a]);
}

// `other`: a thread, or a cell's writer.
bool Races::is_ordered(uint32_t warp, uint32_t lane, uint32_t other, uint32_t time) const {
  if (time == pending) return false;
  if ((other & async_proxy) != 0) return time < known(warp)[num_clocks() - 1];
  other = thread_of(other);
  if (other / lanes != warp) return time < seen_[warp][other / lanes] || (has_clocks_ && time < known(warp)[other]);
  return other % lanes == lane || time < full_[warp] || (partial_[warp] && time < lane_[warp][lane][other % lanes]) ||
         (has_clocks_ && time < known(warp)[other]);
}

void Races::report(uint32_t cell, uint32_t thread, uint32_t op, bool writes, const Access& before) {
  report_(cell << shift_, {thread, op, writes}, before);
}

void Races::read(uint32_t warp, uint32_t lanes_in, uint32_t first, uint32_t bytes, uint32_t op) {
  const uint32_t end = (first + bytes - 1) >> shift_, full = full_[warp];
  Reads* const reads = reads_[warp].get();
  for (uint32_t c = first >> shift_; c <= end; c++) {
    Cell& cell = cells_[c];
    if (cell.written >= floor_[warp]) {
      for (uint32_t rest = lanes_in; rest != 0; rest &= rest - 1) {
        const uint32_t lane = uint32_t(__builtin_ctz(rest));
        if (!is_ordered(warp, lane, cell.writer, cell.written))
          return report(c, warp * lanes + lane, op, false, {thread_of(cell.writer), cell.write_op, true});
      }
    }
    cell.read = time_;
    Reads& r = reads[c];
    // Readers that no barrier of the warp has ordered are remembered together, at the time of the first: no other warp
    // can have been told of the one and not of the other.
    if (r.time >= full && r.time >= released_[warp]) r.lanes |= lanes_in;
    else r = {time_, lanes_in, op, r.pending};
  }
}

void Races::check_reads(uint32_t thread, uint32_t c, uint32_t op) {
  const uint32_t warp = thread / lanes, lane = thread % lanes;
  for (uint32_t v = 0; v < num_warps_; v++) {
    const Reads& r = reads_[v][c];
    if (r.pending != 0) return report(c, thread, op, true, {v * lanes, r.op, false});
    for (uint32_t rest = r.time >= floor_[warp] ? r.lanes : 0; rest != 0; rest &= rest - 1) {
      const uint32_t reader = v * lanes + uint32_t(__builtin_ctz(rest));
      if (!is_ordered(warp, lane, reader, r.time)) return report(c, thread, op, true, {reader, r.op, false});
    }
  }
}

void Races::write(uint32_t thread, uint32_t first, uint32_t bytes, uint32_t op, Kind kind) {
  const uint32_t end = (first + bytes - 1) >> shift_, floor = floor_[thread / lanes];
  for (uint32_t c = first >> shift_; c <= end; c++) {
    Cell& cell = cells_[c];
    if (cell.written >= floor && !(kind == Kind::same_value && cell.written != pending) &&
        !(kind == Kind::atomic && (cell.writer & atomic) != 0) &&
        !is_ordered(thread / lanes, thread % lanes, cell.writer, cell.written))
      return report(c, thread, op, true, {thread_of(cell.writer), cell.write_op, true});
    if (cell.read >= floor || num_async_reads_ != 0) check_reads(thread, c, op);
    cell.written = time_;
    cell.writer = thread | (kind == Kind::atomic ? atomic : 0);
    cell.write_op = op;
  }
}

bool Races::has_just_written(uint32_t thread, uint32_t byte) const {
  const Cell& cell = cells_[byte >> shift_];
  return cell.written == time_ && thread_of(cell.writer) == thread;
}

void Races::start_copy(uint32_t thread, uint32_t first, uint32_t bytes, uint32_t op) {
  write(thread, first, bytes, op, Kind::plain);
  for (uint32_t c = first >> shift_; c <= (first + bytes - 1) >> shift_; c++) cells_[c].written = pending;
}

void Races::end_copy(uint32_t thread, uint32_t first, uint32_t bytes, uint32_t time) {
  for (uint32_t c = first >> shift_; c <= (first + bytes - 1) >> shift_; c++)
    if (cells_[c].written == pending && cells_[c].writer == thread) cells_[c].written = time;
}

// A write of the generic proxy that a barrier has ordered before an asynchronous read, but no fence of the proxies.
void Races::check_proxy(uint32_t warp, uint32_t c, uint32_t op) {
  const Cell& cell = cells_[c];
  if (cell.written < begin_ || (cell.writer & async_proxy) != 0) return;
  const uint32_t writer = thread_of(cell.writer);
  if (cell.written < fenced(warp)[writer]) return;
  report_(c << shift_, {warp * lanes, op, false, true}, {writer, cell.write_op, true});
}

void Races::start_async_read(uint32_t warp, uint32_t first, uint32_t bytes, uint32_t op) {
  read(warp, ~0u, first, bytes, op);
  for (uint32_t c = first >> shift_; c <= (first + bytes - 1) >> shift_; c++) {
    check_proxy(warp, c, op);
    reads_[warp][c].op = op;
    reads_[warp][c].pending++;
  }
  num_async_reads_++;
}

void Races::end_async_read(uint32_t warp, uint32_t first, uint32_t bytes, uint32_t op) {
  for (uint32_t c = first >> shift_; c <= (first + bytes - 1) >> shift_; c++) {
    Reads& r = reads_[warp][c];
    r = {time_, ~0u, op, r.pending - 1};
    cells_[c].read = time_;
  }
  num_async_reads_--;
}

void Races::proxy_fence(uint32_t warp, uint32_t lanes_in) {
  if (!has_clocks_) return;
  time_++;
  uint32_t* const visible = fenced(warp);
  for (uint32_t lane = 0; lane < lanes; lane++)
    if ((lanes_in >> lane & 1) != 0) visible[warp * lanes + lane] = time_;
  fence_lanes_[warp] |= lanes_in;
  if (fence_lanes_[warp] != ~0u) return;
  fence_lanes_[warp] = 0;
  for (uint32_t t = 0; t < num_warps_ * lanes; t++)
    if (t / lanes != warp) visible[t] = std::max({visible[t], seen_[warp][t / lanes], known(warp)[t]});
}

// ----------------------------------------------------------------------------
// mbarriers, and those who only arrive at a barrier

void Races::Clock::join(const Clock& other) {
  known.resize(std::max(known.size(), other.known.size()));
  fenced.resize(known.size());
  for (size_t t = 0; t < other.known.size(); t++) {
    known[t] = std::max(known[t], other.known[t]);
    fenced[t] = std::max(fenced[t], other.fenced[t]);
  }
}

uint32_t Races::release(uint32_t warp, uint32_t lanes_in, Clock& clock) {
  released_[warp] = ++time_;
  Clock now;
  now.known.assign(known(warp), known(warp) + num_clocks());
  now.fenced.assign(fenced(warp), fenced(warp) + num_clocks());
  for (uint32_t t = 0; t < num_warps_ * lanes; t++) {
    const uint32_t lane = t % lanes;
    uint32_t& time = now.known[t];
    if (t / lanes != warp) {
      time = std::max(time, seen_[warp][t / lanes]);
    } else if ((lanes_in >> lane & 1) != 0) {
      time = time_;
    } else {
      time = full_[warp];
      for (uint32_t rest = partial_[warp] ? lanes_in : 0; rest != 0; rest &= rest - 1)
        time = std::max(time, lane_[warp][__builtin_ctz(rest)][lane]);
    }
  }
  clock.join(now);
  return time_;
}

void Races::acquire(uint32_t warp, const Clock& clock) {
  for (size_t t = 0; t < clock.known.size(); t++) {
    known(warp)[t] = std::max(known(warp)[t], clock.known[t]);
    fenced(warp)[t] = std::max(fenced(warp)[t], clock.fenced[t]);
  }
}

void Races::start_bulk_copy(uint32_t thread, uint32_t first, uint32_t bytes, uint32_t op) {
  start_copy(thread, first, bytes, op);
  for (uint32_t c = first >> shift_; c <= (first + bytes - 1) >> shift_; c++) cells_[c].writer |= async_proxy;
}

void Races::end_bulk_copy(uint32_t thread, uint32_t first, uint32_t bytes, Clock& clock) {
  end_copy(thread | async_proxy, first, bytes, time_);
  clock.known.resize(num_clocks());
  clock.fenced.resize(num_clocks());
  clock.known.back() = ++time_;
}

}  // namespace emu

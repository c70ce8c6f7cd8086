#include "races.h"
#include <algorithm>  // std::min, std::max
#include <utility>    // std::move

namespace emu {
namespace {
constexpr uint32_t atomic = 1u << 31;  // beside a thread's number

uint32_t shift_of(uint32_t cell_bytes) { return cell_bytes == 4 ? 2 : cell_bytes == 2 ? 1 : 0; }

// Each of the first `count` becomes 2^shift of its kind.
template <class T>
void spread(T* items, uint32_t count, uint32_t shift) {
  for (uint32_t i = count << shift; i-- > 0;) items[i] = items[i >> shift];
}
}

Races::Races(Report report) : report_(std::move(report)), cells_(new Cell[num_cells]()) {}

void Races::begin_block(uint32_t num_warps, uint32_t cell_bytes, bool has_proxies) {
  if (time_++ > 1u << 31) {  // long before it overflows
    time_ = 1;
    std::fill_n(cells_.get(), num_cells, Cell());
    for (auto& reads : reads_) reads.reset();
  }
  num_warps_ = num_warps;
  begin_ = time_;
  has_proxies_ = has_proxies;
  if (has_proxies) fenced_.assign(size_t(num_warps) * num_warps * lanes, 0);
  if (num_async_reads_ != 0) {  // of a block that has ended without waiting for them
    for (auto& reads : reads_)
      if (reads)
        for (uint32_t c = 0; c < num_cells; c++) reads[c].pending = 0;
    num_async_reads_ = 0;
  }
  std::fill_n(fence_lanes_, num_warps, 0);
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
  for (uint32_t t = 0; has_proxies_ && t < num_warps_ * lanes; t++) {
    uint32_t most = 0;
    for (uint32_t rest = warps; rest != 0; rest &= rest - 1)
      most = std::max(most, fenced(uint32_t(__builtin_ctz(rest)), t));
    for (uint32_t rest = warps; rest != 0; rest &= rest - 1) fenced(uint32_t(__builtin_ctz(rest)), t) = most;
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

bool Races::is_ordered(uint32_t warp, uint32_t lane, uint32_t other, uint32_t time) const {
  if (time == pending) return false;
  if (other / lanes != warp) return time < seen_[warp][other / lanes];
  return other % lanes == lane || time < full_[warp] || (partial_[warp] && time < lane_[warp][lane][other % lanes]);
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
      const uint32_t writer = cell.writer & ~atomic;
      for (uint32_t rest = lanes_in; rest != 0; rest &= rest - 1) {
        const uint32_t lane = uint32_t(__builtin_ctz(rest));
        if (!is_ordered(warp, lane, writer, cell.written))
          return report(c, warp * lanes + lane, op, false, {writer, cell.write_op, true});
      }
    }
    cell.read = time_;
    Reads& r = reads[c];
    // Readers that no barrier of the warp has ordered are remembered together, at the time of the first: no other warp
    // can have been told of the one and not of the other.
    if (r.time >= full) r.lanes |= lanes_in;
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
        !is_ordered(thread / lanes, thread % lanes, cell.writer & ~atomic, cell.written))
      return report(c, thread, op, true, {cell.writer & ~atomic, cell.write_op, true});
    if (cell.read >= floor || num_async_reads_ != 0) check_reads(thread, c, op);
    cell.written = time_;
    cell.writer = thread | (kind == Kind::atomic ? atomic : 0);
    cell.write_op = op;
  }
}

bool Races::has_just_written(uint32_t thread, uint32_t byte) const {
  const Cell& cell = cells_[byte >> shift_];
  return cell.written == time_ && (cell.writer & ~atomic) == thread;
}

void Races::start_copy(uint32_t thread, uint32_t first, uint32_t bytes, uint32_t op) {
  write(thread, first, bytes, op, Kind::plain);
  for (uint32_t c = first >> shift_; c <= (first + bytes - 1) >> shift_; c++) cells_[c].written = pending;
}

void Races::end_copy(uint32_t thread, uint32_t first, uint32_t bytes) {
  for (uint32_t c = first >> shift_; c <= (first + bytes - 1) >> shift_; c++)
    if (cells_[c].written == pending && cells_[c].writer == thread) cells_[c].written = time_;
}

// A write of the generic proxy that a barrier has ordered before an asynchronous read, but no fence of the proxies.
void Races::check_proxy(uint32_t warp, uint32_t c, uint32_t op) {
  const Cell& cell = cells_[c];
  const uint32_t writer = cell.writer & ~atomic;
  if (cell.written < begin_ || cell.written < fenced(warp, writer)) return;
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
  if (!has_proxies_) return;
  time_++;
  for (uint32_t lane = 0; lane < lanes; lane++)
    if ((lanes_in >> lane & 1) != 0) fenced(warp, warp * lanes + lane) = time_;
  fence_lanes_[warp] |= lanes_in;
  if (fence_lanes_[warp] != ~0u) return;
  fence_lanes_[warp] = 0;
  for (uint32_t t = 0; t < num_warps_ * lanes; t++)
    if (t / lanes != warp) fenced(warp, t) = std::max(fenced(warp, t), seen_[warp][t / lanes]);
}

}  // namespace emu

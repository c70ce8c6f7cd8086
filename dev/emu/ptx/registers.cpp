#include "registers.h"
#include <algorithm>
#include <map>
#include <numeric>
#include <set>

namespace emu::ptx {
namespace {

using Bits = std::vector<uint64_t>;
bool has(const Bits& b, int i) { return (b[size_t(i) / 64] >> i % 64 & 1) != 0; }
void add(Bits& b, int i) { b[size_t(i) / 64] |= uint64_t(1) << i % 64; }

// Instructions [first, end) in a row: only the last can lead elsewhere than to the next.
struct Piece {
  uint32_t first, end;
  Bits read, written;  // before it is written; before it is read
  Bits live;           // when it begins
};

std::vector<Piece> pieces_of(const std::vector<RegisterUse>& code, size_t num_words) {
  std::set<uint32_t> starts = {0};
  for (uint32_t i = 0; i < code.size(); i++) {
    if (code[i].next.size() == 1 && code[i].next[0] == i + 1) continue;
    starts.insert(i + 1);
    starts.insert(code[i].next.begin(), code[i].next.end());
  }
  std::vector<Piece> pieces;
  for (auto s = starts.begin(); s != starts.end() && *s < code.size(); ++s) {
    const uint32_t end =
        std::next(s) == starts.end() ? uint32_t(code.size()) : std::min(*std::next(s), uint32_t(code.size()));
    Piece p = {*s, end, Bits(num_words), Bits(num_words), Bits(num_words)};
    for (uint32_t i = p.first; i < p.end; i++) {
      for (const int r : code[i].reads)
        if (!has(p.written, r)) add(p.read, r);
      for (const int r : code[i].writes)
        if (!has(p.read, r)) add(p.written, r);
    }
    p.live = p.read;
    pieces.push_back(std::move(p));
  }
  return pieces;
}

void extend(Lifetime& l, uint32_t at) {
  if (l.first > l.last) l = {at, at};
  l.first = std::min(l.first, at);
  l.last = std::max(l.last, at);
}

}  // namespace

std::vector<Lifetime> lifetimes_of(const std::vector<RegisterUse>& code, size_t num_registers) {
  const size_t num_words = num_registers / 64 + 1;
  std::vector<Piece> pieces = pieces_of(code, num_words);
  std::map<uint32_t, size_t> piece_at;
  for (size_t p = 0; p < pieces.size(); p++) piece_at[pieces[p].first] = p;
  std::vector<Bits> live_out(pieces.size(), Bits(num_words));
  for (bool changes = true; changes;) {
    changes = false;
    for (size_t p = pieces.size(); p-- > 0;) {
      Piece& piece = pieces[p];
      for (const uint32_t next : code[piece.end - 1].next) {
        const auto follower = piece_at.find(next);
        if (follower == piece_at.end()) continue;  // the end of the kernel
        for (size_t w = 0; w < num_words; w++) live_out[p][w] |= pieces[follower->second].live[w];
      }
      for (size_t w = 0; w < num_words; w++) {
        const uint64_t live = piece.live[w] | (live_out[p][w] & ~piece.written[w]);
        changes |= live != piece.live[w];
        piece.live[w] = live;
      }
    }
  }
  std::vector<Lifetime> lifetimes(num_registers);
  for (size_t p = 0; p < pieces.size(); p++) {
    for (int r = 0; r < int(num_registers); r++) {
      if (has(pieces[p].live, r)) extend(lifetimes[size_t(r)], pieces[p].first);
      if (has(live_out[p], r)) extend(lifetimes[size_t(r)], pieces[p].end - 1);
    }
    for (uint32_t i = pieces[p].first; i < pieces[p].end; i++) {
      for (const int r : code[i].reads) extend(lifetimes[size_t(r)], i);
      for (const int r : code[i].writes) extend(lifetimes[size_t(r)], i);
    }
  }
  return lifetimes;
}

size_t assign_places(const std::vector<Lifetime>& lifetimes, const std::vector<int>& bytes,
                     std::vector<int32_t>& places) {
  std::vector<size_t> order(lifetimes.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return lifetimes[a].first < lifetimes[b].first; });
  std::map<int, std::vector<int32_t>> idle;  // by bytes
  std::multimap<uint32_t, size_t> by_end;    // registers that have a place
  size_t used = 0;
  places.assign(lifetimes.size(), 0);
  for (const size_t r : order) {
    if (lifetimes[r].first > lifetimes[r].last) continue;
    for (auto it = by_end.begin(); it != by_end.end() && it->first < lifetimes[r].first; it = by_end.erase(it))
      idle[bytes[it->second]].push_back(places[it->second]);
    std::vector<int32_t>& free = idle[bytes[r]];
    if (free.empty()) {
      free.push_back(int32_t(used));
      used += size_t(bytes[r]);
    }
    places[r] = free.back();
    free.pop_back();
    by_end.emplace(lifetimes[r].last, r);
  }
  return used;
}

}  // namespace emu::ptx

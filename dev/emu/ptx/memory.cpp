// Loads, stores, atomics and asynchronous copies. Addresses in global memory are the host's; addresses in shared and
// local memory are counted from their windows. What is accessed must lie in the launch's shared memory, in device or
// pinned memory and not be poisoned there, among the kernel's parameters or the module's variables.
#include <algorithm>
#include <cstring>
#include "../emu.h"
#include "floats.h"
#include "launch.h"
#include "warp.h"

extern unsigned char shared_memory[];

namespace emu::ptx {
namespace {

// What an instruction accesses: for each active lane `bytes` at `host`. In shared memory they are `offset` bytes from
// its start; lanes whose generic address is not in shared memory are not among `shared`.
struct Accesses {
  uint32_t bytes;
  uint32_t shared = 0;  // lanes
  uint32_t offset[lanes];
  unsigned char* host[lanes];
};

// memcpy and memcmp of a few bytes, without the calls, which AddressSanitizer's library would check.
void copy_bytes(unsigned char* to, const void* from, uint32_t bytes) {
  const auto* const first = static_cast<const unsigned char*>(from);
  uint32_t b = 0;
  for (; b + 4 <= bytes; b += 4) memcpy(to + b, first + b, 4);
  for (; b < bytes; b++) to[b] = first[b];
}
bool same_bytes(const unsigned char* a, const void* b, uint32_t bytes) {
  const auto* const other = static_cast<const unsigned char*>(b);
  uint32_t different = 0, i = 0;
  for (; i + 4 <= bytes; i += 4) {
    uint32_t x, y;
    memcpy(&x, a + i, 4);
    memcpy(&y, other + i, 4);
    different |= x ^ y;
  }
  for (; i < bytes; i++) different |= uint32_t(a[i] ^ other[i]);
  return different == 0;
}

enum class Space { generic, shared, local };

void check_alignment(const Warp& w, const Op& op, const uint64_t (&address)[lanes], uint32_t bytes) {
  uint64_t low = 0;
  for (int i = 0; i < lanes; i++) low |= w.mask[i] != 0 ? address[i] & (bytes - 1) : 0;
  for (int i = 0; low != 0 && i < lanes; i++)
    if (w.mask[i] != 0 && (address[i] & (bytes - 1)) != 0)
      fail(w, op, i, "accesses %u bytes at %#llx, which is misaligned", bytes, (unsigned long long)address[i]);
}

// Checks addresses that are neither in shared memory nor among the kernel's parameters.
void check_global(const Warp& w, const Op& op, int lane, uint64_t address, uint32_t bytes, bool writes) {
  const auto* const p = reinterpret_cast<const unsigned char*>(address);
  char where[256];
  if (!is_device_memory(p)) {
    if (is_pinned(p, bytes) || is_variable(p, bytes)) return;
    fail(w, op, lane, "%s %u bytes at %#llx, which is not memory of the device", writes ? "writes" : "reads", bytes,
         (unsigned long long)address);
  }
  if (is_accessible(p, bytes)) return;
  if (!describe_device_address(p, where, sizeof where)) where[0] = 0;
  fail(w, op, lane, "%s %u bytes at %p: %s", writes ? "writes" : "reads", bytes, static_cast<const void*>(p), where);
}

// The lanes' addresses often are neighbours: then one look at all of them is enough.
bool all_in_one_piece(const Warp& w, const uint64_t (&address)[lanes], uint32_t bytes) {
  uint64_t least = ~uint64_t(0), most = 0;
  for (int i = 0; i < lanes; i++) {
    least = std::min(least, w.mask[i] != 0 ? address[i] : ~uint64_t(0));
    most = std::max(most, w.mask[i] != 0 ? address[i] : 0);
  }
  const auto* const p = reinterpret_cast<const unsigned char*>(least);
  const uint64_t span = most + bytes - least;
  return span <= lanes * 32 && is_accessible(p, span);
}

void find_generic(const Warp& w, const Op& op, const uint64_t (&address)[lanes], Accesses& a, bool writes) {
  if (all_in_one_piece(w, address, a.bytes)) {
    for (int i = 0; i < lanes; i++) a.host[i] = reinterpret_cast<unsigned char*>(address[i]);
    return;
  }
  const uint64_t base = reinterpret_cast<uint64_t>(shared_memory);
  const uint64_t local = reinterpret_cast<uint64_t>(w.local), local_bytes = w.code->kernel.local_bytes;
  for (uint32_t rest = w.active; rest != 0; rest &= rest - 1) {
    const int i = first_lane(rest);
    a.host[i] = reinterpret_cast<unsigned char*>(address[i]);
    const uint64_t own = address[i] - local - uint64_t(i) * local_bytes;
    const uint64_t parameter = address[i] - reinterpret_cast<uint64_t>(w.code->parameters.data());
    if (address[i] - base < w.shared_bytes && address[i] - base + a.bytes <= w.shared_bytes) {
      a.shared |= 1u << i;
      a.offset[i] = uint32_t(address[i] - base);
    } else if (own < local_bytes && own + a.bytes <= local_bytes) {
      continue;
    } else if (parameter >= w.code->kernel.parameter_bytes || parameter + a.bytes > w.code->kernel.parameter_bytes ||
               writes) {
      check_global(w, op, i, address[i], a.bytes, writes);
    }
  }
}

void find_shared(const Warp& w, const Op& op, const uint64_t (&address)[lanes], Accesses& a) {
  a.shared = w.active;
  bool inside = true;
  for (int i = 0; i < lanes; i++) {
    const uint64_t offset = address[i] - shared_window;
    inside &= w.mask[i] == 0 || (offset < w.shared_bytes && offset + a.bytes <= w.shared_bytes);
    a.offset[i] = uint32_t(offset);
    a.host[i] = shared_memory + a.offset[i];
  }
  for (int i = 0; !inside && i < lanes; i++)
    if (w.mask[i] != 0 && (address[i] - shared_window >= w.shared_bytes || a.offset[i] + a.bytes > w.shared_bytes))
      fail(w, op, i, "accesses %u bytes at byte %lld of shared memory, of which the block has %u", a.bytes,
           (long long)(address[i] - shared_window), w.shared_bytes);
}

void find_local(const Warp& w, const Op& op, const uint64_t (&address)[lanes], Accesses& a) {
  const uint64_t has = w.code->kernel.local_bytes;
  for (uint32_t rest = w.active; rest != 0; rest &= rest - 1) {
    const int i = first_lane(rest);
    const uint64_t offset = address[i] - local_window;
    if (offset >= has || offset + a.bytes > has)
      fail(w, op, i, "accesses %u bytes at byte %lld of local memory, of which a thread has %llu", a.bytes,
           (long long)offset, (unsigned long long)has);
    a.host[i] = w.local + uint64_t(i) * has + offset;
  }
}

template <Space space>
void find(const Warp& w, const Op& op, Accesses& a, bool writes) {
  alignas(64) uint64_t address[lanes];
  w.read_addresses(op, address);
  check_alignment(w, op, address, a.bytes);
  if (space == Space::shared) find_shared(w, op, address, a);
  else if (space == Space::local) find_local(w, op, address, a);
  else find_generic(w, op, address, a, writes);
}

// Neighbouring lanes often read the same.
void note_reads(const Warp& w, const Op& op, const Accesses& a) {
  for (uint32_t rest = a.shared; rest != 0;) {
    const int first = first_lane(rest);
    uint32_t same = 0;
    for (int i = first; i < lanes && (rest >> i & 1) != 0 && a.offset[i] == a.offset[first]; i++) same |= 1u << i;
    w.races->read(w.number, same, a.offset[first], a.bytes, w.index_of(op));
    rest &= ~same;
  }
}

// ----------------------------------------------------------------------------
// Loads and stores: Memory is the type of a value in memory, Value the type of a register's lane.

template <Space space, class Memory, class Value>
void run_load(Warp& w, const Op& op) {
  Accesses a;
  a.bytes = uint32_t(sizeof(Memory) * op.list.size());
  find<space>(w, op, a, false);
  if (w.races != nullptr) note_reads(w, op, a);
  for (size_t n = 0; n < op.list.size(); n++) {
    alignas(64) Value values[lanes];
    for (uint32_t rest = w.active; rest != 0; rest &= rest - 1) {
      const int i = first_lane(rest);
      Memory value;
      memcpy(&value, a.host[i] + n * sizeof(Memory), sizeof value);
      values[i] = Value(value);
    }
    if (op.list[n] >= 0) w.set(op.list[n], values);
  }
}

template <Space space, class Memory, class Value>
void run_store(Warp& w, const Op& op) {
  Accesses a;
  a.bytes = uint32_t(sizeof(Memory) * op.list.size());
  find<space>(w, op, a, true);
  for (int k = 0; k < lanes; k++) {
    const int i = k ^ w.flip;
    if (w.mask[i] == 0) continue;
    Memory values[8];
    for (size_t n = 0; n < op.list.size(); n++) values[n] = Memory(w.at<Value>(op.list[n])[i]);
    if ((a.shared >> i & 1) != 0 && w.races != nullptr) {
      const bool same = same_bytes(a.host[i], values, a.bytes);
      w.races->write(w.thread(i), a.offset[i], a.bytes, w.index_of(op),
                     same ? Races::Kind::same_value : Races::Kind::plain);
    }
    copy_bytes(a.host[i], values, a.bytes);
  }
}

template <Space space, class Memory, class Value>
Handler load_or_store(bool loads) {
  return loads ? run_load<space, Memory, Value> : run_store<space, Memory, Value>;
}

// `type`: in memory, "s8" ... "b64"; register_bytes: a lane's, at least as many. nullptr: there is no such type.
template <Space space>
Handler load_or_store(bool loads, const std::string& type, int register_bytes) {
  const bool is_signed = type[0] == 's';
  const int bytes = atoi(type.c_str() + 1) / 8;
  switch (register_bytes) {
    case 2:
      if (bytes == 1)
        return is_signed ? load_or_store<space, int8_t, uint16_t>(loads)
                         : load_or_store<space, uint8_t, uint16_t>(loads);
      return load_or_store<space, uint16_t, uint16_t>(loads);
    case 4:
      if (bytes == 1)
        return is_signed ? load_or_store<space, int8_t, uint32_t>(loads)
                         : load_or_store<space, uint8_t, uint32_t>(loads);
      if (bytes == 2)
        return is_signed ? load_or_store<space, int16_t, uint32_t>(loads)
                         : load_or_store<space, uint16_t, uint32_t>(loads);
      return load_or_store<space, uint32_t, uint32_t>(loads);
    case 8:
      if (bytes == 1)
        return is_signed ? load_or_store<space, int8_t, uint64_t>(loads)
                         : load_or_store<space, uint8_t, uint64_t>(loads);
      if (bytes == 2)
        return is_signed ? load_or_store<space, int16_t, uint64_t>(loads)
                         : load_or_store<space, uint16_t, uint64_t>(loads);
      if (bytes == 4)
        return is_signed ? load_or_store<space, int32_t, uint64_t>(loads)
                         : load_or_store<space, uint32_t, uint64_t>(loads);
      return load_or_store<space, uint64_t, uint64_t>(loads);
  }
  return nullptr;
}

bool is_type(const std::string& word) {
  return word.size() >= 2 && strchr("busf", word[0]) != nullptr &&
         strspn(word.c_str() + 1, "0123456789") == word.size() - 1;
}

// Words that do not change what is loaded or stored here: caches, scopes, and orders of memory, which is ordered
// anyway.
bool is_hint(const std::string& word) {
  static const char* const hints[] = {"ld",
                                      "st",
                                      "weak",
                                      "volatile",
                                      "relaxed",
                                      "acquire",
                                      "release",
                                      "acq_rel",
                                      "cta",
                                      "gpu",
                                      "sys",
                                      "nc",
                                      "ca",
                                      "cg",
                                      "cs",
                                      "lu",
                                      "cv",
                                      "wb",
                                      "wt",
                                      "global",
                                      "const",
                                      "param",
                                      "shared",
                                      "local",
                                      "shared::cta",
                                      "v2",
                                      "v4",
                                      "v8",
                                      "atom",
                                      "red",
                                      "L1::evict_last",
                                      "L1::evict_first",
                                      "L1::no_allocate",
                                      "L2::64B",
                                      "L2::128B",
                                      "L2::256B"};
  return std::any_of(std::begin(hints), std::end(hints), [&](const char* hint) { return word == hint; });
}

Space space_of(const Words& words) {
  if (words.has("shared") || words.has("shared::cta")) return Space::shared;
  return words.has("local") ? Space::local : Space::generic;
}

bool decode_load_or_store(Decoder& d, const Instruction& i, const Words& words, Op& op) {
  const bool loads = words.first() == "ld";
  const std::string& type = words.last();
  if (!is_type(type)) return false;
  for (size_t w = 0; w + 1 < words.words.size(); w++)
    if (!is_hint(words.words[w])) return false;
  const Operand &value = i.operands.at(loads ? 0 : 1), &first = value.kind == Operand::list ? value.parts.at(0) : value;
  const int bytes = atoi(type.c_str() + 1) / 8;
  const int register_bytes = first.kind == Operand::reg ? d.bytes_of(first) : std::max(bytes, 2);
  if (register_bytes < bytes) d.fail("a register is narrower than its type");
  d.address(i.operands.at(loads ? 1 : 0), op, 0);
  d.list(value, op, register_bytes, loads);
  if (words.has("v2")   ? op.list.size() != 2
      : words.has("v4") ? op.list.size() != 4
                        : op.list.size() != 1 && !words.has("v8"))
    d.fail("it has another number of operands");
  const Space space = space_of(words);
  if (space == Space::shared) d.shared_access(bytes * int(op.list.size()));
  op.run = space == Space::shared  ? load_or_store<Space::shared>(loads, type, register_bytes)
           : space == Space::local ? load_or_store<Space::local>(loads, type, register_bytes)
                                   : load_or_store<Space::generic>(loads, type, register_bytes);
  return op.run != nullptr;
}

// ----------------------------------------------------------------------------
// Atomic operations, lane by lane. at: address, operand, second operand; the result, if any, is list[0].

template <class T>
T atomic_add(T old, T b, T) {
  return T(old + b);
}
template <class T>
T atomic_min(T old, T b, T) {
  return b < old ? b : old;
}
template <class T>
T atomic_max(T old, T b, T) {
  return b > old ? b : old;
}
template <class T>
T atomic_and(T old, T b, T) {
  return T(old & b);
}
template <class T>
T atomic_or(T old, T b, T) {
  return T(old | b);
}
template <class T>
T atomic_xor(T old, T b, T) {
  return T(old ^ b);
}
template <class T>
T atomic_exch(T, T b, T) {
  return b;
}
template <class T>
T atomic_cas(T old, T b, T c) {
  return old == b ? c : old;
}
template <class T>
T atomic_inc(T old, T b, T) {
  return old >= b ? T(0) : T(old + 1);
}
template <class T>
T atomic_dec(T old, T b, T) {
  return old == 0 || old > b ? b : T(old - 1);
}

template <Space space, class T, T f(T, T, T)>
void run_atomic(Warp& w, const Op& op) {
  Accesses a;
  a.bytes = sizeof(T);
  find<space>(w, op, a, true);
  alignas(64) T before[lanes];
  uint32_t order[lanes];
  for (uint32_t i = 0; i < lanes; i++) order[i] = i;
  rng.shuffle(order, lanes);
  for (const uint32_t i : order) {
    if (w.mask[i] == 0) continue;
    memcpy(&before[i], a.host[i], sizeof(T));
    const T now = f(before[i], w.at<T>(op.at[1])[i], w.at<T>(op.at[2])[i]);
    if ((a.shared >> i & 1) != 0 && w.races != nullptr)
      w.races->write(w.thread(int(i)), a.offset[i], a.bytes, w.index_of(op), Races::Kind::atomic);
    memcpy(a.host[i], &now, sizeof(T));
  }
  if (!op.list.empty()) w.set(op.list[0], before);
}

template <class T, T f(T, T, T)>
Handler atomic(bool shared) {
  return shared ? run_atomic<Space::shared, T, f> : run_atomic<Space::generic, T, f>;
}

template <class T>
Handler atomic_of(const Words& words, bool shared) {
  if (words.has("add")) return atomic<T, atomic_add<T>>(shared);
  if (words.has("min")) return atomic<T, atomic_min<T>>(shared);
  if (words.has("max")) return atomic<T, atomic_max<T>>(shared);
  if (words.has("exch")) return atomic<T, atomic_exch<T>>(shared);
  if (words.has("cas")) return atomic<T, atomic_cas<T>>(shared);
  if constexpr (std::is_integral_v<T>) {
    if (words.has("and")) return atomic<T, atomic_and<T>>(shared);
    if (words.has("or")) return atomic<T, atomic_or<T>>(shared);
    if (words.has("xor")) return atomic<T, atomic_xor<T>>(shared);
    if (words.has("inc")) return atomic<T, atomic_inc<T>>(shared);
    if (words.has("dec")) return atomic<T, atomic_dec<T>>(shared);
  }
  return nullptr;
}

bool decode_atomic(Decoder& d, const Instruction& i, const Words& words, Op& op) {
  const std::string& type = words.last();
  const bool has_result = words.first() == "atom", shared = space_of(words) == Space::shared;
  const int bytes = atoi(type.c_str() + 1) / 8;
  if (bytes != 4 && bytes != 8) return false;
  size_t o = 0;
  if (has_result) d.list(i.operands.at(o++), op, bytes, true);
  d.address(i.operands.at(o++), op, 0);
  op.at[1] = op.at[2] = d.source(i.operands.at(o++), bytes);
  if (o < i.operands.size()) op.at[2] = d.source(i.operands[o], bytes);
  if (has_result && op.list[0] < 0) op.list.clear();
  op.run = type == "f32"   ? atomic_of<float>(words, shared)
           : type == "f64" ? atomic_of<double>(words, shared)
           : type == "s32" ? atomic_of<int32_t>(words, shared)
           : type == "s64" ? atomic_of<int64_t>(words, shared)
           : bytes == 4    ? atomic_of<uint32_t>(words, shared)
                           : atomic_of<uint64_t>(words, shared);
  return op.run != nullptr;
}

// ----------------------------------------------------------------------------
// Asynchronous copies. at: shared address, global address, how many bytes are read; list[0]: how many are written.

void copy_lane(const PendingCopies& c, int i) {
  copy_bytes(c.to[i], c.from[i], c.bytes_read[i]);
  for (uint32_t b = c.bytes_read[i]; b < c.bytes; b++) c.to[i][b] = 0;
}

void run_copy(Warp& w, const Op& op) {
  PendingCopies c;
  c.bytes = uint32_t(op.list[0]);
  c.rest = w.active;
  c.number = w.started_copies++;
  Accesses to;
  to.bytes = c.bytes;
  find<Space::shared>(w, op, to, true);
  const uint64_t* const from = w.at<uint64_t>(op.at[1]);
  const uint32_t* const bytes_read = w.at<uint32_t>(op.at[2]);
  alignas(64) uint64_t address[lanes];
  for (int i = 0; i < lanes; i++) address[i] = from[i] + uint64_t(op.list[1]);
  check_alignment(w, op, address, c.bytes);
  const bool in_one_piece = all_in_one_piece(w, address, c.bytes);
  for (uint32_t rest = w.active; rest != 0; rest &= rest - 1) {
    const int i = first_lane(rest);
    c.to[i] = to.host[i];
    c.from[i] = reinterpret_cast<const unsigned char*>(address[i]);
    c.bytes_read[i] = bytes_read[i];
    c.group[i] = w.committed[i];
    if (c.bytes_read[i] > c.bytes) fail(w, op, i, "reads %u of %u bytes", c.bytes_read[i], c.bytes);
    if (c.bytes_read[i] > 0 && !in_one_piece) check_global(w, op, i, address[i], c.bytes_read[i], false);
    if (w.races != nullptr) w.races->start_copy(w.thread(i), to.offset[i], c.bytes, w.index_of(op));
    mutable_counters().bytes_read_async += c.bytes_read[i];
    if (!w.copies_late) copy_lane(c, i);
  }
  w.copies.push_back(c);
}

void run_commit(Warp& w, const Op&) {
  for (int i = 0; i < lanes; i++) w.committed[i] += w.mask[i] & 1;
}

// The active lanes' copies of all groups but the last op.number are complete now; with a negative number all copies.
void run_wait(Warp& w, const Op& op) { complete_copies(w, w.active, op.number); }

bool decode_copy(Decoder& d, const Instruction& i, const Words& words, Op& op) {
  if (words.has("commit_group")) {
    op.run = run_commit;
  } else if (words.has("wait_group")) {
    op.run = run_wait;
    op.number = int64_t(i.operands.at(0).bits);
  } else if (words.has("wait_all")) {
    op.run = run_wait;
    op.number = -1;
  } else if (words.has("shared") || words.has("shared::cta")) {
    if (i.operands.size() < 3 || i.operands.size() > 4 || i.operands[2].kind != Operand::number) return false;
    d.address(i.operands[0], op, 0);
    Op from;
    d.address(i.operands[1], from, 0);
    if (from.narrow_address) d.fail("an address of global memory has 64 bits");
    op.at[1] = from.at[0];
    op.at[2] = d.source(i.operands.back(), 4);
    op.list = {int32_t(i.operands[2].bits), int32_t(from.number)};
    d.shared_access(int(i.operands[2].bits));
    op.run = run_copy;
  } else {
    return false;
  }
  return true;
}

}  // namespace

// Ends the copies for which is_due(copies, lane) holds; end(thread, first, bytes) tells of each.
template <class Due, class End>
static void end_copies(Warp& w, uint32_t of_lanes, Due is_due, End end) {
  size_t kept = 0;
  for (PendingCopies& c : w.copies) {
    for (uint32_t rest = c.rest & of_lanes; rest != 0; rest &= rest - 1) {
      const int i = first_lane(rest);
      if (!is_due(c, i)) continue;
      if (w.copies_late) copy_lane(c, i);
      if (w.races != nullptr) end(w.thread(i), uint32_t(c.to[i] - shared_memory), c.bytes);
      c.rest &= ~(1u << i);
    }
    if (c.rest != 0) w.copies[kept++] = c;
  }
  w.copies.resize(kept);
}

void complete_copies(Warp& w, uint32_t of_lanes, int64_t groups_left) {
  end_copies(
      w, of_lanes,
      [&](const PendingCopies& c, int i) {
        return groups_left < 0 || int64_t(c.group[i]) + groups_left < int64_t(w.committed[i]);
      },
      [&](uint32_t thread, uint32_t first, uint32_t bytes) { w.races->end_copy(thread, first, bytes); });
}

void complete_copies_before(Warp& w, uint32_t of_lanes, uint32_t number, uint32_t time) {
  end_copies(
      w, of_lanes, [&](const PendingCopies& c, int) { return c.number < number; },
      [&](uint32_t thread, uint32_t first, uint32_t bytes) { w.races->end_copy(thread, first, bytes, time); });
}

uint32_t shared_offset(const Warp& w, const Op& op, int lane, uint64_t address, uint32_t bytes) {
  const uint64_t offset = address - shared_window;
  if (offset >= w.shared_bytes || offset + bytes > w.shared_bytes)
    fail(w, op, lane, "accesses %u bytes at byte %lld of shared memory, of which the block has %u", bytes,
         (long long)offset, w.shared_bytes);
  return uint32_t(offset);
}

void check_readable(const Warp& w, const Op& op, int lane, uint64_t address, uint32_t bytes) {
  if (!is_accessible(reinterpret_cast<const unsigned char*>(address), bytes))
    check_global(w, op, lane, address, bytes, false);
}

bool decode_memory(Decoder& d, const Instruction& i, const Words& words, Op& op) {
  const std::string& name = words.first();
  if (name == "ld" || name == "st") return decode_load_or_store(d, i, words, op);
  if (name == "atom" || name == "red") return decode_atomic(d, i, words, op);
  return name == "cp" && words.has("async") && !words.has("bulk") && !words.has("mbarrier") &&
         decode_copy(d, i, words, op);
}

}  // namespace emu::ptx

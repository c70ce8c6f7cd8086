// What the threads of a kernel that g++ has compiled do with shared memory, for the search for races (races.h).
//
// While such a kernel runs, all of shared memory is poisoned, so that g++'s code calls for each access to it a function
// that should report an error. The functions are defined here. With -fsanitize-recover=address they may return, and
// they do if the access is right: then they only write it down. An access to other memory costs nothing for this.
//
// A thread runs alone from one synchronization to the next. There, what it has written down goes to Races. Only then it
// is known what its stores have changed: two threads may store the same value. It also shows a store that g++ did not
// announce, as it does not if the same code has just loaded from the address: the value is another than before. A
// kernel that calls memcpy or memset for shared memory is reported as an error, unless races are not looked for.
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include "emu.h"
#include "llmc/base/error.h"
#include "races.h"

extern unsigned char shared_memory[];
extern "C" char __executable_start;  // the linker's

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __asan_report_load_n(uintptr_t address, size_t bytes);  // prints AddressSanitizer's report and aborts
extern "C" void __asan_report_store_n(uintptr_t address, size_t bytes);
#endif

namespace emu {
namespace {

// Functions that run for every access are compiled without ASan's checks, as are those that access shared memory.
#define FAST __attribute__((no_sanitize("address")))

enum class Does : uint8_t { reads, writes, both_atomically };

// An access to 1, 2, 4, 8 or 16 bytes. before: what they were, as one or two words.
struct Record {
  uint32_t first, place;
  uint8_t bytes;
  Does does;
  uint64_t before[2];
};

constexpr uint32_t max_records = 4096;
Record records[max_records];
uint32_t num_records = 0;

bool looks = getenv("SLA_EMU_RACES") == nullptr || strcmp(getenv("SLA_EMU_RACES"), "0") != 0;
uint32_t launch_bytes = 0;  // of shared memory that the kernel has
bool watches = false;       // races are looked for in the block that runs
uint32_t cell_bytes = 4;    // a launch begins with large cells, and shrinks them to its smallest access
bool launch_begins = false;
bool is_atomic = false;
Races* races = nullptr;  // made when it is first needed

FAST uint32_t place_of(const void* code) { return uint32_t(static_cast<const char*>(code) - &__executable_start); }

// The line of source. AddressSanitizer's own symbolizer finds none for most kernels; addr2line is where g++ is.
std::string describe(uint32_t place) {
  const std::string number = format("0x%x", place - 1);  // of the call, which is before what it returns to
  const std::string command = format("addr2line -e /proc/%d/exe ", int(getpid())) + number + " 2>/dev/null";
  char line[512] = "?";
  if (FILE* const output = popen(command.c_str(), "r")) {
    if (fgets(line, sizeof line, output) == nullptr) line[0] = '?';
    pclose(output);
  }
  line[strcspn(line, " \n")] = '\0';
  return "at " + (line[0] == '?' ? number + " of the program" : std::string(line));
}

[[noreturn]] void report_race(uint32_t byte, const Access& now, const Access& before) {
  fatal_race(byte, now, before, describe);
}

template <class T>
FAST T value_at(uint32_t first) {
  using Unaligned __attribute__((may_alias, aligned(1))) = T;
  return *reinterpret_cast<const Unaligned*>(shared_memory + first);
}

// `bytes` is a constant where time matters.
FAST inline __attribute__((always_inline)) void get_values(uint64_t (&values)[2], uint32_t first, uint32_t bytes) {
  if (bytes == 16) values[1] = value_at<uint64_t>(first + 8);
  values[0] = bytes == 1   ? value_at<uint8_t>(first)
              : bytes == 2 ? value_at<uint16_t>(first)
              : bytes == 4 ? value_at<uint32_t>(first)
                           : value_at<uint64_t>(first);
}

FAST bool has_changed(const Record& r) {
  uint64_t now[2];
  get_values(now, r.first, r.bytes);
  return now[0] != r.before[0] || (r.bytes == 16 && now[1] != r.before[1]);
}

FAST inline __attribute__((always_inline)) void write_down(uint32_t first, uint32_t bytes, bool writes,
                                                           const void* code) {
  if (__builtin_expect(num_records == max_records, 0)) end_accesses();
  Record& r = records[num_records++];
  r.first = first;
  r.place = place_of(code);
  r.bytes = uint8_t(bytes);
  r.does = is_atomic ? Does::both_atomically : writes ? Does::writes : Does::reads;
  get_values(r.before, first, bytes);
}

FAST uint32_t offset_of(const void* p) { return uint32_t(static_cast<const unsigned char*>(p) - shared_memory); }

FAST bool is_in_launch(size_t first, size_t bytes) { return first < launch_bytes && bytes <= launch_bytes - first; }

// The accesses of the emulator's own functions, which are not instrumented.
void check_range(const void* p, size_t bytes, bool writes) {
  if (is_in_launch(offset_of(p), bytes)) return;
#if defined(__SANITIZE_ADDRESS__)
  (writes ? __asan_report_store_n : __asan_report_load_n)(reinterpret_cast<uintptr_t>(p), bytes);
#else
  fatal("%s %zu bytes at %p, beyond the launch's shared memory", writes ? "writes" : "reads", bytes, p);
#endif
}

// Called for an access that ASan would report: is it to shared memory, and right? Then it is written down.
template <uint32_t bytes>
FAST bool is_shared_access(uintptr_t address, bool writes, const void* code) {
  const uintptr_t first = address - reinterpret_cast<uintptr_t>(shared_memory);
  if (!watches || !is_in_launch(first, bytes)) return false;
  write_down(uint32_t(first), bytes, writes, code);
  return true;
}

// Any number of bytes: a structure.
FAST bool is_shared_access(uintptr_t address, size_t bytes, bool writes, const void* code) {
  const uintptr_t begin = address - reinterpret_cast<uintptr_t>(shared_memory);
  if (!watches || !is_in_launch(begin, bytes)) return false;
  for (uint32_t first = uint32_t(begin), end = uint32_t(begin + bytes), n; first < end; first += n) {
    n = 16;
    while (n > end - first) n /= 2;
    write_down(first, n, writes, code);
  }
  return true;
}

// Cells must be as small as the smallest access, or neighbours would seem to be accessed, too.
FAST void fit_cells(const Record& r) {
  if (((r.first | r.bytes) & (cell_bytes - 1)) == 0) return;
  while (((r.first | r.bytes) & (cell_bytes - 1)) != 0) cell_bytes /= 2;
  races->split_cells(cell_bytes, launch_bytes);
}

// What the thread has only announced to read, and has written too.
void tell_hidden_writes(uint32_t thread, const Record& r) {
  uint64_t now[2];
  get_values(now, r.first, r.bytes);
  for (uint32_t i = 0; i < r.bytes; i += cell_bytes) {
    const uint64_t difference = (now[i / 8] ^ r.before[i / 8]) >> i % 8 * 8 << (8 - cell_bytes) * 8;
    if (difference != 0 && !races->has_just_written(thread, r.first + i))
      races->write(thread, r.first + i, cell_bytes, r.place, Races::Kind::plain);
  }
}

// Tells races what the thread that runs has written down.
FAST void tell_accesses() {
  const uint32_t thread = number_of_thread(), warp = thread / 32, lane = 1u << thread % 32, count = num_records;
  num_records = 0;
  bool hidden_writes = false;
  for (const Record* r = records; r < records + count; r++) {
    fit_cells(*r);
    if (r->does == Does::reads) {
      races->read(warp, lane, r->first, r->bytes, r->place);
      hidden_writes = hidden_writes || has_changed(*r);
    } else {
      const Races::Kind kind = r->does == Does::both_atomically ? Races::Kind::atomic
                               : has_changed(*r)                ? Races::Kind::plain
                                                                : Races::Kind::same_value;
      races->write(thread, r->first, r->bytes, r->place, kind);
    }
  }
  for (const Record* r = records; hidden_writes && r < records + count; r++)
    if (r->does == Does::reads && has_changed(*r)) tell_hidden_writes(thread, *r);
}

}  // namespace

bool looks_for_races() { return looks; }
void look_for_races(bool yes) { looks = yes; }

void fatal_race(uint32_t byte, const Access& now, const Access& before,
                const std::function<std::string(uint32_t op)>& describe) {
  const auto index = [](uint32_t thread) {
    return uint3{thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
  };
  threadIdx = index(now.thread);
  running().in_thread = true;
  const uint3 other = index(before.thread);
  if (now.needs_proxy_fence)
    fatal("byte %u of shared memory, no fence.proxy.async between: reads it %s; thread (%u,%u,%u) has written it %s, "
          "through the generic proxy",
          byte, describe(now.op).c_str(), other.x, other.y, other.z, describe(before.op).c_str());
  fatal("race: byte %u of shared memory, no barrier between: %s it %s; thread (%u,%u,%u) %s it %s", byte,
        now.writes ? "writes" : "reads", describe(now.op).c_str(), other.x, other.y, other.z,
        before.writes ? "has written" : "has read", describe(before.op).c_str());
}

void begin_accesses(size_t shared_bytes) {
  cell_bytes = 4;
  launch_bytes = uint32_t(shared_bytes);
  launch_begins = true;
#if defined(__SANITIZE_ADDRESS__)
  if (looks && races == nullptr) races = new Races(report_race);
#endif
}

// Races are looked for in the block of a launch that runs first, and in a quarter of the others: in all of them,
// attention's tests would take 17 % longer instead of 11 %.
void begin_block_accesses(uint32_t num_warps) {
  watches = looks && races != nullptr && (launch_begins || rng.below(4) == 0);
  launch_begins = false;
  if (watches) {
    close_shared_memory();
    races->begin_block(num_warps, cell_bytes);
  } else {
    open_shared_memory(launch_bytes);
  }
}

FAST void end_accesses() {
  if (num_records != 0) tell_accesses();
}

void end_all_accesses() {
  watches = false;
  close_shared_memory();
}

void order_accesses_of_warps(uint32_t warps) {
  if (watches) races->block_barrier(warps);
}

void order_accesses_of_lanes(uint32_t warp, uint32_t lanes) {
  if (watches) races->warp_barrier(warp, lanes);
}

void matrix_row_is_read(uint32_t warp, const void* row, const void* code) {
  check_range(row, 16, false);
  if (watches) races->read(warp, ~0u, offset_of(row), 16, place_of(code));
}

void copy_starts(const AsyncCopy& copy) {
  check_range(copy.to, size_t(copy.bytes), true);
  end_accesses();
  if (watches) races->start_copy(number_of_thread(), offset_of(copy.to), uint32_t(copy.bytes), place_of(copy.code));
}

void copy_ends(uint32_t thread, const AsyncCopy& copy) {
  end_accesses();
  if (watches) races->end_copy(thread, offset_of(copy.to), uint32_t(copy.bytes));
}

void begin_atomic() { is_atomic = true; }
void end_atomic() { is_atomic = false; }

}  // namespace emu

#if defined(__SANITIZE_ADDRESS__)
// What g++'s code calls for an access to poisoned memory. If it is an error, AddressSanitizer's function reports it.
#define EMU_ON_ACCESS(name, bytes, writes)                                                                          \
  extern "C" void __asan_report_##name(uintptr_t address);                                                          \
  extern "C" FAST void __asan_report_##name##_noabort(uintptr_t address) {                                          \
    if (!emu::is_shared_access<bytes>(address, writes, __builtin_return_address(0))) __asan_report_##name(address); \
  }
EMU_ON_ACCESS(load1, 1, false)
EMU_ON_ACCESS(load2, 2, false)
EMU_ON_ACCESS(load4, 4, false)
EMU_ON_ACCESS(load8, 8, false)
EMU_ON_ACCESS(load16, 16, false)
EMU_ON_ACCESS(store1, 1, true)
EMU_ON_ACCESS(store2, 2, true)
EMU_ON_ACCESS(store4, 4, true)
EMU_ON_ACCESS(store8, 8, true)
EMU_ON_ACCESS(store16, 16, true)
#undef EMU_ON_ACCESS

extern "C" FAST void __asan_report_load_n_noabort(uintptr_t address, size_t bytes) {
  if (!emu::is_shared_access(address, bytes, false, __builtin_return_address(0))) __asan_report_load_n(address, bytes);
}
extern "C" FAST void __asan_report_store_n_noabort(uintptr_t address, size_t bytes) {
  if (!emu::is_shared_access(address, bytes, true, __builtin_return_address(0))) __asan_report_store_n(address, bytes);
}
#endif

// Device memory. It has a range of addresses of its own, with a poisoned red zone before and after each allocation, so
// that AddressSanitizer finds every access of a kernel outside of its allocations. While host code runs, the range has
// no access rights. New memory is filled with 0xff. Poison is in units of 8 bytes: only the tail of a unit can be
// poisoned, and a store between two tensors is found only where the gap is. A kernel of g++'s that reads ordinary host
// memory is not found.
#include <sys/mman.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include "emu.h"
#include "llmc/base/meminfo.h"

namespace emu {
namespace {

constexpr size_t page = 4096;
constexpr size_t red_zone = 4096;               // bytes, at least, before and after
constexpr size_t alignment = 256;               // what cudaMalloc guarantees, and no more: see below
constexpr size_t reserved = size_t(1) << 40;    // addresses, not memory
constexpr size_t quarantine = size_t(8) << 30;  // bytes of addresses that are used before freed ones are used again

struct DeviceMemory {
  uintptr_t base = 0;
  size_t used = 0;  // bytes from base that have ever been handed out
  int opened = 0;
  std::map<uintptr_t, size_t> allocations;  // first byte -> bytes
  std::map<uintptr_t, size_t> free_spans;   // first byte -> bytes; each has been an allocation with its red zones
  std::map<uintptr_t, size_t> pinned;       // host memory from cudaMallocHost
  size_t most = 0;                          // bytes of SLA_EMU_MEMORY; 0: what the machine has
  size_t libraries[3] = {};                 // bytes that each takes
  bool is_taken[3] = {};
};

DeviceMemory& memory() {
  static DeviceMemory& memory = *[] {
    auto* m = new DeviceMemory;  // never destroyed: memory may be freed after main()
    void* p = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fatal("cannot reserve %zu GB of addresses for device memory", reserved >> 30);
    madvise(p, reserved, MADV_HUGEPAGE);  // opening and closing costs per page; only advice
    m->base = reinterpret_cast<uintptr_t>(p);
    if (const char* sizes = getenv("SLA_EMU_MEMORY")) {
      if (sscanf(sizes, "%zu,%zu,%zu,%zu", &m->most, &m->libraries[0], &m->libraries[1], &m->libraries[2]) < 1)
        fatal("SLA_EMU_MEMORY is \"%s\"; it should be the GPU's megabytes, and those of modules, graphs and NCCL: "
              "1200,600,100,200",
              sizes);
      m->most *= 1000000;
      for (size_t& bytes : m->libraries) bytes *= 1000000;
    }
    return m;
  }();
  return memory;
}

void protect(int rights) {
  DeviceMemory& m = memory();
  if (m.used != 0 && mprotect(reinterpret_cast<void*>(m.base), m.used, rights) != 0)
    fatal("mprotect of device memory failed");
}

// Addresses are reused late, so that accesses through a pointer to freed memory are found.
uintptr_t take_span(size_t bytes) {
  DeviceMemory& m = memory();
  if (m.used >= quarantine) {
    for (auto it = m.free_spans.begin(); it != m.free_spans.end(); ++it) {
      if (it->second < bytes) continue;
      const auto [begin, size] = *it;
      m.free_spans.erase(it);
      if (size > bytes) m.free_spans[begin + bytes] = size - bytes;
      return begin;
    }
  }
  if (m.used + bytes > reserved) return 0;
  m.used += bytes;
  return m.base + m.used - bytes;
}

void give_span(uintptr_t begin, size_t bytes) {
  std::map<uintptr_t, size_t>& spans = memory().free_spans;
  auto it = spans.emplace(begin, bytes).first;
  if (auto next = std::next(it); next != spans.end() && it->first + it->second == next->first) {
    it->second += next->second;
    spans.erase(next);
  }
  if (it != spans.begin()) {
    if (auto before = std::prev(it); before->first + before->second == it->first) {
      before->second += it->second;
      spans.erase(it);
    }
  }
}

// An allocation begins 256 bytes past a page: code that relies on more than cudaMalloc's alignment fails.
constexpr size_t lead = red_zone + alignment;
size_t span_bytes(size_t bytes) { return (lead + bytes + red_zone + page - 1) / page * page; }

// The last allocation that begins at or before p; end() if none does.
std::map<uintptr_t, size_t>::const_iterator allocation_before(uintptr_t p) {
  const auto& allocations = memory().allocations;
  auto it = allocations.upper_bound(p);
  return it == allocations.begin() ? allocations.end() : std::prev(it);
}

}  // namespace

OpenMemory::OpenMemory() {
  if (memory().opened++ == 0) protect(PROT_READ | PROT_WRITE);
}

OpenMemory::~OpenMemory() {
  if (--memory().opened == 0) protect(PROT_NONE);
}

bool is_device_memory(const void* p) { return reinterpret_cast<uintptr_t>(p) - memory().base < reserved; }

bool is_accessible(const void* p, size_t bytes) {
  const uintptr_t offset = reinterpret_cast<uintptr_t>(p) - memory().base;
  return offset < memory().used && bytes <= memory().used - offset && first_poisoned(p, bytes) == nullptr;
}

bool is_pinned(const void* p, size_t bytes) {
  const auto& pinned = memory().pinned;
  const uintptr_t first = reinterpret_cast<uintptr_t>(p);
  auto it = pinned.upper_bound(first);
  if (it == pinned.begin()) return false;
  --it;
  return first + bytes <= it->first + it->second;
}

bool describe_device_address(const void* p, char* text, size_t size) {
  if (!is_device_memory(p)) return false;
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  const auto before = allocation_before(address);
  const auto after = memory().allocations.upper_bound(address);
  if (before != memory().allocations.end() && address - before->first < before->second) {
    snprintf(text, size, "byte %zu of a device allocation of %zu bytes%s", address - before->first, before->second,
             first_poisoned(p, 1) != nullptr ? ", which the program itself has poisoned (a gap between tensors?)" : "");
  } else if (before != memory().allocations.end() && address - (before->first + before->second) < red_zone) {
    snprintf(text, size, "%zu bytes past the end of a device allocation of %zu bytes",
             address - (before->first + before->second), before->second);
  } else if (after != memory().allocations.end() && after->first - address <= red_zone) {
    snprintf(text, size, "%zu bytes before a device allocation of %zu bytes", after->first - address, after->second);
  } else {
    snprintf(text, size, "device memory that is not allocated, or no longer");
  }
  return true;
}

void check_device_range(const char* what, const void* p, size_t bytes, Gaps gaps) {
  if (bytes == 0) return;
  char where[256];
  if (!describe_device_address(p, where, sizeof where)) fatal("%s at %p is not device memory", what, p);
  const uintptr_t first = reinterpret_cast<uintptr_t>(p);
  const auto it = allocation_before(first);
  if (it == memory().allocations.end() || first - it->first >= it->second) fatal("%s at %p is %s", what, p, where);
  const size_t left = it->second - (first - it->first);
  if (bytes > left) fatal("%s at %p has %zu bytes, %zu more than are left: %s", what, p, bytes, bytes - left, where);
  const void* hole = gaps == Gaps::refuse ? first_poisoned(p, bytes) : nullptr;
  if (hole == nullptr) return;
  describe_device_address(hole, where, sizeof where);
  fatal("%s at %p has %zu bytes, among them %s", what, p, bytes, where);
}

size_t memory_available() {
  const DeviceMemory& m = memory();
  if (m.most == 0) return host_memory_available();
  size_t taken = counters().bytes_allocated;
  for (int library = 0; library < 3; library++) taken += m.is_taken[library] ? m.libraries[library] : 0;
  return m.most - std::min(m.most, taken);
}
size_t memory_total() { return memory().most != 0 ? memory().most : meminfo_bytes("MemTotal"); }

bool take_for(Library library) {
  DeviceMemory& m = memory();
  if (!m.is_taken[int(library)] && m.libraries[int(library)] > memory_available()) return false;
  return m.is_taken[int(library)] = true;
}

void* allocate(size_t bytes) {
  if (bytes > memory_available()) return nullptr;
  const uintptr_t begin = take_span(span_bytes(bytes));
  if (begin == 0) return nullptr;
  OpenMemory open;
  void* p = reinterpret_cast<void*>(begin + lead);
  poison(reinterpret_cast<void*>(begin), span_bytes(bytes));
  unpoison(p, bytes);
  fill(p, 0xff, bytes);  // NaN, as float and as bf16: a read before the first write shows in the result
  memory().allocations[begin + lead] = bytes;
  Counters& counters = mutable_counters();
  counters.bytes_allocated += bytes;
  counters.most_bytes_allocated = std::max(counters.most_bytes_allocated, counters.bytes_allocated);
  return p;
}

bool release(void* p) {
  const auto it = memory().allocations.find(reinterpret_cast<uintptr_t>(p));
  if (it == memory().allocations.end()) return false;
  const uintptr_t begin = it->first - lead;
  const size_t bytes = span_bytes(it->second);
  mutable_counters().bytes_allocated -= it->second;
  memory().allocations.erase(it);
  poison(reinterpret_cast<void*>(begin), bytes);
  madvise(reinterpret_cast<void*>(begin), bytes, MADV_DONTNEED);
  give_span(begin, bytes);
  return true;
}

void* allocate_pinned(size_t bytes) {
  void* p = malloc(bytes);  // ASan's: with red zones
  if (p == nullptr) return nullptr;
  fill(p, 0xff, bytes);
  memory().pinned[reinterpret_cast<uintptr_t>(p)] = bytes;
  return p;
}

bool release_pinned(void* p) {
  if (memory().pinned.erase(reinterpret_cast<uintptr_t>(p)) == 0) return false;
  free(p);
  return true;
}

}  // namespace emu

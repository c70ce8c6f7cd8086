// An emulated AMX unit, for CPUs with AVX512-BF16 and without AMX: oneDNN's kernels for AMX run there, instruction by
// instruction.
//
//   ONEDNN_CPUID=build/onednn_cpuid.txt LD_PRELOAD=build/emulated_amx.so PROGRAM
//
// ONEDNN_CPUID lists where oneDNN asks for the CPU's features (dev/make/tests.mk makes it with objdump). Those
// instructions are replaced by illegal ones before main(). The CPU does not know AMX's instructions either: each raises
// SIGILL, whose handler does what the instruction does (Intel's Software Developer's Manual, volume 2) on tiles that
// each thread has. A trap takes some microseconds; all other code runs at full speed.
//
// What the manual calls #UD or #GP ends the program with a message: tiles used before LDTILECFG or before Linux has
// allowed it (arch_prctl), shapes that do not fit, and instructions other than those that bf16 takes. At the program's
// end the number of instructions of each kind goes to stderr.
#include <cpuid.h>
#include <dlfcn.h>
#include <immintrin.h>
#include <link.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>

namespace {

// ----------------------------------------------------------------------------
// The unit's state, of each thread

constexpr int num_tiles = 8, max_rows = 16, bytes_of_row = 64;

struct Unit {
  bool configured = false;
  int rows[num_tiles], bytes[num_tiles];  // of a row
  alignas(64) uint8_t tiles[num_tiles][max_rows][bytes_of_row];
};
// In the thread's block of static storage: a signal handler must not allocate.
thread_local Unit unit __attribute__((tls_model("initial-exec")));

std::atomic<bool> allowed{false};  // by arch_prctl

enum Kind { ldtilecfg, tilerelease, tilezero, tileload, tilestore, tdpbf16ps, num_kinds };
const char* const kind_names[num_kinds] = {"LDTILECFG", "TILERELEASE", "TILEZERO",
                                           "TILELOADD", "TILESTORED",  "TDPBF16PS"};
std::atomic<long long> counts[num_kinds];

// Ends the program; for use in a signal handler.
[[noreturn]] void fail(const char* what, const void* at = nullptr) {
  char text[256];
  const int length = snprintf(text, sizeof text, "error: emulated AMX: %s (at %p)\n", what, at);
  if (write(2, text, size_t(length)) < 0) _exit(99);
  _exit(98);
}

// ----------------------------------------------------------------------------
// Instructions

// The operand of LDTILECFG: byte 0 is the palette, 1 the row to begin with after an interrupted load, 2 to 15 are
// reserved; then 16 times bytes per row, uint16, and 16 times rows, uint8.
void configure(const uint8_t* config, const void* at) {
  unit.configured = config[0] != 0;
  if (!unit.configured) return;
  if (config[0] != 1) fail("LDTILECFG of an unknown palette", at);
  for (int i = 1; i < 16; i++)
    if (config[i] != 0) fail("LDTILECFG with a reserved byte, or a first row, that is not 0", at);
  for (int t = 0; t < 16; t++) {
    uint16_t bytes;
    memcpy(&bytes, config + 16 + 2 * t, sizeof bytes);
    const int rows = config[48 + t];
    if (t >= num_tiles ? bytes != 0 || rows != 0
                       : bytes > bytes_of_row || rows > max_rows || (bytes == 0) != (rows == 0))
      fail("LDTILECFG of a tile that is too large or half empty", at);
    if (t < num_tiles) unit.rows[t] = rows, unit.bytes[t] = bytes;
  }
  memset(unit.tiles, 0, sizeof unit.tiles);
}

void check_configured(int tile, const void* at) {
  if (!unit.configured || unit.rows[tile] == 0) fail("a tile that LDTILECFG has not configured", at);
}

void load(int tile, const uint8_t* memory, int64_t stride) {
  memset(unit.tiles[tile], 0, sizeof unit.tiles[tile]);
  for (int row = 0; row < unit.rows[tile]; row++)
    memcpy(unit.tiles[tile][row], memory + row * stride, size_t(unit.bytes[tile]));
}

void store(int tile, uint8_t* memory, int64_t stride) {
  for (int row = 0; row < unit.rows[tile]; row++)
    memcpy(memory + row * stride, unit.tiles[tile][row], size_t(unit.bytes[tile]));
}

// d (rows, n) += a (rows, 2 k) b (2 k, n) in fp32, where b's rows 2 i and 2 i + 1 lie interleaved in its tile's row i.
// The sums over even and odd rows of b are formed apart, from zero on, and added in the end; subnormal numbers count as
// zero. Products of bf16 are exact in fp32.
void multiply(int d, int a, int b, const void* at) {
  for (int tile : {d, a, b}) check_configured(tile, at);
  if (d == a || d == b || a == b) fail("TDPBF16PS of a tile and itself", at);
  if (unit.bytes[d] % 4 != 0 || unit.bytes[a] % 4 != 0 || unit.bytes[b] != unit.bytes[d] ||
      unit.rows[a] != unit.rows[d] || unit.bytes[a] != 4 * unit.rows[b])
    fail("TDPBF16PS of tiles whose shapes do not fit", at);
  _mm_setcsr(_mm_getcsr() | 0x8040);  // flush to zero, denormals are zero; the kernel restores the program's
  using Words = uint32_t __attribute__((vector_size(bytes_of_row)));
  using Floats = float __attribute__((vector_size(bytes_of_row)));
  for (int row = 0; row < unit.rows[d]; row++) {
    Floats even = {}, odd = {}, sums;
    for (int k = 0; k < unit.rows[b]; k++) {
      Words a_two, b_two;
      uint32_t two;
      memcpy(&two, unit.tiles[a][row] + 4 * k, sizeof two);
      memcpy(&b_two, unit.tiles[b][k], sizeof b_two);
      a_two = Words{} + two;
      even += Floats(a_two << 16) * Floats(b_two << 16);
      odd += Floats(a_two & 0xffff0000) * Floats(b_two & 0xffff0000);
    }
    memcpy(&sums, unit.tiles[d][row], sizeof sums);
    sums += even + odd;
    memcpy(unit.tiles[d][row], &sums, size_t(unit.bytes[d]));
  }
}

// ----------------------------------------------------------------------------
// Decoding: C4, then R X B (inverted) and the opcode's map, then W, vvvv (inverted), L and the prefix, then opcode and
// ModRM

using Registers = greg_t*;

int64_t general_register(Registers registers, int number) {
  static const int places[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                 REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return registers[places[number]];
}

struct Operand {
  uint8_t* address;
  int64_t stride;  // the SIB byte's index, scaled; 0 without
  int length;      // in bytes, of ModRM and what belongs to it
};

Operand memory_operand(Registers registers, const uint8_t* modrm, bool x, bool b) {
  const int mod = modrm[0] >> 6, rm = modrm[0] & 7;
  Operand operand = {nullptr, 0, 1};
  int base = rm + 8 * b;
  if (rm == 4) {
    const int sib = modrm[1], index = (sib >> 3 & 7) + 8 * x;
    operand.length++;
    base = (sib & 7) + 8 * b;
    if (index != 4) operand.stride = general_register(registers, index) << (sib >> 6);
  }
  if (mod == 0 && (base & 7) == 5) fail("an address without a base register", modrm);
  int64_t address = general_register(registers, base);
  if (mod == 1) address += int8_t(modrm[operand.length]), operand.length += 1;
  if (mod == 2) {
    int32_t displacement;
    memcpy(&displacement, modrm + operand.length, sizeof displacement);
    address += displacement, operand.length += 4;
  }
  operand.address = reinterpret_cast<uint8_t*>(address);
  return operand;
}

// Does the instruction of AMX at `code`. Returns its length in bytes, 0 if it is none.
int run_amx(Registers registers, const uint8_t* code) {
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) return 0;
  enum { no_prefix, prefix_66, prefix_f3, prefix_f2 };
  const bool x = (code[1] & 0x40) == 0, b = (code[1] & 0x20) == 0, in_memory = code[4] >> 6 != 3;
  const int prefix = code[2] & 3, third = ~(code[2] >> 3) & 15, opcode = code[3], reg = code[4] >> 3 & 7,
            rm = code[4] & 7;
  Kind kind;
  Operand memory = {nullptr, 0, 1};
  if (opcode == 0x49 && prefix == no_prefix) kind = in_memory ? ldtilecfg : tilerelease;
  else if (opcode == 0x49 && prefix == prefix_f2 && !in_memory) kind = tilezero;
  else if (opcode == 0x4b && in_memory && prefix == prefix_f3) kind = tilestore;
  else if (opcode == 0x4b && in_memory && prefix != no_prefix)
    kind = tileload;  // with 66 a hint that the data will not be used again
  else if (opcode == 0x5c && prefix == prefix_f3 && !in_memory) kind = tdpbf16ps;
  else return 0;
  if (!allowed) fail("an instruction of AMX before arch_prctl has allowed it", code);
  counts[kind].fetch_add(1, std::memory_order_relaxed);
  if (in_memory) memory = memory_operand(registers, code + 4, x, b);
  switch (kind) {
    case ldtilecfg: configure(memory.address, code); break;
    case tilerelease: unit.configured = false; break;
    case tilezero: check_configured(reg, code), memset(unit.tiles[reg], 0, sizeof unit.tiles[reg]); break;
    case tileload: check_configured(reg, code), load(reg, memory.address, memory.stride); break;
    case tilestore: check_configured(reg, code), store(reg, memory.address, memory.stride); break;
    default: multiply(reg, rm, third, code);
  }
  return 4 + memory.length;
}

// ----------------------------------------------------------------------------
// What the CPU says of itself: this CPU's own features with AMX, and the caches and two cores of a Sapphire Rapids, for
// whose sizes oneDNN chooses its blocks

// `illegal` is the instruction ud2. xgetbv has a third byte, and 06 begins no instruction.
constexpr uint8_t illegal[2] = {0x0f, 0x0b}, after_xgetbv = 0x06;

void run_cpuid(Registers registers) {
  const auto leaf = uint32_t(registers[REG_RAX]), sub = uint32_t(registers[REG_RCX]);
  uint32_t a = 0, b = 0, c = 0, d = 0;
  __cpuid_count(leaf, sub, a, b, c, d);
  auto cache = [&](uint32_t type, uint32_t level, uint32_t ways, uint32_t sets, uint32_t sharing) {
    a = type | level << 5 | 1 << 8 | (sharing - 1) << 14 | 63 << 26, b = 63 | (ways - 1) << 22, c = sets - 1, d = 0;
  };
  switch (leaf) {
    case 0: a = 0x1f, b = 0x756e6547, d = 0x49656e69, c = 0x6c65746e; break;  // GenuineIntel
    case 4:
      a = b = c = d = 0;
      if (sub == 0) cache(1, 1, 12, 64, 1);     // 48 KB for data
      if (sub == 1) cache(2, 1, 8, 64, 1);      // 32 KB for instructions
      if (sub == 2) cache(3, 2, 16, 2048, 1);   // 2 MB
      if (sub == 3) cache(3, 3, 15, 57344, 2);  // 52.5 MB
      break;
    case 7:
      if (sub == 0) d |= 1 << 22 | 1 << 24 | 1 << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
      break;
    case 0xb:
    case 0x1f: a = sub == 0 ? 0 : 1, b = sub == 0 ? 1 : sub == 1 ? 2 : 0, c = sub | (sub < 2 ? sub + 1 : 0) << 8; break;
    case 0x1d:
      a = sub == 0 ? 1 : num_tiles * max_rows * bytes_of_row | max_rows * bytes_of_row << 16;
      b = sub == 0 ? 0 : bytes_of_row | num_tiles << 16, c = sub == 0 ? 0 : max_rows, d = 0;
      break;
    case 0x1e: a = c = d = 0, b = sub == 0 ? 16 | bytes_of_row << 8 : 0; break;
  }
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
}

constexpr uint64_t tile_state = 3 << 17;  // in XCR0 and in arch_prctl's masks

void run_xgetbv(Registers registers) {
  uint32_t a, d;
  asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(uint32_t(registers[REG_RCX])));
  registers[REG_RAX] = registers[REG_RCX] == 0 ? a | uint32_t(tile_state) : a, registers[REG_RDX] = d;
}

// ----------------------------------------------------------------------------
// Traps

// Instructions of AMX that follow each other share a trap.
void on_illegal_instruction(int, siginfo_t*, void* context) {
  const Registers registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const auto* code = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
  if (memcmp(code, illegal, sizeof illegal) == 0) {
    if (code[2] == after_xgetbv) run_xgetbv(registers), code += 3;
    else run_cpuid(registers), code += 2;
  } else {
    int length = run_amx(registers, code);
    if (length == 0) fail("an illegal instruction that is none of AMX's for bf16", code);
    for (; length > 0; length = run_amx(registers, code)) code += length;
  }
  registers[REG_RIP] = greg_t(code);
}

// Replaces the instruction at `code`, cpuid or xgetbv, by one that traps.
void replace(uint8_t* code, const char* name) {
  const bool is_cpuid = strcmp(name, "cpuid") == 0;
  static const uint8_t cpuid[] = {0x0f, 0xa2}, xgetbv[] = {0x0f, 0x01, 0xd0};
  if (is_cpuid ? memcmp(code, cpuid, sizeof cpuid) != 0 : memcmp(code, xgetbv, sizeof xgetbv) != 0)
    fail("ONEDNN_CPUID is of another oneDNN; `make clean` and build again", code);
  auto* const page = reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(code) & ~uintptr_t(4095));
  if (mprotect(page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) fail("mprotect failed", code);
  memcpy(code, illegal, sizeof illegal);
  if (!is_cpuid) code[2] = after_xgetbv;
  if (mprotect(page, 8192, PROT_READ | PROT_EXEC) != 0) fail("mprotect failed", code);
}

int replace_in_onednn(dl_phdr_info* library, size_t, void* path) {
  if (strstr(library->dlpi_name, "libdnnl") == nullptr) return 0;
  FILE* const file = fopen(static_cast<const char*>(path), "r");
  if (file == nullptr) fail("ONEDNN_CPUID names no file");
  unsigned long long address;
  char name[16];
  while (fscanf(file, "%llx: %15s", &address, name) == 2)
    replace(reinterpret_cast<uint8_t*>(library->dlpi_addr + address), name);
  fclose(file);
  return 1;
}

// Runs before oneDNN's own constructors, which ask for the features (the linker's option -z initfirst), and so before
// getenv works. Programs without oneDNN, such as a shell that starts the one in question, run as they would.
__attribute__((constructor)) void begin(int, char**, char** environment) {
  constexpr char name[] = "ONEDNN_CPUID=";
  while (*environment != nullptr && strncmp(*environment, name, strlen(name)) != 0) environment++;
  if (*environment == nullptr) fail("ONEDNN_CPUID is not set");
  struct sigaction action = {};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  if (sigaction(SIGILL, &action, nullptr) != 0) fail("sigaction failed");
  dl_iterate_phdr(replace_in_onednn, *environment + strlen(name));
}

__attribute__((destructor)) void end() {
  if (counts[ldtilecfg] == 0) return;
  fprintf(stderr, "emulated AMX:");
  for (int kind = 0; kind < num_kinds; kind++)
    fprintf(stderr, " %lld %s%s", counts[kind].load(), kind_names[kind], kind + 1 < num_kinds ? "," : "\n");
}

}  // namespace

// Linux gives a process AMX's state when it asks for it, and oneDNN asks through this function of the C library.
extern "C" long syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long a[6];
  for (long& argument : a) argument = va_arg(list, long);
  va_end(list);
  constexpr long get_permission = 0x1022, request_permission = 0x1023, tile_data = 18;
  if (number == SYS_arch_prctl && a[0] == request_permission && a[1] == tile_data) return allowed = true, 0;
  if (number == SYS_arch_prctl && a[0] == get_permission)
    return *reinterpret_cast<uint64_t*>(a[1]) = allowed ? tile_state : 0, 0;
  static const auto real = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

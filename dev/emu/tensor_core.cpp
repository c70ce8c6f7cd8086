// Tensor cores and asynchronous copies. Fragment layouts are as in the PTX manual's section on warp-level matrix
// instructions: with group = lane / 4 and i = lane % 4,
//
//   a (16 x 16)   register r holds row group + 8 (r % 2), columns 2 i + 8 (r / 2) and the next
//   b (16 x 8)    register r holds column group, rows 2 i + 8 r and the next
//   d (16 x 8)    element e is at row group + 8 (e / 2), column 2 i + e % 2
//   ldmatrix      register r holds of the r-th 8 x 8 matrix row group, columns 2 i and the next;
//                 transposed, column group, rows 2 i and the next. Lane n passes the address of row n % 8 of matrix n
//                 / 8.
#include <cstring>
#include "emu.h"
#include "ptx/floats.h"

extern unsigned char shared_memory[];

namespace emu {
namespace {

// Functions that run for every mma are compiled without ASan's checks, which would take longer than the work.
#define FAST __attribute__((no_sanitize("address")))

struct MmaOperands {
  float* d;
  const unsigned *a, *b;
  MmaType type;
};

struct LdmatrixOperands {
  unsigned* d;
  const unsigned char* row;
  const void* code;  // where the lane has called it
};

// The lower half of a register as a float.
template <MmaType type>
FAST float low_half(unsigned two) {
  if constexpr (type == MmaType::f16) return ptx::float_of_f16(uint16_t(two));
  else return ptx::float_of_bf16(uint16_t(two));
}
template <MmaType type>
FAST float high_half(unsigned two) {
  return low_half<type>(two >> 16);
}

bool is_shared(const void* p, size_t bytes) {
  const auto* byte = static_cast<const unsigned char*>(p);
  return byte >= shared_memory && byte + bytes <= shared_memory + max_shared_bytes;
}

// ASan checks what is read; what is written has been checked.
FAST void copy_now(const AsyncCopy& copy) {
  unsigned char bytes[16] = {};
  memcpy(bytes, copy.from, size_t(copy.bytes_read));
  for (int i = 0; i < copy.bytes; i++) static_cast<volatile unsigned char*>(copy.to)[i] = bytes[i];
}

// Products are exact in float, as on the tensor core. The order of a tensor core's additions is not documented; here
// they are in the order of k.
template <MmaType type>
FAST void run_mma_of(void* const (&operands)[32]) {
  using Row = float __attribute__((vector_size(32)));
  float a[16][16];
  Row b[16], d[16];
  for (int lane = 0; lane < 32; lane++) {
    const auto& own = *static_cast<const MmaOperands*>(operands[lane]);
    const int group = lane / 4, pair = lane % 4;
    for (int r = 0; r < 4; r++) {
      a[group + 8 * (r % 2)][2 * pair + 8 * (r / 2)] = low_half<type>(own.a[r]);
      a[group + 8 * (r % 2)][2 * pair + 8 * (r / 2) + 1] = high_half<type>(own.a[r]);
    }
    for (int r = 0; r < 2; r++) {
      b[2 * pair + 8 * r][group] = low_half<type>(own.b[r]);
      b[2 * pair + 8 * r + 1][group] = high_half<type>(own.b[r]);
    }
    for (int i = 0; i < 4; i++) d[group + 8 * (i / 2)][2 * pair + i % 2] = own.d[i];
  }
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++) d[row] += a[row][k] * b[k];
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < 4; i++)
      static_cast<const MmaOperands*>(operands[lane])->d[i] = d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
}

}  // namespace

FAST void run_mma(void* const (&operands)[32]) {
  if (static_cast<const MmaOperands*>(operands[0])->type == MmaType::f16) run_mma_of<MmaType::f16>(operands);
  else run_mma_of<MmaType::bf16>(operands);
}

// Shared memory has 32 banks of 4 bytes: the eight rows of a matrix are read at once if they are in different eighths
// of 128 bytes.
FAST void run_ldmatrix(uint32_t warp, void* const (&operands)[32], bool transposed) {
  uint16_t rows[4][8][8];
  for (int matrix = 0; matrix < 4; matrix++) {
    unsigned eighths = 0;
    for (int row = 0; row < 8; row++) {
      const auto& lane = *static_cast<const LdmatrixOperands*>(operands[8 * matrix + row]);
      const unsigned char* from = lane.row;
      matrix_row_is_read(warp, from, lane.code);
      memcpy(rows[matrix][row], from, 16);
      eighths |= 1u << (from - shared_memory) / 16 % 8;
    }
    mutable_counters().matrices_loaded++;
    mutable_counters().bank_conflicts += eighths != 0xff;
  }
  for (int lane = 0; lane < 32; lane++)
    for (int r = 0; r < 4; r++) {
      const int group = lane / 4, pair = lane % 4;
      const uint16_t low = transposed ? rows[r][2 * pair][group] : rows[r][group][2 * pair];
      const uint16_t high = transposed ? rows[r][2 * pair + 1][group] : rows[r][group][2 * pair + 1];
      static_cast<const LdmatrixOperands*>(operands[lane])->d[r] = low | unsigned(high) << 16;
    }
}

void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], MmaType type, Site site) {
  MmaOperands operands = {d, a, b, type};
  meet_warp(SyncPoint::mma, 0xffffffffu, reinterpret_cast<uint64_t>(&operands), 0, 32, site);
}

void ldmatrix_x4(unsigned (&d)[4], const void* row, bool transposed, Site site) {
  if (!is_shared(row, 16) || reinterpret_cast<uintptr_t>(row) % 16 != 0)
    fatal("ldmatrix at %s:%d: %p is not 16 aligned bytes of shared memory", site.file, site.line, row);
  LdmatrixOperands operands = {d, static_cast<const unsigned char*>(row), __builtin_return_address(0)};
  meet_warp(transposed ? SyncPoint::ldmatrix_trans : SyncPoint::ldmatrix, 0xffffffffu,
            reinterpret_cast<uint64_t>(&operands), 0, 32, site);
}

void cp_async(void* shared, const void* global, int bytes, int bytes_read) {
  if (!running().in_thread) fatal("cp.async: only a kernel can start it");
  if ((bytes != 4 && bytes != 8 && bytes != 16) || bytes_read < 0 || bytes_read > bytes)
    fatal("cp.async of %d bytes, %d of them read", bytes, bytes_read);
  if (!is_shared(shared, size_t(bytes)) || reinterpret_cast<uintptr_t>(shared) % size_t(bytes) != 0)
    fatal("cp.async to %p, which is not %d aligned bytes of shared memory", shared, bytes);
  if (reinterpret_cast<uintptr_t>(global) % size_t(bytes) != 0)
    fatal("cp.async of %d bytes from %p, which is not aligned", bytes, global);
  mutable_counters().bytes_read_async += uint64_t(bytes_read);
  const AsyncCopy copy = {shared, global, bytes, bytes_read, __builtin_return_address(0)};
  copy_starts(copy);
  if (!has_async_copies()) {
    copy_now(copy);
    return copy_ends(number_of_thread(), copy);
  }
  copies_of_thread().pending.push_back(copy);
  if (!copies_are_late()) copy_now(copy);
}

void cp_async_commit_group() {
  AsyncCopies& copies = copies_of_thread();
  size_t grouped = 0;
  for (const size_t n : copies.groups) grouped += n;
  copies.groups.push_back(copies.pending.size() - grouped);
}

void cp_async_wait_group(int groups) {
  AsyncCopies& copies = copies_of_thread();
  size_t done = 0;
  while (copies.groups.size() > size_t(groups)) {
    for (size_t i = 0; i < copies.groups.front(); i++) {
      const AsyncCopy& copy = copies.pending[done++];
      if (copies_are_late()) copy_now(copy);
      copy_ends(number_of_thread(), copy);
    }
    copies.groups.erase(copies.groups.begin());
  }
  copies.pending.erase(copies.pending.begin(), copies.pending.begin() + std::ptrdiff_t(done));
}

void no_wgmma() {
  fatal("wgmma is executed in nvcc's code for sm_90a only: SLA_EMU_PTX names it, and dev/emu/README.md says how to "
        "make "
        "it; or leave out SLA_ATTENTION=wgmma");
}

}  // namespace emu

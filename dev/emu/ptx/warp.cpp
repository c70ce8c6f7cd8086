// What the lanes of a warp do together: shuffles, votes, barriers, products of matrices. The block calls a handler when
// all lanes that take part have come, and they are the active ones then. Places of matrices' elements in lanes and
// registers are as in the PTX manual's section on warp-level matrix instructions, as in ../tensor_core.cpp.
#include <cstring>
#include "../emu.h"
#include "floats.h"
#include "warp.h"

extern unsigned char shared_memory[];

namespace emu::ptx {
namespace {

// ----------------------------------------------------------------------------
// Shuffles. at: result, value, lane or distance, bounds, lanes that take part; list[0]: whether the source is in bounds

enum class Shuffle { up, down, bfly, idx };

template <Shuffle mode>
void run_shuffle(Warp& w, const Op& op) {
  const uint32_t* const value = w.at<uint32_t>(op.at[1]);
  const uint32_t* const operand = w.at<uint32_t>(op.at[2]);
  const uint32_t* const bounds = w.at<uint32_t>(op.at[3]);
  alignas(64) uint32_t values[lanes], in_bounds[lanes];
  for (uint32_t lane = 0; lane < lanes; lane++) {
    const uint32_t n = operand[lane] & 31, clamp = bounds[lane] & 31, segment = bounds[lane] >> 8 & 31;
    const uint32_t first = lane & segment, last = first | (clamp & ~segment);
    const uint32_t source = mode == Shuffle::up     ? lane - n
                            : mode == Shuffle::down ? lane + n
                            : mode == Shuffle::bfly ? lane ^ n
                                                    : first | (n & ~segment);
    const bool inside = mode == Shuffle::up ? int(source) >= int(last) : source <= last;
    const uint32_t from = inside ? source & 31 : lane;
    values[lane] = (w.active >> from & 1) != 0 ? value[from] : ~0u;  // of a lane that takes no part: undefined
    in_bounds[lane] = inside ? ~0u : 0;
  }
  w.set(op.at[0], values);
  if (!op.list.empty()) w.set(op.list[0], in_bounds);
}

bool decode_shuffle(Decoder& d, const Instruction& i, const Words& words, Op& op) {
  op.run = words.has("up")     ? run_shuffle<Shuffle::up>
           : words.has("down") ? run_shuffle<Shuffle::down>
           : words.has("bfly") ? run_shuffle<Shuffle::bfly>
                               : run_shuffle<Shuffle::idx>;
  const Operand& to = i.operands.at(0);
  op.at[0] = d.result(to.kind == Operand::list ? to.parts.at(0) : to, 4);
  if (to.kind == Operand::list) op.list.push_back(d.result(to.parts.at(1), 0));
  for (size_t o = 1; o < 5; o++) op.at[o] = d.source(i.operands.at(o), 4);
  return words.has("sync");
}

// ----------------------------------------------------------------------------
// Votes and reductions. at: result, operand, -, -, lanes that take part

template <class T, class F>
void reduce(Warp& w, const Op& op, F f) {
  const T* const values = w.at<T>(op.at[1]);
  T result = values[first_lane(w.active)];
  for (uint32_t rest = w.active & (w.active - 1); rest != 0; rest &= rest - 1)
    result = f(result, values[first_lane(rest)]);
  alignas(64) T results[lanes];
  std::fill_n(results, lanes, result);
  w.set(op.at[0], results);
}

void run_and(Warp& w, const Op& op) {
  reduce<uint32_t>(w, op, [](uint32_t a, uint32_t b) { return a & b; });
}
void run_or(Warp& w, const Op& op) {
  reduce<uint32_t>(w, op, [](uint32_t a, uint32_t b) { return a | b; });
}
void run_xor(Warp& w, const Op& op) {
  reduce<uint32_t>(w, op, [](uint32_t a, uint32_t b) { return a ^ b; });
}
void run_add(Warp& w, const Op& op) {
  reduce<uint32_t>(w, op, [](uint32_t a, uint32_t b) { return a + b; });
}
template <class T>
void run_min(Warp& w, const Op& op) {
  reduce<T>(w, op, [](T a, T b) { return std::min(a, b); });
}
template <class T>
void run_max(Warp& w, const Op& op) {
  reduce<T>(w, op, [](T a, T b) { return std::max(a, b); });
}

void run_ballot(Warp& w, const Op& op) {
  alignas(64) uint32_t results[lanes];
  std::fill_n(results, lanes, w.bits(op.at[1]) & w.active);
  w.set(op.at[0], results);
}

bool decode_vote(Decoder& d, const Instruction& i, const Words& words, Op& op) {
  const bool ballot = words.has("ballot");
  op.run = ballot ? run_ballot : words.has("any") ? run_or : words.has("all") ? run_and : nullptr;
  op.at[0] = d.result(i.operands.at(0), ballot ? 4 : 0);
  op.at[1] = d.source(i.operands.at(1), 0);
  op.at[4] = d.source(i.operands.at(2), 4);
  return op.run != nullptr && words.has("sync");
}

bool decode_reduction(Decoder& d, const Instruction& i, const Words& words, Op& op) {
  const bool is_signed = words.last() == "s32";
  op.run = words.has("add")   ? run_add
           : words.has("and") ? run_and
           : words.has("or")  ? run_or
           : words.has("xor") ? run_xor
           : words.has("min") ? (is_signed ? run_min<int32_t> : run_min<uint32_t>)
           : words.has("max") ? (is_signed ? run_max<int32_t> : run_max<uint32_t>)
                              : nullptr;
  op.at[0] = d.result(i.operands.at(0), 4);
  op.at[1] = d.source(i.operands.at(1), 4);
  op.at[4] = d.source(i.operands.at(2), 4);
  return op.run != nullptr;
}

// One lane of the mask: the first or, in half of the blocks, the last. at: its number, -, -, -, lanes that take part;
// list[0]: whether the lane is the one.
void run_elect(Warp& w, const Op& op) {
  const uint32_t leader = w.flip == 0 ? uint32_t(first_lane(w.active)) : 31 - uint32_t(__builtin_clz(w.active));
  alignas(64) uint32_t leaders[lanes], is_leader[lanes];
  for (uint32_t i = 0; i < lanes; i++) leaders[i] = leader, is_leader[i] = i == leader ? ~0u : 0;
  w.set(op.at[0], leaders);
  w.set(op.list[0], is_leader);
}

bool decode_elect(Decoder& d, const Instruction& i, const Words& words, Op& op) {
  const Operand& to = i.operands.at(0);
  if (to.kind != Operand::list || !words.has("sync")) return false;
  op.run = run_elect;
  op.at[0] = d.result(to.parts.at(0), 4);
  op.list.push_back(d.result(to.parts.at(1), 0));
  op.at[4] = d.source(i.operands.at(1), 4);
  return true;
}

// ----------------------------------------------------------------------------
// Barriers

void run_warp_barrier(Warp& w, const Op&) {
  if (w.races != nullptr) w.races->warp_barrier(w.number, w.active == w.existing ? ~0u : w.active);
}

// at: result, barrier, threads (-1: all of the block), predicate; number: its Reduction. The block does it.
bool decode_barrier(Decoder& d, const Instruction& i, const Words& words, Op& op) {
  if (words.has("warp")) {
    op.control = Control::lanes_anywhere;
    op.run = run_warp_barrier;
    op.at[4] = d.source(i.operands.at(0), 4);
    return true;
  }
  const bool reduces = words.has("red"), arrives = words.has("arrive");
  if (!reduces && !arrives && !words.has("sync")) return false;
  if (arrives) d.needs_clocks();
  op.control = Control::barrier;
  op.number = int64_t(arrives             ? Reduction::only_arrives
                      : !reduces          ? Reduction::none
                      : words.has("popc") ? Reduction::count
                      : words.has("and")  ? Reduction::all
                                          : Reduction::any);
  const size_t first = reduces ? 1 : 0, end = i.operands.size() - first;
  op.at[1] = d.source(i.operands.at(first), 4);
  op.at[2] = end > first + 1 ? d.source(i.operands[first + 1], 4) : -1;
  if (arrives && op.at[2] < 0) d.fail("it needs a number of threads");
  if (reduces) {
    op.at[0] = d.result(i.operands[0], words.has("popc") ? 4 : 0);
    op.at[3] = d.source(i.operands.back(), 0);
  }
  return true;
}

// ----------------------------------------------------------------------------
// Matrices

float low_bf16(uint32_t two) { return float_of_bf16(uint16_t(two)); }
float high_bf16(uint32_t two) { return float_of_bf16(uint16_t(two >> 16)); }
float low_f16(uint32_t two) { return float_of_f16(uint16_t(two)); }
float high_f16(uint32_t two) { return float_of_f16(uint16_t(two >> 16)); }

// d (16 x 8) = a (16 x K) b (K x 8) + c. list: d, a, b, c. Products are exact in float; they are added in the order of
// k.
template <int K, float low(uint32_t), float high(uint32_t)>
void run_mma_16(Warp& w, const Op& op) {
  using Row = float __attribute__((vector_size(32)));
  constexpr int of_a = 4, of_b = of_a + K / 4, of_c = of_b + K / 8;  // in the list
  float a[16][K];
  Row b[K], d[16];
  const auto reg = [&](int r) { return w.at<uint32_t>(op.list[size_t(r)]); };
  for (int r = 0; r < K / 4; r++)
    for (int lane = 0; lane < lanes; lane++) {
      a[lane / 4 + 8 * (r % 2)][2 * (lane % 4) + 8 * (r / 2)] = low(reg(of_a + r)[lane]);
      a[lane / 4 + 8 * (r % 2)][2 * (lane % 4) + 8 * (r / 2) + 1] = high(reg(of_a + r)[lane]);
    }
  for (int r = 0; r < K / 8; r++)
    for (int lane = 0; lane < lanes; lane++) {
      b[2 * (lane % 4) + 8 * r][lane / 4] = low(reg(of_b + r)[lane]);
      b[2 * (lane % 4) + 8 * r + 1][lane / 4] = high(reg(of_b + r)[lane]);
    }
  for (int r = 0; r < 4; r++)
    for (int lane = 0; lane < lanes; lane++)
      d[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2] = as<float>(reg(of_c + r)[lane]);
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < K; k++) d[row] += a[row][k] * b[k];
  for (int r = 0; r < 4; r++)
    for (int lane = 0; lane < lanes; lane++)
      w.at<float>(op.list[size_t(r)])[lane] = d[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2];
}

float tf32(uint32_t bits) { return as<float>(bits & ~0x1fffu); }

// mma.m16n8k8 of tf32: a is 16 x 8, b 8 x 8.
void run_mma_tf32(Warp& w, const Op& op) {
  float a[16][8], b[8][8], d[16][8];
  const auto reg = [&](int r) { return w.at<uint32_t>(op.list[size_t(r)]); };
  for (int lane = 0; lane < lanes; lane++) {
    const int group = lane / 4, i = lane % 4;
    for (int r = 0; r < 4; r++) a[group + 8 * (r % 2)][i + 4 * (r / 2)] = tf32(reg(4 + r)[lane]);
    for (int r = 0; r < 2; r++) b[i + 4 * r][group] = tf32(reg(8 + r)[lane]);
    for (int r = 0; r < 4; r++) d[group + 8 * (r / 2)][2 * i + r % 2] = as<float>(reg(10 + r)[lane]);
  }
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 8; k++)
      for (int n = 0; n < 8; n++) d[row][n] += a[row][k] * b[k][n];
  for (int lane = 0; lane < lanes; lane++)
    for (int r = 0; r < 4; r++)
      w.at<float>(op.list[size_t(r)])[lane] = d[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2];
}

bool decode_mma(Decoder& d, const Instruction& i, Op& op) {
  const std::string shape = "mma.sync.aligned.m16n8";
  op.control = Control::warp;
  op.run = i.opcode == shape + "k16.row.col.f32.bf16.bf16.f32"  ? run_mma_16<16, low_bf16, high_bf16>
           : i.opcode == shape + "k16.row.col.f32.f16.f16.f32"  ? run_mma_16<16, low_f16, high_f16>
           : i.opcode == shape + "k8.row.col.f32.f16.f16.f32"   ? run_mma_16<8, low_f16, high_f16>
           : i.opcode == shape + "k8.row.col.f32.tf32.tf32.f32" ? run_mma_tf32
                                                                : nullptr;
  for (size_t o = 0; o < 4; o++) d.list(i.operands.at(o), op, 4, o == 0);
  return op.run != nullptr && op.list.size() == (op.run == run_mma_16<8, low_f16, high_f16> ? 11 : 14);
}

// Matrices of 8 x 8 elements of 16 bits, one for each register of the list. Lane n has the address of row n % 8 of
// matrix n / 8. at[0]: addresses.
template <bool transposed>
void run_ldmatrix(Warp& w, const Op& op) {
  uint64_t address[lanes];
  w.read_addresses(op, address);
  uint16_t rows[lanes][8];
  const int num_rows = 8 * int(op.list.size());
  for (int n = 0; n < num_rows; n++) {
    const uint64_t offset = address[n] - shared_window;
    if (offset % 16 != 0 || offset + 16 > w.shared_bytes)
      fail(w, op, n,
           "reads 16 bytes at byte %lld of shared memory, which is misaligned or not the block's, which has %u",
           (long long)offset, w.shared_bytes);
    if (w.races != nullptr) w.races->read(w.number, ~0u, uint32_t(offset), 16, w.index_of(op));
    memcpy(rows[n], shared_memory + offset, 16);
  }
  for (int r = 0; r < num_rows / 8; r++) {
    uint32_t eighths = 0;  // of the banks: rows in different ones are read at once
    for (int n = 8 * r; n < 8 * r + 8; n++) eighths |= 1u << address[n] / 16 % 8;
    mutable_counters().matrices_loaded++;
    mutable_counters().bank_conflicts += eighths != 0xff;
    uint32_t* const to = w.at<uint32_t>(op.list[size_t(r)]);
    for (int lane = 0; lane < lanes; lane++) {
      const int group = lane / 4, i = 2 * (lane % 4);
      const uint16_t low = transposed ? rows[8 * r + i][group] : rows[8 * r + group][i];
      const uint16_t high = transposed ? rows[8 * r + i + 1][group] : rows[8 * r + group][i + 1];
      to[lane] = low | uint32_t(high) << 16;
    }
  }
}

bool decode_ldmatrix(Decoder& d, const Instruction& i, const Words& words, Op& op) {
  op.control = Control::warp;
  op.run = words.has("trans") ? run_ldmatrix<true> : run_ldmatrix<false>;
  d.list(i.operands.at(0), op, 4, true);
  d.address(i.operands.at(1), op, 0);
  d.shared_access(16);
  return words.has("m8n8") && words.has("b16") && (words.has("shared") || words.has("shared::cta"));
}

// The opposite of ldmatrix: lane n has the address to which row n % 8 of matrix n / 8 is written.
template <bool transposed>
void run_stmatrix(Warp& w, const Op& op) {
  uint64_t address[lanes];
  w.read_addresses(op, address);
  for (int r = 0; r < int(op.list.size()); r++) {
    const uint32_t* const from = w.at<uint32_t>(op.list[size_t(r)]);
    uint16_t rows[8][8];
    for (int lane = 0; lane < lanes; lane++)
      for (int half = 0; half < 2; half++) {
        const int group = lane / 4, i = 2 * (lane % 4) + half;
        rows[transposed ? i : group][transposed ? group : i] = uint16_t(from[lane] >> 16 * half);
      }
    for (int n = 0; n < 8; n++) {
      const int lane = 8 * r + n;
      if (address[lane] % 16 != 0)
        fail(w, op, lane, "writes 16 bytes at %#llx, misaligned", (unsigned long long)address[lane]);
      const uint32_t offset = shared_offset(w, op, lane, address[lane], 16);
      for (uint32_t e = 0; w.races != nullptr && e < 8; e++) {
        const uint32_t writer = transposed ? e * 4 + uint32_t(n) / 2 : uint32_t(n) * 4 + e / 2;
        w.races->write(w.thread(int(writer)), offset + 2 * e, 2, w.index_of(op), Races::Kind::plain);
      }
      memcpy(shared_memory + offset, rows[n], 16);
    }
  }
}

bool decode_stmatrix(Decoder& d, const Instruction& i, const Words& words, Op& op) {
  op.control = Control::warp;
  op.run = words.has("trans") ? run_stmatrix<true> : run_stmatrix<false>;
  d.address(i.operands.at(0), op, 0);
  d.list(i.operands.at(1), op, 4, false);
  d.shared_access(2);
  return words.has("m8n8") && words.has("b16") && (words.has("shared") || words.has("shared::cta"));
}

}  // namespace

bool decode_warp(Decoder& d, const Instruction& i, const Words& words, Op& op) {
  const std::string& name = words.first();
  if (name == "bar" || name == "barrier") return decode_barrier(d, i, words, op);
  if (name == "mma") return decode_mma(d, i, op);
  if (name == "ldmatrix") return decode_ldmatrix(d, i, words, op);
  if (name == "stmatrix") return decode_stmatrix(d, i, words, op);
  if (name == "setmaxnreg") {
    const uint64_t registers = i.operands.at(0).bits;
    if (registers < 24 || registers > 256 || registers % 8 != 0) d.fail("no warp can have so many registers");
    op.control = Control::warp;
    op.run = [](Warp&, const Op&) {};
    return true;
  }
  const bool of_lanes = name == "shfl" || name == "vote" || name == "redux" || name == "elect";
  op.control = of_lanes ? Control::lanes : Control::none;
  if (name == "elect") return decode_elect(d, i, words, op);
  if (name == "shfl") return decode_shuffle(d, i, words, op);
  if (name == "vote") return decode_vote(d, i, words, op);
  return name == "redux" && decode_reduction(d, i, words, op);
}

}  // namespace emu::ptx

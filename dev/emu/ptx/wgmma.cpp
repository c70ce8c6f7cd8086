// Asynchronous products of matrices: wgmma.mma_async, which the four warps of a warpgroup start together, and
// wgmma.fence, .commit_group and .wait_group. In d (64 x N) = a (64 x K) b (K x N) + d warp w of a warpgroup has rows
// 16 w to 16 w + 15, and a lane has the same of these as of an mma's d and a (warp.cpp).
//
// Where a product has an operand in shared memory, a descriptor says where. The matrix is made of pieces of 16 bytes,
// T = 8 or 4 elements. With W = 2, 4 or 8 pieces in a row of the 32-, 64- or 128-byte swizzle, the piece of
//
//   row mn, columns T kc on (K-major)      is at  start + 16 W (mn % 8) + stride (mn / 8) + 16 kc
//   column k, rows 8 mc on (MN-major)      is at  start + 16 W (k % 8) + stride (k / 8) + 16 (mc % W) + leading (mc /
//   W)
//
// and then bits 4, 5 and 6 of the address, as many as W has, are changed by bits 7, 8 and 9, less the base offset.
// Without a swizzle it is
//
//   K-major    start + 16 (mn % 8) + stride (mn / 8) + leading kc
//   MN-major   start + 16 (k % 8) + leading (k / 8) + stride mc
//
// A product does as much harm as it may. Its accumulators change only when it is waited for. In half of the blocks it
// reads shared memory then, too, and in the others at once. Who touches its registers before, or starts it without a
// wgmma.fence after having touched them, ends the program; ../races.h finds the races of its reads. So does a warp
// that skips a product of its warpgroup, and a descriptor that differs between lanes, has unknown bits or points
// outside.
//
// Products are of bf16, f16 and tf32 into fp32, in all widths, layouts and swizzles, summed one term after the other;
// f16 accumulators, 8 bits and sparse matrices are errors. The base offset of a descriptor is what the manual says: no
// compiler's code here has one.
#include <algorithm>
#include <cstring>
#include "floats.h"
#include "warp.h"

extern unsigned char shared_memory[];

namespace emu::ptx {

struct Factors {
  float a[16][16];   // the warp's rows, unless A is in registers
  float b[16][256];  // [k][n]
};

namespace {

enum class Type { bf16, f16, tf32 };

// What the opcode and the numbers among the operands say.
struct Shape {
  Type type;
  int N;
  bool a_in_registers, negates_a, negates_b, a_is_mn_major, b_is_mn_major;

  int elements_of_piece() const { return type == Type::tf32 ? 4 : 8; }
  int K() const { return 2 * elements_of_piece(); }
  int64_t packed() const {
    return N | int64_t(type) << 10 | int64_t(a_in_registers) << 12 | int64_t(negates_a) << 13 |
           int64_t(negates_b) << 14 | int64_t(a_is_mn_major) << 15 | int64_t(b_is_mn_major) << 16;
  }
  static Shape unpacked(int64_t bits) {
    const auto bit = [bits](int i) { return (bits >> i & 1) != 0; };
    return {Type(bits >> 10 & 3), int(bits & 1023), bit(12), bit(13), bit(14), bit(15), bit(16)};
  }
  // Products of the same kind add to the same accumulators in their order.
  static int64_t kind(int64_t bits) { return bits & 0xfff; }
};

// ----------------------------------------------------------------------------
// Matrices in shared memory

struct Descriptor {
  uint64_t bits;
  bool is_mn_major;

  uint64_t field(int first) const { return (bits >> first & 0x3fff) << 4; }
  uint64_t start() const { return field(0); }
  uint64_t leading() const { return field(16); }
  uint64_t stride() const { return field(32); }
  uint64_t base_offset() const { return bits >> 49 & 7; }
  uint64_t pieces_of_row() const {
    const uint64_t swizzle = bits >> 62;
    return swizzle == 0 ? 1 : 16 >> swizzle;
  }
  bool has_unknown_bits() const { return (bits & 0x3ff1'c000'c000'c000u) != 0; }

  // The address of the piece with the elements from (mn, k) on.
  uint64_t address(uint64_t mn, uint64_t k, uint64_t elements_of_piece) const {
    const uint64_t W = pieces_of_row();
    if (!is_mn_major) {
      const uint64_t at = start() + 16 * W * (mn % 8) + stride() * (mn / 8);
      return swizzled(at + (W == 1 ? leading() : 16) * (k / elements_of_piece), W);
    }
    const uint64_t piece = mn / elements_of_piece;
    if (W == 1) return start() + 16 * (k % 8) + leading() * (k / 8) + stride() * piece;
    return swizzled(start() + 16 * W * (k % 8) + stride() * (k / 8) + 16 * (piece % W) + leading() * (piece / W), W);
  }
  uint64_t swizzled(uint64_t address, uint64_t W) const {
    return address ^ (((address >> 7) - base_offset()) & (W - 1)) << 4;
  }
};

// Calls f(mn, k, offset) for each piece of rows [first, end) and columns [0, K): its first element, and where in shared
// memory it lies.
template <class F>
void each_piece(const Warp& w, const Op& op, const Shape& s, const Descriptor& d, int first, int end, F f) {
  const int T = s.elements_of_piece();
  for (int mn = first; mn < end; mn += d.is_mn_major ? T : 1)
    for (int k = 0; k < s.K(); k += d.is_mn_major ? 1 : T) {
      const uint64_t offset = d.address(uint64_t(mn), uint64_t(k), uint64_t(T)) - shared_window;
      if (offset >= w.shared_bytes || offset + 16 > w.shared_bytes)
        fail(w, op, 0,
             "reads 16 bytes at byte %lld of shared memory, of which the block has %u, by the descriptor %#llx",
             (long long)offset, w.shared_bytes, (unsigned long long)d.bits);
      f(mn, k, uint32_t(offset));
    }
}

// Calls f(offset) for each piece of shared memory that the warp's part of the product reads.
template <class F>
void each_read(const Warp& w, const PendingProduct& p, F f) {
  const Shape s = Shape::unpacked(p.op->number);
  const int row = 16 * int(w.number % 4);
  const auto at = [&](int, int, uint32_t offset) { f(offset); };
  if (!s.a_in_registers) each_piece(w, *p.op, s, {p.a, s.a_is_mn_major}, row, row + 16, at);
  each_piece(w, *p.op, s, {p.b, s.b_is_mn_major}, 0, s.N, at);
}

float tf32(uint32_t bits) { return as<float>(bits & ~0x1fffu); }

// The elements of a piece.
void convert(Type type, const unsigned char* piece, float (&values)[8]) {
  uint16_t halves[8];
  uint32_t words[4];
  memcpy(halves, piece, 16);
  memcpy(words, piece, 16);
  if (type == Type::tf32)
    for (int i = 0; i < 4; i++) values[i] = tf32(words[i]);
  else
    for (int i = 0; i < 8; i++) values[i] = type == Type::bf16 ? float_of_bf16(halves[i]) : float_of_f16(halves[i]);
}

void read_factors(const Warp& w, const PendingProduct& p, Factors& factors) {
  const Shape s = Shape::unpacked(p.op->number);
  const int T = s.elements_of_piece(), row = 16 * int(w.number % 4);
  float values[8];
  if (!s.a_in_registers)
    each_piece(w, *p.op, s, {p.a, s.a_is_mn_major}, row, row + 16, [&](int m, int k, uint32_t offset) {
      convert(s.type, shared_memory + offset, values);
      for (int i = 0; i < T; i++)
        factors.a[m - row + (s.a_is_mn_major ? i : 0)][k + (s.a_is_mn_major ? 0 : i)] = values[i];
    });
  each_piece(w, *p.op, s, {p.b, s.b_is_mn_major}, 0, s.N, [&](int n, int k, uint32_t offset) {
    convert(s.type, shared_memory + offset, values);
    for (int i = 0; i < T; i++) factors.b[k + (s.b_is_mn_major ? 0 : i)][n + (s.b_is_mn_major ? i : 0)] = values[i];
  });
}

// ----------------------------------------------------------------------------
// Registers. list: N / 2 accumulators, and four registers of A unless it is in shared memory.

void read_a_registers(const Warp& w, const Op& op, const Shape& s, Factors& factors) {
  for (int r = 0; r < 4; r++) {
    const uint32_t* const values = w.at<uint32_t>(op.list[size_t(s.N / 2 + r)]);
    for (int lane = 0; lane < lanes; lane++) {
      float* const row = factors.a[lane / 4 + 8 * (r % 2)];
      const uint32_t value = values[lane];
      const auto low = uint16_t(value), high = uint16_t(value >> 16);
      const int pair = 2 * (lane % 4) + 8 * (r / 2);
      if (s.type == Type::tf32) {
        row[lane % 4 + 4 * (r / 2)] = tf32(value);
      } else {
        row[pair] = s.type == Type::bf16 ? float_of_bf16(low) : float_of_f16(low);
        row[pair + 1] = s.type == Type::bf16 ? float_of_bf16(high) : float_of_f16(high);
      }
    }
  }
}

// Products are exact in float, up to tf32's; they are added in the order of k.
void multiply(Warp& w, const PendingProduct& p, Factors& factors) {
  const Op& op = *p.op;
  const Shape s = Shape::unpacked(op.number);
  const float sign = s.negates_a != s.negates_b ? -1.0f : 1.0f;
  float d[16][256] = {};
  const auto element = [&](int i, int lane) -> float& {
    return d[lane / 4 + 8 * (i / 2 % 2)][8 * (i / 4) + 2 * (lane % 4) + i % 2];
  };
  for (int i = 0; p.adds && i < s.N / 2; i++)
    for (int lane = 0; lane < lanes; lane++) element(i, lane) = w.at<float>(op.list[size_t(i)])[lane];
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < s.K(); k++) {
      const float a = sign * factors.a[row][k];
      for (int n = 0; n < s.N; n++) d[row][n] += a * factors.b[k][n];
    }
  for (int i = 0; i < s.N / 2; i++)
    for (int lane = 0; lane < lanes; lane++) w.at<float>(op.list[size_t(i)])[lane] = element(i, lane);
}

const char* name_of(const Warp& w, uint32_t number) {
  return w.code->kernel.registers[size_t(w.code->wgmma_registers[number])].name.c_str();
}

// The pending product that uses the register, for messages.
std::string user_of(const Warp& w, uint32_t number) {
  for (const PendingProduct& p : w.products)
    if (std::find(p.op->touched.begin(), p.op->touched.end(), number) != p.op->touched.end())
      return w.code->describe(w.index_of(*p.op));
  return "a wgmma";
}

// Checks that the product may use its registers now; from now on others may not.
void take_registers(Warp& w, const Op& op) {
  const size_t num_accumulators = size_t(Shape::unpacked(op.number).N / 2);
  if (!w.had_wgmma_fence) fail(w, op, 0, "no wgmma.fence before the warp's first wgmma");
  for (size_t i = 0; i < op.touched.size(); i++) {
    const uint32_t number = op.touched[i];
    WgmmaRegister& r = w.wgmma_registers[number];
    const bool accumulates = i < num_accumulators;
    if (r.accessed != 0)
      fail(w, op, 0, "no wgmma.fence since %s was accessed in %s", name_of(w, number),
           w.code->describe(r.accessed - 1).c_str());
    if (accumulates ? r.factors != 0 : r.accumulating != 0)
      fail(w, op, 0, "uses %s otherwise than %s, which wgmma.wait_group has not waited for", name_of(w, number),
           user_of(w, number).c_str());
    if (accumulates && r.shape != 0 && r.shape != Shape::kind(op.number))
      fail(w, op, 0, "no wgmma.fence since %s was accessed by a wgmma of another shape", name_of(w, number));
    if (accumulates) r.shape = Shape::kind(op.number), r.accumulating++;
    else r.factors++;
  }
}

void leave_registers(Warp& w, const Op& op) {
  const size_t num_accumulators = size_t(Shape::unpacked(op.number).N / 2);
  for (size_t i = 0; i < op.touched.size(); i++) {
    WgmmaRegister& r = w.wgmma_registers[op.touched[i]];
    if (i < num_accumulators) r.accumulating--;
    else r.factors--;
  }
}

// ----------------------------------------------------------------------------
// Instructions

// The value, which must be the same in all lanes, or the program ends.
template <class T>
T same_in_all(const Warp& w, const Op& op, int32_t place, const char* what) {
  const T* const values = w.at<T>(place);
  for (int lane = 1; lane < lanes; lane++)
    if (values[lane] != values[0]) fail(w, op, lane, "%s is not the same in all lanes", what);
  return values[0];
}

// at: the descriptors of a and b, whether the accumulators are added. number: its Shape.
void run_wgmma(Warp& w, const Op& op) {
  const Shape s = Shape::unpacked(op.number);
  PendingProduct p = {&op, w.committed_products, 0, 0, false, nullptr};
  if (!s.a_in_registers) p.a = same_in_all<uint64_t>(w, op, op.at[0], "the descriptor of A");
  p.b = same_in_all<uint64_t>(w, op, op.at[1], "the descriptor of B");
  p.adds = same_in_all<uint32_t>(w, op, op.at[2], "scale-d") != 0;
  for (const Descriptor& d : {Descriptor{p.a, s.a_is_mn_major}, Descriptor{p.b, s.b_is_mn_major}})
    if (d.has_unknown_bits())
      fail(w, op, 0, "the descriptor %#llx has bits that mean nothing", (unsigned long long)d.bits);
  take_registers(w, op);
  if (w.races != nullptr)
    each_read(w, p, [&](uint32_t offset) { w.races->start_async_read(w.number, offset, 16, w.index_of(op)); });
  if (!w.products_late) {
    p.read = std::make_shared<Factors>();
    read_factors(w, p, *p.read);
  }
  w.products.push_back(std::move(p));
}

void complete_product(Warp& w, PendingProduct& p) {
  if (p.read == nullptr) {
    p.read = std::make_shared<Factors>();
    read_factors(w, p, *p.read);
  }
  const Shape s = Shape::unpacked(p.op->number);
  if (s.a_in_registers) read_a_registers(w, *p.op, s, *p.read);
  multiply(w, p, *p.read);
  leave_registers(w, *p.op);
  if (w.races != nullptr)
    each_read(w, p, [&](uint32_t offset) { w.races->end_async_read(w.number, offset, 16, w.index_of(*p.op)); });
}

void run_fence(Warp& w, const Op&) {
  w.had_wgmma_fence = true;
  for (WgmmaRegister& r : w.wgmma_registers) r.accessed = 0, r.shape = 0;
}

void run_commit(Warp& w, const Op&) { w.committed_products++; }

// All groups but the last op.number that have been committed are complete now.
void run_wait(Warp& w, const Op& op) {
  size_t done = 0;
  while (done < w.products.size() && int64_t(w.products[done].group) + op.number < int64_t(w.committed_products))
    complete_product(w, w.products[done++]);
  w.products.erase(w.products.begin(), w.products.begin() + std::ptrdiff_t(done));
}

// "m64n128k16": 128, or 0 if it is not of this form.
int columns_of(const std::string& shape, const char* k) {
  const size_t end = shape.find('k');
  if (shape.compare(0, 4, "m64n") != 0 || end == std::string::npos || shape.substr(end) != k) return 0;
  const int N = atoi(shape.c_str() + 4);
  return N >= 8 && N <= 256 && N % 8 == 0 && std::to_string(N) == shape.substr(4, end - 4) ? N : 0;
}

// wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 d, a, b, scale-d, imm-scale-a, imm-scale-b[, transpositions]
bool decode_product(Decoder& d, const Instruction& i, const Words& words, Op& op) {
  if (words.words.size() != 8 || words.words[5] != "f32" || words.words[6] != words.words[7]) return false;
  const std::string& type = words.words[6];
  Shape s = {};
  s.type = type == "bf16" ? Type::bf16 : type == "f16" ? Type::f16 : Type::tf32;
  s.N = columns_of(words.words[4], type == "tf32" ? "k8" : "k16");
  if (s.N == 0 || (type != "bf16" && type != "f16" && type != "tf32")) return false;
  const Operand& a = i.operands.at(1);
  s.a_in_registers = a.kind == Operand::list;
  const size_t transpositions = type == "tf32" ? 0 : s.a_in_registers ? 1 : 2;
  if (i.operands.size() != 6 + transpositions) d.fail("it has another number of operands");
  const auto number = [&](size_t o, int64_t first, int64_t second) {
    if (i.operands[o].kind != Operand::number) d.fail("a scale or a transposition is no number");
    const auto value = int64_t(i.operands[o].bits);
    if (value != first && value != second) d.fail("a scale is not 1 or -1, or a transposition not 0 or 1");
    return value == second;
  };
  s.negates_a = number(4, 1, -1);
  s.negates_b = number(5, 1, -1);
  if (transpositions == 2) s.a_is_mn_major = number(6, 0, 1);
  if (transpositions != 0) s.b_is_mn_major = number(5 + transpositions, 0, 1);

  const Operand& accumulators = i.operands[0];
  if (accumulators.parts.size() != size_t(s.N / 2)) d.fail("it has another number of accumulators");
  for (const Operand& part : accumulators.parts) d.wgmma_register(part);
  d.list(accumulators, op, 4, true);
  if (s.a_in_registers) {
    if (a.parts.size() != 4) d.fail("A has another number of registers");
    for (const Operand& part : a.parts) d.wgmma_register(part);
    d.list(a, op, 4, false);
  } else {
    op.at[0] = d.source(a, 8);
  }
  op.at[1] = d.source(i.operands[2], 8);
  op.at[2] = d.source(i.operands[3], 0);
  op.number = s.packed();
  op.run = run_wgmma;
  op.control = Control::warpgroup;
  d.shared_access(16);
  d.needs_clocks();
  return true;
}

}  // namespace

void run_checked(Warp& w, const Op& op) {
  for (const uint32_t number : op.touched) {
    WgmmaRegister& r = w.wgmma_registers[number];
    if (r.accumulating != 0 || r.factors != 0)
      fail(w, op, first_lane(w.active), "accesses %s, which belongs to %s until wgmma.wait_group has waited for it",
           name_of(w, number), user_of(w, number).c_str());
    r.accessed = w.index_of(op) + 1;
  }
  op.untouched(w, op);
}

void run_proxy_fence(Warp& w, const Op&) {
  if (w.races != nullptr) w.races->proxy_fence(w.number, w.active == w.existing ? ~0u : w.active);
}

bool decode_wgmma(Decoder& d, const Instruction& i, const Words& words, Op& op) {
  if (words.first() != "wgmma" || !words.has("sync") || !words.has("aligned")) return false;
  if (words.has("mma_async")) return decode_product(d, i, words, op);
  op.control = Control::warp;
  if (words.has("fence")) {
    op.run = run_fence;
  } else if (words.has("commit_group")) {
    op.run = run_commit;
  } else if (words.has("wait_group")) {
    op.run = run_wait;
    op.number = int64_t(i.operands.at(0).bits);
  } else {
    return false;
  }
  return true;
}

}  // namespace emu::ptx

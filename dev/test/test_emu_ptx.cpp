// dev/emu/ptx, which executes PTX: single instructions, what lanes and warps do together, each mistake that it should
// find, and kernels that another compiler than nvcc has made.
// COVERS dev/emu/ptx/
#include <gtest/gtest.h>
#include <cmath>
#include <functional>
#include <string>
#include <vector>
#include "dev/emu/ptx/floats.h"
#include "dev/test/files.h"
#include "dev/test/ptx_kernels.h"

// A kernel `test`, with a pointer %out and the registers that tests use. %t is the thread's number.
static std::string kernel_of(const std::string& body) {
  return R"(.version 8.0
.target sm_80
.address_size 64
.file 1 "/somewhere/llmc/cuda/source.h"
.extern .shared .align 16 .b8 dynamic[];
.visible .entry test(.param .u64 out)
{
  .reg .pred %p<8>;
  .reg .b16 %h<8>;
  .reg .b32 %r<32>;
  .reg .f32 %f<32>;
  .reg .f64 %d<8>;
  .reg .b64 %out, %l<16>;
  .reg .b32 %t;
  .loc 1 7 1
  ld.param.u64 %out, [out];
  mov.u32 %t, %tid.x;
)" + body +
         "\n  ret;\n}\n";
}

class Ptx : public FolderTest {
 protected:
  int files = 0;

  std::string file_of(const std::string& body) {
    return write("test" + std::to_string(files++) + ".ptx", kernel_of(body));
  }
  // Runs one block of a kernel that stores 32 bits for each thread.
  std::vector<uint32_t> values_of(const std::string& body, unsigned threads = 32, size_t shared_bytes = 4096) {
    const Array<uint32_t> out(threads);
    run_ptx(file_of(body), "test", 1, threads, shared_bytes, Parameters(out.data));
    return out.to_host(ptx_stream());
  }
};

// ----------------------------------------------------------------------------
// Single instructions

// Stores the 32 bits of `value` at element %t of out.
static std::string store(const std::string& value) {
  return "  mad.wide.u32 %l15, %t, 4, %out;\n  st.global.b32 [%l15], " + value + ";\n";
}

struct Case {
  const char* code;  // one result in %r0, %f0 or %p0
  uint32_t expected;
};

static uint32_t bits(float x) { return emu::ptx::as<uint32_t>(x); }

// Results that the PTX manual gives, at the edges of what operands can be.
static const std::vector<Case> cases = {
    {"add.s32 %r0, 0x7fffffff, 1;", 0x80000000},
    {"mul.lo.s32 %r0, 0x10001, 0x10001;", 0x20001},
    {"mul.hi.s32 %r0, -2, 0x40000000;", 0xffffffff},
    {"mul.hi.u32 %r0, 0xfffffffe, 0x40000000;", 0x3fffffff},
    {"mul.wide.s32 %l0, -3, 5; cvt.u32.u64 %r0, %l0;", uint32_t(-15)},
    {"mul.wide.s32 %l0, -3, 5; shr.s64 %l0, %l0, 32; cvt.u32.u64 %r0, %l0;", ~0u},
    {"mul.wide.u32 %l0, -3, 5; shr.u64 %l0, %l0, 32; cvt.u32.u64 %r0, %l0;", 4},
    {"mul.wide.s16 %r0, -300, 300;", uint32_t(-90000)},
    {"div.s32 %r0, -7, 2;", uint32_t(-3)},
    {"rem.s32 %r0, -7, 2;", uint32_t(-1)},
    {"div.s32 %r0, 0x80000000, -1;", 0x80000000},
    {"div.u32 %r0, 0xffffffff, 3;", 0x55555555},
    {"div.s64 %l0, -7, 2; cvt.u32.u64 %r0, %l0;", uint32_t(-3)},
    {"rem.u64 %l0, -7, 10; cvt.u32.u64 %r0, %l0;", 9},
    {"shl.b32 %r0, 1, 31;", 0x80000000},
    {"shl.b32 %r0, 1, 32;", 0},
    {"shr.u32 %r0, 0x80000000, 32;", 0},
    {"shr.s32 %r0, 0x80000000, 40;", ~0u},
    {"shr.s16 %h0, -4, 1; cvt.s32.s16 %r0, %h0;", uint32_t(-2)},
    {"shf.l.wrap.b32 %r0, 0x80000000, 1, 33;", 3},
    {"shf.r.clamp.b32 %r0, 1, 2, 40;", 2},
    {"bfe.u32 %r0, 0xabcd, 4, 8;", 0xbc},
    {"bfe.s32 %r0, 0xf0, 4, 4;", ~0u},
    {"bfe.s32 %r0, 0x70, 4, 4;", 7},
    {"bfe.s32 %r0, 0x80000000, 28, 8;", uint32_t(-8)},
    {"bfe.u32 %r0, -1, 31, 5;", 1},
    {"bfi.b32 %r0, 0xff, 0, 8, 4;", 0xf00},
    {"bfi.b32 %r0, 0, -1, 30, 9;", 0x3fffffff},
    {"bfi.b64 %l0, 1, 0, 32, 32; shr.u64 %l0, %l0, 32; cvt.u32.u64 %r0, %l0;", 1},
    {"prmt.b32 %r0, 0x03020100, 0x07060504, 0x7531;", 0x07050301},
    {"prmt.b32 %r0, 0x80, 0, 0x9998;", 0x000000ff},
    {"popc.b32 %r0, 0xf0f1;", 9},
    {"clz.b32 %r0, 0;", 32},
    {"clz.b32 %r0, 0x00ff0000;", 8},
    {"bfind.u32 %r0, 0x00ff0000;", 23},
    {"bfind.u32 %r0, 0;", ~0u},
    {"bfind.shiftamt.u32 %r0, 0x00ff0000;", 8},
    {"bfind.shiftamt.u32 %r0, 0;", ~0u},
    {"brev.b32 %r0, 6;", 0x60000000},
    {"min.s32 %r0, -1, 1;", ~0u},
    {"max.u32 %r0, -1, 1;", ~0u},
    {"abs.s32 %r0, -5;", 5},
    {"neg.s64 %l0, 5; cvt.u32.u64 %r0, %l0;", uint32_t(-5)},
    {"setp.lt.s32 %p0, -1, 0;", 1},
    {"setp.lt.u32 %p0, -1, 0;", 0},
    {"setp.ne.f32 %p0, 0f7FC00000, 0f3F800000;", 0},
    {"setp.neu.f32 %p0, 0f7FC00000, 0f3F800000;", 1},
    {"setp.gtu.f32 %p0, 0f00000000, 0f3F800000;", 0},
    {"setp.num.f32 %p0, 0f7FC00000, 0f3F800000;", 0},
    {"selp.b32 %r0, 1, 2, -1;", 1},
    // Conversions: the low part of a wider register, with a sign or without one, to the nearest or towards 0.
    {"mov.u64 %l0, 0xffffffff80000001; cvt.s64.s32 %l0, %l0; shr.s64 %l0, %l0, 32; cvt.u32.u64 %r0, %l0;", ~0u},
    {"mov.u64 %l0, 0x1234567890abcdef; cvt.u16.u64 %h0, %l0; cvt.u32.u16 %r0, %h0;", 0xcdef},
    {"mov.b16 %h0, 0x80; cvt.s32.s8 %r0, %h0;", uint32_t(-128)},
    {"cvt.rni.s32.f32 %r0, 0f40200000;", 2},             // 2.5
    {"cvt.rzi.s32.f32 %r0, 0fC0200000;", uint32_t(-2)},  // -2.5
    {"cvt.rmi.s32.f32 %r0, 0fC0200000;", uint32_t(-3)},
    {"cvt.rpi.s32.f32 %r0, 0f40200000;", 3},
    {"cvt.rni.s32.f32 %r0, 0f4F000000;", 0x7fffffff},  // 2^31
    {"cvt.rni.u32.f32 %r0, 0f4F800000;", 0xffffffff},  // 2^32
    {"cvt.rni.u32.f32 %r0, 0fBF800000;", 0},
    {"cvt.rni.s32.f32 %r0, 0f7FC00000;", 0},
    {"cvt.rn.f32.s32 %f0, 16777217;", bits(16777216.0f)},
    {"cvt.rn.f32.u32 %f0, -1;", bits(4294967296.0f)},
    {"cvt.rn.f32.s64 %f0, -1;", bits(-1.0f)},
    {"cvt.sat.f32.f32 %f0, 0f40000000;", bits(1.0f)},
    {"cvt.sat.f32.f32 %f0, 0f7FC00000;", bits(0.0f)},
    {"cvt.f64.f32 %d0, 0f40200000; cvt.rn.f32.f64 %f0, %d0;", bits(2.5f)},
    {"cvt.rn.bf16.f32 %h0, 0f3F808000; cvt.u32.u16 %r0, %h0;", 0x3f80},  // a tie goes to the even one
    {"cvt.rn.bf16.f32 %h0, 0f3F818000; cvt.u32.u16 %r0, %h0;", 0x3f82},
    {"cvt.rn.bf16x2.f32 %r0, 0f3F800000, 0f40000000;", 0x3f804000},  // the first is the high half
    {"cvt.rn.f16x2.f32 %r0, 0f3F800000, 0f40000000;", 0x3c004000},
    {"cvt.rna.tf32.f32 %r0, 0f3F801000;", 0x3f802000},
    {"mov.b16 %h0, 0xc000; cvt.f32.f16 %f0, %h0;", bits(-2.0f)},
    // Floats
    {"max.f32 %f0, 0f7FC00000, 0f3F800000;", bits(1.0f)},
    {"max.f32 %f0, 0f80000000, 0f00000000;", bits(0.0f)},
    {"min.f32 %f0, 0f00000000, 0f80000000;", bits(-0.0f)},
    {"add.f32 %f0, 0f3F800000, 0f33800000;", bits(1.0f)},                 // 1 + 2^-24
    {"add.rz.f32 %f0, 0f3F800000, 0f34400000;", bits(1.0f + 0x1p-23f)},   // 1 + 1.5 * 2^-23
    {"add.rz.f32 %f0, 0fBF800000, 0fB4400000;", bits(-1.0f - 0x1p-23f)},  // the same below 0
    {"add.rz.f32 %f0, 0f7F7FFFFF, 0f7F7FFFFF;", bits(0x1.fffffep+127f)},  // no infinity
    {"add.rz.f32 %f0, 0f3F800000, 0fA1800000;", bits(0x1.fffffep-1f)},    // 1 - 2^-60
    {"add.rz.f32 %f0, 0f3F800000, 0f21800000;", bits(1.0f)},              // 1 + 2^-60
    {"fma.rn.f32 %f0, 0f3F800001, 0f3F800001, 0fBF800000;", bits(0x1.000001p-22f)},
    {"fma.rm.f32 %f0, 0f3F800000, 0f3F800000, 0f33000000;", bits(1.0f)},            // 1 + 2^-25
    {"fma.rm.f32 %f0, 0fBF800000, 0f3F800000, 0fB3000000;", bits(-0x1.000002p0f)},  // -1 - 2^-25
    {"div.rn.f32 %f0, 0f3F800000, 0f40400000;", bits(1.0f / 3.0f)},
    {"sqrt.rn.f32 %f0, 0f40000000;", bits(std::sqrt(2.0f))},
    {"ex2.approx.f32 %f0, 0f40400000;", bits(8.0f)},
    {"ex2.approx.f32 %f0, 0fFF800000;", bits(0.0f)},
    {"ex2.approx.f32 %f0, 0f7F800000;", bits(INFINITY)},
    {"ex2.approx.f32 %f0, 0fC3050000;", bits(0x1p-133f)},  // 2^-133 is subnormal
    {"ex2.approx.ftz.f32 %f0, 0fC3050000;", bits(0.0f)},
    {"mul.ftz.f32 %f0, 0f00400000, 0f4B000000;", bits(0.0f)},  // a subnormal factor is 0
    {"abs.f32 %f0, 0fBF800000;", bits(1.0f)},
    {"neg.f32 %f0, 0f00000000;", bits(-0.0f)},
    {"copysign.f32 %f0, 0f80000000, 0f3F800000;", bits(-1.0f)},
    {"copysign.f32 %f0, 0f3F800000, 0fC0000000;", bits(2.0f)},
    // Registers of two parts
    {"mov.b64 %l0, {1, 2}; shr.u64 %l0, %l0, 32; cvt.u32.u64 %r0, %l0;", 2},
    {"mov.b64 {%r1, %r0}, 0x500000007;", 5},
    {"mov.b64 {_, %r0}, 0x500000007;", 5},
    {"mov.b16 %h0, 0x1234; mov.b32 %r0, {0, %h0};", 0x12340000},
    {"{ .reg .b32 %r0; mov.u32 %r0, 1; }  mov.u32 %r0, 2; { .reg .b32 %r0; mov.u32 %r0, 3; }", 2},
};

TEST_F(Ptx, InstructionsGiveTheManualsResults) {
  for (const Case& c : cases) {
    const std::string code = c.code;
    std::string result = "%r0";
    if (code.find("%f0,") != std::string::npos) result = "%f0";
    if (code.find("%p0,") != std::string::npos && code.compare(0, 4, "selp") != 0) result = "%p0";
    const std::string end = result == "%p0" ? "selp.b32 %r0, 1, 0, %p0;\n" + store("%r0") : store(result);
    for (const uint32_t value : values_of("  " + code + "\n" + end)) ASSERT_EQ(value, c.expected) << code;
  }
}

TEST_F(Ptx, ExponentialsAreWithinTheirBound) {
  double worst = 0;
  for (int i = 0; i < 64; i++) {
    const std::vector<uint32_t> values =
        values_of("cvt.rn.f32.u32 %f1, %t; fma.rn.f32 %f1, %f1, 0f3D017DBF, 0f" +
                  format("%08X", bits(float(i) * 3.9f - 125)) + "; ex2.approx.f32 %f0, %f1;\n" + store("%f0"));
    for (int lane = 0; lane < 32; lane++) {
      const float x = std::fma(float(lane), emu::ptx::as<float>(0x3D017DBFu), float(i) * 3.9f - 125);
      worst = std::max(worst, std::abs(emu::ptx::as<float>(values[size_t(lane)]) / std::exp2(double(x)) - 1));
    }
  }
  EXPECT_LT(worst, std::exp2(-22));
}

#ifdef __FLT16_MANT_DIG__
TEST(PtxFloats, OfSixteenBitsAreThoseOfTheCompiler) {
  for (uint32_t i = 0; i < 0x10000; i++) {
    const auto expected = float(emu::ptx::as<_Float16>(uint16_t(i)));
    const float value = emu::ptx::float_of_f16(uint16_t(i));
    ASSERT_TRUE(bits(value) == bits(expected) || (value != value && expected != expected)) << i;
  }
  for (uint32_t i = 0; i < 0xffff0000u - 65537; i += 65537) {
    const auto x = emu::ptx::as<float>(i);
    const auto expected = emu::ptx::as<uint16_t>(_Float16(x));
    ASSERT_TRUE(emu::ptx::f16_of_float(x) == expected || x != x) << x;
  }
}
#endif

TEST_F(Ptx, LoadsAndStoresExtendAndSplitValues) {
  const std::string body = R"(
  mov.u32 %r1, dynamic;
  mad.lo.u32 %r1, %t, 16, %r1;
  st.shared.v2.b32 [%r1], {0x80, -2};
  st.shared.b8 [%r1+9], 255;
  bar.sync 0;
  ld.shared.s8 %l1, [%r1];
  ld.shared.u8 %r2, [%r1+9];
  ld.shared.v2.u32 {_, %r3}, [%r1];
  cvta.shared.u64 %l2, %l3;
  shr.u64 %l1, %l1, 32;
  cvt.u32.u64 %r4, %l1;
  add.s32 %r0, %r2, %r3;
  add.s32 %r0, %r0, %r4;
)";
  for (const uint32_t value : values_of(body + store("%r0"))) EXPECT_EQ(value, 255u - 2 - 1);
}

// A register may hold an address before shared memory, to which an instruction adds a constant.
TEST_F(Ptx, AddressesOfSharedMemoryHave32Bits) {
  const std::string body = R"(
  mov.u32 %r1, dynamic;
  mad.lo.u32 %r1, %t, 4, %r1;
  add.s32 %r2, %r1, -3000;
  st.shared.u32 [%r2+3000], %t;
  ld.shared.u32 %r0, [%r1];
)";
  const std::vector<uint32_t> values = values_of(body + store("%r0"));
  for (uint32_t i = 0; i < 32; i++) EXPECT_EQ(values[i], i);
}

// Each thread adds up the squares of its number's bits in local memory.
TEST_F(Ptx, ThreadsHaveLocalMemoryOfTheirOwn) {
  const std::string body = R"(
  .local .align 4 .b8 stack[64];
  mov.u64 %l1, stack;
  cvta.local.u64 %l2, %l1;
  mul.wide.u32 %l3, %t, 2;
  and.b64 %l3, %l3, 60;
  add.u64 %l4, %l1, %l3;
  st.local.u32 [%l4], %t;
  add.u64 %l4, %l2, %l3;
  ld.u32 %r0, [%l4];
)";
  const std::vector<uint32_t> values = values_of(body + store("%r0"), 64);
  for (uint32_t i = 0; i < 64; i++) EXPECT_EQ(values[i], i);
}

TEST_F(Ptx, ConstantsOfTheFileCanBeRead) {
  std::string text = kernel_of(R"(
  mov.u64 %l1, table;
  and.b32 %r1, %t, 3;
  mad.wide.u32 %l1, %r1, 4, %l1;
  ld.const.u32 %r0, [%l1];
)" + store("%r0"));
  text.insert(text.find(".visible"), ".const .align 4 .u32 table[4] = {5, 6, 7};\n");
  const Array<uint32_t> out(32);
  run_ptx(write("constants.ptx", text), "test", 1, 32, 0, Parameters(out.data));
  const std::vector<uint32_t> values = out.to_host(ptx_stream());
  for (uint32_t i = 0; i < 32; i++) EXPECT_EQ(values[i], i % 4 == 3 ? 0 : 5 + i % 4);
}

// ----------------------------------------------------------------------------
// Lanes and warps

TEST_F(Ptx, ShufflesFollowTheirBounds) {
  struct {
    const char* code;
    std::function<uint32_t(uint32_t)> source;  // of the lane
  } const shuffles[] = {
      {"shfl.sync.up.b32 %r0, %t, 1, 0, -1;", [](uint32_t i) { return i == 0 ? 0 : i - 1; }},
      {"shfl.sync.down.b32 %r0, %t, 3, 31, -1;", [](uint32_t i) { return i + 3 > 31 ? i : i + 3; }},
      {"shfl.sync.bfly.b32 %r0, %t, 16, 31, -1;", [](uint32_t i) { return i ^ 16; }},
      {"shfl.sync.idx.b32 %r0, %t, 5, 31, -1;", [](uint32_t) { return 5u; }},
      {"shfl.sync.idx.b32 %r0, %t, 5, 0x181f, -1;", [](uint32_t i) { return i / 8 * 8 + 5; }},  // width 8
      {"shfl.sync.down.b32 %r0, %t, 3, 0x181f, -1;", [](uint32_t i) { return i % 8 + 3 > 7 ? i : i + 3; }},
      {"shfl.sync.up.b32 %r0, %t, 3, 0x1800, -1;", [](uint32_t i) { return i % 8 < 3 ? i : i - 3; }},
  };
  for (const auto& shuffle : shuffles) {
    const std::vector<uint32_t> values = values_of(std::string("  ") + shuffle.code + "\n" + store("%r0"));
    for (uint32_t i = 0; i < 32; i++) EXPECT_EQ(values[i], shuffle.source(i)) << shuffle.code << " lane " << i;
  }
}

// Lanes come to the shuffle by two ways, one with a loop.
TEST_F(Ptx, LanesWaitForEachOtherAtAShuffle) {
  const std::string body = R"(
  and.b32 %r1, %t, 3;
  mov.u32 %r2, %t;
  setp.eq.s32 %p1, %r1, 0;
  @%p1 bra MEET;
LOOP:
  add.s32 %r2, %r2, 100;
  sub.s32 %r1, %r1, 1;
  setp.gt.s32 %p2, %r1, 0;
  @%p2 bra LOOP;
MEET:
  shfl.sync.bfly.b32 %r0, %r2, 1, 31, -1;
)";
  for (uint64_t seed = 1; seed <= 20; seed++) {
    emu::set_seed(seed);
    const std::vector<uint32_t> values = values_of(body + store("%r0"), 64);
    for (uint32_t i = 0; i < 64; i++) ASSERT_EQ(values[i], (i ^ 1) + 100 * ((i ^ 1) & 3)) << "seed " << seed;
  }
}

TEST_F(Ptx, HalvesOfAWarpHaveVotesOfTheirOwn) {
  const std::string body = R"(
  setp.lt.u32 %p1, %t, 16;
  selp.b32 %r1, 0xffff, 0xffff0000, %p1;
  and.b32 %r2, %t, 1;
  setp.eq.u32 %p2, %r2, 0;
  setp.lt.u32 %p3, %t, 20;
  and.pred %p2, %p2, %p3;
  vote.sync.ballot.b32 %r0, %p2, %r1;
)";
  const std::vector<uint32_t> values = values_of(body + store("%r0"));
  for (uint32_t i = 0; i < 32; i++) EXPECT_EQ(values[i], i < 16 ? 0x5555u : 0x50000u);
}

TEST_F(Ptx, BarriersCountAndVote) {
  const std::string body = R"(
  setp.eq.u32 %p1, %t, 77;
  bar.red.or.pred %p2, 0, %p1;
  bar.red.and.pred %p3, 0, %p1;
  setp.ge.u32 %p4, %t, 90;
  bar.red.popc.u32 %r1, 0, %p4;
  selp.b32 %r2, 1000, 0, %p2;
  selp.b32 %r3, 5000, 0, %p3;
  add.s32 %r0, %r1, %r2;
  add.s32 %r0, %r0, %r3;
)";
  for (const uint32_t value : values_of(body + store("%r0"), 100)) EXPECT_EQ(value, 1010u);
}

// d = a b + c with the fragments of the manual's tables for mma.m16n8k8 and mma.m16n8k16 of fp16: with group = lane / 4
// and i = lane % 4, register r of a holds row group + 8 (r % 2), columns 2 i + 8 (r / 2) and the next; r of b column
// group, rows 2 i + 8 r and the next; element e of c and d is at row group + 8 (e / 2), column 2 i + e % 2. The first
// product has 16 columns of a, the second the same by two products of 8, as on a T4, the third has the first 8 alone.
TEST_F(Ptx, ProductsOfFp16HaveTheManualsFragments) {
  const std::string mma = "  mma.sync.aligned.m16n8", types = ".row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, ",
                    d = ", {%f0, %f1, %f2, %f3};\n";
  const std::string first = mma + "k8" + types + "{%r0, %r1}, {%r4}" + d;
  const struct {
    std::string code;
    int columns;
  } products[] = {{mma + "k16" + types + "{%r0, %r1, %r2, %r3}, {%r4, %r5}" + d, 16},
                  {first + mma + "k8" + types + "{%r2, %r3}, {%r5}" + d, 16},
                  {first, 8}};
  const auto value = [](int row, int column, int factor) { return float((row * 16 + column) * factor % 31 - 15); };
  const auto two = [](float low, float high) {
    return emu::ptx::f16_of_float(low) | uint32_t(emu::ptx::f16_of_float(high)) << 16;
  };
  std::vector<uint32_t> words(32 * 16);  // of each lane: a, b, c
  for (int lane = 0; lane < 32; lane++) {
    const int group = lane / 4, i = lane % 4;
    uint32_t* const own = &words[size_t(lane) * 16];
    for (int r = 0; r < 4; r++) {
      const int row = group + 8 * (r % 2), column = 2 * i + 8 * (r / 2);
      own[r] = two(value(row, column, 7), value(row, column + 1, 7));
    }
    for (int r = 0; r < 2; r++) own[4 + r] = two(value(2 * i + 8 * r, group, 11), value(2 * i + 8 * r + 1, group, 11));
    for (int e = 0; e < 4; e++) own[6 + e] = bits(value(group + 8 * (e / 2), 2 * i + e % 2, 13));
  }
  for (const auto& product : products) {
    std::string body = "  mad.wide.u32 %l0, %t, 64, %out;\n";
    for (int r = 0; r < 6; r++) body += format("  ld.global.b32 %%r%d, [%%l0+%d];\n", r, 4 * r);
    for (int e = 0; e < 4; e++) body += format("  ld.global.f32 %%f%d, [%%l0+%d];\n", e, 24 + 4 * e);
    body += product.code;
    for (int e = 0; e < 4; e++) body += format("  st.global.f32 [%%l0+%d], %%f%d;\n", 24 + 4 * e, e);
    const Array<uint32_t> memory(words, ptx_stream());
    run_ptx(file_of(body), "test", 1, 32, 0, Parameters(memory.data));
    const std::vector<uint32_t> results = memory.to_host(ptx_stream());
    for (int lane = 0; lane < 32; lane++)
      for (int e = 0; e < 4; e++) {
        const int row = lane / 4 + 8 * (e / 2), column = 2 * (lane % 4) + e % 2;
        float sum = value(row, column, 13);
        for (int k = 0; k < product.columns; k++) sum += value(row, k, 7) * value(k, column, 11);
        EXPECT_EQ(results[size_t(lane) * 16 + 6 + size_t(e)], bits(sum)) << product.code << row << ", " << column;
      }
  }
}

// ----------------------------------------------------------------------------
// Mistakes

// A buffer that thread t writes at 4 t, and reads at 4 (t ^ distance), after `barrier`.
static std::string exchange(const std::string& barrier, int distance) {
  return R"(
  mov.u32 %r1, dynamic;
  mad.lo.u32 %r2, %t, 4, %r1;
  .loc 1 20 1
  st.shared.u32 [%r2], %t;
  .loc 1 21 1
  )" + barrier +
         R"(
  xor.b32 %r3, %t, )" +
         std::to_string(distance) + R"(;
  mad.lo.u32 %r3, %r3, 4, %r1;
  .loc 1 22 1
  ld.shared.u32 %r0, [%r3];
)" + store("%r0");
}

struct PtxDeathTest : Ptx {
  void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST_F(PtxDeathTest, RacesInSharedMemoryAreReported) {
  const std::string race = "race: byte .* reads it in ld.shared.u32 at llmc/cuda/source.h:22 .*; thread \\(.*\\) has "
                           "written it in st.shared.u32 at llmc/cuda/source.h:20";
  EXPECT_DEATH(values_of(exchange("", 1)), race);
  EXPECT_DEATH(values_of(exchange("vote.sync.any.pred %p1, %p1, -1;", 1)), race);       // a vote is no barrier
  EXPECT_DEATH(values_of(exchange("shfl.sync.idx.b32 %r9, %t, 0, 31, -1;", 1)), race);  // nor is a shuffle
  EXPECT_DEATH(values_of(exchange("bar.warp.sync -1;", 32), 64), "race: byte");         // a warp's is none for two
  EXPECT_DEATH(values_of(exchange("bar.warp.sync 0xffff; @%p0 bra A; A:", 16), 32), "takes part with the mask");
}

TEST_F(Ptx, BarriersEndRaces) {
  for (uint64_t seed = 1; seed <= 20; seed++) {
    emu::set_seed(seed);
    for (const auto& [barrier, distance] : {std::pair("bar.warp.sync -1;", 1), std::pair("bar.sync 0;", 32),
                                            std::pair("bar.sync 3, 64;", 33), std::pair("barrier.sync 0;", 63)}) {
      const std::vector<uint32_t> values = values_of(exchange(barrier, distance), 64);
      for (uint32_t i = 0; i < 64; i++) ASSERT_EQ(values[i], i ^ uint32_t(distance)) << barrier;
    }
  }
}

// The second round's store meets what other threads still have to read.
TEST_F(PtxDeathTest, WritesThatOvertakeReadsAreReported) {
  const auto rounds = [](const std::string& barrier) {
    return exchange("bar.sync 0;", 32) + barrier + exchange("bar.sync 0;", 32);
  };
  EXPECT_DEATH(values_of(rounds(""), 64), "race: byte .*(writes it .* has read|reads it .* has written) it");
  values_of(rounds("bar.sync 0;\n"), 64);
}

// Copies 16 bytes from the beginning of `out` for each thread, and stores the first four.
static std::string copy(const std::string& waiting) {
  return R"(
  mov.u32 %r1, dynamic;
  mad.lo.u32 %r2, %t, 16, %r1;
  cp.async.cg.shared.global [%r2], [%out], 16, 16;
  cp.async.commit_group;
  )" + waiting +
         R"(
  ld.shared.u32 %r0, [%r2];
)" + store("%r0");
}

TEST_F(PtxDeathTest, ACopyThatIsNotAwaitedIsReported) {
  const std::string race = "race: byte .* reads it in ld.shared.u32 .* has written it in cp.async.cg";
  EXPECT_DEATH(values_of(copy("")), race);
  EXPECT_DEATH(values_of(copy("cp.async.wait_group 1;")), race);
  EXPECT_DEATH(values_of(copy("bar.sync 0;")), race);
  values_of(copy("cp.async.wait_group 0;"));
}

TEST_F(PtxDeathTest, AccessOutsideOfMemoryIsReported) {
  EXPECT_DEATH(values_of("  st.global.u32 [%out+128], %t;"), "in kernel test, block .0,0,0., thread .*: writes 4 bytes "
                                                             "at "
                                                             ".*: 0 bytes past the end of a device allocation of 128 "
                                                             "bytes, in st.global.u32 at llmc/cuda/source.h:7");
  EXPECT_DEATH(values_of("  ld.global.u32 %r0, [%out+-4];"), "reads 4 bytes at .*: 4 bytes before a device allocation");
  EXPECT_DEATH(values_of("  st.global.u32 [%out+2], %t;"), "accesses 4 bytes at .*, which is misaligned");
  EXPECT_DEATH(values_of("  mov.u64 %l0, 64; ld.global.u32 %r0, [%l0];"), "not memory of the device");
  EXPECT_DEATH(values_of("  ld.shared.u32 %r0, [dynamic+4096];"), "byte 4096 of shared memory, of which the block has "
                                                                  "4096");
  EXPECT_DEATH(values_of("  mov.u32 %r1, 0; ld.shared.u32 %r0, [%r1];"), "accesses 4 bytes at byte -1024 of shared "
                                                                         "memory");
  EXPECT_DEATH(values_of("  .local .b8 x[8]; mov.u64 %l0, x; ld.local.u32 %r0, [%l0+8];"), "byte 8 of local memory, of "
                                                                                           "which a thread has 8");
}

TEST_F(PtxDeathTest, ThreadsThatDoNotComeAreNamed) {
  const std::string some = "  setp.lt.u32 %p1, %t, 40;\n  @%p1 bra A;\n  ret;\nA:\n";
  EXPECT_DEATH(values_of(some + "  bar.sync 0;", 64), "deadlock: waits for thread .40,0,0., which has ended, in "
                                                      "bar.sync");
  EXPECT_DEATH(values_of(some + "  bar.warp.sync -1;", 64), "deadlock: waits for thread .40,0,0., which has ended");
  EXPECT_DEATH(values_of("  bar.sync 1, 96;", 64), "barrier 1 of 96 threads, in a block of 64");
}

TEST_F(Ptx, WhatIsNotKnownIsNamedWithItsLine) {
  EXPECT_EQ(error_of([&] { values_of("  .loc 1 12 1\n  tcgen05.fence::before_thread_sync;"); }),
            in("test0.ptx") + ":19: the instruction `tcgen05.fence::before_thread_sync` (llmc/cuda/source.h:12) is not "
                              "emulated: it is "
                              "not known; dev/emu/ptx is where it belongs");
  EXPECT_NE(error_of([&] { values_of("  add.s32 %r0, %l1, 1, 2;"); }).find("another number of operands"),
            std::string::npos);
  EXPECT_NE(error_of([&] { values_of("  add.s32 %r0, %r1, %h1;"); }).find("narrower than its type"), std::string::npos);
  EXPECT_NE(error_of([&] { values_of("  mov.u32 %r0, %smid;"); }).find("the register %smid"), std::string::npos);
}

TEST_F(Ptx, FilesAndKernelsThatAreMissingAreErrors) {
  const Array<uint32_t> out(32);
  const std::string file = file_of("");
  const auto start = [&](const std::string& path, const std::string& kernel) {
    return error_of([&] { run_ptx(path, kernel, 1, 32, 0, Parameters(out.data)); });
  };
  EXPECT_EQ(start(in("missing.ptx"), "test").find(in("missing.ptx") + ": cannot be read;"), 0u);
  EXPECT_EQ(start(write("text.ptx", "text\n"), "test").find(in("text.ptx") + ": no PTX"), 0u);
  EXPECT_EQ(start(file, "other").find(file + ": it has no kernel other;"), 0u);
  EXPECT_NE(error_of([&] { run_ptx(file, "test", 1, 32, 0, Parameters(1, 2)); }).find("other parameters"),
            std::string::npos);
}

TEST_F(Ptx, OfALaterGpuIsRefused) {
  emu::set_compute_capability(7, 5);
  const std::string error = error_of([&] { values_of("  mov.u32 %r0, 1;" + store("%r0")); });
  emu::set_compute_capability(9, 0);
  EXPECT_NE(error.find("it is for sm_80, and the emulated GPU has compute capability 7.5"), std::string::npos) << error;
}

// What dev/emu/ptx does with Hopper's instructions: asynchronous products of a warpgroup (wgmma) of every layout in
// shared memory, barriers in shared memory (mbarrier) and bulk copies, and each mistake with them that it should find.
// Factors are small whole numbers, so that every sum is exact.
// COVERS dev/emu/ptx/ dev/emu/races.cpp dev/emu/races.h
#include <gtest/gtest.h>
#include <cstring>
#include <functional>
#include <string>
#include <vector>
#include "dev/emu/ptx/floats.h"
#include "dev/test/files.h"
#include "dev/test/ptx_kernels.h"
#include "llmc/base/error.h"

// ----------------------------------------------------------------------------
// Matrices in shared memory

// How a matrix of `rows` (of M or N) and 64 columns (of K) lies in shared memory. Rows of 8 pieces of 16 bytes are
// swizzled by their number, and not by their address as in the interpreter. Distances between the pieces are larger
// than they must be, and all different.
struct Layout {
  int swizzle;  // bytes: 0, 32, 64 or 128
  bool mn_major;
  int phase = 0;  // rows of 128 bytes from where the pattern could begin to where it does: the base offset
};
constexpr int depth = 64;  // columns

struct Placed {
  std::vector<unsigned char> image;   // of the memory
  std::vector<uint64_t> descriptors;  // of each product, of 16 or 8 columns; start addresses from the image's start on
};

static uint64_t descriptor(size_t start, size_t leading, size_t stride, const Layout& l) {
  const uint64_t mode = l.swizzle == 128 ? 1 : l.swizzle == 64 ? 2 : l.swizzle == 32 ? 3 : 0;
  return start / 16 | uint64_t(leading / 16) << 16 | uint64_t(stride / 16) << 32 | uint64_t(l.phase) << 49 | mode << 62;
}

// element(mn, k, bytes) writes an element of `size` bytes.
static Placed place(const Layout& l, int rows, int size, const std::function<void(int, int, unsigned char*)>& element) {
  const int T = 16 / size, W = l.swizzle == 0 ? 1 : l.swizzle / 16, products = depth / (2 * T);
  const size_t first = 128 * size_t(l.phase);
  Placed p;
  p.image.assign(40 * 1024, 0x7f);
  // The piece among the W of a row in which it lies: the row of the pattern moves it.
  const auto moved = [&](int row, int piece) { return size_t(piece ^ (row * W / 8 % W)); };
  size_t leading = 0, stride = 0;
  std::function<size_t(int, int)> at;  // of a piece: mn / T and k, or mn and k / T
  if (!l.mn_major && l.swizzle == 0) {
    stride = 144, leading = stride * size_t(rows / 8) + 32;
    at = [&](int mn, int kc) { return size_t(mn % 8) * 16 + size_t(mn / 8) * stride + size_t(kc) * leading; };
  } else if (!l.mn_major) {
    stride = size_t(16 * l.swizzle);
    const size_t panel = stride * size_t(rows / 8);
    at = [=](int mn, int kc) {
      return first + size_t(kc / W) * panel + size_t(mn / 8) * stride + size_t(mn % 8 * l.swizzle) +
             16 * moved(mn % 8, kc % W);
    };
  } else if (l.swizzle == 0) {
    leading = 144, stride = leading * size_t(depth / 8) + 32;
    at = [&](int mc, int k) { return size_t(k % 8) * 16 + size_t(k / 8) * leading + size_t(mc) * stride; };
  } else {
    stride = size_t(8 * l.swizzle), leading = stride * size_t(depth / 8) + 1024;
    at = [=](int mc, int k) {
      return first + size_t(mc / W) * leading + size_t(k / 8) * stride + size_t(k % 8 * l.swizzle) +
             16 * moved(k % 8, mc % W);
    };
  }
  for (int mn = 0; mn < rows; mn++)
    for (int k = 0; k < depth; k++) {
      const size_t to = (l.mn_major ? at(mn / T, k) : at(mn, k / T)) + size_t((l.mn_major ? mn : k) % T * size);
      element(mn, k, &p.image.at(to));
    }
  for (int s = 0; s < products; s++) {
    const size_t start = l.mn_major ? first + (l.swizzle == 0 ? 2 * leading : 2 * stride) * size_t(s)
                         : l.swizzle == 0
                             ? 2 * leading * size_t(s)
                             : first + size_t(2 * s / W) * stride * size_t(rows / 8) + size_t(2 * s % W) * 16;
    p.descriptors.push_back(descriptor(start, l.mn_major || l.swizzle == 0 ? leading : 16, stride, l));
  }
  return p;
}

// ----------------------------------------------------------------------------
// A kernel that multiplies

// What a kernel does, and what it can forget.
struct Product {
  std::string type = "bf16";
  int N = 64;
  Layout a = {128, false}, b = {128, false};
  bool a_in_registers = false;
  int scale_a = 1, scale_b = 1;
  bool adds = false;  // to accumulators of 3, instead of scale-d 0 in the first product
  int threads = 128;

  std::string copy = "st.shared.v4.b32 [%to], {%r1, %r2, %r3, %r4};";  // of 16 bytes at %from in global memory
  std::string after_copy = "fence.proxy.async;";                       // before the barrier
  std::string barrier = "bar.sync 0;";
  std::string after_barrier, before_fence;
  std::string fence = "wgmma.fence.sync.aligned;";
  std::string commit = "wgmma.commit_group.sync.aligned;";
  std::string while_pending;
  std::string wait = "wgmma.wait_group.sync.aligned 0;";
  std::string after_wait;
  uint64_t change_b = 0;  // bits of B's descriptors

  int size() const { return type == "tf32" ? 4 : 2; }
  int columns() const { return 32 / size(); }  // of one product
};

static float factor_a(int m, int k) { return float((m * 5 + k * 3 + m * k / 7) % 9 - 4); }
static float factor_b(int n, int k) { return float((n * 3 + k * 7 + n * k / 5) % 9 - 4); }

static void write_element(const std::string& type, float x, unsigned char* to) {
  const uint16_t half = type == "bf16" ? emu::ptx::bf16_of_float(x) : emu::ptx::f16_of_float(x);
  if (type == "tf32") memcpy(to, &x, 4);
  else memcpy(to, &half, 2);
}

static std::string registers(const char* name, int first, int count) {
  std::string list;
  for (int i = 0; i < count; i++) list += (i == 0 ? "{" : ", ") + std::string(name) + std::to_string(first + i);
  return list + "}";
}

// Shared memory: A from byte 0 on, B from byte 40 K on.
constexpr int place_of_b = 40 * 1024, shared_bytes = 80 * 1024;

static std::string kernel_of(const Product& p, const Placed& a, const Placed& b) {
  const std::string count = std::to_string(p.N / 2);
  std::string text = R"(.version 8.0
.target sm_90a
.address_size 64
.file 1 "/somewhere/llmc/cuda/source.h"
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry test(.param .u64 out, .param .u64 in, .param .u64 fragments)
{
  .reg .pred %p<8>, %adds;
  .reg .b32 %r<32>, %t, %to, %base;
  .reg .f32 %d<)" + count +
                     R"(>;
  .reg .b32 %a<16>;
  .reg .b64 %out, %in, %fragments, %from, %l<16>;
  .loc 1 7 1
  ld.param.u64 %out, [out];
  ld.param.u64 %in, [in];
  ld.param.u64 %fragments, [fragments];
  mov.u32 %t, %tid.x;
  mov.u32 %base, dynamic;
  mov.u32 %r0, %t;
COPY:
  mad.lo.u32 %to, %r0, 16, %base;
  mad.wide.u32 %from, %r0, 16, %in;
  .loc 1 10 1
  ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%from];
  )" + p.copy + R"(
  add.u32 %r0, %r0, )" +
                     std::to_string(p.threads) + ";\n  setp.lt.u32 %p0, %r0, " + std::to_string(shared_bytes / 16) +
                     ";\n  @%p0 bra COPY;\n";
  text += "  .loc 1 11 1\n  " + p.after_copy + "\n  " + p.barrier + "\n  " + p.after_barrier + "\n";
  for (int i = 0; i < 16 && p.a_in_registers; i++)
    text += format("  mad.wide.u32 %%l0, %%t, 4, %%fragments;\n  ld.global.b32 %%a%d, [%%l0+%d];\n", i, 512 * i);
  for (int i = 0; i < p.N / 2; i++) text += format("  mov.b32 %%d%d, 0f40400000;\n", i);
  text += "  .loc 1 12 1\n  " + p.before_fence + "\n  " + p.fence + "\n";
  for (size_t s = 0; s < (p.a_in_registers ? 4 : b.descriptors.size()); s++) {
    text += format("  mov.u64 %%l1, %#llx;\n", (unsigned long long)a.descriptors[s]);
    text += format("  mov.u64 %%l2, %#llx;\n", (unsigned long long)(b.descriptors[s] ^ p.change_b));
    text += "  shr.u32 %r5, %base, 4;\n  cvt.u64.u32 %l3, %r5;\n  add.u64 %l1, %l1, %l3;\n  add.u64 %l2, %l2, %l3;\n";
    text += format("  add.u64 %%l2, %%l2, %d;\n", place_of_b / 16);
    text += format("  setp.ne.s32 %%adds, %d, 0;\n  .loc 1 13 1\n", int(s != 0 || p.adds));
    text += "  wgmma.mma_async.sync.aligned.m64n" + std::to_string(p.N) + "k" + std::to_string(p.columns()) + ".f32." +
            p.type + "." + p.type + " " + registers("%d", 0, p.N / 2) + ", " +
            (p.a_in_registers ? registers("%a", 4 * int(s), 4) : "%l1") + ", %l2, %adds, " + std::to_string(p.scale_a) +
            ", " + std::to_string(p.scale_b);
    if (p.type != "tf32" && !p.a_in_registers) text += p.a.mn_major ? ", 1" : ", 0";
    if (p.type != "tf32") text += p.b.mn_major ? ", 1" : ", 0";
    text += ";\n";
  }
  text += "  " + p.commit + "\n  .loc 1 14 1\n  " + p.while_pending + "\n  " + p.wait + "\n  .loc 1 15 1\n  " +
          p.after_wait + "\n  .loc 1 16 1\n  mad.wide.u32 %out, %t, 4, %out;\n";
  for (int i = 0; i < p.N / 2; i++) text += format("  st.global.f32 [%%out+%d], %%d%d;\n", 4 * p.threads * i, i);
  return text + "  ret;\n}\n";
}

// What the PTX manual says that a thread holds of A: four registers for each product.
static std::vector<uint32_t> fragments_of(const Product& p) {
  std::vector<uint32_t> fragments(16 * 128);
  for (int s = 0; s < 4; s++)
    for (int r = 0; r < 4; r++)
      for (int t = 0; t < 128; t++) {
        unsigned char bytes[4];
        const int m = 16 * (t / 32) + t % 32 / 4 + 8 * (r % 2);
        for (int e = 0; e < 4 / p.size(); e++) {
          const int k = p.size() == 2 ? 16 * s + 2 * (t % 4) + 8 * (r / 2) + e : 8 * s + t % 4 + 4 * (r / 2);
          write_element(p.type, factor_a(m, k), bytes + 2 * e);
        }
        memcpy(&fragments[size_t((4 * s + r) * 128 + t)], bytes, 4);
      }
  return fragments;
}

class Wgmma : public FolderTest {
 protected:
  int files = 0;

  // d (64, N).
  std::vector<float> run(const Product& p) {
    const Placed a =
        place(p.a, 64, p.size(), [&](int m, int k, unsigned char* to) { write_element(p.type, factor_a(m, k), to); });
    Placed b =
        place(p.b, p.N, p.size(), [&](int n, int k, unsigned char* to) { write_element(p.type, factor_b(n, k), to); });
    std::vector<uint32_t> memory(shared_bytes / 4);
    memcpy(memory.data(), a.image.data(), a.image.size());
    memcpy(reinterpret_cast<unsigned char*>(memory.data()) + place_of_b, b.image.data(), b.image.size());
    const Array<uint32_t> in(memory, ptx_stream()), fragments(fragments_of(p), ptx_stream());
    const Array<float> out(size_t(p.threads * p.N / 2));
    run_ptx(write("test" + std::to_string(files++) + ".ptx", kernel_of(p, a, b)), "test", 1, unsigned(p.threads),
            shared_bytes, Parameters(out.data, in.data, fragments.data));
    const std::vector<float> of_threads = out.to_host(ptx_stream());
    std::vector<float> d(size_t(64 * p.N));
    for (int i = 0; i < p.N / 2; i++)
      for (int t = 0; t < 128; t++)
        d[size_t((16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2)) * p.N + 8 * (i / 4) + 2 * (t % 4) + i % 2)] =
            of_threads[size_t(i * p.threads + t)];
    return d;
  }

  static std::vector<float> expected(const Product& p) {
    std::vector<float> d;
    for (int m = 0; m < 64; m++)
      for (int n = 0; n < p.N; n++) {
        float sum = p.adds ? 3.0f : 0.0f;
        const int K = p.a_in_registers ? 4 * p.columns() : depth;
        for (int k = 0; k < K; k++) sum += float(p.scale_a * p.scale_b) * factor_a(m, k) * factor_b(n, k);
        d.push_back(sum);
      }
    return d;
  }

  void expect_right(const Product& p, const std::string& what = "") {
    for (uint64_t seed = 1; seed <= 6; seed++) {
      emu::set_seed(seed);
      ASSERT_EQ(run(p), expected(p)) << what << " seed " << seed;
    }
  }
};

static std::string name_of(const Layout& l) { return std::to_string(l.swizzle) + (l.mn_major ? " MN" : " K"); }

TEST_F(Wgmma, EveryLayoutGivesTheProduct) {
  for (const int swizzle : {0, 32, 64, 128})
    for (const int other : {0, 32, 64, 128})
      for (const int majors : {0, 1, 2, 3}) {
        Product p;
        p.N = 64 + swizzle / 2;
        p.a = {swizzle, majors % 2 != 0};
        p.b = {other, majors / 2 != 0};
        if (p.b.mn_major) p.N = 128;
        emu::set_seed(uint64_t(swizzle + 4 * other + majors));
        ASSERT_EQ(run(p), expected(p)) << "A " << name_of(p.a) << ", B " << name_of(p.b);
      }
}

TEST_F(Wgmma, PatternsMayBeginBetweenTheirBoundaries) {
  for (const int swizzle : {64, 128})
    for (const bool mn_major : {false, true})
      for (int phase = 1; phase < (swizzle == 128 ? 8 : 4); phase++) {
        Product p;
        p.a = {swizzle, mn_major, phase};
        p.b = {swizzle, !mn_major, phase};
        ASSERT_EQ(run(p), expected(p)) << name_of(p.a) << " base offset " << phase;
      }
}

TEST_F(Wgmma, EveryWidthGivesTheProduct) {
  for (int N = 8; N <= 256; N += 8) {
    Product p;
    p.N = N;
    p.b = {N <= 128 ? 128 : 0, false};
    p.a_in_registers = N % 16 == 0;
    ASSERT_EQ(run(p), expected(p)) << N;
  }
}

TEST_F(Wgmma, TypesSignsAndAccumulatorsAreAsTheInstructionSays) {
  for (const std::string type : {"bf16", "f16", "tf32"})
    for (const bool a_in_registers : {false, true}) {
      Product p;
      p.type = type;
      p.a_in_registers = a_in_registers;
      if (type == "tf32") p.a = {64, false}, p.N = 32;
      expect_right(p, type);
      p.adds = true;
      p.scale_a = -1;
      expect_right(p, type + " -a");
      p.scale_b = -1;
      expect_right(p, type + " -a -b");
      p.scale_a = 1;
      expect_right(p, type + " -b");
    }
}

// ----------------------------------------------------------------------------
// What must come before and after a product

TEST_F(Wgmma, OtherOrdersThatAreRightPass) {
  Product p;
  p.copy = "cp.async.cg.shared.global [%to], [%from], 16;";
  p.after_copy = "cp.async.wait_all; fence.proxy.async.shared::cta;";
  expect_right(p, "cp.async");
  p = Product();
  p.after_copy = "";
  p.after_barrier = "fence.proxy.async;";
  expect_right(p, "the readers' fence");
  p = Product();
  p.threads = 256;
  p.barrier = "bar.sync 1, 256;";
  expect_right(p, "two warpgroups");
  p = Product();
  p.while_pending = "wgmma.commit_group.sync.aligned;";  // an empty group
  p.wait = "wgmma.wait_group.sync.aligned 1;";
  expect_right(p, "a later group");
  p = Product();
  p.after_wait = "bar.sync 0; st.shared.b32 [%base], 0;";
  expect_right(p, "a tile that is written again");
  p = Product();
  p.while_pending = "st.shared.b32 [%base+81916], 0;";  // beyond both matrices
  expect_right(p, "another part of shared memory");
  p = Product();
  p.before_fence = "setmaxnreg.inc.sync.aligned.u32 240; griddepcontrol.wait; mov.b32 %d0, 0f40400000;";
  expect_right(p, "setmaxnreg");
}

struct WgmmaDeathTest : Wgmma {
  void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }

  // Whatever the seed.
  void expect_error(const Product& p, const std::string& message) {
    for (uint64_t seed = 1; seed <= 2; seed++)
      EXPECT_DEATH(
          {
            emu::set_seed(seed);
            run(p);
          },
          message);
  }
};

static const std::string wgmma = "wgmma.mma_async.* at llmc/cuda/source.h:13 .*";

TEST_F(WgmmaDeathTest, AccumulatorsThatAreNotAwaitedAreReported) {
  const std::string error =
      "accesses %d[0-9]+, which belongs to " + wgmma + " until wgmma.wait_group has waited for it";
  Product p;
  p.wait = "";
  expect_error(p, error + ", in st.global.f32 at llmc/cuda/source.h:16");
  p = Product();
  p.commit = "";
  expect_error(p, error);
  p = Product();
  p.wait = "wgmma.wait_group.sync.aligned 1;";
  expect_error(p, error);
  p = Product();
  p.while_pending = "add.f32 %d5, %d5, %d5;";
  expect_error(p, "accesses %d5, .*, in add.f32 at llmc/cuda/source.h:14");
  p.while_pending = "setp.eq.u32 %p1, %t, 77; @%p1 mov.b32 %d31, 0;";
  expect_error(p, "thread .77,0,0.: accesses %d31, .*, in mov.b32 at llmc/cuda/source.h:14");
}

TEST_F(WgmmaDeathTest, PartsOfAThatAreNotAwaitedAreReported) {
  Product p;
  p.a_in_registers = true;
  p.while_pending = "mov.b32 %a7, 0;";
  expect_error(p, "accesses %a7, which belongs to " + wgmma + " until wgmma.wait_group .*, in mov.b32");
}

TEST_F(WgmmaDeathTest, AMissingFenceOfRegistersIsReported) {
  Product p;
  p.fence = "";
  expect_error(p, "no wgmma.fence before the warp's first wgmma, in " + wgmma);
  p.before_fence = "wgmma.fence.sync.aligned; mov.b32 %d9, 0;";
  expect_error(p, "no wgmma.fence since %d9 was accessed in mov.b32 at llmc/cuda/source.h:12 .*, in " + wgmma);
  p.before_fence = "wgmma.fence.sync.aligned; mov.b32 %a2, 0;";
  p.a_in_registers = true;
  expect_error(p, "no wgmma.fence since %a2 was accessed in mov.b32");
}

TEST_F(WgmmaDeathTest, AMissingFenceOfTheProxiesIsReported) {
  const std::string error = "byte [0-9]+ of shared memory, no fence.proxy.async between: reads it in " + wgmma +
                            "; thread .* has written it in ";
  Product p;
  p.after_copy = "";
  expect_error(p, error + "st.shared.v4.b32 at llmc/cuda/source.h:10");
  p.after_copy = "fence.proxy.async; setp.eq.u32 %p1, %t, 0; @%p1 st.shared.b32 [%base+40964], 0;";  // too early
  expect_error(p, error + "st.shared.b32 at llmc/cuda/source.h:11");
  p.copy = "cp.async.cg.shared.global [%to], [%from], 16;";
  p.after_copy = "fence.proxy.async; cp.async.wait_all;";
  expect_error(p, error + "cp.async.cg");
  p.after_copy = "cp.async.wait_all; setp.ne.u32 %p1, %t, 5; @%p1 fence.proxy.async;";  // one thread has none
  expect_error(p, error + "cp.async.cg");
}

TEST_F(WgmmaDeathTest, RacesWithAProductAreReported) {
  const std::string reads = "race: .* reads it in " + wgmma + "; thread .* has written it in ";
  const std::string writes = "race: .* writes it in st.shared.b32 .*; thread .* has read it in " + wgmma;
  Product p;
  p.barrier = "";
  expect_error(p, reads + "st.shared.v4.b32");
  p = Product();
  p.copy = "cp.async.cg.shared.global [%to], [%from], 16;";
  expect_error(p, reads + "cp.async.cg");
  p = Product();
  p.while_pending = "st.shared.b32 [%base], 0;";
  expect_error(p, writes);
  p.while_pending = "bar.sync 0; setp.eq.u32 %p1, %t, 0; @%p1 st.shared.b32 [%base+40960], 0; bar.sync 0;";  // only a
                                                                                                             // wait
  expect_error(p, writes);
  p = Product();
  p.after_wait = "setp.eq.u32 %p1, %t, 127; @%p1 st.shared.b32 [%base+40960], 0;";  // nor is one warp's own wait
  expect_error(p, writes);
}

TEST_F(WgmmaDeathTest, WarpsThatDoNotComeAreNamed) {
  Product p;
  p.before_fence = "setp.ge.u32 %p1, %t, 96; @%p1 ret;";
  expect_error(p, "deadlock: waits for thread .96,0,0., which has ended, in " + wgmma);
  p = Product();
  p.threads = 64;
  expect_error(p, "its warpgroup has fewer than 128 threads, as the block has 64");
}

TEST_F(WgmmaDeathTest, DescriptorsThatMeanNothingAreReported) {
  Product p;
  p.change_b = 1ull << 14;
  expect_error(p, "the descriptor 0x.* has bits that mean nothing");
  p.change_b = 0x2000;
  expect_error(p, "reads 16 bytes at byte [0-9]+ of shared memory, of which the block has 81920");
  p = Product();
  p.before_fence = "add.u32 %base, %base, %t;";
  expect_error(p, "the descriptor of A is not the same in all lanes");
}

// Mistakes that change the numbers.
TEST_F(Wgmma, AWrongDescriptorGivesOtherNumbers) {
  const uint64_t mistakes[] = {3ull << 62, 1ull << 49, 64ull << 32, 2};  // 64 bytes; a base offset; stride; a start
  for (const uint64_t mistake : mistakes) {
    Product p;
    p.change_b = mistake;
    EXPECT_NE(run(p), expected(p)) << mistake;
  }
}

TEST_F(Wgmma, OnlyComputeCapability90HasIt) {
  emu::set_compute_capability(8, 0);
  const std::string error = error_of([&] { run(Product()); });
  emu::set_compute_capability(9, 0);
  EXPECT_NE(error.find("the kernel test has wgmma, and the emulated GPU has compute capability 8.0; SLA_EMU_CC=90"),
            std::string::npos)
      << error;
}

TEST_F(Wgmma, FormsThatAreNotKnownAreErrors) {
  const auto error = [&](const std::string& instruction) {
    Product p;
    p.before_fence = instruction;
    return error_of([&] { run(p); });
  };
  const std::string product = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%d0,%d1,%d2,%d3}, %l1, %l1, 1, ";
  EXPECT_NE(error(product + "2, 1, 0, 0;").find("a scale is not 1 or -1"), std::string::npos);
  EXPECT_NE(error(product + "1, 1, 0;").find("another number of operands"), std::string::npos);
  EXPECT_NE(error("wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%d0,%d1}, %l1, %l1, 1, 1, 1, 0, 0;")
                .find("is not emulated: it is not known"),
            std::string::npos);
  EXPECT_NE(error("wgmma.mma_async.sync.aligned.m64n12k16.f32.f16.f16 {%d0}, %l1, %l1, 1, 1, 1, 0, 0;")
                .find("it is not known"),
            std::string::npos);
  EXPECT_NE(error("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%base], [%in, {%t, "
                  "%t}], "
                  "[%base];")
                .find("tensor"),
            std::string::npos);
  EXPECT_NE(error("fence.proxy.tensormap::generic.acquire.gpu [%in], 128;").find("of the proxies only the async one"),
            std::string::npos);
}

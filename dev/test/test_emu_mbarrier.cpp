// What dev/emu/ptx does with barriers in shared memory (mbarrier), the copies that arrive there, barriers at which a
// warp only arrives, and Hopper's instructions of a warp; and each mistake with them that it should find.
//
// COVERS dev/emu/ptx/ dev/emu/races.cpp dev/emu/races.h
#include <gtest/gtest.h>
#include <string>
#include <vector>
#include "dev/test/files.h"
#include "dev/test/ptx_kernels.h"

// A kernel with pointers %out and %in, and the thread's number %t; shared memory begins at %base. It stores %r0.
static std::string kernel_of(const std::string& body) {
  return R"(.version 8.0
.target sm_90a
.address_size 64
.file 1 "/somewhere/llmc/cuda/source.h"
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry test(.param .u64 out, .param .u64 in)
{
  .reg .pred %p<8>;
  .reg .b32 %r<32>, %t, %base;
  .reg .b64 %out, %in, %l<16>;
  .loc 1 7 1
  ld.param.u64 %out, [out];
  ld.param.u64 %in, [in];
  mov.u32 %t, %tid.x;
  mov.u32 %base, dynamic;
  mov.u32 %r0, 0;
)" + body +
         "\n  mad.wide.u32 %l15, %t, 4, %out;\n  st.global.b32 [%l15], %r0;\n  ret;\n}\n";
}

class PtxMbarrier : public FolderTest {
 protected:
  int files = 0;

  // in[i] = 3 i + 1.
  std::vector<uint32_t> values_of(const std::string& body, unsigned threads) {
    std::vector<uint32_t> numbers;
    for (uint32_t i = 0; i < 8192; i++) numbers.push_back(3 * i + 1);
    const Array<uint32_t> in(numbers, ptx_stream()), out(threads);
    run_ptx(write("test" + std::to_string(files++) + ".ptx", kernel_of(body)), "test", 1, threads, 16384,
            Parameters(out.data, in.data));
    return out.to_host(ptx_stream());
  }
};

struct PtxMbarrierDeathTest : PtxMbarrier {
  void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }

  void expect_error(const std::string& body, unsigned threads, const std::string& message) {
    for (uint64_t seed = 1; seed <= 2; seed++)
      EXPECT_DEATH(
          {
            emu::set_seed(seed);
            values_of(body, threads);
          },
          message);
  }
};

static std::string wait(const std::string& barrier, const std::string& parity) {
  return "{\n  .reg .pred done;\nWAIT:\n  mbarrier.try_wait.parity.shared::cta.b64 done, [" + barrier + "], " + parity +
         ";\n  @done bra END;\n  bra WAIT;\nEND:\n}\n";
}

// ----------------------------------------------------------------------------
// A pipeline: the lane of a fifth warp copies pieces of 2 KB to two buffers by turns, and four warps read them there.

struct Pipeline {
  std::string init_full = "mbarrier.init.shared::cta.b64 [%base+8192], 1; mbarrier.init.shared::cta.b64 [%base+8200], "
                          "1;";
  std::string init_empty = "mbarrier.init.shared::cta.b64 [%base+8208], 128; mbarrier.init.shared::cta.b64 "
                           "[%base+8216], 128;";
  std::string after_init = "fence.mbarrier_init.release.cluster; bar.sync 0;";
  std::string wait_for_empty = wait("%r4+16", "%r6");
  std::string bytes = "2048";
  std::string wait_for_full = wait("%r4", "%r5");
  std::string arrive = "mbarrier.arrive.shared::cta.b64 _, [%r4+16];";
};

// %r1: the piece; %r4: where its mbarriers are; %r5: the phase's parity for readers; %r6: for the writer; %r7: buffer.
static std::string body_of(const Pipeline& p) {
  return R"(
  setp.ne.u32 %p0, %t, 0;
  @%p0 bra READY;
  .loc 1 10 1
  )" + p.init_full +
         p.init_empty + R"(
READY:
  .loc 1 11 1
  )" + p.after_init +
         R"(
  mov.u32 %r1, 0;
  setp.gt.u32 %p1, %t, 128;
  @%p1 bra OUT;
NEXT:
  and.b32 %r2, %r1, 1;
  mad.lo.u32 %r4, %r2, 8, %base;
  add.u32 %r4, %r4, 8192;
  mad.lo.u32 %r7, %r2, 2048, %base;
  shr.u32 %r5, %r1, 1;
  and.b32 %r5, %r5, 1;
  xor.b32 %r6, %r5, 1;
  setp.eq.u32 %p2, %t, 128;
  @%p2 bra WRITER;
  .loc 1 20 1
  )" + p.wait_for_full +
         R"(
  mad.lo.u32 %r8, %t, 16, %r7;
  .loc 1 21 1
  ld.shared.u32 %r9, [%r8+4];
  mad.lo.u32 %r0, %r0, 5, %r9;
  .loc 1 22 1
  )" + p.arrive +
         R"(
  bra CONTINUE;
WRITER:
  .loc 1 30 1
  )" + p.wait_for_empty +
         R"(
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], )" +
         p.bytes + R"(;
  mad.wide.u32 %l1, %r1, 2048, %in;
  .loc 1 31 1
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r7], [%l1], 2048, [%r4];
CONTINUE:
  add.u32 %r1, %r1, 1;
  setp.lt.u32 %p3, %r1, 7;
  @%p3 bra NEXT;
OUT:
)";
}

TEST_F(PtxMbarrier, APipelineOfBulkCopiesIsRight) {
  for (uint64_t seed = 1; seed <= 20; seed++) {
    emu::set_seed(seed);
    const std::vector<uint32_t> values = values_of(body_of({}), 160);
    for (uint32_t t = 0; t < 128; t++) {
      uint32_t expected = 0;
      for (uint32_t piece = 0; piece < 7; piece++) expected = 5 * expected + 3 * (512 * piece + 4 * t + 1) + 1;
      ASSERT_EQ(values[t], expected) << "seed " << seed << ", thread " << t;
    }
  }
}

// One lane arrives for its warp, after a barrier of the warp.
static Pipeline with_one_arrival_of_a_warp(const std::string& barrier) {
  Pipeline p;
  p.init_empty = "mbarrier.init.shared::cta.b64 [%base+8208], 4; mbarrier.init.shared::cta.b64 [%base+8216], 4;";
  p.arrive = barrier + "and.b32 %r10, %t, 31; setp.eq.u32 %p4, %r10, 0; @%p4 " + p.arrive;
  return p;
}

TEST_F(PtxMbarrierDeathTest, OneArrivalOfAWarpNeedsItsBarrier) {
  values_of(body_of(with_one_arrival_of_a_warp("bar.warp.sync -1;")), 160);
  expect_error(body_of(with_one_arrival_of_a_warp("")), 160,
               "race: .* writes it in cp.async.bulk.* has read it in ld.shared");
}

TEST_F(PtxMbarrierDeathTest, MistakesOfAPipelineAreReported) {
  Pipeline p;
  p.wait_for_full = "";
  expect_error(body_of(p), 160,
               "race: .* reads it in ld.shared.u32 at llmc/cuda/source.h:21 .* has written it in cp.async.bulk|"
               "race: .* writes it in cp.async.bulk.* at llmc/cuda/source.h:31 .* has read it in ld.shared.u32|"
               "deadlock: waits for a phase of the mbarrier");
  p = Pipeline();
  p.wait_for_empty = "";
  expect_error(body_of(p), 160, "race: .* writes it in cp.async.bulk.* at llmc/cuda/source.h:31");
  p = Pipeline();
  p.arrive = "setp.lt.u32 %p4, %t, 127; @%p4 mbarrier.arrive.shared::cta.b64 _, [%r4+16];";
  expect_error(body_of(p), 160,
               "deadlock: waits for a phase of the mbarrier at byte 8[0-9]+ of shared memory, where "
               "[0-9]+ arrivals and 0 bytes are missing, in mbarrier.try_wait");
  p = Pipeline();
  p.bytes = "2064";
  expect_error(body_of(p), 160,
               "deadlock: waits for a phase of the mbarrier .* where 0 arrivals and 16 bytes are missing");
  p = Pipeline();
  p.arrive += p.arrive;
  expect_error(body_of(p), 160, "race: .* writes it in cp.async.bulk|arrivals at an mbarrier that waits for");
  p = Pipeline();
  p.init_empty = "";
  expect_error(body_of(p), 160, "no mbarrier has been initialised at byte 82(08|16) of shared memory");
  p = Pipeline();
  p.after_init = "";
  expect_error(body_of(p), 160,
               "race: byte 8[0-9]* of shared memory.*|no mbarrier has been initialised at byte 8[0-9]* of shared "
               "memory");
  p = Pipeline();
  p.after_init += "st.shared.b32 [%base+8200], %t; bar.sync 0;";
  expect_error(body_of(p), 160, "race: byte 8200|the mbarrier at byte 8200 of shared memory has been overwritten");
}

// ----------------------------------------------------------------------------
// cp.async that arrives

// Each of 64 threads copies 16 bytes, and reads 16 bytes of another warp's.
static std::string copies(const std::string& count, const std::string& arrive, const std::string& waiting) {
  return R"(
  setp.ne.u32 %p0, %t, 0;
  @%p0 bra READY;
  mbarrier.init.shared.b64 [%base+8192], )" +
         count + R"(;
READY:
  bar.sync 0;
  mad.lo.u32 %r2, %t, 16, %base;
  mad.wide.u32 %l1, %t, 16, %in;
  cp.async.cg.shared.global [%r2], [%l1], 16;
  )" + arrive +
         waiting + R"(
  xor.b32 %r3, %t, 63;
  mad.lo.u32 %r3, %r3, 16, %base;
  .loc 1 21 1
  ld.shared.u32 %r0, [%r3];
)";
}
static const std::string mbarrier = "[%base+8192]";

TEST_F(PtxMbarrier, AsynchronousCopiesArrive) {
  const std::string of_copies = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 " + mbarrier + ";";
  const std::string further = "cp.async.mbarrier.arrive.shared::cta.b64 " + mbarrier + ";\n";
  const std::string state = "mbarrier.arrive.shared.b64 %l2, " + mbarrier +
                            ";\nAGAIN:\n  mbarrier.test_wait.shared.b64 %p1, " + mbarrier +
                            ", %l2;\n  @!%p1 bra AGAIN;";
  for (uint64_t seed = 1; seed <= 20; seed++) {
    emu::set_seed(seed);
    for (const std::string& body : {copies("64", of_copies, wait("%base+8192", "0")), copies("64", further, state)}) {
      const std::vector<uint32_t> values = values_of(body, 64);
      for (uint32_t t = 0; t < 64; t++) ASSERT_EQ(values[t], 3 * 4 * (t ^ 63) + 1) << "seed " << seed;
    }
  }
}

TEST_F(PtxMbarrierDeathTest, CopiesThatHaveNotArrivedAreReported) {
  const std::string race = "race: .* reads it in ld.shared.u32 at llmc/cuda/source.h:21 .* has written it in "
                           "cp.async.cg|"
                           "race: .* writes it in cp.async.cg.* has read it in ld.shared.u32 at llmc/cuda/source.h:21";
  const std::string of_copies = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 " + mbarrier + ";";
  expect_error(copies("64", of_copies, ""), 64, race);
  // An arrival that is not the copy's.
  expect_error(copies("64", "mbarrier.arrive.shared.b64 _, " + mbarrier + ";", wait("%base+8192", "0")), 64, race);
}

// ----------------------------------------------------------------------------
// Barriers at which a warp only arrives

// Warp 1 writes before it arrives, and warp 0 waits; then warp 0 writes, which warp 1 reads without having waited.
static std::string arrival(const std::string& instruction, const std::string& end) {
  return R"(
  mad.lo.u32 %r2, %t, 4, %base;
  setp.lt.u32 %p0, %t, 32;
  @%p0 bra WAITS;
  st.shared.u32 [%r2], %t;
  )" + instruction +
         " 1, 64;\n  " + end + R"(
  bra OUT;
WAITS:
  barrier.cta.sync 1, 64;
  ld.shared.u32 %r0, [%r2+128];
  .loc 1 20 1
  st.shared.u32 [%r2], %r0;
OUT:
)";
}

TEST_F(PtxMbarrier, WarpsThatArriveDoNotWait) {
  for (uint64_t seed = 1; seed <= 20; seed++) {
    emu::set_seed(seed);
    for (const std::string instruction : {"bar.arrive", "barrier.cta.arrive", "barrier.arrive"}) {
      const std::vector<uint32_t> values = values_of(arrival(instruction, ""), 64);
      for (uint32_t t = 0; t < 32; t++) ASSERT_EQ(values[t], t + 32) << instruction;
    }
  }
}

TEST_F(PtxMbarrierDeathTest, ArrivingOrdersNothingThatComesLater) {
  const std::string reads = "ld.shared.u32 %r0, [%r2+-128];", writes = "st.shared.u32 [%r2], 0;";
  expect_error(arrival("bar.arrive", reads), 64, "race: .* it in ld.shared.u32|race: .* it in st.shared.u32");
  expect_error(arrival("bar.arrive", writes), 64, "race: .* it in (ld|st).shared.u32");
  expect_error("  bar.arrive 1, 128;\n  bar.sync 1, 96;\n", 64, "barrier 1 of 128 threads, in a block of 64");
}

// ----------------------------------------------------------------------------
// Instructions of a warp

TEST_F(PtxMbarrier, OneLaneIsElected) {
  const std::string body = R"(
  setp.lt.u32 %p0, %t, 16;
  selp.b32 %r1, 0xffff, 0xffff0000, %p0;
  elect.sync %r2|%p1, %r1;
  selp.b32 %r3, 100, 0, %p1;
  add.u32 %r0, %r2, %r3;
)";
  for (uint64_t seed = 1; seed <= 20; seed++) {
    emu::set_seed(seed);
    const std::vector<uint32_t> values = values_of(body, 32);
    for (const uint32_t first : {0u, 16u}) {
      uint32_t elected = 0, leader = values[first] % 100;
      ASSERT_TRUE(leader >= first && leader < first + 16);
      for (uint32_t t = first; t < first + 16; t++) {
        ASSERT_EQ(values[t] % 100, leader);
        elected += values[t] / 100;
      }
      ASSERT_EQ(elected, 1u);
      ASSERT_EQ(values[leader] / 100, 1u);
    }
  }
}

// What stmatrix stores, ldmatrix loads again; transposed twice, too. Once transposed, element (r, c) comes from (c, r).
TEST_F(PtxMbarrier, StmatrixIsTheOppositeOfLdmatrix) {
  const auto body = [](const std::string& store, const std::string& load) {
    return R"(
  mad.lo.u32 %r1, %t, 16, %base;
  mad.lo.u32 %r2, %t, 0x20002, 0x10000;
  stmatrix.sync.aligned.m8n8.x2)" +
           store + ".shared.b16 [%r1], {%r3, %r2};\n  bar.warp.sync -1;\n  ldmatrix.sync.aligned.m8n8.x2" + load +
           ".shared.b16 {%r4, %r0}, [%r1];\n";
  };
  for (const auto& [store, load] : {std::pair("", ""), std::pair(".trans", ".trans")}) {
    const std::vector<uint32_t> values = values_of(body(store, load), 32);
    for (uint32_t t = 0; t < 32; t++) EXPECT_EQ(values[t], 0x20002 * t + 0x10000);
  }
  const std::vector<uint32_t> values = values_of(body(".trans", ""), 32);
  for (uint32_t t = 0; t < 32; t++)
    for (uint32_t half = 0; half < 2; half++) {
      const uint32_t row = t / 4, column = 2 * (t % 4) + half;  // element (row, column) was 8 column + row
      EXPECT_EQ(values[t] >> 16 * half & 0xffff, 8 * column + row);
    }
}

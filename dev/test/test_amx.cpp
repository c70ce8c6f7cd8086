// The bf16 programs on an emulated AMX unit (dev/emu_amx): the unit against the manual, then the matmuls for AMX
// in the operations (build/bf16/test_ops_cpu, build/bf16/test_attention_cpu), the model (build/bf16/test_gpt2_sla_cpu)
// and the trainer. Every process of this test runs with it, but on a CPU that has AMX, which would execute a part of
// its instructions itself: there the tests of the unit are of the CPU's own, and the programs' own tests use that.
//
// COVERS dev/emu_amx/
#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <tuple>
#include "command_line.h"
#include "llmc/base/bf16_bits.h"
#include "values.h"

static bool cpu_has_amx() { return system("grep -qw amx_bf16 /proc/cpuinfo") == 0; }

int main(int argc, char** argv) {
  const char* preloaded = getenv("LD_PRELOAD");
  if (cpu_has_amx()) {
    unsetenv("LD_PRELOAD");
  } else if (preloaded == nullptr || strstr(preloaded, "emulated_amx.so") == nullptr) {
    setenv("LD_PRELOAD", "build/emulated_amx.so", 1), setenv("ONEDNN_CPUID", "build/onednn_cpuid.txt", 1);
    execv(argv[0], argv);
    perror(argv[0]);
    return 1;
  }
  testing::InitGoogleTest(&argc, argv);
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // another process, in which no test has run before
  return RUN_ALL_TESTS();
}

// ----------------------------------------------------------------------------
// The unit

struct TileConfig {
  uint8_t palette = 1, first_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int bytes_of_row) {
    rows[tile] = uint8_t(num_rows), bytes[tile] = uint16_t(bytes_of_row);
  }
};

static void allow_amx() { ASSERT_EQ(syscall(SYS_arch_prctl, 0x1023, 18), 0); }
static void configure(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
static void multiply_tiles() { asm volatile("tdpbf16ps %tmm7, %tmm6, %tmm1"); }  // tile 1 += tile 6 * tile 7

TEST(Tiles, AddTheProductOfPairsOfBf16) {
  allow_amx();
  for (auto [m, n, pairs] : {std::tuple(16, 16, 16), {5, 7, 3}, {1, 1, 1}, {16, 3, 16}}) {
    SCOPED_TRACE(testing::Message() << m << " x " << n << " x " << 2 * pairs);
    const std::vector<float> a = random_values<float>(m * 2 * pairs, 1), b = random_values<float>(2 * pairs * n, 2);
    const int stride = 80;  // bytes from row to row of c, more than a row has
    std::vector<float> c = random_values<float>(16 * stride / 4, 3);
    const std::vector<float> before = c;
    std::vector<uint16_t> a_bits, b_bits(size_t(2 * pairs * n));
    for (float x : a) a_bits.push_back(bf16_from_float(x));
    for (int k = 0; k < 2 * pairs; k++)
      for (int j = 0; j < n; j++) b_bits[size_t(k / 2 * 2 * n + 2 * j + k % 2)] = bf16_from_float(b[size_t(k * n + j)]);
    TileConfig config;
    config.set(1, m, 4 * n), config.set(6, m, 4 * pairs), config.set(7, pairs, 4 * n);
    configure(config);
    asm volatile("tileloadd (%0,%1,1), %%tmm1" : : "r"(c.data()), "r"(int64_t(stride)) : "memory");
    asm volatile("tileloadd (%0,%1,1), %%tmm6" : : "r"(a_bits.data()), "r"(int64_t(4 * pairs)) : "memory");
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm7" : : "r"(b_bits.data()), "r"(int64_t(4 * n)) : "memory");
    multiply_tiles(), multiply_tiles();
    asm volatile("tilestored %%tmm1, (%0,%1,1)\n tilerelease" : : "r"(c.data()), "r"(int64_t(stride)) : "memory");
    std::vector<double> expected(before.begin(), before.end());
    for (int i = 0; i < m; i++)
      for (int j = 0; j < n; j++)
        for (int k = 0; k < 2 * pairs; k++)
          expected[size_t(i * stride / 4 + j)] += 2.0 * double(float_from_bf16(a_bits[size_t(i * 2 * pairs + k)])) *
                                                  double(float_from_bf16(bf16_from_float(b[size_t(k * n + j)])));
    EXPECT_LE(relative_error(c, expected), 2e-7);
    for (int i = 0; i < 16; i++)
      for (int j = i < m ? n : 0; j < stride / 4; j++)
        EXPECT_EQ(c[size_t(i * stride / 4 + j)], before[size_t(i * stride / 4 + j)])
            << "row " << i << ", column " << j << " is none of the tile's";
  }
}

TEST(Tiles, AreLoadedAndStoredByEveryKindOfAddress) {
  allow_amx();
  TileConfig config;
  config.set(3, 2, 8);
  configure(config);
  const std::vector<uint8_t> memory = [] {
    std::vector<uint8_t> bytes(2048);
    for (size_t i = 0; i < bytes.size(); i++) bytes[i] = uint8_t(i * 7 + i / 256);
    return bytes;
  }();
  const uint8_t* const middle = memory.data() + 1024;
  uint8_t stored[2][8];
  const int64_t stride = 24;
  auto expect_row = [&](int row, int64_t from) {
    for (int i = 0; i < 8; i++) EXPECT_EQ(stored[row][i], middle[from + i]) << "row " << row << ", byte " << i;
  };
#define EXPECT_TILE_AT(address, base_register, index_register, first, bytes_between)          \
  {                                                                                           \
    SCOPED_TRACE(address);                                                                    \
    register const uint8_t* base asm(base_register) = middle;                                 \
    register int64_t index asm(index_register) = stride;                                      \
    asm volatile("tileloadd " address ", %%tmm3" : : "r"(base), "r"(index) : "memory");       \
    asm volatile("tilestored %%tmm3, (%0,%1,1)" : : "r"(stored), "r"(int64_t(8)) : "memory"); \
    expect_row(0, first), expect_row(1, first + (bytes_between));                             \
  }
  EXPECT_TILE_AT("(%%rax,%%rcx,1)", "rax", "rcx", 0, stride)
  EXPECT_TILE_AT("(%%r12,%%rbx,2)", "r12", "rbx", 0, 2 * stride)
  EXPECT_TILE_AT("-100(%%r13,%%r14,4)", "r13", "r14", -100, 4 * stride)
  EXPECT_TILE_AT("300(%%rdi,%%r12,8)", "rdi", "r12", 300, 8 * stride)
  EXPECT_TILE_AT("-300(%%r11,%%r9,1)", "r11", "r9", -300, stride)
  EXPECT_TILE_AT("8(%%rsi)", "rsi", "rdx", 8, 0)
#undef EXPECT_TILE_AT
}

// A row that a tile lacks, and a tile that is zeroed, are zero wherever they are read.
TEST(Tiles, BeginAsZero) {
  allow_amx();
  TileConfig config;
  config.set(0, 4, 16);
  std::vector<float> x = {1, 2, 3, 4}, y(16, 5.0f), zero(16, 0.0f);
  auto store = [&] { asm volatile("tilestored %%tmm0, (%0,%1,1)" : : "r"(y.data()), "r"(int64_t(16)) : "memory"); };
  configure(config);
  store();
  EXPECT_EQ(y, zero);
  asm volatile("tileloadd (%0,%1,1), %%tmm0" : : "r"(x.data()), "r"(int64_t(0)) : "memory");
  store();
  EXPECT_EQ(y, (std::vector<float>{1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4}));
  asm volatile("tilezero %tmm0");
  store();
  EXPECT_EQ(y, zero);
}

TEST(Tiles, AreRefusedWhereACpuWouldStop) {
  if (cpu_has_amx()) GTEST_SKIP() << "this CPU has AMX, and stops the program in its own way";
  auto of_shapes = [](int d_rows, int d_bytes, int a_rows, int a_bytes, int b_rows, int b_bytes) {
    TileConfig config;
    config.set(1, d_rows, d_bytes), config.set(6, a_rows, a_bytes), config.set(7, b_rows, b_bytes);
    allow_amx(), configure(config), multiply_tiles();
  };
  const auto stops = testing::ExitedWithCode(98);
  EXPECT_EXIT(configure(TileConfig()), stops, "before arch_prctl has allowed it");
  EXPECT_EXIT(allow_amx(); multiply_tiles(), stops, "LDTILECFG has not configured");
  EXPECT_EXIT(allow_amx(); configure(TileConfig());
              asm volatile("tilezero %tmm2"), stops, "LDTILECFG has not configured");
  EXPECT_EXIT(of_shapes(4, 16, 4, 8, 3, 16), stops, "shapes do not fit");  // a has 2 pairs per row, b has 3 rows
  EXPECT_EXIT(of_shapes(4, 16, 5, 12, 3, 16), stops, "shapes do not fit");
  EXPECT_EXIT(of_shapes(4, 16, 4, 12, 3, 20), stops, "shapes do not fit");
  EXPECT_EXIT(of_shapes(17, 16, 4, 12, 3, 16), stops, "too large");
  EXPECT_EXIT(of_shapes(4, 68, 4, 12, 3, 16), stops, "too large");
  EXPECT_EXIT(
      {
        TileConfig config;
        config.palette = 2;
        allow_amx();
        configure(config);
      },
      stops, "unknown palette");
  EXPECT_EXIT(allow_amx(); asm volatile("tdpbssd %tmm7, %tmm6, %tmm1"), stops, "none of AMX's for bf16");
}

// ----------------------------------------------------------------------------
// Matmuls by it

class OnTiles : public CommandLine {
 protected:
  // Programs that multiply by AMX are compiled for AVX512-BF16.
  void SetUp() override {
    if (cpu_has_amx()) GTEST_SKIP() << "this CPU has AMX, which all tests of bf16 programs use";
    if (system("grep -qw avx512_bf16 /proc/cpuinfo") != 0)
      GTEST_SKIP() << "this CPU has no AVX512-BF16, which matmuls by AMX are compiled for";
  }
  // How many products of tiles a program's processes have made.
  static long long products(const Outcome& o) {
    const size_t end = o.err.find(" TDPBF16PS", std::min(o.err.find("emulated AMX: "), o.err.size()));
    return end == std::string::npos ? 0 : std::stoll(o.err.substr(o.err.rfind(' ', end - 1)));
  }
};

struct ProgramOfTests {
  const char *name, *program, *tests;
};
class ProgramsOnTiles : public OnTiles, public testing::WithParamInterface<ProgramOfTests> {};

TEST_P(ProgramsOnTiles, PassTheirTests) {
  const Outcome o = run(std::string("build/bf16/") + GetParam().program + " --gtest_filter='" + GetParam().tests + "'");
  EXPECT_EQ(o.exit_status, 0) << o.out << o.err;
  EXPECT_EQ(o.out.find(" 0 tests"), std::string::npos) << o.out;
  EXPECT_GT(products(o), 1000) << o.err;
}

INSTANTIATE_TEST_SUITE_P(Bf16, ProgramsOnTiles,
                         testing::Values(ProgramOfTests{"operations", "test_ops_cpu", "*"},
                                         ProgramOfTests{"attention", "test_attention_cpu",
                                                        "Attention.MatchesTheFormulaForSeveral*:Attention.W*:"
                                                        "AttentionMasks.L*:AttentionTopK.F*"},
                                         ProgramOfTests{"golden_cases", "test_gpt2_sla_cpu", "*Golden.*"},
                                         ProgramOfTests{"every_wiring", "test_gpt2_sla_cpu",
                                                        "*Wiring/Graph.HasTheLosses*"},
                                         ProgramOfTests{"bits", "test_gpt2_sla_cpu", "Bits*:Steps*:Generation*"}),
                         [](const auto& info) { return std::string(info.param.name); });

// A CPU with the unit: the code that CPUs without it execute is tested there, too.
TEST_F(CommandLine, OperationsPassTheirTestsWhereAmxIsHidden) {
  if (!cpu_has_amx()) GTEST_SKIP() << "this CPU has no AMX: the operations' own tests are without it";
  const Outcome o = run("env ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 build/bf16/test_ops_cpu "
                        "--gtest_filter='Gemm.*:*Gemm*'");
  EXPECT_EQ(o.exit_status, 0) << o.out << o.err;
  EXPECT_EQ(o.out.find(" 0 tests"), std::string::npos) << o.out;
}

// AMX adds in another order than AVX512-BF16: other bits, the same losses to a few roundings.
TEST_F(OnTiles, TheTrainerTrainsAsWithoutThem) {
  write("data.bin", shard_bytes(4000));
  const std::string command = bf16_trainer + "-i " + in("data.bin") +
                              " --layers 4 --heads 4 --channels 64 --vocab-size 256 --max-seq-len 32 -t 32 -b 4 -x 20 "
                              "-l 3e-3 -v 0 -o ";
  const Outcome tiled = run(command + in("tiles")), other = run("env -u LD_PRELOAD " + command + in("other"));
  ASSERT_EQ(tiled.exit_status, 0) << tiled.err;
  ASSERT_EQ(other.exit_status, 0) << other.err;
  EXPECT_GT(products(tiled), 1000);
  EXPECT_EQ(products(other), 0);
  const std::vector<json> a = steps_of(read_log(in("tiles"))), b = steps_of(read_log(in("other")));
  ASSERT_EQ(a.size(), 20u);
  ASSERT_EQ(b.size(), 20u);
  EXPECT_LT(a[19].at("loss").get<double>(), a[0].at("loss").get<double>() - 0.1);
  for (size_t step = 0; step < 20; step++)
    EXPECT_NEAR(a[step].at("loss").get<double>(), b[step].at("loss").get<double>(), 2e-3) << "step " << step + 1;
}

// ONEDNN_MAX_CPU_ISA hides it, as on a CPU without.
TEST_F(OnTiles, TheTrainerDoesWithoutThemWhereTheyAreHidden) {
  write("data.bin", shard_bytes(400));
  const Outcome o = run("env ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 " + bf16_trainer + "-i " + in("data.bin") +
                        " --layers 2 --heads 2 --channels 32 --vocab-size 256 --max-seq-len 32 -t 32 -b 2 -x 2 -v 0");
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_EQ(products(o), 0) << o.err;
}

TEST_F(OnTiles, AListOfAnotherOnednnsInstructionsIsRefused) {
  write("list", "1000: cpuid\n");
  const Outcome o = run("env ONEDNN_CPUID=" + in("list") + " " + bf16_trainer + "--help");
  EXPECT_EQ(o.exit_status, 98);
  EXPECT_NE(o.err.find("of another oneDNN"), std::string::npos) << o.err;
}

// The device's memory; on the CPU its threads, its vector functions and its products of bf16.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <thread>
#include <utility>
#include "dev/test/files.h"
#include "dev/test/operations/operation.h"
#include "llmc/ops/adamw.h"
#include "llmc/ops/step_stats.h"

// ----------------------------------------------------------------------------
// The device's memory

// The emulated GPU reads pageable memory late in every other copy, on average.
TEST(DeviceMemory, HasTheHostsValuesWhenACopyFromPageableMemoryReturns) {
  const size_t n = 100;
  const DeviceArray<int> x(std::vector<int>{int(n)}), y(std::vector<int>(n, 0)), buffers(std::vector<int>(2 * n, 0));
  int* const staging[] = {buffers.data, buffers.data + n};
  for (int i = 1; i <= 20; i++) {
    int value = i;
    std::vector<int> values(n, i);
    copy_to_device(x.data, &value, sizeof value);
    Upload tokens = {y.data, {}, values.data(), n};
    std::copy_n(staging, num_staging_buffers, tokens.staging.begin());
    upload({tokens});
    value = -1;
    values.assign(n, -1);
    EXPECT_EQ(x.to_host()[0], i);
    EXPECT_EQ(y.to_host(), std::vector<int>(n, i));
  }
}

#ifdef SLA_EMU
TEST(DeviceMemory, IsAwaitedByAHostThatSleeps) {
  const DeviceArray<int> x(std::vector<int>{1});
  const emu::Counters before = emu::counters();
  x.to_host();
  EXPECT_GT(emu::counters().host_waits, before.host_waits);
  EXPECT_EQ(emu::counters().spinning_waits, before.spinning_waits);
}
#endif

#ifdef SLA_CPU
// ----------------------------------------------------------------------------
// The CPU's threads and vector functions

inline int num_threads_of_process() {
  const std::filesystem::directory_iterator threads("/proc/self/task");
  return int(std::distance(begin(threads), end(threads)));
}

// OpenMP's threads belong to the one that starts them, so that a new one has none yet.
TEST(Threads, AreStartedForLargeOperationsOnly) {
  std::thread([] {
    omp_set_num_threads(3);
    const int before = num_threads_of_process();
    const int64_t N = 64, C = 64, OC = 256, V = 257, large = 1 << 20;
    std::vector<floatX> a(N * OC, floatX(0.5f)), b(a), c(a), d(a), e(a), f(a), logits(N * V, floatX(0.5f));
    std::vector<float> x(N * OC, 0.5f), y(x), z(x), w(x), scratch(layernorm_backward_scratch(N, C));
    const std::vector<int> tokens(N, 3);
    const std::vector<ParameterChunk> chunks(20, {0, 0, 64, 1});
    double sum;
    matmul_activation_forward(Activation::gelu, a.data(), b.data(), c.data(), d.data(), e.data(), N, C, OC);
    matmul_activation_backward(Activation::gelu, a.data(), x.data(), y.data(), d.data(), e.data(), f.data(), b.data(),
                               N, C, OC);
    const LayerNormForward norm = {a.data(), x.data(), y.data(), e.data(), nullptr, N, C, 1e-5f};
    layernorm_forward(norm, d.data());
    residual_layernorm_forward(norm, f.data(), d.data(), e.data());
    layernorm_backward(
        {a.data(), x.data(), y.data(), d.data(), e.data(), z.data(), z.data(), f.data(), scratch.data(), N, C});
    embedding_forward(a.data(), tokens.data(), {N / 2}, b.data(), c.data(), N, C);
    embedding_backward(x.data(), y.data(), c.data(), tokens.data(), 2, N / 2, C);
    classifier({x.data(), logits.data(), tokens.data(), N, V, V, 0.1f, true});
    sum_of_squares(&sum, x.data(), chunks.data(), int64_t(chunks.size()));
    const StepStats stats = {1, 1};
    adamw_update(a.data(), w.data(), x.data(), y.data(), z.data(), chunks.data(), int64_t(chunks.size()), {}, &stats);
    copy_rows({a.data(), C, b.data(), C, C}, N);
    device_memset(a.data(), 0, a.size() * sizeof(floatX));
    EXPECT_EQ(num_threads_of_process(), before);

    std::vector<floatX> p(large, floatX(0.5f)), q(large), r(large);
    activation_forward(Activation::gelu, q.data(), p.data(), 1, large);
    EXPECT_EQ(num_threads_of_process(), before + 2);
    omp_set_num_threads(4);
    gemm('N', 'N', 1024, 1024, 1024, p.data(), 1024, q.data(), 1024, false, r.data(), 1024);
    EXPECT_EQ(num_threads_of_process(), before + 3) << "oneDNN's are the same";
  }).join();
}

// Groups as in a container, /pod/job: the pod may use 3.5 processors, the job within it more, and the root does not
// say.
TEST(Threads, AreNoMoreThanControlGroupsAllow) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.path + "/pod/job");
  const std::string membership = folder.path + "/membership";
  write_file(membership, "4:memory:/other\n0::/pod/job\n");
  EXPECT_TRUE(std::isinf(processors_allowed(membership, folder.path)));
  write_file(folder.path + "/pod/job/cpu.max", "800000 100000\n");
  EXPECT_EQ(processors_allowed(membership, folder.path), 8);
  write_file(folder.path + "/pod/cpu.max", "175000 50000\n");
  EXPECT_EQ(processors_allowed(membership, folder.path), 3.5);
  write_file(folder.path + "/pod/cpu.max", "max 100000\n");
  EXPECT_EQ(processors_allowed(membership, folder.path), 8);
  write_file(folder.path + "/cpu.max", "50000 100000\n");
  EXPECT_EQ(processors_allowed(membership, folder.path), 0.5);
  EXPECT_TRUE(std::isinf(processors_allowed(folder.path + "/nothing", folder.path)));
}

TEST(Exp, IsWithinAFewRoundingErrorsAndKeepsItsLimits) {
  double worst = 0;
  for (double x = -87; x < 88.5; x += 0.00173)
    worst = std::max(worst, std::abs(real(vec_exp(float(x))) / std::exp(real(float(x))) - 1));
  EXPECT_LE(worst, 3e-7);
  EXPECT_EQ(vec_exp(0.0f), 1.0f);
  EXPECT_EQ(vec_exp(-100.0f), 0.0f);
  EXPECT_EQ(vec_exp(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(vec_exp(100.0f), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(vec_exp(std::numeric_limits<float>::quiet_NaN())));
}

inline float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// A float's lower half says how far it is from the two bf16 beside it.
TEST(Bf16, IsTheNearestOfTiesTheEvenAndKeepsWhatIsNotFinite) {
  for (uint32_t upper = 0; upper < 0x10000; upper++) {
    const float exact = float_of_bits(upper << 16);
    if (std::isnan(exact)) {
      for (uint32_t lower : {0u, 1u, 0xffffu})
        EXPECT_TRUE(std::isnan(float(bfloat16(float_of_bits(upper << 16 | lower))))) << upper;
      continue;
    }
    EXPECT_EQ(bfloat16(exact).bits, upper);
    if (std::isinf(exact)) continue;
    for (uint32_t lower : {1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const bool up = lower > 0x8000u || (lower == 0x8000u && upper % 2 == 1);
      EXPECT_EQ(bfloat16(float_of_bits(upper << 16 | lower)).bits, upper + up) << upper << ", " << lower;
    }
  }
  EXPECT_TRUE(std::isnan(float(bfloat16(float_of_bits(0x7f800001)))));  // the NaN whose upper half is infinity's
}

// Whole registers and parts of them; rounded as bfloat16's constructor rounds.
template <class T>
void expect_loads_and_stores_of(const std::vector<T>& x) {
  for (int64_t count = -2; count <= vector_width + 2; count++) {
    const FloatVector loaded = load_vector(x.data(), count, 7);
    std::vector<T> stored(x.size(), T(-1.0f));
    store_vector(stored.data(), loaded, count);
    for (int64_t i = 0; i < vector_width; i++) {
      EXPECT_EQ(loaded[i], i < count ? to_float(x[i]) : 7) << i << " of " << count;
      EXPECT_EQ(to_float(stored[i]), i < count ? to_float(x[i]) : -1) << i << " of " << count;
    }
    for (size_t i = vector_width; i < x.size(); i++) EXPECT_EQ(to_float(stored[i]), -1);
  }
}
TEST(Vectors, LoadAndStoreTheElementsThatThereAre) {
  expect_loads_and_stores_of(random_values<float>(2 * vector_width, 1));
  expect_loads_and_stores_of(random_values<bfloat16>(2 * vector_width, 2));
  const auto x = random_values<float>(1000 * vector_width, 3);
  for (size_t first = 0; first < x.size(); first += vector_width) {
    bfloat16 rounded[vector_width];
    store_vector(rounded, load_vector(&x[first]));
    for (size_t i = 0; i < vector_width; i++) EXPECT_EQ(rounded[i].bits, bfloat16(x[first + i]).bits);
  }
  bfloat16 not_finite[vector_width];
  store_vector(not_finite, FloatVector{} + std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(std::isnan(float(not_finite[0])));
  store_vector(not_finite, FloatVector{} + std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isinf(float(not_finite[0])));
}

// Matrices with rows of their own strides, of blocks of several sizes, and what is to be added to.
template <class In, class Out>
struct Product {
  int64_t m, n, k;
  char op_a, op_b;
  float alpha, beta;
  int64_t lda = (op_a == 'N' ? k : m) + 3, ldb = (op_b == 'N' ? n : k) + 5, ldc = n + 7;
  std::vector<In> a = random_values<In>((op_a == 'N' ? m : k) * lda, 1),
                  b = random_values<In>((op_b == 'N' ? k : n) * ldb, 2);
  std::vector<Out> c = random_values<Out>(m * ldc, 3);

  std::vector<double> expected() const {
    std::vector<double> y = doubles(c);
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < n; j++) {
        double sum = 0;
        for (int64_t l = 0; l < k; l++)
          sum += real(a[op_a == 'N' ? i * lda + l : l * lda + i]) * real(b[op_b == 'N' ? l * ldb + j : j * ldb + l]);
        y[i * ldc + j] = alpha * sum + (beta == 0 ? 0 : real(c[i * ldc + j]));
      }
    return y;
  }
  std::vector<Out> computed() const {
    std::vector<Out> y = c;
    if constexpr (std::is_same_v<Out, float>)
      gemm(op_a, op_b, m, n, k, alpha, a.data(), lda, b.data(), ldb, beta != 0, y.data(), ldc);
    else gemm(op_a, op_b, m, n, k, a.data(), lda, b.data(), ldb, beta != 0, y.data(), ldc);
    return y;
  }
};

// Each shape as one block and as several, and with every kind of operand.
TEST(Gemm, MultipliesBf16ToBothTypes) {
  for (char op_a : {'N', 'T'})
    for (char op_b : {'N', 'T'})
      for (auto [m, n, k, alpha, beta] : {std::tuple(37, 21, 19, 1.0f, 0.0f),
                                          {1, 65, 33, 0.25f, 0.0f},
                                          {290, 210, 40, 1.0f, 1.0f},
                                          {32, 64, 600, 0.25f, 0.0f}}) {
        SCOPED_TRACE(testing::Message() << op_a << op_b << " " << m << " x " << n << " x " << k);
        const Product<bfloat16, float> p = {m, n, k, op_a, op_b, alpha, beta};
        EXPECT_LE(relative_error(p.computed(), p.expected()), of_fp32);
        std::vector<float> as_floats = p.c;
        multiply_as_floats({m, n, k, p.lda, p.ldb, p.ldc, alpha, op_a, op_b, beta != 0}, p.a.data(), p.b.data(),
                           as_floats.data(), /*matmul=*/0);
        EXPECT_LE(relative_error(as_floats, p.expected()), of_fp32) << "as floats";
        const Product<bfloat16, bfloat16> rounded = {m, n, k, op_a, op_b, 1.0f, beta};
        EXPECT_LE(relative_error(rounded.computed(), rounded.expected()), 2e-3);
      }
}

#ifdef __AVX512BF16__
// Tiles of 16 rows and 32 of k, in panels of 32 rows and columns, 512 of k at once; by AVX512-BF16 on a CPU with AMX,
// too.
TEST(Gemm, MultipliesTilesThatAreFullAndThatAreNot) {
  if (!has_bf16_matmuls()) GTEST_SKIP() << "this CPU has no matmuls of bf16";
  for (char op_a : {'N', 'T'})
    for (char op_b : {'N', 'T'})
      for (auto [m, n, k] : {std::tuple(64, 96, 64),
                             {15, 17, 31},
                             {47, 33, 1},
                             {33, 64, 545},
                             {32, 49, 1056},
                             {40, 64, 34},
                             {24, 48, 34},
                             {16, 16, 546},
                             {8, 32, 546}})
        for (auto [alpha, beta] : {std::pair(1.0f, 0.0f), {1.0f, 1.0f}, {0.5f, 0.0f}, {0.5f, 1.0f}}) {
          SCOPED_TRACE(testing::Message() << op_a << op_b << " " << m << " x " << n << " x " << k << ", " << alpha);
          Product<bfloat16, float> p = {m, n, k, op_a, op_b, alpha, beta};
          const std::vector<double> expected = p.expected();
          if (beta == 0)  // what is there before does not count
            for (int64_t i = 0; i < m; i++) std::fill_n(p.c.begin() + i * p.ldc, n, std::nanf(""));
          const GemmBlock block = {m, n, k, p.lda, p.ldb, p.ldc, alpha, op_a, op_b, beta != 0};
          for (int by_amx = 0; by_amx <= int(has_amx()); by_amx++) {
            std::vector<float> y = p.c;
            bf16_panels::multiply(block, p.a.data(), p.b.data(), y.data(), /*matmul=*/0, by_amx != 0);
            EXPECT_LE(relative_error(y, expected), of_fp32) << "by AMX: " << by_amx;
          }
        }
}

// Blocks of one matmul share what is packed of an operand, 512 of k at a time, up to 3,072 in all; the next matmul uses
// none of it, also at the same addresses.
TEST(Gemm, PacksOperandsForBlocksOfOneMatmulOnly) {
  const OneThread alone;  // which has all blocks
  for (char op_a : {'N', 'T'})
    for (char op_b : {'N', 'T'})
      for (auto [m, n, k] : {std::tuple(530, 20, 545), {20, 800, 545}, {600, 400, 33}, {530, 20, 3100}}) {
        SCOPED_TRACE(testing::Message() << op_a << op_b << " " << m << " x " << n << " x " << k);
        Product<bfloat16, float> p = {m, n, k, op_a, op_b, 1.0f, 0.0f};
        EXPECT_LE(relative_error(p.computed(), p.expected()), of_fp32);
        for (auto& x : p.a) x = bfloat16(-float(x));
        EXPECT_LE(relative_error(p.computed(), p.expected()), of_fp32) << "other values";
        for (auto& x : p.b) x = bfloat16(0.5f * float(x));
        EXPECT_LE(relative_error(p.computed(), p.expected()), of_fp32) << "other values";
      }
}

// A matmul of another type, whose blocks go elsewhere, uses none of it either.
TEST(Gemm, PacksOperandsForNoMatmulOfAnotherType) {
  const OneThread alone;
  Product<bfloat16, float> p = {40, 64, 33, 'T', 'N', 1.0f, 0.0f};
  std::vector<float> first(p.c.size()), second(p.c.size());
  const auto multiply = [&](const auto& store) {
    gemm_and_store(p.op_a, p.op_b, p.m, p.n, p.k, p.a.data(), p.lda, p.b.data(), p.ldb, store);
  };
  multiply([&](int64_t row, int64_t column, const float* sums, int64_t count) {
    std::copy_n(sums, count, first.begin() + row * p.ldc + column);
  });
  for (auto& x : p.b) x = bfloat16(-float(x));
  multiply([&](int64_t row, int64_t column, const float* sums, int64_t count) {
    std::copy_n(sums, count, second.begin() + row * p.ldc + column);
  });
  for (size_t i = 0; i < first.size(); i++) EXPECT_EQ(second[i], -first[i]) << i;
}

// Rows and columns that pad a tile are zero, not what lies beside the matrix, be it NaN.
TEST(Gemm, TilesReadNothingBesideTheirMatrices) {
  if (!has_bf16_matmuls()) GTEST_SKIP() << "this CPU has no matmuls of bf16";
  for (char op_a : {'N', 'T'})
    for (char op_b : {'N', 'T'})
      for (auto [m, n, k] : {std::tuple(19, 35, 37), {24, 35, 37}}) {
        Product<bfloat16, float> p = {m, n, k, op_a, op_b, 1.0f, 0.0f};
        auto spoil = [](std::vector<bfloat16>& x, int64_t columns, int64_t ld) {
          for (size_t i = 0; i < x.size(); i++)
            if (int64_t(i) % ld >= columns) x[i] = bfloat16(std::nanf(""));
        };
        const std::vector<double> expected = p.expected();
        spoil(p.a, op_a == 'N' ? p.k : p.m, p.lda), spoil(p.b, op_b == 'N' ? p.n : p.k, p.ldb);
        EXPECT_LE(relative_error(p.computed(), expected), of_fp32) << op_a << op_b;
      }
}
#endif

// By fp32 the sum over k is cut into parts, and a copy of an operand in one part serves the blocks of its matmul alone.
TEST(Gemm, ConvertsBf16ToMultiplyIt) {
  for (int64_t k : {500, 2500}) {
    Product<bfloat16, float> p = {3, 5, k, 'N', 'T', 1.0f, 0.0f}, other = {3, 5, k, 'N', 'T', 0.5f, 0.0f};
    const auto expect_product = [](const Product<bfloat16, float>& of, uint64_t matmul) {
      std::vector<float> c = of.c;
      multiply_as_floats({of.m, of.n, of.k, of.lda, of.ldb, of.ldc, of.alpha, of.op_a, of.op_b, false}, of.a.data(),
                         of.b.data(), c.data(), matmul);
      EXPECT_LE(relative_error(c, of.expected()), of_fp32) << of.k << ", " << matmul;
    };
    for (uint64_t matmul : {7, 8, 0, 0}) {
      for (auto& x : p.a) x = bfloat16(-2.0f * float(x));
      for (auto& x : p.b) x = bfloat16(2.0f * float(x));
      expect_product(p, matmul);
      expect_product(other, matmul);
      expect_product(other, matmul);
      expect_product(p, matmul);
    }
  }
}

// Columns of 600 floats, and rows that are 4 KB apart, are copied before they are multiplied, a part of the sum at a
// time.
TEST(Gemm, MultipliesFloatsBlockByBlock) {
  for (char op_a : {'N', 'T'})
    for (char op_b : {'N', 'T'})
      for (auto [m, n, k] : {std::tuple(530, 70, 1050), {300, 800, 33}, {70, 1019, 530}}) {
        const Product<float, float> p = {m, n, k, op_a, op_b, 0.5f, op_a == 'N' ? 0.0f : 1.0f};
        EXPECT_LE(relative_error(p.computed(), p.expected()), of_fp32)
            << op_a << op_b << " " << m << " x " << n << " x " << k;
      }
}

// What is drawn for a text must not depend on how many others are sampled beside it.
TEST(FewRows, HaveTheBitsThatEachHasAlone) {
  for (auto [C, OC] : {std::pair<int64_t, int64_t>(768, 64), {200, 33}, {17, 5}}) {
    const std::vector<floatX> inp = random_values<floatX>(most_few_rows * C, 1),
                              weight = random_values<floatX>(OC * C, 2);
    const std::vector<floatX> bias = random_values<floatX>(OC, 3);
    std::vector<floatX> all(size_t(most_few_rows * OC)), one(static_cast<size_t>(OC));
    matmul_forward(all.data(), inp.data(), weight.data(), bias.data(), most_few_rows, C, OC);
    for (int64_t n = 0; n < most_few_rows; n++) {
      matmul_forward(one.data(), inp.data() + n * C, weight.data(), bias.data(), 1, C, OC);
      EXPECT_TRUE(same_bits(one, {all.begin() + n * OC, all.begin() + (n + 1) * OC})) << C << " channels, row " << n;
      std::vector<double> expected;
      for (int64_t o = 0; o < OC; o++) {
        expected.push_back(real(bias[o]));
        for (int64_t i = 0; i < C; i++) expected.back() += real(inp[n * C + i]) * real(weight[o * C + i]);
      }
      EXPECT_LE(relative_error(one, expected), has_master_weights ? 4e-3 : 1e-6);
    }
  }
}

TEST(Gemm, HasTheSameBitsForAnyNumberOfThreads) {
  const int all = omp_get_max_threads();
  for (char op_a : {'N', 'T'})
    for (auto [m, n, k] : {std::tuple(400, 500, 300), {64, 48, 20000}, {1000, 40, 700}, {530, 900, 600}}) {
      const Product<floatX, float> p = {m, n, k, op_a, 'N', 1.0f, 1.0f};
      std::vector<std::vector<float>> results;
      for (int threads : {1, 2, 3, 7}) {
        omp_set_num_threads(threads);
        results.push_back(p.computed());
        EXPECT_TRUE(same_bits(results.back(), results[0]))
            << threads << " threads, " << op_a << " " << m << " x " << n << " x " << k;
      }
    }
  omp_set_num_threads(all);
}
#endif

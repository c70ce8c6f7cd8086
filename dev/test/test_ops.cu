// Each operation but attention alone, against its formula in double, on the device that this is compiled for: the CPU,
// the emulated GPU or a real one. Inputs are rounded to floatX first, so that what is compared is the operation's
// arithmetic alone; outputs are NaN before, so that a missing write shows.
#include <gtest/gtest.h>         // TEST
#include <algorithm>             // std::copy_n, std::max
#include <cmath>                 // exp, log, sqrt, tanh
#include <filesystem>            // std::filesystem::directory_iterator
#include <cstring>               // memcpy
#include <limits>                // std::numeric_limits
#include <thread>                // std::thread
#include <tuple>                 // std::tuple
#include <utility>               // std::pair
#include <vector>                // std::vector
#include "dev/test/files.h"      // TemporaryFolder, write_file
#include "dev/test/values.h"     // random_values, nans, relative_error, same_bits
#include "llmc/adamw.h"          // ParameterChunk, parameter_chunk_size
#include "llmc/device_memory.h"  // DeviceArray
#include "llmc/operations.h"     // what is tested
#include "llmc/precision.h"      // floatX, has_master_weights

// The tolerances, relative to the results' 2-norm. Rounding to bf16 costs at most 2^-8 of a value, 1.7e-3 in the mean
// square; sums are in fp32 whatever floatX is.
constexpr double one_rounding = has_master_weights ? 2e-3 : 1e-6, two_roundings = 2 * one_rounding, of_fp32 = 1e-6;

template <class T>
static std::vector<double> doubles(const std::vector<T>& x) {
  std::vector<double> y;
  for (const T& v : x) y.push_back(real(v));
  return y;
}

// The results of `op`, a std::tuple of vectors on the host. The emulated GPU runs it under several orders of its
// threads and blocks, and the bits must be the same: a missing barrier, or a sum whose order varies, changes them.
template <class Op>
static auto in_any_order(Op op, int orders = 8) {
  const auto results = op();
#ifdef SLA_EMU
  for (int seed = 2; seed <= orders; seed++) {
    emu::set_seed(uint64_t(seed));
    const auto others = op();
    const bool same = std::apply(
        [&](const auto&... a) {
          return std::apply([&](const auto&... b) { return (same_bits(a, b) && ...); }, others);
        },
        results);
    EXPECT_TRUE(same) << "other bits in the order of seed " << seed;
  }
#else
  (void)orders;
#endif
  return results;
}

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

static int num_threads_of_process() {
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
    matmul_gelu_forward(a.data(), b.data(), c.data(), d.data(), e.data(), N, C, OC);
    matmul_gelu_backward(a.data(), x.data(), y.data(), d.data(), e.data(), f.data(), b.data(), N, C, OC);
    layernorm_forward(a.data(), x.data(), y.data(), d.data(), e.data(), nullptr, N, C, 1e-5f);
    residual_layernorm_forward(f.data(), a.data(), x.data(), y.data(), d.data(), e.data(), e.data(), nullptr, N, C,
                               1e-5f);
    layernorm_backward(a.data(), x.data(), y.data(), d.data(), e.data(), z.data(), z.data(), f.data(), scratch.data(),
                       N, C);
    embedding_forward(a.data(), tokens.data(), b.data(), c.data(), 2, N / 2, C, 0);
    embedding_backward(x.data(), y.data(), c.data(), tokens.data(), 2, N / 2, C);
    classifier(x.data(), logits.data(), tokens.data(), N, V, V, 0.1f, true);
    sum_of_squares(&sum, x.data(), chunks.data(), int64_t(chunks.size()));
    const StepStats stats = {1, 1};
    adamw_update(a.data(), w.data(), x.data(), y.data(), z.data(), chunks.data(), int64_t(chunks.size()), {}, &stats);
    copy_rows(a.data(), C, b.data(), C, N, C);
    device_memset(a.data(), 0, a.size() * sizeof(floatX));
    EXPECT_EQ(num_threads_of_process(), before);

    std::vector<floatX> p(large, floatX(0.5f)), q(large), r(large);
    gelu_forward(q.data(), p.data(), large);
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

static float float_of_bits(uint32_t bits) {
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
      gemm(op_a, op_b, m, n, k, alpha, a.data(), lda, b.data(), ldb, beta, y.data(), ldc);
    else gemm(op_a, op_b, m, n, k, a.data(), lda, b.data(), ldb, beta != 0, y.data(), ldc);
    return y;
  }
};

// Each shape as one block and as several, and with every kind of operand.
TEST(Gemm, MultipliesBf16ToBothTypes) {
  for (char op_a : {'N', 'T'})
    for (char op_b : {'N', 'T'})
      for (auto [m, n, k, alpha, beta] :
           {std::tuple(37, 21, 19, 1.0f, 0.0f), {1, 65, 33, 0.25f, 0.0f}, {290, 210, 40, 1.0f, 1.0f}}) {
        SCOPED_TRACE(testing::Message() << op_a << op_b << " " << m << " x " << n << " x " << k);
        const Product<bfloat16, float> p = {m, n, k, op_a, op_b, alpha, beta};
        EXPECT_LE(relative_error(p.computed(), p.expected()), of_fp32);
        std::vector<float> as_floats = p.c;
        multiply_as_floats({m, n, k, p.lda, p.ldb, p.ldc, alpha, op_a, op_b, beta != 0}, p.a.data(), p.b.data(),
                           as_floats.data());
        EXPECT_LE(relative_error(as_floats, p.expected()), of_fp32) << "as floats";
        const Product<bfloat16, bfloat16> rounded = {m, n, k, op_a, op_b, 1.0f, beta};
        EXPECT_LE(relative_error(rounded.computed(), rounded.expected()), 2e-3);
      }
}

// The sum over k is cut into parts only where oneDNN has no matmul of bf16.
TEST(Gemm, AddsUpAllPartsOfALongSum) {
  const Product<bfloat16, float> p = {3, 5, 2500, 'N', 'T', 1.0f, 0.0f};
  std::vector<float> as_floats = p.c;
  multiply_as_floats({p.m, p.n, p.k, p.lda, p.ldb, p.ldc, 1.0f, 'N', 'T', false}, p.a.data(), p.b.data(),
                     as_floats.data());
  EXPECT_LE(relative_error(as_floats, p.expected()), of_fp32);
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
  for (auto [m, n, k] : {std::tuple(400, 500, 300), {64, 48, 20000}, {1000, 40, 700}}) {
    const Product<floatX, float> p = {m, n, k, 'T', 'N', 1.0f, 1.0f};
    std::vector<std::vector<float>> results;
    for (int threads : {1, 2, 3, 7}) {
      omp_set_num_threads(threads);
      results.push_back(p.computed());
      EXPECT_TRUE(same_bits(results.back(), results[0])) << threads << " threads, " << m << " x " << n << " x " << k;
    }
  }
  omp_set_num_threads(all);
}
#endif

// ----------------------------------------------------------------------------
// Matmul

static double gelu_of(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
static double gelu_slope(double x) {
  const double k = std::sqrt(2 / M_PI), t = std::tanh(k * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x);
}

// A linear layer with random values, and what it computes in double.
struct Linear {
  int64_t N, C, OC;
  std::vector<floatX> inp = random_values<floatX>(N * C, 1), weight = random_values<floatX>(OC * C, 2);
  std::vector<floatX> bias = random_values<floatX>(OC, 3), dout = random_values<floatX>(N * OC, 4);
  std::vector<float> dweight = random_values<float>(OC * C, 5), dbias = random_values<float>(OC, 6);  // before the
                                                                                                      // gradients are
                                                                                                      // added

  DeviceArray<floatX> d_inp{inp}, d_weight{weight}, d_bias{bias}, d_dout{dout};

  std::vector<double> out(bool with_bias) const {
    std::vector<double> y;
    for (int64_t n = 0; n < N; n++)
      for (int64_t o = 0; o < OC; o++) {
        double sum = with_bias ? real(bias[o]) : 0;
        for (int64_t i = 0; i < C; i++) sum += real(inp[n * C + i]) * real(weight[o * C + i]);
        y.push_back(sum);
      }
    return y;
  }
  struct Gradients {
    std::vector<double> dinp, dweight, dbias;
  };
  Gradients gradients() const {
    Gradients g = {std::vector<double>(size_t(N * C)), doubles(dweight), doubles(dbias)};
    for (int64_t n = 0; n < N; n++)
      for (int64_t o = 0; o < OC; o++) {
        const double d = real(dout[n * OC + o]);
        g.dbias[o] += d;
        for (int64_t i = 0; i < C; i++) {
          g.dinp[n * C + i] += d * real(weight[o * C + i]);
          g.dweight[o * C + i] += d * real(inp[n * C + i]);
        }
      }
    return g;
  }
};

// Calls f(fused) for GELU as an operation of its own and in the matmul's epilogue, and f() on the CPU, where there is
// no such choice.
template <class F>
static void fused_and_not(F f) {
#ifndef SLA_CPU
  f(false);
  if (has_master_weights) f(true);
#else
  f();
#endif
}

TEST(Matmul, ForwardIsInpTimesWeightTransposedPlusBias) {
  const Linear l = {37, 24, 40};
  for (bool with_bias : {false, true}) {
    const auto [out] = in_any_order([&] {
      DeviceArray<floatX> out(nans<floatX>(l.N * l.OC));
      matmul_forward(out.data, l.d_inp.data, l.d_weight.data, with_bias ? l.d_bias.data : nullptr, l.N, l.C, l.OC);
      return std::make_tuple(out.to_host());
    });
    EXPECT_LE(relative_error(out, l.out(with_bias)), one_rounding);
  }
}

TEST(Matmul, WithGeluGivesItsInputToo) {
  const Linear l = {37, 24, 40};
  fused_and_not([&](auto... fused) {
    for (bool with_bias : {false, true}) {
      const auto [out, pre_gelu] = in_any_order([&] {
        DeviceArray<floatX> out(nans<floatX>(l.N * l.OC)), pre_gelu(nans<floatX>(l.N * l.OC));
        matmul_gelu_forward(out.data, pre_gelu.data, l.d_inp.data, l.d_weight.data, with_bias ? l.d_bias.data : nullptr,
                            l.N, l.C, l.OC, fused...);
        return std::make_tuple(out.to_host(), pre_gelu.to_host());
      });
      std::vector<double> expected = l.out(with_bias);
      EXPECT_LE(relative_error(pre_gelu, expected), one_rounding);
      for (double& x : expected) x = gelu_of(x);
      EXPECT_LE(relative_error(out, expected), two_roundings);
    }
  });
}

#ifdef SLA_EMU
// The emulated heuristic refuses an epilogue whose pointers it is not told, and chooses for their alignment.
TEST(Matmul, ChoosesAnAlgorithmForTheAlignmentOfBiasAndGelu) {
  const Linear l = {8, 16, 24};
  const int64_t offset = 16 / int64_t(sizeof(floatX));  // the second pass: 16 bytes further, which are 16-byte aligned
                                                        // alone
  for (int64_t at : {int64_t(0), offset}) {
    std::vector<floatX> values(size_t(at), floatX(0.0f));
    values.insert(values.end(), l.bias.begin(), l.bias.end());
    const DeviceArray<floatX> bias(values), out(nans<floatX>(l.N * l.OC)), pre_gelu(nans<floatX>(at + l.N * l.OC));
    matmul_forward(out.data, l.d_inp.data, l.d_weight.data, bias.data + at, l.N, l.C, l.OC);
    EXPECT_LE(relative_error(out.to_host(), l.out(true)), one_rounding);
    matmul_gelu_forward(out.data, pre_gelu.data + at, l.d_inp.data, l.d_weight.data, l.d_bias.data, l.N, l.C, l.OC,
                        /*fused=*/true);
    std::vector<double> expected = l.out(true);
    for (double& x : expected) x = gelu_of(x);
    EXPECT_LE(relative_error(out.to_host(), expected), two_roundings);
  }
}
#endif

TEST(Matmul, BackwardSetsTheInputsGradientAndAddsToTheWeights) {
  for (const Linear& l : {Linear{37, 24, 136}, Linear{203, 8, 520}}) {  // the second: several blocks of bias_backward
    const auto [dinp, dweight, dbias] = in_any_order([&] {
      DeviceArray<floatX> dinp(nans<floatX>(l.N * l.C));
      DeviceArray<float> dweight(l.dweight), dbias(l.dbias);
      matmul_backward(dinp.data, dweight.data, dbias.data, l.d_dout.data, l.d_inp.data, l.d_weight.data, l.N, l.C,
                      l.OC);
      return std::make_tuple(dinp.to_host(), dweight.to_host(), dbias.to_host());
    });
    const Linear::Gradients expected = l.gradients();
    EXPECT_LE(relative_error(dinp, expected.dinp), one_rounding);
    EXPECT_LE(relative_error(dweight, expected.dweight), of_fp32);
    EXPECT_LE(relative_error(dbias, expected.dbias), of_fp32);
  }
}

TEST(Matmul, BackwardThroughGeluMultipliesWithItsDerivative) {
  const Linear l = {37, 24, 40};
  const std::vector<floatX> pre_gelu = random_values<floatX>(l.N * l.C, 7);
  const DeviceArray<floatX> d_pre_gelu(pre_gelu);
  Linear::Gradients expected = l.gradients();
  for (size_t i = 0; i < pre_gelu.size(); i++) expected.dinp[i] *= gelu_slope(real(pre_gelu[i]));
  fused_and_not([&](auto... fused) {
    const auto [dinp, dweight] = in_any_order([&] {
      DeviceArray<floatX> dinp(nans<floatX>(l.N * l.C));
      DeviceArray<float> dweight(l.dweight);
      matmul_gelu_backward(dinp.data, dweight.data, nullptr, l.d_dout.data, l.d_inp.data, d_pre_gelu.data,
                           l.d_weight.data, l.N, l.C, l.OC, fused...);
      return std::make_tuple(dinp.to_host(), dweight.to_host());
    });
    EXPECT_LE(relative_error(dinp, expected.dinp), two_roundings);
    EXPECT_LE(relative_error(dweight, expected.dweight), of_fp32);
  });
}

// Rows beside and on the 8 warps and 64 rows of a block; columns beside and on a block's 256.
TEST(Matmul, BiasGradientIsTheSumOfRows) {
  std::vector<std::pair<int, int>> shapes = {{1403, 264}, {7, 8}, {8, 8}, {9, 8}, {63, 248}, {64, 256}, {65, 264}};
#ifndef SLA_CPU
  shapes.push_back({16385, 8});  // more than 256 blocks of 64 rows
#endif
  for (auto [N, OC] : shapes) {
    SCOPED_TRACE(testing::Message() << N << " x " << OC);
    const std::vector<floatX> dout = random_values<floatX>(int64_t(N) * OC, 1);
    const std::vector<float> dbias = random_values<float>(OC, 2);
    std::vector<double> expected = doubles(dbias);
    for (size_t i = 0; i < dout.size(); i++) expected[i % size_t(OC)] += real(dout[i]);
    const DeviceArray<floatX> d_dout(dout);
    const int64_t rows = N, columns = OC;  // a structured binding cannot be captured
    const auto [result] = in_any_order(
        [&] {
          DeviceArray<float> result(dbias);
          bias_backward(result.data, d_dout.data, rows, columns);
          return std::make_tuple(result.to_host());
        },
        N > 1000 ? 2 : 8);
    EXPECT_LE(relative_error(result, expected), of_fp32);
  }
}

#ifndef SLA_CPU
// As many partial sums as there are blocks have room in the GPU's scratch, and no more.
TEST(RowsOfBlock, AreForAtMostTheBlocksThatHaveRoom) {
  for (int64_t most : {1, 7, 256, 1024})
    for (int64_t least : {16, 64})
      for (int64_t N :
           {int64_t(1), least * most - 1, least * most, least * most + 1, 3 * least * most - 1, 3 * least * most + 1}) {
        const int64_t rows = rows_of_block(N, least, most), blocks = ceil_div(N, rows);
        EXPECT_TRUE(rows >= least && blocks <= most)
            << N << " rows in " << blocks << " of " << rows << ", most " << most;
        EXPECT_TRUE(rows == least || ceil_div(N, rows - 1) > most) << N << " rows: no more in a block than needed";
      }
}

// Rows beside and on the 32 warps of a block, columns beside and on its 32, NaN between the rows; of one range of
// columns, and of two.
TEST(ColumnSums, AreThoseOfAllRowsAndColumns) {
  for (auto [rows, columns] :
       {std::pair(1, 1), std::pair(31, 31), std::pair(32, 32), std::pair(33, 33), std::pair(257, 65)}) {
    SCOPED_TRACE(testing::Message() << rows << " x " << columns);
    for (int64_t ranges : {1, 2}) {
      const int64_t R = rows, C = columns, width = ranges * C, stride = width + 5;
      const auto values = random_values<float>(R * width, 1), dst = random_values<float>(2 * C, 2);
      std::vector<float> partial = nans<float>(R * stride);
      std::vector<double> expected = doubles(dst);
      for (int64_t i = 0; i < R * width; i++)
        partial[i / width * stride + i % width] = values[i], expected[i % width] += real(values[i]);
      const DeviceArray<float> d_partial(partial);
      const auto [result] = in_any_order(
          [&] {
            DeviceArray<float> result(dst);
            add_column_sums(result.data, ranges == 2 ? result.data + C : nullptr, d_partial.data, R, stride, C);
            return std::make_tuple(result.to_host());
          },
          3);
      EXPECT_LE(relative_error(result, expected), of_fp32);
    }
  }
}
#endif

// ----------------------------------------------------------------------------
// LayerNorm

struct RowsAndChannels {
  int64_t N, C;
};
// One lane's channels; several lanes'; GPT-2's; a row that ends within a warp; the most for which a block has two rows
// in flight, and one lane more; nearly as many as there may be, and as many. Rows beside and on multiples of the 16 and
// 64 that a block has.
static const RowsAndChannels layernorm_shapes[] = {{131, 8},   {127, 8},  {128, 16}, {129, 24},  {37, 40}, {35, 768},
                                                   {18, 1288}, {3, 5120}, {3, 5128}, {17, 8184}, {2, 8192}};

struct LayerNormValues {
  std::vector<double> out, mean, rstd, dinp, dweight, dbias;
};
static LayerNormValues layernorm_in_double(const std::vector<floatX>& inp, const std::vector<floatX>& weight,
                                           const std::vector<floatX>* bias, const std::vector<floatX>& dout,
                                           const RowsAndChannels& s) {
  const int64_t N = s.N, C = s.C;
  LayerNormValues v;
  v.out.resize(N * C), v.dinp.resize(N * C), v.dweight.resize(C), v.dbias.resize(C);
  for (int64_t n = 0; n < N; n++) {
    double mean = 0, var = 0, g_mean = 0, gx_mean = 0;
    for (int64_t i = 0; i < C; i++) mean += real(inp[n * C + i]) / C;
    for (int64_t i = 0; i < C; i++) var += std::pow(real(inp[n * C + i]) - mean, 2) / C;
    const double rstd = 1 / std::sqrt(var + 1e-5);
    std::vector<double> xhat(C), g(C);
    for (int64_t i = 0; i < C; i++) {
      const double d = real(dout[n * C + i]), w = real(weight[i]);
      xhat[i] = (real(inp[n * C + i]) - mean) * rstd;
      v.out[n * C + i] = xhat[i] * w + (bias != nullptr ? real((*bias)[i]) : 0);
      g[i] = d * w;
      g_mean += g[i] / C, gx_mean += g[i] * xhat[i] / C;
      v.dweight[i] += d * xhat[i];
      v.dbias[i] += d;
    }
    for (int64_t i = 0; i < C; i++) v.dinp[n * C + i] = rstd * (g[i] - g_mean - xhat[i] * gx_mean);
    v.mean.push_back(mean), v.rstd.push_back(rstd);
  }
  return v;
}

// BUG (build/bf16/test_ops_emu) llmc/cuda/layernorm.h: `x[j] = rounded(x[j] + y[j])` -> `x[j] = x[j] + y[j]`
TEST(LayerNorm, OfASumIsThatOfTheStoredSum) {
  for (const RowsAndChannels& s : layernorm_shapes) {
    SCOPED_TRACE(testing::Message() << s.N << " x " << s.C);
    const int64_t N = s.N, C = s.C;
    const auto a = random_values<floatX>(N * C, 1, 3), b = random_values<floatX>(N * C, 2);
    const auto weight = random_values<floatX>(C, 3), bias = random_values<floatX>(C, 4);
    const DeviceArray<floatX> d_a(a), d_b(b), d_weight(weight), d_bias(bias);
    for (bool with_bias : {false, true}) {
      const floatX* bias_pointer = with_bias ? d_bias.data : nullptr;
      const auto [residual, out, mean, rstd] = in_any_order(
          [&] {
            DeviceArray<floatX> residual(nans<floatX>(N * C)), out(nans<floatX>(N * C));
            DeviceArray<float> mean(nans<float>(N)), rstd(nans<float>(N));
            residual_layernorm_forward(residual.data, out.data, mean.data, rstd.data, d_a.data, d_b.data, d_weight.data,
                                       bias_pointer, N, C, 1e-5f);
            return std::make_tuple(residual.to_host(), out.to_host(), mean.to_host(), rstd.to_host());
          },
          2);
      for (size_t i = 0; i < a.size(); i++)
        ASSERT_EQ(float(residual[i]), float(floatX(float(a[i]) + float(b[i])))) << i;
      const LayerNormValues expected = layernorm_in_double(residual, weight, with_bias ? &bias : nullptr, residual, s);
      EXPECT_LE(relative_error(out, expected.out), one_rounding);
      EXPECT_LE(relative_error(mean, expected.mean), of_fp32);
      EXPECT_LE(relative_error(rstd, expected.rstd), of_fp32);

      const DeviceArray<floatX> d_residual(residual), again(nans<floatX>(N * C));
      const DeviceArray<float> mean_again(nans<float>(N)), rstd_again(nans<float>(N));
      layernorm_forward(again.data, mean_again.data, rstd_again.data, d_residual.data, d_weight.data, bias_pointer, N,
                        C, 1e-5f);
      EXPECT_TRUE(same_bits(again.to_host(), out)) << "computed again from the residual stream";
      EXPECT_TRUE(same_bits(mean_again.to_host(), mean) && same_bits(rstd_again.to_host(), rstd));
    }
  }
}

// BUG (build/fp32/test_ops_emu) llmc/cuda/layernorm.h: `fmaf(x[j] - m, x[j] - m, squares)` -> `fmaf(x[j], x[j] - m,
// squares)`
TEST(LayerNorm, KeepsItsDigitsWhereTheMeanIsLarge) {
  const int64_t N = 5, C = 256;
  std::vector<floatX> inp = random_values<floatX>(N * C, 1), one(size_t(C), floatX(1.0f));
  for (floatX& x : inp) x = floatX(float(x) + 1000.0f);
  const LayerNormValues expected = layernorm_in_double(inp, one, nullptr, inp, {N, C});
  const DeviceArray<floatX> d_inp(inp), d_one(one), out(nans<floatX>(N * C));
  const DeviceArray<float> mean(nans<float>(N)), rstd(nans<float>(N));
  layernorm_forward(out.data, mean.data, rstd.data, d_inp.data, d_one.data, nullptr, N, C, 1e-5f);
  EXPECT_LE(relative_error(out.to_host(), expected.out), std::max(one_rounding, 1e-4));  // 1000's last place is 6e-5
  EXPECT_LE(relative_error(rstd.to_host(), expected.rstd), of_fp32);
}

TEST(LayerNorm, BackwardAddsTheFormulasGradients) {
  std::vector<RowsAndChannels> shapes(std::begin(layernorm_shapes), std::end(layernorm_shapes));
  shapes.push_back({2003, 8});  // on the emulated GPU more than 16 rows a block
  for (const RowsAndChannels& s : shapes) {
    SCOPED_TRACE(testing::Message() << s.N << " x " << s.C);
    const int64_t N = s.N, C = s.C;
    const auto inp = random_values<floatX>(N * C, 1, 3), weight = random_values<floatX>(C, 2);
    const auto dout = random_values<floatX>(N * C, 3), dinp = random_values<floatX>(N * C, 4);
    const auto dweight = random_values<float>(C, 5), dbias = random_values<float>(C, 6);
    LayerNormValues expected = layernorm_in_double(inp, weight, nullptr, dout, s);
    for (size_t i = 0; i < dinp.size(); i++) expected.dinp[i] += real(dinp[i]);
    for (size_t i = 0; i < size_t(C); i++)
      expected.dweight[i] += double(dweight[i]), expected.dbias[i] += double(dbias[i]);

    const DeviceArray<floatX> d_inp(inp), d_weight(weight), d_dout(dout);
    const DeviceArray<float> mean(std::vector<float>(expected.mean.begin(), expected.mean.end()));
    const DeviceArray<float> rstd(std::vector<float>(expected.rstd.begin(), expected.rstd.end()));
    for (bool with_bias : {true, false}) {
      if (!with_bias && N * C > 10000) continue;
      const auto [dinp_result, dweight_result, dbias_result] = in_any_order(
          [&] {
            DeviceArray<floatX> d_dinp(dinp);
            DeviceArray<float> d_dweight(dweight), d_dbias(dbias),
                scratch(nans<float>(layernorm_backward_scratch(N, C)));
            layernorm_backward(d_dinp.data, d_dweight.data, with_bias ? d_dbias.data : nullptr, d_dout.data, d_inp.data,
                               mean.data, rstd.data, d_weight.data, scratch.data, N, C);
            return std::make_tuple(d_dinp.to_host(), d_dweight.to_host(), d_dbias.to_host());
          },
          N * C > 20000   ? 2
          : N * C > 10000 ? 1
                          : 8);
      EXPECT_LE(relative_error(dinp_result, expected.dinp), one_rounding);
      EXPECT_LE(relative_error(dweight_result, expected.dweight), of_fp32);
      EXPECT_LE(relative_error(dbias_result, with_bias ? expected.dbias : doubles(dbias)), of_fp32);
    }
  }
}

#ifndef SLA_CPU
// A thread of the kernel may use 65,536 / 640 registers, so that 640 threads fit on a multiprocessor, or the 1,024 of a
// wide row's block.
TEST(LayerNorm, BackwardRunsAllItsBlocksAtOnce) {
  const RowsAndChannels shapes[] = {{16384, 768}, {32768, 1024}, {16384, 1280}, {16384, 1600},
                                    {8192, 5120}, {8192, 8192},  {40, 768}};
  for (int64_t multiprocessors : {1, 6, 108, 132})
    for (const RowsAndChannels& s : shapes) {
      SCOPED_TRACE(testing::Message() << s.N << " x " << s.C << " on " << multiprocessors);
      const int64_t rows = layernorm_backward_rows(s.N, s.C, multiprocessors), blocks = ceil_div(s.N, rows);
      const int64_t threads = ceil_div(s.C, 256) * 32, at_once = multiprocessors * std::max<int64_t>(1, 640 / threads);
      EXPECT_LE(blocks, at_once);
      EXPECT_GE(rows, 16);
      EXPECT_LE(blocks * 2 * s.C * int64_t(sizeof(float)), int64_t(Gpu::scratch_bytes));
      const int64_t with_fewer = rows > 16 ? ceil_div(s.N, rows - 1) : blocks;
      EXPECT_TRUE(rows == 16 || with_fewer > at_once || with_fewer * 8 * s.C > int64_t(Gpu::scratch_bytes))
          << "no more rows than needed";
    }
}
#endif

#ifdef SLA_EMU
TEST(LayerNorm, BackwardIsTwoKernels) {
  const int64_t N = 40, C = 64;
  const DeviceArray<floatX> x(random_values<floatX>(N * C, 1)), dinp(random_values<floatX>(N * C, 2)),
      weight(random_values<floatX>(C, 3));
  const DeviceArray<float> statistics(random_values<float>(N, 4)), dweight(random_values<float>(C, 5)),
      dbias(random_values<float>(C, 6));
  for (float* bias : {dbias.data, static_cast<float*>(nullptr)}) {
    const uint64_t before = emu::counters().launches;
    layernorm_backward(dinp.data, dweight.data, bias, x.data, x.data, statistics.data, statistics.data, weight.data,
                       nullptr, N, C);
    EXPECT_EQ(emu::counters().launches, before + 2);
  }
}
#endif

// ----------------------------------------------------------------------------
// GELU

TEST(Gelu, AndItsDerivativeAreTheTanhForm) {
  std::vector<floatX> x, d;
  for (float v = -12; v < 12; v += 0.01f) x.push_back(floatX(v)), d.push_back(floatX(1.5f));
  for (float v : {0.0f, 1e4f, 1e9f, 1e15f, 3e38f}) x.push_back(floatX(v)), x.push_back(floatX(-v));
  while (x.size() % 8 != 0) x.push_back(floatX(0.5f));
  d.resize(x.size(), floatX(1.5f));

  const DeviceArray<floatX> d_x(x);
  const auto [y, slope] = in_any_order([&] {
    DeviceArray<floatX> y(nans<floatX>(int64_t(x.size()))), slope(d);
    gelu_forward(y.data, d_x.data, int64_t(x.size()));
    gelu_backward(slope.data, d_x.data, int64_t(x.size()));
    return std::make_tuple(y.to_host(), slope.to_host());
  });
  for (size_t i = 0; i < x.size(); i++) {
    const double v = real(x[i]);
    const bool huge = std::abs(v) > 1e3;  // where gelu_slope's own squares overflow
    const double e_y = gelu_of(v), e_slope = 1.5 * (huge ? double(v > 0) : gelu_slope(v));
    EXPECT_NEAR(real(y[i]), e_y, 2 * one_rounding * std::max(1.0, std::abs(e_y))) << v;
    EXPECT_NEAR(real(slope[i]), e_slope, 3 * one_rounding) << v;
  }
}

// Elements beside and on the 2,048 of a block.
TEST(Gelu, IsThatOfEveryElement) {
  for (int64_t n : {2040, 2048, 2056}) {
    SCOPED_TRACE(n);
    const auto x = random_values<floatX>(n, 1), d = random_values<floatX>(n, 2);
    const DeviceArray<floatX> d_x(x), y(nans<floatX>(n)), slope(d);
    gelu_forward(y.data, d_x.data, n);
    gelu_backward(slope.data, d_x.data, n);
    std::vector<double> e_y, e_slope;
    for (int64_t i = 0; i < n; i++)
      e_y.push_back(gelu_of(real(x[i]))), e_slope.push_back(real(d[i]) * gelu_slope(real(x[i])));
    EXPECT_LE(relative_error(y.to_host(), e_y), one_rounding);
    EXPECT_LE(relative_error(slope.to_host(), e_slope), one_rounding);
  }
}

TEST(Gelu, LetsNaNThrough) {
  const std::vector<floatX> ones(8, floatX(1.0f));
  const DeviceArray<floatX> x(nans<floatX>(8)), y(ones), d(ones);
  gelu_forward(y.data, x.data, 8);
  gelu_backward(d.data, x.data, 8);
  EXPECT_TRUE(std::isnan(float(y.to_host()[0])));
  EXPECT_TRUE(std::isnan(float(d.to_host()[0])));
}

// ----------------------------------------------------------------------------
// Classifier

TEST(Classifier, GivesCrossEntropyAndItsGradientForHugeLogits) {
  // Less than a group of eight; whole groups and a part of one; beside and on a warp's 256; more than a warp; beside
  // and on the 8,192 of a block; more than a group per thread.
  for (int64_t V : {3, 37, 255, 256, 257, 5003, 8191, 8192, 8193, 20011})
    for (auto [scale, shift] : {std::pair(1.0, 0.0), std::pair(1e4, 0.0), std::pair(1.0, -3e4)}) {
      if (std::abs(V - 8192) <= 1 && (scale > 1 || shift < 0)) continue;
      SCOPED_TRACE(testing::Message() << V << " columns, logits of " << scale << " around " << shift);
      const int64_t rows = 5, ld = (V + 63) / 64 * 64;
      const float dloss = 0.25f;
      const int last = int(V - 1), targets[] = {0, last, 2, 2, last / 2};
      std::vector<floatX> logits = random_values<floatX>(rows * ld, 1, scale);
      for (floatX& x : logits) x = floatX(float(real(x) + shift));
      std::vector<double> e_losses, e_gradient;
      for (int64_t n = 0; n < rows; n++) {
        for (int64_t i = V; i < ld; i++) logits[n * ld + i] = nans<floatX>(1)[0];
        auto logit = [&](int64_t i) { return real(logits[n * ld + i]); };
        double max = logit(0), sum = 0;
        for (int64_t i = 0; i < V; i++) max = std::max(max, logit(i));
        for (int64_t i = 0; i < V; i++) sum += std::exp(logit(i) - max);
        e_losses.push_back(std::log(sum) + max - logit(targets[n]));
        for (int64_t i = 0; i < V; i++)
          e_gradient.push_back(dloss * (std::exp(logit(i) - max) / sum - (i == targets[n])));
      }
      const DeviceArray<int> d_targets(std::vector<int>(targets, targets + rows));
      const auto [losses, result, losses_only, untouched] = in_any_order(
          [&] {
            DeviceArray<floatX> result(logits), untouched(logits);
            DeviceArray<float> losses(nans<float>(rows)), losses_only(nans<float>(rows));
            classifier(losses.data, result.data, d_targets.data, rows, V, ld, dloss, true);
            classifier(losses_only.data, untouched.data, d_targets.data, rows, V, ld, dloss, false);
            return std::make_tuple(losses.to_host(), result.to_host(), losses_only.to_host(), untouched.to_host());
          },
          V > 1000 || scale > 1 || shift < 0 ? 2 : 8);
      EXPECT_TRUE(same_bits(losses, losses_only));
      EXPECT_TRUE(same_bits(untouched, logits)) << "without a gradient the logits are unchanged";
      std::vector<floatX> gradient;
      for (int64_t n = 0; n < rows; n++) {
        gradient.insert(gradient.end(), &result[n * ld], &result[n * ld] + V);
        for (int64_t i = V; i < ld; i++) ASSERT_EQ(float(result[n * ld + i]), 0.0f) << "row " << n << " column " << i;
      }
      EXPECT_LE(relative_error(losses, e_losses), of_fp32);
      EXPECT_LE(relative_error(gradient, e_gradient), has_master_weights ? one_rounding : 2e-6);
    }
}

// ----------------------------------------------------------------------------
// Embedding

// BUG (build/fp32/test_ops_cpu) llmc/cpu/embedding.h: `(first_position + t) * C` -> `t * C`
TEST(Embedding, AddsTokensAndPositionsAndCollectsRepeatedTokens) {
  struct Case {
    int64_t B, T, C, V;
  };
  // Few tokens; positions beyond a round of 1,024, of few tokens, and beside and on the round, of many; channels beside
  // and on the 2,048 that a block's threads own, and the 256 of a warp.
  for (const Case& c : {Case{2, 5, 40, 4}, Case{3, 401, 8, 7}, Case{1, 1023, 8, 5000}, Case{1, 1024, 8, 5000},
                        Case{1, 1025, 8, 5000}, Case{1, 33, 2056, 9}, Case{1, 8, 2048, 3}, Case{1, 7, 2040, 3},
                        Case{1, 9, 264, 3}, Case{1, 8, 256, 3}, Case{1, 7, 248, 3}}) {
    SCOPED_TRACE(testing::Message() << c.B << " x " << c.T << " x " << c.C << " of " << c.V);
    const int64_t N = c.B * c.T, C = c.C, first_position = 2;
    std::vector<int> tokens;
    for (int64_t n = 0; n < N; n++)
      tokens.push_back(int(random_uniform(1, RandomStream::test, 7, uint64_t(n)) * double(c.V)));
    const auto wte = random_values<floatX>(c.V * C, 1), wpe = random_values<floatX>((c.T + first_position) * C, 2);
    const auto dout = random_values<floatX>(N * C, 3);
    const auto dwte = random_values<float>(c.V * C, 4), dwpe = random_values<float>((c.T + first_position) * C, 5);
    std::vector<double> e_out, e_dwte = doubles(dwte), e_dwpe = doubles(dwpe);
    for (int64_t n = 0; n < N; n++)
      for (int64_t i = 0; i < C; i++) {
        e_out.push_back(real(wte[tokens[n] * C + i]) + double(float(wpe[(n % c.T + first_position) * C + i])));
        e_dwte[tokens[n] * C + i] += real(dout[n * C + i]);
        e_dwpe[n % c.T * C + i] += real(dout[n * C + i]);
      }
    const DeviceArray<int> d_tokens(tokens);
    const DeviceArray<floatX> d_wte(wte), d_wpe(wpe), d_dout(dout);
    const auto [out, dwte_result, dwpe_result] = in_any_order(
        [&] {
          DeviceArray<floatX> d_out(nans<floatX>(N * C));
          DeviceArray<float> d_dwte(dwte), d_dwpe(dwpe);
          embedding_forward(d_out.data, d_tokens.data, d_wte.data, d_wpe.data, c.B, c.T, C, first_position);
          embedding_backward(d_dwte.data, d_dwpe.data, d_dout.data, d_tokens.data, c.B, c.T, C);
          return std::make_tuple(d_out.to_host(), d_dwte.to_host(), d_dwpe.to_host());
        },
        N > 1000 ? 2 : 8);
    EXPECT_LE(relative_error(out, e_out), one_rounding);
    EXPECT_LE(relative_error(dwte_result, e_dwte), of_fp32);
    EXPECT_LE(relative_error(dwpe_result, e_dwpe), of_fp32);
  }
}

// BUG (build/fp32/test_ops_cpu) llmc/cpu/classifier.h: `double total = 0;` -> `float total = 0;`
TEST(MeanLoss, IsAddedToTheSumInDouble) {
  for (int64_t n : {1023, 1024, 1025, 3 * 1024 + 5}) {  // beside and on the threads of a block
    std::vector<float> losses(size_t(n), 1.0f);
    losses[7] = 67108864.0f;  // 2^26: a sum in float would lose the ones
    losses[size_t(n) - 1] = 0.5f;
    const DeviceArray<float> d_losses(losses);
    const auto [sum] = in_any_order([&] {
      const DeviceArray<double> d_sum(std::vector<double>{0.25});
      add_losses(d_sum.data, d_losses.data, n, 7.0);
      return std::make_tuple(d_sum.to_host());
    });
    EXPECT_EQ(sum[0], 0.25 + (67108864.0 + double(n - 2) + 0.5) / 7.0) << n;
  }
}

// ----------------------------------------------------------------------------
// Sums of attention maps

// Rows beside and on the 8 and 256 of a block and the 32 of a sum over rows; channels beside and on the 256 of a warp
// and the 64 that a CPU's thread owns. Where C is a multiple of 32, the gradient of the bias is in a block of its own.
static const RowsAndChannels map_shapes[] = {{1, 264}, {7, 248},  {8, 256}, {9, 264}, {31, 56}, {32, 64},
                                             {33, 72}, {33, 264}, {255, 8}, {256, 8}, {257, 8}};

TEST(MapGate, IsTheSigmoidOfALinearLayer) {
  for (const RowsAndChannels& s : map_shapes) {
    SCOPED_TRACE(testing::Message() << s.N << " x " << s.C);
    const int64_t N = s.N, C = s.C;
    const auto x = random_values<floatX>(N * C, 1), weight = random_values<floatX>(C, 2, 1 / std::sqrt(double(C)));
    const auto bias = random_values<floatX>(1, 3);
    const DeviceArray<floatX> d_x(x), d_weight(weight), d_bias(bias);
    for (bool with_bias : {false, true}) {
      std::vector<double> expected;
      for (int64_t n = 0; n < N; n++) {
        double sum = with_bias ? real(bias[0]) : 0;
        for (int64_t i = 0; i < C; i++) sum += real(x[n * C + i]) * real(weight[i]);
        expected.push_back(1 / (1 + std::exp(-sum)));
      }
      const auto [gate] = in_any_order(
          [&] {
            DeviceArray<float> gate(nans<float>(N));
            map_gate_forward(gate.data, d_x.data, d_weight.data, with_bias ? d_bias.data : nullptr, N, C);
            return std::make_tuple(gate.to_host());
          },
          2);
      EXPECT_LE(relative_error(gate, expected), of_fp32);
    }
  }
}

// Numbers between 0 and 1.
static std::vector<float> random_gates(int64_t n, uint32_t tag) {
  std::vector<float> gates = random_values<float>(n, tag);
  for (float& g : gates) g = 1 / (1 + std::exp(-g));
  return gates;
}

TEST(MapGate, BackwardAddsTheFormulasGradients) {
  for (const RowsAndChannels& s : map_shapes) {
    SCOPED_TRACE(testing::Message() << s.N << " x " << s.C);
    const int64_t N = s.N, C = s.C;
    const auto x = random_values<floatX>(N * C, 1), weight = random_values<floatX>(C, 2),
               dx = random_values<floatX>(N * C, 3);
    const auto gate = random_gates(N, 4), dgate = random_values<float>(N, 5);
    const auto dweight = random_values<float>(C, 6), dbias = random_values<float>(1, 7);
    std::vector<double> e_dgate, e_dx = doubles(dx), e_dweight = doubles(dweight), e_dbias = doubles(dbias);
    for (int64_t n = 0; n < N; n++) {
      const double d = real(dgate[n]) * real(gate[n]) * (1 - real(gate[n]));
      e_dgate.push_back(d);
      e_dbias[0] += d;
      for (int64_t i = 0; i < C; i++) e_dx[n * C + i] += d * real(weight[i]), e_dweight[i] += d * real(x[n * C + i]);
    }
    const DeviceArray<floatX> d_x(x), d_weight(weight);
    const DeviceArray<float> d_gate(gate);
    for (bool with_bias : {false, true}) {
      const auto [dx_result, dgate_result, dweight_result, dbias_result] = in_any_order(
          [&] {
            DeviceArray<floatX> d_dx(dx);
            DeviceArray<float> d_dgate(dgate), d_dweight(dweight), d_dbias(dbias);
            map_gate_backward(d_dx.data, d_dweight.data, with_bias ? d_dbias.data : nullptr, d_dgate.data, d_gate.data,
                              d_x.data, d_weight.data, N, C);
            return std::make_tuple(d_dx.to_host(), d_dgate.to_host(), d_dweight.to_host(), d_dbias.to_host());
          },
          3);
      EXPECT_LE(relative_error(dx_result, e_dx), one_rounding);
      EXPECT_LE(relative_error(dgate_result, e_dgate), of_fp32);
      EXPECT_LE(relative_error(dweight_result, e_dweight), of_fp32);
      EXPECT_LE(relative_error(dbias_result, with_bias ? e_dbias : doubles(dbias)), of_fp32);
    }
  }
}

// The gates of layers 0 to `layer`, their rows further apart than there are tokens, with NaN where nothing may be read;
// or `blend`.
struct MixedMaps {
  int64_t N, C, stride = N + 3;
  bool gated;
  int layer;
  std::vector<float> gates = random_gates((layer + 1) * stride, 1);
  DeviceArray<float> d_gates;

  MixedMaps(const RowsAndChannels& s, bool gated, int layer) : N(s.N), C(s.C), gated(gated), layer(layer) {
    for (int m = 0; m <= layer; m++)
      for (int64_t n = m == 0 ? 0 : N; n < stride; n++) gates[m * stride + n] = NAN;
    d_gates = DeviceArray<float>(gates);
  }
  MapWeights weights() const { return {gated ? d_gates.data : nullptr, 0.375f, stride, layer}; }
  // The weights of the maps for a token, by P_l = g_l P_(l-1) + (1 - g_l) S_l. Another gate of one layer: `g` of layer
  // `other`.
  std::vector<double> weights_in_double(int64_t row, int other = 0, double g = 0) const {
    std::vector<double> w = {1};
    for (int m = 1; m <= layer; m++) {
      const double gate = m == other ? g : gated ? real(gates[m * stride + row]) : 0.375;
      for (double& below : w) below *= gate;
      w.push_back(1 - gate);
    }
    return w;
  }
};

// Calls f with each shape, with gates and with `blend`, of one map and of three.
static void for_each_mixed_maps(void (*f)(const MixedMaps&)) {
  for (const RowsAndChannels& s : map_shapes)
    for (bool gated : {true, false})
      for (int layer : {0, 2}) {
        SCOPED_TRACE(testing::Message() << s.N << " x " << s.C << (gated ? ", gates" : ", blend") << ", layer "
                                        << layer);
        f(MixedMaps(s, gated, layer));
      }
}

TEST(MixedMaps, AreTheWeightedSum) {
  for_each_mixed_maps([](const MixedMaps& mix) {
    const int64_t size = mix.N * mix.C;
    const int num_maps = mix.layer + 1;
    std::vector<DeviceArray<floatX>> d_maps;
    std::vector<double> e_sum(static_cast<size_t>(size)), e_out(static_cast<size_t>(size));
    for (int call = 0; call < num_maps; call++) {  // the layer's own map is the first
      const int m = (call + mix.layer) % num_maps;
      const auto map = random_values<floatX>(size, uint32_t(2 + m));
      d_maps.emplace_back(map);
      for (int64_t n = 0; n < mix.N; n++) {
        const double weight = mix.weights_in_double(n)[m];
        for (int64_t i = n * mix.C; i < (n + 1) * mix.C; i++) {
          e_out[i] += weight * real(map[i]);
          if (call < mix.layer) e_sum[i] += weight * real(map[i]);
        }
      }
    }
    const auto [sum, out] = in_any_order(
        [&] {
          const DeviceArray<float> sum(nans<float>(size));
          const DeviceArray<floatX> out(nans<floatX>(size));
          for (int call = 0; call < num_maps; call++)
            mix_map_forward(sum.data, out.data, d_maps[call].data, mix.weights(), (call + mix.layer) % num_maps,
                            call == 0, call == mix.layer, mix.N, mix.C);
          return std::make_tuple(sum.to_host(), out.to_host());
        },
        1);
    EXPECT_LE(relative_error(out, e_out), one_rounding);
    if (mix.layer > 0) EXPECT_LE(relative_error(sum, e_sum), of_fp32);
    else EXPECT_TRUE(same_bits(sum, nans<float>(size))) << "a single map needs no sum";
  });
}

// Element: of the maps' outputs in the backward pass.
template <class Element>
static void check_gradients_of_mixed_maps(const MixedMaps& mix) {
  const int64_t N = mix.N, C = mix.C, stride = mix.stride;
  const int num_maps = mix.layer + 1;
  const auto dout = random_values<floatX>(N * C, 2);
  const auto dweights = random_values<float>(num_maps * stride, 3),
             dgates = random_values<float>(num_maps * stride, 4);  // before
  const DeviceArray<floatX> d_dout(dout);
  std::vector<DeviceArray<Element>> d_maps;
  std::vector<double> e_dmaps, e_dweights = doubles(dweights), e_dgates = doubles(dgates);
  for (int m = 0; m < num_maps; m++) {
    const auto map = random_values<Element>(N * C, uint32_t(5 + m));
    d_maps.emplace_back(map);
    for (int64_t n = 0; n < N; n++) {
      const double weight = mix.weights_in_double(n)[m];
      double sum = 0;
      for (int64_t i = n * C; i < (n + 1) * C; i++)
        e_dmaps.push_back(weight * real(dout[i])), sum += real(dout[i]) * real(map[i]);
      e_dweights[m * stride + n] = sum;
    }
  }
  // A weight is linear in each gate: its derivative is the difference between a gate of 1 and one of 0.
  for (int m = 1; m < num_maps; m++)
    for (int64_t n = 0; n < N; n++) {
      const auto at_1 = mix.weights_in_double(n, m, 1), at_0 = mix.weights_in_double(n, m, 0);
      for (int i = 0; i < num_maps; i++) e_dgates[m * stride + n] += e_dweights[i * stride + n] * (at_1[i] - at_0[i]);
    }
  const auto [dmaps, dweights_result, dgates_result] = in_any_order(
      [&] {
        const DeviceArray<floatX> d_dmaps(nans<floatX>(num_maps * N * C));
        const DeviceArray<float> d_dweights(dweights), d_dgates(dgates);
        for (int m = 0; m < num_maps; m++)
          mix_map_backward(d_dmaps.data + m * N * C, d_dweights.data + m * stride, d_dout.data, d_maps[m].data,
                           mix.weights(), m, N, C);
        mix_gates_backward(d_dgates.data, d_dweights.data, mix.weights(), N);
        return std::make_tuple(d_dmaps.to_host(), d_dweights.to_host(), d_dgates.to_host());
      },
      2);
  EXPECT_LE(relative_error(dmaps, e_dmaps), one_rounding);
  EXPECT_LE(relative_error(dweights_result, e_dweights), of_fp32);
  EXPECT_LE(relative_error(dgates_result, e_dgates), of_fp32);
}

TEST(MixedMaps, GiveEachMapAndGateItsGradient) {
  for_each_mixed_maps([](const MixedMaps& mix) {
    check_gradients_of_mixed_maps<float>(mix);
    if (has_master_weights) check_gradients_of_mixed_maps<floatX>(mix);
  });
}

// ----------------------------------------------------------------------------
// Optimizer

// Chunks of tensors of these sizes, laid out as in an arena with at least one element between two of them.
struct Arena {
  std::vector<ParameterChunk> chunks;
  int64_t size = 64;

  explicit Arena(const std::vector<int64_t>& sizes) {
    for (size_t tensor = 0; tensor < sizes.size(); tensor++) {
      for (int64_t i = 0; i < sizes[tensor]; i += parameter_chunk_size)
        chunks.push_back(
            {size + i, size + i, int(std::min<int64_t>(parameter_chunk_size, sizes[tensor] - i)), tensor % 2 == 0});
      size += sizes[tensor] / 64 * 64 + 64;
    }
  }
  // Calls f(i, the chunk that contains i, or null).
  template <class F>
  void for_each(F f) const {
    int64_t i = 0;
    for (const ParameterChunk& chunk : chunks) {
      for (; i < chunk.begin; i++) f(size_t(i), nullptr);
      for (; i < chunk.begin + chunk.count; i++) f(size_t(i), &chunk);
    }
    for (; i < size; i++) f(size_t(i), nullptr);
  }
};

// BUG (build/fp32/test_ops_cpu) llmc/cpu/optimizer.h: `chunks[c].decays ? s.weight_decay : 0.0f` -> `s.weight_decay`
TEST(AdamW, MovesTheParametersAsPyTorchDoes) {
  // Beside and on a thread's 4 or 8, a block's 1,024 or 2,048 and a chunk; several chunks.
  const Arena arena({100,
                     7,
                     2 * parameter_chunk_size + 3,
                     768,
                     2056,
                     3,
                     4,
                     5,
                     6,
                     8,
                     9,
                     1023,
                     1024,
                     1025,
                     2047,
                     2048,
                     2049,
                     parameter_chunk_size - 1,
                     parameter_chunk_size,
                     parameter_chunk_size + 1});
  const double lr = 0.01, b1 = 0.9, b2 = 0.95, eps = 1e-3, decay = 0.1, scale = 0.5;  // an eps that makes a difference
  const StepStats sums = {16, 2.5};
  const AdamWStep step =
      {float(lr),          float(b1),   float(b2), float(eps), float(1 - std::pow(b1, 3)), float(1 - std::pow(b2, 3)),
       scale * (4 + 1e-6), float(decay)};
  const auto weights = random_values<float>(arena.size, 1), m = random_values<float>(arena.size, 2, 0.1);
  const auto grads = random_values<float>(arena.size, 3);
  auto v = random_values<float>(arena.size, 4);
  for (float& x : v) x = 0.01f * x * x;
  std::vector<floatX> params;
  for (float x : weights) params.push_back(floatX(x));

  std::vector<double> e_weights =
      doubles(has_master_weights ? weights : std::vector<float>(params.begin(), params.end()));
  std::vector<double> e_m = doubles(m), e_v = doubles(v);
  arena.for_each([&](size_t i, const ParameterChunk* chunk) {
    if (chunk == nullptr) return;
    const double g = scale * double(grads[i]);
    e_m[i] = b1 * e_m[i] + (1 - b1) * g;
    e_v[i] = b2 * e_v[i] + (1 - b2) * g * g;
    e_weights[i] -= lr * (chunk->decays ? decay : 0) * e_weights[i];
    e_weights[i] -= lr * (e_m[i] / (1 - std::pow(b1, 3))) / (std::sqrt(e_v[i] / (1 - std::pow(b2, 3))) + eps);
  });

  const DeviceArray<ParameterChunk> d_chunks(arena.chunks);
  const DeviceArray<StepStats> d_sums(std::vector<StepStats>{sums});
  const DeviceArray<float> d_grads(grads);
  const auto [new_params, new_weights, new_m, new_v] = in_any_order([&] {
    DeviceArray<floatX> d_params(params);
    DeviceArray<float> d_weights(weights), d_m(m), d_v(v);
    adamw_update(d_params.data, has_master_weights ? d_weights.data : nullptr, d_m.data, d_v.data, d_grads.data,
                 d_chunks.data, int64_t(d_chunks.size), step, d_sums.data);
    return std::make_tuple(d_params.to_host(), d_weights.to_host(), d_m.to_host(), d_v.to_host());
  });
  const std::vector<float> updated =
      has_master_weights ? new_weights : std::vector<float>(new_params.begin(), new_params.end());
  EXPECT_LE(relative_error(updated, e_weights), 5e-7);
  EXPECT_LE(relative_error(new_m, e_m), 5e-7);
  EXPECT_LE(relative_error(new_v, e_v), 5e-7);
  EXPECT_TRUE(same_bits(d_grads.to_host(), grads)) << "the gradient is unchanged";
  const std::vector<floatX>& p = new_params;  // a structured binding cannot be captured
  const std::vector<float>& w = new_weights;
  arena.for_each([&](size_t i, const ParameterChunk* chunk) {
    if (chunk == nullptr) {
      EXPECT_EQ(float(p[i]), float(params[i])) << "between the tensors";
    } else if (has_master_weights) {
      EXPECT_EQ(float(p[i]), float(floatX(w[i]))) << "rounded masters";
    }
  });
}

// How far one step moves a parameter of 1 whose gradient is `grad`, in units of the learning rate.
static double adamw_move(float grad, float eps, float weight_decay) {
  const DeviceArray<ParameterChunk> chunks(std::vector<ParameterChunk>{{0, 0, 1, 1}});
  const DeviceArray<StepStats> sums(std::vector<StepStats>{{1, 0}});
  const DeviceArray<floatX> params(std::vector<floatX>(64, floatX(1.0f)));
  const std::vector<float> zeros(64, 0.0f), ones(64, 1.0f), gradients(64, grad);
  const DeviceArray<float> weights(ones), m(zeros), v(zeros), grads(gradients);
  adamw_update(params.data, has_master_weights ? weights.data : nullptr, m.data, v.data, grads.data, chunks.data, 1,
               {0.125f, 0.9f, 0.95f, eps, 0.1f, 0.05f, /*grad_clip=*/0, weight_decay}, sums.data);
  return (1 - double(has_master_weights ? weights.to_host()[0] : float(params.to_host()[0]))) / 0.125;
}

TEST(AdamW, MovesByTheLearningRateInTheFirstStep) {
  EXPECT_NEAR(adamw_move(0.3f, 1e-8f, 0), 1, 1e-5);
  EXPECT_NEAR(adamw_move(-1e-4f, 1e-8f, 0), -1, 2e-4);
  EXPECT_EQ(adamw_move(0, 1e-8f, 0), 0);
  EXPECT_NEAR(adamw_move(0.5f, 0.5f, 0), 0.5, 1e-5) << "eps stands beside the root";
  EXPECT_NEAR(adamw_move(0, 1e-8f, 0.1f), 0.1, 1e-5) << "decay by itself";
}

// The factor that clips a gradient of 1: with beta1 = 0 it becomes the first moment, which stays 7 without an update.
static float grad_scale_of(const StepStats& sums, double grad_clip) {
  const DeviceArray<ParameterChunk> chunks(std::vector<ParameterChunk>{{0, 0, 11, 1}});
  const DeviceArray<StepStats> d_sums(std::vector<StepStats>{sums});
  const std::vector<float> ones(64, 1.0f), sevens(64, 7.0f);
  const DeviceArray<floatX> params(std::vector<floatX>(64, floatX(1.0f)));
  const DeviceArray<float> weights(ones), m(sevens), v(sevens), grads(ones);
  adamw_update(params.data, has_master_weights ? weights.data : nullptr, m.data, v.data, grads.data, chunks.data, 1,
               {0.125f, 0.0f, 0.95f, 1e-8f, 1.0f, 0.05f, grad_clip, 0.1f}, d_sums.data);
  const std::vector<float> new_m = m.to_host(), new_v = v.to_host(), new_weights = weights.to_host();
  const std::vector<floatX> new_params = params.to_host();
  for (size_t i = 0; i < 11; i++) {
    EXPECT_EQ(new_m[i], new_m[0]);
    EXPECT_EQ(new_m[i] == 7, new_v[i] == 7);
    EXPECT_EQ(new_m[i] == 7, float(new_params[i]) == 1);
    EXPECT_EQ(has_master_weights && new_m[i] != 7, new_weights[i] != 1);
  }
  return new_m[0];
}

// BUG (build/fp32/test_ops_cpu) llmc/cpu/optimizer.h: `std::min(1.0, grad_clip / (std::sqrt(sums.grad_squares) +
// 1e-6))` -> `grad_clip / (std::sqrt(sums.grad_squares) + 1e-6)`
TEST(AdamW, ClipsTheGradientByItsNormAsPyTorchDoes) {
  EXPECT_EQ(grad_scale_of({16, 3}, 1), float(1 / (4 + 1e-6)));
  EXPECT_EQ(grad_scale_of({2, 3}, 0.1), float(0.1 / (std::sqrt(2.0) + 1e-6)));
  EXPECT_EQ(grad_scale_of({16, 3}, 4.1), 1) << "shorter than the limit";
  EXPECT_EQ(grad_scale_of({16, 3}, 0), 1) << "no limit";
  EXPECT_EQ(grad_scale_of({0, 3}, 1), 1);
}

TEST(AdamW, ChangesNothingIfLossOrNormIsNotFinite) {
  for (double bad : {double(INFINITY), double(NAN)}) {
    for (double grad_clip : {0.0, 1.0}) {
      EXPECT_EQ(grad_scale_of({16, bad}, grad_clip), 7) << bad;
      EXPECT_EQ(grad_scale_of({bad, 3}, grad_clip), 7) << bad;
    }
  }
}

// ----------------------------------------------------------------------------
// Muon

constexpr StepStats finite_stats = {16, 2.5};                            // the norm is 4
constexpr MuonStep muon_step = {0.05f, 0.9f, 0.1f, 2 * (1 + 1e-6 / 4)};  // gradients are clipped to a half

// BUG (build/fp32/test_ops_cpu) llmc/cpu/muon.h: `grads[i] = s.momentum * m_new + rest * g;` -> `grads[i] = m_new;`
// BUG (build/fp32/test_ops_emu) llmc/cuda/muon.h: `m_new = s.momentum * m[chunk.state + i] + (1.0f - s.momentum) * g;`
// -> `m_new = s.momentum * m[chunk.state + i] + g;`
TEST(Muon, MomentumIsNesterovs) {
  const Arena arena({100, 7, 2 * parameter_chunk_size + 3, 256, 257});
  const auto grads = random_values<float>(arena.size, 1), m = random_values<float>(arena.size, 2);
  const DeviceArray<ParameterChunk> chunks(arena.chunks);
  auto moved = [&](const StepStats& stats) {
    return in_any_order([&] {
      const DeviceArray<StepStats> sums(std::vector<StepStats>{stats});
      DeviceArray<float> d_grads(grads), d_m(m);
      muon_momentum(d_grads.data, d_m.data, chunks.data, int64_t(chunks.size), muon_step, sums.data);
      return std::make_tuple(d_grads.to_host(), d_m.to_host());
    });
  };
  std::vector<double> e_grads = doubles(grads), e_m = doubles(m);
  arena.for_each([&](size_t i, const ParameterChunk* chunk) {
    if (chunk == nullptr) return;
    const double g = 0.5 * double(grads[i]);
    e_m[i] = 0.9 * e_m[i] + 0.1 * g;
    e_grads[i] = 0.9 * e_m[i] + 0.1 * g;
  });
  const auto [new_grads, new_m] = moved(finite_stats);
  EXPECT_LE(relative_error(new_grads, e_grads), 2e-7);
  EXPECT_LE(relative_error(new_m, e_m), 2e-7);
  for (const StepStats& bad : {StepStats{16, NAN}, StepStats{INFINITY, 2.5}}) {
    const auto [same_grads, same_m] = moved(bad);
    EXPECT_TRUE(same_bits(same_grads, grads) && same_bits(same_m, m));
  }
}

// What lies beside a tile, and a matrix of several tiles; as tall as wide, taller and wider.
constexpr std::pair<int64_t, int64_t> muon_shapes[] = {{1, 1},   {3, 40},  {40, 3},  {32, 32},
                                                       {33, 65}, {65, 33}, {64, 128}};

// BUG (build/fp32/test_ops_emu) llmc/cuda/muon.h: `from_float(x[(first_line + i) * line_length + place], transposed ?`
// -> `from_float(x[(first_line + i) * line_length + place], !transposed ?`
TEST(Muon, NormalizesTheWiderWay) {
  for (auto [rows, columns] : muon_shapes) {
    const auto u = random_values<float>(rows * columns, 3);
    const bool transposed = rows > columns;
    std::vector<double> expected(u.size());
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++)
        expected[size_t(transposed ? j * rows + i : i * columns + j)] = double(u[size_t(i * columns + j)]) / 4;
    const DeviceArray<float> d_u(u);
    for (double squares : {16.0, 0.0}) {
      const DeviceArray<double> d_squares(std::vector<double>{squares});
      const int64_t r = rows, c = columns;  // a structured binding cannot be captured
      const auto [x] = in_any_order(
          [&] {
            DeviceArray<floatX> d_x(nans<floatX>(r * c));
            muon_normalize(d_x.data, d_u.data, d_squares.data, r, c);
            return std::make_tuple(d_x.to_host());
          },
          3);
      std::vector<double> of_norm = expected;
      if (squares == 0)
        for (double& value : of_norm) value *= 4 / muon_least_norm;
      EXPECT_LE(relative_error(x, of_norm), has_master_weights ? 3e-3 : 2e-7)
          << rows << " x " << columns << ", " << squares;
    }
  }
}

// BUG (build/fp32/test_ops_cpu) llmc/cpu/muon.h: `(i == j ? muon_a : 0.0f)` -> `muon_a`
// BUG (build/fp32/test_ops_emu) llmc/cuda/muon.h: `(i / n == i % n ? muon_a : 0.0f)` -> `0.0f`
TEST(Muon, PolynomialHasItsConstantOnTheDiagonal) {
  for (int64_t n : {1, 5, 40}) {
    const auto a = random_values<floatX>(n * n, 1), squared = random_values<floatX>(n * n, 2);
    const DeviceArray<floatX> d_a(a), d_squared(squared);
    DeviceArray<floatX> p(nans<floatX>(n * n));
    muon_polynomial(p.data, d_a.data, d_squared.data, n);
    std::vector<double> expected;
    for (int64_t i = 0; i < n * n; i++)
      expected.push_back(-4.7750 * real(a[size_t(i)]) + 2.0315 * real(squared[size_t(i)]) +
                         (i / n == i % n ? 3.4445 : 0));
    EXPECT_LE(relative_error(p.to_host(), expected), has_master_weights ? 3e-3 : 2e-7) << n;
  }
}

// BUG (build/fp32/test_ops_cpu) llmc/cpu/muon.h: `w = w * keep - step` -> `w = w - step`
// BUG (build/fp32/test_ops_emu) llmc/cuda/muon.h: `muon_read_tile(tile, columns, rows, first_column, first_row, read)`
// -> `muon_read_tile(tile, columns, rows, first_row, first_column, read)`
TEST(Muon, MovesWeightsByTheDirection) {
  for (auto [rows, columns] : muon_shapes) {
    const auto weights = random_values<float>(rows * columns, 1);
    const auto x = random_values<floatX>(rows * columns, 2);
    const std::vector<floatX> params(weights.begin(), weights.end());
    const DeviceArray<floatX> d_x(x);
    const int64_t r = rows, c = columns;
    auto moved = [&](const StepStats& stats) {
      return in_any_order(
          [&] {
            const DeviceArray<StepStats> sums(std::vector<StepStats>{stats});
            DeviceArray<float> d_weights(weights);
            DeviceArray<floatX> d_params(params);
            muon_update(d_params.data, has_master_weights ? d_weights.data : nullptr, d_x.data, r, c, muon_step,
                        sums.data);
            return std::make_tuple(d_weights.to_host(), d_params.to_host());
          },
          3);
    };
    const auto [new_weights, new_params] = moved(finite_stats);
    std::vector<double> expected;
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++)
        expected.push_back(double(weights[size_t(i * columns + j)]) * (1 - 0.05 * 0.1) -
                           0.05 * 0.2 * std::sqrt(double(std::max(rows, columns))) *
                               real(x[size_t(rows > columns ? j * rows + i : i * columns + j)]));
    const std::vector<float> updated =
        has_master_weights ? new_weights : std::vector<float>(new_params.begin(), new_params.end());
    EXPECT_LE(relative_error(updated, expected), 2e-7) << rows << " x " << columns;
    EXPECT_TRUE(same_bits(new_params, std::vector<floatX>(updated.begin(), updated.end()))) << "rounded masters";
    const auto [same_weights, same_params] = moved({16, NAN});
    EXPECT_TRUE(same_bits(same_weights, weights) && same_bits(same_params, params));
  }
}

TEST(SumOfSquares, IsExactWhereFloatIsNotAndSkipsGaps) {
  for (size_t num_chunks : {1024, 1025}) {  // as many as the threads that add up the chunks' sums, and one more
    std::vector<int64_t> sizes = {30000, 3, 64, 8189, 7, 9, 2047, 2048, 2049, 8191, 8192, 8193};
    sizes.resize(num_chunks - Arena(sizes).chunks.size() + sizes.size(), 8);
    const Arena arena(sizes);
    ASSERT_EQ(arena.chunks.size(), num_chunks);
    std::vector<float> x = nans<float>(arena.size);
    double expected = 0;
    arena.for_each([&](size_t i, const ParameterChunk* chunk) {
      if (chunk != nullptr) x[i] = 1.0f, expected += 1;
    });
    x[size_t(arena.chunks[0].begin) + 77] = 30000.0f;
    expected += 9e8 - 1;
    const DeviceArray<ParameterChunk> d_chunks(arena.chunks);
    const DeviceArray<float> d_x(x);
    const auto [sum] = in_any_order(
        [&] {
          const DeviceArray<double> d_sum(nans<double>(1));
          sum_of_squares(d_sum.data, d_x.data, d_chunks.data, int64_t(d_chunks.size));
          return std::make_tuple(d_sum.to_host());
        },
        num_chunks == 1025 ? 2 : 1);
    EXPECT_EQ(sum[0], expected) << num_chunks << " chunks";
  }
}

// Kernels that Triton has compiled to PTX (dev/emu/ptx/triton_kernels.py), executed by dev/emu/ptx and compared with
// sums in double: another compiler than nvcc shows whether the interpreter does what the PTX manual says. The PTX of
// some of them lies in dev/emu/ptx/triton.tar.xz; where Python has Triton, all of them are compiled anew.
// COVERS dev/emu/ptx/
#include <archive.h>
#include <archive_entry.h>
#include <gtest/gtest.h>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>
#include "dev/emu/ptx/floats.h"
#include "dev/test/files.h"
#include "dev/test/ptx_kernels.h"
#include "dev/test/values.h"
#include "llmc/base/error.h"

// ----------------------------------------------------------------------------
// Values

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
static double real(Bf16 x) { return emu::ptx::float_of_bf16(x.bits); }
static double real(F16 x) { return emu::ptx::float_of_f16(x.bits); }
static double real(int x) { return x; }
static void round_to(Bf16& to, float x) { to.bits = emu::ptx::bf16_of_float(x); }
static void round_to(F16& to, float x) { to.bits = emu::ptx::f16_of_float(x); }
static void round_to(float& to, float x) { to = x; }

// Normally distributed.
template <class T>
static std::vector<T> random_of(size_t n, uint32_t tag) {
  const std::vector<float> x = random_values<float>(int64_t(n), tag);
  std::vector<T> rounded(n);
  for (size_t i = 0; i < n; i++) round_to(rounded[i], x[i]);
  return rounded;
}

template <class T>
static std::vector<double> reals(const std::vector<T>& x) {
  std::vector<double> y;
  for (const T& value : x) y.push_back(real(value));
  return y;
}

// ----------------------------------------------------------------------------
// A compiled kernel

// The first line of a file says how it is launched.
struct TritonFile {
  std::string path;
  unsigned threads = 0;
  size_t shared_bytes = 0;
};

template <class... P>
static void launch(const TritonFile& file, const std::string& kernel, dim3 grid, const P&... parameters) {
  void* const scratch = nullptr;  // Triton's last two parameters, which these kernels do not use
  run_ptx(file.path, kernel, grid, file.threads, file.shared_bytes, Parameters(parameters..., scratch, scratch));
}

static int blocks(int n, int of) { return (n + of - 1) / of; }

// What a run found: the relative error of each result.
using Errors = std::vector<std::pair<const char*, double>>;

// x (rows, columns) as (columns, rows).
static std::vector<double> transposed(const std::vector<double>& x, int rows, int columns) {
  std::vector<double> y;
  for (int c = 0; c < columns; c++)
    for (int r = 0; r < rows; r++) y.push_back(x[size_t(r * columns + c)]);
  return y;
}

// a (M, K) b (K, N) in blocks of BM x BN; of_transposed: in memory, a is (K, M) and b (N, K).
template <class T>
static Errors matmul(const TritonFile& file, int M, int N, int K, int BM, int BN, bool of_transposed = false) {
  const std::vector<T> a = random_of<T>(size_t(M * K), 1), b = random_of<T>(size_t(K * N), 2);
  const std::vector<double> x = of_transposed ? transposed(reals(a), K, M) : reals(a);
  const std::vector<double> y = of_transposed ? transposed(reals(b), N, K) : reals(b);
  std::vector<double> expected(size_t(M * N));
  for (int m = 0; m < M; m++)
    for (int k = 0; k < K; k++)
      for (int n = 0; n < N; n++) expected[size_t(m * N + n)] += x[size_t(m * K + k)] * y[size_t(k * N + n)];
  const Array<T> da(a, ptx_stream()), db(b, ptx_stream());
  const Array<float> c(size_t(M * N));
  launch(file, of_transposed ? "matmul_of_transposed" : "matmul", dim3(unsigned(blocks(M, BM) * blocks(N, BN))),
         da.data, db.data, c.data, M, N, K);
  return {{"c", relative_error(c.to_host(ptx_stream()), expected)}};
}

static Errors softmax(const TritonFile& file) {
  const int rows = 7, columns = 781;
  const std::vector<float> x = random_of<float>(size_t(rows * columns), 3);
  std::vector<double> expected;
  for (int r = 0; r < rows; r++) {
    double total = 0;
    for (int i = 0; i < columns; i++) total += std::exp(double(x[size_t(r * columns + i)]));
    for (int i = 0; i < columns; i++) expected.push_back(std::exp(double(x[size_t(r * columns + i)])) / total);
  }
  const Array<float> in(x, ptx_stream()), out(x.size());
  launch(file, "softmax", dim3(unsigned(rows)), out.data, in.data, columns);
  return {{"out", relative_error(reals(out.to_host(ptx_stream())), expected)}};
}

template <class T>
static Errors layernorm(const TritonFile& file, int rows, int C) {
  const double eps = 1e-5;
  const std::vector<T> x = random_of<T>(size_t(rows * C), 4), w = random_of<T>(size_t(C), 5),
                       b = random_of<T>(size_t(C), 6);
  std::vector<double> out, means, rstds;
  for (int r = 0; r < rows; r++) {
    double mean = 0, squares = 0;
    for (int i = 0; i < C; i++) mean += real(x[size_t(r * C + i)]) / C;
    for (int i = 0; i < C; i++)
      squares += (real(x[size_t(r * C + i)]) - mean) * (real(x[size_t(r * C + i)]) - mean) / C;
    means.push_back(mean);
    rstds.push_back(1 / std::sqrt(squares + eps));
    for (int i = 0; i < C; i++)
      out.push_back((real(x[size_t(r * C + i)]) - mean) * rstds.back() * real(w[size_t(i)]) + real(b[size_t(i)]));
  }
  const Array<T> dx(x, ptx_stream()), dw(w, ptx_stream()), db(b, ptx_stream()), dout(x.size());
  const Array<float> mean(means.size()), rstd(rstds.size());
  launch(file, "layernorm", dim3(unsigned(rows)), dout.data, mean.data, rstd.data, dx.data, dw.data, db.data, C,
         float(eps));
  return {{"out", relative_error(reals(dout.to_host(ptx_stream())), out)},
          {"mean", relative_error(mean.to_host(ptx_stream()), means)},
          {"rstd", relative_error(rstd.to_host(ptx_stream()), rstds)}};
}

// One head's causal attention in double; q, k, v, out: (T, D), from `first` on.
static void attend(std::vector<double>& out, const std::vector<double>& q, const std::vector<double>& k,
                   const std::vector<double>& v, size_t first, int T, int D, double scale) {
  for (int t = 0; t < T; t++) {
    std::vector<double> p;
    double total = 0;
    for (int s = 0; s <= t; s++) {
      double score = 0;
      for (int d = 0; d < D; d++) score += q[first + size_t(t * D + d)] * k[first + size_t(s * D + d)];
      p.push_back(std::exp(score * scale));
      total += p.back();
    }
    for (int d = 0; d < D; d++)
      for (int s = 0; s <= t; s++)
        out[first + size_t(t * D + d)] += p[size_t(s)] / total * v[first + size_t(s * D + d)];
  }
}

template <class T>
static Errors attention(const TritonFile& file, int heads, int length, int D, int BM) {
  const size_t n = size_t(heads * length * D);
  const std::vector<T> q = random_of<T>(n, 7), k = random_of<T>(n, 8), v = random_of<T>(n, 9);
  const double scale = 1 / std::sqrt(double(D));
  std::vector<double> expected(n);
  for (int h = 0; h < heads; h++)
    attend(expected, reals(q), reals(k), reals(v), size_t(h * length * D), length, D, double(float(scale)));
  const Array<T> dq(q, ptx_stream()), dk(k, ptx_stream()), dv(v, ptx_stream()), out(n);
  launch(file, "attention", dim3(unsigned(length / BM), unsigned(heads)), out.data, dq.data, dk.data, dv.data, length,
         float(scale));
  return {{"out", relative_error(reals(out.to_host(ptx_stream())), expected)}};
}

static Errors histogram(const TritonFile& file) {
  const int n = 3000, bins = 32;
  std::vector<int> x;
  std::vector<double> expected(bins);
  for (int i = 0; i < n; i++) x.push_back(i * i % 41);
  for (const int value : x)
    if (value < bins) expected[size_t(value)]++;
  const Array<int> in(x, ptx_stream()), counts(std::vector<int>(bins), ptx_stream());
  launch(file, "histogram", dim3(unsigned(blocks(n, 512))), counts.data, in.data, n);
  return {{"counts", relative_error(reals(counts.to_host(ptx_stream())), expected)}};
}

static Errors cumsum(const TritonFile& file) {
  const int rows = 5, columns = 900;
  const std::vector<float> x = random_of<float>(size_t(rows * columns), 10);
  std::vector<double> expected;
  for (size_t i = 0; i < x.size(); i++) expected.push_back(double(x[i]) + (i % columns == 0 ? 0 : expected.back()));
  const Array<float> in(x, ptx_stream()), out(x.size());
  launch(file, "cumsum", dim3(unsigned(rows)), out.data, in.data, columns);
  return {{"out", relative_error(reals(out.to_host(ptx_stream())), expected)}};
}

static Errors transpose(const TritonFile& file) {
  const int M = 160, N = 100;
  const std::vector<Bf16> x = random_of<Bf16>(size_t(M * N), 11);
  const std::vector<double> expected = transposed(reals(x), M, N);
  const Array<Bf16> in(x, ptx_stream()), out(x.size());
  launch(file, "transpose", dim3(unsigned(blocks(M, 64)), unsigned(blocks(N, 64))), out.data, in.data, M, N);
  return {{"out", relative_error(reals(out.to_host(ptx_stream())), expected)}};
}

// ----------------------------------------------------------------------------
// Tests

struct TritonKernel {
  std::string name;
  std::function<Errors(const TritonFile&)> run;
  double bound;  // of the relative errors; 2^-8 is half a bf16's last bit, 2^-11 an fp16's or a tf32's
};

static const std::vector<TritonKernel>& triton_kernels() {
  static const std::vector<TritonKernel> kernels = {
      {"matmul_bf16", [](auto& f) { return matmul<Bf16>(f, 200, 150, 100, 64, 64); }, 1e-6},
      {"matmul_bf16_aligned", [](auto& f) { return matmul<Bf16>(f, 256, 128, 192, 128, 64); }, 1e-6},
      {"matmul_fp16", [](auto& f) { return matmul<F16>(f, 100, 96, 80, 64, 32); }, 1e-6},
      {"matmul_tf32", [](auto& f) { return matmul<float>(f, 70, 128, 64, 32, 64); }, 0x1p-10},
      {"softmax", softmax, 1e-6},
      {"layernorm_fp32", [](auto& f) { return layernorm<float>(f, 5, 1000); }, 1e-6},
      {"layernorm_bf16", [](auto& f) { return layernorm<Bf16>(f, 6, 1600); }, 0x1p-8},
      {"attention_bf16", [](auto& f) { return attention<Bf16>(f, 3, 192, 64, 64); }, 0x1p-8},
      {"attention_fp16", [](auto& f) { return attention<F16>(f, 2, 256, 128, 128); }, 0x1p-11},
      {"histogram", histogram, 0},
      {"cumsum", cumsum, 1e-6},
      {"transpose", transpose, 0},
      {"matmul_bf16_wgmma", [](auto& f) { return matmul<Bf16>(f, 200, 144, 112, 64, 64); }, 1e-6},
      {"matmul_bf16_two_warpgroups", [](auto& f) { return matmul<Bf16>(f, 256, 192, 320, 128, 128); }, 1e-6},
      {"matmul_bf16_swizzle32", [](auto& f) { return matmul<Bf16>(f, 100, 48, 80, 64, 16); }, 1e-6},
      {"matmul_fp16_wgmma", [](auto& f) { return matmul<F16>(f, 100, 96, 400, 64, 32); }, 1e-6},
      {"matmul_tf32_wgmma", [](auto& f) { return matmul<float>(f, 70, 128, 96, 64, 64); }, 0x1p-10},
      {"matmul_of_transposed_bf16", [](auto& f) { return matmul<Bf16>(f, 160, 80, 240, 64, 64, true); }, 1e-6},
      {"matmul_of_transposed_wide", [](auto& f) { return matmul<Bf16>(f, 144, 272, 96, 128, 256, true); }, 1e-6},
      {"matmul_of_transposed_fp16", [](auto& f) { return matmul<F16>(f, 80, 48, 96, 64, 32, true); }, 1e-6},
      {"attention_bf16_wgmma", [](auto& f) { return attention<Bf16>(f, 3, 320, 64, 64); }, 0x1p-8},
      {"attention_bf16_wgmma128", [](auto& f) { return attention<Bf16>(f, 2, 384, 128, 128); }, 0x1p-8},
      {"attention_fp16_wgmma", [](auto& f) { return attention<F16>(f, 2, 192, 128, 64); }, 0x1p-11},
  };
  return kernels;
}

// Under several orders of lanes and warps.
static void expect_right(const TritonKernel& kernel, const std::string& folder) {
  TritonFile file = {folder + "/" + kernel.name + ".ptx"};
  ASSERT_EQ(sscanf(read_file(file.path).c_str(), "// launch %u %zu", &file.threads, &file.shared_bytes), 2)
      << file.path;
  for (uint64_t seed = 1; seed <= 8; seed++) {
    emu::set_seed(seed);
    for (const auto& [name, error] : kernel.run(file)) {
      EXPECT_LE(error, kernel.bound) << name << " of " << kernel.name << ", seed " << seed;
      if (seed == 1)
        printf("%-20s %-6s relative error %.2e, bound %.2e\n", kernel.name.c_str(), name, error, kernel.bound);
    }
  }
}

// A folder with the files of the repository's archive of PTX.
static const std::string& unpacked() {
  static const TemporaryFolder folder;
  static const bool is_unpacked = [] {
    archive* reader = archive_read_new();
    archive_read_support_filter_xz(reader);
    archive_read_support_format_tar(reader);
    CHECK(archive_read_open_filename(reader, "dev/emu/ptx/triton.tar.xz", 1 << 16) == ARCHIVE_OK);
    for (archive_entry* entry; archive_read_next_header(reader, &entry) == ARCHIVE_OK;) {
      std::string ptx(size_t(archive_entry_size(entry)), '\0');
      CHECK(archive_read_data(reader, ptx.data(), ptx.size()) == la_ssize_t(ptx.size()));
      write_file(folder.path + "/" + archive_entry_pathname(entry), ptx);
    }
    return archive_read_free(reader) == ARCHIVE_OK;
  }();
  CHECK(is_unpacked);
  return folder.path;
}

// Kernels whose PTX is in the repository.
static std::vector<TritonKernel> committed_kernels() {
  std::vector<TritonKernel> committed;
  for (const TritonKernel& kernel : triton_kernels())
    if (std::filesystem::exists(unpacked() + "/" + kernel.name + ".ptx")) committed.push_back(kernel);
  return committed;
}

class CommittedTriton : public testing::TestWithParam<TritonKernel> {};

TEST_P(CommittedTriton, KernelComputesWhatItsSourceSays) { expect_right(GetParam(), unpacked()); }

TEST(TritonFiles, KernelsAreThoseOfTheRepository) {
  EXPECT_FALSE(committed_kernels().empty());
  EXPECT_EQ(committed_kernels().size(), names_in(unpacked()).size());
}

INSTANTIATE_TEST_SUITE_P(Kernels, CommittedTriton, testing::ValuesIn(committed_kernels()),
                         [](const auto& info) { return info.param.name; });

class Triton : public testing::TestWithParam<TritonKernel> {};

static std::string python() { return getenv("PYTHON") != nullptr ? getenv("PYTHON") : "python3"; }

// Compiles all kernels into `folder`.
static bool compile(const std::string& folder) {
  return system((python() + " dev/emu/ptx/triton_kernels.py '" + folder + "' >'" + folder + "/log' 2>&1").c_str()) == 0;
}

TEST_P(Triton, KernelCompiledNowDoesToo) {
  static const TemporaryFolder& folder = *new TemporaryFolder;
  static const bool has_triton = system((python() + " -c 'import triton' 2>/dev/null").c_str()) == 0;
  if (!has_triton) GTEST_SKIP() << "Python has no Triton";
  static const bool compiled = compile(folder.path);
  ASSERT_TRUE(compiled) << read_file(folder.path + "/log");
  expect_right(GetParam(), folder.path);
}

INSTANTIATE_TEST_SUITE_P(LongKernels, Triton, testing::ValuesIn(triton_kernels()),
                         [](const auto& info) { return info.param.name; });

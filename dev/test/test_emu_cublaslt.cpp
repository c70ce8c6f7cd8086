// The emulated cuBLASLt: its products against their formula, and the mistakes of callers that it should find.
#include <gtest/gtest.h>
#include <sanitizer/asan_interface.h>
#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>
#include "cublasLt.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "dev/test/emu_test.h"

// A column-major matrix on the host, in double.
struct Matrix {
  int rows, cols, ld;
  std::vector<double> values;

  // Numbers that `type` has.
  Matrix(int rows, int cols, int ld, cudaDataType type, double tag)
      : rows(rows), cols(cols), ld(ld), values(size_t(ld * cols), NAN) {
    for (int j = 0; j < cols; j++) {
      for (int i = 0; i < rows; i++) {
        const float x = float(std::sin(tag + 1.7 * i + 0.9 * j));
        at(i, j) = type == CUDA_R_16BF ? float(__nv_bfloat16(x)) : type == CUDA_R_16F ? float(__half(x)) : x;
      }
    }
  }
  double& at(int i, int j) { return values[j * ld + i]; }
};

static size_t bytes_of(cudaDataType type) { return type == CUDA_R_32F ? 4 : 2; }

// On the device as `type`; the gaps between columns are NaN.
static void* upload(const std::vector<double>& values, cudaDataType type, cudaStream_t stream) {
  const std::vector<float> floats(values.begin(), values.end());
  const std::vector<__nv_bfloat16> bf16s(floats.begin(), floats.end());
  const std::vector<__half> halves(floats.begin(), floats.end());
  void* p;
  check(cudaMalloc(&p, values.size() * bytes_of(type)));
  const void* from = floats.data();
  if (type == CUDA_R_16BF) from = bf16s.data();
  if (type == CUDA_R_16F) from = halves.data();
  check(cudaMemcpyAsync(p, from, values.size() * bytes_of(type), cudaMemcpyHostToDevice, stream));
  check(cudaStreamSynchronize(stream));
  return p;
}

template <class T>
static std::vector<double> download(const void* p, size_t n, cudaStream_t stream) {
  std::vector<T> values(n);
  check(cudaMemcpyAsync(values.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost, stream));
  return {values.begin(), values.end()};
}
static std::vector<double> download(const void* p, size_t n, cudaDataType type, cudaStream_t stream) {
  return type == CUDA_R_16BF  ? download<__nv_bfloat16>(p, n, stream)
         : type == CUDA_R_16F ? download<__half>(p, n, stream)
                              : download<float>(p, n, stream);
}

static void check(cublasStatus_t status) {
  ASSERT_EQ(status, CUBLAS_STATUS_SUCCESS) << cublasLtGetStatusString(status);
}

struct Problem {
  cudaDataType in = CUDA_R_32F, out = CUDA_R_32F;
  bool transpose_a = false, transpose_b = false;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  float alpha = 1.0f, beta = 0.0f;
  uint32_t alignment = 16;  // promised, of A
  int offset_a = 0;         // elements by which A is not where it should be
  bool poison_b = false;    // poisons B's last element (fp32), and the 4 bytes after it: ASan marks units of 8
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;  // allowed
  size_t algorithm = 0;                                          // of those that the heuristic offers
  int offset_bias = 0, offset_aux = 0;       // bytes by which they move once the algorithm is chosen
  bool null_bias = false, null_aux = false;  // until then
};

static double gelu(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }

// Runs the problem for D (9, 7) and compares D, aux and the gaps between D's columns with the same in double. Returns
// what the heuristic said, raises *worst_error to the largest error, and sets *result to D.
static cublasStatus_t run_matmul(const Problem& p, double* worst_error = nullptr,
                                 std::vector<double>* result_d = nullptr) {
  const int m = 9, n = 7, k = 11;
  const bool sums_b = p.epilogue == CUBLASLT_EPILOGUE_BGRADB;
  const bool with_bias = p.epilogue & CUBLASLT_EPILOGUE_BIAS, uses_bias = with_bias || sums_b,
             with_aux = p.epilogue & 128;
  const bool dgelu = p.epilogue == CUBLASLT_EPILOGUE_DGELU;
  Matrix a = p.transpose_a ? Matrix(k, m, 12, p.in, 0.1) : Matrix(m, k, 10, p.in, 0.1);
  Matrix b = p.transpose_b ? Matrix(n, k, 8, p.in, 0.2) : Matrix(k, n, 16, p.in, 0.2);
  Matrix c(m, n, 11, p.out, 0.3), aux(m, n, 16, p.out, 0.4), bias(m, 1, m, p.out, 0.5);

  Stream stream;
  void *da = upload(a.values, p.in, stream), *db = upload(b.values, p.in, stream),
       *dc = upload(c.values, p.out, stream);
  void *daux = upload(aux.values, p.out, stream), *dbias = upload(bias.values, p.out, stream), *workspace;
  check(cudaMalloc(&workspace, 4096));
  if (p.beta == 0.0f)
    check(cudaMemsetAsync(dc, 0xff, c.values.size() * bytes_of(p.out), stream));  // NaN must not be read

  cublasLtHandle_t handle;
  cublasLtMatmulDesc_t desc;
  cublasLtMatrixLayout_t layout_a, layout_b, layout_d;
  cublasLtMatmulPreference_t preference;
  check(cublasLtCreate(&handle));
  check(cublasLtMatmulDescCreate(&desc, p.compute, CUDA_R_32F));
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
    check(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof value));
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_EPILOGUE, p.epilogue);
  const auto set_bias = [&](int offset) { set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<char*>(dbias) + offset); };
  const auto set_aux = [&](int offset) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<char*>(daux) + offset);
  };
  if (uses_bias && !p.null_bias) set_bias(0);
  if (uses_bias) set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, p.out);
  if (with_aux && !p.null_aux) set_aux(0);
  if (with_aux) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t(aux.ld));
  if (with_aux) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, p.out);
  check(cublasLtMatrixLayoutCreate(&layout_a, p.in, uint64_t(a.rows), uint64_t(a.cols), a.ld));
  check(cublasLtMatrixLayoutCreate(&layout_b, p.in, uint64_t(b.rows), uint64_t(b.cols), b.ld));
  check(cublasLtMatrixLayoutCreate(&layout_d, p.out, m, n, c.ld));
  check(cublasLtMatmulPreferenceCreate(&preference));
  const uint64_t workspace_bytes = 4096;
  check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                             sizeof workspace_bytes));
  check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &p.alignment,
                                             sizeof p.alignment));
  check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &p.reductions,
                                             sizeof p.reductions));

  cublasLtMatmulHeuristicResult_t results[8];
  int returned;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, desc, layout_a, layout_b, layout_d, layout_d,
                                                               preference, 8, results, &returned);
  if (status == CUBLAS_STATUS_SUCCESS) {
    EXPECT_LT(int(p.algorithm), returned);
    if (uses_bias) set_bias(p.offset_bias);
    if (with_aux) set_aux(p.offset_aux);
    void* moved_a = static_cast<char*>(da) + p.offset_a * ptrdiff_t(bytes_of(p.in));
    if (p.poison_b) ASAN_POISON_MEMORY_REGION(static_cast<float*>(db) + b.ld * (b.cols - 1) + b.rows - 1, 8);
    check(cublasLtMatmul(handle, desc, &p.alpha, moved_a, layout_a, db, layout_b, &p.beta, dc, layout_d, dc, layout_d,
                         &results[p.algorithm].algo, workspace, 4096, stream));
    const std::vector<double> d = download(dc, c.values.size(), p.out, stream);
    if (result_d != nullptr) *result_d = d;
    const std::vector<double> aux_after = download(daux, aux.values.size(), p.out, stream);
    // Half a unit in the last place of 8 or 11 bits, at most.
    const double of_result = p.out == CUDA_R_16BF ? 0x1p-8 : p.out == CUDA_R_16F ? 0x1p-11 : 0;
    const double of_sum = p.compute == CUBLAS_COMPUTE_32F ? 1e-5 : k * 2.0 / 2048;
    const std::vector<double> bias_after = download(dbias, bias.values.size(), p.out, stream);
    for (int j = 0; j < n; j++) {
      double sum_of_b = 0;
      for (int l = 0; l < k; l++) sum_of_b += p.transpose_b ? b.at(j, l) : b.at(l, j);
      if (sums_b) { EXPECT_NEAR(bias_after[size_t(j)], sum_of_b, std::abs(sum_of_b) * of_result + of_sum) << j; }
      for (int i = 0; i < m; i++) {
        double x = 0;
        for (int l = 0; l < k; l++)
          x += (p.transpose_a ? a.at(l, i) : a.at(i, l)) * (p.transpose_b ? b.at(j, l) : b.at(l, j));
        x = p.alpha * x + (p.beta != 0 ? p.beta * c.at(i, j) : 0) + (with_bias ? bias.at(i, 0) : 0);
        const double saved = aux_after[j * aux.ld + i];
        if (dgelu) {
          x *= (gelu(saved + 1e-5) - gelu(saved - 1e-5)) / 2e-5;
        } else if (with_aux) {
          EXPECT_NEAR(saved, x, std::abs(x) * of_result + of_sum);
          x = gelu(x);
        }
        if (worst_error != nullptr) *worst_error = std::max(*worst_error, std::abs(d[j * c.ld + i] - x));
        EXPECT_NEAR(d[j * c.ld + i], x, std::abs(x) * of_result + of_sum) << i << ", " << j;
      }
      for (int i = m; i < c.ld; i++) EXPECT_TRUE(std::isnan(d[j * c.ld + i])) << "wrote between two columns";
    }
  }
  for (void* pointer : {da, db, dc, daux, dbias, workspace}) check(cudaFree(pointer));
  for (cublasLtMatrixLayout_t layout : {layout_a, layout_b, layout_d}) check(cublasLtMatrixLayoutDestroy(layout));
  check(cublasLtMatmulPreferenceDestroy(preference));
  check(cublasLtMatmulDescDestroy(desc));
  check(cublasLtDestroy(handle));
  return status;
}

TEST(EmuCublasLt, EveryCombinationOfTypesOperationsAndEpiloguesIsTheFormula) {
  for (const auto& [in, out] : {std::pair(CUDA_R_32F, CUDA_R_32F),
                                {CUDA_R_16BF, CUDA_R_16BF},
                                {CUDA_R_16BF, CUDA_R_32F},
                                {CUDA_R_16F, CUDA_R_16F},
                                {CUDA_R_16F, CUDA_R_32F}}) {
    for (bool transpose_a : {false, true}) {
      for (bool transpose_b : {false, true}) {
        for (cublasLtEpilogue_t epilogue :
             {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU_AUX,
              CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU, CUBLASLT_EPILOGUE_BGRADB}) {
          for (float beta : {0.0f, 1.0f, -0.5f}) {
            SCOPED_TRACE(testing::Message() << "types " << in << " " << out << ", operations " << transpose_a
                                            << transpose_b << ", epilogue " << epilogue << ", beta " << beta);
            Problem p;
            p.in = in, p.out = out, p.transpose_a = transpose_a, p.transpose_b = transpose_b;
            p.epilogue = epilogue, p.alpha = 0.75f, p.beta = beta;
            for (p.algorithm = 0; p.algorithm < 3; p.algorithm++) EXPECT_EQ(run_matmul(p), CUBLAS_STATUS_SUCCESS);
          }
        }
      }
    }
  }
}

TEST(EmuCublasLt, Tf32IsLessExactThanFp32) {
  Problem p;
  p.compute = CUBLAS_COMPUTE_32F_FAST_TF32;
  double worst_error = 0;
  EXPECT_EQ(run_matmul(p, &worst_error), CUBLAS_STATUS_SUCCESS);
  EXPECT_GT(worst_error, 1e-4);
  p.in = p.out = CUDA_R_16BF;
  EXPECT_EQ(run_matmul(p), CUBLAS_STATUS_NOT_SUPPORTED);
}

// D_i (2, 3) = A_i (2, 4) B_i (4, 3) for i < 3, with so many elements from one matrix to the next.
struct Batch {
  int64_t next_a = 8, next_b = 12, next_d = 6;
  int32_t count = 3, count_of_a = 3;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  uint32_t alignment = 8;     // promised, of A
  size_t elements_of_b = 36;  // as many as are allocated
  float beta = 0;             // times what D holds is added; where it is 0, D holds NaN
};

// Returns what the heuristic says.
static cublasStatus_t run_batch(const Batch& batch) {
  const cudaDataType type = CUDA_R_32F;
  const Matrix a(4, 8, 4, type, 0.1);
  const Matrix b(4, 9, 4, type, 0.2);
  Stream stream;
  const std::vector<double> before = batch.beta == 0 ? std::vector<double>(24, NAN) : Matrix(4, 6, 4, type, 0.3).values;
  void *da = upload(a.values, type, stream), *dd = upload(before, type, stream), *workspace;
  std::vector<double> values_b = b.values;
  values_b.resize(batch.elements_of_b);
  void* db = upload(values_b, type, stream);
  check(cudaMalloc(&workspace, 4096));
  cublasLtHandle_t handle;
  cublasLtMatmulDesc_t desc;
  cublasLtMatrixLayout_t layout_a, layout_b, layout_d;
  cublasLtMatmulPreference_t preference;
  check(cublasLtCreate(&handle));
  check(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  check(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &batch.epilogue, sizeof batch.epilogue));
  const auto make_layout = [&](cublasLtMatrixLayout_t* layout, uint64_t rows, uint64_t cols, int32_t count,
                               int64_t next) {
    check(cublasLtMatrixLayoutCreate(layout, type, rows, cols, int64_t(rows)));
    check(cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    check(cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &next, sizeof next));
    EXPECT_EQ(cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &next, sizeof next),
              CUBLAS_STATUS_INVALID_VALUE);
  };
  make_layout(&layout_a, 2, 4, batch.count_of_a, batch.next_a);
  make_layout(&layout_b, 4, 3, batch.count, batch.next_b);
  make_layout(&layout_d, 2, 3, batch.count, batch.next_d);
  check(cublasLtMatmulPreferenceCreate(&preference));
  check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &batch.alignment,
                                             sizeof batch.alignment));
  for (auto operand : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                       CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    const uint32_t of_elements = 4;
    check(cublasLtMatmulPreferenceSetAttribute(preference, operand, &of_elements, sizeof of_elements));
  }
  cublasLtMatmulHeuristicResult_t results[8];
  int returned;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, desc, layout_a, layout_b, layout_d, layout_d,
                                                               preference, 8, results, &returned);
  if (status == CUBLAS_STATUS_SUCCESS) {
    const float one = 1;
    check(cublasLtMatmul(handle, desc, &one, da, layout_a, db, layout_b, &batch.beta, dd, layout_d, dd, layout_d,
                         &results[0].algo, workspace, 4096, stream));
    const std::vector<double> d = download(dd, 24, type, stream);
    for (int64_t i = 0; i < batch.count; i++)
      for (int64_t row = 0; row < 2; row++)
        for (int64_t col = 0; col < 3; col++) {
          const size_t at = size_t(i * batch.next_d + col * 2 + row);
          double x = batch.beta == 0 ? 0 : batch.beta * before[at];
          for (int64_t l = 0; l < 4; l++)
            x += a.values[size_t(i * batch.next_a + l * 2 + row)] * b.values[size_t(i * batch.next_b + col * 4 + l)];
          EXPECT_NEAR(d[at], x, 1e-5) << i;
        }
  }
  for (void* pointer : {da, db, dd, workspace}) check(cudaFree(pointer));
  for (cublasLtMatrixLayout_t layout : {layout_a, layout_b, layout_d}) check(cublasLtMatrixLayoutDestroy(layout));
  check(cublasLtMatmulPreferenceDestroy(preference));
  check(cublasLtMatmulDescDestroy(desc));
  check(cublasLtDestroy(handle));
  return status;
}

TEST(EmuCublasLt, ABatchIsAProductOfEachPairOfMatrices) {
  for (Batch batch : {Batch{}, Batch{10, 12, 8}, Batch{0, 12, 7}})  // the same A for all of them
    EXPECT_EQ(run_batch(batch), CUBLAS_STATUS_SUCCESS);
  Batch adds, other_count, overlapping, with_epilogue;
  adds.beta = 0.5f;
  EXPECT_EQ(run_batch(adds), CUBLAS_STATUS_SUCCESS);
  other_count.count_of_a = 2, overlapping.next_d = 5, with_epilogue.epilogue = CUBLASLT_EPILOGUE_BIAS;
  EXPECT_EQ(run_batch(other_count), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(run_batch(overlapping), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(run_batch(with_epilogue), CUBLAS_STATUS_NOT_SUPPORTED);
}

TEST(EmuCublasLt, TheHeuristicRefusesWhatIsNotSupported) {
  Problem p;
  p.out = CUDA_R_16BF;  // from fp32 inputs
  EXPECT_EQ(run_matmul(p), CUBLAS_STATUS_NOT_SUPPORTED);
  p = {};
  p.epilogue = cublasLtEpilogue_t(2);  // RELU
  EXPECT_EQ(run_matmul(p), CUBLAS_STATUS_NOT_SUPPORTED);
  p.epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  EXPECT_EQ(run_matmul(p), CUBLAS_STATUS_SUCCESS);
  p.null_bias = true;
  EXPECT_EQ(run_matmul(p), CUBLAS_STATUS_INVALID_VALUE);
  p.null_bias = false, p.null_aux = true;
  EXPECT_EQ(run_matmul(p), CUBLAS_STATUS_INVALID_VALUE);
}

// With each number of splits, parts are added up in one fixed order; in place, which the heuristic puts first if it
// may, in any order.
TEST(EmuCublasLt, ASumInPlaceHasNoFixedOrder) {
  const auto distinct_results = [](uint32_t reductions, size_t algorithm) {
    Problem p;
    p.reductions = reductions, p.algorithm = algorithm;
    std::set<std::vector<double>> results;
    for (uint64_t seed = 1; seed <= 8; seed++) {
      emu::set_seed(seed);
      std::vector<double> d;
      EXPECT_EQ(run_matmul(p, nullptr, &d), CUBLAS_STATUS_SUCCESS);
      std::replace_if(
          d.begin(), d.end(), [](double x) { return std::isnan(x); }, 0.0);  // between columns
      results.insert(d);
    }
    return results.size();
  };
  EXPECT_GT(distinct_results(CUBLASLT_REDUCTION_SCHEME_MASK, 0), 1u);
  for (size_t algorithm : {0, 1, 2})
    EXPECT_EQ(distinct_results(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, algorithm), 1u) << algorithm;
}

struct EmuCublasLtDeathTest : EmuDeathTest {};

TEST_F(EmuCublasLtDeathTest, APointerThatIsLessAlignedThanPromisedDies) {
  Problem p;
  p.offset_a = -1;
  EXPECT_DEATH(run_matmul(p), "cublasLtMatmul: A at .* is not aligned to the 16 bytes that were promised");
  p.alignment = 256;
  p.offset_a = -4;
  EXPECT_DEATH(run_matmul(p), "cublasLtMatmul: A at .* is not aligned to the 256 bytes that were promised");
}

// The heuristic takes the alignments from the pointers that it is asked with.
TEST_F(EmuCublasLtDeathTest, ALaterMatrixOfABatchIsCheckedToo) {
  Batch misaligned, too_short;
  misaligned.next_a = 9, too_short.elements_of_b = 35;
  EXPECT_DEATH(run_batch(misaligned), "A at .* is not aligned to the 8 bytes");
  EXPECT_DEATH(run_batch(too_short), "cublasLtMatmul: B");
}

TEST_F(EmuCublasLtDeathTest, ABiasOrAuxThatIsLessAlignedThanBeforeDies) {
  Problem p;
  p.epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  p.offset_bias = 16;
  EXPECT_DEATH(run_matmul(p), "cublasLtMatmul: bias at .* is not aligned to the .* bytes that were promised");
  p.offset_bias = 0, p.offset_aux = 16;
  EXPECT_DEATH(run_matmul(p), "cublasLtMatmul: the epilogue's aux at .* is not aligned to the .* bytes that were "
                              "promised");
}

TEST_F(EmuCublasLtDeathTest, AnOperandThatLeavesItsMemoryDiesByName) {
  Problem p;
  p.offset_a = 12;
  EXPECT_DEATH(run_matmul(p), "in host code: cublasLtMatmul: A at .* more than are left");
  p = {};
  p.poison_b = true;
  EXPECT_DEATH(run_matmul(p), "in host code: cublasLtMatmul: B at .* among them byte .* which the program itself has "
                              "poisoned");
}

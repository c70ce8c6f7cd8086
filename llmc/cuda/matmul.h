// Linear layers on cuBLASLt: the operations of llmc/cpu/matmul.h. Accumulation is in fp32; fp32 operands stay fp32 (no
// TF32) until gemm_allow_tf32.
#pragma once
#include <cublasLt.h>
#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>
#include "llmc/ops/batched_gemm.h"
#include "activation.h"
#include "column_sums.h"
#include "gemm_choices.h"
#include "vec.h"

// ----------------------------------------------------------------------------
// cuBLASLt

inline void cublas_check(cublasStatus_t status, const char* what, const char* file, int line) {
  if (status != CUBLAS_STATUS_SUCCESS)
    user_error("cuBLASLt: %s from %s at %s:%d", cublasLtGetStatusString(status), what, file, line);
}
#define CUBLAS_CHECK(call) cublas_check(call, #call, __FILE__, __LINE__)

inline bool& gemm_tf32() {
  static bool tf32 = false;
  return tf32;
}

// From now on fp32 matmuls may round their operands to TF32. Throws UserError in a build for 16 bits, which has none,
// and on a GPU that has none.
inline void gemm_allow_tf32() {
  if (is_16_bit) user_error("--tf32: this program was built for %s; build it with make PRECISION=FP32", precision_name);
  if (!gpu().has_tf32)
    user_error("--tf32: %s has no TF32, which needs compute capability 8.0 (Ampere) or later", device_name());
  gemm_tf32() = true;
}

template <class T>
constexpr cudaDataType cuda_type = sizeof(T) == 4 ? CUDA_R_32F
                                   : is_fp16      ? CUDA_R_16F
                                                  : CUDA_R_16BF;

// A matmul as cuBLASLt sees it, column-major: the key of the cached GemmPlans.
struct GemmShape {
  char op_a, op_b;  // 'N', 'T'
  int64_t m, n, k, lda, ldb, ldc;
  cudaDataType type, out_type;
  bool tf32;
  bool accumulate = false;
  int epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  // Bytes that the pointers are multiples of; 0: null.
  int align_a = 0, align_b = 0, align_c = 0, align_bias = 0, align_aux = 0;
  // Products of so many matrices, and elements from one to the next.
  int64_t batch = 1, next_a = 0, next_b = 0, next_c = 0;

  bool sums_bias() const { return epilogue == CUBLASLT_EPILOGUE_BGRADB; }
  cudaDataType bias_type() const { return sums_bias() ? out_type : type; }
  auto key() const {
    return std::tie(op_a, op_b, m, n, k, lda, ldb, ldc, accumulate, type, out_type, epilogue, tf32, align_a, align_b,
                    align_c, align_bias, align_aux, batch, next_a, next_b, next_c);
  }
  bool operator<(const GemmShape& o) const { return key() < o.key(); }
};

// What cuBLASLt applies to a product before it writes it. bias (n), which BGRADB writes; aux as the kind of epilogue
// defines it.
struct GemmEpilogue {
  cublasLtEpilogue_t kind = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  void* aux = nullptr;  // (m, n) like c
};

// The descriptors and the algorithm of one shape, created once.
struct GemmPlan {
  cublasLtMatmulDesc_t operation;
  cublasLtMatrixLayout_t a, b, c;
  cublasLtMatmulAlgo_t algo;
};

template <class T>
void set_attribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value));
}

inline void set_batch(cublasLtMatrixLayout_t layout, int64_t batch, int64_t next) {
  const int32_t count = int32_t(batch);
  CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
  CUBLAS_CHECK(
      cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &next, sizeof next));
}

inline cublasLtHandle_t cublaslt() {
  static cublasLtHandle_t handle = [] {
    cublasLtHandle_t h;
    CUBLAS_CHECK(cublasLtCreate(&h));
    return h;
  }();
  return handle;
}

inline void set_epilogue_pointers(const GemmPlan& plan, const GemmEpilogue& epilogue) {
  if (epilogue.bias != nullptr) set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, epilogue.bias);
  if (epilogue.aux != nullptr) set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, epilogue.aux);
}

// The descriptors of a shape, without an algorithm.
inline GemmPlan describe_gemm(const GemmShape& s) {
  GemmPlan plan;
  const cublasOperation_t op_a = s.op_a == 'T' ? CUBLAS_OP_T : CUBLAS_OP_N,
                          op_b = s.op_b == 'T' ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasLtEpilogue_t epilogue = cublasLtEpilogue_t(s.epilogue);
  CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan.operation, s.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                                        CUDA_R_32F));
  set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, op_a);
  set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, op_b);
  set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
  if (s.align_bias > 0) set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, s.bias_type());
  if (s.align_aux > 0) {
    set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, s.ldc);
    set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, s.out_type);
  }
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan.a, s.type, uint64_t(s.op_a == 'T' ? s.k : s.m),
                                          uint64_t(s.op_a == 'T' ? s.m : s.k), s.lda));
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan.b, s.type, uint64_t(s.op_b == 'T' ? s.n : s.k),
                                          uint64_t(s.op_b == 'T' ? s.k : s.n), s.ldb));
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan.c, s.out_type, uint64_t(s.m), uint64_t(s.n), s.ldc));
  if (s.batch > 1)
    set_batch(plan.a, s.batch, s.next_a), set_batch(plan.b, s.batch, s.next_b), set_batch(plan.c, s.batch, s.next_c);
  return plan;
}

// At most `most` algorithms for a shape, in the heuristic's order; throws UserError if there is none. The heuristic
// takes the alignment of bias and aux from their pointers in plan.operation. Algorithms that split a product along k
// are excluded if they add up its parts in the output or its type: parts in 16 bits would be
// rounded before they are added, and a sum in place may depend on which part comes first.
inline std::vector<cublasLtMatmulHeuristicResult_t> gemm_algorithms(const GemmShape& s, const GemmPlan& plan,
                                                                    int most) {
  cublasLtMatmulPreference_t preference;
  CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
  auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
  };
  const size_t workspace = Gpu::gemm_workspace_bytes;
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(s.align_a));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t(s.align_b));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t(s.align_c));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t(s.align_c));
  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(most));
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(cublaslt(), plan.operation, plan.a, plan.b, plan.c,
                                                               plan.c, preference, most, results.data(), &found);
  CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
  if (status != CUBLAS_STATUS_SUCCESS || found == 0)
    user_error("cuBLASLt has no algorithm for a matmul of %lld x %lld x %lld, operations %c %c, epilogue %d: %s",
               (long long)s.m, (long long)s.n, (long long)s.k, s.op_a, s.op_b, s.epilogue,
               cublasLtGetStatusString(status));
  results.resize(size_t(found));
  return results;
}

// The GemmPlans of all shapes that gemm() has been called for.
inline std::map<GemmShape, GemmPlan>& gemm_plans() {
  static auto& plans = *new std::map<GemmShape, GemmPlan>;  // never destroyed, like the Gpu
  return plans;
}

// A shape as gemm_choices.h has it, with the algorithm `index`.
inline GemmChoice gemm_choice(const GemmShape& s, int index) {
  return {gpu().name, cublasLtGetVersion(), s.op_a,          s.op_b,     s.m,          s.n,
          s.k,        int(s.type),          int(s.out_type), s.epilogue, s.accumulate, index};
}
// Whether gemm_choices.h can have it: one product of whole matrices.
inline bool is_whole(const GemmShape& s) {
  return s.batch == 1 && !s.tf32 && s.lda == (s.op_a == 'T' ? s.k : s.m) && s.ldb == (s.op_b == 'T' ? s.n : s.k) &&
         s.ldc == s.m;
}
// Which of the heuristic's algorithms a shape takes.
inline int chosen_algorithm(const GemmShape& shape) {
  const GemmChoice first = gemm_choice(shape, 0);
  if (!is_whole(shape)) return first.algorithm;
  for (const GemmChoice& choice : gemm_choices())
    if (choice.key() == first.key()) return choice.algorithm;
  return first.algorithm;
}

// The GemmPlan of a shape, with the algorithm that gemm_choices.h has for it, or the heuristic's first: the same in
// every run with one version of cuBLASLt on one kind of GPU, and with it the bits. The fastest by measurement would not
// be: where two are about as fast, each run would choose anew.
inline const GemmPlan& gemm_plan(const GemmShape& shape, const GemmEpilogue& epilogue) {
  auto it = gemm_plans().find(shape);
  if (it != gemm_plans().end()) return it->second;
  GemmPlan plan = describe_gemm(shape);
  set_epilogue_pointers(plan, epilogue);
  const size_t chosen = size_t(chosen_algorithm(shape));
  const auto algorithms = gemm_algorithms(shape, plan, int(chosen) + 1);
  plan.algo = algorithms[chosen < algorithms.size() ? chosen : 0].algo;
  return gemm_plans().emplace(shape, plan).first->second;
}

// c = op(a) op(b), or c += if the shape says so, column-major, by one of the shape's algorithms.
inline void run_gemm(const GemmShape& shape, const GemmPlan& plan, const cublasLtMatmulAlgo_t& algo, const void* a,
                     const void* b, void* c) {
  const float alpha = 1, beta = shape.accumulate ? 1 : 0;
  CUBLAS_CHECK(cublasLtMatmul(cublaslt(), plan.operation, &alpha, a, plan.a, b, plan.b, &beta, c, plan.c, c, plan.c,
                              &algo, gpu().gemm_workspace, Gpu::gemm_workspace_bytes, gpu().stream));
}

// The largest power of two, up to 256, that an address is a multiple of; 0 for null.
inline int alignment_of(const void* p) {
  if (p == nullptr) return 0;
  int alignment = 256;
  while (uintptr_t(p) % uintptr_t(alignment) != 0) alignment /= 2;
  return alignment;
}

// The shape of c (m, n) = op(a) op(b), row-major, which is cuBLAS's column-major c^T = op(b)^T op(a)^T: a and b change
// places. op: 'N' as it is, 'T' transposed; ld: elements from one row to the next.
template <class In, class Out>
GemmShape row_major_gemm(char op_a, char op_b, int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc) {
  return {op_b, op_a, n, m, k, ldb, lda, ldc, cuda_type<In>, cuda_type<Out>, gemm_tf32()};
}

// c (m, n) = op(a) op(b), or c += with `accumulate`, as row_major_gemm says.
template <class In, class Out>
void gemm(char op_a, char op_b, int64_t m, int64_t n, int64_t k, const In* a, int64_t lda, const In* b, int64_t ldb,
          bool accumulate, Out* c, int64_t ldc, const GemmEpilogue& epilogue = {}) {
  GemmShape shape = row_major_gemm<In, Out>(op_a, op_b, m, n, k, lda, ldb, ldc);
  shape.accumulate = accumulate, shape.epilogue = int(epilogue.kind);
  shape.align_a = alignment_of(b), shape.align_b = alignment_of(a), shape.align_c = alignment_of(c);
  shape.align_bias = alignment_of(epilogue.bias), shape.align_aux = alignment_of(epilogue.aux);
  const GemmPlan& plan = gemm_plan(shape, epilogue);
  set_epilogue_pointers(plan, epilogue);
  run_gemm(shape, plan, plan.algo, b, a, c);
}

// c_i = op(a_i) op(b_i) for all matrices of a batch, as llmc/ops/batched_gemm.h says.
template <class T>
void gemm(const BatchedGemm& s, const T* a, const T* b, T* c) {
  GemmShape shape =
      row_major_gemm<T, T>(s.op_a, s.op_b, s.m, s.n, s.k, s.op_a == 'N' ? s.k : s.m, s.op_b == 'N' ? s.n : s.k, s.n);
  shape.batch = s.batch, shape.next_a = s.k * s.n, shape.next_b = s.m * s.k, shape.next_c = s.m * s.n;
  const auto alignment = [](const T* p, int64_t next) {  // of every matrix
    return std::min(alignment_of(p), alignment_of(reinterpret_cast<const void*>(next * int64_t(sizeof(T)))));
  };
  shape.align_a = alignment(b, shape.next_a), shape.align_b = alignment(a, shape.next_b);
  shape.align_c = alignment(c, shape.next_c);
  const GemmPlan& plan = gemm_plan(shape, {});
  run_gemm(shape, plan, plan.algo, b, a, c);
}

// ----------------------------------------------------------------------------
// Linear layers

// The number of texts that are sampled in one pass: all of them. cuBLASLt's algorithms depend on how many there are,
// and with them the rounding of each; to sample one at a time would cost a GPU most of its speed.
constexpr size_t most_texts_of_a_pass = SIZE_MAX;

inline void matmul_forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int64_t N,
                           int64_t C, int64_t OC) {
  GemmEpilogue epilogue;
  if (bias != nullptr) epilogue.kind = CUBLASLT_EPILOGUE_BIAS, epilogue.bias = bias;
  gemm('N', 'T', N, OC, C, inp, C, weight, C, false, out, OC, epilogue);
}

// GELU and its derivative are operations of their own, or epilogues of the matmul before them, which cuBLASLt has for
// 16 bits; dev/bench/bench_gpu.cu times both. GELU is not fused, because where activations are computed again it is
// applied to what has been rounded, and that must be the same. Its derivative is, on Hopper.
inline void matmul_activation_forward(Activation f, floatX* out, floatX* pre, const floatX* inp, const floatX* weight,
                                      const floatX* bias, int64_t N, int64_t C, int64_t H, bool fused = false) {
  if (fused && f == Activation::gelu) {
    GemmEpilogue epilogue = {bias != nullptr ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX, bias, pre};
    gemm('N', 'T', N, H, C, inp, C, weight, C, false, out, H, epilogue);
  } else {
    matmul_forward(pre, inp, weight, bias, N, C, num_products(f, H));
    activation_forward(f, out, pre, N, H);
  }
}

// partial (gridDim.y, OC) = factor * the column sums of each block's rows. A block owns 256 columns of rows_per_block
// rows, a warp every eighth row of them, a lane eight columns, so that loads are coalesced and many are in flight. The
// warps' sums go through shared memory (8, 256), where each thread adds up one column.
constexpr int bias_warps = 8, bias_columns = warp_size * 8;
__global__ void __launch_bounds__(bias_warps* warp_size)
    bias_backward_kernel(float* partial, const floatX* dout, int64_t N, int64_t OC, int64_t stride, float factor,
                         int rows_per_block) {
  float* sums = reinterpret_cast<float*>(shared_memory);
  const int warp = int(threadIdx.x) / warp_size, lane = int(threadIdx.x) % warp_size;
  const int64_t column = int64_t(blockIdx.x) * bias_columns + lane * 8;
  const int64_t first = int64_t(blockIdx.y) * rows_per_block,
                last = first + rows_per_block < N ? first + rows_per_block : N;
  float sum[8] = {};
  if (column < OC) {
#pragma unroll 4
    for (int64_t n = first + warp; n < last; n += bias_warps) {
      float x[8];
      load8(x, dout + n * stride + column);
      for (int i = 0; i < 8; i++) sum[i] += x[i];
    }
  }
  store8(sums + warp * bias_columns + lane * 8, sum);
  __syncthreads();
  const int64_t mine = int64_t(blockIdx.x) * bias_columns + threadIdx.x;  // from here on a thread owns a column
  if (mine >= OC) return;
  float total = 0;
  for (int w = 0; w < bias_warps; w++) total += sums[w * bias_columns + threadIdx.x];
  partial[int64_t(blockIdx.y) * OC + mine] = factor * total;
}

// dbias (OC) += factor * the column sums of dout (N, OC), whose rows are `stride` apart, in an order that depends on
// the shape alone. OC and stride are multiples of 8.
inline void bias_backward(float* dbias, const floatX* dout, int64_t N, int64_t OC, int64_t stride, float factor = 1) {
  const int64_t most = int64_t(Gpu::scratch_bytes / sizeof(float)) / OC;  // rows of partial sums that fit into scratch
  const int rows_per_block = int(rows_of_block(N, 64, std::min<int64_t>(256, most)));
  const int blocks = int(ceil_div(N, rows_per_block));
  float* partial = device_scratch<float>(blocks * OC);
  launch(bias_backward_kernel, dim3(unsigned(ceil_div(OC, bias_columns)), unsigned(blocks)), bias_warps * warp_size,
         bias_warps * bias_columns * sizeof(float), partial, dout, N, OC, stride, factor, rows_per_block);
  add_column_sums(dbias, nullptr, partial, blocks, OC, OC);
}
inline void bias_backward(float* dbias, const floatX* dout, int64_t N, int64_t OC) {
  bias_backward(dbias, dout, N, OC, OC);
}

// With gpu().candidates.bias_gradients cuBLASLt sums up the rows of dout while it reads them for dweight.
inline void matmul_backward_weight(float* dweight, float* dbias, const floatX* dout, const floatX* inp, int64_t N,
                                   int64_t C, int64_t OC) {
  GemmEpilogue epilogue;
  const bool with_bias = dbias != nullptr && gpu().candidates.bias_gradients;
  if (with_bias) epilogue.kind = CUBLASLT_EPILOGUE_BGRADB, epilogue.bias = device_scratch<float>(OC);
  gemm('T', 'N', OC, C, N, dout, OC, inp, C, true, dweight, C, epilogue);
  if (with_bias) add_column_sums(dbias, nullptr, static_cast<const float*>(epilogue.bias), 1, OC, OC);
  else if (dbias != nullptr) bias_backward(dbias, dout, N, OC);
}

inline void matmul_backward(floatX* dinp, float* dweight, float* dbias, const floatX* dout, const floatX* inp,
                            const floatX* weight, int64_t N, int64_t C, int64_t OC) {
  gemm('N', 'N', N, C, OC, dout, OC, weight, C, false, dinp, C);
  matmul_backward_weight(dweight, dbias, dout, inp, N, C, OC);
}

inline void matmul_activation_backward(Activation f, floatX* dpre, float* dweight, float* dbias, const floatX* dout,
                                       const floatX* inp, const floatX* pre, const floatX* weight, int64_t N, int64_t H,
                                       int64_t OC, bool fused = gpu().fuses_gelu_backward) {
  GemmEpilogue epilogue;
  fused = fused && f == Activation::gelu;
  if (fused) epilogue = {CUBLASLT_EPILOGUE_DGELU, nullptr, const_cast<floatX*>(pre)};
  gemm('N', 'N', N, H, OC, dout, OC, weight, H, false, dpre, num_products(f, H), epilogue);
  if (!fused) activation_backward(f, dpre, pre, N, H);
  matmul_backward_weight(dweight, dbias, dout, inp, N, H, OC);
}

inline const char* matmul_precision() { return precision_name; }

inline double gemm_rate(int64_t n, double seconds) {
  std::vector<floatX> values(n * n);  // many different bits: zeros would take less power and run at a higher clock
  for (size_t i = 0; i < values.size(); i++)
    from_float(values[i], float(int(i * 2654435761u >> 8) % 2001 - 1000) * 1e-3f);
  const DeviceArray<floatX> a(values), b(values), c(values);
  GpuTimer timer;
  double best = 1e30, spent = 0;
  for (int i = 0; i < 3 || spent < seconds; i++) {
    timer.start();
    gemm('N', 'T', n, n, n, a.data, n, b.data, n, false, c.data, n);
    const double time = timer.seconds();
    best = std::min(best, time);
    spent += time;
  }
  return 2.0 * double(n) * double(n) * double(n) / best;
}

// The rate of a matmul that is large enough for the GPU's highest rate, in FLOP/s. A step's speed is reported as a
// share of it.
inline double gemm_peak(double seconds) {
  int64_t n = 512;
  while (n < 8192 && 2.0 * double(n) * double(n) * double(n) / gemm_rate(n, 0) < 0.5e-3) n *= 2;
  return gemm_rate(n, seconds);
}

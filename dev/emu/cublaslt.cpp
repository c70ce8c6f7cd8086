// cuBLASLt on oneDNN's sgemm: operands become fp32, the product and the epilogue are computed in fp32, and the result
// is rounded once. Before anything is read, alignments are compared with what the preference, and the pointers of bias
// and aux, promised when the algorithm was chosen, and every column of every operand with the device's allocations.
//
// The heuristic offers several algorithms: a product in one sequence, and products split along k whose parts are added
// up in fp32, in the output's type, or in place. The last, if it is allowed, comes first, and adds the parts up in an
// order drawn at random.
#include "cublasLt.h"
#include <dnnl.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "emu.h"

struct cublasLtContext {};

struct cublasLtMatmulDescOpaque {
  cublasComputeType_t compute;
  cublasOperation_t op_a = CUBLAS_OP_N, op_b = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  void* aux = nullptr;
  int64_t aux_ld = 0;
  int32_t bias_type = -1, aux_type = -1;  // cudaDataType; -1: D's
};

struct cublasLtMatrixLayoutOpaque {
  cudaDataType type;
  uint64_t rows, cols;
  int64_t ld;  // elements from one column to the next
  int32_t batch = 1;
  int64_t next = 0;  // elements from one matrix of a batch to the next
};

struct cublasLtMatmulPreferenceOpaque {
  uint64_t max_workspace_bytes = 0;
  uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  uint32_t alignment[4] = {256, 256, 256, 256};  // bytes that A, B, C, D are aligned to; the real library's defaults
};

namespace {

using Desc = cublasLtMatmulDescOpaque;
using Layout = cublasLtMatrixLayoutOpaque;

// What a cublasLtMatmulAlgo_t holds: what was promised when it was chosen, and for which problem.
struct Algo {
  uint64_t magic;
  uint64_t problem;  // hash of types, shapes, operations and epilogue
  uint64_t workspace_bytes;
  uint32_t alignment[6];  // of A, B, C, D, bias and aux
  uint16_t splits, reduction;
};
constexpr uint64_t algo_magic = 0x656d756c61746564;
static_assert(sizeof(Algo) <= sizeof(cublasLtMatmulAlgo_t));

size_t element_bytes(cudaDataType type) { return type == CUDA_R_32F ? 4 : 2; }
bool has_bias(const Desc& desc) { return (desc.epilogue & CUBLASLT_EPILOGUE_BIAS) != 0; }
bool has_bias_gradient(const Desc& desc) { return desc.epilogue == CUBLASLT_EPILOGUE_BGRADB; }
bool uses_bias(const Desc& desc) { return has_bias(desc) || has_bias_gradient(desc); }
bool has_aux(const Desc& desc) { return (desc.epilogue & 128) != 0; }
bool same_layout(const Layout& a, const Layout& b) {
  return a.type == b.type && a.rows == b.rows && a.cols == b.cols && a.ld == b.ld && a.batch == b.batch &&
         a.next == b.next;
}

bool is_epilogue(int epilogue) {
  return epilogue == CUBLASLT_EPILOGUE_DEFAULT || epilogue == CUBLASLT_EPILOGUE_BIAS ||
         epilogue == CUBLASLT_EPILOGUE_GELU_AUX || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
         epilogue == CUBLASLT_EPILOGUE_DGELU || epilogue == CUBLASLT_EPILOGUE_BGRADB;
}

// Shapes that fit together, and a combination of types that is emulated.
cublasStatus_t check_problem(const Desc& desc, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  const uint64_t k = desc.op_a == CUBLAS_OP_N ? a.cols : a.rows;
  if ((desc.op_a == CUBLAS_OP_N ? a.rows : a.cols) != d.rows ||
      (desc.op_b == CUBLAS_OP_N ? b.cols : b.rows) != d.cols || (desc.op_b == CUBLAS_OP_N ? b.rows : b.cols) != k ||
      c.rows != d.rows || c.cols != d.cols) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  for (const Layout* l : {&a, &b, &c})
    if (l->batch != d.batch) return CUBLAS_STATUS_INVALID_VALUE;
  if (d.batch < 1 || (d.batch > 1 && d.next < d.ld * int64_t(d.cols))) return CUBLAS_STATUS_INVALID_VALUE;
  if (d.batch > 1 && desc.epilogue != CUBLASLT_EPILOGUE_DEFAULT) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (a.type != b.type || c.type != d.type || (d.type != CUDA_R_32F && d.type != a.type))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  if (desc.compute == CUBLAS_COMPUTE_32F_FAST_TF32 && a.type != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (uses_bias(desc) && desc.bias_type != -1 && desc.bias_type != d.type) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (has_aux(desc)) {
    if (desc.aux_type != -1 && desc.aux_type != d.type) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (desc.aux_ld < int64_t(d.rows) || desc.aux_ld % 8 != 0) return CUBLAS_STATUS_NOT_SUPPORTED;  // as documented
  }
  return CUBLAS_STATUS_SUCCESS;
}

uint64_t hash_problem(const Desc& desc, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  uint64_t hash = 1469598103934665603u;  // FNV-1a, a word at a time
  const auto add = [&](uint64_t word) { hash = (hash ^ word) * 1099511628211u; };
  for (const Layout* l : {&a, &b, &c, &d})
    for (uint64_t word : {uint64_t(l->type), l->rows, l->cols, uint64_t(l->ld), uint64_t(l->batch), uint64_t(l->next)})
      add(word);
  for (uint64_t word : {uint64_t(desc.compute), uint64_t(desc.op_a), uint64_t(desc.op_b), uint64_t(desc.epilogue)})
    add(word);
  return hash;
}

// ----------------------------------------------------------------------------
// The computation

float get(const void* p, cudaDataType type, int64_t i) {
  if (type == CUDA_R_16BF) return float(static_cast<const __nv_bfloat16*>(p)[i]);
  if (type == CUDA_R_16F) return float(static_cast<const __half*>(p)[i]);
  return static_cast<const float*>(p)[i];
}

float as_stored(cudaDataType type, float x) {
  return type == CUDA_R_16BF ? float(__nv_bfloat16(x)) : type == CUDA_R_16F ? float(__half(x)) : x;
}

void set(void* p, cudaDataType type, int64_t i, float value) {
  if (type == CUDA_R_16BF) static_cast<__nv_bfloat16*>(p)[i] = __nv_bfloat16(value);
  else if (type == CUDA_R_16F) static_cast<__half*>(p)[i] = __half(value);
  else static_cast<float*>(p)[i] = value;
}

// Rounds to TF32's 10 bits of mantissa, to nearest, ties away from zero. NaN and infinity are unchanged.
float to_tf32(float x) {
  const uint32_t u = emu::bit_cast<uint32_t>(x);
  return std::isfinite(x) ? emu::bit_cast<float>((u + 0x1000) & ~0x1fffu) : x;
}

// The matrix as fp32 with the same ld: itself, or a converted copy.
const float* as_float(const void* p, const Layout& layout, bool tf32, std::vector<float>& copy) {
  if (layout.type == CUDA_R_32F && !tf32) return static_cast<const float*>(p);
  copy.resize(layout.ld * layout.cols);
  for (uint64_t j = 0; j < layout.cols; j++) {
    for (uint64_t i = 0; i < layout.rows; i++) {
      const float x = get(p, layout.type, j * layout.ld + i);
      copy[j * layout.ld + i] = tf32 ? to_tf32(x) : x;
    }
  }
  return copy.data();
}

// gelu(x) = x/2 (1 + tanh(s (x + 0.044715 x^3))), s = sqrt(2/pi), and its derivative.
constexpr float gelu_scale = 0.7978845608028654f;

float gelu(float x) { return 0.5f * x * (1.0f + tanhf(gelu_scale * (x + 0.044715f * x * x * x))); }

float gelu_derivative(float x) {
  const float t = tanhf(gelu_scale * (x + 0.044715f * x * x * x));
  return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * gelu_scale * (1.0f + 3.0f * 0.044715f * x * x);
}

// One call of cublasLtMatmul. Everything that the host may change after the call is copied.
struct Matmul {
  Desc desc;
  Layout a_layout, b_layout, c_layout, d_layout;
  float alpha, beta;
  const void *a, *b, *c;
  void *d, *workspace;
  Algo algo;
};

// Matrix i of a batch.
const void* matrix_of(const void* p, const Layout& layout, int32_t i) {
  return static_cast<const char*>(p) + i * layout.next * int64_t(element_bytes(layout.type));
}

void check_matrix(const char* operand, const void* p, const Layout& layout) {
  const size_t bytes = element_bytes(layout.type);
  for (int32_t i = 0; i < layout.batch; i++)
    for (uint64_t j = 0; j < layout.cols; j++)
      emu::check_device_range(operand, static_cast<const char*>(matrix_of(p, layout, i)) + j * layout.ld * bytes,
                              layout.rows * bytes);
}

void check_operands(const Matmul& m) {
  check_matrix("cublasLtMatmul: A", m.a, m.a_layout);
  check_matrix("cublasLtMatmul: B", m.b, m.b_layout);
  if (m.beta != 0.0f) check_matrix("cublasLtMatmul: C", m.c, m.c_layout);
  check_matrix("cublasLtMatmul: D", m.d, m.d_layout);
  if (uses_bias(m.desc))
    emu::check_device_range("cublasLtMatmul: bias", m.desc.bias,
                            (has_bias(m.desc) ? m.d_layout.rows : m.d_layout.cols) * element_bytes(m.d_layout.type));
  if (has_aux(m.desc))
    check_matrix("cublasLtMatmul: epilogue's aux", m.desc.aux,
                 {m.d_layout.type, m.d_layout.rows, m.d_layout.cols, m.desc.aux_ld});
  if (m.algo.workspace_bytes != 0)
    emu::check_device_range("cublasLtMatmul: workspace", m.workspace, m.algo.workspace_bytes);
}

// op(A) op(B), column-major without gaps: its parts along k are added up as the algorithm does it.
std::vector<float> product_of(const Matmul& m) {
  const bool tf32 = m.desc.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  const char op_a = m.desc.op_a == CUBLAS_OP_N ? 'N' : 'T', op_b = m.desc.op_b == CUBLAS_OP_N ? 'N' : 'T';
  const int64_t rows = int64_t(m.d_layout.rows), cols = int64_t(m.d_layout.cols), splits = m.algo.splits;
  const int64_t k = int64_t(op_a == 'T' ? m.a_layout.rows : m.a_layout.cols), lda = m.a_layout.ld, ldb = m.b_layout.ld;
  const int64_t next_a = op_a == 'T' ? 1 : lda, next_b = op_b == 'T' ? ldb : 1;  // elements from one k to the next
  std::vector<float> a_copy, b_copy, part(size_t(rows * cols)), sum;
  const float* a = as_float(m.a, m.a_layout, tf32, a_copy);
  const float* b = as_float(m.b, m.b_layout, tf32, b_copy);
  std::vector<int64_t> order;
  for (int64_t split = 0; split < splits; split++) order.push_back(split);
  if (m.algo.reduction == CUBLASLT_REDUCTION_SCHEME_INPLACE) emu::rng.shuffle(order.data(), uint32_t(splits));
  for (int64_t split : order) {
    const int64_t first = split * k / splits, length = (split + 1) * k / splits - first;
    // dnnl_sgemm is row-major, and a column-major matrix read by rows is its transpose: D^T = op(B)^T op(A)^T.
    if (dnnl_sgemm(op_b, op_a, cols, rows, length, 1.0f, b + first * next_b, ldb, a + first * next_a, lda, 0.0f,
                   part.data(), rows) != dnnl_success)
      emu::fatal("oneDNN refused a product of %ld x %ld x %ld", long(rows), long(cols), long(length));
    if (sum.empty()) sum = part;
    else
      for (size_t i = 0; i < sum.size(); i++) sum[i] += part[i];
    const bool rounds = m.algo.reduction == CUBLASLT_REDUCTION_SCHEME_INPLACE ||
                        m.algo.reduction == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
    if (rounds)
      for (float& x : sum) x = as_stored(m.d_layout.type, x);
  }
  return sum;
}

// bias = the sums of op(B) along k.
void sum_bias_gradient(const Matmul& m) {
  const bool transposed = m.desc.op_b != CUBLAS_OP_N;
  const int64_t k = int64_t(transposed ? m.b_layout.cols : m.b_layout.rows), ld = m.b_layout.ld;
  for (int64_t j = 0; j < int64_t(m.d_layout.cols); j++) {
    float sum = 0;
    for (int64_t i = 0; i < k; i++) sum += get(m.b, m.b_layout.type, transposed ? i * ld + j : j * ld + i);
    set(const_cast<void*>(m.desc.bias), m.d_layout.type, j, sum);
  }
}

// One product of a batch.
void run_one(const Matmul& m) {
  if (has_bias_gradient(m.desc)) sum_bias_gradient(m);
  const std::vector<float> product = product_of(m);
  const int64_t rows = int64_t(m.d_layout.rows), cols = int64_t(m.d_layout.cols);
  const cudaDataType type = m.d_layout.type;
  for (int64_t j = 0; j < cols; j++) {
    for (int64_t i = 0; i < rows; i++) {
      float x = m.alpha * product[size_t(j * rows + i)];
      if (m.beta != 0.0f) x += m.beta * get(m.c, type, j * m.c_layout.ld + i);
      if (has_bias(m.desc)) x += get(m.desc.bias, type, i);
      if (m.desc.epilogue == CUBLASLT_EPILOGUE_DGELU) {
        x *= gelu_derivative(get(m.desc.aux, type, j * m.desc.aux_ld + i));
      } else if (has_aux(m.desc)) {
        set(m.desc.aux, type, j * m.desc.aux_ld + i, x);
        x = gelu(x);
      }
      set(m.d, type, j * m.d_layout.ld + i, x);
    }
  }
}

void run(const Matmul& m) {
  // What another operation has stored in the workspace is overwritten.
  if (m.algo.workspace_bytes != 0) emu::fill(m.workspace, 0xff, m.algo.workspace_bytes);
  for (int32_t i = 0; i < m.d_layout.batch; i++) {
    Matmul one = m;
    one.a = matrix_of(m.a, m.a_layout, i), one.b = matrix_of(m.b, m.b_layout, i);
    one.c = matrix_of(m.c, m.c_layout, i), one.d = const_cast<void*>(matrix_of(m.d, m.d_layout, i));
    run_one(one);
  }
  emu::mutable_counters().matmuls++;
}

// The largest power of two, up to 256, that an address is a multiple of.
uint32_t alignment_of(const void* p) { return uint32_t(std::min<uintptr_t>(256, uintptr_t(p) & -uintptr_t(p))); }

void check_alignment(const char* operand, const void* p, uint32_t promised) {
  if (reinterpret_cast<uintptr_t>(p) % promised == 0) return;
  emu::fatal("cublasLtMatmul: %s at %p is not aligned to the %u bytes that were promised when the algorithm was chosen",
             operand, p, promised);
}

// Sets `field` if `bytes` is its size.
template <class T>
cublasStatus_t assign(T& field, const void* value, size_t bytes) {
  if (value == nullptr || bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  memcpy(&field, value, sizeof(T));
  return CUBLAS_STATUS_SUCCESS;
}

// Every matrix of a batch.
void check_alignment(const char* operand, const void* p, const Layout& layout, uint32_t promised) {
  for (int32_t i = 0; i < layout.batch; i++) check_alignment(operand, matrix_of(p, layout, i), promised);
}

template <class T>
cublasStatus_t destroy(T* object) {
  delete object;
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

const char* cublasLtGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
  }
  return "unknown status";
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "the library was not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED: return "the resource allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE: return "an unsupported value or parameter was passed to the function";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "the function failed to launch on the GPU";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "the functionality requested is not supported";
  }
  return "unknown status";
}

size_t cublasLtGetVersion() { return 130000; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = new cublasLtContext;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return destroy(handle); }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute, cudaDataType scale) {
  if (scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  *desc = new Desc{compute};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) { return destroy(desc); }

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return assign(desc->op_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return assign(desc->op_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return assign(desc->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return assign(desc->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return assign(desc->bias_type, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return assign(desc->aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return assign(desc->aux_ld, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE: return assign(desc->aux_type, value, bytes);
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t ld) {
  if (rows == 0 || cols == 0 || ld < int64_t(rows)) return CUBLAS_STATUS_INVALID_VALUE;
  *layout = new Layout{type, rows, cols, ld};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t bytes) {
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return assign(layout->batch, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return assign(layout->next, value, bytes);
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return destroy(layout); }

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new cublasLtMatmulPreferenceOpaque;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) { return destroy(preference); }

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes) {
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return assign(preference->max_workspace_bytes, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return assign(preference->reductions, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return assign(preference->alignment[0], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return assign(preference->alignment[1], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return assign(preference->alignment[2], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return assign(preference->alignment[3], value, bytes);
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int* returned) {
  *returned = 0;
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (requested < 1) return CUBLAS_STATUS_INVALID_VALUE;
  if (!is_epilogue(desc->epilogue)) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (const cublasStatus_t status = check_problem(*desc, *a, *b, *c, *d)) return status;
  // The real one takes null for a pointer with every alignment, and may choose an algorithm that the later pointer does
  // not suit.
  if ((uses_bias(*desc) && desc->bias == nullptr) || (has_aux(*desc) && desc->aux == nullptr))
    return CUBLAS_STATUS_INVALID_VALUE;
  const uint32_t align_bias = uses_bias(*desc) ? alignment_of(desc->bias) : 256,
                 align_aux = has_aux(*desc) ? alignment_of(desc->aux) : 256;
  if (align_bias < 16 || align_aux < 16) return CUBLAS_STATUS_NOT_SUPPORTED;
  for (uint32_t bytes : preference->alignment)
    if (bytes == 0 || (bytes & (bytes - 1)) != 0) return CUBLAS_STATUS_INVALID_VALUE;

  const uint64_t k = desc->op_a == CUBLAS_OP_N ? a->cols : a->rows,
                 part_bytes = uint64_t(d->batch) * d->rows * d->cols * sizeof(float);
  const uint64_t most = preference->max_workspace_bytes, wanted = 1 << 20;  // bytes; uses as much as it may up to this,
                                                                            // and overwrites it
  struct Candidate {
    cublasLtReductionScheme_t reduction;
    uint16_t splits;
  };
  for (const Candidate& candidate : {Candidate{CUBLASLT_REDUCTION_SCHEME_INPLACE, 3},
                                     {CUBLASLT_REDUCTION_SCHEME_NONE, 1},
                                     {CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 2},
                                     {CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 4},
                                     {CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE, 2}}) {
    const bool is_in_place = candidate.reduction == CUBLASLT_REDUCTION_SCHEME_INPLACE;
    const uint64_t least = candidate.splits > 1 && !is_in_place ? candidate.splits * part_bytes : 0;  // of workspace
    const bool is_allowed = (candidate.reduction & ~preference->reductions) == 0;
    if (*returned == requested || !is_allowed || candidate.splits > k || least > most) continue;
    Algo algo = {algo_magic,       hash_problem(*desc, *a, *b, *c, *d), std::max(least, std::min(most, wanted)), {},
                 candidate.splits, uint16_t(candidate.reduction)};
    memcpy(algo.alignment, preference->alignment, sizeof preference->alignment);
    algo.alignment[4] = align_bias, algo.alignment[5] = align_aux;
    cublasLtMatmulHeuristicResult_t& result = results[(*returned)++];
    result = {};
    memcpy(&result.algo, &algo, sizeof algo);
    result.workspaceSize = algo.workspace_bytes;
    result.state = CUBLAS_STATUS_SUCCESS;
    result.wavesCount = 1.0f;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (algo == nullptr)
    emu::fatal("cublasLtMatmul: without an algorithm, which is not emulated; use one that the heuristic returns");
  Algo chosen;
  memcpy(&chosen, algo, sizeof chosen);
  if (chosen.magic != algo_magic) return CUBLAS_STATUS_INVALID_VALUE;
  if (chosen.problem != hash_problem(*desc, *a_layout, *b_layout, *c_layout, *d_layout)) {
    emu::fatal("cublasLtMatmul: the algorithm was chosen for another problem (types, shapes, operations or epilogue "
               "differ)");
  }
  if (workspace_bytes < chosen.workspace_bytes) return CUBLAS_STATUS_INVALID_VALUE;

  Matmul m = {*desc, *a_layout, *b_layout, *c_layout, *d_layout, 0, 0, a, b, c, d, workspace, chosen};
  memcpy(&m.alpha, alpha, sizeof(float));
  memcpy(&m.beta, beta, sizeof(float));
  if (c == d && m.beta != 0.0f && !same_layout(*c_layout, *d_layout)) return CUBLAS_STATUS_INVALID_VALUE;
  check_alignment("A", a, *a_layout, chosen.alignment[0]);
  check_alignment("B", b, *b_layout, chosen.alignment[1]);
  if (m.beta != 0.0f) check_alignment("C", c, *c_layout, chosen.alignment[2]);
  check_alignment("D", d, *d_layout, chosen.alignment[3]);
  if (uses_bias(*desc)) check_alignment("bias", desc->bias, chosen.alignment[4]);
  if (has_aux(*desc)) check_alignment("the epilogue's aux", desc->aux, chosen.alignment[5]);
  if (chosen.workspace_bytes != 0) check_alignment("workspace", workspace, 16);
  check_operands(m);
  const cudaError_t error = emu::enqueue_launch("cublasLtMatmul", stream, [m] {
    check_operands(m);  // again: a graph may be launched after some of them were freed
    run(m);
  });
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

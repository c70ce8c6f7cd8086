// Matrix products with sums in fp32: floats by oneDNN's sgemm; bf16 by bf16_panels.h or, converted to floats, by sgemm.
// Matrices are row-major; op: 'N' as it is, 'T' transposed; ld: elements from one row to the next.
#pragma once
#include <dnnl.h>
#include <omp.h>
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>
#include "llmc/ops/batched_gemm.h"
#include "llmc/base/error.h"
#include "bf16_panels.h"
#include "llmc/ops/bf16.h"
#include "gemm_block.h"
#include "threads.h"
#include "vec.h"

// While this exists, the teams that this thread starts, oneDNN's among them, have one thread.
class OneThread {
 public:
  explicit OneThread(bool wanted = true) : threads_(wanted ? omp_get_max_threads() : 1) {
    if (threads_ > 1) omp_set_num_threads(1);
  }
  ~OneThread() {
    if (threads_ > 1) omp_set_num_threads(threads_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  const int threads_;
};

// The size of the blocks that c (m, n) of a product is cut into: for a core's caches, but small enough for several
// threads.
struct BlockSize {
  int64_t rows, columns;
  bool is_lower = false;  // blocks above c's diagonal are left out
};

// Blocks have at most these sizes: half as many rows where there would be fewer than eight blocks, and columns that are
// as equal as multiples of `width` allow.
inline BlockSize block_size(int64_t m, int64_t n, BlockSize most, int64_t width) {
  const int64_t column_blocks = (n + most.columns - 1) / most.columns;
  const bool are_few = (m + most.rows - 1) / most.rows * column_blocks < 8;
  return {are_few ? most.rows / 2 : most.rows, ((n + column_blocks - 1) / column_blocks + width - 1) / width * width};
}

// A number that no other matmul of this process has, whatever its type.
inline uint64_t next_matmul() {
  static std::atomic<uint64_t> matmuls{0};
  return ++matmuls;
}

// Computes c (m, n) = op(a) op(b) in blocks, each by one thread, which calls multiply(block, a, b, row, column,
// matmul): c[row][column] is the block's first element, a and b point at its operands, and `matmul` is this call's
// number, by which a thread knows an operand that it has packed for the block before. multiply sets block.ldc, alpha,
// accumulate.
template <class T, class Multiply>
void for_each_block(BlockSize size, char op_a, char op_b, int64_t m, int64_t n, int64_t k, const T* a, int64_t lda,
                    const T* b, int64_t ldb, const Multiply& multiply) {
  const uint64_t matmul = next_matmul();
#pragma omp parallel for collapse(2) schedule(dynamic, 1) if (is_worth_threads(0, 2 * m * n * k))
  for (int64_t column = 0; column < n; column += size.columns) {
    for (int64_t row = 0; row < m; row += size.rows) {
      if (size.is_lower && column >= row + size.rows) continue;
      const GemmBlock block =
          {std::min(size.rows, m - row), std::min(size.columns, n - column), k, lda, ldb, 0, 1.0f, op_a, op_b, false};
      multiply(block, a + (op_a == 'N' ? row * lda : row), b + (op_b == 'N' ? column : column * ldb), row, column,
               matmul);
    }
  }
}

// ----------------------------------------------------------------------------
// fp32

// Measured with oneDNN 2.6 on Zen 3, for 256 to 1,024 tokens: other sizes are slower or gain less than 5 %.
inline BlockSize best_block_size(const float*, char op_a, char, int64_t m, int64_t n) {
  return block_size(m, n, {256, op_a == 'T' ? 768 : 384}, 16);
}

// Computes a block, in this thread. sgemm reads the columns of a transposed matrix, and AVX2's reads b where it lies;
// where rows are a multiple of 2 KB apart these compete for a few sets of the caches, which takes two to four times as
// long as with a copy.
inline void multiply_block(const GemmBlock& s, const float* a, const float* b, float* c, uint64_t) {
  CHECK(s.k > 0);  // oneDNN takes no empty sums
  const OneThread alone;
  const int64_t m = s.m, n = s.n, k = s.k, lda = s.lda, ldb = s.ldb;
  const bool copies_a = s.op_a == 'T' && lda >= 512 && n >= 64,
             copies_b = s.op_b == 'N' && ldb % 512 == 0 && n < ldb && m >= 64;
  // How much of k a pass takes: 256 copied rows of this depth are as large as Zen 3's L2.
  const int64_t most_depth = copies_a || copies_b ? 512 : k, lines = 16;
  thread_local std::vector<float> rows_of_a, rows_of_b;
  for (int64_t first = 0; first < k; first += most_depth) {
    const int64_t depth = std::min(most_depth, k - first);
    const float *a_part = a + first * (s.op_a == 'N' ? 1 : lda), *b_part = b + first * (s.op_b == 'N' ? ldb : 1);
    if (copies_a) {
      rows_of_a.resize(std::max(rows_of_a.size(), size_t(m * depth)));
      for (int64_t line = 0; line < depth; line += lines)
        for (int64_t i = 0; i < m; i++)
          for (int64_t j = line; j < std::min(line + lines, depth); j++)
            rows_of_a[size_t(i * depth + j)] = a_part[j * lda + i];
    }
    if (copies_b) {
      rows_of_b.resize(std::max(rows_of_b.size(), size_t(n * depth)));
      for (int64_t j = 0; j < depth; j++)
        memcpy(&rows_of_b[size_t(j * n)], b_part + j * ldb, size_t(n) * sizeof(float));
    }
    CHECK(dnnl_sgemm(copies_a ? 'N' : s.op_a, s.op_b, m, n, depth, s.alpha, copies_a ? rows_of_a.data() : a_part,
                     copies_a ? depth : lda, copies_b ? rows_of_b.data() : b_part, copies_b ? n : ldb,
                     s.accumulate || first > 0 ? 1.0f : 0.0f, c, s.ldc) == dnnl_success);
  }
}

// c (m, n) = alpha op(a) op(b), or c += with `accumulate`; T: float, or bfloat16 (below). sgemm with several threads
// may cut its sums by their number (AVX2's does), and then the bits would depend on it: each thread multiplies blocks
// by itself, which depend on the shape alone.
template <class T>
void gemm(char op_a, char op_b, int64_t m, int64_t n, int64_t k, float alpha, const T* a, int64_t lda, const T* b,
          int64_t ldb, bool accumulate, float* c, int64_t ldc) {
  for_each_block(best_block_size(a, op_a, op_b, m, n), op_a, op_b, m, n, k, a, lda, b, ldb,
                 [=](GemmBlock block, const T* a_block, const T* b_block, int64_t row, int64_t column,
                     uint64_t matmul) {
                   block.alpha = alpha, block.accumulate = accumulate, block.ldc = ldc;
                   multiply_block(block, a_block, b_block, c + row * ldc + column, matmul);
                 });
}

// ----------------------------------------------------------------------------
// bf16

// Whether the program has instructions for products of bf16, AVX512-BF16 or AMX, and may use them: oneDNN asks the CPU,
// and ONEDNN_MAX_CPU_ISA.
inline bool has_bf16_matmuls() {
#ifdef __AVX512BF16__
  static const int isa = int(dnnl_get_effective_cpu_isa());
  return (isa & dnnl_cpu_isa_avx512_core_bf16) == dnnl_cpu_isa_avx512_core_bf16;
#else
  return false;
#endif
}

// An operand in fp32, in a thread's memory. The next block of a matmul often has the same one, which then is not copied
// again.
class FloatCopy {
 public:
  // The copy of x (rows, columns), whose rows are ld apart. `matmul`: a number that each matmul has for itself, or 0:
  // nothing is kept for the next call.
  const float* of(const bfloat16* x, int64_t rows, int64_t columns, int64_t ld, uint64_t matmul) {
    if (matmul != 0 && matmul == matmul_ && x == x_) return floats_.data();
    x_ = x, matmul_ = matmul;
    floats_.resize(std::max(floats_.size(), size_t(rows * columns)));
    for (int64_t i = 0; i < rows; i++) {
#pragma omp simd
      for (int64_t j = 0; j < columns; j++) floats_[i * columns + j] = to_float(x[i * ld + j]);
    }
    return floats_.data();
  }

 private:
  std::vector<float> floats_;
  const bfloat16* x_ = nullptr;
  uint64_t matmul_ = 0;
};

// Computes the block c = alpha op(a) op(b), or += where s.accumulate is set, by converting bf16 to fp32 and calling
// sgemm. Products of bf16 numbers are exact in fp32. `matmul` as in multiply_block, below.
inline void multiply_as_floats(const GemmBlock& s, const bfloat16* a, const bfloat16* b, float* c, uint64_t matmul) {
  constexpr int64_t depth = 1024;  // of k at once, so that the copies stay small
  thread_local FloatCopy a_floats, b_floats;
  const OneThread alone;
  for (int64_t first = 0; first < s.k; first += depth) {
    const int64_t k = std::min(depth, s.k - first);
    const bool a_is_n = s.op_a == 'N', b_is_n = s.op_b == 'N';
    const int64_t a_rows = a_is_n ? s.m : k, a_columns = a_is_n ? k : s.m, b_rows = b_is_n ? k : s.n,
                  b_columns = b_is_n ? s.n : k;
    const float* a_part = a_floats.of(a + first * (a_is_n ? 1 : s.lda), a_rows, a_columns, s.lda, matmul);
    const float* b_part = b_floats.of(b + first * (b_is_n ? s.ldb : 1), b_rows, b_columns, s.ldb, matmul);
    gemm(s.op_a, s.op_b, s.m, s.n, k, s.alpha, a_part, a_columns, b_part, b_columns, s.accumulate || first > 0, c,
         s.ldc);
  }
}

// Whether AMX is used: oneDNN finds the unit, and has asked the kernel for it.
inline bool has_amx() {
  static const int isa = int(dnnl_get_effective_cpu_isa());
  return (isa & dnnl_cpu_isa_avx512_core_amx) == dnnl_cpu_isa_avx512_core_amx && has_bf16_matmuls();
}

// Whether bf16 is converted to be multiplied: without instructions for it, and on Intel's CPUs without AMX, where
// VDPBF16PS has half the rate of fp32's FMA: 85 and 174 GFLOP/s on a core of Emerald Rapids.
inline bool multiplies_as_floats() {
#ifdef __AVX512BF16__
  static const bool is_intel = __builtin_cpu_is("intel");
  return !has_bf16_matmuls() || (is_intel && !has_amx());
#else
  return true;
#endif
}

// Computes a block. `matmul`: the number of the matmul that it belongs to, whose operands do not change meanwhile.
inline void multiply_block(const GemmBlock& s, const bfloat16* a, const bfloat16* b, float* c, uint64_t matmul) {
#ifdef __AVX512BF16__
  if (!multiplies_as_floats()) return bf16_panels::multiply(s, a, b, c, matmul, has_amx());
#endif
  multiply_as_floats(s, a, b, c, matmul);
}

// The best size depends on the shape alone, and so do the bits. Measured with 256 to 1,024 tokens on Zen 5, with
// oneDNN's matmuls then, and for AMX on Sapphire Rapids, whose blocks are larger because packing an operand is a larger
// part of their time; tuning for each shape gains less than 5 %.
inline BlockSize best_block_size(const bfloat16*, char op_a, char op_b, int64_t m, int64_t n) {
  const int64_t most_columns = op_a == 'T' ? 768 : op_b == 'T' && !has_amx() ? 192 : 384;
  BlockSize size = block_size(m, n, {has_amx() ? 512 : 256, most_columns}, 64);
  if (op_a == 'T') size.rows = has_amx() ? 256 : 128;
  return size;
}

// c (m, n) = op(a) op(b), which store(row, column, sums, count) rounds, once: `count` elements of a row from `column`
// on. A thread keeps a block's sums in its cache until then.
template <class Store>
void gemm_and_store(char op_a, char op_b, int64_t m, int64_t n, int64_t k, const bfloat16* a, int64_t lda,
                    const bfloat16* b, int64_t ldb, const Store& store) {
  for_each_block(best_block_size(a, op_a, op_b, m, n), op_a, op_b, m, n, k, a, lda, b, ldb,
                 [&](GemmBlock block, const bfloat16* a_block, const bfloat16* b_block, int64_t row, int64_t column,
                     uint64_t matmul) {
                   thread_local std::vector<float> sums;
                   sums.resize(std::max(sums.size(), size_t(block.m * block.n)));
                   block.ldc = block.n;
                   multiply_block(block, a_block, b_block, sums.data(), matmul);
                   for (int64_t i = 0; i < block.m; i++) store(row + i, column, sums.data() + i * block.n, block.n);
                 });
}

// ----------------------------------------------------------------------------
// Either

// c (m, n) = op(a) op(b), or c += with `accumulate`.
template <class T>
void gemm(char op_a, char op_b, int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb,
          bool accumulate, float* c, int64_t ldc) {
  gemm(op_a, op_b, m, n, k, 1.0f, a, lda, b, ldb, accumulate, c, ldc);
}
inline void gemm(char op_a, char op_b, int64_t m, int64_t n, int64_t k, const bfloat16* a, int64_t lda,
                 const bfloat16* b, int64_t ldb, bool accumulate, bfloat16* c, int64_t ldc) {
  gemm_and_store(op_a, op_b, m, n, k, a, lda, b, ldb,
                 [=](int64_t row, int64_t column, const float* sums, int64_t count) {
                   bfloat16* to = c + row * ldc + column;
                   for_each_vector(count, [=](int64_t j, int64_t n) {
                     FloatVector x = load_vector(sums + j, n);
                     if (accumulate) x += load_vector(to + j, n);
                     store_vector(to + j, x, n);
                   });
                 });
}

// c (n, n) = op(a) op(b), which is symmetric: blocks below the diagonal and on it, and what mirrors them.
template <class T>
void symmetric_gemm(char op_a, char op_b, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb,
                    T* c) {
  constexpr int64_t side = 64;
  for_each_block({side, side, /*is_lower=*/true}, op_a, op_b, n, n, k, a, lda, b, ldb,
                 [=](GemmBlock block, const T* a_block, const T* b_block, int64_t row, int64_t column,
                     uint64_t matmul) {
                   const int64_t rows = block.m, columns = block.ldc = block.n;
                   alignas(64) float sums[side * side];
                   multiply_block(block, a_block, b_block, sums, matmul);
                   for (int64_t i = 0; i < rows; i++)
                     for_each_vector(columns, [&](int64_t j, int64_t count) {
                       store_vector(c + (row + i) * n + column + j, load_vector(&sums[i * columns + j], count), count);
                     });
                   for (int64_t j = 0; j < columns && row > column; j++) {
#pragma omp simd
                     for (int64_t i = 0; i < rows; i++)
                       from_float(c[(column + j) * n + row + i], sums[i * columns + j]);
                   }
                 });
}

// c_i = op(a_i) op(b_i) for all matrices of a batch, one after the other, as llmc/ops/batched_gemm.h says.
template <class T>
void gemm(const BatchedGemm& s, const T* a, const T* b, T* c) {
  const int64_t lda = s.op_a == 'N' ? s.k : s.m, ldb = s.op_b == 'N' ? s.n : s.k;
  for (int64_t i = 0; i < s.batch; i++, a += s.m * s.k, b += s.k * s.n, c += s.m * s.n)
    if (s.is_symmetric) symmetric_gemm(s.op_a, s.op_b, s.n, s.k, a, lda, b, ldb, c);
    else gemm(s.op_a, s.op_b, s.m, s.n, s.k, a, lda, b, ldb, false, c, s.n);
}

// c (m, n) = op(a) op(b) + bias (n).
inline void gemm_with_bias(char op_a, char op_b, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda,
                           const float* b, int64_t ldb, const float* bias, float* c, int64_t ldc) {
#pragma omp parallel for schedule(static) if (is_worth_threads(4 * m * n))
  for (int64_t i = 0; i < m; i++) memcpy(c + i * ldc, bias, size_t(n) * sizeof(float));
  gemm(op_a, op_b, m, n, k, a, lda, b, ldb, true, c, ldc);
}
inline void gemm_with_bias(char op_a, char op_b, int64_t m, int64_t n, int64_t k, const bfloat16* a, int64_t lda,
                           const bfloat16* b, int64_t ldb, const bfloat16* bias, bfloat16* c, int64_t ldc) {
  gemm_and_store(op_a, op_b, m, n, k, a, lda, b, ldb,
                 [=](int64_t row, int64_t column, const float* sums, int64_t count) {
                   bfloat16* to = c + row * ldc + column;
                   for_each_vector(count, [=](int64_t j, int64_t n) {
                     store_vector(to + j, load_vector(sums + j, n) + load_vector(bias + column + j, n), n);
                   });
                 });
}

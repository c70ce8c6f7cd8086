// Products of attention's queries with keys, and of probabilities with values: by matmuls, unless the queries are few,
// as where a text is generated.
#pragma once
#include <algorithm>
#include <vector>
#include "llmc/ops/attention_args.h"
#include "attention_tiles.h"
#include "few_rows.h"
#include "gemm.h"
#include "vec.h"

// Whether attention has few queries: a matmul of so few rows takes longer than reading k and v.
inline bool has_few_queries(const AttentionArgs& a) { return a.queries() <= most_few_queries; }

// How many rows ahead k and v are prefetched. The rows of a head are far apart, with other heads' rows between them.
constexpr int64_t prefetch_rows = 16;

// products (rows, stride), of them the first `columns`, = scale q x^T; q (rows, HS) is of few queries, x (columns, HS).
inline void multiply_few_queries(const Rows<const floatX>& q, const Rows<const floatX>& x, int64_t rows,
                                 int64_t columns, int64_t HS, float scale, const Rows<float>& products) {
  thread_local std::vector<float> query;
  query.resize(size_t(HS));
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t i = 0; i < HS; i++) query[i] = to_float(q.data[r * q.stride + i]);
    for (int64_t j = 0; j < columns; j++)
      products.data[r * products.stride + j] = scale * dot_product(query.data(), x.data + j * x.stride, HS,
                                                                   size_t(prefetch_rows * x.stride) * sizeof(floatX));
  }
}

// products (rows, stride), of them the first `columns`, = scale q x^T, of the block's queries q (rows, HS) and
// x (columns, HS).
inline void multiply_queries(const AttentionArgs& a, const Rows<const floatX>& q, const Rows<const floatX>& x,
                             int64_t rows, int64_t columns, float scale, const Rows<float>& products) {
  if (has_few_queries(a)) return multiply_few_queries(q, x, rows, columns, a.HS, scale, products);
  gemm('N', 'T', rows, columns, a.HS, scale, q.data, q.stride, x.data, x.stride, false, products.data, products.stride);
}

// sum (HS) = or += the sum of weights[j] times row(j) (HS), for each j < rows.
template <class Element, class Row>
void add_weighted_rows(float* sum, const Element* weights, const Row& row, int64_t rows, int64_t HS, bool accumulate) {
  constexpr int64_t width = 64;  // channels whose sums stay in registers
  for (int64_t first = 0; first < HS; first += width) {
    float sums[width] = {};
    const int64_t n = std::min(width, HS - first);
    for (int64_t j = 0; j < rows; j++) {
      const floatX *x = row(j) + first, *later = row(std::min(j + prefetch_rows, rows - 1)) + first;
      for (size_t line = 0; line < size_t(n) * sizeof(floatX); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(later) + line);
      const float weight = to_float(weights[j]);
#pragma omp simd
      for (int64_t i = 0; i < n; i++) sums[i] += weight * to_float(x[i]);
    }
    for (int64_t i = 0; i < n; i++) sum[first + i] = (accumulate ? sum[first + i] : 0.0f) + sums[i];
  }
}

// sums (rows, HS) = or += p v, of p (rows, key_block) and a tile's v (keys, HS).
inline void add_values(const Rows<float>& sums, const floatX* p, const Rows<const floatX>& v, int64_t rows,
                       int64_t keys, int64_t HS, bool few_queries, bool accumulate) {
  if (!few_queries)
    return gemm('N', 'N', rows, HS, keys, p, key_block, v.data, v.stride, accumulate, sums.data, sums.stride);
  for (int64_t r = 0; r < rows; r++)
    add_weighted_rows(
        sums.data + r * sums.stride, p + r * key_block, [=](int64_t j) { return v.data + j * v.stride; }, keys, HS,
        accumulate);
}

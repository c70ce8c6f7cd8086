// What relative positions add to attention on the CPU. The rows of r for a block's queries and a tile's keys are
// multiplied with q' in one matmul, which has a column for each distance; a query's scores are neighbouring columns of
// its row, from an offset that is one less than the offset of the query before it.
#pragma once
#include <algorithm>
#include <vector>
#include "llmc/ops/attention_args.h"
#include "attention_decode.h"
#include "attention_tiles.h"
#include "gemm.h"
#include "threads.h"
#include "vec.h"

// The rows of r for some queries and the keys of a tile. That of the first key and the last query is row `first`, which
// may be negative; those that exist are [begin, end). The row of query q and key j, as numbers in the block and in the
// tile, is first + j + (queries - 1 - q).
struct DistanceRows {
  int64_t first, begin, end;

  int64_t count() const { return end - begin; }
};
inline DistanceRows distance_rows(const HeadPositions& at, const KeyTile& tile, int64_t q0, int64_t rows) {
  const int64_t distances = at.a.relative.distances, first = tile.first - (q0 + rows - 1) + distances - 1;
  const DistanceRows found = {first, std::max<int64_t>(first, 0), std::min(first + tile.keys + rows - 1, distances)};
  CHECK(at.stride == 1 && tile.numbers == nullptr && found.begin < found.end);
  return found;
}

// The head's part of a row of r, of its gradient, of q' or of that one's gradient.
template <class Element>
Rows<Element> head_rows(const HeadPositions& at, Element* x, int64_t row) {
  const int64_t C = at.a.NH * at.a.HS;
  return {x + row * C + at.head * at.a.HS, C};
}

// Products of a block's queries and rows of r, or gradients of them (query_block, query_block + key_block): column i
// belongs to the row DistanceRows::first + i.
constexpr int64_t distance_block = query_block + key_block;

// scores (rows, key_block) += q' r^T, scaled, of the queries from q0 on and a tile's keys. Keys that are hidden may
// have anything added.
inline void add_relative_scores(const HeadPositions& at, const KeyTile& tile, int64_t q0, int64_t rows, float* scores) {
  thread_local std::vector<float> products(query_block * distance_block);
  const AttentionArgs& a = at.a;
  const DistanceRows distances = distance_rows(at, tile, q0, rows);
  const Rows<const floatX> q = head_rows(at, a.relative.q, at.query_row(q0)),
                           r = head_rows(at, a.relative.r, distances.begin);
  float* existing = products.data() + distances.begin - distances.first;
  multiply_queries(a, q, r, rows, distances.count(), score_scale(a), {existing, distance_block});
  for (int64_t i = 0; i < rows; i++) {
    const int64_t shift = distances.first + rows - 1 - i;  // the row of r of the tile's first key
    const int64_t begin = std::max<int64_t>(0, distances.begin - shift),
                  end = std::min(tile.keys, distances.end - shift);
    const float* products_of_row = products.data() + i * distance_block + rows - 1 - i;
    float* scores_of_row = scores + i * key_block;
#pragma omp simd
    for (int64_t j = begin; j < end; j++) scores_of_row[j] += products_of_row[j];
  }
}

// From the gradients of a tile's scores, dscores (rows, key_block), which are 0 for keys that are hidden: dq (rows, HS)
// = or +=, the gradient of q', and the head's rows of dr +=.
inline void relative_backward(const HeadPositions& at, const KeyTile& tile, int64_t q0, int64_t rows,
                              const floatX* dscores, const Rows<float>& dq, bool accumulate) {
  thread_local std::vector<floatX> dproducts(query_block * distance_block);
  const AttentionArgs& a = at.a;
  const DistanceRows distances = distance_rows(at, tile, q0, rows);
  const int64_t columns = rows - 1 + tile.keys;
  for (int64_t i = 0; i < rows; i++) {
    floatX* row = dproducts.data() + i * distance_block;
    const int64_t first = rows - 1 - i;
    std::fill(row, row + first, floatX(0.0f));
    std::copy_n(dscores + i * key_block, tile.keys, row + first);
    std::fill(row + first + tile.keys, row + columns, floatX(0.0f));
  }
  const Rows<const floatX> q = head_rows(at, a.relative.q, at.query_row(q0)),
                           r = head_rows(at, a.relative.r, distances.begin);
  const Rows<float> dr = head_rows(at, a.relative.dr_of_sequences, at.b * a.relative.distances + distances.begin);
  const floatX* existing = dproducts.data() + distances.begin - distances.first;
  gemm('N', 'N', rows, a.HS, distances.count(), existing, distance_block, r.data, r.stride, accumulate, dq.data,
       dq.stride);
  gemm('T', 'N', distances.count(), a.HS, rows, 1.0f, existing, distance_block, q.data, q.stride, true, dr.data,
       dr.stride);
}

// dr (distances, NH * HS) = the sum of the sequences' parts, in their order.
inline void sum_distance_gradients(const AttentionArgs& a) {
  const int64_t C = a.NH * a.HS, D = a.relative.distances;
  const float scale = score_gradient_scale(a);
#pragma omp parallel for schedule(static) if (is_worth_threads(int64_t(sizeof(float)) * (a.B + 1) * D * C))
  for (int64_t row = 0; row < D; row++) {
    thread_local std::vector<float> sums;
    sums.assign(size_t(C), 0.0f);
    for (int64_t b = 0; b < a.B; b++) {
      const float* part = a.relative.dr_of_sequences + (b * D + row) * C;
#pragma omp simd
      for (int64_t c = 0; c < C; c++) sums[c] += part[c];
    }
    for (int64_t c = 0; c < C; c++) from_float(a.relative.dr[row * C + c], scale * sums[c]);
  }
}

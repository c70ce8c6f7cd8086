// Sums over rows, in an order that does not depend on the order in which blocks ran: the second half of one, where
// blocks' partial sums are added up; and sums over sequences.
#pragma once
#include <cstdint>
#include "vec.h"

constexpr int column_sums_warps = 32;

// first (columns) += the sum over `rows` of the first `columns` columns of partial, whose rows are `stride` apart;
// second (columns) += the sum of the columns after these. blockIdx.y says which. A block owns 32 columns, a warp every
// 32nd row of them, a lane one column, so that loads are coalesced and eight are in flight. The first warp adds up the
// warps' sums (32, 32) in order.
__global__ void __launch_bounds__(column_sums_warps* warp_size)
    add_column_sums_kernel(float* first, float* second, const float* partial, int rows, int64_t stride, int columns) {
  float* sums = reinterpret_cast<float*>(shared_memory);
  const int warp = int(threadIdx.x) / warp_size, lane = int(threadIdx.x) % warp_size;
  const int column = int(blockIdx.x) * warp_size + lane;
  partial += blockIdx.y * columns;
  float sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int row = warp; row < rows; row += column_sums_warps) sum += partial[row * stride + column];
  }
  sums[warp * warp_size + lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= columns) return;
  sum = 0;
  for (int w = 0; w < column_sums_warps; w++) sum += sums[w * warp_size + lane];
  (blockIdx.y == 0 ? first : second)[column] += sum;
}

// first (columns) += the sum over `rows` of columns [0, columns) of partial (rows, stride); second (columns) += the sum
// of columns [columns, 2 columns), unless it is null.
inline void add_column_sums(float* first, float* second, const float* partial, int64_t rows, int64_t stride,
                            int64_t columns) {
  const dim3 grid(unsigned(ceil_div(columns, warp_size)), second != nullptr ? 2 : 1);
  launch(add_column_sums_kernel, grid, column_sums_warps * warp_size, column_sums_warps * warp_size * sizeof(float),
         first, second, partial, rows, stride, columns);
}

// sum (n) = the sum over the sequences of x (B, n), in their order; += with `accumulates`. A thread owns eight
// neighbouring elements, so that loads are coalesced and, unrolled, several are in flight.
template <bool accumulates, class Sum, class Element>
__global__ void __launch_bounds__(element_threads)
    sum_of_sequences_kernel(Sum* sum, const Element* x, int64_t B, int64_t n) {
  const int64_t i = first_element();
  if (i >= n) return;
  float sums[8] = {};
  if (accumulates) load8(sums, sum + i);
#pragma unroll 4
  for (int64_t b = 0; b < B; b++) {
    float y[8];
    load8(y, x + b * n + i);
    for (int j = 0; j < 8; j++) sums[j] += y[j];
  }
  store8(sum + i, sums);
}

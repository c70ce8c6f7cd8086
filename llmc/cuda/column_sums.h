// The second half of a sum over rows: the blocks' partial sums are added up, in an order that does not depend on the
// order in which blocks ran.
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

// first (columns) += the sum over `rows` of partial (rows, stride), its columns [0, columns); second (columns) += that
// of [columns, 2 columns), unless it is null.
inline void add_column_sums(float* first, float* second, const float* partial, int64_t rows, int64_t stride,
                            int64_t columns) {
  const dim3 grid(unsigned(ceil_div(columns, warp_size)), second != nullptr ? 2 : 1);
  launch(add_column_sums_kernel, grid, column_sums_warps * warp_size, column_sums_warps * warp_size * sizeof(float),
         first, second, partial, rows, stride, columns);
}

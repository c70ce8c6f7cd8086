// The operations of Muon beside the matmuls of its iteration; llmc/muon.h has the formulas. All pointers are device
// pointers.
#pragma once
#include <algorithm>         // std::max
#include <cmath>             // std::isnan, std::sqrt
#include <cstdint>           // int64_t
#include "llmc/muon.h"       // MuonStep
#include "llmc/precision.h"  // floatX, has_master_weights
#include "device.h"          // gpu
#include "launch.h"          // launch, shared_memory
#include "optimizer.h"       // ParameterChunk, StepStats, chunk_threads, grad_scale, is_finite
#include "vec.h"             // from_float, to_float, ceil_div

// A block owns a chunk, a thread every 256th element, so that a warp's accesses are of 128 consecutive bytes.
__global__ void __launch_bounds__(chunk_threads)
    muon_momentum_kernel(float* grads, float* m, const ParameterChunk* chunks, MuonStep s, const StepStats* sums) {
  float* scale = reinterpret_cast<float*>(shared_memory);
  if (threadIdx.x == 0) *scale = grad_scale(*sums, s.grad_clip);
  __syncthreads();
  if (std::isnan(*scale)) return;
  const ParameterChunk chunk = chunks[blockIdx.x];
  for (int i = int(threadIdx.x); i < chunk.count; i += chunk_threads) {
    const float g = grads[chunk.begin + i] * *scale, m_new = s.momentum * m[chunk.state + i] + (1.0f - s.momentum) * g;
    m[chunk.state + i] = m_new;
    grads[chunk.begin + i] = s.momentum * m_new + (1.0f - s.momentum) * g;
  }
}

// A block owns a tile of 32 x 32 elements of a matrix and its transpose, a thread four of them. Through shared memory,
// whose rows have one element more than a tile so that they begin in different banks, both are read and written along
// their rows.
constexpr int muon_tile = 32, muon_tile_rows = 8;
constexpr size_t muon_tile_bytes = muon_tile * (muon_tile + 1) * sizeof(float);
inline dim3 muon_tiles(int64_t rows, int64_t columns) {
  return dim3(unsigned(ceil_div(columns, muon_tile)), unsigned(ceil_div(rows, muon_tile)));
}

// tile [i][j] = read(index) at row first_row + i, column first_column + j of a matrix with so many rows and columns
template <class Read>
__device__ inline void muon_read_tile(float (*tile)[muon_tile + 1], int64_t rows, int64_t columns, int64_t first_row,
                                      int64_t first_column, Read read) {
  const int64_t column = first_column + threadIdx.x;
  for (int i = int(threadIdx.y); i < muon_tile; i += muon_tile_rows)
    if (first_row + i < rows && column < columns) tile[i][threadIdx.x] = read((first_row + i) * columns + column);
  __syncthreads();
}

__global__ void __launch_bounds__(muon_tile* muon_tile_rows)
    muon_normalize_kernel(floatX* x, const float* u, const double* squares, int64_t rows, int64_t columns) {
  auto* tile = reinterpret_cast<float(*)[muon_tile + 1]>(shared_memory);
  const int64_t first_row = int64_t(blockIdx.y) * muon_tile, first_column = int64_t(blockIdx.x) * muon_tile;
  const float scale = 1.0f / fmaxf(sqrtf(float(*squares)), float(muon_least_norm));
  muon_read_tile(tile, rows, columns, first_row, first_column, [=](int64_t i) { return u[i] * scale; });
  const bool transposed = rows > columns;
  const int64_t lines = transposed ? columns : rows, line_length = transposed ? rows : columns;
  const int64_t first_line = transposed ? first_column : first_row,
                place = (transposed ? first_row : first_column) + threadIdx.x;
  for (int i = int(threadIdx.y); i < muon_tile; i += muon_tile_rows)
    if (first_line + i < lines && place < line_length)
      from_float(x[(first_line + i) * line_length + place], transposed ? tile[threadIdx.x][i] : tile[i][threadIdx.x]);
}

// A thread owns an element.
__global__ void __launch_bounds__(chunk_threads)
    muon_polynomial_kernel(floatX* p, const floatX* a, const floatX* a_squared, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * chunk_threads + threadIdx.x;
  if (i < n * n)
    from_float(p[i], muon_b * to_float(a[i]) + muon_c * to_float(a_squared[i]) + (i / n == i % n ? muon_a : 0.0f));
}

struct MuonFactors {
  float keep, step;  // of the weights and of x
};

// weights: the masters, or params themselves if they are float.
__global__ void __launch_bounds__(muon_tile* muon_tile_rows)
    muon_update_kernel(floatX* params, float* weights, const floatX* x, int64_t rows, int64_t columns, MuonFactors s,
                       const StepStats* sums) {
  if (!is_finite(*sums)) return;
  auto* tile = reinterpret_cast<float(*)[muon_tile + 1]>(shared_memory);
  const int64_t first_row = int64_t(blockIdx.y) * muon_tile, first_column = int64_t(blockIdx.x) * muon_tile;
  const bool transposed = rows > columns;
  const auto read = [=](int64_t i) { return to_float(x[i]); };
  if (transposed) muon_read_tile(tile, columns, rows, first_column, first_row, read);
  else muon_read_tile(tile, rows, columns, first_row, first_column, read);
  const int64_t column = first_column + threadIdx.x;
  for (int i = int(threadIdx.y); i < muon_tile; i += muon_tile_rows) {
    if (first_row + i >= rows || column >= columns) continue;
    const int64_t at = (first_row + i) * columns + column;
    weights[at] = weights[at] * s.keep - s.step * (transposed ? tile[threadIdx.x][i] : tile[i][threadIdx.x]);
    if constexpr (has_master_weights) from_float(params[at], weights[at]);
  }
}

// grads = u and m = the new momentum, over the chunks. Nothing changes if the loss or the norm is not finite.
inline void muon_momentum(float* grads, float* m, const ParameterChunk* chunks, int64_t num_chunks, const MuonStep& s,
                          const StepStats* sums) {
  launch(muon_momentum_kernel, dim3(unsigned(num_chunks)), dim3(chunk_threads), sizeof(float), gpu().stream, grads, m,
         chunks, s, sums);
}

// x = u (rows, columns) / ||u||, transposed if there are more rows than columns. squares (1): ||u||^2.
inline void muon_normalize(floatX* x, const float* u, const double* squares, int64_t rows, int64_t columns) {
  launch(muon_normalize_kernel, muon_tiles(rows, columns), dim3(muon_tile, muon_tile_rows), muon_tile_bytes,
         gpu().stream, x, u, squares, rows, columns);
}

// p (n, n) = muon_a I + muon_b a + muon_c a_squared
inline void muon_polynomial(floatX* p, const floatX* a, const floatX* a_squared, int64_t n) {
  launch(muon_polynomial_kernel, dim3(unsigned(ceil_div(n * n, chunk_threads))), dim3(chunk_threads), 0, gpu().stream,
         p, a, a_squared, n);
}

// Moves a matrix by x, the result of the iteration, transposed if there are more rows than columns. params and master
// point to the matrix in the arenas of that name; master is not used if floatX is float. Nothing changes if the loss or
// the norm is not finite.
inline void muon_update(floatX* params, float* master, const floatX* x, int64_t rows, int64_t columns,
                        const MuonStep& s, const StepStats* sums) {
  float* weights = has_master_weights ? master : reinterpret_cast<float*>(params);
  const MuonFactors factors = {1.0f - s.learning_rate * s.weight_decay,
                               s.learning_rate * 0.2f * std::sqrt(float(std::max(rows, columns)))};
  launch(muon_update_kernel, muon_tiles(rows, columns), dim3(muon_tile, muon_tile_rows), muon_tile_bytes, gpu().stream,
         params, weights, x, rows, columns, factors, sums);
}

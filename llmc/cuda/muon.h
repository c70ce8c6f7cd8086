// The operations of Muon beside the matmuls of its iteration: those of llmc/cpu/muon.h.
#pragma once
#include <cmath>
#include <cstdint>
#include "llmc/ops/muon_args.h"
#include "llmc/ops/precision.h"
#include "device.h"
#include "launch.h"
#include "optimizer.h"
#include "vec.h"

// What the iteration's workspaces may take, in elements of floatX, if that is enough for a matrix: in bf16 128 MiB,
// with which GPT-2 124M has its matrices in six batches. A batch that fills the GPU gains nothing from more. By
// batches an update of GPT-2 124M with SLA is 134 launches, matrix by matrix it would be 1,729.
constexpr int64_t muon_workspace_elements = int64_t(64) << 20;

// One thread.
__global__ void muon_set_step_kernel(MuonStep* place, MuonStep s) { *place = s; }

// A block owns a chunk, a thread every 256th element, so that a warp's accesses are of 128 consecutive bytes.
// chunk_squares (chunks): the sum of u^2 of each.
__global__ void __launch_bounds__(chunk_threads) muon_momentum_kernel(MuonArgs args, double* chunk_squares) {
  auto* sums = reinterpret_cast<double*>(shared_memory);
  float* scale = reinterpret_cast<float*>(sums + chunk_threads / warp_size);
  if (threadIdx.x == 0) *scale = grad_scale(*args.sums, args.step->grad_clip);
  __syncthreads();
  if (std::isnan(*scale)) return;
  const ParameterChunk chunk = args.chunks[blockIdx.x];
  const float momentum = args.step->momentum;
  float *grads = args.grads + chunk.begin, *m = args.m + chunk.state;
  double squares = 0;
  for (int i = int(threadIdx.x); i < chunk.count; i += chunk_threads) {
    const float g = grads[i] * *scale, m_new = momentum * m[i] + (1.0f - momentum) * g;
    const float u = momentum * m_new + (1.0f - momentum) * g;
    m[i] = m_new, grads[i] = u;
    squares += double(u) * double(u);
  }
  squares = block_sum(squares, sums);
  if (threadIdx.x == 0) chunk_squares[blockIdx.x] = squares;
}

// A block owns a matrix, whose chunks' squares it adds up; a thread every 256th of them.
__global__ void __launch_bounds__(chunk_threads) muon_squares_kernel(MuonArgs args, const double* chunk_squares) {
  const MuonMatrix& matrix = args.matrices[blockIdx.x];
  const double sum =
      block_sum_of(chunk_squares + matrix.first_chunk, matrix.num_chunks, reinterpret_cast<double*>(shared_memory));
  if (threadIdx.x == 0) args.squares[blockIdx.x] = sum;
}

// A block owns a tile of 32 x 32 elements of X of one matrix, and what they are of the matrix itself, which is X or its
// transpose; a thread four of them. Through shared memory, whose rows have one element more than a tile so that they
// begin in different banks, both are read and written along their rows.
constexpr int muon_tile = 32, muon_tile_rows = 8;
constexpr size_t muon_tile_bytes = muon_tile * (muon_tile + 1) * sizeof(float);
inline dim3 muon_tiles(const MuonBatch& batch) {
  return dim3(unsigned(ceil_div(batch.length, muon_tile)), unsigned(ceil_div(batch.n, muon_tile)),
              unsigned(batch.count));
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
    muon_normalize_kernel(floatX* x, MuonArgs args, MuonBatch batch) {
  auto* tile = reinterpret_cast<float(*)[muon_tile + 1]>(shared_memory);
  const int64_t i_matrix = batch.first + blockIdx.z;
  const MuonMatrix matrix = args.matrices[i_matrix];
  const bool transposed = matrix.rows > matrix.columns;
  const int64_t first_line = int64_t(blockIdx.y) * muon_tile, first_place = int64_t(blockIdx.x) * muon_tile;
  const float* u = args.grads + matrix.begin;
  const float scale = 1.0f / fmaxf(sqrtf(float(args.squares[i_matrix])), float(muon_least_norm));
  muon_read_tile(tile, matrix.rows, matrix.columns, transposed ? first_place : first_line,
                 transposed ? first_line : first_place, [=](int64_t i) { return u[i] * scale; });
  x += blockIdx.z * batch.n * batch.length;
  const int64_t place = first_place + threadIdx.x;
  for (int i = int(threadIdx.y); i < muon_tile; i += muon_tile_rows)
    if (first_line + i < batch.n && place < batch.length)
      from_float(x[(first_line + i) * batch.length + place], transposed ? tile[threadIdx.x][i] : tile[i][threadIdx.x]);
}

// A block owns 256 elements of a matrix, a thread one of them.
__global__ void __launch_bounds__(chunk_threads)
    muon_polynomial_kernel(floatX* p, const floatX* a, const floatX* a_squared, int64_t n) {
  const int64_t within = int64_t(blockIdx.x) * chunk_threads + threadIdx.x, i = blockIdx.y * n * n + within;
  if (within < n * n)
    from_float(p[i],
               muon_b * to_float(a[i]) + muon_c * to_float(a_squared[i]) + (within / n == within % n ? muon_a : 0.0f));
}

__global__ void __launch_bounds__(muon_tile* muon_tile_rows)
    muon_update_kernel(MuonArgs args, const floatX* x, MuonBatch batch) {
  if (!is_finite(*args.sums)) return;
  auto* tile = reinterpret_cast<float(*)[muon_tile + 1]>(shared_memory);
  const MuonMatrix matrix = args.matrices[batch.first + blockIdx.z];
  const bool transposed = matrix.rows > matrix.columns;
  const int64_t first_line = int64_t(blockIdx.y) * muon_tile, first_place = int64_t(blockIdx.x) * muon_tile;
  x += blockIdx.z * batch.n * batch.length;
  muon_read_tile(tile, batch.n, batch.length, first_line, first_place, [=](int64_t i) { return to_float(x[i]); });
  floatX* params = args.params + matrix.begin;
  float* weights = has_master_weights ? args.master + matrix.state : reinterpret_cast<float*>(params);
  const MuonStep s = *args.step;
  const float keep = 1.0f - s.learning_rate * s.weight_decay,
              step = s.learning_rate * 0.2f * sqrtf(float(batch.length));
  const int64_t first_row = transposed ? first_place : first_line,
                column = (transposed ? first_line : first_place) + threadIdx.x;
  for (int i = int(threadIdx.y); i < muon_tile; i += muon_tile_rows) {
    if (first_row + i >= matrix.rows || column >= matrix.columns) continue;
    const int64_t at = (first_row + i) * matrix.columns + column;
    weights[at] = weights[at] * keep - step * (transposed ? tile[threadIdx.x][i] : tile[i][threadIdx.x]);
    if constexpr (has_master_weights) from_float(params[at], weights[at]);
  }
}

// Calls f(part) for parts of a batch; here it is one part.
template <class F>
void for_each_part(const MuonBatch& batch, F f) {
  f(batch);
}

// *place = s, which the operations after it read: a CUDA graph of them need not be captured again for another step.
inline void muon_set_step(MuonStep* place, const MuonStep& s) {
  launch(muon_set_step_kernel, dim3(1), dim3(1), 0, gpu().stream, place, s);
}

inline void muon_momentum(const MuonArgs& args) {
  constexpr size_t warps = chunk_threads / warp_size;
  double* chunk_squares = device_scratch<double>(size_t(args.num_chunks));
  launch(muon_momentum_kernel, dim3(unsigned(args.num_chunks)), dim3(chunk_threads), (warps + 1) * sizeof(double),
         gpu().stream, args, chunk_squares);
  launch(muon_squares_kernel, dim3(unsigned(args.num_matrices)), dim3(chunk_threads), warps * sizeof(double),
         gpu().stream, args, static_cast<const double*>(chunk_squares));
}

inline void muon_normalize(floatX* x, const MuonArgs& args, const MuonBatch& batch) {
  launch(muon_normalize_kernel, muon_tiles(batch), dim3(muon_tile, muon_tile_rows), muon_tile_bytes, gpu().stream, x,
         args, batch);
}

inline void muon_polynomial(floatX* p, const floatX* a, const floatX* a_squared, const MuonBatch& batch) {
  launch(muon_polynomial_kernel, dim3(unsigned(ceil_div(batch.n * batch.n, chunk_threads)), unsigned(batch.count)),
         dim3(chunk_threads), 0, gpu().stream, p, a, a_squared, batch.n);
}

inline void muon_update(const MuonArgs& args, const floatX* x, const MuonBatch& batch) {
  launch(muon_update_kernel, muon_tiles(batch), dim3(muon_tile, muon_tile_rows), muon_tile_bytes, gpu().stream, args, x,
         batch);
}

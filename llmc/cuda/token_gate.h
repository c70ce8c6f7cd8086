// Gates of tokens: the operations of llmc/cpu/token_gate.h. Memory bounds them. C is a multiple of 8, and rows are
// 16-byte aligned.
#pragma once
#include <cstdint>
#include "column_sums.h"
#include "vec.h"

constexpr int token_threads = 256;

// The row of the calling warp, in kernels whose blocks own 8 rows.
__device__ inline int64_t warp_row() {
  return int64_t(blockIdx.x) * (token_threads / warp_size) + threadIdx.x / warp_size;
}
inline dim3 warp_row_grid(int64_t N) { return dim3(unsigned(ceil_div(N, token_threads / warp_size))); }

// A warp owns a row.
__global__ void __launch_bounds__(token_threads)
    token_gate_forward_kernel(float* gate, const floatX* x, const floatX* weight, const floatX* bias, int64_t N,
                              int C) {
  const int64_t row = warp_row();
  const int lane = int(threadIdx.x) % warp_size;
  if (row >= N) return;
  float sum = 0;
  for (int c = lane * 8; c < C; c += warp_size * 8) {
    float a[8], b[8];
    load8(a, x + row * C + c);
    load8(b, weight + c);
    for (int i = 0; i < 8; i++) sum += a[i] * b[i];
  }
  sum = warp_sum(sum);
  if (lane == 0) gate[row] = 1 / (1 + expf(-(sum + (bias != nullptr ? to_float(bias[0]) : 0.0f))));
}

// dx +=, dgate becomes the gradient of the sigmoid's argument. A warp owns a row.
__global__ void __launch_bounds__(token_threads)
    token_gate_dx_kernel(floatX* dx, float* dgate, const float* gate, const floatX* weight, int64_t N, int C) {
  const int64_t row = warp_row();
  const int lane = int(threadIdx.x) % warp_size;
  if (row >= N) return;
  const float d = dgate[row] * gate[row] * (1 - gate[row]);
  __syncwarp();  // all lanes have read dgate
  if (lane == 0) dgate[row] = d;
  for (int c = lane * 8; c < C; c += warp_size * 8) {
    float a[8], b[8];
    load8(a, dx + row * C + c);
    load8(b, weight + c);
    for (int i = 0; i < 8; i++) a[i] += d * b[i];
    store8(dx + row * C + c, a);
  }
}

// dweight (C), dbias (1) += the sums over rows of d * x, d. A block owns 32 columns, and the column after x's is the
// bias's; a warp every 32nd row of them, a lane a column. The first warp adds up the warps' sums in order.
__global__ void __launch_bounds__(column_sums_warps* warp_size)
    token_gate_dweight_kernel(float* dweight, float* dbias, const float* d, const floatX* x, int64_t N, int C) {
  float* sums = reinterpret_cast<float*>(shared_memory);
  const int warp = int(threadIdx.x) / warp_size, lane = int(threadIdx.x) % warp_size;
  const int column = int(blockIdx.x) * warp_size + lane;
  float sum = 0;
  if (column <= C)
    for (int64_t row = warp; row < N; row += column_sums_warps)
      sum += d[row] * (column < C ? to_float(x[row * C + column]) : 1.0f);
  sums[warp * warp_size + lane] = sum;
  __syncthreads();
  if (warp != 0 || column > C) return;
  sum = 0;
  for (int w = 0; w < column_sums_warps; w++) sum += sums[w * warp_size + lane];
  if (column < C) dweight[column] += sum;
  else if (dbias != nullptr) dbias[0] += sum;
}

inline void token_gate_forward(float* gate, const floatX* x, const floatX* weight, const floatX* bias, int64_t N,
                               int64_t C) {
  launch(token_gate_forward_kernel, warp_row_grid(N), token_threads, 0, gate, x, weight, bias, N, int(C));
}

inline void token_gate_backward(floatX* dx, float* dweight, float* dbias, float* dgate, const float* gate,
                                const floatX* x, const floatX* weight, int64_t N, int64_t C) {
  launch(token_gate_dx_kernel, warp_row_grid(N), token_threads, 0, dx, dgate, gate, weight, N, int(C));
  launch(token_gate_dweight_kernel, blocks_of(C + 1, warp_size), column_sums_warps * warp_size,
         column_sums_warps * warp_size * sizeof(float), dweight, dbias, static_cast<const float*>(dgate), x, N, int(C));
}

// Sums of the outputs of several attention maps in a layer, and the gates that weigh them (`blend` and `gate`;
// llmc/map_weights.h). Memory bounds them, and the attentions between them take far longer.
//
//   map_gate_forward:   gate =
//   map_gate_backward:  dx, dweight, dbias +=
//   mix_map_forward:    sum = or +=, out =
//   mix_map_backward:   dmap_out, dmap_weight =
//   mix_gates_backward: dgates +=
//
// C is a multiple of 8, and rows are 16-byte aligned.
#pragma once
#include <cstdint>             // int64_t
#include "column_sums.h"       // column_sums_warps
#include "device.h"            // gpu
#include "launch.h"            // launch, shared_memory
#include "llmc/map_weights.h"  // MapWeights, add_gate_gradients
#include "llmc/precision.h"    // floatX
#include "vec.h"               // load8, store8, warp_sum, ceil_div

constexpr int map_threads = 256;

// The row of the calling warp, in kernels whose blocks own 8 rows.
__device__ inline int64_t warp_row() {
  return int64_t(blockIdx.x) * (map_threads / warp_size) + threadIdx.x / warp_size;
}
inline dim3 warp_row_grid(int64_t N) { return dim3(unsigned(ceil_div(N, map_threads / warp_size))); }

// A warp owns a row.
__global__ void __launch_bounds__(map_threads)
    map_gate_forward_kernel(float* gate, const floatX* x, const floatX* weight, const floatX* bias, int64_t N, int C) {
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
__global__ void __launch_bounds__(map_threads)
    map_gate_dx_kernel(floatX* dx, float* dgate, const float* gate, const floatX* weight, int64_t N, int C) {
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

// dweight (C), dbias (1) += the sums over rows of d * x, d. A block owns 32 columns, of which the one after x's is the
// bias's; a warp every 32nd row of them, a lane a column. The first warp adds up the warps' sums in order.
__global__ void __launch_bounds__(column_sums_warps* warp_size)
    map_gate_dweight_kernel(float* dweight, float* dbias, const float* d, const floatX* x, int64_t N, int C) {
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

// A thread owns eight elements.
__global__ void __launch_bounds__(map_threads)
    mix_map_forward_kernel(float* sum, floatX* out, const floatX* map_out, MapWeights weights, int map, bool first,
                           bool last, int64_t N, int C) {
  const int64_t i = (int64_t(blockIdx.x) * map_threads + threadIdx.x) * 8;
  if (i >= N * C) return;
  const float w = weights.weight(map, i / C);
  float x[8], y[8] = {};
  load8(x, map_out + i);
  if (!first) load8(y, sum + i);
  for (int j = 0; j < 8; j++) y[j] += w * x[j];
  if (last) store8(out + i, y);
  else store8(sum + i, y);
}

// A warp owns a row. Element: floatX or float.
template <class Element>
__global__ void __launch_bounds__(map_threads)
    mix_map_backward_kernel(floatX* dmap_out, float* dmap_weight, const floatX* dout, const Element* map_out,
                            MapWeights weights, int map, int64_t N, int C) {
  const int64_t row = warp_row();
  const int lane = int(threadIdx.x) % warp_size;
  if (row >= N) return;
  const float w = weights.weight(map, row);
  double sum = 0;  // a gate's gradient is the difference of two of these
  for (int c = lane * 8; c < C; c += warp_size * 8) {
    float a[8], b[8];
    load8(a, dout + row * C + c);
    load8(b, map_out + row * C + c);
    for (int i = 0; i < 8; i++) sum += double(a[i]) * b[i], a[i] *= w;
    store8(dmap_out + row * C + c, a);
  }
  sum = warp_sum(sum);
  if (lane == 0) dmap_weight[row] = float(sum);
}

// A thread owns a row.
__global__ void __launch_bounds__(map_threads)
    mix_gates_backward_kernel(float* dgates, const float* dweights, MapWeights weights, int64_t N) {
  const int64_t row = int64_t(blockIdx.x) * map_threads + threadIdx.x;
  if (row < N) add_gate_gradients(dgates, dweights, weights, row);
}

// gate (N) = sigmoid(x . weight + bias); x (N, C), weight (C), bias (1) or null.
inline void map_gate_forward(float* gate, const floatX* x, const floatX* weight, const floatX* bias, int64_t N,
                             int64_t C) {
  launch(map_gate_forward_kernel, warp_row_grid(N), dim3(map_threads), 0, gpu().stream, gate, x, weight, bias, N,
         int(C));
}

// dgate (N) becomes the gradient of x . weight + bias; dx (N, C), dweight (C), dbias (1) or null +=.
inline void map_gate_backward(floatX* dx, float* dweight, float* dbias, float* dgate, const float* gate,
                              const floatX* x, const floatX* weight, int64_t N, int64_t C) {
  launch(map_gate_dx_kernel, warp_row_grid(N), dim3(map_threads), 0, gpu().stream, dx, dgate, gate, weight, N, int(C));
  launch(map_gate_dweight_kernel, dim3(unsigned(ceil_div(C + 1, warp_size))), dim3(column_sums_warps * warp_size),
         column_sums_warps * warp_size * sizeof(float), gpu().stream, dweight, dbias, static_cast<const float*>(dgate),
         x, N, int(C));
}

// sum (N, C) = or, unless `first`, += weight(map) map_out (N, C); if `last`, that is out (N, C) instead.
inline void mix_map_forward(float* sum, floatX* out, const floatX* map_out, const MapWeights& weights, int map,
                            bool first, bool last, int64_t N, int64_t C) {
  launch(mix_map_forward_kernel, dim3(unsigned(ceil_div(N * C, 8 * map_threads))), dim3(map_threads), 0, gpu().stream,
         sum, out, map_out, weights, map, first, last, N, int(C));
}

// The gradients of a map's output and weight: dmap_out (N, C) = weight(map) dout (N, C), and dmap_weight (N) =
// rowsum(dout * map_out).
template <class Element>
inline void mix_map_backward(floatX* dmap_out, float* dmap_weight, const floatX* dout, const Element* map_out,
                             const MapWeights& weights, int map, int64_t N, int64_t C) {
  launch(mix_map_backward_kernel<Element>, warp_row_grid(N), dim3(map_threads), 0, gpu().stream, dmap_out, dmap_weight,
         dout, map_out, weights, map, N, int(C));
}

// dgates (layer + 1, N) += from dweights (layer + 1, N), the gradients of the weights of each map in that layer.
inline void mix_gates_backward(float* dgates, const float* dweights, const MapWeights& weights, int64_t N) {
  launch(mix_gates_backward_kernel, dim3(unsigned(ceil_div(N, map_threads))), dim3(map_threads), 0, gpu().stream,
         dgates, dweights, weights, N);
}

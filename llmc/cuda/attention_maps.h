// Sums of the outputs of several attention maps in a layer: the operations of llmc/cpu/attention_maps.h. Memory bounds
// them, and the attentions between them take far longer. C is a multiple of 8, and rows are 16-byte aligned.
#pragma once
#include <cstdint>
#include "llmc/ops/map_weights.h"
#include "token_gate.h"
#include "vec.h"

// A thread owns eight elements.
__global__ void __launch_bounds__(element_threads)
    mix_map_forward_kernel(float* sum, floatX* out, const floatX* map_out, MapWeights weights, int map, bool first,
                           bool last, int64_t N, int C) {
  const int64_t i = first_element();
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
__global__ void __launch_bounds__(token_threads)
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
__global__ void __launch_bounds__(token_threads)
    mix_gates_backward_kernel(float* dgates, const float* dweights, MapWeights weights, int64_t N) {
  const int64_t row = int64_t(blockIdx.x) * token_threads + threadIdx.x;
  if (row < N) add_gate_gradients(dgates, dweights, weights, row);
}

inline void mix_map_forward(float* sum, floatX* out, const floatX* map_out, const MapWeights& weights, int map,
                            bool first, bool last, int64_t N, int64_t C) {
  launch_elements(mix_map_forward_kernel, N * C, sum, out, map_out, weights, map, first, last, N, int(C));
}

template <class Element>
inline void mix_map_backward(floatX* dmap_out, float* dmap_weight, const floatX* dout, const Element* map_out,
                             const MapWeights& weights, int map, int64_t N, int64_t C) {
  launch(mix_map_backward_kernel<Element>, warp_row_grid(N), token_threads, 0, dmap_out, dmap_weight, dout, map_out,
         weights, map, N, int(C));
}

inline void mix_gates_backward(float* dgates, const float* dweights, const MapWeights& weights, int64_t N) {
  launch(mix_gates_backward_kernel, blocks_of(N, token_threads), token_threads, 0, dgates, dweights, weights, N);
}

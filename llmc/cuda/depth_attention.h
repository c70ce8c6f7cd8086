// Attention over depth: the operations of llmc/cpu/depth_attention.h. HS is a multiple of 8, at most 128. Memory bounds
// them.
#pragma once
#include <cstdint>
#include "llmc/ops/depth_attention.h"
#include "qknorm.h"
#include "vec.h"

constexpr int depth_threads = 256;

// A lane has eight channels of a head of a token (lanes_of_head).
struct LaneOfToken {
  int64_t n, column;
  bool has_channels;

  __device__ LaneOfToken(const DepthAttention<floatX>& a, int64_t N, int lanes) {
    const int64_t thread = int64_t(blockIdx.x) * depth_threads + threadIdx.x, head = thread / lanes;
    const int i = int(thread % lanes) * 8;
    n = head / a.heads, column = head % a.heads * a.HS + i;
    has_channels = n < N && i < a.HS;
  }
  // The lane's channels of a tensor's row; zeros where it has none.
  __device__ void load(float (&x)[8], const floatX* tensor, int64_t stride) const {
    for (int i = 0; i < 8; i++) x[i] = 0;
    if (has_channels) load8(x, tensor + n * stride + column);
  }
  __device__ void load(float (&k)[8], float (&v)[8], const LayerKV<floatX>& layer) const {
    load(k, layer.k, layer.stride);
    load(v, layer.v, layer.stride);
  }
};

__device__ inline float dot_of_lanes(const float (&x)[8], const float (&y)[8], int lanes) {
  float sum = 0;
  for (int i = 0; i < 8; i++) sum += x[i] * y[i];
  return sum_of_lanes(sum, lanes);
}

__global__ void __launch_bounds__(depth_threads)
    depth_attention_forward_kernel(DepthAttention<floatX> a, int64_t N, int lanes, float scale) {
  const LaneOfToken lane(a, N, lanes);
  float q[8], k[8], v[8], sum[8] = {}, old;
  RunningSoftmax softmax;
  lane.load(q, a.q, a.q_stride);
  for (int j = 0; j < a.num_layers; j++) {
    lane.load(k, v, a.layers[j]);
    const float weight = softmax.add(scale * dot_of_lanes(q, k, lanes), old);
    for (int i = 0; i < 8; i++) sum[i] = sum[i] * old + weight * v[i];
  }
  for (int i = 0; i < 8; i++) sum[i] /= softmax.total;
  if (lane.has_channels) store8(a.out + lane.n * a.out_stride + lane.column, sum);
}

// It walks the layers twice, for the softmax and for what follows from it; the second time caches have them.
__global__ void __launch_bounds__(depth_threads)
    depth_attention_backward_kernel(DepthAttention<floatX> a, int64_t N, int lanes, float scale) {
  const LaneOfToken lane(a, N, lanes);
  const LayerKV<floatX> own = a.layers[a.num_layers - 1];
  float q[8], d[8], dq[8], k[8], v[8], old, mean = 0;  // mean: of d . v_j
  RunningSoftmax softmax;
  lane.load(q, a.q, a.q_stride);
  lane.load(d, own.dv, own.d_stride);
  lane.load(dq, a.dq, a.dq_stride);
  for (int j = 0; j < a.num_layers; j++) {
    lane.load(k, v, a.layers[j]);
    const float weight = softmax.add(scale * dot_of_lanes(q, k, lanes), old);
    mean = mean * old + weight * dot_of_lanes(d, v, lanes);
  }
  mean /= softmax.total;
  for (int j = 0; j < a.num_layers; j++) {
    const LayerKV<floatX> layer = a.layers[j];
    const bool is_own = j == a.num_layers - 1, has_above = a.dk_of_above != nullptr;
    lane.load(k, v, layer);
    const float p = expf(scale * dot_of_lanes(q, k, lanes) - softmax.highest) / softmax.total;
    const float ds = scale * p * (dot_of_lanes(d, v, lanes) - mean);
    float dk[8] = {}, dv[8] = {}, more[8] = {};
    if (has_above) {
      lane.load(dk, is_own ? a.dk_of_above : layer.dk, is_own ? a.of_above_stride : layer.d_stride);
      lane.load(dv, is_own ? a.dv_of_above : layer.dv, is_own ? a.of_above_stride : layer.d_stride);
    }
    if (is_own) lane.load(more, layer.dk, layer.d_stride);
    for (int i = 0; i < 8; i++) {
      dq[i] += ds * k[i];
      dk[i] += more[i] + ds * q[i];
      dv[i] += p * d[i];
    }
    if (!lane.has_channels) continue;
    store8(layer.dk + lane.n * layer.d_stride + lane.column, dk);
    store8(layer.dv + lane.n * layer.d_stride + lane.column, dv);
  }
  if (lane.has_channels) store8(a.dq + lane.n * a.dq_stride + lane.column, dq);
}

template <class Kernel>
void launch_depth_attention(Kernel kernel, const DepthAttention<floatX>& a, int64_t N) {
  const int lanes = lanes_of_head(a.HS);
  launch(kernel, blocks_of(N * a.heads * lanes, depth_threads), depth_threads, 0, a, N, lanes, 1 / sqrtf(float(a.HS)));
}

inline void depth_attention_forward(const DepthAttention<floatX>& a, int64_t N) {
  launch_depth_attention(depth_attention_forward_kernel, a, N);
}

inline void depth_attention_backward(const DepthAttention<floatX>& a, int64_t N) {
  launch_depth_attention(depth_attention_backward_kernel, a, N);
}

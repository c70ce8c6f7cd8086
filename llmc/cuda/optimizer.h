// AdamW and the gradient's norm: the operations of llmc/cpu/optimizer.h. Neither makes the host wait: the sum stays on
// the device, where the update reads it.
#pragma once
#include <cmath>
#include <cstdint>
#include "llmc/ops/adamw.h"
#include "llmc/ops/step_stats.h"
#include "llmc/ops/precision.h"
#include "vec.h"

constexpr int chunk_threads = 256;  // the block that owns a chunk
constexpr int sum_partials_threads = 1024;

// partial (chunks) = the sum of a chunk's squares, in double, where a float's square is exact. A block owns a chunk, a
// thread every 256th group of eight, so that a warp's loads are coalesced.
__global__ void __launch_bounds__(chunk_threads)
    sum_of_squares_kernel(double* partial, const float* x, const ParameterChunk* chunks) {
  const ParameterChunk chunk = chunks[blockIdx.x];
  const float* begin = x + chunk.begin;
  double sum = 0;
  for (int i = int(threadIdx.x) * 8; i < chunk.count; i += chunk_threads * 8) {
    if (i + 8 <= chunk.count) {
      float v[8];
      load8(v, begin + i);
      for (int j = 0; j < 8; j++) sum += double(v[j]) * double(v[j]);
    } else {
      for (int j = i; j < chunk.count; j++) sum += double(begin[j]) * double(begin[j]);
    }
  }
  sum = block_sum(sum, reinterpret_cast<double*>(shared_memory));
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// total (1) = the sum of partial (count). One block, in which a thread owns every 1,024th element.
__global__ void __launch_bounds__(sum_partials_threads)
    sum_partials_kernel(double* total, const double* partial, int64_t count) {
  const double sum = block_sum_of(partial, count, reinterpret_cast<double*>(shared_memory));
  if (threadIdx.x == 0) *total = sum;
}

// The factors that all elements of a chunk share.
struct AdamWFactors {
  float beta1, beta2, eps, grad_factor;
  float keep;       // 1 - learning_rate * weight_decay
  float step_size;  // learning_rate / bias_correction1
  float v_scale;    // 1 / sqrt(bias_correction2)
};

__device__ inline void adamw_element(float& p, float& m, float& v, float grad, const AdamWFactors& f) {
  const float g = grad * f.grad_factor;
  m = f.beta1 * m + (1.0f - f.beta1) * g;
  v = f.beta2 * v + (1.0f - f.beta2) * g * g;
  p = p * f.keep - f.step_size * m / (sqrtf(v) * f.v_scale + f.eps);
}

// A block owns a chunk, a thread every 256th group of four elements, so that a warp's load is of 512 consecutive bytes.
// It loads two groups before it computes: 128 bytes in flight, and of four blocks on a multiprocessor 131 KB. Each
// element is read and written once. weights: the masters, or params themselves if they are float. The clipping factor
// takes operations in double, for which a GPU may have few units, so one thread of a block computes it.
__global__ void __launch_bounds__(chunk_threads, 4)
    adamw_kernel(floatX* params, float* weights, float* m, float* v, const float* grads, const ParameterChunk* chunks,
                 AdamWStep s, const StepStats* sums) {
  float* factor = reinterpret_cast<float*>(shared_memory);
  if (threadIdx.x == 0) *factor = sums->grad_factor(s.grad_clip);
  __syncthreads();
  if (std::isnan(*factor)) return;
  const ParameterChunk chunk = chunks[blockIdx.x];
  const float weight_decay = chunk.decays ? s.weight_decay : 0.0f;
  const AdamWFactors f = {s.beta1,
                          s.beta2,
                          s.eps,
                          *factor,
                          1.0f - s.learning_rate * weight_decay,
                          s.learning_rate / s.bias_correction1,
                          1.0f / sqrtf(s.bias_correction2)};
  params += chunk.begin, grads += chunk.begin, m += chunk.state, v += chunk.state;
  weights += has_master_weights ? chunk.state : chunk.begin;
  constexpr int groups = 2, next = chunk_threads * 4;  // elements from a thread's group to its next one
  for (int first = int(threadIdx.x) * 4; first < chunk.count; first += groups * next) {
    float p4[groups][4], m4[groups][4], v4[groups][4], g4[groups][4];
#pragma unroll
    for (int k = 0; k < groups; k++) {
      const int i = first + k * next;
      if (i + 4 <= chunk.count)
        load4(p4[k], weights + i), load4(m4[k], m + i), load4(v4[k], v + i), load4(g4[k], grads + i);
    }
#pragma unroll
    for (int k = 0; k < groups; k++) {
      const int i = first + k * next;
      if (i + 4 > chunk.count) continue;
      for (int j = 0; j < 4; j++) adamw_element(p4[k][j], m4[k][j], v4[k][j], g4[k][j], f);
      store4(weights + i, p4[k]), store4(m + i, m4[k]), store4(v + i, v4[k]);
      if constexpr (has_master_weights) store4(params + i, p4[k]);
    }
  }
  // A thread owns an element of the last group, unless that is whole.
  const int i = chunk.count / 4 * 4 + int(threadIdx.x);
  if (i >= chunk.count) return;
  adamw_element(weights[i], m[i], v[i], grads[i], f);
  if constexpr (has_master_weights) from_float(params[i], weights[i]);
}

inline void sum_of_squares(double* sum, const float* x, const ParameterChunk* chunks, int64_t num_chunks) {
  double* partial = device_scratch<double>(num_chunks);
  launch(sum_of_squares_kernel, unsigned(num_chunks), chunk_threads, chunk_threads / warp_size * sizeof(double),
         partial, x, chunks);
  launch(sum_partials_kernel, 1, sum_partials_threads, sum_partials_threads / warp_size * sizeof(double), sum, partial,
         num_chunks);
}

inline void adamw_update(floatX* params, float* master, float* m, float* v, const float* grads,
                         const ParameterChunk* chunks, int64_t num_chunks, const AdamWStep& s, const StepStats* sums) {
  float* weights = has_master_weights ? master : reinterpret_cast<float*>(params);
  launch(adamw_kernel, unsigned(num_chunks), chunk_threads, sizeof(float), params, weights, m, v, grads, chunks, s,
         sums);
}

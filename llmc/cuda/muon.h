// The operations of Muon beside the matmuls of its iteration, as in llmc/cpu/muon.h.
#pragma once
#include <cmath>
#include <cstdint>
#include "llmc/ops/muon_args.h"
#include "llmc/ops/precision.h"
#include "optimizer.h"
#include "vec.h"

// What the iteration's workspaces may take, in elements of floatX, if that is enough for a matrix: in bf16 128 MiB,
// with which GPT-2 124M has its matrices in six batches. A batch that fills the GPU gains nothing from more, and matrix
// by matrix there would be ten times as many launches.
constexpr int64_t muon_workspace_elements = int64_t(64) << 20;

// One thread.
__global__ void muon_set_step_kernel(MuonStep* place, MuonStep s) { *place = s; }

// A block owns a chunk, a thread every 256th element, so that a warp's accesses are of 128 consecutive bytes.
// chunk_squares (chunks): the sum of u^2 of each.
__global__ void __launch_bounds__(chunk_threads) muon_momentum_kernel(MuonArgs args, double* chunk_squares) {
  auto* sums = reinterpret_cast<double*>(shared_memory);
  float* factor = reinterpret_cast<float*>(sums + chunk_threads / warp_size);
  if (threadIdx.x == 0) *factor = args.sums->grad_factor(args.step->grad_clip);
  __syncthreads();
  if (std::isnan(*factor)) return;
  const ParameterChunk chunk = args.chunks[blockIdx.x];
  const float momentum = args.step->momentum;
  float *grads = args.grads + chunk.begin, *m = args.m + chunk.state;
  double squares = 0;
  for (int i = int(threadIdx.x); i < chunk.count; i += chunk_threads) {
    const float g = grads[i] * *factor, m_new = momentum * m[i] + (1.0f - momentum) * g;
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

// A block owns 256 elements of a matrix, a thread one of them; so in the next kernels.
inline dim3 muon_grid(int64_t elements, const MuonBatch& batch) {
  return dim3(unsigned(ceil_div(elements, chunk_threads)), unsigned(batch.count));
}

__global__ void __launch_bounds__(chunk_threads) muon_normalize_kernel(floatX* x, MuonArgs args, MuonBatch batch) {
  const int64_t n = batch.elements(), i = int64_t(blockIdx.x) * chunk_threads + threadIdx.x;
  const int64_t matrix = batch.first + blockIdx.y;
  if (i >= n) return;
  const float scale = 1.0f / fmaxf(sqrtf(float(args.squares[matrix])), float(muon_least_norm));
  from_float(x[blockIdx.y * n + i], args.grads[args.matrices[matrix].begin + i] * scale);
}

__global__ void __launch_bounds__(chunk_threads)
    muon_polynomial_kernel(floatX* p, const floatX* a, const floatX* a_squared, int64_t n) {
  const int64_t within = int64_t(blockIdx.x) * chunk_threads + threadIdx.x, i = blockIdx.y * n * n + within;
  if (within < n * n)
    from_float(p[i],
               muon_b * to_float(a[i]) + muon_c * to_float(a_squared[i]) + (within / n == within % n ? muon_a : 0.0f));
}

__global__ void __launch_bounds__(chunk_threads) muon_update_kernel(MuonArgs args, const floatX* x, MuonBatch batch) {
  const int64_t n = batch.elements(), i = int64_t(blockIdx.x) * chunk_threads + threadIdx.x;
  if (!args.sums->is_finite() || i >= n) return;
  const MuonMatrix& matrix = args.matrices[batch.first + blockIdx.y];
  floatX* params = args.params + matrix.begin;
  float* weights = has_master_weights ? args.master + matrix.state : reinterpret_cast<float*>(params);
  const MuonStep s = *args.step;
  const float keep = 1.0f - s.learning_rate * s.weight_decay,
              step = s.learning_rate * 0.2f * sqrtf(float(batch.length()));
  weights[i] = weights[i] * keep - step * to_float(x[blockIdx.y * n + i]);
  if constexpr (has_master_weights) from_float(params[i], weights[i]);
}

// Calls f(part) for parts of a batch; here it is one part.
template <class F>
void for_each_part(const MuonBatch& batch, F f) {
  f(batch);
}

// *place = s, which the operations after it read: a CUDA graph of them need not be captured again for another step.
inline void muon_set_step(MuonStep* place, const MuonStep& s) { launch(muon_set_step_kernel, 1, 1, 0, place, s); }

inline void muon_momentum(const MuonArgs& args) {
  constexpr size_t warps = chunk_threads / warp_size;
  double* chunk_squares = device_scratch<double>(size_t(args.num_chunks));
  launch(muon_momentum_kernel, unsigned(args.num_chunks), chunk_threads, (warps + 1) * sizeof(double), args,
         chunk_squares);
  launch(muon_squares_kernel, unsigned(args.num_matrices), chunk_threads, warps * sizeof(double), args,
         static_cast<const double*>(chunk_squares));
}

inline void muon_normalize(floatX* x, const MuonArgs& args, const MuonBatch& batch) {
  launch(muon_normalize_kernel, muon_grid(batch.elements(), batch), chunk_threads, 0, x, args, batch);
}

inline void muon_polynomial(floatX* p, const floatX* a, const floatX* a_squared, const MuonBatch& batch) {
  launch(muon_polynomial_kernel, muon_grid(batch.n() * batch.n(), batch), chunk_threads, 0, p, a, a_squared, batch.n());
}

inline void muon_update(const MuonArgs& args, const floatX* x, const MuonBatch& batch) {
  launch(muon_update_kernel, muon_grid(batch.elements(), batch), chunk_threads, 0, args, x, batch);
}

// Weighted sums: the operations of llmc/cpu/weighted_sum.h. Memory bounds them: a kernel reads each term once. Sizes
// are multiples of 8.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>
#include "column_sums.h"
#include "llmc/ops/weighted_sum.h"
#include "vec.h"

constexpr int weighted_sum_threads = 256;
constexpr int weighted_sum_eights = weighted_sum_piece / 8 / weighted_sum_threads;  // a thread's, of a piece

// The terms that a launch takes as an argument; more of them take several launches.
struct WeightedTensors {
  static constexpr int most = 64;
  WeightedTensor terms[most];
  int count;
};

__global__ void __launch_bounds__(element_threads)
    weighted_sum_kernel(floatX* out, WeightedTensors of, int64_t n, bool accumulate) {
  const int64_t i = first_element();
  if (i >= n) return;
  float sum[8] = {};
  if (accumulate) load8(sum, out + i);
#pragma unroll 4
  for (int t = 0; t < of.count; t++) {
    const float weight = to_float(*of.terms[t].weight);
    float x[8];
    load8(x, of.terms[t].x + i);
    for (int j = 0; j < 8; j++) sum[j] += weight * x[j];
  }
  store8(out + i, sum);
}

// A block owns a piece, keeps its dout in registers, and writes its sums to scratch (blocks, terms).
__global__ void __launch_bounds__(weighted_sum_threads)
    weighted_sum_backward_kernel(const floatX* dout, WeightedTensors of, float* scratch, int64_t eights) {
  float* sums = reinterpret_cast<float*>(shared_memory);  // (warps)
  const int64_t first = int64_t(blockIdx.x) * (weighted_sum_piece / 8) + threadIdx.x;
  float d[weighted_sum_eights][8] = {};
#pragma unroll
  for (int e = 0; e < weighted_sum_eights; e++)
    if (const int64_t i = first + e * weighted_sum_threads; i < eights) load8(d[e], dout + i * 8);
  for (int t = 0; t < of.count; t++) {
    float sum = 0;
#pragma unroll
    for (int e = 0; e < weighted_sum_eights; e++) {
      const int64_t i = first + e * weighted_sum_threads;
      if (i >= eights) continue;
      float x[8];
      load8(x, of.terms[t].x + i * 8);
      for (int j = 0; j < 8; j++) sum += d[e][j] * x[j];
    }
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) scratch[int64_t(blockIdx.x) * of.count + t] = sum;
  }
}

// Calls launch(terms, the first one's index) for as many of them at a time as a launch takes.
template <class Launch>
void for_weighted_tensors(const std::vector<WeightedTensor>& terms, Launch launch) {
  for (size_t first = 0; first < terms.size(); first += WeightedTensors::most) {
    WeightedTensors some = {};
    some.count = int(std::min(terms.size() - first, size_t(WeightedTensors::most)));
    std::copy_n(terms.begin() + long(first), some.count, some.terms);
    launch(some, first);
  }
}

inline void weighted_sum(floatX* out, const std::vector<WeightedTensor>& terms, int64_t n, bool accumulate) {
  for_weighted_tensors(terms, [&](const WeightedTensors& some, size_t first) {
    launch_elements(weighted_sum_kernel, n, out, some, n, accumulate || first > 0);
  });
}

inline void weighted_sum_backward(float* dweights, const floatX* dout, const std::vector<WeightedTensor>& terms,
                                  float* scratch, int64_t n) {
  const int64_t pieces = weighted_sum_pieces(n);
  for_weighted_tensors(terms, [&](const WeightedTensors& some, size_t first) {
    launch(weighted_sum_backward_kernel, unsigned(pieces), weighted_sum_threads,
           weighted_sum_threads / warp_size * sizeof(float), dout, some, scratch, n / 8);
    add_column_sums(dweights + first, nullptr, scratch, pieces, /*stride=*/some.count, some.count);
  });
}

// Value residuals: the operations of llmc/cpu/value_mix.h. Memory bounds them. Widths are multiples of 8.
#pragma once
#include <cstdint>
#include "column_sums.h"
#include "llmc/ops/value_mix.h"
#include "vec.h"

constexpr int value_mix_threads = 256;

__global__ void __launch_bounds__(element_threads) mix_values_kernel(ValueMix<floatX> m, const floatX* ab, int64_t N) {
  const int64_t at = first_element(), n = at / m.width, i = at % m.width;
  if (n >= N) return;
  const float a = to_float(ab[0]), b = to_float(ab[1]);
  float v[8], first[8];
  load8(v, m.v + n * m.v_stride + i);
  load8(first, m.first + n * m.first_stride + i);
  for (int j = 0; j < 8; j++) v[j] = a * v[j] + b * first[j];
  store8(m.out + n * m.out_stride + i, v);
}

// A block owns value_mix_rows rows and writes its two sums to scratch (blocks, 2); a thread owns every 256th eight of
// their channels.
__global__ void __launch_bounds__(value_mix_threads)
    mix_values_backward_kernel(ValueMix<floatX> m, const floatX* ab, float* scratch, int64_t N) {
  float* sums = reinterpret_cast<float*>(shared_memory);  // (warps)
  const int64_t first_row = int64_t(blockIdx.x) * value_mix_rows, of_row = m.width / 8;
  const int64_t rows = N - first_row < value_mix_rows ? N - first_row : value_mix_rows;
  const float a = to_float(ab[0]), b = to_float(ab[1]);
  float da = 0, db = 0;
  for (int64_t at = threadIdx.x; at < rows * of_row; at += value_mix_threads) {
    const int64_t n = first_row + at / of_row, i = at % of_row * 8;
    float d[8], v[8], first[8], dfirst[8] = {};
    load8(d, m.d + n * m.d_stride + i);
    load8(v, m.v + n * m.v_stride + i);
    load8(first, m.first + n * m.first_stride + i);
    if (m.accumulate) load8(dfirst, m.dfirst + n * m.dfirst_stride + i);
    for (int j = 0; j < 8; j++) {
      da += d[j] * v[j], db += d[j] * first[j];
      dfirst[j] += b * d[j], d[j] *= a;
    }
    store8(m.d + n * m.d_stride + i, d);
    store8(m.dfirst + n * m.dfirst_stride + i, dfirst);
  }
  da = block_sum(da, sums), db = block_sum(db, sums);
  if (threadIdx.x == 0) scratch[2 * blockIdx.x] = da, scratch[2 * blockIdx.x + 1] = db;
}

inline void mix_values(const ValueMix<floatX>& m, const floatX* ab, int64_t N) {
  launch_elements(mix_values_kernel, N * m.width, m, ab, N);
}

inline void mix_values_backward(const ValueMix<floatX>& m, float* dab, const floatX* ab, float* scratch, int64_t N) {
  const int64_t blocks = value_mix_scratch(N) / 2;
  launch(mix_values_backward_kernel, unsigned(blocks), value_mix_threads, value_mix_threads / warp_size * sizeof(float),
         m, ab, scratch, N);
  add_column_sums(dab, nullptr, scratch, blocks, /*stride=*/2, /*columns=*/2);
}

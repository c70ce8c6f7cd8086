// Value residuals (llmc/ops/value_mix.h).
#pragma once
#include <algorithm>
#include <cstdint>
#include "llmc/ops/precision.h"
#include "llmc/ops/value_mix.h"
#include "threads.h"
#include "vec.h"

// out (N, width) = a v + b first; ab (2): a and b.
inline void mix_values(const ValueMix<floatX>& m, const floatX* ab, int64_t N) {
  const float a = to_float(ab[0]), b = to_float(ab[1]);
#pragma omp parallel for schedule(static) if (is_worth_threads(3 * int64_t(sizeof(floatX)) * N * m.width))
  for (int64_t n = 0; n < N; n++) {
    const floatX *v = m.v + n * m.v_stride, *first = m.first + n * m.first_stride;
    floatX* out = m.out + n * m.out_stride;
#pragma omp simd
    for (int64_t i = 0; i < m.width; i++) from_float(out[i], a * to_float(v[i]) + b * to_float(first[i]));
  }
}

// d, the gradient of out, becomes a d, the gradient of v; dfirst = or += b d; dab (2) += the sums of d v and d first.
// scratch (value_mix_scratch(N)).
inline void mix_values_backward(const ValueMix<floatX>& m, float* dab, const floatX* ab, float* scratch, int64_t N) {
  const float a = to_float(ab[0]), b = to_float(ab[1]);
  const int64_t sums = value_mix_scratch(N) / 2;
#pragma omp parallel for schedule(static) if (is_worth_threads(5 * int64_t(sizeof(floatX)) * N * m.width))
  for (int64_t s = 0; s < sums; s++) {
    float da = 0, db = 0;
    for (int64_t n = s * value_mix_rows; n < std::min(N, (s + 1) * value_mix_rows); n++) {
      const floatX *v = m.v + n * m.v_stride, *first = m.first + n * m.first_stride;
      floatX *d = m.d + n * m.d_stride, *dfirst = m.dfirst + n * m.dfirst_stride;
#pragma omp simd reduction(+ : da, db)
      for (int64_t i = 0; i < m.width; i++) {
        const float dout = to_float(d[i]);
        da += dout * to_float(v[i]), db += dout * to_float(first[i]);
        from_float(d[i], a * dout);
        from_float(dfirst[i], b * dout + (m.accumulate ? to_float(dfirst[i]) : 0.0f));
      }
    }
    scratch[2 * s] = da, scratch[2 * s + 1] = db;
  }
  add_column_sums(dab, scratch, sums, 2);
}

// The two residual streams of `reversible` (model/parts/reversible_residual.h), in fp32 whatever floatX is.
#pragma once
#include <cstdint>
#include "llmc/ops/precision.h"
#include "threads.h"
#include "vec.h"

// x1 (n) = x2 (n) = embedded (n).
inline void streams_begin(float* x1, float* x2, const floatX* embedded, int64_t n) {
#pragma omp parallel for simd schedule(static) if (parallel : is_worth_threads(10 * n))
  for (int64_t i = 0; i < n; i++) x1[i] = x2[i] = to_float(embedded[i]);
}

// x (n) += factor * y (n), and `rounded` (n) = x in floatX. The factor is 1, or -1 to take back what was added.
inline void stream_add(float* x, floatX* rounded, const floatX* y, float factor, int64_t n) {
#pragma omp parallel for simd schedule(static) if (parallel : is_worth_threads(12 * n))
  for (int64_t i = 0; i < n; i++) {
    x[i] += factor * to_float(y[i]);
    from_float(rounded[i], x[i]);
  }
}

// out (n) = (x1 (n) + x2 (n)) / 2. If x1 is x2: that stream, rounded to floatX.
inline void streams_mean(floatX* out, const float* x1, const float* x2, int64_t n) {
#pragma omp parallel for simd schedule(static) if (parallel : is_worth_threads(10 * n))
  for (int64_t i = 0; i < n; i++) from_float(out[i], 0.5f * (x1[i] + x2[i]));
}

// From dx1 (n), the gradient of the streams' mean: dx1 (n) = dx2 (n) = each stream's gradient, half of it.
inline void streams_mean_backward(floatX* dx1, floatX* dx2, int64_t n) {
#pragma omp parallel for simd schedule(static) if (parallel : is_worth_threads(3 * int64_t(sizeof(floatX)) * n))
  for (int64_t i = 0; i < n; i++) {
    const float d = 0.5f * to_float(dx1[i]);
    from_float(dx1[i], d);
    from_float(dx2[i], d);
  }
}

// The gate of `gru`: the operations of llmc/ops/gru.h.
#pragma once
#include <cstdint>
#include "llmc/ops/gru.h"
#include "llmc/ops/precision.h"
#include "threads.h"
#include "vec.h"

inline void relu_forward(floatX* y, const floatX* x, int64_t n) {
#pragma omp parallel for simd schedule(static) if (parallel : is_worth_threads(2 * int64_t(sizeof(floatX)) * n))
  for (int64_t i = 0; i < n; i++) from_float(y[i], to_float(x[i]) < 0.0f ? 0.0f : to_float(x[i]));
}

inline void relu_backward(floatX* dy, const floatX* y, int64_t n) {
#pragma omp parallel for simd schedule(static) if (parallel : is_worth_threads(3 * int64_t(sizeof(floatX)) * n))
  for (int64_t i = 0; i < n; i++) from_float(dy[i], to_float(y[i]) > 0.0f ? to_float(dy[i]) : 0.0f);
}

inline void gru_gates_forward(const GruGates<floatX>& gru, const floatX* sums, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static) if (is_worth_threads(8 * int64_t(sizeof(floatX)) * N * C))
  for (int64_t n = 0; n < N; n++) {
    floatX *r = gru.gates + n * 3 * C, *z = r + C, *reset_in = gru.reset_in + n * C;
    const floatX *x = gru.in + n * C, *sum = sums + n * 2 * C;
#pragma omp simd
    for (int64_t c = 0; c < C; c++) {
      const float reset = vec_sigmoid(to_float(r[c]) + to_float(sum[c]));
      from_float(r[c], reset);
      from_float(z[c], vec_sigmoid(to_float(z[c]) + to_float(sum[C + c]) - to_float(gru.bias[c])));
      from_float(reset_in[c], reset * to_float(x[c]));
    }
  }
}

inline void gru_output_forward(const GruGates<floatX>& gru, const floatX* sums, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static) if (is_worth_threads(6 * int64_t(sizeof(floatX)) * N * C))
  for (int64_t n = 0; n < N; n++) {
    floatX *g = gru.gates + n * 3 * C + 2 * C, *out = gru.out + n * C;
    const floatX *z = g - C, *x = gru.in + n * C, *sum = sums + n * C;
#pragma omp simd
    for (int64_t c = 0; c < C; c++) {
      const float candidate = vec_tanh(to_float(g[c]) + to_float(sum[c])), update = to_float(z[c]);
      from_float(g[c], candidate);
      from_float(out[c], (1.0f - update) * to_float(x[c]) + update * candidate);
    }
  }
}

inline void gru_output_backward(const GruGates<floatX>& gru, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static) if (is_worth_threads(7 * int64_t(sizeof(floatX)) * N * C))
  for (int64_t n = 0; n < N; n++) {
    floatX *z = gru.gates + n * 3 * C + C, *g = z + C, *dresidual = gru.dresidual + n * C;
    const floatX* x = gru.in + n * C;
#pragma omp simd
    for (int64_t c = 0; c < C; c++) {
      const float update = to_float(z[c]), candidate = to_float(g[c]), d = to_float(dresidual[c]);
      from_float(z[c], d * (candidate - to_float(x[c])) * update * (1.0f - update));
      from_float(g[c], d * update * (1.0f - candidate * candidate));
      from_float(dresidual[c], d * (1.0f - update));
    }
  }
}

inline void gru_gates_backward(const GruGates<floatX>& gru, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static) if (is_worth_threads(7 * int64_t(sizeof(floatX)) * N * C))
  for (int64_t n = 0; n < N; n++) {
    floatX *r = gru.gates + n * 3 * C, *reset_in = gru.reset_in + n * C, *dresidual = gru.dresidual + n * C;
    const floatX *x = gru.in + n * C, *dreset_in = gru.dreset_in + n * C;
#pragma omp simd
    for (int64_t c = 0; c < C; c++) {
      const float reset = to_float(r[c]), in = to_float(x[c]), d = to_float(dreset_in[c]);
      from_float(reset_in[c], reset * in);
      from_float(r[c], d * in * reset * (1.0f - reset));
      from_float(dresidual[c], to_float(dresidual[c]) + d * reset);
    }
  }
}

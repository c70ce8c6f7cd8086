// The two residual streams of `reversible`: the operations of llmc/cpu/reversible.h. n is a multiple of 8, pointers are
// 16-byte aligned. Memory bounds all kernels: a thread owns eight elements.
#pragma once
#include <cstdint>
#include "vec.h"

__global__ void __launch_bounds__(element_threads)
    streams_begin_kernel(float* x1, float* x2, const floatX* embedded, int64_t n) {
  const int64_t i = first_element();
  if (i >= n) return;
  float x[8];
  load8(x, embedded + i);
  store8(x1 + i, x);
  store8(x2 + i, x);
}

__global__ void __launch_bounds__(element_threads)
    stream_add_kernel(float* x_out, floatX* rounded, const floatX* y_in, float factor, int64_t n) {
  const int64_t i = first_element();
  if (i >= n) return;
  float x[8], y[8];
  load8(x, x_out + i);
  load8(y, y_in + i);
  for (int j = 0; j < 8; j++) x[j] += factor * y[j];
  store8(x_out + i, x);
  store8(rounded + i, x);
}

__global__ void __launch_bounds__(element_threads)
    streams_mean_kernel(floatX* out, const float* x1_in, const float* x2_in, int64_t n) {
  const int64_t i = first_element();
  if (i >= n) return;
  float x1[8], x2[8];
  load8(x1, x1_in + i);
  load8(x2, x2_in + i);
  for (int j = 0; j < 8; j++) x1[j] = 0.5f * (x1[j] + x2[j]);
  store8(out + i, x1);
}

__global__ void __launch_bounds__(element_threads) streams_mean_backward_kernel(floatX* dx1, floatX* dx2, int64_t n) {
  const int64_t i = first_element();
  if (i >= n) return;
  float d[8];
  load8(d, dx1 + i);
  for (float& a : d) a *= 0.5f;
  store8(dx1 + i, d);
  store8(dx2 + i, d);
}

// ----------------------------------------------------------------------------
// Launchers

inline void streams_begin(float* x1, float* x2, const floatX* embedded, int64_t n) {
  launch_elements(streams_begin_kernel, n, x1, x2, embedded, n);
}

inline void stream_add(float* x, floatX* rounded, const floatX* y, float factor, int64_t n) {
  launch_elements(stream_add_kernel, n, x, rounded, y, factor, n);
}

inline void streams_mean(floatX* out, const float* x1, const float* x2, int64_t n) {
  launch_elements(streams_mean_kernel, n, out, x1, x2, n);
}

inline void streams_mean_backward(floatX* dx1, floatX* dx2, int64_t n) {
  launch_elements(streams_mean_backward_kernel, n, dx1, dx2, n);
}

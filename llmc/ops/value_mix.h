// Value residuals (`vres`): values become a sum of their own layer's and the first layer's.
#pragma once
#include <cstdint>

// Values of neighbouring heads, of N tokens: out = a v + b first, each (N, width); row n of x begins at x + n x_stride.
template <class T>
struct ValueMix {
  const T *v, *first;
  T* out;  // may be v
  int64_t v_stride, first_stride, out_stride, width;
  T *d, *dfirst;  // d is the gradient of out and becomes v's; dfirst = or, with `accumulate`, += first's
  int64_t d_stride, dfirst_stride;
  bool accumulate;
};

constexpr int64_t value_mix_rows = 32;  // whose terms of the gradients of a and b are a partial sum

// Floats of scratch that the backward pass of N rows takes.
inline int64_t value_mix_scratch(int64_t N) { return 2 * ((N + value_mix_rows - 1) / value_mix_rows); }

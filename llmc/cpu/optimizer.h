// AdamW and the gradient's norm, over the arenas of parameters. Only the elements of the chunks are read and written,
// not the gaps between tensors.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>
#include "llmc/ops/adamw.h"
#include "llmc/ops/step_stats.h"
#include "llmc/ops/precision.h"
#include "threads.h"
#include "vec.h"

inline int64_t num_elements(const ParameterChunk* chunks, int64_t num_chunks) {
  int64_t sum = 0;
  for (int64_t c = 0; c < num_chunks; c++) sum += chunks[c].count;
  return sum;
}

// sum (1) = the sum of squares over the chunks of x, in double. The chunks' sums are added in order: the same bits on
// any number of threads. They are kept in a temporary array, one double per chunk, 1/4,096 of what x takes (120 KB for
// GPT-2 124M), which the memory plan leaves out.
inline void sum_of_squares(double* sum, const float* x, const ParameterChunk* chunks, int64_t num_chunks) {
  std::vector<double> partial(num_chunks);
#pragma omp parallel for schedule(static) if (is_worth_threads(4 * num_elements(chunks, num_chunks)))
  for (int64_t c = 0; c < num_chunks; c++) {
    const float* begin = x + chunks[c].begin;
    double squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < chunks[c].count; i++) squares += double(begin[i]) * double(begin[i]);
    partial[c] = squares;
  }
  *sum = 0;
  for (double p : partial) *sum += p;
}

// What AdamW updates, indexed like the parameters: masters, or parameters that are float.
inline float* full_precision_weights(float* params, float*, int64_t) { return params; }
inline float* full_precision_weights(bfloat16*, float* master, int64_t to_state) { return master + to_state; }

// One step of AdamW over the chunks, as llmc/ops/adamw.h says. params, master, m, v and grads are the arenas' bases:
// params and grads are indexed by a chunk's begin, the others by its state. If floatX is float, params themselves are
// updated and master is not used; else params = master, rounded, in the same pass.
inline void adamw_update(floatX* params, float* master, float* m, float* v, const float* grads,
                         const ParameterChunk* chunks, int64_t num_chunks, const AdamWStep& s, const StepStats* sums) {
  if (!sums->is_finite()) return;
  const float factor = sums->grad_factor(s.grad_clip);
  const float step_size = s.learning_rate / s.bias_correction1;
  const float v_scale = 1.0f / std::sqrt(s.bias_correction2);
#pragma omp parallel for schedule(static) if (is_worth_threads(28 * num_elements(chunks, num_chunks)))
  for (int64_t c = 0; c < num_chunks; c++) {
    const int64_t begin = chunks[c].begin, end = begin + chunks[c].count, to_state = chunks[c].state - begin;
    float* weights = full_precision_weights(params, master, to_state);
    const float keep = 1.0f - s.learning_rate * (chunks[c].decays ? s.weight_decay : 0.0f);
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
      float g = grads[i] * factor;
      float m_new = s.beta1 * m[i + to_state] + (1.0f - s.beta1) * g;
      float v_new = s.beta2 * v[i + to_state] + (1.0f - s.beta2) * g * g;
      m[i + to_state] = m_new;
      v[i + to_state] = v_new;
      weights[i] = weights[i] * keep - step_size * m_new / (std::sqrt(v_new) * v_scale + s.eps);
      if constexpr (has_master_weights) from_float(params[i], weights[i]);
    }
  }
}

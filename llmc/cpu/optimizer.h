// AdamW and the gradient's norm.
#pragma once
#include <algorithm> // std::min
#include <cmath>     // sqrt
#include <cstdint>   // int64_t
#include <vector>    // std::vector

// The sum of squares of x (n), in double. Blocks of fixed size, added in order: the same bits on any number of threads.
inline double sum_of_squares(const float* x, int64_t n) {
  const int64_t block = 1 << 16, blocks = (n + block - 1) / block;
  std::vector<double> partial(size_t(blocks), 0.0);
#pragma omp parallel for schedule(static)
  for (int64_t b = 0; b < blocks; b++) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = b * block; i < std::min(n, (b + 1) * block); i++) sum += double(x[i]) * double(x[i]);
    partial[size_t(b)] = sum;
  }
  double sum = 0;
  for (double p : partial) sum += p;
  return sum;
}

// The numbers of one AdamW update (Loshchilov & Hutter 2019), as PyTorch computes it.
struct AdamWStep {
  float learning_rate, beta1, beta2, eps;
  float bias_correction1, bias_correction2;  // 1 - beta^step
  float grad_scale;                          // from clipping by the global norm
};

// g = grad_scale * grads (n); m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
// params = params (1 - lr * weight_decay) - lr * (m / bias_correction1) / (sqrt(v / bias_correction2) + eps)
inline void adamw_update(float* params, float* m, float* v, const float* grads, int64_t n, float weight_decay,
                         const AdamWStep& s) {
  const float step_size = s.learning_rate / s.bias_correction1;
  const float v_scale = 1.0f / std::sqrt(s.bias_correction2);
  const float keep = 1.0f - s.learning_rate * weight_decay;
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < n; i++) {
    float g = grads[i] * s.grad_scale;
    float m_new = s.beta1 * m[i] + (1.0f - s.beta1) * g;
    float v_new = s.beta2 * v[i] + (1.0f - s.beta2) * g * g;
    m[i] = m_new;
    v[i] = v_new;
    params[i] = params[i] * keep - step_size * m_new / (std::sqrt(v_new) * v_scale + s.eps);
  }
}

// Sampling a token from logits.
#pragma once
#include <algorithm>  // std::max_element
#include <cmath>      // exp

// Returns token i with probability softmax(logits (n) / temperature)[i], by inverting the cumulative distribution at `uniform`, which is in
// [0, 1); temperature > 0.
inline int sample_token(const float* logits, int n, double uniform, double temperature = 1) {
  const float max = *std::max_element(logits, logits + n);
  double sum = 0;
  for (int i = 0; i < n; i++) sum += std::exp(double(logits[i] - max) / temperature);
  double threshold = uniform * sum, cumulative = 0;
  for (int i = 0; i < n; i++) {
    cumulative += std::exp(double(logits[i] - max) / temperature);
    if (threshold < cumulative) return i;
  }
  return n - 1;  // rounding
}

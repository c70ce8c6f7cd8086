// Drawing a token from logits.
#pragma once
#include <algorithm> // std::max_element
#include <cmath>     // exp

// Token i with probability softmax(logits (n))[i], by inversion of the cumulative distribution; `uniform` in [0, 1).
inline int sample_token(const float* logits, int n, double uniform) {
  const float max = *std::max_element(logits, logits + n);
  double sum = 0;
  for (int i = 0; i < n; i++) sum += std::exp(double(logits[i] - max));
  double threshold = uniform * sum, cumulative = 0;
  for (int i = 0; i < n; i++) {
    cumulative += std::exp(double(logits[i] - max));
    if (threshold < cumulative) return i;
  }
  return n - 1;  // rounding
}

// Sampling a token from logits.
#pragma once
#include <algorithm>           // std::max_element
#include <cmath>               // exp, isfinite
#include "llmc/utils/error.h"  // user_error

// Returns token i with probability softmax(logits (n) / temperature)[i], by inverting the cumulative distribution at `uniform`, which is in
// [0, 1); with temperature 0 the token with the highest logit, of equal ones the first. A logit of -infinity is a probability of 0. Throws
// UserError for logits that make no distribution: one is NaN or +infinity, or all are -infinity.
inline int sample_token(const float* logits, int n, double uniform, double temperature = 1) {
  const float max = *std::max_element(logits, logits + n);
  const double divisor = temperature > 0 ? temperature : 1;
  double sum = 0;
  for (int i = 0; i < n; i++) sum += std::exp(double(logits[i] - max) / divisor);
  if (!std::isfinite(sum))
    user_error("no sample can be drawn: the model's logits are not finite; its weights, or what it computes from them, have become NaN or "
               "infinite: take an earlier checkpoint");
  if (temperature == 0) return int(std::max_element(logits, logits + n) - logits);
  double threshold = uniform * sum, cumulative = 0;
  for (int i = 0; i < n; i++) {
    cumulative += std::exp(double(logits[i] - max) / divisor);
    if (threshold < cumulative) return i;
  }
  return n - 1;  // rounding
}

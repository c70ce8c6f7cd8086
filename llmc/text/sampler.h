// Sampling a token from logits.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <vector>
#include "llmc/base/error.h"

// What decides on the next token, in the order in which it is applied, as in transformers.
struct SamplingOptions {
  // Divides positive logits of tokens that occur already, and multiplies negative ones (Keskar et al. 2019).
  double repetition_penalty = 1;
  double temperature = 1;  // divides the logits; 0: always the token with the highest one, of equal ones the first
  int top_k = 0;           // only the k tokens with the highest logits, of equal ones the first; 0: all
  double top_p = 1;    // only the likeliest tokens that together have at least this probability (Holtzman et al. 2020)
  int vocabulary = 0;  // only tokens below this one: a model may have more, which stand for no text; 0: all
};

inline void penalize_repetition(std::vector<float>& logits, const std::vector<int>& tokens, double penalty) {
  for (int token : std::set<int>(tokens.begin(), tokens.end())) {
    float& logit = logits[token];
    logit = float(logit > 0 ? logit / penalty : logit * penalty);
  }
}

// Returns the token that inverts the cumulative distribution at `uniform`, which is in [0, 1), of softmax(logits (n) /
// temperature) over the tokens that the options leave. `tokens`: those before, for the repetition penalty. A logit of
// -infinity is a probability of 0. Throws UserError for logits that make no distribution: one is NaN or +infinity, or
// all are -infinity.
inline int sample_token(std::vector<float> logits, double uniform, const SamplingOptions& o,
                        const std::vector<int>& tokens = {}) {
  if (o.vocabulary > 0) logits.resize(std::min(logits.size(), size_t(o.vocabulary)));
  const int n = int(logits.size());
  const double divisor = o.temperature > 0 ? o.temperature : 1;
  if (o.repetition_penalty != 1) penalize_repetition(logits, tokens, o.repetition_penalty);
  const float max = *std::max_element(logits.begin(), logits.end());
  thread_local std::vector<double> weights;  // 400 KB for GPT-2: new memory would be cleared by the kernel each time
  weights.resize(logits.size());
  double sum = 0;
  for (int i = 0; i < n; i++) sum += weights[i] = std::exp(double(logits[i] - max) / divisor);
  if (!std::isfinite(sum))
    user_error("no sample can be drawn: the model's logits are not finite; its weights, or what it computes from them, "
               "have become NaN or infinite: take an earlier checkpoint");
  if (o.temperature == 0) return int(std::max_element(logits.begin(), logits.end()) - logits.begin());

  thread_local std::vector<int> kept;  // all in their order, or the likeliest in theirs
  kept.resize(logits.size());
  std::iota(kept.begin(), kept.end(), 0);
  const bool some = (o.top_k > 0 && o.top_k < n) || o.top_p < 1;
  if (some) {
    auto likelier = [&](int a, int b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); };
    if (o.top_k > 0 && o.top_k < n) {
      std::partial_sort(kept.begin(), kept.begin() + o.top_k, kept.end(), likelier);
      kept.resize(size_t(o.top_k));
    } else {
      std::sort(kept.begin(), kept.end(), likelier);
    }
    sum = 0;
    for (int i : kept) sum += weights[i];
    double cumulative = 0;
    size_t count = 0;
    while (count < kept.size() && (count == 0 || cumulative < o.top_p * sum)) cumulative += weights[kept[count++]];
    kept.resize(count);
    sum = cumulative;
  }
  const double threshold = uniform * sum;
  double cumulative = 0;
  for (int i : kept) {
    cumulative += weights[i];
    if (threshold < cumulative) return i;
  }
  return kept.back();  // rounding
}

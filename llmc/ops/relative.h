// Relative positions, by the formula of llmc/wiring/terms/relative.h. Attention gets q + u and q + v as two tensors of
// queries, and r as a table by distance (RelativePositions in attention_args.h).
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>
#include "precision.h"

// The queries that are multiplied with keys, q + u, and with vectors of distances, q + v.
struct RelativeQueries {
  const floatX* q = nullptr;  // (N, C), rows q_stride apart
  int64_t q_stride = 0;
  const floatX *u = nullptr, *v = nullptr;             // (C): for all heads
  floatX *of_keys = nullptr, *of_distances = nullptr;  // (N, C)
};

// The gradient of q from the gradients of q + u and q + v.
struct RelativeQueryGradients {
  floatX* dq = nullptr;  // (N, C), rows dq_stride apart
  int64_t dq_stride = 0;
  floatX *of_keys = nullptr, *of_distances = nullptr;  // (N, C)
};

// (distances, C): s_d, the largest distance, distances - 1, first: the sines of d * 10000^(-2i/C), i < C/2, then the
// cosines. C is even.
inline std::vector<float> sines_of_distances(int64_t distances, int64_t C) {
  std::vector<float> table;
  table.reserve(size_t(distances * C));
  auto angle = [&](int64_t d, int64_t i) { return double(d) * std::pow(10000.0, -2.0 * double(i) / double(C)); };
  for (int64_t d = distances - 1; d >= 0; d--) {
    for (int64_t i = 0; i < C / 2; i++) table.push_back(float(std::sin(angle(d, i))));
    for (int64_t i = 0; i < C / 2; i++) table.push_back(float(std::cos(angle(d, i))));
  }
  return table;
}

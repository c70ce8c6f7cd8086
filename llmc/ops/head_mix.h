// Sums of heads of several layers, with a weight for each pair of a head and one that it is made of (`router`).
#pragma once
#include <cstdint>
#include "llmc/base/host_device.h"

// Heads of one layer, which lie side by side, and what each of them weighs in each sum.
template <class T>
struct MixedHeads {
  const T* x;  // (N, heads * HS), rows `stride` apart
  int64_t stride;
  const T* weight;  // head i has weight[o * of_sum + i * of_head] in sum o
  int64_t of_sum, of_head;
};

// out = or, with `accumulate`, += sums: sum o of a token, HS channels from o * HS on, is made of all heads of all
// sources at that token. There are as many sums as a source has heads.
template <class T>
struct HeadMix {
  T* out;  // (N, heads * HS), rows out_stride apart
  int64_t out_stride, HS;
  int heads;
  bool accumulate;
  const MixedHeads<T>* sources;  // (num_sources), on the device
  int num_sources;

  SLA_HOST_DEVICE int64_t num_weights() const { return int64_t(heads) * num_sources * heads; }
};

// How many of N rows share a partial sum of the gradient of each weight.
constexpr int64_t head_mix_rows(int64_t N) { return N <= 4096 ? 32 : (N + 127) / 128; }
inline int64_t head_mix_partial_sums(int64_t N) { return (N + head_mix_rows(N) - 1) / head_mix_rows(N); }

// `route`: whose K/V a layer's heads attend to in an update, where they attend to their own layer's otherwise.
#pragma once
#include <algorithm>
#include <cstdint>
#include "llmc/base/random.h"

// The layer itself, or with probability p one of those below it, each as probably: the same number, of the seed, the
// update and the layer, decides on both.
inline int drawn_source(double p, uint64_t seed, int64_t update, int layer) {
  const double u = random_uniform(seed, RandomStream::route, uint32_t(update), uint64_t(layer));
  return u < p && layer > 0 ? std::min(int(u / p * layer), layer - 1) : layer;
}

// The operands of LayerNorm's and RMSNorm's operations, the same for every device: N rows of C channels.
#pragma once
#include <cstdint>
#include "llmc/ops/precision.h"

struct LayerNormForward {
  floatX* out = nullptr;                   // (N, C) =
  float *mean = nullptr, *rstd = nullptr;  // (N) =
  const floatX* weight = nullptr;          // (C)
  const floatX* bias = nullptr;            // (C), or null
  int64_t N = 0, C = 0;
  float eps = 0;
  bool centers = true;  // false: RMSNorm, whose mean is 0
};

struct LayerNormBackward {
  floatX* dinp = nullptr;                        // (N, C) +=
  float* dweight = nullptr;                      // (C) +=
  float* dbias = nullptr;                        // (C) +=, or null
  const floatX *dout = nullptr, *inp = nullptr;  // (N, C)
  const float *mean = nullptr, *rstd = nullptr;  // (N)
  const floatX* weight = nullptr;                // (C)
  float* scratch = nullptr;                      // layernorm_backward_scratch(N, C) floats, overwritten
  int64_t N = 0, C = 0;
  bool centers = true;
};

// The weights with which the outputs of several attention maps are summed in a layer (`blend` and `gate`), the same for
// every device. With P_0 = S_0 and P_l = g_l P_(l-1) + (1 - g_l) S_l, where S_m is layer m's own attention map:
//
//   P_l = sum over m <= l of weight(m) S_m,  weight(m) = (1 - g_m) g_(m+1) ... g_l,  with 1 - g_0 = 1
#pragma once
#include <cstdint>
#include "llmc/ops/attention_mask.h"

struct MapWeights {
  // (L, rows): g_l of each token, where the g_0 of layer 0 is not used. Null: all of them are `blend`.
  const float* gates = nullptr;
  float blend = 0;
  int64_t gates_stride = 0;  // from one layer's gates to the next layer's
  int layer = 0;             // l

  SLA_HOST_DEVICE float gate(int m, int64_t row) const {
    return gates != nullptr ? gates[m * gates_stride + row] : blend;
  }
  SLA_HOST_DEVICE float weight(int map, int64_t row) const {
    float w = map > 0 ? 1 - gate(map, row) : 1.0f;
    for (int m = map + 1; m <= layer; m++) w *= gate(m, row);
    return w;
  }
};

// dgates (layer + 1, rows), from dweights (layer + 1, rows), the gradients of the weights of one token's row:
// With R_0 = dweights_0 and R_m = g_m R_(m-1) + (1 - g_m) dweights_m:  dgate_m += g_(m+1) ... g_l (R_(m-1) -
// dweights_m).
SLA_HOST_DEVICE inline void add_gate_gradients(float* dgates, const float* dweights, const MapWeights& w, int64_t row) {
  float sum = dweights[row];  // R_(m-1)
  for (int m = 1; m <= w.layer; m++) {
    float above = 1;  // the product of the gates above m
    for (int i = m + 1; i <= w.layer; i++) above *= w.gate(i, row);
    const float own = dweights[m * w.gates_stride + row], g = w.gate(m, row);
    dgates[m * w.gates_stride + row] += above * (sum - own);
    sum = g * sum + (1 - g) * own;
  }
}

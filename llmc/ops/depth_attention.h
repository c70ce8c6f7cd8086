// Attention over depth (`depth`): a token's query attends to the token's own keys in several layers.
#pragma once
#include <cstdint>

// The keys and values of neighbouring heads in one layer, and their gradients: (N, heads * HS) each, rows `stride` and
// d_stride apart.
template <class T>
struct LayerKV {
  const T *k, *v;
  int64_t stride;
  T *dk, *dv;
  int64_t d_stride;
};

// For each of N tokens and each head, with that token's and head's q, k, v and out alone:
//   out = sum over layers j of p_j v_j,  p = softmax of the scores q . k_j / sqrt(HS).
// The backward pass computes p again. With d, the gradient of out, and ds_j = p_j (d . v_j - d . out) / sqrt(HS):
//   dq += the sum of ds_j k_j;  dk_j = or += ds_j q;  dv_j = or += p_j d.
// In the last layer, the query's own, dv is given d; there dk is +=, and what layers above have given its k and v is
// added. In those below it is +=, unless there is no layer above to have written there before.
template <class T>
struct DepthAttention {
  const T* q;  // rows q_stride apart
  T* out;
  int64_t q_stride, out_stride;
  int heads, HS, num_layers;
  const LayerKV<T>* layers;  // (num_layers), on the device
  T* dq = nullptr;           // rows dq_stride apart
  int64_t dq_stride = 0;
  const T *dk_of_above = nullptr, *dv_of_above = nullptr;  // rows of_above_stride apart; null: there is no layer above
  int64_t of_above_stride = 0;
};

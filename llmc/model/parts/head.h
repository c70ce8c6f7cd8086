// The output head: logits of the hidden states, by wte, the embeddings of tokens (tied weights), or with `untied` by
// lm_head.
#pragma once
#include <algorithm>
#include <cstdint>
#include "llmc/model/activations.h"
#include "llmc/model/parameters.h"
#include "llmc/operations.h"
#include "llmc/ops/precision.h"

struct Head {
  int bucket = 0;              // of its weight
  int64_t C = 0, Vp = 0;       // Vp: the vocabulary in whole tiles of a matmul
  const floatX* w = nullptr;   // (Vp, C)
  float* g = nullptr;          // (Vp, C)
  const floatX* in = nullptr;  // (N, C): the final hidden states
  floatX* din = nullptr;       // (N, C), in buffers::dnorm: the last norm's dout
  float cap = 0;               // of `softcap`; 0: none
  floatX* logits = nullptr;    // (rows of a chunk, Vp), and in the backward pass their gradients
};

// How many of `rows` rows of logits, each of row_bytes, are computed, differentiated and dropped at a time: chunks of
// about equal size, as few as chunk_bytes allows, in multiples of the device's logit_row_multiple; but at least 64 if
// there are so many.
inline int64_t logit_chunk_rows(int64_t rows, int64_t row_bytes, int64_t chunk_bytes) {
  const auto in_multiples = [](int64_t n) { return n / logit_row_multiple * logit_row_multiple; };
  const int64_t most = std::max(std::max<int64_t>(64, logit_row_multiple), in_multiples(chunk_bytes / row_bytes));
  const int64_t chunks = (rows + most - 1) / most;
  return std::min(rows, in_multiples((rows + chunks - 1) / chunks + logit_row_multiple - 1));
}

inline void declare(Head& head, ActivationList& list) {
  if (list.shape.training) list.in_buffer(buffers::dnorm, head.din, {list.shape.rows, list.shape.config.channels});
}

// Sets the pointers. `in`: the final hidden states. In generation `grads` has null pointers.
inline void bind_head(Head& head, const floatX* in, int64_t C, int64_t Vp, const Params<floatX>& params,
                      const Params<float>& grads, const Activations& acts) {
  const bool untied = params.lm_head != nullptr;
  head.bucket = untied ? params.lnf_bucket : params.embedding_bucket, head.C = C, head.Vp = Vp;
  head.w = untied ? params.lm_head : params.wte, head.g = untied ? grads.lm_head : grads.wte;
  head.in = in, head.logits = acts.logits;
}

// logits (count, Vp) = the logits of `count` rows of the hidden states, from `first` on, before they are capped.
inline void head_forward(const Head& head, int64_t first, int64_t count) {
  matmul_forward(head.logits, head.in + first * head.C, head.w, nullptr, count, head.C, head.Vp);
}

// logits (count, Vp) = what tokens are drawn by: without gradients, capped.
inline void head_forward_capped(const Head& head, int64_t first, int64_t count) {
  head_forward(head, first, count);
  if (head.cap > 0) cap_logits(head.logits, count * head.Vp, head.cap);
}

// From the gradients of these logits: the gradients of the hidden states' rows =, and the weight's gradient +=.
inline void head_backward(const Head& head, int64_t first, int64_t count) {
  const int64_t C = head.C, Vp = head.Vp;
  gemm('N', 'N', count, C, Vp, head.logits, Vp, head.w, C, false, head.din + first * C, C);
  gemm('T', 'N', Vp, C, count, head.logits, Vp, head.in + first * C, C, true, head.g, C);
}

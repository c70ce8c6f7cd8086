// Dropout (Srivastava et al. 2014): which elements of a tensor become 0. It is a function of the seed, the update, the
// sequence's number in the update, the layer, the site, the head and the element's place, and of nothing else: the same
// on each device, for any cut of an update into micro-batches and ranks, at each level of recomputation and for
// different wirings. Nothing of it is stored.
//
// Philox4x32 with seven rounds, which pass BigCrush (Salmon et al. 2011), makes 128 bits of a sequence's key and of a
// place. An element has 16 of them: it is dropped if they are below p 2^16. Eight elements share a call:
//   - in rows of channels, eight neighbouring channels;
//   - in attention's probabilities, queries q, q + 8 with keys k, k + 8, k + 16, k + 24: in the tiles of tensor
//     cores a thread has them together, whether queries are rows (forward pass, dq) or columns (dk and dv).
#pragma once
#include <cstdint>
#include "llmc/base/random.h"

constexpr double dropout_steps = 65536;  // p is rounded to a multiple of 1 / dropout_steps

enum class DropoutSite : uint32_t { embeddings, probabilities, attention_output, mlp_output };

// What is dropped at a site. Kept elements are multiplied by `scale`, 1 / (1 - p).
struct Dropout {
  const uint64_t* keys = nullptr;  // (B), on the device: dropout_key of each sequence; null: nothing is dropped
  uint32_t place = 0;              // the site and the layer
  uint32_t threshold = 0;          // p 2^16
  float scale = 1;
};

inline Dropout make_dropout(const uint64_t* keys, double p, DropoutSite site, int layer) {
  return {keys, uint32_t(site) << 24 | uint32_t(layer), uint32_t(p * dropout_steps + 0.5), float(1 / (1 - p))};
}

// The key of a sequence, by its number in the update.
SLA_HOST_DEVICE inline uint64_t dropout_key(uint64_t seed, int64_t update, int64_t sequence) {
  const Philox words = random_words(seed, RandomStream::dropout, uint32_t(update), uint64_t(sequence));
  return uint64_t(words.word[0]) << 32 | words.word[1];
}

// The bits of eight elements: `column` and `row` count groups of them, `part` tells tensors of a site from each other.
SLA_HOST_DEVICE inline Philox dropout_bits(uint64_t key, uint32_t place, uint32_t part, uint32_t row, uint32_t column) {
  return philox<7>(key, uint64_t(place) << 32 | part, uint64_t(row) << 32 | column);
}

// The 16 bits of element i of eight.
SLA_HOST_DEVICE inline uint32_t element_bits(const Philox& bits, int i) {
  return bits.word[i >> 1] >> (16 * (i & 1)) & 0xffff;
}

// The bits of channels [8 group, 8 group + 8) of row t.
SLA_HOST_DEVICE inline Philox channel_bits(const Dropout& d, int64_t b, int64_t t, int64_t group) {
  return dropout_bits(d.keys[b], d.place, 0, uint32_t(t), uint32_t(group));
}

// The group of a query or of a key, and the place in `part` of a head's source: a query head's K/V head number
// `source`.
SLA_HOST_DEVICE inline uint32_t query_group(int64_t q) { return uint32_t(q >> 4 << 3 | (q & 7)); }
SLA_HOST_DEVICE inline uint32_t key_group(int64_t k) { return uint32_t(k >> 5 << 3 | (k & 7)); }
SLA_HOST_DEVICE inline uint32_t part_of_head(int64_t head, int64_t source) { return uint32_t(source << 16 | head); }
SLA_HOST_DEVICE inline int probability_in_group(int64_t q, int64_t k) { return int((q >> 3 & 1) * 4 + (k >> 3 & 3)); }

// Whether the probability of query q and key k of a head's source is kept.
SLA_HOST_DEVICE inline bool keeps_probability(const Dropout& d, int64_t b, int64_t head, int64_t source, int64_t q,
                                              int64_t k) {
  const Philox bits = dropout_bits(d.keys[b], d.place, part_of_head(head, source), query_group(q), key_group(k));
  return element_bits(bits, probability_in_group(q, k)) >= d.threshold;
}

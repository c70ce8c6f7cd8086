// What an update of the reference model draws: which elements of a tensor become 0, one element at a time, and whose
// K/V a layer uses.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>
#include "dev/test/reference/layers.h"

namespace reference {

// What decides beside an element's place. p = 0: nothing is dropped.
struct UpdateDraw {
  double p = 0;
  uint64_t seed = 0;
  int64_t update = 0, first_sequence = 0;  // in the update, of the batch
  bool routes = false;                     // whether `route` draws; else each layer uses its own K/V
};

enum class Site { embeddings, probabilities, attention_output, mlp_output };

// Philox4x32 (Salmon et al. 2011): four words, from four words of a counter and two of a key.
inline std::vector<uint32_t> philox_words(std::vector<uint32_t> x, uint32_t key0, uint32_t key1, int rounds) {
  for (int round = 0; round < rounds; round++) {
    const uint64_t a = uint64_t(0xD2511F53) * x[0], b = uint64_t(0xCD9E8D57) * x[2];
    x = {uint32_t(b >> 32) ^ x[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ x[3] ^ key1, uint32_t(a)};
    key0 += 0x9E3779B9, key1 += 0xBB67AE85;
  }
  return x;
}

// The sources of a head, in an update that routes: with the probability of `route` a lower layer takes the layer's
// place. The number of 53 bits is that of stream 8, the update and the layer.
inline Sources sources_in_update(const ModelConfig& config, const UpdateDraw& d, int l, int head) {
  const Sources own = source_layers(config, l, head);
  const RouteTerm* route = find_term<RouteTerm>(config);
  if (route == nullptr || !d.routes || l == 0) return own;
  const std::vector<uint32_t> words =
      philox_words({uint32_t(l), 0, uint32_t(d.update), 8}, uint32_t(d.seed), uint32_t(d.seed >> 32), 10);
  const double u = double(words[0]) / 4294967296.0 + double(words[1] >> 11) / 9007199254740992.0;
  if (u >= route->probability) return own;
  const int lower = int(u / route->probability * l);
  Sources drawn;
  for (const auto& [k, v] : own) drawn.insert({k == l ? lower : k, v == l ? lower : v});
  return drawn;
}

// The 16-bit number `index` of eight at (row, column) of sequence b, scaled to 0 to 1. Ten rounds make the sequence's
// key from the seed, 7 for dropout, the update and the sequence; seven rounds make eight numbers from the key.
inline double uniform(const UpdateDraw& d, int64_t b, Site site, int layer, int64_t part, int64_t row, int64_t column,
                      int64_t index) {
  const int64_t sequence = d.first_sequence + b;
  const std::vector<uint32_t> key = philox_words({uint32_t(sequence), uint32_t(sequence >> 32), uint32_t(d.update), 7},
                                                 uint32_t(d.seed), uint32_t(d.seed >> 32), 10);
  const std::vector<uint32_t> words =
      philox_words({uint32_t(column), uint32_t(row), uint32_t(part), uint32_t(layer + (int(site) << 24))}, key[1],
                   key[0], 7);
  return double(words[index / 2] >> (index % 2 * 16) & 65535) / 65536;
}

// 0, or what a kept element is multiplied by.
inline double kept(const UpdateDraw& d, double uniform) {
  return uniform < std::round(d.p * 65536) / 65536 ? 0 : 1 / (1 - d.p);
}

// x (B, T, C), or its gradient.
template <class Real>
void drop(const UpdateDraw& d, Site site, int layer, int64_t T, int64_t C, Array<Real>& x) {
  if (d.p == 0) return;
  for (int64_t i = 0; i < int64_t(x.size()); i++) {
    const int64_t n = i / C, c = i % C;
    x[i] *= Real(kept(d, uniform(d, n / T, site, layer, 0, n % T, c / 8, c % 8)));
  }
}

// The attention map (B, T, S * T) of a head, or its gradient, after dropout. Eight probabilities share a Philox call:
// their queries differ in the bit of 8, and their keys in the bits of 8 and 16.
template <class Real>
Array<Real> drop_map(const UpdateDraw& d, int layer, int head, const Array<Real>& map, int64_t B, int64_t T,
                     int64_t K) {
  Array<Real> out = map;
  if (d.p == 0) return out;
  const int64_t keys = map.size() / (B * T);
  for (int64_t i = 0; i < int64_t(map.size()); i++) {
    const int64_t n = i / keys, q = n % T, source = i % keys / K, k = i % keys % K;
    const int64_t row = q / 16 * 8 + q % 8, column = k / 32 * 8 + k % 8, index = q / 8 % 2 * 4 + k / 8 % 4;
    out[i] *= Real(kept(d, uniform(d, n / T, Site::probabilities, layer, source * 65536 + head, row, column, index)));
  }
  return out;
}

}  // namespace reference

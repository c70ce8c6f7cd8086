// What a wiring comes to in a model of L layers and h heads: each of its terms (terms/) changes a part of it, and
// everything else asks it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>
#include "llmc/ops/activation.h"
#include "llmc/ops/attention_mask.h"

// A source of a head: the layer whose keys it attends to, and the one whose values are theirs.
struct KVSource {
  int k, v;

  KVSource(int layer) : KVSource(layer, layer) {}
  KVSource(int layer_of_k, int layer_of_v) : k(layer_of_k), v(layer_of_v) {}
  bool operator==(const KVSource& other) const { return k == other.k && v == other.v; }
  bool operator!=(const KVSource& other) const { return !(*this == other); }
  bool operator<(const KVSource& other) const { return k != other.k ? k < other.k : v < other.v; }
};

struct WiringTable {
  // Whether a layer's attention map is its own, or that and the one of the layer below.
  enum class Mix { none, blend, gate };

  int num_layers = 0, num_heads = 0, num_kv_heads = 0;
  std::vector<std::vector<KVSource>> source_layers;  // (L, h): whose K/V the head attends to, ascending
  std::vector<AttentionMask> masks;                  // (L, h)
  int topk = 0;                                      // 0: all keys
  bool sinks = false;                                // softmaxes have a learned score without a value
  bool documents = false;                            // queries see only keys of their own document
  std::vector<int> map_layer;  // (L): whose q, k and mask the layer uses; its own, but for `reuse`
  Mix mix = Mix::none;
  double blend = 0;         // a
  double rope = 0;          // the base of rotary positions; 0: there are none
  bool relative = false;    // Transformer-XL's relative positions
  bool alibi = false;       // masks have slopes: scores fall with the distance
  int memory = 0;           // positions before a segment that its queries see; 0: texts are in one piece
  int stored_layers = 0;    // layer l has the parameters of layer l mod stored_layers
  bool has_cycles = false;  // of so many layers, and something is added before each: `universal`
  double halting = 0;       // the eps of `act`; 0: tokens do not halt
  double ponder_cost = 0;
  bool rmsnorm = false;         // norms take no mean and have no bias
  bool qknorm = false;          // q and k of each head are divided by their root mean square
  double route = 0;             // how probably a layer uses the K/V of a lower one in an update
  bool router = false;          // from layer 1 on K/V heads are learned sums over all layers up to theirs
  bool depth = false;           // from layer 1 on values are sums over all layers up to theirs, by attention
  bool value_residual = false;  // from layer 1 on values are mixed with what layer 0 projected
  Activation activation = Activation::gelu;
  int hidden_units = 0;                 // of an MLP; 0: as many as hidden_size says
  bool untied = false;                  // the output head has a weight of its own
  double softcap = 0;                   // logits lie between -softcap and softcap; 0: anywhere
  bool dense = false;                   // inputs of layers are sums of all earlier outputs
  bool gru = false;                     // branches join the residual stream in gates
  bool reversible = false;              // two residual streams, which the backward pass recovers
  int lsh_buckets = 0, lsh_rounds = 0;  // 0: attention does not hash
  std::vector<std::string> notes;       // what a drawing of the heads does not show, a line for each term that says it

  const std::vector<KVSource>& sources(int layer, int head) const { return source_layers[layer * num_heads + head]; }
  std::vector<KVSource>& sources(int layer, int head) { return source_layers[layer * num_heads + head]; }
  const AttentionMask& mask(int layer, int head) const { return masks[layer * num_heads + head]; }
  AttentionMask& mask(int layer, int head) { return masks[layer * num_heads + head]; }
  // Whether the model has an embedding of each position (wpe).
  bool learns_positions() const { return rope == 0 && !relative && !alibi; }
  // H, the hidden units of an MLP between C channels, and F, the products that they are made of. Two thirds of 4 C are
  // as many weights with two products, in whole tiles of 64.
  int64_t hidden_size(int64_t C) const {
    return hidden_units > 0 ? hidden_units : is_gated(activation) ? (8 * C + 191) / 192 * 64 : 4 * C;
  }
  int64_t fc_size(int64_t C) const { return num_products(activation, hidden_size(C)); }
  int kv_head(int head) const { return int(int64_t(head) * num_kv_heads / num_heads); }
};

// The wiring of attention: whose keys and values each query head attends to, which of their positions, and by whose
// attention map. It is a text of terms, such as `gqa(4) window(512,SSSL)`, applied from left to right to plain GPT-2.
// No other file of the trainer decides it: the forward pass, the backward pass, the memory plan, generation and the
// FLOP count ask the plan that follows from it (attention_plan.h).
//
// Layers and heads count from 0. L layers, h heads.
//
//   plain                GPT-2: head i of layer l attends to the K/V that its own layer projected for head i
//   sla(n, k)            skip-layer attention: from layer n on, the last k heads attend to the K/V of the layer n
//                        below, same head. k may also be a range of heads a:b, from a on and before b. Several such
//                        terms make several distances ("Skip-Layer Attention: Bridging Abstract and Detailed
//                        Dependencies in Transformers")
//   also(n, k)           as sla, but beside what the head attends to already: one softmax over the keys of all sources
//   share(f)             cross-layer attention (Brandon et al. 2024): all heads attend to the K/V of the first layer of
//                        their group of f layers
//   layers(0_0_2_2)      all heads of layer l attend to the K/V of the layer named for it, which is l or below
//   gqa(k)               grouped-query attention (Ainslie et al. 2023): k K/V heads; query head i attends to K/V head
//                        i*k/h
//   window(w[, SSL])     the last w keys, the query's own among them; with a pattern, which repeats over the layers,
//                        only where it says S
//   strided(s[, how])    Sparse Transformer (Child et al. 2019): A1: t - s <= j;  A2: (t - j) % s == 0
//   fixed(s, c[, how])   of the same paper: A1: j/s == t/s;  A2: j % s >= s - c.  how: `heads` (the default): the first
//                        ceil(h/2) heads A1, the others A2; `layers`: even layers A1, odd ones A2; `union`: A1 or A2
//   topk(k)              of the keys that a query sees, the k with the highest scores, of equal ones the first
//   reuse(g)             in groups of g layers all use the attention map (q, k, mask) of the group's first on
//                        their own v
//   blend(a)             attention map P_l = a P_(l-1) + (1 - a) S_l, where S_l is the layer's own, and P_0 = S_0
//   gate                 blend with a = sigmoid(x . w + b), of each query, where x is the layer's LayerNorm'd input
//   rope, rope(b)        no learned positions: q and k of each head are rotated by position * b^(-2i/hs), b = 10000
//                        (RoFormer); a head that attends to another layer's k does so as that layer rotated it
//   relative             no learned positions: the score of query t and key j is ((q_t + u) . k_j + (q_t + v) . r_d) /
//                        sqrt(hs), where r_d = s_d W depends on the distance d = t - j alone (Transformer-XL, Dai et
//                        al. 2019); W, u and v are of the query's layer; s_d: llmc/ops/relative.h
//   memory(m)            of the same paper: a stream of text is computed in segments of n_positions, S; a query of
//                        segment n also attends to the m positions before it, from n S - m on, of which each layer
//                        keeps its input as a constant. Needs rope or relative
//   universal(k)         Universal Transformer (Dehghani et al. 2018): layers in cycles of k, in which layer l has the
//                        parameters of layer l mod k. Before each cycle c the residual stream gets + wse[c] and, with
//                        learned positions, + wpe[position], which the embeddings do not have. Sources count layers as
//                        they run
//   act(eps[, cost])     adaptive computation time (Graves 2016), of `universal`: after cycle c a token halts with
//                        probability p_c = sigmoid(x_c . w + b). N: the first c with p_1 + ... + p_c >= 1 - eps, or the
//                        last. The final LayerNorm gets p_1 x_1 + ... + p_(N-1) x_(N-1) + R x_N, where the weights add
//                        up to 1. What is minimised is the loss + cost * the mean of N + R; cost = 0.01
//   rmsnorm              norms without mean and bias: x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019)
//   gru                  GTrXL (Parisotto et al. 2019): the residual stream x and a branch's output y join in a gate,
//                        in place of x + y: y = relu(y), r = sigmoid(y W_r + x U_r), z = sigmoid(y W_z + x U_z - b),
//                        g = tanh(y W_g + (r x) U_g), and the stream becomes (1 - z) x + z g
//   lsh(b, r)            attention by locality-sensitive hashing (Reformer, Kitaev et al. 2020): k_j = q_j / |q_j|. In
//                        each of r rounds x falls into bucket argmax([x R, -x R]) of b, where R (hs, b/2) is a constant
//                        of the head and the round. A query sees the earlier positions that share its bucket in some
//                        round, and itself only if there are none
//   reversible           RevNet (Gomez et al. 2017), as in Reformer: two residual streams in fp32, both the embeddings
//                        at first: x1 += attention(ln_1(x2)), x2 += mlp(ln_2(x1)). ln_f gets their mean. The backward
//                        pass recovers a layer's streams from those after it, so that none are kept
//
// A layer shares what it projected itself, never what it uses of another layer. `window`, `strided` and `fixed`
// combine: a head sees the keys that all of them show to it.
#pragma once
#include <string>
#include <vector>
#include "llmc/ops/attention_mask.h"

struct WiringTerm {
  enum class Kind {
    plain,
    sla,
    also,
    share,
    layers,
    gqa,
    window,
    strided,
    fixed,
    topk,
    reuse,
    blend,
    gate,
    rope,
    relative,
    memory,
    universal,
    act,
    rmsnorm,
    gru,
    lsh,
    reversible
  };
  enum class How { heads, layers, both };  // of strided and fixed; both: union

  Kind kind = Kind::plain;
  int n = 0;           // sla, also: the distance in layers; share, reuse: layers in a group; gqa: K/V heads; window: w;
                       // strided, fixed: s; topk: k; memory: m; universal: k; lsh: b
  int c = 0;           // fixed; lsh: r
  int last_heads = 0;  // sla, also: how many heads, the last ones; 0 if it is a range:
  int first_head = 0, end_head = 0;  //   first_head and after the last one
  std::vector<int> layers;           // layers
  std::string pattern;               // window: of S and L; empty: S for all layers
  How how = How::heads;
  double a = 0;       // blend; rope: the base; act: eps
  double cost = 0;    // act
  int character = 1;  // where the term begins in the text, counted from 1
};

struct Wiring {
  std::string text = "plain";  // as it was given
  std::vector<WiringTerm> terms = {WiringTerm()};

  bool is_plain() const { return terms.size() == 1 && terms[0].kind == WiringTerm::Kind::plain; }
};

// Whether the model has an embedding of each position (wpe), which `rope` and `relative` replace.
bool learns_positions(const Wiring& w);

// Whether the wiring has a term of this kind.
bool has_term(const Wiring& w, WiringTerm::Kind kind);

// How many layers have parameters of their own: the k of `universal`; without it all, num_layers.
int stored_layers(const Wiring& w, int num_layers);

// The positions of earlier segments that a query attends to: the m of `memory`; 0 without it.
int memory_positions(const Wiring& w);

// Reads the text. Throws UserError, which says which term, at which character, and what would be right; what depends on
// the number of layers and heads is validate's.
Wiring parse_wiring(const std::string& text);

// sla(num_skip_layer, num_skip_head), the paper's n_l and n_h; plain for num_skip_head = 0.
Wiring skip_layer_wiring(int num_skip_layer, int num_skip_head);

// The paper's recommendation, n_l = 3/4 L and n_h = 3/4 h, rounded down. A model of a single layer or a single head has
// no other layer's K/V to attend to and stays plain.
Wiring default_wiring(int num_layers, int num_heads);

// Throws UserError, as parse_wiring does, unless the wiring fits a model of so many layers and heads.
void validate(const Wiring& w, int num_layers, int num_heads);

// The wiring in the one way to write it, without what a reader may leave out: equal for texts that say the same in the
// same order.
std::string canonical_text(const Wiring& w);

// What the terms come to.
struct WiringTable {
  enum class Mix {
    none,
    blend,
    gate
  };  // whether a layer's attention map is its own, or that and the one of the layer below

  int num_layers = 0, num_heads = 0, num_kv_heads = 0;
  std::vector<std::vector<int>> source_layers;  // (L, h): the layers whose K/V the head attends to, ascending
  std::vector<AttentionMask> masks;             // (L, h)
  int topk = 0;                                 // 0: all keys
  std::vector<int> map_layer;                   // (L): whose q, k and mask the layer uses; its own, but for `reuse`
  Mix mix = Mix::none;
  double blend = 0;         // a
  double rope = 0;          // the base of rotary positions; 0: there are none
  bool relative = false;    // Transformer-XL's relative positions
  int memory = 0;           // memory_positions of the wiring
  int stored_layers = 0;    // layer l has the parameters of layer l mod stored_layers
  bool has_cycles = false;  // of so many layers, and something is added before each: `universal`
  double halting = 0;       // the eps of `act`; 0: tokens do not halt
  double ponder_cost = 0;
  bool rmsnorm = false;                 // norms take no mean and have no bias
  bool gru = false;                     // branches join the residual stream in gates
  bool reversible = false;              // two residual streams, which the backward pass recovers
  int lsh_buckets = 0, lsh_rounds = 0;  // 0: attention does not hash

  const std::vector<int>& sources(int layer, int head) const { return source_layers[layer * num_heads + head]; }
  const AttentionMask& mask(int layer, int head) const { return masks[layer * num_heads + head]; }
  int kv_head(int head) const { return int(int64_t(head) * num_kv_heads / num_heads); }
};

// The table of a wiring that is valid for so many layers and heads.
WiringTable wiring_table(const Wiring& w, int num_layers, int num_heads);

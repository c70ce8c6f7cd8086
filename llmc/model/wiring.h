// The wiring of attention: whose keys and values each query head attends to. No other file of the trainer decides it; the forward pass,
// the backward pass, the memory plan, generation and the FLOP count ask the plan that follows from it (kv_plan.h).
//
// Layers and heads count from 0. Head i of layer l attends, with its own q, to the K/V head source(l, i):
//
//   plain GPT-2:           source(l, i) = (l, i)
//   skip-layer attention:  source(l, i) = (l - n_l, i)   if i >= h - n_h and l >= n_l,      else (l, i)
//
// ("Skip-Layer Attention: Bridging Abstract and Detailed Dependencies in Transformers"; its equation prints h - n_l where its
// listing, rightly, splits at h - n_h.) A layer shares what it projected itself, never what it uses of another layer.
#pragma once
#include <string>              // std::string
#include <vector>              // std::vector
#include "config_field.h"      // ConfigField
#include "llmc/utils/error.h"  // format, user_error

struct KVSource {
  int layer, head;
};

struct Wiring {
  int num_skip_layer = 0;  // n_l: how many layers below its own the source layer of a sharing head lies
  int num_skip_head = 0;   // n_h: how many heads, the last ones, attend to another layer's K/V; 0 is plain GPT-2

  bool is_plain() const { return num_skip_head == 0; }
};

// See ModelConfig's visit_fields.
template <class W, class Visit>
void visit_wiring_fields(W& w, Visit visit) {
  visit(ConfigField{"num_skip_layer", "num_skip_layer", "--skip-layers",
                    "n_l: a sharing head attends to the K/V of the layer this many below; default: 3/4 of the layers", false},
        w.num_skip_layer);
  visit(ConfigField{"num_skip_head", "num_skip_head", "--skip-heads",
                    "n_h: how many heads of a layer, the last ones, attend to another layer's K/V; 0: plain GPT-2; default: 3/4 of "
                    "the heads", false},
        w.num_skip_head);
}

// The same wiring, written in the one way: a plain one has no n_l.
inline Wiring normalized(const Wiring& w) { return w.is_plain() ? Wiring() : w; }

// The paper's recommendation, n_l = 3/4 L and n_h = 3/4 h, rounded down. A model of a single layer or a single head has no other
// layer's K/V to attend to and stays plain.
inline Wiring default_wiring(int num_layers, int num_heads) {
  return normalized({num_layers * 3 / 4, num_layers >= 2 ? num_heads * 3 / 4 : 0});
}

// Throws UserError, with what to do about it, unless the wiring fits a model of so many layers and heads.
inline void validate(const Wiring& w, int num_layers, int num_heads) {
  if (w.num_skip_head < 0 || w.num_skip_head > num_heads)
    user_error("--skip-heads %d, but the model has %d heads; it must lie between 0 (plain GPT-2) and %d", w.num_skip_head, num_heads,
               num_heads);
  if (!w.is_plain() && (w.num_skip_layer < 1 || w.num_skip_layer > num_layers - 1))
    user_error("--skip-layers %d with --skip-heads %d: in a model of %d layers the source layer can lie 1 to %d layers below; "
               "--skip-heads 0 makes it plain GPT-2", w.num_skip_layer, w.num_skip_head, num_layers, num_layers - 1);
}

// The table source(l, i): (L, h).
inline std::vector<KVSource> kv_sources(const Wiring& w, int num_layers, int num_heads) {
  std::vector<KVSource> sources;
  for (int l = 0; l < num_layers; l++) {
    for (int i = 0; i < num_heads; i++) {
      const bool shares = i >= num_heads - w.num_skip_head && l >= w.num_skip_layer;
      sources.push_back({shares ? l - w.num_skip_layer : l, i});
    }
  }
  return sources;
}

// One line about it, for people.
inline std::string describe(const Wiring& w) {
  if (w.is_plain()) return "attention: plain, each head attends to its own layer's K/V";
  return format("skip-layer attention: from layer %d on, the last %d heads attend to the K/V of the layer %d below", w.num_skip_layer,
                w.num_skip_head, w.num_skip_layer);
}

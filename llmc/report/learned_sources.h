// What a trained model with `router` or `dense` has learned of where layers look: the weights of their sums, which
// pages of runs draw, and the wirings without a router that come nearest.
#pragma once
#include <string>
#include <vector>
#include "llmc/wiring/config.h"

struct LearnedSources {
  int num_layers = 0, num_kv_heads = 0;
  // router[l], for l >= 1 (kv, l + 1, kv): R[g, j, i], the weight of K/V head i of layer j in head g. Empty without
  // the term `router`.
  std::vector<std::vector<float>> router;
  // dense[l] (l + 2), for the input of layer l + 1 or, after the last layer, of the final norm: the weights of the
  // embeddings and of the outputs of layers 0 to l. Empty without the term `dense`.
  std::vector<std::vector<float>> dense;

  // (l + 1): the share of each layer in the sum of |R| of a K/V head of layer l; layer 0 has itself alone.
  // `as_a_wiring`: only the head of the same number with a positive weight counts, as a wiring can say no other.
  std::vector<double> router_shares(int layer, int kv_head, bool as_a_wiring = false) const;
};

// Reads them from a model's folder. Throws UserError where the weight files lack a tensor that config.json asks for,
// where one is NaN or infinite, and as verify_model does; both are empty for a model with neither term.
LearnedSources read_learned_sources(const std::string& folder, const ModelConfig& config);

// A wiring without `router`, and the share of the router's |weights| that lies where its heads look, on the average of
// heads and layers: on the K/V head of the same number, in the layer that the wiring names, and positive.
struct NearWiring {
  std::string text;
  double share;
};
inline constexpr char near_share_name[] = "share of |weights| on the same head, positive";

// The wirings that come nearest to a trained router, one of each kind: no other sources than a layer's own, `sla` of
// the last heads, `layers`, several `sla` of ranges of heads. The nearest is last; of equal ones the shortest is there.
// Terms of `w` that say nothing of sources stay; its sources are followed to what the router mixed there. Nothing
// without one, nor where `w` has another number of K/V heads than the router.
std::vector<NearWiring> nearest_wirings(const LearnedSources& s, const Wiring& w, int num_heads);

// An <svg> of maps, a row a layer and a column a source layer, shaded by share or weight: of `router` the mean over K/V
// heads, then `dense`, then each K/V head. Its colours are the page's, as wiring_picture's. A sentence in place of more
// than some MB.
std::string learned_sources_picture(const LearnedSources& s);

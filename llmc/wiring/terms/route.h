// Stochastic routing of keys and values, after 2604.22782: in an update of training a layer l >= 1 uses, with this
// probability, all K/V heads of one lower layer, drawn uniformly, where it would use its own. Which, is a function of
// the seed, the update and the layer (model/parts/kv_route.h). Without training layers use their own, or what another
// wiring of the same weights says, such as share(2): one model for several budgets of K/V cache.
#pragma once
#include "term.h"

struct RouteTerm : Term {
  static constexpr TermSyntax syntax = {"route(probability)", "route(0.3)", 1, 1};
  static constexpr const char* help = "in training, with this probability, all K/V heads are a lower layer's";
  static constexpr TermFeatures features = {routes, unroutable | maps | cycles | hashing};
  double probability = 0;

  void read(const TermReader& a) { probability = a.number(a[0], 0, 1); }
  std::string arguments() const { return shortest(probability); }
  void apply(WiringTable& t) const {
    t.route = probability;
    t.notes.push_back(format("in training: K/V of a lower layer with probability %.12g", probability));
  }
};

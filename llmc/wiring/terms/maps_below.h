// What terms by which a layer uses other layers' attention maps have in common.
#pragma once
#include "term.h"

constexpr TermFeatures features_of_maps = {Feature::maps, Feature::maps | Feature::sources, 0,
                                           "one term decides on attention maps, and those of other layers need their "
                                           "own layer's keys"};

struct MapsBelow : Term {
  double more_attentions(int L) const { return 0.5 * (L - 1); }  // layer l has the maps of all layers below it
};

// What `share` and `reuse` have in common: layers in groups of so many.
#pragma once
#include "term.h"

struct LayerGroups : NumberTerm {
  std::string misfit(int L, int) const {
    return n > L ? format("the model has %d layers; a group can have 1 to %d", L, L) : "";
  }
  int first_of_group(int layer) const { return layer / n * n; }
};

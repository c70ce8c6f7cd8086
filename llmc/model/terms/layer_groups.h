// What `share` and `reuse` have in common: layers in groups of so many.
#pragma once
#include "term.h"

struct LayerGroups : Term {
  int group = 1;

  void read(const TermReader& a) { group = a.whole(a[0], 1); }
  std::string arguments() const { return std::to_string(group); }
  std::string misfit(int L, int) const {
    return group > L ? format("the model has %d layers; a group can have 1 to %d", L, L) : "";
  }
  int first_of_group(int layer) const { return layer / group * group; }
};

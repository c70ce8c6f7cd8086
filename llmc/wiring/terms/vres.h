// Value residual learning, ResFormer (Zhou et al. 2024): from layer 1 on the values of a layer are a v + b v_0, v what
// it projected and v_0 what layer 0 did, of the same head and token; a and b are the layer's own, 1 and 0 in a new
// model. What a layer shares is what it has mixed.
#pragma once
#include "term.h"

struct VresTerm : SettingTerm<VresTerm, &WiringTable::value_residual> {
  static constexpr TermSyntax syntax = {"vres"};
  static constexpr const char* help = "values are mixed with the first layer's, in learned shares";
  static constexpr TermFeatures features = {values, maps | distances | segments | cycles | halting | joins | hashing};
  static constexpr const char* note = "values: of each layer its own and the first layer's, in shares that are learned";
};

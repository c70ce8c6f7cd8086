// A router over all earlier keys and values, LIMe (Gerasimov et al. 2025): from layer 1 on K/V head g of layer l is the
// sum, over layers j <= l and K/V heads i, of R[g, j, i] times what layer j projected for i, normed and rotated; k and
// v have the same R, a parameter of each layer, plain GPT-2's in a new model. `sla` is an R with a single 1 in a
// row. What a layer shares is what it has mixed.
#pragma once
#include "term.h"

struct RouterTerm : SettingTerm<RouterTerm, &WiringTable::router> {
  static constexpr TermSyntax syntax = {"router"};
  static constexpr const char* help = "K/V heads are learned sums of those of all layers up to theirs";
  static constexpr TermFeatures features = {values | unroutable,
                                            values | maps | distances | segments | cycles | halting | joins | hashing};
  static constexpr const char* note = "K/V: of each layer sums, with weights that are learned, of all K/V heads up to "
                                      "it";
};

// DenseFormer (Pagliardini et al. 2024, arXiv 2402.02622): y_0 are the embeddings and y_(l+1) what layer l makes of its
// input; the input of layer l + 1, or of ln_f after the last, is the sum of a_i y_i over i <= l + 1. The l + 2 weights
// a of a layer are 0, .., 0, 1 in a new model.
#pragma once
#include "term.h"

struct DenseTerm : SettingTerm<DenseTerm, &WiringTable::dense> {
  static constexpr TermSyntax syntax = {"dense"};
  static constexpr const char* help = "layers' inputs are learned sums of all earlier outputs (DenseFormer)";
  static constexpr TermFeatures features = {inputs, maps | distances | segments | cycles | halting | joins | hashing};
  static constexpr const char* note = "input of a layer: the embeddings and the outputs of all layers below, in "
                                      "learned shares";
};

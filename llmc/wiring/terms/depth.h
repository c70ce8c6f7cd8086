// Depth-Attention (2606.05014): from layer 1 on the values of head i of layer l are the sum, over layers j <= l, of
// softmax_j(q_l . k_j / sqrt(hs)) v_j: q, k and v of the same head and token, k and v as layer j projected them, q and
// k normed and rotated. It has no parameters. What a layer shares is what it has mixed.
#pragma once
#include "term.h"

struct DepthTerm : SettingTerm<DepthTerm, &WiringTable::depth> {
  static constexpr TermSyntax syntax = {"depth"};
  static constexpr const char* help = "values are sums of those of all layers up to theirs, by attention";
  static constexpr TermFeatures features = {values, kv_heads | values | maps | distances | segments | cycles | halting |
                                                        joins | hashing};
  static constexpr const char* note = "values: of each layer those of all layers up to it, by the attention of the "
                                      "token's query";
};

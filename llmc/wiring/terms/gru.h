// GTrXL (Parisotto et al. 2019): from the residual stream x and a branch's output y the stream becomes (1 - z) x + z g,
// where y = relu(y), r = sigmoid(y W_r + x U_r), z = sigmoid(y W_z + x U_z - b), g = tanh(y W_g + (r x) U_g).
#pragma once
#include "term.h"

struct GruTerm : SettingTerm<GruTerm, &WiringTable::gru> {
  static constexpr TermSyntax syntax = {"gru"};
  static constexpr const char* help = "the outputs of attention and MLP join the residual stream in gates (GTrXL)";
  static constexpr TermFeatures features = {joins};
  static constexpr const char* note = "residual stream: branches join it in gates";
};

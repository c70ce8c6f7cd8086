// Transformer-XL (Dai et al. 2019): the score of query t and key j is ((q_t + u) . k_j + (q_t + v) . r_d) / sqrt(hs),
// where r_d = s_d W depends on the distance d = t - j alone; W, u and v are of the query's layer; s_d:
// llmc/ops/relative.h.
#pragma once
#include "term.h"

struct RelativeTerm : SettingTerm<RelativeTerm, &WiringTable::relative> {
  static constexpr TermSyntax syntax = {"relative"};
  static constexpr const char* help = "Transformer-XL's positions, by distance, in place of learned ones";
  static constexpr TermFeatures features = {positions | distances, positions | patterns | top_keys | maps | head_norms};
  static constexpr const char* note = "positions: relative, by the distance of query and key";
};

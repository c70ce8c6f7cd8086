// Attention sinks, as in gpt-oss (OpenAI 2025): the softmax of each head has one more score, a parameter of the layer
// and head, 0 in a new model, whose probability goes to no value. A head can so attend to nothing.
#pragma once
#include "term.h"

struct SinksTerm : SettingTerm<SinksTerm, &WiringTable::sinks> {
  static constexpr TermSyntax syntax = {"sinks"};
  static constexpr const char* help = "each head's softmax has one more score, learned, without a value";
  static constexpr TermFeatures features = {no_key, maps | hashing};
  static constexpr const char* note = "keys: each head has a learned score for none of them";
};

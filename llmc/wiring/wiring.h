// The wiring of a model: whose keys and values each query head attends to, which of their positions, by whose attention
// map, and how layers and the residual stream are made of that. It is a text of terms, such as `gqa(4)
// window(512,SSSL)`, applied from left to right to plain GPT-2. terms/ has a file for each term; adding one is such a
// file, its name in terms/all.h, and whatever uses what it sets in the WiringTable. Nothing else asks the text: passes,
// the memory plan, generation and the FLOP count ask the table and the plan that follows from it (attention_plan.h).
//
// Layers and heads count from 0. A layer shares what it projected itself, never what it uses of another layer. Masks
// combine: a head sees the keys that all of them show to it.
#pragma once
#include <string>
#include <vector>
#include "terms/all.h"
#include "wiring_table.h"

struct Wiring {
  std::string text = "plain";   // as it was given, with terms in place of words that are short for them
  std::string given = "plain";  // as it was given, on one line: what errors show, and in which characters are counted
  std::vector<WiringTerm> terms = {PlainTerm()};

  bool is_plain() const { return std::holds_alternative<PlainTerm>(terms[0]); }
};

// One of each term that there is.
const std::vector<WiringTerm>& known_terms();

struct TermInfo : TermFeatures {
  TermSyntax syntax;
  const char* help;
  bool may_be_repeated;
};
TermInfo info_of(const WiringTerm& t);

// How to write each term, and what it does, for users.
std::string wiring_help();

// Reads the text: terms with any white space between them, or words that are short for several. Throws UserError, which
// says which term, at which character, and what would be right; what depends on the number of layers and heads is
// validate's.
Wiring parse_wiring(const std::string& text);

// The text of a wiring with the words that are short for several terms in place of these: `modern sla(6,6)`.
std::string with_short_names(std::string text);

// sla(num_skip_layer, num_skip_head), the paper's n_l and n_h; plain for num_skip_head = 0.
Wiring skip_layer_wiring(int num_skip_layer, int num_skip_head);

// The paper's recommendation, n_l = 3/4 L and n_h = 3/4 h, rounded down. A model of a single layer or a single head has
// no other layer's K/V to attend to and stays plain.
Wiring default_wiring(int num_layers, int num_heads);

// At most how many attentions the heads of a model have with it: checked before anything is made of so many.
double most_attentions(const Wiring& w, int num_layers, int num_heads);

// Throws UserError, as parse_wiring does, unless the wiring fits a model of so many layers and heads.
void validate(const Wiring& w, int num_layers, int num_heads);

// The wiring in the one way to write it, without what a reader may leave out: equal for texts that say the same in the
// same order.
std::string canonical_text(const Wiring& w);

// The table of a wiring that is valid for so many layers and heads.
WiringTable wiring_table(const Wiring& w, int num_layers, int num_heads);

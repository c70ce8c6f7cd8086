// Attention within documents: a query sees no key from before its own document, which the last end-of-text up to it
// begins (config.json's eos_token_id), or the row. Positions are those in the row.
#pragma once
#include "term.h"

struct DocumentsTerm : Term {
  static constexpr TermSyntax syntax = {"documents"};
  static constexpr const char* help = "those of the query's own document, which begins at an end-of-text";
  static constexpr TermFeatures features = {documents, segments | hashing};
  void apply(WiringTable& t) const {
    t.documents = true;
    t.notes.push_back("documents: a query sees only keys of its own document");
  }
};

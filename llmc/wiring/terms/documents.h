// Attention within documents: a query sees no key from before its own document, which begins at the last end-of-text
// (config.json's document_token_id) up to the query, or where the row does. Positions are those in the row.
#pragma once
#include "term.h"

struct DocumentsTerm : SettingTerm<DocumentsTerm, &WiringTable::documents> {
  static constexpr TermSyntax syntax = {"documents"};
  static constexpr const char* help = "those of the query's own document, which begins at an end-of-text";
  static constexpr TermFeatures features = {documents, segments | hashing};
  static constexpr const char* note = "documents: a query sees only keys of its own document";
};

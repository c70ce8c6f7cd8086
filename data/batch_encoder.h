// A batch of a corpus as tokens: documents, or pairs of a prompt and its answer, with their ends of text.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>
#include "corpus.h"
#include "llmc/text/tokenizer.h"
#include "llmc/base/error.h"
#include "llmc/base/text.h"
#include "llmc/base/utf8.h"
#include "shards.h"
#include "vocabulary.h"

// What data/tokenize is asked to do; its --help says what the options are.
struct TokenizeOptions {
  std::string tokenizer = "bytes";
  int train_vocabulary = 0;  // tokens of a vocabulary that is learned from the text; 0: `tokenizer` names one
  std::string out;
  std::string separator = "none";
  std::string end_of_text = "before";
  std::string field;
  bool pairs = false;
  std::optional<double> val_fraction;
  int64_t shard_tokens = 100 * 1000 * 1000;  // llm.c's
  int64_t row_tokens = 0;                    // of --pack; 0: texts follow each other
  int threads = int(std::max(1u, std::thread::hardware_concurrency()));
  bool force = false, update = false;
  CorpusOptions corpus;

  bool read_stdin() const { return std::count(corpus.paths.begin(), corpus.paths.end(), "-") > 0; }
};

// Counts over the documents encoded so far.
struct Counts {
  int64_t empty = 0;     // empty documents, which have no token; empty files are not among them
  int64_t bytes = 0;     // of text
  int64_t replaced = 0;  // invalid sequences of UTF-8, which became U+FFFD
  int64_t runs_cut = 0;  // longer than longest_run
  std::array<int64_t, size_t(Note::count)> files = {};  // of which there are notes
};

struct EncodedTokens {
  std::vector<uint16_t> tokens;
  std::vector<uint8_t> scored;  // a 0 or 1 for each token of pairs; otherwise empty, which means all

  // The tokens added since the last call are scored, or not.
  void mark(bool are_scored) { scored.resize(tokens.size(), are_scored); }
  void write_to(ShardWriter& shards) const {
    shards.add(tokens.data(), int64_t(tokens.size()), scored.empty() ? nullptr : scored.data());
  }
};

struct EncodedBatch {
  EncodedTokens train, val;
  Counts counts;
  std::vector<std::pair<Note, std::string>> notes;
  Position end;
  size_t memory = 0;  // of the batch before encoding
  int64_t read = 0;   // bytes of the sources, up to the end of the batch
};

// With `words`, texts are not encoded, but their words counted there.
struct BatchEncoder {
  const TokenizeOptions& options;
  const Tokenizer& tokenizer;
  WordCounts* words;
  Encoder encoder;
  std::string replaced;
  std::vector<std::string> strings;  // of a line of JSON

  BatchEncoder(const TokenizeOptions& o, const Tokenizer& t, WordCounts* w)
      : options(o), tokenizer(t), words(w), encoder(t) {}

  void add_text(std::string_view text, std::vector<uint16_t>& tokens, Counts& counts) {
    counts.bytes += int64_t(text.size());
    if (!tokenizer.is_bytes()) {
      const int64_t n = replace_invalid_utf8(text, replaced);
      if (n > 0) text = replaced;
      counts.replaced += n;
    }
    if (words) words->add_text(text);
    else encoder.encode(text, tokens);
  }

  void add(std::string_view text, const Part& part, std::vector<uint16_t>& tokens, Counts& counts) {
    if (part.begins && options.end_of_text == "before") tokens.push_back(tokenizer.end_of_text());
    add_text(text, tokens, counts);
    if (part.ends && options.end_of_text == "after") tokens.push_back(tokenizer.end_of_text());
  }

  // The prompt is encoded alone, as it is when a model is asked.
  void add_pair(const std::string& prompt, const std::string& answer, EncodedTokens& result, Counts& counts) {
    add_text(prompt, result.tokens, counts);
    result.mark(false);
    add_text(answer, result.tokens, counts);
    result.tokens.push_back(tokenizer.end_of_text());
    result.mark(true);
  }

  // Adds the document, or the pair, of a line of JSON.
  void add_line(const Part& part, EncodedTokens& result, Counts& counts) {
    if (std::all_of(strings.begin(), strings.end(), [](const std::string& s) { return s.empty(); })) {
      counts.empty++;
    } else if (options.pairs) {
      add_pair(strings[0], strings[1], result, counts);
    } else {
      add(strings[0], part, result.tokens, counts);
    }
  }

  EncodedBatch encode(const Batch& batch) {
    EncodedBatch result;
    result.end = batch.end;
    result.memory = batch.memory();
    result.counts.runs_cut = batch.runs_cut;
    result.notes = batch.notes;
    size_t at = 0, line = 0;
    for (size_t i = 0; i < batch.parts.size(); i++) {
      const Part& part = batch.parts[i];
      const std::string_view text = std::string_view(batch.text).substr(at, part.bytes);
      EncodedTokens& tokens = part.val ? result.val : result.train;
      at += part.bytes;
      if (options.corpus.fields.empty()) {
        add(text, part, tokens.tokens, result.counts);
        continue;
      }
      while (line + 1 < batch.lines.size() && batch.lines[line + 1].first_part <= i) line++;
      const Batch::Lines& lines = batch.lines[line];
      const std::string wrong = strings_of_line(text, options.corpus.fields, strings, result.counts.replaced);
      if (!wrong.empty())
        user_error("%s: line %lld %s%s", lines.file, (long long)(lines.line + int64_t(i - lines.first_part)), wrong,
                   options.pairs || begins_with(wrong, "is no JSON object") ? which_fields() : "");
      add_line(part, tokens, result.counts);
    }
    return result;
  }

 private:
  const char* which_fields() const {
    return options.pairs ? "; --pairs needs \"prompt\" and \"answer\" in every line"
                         : "; name the right field with --field";
  }
};

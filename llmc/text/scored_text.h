// What is scored by a model: sequences of tokens whose last ones have a loss each, and how texts become such sequences.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>
#include "llmc/base/error.h"
#include "llmc/base/utf8.h"
#include "pieces.h"
#include "tokenizer.h"

struct ScoredSequence {
  std::vector<int> tokens;  // (n)
  int64_t scored = 0;       // the last so many have a loss, given those before: 1 to n - 1

  int64_t inputs() const { return int64_t(tokens.size()) - 1; }
  // Removes tokens in front so that at most `context` are read. Returns whether it did. Throws UserError if more are
  // scored.
  bool shorten(int64_t context) {
    if (scored > context)
      user_error("%lld tokens are to be scored at once, but the context length is %lld", (long long)scored,
                 (long long)context);
    const int64_t surplus = std::max<int64_t>(0, inputs() - context);
    tokens.erase(tokens.begin(), tokens.begin() + surplus);
    return surplus > 0;
  }
};

// A text of n tokens, longer than the context perhaps, in windows of `context` inputs each, which begin `stride` tokens
// apart. Every token but the first is scored, once: in the first window that has it. A token therefore has at least
// context - stride tokens before it that the model reads, or all there are.
struct TextWindows {
  int64_t num_tokens, context, stride;  // 1 <= stride <= context
  // The last window begins earlier, so that it has `context` inputs too, if the text has so many.
  bool last_is_full = false;

  struct Window {
    int64_t begin, end;  // its tokens: inputs [begin, end - 1), targets [begin + 1, end)
    int64_t first;       // the first one that is scored
  };
  int64_t num_scored() const { return std::max<int64_t>(0, num_tokens - 1); }
  int64_t count() const {
    if (num_tokens < 2) return 0;
    return 1 + (std::max<int64_t>(0, num_tokens - 1 - context) + stride - 1) / stride;
  }
  Window operator[](int64_t i) const {
    CHECK(0 <= i && i < count() && 1 <= stride && stride <= context);
    const int64_t end = std::min(i * stride + context + 1, num_tokens);
    return {last_is_full ? std::max<int64_t>(0, end - 1 - context) : i * stride, end,
            i == 0 ? 1 : (i - 1) * stride + context + 1};
  }
};

// A window's sequence, of tokens (num_tokens) of any type.
template <class Token>
ScoredSequence sequence_of(const TextWindows::Window& window, const Token* tokens) {
  return {{tokens + window.begin, tokens + window.end}, window.end - window.first};
}

// The tokens of a document, as data/tokenize makes them: an end of text, then the text, in which <|endoftext|> is
// ordinary text and invalid UTF-8 becomes U+FFFD, except in a vocabulary of bytes.
inline std::vector<uint16_t> encode_document(const Tokenizer& tokenizer, const std::string& document) {
  std::string text = document;
  if (!tokenizer.is_bytes()) replace_invalid_utf8(document, text);
  std::vector<uint16_t> tokens = {tokenizer.end_of_text()};
  Encoder(tokenizer).encode(text, tokens);
  return tokens;
}

// The end of the text without the white space after it, by Python's str.rstrip, which counts four separators (1C to 1F)
// in; 0 if there is nothing else.
inline size_t end_without_white_space(std::string_view text) {
  while (!text.empty()) {
    const Utf8Character c = last_character(text);
    if (code_point_classes()[c.code_point] != Class::space && (c.code_point < 0x1C || c.code_point > 0x1F)) break;
    text.remove_suffix(c.length);
  }
  return text.size();
}

// A continuation that is scored after a context, as lm-evaluation-harness encodes it: white space at the context's end
// belongs to the continuation, whose tokens are those of both together after as many as the context has by itself, and
// an empty context is an end of text. Throws UserError if the continuation has no token.
inline ScoredSequence encode_continuation(const Tokenizer& tokenizer, std::string context, std::string continuation) {
  const size_t end = end_without_white_space(context);
  if (end > 0) {
    continuation = context.substr(end) + continuation;
    context.resize(end);
  }
  ScoredSequence sequence = {encode_prompt(tokenizer, context, /*begins_with_end=*/context.empty())};
  const std::vector<int> whole = encode_prompt(tokenizer, context + continuation, /*begins_with_end=*/context.empty());
  sequence.scored = int64_t(whole.size()) - int64_t(sequence.tokens.size());
  if (sequence.scored <= 0) user_error("the continuation makes no token");
  sequence.tokens.insert(sequence.tokens.end(), whole.end() - long(sequence.scored), whole.end());
  return sequence;
}

// The loss in bits per byte of text, of losses in nats.
inline double bits_per_byte(double nats, double bytes) { return nats / std::log(2.0) / bytes; }

// How many bytes of text a token stands for: none, if it is an end of text, or beyond the vocabulary in a model that
// has more tokens.
inline int64_t bytes_of_token(const Tokenizer& tokenizer, int token) {
  return token < tokenizer.vocab_size() && token != tokenizer.end_of_text() ? int64_t(tokenizer.token(token).size())
                                                                            : 0;
}

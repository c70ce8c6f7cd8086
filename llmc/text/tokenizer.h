// Text to token ids and back.
//
// Two kinds of vocabulary. Bytes: a token is a byte, 0 to 255, and 256 marks the end of a text. And GPT-2's byte-level
// BPE (Radford et al. 2019; Sennrich et al. 2016): the text is split into pieces by GPT-2's regular expression, and in
// each piece, as long as two neighbouring tokens together are a token, the pair whose token has the lowest id is
// merged, the leftmost first. That is tiktoken's definition, and the tokens are tiktoken's on every text, whichever
// file the vocabulary came from.
//
// Any bytes can be encoded, and decoding gives the same bytes again: invalid UTF-8 counts as characters that are
// neither letters, numbers nor white space. Tokenizers that accept only valid text see U+FFFD there instead: call
// replace_invalid_utf8 (utf8.h) first to get theirs.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <queue>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#include "llmc/base/utf8.h"

constexpr int byte_vocab_size = 257;
constexpr uint16_t byte_end_of_text = 256;
constexpr const char* end_of_text_name = "<|endoftext|>";
constexpr int max_vocab_size = 65536;  // ids are the uint16 of token shards

using Merge = std::pair<uint16_t, uint16_t>;  // the ids of two tokens that together are another

// (left id, right id) -> the id of the two together, which is the rank of the merge. Open addressing.
struct PairTable {
  static constexpr uint32_t none = UINT32_MAX;

  void insert(uint32_t left, uint32_t right, uint32_t id);
  // `none` if the two together are no token.
  uint32_t find(uint32_t left, uint32_t right) const {
    const uint32_t key = left << 16 | right;
    for (size_t i = slot_of(key);; i = (i + 1) & (slots_.size() - 1)) {
      if (slots_[i].key == key) return slots_[i].id;
      if (slots_[i].id == none) return none;
    }
  }
  void reserve(size_t pairs);

 private:
  struct Slot {
    uint32_t key = 0, id = none;
  };
  std::vector<Slot> slots_;  // a power of two of them
  int shift_ = 0;
  size_t slot_of(uint32_t key) const { return key * 0x9E3779B97F4A7C15ull >> shift_; }
};

// bytes -> id of the token. Open addressing over hashes, so that a lookup that fails costs one memory access.
struct TokenTable {
  static constexpr int none = -1;

  // Builds the table of the ids with `wanted(id)`. It refers to `tokens`, which must outlive it. Returns the id of a
  // duplicate token, or `none`.
  template <class Wanted>
  int build(const std::vector<std::string>& tokens, Wanted wanted);
  int find(std::string_view bytes) const;  // `none` if there is no such token

 private:
  struct Slot {
    uint32_t hash = 0;
    int32_t id = none;
  };
  const std::string* tokens_ = nullptr;
  std::vector<Slot> slots_;  // a power of two of them
};

// A vocabulary. Immutable once made, and safe to share between threads; each encodes with its own Encoder.
struct Tokenizer {
  static Tokenizer bytes();
  Tokenizer(Tokenizer&&) = default;
  Tokenizer& operator=(Tokenizer&&) = default;

  // "bytes" names the vocabulary of bytes, anything else a path: tiktoken's ranks (a line is base64, a space and the
  // id), OpenAI's vocab.bpe or encoder.json with the other one in the same folder (Hugging Face calls them merges.txt
  // and vocab.json), or Hugging Face's tokenizer.json, told apart by their contents; or a folder with one of these.
  // Throws UserError, naming the file, for anything else: an unknown or damaged file, a byte that is no token, ids
  // beyond uint16, or a pre-tokenizer, normalizer or order of merges other than GPT-2's.
  static Tokenizer load(const std::string& path);

  // The end of text is token 0; then come the bytes, in the order of the characters that GPT-2's files write them as,
  // and a token for each merge: what Hugging Face's BpeTrainer makes of special_tokens=["<|endoftext|>"] and
  // initial_alphabet=ByteLevel.alphabet().
  static Tokenizer of_merges(const std::vector<Merge>& merges);

  // The file in `folder` that load() reads, or "" if there is none.
  static std::string file_in(const std::string& folder);

  // The vocabulary of a model and of what it is used on: the one that the user has named, if that is not "", or the
  // first of those in these folders. Without any, a model of 257 tokens is one of bytes, and what others' stand for is
  // unknown, as it is where "none" is named. Throws UserError, naming them, if two of all these have other tokens, or
  // if the first has more than the model. A folder "" has none.
  static std::optional<Tokenizer> of_model(const std::string& named, const std::vector<std::string>& folders,
                                           int vocab_size);

  // The vocabulary as the text of a Hugging Face tokenizer.json, which load() can read; that of bytes has no merges.
  // Throws UserError if a token of several bytes is not the result of merging tokens of lower ids: such a vocabulary
  // has no list of merges.
  std::string to_json() const;

  // Whether each id that both have is the same token. One may have more: models pad their vocabulary and add tokens.
  bool agrees_with(const Tokenizer& other) const;

  int vocab_size() const { return int(tokens_.size()); }
  bool is_bytes() const { return is_bytes_; }
  // Whether of_model took bytes because of the model's 257 tokens alone.
  bool is_assumed() const { return is_assumed_; }
  // Whether the model in a folder was made without a vocabulary, and this one comes from elsewhere.
  bool is_new_to(const std::string& model_folder) const {
    return !is_assumed_ && !model_folder.empty() && file_in(model_folder).empty();
  }
  uint16_t end_of_text() const { return end_of_text_; }  // <|endoftext|>
  uint32_t checksum() const;                             // CRC-32C of the tokens and their lengths, in the order of ids

  // The bytes of token `id` < vocab_size(): "" for an unused id, "<|endoftext|>" for the end of a text.
  const std::string& token(int id) const;

  // The last offset in `text`, `first` or higher, where it can be cut so that the tokens of the two parts are those of
  // the whole, whatever follows `text`; 0 if there is none, as in one long word.
  size_t last_cut(std::string_view text, size_t first = 1) const;

 private:
  friend struct Encoder;
  struct VocabularyFile;

  std::vector<std::string> tokens_;  // (vocab_size)
  TokenTable ids_;                   // without added ones that are not ordinary
  // A token that is found in texts before they are split. `special` ones are left out where tokens become text for
  // people (Hugging Face's skip_special_tokens); `ordinary` ones take part in merges, too.
  struct AddedToken {
    std::string name;
    uint16_t id;
    bool special = true, ordinary = false;
  };
  std::vector<AddedToken> added_;
  std::array<uint16_t, 256> byte_ids_ = {};
  PairTable pairs_;
  size_t longest_ = 0;  // the length of the longest token, in bytes
  uint16_t end_of_text_ = 0;
  bool is_bytes_ = false, is_assumed_ = false;

  Tokenizer() = default;
  std::vector<bool> not_ordinary() const;  // (vocab_size)
  bool cuts_added_token(std::string_view text, size_t at) const;
  void build(const std::string& path);
};

// The tokens of a prompt, as training documents have them: an end of text stands before it, unless `begins_with_end` is
// false. Ends of text may be spelled out in it, too. Invalid UTF-8 becomes U+FFFD, as data/tokenize has it, except in
// a vocabulary of bytes.
std::vector<int> encode_prompt(const Tokenizer& tokenizer, const std::string& prompt, bool begins_with_end = true);

// Encodes text; used by one thread at a time. With `caches` it keeps the tokens of recent short pieces, in 4 MiB.
struct Encoder {
  explicit Encoder(const Tokenizer& tokenizer, bool caches = true);  // the tokenizer must outlive it

  // Appends the tokens of `text`. Tokens that were added to the vocabulary, such as <speaker1>, become their ids where
  // they are spelled out, and with `end_of_text` <|endoftext|> does; otherwise that is ordinary text. Takes O(n log n)
  // time for a piece of n bytes, and up to 30 bytes of memory for each byte of the longest piece, which must be shorter
  // than 2 GiB.
  void encode(std::string_view text, std::vector<uint16_t>& tokens, bool end_of_text = false);

 private:
  // A piece of up to 15 bytes and its tokens. Of two with the same slot the later one replaces the earlier.
  struct CachedPiece {
    uint64_t key[2] = {0, 0};  // the bytes, then zeros, and the length as the last byte
    uint16_t tokens[7] = {0};
    uint16_t count = 0;
  };
  const Tokenizer& tokenizer_;
  std::vector<CachedPiece> cache_;
  std::vector<uint32_t> ids_, ranks_;  // of the piece that is being merged
  std::vector<int32_t> previous_, next_;
  std::vector<std::vector<uint32_t>> places_;  // (vocab_size), of the pairs of each rank
  std::vector<uint64_t> used_ranks_;           // a bit for each rank that has places
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<uint64_t>> earlier_;

  friend struct Tokenizer;

  void encode_ordinary(std::string_view text, std::vector<uint16_t>& tokens);
  // Each writes tokens and returns their number.
  size_t encode_cached(std::string_view text, size_t at, size_t length, uint16_t* tokens);
  size_t encode_piece(std::string_view piece, uint16_t* tokens);
  // Makes no token of id `below` or higher.
  size_t merge(std::string_view piece, uint16_t* tokens, uint32_t below = PairTable::none);
  size_t merge_short(uint16_t* tokens, uint32_t below);
  size_t merge_long(uint16_t* tokens);
};

#include "tokenizer.h"
#include <algorithm>
#include <cstring>
#include "llmc/base/crc32c.h"
#include "llmc/base/error.h"
#include "llmc/base/text.h"
#include "pieces.h"

void PairTable::reserve(size_t pairs) {
  size_t slots = 2;
  shift_ = 63;
  while (slots < pairs * 2) slots *= 2, shift_--;
  slots_.assign(slots, {});
}

void PairTable::insert(uint32_t left, uint32_t right, uint32_t id) {
  const uint32_t key = left << 16 | right;
  size_t i = slot_of(key);
  while (slots_[i].id != none) i = (i + 1) & (slots_.size() - 1);
  slots_[i] = {key, id};
}

static uint32_t hash_of(std::string_view bytes) {
  constexpr uint64_t factor = 0x9E3779B97F4A7C15u;
  uint64_t hash = bytes.size() * factor, word;
  for (; bytes.size() >= 8; bytes.remove_prefix(8)) {
    memcpy(&word, bytes.data(), 8);
    hash = (hash ^ word) * factor;
    hash ^= hash >> 32;
  }
  word = 0;
  memcpy(&word, bytes.data(), bytes.size());
  hash = (hash ^ word) * factor;
  return uint32_t(hash >> 32);
}

template <class Wanted>
int TokenTable::build(const std::vector<std::string>& tokens, Wanted wanted) {
  size_t slots = 2;
  while (slots < tokens.size() * 2) slots *= 2;
  tokens_ = tokens.data();
  slots_.assign(slots, {});
  for (size_t id = 0; id < tokens.size(); id++) {
    if (!wanted(id)) continue;
    if (find(tokens[id]) != none) return int(id);
    const uint32_t hash = hash_of(tokens[id]);
    size_t i = hash & (slots - 1);
    while (slots_[i].id != none) i = (i + 1) & (slots - 1);
    slots_[i] = {hash, int32_t(id)};
  }
  return none;
}

int TokenTable::find(std::string_view bytes) const {
  const uint32_t hash = hash_of(bytes);
  for (size_t i = hash & (slots_.size() - 1);; i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i].id == none) return none;
    if (slots_[i].hash == hash && tokens_[slots_[i].id] == bytes) return slots_[i].id;
  }
}

Tokenizer Tokenizer::bytes() {
  Tokenizer t;
  for (int byte = 0; byte < 256; byte++) t.tokens_.emplace_back(1, char(byte));
  t.tokens_.emplace_back(end_of_text_name);
  t.added_.push_back({end_of_text_name, byte_end_of_text});
  t.end_of_text_ = byte_end_of_text;
  t.is_bytes_ = true;
  return t;
}

std::vector<bool> Tokenizer::not_ordinary() const {
  std::vector<bool> found(tokens_.size());
  for (const AddedToken& token : added_) found[token.id] = !token.ordinary;
  return found;
}

// Builds the tables that encoding needs from tokens_ and added_. Throws UserError, naming `path`, for a vocabulary
// with a duplicate token or without one of the 256 bytes.
void Tokenizer::build(const std::string& path) {
  const std::vector<bool> is_special = not_ordinary();
  for (const AddedToken& token : added_)
    if (token.name == end_of_text_name) end_of_text_ = token.id;
  const int twice = ids_.build(tokens_, [&](size_t id) { return !is_special[id] && !tokens_[id].empty(); });
  if (twice != TokenTable::none)
    user_error("%s: the ids %d and %d are the same token; fetch it again", path, ids_.find(tokens_[twice]), twice);
  for (int byte = 0; byte < 256; byte++) {
    const int id = ids_.find(std::string(1, char(byte)));
    if (id == TokenTable::none)
      user_error("%s: no token for the byte 0x%02x; a byte-level vocabulary has all 256", path, byte);
    byte_ids_[byte] = uint16_t(id);
  }

  struct Pair {
    uint32_t left, right, id;
  };
  std::vector<Pair> pairs;
#pragma omp parallel  // this takes most of the time of loading
  {
    std::vector<Pair> found;
#pragma omp for schedule(static) nowait
    for (size_t id = 0; id < tokens_.size(); id++) {
      if (is_special[id]) continue;
      const std::string_view token = tokens_[id];
      for (size_t cut = 1; cut < token.size(); cut++) {
        const int left = ids_.find(token.substr(0, cut)),
                  right = left == TokenTable::none ? left : ids_.find(token.substr(cut));
        if (right != TokenTable::none) found.push_back({uint32_t(left), uint32_t(right), uint32_t(id)});
      }
    }
#pragma omp critical
    pairs.insert(pairs.end(), found.begin(), found.end());
  }
  for (size_t id = 0; id < tokens_.size(); id++)
    if (!is_special[id]) longest_ = std::max(longest_, tokens_[id].size());
  pairs_.reserve(pairs.size());
  for (const Pair& pair : pairs) pairs_.insert(pair.left, pair.right, pair.id);
}

uint32_t Tokenizer::checksum() const {
  uint32_t crc = 0;
  for (const std::string& token : tokens_) {
    const uint32_t length = uint32_t(token.size());
    crc = crc32c(&length, sizeof length, crc);
    crc = crc32c(token.data(), token.size(), crc);
  }
  return crc;
}

const std::string& Tokenizer::token(int id) const {
  CHECK(id >= 0 && id < vocab_size());
  return tokens_[id];
}

bool Tokenizer::agrees_with(const Tokenizer& other) const {
  const size_t both = std::min(tokens_.size(), other.tokens_.size());
  return std::equal(tokens_.begin(), tokens_.begin() + long(both), other.tokens_.begin());
}

std::optional<Tokenizer> Tokenizer::of_model(const std::string& named, const std::vector<std::string>& folders,
                                             int vocab_size) {
  if (named == "none") return std::nullopt;
  std::vector<std::string> paths = {named};
  for (const std::string& folder : folders)
    if (std::string path = folder.empty() ? "" : file_in(folder);
        std::find(paths.begin(), paths.end(), path) == paths.end())
      paths.push_back(path);
  std::optional<Tokenizer> chosen;
  std::string from;
  auto of_file = [&](const std::string& path) {
    try {
      return load(path);
    } catch (const UserError& e) {
      if (path == named) throw;
      user_error("%s; it was read because it lies beside the data or the model, as their vocabulary: repair it, or "
                 "move it away; with --tokenizer none it is not read, and samples are numbers",
                 e.what());
    }
  };
  for (const std::string& path : paths) {
    if (path.empty()) continue;
    Tokenizer tokenizer = of_file(path);
    if (chosen && !chosen->agrees_with(tokenizer))
      user_error("%s and %s are different vocabularies, but data and model must have the same; name the model's own "
                 "(--tokenizer), or --tokenizer none for tokens that are not compared, and stay numbers",
                 from, path);
    if (!chosen) chosen = std::move(tokenizer), from = path;
  }
  if (!chosen && vocab_size == byte_vocab_size) {
    chosen = bytes();
    chosen->is_assumed_ = true;
  }
  if (chosen && chosen->vocab_size() > vocab_size)
    user_error("%s: has %d tokens, the model %d; name the model's own vocabulary (--tokenizer), or train a model with "
               "as many (--vocab-size)",
               from, chosen->vocab_size(), vocab_size);
  return chosen;
}

size_t Tokenizer::last_cut(std::string_view text, size_t first) const {
  CHECK(first > 0);
  if (is_bytes_) return text.size();
  const PieceScanner scanner{text.data(), text.size()};
  for (size_t at = text.size(); at-- > first;) {
    if (is_continuation_byte(text[at])) continue;
    if (uint8_t(text[at]) >= 0x80 && text.size() - at < 4) continue;  // the character may be incomplete
    // Two characters of different classes, the left one no space, belong to different pieces, except in a contraction.
    size_t length;
    const Class left = scanner.class_of[last_character(text.substr(0, at)).code_point],
                right = scanner.look(at, length);
    const bool splits = left != Class::space && left != right && !(text[at - 1] == '\'' && right == Class::letter);
    if (splits && !cuts_added_token(text, at)) return at;
  }
  return 0;
}

// Whether an added token may begin before `at` and end behind it, of which the text may have the beginning only.
bool Tokenizer::cuts_added_token(std::string_view text, size_t at) const {
  for (const auto& [name, id, special, ordinary] : added_)
    for (size_t before = 1; before < name.size() && before <= at && id != end_of_text_; before++) {
      const std::string_view rest = text.substr(at - before, name.size());
      if (begins_with(name, rest)) return true;
    }
  return false;
}

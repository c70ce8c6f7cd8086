// From text to tokens: pieces, a cache of short ones, and two ways to merge.
#include <algorithm>
#include <cstring>
#include <mutex>
#include "llmc/base/error.h"
#include "llmc/base/utf8.h"
#include "pieces.h"
#include "tokenizer.h"

constexpr int cache_bits = 17;         // 131,072 pieces of 32 bytes, 4 MiB; a smaller cache misses too often
constexpr size_t longest_cached = 15;  // bytes
constexpr size_t short_piece = 128;    // bytes, up to which looking at all pairs is faster
// In bytes. Longer pieces are merged by one thread at a time, so that the memory for it is allocated only once.
constexpr size_t huge_piece = 1 << 20;

Encoder::Encoder(const Tokenizer& tokenizer, bool caches) : tokenizer_(tokenizer) {
  if (caches && !tokenizer.is_bytes()) cache_.resize(size_t(1) << cache_bits);
}

// key = the bytes of the piece text[at, at + length), followed by zeros, with the length as the last byte. length <=
// longest_cached.
static void piece_key(std::string_view text, size_t at, size_t length, uint64_t key[2]) {
  key[0] = key[1] = 0;
  if (at + 16 <= text.size()) {
    memcpy(key, text.data() + at, 16);
    key[0] &= length >= 8 ? ~uint64_t(0) : (uint64_t(1) << 8 * length) - 1;
    key[1] &= length <= 8 ? 0 : (uint64_t(1) << 8 * (length - 8)) - 1;
  } else {
    memcpy(key, text.data() + at, length);
  }
  key[1] |= uint64_t(length) << 56;
}

void Encoder::encode_ordinary(std::string_view text, std::vector<uint16_t>& tokens) {
  const size_t had = tokens.size();
  tokens.resize(had + text.size() + 7);  // a token has at least a byte; up to seven more may be written after the last
  uint16_t* out = tokens.data() + had;
  if (tokenizer_.is_bytes()) {
    for (char byte : text) *out++ = uint8_t(byte);
  } else {
    const PieceScanner scanner{text.data(), text.size()};
    const size_t longest = cache_.empty() ? 0 : longest_cached;
    for (size_t at = 0; at < text.size();) {
      const size_t end = scanner.piece_end(at), length = end - at;
      out += length <= longest ? encode_cached(text, at, length, out) : encode_piece(text.substr(at, length), out);
      at = end;
    }
  }
  tokens.resize(out - tokens.data());
}

inline size_t Encoder::encode_cached(std::string_view text, size_t at, size_t length, uint16_t* tokens) {
  uint64_t key[2];
  piece_key(text, at, length, key);
  const uint64_t mixed = key[0] * 0x9E3779B97F4A7C15u ^ key[1] * 0xC2B2AE3D27D4EB4Fu;
  CachedPiece& piece = cache_[((mixed ^ mixed >> 29) * 0x9E3779B97F4A7C15u) >> (64 - cache_bits)];
  if (piece.key[0] == key[0] && piece.key[1] == key[1]) {
    memcpy(tokens, piece.tokens, sizeof piece.tokens);
    return piece.count;
  }
  const size_t count = encode_piece(text.substr(at, length), tokens);
  if (count <= 7) {
    piece.key[0] = key[0], piece.key[1] = key[1];
    memcpy(piece.tokens, tokens, sizeof piece.tokens);
    piece.count = uint16_t(count);
  }
  return count;
}

void Encoder::encode(std::string_view text, std::vector<uint16_t>& tokens, bool end_of_text) {
  struct Name {
    const std::string& name;
    uint16_t id;
    size_t next;  // the place in the text where it stands next
  };
  std::vector<Name> names;
  for (const auto& [name, id, special, ordinary] : tokenizer_.added_)
    if (end_of_text || id != tokenizer_.end_of_text()) names.push_back({name, id, text.find(name)});
  for (size_t at = 0; at < text.size() || at == 0;) {
    const Name* first = nullptr;
    for (Name& n : names) {
      if (n.next < at) n.next = text.find(n.name, at);
      const bool is_first =
          first == nullptr || n.next < first->next || (n.next == first->next && n.name.size() > first->name.size());
      if (n.next != std::string_view::npos && is_first) first = &n;
    }
    const size_t end = first != nullptr ? first->next : text.size();
    encode_ordinary(text.substr(at, end - at), tokens);
    if (first == nullptr) return;
    tokens.push_back(first->id);
    at = end + first->name.size();
  }
}

size_t Encoder::encode_piece(std::string_view piece, uint16_t* tokens) {
  if (piece.size() <= tokenizer_.longest_) {
    const int whole = tokenizer_.ids_.find(piece);
    if (whole != TokenTable::none) {
      *tokens = uint16_t(whole);
      return 1;
    }
  }
  CHECK(piece.size() <= size_t(INT32_MAX));
  if (piece.size() <= huge_piece) return merge(piece, tokens);
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  const size_t count = merge(piece, tokens);
  ids_ = {}, ranks_ = {}, previous_ = {}, next_ = {};
  return count;
}

size_t Encoder::merge(std::string_view piece, uint16_t* tokens, uint32_t below) {
  const size_t n = piece.size();
  ids_.resize(n);
  ranks_.resize(n);
  for (size_t i = 0; i < n; i++) ids_[i] = tokenizer_.byte_ids_[uint8_t(piece[i])];
  for (size_t i = 0; i + 1 < n; i++) ranks_[i] = tokenizer_.pairs_.find(ids_[i], ids_[i + 1]);
  ranks_[n - 1] = PairTable::none;
  return n <= short_piece || below != PairTable::none ? merge_short(tokens, below) : merge_long(tokens);
}

// Finds the next merge by looking at all pairs, and closes the gap after each.
size_t Encoder::merge_short(uint16_t* tokens, uint32_t below) {
  size_t n = ids_.size();
  for (;;) {
    const size_t i = std::min_element(ranks_.begin(), ranks_.begin() + long(n)) - ranks_.begin();
    if (ranks_[i] >= below) break;
    ids_[i] = ranks_[i];
    n--;
    memmove(&ids_[i + 1], &ids_[i + 2], (n - i - 1) * sizeof ids_[0]);
    memmove(&ranks_[i + 1], &ranks_[i + 2], (n - i - 1) * sizeof ranks_[0]);
    ranks_[i] = i + 1 < n ? tokenizer_.pairs_.find(ids_[i], ids_[i + 1]) : PairTable::none;
    if (i > 0) ranks_[i - 1] = tokenizer_.pairs_.find(ids_[i - 1], ids_[i]);
  }
  for (size_t i = 0; i < n; i++) tokens[i] = uint16_t(ids_[i]);
  return n;
}

// A linked list of tokens, and for each rank the places of pairs that have or had that rank, which is checked when the
// rank is processed. Ranks are processed from the lowest up and places from the left, so that memory is read in one
// direction. A merge seldom makes a pair of a lower rank than its own; those go into a heap and are merged first.
size_t Encoder::merge_long(uint16_t* tokens) {
  const size_t n = ids_.size();
  int64_t current = -1;
  previous_.resize(n);
  next_.resize(n);
  places_.resize(tokenizer_.vocab_size());
  used_ranks_.assign(places_.size() / 64 + 1, 0);
  auto set_rank = [&](size_t i, uint32_t rank) {
    ranks_[i] = rank;
    if (rank == PairTable::none) return;
    if (rank > current) {
      places_[rank].push_back(uint32_t(i));
      used_ranks_[rank / 64] |= uint64_t(1) << rank % 64;
    } else {
      earlier_.push(uint64_t(rank) << 32 | i);
    }
  };
  auto merge_at = [&](size_t i, uint32_t rank) {
    if (ranks_[i] != rank) return;
    const size_t gone = next_[i], next = next_[gone];
    ids_[i] = rank;
    ranks_[gone] = PairTable::none;
    next_[i] = int32_t(next);
    if (next < n) previous_[next] = int32_t(i);
    set_rank(i, next < n ? tokenizer_.pairs_.find(ids_[i], ids_[next]) : PairTable::none);
    if (previous_[i] >= 0) set_rank(previous_[i], tokenizer_.pairs_.find(ids_[previous_[i]], ids_[i]));
  };
  auto merge_earlier = [&](uint64_t than) {
    while (!earlier_.empty() && earlier_.top() < than) {
      const uint64_t first = earlier_.top();
      earlier_.pop();
      merge_at(uint32_t(first), uint32_t(first >> 32));
    }
  };
  for (size_t i = 0; i < n; i++) {
    previous_[i] = int32_t(i) - 1, next_[i] = int32_t(i) + 1;
    set_rank(i, ranks_[i]);
  }
  for (size_t word = 0; word < used_ranks_.size(); word++)
    while (used_ranks_[word] != 0) {
      const uint32_t rank = uint32_t(word * 64) + uint32_t(__builtin_ctzll(used_ranks_[word]));
      used_ranks_[word] &= used_ranks_[word] - 1;
      current = rank;
      std::vector<uint32_t> places;
      places.swap(places_[rank]);
      if (!std::is_sorted(places.begin(), places.end())) std::sort(places.begin(), places.end());
      for (const uint32_t i : places) {
        merge_earlier(uint64_t(rank) << 32 | i);
        merge_at(i, rank);
      }
      merge_earlier(UINT64_MAX);
    }
  size_t count = 0;
  for (size_t i = 0; i < n; i = next_[i]) tokens[count++] = uint16_t(ids_[i]);
  return count;
}

std::vector<int> encode_prompt(const Tokenizer& tokenizer, const std::string& prompt, bool begins_with_end) {
  std::string text = prompt;
  if (!tokenizer.is_bytes()) replace_invalid_utf8(prompt, text);
  std::vector<uint16_t> tokens;
  if (begins_with_end) tokens.push_back(tokenizer.end_of_text());
  // A cache takes longer to lay out than a sentence to encode.
  Encoder(tokenizer, /*caches=*/text.size() > 100000).encode(text, tokens, /*end_of_text=*/true);
  return {tokens.begin(), tokens.end()};
}

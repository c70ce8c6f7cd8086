#include "vocabulary.h"
#include <algorithm>
#include <functional>
#include <queue>
#include <unordered_map>
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/text/pieces.h"

constexpr int64_t min_count = 2;
constexpr size_t longest_token = 1 << 16;  // bytes; loading a vocabulary takes time by the square of it

// -------------------------------------------------------------------------------------------------------------------
// Words

size_t WordCounts::slot_of(std::string_view word, uint32_t hash) const {
  size_t slot = hash & (slots_.size() - 1);
  for (; slots_[slot] != 0; slot = (slot + 1) & (slots_.size() - 1))
    if (const size_t i = slots_[slot] - 1; words_[i].hash == hash && this->word(i) == word) break;
  return slot;
}

void WordCounts::grow() {
  slots_.assign(std::max<size_t>(1024, slots_.size() * 2), 0);
  for (size_t i = 0; i < size(); i++) {
    size_t slot = words_[i].hash & (slots_.size() - 1);
    while (slots_[slot] != 0) slot = (slot + 1) & (slots_.size() - 1);
    slots_[slot] = uint32_t(i + 1);
  }
}

void WordCounts::add(std::string_view word, int64_t count) {
  if (size() * 2 >= slots_.size()) grow();
  const uint32_t hash = uint32_t(std::hash<std::string_view>()(word));
  const size_t slot = slot_of(word, hash);
  if (slots_[slot] != 0) {
    words_[slots_[slot] - 1].count += count;
    return;
  }
  if (bytes_.size() + word.size() > most_word_bytes)
    user_error("the text has more than %zu MB of different words to learn a vocabulary from; learn it from a part of "
               "the text, and name its tokenizer.json with --tokenizer",
               most_word_bytes >> 20);
  words_.push_back({uint32_t(bytes_.size()), hash, count});
  slots_[slot] = uint32_t(size());
  bytes_ += word;
}

void WordCounts::add(const WordCounts& other) {
  for (size_t i = 0; i < other.size(); i++) add(other.word(i), other.count(i));
}

void WordCounts::add_text(std::string_view text) {
  const PieceScanner scanner{text.data(), text.size()};
  for (size_t at = 0, end; at < text.size(); at = end) {
    end = scanner.piece_end(at);
    add(text.substr(at, end - at));
  }
}

// -------------------------------------------------------------------------------------------------------------------
// Merges

namespace {

// Two neighbouring tokens: how often they stand side by side, and where they do or did.
struct Pair {
  int64_t count = 0;
  std::vector<uint32_t> places;  // of the left token's first byte, ascending
};

class Learner {
 public:
  explicit Learner(WordCounts words);
  std::vector<Merge> learn(size_t wanted);

 private:
  // A byte of text each. A token's id stands at its first and its last byte, and at other bytes no token's that has
  // ever begun there. Words are separated by the end of text, whose id is 0, and begin and end with one.
  std::vector<uint16_t> ids_;
  std::vector<uint32_t> word_of_;
  std::vector<int64_t> counts_;                                      // of the words
  std::vector<uint32_t> lengths_;                                    // of the tokens, in bytes
  std::unordered_map<uint32_t, Pair> pairs_;                         // by key_of
  std::priority_queue<std::pair<int64_t, uint32_t>> most_frequent_;  // counts, maybe from before they fell, and ~keys

  static uint32_t key_of(uint16_t left, uint16_t right) { return uint32_t(left) << 16 | right; }
  void add(uint32_t key, uint32_t place, std::vector<uint32_t>& added);
  void offer(uint32_t key);
  void merge(Merge parts);
};

}  // namespace

Learner::Learner(WordCounts words) : lengths_(byte_vocab_size, 1) {
  std::string all_bytes;
  for (int byte = 0; byte < 256; byte++) all_bytes += char(byte);
  const Tokenizer without_merges = Tokenizer::of_merges({});
  std::vector<uint16_t> byte_ids;
  Encoder(without_merges).encode(all_bytes, byte_ids);
  ids_.reserve(words.bytes() + words.size() + 1);
  word_of_.reserve(ids_.capacity());
  ids_.push_back(0);
  for (size_t i = 0; i < words.size(); i++) {
    for (const char byte : words.word(i)) ids_.push_back(byte_ids[uint8_t(byte)]);
    ids_.push_back(0);
    word_of_.resize(ids_.size(), uint32_t(i));
    counts_.push_back(words.count(i));
  }
  words = {};
  std::vector<uint32_t> added;
  for (uint32_t at = 0; at + 1 < ids_.size(); at++)
    if (ids_[at] != 0 && ids_[at + 1] != 0) add(key_of(ids_[at], ids_[at + 1]), at, added);
  for (const uint32_t key : added) offer(key);
}

void Learner::add(uint32_t key, uint32_t place, std::vector<uint32_t>& added) {
  Pair& pair = pairs_[key];
  if (pair.places.empty()) added.push_back(key);
  pair.count += counts_[word_of_[place]];
  pair.places.push_back(place);
}

// From now on a pair's count can only fall.
void Learner::offer(uint32_t key) {
  const auto pair = pairs_.find(key);
  if (pair->second.count < min_count) pairs_.erase(pair);
  else most_frequent_.push({pair->second.count, ~key});
}

std::vector<Merge> Learner::learn(size_t wanted) {
  std::vector<Merge> merges;
  while (merges.size() < wanted && !most_frequent_.empty()) {
    if (interrupted) user_error("interrupted");
    const auto [count, not_key] = most_frequent_.top();
    most_frequent_.pop();
    const Merge parts = {uint16_t(~not_key >> 16), uint16_t(~not_key)};
    if (pairs_[~not_key].count != count) {
      offer(~not_key);
    } else if (lengths_[parts.first] + lengths_[parts.second] <= longest_token) {
      merges.push_back(parts);
      merge(parts);
    }
  }
  return merges;
}

// Merges two tokens from left to right wherever they stand side by side.
void Learner::merge(Merge parts) {
  const auto [a, b] = parts;
  const uint16_t merged = uint16_t(lengths_.size());
  lengths_.push_back(lengths_[a] + lengths_[b]);
  const std::vector<uint32_t> places = std::move(pairs_[key_of(a, b)].places);
  pairs_.erase(key_of(a, b));
  std::vector<uint32_t> added;
  auto remove = [&](uint32_t key, int64_t count) {
    if (const auto pair = pairs_.find(key); pair != pairs_.end()) pair->second.count -= count;
  };
  for (const uint32_t at : places) {
    const uint32_t middle = at + lengths_[a], end = at + lengths_[merged];
    if (ids_[at] != a || ids_[middle] != b) continue;
    const uint16_t before = ids_[at - 1], after = ids_[end];
    const int64_t count = counts_[word_of_[at]];
    ids_[at] = ids_[middle] = ids_[end - 1] = merged;
    if (before != 0) add(key_of(before, merged), at - lengths_[before], added), remove(key_of(before, a), count);
    if (after != 0) add(key_of(merged, after), at, added), remove(key_of(b, after), count);
  }
  for (const uint32_t key : added) offer(key);
}

std::vector<Merge> learn_merges(WordCounts words, size_t wanted) {
  CHECK(byte_vocab_size + wanted <= size_t(max_vocab_size));
  return Learner(std::move(words)).learn(wanted);
}

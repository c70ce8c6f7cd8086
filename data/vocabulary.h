// Learns a vocabulary from text: byte-level BPE (Sennrich et al. 2016) within GPT-2's pieces, which are the words here.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>
#include "llmc/text/tokenizer.h"

// Bytes of all different words together. Learning takes up to 25 bytes of memory for each.
constexpr size_t most_word_bytes = 128 << 20;

// The different words of a text and how often each occurs.
class WordCounts {
 public:
  void add(std::string_view word, int64_t count = 1);  // throws UserError beyond most_word_bytes
  void add(const WordCounts& other);
  void add_text(std::string_view text);

  size_t size() const { return words_.size(); }  // different words
  size_t bytes() const { return bytes_.size(); }
  std::string_view word(size_t i) const {
    const size_t end = i + 1 < size() ? words_[i + 1].begin : bytes_.size();
    return std::string_view(bytes_).substr(words_[i].begin, end - words_[i].begin);
  }
  int64_t count(size_t i) const { return words_[i].count; }

 private:
  struct Word {
    uint32_t begin, hash;
    int64_t count;
  };
  std::string bytes_;  // the words, concatenated
  std::vector<Word> words_;
  std::vector<uint32_t> slots_;  // a power of two of them: the number of a word, from 1; 0: free

  size_t slot_of(std::string_view word, uint32_t hash) const;
  void grow();
};

// At most `wanted` merges, each the ids of two neighbouring tokens: the two that stand side by side most often in the
// text, counted after the merges before it; of several as frequent the lowest ids. Ids are those of
// Tokenizer::of_merges. There are fewer if no two tokens stand side by side twice. They are the merges of Hugging
// Face's BpeTrainer with min_frequency=2, which is the default of its ByteLevelBPETokenizer; only that a token has at
// most 65,536 bytes here. Throws UserError if `interrupted` (llmc/base/files.h) is set.
std::vector<Merge> learn_merges(WordCounts words, size_t wanted);

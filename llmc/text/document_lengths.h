// How long the documents of token files are: attention within documents costs as much as they are long.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>
#include "dataloader.h"

struct DocumentLengths {
  int64_t count = 0, ends_of_text = 0;
  double mean = 0;
  int64_t median = 0;
  // places[i], in sequences of T tokens: the share of the tokens that have i tokens of their document before them in
  // the sequence.
  std::vector<double> places;
};

// A document begins at each token `end_of_text`, and where a file does. Reads all tokens.
inline DocumentLengths document_lengths(const TokenShards& shards, int end_of_text, int T) {
  DocumentLengths found;
  std::vector<int64_t> lengths;
  std::vector<double> parts(size_t(T) + 1);  // by their length: those that documents are cut into
  constexpr int64_t block = 1 << 20;
  for (const TokenFile& file : shards.files) {
    int64_t begin = 0;
    auto end_at = [&](int64_t end) {
      if (end > begin) lengths.push_back(end - begin);
      for (int64_t next; begin < end; begin = next) {
        next = std::min(end, (begin / T + 1) * T);
        parts[size_t(next - begin)]++;
      }
    };
    for (int64_t first = 0; first < file.num_tokens; first += block) {
      const std::vector<uint16_t> tokens = file.read(first, std::min(block, file.num_tokens - first));
      for (size_t i = 0; i < tokens.size(); i++)
        if (tokens[i] == end_of_text) end_at(first + int64_t(i)), found.ends_of_text++;
    }
    end_at(file.num_tokens);
  }
  found.count = int64_t(lengths.size()), found.mean = double(shards.num_tokens) / double(found.count);
  std::nth_element(lengths.begin(), lengths.begin() + found.count / 2, lengths.end());
  found.median = lengths[size_t(found.count / 2)];
  found.places.resize(size_t(T));
  double longer = 0;
  for (int place = T - 1; place >= 0; place--)
    found.places[size_t(place)] = (longer += parts[size_t(place) + 1]) / double(shards.num_tokens);
  return found;
}

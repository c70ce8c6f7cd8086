// Batches of tokens from memory-mapped files.
//
// The tokens of each file are cut into sequences of T inputs and, shifted by one, T targets. Sequence i of a file
// begins at its token i*T, so that it shares one token with the next; none crosses the end of a file. The loader's only
// state is one integer, the number of the next sequence; numbers continue from epoch to epoch, and the tokens of a
// number are a pure function of it.
#pragma once
#include <glob.h>                    // glob, globfree
#include <sys/mman.h>                // MADV_SEQUENTIAL, MADV_RANDOM
#include <sys/stat.h>                // stat
#include <algorithm>                 // std::any_of, std::max, std::min, std::upper_bound
#include <cstdint>                   // int64_t, uint16_t
#include <cstring>                   // memcpy
#include <string>                    // std::string
#include <vector>                    // std::vector
#include "llmc/utils/crc32c.h"       // crc32c
#include "llmc/utils/error.h"        // user_error, CHECK
#include "llmc/utils/files.h"        // path_exists
#include "llmc/utils/mapped_file.h"  // MappedFile
#include "llmc/utils/random.h"       // random_words, RandomStream
#include "token_mask.h"              // TokenMask, not_scored

// An llm.c shard: 256 int32 (magic, version, number of tokens, zeros), then the tokens as uint16.
constexpr int32_t shard_magic = 20240520;
constexpr int32_t shard_version = 1;
constexpr int shard_header_ints = 256;
constexpr int64_t shard_header_bytes = shard_header_ints * 4;

// A token file mapped into memory: an llm.c shard, or nanoGPT's headerless uint16 file, with its mask if it has one.
// Movable, not copyable.
struct TokenFile {
  std::string path;
  const uint16_t* tokens = nullptr;  // (num_tokens)
  int64_t num_tokens = 0;
  TokenMask mask;

  // Throws UserError if the file cannot be read or is neither of the two formats, or if its mask is not one.
  explicit TokenFile(const std::string& file_path) : path(file_path), file_(file_path) {
    find_tokens();
    const std::string mask_path = mask_path_of(path);
    if (!mask_path.empty() && path_exists(mask_path)) mask = TokenMask(mask_path, num_tokens);
  }

  // Tells the kernel how the pages will be read: MADV_SEQUENTIAL or MADV_RANDOM. Only a hint.
  void advise(int advice) const { file_.advise(advice); }

  // The CRC-32C of what has the checksum `before`, followed by the number of tokens, the tokens and the mask. Reads the
  // whole file.
  uint32_t checksum(uint32_t before) const {
    before = crc32c(&num_tokens, sizeof num_tokens, before);
    return mask.checksum(crc32c(tokens, size_t(num_tokens) * sizeof(uint16_t), before));
  }

  // inputs (count) = the tokens from `begin` on; targets (count) = the token after each, or not_scored.
  void load(int64_t begin, int64_t count, int* inputs, int* targets) const {
    for (int64_t t = 0; t < count; t++) inputs[t] = tokens[begin + t], targets[t] = tokens[begin + t + 1];
    if (!mask.exists()) return;
    for (int64_t t = 0; t < count; t++)
      if (!mask.is_scored(begin + t + 1)) targets[t] = not_scored;
  }

 private:
  MappedFile file_;

  // Detects the format and sets `tokens` and `num_tokens`. llm.c's magic numbers cannot begin a file of GPT-2 tokens:
  // read as uint16 they are 55,238 and more, beyond its vocabulary of 50,257.
  void find_tokens() {
    const char* name = path.c_str();
    int32_t header[3] = {0, 0, 0};  // magic, version, number of tokens
    memcpy(header, file_.data(), std::min<int64_t>(file_.bytes, sizeof header));
    if (is_mask(file_.data(), file_.bytes))
      user_error("%s: is a mask, which says what tokens of the .bin beside it are scored; name only the tokens, for "
                 "example 'train_*.bin'",
                 name);
    if (header[0] == shard_magic) {
      if (file_.bytes < shard_header_bytes)
        user_error("%s: truncated: %lld bytes, but a shard's header alone has %lld; make it again", name,
                   (long long)file_.bytes, (long long)shard_header_bytes);
      if (header[1] != shard_version)
        user_error("%s: is a token shard of version %d; only version %d is known", name, header[1], shard_version);
      tokens = reinterpret_cast<const uint16_t*>(static_cast<const char*>(file_.data()) + shard_header_bytes);
      num_tokens = header[2];
      if (num_tokens < 1) user_error("%s: its header says %d tokens; make it again", name, header[2]);
      int64_t expected = shard_header_bytes + num_tokens * 2;
      if (file_.bytes != expected)
        user_error("%s: %s: its header says %lld tokens, which take %lld bytes, but the file has %lld; make it again",
                   name, file_.bytes < expected ? "truncated" : "longer than its header says", (long long)num_tokens,
                   (long long)expected, (long long)file_.bytes);
      return;
    }
    struct Other {
      int32_t magic;
      const char* what;
    };
    static const Other others[] = {{20240801, "an llm.c shard of uint32 tokens (Llama 3)"},
                                   {20240522, "an llm.c file of multiple-choice questions (HellaSwag)"},
                                   {20240326, "an llm.c model"}};
    for (const Other& other : others)
      if (header[0] == other.magic)
        user_error("%s: bad magic %d: this is %s; a shard of uint16 tokens begins with %d", name, other.magic,
                   other.what, shard_magic);
    if (header[1] == shard_version && shard_header_bytes + int64_t(header[2]) * 2 == file_.bytes)
      user_error("%s: bad magic %d in what is otherwise a shard, which begins with %d; make it again", name, header[0],
                 shard_magic);
    if (file_.bytes % 2 != 0)
      user_error("%s: odd size, %lld bytes: neither a shard (bad magic %d; it would be %d) nor a headerless file of "
                 "uint16 tokens; data/text.sh makes tokens of text",
                 name, (long long)file_.bytes, header[0], shard_magic);
    if (looks_like_text()) user_error("%s: is text, not tokens; data/text.sh makes tokens of it", name);
    tokens = static_cast<const uint16_t*>(file_.data());
    num_tokens = file_.bytes / 2;
  }

  // Naming the text itself is an easy mistake, and any file of even size would pass for headerless tokens. ASCII text
  // has no byte outside this range; 64 bytes of tokens within it would be rare tokens only.
  bool looks_like_text() const {
    const unsigned char* bytes = static_cast<const unsigned char*>(file_.data());
    int64_t n = std::min<int64_t>(file_.bytes, 4096);
    for (int64_t i = 0; i < n; i++)
      if (!(bytes[i] >= 32 && bytes[i] < 127) && !(bytes[i] >= '\t' && bytes[i] <= '\r')) return false;
    return n >= 64;
  }
};

// Throws UserError, naming the first one, unless every token is below `vocab_size`, and if the file's mask was made for
// other tokens. Reads the whole file, on all threads.
inline void check_tokens(const TokenFile& file, int vocab_size) {
  file.mask.check_belongs_to(file.tokens);
  if (vocab_size > 65535) return;  // no uint16 is larger
  constexpr int64_t block = 1 << 16;
  int largest = 0;
  file.advise(MADV_SEQUENTIAL);
#pragma omp parallel for reduction(max : largest) schedule(static)
  for (int64_t begin = 0; begin < file.num_tokens; begin += block) {
    const uint16_t* tokens = file.tokens + begin;
    int n = int(std::min(block, file.num_tokens - begin));
    uint16_t block_largest = 0;
#pragma omp simd reduction(max : block_largest)
    for (int i = 0; i < n; i++) block_largest = tokens[i] > block_largest ? tokens[i] : block_largest;
    largest = std::max(largest, int(block_largest));
  }
  if (largest < vocab_size) return;
  int64_t position = 0;
  while (file.tokens[position] < vocab_size) position++;
  user_error("%s: token %d at position %lld is outside the vocabulary of %d; train a model with at least %d on it "
             "(--vocab-size), or name the data that was made for this vocabulary",
             file.path.c_str(), int(file.tokens[position]), (long long)position, vocab_size, largest + 1);
}

// All files that a glob pattern matches, sorted by name. The constructor throws UserError, naming the file, if no file
// matches, if one is not a token file, or if one holds a token that is not below `vocab_size`; and if masks leave no
// token to score.
struct TokenShards {
  std::string pattern;
  std::vector<TokenFile> files;
  int64_t num_tokens = 0;
  // Tells data apart that have as many tokens: a CRC-32C of all files' tokens and masks, whatever the names of the
  // files and with or without headers. It is computed of every byte each time, right after the tokens of a file have
  // been looked at, when reading them again costs the least: no date or list that may be out of date has to be trusted.
  uint32_t checksum = 0;

  TokenShards(const std::string& glob_pattern, int vocab_size) : pattern(glob_pattern) {
    for (const std::string& path : matching_paths()) files.emplace_back(path);
    for (const TokenFile& file : files) {
      check_tokens(file, vocab_size);
      num_tokens += file.num_tokens;
      checksum = file.checksum(checksum);
    }
    if (has_mask() && num_scored() == 0)
      user_error("%s: the masks beside these files leave no token to score; make them again, or remove them to score "
                 "every token",
                 pattern.c_str());
  }

  // Whether a file has a mask; if none has, every token is scored.
  bool has_mask() const {
    return std::any_of(files.begin(), files.end(), [](const TokenFile& file) { return file.mask.exists(); });
  }
  // How many tokens are scored. A file's first token never is, because no token stands before it.
  int64_t num_scored() const {
    int64_t scored = 0;
    for (const TokenFile& file : files) scored += file.mask.exists() ? file.mask.num_scored(1) : file.num_tokens - 1;
    return scored;
  }

 private:
  // A file whose name is exactly the pattern is taken, even if the name has *, ? or [ in it.
  std::vector<std::string> matching_paths() const {
    struct stat info;
    if (stat(pattern.c_str(), &info) == 0) return {pattern};
    glob_t found = {};
    int rc = glob(pattern.c_str(), 0, nullptr, &found);
    std::vector<std::string> paths;
    if (rc == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    if (!paths.empty()) return paths;
    if (pattern.find_first_of("*?[") != std::string::npos)
      user_error("%s: no file matches; data/README.md says how to make token files", pattern.c_str());
    user_error("%s: no such file; data/README.md says how to make token files", pattern.c_str());
  }
};

// A permutation of 0 .. n-1 for each (seed, epoch), computed one element at a time in O(1) memory: a Feistel network
// over the next even power of two, applied until the result is in range (cycle walking; Black and Rogaway 2002,
// "Ciphers with arbitrary finite domains"). The domain is smaller than 4n, so that takes fewer than 4 steps on average.
// 0 <= index < n.
inline int64_t permuted_index(uint64_t seed, int64_t epoch, int64_t index, int64_t n) {
  CHECK(index >= 0 && index < n);
  int half_bits = 1;
  while (int64_t(1) << (2 * half_bits) < n) half_bits++;
  const uint64_t mask = (uint64_t(1) << half_bits) - 1;
  uint64_t x = uint64_t(index);
  do {
    uint64_t left = x >> half_bits, right = x & mask;
    for (uint64_t round = 0; round < 6; round++) {  // 4 suffice for a large domain (Luby and Rackoff 1988)
      Philox f = random_words(seed, RandomStream::shuffle, uint32_t(epoch), round << 32 | right);
      uint64_t mixed = left ^ (f.word[0] & mask);
      left = right;
      right = mixed;
    }
    x = left << half_bits | right;
  } while (x >= uint64_t(n));
  return int64_t(x);
}

// The tokens after the last full sequence of a file: fewer than T inputs and their targets.
struct SequenceRest {
  const TokenFile* file;
  int64_t begin, length;

  // inputs, targets (length). Returns the length.
  int64_t load(int* inputs, int* targets) const {
    file->load(begin, length, inputs, targets);
    return length;
  }
};

// Reads sequences in the order of their numbers. Number s belongs to epoch s / num_sequences; unshuffled it is sequence
// s % num_sequences (with one file, row b of micro-batch m of rank r of N begins at token ((m*N + r)*B + b)*T),
// shuffled each epoch has another order. Cut into streams, the tokens are as many equal contiguous parts, and sequences
// s, s + 1, ... are the next segments of each stream in turn.
struct DataLoader {
  TokenShards shards;
  int T;  // tokens in a sequence
  bool shuffle;
  uint64_t seed;              // of the shuffled orders
  int64_t num_sequences = 0;  // in one epoch
  int64_t streams = 0;        // 0: not cut into streams
  // The position, counted from 0 over all epochs. The caller advances it, saves it, and sets it to resume.
  int64_t next_sequence = 0;

  // Throws UserError as TokenShards does, and if no file has the T + 1 tokens of a sequence.
  DataLoader(const std::string& glob_pattern, int vocab_size, int seq_len, bool shuffled = false,
             uint64_t shuffle_seed = 0)
      : shards(glob_pattern, vocab_size), T(seq_len), shuffle(shuffled), seed(shuffle_seed) {
    CHECK(T >= 1);
    int64_t longest = 0;
    for (const TokenFile& file : shards.files) {
      first_sequence_.push_back(num_sequences);
      num_sequences += (file.num_tokens - 1) / T;
      longest = std::max(longest, file.num_tokens);
      file.advise(shuffle ? MADV_RANDOM : MADV_SEQUENTIAL);
    }
    all_sequences_ = num_sequences;
    if (num_sequences == 0)
      user_error("%s: has %lld tokens%s, a sequence needs T + 1 = %lld; use a shorter length (-t) or more text",
                 shards.pattern.c_str(), (long long)longest, shards.files.size() > 1 ? " in its longest file" : "",
                 (long long)T + 1);
  }

  // Cuts an epoch into `count` streams of whole sequences: what does not fill a sequence of each stream is left out.
  // Their order cannot be shuffled. Throws UserError for fewer sequences than streams.
  void cut_into_streams(int64_t count) {
    if (num_sequences < count)
      user_error("%s: has %lld sequences of T = %d tokens, but with memory each of the %lld rows of a micro-batch, "
                 "over all ranks, reads a stream of its own; take a smaller -b or more text",
                 shards.pattern.c_str(), (long long)num_sequences, T, (long long)count);
    streams = count, shuffle = false;
    segments_ = num_sequences / count, num_sequences = segments_ * count;
  }

  // Whether some targets may be not_scored.
  bool has_mask() const { return shards.has_mask(); }

  // How many sequences an epoch has if the same data are cut into `count` streams.
  int64_t sequences_of_streams(int64_t count) const { return all_sequences_ / count * count; }

  // Whether a sequence is the first of its stream.
  bool begins_stream(int64_t number) const { return streams > 0 && number % num_sequences < streams; }

  // The files of fewer than `tokens` tokens, in their order: without T + 1 a file has no sequence.
  std::vector<std::string> files_shorter_than(int64_t tokens) const {
    std::vector<std::string> paths;
    for (const TokenFile& file : shards.files)
      if (file.num_tokens < tokens) paths.push_back(file.path);
    return paths;
  }

  // inputs, targets (count, T) = sequences first, first + 1, ...; targets that are not scored are not_scored. Does not
  // read or change next_sequence.
  void load_sequences(int64_t first, int64_t count, int* inputs, int* targets) const {
    CHECK(first >= 0);
    for (int64_t row = 0; row < count; row++) {
      const Place place = place_of(first + row);
      place.file->load(place.begin, T, inputs + row * T, targets + row * T);
    }
  }

  // inputs, targets (micro_batches, B, T) = the part of rank `rank` in `micro_batches` micro-batches of all `ranks`,
  // which begin with sequence `first`. In a micro-batch B sequences of each rank follow those of the rank before. Does
  // not read or change next_sequence.
  void load_batches(int64_t first, int64_t micro_batches, int* inputs, int* targets, int B, int rank = 0,
                    int ranks = 1) const {
    for (int64_t i = 0; i < micro_batches; i++)
      load_sequences(first + (i * ranks + rank) * B, B, inputs + i * B * T, targets + i * B * T);
  }

  // The rest of each file that has one, in the order of the files.
  std::vector<SequenceRest> rests() const {
    std::vector<SequenceRest> all;
    for (const TokenFile& file : shards.files) {
      const int64_t length = (file.num_tokens - 1) % T;
      if (length > 0) all.push_back({&file, file.num_tokens - 1 - length, length});
    }
    return all;
  }

 private:
  std::vector<int64_t> first_sequence_;  // (files), each file's first sequence in an unshuffled epoch
  int64_t all_sequences_ = 0;            // of an epoch that is not cut into streams
  int64_t segments_ = 0;                 // of a stream

  // Where the T + 1 tokens of a sequence begin.
  struct Place {
    const TokenFile* file;
    int64_t begin;
  };
  Place place_of(int64_t number) const {
    int64_t sequence = number % num_sequences;
    if (shuffle) sequence = permuted_index(seed, number / num_sequences, sequence, num_sequences);
    if (streams > 0) sequence = sequence % streams * segments_ + sequence / streams;
    const auto next = std::upper_bound(first_sequence_.begin(), first_sequence_.end(), sequence);
    const int64_t file = next - first_sequence_.begin() - 1;
    return {&shards.files[file], (sequence - first_sequence_[file]) * T};
  }
};

// Batches of tokens from files.
//
// The tokens of each file are cut into sequences of T inputs and, shifted by one, T targets. Sequence i of a file
// begins at its token i*T, so that it shares one token with the next; none crosses the end of a file. The loader's only
// state is one integer, the number of the next sequence; numbers continue from epoch to epoch, and the tokens of a
// number are a pure function of it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>
#include "llmc/base/crc32c.h"
#include "llmc/base/data_file.h"
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/base/foreign_file.h"
#include "llmc/base/random.h"
#include "numpy_file.h"
#include "token_mask.h"
#include "tokenizer.h"

// An llm.c shard: 256 int32 (magic, version, number of tokens, zeros), then the tokens as uint16.
constexpr int32_t shard_magic = 20240520;
constexpr int32_t shard_version = 1;
constexpr int shard_header_ints = 256;
constexpr int64_t shard_header_bytes = shard_header_ints * 4;

// A token file: an llm.c shard, nanoGPT's headerless uint16 file or a NumPy array of uint16, with its mask if it has
// one. Its tokens are read, and looked at, whenever they are asked for: another program may write the file meanwhile.
// Movable, not copyable.
struct TokenFile {
  std::string path;
  int64_t num_tokens = 0;
  TokenMask mask;
  uint32_t checksum = 0;  // CRC-32C of the tokens and what the mask says of each, when the file was opened

  // Throws UserError, naming the file, if it cannot be read, is in none of these formats, or has a token that is not
  // below `vocab_size`; and if its mask is not one, or was made for other tokens. Reads the whole file, on all threads.
  TokenFile(const std::string& file_path, int vocabulary) : path(file_path), file_(file_path), vocab_size(vocabulary) {
    find_tokens();
    const std::string mask_path = mask_path_of(path);
    if (!mask_path.empty() && path_exists(mask_path)) mask = TokenMask(mask_path, num_tokens);
    check();
  }

  // How many tokens are scored. The first never is, because no token stands before it.
  int64_t num_scored() const { return mask.exists() ? mask.num_scored(1) : num_tokens - 1; }

  // Tells the kernel how the file will be read: POSIX_FADV_SEQUENTIAL or POSIX_FADV_RANDOM. Only a hint.
  void advise(int advice) const { file_.advise(advice); }

  // The tokens from `begin` on (count). Throws UserError, naming the file, if it no longer has them, or has one there
  // now that is not below the vocabulary's size.
  std::vector<uint16_t> read(int64_t begin, int64_t count) const {
    std::vector<uint16_t> tokens = read_unchecked(begin, count);
    if (largest_of(tokens) < vocab_size) return tokens;
    for (int64_t i = 0; i < count; i++)
      if (tokens[i] >= vocab_size)
        user_error("%s: has been changed since it was opened: token %d at position %lld is outside the vocabulary of "
                   "%d; make it again, under another name while it is in use",
                   path, int(tokens[i]), (long long)(begin + i), vocab_size);
    return tokens;
  }

  // inputs (count) = the tokens from `begin` on; targets (count) = the token after each, or not_scored. Throws as
  // read() does, and if the mask no longer has their bits.
  void load(int64_t begin, int64_t count, int* inputs, int* targets) const {
    const std::vector<uint16_t> tokens = read(begin, count + 1);
    const std::vector<uint8_t> scored = mask.scored(begin + 1, count);
    for (int64_t t = 0; t < count; t++) inputs[t] = tokens[t], targets[t] = scored[t] ? tokens[t + 1] : not_scored;
  }

 private:
  DataFile file_;
  int vocab_size;
  int64_t first_byte_ = 0;  // of the tokens

  std::vector<uint16_t> read_unchecked(int64_t begin, int64_t count) const {
    std::vector<uint16_t> tokens(static_cast<size_t>(count));
    file_.read(first_byte_ + begin * 2, count * 2, tokens.data());
    return tokens;
  }

  static int largest_of(const std::vector<uint16_t>& tokens) {
    uint16_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (size_t i = 0; i < tokens.size(); i++) largest = tokens[i] > largest ? tokens[i] : largest;
    return largest;
  }

  // Detects the format and sets first_byte_ and num_tokens. llm.c's magic numbers cannot begin a file of GPT-2 tokens:
  // read as uint16 they are 55,238 and more, beyond its vocabulary of 50,257.
  void find_tokens() {
    int32_t header[3] = {0, 0, 0};  // magic, version, number of tokens
    file_.read(0, std::min<int64_t>(file_.bytes, sizeof header), header);
    if (is_mask(file_))
      user_error("%s: is a mask, which says what tokens of the .bin beside it are scored; name only the tokens, for "
                 "example 'train_*.bin'",
                 path);
    if (header[0] == shard_magic) {
      if (file_.bytes < shard_header_bytes)
        user_error("%s: truncated: %lld bytes, but a shard's header alone has %lld; make it again", path,
                   (long long)file_.bytes, (long long)shard_header_bytes);
      if (header[1] != shard_version)
        user_error("%s: is a token shard of version %d; only version %d is known", path, header[1], shard_version);
      set_tokens(shard_header_bytes, header[2]);
      return;
    }
    if (file_.is_numpy) {
      const NumpyHeader array = read_numpy_header(file_);
      set_tokens(array.bytes, array.count);
      return;
    }
    for (const auto& [magic, what] : {std::pair(20240801, "an llm.c shard of uint32 tokens (Llama 3)"),
                                      {20240522, "an llm.c file of multiple-choice questions (HellaSwag)"},
                                      {20240326, "an llm.c model"},
                                      {int32_t(__builtin_bswap32(shard_magic)), "a shard in big-endian order"}})
      if (header[0] == magic)
        user_error("%s: bad magic %d: this is %s; a shard of uint16 tokens begins with %d", path, magic, what,
                   shard_magic);
    if (header[1] == shard_version && shard_header_bytes + int64_t(header[2]) * 2 == file_.bytes)
      user_error("%s: bad magic %d in what is otherwise a shard, which begins with %d; make it again", path, header[0],
                 shard_magic);
    // In uint16 tokens many bytes are control characters: the upper ones of small ids.
    std::string begin(size_t(std::min<int64_t>(file_.bytes, 1 << 16)), 0);
    file_.read(0, int64_t(begin.size()), begin.data());
    if (begin.size() >= 64 && !is_binary(begin))
      user_error("%s: is text, not tokens; data/text.sh makes tokens of it. If these are tokens, a .npy of uint16 "
                 "(numpy.save) or a shard's header says so",
                 path);
    const auto* numbers = reinterpret_cast<const uint16_t*>(begin.data());
    bool is_uint32 = begin.size() >= 64 && file_.bytes % 4 == 0;
    for (size_t i = 1; i < begin.size() / 2; i += 2) is_uint32 = is_uint32 && numbers[i] == 0;
    if (is_uint32)
      user_error("%s: every second number of 16 bits is 0, so that these are numbers of 32 bits, and tokens have 16. "
                 "If they are tokens, a .npy of uint16 (numpy.save) or a shard's header says so",
                 path);
    if (file_.bytes % 2 != 0)
      user_error("%s: odd size, %lld bytes: neither a shard (bad magic %d; it would be %d) nor a headerless file of "
                 "uint16 tokens; data/text.sh makes tokens of text",
                 path, (long long)file_.bytes, header[0], shard_magic);
    num_tokens = file_.bytes / 2;
  }

  // The tokens after a header of so many bytes, which says how many there are.
  void set_tokens(int64_t header_bytes, int64_t count) {
    first_byte_ = header_bytes, num_tokens = count;
    if (count < 1) user_error("%s: its header says %lld tokens; make it again", path, (long long)count);
    const int64_t expected = header_bytes + count * 2;
    if (file_.bytes != expected)
      user_error("%s: %s: its header says %lld tokens, which take %lld bytes, but the file has %lld; make it again",
                 path, file_.bytes < expected ? "truncated" : "longer than its header says", (long long)count,
                 (long long)expected, (long long)file_.bytes);
  }

  // Sets the checksum. Throws UserError, naming the first one, unless every token is below the vocabulary's size, and
  // if the mask was made for other tokens.
  void check() {
    constexpr int64_t block = 1 << 16;
    const int64_t blocks = (num_tokens + block - 1) / block;
    auto size = [&](int64_t i) { return std::min(block, num_tokens - i * block); };
    auto read_block = [&](int64_t i) { return read_unchecked(i * block, size(i)); };
    int largest = 0;
    std::string error;  // no exception may leave a parallel region
    std::vector<uint32_t> checksums(static_cast<size_t>(blocks));
    file_.advise(POSIX_FADV_SEQUENTIAL);
#pragma omp parallel for reduction(max : largest) schedule(static)
    for (int64_t i = 0; i < blocks; i++) {
      try {
        const std::vector<uint16_t> tokens = read_block(i);
        largest = std::max(largest, largest_of(tokens));
        checksums[i] = crc32c(tokens.data(), tokens.size() * sizeof(uint16_t));
      } catch (const UserError& e) {
#pragma omp critical
        error = e.what();
      }
    }
    if (!error.empty()) throw UserError(error);
    for (int64_t i = 0; i < blocks; i++)
      checksum = crc32c_combine(checksum, checksums[i], uint64_t(size(i)) * sizeof(uint16_t));
    mask.check_belongs_to(checksum);
    checksum = mask.checksum(checksum);
    if (largest < vocab_size) return;
    for (int64_t i = 0; i < blocks; i++) {
      const std::vector<uint16_t> tokens = read_block(i);
      for (size_t k = 0; k < tokens.size(); k++)
        if (tokens[k] >= vocab_size)
          user_error("%s: token %d at position %lld is outside the vocabulary of %d; train a model with at least %d on "
                     "it (--vocab-size), or name the data that was made for this vocabulary",
                     path, int(tokens[k]), (long long)(i * block + int64_t(k)), vocab_size, largest + 1);
    }
  }
};

// All files that a glob pattern matches, sorted by name. The constructor throws UserError, naming the file, if no file
// matches, if one is not a token file, or if one holds a token that is not below `vocab_size`; and if masks leave no
// token to score.
struct TokenShards {
  std::string pattern;
  std::vector<TokenFile> files;
  int64_t num_tokens = 0;
  int64_t num_scored = 0;  // without those that masks leave out, and the first of each file
  // Tells data apart that have as many tokens: a CRC-32C of all files' tokens and masks, whatever the names of the
  // files and their formats. It is computed of every byte each time, as every token is looked at anyway: no date and no
  // list that may be out of date has to be trusted.
  uint32_t checksum = 0;

  TokenShards(const std::string& glob_pattern, int vocab_size) : pattern(glob_pattern) {
    const std::vector<std::string> paths = matching_files(pattern);
    if (paths.empty() && pattern.find_first_of("*?[") != std::string::npos)
      user_error("%s: no file matches; data/README.md says how to make token files", pattern);
    if (paths.empty()) user_error("%s: no such file; data/README.md says how to make token files", pattern);
    bool has_mask = false;
    for (const std::string& path : paths) {
      files.emplace_back(path, vocab_size);
      has_mask |= files.back().mask.exists();
      num_tokens += files.back().num_tokens, num_scored += files.back().num_scored();
      checksum = crc32c(&files.back().checksum, sizeof checksum, checksum);
    }
    if (has_mask && num_scored == 0)
      user_error("%s: the masks beside these files leave no token to score; make them again, or remove them to score "
                 "every token",
                 pattern);
  }
};

// A permutation of 0 .. n-1 for each (seed, epoch), computed one element at a time in O(1) memory: a Feistel network
// over the next even power of two, applied until the result is in range (cycle walking; Black and Rogaway 2002,
// "Ciphers with arbitrary finite domains"). The domain is smaller than 4n, so that takes fewer than 4 rounds on
// average. 0 <= index < n.
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

// Inputs and their targets: a sequence of T, or what comes after the last one of a file.
struct TokenSpan {
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
      file.advise(shuffle ? POSIX_FADV_RANDOM : POSIX_FADV_SEQUENTIAL);
    }
    all_sequences_ = num_sequences;
    if (num_sequences == 0)
      user_error("%s: has %lld tokens%s, a sequence needs T + 1 = %lld; use a shorter length (-t) or more text",
                 shards.pattern, (long long)longest, shards.files.size() > 1 ? " in its longest file" : "",
                 (long long)T + 1);
  }

  // Cuts an epoch into `count` streams of whole sequences: what does not fill a sequence of each stream is left out.
  // Their order cannot be shuffled. Throws UserError for fewer sequences than streams.
  void cut_into_streams(int64_t count) {
    if (num_sequences < count)
      user_error("%s: has %lld sequences of T = %d tokens, but with memory each of the %lld rows of a micro-batch, "
                 "over all ranks, reads a stream of its own; take a smaller -b or more text",
                 shards.pattern, (long long)num_sequences, T, (long long)count);
    streams = count, shuffle = false;
    segments_ = num_sequences / count, num_sequences = segments_ * count;
  }

  // How many sequences an epoch has if the same data are cut into `count` streams.
  int64_t sequences_of_streams(int64_t count) const { return all_sequences_ / count * count; }

  // Whether a sequence is the first of its stream.
  bool begins_stream(int64_t number) const { return streams > 0 && number % num_sequences < streams; }

  // inputs, targets (count, T) = sequences first, first + 1, ...; targets that are not scored are not_scored. Does not
  // read or change next_sequence.
  void load_sequences(int64_t first, int64_t count, int* inputs, int* targets) const {
    CHECK(first >= 0);
    for (int64_t row = 0; row < count; row++) span_of(first + row).load(inputs + row * T, targets + row * T);
  }

  // inputs, targets (micro_batches, B, T) = the part of rank `rank` in `micro_batches` micro-batches of all `ranks`,
  // which begin with sequence `first`. In a micro-batch each rank has B sequences, after the previous rank's. Does
  // not read or change next_sequence.
  void load_batches(int64_t first, int64_t micro_batches, int* inputs, int* targets, int B, int rank = 0,
                    int ranks = 1) const {
    for (int64_t i = 0; i < micro_batches; i++)
      load_sequences(first + (i * ranks + rank) * B, B, inputs + i * B * T, targets + i * B * T);
  }

  // The rest of each file that has one, in the order of the files.
  std::vector<TokenSpan> rests() const {
    std::vector<TokenSpan> all;
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

  TokenSpan span_of(int64_t number) const {
    int64_t sequence = number % num_sequences;
    if (shuffle) sequence = permuted_index(seed, number / num_sequences, sequence, num_sequences);
    if (streams > 0) sequence = sequence % streams * segments_ + sequence / streams;
    const auto next = std::upper_bound(first_sequence_.begin(), first_sequence_.end(), sequence);
    const int64_t file = next - first_sequence_.begin() - 1;
    return {&shards.files[file], (sequence - first_sequence_[file]) * T, T};
  }
};

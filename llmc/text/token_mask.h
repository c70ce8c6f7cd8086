// Which tokens of a shard are scored, that is, have a loss: a file NAME.mask beside the shard NAME.bin. It has 256
// int32 (magic, version, number of tokens, CRC-32C of the bytes of the shard's tokens, zeros), then ceil(tokens / 8)
// bytes: bit i % 8 of byte i / 8 is 1 if token i is scored. Without a .mask every token is scored.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>
#include "llmc/ops/not_scored.h"
#include "llmc/base/crc32c.h"
#include "llmc/base/data_file.h"
#include "llmc/base/error.h"

constexpr int32_t mask_magic = 20261124;
constexpr int32_t mask_version = 1;
constexpr int mask_header_ints = 256;
constexpr int64_t mask_header_bytes = mask_header_ints * 4;
constexpr int64_t mask_bytes(int64_t tokens) { return mask_header_bytes + (tokens + 7) / 8; }

// The mask's name, "a/b.mask" of "a/b.bin"; "" for shards of other names, which have no mask.
inline std::string mask_path_of(const std::string& shard_path) {
  const std::string end = ".bin";
  if (shard_path.size() <= end.size() || shard_path.compare(shard_path.size() - end.size(), end.size(), end) != 0)
    return "";
  return shard_path.substr(0, shard_path.size() - end.size()) + ".mask";
}

struct MaskHeader {
  int32_t magic, version, tokens;
  uint32_t checksum;  // CRC-32C of the tokens
};

// Whether the file is a whole mask. Mask files begin with two numbers below 50,257 when read as uint16, so that the
// magic number alone does not tell them from headerless tokens.
inline bool is_mask(const DataFile& file) {
  if (file.bytes < mask_header_bytes) return false;
  MaskHeader header;
  file.read(0, sizeof header, &header);
  return header.magic == mask_magic && header.version == mask_version && header.tokens > 0 &&
         file.bytes == mask_bytes(header.tokens);
}

// The mask of a shard. Movable, not copyable. Without a file every token is scored. What reads it throws UserError,
// naming the file, if that has become shorter or cannot be read.
struct TokenMask {
  TokenMask() = default;
  // Throws UserError, naming the file, if it is not the mask of a shard of `num_tokens` tokens.
  TokenMask(const std::string& path, int64_t num_tokens) : file_(path), num_tokens_(num_tokens) {
    if (file_.bytes < mask_header_bytes)
      user_error("%s: truncated: %lld bytes, but a mask's header alone has %lld; make it and its shard again", path,
                 (long long)file_.bytes, (long long)mask_header_bytes);
    file_.read(0, sizeof header_, &header_);
    if (header_.magic != mask_magic)
      user_error("%s: bad magic %d: a mask of tokens begins with %d; make it and its shard again, or move it away",
                 path, header_.magic, mask_magic);
    if (header_.version != mask_version)
      user_error("%s: is a mask of version %d; only version %d is known", path, header_.version, mask_version);
    if (header_.tokens != num_tokens)
      user_error("%s: is a mask of %d tokens, but its shard has %lld; make both again", path, header_.tokens,
                 (long long)num_tokens);
    if (file_.bytes != mask_bytes(num_tokens))
      user_error("%s: a mask of %lld tokens takes %lld bytes, but the file has %lld; make it and its shard again", path,
                 (long long)num_tokens, (long long)mask_bytes(num_tokens), (long long)file_.bytes);
  }

  bool exists() const { return num_tokens_ > 0; }

  // (count): 1 for each token from `begin` on that is scored, 0 for others.
  std::vector<uint8_t> scored(int64_t begin, int64_t count) const {
    std::vector<uint8_t> scored(size_t(count), 1);
    if (!exists() || count == 0) return scored;
    const int64_t first = begin / 8;
    std::vector<uint8_t> bits(size_t((begin + count + 7) / 8 - first));
    file_.read(mask_header_bytes + first, int64_t(bits.size()), bits.data());
    for (int64_t i = 0; i < count; i++) scored[i] = bits[(begin + i) / 8 - first] >> (begin + i) % 8 & 1;
    return scored;
  }

  // How many of the tokens from `begin` on are scored.
  int64_t num_scored(int64_t begin) const {
    constexpr int64_t block = 1 << 20;
    int64_t count = 0;
    for (; begin < num_tokens_; begin += block) {
      const std::vector<uint8_t> part = scored(begin, std::min(block, num_tokens_ - begin));
      count += std::count(part.begin(), part.end(), 1);
    }
    return count;
  }

  // The CRC-32C of what has the checksum `before`, followed by what the mask says of each token.
  uint32_t checksum(uint32_t before) const {
    constexpr int64_t block = 1 << 20;
    for (int64_t begin = 0; begin < num_tokens_; begin += block) {
      const std::vector<uint8_t> part = scored(begin, std::min(block, num_tokens_ - begin));
      before = crc32c(part.data(), part.size(), before);
    }
    return before;
  }

  // Throws UserError if there is a mask, and it was made for tokens of another CRC-32C.
  void check_belongs_to(uint32_t tokens_crc32c) const {
    if (exists() && tokens_crc32c != header_.checksum)
      user_error("%s: was made for other tokens than its shard has (another CRC-32C); make both again, or remove the "
                 "mask to score every token",
                 file_.path);
  }

 private:
  DataFile file_;
  int64_t num_tokens_ = 0;
  MaskHeader header_ = {};
};

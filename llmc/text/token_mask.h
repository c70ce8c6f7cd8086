// Which tokens of a shard are scored, that is, have a loss: a file NAME.mask beside the shard NAME.bin. It has 256
// int32 (magic, version, number of tokens, CRC-32C of the bytes of the shard's tokens, zeros), then ceil(tokens / 8)
// bytes: bit i % 8 of byte i / 8 is 1 if token i is scored. Without a .mask every token is scored.
#pragma once
#include <bitset>                    // std::bitset
#include <cstdint>                   // int32_t, int64_t, uint8_t, uint16_t, uint32_t
#include <cstring>                   // memcpy
#include <string>                    // std::string
#include <utility>                   // std::move
#include "llmc/not_scored.h"         // not_scored
#include "llmc/utils/crc32c.h"       // crc32c
#include "llmc/utils/error.h"        // user_error
#include "llmc/utils/mapped_file.h"  // MappedFile

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

// Whether the bytes are a whole mask. Mask files begin with two numbers below 50,257 when read as uint16, so that the
// magic number alone does not tell them from headerless tokens.
inline bool is_mask(const void* file, int64_t bytes) {
  if (bytes < mask_header_bytes) return false;
  MaskHeader header;
  memcpy(&header, file, sizeof header);
  return header.magic == mask_magic && header.version == mask_version && header.tokens > 0 &&
         bytes == mask_bytes(header.tokens);
}

// The mask of a shard, mapped into memory. Movable, not copyable. Without a file every token is scored.
struct TokenMask {
  TokenMask() = default;
  // Throws UserError, naming the file, if it is not the mask of a shard of `num_tokens` tokens.
  TokenMask(const std::string& path, int64_t num_tokens) : file_(path), num_tokens_(num_tokens) {
    const char* name = path.c_str();
    if (file_.bytes < mask_header_bytes)
      user_error("%s: truncated: %lld bytes, but a mask's header alone has %lld; make it and its shard again", name,
                 (long long)file_.bytes, (long long)mask_header_bytes);
    const MaskHeader header = this->header();
    if (header.magic != mask_magic)
      user_error("%s: bad magic %d: a mask of tokens begins with %d; make it and its shard again, or move it away",
                 name, header.magic, mask_magic);
    if (header.version != mask_version)
      user_error("%s: is a mask of version %d; only version %d is known", name, header.version, mask_version);
    if (header.tokens != num_tokens)
      user_error("%s: is a mask of %d tokens, but its shard has %lld; make both again", name, header.tokens,
                 (long long)num_tokens);
    if (file_.bytes != mask_bytes(num_tokens))
      user_error("%s: a mask of %lld tokens takes %lld bytes, but the file has %lld; make it and its shard again", name,
                 (long long)num_tokens, (long long)mask_bytes(num_tokens), (long long)file_.bytes);
    bits_ = static_cast<const uint8_t*>(file_.data()) + mask_header_bytes;
  }

  bool exists() const { return bits_ != nullptr; }
  bool is_scored(int64_t token) const { return !bits_ || (bits_[token / 8] >> token % 8 & 1) != 0; }

  // How many of the tokens begin .. num_tokens - 1 are scored.
  int64_t num_scored(int64_t begin) const {
    int64_t count = 0;
    for (; begin < num_tokens_ && begin % 8 != 0; begin++) count += is_scored(begin);
    for (; begin + 8 <= num_tokens_; begin += 8) count += int64_t(std::bitset<8>(bits_[begin / 8]).count());
    for (; begin < num_tokens_; begin++) count += is_scored(begin);
    return count;
  }

  // The CRC-32C of what has the checksum `before`, followed by the mask's bits.
  uint32_t checksum(uint32_t before) const {
    return exists() ? crc32c(bits_, size_t(file_.bytes - mask_header_bytes), before) : before;
  }

  // Throws UserError if there is a mask, and it was made for other tokens than these (num_tokens). Reads all of them.
  void check_belongs_to(const uint16_t* tokens) const {
    if (exists() && crc32c(tokens, size_t(num_tokens_) * sizeof(uint16_t)) != header().checksum)
      user_error("%s: was made for other tokens than its shard has (another CRC-32C); make both again, or remove the "
                 "mask to score every token",
                 file_.path.c_str());
  }

 private:
  MappedFile file_;
  int64_t num_tokens_ = 0;
  const uint8_t* bits_ = nullptr;  // (ceil(num_tokens / 8))

  MaskHeader header() const {
    MaskHeader header;
    memcpy(&header, file_.data(), sizeof header);
    return header;
  }
};

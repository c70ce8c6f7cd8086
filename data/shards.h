// Token shards in llm.c's format, in a folder DIR that is created complete, by renaming.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>
#include "llmc/text/dataloader.h"
#include "llmc/text/token_mask.h"
#include "llmc/base/files.h"

struct Shard {
  std::string name;  // train_000000.bin
  int64_t tokens = 0;
  uint32_t checksum = 0;                  // CRC-32C of the file
  std::optional<uint32_t> mask_checksum;  // of its mask, train_000000.mask, if it has one
};

constexpr int64_t shard_bytes(int64_t tokens) { return shard_header_bytes + tokens * int64_t(sizeof(uint16_t)); }

// Writes PREFIX_000000.bin, PREFIX_000001.bin, ... of at most `shard_tokens` tokens each into `folder`, and, if the
// tokens come with a mask, PREFIX_000000.mask, ... (llmc/text/token_mask.h). All functions throw UserError, with the
// file and the system's reason, if writing fails.
struct ShardWriter {
  ShardWriter(const std::string& folder, const std::string& prefix, int64_t shard_tokens);

  // Appends tokens (count). scored (count): 1 if the token is scored, 0 if not; null: there is no mask. The first
  // tokens decide whether there is one.
  void add(const uint16_t* tokens, int64_t count, const uint8_t* scored = nullptr);
  void finish();  // completes the last shard

  int64_t total() const { return total_; }                      // tokens
  const std::vector<Shard>& shards() const { return shards_; }  // the complete ones

 private:
  std::string folder_, prefix_;
  int64_t shard_tokens_, in_shard_ = 0, total_ = 0;
  FileDescriptor file_;
  uint32_t checksum_ = 0;  // of the tokens in the file
  std::vector<uint16_t> buffer_;
  bool has_mask_ = false;
  std::vector<uint8_t> mask_;  // of the tokens in the shard, a bit each
  std::vector<Shard> shards_;

  std::string name() const;
  std::string path() const { return folder_ + "/" + name(); }
  [[noreturn]] void fail() const;
  void begin_shard();
  void flush();
  uint32_t write_mask() const;  // returns the CRC-32C of the file
  void finish_shard();
};

// A folder DIR of shards while it is written, under another name. Without publish() nothing is left of it.
struct OutputFolder {
  // Throws UserError if the folder cannot be made.
  explicit OutputFolder(const std::string& path);

  const std::string& path() const { return folder_.unfinished(); }
  // Gives it the name DIR, or where that is a link, of what it leads to, durably. An existing DIR is deleted. Throws
  // UserError if that holds files of other programs.
  void publish();

 private:
  std::string path_;
  NewFolder folder_;
};

// Whether DIR exists and holds shards. Throws UserError if it holds other files: only shards are ever replaced.
bool shards_exist(const std::string& folder);

// What MANIFEST.json says of the shards.
nlohmann::ordered_json shards_of(std::initializer_list<const ShardWriter*> writers);

// Whether a file has the size and the checksum that a manifest states. Standard input, "-", is read to its end.
bool is_as_stated(const std::string& path, const nlohmann::ordered_json& bytes, const nlohmann::ordered_json& crc32c);

// The path of the first shard in a folder that is not as shards_of says; "" if there is none.
std::string damaged_shard(const std::string& folder, const nlohmann::ordered_json& shards);

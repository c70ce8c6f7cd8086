// Token shards in llm.c's format, in a folder DIR that is created complete, by renaming. An interrupted run leaves
// DIR.tmp for the next one: the complete shards, incomplete ones (*.part), and PROGRESS.json, the position up to which
// they are written.
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

// The CRC-32C of a file's bytes from `begin` to `end`; none if it cannot be read, or is shorter.
std::optional<uint32_t> checksum_of_file(const std::string& path, int64_t begin, int64_t end);

// Writes PREFIX_000000.bin, PREFIX_000001.bin, ... of at most `shard_tokens` tokens each into `folder`, and, if the
// tokens come with a mask, PREFIX_000000.mask, ... (llmc/text/token_mask.h). A shard that is complete has its mask. All
// functions throw UserError, with the file and the system's reason, if writing fails.
struct ShardWriter {
  ShardWriter(const std::string& folder, const std::string& prefix, int64_t shard_tokens);

  // Appends tokens (count). scored (count): 1 if the token is scored, 0 if not; null: there is no mask. The first
  // tokens decide whether there is one.
  void add(const uint16_t* tokens, int64_t count, const uint8_t* scored = nullptr);
  void finish();  // completes the last shard

  int64_t total() const { return total_; }                      // tokens
  const std::vector<Shard>& shards() const { return shards_; }  // the complete ones

  // The state from which resume() of another writer continues. Everything added so far is on disk when it returns.
  nlohmann::ordered_json state();
  // Continues after `state`. Verifies the checksums of the shards in it, and truncates what was written later. Returns
  // false, and the writer is of no use, if a file is missing or differs.
  bool resume(const nlohmann::ordered_json& state);

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
  std::string part_path() const { return path() + ".part"; }
  std::string mask_path() const { return mask_path_of(path()); }
  std::string mask_part_path() const { return mask_path() + ".part"; }
  [[noreturn]] void fail() const;
  void begin_shard();
  void flush();
  uint32_t write_mask() const;  // returns the CRC-32C of the file
  void finish_shard();
  bool resume_mask(const nlohmann::ordered_json& state);
};

// DIR.tmp, locked while the object exists, so that a folder that a killed run has left can be told from one that
// another run is writing. The destructor keeps it if it has a PROGRESS.json, and removes it otherwise, unless publish()
// has renamed it to DIR. The constructor throws UserError if another run has the lock, or the folder cannot be created
// or holds other files than shards.
struct OutputFolder {
  explicit OutputFolder(const std::string& final_path);
  ~OutputFolder();
  OutputFolder(const OutputFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string progress_path() const { return path_ + "/PROGRESS.json"; }
  void clear();  // removes the files of an earlier run
  // Renames DIR.tmp to DIR, durably. An existing DIR, which holds only files of this program, is deleted.
  void publish();

 private:
  std::string final_, path_;
  FileDescriptor lock_;
  bool published_ = false;
};

// Whether DIR exists and holds shards. Throws UserError if it holds other files, too: only shards are ever replaced.
bool shards_exist(const std::string& folder);

// Token shards in llm.c's format, in a folder that appears as a whole when everything is in it; and what an interrupted run leaves for the
// next one: DIR.tmp with the shards that are complete, those that are not (*.part), and PROGRESS.json, which says how far they go.
#pragma once
#include <cstdint>            // int64_t, uint16_t, uint32_t
#include <nlohmann/json.hpp>  // nlohmann::ordered_json
#include <string>             // std::string
#include <vector>             // std::vector

struct Shard {
  std::string name;       // train_000000.bin
  int64_t tokens = 0;
  uint32_t checksum = 0;  // CRC-32C of the file
};

// PREFIX_000000.bin, PREFIX_000001.bin, ... of at most `shard_tokens` tokens each. Throws UserError with the system's reason.
struct ShardWriter {
  ShardWriter(const std::string& folder, const std::string& prefix, int64_t shard_tokens);
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;

  void add(const uint16_t* tokens, int64_t count);
  void finish();  // completes the last shard

  int64_t total() const { return total_; }                   // tokens
  const std::vector<Shard>& shards() const { return shards_; }  // those that are complete

  // What is written is on disk when this returns, and go_on() of another writer goes on behind it.
  nlohmann::ordered_json state();
  // Reads and checks what `state` says is there, and cuts off what came behind it. False if something differs.
  bool go_on(const nlohmann::ordered_json& state);

 private:
  std::string folder_, prefix_;
  int64_t shard_tokens_, in_shard_ = 0, total_ = 0;
  int fd_ = -1;
  uint32_t checksum_ = 0;  // of the tokens in the file
  std::vector<uint16_t> buffer_;
  std::vector<Shard> shards_;

  std::string name() const;
  std::string part_path() const { return folder_ + "/" + name() + ".part"; }
  [[noreturn]] void fail() const;
  void begin_shard();
  void flush();
  void finish_shard();
};

// DIR.tmp, ours alone: locked while we live, so that what a killed run left can be told from what another run is writing. It stays if
// there is a PROGRESS.json in it, and is removed otherwise, unless publish() has made it DIR.
struct OutputFolder {
  explicit OutputFolder(const std::string& final_path);
  ~OutputFolder();
  OutputFolder(const OutputFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string progress_path() const { return path_ + "/PROGRESS.json"; }
  void clear();    // removes what another run left
  void publish();  // DIR.tmp becomes DIR. What stood there, and held nothing but what this program writes, is deleted

 private:
  std::string final_, path_;
  int fd_ = -1;
  bool published_ = false;
};

// Says whether DIR is there already. Throws UserError if something else has the name: nothing but shards is ever replaced.
bool already_there(const std::string& folder);

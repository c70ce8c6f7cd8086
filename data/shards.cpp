#include "shards.h"
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include "llmc/base/crc32c.h"
#include "llmc/base/error.h"
#include "llmc/base/text.h"
#include "source_reader.h"

using json = nlohmann::ordered_json;

// -------------------------------------------------------------------------------------------------------------------
// Shards

ShardWriter::ShardWriter(const std::string& folder, const std::string& prefix, int64_t shard_tokens)
    : folder_(folder), prefix_(prefix), shard_tokens_(shard_tokens) {}

// Appends `count` bits, each a 0 or 1 of `values`, to the first `size` bits of `bits`; those after them stay 0.
static void append_bits(std::vector<uint8_t>& bits, int64_t size, const uint8_t* values, int64_t count) {
  bits.resize(size_t(size + count + 7) / 8);
  for (int64_t i = 0; i < count; i++) bits[(size + i) / 8] |= uint8_t((values[i] != 0) << (size + i) % 8);
}

std::string ShardWriter::name() const { return format("%s_%06zu.bin", prefix_.c_str(), shards_.size()); }

void ShardWriter::fail() const { user_error("%s: cannot write: %s", path(), strerror(errno)); }

void ShardWriter::add(const uint16_t* tokens, int64_t count, const uint8_t* scored) {
  if (count > 0 && total_ == 0) has_mask_ = scored != nullptr;
  while (count > 0) {
    CHECK(has_mask_ == (scored != nullptr));
    if (in_shard_ == shard_tokens_) finish_shard();
    if (file_.fd < 0) begin_shard();
    const int64_t n = std::min(count, shard_tokens_ - in_shard_);
    buffer_.insert(buffer_.end(), tokens, tokens + n);
    if (scored) append_bits(mask_, in_shard_, scored, n), scored += n;
    in_shard_ += n, total_ += n;
    tokens += n, count -= n;
    if (buffer_.size() >= 1 << 20) flush();
  }
}

void ShardWriter::finish() {
  if (file_.fd >= 0) finish_shard();
}

// The header comes last, when the number of tokens is known.
void ShardWriter::begin_shard() {
  file_ = FileDescriptor(open(path().c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (file_.fd < 0 || lseek(file_.fd, shard_header_bytes, SEEK_SET) < 0) fail();
  in_shard_ = 0, checksum_ = 0;
  mask_.clear();
}

void ShardWriter::flush() {
  const size_t bytes = buffer_.size() * sizeof(uint16_t);
  checksum_ = crc32c(buffer_.data(), bytes, checksum_);
  if (write_all(file_.fd, buffer_.data(), bytes) != bytes) fail();
  // Starts writing to the disk, so that fsync has less to wait for. It is only a hint.
  sync_file_range(file_.fd, 0, 0, SYNC_FILE_RANGE_WRITE);
  buffer_.clear();
}

// The tokens have been flushed.
uint32_t ShardWriter::write_mask() const {
  int32_t header[mask_header_ints] = {mask_magic, mask_version, int32_t(in_shard_)};
  memcpy(&header[3], &checksum_, sizeof checksum_);
  std::string file(reinterpret_cast<const char*>(header), sizeof header);
  file.append(reinterpret_cast<const char*>(mask_.data()), mask_.size());
  write_file_in_unfinished_folder(mask_path_of(path()), file);
  return crc32c(file.data(), file.size());
}

void ShardWriter::finish_shard() {
  flush();
  const int32_t header[shard_header_ints] = {shard_magic, shard_version, int32_t(in_shard_)};
  if (write_all(file_.fd, header, sizeof header, 0) != sizeof header) fail();
  const uint32_t checksum =
      crc32c_combine(crc32c(header, sizeof header), checksum_, uint64_t(in_shard_) * sizeof(uint16_t));
  const bool synced = fsync(file_.fd) == 0;
  const bool closed = close(std::exchange(file_.fd, -1)) == 0;
  if (!synced || !closed) fail();
  std::optional<uint32_t> mask_checksum;
  if (has_mask_) mask_checksum = write_mask();
  shards_.push_back({name(), in_shard_, checksum, mask_checksum});
  in_shard_ = 0;
}

// -------------------------------------------------------------------------------------------------------------------
// The folder

// Names that this program writes; it replaces no others.
static bool is_ours(const std::string& name) {
  const bool shard = begins_with(name, "train_") || begins_with(name, "val_");
  return name == "MANIFEST.json" || name == "tokenizer.json" ||
         (shard && (ends_with(name, ".bin") || ends_with(name, ".mask")));
}

// `path` with links followed. Throws UserError for . and .., since the finished folder is another one, which takes the
// name: who stands in the old one would not see it.
static std::string with_name(const std::string& path) {
  const std::string name = std::filesystem::path(path).filename();
  if (name == "." || name == "..") user_error("%s: give the folder by its name, as it is made anew", path);
  return followed(path);
}

OutputFolder::OutputFolder(const std::string& path) : path_(with_name(path)), folder_(path_, /*may_exist=*/true) {}

void OutputFolder::publish() {
  shards_exist(path_);  // throws where files of others have come meanwhile
  sync_folder(folder_.unfinished());
  // At once, where the file system can; ~NewFolder then deletes what had the name before.
  if (renameat2(AT_FDCWD, folder_.unfinished().c_str(), AT_FDCWD, path_.c_str(), RENAME_EXCHANGE) == 0)
    return sync_folder(parent_folder(path_));
  const NewFolder old(path_, /*may_exist=*/true);  // deleted at the end; by a later run, if this one is killed
  const bool replaces = rename(path_.c_str(), old.unfinished().c_str()) == 0;
  try {
    folder_.finish();
  } catch (const UserError&) {
    if (replaces) rename(old.unfinished().c_str(), path_.c_str());
    throw;
  }
}

bool shards_exist(const std::string& folder) {
  bool shards = false;
  const std::set<std::string> names = list_folder(folder);
  for (const std::string& name : names) {
    if (!is_ours(name)) user_error("%s: exists and holds %s, which is no shard; choose another --out", folder, name);
    shards |= ends_with(name, ".bin");
  }
  if (!shards && !names.empty())
    user_error("%s: exists and holds %s, but no shard; choose another --out", folder, *names.begin());
  return shards;
}

// -------------------------------------------------------------------------------------------------------------------
// MANIFEST.json

json shards_of(std::initializer_list<const ShardWriter*> writers) {
  json shards = json::array();
  for (const ShardWriter* writer : writers)
    for (const Shard& shard : writer->shards()) {
      shards.push_back({{"name", shard.name}, {"tokens", shard.tokens}, {"crc32c", crc32c_hex(shard.checksum)}});
      if (shard.mask_checksum) shards.back()["mask_crc32c"] = crc32c_hex(*shard.mask_checksum);
    }
  return shards;
}

bool is_as_stated(const std::string& path, const json& bytes, const json& crc32c) {
  struct stat info;
  if (path != "-" && (stat(path.c_str(), &info) != 0 || bytes != info.st_size)) return false;
  SourceReader reader;
  reader.fd = path == "-" ? STDIN_FILENO : open(path.c_str(), O_RDONLY | O_CLOEXEC);
  std::vector<char> block(1 << 20);
  while (reader.read(block.data(), block.size()) > 0) continue;
  if (reader.error == EINTR) user_error("interrupted");
  return reader.error == 0 && crc32c == crc32c_hex(reader.checksum);
}

std::string damaged_shard(const std::string& folder, const json& shards) {
  for (const json& shard : shards) {
    const std::string path = folder + "/" + shard.at("name").get<std::string>();
    const int64_t tokens = shard.at("tokens");
    if (!is_as_stated(path, shard_bytes(tokens), shard.at("crc32c")) ||
        (shard.contains("mask_crc32c") && !is_as_stated(mask_path_of(path), mask_bytes(tokens), shard["mask_crc32c"])))
      return path;
  }
  return "";
}

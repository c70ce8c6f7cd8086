#include "shards.h"
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include "llmc/base/crc32c.h"
#include "llmc/base/error.h"
#include "llmc/base/text.h"

using json = nlohmann::ordered_json;

// -------------------------------------------------------------------------------------------------------------------
// Shards

std::optional<uint32_t> checksum_of_file(const std::string& path, int64_t begin, int64_t end) {
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.fd < 0) return std::nullopt;
  std::vector<char> block(1 << 20);
  uint32_t checksum = 0;
  while (begin < end) {
    const ssize_t n = pread(file.fd, block.data(), size_t(std::min(end - begin, int64_t(block.size()))), begin);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return std::nullopt;
    checksum = crc32c(block.data(), n, checksum);
    begin += n;
  }
  return checksum;
}

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
  file_ = FileDescriptor(open(part_path().c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
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

// Writes the mask of the tokens so far, all of them flushed, as the part's.
uint32_t ShardWriter::write_mask() const {
  int32_t header[mask_header_ints] = {mask_magic, mask_version, int32_t(in_shard_)};
  memcpy(&header[3], &checksum_, sizeof checksum_);
  std::string file(reinterpret_cast<const char*>(header), sizeof header);
  file.append(reinterpret_cast<const char*>(mask_.data()), mask_.size());
  write_file_durably(mask_part_path(), file);
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
  if (has_mask_) {
    mask_checksum = write_mask();
    rename_durably(mask_part_path(), mask_path());
  }
  rename_durably(part_path(), path());
  shards_.push_back({name(), in_shard_, checksum, mask_checksum});
  in_shard_ = 0;
}

json ShardWriter::state() {
  json state = {{"complete", json::array()}, {"has_mask", has_mask_}, {"part_tokens", in_shard_}, {"part_crc32c", 0}};
  for (const Shard& shard : shards_) {
    json& entry = state["complete"].emplace_back(
        json{{"name", shard.name}, {"tokens", shard.tokens}, {"crc32c", shard.checksum}});
    if (shard.mask_checksum) entry["mask_crc32c"] = *shard.mask_checksum;
  }
  if (file_.fd < 0) return state;
  flush();
  if (fsync(file_.fd) != 0) fail();
  state["part_crc32c"] = checksum_;
  if (has_mask_) {
    write_mask();
    state["part_mask_crc32c"] = crc32c(mask_.data(), mask_.size());
  }
  return state;
}

bool ShardWriter::resume(const json& state) {
  has_mask_ = state.at("has_mask");
  for (const json& shard : state.at("complete")) {
    shards_.push_back({shard.at("name"), shard.at("tokens"), shard.at("crc32c"), std::nullopt});
    Shard& s = shards_.back();
    const std::string path = folder_ + "/" + s.name;
    if (checksum_of_file(path, 0, shard_bytes(s.tokens)) != s.checksum) return false;
    total_ += s.tokens;
    if (!has_mask_) continue;
    s.mask_checksum = shard.at("mask_crc32c").get<uint32_t>();
    if (checksum_of_file(mask_path_of(path), 0, mask_bytes(s.tokens)) != s.mask_checksum) return false;
  }
  in_shard_ = state.at("part_tokens");
  if (in_shard_ == 0) return true;
  total_ += in_shard_;
  checksum_ = state.at("part_crc32c");
  rename(path().c_str(), part_path().c_str());  // if it was completed after state()
  if (checksum_of_file(part_path(), shard_header_bytes, shard_bytes(in_shard_)) != checksum_) return false;
  if (has_mask_ && !resume_mask(state)) return false;
  file_ = FileDescriptor(open(part_path().c_str(), O_WRONLY | O_CLOEXEC));
  if (file_.fd < 0 || ftruncate(file_.fd, shard_bytes(in_shard_)) != 0 || lseek(file_.fd, 0, SEEK_END) < 0) fail();
  return true;
}

// Reads the bits of the tokens in the part. After state() the file may have been written again, with more of them.
bool ShardWriter::resume_mask(const json& state) {
  rename(mask_path().c_str(), mask_part_path().c_str());  // if it was completed after state()
  const std::optional<std::string> file = try_read_file(mask_part_path(), most_text_bytes);
  if (!file || int64_t(file->size()) < mask_bytes(in_shard_)) return false;
  mask_.assign(file->begin() + mask_header_bytes, file->begin() + mask_bytes(in_shard_));
  if (in_shard_ % 8 != 0) mask_.back() &= uint8_t((1 << in_shard_ % 8) - 1);
  return crc32c(mask_.data(), mask_.size()) == state.at("part_mask_crc32c");
}

// -------------------------------------------------------------------------------------------------------------------
// The folder

// Names that this program writes; it deletes no others.
static bool is_ours(const std::string& name) {
  const bool shard = begins_with(name, "train_") || begins_with(name, "val_");
  const std::string file = is_unfinished_output(name) ? name.substr(0, name.rfind(".tmp.")) : name;
  for (const char* end : {".bin", ".bin.part", ".mask", ".mask.part"})
    if (shard && ends_with(file, end)) return true;
  return file == "MANIFEST.json" || file == "tokenizer.json" || file == "PROGRESS.json";
}

// Deletes this program's files in a folder, and the folder if it is then empty. Ignores errors.
static void remove_shard_folder(const std::string& folder) noexcept {
  try {
    unlink((folder + "/PROGRESS.json").c_str());  // first: it must not describe files that are deleted
    for (const std::string& name : list_folder(folder))
      if (is_ours(name)) unlink((folder + "/" + name).c_str());
  } catch (const std::exception&) {}
  rmdir(folder.c_str());
}

OutputFolder::OutputFolder(const std::string& final_path) : final_(final_path), path_(final_path + ".tmp") {
  for (;;) {
    if (mkdir(path_.c_str(), 0777) != 0 && errno != EEXIST)
      user_error("%s: cannot create the folder: %s; --out needs a writable parent folder", path_, strerror(errno));
    lock_ = FileDescriptor(open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (lock_.fd < 0 && errno == ENOENT) continue;  // another run has just renamed it
    if (lock_.fd < 0) user_error("%s: cannot open the folder: %s; move it away", path_, strerror(errno));
    if (flock(lock_.fd, LOCK_EX | LOCK_NB) != 0)
      user_error("%s: another run is writing it; wait until that has finished", final_);
    struct stat named, locked;  // it may have been renamed between open and flock
    if (stat(path_.c_str(), &named) == 0 && fstat(lock_.fd, &locked) == 0 && named.st_ino == locked.st_ino) break;
  }
  for (const std::string& name : list_folder(path_)) {
    if (!is_ours(name)) user_error("%s: exists and holds %s, which is no shard; move it away", path_, name);
    if (is_unfinished_output(name)) unlink((path_ + "/" + name).c_str());  // of a run that was killed
  }
}

OutputFolder::~OutputFolder() {
  struct stat info;
  if (!published_ && stat(progress_path().c_str(), &info) != 0) remove_shard_folder(path_);
}

void OutputFolder::clear() {
  unlink(progress_path().c_str());
  for (const std::string& name : list_folder(path_))
    if (unlink((path_ + "/" + name).c_str()) != 0) user_error("%s/%s: cannot delete: %s", path_, name, strerror(errno));
}

void OutputFolder::publish() {
  unlink(progress_path().c_str());
  sync_folder(path_);
  const std::string old = final_ + ".old";
  remove_shard_folder(old);  // from a run that was killed during the next lines
  const bool replaces = rename(final_.c_str(), old.c_str()) == 0;
  if (rename(path_.c_str(), final_.c_str()) != 0) {
    const int error = errno;
    if (replaces) rename(old.c_str(), final_.c_str());
    user_error("%s: cannot rename to %s: %s", path_, final_, strerror(error));
  }
  published_ = true;
  sync_folder(parent_folder(final_));
  if (replaces) remove_shard_folder(old);
}

bool shards_exist(const std::string& folder) {
  bool shards = false;
  for (const std::string& name : list_folder(folder)) {
    if (!is_ours(name)) user_error("%s: exists and holds %s, which is no shard; choose another --out", folder, name);
    shards = true;
  }
  return shards;
}

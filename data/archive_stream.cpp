#include "archive_stream.h"
#include <archive.h>
#include <archive_entry.h>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include "llmc/utils/error.h"
#include "llmc/utils/utf8.h"
#include "source_reader.h"

constexpr size_t tar_block = 512;  // bytes of a tar header
constexpr size_t input_bytes = 1 << 18;

struct FreeArchive {
  void operator()(archive* a) const { archive_read_free(a); }
};
using Archive = std::unique_ptr<archive, FreeArchive>;

// One file. Bytes come from the disk or from the archive one level up, are decompressed by `unpacked`, and, if the file
// is a tar file, are parsed by `entries`.
struct ArchiveStream::Level {
  std::string name;
  Level* outer = nullptr;  // nullptr: it is a source, read by `source`
  SourceReader source;
  Archive unpacked, entries;
  std::vector<char> input, unpacked_input;
  char head[tar_block];  // the first bytes, decompressed, by which tar files are detected
  size_t head_bytes = 0, head_given = 0;
  bool at_end = false;  // of the decompressed file

  ~Level() {
    entries.reset();
    unpacked.reset();
  }

  [[noreturn]] void fail(archive* a) const {
    for (const Level* level = this; level; level = level->outer)
      if (level->source.error) user_error("%s: cannot read: %s", level->name.c_str(), strerror(level->source.error));
    const char* why = archive_error_string(a);
    user_error("%s: is damaged or cut short: %s; fetch it again or leave it out", name.c_str(),
               why ? why : "unknown error");
  }

  // Reads bytes before decompression. -1 on error.
  ssize_t read_outer(char* bytes, size_t size) {
    if (outer) return archive_read_data(outer->entries.get(), bytes, size);
    return source.read(bytes, size);
  }
  // Reads decompressed bytes. -1 on error.
  ssize_t read_unpacked(char* bytes, size_t size) {
    if (head_given == head_bytes) {
      const ssize_t n = at_end ? 0 : archive_read_data(unpacked.get(), bytes, size);
      at_end = n == 0;  // reading again would be an error
      return n;
    }
    const size_t n = std::min(size, head_bytes - head_given);
    memcpy(bytes, head + head_given, n);
    head_given += n;
    return ssize_t(n);
  }

  static ssize_t give_outer(archive* a, void* level, const void** bytes) {
    Level& self = *static_cast<Level*>(level);
    const ssize_t n = self.read_outer(self.input.data(), self.input.size());
    if (n < 0 && self.outer) archive_copy_error(a, self.outer->entries.get());
    *bytes = self.input.data();
    return n;
  }
  static ssize_t give_unpacked(archive* a, void* level, const void** bytes) {
    Level& self = *static_cast<Level*>(level);
    const ssize_t n = self.read_unpacked(self.unpacked_input.data(), self.unpacked_input.size());
    if (n < 0) archive_copy_error(a, self.unpacked.get());
    *bytes = self.unpacked_input.data();
    return n;
  }
};

// A tar header holds the sum of its bytes, in octal, at 148; the eight bytes of the sum themselves count as spaces.
static bool is_tar_header(const char* header) {
  long sum = 0;
  for (size_t i = 0; i < tar_block; i++) sum += i >= 148 && i < 156 ? ' ' : uint8_t(header[i]);
  char stated[9] = {0};
  memcpy(stated, header + 148, 8);
  return strtol(stated, nullptr, 8) == sum;
}

ArchiveStream::ArchiveStream(std::vector<SourceFile>& sources, int64_t first) : sources_(sources), source_(first - 1) {}
ArchiveStream::~ArchiveStream() {
  while (!levels_.empty()) levels_.pop_back();  // the innermost first: each has a pointer to the one around it
}

std::string ArchiveStream::name() const { return levels_.back()->name; }
int64_t ArchiveStream::bytes_read() const {
  return bytes_read_ + (levels_.empty() ? 0 : levels_.front()->source.bytes_read);
}

void ArchiveStream::open_level(const std::string& name, int fd) {
  if (levels_.size() == max_nesting)
    user_error("%s: is nested %zu files deep, more than are opened; unpack the outer ones", name.c_str(),
               max_nesting + 1);
  levels_.push_back(std::make_unique<Level>());
  Level& level = *levels_.back();
  level.name = name;
  level.source.fd = fd;
  level.outer = levels_.size() > 1 ? levels_[levels_.size() - 2].get() : nullptr;
  level.input.resize(input_bytes);
  level.unpacked.reset(archive_read_new());
  archive* a = level.unpacked.get();
  archive_read_support_filter_bzip2(a);
  archive_read_support_filter_gzip(a);
  archive_read_support_filter_xz(a);
  archive_read_support_filter_zstd(a);
  archive_read_support_format_raw(a);
  archive_read_support_format_empty(a);
  archive_entry* entry;
  if (archive_read_open(a, &level, nullptr, Level::give_outer, nullptr) < ARCHIVE_WARN) level.fail(a);
  const int opened = archive_read_next_header(a, &entry);
  if (opened < ARCHIVE_WARN) level.fail(a);
  level.at_end = opened == ARCHIVE_EOF;  // an empty file
  if (level.at_end) return;
  const ssize_t got = archive_read_data(a, level.head, tar_block);
  if (got < 0) level.fail(a);
  level.head_bytes = got;
  if (level.head_bytes < tar_block || !is_tar_header(level.head)) return;
  level.unpacked_input.resize(input_bytes);
  level.entries.reset(archive_read_new());
  a = level.entries.get();
  archive_read_support_format_tar(a);
  if (archive_read_open(a, &level, nullptr, Level::give_unpacked, nullptr) < ARCHIVE_WARN) level.fail(a);
}

// Opens the next regular file in the innermost tar file; false at its end.
bool ArchiveStream::next_entry() {
  Level& tar = *levels_.back();
  archive_entry* entry;
  for (;;) {
    const int found = archive_read_next_header(tar.entries.get(), &entry);
    if (found == ARCHIVE_EOF) return false;
    if (found < ARCHIVE_WARN) tar.fail(tar.entries.get());
    if (archive_entry_filetype(entry) != AE_IFREG || archive_entry_hardlink(entry)) continue;
    const char* name = archive_entry_pathname(entry);
    open_level(tar.name + ": " + printable(name ? name : "", /*one_line=*/true), -1);
    return true;
  }
}

// Reads the source to its end: bytes after the end of an archive count for the checksum, too.
void ArchiveStream::finish_source() {
  Level& level = *levels_.front();
  ssize_t n;
  while ((n = level.read_outer(level.input.data(), level.input.size())) > 0) continue;
  if (n < 0) level.fail(level.unpacked.get());
  sources_[source_].checksum = level.source.checksum;
  bytes_read_ += level.source.bytes_read;
  levels_.pop_back();
}

bool ArchiveStream::next_file() {
  for (;;) {
    if (!levels_.empty() && levels_.back()->entries && next_entry()) {
      if (!levels_.back()->entries) return true;
      continue;
    }
    if (levels_.size() > 1) {
      levels_.pop_back();
      continue;
    }
    if (levels_.size() == 1) finish_source();
    source_ = std::min(source_ + 1, int64_t(sources_.size()));
    if (source_ == int64_t(sources_.size())) return false;
    const std::string& path = sources_[source_].path;
    open_level(path, open_source(path));
    if (!levels_.back()->entries) return true;
  }
}

size_t ArchiveStream::read(char* bytes, size_t size) {
  Level& level = *levels_.back();
  size_t got = 0;
  while (got < size) {
    const ssize_t n = level.read_unpacked(bytes + got, size - got);
    if (n < 0) level.fail(level.unpacked.get());
    if (n == 0) break;
    got += n;
  }
  return got;
}

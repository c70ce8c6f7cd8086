#include "archive_stream.h"
#include <archive.h>
#include <archive_entry.h>
#include <algorithm>
#include <cstring>
#include <utility>
#include "llmc/utils/error.h"
#include "llmc/utils/utf8.h"
#include "source_reader.h"

struct FreeArchive {
  void operator()(archive* a) const { archive_read_free(a); }
};

// One file. Bytes come from the disk or from the tar file one level up. libarchive decompresses them, and tells tar
// files from others.
struct ArchiveStream::Level {
  std::string name;
  Level* outer = nullptr;  // nullptr: it is a source, read by `source`
  SourceReader source;
  std::vector<char> input = std::vector<char>(1 << 18);
  ssize_t filled = 0;      // bytes of `input`; -1 after an error
  bool is_unread = false;  // nothing has been taken of `input`
  std::unique_ptr<archive, FreeArchive> unpacked;
  archive_entry* first = nullptr;  // of a tar file, unless it has been taken
  bool is_tar = false, at_end = false;

  [[noreturn]] void fail() const {
    for (const Level* level = this; level; level = level->outer)
      if (level->source.error) user_error("%s: cannot read: %s", level->name, strerror(level->source.error));
    const char* why = archive_error_string(unpacked.get());
    user_error("%s: is damaged or cut short: %s; fetch it again or leave it out", name, why ? why : "unknown error");
  }

  // Fills `input` with the next bytes before decompression. Returns how many; -1 on error.
  ssize_t fill() {
    return filled = outer ? archive_read_data(outer->unpacked.get(), input.data(), input.size())
                          : source.read(input.data(), input.size());
  }
  // libarchive calls it for the next bytes before decompression.
  static ssize_t give(archive* a, void* level, const void** bytes) {
    Level& self = *static_cast<Level*>(level);
    if (!std::exchange(self.is_unread, false)) self.fill();
    if (self.filled < 0 && self.outer) archive_copy_error(a, self.outer->unpacked.get());
    *bytes = self.input.data();
    return self.filled;
  }

  // Of a tar file its next entry, of another one itself; nullptr at the end.
  archive_entry* next_header() {
    archive_entry* entry;
    const int found = archive_read_next_header(unpacked.get(), &entry);
    if (found < ARCHIVE_WARN) fail();
    return found == ARCHIVE_EOF ? nullptr : entry;
  }
  // Reads decompressed bytes. 0 at the end.
  size_t read(char* bytes, size_t size) {
    const ssize_t n = at_end ? 0 : archive_read_data(unpacked.get(), bytes, size);
    if (n < 0) fail();
    at_end = n == 0;  // reading again would be an error
    return size_t(n);
  }
};

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
    user_error("%s: is nested %zu files deep, more than are opened; unpack the outer ones", name, max_nesting + 1);
  levels_.push_back(std::make_unique<Level>());
  Level& level = *levels_.back();
  level.name = name;
  level.source.fd = fd;
  level.outer = levels_.size() > 1 ? levels_[levels_.size() - 2].get() : nullptr;
  level.unpacked.reset(archive_read_new());
  archive* a = level.unpacked.get();
  archive_read_support_filter_bzip2(a);
  archive_read_support_filter_gzip(a);
  archive_read_support_filter_xz(a);
  archive_read_support_filter_zstd(a);
  archive_read_support_format_raw(a);
  archive_read_support_format_empty(a);
  // To libarchive zeros are an empty tar file. What is not compressed is known to be none.
  if (level.fill() > 0 && level.input[0] != '\0') archive_read_support_format_tar(a);
  level.is_unread = true;
  if (archive_read_open(a, &level, nullptr, Level::give, nullptr) < ARCHIVE_WARN) level.fail();
  level.first = level.next_header();
  level.at_end = level.first == nullptr;  // an empty file
  level.is_tar = (archive_format(a) & ARCHIVE_FORMAT_BASE_MASK) == ARCHIVE_FORMAT_TAR;
  if (level.is_tar && level.at_end) user_error("%s: begins with zeros, as an empty tar file does; leave it out", name);
}

// Opens the next regular file in the innermost tar file; false at its end.
bool ArchiveStream::next_entry() {
  Level& tar = *levels_.back();
  for (;;) {
    archive_entry* const entry = tar.first ? std::exchange(tar.first, nullptr) : tar.next_header();
    if (entry == nullptr) return false;
    if (archive_entry_filetype(entry) != AE_IFREG || archive_entry_hardlink(entry)) continue;
    const char* name = archive_entry_pathname(entry);
    open_level(tar.name + ": " + printable(name ? name : "", /*one_line=*/true), -1);
    return true;
  }
}

// Reads the source to its end: bytes after the end of an archive count for the checksum, too.
void ArchiveStream::finish_source() {
  Level& level = *levels_.front();
  while (level.fill() > 0) continue;
  if (level.filled < 0) level.fail();
  sources_[source_].checksum = level.source.checksum;
  bytes_read_ += level.source.bytes_read;
  levels_.pop_back();
}

bool ArchiveStream::next_file() {
  for (;;) {
    if (!levels_.empty() && levels_.back()->is_tar && next_entry()) {
      if (!levels_.back()->is_tar) return true;
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
    if (!levels_.back()->is_tar) return true;
  }
}

size_t ArchiveStream::read(char* bytes, size_t size) {
  size_t got = 0, n = 1;
  for (; got < size && n > 0; got += n) n = levels_.back()->read(bytes + got, size - got);
  return got;
}

// ArchiveStream where libarchive is not installed: plain files only. Compressed files and tar files are errors.
#include <algorithm>
#include <cstring>
#include "archive_stream.h"
#include "llmc/utils/error.h"
#include "llmc/utils/text.h"
#include "source_reader.h"

// A source.
struct ArchiveStream::Level {
  std::string name, head;  // head: its first bytes, which have been read to see what it is, until they are given
  SourceReader source;

  size_t read(char* bytes, size_t size) {
    size_t got = head.copy(bytes, size);
    head.erase(0, got);
    for (ssize_t n = 1; got < size && n > 0; got += size_t(n)) {
      n = source.read(bytes + got, size - got);
      if (n < 0) user_error("%s: cannot read: %s", name, strerror(source.error));
    }
    return got;
  }
};

ArchiveStream::ArchiveStream(std::vector<SourceFile>& sources, int64_t first) : sources_(sources), source_(first - 1) {}
ArchiveStream::~ArchiveStream() = default;

std::string ArchiveStream::name() const { return levels_.front()->name; }
int64_t ArchiveStream::bytes_read() const {
  return bytes_read_ + (levels_.empty() ? 0 : levels_.front()->source.bytes_read);
}

// Whether a file that begins with `head` is compressed by gzip, bzip2, xz or zstd, or is a tar file.
static bool is_packed(const std::string& head) {
  for (const char* magic : {"\x1f\x8b", "BZh", "\3757zXZ", "\x28\xb5\x2f\xfd"})
    if (begins_with(head, magic)) return true;
  return head.size() > 257 && head.compare(257, 5, "ustar") == 0;
}

void ArchiveStream::open_level(const std::string& name, int fd) {
  levels_.push_back(std::make_unique<Level>());
  Level& level = *levels_.back();
  level.name = name;
  level.source.fd = fd;
  std::string head(512, 0);  // of a tar file, the header of its first entry
  head.resize(level.read(head.data(), head.size()));
  if (is_packed(head))
    user_error("%s: is compressed or a tar file, and this program was built without libarchive; unpack it, or install "
               "libarchive-dev and run make again",
               name);
  level.head = head;
}

void ArchiveStream::close_level() {
  const SourceReader& source = levels_.front()->source;
  sources_[source_].checksum = source.checksum;
  bytes_read_ += source.bytes_read;
  levels_.pop_back();
}

bool ArchiveStream::next_file() {
  if (!levels_.empty()) {
    char rest[4096];
    while (levels_.front()->read(rest, sizeof rest) > 0) continue;  // it counts for the checksum
    close_level();
  }
  source_ = std::min(source_ + 1, int64_t(sources_.size()));
  if (source_ == int64_t(sources_.size())) return false;
  const std::string& path = sources_[source_].path;
  open_level(path, open_source(path));
  return true;
}

size_t ArchiveStream::read(char* bytes, size_t size) { return levels_.front()->read(bytes, size); }

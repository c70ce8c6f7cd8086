#include "archive_stream.h"
#include <archive.h>
#include <archive_entry.h>
#include <zlib.h>
#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include "llmc/base/error.h"
#include "llmc/base/text.h"
#include "llmc/base/utf8.h"
#include "source_reader.h"

// What zlib knows of a gzip file. libarchive could decompress it, but checks neither CRC-32 nor length.
struct Gzip {
  z_stream stream = {};
  bool in_member = true;  // a file has one or more, each with its checksum

  Gzip() { CHECK(inflateInit2(&stream, /*gzip=*/15 + 16) == Z_OK); }
  Gzip(const Gzip&) = delete;
  Gzip& operator=(const Gzip&) = delete;
  ~Gzip() { inflateEnd(&stream); }
};

// One file. Bytes come from the disk or from the file one level up, which is a tar file or compressed. zlib and
// libarchive decompress them, and libarchive tells tar files from others.
struct ArchiveStream::Level {
  std::string name;
  Level* outer = nullptr;  // nullptr: it is a source, read by `source`
  SourceReader source;
  std::vector<char> input = std::vector<char>(1 << 18);
  ssize_t filled = 0;      // bytes of `input`; -1 after an error
  int64_t given = 0;       // bytes that libarchive has had; the last of them are in `input`
  ssize_t last_given = 0;  // how many of them `input` has
  bool is_unread = false;  // nothing has been taken of `input`
  std::optional<Gzip> gzip;
  std::unique_ptr<archive, int (*)(archive*)> unpacked{nullptr, archive_read_free};
  archive_entry* first = nullptr;  // of a tar file, unless it has been taken
  bool is_tar = false, is_compressed = false, at_end = false;
  std::string why;  // what is wrong with a gzip file

  std::string error() const {
    const char* of_archive = unpacked ? archive_error_string(unpacked.get()) : nullptr;
    return !why.empty() ? why : of_archive ? of_archive : "unknown error";
  }
  [[noreturn]] void fail() const {
    for (const Level* level = this; level; level = level->outer)
      if (level->source.error) user_error("%s: cannot read: %s", level->name, strerror(level->source.error));
    user_error("%s: is damaged or cut short: %s; fetch it again or leave it out", name, error());
  }

  // Fills `input` with the next bytes before decompression, after the `begin` bytes that are there. Returns how many it
  // has then; -1 on error.
  ssize_t fill(ssize_t begin = 0) {
    const size_t room = input.size() - size_t(begin);
    const ssize_t n = outer ? outer->take(&input[begin], room) : source.read(&input[begin], room);
    if (n < 0 && outer) why = outer->error();
    return filled = n < 0 ? n : begin + n;
  }
  // Fills `input` with as many bytes as it takes to tell formats apart, or with all.
  void fill_head() {
    for (ssize_t before = -1; filled != before && filled < 1024;)
      if (fill(before = filled) < 0) fail();
  }
  ssize_t next_input() { return std::exchange(is_unread, false) ? filled : fill(); }
  // libarchive calls it for the next bytes before decompression.
  static ssize_t give(archive* a, void* level, const void** bytes) {
    Level& self = *static_cast<Level*>(level);
    if (self.next_input() < 0) archive_set_error(a, EIO, "%s", self.why.c_str());
    if (self.filled > 0) self.given += self.filled, self.last_given = self.filled;
    *bytes = self.input.data();
    return self.filled;
  }

  // bytes (size) = the next ones of what the file holds. Returns their number, 0 at the end; -1 on error.
  ssize_t take(char* bytes, size_t size) {
    if (at_end) return 0;  // reading again would be an error
    const ssize_t n = gzip ? inflate_gzip(bytes, size) : archive_read_data(unpacked.get(), bytes, size);
    at_end = n == 0 && !is_tar;  // after a file in a tar file others follow
    return n;
  }
  ssize_t inflate_gzip(char* bytes, size_t size) {
    z_stream& s = gzip->stream;
    s.next_out = reinterpret_cast<Bytef*>(bytes), s.avail_out = uInt(size);
    while (s.avail_out == size) {
      if (s.avail_in == 0) {
        if (next_input() < 0) return -1;
        if (filled == 0 && gzip->in_member) return why = "its end is missing", -1;
        if (filled == 0) return 0;
        s.next_in = reinterpret_cast<Bytef*>(input.data()), s.avail_in = uInt(filled);
      }
      if (!gzip->in_member && *s.next_in == 0) {  // files are padded with zeros
        s.next_in++, s.avail_in--;
        continue;
      }
      if (!std::exchange(gzip->in_member, true)) inflateReset(&s);
      const int status = inflate(&s, Z_NO_FLUSH);
      if (status != Z_OK && status != Z_STREAM_END) return why = s.msg ? s.msg : "no bytes of gzip", -1;
      gzip->in_member = status != Z_STREAM_END;
    }
    return ssize_t(size - s.avail_out);
  }

  // Opens the file, whose first `head` bytes are in `input`, as one that is compressed, or as a tar file or one that is
  // neither. Throws UserError.
  void open(bool compressed, ssize_t head) {
    filled = head, given = 0, is_unread = true;
    unpacked.reset(archive_read_new());
    archive* a = unpacked.get();
    archive_read_support_format_raw(a);
    archive_read_support_format_empty(a);
    if (compressed) {
      archive_read_support_filter_bzip2(a);
      archive_read_support_filter_xz(a);
      archive_read_support_filter_zstd(a);
    } else if (filled > 0 && input[0] != '\0') {
      archive_read_support_format_tar(a);  // to libarchive zeros are an empty one
    }
    if (archive_read_open(a, this, nullptr, give, nullptr) < ARCHIVE_WARN) fail();
    first = next_header();
    at_end = first == nullptr;  // an empty file
    is_tar = (archive_format(a) & ARCHIVE_FORMAT_BASE_MASK) == ARCHIVE_FORMAT_TAR;
    is_compressed = archive_filter_count(a) > 1;
  }
  // The next entry of a tar file, or the file itself if it is no tar file; nullptr at the end.
  archive_entry* next_header() {
    archive_entry* entry;
    const int found = archive_read_next_header(unpacked.get(), &entry);
    if (found < ARCHIVE_WARN) fail();
    return found == ARCHIVE_EOF ? nullptr : entry;
  }
  // Reads the rest of a compressed file, because its checksum is at its end. Bytes that libarchive ignores after that,
  // or after a tar file, are damage, but for zeros, with which files are padded.
  void finish() {
    std::vector<char> rest(1 << 16);
    while (!is_tar && read(rest.data(), rest.size()) > 0) continue;
    if (gzip) return;
    const int64_t unused = std::min<int64_t>(last_given, given - archive_filter_bytes(unpacked.get(), -1));
    std::string_view bytes(input.data() + last_given - unused, size_t(unused));
    while (bytes.find_first_not_of('\0') == std::string_view::npos) {
      if (fill() < 0) fail();
      if (filled == 0) return;
      bytes = {input.data(), size_t(filled)};
    }
    why = "it goes on after its end", fail();
  }
  // Reads decompressed bytes. 0 at the end.
  size_t read(char* bytes, size_t size) {
    const ssize_t n = take(bytes, size);
    if (n < 0) fail();
    return size_t(n);
  }
};

ArchiveStream::ArchiveStream(std::vector<SourceFile>& sources) : sources_(sources) {}
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
  level.fill_head();
  const ssize_t head = level.filled;
  level.is_compressed = level.is_unread = head >= 10 && begins_with({level.input.data(), 10}, "\x1f\x8b\x08");
  if (level.is_compressed) level.gzip.emplace();
  else level.open(/*compressed=*/true, head);
  if (level.is_compressed) return open_level(name, -1);
  level.open(/*compressed=*/false, head);
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

// Closes the innermost file. A source is read to its end: bytes after an archive's end count for the checksum.
void ArchiveStream::close_level() {
  Level& level = *levels_.back();
  if (level.is_compressed || level.is_tar) level.finish();
  if (levels_.size() == 1) {
    while (level.fill() > 0) continue;
    if (level.filled < 0) level.fail();
    sources_[source_].checksum = level.source.checksum;
    bytes_read_ += level.source.bytes_read;
  }
  levels_.pop_back();
}

bool ArchiveStream::next_file() {
  for (;;) {
    if (!levels_.empty() && levels_.back()->is_tar && next_entry()) {
      if (!levels_.back()->is_tar) return true;
      continue;
    }
    if (!levels_.empty()) close_level();
    if (!levels_.empty()) continue;
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

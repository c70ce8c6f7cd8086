// Files as streams of bytes: decompressed, and of tar files the files in them, also nested. Nothing is written to disk,
// and names in archives are used only in messages.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// Levels of files in files; a compressed file has two. Deeper nesting is an error: there are archives that contain
// themselves.
constexpr size_t max_nesting = 16;

struct SourceFile {
  std::string path;       // "-" for standard input
  int64_t bytes = 0;      // size on disk; of standard input 0
  uint32_t checksum = 0;  // CRC-32C of the file on disk, once it has been read to its end
  bool is_named = false;  // by the user, rather than found in a folder
};

// The files in `sources`, one after the other. Compression by gzip, bzip2, xz or zstd, and tar files are detected by
// content. All functions throw UserError, naming the source and the file in it, for a
// file that cannot be read, is damaged or truncated, or is nested too deep. Sets the checksum of each source when it
// has been read.
struct ArchiveStream {
  explicit ArchiveStream(std::vector<SourceFile>& sources);
  ~ArchiveStream();

  // Advances to the next file that is no archive; false if there is none.
  bool next_file();
  // bytes (size) = the next bytes of that file. Returns their number: less than `size` only at its end.
  size_t read(char* bytes, size_t size);

  std::string name() const;  // "corpus.tar.xz: a/b.txt"
  bool is_named() const { return sources_[source_].is_named && name() == sources_[source_].path; }  // and not in a tar
  int64_t bytes_read() const;  // of the sources, on disk

 private:
  struct Level;
  std::vector<SourceFile>& sources_;
  int64_t source_ = -1;                         // the index of the source that is the file or contains it
  int64_t bytes_read_ = 0;                      // of those before source_
  std::vector<std::unique_ptr<Level>> levels_;  // the source, a file in it or it unpacked, and so on

  void open_level(const std::string& name, int fd);
  bool next_entry();
  void close_level();
};

// Files as streams of bytes: decompressed, and where they are tar files, the files in them, however nested. Nothing is written to disk,
// and names inside archives are used in messages alone.
#pragma once
#include <cstddef>  // size_t
#include <cstdint>  // int64_t, uint32_t
#include <memory>   // std::unique_ptr
#include <string>   // std::string
#include <vector>   // std::vector

// A file that is in a file counts one deeper. Beyond this it is an error: files are known that contain themselves.
constexpr size_t deepest_nesting = 8;

struct SourceFile {
  std::string path;        // "-" for standard input
  int64_t bytes = 0;       // as it is on disk; of standard input 0
  int64_t mtime_ns = 0;
  uint32_t checksum = 0;   // CRC-32C of the file as it is, once it was read to its end
};

// The files in `sources`, one after the other, from sources[first] on. Compressed by gzip, bzip2, xz or zstd, and tar, are told by content. Throws
// UserError, naming the file and what in it, for what cannot be read, is damaged, cut short, or nested too deep.
struct ArchiveStream {
  ArchiveStream(std::vector<SourceFile>& sources, int64_t first);
  ~ArchiveStream();

  // Moves on to the next file that is no archive; false if there is none.
  bool next_file();
  // Reads from it. Returns fewer than `size` bytes at its end alone; 0 where nothing is left.
  size_t read(char* bytes, size_t size);

  int64_t source() const { return source_; }          // the index of the source that the file is or is in
  std::string name() const;                           // "corpus.tar.xz: a/b.txt"
  int64_t bytes_read() const;                         // of the sources, as they are on disk

 private:
  struct Level;
  std::vector<SourceFile>& sources_;
  int64_t source_;
  int64_t bytes_read_ = 0;                      // of those before source_
  std::vector<std::unique_ptr<Level>> levels_;  // the source, a file in it, a file in that, and so on

  void open_level(const std::string& name, int fd);
  bool next_entry();
  void finish_source();
};

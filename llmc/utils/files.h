// Files: reading and writing them whole, and writes that survive a crash.
#pragma once
#include <cstddef>   // size_t
#include <cstdint>   // int32_t, int64_t
#include <optional>  // std::optional
#include <set>       // std::set
#include <string>    // std::string
#include <utility>   // std::exchange, std::swap

// An open file descriptor, closed when the object is destroyed. -1: none.
struct FileDescriptor {
  int fd = -1;

  FileDescriptor() = default;
  explicit FileDescriptor(int descriptor) : fd(descriptor) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd(std::exchange(other.fd, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd, other.fd);
    return *this;
  }
  ~FileDescriptor();
};

// The bytes of a file. Throws UserError with the path and the system's reason if it cannot be read.
std::string read_whole_file(const std::string& path);
// The same, but nullopt, with the reason in errno, where the file does not exist or cannot be read.
std::optional<std::string> try_read_file(const std::string& path);

// The integer that a file begins with, in this machine's order of bytes; 0 if it has none or cannot be read.
int32_t magic_number_of(const std::string& path);

// A small file of text in a folder.
struct TextFile {
  std::string name, text;
};

// The names in a folder, without "." and ".."; none if the folder does not exist. Throws UserError if it cannot be
// listed.
std::set<std::string> list_folder(const std::string& folder);

// Writes `count` bytes at byte `offset` of the file, or at its current position if `offset` is -1, retrying interrupted
// and partial writes. Returns how many bytes were written; fewer than `count` only after an error, which errno tells
// (ENOSPC for a write that made no progress and gave no reason).
size_t write_all(int fd, const void* bytes, size_t count, int64_t offset = -1);

// Writes `text` to the file, replacing what it held, fsyncs and closes it. Throws UserError with the path and the
// system's reason.
void write_file_durably(const std::string& path, const std::string& text);

// fsyncs a folder, so that files created, renamed or removed in it stay so after a crash. Throws UserError.
void sync_folder(const std::string& path);

// The folder that a path lies in: "a" of "a/b", and "." of "b".
std::string parent_folder(const std::string& path);

// mkdir -p. Throws UserError.
void make_folders(const std::string& path);

// Renames `temporary` to `path` in one atomic step that is on disk when the call returns. A file replaces a file of
// that name; for a folder the name must be free. Throws UserError.
void rename_durably(const std::string& temporary, const std::string& path);

// A file that is written from front to back, as PATH.tmp, and gets its name when it is complete and on the disk.
struct NewFile {
  // Throws UserError if something of that name exists, or the file cannot be made.
  explicit NewFile(const std::string& path);
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile();  // without finish() nothing is left

  void write(const void* bytes, size_t count);  // throws UserError
  void finish();                                // likewise

 private:
  std::string path_, temporary_;
  FileDescriptor file_;
  [[noreturn]] void fail() const;
};

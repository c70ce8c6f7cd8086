// Files: reading and writing them whole, and writes that survive a crash.
#pragma once
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

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

// Whether there is something, or a folder, of that name; links are followed. Throws UserError with the path and the
// system's reason if that cannot be found out: in a folder without permission, for names that are too long, and for
// links that lead nowhere or in a circle.
bool path_exists(const std::string& path);
bool is_folder(const std::string& path);

// The files that a name stands for, in order: the one of exactly that name, or those that a glob pattern matches; none
// if there are none. A folder of exactly the name that a pattern begins with is taken, even if that has *, ? or [ in
// it.
std::vector<std::string> matching_files(const std::string& pattern);

// The most bytes of a file that is read whole: a file that a model's folder has beside tensors, such as config.json and
// tokenizer.json; and a file that grows with a run or holds texts, such as its log.
constexpr int64_t most_small_bytes = int64_t(64) << 20, most_text_bytes = int64_t(4) << 30;

// What a file that is read whole may be, at the end of links. A pipe or a device may never end or have a byte, so that
// only what a user has named to be read as a stream can be one.
enum class FileKind { regular, any };

// The bytes of a file. Throws UserError with the path and the system's reason if it cannot be read, is of another kind,
// has more than `most` bytes, or is what Git has in place of a large file.
std::string read_whole_file(const std::string& path, int64_t most = most_small_bytes,
                            FileKind kind = FileKind::regular);
// As read_whole_file, but nullopt, with the reason in errno, if it does not exist or cannot be read.
std::optional<std::string> try_read_file(const std::string& path, int64_t most = most_small_bytes,
                                         FileKind kind = FileKind::regular);

// Throws UserError if a file begins with these bytes and is a pointer of Git LFS: what a clone has in place of a large
// file until that is fetched.
void refuse_lfs_pointer(const std::string& path, const void* bytes, size_t count);

// The integer that a file begins with, in this machine's order of bytes; 0 if it has none or cannot be read.
int32_t magic_number_of(const std::string& path);

// A small file of text in a folder.
struct TextFile {
  std::string name, text;
};

// The names in a folder, without "." and ".."; none if the folder does not exist. Throws UserError if it cannot be
// listed.
std::set<std::string> list_folder(const std::string& folder);

// The kernel's lock of one process on a whole file; it ends with the process, however that ends. NFS servers
// pass such locks on to other machines. Without locks a file system gives `unsupported`, and the reason in errno.
enum class FileLock { taken, held_by_another, unsupported };
FileLock lock_file(int fd);

// Set by the signals of interrupt_by_signals. Writing to files throws UserError then, so that what is unfinished is
// removed; what takes long before it writes asks by itself.
inline volatile sig_atomic_t interrupted = 0;
// SIGINT, SIGTERM and SIGHUP set `interrupted` from now on, unless they are ignored.
void interrupt_by_signals();
// Whether the parent process has set a signal to be ignored, as nohup does SIGHUP, and a shell SIGINT for its
// background jobs. It stays so.
bool is_ignored(int signal);

// Writes `count` bytes at byte `offset` of the file, or at its current position if `offset` is -1, retrying interrupted
// and partial writes. Returns how many bytes were written; fewer than `count` only after an error, which errno tells
// (ENOSPC for a write that made no progress and gave no reason).
size_t write_all(int fd, const void* bytes, size_t count, int64_t offset = -1);

// Throws UserError unless OutputFile can replace or make this file, and if it would replace one of `others`, which the
// program reads or writes. To be called before the work whose result is to be written.
void check_output(const std::string& path, const std::vector<std::string>& others);

// Writes the file through OutputFile, replacing what is there. Throws UserError with the path and the system's reason.
void write_file_durably(const std::string& path, const std::string& text);

// Writes and fsyncs a file of a folder that is unfinished itself, so that nobody takes the file for complete before the
// folder has its name. Throws UserError with the path and the system's reason.
void write_file_in_unfinished_folder(const std::string& path, const std::string& text);

// fsyncs a folder, so that files created, renamed or removed in it stay so after a crash. Throws UserError.
void sync_folder(const std::string& path);

// The folder that a path lies in: "a" of "a/b", and "." of "b".
std::string parent_folder(const std::string& path);

// What a path leads to, if it is a link; else the path. Throws UserError for a link that leads nowhere.
std::string followed(const std::string& path);

// mkdir -p. Throws UserError.
void make_folders(const std::string& path);

// Renames `temporary` to `path` in one atomic step that is on disk when the call returns. A file replaces a file of
// that name; for a folder the name must be free. Throws UserError.
void rename_durably(const std::string& temporary, const std::string& path);

// Renames a file NAME.EXT, if it exists, to the first of NAME.1.EXT, NAME.2.EXT, ... that does not. Throws UserError.
void set_aside(const std::string& path);

// Throws UserError if something of that name exists: a link that leads nowhere, too.
void check_free_name(const std::string& path);

// A file or folder that is made under a name of its own, PATH.tmp.PROCESS.NUMBER, and gets the name PATH when it is
// complete and on the disk. What killed processes left of other attempts is removed.
struct UnfinishedOutput {
  ~UnfinishedOutput();  // without finish() nothing is left
  void finish();        // throws UserError

 protected:
  std::string path_, temporary_;  // temporary_ "": written to as it is
  FileDescriptor file_;
  explicit UnfinishedOutput(const std::string& path) : path_(path) {}
};

// A file that is written from front to back. A file of its name is replaced, at the end of links too. A device, a pipe,
// and what standard output goes to are written to as they are.
struct OutputFile : UnfinishedOutput {
  // Throws UserError for a folder, a disk, a link that leads nowhere, and if the file cannot be made.
  explicit OutputFile(const std::string& path);
  void write(const void* bytes, size_t count);  // throws UserError
};

struct NewFolder : UnfinishedOutput {
  // Throws UserError if something of that name exists, unless it may now: finish() then needs the name to be free. And
  // if the folder cannot be made.
  explicit NewFolder(const std::string& path, bool may_exist = false);
  const std::string& unfinished() const { return temporary_; }  // where its files are to be made
};

// Whether a name belongs to such an unfinished file or folder.
bool is_unfinished_output(const std::string& name);

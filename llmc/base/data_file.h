// A large file that is read in pieces. It is not mapped into memory: if another program made a mapped file shorter, a
// read would end the process with a bus error.
#pragma once
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include "error.h"
#include "files.h"
#include "foreign_file.h"

// Movable, not copyable. Without a path it has no bytes. The file stays open, so that one that replaces it under its
// name changes nothing.
struct DataFile {
  std::string path;
  int64_t bytes = 0;      // when it was opened
  bool is_numpy = false;  // by its first bytes

  DataFile() = default;
  // Throws UserError, naming the file, if it cannot be read, is not a regular file, is empty, or is one of another
  // kind (foreign_format), except a NumPy array.
  explicit DataFile(const std::string& file_path) : path(file_path), file_(open_to_read()) {
    struct stat info;
    if (file_.fd < 0) user_error("%s: cannot open: %s", path, strerror(errno));
    if (fstat(file_.fd, &info) != 0) user_error("%s: cannot be read: %s", path, strerror(errno));
    if (S_ISDIR(info.st_mode))
      user_error("%s: is a folder; name the files in it, for example '%s/train_*.bin'", path, path);
    if (!S_ISREG(info.st_mode)) user_error("%s: is not a regular file", path);
    if (info.st_size == 0) user_error("%s: is empty; make it again", path);
    bytes = info.st_size;
    std::string head(size_t(std::min(bytes, int64_t(foreign_head_bytes))), 0);
    read(0, int64_t(head.size()), head.data());
    const std::string what = foreign_format(head);
    is_numpy = head.rfind("\x93NUMPY", 0) == 0;
    if (!what.empty() && !is_numpy) user_error("%s: %s", path, what);
  }

  // to (count) = the bytes from `offset` on. Throws UserError, naming the file, if it no longer has them or cannot be
  // read.
  void read(int64_t offset, int64_t count, void* to) const {
    char* next = static_cast<char*>(to);
    while (count > 0) {
      const ssize_t n = pread(file_.fd, next, size_t(count), offset);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) user_error("%s: cannot be read: %s", path, strerror(errno));
      if (n == 0)
        user_error("%s: has become shorter since it was opened: it had %lld bytes, and now has none at %lld; make it "
                   "again, under another name while it is in use",
                   path, (long long)bytes, (long long)offset);
      next += n, offset += n, count -= n;
    }
  }
  // Tells the kernel how the file will be read: POSIX_FADV_SEQUENTIAL or POSIX_FADV_RANDOM. Only a hint.
  void advise(int advice) const { posix_fadvise(file_.fd, 0, 0, advice); }

 private:
  FileDescriptor file_;

  // Opening a named pipe must not block. A corpus may have more shards than a process may have files open, unless it
  // asks for more.
  FileDescriptor open_to_read() const {
    const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK, fd = open(path.c_str(), flags);
    struct rlimit limit;
    if (fd >= 0 || errno != EMFILE || getrlimit(RLIMIT_NOFILE, &limit) != 0) return FileDescriptor(fd);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    return FileDescriptor(open(path.c_str(), flags));
  }
};

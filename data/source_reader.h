// A file on disk, or standard input, that is read once from its beginning to its end.
#pragma once
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>
#include <string>
#include "llmc/base/crc32c.h"
#include "llmc/base/error.h"
#include "llmc/base/files.h"

// The file descriptor of `path`, or of standard input if that is "-". Throws UserError if it cannot be opened.
inline int open_source(const std::string& path) {
  const int fd = path == "-" ? STDIN_FILENO : open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) user_error("%s: cannot open: %s", path, strerror(errno));
  return fd;
}

// Reads `fd`, which it closes at its end, and takes the CRC-32C of the bytes. No file if fd is -1.
struct SourceReader {
  int fd = -1;
  int error = 0;  // errno of a read that failed
  int64_t bytes_read = 0;
  uint32_t checksum = 0;

  SourceReader() = default;
  SourceReader(const SourceReader&) = delete;
  SourceReader& operator=(const SourceReader&) = delete;
  ~SourceReader() {
    if (fd > 0) close(fd);
  }
  // bytes (size) = the next bytes. Returns their number, 0 at the end; -1 on error, which `error` keeps.
  ssize_t read(char* bytes, size_t size) {
    for (;;) {
      // A pipe may be empty for long, and a signal may arrive just before the wait begins.
      pollfd input = {fd, POLLIN, 0};
      while (fd >= 0 && poll(&input, 1, /*ms=*/200) <= 0)
        if (interrupted) return error = EINTR, -1;
      const ssize_t n = ::read(fd, bytes, size);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) error = errno;
      if (n > 0) checksum = crc32c(bytes, n, checksum), bytes_read += n;
      return n;
    }
  }
};

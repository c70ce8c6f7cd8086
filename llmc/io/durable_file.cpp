#include "durable_file.h"
#include <fcntl.h>             // open
#include <unistd.h>            // write, fsync, close
#include <cerrno>              // errno
#include <cstring>             // strerror
#include <filesystem>          // create_directories, path
#include "llmc/utils/error.h"  // user_error

void write_file_durably(const std::string& path, const std::string& text) {
  int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  bool ok = fd >= 0;
  size_t done = 0;
  while (ok && done < text.size()) {
    ssize_t n = write(fd, text.data() + done, text.size() - done);
    if (n > 0) done += size_t(n);
    else ok = errno == EINTR;
  }
  ok = ok && fsync(fd) == 0;
  int error = errno;
  if (fd >= 0 && close(fd) != 0 && ok) ok = false, error = errno;
  if (!ok) user_error("%s: cannot be written: %s", path.c_str(), strerror(error));
}

void sync_folder(const std::string& path) {
  int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  bool ok = fd >= 0 && fsync(fd) == 0;
  int error = errno;
  if (fd >= 0) close(fd);
  if (!ok) user_error("%s: cannot be synced to disk: %s", path.c_str(), strerror(error));
}

std::string parent_folder(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path();
  return parent.empty() ? "." : parent;
}

void make_folders(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) user_error("%s: the folder cannot be made: %s", path.c_str(), error.message().c_str());
}

void rename_durably(const std::string& temporary, const std::string& path) {
  if (rename(temporary.c_str(), path.c_str()) != 0)
    user_error("%s: cannot be put in place: %s", path.c_str(), strerror(errno));
  sync_folder(parent_folder(path));
}

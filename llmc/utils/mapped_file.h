// A file mapped into memory, for reading.
#pragma once
#include <fcntl.h>     // open
#include <sys/mman.h>  // mmap, munmap, madvise
#include <sys/stat.h>  // fstat
#include <unistd.h>    // close
#include <cerrno>      // errno
#include <cstdint>     // int64_t
#include <cstring>     // strerror
#include <string>      // std::string
#include <utility>     // std::move, std::swap
#include "error.h"     // user_error
#include "files.h"     // refuse_lfs_pointer

// Movable, not copyable. Without a path it maps nothing.
struct MappedFile {
  std::string path;
  int64_t bytes = 0;

  MappedFile() = default;
  // Throws UserError, naming the file, if it cannot be read, is not a regular file, or is empty.
  explicit MappedFile(const std::string& file_path) : path(file_path) {
    int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // O_NONBLOCK: opening a named pipe must not block
    if (fd < 0) user_error("%s: cannot open: %s", path.c_str(), strerror(errno));
    struct stat info;
    int failed = fstat(fd, &info);
    if (!failed && S_ISREG(info.st_mode) && info.st_size > 0) {
      bytes = info.st_size;
      mapping_ = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    }
    int map_error = errno;
    close(fd);
    const char* name = path.c_str();
    if (!failed && S_ISDIR(info.st_mode))
      user_error("%s: is a folder; name the files in it, for example '%s/train_*.bin'", name, name);
    if (failed || !S_ISREG(info.st_mode)) user_error("%s: is not a regular file", name);
    if (info.st_size == 0) user_error("%s: is empty; make it again", name);
    if (mapping_ == MAP_FAILED) user_error("%s: cannot map: %s", name, strerror(map_error));
    refuse_lfs_pointer(path, mapping_, size_t(bytes));
  }
  MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(path, other.path);
    std::swap(bytes, other.bytes);
    std::swap(mapping_, other.mapping_);
    return *this;
  }
  ~MappedFile() {
    if (mapping_ != MAP_FAILED) munmap(mapping_, bytes);
  }

  const void* data() const { return mapping_; }  // (bytes)
  // Tells the kernel how the pages will be read: MADV_SEQUENTIAL or MADV_RANDOM. Only a hint.
  void advise(int advice) const { madvise(mapping_, bytes, advice); }

 private:
  void* mapping_ = MAP_FAILED;
};

#include "files.h"
#include <dirent.h>    // opendir, readdir
#include <fcntl.h>     // open
#include <unistd.h>    // read, write, pwrite, fsync, close
#include <cerrno>      // errno
#include <cstdio>      // rename
#include <cstring>     // strerror
#include <filesystem>  // create_directories, path
#include "error.h"     // user_error

FileDescriptor::~FileDescriptor() {
  if (fd >= 0) close(fd);
}

std::optional<std::string> try_read_file(const std::string& path) {
  FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.fd < 0) return std::nullopt;
  std::string text;
  char block[1 << 16];
  for (;;) {
    const ssize_t n = read(file.fd, block, sizeof block);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const int error = errno;
      file = FileDescriptor();
      errno = error;  // which closing the file may have changed
      return std::nullopt;
    }
    if (n == 0) return text;
    text.append(block, n);
  }
}

std::string read_whole_file(const std::string& path) {
  std::optional<std::string> text = try_read_file(path);
  if (!text) user_error("%s: cannot be read: %s", path.c_str(), strerror(errno));
  return *std::move(text);
}

int32_t magic_number_of(const std::string& path) {
  int32_t magic = 0;
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // O_NONBLOCK: opening a named pipe
                                                                                     // must not block
  return file.fd >= 0 && read(file.fd, &magic, sizeof magic) == ssize_t(sizeof magic) ? magic : 0;
}

std::set<std::string> list_folder(const std::string& folder) {
  std::set<std::string> names;
  DIR* dir = opendir(folder.c_str());
  if (!dir && errno == ENOENT) return names;
  if (!dir) user_error("%s: cannot be listed: %s", folder.c_str(), strerror(errno));
  while (const dirent* entry = readdir(dir)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.insert(name);
  }
  closedir(dir);
  return names;
}

size_t write_all(int fd, const void* bytes, size_t count, int64_t offset) {
  const char* next = static_cast<const char*>(bytes);
  size_t done = 0;
  while (done < count) {
    const ssize_t n =
        offset < 0 ? write(fd, next + done, count - done) : pwrite(fd, next + done, count - done, offset + off_t(done));
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = ENOSPC;  // no progress and no reason: retrying might never end
    if (n <= 0) break;
    done += n;
  }
  return done;
}

void write_file_durably(const std::string& path, const std::string& text) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  bool ok = fd >= 0 && write_all(fd, text.data(), text.size()) == text.size() && fsync(fd) == 0;
  int error = errno;
  if (fd >= 0 && close(fd) != 0 && ok) ok = false, error = errno;
  if (!ok) user_error("%s: cannot be written: %s", path.c_str(), strerror(error));
}

void sync_folder(const std::string& path) {
  const FileDescriptor folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.fd < 0 || fsync(folder.fd) != 0)
    user_error("%s: cannot be synced to disk: %s", path.c_str(), strerror(errno));
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

NewFile::NewFile(const std::string& path) : path_(path), temporary_(path + ".tmp") {
  if (std::filesystem::exists(path)) user_error("%s: exists already; remove it, or choose another name", path.c_str());
  file_ = FileDescriptor(open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (file_.fd < 0) fail();
}

NewFile::~NewFile() {
  if (file_.fd >= 0) unlink(temporary_.c_str());
}

void NewFile::fail() const { user_error("%s: cannot be written: %s", temporary_.c_str(), strerror(errno)); }

void NewFile::write(const void* bytes, size_t count) {
  if (write_all(file_.fd, bytes, count) != count) fail();
}

void NewFile::finish() {
  if (fsync(file_.fd) != 0) fail();
  rename_durably(temporary_, path_);
  file_ = FileDescriptor();
}

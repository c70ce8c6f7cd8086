#include "files.h"
#include <fcntl.h>
#include <glob.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string_view>
#include "error.h"
#include "foreign_file.h"
#include "text.h"

FileDescriptor::~FileDescriptor() {
  if (fd >= 0) close(fd);
}

// stat; false if there is nothing of that name.
static bool has_status(const std::string& path, struct stat& status) {
  if (stat(path.c_str(), &status) == 0) return true;
  if (errno == ENOENT && lstat(path.c_str(), &status) == 0) {
    if (!S_ISLNK(status.st_mode)) return true;  // another process has made it since
    user_error("%s: is a link that leads nowhere; remove it, or put back what it names", path);
  }
  if (errno == ENOENT || errno == ENOTDIR) return false;
  user_error("%s: cannot be read: %s", path, strerror(errno));
}

bool path_exists(const std::string& path) {
  struct stat status;
  return has_status(path, status);
}

bool is_folder(const std::string& path) {
  struct stat status;
  return has_status(path, status) && S_ISDIR(status.st_mode);
}

void refuse_lfs_pointer(const std::string& path, const void* bytes, size_t count) {
  if (std::string_view(static_cast<const char*>(bytes), count).substr(0, strlen(lfs_pointer)) == lfs_pointer)
    user_error("%s: %s", path, lfs_advice);
}

std::vector<std::string> matching_files(const std::string& pattern) {
  if (path_exists(pattern)) return {pattern};
  size_t folder = 0;  // how long the name of the longest such folder is
  for (size_t slash = pattern.find('/', 1); slash != std::string::npos && is_folder(pattern.substr(0, slash));
       slash = pattern.find('/', slash + 1))
    folder = slash;
  std::string escaped;
  for (size_t i = 0; i < pattern.size(); i++)
    escaped.append(i < folder && strchr("*?[]\\", pattern[i]) != nullptr ? "\\" : "").push_back(pattern[i]);
  glob_t found = {};
  std::vector<std::string> paths;
  if (glob(escaped.c_str(), 0, nullptr, &found) == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  return paths;
}

std::optional<std::string> try_read_file(const std::string& path, int64_t most, FileKind kind) {
  // O_NONBLOCK: opening a named pipe that nobody writes to must not block. A regular file does not know it.
  const int wait = kind == FileKind::regular ? O_NONBLOCK : 0;
  FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | wait));
  struct stat status;
  if (file.fd < 0 || fstat(file.fd, &status) != 0) return std::nullopt;
  if (kind == FileKind::regular && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode))
    user_error("%s: is a pipe or a device; a regular file must be there", path);
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
    if (n == 0) break;
    text.append(block, n);
    if (int64_t(text.size()) > most)
      user_error("%s: has more than %lld bytes, and is no such file; remove it, or name another", path,
                 (long long)most);
  }
  refuse_lfs_pointer(path, text.data(), text.size());
  return text;
}

std::string read_whole_file(const std::string& path, int64_t most, FileKind kind) {
  std::optional<std::string> text = try_read_file(path, most, kind);
  if (!text) user_error("%s: cannot be read: %s", path, strerror(errno));
  return *std::move(text);
}

int32_t magic_number_of(const std::string& path) {
  int32_t magic = 0;
  // O_NONBLOCK: opening a named pipe must not block.
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  return file.fd >= 0 && read(file.fd, &magic, sizeof magic) == ssize_t(sizeof magic) ? magic : 0;
}

std::set<std::string> list_folder(const std::string& folder) {
  std::set<std::string> names;
  std::error_code error;
  for (const std::filesystem::directory_entry& entry : std::filesystem::directory_iterator(folder, error))
    names.insert(entry.path().filename());
  if (error && error != std::errc::no_such_file_or_directory)
    user_error("%s: cannot be listed: %s", folder, error.message());
  return names;
}

FileLock lock_file(int fd) {
  struct flock whole = {};  // the whole file
  whole.l_type = F_WRLCK, whole.l_whence = SEEK_SET;
  if (fcntl(fd, F_OFD_SETLK, &whole) == 0) return FileLock::taken;
  return errno == EAGAIN || errno == EACCES ? FileLock::held_by_another : FileLock::unsupported;
}

void interrupt_by_signals() {
  struct sigaction action = {};  // without SA_RESTART: to wait for a pipe's next bytes ends, too
  action.sa_handler = [](int) { interrupted = 1; };
  for (int stop : {SIGINT, SIGTERM, SIGHUP})
    if (!is_ignored(stop)) sigaction(stop, &action, nullptr);
}

bool is_ignored(int signal) {
  struct sigaction action = {};
  return sigaction(signal, nullptr, &action) != 0 || action.sa_handler == SIG_IGN;
}

size_t write_all(int fd, const void* bytes, size_t count, int64_t offset) {
  if (interrupted) user_error("interrupted");
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

[[noreturn]] static void cannot_be_written(const std::string& path) {
  user_error("%s: cannot be written: %s", path, strerror(errno));
}

void write_file_durably(const std::string& path, const std::string& text) {
  OutputFile file(path);
  file.write(text.data(), text.size());
  file.finish();
}

void write_file_in_unfinished_folder(const std::string& path, const std::string& text) {
  const FileDescriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (file.fd < 0 || write_all(file.fd, text.data(), text.size()) != text.size() || fsync(file.fd) != 0)
    cannot_be_written(path);
}

void sync_folder(const std::string& path) {
  const FileDescriptor folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.fd < 0 || fsync(folder.fd) != 0) user_error("%s: cannot be synced to disk: %s", path, strerror(errno));
}

std::string parent_folder(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path();
  return parent.empty() ? "." : parent;
}

std::string followed(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_symlink(path, error)) return path;
  const std::string target = std::filesystem::canonical(path, error);
  if (error == std::errc::no_such_file_or_directory)
    user_error("%s: is a link that leads nowhere; remove it, or choose another name", path);
  if (error) user_error("%s: cannot be written: %s", path, error.message());
  return target;
}

void make_folders(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) user_error("%s: the folder cannot be made: %s", path, error.message());
}

void rename_durably(const std::string& temporary, const std::string& path) {
  if (rename(temporary.c_str(), path.c_str()) != 0) user_error("%s: cannot be put in place: %s", path, strerror(errno));
  sync_folder(parent_folder(path));
}

void set_aside(const std::string& path) {
  if (!path_exists(path)) return;
  const size_t end = path.rfind('.');
  int n = 1;
  const auto name = [&] { return path.substr(0, end) + format(".%d", n) + path.substr(end); };
  while (path_exists(name())) n++;
  rename_durably(path, name());
}

// ----------------------------------------------------------------------------
// Outputs

namespace {

bool is_same_file(const struct stat& a, const struct stat& b) { return a.st_dev == b.st_dev && a.st_ino == b.st_ino; }

// Where the output of some name is written to.
struct OutputTarget {
  std::string path;         // where a file is to be, with links followed
  bool exists = false;      // and there is one, which is
  struct stat status = {};  // this
  bool is_standard_output = false, is_written_to_as_it_is = false;

  explicit OutputTarget(const std::string& name) : path(name) {
    struct stat standard_output;
    exists = stat(name.c_str(), &status) == 0;
    if (!exists && errno != ENOENT) cannot_be_written(name);
    if (!exists) {
      followed(name);  // throws for a link
      return;
    }
    if (S_ISDIR(status.st_mode)) user_error("%s: is a folder; choose another name", name);
    if (S_ISBLK(status.st_mode)) user_error("%s: is a disk; name a file", name);
    is_standard_output = fstat(STDOUT_FILENO, &standard_output) == 0 && is_same_file(status, standard_output);
    is_written_to_as_it_is = is_standard_output || !S_ISREG(status.st_mode);
    if (is_written_to_as_it_is) return;
    path = followed(name);
  }
};

// The one name of what a path names or would name, with links followed.
std::string canonical_name(const std::string& path) {
  std::error_code error;
  const std::filesystem::path name = std::filesystem::weakly_canonical(std::filesystem::absolute(path, error), error);
  return error ? path : name.string();
}

// Unfinished files of PATH are called after this and two numbers. A file name has at most 255 bytes.
std::string unfinished_prefix(const std::string& path) {
  return std::filesystem::path(path).filename().string().substr(0, 200) + ".tmp.";
}

// Removes unfinished outputs that no process has locked, which is what killed ones leave. Ignores errors.
void remove_abandoned(const std::string& folder, const std::string& prefix) {
  std::error_code error;
  for (const std::filesystem::directory_entry& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string path = entry.path(), name = entry.path().filename();
    if (!begins_with(name, prefix) || !is_unfinished_output(name)) continue;
    const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (file.fd >= 0 && flock(file.fd, LOCK_EX | LOCK_NB) == 0) std::filesystem::remove_all(path, error);
  }
}

// Makes an unfinished file or folder, which is locked as long as it is open, in a file system that has locks. Returns
// its path. Throws UserError if it cannot be made.
std::string make_unfinished(const std::string& path, bool is_folder, FileDescriptor& file) {
  static std::atomic<int> number{0};
  const std::string folder = parent_folder(path);
  remove_abandoned(folder, unfinished_prefix(path));
  for (;;) {
    const std::string name = folder + "/" + unfinished_prefix(path) + format("%d.%d", int(getpid()), number++);
    const bool is_made = !is_folder || mkdir(name.c_str(), 0777) == 0;
    const int flags = is_folder ? O_RDONLY | O_DIRECTORY : O_WRONLY | O_CREAT | O_EXCL;
    file = FileDescriptor(is_made ? open(name.c_str(), flags | O_CLOEXEC, 0666) : -1);
    if (file.fd < 0 && errno == EEXIST) continue;  // of a killed process with the same number
    if (file.fd < 0) cannot_be_written(path);
    struct stat status;
    if (flock(file.fd, LOCK_EX) != 0 || fstat(file.fd, &status) != 0 || status.st_nlink > 0) return name;
  }
}

}  // namespace

void check_free_name(const std::string& path) {
  struct stat status;
  if (lstat(path.c_str(), &status) == 0) user_error("%s: exists already; remove it, or choose another name", path);
  if (errno != ENOENT) cannot_be_written(path);
}

void check_output(const std::string& path, const std::vector<std::string>& others) {
  const OutputTarget target(path);
  if (target.is_written_to_as_it_is) return;
  for (const std::string& other : others) {
    struct stat status;
    const bool is_same = target.exists ? stat(other.c_str(), &status) == 0 && is_same_file(status, target.status)
                                       : canonical_name(other) == canonical_name(path);
    if (is_same) user_error("%s: this command reads or writes it as %s, too; choose another name", path, other);
  }
  if (access(parent_folder(target.path).c_str(), W_OK | X_OK) != 0) cannot_be_written(path);
}

bool is_unfinished_output(const std::string& name) {
  const size_t end = name.rfind(".tmp.");
  if (end == std::string::npos) return false;
  const std::string numbers = name.substr(end + 5);
  const size_t point = numbers.find('.');
  return numbers.find_first_not_of(".0123456789") == std::string::npos && point != std::string::npos && point > 0 &&
         point == numbers.rfind('.') && point + 1 < numbers.size();
}

UnfinishedOutput::~UnfinishedOutput() {
  std::error_code ignored;
  if (file_.fd >= 0 && !temporary_.empty()) std::filesystem::remove_all(temporary_, ignored);
}

void UnfinishedOutput::finish() {
  if (!temporary_.empty()) {
    if (fsync(file_.fd) != 0) cannot_be_written(path_);
    rename_durably(temporary_, path_);
  }
  file_ = FileDescriptor();
}

OutputFile::OutputFile(const std::string& path) : UnfinishedOutput(path) {
  const OutputTarget target(path);
  path_ = target.path;
  if (target.is_written_to_as_it_is) {
    fflush(stdout);
    file_ = FileDescriptor(target.is_standard_output ? dup(STDOUT_FILENO) : open(path.c_str(), O_WRONLY | O_CLOEXEC));
    if (file_.fd < 0) cannot_be_written(path_);
    return;
  }
  temporary_ = make_unfinished(path_, /*is_folder=*/false, file_);
  if (target.exists) fchmod(file_.fd, target.status.st_mode & 07777);
}

void OutputFile::write(const void* bytes, size_t count) {
  if (write_all(file_.fd, bytes, count) != count) cannot_be_written(path_);
}

NewFolder::NewFolder(const std::string& path, bool may_exist) : UnfinishedOutput(path) {
  if (!may_exist) check_free_name(path);
  temporary_ = make_unfinished(path, /*is_folder=*/true, file_);
}

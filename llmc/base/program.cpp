#include "program.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <new>
#include "llmc/base/error.h"
#include "llmc/base/message.h"

static void open_standard_streams() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
    if (fcntl(fd, F_GETFD) == -1 && open("/dev/null", O_RDWR) != fd) _exit(1);  // it takes the lowest that is free
}

static std::string text_of(const std::exception& e) {
  if (const auto* files = dynamic_cast<const std::filesystem::filesystem_error*>(&e))
    return files->path1().string() + ": " + files->code().message();
  if (dynamic_cast<const std::bad_alloc*>(&e) != nullptr)
    return "out of memory: what is asked for is too large, or other programs hold the memory";
  return e.what();
}

void flush_output() {
  errno = 0;
  const bool is_written = fflush(stdout) == 0 && !ferror(stdout);
  const int copy = is_written ? dup(STDOUT_FILENO) : -1;  // a file system may tell of errors when a file is closed
  if (is_written && (copy < 0 || close(copy) == 0)) return;
  const std::string reason = errno != 0 ? std::string(": ") + strerror(errno) : "";
  user_error("standard output cannot be written%s; what was printed is incomplete", reason);
}

// A pipe cannot be written only if its reader has gone.
static bool output_is_pipe() {
  struct stat info;
  return fstat(STDOUT_FILENO, &info) == 0 && (S_ISFIFO(info.st_mode) || S_ISSOCK(info.st_mode));
}

int run_program(const std::function<int()>& body, ReaderGone reader_gone,
                const std::function<void(const std::string&)>& on_error) {
  open_standard_streams();
  signal(SIGXFSZ, SIG_IGN);
  if (reader_gone == ReaderGone::is_ignored) signal(SIGPIPE, SIG_IGN);
  try {
    const int status = body();
    if (status == 0 && (reader_gone == ReaderGone::ends || !output_is_pipe())) flush_output();
    return status;
  } catch (const std::exception& e) {
    const std::string text = text_of(e);
    if (on_error) on_error(text);
    print_error(text);
    return 1;
  }
}

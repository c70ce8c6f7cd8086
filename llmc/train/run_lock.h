// One process at a time in an output folder, by lock_file on OUT/lock. If the file system has no locks, a warning says
// so, and the run continues without.
#pragma once
#include <fcntl.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/base/host_name.h"
#include "llmc/base/message.h"
#include "llmc/base/text.h"

struct RunLock {
  // Takes the lock of folder `out`, which exists, until the object is destroyed and all programs that this one has
  // started since have ended; a second call does nothing. Throws UserError, with the host and the process that have it,
  // if it is taken.
  void take(const std::string& out) {
    if (file_.fd >= 0) return;
    const std::string path = out + "/lock";
    FileDescriptor file(open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK, 0666));
    if (file.fd < 0) user_error("%s: cannot be written: %s", path, strerror(errno));
    const FileLock lock = lock_file(file.fd);
    if (lock == FileLock::unsupported)
      print_warning(format("%s: this file system has no locks (%s): make sure that no other process writes to %s",
                           path.c_str(), strerror(errno), out.c_str()));
    if (lock == FileLock::held_by_another) {
      usleep(200000);  // it writes its name right after it takes the lock
      const std::string holder = try_read_file(path).value_or("");
      user_error("-o %s: is in use by %s; wait until it ends, or name another folder", out,
                 holder.empty() ? "another process" : holder);
    }
    const std::string before = read_whole_file(path), mine = "process ";
    if (!before.empty() && !begins_with(before, mine))
      user_error("%s: is another program's file, and not the lock of a run; name another folder", path);
    // The name is for messages alone: a full disk or a late reader does no harm.
    const std::string holder = mine + format("%d on %s", int(getpid()), host_name().c_str());
    if (ftruncate(file.fd, 0) == 0) write_all(file.fd, holder.data(), holder.size(), 0);
    file_ = std::move(file);
  }

 private:
  FileDescriptor file_;
};

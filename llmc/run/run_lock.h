// One process at a time in an output folder. The lock is the kernel's, on the file OUT/lock, so that it ends with the
// process, however that ends. NFS servers pass such locks on to other machines; a file system that has none is said so,
// and the run continues without.
#pragma once
#include <string>
#include "llmc/utils/files.h"

struct RunLock {
  // Takes the lock of folder `out`, which exists, until the object is destroyed; a second call does nothing. Throws
  // UserError, with the host and the process that have it, if it is taken.
  void take(const std::string& out);

 private:
  FileDescriptor file_;
};

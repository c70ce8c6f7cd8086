// What the kernel says about this machine's memory.
#pragma once
#include <unistd.h>
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <string>
#include "cgroup.h"

// A field of /proc/meminfo in bytes, for example "MemAvailable"; 0 if there is no such file or field.
inline size_t meminfo_bytes(const std::string& field) {
  std::ifstream file("/proc/meminfo");
  size_t kib;
  for (std::string line; std::getline(file, line);)
    if (sscanf(line.c_str(), (field + ": %zu kB").c_str(), &kib) == 1) return kib * 1024;
  return 0;
}

// The kernel's estimate of memory that this process can have without swapping: of the machine's, and of what its
// control groups allow.
inline size_t host_memory_available(const std::string& membership = cgroups_of_process,
                                    const std::string& root = cgroup_mount) {
  const size_t available = meminfo_bytes("MemAvailable");
  const size_t of_machine =
      available != 0 ? available : size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
  return size_t(std::min(double(of_machine), cgroup_memory_free(membership, root)));
}

// What the kernel says about this machine's memory.
#pragma once
#include <cstdio>   // fopen, fgets, sscanf
#include <cstring>  // strncmp, strlen
#include <cstddef>  // size_t

// A field of /proc/meminfo in bytes, for example "MemAvailable"; 0 if there is no such file or field.
inline size_t meminfo_bytes(const char* field) {
  size_t kib = 0;
  if (FILE* file = fopen("/proc/meminfo", "r")) {
    const size_t length = strlen(field);
    char line[256];
    while (fgets(line, sizeof line, file))
      if (strncmp(line, field, length) == 0 && sscanf(line + length, ": %zu kB", &kib) == 1) break;
    fclose(file);
  }
  return kib * 1024;
}

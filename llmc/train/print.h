// What a run prints: numbers for people, and lines that share a terminal with a line of progress.
#pragma once
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <string>
#include "llmc/base/error.h"

// "2.65 M", "12.3 k", "850"
inline std::string count_text(double n) {
  if (n >= 1e9) return format("%.2f B", n * 1e-9);
  return n >= 1e6 ? format("%.2f M", n * 1e-6) : n >= 1e4 ? format("%.1f k", n * 1e-3) : format("%.0f", n);
}

// "1.50 GB", "12.3 MB", "0.5 kB"; a GB is 10^9 bytes
inline std::string bytes_text(double n) {
  return n >= 1e9 ? format("%.2f GB", n * 1e-9) : n >= 1e6 ? format("%.1f MB", n * 1e-6) : format("%.1f kB", n * 1e-3);
}

// "42s", "5m08s", "2h03m"
inline std::string time_text(double seconds) {
  const long s = long(seconds + 0.5);
  if (s < 60) return format("%lds", s);
  if (s < 3600) return format("%ldm%02lds", s / 60, s % 60);
  return format("%ldh%02ldm", s / 3600, s / 60 % 60);
}

// A terminal that people look at: mpirun gives its processes one, too, whatever becomes of the output.
inline bool on_terminal() { return isatty(STDOUT_FILENO) && getenv("OMPI_COMM_WORLD_RANK") == nullptr; }

// Prints a line, without its newline if another is to overwrite it. On a terminal it overwrites the line of progress
// there.
inline void print_over_progress(const std::string& text) {
  if (on_terminal()) fputs("\r\033[K", stdout);
  fputs(text.c_str(), stdout);
  fflush(stdout);
}

// A line that stays.
template <class... Args>
void print_line(const char* fmt, const Args&... args) {
  if constexpr (sizeof...(args) == 0) print_over_progress(fmt);
  else print_over_progress(format(fmt, printf_argument(args)...));
}

// Errors and warnings on stderr.
#pragma once
#include <cstdio>
#include <string>
#include "llmc/base/utf8.h"

// "error: TEXT", a line that is safe to print on a terminal, whatever names and foreign files' words are in it, and
// however long they are.
inline std::string message_line(const char* kind, const std::string& text) {
  constexpr size_t most_bytes = 4000;
  const std::string shown = text.size() > most_bytes ? text.substr(0, most_bytes) + "..." : text;
  return std::string(kind) + ": " + printable(shown, /*one_line=*/true) + "\n";
}

// Prints such a line after what stdout has.
inline void print_message(const char* kind, const std::string& text) {
  fflush(stdout);
  fputs(message_line(kind, text).c_str(), stderr);
}
inline void print_error(const std::string& text) { print_message("error", text); }
inline void print_warning(const std::string& text) { print_message("warning", text); }

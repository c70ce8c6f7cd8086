// Errors.
//
// A user's mistake (a missing file, an impossible option) throws UserError. main() prints it as `error: <what>` and
// exits with 1; of mistakes in options before anything has been written. A broken invariant of the program itself is a
// CHECK: it aborts with file and line.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

struct UserError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// printf into a std::string.
__attribute__((format(printf, 1, 2))) inline std::string format(const char* fmt, ...) {
  va_list args, again;
  va_start(args, fmt);
  va_copy(again, args);
  std::string text(vsnprintf(nullptr, 0, fmt, args), '\0');
  vsnprintf(text.data(), text.size() + 1, fmt, again);
  va_end(again);
  va_end(args);
  return text;
}

// What printf takes for an argument: for a text, its characters.
inline const char* printf_argument(const std::string& text) { return text.c_str(); }
template <class T>
T printf_argument(T value) {
  return value;
}

// Throws UserError with the formatted text, which says what is wrong, where, and what to do about it:
// `user_error("%s: no such file; ...", path)`. Without arguments the text is taken literally.
template <class... Args>
[[noreturn]] void user_error(const char* fmt, const Args&... args) {
  if constexpr (sizeof...(args) == 0) throw UserError(fmt);
  else throw UserError(format(fmt, printf_argument(args)...));
}

// Prints file, line and condition and aborts if the condition is false; in every build.
#define CHECK(condition)                                                                \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      fprintf(stderr, "%s:%d: broken invariant: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                                          \
    }                                                                                   \
  } while (0)

// Numbers from text: the one function that reads them, of command lines, config files, wirings and file names.
#pragma once
#include <charconv>
#include <string_view>
#include <system_error>
#include <type_traits>
#include "llmc/base/error.h"

// The number that all of `text` is, in decimal: digits, for a floating-point T also with a point (".5" and "5." too)
// and an exponent, after a sign or none. The nearest T is taken, denormals included: 1e-310 is a double. Throws
// UserError "TEXT: is not a number" (or "... a whole number"), for infinities and NaN too, and "TEXT: is out of range"
// for what T cannot hold, such as 1e400 and 1e-400 as a double. The locale has no influence.
template <class T>
T parse_number(std::string_view text) {
  const char *begin = text.data(), *end = begin + text.size();
  const bool is_signed = begin != end && (*begin == '+' || *begin == '-');
  const char* digits = begin + is_signed;
  const bool begins_as_number = digits != end && ((*digits >= '0' && *digits <= '9') || *digits == '.');
  T value = 0;
  const auto [stop, failure] = std::from_chars(is_signed && *begin == '+' ? digits : begin, end, value);
  if (!begins_as_number || stop != end)
    user_error("%s: is not a %s", std::string(text), std::is_integral_v<T> ? "whole number" : "number");
  if (failure != std::errc()) user_error("%s: is out of range", std::string(text));
  return value;
}

// A value of one of four kinds: what options and a run's state consist of.
#pragma once
#include <cstdint>
#include <string>
#include <variant>
#include "llmc/base/text.h"

using Scalar = std::variant<bool, int64_t, double, std::string>;

// `true`, `12`, `0.5`, or the text itself; numbers in as many digits as read back the same.
inline std::string text_of(const Scalar& value) {
  if (const bool* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const int64_t* whole = std::get_if<int64_t>(&value)) return std::to_string(*whole);
  if (const double* number = std::get_if<double>(&value)) return shortest(*number);
  return std::get<std::string>(value);
}

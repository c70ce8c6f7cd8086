// JSON that others wrote, or may have damaged.
#pragma once
#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include "llmc/utils/error.h"
#include "llmc/utils/scalar.h"

// Whether lists and objects lie in each other more than `most` deep.
inline bool is_nested_deeper(std::string_view text, int most) {
  int depth = 0;
  bool in_string = false;
  for (size_t at = 0; at < text.size(); at++) {
    const char c = text[at];
    if (c == '\\') at++;  // in valid JSON only strings have it
    else if (c == '"') in_string = !in_string;
    else if (in_string) continue;
    else if ((c == '[' || c == '{') && ++depth > most) return true;
    else if (c == ']' || c == '}') depth--;
  }
  return false;
}

// Functions that copy, compare and print a value call themselves for each level, and would take more stack than there
// is.
constexpr int deepest_json = 100;

// The value that a text is; discarded (value.is_discarded()) if it is not JSON, or nested deeper than deepest_json.
template <class Json = nlohmann::ordered_json>
Json parse_json(std::string_view text) {
  if (is_nested_deeper(text, deepest_json)) return Json(Json::value_t::discarded);
  return Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
}

// Why parse_json discards a line of text: what it is and what to do, or "" if it does not.
inline std::string why_no_json(std::string_view text) {
  if (is_nested_deeper(text, deepest_json)) return format("is nested more than %d deep", deepest_json);
  try {
    return nlohmann::json::parse(text.begin(), text.end()).is_discarded() ? "is no JSON" : "";
  } catch (const nlohmann::json::parse_error& e) {
    const std::string_view from = text.substr(std::min(text.size(), std::max<size_t>(e.byte, 1) - 1));
    if (from.substr(0, 3) == "NaN" || from.substr(0, 8) == "Infinity")
      return "has NaN or Infinity, which are no JSON; write null in their place";
    if (e.byte > text.size()) return "is JSON that is cut short; make the file again, or leave the line out";
    return format("is no JSON: byte %zu of it cannot stand there; mend the line, or leave it out", e.byte);
  }
}

// The value that a text is. Throws Json::exception, which says what is wrong, or UserError if it is nested deeper.
template <class Json = nlohmann::ordered_json>
Json parse_json_or_throw(std::string_view text) {
  if (is_nested_deeper(text, deepest_json)) user_error("it is nested more than %d deep", deepest_json);
  return Json::parse(text.begin(), text.end());
}

// JSON on one line, or with `indent` spaces a level. Invalid UTF-8 becomes U+FFFD rather than an exception.
template <class Json>
std::string dump_json(const Json& value, int indent = -1) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}

// The whole number that a value is. Throws UserError, with its name, if it is anything else or not from `least` to
// `most`.
template <class Json>
int64_t whole_number(const Json& value, const char* name, int64_t least, int64_t most) {
  if (!value.is_number_integer()) user_error("%s: is not a whole number", name);
  const bool is_huge = value.is_number_unsigned() && value.template get<uint64_t>() > uint64_t(INT64_MAX);
  const int64_t number = value.template get<int64_t>();
  if (is_huge || number < least || number > most)
    user_error("%s: must lie between %lld and %lld", name, (long long)least, (long long)most);
  return number;
}

// The scalar that a value is. Throws Json::exception if it is a list, an object or null.
template <class Json>
Scalar scalar_of(const Json& value) {
  if (value.is_boolean()) return value.template get<bool>();
  if (value.is_number_integer()) return value.template get<int64_t>();
  if (value.is_number()) return value.template get<double>();
  return value.template get<std::string>();
}

// JSON that others wrote, or may have damaged.
#pragma once
#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include "llmc/base/error.h"
#include "llmc/base/scalar.h"
#include "llmc/base/text.h"

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

// What an exception says, without the name that nlohmann's begin with: "type must be string, but is number".
inline std::string words_of(const std::exception& e) {
  const std::string_view text = e.what();
  return std::string(text.substr(0, 6) == "[json." ? text.substr(text.find("] ") + 2) : text);
}

// Why parse_json discards a text: what it is, in which of its lines if it has several, and what to do; "" if it does
// not.
inline std::string why_no_json(std::string_view text) {
  const bool is_line = text.find('\n') == std::string_view::npos;
  auto line_of = [&](size_t at) {
    const auto line = 1 + std::count(text.begin(), text.begin() + long(std::min(at, text.size())), '\n');
    return !is_line ? format(" in its line %lld", (long long)line) : "";
  };
  if (is_nested_deeper(text, deepest_json)) return format("is nested more than %d deep", deepest_json);
  try {
    return nlohmann::json::parse(text.begin(), text.end()).is_discarded() ? "is no JSON" : "";
  } catch (const nlohmann::json::parse_error& e) {
    const size_t at = std::min(text.size(), std::max<size_t>(e.byte, 1) - 1);
    const std::string_view from = text.substr(at);
    if (from.substr(0, 3) == "NaN" || from.substr(0, 8) == "Infinity")
      return "has NaN or Infinity" + line_of(at) + ", which are no JSON; write null in their place";
    if (e.byte > text.size())
      return std::string("is JSON that is cut short; make the file again") + (is_line ? ", or leave the line out" : "");
    return format("is no JSON: byte %zu of it%s cannot stand there; mend %s", e.byte, line_of(at).c_str(),
                  is_line ? "the line, or leave it out" : "the file, or make it again");
  } catch (const nlohmann::json::out_of_range& e) {  // "number overflow parsing '1e999'"
    const std::string number = split(e.what(), '\'').at(1);
    return "has the number " + number + line_of(text.find(number)) + ", which no floating-point number holds";
  }
}

// The value that a text is. Throws UserError, "WHAT is no JSON ..." or another reason, where parse_json discards it.
template <class Json = nlohmann::ordered_json>
Json parse_json_or_throw(std::string_view text, const std::string& what = "it") {
  Json value = parse_json<Json>(text);
  if (value.is_discarded()) user_error("%s %s", what, why_no_json(text));
  return value;
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

#include "config_toml.h"
#include <toml++/toml.h>
#include <algorithm>
#include <optional>
#include <cstdint>
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/base/text.h"
#include "llmc/base/utf8.h"

// The text of a list of texts and bytes; none, if it is another list.
static std::optional<std::string> joined(const toml::array& list) {
  std::string text;
  bool has_bytes = false;
  for (const toml::node& part : list) {
    const auto* byte = part.as_integer();
    const bool is_byte = byte != nullptr && byte->get() >= 0x80 && byte->get() <= 0xFF;
    if (!is_byte && !part.is_string()) return std::nullopt;
    if (is_byte) text += char(byte->get());
    else text += part.as_string()->get();
    has_bytes = has_bytes || is_byte;
  }
  return has_bytes ? std::optional<std::string>(text) : std::nullopt;
}

std::vector<ConfigEntry> read_config_toml(const std::string& path) {
  const std::string text = read_whole_file(path);
  std::vector<ConfigEntry> entries;
  try {
    const toml::table table = toml::parse(text);
    for (const auto& [key, node] : table) {
      ConfigEntry entry = {std::string(key.str()), "", int(node.source().begin.line)};
      if (const auto* value = node.as_string()) entry.value = value->get();
      else if (const auto* number = node.as_integer()) entry.value = std::to_string(number->get());
      else if (const auto* real = node.as_floating_point()) entry.value = shortest(real->get());
      else if (const auto* flag = node.as_boolean()) entry.value = flag->get() ? "true" : "false";
      else if (const auto bytes = node.is_array() ? joined(*node.as_array()) : std::nullopt) entry.value = *bytes;
      else
        user_error("%s:%d: %s: is a section, a list or a date; an option has text, a number, true or false", path,
                   entry.line, entry.name);
      entries.push_back(std::move(entry));
    }
  } catch (const toml::parse_error& e) {
    user_error("%s:%d: is not TOML: %s", path, int(e.source().begin.line), std::string(e.description()));
  }
  std::sort(entries.begin(), entries.end(), [](const ConfigEntry& a, const ConfigEntry& b) { return a.line < b.line; });
  return entries;
}

// UTF-8 as a basic string of TOML, on one line. (That of toml++ loses a newline at the beginning.)
static std::string quoted(const std::string& text) {
  std::string line = "\"";
  for (char c : text) {
    if (uint8_t(c) < 0x20 || c == 0x7F) line += format("\\u%04X", c);
    else if (c == '"' || c == '\\') line += std::string("\\") + c;
    else line += c;
  }
  return line + "\"";
}

// A text as TOML has it, whatever its bytes.
static std::string toml_text(const std::string& text) {
  std::vector<std::string> parts;
  std::string valid;  // the characters since the last byte that is of none
  auto end_part = [&] {
    if (!valid.empty()) parts.push_back(quoted(valid));
    valid.clear();
  };
  for (size_t at = 0; at < text.size();) {
    const Utf8Character c = first_character(std::string_view(text).substr(at));
    if (c.valid) valid.append(text, at, c.length);
    else end_part();
    for (size_t i = 0; i < c.length && !c.valid; i++) parts.push_back(format("0x%02X", uint8_t(text[at + i])));
    at += c.length;
  }
  if (parts.empty()) return quoted(text);
  end_part();
  std::string list = "[";
  for (const std::string& part : parts) list += (list.size() > 1 ? ", " : "") + part;
  return list + "]";
}

std::string config_toml_line(const std::string& name, const Scalar& value) {
  const std::string* text = std::get_if<std::string>(&value);
  return name + " = " + (text != nullptr ? toml_text(*text) : text_of(value)) + "\n";
}

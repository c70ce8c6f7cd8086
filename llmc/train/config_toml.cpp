#include "config_toml.h"
#include <toml++/toml.h>
#include <algorithm>
#include <cstdint>
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/base/text.h"
#include "llmc/base/utf8.h"

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
      else
        user_error("%s:%d: %s: is a section, a list or a date; an option has text, a number, true or false", path,
                   entry.line, entry.name);
      if (entry.value.find('\0') != std::string::npos)
        user_error("%s:%d: %s: holds a character of value 0", path, entry.line, entry.name);
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

std::string config_toml_line(const std::string& name, const Scalar& value) {
  const auto* text = std::get_if<std::string>(&value);
  std::string valid;
  if (text != nullptr && replace_invalid_utf8(*text, valid) > 0)
    return "# " + name + ": " + quoted(valid) + ", which is not UTF-8 as it was; give it on the command line\n";
  return name + " = " + (text != nullptr ? quoted(*text) : text_of(value)) + "\n";
}

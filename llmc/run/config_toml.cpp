#include "config_toml.h"
#include <toml++/toml.h>       // toml::parse
#include <algorithm>           // std::sort
#include <regex>               // std::regex
#include <sstream>             // std::ostringstream
#include "llmc/utils/error.h"  // user_error, format
#include "llmc/utils/files.h"  // read_whole_file
#include "llmc/utils/text.h"   // shortest

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
        user_error("%s:%d: %s: is a section, a list or a date; an option has text, a number, true or false",
                   path.c_str(), entry.line, entry.name.c_str());
      entries.push_back(std::move(entry));
    }
  } catch (const toml::parse_error& e) {
    user_error("%s:%d: is not TOML: %s", path.c_str(), int(e.source().begin.line),
               std::string(e.description()).c_str());
  }
  std::sort(entries.begin(), entries.end(), [](const ConfigEntry& a, const ConfigEntry& b) { return a.line < b.line; });
  return entries;
}

std::string config_toml_line(const std::string& name, const std::string& value, bool is_text) {
  static const std::regex number_or_flag("[+-]?(0|[1-9][0-9]*)([.][0-9]+)?([eE][+-]?[0-9]+)?|true|false");
  std::ostringstream line;
  line << name << " = ";
  if (!is_text && std::regex_match(value, number_or_flag)) line << value;  // .5, say, is no number in TOML
  else line << toml::value<std::string>(value);
  line << "\n";
  return line.str();
}

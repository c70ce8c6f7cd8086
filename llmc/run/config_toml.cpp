#include "config_toml.h"
#include <toml++/toml.h>       // toml::parse
#include <algorithm>           // std::min, std::sort
#include <charconv>            // std::to_chars
#include <numeric>             // std::iota
#include <regex>               // std::regex
#include <sstream>             // std::ostringstream
#include "llmc/utils/error.h"  // user_error, format
#include "llmc/utils/files.h"  // read_whole_file

// The fewest digits that read back as the same number.
static std::string shortest(double x) {
  char digits[64];
  return {digits, std::to_chars(digits, digits + sizeof digits, x).ptr};
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
      else
        user_error("%s:%d: %s: is a section, a list or a date; an option has text, a number, true or false", path.c_str(), entry.line,
                   entry.name.c_str());
      entries.push_back(std::move(entry));
    }
  } catch (const toml::parse_error& e) {
    user_error("%s:%d: is not TOML: %s", path.c_str(), int(e.source().begin.line), std::string(e.description()).c_str());
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

// Levenshtein's distance.
static size_t edits_between(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t(0));
  for (size_t i = 1; i <= a.size(); i++) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); j++) {
      const size_t above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = above;
    }
  }
  return row[b.size()];
}

std::string nearest_name(const std::string& name, const std::vector<std::string>& names) {
  std::string nearest;
  size_t fewest = name.size() / 2 + 1;
  for (const std::string& other : names) {
    const size_t edits = edits_between(name, other);
    if (edits < fewest) nearest = other, fewest = edits;
  }
  return nearest;
}

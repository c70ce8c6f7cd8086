// Numbers and names as text.
#pragma once
#include <algorithm>
#include <charconv>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

inline bool begins_with(std::string_view text, std::string_view part) { return text.substr(0, part.size()) == part; }
inline bool ends_with(std::string_view text, std::string_view part) {
  return text.size() >= part.size() && text.substr(text.size() - part.size()) == part;
}

// A path without the slashes that end it.
inline std::string without_end_slashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

inline bool is_blank(std::string_view text) { return text.find_first_not_of(" \t\r\n") == std::string_view::npos; }

// The lines of a text, without their ends, "\n" or "\r\n", and without the byte order mark that some editors begin
// with.
inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = text.compare(0, 3, "\xEF\xBB\xBF") == 0 ? 3 : 0, end; begin < text.size(); begin = end + 1) {
    end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin - (end > begin && text[end - 1] == '\r')));
  }
  return lines;
}

// The parts of a text between separators: one more than there are separators, and some may be empty.
inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
  }
  return parts;
}

// The parts that are not empty, with `between` them, and before the last of several `last`, if that is another.
inline std::string joined(const std::vector<std::string>& parts, const char* between, const char* last = nullptr) {
  std::string text;
  for (const std::string& part : parts)
    if (!part.empty()) text += (text.empty() ? "" : last != nullptr && &part == &parts.back() ? last : between) + part;
  return text;
}

// The fewest digits that read back as the same number, with an exponent where %g has one.
inline std::string shortest(double x) {
  char digits[64];
  return {digits, std::to_chars(digits, digits + sizeof digits, x, std::chars_format::general).ptr};
}

// Levenshtein's distance.
inline size_t edits_between(const std::string& a, const std::string& b) {
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

// The name in `names` that is most like `name`, by the number of edits between them; "" if none is near.
inline std::string nearest_name(const std::string& name, const std::vector<std::string>& names) {
  std::string nearest;
  size_t fewest = name.size() / 2 + 1;
  for (const std::string& other : names) {
    const size_t edits = edits_between(name, other);
    if (edits < fewest) nearest = other, fewest = edits;
  }
  return nearest;
}

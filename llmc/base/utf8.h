// UTF-8: decoding, replacing what is ill-formed, and text that is safe to print on a terminal.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

struct Utf8Character {
  uint32_t code_point;  // U+FFFD if it is ill-formed
  size_t length;        // in bytes; of an ill-formed sequence, of its maximal part
  bool valid;
};

// The length of a character, in bytes, that begins with this one; 1 if none does, or it is ASCII.
inline size_t utf8_length(uint8_t lead) {
  return lead < 0xC2 || lead > 0xF4 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

// The character at the beginning of `text`, which is not empty. (Unicode standard, table 3-7.)
inline Utf8Character first_character(std::string_view text) {
  const uint8_t lead = uint8_t(text[0]);
  if (lead < 0x80) return {lead, 1, true};
  const size_t length = utf8_length(lead);
  if (length == 1) return {0xFFFD, 1, false};
  uint8_t lowest = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  uint8_t highest = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  uint32_t code_point = lead & (0x7Fu >> length);
  for (size_t i = 1; i < length; i++) {
    if (i == text.size()) return {0xFFFD, i, false};
    const uint8_t next = uint8_t(text[i]);
    if (next < lowest || next > highest) return {0xFFFD, i, false};
    code_point = code_point << 6 | (next & 0x3F);
    lowest = 0x80, highest = 0xBF;
  }
  return {code_point, length, true};
}

// Whether a byte is the second or a later one of a character.
inline bool is_continuation_byte(char byte) { return (uint8_t(byte) & 0xC0) == 0x80; }

// The character that ends where `text` ends, which is not empty.
inline Utf8Character last_character(std::string_view text) {
  size_t begin = text.size() - 1;
  while (begin > 0 && text.size() - begin < 4 && is_continuation_byte(text[begin])) begin--;
  const Utf8Character c = first_character(text.substr(begin));
  return begin + c.length == text.size() ? c : Utf8Character{0xFFFD, 1, false};
}

// result = text with U+FFFD for each maximal part of an ill-formed sequence, as the Unicode standard recommends
// (section 3.9) and Python's errors="replace" does. Returns the number of replacements; if it is 0, `result` is
// unchanged: `text` is valid as it is.
inline int64_t replace_invalid_utf8(std::string_view text, std::string& result) {
  int64_t replaced = 0;
  size_t kept = 0;  // the bytes of `text` before this one are in `result`
  for (size_t at = 0; at < text.size();) {
    uint64_t word;
    for (; at + 8 <= text.size(); at += 8) {  // eight ASCII characters at once
      memcpy(&word, text.data() + at, 8);
      if (word & 0x8080808080808080u) break;
    }
    if (at == text.size()) break;
    const Utf8Character c = first_character(text.substr(at));
    if (!c.valid) {
      if (replaced++ == 0) result.clear();
      result.append(text, kept, at - kept).append("\xEF\xBF\xBD");
      kept = at + c.length;
    }
    at += c.length;
  }
  if (replaced > 0) result.append(text, kept);
  return replaced;
}

// A file's name, which may have any bytes, as UTF-8 from which it comes back: \\ stands for a backslash, and \xFF, say,
// for a byte that is not part of a character.
inline std::string name_as_text(std::string_view name) {
  constexpr char digits[] = "0123456789ABCDEF";
  std::string text;
  for (size_t at = 0; at < name.size();) {
    const Utf8Character c = first_character(name.substr(at));
    const uint8_t byte = uint8_t(name[at]);
    if (name[at] == '\\') text += "\\\\", at++;
    else if (c.valid) text.append(name.substr(at, c.length)), at += c.length;
    else text.append("\\x").append(1, digits[byte >> 4]).append(1, digits[byte & 15]), at++;
  }
  return text;
}

// `text` for a terminal: U+FFFD for invalid UTF-8, and ? for control characters, so that a model's output or a name in
// an archive cannot send escape sequences. Newlines and tabs stay, unless `one_line`.
inline std::string printable(std::string_view text, bool one_line = false) {
  std::string valid(text), shown;
  replace_invalid_utf8(text, valid);
  for (size_t at = 0; at < valid.size();) {
    const Utf8Character c = first_character(std::string_view(valid).substr(at));
    const bool layout = c.code_point == '\n' || c.code_point == '\t';
    const bool control = c.code_point < 0x20 || (c.code_point >= 0x7F && c.code_point < 0xA0);
    if (control && (one_line || !layout)) shown += '?';
    else shown.append(valid, at, c.length);
    at += c.length;
  }
  return shown;
}

// GPT-2's pre-tokenization: the pieces of a text within which the tokenizer merges.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>
#include "llmc/base/utf8.h"
#include "unicode_classes.h"

enum class Class : uint8_t { other, letter, number, space };

// (0x110000), the class of each code point.
inline const std::vector<Class>& code_point_classes() {
  static const std::vector<Class> classes = [] {
    std::vector<Class> all(0x110000, Class::other);
    auto fill = [&](const char* ranges, Class value) {
      for_each_range(ranges, [&](uint32_t first, uint32_t last) {
        std::fill(all.begin() + first, all.begin() + last + 1, value);
      });
    };
    fill(unicode_letters, Class::letter);
    fill(unicode_numbers, Class::number);
    fill(unicode_white_space, Class::space);
    return all;
  }();
  return classes;
}

// Splits a text into pieces: 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
struct PieceScanner {
  const char* text;
  size_t end;
  const Class* class_of = code_point_classes().data();  // (0x110000)

  // The class of the character at `at`, and its length.
  Class look(size_t at, size_t& length) const {
    const uint8_t byte = uint8_t(text[at]);
    length = 1;
    if (byte < 0x80) return class_of[byte];
    const Utf8Character c = first_character({text + at, end - at});
    length = c.length;
    return class_of[c.code_point];
  }

  // The end of the run of characters of class `run` that contains `at` or ends there.
  size_t end_of_run(size_t at, Class run) const {
    for (;;) {
      while (at < end && uint8_t(text[at]) < 0x80 && class_of[uint8_t(text[at])] == run) at++;
      if (at == end || uint8_t(text[at]) < 0x80) return at;
      size_t length;
      if (look(at, length) != run) return at;
      at += length;
    }
  }

  // The length of the contraction whose apostrophe is at `at`; 0 if it is none.
  size_t contraction(size_t at) const {
    if (at + 1 >= end) return 0;
    const char a = text[at + 1], b = at + 2 < end ? text[at + 2] : '\0';
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
  }

  // The end of the piece that begins at `at`, which is before the end of the text.
  size_t piece_end(size_t at) const {
    size_t length;
    Class first = look(at, length);
    if (text[at] == '\'')
      if (size_t n = contraction(at)) return at + n;
    if (first != Class::space) return end_of_run(at + length, first);
    if (text[at] == ' ' && at + 1 < end) {
      size_t next_length;
      const Class next = look(at + 1, next_length);
      if (next != Class::space) return end_of_run(at + 1 + next_length, next);
    }
    // White space: all of it at the end of the text; otherwise its last character belongs to the next piece, or is a
    // piece of its own.
    const size_t run_end = end_of_run(at + length, Class::space);
    if (run_end == end) return end;
    const size_t last = last_character({text + at, run_end - at}).length;
    return run_end - at > last ? run_end - last : run_end;
  }
};

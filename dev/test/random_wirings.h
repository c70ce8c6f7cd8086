// Wirings drawn from the list of terms: what a new term says of itself is enough for it to be among them.
#pragma once
#include <algorithm>
#include <string>
#include <vector>
#include "llmc/wiring/wiring.h"
#include "llmc/base/error.h"
#include "llmc/base/random.h"

// Draws from (seed, what is drawn) alone.
struct Draw {
  uint64_t seed, next = 0;
  int operator()(int least, int most) {
    return least + int(random_words(seed, RandomStream::test, 5, next++).word[0] % uint32_t(most - least + 1));
  }
  bool one_in(int n) { return (*this)(1, n) == 1; }
  template <class T>
  T of(const std::vector<T>& list) {
    return list[size_t((*this)(0, int(list.size()) - 1))];
  }
};

inline std::vector<std::string> parts_of(const std::string& text, const std::string& separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + separator.size()) {
    end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
  }
  return parts;
}

// One of the term's examples, or its name, with other numbers and letters; a list of layers names L of them. It may be
// a text that is refused.
inline std::string draw_term(Draw& draw, const TermSyntax& syntax, int L) {
  const std::string example = *syntax.examples ? draw.of(parts_of(syntax.examples, " or ")) : syntax.name();
  std::string text, layers;
  for (int l = 0; l < L; l++) layers += (l > 0 ? "_" : "") + std::to_string(draw(0, l));
  if (example.find('_') != std::string::npos) return syntax.name() + "(" + layers + ")";
  for (size_t i = 0, end; i < example.size(); i = end) {
    end = std::max(i + 1, std::min(example.find_first_not_of("0123456789", i), example.size()));
    if (example[i] == 'S' || example[i] == 'L') text += draw.one_in(2) ? 'S' : 'L';
    else if (!isdigit(uint8_t(example[i]))) text += example[i];
    else if (text.back() == '.') text += std::to_string(draw(1, 9));
    else text += end < example.size() && example[end] == '.' ? "0" : std::to_string(draw(1, 6));
  }
  const std::vector<std::string> words = {"heads", "layers", "union"};
  const bool may_have_word = std::string(syntax.form).find("heads|layers|union") != std::string::npos;
  if (may_have_word && draw.one_in(2)) text.insert(text.size() - 1, "," + draw.of(words));
  return text;
}

// Terms in random order. Each is kept if the wiring still fits a model of L layers and h heads.
inline std::string draw_wiring(uint64_t seed, int L, int h) {
  Draw draw = {seed};
  std::string wiring;
  for (int n = draw(1, 40); n > 0; n--) {
    const std::string term = draw_term(draw, info_of(draw.of(known_terms())).syntax, L);
    const std::string longer = draw.one_in(2) ? wiring + " " + term : term + " " + wiring;
    try {
      validate(parse_wiring(longer), L, h);
      wiring = longer;
    } catch (const UserError&) {}
  }
  return wiring.empty() ? "plain" : wiring;
}

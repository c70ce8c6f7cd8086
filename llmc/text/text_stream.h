// Text that comes token by token: how much of it can be shown already.
#pragma once
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#include "llmc/base/utf8.h"

class TextStream {
 public:
  // The text ends before the first of these texts that it comes to; empty ones count for nothing.
  explicit TextStream(std::vector<std::string> stops = {}) : stops_(std::move(stops)) {}

  // Adds a token's bytes. Returns those that can be shown now: not the beginning of a character whose other bytes are
  // to come, nor what may be the beginning of a text to stop at.
  std::string add(std::string_view bytes) {
    text_ += bytes;
    size_t found = std::string::npos;
    for (const std::string& stop : stops_)
      if (!stop.empty()) found = std::min(found, text_.find(stop, shown_));
    if (found == std::string::npos) return show(text_.size() - std::max(held_of_stop(), held_of_character()));
    text_.resize(found);
    stopped_ = true;
    return show(found);
  }

  // Returns the text that has been held back, when no more follows.
  std::string finish() { return show(text_.size()); }

  bool stopped() const { return stopped_; }          // the text has reached one of the texts to stop at
  const std::string& text() const { return text_; }  // all of the text so far

 private:
  std::vector<std::string> stops_;
  std::string text_;
  size_t shown_ = 0;
  bool stopped_ = false;

  std::string show(size_t end) {
    end = std::max(end, shown_);
    const std::string part = text_.substr(shown_, end - shown_);
    shown_ = end;
    return part;
  }
  // The length of the longest end of the text with which a text to stop at begins.
  size_t held_of_stop() const {
    size_t held = 0;
    for (const std::string& stop : stops_)
      for (size_t n = std::min(stop.size(), text_.size()); n > held; n--)
        if (text_.compare(text_.size() - n, n, stop, 0, n) == 0) held = n;
    return held;
  }
  // The length of a character at the end of the text whose last bytes are missing; 0 if there is none.
  size_t held_of_character() const {
    size_t begin = text_.size();
    for (int i = 0; i < 3 && begin > 0 && is_continuation_byte(text_[begin - 1]); i++) begin--;
    if (begin == 0) return 0;
    const std::string_view rest = std::string_view(text_).substr(begin - 1);
    const Utf8Character c = first_character(rest);
    return !c.valid && c.length == rest.size() && rest.size() < utf8_length(uint8_t(rest[0])) ? rest.size() : 0;
  }
};

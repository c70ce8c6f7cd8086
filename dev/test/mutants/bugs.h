// Bugs that are written beside the test that must notice, because they cannot be derived from tokens.
#pragma once
#include <cctype>
#include <regex>
#include <sstream>
#include <string>
#include <vector>
#include "dev/test/mutants/derive.h"
#include "llmc/base/error.h"

namespace mutants {

// In a comment of a test file, for the test that follows:
//   // BUG llmc/text/sampler.h: `threshold < cumulative` -> `threshold > cumulative`
// It may continue in the next lines. A test that is built for several devices names its program: BUG
// (build/bf16/test_ops_emu) llmc/...
struct WrittenBug {
  std::string file, from, to;
  std::string program, filter;  // of the test
  std::string where;            // it is written
};

// What stands between the next two of `delimiter` at or after `at`, which moves after them. "" and npos, if there are
// none.
inline std::string between(const std::string& text, char delimiter, size_t& at) {
  const size_t begin = text.find(delimiter, at),
               end = begin == std::string::npos ? begin : text.find(delimiter, begin + 1);
  at = end == std::string::npos ? end : end + 1;
  return end == std::string::npos ? "" : text.substr(begin + 1, end - begin - 1);
}

// `comment`: from BUG on.
inline WrittenBug parse_bug(const std::string& comment, const std::string& test_file, const std::string& where) {
  WrittenBug bug;
  bug.where = where;
  bug.program = "build/" + test_file.substr(test_file.rfind('/') + 1, test_file.rfind('.') - test_file.rfind('/') - 1);
  size_t at = 4;
  if (comment[at] == '(') {
    const size_t end = comment.find(')', at);
    bug.program = comment.substr(at + 1, end - at - 1);
    at = end + 2;
  }
  const size_t colon = comment.find(": `", at);
  if (colon != std::string::npos) {
    bug.file = comment.substr(at, colon - at);
    at = colon;
    bug.from = between(comment, '`', at);
    if (at != std::string::npos && comment.compare(at, 5, " -> `") == 0) bug.to = between(comment, '`', at);
    else at = std::string::npos;
  }
  if (colon == std::string::npos || at == std::string::npos)
    user_error("%s: is no bug; write // BUG file: `what stands there` -> `the bug`", where.c_str());
  return bug;
}

// The filter of the test that begins at `line`, TEST(Suite, Name) and the like; "" if none does. For
// TEST(LONG_ON_EMU(Suite), Name) it fits both names.
inline std::string filter_of_test(const std::string& line) {
  static const std::regex test("TEST(_[FP])?\\((LONG_ON_EMU\\()?(\\w+)\\)?, (\\w+)\\).*");
  std::smatch parts;
  if (!std::regex_match(line, parts, test)) return "";
  const std::string name = parts[3].str() + "." + parts[4].str();
  return parts[1] == "_P" ? "*/" + name + "/*" : parts[2].matched ? "*" + name : name;
}

// The bugs in a test file, in their order.
inline std::vector<WrittenBug> collect_bugs(const std::string& test_file, const std::string& source) {
  std::vector<WrittenBug> bugs;
  size_t without_test = 0;
  std::string comment, where;
  const auto finish = [&] {
    if (!comment.empty()) bugs.push_back(parse_bug(comment, test_file, where));
    comment.clear();
  };
  std::istringstream lines(source);
  std::string line;
  for (int n = 1; std::getline(lines, line); n++) {
    if (line.compare(0, 7, "// BUG ") == 0) {
      finish();
      comment = line.substr(3), where = test_file + ":" + std::to_string(n);
    } else if (line.compare(0, 3, "// ") == 0 && !comment.empty()) {
      comment += " " + with_single_spaces(line.substr(3));
    } else {
      finish();
      const std::string filter = filter_of_test(line);
      if (filter.empty()) continue;
      while (without_test < bugs.size()) bugs[without_test++].filter = filter;
    }
  }
  finish();
  if (without_test < bugs.size())
    user_error("%s: no test follows; write it before the test that must notice", bugs.back().where.c_str());
  return bugs;
}

// `source` without white space, and where each of its characters stands in `source`.
struct BareText {
  std::string text;
  std::vector<size_t> places;
};
inline BareText without_white_space(const std::string& source) {
  BareText bare;
  for (size_t i = 0; i < source.size(); i++) {
    if (isspace((unsigned char)source[i])) continue;
    bare.text += source[i];
    bare.places.push_back(i);
  }
  return bare;
}

// The bug as a change of its file's source, where the text that it replaces stands exactly once, whatever the white
// space in it.
inline Mutant locate_bug(const WrittenBug& bug, const std::string& source) {
  const BareText bare = without_white_space(source);
  const std::string from = without_white_space(bug.from).text;
  const size_t at = bare.text.find(from);
  if (from.empty() || at == std::string::npos)
    user_error("%s: %s does not hold `%s`; write what stands there now", bug.where.c_str(), bug.file.c_str(),
               bug.from.c_str());
  if (bare.text.find(from, at + 1) != std::string::npos)
    user_error("%s: %s holds `%s` more than once; write more of it", bug.where.c_str(), bug.file.c_str(),
               bug.from.c_str());
  return {"bug", bare.places[at], bare.places[at + from.size() - 1] + 1, bug.to};
}

}  // namespace mutants

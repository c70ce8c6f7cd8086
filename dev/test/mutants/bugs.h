// Bugs that are written down for the test that must notice, because they cannot be derived from tokens.
#pragma once
#include <cctype>
#include <regex>
#include <sstream>
#include <string>
#include <vector>
#include "dev/test/mutants/derive.h"
#include "llmc/base/error.h"

namespace mutants {

// The bugs of dev/test/NAME.cpp, .cu or .h stand in dev/test/bugs/NAME.txt: the name of a test as its source has it,
// and below it a bug a line.
//   TEST(Sampler, DrawsByTheCumulativeDistribution)
//   llmc/text/sampler.h: `threshold < cumulative` -> `threshold > cumulative`
// A test that is built for several devices names its program: (build/bf16/test_ops_emu) llmc/...
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

inline WrittenBug parse_bug(const std::string& line, const std::string& bugs_file, const std::string& where) {
  WrittenBug bug;
  bug.where = where;
  bug.program = "build/" + bugs_file.substr(bugs_file.rfind('/') + 1, bugs_file.rfind('.') - bugs_file.rfind('/') - 1);
  size_t at = 0;
  if (line[at] == '(') {
    const size_t end = line.find(')', at);
    bug.program = line.substr(at + 1, end - at - 1);
    at = end + 2;
  }
  const size_t colon = line.find(": `", at);
  if (colon != std::string::npos) {
    bug.file = line.substr(at, colon - at);
    at = colon;
    bug.from = between(line, '`', at);
    if (at != std::string::npos && line.compare(at, 5, " -> `") == 0) bug.to = between(line, '`', at);
    else at = std::string::npos;
  }
  if (colon == std::string::npos || at == std::string::npos)
    user_error("%s: is no bug; write file: `what stands there` -> `the bug`", where.c_str());
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

// The bugs in a file of dev/test/bugs, in their order.
inline std::vector<WrittenBug> collect_bugs(const std::string& bugs_file, const std::string& text) {
  std::vector<WrittenBug> bugs;
  std::string filter;  // of the test above
  std::istringstream lines(text);
  std::string line;
  for (int n = 1; std::getline(lines, line); n++) {
    const std::string where = bugs_file + ":" + std::to_string(n);
    if (line.empty()) continue;
    if (const std::string of_test = filter_of_test(line); !of_test.empty()) {
      filter = of_test;
      continue;
    }
    if (filter.empty()) user_error("%s: no test stands above; write its name, as its source has it", where.c_str());
    bugs.push_back(parse_bug(line, bugs_file, where));
    bugs.back().filter = filter;
  }
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

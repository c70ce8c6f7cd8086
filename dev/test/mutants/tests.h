// Which tests notice a change of a file: the tests of the programs that include it, or that run a program which does.
// Both are derived from the sources.
//
// A file's tests are two of the host's programs that include it, directly or not, or the header of a .cpp file, and two
// of the CPU's or, for a file of the GPU or a .cu file, two of the emulated GPU's. First comes the one with the file's
// name (test_tile for tile.h), then that which is made of the fewest files. Only if there are none, two that run a
// program with the file. They run their quick tests, and at last the first of them runs those that take long.
//
// Where that is not enough, a line in a test's source names files, by the beginnings of their paths, that its program
// covers as well; it goes last, and runs all of its tests. Where it is too much, the line says that the program covers
// no others. (Where a comment goes before it, a line `//` keeps clang-format from joining the two.)
//
//   // COVERS llmc/ranks/ train_gpt2_sla.cu
//   // COVERS ONLY llmc/cpu/attention.h
#pragma once
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <iterator>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>
#include "dev/test/mutants/sources.h"
#include "llmc/base/error.h"

namespace mutants {

// A test program in build/ and which of its tests are run.
struct TestRun {
  std::string program, filter;
  bool may_be_empty = false;  // a filter that fits none of the program's tests is no mistake
};

// A test program, the programs that it runs, and what its sources say about the files that it covers.
struct TestProgram {
  std::string name;
  bool is_quick;                    // it belongs to `make test`
  std::set<std::string> files;      // that it is compiled from
  std::vector<std::string> runs;    // programs
  std::vector<std::string> covers;  // prefixes of files: a line // COVERS llmc/ranks/ llmc/train/
  bool covers_only_those = false;   // // COVERS ONLY llmc/cuda/attention.h

  bool names(const std::string& path) const {
    for (const std::string& prefix : covers)
      if (has_prefix(path, prefix)) return true;
    return false;
  }
  // Whether the file has the program's name: test_tile and tile.h, test_attention and attention_mma.h.
  bool is_about(const std::string& path) const {
    return has_prefix(std::filesystem::path(path).stem(), stem_of(name).substr(strlen("test_")));
  }
};

// The words of each line that `make` prints for a target.
inline std::vector<std::vector<std::string>> words_of_make(const std::string& target) {
  FILE* pipe = popen(("make -s --no-print-directory " + target).c_str(), "r");
  std::string text;
  for (int c; pipe != nullptr && (c = fgetc(pipe)) != EOF;) text += char(c);
  if (pipe == nullptr || pclose(pipe) != 0)
    user_error("make %s: failed; run this in the repository's root", target.c_str());
  std::vector<std::vector<std::string>> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    std::istringstream words(line);
    lines.push_back({std::istream_iterator<std::string>(words), {}});
  }
  return lines;
}

inline std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Whether `text` has `word` between characters that no word has.
inline bool has_word(const std::string& text, const std::string& word) {
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    const auto is_part = [&](size_t i) {
      return i < text.size() && (isalnum((unsigned char)text[i]) || text[i] == '_');
    };
    if (!is_part(at - 1) && !is_part(at + word.size())) return true;
  }
  return false;
}

// All test programs and what they run.
class TestsOfTree {
 public:
  TestsOfTree() {
    const auto lines = words_of_make("list-tests");  // quick tests, later ones, the programs that tests run
    if (lines.size() != 3) user_error("make list-tests: prints %zu lines and not three", lines.size());
    for (size_t i = 0; i < 2; i++)
      for (const std::string& name : lines[i]) add_test(name, /*is_quick=*/i == 0);
    for (TestProgram& test : programs_)
      for (const auto& programs : lines) add_runs(test, programs);
  }

  // The tests that a mutant of a file is tried by, in their order; none, if no test covers it.
  std::vector<TestRun> tests_of(const std::string& path) const {
    const std::vector<const TestProgram*> programs = programs_covering(path);
    std::vector<TestRun> runs;
    for (const TestProgram* program : programs) runs.push_back({program->name, "-Long*", true});
    for (const TestProgram* program : programs)
      if (program == programs[0] || program->names(path)) runs.push_back({program->name, "Long*", true});
    return runs;
  }

  std::vector<std::string> programs_run_by(const std::string& test) const {
    for (const TestProgram& program : programs_)
      if (program.name == test) return program.runs;
    return {};
  }

 private:
  static constexpr size_t most_of_a_kind = 2;

  static bool belongs_to_tests(const std::string& file) {
    return has_prefix(file, "dev/test/") || has_prefix(file, "test_");
  }

  void add_test(const std::string& name, bool is_quick) {
    TestProgram test = {name, is_quick, SourceFiles(name).files, {}, {}, false};
    for (const std::string& file : test.files)
      if (belongs_to_tests(file)) add_covered(text_of(file), test);
    programs_.push_back(test);
  }

  // Adds the programs among `programs` that a test of host code runs.
  void add_runs(TestProgram& test, const std::vector<std::string>& programs) {
    if (has_device(test.name)) return;
    std::string own, headers;
    for (const std::string& file : test.files)
      if (belongs_to_tests(file)) (has_suffix(file, ".h") ? headers : own) += text_of(file);
    for (const std::string& program : programs) {
      if (program == test.name || !mentions(own, headers, program)) continue;
      test.runs.push_back(program);
      if (!files_of_.count(program)) files_of_[program] = SourceFiles(program).files;
    }
  }

  static void add_covered(const std::string& text, TestProgram& test) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      if (!has_prefix(line, "// COVERS ")) continue;
      std::istringstream words(line.substr(strlen("// COVERS ")));
      for (std::string word; words >> word;)
        if (word == "ONLY") test.covers_only_those = true;
        else test.covers.push_back(word);
    }
  }

  // Whether a test names a program, or a constant that holds its name: static const std::string trainer = "build/...";
  static bool mentions(const std::string& own, const std::string& headers, const std::string& program) {
    if (has_word(own, program.find('/') == std::string::npos ? "./" + program : program)) return true;
    static const std::regex constant("std::string (\\w+) = \"([^\" ]+)");
    for (std::sregex_iterator i(headers.begin(), headers.end(), constant), end; i != end; ++i)
      if ((*i)[2] == program && has_word(own, (*i)[1])) return true;
    return false;
  }

  enum class Kind { host, cpu, emulated, runs_it, none };

  Kind kind_of(const TestProgram& test, const std::string& path) const {
    if (test.files.count(path))
      return has_suffix(test.name, "_cpu") ? Kind::cpu : is_emulated(test.name) ? Kind::emulated : Kind::host;
    for (const std::string& program : test.runs)
      if (files_of_.at(program).count(path)) return Kind::runs_it;
    return Kind::none;
  }

  // All that may be asked about a file, in this order: host code, the CPU's, the emulated GPU's, those that only run a
  // program with it; within a kind first the one with the file's name, then the one with the fewest files.
  std::vector<std::pair<Kind, const TestProgram*>> candidates_for(const std::string& path) const {
    using Rank = std::tuple<Kind, bool, size_t, bool, std::string>;
    std::vector<std::pair<Rank, const TestProgram*>> ranked;
    for (const TestProgram& test : programs_) {
      if (test.covers_only_those && !test.names(path)) continue;
      ranked.push_back(
          {{kind_of(test, path), !test.is_about(path), test.files.size(), !test.is_quick, test.name}, &test});
    }
    std::sort(ranked.begin(), ranked.end());
    std::vector<std::pair<Kind, const TestProgram*>> candidates;
    for (const auto& [rank, test] : ranked) candidates.push_back({std::get<Kind>(rank), test});
    return candidates;
  }

  // Two of each kind that include the file; none of the emulated GPU's, if the same source is compiled for the CPU.
  // Then the programs that name it. If there are none of either, two that run a program with it.
  std::vector<const TestProgram*> programs_covering(const std::string& path) const {
    std::map<Kind, size_t> taken;
    std::vector<const TestProgram*> including, naming, running;
    for (const auto& [kind, test] : candidates_for(path)) {
      const bool is_repeated = kind == Kind::emulated && taken[Kind::cpu] > 0 && !has_suffix(path, ".cu");
      if (kind < Kind::runs_it && !is_repeated && taken[kind]++ < most_of_a_kind) including.push_back(test);
      else if (test->names(path) && (kind != Kind::none || including.empty())) naming.push_back(test);
      else if (kind == Kind::runs_it && taken[kind]++ < most_of_a_kind) running.push_back(test);
    }
    including.insert(including.end(), naming.begin(), naming.end());
    return including.empty() ? running : including;
  }

  std::vector<TestProgram> programs_;
  std::map<std::string, std::set<std::string>> files_of_;  // of programs that tests run
};

// The tests of the repository in whose root this runs.
inline const TestsOfTree& tests_of_tree() {
  static const TestsOfTree tests;
  return tests;
}

}  // namespace mutants

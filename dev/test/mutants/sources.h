// Which source files a program is made of, by the #include lines that the compiler would follow.
#pragma once
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace mutants {

inline bool has_prefix(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}
inline bool has_suffix(const std::string& text, const std::string& suffix) {
  return text.size() >= suffix.size() && text.compare(text.size() - suffix.size(), suffix.size(), suffix) == 0;
}

// Whether a program is built in each precision, for a device at its name's end: build/bf16/test_ops_emu.
inline bool has_device(const std::string& program) {
  return has_prefix(program, "build/bf16/") || has_prefix(program, "build/fp16/") || has_prefix(program, "build/fp32/");
}

// A program's name without folder, device and ending: test_ops.
inline std::string stem_of(const std::string& program) {
  std::string stem = std::filesystem::path(program).stem();
  if (has_device(program) && (has_suffix(stem, "_cpu") || has_suffix(stem, "_emu"))) stem.resize(stem.size() - 4);
  return stem;
}

// The emulated GPU's programs end in _emu, but for its own tests.
inline bool is_emulated(const std::string& program) {
  return has_suffix(program, "_emu") || has_prefix(program, "build/test_emu") || has_prefix(program, "build/emu_");
}

// The macros of a device and a precision that the Makefile defines for a program.
inline std::set<std::string> macros_of(const std::string& program) {
  std::set<std::string> macros = {is_emulated(program) ? "SLA_EMU" : "SLA_CPU"};
  if (has_prefix(program, "build/bf16/")) macros.insert("PRECISION_BF16");
  if (has_prefix(program, "build/fp16/")) macros.insert("PRECISION_FP16");
  return macros;
}

// Collects the files of the repository that a program is made of.
class SourceFiles {
 public:
  explicit SourceFiles(const std::string& program) : macros_(macros_of(program)) {
    for (const char* folder : {"", "dev/test/", "dev/bench/", "data/"})
      for (const char* ending : {".cu", ".cpp"}) add(folder + stem_of(program) + ending);
    if (is_emulated(program) && std::filesystem::exists("dev/emu"))
      for (const auto& file : std::filesystem::recursive_directory_iterator("dev/emu"))
        if (file.path().extension() == ".cpp") add(file.path());
  }

  std::set<std::string> files;  // with their paths from the repository's root

 private:
  // Adds a file, if it exists, with what it includes; and the .cpp file of a header, which is linked with it.
  void add(const std::string& path) {
    if (files.count(path) || !std::filesystem::is_regular_file(path)) return;
    files.insert(path);
    std::ifstream file(path);
    std::vector<Condition> around;  // the line
    for (std::string line; std::getline(file, line);)
      if (line[0] == '#') follow(line, path, around);
    if (has_suffix(path, ".h")) add(path.substr(0, path.size() - 2) + ".cpp");
  }

  // What is known of the condition of an #if. Where it is not known, both sides are followed.
  struct Condition {
    bool known, holds;
  };

  // #ifdef X, #ifndef X, and #if of terms defined(X) and !defined(X) with && between them.
  Condition condition_of(const std::string& directive, const std::string& line) const {
    Condition condition = {true, true};
    static const std::regex term("(!?)\\b(?:defined\\(|ifdef |ifndef )(\\w+)");
    std::sregex_iterator i(line.begin(), line.end(), term), end;
    if (i == end || line.find("||") != std::string::npos) return {false, true};
    for (; i != end; ++i) {
      const std::string name = (*i)[2];
      if (name != "SLA_CPU" && name != "SLA_EMU" && name != "PRECISION_BF16" && name != "PRECISION_FP16")
        condition.known = false;
      else if ((macros_.count(name) > 0) == (directive == "#ifndef" || (*i)[1] == "!")) return {true, false};
    }
    return condition;
  }

  void follow(const std::string& line, const std::string& path, std::vector<Condition>& around) {
    std::istringstream words(line);
    std::string directive, what;
    words >> directive >> what;
    if (has_prefix(directive, "#if")) {
      around.push_back(condition_of(directive, line));
    } else if (directive == "#else" && around.back().known) {
      around.back().holds = !around.back().holds;
    } else if (directive == "#endif") {
      around.pop_back();
    } else if (directive == "#include" && what.size() > 2) {
      for (const Condition& condition : around)
        if (!condition.holds) return;
      add_included(what.substr(1, what.size() - 2), path);
    }
  }

  void add_included(const std::string& name, const std::string& by) {
    add(name);
    add((std::filesystem::path(by).parent_path() / name).lexically_normal());
    if (macros_.count("SLA_EMU")) add("dev/emu/include/" + name);
  }

  std::set<std::string> macros_;
};

}  // namespace mutants

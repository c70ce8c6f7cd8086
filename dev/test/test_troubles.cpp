// scripts/TROUBLES.md quotes errors as the sources have them. Runs from the repository's root.
#include <gtest/gtest.h>
#include <cctype>
#include <cstring>
#include <filesystem>
#include "files.h"

namespace fs = std::filesystem;

// A text without "...", and with one space where it has several.
static std::string without_values(const std::string& text) {
  std::string rest;
  for (size_t i = 0; i < text.size(); i++) {
    if (text.compare(i, 3, "...") == 0) i += 2;
    else if (text[i] != ' ' || rest.empty() || rest.back() != ' ') rest += text[i];
  }
  return rest;
}

// What a source prints, without values: printf's conversions and a shell's variables. Literals that stand side by side
// are one; the rest of the source stays as it is.
static std::string printed_by(const std::string& source) {
  std::string text;
  const auto at = [&](size_t i) { return i < source.size() ? source[i] : '\0'; };
  const auto skip = [&](size_t i, const auto& is_skipped) {
    while (i < source.size() && is_skipped(source[i])) i++;
    return i;
  };
  const auto is_space = [](char c) { return isspace((unsigned char)c) != 0; };
  const auto is_of_name = [](char c) { return isalnum((unsigned char)c) != 0 || c == '_'; };
  for (size_t i = 0; i < source.size(); i++) {
    const size_t next = skip(i + 1, is_space),
                 type = skip(i + 1, [](char c) { return c != '\0' && strchr("-+#0123456789.*lzhj", c) != nullptr; });
    if (source[i] == '\\' && at(i + 1) == '"') {
      text += '"', i++;
    } else if (source[i] == '"' && next > i + 1 && at(next) == '"') {
      i = next;
    } else if (source[i] == '%' && isalpha((unsigned char)at(type)) != 0) {
      i = type;
    } else if (source[i] == '$' && at(i + 1) == '{') {
      i = skip(i, [](char c) { return c != '}'; });
    } else if (source[i] == '$' && is_of_name(at(i + 1))) {
      i = skip(i + 1, is_of_name) - 1;
    } else {
      text += source[i];
    }
  }
  return without_values(text);
}

// The programs, and the scripts that users start.
static std::string printed_by_all() {
  std::string text;
  for (const char* folder : {"llmc", "scripts", "data"})
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      const std::string kind = entry.path().extension();
      if (kind == ".h" || kind == ".cpp" || kind == ".sh") text += printed_by(read_file(entry.path())) + "\n";
    }
  return text;
}

// What stands between backquotes and begins as errors of programs and of make do: without that, and without values.
static std::vector<std::string> quoted_errors(const std::string& page) {
  std::vector<std::string> errors;
  for (size_t begin, end = 0; (begin = page.find('`', end)) != std::string::npos; end++) {
    end = page.find('`', begin + 1);
    if (end == std::string::npos) break;
    std::string text = page.substr(begin + 1, end - begin - 1);
    for (const std::string start : {"error: ", "*** train_gpt2_sla: "})
      if (text.compare(0, start.size(), start) == 0) {
        text = without_values(text.substr(start.size()));
        const size_t first = text.find_first_not_of(' '), last = text.find_last_not_of(' ');
        errors.push_back(text.substr(first, last + 1 - first));
      }
  }
  return errors;
}

TEST(Troubles, QuoteErrorsThatTheSourcesPrint) {
  const std::string page = read_file("scripts/TROUBLES.md"), printed = printed_by_all();
  const std::vector<std::string> errors = quoted_errors(page);
  EXPECT_GE(errors.size(), 15u);
  for (const std::string& error : errors)
    EXPECT_NE(printed.find(error), std::string::npos)
        << "no source prints \"" << error << "\"; scripts/TROUBLES.md quotes it";
}

TEST(Troubles, BeginWithAnErrorEach) {
  const std::string page = read_file("scripts/TROUBLES.md");
  for (int i = 1; i <= 15; i++) {
    const std::string number = "\n" + std::to_string(i) + ". `";
    const size_t at = page.find(number);
    ASSERT_NE(at, std::string::npos) << "no entry " << i;
    EXPECT_FALSE(quoted_errors(page.substr(at, page.find('\n', at + 1) - at)).empty()) << "entry " << i;
  }
}

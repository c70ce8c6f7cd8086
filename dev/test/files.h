// Files in tests: a temporary folder, whole files, the names in a folder.
#pragma once
#include <gtest/gtest.h>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <system_error>
#include "llmc/base/error.h"

// A new, empty folder; it is removed with all that is in it when this object is destroyed.
struct TemporaryFolder {
  std::string path = (std::filesystem::temp_directory_path() / "gpt2_sla_test_XXXXXX").string();

  TemporaryFolder() { CHECK(mkdtemp(path.data()) != nullptr); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
};

// The bytes of a file; "" if it cannot be read.
inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
}

inline std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

// A test with a temporary folder of its own, `folder`.
class FolderTest : public testing::Test {
 private:
  TemporaryFolder temporary;

 protected:
  const std::string& folder = temporary.path;

  std::string in(const std::string& name) const { return folder + "/" + name; }
  // Writes the file `name` in the folder and returns its path.
  std::string write(const std::string& name, const std::string& bytes) const {
    write_file(in(name), bytes);
    return in(name);
  }
};

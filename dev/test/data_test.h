// Folders with token files, for the tests of what reads and what writes them.
#pragma once
#include <sys/stat.h>
#include <cstdint>
#include <string>
#include <vector>
#include "files.h"
#include "llmc/base/crc32c.h"

struct Data : FolderTest {
  Data() { CHECK(chmod(folder.c_str(), 0755) == 0); }  // some tests give up root's rights

  std::string write_headerless(const std::string& name, const std::vector<uint16_t>& tokens) const {
    return write(name, std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2));
  }
  std::string write_shard(const std::string& name, const std::vector<uint16_t>& tokens, int magic = 20240520,
                          int version = 1, int extra_count = 0) const {
    int32_t header[256] = {magic, version, int32_t(tokens.size()) + extra_count};
    std::string bytes(reinterpret_cast<const char*>(header), sizeof header);
    return write(name, bytes + std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2));
  }
  // NAME.mask beside the shard NAME.bin of these tokens; scored: a 0 or 1 for each.
  std::string write_mask(const std::string& name, const std::vector<uint16_t>& tokens,
                         const std::string& scored) const {
    int32_t header[256] = {20261124, 1, int32_t(tokens.size()), int32_t(crc32c(tokens.data(), tokens.size() * 2))};
    std::string bytes(reinterpret_cast<const char*>(header), sizeof header);
    bytes.resize(sizeof header + (tokens.size() + 7) / 8);
    for (size_t i = 0; i < scored.size(); i++)
      if (scored[i] == '1') bytes[sizeof header + i / 8] |= char(1 << i % 8);
    return write(name, bytes);
  }
};

// first, first + 1, ...
inline std::vector<uint16_t> counting(int n, int first = 0) {
  std::vector<uint16_t> tokens(n);
  for (int i = 0; i < n; i++) tokens[i] = uint16_t(first + i);
  return tokens;
}

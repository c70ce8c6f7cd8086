#include "numpy_file.h"
#include <algorithm>
#include <regex>
#include <string>
#include "llmc/base/error.h"
#include "llmc/base/number.h"

NumpyHeader read_numpy_header(const DataFile& file) {
  uint8_t start[12] = {0};
  file.read(0, std::min<int64_t>(file.bytes, sizeof start), start);
  const int version = start[6];
  if (version < 1 || version > 3)
    user_error("%s: is a NumPy array of version %d; 1, 2 and 3 are known", file.path, version);
  const int64_t begin = version == 1 ? 10 : 12;
  const int64_t bytes = start[8] | start[9] << 8 | (version == 1 ? 0 : start[10] << 16 | int64_t(start[11]) << 24);
  if (bytes > 1 << 12 || begin + bytes > file.bytes)
    user_error("%s: is a NumPy array whose header is cut short or damaged; make it again", file.path);
  std::string header(static_cast<size_t>(bytes), 0);
  file.read(begin, bytes, header.data());
  static const std::regex row_of_uint16(
      R"(\{'descr': *'<u2', *'fortran_order': *False, *'shape': *\((\d{1,18}),\),? *\}\s*)");
  std::smatch found;
  if (!std::regex_match(header, found, row_of_uint16))
    user_error("%s: is a NumPy array, but not a row of uint16 tokens ('<u2'): %s; write it with .ravel().astype('<u2')",
               file.path, header.substr(0, header.find_last_not_of(" \n") + 1).substr(0, 200));
  return {begin + bytes, parse_number<int64_t>(found.str(1))};
}

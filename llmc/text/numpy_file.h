// NumPy's format for arrays (.npy), in which token files may be: "\x93NUMPY", its version, the number of bytes of a
// dictionary in Python's words (uint16 in version 1, uint32 in 2 and 3), the dictionary, then the numbers.
#pragma once
#include <cstdint>
#include "llmc/base/data_file.h"

struct NumpyHeader {
  int64_t bytes;  // where the numbers begin
  int64_t count;  // of the numbers
};

// Throws UserError, naming the file, unless it is an array of little-endian uint16, of one dimension.
NumpyHeader read_numpy_header(const DataFile& file);

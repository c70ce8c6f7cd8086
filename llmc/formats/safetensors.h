// safetensors files: eight bytes with the header's length, the header (JSON: each tensor's dtype, shape and offsets),
// then the tensors' bytes. Reading maps the file and checks everything in the header; writing lays the whole file out
// first, so that any number of writers can then write their shards.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>
#include "llmc/base/arena.h"
#include "llmc/base/files.h"

// ----------------------------------------------------------------------------
// Reading

struct SafetensorsTensor {
  std::string name;
  std::string dtype;           // "F32", "F16", "BF16", "I64", ...
  std::vector<int64_t> shape;  // [] is a scalar, one element; a dimension may be 0
  size_t begin, end;           // its bytes in the data part

  int64_t num_elements() const { return ::num_elements(shape); }
};

// CRC-32C checksums that cover every byte of a file: of the header with the eight bytes before it, and of each tensor's
// bytes, in the header's order.
struct SafetensorsChecksums {
  uint32_t header = 0;
  std::vector<std::pair<std::string, uint32_t>> tensors;
};

// Unmaps a mapping of `bytes` bytes.
struct Unmap {
  size_t bytes = 0;
  void operator()(const uint8_t* start) const;
};

// A safetensors file, mapped for reading. The constructor throws UserError, `<path>: <what is wrong>`, for any file
// that is not valid: each tensor's bytes must lie in the file and fit its shape and dtype, and together they must cover
// the data part once, without overlaps or holes. The memory used is proportional to the header's actual
// bytes (at most 100 MB), whatever sizes it claims. As with any mapping, the process dies (SIGBUS) if another one
// shortens the file while it is read: replace files by renaming.
struct SafetensorsFile {
  explicit SafetensorsFile(const std::string& path);

  const std::vector<SafetensorsTensor>& tensors() const { return tensors_; }  // in the header's order
  size_t data_offset() const { return size_t(data_ - file_.get()); }          // where in the file the data part begins

  // Reads the whole file, on all threads.
  SafetensorsChecksums checksums() const;

  // out[i] = element first + i of t, for i < count (-1: up to the end). t is one of this file's own tensors. Takes
  // F32, F16 and BF16, whose values are all exact as floats; another dtype is a UserError.
  void read_f32(const SafetensorsTensor& t, float* out, int64_t first = 0, int64_t count = -1) const;

 private:
  std::string path_;
  std::unique_ptr<const uint8_t[], Unmap> file_;  // the whole file
  const uint8_t* data_ = nullptr;                 // its data part
  size_t data_bytes_ = 0;
  std::vector<SafetensorsTensor> tensors_;
};

// ----------------------------------------------------------------------------
// Writing

struct SafetensorsSpec {
  std::string name;
  std::vector<int64_t> shape;
};

// A file of F32 tensors, in the order of `specs`. Once the constructor returns it has its header and full size, with
// the disk space reserved where the file system can do that; the tensors hold zeros until they are written. Such
// a file reads like a finished one, so write it under another name and rename it when all writers are done. Every
// failure (a full disk, a missing folder, a quota) is a UserError with the path and the system's reason; the file
// then stays as it is.
struct SafetensorsWriter {
  SafetensorsWriter(const std::string& path, const std::vector<SafetensorsSpec>& specs);

  // Makes another writer, possibly in another process, for a file that a SafetensorsWriter has laid out. Throws
  // UserError if it is not a valid safetensors file of F32 tensors, or cannot be opened for writing.
  static SafetensorsWriter attach(const std::string& path);

  // Elements first ... first + count - 1 of tensor `index` (in specs) = data[0 ... count - 1]. Safe to call from
  // several threads at once for ranges that do not overlap. Throws UserError if writing fails.
  void write_f32(size_t index, const float* data, int64_t first, int64_t count) const;

  // The CRC-32C of the header as passed to the system; it is not read back.
  uint32_t header_checksum() const { return header_checksum_; }

  // fsyncs what was written here and closes the file. The data is safe only once this has returned: without it, errors
  // that the system reports late are lost. Throws UserError for such an error.
  void finish();

 private:
  SafetensorsWriter() = default;

  struct Place {
    size_t offset;  // bytes from the start of the file
    int64_t count;  // elements
  };
  std::string path_;
  FileDescriptor file_;
  uint32_t header_checksum_ = 0;
  std::vector<Place> places_;
};

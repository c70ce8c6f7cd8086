// Scalars for TensorBoard: OUT/events.out.tfevents.*, a record for each step. A record is its length (8 bytes,
// little-endian), the length's masked CRC-32C, that many bytes, and theirs (TensorFlow's record_writer.h); the bytes
// are an Event of TensorFlow's event.proto.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>
#include "llmc/utils/files.h"

// Until open() is called, scalars are discarded.
struct EventFile {
  // Makes a file in folder `out` for a process that begins after `step` updates: TensorBoard drops what earlier files
  // have of later steps. Throws UserError if it cannot.
  void open(const std::string& out, int64_t step);

  // Values of a step, by tag. If they cannot be written, stderr says so, and that is the end of the file: the log has
  // all of them.
  void write(int64_t step, const std::vector<std::pair<std::string, double>>& scalars);

 private:
  std::string path_;
  FileDescriptor file_;
  void write_record(const std::string& event);
};

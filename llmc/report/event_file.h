// Scalars for TensorBoard, as an event file: a record for each step. A record is its length (8 bytes, little-endian),
// the length's masked CRC-32C, that many bytes, and theirs (TensorFlow's record_writer.h); the bytes are an Event of
// TensorFlow's event.proto.
#pragma once
#include <string>
#include "llmc/train/run_history.h"

// TensorBoard takes a file for its own by this beginning of its name.
inline constexpr char event_file_name[] = "events.out.tfevents.report";

// The bytes of the file: losses, norms, rates and speeds of all steps and validations, by tag ("train/loss"). An
// event's time is the seconds of training up to it. Values that the log does not have, or that are not finite, are left
// out.
std::string event_file(const RunHistory& run);

#include "event_file.h"
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>
#include "llmc/base/crc32c.h"

// ----------------------------------------------------------------------------
// Protocol buffers: a field is a key, its number and how it is encoded, and its value.

enum class Encoding { varint = 0, fixed64 = 1, length_delimited = 2, fixed32 = 5 };

static std::string varint(uint64_t n) {
  std::string bytes;
  for (; n >= 128; n >>= 7) bytes += char((n & 127) | 128);
  return bytes + char(n);
}

static std::string key(int field, Encoding encoding) { return varint(uint64_t(field) << 3 | uint64_t(encoding)); }

// The bytes of a number, on a little-endian machine.
template <class T>
static std::string bytes_of(T value) {
  std::string bytes(sizeof value, '\0');
  memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

static std::string text_field(int field, const std::string& value) {
  return key(field, Encoding::length_delimited) + varint(value.size()) + value;
}

// TensorFlow masks a CRC that stands beside what it is of, because the CRC of that would be no good check.
static std::string masked_crc(const std::string& bytes) {
  const uint32_t crc = crc32c(bytes.data(), bytes.size());
  return bytes_of(uint32_t((crc >> 15 | crc << 17) + 0xa282ead8u));
}

// Event: wall_time = 1, step = 2, and one of file_version = 3 and summary = 5.
static std::string record(double seconds, int64_t step, int what, const std::string& value) {
  const std::string event = key(1, Encoding::fixed64) + bytes_of(seconds) + key(2, Encoding::varint) +
                            varint(uint64_t(step)) + text_field(what, value);
  const std::string length = bytes_of(uint64_t(event.size()));
  return length + masked_crc(length) + event + masked_crc(event);
}

// ----------------------------------------------------------------------------

template <class Point>
static std::string scalars(const Point& point, const std::vector<std::pair<const char*, double Point::*>>& tags) {
  std::string summary;  // Summary: value = 1; of a Value: tag = 1, simple_value = 2
  for (const auto& [tag, what] : tags)
    if (std::isfinite(point.*what))
      summary += text_field(1, text_field(1, tag) + key(2, Encoding::fixed32) + bytes_of(float(point.*what)));
  return record(point.seconds, point.step, 5, summary);
}

std::string event_file(const RunHistory& run) {
  std::string file = record(0, 0, 3, "brain.Event:2");
  auto val = run.validations.begin();
  const auto add_validations = [&](int64_t before) {
    for (; val != run.validations.end() && val->step < before; ++val)
      file += scalars<ValPoint>(*val, {{"val/loss", &ValPoint::loss},
                                       {"val/ponder", &ValPoint::ponder},
                                       {"val/bits_per_byte", &ValPoint::bits_per_byte},
                                       {"val/accuracy", &ValPoint::accuracy}});
  };
  for (const TrainPoint& point : run.steps) {
    add_validations(point.step);
    file += scalars<TrainPoint>(point, {{"train/loss", &TrainPoint::loss},
                                        {"train/grad_norm", &TrainPoint::grad_norm},
                                        {"train/learning_rate", &TrainPoint::learning_rate},
                                        {"train/tokens_per_second", &TrainPoint::tokens_per_second},
                                        {"train/ponder", &TrainPoint::ponder}});
  }
  add_validations(INT64_MAX);
  return file;
}

#include "event_file.h"
#include <fcntl.h>
#include <unistd.h>
#include <cerrno>
#include <chrono>
#include <cstring>
#include "llmc/utils/crc32c.h"
#include "llmc/utils/error.h"
#include "llmc/utils/host_name.h"
#include "llmc/utils/message.h"

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

// Event: wall_time = 1, step = 2, and one of file_version = 3, summary = 5, session_log = 7.
static std::string event(int64_t step, int what, const std::string& value) {
  const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  return key(1, Encoding::fixed64) + bytes_of(now) + key(2, Encoding::varint) + varint(uint64_t(step)) +
         text_field(what, value);
}

// ----------------------------------------------------------------------------

void EventFile::open(const std::string& out, int64_t step) {
  const auto now =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  path_ = out + format("/events.out.tfevents.%010lld.%s.%d", (long long)now, host_name().c_str(), int(getpid()));
  file_ = FileDescriptor(::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (file_.fd < 0) user_error("%s: cannot be written: %s", path_, strerror(errno));
  write_record(event(0, 3, "brain.Event:2"));
  const std::string start = key(1, Encoding::varint) + varint(1);  // SessionLog: status = 1, START = 1
  write_record(event(step + 1, 7, start));
}

void EventFile::write(int64_t step, const std::vector<std::pair<std::string, double>>& scalars) {
  if (file_.fd < 0) return;
  std::string summary;  // Summary: value = 1; of a Value: tag = 1, simple_value = 2
  for (const auto& [tag, value] : scalars)
    summary += text_field(1, text_field(1, tag) + key(2, Encoding::fixed32) + bytes_of(float(value)));
  write_record(event(step, 5, summary));
}

// TensorFlow masks a CRC that stands beside what it is of, because the CRC of that would be no good check.
static std::string masked_crc(const std::string& bytes) {
  const uint32_t crc = crc32c(bytes.data(), bytes.size());
  return bytes_of(uint32_t((crc >> 15 | crc << 17) + 0xa282ead8u));
}

void EventFile::write_record(const std::string& event) {
  const std::string length = bytes_of(uint64_t(event.size())),
                    record = length + masked_crc(length) + event + masked_crc(event);
  if (write_all(file_.fd, record.data(), record.size()) == record.size()) return;
  print_warning(format("%s: cannot be written: %s; it ends here, log.jsonl has all", path_.c_str(), strerror(errno)));
  file_ = FileDescriptor();
}

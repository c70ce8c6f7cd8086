// TensorBoard's event files, read as the format's description has them. Runs from the repository's root, where
// `report` is.
#include <gtest/gtest.h>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>
#include "llmc/base/crc32c.h"
#include "report_test.h"

using EventFiles = Report;

namespace {

// A field of a protocol buffer: a number, or bytes.
struct Field {
  int number;
  uint64_t value;
  std::string bytes;
};

uint64_t number_at(const std::string& bytes, size_t at, size_t size) {  // little-endian
  uint64_t n = 0;
  for (size_t i = 0; i < size; i++) n |= uint64_t(uint8_t(bytes.at(at + i))) << 8 * i;
  return n;
}

uint64_t read_varint(const std::string& bytes, size_t& at) {
  uint64_t n = 0;
  for (int shift = 0;; shift += 7) {
    const uint8_t byte = uint8_t(bytes.at(at++));
    n |= uint64_t(byte & 127) << shift;
    if (byte < 128) return n;
  }
}

std::vector<Field> fields_of(const std::string& message) {
  std::vector<Field> fields;
  for (size_t at = 0; at < message.size();) {
    const uint64_t key = read_varint(message, at);
    Field f = {int(key >> 3), 0, ""};
    if ((key & 7) == 0) f.value = read_varint(message, at);
    else if ((key & 7) == 1) f.value = number_at(message, at, 8), at += 8;
    else if ((key & 7) == 5) f.value = number_at(message, at, 4), at += 4;
    else {
      const uint64_t size = read_varint(message, at);
      f.bytes = message.substr(at, size), at += size;
    }
    fields.push_back(f);
  }
  return fields;
}

// What a file's records hold, as "step tag value" lines, value as JSON; also "version ...".
std::vector<std::string> read_events(const std::string& path) {
  const auto mask = [](const std::string& bytes) {
    const uint32_t crc = crc32c_by_table(bytes.data(), bytes.size());
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
  };
  std::vector<std::string> lines;
  const std::string file = read_file(path);
  for (size_t at = 0; at < file.size();) {
    const size_t size = number_at(file, at, 8);
    EXPECT_EQ(number_at(file, at + 8, 4), mask(file.substr(at, 8)));
    const std::string event = file.substr(at + 12, size);
    EXPECT_EQ(number_at(file, at + 12 + size, 4), mask(event));
    at += size + 16;
    uint64_t step = 0;
    for (const Field& f : fields_of(event)) {
      if (f.number == 2) step = f.value;
      if (f.number == 3) lines.push_back("version " + f.bytes);
      if (f.number != 5) continue;
      for (const Field& value : fields_of(f.bytes)) {
        const std::vector<Field> parts = fields_of(value.bytes);
        const uint32_t bits = uint32_t(parts.at(1).value);
        float x;
        memcpy(&x, &bits, sizeof x);
        lines.push_back(std::to_string(step) + " " + parts.at(0).bytes + " " + json(x).dump());
      }
    }
  }
  return lines;
}

}  // namespace

// A part of the run is trained again after a resume, and a step has no loss.
TEST_F(EventFiles, HaveWhatTheLogHas) {
  std::string log = LogOf().head() + LogOf::val(0, "4.5") + LogOf::steps(1, 6, 9) + LogOf::val(5, "3.25") +
                    LogOf::steps(4, 9) + LogOf::step(10, "null") + LogOf::val(10, "2.5");
  const std::string out = write_run("out", log);
  ASSERT_EQ(run("./report --tensorboard " + out).exit_status, 0);
  std::vector<std::string> expected = {"version brain.Event:2", "0 val/loss 4.5"};
  for (int step = 1; step <= 10; step++) {
    const auto add = [&](const char* tag, double value) {
      expected.push_back(std::to_string(step) + " " + tag + " " + json(float(value)).dump());
    };
    if (step < 10) add("train/loss", (step < 4 ? 9 : 3) - 0.01 * step);
    add("train/grad_norm", 1.5), add("train/learning_rate", 0.001), add("train/tokens_per_second", 800);
  }
  expected.push_back("10 val/loss 2.5");
  const std::string file = out + "/events.out.tfevents.report";
  EXPECT_EQ(read_events(file), expected);
  write_file(out + "/log.jsonl", log + LogOf::step(11, "2"));
  ASSERT_EQ(run("./report --tensorboard " + out).exit_status, 0);
  EXPECT_EQ(read_events(file).size(), expected.size() + 4) << "the same file has what is new";
}

// TensorBoard's event files, read as the format's description has them. Runs from the repository's root, where the
// trainer is.
#include <gtest/gtest.h>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>
#include "command_line.h"
#include "llmc/utils/crc32c.h"

using EventFiles = CommandLine;

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

// What a file's records hold, as "step tag value" lines, value as JSON; also "version ..." and "start step".
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
      if (f.number == 7) lines.push_back("start " + std::to_string(step));
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

// BUG llmc/run/event_file.cpp: `(crc >> 15 | crc << 17) + 0xa282ead8u` -> `crc`
TEST_F(EventFiles, HaveWhatTheLogHas) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string command = trainer + "-i " + in("tokens.bin") + " -j " + in("tokens.bin") +
                              " --layers 2 --heads 2 --channels 16 --vocab-size 257 "
                              "--max-seq-len 16 -t 16 -b 1 -m 1 -v 100 -k constant --tensorboard -y -o " +
                              in("out");
  const auto event_files = [&] {
    std::vector<std::string> paths;
    for (const std::string& name : names_in(in("out")))
      if (name.rfind("events.out.tfevents.", 0) == 0) paths.push_back(in("out/" + name));
    return paths;
  };
  ASSERT_EQ(run(command + " -x 200").exit_status, 0);
  const std::vector<std::string> first = event_files();
  ASSERT_EQ(first.size(), 1u);
  std::vector<std::string> expected = {"version brain.Event:2", "start 1"};
  for (const json& line : read_log(in("out"))) {
    const auto add = [&](const char* tag, const char* key) {
      if (line.contains(key))
        expected.push_back(std::to_string(line.at("step").get<int>()) + " " + tag + " " +
                           json(line.at(key).get<float>()).dump());
    };
    add("train/loss", "loss"), add("train/grad_norm", "grad_norm"), add("train/learning_rate", "lr");
    add("train/tokens_per_second", "tokens_per_second"), add("val/loss", "val_loss");
    add("val/bits_per_byte", "val_bits_per_byte");
  }
  EXPECT_EQ(expected.size(), 2u + 4 * 200 + 2 * 3);
  EXPECT_EQ(read_events(first[0]), expected);
  ASSERT_EQ(run(command + " -x 201").exit_status, 0);
  ASSERT_EQ(event_files().size(), 2u);
  for (const std::string& path : event_files())
    EXPECT_EQ(read_events(path).at(1), path == first[0] ? "start 1" : "start 201");
  const Outcome o = run(trainer + "-i " + in("tokens.bin") + " --tensorboard");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_EQ(o.err, "error: --tensorboard: event files need a folder; name it with -o\n");
}

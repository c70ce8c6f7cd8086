// llmc/formats/safetensors: round trips, exact values, and refusal of every invalid file. Runs from the repository's
// root.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <thread>
#include "files.h"
#include "dev/test/helpers.h"
#include "llmc/base/error.h"
#include "llmc/formats/safetensors.h"

namespace fs = std::filesystem;

static const std::string kF32 = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";

// A file's bytes: length, header, data.
static std::string file_bytes(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

template <class T>
static std::string bytes_of(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// Null if there is none.
static const SafetensorsTensor* find(const SafetensorsFile& file, const std::string& name) {
  for (const SafetensorsTensor& t : file.tensors())
    if (t.name == name) return &t;
  return nullptr;
}

struct Safetensors : FolderTest {
  std::string path = in("model.safetensors");

  void put(const std::string& bytes) { write_file(path, bytes); }
  std::string get() { return read_file(path); }
  std::string open_complaint() {
    return error_of([&] { SafetensorsFile file(path); });
  }
  // The error for a file of these bytes, without the path that it must begin with.
  std::string refusal_of_bytes(const std::string& bytes) {
    put(bytes);
    const std::string text = open_complaint();
    if (text.rfind(path + ": ", 0) != 0) return "not refused as PATH: ..., but: " + text;
    return text.substr(path.size() + 2);
  }
  std::string refusal(const std::string& header, size_t data_bytes = 8) {
    return refusal_of_bytes(file_bytes(header, std::string(data_bytes, '\1')));
  }
  // The error for a tensor `a` with these JSON values.
  std::string refusal_of(const std::string& dtype, const std::string& shape, const std::string& offsets,
                         size_t data_bytes = 8) {
    return refusal(format(R"({"a":{"dtype":%s,"shape":%s,"data_offsets":%s}})", dtype.c_str(), shape.c_str(),
                          offsets.c_str()),
                   data_bytes);
  }
  // All values of a file with a single tensor of this dtype.
  template <class T>
  std::vector<float> read(const char* dtype, const std::vector<T>& values) {
    put(file_bytes(format(R"({"a":{"dtype":"%s","shape":[%zu],"data_offsets":[0,%zu]}})", dtype, values.size(),
                          values.size() * sizeof(T)),
                   bytes_of(values)));
    SafetensorsFile file(path);
    std::vector<float> out(values.size());
    file.read_f32(*find(file, "a"), out.data());
    return out;
  }
};

// ----------------------------------------------------------------------------
// Round trips

TEST_F(Safetensors, TensorsRoundTrip) {
  const std::vector<float> matrix = {1, -2, 3.5f, 1e-42f, -0.0f, 3.4e38f};
  SafetensorsWriter writer(path, {{"matrix", {2, 3}}, {"scalar", {}}, {"empty", {4, 0}}});
  writer.write_f32(1, std::vector<float>{42}.data(), 0, 1);
  writer.write_f32(0, matrix.data() + 2, 2, 4);
  writer.write_f32(0, matrix.data(), 0, 2);
  writer.write_f32(2, nullptr, 0, 0);
  writer.finish();

  SafetensorsFile file(path);
  ASSERT_EQ(file.tensors().size(), 3u);
  EXPECT_EQ(file.tensors()[0].name, "matrix");
  EXPECT_EQ(file.tensors()[0].dtype, "F32");
  EXPECT_EQ(file.tensors()[0].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(file.tensors()[0].num_elements(), 6);
  EXPECT_EQ(find(file, "scalar")->shape.size(), 0u);
  EXPECT_EQ(find(file, "scalar")->num_elements(), 1);
  EXPECT_EQ(find(file, "empty")->num_elements(), 0);
  EXPECT_EQ(find(file, "__metadata__"), nullptr);

  std::vector<float> out(6);
  file.read_f32(*find(file, "matrix"), out.data());
  EXPECT_EQ(bytes_of(out), bytes_of(matrix));
  file.read_f32(*find(file, "scalar"), out.data());
  EXPECT_EQ(out[0], 42);
  file.read_f32(*find(file, "empty"), nullptr);
}

TEST_F(Safetensors, ARangeOfATensorCanBeRead) {
  for (const char* dtype : {"F32", "F16", "BF16"}) {
    if (dtype == std::string("F32")) read(dtype, std::vector<float>{1, 2, 3, 4});
    else if (dtype == std::string("F16")) read(dtype, std::vector<uint16_t>{0x3c00, 0x4000, 0x4200, 0x4400});
    else read(dtype, std::vector<uint16_t>{0x3f80, 0x4000, 0x4040, 0x4080});
    SafetensorsFile file(path);
    const SafetensorsTensor& t = *find(file, "a");
    std::vector<float> out(5, -1);
    file.read_f32(t, out.data() + 1, 1, 2);
    EXPECT_EQ(out, (std::vector<float>{-1, 2, 3, -1, -1})) << dtype;
    file.read_f32(t, out.data(), 3);
    EXPECT_EQ(out, (std::vector<float>{4, 2, 3, -1, -1})) << dtype;
    file.read_f32(t, out.data(), 4);
    file.read_f32(t, out.data(), 0, 0);
    EXPECT_EQ(out[0], 4) << dtype;
  }
}

TEST_F(Safetensors, TheHeaderIsPaddedWithSpacesToEightBytes) {
  for (size_t extra = 0; extra < 9; extra++) {
    const std::string name(1 + extra, 'x');
    SafetensorsWriter writer(path, {{name, {2}}});
    writer.write_f32(0, std::vector<float>{1, 2}.data(), 0, 2);
    writer.finish();
    const std::string bytes = get();
    uint64_t length;
    memcpy(&length, bytes.data(), 8);
    EXPECT_EQ(length % 8, 0u);
    EXPECT_EQ(bytes.size(), 8 + length + 8);
    const std::string header = bytes.substr(8, length);
    EXPECT_EQ(header.substr(0, header.find_last_not_of(' ') + 1),
              R"({"__metadata__":{"format":"pt"},")" + name + R"(":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})");
  }
}

TEST_F(Safetensors, SeveralWritersInAnyOrderMakeTheSameFile) {
  const int64_t n = 10000, slice = 1250;
  std::vector<float> values(n);
  for (int64_t i = 0; i < n; i++) values[i] = float(i) + 0.5f;
  const std::vector<SafetensorsSpec> specs = {{"a", {n}}, {"b", {n / 10, 10}}};
  SafetensorsWriter whole(path, specs);
  for (size_t t = 0; t < 2; t++) whole.write_f32(t, values.data(), 0, n);
  whole.finish();
  const std::string expected = get();

  SafetensorsWriter first(path, specs);
  // Processes write their ranges, beginning with the last one.
  for (int64_t from = n - slice; from >= 0; from -= 2 * slice) {
    const pid_t child = fork();
    if (child == 0) {
      SafetensorsWriter writer = SafetensorsWriter::attach(path);
      for (size_t t = 0; t < 2; t++) writer.write_f32(t, values.data() + from, from, slice);
      writer.finish();
      _exit(0);
    }
    int status;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0);
  }
  std::vector<std::thread> threads;  // and from threads of this process
  for (int64_t from = 0; from < n; from += 2 * slice)
    for (size_t t = 0; t < 2; t++)
      threads.emplace_back([&, from, t] { first.write_f32(t, values.data() + from, from, slice); });
  for (std::thread& thread : threads) thread.join();
  first.finish();
  EXPECT_TRUE(get() == expected);
}

TEST_F(Safetensors, ALongerExistingFileIsReplaced) {
  put(std::string(100000, '!'));
  SafetensorsWriter(path, {{"a", {2}}}).finish();
  SafetensorsFile file(path);
  std::vector<float> out(2, -1);
  file.read_f32(file.tensors()[0], out.data());
  EXPECT_EQ(out, (std::vector<float>{0, 0}));
}

TEST_F(Safetensors, AMovedFileAndAMovedWriterStillWork) {
  SafetensorsWriter made(path, {{"a", {1}}});
  SafetensorsWriter writer = std::move(made);
  writer.write_f32(0, std::vector<float>{5}.data(), 0, 1);
  writer.finish();
  SafetensorsFile opened(path);
  SafetensorsFile file = std::move(opened);
  float out = 0;
  file.read_f32(*find(file, "a"), &out);
  EXPECT_EQ(out, 5);
}

TEST_F(Safetensors, NamesOfAnyTextRoundTrip) {
  const std::string name = "q\"\\\n\xc3\xa9";
  SafetensorsWriter(path, {{name, {1}}}).finish();
  SafetensorsFile file(path);
  EXPECT_NE(find(file, name), nullptr);
}

// ----------------------------------------------------------------------------
// Values

TEST_F(Safetensors, EveryF16IsExact) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); i++) all[i] = uint16_t(i);
  const std::vector<float> out = read("F16", all);
  for (uint32_t i = 0; i < 65536; i++) {
    const int exponent = i >> 10 & 31, mantissa = i & 1023;
    if (exponent == 31 && mantissa) {
      EXPECT_TRUE(std::isnan(out[i])) << i;
      continue;
    }
    double expected = exponent == 31 ? std::numeric_limits<double>::infinity()
                      : exponent     ? std::ldexp(1024 + mantissa, exponent - 25)
                                     : std::ldexp(mantissa, -24);
    if (i & 0x8000) expected = -expected;
    ASSERT_EQ(out[i], expected) << i;
    ASSERT_EQ(std::signbit(out[i]), std::signbit(expected)) << i;
  }
  EXPECT_EQ(out[0x0001], 5.9604644775390625e-8f);  // the smallest subnormal
  EXPECT_EQ(out[0x03ff], 6.0975551605224609375e-5f);
  EXPECT_EQ(out[0x7bff], 65504.0f);
}

TEST_F(Safetensors, EveryBf16IsExact) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); i++) all[i] = uint16_t(i);
  const std::vector<float> out = read("BF16", all);
  for (uint32_t i = 0; i < 65536; i++) {
    uint32_t bits;
    memcpy(&bits, &out[i], 4);
    ASSERT_EQ(bits, i << 16);
  }
  EXPECT_EQ(out[0x3f80], 1.0f);
  EXPECT_EQ(out[0xc049], -3.140625f);
}

TEST_F(Safetensors, F32KeepsItsBits) {
  const std::vector<uint32_t> bits = {0, 0x80000000, 1, 0x7f800000, 0xff800000, 0x7fc01234, 0x3f800001};
  EXPECT_EQ(bytes_of(read("F32", bits)), bytes_of(bits));
}

TEST_F(Safetensors, UnalignedDataIsRead) {
  for (size_t pad = 0; pad < 8; pad++) {
    put(file_bytes(kF32 + std::string(pad, ' '), bytes_of(std::vector<float>{1.5f, -2})));
    SafetensorsFile file(path);
    std::vector<float> out(2);
    file.read_f32(file.tensors()[0], out.data());
    EXPECT_EQ(out, (std::vector<float>{1.5f, -2}));
  }
}

TEST_F(Safetensors, AnIntegerTensorIsListedButNotReadAsFloats) {
  put(file_bytes(R"({"mask":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})", "abc"));
  SafetensorsFile file(path);
  EXPECT_EQ(file.tensors()[0].num_elements(), 3);
  float out[3];
  EXPECT_EQ(error_of([&] { file.read_f32(file.tensors()[0], out); }), path + ": tensor 'mask' is U8; only F32, F16 and "
                                                                             "BF16 can be read as floats");
  EXPECT_EQ(error_of([&] { SafetensorsWriter::attach(path); }), path + ": tensor 'mask' is U8; only F32 can be "
                                                                       "written");
}

TEST_F(Safetensors, AllGoldenModelsLoad) {
  int models = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator("dev/test/golden")) {
    if (!entry.is_directory()) continue;
    SafetensorsFile file((entry.path() / "model.safetensors").string());
    ASSERT_NE(find(file, "wte.weight"), nullptr);
    EXPECT_EQ(find(file, "wte.weight")->shape.size(), 2u);
    for (const SafetensorsTensor& t : file.tensors()) {
      std::vector<float> out(t.num_elements(), NAN);
      file.read_f32(t, out.data());
      for (float value : out) ASSERT_TRUE(std::isfinite(value)) << entry.path() << " " << t.name;
    }
    models++;
  }
  EXPECT_GE(models, 7);
}

TEST_F(Safetensors, AnyOrderWhiteSpaceAndEmptyTensorsAreValid) {
  put(file_bytes(R"({ "b" : {"data_offsets":[4,8], "dtype":"F32", "shape":[1]}, "none":{"dtype":"F32",)"
                 R"("shape":[0,5],"data_offsets":[4,4]},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}   )",
                 bytes_of(std::vector<float>{1, 2})));
  SafetensorsFile file(path);
  EXPECT_EQ(file.tensors()[0].name, "b");
  float out;
  file.read_f32(*find(file, "b"), &out);
  EXPECT_EQ(out, 2);
  put(file_bytes("{}", ""));
  EXPECT_EQ(SafetensorsFile(path).tensors().size(), 0u);
}

// ----------------------------------------------------------------------------
// Refusals: the file

TEST_F(Safetensors, RefusesAFileThatDoesNotExist) { EXPECT_EQ(open_complaint(), path + ": no such file"); }

TEST_F(Safetensors, RefusesAFolder) {
  path = folder;
  EXPECT_EQ(open_complaint(), path + ": is a folder, not a safetensors file");
}

TEST_F(Safetensors, RefusesAPipeAndDoesNotWaitForIt) {
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(open_complaint(), path + ": is not a regular file");
}

TEST_F(Safetensors, RefusesALinkToItselfWithTheSystemsReason) {
  ASSERT_EQ(symlink(path.c_str(), path.c_str()), 0);
  EXPECT_EQ(open_complaint(), path + ": cannot open it: Too many levels of symbolic links");
}

TEST_F(Safetensors, RefusesAFileOfFewerThanEightBytes) {
  for (size_t bytes : {0, 1, 7})
    EXPECT_EQ(refusal_of_bytes(std::string(bytes, '\0')),
              format("is not a safetensors file: it has only %zu bytes", bytes));
}

TEST_F(Safetensors, RefusesAHeaderLongerThanTheFile) {
  for (uint64_t length : {uint64_t(3), uint64_t(1) << 40, UINT64_MAX, UINT64_MAX - 7})
    EXPECT_EQ(refusal_of_bytes(bytes_of(std::vector<uint64_t>{length}) + "{}"), format("is not a safetensors file, or "
                                                                                       "is cut short: its header "
                                                                                       "should have %llu bytes, and "
                                                                                       "the file has 2",
                                                                                       (unsigned long long)length));
}

TEST_F(Safetensors, RefusesAHeaderOfMoreThan100MB) {
  put(bytes_of(std::vector<uint64_t>{100'000'001}));
  ASSERT_EQ(truncate(path.c_str(), 8 + 100'000'001), 0);
  EXPECT_EQ(open_complaint(), path + ": its header of 100000001 bytes is longer than the format's limit, 100000000");
}

TEST_F(Safetensors, RefusesEveryTruncationOfAValidFile) {
  const std::string whole = file_bytes(kF32, std::string(8, '\1'));
  for (size_t bytes = 0; bytes < whole.size(); bytes++)
    EXPECT_EQ(refusal_of_bytes(whole.substr(0, bytes)).rfind("not refused", 0), std::string::npos) << bytes;
  put(whole);
  EXPECT_EQ(open_complaint(), "");
}

// ----------------------------------------------------------------------------
// Refusals: the header's JSON

TEST_F(Safetensors, RefusesAHeaderThatIsNoObject) {
  for (const char* header : {"", "[]", "\"a\"", "1", " {}", "\xef\xbb\xbf{}", "null"})
    EXPECT_EQ(refusal(header), "its header is not a JSON object: it does not begin with {") << header;
}

TEST_F(Safetensors, RefusesAHeaderThatIsNotJson) {
  for (const char* header : {"{", "{]", "{\"a\"}", "{\"a\":}", "{}{}", "{},", "{'a':1}", "{/**/}", "{\"a\":tru",
                             "{\"a\":\"\\ud800\"}", "{\"a\nb\":{}}"})
    EXPECT_EQ(refusal(header).rfind("the header is not valid JSON (at its byte ", 0), 0u) << header;
  EXPECT_EQ(refusal("{]"), "the header is not valid JSON (at its byte 2)");
  EXPECT_EQ(refusal("{\"a\":1e999}"), "the header has a number that is out of range");
}

TEST_F(Safetensors, RefusesAZeroByteInTheHeader) {
  EXPECT_EQ(refusal(std::string("{}\0garbage", 10)), "the header is not valid JSON (at its byte 3)");
}

TEST_F(Safetensors, RefusesAHeaderThatIsNotUtf8) {
  EXPECT_EQ(refusal("{\"\xff\":{}}"), "the header is not UTF-8 (at its byte 3)");
  EXPECT_EQ(refusal("{\"\xc0\xaf\":{}}"), "the header is not UTF-8 (at its byte 3)");      // an overlong /
  EXPECT_EQ(refusal("{\"\xed\xa0\x80\":{}}"), "the header is not UTF-8 (at its byte 4)");  // a lone surrogate
}

TEST_F(Safetensors, RefusesDeepNestingAtOnce) {
  const size_t deep = 10'000'000;
  std::string objects = "{";
  for (size_t i = 0; i < deep / 5; i++) objects += "\"a\":{";
  for (const std::string& header :
       {"{\"a\":" + std::string(deep, '['), objects, "{\"a\":{\"shape\":" + std::string(deep, '[')})
    EXPECT_EQ(refusal(header), "the header is nested deeper than tensors are");
}

TEST_F(Safetensors, RefusesTheSameKeyTwice) {
  const std::string a = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  EXPECT_EQ(refusal("{" + a + "," + a + "}"), "the header has 'a' twice");
  EXPECT_EQ(refusal("{" + a + R"(,"\u0061":{}})"), "the header has 'a' twice");
  EXPECT_EQ(refusal(R"({"__metadata__":{},"__metadata__":{}})"), "the header has '__metadata__' twice");
  EXPECT_EQ(refusal(R"({"__metadata__":{"k":"1","k":"2"}})"), "the header has 'k' twice");
  EXPECT_EQ(refusal(R"({"a":{"dtype":"F32","dtype":"F32"}})"), "the header has 'dtype' twice");
  EXPECT_EQ(refusal(R"({"a":{"shape":[1],"shape":[2]}})"), "the header has 'shape' twice");
  EXPECT_EQ(refusal(R"({"a":{"data_offsets":[0,8],"data_offsets":[0,8]}})"), "the header has 'data_offsets' twice");
}

TEST_F(Safetensors, RefusesMetadataOtherThanStrings) {
  for (const char* metadata : {"1", "null", "[]", "\"a\"", "{\"a\":1}", "{\"a\":{}}", "{\"a\":[]}", "{\"a\":null}"})
    EXPECT_EQ(refusal(format("{\"__metadata__\":%s}", metadata)), "__metadata__ is not an object of strings")
        << metadata;
}

// ----------------------------------------------------------------------------
// Refusals: a tensor

TEST_F(Safetensors, RefusesATensorThatIsNoObject) {
  for (const char* value : {"1", "-1", "1.5", "null", "true", "[]", "\"F32\""})
    EXPECT_EQ(refusal(format("{\"a\":%s}", value)), "tensor 'a' is not an object") << value;
}

TEST_F(Safetensors, RefusesATensorWithAFieldMissing) {
  EXPECT_EQ(refusal(R"({"a":{}})"), "tensor 'a' has no dtype");
  EXPECT_EQ(refusal(R"({"a":{"shape":[2],"data_offsets":[0,8]}})"), "tensor 'a' has no dtype");
  EXPECT_EQ(refusal(R"({"a":{"dtype":"F32","data_offsets":[0,8]}})"), "tensor 'a' has no shape");
  EXPECT_EQ(refusal(R"({"a":{"dtype":"F32","shape":[2]}})"), "tensor 'a' has no data_offsets");
  // The fields of another tensor do not count.
  EXPECT_EQ(refusal(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{}})"), "tensor 'b' has no dtype");
}

TEST_F(Safetensors, RefusesATensorWithAnUnknownField) {
  EXPECT_EQ(refusal(R"({"a":{"strides":[1]}})"), "tensor 'a' has an unknown field 'strides'");
}

TEST_F(Safetensors, RefusesAWrongDtype) {
  for (const char* dtype : {"32", "null", "[\"F32\"]", "{}", "-1", "true", "0.5"})
    EXPECT_EQ(refusal_of(dtype, "[2]", "[0,8]"), "tensor 'a': its dtype is not a string") << dtype;
  for (const char* dtype : {"F31", "f32", "", "F32 "})
    EXPECT_EQ(refusal_of(format("\"%s\"", dtype), "[2]", "[0,8]"),
              format("tensor 'a' has the unknown dtype '%s'", dtype));
}

TEST_F(Safetensors, RefusesAWrongShape) {
  for (const char* shape : {"2", "\"2\"", "{}", "null", "[-2]", "[-0]", "[2.0]", "[\"2\"]", "[null]", "[true]", "[[2]]",
                            "[{}]", "[9223372036854775808]", "[18446744073709551618]", "[1e0]"})
    EXPECT_EQ(refusal_of("\"F32\"", shape, "[0,8]"), "tensor 'a': its shape is not a list of integers between 0 and "
                                                     "2^63 - 1")
        << shape;
}

TEST_F(Safetensors, RefusesAShapeThatOverflows) {
  for (const char* shape : {"[4294967296,4294967296]", "[9223372036854775807]", "[2305843009213693952]",
                            "[4611686018427387904,4,2]", "[0,4294967296,4294967296]", "[4294967296,4294967296,0]"})
    EXPECT_EQ(refusal_of("\"F32\"", shape, "[0,8]"), "tensor 'a': its shape overflows 63 bits") << shape;
}

TEST_F(Safetensors, RefusesMoreThan64Dimensions) {
  std::string ones = "[2";
  for (int i = 1; i < 64; i++) ones += ",1";
  put(file_bytes(format(R"({"a":{"dtype":"F32","shape":%s],"data_offsets":[0,8]}})", ones.c_str()),
                 std::string(8, '\1')));
  EXPECT_EQ(open_complaint(), "");
  EXPECT_EQ(refusal_of("\"F32\"", ones + ",1]", "[0,8]"), "tensor 'a' has more than 64 dimensions");
}

TEST_F(Safetensors, RefusesWrongDataOffsets) {
  for (const char* offsets : {"8", "\"0,8\"", "{}", "null", "[]", "[8]", "[0,8,8]", "[0,-8]", "[0,8.0]", "[0,\"8\"]",
                              "[[0,8]]", "[0,9223372036854775808]", "[0,18446744073709551624]"})
    EXPECT_EQ(refusal_of("\"F32\"", "[2]", offsets), "tensor 'a': its data_offsets are not two integers between 0 and "
                                                     "2^63 - 1")
        << offsets;
}

TEST_F(Safetensors, RefusesATensorThatEndsBeforeItBegins) {
  EXPECT_EQ(refusal_of("\"F32\"", "[2]", "[8,0]"), "tensor 'a' begins at byte 8, after its end, 0");
}

TEST_F(Safetensors, RefusesATensorThatEndsPastTheData) {
  EXPECT_EQ(refusal_of("\"F32\"", "[2]", "[0,8]", 7), "tensor 'a' ends at byte 8, but the file has 7 bytes of data; it "
                                                      "may be cut short");
  EXPECT_EQ(refusal_of("\"U8\"", "[9223372036854775807]", "[0,9223372036854775807]"), "tensor 'a' ends at byte "
                                                                                      "9223372036854775807, but the "
                                                                                      "file has 8 bytes of data; it "
                                                                                      "may be cut short");
}

TEST_F(Safetensors, RefusesASizeThatDoesNotFitShapeAndDtype) {
  EXPECT_EQ(refusal_of("\"F32\"", "[3]", "[0,8]"), "tensor 'a' has 8 bytes, but its shape and dtype need 12");
  EXPECT_EQ(refusal_of("\"F16\"", "[2]", "[0,8]"), "tensor 'a' has 8 bytes, but its shape and dtype need 4");
  EXPECT_EQ(refusal_of("\"F32\"", "[]", "[0,8]"), "tensor 'a' has 8 bytes, but its shape and dtype need 4");
  EXPECT_EQ(refusal_of("\"F32\"", "[2,0]", "[0,8]"), "tensor 'a' has 8 bytes, but its shape and dtype need 0");
}

TEST_F(Safetensors, KnowsTheSizeOfEveryDtype) {
  const std::map<std::string, int> bits = {{"BOOL", 8},    {"U8", 8},   {"I8", 8},   {"F8_E4M3", 8}, {"F8_E5M2", 8},
                                           {"F8_E8M0", 8}, {"I16", 16}, {"U16", 16}, {"F16", 16},    {"BF16", 16},
                                           {"I32", 32},    {"U32", 32}, {"F32", 32}, {"I64", 64},    {"U64", 64},
                                           {"F64", 64},    {"C64", 64}};
  for (const auto& [dtype, size] : bits)
    EXPECT_EQ(refusal_of("\"" + dtype + "\"", "[3]", "[0,8]"),
              format("tensor 'a' has 8 bytes, but its shape and dtype need %d", 3 * size / 8));
}

TEST_F(Safetensors, RefusesTensorsThatOverlap) {
  const char* two = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                    R"("b":{"dtype":"F32","shape":[%d],"data_offsets":[%d,%d]}})";
  EXPECT_EQ(refusal(format(two, 2, 4, 12), 12), "tensors 'a' and 'b' overlap");
  EXPECT_EQ(refusal(format(two, 2, 0, 8), 8), "tensors 'a' and 'b' overlap");  // the same bytes
  EXPECT_EQ(refusal(format(two, 1, 4, 8), 8), "tensors 'a' and 'b' overlap");  // one inside the other
  EXPECT_EQ(refusal(format(two, 1, 0, 4), 8), "tensors 'b' and 'a' overlap");
  EXPECT_EQ(refusal(format(two, 0, 4, 4), 8), "tensors 'a' and 'b' overlap");  // an empty tensor inside another
}

TEST_F(Safetensors, RefusesBytesThatBelongToNoTensor) {
  EXPECT_EQ(refusal(kF32, 11), "the last 3 bytes belong to no tensor");
  EXPECT_EQ(refusal("{}", 8), "the last 8 bytes belong to no tensor");
  EXPECT_EQ(refusal_of("\"F32\"", "[2]", "[4,12]", 12), "bytes 0 to 4, before tensor 'a', belong to no tensor");
  EXPECT_EQ(refusal(R"({"b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]},)"
                    R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
                    16),
            "bytes 8 to 12, before tensor 'b', belong to no tensor");
}

TEST_F(Safetensors, HostileNamesAreEscapedAndCutInMessages) {
  EXPECT_EQ(refusal(R"({"\u001b[31m\n\u0000'\\\u202e\u007f":1})"),
            R"(tensor '\x1b[31m\x0a\x00'\\\xe2\x80\xae\x7f' is not an object)");
  EXPECT_EQ(refusal("{\"" + std::string(1'000'000, 'n') + "\":1}"),
            "tensor '" + std::string(80, 'n') + "...' is not an object");
  EXPECT_EQ(refusal("{\"" + std::string(80, 'n') + "\":1}"), "tensor '" + std::string(80, 'n') + "' is not an object");
  EXPECT_EQ(refusal_of("\"" + std::string(1000, 'd') + "\"", "[2]", "[0,8]"),
            "tensor 'a' has the unknown dtype '" + std::string(80, 'd') + "...'");
  EXPECT_EQ(refusal("{\"%s%n\":1}"), "tensor '%s%n' is not an object");
}

// ----------------------------------------------------------------------------
// Failing disks. A file size limit simulates a full disk without root (both make a write partial, then fail the next);
// /dev/full is a full disk, but only for the header. Other failures are simulated by replacing the system calls.

static int fsync_error = 0, fallocate_error = 0;  // fail with this, every time
static int pwrite_interruptions = 0;              // fail this often with EINTR
static bool pwrite_stuck = false;                 // write nothing and report nothing

extern "C" int fsync(int fd) {
  errno = fsync_error;
  return fsync_error ? -1 : int(syscall(SYS_fsync, fd));
}

extern "C" int fallocate(int fd, int mode, off_t offset, off_t length) {
  errno = fallocate_error;
  return fallocate_error ? -1 : int(syscall(SYS_fallocate, fd, mode, offset, length));
}

extern "C" ssize_t pwrite(int fd, const void* bytes, size_t count, off_t offset) {
  if (pwrite_stuck) return 0;
  errno = EINTR;
  return pwrite_interruptions-- > 0 ? -1 : syscall(SYS_pwrite64, fd, bytes, count, offset);
}

// Runs `action` with files limited to this many bytes, and returns its error.
static std::string complaint_with_limit(size_t bytes, const std::function<void()>& action) {
  rlimit old;
  EXPECT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  auto old_handler = signal(SIGXFSZ, SIG_IGN);  // otherwise the signal ends the process before write() fails
  rlimit limit = {bytes, old.rlim_max};
  EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const std::string text = error_of(action);
  EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
  signal(SIGXFSZ, old_handler);
  return text;
}

TEST_F(Safetensors, ADiskTooFullForTheTensorsIsDetectedFirst) {
  EXPECT_EQ(complaint_with_limit(4096,
                                 [&] {
                                   SafetensorsWriter(path, {{"a", {1024}}});
                                 }),
            path + ": cannot write it: File too large");
}

TEST_F(Safetensors, ADiskTooFullForTheHeaderIsAnError) {
  EXPECT_EQ(complaint_with_limit(16,
                                 [&] {
                                   SafetensorsWriter(path, {{"a", {0}}});
                                 }),
            path + ": cannot write it: File too large");
  EXPECT_EQ(error_of([&] {
              SafetensorsWriter("/dev/full", {{"a", {1024}}});
            }),
            "/dev/full: cannot write it: No space left on device");
}

TEST_F(Safetensors, APartialWriteIsAnError) {
  const std::vector<float> values(4096, 1.0f);
  SafetensorsWriter writer(path, {{"a", {4096}}});
  EXPECT_EQ(complaint_with_limit(8192, [&] { writer.write_f32(0, values.data(), 0, 4096); }), path + ": cannot write "
                                                                                                     "it: File too "
                                                                                                     "large");
  EXPECT_EQ(complaint_with_limit(8192, [&] { writer.write_f32(0, values.data(), 4000, 96); }), path + ": cannot write "
                                                                                                      "it: File too "
                                                                                                      "large");
  EXPECT_EQ(complaint_with_limit(8192, [&] { writer.write_f32(0, values.data(), 0, 96); }), "");
  writer.write_f32(0, values.data(), 0, 4096);  // without the limit everything is written
  writer.finish();
  SafetensorsFile file(path);
  std::vector<float> out(4096);
  file.read_f32(file.tensors()[0], out.data());
  EXPECT_TRUE(out == values);
}

TEST_F(Safetensors, AnInterruptedWriteIsRetried) {
  const std::vector<float> values = {1, 2};
  SafetensorsWriter writer(path, {{"a", {2}}});
  pwrite_interruptions = 3;
  writer.write_f32(0, values.data(), 0, 2);
  writer.finish();
  SafetensorsFile file(path);
  std::vector<float> out(2);
  file.read_f32(file.tensors()[0], out.data());
  EXPECT_EQ(out, values);
}

TEST_F(Safetensors, AWriteWithoutProgressIsAnError) {
  SafetensorsWriter writer(path, {{"a", {1}}});
  const float value = 1;
  pwrite_stuck = true;
  const std::string full = path + ": cannot write it: No space left on device";
  EXPECT_EQ(error_of([&] { writer.write_f32(0, &value, 0, 1); }), full);
  pwrite_stuck = false;
}

TEST_F(Safetensors, ErrorsOfFsyncAndCloseAreUserErrors) {
  for (int error : {ENOSPC, EIO, EDQUOT}) {
    SafetensorsWriter writer(path, {{"a", {1}}});
    fsync_error = error;
    EXPECT_EQ(error_of([&] { writer.finish(); }), path + ": cannot write it: " + strerror(error));
    fsync_error = 0;
  }
}

TEST_F(Safetensors, WithoutReservedSpaceTheFileStillHasItsFullSize) {
  fallocate_error = EOPNOTSUPP;
  SafetensorsWriter writer(path, {{"a", {1024}}});
  EXPECT_EQ(complaint_with_limit(2048,
                                 [&] {
                                   SafetensorsWriter(folder + "/other", {{"a", {1024}}});
                                 }),
            folder + "/other: cannot write it: File too large");
  fallocate_error = ENOSPC;
  EXPECT_EQ(error_of([&] {
              SafetensorsWriter(folder + "/other", {{"a", {1024}}});
            }),
            folder + "/other: cannot write it: No space left on device");
  fallocate_error = 0;
  writer.finish();
  EXPECT_EQ(SafetensorsFile(path).tensors()[0].num_elements(), 1024);
}

TEST_F(Safetensors, WritingIntoAMissingFolderIsAUserError) {
  path = folder + "/missing/model.safetensors";
  EXPECT_EQ(error_of([&] {
              SafetensorsWriter(path, {{"a", {1}}});
            }),
            path + ": cannot write it: No such file or directory");
  EXPECT_EQ(error_of([&] { SafetensorsWriter::attach(path); }), path + ": no such file");
}

TEST_F(Safetensors, WritingToAFolderIsAUserError) {
  EXPECT_EQ(error_of([&] { SafetensorsWriter(folder, {{"a", {1}}}); }), folder + ": cannot write it: Is a directory");
}

// Broken invariants abort.
TEST_F(Safetensors, RangesOutsideATensorAreABrokenInvariant) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  SafetensorsWriter writer(path, {{"a", {4}}});
  SafetensorsFile file(path);
  float values[8] = {};
  EXPECT_DEATH(writer.write_f32(0, values, 3, 2), "broken invariant");
  EXPECT_DEATH(writer.write_f32(0, values, -1, 1), "broken invariant");
  EXPECT_DEATH(writer.write_f32(1, values, 0, 1), "broken invariant");
  EXPECT_DEATH(file.read_f32(file.tensors()[0], values, 3, 2), "broken invariant");
  EXPECT_DEATH(file.read_f32(file.tensors()[0], values, 5), "broken invariant");
  EXPECT_DEATH(file.read_f32(file.tensors()[0], values, 0, -2), "broken invariant");
  EXPECT_DEATH(SafetensorsWriter(path, {{"a", {1}}, {"a", {1}}}), "broken invariant");
  writer.finish();
  EXPECT_DEATH(writer.write_f32(0, values, 0, 1), "broken invariant");
}

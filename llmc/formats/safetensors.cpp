#include "safetensors.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include "llmc/base/bf16_bits.h"
#include "llmc/base/crc32c.h"
#include "llmc/base/error.h"
#include "llmc/base/files.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors files are little-endian, and so is this code");

using nlohmann::json;

static const size_t kLengthBytes = 8;               // the header's length, a uint64
static const size_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
static const size_t kMaxDimensions = 64;            // what PyTorch can hold
static const size_t kMaxPrinted = 80;               // characters of a file's strings that reach a terminal
static const char* const kMetadataKey = "__metadata__";

// ----------------------------------------------------------------------------
// Helpers: quoting names, dtypes, sizes, conversions

// A string from a file, for a message: in quotes, everything but printable ASCII escaped, cut after kMaxPrinted
// characters.
static std::string escaped(const std::string& text) {
  std::string shown;
  for (unsigned char c : text) {
    std::string next = c == '\\' ? "\\\\" : c < 0x20 || c > 0x7e ? format("\\x%02x", c) : std::string(1, c);
    if (shown.size() + next.size() > kMaxPrinted) return "'" + shown + "...'";
    shown += next;
  }
  return "'" + shown + "'";
}

// Bytes per element; 0 for an unknown dtype.
static int64_t dtype_bytes(const std::string& dtype) {
  static const std::map<std::string, int64_t> bytes = {{"BOOL", 1},    {"U8", 1},      {"I8", 1},  {"F8_E4M3", 1},
                                                       {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"I16", 2}, {"U16", 2},
                                                       {"F16", 2},     {"BF16", 2},    {"I32", 4}, {"U32", 4},
                                                       {"F32", 4},     {"I64", 8},     {"U64", 8}, {"F64", 8},
                                                       {"C64", 8}};
  auto found = bytes.find(dtype);
  return found == bytes.end() ? 0 : found->second;
}

// *bytes = the product of the shape times element_bytes; false if it overflows. Dimensions of 0 are
// left out of the check for overflow: the product of the others must fit, so that num_elements() is safe.
static bool byte_size(const std::vector<int64_t>& shape, int64_t element_bytes, int64_t* bytes) {
  int64_t product = element_bytes;
  for (int64_t dim : shape)
    if (dim < 0 || (dim > 0 && __builtin_mul_overflow(product, dim, &product))) return false;
  *bytes = std::count(shape.begin(), shape.end(), 0) > 0 ? 0 : product;
  return true;
}

static float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// IEEE half: 1 sign bit, 5 of exponent (bias 15), 10 of mantissa.
static float float_from_f16(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return float_from_bits(sign | 0x7f800000 | mantissa << 13);  // infinity and NaN
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * (mantissa * 0x1p-24f);         // zero and subnormals: exact
  return float_from_bits(sign | (exponent + 127 - 15) << 23 | mantissa << 13);
}

// ----------------------------------------------------------------------------
// The header

// Returns the header as JSON, and in `names` its keys, in their order. A key that occurs twice, which a JSON tree would
// keep once, and nesting deeper than a header's are errors while it is parsed.
static json parse_header(const std::string& path, const char* begin, const char* end, std::vector<std::string>& names) {
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  auto check = [&](int depth, json::parse_event_t event, const json& value) {
    if (depth > 4) user_error("%s: the header is nested deeper than tensors are", path);
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event != json::parse_event_t::key) return true;
    const std::string& key = value.get_ref<const std::string&>();
    if (!keys.back().insert(key).second) user_error("%s: the header has %s twice", path, escaped(key));
    if (keys.size() == 1) names.push_back(key);
    return true;
  };
  try {
    return json::parse(begin, end, check);
  } catch (const json::parse_error& e) {
    const bool utf8 = strstr(e.what(), "ill-formed UTF-8");
    user_error("%s: the header is not %s (at its byte %zu)", path, utf8 ? "UTF-8" : "valid JSON", e.byte);
  } catch (const json::out_of_range&) { user_error("%s: the header has a number that is out of range", path); }
}

static void check_metadata(const std::string& path, const json& metadata) {
  const bool are_strings =
      std::all_of(metadata.begin(), metadata.end(), [](const json& value) { return value.is_string(); });
  if (!metadata.is_object() || !are_strings) user_error("%s: %s is not an object of strings", path, kMetadataKey);
}

static SafetensorsTensor tensor_of(const std::string& path, const std::string& name, const json& fields) {
  const std::string where = path + ": tensor " + escaped(name);
  if (!fields.is_object()) user_error("%s is not an object", where);
  for (const auto& [field, value] : fields.items())
    if (field != "dtype" && field != "shape" && field != "data_offsets")
      user_error("%s has an unknown field %s", where, escaped(field));
  for (const char* needed : {"dtype", "shape", "data_offsets"})
    if (!fields.contains(needed)) user_error("%s has no %s", where, needed);
  auto numbers = [&](const char* field, const char* what) {
    std::vector<int64_t> found;
    bool fits = fields[field].is_array();
    for (const json& number : fields[field]) {
      fits = fits && number.is_number_unsigned() && number.get<uint64_t>() <= INT64_MAX;
      if (fits) found.push_back(number.get<int64_t>());
    }
    fits = fits && (field == std::string("shape") || found.size() == 2);
    if (!fits) user_error("%s: its %s between 0 and 2^63 - 1", where, what);
    return found;
  };
  if (!fields["dtype"].is_string()) user_error("%s: its dtype is not a string", where);
  const std::vector<int64_t> shape = numbers("shape", "shape is not a list of integers");
  const std::vector<int64_t> offsets = numbers("data_offsets", "data_offsets are not two integers");
  if (shape.size() > kMaxDimensions) user_error("%s has more than %zu dimensions", where, kMaxDimensions);
  return {name, fields["dtype"], shape, size_t(offsets[0]), size_t(offsets[1])};
}

// Throws unless t's bytes lie in the data part and are as many as its shape and dtype need.
static void check_tensor(const std::string& path, const SafetensorsTensor& t, size_t data_bytes) {
  const std::string where = path + ": tensor " + escaped(t.name);
  const int64_t element_bytes = dtype_bytes(t.dtype);
  int64_t bytes;
  if (element_bytes == 0) user_error("%s has the unknown dtype %s", where, escaped(t.dtype));
  if (!byte_size(t.shape, element_bytes, &bytes)) user_error("%s: its shape overflows 63 bits", where);
  if (t.begin > t.end) user_error("%s begins at byte %zu, after its end, %zu", where, t.begin, t.end);
  if (t.end > data_bytes)
    user_error("%s ends at byte %zu, but the file has %zu bytes of data; it may be cut short", where, t.end,
               data_bytes);
  if (t.end - t.begin != size_t(bytes))
    user_error("%s has %zu bytes, but its shape and dtype need %zu", where, t.end - t.begin, size_t(bytes));
}

// Throws unless the tensors cover the data part exactly once. Each tensor has passed check_tensor.
static void check_cover(const std::string& path, const std::vector<SafetensorsTensor>& tensors, size_t data_bytes) {
  std::vector<const SafetensorsTensor*> sorted;
  for (const SafetensorsTensor& t : tensors) sorted.push_back(&t);
  std::sort(sorted.begin(), sorted.end(), [](const SafetensorsTensor* a, const SafetensorsTensor* b) {
    return a->begin != b->begin ? a->begin < b->begin : a->end < b->end;
  });
  size_t covered = 0;
  const SafetensorsTensor* previous = nullptr;
  for (const SafetensorsTensor* t : sorted) {
    if (t->begin < covered)
      user_error("%s: tensors %s and %s overlap", path, escaped(previous->name), escaped(t->name));
    if (t->begin > covered)
      user_error("%s: bytes %zu to %zu, before tensor %s, belong to no tensor", path, covered, t->begin,
                 escaped(t->name));
    covered = t->end;
    previous = t;
  }
  if (covered < data_bytes) user_error("%s: the last %zu bytes belong to no tensor", path, data_bytes - covered);
}

// ----------------------------------------------------------------------------
// Reading

void Unmap::operator()(const uint8_t* start) const { munmap(const_cast<uint8_t*>(start), bytes); }

// The whole of the file at path, mapped.
static std::unique_ptr<const uint8_t[], Unmap> map_file(const std::string& path) {
  // O_NONBLOCK: opening a pipe without a writer must not block. It has no effect on a regular file.
  FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.fd < 0 && errno == ENOENT) user_error("%s: no such file", path);
  struct stat info;
  if (file.fd < 0 || fstat(file.fd, &info) != 0) user_error("%s: cannot open it: %s", path, strerror(errno));
  if (S_ISDIR(info.st_mode)) user_error("%s: is a folder, not a safetensors file", path);
  if (!S_ISREG(info.st_mode)) user_error("%s: is not a regular file", path);
  const size_t bytes = info.st_size;
  if (bytes < kLengthBytes) user_error("%s: is not a safetensors file: it has only %zu bytes", path, bytes);
  void* start = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (start == MAP_FAILED) user_error("%s: cannot map its %zu bytes: %s", path, bytes, strerror(errno));
  return {static_cast<const uint8_t*>(start), Unmap{bytes}};
}

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path), file_(map_file(path)) {
  const size_t after_length = file_.get_deleter().bytes - kLengthBytes;
  uint64_t header_bytes;
  memcpy(&header_bytes, file_.get(), kLengthBytes);
  refuse_lfs_pointer(path, file_.get(), file_.get_deleter().bytes);
  if (header_bytes > after_length)
    user_error("%s: is not a safetensors file, or is cut short: its header should have %llu bytes, and the file has "
               "%zu",
               path, (unsigned long long)header_bytes, after_length);
  if (header_bytes > kMaxHeaderBytes)
    user_error("%s: its header of %zu bytes is longer than the format's limit, %zu", path, size_t(header_bytes),
               kMaxHeaderBytes);
  const char* header = reinterpret_cast<const char*>(file_.get()) + kLengthBytes;
  data_ = file_.get() + kLengthBytes + header_bytes;
  data_bytes_ = after_length - header_bytes;

  if (header_bytes == 0 || header[0] != '{')
    user_error("%s: its header is not a JSON object: it does not begin with {", path);
  // The parser takes a zero byte for the end of its input and would ignore what follows.
  if (const void* zero = memchr(header, 0, header_bytes))
    user_error("%s: the header is not valid JSON (at its byte %zu)", path,
               size_t(static_cast<const char*>(zero) - header) + 1);
  std::vector<std::string> names;
  const json entries = parse_header(path_, header, header + header_bytes, names);
  for (const std::string& name : names) {
    if (name == kMetadataKey) check_metadata(path_, entries[name]);
    else tensors_.push_back(tensor_of(path_, name, entries[name]));
  }
  for (const SafetensorsTensor& t : tensors_) check_tensor(path_, t, data_bytes_);
  check_cover(path_, tensors_, data_bytes_);
}

SafetensorsChecksums SafetensorsFile::checksums() const {
  SafetensorsChecksums sums;
  sums.header = crc32c(file_.get(), data_offset());
  for (const SafetensorsTensor& t : tensors_) sums.tensors.push_back({t.name, 0});
#pragma omp parallel for schedule(dynamic)
  for (size_t i = 0; i < tensors_.size(); i++)
    sums.tensors[i].second = crc32c(data_ + tensors_[i].begin, tensors_[i].end - tensors_[i].begin);
  return sums;
}

void SafetensorsFile::read_f32(const SafetensorsTensor& t, float* out, int64_t first, int64_t count) const {
  CHECK(t.begin <= t.end && t.end <= data_bytes_);
  const int64_t num_elements = t.num_elements();
  CHECK(0 <= first && first <= num_elements && -1 <= count && count <= num_elements - first);
  if (count == -1) count = num_elements - first;

  auto convert = [&](float (*from_bits)(uint16_t)) {
    const uint8_t* from = data_ + t.begin + first * sizeof(uint16_t);
    for (int64_t i = 0; i < count; i++) {
      uint16_t bits;
      memcpy(&bits, from + i * sizeof(bits), sizeof(bits));  // the header has any length, so nothing is aligned
      out[i] = from_bits(bits);
    }
  };
  if (t.dtype == "F16") convert(float_from_f16);
  else if (t.dtype == "BF16") convert(float_from_bf16);
  else if (t.dtype != "F32")
    user_error("%s: tensor %s is %s; only F32, F16 and BF16 can be read as floats", path_, escaped(t.name), t.dtype);
  else if (count > 0) memcpy(out, data_ + t.begin + first * sizeof(float), count * sizeof(float));
}

// ----------------------------------------------------------------------------
// Writing

[[noreturn]] static void cannot_write(const std::string& path) {
  user_error("%s: cannot write it: %s", path, strerror(errno));
}

// Writes `count` bytes at `offset`, or throws UserError.
static void write_at(const std::string& path, int fd, const void* bytes, size_t count, size_t offset) {
  if (write_all(fd, bytes, count, int64_t(offset)) != count) cannot_write(path);
}

// Makes the file `bytes` long. Reserving the space detects a full disk now and not at the end of the checkpoint; where
// the file system cannot reserve space, write_f32() or finish() detects it.
static void set_size(const std::string& path, int fd, size_t bytes) {
  int failed;
  do failed = fallocate(fd, 0, 0, off_t(bytes));
  while (failed && errno == EINTR);
  if (failed && (errno == EOPNOTSUPP || errno == ENOSYS)) failed = ftruncate(fd, off_t(bytes));
  if (failed) cannot_write(path);
}

// The length and the JSON, padded with spaces to a multiple of eight bytes.
static std::string make_header(const std::vector<SafetensorsSpec>& specs, size_t* data_bytes) {
  nlohmann::ordered_json header;
  header[kMetadataKey] = {{"format", "pt"}};  // which transformers wants
  *data_bytes = 0;
  for (const SafetensorsSpec& spec : specs) {
    int64_t bytes;
    CHECK(byte_size(spec.shape, sizeof(float), &bytes));
    CHECK(!header.contains(spec.name));
    const size_t begin = *data_bytes;
    *data_bytes += bytes;
    header[spec.name] = {{"dtype", "F32"}, {"shape", spec.shape}, {"data_offsets", {begin, *data_bytes}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), kLengthBytes) + text;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, const std::vector<SafetensorsSpec>& specs) : path_(path) {
  size_t data_bytes;
  const std::string header = make_header(specs, &data_bytes);
  file_ = FileDescriptor(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (file_.fd < 0) cannot_write(path_);
  write_at(path_, file_.fd, header.data(), header.size(), 0);
  header_checksum_ = crc32c(header.data(), header.size());
  set_size(path_, file_.fd, header.size() + data_bytes);
  size_t offset = header.size();
  for (const SafetensorsSpec& spec : specs) {
    const int64_t count = num_elements(spec.shape);
    places_.push_back({offset, count});
    offset += count * sizeof(float);
  }
}

SafetensorsWriter SafetensorsWriter::attach(const std::string& path) {
  const SafetensorsFile layout(path);
  SafetensorsWriter writer;
  writer.path_ = path;
  writer.file_ = FileDescriptor(open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (writer.file_.fd < 0) cannot_write(path);
  for (const SafetensorsTensor& t : layout.tensors()) {
    if (t.dtype != "F32") user_error("%s: tensor %s is %s; only F32 can be written", path, escaped(t.name), t.dtype);
    writer.places_.push_back({layout.data_offset() + t.begin, t.num_elements()});
  }
  return writer;
}

void SafetensorsWriter::write_f32(size_t index, const float* data, int64_t first, int64_t count) const {
  CHECK(file_.fd >= 0 && index < places_.size());
  const Place& place = places_[index];
  CHECK(0 <= first && 0 <= count && first <= place.count && count <= place.count - first);
  write_at(path_, file_.fd, data, count * sizeof(float), place.offset + first * sizeof(float));
}

void SafetensorsWriter::finish() {
  CHECK(file_.fd >= 0);
  int failed;
  do failed = fsync(file_.fd);
  while (failed && errno == EINTR);
  if (failed) cannot_write(path_);
  const int fd = std::exchange(file_.fd, -1);  // closed even if close() fails: it must not be closed twice
  if (close(fd) != 0 && errno != EINTR) cannot_write(path_);
}

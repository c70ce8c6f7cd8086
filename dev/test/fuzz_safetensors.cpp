// Fuzzes SafetensorsFile. It may refuse a file with UserError, but never crash, read outside of it or allocate memory
// by a size that it claims; a file that it accepts must be valid, and give the file's floats.
//
// With libFuzzer:
//   clang++ -std=c++17 -O1 -g -I. -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
//     dev/test/fuzz_safetensors.cpp llmc/formats/safetensors.cpp llmc/base/files.cpp -o fuzz
//   ./fuzz -max_total_time=60 -malloc_limit_mb=64 -rss_limit_mb=2048 -max_len=4096 <folder with seeds>
// Without it, with its own mutator, which knows the format (seconds and seed are optional; `make fuzz`):
//   g++ -std=c++17 -O1 -g -I. -DSTANDALONE_FUZZER -fsanitize=address,undefined -fno-sanitize-recover=all
//     dev/test/fuzz_safetensors.cpp llmc/formats/safetensors.cpp llmc/base/files.cpp -o fuzz
//   ./fuzz 60 1
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include "llmc/base/error.h"
#include "llmc/formats/safetensors.h"

// The value of a half or a bfloat16, computed independently of the reader: sign * significand * 2^exponent.
static double value_of_16_bits(uint16_t bits, int mantissa_bits, int bias) {
  const int exponent_mask = (1 << (15 - mantissa_bits)) - 1;
  const int exponent = bits >> mantissa_bits & exponent_mask, mantissa = bits & ((1 << mantissa_bits) - 1);
  if (exponent == exponent_mask) return mantissa ? NAN : bits & 0x8000 ? -INFINITY : INFINITY;
  const int significand = mantissa + (exponent ? 1 << mantissa_bits : 0);
  const double size = std::ldexp(significand, (exponent ? exponent : 1) - bias - mantissa_bits);
  return bits & 0x8000 ? -size : size;
}

// What an accepted tensor promises, recomputed from the input itself: a mapping has no red zones, so the sanitizers
// would not see a read past the file's end in its last page.
static void check_tensor(const SafetensorsFile& file, const SafetensorsTensor& t, const uint8_t* data, size_t size) {
  const int64_t n = t.num_elements();
  CHECK(n >= 0 && t.begin <= t.end && t.end <= size && (n == 0) == (t.begin == t.end));
  const bool f32 = t.dtype == "F32", f16 = t.dtype == "F16", bf16 = t.dtype == "BF16";
  if (!f32 && !f16 && !bf16) return;
  CHECK((t.end - t.begin) == size_t(n) * (f32 ? 4 : 2));
  std::vector<float> out(n);
  file.read_f32(t, out.data());
  const int64_t middle = n / 2;
  if (n > 0) file.read_f32(t, out.data() + middle, middle, 1);
  if (f32 && n > 0) CHECK(memcmp(out.data(), data + t.begin, size_t(n) * 4) == 0);
  for (int64_t i = 0; i < n && !f32; i++) {
    uint16_t bits;
    memcpy(&bits, data + t.begin + size_t(i) * 2, 2);
    const double expected = f16 ? value_of_16_bits(bits, 10, 15) : value_of_16_bits(bits, 7, 127);
    CHECK(std::isnan(expected) ? std::isnan(out[i]) : out[i] == expected);
  }
}

static size_t accepted = 0;  // valid files: a fuzzer that makes none tests little

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size) {
  FileDescriptor memory(memfd_create("input", MFD_CLOEXEC));
  CHECK(memory.fd >= 0 && write(memory.fd, input, size) == ssize_t(size));
  try {
    const SafetensorsFile file(format("/proc/self/fd/%d", memory.fd));
    uint64_t header_bytes;
    CHECK(size >= 8);
    memcpy(&header_bytes, input, 8);
    CHECK(header_bytes <= size - 8);
    const size_t data_bytes = size - 8 - header_bytes;
    size_t covered = 0;
    for (const SafetensorsTensor& t : file.tensors()) {
      check_tensor(file, t, input + 8 + header_bytes, data_bytes);
      covered += t.end - t.begin;
    }
    CHECK(covered == data_bytes);  // without overlaps, this means without gaps, too
    accepted++;
  } catch (const UserError& error) {
    const std::string text = error.what();
    CHECK(text.rfind("/proc/self/fd/", 0) == 0 && text.size() < 400);
    for (unsigned char c : text) CHECK(c >= 0x20 && c < 0x7f);
  }
  return 0;
}

// ----------------------------------------------------------------------------
// The fuzzer for machines without libFuzzer

#ifdef STANDALONE_FUZZER
#include <sanitizer/common_interface_defs.h>
#include <chrono>
#include <random>

// Inputs have at most 1 MB, so an allocation of 64 MB or more was sized by a claim in the header.
extern "C" const char* __asan_default_options() {
  return "max_allocation_size_mb=64:allocator_may_return_null=0:hard_rss_limit_mb=2048:handle_abort=1";
}

static std::mt19937_64 rng;
static std::string current;  // the input that is being tried

static size_t below(size_t n) { return size_t(rng() % n); }
static bool one_in(size_t n) { return below(n) == 0; }

template <class T, size_t N>
static const T& pick(const T (&items)[N]) {
  return items[below(N)];
}

static void save_current() {
  if (FILE* file = fopen("crash-safetensors", "wb")) {
    fwrite(current.data(), 1, current.size(), file);
    fclose(file);
    fprintf(stderr, "the input is in crash-safetensors\n");
  }
}

static std::string with_length(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

static const char* const kInterestingNumbers[] = {"0",
                                                  "1",
                                                  "2",
                                                  "4",
                                                  "8",
                                                  "63",
                                                  "64",
                                                  "255",
                                                  "65536",
                                                  "2147483648",
                                                  "4294967295",
                                                  "4294967296",
                                                  "-1",
                                                  "-0",
                                                  "1.5",
                                                  "1e3",
                                                  "1e999",
                                                  "4611686018427387904",
                                                  "9223372036854775807",
                                                  "9223372036854775808",
                                                  "18446744073709551615",
                                                  "18446744073709551616",
                                                  "[]",
                                                  "{}",
                                                  "null",
                                                  "true",
                                                  "\"1\"",
                                                  "[[1]]"};
static const char* const kInterestingPieces[] = {"\"__metadata__\":{\"a\":\"b\"},",
                                                 "\"__metadata__\":",
                                                 "\"dtype\":\"F16\",",
                                                 "\"shape\":[0],",
                                                 "\"shape\":[],",
                                                 "\"data_offsets\":[0,0],",
                                                 "{",
                                                 "}",
                                                 "[",
                                                 "]",
                                                 ",",
                                                 ":",
                                                 "\"",
                                                 "\\u0000",
                                                 "\\ud800",
                                                 "\xff",
                                                 "\xef\xbb\xbf",
                                                 "\\",
                                                 "[[[[[[[[[[[[[[[[",
                                                 "{\"a\":{\"a\":{\"a\":",
                                                 "\n",
                                                 " "};

// A file of up to five tensors: the dtypes and shapes by chance, offsets in order. It is valid unless *overlap is true
// and stays so: then some tensor begins inside the one before it, which no chance mutation brings about without
// leaving a hole elsewhere.
static std::string make_file(bool* overlap) {
  static const struct {
    const char* name;
    size_t bytes;
  } dtypes[] = {{"F32", 4}, {"F16", 2}, {"BF16", 2}, {"F32", 4}, {"I64", 8}, {"U8", 1}};
  std::string header = "{", data;
  const bool may_overlap = std::exchange(*overlap, false);
  if (one_in(3)) header += "\"__metadata__\":{\"format\":\"pt\"}";
  for (size_t t = 0, tensors = below(6); t < tensors; t++) {
    const auto& dtype = pick(dtypes);
    std::string shape;
    size_t bytes = dtype.bytes;
    for (size_t d = 0, dims = below(4); d < dims; d++) {
      const size_t dim = one_in(10) ? 0 : 1 + below(5);
      shape += (d ? "," : "") + std::to_string(dim);
      bytes *= dim;
    }
    const size_t shared = may_overlap ? below(std::min(bytes, data.size()) + 1) : 0, begin = data.size() - shared;
    *overlap |= shared > 0;
    header += format("%s\"t%zu\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
                     header.size() > 1 ? "," : "", t, dtype.name, shape.c_str(), begin, begin + bytes);
    for (size_t i = shared; i < bytes; i++) data += char(rng());
  }
  header += "}";
  return with_length(header + std::string(below(9), ' '), data);
}

// Finds a run of digits in `text` at or after `from`: [first, last). Returns false if there is none.
static bool find_number(const std::string& text, size_t from, size_t* first, size_t* last) {
  *first = text.find_first_of("0123456789", from);
  if (*first == std::string::npos) return false;
  *last = text.find_first_not_of("0123456789", *first);
  if (*last == std::string::npos) *last = text.size();
  return true;
}

// A header with one thing about it changed; the caller puts its length right, or does not.
static void mutate_header(std::string& header) {
  const size_t at = below(header.size() + 1);
  size_t first, last;
  switch (below(7)) {
    case 0:  // another number
      if (find_number(header, at, &first, &last)) header.replace(first, last - first, pick(kInterestingNumbers));
      break;
    case 1:  // a number a little off
      if (find_number(header, at, &first, &last) && last - first < 18)
        header.replace(first, last - first,
                       std::to_string(std::stoll(header.substr(first, last - first)) + int64_t(below(9)) - 4));
      break;
    case 2: header.insert(at, pick(kInterestingPieces)); break;
    case 3: {  // an entry twice: from one quote to a later comma
      const size_t quote = header.find('"', at), comma = header.find(',', at + below(80));
      if (quote < comma && comma != std::string::npos) header.insert(quote, header.substr(quote, comma - quote + 1));
      break;
    }
    case 4: header.erase(at, 1 + below(16)); break;
    case 5:  // a piece of itself somewhere else
      header.insert(at, header.substr(below(header.size() + 1), below(64)));
      break;
    case 6:  // nesting, or a long name
      header.insert(at, std::string(1 + below(one_in(100) ? 500'000 : 300), pick("[{\"a \\")));
      break;
  }
}

static void mutate(std::string& bytes) {
  uint64_t length = 0;
  if (bytes.size() >= 8) memcpy(&length, bytes.data(), 8);
  const bool sound = bytes.size() >= 8 && length <= bytes.size() - 8;
  static const uint64_t lies[] = {0, 1, 7, 8, 100'000'000, 100'000'001, 1ull << 32, 1ull << 63, ~0ull, ~0ull - 7};
  switch (sound ? below(8) : 4 + below(4)) {
    case 0:
    case 1:
    case 2:
    case 3: {
      std::string header = bytes.substr(8, length);
      const std::string data = bytes.substr(8 + length);
      mutate_header(header);
      bytes = with_length(header, data);
      break;
    }
    case 4:  // flips
      for (size_t i = 0, flips = 1 + below(4); i < flips && !bytes.empty(); i++)
        bytes[below(bytes.size())] ^= char(1 << below(8));
      break;
    case 5:  // a header length that lies, wildly or a little
      if (bytes.size() >= 8) {
        length = one_in(2) ? pick(lies) : length + below(33) - 16;
        memcpy(bytes.data(), &length, 8);
      }
      break;
    case 6:  // cut, or longer
      if (one_in(2)) bytes.resize(below(bytes.size() + 1));
      else bytes.append(1 + below(40), char(rng()));
      break;
    case 7: {  // the end of another file
      bool overlap = false;
      const std::string other = make_file(&overlap);
      bytes = bytes.substr(0, below(bytes.size() + 1)) + other.substr(below(other.size()));
      break;
    }
  }
}

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? strtod(argv[1], nullptr) : 10;
  const unsigned long long seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
  rng.seed(seed);
  __sanitizer_set_death_callback(save_current);
  const auto start = std::chrono::steady_clock::now();
  size_t executions = 0;
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds) {
    bool overlap = one_in(10);
    current = make_file(&overlap);
    const size_t accepted_before = accepted;
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(current.data()), current.size());
    CHECK(accepted == accepted_before + !overlap);                       // a valid file must pass
    for (size_t mutations = 1 + below(6); mutations > 0; mutations--) {  // each one on top of the last
      mutate(current);
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(current.data()), current.size());
      executions++;
    }
    executions++;
  }
  printf("%zu executions, %zu files accepted, %.0f s, seed %llu: no crash\n", executions, accepted, seconds, seed);
}
#endif

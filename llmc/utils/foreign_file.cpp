#include "foreign_file.h"
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <set>
#include "error.h"

// ----------------------------------------------------------------------------
// Files with a mark

struct Mark {
  size_t offset;
  std::string_view bytes;
  const char* what;
};

static const Mark marks[] = {
    {0, lfs_pointer, lfs_advice},
    {0, "\x1f\x8b\x08", "is compressed by gzip; unpack it (gunzip)"},
    {4, "1AY&SY", "is compressed by bzip2; unpack it (bunzip2)"},
    {0, "\3757zXZ", "is compressed by xz; unpack it (unxz)"},
    {0, "\x28\xb5\x2f\xfd", "is compressed by zstd; unpack it (unzstd)"},
    {0, "\x04\x22\x4d\x18", "is compressed by lz4; unpack it (unlz4)"},
    {0, "7z\xbc\xaf", "is a 7z archive; unpack it"},
    {257, {"ustar\0", 6}, "is a tar archive; unpack it (tar xf)"},
    {257, "ustar  ", "is a tar archive; unpack it (tar xf)"},
    {0, "\x93NUMPY", "is a NumPy array (.npy), which holds numbers, not text; leave it out"},
    {0, "PAR1",
     "is a Parquet file; write its column of text as JSON lines (pandas: to_json(lines=True, orient='records'))"},
    {0, "ARROW1", "is an Arrow file; write its column of text as JSON lines"},
    {0, "\x89HDF\r\n", "is an HDF5 file; write its data as a file of their own"},
    {0, "SQLite format 3", "is an SQLite database; write its text as files"},
    {0, "%PDF-", "is a PDF; take its text out (pdftotext)"},
    {0, "GGUF", "is a GGUF model of llama.cpp"},
    {0, "MMIDIDX", "is Megatron's index of a token file; the tokens are in the .bin beside it"},
};

// The version that a zip archive's first file needs is a byte, with a zero after it.
static bool is_zip(std::string_view head) {
  return head.size() > 5 && head.substr(0, 4) == "PK\x03\x04" && head[5] == 0;
}

static bool is_safetensors(std::string_view head) {
  uint64_t header_bytes = 0;
  if (head.size() < 10) return false;
  memcpy(&header_bytes, head.data(), sizeof header_bytes);
  return header_bytes < 100 << 20 && head[8] == '{' && (head[9] == '"' || head[9] == '}');
}

// Protocols 2 and 3 begin with a list, a dictionary, a tuple of numbers, the name of a class, or PyTorch's number; 4
// and 5 with a frame of less than 4 GiB.
static bool is_pickle(std::string_view head) {
  if (head.size() < 11 || head[0] != '\x80' || head[1] < 2 || head[1] > 5) return false;
  if (head[1] > 3) return head[2] == '\x95' && head.substr(7, 4) == std::string_view("\0\0\0\0", 4);
  for (const char* begin : {"]q", "}q", "(K", "\x8a\x0a"})
    if (head.substr(2, 2) == begin) return true;
  return head[2] == 'c' && head.substr(3, 6).find_first_not_of("abcdefghijklmnopqrstuvwxyz_.") == std::string::npos;
}

std::string foreign_format(std::string_view head) {
  for (const Mark& mark : marks)
    if (head.size() > mark.offset && head.substr(mark.offset, mark.bytes.size()) == mark.bytes) return mark.what;
  if (is_zip(head)) return "is a zip archive (as .npz, .docx and PyTorch's files are); unpack it (unzip)";
  if (is_safetensors(head)) return "is a safetensors file: tensors of a model";
  if (is_pickle(head)) return "is a Python pickle; write what it holds as a file of its own";
  return "";
}

// ----------------------------------------------------------------------------
// Files without one

using Words = std::vector<uint16_t>;

constexpr uint16_t byte_order_mark = 0xFEFF, swapped_mark = 0xFFFE;

static Words swapped(const Words& words) {
  Words result;
  for (uint16_t w : words) result.push_back(uint16_t(w << 8 | w >> 8));
  return result;
}

// Every `stride`-th word, from the one at `first` on.
static Words every(const Words& words, size_t stride, size_t first) {
  Words result;
  for (size_t i = first; i < words.size(); i += stride) result.push_back(words[i]);
  return result;
}

static size_t num_distinct(const Words& words) { return std::set<uint16_t>(words.begin(), words.end()).size(); }

// How often each byte is the low one of a word, or the high one.
struct ByteCounts {
  std::array<int64_t, 256> low = {}, high = {};

  explicit ByteCounts(const Words& words) {
    for (uint16_t w : words) low[w & 0xff]++, high[w >> 8]++;
  }
};

// In bits.
static double entropy(const std::array<int64_t, 256>& counts) {
  double sum = 0, all = 0;
  for (int64_t n : counts) all += double(n);
  for (int64_t n : counts)
    if (n > 0) sum -= double(n) / all * std::log2(double(n) / all);
  return sum;
}

// Of one byte a character, or UTF-8: almost no byte is a control character. Of uint16 tokens every twentieth byte is
// one, and more where they are few.
static bool is_8_bit_text(const Words& words) {
  const ByteCounts bytes(words);
  int64_t controls = 0;
  for (int b = 0; b < 32; b++)
    if (b < '\t' || b > '\r') controls += bytes.low[b] + bytes.high[b];
  return words.size() >= 32 && controls * 100 <= int64_t(words.size());
}

// Characters of a few scripts, or of East Asia, with spaces or their punctuation, and almost none that text has not.
static bool is_utf16(const Words& words) {
  int64_t bad = 0, spaces = 0, east_asian = 0;
  const int64_t n = int64_t(words.size());
  for (size_t i = 0; i < words.size(); i++) {
    const uint16_t c = words[i];
    auto in = [c](int first, int last) { return first <= c && c <= last; };
    const bool is_pair = in(0xD800, 0xDBFF) && i + 1 < words.size() && words[i + 1] >> 10 == 0xDC00 >> 10;
    bad += (c < 32 && c != '\t' && c != '\n' && c != '\r') || in(0x7F, 0x9F) || in(0xE000, 0xF8FF) || c >= 0xFFFE;
    bad += in(0xD800, 0xDBFF) && !is_pair;
    spaces += c == ' ' || c == '\n' || in(0x3000, 0x3002) || c == 0xFF0C;
    east_asian += in(0x3000, 0x30FF) || in(0x4E00, 0x9FFF) || in(0xAC00, 0xD7A3) || in(0xFF00, 0xFFEF) || c < 0x80;
  }
  // Of many words of ASCII, as ids of bytes are too, text has some much more often than others.
  const ByteCounts bytes(words);
  const bool is_ascii = bytes.high[0] == n && *std::max_element(words.begin(), words.end()) < 0x80;
  if (is_ascii && n >= 256 && entropy(bytes.low) + 0.3 > std::log2(double(num_distinct(words)))) return false;
  std::array<int64_t, 256> scripts = bytes.high;
  std::partial_sort(scripts.begin(), scripts.begin() + 3, scripts.end(), std::greater<int64_t>());
  const bool few_scripts = (scripts[0] + scripts[1] + scripts[2]) * 100 >= n * 95 || east_asian * 100 >= n * 95;
  return n >= 32 && bad * 500 <= n && spaces * 100 >= n && few_scripts && num_distinct(words) >= 8;
}

// Whether `upper` words hardly vary, and are small, where those that stand before or after them do.
static bool are_upper_words(const Words& upper, const Words& lower) {
  const size_t values = num_distinct(upper);
  return upper.size() >= 32 && values <= 4 && *std::max_element(upper.begin(), upper.end()) < 64 &&
         num_distinct(lower) >= 8 * values;
}

// Numbers of 32 or 64 bits, whose upper halves are almost all the same: "32-bit", "big-endian 64-bit" or "".
static std::string wide_numbers(const Words& words) {
  const Words even = every(words, 2, 0), odd = every(words, 2, 1);
  if (are_upper_words(odd, even)) return are_upper_words(every(words, 4, 2), every(words, 4, 0)) ? "64-bit" : "32-bit";
  if (are_upper_words(even, odd))
    return are_upper_words(every(words, 4, 1), every(words, 4, 3)) ? "big-endian 64-bit" : "big-endian 32-bit";
  return "";
}

// Whether these are the upper words of floating-point numbers of any width, of sizes that weights and ids have.
static bool are_floats(const Words& upper) {
  int64_t nonzero = 0, likely = 0;
  for (uint16_t w : upper) {
    const int size = w & 0x7fff;
    nonzero += w != 0, likely += 0x1c00 <= size && size <= 0x5000;
  }
  return nonzero >= 32 && nonzero * 2 > int64_t(upper.size()) && likely * 100 >= nonzero * 99;
}

// Whether both bytes of a word are ids, of a vocabulary of less than 160: each is as often the one as the other.
static bool are_pairs_of_bytes(const Words& words) {
  const ByteCounts bytes(words);
  int64_t both = 0, large = 0, values = 0;
  for (int b = 0; b < 256; b++) {
    both += std::min(bytes.low[b], bytes.high[b]);
    values += bytes.high[b] > 0;
    if (b >= 160) large += bytes.low[b] + bytes.high[b];
  }
  return words.size() >= 256 && both * 10 >= int64_t(words.size()) * 8 && large == 0 && values > 8;
}

// The upper bytes of ids differ less than the lower ones.
static bool is_big_endian(const Words& words, int vocab_size) {
  const Words other = swapped(words);
  const bool fits = *std::max_element(words.begin(), words.end()) < vocab_size,
             other_fits = *std::max_element(other.begin(), other.end()) < vocab_size;
  const ByteCounts bytes(words);
  return num_distinct(words) >= 16 && other_fits && (!fits || entropy(bytes.low) + 0.5 < entropy(bytes.high));
}

static Words words_of(std::string_view bytes) {
  Words words(bytes.size() / 2);
  memcpy(words.data(), bytes.data(), words.size() * 2);
  return words;
}

// Of UTF-32 every other word is one of the 17 planes' numbers, and the words between them are characters.
static std::string wide_encoding(const Words& words) {
  auto starts_with = [&](std::initializer_list<uint16_t> mark) {
    return words.size() > mark.size() && std::equal(mark.begin(), mark.end(), words.begin());
  };
  if (starts_with({byte_order_mark, 0})) return "UTF-32LE";
  if (starts_with({0, swapped_mark})) return "UTF-32BE";
  if (starts_with({byte_order_mark})) return "UTF-16LE";
  if (starts_with({swapped_mark})) return "UTF-16BE";
  if (words.empty() || is_8_bit_text(words)) return "";
  const Words other = swapped(words);
  const std::string wide = wide_numbers(words);
  if (wide == "32-bit" && is_utf16(every(words, 2, 0))) return "UTF-32LE";
  if (wide == "big-endian 32-bit" && is_utf16(every(other, 2, 1))) return "UTF-32BE";
  return is_utf16(words) ? "UTF-16LE" : is_utf16(other) ? "UTF-16BE" : "";
}

static std::string convert_text(const std::string& encoding) {
  return format("convert it to UTF-8 (iconv -f %s -t UTF-8)", encoding.c_str());
}

std::string why_no_text(std::string_view begin) {
  const std::string what = foreign_format(begin), encoding = wide_encoding(words_of(begin.substr(0, 4096)));
  return encoding.empty() ? what : format("is %s text; %s", encoding.c_str(), convert_text(encoding).c_str());
}

bool is_binary(std::string_view bytes) {
  for (size_t at = 0, size = 1024; at < bytes.size(); at += size, size = 4096) {
    const std::string_view part = bytes.substr(at, size);
    size_t controls = 0;
    for (const char c : part) controls += (uint8_t(c) < 32 && (c < '\a' || c > '\r') && c != '\x1b') || c == '\x7f';
    if (controls > 2 + part.size() / 100) return true;
  }
  return false;
}

std::string why_no_tokens(const Words& words, int vocab_size) {
  if (words.size() < 32) return "";
  if (is_8_bit_text(words)) return "is text, not tokens; data/text.sh makes tokens of it";
  const std::string encoding = wide_encoding(words);
  const int largest = *std::max_element(words.begin() + 1, words.end());  // behind a byte order mark
  const bool may_be_ids = encoding == "UTF-16LE" && words[0] != byte_order_mark && largest < vocab_size &&
                          (vocab_size <= 512 || (largest < 1024 && largest * 2 >= vocab_size));
  if (!encoding.empty() && !may_be_ids)
    return format("is %s text, not tokens; %s, of which data/text.sh makes tokens%s", encoding.c_str(),
                  convert_text(encoding).c_str(),
                  largest <= 256 ? "; or, if these are tokens of bytes, the vocabulary has 257 (--vocab-size)" : "");
  const char* as_uint16 = "write them as uint16 (NumPy: .astype('<u2').tofile(...))";
  for (const auto& [stride, bits] : {std::pair(1, 16), std::pair(2, 32), std::pair(4, 64)})
    if (are_floats(every(words, size_t(stride), size_t(stride - 1))))
      return format("holds %d-bit floating-point numbers, not uint16 tokens; %s", bits, as_uint16);
  if (const std::string wide = wide_numbers(words); !wide.empty())
    return format("holds %s numbers, not uint16 tokens; %s", wide.c_str(), as_uint16);
  if (is_big_endian(words, vocab_size))
    return "holds big-endian numbers, not uint16 tokens in this machine's order; swap their bytes (NumPy: .byteswap())";
  if (are_pairs_of_bytes(words)) return format("holds numbers of a byte each, not uint16 tokens; %s", as_uint16);
  return "";
}

#include "foreign_file.h"
#include <cstdint>
#include <cstring>

struct Mark {
  size_t offset;
  std::string_view bytes;
  const char* what;
};

static const Mark marks[] = {
    {0, lfs_pointer, lfs_advice},
    {0, {"\xff\xfe\0\0", 4}, "is UTF-32LE text; convert it to UTF-8 (iconv -f UTF-32LE -t UTF-8)"},
    {0, {"\0\0\xfe\xff", 4}, "is UTF-32BE text; convert it to UTF-8 (iconv -f UTF-32BE -t UTF-8)"},
    {0, "\xff\xfe", "is UTF-16LE text; convert it to UTF-8 (iconv -f UTF-16LE -t UTF-8)"},
    {0, "\xfe\xff", "is UTF-16BE text; convert it to UTF-8 (iconv -f UTF-16BE -t UTF-8)"},
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

bool is_binary(std::string_view bytes) {
  for (size_t at = 0, size = 1024; at < bytes.size(); at += size, size = 4096) {
    const std::string_view part = bytes.substr(at, size);
    size_t controls = 0;
    for (const char c : part) controls += (uint8_t(c) < 32 && (c < '\a' || c > '\r') && c != '\x1b') || c == '\x7f';
    if (controls > 2 + part.size() / 100) return true;
  }
  return false;
}

// What is taken for a file of tokens, and what is refused by what it is.
#include <gtest/gtest.h>
#include <unistd.h>
#include <cmath>
#include <random>
#include "data_test.h"
#include "helpers.h"
#include "llmc/text/dataloader.h"

using TokenFormats = Data;
using ChangedTokens = Data;

// Ids are as frequent as GPT-2's: few ids make up most of a text, and punctuation is among them.
static std::vector<uint16_t> gpt2_like(int n, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform;
  std::vector<uint16_t> tokens = {50256};
  while (int(tokens.size()) < n) {
    const double u = uniform(random);
    tokens.push_back(u < 0.05   ? 11
                     : u < 0.09 ? 13
                     : u < 0.12 ? 198
                                : uint16_t(std::exp(uniform(random) * std::log(50000.)) + 200));
  }
  return tokens;
}

static std::string bytes_of(const std::vector<uint16_t>& tokens) {
  return {reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof tokens[0]};
}

static std::string repeated(const std::string& text, size_t bytes) {
  std::string all;
  while (all.size() < bytes) all += text;
  return all;
}

// The ids of a text in a vocabulary of its characters, as nanoGPT's prepare.py for characters makes them.
static std::vector<uint16_t> character_ids(const std::vector<uint16_t>& text) {
  const std::set<uint16_t> characters(text.begin(), text.end());
  std::vector<uint16_t> ids;
  for (uint16_t c : text) ids.push_back(uint16_t(std::distance(characters.begin(), characters.find(c))));
  return ids;
}

TEST_F(TokenFormats, HeaderlessTokensOfManyVocabulariesAreRead) {
  EXPECT_EQ(TokenShards(write_headerless("a.bin", gpt2_like(20000)), 50257).num_tokens, 20000);
  EXPECT_EQ(TokenShards(write_headerless("a.bin", gpt2_like(20000)), 65536).num_tokens, 20000);
  for (int n : {2, 31, 32, 33, 100, 500})
    for (unsigned seed = 0; seed < 10; seed++)
      EXPECT_EQ(TokenShards(write_headerless("a.bin", gpt2_like(n, seed)), 50257).num_tokens, n);
  const std::string english = repeated("It was the best of times, it was the worst of times.\n", 4000);
  std::vector<uint16_t> bytes(english.begin(), english.end());
  for (size_t at : {0u, 1000u, 3000u}) bytes[at] = 256;
  for (int vocab_size : {257, 50257})
    EXPECT_EQ(TokenShards(write_headerless("a.bin", bytes), vocab_size).num_tokens, int64_t(bytes.size()));
  const std::vector<uint16_t> characters = character_ids(bytes);
  for (int vocab_size : {32, 64, 50304})  // too large a vocabulary is no mistake of the file's
    EXPECT_EQ(TokenShards(write_headerless("a.bin", characters), vocab_size).num_tokens, int64_t(characters.size()));
  std::mt19937 random(2);
  std::vector<uint16_t> uniform(5000);
  for (uint16_t& token : uniform) token = uint16_t(random());
  EXPECT_EQ(TokenShards(write_headerless("a.bin", uniform), 65536).num_tokens, 5000);
}

TEST_F(TokenFormats, EightBitTextIsRefused) {
  const std::string latin1 = "D\xe9j\xe0 vu: l'\xe9t\xe9 fran\xe7"
                             "ais.\n",
                    utf8 = "D\u00e9j\u00e0 vu, au caf\u00e9.\n",
                    cyrillic = "\xc2\xf1\xe5 \xf1\xf7\xe0\xf1\xf2\xeb\xe8\xe2\xfb\xe5 \xf1\xe5\xec\xfc\xe8.\n";
  for (const std::string& text : {latin1, utf8, cyrillic, "\xef\xbb\xbf" + utf8})
    for (size_t bytes : {64, 1000, 10000})
      for (int vocab_size : {257, 50257, 65536})
        for (const char* odd : {"", "x"})
          EXPECT_ERROR(TokenShards(write("a.bin", repeated(text, bytes) + odd), vocab_size), "/a.bin: is text, not "
                                                                                             "tokens; data/text.sh");
}

TEST_F(TokenFormats, FilesWithAMarkAreRefusedByIt) {
  const std::string rest = bytes_of(gpt2_like(1000));
  const std::vector<std::pair<std::string, std::string>> marks =
      {{std::string("\x1f\x8b\x08\x00", 4), "compressed by gzip"},
       {"BZh91AY&SY", "compressed by bzip2"},
       {std::string("\xfd"
                    "7zXZ\0",
                    6),
        "compressed by xz"},
       {"\x28\xb5\x2f\xfd", "compressed by zstd"},
       {std::string("PK\x03\x04\x14\0", 6), "a zip archive"},
       {"\xff\xfe", "UTF-16LE text; convert it"},
       {"PAR1", "a Parquet file"},
       {"GGUF", "a GGUF model"},
       {std::string("\x80\x04\x95\x10\x20\x00\x00\x00\x00\x00\x00]", 12), "a Python pickle"},
       {"\x80\x02]q", "a Python pickle"},
       {std::string("\x40\x00\x00\x00\x00\x00\x00\x00{\"a\":", 13), "a safetensors file"},
       {"version https://git-lfs.github.com/spec/v1\noid sha256:", "a Git LFS pointer"},
       {std::string("\x01\x34\xd8\x88\x00\x00\x00\x01", 8), "a shard in big-endian order"}};
  for (const auto& [mark, what] : marks) {
    SCOPED_TRACE(what);
    EXPECT_ERROR(TokenShards(write("a.bin", mark + rest), 65536), what);
    EXPECT_ERROR(TokenShards(write("a.bin", mark + rest), 65536), "/a.bin: ");
  }
}

// An .npy file: `dictionary` in a header of that version, and data.
static std::string npy(int version, std::string dictionary, const std::string& data) {
  const size_t begin = version == 1 ? 10 : 12;
  dictionary += std::string(63 - (begin + dictionary.size()) % 64, ' ') + "\n";
  const uint32_t size = uint32_t(dictionary.size());
  std::string header = std::string("\x93NUMPY") + char(version) + '\0';
  header.append(reinterpret_cast<const char*>(&size), begin - 8);
  return header + dictionary + data;
}

TEST_F(TokenFormats, ARowOfUint16InANumpyFileIsRead) {
  const std::vector<uint16_t> tokens = gpt2_like(300);
  const std::string shape = "{'descr': '<u2', 'fortran_order': False, 'shape': (300,), }", data = bytes_of(tokens);
  for (int version : {1, 2, 3})
    EXPECT_EQ(TokenFile(write("a.npy", npy(version, shape, data)), 50257).read(0, 300), tokens);
  EXPECT_ERROR(TokenFile(in("a.npy"), 50000), "/a.npy: token 50256 at position 0 is outside");
  EXPECT_ERROR(TokenFile(write("a.npy", npy(4, shape, data)), 50257), "version 4");
  EXPECT_ERROR(TokenFile(write("a.npy", npy(1, shape, data + "xx")), 50257), "longer than its header says");
  EXPECT_ERROR(TokenFile(write("a.npy", npy(1, shape, data.substr(2))), 50257), "truncated");
  EXPECT_ERROR(TokenFile(write("a.npy", npy(1, shape, data).substr(0, 60)), 50257), "cut short or damaged");
  EXPECT_ERROR(TokenFile(write("a.npy", npy(1, shape + std::string(60000, ' '), data)), 50257), "cut short or damaged");
  for (const char* other : {"{'descr': '<i8', 'fortran_order': False, 'shape': (75,), }",
                            "{'descr': '>u2', 'fortran_order': False, 'shape': (300,), }",
                            "{'descr': '<u2', 'fortran_order': True, 'shape': (300,), }",
                            "{'descr': '<u2', 'fortran_order': False, 'shape': (3, 100), }",
                            "{'descr': '<u2', 'fortran_order': False, 'shape': (), }",
                            "{'descr': [('a', '<u2')], 'fortran_order': False, 'shape': (300,), }",
                            "{'descr': '<u2', 'fortran_order': False, 'shape': (99999999999999999999,), }"})
    EXPECT_ERROR(TokenFile(write("a.npy", npy(1, other, data)), 50257),
                 "/a.npy: is a NumPy array, but not a row of uint16 tokens ('<u2'): " + std::string(other));
}

// ------------------------------------------------------------------------------------------------------------------
// Files that change while they are read

TEST_F(ChangedTokens, AnIdThatLeftTheVocabularyIsRefused) {
  const std::string path = write_shard("a.bin", counting(100));
  const DataLoader data(path, 100, 9);
  std::vector<int> inputs(9), targets(9);
  data.load_sequences(5, 1, inputs.data(), targets.data());
  std::vector<uint16_t> tokens = counting(100);
  tokens[54] = 300;
  write_shard("a.bin", tokens);  // in place: the file is the same
  EXPECT_ERROR(data.load_sequences(5, 1, inputs.data(), targets.data()), path + ": has been changed since it was "
                                                                                "opened: token 300 at position 54 is "
                                                                                "outside the vocabulary");
  data.load_sequences(4, 1, inputs.data(), targets.data());  // ends at position 45
}

TEST_F(ChangedTokens, AFileThatShrankIsRefused) {
  const std::string path = write_shard("a.bin", counting(100));
  const std::string mask = write_mask("a.mask", counting(100), std::string(100, '1'));
  const DataLoader data(path, 100, 9);
  std::vector<int> inputs(9), targets(9);
  ASSERT_EQ(truncate(mask.c_str(), 1024 + 3), 0);
  data.load_sequences(0, 1, inputs.data(), targets.data());
  EXPECT_ERROR(data.load_sequences(10, 1, inputs.data(), targets.data()), mask + ": has become shorter");
  ASSERT_EQ(truncate(path.c_str(), 1024 + 2 * 50), 0);
  data.load_sequences(1, 1, inputs.data(), targets.data());
  EXPECT_ERROR(data.load_sequences(5, 1, inputs.data(), targets.data()), path + ": has become shorter");
}

TEST_F(ChangedTokens, AFileThatReplacesAnotherChangesNothing) {
  const std::string path = write_shard("a.bin", counting(100));
  const TokenFile file(path, 100);
  ASSERT_EQ(rename(write_shard("b.bin", {7, 7}).c_str(), path.c_str()), 0);
  EXPECT_EQ(file.read(0, 100), counting(100));
}

TEST_F(ChangedTokens, MoreFilesAreReadThanMayBeOpenAtFirst) {
  struct rlimit before, limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  limit = before, limit.rlim_cur = 64;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  for (int i = 100; i < 200; i++) write_file(in(format("%d.bin", i)), read_file(write_shard("a", counting(8))));
  const std::string error = error_of([&] { EXPECT_EQ(TokenShards(folder + "/*.bin", 8).num_tokens, 800); });
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(error, "");
}

TEST_F(ChangedTokens, AMaskThatIsADanglingLinkIsRefused) {
  write_shard("a.bin", {1, 2, 3});
  ASSERT_EQ(symlink("/nonexistent", in("a.mask").c_str()), 0);
  EXPECT_ERROR(TokenShards(in("a.bin"), 10), in("a.mask") + ": is a link that leads nowhere");
}

// data/tokenize, run on files, folders and archives that a test writes.
#pragma once
#include <archive.h>
#include <archive_entry.h>
#include <sys/stat.h>
#include <algorithm>
#include <random>
#include "command_line.h"
#include "llmc/text/dataloader.h"
#include "llmc/text/tokenizer.h"
#include "llmc/base/error.h"

inline const std::string vocabulary = "dev/test/tokenizer/small.tiktoken";
inline const std::string program = "data/tokenize --tokenizer " + vocabulary + " ";

struct Entry {
  std::string name, bytes;
};

// A tar file of the entries; a single entry without a name gives just its bytes. `filter` compresses them, for example
// ARCHIVE_FILTER_XZ.
inline std::string packed(const std::vector<Entry>& entries, int filter = ARCHIVE_FILTER_NONE) {
  size_t size = 1 << 16, used = 0;
  for (const Entry& e : entries) size += 2 * e.bytes.size() + 4096;
  std::string file(size, '\0');
  archive* a = archive_write_new();
  CHECK(archive_write_add_filter(a, filter) == ARCHIVE_OK);
  if (entries.size() == 1 && entries[0].name.empty()) CHECK(archive_write_set_format_raw(a) == ARCHIVE_OK);
  else CHECK(archive_write_set_format_pax_restricted(a) == ARCHIVE_OK);
  archive_write_set_bytes_in_last_block(a, 1);
  CHECK(archive_write_open_memory(a, file.data(), file.size(), &used) == ARCHIVE_OK);
  for (const Entry& e : entries) {
    archive_entry* entry = archive_entry_new();
    archive_entry_set_pathname(entry, e.name.empty() ? "data" : e.name.c_str());
    archive_entry_set_size(entry, int64_t(e.bytes.size()));
    archive_entry_set_filetype(entry, AE_IFREG);
    archive_entry_set_perm(entry, 0644);
    CHECK(archive_write_header(a, entry) == ARCHIVE_OK);
    CHECK(archive_write_data(a, e.bytes.data(), e.bytes.size()) == ssize_t(e.bytes.size()));
    archive_entry_free(entry);
  }
  CHECK(archive_write_close(a) == ARCHIVE_OK);
  archive_write_free(a);
  return file.substr(0, used);
}

// `n` documents of words of different lengths; no two are the same.
inline std::vector<std::string> make_documents(int n, int longest_in_words, unsigned seed) {
  static const char* words[] = {"the",     " layer", " attends", "'s",  " to",          " keys",      "\n", " and",
                                " values", " 42",    ".",        ",  ", "\u4e2d\u6587", " caf\u00e9", "\t"};
  std::mt19937 random(seed);
  std::vector<std::string> documents;
  for (int i = 0; i < n; i++) {
    std::string text = "document " + std::to_string(i);
    for (unsigned w = random() % unsigned(longest_in_words); w > 0; w--) text += words[random() % std::size(words)];
    documents.push_back(text);
  }
  return documents;
}

inline std::vector<uint16_t> tokens_of(const std::string& text) {
  static const Tokenizer tokenizer = Tokenizer::load(vocabulary);
  std::vector<uint16_t> tokens;
  Encoder(tokenizer).encode(text, tokens);
  return tokens;
}
constexpr uint16_t end_of_text = 656;  // of the vocabulary

class Corpus : public CommandLine {
 protected:
  // Runs data/tokenize into the folder `out`; it must succeed.
  Outcome tokenize(const std::string& out, const std::string& arguments) const {
    const Outcome o = run(program + "--out " + in(out) + " " + arguments);
    EXPECT_EQ(o.exit_status, 0) << o.err;
    return o;
  }
  void expect_failure(const std::string& arguments, const std::vector<std::string>& parts) const {
    const Outcome o = run(program + "--out " + in("never") + " " + arguments);
    EXPECT_EQ(o.exit_status, 1) << arguments;
    EXPECT_EQ(o.err.compare(0, 7, "error: "), 0) << o.err;
    for (const std::string& part : parts) EXPECT_NE(o.err.find(part), std::string::npos) << part << "\n" << o.err;
    EXPECT_FALSE(fs::exists(in("never"))) << arguments;
    EXPECT_FALSE(fs::exists(in("never.tmp"))) << arguments;
  }
  std::vector<uint16_t> shard_tokens(const std::string& out, const std::string& prefix) const {
    TokenShards shards(in(out) + "/" + prefix + "_*.bin", 657);
    std::vector<uint16_t> tokens;
    for (const TokenFile& file : shards.files) {
      const std::vector<uint16_t> more = file.read(0, file.num_tokens);
      tokens.insert(tokens.end(), more.begin(), more.end());
    }
    return tokens;
  }
  // The documents of the shards. Each begins with an end-of-text token.
  std::vector<std::string> documents_in(const std::string& out, const std::string& prefix) const {
    static const Tokenizer tokenizer = Tokenizer::load(vocabulary);
    std::vector<std::string> documents;
    for (uint16_t token : shard_tokens(out, prefix)) {
      if (token == end_of_text) documents.emplace_back();
      else documents.at(documents.size() - 1) += tokenizer.token(token);
    }
    return documents;
  }
  // The folders have the same files with the same bytes.
  void expect_same(const std::string& a, const std::string& b, bool manifest = false) const {
    int shards = 0;
    for (const auto& entry : fs::directory_iterator(in(a))) {
      const std::string name = entry.path().filename();
      if (name == "MANIFEST.json" && !manifest) continue;
      EXPECT_TRUE(read_file(in(a) + "/" + name) == read_file(in(b) + "/" + name))
          << a << " and " << b << " differ in " << name;
      shards++;
    }
    EXPECT_GE(shards, 2);
    EXPECT_EQ(std::distance(fs::directory_iterator(in(a)), {}), std::distance(fs::directory_iterator(in(b)), {}));
  }
};

// data/tokenize from its input to its output: archives, JSON lines, threads, hostile input.
#include <algorithm>
#include <random>
#include "corpus_test.h"
#include "data/packing.h"
#include "data/shards.h"
#include "llmc/base/crc32c.h"
#include "llmc/text/dataloader.h"
#include "llmc/base/error.h"
#include "llmc/text/tokenizer.h"

using LongCorpus = Corpus;

// ----------------------------------------------------------------------------
// What is read

TEST_F(LongCorpus, AnyPackingOfTheSameDocumentsGivesTheSameShards) {
  const std::vector<std::string> documents = make_documents(300, 60, 1);
  std::vector<Entry> files, tars;
  std::string nul, lines;
  fs::create_directory(in("plain"));
  for (size_t i = 0; i < documents.size(); i++) {
    files.push_back({format("%05zu.txt", i), documents[i]});
    write("plain/" + files.back().name, documents[i]);
    nul += documents[i] + std::string(1, '\0');
    lines += json{{"id", i}, {"text", documents[i]}}.dump() + "\n";
    if (files.size() % 50 == 0) {
      const std::vector<Entry> last(files.end() - 50, files.end());
      tars.push_back({format("urlsf_subset%03zu_data.xz", i), packed(last, ARCHIVE_FILTER_XZ)});
    }
  }
  const size_t half = nul.find('\0', 5000);
  tokenize("of_files", in("plain"));
  EXPECT_EQ(documents_in("of_files", "val").size(), 15u);
  struct Way {
    std::string name, arguments;
  };
  for (const Way& way :
       std::vector<Way>{{"tar", write("a.tar", packed(files))},
                        {"gz", write("b", packed(files, ARCHIVE_FILTER_GZIP))},  // detected by content, not by name
                        {"bz2", write("k", packed(files, ARCHIVE_FILTER_BZIP2))},
                        {"xz", write("c", packed(files, ARCHIVE_FILTER_XZ))},
                        {"zst", write("d", packed(files, ARCHIVE_FILTER_ZSTD))},
                        {"tars", write("e", packed(tars))},
                        {"nul", "--separator nul " + write("f", nul)},
                        {"nul.zst", "--separator nul " + write("g", packed({{"", nul}}, ARCHIVE_FILTER_ZSTD))},
                        {"nul.tar", "--separator nul " + write("h", packed({{"first", nul.substr(0, half)},
                                                                            {"second", nul.substr(half + 1)}}))},
                        {"jsonl", "--field text " + write("i", lines)},
                        {"jsonl.gz", "--field text " + write("j", packed({{"", lines}}, ARCHIVE_FILTER_GZIP))},
                        {"files", in("plain") + "/0000* " + in("plain") + "/000[1-9]* " + in("plain") + "/00[1-9]*"}}) {
    tokenize("of_" + way.name, way.arguments);
    expect_same("of_files", "of_" + way.name);
  }
  for (const std::string file : {"e", "b"}) {
    fs::remove_all(in("of_stdin"));
    EXPECT_EQ(run(program + "--out " + in("of_stdin") + " - <" + in(file)).exit_status, 0);
    expect_same("of_files", "of_stdin");
  }
}

TEST_F(Corpus, TextThatBeginsLikeAnArchiveIsText) {
  const std::string blocks(10240, '\0');  // an empty tar file is this, too
  const std::vector<std::string> texts = {blocks + "text behind zeros",
                                          "\x1F\x8B",
                                          "BZh9, bzip2 says",
                                          "#mtree\n./a type=file\n",
                                          "PK\x03\x04 zip",
                                          std::string(257, 'a') + "ustar" + std::string(300, 'b'),
                                          "070707 cpio"};
  for (const std::string& text : texts) {
    fs::remove_all(in("out"));
    tokenize("out", (text == texts[0] ? "--any-bytes --val-fraction 0 " : "--val-fraction 0 ") + write("text", text));
    std::vector<uint16_t> expected = tokens_of(text == "\x1F\x8B" ? "\x1F\xEF\xBF\xBD" : text);
    expected.insert(expected.begin(), end_of_text);
    EXPECT_EQ(shard_tokens("out", "train"), expected) << text.substr(0, 20);
  }
}

TEST_F(Corpus, EndOfTextStandsBeforeEachDocumentOrAfterIt) {
  const std::string file = write("in", std::string("one two\0three\0four, five", 24));
  const std::string options = "--separator nul --val-fraction 0 " + file;
  auto concatenated = [](bool before) {
    std::vector<uint16_t> all;
    for (const char* document : {"one two", "three", "four, five"}) {
      const std::vector<uint16_t> tokens = tokens_of(document);
      if (before) all.push_back(end_of_text);
      all.insert(all.end(), tokens.begin(), tokens.end());
      if (!before) all.push_back(end_of_text);
    }
    return all;
  };
  tokenize("before", options);
  tokenize("after", "--end-of-text after " + options);
  EXPECT_EQ(shard_tokens("before", "train"), concatenated(true));
  EXPECT_EQ(shard_tokens("after", "train"), concatenated(false));
  EXPECT_FALSE(fs::exists(in("after/val_000000.bin")));
}

TEST_F(Corpus, InvalidUtf8IsReplacedAndCountedExceptForBytes) {
  const std::string text = "caf\xC3\xA9 \xFF\xFE and \xE2\x82 at the end \xF0\x9F";
  const std::string file = write("in", text);
  const Outcome o = tokenize("bpe", "--val-fraction 0 " + file);
  EXPECT_NE(o.out.find("not UTF-8: 4 sequences, now U+FFFD"), std::string::npos) << o.out;
  EXPECT_EQ(json::parse(read_file(in("bpe/MANIFEST.json")))["invalid_utf8_replaced"], 4);
  std::vector<uint16_t> expected = tokens_of("caf\u00e9 \uFFFD\uFFFD and \uFFFD at the end \uFFFD");
  expected.insert(expected.begin(), end_of_text);
  EXPECT_EQ(shard_tokens("bpe", "train"), expected);
  EXPECT_EQ(run("data/tokenize --val-fraction 0 --out " + in("bytes") + " " + file).exit_status, 0);
  expected = {256};
  for (char c : text) expected.push_back(uint8_t(c));
  EXPECT_EQ(shard_tokens("bytes", "train"), expected);
}

TEST_F(Corpus, ReadingADocumentInPartsDoesNotChangeItsTokens) {
  std::string text;
  for (const std::string& document : make_documents(5000, 250, 2)) text += document;
  ASSERT_GT(text.size(), size_t(2) << 20);
  tokenize("out", "--val-fraction 0 --threads 3 --shard-tokens 300000 " + write("in", text));
  std::vector<uint16_t> expected = tokens_of(text);
  expected.insert(expected.begin(), end_of_text);
  EXPECT_TRUE(shard_tokens("out", "train") == expected);
}

TEST_F(Corpus, TheSplitByBytesCutsNoCharacter) {
  std::string text;
  for (int i = 0; i < 10; i++) text += "\u4e2d";  // 30 bytes: 0.9 of them end at the end of a character, 0.75 do not
  tokenize("out", "--val-fraction 0.25 " + write("in", text));
  EXPECT_EQ(documents_in("out", "train"), std::vector<std::string>{text.substr(0, 21)});
  EXPECT_EQ(documents_in("out", "val"), std::vector<std::string>{text.substr(21)});
}

TEST_F(Corpus, AJsonLineIsADocumentWithItsEscapesDecoded) {
  const std::string lines = "{\"text\": \"a\\n\\\"b\\u00e9\\ud83d\\ude00\", \"id\": 1}\r\n\n  \n"
                            "{\"id\": 2, \"text\": \"half \\ud83d, \\ude00 and \\\\ud83d\\nd83d\"}\n"
                            "{\"text\": \"\"}\n{\"text\": \"\xFF\", \"more\": {\"text\": [1, 2]}}\n{\"text\": \"no "
                            "newline\"}";
  const Outcome o = tokenize("out", "--val-fraction 0 --field text " + write("in", lines));
  EXPECT_EQ(documents_in("out", "train"),
            (std::vector<std::string>{"a\n\"b\u00e9\U0001f600", "half \uFFFD, \uFFFD and \\ud83d\nd83d", "\uFFFD",
                                      "no newline"}));
  EXPECT_NE(o.out.find("documents: 4, "), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("not UTF-8: 3 sequences"), std::string::npos) << o.out;
}

TEST_F(Corpus, AJsonLineWithoutTheFieldIsNamed) {
  const std::string good = "{\"text\": \"fine\"}\n";
  expect_failure("--field text " + write("a", good + "\n" + good + "{\"txt\": \"x\"}\n"), {in("a") + ": line 4 is no "
                                                                                                     "JSON object with "
                                                                                                     "a string named "
                                                                                                     "\"text\""});
  expect_failure("--field text " + write("b", good + "{\"text\": 7}\n"), {"line 2"});
  expect_failure("--field text " + write("c", "just text\n"), {"line 1"});
  expect_failure("--field text " + write("d.tar", packed({{"x/one", good}, {"x/two", good + "{\"text\": \"cut"}})),
                 {in("d.tar") + ": x/two: line 2"});
  expect_failure("--field text " + write("e", "{\"text\": \"" + std::string(34 << 20, 'x')), {"line 1 is longer than "
                                                                                              "32 MB"});
}

static std::string pair_line(const std::string& prompt, const std::string& answer) {
  return nlohmann::json({{"prompt", prompt}, {"answer", answer}}).dump() + "\n";
}

TEST_F(Corpus, OfAPairTheAnswerAndItsEndOfTextAreScored) {
  // The empty pair is left out. "the" and "m" are encoded alone, though "them" may be one token.
  const std::string lines = pair_line("the", "m and") + pair_line("", "") + "\n" + pair_line("who is it?", "") +
                            pair_line("", "\u00e9") + pair_line("more", "or less");
  for (int64_t shard_tokens : {1, 3, 8, 100}) {  // masks end within a byte, and between two
    tokenize("out", "--force --val-fraction 0 --pairs --shard-tokens " + std::to_string(shard_tokens) + " " +
                        write("in", lines));
    std::vector<int> expected, found;  // tokens, and -1 - token for those that are not scored
    for (const std::vector<std::string>& pair :
         {std::vector<std::string>{"the", "m and"}, {"who is it?", ""}, {"", "\u00e9"}, {"more", "or less"}}) {
      for (uint16_t token : tokens_of(pair[0])) expected.push_back(-1 - token);
      for (uint16_t token : tokens_of(pair[1])) expected.push_back(token);
      expected.push_back(end_of_text);
    }
    for (const auto& path : fs::directory_iterator(in("out"))) {
      if (path.path().extension() != ".bin") continue;
      EXPECT_TRUE(fs::exists(mask_path_of(path.path())));
    }
    for (int i = 0; fs::exists(in("out") + format("/train_%06d.bin", i)); i++) {
      const TokenFile file(in("out") + format("/train_%06d.bin", i), 657);
      EXPECT_LE(file.num_tokens, shard_tokens);
      const std::vector<uint16_t> tokens = file.read(0, file.num_tokens);
      const std::vector<uint8_t> scored = file.mask.scored(0, file.num_tokens);
      for (size_t t = 0; t < tokens.size(); t++) found.push_back(scored[t] ? tokens[t] : -1 - tokens[t]);
    }
    EXPECT_EQ(found, expected) << shard_tokens;
  }
}

TEST_F(Corpus, MasksFitTheirTokensOverManyBatches) {
  std::mt19937 random(8);
  std::string lines;
  while (lines.size() < 3 << 20)
    lines += pair_line(std::string(random() % 300, 'p'), std::string(1 + random() % 300, 'a'));
  const Outcome o = run("data/tokenize --out " + in("out") + " --pairs " + write("in", lines));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const TokenFile file(in("out") + "/train_000000.bin", 257);
  ASSERT_GT(file.num_tokens, 2 << 20);
  const std::vector<uint16_t> tokens = file.read(0, file.num_tokens);
  const std::vector<uint8_t> scored = file.mask.scored(0, file.num_tokens);
  for (size_t t = 0; t < tokens.size(); t++) ASSERT_EQ(scored[t], tokens[t] != 'p') << t;
}

TEST_F(Corpus, DocumentsHaveNoMask) {
  tokenize("out", write("in", "just some text"));
  EXPECT_FALSE(fs::exists(in("out") + "/train_000000.mask"));
}

TEST_F(Corpus, AShardsMaskIsInTheManifestAndReplacedWithIt) {
  const std::string pairs = write("in", pair_line("a", "b") + pair_line("c", "d"));
  tokenize("out", "--val-fraction 0 --pairs " + pairs);
  const nlohmann::json manifest = nlohmann::json::parse(read_file(in("out") + "/MANIFEST.json"));
  const std::string mask = read_file(in("out") + "/train_000000.mask");
  EXPECT_EQ(manifest["shards"][0]["mask_crc32c"], crc32c_hex(crc32c(mask.data(), mask.size())));
  tokenize("out", "--force --val-fraction 0 " + pairs);
  EXPECT_FALSE(fs::exists(in("out") + "/train_000000.mask"));
  EXPECT_FALSE(fs::exists(in("out.old")));
}

TEST_F(Corpus, AFolderWhoseNameEndsInOldIsLeftAlone) {
  const std::string text = write("in", "some text that is long enough for two parts\n");
  tokenize("out.old", "--val-fraction 0 " + text);
  tokenize("out", "--val-fraction 0 " + text);
  tokenize("out", "--force --val-fraction 0 " + text);
  EXPECT_TRUE(fs::exists(in("out.old") + "/train_000000.bin"));
}

TEST_F(Corpus, ALinkIsFollowed) {
  tokenize("elsewhere", "--val-fraction 0 " + write("in", "some text\n"));
  fs::create_directory_symlink(in("elsewhere"), in("out"));
  const std::string before = read_file(in("elsewhere") + "/MANIFEST.json");
  tokenize("out", "--update --val-fraction 0 " + write("in", "another text\n"));
  EXPECT_TRUE(fs::is_symlink(in("out")));
  EXPECT_NE(read_file(in("elsewhere") + "/MANIFEST.json"), before);
  fs::remove_all(in("elsewhere"));
  const Outcome o = run("data/tokenize --out " + in("out") + " " + in("in"));
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("is a link that leads nowhere"), std::string::npos) << o.err;
  EXPECT_TRUE(fs::is_symlink(in("out")));
}

TEST(Packing, PutsTheLongestTextWhereTheLeastRoomIsLeft) {
  using Pieces = std::vector<std::pair<int64_t, int64_t>>;  // begin and length
  auto packed_rows = [](const std::vector<int64_t>& begins, int64_t end) {
    std::vector<Pieces> rows;
    for (const Row& row : pack(begins, end, 10)) {
      rows.emplace_back();
      for (const Piece& piece : row) rows.back().push_back({piece.begin, piece.length});
    }
    return rows;
  };
  // Texts of 3, 6, 2, 4, 3 and 2 tokens; in their order they take three rows.
  EXPECT_EQ(packed_rows({0, 3, 9, 11, 15, 18}, 20),
            (std::vector<Pieces>{{{0, 3}, {9, 2}, {15, 3}, {18, 2}}, {{3, 6}, {11, 4}}}));
  // Texts of 4, 23 and 7 tokens: what is left of the second begins a row.
  EXPECT_EQ(packed_rows({0, 4, 27}, 34), (std::vector<Pieces>{{{0, 4}}, {{4, 10}}, {{14, 10}}, {{24, 3}, {27, 7}}}));
}

// A row is T tokens of a shard, which has one more at its end.
TEST_F(Corpus, PackedRowsHaveEveryTextAndScoreItOnce) {
  const int64_t T = 48;
  const std::vector<std::string> documents = make_documents(300, 60, 5);
  std::string text;
  for (const std::string& document : documents) text += document + '\0';
  for (const bool before : {true, false}) {
    const Outcome o = tokenize("out", format("--force --val-fraction 0 --separator nul --shard-tokens 500 --pack %lld "
                                             "--end-of-text ",
                                             (long long)T) +
                                          (before ? "before " : "after ") + write("in", text));
    std::multiset<std::vector<uint16_t>> expected, found;
    int64_t tokens_of_texts = 0, pieces_after_a_cut = 0, cut = 0, scored = 0, rows = 0;
    for (const std::string& document : documents) {
      expected.insert(tokens_of(document));
      const int64_t n = int64_t(tokens_of(document).size()) + 1;
      tokens_of_texts += n, pieces_after_a_cut += (n - 1) / T, cut += n > T;
    }
    EXPECT_GT(cut, 10);
    std::vector<uint16_t> text_tokens;  // rows that go on with a text follow those that it begins in
    for (int i = 0; fs::exists(in("out") + format("/train_packed_%06d.bin", i)); i++) {
      const TokenFile file(in("out") + format("/train_packed_%06d.bin", i), 657);
      EXPECT_LE(file.num_tokens, 500);
      EXPECT_EQ(file.num_tokens % T, 1);
      rows += file.num_tokens / T;
      for (uint8_t is_scored : file.mask.scored(1, file.num_tokens - 1)) scored += is_scored;
      for (uint16_t token : file.read(0, file.num_tokens - 1)) {
        if (token != end_of_text) text_tokens.push_back(token);
        else if (!text_tokens.empty()) found.insert(std::exchange(text_tokens, {}));
      }
    }
    if (!text_tokens.empty()) found.insert(text_tokens);
    EXPECT_EQ(found, expected);
    // A text that begins a row after its end of text is predicted but for its first token.
    EXPECT_EQ(scored, tokens_of_texts - (before ? pieces_after_a_cut : rows));
    const nlohmann::json packing = nlohmann::json::parse(read_file(in("out") + "/MANIFEST.json")).at("packing");
    EXPECT_EQ(packing,
              nlohmann::json({{"texts", documents.size()}, {"cut", cut}, {"padding", rows * T - tokens_of_texts}}));
    const std::string share = format("%.2f %%\n", 100 * double(rows * T - tokens_of_texts) / double(rows * T));
    EXPECT_NE(o.out.find(share), std::string::npos) << share << o.out;
  }
}

// Texts of 1, 2, ..., 19 tokens, again and again, are packed some 50 tokens at a time, which changes what lies in a row
// with what, but neither cuts a text nor joins two.
TEST_F(Corpus, TextsThatArePackedInPortionsStayWhole) {
  for (const bool before : {true, false}) {
    std::vector<uint16_t> all;
    std::multiset<std::vector<uint16_t>> expected, found;
    for (int i = 0; i < 400; i++) {
      const std::vector<uint16_t> text(size_t(i % 19 + 1), uint16_t(i));
      if (before) all.push_back(999);
      all.insert(all.end(), text.begin(), text.end());
      if (!before) all.push_back(999);
      expected.insert(text);
    }
    const PackerSettings settings = {20, 100, 999, before, 50};
    const std::string folder_of_rows = in(before ? "before" : "after");
    fs::create_directory(folder_of_rows);
    ShardWriter writer(folder_of_rows, "train_packed", settings.rows_in_shard() * 20 + 1);
    PackingCounts counts;
    Packer packer(settings, writer, counts);
    for (size_t at = 0; at < all.size(); at += 7) {
      const std::vector<uint16_t> some(all.begin() + long(at), all.begin() + long(std::min(all.size(), at + 7)));
      packer.add(some, std::vector<uint8_t>(some.size(), 1));
    }
    packer.finish();
    EXPECT_EQ(counts.texts, 400);
    EXPECT_EQ(counts.cut, 0);
    EXPECT_EQ(counts.tokens, int64_t(all.size()));
    int64_t rows = 0;
    std::vector<uint16_t> text;
    for (const Shard& shard : writer.shards()) {
      EXPECT_LE(shard.tokens, 100);
      const TokenFile file(folder_of_rows + "/" + shard.name, 1000);
      rows += file.num_tokens / 20;
      for (uint16_t token : file.read(0, file.num_tokens)) {
        if (token != 999) text.push_back(token);
        else if (!text.empty()) found.insert(std::exchange(text, {}));
      }
    }
    EXPECT_EQ(found, expected);
    EXPECT_EQ(counts.padding, rows * 20 - counts.tokens);
  }
}

TEST_F(Corpus, PackedPairsKeepTheirMasks) {
  std::string lines;
  int64_t answers = 0;
  for (int i = 1; i < 50; i++) {
    lines += pair_line(std::string(size_t(i % 7 + 1), 'p'), std::string(size_t(i % 5 + 1), 'a'));
    answers += i % 5 + 2;
  }
  const Outcome o =
      run("data/tokenize --out " + in("out") + " --val-fraction 0 --pack 16 --pairs " + write("in", lines));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const TokenFile file(in("out") + "/train_packed_000000.bin", 257);
  int64_t scored = 0;
  for (int64_t t = 1; t < file.num_tokens; t++) {
    if (file.mask.scored(t, 1)[0] == 0) continue;
    scored++;
    EXPECT_NE(file.read(t, 1)[0], 'p');
  }
  EXPECT_EQ(scored, answers);
}

TEST_F(Corpus, ALineThatIsNoPairIsNamed) {
  const std::string good = pair_line("p", "a");
  for (const char* bad : {"{\"prompt\": \"p\"}", "{\"answer\": \"a\"}", "{\"prompt\": 1, \"answer\": \"a\"}",
                          "[\"p\", \"a\"]", "just text"})
    expect_failure("--pairs " + write("in", good + "\n" + good + bad + "\n" + good),
                   {in("in") + ": line 4 is no JSON", "--pairs needs \"prompt\" and \"answer\""});
  expect_failure("--pairs --field text " + in("in"), {"--pairs", "--field"});
  expect_failure("--pairs --end-of-text before " + in("in"), {"--pairs", "--end-of-text"});
}

// ----------------------------------------------------------------------------
// What is written

TEST_F(Corpus, ALineThatIsBrokenIsToldWhatItIs) {
  const std::vector<std::pair<std::string, std::string>> lines = {{"{\"text\": \"a\", \"score\": NaN}", "line 1 has "
                                                                                                        "NaN or "
                                                                                                        "Infinity, "
                                                                                                        "which are no "
                                                                                                        "JSON"},
                                                                  {"{\"text\": \"a\", \"score\": -Infinity}", "line 1 "
                                                                                                              "has NaN "
                                                                                                              "or "
                                                                                                              "Infinity"
                                                                                                              ", which "
                                                                                                              "are no "
                                                                                                              "JSON"},
                                                                  {"{\"text\": \"sec", "line 1 is JSON that is cut "
                                                                                       "short"},
                                                                  {"{\"text\": \"sec\"", "line 1 is JSON that is cut "
                                                                                         "short"},
                                                                  {"{'text': 'a'}", "line 1 is no JSON: byte 2"},
                                                                  {"{\"text\": 1e999}", "line 1 has the number 1e999"}};
  for (const auto& [line, what] : lines) {
    const Outcome o = run("data/tokenize --field text --out " + in("never") + " " + write("in", line));
    EXPECT_EQ(o.exit_status, 1);
    EXPECT_NE(o.err.find(in("in") + ": " + what), std::string::npos) << o.err;
    EXPECT_EQ(o.err.find("--field"), std::string::npos) << o.err;
  }
  expect_failure("--field text " + write("in", "{\"body\": \"a\", \"n\": 1, \"title\": \"b\"}"),
                 {"line 1 is no JSON object with a string named \"text\"; its strings: body, title; name the right"});
}

TEST_F(LongCorpus, TheNumberOfThreadsDoesNotChangeTheOutput) {
  std::vector<std::string> documents = make_documents(3000, 300, 3);
  documents[1000] = std::string(3 << 20, '\0') + documents[1000];  // a batch of its own, which takes longer
  std::vector<Entry> files;
  for (size_t i = 0; i < documents.size(); i++) files.push_back({format("%zu", i), documents[i]});
  const std::string arguments = "--shard-tokens 200000 " + write("in.tar", packed(files));
  tokenize("of_1", "--threads 1 " + arguments);
  for (const std::string threads : {"2", "3", "7"}) {
    tokenize("of_" + threads, "--threads " + threads + " " + arguments);
    expect_same("of_1", "of_" + threads, /*manifest=*/true);
  }
}

TEST_F(Corpus, TheManifestHasAllCountsAndChecksums) {
  const std::vector<std::string> documents = make_documents(400, 100, 4);
  std::string nul;
  for (const std::string& document : documents) nul += document + std::string(2, '\0');
  const std::string first = write("first", nul);
  const std::string second = write("second.tar", packed({{"a", "one"}, {"b", "two"}}) + std::string(900000, '\0'));
  tokenize("out", "--separator nul --shard-tokens 3000 " + first + " " + second);
  const json manifest = json::parse(read_file(in("out/MANIFEST.json")));
  auto checksum = [](const std::string& bytes) { return format("%08x", crc32c(bytes.data(), bytes.size())); };
  EXPECT_EQ(manifest["documents"], 402);
  EXPECT_EQ(manifest["bytes_of_text"], nul.size() - 800 + 6);
  EXPECT_EQ(manifest["runs_cut"], 0);
  EXPECT_EQ(manifest["tokenizer"]["vocab_size"], 657);
  EXPECT_EQ(manifest["tokenizer"]["end_of_text"], 656);
  EXPECT_EQ(manifest["tokenizer"]["crc32c"], format("%08x", Tokenizer::load(vocabulary).checksum()));
  ASSERT_EQ(manifest["sources"].size(), 2u);
  for (int i : {0, 1}) {
    const std::string path = i ? second : first, bytes = read_file(path);
    EXPECT_EQ(manifest["sources"][i], (json{{"path", path}, {"bytes", bytes.size()}, {"crc32c", checksum(bytes)}}));
  }
  int64_t train = 0, val = 0;
  size_t shards = 0;
  for (const json& shard : manifest["shards"]) {
    const std::string name = shard["name"], bytes = read_file(in("out/" + name));
    EXPECT_EQ(shard["crc32c"], checksum(bytes)) << name;
    EXPECT_EQ(int64_t(bytes.size()), 1024 + 2 * shard["tokens"].get<int64_t>()) << name;
    (name[0] == 't' ? train : val) += shard["tokens"].get<int64_t>();
    shards++;
  }
  EXPECT_EQ(manifest["train_tokens"], train);
  EXPECT_EQ(manifest["val_tokens"], val);
  EXPECT_EQ(shard_tokens("out", "train").size() + shard_tokens("out", "val").size(), size_t(train + val));
  EXPECT_EQ(size_t(std::distance(fs::directory_iterator(in("out")), {})), shards + 2);
  EXPECT_EQ(Tokenizer::load(in("out")).checksum(), Tokenizer::load(vocabulary).checksum());
}

// ----------------------------------------------------------------------------
// Hostile input; data/README.md has the limits

TEST_F(LongCorpus, MemoryIsBoundedForManyAndForEndlessDocuments) {
  const std::string limit = "ulimit -v 1000000; ";  // kB; threads reserve some 200,000 of them as they start
  std::string documents(5 << 20, '\0');
  for (size_t i = 0; i < documents.size(); i += 2) documents[i] = 'x';
  struct Input {
    std::string arguments, printed;
  };
  for (const Input& input :
       std::vector<Input>{{"--separator nul " + write("tiny", documents), "documents: 2621440, bytes of text: "
                                                                          "2621440,"},
                          {"--separator nul " + write("empty", std::string(20 << 20, '\0') + "one"), "documents: 1, "
                                                                                                     "bytes of text: "
                                                                                                     "3,"},
                          {"--any-bytes " + write("nuls", std::string(40 << 20, '\0')), "cut: 2 runs of more than 16 "
                                                                                        "MB without a "
                                                                                        "break\ntrain: 41943041 "
                                                                                        "tokens"}}) {
    fs::remove_all(in("out"));
    const Outcome o = run(limit + program + "--threads 2 --val-fraction 0 --out " + in("out") + " " + input.arguments);
    EXPECT_EQ(o.exit_status, 0) << o.err;
    EXPECT_NE(o.out.find(input.printed), std::string::npos) << o.out;
  }
}

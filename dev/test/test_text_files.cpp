// Which files data/tokenize takes for text, what it says of others, and archives that are damaged.
#include "corpus_test.h"
#include "data/archive_stream.h"

using namespace std::string_literals;

TEST_F(Corpus, WhatIsNoTextIsToldWhatItIs) {
  const std::vector<std::pair<std::string, std::string>> files = {{"\xff\xfeI\0t\0"s, "is UTF-16LE text; convert it to "
                                                                                      "UTF-8 (iconv "
                                                                                      "-f UTF-16LE -t UTF-8), or leave "
                                                                                      "it out"},
                                                                  {"\xfe\xff\0I\0t"s, "is UTF-16BE text"},
                                                                  {"\xff\xfe\0\0I\0\0\0"s, "is UTF-32LE text"},
                                                                  {"\0\0\xfe\xff\0\0\0I"s, "is UTF-32BE text"},
                                                                  {std::string("PK\x03\x04\x14\0\0\0\0", 9), "is a zip "
                                                                                                             "archive"},
                                                                  {"version https://git-lfs.github.com/spec/v1\noid "
                                                                   "sha256:0\nsize 9\n",
                                                                   "is a Git LFS pointer"},
                                                                  {"%PDF-1.4\n", "is a PDF"},
                                                                  {std::string("\x93NUMPY\1\0", 8), "is a NumPy array"},
                                                                  {"PAR1", "is a Parquet file"}};
  fs::create_directory(in("text"));
  write("text/a", "text");
  for (const auto& [bytes, what] : files) {
    write("text/b", bytes);
    expect_failure(in("text"), {in("text/b") + ": " + what});
    expect_failure(write("in.tar", packed({{"one", "text"}, {"two", bytes}})), {in("in.tar") + ": two: " + what});
  }
}

TEST_F(Corpus, WhatIsNoTextIsLeftOutOrIfNamedRefused) {
  std::mt19937 random(3);
  std::string noise(3000, 0), sound = "RIFF\x24\0\1\0WAVEfmt \x10\0\0\0\1\0\1\0\x40\x1f\0\0\x40\x1f\0\0\1\0\x8\0data"s;
  for (char& c : noise) c = char(random());
  for (int i = 0; i < 200000; i++) sound += char(128 + random() % 16);
  std::string script;
  while (script.size() < 400000) script += "echo a script, and its archive behind it\n";
  const std::vector<std::string> files = {"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x8\6\0\0\0\x1f\x15\xc4\x89"s,
                                          "\0\0\0\1Bud1\0\0\x10\0\0\0\x8\0"s + std::string(6000, 0),
                                          "\xff\xd8\xff\xe0\0\x10JFIF\0\1\1\1\0H\0H\0\0\xff\xdb"s,
                                          noise,
                                          sound,
                                          script + noise};
  fs::create_directory(in("folder"));
  write("folder/text", "a text");
  for (const std::string& bytes : files) {
    const bool begins_as_text = &bytes == &files.back();
    expect_failure(write("named", bytes),
                   {in("named") + ": is no text", begins_as_text ? "further on" : ": it has many"});
    expect_failure(write("named.gz", packed({{"", bytes}}, ARCHIVE_FILTER_GZIP)), {in("named.gz") + ": is no text"});
    const std::string tar = write("in.tar", packed({{"picture", bytes}, {"text", "a text"}}));
    write("folder/picture", bytes);
    for (const auto& [from, picture] : {std::pair(in("folder"), in("folder/picture")), {tar, tar + ": picture"}}) {
      fs::remove_all(in("out"));
      const Outcome o = tokenize("out", "--val-fraction 0 " + from);
      EXPECT_NE(o.err.find("warning: " + picture + (begins_as_text ? " (what follows its beginning)" : "") +
                           ": is left out: it is no text"),
                std::string::npos)
          << o.err;
      EXPECT_NE(o.out.find("left out: 1 files that are no text, 0 that are empty"), std::string::npos) << o.out;
      EXPECT_EQ(documents_in("out", "train").back(), "a text");
      EXPECT_EQ(documents_in("out", "train").size(), begins_as_text ? 2u : 1u);
    }
    EXPECT_EQ(run("data/tokenize --any-bytes --val-fraction 0 --out " + in("any") + " " + in("named")).exit_status, 0);
    std::vector<uint16_t> expected = {256};
    for (char c : bytes) expected.push_back(uint8_t(c));
    EXPECT_TRUE(shard_tokens("any", "train") == expected);
    fs::remove_all(in("any"));
  }
}

TEST_F(Corpus, TextInAnyLanguageAndEncodingIsText) {
  const std::string japanese_escapes = "\x1b$BF|K\\\x1b(B\n";
  for (const std::string& line :
       {"\u8bdd\u8bf4\u5929\u4e0b\u5927\u52bf\n"s, "\u043b\u0435\u0441\n"s, "\u0643\u0627\u0646\n"s,
        "\U0001f600\u200d\ufe0f\n"s, "\ufeffa mark\r\n"s, "\x1b[31mred\x1b[0m\n"s, "N\bNA\bAM\bM\f\v\a\n"s,
        japanese_escapes, "the end\r\n\x1a"s}) {
    std::string text = line;
    while (line.back() == '\n' && text.size() < 600000) text += line;
    fs::remove_all(in("out"));
    const Outcome o = tokenize("out", "--val-fraction 0 " + write("in", text));
    EXPECT_EQ(o.err, "") << line;
  }
}

TEST_F(Corpus, FilesThatMayNotBeMeantSoAreSaid) {
  const std::string latin1 = write("latin1", "la for\xeat \xe9tait d\xe9j\xe0 loin");
  Outcome o = run("data/tokenize --val-fraction 0 --out " + in("bytes") + " " + latin1);
  EXPECT_EQ(o.exit_status, 0);
  EXPECT_NE(o.err.find(latin1 + ": is not UTF-8; if it is Latin-1, iconv"), std::string::npos) << o.err;
  EXPECT_NE(o.out.find("files that are not UTF-8: 1\n"), std::string::npos) << o.out;
  const std::string lines = write("lines.jsonl", "{\"text\": \"a\"}\n{\"text\": \"b\"}\n");
  EXPECT_NE(tokenize("lines", "--val-fraction 0 " + lines).err.find(lines + ": holds JSON lines, and is taken as text"),
            std::string::npos);
  EXPECT_EQ(tokenize("fields", "--field text --val-fraction 0 " + lines).err, "");
  EXPECT_EQ(tokenize("one", "--val-fraction 0 " + write("one.json", "{\n \"a\": 1\n}\n")).err, "");
  std::string documents = "a";  // then three bytes a character, of which one is cut where a block ends
  for (int i = 0; i < 300000; i++) documents += i % 900 == 899 ? std::string(1, '\0') : "\u4e2d";
  EXPECT_EQ(tokenize("zeros", "--separator nul --val-fraction 0 " + write("zeros.txt", documents)).err, "");
  fs::create_directory(in("many"));
  write("many/text", "a text");
  for (int i = 0; i < 20; i++)
    write("many/e" + std::to_string(i), ""), write("many/l" + std::to_string(i), "\xe9t\xe9");
  o = tokenize("out", "--val-fraction 0 " + in("many"));
  EXPECT_NE(o.out.find("left out: 0 files that are no text, 20 that are empty\n"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("files that are not UTF-8: 20\n"), std::string::npos) << o.out;
  EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 10) << o.err;
}

TEST_F(Corpus, WhatDoesNotFitIsToldInItsUnits) {
  const std::string text = write("in", "a text");
  expect_failure("--pack 64 --shard-tokens 64 " + text, {"--shard-tokens 64: a shard of --pack 64 has a row and a "
                                                         "token "
                                                         "more; take at least 65"});
  expect_failure("--field text " + write("one", "{\"text\": \"a\"}\n"), {"1 documents are too few to split"});
  expect_failure(write("short", "a"), {"1 bytes are too few to split"});
}

TEST_F(Corpus, HistoriesAndLinksThatLeadNowhereAreLeftOut) {
  fs::create_directories(in("text/.git/objects"));
  fs::create_directories(in("text/deeper/.svn"));
  write("text/.git/objects/0", "x");
  write("text/deeper/.svn/0", "x");
  write("text/a", "a text");
  write("text/.gitignore", "of two files");
  fs::create_symlink("nowhere", in("text/link"));
  const Outcome o = run("data/tokenize --val-fraction 0 --out " + in("out") + " " + in("text"));
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_NE(o.out.find("files read: 2,"), std::string::npos) << o.out;
  for (const char* left_out : {"text/.git: is left out", "text/deeper/.svn: is left out", "text/link: is left out"})
    EXPECT_NE(o.err.find(in(left_out)), std::string::npos) << o.err;
}

TEST_F(Corpus, TheFolderThatIsWrittenIsNoTextOfItsOwn) {
  fs::create_directory(in("text"));
  write("text/a", "a text");
  const std::string command = "data/tokenize --val-fraction 0 --update --out " + in("text/tokens") + " " + in("text");
  EXPECT_NE(run(command).out.find("files read: 1,"), std::string::npos);
  const Outcome o = run(command);
  EXPECT_NE(o.out.find("exists already"), std::string::npos) << o.out << o.err;
  EXPECT_NE(o.err.find(in("text/tokens") + ": is left out"), std::string::npos) << o.err;
}

TEST_F(Corpus, DamagedTruncatedOrTooDeepArchivesAreNamed) {
  std::mt19937 random(7);
  std::string noise(300000, '\0');
  for (char& c : noise) c = char(random());
  for (int filter : {ARCHIVE_FILTER_GZIP, ARCHIVE_FILTER_XZ, ARCHIVE_FILTER_ZSTD}) {
    const std::string whole = packed({{"", noise}}, filter);
    expect_failure(write("cut", whole.substr(0, whole.size() / 2)), {in("cut") + ": is damaged or cut short: "});
  }
  const std::string tar = packed({{"a/good", "text"}, {"a/cut", noise}});
  expect_failure(write("cut.tar", tar.substr(0, 100000)), {in("cut.tar") + ": a/cut: is damaged or cut short: "});
  std::string deep = "text";
  for (int i = 20; i > 0; i--) deep = packed({{"level" + std::to_string(i), deep}});
  expect_failure(write("deep.tar", deep), {"deep.tar: level1: level2: ", "is nested 17 files deep"});
  const std::string zeros = packed({{"", std::string(10240, '\0')}}, ARCHIVE_FILTER_GZIP);
  expect_failure(write("zeros.gz", zeros), {in("zeros.gz") + ": is no text: "});
}

TEST_F(Corpus, WhatFollowsATarFilesEndIsNotLeftOut) {
  const std::string tar = packed({{"a", "first"}});
  for (const std::string& after : {packed({{"b", "second"}}), std::string(900000, '\0') + "x"})
    expect_failure(write("both.tar", tar + after), {in("both.tar") + ": is damaged or cut short: it goes on after its "
                                                                     "end"});
}

// Every byte of compressed files is changed once, and they are cut: what is read is an error or the same bytes. A
// changed magic number makes a file of other bytes, which are no text.
TEST_F(Corpus, TheChecksumOfEachFormatIsChecked) {
  auto content = [&](const std::string& bytes) {
    std::vector<SourceFile> sources = {{write("in", bytes)}};
    ArchiveStream stream(sources);
    std::string all, block(100000, '\0');
    while (stream.next_file()) all.append(block.data(), stream.read(block.data(), block.size()));
    return all;
  };
  const std::string text = "A text whose every byte counts, and counts, and counts.\n", half = text.substr(0, 20);
  std::mt19937 random(4);
  for (int filter : {ARCHIVE_FILTER_GZIP, ARCHIVE_FILTER_BZIP2, ARCHIVE_FILTER_XZ})
    for (const std::string& whole : {packed({{"", text}}, filter), packed({{"a", text}, {"b", ""}}, filter),
                                     packed({{"", half}}, filter) + packed({{"", text.substr(20)}}, filter)}) {
      EXPECT_EQ(content(whole), text);
      EXPECT_EQ(content(whole + std::string(700, '\0')), text);
      EXPECT_ANY_THROW(content(whole + "behind its end"));
      for (size_t at = 0; at < whole.size(); at++) {
        std::string damaged = whole;
        damaged[at] ^= char(1 << random() % 8);
        for (const std::string& bytes : {damaged, whole.substr(0, at)}) {
          std::string found;
          try {
            found = content(bytes);
          } catch (const UserError&) { continue; }
          EXPECT_TRUE(found == text || found == bytes || at == packed({{"", half}}, filter).size())
              << filter << " " << at;
        }
      }
    }
}

TEST_F(Corpus, NamesInAnArchiveAreNotPaths) {
  fs::create_directories(in("a/b"));
  write("a/b/c.tar", packed({{"../../evil", "first"}, {in("evil"), "second"}, {"\x1B[31mred\n", "third"}}));
  tokenize("a/b/out", "--val-fraction 0 " + in("a/b/c.tar"));
  EXPECT_EQ(documents_in("a/b/out", "train"), (std::vector<std::string>{"first", "second", "third"}));
  EXPECT_FALSE(fs::exists(in("evil")));
  expect_failure("--field text " + write("d.tar", packed({{"\x1B[31mred\n", "third"}})), {"?[31mred?"});
}

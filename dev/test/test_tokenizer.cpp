// The tokenizer against tiktoken: dev/test/tokenizer/ has a small vocabulary in each format, and texts with tiktoken's
// ids, all written by dev/tokenizer_compare.py, which compares many more texts with GPT-2's own vocabulary.
#include <gtest/gtest.h>
#include <algorithm>
#include <climits>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include "files.h"
#include "dev/test/helpers.h"
#include "llmc/text/tokenizer.h"
#include "llmc/text/unicode_classes.h"

namespace fs = std::filesystem;
using Ids = std::vector<uint16_t>;

static const std::string fixture = "dev/test/tokenizer/";

static Ids encode(const Tokenizer& tokenizer, std::string_view text) {
  Ids ids;
  Encoder(tokenizer).encode(text, ids);
  return ids;
}

// The bytes of these tokens, concatenated.
static std::string decoded(const Tokenizer& tokenizer, const std::vector<uint16_t>& ids) {
  std::string bytes;
  for (uint16_t id : ids) bytes += tokenizer.token(id);
  return bytes;
}

// What Python's bytes.decode(errors="replace") makes of a text.
static std::string replaced(const std::string& bytes) {
  std::string text;
  return replace_invalid_utf8(bytes, text) > 0 ? text : bytes;
}

struct Case {
  std::string text;
  Ids ids;
};

static std::vector<Case> cases() {
  std::vector<Case> all;
  std::ifstream file(fixture + "cases.txt");
  for (std::string line; std::getline(file, line);) {
    if (line[0] == '#') continue;
    Case c;
    const size_t colon = line.find(':');
    for (size_t i = 0; i < colon; i += 2) c.text += char(std::stoi(line.substr(i, 2), nullptr, 16));
    std::istringstream ids(line.substr(colon + 1));
    for (int id; ids >> id;) c.ids.push_back(uint16_t(id));
    all.push_back(c);
  }
  return all;
}

// Words of random lengths from a few letters, some of them with other characters between.
static std::string random_words(int words, unsigned seed) {
  static const std::vector<std::string> between = {" ", " ", " ",      "  ",     "\n",     "'s ",
                                                   ".", "1", "\u4e2d", "\u00e9", "\u3000", "\t\n "};
  std::mt19937 random(seed);
  std::string text;
  for (int i = 0; i < words; i++) {
    for (size_t n = 1 + random() % 20; n > 0; n--) text += "aeinorst"[random() % 8];
    text += between[random() % between.size()];
  }
  return text;
}

struct Vocabulary : FolderTest {
  // A file of the fixture, in which `old` became `now`.
  std::string changed(const std::string& name, const std::string& old, const std::string& now) const {
    std::string text = read_file(fixture + name);
    CHECK(text.find(old) != std::string::npos);
    return write(name, text.replace(text.find(old), old.size(), now));
  }
};

// ----------------------------------------------------------------------------
// Encoding

TEST(Encode, GivesTiktokensIdsWithAnyVocabularyFile) {
  const std::vector<Case> all = cases();
  ASSERT_GT(all.size(), 300u);
  for (const char* file : {"small.tiktoken", "vocab.bpe", "encoder.json", "tokenizer.json", ""}) {
    const Tokenizer tokenizer = Tokenizer::load(fixture + file);
    EXPECT_EQ(tokenizer.vocab_size(), 657) << file;
    EXPECT_EQ(tokenizer.end_of_text(), 656) << file;
    Encoder encoder(tokenizer);
    for (const Case& c : all) {
      for (int again : {0, 1}) {  // then from the cache
        Ids ids = {7};            // tokens that exist already stay
        encoder.encode(replaced(c.text), ids);
        EXPECT_EQ(ids.front(), 7);
        EXPECT_EQ(Ids(ids.begin() + 1, ids.end()), c.ids) << file << ": " << c.text << (again ? ", again" : "");
      }
    }
  }
}

TEST(Encode, AnyBytesRoundTrip) {
  const Tokenizer tokenizer = Tokenizer::load(fixture + "small.tiktoken");
  Encoder encoder(tokenizer);
  std::mt19937 random(1);
  for (int i = 0; i < 20000; i++) {
    std::string bytes(random() % 40, '\0');
    for (char& byte : bytes) byte = char(random() % 3 ? random() : "\xE2\x82 '"[random() % 4]);
    Ids ids;
    encoder.encode(bytes, ids);
    ASSERT_EQ(decoded(tokenizer, ids), bytes);
  }
}

TEST(Encode, TheCacheDoesNotChangeTheTokens) {
  const Tokenizer tokenizer = Tokenizer::load(fixture + "small.tiktoken");
  const std::string text = random_words(100000, 2);  // three times the size of the cache
  Ids remembering;
  Encoder encoder(tokenizer);
  encoder.encode(text, remembering);
  Ids pieces;
  for (size_t begin = 0, end; begin < text.size(); begin = end) {
    end = std::min(text.size(), begin + 10000);
    if (end < text.size()) end = begin + tokenizer.last_cut(std::string_view(text).substr(begin, end - begin));
    const Ids ids = encode(tokenizer, std::string_view(text).substr(begin, end - begin));
    pieces.insert(pieces.end(), ids.begin(), ids.end());
  }
  EXPECT_TRUE(remembering == pieces);
}

TEST(Encode, AHugePieceTakesNoQuadraticTime) {
  const Tokenizer tokenizer = Tokenizer::load(fixture + "small.tiktoken");
  // The longest piece that threads merge at the same time, and a longer one.
  for (size_t length : {size_t(1) << 20, (size_t(1) << 20) + 1}) {
    std::string word(length, '\0');
    std::mt19937 random(3);
    for (char& c : word) c = "aeinorst"[random() % 8];
    const Ids ids = encode(tokenizer, word);  // looking at all pairs for each merge would take hours
    EXPECT_EQ(decoded(tokenizer, ids), word);
    const Ids begin = encode(tokenizer, std::string_view(word).substr(0, 1000));
    EXPECT_GT(std::mismatch(begin.begin(), begin.end(), ids.begin()).first - begin.begin(), 300);
    EXPECT_LT(ids.size(), length * 3 / 4);
  }
}

// tiktoken's format.
static std::string ranks_file(const std::map<std::string, int>& ranks) {
  static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string file;
  for (const auto& [token, rank] : ranks) {
    for (size_t i = 0; i < token.size(); i += 3) {
      uint32_t bits = 0;
      for (size_t k = 0; k < 3; k++) bits = bits << 8 | (i + k < token.size() ? uint8_t(token[i + k]) : 0u);
      for (size_t k = 0; k < 4; k++) file += i + k <= token.size() ? digits[bits >> (18 - 6 * k) & 63] : '=';
    }
    file += " " + std::to_string(rank) + "\n";
  }
  return file;
}

// The definition in tokenizer.h, implemented literally.
static std::vector<std::string> merged_naively(const std::string& piece, const std::map<std::string, int>& ranks) {
  std::vector<std::string> parts;
  for (char byte : piece) parts.emplace_back(1, byte);
  for (;;) {
    int lowest = INT_MAX;
    size_t at = 0;
    for (size_t i = 0; i + 1 < parts.size(); i++) {
      const auto found = ranks.find(parts[i] + parts[i + 1]);
      if (found != ranks.end() && found->second < lowest) lowest = found->second, at = i;
    }
    if (lowest == INT_MAX) return parts;
    parts[at] += parts[at + 1];
    parts.erase(parts.begin() + long(at) + 1);
  }
}

TEST_F(Vocabulary, OnlyLowerCaseContractionsKeepTheirApostrophe) {
  std::map<std::string, int> ranks;
  for (int byte = 0; byte < 256; byte++) ranks[std::string(1, char(byte))] = byte;
  std::vector<std::string> contractions = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}, others;
  for (char a : std::string("stmdrvlaeRSLV"))
    for (char b : std::string("elaEL")) {
      for (const std::string& token : {std::string{'\'', a}, std::string{'\'', a, b}})
        ranks.emplace(token, int(ranks.size()));
      const bool begins = std::count(contractions.begin(), contractions.end(), std::string{'\'', a}) > 0;
      const std::string all = {'\'', a, b};
      if (!begins && std::count(contractions.begin(), contractions.end(), all) == 0) others.push_back(all);
    }
  const Tokenizer tokenizer = Tokenizer::load(write("ranks", ranks_file(ranks)));
  for (const std::string& c : contractions) EXPECT_EQ(encode(tokenizer, c), Ids{uint16_t(ranks.at(c))}) << c;
  for (const std::string& other : others) EXPECT_EQ(encode(tokenizer, other).size(), 3u) << other;
  EXPECT_EQ(others.size(), 9u * 5 - 3);
}

// In a trained vocabulary a token has a higher id than those it is made of. Here a merge can make a pair of lower rank
// than its own.
TEST_F(Vocabulary, TheLowestIdIsMergedFirstFromTheLeft) {
  std::mt19937 random(8);
  int earlier = 0;
  for (int v = 0; v < 200; v++) {
    const unsigned letters = 2 + unsigned(v) % 2;
    std::set<std::string> words;
    while (words.size() < 40) {
      std::string word;
      for (unsigned n = 2 + random() % 5; n > 0; n--) word += "abc"[random() % letters];
      words.insert(word);
    }
    std::vector<std::string> tokens(words.begin(), words.end());
    std::shuffle(tokens.begin(), tokens.end(), random);
    std::map<std::string, int> ranks;
    for (int byte = 0; byte < 256; byte++) ranks[std::string(1, char(byte))] = byte;
    for (size_t i = 0; i < tokens.size(); i++) ranks[tokens[i]] = 256 + int(i);
    for (const auto& [a, rank] : ranks)
      for (const auto& [b, longer] : ranks)
        earlier += b.size() > a.size() && a.size() > 1 && b.find(a) != std::string::npos && longer < rank;
    const Tokenizer tokenizer = Tokenizer::load(write("ranks", ranks_file(ranks)));
    for (size_t length : {7, 128, 129, 300}) {
      std::string piece;
      for (size_t i = 0; i < length; i++) piece += "abc"[random() % letters];
      Ids expected;
      for (const std::string& part : merged_naively(piece, ranks)) expected.push_back(uint16_t(ranks.at(part)));
      ASSERT_EQ(encode(tokenizer, piece), expected) << piece;
    }
  }
  EXPECT_GT(earlier, 1000);
}

TEST(Encode, ASpecialTokenIsTextUnlessAskedFor) {
  const Tokenizer tokenizer = Tokenizer::load(fixture + "small.tiktoken");
  const std::string text = "<|endoftext|>a<|endoftext|><|endoftext";
  const Ids plain = encode(tokenizer, text);
  EXPECT_EQ(std::count(plain.begin(), plain.end(), 656), 0);
  Ids ids, a, rest;
  Encoder encoder(tokenizer);
  encoder.encode(text, ids, /*end_of_text=*/true);
  encoder.encode("a", a);
  encoder.encode("<|endoftext", rest);
  Ids expected = {656, a.at(0), 656};
  expected.insert(expected.end(), rest.begin(), rest.end());
  EXPECT_EQ(ids, expected);
  EXPECT_EQ(decoded(tokenizer, ids), text);
}

// The fixture with the tokens <speaker1>, <speaker1>! and " x" added, as Hugging Face tokenizers adds them.
static std::string with_added_tokens() {
  nlohmann::json j = nlohmann::json::parse(read_file(fixture + "tokenizer.json"));
  for (const char* name : {"<speaker1>", "<speaker1>!", " x"}) {
    nlohmann::json added = j["added_tokens"][0];
    added["id"] = 656 + j["added_tokens"].size(), added["content"] = name, added["special"] = false;
    j["added_tokens"].push_back(added);
  }
  return j.dump();
}

TEST_F(Vocabulary, AddedTokensAreTheSameInTextsAndPrompts) {
  const Tokenizer tokenizer = Tokenizer::load(write("tokenizer.json", with_added_tokens()));
  const std::string text = "<speaker1>Hi <speaker1>!<speaker1<speaker1> a x<speaker1>";
  Ids expected = {657};
  auto then = [&](const std::string& ordinary, std::initializer_list<uint16_t> added) {
    const Ids ids = encode(Tokenizer::load(fixture + "small.tiktoken"), ordinary);
    expected.insert(expected.end(), ids.begin(), ids.end());
    expected.insert(expected.end(), added);
  };
  then("Hi ", {658});
  then("<speaker1", {657});
  then(" a", {659, 657});
  EXPECT_EQ(encode(tokenizer, text), expected);
  expected.insert(expected.begin(), 656);
  EXPECT_EQ(encode_prompt(tokenizer, text), std::vector<int>(expected.begin(), expected.end()));
  EXPECT_EQ(Tokenizer::load(write("again.json", tokenizer.to_json())).checksum(), tokenizer.checksum());
}

TEST_F(Vocabulary, AddedTokensThatTakeSpacesAreRefused) {
  for (const char* key : {"lstrip", "rstrip", "single_word"}) {
    nlohmann::json j = nlohmann::json::parse(with_added_tokens());
    j["added_tokens"][1][key] = true;
    EXPECT_ERROR(Tokenizer::load(write("tokenizer.json", j.dump())), std::string(key) + " of the added token "
                                                                                        "\"<speaker1>\" is set");
  }
}

// transformers writes them so beside vocab.json: which of added_tokens.json are special, other files say.
TEST_F(Vocabulary, AddedTokensInFilesBesideItBelongToIt) {
  fs::copy_file(fixture + "encoder.json", folder + "/vocab.json");
  fs::copy_file(fixture + "vocab.bpe", folder + "/merges.txt");
  write("added_tokens.json", R"({"<user>": 657, "<end>": 658, "<|endoftext|>": 656})");
  write("special_tokens_map.json", R"({"eos_token": {"content": "<end>"}, "pad_token": "<|endoftext|>"})");
  write("tokenizer_config.json", R"({"added_tokens_decoder": {"659": {"content": "  ", "special": false}}})");
  const Tokenizer tokenizer = Tokenizer::load(folder);
  EXPECT_EQ(tokenizer.vocab_size(), 660);
  EXPECT_EQ(encode(tokenizer, "<user>  <end>"), (Ids{657, 659, 658}));
  std::map<std::string, bool> special;
  const nlohmann::json written = nlohmann::json::parse(tokenizer.to_json());
  for (const nlohmann::json& token : written["added_tokens"]) special[token["content"]] = token["special"];
  EXPECT_EQ(special,
            (std::map<std::string, bool>{{"<|endoftext|>", true}, {"<user>", false}, {"<end>", true}, {"  ", false}}));
  // A tokenizer.json beside them, which lacks them, changes nothing.
  fs::copy_file(fixture + "tokenizer.json", folder + "/tokenizer.json");
  EXPECT_EQ(Tokenizer::load(folder).checksum(), tokenizer.checksum());
  for (const auto& [text, part] : {std::pair(R"({"<user>": 660, "<user>": 5})", "the added token \"<user>\" has the id "
                                                                                "5"),
                                   {R"({"<|endoftext|>": 700})", "the added token \"<|endoftext|>\" has two ids"},
                                   {R"({"<user>": "x"})", "added tokens"}}) {
    write("added_tokens.json", text);
    EXPECT_ERROR(Tokenizer::load(folder + "/vocab.json"), part);
  }
}

// Hugging Face's finds an added token before it splits a text, even where it is a token of the vocabulary as well.
TEST_F(Vocabulary, AnAddedTokenMayBeAnOrdinaryOneToo) {
  nlohmann::json j = nlohmann::json::parse(read_file(fixture + "tokenizer.json"));
  const Ids a = encode(Tokenizer::load(fixture), "a"), er = encode(Tokenizer::load(fixture), "er");
  ASSERT_EQ(er.size(), 1u);
  for (const auto& [name, id] : {std::pair("a", a[0]), {"er", er[0]}}) {
    nlohmann::json added = j["added_tokens"][0];
    added["content"] = name, added["id"] = id, added["special"] = false;
    j["added_tokens"].push_back(added);
  }
  const Tokenizer tokenizer = Tokenizer::load(write("tokenizer.json", j.dump()));
  EXPECT_EQ(tokenizer.checksum(), Tokenizer::load(fixture).checksum());
  const Ids ids = encode(tokenizer, "and other aa");
  EXPECT_EQ(ids[0], a[0]);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), a[0]), 3);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), er[0]), 1) << "of other";
  const nlohmann::json again = nlohmann::json::parse(tokenizer.to_json());
  EXPECT_EQ(again["added_tokens"], j["added_tokens"]);
  EXPECT_EQ(again["model"]["merges"].size(), 400u);
  EXPECT_EQ(encode(Tokenizer::load(write("tokenizer.json", again.dump())), "and other aa"), ids);
  j["added_tokens"][1]["content"] = "b";  // its id is not a's
  EXPECT_ERROR(Tokenizer::load(write("tokenizer.json", j.dump())), "which is another token's, a; remove one of them");
}

TEST_F(Vocabulary, WindowsLineEndsAreReadAsOthers) {
  for (const char* name : {"small.tiktoken", "vocab.bpe"}) {
    std::string text;
    for (char c : read_file(fixture + name)) text += c == '\n' ? std::string("\r\n") : std::string(1, c);
    write("encoder.json", read_file(fixture + "encoder.json"));
    EXPECT_EQ(Tokenizer::load(write(name, text)).checksum(), Tokenizer::load(fixture + name).checksum()) << name;
  }
}

TEST_F(Vocabulary, WhatIsNoVocabularyIsRefusedByWhatItIs) {
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n", ranks = "\"IQ== 0";
  std::string wide = "\xff\xfe";
  for (char c : ranks) wide += {c, '\0'};
  for (const char* name : {"a.tiktoken", "tokenizer.json"}) {
    EXPECT_ERROR(Tokenizer::load(write(name, pointer)), std::string(name) + ": is a Git LFS pointer");
    EXPECT_ERROR(Tokenizer::load(write(name, std::string("PK\x03\x04\x14\0", 6))), std::string(name) + ": is a zip "
                                                                                                       "archive");
    EXPECT_ERROR(Tokenizer::load(write(name, wide)), std::string(name) + ": is UTF-16LE text; convert it");
  }
  write("vocab.json", read_file(fixture + "encoder.json"));
  write("merges.txt", pointer);
  EXPECT_ERROR(Tokenizer::load(in("vocab.json")), "merges.txt: is a Git LFS pointer");
}

TEST(Encode, AByteIsATokenInTheVocabularyOfBytes) {
  const Tokenizer tokenizer = Tokenizer::bytes();
  std::string text;
  Ids expected;
  for (int byte = 0; byte < 256; byte++) text += char(byte), expected.push_back(uint16_t(byte));
  EXPECT_EQ(encode(tokenizer, text), expected);
  EXPECT_EQ(decoded(tokenizer, expected), text);
  EXPECT_EQ(tokenizer.vocab_size(), 257);
  EXPECT_EQ(tokenizer.token(tokenizer.end_of_text()), "<|endoftext|>");
  EXPECT_EQ(tokenizer.last_cut("a\xE4\xB8"), 3u);
}

// ----------------------------------------------------------------------------
// Cutting a text

TEST(LastCut, ACutDoesNotChangeTheTokens) {
  const Tokenizer tokenizer = Tokenizer::load(fixture + "small.tiktoken");
  int cuts = 0;
  for (const Case& c : cases()) {
    const std::string text = replaced(c.text);
    for (size_t seen = 1; seen <= text.size(); seen++) {  // whatever follows the bytes that are seen
      const size_t cut = tokenizer.last_cut(std::string_view(text).substr(0, seen));
      ASSERT_LT(cut, seen);
      Ids ids = encode(tokenizer, std::string_view(text).substr(0, cut));
      const Ids rest = encode(tokenizer, std::string_view(text).substr(cut));
      ids.insert(ids.end(), rest.begin(), rest.end());
      ASSERT_EQ(ids, c.ids) << text << ", of which " << seen << " bytes are seen, cut at " << cut;
      cuts += cut > 0;
      if (text.size() > 100) seen += 17;
    }
  }
  EXPECT_GT(cuts, 1000);
}

TEST_F(Vocabulary, ACutLeavesAddedTokensWhole) {
  const Tokenizer tokenizer = Tokenizer::load(write("tokenizer.json", with_added_tokens()));
  Encoder encoder(tokenizer);
  std::mt19937 random(4);
  int cuts = 0;
  for (int n = 0; n < 40; n++) {
    std::string text;
    while (text.size() < 60)
      text +=
          std::vector<std::string>{"<speaker1>", "<speaker1>!", " x", "<speak", "er1>", "word", " ", "7"}[random() % 8];
    Ids whole;
    encoder.encode(text, whole);
    for (size_t seen = 1; seen <= text.size(); seen++) {
      const size_t cut = tokenizer.last_cut(std::string_view(text).substr(0, seen));
      Ids ids;
      encoder.encode(std::string_view(text).substr(0, cut), ids);
      encoder.encode(std::string_view(text).substr(cut), ids);
      ASSERT_EQ(ids, whole) << text << ", of which " << seen << " bytes are seen, cut at " << cut;
      cuts += cut > 0;
    }
  }
  EXPECT_GT(cuts, 500);
}

TEST(LastCut, LiesBetweenCharactersOfDifferentKinds) {
  const Tokenizer tokenizer = Tokenizer::load(fixture + "small.tiktoken");
  struct Expected {
    std::string text;
    size_t cut;
  };
  for (const Expected& e : std::vector<Expected>{{"one two", 3},
                                                 {"word", 0},
                                                 {"", 0},
                                                 {"a", 0},
                                                 {"ab  ", 2},
                                                 {"ab 12", 2},
                                                 {"ab12", 2},
                                                 {"12;ab", 3},
                                                 {"it's", 2},
                                                 {"'s", 0},
                                                 {"'1", 1},
                                                 {"a\n\n", 1},
                                                 {"\n\nab", 0},
                                                 {"\u4e2d\u3002\n", 6},
                                                 {"\u4e2d\u3002\u4e2d.", 9},
                                                 {"\u4e2d\u4e2d", 0},
                                                 {"a\u00a0\u00a0", 1},
                                                 {"a \xC2", 1}})
    EXPECT_EQ(tokenizer.last_cut(e.text), e.cut) << e.text;
}

// ----------------------------------------------------------------------------
// Characters

TEST(Utf8, EachInvalidSequenceIsReplacedOnce) {
  struct Expected {
    std::string bytes, text;
    int count;
  };
  const std::string r = "\uFFFD";
  for (const Expected& e : std::vector<Expected>{{"plain ASCII, and long enough", "plain ASCII, and long enough", 0},
                                                 {"\u00e9\u4e2d\U0001f600\uFFFD", "\u00e9\u4e2d\U0001f600\uFFFD", 0},
                                                 {"a\xFFz", "a" + r + "z", 1},
                                                 {"\x80\x80", r + r, 2},
                                                 {"\xE2\x82z", r + "z", 1},
                                                 {"\xF0\x9F\x98", r, 1},
                                                 {"\xF0\x9F\x98\xF0\x9F\x98\x80", r + "\U0001f600", 1},
                                                 {"\xC0\xAF", r + r, 2},
                                                 {"\xE0\x80\xAF", r + r + r, 3},
                                                 {"\xED\xA0\x80", r + r + r, 3},
                                                 {"\xED\x9F\xBF\xEE\x80\x80", "\uD7FF\uE000", 0},
                                                 {"\xF4\x8F\xBF\xBF", "\U0010FFFF", 0},
                                                 {"\xF4\x90\x80\x80", r + r + r + r, 4},
                                                 {"\xF0\x80\x80\x80", r + r + r + r, 4},
                                                 {"01234567\xC3"
                                                  "89abcdef\xC3\xA9",
                                                  "01234567" + r + "89abcdef\u00e9", 1}}) {
    std::string text = "before";
    EXPECT_EQ(replace_invalid_utf8(e.bytes, text), e.count) << e.text;
    EXPECT_EQ(e.count > 0 ? text : e.bytes, e.text);
    EXPECT_EQ(text == "before", e.count == 0);
  }
}

TEST(Printable, ControlCharactersAndInvalidUtf8AreReplaced) {
  EXPECT_EQ(printable("two\nlines\tand \u00e9\u4e2d\U0001f600"), "two\nlines\tand \u00e9\u4e2d\U0001f600");
  EXPECT_EQ(printable("\x1b[2J\a\x7f\r|"), "?[2J???|");
  EXPECT_EQ(printable("\u009b2J\u0085\u00a0"), "?2J?\u00a0");
  EXPECT_EQ(printable("\xe4\xb8|\x9b"), "\ufffd|\ufffd");
  EXPECT_EQ(printable(std::string(1, '\0')), "?");
  EXPECT_EQ(printable(""), "");
}

TEST(UnicodeClasses, HaveTheCodePointsOfUnicode16InOrder) {
  auto count = [](const char* ranges) {
    int64_t code_points = 0, end = -1;
    for_each_range(ranges, [&](uint32_t first, uint32_t last) {
      EXPECT_GT(int64_t(first), end + 1);  // otherwise they would be one range
      EXPECT_GE(last, first);
      code_points += last - first + 1;
      end = last;
    });
    EXPECT_LT(end, 0x110000);
    return code_points;
  };
  // The counts that the Unicode Character Database states at the end of each category of
  // DerivedGeneralCategory-16.0.0.txt, added up.
  EXPECT_EQ(count(unicode_letters), 1858 + 2258 + 31 + 404 + 136477);  // Lu, Ll, Lt, Lm, Lo
  EXPECT_EQ(count(unicode_numbers), 760 + 236 + 915);                  // Nd, Nl, No
  EXPECT_EQ(count(unicode_white_space), 25);
}

// ----------------------------------------------------------------------------
// Vocabulary files

TEST_F(Vocabulary, TheChecksumDependsOnTheTokensAlone) {
  const uint32_t checksum = Tokenizer::load(fixture + "small.tiktoken").checksum();
  for (const char* file : {"vocab.bpe", "encoder.json", "tokenizer.json"})
    EXPECT_EQ(Tokenizer::load(fixture + file).checksum(), checksum) << file;
  EXPECT_NE(Tokenizer::load(changed("small.tiktoken", " 655\n", " 660\n")).checksum(), checksum);
  EXPECT_NE(Tokenizer::load(changed("small.tiktoken", "IQ== 0\nIg== 1\n", "IQ== 1\nIg== 0\n")).checksum(), checksum);
  EXPECT_NE(Tokenizer::bytes().checksum(), checksum);
}

TEST_F(Vocabulary, HuggingFacesNamesOfOpenAIsFilesAreKnown) {
  fs::copy_file(fixture + "encoder.json", folder + "/vocab.json");
  fs::copy_file(fixture + "vocab.bpe", folder + "/merges.txt");
  const uint32_t checksum = Tokenizer::load(fixture + "small.tiktoken").checksum();
  for (const std::string& path : {folder, folder + "/vocab.json", folder + "/merges.txt"})
    EXPECT_EQ(Tokenizer::load(path).checksum(), checksum);
}

TEST_F(Vocabulary, AFolderOfRanksIsReadFromItsFirstFile) {
  EXPECT_EQ(Tokenizer::file_in(folder), "");
  EXPECT_EQ(Tokenizer::file_in(folder + "/nowhere"), "");
  write("b.tiktoken", "damaged");
  fs::copy_file(fixture + "small.tiktoken", folder + "/a.tiktoken");
  EXPECT_EQ(Tokenizer::file_in(folder), folder + "/a.tiktoken");
  EXPECT_EQ(Tokenizer::load(folder).checksum(), Tokenizer::load(fixture + "small.tiktoken").checksum());
  write("tokenizer.json", "{}");
  EXPECT_EQ(Tokenizer::file_in(folder), folder + "/tokenizer.json");
}

// The fixture's was written by Hugging Face tokenizers.
TEST_F(Vocabulary, ATokenizerJsonHasHuggingFacesMergesAndRoundTrips) {
  const Tokenizer tokenizer = Tokenizer::load(fixture + "small.tiktoken");
  nlohmann::json ours = nlohmann::json::parse(tokenizer.to_json()),
                 theirs = nlohmann::json::parse(read_file(fixture + "tokenizer.json"));
  for (nlohmann::json& merge : theirs["model"]["merges"])
    merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  theirs["model"]["vocab"]["<|endoftext|>"] = 656;  // which is only among its added tokens
  EXPECT_EQ(ours["model"]["vocab"], theirs["model"]["vocab"]);
  EXPECT_EQ(ours["model"]["merges"], theirs["model"]["merges"]);
  EXPECT_EQ(ours["model"]["merges"].size(), 400u);
  EXPECT_EQ(ours["added_tokens"], theirs["added_tokens"]);
  EXPECT_EQ(ours["pre_tokenizer"], theirs["pre_tokenizer"]);
  const Tokenizer again = Tokenizer::load(write("tokenizer.json", tokenizer.to_json()));
  EXPECT_EQ(again.checksum(), tokenizer.checksum());
  EXPECT_EQ(again.end_of_text(), tokenizer.end_of_text());
  for (const Case& c : cases()) ASSERT_EQ(encode(again, c.text), encode(tokenizer, c.text));
}

TEST_F(Vocabulary, TheVocabularyOfBytesRoundTripsThroughATokenizerJson) {
  const Tokenizer again = Tokenizer::load(write("tokenizer.json", Tokenizer::bytes().to_json()));
  EXPECT_TRUE(again.is_bytes());
  EXPECT_EQ(again.checksum(), Tokenizer::bytes().checksum());
  EXPECT_FALSE(Tokenizer::load(fixture + "tokenizer.json").is_bytes());
}

TEST_F(Vocabulary, ATokenWithoutAMergeHasNoTokenizerJson) {
  std::map<std::string, int> ranks;
  for (int byte = 0; byte < 256; byte++) ranks[std::string(1, char(byte))] = byte;
  ranks["abc"] = 256;
  ranks["ab"] = 257;
  EXPECT_ERROR(Tokenizer::load(write("ranks", ranks_file(ranks))).to_json(), "token 256 of the vocabulary is not made "
                                                                             "by merging");
  std::swap(ranks["abc"], ranks["ab"]);
  EXPECT_NO_THROW(Tokenizer::load(write("ranks", ranks_file(ranks))).to_json());
}

TEST_F(Vocabulary, AgreesWithAnExtendedVocabularyOnly) {
  const Tokenizer small = Tokenizer::load(fixture + "small.tiktoken");
  std::string more = read_file(fixture + "small.tiktoken") + "YWVpb3U= 657\n";  // after the end of text
  const Tokenizer larger = Tokenizer::load(write("larger", more));
  EXPECT_EQ(larger.vocab_size(), 658);
  EXPECT_TRUE(small.agrees_with(larger) && larger.agrees_with(small));
  EXPECT_FALSE(small.agrees_with(Tokenizer::load(changed("small.tiktoken", "IQ== 0\nIg== 1\n", "IQ== 1\nIg== 0\n"))));
  EXPECT_FALSE(small.agrees_with(Tokenizer::bytes()));
}

TEST_F(Vocabulary, UnusedIdsDecodeToNoBytes) {
  const Tokenizer tokenizer = Tokenizer::load(changed("small.tiktoken", " 655\n", " 660\n"));
  EXPECT_EQ(tokenizer.vocab_size(), 661);
  EXPECT_EQ(tokenizer.end_of_text(), 655);  // the first free id
  EXPECT_EQ(tokenizer.token(659), "");
}

TEST_F(Vocabulary, AnInvalidVocabularyIsAnErrorThatNamesTheFile) {
  EXPECT_ERROR(Tokenizer::load("/none/such"), "/none/such: cannot be read");
  EXPECT_ERROR(Tokenizer::load(folder), folder + ": has no tokenizer.json");
  EXPECT_ERROR(Tokenizer::load(write("text", "Just a text.\n")), "text: line 1 is not a token in base64");
  EXPECT_ERROR(Tokenizer::load(write("empty", "")), "empty: no token for the byte 0x00");
  EXPECT_ERROR(Tokenizer::load(write("cut", read_file(fixture + "small.tiktoken").substr(0, 700))), "cut: ");
  EXPECT_ERROR(Tokenizer::load(changed("small.tiktoken", "IQ== 0\n", "")), "small.tiktoken: no token for the byte "
                                                                           "0x21");
  EXPECT_ERROR(Tokenizer::load(changed("small.tiktoken", "IQ== 0\n", "IQ== 1\n")), "id 1 occurs twice");
  EXPECT_ERROR(Tokenizer::load(changed("small.tiktoken", "IQ== 0\n", "Ig== 0\n")), "the ids 0 and 1 are the same "
                                                                                   "token");
  EXPECT_ERROR(Tokenizer::load(changed("small.tiktoken", " 655\n", " 65536\n")), "id 65536: token shards hold ids "
                                                                                 "below 65536");
  EXPECT_ERROR(Tokenizer::load(changed("small.tiktoken", " 655\n", " 6x\n")), "line 656 is not a token");
  EXPECT_ERROR(Tokenizer::load(write("half.json", "{\"model\": {")), "half.json: is JSON that is cut short; make the "
                                                                     "file again");
  EXPECT_ERROR(Tokenizer::load(write("encoder.json", "{\"a\": 1}")), "encoder.json: needs vocab.bpe beside it");
  EXPECT_ERROR(Tokenizer::load(changed("vocab.bpe", "\n", "\nx y\n")), "encoder.json: has no <|endoftext|>");
  fs::copy_file(fixture + "encoder.json", folder + "/encoder.json", fs::copy_options::overwrite_existing);
  EXPECT_ERROR(Tokenizer::load(changed("vocab.bpe", "\n", "\n\u00ffx y\n")), "vocab.bpe: \"\u00ffxy\" is merged, but "
                                                                             "is no token");
  const std::string merges = read_file(fixture + "vocab.bpe");
  const size_t first = merges.find('\n') + 1, second = merges.find('\n', first) + 1;
  EXPECT_ERROR(Tokenizer::load(write("vocab.bpe", merges.substr(0, first) + merges.substr(second))), "400 tokens of "
                                                                                                     "several bytes, "
                                                                                                     "but 399 merges");
  const size_t third = merges.find('\n', second) + 1;
  const std::string swapped = merges.substr(second, third - second) + merges.substr(first, second - first);
  EXPECT_ERROR(Tokenizer::load(write("vocab.bpe", merges.substr(0, first) + swapped)), "not in the merges' order");
}

TEST_F(Vocabulary, ATokenizerJsonOfAnotherKindIsRefused) {
  const std::string original = "\"add_prefix_space\":false";
  EXPECT_ERROR(Tokenizer::load(changed("tokenizer.json", original, "\"add_prefix_space\":true")), "add_prefix_space is "
                                                                                                  "true; only GPT-2's");
  EXPECT_ERROR(Tokenizer::load(changed("tokenizer.json", "\"normalizer\":null", "\"normalizer\":{\"type\":\"NFC\"}")),
               "a normalizer is set");
  const std::string splits = "\"pre_tokenizer\":{\"type\":";
  EXPECT_ERROR(Tokenizer::load(changed("tokenizer.json", splits + "\"ByteLevel\"", splits + "\"Whitespace\"")),
               "pre_tokenizer is not ByteLevel");
  EXPECT_ERROR(Tokenizer::load(changed("tokenizer.json", "\"use_regex\":true", "\"use_regex\":false")), "pre_tokenizer "
                                                                                                        "is not "
                                                                                                        "ByteLevel");
  EXPECT_ERROR(Tokenizer::load(changed("tokenizer.json", "\"type\":\"BPE\"", "\"type\":\"Unigram\"")), "model.type is "
                                                                                                       "not BPE");
  EXPECT_ERROR(Tokenizer::load(changed("tokenizer.json", "\"byte_fallback\":false", "\"byte_fallback\":true")), "model."
                                                                                                                "byte_"
                                                                                                                "fallba"
                                                                                                                "ck is "
                                                                                                                "set");
  EXPECT_ERROR(Tokenizer::load(changed("tokenizer.json", "<|endoftext|>", "<|end|>")), "no <|endoftext|>");
  EXPECT_ERROR(Tokenizer::load(changed("tokenizer.json", "\"merges\":[", "\"merges\":[7,")), "tokenizer.json: is not a "
                                                                                             "tokenizer.json");
}

// Vocabularies that data/tokenize learns: against Hugging Face's tokenizers, by dev/test/tokenizer/scripts.json, which
// dev/tokenizer_compare.py writes, and against a trainer that is the definition.
#include <gtest/gtest.h>
#include <algorithm>
#include <map>
#include <random>
#include "child.h"
#include "command_line.h"
#include "data/corpus.h"
#include "data/vocabulary.h"
#include "dev/test/helpers.h"
#include "llmc/text/dataloader.h"

// ----------------------------------------------------------------------------
// Merges

using Merges = std::vector<Merge>;

// The id of a space or a letter: printable ASCII comes first, from 1 on, and a space after all printable characters.
static uint16_t id_of(char c) { return c == ' ' ? 221 : uint16_t(c - ' '); }

// Counts all pairs of all words anew before each merge. A word begins at each space.
static Merges merges_by_definition(const std::string& text, size_t wanted) {
  std::vector<std::vector<uint16_t>> words;
  for (const char c : text) {
    if (words.empty() || c == ' ') words.emplace_back();
    words.back().push_back(id_of(c));
  }
  Merges merges;
  while (merges.size() < wanted) {
    std::map<Merge, int> counts;
    for (const auto& word : words)
      for (size_t i = 0; i + 1 < word.size(); i++) counts[{word[i], word[i + 1]}]++;
    const auto first = std::max_element(counts.begin(), counts.end(),
                                        [](const auto& a, const auto& b) { return a.second < b.second; });
    if (first == counts.end() || first->second < 2) break;
    const auto [left, right] = first->first;
    for (auto& word : words)
      for (size_t i = 0; i + 1 < word.size(); i++)
        if (word[i] == left && word[i + 1] == right) {
          word[i] = uint16_t(257 + merges.size());
          word.erase(word.begin() + long(i) + 1);
        }
    merges.push_back(first->first);
  }
  return merges;
}

static Merges learned(const std::string& text, size_t wanted) {
  WordCounts words;
  words.add_text(text);
  return learn_merges(std::move(words), wanted);
}

TEST(Merges, EqualTheDefinitionsOnRandomTexts) {
  std::mt19937 random(1);
  for (int i = 0; i < 200; i++) {
    const size_t letters = 1 + random() % 4, longest = 1 + random() % 30;
    std::string text;
    for (size_t words = 1 + random() % 40; words > 0; words--) {
      for (size_t n = 1 + random() % longest; n > 0; n--) text += char('a' + random() % letters);
      text += words > 1 ? " " : "";
    }
    ASSERT_EQ(learned(text, 100), merges_by_definition(text, 100)) << text;
  }
}

TEST(Merges, OfEquallyFrequentPairsTheLowestIdsComeFirst) {
  WordCounts words;
  for (const char* word : {"xy", "cd", "ba", "bc", "~a", "\xC3\xA9"}) words.add(word, 3);
  words.add("zz", 4);
  const uint16_t byte_c3 = 95 + (0xC3 - 0xA1) - 1, byte_a9 = 95 + (0xA9 - 0xA1);  // printable, too, except for 0xAD
  EXPECT_EQ(learn_merges(words, 9), (Merges{{id_of('z'), id_of('z')},
                                            {id_of('b'), id_of('a')},
                                            {id_of('b'), id_of('c')},
                                            {id_of('c'), id_of('d')},
                                            {id_of('x'), id_of('y')},
                                            {id_of('~'), id_of('a')},
                                            {byte_c3, byte_a9}}));
}

TEST(Merges, EndWhereNoPairOccursTwice) {
  WordCounts words;
  words.add("ab", 1);
  words.add("cd", 2);
  EXPECT_EQ(learn_merges(words, 5), (Merges{{id_of('c'), id_of('d')}}));
  EXPECT_EQ(learn_merges(words, 0), Merges());
}

TEST(Merges, AreOfWholeCountsBeyondThirtyTwoBits) {
  WordCounts words;
  words.add("ab", (int64_t(1) << 32) + 1);
  words.add("cd", 5);
  EXPECT_EQ(learn_merges(words, 1), (Merges{{id_of('a'), id_of('b')}}));
}

TEST(Merges, OfALongRunEndAtTheLongestToken) {
  WordCounts words;
  words.add(std::string(300000, 'a'));
  const Merges merges = learn_merges(std::move(words), 1000);
  size_t longest = 0;
  const Tokenizer tokenizer = Tokenizer::of_merges(merges);
  for (int id = 257; id < tokenizer.vocab_size(); id++) longest = std::max(longest, tokenizer.token(id).size());
  EXPECT_EQ(longest, 65536u);
}

TEST(Merges, AreInterrupted) {
  WordCounts words;
  words.add("ab", 2);
  interrupted = 1;
  EXPECT_ERROR(learn_merges(words, 1), "interrupted");
  interrupted = 0;
}

TEST(Words, OfTwoTextsAreAddedUp) {
  WordCounts words, others;
  words.add_text("ab cd cd");
  others.add_text(" cd ab ab");
  others.add(words);
  others.add(words);
  std::map<std::string, int64_t> counts;
  for (size_t i = 0; i < others.size(); i++) counts[std::string(others.word(i))] = others.count(i);
  EXPECT_EQ(counts, (std::map<std::string, int64_t>{{"ab", 2}, {" ab", 2}, {" cd", 5}}));
}

TEST(Words, TooManyToHoldAreRefused) {
  WordCounts words;
  words.add(std::string(100 << 20, 'a'));
  words.add(std::string(100 << 20, 'a'));
  EXPECT_ERROR(words.add(std::string(100 << 20, 'b')), "more than 128 MB of different words");
  EXPECT_EQ(words.size(), 1u);
  EXPECT_EQ(words.count(0), 2);
}

// ----------------------------------------------------------------------------
// data/tokenize

static const std::string fixture = "dev/test/tokenizer/";

class TrainVocabulary : public CommandLine {
 protected:
  Outcome train(const std::string& arguments, const std::string& out = "out") const {
    return run("data/tokenize --out " + in(out) + " --train-vocabulary " + arguments);
  }
  json vocabulary(const std::string& out = "out") const {
    json model = json::parse(read_file(in(out) + "/tokenizer.json")).at("model");
    return {{"vocab", model.at("vocab")}, {"merges", model.at("merges")}};
  }
  // All of the text in the shards, with | for the end of text.
  std::string text_in(const std::string& out) const {
    const Tokenizer tokenizer = Tokenizer::load(in(out));
    std::string text;
    for (const char* prefix : {"/train_*.bin", "/val_*.bin"})
      for (const TokenFile& file : TokenShards(in(out) + prefix, tokenizer.vocab_size()).files)
        for (const uint16_t id : file.read(0, file.num_tokens))
          text += id == tokenizer.end_of_text() ? "|" : tokenizer.token(id);
    return text;
  }
};

TEST_F(TrainVocabulary, FiveScriptsGiveHuggingFacesVocabulary) {
  json theirs = json::parse(read_file(fixture + "scripts.json")).at("model");
  for (json& merge : theirs.at("merges")) merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  for (const char* threads : {"1", "3"}) {
    const std::string out = std::string("out") + threads;
    const Outcome o = train("700 --threads " + std::string(threads) + " " + fixture + "scripts", out);
    ASSERT_EQ(o.exit_status, 0) << o.err;
    EXPECT_EQ(o.err, "");
    EXPECT_EQ(vocabulary(out).at("merges"), theirs.at("merges"));
    EXPECT_EQ(vocabulary(out).at("vocab"), theirs.at("vocab"));
    std::string text = text_in(out), expected;
    for (const std::string& name : names_in(fixture + "scripts")) expected += read_file(fixture + "scripts/" + name);
    text.erase(std::remove(text.begin(), text.end(), '|'), text.end());
    EXPECT_EQ(text, expected);
  }
  EXPECT_EQ(read_file(in("out1/train_000000.bin")), read_file(in("out3/train_000000.bin")));
}

TEST_F(TrainVocabulary, LongTextsAreCutBetweenWordsOnly) {
  std::string filler;
  while (filler.size() < (1 << 20) - 2) filler += " a";
  const std::string text = filler + " qz" + filler + " qz";  // a batch of the corpus could end within the first qz
  ASSERT_EQ(train("300 " + write("in", text)).exit_status, 0);
  const Merges merges = merges_by_definition(" a a a qz a qz", 300 - 257);
  ASSERT_EQ(merges.size(), 3u);
  EXPECT_EQ(vocabulary().at("vocab"), json::parse(Tokenizer::of_merges(merges).to_json()).at("model").at("vocab"));
}

TEST_F(TrainVocabulary, InvalidUtf8IsTheReplacementCharacter) {
  ASSERT_EQ(train("300 " + write("invalid", "\xFFx \xFFx \xFFx \xE2\x82"), "a").exit_status, 0);
  ASSERT_EQ(train("300 " + write("valid", "\uFFFDx \uFFFDx \uFFFDx \uFFFD"), "b").exit_status, 0);
  EXPECT_EQ(vocabulary("a"), vocabulary("b"));
}

TEST_F(TrainVocabulary, DocumentsInJsonGiveTheSameVocabulary) {
  ASSERT_EQ(train("300 " + fixture + "scripts", "plain").exit_status, 0);
  std::string lines;
  for (const std::string& name : names_in(fixture + "scripts"))
    lines += json{{"page", read_file(fixture + "scripts/" + name)}}.dump() + "\n";
  ASSERT_EQ(train("300 --val-fraction 0 --field page " + write("in.jsonl", lines), "fields").exit_status, 0);
  EXPECT_EQ(vocabulary("fields"), vocabulary("plain"));
}

TEST_F(TrainVocabulary, TooLittleTextGivesASmallerOneAndSaysSo) {
  const Outcome o = train("4096 " + write("in", "hello hello hello"));
  EXPECT_EQ(o.exit_status, 0);
  EXPECT_NE(o.err.find("warning: the vocabulary has 262 tokens, not 4096: "), std::string::npos) << o.err;
  EXPECT_EQ(Tokenizer::load(in("out")).vocab_size(), 262);  // he, ll, hell, hello and that after a space
  EXPECT_EQ(json::parse(read_file(in("out/MANIFEST.json"))).at("tokenizer").at("vocab_size"), 262);
}

TEST_F(TrainVocabulary, BadSizesAndTextsAreRefusedAndLeaveNothing) {
  const std::string text = write("text", "some words and some words");
  write("empty", "");
  write("binary", std::string(1000, '\1'));
  fs::create_directory(in("mine"));
  write("mine/thesis.tex", "years of work");
  const std::set<std::string> names = {"binary", "empty", "mine", "stderr", "stdout", "text"};
  struct Case {
    std::string arguments, message;
  };
  for (const Case& c : std::vector<Case>{{"256 " + text, "--train-vocabulary: Value 256 not in range"},
                                         {"0 " + text, "--train-vocabulary: Value 0 not in range"},
                                         {"-300 " + text, "--train-vocabulary"},
                                         {"65537 " + text, "--train-vocabulary: Value 65537 not in range"},
                                         {"many " + text, "--train-vocabulary"},
                                         {"300 --tokenizer bytes " + text, "--tokenizer excludes --train-vocabulary"},
                                         {"300 -", "-: standard input cannot be read twice"},
                                         {"300 " + text + " -", "-: standard input cannot be read twice"},
                                         {"300 " + in("empty"), "no text in it"},
                                         {"300 " + in("none"), "/none: no such file or folder"},
                                         {"300 " + in("binary"), "/binary: is no text: it has many control characters"},
                                         {"300 /proc/self/mem", "/proc/self/mem: cannot read"}}) {
    const Outcome o = train(c.arguments);
    EXPECT_EQ(o.exit_status, 1) << c.arguments;
    EXPECT_EQ(o.err.rfind("error: ", 0), 0u) << o.err;
    EXPECT_NE(o.err.find(c.message), std::string::npos) << c.message << "\n" << o.err;
    EXPECT_EQ(names_in(folder), names) << c.arguments;
  }
  const Outcome o = train("300 " + text, "mine");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("holds thesis.tex, which is no shard"), std::string::npos) << o.err;
  EXPECT_EQ(names_in(in("mine")), std::set<std::string>{"thesis.tex"});
}

TEST_F(TrainVocabulary, AnInterruptedRunLeavesNothing) {
  std::mt19937 random(3);
  std::string text;
  while (text.size() < 8 << 20) text += format("%x ", unsigned(random()));
  write("in", text);
  for (const int signal : {SIGINT, SIGTERM})
    for (const int moment : {10000, 100000, 400000}) {  // us; it takes seconds
      const int status = run_and_signal("data/tokenize --train-vocabulary 8192 --out " + in("out") + " " + in("in") +
                                            " >/dev/null 2>" + in("said"),
                                        signal, moment);
      EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 1) << "before it took charge of signals, or after";
      EXPECT_EQ(read_file(in("said")), WIFEXITED(status) ? "error: interrupted; nothing was written\n" : "");
      EXPECT_EQ(names_in(folder), (std::set<std::string>{"in", "said"}));
    }
}

TEST_F(TrainVocabulary, IsLearnedAgainWhenTextOrSizeIsAnother) {
  const std::string text = write("in", read_file(fixture + "scripts/latin.txt"));
  auto expect_refused = [&](const std::string& arguments, const std::string& why) {
    const Outcome o = train(arguments);
    EXPECT_EQ(o.exit_status, 1) << arguments;
    EXPECT_NE(o.err.find(in("out") + ": holds other tokens: " + why), std::string::npos) << o.err;
  };
  auto expect_made_again = [&](const std::string& arguments) {
    EXPECT_NE(train(arguments + " --update").out.find("is made again"), std::string::npos) << arguments;
    EXPECT_NE(train(arguments).out.find("exists already"), std::string::npos) << arguments;
  };
  ASSERT_EQ(run("data/tokenize --out " + in("out") + " " + text).exit_status, 0);
  expect_refused("300 " + text, "their train_vocabulary was not given, and now is 300");
  expect_made_again("300 " + text);
  expect_refused("301 " + text, "their train_vocabulary was 300, and now is 301");
  expect_made_again("301 " + text);
  write("in", read_file(fixture + "scripts/cyrillic.txt"));
  expect_refused("301 " + text, text + " is another text than theirs");
  const std::string before = read_file(in("out/tokenizer.json"));
  expect_made_again("301 " + text);
  EXPECT_NE(read_file(in("out/tokenizer.json")), before);
  write("out/tokenizer.json", before);
  expect_refused("301 " + text, in("out") + "/tokenizer.json is missing or damaged");
  expect_made_again("301 " + text);
}

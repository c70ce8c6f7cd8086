// data/probe: solvers that read only the tokens before an answer find it, and the program writes what it says.
#include <map>
#include "child.h"
#include "command_line.h"
#include "data/probe_tasks.h"
#include "llmc/base/crc32c.h"

using Tokens = std::vector<uint16_t>;

// -------------------------------------------------------------------------------------------------------------------
// Solvers: the answer at the end of `seen`, the tokens before it. They know the task's layout and alphabets.

// Where in the first `context` tokens `pattern` first lies; -1: nowhere.
static int find(const Tokens& seen, int context, const Tokens& pattern) {
  const auto end = seen.begin() + context;
  const auto at = std::search(seen.begin(), end, pattern.begin(), pattern.end());
  return at == end ? -1 : int(at - seen.begin());
}

static int token_at(const Tokens& seen, int at) { return at >= 0 && at < int(seen.size()) ? seen[at] : -1; }

// recall, noisy-recall, fuzzy-recall: the key is the last run of keys' tokens, after which some of the value may stand.
static int solve_recall(const ProbeSettings& s, const Tokens& seen) {
  const ProbeVocabulary v = probe_vocabulary(s);
  int after = 0;  // tokens of the value that are known
  while (v.values.has(seen[seen.size() - 1 - after])) after++;
  const int width = s.task == "fuzzy-recall" ? s.width : 1;
  const Tokens key(seen.end() - after - width, seen.end() - after);
  const int at = find(seen, probe_layout(s).context, key);
  return at < 0 ? -1 : token_at(seen, at + width + after);
}

static int solve_copy(const ProbeSettings&, const Tokens& seen) {
  const auto mark = std::find(seen.begin(), seen.end(), probe_mark);
  Tokens symbols;
  for (auto token = seen.begin(); token != mark; ++token)
    if (*token != probe_blank) symbols.push_back(*token);
  return token_at(symbols, int(seen.end() - mark) - 1);
}

static int solve_induction(const ProbeSettings&, const Tokens& seen) {
  return token_at(seen, find(seen, int(seen.size()) - 1, {seen.back()}) + 1);
}

static int solve_compress(const ProbeSettings& s, const Tokens& seen) {
  if (find(seen, int(seen.size()), {probe_mark}) != s.length) return -1;
  return token_at(seen, seen.back() - probe_vocabulary(s).keys.first);
}

static int solve_hops(const ProbeSettings& s, const Tokens& seen) {
  std::map<int, int> next;
  for (int i = 0; i < s.pairs; i++) next[seen[2 * i]] = seen[2 * i + 1];
  int node = seen.back();
  const int hops = 1 + seen[seen.size() - 2] - probe_vocabulary(s).counts.first;
  for (int i = 0; i < hops; i++) node = next[node];
  return node;
}

static int solve(const ProbeSettings& s, const Tokens& dictionary, const Tokens& seen) {
  if (s.task == "copy") return solve_copy(s, seen);
  if (s.task == "induction") return solve_induction(s, seen);
  if (s.task == "compress") return solve_compress(s, seen);
  if (s.task == "hops") return solve_hops(s, seen);
  if (s.task == "memorize") return token_at(dictionary, seen.back() - probe_vocabulary(s).keys.first);
  return solve_recall(s, seen);
}

// -------------------------------------------------------------------------------------------------------------------
// Settings

static ProbeSettings settings_of(const std::string& task) {
  ProbeSettings s;
  s.task = task;
  return s;
}

// Each task at its default, harder, at its least, and with a distance.
static std::vector<ProbeSettings> many_settings() {
  std::vector<ProbeSettings> all;
  for (const ProbeTask& task : probe_tasks()) {
    ProbeSettings s = settings_of(task.name);
    all.push_back(s);
    s.seed = 1234567890123, s.seq_len = 257, s.symbols = 48;
    s.pairs = 24, s.noise = 90, s.width = 2, s.length = 40, s.facts = 500, s.hops = 5;
    all.push_back(s);
    s.seq_len = 512, s.pairs = 12, s.width = 3, s.length = 24, s.distance = 150, s.hops = 11;
    all.push_back(s);
    s.seq_len = 33, s.pairs = 2, s.length = 3, s.noise = 0, s.distance = 0, s.hops = 1, s.width = 1, s.facts = 2;
    all.push_back(s);
  }
  return all;
}

static std::string text_of(const ProbeSettings& s) {
  return s.task + format(" T=%d distance=%d", s.seq_len, s.distance);
}

static int count_scored(const ProbeExample& e) { return int(std::count(e.scored.begin(), e.scored.end(), 1)); }

TEST(Probe, SolversAnswerEveryQuestion) {
  for (const ProbeSettings& s : many_settings()) {
    const ProbeGenerator generator(s);
    for (int i = 0; i < 200; i++) {
      const ProbeExample e = generator.make(i % 2 ? ProbeSplit::train : ProbeSplit::val, i);
      ASSERT_EQ(int(e.tokens.size()), s.seq_len);
      for (int t = 0; t < s.seq_len; t++) {
        ASSERT_LT(e.tokens[t], probe_vocabulary(s).size);
        if (!e.scored[t]) continue;
        const int answer = solve(s, generator.dictionary(), Tokens(e.tokens.begin(), e.tokens.begin() + t));
        ASSERT_EQ(answer, e.tokens[t]) << text_of(s) << " example " << i << " position " << t;
      }
      const ProbeLayout layout = probe_layout(s);
      ASSERT_EQ(count_scored(e), layout.questions * std::max(1, s.task == "fuzzy-recall" ? s.width : 1)) << text_of(s);
    }
  }
}

TEST(Probe, NoQuestionOfAnExampleIsAskedTwice) {
  for (const char* task : {"recall", "noisy-recall", "induction"}) {
    const ProbeGenerator generator(settings_of(task));
    for (int i = 0; i < 200; i++) {
      const ProbeExample e = generator.make(ProbeSplit::train, i);
      std::map<int, int> asked;  // how often a token stands in a question, of induction also in an answer
      for (int t = 1; t < 64; t++) {
        if (!e.scored[t]) continue;
        asked[e.tokens[t - 1]]++;
        if (task == std::string("induction")) asked[e.tokens[t]]++;
      }
      for (auto [token, count] : asked) ASSERT_EQ(count, 1) << task << " example " << i << " token " << token;
    }
  }
}

// A model that names values which were not asked yet does no better than one that picks any of the context.
TEST(Probe, ValuesRepeat) {
  for (const char* task : {"recall", "noisy-recall", "fuzzy-recall", "hops"}) {
    ProbeSettings s = settings_of(task);
    s.symbols = s.pairs = 8;
    const ProbeGenerator generator(s);
    int same = 0, pairs = 0;
    for (int i = 0; i < 1000; i++) {
      const ProbeExample e = generator.make(ProbeSplit::train, i);
      const auto is_first = [&](int t) { return e.scored[t] && !e.scored[t - 1]; };
      for (int t = 1; t < s.seq_len; t++)
        for (int before = 1; before < t; before++)
          if (is_first(t) && is_first(before)) same += e.tokens[t] == e.tokens[before], pairs++;
    }
    EXPECT_NEAR(double(same) / pairs, 1.0 / 8, 0.01) << task;
  }
}

// Each count of hops is asked as often as any other.
TEST(Probe, HopsAskForAllDistances) {
  ProbeSettings s = settings_of("hops");
  s.hops = 4;
  const ProbeGenerator generator(s);
  const Alphabet counts = probe_vocabulary(s).counts;
  std::map<int, int> asked;
  for (int i = 0; i < 1000; i++)
    for (uint16_t token : generator.make(ProbeSplit::train, i).tokens)
      if (counts.has(token)) asked[1 + token - counts.first]++;
  ASSERT_EQ(asked.size(), 4u);
  for (auto [hops, count] : asked) EXPECT_NEAR(count, 2000, 200) << hops;
}

TEST(Probe, GuessingIsRightAsOftenAsChanceSays) {
  for (const ProbeSettings& s : many_settings()) {
    const ProbeGenerator generator(s);
    const ProbeVocabulary v = probe_vocabulary(s);
    Draws guesses{s.seed + 1, ProbeSplit::train, 0};
    double right = 0, n = 0;
    for (int i = 0; i < 2000; i++) {
      const ProbeExample e = generator.make(ProbeSplit::train, i);
      for (int t = 0; t < s.seq_len; t++)
        if (e.scored[t]) right += e.tokens[t] == v.values.token(guesses.below(v.values.size)), n++;
    }
    const double chance = probe_chance(s);
    EXPECT_NEAR(right / n, chance, 5 * std::sqrt(chance / n)) << text_of(s);
  }
}

TEST(Probe, PickingAnAnswerIsRightAsChanceInContextSays) {
  for (const char* task : {"recall", "noisy-recall", "copy", "compress", "hops"}) {
    const ProbeSettings s = settings_of(task);
    const ProbeGenerator generator(s);
    Draws guesses{2, ProbeSplit::train, 0};
    double right = 0, n = 0;
    for (int i = 0; i < 2000; i++) {
      const ProbeExample e = generator.make(ProbeSplit::train, i);
      Tokens answers;
      for (int t = 0; t < s.seq_len; t++)
        if (e.scored[t]) answers.push_back(e.tokens[t]);
      Tokens places = answers;  // of the context that hold an answer: hops asks for some of them twice
      if (s.task == "hops") places = Tokens(e.tokens.begin(), e.tokens.begin() + s.pairs * 2);
      for (uint16_t answer : answers) right += answer == places[guesses.below(int(places.size()))], n++;
    }
    const double chance = probe_chance_in_context(s);
    EXPECT_NEAR(right / n, chance, 5 * std::sqrt(chance / n)) << task;
  }
}

TEST(Probe, NoAnswerLiesNearerThanAsked) {
  for (const char* task : {"recall", "noisy-recall", "fuzzy-recall", "induction", "compress", "hops"}) {
    for (int distance : {40, 41, 60, 100}) {
      ProbeSettings s = settings_of(task);
      s.seq_len = 200, s.distance = distance;
      const ProbeGenerator generator(s);
      int nearest = s.seq_len;
      for (int i = 0; i < 300; i++) {
        const ProbeExample e = generator.make(ProbeSplit::train, i);
        const ProbeVocabulary v = probe_vocabulary(s);
        for (int t = 1; t < s.seq_len; t++) {
          if (!e.scored[t] || e.scored[t - 1]) continue;  // the first token of an answer
          const int width = s.task == "fuzzy-recall" ? s.width : 1;
          const Tokens key(e.tokens.begin() + t - width, e.tokens.begin() + t);
          int source = find(e.tokens, t - width, key);
          if (s.task == "compress") source = key[0] - v.keys.first;
          for (int i = 0; s.task == "hops" && i < s.pairs; i++)
            if (e.tokens[2 * i + 1] == e.tokens[t]) source = 2 * i;
          nearest = std::min(nearest, t - width - source);
        }
      }
      EXPECT_GE(nearest, distance) << task;
      EXPECT_LE(nearest, distance + 4) << task << ": farther than needed";
    }
  }
}

// What share of recall's answers is right if only the place of the question is known, and the likeliest pair is named.
static double right_by_place(int distance) {
  ProbeSettings s = settings_of("recall");
  s.pairs = 4, s.seq_len = 64, s.distance = distance;
  const ProbeGenerator generator(s);
  std::map<int, std::map<int, int>> asked;  // by the question's place and its pair: how often
  int questions = 0, right = 0;
  for (int i = 0; i < 4000; i++) {
    const ProbeExample e = generator.make(ProbeSplit::train, i);
    for (int t = 2 * s.pairs + 1; t < s.seq_len; t++)
      if (e.scored[t]) asked[t][find(e.tokens, t - 1, {e.tokens[t - 1]}) / 2]++, questions++;
  }
  for (const auto& [place, pairs] : asked) {
    int most = 0;
    for (const auto& [pair, count] : pairs) most = std::max(most, count);
    right += most;
  }
  return double(right) / questions;
}

TEST(Probe, APlaceTellsNoMoreOfAnAnswerThatIsFar) {
  for (int distance : {0, 9, 20, 40}) {
    EXPECT_GT(right_by_place(distance), 0.25);
    EXPECT_LT(right_by_place(distance), 0.35) << distance;  // near pairs are asked soon a little more often
  }
}

TEST(Probe, OneTokenOfAFuzzyKeyDoesNotTell) {
  ProbeSettings s = settings_of("fuzzy-recall");
  const ProbeGenerator generator(s);
  int shared = 0, keys = 0;
  for (int i = 0; i < 500; i++) {
    const ProbeExample e = generator.make(ProbeSplit::train, i);
    for (int a = 0; a < s.pairs; a++) {
      bool is_shared = false;
      for (int b = 0; b < s.pairs; b++) is_shared |= a != b && e.tokens[4 * a + 1] == e.tokens[4 * b + 1];
      shared += is_shared, keys++;
    }
  }
  EXPECT_GT(shared, keys * 2 / 3);
}

TEST(Probe, MemorizesDictionaryIsTheSameInBothSplits) {
  const ProbeGenerator generator(settings_of("memorize"));
  std::map<int, int> dictionary;
  for (int i = 0; i < 200; i++) {
    const ProbeExample e = generator.make(i % 2 ? ProbeSplit::train : ProbeSplit::val, i);
    for (int t = 0; t < 64; t += 2)
      EXPECT_EQ(dictionary.emplace(e.tokens[t], e.tokens[t + 1]).first->second, e.tokens[t + 1]);
  }
  EXPECT_EQ(dictionary.size(), 64u);
  EXPECT_TRUE(ProbeGenerator(settings_of("recall")).dictionary().empty());
}

static uint32_t checksum_of(const ProbeSettings& s, ProbeSplit split) {
  uint32_t checksum = 0;
  for (int i = 0; i < 100; i++) {
    const ProbeExample e = ProbeGenerator(s).make(split, i);
    checksum = crc32c(e.tokens.data(), e.tokens.size() * sizeof(uint16_t), checksum);
    checksum = crc32c(e.scored.data(), e.scored.size(), checksum);
  }
  return checksum;
}

// Computed once: the examples of a seed may not change.
TEST(Probe, AllMachinesMakeTheSameExamples) {
  const std::map<std::string, uint32_t> expected = {{"recall", 0x49bf3028},       {"noisy-recall", 0xa74a4a3d},
                                                    {"fuzzy-recall", 0x24314a33}, {"copy", 0xeef2bcaa},
                                                    {"induction", 0x29eadf30},    {"compress", 0xc3b734fe},
                                                    {"memorize", 0xbe6af910},     {"hops", 0xcda2afa3}};
  for (const ProbeTask& task : probe_tasks()) {
    ProbeSettings s = settings_of(task.name);
    const uint32_t checksum = checksum_of(s, ProbeSplit::train);
    EXPECT_EQ(checksum, expected.at(task.name)) << format("%s: 0x%08x", task.name, checksum);
    EXPECT_NE(checksum, checksum_of(s, ProbeSplit::val)) << task.name;
    s.seed++;
    EXPECT_NE(checksum, checksum_of(s, ProbeSplit::train)) << task.name;
  }
}

class ProbeProgram : public CommandLine {
 protected:
  void expect_failure(const std::string& arguments, const std::string& part) const {
    const Outcome o = run("data/probe " + arguments + " -o " + in("never"));
    EXPECT_EQ(o.exit_status, 1) << arguments;
    EXPECT_EQ(o.err.compare(0, 7, "error: "), 0) << o.err;
    EXPECT_NE(o.err.find(part), std::string::npos) << o.err;
    EXPECT_FALSE(fs::exists(in("never")) || fs::exists(in("never.tmp"))) << arguments;
  }
};

TEST_F(ProbeProgram, WritesExamplesAndTheirMasks) {
  const Outcome o = run("data/probe hops --hops 2 -t 50 --examples 7 --val-examples 3 -o " + in("d"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  EXPECT_EQ(names_in(in("d")), (std::set<std::string>{"MANIFEST.json", "train_000000.bin", "train_000000.mask",
                                                      "val_000000.bin", "val_000000.mask"}));
  ProbeSettings s = settings_of("hops");
  s.hops = 2, s.seq_len = 50;
  const ProbeGenerator generator(s);
  for (const char* name : {"train", "val"}) {
    const bool is_train = name[0] == 't';
    const std::string tokens = read_file(in("d/") + name + "_000000.bin");
    const std::string mask = read_file(in("d/") + name + "_000000.mask");
    const int examples = is_train ? 7 : 3;
    ASSERT_EQ(tokens.size(), 1024u + 2 * (50 * examples + 1));
    ASSERT_EQ(mask.size(), 1024u + (50 * examples + 1 + 7) / 8);
    for (int i = 0; i < 50 * examples; i++) {
      const ProbeExample e = generator.make(is_train ? ProbeSplit::train : ProbeSplit::val, i / 50);
      EXPECT_EQ(uint8_t(tokens[1024 + 2 * i]), e.tokens[i % 50]);
      EXPECT_EQ(uint8_t(mask[1024 + i / 8]) >> i % 8 & 1, e.scored[i % 50]);
    }
  }
  const json manifest = json::parse(read_file(in("d/MANIFEST.json")));
  EXPECT_EQ(manifest, json::parse(o.out));
  EXPECT_EQ(manifest["parameters"], json::parse(R"({"pairs": 8, "distance": 0, "hops": 2, "symbols": 32})"));
  EXPECT_EQ(manifest["vocab_size"], 2 + 32 + 2);
  EXPECT_EQ(manifest["chance"], 1.0 / 32);
  EXPECT_EQ(manifest["chance_in_context"], 1.0 / 8);
  EXPECT_EQ(manifest["train_scored"], 7 * 8);
}

TEST_F(ProbeProgram, SaysWhatIsWrongWithSettings) {
  expect_failure("remember", "remember: no such task; one of recall, noisy-recall");
  expect_failure("recall --noise 3", "--noise: recall has no such parameter; it has --pairs, --distance, --symbols");
  expect_failure("recall --pairs 17", "recall: the context and 17 questions take 68 tokens, more than the 64");
  expect_failure("recall --pairs 16 -t 64 --distance 33", "a --distance of 33 do not fit");
  expect_failure("recall --distance 60", "a --distance of 60 do not fit into 64 tokens");
  expect_failure("recall --pairs 40 -t 256", "40 different tokens of an alphabet of 32; use more --symbols");
  expect_failure("copy --length 32", "copy: 32 tokens, a mark and their copy do not fit into 64");
  expect_failure("hops --hops 8", "hops: a ring of 8 nodes comes back within 8 hops");
  expect_failure("hops --hops 0", "--hops");
  expect_failure("memorize --facts 60000 --symbols 6000", "a vocabulary of 66002 tokens");
  expect_failure("recall --pairs 0", "--pairs");
  expect_failure("recall --examples 2000000000", "2000000000 examples of 64 tokens");
}

TEST_F(ProbeProgram, LeavesOtherExamplesAloneWithAnError) {
  const std::string recall = "data/probe recall --examples 10 --val-examples 5 -o " + in("d");
  ASSERT_EQ(run(recall).exit_status, 0);
  const std::string before = read_file(in("d/train_000000.bin"));
  EXPECT_EQ(run(recall).exit_status, 0);
  for (const auto& [options, why] :
       std::vector<std::pair<std::string, std::string>>{{"data/probe copy --examples 10 --val-examples 5 -o " + in("d"),
                                                         "their task is \"recall\", not \"copy\""},
                                                        {recall + " --seed 7", "their seed is "},
                                                        {recall + " --pairs 4", "their parameters is "}}) {
    const Outcome o = run(options);
    EXPECT_EQ(o.exit_status, 1) << options;
    EXPECT_NE(o.err.find(in("d") + ": holds other examples: " + why), std::string::npos) << o.err;
    EXPECT_EQ(read_file(in("d/train_000000.bin")), before);
    EXPECT_EQ(run(options + " --force").exit_status, 0);
    ASSERT_EQ(run(recall + " --force").exit_status, 0);
  }
  for (const char* name : {"d/train_000000.bin", "d/val_000000.mask"}) {
    ASSERT_EQ(fs::remove(in(name)), true);
    EXPECT_NE(run(recall).err.find("is missing or damaged; --force"), std::string::npos);
    ASSERT_EQ(run(recall + " --force").exit_status, 0);
  }
  nlohmann::ordered_json manifest = nlohmann::ordered_json::parse(read_file(in("d/MANIFEST.json")));
  manifest["shards"][0].erase("crc32c");
  write_file(in("d/MANIFEST.json"), manifest.dump());
  EXPECT_NE(run(recall).err.find("MANIFEST.json: is missing or damaged; --force"), std::string::npos);
  ASSERT_EQ(fs::remove(in("d/MANIFEST.json")), true);
  EXPECT_NE(run(recall).err.find("holds other examples"), std::string::npos);
}

TEST_F(ProbeProgram, NumbersAreDecimal) {
  ASSERT_EQ(run("data/probe hops --pairs 010 --examples 012 --seed 010 -t 0100 -o " + in("d")).exit_status, 0);
  const json manifest = json::parse(read_file(in("d/MANIFEST.json")));
  EXPECT_EQ(manifest["parameters"]["pairs"], 10);
  EXPECT_EQ(manifest["train_examples"], 12);
  EXPECT_EQ(manifest["seq_len"], 100);
  expect_failure("hops --pairs 0x8", "--pairs: 0x8: is not a whole number");
}

TEST_F(ProbeProgram, InterruptedItLeavesNothing) {
  const int status =
      run_and_signal("data/probe copy --examples 9000000 -o " + in("d") + " 2>" + in("said"), SIGINT, 400000);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1);
  EXPECT_EQ(read_file(in("said")), "error: interrupted\n");
  EXPECT_EQ(names_in(folder), std::set<std::string>{"said"});
}

TEST_F(ProbeProgram, NumbersWithoutASignAreNotNegative) {
  expect_failure("recall --seed -1", "--seed: -1: must not be negative");
  for (const char* option : {"--examples", "--val-examples", "-t", "--pairs", "--distance", "--symbols"})
    expect_failure("recall " + std::string(option) + " -1", "-1");
}

// Synthetic tasks with known answers ("probes"), after MQAR of Zoology (Arora et al. 2023), MAD (Poli et al. 2024) and
// Depo (Physics of Language Models 4.1, Allen-Zhu 2025).
//
// An example takes exactly T tokens: a context, and then questions with their answers, in slots between which blanks
// lie. Only answers are scored. In the papers a model is asked at the question's last token and never sees its answer;
// here, as in a text, the answer is the next token. Values are drawn with repetitions: if all differ, a model learns
// first to name one that was not asked yet, which needs no key, and is stuck there for thousands of updates. Example i
// of a split is a pure function of (settings, split, i), computed with whole numbers only, so that it is the same on
// every machine.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>
#include "llmc/base/error.h"
#include "llmc/base/random.h"

// Names in the tasks' comments and in MANIFEST.json. What a task does not use is ignored by it.
struct ProbeSettings {
  std::string task;
  int seq_len = 64;  // T
  int symbols = 32;  // tokens of each alphabet: keys, values, nodes
  int pairs = 8;     // key-value pairs, or edges of hops
  int distance = 0;  // tokens that lie at least between where an answer is to be found and its question
  int noise = 16;    // noise tokens among the pairs
  int width = 2;     // tokens of a key, and of a value
  int length = 16;   // tokens to copy, to continue or to compress
  int facts = 64;    // in the dictionary of memorize
  int hops = 1;      // most edges from a question's node to its answer
  uint64_t seed = 1;
};

struct ProbeTask {
  const char* name;
  const char* harder;                   // the parameter that makes it harder
  std::vector<std::string> parameters;  // those it uses
  const char* asks;                     // what ability it asks for
};

// All tasks, each with its source where it has one.
inline const std::vector<ProbeTask>& probe_tasks() {
  static const std::vector<ProbeTask> tasks = {
      {"recall",
       "pairs",
       {"pairs", "distance", "symbols"},
       "finds the value that followed a key; every key is asked once, near ones more often soon (MQAR, Zoology)"},
      {"noisy-recall",
       "noise",
       {"pairs", "noise", "distance", "symbols"},
       "recall with tokens that mean nothing among the pairs and questions (MAD)"},
      {"fuzzy-recall",
       "width",
       {"pairs", "width", "distance", "symbols"},
       "recall with keys and values of several tokens; keys share their tokens, so that one token does not tell (MAD)"},
      {"copy",
       "length",
       {"length", "symbols"},
       "repeats in order, at the end, the tokens that lie among blanks at random places (MAD, selective copying)"},
      {"induction",
       "length",
       {"length", "distance", "symbols"},
       "continues a token of a random sequence by its successor there: key "
       "and value are of one alphabet (Olsson et al. 2022)"},
      {"compress",
       "length",
       {"length", "distance", "symbols"},
       "names the token at a place of a sequence, asked in random order after a mark that ends it. In MAD a decoder "
       "sees only the mark's vector; here attention may also look the place up, unless --distance is beyond its reach"},
      {"memorize",
       "facts",
       {"facts", "symbols"},
       "knows a dictionary that is the same in all examples and does not stand in them: weights must hold it (MAD)"},
      {"hops",
       "hops",
       {"pairs", "hops", "distance", "symbols"},
       "follows a ring of edges, in random order, from a node as many edges further as the question says, 1 to --hops "
       "of them, and names the node there: questions of few edges teach what those of many need (k-hop recall, Depo)"},
  };
  return tasks;
}

inline const ProbeTask& find_probe_task(const std::string& name) {
  std::string names;
  for (const ProbeTask& task : probe_tasks()) {
    if (task.name == name) return task;
    names += (names.empty() ? "" : ", ") + std::string(task.name);
  }
  user_error("%s: no such task; one of %s", name.c_str(), names.c_str());
}

// -------------------------------------------------------------------------------------------------------------------
// Vocabulary

constexpr uint16_t probe_blank = 0, probe_mark = 1;  // the mark ends what is to be copied or compressed

struct Alphabet {
  int first = 0, size = 0;
  uint16_t token(int i) const { return uint16_t(first + i); }
  bool has(int token) const { return token >= first && token < first + size; }
};

// keys: what questions consist of; values: what answers consist of. induction and hops have one alphabet for both.
struct ProbeVocabulary {
  Alphabet keys, values, noise;
  Alphabet counts;  // of edges: questions of hops begin with one, the first for 1
  int size = 0;
};

// Tokens that fuzzy keys consist of: so few that two keys in three or more share a token, enough for 2 * pairs keys.
inline int fuzzy_key_symbols(const ProbeSettings& s) {
  for (int symbols = 2;; symbols++) {
    int64_t keys = 1;
    for (int i = 0; i < s.width && keys < 2 * s.pairs; i++) keys *= symbols;
    if (keys >= 2 * s.pairs) return symbols;
  }
}

inline ProbeVocabulary probe_vocabulary(const ProbeSettings& s) {
  ProbeVocabulary v;
  v.keys = {2, s.symbols};
  if (s.task == "fuzzy-recall") v.keys.size = fuzzy_key_symbols(s);
  if (s.task == "copy" || s.task == "induction" || s.task == "hops") v.keys.size = 0;
  if (s.task == "compress") v.keys.size = s.length;
  if (s.task == "memorize") v.keys.size = s.facts;
  v.values = {v.keys.first + v.keys.size, s.symbols};
  if (s.task == "induction" || s.task == "hops") v.keys = v.values;
  v.noise = {v.values.first + v.values.size, s.task == "noisy-recall" ? s.symbols : 0};
  v.counts = {v.noise.first + v.noise.size, s.task == "hops" ? s.hops : 0};
  v.size = v.counts.first + v.counts.size;
  return v;
}

// The share of right answers of a model that guesses among all possible answers.
inline double probe_chance(const ProbeSettings& s) { return 1.0 / s.symbols; }

// The share of right answers of a model that picks one of the places in the context that hold an answer: a model can do
// so when it has learned everything but to find the right one. memorize has no such places. In all tasks but induction
// and hops another place may hold the same token; that a model could rule out answers that were asked before is not
// counted there.
inline double probe_chance_in_context(const ProbeSettings& s) {
  if (s.task == "memorize") return probe_chance(s);
  if (s.task == "induction") return 1.0 / s.length;
  if (s.task == "hops") return 1.0 / s.pairs;
  const int places = s.task == "copy" || s.task == "compress" ? s.length : s.pairs;
  return 1.0 / places + (1 - 1.0 / places) * probe_chance(s);
}

// -------------------------------------------------------------------------------------------------------------------
// Random numbers

enum class ProbeSplit : uint32_t { train = 0, val = 1, dictionary = 2 };

// A sequence of draws; the n-th is a pure function of (seed, split, example, n).
struct Draws {
  uint64_t seed;
  ProbeSplit split;
  uint64_t example;
  uint32_t count = 0;

  // Uniform in [0, n); a number's probability is off by at most 2^-32.
  int below(int n) {
    const Philox x = random_words(seed, RandomStream::probe, uint32_t(split), example << 32 | count++);
    return int(uint64_t(x.word[0]) * uint64_t(n) >> 32);
  }
  // In [0, n), with a probability that falls about as 1 / (1 + number): uniform among the numbers from 2^k - 1 to
  // 2^(k+1) - 2, for a uniform k. Zoology draws distances by nearly this power law.
  int small_below(int n) {
    int octaves = 0;
    while ((1 << octaves) <= n) octaves++;
    const int first = (1 << below(octaves)) - 1;
    return first + below(std::min(first + 1, n - first));
  }
  // `n` different numbers below `limit`, in random order.
  std::vector<int> different(int n, int limit) {
    std::vector<int> numbers(limit);
    for (int i = 0; i < limit; i++) numbers[i] = i;
    for (int i = 0; i < n; i++) std::swap(numbers[i], numbers[i + below(limit - i)]);
    numbers.resize(n);
    return numbers;
  }
  // `n` numbers below `limit`, in their order.
  std::vector<int> with_repetitions(int n, int limit) {
    std::vector<int> numbers(n);
    for (int& number : numbers) number = below(limit);
    std::sort(numbers.begin(), numbers.end());
    return numbers;
  }
  // Which of `n` places `k` things take, in their order.
  std::vector<int> places(int k, int n) {
    std::vector<int> chosen = different(k, n);
    std::sort(chosen.begin(), chosen.end());
    return chosen;
  }
};

// -------------------------------------------------------------------------------------------------------------------
// Examples

struct ProbeExample {
  std::vector<uint16_t> tokens;  // (T)
  std::vector<uint8_t> scored;   // (T): 1 if the loss of predicting this token counts, else 0
};

// What is asked, and where in the context its answer is to be found.
struct ProbeQuestion {
  int source;  // position of the first token of the pair or edge
  std::vector<uint16_t> question, answer;
};

// How many tokens the context takes, and each pair or edge in it; how many a question with its answer takes, and how
// many questions there are.
struct ProbeLayout {
  int context, item, slot, questions;
};

// induction asks for so many that they can always be chosen without one beginning where another ends.
inline ProbeLayout probe_layout(const ProbeSettings& s) {
  if (s.task == "noisy-recall") return {2 * s.pairs + s.noise, 2, 2, s.pairs};
  if (s.task == "fuzzy-recall") return {2 * s.width * s.pairs, 2 * s.width, 2 * s.width, s.pairs};
  if (s.task == "copy") return {s.seq_len - s.length, 1, 1, s.length};
  if (s.task == "induction") return {s.length, 2, 2, (s.length + 1) / 3};
  if (s.task == "compress") return {s.length + 1, 1, 2, s.length};
  if (s.task == "memorize") return {0, 0, 2, std::min(s.facts, s.seq_len / 2)};
  if (s.task == "hops") return {2 * s.pairs, 2, 3, s.pairs};
  return {2 * s.pairs, 2, 2, s.pairs};
}

// The first slot for questions, so that none is nearer to its answer than asked. All questions keep that distance from
// the latest place where an answer may be: if each had its own, a question's place would tell where its answer is.
inline int first_probe_slot(const ProbeSettings& s) {
  const ProbeLayout layout = probe_layout(s);
  const int last = s.task == "compress"    ? s.length - 1
                   : s.task == "induction" ? s.length - 2
                                           : layout.context - layout.item;
  const int missing = s.distance - (layout.context - last);
  return missing > 0 ? (missing + layout.slot - 1) / layout.slot : 0;
}

inline int probe_slots(const ProbeSettings& s) {
  const ProbeLayout layout = probe_layout(s);
  return (s.seq_len - layout.context) / layout.slot;
}

// Throws UserError unless examples of these settings exist, whatever the draws are.
inline void check_probe(const ProbeSettings& s) {
  const char* task = find_probe_task(s.task).name;
  const ProbeLayout layout = probe_layout(s);
  const ProbeVocabulary vocabulary = probe_vocabulary(s);
  if (s.task == "copy") {
    if (2 * s.length + 1 > s.seq_len)
      user_error("copy: %d tokens, a mark and their copy do not fit into %d; use a smaller --length or a larger "
                 "--seq-len",
                 s.length, s.seq_len);
  } else if (layout.context + layout.slot * layout.questions > s.seq_len) {
    user_error("%s: the context and %d questions take %d tokens, more than the %d of an example; ask for less, or use "
               "a larger --seq-len",
               task, layout.questions, layout.context + layout.slot * layout.questions, s.seq_len);
  }
  if (vocabulary.size > 65535)
    user_error("%s: a vocabulary of %d tokens, more than the 65535 of a shard; use fewer --symbols", task,
               vocabulary.size);
  const bool has_keys = s.task == "recall" || s.task == "noisy-recall" || s.task == "hops";
  const int different = s.task == "induction" ? s.length : has_keys ? s.pairs : 0;
  if (different > s.symbols)
    user_error("%s: %d different tokens of an alphabet of %d; use more --symbols", task, different, s.symbols);
  if (s.task == "hops" && s.hops >= s.pairs)
    user_error("hops: a ring of %d nodes comes back within %d hops; use more --pairs than --hops", s.pairs, s.hops);
  if (s.distance == 0 || s.task == "copy" || s.task == "memorize") return;
  if (probe_slots(s) - first_probe_slot(s) < layout.questions)
    user_error("%s: questions at a --distance of %d do not fit into %d tokens; use a smaller one, or a larger "
               "--seq-len",
               task, s.distance, s.seq_len);
}

// Makes the examples of one task.
class ProbeGenerator {
 public:
  // Throws UserError if the settings are impossible.
  explicit ProbeGenerator(const ProbeSettings& settings) : s_(settings) {
    check_probe(s_);
    vocabulary_ = probe_vocabulary(s_);
    layout_ = probe_layout(s_);
    if (s_.task == "memorize") dictionary_ = values(dictionary_draws(), s_.facts);
  }

  // The values of memorize's keys, in the keys' order; the other tasks have none.
  const std::vector<uint16_t>& dictionary() const { return dictionary_; }

  ProbeExample make(ProbeSplit split, uint64_t i) const {
    Draws draws{s_.seed, split, i};
    ProbeExample e{std::vector<uint16_t>(s_.seq_len, probe_blank), std::vector<uint8_t>(s_.seq_len)};
    if (s_.task == "noisy-recall")
      for (uint16_t& token : e.tokens) token = vocabulary_.noise.token(draws.below(s_.symbols));
    if (s_.task == "copy") make_copy(draws, e);
    else if (s_.task == "memorize") make_memorize(draws, e);
    else place_questions(draws, make_context(draws, e), e);
    return e;
  }

 private:
  ProbeSettings s_;
  ProbeVocabulary vocabulary_;
  ProbeLayout layout_;
  std::vector<uint16_t> dictionary_;

  Draws dictionary_draws() const { return {s_.seed, ProbeSplit::dictionary, 0}; }

  uint16_t value(Draws& draws) const { return vocabulary_.values.token(draws.below(vocabulary_.values.size)); }

  // `n` values, with repetitions.
  std::vector<uint16_t> values(Draws draws, int n) const {
    std::vector<uint16_t> drawn(n);
    for (uint16_t& token : drawn) token = value(draws);
    return drawn;
  }

  // Writes `tokens` from position `at` on, and returns the position after them.
  static int put(ProbeExample& e, int at, const std::vector<uint16_t>& tokens, bool are_scored) {
    for (uint16_t token : tokens) {
      CHECK(at < int(e.tokens.size()));
      e.tokens[at] = token, e.scored[at] = are_scored;
      at++;
    }
    return at;
  }

  // Writes the context. The questions are in the order of their sources.
  std::vector<ProbeQuestion> make_context(Draws& draws, ProbeExample& e) const {
    if (s_.task == "induction") return make_induction(draws, e);
    if (s_.task == "compress") return make_compress(draws, e);
    if (s_.task == "hops") return make_hops(draws, e);
    return make_pairs(draws, e);
  }

  // The digits of `number` as tokens of a key.
  std::vector<uint16_t> key(int number) const {
    const int width = s_.task == "fuzzy-recall" ? s_.width : 1;
    std::vector<uint16_t> tokens(width);
    for (uint16_t& token : tokens) {
      token = vocabulary_.keys.token(number % vocabulary_.keys.size);
      number /= vocabulary_.keys.size;
    }
    return tokens;
  }

  // recall: k v, k v, ...; fuzzy-recall: k k v v, ...; noisy-recall: with noise between pairs.
  std::vector<ProbeQuestion> make_pairs(Draws& draws, ProbeExample& e) const {
    const int width = s_.task == "fuzzy-recall" ? s_.width : 1;
    int64_t possible = 1;
    for (int i = 0; i < width && possible < 1 << 20; i++) possible *= vocabulary_.keys.size;
    const std::vector<int> keys = draws.different(s_.pairs, int(possible));
    const int noise = layout_.context - layout_.item * s_.pairs;
    const std::vector<int> places = draws.places(s_.pairs, s_.pairs + noise);
    std::vector<ProbeQuestion> questions;
    for (int i = 0; i < s_.pairs; i++) {
      ProbeQuestion q{places[i] + i * (layout_.item - 1), key(keys[i]), {}};
      for (int j = 0; j < width; j++) q.answer.push_back(value(draws));
      put(e, put(e, q.source, q.question, false), q.answer, false);
      questions.push_back(q);
    }
    return questions;
  }

  // Different symbols. No question begins or ends with a symbol of another: each symbol has one successor only.
  std::vector<ProbeQuestion> make_induction(Draws& draws, ProbeExample& e) const {
    const std::vector<int> symbols = draws.different(s_.length, vocabulary_.values.size);
    for (int i = 0; i < s_.length; i++) e.tokens[i] = vocabulary_.values.token(symbols[i]);
    std::vector<bool> is_free(s_.length, true), is_asked(s_.length);
    int left = layout_.questions;
    for (int i : draws.different(s_.length - 1, s_.length - 1)) {
      if (left == 0 || !is_free[i] || !is_free[i + 1]) continue;
      is_free[i] = is_free[i + 1] = false, is_asked[i] = true;
      left--;
    }
    CHECK(left == 0);
    std::vector<ProbeQuestion> questions;
    for (int i = 0; i + 1 < s_.length; i++)
      if (is_asked[i]) questions.push_back({i, {e.tokens[i]}, {e.tokens[i + 1]}});
    return questions;
  }

  // Symbols, and a mark; a question is a place, 0 to length - 1, as a token.
  std::vector<ProbeQuestion> make_compress(Draws& draws, ProbeExample& e) const {
    std::vector<ProbeQuestion> questions;
    for (int i = 0; i < s_.length; i++) {
      e.tokens[i] = value(draws);
      questions.push_back({i, {vocabulary_.keys.token(i)}, {e.tokens[i]}});
    }
    e.tokens[s_.length] = probe_mark;
    return questions;
  }

  // Edges of a node and the next one, in random order. The nodes form one ring, so that edges before and after an edge
  // in the context point to it alike. A question is how many edges and a node, and its answer the node that many edges
  // further. Questions are drawn with repetitions, as are the values of other tasks: no answer is less likely because
  // it was given before.
  std::vector<ProbeQuestion> make_hops(Draws& draws, ProbeExample& e) const {
    const int n = s_.pairs;
    const std::vector<int> ring = draws.different(n, s_.symbols);
    const auto node = [&](int i) { return vocabulary_.keys.token(ring[(i + n) % n]); };
    const std::vector<int> order = draws.different(n, n);  // which node's edge comes first, second, ...
    for (int i = 0; i < n; i++) put(e, 2 * i, {node(order[i]), node(order[i] + 1)}, false);
    std::vector<ProbeQuestion> questions;
    for (int source : draws.with_repetitions(n, n)) {  // the edge that ends in the answer
      const int hops = 1 + draws.below(s_.hops), answer = order[source] + 1;
      questions.push_back({2 * source, {vocabulary_.counts.token(hops - 1), node(answer - hops)}, {node(answer)}});
    }
    return questions;
  }

  // Puts each question into a free slot that is far enough from the context. The latest sources choose first.
  void place_questions(Draws& draws, const std::vector<ProbeQuestion>& questions, ProbeExample& e) const {
    CHECK(int(questions.size()) == layout_.questions);
    std::vector<int> free_slots;
    for (int i = first_probe_slot(s_); i < probe_slots(s_); i++) free_slots.push_back(i);
    for (auto q = questions.rbegin(); q != questions.rend(); ++q) {
      CHECK(!free_slots.empty());
      const auto chosen = free_slots.begin() + draws.small_below(int(free_slots.size()));
      put(e, put(e, layout_.context + *chosen * layout_.slot, q->question, false), q->answer, true);
      free_slots.erase(chosen);
    }
  }

  // Symbols among blanks, a mark, and the symbols.
  void make_copy(Draws& draws, ProbeExample& e) const {
    const int context = s_.seq_len - s_.length - 1;
    const std::vector<int> places = draws.places(s_.length, context);
    e.tokens[context] = probe_mark;
    for (int i = 0; i < s_.length; i++) {
      const uint16_t token = value(draws);
      e.tokens[places[i]] = token;
      put(e, context + 1 + i, {token}, true);
    }
  }

  // Different keys, each with its value.
  void make_memorize(Draws& draws, ProbeExample& e) const {
    const std::vector<int> keys = draws.different(layout_.questions, s_.facts);
    int at = 0;
    for (int key : keys) at = put(e, put(e, at, {vocabulary_.keys.token(key)}, false), {dictionary_[key]}, true);
  }
};

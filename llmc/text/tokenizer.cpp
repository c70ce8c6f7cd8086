#include "tokenizer.h"
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>
#include "llmc/io/checkpoint.h"
#include "llmc/utils/crc32c.h"
#include "llmc/utils/error.h"
#include "llmc/utils/files.h"
#include "llmc/utils/foreign_file.h"
#include "llmc/utils/json.h"
#include "llmc/utils/number.h"
#include "llmc/utils/text.h"
#include "unicode_classes.h"

namespace fs = std::filesystem;
using nlohmann::json;

static const char end_of_text_name[] = "<|endoftext|>";

// ----------------------------------------------------------------------------
// Characters

enum class Class : uint8_t { other, letter, number, space };

// (0x110000), the class of each code point.
static const std::vector<Class>& code_point_classes() {
  static const std::vector<Class> classes = [] {
    std::vector<Class> all(0x110000, Class::other);
    auto fill = [&](const char* ranges, Class value) {
      for_each_range(ranges, [&](uint32_t first, uint32_t last) {
        std::fill(all.begin() + first, all.begin() + last + 1, value);
      });
    };
    fill(unicode_letters, Class::letter);
    fill(unicode_numbers, Class::number);
    fill(unicode_white_space, Class::space);
    return all;
  }();
  return classes;
}

// ----------------------------------------------------------------------------
// Pieces: 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+

struct PieceScanner {
  const char* text;
  size_t end;
  const Class* class_of = code_point_classes().data();  // (0x110000)

  // The class of the character at `at`, and its length.
  Class look(size_t at, size_t& length) const {
    const uint8_t byte = uint8_t(text[at]);
    length = 1;
    if (byte < 0x80) return class_of[byte];
    const Utf8Character c = first_character({text + at, end - at});
    length = c.length;
    return class_of[c.code_point];
  }

  // The end of the run of characters of class `run` that contains `at` or ends there.
  size_t end_of_run(size_t at, Class run) const {
    for (;;) {
      while (at < end && uint8_t(text[at]) < 0x80 && class_of[uint8_t(text[at])] == run) at++;
      if (at == end || uint8_t(text[at]) < 0x80) return at;
      size_t length;
      if (look(at, length) != run) return at;
      at += length;
    }
  }

  // The length of the contraction whose apostrophe is at `at`; 0 if it is none.
  size_t contraction(size_t at) const {
    if (at + 1 >= end) return 0;
    const char a = text[at + 1], b = at + 2 < end ? text[at + 2] : '\0';
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
  }

  // The end of the piece that begins at `at`, which is before the end of the text.
  size_t piece_end(size_t at) const {
    size_t length;
    Class first = look(at, length);
    if (text[at] == '\'')
      if (size_t n = contraction(at)) return at + n;
    if (first != Class::space) return end_of_run(at + length, first);
    if (text[at] == ' ' && at + 1 < end) {
      size_t next_length;
      const Class next = look(at + 1, next_length);
      if (next != Class::space) return end_of_run(at + 1 + next_length, next);
    }
    // White space: all of it at the end of the text; otherwise its last character belongs to the next piece, or is a
    // piece of its own.
    const size_t run_end = end_of_run(at + length, Class::space);
    if (run_end == end) return end;
    const size_t last = last_character({text + at, run_end - at}).length;
    return run_end - at > last ? run_end - last : run_end;
  }
};

size_t Tokenizer::last_cut(std::string_view text, size_t first) const {
  CHECK(first > 0);
  if (is_bytes_) return text.size();
  const PieceScanner scanner{text.data(), text.size()};
  for (size_t at = text.size(); at-- > first;) {
    if (is_continuation_byte(text[at])) continue;
    if (uint8_t(text[at]) >= 0x80 && text.size() - at < 4) continue;  // the character may be incomplete
    // Two characters of different classes, the left one no space, belong to different pieces, except in a contraction.
    size_t length;
    const Class left = scanner.class_of[last_character(text.substr(0, at)).code_point],
                right = scanner.look(at, length);
    const bool splits = left != Class::space && left != right && !(text[at - 1] == '\'' && right == Class::letter);
    if (splits && !cuts_added_token(text, at)) return at;
  }
  return 0;
}

// Whether an added token may begin before `at` and end behind it, of which the text may have the beginning only.
bool Tokenizer::cuts_added_token(std::string_view text, size_t at) const {
  for (const auto& [name, id, special, ordinary] : added_)
    for (size_t before = 1; before < name.size() && before <= at && id != end_of_text_; before++) {
      const std::string_view rest = text.substr(at - before, name.size());
      if (begins_with(name, rest)) return true;
    }
  return false;
}

// ----------------------------------------------------------------------------
// Vocabularies

void PairTable::reserve(size_t pairs) {
  size_t slots = 2;
  shift_ = 63;
  while (slots < pairs * 2) slots *= 2, shift_--;
  slots_.assign(slots, {});
}

void PairTable::insert(uint32_t left, uint32_t right, uint32_t id) {
  const uint32_t key = left << 16 | right;
  size_t i = slot_of(key);
  while (slots_[i].id != none) i = (i + 1) & (slots_.size() - 1);
  slots_[i] = {key, id};
}

static uint32_t hash_of(std::string_view bytes) {
  constexpr uint64_t factor = 0x9E3779B97F4A7C15u;
  uint64_t hash = bytes.size() * factor, word;
  for (; bytes.size() >= 8; bytes.remove_prefix(8)) {
    memcpy(&word, bytes.data(), 8);
    hash = (hash ^ word) * factor;
    hash ^= hash >> 32;
  }
  word = 0;
  memcpy(&word, bytes.data(), bytes.size());
  hash = (hash ^ word) * factor;
  return uint32_t(hash >> 32);
}

template <class Wanted>
int TokenTable::build(const std::vector<std::string>& tokens, Wanted wanted) {
  size_t slots = 2;
  while (slots < tokens.size() * 2) slots *= 2;
  tokens_ = tokens.data();
  slots_.assign(slots, {});
  for (size_t id = 0; id < tokens.size(); id++) {
    if (!wanted(id)) continue;
    if (find(tokens[id]) != none) return int(id);
    const uint32_t hash = hash_of(tokens[id]);
    size_t i = hash & (slots - 1);
    while (slots_[i].id != none) i = (i + 1) & (slots - 1);
    slots_[i] = {hash, int32_t(id)};
  }
  return none;
}

int TokenTable::find(std::string_view bytes) const {
  const uint32_t hash = hash_of(bytes);
  for (size_t i = hash & (slots_.size() - 1);; i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i].id == none) return none;
    if (slots_[i].hash == hash && tokens_[slots_[i].id] == bytes) return slots_[i].id;
  }
}

Tokenizer Tokenizer::bytes() {
  Tokenizer t;
  for (int byte = 0; byte < 256; byte++) t.tokens_.emplace_back(1, char(byte));
  t.tokens_.emplace_back(end_of_text_name);
  t.added_.push_back({end_of_text_name, byte_end_of_text});
  t.end_of_text_ = byte_end_of_text;
  t.is_bytes_ = true;
  return t;
}

std::vector<bool> Tokenizer::not_ordinary() const {
  std::vector<bool> found(tokens_.size());
  for (const AddedToken& token : added_) found[token.id] = !token.ordinary;
  return found;
}

// Builds the tables that encoding needs from tokens_ and added_. Throws UserError, naming `path`, for a vocabulary
// with a duplicate token or without one of the 256 bytes.
void Tokenizer::build(const std::string& path) {
  const std::vector<bool> is_special = not_ordinary();
  for (const AddedToken& token : added_)
    if (token.name == end_of_text_name) end_of_text_ = token.id;
  const int twice = ids_.build(tokens_, [&](size_t id) { return !is_special[id] && !tokens_[id].empty(); });
  if (twice != TokenTable::none)
    user_error("%s: the ids %d and %d are the same token; fetch it again", path, ids_.find(tokens_[twice]), twice);
  for (int byte = 0; byte < 256; byte++) {
    const int id = ids_.find(std::string(1, char(byte)));
    if (id == TokenTable::none)
      user_error("%s: no token for the byte 0x%02x; a byte-level vocabulary has all 256", path, byte);
    byte_ids_[byte] = uint16_t(id);
  }

  struct Pair {
    uint32_t left, right, id;
  };
  std::vector<Pair> pairs;
#pragma omp parallel  // this takes most of the time of loading
  {
    std::vector<Pair> found;
#pragma omp for schedule(static) nowait
    for (size_t id = 0; id < tokens_.size(); id++) {
      if (is_special[id]) continue;
      const std::string_view token = tokens_[id];
      for (size_t cut = 1; cut < token.size(); cut++) {
        const int left = ids_.find(token.substr(0, cut)),
                  right = left == TokenTable::none ? left : ids_.find(token.substr(cut));
        if (right != TokenTable::none) found.push_back({uint32_t(left), uint32_t(right), uint32_t(id)});
      }
    }
#pragma omp critical
    pairs.insert(pairs.end(), found.begin(), found.end());
  }
  for (size_t id = 0; id < tokens_.size(); id++)
    if (!is_special[id]) longest_ = std::max(longest_, tokens_[id].size());
  pairs_.reserve(pairs.size());
  for (const Pair& pair : pairs) pairs_.insert(pair.left, pair.right, pair.id);
}

uint32_t Tokenizer::checksum() const {
  uint32_t crc = 0;
  for (const std::string& token : tokens_) {
    const uint32_t length = uint32_t(token.size());
    crc = crc32c(&length, sizeof length, crc);
    crc = crc32c(token.data(), token.size(), crc);
  }
  return crc;
}

const std::string& Tokenizer::token(int id) const {
  CHECK(id >= 0 && id < vocab_size());
  return tokens_[id];
}

// ----------------------------------------------------------------------------
// Vocabulary files

// The character that GPT-2's files write a byte as: printable ones of Latin-1 as themselves, the others as U+0100,
// U+0101, ... in order.
static uint32_t character_of(uint8_t byte) {
  static const std::array<uint32_t, 256> characters = [] {
    std::array<uint32_t, 256> all = {};
    uint32_t next = 256;
    for (uint32_t b = 0; b < 256; b++) {
      const bool is_printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
      all[b] = is_printable ? b : next++;
    }
    return all;
  }();
  return characters[byte];
}

// A token as those files write it; all these characters take one or two bytes of UTF-8.
static std::string characters_of(std::string_view bytes) {
  std::string text;
  for (char byte : bytes) {
    const uint32_t c = character_of(uint8_t(byte));
    if (c < 0x80) text += char(c);
    else text += {char(0xC0 | c >> 6), char(0x80 | (c & 0x3F))};
  }
  return text;
}

struct Tokenizer::VocabularyFile {
  std::string path, text;
  Tokenizer tokenizer;

  explicit VocabularyFile(const std::string& file_path) : path(file_path), text(read(file_path)) {}

  static std::string read(const std::string& path) {
    std::optional<std::string> text = try_read_file(path);
    if (!text) user_error("%s: cannot be read; name a vocabulary, or a folder with one", path);
    const std::string why = why_no_text(*text);
    if (!why.empty()) user_error("%s: %s", path, why);
    return *std::move(text);
  }
  static json parse(const std::string& path, const std::string& text) {
    json j = parse_json<json>(text);
    if (j.is_discarded()) user_error("%s: %s", path, why_no_json(text));
    if (!j.is_object()) user_error("%s: is not a whole JSON object; fetch it again", path);
    return j;
  }

  void add(int64_t id, const std::string& bytes) {
    if (id < 0 || id >= max_vocab_size)
      user_error("%s: id %lld: token shards hold ids below %d", path, (long long)id, max_vocab_size);
    if (bytes.empty()) user_error("%s: id %lld is a token without a byte; fetch it again", path, (long long)id);
    if (size_t(id) >= tokenizer.tokens_.size()) tokenizer.tokens_.resize(id + 1);
    std::string& token = tokenizer.tokens_[id];
    if (!token.empty()) user_error("%s: id %lld occurs twice; fetch it again", path, (long long)id);
    token = bytes;
  }
  // An added token. One whose id is an ordinary token's of the same bytes is that, too; one that is there already keeps
  // what was said first.
  void add_special(int64_t id, const std::string& name, bool special = true) {
    for (const AddedToken& token : tokenizer.added_)
      if (token.name == name && token.id == id) return;
      else if (token.name == name)
        user_error("%s: the added token %s has two ids, %d and %lld; remove one of them", path, json(name).dump(),
                   int(token.id), (long long)id);
    const bool is_there = id >= 0 && size_t(id) < tokenizer.tokens_.size() && !tokenizer.tokens_[id].empty();
    if (is_there && tokenizer.tokens_[id] != name)
      user_error("%s: the added token %s has the id %lld, which is another token's, %s; remove one of them", path,
                 json(name).dump(), (long long)id, printable(tokenizer.tokens_[id]));
    if (!is_there) add(id, name);
    tokenizer.added_.push_back({name, uint16_t(id), special, /*ordinary=*/is_there});
  }
  // A token as Hugging Face's files describe an added one.
  void add_added(const json& token) {
    for (const char* key : {"lstrip", "rstrip", "single_word"})
      if (token.value(key, false))
        user_error("%s: %s of the added token %s is set; only GPT-2's byte-level BPE is known", path, key,
                   token.at("content").dump());
    add_special(token.at("id"), token.at("content"), token.value("special", true));
  }

  std::string bytes_of(const std::string& token) const {
    static const std::vector<int> byte_of = [] {
      std::vector<int> bytes(256 + 68, -1);
      for (int b = 0; b < 256; b++) bytes[character_of(uint8_t(b))] = b;
      return bytes;
    }();
    std::string bytes;
    for (std::string_view rest = token; !rest.empty();) {
      const Utf8Character c = first_character(rest);
      if (c.code_point >= byte_of.size() || byte_of[c.code_point] < 0)
        user_error("%s: the token \"%s\" has a character that stands for no byte; only byte-level vocabularies are "
                   "known",
                   path, token);
      bytes += char(byte_of[c.code_point]);
      rest.remove_prefix(c.length);
    }
    return bytes;
  }

  void read_ranks();
  void read_encoder_json(const std::string& encoder, const std::string& merges);
  void read_tokenizer_json(const json& j);
  void add_all(const json& vocabulary, json added, const std::vector<std::string>& merges);
  json added_beside() const;
  bool has_end_of_text() const {
    return std::any_of(tokenizer.added_.begin(), tokenizer.added_.end(),
                       [](const AddedToken& token) { return token.name == end_of_text_name; });
  }
  void check_merges(const std::vector<std::string>& merges);
};

// tiktoken: one token a line, in base64, with a space and its id. The end of text is not in the file: it gets the first
// free id.
void Tokenizer::VocabularyFile::read_ranks() {
  std::array<int8_t, 256> digit_of;
  digit_of.fill(-1);
  int8_t next = 0;
  for (char digit : std::string_view("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"))
    digit_of[uint8_t(digit)] = next++;
  size_t line_number = 0;
  for (const std::string& line : lines_of(text)) {
    line_number++;
    if (line.empty()) continue;
    std::string bytes;
    uint32_t bits = 0;
    size_t at = 0;
    int held = 0;
    for (; at < line.size() && digit_of[uint8_t(line[at])] >= 0; at++) {
      bits = bits << 6 | uint32_t(digit_of[uint8_t(line[at])]);
      held += 6;
      if (held >= 8) bytes += char(bits >> (held -= 8));
    }
    while (at < line.size() && line[at] == '=') at++;
    const bool spaced = at > 0 && at % 4 == 0 && at < line.size() && line[at] == ' ';
    const std::string number = spaced ? line.substr(at + 1) : "";
    if (number.empty() || number.size() > 9 || number.find_first_not_of("0123456789") != std::string::npos)
      user_error("%s: line %zu is not a token in base64, a space and an id: neither tiktoken's ranks, nor vocab.bpe, "
                 "encoder.json or tokenizer.json; name such a file",
                 path, line_number);
    add(parse_number<int64_t>(number), bytes);
  }
  size_t free = 0;
  while (free < tokenizer.tokens_.size() && !tokenizer.tokens_[free].empty()) free++;
  add_special(int64_t(free), end_of_text_name);
}

// A merge is the text of both tokens. Joining by the lowest id is joining by the first merge only if their order is
// that of the ids.
void Tokenizer::VocabularyFile::check_merges(const std::vector<std::string>& merges) {
  std::unordered_map<std::string_view, size_t> ids;
  for (size_t id = 0; id < tokenizer.tokens_.size(); id++) ids.emplace(tokenizer.tokens_[id], id);
  size_t last = 0;
  for (const std::string& merge : merges) {
    const auto found = ids.find(bytes_of(merge));
    if (found == ids.end()) user_error("%s: \"%s\" is merged, but is no token; fetch it again", path, merge);
    if (found->second <= last)
      user_error("%s: the ids of \"%s\" and the merge before it are not in the merges' order; only such vocabularies "
                 "are known",
                 path, merge);
    last = found->second;
  }
  size_t single = 0, special = 0, all = 0;
  for (const AddedToken& token : tokenizer.added_) special += !token.ordinary;
  for (const std::string& token : tokenizer.tokens_) all += !token.empty(), single += token.size() == 1;
  if (all != single + special + merges.size())
    user_error("%s: %zu tokens of several bytes, but %zu merges; fetch it again", path, all - single - special,
               merges.size());
}

// The tokens that Hugging Face's files beside a vocabulary add to it, described as in a tokenizer.json. That an
// added_tokens.json's are special only the other two files say.
json Tokenizer::VocabularyFile::added_beside() const {
  auto object_in = [&](const char* name) {
    const std::string file = (fs::path(path).parent_path() / name).string();
    return path_exists(file) ? parse(file, read(file)) : json::object();
  };
  const json config = object_in("tokenizer_config.json"), map = object_in("special_tokens_map.json"),
             names_alone = object_in("added_tokens.json"),
             decoder = config.value("added_tokens_decoder", json::object());
  json added = json::array();
  for (const auto& [id, token] : decoder.items()) {
    if (id.size() > 9 || id.find_first_not_of("0123456789") != std::string::npos || !token.is_object())
      user_error("%s: \"%s\" in the added_tokens_decoder of tokenizer_config.json beside it is no token", path, id);
    added.push_back(token);
    added.back()["id"] = parse_number<int64_t>(id);
  }
  std::unordered_set<std::string> special;
  for (const json* names : {&config, &map})
    for (json value : *names) {  // a name, an object with it, or a list of these
      if (!value.is_array()) value = json::array({value});
      for (const json& token : value)
        if (token.is_string() || token.contains("content"))
          special.insert(token.is_string() ? token.get<std::string>() : token["content"].get<std::string>());
    }
  for (const auto& [content, id] : names_alone.items())
    added.push_back({{"id", id}, {"content", content}, {"special", special.count(content) > 0}});
  return added;
}

// Whether a vocabulary file's token is that of a byte.
static bool is_one_byte(const std::string& token) {
  if (token.empty()) return false;
  const Utf8Character c = first_character(token);
  for (int byte = 0; byte < 256; byte++)
    if (c.length == token.size() && c.code_point == character_of(uint8_t(byte))) return true;
  return false;
}

// Takes {"token": id, ...} and added tokens, which may be among these: as an ordinary token, or by their names alone.
void Tokenizer::VocabularyFile::add_all(const json& vocabulary, json added, const std::vector<std::string>& merges) {
  const std::unordered_set<std::string> merged(merges.begin(), merges.end());
  for (const json& token : added_beside()) added.push_back(token);
  std::unordered_map<std::string, int64_t> id_of_added;
  for (const json& token : added) id_of_added.emplace(token.at("content"), token.at("id"));
  for (const auto& [token, id] : vocabulary.items()) {
    const auto found = id_of_added.find(token);
    const bool is_name = found != id_of_added.end() && found->second == id && !merged.count(token);
    if (!is_name || is_one_byte(token)) add(id, bytes_of(token));
  }
  for (const json& token : added) add_added(token);
}

// OpenAI: {"token": id, ...} and, in the other file, "#version: ..." and a merge of two tokens a line.
void Tokenizer::VocabularyFile::read_encoder_json(const std::string& encoder, const std::string& merges_path) {
  path = encoder;
  const json vocabulary = parse(encoder, read(encoder));
  for (const auto& [token, id] : vocabulary.items())
    if (!id.is_number_integer()) user_error("%s: the id of \"%s\" is no integer; fetch it again", path, token);
  std::vector<std::string> merges;
  for (const std::string& line : lines_of(read(merges_path))) {
    if (line.empty() || (merges.empty() && begins_with(line, "#version"))) continue;
    const size_t space = line.find(' ');
    if (space == std::string::npos)
      user_error("%s: \"%s\" is not a merge of two tokens; fetch it again", merges_path, line);
    merges.push_back(line.substr(0, space) + line.substr(space + 1));
  }
  json end = json::array();
  if (vocabulary.contains(end_of_text_name))
    end.push_back({{"id", vocabulary[end_of_text_name]}, {"content", end_of_text_name}});
  try {
    add_all(vocabulary, end, merges);
  } catch (const json::exception& e) {
    user_error("%s: the files of added tokens beside it are not as Hugging Face writes them: %s", path, e.what());
  }
  if (!has_end_of_text()) user_error("%s: has no <|endoftext|>; name GPT-2's", path);
  path = merges_path;
  check_merges(merges);
}

// Hugging Face tokenizers. A setting that changes the tokens of a text and is not GPT-2's is a UserError.
void Tokenizer::VocabularyFile::read_tokenizer_json(const json& j) {
  auto is_set = [](const json& object, const char* key) {
    return object.contains(key) && !object[key].is_null() && object[key] != json(false) && object[key] != json("");
  };
  auto refuse = [&](const char* what) { user_error("%s: %s; only GPT-2's byte-level BPE is known", path, what); };
  try {
    const json& model = j.at("model");
    if (model.value("type", "BPE") != "BPE") refuse("model.type is not BPE");
    for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"})
      if (is_set(model, key)) refuse(format("model.%s is set", key).c_str());
    if (is_set(j, "normalizer")) refuse("a normalizer is set");
    const json split = j.value("pre_tokenizer", json::object());
    if (!split.is_object() || split.value("type", "") != "ByteLevel" || !split.value("use_regex", true))
      refuse("pre_tokenizer is not ByteLevel");
    if (split.value("add_prefix_space", true)) refuse("pre_tokenizer.add_prefix_space is true");
    std::vector<std::string> merges;
    for (const json& merge : model.at("merges")) {
      if (merge.is_array()) {
        merges.push_back(merge.at(0).get<std::string>() + merge.at(1).get<std::string>());
      } else {
        const std::string pair = merge;
        const size_t space = std::min(pair.find(' '), pair.size() - 1);
        merges.push_back(pair.substr(0, space) + pair.substr(space + 1));
      }
    }
    add_all(model.at("vocab"), j.value("added_tokens", json::array()), merges);
    if (!has_end_of_text()) refuse("added_tokens has no <|endoftext|>");
    check_merges(merges);
  } catch (const json::exception& e) {
    user_error("%s: is not a tokenizer.json as Hugging Face tokenizers writes it: %s", path, words_of(e));
  }
}

// The first of `names` in a folder, or "".
static std::string first_in(const fs::path& folder, std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (path_exists(folder / name)) return (folder / name).string();
  return "";
}

std::string Tokenizer::file_in(const std::string& folder) {
  const std::string file = first_in(folder, {"tokenizer.json", "encoder.json", "vocab.json"});
  if (!file.empty()) return file;
  std::error_code error;
  std::string ranks;  // the first by name
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error))
    if (entry.path().extension() == ".tiktoken" && (ranks.empty() || entry.path() < ranks))
      ranks = entry.path().string();
  return ranks;
}

Tokenizer Tokenizer::load(const std::string& path) {
  if (path == "bytes") return bytes();
  if (is_folder(path)) {
    const std::string file = file_in(path);
    if (file.empty())
      user_error("%s: has no tokenizer.json, no encoder.json or vocab.json, and no ranks in a file *.tiktoken", path);
    return load(file);
  }
  verify_model(parent_folder(path), /*with_weights=*/false);
  VocabularyFile file(path);
  auto beside = [&](std::initializer_list<const char*> names) {
    const std::string found = first_in(fs::path(path).parent_path(), names);
    if (found.empty()) user_error("%s: needs %s beside it", path, *names.begin());
    return found;
  };
  if (begins_with(file.text, "#version")) {
    file.read_encoder_json(beside({"encoder.json", "vocab.json"}), path);
  } else if (file.text.find_first_not_of(" \t\r\n") != std::string::npos &&
             file.text[file.text.find_first_not_of(" \t\r\n")] == '{') {
    const json j = VocabularyFile::parse(path, file.text);
    if (j.contains("model") && j["model"].is_object()) file.read_tokenizer_json(j);
    else file.read_encoder_json(path, beside({"vocab.bpe", "merges.txt"}));
  } else {
    file.read_ranks();
  }
  if (Tokenizer of_bytes = bytes(); file.tokenizer.tokens_ == of_bytes.tokens_) return of_bytes;
  file.tokenizer.build(path);
  return std::move(file.tokenizer);
}

bool Tokenizer::agrees_with(const Tokenizer& other) const {
  const size_t both = std::min(tokens_.size(), other.tokens_.size());
  return std::equal(tokens_.begin(), tokens_.begin() + long(both), other.tokens_.begin());
}

std::optional<Tokenizer> Tokenizer::of_model(const std::string& named, const std::vector<std::string>& folders,
                                             int vocab_size) {
  std::vector<std::string> paths = {named};
  for (const std::string& folder : folders)
    if (std::string path = folder.empty() ? "" : file_in(folder);
        std::find(paths.begin(), paths.end(), path) == paths.end())
      paths.push_back(path);
  std::optional<Tokenizer> chosen;
  std::string from;
  auto of_file = [&](const std::string& path) {
    try {
      return load(path);
    } catch (const UserError& e) {
      if (path == named) throw;
      user_error("%s; it was read because it lies beside the data or the model, as their vocabulary: repair it, or "
                 "move it away; with --tokenizer none it is not read, and samples are numbers",
                 e.what());
    }
  };
  for (const std::string& path : paths) {
    if (path.empty()) continue;
    Tokenizer tokenizer = of_file(path);
    if (chosen && !chosen->agrees_with(tokenizer))
      user_error("%s and %s are different vocabularies, but data and model must have the same; name the model's own "
                 "(--tokenizer), or --tokenizer none for tokens that are not compared, and stay numbers",
                 from, path);
    if (!chosen) chosen = std::move(tokenizer), from = path;
  }
  if (!chosen && vocab_size == byte_vocab_size) {
    chosen = bytes();
    chosen->is_assumed_ = true;
  }
  if (chosen && chosen->vocab_size() > vocab_size)
    user_error("%s: has %d tokens, the model %d; name the model's own vocabulary (--tokenizer), or train a model with "
               "as many (--vocab-size)",
               from, chosen->vocab_size(), vocab_size);
  return chosen;
}

// The merge that makes a token is the last one left when its bytes have been merged into tokens of lower ids. The two
// long parts are assembled as text: as JSON objects they would take a tenth of a second.
std::string Tokenizer::to_json() const {
  using nlohmann::ordered_json;
  auto quoted = [](const std::string& characters) {  // which has no other character that JSON escapes
    std::string text = "\"";
    for (char c : characters) text.append(c == '"' || c == '\\' ? "\\" : "").push_back(c);
    return text + '"';
  };
  ordered_json added = ordered_json::array();
  const std::vector<bool> is_special = not_ordinary();
  for (const auto& [name, id, special, ordinary] : added_)
    added.push_back({{"id", id},
                     {"content", name},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", special}});
  std::string vocabulary, merges;
  Encoder encoder(*this);
  std::vector<uint16_t> parts(longest_);
  for (size_t id = 0; id < tokens_.size(); id++) {
    const std::string& token = tokens_[id];
    if (token.empty()) continue;
    vocabulary += (vocabulary.empty() ? "" : ",") +
                  (is_special[id] ? json(token).dump() : quoted(characters_of(token))) + ":" + std::to_string(id);
    if (is_special[id] || token.size() == 1) continue;
    if (encoder.merge(token, parts.data(), uint32_t(id)) != 2)
      user_error("token %zu of the vocabulary is not made by merging tokens of lower ids: it cannot be written as a "
                 "tokenizer.json",
                 id);
    merges +=
        (merges.empty() ? "" : ",") + quoted(characters_of(tokens_[parts[0]]) + " " + characters_of(tokens_[parts[1]]));
  }
  const ordered_json byte_level = {{"type", "ByteLevel"},
                                   {"add_prefix_space", false},
                                   {"trim_offsets", true},
                                   {"use_regex", true}};
  const ordered_json rest = {{"version", "1.0"},
                             {"truncation", nullptr},
                             {"padding", nullptr},
                             {"added_tokens", added},
                             {"normalizer", nullptr},
                             {"pre_tokenizer", byte_level},
                             {"post_processor", nullptr},
                             {"decoder", byte_level},
                             {"model",
                              {{"type", "BPE"},
                               {"dropout", nullptr},
                               {"unk_token", nullptr},
                               {"continuing_subword_prefix", ""},
                               {"end_of_word_suffix", ""},
                               {"fuse_unk", false},
                               {"byte_fallback", false},
                               {"ignore_merges", false}}}};
  const std::string text = rest.dump();
  return text.substr(0, text.size() - 2) + ",\"vocab\":{" + vocabulary + "},\"merges\":[" + merges + "]}}\n";
}

// ----------------------------------------------------------------------------
// Encoding

constexpr int cache_bits = 17;         // 131,072 pieces of 32 bytes, 4 MiB; a smaller cache misses too often
constexpr size_t longest_cached = 15;  // bytes
constexpr size_t short_piece = 128;    // bytes, up to which looking at all pairs is faster
// In bytes. Longer pieces are merged by one thread at a time, so that the memory for it is allocated only once.
constexpr size_t huge_piece = 1 << 20;

Encoder::Encoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {
  if (!tokenizer.is_bytes()) cache_.resize(size_t(1) << cache_bits);
}

// key = the bytes of the piece text[at, at + length), followed by zeros, with the length as the last byte. length <=
// longest_cached.
static void piece_key(std::string_view text, size_t at, size_t length, uint64_t key[2]) {
  key[0] = key[1] = 0;
  if (at + 16 <= text.size()) {
    memcpy(key, text.data() + at, 16);
    key[0] &= length >= 8 ? ~uint64_t(0) : (uint64_t(1) << 8 * length) - 1;
    key[1] &= length <= 8 ? 0 : (uint64_t(1) << 8 * (length - 8)) - 1;
  } else {
    memcpy(key, text.data() + at, length);
  }
  key[1] |= uint64_t(length) << 56;
}

void Encoder::encode_ordinary(std::string_view text, std::vector<uint16_t>& tokens) {
  const size_t had = tokens.size();
  tokens.resize(had + text.size() + 7);  // a token has at least a byte; up to seven more may be written after the last
  uint16_t* out = tokens.data() + had;
  if (tokenizer_.is_bytes()) {
    for (char byte : text) *out++ = uint8_t(byte);
  } else {
    const PieceScanner scanner{text.data(), text.size()};
    for (size_t at = 0; at < text.size();) {
      const size_t end = scanner.piece_end(at), length = end - at;
      out +=
          length <= longest_cached ? encode_cached(text, at, length, out) : encode_piece(text.substr(at, length), out);
      at = end;
    }
  }
  tokens.resize(out - tokens.data());
}

inline size_t Encoder::encode_cached(std::string_view text, size_t at, size_t length, uint16_t* tokens) {
  uint64_t key[2];
  piece_key(text, at, length, key);
  const uint64_t mixed = key[0] * 0x9E3779B97F4A7C15u ^ key[1] * 0xC2B2AE3D27D4EB4Fu;
  CachedPiece& piece = cache_[((mixed ^ mixed >> 29) * 0x9E3779B97F4A7C15u) >> (64 - cache_bits)];
  if (piece.key[0] == key[0] && piece.key[1] == key[1]) {
    memcpy(tokens, piece.tokens, sizeof piece.tokens);
    return piece.count;
  }
  const size_t count = encode_piece(text.substr(at, length), tokens);
  if (count <= 7) {
    piece.key[0] = key[0], piece.key[1] = key[1];
    memcpy(piece.tokens, tokens, sizeof piece.tokens);
    piece.count = uint16_t(count);
  }
  return count;
}

void Encoder::encode(std::string_view text, std::vector<uint16_t>& tokens, bool end_of_text) {
  struct Name {
    const std::string& name;
    uint16_t id;
    size_t next;  // the place in the text where it stands next
  };
  std::vector<Name> names;
  for (const auto& [name, id, special, ordinary] : tokenizer_.added_)
    if (end_of_text || id != tokenizer_.end_of_text()) names.push_back({name, id, text.find(name)});
  for (size_t at = 0; at < text.size() || at == 0;) {
    const Name* first = nullptr;
    for (Name& n : names) {
      if (n.next < at) n.next = text.find(n.name, at);
      const bool is_first =
          first == nullptr || n.next < first->next || (n.next == first->next && n.name.size() > first->name.size());
      if (n.next != std::string_view::npos && is_first) first = &n;
    }
    const size_t end = first != nullptr ? first->next : text.size();
    encode_ordinary(text.substr(at, end - at), tokens);
    if (first == nullptr) return;
    tokens.push_back(first->id);
    at = end + first->name.size();
  }
}

size_t Encoder::encode_piece(std::string_view piece, uint16_t* tokens) {
  if (piece.size() <= tokenizer_.longest_) {
    const int whole = tokenizer_.ids_.find(piece);
    if (whole != TokenTable::none) {
      *tokens = uint16_t(whole);
      return 1;
    }
  }
  CHECK(piece.size() <= size_t(INT32_MAX));
  if (piece.size() <= huge_piece) return merge(piece, tokens);
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  const size_t count = merge(piece, tokens);
  ids_ = {}, ranks_ = {}, previous_ = {}, next_ = {};
  return count;
}

size_t Encoder::merge(std::string_view piece, uint16_t* tokens, uint32_t below) {
  const size_t n = piece.size();
  ids_.resize(n);
  ranks_.resize(n);
  for (size_t i = 0; i < n; i++) ids_[i] = tokenizer_.byte_ids_[uint8_t(piece[i])];
  for (size_t i = 0; i + 1 < n; i++) ranks_[i] = tokenizer_.pairs_.find(ids_[i], ids_[i + 1]);
  ranks_[n - 1] = PairTable::none;
  return n <= short_piece || below != PairTable::none ? merge_short(tokens, below) : merge_long(tokens);
}

// Finds the next merge by looking at all pairs, and closes the gap after each.
size_t Encoder::merge_short(uint16_t* tokens, uint32_t below) {
  size_t n = ids_.size();
  for (;;) {
    const size_t i = std::min_element(ranks_.begin(), ranks_.begin() + long(n)) - ranks_.begin();
    if (ranks_[i] >= below) break;
    ids_[i] = ranks_[i];
    n--;
    memmove(&ids_[i + 1], &ids_[i + 2], (n - i - 1) * sizeof ids_[0]);
    memmove(&ranks_[i + 1], &ranks_[i + 2], (n - i - 1) * sizeof ranks_[0]);
    ranks_[i] = i + 1 < n ? tokenizer_.pairs_.find(ids_[i], ids_[i + 1]) : PairTable::none;
    if (i > 0) ranks_[i - 1] = tokenizer_.pairs_.find(ids_[i - 1], ids_[i]);
  }
  for (size_t i = 0; i < n; i++) tokens[i] = uint16_t(ids_[i]);
  return n;
}

// A linked list of tokens, and for each rank the places of pairs that have or had that rank, which is checked when the
// rank is processed. Ranks are processed from the lowest up and places from the left, so that memory is read in one
// direction. A merge seldom makes a pair of a lower rank than its own; those go into a heap and are merged first.
size_t Encoder::merge_long(uint16_t* tokens) {
  const size_t n = ids_.size();
  int64_t current = -1;
  previous_.resize(n);
  next_.resize(n);
  places_.resize(tokenizer_.vocab_size());
  used_ranks_.assign(places_.size() / 64 + 1, 0);
  auto set_rank = [&](size_t i, uint32_t rank) {
    ranks_[i] = rank;
    if (rank == PairTable::none) return;
    if (rank > current) {
      places_[rank].push_back(uint32_t(i));
      used_ranks_[rank / 64] |= uint64_t(1) << rank % 64;
    } else {
      earlier_.push(uint64_t(rank) << 32 | i);
    }
  };
  auto merge_at = [&](size_t i, uint32_t rank) {
    if (ranks_[i] != rank) return;
    const size_t gone = next_[i], next = next_[gone];
    ids_[i] = rank;
    ranks_[gone] = PairTable::none;
    next_[i] = int32_t(next);
    if (next < n) previous_[next] = int32_t(i);
    set_rank(i, next < n ? tokenizer_.pairs_.find(ids_[i], ids_[next]) : PairTable::none);
    if (previous_[i] >= 0) set_rank(previous_[i], tokenizer_.pairs_.find(ids_[previous_[i]], ids_[i]));
  };
  auto merge_earlier = [&](uint64_t than) {
    while (!earlier_.empty() && earlier_.top() < than) {
      const uint64_t first = earlier_.top();
      earlier_.pop();
      merge_at(uint32_t(first), uint32_t(first >> 32));
    }
  };
  for (size_t i = 0; i < n; i++) {
    previous_[i] = int32_t(i) - 1, next_[i] = int32_t(i) + 1;
    set_rank(i, ranks_[i]);
  }
  for (size_t word = 0; word < used_ranks_.size(); word++)
    while (used_ranks_[word] != 0) {
      const uint32_t rank = uint32_t(word * 64) + uint32_t(__builtin_ctzll(used_ranks_[word]));
      used_ranks_[word] &= used_ranks_[word] - 1;
      current = rank;
      std::vector<uint32_t> places;
      places.swap(places_[rank]);
      if (!std::is_sorted(places.begin(), places.end())) std::sort(places.begin(), places.end());
      for (const uint32_t i : places) {
        merge_earlier(uint64_t(rank) << 32 | i);
        merge_at(i, rank);
      }
      merge_earlier(UINT64_MAX);
    }
  size_t count = 0;
  for (size_t i = 0; i < n; i = next_[i]) tokens[count++] = uint16_t(ids_[i]);
  return count;
}

std::vector<int> encode_prompt(const Tokenizer& tokenizer, const std::string& prompt, bool begins_with_end) {
  std::string text = prompt;
  if (!tokenizer.is_bytes()) replace_invalid_utf8(prompt, text);
  std::vector<uint16_t> tokens;
  if (begins_with_end) tokens.push_back(tokenizer.end_of_text());
  Encoder(tokenizer).encode(text, tokens, /*end_of_text=*/true);
  return {tokens.begin(), tokens.end()};
}

// Vocabularies as tiktoken, OpenAI and Hugging Face write them.
#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>
#include "llmc/formats/checkpoint.h"
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/base/foreign_file.h"
#include "llmc/base/json.h"
#include "llmc/base/number.h"
#include "llmc/base/text.h"
#include "tokenizer.h"

namespace fs = std::filesystem;
using nlohmann::json;

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

constexpr uint32_t end_of_characters = 256 + 68;  // 68 bytes are not printable

// The byte that a character stands for; -1 if it stands for none.
static int byte_of(uint32_t character) {
  static const std::array<int, end_of_characters> bytes = [] {
    std::array<int, end_of_characters> all;
    all.fill(-1);
    for (int byte = 0; byte < 256; byte++) all[character_of(uint8_t(byte))] = byte;
    return all;
  }();
  return character < end_of_characters ? bytes[character] : -1;
}

// Whether a vocabulary file's token is that of a byte.
static bool is_one_byte(const std::string& token) {
  if (token.empty()) return false;
  const Utf8Character c = first_character(token);
  return c.length == token.size() && byte_of(c.code_point) >= 0;
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
    const std::string why = foreign_format(*text);
    if (!why.empty()) user_error("%s: %s", path, why);
    return *std::move(text);
  }
  static json parse(const std::string& path, const std::string& text) {
    json j = parse_json_or_throw<json>(text, path + ":");
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
    std::string bytes;
    for (std::string_view rest = token; !rest.empty();) {
      const Utf8Character c = first_character(rest);
      if (byte_of(c.code_point) < 0)
        user_error("%s: the token \"%s\" has a character that stands for no byte; only byte-level vocabularies are "
                   "known",
                   path, token);
      bytes += char(byte_of(c.code_point));
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

// OpenAI: {"token": id, ...} and, in the other file, "#version: ..." and a merge of two tokens per line.
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

Tokenizer Tokenizer::of_merges(const std::vector<Merge>& merges) {
  Tokenizer t;
  t.tokens_ = {end_of_text_name};
  t.added_.push_back({end_of_text_name, 0});
  for (uint32_t character = 0; character < end_of_characters; character++)
    if (const int byte = byte_of(character); byte >= 0) t.tokens_.emplace_back(1, char(byte));
  for (const auto& [left, right] : merges) t.tokens_.push_back(t.tokens_[left] + t.tokens_[right]);
  t.build("the merges");
  return t;
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

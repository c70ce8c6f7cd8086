#include "corpus.h"
#include <sys/stat.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/base/foreign_file.h"
#include "llmc/base/json.h"
#include "llmc/base/message.h"
#include "llmc/base/random.h"
#include "llmc/base/utf8.h"

constexpr size_t block_bytes = 1 << 18;
constexpr uint64_t split_seed = 1337;  // which documents are validation data must not change from one run to another

// Why a file or folder in a folder is no text; "" if it may be.
static std::string what_is_no_text(const std::filesystem::directory_entry& entry, const std::string& out) {
  const std::string name = entry.path().filename();
  std::error_code ignored;
  if (name == ".git" || name == ".hg" || name == ".svn") return "a text's history";
  if (entry.is_symlink() && !entry.exists(ignored)) return "a link that leads nowhere";
  if (entry.is_directory(ignored) && std::filesystem::equivalent(entry.path(), out, ignored)) return "what is written";
  return "";
}

// The regular files in a folder and its subfolders, but those in `out`, sorted by path.
static std::vector<std::string> files_in(const std::string& folder, const std::string& out) {
  std::vector<std::string> files;
  for (std::filesystem::recursive_directory_iterator entry(folder), end; entry != end; ++entry) {
    const std::string name = entry->path().string();
    std::error_code ignored;
    if (const std::string what = what_is_no_text(*entry, out); !what.empty())
      entry.disable_recursion_pending(), print_warning(name + ": is left out: it is " + what);
    else if (entry->is_regular_file(ignored)) files.push_back(name);
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<SourceFile> list_sources(const std::vector<std::string>& paths, const std::string& out) {
  namespace fs = std::filesystem;
  std::vector<SourceFile> sources;
  for (const std::string& path : paths) {
    try {
      const bool is_stdin = path == "-", is_folder = !is_stdin && fs::is_directory(path);
      if (!is_stdin && !fs::exists(path)) user_error("%s: no such file or folder", path);
      if (!is_stdin && !is_folder && !fs::is_regular_file(path)) user_error("%s: is neither a file nor a folder", path);
      for (const std::string& file : is_folder ? files_in(path, out) : std::vector<std::string>{path}) {
        struct stat info = {};
        if (!is_stdin && stat(file.c_str(), &info) != 0) user_error("%s: cannot read: %s", file, strerror(errno));
        sources.push_back({file, info.st_size, 0, !is_folder});
      }
    } catch (const fs::filesystem_error& e) {
      user_error("%s: cannot read: %s", e.path1().c_str(), e.code().message());
    }
  }
  return sources;
}

CorpusReader::CorpusReader(std::vector<SourceFile>& sources, const CorpusOptions& options, const CorpusSplit& split,
                           const Tokenizer& tokenizer)
    : options_(options), split_(split), tokenizer_(tokenizer), stream_(sources), block_(block_bytes) {}

// Fills rest_ from the open file, or opens the next one; false at the corpus's end. At the end of a file rest_ is empty
// and the file is closed.
bool CorpusReader::next_block() {
  if (interrupted) user_error("interrupted");
  const bool begins = !file_open_;
  if (begins) {
    if (!stream_.next_file()) return false;
    file_open_ = true;
    position_.files++;
    line_ = 1;
  }
  const size_t got = stream_.read(block_.data(), block_.size());
  rest_ = {block_.data(), got};
  file_open_ = got > 0;
  if (!options_.any_bytes) judge_block(begins);
  return true;
}

// Whether a file's first block begins with a line of JSON that has a string, and others follow it.
static bool are_json_lines(std::string_view block) {
  const size_t end = block.find('\n');
  if (block.empty() || block[0] != '{' || end == std::string_view::npos) return false;
  std::vector<std::string> none;
  int64_t replaced = 0;
  return block.substr(end + 1, 1) == "{" && strings_of_line(block.substr(0, end), {}, none, replaced).empty();
}

// Ends a file whose next block is no text: a file that the user named is an error, others are left out, in a note.
void CorpusReader::judge_block(bool begins) {
  const std::string why = begins ? foreign_format(rest_) : "";
  if (!why.empty()) user_error("%s: %s, or leave it out", stream_.name(), why);
  std::string text(rest_);
  text.erase(std::remove(text.begin(), text.end(), '\0'), text.end());
  const bool is_binary_without_zeros = is_binary(text);
  if (is_binary_without_zeros || (!options_.nul_separated && is_binary(rest_))) {
    if (stream_.is_named())
      user_error("%s: is no text%s: it has many control characters; leave it out, or take the bytes as they are "
                 "(--any-bytes)%s",
                 stream_.name(), begins ? "" : " further on",
                 is_binary_without_zeros ? "" : "; if zeros separate documents: --separator nul");
    notes_.push_back({Note::left_out, stream_.name() + (begins ? "" : " (what follows its beginning)")});
    position_.files -= begins;
    rest_ = {}, file_open_ = false;
  } else if (begins) {
    std::string replaced;
    const bool is_cut = rest_.size() == block_.size();  // and its last character maybe, too
    if (text.empty()) notes_.push_back({Note::empty, stream_.name()});
    else if (replace_invalid_utf8(text, replaced) > is_cut) notes_.push_back({Note::not_utf8, stream_.name()});
    else if (options_.fields.empty() && are_json_lines(text)) notes_.push_back({Note::json_lines, stream_.name()});
  }
}

// Takes text from rest_ up to the end of the document or of rest_. Returns true if it was the end of the document.
bool CorpusReader::take(std::string_view& text) {
  const bool separated = options_.nul_separated || !options_.fields.empty();
  const void* end = separated ? memchr(rest_.data(), options_.nul_separated ? '\0' : '\n', rest_.size()) : nullptr;
  const size_t n = end ? size_t(static_cast<const char*>(end) - rest_.data()) : rest_.size();
  text = rest_.substr(0, n);
  rest_.remove_prefix(end ? n + 1 : n);
  return end;
}

bool CorpusReader::next(Batch& batch) {
  batch = {};
  batch.text.swap(carried_);
  part_begin_ = 0, no_cut_before_ = 1;
  for (;;) {
    if (rest_.empty()) {
      if (!next_block()) break;
      if (!file_open_) end_document(batch);
    } else {
      std::string_view text;
      const bool ends = take(text);
      batch.text.append(text);
      cut_tail(batch);
      if (ends) end_document(batch);
    }
    if (batch.memory() >= batch_bytes && finish(batch)) return true;
  }
  batch.end = position_;
  batch.notes.swap(notes_);
  return !batch.parts.empty() || !batch.notes.empty();
}

// The text after part_begin_ becomes a part.
void CorpusReader::end_part(Batch& batch, bool ends) {
  Part part;
  part.bytes = uint32_t(batch.text.size() - part_begin_);
  part.begins = !in_document_;
  part.ends = ends;
  if (split_.train_bytes >= 0) {
    part.val = position_.in_tail;
  } else if (split_.every > 0) {
    const uint64_t row = uint64_t(position_.document / split_.every);
    part.val = position_.document % split_.every ==
               random_words(split_seed, RandomStream::split, 0, row).word[0] % uint32_t(split_.every);
  }
  if (!options_.fields.empty()) {
    const std::string file = stream_.name();
    const Batch::Lines* last = batch.lines.empty() ? nullptr : &batch.lines.back();
    if (!last || last->file != file || last->line + int64_t(batch.parts.size() - last->first_part) != line_)
      batch.lines.push_back({batch.parts.size(), file, line_});
  }
  batch.parts.push_back(part);
  part_begin_ = batch.text.size();
  no_cut_before_ = 1;
  position_.bytes += part.bytes;
  in_document_ = true;
}

void CorpusReader::end_document(Batch& batch) {
  const std::string_view text = std::string_view(batch.text).substr(part_begin_);
  if (!options_.fields.empty() && is_blank(text)) {
    batch.text.resize(part_begin_);
  } else if (!text.empty() || in_document_) {
    end_part(batch, true);
    position_.document++;
  }
  in_document_ = false;
  line_++;
}

// If the open part crosses CorpusSplit::train_bytes, ends it there, at the beginning of a character, and begins another
// document.
void CorpusReader::cut_tail(Batch& batch) {
  const int64_t open = int64_t(batch.text.size() - part_begin_);
  if (split_.train_bytes < 0 || position_.in_tail || position_.bytes + open <= split_.train_bytes) return;
  size_t cut = part_begin_ + (split_.train_bytes - position_.bytes);
  for (int i = 0; i < 3 && cut > part_begin_ && is_continuation_byte(batch.text[cut]); i++) cut--;
  const std::string tail = batch.text.substr(cut);
  batch.text.resize(cut);
  if (cut > part_begin_) end_part(batch, true);
  in_document_ = false;
  position_.in_tail = true;
  batch.text += tail;
}

// The batch is full: cuts the open part, or leaves it to the next batch. False if the batch must grow further.
bool CorpusReader::finish(Batch& batch) {
  const std::string_view open = std::string_view(batch.text).substr(part_begin_);
  if (!options_.fields.empty() && open.size() > longest_line)
    user_error("%s: line %lld is longer than %zu MB; JSON lines have a document a line", stream_.name(),
               (long long)line_, longest_line >> 20);
  size_t cut = open.empty() || !options_.fields.empty() ? 0 : tokenizer_.last_cut(open, no_cut_before_);
  if (cut == 0 && open.size() >= longest_run && options_.fields.empty()) {
    cut = open.size() - 4;  // the last character may be incomplete
    for (int i = 0; i < 3 && is_continuation_byte(open[cut]); i++) cut--;
    batch.runs_cut++;
  }
  if (cut == 0 && !open.empty() && batch.parts.empty()) {
    no_cut_before_ = open.size() > 8 ? open.size() - 8 : 1;
    return false;
  }
  carried_ = open.substr(cut);
  batch.text.resize(part_begin_ + cut);
  if (cut > 0) end_part(batch, false);
  batch.end = position_;
  batch.notes.swap(notes_);
  return true;
}

// "\ud83d" and other surrogates that are not part of a pair are no characters, and an error for JSON parsers. Replaces
// them by U+FFFD and returns their number.
static int64_t replace_lone_surrogates(std::string& json_text) {
  auto unit_at = [&](size_t at) -> int {  // the value of \uXXXX at an offset; -1 if it is none
    if (json_text.compare(at, 2, "\\u") != 0 || at + 6 > json_text.size()) return -1;
    const std::string digits = json_text.substr(at + 2, 4);
    return digits.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos ? std::stoi(digits, nullptr, 16)
                                                                                   : -1;
  };
  int64_t replaced = 0;
  for (size_t at = json_text.find('\\'); at < json_text.size(); at = json_text.find('\\', at)) {
    const int unit = unit_at(at), next = unit < 0 ? -1 : unit_at(at + 6);
    if (unit >= 0xD800 && unit < 0xDC00 && next >= 0xDC00 && next < 0xE000) {
      at += 12;
    } else if (unit >= 0xD800 && unit < 0xE000) {
      json_text.replace(at + 2, 4, "fffd");
      replaced++;
      at += 6;
    } else {
      at += 2;
    }
  }
  return replaced;
}

std::string strings_of_line(std::string_view line, const std::vector<std::string>& fields,
                            std::vector<std::string>& strings, int64_t& replaced) {
  std::string text;
  const int64_t invalid = replace_invalid_utf8(line, text);
  if (invalid == 0) text = line;
  nlohmann::json object = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  int64_t surrogates = 0;
  if (object.is_discarded()) {
    surrogates = replace_lone_surrogates(text);
    object = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  }
  if (object.is_discarded()) return why_no_json(text);
  strings.clear();
  for (const std::string& field : fields) {
    if (object.is_object() && object.contains(field) && object[field].is_string()) {
      strings.push_back(std::move(object[field].get_ref<std::string&>()));
      continue;
    }
    std::string names;
    for (const auto& [name, value] : object.items())
      if (object.is_object() && value.is_string() && names.size() < 200) names += (names.empty() ? "" : ", ") + name;
    return "is no JSON object with a string named \"" + field + "\"; its strings: " + (names.empty() ? "none" : names);
  }
  replaced += invalid + surrogates;
  return "";
}

// A corpus as batches of documents, in an order that depends on the corpus alone. Memory is bounded by the size of a
// batch, however long documents are.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>
#include "archive_stream.h"
#include "llmc/text/tokenizer.h"

constexpr size_t batch_bytes = 1 << 20;  // bytes of ordinary documents
// Bytes without a place to cut at, as in one endless word; a longer run is cut anyway.
constexpr size_t longest_run = 16 << 20;
constexpr size_t longest_line = 32 << 20;  // bytes, of JSON

struct CorpusOptions {
  std::vector<std::string> paths;   // files, folders, or "-" for standard input
  bool nul_separated = false;       // documents in a file are separated by NUL bytes; otherwise a file is one document
  bool any_bytes = false;           // files are taken as they are, also those that are no text
  std::vector<std::string> fields;  // not empty: files are JSON lines, each with a document in these fields
};

// Which documents are validation data.
struct CorpusSplit {
  int64_t every = 0;         // one of each `every` consecutive documents, chosen at random by its number; 0: none
  int64_t train_bytes = -1;  // not -1: instead, the text after the first `train_bytes` bytes
};

// A place in the corpus.
struct Position {
  int64_t document = 0;  // documents before it
  int64_t bytes = 0;     // of documents before it
  int64_t files = 0;     // opened so far, those in archives included
  bool in_tail = false;  // it is after CorpusSplit::train_bytes
};

// A document, or a part of one. Only the last part of a document with several parts may be empty.
struct Part {
  uint32_t bytes = 0;
  bool begins = false, ends = false;  // it is the document's first part; its last
  bool val = false;                   // it is validation data
};

// What a user should know of a file.
enum class Note { left_out, not_utf8, json_lines, empty, count };

struct Batch {
  std::string text;  // the parts, concatenated; with CorpusOptions::fields, lines of JSON
  std::vector<Part> parts;
  Position end;                                     // after its last part
  int64_t runs_cut = 0;                             // runs longer than longest_run that were cut
  std::vector<std::pair<Note, std::string>> notes;  // of files that were opened since the last batch
  struct Lines {
    size_t first_part;
    std::string file;
    int64_t line;  // of the first part
  };
  std::vector<Lines> lines;  // with CorpusOptions::fields: where parts come from, for messages

  size_t memory() const { return text.size() + parts.size() * sizeof(Part); }
};

// The regular files that `paths` name, in that order; a folder's files, subfolders included, are sorted by path. Links
// that lead nowhere, folders of version control and the folder `out`, if there is one, are left out, with a warning.
// Throws UserError, naming the path, if one does not exist or cannot be read.
std::vector<SourceFile> list_sources(const std::vector<std::string>& paths, const std::string& out);

// Reads the corpus. `sources` and `tokenizer`, which determines where documents may be cut, must
// outlive it. Throws UserError for files that cannot be read (see ArchiveStream), that are known to hold text in
// another form, or that the user named and are no text, and for JSON lines that are too long.
struct CorpusReader {
  CorpusReader(std::vector<SourceFile>& sources, const CorpusOptions& options, const CorpusSplit& split,
               const Tokenizer& tokenizer);

  // The next batch; false at the end. Where batches end depends on the corpus alone. Except for runs_cut and
  // CorpusSplit::train_bytes, a document is cut only where that changes no token.
  bool next(Batch& batch);

  int64_t bytes_read() const { return stream_.bytes_read(); }

 private:
  const CorpusOptions options_;
  const CorpusSplit split_;
  const Tokenizer& tokenizer_;
  ArchiveStream stream_;
  Position position_;  // after the last part of the batch
  int64_t line_ = 0;
  bool file_open_ = false;
  std::vector<char> block_;
  std::string_view rest_;  // of block_, not processed yet
  std::vector<std::pair<Note, std::string>> notes_;
  std::string carried_;       // the beginning of the next batch
  size_t part_begin_ = 0;     // in the batch's text: what follows is in no part yet
  size_t no_cut_before_ = 1;  // before this offset the open part has no place to cut at
  bool in_document_ = false;  // an earlier part belongs to the same document

  bool next_block();
  void judge_block(bool begins);
  bool take(std::string_view& text);
  void end_part(Batch& batch, bool ends);
  void end_document(Batch& batch);
  void cut_tail(Batch& batch);
  bool finish(Batch& batch);
};

// strings (fields) = the strings in `fields` of a line of JSON, in UTF-8. Invalid UTF-8 and unpaired surrogates become
// U+FFFD, and `replaced` is incremented by their number. Returns what is wrong with the line if it is no JSON object or
// lacks one of these strings, and "" if nothing is.
std::string strings_of_line(std::string_view line, const std::vector<std::string>& fields,
                            std::vector<std::string>& strings, int64_t& replaced);

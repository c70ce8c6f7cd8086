// A corpus as batches of documents, in one order whatever reads them. Memory is bounded by the size of a batch, however long documents are.
#pragma once
#include <csignal>                // sig_atomic_t
#include <cstdint>                // int64_t, uint32_t
#include <string>                 // std::string
#include <string_view>            // std::string_view
#include <utility>                // std::pair
#include <vector>                 // std::vector
#include "archive_stream.h"       // ArchiveStream, SourceFile
#include "llmc/text/tokenizer.h"  // Tokenizer

constexpr size_t batch_bytes = 1 << 20;   // of ordinary documents
constexpr size_t longest_run = 16 << 20;  // bytes without a place to cut at, as in one endless word; a longer one is cut all the same
constexpr size_t longest_line = 32 << 20; // bytes, of JSON

// Set by a signal: whatever is being read ends with a UserError.
inline volatile sig_atomic_t interrupted = 0;

struct CorpusOptions {
  std::vector<std::string> paths;  // files, folders, or "-" for standard input
  bool nul_separated = false;      // a NUL byte parts the documents in a file; otherwise a file is one document
  std::string field;               // not "": a line of a file is a JSON object, with a document under this name
};

// Which documents are validation data.
struct CorpusSplit {
  int64_t every = 0;         // one of so many documents in a row, drawn by their number; 0: none
  int64_t train_bytes = -1;  // not -1: what lies behind so many bytes of text, and no document
};

// A place in the corpus.
struct Position {
  int64_t source = 0;           // index of the file
  int64_t source_document = 0;  // documents of that file before it
  int64_t offset = 0;           // bytes before it of the document it is in
  int64_t document = 0;         // documents before it, of all files
  int64_t bytes = 0;            // of documents before it
  int64_t files = 0;            // that were opened, those in archives too
  bool in_tail = false;         // CorpusSplit::train_bytes is before it
};

// A document, or a part of one; never without a byte, but for the last part of a longer one.
struct Part {
  uint32_t bytes = 0;
  bool begins = false, ends = false;  // it is the document's first part, its last one
  bool val = false;
};

struct Batch {
  std::string text;           // the parts, one after the other; with CorpusOptions::field, lines of JSON
  std::vector<Part> parts;
  Position end;               // behind its last part
  int64_t runs_cut = 0;       // that were longer than longest_run
  struct Lines {
    size_t first_part;
    std::string file;
    int64_t line;             // of the first part
  };
  std::vector<Lines> lines;   // with CorpusOptions::field: where parts are from, for messages

  size_t memory() const { return text.size() + parts.size() * sizeof(Part); }
};

// The regular files of the arguments, in the arguments' order; those of a folder sorted by path. Throws UserError.
std::vector<SourceFile> list_sources(const std::vector<std::string>& paths);

// Throws UserError for what cannot be read; see ArchiveStream.
struct CorpusReader {
  CorpusReader(std::vector<SourceFile>& sources, const CorpusOptions& options, const CorpusSplit& split, const Tokenizer& tokenizer,
               const Position& begin = {});

  // The next batch; false at the end. Where batches end depends on the corpus alone. A document is cut only where that changes no token,
  // but for runs_cut and CorpusSplit::train_bytes.
  bool next(Batch& batch);

  int64_t bytes_read() const { return stream_.bytes_read(); }

 private:
  const CorpusOptions options_;
  const CorpusSplit split_;
  const Tokenizer& tokenizer_;
  ArchiveStream stream_;
  Position position_;              // behind the last part of the batch
  int64_t line_ = 0;
  bool file_open_ = false;
  std::vector<char> block_;
  std::string_view rest_;          // of block_, not looked at yet
  std::string carried_;            // what the next batch begins with
  size_t part_begin_ = 0;          // in the batch: what lies behind it is in no part yet
  size_t no_cut_before_ = 1;       // there is no place to cut at in the part before that
  bool in_document_ = false;       // an earlier part is of the same document

  bool next_block();
  void skip_to(const Position& place);
  bool take(std::string_view& text);
  void end_part(Batch& batch, bool ends);
  void end_document(Batch& batch);
  void cut_tail(Batch& batch);
  bool finish(Batch& batch);
};

// document = the string under `field` in a line of JSON, in UTF-8; `replaced` counts what was none, and surrogates that are half of
// nothing, which become U+FFFD. Returns false if the line is no JSON object or holds no such string.
bool document_of_line(std::string_view line, const std::string& field, std::string& document, int64_t& replaced);

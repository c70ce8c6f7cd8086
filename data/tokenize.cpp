// data/tokenize: text files and folders -> DIR/train_000.bin ... and DIR/val_000.bin, token shards in llm.c's format.
//
// The inputs are read twice, in chunks: once to count documents and bytes, which the split needs, and once to write.
// A folder that stands under its final name is complete: everything is written into DIR.tmp, synced, and renamed at
// the end.
#include <dirent.h>          // opendir, readdir
#include <fcntl.h>           // open
#include <sys/file.h>        // flock
#include <sys/stat.h>        // stat, mkdir
#include <unistd.h>          // read, write, fsync, close, unlink, rmdir
#include <CLI/CLI.hpp>       // CLI::App
#include <algorithm>         // std::sort, std::min, std::clamp
#include <cerrno>            // errno
#include <chrono>            // std::chrono::steady_clock
#include <cmath>             // std::lround
#include <csignal>           // signal
#include <cstdio>            // printf, fprintf, rename
#include <cstring>           // memchr, strerror
#include <filesystem>        // std::filesystem::recursive_directory_iterator
#include <string>            // std::string
#include <string_view>       // std::string_view
#include <vector>            // std::vector
#include "llmc/dataloader.h" // shard_magic, shard_version, shard_header_ints, shard_header_bytes
#include "llmc/durable_file.h" // sync_folder
#include "llmc/error.h"      // user_error, format
#include "llmc/tokenizer.h"  // encode_bytes, byte_end_of_text

// -------------------------------------------------------------------------------------------------------------------
// Reading: files, and the documents in them.

struct Options {
  std::string tokenizer = "bytes";
  std::string out;
  std::string separator = "none";
  double val_fraction = 0;                // 0: 1/20 of the documents, or 1/10 of the bytes
  int64_t shard_tokens = 100 * 1000 * 1000;  // llm.c's
  bool force = false;
  std::vector<std::string> paths;
};

volatile sig_atomic_t interrupted = 0;

// The regular files of the arguments, in the arguments' order; those of a folder sorted by path.
std::vector<std::string> list_files(const std::vector<std::string>& arguments) {
  namespace fs = std::filesystem;
  std::vector<std::string> files;
  for (const std::string& argument : arguments) {
    try {
      if (!fs::exists(argument)) user_error("%s: no such file or folder", argument.c_str());
      if (fs::is_regular_file(argument)) {
        files.push_back(argument);
        continue;
      }
      if (!fs::is_directory(argument)) user_error("%s: is neither a file nor a folder", argument.c_str());
      size_t first = files.size();
      for (const fs::directory_entry& entry : fs::recursive_directory_iterator(argument)) {
        std::error_code broken_link;  // counts as no file
        if (entry.is_regular_file(broken_link)) files.push_back(entry.path().string());
      }
      std::sort(files.begin() + long(first), files.end());
    } catch (const fs::filesystem_error& e) {
      user_error("%s: cannot read: %s", e.path1().c_str(), e.code().message().c_str());
    }
  }
  return files;
}

// Calls take(piece, begins_document) for every piece of text in a file; pieces are not empty and hold no separator. A
// file is one document, or, where NULs separate them, several; documents without a byte are left out.
template <class Take>
void for_each_piece(const std::string& path, bool nul_separated, Take take) {
  struct File {
    int fd;
    ~File() { close(fd); }
  } file = {open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) user_error("%s: cannot open: %s", path.c_str(), strerror(errno));
  std::vector<char> chunk(1 << 20);
  bool begins = true;
  for (;;) {
    if (interrupted) user_error("interrupted; nothing was written");
    ssize_t got = read(file.fd, chunk.data(), chunk.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) user_error("%s: cannot read: %s", path.c_str(), strerror(errno));
    if (got == 0) return;
    std::string_view rest(chunk.data(), size_t(got));
    while (!rest.empty()) {
      const void* nul = nul_separated ? memchr(rest.data(), 0, rest.size()) : nullptr;
      size_t n = nul ? size_t(static_cast<const char*>(nul) - rest.data()) : rest.size();
      if (n > 0) take(rest.substr(0, n), begins);
      if (n > 0) begins = false;
      if (nul) begins = true;
      rest.remove_prefix(std::min(rest.size(), nul ? n + 1 : n));
    }
  }
}

struct Corpus {
  int64_t documents = 0;
  int64_t bytes = 0;  // of text, without separators
};

Corpus count_corpus(const std::vector<std::string>& files, bool nul_separated) {
  Corpus corpus;
  for (const std::string& file : files)
    for_each_piece(file, nul_separated, [&](std::string_view piece, bool begins) {
      corpus.documents += begins;
      corpus.bytes += int64_t(piece.size());
    });
  return corpus;
}

// -------------------------------------------------------------------------------------------------------------------
// Writing: shards, in a folder that appears as a whole.

std::string without_trailing_slashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

// "a/" of "a/b", and "." of "b".
std::string parent_folder(const std::string& path) {
  size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

// The names in a folder; empty if there is no such folder. Throws UserError if it is something else.
std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  DIR* dir = opendir(folder.c_str());
  if (!dir && errno == ENOENT) return names;
  if (!dir) user_error("%s: cannot list: %s", folder.c_str(), strerror(errno));
  while (const dirent* entry = readdir(dir)) {
    std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  closedir(dir);
  return names;
}

// train_000.bin, val_000.bin and so on: the only names this program writes, and the only ones it deletes.
bool is_shard_name(const std::string& name) {
  bool ours = name.rfind("train_", 0) == 0 || name.rfind("val_", 0) == 0;
  return ours && name.size() > 4 && name.compare(name.size() - 4, 4, ".bin") == 0;
}

// Deletes the shards in a folder, and the folder unless something else is in it. What cannot be deleted stays.
void remove_shard_folder(const std::string& folder) noexcept {
  try {
    for (const std::string& name : names_in(folder))
      if (is_shard_name(name)) unlink((folder + "/" + name).c_str());
  } catch (const UserError&) {
  }
  rmdir(folder.c_str());
}

// PREFIX_000.bin, PREFIX_001.bin, ... of at most `shard_tokens` tokens each.
class ShardWriter {
public:
  ShardWriter(std::string folder, std::string prefix, int64_t shard_tokens)
      : folder_(std::move(folder)), prefix_(std::move(prefix)), shard_tokens_(shard_tokens) {}
  ~ShardWriter() {
    if (fd_ >= 0) close(fd_);
  }
  int64_t total() const { return total_; }
  int num_shards() const { return next_shard_; }

  void add_end_of_text() {
    if (in_shard_ == shard_tokens_) finish();
    if (fd_ < 0) begin_shard();
    buffer_.push_back(byte_end_of_text);
    count(1);
  }
  void add_text(std::string_view text) {
    while (!text.empty()) {
      if (in_shard_ == shard_tokens_) finish();
      if (fd_ < 0) begin_shard();
      size_t n = size_t(std::min(int64_t(text.size()), shard_tokens_ - in_shard_));
      buffer_.resize(buffer_.size() + n);
      encode_bytes(text.substr(0, n), buffer_.data() + buffer_.size() - n);
      count(int64_t(n));
      text.remove_prefix(n);
    }
  }
  // Completes the last shard: its header, and everything on the disk.
  void finish() {
    if (fd_ < 0) return;
    flush();
    int32_t header[shard_header_ints] = {shard_magic, shard_version, int32_t(in_shard_)};
    if (pwrite(fd_, header, sizeof header, 0) != ssize_t(sizeof header) || fsync(fd_) != 0) fail();
    int rc = close(fd_);
    fd_ = -1;
    if (rc != 0) fail();
  }

private:
  std::string folder_, prefix_, path_;
  int64_t shard_tokens_, in_shard_ = 0, total_ = 0;
  int fd_ = -1, next_shard_ = 0;
  std::vector<uint16_t> buffer_;

  [[noreturn]] void fail() { user_error("%s: cannot write: %s", path_.c_str(), strerror(errno)); }
  void count(int64_t tokens) {
    in_shard_ += tokens;
    total_ += tokens;
    if (buffer_.size() >= 1 << 20) flush();
  }
  void begin_shard() {
    path_ = folder_ + format("/%s_%03d.bin", prefix_.c_str(), next_shard_++);
    fd_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ < 0 || lseek(fd_, shard_header_bytes, SEEK_SET) < 0) fail();
    in_shard_ = 0;
  }
  void flush() {
    const char* bytes = reinterpret_cast<const char*>(buffer_.data());
    size_t left = buffer_.size() * sizeof(uint16_t);
    while (left > 0) {
      ssize_t written = write(fd_, bytes, left);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail();
      bytes += written;
      left -= size_t(written);
    }
    buffer_.clear();
  }
};

// DIR.tmp, ours alone: locked while we live, so that what a killed run left can be told from what another run is
// writing. Removed again unless publish() has made it DIR.
class OutputFolder {
public:
  explicit OutputFolder(const std::string& final_path) : final_(final_path), path_(final_path + ".tmp") {
    for (;;) {
      if (mkdir(path_.c_str(), 0777) != 0 && errno != EEXIST)
        user_error("%s: cannot create the folder: %s; --out needs a writable parent folder", path_.c_str(),
                   strerror(errno));
      fd_ = open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
      if (fd_ < 0 && errno == ENOENT) continue;  // another run has just renamed it
      if (fd_ < 0) user_error("%s: cannot open the folder: %s; move it away", path_.c_str(), strerror(errno));
      if (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
        close(fd_);
        user_error("%s: another run is writing it; wait until that has finished", final_.c_str());
      }
      struct stat named, locked;
      bool ours = stat(path_.c_str(), &named) == 0 && fstat(fd_, &locked) == 0 && named.st_ino == locked.st_ino;
      if (ours && names_in(path_).empty()) break;
      if (ours) remove_leftovers();
      close(fd_);  // otherwise it was renamed between open and flock
    }
  }
  ~OutputFolder() {
    if (!published_) remove_shard_folder(path_);
    close(fd_);
  }
  const std::string& path() const { return path_; }

  // DIR.tmp becomes DIR. What stood there, and held nothing but shards, is deleted.
  void publish() {
    sync_folder(path_);
    std::string old = final_ + ".old";
    remove_shard_folder(old);  // of a run that was killed right here
    bool replaces = rename(final_.c_str(), old.c_str()) == 0;
    if (rename(path_.c_str(), final_.c_str()) != 0) {
      int error = errno;
      if (replaces) rename(old.c_str(), final_.c_str());
      user_error("%s: cannot rename to %s: %s", path_.c_str(), final_.c_str(), strerror(error));
    }
    published_ = true;
    sync_folder(parent_folder(final_));
    if (replaces) remove_shard_folder(old);
  }

private:
  std::string final_, path_;
  int fd_ = -1;
  bool published_ = false;

  // Of a killed run, whose lock died with it.
  void remove_leftovers() {
    remove_shard_folder(path_);
    if (names_in(path_).empty()) return;
    close(fd_);
    user_error("%s: is in the way and holds something that is no shard; move it away", path_.c_str());
  }
};

// Says whether the shards are there already. Throws UserError if something else has the name: nothing but shards is
// ever replaced.
bool already_there(const std::string& out) {
  bool shards = false;
  for (const std::string& name : names_in(out)) {
    if (!is_shard_name(name)) user_error("%s: is there already and holds %s, which is no shard; choose another --out",
                                         out.c_str(), name.c_str());
    shards = true;
  }
  return shards;
}

// -------------------------------------------------------------------------------------------------------------------
// The split, and the program.

struct Split {
  int64_t train_tokens = 0, val_tokens = 0;
  int train_shards = 0, val_shards = 0;
};

// Writes every document, behind an end of text, to train or val. With 200 documents or more every k-th goes to val; a
// smaller corpus is cut in two, its last bytes val, where the rest of a cut document begins with an end of text of
// its own.
Split write_shards(const std::vector<std::string>& files, const Options& options, const Corpus& corpus,
                   const std::string& folder) {
  const bool by_document = corpus.documents >= 200;
  const int64_t every = options.val_fraction > 0 ? std::lround(1 / options.val_fraction) : 20;
  const double byte_fraction = options.val_fraction > 0 ? options.val_fraction : 0.1;
  const int64_t train_bytes = int64_t(double(corpus.bytes) * (1 - byte_fraction));
  ShardWriter train(folder, "train", options.shard_tokens), val(folder, "val", options.shard_tokens);
  Corpus done;
  for (const std::string& file : files)
    for_each_piece(file, options.separator == "nul", [&](std::string_view piece, bool begins) {
      done.documents += begins;
      done.bytes += int64_t(piece.size());
      if (by_document) {
        ShardWriter& writer = done.documents % every == 0 ? val : train;
        if (begins) writer.add_end_of_text();
        writer.add_text(piece);
        return;
      }
      int64_t n = int64_t(piece.size());
      std::string_view head = piece.substr(0, size_t(std::clamp<int64_t>(train_bytes - (done.bytes - n), 0, n)));
      std::string_view tail = piece.substr(head.size());
      if (begins && !head.empty()) train.add_end_of_text();
      train.add_text(head);
      bool val_begins = val.total() == 0 || (begins && head.empty());
      if (!tail.empty() && val_begins) val.add_end_of_text();
      val.add_text(tail);
    });
  if (done.documents != corpus.documents || done.bytes != corpus.bytes)
    user_error("the input changed while it was read; run again when it is at rest");
  if (train.total() == 0 || val.total() == 0)
    user_error("%lld bytes are too few to split into train and val; name more text, or another --val-fraction",
               (long long)corpus.bytes);
  train.finish();
  val.finish();
  return {train.total(), val.total(), train.num_shards(), val.num_shards()};
}

void tokenize(const Options& options) {
  const std::string out = without_trailing_slashes(options.out);
  if (already_there(out) && !options.force) {
    printf("%s is there already; --force makes it again\n", out.c_str());
    return;
  }
  auto start = std::chrono::steady_clock::now();
  std::vector<std::string> files = list_files(options.paths);
  Corpus corpus = count_corpus(files, options.separator == "nul");
  if (corpus.bytes == 0)
    user_error("%s%s: no text in it: %zu files, 0 bytes", options.paths[0].c_str(),
               options.paths.size() > 1 ? " and the others" : "", files.size());
  OutputFolder folder(out);
  Split split = write_shards(files, options, corpus, folder.path());
  folder.publish();
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  printf("%s: documents: %lld, bytes of text: %lld, files read: %zu, vocabulary: %d (byte-level)\n", out.c_str(),
         (long long)corpus.documents, (long long)corpus.bytes, files.size(), byte_vocab_size);
  printf("train: %lld tokens (shards: %d), val: %lld tokens (shards: %d), %.2f s, %.0f MB/s\n",
         (long long)split.train_tokens, split.train_shards, (long long)split.val_tokens, split.val_shards, seconds,
         double(corpus.bytes) / 1e6 / seconds);
}

void define_options(CLI::App& app, Options& options) {
  app.add_option("--tokenizer", options.tokenizer,
                 "bytes: a token is a byte, and 256 is the end of a text; vocabulary 257")
      ->check(CLI::IsMember({"bytes"}))->capture_default_str();
  app.add_option("--out", options.out,
                 "folder to write; appears as a whole when everything is done. If it is there already, nothing "
                 "happens")
      ->required()->type_name("DIR");
  app.add_option("--separator", options.separator,
                 "what parts the documents within a file; none: a file is one document; nul: a NUL byte. Empty "
                 "documents are left out")
      ->check(CLI::IsMember({"none", "nul"}))->capture_default_str();
  app.add_option("--val-fraction", options.val_fraction,
                 "share of the corpus that becomes validation data. With at least 200 documents every k-th goes "
                 "there, k = 1/fraction, rounded; with fewer, the last bytes of the whole. Default: every 20th "
                 "document, or the last 0.1 of the bytes")
      ->check(CLI::Range(1e-6, 0.5))->type_name("0..0.5");
  app.add_option("--shard-tokens", options.shard_tokens, "tokens that a shard holds at most, at 2 bytes each")
      ->check(CLI::Range(int64_t(1), int64_t(INT32_MAX)))->capture_default_str()->type_name("N");
  app.add_flag("--force", options.force, "replace DIR if it is there; refused if it holds anything but shards");
  app.add_option("PATH", options.paths,
                 "text files, and folders: all regular files in them, however deep, sorted by path. Links to files "
                 "are followed, to folders not. Any bytes are text")
      ->required();
}

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Turns text into token shards: DIR/train_000.bin, ... and DIR/val_000.bin, in llm.c's format. An end "
               "of text stands before each document.\nExample: data/tokenize --out data/mine notes.txt books/");
  define_options(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help
    fprintf(stderr, "error: %s; data/tokenize --help lists the options\n", e.what());
    return 1;
  }
  signal(SIGXFSZ, SIG_IGN);  // a file-size limit is then an error of write(), with a message and a clean end
  for (int stop : {SIGINT, SIGTERM, SIGHUP}) signal(stop, [](int) { interrupted = 1; });
  try {
    tokenize(options);
  } catch (const UserError& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
  return 0;
}

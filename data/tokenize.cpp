// data/tokenize: text -> DIR/train_000000.bin, ... and DIR/val_000000.bin, ..., token shards in llm.c's format, with
// their vocabulary in DIR/tokenizer.json, and DIR/MANIFEST.json.
//
// Each thread reads the next batch of the corpus, encodes it, and passes it to the shard writers, where batches wait
// for those before them: the output is the same with any number of threads.
#include <unistd.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include "batch_encoder.h"
#include "corpus.h"
#include "llmc/base/clock.h"
#include "llmc/base/command_line.h"
#include "llmc/base/crc32c.h"
#include "llmc/base/files.h"
#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/message.h"
#include "llmc/base/program.h"
#include "llmc/base/text.h"
#include "llmc/base/utf8.h"
#include "llmc/text/dataloader.h"
#include "llmc/text/tokenizer.h"
#include "packing.h"
#include "shards.h"
#include "vocabulary.h"

using json = nlohmann::ordered_json;

constexpr int64_t few_documents = 200;            // with fewer documents, the split is by bytes
constexpr size_t words_of_a_thread = 1 << 16;     // counted before they are added to those of all threads
constexpr size_t max_bytes_in_flight = 64 << 20;  // of text that is read and not yet written; most batches have 1 MiB

// -------------------------------------------------------------------------------------------------------------------
// The run

// How far a pass over the text is, on stderr: every second on a terminal, every minute elsewhere.
struct Progress {
  double start = seconds_now(), shown_at = start;

  void show(const std::vector<SourceFile>& sources, int64_t bytes_read, int64_t bytes_of_text,
            const std::string& and_what) {
    const bool terminal = isatty(STDERR_FILENO);
    const double now = seconds_now();
    if (now - shown_at < (terminal ? 1 : 60)) return;
    shown_at = now;
    int64_t all = 0;
    for (const SourceFile& source : sources) all += source.bytes;
    const double seconds = now - start, read = double(bytes_read);
    const double to_read = double(std::max<int64_t>(0, all - bytes_read));
    const std::string left = read > 0 && all > 0 ? format(", %.0f s left", seconds * to_read / read) : "";
    fprintf(stderr, "%s%.0f of %.0f MB read, %.1f MB/s of text, %s%s%s", terminal ? "\r" : "", double(bytes_read) / 1e6,
            double(all) / 1e6, double(bytes_of_text) / 1e6 / seconds, and_what.c_str(), left.c_str(),
            terminal ? "   " : "\n");
  }
};

struct Run {
  const TokenizeOptions& options;
  const Tokenizer& tokenizer;
  std::vector<SourceFile> sources;
  CorpusSplit split;
  OutputFolder folder;
  std::optional<ShardWriter> train, val;
  Counts counts;  // of the text in the shards
  PackingCounts packing;
  Position position;  // after it
  std::string tokenizer_json;
  Progress progress;

  Run(const TokenizeOptions& o, const Tokenizer& t)
      : options(o), tokenizer(t), sources(list_sources(o.corpus.paths, o.out)), folder(o.out) {
    train.emplace(folder.path(), "train", options.shard_tokens);
    val.emplace(folder.path(), "val", options.shard_tokens);
  }

  int64_t documents() const { return position.document - counts.empty; }
  void choose_split();
  void write_manifest();
  void write(const EncodedBatch& batch);
  void encode_all();
  void pack_all();
  void print_summary() const;
};

// With fewer than few_documents documents, the last bytes are validation data, which requires counting all bytes first;
// that ends when enough documents are counted.
void Run::choose_split() {
  if (options.val_fraction && *options.val_fraction == 0) return;
  const double documents = options.val_fraction.value_or(0.05), bytes = options.val_fraction.value_or(0.1);
  split.every = std::lround(1 / documents);
  if (options.read_stdin() || !options.corpus.fields.empty())
    return;  // cannot be read twice; the text's size is unknown before parsing
  std::vector<SourceFile> counted = sources;
  const Tokenizer bytes_tokenizer = Tokenizer::bytes();
  CorpusReader reader(counted, options.corpus, {}, bytes_tokenizer);
  Batch batch;
  int64_t total_bytes = 0;
  while (reader.next(batch)) {
    total_bytes = batch.end.bytes;
    if (batch.end.document >= few_documents) return;
  }
  split.train_bytes = int64_t(double(total_bytes) * (1 - bytes));
}

// What DIR's tokens depend on beside the text and the vocabulary. An option that is not given is null.
static json options_of(const TokenizeOptions& o) {
  json options = {{"separator", o.separator},
                  {"field", name_as_text(o.field)},
                  {"pairs", o.pairs},
                  {"end_of_text", o.end_of_text},
                  {"val_fraction", nullptr},
                  {"shard_tokens", o.shard_tokens},
                  {"pack", nullptr},
                  {"any_bytes", o.corpus.any_bytes},
                  {"train_vocabulary", nullptr}};
  if (o.val_fraction) options["val_fraction"] = *o.val_fraction;
  if (o.row_tokens > 0) options["pack"] = o.row_tokens;
  if (o.train_vocabulary > 0) options["train_vocabulary"] = o.train_vocabulary;
  return options;
}

// The options in a record, with the defaults of those that the version of this program that wrote it did not have.
static json recorded_options(const json& record) {
  json options = options_of({});
  options.update(record.value("options", json::object()));
  return options;
}

// "pack was 64, and now is not given".
static std::string changed_option(const json& before, const json& now) {
  auto shown = [](const json& value) { return value.is_null() ? "not given" : value.dump(); };
  for (const auto& [name, value] : before.items())
    if (const json is = now.value(name, json()); value != is)
      return name + " was " + shown(value) + ", and now is " + shown(is);
  return "";
}

// Whether a file holds the vocabulary of this checksum.
static bool is_vocabulary(const std::string& path, const json& crc32c) {
  try {
    return crc32c == crc32c_hex(Tokenizer::load(path).checksum());
  } catch (const UserError&) { return false; }
}

// How the tokens in DIR differ from what these options would make of the text as it is now; "" if they do not. Without
// a tokenizer their vocabulary is the one to be learned from the text, if the options and the text are the same.
static std::string what_differs(const TokenizeOptions& options, const std::optional<Tokenizer>& tokenizer) {
  if (options.update && options.read_stdin()) return "standard input cannot be read twice";
  const std::string of_manifest = options.out + "/MANIFEST.json";
  const std::optional<std::string> text = try_read_file(of_manifest);
  if (!text) return of_manifest + " is missing";
  try {
    const json manifest = parse_json(*text);
    const json vocabulary = manifest.at("tokenizer").at("crc32c");
    if (tokenizer && vocabulary != crc32c_hex(tokenizer->checksum())) return "their vocabulary is another";
    if (!is_vocabulary(options.out + "/tokenizer.json", vocabulary))
      return options.out + "/tokenizer.json is missing or damaged";
    if (const std::string changed = changed_option(recorded_options(manifest), options_of(options)); !changed.empty())
      return "their " + changed;
    const std::vector<SourceFile> sources = list_sources(options.corpus.paths, options.out);
    if (sources.size() != manifest.at("sources").size())
      return format("they are of %zu files, and there are %zu", manifest["sources"].size(), sources.size());
    for (size_t i = 0; i < sources.size(); i++)
      if (!is_as_stated(sources[i].path, manifest["sources"][i].at("bytes"), manifest["sources"][i].at("crc32c")))
        return sources[i].path + " is another text than theirs";
    const std::string damaged = damaged_shard(options.out, manifest.at("shards"));
    return damaged.empty() ? "" : damaged + " is missing or damaged";
  } catch (const json::exception&) { return of_manifest + " is damaged"; }
}

void Run::write_manifest() {
  json files = json::array();
  for (const SourceFile& source : sources)
    files.push_back(
        {{"path", name_as_text(source.path)}, {"bytes", source.bytes}, {"crc32c", crc32c_hex(source.checksum)}});
  json manifest = {{"tokenizer",
                    {{"vocabulary", options.train_vocabulary > 0 ? "learned" : name_as_text(options.tokenizer)},
                     {"vocab_size", tokenizer.vocab_size()},
                     {"end_of_text", tokenizer.end_of_text()},
                     {"crc32c", crc32c_hex(tokenizer.checksum())}}},
                   {"options", options_of(options)},
                   {"documents", documents()},
                   {"bytes_of_text", counts.bytes},
                   {"invalid_utf8_replaced", counts.replaced},
                   {"runs_cut", counts.runs_cut},
                   {"train_tokens", train->total()},
                   {"val_tokens", val->total()},
                   {"sources", files},
                   {"shards", shards_of({&*train, &*val})}};
  if (options.row_tokens > 0)
    manifest["packing"] = {{"texts", packing.texts}, {"cut", packing.cut}, {"padding", packing.padding}};
  write_file_in_unfinished_folder(folder.path() + "/MANIFEST.json", manifest.dump(1) + "\n");
}

constexpr int64_t most_warnings = 10;  // of files, for the same reason; the summary counts all

static const char* text_of(Note note) {
  if (note == Note::left_out)
    return "is left out: it is no text, with many control characters; --any-bytes takes it, too";
  if (note == Note::json_lines)
    return "holds JSON lines, and is taken as text, braces and all; --field NAME takes the text in a field of each "
           "line";
  return "is not UTF-8; if it is Latin-1, iconv -f WINDOWS-1252 -t UTF-8 converts it";
}

void Run::write(const EncodedBatch& batch) {
  batch.train.write_to(*train);
  batch.val.write_to(*val);
  counts.empty += batch.counts.empty;
  counts.bytes += batch.counts.bytes;
  counts.replaced += batch.counts.replaced;
  counts.runs_cut += batch.counts.runs_cut;
  for (const auto& [note, file] : batch.notes)
    if (++counts.files[size_t(note)] <= most_warnings && note != Note::empty)
      print_warning(printable(file, /*one_line=*/true) + ": " + text_of(note));
  position = batch.end;
  const int64_t tokens = train->total() + val->total();
  const double seconds = seconds_now() - progress.start;
  progress.show(sources, batch.read, counts.bytes,
                format("%.2f M tokens/s, %lld tokens", double(tokens) / 1e6 / seconds, (long long)tokens));
}

// State that the threads of a pass over the text share: the corpus, which one thread at a time reads, and what
// becomes of encoded batches, in the corpus's order. With `words`, the words of the text are counted instead.
struct Pipeline {
  const TokenizeOptions& options;
  const Tokenizer& tokenizer;
  const std::function<void(const EncodedBatch&)> write;
  WordCounts* words;
  CorpusReader reader;
  std::mutex reading, state;
  std::condition_variable room;             // in_flight has decreased, or there was an error
  std::map<int64_t, EncodedBatch> waiting;  // by number, for the batches before them
  int64_t next_read = 0, next_written = 0;
  size_t in_flight = 0;
  bool at_end = false;
  Position end;
  std::exception_ptr error;

  Pipeline(const TokenizeOptions& o, const Tokenizer& t, std::vector<SourceFile>& sources, const CorpusSplit& split,
           std::function<void(const EncodedBatch&)> write_batch, WordCounts* w)
      : options(o), tokenizer(t), write(std::move(write_batch)), words(w), reader(sources, o.corpus, split, t) {}

  // Reads the next batch; number: its number; read: bytes of the sources read so far. False at the end, or after an
  // error of any thread.
  bool take(Batch& batch, int64_t& number, int64_t& read) {
    std::lock_guard<std::mutex> turn(reading);
    std::unique_lock<std::mutex> lock(state);
    room.wait(lock, [&] { return error || at_end || in_flight < max_bytes_in_flight; });
    if (error || at_end) return false;
    at_end = true;  // for the other threads, should next() throw: after an error the reader must not be used again
    lock.unlock();
    const bool any = reader.next(batch);
    lock.lock();
    at_end = !any;
    end = batch.end;
    number = next_read++;
    in_flight += batch.memory();
    read = reader.bytes_read();
    return any;
  }
  // Writes the batch and those that waited for it, or keeps it until the batches before it are written.
  void put(int64_t number, EncodedBatch&& encoded) {
    std::lock_guard<std::mutex> lock(state);
    waiting.emplace(number, std::move(encoded));
    for (auto first = waiting.begin(); first != waiting.end() && first->first == next_written;
         first = waiting.erase(first)) {
      if (error) return;
      write(first->second);
      in_flight -= first->second.memory;
      next_written++;
    }
    room.notify_all();
  }
  void add_words(WordCounts& counted) {
    if (!words) return;
    std::lock_guard<std::mutex> lock(state);
    words->add(counted);
    counted = {};
  }
  // The body of every thread, which does something else first. An exception in one of them ends all.
  void work(const std::function<void()>& first = [] {}) {
    try {
      first();
      WordCounts counted;
      BatchEncoder encoder(options, tokenizer, words ? &counted : nullptr);
      Batch batch;
      for (int64_t number, read; take(batch, number, read);) {
        EncodedBatch encoded = encoder.encode(batch);
        encoded.read = read;
        put(number, std::move(encoded));
        if (counted.size() > words_of_a_thread) add_words(counted);
      }
      add_words(counted);
    } catch (...) {
      std::lock_guard<std::mutex> lock(state);
      if (!error) error = std::current_exception();
      room.notify_all();
    }
  }
  void run(const std::function<void()>& one_does_first = [] {}) {
    std::vector<std::thread> threads;
    try {
      for (int i = 1; i < options.threads; i++) threads.emplace_back([&] { work(); });
    } catch (const std::system_error&) {}  // the system allows no more; those that there are do all
    work(one_does_first);
    for (std::thread& thread : threads) thread.join();
    if (error) std::rethrow_exception(error);
  }
};

// Meanwhile tokenizer.json is made.
void Run::encode_all() {
  Pipeline pipeline(
      options, tokenizer, sources, split, [&](const EncodedBatch& batch) { write(batch); }, nullptr);
  pipeline.run([&] { tokenizer_json = tokenizer.to_json(); });
  position = pipeline.end;
}

// A vocabulary of options.train_vocabulary tokens, or fewer, that is learned from the whole corpus.
static Tokenizer learn_vocabulary(const TokenizeOptions& options) {
  const Tokenizer bytes = Tokenizer::of_merges({});
  std::vector<SourceFile> sources = list_sources(options.corpus.paths, options.out);
  Progress progress;
  WordCounts words;
  int64_t bytes_of_text = 0;
  auto show = [&](const EncodedBatch& batch) {
    bytes_of_text += batch.counts.bytes;
    progress.show(sources, batch.read, bytes_of_text, "counting words");
  };
  Pipeline(options, bytes, sources, {}, show, &words).run();
  const size_t different = words.size();
  Tokenizer learned =
      Tokenizer::of_merges(learn_merges(std::move(words), size_t(options.train_vocabulary - bytes.vocab_size())));
  if (different > 0)
    printf("learned %d tokens from %zu different words, %.2f s\n", learned.vocab_size(), different,
           seconds_now() - progress.start);
  return learned;
}

// Reads the shards, which are complete, and writes them again in rows; then deletes them.
void Run::pack_all() {
  if (options.row_tokens == 0) return;
  const PackerSettings settings = {options.row_tokens, options.shard_tokens, uint16_t(tokenizer.end_of_text()),
                                   options.end_of_text == "before"};
  for (std::optional<ShardWriter>* writer : {&train, &val}) {
    const std::vector<Shard> loose = (*writer)->shards();
    if (loose.empty()) continue;
    writer->emplace(folder.path(), writer == &train ? "train_packed" : "val_packed",
                    settings.rows_in_shard() * options.row_tokens + 1);
    Packer packer(settings, **writer, packing);
    for (const Shard& shard : loose) {
      const TokenFile file(folder.path() + "/" + shard.name, tokenizer.vocab_size());
      for (int64_t at = 0; at < file.num_tokens; at += settings.packed_at_a_time) {
        const int64_t count = std::min(settings.packed_at_a_time, file.num_tokens - at);
        packer.add(file.read(at, count), file.mask.scored(at, count));
      }
    }
    packer.finish();
    for (const Shard& shard : loose) {
      unlink((folder.path() + "/" + shard.name).c_str());
      unlink(mask_path_of(folder.path() + "/" + shard.name).c_str());
    }
  }
}

void Run::print_summary() const {
  const double seconds = seconds_now() - progress.start;
  if (isatty(STDERR_FILENO)) fprintf(stderr, "\n");
  auto shown = [](const std::string& name) { return printable(name, /*one_line=*/true); };
  printf("%s: documents: %lld, bytes of text: %lld, files read: %lld, vocabulary: %d (%s)\n",
         shown(options.out).c_str(), (long long)documents(), (long long)counts.bytes, (long long)position.files,
         tokenizer.vocab_size(),
         options.train_vocabulary > 0 ? "learned from it"
         : tokenizer.is_bytes()       ? "byte-level"
                                      : shown(options.tokenizer).c_str());
  if (tokenizer.vocab_size() < options.train_vocabulary)
    print_warning(format("the vocabulary has %d tokens, not %d: no two tokens stand side by side twice any more; more "
                         "text gives more",
                         tokenizer.vocab_size(), options.train_vocabulary));
  auto files_with = [&](Note note) { return (long long)counts.files[size_t(note)]; };
  if (files_with(Note::left_out) + files_with(Note::empty) > 0)
    printf("left out: %lld files that are no text, %lld that are empty\n", files_with(Note::left_out),
           files_with(Note::empty));
  if (files_with(Note::not_utf8) > 0) printf("files that are not UTF-8: %lld\n", files_with(Note::not_utf8));
  if (counts.replaced > 0) printf("not UTF-8: %lld sequences, now U+FFFD\n", (long long)counts.replaced);
  if (counts.runs_cut > 0)
    printf("cut: %lld runs of more than %zu MB without a break\n", (long long)counts.runs_cut, longest_run >> 20);
  printf("train: %lld tokens (shards: %zu), val: %lld tokens (shards: %zu), %.2f s, %.0f MB/s\n",
         (long long)train->total(), train->shards().size(), (long long)val->total(), val->shards().size(), seconds,
         double(counts.bytes) / 1e6 / seconds);
  if (options.row_tokens > 0)
    printf("packed into rows of %lld tokens: texts: %lld, cut: %lld, padding: %lld tokens, %.2f %%\n",
           (long long)options.row_tokens, (long long)packing.texts, (long long)packing.cut, (long long)packing.padding,
           100 * double(packing.padding) / double(packing.padding + packing.tokens));
}

// Writes the corpus into options.out. Throws UserError.
void tokenize(const TokenizeOptions& options) {
  std::optional<Tokenizer> tokenizer;
  if (options.train_vocabulary == 0) tokenizer = Tokenizer::load(options.tokenizer);
  if (shards_exist(options.out) && !options.force) {
    const std::string difference = what_differs(options, tokenizer);
    if (difference.empty()) {
      printf("%s exists already; --force makes it again\n", options.out.c_str());
      return;
    }
    if (!options.update)
      user_error("%s: holds other tokens: %s; --update replaces them, or choose another --out", options.out,
                 difference);
    printf("%s is made again: %s\n", options.out.c_str(), difference.c_str());
  }
  const auto or_nothing_is_written = [](const std::function<void()>& pass) {
    try {
      pass();
    } catch (const UserError& e) { user_error("%s; nothing was written", e.what()); }
  };
  if (!tokenizer) or_nothing_is_written([&] { tokenizer = learn_vocabulary(options); });
  Run run(options, *tokenizer);
  or_nothing_is_written([&] { run.choose_split(), run.encode_all(); });
  if (run.counts.bytes == 0)
    user_error("%s%s: no text in it: %lld files, 0 bytes; left out: %lld files", options.corpus.paths[0],
               options.corpus.paths.size() > 1 ? " and the others" : "", (long long)run.position.files,
               (long long)run.counts.files[size_t(Note::left_out)]);
  if (run.train->total() == 0 || (run.val->total() == 0 && (run.split.every > 0 || run.split.train_bytes >= 0)))
    user_error("%lld %s are too few to split into train and val; name more text, or another --val-fraction (0: all is "
               "to train on)",
               (long long)(run.split.train_bytes < 0 ? run.documents() : run.counts.bytes),
               run.split.train_bytes < 0 ? "documents" : "bytes");
  run.train->finish();
  run.val->finish();
  run.pack_all();
  run.write_manifest();
  write_file_in_unfinished_folder(run.folder.path() + "/tokenizer.json", run.tokenizer_json);
  run.folder.publish();
  run.print_summary();
}

// Throws UserError.
static void check_options(const TokenizeOptions& o) {
  if (o.row_tokens > 0 && o.shard_tokens <= o.row_tokens)
    user_error("--shard-tokens %lld: a shard of --pack %lld has a row and a token more; take at least %lld",
               (long long)o.shard_tokens, (long long)o.row_tokens, (long long)o.row_tokens + 1);
  if (o.val_fraction && *o.val_fraction > 0 && *o.val_fraction < 1e-6)
    user_error("--val-fraction %g: must be 0, or at least 1e-6", *o.val_fraction);
  if (o.out.empty()) user_error("--out: is empty; name a folder");
  if (o.train_vocabulary > 0 && o.read_stdin())
    user_error("-: standard input cannot be read twice, as --train-vocabulary does; write it to a file first");
}

void define_options(CLI::App& app, TokenizeOptions& options) {
  CLI::Option* tokenizer = app.add_option("--tokenizer", options.tokenizer,
                                          "bytes: a token is a byte, and 256 is the end of a text; vocabulary 257. "
                                          "Otherwise GPT-2's "
                                          "vocabulary: tiktoken's ranks (r50k_base.tiktoken), vocab.bpe or "
                                          "encoder.json with the other "
                                          "beside it, tokenizer.json, or a folder with these")
                               ->capture_default_str()
                               ->type_name("bytes|PATH");
  app.add_option("--train-vocabulary", options.train_vocabulary,
                 "learn a vocabulary of so many tokens from all of the text, validation data included: the end of "
                 "text, the 256 bytes and merges, which are those of Hugging Face's BpeTrainer with min_frequency=2. "
                 "It takes up to 25 bytes of memory for each byte of different words, of which there may be 128 MB")
      ->check(CLI::Range(257, max_vocab_size))
      ->excludes(tokenizer);
  app.add_option("--out", options.out,
                 "folder to write; it is created when everything is done. If it exists already, with "
                 "these tokens, nothing happens; with others it is an error")
      ->required()
      ->type_name("DIR");
  app.add_option("--separator", options.separator,
                 "what separates the documents within a file; none: a file is one document; nul: a NUL byte. Empty "
                 "documents are left out")
      ->check(CLI::IsMember({"none", "nul"}))
      ->capture_default_str();
  CLI::Option* field = app.add_option("--field", options.field,
                                      "files hold JSON lines: one object per line, with a document in this field")
                           ->type_name("NAME");
  CLI::Option* end_of_text = app.add_option("--end-of-text", options.end_of_text,
                                            "where the end-of-text token is: before each document, as in llm.c, or "
                                            "after it, as in nanoGPT")
                                 ->check(CLI::IsMember({"before", "after"}))
                                 ->capture_default_str();
  app.add_flag("--any-bytes", options.corpus.any_bytes,
               "take files as they are, also those that are no text; otherwise such a file is left out, or an error if "
               "it "
               "is named itself");
  app.add_flag("--pairs", options.pairs,
               "files hold JSON lines of a prompt and its answer: {\"prompt\": \"...\", \"answer\": \"...\"}. Each "
               "becomes the prompt's tokens, the answer's and an end of text; only the last two are scored, which "
               "train_*.mask and val_*.mask say")
      ->excludes(field)
      ->excludes(end_of_text);
  app.add_option("--val-fraction", options.val_fraction,
                 "share of the corpus that becomes validation data; 0: none. With at least 200 documents, with JSON "
                 "lines and from standard input, one of k documents goes there, k = 1/fraction, rounded, the same ones "
                 "each time; with fewer, the last bytes of the whole. Default: one of 20 documents, or the last 0.1 of "
                 "the bytes")
      ->check(CLI::Range(0.0, 0.5));
  app.add_option("--pack", options.row_tokens,
                 "pack whole texts into rows of so many tokens, the -t of training, so that only longer texts are cut; "
                 "what is left of a row is padding, which the masks beside the shards leave out of the loss")
      ->check(CLI::Range(2, 1 << 20));
  app.add_option("--shard-tokens", options.shard_tokens, "tokens that a shard holds at most, at 2 bytes each")
      ->check(CLI::Range(int64_t(1), int64_t(INT32_MAX)))
      ->capture_default_str();
  app.add_option("--threads", options.threads, "threads; the output is the same with any number")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_flag("--force", options.force, "replace DIR if it exists; an error if it holds anything but shards");
  app.add_flag("--update", options.update,
               "replace DIR if it holds the tokens of other text or options, by the sizes and checksums in its "
               "MANIFEST.json");
  app.add_option("PATH", options.corpus.paths,
                 "text files, folders (all regular files in them, however deep, sorted by path; links to files are "
                 "followed, to folders not), or -, standard input. What is compressed (gzip, bzip2, xz, zstd) or a tar "
                 "file is read as what is in it, also inside a tar file. Zip archives, UTF-16 and the like are "
                 "errors; invalid UTF-8 becomes U+FFFD, except with --tokenizer bytes. Folders "
                 "named .git, .hg and .svn in folders are left out")
      ->required();
}

static int run_tokenize(int argc, char** argv) {
  TokenizeOptions options;
  CLI::App app("Turns text into token shards: DIR/train_000000.bin, ... and DIR/val_000000.bin, in llm.c's format, "
               "with MANIFEST.json\n"
               "and tokenizer.json.\n"
               "Example: data/tokenize --out data/mine notes.txt books/");
  define_options(app, options);
  if (!parse_command_line(app, argc, argv)) return 0;
  options.corpus.nul_separated = options.separator == "nul";
  if (!options.field.empty()) options.corpus.fields = {options.field};
  if (options.pairs) options.corpus.fields = {"prompt", "answer"}, options.end_of_text = "after";
  check_options(options);
  options.out = without_end_slashes(options.out);
  interrupt_by_signals();
  tokenize(options);
  return 0;
}

int main(int argc, char** argv) {
  return run_program([&] { return run_tokenize(argc, argv); });
}

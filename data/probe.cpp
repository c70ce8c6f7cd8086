// data/probe: examples of a synthetic task -> DIR/train_000000.bin and DIR/val_000000.bin, token shards in llm.c's
// format, with the masks of what is scored beside them and the task's settings in DIR/MANIFEST.json.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include "llmc/base/command_line.h"
#include "llmc/base/crc32c.h"
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/base/json.h"
#include "llmc/base/program.h"
#include "llmc/base/text.h"
#include "probe_tasks.h"
#include "shards.h"

using json = nlohmann::ordered_json;

struct Options {
  ProbeSettings settings;
  int64_t examples = 100 * 1000, val_examples = 1000;
  std::string out;
  bool force = false;
};

// A number that some tasks have and others have not.
struct Parameter {
  const char* name;
  int ProbeSettings::*value;
  int least, most;
  const char* help;
};

static const Parameter parameters[] = {
    {"pairs", &ProbeSettings::pairs, 1, 10000, "key-value pairs of an example; edges of hops"},
    {"distance", &ProbeSettings::distance, 0, 100000,
     "tokens that lie at least from where the answer is to be found to the question"},
    {"noise", &ProbeSettings::noise, 0, 100000, "tokens among the pairs that mean nothing"},
    {"width", &ProbeSettings::width, 1, 16, "tokens of a key, and of a value"},
    {"length", &ProbeSettings::length, 2, 10000, "tokens to copy, to continue or to compress"},
    {"facts", &ProbeSettings::facts, 1, 60000, "keys of the dictionary"},
    {"hops", &ProbeSettings::hops, 1, 10000, "most edges to follow; each question says how many of them"},
    {"symbols", &ProbeSettings::symbols, 2, 30000, "tokens of an alphabet: of keys, of values, of noise"},
};

// Whether a task has a parameter.
static bool has(const ProbeTask& task, const Parameter& p) {
  return std::count(task.parameters.begin(), task.parameters.end(), p.name) > 0;
}

static json settings_of(const Options& options) {
  const ProbeSettings& s = options.settings;
  const ProbeTask& task = find_probe_task(s.task);
  json settings = {{"task", s.task}, {"asks", task.asks}, {"harder", task.harder}};
  for (const Parameter& p : parameters)
    if (has(task, p)) settings["parameters"][p.name] = s.*p.value;
  settings["seed"] = s.seed;
  settings["seq_len"] = s.seq_len;
  settings["vocab_size"] = probe_vocabulary(s).size;
  settings["chance"] = probe_chance(s);
  settings["chance_in_context"] = probe_chance_in_context(s);
  settings["train_examples"] = options.examples;
  settings["val_examples"] = options.val_examples;
  return settings;
}

// Writes `count` examples, and one token more: the trainer's last sequence needs a token after its last input. Returns
// the number of scored tokens.
static int64_t write_examples(ShardWriter& writer, const ProbeGenerator& generator, ProbeSplit split, int64_t count) {
  int64_t scored = 0;
  for (int64_t i = 0; i < count; i++) {
    const ProbeExample e = generator.make(split, uint64_t(i));
    writer.add(e.tokens.data(), int64_t(e.tokens.size()), e.scored.data());
    for (uint8_t is_scored : e.scored) scored += is_scored;
  }
  const uint8_t not_scored = 0;
  writer.add(&probe_blank, 1, &not_scored);
  writer.finish();
  return scored;
}

// Throws UserError if the examples in the folder are not of these settings.
static void check_same_settings(const Options& options, const json& settings) {
  const std::optional<std::string> text = try_read_file(options.out + "/MANIFEST.json");
  const json manifest = text ? parse_json(*text) : json();
  for (const auto& [name, value] : settings.items())
    if (!manifest.is_object() || !manifest.contains(name) || manifest[name] != value)
      user_error("%s: holds other examples: their %s is %s, not %s; --force replaces them, or name another folder",
                 options.out.c_str(), name.c_str(),
                 manifest.is_object() && manifest.contains(name) ? manifest[name].dump().c_str() : "unknown",
                 value.dump().c_str());
  std::string damaged;
  try {
    damaged = damaged_shard(options.out, manifest.at("shards"));
  } catch (const json::exception&) { damaged = options.out + "/MANIFEST.json"; }
  if (!damaged.empty()) user_error("%s: is missing or damaged; --force makes the examples again", damaged);
}

static void make_probe(const Options& options) {
  const ProbeGenerator generator(options.settings);
  for (int64_t examples : {options.examples, options.val_examples})
    if (examples > (INT32_MAX - 1) / options.settings.seq_len)
      user_error("%lld examples of %d tokens are more than the %d tokens of a shard; ask for fewer",
                 (long long)examples, options.settings.seq_len, INT32_MAX);
  json manifest = settings_of(options);
  if (shards_exist(options.out) && !options.force) {
    check_same_settings(options, manifest);
    printf("%s exists already; --force makes it again\n", options.out.c_str());
    return;
  }
  OutputFolder folder(options.out);
  ShardWriter train(folder.path(), "train", INT32_MAX), val(folder.path(), "val", INT32_MAX);
  manifest["train_scored"] = write_examples(train, generator, ProbeSplit::train, options.examples);
  manifest["val_scored"] = write_examples(val, generator, ProbeSplit::val, options.val_examples);
  manifest["shards"] = shards_of({&train, &val});
  write_file_in_unfinished_folder(folder.path() + "/MANIFEST.json", manifest.dump(1) + "\n");
  folder.publish();
  printf("%s\n", manifest.dump(1).c_str());
}

static void define_options(CLI::App& app, Options& options) {
  ProbeSettings& s = options.settings;
  app.add_option("TASK", s.task, "what the examples ask for; see below")->required();
  app.add_option("-o,--out", options.out, "folder to write; it is created when everything is done")
      ->required()
      ->type_name("DIR");
  app.add_option("-t,--seq-len", s.seq_len, "tokens of an example: the trainer's -t")
      ->check(CLI::Range(2, 65536))
      ->capture_default_str();
  for (const Parameter& p : parameters)
    app.add_option("--" + std::string(p.name), s.*p.value, p.help)
        ->check(CLI::Range(p.least, p.most))
        ->capture_default_str();
  app.add_option("--seed", s.seed, "another seed gives other examples")->capture_default_str();
  for (auto [name, value, help] : {std::tuple("--examples", &options.examples, "examples to train on"),
                                   std::tuple("--val-examples", &options.val_examples, "examples to validate on")})
    app.add_option(name, *value, help)->check(CLI::Range(1, INT32_MAX))->capture_default_str();
  app.add_flag("--force", options.force, "replace DIR if it exists; an error if it holds anything but shards");
  std::string tasks = "Tasks, with their parameters; the first named makes a task harder:\n";
  for (const ProbeTask& task : probe_tasks())
    tasks += format("  %-13s--%s (of --%s)\n    %s\n", task.name, task.harder, joined(task.parameters, ", --").c_str(),
                    task.asks);
  app.footer(tasks);
}

// Throws UserError if a parameter was given that the task does not have.
static void check_parameters(const CLI::App& app, const ProbeTask& task) {
  for (const Parameter& p : parameters)
    if (!has(task, p) && app.count("--" + std::string(p.name)) > 0)
      user_error("--%s: %s has no such parameter; it has --%s", p.name, task.name, joined(task.parameters, ", --"));
}

static int run_probe(int argc, char** argv) {
  Options options;
  CLI::App app("Makes examples of a synthetic task: token shards DIR/train_000000.bin and DIR/val_000000.bin, with "
               "masks (.mask) of\n"
               "the answers, which alone are scored, and MANIFEST.json.\n"
               "Example: data/probe recall -o data/recall --pairs 16");
  define_options(app, options);
  if (!parse_command_line(app, argc, argv)) return 0;
  check_parameters(app, find_probe_task(options.settings.task));
  if (options.out.empty()) user_error("--out: is empty; name a folder");
  options.out = without_end_slashes(options.out);
  interrupt_by_signals();
  make_probe(options);
  return 0;
}

int main(int argc, char** argv) {
  return run_program([&] { return run_probe(argc, argv); });
}

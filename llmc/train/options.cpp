#include "options.h"
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include "llmc/formats/checkpoint.h"
#include "llmc/wiring/wiring.h"
#include "llmc/ops/dropout.h"
#include "config_toml.h"
#include "llmc/base/command_line.h"
#include "llmc/base/error.h"
#include "llmc/base/text.h"
#include "option.h"
#include "schedule.h"

// ----------------------------------------------------------------------------
// The options, by groups of --help

static void add_data_options(OptionTable& t, TrainOptions& o) {
  t.group = "Data";
  t.add("-i,--train-data", o.train_data,
        "training tokens: a file or a quoted glob of them, llm.c shards or headerless uint16; not needed with -x 0")
      .logged("train_data");
  t.add("-j,--val-data", o.val_data, "validation tokens, likewise; none: no validation").logged("val_data");
  t.add("--shuffle", o.shuffle,
        "read the sequences of T tokens in a random order, another each epoch; otherwise one after the other")
      .logged("shuffle", OnResume::refused)
      .called("order of the data");
  t.add("--tokenizer", o.tokenizer,
        "what tokens stand for, for samples and in checkpoints: bytes, or GPT-2's vocabulary in any format that "
        "data/tokenize takes; none: samples are numbers; default: what the model's folder has with it, or the data's");
}

static void add_model_options(OptionTable& t, TrainOptions& o) {
  t.group = "Model";
  t.add("-e,--model", o.model.model,
        "a preset (d12, d24, d36, d48: GPT-2 124M, 350M, 774M, 1558M; gpt3:CHANNELS), or a folder with config.json and "
        "model.safetensors to start from, or a run's, for its newest checkpoint")
      .logged("model");
  for (const ShapeOption& shape : shape_options) t.add(shape.flag, o.model.*shape.value, shape.help, at_least(1));
  t.add("--wiring", o.model.wiring,
        "who attends to what: terms such as 'sla(9,9)' or 'gqa(4) window(512,SSSL)' (--help wiring has them all), or "
        "plain; default: sla(n,k) with 3/4 of the layers and of the heads, or the model's; a model that was trained "
        "with another one continues with this, and what changes is printed");
  t.add("--no-bias", o.model.no_bias, "no biases in linear and LayerNorm layers");
  t.add("--keep-dead-kv", o.keep_dead_kv,
        "project K/V that no head reads, as the paper's code does: the same losses, slower; for comparison")
      .logged("keep_dead_kv");
}

static void add_batch_options(OptionTable& t, TrainOptions& o) {
  t.group = "Batch";
  t.add("-b,--micro-batch", o.micro_batch, "sequences in a micro-batch, B", at_least(1)).logged("micro_batch");
  t.add("-t,--seq-len", o.seq_len, "sequence length T, in tokens; default: 1024 or the model's positions if fewer",
        at_least(1))
      .logged("seq_len", OnResume::refused)
      .called("sequence length");
  t.add("-d,--total-batch", o.total_batch,
        "tokens in an update, a multiple of B * T: the rest is gradient accumulation; default: B * T", between(1, 1e15))
      .logged("total_batch", OnResume::warned_of)
      .called("number of tokens in an update, B * T if it is not given");
  t.add("-r,--recompute", o.recompute,
        "what the backward pass computes again instead of keeping it: 0 nothing, 1 MLPs' activations, 2 and norms, 3 "
        "everything in a block but its K/V, 4 and the MLP's hidden units in chunks: less memory, slower; with the term "
        "reversible at least 3",
        between(0, 4))
      .logged("recompute");
  t.add("--tf32", o.tf32, "fp32 matmuls on a GPU may round their operands to TF32: faster, less exact").logged("tf32");
}

static void add_optimizer_options(OptionTable& t, TrainOptions& o) {
  t.group = "Optimization";
  t.add("-x,--steps", o.steps, "updates; 0: only validate and sample; default: one epoch", at_least(0)).logged("steps");
  t.add("-k,--schedule", o.schedule, "learning rate schedule: " + either(Schedule::kinds()), one_of(Schedule::kinds()))
      .logged("schedule", OnResume::warned_of);
  t.add("-l,--learning-rate", o.learning_rate, "peak learning rate", between(0, 1e3))
      .logged("learning_rate", OnResume::warned_of)
      .called("peak learning rate");
  t.add("-u,--warmup", o.warmup_steps, "steps of linear warm-up", at_least(0))
      .logged("warmup_steps", OnResume::warned_of);
  t.add("-q,--final-fraction", o.final_fraction, "the schedule ends at this fraction of the peak", between(0, 1))
      .logged("final_fraction", OnResume::warned_of);
  t.add("-c,--weight-decay", o.weight_decay, "decoupled weight decay of the matrices", between(0, 1e3))
      .logged("weight_decay", OnResume::warned_of);
  t.add("--grad-clip", o.grad_clip, "clip the gradient's global norm to this; 0: don't", between(0, 1e30))
      .logged("grad_clip", OnResume::warned_of);
  t.add("--dropout", o.dropout,
        "share of elements that training drops, anew in each update: of the embeddings, attention's probabilities and "
        "the outputs of attention and MLPs",
        between_excluding_end(0, 1, dropout_steps))
      .logged("dropout", OnResume::warned_of);
  t.add("--max-bad-steps", o.max_bad_steps,
        "a step whose loss or norm is not finite is skipped; stop after so many in a row", at_least(1));
  t.add("--optimizer", o.optimizer,
        "adamw, or muon: Muon for the matrices of the layers, whose step costs more and gains more; AdamW for the rest",
        one_of({"adamw", "muon"}))
      .logged("optimizer", OnResume::refused);
  t.add("--momentum", o.momentum, "Muon's momentum", between_excluding_end(0, 1))
      .logged("momentum", OnResume::warned_of);
  t.add("--beta1", o.beta1, "AdamW's decay of the first moment", between_excluding_end(0, 1))
      .logged("beta1", OnResume::warned_of);
  t.add("--beta2", o.beta2, "AdamW's decay of the second moment", between_excluding_end(0, 1))
      .logged("beta2", OnResume::warned_of);
  t.add("--eps", o.eps, "AdamW's epsilon", above(0)).logged("eps", OnResume::warned_of);
  t.add("--seed", o.seed, "seed of initial weights, shuffling and samples", at_least(0))
      .logged("seed", OnResume::refused);
}

static void add_rank_options(OptionTable& t, TrainOptions& o) {
  t.group = "Ranks (scripts/launch.sh N, mpirun -np N, srun, torchrun)";
  t.add("--zero", o.zero,
        "of several ranks: 1: each keeps the optimizer state of its shard of every layer (ZeRO-1); 0: of all "
        "parameters",
        between(0, 1))
      .logged("zero");
  t.add("--hang-timeout", o.hang_timeout,
        "end the run, with the ranks that are behind, if the ranks have waited for each other for so many seconds, "
        "without the time in which one reads or writes files; 0: never",
        zero_or_at_least(2, "seconds"));
  t.add("--rendezvous", o.rendezvous,
        "a folder that all ranks see, in which they meet without MPI; default: the temporary folder on one machine, "
        "that of -o on several")
      .not_in_config();
}

static void add_validation_and_sample_options(OptionTable& t, TrainOptions& o) {
  t.add("-v,--val-every", o.val_every,
        "validate before the first step, every so many steps, and after the last; 0: never", at_least(0))
      .logged("val_every");
  t.add("-m,--val-batches", o.val_batches,
        "micro-batches in a validation, at even distances in the data, or with memory the first; 0: all of it, "
        "incomplete ones too",
        at_least(0))
      .logged("val_batches");
  t.add("-s,--sample-every", o.sample_every, "print a sample every so many steps, and after the last; 0: never",
        at_least(0));
  t.add("-g,--sample-length", o.sample_length, "tokens in a sample, at most the context length", at_least(1));
  t.add("--temperature", o.temperature,
        "divide a sample's logits by this; below 1 is more cautious; 0: always the likeliest token", at_least(0));
  t.add("--prompt", o.prompt, "text that samples begin with; <|endoftext|> in it is that token")
      .needing("-s", "is the beginning of samples; say how often to print one, with -s");
}

static void add_checkpoint_options(OptionTable& t, TrainOptions& o) {
  const char* needs_data = "resumes training; name its data with -i";
  t.add("-n,--checkpoint-every", o.checkpoint_every,
        "write a checkpoint every so many steps; with -o, one is always written after the last", at_least(0))
      .needing("-o", "checkpoints need a folder; name it with -o");
  t.add("--resume-from", o.resume_from,
        "resume from this checkpoint in -o instead of the newest; later ones are renamed to set_aside_...")
      .not_in_config()
      .needing("-i", needs_data)
      .needing("-o", "names a checkpoint in a folder; name that too, with -o");
  t.add("-y,--resume", o.resume, "resume from the newest checkpoint in -o, or start if it has none (-y 0: don't)")
      .with_value("[0|1]")
      .not_in_config()
      .needing("-i", needs_data)
      .needing("-o", "resumes from the checkpoints in a folder; name it with -o");
  t.add("--same-options", o.same_options,
        "resume only a run that was made with these options, this data and this model; otherwise name what differs")
      .not_in_config()
      .needing("-y", "is for a run that is resumed (-y)");
  t.add("--reset-memory", o.reset_memory,
        "resume with an empty memory of earlier segments, as is necessary with another number of ranks * B")
      .not_in_config()
      .needing("-y", "is for a run that is resumed (-y)");
  t.add("--keep", o.keep, "keep so many of the newest checkpoints and remove older ones; 0: keep all", at_least(0))
      .needing("-o", "checkpoints need a folder; name it with -o");
  t.add("--keep-every", o.keep_every, "with --keep, keep those of every so many steps too; 0: don't", at_least(0))
      .needing("--keep", "says which of those that --keep removes are kept; give --keep too");
}

static void add_output_options(OptionTable& t, TrainOptions& o) {
  t.group = "Output";
  t.add("-o,--out", o.out, "folder for log.jsonl, config.toml and checkpoints; none: nothing is written");
  add_validation_and_sample_options(t, o);
  add_checkpoint_options(t, o);
  t.add("--dry-run", o.dry_run,
        "print the model, its wiring and the memory plan, and end: nothing is trained or written")
      .not_in_config();
  t.add("--json", o.json, "print these as a JSON object in place of text")
      .not_in_config()
      .needing("--dry-run", "is the form of what --dry-run prints; give that too");
  t.add("--log-level", o.log_level,
        "debug: log.jsonl tells when the parts of each step ran on the device, too; slower, since no step is replayed "
        "as a CUDA graph then",
        one_of({"info", "debug"}));
  t.add("--stop-on-save-error", o.stop_on_save_error,
        "stop if a checkpoint cannot be written; otherwise say so and train on");
}

OptionTable train_options(TrainOptions& o) {
  OptionTable t;
  t.add("--config", o.config,
        "read options from a TOML file, such as the config.toml a run wrote; those given here win")
      .not_in_config();
  add_data_options(t, o);
  add_model_options(t, o);
  add_batch_options(t, o);
  add_optimizer_options(t, o);
  add_rank_options(t, o);
  add_output_options(t, o);
  return t;
}

// ----------------------------------------------------------------------------
// Reading them

// The values that were given, as text, in the order of the table.
using GivenValues = std::vector<std::optional<std::string>>;

// Declares the options to CLI11, which then sets `given`.
static void declare(CLI::App& app, const OptionTable& t, GivenValues& given) {
  // An option given twice counts as it was given last, so that a command can be repeated with changes at its end.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  given.resize(t.options.size());
  for (size_t i = 0; i < t.options.size(); i++) {
    const Option& option = t.options[i];
    const auto take = [&text = given[i]](const CLI::results_t& results) { return text = results.at(0), true; };
    CLI::Option* declared = app.add_option(option.flags, take, option.help)->group(option.group);
    const std::string initial = option.initial ? text_of(*option.initial) : "";
    if (option.is_flag()) declared->expected(0);
    else declared->type_name("value")->option_text(option.type + (initial.empty() ? "" : "=" + initial));
    if (option.value_follows != nullptr) declared->expected(0, 1)->default_str("1")->option_text(option.value_follows);
  }
}

// `where`: what the message begins with.
static void set_option(const Option& option, const std::string& text, const std::string& where) {
  try {
    option.set(text);
  } catch (const UserError& e) { user_error("%s %s", where, e.what()); }
}

// Throws UserError for a name in a config file that is no option of it.
[[noreturn]] static void refuse_entry(const OptionTable& t, const ConfigEntry& entry, const std::string& where) {
  std::vector<std::string> names;
  for (const Option& option : t)
    if (option.in_config) names.push_back(option.name());
  const std::string nearest = nearest_name(entry.name, names);
  user_error("%s: no such option%s; --help lists them", where, nearest.empty() ? "" : (": is it " + nearest + "?"));
}

static void read_config(const OptionTable& t, const std::string& path) {
  for (const ConfigEntry& entry : read_config_toml(path)) {
    const std::string where = format("%s:%d: %s", path.c_str(), entry.line, entry.name.c_str());
    const auto option =
        std::find_if(t.begin(), t.end(), [&](const Option& o) { return o.in_config && o.name() == entry.name; });
    if (option == t.end()) refuse_entry(t, entry, where);
    set_option(*option, entry.value, where);
  }
}

// Checks each option by itself, and options that depend on each other.
static void check_options(const OptionTable& t) {
  for (const Option& option : t) {
    const std::optional<Scalar> value = option.value();
    if (value && option.range && !option.range->holds(*value))
      user_error("%s %s: it must %s", option.flag(), text_of(*value), option.range->must);
  }
  for (const Option& option : t)
    for (const Option::Need& need : option.needs)
      if (option.is_set() && !t[need.flag].is_set()) user_error("%s: %s", option.flag(), need.message);
}

// What --config reads as the same options. Flags and texts that are not given have no line.
static std::string to_toml(const OptionTable& t) {
  std::string text;
  for (const Option& option : t) {
    const std::optional<Scalar> value = option.value();
    const bool has_line = value && *value != Scalar(false) && *value != Scalar(std::string());
    if (option.in_config && has_line) text += config_toml_line(option.name(), *value);
  }
  return text;
}

// Whether the command line says `--help wiring`.
static bool asks_for_terms(int argc, char** argv) {
  for (int i = 1; i + 1 < argc; i++)
    if ((strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) && strcmp(argv[i + 1], "wiring") == 0)
      return true;
  return false;
}

bool parse_options(int argc, char** argv, TrainOptions& o) {
  if (asks_for_terms(argc, argv)) return printf("%s", wiring_help().c_str()), false;
  CLI::App app("Trains GPT-2 with any wiring of attention; by default with skip-layer attention: in layers l >= n_l "
               "the last n_h heads attend to the keys and values that layer l - n_l projected.");
  app.get_formatter()->column_width(34);
  const OptionTable t = train_options(o);
  GivenValues given;
  declare(app, t, given);
  if (!parse_command_line(app, argc, argv)) return false;
  auto take_given = [&] {
    for (size_t i = 0; i < given.size(); i++)
      if (given[i]) set_option(t.options[i], *given[i], t.options[i].flag());
  };
  take_given();
  if (!o.config.empty()) {
    read_config(t, o.config);
    take_given();
  }
  if (o.train_data.empty() && o.steps != 0 && !o.dry_run)
    user_error("no training data; name it with -i (data/README.md says how to make some), or train no step (-x 0)");
  o.resume = o.resume || !o.resume_from.empty();
  check_options(t);
  if (ModelConfig preset; !config_from_preset(o.model.model, preset)) o.model.model = model_folder(o.model.model);
  o.as_toml = to_toml(t);
  return true;
}

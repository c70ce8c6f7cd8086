#include "options.h"
#include <CLI/CLI.hpp>         // CLI::App
#include <algorithm>           // std::find
#include <cerrno>              // errno
#include <cmath>               // std::isfinite
#include <cstdlib>             // strtoll
#include "config_toml.h"       // read_config_toml, config_toml_line
#include "llmc/utils/error.h"  // user_error
#include "llmc/utils/text.h"   // nearest_name
#include "schedule.h"          // Schedule::known

static void declare_options(CLI::App& app, TrainOptions& o, std::string& resume) {
  // An option given twice counts as it was given last, so that a command can be repeated with changes at its end.
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--config", o.config,
                 "read options from a TOML file, such as the config.toml a run wrote; those given here win")
      ->configurable(false);

  const char* data = "Data";
  app.add_option("-i,--train-data", o.train_data,
                 "training tokens: a file or a quoted glob of them, llm.c shards or headerless uint16; not needed with "
                 "-x 0")
      ->group(data);
  app.add_option("-j,--val-data", o.val_data, "validation tokens, likewise; none: no validation")->group(data);
  app.add_flag("--shuffle", o.shuffle,
               "read the sequences of T tokens in a random order, another each epoch; "
               "otherwise one after the other")
      ->group(data);
  app.add_option("--tokenizer", o.tokenizer,
                 "what tokens stand for, for samples and in checkpoints: bytes, or GPT-2's vocabulary in any format "
                 "that data/tokenize takes; "
                 "none: samples are numbers; default: what the model's folder has with it, or the data's")
      ->group(data);

  const char* model = "Model";
  app.add_option("-e,--model", o.model.model,
                 "a preset (d12, d24, d36, d48: GPT-2 124M, 350M, 774M, 1558M; gpt3:CHANNELS), or a folder with "
                 "config.json and "
                 "model.safetensors to start from")
      ->group(model);
  ModelConfig fields;
  visit_fields(fields, [&](const ConfigField& field, auto&) {
    if (field.option != nullptr)
      app.add_option(field.option, o.model.overrides[field.option], field.help)->group(model);
  });
  app.add_option("--wiring", o.model.wiring,
                 "who attends to what: terms such as 'sla(9,9)' or 'gqa(4) window(512,SSSL)' (README.md has them all), "
                 "or plain; default: "
                 "sla(n,k) with 3/4 of the layers and of the heads, or the model's; a model that was trained with "
                 "another one continues with this, "
                 "and what changes is printed")
      ->group(model);
  app.add_option("--skip-layers", o.model.skip_layers,
                 "with --skip-heads k, a short way to write --wiring 'sla(n,k)': n")
      ->group(model);
  app.add_option("--skip-heads", o.model.skip_heads,
                 "how many heads of a layer, the last ones, attend to the K/V of the layer n below; "
                 "0: plain GPT-2")
      ->group(model);
  app.add_flag("--no-bias", o.model.no_bias, "no biases in linear and LayerNorm layers")->group(model);
  app.add_flag("--keep-dead-kv", o.keep_dead_kv,
               "project K/V that no head reads, as the paper's code does: the same losses, slower; for comparison")
      ->group(model);

  const char* batch = "Batch";
  app.add_option("-b,--micro-batch", o.micro_batch, "sequences in a micro-batch, B")->group(batch);
  app.add_option("-t,--seq-len", o.seq_len,
                 "sequence length T, in tokens; default: 1024 or the model's positions if fewer")
      ->group(batch);
  app.add_option("-d,--total-batch", o.total_batch,
                 "tokens in an update, a multiple of B * T: the rest is gradient accumulation; default: B * T")
      ->group(batch);

  app.add_option("-r,--recompute", o.recompute,
                 "what the backward pass computes again instead of keeping it: 0 nothing, 1 GELU, 2 and LayerNorm, 3 "
                 "everything in a "
                 "block but its K/V: less memory, slower")
      ->group(batch);
  app.add_flag("--tf32", o.tf32, "fp32 matmuls on a GPU may round their operands to TF32: faster, less exact")
      ->group(batch);

  const char* optimizer = "Optimization";
  app.add_option("-x,--steps", o.steps, "updates; 0: only validate and sample; default: one epoch")->group(optimizer);
  app.add_option("-k,--schedule", o.schedule, "learning rate schedule: cosine, linear, constant, wsd")
      ->group(optimizer);
  app.add_option("-l,--learning-rate", o.learning_rate, "peak learning rate")->group(optimizer);
  app.add_option("-u,--warmup", o.warmup_steps, "steps of linear warm-up")->group(optimizer);
  app.add_option("-q,--final-fraction", o.final_fraction, "the schedule ends at this fraction of the peak")
      ->group(optimizer);
  app.add_option("-c,--weight-decay", o.weight_decay, "decoupled weight decay of the matrices")->group(optimizer);
  app.add_option("--grad-clip", o.grad_clip, "clip the gradient's global norm to this; 0: don't")->group(optimizer);
  app.add_option("--max-bad-steps", o.max_bad_steps,
                 "a step whose loss or norm is not finite is skipped; stop after so many in a row")
      ->group(optimizer);
  app.add_option("--optimizer", o.optimizer,
                 "adamw, or muon: Muon for the matrices of the layers, whose step costs more and gains more; AdamW for "
                 "the rest")
      ->group(optimizer);
  app.add_option("--momentum", o.momentum, "Muon's momentum")->group(optimizer);
  app.add_option("--beta1", o.beta1, "AdamW's decay of the first moment")->group(optimizer);
  app.add_option("--beta2", o.beta2, "AdamW's decay of the second moment")->group(optimizer);
  app.add_option("--eps", o.eps, "AdamW's epsilon")->group(optimizer);
  app.add_option("--seed", o.seed, "seed of initial weights, shuffling and samples")->group(optimizer);

  const char* ranks = "Ranks (mpirun -np N, or --rendezvous)";
  app.add_option("--zero", o.zero,
                 "of several ranks: 1: each keeps the optimizer state of its shard of every layer (ZeRO-1); 0: of all "
                 "parameters")
      ->group(ranks);
  app.add_option("--hang-timeout", o.hang_timeout,
                 "end the run, naming the rank, if one does not answer or keeps the others waiting for "
                 "so many seconds; 0: never")
      ->group(ranks);
  app.add_option("--rendezvous", o.ranks.rendezvous,
                 "how ranks find each other without MPI: file:PATH that all can read and rank 0 can write, or "
                 "tcp:HOST:PORT of rank 0")
      ->configurable(false)
      ->group(ranks);
  app.add_option("--rank", o.ranks.rank, "with --rendezvous: this process's rank, from 0; default: SLURM_PROCID")
      ->configurable(false)
      ->group(ranks);
  app.add_option("--ranks", o.ranks.ranks, "with --rendezvous: how many there are; default: SLURM_NTASKS")
      ->configurable(false)
      ->group(ranks);
  app.add_option("--local-rank", o.ranks.local_rank,
                 "with --rendezvous: which GPU of this machine to use; default: SLURM_LOCALID, or 0")
      ->configurable(false)
      ->group(ranks);

  const char* output = "Output";
  app.add_option("-o,--out", o.out, "folder for log.jsonl, config.toml and checkpoints; none: nothing is written")
      ->group(output);
  app.add_option("-v,--val-every", o.val_every,
                 "validate before the first step, every so many steps, and after the last; 0: never")
      ->group(output);
  app.add_option("-m,--val-batches", o.val_batches,
                 "micro-batches in a validation, at even distances in the data; 0: all of it, incomplete ones too")
      ->group(output);
  app.add_option("-s,--sample-every", o.sample_every,
                 "print a sample every so many steps, and after the last; 0: never")
      ->group(output);
  app.add_option("-g,--sample-length", o.sample_length, "tokens in a sample, at most the context length")
      ->group(output);
  app.add_option("--temperature", o.temperature,
                 "divide a sample's logits by this; below 1 is more cautious; 0: always the likeliest token")
      ->group(output);
  app.add_option("--prompt", o.prompt, "text that samples begin with; <|endoftext|> in it is that token")
      ->group(output);
  app.add_option("-n,--checkpoint-every", o.checkpoint_every,
                 "write a checkpoint every so many steps; with -o, one is always written after the last")
      ->group(output);
  app.add_option("-y,--resume", resume,
                 "resume from the newest checkpoint in -o, or start if it has none (-y 0: don't)")
      ->expected(0, 1)
      ->default_str("1")
      ->option_text("[0|1]")
      ->configurable(false)
      ->group(output);
  app.add_option("--resume-from", o.resume_from,
                 "resume from this checkpoint in -o instead of the newest; later ones are renamed to set_aside_...")
      ->configurable(false)
      ->group(output);
  app.add_option("--keep", o.keep, "keep so many of the newest checkpoints and remove older ones; 0: keep all")
      ->group(output);
  app.add_option("--keep-every", o.keep_every, "with --keep, keep those of every so many steps too; 0: don't")
      ->group(output);
  app.add_flag("--dry-run", o.dry_run,
               "print the model, its wiring and the memory plan, and end: nothing is trained or written")
      ->configurable(false)
      ->group(output);
  app.add_option("--log-level", o.log_level,
                 "debug: log.jsonl tells when the parts of each step ran on the device, too; slower, since "
                 "no step is replayed as a CUDA graph then")
      ->group(output);
  app.add_flag("--tensorboard", o.tensorboard,
               "write losses, norms, rates and speeds as TensorBoard's event files into -o, too")
      ->group(output);
  app.add_flag("--stop-on-save-error", o.stop_on_save_error,
               "stop if a checkpoint cannot be written; otherwise say so and train on")
      ->group(output);
}

static void check_options(const TrainOptions& o) {
  if (o.train_data.empty() && o.steps != 0 && !o.dry_run)
    user_error("no training data; name it with -i (data/README.md says how to make some), or train no step (-x 0)");
  auto at_least = [](const char* option, int64_t value, int64_t least) {
    if (value < least) user_error("%s %lld: it must be at least %lld", option, (long long)value, (long long)least);
  };
  auto between = [](const char* option, double value, double low, double high) {
    if (!(value >= low && value <= high)) user_error("%s %g: it must lie between %g and %g", option, value, low, high);
  };
  at_least("-b", o.micro_batch, 1);
  if (o.seq_len) at_least("-t", *o.seq_len, 1);
  if (o.total_batch) at_least("-d", *o.total_batch, 1);
  between("-r", o.recompute, 0, 3);
  between("--zero", o.zero, 0, 1);
  if (o.hang_timeout != 0 && !(o.hang_timeout >= 2 && std::isfinite(o.hang_timeout)))
    user_error("--hang-timeout %g: it must be 0, or at least 2 seconds", o.hang_timeout);
  if (o.steps) at_least("-x", *o.steps, 0);
  at_least("-u", o.warmup_steps, 0);
  at_least("-v", o.val_every, 0);
  at_least("-m", o.val_batches, 0);
  at_least("-s", o.sample_every, 0);
  at_least("-g", o.sample_length, 1);
  at_least("-n", o.checkpoint_every, 0);
  if (!(o.temperature >= 0 && std::isfinite(o.temperature)))
    user_error("--temperature %g: it must be at least 0", o.temperature);
  if (!o.prompt.empty() && o.sample_every == 0)
    user_error("--prompt: is the beginning of samples; say how often to print one, with -s");
  at_least("--seed", o.seed, 0);
  at_least("--max-bad-steps", o.max_bad_steps, 1);
  at_least("--keep", o.keep, 0);
  at_least("--keep-every", o.keep_every, 0);
  if (o.log_level != "info" && o.log_level != "debug")
    user_error("--log-level %s: it must be info or debug", o.log_level.c_str());
  if (!Schedule::known(o.schedule)) user_error("-k %s: it must be cosine, linear, constant or wsd", o.schedule.c_str());
  between("-l", o.learning_rate, 0, 1e3);
  between("-q", o.final_fraction, 0, 1);
  between("-c", o.weight_decay, 0, 1e3);
  between("--grad-clip", o.grad_clip, 0, 1e30);
  for (double beta : {o.beta1, o.beta2})
    if (!(beta >= 0 && beta < 1)) user_error("--beta1 %g --beta2 %g: both must lie in [0, 1)", o.beta1, o.beta2);
  if (o.optimizer != "adamw" && o.optimizer != "muon")
    user_error("--optimizer %s: it must be adamw or muon", o.optimizer.c_str());
  if (!(o.momentum >= 0 && o.momentum < 1)) user_error("--momentum %g: it must lie in [0, 1)", o.momentum);
  if (!(o.eps > 0 && std::isfinite(o.eps))) user_error("--eps %g: it must be greater than 0", o.eps);
  if (o.out.empty() && !o.resume_from.empty())
    user_error("--resume-from: names a checkpoint in a folder; name that too, with -o");
  if (o.resume && o.train_data.empty()) user_error("-y: resumes training; name its data with -i");
  if (o.out.empty() && o.resume) user_error("-y: resumes from the checkpoints in a folder; name it with -o");
  if (o.out.empty() && o.keep > 0) user_error("--keep: checkpoints need a folder; name it with -o");
  if (o.keep == 0 && o.keep_every > 0)
    user_error("--keep-every: says which of those that --keep removes are kept; give --keep too");
  if (o.out.empty() && o.tensorboard) user_error("--tensorboard: event files need a folder; name it with -o");
  if (o.out.empty() && o.checkpoint_every > 0) user_error("-n: checkpoints need a folder; name it with -o");
}

// The options that a config file may have, by name.
static std::vector<std::string> config_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    if (option->get_configurable() && !option->get_lnames().empty() && option->get_lnames()[0] != "help")
      names.push_back(option->get_lnames()[0]);
  return names;
}

// All options as --config reads them, defaults included.
static std::string to_toml(const CLI::App& app) {
  std::string text;
  for (const std::string& name : config_names(app)) {
    const CLI::Option* option = app.get_option("--" + name);
    const std::string value = option->count() > 0 ? option->reduced_results().at(0) : option->get_default_str();
    const bool is_text = option->get_type_name() == "TEXT";
    if (!value.empty()) text += config_toml_line(name, value, is_text);
  }
  return text;
}

// A config file's entries as arguments: `--name=value`. Throws UserError for a name that is no option.
static std::vector<std::string> config_arguments(const CLI::App& app, const std::string& path) {
  std::vector<std::string> arguments;
  const std::vector<std::string> names = config_names(app);
  for (const ConfigEntry& entry : read_config_toml(path)) {
    if (std::find(names.begin(), names.end(), entry.name) == names.end()) {
      const std::string nearest = nearest_name(entry.name, names);
      user_error("%s:%d: %s: no such option%s; --help lists them", path.c_str(), entry.line, entry.name.c_str(),
                 nearest.empty() ? "" : (": is it " + nearest + "?").c_str());
    }
    arguments.push_back("--" + entry.name + "=" + entry.value);
  }
  return arguments;
}

// CLI11 takes a whole number that no int64 holds for the largest one that does.
static void check_whole_numbers(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    if (option->count() == 0 || option->get_type_name() != "INT") continue;
    const std::string value = option->reduced_results().at(0);
    errno = 0;
    strtoll(value.c_str(), nullptr, 0);
    if (errno == ERANGE) user_error("--%s %s: is out of range", option->get_lnames()[0].c_str(), value.c_str());
  }
}

// Parses `arguments` into `options`, or with a config file those of the file before them. Returns false if --help was
// printed.
static bool parse(const std::vector<std::string>& arguments, TrainOptions& options, bool with_config) {
  CLI::App app("Trains GPT-2 with any wiring of attention; by default with skip-layer attention: in layers l >= n_l "
               "the last n_h heads "
               "attend to the keys and values that layer l - n_l projected.");
  app.get_formatter()->column_width(34);
  std::string resume = "1";  // what a bare -y says
  declare_options(app, options, resume);
  try {
    std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());  // as CLI11 takes them
    app.parse(reversed);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() != 0) user_error("%s; --help lists the options", e.what());
    app.exit(e);
    return false;
  }
  check_whole_numbers(app);
  if (with_config && !options.config.empty()) {
    std::vector<std::string> all = config_arguments(app, options.config);
    all.insert(all.end(), arguments.begin(), arguments.end());
    options = TrainOptions();
    return parse(all, options, /*with_config=*/false);
  }
  if (app.count("--resume") > 0) {
    if (resume != "0" && resume != "1") user_error("-y %s: it must be 0 or 1, or nothing, which is 1", resume.c_str());
    options.resume = resume == "1";
  }
  if (!options.resume_from.empty()) options.resume = true;
  options.as_toml = to_toml(app);
  return true;
}

bool parse_options(int argc, char** argv, TrainOptions& options) {
  if (!parse({argv + 1, argv + argc}, options, /*with_config=*/true)) return false;
  check_options(options);
  return true;
}

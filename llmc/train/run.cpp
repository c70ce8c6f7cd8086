#include "run.h"
#include <unistd.h>
#include <algorithm>
#include <climits>
#include <cmath>
#include <fstream>
#include <set>
#include <thread>
#include "llmc/text/text_stream.h"
#include "llmc/base/files.h"
#include "llmc/base/clock.h"
#include "llmc/base/crc32c.h"
#include "llmc/base/error.h"
#include "llmc/base/host_name.h"
#include "llmc/base/json.h"
#include "llmc/base/message.h"
#include "llmc/base/utf8.h"
#include "evaluation.h"
#include "option.h"
#include "print.h"
#include "settings.h"
#include "stop_signal.h"

// ----------------------------------------------------------------------------
// Before anything is written

void plan_batches(Run& run, int context_length, bool from_folder, bool has_memory) {
  TrainOptions& o = run.options;
  run.B = o.micro_batch, run.has_memory = has_memory;
  run.T = o.seq_len.value_or(has_memory ? context_length : std::min(1024, context_length));
  if (has_memory && run.T != context_length)
    user_error("-t %d: a model with memory is trained in segments of its context length, %d; leave -t out%s", run.T,
               context_length, from_folder ? "" : ", or give that as --max-seq-len");
  if (run.T > context_length)
    user_error("-t %d, but the model's context length is %d; take a shorter sequence%s", run.T, context_length,
               from_folder ? "" : ", or a longer context (--max-seq-len)");
  const int64_t micro_tokens = int64_t(run.B) * run.T * run.ranks.size,
                total_batch = o.total_batch.value_or(micro_tokens);
  if (total_batch % micro_tokens != 0)
    user_error("-d %lld is not a multiple of B * T%s = %d * %d%s = %lld tokens; take one that is",
               (long long)total_batch, run.ranks.size > 1 ? " * ranks" : "", run.B, run.T,
               run.ranks.size > 1 ? format(" * %d", run.ranks.size) : "", (long long)micro_tokens);
  if (o.sample_every > 0 && o.sample_length > INT_MAX)
    user_error("-g %lld: is more than %d tokens", (long long)o.sample_length, INT_MAX);
  if (o.sample_every > 0 && o.sample_length > context_length && !has_memory)
    user_error("-g %lld: a sample can be at most as long as the context, %d tokens", (long long)o.sample_length,
               context_length);
  run.grad_accum_steps = total_batch / micro_tokens;
  o.seq_len = run.T, o.total_batch = total_batch;
}

// The tokenizer that --tokenizer names, or the model's folder has (a checkpoint to resume from, if there is one), or
// the data's.
static std::optional<Tokenizer> choose_tokenizer(const Run& run, const std::string& model_folder, int vocab_size) {
  const TrainOptions& o = run.options;
  std::vector<std::string> folders = {model_folder};
  for (const DataLoader* data : {run.train.get(), run.val.get()})
    if (data != nullptr) folders.push_back(parent_folder(data->shards.files[0].path));
  return Tokenizer::of_model(o.tokenizer, folders, vocab_size);
}

// The tokens that samples begin with: an end of text, which without a tokenizer is the last token, as in GPT-2's
// vocabulary, and --prompt.
static std::vector<int> prompt_tokens(const Run& run, int vocab_size) {
  const TrainOptions& o = run.options;
  if (!run.tokenizer && !o.prompt.empty())
    user_error("--prompt: neither model nor data have a vocabulary with them; name it with --tokenizer");
  if (!run.tokenizer) return {vocab_size - 1};
  std::vector<int> tokens = encode_prompt(*run.tokenizer, o.prompt);
  if (!o.prompt.empty() && int64_t(tokens.size()) >= o.sample_length)
    user_error("--prompt: makes %zu tokens with the end of text before it, and a sample has %lld; take a longer one "
               "(-g)",
               tokens.size(), (long long)o.sample_length);
  return tokens;
}

void open_data(Run& run, const std::string& model_folder, int vocab_size) {
  TrainOptions& o = run.options;
  int64_t steps_in_epoch = 0;
  if (!o.train_data.empty()) {
    run.train = std::make_unique<DataLoader>(o.train_data, vocab_size, run.T, o.shuffle, uint64_t(o.seed));
    if (run.has_memory) run.train->cut_into_streams(int64_t(run.B) * run.ranks.size);
    steps_in_epoch = std::max<int64_t>(1, run.train->num_sequences / (run.B * run.num_micro_batches()));
  }
  if (!o.val_data.empty()) {
    run.val = std::make_unique<DataLoader>(o.val_data, vocab_size, run.T);
    if (run.val->num_sequences < run.B && (o.val_batches > 0 || run.has_memory))
      user_error("-j %s: has %lld sequences of T = %d tokens, a micro-batch needs %d; take a smaller -b or more text",
                 o.val_data, (long long)run.val->num_sequences, run.T, run.B);
    if (run.has_memory) run.val->cut_into_streams(int64_t(run.B) * run.ranks.size);
  }
  run.tokenizer = choose_tokenizer(run, model_folder, vocab_size);
  if (run.tokenizer && !o.out.empty() && run.ranks.rank == 0) run.tokenizer_json = run.tokenizer->to_json();
  run.prompt = prompt_tokens(run, vocab_size);
  o.steps = run.steps = o.steps.value_or(steps_in_epoch);
  run.schedule = {o.schedule, o.learning_rate, o.final_fraction, o.warmup_steps, run.steps};
}

int64_t segments_of_stream(const Run& run) {
  if (run.train->streams == 0) return 1;
  const int64_t in_epoch = run.train->num_sequences / run.train->streams;
  const int64_t updates = std::min(run.steps, in_epoch / run.grad_accum_steps + 1);  // -x may have any number
  return std::max<int64_t>(1, std::min(in_epoch, updates * run.grad_accum_steps));
}

// What is wrong with a checkpoint; "" if every byte is what was written.
static std::string damage(const std::string& checkpoint) {
  try {
    verify_checkpoint(checkpoint);
    return "";
  } catch (const UserError& e) { return e.what(); }
}

std::string checkpoint_to_resume(Run& run) {
  const TrainOptions& o = run.options;
  if (o.out.empty()) return "";
  if (path_exists(o.out + "/lock") && !o.dry_run) run.lock.take(o.out);
  else if (path_exists(o.out) && !is_folder(o.out)) user_error("-o %s: is no folder", o.out);
  const std::string newest = newest_checkpoint(o.out);
  if (!o.resume && !newest.empty())
    user_error("-o %s: holds the checkpoints of an earlier run; resume it (-y), or name another folder", o.out);
  const std::string checkpoint = o.resume_from.empty() ? newest : o.resume_from;
  if (checkpoint.empty()) return "";
  const int64_t step = checkpoint_step(o.out, checkpoint);
  const std::string what = damage(checkpoint);
  if (what.empty()) return checkpoint;
  std::string older = newest_checkpoint(o.out, step);
  while (!older.empty() && !damage(older).empty()) older = newest_checkpoint(o.out, checkpoint_step(o.out, older));
  if (older.empty()) user_error("%s; there is no older checkpoint in %s to resume from", what, o.out);
  user_error("%s; an older checkpoint is whole: resume from it with --resume-from %s", what, older);
}

// ----------------------------------------------------------------------------
// Output

// The checksum of data; "" where there are none.
static std::string checksum_of(const std::unique_ptr<DataLoader>& data) {
  return data ? crc32c_hex(data->shards.checksum) : "";
}

LogFields describe_run(const Run& run) {
  LogFields fields;
  TrainOptions options = run.options;
  for (const Option& option : train_options(options)) {
    const std::optional<Scalar> value = option.value();
    if (!value || option.key == nullptr) continue;
    if (const std::string* name = std::get_if<std::string>(&*value))
      fields.push_back({option.key, name_as_text(*name)});
    else std::visit([&](const auto& scalar) { fields.push_back({option.key, scalar}); }, *value);
  }
  fields.push_back({train_checksum_key, checksum_of(run.train)});
  fields.push_back({val_checksum_key, checksum_of(run.val)});
  if (!run.model_checksum.empty()) fields.push_back({model_checksum_key, run.model_checksum});
  fields.push_back({"grad_accum_steps", run.grad_accum_steps});
  fields.push_back({"ranks", int64_t(run.ranks.size)});
  fields.push_back({"flops_per_token", run.flops_per_token});
  return fields;
}

// How many checkpoints are kept; 0: all. Amid skipped steps any older one may be the one that is needed.
static int64_t checkpoints_to_keep(const Run& run) { return run.bad_steps_in_row > 0 ? 0 : run.options.keep; }

// Checkpoints that are not kept go first: a disk that they fill has no room for the log, nor for the next one. A run
// that was killed between writing a checkpoint and its line in the log has that line written now.
static void resume_log(Run& run, bool keeps_later) {
  const std::string& out = run.options.out;
  const std::map<int64_t, std::string> checkpoints = checkpoints_in(out);
  try {
    remove_old_checkpoints(out, checkpoints_to_keep(run), run.options.keep_every);
  } catch (const UserError& e) { print_warning(e.what()); }
  const ResumedLog log = run.log.resume(out, run.step, keeps_later);
  run.is_validated = log.is_validated, run.is_sampled = log.is_sampled;
  if (log.num_damaged > 0)
    printf("%s/log.jsonl: %d damaged lines were moved to log.damaged.jsonl\n", out.c_str(), log.num_damaged);
  for (const auto& [step, folder] : checkpoints)
    if (log.checkpoints.count(step) == 0) run.log.write({{"step", step}, {"checkpoint", name_as_text(folder)}});
}

// The name of this machine's CPU; "" where the kernel does not say it.
static std::string cpu_name() {
  std::ifstream cpus("/proc/cpuinfo");
  for (std::string line; std::getline(cpus, line);)
    if (line.compare(0, 10, "model name") == 0 && line.find(": ") != std::string::npos)
      return line.substr(line.find(": ") + 2);
  return "";
}

// The fields of the log that may differ after a resume.
static LogFields describe_process(const Run& run) {
  return {{"host", host_name()},
          {"cpu", cpu_name()},
          {"processors", int64_t(std::thread::hardware_concurrency())},
          {"ranks", int64_t(run.ranks.size)},
          {"gemm_peak", run.gemm_peak},
          {"copy_bandwidth", run.copy_bandwidth}};
}

void open_output(Run& run, const std::string& checkpoint, LogFields description) {
  const TrainOptions& o = run.options;
  if (o.out.empty() || run.ranks.rank > 0) return;
  const std::string config = o.out + "/config.toml";
  make_folders(o.out);
  run.lock.take(o.out);
  // Another run has made the folder, and ended, since this one looked.
  if (checkpoint.empty() && !newest_checkpoint(o.out).empty())
    user_error("-o %s: another process has trained there meanwhile; resume it (-y), or name another folder", o.out);
  remove_unfinished_checkpoints(o.out);
  if (!checkpoint.empty()) {
    const std::vector<std::string> later = set_aside_checkpoints_after(o.out, run.step);
    for (const std::string& name : later) printf("set aside: %s\n", name.c_str());
    resume_log(run, /*keeps_later=*/!later.empty());
  } else {
    run.log.create(o.out);
    if (try_read_file(config) != o.as_toml) set_aside(config);
  }
  // A run that is resumed may have other options than before: config.toml has those of the last process, and the log
  // a description of each, with the step after which it begins.
  write_file_durably(config, o.as_toml);
  description.push_back({"process", describe_process(run)});
  if (checkpoint.empty()) run.log.write({{"run", description}});
  else run.log.write({{"step", run.step}, {"run", description}});
}

static long long num_tokens(const std::unique_ptr<DataLoader>& data) {
  return data ? (long long)data->shards.num_tokens : 0;
}

std::string describe_data(const Run& run) {
  return format("%lld training tokens and %lld to validate with (checksums %s, %s)", num_tokens(run.train),
                num_tokens(run.val), checksum_of(run.train).c_str(), checksum_of(run.val).c_str());
}

// Files of the data that are too short to be used.
static void warn_of_short_files(const Run& run, const char* option, const DataLoader* data, int64_t least_tokens) {
  if (data == nullptr) return;
  std::vector<std::string> files;
  for (const TokenFile& file : data->shards.files)
    if (file.num_tokens < least_tokens) files.push_back(file.path);
  if (files.empty()) return;
  warn(run, "%s %s: %zu of %zu files are not used, for they have fewer than %lld tokens: %s%s", option,
       data->shards.pattern, files.size(), data->shards.files.size(), (long long)least_tokens, files[0],
       files.size() > 1 ? ", ..." : "");
}

// Rows of another length than the run's sequences, as the manifests say that data/tokenize --pack and data/probe leave.
static void warn_of_other_rows(const Run& run, const char* option, const DataLoader* data) {
  if (data == nullptr) return;
  std::set<std::string> folders;
  for (const TokenFile& file : data->shards.files) folders.insert(parent_folder(file.path));
  for (const std::string& folder : folders)
    if (const int64_t rows = row_length_of(folder); rows > 0 && rows != run.T)
      warn(run, "%s %s: the texts lie in rows of %lld tokens, and -t %d cuts them elsewhere; train with -t %lld",
           option, data->shards.pattern, (long long)rows, run.T, (long long)rows);
}

static void warn_of_unusual_options(const Run& run) {
  const TrainOptions& o = run.options;
  if (run.has_memory && o.shuffle)
    warn(run, "--shuffle: with memory the segments of a stream are read one after the other; nothing is shuffled");
  warn_of_short_files(run, "-i", run.train.get(), run.T + 1);
  // With -m 0 validation takes the rest of each file too.
  warn_of_short_files(run, "-j", run.val.get(), o.val_batches == 0 ? 2 : run.T + 1);
  warn_of_other_rows(run, "-i", run.train.get());
  warn_of_other_rows(run, "-j", run.val.get());
  if (run.steps > 0 && o.warmup_steps > run.steps)
    warn(run,
         "-u %lld: the warm-up is longer than the run, which has %lld steps; the learning rate only reaches %g of -l "
         "%g",
         (long long)o.warmup_steps, (long long)run.steps, run.schedule(run.steps), o.learning_rate);
}

void print_start(const Run& run, const std::string& checkpoint, const char* precision) {
  if (run.train) {
    printf("data: %lld training tokens", num_tokens(run.train));
    if (run.val) printf(", %lld validation tokens", num_tokens(run.val));
    printf("; each update: %lld micro-batches of %d x %d tokens%s\n", (long long)run.grad_accum_steps, run.B, run.T,
           run.ranks.size > 1 ? format(" on each of %d ranks", run.ranks.size).c_str() : "");
    if (run.has_memory)
      printf("each row reads a stream of its own: %lld streams of %lld segments\n", (long long)run.train->streams,
             (long long)(run.train->num_sequences / run.train->streams));
  }
  printf("measured: matmuls %.0f GFLOP/s in %s, copies %.1f GB/s\n", run.gemm_peak * 1e-9, precision,
         run.copy_bandwidth * 1e-9);
  if (!checkpoint.empty())
    printf("resumed from %s, at step %lld of %lld\n", checkpoint.c_str(), (long long)run.step, (long long)run.steps);
  fflush(stdout);  // before what stderr has
  warn_of_unusual_options(run);
}

void count_step(Run& run, const StepResult& result) {
  run.step++;
  run.skipped_steps += result.skipped;
  if (result.overflowed) return run.loss_scale->count_overflow();
  run.bad_steps_in_row = result.skipped ? run.bad_steps_in_row + 1 : 0;
  if (run.loss_scale && !result.skipped) run.loss_scale->count_good_update();
}

static void log_step(Run& run, const StepResult& r) {
  const double rate = double(run.tokens_per_step()) / r.seconds;
  LogFields fields = {{"step", run.step},          {"loss", r.loss},
                      {"grad_norm", r.grad_norm},  {"lr", r.learning_rate},
                      {"ms", r.seconds * 1e3},     {"data_ms", r.data_seconds * 1e3},
                      {"tokens_per_second", rate}, {"limit_ms", r.limit_seconds * 1e3}};
  if (r.ponder > 0) fields.push_back({"ponder", r.ponder});
  if (run.loss_scale)
    fields.push_back({"loss_scale", r.loss_scale}), fields.push_back({"good_updates", run.loss_scale->good_updates});
  if (run.has_memory) fields.push_back({"flops_per_token", r.flops_per_token});
  if (r.scored_tokens != run.tokens_per_step()) fields.push_back({"scored_tokens", r.scored_tokens});
  run.log.write(fields);
  if (r.skipped)
    run.log.write({{"step", run.step}, {"skipped_steps", run.skipped_steps}, {"in_a_row", run.bad_steps_in_row}});
}

static std::string ponder_text(double ponder) { return ponder > 0 ? format(" | ponder %.3f", ponder) : ""; }

// Where no token is scored there is no loss.
static std::string loss_text(double loss, int64_t scored_tokens) {
  return scored_tokens > 0 ? format("%.5f", loss) : "-";
}

static std::string progress_text(const Run& run, const StepResult& r) {
  const double rate = double(run.tokens_per_step()) / r.seconds;
  const double left = run.training_seconds / double(run.step - run.first_step) * double(run.steps - run.step);
  std::string text =
      format("step %lld/%lld | loss %s%s | norm %.3f | lr %.2e | %.0f ms | %s tok/s | "
             "%.0f%% of the limit | %.0f%%, %s left",
             (long long)run.step, (long long)run.steps, loss_text(r.loss, r.scored_tokens).c_str(),
             ponder_text(r.ponder).c_str(), r.grad_norm, r.learning_rate, r.seconds * 1e3, count_text(rate).c_str(),
             100 * r.limit_seconds / r.seconds, 100.0 * double(run.step) / double(run.steps), time_text(left).c_str());
  if (run.loss_scale) text += format(" | loss scale %lld", (long long)r.loss_scale);
  if (r.scored_tokens == 0) text += " | no token is scored: the gradients are 0";
  if (r.overflowed)
    text += format(", which fp16 has no room for: nothing was updated, and it becomes %lld",
                   (long long)run.loss_scale->scale);
  else if (r.skipped)
    text += format(" | skipped, nothing was updated: %lld in a row, %lld in all", (long long)run.bad_steps_in_row,
                   (long long)run.skipped_steps);
  return text;
}

void report_step(Run& run, const StepResult& r) {
  log_step(run, r);
  run.training_seconds += r.seconds;
  const bool notable = run.step == run.steps || r.skipped || must_stop(run, r);
  if (on_terminal()) {
    const bool stays = notable || seconds_now() - run.last_line > 10;
    if (stays) run.last_line = seconds_now();
    print_over_progress(progress_text(run, r) + (stays ? "\n" : ""));
  } else if (notable || run.step % 10 == 0 || run.step == run.first_step + 1) {
    print_over_progress(progress_text(run, r) + "\n");
  }
}

bool gives_up(const Run& run) { return run.bad_steps_in_row >= run.options.max_bad_steps; }

void check_progress(const Run& run, const StepResult& result) {
  if (!gives_up(run)) return;
  user_error("step %lld: the loss is %g and the gradient's norm %g; %lld such steps in a row were skipped, and "
             "training stops before the weights take harm (--max-bad-steps); resume from an earlier checkpoint "
             "(--resume-from), or try a lower learning rate (-l) or more warm-up (-u)",
             (long long)run.step, result.loss, result.grad_norm, (long long)run.bad_steps_in_row);
}

void report_validation(Run& run, const Validation& v) {
  LogFields fields = {{"step", run.step}, {"val_loss", v.loss}};
  if (v.scored_tokens == 0) fields.push_back({"val_scored_tokens", v.scored_tokens});
  if (v.ponder > 0) fields.push_back({"val_ponder", v.ponder});
  std::string bits_text, accuracy_text;
  if (const std::optional<double> bits = v.bits_per_byte()) {
    fields.push_back({"val_bits_per_byte", *bits});
    bits_text = format(" | %.5f bits/byte", *bits);
  }
  if (const std::optional<double> accuracy = v.accuracy()) {
    fields.push_back({"val_accuracy", *accuracy / 100});
    accuracy_text = format(" | accuracy %.1f %%", *accuracy);
  }
  run.log.write(fields);
  print_line("val loss %s%s%s%s after step %lld (%lld tokens, %s)\n", loss_text(v.loss, v.scored_tokens), bits_text,
             ponder_text(v.ponder), accuracy_text, (long long)run.step, (long long)v.scored_tokens,
             time_text(v.seconds));
  if (v.scored_tokens == 0)
    warn(run,
         "-j %s: of the %lld tokens that were validated none is scored, by the masks beside them, so that there is no "
         "loss; take more micro-batches (-m) or longer sequences (-t)",
         run.options.val_data, (long long)v.tokens);
  if (!v.is_lost()) return;
  const char* nothing_saved = ": training stops, and no checkpoint of this step is written; resume from an earlier "
                              "checkpoint (--resume-from), or try a lower learning rate (-l) or more warm-up (-u)";
  user_error("the validation loss after step %lld is %g: the weights, or what the model computes from them, have "
             "become NaN or infinite%s",
             (long long)run.step, v.loss, run.step > 0 ? nothing_saved : "; take another model (-e)");
}

bool due(const Run& run, int64_t every) { return every > 0 && (run.step % every == 0 || run.step == run.steps); }

bool must_stop(const Run& run, const StepResult& result) {
  return result.stop_requested || (run.ranks.size == 1 && stop_signal() != 0);
}

bool checkpoint_due(const Run& run, const StepResult& result, bool stopping) {
  const bool due_now = due(run, run.options.checkpoint_every) && (!result.skipped || result.overflowed);
  return !run.options.out.empty() && (run.step == run.steps || stopping || due_now);
}

static std::string token_text(const Run& run, int token) {
  return run.tokenizer && token < run.tokenizer->vocab_size() ? run.tokenizer->token(token) : format("%d ", token);
}

// The text of each token. A character that several tokens make is text of the last of them.
static std::vector<std::string> token_texts(const Run& run, const std::vector<int>& tokens) {
  TextStream stream;
  std::vector<std::string> texts;
  for (int token : tokens) texts.push_back(stream.add(token_text(run, token)));
  texts.back() += stream.finish();
  return texts;
}

void print_sample(Run& run, const std::vector<int>& tokens, const std::vector<float>& ponder) {
  CHECK(ponder.empty() || ponder.size() + 1 == tokens.size());
  std::string text;
  for (size_t i = 1; i < tokens.size(); i++) text += token_text(run, tokens[i]);  // without the end of text before it
  LogFields fields = {{"step", run.step}, {"sample", text}};
  if (!ponder.empty()) {
    fields.push_back({"tokens", token_texts(run, tokens)});
    fields.push_back({"ponder", std::vector<double>(ponder.begin(), ponder.end())});
  }
  run.log.write(fields);
  print_line("--- sample after step %lld\n%s\n---\n", (long long)run.step, printable(text));
}

// ----------------------------------------------------------------------------
// Checkpoints

// The position and the counters, for state.json.
static RunState run_state(const Run& run) {
  RunState state = {run.step, run.train->next_sequence, run.train->num_sequences, run.skipped_steps,
                    run.bad_steps_in_row};
  if (run.loss_scale) state.loss_scale = run.loss_scale->scale, state.good_updates = run.loss_scale->good_updates;
  TrainOptions options = run.options;
  for (const Option& option : train_options(options)) {
    if (option.on_resume == OnResume::ignored) continue;
    const std::optional<Scalar> value = option.value();
    CHECK(value);  // plan_batches has set those without a default
    state.options.push_back({option.key, *value});
  }
  state.options.push_back({train_checksum_key, checksum_of(run.train)});
  if (run.has_memory) state.options.push_back({streams_key, run.train->streams});
  return state;
}

void start_checkpoint(Run& run, const ParameterTable& table, CheckpointContents contents, uint32_t header) {
  const TrainOptions& o = run.options;
  contents.state = run_state(run);
  std::function<bool()> are_written;
  if (table.shard.count > 1) {
    run.shards_are_written = std::make_shared<std::atomic<bool>>(false);
    are_written = [flag = run.shards_are_written] { return flag->load(); };
  }
  if (run.ranks.rank > 0) {
    run.writer.start(run.step, [&o, &table, contents](SaveResult&) {
      write_checkpoint_shard(o.out, contents.state.step, table, contents.m, contents.v);
    });
    return;
  }
  const int64_t keep = checkpoints_to_keep(run);
  run.writer.start(run.step, [&o, &table, contents, keep, shards = OtherShards{header, are_written}](SaveResult& r) {
    r.folder = write_checkpoint(o.out, table, contents, shards);
    try {
      remove_old_checkpoints(o.out, keep, o.keep_every);
    } catch (const UserError& e) { r.warning = e.what(); }
  });
}

void report_unsaved(Run& run, const std::string& error) {
  if (run.ranks.rank > 0) return;
  run.writer.start(run.step, [error](SaveResult&) { throw UserError(error); });
  report_saved(run, /*wait=*/true);
}

bool is_writing_shard(const Run& run) { return run.shards_are_written && run.ranks.rank > 0 && run.writer.is_busy(); }

void count_shards_as_written(Run& run) {
  if (run.shards_are_written) *run.shards_are_written = true;
  run.shards_are_written.reset();
}

// Rank 0's errors are the run's.
static void print_error_of_rank(const Ranks& ranks, const std::string& error) {
  print_error(ranks.rank > 0 ? rank_name(ranks) + ": " + error : error);
}

void report_saved(Run& run, bool wait) {
  const WatchdogPause pause(run.watchdog);
  const std::optional<SaveResult> saved = run.writer.result(wait);
  if (!saved) return;
  run.save_failed = !saved->error.empty();
  if (!saved->folder.empty()) {
    run.log.write({{"step", saved->step},
                   {"checkpoint", name_as_text(saved->folder)},
                   {"stall_ms", run.stall_seconds * 1e3},
                   {"write_ms", saved->seconds * 1e3}});
    print_line("saved %s (training waited %.3f s, written in %.3f s beside it)\n", saved->folder, run.stall_seconds,
               saved->seconds);
  }
  if (!saved->warning.empty()) print_line(""), print_warning(saved->warning);
  if (!run.save_failed) return;
  run.log.write({{"step", saved->step}, {"save_error", saved->error}});
  if (run.options.stop_on_save_error)
    user_error("%s; training stops, earlier checkpoints are as they were (--stop-on-save-error)", saved->error);
  print_line("");
  print_error_of_rank(run.ranks, saved->error + "; earlier checkpoints are as they were");
}

void finish_output(Run& run) {
  // After an error of this rank alone there is no step left in which the others would tell that their shards are
  // written: they get ten seconds.
  if (run.shards_are_written && run.ranks.rank == 0) sleep(10);
  count_shards_as_written(run);
  report_saved(run, /*wait=*/true);
  run.log.finish();
}

void check_data_error(const Run& run) {
  if (!run.data_error.empty())
    user_error("%s; the run ended after step %lld of %lld%s", run.data_error, (long long)run.step, (long long)run.steps,
               run.options.out.empty() || run.step == 0 ? "" : ", of which there is a checkpoint; -y resumes");
}

void end_rank(Run& run, const std::string& error) {
  const Ranks& ranks = run.ranks;
  const int signal = stop_signal();
  run.watchdog.stop();
  sleep(error.empty() ? 3 : ranks.rank > 0 ? 1 : 0);
  if (!error.empty() && stop_signal() == signal) print_error_of_rank(ranks, error);
  fflush(stdout);
  _exit(1);
}

int finish_run(Run& run, double seconds) {
  if (run.save_failed) user_error("the last checkpoint of the run could not be written");
  if (run.step < run.steps || run.is_cut_short) {
    print_line("stopped by %s after step %lld of %lld%s%s\n", signal_name(stop_signal()), (long long)run.step,
               (long long)run.steps, run.is_cut_short ? ", before the validation or sample that is due then" : "",
               run.options.out.empty() ? "" : "; -y resumes");
    if (run.ranks.rank > 0)
      return 0;  // rank 0's status counts: mpirun would end it in mid-sentence if another failed first
    return 128 + (stop_signal() != 0 ? stop_signal() : SIGTERM);  // where only another rank had one
  }
  print_line("done: %lld steps, %s in all, %s of it training\n", (long long)(run.step - run.first_step),
             time_text(seconds), time_text(run.training_seconds));
  return 0;
}

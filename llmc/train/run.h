// A training run, whatever it trains: the options, the data and the vocabulary, how far it has come, its log and its
// checkpoints. What it knows of the model is its vocabulary, its context length and, for files, its table of
// parameters.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>
#include "background_writer.h"
#include "llmc/ranks/ranks.h"
#include "llmc/ranks/watchdog.h"
#include "llmc/base/error.h"
#include "llmc/base/message.h"
#include "llmc/formats/checkpoint.h"
#include "llmc/text/dataloader.h"
#include "llmc/text/scored_text.h"
#include "llmc/text/tokenizer.h"
#include "logger.h"
#include "loss_scale.h"
#include "options.h"
#include "run_lock.h"
#include "schedule.h"

struct Run {
  TrainOptions options;
  Ranks ranks;
  std::unique_ptr<DataLoader> train, val;  // null without -i, -j
  std::optional<Tokenizer> tokenizer;      // what the model's tokens stand for, if that is known
  std::string tokenizer_json;              // as checkpoints carry it, on rank 0; "" without one
  std::vector<int> prompt;                 // tokens that samples begin with
  std::string model_checksum;              // of the weights in the folder of -e, on rank 0; "" without one
  Schedule schedule;
  RunLog log;
  int B = 0, T = 0;
  bool has_memory = false;                          // rows are streams (DataLoader::streams)
  int64_t grad_accum_steps = 1;                     // micro-batches of each rank in an update
  int64_t step = 0, steps = 0;                      // steps done, and steps to do in all
  int64_t skipped_steps = 0, bad_steps_in_row = 0;  // steps without an update: all, and the last in a row
  std::optional<LossScale> loss_scale;              // of the next step, in fp16
  double gemm_peak = 0, copy_bandwidth = 0;         // FLOP/s and bytes/s of one rank, measured
  double flops_per_token = 0;                       // of the model; with segment memory, the mean over the run
  std::string data_error;                           // why tokens cannot be loaded any more; "" if they can
  // progress
  double training_seconds = 0;
  int64_t first_step = 0;
  double last_line = 0;       // when a line of progress last stayed on the terminal
  bool is_validated = false;  // by an earlier process, after the step that the run resumes from
  bool is_sampled = false;    // likewise; on rank 0
  bool is_cut_short = false;  // stopped before the validation or the sample that was due after the step
  RunLock lock;               // of the output folder, on rank 0
  // checkpoints
  double stall_seconds = 0;  // for which training waited for the last checkpoint
  bool save_failed = false;  // the last checkpoint whose outcome is known could not be written
  // Whether all ranks have written their shards of the checkpoint that is being written; null if none is, or it has no
  // shards.
  std::shared_ptr<std::atomic<bool>> shards_are_written;
  // Declared last, and so destroyed first: their threads use what is above.
  Watchdog watchdog;
  BackgroundWriter writer;  // of checkpoints

  int64_t num_micro_batches() const { return grad_accum_steps * ranks.size; }  // in an update
  int64_t tokens_per_step() const { return num_micro_batches() * B * T; }
};

struct StepResult {
  double loss;  // NaN if no token is scored
  double grad_norm, learning_rate, seconds;
  double ponder;            // with `act` the cycles a token, Graves' ponder time N + R, in the mean; else 0
  double data_seconds;      // the part of `seconds` that was spent waiting for tokens
  double flops_per_token;   // with segment memory in the segments that the step has computed
  double limit_seconds;     // the least that the step could take, by what was measured
  int64_t scored_tokens;    // of all ranks: tokens whose losses count
  bool skipped;             // loss or norm not finite: nothing was updated
  bool stop_requested;      // some rank asked to stop when it queued the step's update,
  bool shards_are_written;  //   and none was writing a shard of a checkpoint
  bool overflowed = false;  // skipped only because of the loss scale
  int64_t loss_scale = 0;   // in fp16; else 0
};

// ----------------------------------------------------------------------------
// Before anything is written: everything that can be wrong is found here, as a UserError

// Sets B, T and grad_accum_steps to what the options say of batches; options that were not given get their values.
// `context_length`: the model's; `from_folder`: it cannot be changed; `has_memory`: its rows are streams, in segments
// of that length.
void plan_batches(Run& run, int context_length, bool from_folder, bool has_memory);

// Opens the data, chooses the vocabulary (`model_folder` may have one; "": there is none) and fixes the number of
// steps. With segment memory (plan_batches) both data are cut into streams, one for each row of a micro-batch over all
// ranks.
void open_data(Run& run, const std::string& model_folder, int vocab_size);

// How many segments of a stream of the training data the run computes in an epoch; without segment memory one.
int64_t segments_of_stream(const Run& run);

// The checkpoint that the options ask to resume from, after every byte of it has been verified; "" for a run that
// starts anew. Takes the lock of the output folder, if that exists, before it looks; with --dry-run it only looks.
std::string checkpoint_to_resume(Run& run);

// ----------------------------------------------------------------------------
// Output

// Takes over from `checkpoint`, if that is not "", how far the run has come. Throws UserError if it was written with
// other training data, another value of an option that must stay, or another number of streams; with --same-options, or
// if no step is left to do, also if anything else in `description` (describe_run, and what is said of the model) was
// another; and with --same-options for a finished log without a checkpoint. Warns of options that may change (OnResume
// in option.h), and of a learning rate that jumps.
void resume_progress(Run& run, const std::string& checkpoint, const LogFields& description);

// The folder of -o: config.toml, and a log that begins with `description` of a new run, or has it after the lines of
// what was done before the step of `checkpoint`; and with it what this process is and its machine.
void open_output(Run& run, const std::string& checkpoint, LogFields description);

// Beside the model's fields: what the log says of a run, the options and the data's checksums among them.
LogFields describe_run(const Run& run);

// This rank's data, for comparison with the others': how many tokens, and their checksums.
std::string describe_data(const Run& run);

// The lines before the first step: the data, what was measured in `precision`, where the run resumes; and warnings.
void print_start(const Run& run, const std::string& checkpoint, const char* precision);

// Counts a step, and whether it was skipped.
void count_step(Run& run, const StepResult& result);

// The step's line in the log and on the terminal. On a terminal steps overwrite each other, and one stays every few
// seconds; elsewhere every tenth step has a line.
void report_step(Run& run, const StepResult& result);

// Whether too many steps in a row were skipped.
bool gives_up(const Run& run);

// Throws UserError if the run gives up.
void check_progress(const Run& run, const StepResult& result);

struct Validation {
  double loss, ponder;            // as in a step's result
  int64_t scored_tokens, tokens;  // whose losses count, of how many
  int64_t correct;                // of how many scored ones the logit is the largest
  double text_nats, text_bytes;   // of the scored tokens that stand for text; 0 without a vocabulary
  double seconds;

  // Whether the loss of scored tokens is not finite: the weights may be what is wrong.
  bool is_lost() const { return scored_tokens > 0 && !std::isfinite(loss); }
  // The loss in bits per byte of text, which does not depend on the vocabulary; none without one.
  std::optional<double> bits_per_byte() const {
    if (text_bytes == 0) return {};
    return ::bits_per_byte(text_nats, text_bytes);
  }
  // In percent, where some tokens are not scored; else none.
  std::optional<double> accuracy() const {
    if (scored_tokens == 0 || scored_tokens == tokens) return {};
    return 100 * double(correct) / double(scored_tokens);
  }
};

// The line of a validation in the log and on the terminal. Throws UserError if it is lost, so that no checkpoint
// of these weights may replace another.
void report_validation(Run& run, const Validation& v);

// True after every `every`-th step and after the last one; never if `every` is 0.
bool due(const Run& run, int64_t every);

// True if the run is to stop after this step. A process alone looks at its signals at any time; ranks go by what they
// told each other in the step.
bool must_stop(const Run& run, const StepResult& result);

// True if a checkpoint is due. Amid skipped steps only the run's last one is: these weights may be what is wrong,
// unless it was the scale of fp16's gradients.
bool checkpoint_due(const Run& run, const StepResult& result, bool stopping);

// Prints and logs the prompt and its continuation, `tokens`, as text of the vocabulary; as numbers without one. The log
// gets `ponder`, too, unless it is empty: the cycles of all tokens but the last, beside each token's text.
void print_sample(Run& run, const std::vector<int>& tokens, const std::vector<float>& ponder);

// ----------------------------------------------------------------------------
// Checkpoints

// Begins to write a checkpoint on another thread. `contents` (without the state and the vocabulary, which are added)
// stay as they are until report_saved has told of it. Every rank with a shard calls it, when rank 0 has laid the
// checkpoint out, which `header` is of; rank 0 writes the rest.
void start_checkpoint(Run& run, const ParameterTable& table, CheckpointContents contents, uint32_t header);

// Takes the place of start_checkpoint where rank 0 could not lay the checkpoint out, and says why.
void report_unsaved(Run& run, const std::string& error);

// Whether this rank is writing its shard of a checkpoint. Always false on rank 0, which waits for the others' shards.
bool is_writing_shard(const Run& run);

// All ranks have written their shards, or failed: rank 0 completes the checkpoint.
void count_shards_as_written(Run& run);

// Says what became of the last checkpoint, if that is new; with `wait`, once it is. Throws UserError if it could not be
// written and the options say to stop then.
void report_saved(Run& run, bool wait);

// Waits for the last checkpoint and the log, whatever ended the training.
void finish_output(Run& run);

// Throws UserError if this rank's data have ended the run.
void check_data_error(const Run& run);

// Ends this process, one of several ranks, because of an error. Most errors are all ranks', and rank 0 prints them.
// Another rank prints its own a second later, after its name, unless its launcher has ended it by then. It prints none
// if the error is "", which means that another rank prints it.
[[noreturn]] void end_rank(Run& run, const std::string& error);

// The program's last line and exit status: 0, or 128 and the signal's number if the run was stopped by one. Throws
// UserError if the last checkpoint could not be written.
int finish_run(Run& run, double seconds);

// Warns of what a run does as it was asked to, but maybe not as it was meant: a line on stderr, from rank 0 alone.
template <class... Args>
void warn(const Run& run, const char* fmt, const Args&... args) {
  if (run.ranks.rank == 0) print_warning(format(fmt, printf_argument(args)...));
}

// Resuming: what a run continues from, and how its options and data differ from the saved ones.
#include <cstdint>
#include <exception>
#include <string>
#include <variant>
#include <vector>
#include "llmc/base/error.h"
#include "llmc/base/number.h"
#include "option.h"
#include "run.h"
#include "settings.h"

// "peak learning rate (-l): 0.001, and now 0.01; seed (--seed): 1, and now 2".
static std::string list_of(const std::vector<SettingDifference>& differences) {
  std::string text;
  for (const SettingDifference& d : differences)
    text += (text.empty() ? "" : "; ") + d.name + ": " + d.before + ", and now " + d.now;
  return text;
}

// Warns if the learning rate of the next step is not what the schedule of the earlier process gives it: with another -x
// all schedules but `constant` change.
static void warn_of_jump(const Run& run, const Settings& before, const std::string& checkpoint) {
  Schedule schedule = run.schedule;
  try {
    schedule.kind = std::get<std::string>(before.at("schedule"));
    schedule.final_fraction = parse_number<double>(text_of(before.at("final_fraction")));
    schedule.warmup_steps = std::get<int64_t>(before.at("warmup_steps"));
    schedule.total_steps = std::get<int64_t>(before.at("steps"));
  } catch (const std::exception&) { return; }  // an older version of this program wrote less down
  const int64_t next = run.step + 1;
  if (run.step == run.steps || schedule(next) == run.schedule(next)) return;
  warn(run,
       "-y: the learning rate jumps: by the schedule of %s (%s, -x %lld) step %lld would have %.3g, and by this one "
       "(%s, -x %lld) it has %.3g; constant can be trained for longer without that, and wsd until it decays",
       checkpoint, schedule.kind, (long long)schedule.total_steps, (long long)next, schedule(next), run.schedule.kind,
       (long long)run.steps, run.schedule(next));
}

// The streams that a run with memory had which wrote a checkpoint. Throws UserError if now they are others, unless the
// options say that the memory begins empty.
static int64_t saved_streams(const Run& run, const RunState& saved, const std::string& checkpoint) {
  const int64_t streams = run.train->streams;
  int64_t before = streams;
  for (const auto& [key, value] : saved.options)
    if (const int64_t* number = std::get_if<int64_t>(&value); key == streams_key && number != nullptr && *number > 0)
      before = *number;
  if (before != streams && !run.options.reset_memory)
    user_error("-y: the memory in %s is of %lld streams of text (ranks * -b), and now there are %lld; give as many, or "
               "--reset-memory: it is empty then",
               checkpoint, (long long)before, (long long)streams);
  return before;
}

// Without a checkpoint, as in an archive of results, a finished log says what its run was made with.
static void compare_with_log(const Run& run, const OptionTable& table, const Settings& now) {
  const std::string& out = run.options.out;
  if (!run.options.same_options || !log_is_finished(out)) return;
  const std::vector<SettingDifference> found = differences(table, recorded_settings(out, nullptr), now);
  if (!found.empty())
    user_error("--same-options: %s/log.jsonl is of a run with other ones: %s; give the same, or start anew in another "
               "folder",
               out, list_of(found));
}

// Whether a difference means that the checkpoint is of another run.
static bool is_refused(const SettingDifference& d) {
  return d.key == train_checksum_key || (d.option != nullptr && d.option->on_resume == OnResume::refused);
}

static void warn_of_difference(const Run& run, const SettingDifference& d, const std::string& checkpoint) {
  if ((d.option != nullptr && d.option->on_resume == OnResume::warned_of) || d.key == "precision")
    warn(run, "-y: %s was written with another %s: %s; training continues with %s", checkpoint, d.name, d.before,
         d.now);
  const bool has_other_data = d.key == val_checksum_key && d.before != "none" && d.now != "none",
             reads_by_batches = run.val && run.options.val_batches != 0;
  if (has_other_data || d.key == "val_batches" || (d.key == "micro_batch" && reads_by_batches))
    warn(run, "-y: %s: what validation reads is not the same as before: %s; its losses cannot be compared", checkpoint,
         list_of({d}));
}

void resume_progress(Run& run, const std::string& checkpoint, const LogFields& description) {
  TrainOptions options = run.options;
  const OptionTable table = train_options(options);
  if (checkpoint.empty()) return compare_with_log(run, table, settings_of(description));
  const RunState saved = read_run_state(checkpoint);
  if (checkpoint_step(run.options.out, checkpoint) != saved.step)
    user_error("-y: %s is of step %lld, by its state.json; give it that name again", checkpoint, (long long)saved.step);
  const DataLoader& data = *run.train;
  int64_t num_sequences = data.num_sequences, next_sequence = saved.next_sequence;
  if (run.has_memory) {
    num_sequences = data.sequences_of_streams(saved_streams(run, saved, checkpoint));
    next_sequence = next_sequence / data.streams * data.streams;  // at the beginning of segments, if streams are others
  }
  const Settings before = recorded_settings(run.options.out, &saved);
  const std::vector<SettingDifference> found = differences(table, before, settings_of(description));
  for (const SettingDifference& d : found)
    if (is_refused(d) && d.option != nullptr)
      user_error("-y: %s was written with another %s: %s; now it is %s; give the same, or start anew in another folder",
                 checkpoint, d.name, d.before, d.now);
  if (saved.num_sequences != num_sequences)
    user_error("-y: %s was written with other training data (-i): of %lld sequences, and now there are %lld; give the "
               "same, or start anew in another folder",
               checkpoint, (long long)saved.num_sequences, (long long)num_sequences);
  for (const SettingDifference& d : found)
    if (is_refused(d))
      user_error("-y: %s was written with other training data (-i), of as many sequences: their checksum was %s, and "
                 "now it is %s; give the same, or start anew in another folder",
                 checkpoint, d.before, d.now);
  if (saved.step > run.steps)
    user_error("-y: %s is past step %lld, the last one by -x; ask for more steps", checkpoint, (long long)run.steps);
  if (!found.empty() && run.options.same_options)
    user_error("--same-options: %s was written with other ones: %s; give the same, or start anew in another folder",
               checkpoint, list_of(found));
  if (!found.empty() && saved.step == run.steps)
    user_error("-y: %s has done all of its steps, and none is left for what has changed: %s; give the same, ask for "
               "more steps (-x), or start anew in another folder",
               checkpoint, list_of(found));
  run.step = saved.step;
  run.skipped_steps = saved.skipped_steps;
  run.bad_steps_in_row = saved.bad_steps_in_row;
  if (run.loss_scale && saved.loss_scale > 0) run.loss_scale = {saved.loss_scale, saved.good_updates};
  run.train->next_sequence = next_sequence;
  for (const SettingDifference& d : found) warn_of_difference(run, d, checkpoint);
  warn_of_jump(run, before, checkpoint);
}

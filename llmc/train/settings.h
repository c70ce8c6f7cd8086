// What a run was made with: its options, its model, its data by their checksums, as its log and its checkpoints have
// them; and which of these differ for a process that resumes the run.
#pragma once
#include <map>
#include <string>
#include <vector>
#include "llmc/formats/checkpoint.h"
#include "llmc/base/scalar.h"
#include "logger.h"
#include "option.h"

// Checksums in a description, of the data and of the weights to start from; and the training data's in a checkpoint's
// state.
inline const char model_checksum_key[] = "model_checksum";
inline const char train_checksum_key[] = "train_checksum";
inline const char val_checksum_key[] = "val_checksum";
inline const char streams_key[] = "streams";  // in a checkpoint's state: DataLoader::streams

// Settings by their keys in a log's description of a run.
using Settings = std::map<std::string, Scalar>;

// The settings in a description.
Settings settings_of(const LogFields& description);

// The defaults of the options that change the training. If a record lacks one of them, the program's version did not
// have the option yet, and behaved so.
const Settings& default_settings();

// The settings of the run in folder `out` up to a step: those in its log, if that can be read, replaced by those in the
// checkpoint of that step where it has them, and default_settings() where neither has. `saved` is null without a
// checkpoint; the step is the log's last one then.
Settings recorded_settings(const std::string& out, const RunState* saved);

// Whether the log in `out` has all steps that its run was to do.
bool log_is_finished(const std::string& out);

struct SettingDifference {
  std::string key;
  const Option* option;     // which decides on it; null if no option alone does
  std::string name;         // "peak learning rate (-l)"
  std::string before, now;  // both values; "none" for an empty text
};

// The settings that both have with different values. Those that do not change results are left out: names of files, the
// machine, and derived_fields.
std::vector<SettingDifference> differences(const OptionTable& options, const Settings& before, const Settings& now);

// What a run leaves behind, as pages show it and as a run that is resumed compares its options with: read from
// OUT/log.jsonl and OUT/config.toml, while the run trains, too; and from OUT/positions.csv, if evaluate_gpt2_sla
// --positions has written it.
#pragma once
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>
#include "position_losses.h"

// Values that the log has not, or as null because they were not finite, are NaN.
struct TrainPoint {
  int64_t step;
  double loss, grad_norm, learning_rate;
  double step_seconds;  // of this step
  double tokens_per_second;
  double limit_share;      // the least time that the step could take, by what the machine reaches, of its time; 0 to 1
  double seconds, tokens;  // of all steps up to this one
  double ponder;           // with `act` the cycles a token; else NaN
  bool is_scored = true;   // whether some tokens are: without one there is no loss
};

struct ValPoint {
  int64_t step;
  double loss;
  double seconds, tokens;  // of the training steps before it
  double ponder;           // as of a training step
  double accuracy;         // the share of scored tokens that got the largest logit; only where masks say what is scored
  bool is_scored = true;   // as of a training step
  double bits_per_byte = NAN;  // of the text that the tokens stand for; only where the run knew their vocabulary
};

struct Sample {
  int64_t step;
  std::string text;
  // With `act` the text of each token, with the end of text that they begin with, and the cycles of all tokens but the
  // last; else both are empty.
  std::vector<std::string> tokens = {};
  std::vector<double> ponder = {};
};

// The fields of a description that follow from the rest of it, and so say nothing more about what differs.
inline const std::set<std::string> derived_fields = {"num_parameters", "flops_per_token", "kv_bytes_per_token",
                                                     "memory"};

// What the log says of the run from a step on.
struct RunPart {
  int64_t step;                        // after which a process began, or resumed
  nlohmann::ordered_json description;  // of what it was told to do
};

struct RunHistory {
  std::string name;                      // the folder, as it was given
  nlohmann::ordered_json description;    // the last part's; an empty object if there is none
  std::vector<RunPart> parts;            // in the order of the log
  nlohmann::ordered_json process;        // the last process that trained: its machine, and its GEMM rate
  std::string options;                   // config.toml
  std::vector<TrainPoint> steps;         // ascending, each step once
  std::vector<ValPoint> validations;     // ascending, each step once
  std::vector<Sample> samples;           // ascending, each step once
  std::vector<PositionRange> positions;  // losses by position in the context; empty where nobody has measured them
  bool has_saved = false;                // a checkpoint, as a line says
  int64_t num_repeated = 0;       // steps logged twice, because a run was resumed before them: the later ones count
  int64_t num_unreadable = 0;     // lines that are not valid, but for an incomplete last one
  bool ends_in_mid_line = false;  // the last line is incomplete, as when a process was killed

  // The description by which a step was done.
  const nlohmann::ordered_json& description_of(int64_t step) const;
  // A number of the description; `otherwise` if it has none.
  double number(const char* key, double otherwise) const;
  int64_t planned_steps() const { return int64_t(number("steps", 0)); }
  int64_t last_step() const { return steps.empty() ? 0 : steps.back().step; }
  bool is_finished() const {
    return (!steps.empty() || description.contains("steps")) && last_step() >= planned_steps();
  }
  double tokens() const { return steps.empty() ? 0 : steps.back().tokens; }
  double seconds() const { return steps.empty() ? 0 : steps.back().seconds; }
  // Finished, and without the validation that would follow the last step.
  bool lacks_validation() const {
    return is_finished() && !validations.empty() && validations.back().step < last_step();
  }
  // The last validation's number; NaN if there is none, or that of a finished run is of an earlier step.
  double final(double ValPoint::*what) const {
    return validations.empty() || lacks_validation() ? NAN : validations.back().*what;
  }
  double final_loss() const { return final(&ValPoint::loss); }
  std::vector<int64_t> steps_not_finite() const;  // steps that had tokens to score, and a loss or norm not finite
};

// The files of folder `out` that read_run reads.
std::vector<std::string> files_of_run(const std::string& out);

// Reads folder `out`. Throws UserError if it has no log, or losses by position that cannot be read, if they are asked
// for.
RunHistory read_run(const std::string& out, bool with_positions = true);
